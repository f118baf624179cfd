"""What the docs show of the benchmarks is what their records say, and a record names its origin."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import extract_doc, fetch_doc, large_batch_doc, osg_week_doc, performance_doc
from benchmarks.bench import FACTS, RESULTS, ROOT
from benchmarks.large_batch_report import final_accuracies, read_rows
from tests.gpu_sim.budget import BUDGET
from tests.history import assert_is_in_history

RECORDS = sorted(RESULTS.glob("*.json"))
Part = Callable[[str, dict[str, Any]], str]
# record -> the page that shows it, and what it shows
SHOWN: dict[str, tuple[Path, Part]] = {
    **dict.fromkeys(performance_doc.MAKERS, (performance_doc.DOC, performance_doc.make_part)),
    **dict.fromkeys(extract_doc.MAKERS, (extract_doc.DOC, extract_doc.make_part)),
    **{name: (page, fetch_doc.make_part) for name, (page, _) in fetch_doc.MAKERS.items()},
    osg_week_doc.NAME: (osg_week_doc.DOC, osg_week_doc.make_part),
}


@pytest.mark.parametrize("name", SHOWN)
def test_a_page_shows_what_the_record_says(name: str) -> None:
    page, make_part = SHOWN[name]
    record = json.loads((RESULTS / f"{name}.json").read_text())
    shown = re.search(
        f"<!-- begin: {name} -->\n(.*?)<!-- end: {name} -->", page.read_text(), re.DOTALL
    )
    assert shown is not None
    assert shown[1].strip() == make_part(name, record).strip()


def test_the_recipes_page_shows_what_the_record_says() -> None:
    text = large_batch_doc.DOC.read_text()
    assert large_batch_doc.make_doc(text) == text


def test_the_words_about_the_large_batch_hold() -> None:
    """Which way is better is written in words; the numbers are filled in."""
    accuracies = final_accuracies(read_rows(RESULTS / "large_batch.csv"))
    mean = {plan: sum(values) / len(values) for plan, values in accuracies.items()}
    lars, sgd = large_batch_doc.LARS, large_batch_doc.SGD
    left, scaled = large_batch_doc.LEFT, large_batch_doc.SCALED

    def back(ours: str, theirs: str) -> float:
        lost = mean["small batch"] - mean[f"{theirs}, 16x"]
        return (mean[f"{ours}, 16x"] - mean[f"{theirs}, 16x"]) / lost

    assert mean[f"{lars}, 16x"] < mean[f"{scaled}, 16x"] < mean[f"{sgd}, 16x"]
    assert back(sgd, left) >= 0.8 > max(back(sgd, scaled), back(lars, left), back(lars, scaled))
    order = [f"{way}, 64x" for way in (lars, scaled, sgd, left)]
    assert sorted(order, key=mean.__getitem__, reverse=True) == order
    assert mean[f"{left}, 64x"] < 5


def find_commits(record: Any) -> set[str]:
    """The commits that a record names, in its parts too: a run may be of an earlier one."""
    parts = record.values() if isinstance(record, dict) else record
    if not isinstance(record, dict | list):
        return set()
    own = {str(record["commit"])} if isinstance(record, dict) and "commit" in record else set()
    return own.union(*map(find_commits, parts))


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_record_names_its_command_commit_date_machine_and_rounds(path: Path) -> None:
    record = json.loads(path.read_text())
    assert [fact for fact in FACTS if not record.get(fact)] == []
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", record["date"])
    assert record["command"].startswith("python ")
    for commit in find_commits(record):
        assert_is_in_history(commit)


def test_the_page_names_the_operators_that_a_test_holds() -> None:
    text = " ".join(performance_doc.DOC.read_text().split())
    assert f"{BUDGET[2]} operators on two GPUs or more and {BUDGET[1]} on one" in text


def test_local_records_are_not_committed(tmp_path: Path) -> None:
    look = ["git", "check-ignore", "--no-index", "run_results/benchmarks/local/step.json"]
    (tmp_path / ".gitignore").write_text((ROOT / ".gitignore").read_text())
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    assert subprocess.run(look, cwd=tmp_path, capture_output=True).returncode == 0
    look[-1] = "run_results/benchmarks/step.json"
    assert subprocess.run(look, cwd=tmp_path, capture_output=True).returncode == 1
