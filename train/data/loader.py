"""Makes batches ahead of the training, in threads or worker processes started once for a run."""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import active_children
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

import torch
from torch.utils.data import DataLoader, get_worker_info

from dataset.errors import CommandError, PassingError
from train.data.batches import Batch, BatchOrder, Draft, Images, Item
from train.data.readers import Pace

IMAGES_PER_TASK = 4  # so few that all threads work on the next batch
# Batches filled at a time: enough to bridge a moment without disk, if memory allows.
MIN_BATCHES_AHEAD, BATCHES_AHEAD, MAX_BYTES_AHEAD = 3, 6, 512 << 20
# A read on a shared disk waits for 5 to 10 ms, in which a core decodes several images.
READERS_PER_DECODER, MAX_READERS = 8, 64
PR_SET_PDEATHSIG = 1  # of prctl(2)


def load_batches(
    images: Images, items: Iterable[Item], num_workers: int, num_readers: int | None = None
) -> Iterator[Batch]:
    """The batches of the items, in order; the error of one is raised in its place.

    Worker processes are started here and not with the first batch, because torch notices a dead
    worker, and a worker a dead parent, through the thread that started it.
    """
    if num_workers == 0:
        return _raise_errors(images[item] for item in items)
    if images.decoder.releases_gil:
        readers = num_readers or count_readers(num_workers)
        return _raise_errors(_load_in_threads(images, items, readers, num_workers))
    return _raise_errors(_take(_start_processes(images, items, num_workers)))


def _raise_errors(batches: Iterable[Batch]) -> Iterator[Batch]:
    for batch in batches:
        if batch.error:
            raise batch.kind(batch.error)
        yield batch


def count_readers(num_decoders: int) -> int:
    """How many threads read if this many may decode at a time."""
    return max(num_decoders, min(MAX_READERS, READERS_PER_DECODER * num_decoders))


def count_ahead(images: Images, num_threads: int) -> int:
    """How many batches are filled at a time: bounded by memory, but enough for all threads."""
    batch = images.plan.microbatch
    fitting = MAX_BYTES_AHEAD // (batch * images.image_size**2 * 3)
    busy = 1 + 2 * num_threads * IMAGES_PER_TASK // batch
    return max(MIN_BATCHES_AHEAD, min(BATCHES_AHEAD, fitting), busy)


def _load_in_threads(
    images: Images, items: Iterable[Item], num_threads: int, num_decoders: int
) -> Iterator[Batch]:
    """All threads work on the oldest batch first; each reads an image, then waits to decode it.

    So enough reads wait for the disk at once (train/data/readers.py), no core decodes two images at
    a time, and a thread holds the bytes of at most one image.
    """
    most_ahead = count_ahead(images, num_threads)
    images.pace = Pace(num_decoders, num_threads)
    ahead: deque[tuple[Draft, list[Future[None]]]] = deque()
    failed: CommandError | None = None
    pool = ThreadPoolExecutor(num_threads, thread_name_prefix="loader")
    try:
        for item in items:
            if item.step_in_epoch == 0:
                pool.submit(images.warm_up, item.epoch + 1)
            try:
                ahead.append(_start_batch(images, item, pool))
            except CommandError as error:  # of this batch; those before it come first
                failed = error
                break
            if len(ahead) >= most_ahead:
                yield _wait_for(*ahead.popleft())
        while ahead:
            yield _wait_for(*ahead.popleft())
        if failed is not None:
            raise failed
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _start_batch(
    images: Images, item: Item, pool: ThreadPoolExecutor
) -> tuple[Draft, list[Future[None]]]:
    """A batch under way, and the tasks that fill it."""
    draft = images.draft(item)
    count = len(draft.indices)
    tasks = [
        pool.submit(images.fill, draft, start, min(start + IMAGES_PER_TASK, count))
        for start in range(0, count, IMAGES_PER_TASK)
    ]
    return draft, tasks


def _wait_for(draft: Draft, tasks: list[Future[None]]) -> Batch:
    for task in tasks:
        task.result()
    return draft.finish()


def _start_processes(images: Images, items: Iterable[Item], num_workers: int) -> Iterator[Batch]:
    """torch's loader with its workers at work."""
    # A worker must not touch CUDA; torch pins in a thread of this process.
    pin_memory, images.pin_memory = images.pin_memory, False
    loader: DataLoader[Batch] = DataLoader(
        images,  # type: ignore[arg-type]
        batch_size=None,
        sampler=items,
        num_workers=num_workers,
        pin_memory=pin_memory,
        collate_fn=_as_is,
        prefetch_factor=2,
        worker_init_fn=_init_worker,
        multiprocessing_context="fork",
    )
    before = set(active_children())
    batches = iter(loader)
    _raise_once()
    _kill_at_exit(weakref.WeakSet(set(active_children()) - before))
    return batches


