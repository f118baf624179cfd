"""Ready batches for any loop: the trainer's own, and exactly continued from a state."""

from __future__ import annotations

import gc
import json
import os
import signal
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from dataset.errors import DataError, PassingError, UserError
from tests.train.data import small_batches
from tests.train.data.small_batches import NUM_TRAIN, NUM_VAL, SEED, SIZE, digest, spoil
from train.data.batches import Batch
from train.data.resumable import ResumableBatches
from train.data.sampler import epoch_order
from train.torch_data import batches, open_images

BATCH, STEPS = small_batches.BATCH, NUM_TRAIN // small_batches.BATCH
PARTS = BATCH // small_batches.MICROBATCH


def open_batches(data: Path, **settings: Any) -> ResumableBatches:
    return batches(data, BATCH, **({"image_size": SIZE, "seed": SEED, "num_workers": 0} | settings))


def take(loop: Any) -> list[tuple[int, list[int]]]:
    return [digest(Batch(images, labels, [], "")) for images, labels in loop]


def whole(parts: list[Batch]) -> tuple[int, list[int]]:
    """The digest of a batch that the trainer loads in parts."""
    images, labels = [part.images for part in parts], [part.labels for part in parts]
    return digest(Batch(torch.cat(images), torch.cat(labels), [], ""))


def take_some(loader: ResumableBatches, count: int) -> list[tuple[int, list[int]]]:
    found = []
    for images, labels in loader:
        found.append(digest(Batch(images, labels, [], "")))
        if len(found) == count:
            break
    return found


@pytest.mark.parametrize("order", ["uniform", "streamed"])
def test_the_batches_are_those_of_the_trainer(
    images: Path, tars: Path, small_units: None, order: Any
) -> None:
    chosen = small_batches.open_streamed(tars) if order == "streamed" else None
    trainer = small_batches.open_images(tars, decoder="auto", order=chosen)
    items = [item for item in small_batches.items_of(trainer, total=2 * STEPS) if not item.is_val]
    parts = [trainer[item] for item in items]  # microbatches of 2
    expected = [whole(parts[i : i + PARTS]) for i in range(0, len(parts), PARTS)]
    for num_workers in (0, 2):
        loader = open_batches(tars, order=order, num_workers=num_workers)
        assert len(loader) == STEPS
        assert take(loader) + take(loader) == expected
    assert loader.epoch == 2


def test_images_are_uint8_in_the_layout_of_the_trainer(tars: Path) -> None:
    images, labels = next(iter(open_batches(tars)))
    assert (images.dtype, images.shape) == (torch.uint8, (BATCH, 3, SIZE, SIZE))
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert (labels.dtype, labels.shape) == (torch.int64, (BATCH,))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_state_at_any_step_gives_exactly_the_rest(tars: Path, num_workers: int) -> None:
    whole = open_batches(tars)
    expected = take(whole) + take(whole)
    for step in range(2 * STEPS):
        loader = open_batches(tars, num_workers=num_workers)
        found = take_some(loader, step) if step < STEPS else take(loader)
        found += take_some(loader, step - STEPS) if step > STEPS else []
        again = open_batches(tars, num_workers=num_workers)
        again.load_state_dict(json.loads(json.dumps(loader.state_dict())))
        while again.epoch < 2:
            found += take(again)
        assert found == expected


def test_a_state_goes_on_with_any_number_of_ranks(images: Path, tars: Path) -> None:
    one = open_batches(tars)
    expected = [labels for _, labels in take(one)]
    found: list[list[int]] = []
    state = open_batches(tars).state_dict()
    for world in (1, 2, 4, 8, 2):  # a step on each; also from the folder in place of the tar
        ranks = [
            open_batches(images if world == 4 else tars, rank=rank, world_size=world)
            for rank in range(world)
        ]
        shares = []
        for loader in ranks:
            loader.load_state_dict(state)
            shares.append(take_some(loader, 1)[0][1])
        found.append([label for share in shares for label in share])
        states = [loader.state_dict() for loader in ranks]
        assert all(other == states[0] for other in states)
        state = states[0]
    assert found == expected
    assert (state["epoch"], state["step"]) == (1, 0)


