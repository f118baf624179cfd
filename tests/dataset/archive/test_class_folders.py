"""What is a class and what is an image: the same answer for a folder and for its tar."""

from __future__ import annotations

import logging
import tarfile
from pathlib import Path

import pytest

from dataset.archive.extract import Extraction, extract_archive
from dataset.errors import UserError
from dataset.names import TRAIN_TAR
from train.data.sources import FolderSource, Source
from train.data.splits import open_dataset

HIDDEN = ["n1/._a.JPEG", ".hidden/b.JPEG", ".ipynb_checkpoints/a-checkpoint.JPEG", "n1/.x/c.JPEG"]


def make_folder(root: Path, *files: str) -> Path:
    for file in files:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_bytes(file.encode())
    return root


def list_names(source: Source) -> list[str]:
    return [source.name(i) for i in range(len(source))]


@pytest.mark.parametrize("prefix", ["", "./", "train/"])
def test_hidden_files_and_folders_are_neither_images_nor_classes_in_folder_and_tar(
    tmp_path: Path, prefix: str
) -> None:
    root = make_folder(tmp_path / "data" / "train", "n1/a.JPEG", "n2/b.png", "n2/c.txt", *HIDDEN)
    (tmp_path / "tars").mkdir()
    with tarfile.open(tmp_path / "tars" / TRAIN_TAR, "w") as tar:
        for path in sorted(root.rglob("*")):
            tar.add(path, prefix + str(path.relative_to(root)), recursive=False)
    folder, tar_data = open_dataset(tmp_path / "data", None), open_dataset(tmp_path / "tars", None)
    assert list_names(folder.train) == list_names(tar_data.train) == ["n1/a.JPEG", "n2/b.png"]
    assert folder.train.classes == tar_data.train.classes == ["n1", "n2"]
    assert folder.fingerprint == tar_data.fingerprint


@pytest.mark.parametrize("target", ["nowhere", "n3"], ids=["to nothing", "to itself"])
def test_a_class_that_is_a_broken_link_is_named(tmp_path: Path, target: str) -> None:
    """Left out, it would give every class after it another label."""
    root = make_folder(tmp_path, "n1/a.JPEG", "n4/b.JPEG")
    (root / "n2").symlink_to("n1")
    assert FolderSource(root).classes == ["n1", "n2", "n4"]
    (root / ".#lock").symlink_to("user@host.1234")  # Emacs'
    (root / "n3").symlink_to(target)
    with pytest.raises(UserError, match="n3 is a broken link; fix it"):
        FolderSource(root)


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz"])
def test_hidden_class_tars_are_no_classes(tmp_path: Path, name: str) -> None:
    make_folder(tmp_path / "n1", "a.JPEG", "._a.JPEG")
    (tmp_path / "._n1.tar").write_bytes(b"resource fork")
    with tarfile.open(tmp_path / "n1.tar", "w") as tar:
        for file in ("._a.JPEG", "a.JPEG"):
            tar.add(tmp_path / "n1" / file, file)
    with tarfile.open(tmp_path / name, "w:gz" if name.endswith("gz") else "w") as outer:
        for file in ("._n1.tar", "n1.tar"):
            outer.add(tmp_path / file, file)
    extract_archive(Extraction(tmp_path / name, "train", tmp_path / "out"))
    assert list_names(FolderSource(tmp_path / "out" / "train")) == ["n1/a.JPEG"]
    if name == "a.tar":
        assert list_names(open_dataset(tmp_path / name, None).train) == ["n1/a.JPEG"]


@pytest.mark.parametrize("half", ["train", "val"])
def test_a_class_folder_without_an_image_is_refused_by_name_unless_allowed(
    tmp_path: Path, half: str
) -> None:
    files = [f"{h}/{c}/a.JPEG" for h in ("train", "val") for c in ("n1", "n3")]
    root = make_folder(tmp_path, *files, f"{half}/n2/._a.JPEG", f"{half}/n2/a.txt")
    with pytest.raises(UserError, match=rf"1 class folder of .*/{half} .*: n2; remove .*--allow"):
        open_dataset(root, None)
    if half == "train":
        assert open_dataset(root, None, allow_empty=True).train.classes == ["n1", "n2", "n3"]


def test_training_classes_without_validation_images_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("trainyard"), "propagate", True)
    root = make_folder(tmp_path, "train/n1/a.jpg", "train/n2/a.jpg", "val/n2/a.jpg")
    with caplog.at_level(logging.INFO, "trainyard"):
        dataset = open_dataset(root, None)
    assert "1 of 2 training classes have no validation images, e.g. n1" in caplog.text
    assert dataset.val is not None and dataset.val.labels.tolist() == [1]
