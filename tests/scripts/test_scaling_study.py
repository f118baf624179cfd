"""scripts/scaling_study.py on this machine, with the real trainer on made-up data."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from dataset.errors import UserError
from scripts.jobs import state
from scripts.jobs.run_folder import relative_data
from scripts.jobs.train_run import SlurmOptions, share_fetch
from scripts.study.microbatch import share_microbatch
from scripts.study.plan import StudyPlan, describe_pin, make_runs
from scripts.study.study_file import STUDY_FILE, extend_study, read_study
from scripts.study.study_file import StudyFile as Study
from tests.report.records import ROOT, run_record, write_raw
from tests.scripts.commands import fork_script, run_script
from train.config import parse_config

SCRIPT = ROOT / "scripts" / "scaling_study.py"
TINY = ("--dummy", "--device", "cpu", "-a", "resnet18", "--image-size", "32", "--threads", "1")


def plan(**changes: Any) -> StudyPlan:
    values: dict[str, Any] = {
        "data": "https://host/data",
        "cluster": "local",
        "gpus": (1, 2, 4),
        "mode": "weak",
        "repeats": 1,
        "train_flags": ("-b", "32"),
    }
    return StudyPlan(**(values | changes))


def environment() -> dict[str, str]:
    """No launcher's variables: the study's own jobs set theirs."""
    names = ("SLURM_", "SUBMITIT_", "RANK", "WORLD_SIZE", "MASTER_")
    return {name: value for name, value in os.environ.items() if not name.startswith(names)}


def run(*words: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return fork_script("scaling_study", *words, cwd=cwd, env=environment())


def run_for_real(*words: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return run_script("scaling_study", *words, cwd=cwd, env=environment())


def test_weak_points_multiply_the_smallest_batch() -> None:
    runs = make_runs(plan(gpus=(4, 2)), Path("/s"))
    assert [(run.num_gpus, run.batch_size) for run in runs] == [(2, 32), (4, 64)]


def test_rows_share_the_largest_microbatch_that_all_could_have() -> None:
    """Batch norm then sees groups of one size in all rows (weak rows have one batch a GPU)."""
    strong = make_runs(plan(mode="strong", gpus=(2, 3), train_flags=("-b", "264")), Path("/s"))
    assert [parse_config(list(run.argv)).largest_microbatch for run in strong] == [44, 44]
    weak = make_runs(plan(), Path("/s"))
    assert [parse_config(list(run.argv)).largest_microbatch for run in weak] == [None] * 3
    given = plan(mode="strong", train_flags=("-b", "32", "--microbatch", "4"))
    config = [parse_config(list(run.argv)) for run in make_runs(given, Path("/s"))]
    assert [(c.microbatch, c.largest_microbatch) for c in config] == [(4, None)] * 3


def test_rows_that_found_other_microbatches_run_again_with_the_least(tmp_path: Path) -> None:
    study = Study(plan(gpus=(1, 2), repeats=2))
    names = [run.name for run in make_runs(study.plan, tmp_path)]
    for name, microbatch in zip(names, (32, 32, 16, 32), strict=True):
        write_raw(tmp_path / name, run_record(name, config={"microbatch": microbatch}))
    shared = share_microbatch(study, tmp_path)
    assert shared.plan.microbatch == 16
    assert read_study(tmp_path) == shared
    assert {
        parse_config(list(run.argv)).microbatch for run in make_runs(shared.plan, tmp_path)
    } == {16}
    assert [path.parent.name for path in tmp_path.rglob("run.json")] == [names[2]]
    assert (tmp_path / f"{names[0]}-microbatch32").is_dir()
    assert share_microbatch(shared, tmp_path) is shared
    assert extend_study(shared, plan(gpus=(4,)), tmp_path).plan.microbatch == 16


def test_strong_points_keep_the_global_batch() -> None:
    runs = make_runs(plan(mode="strong"), Path("/s"))
    assert [run.batch_size for run in runs] == [32, 32, 32]


@pytest.mark.parametrize(
    "flags", [("-b", "8"), ("-b8",), ("--batch-size", "8"), ("--batch-size=8",)]
)
def test_each_command_names_its_batch_once(flags: tuple[str, ...]) -> None:
    run = make_runs(plan(gpus=(2,), train_flags=(*flags, "--epochs", "3")), Path("/s/abc"))[0]
    name = "/s/abc/abc-gpus0002-r1"
    url = "https://host/data"
    own = ("-b", "8", "--recipe", "sgd", "--output", name)
    assert run.argv == (url, "--stream", "never", "--epochs", "3", *own)


@pytest.mark.parametrize(
    ("data", "flags", "shared"),
    [
        ("data", (), []),
        ("osdf:///x.tar", (), ["--stream", "never"]),
        ("osdf:///x.tar", ("--stream", "auto"), []),
        ("osdf:///x.tar", ("--stream=always",), []),
    ],
)
def test_runs_side_by_side_fetch_a_url_once(
    data: str, flags: tuple[str, ...], shared: list[str]
) -> None:
    assert share_fetch(data, flags) == shared


def test_paths_below_this_folder_are_written_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records then hold no path of the machine, and a study can be resumed from anywhere."""
    (tmp_path / "home" / "data").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "home")
    folder = tmp_path / "home" / "results" / "s"
    wanted = plan(gpus=(1,), data=relative_data("data", folder))
    assert wanted.data == "../../data"
    argv = make_runs(wanted, folder)[0].argv
    assert (argv[0], argv[-1]) == ("data", "results/s/s-gpus0001-r1")
    monkeypatch.chdir("/")
    elsewhere = make_runs(wanted, folder)[0].argv
    assert elsewhere[0] == str(tmp_path / "home" / "data").removeprefix("/")


