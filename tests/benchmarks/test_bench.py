"""What all benchmarks share: where records go, what they name, and what a ratio says."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks import bench
from benchmarks.bench import FACTS, LOCAL, RESULTS, describe_ratio, find_commit, make_parser


def test_the_committed_records_are_written_only_when_asked() -> None:
    parser = make_parser("text")
    assert bench.record_folder(parser.parse_args([])) == LOCAL
    assert bench.record_folder(parser.parse_args(["--save"])) == RESULTS
    assert bench.record_folder(parser.parse_args(["--out", "x"])) == Path("x")


def test_a_record_has_the_facts_and_the_result(tmp_path: Path) -> None:
    args = make_parser("text").parse_args(["--out", str(tmp_path)])
    path = bench.write_result("name", {"rounds": 2, "seconds": [1, 2]}, args)
    record = json.loads(path.read_text())
    assert set(FACTS) | {"seconds"} == set(record)
    assert record["seconds"] == [1, 2]
    assert [file.name for file in tmp_path.iterdir()] == ["name.json"]


@pytest.mark.parametrize(
    ("above", "says"),
    [([2.0, 3.0, 4.0], "3.00x"), ([0.9, 1.2, 1.3], "1.20x (tie)"), ([0.5, 0.5, 1.0], "0.50x")],
)
def test_rounds_that_disagree_are_a_tie(above: list[float], says: str) -> None:
    assert describe_ratio(above, [1.0, 1.0, 1.0]) == says


def test_changed_code_is_dirty_and_changed_records_and_docs_are_not(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        names = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", str(tmp_path), *names, *arguments], check=True)

    assert find_commit(tmp_path) is None
    git("init", "-q")
    for name in ("code.py", "docs/page.md", "run_results/benchmarks/x.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("old")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    commit = find_commit(tmp_path)
    assert commit is not None and len(commit) == 12
    (tmp_path / "docs/page.md").write_text("new")
    (tmp_path / "run_results/benchmarks/x.json").write_text("new")
    assert find_commit(tmp_path) == commit
    (tmp_path / "code.py").write_text("new")
    assert find_commit(tmp_path) == f"{commit}-dirty"