def _kill_at_exit(workers: weakref.WeakSet[BaseProcess]) -> None:
    """Ends workers that are still at work when the program ends, as in a loop that was left early.

    Python's own way, SIGTERM and then waiting for them, would wait for ever: they ignore it.
    Those that have ended are let go: each holds two open files, and a program may have many loops.
    """
    owner = os.getpid()

    def kill() -> None:
        if os.getpid() != owner:  # in a fork of it
            return
        alive = [worker for worker in workers if worker in active_children()]
        if alive and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch would tell of their deaths
        for worker in alive:
            worker.kill()

    atexit.register(kill)


def _raise_once() -> None:
    """Lets torch tell of a dead worker once.

    Its handler raises at each SIGCHLD from then on: for a second worker, or any other child, in
    whatever line the main thread is, which may be one that ends the run in good order.
    """
    tell = signal.getsignal(signal.SIGCHLD)
    if not callable(tell) or isinstance(tell, _Once):
        return
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, _Once(tell))


class _Once:
    """A handler of a signal that is out of use after its first error."""

    def __init__(self, tell: Callable[[int, FrameType | None], Any]) -> None:
        self._tell = tell

    def __call__(self, number: int, frame: FrameType | None) -> None:
        try:
            self._tell(number, frame)
        except RuntimeError:
            signal.signal(number, signal.SIG_DFL)
            raise


def _take(batches: Iterator[Batch]) -> Iterator[Batch]:
    try:
        yield from batches
    except (ConnectionError, EOFError) as error:  # killed while it was handing over a batch
        raise RuntimeError(f"DataLoader worker died ({type(error).__name__})") from error


def is_dead_worker(error: RuntimeError) -> bool:
    """Whether torch raised it, in any line of the main thread, because a worker is gone."""
    return "DataLoader worker" in str(error)


def explain_dead_worker(error: RuntimeError) -> PassingError:
    """The error of a run whose worker process is gone."""
    reason = str(error).splitlines()[0]
    return PassingError(f"a loader worker died: {reason} Out of memory? Lower -j/--workers")


def dummy_batches(
    order: BatchOrder, num_classes: int, image_size: int, device: torch.device
) -> Iterator[Batch]:
    """One made-up batch on the device, again and again: measures the model alone."""
    size = (order.plan.microbatch, image_size, image_size, 3)
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, num_classes, size[:1], generator=generator)
    batch = Batch(images.permute(0, 3, 1, 2).to(device), labels.to(device), [], "")
    for _ in order:
        yield batch


def copy_ahead(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """The batches on the device; a GPU copies each on a side stream, one batch ahead."""
    if device.type != "cuda":
        yield from batches
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    waiting: tuple[Batch, Any] | None = None
    for batch in batches:
        copied = _copy(batch, device, stream)
        if waiting is not None:
            yield _hand_over(*waiting)
        waiting = copied
    if waiting is not None:
        yield _hand_over(*waiting)


def _copy(batch: Batch, device: torch.device, stream: Any) -> tuple[Batch, Any]:
    """The batch on the device, and the event of the side stream when it has come there."""
    with torch.cuda.stream(stream):
        images = batch.images.to(device, non_blocking=True)
        labels = batch.labels.to(device, non_blocking=True)
    return Batch(images, labels, batch.skipped, ""), stream.record_event()


def _hand_over(batch: Batch, copied: Any) -> Batch:
    """Makes the computing stream wait for this copy, and not for the next one, already running.

    It also tells the allocator that this stream uses the memory.
    """
    current = torch.cuda.current_stream()
    current.wait_event(copied)
    batch.images.record_stream(current)
    batch.labels.record_stream(current)
    return batch


def _die_with_rank() -> None:
    """Makes a worker die with its rank; else it keeps the rank's sockets open for 5 s."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _as_is(batch: Any) -> Any:
    return batch


def _init_worker(worker: int) -> None:
    """Limits a worker to one core, and leaves Ctrl-C and the scheduler's signals to its rank."""
    _die_with_rank()
    info: Any = get_worker_info()
    info.dataset.reads.take_row(worker)
    torch.set_num_threads(1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
