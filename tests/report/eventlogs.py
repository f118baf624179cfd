"""Event logs for the tests, in the words that HTCondor writes (seen in 23.9 and 25.14)."""

from __future__ import annotations

import datetime

START = datetime.datetime(2026, 9, 1, 10, 0, 0)

_USAGE = """\t\tUsr 0 00:00:00, Sys 0 00:00:00  -  Run Remote Usage
\t\tUsr 0 00:00:00, Sys 0 00:00:00  -  Run Local Usage
"""
_TOTAL_USAGE = """\t\tUsr 0 00:00:00, Sys 0 00:00:00  -  Total Remote Usage
\t\tUsr 0 00:00:00, Sys 0 00:00:00  -  Total Local Usage
"""
_RUN_BYTES = """\t100  -  Run Bytes Sent By Job
\t200  -  Run Bytes Received By Job
"""
_TOTAL_BYTES = """\t100  -  Total Bytes Sent By Job
\t200  -  Total Bytes Received By Job
"""

# The text of one event of every documented kind, after the header's time.
EVERY_KIND = {
    0: "Job submitted from host: <127.0.0.1:9618?addrs=127.0.0.1-9618>\n    DAG Node: n0\n",
    1: "Job executing on host: <127.0.0.1:9618>\n\tSlotName: slot1_1@h\n\tCpus = 1\n",
    2: "(1) Job file not executable.\n",
    3: "Job was checkpointed.\n\tUsr 0 00:00:00, Sys 0 00:00:00  -  Run Remote Usage\n"
    "\tUsr 0 00:00:00, Sys 0 00:00:00  -  Run Local Usage\n"
    "\t0  -  Run Bytes Sent By Job For Checkpoint\n",
    4: f"Job was evicted.\n\t(0) CPU times\n{_USAGE}{_RUN_BYTES}",
    5: "Job terminated.\n\t(1) Normal termination (return value 0)\n"
    f"{_USAGE}{_TOTAL_USAGE}{_RUN_BYTES}{_TOTAL_BYTES}",
    6: "Image size of job updated: 12345\n\t12  -  MemoryUsage of job (MB)\n",
    7: f"Shadow exception!\n\tthe shadow died\n{_RUN_BYTES}",
    8: "a generic text\n",
    9: "Job was aborted.\n\tvia condor_rm (by user u)\n",
    10: "Job was suspended.\n\tNumber of processes actually suspended: 2\n",
    11: "Job was unsuspended.\n",
    12: "Job was held.\n\tbecause\n\tCode 1 Subcode 0\n",
    13: "Job was released.\n\tbecause\n",
    14: "Node 3 executing on host: <127.0.0.1:1>\n",
    15: "Node 3 terminated.\n\t(1) Normal termination (return value 0)\n"
    f"{_USAGE}{_TOTAL_USAGE}"
    "\t0  -  Run Bytes Sent By Node\n\t0  -  Run Bytes Received By Node\n"
    "\t0  -  Total Bytes Sent By Node\n\t0  -  Total Bytes Received By Node\n",
    16: "POST Script terminated.\n\t(1) Normal termination (return value 0)\n    DAG Node: n0\n",
    17: "Job submitted to Globus\n    RM-Contact: rm\n",
    18: "Globus job submission failed!\n    Reason: because\n",
    19: "Globus Resource Back Up\n    RM-Contact: rm\n",
    20: "Detected Down Globus Resource\n    RM-Contact: rm\n",
    21: "Error from starter on slot1@h:\n\tsomething failed\n\tCode 13 Subcode 22\n",
    22: "Job disconnected, attempting to reconnect\n    Socket closed unexpectedly\n"
    "    Trying to reconnect to slot1@h <127.0.0.1:1>\n",
    23: "Job reconnected to slot1@h\n    startd address: <127.0.0.1:1>\n"
    "    starter address: <127.0.0.1:2>\n",
    24: "Job reconnection failed\n    JobLeaseDuration (2400 seconds) expired\n"
    "    Can not reconnect to slot1@h, rescheduling job\n",
    25: "Grid Resource Back Up\n    GridResource: g\n",
    26: "Detected Down Grid Resource\n    GridResource: g\n",
    27: "Job submitted to grid resource\n    GridResource: g\n    GridJobId: 1\n",
    28: "Job ad information event triggered.\nProc = 0\nSize = 12\n",
    29: "The job's remote status is unknown\n",
    30: "The job's remote status is known again\n",
    31: "Job is performing stage-in of input files\n",
    32: "Job is performing stage-out of output files\n",
    33: "Changing job attribute JobPrio from 0 to 1\n",
    34: "PRE script return value is PRE_SKIP value\n    DAG Node: n0\n",
    35: "Cluster submitted from host: <127.0.0.1:1>\n",
    36: "Cluster removed\n\tMaterialized 2 jobs from 2 items.\tComplete\n",
    37: "Job Materialization Paused\n\tbecause\n\tPauseCode 1\n",
    38: "Job Materialization Resumed\n\tbecause\n",
    39: "None\n",
    40: "Started transferring input files\n\tTransferring to host: <127.0.0.1:1>\n",
    41: "Bytes reserved: 100\n\tReservation Expiration: 1790000000\n"
    "\tReservation UUID: u\n\tTag: t\n",
    42: "Reservation UUID: u\n",
    43: "Bytes: 100\n\tChecksum Value: a\n\tChecksum Type: sha256\n\tUUID: u\n",
    44: "Checksum Value: a\n\tChecksum Type: sha256\n\tTag: t\n",
    45: "Bytes: 100\n\tChecksum Value: a\n\tChecksum Type: sha256\n\tTag: t\n",
    46: "Dataflow job was skipped.\n\tbecause\n",
    47: "Common files event: started\n",
}