def test_an_epoch_has_every_sample_once_but_for_the_tail(images: Path) -> None:
    loader = open_batches(images)
    for epoch in (0, 1):
        order = epoch_order(SEED, epoch, NUM_TRAIN)[: STEPS * BATCH]
        targets = open_images(images).targets
        labels = [label for _, own in take(loader) for label in own]
        assert labels == [targets[index] for index in order]


def test_a_loop_that_was_left_is_followed_by_the_next_epoch(tars: Path) -> None:
    expected = open_batches(tars)
    first, second = take(expected), take(expected)
    loader = open_batches(tars)
    assert take_some(loader, 2) == first[:2]
    assert take(loader) == second


def test_set_epoch_chooses_the_epoch_and_keeps_the_place_of_a_state(tars: Path) -> None:
    loader = open_batches(tars)
    first = take(loader)
    loader.set_epoch(0)
    assert take_some(loader, 2) == first[:2]
    loader.set_epoch(0)
    assert take_some(loader, 2) == first[:2]
    again = open_batches(tars)
    again.load_state_dict(loader.state_dict())
    again.batch_sampler.sampler.set_epoch(0)  # as Lightning does
    assert take(again) == first[2:]
    again.load_state_dict(loader.state_dict())
    again.set_epoch(1)
    assert take(again) == take(loader)


def test_of_two_loops_at_once_the_older_is_ended(tars: Path) -> None:
    loader = open_batches(tars)
    older, newer = iter(loader), iter(loader)
    next(older)
    next(newer)
    with pytest.raises(UserError, match="another loop over these batches has begun"):
        next(older)


def test_the_order_is_that_of_the_state_unless_one_is_named(tars: Path, small_units: None) -> None:
    streamed = open_batches(tars, order="streamed")
    expected = take(streamed)
    state = open_batches(tars, order="streamed").state_dict()
    loader = open_batches(tars)
    loader.load_state_dict(state)
    assert take(loader) == expected != take(open_batches(tars))


def test_a_state_of_another_version_or_of_other_batches_is_one_line(tars: Path) -> None:
    loader = open_batches(tars, order="uniform")
    state = loader.state_dict()
    cases: list[tuple[Any, str]] = [
        (state | {"version": 2}, "has version 2, this code reads version 1"),
        ({}, "has version None"),
        ([1], "has version None"),
        ({"version": 1}, "not one of batches"),
        (state | {"step": "4"}, "not one of batches"),
        (state | {"step": STEPS}, rf"step {STEPS} of {STEPS} in epoch 0"),
        (state | {"epoch": -1}, "in epoch -1"),
        (open_batches(tars, seed=SEED + 1).state_dict(), rf"seed: {SEED + 1} -> {SEED}"),
        (open_batches(tars, image_size=64).state_dict(), "image_size: 64 -> 32"),
        (open_batches(tars, order="streamed").state_dict(), "order: streamed -> uniform"),
        (open_batches(tars, decoder="pil").state_dict(), "decoder: pil -> kernel"),
        (open_batches(tars, split="val").state_dict(), "is_train: False -> True"),
    ]
    for bad, words in cases:
        with pytest.raises(UserError, match=words) as raised:
            loader.load_state_dict(bad)
        assert "\n" not in str(raised.value)
    assert loader.state_dict() == state


def test_a_state_of_other_data_is_refused(images: Path, tmp_path: Path) -> None:
    data, _ = spoil(images, tmp_path / "data", 0)
    next((data / "train" / "n90000003").iterdir()).unlink()
    with pytest.raises(UserError, match=r"other batches \(data: \w+ -> \w+\)"):
        open_batches(images).load_state_dict(open_batches(data).state_dict())


# --- validation ---------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 3])
def test_a_validation_has_every_image_once_each_time(tars: Path, world: int) -> None:
    targets = open_images(tars, "val").targets
    for rank in range(world):
        loader = open_batches(tars, split="val", rank=rank, world_size=world)
        first = take_some(loader, 1)  # Lightning's check before the training
        passes = [take(loader), take(loader)]
        assert passes[0] == passes[1]
        assert passes[0][:1] == first
        assert len(passes[0]) == len(loader)
        labels = [label for _, own in passes[0] for label in own]
        assert labels == targets[rank:NUM_VAL:world]


def test_opened_images_keep_their_split(tars: Path) -> None:
    opened = batches(open_images(tars, "val"), BATCH, image_size=SIZE, num_workers=0)
    assert take(opened) == take(open_batches(tars, split="val"))


