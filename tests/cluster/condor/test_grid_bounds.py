"""How often condor/train.sub tries again and when it gives up, on a real pool with small bounds."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import ModuleType

import pytest

from dataset.fake.make import make_fake_imagenet
from tests.cluster.condor.grid_mode import (
    SLOW,
    read_output,
    read_result,
    result_folder,
    submit_training,
    wait_for_step,
)
from tests.cluster.condor.jobs import Job
from train.records.record import read_lines

pytestmark = [pytest.mark.condor, pytest.mark.timeout(900)]
# A transfer plugin that fails at once.
NEVER = """#!/bin/sh
[ "$1" = -classad ] || exit 1
echo 'MultipleFileSupport = true'
echo 'PluginType = "FileTransfer"'
echo 'ProtocolVersion = 2'
echo 'SupportedMethods = "never"'
"""


def submit_script(condor: ModuleType, script: str, append: str = "", **macros: str) -> Job:
    """A job of condor/train.sub with a script in place of job.sh: none of these stories trains."""
    files = {"run.sh": f"#!/bin/sh\nmkdir -p out\n{script}\n", "never.sh": NEVER}
    append = f"executable = run.sh\n{append}".strip()
    # A starter whose job was held at its end waits that long for its shadow, in one of two slots.
    return submit_training(condor, append, files, VACATE_SECONDS="1", **macros)


def count_events(job: Job, name: str) -> int:
    return [event.type.name for event in job.events()].count(name)


def test_a_job_that_is_held_too_long_is_removed(condor: ModuleType) -> None:
    """Another one, held as long with the usual bound, stays."""
    nothing = "transfer_output_files = nothing"
    usual = submit_script(condor, "exit 0", nothing)
    usual.wait_for("JOB_HELD")
    brief = submit_script(condor, "exit 0", nothing, HELD_DAYS="0.00002")  # 2 s
    brief.wait_for("JOB_HELD")
    removed = brief.wait_for("JOB_ABORTED")
    assert "PeriodicRemove" in removed["Reason"]
    assert usual.attribute("JobStatus") == "5"
    usual.act("rm")


def test_a_job_that_has_started_too_often_is_removed(condor: ModuleType) -> None:
    job = submit_script(condor, "exec sleep 600", MAX_STARTS="2")
    for start in (1, 2):
        job.wait_for("EXECUTE", count=start)
        job.act("vacate_job -fast")
        job.wait_for("JOB_EVICTED", count=start)
    removed = job.wait_for("JOB_ABORTED")
    assert "PeriodicRemove" in removed["Reason"]
    assert job.attribute("NumJobStarts") == "3"


def test_an_input_that_never_comes_is_given_up_after_max_releases(condor: ModuleType) -> None:
    """The job that may be released more often goes on meanwhile."""
    never = "transfer_plugins = never=never.sh\ntransfer_input_files = never://input"
    once = submit_script(condor, "exit 0", never, MAX_RELEASES="1", RELEASE_SECONDS="1")
    often = submit_script(condor, "exit 0", never, MAX_RELEASES="9", RELEASE_SECONDS="1")
    assert once.wait_for("JOB_HELD", count=2)["HoldReasonCode"] == 13
    often.wait_for("JOB_RELEASED", count=3)
    assert count_events(once, "JOB_RELEASED") == 1
    assert once.attribute("JobStatus") == "5"
    for job in (once, often):
        job.act("rm")


def test_a_result_that_cannot_be_sent_home_is_sent_when_it_can(condor: ModuleType) -> None:
    job = submit_script(condor, "echo trained >out/model", RESULTS="home", RELEASE_SECONDS="1")
    home = job.folder / "home"
    home.write_text("a file where the folder of results should be\n")
    held = job.wait_for("JOB_HELD")
    assert (held["HoldReasonCode"], held["HoldReasonSubCode"]) == (12, errno.ENOTDIR)
    home.unlink()
    assert job.wait(may_be_held=True) == 0
    assert (home / f"{job.cluster}.0/model").read_text() == "trained\n"


def test_a_crash_and_bad_data_are_tried_again_and_a_divergence_is_not(condor: ModuleType) -> None:
    jobs = {code: submit_script(condor, f"exit {code}", MAX_RETRIES="1") for code in (1, 3, 4)}
    ended = {code: job.wait() for code, job in jobs.items()}
    assert ended == {1: 1, 3: 3, 4: 4}
    tries = {code: job.attribute("NumJobCompletions") for code, job in jobs.items()}
    assert tries == {1: "2", 3: "2", 4: "1"}


@pytest.mark.osdf
def test_after_an_eviction_the_data_is_fetched_again(
    condor: ModuleType, osdf: ModuleType, tmp_path: Path
) -> None:
    make_fake_imagenet(tmp_path, classes=2, train_per_class=64, val_per_class=2, size=(48, 48))
    name = "ILSVRC2012_img_train.tar"
    path = osdf.put(f"grid-again-{os.urandom(4).hex()}/{name}", tmp_path / name)
    job = submit_training(
        condor, DATA=f"osdf://{path}", FEDERATION=osdf.DIRECTOR_HTTP_URL, EPOCHS="10", TRAIN=SLOW
    )
    wait_for_step(condor, job)
    job.act("vacate_job")
    assert job.wait() == 0
    stages = read_lines(result_folder(job) / "stages.jsonl")
    assert [s["status"] for s in stages if s["stage"] == "fetch"] == ["done", "done"]
    assert "from step" in read_output(job)
    assert read_result(job)["images_trained"] == 10 * 128
