"""The classes of a model: their names in a file beside it, and the model's own file name."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from dataset.archive.labels import ilsvrc_classes
from dataset.durable import write_json
from dataset.errors import DataError, UserError

CLASSES_FILE = "classes.json"  # not in run.json, which is rewritten every half minute


def name_model(arch: str, classes: Sequence[str] | None) -> str:
    """The file name of a model: imagenet_ARCH.pt for the 1,000 classes of ILSVRC2012."""
    if classes is None:
        return f"dummy_{arch}.pt"
    if list(classes) == ilsvrc_classes():
        return f"imagenet_{arch}.pt"
    return f"{arch}_{len(classes)}_classes.pt"


def write_classes(folder: Path, classes: Sequence[str]) -> None:
    """Writes the names in the order of the model's outputs, unless they are there."""
    if read_classes(folder) != list(classes):
        write_json(folder / CLASSES_FILE, {"classes": list(classes)})


def read_classes(folder: Path) -> list[str] | None:
    """The names that lie in a folder, or None without such a file."""
    try:
        record = json.loads((folder / CLASSES_FILE).read_text())
        return [str(name) for name in record["classes"]]
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, RecursionError):
        return []  # damaged: equal to no model's classes


def refuse_other_classes(model: Path, classes: Sequence[str]) -> None:
    """Raises when the names beside a model, or beside its ckpt/, are not those of the data."""
    folder = model.parent.parent if model.parent.name == "ckpt" else model.parent
    trained = read_classes(folder)
    if trained is None or trained == list(classes):
        return
    if not trained:
        raise DataError(f"{folder / CLASSES_FILE} is damaged; fix it or remove it")
    if len(trained) != len(classes):
        told = f"{len(trained)} classes, the data has {len(classes)}"
    else:
        pairs = enumerate(zip(trained, classes, strict=True))
        place, (old, new) = next((n, pair) for n, pair in pairs if pair[0] != pair[1])
        told = f"other classes: number {place} is {old!r}, but {new!r} in the data"
    raise UserError(f"{model} was trained on {told}; evaluate it on data with its own classes")