def test_a_validation_goes_on_with_the_same_ranks_only(tars: Path) -> None:
    loader = open_batches(tars, split="val")
    expected = take(loader)
    take_some(loader, 2)
    again = open_batches(tars, split="val")
    again.load_state_dict(loader.state_dict())
    assert take(again) == expected[2:]
    other = open_batches(tars, split="val", rank=0, world_size=2)
    with pytest.raises(UserError, match="world_size: 1 -> 2"):
        other.load_state_dict(loader.state_dict())


# --- what goes wrong ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rank": 0, "world_size": 3}, "8 is the global batch and cannot be split evenly over 3"),
        ({"batch_size": 64}, "42 training images are fewer than one batch of 64 on 1 rank"),
        ({"batch_size": 0}, "batch_size=0 must be at least 1"),
        ({"image_size": 0}, "image_size=0 must be at least 1"),
        ({"rank": 1}, "give both rank and world_size"),
        ({"rank": 2, "world_size": 2}, "rank=2 is not one of 2 ranks"),
        ({"order": "random"}, "order 'random' is none of"),
        ({"num_workers": -1}, "num_workers=-1 must be at least 0"),
        ({"skip_bad_images": -1}, "skip_bad_images=-1 must be at least 0"),
        ({"decoder": "kernal"}, "decoder 'kernal' is none of 'auto', 'kernel' and 'pil'"),
    ],
)
def test_a_mistake_is_one_line(tars: Path, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        batches(tars, **({"batch_size": BATCH} | settings))


def test_a_bad_image_is_named_or_skipped_as_often_as_allowed(images: Path, tmp_path: Path) -> None:
    data, (name, _) = spoil(images, tmp_path / "data", 7, 19)
    with pytest.raises(DataError, match=r"cannot decode .*; --skip-bad-images N"):
        take(open_batches(data, decoder="pil"))
    with pytest.raises(DataError, match="of this epoch cannot be decoded"):
        take(open_batches(data, decoder="pil", skip_bad_images=1, seed=0))
    assert len(take(open_batches(data, decoder="pil", skip_bad_images=2, seed=0))) == STEPS
    assert Path(name).exists()


def test_batches_of_images_have_their_split(tars: Path) -> None:
    images = open_images(tars)
    with pytest.raises(UserError, match="opened as split 'train'"):
        batches(images, 8, "val")
    assert len(batches(images, 8)) == len(batches(images, 8, "train"))


def test_batches_from_before_the_ranks_met_are_refused(
    tars: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    early, given = open_batches(tars), open_batches(tars, rank=0, world_size=2)
    monkeypatch.setattr("train.torch_data.dist.is_initialized", lambda: True)
    monkeypatch.setattr("train.torch_data.dist.get_rank", lambda: 1)
    monkeypatch.setattr("train.torch_data.dist.get_world_size", lambda: 2)
    with pytest.raises(UserError, match=r"before torch\.distributed was initialised"):
        next(iter(early))
    assert len(list(given)) == len(list(open_batches(tars))) > 0


def test_the_workers_of_loops_that_have_ended_are_let_go(tars: Path) -> None:
    """A program may have hundreds of loops, each worker holds two files, and 1,024 are allowed."""

    def find_workers() -> set[int]:
        gc.collect()
        return {id(found) for found in gc.get_objects() if isinstance(found, ForkProcess)}

    before = find_workers()
    for _ in range(2):
        take(open_batches(tars, decoder="pil", num_workers=2))
    assert find_workers() - before == set()


def test_a_worker_that_dies_is_the_error_of_the_trainer(
    tars: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pillow decodes in worker processes; the kernel needs none."""
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.1)
    loop = iter(open_batches(tars, decoder="pil", num_workers=1))
    before = children()
    next(loop)
    (worker,) = children() - before
    # Torch's handler raises wherever this process is just then, on a busy machine even in pytest.
    # Without it the loop itself sees that the worker is gone.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.kill(worker, signal.SIGKILL)
    with pytest.raises(PassingError, match=r"a loader worker died: .* Lower -j/--workers"):
        list(loop)


def children() -> set[int]:
    me = os.getpid()
    return {int(pid) for pid in Path(f"/proc/{me}/task/{me}/children").read_text().split()}
