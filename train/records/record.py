"""The records of a run: run.json, epochs.jsonl and stages.jsonl, read and written (no torch)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dataset import own_names
from dataset.errors import DataError, UserError

SCHEMA = 1
RUN_FILE = "run.json"
EPOCHS_FILE = "epochs.jsonl"
STAGES_FILE = own_names.STAGES
# Of an evaluation: a row for each image, and the most confident mistakes with small pictures.
PREDICTIONS_FILE = "predictions.csv"
MISTAKES_FILE = "mistakes.jsonl"

# The phases of a run, in the order of the tables. They sum to the wall clock of the attempts.
PHASES = ("startup", "data_wait", "compute", "communication", "evaluation", "checkpoint", "other")

Record = dict[str, Any]

# Our records are far below these limits; a file beyond them is damaged or not ours.
MAX_BYTES = 16 * 2**20
MAX_DEPTH = 20
MAX_DIGITS = 30
MAX_IMAGES = 10**15


def name_evaluated(file: str, suffix: str) -> str:
    """The name of a file of an evaluation; those of averaged weights have the suffix _ema."""
    stem, _, ending = file.partition(".")
    return f"{stem}{suffix}.{ending}"


def append_line(path: Path, value: Mapping[str, Any]) -> None:
    """Appends one JSON line in one write, on a new line even after a torn one.

    It is not synced here: a checkpoint syncs the lines before it.
    """
    line = json.dumps(value, allow_nan=False) + "\n"
    with open(path, "ab+") as file:
        if file.tell() > 0:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                line = "\n" + line
        file.write(line.encode())


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text; ValueError for one that cannot be a record of ours.

    NaN and Infinity, numbers of more than 30 digits and deep nesting are refused, because later
    code would fail on them. Half of a surrogate pair, which cannot be printed, becomes a '?'.
    """
    try:
        value = json.loads(
            text, parse_constant=_refuse, parse_int=_parse_int, parse_float=_parse_float
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if _is_deeper(value, MAX_DEPTH):
        raise ValueError(f"it is nested more than {MAX_DEPTH} deep")
    escape = "\\ud" if isinstance(text, str) else b"\\ud"
    if escape in text.lower():  # type: ignore[operator]
        whole = json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")
        value = json.loads(whole)
    return value


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not a number")


def _parse_int(digits: str) -> int:
    if len(digits.lstrip("-")) > MAX_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def _parse_float(text: str) -> float:
    value = float(text)
    if abs(value) >= 10**MAX_DIGITS:
        raise ValueError(f"{text[:20]} is out of range")
    return value


def _is_deeper(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit + 1):
        if not level:
            return False
        level = [
            part
            for parent in level
            if isinstance(parent, dict | list)
            for part in (parent.values() if isinstance(parent, dict) else parent)
        ]
    return bool(level)


def read_run(folder: Path) -> Record:
    """The run.json of a folder; a newer schema, whose numbers may differ, is refused."""
    path = folder / RUN_FILE
    if path.exists() and (not path.is_file() or path.stat().st_size > MAX_BYTES):
        raise DataError(f"{path} is not a file of less than {MAX_BYTES >> 20} MiB")
    try:
        run: Record = parse_json(path.read_bytes())
    except ValueError as error:
        raise DataError(f"{path} is not JSON ({error}); restore it, or move it away") from None
    if not isinstance(run, dict) or type(run.get("schema")) is not int:
        raise DataError(f"{path} has no schema number; it is not a run record of this project")
    if run["schema"] > SCHEMA:
        raise UserError(
            f"{path} has schema {run['schema']}, this code reads up to {SCHEMA}; update it"
        )
    return run


def read_lines(path: Path) -> list[Record]:
    """The records of a .jsonl file without torn lines; a missing file is an empty one."""
    return [record for record in iter_lines(path) if record is not None]


def iter_lines(path: Path) -> Iterator[Record | None]:
    """Each line of a .jsonl file in turn: its record, or None for one that is torn or damaged."""
    if not path.is_file():
        return
    with open(path, "rb") as file:
        while line := file.readline(MAX_BYTES):
            if not line.strip():
                continue
            try:
                record = parse_json(line)
            except ValueError:
                record = None
            yield record if isinstance(record, dict) else None


def read_epochs(folder: Path) -> list[Record]:
    """The epochs that count: a line replaces all earlier lines of its epoch and later ones."""
    trajectory: list[Record] = []
    for record in read_lines(folder / EPOCHS_FILE):
        if type(record.get("epoch")) is not int:
            continue
        while trajectory and trajectory[-1]["epoch"] >= record["epoch"]:
            trajectory.pop()
        trajectory.append(record)
    return trajectory


def find_runs(paths: list[Path]) -> list[Path]:
    """The run folders at or below each path, sorted; a path may be a run.json itself."""
    found: set[Path] = set()
    for path in paths:
        if not path.exists():
            raise UserError(f"no such file or folder: {path}; give run folders or one above")
        if path.is_file():
            found.add(path.parent)
        else:
            found.update(file.parent for file in path.rglob(RUN_FILE))
    return sorted(found)


def explain_untrained(run: Mapping[str, Any]) -> str:
    """Why a run.json is not that of a model trained to the end, or an empty string."""
    status, code, images = run.get("status"), run.get("exit_code"), run.get("images_trained")
    if status != "done" or isinstance(code, bool) or code != 0:
        return f"run.json says {status}, exit {code}"
    if isinstance(images, int | float) and type(images) is not bool and 0 < images <= MAX_IMAGES:
        return ""
    return "run.json says that nothing was trained"
