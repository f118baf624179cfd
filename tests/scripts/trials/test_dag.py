"""The DAG of a search: its nodes, who waits for whom, and what is refused before it is written."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from condor.slot import choose_way
from dataset.archive.index import build_index
from dataset.errors import CommandError
from dataset.fake.make import make_fake_imagenet
from dataset.names import TRAIN_TAR, VAL_TAR, VALPREP
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


def test_the_tars_of_a_folder_are_indexed_by_its_node(tmp_path: Path) -> None:
    make_fake_imagenet(
        tmp_path / "data", classes=2, train_per_class=2, val_per_class=1, size=(40, 40)
    )
    write("data", "--search", "1")
    subprocess.run(["./index.sh"], cwd="study", check=True)
    found = {path.name for path in (tmp_path / "data").glob("*.index")}
    assert found == {f"{TRAIN_TAR}.index", f"{VAL_TAR}.index"}


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


@pytest.fixture
def tars(tmp_path: Path) -> str:
    """The URLs of a train and a val tar without indexes."""
    make_fake_imagenet(
        tmp_path / "tars", classes=2, train_per_class=2, val_per_class=1, size=(40, 40)
    )
    return ",".join(f"file://{tmp_path}/tars/{name}" for name in (VAL_TAR, TRAIN_TAR))


def test_a_tar_that_jobs_can_stream_gets_its_index_first(tmp_path: Path, tars: str) -> None:
    """The training tar; with it the evaluation, which does not stream, fetches the other alone."""
    dag = write(tars, "--search", "1", "CACHE_GB=0.5", "FEDERATION=https://x.org")
    assert find_parents(dag)["trial0000"] == {"index"} and find_parents(dag)["index"] == {"check"}
    indexes = dict(re.findall(r'(?m)^VARS (\w+) .* INDEX="([^"]*)"', dag))
    assert indexes == dict.fromkeys(("trial0000", "best", "evaluate"), f"{TRAIN_TAR}.index")
    limits = dict(re.findall(r'(?m)^VARS (\w+) .* CACHE_GB="([^"]*)"', dag))
    assert limits == {"trial0000": "0.5", "best": "0.5"}
    disks = dict(re.findall(r'(?m)^VARS (\w+) .* DATA_GB="([^"]*)"', dag))
    assert disks == {"trial0000": "1", "best": "1", "evaluate": "0.5"}
    script = Path("study/index.sh").read_text()
    assert f"/scripts/index_tar.py --checksums --index-dir . {tmp_path}" in script
    assert f"/{TRAIN_TAR} --federation https://x.org >>search.log" in script
    assert VAL_TAR not in script


def test_the_index_has_the_name_under_which_it_is_made(tmp_path: Path, tars: str) -> None:
    (tmp_path / "tars" / TRAIN_TAR).rename(tmp_path / "tars" / "a+b.tar")
    dag = write(f"file://{tmp_path}/tars/a%2Bb.tar", "--search", "1")
    subprocess.run(["./index.sh"], cwd="study", check=True)
    (made,) = Path("study").glob("*.index")
    assert f' INDEX="{made.name}"' in dag


@pytest.mark.parametrize(
    "setting",
    [
        *("STREAM=never", "PLUGIN=true", "DATA_MODE=extract", "FETCH=--md5 0"),
        *("TRAIN=--val-share 0.1", "TRAIN=--index a.index", "INDEX=a.index"),
        "TRAIN=--stream never",
    ],
)
def test_jobs_that_do_not_stream_or_have_an_index_need_none(tars: str, setting: str) -> None:
    Path("a.index").touch()
    words = ["--search", "1", *SPACE, "--out", "study", "DATA_GB=1", setting]
    assert main([tars, *words]) == 0
    assert not Path("study/index.sh").exists()
    assert "index" not in find_parents(Path("study/study.dag").read_text())
    name, _, value = setting.partition("=")
    if name in ("STREAM", "PLUGIN", "DATA_MODE", "FETCH"):
        assert choose_way({"DATA": tars, name: value}) == "fetch", "the slot sees it the same way"


def test_more_than_two_urls_are_fetched_whole(tmp_path: Path, tars: str) -> None:
    """The script with the labels of the validation images, too."""
    (tmp_path / "tars" / VALPREP).touch()
    dag = write(f"{tars},file://{tmp_path}/tars/{VALPREP}", "--search", "1")
    assert "index" not in find_parents(dag) and f'{VALPREP}"' in dag


def test_a_tar_with_its_index_beside_it_needs_no_other(tmp_path: Path, tars: str) -> None:
    build_index(tmp_path / "tars" / TRAIN_TAR, checksums=True)
    assert "index" not in find_parents(write(tars, "--search", "1"))


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
        (("dummy", "--search", "3", *SPACE, "--prune"), "come home only with its job"),
        (("dummy", "--search", "3", *SPACE, "--best-epochs", "-1"), "must be 1 or more"),
        (("dummy", "--search", "3", *SPACE, "CHOSEN=x"), "CHOSEN is set by the study itself"),
    ],
)
def test_mistakes_are_found_before_anything_is_written(words: tuple[str, ...], says: str) -> None:
    with pytest.raises((CommandError, FileNotFoundError), match=says):
        main([*words, "--out", "study"])
    assert list(Path().iterdir()) == []
