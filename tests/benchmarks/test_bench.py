"""What all benchmarks share: where records go, what they name, and what a ratio says."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks import bench
from benchmarks.bench import FACTS, LOCAL, RESULTS, RecordFlags, describe_ratio, find_commit
from dataset.flags import make_parser, parse_flags


def test_the_committed_records_are_written_only_when_asked() -> None:
    def find_folder(*words: str) -> Path:
        return parse_flags(RecordFlags, make_parser("text"), words).folder

    assert find_folder() == LOCAL
    assert find_folder("--save") == RESULTS
    assert find_folder("--out", "x") == Path("x")


def test_a_record_has_the_facts_and_the_result(tmp_path: Path) -> None:
    flags = RecordFlags(out=tmp_path)
    path = bench.write_result("name", {"rounds": 2, "seconds": [1, 2]}, flags)
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


def test_a_measuring_process_gets_its_flags_and_answers_in_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "import json, pathlib, sys\npathlib.Path(sys.argv[1]).write_text(json.dumps(sys.argv[2:]))"
    )
    (tmp_path / "measure.py").write_text(code)
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    assert bench.measure_beside_service("measure", "--rounds", 3) == ["--rounds", "3"]


def test_a_measuring_process_that_fails_ends_the_benchmark_with_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "measure.py").write_text("raise SystemExit(75)")
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    with pytest.raises(SystemExit) as end:
        bench.measure_beside_service("measure")
    assert end.value.code == 75
