"""What the trainer's tests share: a small fake ImageNet as tars and as a folder."""

from __future__ import annotations

import io
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.utils.data import _utils

from dataset.fake.make import make_fake_imagenet
from tests.train import started_ranks as ranks
from tests.train.hooks import SMALL_UNITS

CLASSES, TRAIN_PER_CLASS, VAL_PER_CLASS = 7, 6, 5  # 42 and 35: no multiples of 2 x 4, 2, 3 or 4


# A loader that a failed batch ends stands in its own traceback, until the garbage collector ends
# its workers; their queues may be gone by then, and each worker is waited for so long: 5 s.
_utils.MP_STATUS_CHECK_INTERVAL = 0.2


@pytest.fixture(scope="session")
def tars(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The two ILSVRC tars of 7 classes, with 42 training and 35 validation images of 48 pixels."""
    folder = tmp_path_factory.mktemp("tars")
    make_fake_imagenet(
        folder,
        classes=CLASSES,
        train_per_class=TRAIN_PER_CLASS,
        val_per_class=VAL_PER_CLASS,
        size=(48, 48),
        oddities=True,
    )
    return folder


@pytest.fixture(scope="session")
def images(tars: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same images as a folder with train/ and val/, unpacked by other code than ours."""
    folder = tmp_path_factory.mktemp("images")
    unpack_train(tars, folder / "train")
    unpack_val(tars, folder / "val")
    return folder


@pytest.fixture
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units so small that the small set has many; hooks.use_small_units does it in a rank."""
    for name, value in SMALL_UNITS.items():
        monkeypatch.setattr(name, value)


@pytest.fixture(autouse=True)
def _no_leftovers() -> Iterator[None]:
    yield
    ranks.end_leftovers()


def unpack_train(tars: Path, folder: Path) -> None:
    with tarfile.open(tars / "ILSVRC2012_img_train.tar") as outer:
        for member in outer:
            data = outer.extractfile(member)
            assert data is not None
            with tarfile.open(fileobj=io.BytesIO(data.read())) as inner:
                inner.extractall(folder / member.name.removesuffix(".tar"), filter="data")


def unpack_val(tars: Path, folder: Path) -> None:
    folder.mkdir(parents=True)
    with tarfile.open(tars / "ILSVRC2012_img_val.tar") as tar:
        tar.extractall(folder, filter="data")
    subprocess.run(["bash", str(tars / "valprep.sh")], cwd=folder, check=True)
