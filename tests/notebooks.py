"""Executes the notebooks of docs/notebooks, each in a fresh kernel, and writes their outputs.

    python -m tests.notebooks              # all of them
    python -m tests.notebooks laptop       # docs/notebooks/laptop.ipynb

What a notebook makes lies in a temporary folder, which is removed. The pictures of laptop.ipynb are
those of docs/tutorial.md too, and are written to docs/pictures. How long each execution took goes
to docs/notebooks/seconds.json.
"""

from __future__ import annotations

import base64
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.bench import make_facts
from benchmarks.machine_load import MachineLoad
from dataset.durable import writing_whole
from dataset.errors import UserError, run_command
from dataset.flags import make_parser
from tests.report.pictures import compress

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "notebooks"
PICTURES = ROOT / "docs" / "pictures"
OF_TUTORIAL = ("tutorial_images", "tutorial_learning", "tutorial_confusion", "tutorial_wrong")
PATHS = sorted(FOLDER.glob("*.ipynb"))
SECONDS = FOLDER / "seconds.json"
CELL_TIMEOUT_S = 300
NUM_COLOURS = 256  # of a picture: small enough for git, enough for photographs
LAUNCHERS = ("SLURM_", "SUBMITIT_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_")
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def main() -> None:
    """Executes the notebooks that are named, or all, and writes them with their outputs."""
    parser = make_parser(__doc__, prog="python -m tests.notebooks")
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    for path in find_notebooks(parser.parse_args().names):
        with tempfile.TemporaryDirectory() as folder:
            notebook, record = measure(path, Path(folder))
        write(notebook, path)
        note_seconds(path.stem, record)
        size = f"{path.stat().st_size // 1000} kB, {record['wall_s']:.0f} s"
        print(f"{path.relative_to(ROOT)}: {size} ({record['cpu_s']:.0f} s of a core)")
        if path.stem == "laptop":
            write_pictures(notebook)


def measure(path: Path, folder: Path) -> tuple[Any, dict[str, Any]]:
    """The executed notebook, and how long it took: from the start of its kernel to its end.

    cpu_s: of the kernel and all that it started. others_share: of all cores, what other processes
    used meanwhile; the servers of a federation count as others.
    """
    load, begin_s, begin = MachineLoad(), time.monotonic(), os.times()
    notebook = execute(path, folder)
    wall_s, end = time.monotonic() - begin_s, os.times()
    cpu_s = end.children_user + end.children_system - begin.children_user - begin.children_system
    times = {"wall_s": wall_s, "cpu_s": cpu_s, "others_share": load.foreign_share()}
    return notebook, {name: round(value, 2) for name, value in times.items()} | make_facts()


def note_seconds(name: str, record: dict[str, Any]) -> None:
    """Writes the record of an execution; those of the other notebooks stay."""
    known = {path.stem for path in PATHS}
    records = json.loads(SECONDS.read_text()) if SECONDS.exists() else {}
    kept = {other: old for other, old in records.items() if other in known}
    with writing_whole(SECONDS) as file:
        file.write((json.dumps(kept | {name: record}, indent=1, sort_keys=True) + "\n").encode())


def write_pictures(notebook: Any) -> None:
    """The pictures of the tutorial, in the order in which the notebook shows them."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    shown = [
        output["data"]["image/png"] for output in outputs if "image/png" in output.get("data", {})
    ]
    for name, picture in zip(OF_TUTORIAL, shown, strict=True):
        (PICTURES / f"{name}.png").write_bytes(base64.b64decode(picture))


def find_notebooks(names: list[str]) -> list[Path]:
    """The notebooks of these names; all of them without a name."""
    known = {path.stem: path for path in PATHS}
    for name in names:
        if name not in known:
            raise UserError(f"no notebook {name!r} in docs/notebooks; it has {', '.join(known)}")
    return [known[name] for name in names] or PATHS


def execute(path: Path, folder: Path) -> Any:
    """The notebook with the outputs of this run; an error in a cell is an error here."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT_S,
        startup_timeout=CELL_TIMEOUT_S,
        kernel_name="python3",
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(FOLDER)}},  # where a reader's Jupyter starts it
    )
    client.execute(env=make_environment(folder))
    return notebook


def make_environment(folder: Path) -> dict[str, str]:
    """The environment of a kernel whose temporary and own files lie in the folder."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    own = {"TMPDIR": "tmp", "IPYTHONDIR": "ipython", "MPLCONFIGDIR": "matplotlib"}
    for name, part in own.items():
        (folder / part).mkdir()
        env[name] = str(folder / part)
    env.pop("MPLBACKEND", None)  # of the caller; the kernel shows pictures in the notebook
    return env


def write(notebook: Any, path: Path) -> None:
    """Writes a notebook without what changes with the machine."""
    import nbformat

    own = notebook.metadata.get("trainyard")
    notebook.metadata = nbformat.from_dict(METADATA | ({"trainyard": own} if own else {}))
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict({})
        for output in cell.get("outputs", []):
            if output.get("name") == "stderr":  # our commands log there; it need not look alarming
                output["name"] = "stdout"
            if png := output.get("data", {}).get("image/png"):
                small = compress(base64.b64decode(png), NUM_COLOURS)
                output["data"]["image/png"] = base64.b64encode(small).decode()
        if "outputs" in cell:
            cell.outputs = join_streams(cell.outputs)
    with writing_whole(path) as file:
        file.write((nbformat.writes(notebook) + "\n").encode())


def join_streams(outputs: list[Any]) -> list[Any]:
    """The outputs with neighbouring texts as one."""
    joined: list[Any] = []
    for output in outputs:
        if joined and output.get("name") == "stdout" == joined[-1].get("name"):
            joined[-1]["text"] += output["text"]
        else:
            joined.append(output)
    return joined


if __name__ == "__main__":
    sys.exit(run_command(main))