def test_repeats_have_their_own_seed_and_folder() -> None:
    runs = make_runs(plan(gpus=(1,), repeats=3, train_flags=("--seed", "5")), Path("/s/x"))
    assert [run.name for run in runs] == [f"x-gpus0001-r{i}" for i in (1, 2, 3)]
    assert [run.argv[-4:-2] for run in runs[1:]] == [("--seed", "6"), ("--seed", "7")]


@pytest.mark.parametrize(
    ("changes", "recipe", "note"),
    [
        ({"train_flags": ("-b", "1024")}, "sgd", "auto would take lars from batch 4096 on"),
        ({"train_flags": ("-b", "1024", "--recipe", "auto")}, "sgd", "would take lars"),
        ({"train_flags": ("-b", "4096")}, "lars", ""),
        ({"train_flags": ("-b", "1024"), "gpus": (1, 2)}, "sgd", ""),
        ({"train_flags": ("-b", "8192"), "mode": "strong"}, "lars", ""),
        ({"train_flags": ("-b", "1024", "--recipe", "lars")}, "lars", ""),
        ({"train_flags": ("-b", "1024", "--recipe=reference")}, "reference", ""),
    ],
)
def test_all_rows_have_the_recipe_of_the_smallest_and_a_line_says_so(
    changes: dict[str, Any], recipe: str, note: str
) -> None:
    wanted = plan(**changes)
    runs = make_runs(wanted, Path("/s"))
    assert {parse_config(list(run.argv)).recipe for run in runs} == {recipe}
    said = describe_pin(wanted, Path("/s"))
    assert note in said and bool(said) == bool(note)


def test_a_study_that_grows_past_4096_keeps_its_recipe(tmp_path: Path) -> None:
    wanted = {"train_flags": ("-b", "1024")}
    more = extend_study(Study(plan(gpus=(1, 2), **wanted)), plan(gpus=(4, 16), **wanted), tmp_path)
    runs = make_runs(more.plan, tmp_path)
    rows = [(run.batch_size, parse_config(list(run.argv)).recipe) for run in runs]
    assert rows == [(1024, "sgd"), (2048, "sgd"), (4096, "sgd"), (16384, "sgd")]


