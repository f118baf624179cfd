"""The DAG of a search: its nodes, who waits for whom, and what is refused before it is written."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from dataset.errors import CommandError
from scripts.condor_study import main
from scripts.trials.run_search import ask_search, cancel_search, run_search
from scripts.trials.search_file import read_search

SPACE = ("--space", "lr=log:0.01..10, recipe=sgd|lars")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(*words: str) -> str:
    assert main([*words, *SPACE, "--out", "study", "DATA_GB=1", "TRAIN=-b 8 --pretrained"]) == 0
    return Path("study/study.dag").read_text()


def find_parents(dag: str) -> dict[str, set[str]]:
    """The parents of each node."""
    parents: dict[str, set[str]] = {}
    for line in re.findall(r"(?m)^PARENT (.+)$", dag):
        before, _, after = line.partition(" CHILD ")
        for child in after.split():
            parents.setdefault(child, set()).update(before.split())
    return parents


def test_a_trial_waits_for_the_one_before_it_in_its_lane(tmp_path: Path) -> None:
    """Else DAGMan would draw all of them at the start."""
    (tmp_path / "data").mkdir()
    dag = write("data", "--search", "5", "--jobs", "2")
    assert find_parents(dag) == {
        "index": {"check"},
        "trial0000": {"index"},
        "trial0001": {"index"},
        "trial0002": {"trial0000"},
        "trial0003": {"trial0001"},
        "trial0004": {"trial0002"},
        "best": {"trial0003", "trial0004"},
        "evaluate": {"best"},
    }
    assert f'DATA="{tmp_path}/data"' in dag
    values = dict(re.findall(r'(?m)^VARS (\w+) .* TRAIN="([^"]*)"', dag))
    assert (values["best"], values["evaluate"]) == ("-b 8 --pretrained", "-b 8")
    for name in ("check", "index", "search", "report"):
        assert os.access(f"study/{name}.sh", os.X_OK)
        subprocess.run(["bash", "-n", f"study/{name}.sh"], check=True)


def test_made_up_data_has_no_index_and_no_evaluation() -> None:
    assert find_parents(write("dummy", "--search", "2", "--best-epochs", "9")) == {
        "trial0000": {"check"},
        "trial0001": {"check"},
        "best": {"trial0000", "trial0001"},
    }
    plan = read_search(Path("study/search"))
    assert (plan.trials, plan.jobs, plan.cluster) == (2, 2, "condor")
    with pytest.raises(CommandError, match="exists; submit it again to continue"):
        write("dummy", "--search", "2")


def test_search_py_leaves_the_trials_of_a_dag_to_it() -> None:
    write("dummy", "--search", "2")
    folder = Path("study/search").absolute()
    assert ask_search(folder).rows == ()
    with pytest.raises(CommandError, match="is run by a DAG: continue it with"):
        run_search(folder, read_search(folder))
    with pytest.raises(CommandError, match="stop it with condor_rm"):
        cancel_search(folder)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("dummy", "--search", "0", *SPACE), "--search 0: must be from 1"),
        (("dummy", "--search", "3", "--jobs", "0", *SPACE), r"--jobs N \(at least 1\)"),
        (("dummy", "--search", "3"), "--space names no flag to search"),
        (("dummy", "--search", "3", "--space", "rate=0..1"), "is no flag that .*, arch, .*, lr,"),
        (("dummy", "--search", "3", "--space", "lr=2..1"), "first end must be below the second"),
        (("dummy", "--search", "3", "--space", "label_smoothing=0..2"), r"must be in \[0, 1\)"),
        (("dummy", "--search", "3", "--space", "arch=a'b|c"), "has a ', which a submit file"),
        (("dummy", "--search", "3", "--space", "epochs=1..9", "EPOCHS=3"), "in --space"),
        (("nowhere", "--search", "3", *SPACE), "no such file or folder: nowhere"),
        (("file:///nowhere/x.tar", "--search", "3", *SPACE), "No such file"),
        (("dummy", *SPACE), "go with --search"),
        (("dummy", "--search", "3", *SPACE, "--best-epochs", "-1"), "must be 1 or more"),
        (("dummy", "--search", "3", *SPACE, "CHOSEN=x"), "CHOSEN is set by the study itself"),
    ],
)
def test_mistakes_are_found_before_anything_is_written(words: tuple[str, ...], says: str) -> None:
    with pytest.raises((CommandError, FileNotFoundError), match=says):
        main([*words, "--out", "study"])
    assert list(Path().iterdir()) == []
