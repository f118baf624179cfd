"""The job as its batch system describes it: time limit, queue, requeue, slot."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from train.ranks import batch_system
from train.ranks.batch_system import (
    Job,
    describe_slot,
    exits_for_checkpoints,
    find_deadline,
    parse_slurm_time,
    queue_seconds,
    requeue,
)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1-02:03:04", 93784),
        ("02:03:04", 7384),
        ("03:04", 184),
        ("0:00", 0),
        ("UNLIMITED", None),
        ("NOT_SET", None),
        ("INVALID", None),
        ("", None),
    ],
)
def test_slurms_times_are_read(text: str, seconds: float | None) -> None:
    assert parse_slurm_time(text) == seconds


def test_the_deadline_is_slurms_and_nobody_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def squeue(_job: str, what: str) -> str:
        asked.append(what)
        return {"%L": "10:00", "%V %S": "2024-05-01T10:00:00 2024-05-01T10:01:30"}[what]

    monkeypatch.setattr(batch_system, "_ask_squeue", squeue)
    slurm = Job("slurm", "42", "42")
    assert find_deadline({"SLURM_JOB_ID": "42", "SLURM_JOB_END_TIME": "1700"}, slurm) == 1700.0
    assert asked == []  # newer SLURMs say it themselves
    found = find_deadline({"SLURM_JOB_ID": "42"}, slurm)
    assert found == pytest.approx(time.time() + 600, abs=30)
    assert queue_seconds({"SLURM_JOB_ID": "42"}, slurm) == 90.0
    # A pilot that is a SLURM job: neither its limit nor its queue is ours, and never its requeue.
    condor = Job("condor")
    assert find_deadline({"SLURM_JOB_ID": "42", "SLURM_JOB_END_TIME": "1700"}, condor) is None
    assert queue_seconds({"SLURM_JOB_ID": "42"}, condor) is None
    assert requeue(condor) is False


def test_a_slot_is_described_from_its_ads(tmp_path: Path) -> None:
    job, machine = tmp_path / "job.ad", tmp_path / "machine.ad"
    job.write_text('ClusterId = 12\nProcId = 3\nNumJobStarts = 2\nCmd = "a = b"\n')
    machine.write_text('Name = "slot1_4@node7"\nGLIDEIN_ResourceName = "Site-X"\n')
    env = {"_CONDOR_JOB_AD": str(job), "_CONDOR_MACHINE_AD": str(machine)}
    record = describe_slot(env, Job("condor"))
    assert record["job_id"] == "12.3"
    assert (record["slot"], record["site"]) == ("slot1_4@node7", "Site-X")
    assert not exits_for_checkpoints(env)
    job.write_text(job.read_text() + "SuccessCheckpointExitCode = 85\n")
    assert exits_for_checkpoints(env)
    assert not exits_for_checkpoints({})
    assert not exits_for_checkpoints({"_CONDOR_JOB_AD": str(tmp_path / "gone")})
