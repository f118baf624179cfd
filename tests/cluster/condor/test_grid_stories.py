"""What jobs of condor/train.sub live through on a real pool, and what the report makes of it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest

from dataset.fake.make import make_fake_imagenet
from report.grid.eventlog import OUTPUT_FINISHED
from tests.cluster.condor.grid_mode import (
    ROOT,
    SLOW,
    TINY,
    eager_python,
    is_over,
    kill_starter,
    peek_output,
    read_errors,
    read_output,
    read_result,
    result_folder,
    submit_training,
    wait_for_step,
)
from tests.cluster.condor.jobs import Job
from tests.cluster.osdf.rules import Fault
from train.records.record import read_lines

pytestmark = [pytest.mark.condor, pytest.mark.osdf, pytest.mark.timeout(900)]
Stories = dict[str, Future[Job]]
STEPS = 80  # enough for what comes after the third one


def fetch_and_train(condor: ModuleType, osdf: ModuleType, data: Path) -> Job:
    """The whole way: the job fetches the archives through OSDF and trains on them."""
    folder = f"grid-{os.urandom(4).hex()}"
    names = ("ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar", "LOC_val_solution.csv")
    urls = [f"osdf://{osdf.put(f'{folder}/{name}', data / name)}" for name in names]
    job = submit_training(
        condor, DATA=",".join(urls), FEDERATION=osdf.DIRECTOR_HTTP_URL, SEED="5",
        TRAIN=TINY,
    )  # fmt: skip
    job.wait()
    return job


def vacate(condor: ModuleType) -> Job:
    job = submit_training(condor, TRAIN=f"{SLOW} --max-steps {STEPS}")
    wait_for_step(condor, job)
    job.act("vacate_job")
    job.wait()
    return job


def die_without_a_signal(condor: ModuleType) -> Job:
    job = submit_training(
        condor,
        files={"python": eager_python(condor, 1)},
        PYTHON="FOLDER/python",
        TRAIN=f"{SLOW} --max-steps {STEPS}",
    )
    wait_for_step(condor, job, after="continuing from step")
    kill_starter(condor, job)
    job.wait()
    return job


def checkpoint_twice(condor: ModuleType) -> Job:
    job = submit_training(
        condor,
        files={"python": eager_python(condor, 2)},
        PYTHON="FOLDER/python",
        TRAIN=f"{TINY} --max-steps 4",
    )
    job.wait()
    return job


def stop_before_the_limit(condor: ModuleType) -> Job:
    """The trainer stops in time and starts again; it would go on for ever and is removed.

    A minute a segment. On a busy machine a start alone, or the checkpoint at its end, can take
    longer than that, and then nothing is shown: such a job is submitted again with more time.
    """
    for minutes in (1, 3, 6):
        job = submit_training(
            condor,
            append='+HookKeyword = "SLOWSTART"',
            LIMIT_HOURS=f"{minutes / 60:.4f}",
            MAX_RETRIES="0",
            TRAIN=f"{SLOW} --max-steps 100000",
        )
        said = ""
        while "continuing from step" not in said and not is_over(job):
            said = peek_output(condor, job) or said
            time.sleep(0.1)
        if "continuing from step" in said:
            break
        job.act("rm")
    assert "continuing from step" in said, f"over before it started again; it had said:\n{said}"
    job.act("rm")
    job.wait_for("JOB_ABORTED")
    return job


def exceed_the_limit(condor: ModuleType) -> Job:
    """A limit that is over before the trainer has started."""
    job = submit_training(condor, append='+HookKeyword = "SLOWSTART"', LIMIT_HOURS="0.0003")
    job.wait_for("JOB_HELD")
    return job


def miss_an_output(condor: ModuleType) -> Job:
    append = "transfer_output_files = nothing\nexecutable = true.sh"
    files = {"true.sh": "#!/bin/sh\nexit 0\n"}
    # The starter waits for its shadow that long, in one of the two slots with a GPU.
    job = submit_training(condor, append, files, RELEASE_SECONDS="1", VACATE_SECONDS="1")
    job.wait_for("JOB_HELD")
    return job


def get_input_late(condor: ModuleType, osdf: ModuleType) -> Job:
    """The plugin finds busy servers at first; the hold is released when they answer again."""
    path = osdf.put(f"grid-late/{os.urandom(4).hex()}.tar", b"late" * 100_000)
    busy = osdf.faults(Fault("status", path=path, status=503))
    # Counts on what the plugin brought; the trainer itself has nothing to do with this story.
    look = "#!/bin/sh\nmkdir -p out data\nmd5sum *.tar >out/sums\n"
    job = submit_training(
        condor, "executable = look.sh", {"look.sh": look}, DATA=f"osdf://{path}",
        FEDERATION=osdf.DIRECTOR_HTTP_URL, PLUGIN="true", PLUGIN_MINUTES="0.3", RELEASE_SECONDS="2",
    )  # fmt: skip
    job.wait_for("JOB_HELD")
    busy.remove()
    job.wait(may_be_held=True)
    return job


def have_no_gpu(condor: ModuleType) -> Job:
    job = submit_training(condor, ALLOW_CPU="0", MAX_RETRIES="1")
    job.wait()
    return job


def make_a_mistake(condor: ModuleType) -> Job:
    job = submit_training(condor, TRAIN="-a no_such_model")
    job.wait()
    return job


@pytest.fixture(scope="module")
def stories(
    condor: ModuleType, osdf: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stories]:
    """All stories at once: two slots have a GPU, the rest waits its turn in the queue."""
    data = tmp_path_factory.mktemp("imagenet")
    make_fake_imagenet(data, classes=2, train_per_class=8, val_per_class=2, size=(48, 48))
    subprocess.run([sys.executable, ROOT / "scripts/build_plugin.py"], check=True)
    lives: dict[str, Callable[[], Job]] = {
        "fetched": lambda: fetch_and_train(condor, osdf, data),
        "late": lambda: get_input_late(condor, osdf),
        "over": lambda: exceed_the_limit(condor),
        "missing": lambda: miss_an_output(condor),
        "killed": lambda: die_without_a_signal(condor),
        "vacated": lambda: vacate(condor),
        "checkpointed": lambda: checkpoint_twice(condor),
        "limited": lambda: stop_before_the_limit(condor),
        "no_gpu": lambda: have_no_gpu(condor),
        "mistake": lambda: make_a_mistake(condor),
    }
    with ThreadPoolExecutor(len(lives)) as pool:
        told = {name: pool.submit(life) for name, life in lives.items()}
        yield told
    for name in ("over", "missing"):  # held, and nobody releases them
        told[name].result().act("rm")


def test_a_job_fetches_trains_and_comes_back(stories: Stories) -> None:
    job = stories["fetched"].result()
    run = read_result(job)
    assert (run["status"], run["exit_code"], run["images_trained"]) == ("done", 0, 16)
    assert run["config"]["seed"] == 5
    scheduler = run["scheduler"]
    assert (scheduler["kind"], scheduler["job_id"]) == ("condor", f"{job.cluster}.0")
    assert (scheduler["site"], scheduler["slot"][:5]) == ("Trainyard-Big", "slot1")
    assert scheduler["activation"] is not None
    home = {path.name for path in result_folder(job).iterdir()} - {".lock"}
    records = {"run.json", "epochs.jsonl", "stages.jsonl", "classes.json"}
    assert home == records | {"resnet18_2_classes.pt"}
    stages = read_lines(result_folder(job) / "stages.jsonl")
    assert [s["status"] for s in stages if s["stage"] == "fetch"] == ["done"]


def test_a_vacated_job_goes_on_at_the_step_of_the_signal(stories: Stories) -> None:
    job = stories["vacated"].result()
    said = read_output(job)
    (stopped,) = re.findall(rf"SIGTERM: stopped at step (\d+) of {STEPS} with a checkpoint", said)
    (resumed,) = re.findall(rf"continuing from step (\d+) of {STEPS}", said)
    assert resumed == stopped
    assert int(stopped) >= 3
    run = read_result(job)
    assert [attempt["reason"] for attempt in run["attempts"]] == ["SIGTERM", "done"]
    assert run["images_trained"] == STEPS * 16


def test_after_a_death_without_a_signal_the_last_exit_85_counts(stories: Stories) -> None:
    job = stories["killed"].result()
    assert [e.type.name for e in job.events()].count("JOB_DISCONNECTED") == 1
    said = read_output(job)  # of the killed start nothing came back, its words neither
    stopped = re.findall(rf"checkpoint interval: stopped at step (\d+) of {STEPS}", said)
    assert re.findall(rf"continuing from step (\d+) of {STEPS}", said) == stopped
    assert read_result(job)["images_trained"] == STEPS * 16


def test_two_exits_85_and_then_done(stories: Stories) -> None:
    job = stories["checkpointed"].result()
    reasons = [attempt["reason"] for attempt in read_result(job)["attempts"]]
    assert reasons == ["checkpoint interval", "checkpoint interval", "done"]
    assert [e.type.name for e in job.events()].count("EXECUTE") == 1
    assert job.attribute("NumJobStarts") == "1"


def test_the_trainer_stops_before_the_duration_limit(stories: Stories) -> None:
    job = stories["limited"].result()
    names = [event.type.name for event in job.events()]
    assert "JOB_HELD" not in names
    assert names.count("EXECUTE") == 1


def test_a_job_over_its_limit_is_held(stories: Stories) -> None:
    assert stories["over"].result().attribute("HoldReasonCode") == "47"


def test_an_output_that_was_never_written_is_not_tried_again(stories: Stories) -> None:
    job = stories["missing"].result()
    assert (job.attribute("HoldReasonCode"), job.attribute("HoldReasonSubCode")) == ("12", "2")


def test_an_input_that_is_late_is_waited_for(stories: Stories) -> None:
    job = stories["late"].result()
    held = job.wait_for("JOB_HELD")
    assert held["HoldReasonCode"] == 13
    assert "using protocol osdf" in held["HoldReason"]
    job.wait_for("JOB_RELEASED")
    sums = (result_folder(job) / "sums").read_text()
    assert sums.count("\n") == 1


def test_a_slot_whose_gpu_does_not_work_is_left_after_one_line(stories: Stories) -> None:
    job = stories["no_gpu"].result()
    lines = read_errors(job).splitlines()
    assert all(line.startswith("error: CUDA_VISIBLE_DEVICES=GPU-") for line in lines)
    assert job.attribute("NumJobCompletions") == "2"  # tried again once, as MAX_RETRIES says
    assert job.attribute("ExitCode") == "75"


def test_a_users_mistake_is_not_tried_again(stories: Stories) -> None:
    job = stories["mistake"].result()
    assert (job.attribute("ExitCode"), job.attribute("NumJobCompletions")) == ("2", "1")
    assert "no_such_model" in read_errors(job)


def seconds_after_output(job: Job) -> float:
    """From when the checkpoint was home to the eviction, as the log's daemons write them down."""
    events = job.events()
    (evicted,) = (event.timestamp for event in events if event.type.name == "JOB_EVICTED")
    transfers = [event for event in events if event.type.name == "FILE_TRANSFER"]
    finished = [e.timestamp for e in transfers if int(e["Type"]) == OUTPUT_FINISHED]
    return float(evicted - max(home for home in finished if home <= evicted))