def test_nodes_and_ranks_a_node_follow_the_gpus_of_a_node() -> None:
    slurm = SlurmOptions(gpus_per_node=4)
    runs = make_runs(plan(cluster="slurm", gpus=(1, 4, 16), slurm=slurm), Path("/s"))
    assert [(run.num_nodes, run.ranks_per_node) for run in runs] == [(1, 1), (1, 4), (4, 4)]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gpus": (0, 1)}, "--gpus 0,1"),
        ({"gpus": (1, 1)}, "--gpus 1,1"),
        ({"repeats": 0}, "--repeats 0"),
        ({"cluster": "slurm", "gpus": (6,)}, "6 GPUs do not fill nodes of 4"),
        ({"mode": "strong", "gpus": (1, 3)}, "cannot be split evenly over 3 GPUs"),
    ],
)
def test_impossible_studies_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        make_runs(plan(**changes), Path("/s"))


def test_a_study_grows_but_does_not_change(tmp_path: Path) -> None:
    old = Study(plan(gpus=(1, 2)), {"x": ("1",)})
    more = extend_study(old, plan(gpus=(2, 4), repeats=2), tmp_path)
    assert (more.plan.gpus, more.plan.repeats, more.jobs) == ((1, 2, 4), 2, {"x": ("1",)})
    with pytest.raises(UserError, match="holds another study"):
        extend_study(old, plan(gpus=(1, 2), train_flags=("-b", "64")), tmp_path)


