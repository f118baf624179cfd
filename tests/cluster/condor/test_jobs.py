"""Jobs in the pool live as on a grid: they train, are evicted, held, released and limited.

A job spends its time waiting, so the longer stories start together and are looked at when they end.
"""

from __future__ import annotations

import json
import os
import textwrap
from pathlib import Path
from types import ModuleType

import pytest

from tests.cluster.condor.jobs import Job
from tests.cluster.osdf.control import FaultHandle
from tests.cluster.osdf.rules import Fault

# The first of these tests waits for the pool's root to be built where there is none.
pytestmark = [pytest.mark.condor, pytest.mark.timeout(900)]
SLEEP = "executable = /bin/sleep\ntransfer_executable = false\n"
# A job that runs until a file is there: one that sleeps for a second can end, on a busy machine,
# before its test has read of its start.
GATED = "executable = gated.sh\narguments = {gate}\n"
SCRIPT = {"gated.sh": "#!/bin/sh\nuntil [ -e $1 ]; do sleep 0.1; done\n"}


@pytest.fixture(scope="module", autouse=True)
def training(condor: ModuleType) -> Job:
    """A job that asks the doctor and trains two steps, the project and its .venv as they are."""
    script = f"""\
        #!/bin/sh
        {condor.PYTHON} {condor.PROJECT}/scripts/doctor.py --output . --json > doctor.json
        cd {condor.PROJECT}
        exec {condor.PYTHON} -m train --dummy --device cpu -a resnet18 -b 4 --image-size 32 \\
            -j 0 --max-steps 2 --output "$_CONDOR_SCRATCH_DIR/out"
        """
    job: Job = condor.submit(
        """
        executable = job.sh
        request_gpus = 1
        request_memory = 4000
        transfer_output_files = out/run.json, out/epochs.jsonl, doctor.json
        output = out.txt
        error = err.txt
        ulog_execute_attrs = GLIDEIN_ResourceName,GPUs_DeviceName
        """,
        {"job.sh": textwrap.dedent(script)},
    )
    return job


@pytest.fixture(scope="module", autouse=True)
def limited(condor: ModuleType) -> Job:
    """A job that sleeps longer than it may."""
    limits = 'allowed_execute_duration = 1\n+HookKeyword = "SLOWSTART"\n'
    job: Job = condor.submit(f"{SLEEP}arguments = 600\n{limits}")
    return job


@pytest.fixture(scope="module", autouse=True)
def dag_folder(condor: ModuleType) -> Path:
    """The folder of a running DAG of two nodes, one after the other."""
    node = "executable = /bin/sh\ntransfer_executable = false\n"
    node += "arguments = \"-c 'echo $(node) >> out.$(node)'\"\nlog = nodes.log\nqueue\n"
    dag = 'JOB A node.sub\nJOB B node.sub\nVARS A node="a"\nVARS B node="b"\nPARENT A CHILD B\n'
    folder: Path = condor.make_folder({"node.sub": node, "test.dag": dag})
    condor.run("condor_submit_dag test.dag", cwd=folder)
    return folder


@pytest.fixture(scope="module", autouse=True)
def late(condor: ModuleType, osdf: ModuleType) -> tuple[Job, FaultHandle]:
    """A job whose input is not there at first, and the fault that makes it so."""
    path = osdf.put("condor/line.bin", b"from the origin\n")
    url = osdf.DIRECTOR_HTTP_URL + path
    faults = osdf.faults(Fault("status", path=path, status=404, server="cache1"))
    program = f"import urllib.request as r; print(r.urlopen('{url}').read().decode(), end='')\n"
    program += "print(open('line.bin').read(), end='')\n"
    description = (
        f"executable = {condor.PYTHON}\ntransfer_executable = false\narguments = get.py\n"
        f"transfer_input_files = get.py, {url}\noutput = out.txt\n"
    )
    return condor.submit(description, {"get.py": program}), faults


def test_eviction_hold_and_release_are_in_the_event_log(condor: ModuleType) -> None:
    gate = condor.make_folder() / "open"
    job = condor.submit(GATED.format(gate=gate), SCRIPT)
    job.wait_for("EXECUTE")
    job.act("vacate_job")
    job.wait_for("JOB_EVICTED")
    job.wait_for("EXECUTE", count=2)
    job.act("hold")
    held = job.wait_for("JOB_HELD")
    assert held["HoldReasonCode"] == 1
    gate.touch()
    job.act("release")
    job.wait_for("JOB_RELEASED")
    assert job.wait() == 0
    assert job.attribute("NumJobStarts") == "3"
    names = [event.type.name for event in job.events()]
    assert names.index("JOB_EVICTED") < names.index("JOB_HELD") < names.index("JOB_RELEASED")