def test_the_report_gets_every_outcome_right(stories: Stories, tmp_path: Path) -> None:
    jobs = {name: story.result() for name, story in stories.items()}
    logs = [str(job.log) for job in jobs.values()]
    runs = [str(job.folder) for job in jobs.values()]
    command = [sys.executable, str(ROOT / "scripts/grid_report.py"), *logs, "--runs", *runs]
    command += ["--format", "json", "--out", str(tmp_path / "report")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    tables = {table["name"]: table["rows"] for table in json.loads(done.stdout)}
    names = {f"{job.cluster}.000.000": name for name, job in jobs.items()}
    rows = {names[row["job_id"]]: row for row in tables["jobs"]}
    assert {name: row["outcome"] for name, row in rows.items()} == {
        "fetched": "success",
        "vacated": "success",
        "killed": "success",
        "checkpointed": "success",
        "late": "exit 0, output unchecked",
        "limited": "removed",
        "over": "held",
        "missing": "held",
        "no_gpu": "wrong output",
        "mistake": "wrong output",
    }
    assert rows["over"]["detail"] == "hold code 47.0 in compute"
    assert rows["missing"]["detail"] == "hold code 12.2 in compute"
    assert rows["no_gpu"]["detail"] == "exit 75"
    assert rows["fetched"]["fetch_s"] > 0
    assert (rows["killed"]["num_evictions"], rows["killed"]["num_disconnects"]) == (1, 1)
    assert rows["killed"]["lost_compute_s"] > 0
    assert rows["vacated"]["num_evictions"] == 1
    assert rows["vacated"]["lost_compute_s"] == seconds_after_output(jobs["vacated"])
    assert rows["late"]["transfer_retried_s"] > 0
    assert {row["site"] for row in tables["sites"]} == {"Trainyard-Big"}
    assert (tmp_path / "report/failure_causes.png").exists()
