"""Two ranks open one data set: one a node lists it or makes its index, the others receive it."""

from __future__ import annotations

import os
import shutil
from functools import partial
from pathlib import Path

import pytest

from dataset.errors import DONE
from tests.train import hooks
from tests.train import started_ranks as ranks


def refuse_to_open(module: str, name: str) -> None:
    """Rank 1 fails where it would read from the shared disk itself."""
    if os.environ["RANK"] == "1":
        hooks.set_value(module, name, _refuse)


def _refuse(*_: object, **__: object) -> None:
    raise AssertionError("rank 1 reads from the shared disk")


def argv_for(data: Path, out: Path) -> list[str]:
    return [str(data), "--max-steps", "1", "--output", str(out)]


ONE_OPENS = partial(refuse_to_open, "train.open_data", "open_dataset")


def test_one_rank_of_a_node_makes_the_index_and_the_other_receives_it(
    tars: Path, tmp_path: Path
) -> None:
    data = tmp_path / "tars"
    shutil.copytree(tars, data, ignore=shutil.ignore_patterns("*.index"))
    argv = argv_for(data, tmp_path / "out1")
    job = ranks.run(argv, tmp_path / "log1", 2, hook=ONE_OPENS).expect(DONE)
    assert job.log.count("making it, once") == 2  # of training and validation, by one rank


def test_one_rank_of_a_node_lists_a_folder_and_reads_the_checkpoint(
    images: Path, tmp_path: Path
) -> None:
    argv = argv_for(images, tmp_path / "out")
    ranks.run(argv, tmp_path / "log", 2, hook=ONE_OPENS).expect(DONE)
    hook = partial(refuse_to_open, "train.checkpoints.checkpoint", "load_checkpoint")
    more = [*argv, "--max-steps", "2"]
    job = ranks.run(more, tmp_path / "log1", 2, hook=hook).expect(DONE)
    assert "continuing from step 1 of" in job.log
    named = [*argv_for(images, tmp_path / "other"), "--max-steps", "3"]
    named += ["--resume", str(tmp_path / "out" / "ckpt" / "step-000000002.pt")]
    job = ranks.run(named, tmp_path / "log2", 2, hook=hook).expect(DONE)
    assert "continuing from step 2 of" in job.log


@pytest.mark.parametrize("what", ["another memory", "no room"])
def test_a_rank_that_finds_no_list_of_its_node_opens_the_data_itself(
    images: Path, tmp_path: Path, what: str
) -> None:
    """Containers on one node without a common /dev/shm, and one that is full."""
    name = "_take_up" if what == "another memory" else "_put_down"
    hook = partial(hooks.set_value, "train.open_data", name, _nothing)
    ranks.run(argv_for(images, tmp_path / "out"), tmp_path / "log", 2, hook=hook).expect(DONE)


def _nothing(_: object) -> None:
    return None
