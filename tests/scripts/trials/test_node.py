"""The PRE and POST scripts of a search's DAG, without a pool; tests/cluster/condor has one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dataset.durable import write_json
from dataset.errors import CommandError
from scripts.trials.node import SKIP, main
from scripts.trials.search_file import CONDOR, SearchPlan, write_search
from scripts.trials.store import read_trials
from tests.report.records import epoch_record, run_record
from tests.scripts.trials.searches import find_disagreements, make_plan
from train.records.record import EPOCHS_FILE, RUN_FILE, append_line


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SearchPlan:
    """That of a study in the current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "search").mkdir()
    plan = make_plan(cluster=CONDOR)
    write_search(tmp_path / "search", plan)
    return plan


def come_home(number: int, job_id: str, acc1: float = 50.0) -> None:
    """What HTCondor brings home for a trial that was trained."""
    folder = Path("search", f"trial{number:04d}", job_id)
    folder.mkdir(parents=True)
    append_line(folder / EPOCHS_FILE, epoch_record(0, 1.0) | {"val_acc1": acc1})
    write_json(folder / RUN_FILE, run_record(folder.name))
    (folder / "model.pt").touch()


def tell(number: int, code: int, job_id: str, retry: int = 0) -> int:
    return main(["tell", str(number), str(code), job_id, str(retry), "2"])


def chosen(folder: str) -> str:
    return Path(folder, "chosen.sub").read_text()


def test_trials_are_drawn_told_and_the_best_is_trained(plan: SearchPlan) -> None:
    for number, acc1 in enumerate((40.0, 60.0)):
        assert main(["ask", str(number)]) == 0
        come_home(number, f"1{number}.0", acc1)
        assert tell(number, 0, f"1{number}.0") == 0
        assert tell(number, 0, f"1{number}.0") == 0, "DAGMan may run a POST script again"
    assert main(["ask", "1"]) == SKIP
    trials = read_trials(Path("search"))
    assert [(t.state, t.value, t.jobs) for t in trials.values()] == [
        ("complete", 40.0, ("10.0",)),
        ("complete", 60.0, ("11.0",)),
    ]
    assert [path.parent.name for path in Path("search").rglob("*.pt")] == ["trial0001"]
    assert main(["best", "9"]) == 0
    flags = (
        f"--lr {trials[1].params['lr']!r} --label-smoothing {trials[1].params['label_smoothing']!r}"
    )
    assert chosen("search/trial0001") == f"CHOSEN = {flags}\n"
    assert chosen("best") == f"CHOSEN = {flags} --epochs 9\n"
    Path("best/20.0").mkdir()
    Path("best/20.0/resnet18.pt").touch()
    assert main(["home", "best", "0", "20.0"]) == 0
    assert main(["evaluate"]) == 0
    assert chosen("evaluation") == f"CHOSEN = {flags} --epochs 9 -e\nWEIGHTS = best/resnet18.pt\n"
    assert find_disagreements(Path("search"), plan) == []


def test_a_try_that_failed_keeps_number_and_flags(plan: SearchPlan) -> None:
    main(["ask", "0"])
    first = chosen("search/trial0000")
    come_home(0, "10.0")
    assert tell(0, 1, "10.0") == 1
    main(["ask", "0"])
    assert chosen("search/trial0000") == first
    assert read_trials(Path("search"))[0].state == "running"
    come_home(0, "11.0", acc1=70.0)
    assert tell(0, 0, "11.0", retry=1) == 0
    assert read_trials(Path("search"))[0].value == 70.0
    assert find_disagreements(Path("search"), plan) == []


@pytest.mark.parametrize(
    ("code", "retry", "node", "state"),
    [
        (4, 0, 0, "pruned"),  # diverged: a result
        (2, 0, 0, "failed"),  # would fail again
        (1, 2, 0, "failed"),  # failed each time
        (75, 2, 1, "running"),  # not the training's fault: the next DAG does it
        (-1002, 2, 1, "running"),  # removed
        (0, 2, 1, "running"),  # its records never came
    ],
)
def test_what_a_job_that_did_not_train_comes_to(
    plan: SearchPlan, code: int, retry: int, node: int, state: str
) -> None:
    main(["ask", "0"])
    assert tell(0, code, "10.0", retry) == node
    assert read_trials(Path("search"))[0].state == state
    assert find_disagreements(Path("search"), plan) == []


def test_when_all_fail_no_more_are_started_and_the_first_log_is_shown(plan: SearchPlan) -> None:
    for number in range(3):
        main(["ask", str(number)])
        Path(f"search/trial{number:04d}.1{number}.0.err").write_text(f"error: no {number}\n")
        tell(number, 2, f"1{number}.0")
    with pytest.raises(CommandError, match=r"3 trials failed .* trial0000 ends with: error: no 0"):
        main(["ask", "3"])
    with pytest.raises(CommandError, match=r"no trial has a result; .* error: no 0"):
        main(["best", "0"])
    assert sorted(read_trials(Path("search"))) == [0, 1, 2]


def test_a_metric_that_no_epoch_has_is_named(plan: SearchPlan) -> None:
    write_search(Path("search"), make_plan(cluster=CONDOR, metric="f1"))
    main(["ask", "0"])
    come_home(0, "10.0")
    with pytest.raises(CommandError, match=r"no epoch of trial0000 has the metric f1; .*val_acc1"):
        tell(0, 0, "10.0")
    assert read_trials(Path("search"))[0].state == "running"


def test_scripts_of_several_nodes_take_turns(plan: SearchPlan) -> None:
    """Eight draws at once: each trial once, and the journal whole."""
    children = []
    for number in range(8):
        if (child := os.fork()) == 0:
            os._exit(main(["ask", str(number)]))
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 8
    assert sorted(read_trials(Path("search"))) == list(range(8))
    assert find_disagreements(Path("search"), plan) == []