def write_event(kind: int, body: str, job: str = "100.000.000", at_s: float = 0.0) -> str:
    """One event with its header and end line, at_s seconds after START."""
    when = START + datetime.timedelta(seconds=at_s)
    return f"{kind:03d} ({job}) {when:%Y-%m-%d %H:%M:%S} {body}...\n"


class LogWriter:
    """Writes the log of one job: each call adds an event at its time."""

    def __init__(self, job: str = "100.000.000") -> None:
        self.job = job
        self.text = ""
        self.add(0, "Job submitted from host: <127.0.0.1:9618?addrs=127.0.0.1-9618>\n", 0)

    def add(self, kind: int, body: str, at_s: float) -> LogWriter:
        self.text += write_event(kind, body, self.job, at_s)
        return self

    def transfer(self, word: str, at_s: float) -> LogWriter:
        """word: 'Started input', 'Finished input', 'Started output', 'Finished output'."""
        verb, what = word.split()
        return self.add(40, f"{verb} transferring {what} files\n", at_s)

    def queue_input(self, at_s: float) -> LogWriter:
        return self.add(40, "Entered queue to transfer input files\n", at_s)

    def execute(self, at_s: float, site: str = "SITE-A", gpu: str = "NVIDIA A100") -> LogWriter:
        properties = f'\tGLIDEIN_ResourceName = "{site}"\n' if site else ""
        properties += f'\tGPUs_DeviceName = "{gpu}"\n'
        body = f"Job executing on host: <127.0.0.1:1>\n\tSlotName: slot1_1@host1\n{properties}"
        return self.add(1, body, at_s)

    def message(self, at_s: float, text: str, word: str = "Error") -> LogWriter:
        return self.add(21, f"{word} from starter on slot1_1@host1:\n\t{text}\n", at_s)

    def stall(self, at_s: float) -> LogWriter:
        return self.message(at_s, "Input File transfer stalled for 3600 seconds").evict(at_s)

    def evict(self, at_s: float, reason: str = "Job vacated by schedd") -> LogWriter:
        body = f"Job was evicted. Code 1022 Subcode 0\n\t(0) CPU times\n{_USAGE}{_RUN_BYTES}"
        return self.add(4, f"{body}\tReason: {reason}\n", at_s)

    def requeue(self, at_s: float, code: int) -> LogWriter:
        body = f"Job was evicted.\n\t(0) Job terminated and was requeued\n{_USAGE}{_RUN_BYTES}"
        return self.add(4, f"{body}\t(1) Normal termination (return value {code})\n", at_s)

    def hold(self, at_s: float, code: int, subcode: int = 0, reason: str = "why") -> LogWriter:
        return self.add(12, f"Job was held.\n\t{reason}\n\tCode {code} Subcode {subcode}\n", at_s)

    def release(self, at_s: float) -> LogWriter:
        return self.add(13, "Job was released.\n\tThe PeriodicRelease expression\n", at_s)

    def remove(self, at_s: float) -> LogWriter:
        return self.add(9, "Job was aborted.\n\tvia condor_rm (by user u)\n", at_s)

    def terminate(self, at_s: float, code: int = 0, time_execute_s: int = 5) -> LogWriter:
        body = f"Job terminated.\n\t(1) Normal termination (return value {code})\n"
        return self._end(at_s, body, time_execute_s)

    def kill(self, at_s: float, signal: int) -> LogWriter:
        body = (
            f"Job terminated.\n\t(0) Abnormal termination (signal {signal})\n\t(0) No core file\n"
        )
        return self._end(at_s, body, 5)

    def _end(self, at_s: float, body: str, time_execute_s: int) -> LogWriter:
        usage = f"{_USAGE}{_TOTAL_USAGE}{_RUN_BYTES}{_TOTAL_BYTES}"
        table = (
            "\tPartitionable Resources :    Usage  Request Allocated \n"
            "\t   Cpus                 :                 1         1 \n"
            f"\t   TimeExecute (s)      :  {time_execute_s:7d}                     \n"
            f"\t   TimeSlotBusy (s)     :  {time_execute_s + 2:7d}                     \n"
        )
        return self.add(5, body + usage + table, at_s)
