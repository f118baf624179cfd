"""A scaling study on the real SLURM: submitted, preempted, continued, cancelled, reported."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from scripts.study.study_file import read_study
from tests.cluster.slurm.conftest import TRAIN_FLAGS
from tests.cluster.slurm.jobs import PATIENCE_S, Job, clean_env, run, wait_until
from tests.conftest import ROOT
from train.records.record import read_epochs, read_run

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]

STUDY = (sys.executable, ROOT / "scripts" / "scaling_study.py")
SMALL = ("--cluster", "slurm", "--cpus-per-task", "2", "--mem-per-cpu", "100M", "--time", "10")


def start(*words: str | Path) -> subprocess.Popen[str]:
    command = [str(word) for word in (*STUDY, *words)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=clean_env(), stdout=pipe, stderr=pipe, text=True)


def job_of(folder: Path, point: str) -> Job:
    """The last job of a point, once it is submitted."""

    def is_submitted() -> bool:
        return (folder / "study.json").exists() and read_study(folder).last_jobs.get(
            point
        ) is not None

    wait_until(is_submitted, f"{point} is submitted")
    return Job(str(read_study(folder).last_jobs.get(point)))


def has_epochs(folder: Path) -> bool:
    return bool(read_epochs(folder))


def test_a_study_of_1_2_and_4_gpus_survives_a_preemption_and_its_table_is_right(
    slurm: ModuleType, tiny_data: Path, tmp_path: Path
) -> None:
    study = tmp_path / "study"
    words = ("--gpus", "1,2,4", *SMALL, "--gpus-per-node", "2", "--out", study)
    # Strong scaling: all points take the same steps, enough of them to be preempted in between.
    process = start(tiny_data, *words, "--strong", "--", *TRAIN_FLAGS, "--epochs", "12")
    try:
        point = study / "study-gpus0002-r1"
        job = job_of(study, point.name)
        wait_until(lambda: has_epochs(point), "the 2-GPU point trains")
        job.requeue_held()  # else it may run again before its state was asked for
        wait_until(lambda: job.state() == "PENDING", "the job is back in the queue")
        status = run(*STUDY, "status", study, "--format", "json")
        states = {row["num_gpus"]: row["state"] for row in json.loads(status.stdout)[0]["rows"]}
        assert states[2] == "queued"
        job.release()
        job.await_restart()
        stdout, stderr = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
        run(*STUDY, "cancel", study)  # nothing is left to cancel unless it failed
    assert process.returncode == 0, stderr
    check_points(study)
    check_table(study, stdout)
    page = tmp_path / "report.html"
    run(sys.executable, ROOT / "scripts" / "report.py", study, "--out", page)
    assert "2 attempts" in page.read_text()


def check_points(study: Path) -> None:
    """Each point ran on its ranks and nodes; only the preempted one took two attempts."""
    runs = {n: read_run(study / f"study-gpus000{n}-r1") for n in (1, 2, 4)}
    assert [run["status"] for run in runs.values()] == ["done"] * 3
    assert [(run["world_size"], run["num_nodes"]) for run in runs.values()] == [
        (1, 1),
        (2, 1),
        (4, 2),
    ]
    assert [len(run["attempts"]) for run in runs.values()] == [1, 2, 1]
    assert runs[2]["attempts"][0]["reason"] == "SIGTERM"
    assert [run["attempts"][0]["launcher"] for run in runs.values()] == ["srun"] * 3
    assert len({run["images_trained"] for run in runs.values()}) == 1


def check_table(study: Path, stdout: str) -> None:
    """The efficiencies are those of the records, by the formula."""
    table = run(
        sys.executable,
        ROOT / "scripts" / "scaling_table.py",
        study,
        "--format",
        "csv",
    )
    rows = {int(row["num_gpus"]): row for row in csv.DictReader(io.StringIO(table.stdout))}
    seconds = {n: read_run(study / f"study-gpus000{n}-r1")["wall_clock_s"] for n in (1, 2, 4)}
    for n, row in rows.items():
        expected = 100 * seconds[1] / (n * seconds[n])
        assert row["scaling_efficiency_pct"] == f"{expected:.2f}"
        assert f"{expected:.2f}%" in stdout
    assert "strong scaling" in stdout
    assert "2 attempts" in rows[2]["note"]


def test_repeats_are_an_array_that_can_be_cancelled_and_resumed(
    slurm: ModuleType, tiny_data: Path, tmp_path: Path
) -> None:
    study = tmp_path / "study"
    words = ("--gpus", "1", "--repeats", "2", *SMALL, "--no-wait", "--out", study)
    done = run(*STUDY, tiny_data, *words, "--", *TRAIN_FLAGS, "--epochs", "8")
    assert done.returncode == 0, done.stderr
    ids = [read_study(study).last_jobs.get(f"study-gpus0001-r{r}") for r in (1, 2)]
    array = str(ids[0]).partition("_")[0]
    assert ids == [f"{array}_0", f"{array}_1"]
    first = study / "study-gpus0001-r1"
    wait_until(lambda: has_epochs(first), "the first repeat trains")
    Job(str(ids[0])).signal("STOP")  # or it may be done before it is cancelled
    cancelled = run(*STUDY, "cancel", study)
    assert cancelled.returncode == 0, cancelled.stderr
    for job_id in ids:
        assert Job(str(job_id)).wait()["JobState"] in ("CANCELLED", "FAILED", "COMPLETED")
    assert read_run(first)["status"] == "checkpointed", "scancel must leave a checkpoint"
    resumed = run(*STUDY, "resume", study)
    assert resumed.returncode == 0, resumed.stderr
    assert " ± " in resumed.stdout
    records = [read_run(study / f"study-gpus0001-r{r}") for r in (1, 2)]
    assert [record["status"] for record in records] == ["done", "done"]
    assert [record["config"]["seed"] for record in records] == [0, 1]


def test_what_sbatch_refuses_is_said_in_one_line(
    slurm: ModuleType, tiny_data: Path, tmp_path: Path
) -> None:
    words = ("--gpus", "1", *SMALL, "--partition", "nowhere", "--out", tmp_path / "study")
    done = run(*STUDY, tiny_data, *words, "--", *TRAIN_FLAGS)
    assert done.returncode == 2
    assert "sbatch refused study-gpus0001-r1" in done.stderr
    assert "invalid partition" in done.stderr
    assert "Traceback" not in done.stderr
