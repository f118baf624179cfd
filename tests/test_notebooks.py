"""The notebooks run from nothing to their end, and open on GitHub as they are."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from dataset.errors import UserError
from tests import notebooks
from tests.history import assert_is_in_history
from tests.notebooks import FOLDER, PATHS, ROOT, SECONDS, execute, find_notebooks

LINK = re.compile(r"\]\(([^)#\s]+)[^)\s]*\)")
OWN_PATH = re.compile(r"(?<![\w.$}])/(?:tmp|home|root|work|Users|var|opt|mnt)/\w[^\s'\"]*")
MAX_BYTES = 1_000_000  # GitHub shows a notebook of a few MB only as text
MAX_LINES = 30  # of a cell


def read(path: Path) -> dict[str, Any]:
    notebook: dict[str, Any] = json.loads(path.read_text())
    return notebook


def code_cells(path: Path) -> list[dict[str, Any]]:
    return [cell for cell in read(path)["cells"] if cell["cell_type"] == "code"]


def needs_service(path: Path) -> bool:
    """Whether a test of tests/cluster executes it, which has the service that it needs."""
    return "marker" in read(path)["metadata"].get("trainyard", {})


ALONE = [path for path in PATHS if not needs_service(path)]


@pytest.mark.story
@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", ALONE, ids=lambda path: path.stem)
def test_a_notebook_runs_to_its_end_in_a_fresh_kernel(path: Path, tmp_path: Path) -> None:
    notebook = execute(path, tmp_path)
    assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code")


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_committed_notebook_shows_its_outputs_and_pictures(path: Path) -> None:
    cells = code_cells(path)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert [output for output in outputs if output["output_type"] == "error"] == []
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert "Traceback" not in json.dumps(outputs)
    assert path.stat().st_size < MAX_BYTES


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_committed_notebook_names_no_path_of_a_machine(path: Path) -> None:
    texts = [cell["source"] for cell in read(path)["cells"]]
    for output in (output for cell in code_cells(path) for output in cell["outputs"]):
        data = output.get("data", {})
        texts += [output.get("text", []), *(data[kind] for kind in data if "text/" in kind)]
    found = [OWN_PATH.findall("".join(text)) for text in texts]
    assert [names for names in found if names] == []


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_links_of_a_notebook_exist_and_its_cells_are_short(path: Path) -> None:
    cells = read(path)["cells"]
    prose = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
    inside = [target for target in LINK.findall(prose) if "://" not in target]
    assert inside, "a notebook says where to read on"
    assert [target for target in inside if not (path.parent / target).exists()] == []
    assert max(len(cell["source"]) for cell in code_cells(path)) <= MAX_LINES


def test_the_tutorial_has_the_commands_of_its_notebook() -> None:
    """Both are one walk: docs/tutorial.md does in demo/ what the notebook does in its folder."""
    tutorial = (ROOT / "docs" / "tutorial.md").read_text().replace("demo/", "")
    sources = ["".join(cell["source"]) for cell in code_cells(FOLDER / "laptop.ipynb")]
    words = "\n".join(source for source in sources if source.startswith("%%bash"))
    commands = re.findall(r"^python .*", words.replace("$CLONE/", ""), re.MULTILINE)
    assert len(commands) == 5
    assert [command for command in commands if f"    {command}\n" not in tutorial] == []


def test_the_tutorial_quotes_the_run_of_its_notebook() -> None:
    """Each line that it shows of an output is in the notebook; "..." is what it leaves out."""
    tutorial = (ROOT / "docs" / "tutorial.md").read_text().replace("demo/", "")
    outputs = [output for cell in code_cells(FOLDER / "laptop.ipynb") for output in cell["outputs"]]
    printed = "".join("".join(output.get("text", [])) for output in outputs)
    quoted = re.findall(r"^    (?!python |\.\.\.$)(.+)", tutorial, re.MULTILINE)
    patterns = [".*".join(map(re.escape, line.split("..."))) for line in quoted]
    assert len(patterns) == 8
    assert [line for line in patterns if not re.search(line, printed)] == []
    accuracies = [float(found) for found in re.findall(r"val acc1 ([\d.]+)", printed)]
    drawn = re.search(r"validation accuracy rises from ([\d.]+) % to ([\d.]+) %", tutorial)
    assert drawn is not None
    assert abs(float(drawn[1]) - accuracies[0]) < 0.5 > abs(float(drawn[2]) - accuracies[-1])


def test_the_record_says_how_long_each_notebook_took_and_where() -> None:
    """The seconds themselves are never asserted."""
    records = json.loads(SECONDS.read_text())
    assert set(records) == {path.stem for path in PATHS}
    for record in records.values():
        assert record["wall_s"] > 0 and record["cpu_s"] > 0 and record["others_share"] >= 0
        assert record["machine"]["cpus"] and record["date"]
        assert_is_in_history(record["commit"])


def test_the_record_of_one_notebook_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notebooks, "SECONDS", tmp_path / "seconds.json")
    for name, wall_s in (("laptop", 1.0), ("removed since", 2.0), ("laptop", 3.0)):
        notebooks.note_seconds(name, {"wall_s": wall_s})
    assert json.loads(notebooks.SECONDS.read_text()) == {"laptop": {"wall_s": 3.0}}


def test_the_checks_of_a_notebook_can_fail() -> None:
    assert OWN_PATH.findall("wrote /tmp/x1/report.html") == ["/tmp/x1/report.html"]
    assert OWN_PATH.findall("a/tmp/b, $CLONE/tmp/x, http://h/tmp") == []
    with pytest.raises(UserError, match="no notebook 'x' in docs/notebooks; it has"):
        find_notebooks(["x"])
