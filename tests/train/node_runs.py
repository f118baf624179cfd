"""Runs on several nodes that stream to folders of their own, all on this machine.

A node is a group of ranks with a current folder of its own, below which --data-dir lies.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dataset.archive import units
from dataset.archive.index import build_index
from dataset.errors import DONE
from tests.dataset.tars import TRAIN, VAL
from tests.train import hooks
from tests.train import started_ranks as ranks
from tests.train.data.arriving import write_padded
from train.records.record import read_run

TWO_EPOCHS = ["--epochs", "2", "--microbatch", "2"]
UNIT = 150_000  # one image: 42 units


def write_served(images: Path, folder: Path) -> Path:
    """The tars and their indexes, with sums of small units."""
    served = write_padded(images, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(units, "UNIT_SIZE", UNIT)
        for name in (TRAIN, VAL):
            build_index(served / name, checksums=True)
    return served


def be_on_node(folder: Path, ranks_of_nodes: Sequence[int]) -> None:
    """A hook: this rank's node has its own current folder, and its own temporary one."""
    node, local = 0, hooks.own_rank()
    while local >= ranks_of_nodes[node]:
        local -= ranks_of_nodes[node]
        node += 1
    if "RANK" in os.environ:
        os.environ |= {"LOCAL_RANK": str(local), "GROUP_RANK": str(node)}
        os.environ["LOCAL_WORLD_SIZE"] = str(ranks_of_nodes[node])
    place = folder / f"node{node}"
    place.mkdir(exist_ok=True)
    os.chdir(place)
    tempfile.tempdir = str(place)
    prepare(folder)


def prepare(folder: Path) -> None:
    """A hook: samples are traced, and units are small."""
    hooks.trace_samples(folder / "trace")
    hooks.use_small_units()
    hooks.set_value("train.data.tar_layout", "UNIT_SIZE", UNIT)


def start_on_nodes(
    urls: str,
    folder: Path,
    ranks_of_nodes: Sequence[int],
    *flags: str,
    hook: ranks.Hook | None = None,
) -> ranks.Job:
    """A run under way on nodes with so many ranks each."""
    folder.mkdir(exist_ok=True)
    argv = [urls, *TWO_EPOCHS, "--output", str(folder / "run"), "--stream", "always", *flags]
    argv += [] if "--data-dir" in flags else ["--data-dir", "data"]
    place = partial(be_on_node, folder, ranks_of_nodes)
    hook = partial(hooks.all_of, place, *([hook] if hook else []))
    return ranks.start(argv, folder / "log", sum(ranks_of_nodes), hook=hook)


def run_local(served: Path, folder: Path, num_ranks: int, *flags: str) -> Path:
    """The folder of a run from the local tars, to its end."""
    folder.mkdir(exist_ok=True)
    argv = [str(served), *TWO_EPOCHS, "--output", str(folder / "run"), *flags]
    hook = partial(prepare, folder)
    ranks.start(argv, folder / "log", num_ranks, hook=hook).expect(DONE)
    return folder


def stream_of(folder: Path) -> dict[str, Any]:
    """What the stream of the last attempt has cost."""
    found: dict[str, Any] = read_run(folder / "run")["attempts"][-1]["stream"]
    return found
