"""The copies to a GPU: each batch waits for its own copy, and for no other.

There is no GPU here: streams, events and tensors are stand-ins that note what is done with them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.data.small_batches import items_of, open_images
from train.data.batches import Batch
from train.data.loader import copy_ahead

GPU = torch.device("cuda", 0)


class Tensor:
    """Stands for a batch's tensor: notes its copy and who uses its memory."""

    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name

    def to(self, device: torch.device, *, non_blocking: bool) -> Tensor:
        assert device == GPU and non_blocking
        self.log.append(f"copy {self.name}")
        return Tensor(self.log, self.name)

    def record_stream(self, stream: Stream) -> None:
        self.log.append(f"{stream.name} uses {self.name}")


class Stream:
    """Stands for torch.cuda.Stream: an event is the number of copies that were queued before it."""

    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name

    def record_event(self) -> int:
        return sum(line.startswith("copy images") for line in self.log)

    def wait_event(self, event: int) -> None:
        self.log.append(f"{self.name} waits for {event}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was queued, in order, on the stand-ins of torch.cuda's streams."""
    lines: list[str] = []

    @contextlib.contextmanager
    def on_stream(stream: Any) -> Iterator[None]:
        assert stream.name == "side"
        yield

    monkeypatch.setattr(torch.cuda, "Stream", lambda _device: Stream(lines, "side"))
    monkeypatch.setattr(torch.cuda, "stream", on_stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream(lines, "compute"))
    return lines


def make_batches(log: list[str], count: int) -> Iterator[Batch]:
    for n in range(1, count + 1):
        yield Batch(Tensor(log, f"images{n}"), Tensor(log, f"labels{n}"), [str(n)], "")  # type: ignore[arg-type]


def test_a_batch_waits_for_its_own_copy_and_not_for_the_next_one(log: list[str]) -> None:
    found = []
    for batch in copy_ahead(make_batches(log, 3), GPU):
        log.append(f"train {batch.skipped[0]}")
        found.append(batch.images.name)  # type: ignore[attr-defined]
    assert found == ["images1", "images2", "images3"]
    hand_over = [
        [f"compute waits for {n}", f"compute uses images{n}", f"compute uses labels{n}"]
        for n in (1, 2, 3)
    ]
    copies = [[f"copy images{n}", f"copy labels{n}"] for n in (1, 2, 3)]
    assert log == [
        *(*copies[0], *copies[1], *hand_over[0], "train 1"),
        *(*copies[2], *hand_over[1], "train 2"),
        *(*hand_over[2], "train 3"),
    ]


def test_images_and_labels_are_both_made_in_pinned_memory(
    images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, pinned = torch.empty, []

    def empty(shape: tuple[int, ...], *, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        pinned.append((dtype, pin_memory))  # without a GPU nothing can be pinned
        return plain(shape, dtype=dtype)

    opened = open_images(images)
    opened.pin_memory = True
    monkeypatch.setattr(torch, "empty", empty)
    batch = opened[items_of(opened)[0]]
    assert (batch.error, len(batch.labels)) == ("", opened.plan.microbatch)
    assert pinned == [(torch.uint8, True), (torch.int64, True)]


def test_no_batches_are_no_copies(log: list[str]) -> None:
    assert list(copy_ahead(iter(()), GPU)) == []
    assert log == []
