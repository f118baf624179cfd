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

# The phases of a run, in the order of the tables. They sum to the wall clock of the attempts.
PHASES = ("startup", "data_wait", "compute", "communication", "evaluation", "checkpoint", "other")
STATUSES = ("running", "checkpointed", "done", "failed")

Record = dict[str, Any]


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Writes value as NAME.part and renames it: a reader sees the old file or the new one."""
    part = path.with_name(path.name + ".part")
    with open(part, "w") as file:
        json.dump(value, file, indent=1, allow_nan=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def append_line(path: Path, value: Mapping[str, Any]) -> None:
    """Adds one JSON line in one write, after a line that a killed writer left torn too."""
    line = json.dumps(value, allow_nan=False) + "\n"
    with open(path, "ab+") as file:
        if file.tell() > 0:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                line = "\n" + line
        file.write(line.encode())
        file.flush()
        os.fsync(file.fileno())


def read_run(folder: Path) -> Record:
    """The run.json of a folder; a newer schema, whose numbers may differ, is refused."""
    path = folder / RUN_FILE
    try:
        run: Record = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise DataError(f"{path} is not JSON ({error}); was it edited by hand?") from None
    if not isinstance(run, dict) or not isinstance(run.get("schema"), int):
        raise DataError(f"{path} has no schema number; it is not a run record of this project")
    if run["schema"] > SCHEMA:
        raise UserError(
            f"{path} has schema {run['schema']}, this code reads up to {SCHEMA}; update it"
        )
    return run


def read_lines(path: Path) -> list[Record]:
    """The records of a .jsonl file without torn lines; a missing file is an empty one."""
    return list(iter_lines(path))


def iter_lines(path: Path) -> Iterator[Record]:
    """Each whole record of a .jsonl file in turn."""
    if not path.exists():
        return
    with open(path) as file:
        for line in file:
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(record, dict):
                yield record


def read_epochs(folder: Path) -> list[Record]:
    """The epochs of the surviving trajectory: a later line supersedes those from its epoch on."""
    by_epoch: dict[int, Record] = {}
    for record in iter_lines(folder / EPOCHS_FILE):
        epoch = int(record["epoch"])
        by_epoch = {e: r for e, r in by_epoch.items() if e < epoch}
        by_epoch[epoch] = record
    return list(by_epoch.values())


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