def test_small_slot_takes_what_fits_and_a_killed_starter_is_survived(condor: ModuleType) -> None:
    """A pilot can die without a signal to the job."""
    wanted = f'requirements = GLIDEIN_ResourceName == "{condor.SMALL}"\n'
    large = condor.submit(f"{SLEEP}arguments = 0\n{wanted}request_memory = 4000\n")
    attributes = "ulog_execute_attrs = GLIDEIN_ResourceName\n"
    gate = condor.make_folder() / "open"
    small = condor.submit(
        f"{GATED.format(gate=gate)}{wanted}request_memory = 100\n{attributes}", SCRIPT
    )
    execute = small.wait_for("EXECUTE")
    assert execute["ExecuteProps"]["GLIDEIN_ResourceName"] == condor.SMALL
    (starter,) = condor.find_processes("condor_starter", slot="slot2")
    os.kill(starter, 9)
    small.wait_for("JOB_RECONNECT_FAILED")
    small.wait_for("EXECUTE", count=2)
    gate.touch()
    assert small.wait() == 0
    assert large.attribute("JobStatus") == "1"  # idle: submitted first, and the slot was free
    large.act("rm")


def test_exit_85_starts_again_in_the_same_sandbox(condor: ModuleType) -> None:
    script = """\
        #!/bin/sh
        echo run >> partial
        mkdir -p ckpt
        cp partial ckpt/
        if [ $(wc -l < partial) -lt 3 ]; then exit 85; fi
        """
    job = condor.submit(
        """
        executable = job.sh
        checkpoint_exit_code = 85
        transfer_checkpoint_files = ckpt
        transfer_output_files = ckpt
        """,
        {"job.sh": textwrap.dedent(script)},
    )
    assert job.wait() == 0
    assert (job.folder / "ckpt/partial").read_text() == "run\n" * 3
    assert len([event for event in job.events() if event.type.name == "EXECUTE"]) == 1


def test_waiting_for_a_job_that_is_held_fails_at_once_with_the_reason(condor: ModuleType) -> None:
    job = condor.submit(f"{SLEEP}arguments = 0\ntransfer_output_files = missing\n")
    with pytest.raises(RuntimeError, match=r"(?s)is held.*missing: \(errno 2\) No such file"):
        job.wait()
    assert job.attribute("HoldReasonCode") == "12"
    job.act("rm")


def test_jobs_run_as_an_ordinary_user_who_cannot_write_the_project(condor: ModuleType) -> None:
    assert condor.run("id -un").strip() == condor.USER
    answer = condor.run(f"touch {condor.PROJECT}/x; touch {condor.PYTHON}.x", check=False)
    assert answer.count("Read-only file system") + answer.count("Permission denied") == 2
    imports = "import ssl, sqlite3, lzma, bz2, ctypes, numpy; print(ssl.OPENSSL_VERSION)"
    assert "OpenSSL" in condor.run(f'{condor.PYTHON} -c "{imports}"')


@pytest.mark.osdf
def test_job_reads_from_the_mini_osdf_after_a_passing_404(late: tuple[Job, FaultHandle]) -> None:
    """In the job itself, and through HTCondor's own plugin, where a 404 is a hold."""
    job, faults = late
    held = job.wait_for("JOB_HELD")
    assert held["HoldReasonCode"] == 13
    assert "404" in held["HoldReason"]
    faults.remove()
    job.act("release")
    assert job.wait(may_be_held=True) == 0
    assert (job.folder / "out.txt").read_text() == "from the origin\n" * 2


def test_job_over_its_duration_limit_is_held_with_code_47(limited: Job) -> None:
    assert limited.wait_for("JOB_HELD")["HoldReasonCode"] == 47
    limited.act("rm")
    limited.wait_for("JOB_ABORTED")


def test_dag_runs_its_nodes_in_order(condor: ModuleType, dag_folder: Path) -> None:
    condor.run("condor_wait -wait 300 test.dag.dagman.log", cwd=dag_folder)
    finished = [(dag_folder / f"out.{node}").stat().st_mtime_ns for node in "ab"]
    assert finished == sorted(finished)
    assert not list(dag_folder.glob("*.rescue*"))


def test_job_trains_two_steps_and_brings_back_its_record(condor: ModuleType, training: Job) -> None:
    code = training.wait()
    assert code == 0, (training.folder / "err.txt").read_text()[-3000:]
    record = json.loads((training.folder / "run.json").read_text())
    assert (record["status"], record["exit_code"]) == ("done", 0)
    assert record["images_trained"] == 8
    assert record["scheduler"]["kind"] == "condor"
    assert training.wait_for("EXECUTE")["ExecuteProps"]["GLIDEIN_ResourceName"] == condor.BIG


def test_doctor_is_right_in_a_slot(training: Job) -> None:
    training.wait()
    doctor = json.loads((training.folder / "doctor.json").read_text())
    assert (doctor["launch"]["launcher"], doctor["launch"]["world_size"]) == ("condor", 1)
    (gpus,) = [finding for finding in doctor["findings"] if finding["topic"] == "GPUs"]
    assert gpus["level"] == "wrong"  # one is given, by its UUID, and it is simulated
    assert "CUDA_VISIBLE_DEVICES=GPU-" in gpus["text"]