def test_dry_run_shows_every_command_and_the_sbatch_text(tmp_path: Path) -> None:
    slurm = ("--cluster", "slurm", "--partition", "gpu", "--account", "lab", "--time", "02:00:00")
    more = ("--constraint", "a100", "--repeats", "3", "--out", tmp_path / "s", "--dry-run")
    done = run("--gpus", "1,8", *slurm, *more, "--", "--dummy", "-b", "256", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "python -m train --dummy -b 2048 --recipe sgd" in done.stdout
    assert done.stderr == ""
    for line in (
        "--partition=gpu",
        "--account=lab",
        "--constraint=a100",
        "--time=02:00:00",
        "--array=0-2%3",
        "--requeue",
        "--nodes=2",
        "--ntasks-per-node=4",
        "--gpus-per-node=4",
    ):
        assert f"#SBATCH {line}\n" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_dry_run_says_where_auto_would_have_changed_the_recipe(tmp_path: Path) -> None:
    flags = ("--gpus", "1,4,16", "--weak", "--dry-run", "--out", tmp_path / "s")
    done = run(*flags, "--", "--dummy", "-b", "1024", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("--recipe sgd") == 3
    assert "auto would take lars from batch 4096 on" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.story
def test_a_local_study_ends_with_the_table_and_a_second_start_runs_nothing(tmp_path: Path) -> None:
    words = ("--gpus", "1,2", "--out", "s", "--", *TINY, "-b", "4", "--max-steps", "2")
    done = run_for_real(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "weak scaling" in done.stdout
    assert "| cpu |          8 |   1 |          2 |" in done.stdout
    records = sorted((tmp_path / "s").rglob("run.json"))
    launchers = [json.loads(path.read_text())["attempts"][0]["launcher"] for path in records]
    assert launchers == ["submitit", "submitit"]
    before = [path.read_text() for path in records]
    again = run_for_real(*words, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert [path.read_text() for path in records] == before
    status = run("status", "s", "--format", "json", cwd=tmp_path)
    rows = json.loads(status.stdout)[0]["rows"]
    assert [(row["num_gpus"], row["state"]) for row in rows] == [(1, "done"), (2, "done")]


@pytest.mark.story
def test_a_failed_point_is_shown_with_its_log_and_the_others_run(tmp_path: Path) -> None:
    """A run of another shape lies in the folder of the first run, which the trainer refuses."""
    folder = tmp_path / "s"
    words = ("--gpus", "1", "--repeats", "2", "--out", "s", "--", *TINY, "-b", "4")
    broken = write_raw(folder / "s-gpus0001-r1", run_record("s-gpus0001-r1", status="failed"))
    (broken / "run.json").write_text('{"schema": 99, "attempts": []}')
    done = run_for_real(*words, "--max-steps", "1", cwd=tmp_path)
    assert done.returncode != 0
    assert "| cpu |          4 |   1 |          1 |" in done.stdout
    assert "s-gpus0001-r1 failed" in done.stderr
    assert "schema 99" in done.stderr
    assert "1 of 2 runs not done" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.story
def test_ctrl_c_stops_with_a_checkpoint_and_resume_goes_on(tmp_path: Path) -> None:
    words = ("--gpus", "1", "--out", "s", "--", *TINY, "-b", "4", "--max-steps", "300", "-p", "9")
    command = [sys.executable, str(SCRIPT), *words]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, text=True
    )
    run_file = tmp_path / "s" / "s-gpus0001-r1" / "run.json"
    while not run_file.exists():
        assert process.poll() is None, "the run did not begin"
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=280)
    assert process.returncode == 130
    assert "scaling_study.py resume" in stderr
    stopped = json.loads(run_file.read_text())
    assert stopped["status"] == "checkpointed"
    pid = int(read_study(tmp_path / "s").jobs["s-gpus0001-r1"][0])
    assert not Path(f"/proc/{pid}").exists()
    resumed = run_for_real("resume", "s", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    finished = json.loads(run_file.read_text())
    assert finished["status"] == "done"
    assert len(finished["attempts"]) == 2
    assert "2 attempts" in resumed.stdout


def test_folders_that_are_no_study_are_named(tmp_path: Path) -> None:
    for command in ("status", "resume", "cancel"):
        done = run(command, tmp_path, cwd=tmp_path)
        assert done.returncode == 2
        assert "is not a study" in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_a_trainer_flag_that_does_not_exist_is_refused_before_anything_runs(tmp_path: Path) -> None:
    done = run("--gpus", "1", "--out", "s", "--", "--dummy", "--no-such-flag", cwd=tmp_path)
    assert done.returncode == 2
    assert "--no-such-flag" in done.stderr
    missing = run("nowhere", "--gpus", "1", "--out", "s", cwd=tmp_path)
    assert missing.returncode == 2
    assert "no such file or folder: nowhere" in missing.stderr
    assert list(tmp_path.iterdir()) == []


ODD_STUDIES = {
    "text": "[" * 100_000,
    "plan": {"plan": 3},
    "digits": '{"schema": 1, "plan": {"repeats": ' + "9" * 400 + "}}",
    "gpus": {"gpus": ["1", 2]},
    "repeats": {"repeats": 10**15},
    "flags": {"train_flags": [1]},
    "slurm": {"slurm": {"time": [1]}},
    "cluster": {"cluster": "moon"},
    "jobs": {"jobs": {"a": "12"}},
}


@pytest.mark.parametrize("name", ODD_STUDIES)
def test_a_damaged_study_file_is_one_line_and_exit_2(tmp_path: Path, name: str) -> None:
    good = asdict(plan())
    odd = ODD_STUDIES[name]
    if isinstance(odd, dict):
        record = {"schema": 1, "plan": good, "jobs": {}}
        record |= {k: v for k, v in odd.items() if k in record}
        if isinstance(record["plan"], dict):
            record["plan"] = good | {k: v for k, v in odd.items() if k in good}
        odd = json.dumps(record)
    (tmp_path / STUDY_FILE).write_text(str(odd))
    with pytest.raises(UserError, match=r"study\.json"):
        read_study(tmp_path)


@pytest.mark.parametrize(
    ("active", "end", "words"),
    [
        ("PENDING None", "", "waiting for SLURM"),
        ("PENDING Priority", "", "waiting: Priority"),
        ("", "CANCELLED", "was cancelled"),
        ("", "PREEMPTED", "was preempted"),
        ("", "FAILED", "ended without a record"),
        ("", "TIMEOUT", "ended without a record (reached its time limit)"),
    ],
)
def test_the_state_of_a_slurm_job_is_said_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, active: str, end: str, words: str
) -> None:
    """SLURM's own answers are stood in for; tests/cluster/slurm asks the real one."""
    monkeypatch.setattr(state, "slurm_states", lambda _: {"7": active} if active else {})
    monkeypatch.setattr(state, "slurm_end", lambda _: end)
    (run,) = make_runs(plan(cluster="slurm", gpus=(1,)), tmp_path)
    (found,) = state.find_states("slurm", [run], {run.name: "7"}, tmp_path)
    assert found.detail == words
