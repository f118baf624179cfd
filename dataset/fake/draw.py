"""Drawing the fake ImageNet's pictures on many cores, in order and without losing an error."""

from __future__ import annotations

import multiprocessing
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

from dataset.errors import PassingError
from dataset.fake.picture import SIZE_SPREAD, Picture, draw_picture

PICTURES_PER_TASK = 32  # about 3.5 MB to send back at the default size

CountPictures = Callable[[int], None]


@dataclass(frozen=True)
class Item:
    """One picture to draw and the name that it gets."""

    name: str
    seed: int
    split: int
    label: int
    number: int
    size: tuple[int, int]
    kind: str = "JPEG"
    spread: float = SIZE_SPREAD


Draw = Callable[[Iterable[Item]], Iterator[tuple[Item, Picture]]]


@contextmanager
def open_drawer(processes: int, progress: CountPictures | None = None) -> Iterator[Draw]:
    """A function that draws items in their order, on a pool when processes > 1."""
    count = progress or (lambda num_images: None)
    if processes == 1:
        yield lambda items: _draw_here(items, count)
        return
    # spawn: the caller may have threads (torch, a progress bar), which a fork would copy locked.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, mp_context=context)
    try:
        yield lambda items: _draw_on_pool(pool, 2 * processes, items, count)
    except BrokenProcessPool:
        raise PassingError(
            "a drawing process was killed, perhaps for lack of memory; try again with --processes 1"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _draw_here(items: Iterable[Item], progress: CountPictures) -> Iterator[tuple[Item, Picture]]:
    for item in items:
        yield item, _draw(item)
        progress(1)


def _draw_on_pool(
    pool: ProcessPoolExecutor, window: int, items: Iterable[Item], progress: CountPictures
) -> Iterator[tuple[Item, Picture]]:
    """Pictures in the order of the items, with at most `window` chunks drawn ahead."""
    source = iter(items)
    chunks = iter(lambda: list(islice(source, PICTURES_PER_TASK)), [])
    ahead: deque[tuple[list[Item], Future[list[Picture]]]] = deque()
    while True:
        for chunk in islice(chunks, window - len(ahead)):
            with _deaf_to_interrupts():
                ahead.append((chunk, pool.submit(_draw_chunk, chunk)))
        if not ahead:
            return
        chunk, future = ahead.popleft()
        yield from zip(chunk, future.result(), strict=True)
        progress(len(chunk))


@contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """Child processes started inside ignore the terminal's Ctrl-C; this process handles it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _draw_chunk(items: list[Item]) -> list[Picture]:
    return [_draw(item) for item in items]


def _draw(item: Item) -> Picture:
    place = (item.seed, item.split, item.label, item.number)
    return draw_picture(*place, item.size, item.kind, item.spread)
