"""The names of the classes beside a run and its model, and the name of the model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dataset.archive.labels import builtin_labels, ilsvrc_classes
from dataset.errors import DONE, DataError, UserError
from tests.train import started_ranks as ranks
from train.data.splits import open_dataset
from train.records.classes import (
    CLASSES_FILE,
    name_model,
    read_classes,
    refuse_other_classes,
    write_classes,
)
from train.records.record import read_run

OWN = ["3rd class (old)", "Ärger", "b\udcffad"]  # the last one is no UTF-8 on the disk


def test_only_a_model_of_the_thousand_ilsvrc_classes_is_called_imagenet() -> None:
    real = sorted({wnid.decode() for wnid in builtin_labels().values()})
    assert (len(real), ilsvrc_classes()) == (1000, real)
    assert name_model("resnet50", real) == "imagenet_resnet50.pt"
    assert name_model("resnet50", ["n90000001", *real[1:]]) == "resnet50_1000_classes.pt"
    assert name_model("resnet18", OWN) == "resnet18_3_classes.pt"
    assert name_model("resnet18", None) == "dummy_resnet18.pt"


def test_names_of_any_bytes_come_back_in_their_order(tmp_path: Path) -> None:
    assert read_classes(tmp_path) is None
    write_classes(tmp_path, OWN)
    before = (tmp_path / CLASSES_FILE).stat().st_mtime_ns
    write_classes(tmp_path, OWN)
    assert read_classes(tmp_path) == OWN
    assert (tmp_path / CLASSES_FILE).stat().st_mtime_ns == before


def test_a_model_of_other_classes_is_not_evaluated(tmp_path: Path) -> None:
    write_classes(tmp_path, OWN)
    model, checkpoint = tmp_path / "m.pt", tmp_path / "ckpt" / "step-000000001.pt"
    for path in (model, checkpoint):
        refuse_other_classes(path, OWN)
        with pytest.raises(UserError, match="number 1 is 'Ärger', but 'Zorn' in the data"):
            refuse_other_classes(path, [OWN[0], "Zorn", OWN[2]])
        with pytest.raises(UserError, match="trained on 3 classes, the data has 2"):
            refuse_other_classes(path, OWN[:2])
    refuse_other_classes(tmp_path / "elsewhere" / "m.pt", OWN[:2])  # nobody knows its classes
    for text in ("", "[]", '{"classes": 3}', "[" * 10_000):
        (tmp_path / CLASSES_FILE).write_text(text)
        with pytest.raises(DataError, match=r"classes\.json is damaged"):
            refuse_other_classes(model, OWN)


def test_a_run_leaves_the_names_of_its_classes_beside_its_model(
    images: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    argv = [str(images), "--max-steps", "1", "--output", str(out), "--save-model"]
    ranks.run(argv, tmp_path / "log").expect(DONE)
    run, classes = read_run(out), open_dataset(images, None).train.classes
    assert (run["dataset"]["num_classes"], run["dataset"]["classes"]) == (7, CLASSES_FILE)
    assert json.loads((out / run["dataset"]["classes"]).read_text()) == {"classes": classes}
    assert (out / f"{ranks.ARCH}_7_classes.pt").exists()
