"""`python -m train` as benchmarks/stream.py runs it: the real trainer with a step of a fixed time.

    python -m benchmarks.stream_train '{"notes": "notes", "step_s": 0.05}' DATA -b 64 ...

Only the network is replaced, and the window of the order, which is the share of the set that it is
of the real one: with the constants of a set of 148 GB, one of 2 GB would be shuffled as a whole.
"""

from __future__ import annotations

import json
import os
import sys
import time
import zlib
from contextlib import closing
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.stream_notes import Notes, hold_step, make_net
from dataset.errors import run_command
from dataset.transfer.journal import CHUNK
from train.config import parse_config
from train.data.sampler import Int64s
from train.data.sources import TarSource
from train.data.streamed_order import Layout
from train.ranks.cpus import settle_openmp
from train.ranks.launch import detect_launch

if TYPE_CHECKING:  # torch comes when the stream has begun, as in train/__main__.py
    from train.data.batches import Images, Item
    from train.step import Trainer


def fix_step(notes: Notes, step_s: float) -> None:
    """Each step takes so long at least, and is noted when it ends."""
    from train.step import Trainer

    accumulate, run_step = Trainer._accumulate, Trainer.run_step

    def held(trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        begin_s = time.monotonic()
        accumulate(trainer, *args, **kwargs)
        hold_step(begin_s, step_s)

    def noted(trainer: Trainer, *args: Any) -> Any:
        done = run_step(trainer, *args)
        notes.add(step=trainer.step)
        return done

    Trainer._accumulate = held  # type: ignore[method-assign,assignment]
    Trainer.run_step = noted  # type: ignore[method-assign,assignment]


def use_net() -> None:
    """The net of all ways, whatever --arch says."""
    for module in ("train.prepare", "train.microbatch"):
        owner = import_module(module)
        owner.build_model = lambda arch, num_classes, *_, **__: make_net(num_classes)  # type: ignore[attr-defined]


def scale_window(window_bytes: int) -> None:
    """The window of the order: of a small set, the share that it is of the real one."""

    def choose_window(layout: Layout, batch_size: int, lanes: int = 1) -> int:
        of_lane = -(-len(layout) // lanes)
        return max(1, min(of_lane, window_bytes * len(layout) // layout.num_bytes))

    import_module("train.data.streamed_order").choose_window = choose_window  # type: ignore[attr-defined]


def note_needs(notes: Notes) -> None:
    """Notes how many bytes of the tar the first step needs, by the run's own order."""
    module: Any = import_module("train.data.needs")
    find_needs = module.find_needs

    def noted(*args: Any) -> Any:
        needs = find_needs(*args)
        notes.add(first_bytes=int((needs == 0).sum()) * CHUNK)
        return needs

    module.find_needs = noted  # whoever takes it from there comes later


def trace(notes: Notes) -> None:
    """Notes the samples of each step, and the checksum of each image that is read."""
    from train.data.batches import Images

    indices, read = Images.indices, TarSource.read

    def noted_indices(images: Images, item: Item) -> Int64s:
        numbers = indices(images, item)
        step = item.epoch * images.plan.steps_per_epoch + item.step_in_epoch + 1
        notes.add(loads=step, ids=numbers.tolist())
        return numbers

    def noted_read(source: TarSource, index: int) -> bytes:
        data = read(source, index)
        notes.add(id=index, crc=zlib.crc32(data))
        return data

    Images.indices = noted_indices  # type: ignore[method-assign,assignment]
    TarSource.read = noted_read  # type: ignore[method-assign,assignment]


def main() -> int:
    options = json.loads(sys.argv.pop(1))
    notes = Notes(Path(options["notes"]))
    settle_openmp(os.environ)
    note_needs(notes)
    if "window_bytes" in options:
        scale_window(options["window_bytes"])
    begin_early = import_module("train.stream.early").begin_early
    with closing(begin_early(parse_config(sys.argv[1:]), detect_launch(os.environ))) as early:
        use_net()
        fix_step(notes, options["step_s"])
        if options.get("trace"):
            trace(notes)
        code: int = import_module("train.run").main(early=early)
        return code


if __name__ == "__main__":
    code = run_command(main)
    sys.stdout.flush()
    os._exit(code)
