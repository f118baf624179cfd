"""The public data plane: URLs, and a loop that is not ours and is killed."""

from __future__ import annotations

import shutil
import signal
from functools import partial
from pathlib import Path

import pytest
import torch

from dataset.archive.index import build_index
from dataset.errors import UserError
from dataset.names import TRAIN_TAR, VAL_TAR, VALPREP
from tests.dataset.dav_server import serving_tree
from tests.dataset.object_fetch import FAST
from tests.train import plain_loop
from tests.train import started_ranks as ranks
from train.data.sampler import epoch_order
from train.torch_data import CentreCrop, batches, open_images

NUM_STEPS = 40 // plain_loop.BATCH * plain_loop.EPOCHS


@pytest.fixture
def archives(tars: Path) -> dict[str, bytes]:
    """What a server has: the tars without an index, and the labels of the validation."""
    return {f"/ns/{name}": (tars / name).read_bytes() for name in (TRAIN_TAR, VAL_TAR, VALPREP)}


def test_a_url_is_fetched_once_and_opened_in_place(
    tars: Path, tmp_path: Path, archives: dict[str, bytes]
) -> None:
    decode = CentreCrop(32)
    with serving_tree(archives) as (root, gets):
        for split in ("train", "val"):
            here = open_images(tars, split, decode=decode)
            there = open_images(f"{root}/ns/", split, decode=decode, data_dir=tmp_path)
            assert there.targets == here.targets
            assert torch.equal(there[-1][0], here[-1][0])
        assert f"/ns/{TRAIN_TAR}.index" in gets  # asked for, and made here when there was none
        gets.clear()
        again = batches(open_images(f"{root}/ns/{TRAIN_TAR}", data_dir=tmp_path), 8, image_size=32)
        assert gets == []
    assert len(list(again)) == 5


def test_a_url_with_an_index_beside_it_needs_none_to_be_made(
    tars: Path, tmp_path: Path, archives: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, place = build_index(tars / TRAIN_TAR, index_dir=tmp_path / "index")
    archives[f"/ns/{TRAIN_TAR}.index"] = place.read_bytes()
    expected = open_images(tars / TRAIN_TAR).targets
    monkeypatch.setattr("dataset.archive.index.build_index", None)
    with serving_tree(archives) as (root, _):
        images = open_images(f"{root}/ns/{TRAIN_TAR}", data_dir=tmp_path / "data")
    assert images.targets == expected
    assert images.root == tmp_path / "data" / TRAIN_TAR


def test_a_url_of_nothing_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("dataset.fetch.urls", "dataset.stream.plan"):
        monkeypatch.setattr(f"{module}.Options", lambda: FAST)
    with serving_tree({"/ns/other.txt": b"x"}) as (root, _):
        for name, words in ((TRAIN_TAR, "404"), ("", "has neither train/ and val/ nor")):
            with pytest.raises(UserError, match=words) as raised:
                open_images(f"{root}/ns/{name}", data_dir=tmp_path)
            assert "\n" not in str(raised.value)


@pytest.fixture(scope="module")
def distinct(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 classes of one image each, so that a label tells which sample it is."""
    folder = tmp_path_factory.mktemp("distinct") / "train"
    files = sorted((images / "train").glob("*/*"))
    for number, file in enumerate(files[:40]):
        (folder / f"c{number:02d}").mkdir(parents=True)
        shutil.copy(file, folder / f"c{number:02d}")
    return folder.parent


def run_loop(data: Path, folder: Path, kill_at: int, when: str, world: int = 1) -> list[int]:
    """The exit codes of a start of the loop."""
    function = partial(plain_loop.train, data, folder, kill_at, when)
    return ranks.call(function, folder / f"log-{kill_at}", world).wait()


def test_a_loop_that_is_killed_loses_and_repeats_no_sample(distinct: Path, tmp_path: Path) -> None:
    """Kill -9 before and after a save, in both epochs; on one rank and on two."""
    starts = [(2, "before", 1), (4, "after", 2), (5, "after", 1), (7, "before", 2)]
    for kill_at, when, world in starts:
        codes = run_loop(distinct, tmp_path, kill_at, when, world)
        assert -signal.SIGKILL in codes, (tmp_path / f"log-{kill_at}").read_text()
    assert run_loop(distinct, tmp_path, NUM_STEPS + 1, "never") == [0]
    seen = torch.load(tmp_path / "last.pt")["seen"]
    expected = [int(index) for epoch in (0, 1) for index in epoch_order(0, epoch, 40)]
    assert seen == expected


def test_a_killed_loop_ends_with_the_weights_of_one_that_was_not(
    distinct: Path, tmp_path: Path
) -> None:
    states = []
    for name, kills in (("killed", [(3, "before"), (6, "after")]), ("not", [])):
        (tmp_path / name).mkdir()
        for kill_at, when in kills:
            assert run_loop(distinct, tmp_path / name, kill_at, when) == [-signal.SIGKILL]
        assert run_loop(distinct, tmp_path / name, NUM_STEPS + 1, "never") == [0]
        states.append(torch.load(tmp_path / name / "last.pt")["model"])
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[1])
