"""Runs that stream a padded set of 64 MiB or less from the mini-OSDF, or read it from the disk."""

from __future__ import annotations

import os
import shutil
import tarfile
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from dataset.archive import units
from dataset.archive.index import build_index
from dataset.errors import DONE
from dataset.fake.make import make_fake_imagenet
from dataset.federation.lookup import Options
from dataset.fetch.ledger import Ledger
from dataset.names import INDEX_SUFFIX
from dataset.stream.arrivals import ArrivalMap
from dataset.stream.spec import StreamSpec
from tests.dataset.tars import TRAIN, VAL, Tree, flatten, nested_bytes, tar_bytes
from tests.train import hooks
from tests.train import started_ranks as ranks
from tests.train.outcomes import final_state, find_differences, read_trace

PADDING = 155_000  # behind each image, where no decoder looks
CLASSES, PER_CLASS, VAL_PER_CLASS = 4, 108, 2
STEPS = 54  # an epoch, of 8 images each
TWO_EPOCHS = ["--epochs", "2", "--microbatch", "4"]
ONE_EPOCH = ["--epochs", "1"]  # given later, it counts


@dataclass(frozen=True)
class Served:
    """The two tars with their indexes: in a folder, and as objects."""

    folder: Path
    path: str  # of the objects' folder in the federation
    federation: str

    @property
    def urls(self) -> str:
        return f"osdf://{self.path}/{TRAIN},osdf://{self.path}/{VAL}"

    @property
    def train_path(self) -> str:
        return f"{self.path}/{TRAIN}"


def serve_set(
    osdf: ModuleType, folder: Path, per_class: int = PER_CLASS, is_protected: bool = False
) -> Served:
    """Makes the set and puts it into the federation, under a name of its own."""
    made = folder / "made"
    make_fake_imagenet(
        made, classes=CLASSES, train_per_class=per_class, val_per_class=1, size=(48, 48)
    )
    tree = _read_padded(made / TRAIN)
    val = {name: dict(list(files.items())[:VAL_PER_CLASS]) for name, files in tree.items()}
    tars = folder / "tars"
    tars.mkdir()
    (tars / TRAIN).write_bytes(nested_bytes(tree))
    (tars / VAL).write_bytes(tar_bytes(flatten(val)))
    name = f"stream-{os.urandom(4).hex()}"
    space = osdf.PROTECTED if is_protected else osdf.PUBLIC
    for tar in (tars / TRAIN, tars / VAL):
        with pytest.MonkeyPatch.context() as patch:  # the sums of the units that the runs have
            patch.setattr(units, "UNIT_SIZE", hooks.SMALL_UNITS["train.data.tar_layout.UNIT_SIZE"])
            build_index(tar, checksums=True)
        for file in (tar, tar.with_name(tar.name + INDEX_SUFFIX)):
            osdf.put(f"{name}/{file.name}", file, space)
    federation = osdf.DIRECTOR_URL if is_protected else osdf.DIRECTOR_HTTP_URL
    return Served(tars, f"{space}/{name}", federation)


def _read_padded(tar: Path) -> Tree:
    noise = np.random.default_rng(0)
    tree: Tree = {}
    with tarfile.open(tar) as outer:
        for member in outer:
            with tarfile.open(fileobj=outer.extractfile(member)) as inner:
                tree[member.name.removesuffix(".tar")] = {
                    image.name: _read(inner, image) + noise.bytes(PADDING) for image in inner
                }
    return tree


def _read(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(member)
    assert file is not None
    return file.read()


def start_run(
    data: str, served: Served, folder: Path, *flags: str, hook: ranks.Hook | None = None
) -> ranks.Job:
    """A run of which data, records, trace, log and temporary files lie in a folder."""
    folder.mkdir(exist_ok=True)
    argv = [data, *TWO_EPOCHS, "--federation", served.federation]
    argv += ["--data-dir", str(folder / "data"), "--output", str(folder / "run"), *flags]
    return ranks.start(argv, folder / "log", hook=partial(_prepare_rank, folder, hook))


def run_local(served: Served, folder: Path, *flags: str) -> Path:
    """The folder of the same run from the local tars, in the streamed order."""
    start_run(str(served.folder), served, folder, *flags, "--order", "streamed").expect(DONE)
    return folder


def _prepare_rank(folder: Path, more: ranks.Hook | None) -> None:
    hooks.all_of(*([more] if more else []))
    tempfile.tempdir = str(folder)  # TMPDIR has been read before the fork
    hooks.trace_samples(folder / "trace")
    hooks.use_small_units()


def hurry(stall_s: float = 1.0, missing_s: float = 1.0) -> None:
    """A hook: plan and fetcher give up a silent connection, and a refused object, so soon."""
    for kind in (StreamSpec, Options):
        quick = partial(kind, stall_s=stall_s, missing_s=missing_s)
        hooks.set_value("train.stream.task", kind.__name__, quick)


def find_map(folder: Path) -> ArrivalMap | None:
    """The map of the training tar in a run under way, once its fetcher is heard of."""
    for path in folder.glob("trainyard-stream-*/train.map"):
        arrivals = ArrivalMap(path)
        if arrivals.pid:
            return arrivals
    return None


def forget_maps(folder: Path) -> None:
    """Removes what a killed run could not."""
    for left in folder.glob("trainyard-stream-*"):
        shutil.rmtree(left)


def check_same_run(folder: Path, local: Path, served: Served) -> None:
    """Sample ids and weights are those of the local run; the tars are whole and in the ledger."""
    assert read_trace(folder / "trace") == read_trace(local / "trace")
    assert find_differences(final_state(folder / "run"), final_state(local / "run")) == []
    ledger = Ledger(folder / "data")
    for name in (TRAIN, VAL):
        path = folder / "data" / name
        assert path.read_bytes() == (served.folder / name).read_bytes()
        assert ledger.vouches_for(path)
    assert list(folder.glob("trainyard-stream-*")) == []
