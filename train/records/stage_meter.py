"""What a stage (fetch, index, extract, train, evaluate) used: CPU, memory, I/O, GPU (no torch).

From /proc itself: a fetch and a grid slot need no package beyond the standard library, and psutil
lists all processes of a node to find the children of one.
"""

from __future__ import annotations

import logging
import os
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from train.records.record import STAGES_FILE, append_line

log = logging.getLogger("trainyard")

SAMPLE_S = 0.5
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Usage(NamedTuple):
    """What this process and its descendants, running or ended, have used so far."""

    cpu_s: float
    bytes_read: int
    bytes_written: int

    def since(self, before: Usage) -> Usage:
        """The difference, at least 0: a child that was not waited for vanishes with its usage."""
        return Usage(
            max(0.0, self.cpu_s - before.cpu_s),
            max(0, self.bytes_read - before.bytes_read),
            max(0, self.bytes_written - before.bytes_written),
        )


class StageMeter:
    """Samples this process and its children; `extra` is for the caller's own figures."""

    def __init__(self) -> None:
        self.extra: dict[str, Any] = {}
        self._peak_rss = 0
        self._gpu_pct: list[float] = []
        self._peak_gpu_memory = 0
        self._stop = threading.Event()
        self._start_s = time.monotonic()
        self._start_time = time.time()
        self._usage = measure_usage()
        self._gpus = _open_gpus()
        self._thread = threading.Thread(target=self._sample_until_stopped, daemon=True)
        self._thread.start()

    def finish(self) -> dict[str, Any]:
        """The figures of the stage, from the start of the meter to now."""
        self._stop.set()
        self._thread.join()
        self._sample()
        seconds = time.monotonic() - self._start_s
        used = measure_usage().since(self._usage)
        record: dict[str, Any] = {
            "start": self._start_time,
            "seconds": round(seconds, 3),
            "cpu_pct": round(100 * used.cpu_s / max(seconds, 1e-9), 2),
            "peak_rss_bytes": self._peak_rss,
            "bytes_read": used.bytes_read,
            "bytes_written": used.bytes_written,
        }
        if self._gpu_pct:
            record["gpu_pct"] = round(sum(self._gpu_pct) / len(self._gpu_pct), 2)
        if self._peak_gpu_memory:
            record["peak_gpu_memory_bytes"] = self._peak_gpu_memory
        return record | self.extra

    def _sample_until_stopped(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            self._sample()

    def _sample(self) -> None:
        rss = sum(map(_rss_bytes, ["self", *_descendants("self")]))
        self._peak_rss = max(self._peak_rss, rss)
        for nvml, handle in self._gpus:
            self._sample_gpu(nvml, handle)

    def _sample_gpu(self, nvml: Any, handle: Any) -> None:
        """Adds a GPU's readings; a GPU in MIG mode gives no utilisation, a lost one gives none."""
        with suppress(nvml.NVMLError):
            used = int(nvml.nvmlDeviceGetMemoryInfo(handle).used)
            self._peak_gpu_memory = max(self._peak_gpu_memory, used)
        with suppress(nvml.NVMLError):
            self._gpu_pct.append(float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu))


@contextmanager
def measure_stage(stage: str, folder: Path | None) -> Iterator[StageMeter]:
    """A meter around one stage; its line goes to folder/stages.jsonl, even if the stage fails."""
    meter = StageMeter()
    status = "failed"
    try:
        yield meter
        status = "done"
    finally:
        record = {"stage": stage, "status": status, "host": os.uname().nodename} | meter.finish()
        if folder is not None:
            _append(folder, record)


def _append(folder: Path, record: dict[str, Any]) -> None:
    """Writes the line of a stage; a full disk does not end the stage or hide its error."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not _is_record(folder / STAGES_FILE):
            log.warning("%s is not a record of stages; left as it is", folder / STAGES_FILE)
            return
        append_line(folder / STAGES_FILE, record)
    except OSError as error:
        log.warning("%s not written: %s", folder / STAGES_FILE, error.strerror)


def _is_record(path: Path) -> bool:
    """Whether lines may be appended to a file: it is missing or ours, not a user's data."""
    start = b'{"stage":'
    try:
        with open(path, "rb") as file:
            return start.startswith(file.read(len(start)))
    except FileNotFoundError:
        return True


def measure_usage() -> Usage:
    """What was used so far; a child's usage stays included when the child ends.

    The kernel adds a child's CPU time and its I/O to its parent's when the parent waits for it.
    """
    parts = [_own_usage(), *_descendants_usage()]
    return Usage(
        sum(part.cpu_s for part in parts),
        sum(part.bytes_read for part in parts),
        sum(part.bytes_written for part in parts),
    )


def _own_usage() -> Usage:
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return Usage(sum(u.ru_utime + u.ru_stime for u in usage), *_io_bytes("self"))


def _descendants_usage() -> Iterator[Usage]:
    for pid in _descendants("self"):
        with suppress(OSError):  # it ended meanwhile
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            cpu_ticks = sum(map(int, fields[11:15]))  # its own and its ended children's
            yield Usage(cpu_ticks / _TICKS_PER_S, *_io_bytes(pid))


def _descendants(pid: str) -> Iterator[str]:
    """All running descendants, found from their own /proc files, not from a list of all."""
    with suppress(OSError):
        for task in os.scandir(f"/proc/{pid}/task"):
            for child in Path(task.path, "children").read_text().split():
                yield child
                yield from _descendants(child)


def _rss_bytes(pid: str) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError):
        return 0


def _io_bytes(pid: str) -> tuple[int, int]:
    """Bytes that a process asked to read and write (rchar and wchar of the kernel)."""
    try:
        fields = dict(
            line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines() if line
        )
        return int(fields["rchar"]), int(fields["wchar"])
    except (OSError, KeyError, ValueError):
        return 0, 0


_GPU_DEVICES = ("/dev/nvidiactl", "/dev/dxg")  # the driver's own, on Linux and under Windows


def _open_gpus() -> list[tuple[Any, Any]]:
    """(nvml module, device handle) of each GPU that this process may use."""
    if not any(map(os.path.exists, _GPU_DEVICES)):
        return []  # saves the import
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible is None:
            count = pynvml.nvmlDeviceGetCount()
            return [(pynvml, pynvml.nvmlDeviceGetHandleByIndex(i)) for i in range(count)]
        names = [name.strip() for name in visible.split(",") if name.strip()]
        return [(pynvml, _gpu_handle(pynvml, name)) for name in names]
    except pynvml.NVMLError:
        return []


def _gpu_handle(nvml: Any, name: str) -> Any:
    """A device by its index, or by the start of its UUID, as HTCondor writes it (GPU-a0223334).

    NVML itself takes a whole UUID only.
    """
    if name.isdigit():
        return nvml.nvmlDeviceGetHandleByIndex(int(name))
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        if str(nvml.nvmlDeviceGetUUID(handle)).startswith(name):
            return handle
    return nvml.nvmlDeviceGetHandleByUUID(name)  # a slice of one (MIG-…)
