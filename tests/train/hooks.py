"""What a test changes in a rank before the trainer starts: each hook can be pickled."""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Action = Callable[[], None]


def own_rank() -> int:
    return int(os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or 0)


def trace_samples(path: Path) -> None:
    """Adds a line to the file for each microbatch of training: its step, part and samples."""
    from train.data.batches import Images, Item
    from train.data.sampler import Int64s

    plain = Images.indices
    rank = own_rank()

    def traced(images: Images, item: Item) -> Int64s:
        ids = plain(images, item)
        if not item.is_val:
            step = item.epoch * images.plan.steps_per_epoch + item.step_in_epoch
            note = {"step": step, "part": item.part, "ids": ids.tolist(), "rank": rank}
            with open(path, "a") as file:
                file.write(json.dumps(note | {"pid": os.getpid()}) + "\n")
        return ids

    Images.indices = traced  # type: ignore[method-assign,assignment]


def at_step(rank: int, step: int, action: Action) -> None:
    """Does something in one rank when it asks for the first samples of a global step."""
    from train.data.batches import Images, Item
    from train.data.sampler import Int64s

    if own_rank() != rank:
        return
    plain = Images.indices

    def acting(images: Images, item: Item) -> Int64s:
        if (
            not item.is_val
            and item.epoch * images.plan.steps_per_epoch + item.step_in_epoch == step
        ):
            action()
        return plain(images, item)

    Images.indices = acting  # type: ignore[method-assign,assignment]


def raise_fault() -> None:
    raise RuntimeError("the fault that the test asked for")


def kill_myself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def skew_clock(rank: int, seconds: float) -> None:
    """The wall clock of one rank is wrong, as on a node without NTP."""
    if own_rank() == rank:
        true_time = time.time
        time.time = lambda: true_time() + seconds


def all_of(*hooks: Action) -> None:
    for hook in hooks:
        hook()


def at_validation(rank: int, part: int, action: Action) -> None:
    """Does something in one rank, once, when it asks for the n-th batch of a validation."""
    from train.data.batches import Images, Item
    from train.data.sampler import Int64s

    if own_rank() != rank:
        return
    plain = Images.indices
    left = [action]

    def acting(images: Images, item: Item) -> Int64s:
        if item.is_val and item.part == part and left:
            left.pop()()
        return plain(images, item)

    Images.indices = acting  # type: ignore[method-assign,assignment]


def before(module: str, name: str, action: Action) -> None:
    """Does something whenever a function of a module is about to be called."""
    owner = importlib.import_module(module)
    plain = getattr(owner, name)

    def acting(*args: Any, **kwargs: Any) -> Any:
        action()
        return plain(*args, **kwargs)

    setattr(owner, name, acting)


def terminate_myself() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def wait_and_kill(out: Path, step: int) -> None:
    """Dies as soon as the checkpoint of a step, or a later one, is there."""
    while max((int(p.stem[5:]) for p in out.glob("ckpt/step-*.pt")), default=0) < step:
        time.sleep(0.001)
    kill_myself()


def signal_myself(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def note_pid(folder: Path) -> None:
    """Lets the other ranks know who this one is."""
    (folder / f"pid-{own_rank()}").write_text(str(os.getpid()))


def signal_rank(folder: Path, rank: int, number: signal.Signals) -> None:
    """A signal to a rank that has noted its pid."""
    os.kill(int((folder / f"pid-{rank}").read_text()), number)


def set_value(module: str, name: str, value: object) -> None:
    setattr(importlib.import_module(module), name, value)


# The small set of these tests would be one unit, and smaller than any window: its streamed order
# would be the uniform one. With these its 42 images lie in 21 units, and the window is 15 images.
SMALL_UNITS = {
    "train.data.tar_layout.UNIT_SIZE": 8192,
    "train.data.streamed_order.UNITS_OF_EACH_CLASS": 1,
    "train.data.streamed_order.NUM_BATCHES": 1,
    "train.data.streamed_order.MIN_BYTES": 1,
}


def use_small_units() -> None:
    """A small set has many units, and a window that is smaller than the set."""
    for name, value in SMALL_UNITS.items():
        module, _, constant = name.rpartition(".")
        set_value(module, constant, value)


FEW_CONNECTIONS = 2


def use_few_connections() -> None:
    """Little of a stream is in flight: a kill loses little, and most of a small limit is kept."""
    from dataset.stream.spec import StreamSpec

    few = functools.partial(StreamSpec, connections=FEW_CONNECTIONS)
    set_value("train.stream.task", "StreamSpec", few)
    set_value("train.data.unit_needs", "UNITS_A_CONNECTION", 0)  # or no limit would be small


def fill_disk(folder: Path) -> None:
    """Leaves not one byte on the filesystem of a folder, once no checkpoint is being written."""
    for thread in threading.enumerate():
        if thread.name.endswith("(_write)"):  # it would give back what it cannot finish
            thread.join()
    with open(folder / "ballast", "ab", buffering=0) as file:
        for size in (1 << 16, 1 << 10, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(size))


def free_disk(folder: Path) -> None:
    (folder / "ballast").unlink()


def poison(name: str) -> None:
    """The model gets values that are not finite, in a buffer that training never reads."""
    from train.step import Trainer

    plain = Trainer.run_step

    def run_step(trainer: Trainer, *args: Any) -> Any:
        done = plain(trainer, *args)
        trainer.model.get_buffer(name).fill_(float("nan"))
        return done

    Trainer.run_step = run_step  # type: ignore[method-assign,assignment]


def capture_only() -> None:
    """--compile without its C++ code: the graphs are captured, and run as they are."""
    import torch

    compiled = torch.compile
    set_value("torch", "compile", lambda model: compiled(model, backend="aot_eager"))


def hang_at_read(rank: int, index: int, fifo: Path) -> None:
    """Reading one sample never returns in one rank: as on a dead disk, the reader is in a system
    call. A FIFO in the sample's place would be refused, so the reader is sent to one.
    """
    from train.data.sources import FolderSource

    if int(os.environ.get("RANK", "0")) != rank:
        return
    plain = FolderSource.read

    def read(source: FolderSource, asked: int) -> bytes:
        if asked == index:
            os.open(fifo, os.O_RDONLY)
        return plain(source, asked)

    FolderSource.read = read  # type: ignore[method-assign,assignment]
