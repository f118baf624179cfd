"""Two ranks open one data set: in turns where an index must be made, at once where none is."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

from dataset.errors import DONE
from tests.train import ranks


def refuse_turns() -> None:
    """A rank that would wait for its turn fails instead."""
    from train import prepare

    def refuse(*_: object) -> None:
        raise AssertionError("the ranks take turns")

    prepare.open_in_turns = refuse  # type: ignore[assignment]


def argv_for(data: Path, out: Path) -> list[str]:
    return [str(data), "--max-steps", "1", "--output", str(out)]


def test_one_rank_makes_the_index_and_the_next_start_takes_no_turns(
    tars: Path, tmp_path: Path
) -> None:
    data = tmp_path / "tars"
    shutil.copytree(tars, data, ignore=shutil.ignore_patterns("*.index"))
    job = ranks.run(argv_for(data, tmp_path / "out1"), tmp_path / "log1", 2).expect(DONE)
    assert job.log.count("making it, once") == 2  # of training and validation, by one rank
    hook = partial(refuse_turns)
    ranks.run(argv_for(data, tmp_path / "out2"), tmp_path / "log2", 2, hook=hook).expect(DONE)


def test_a_folder_is_opened_by_all_ranks_at_once(images: Path, tmp_path: Path) -> None:
    argv = argv_for(images, tmp_path / "out")
    ranks.run(argv, tmp_path / "log", 2, hook=partial(refuse_turns)).expect(DONE)
