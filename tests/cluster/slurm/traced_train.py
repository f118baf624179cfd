"""The real trainer, which also writes down its samples and can be slowed, for test_preemption.py.

`python -m tests.cluster.slurm.traced_train ARGS` is `python -m train ARGS` with, in TRACE_DIR:
RANK-ATTEMPT.jsonl, a line for each microbatch with its samples, and RANK-ATTEMPT.pid.
TRACE_DELAY_S slows the steps of the first attempt, from TRACE_SLOW_FROM on, so that a signal meets
a run that is under way; TRACE_FAULT=RANK:STEP raises an error there.
"""

from __future__ import annotations

import json
import os
import runpy
import time
from pathlib import Path
from typing import Any

from train.data.batches import Images, Item
from train.data.sampler import Int64s
from train.step import Trainer


def main() -> None:
    """Puts the notes around Images.indices and the delay before a step, then runs the trainer.

    The delay is not in the read of a batch: one that lasts for seconds after a signal is given up
    (train/data/patience.py).
    """
    rank, attempt = os.environ["SLURM_PROCID"], os.environ.get("SLURM_RESTART_COUNT", "0")
    trace = Path(os.environ["TRACE_DIR"]) / f"{rank}-{attempt}"
    trace.with_suffix(".pid").write_text(str(os.getpid()))
    delay_s = float(os.environ.get("TRACE_DELAY_S", "0")) if attempt == "0" else 0.0
    fault = os.environ.get("TRACE_FAULT", "")
    slow_from = int(os.environ.get("TRACE_SLOW_FROM", "0"))
    plain_indices, plain_step = Images.indices, Trainer.run_step

    def traced_indices(self: Images, item: Item) -> Int64s:
        indices = plain_indices(self, item)
        if item.is_val:
            return indices
        if fault == f"{rank}:{item.step_in_epoch}":
            raise RuntimeError("the fault that the test asked for")
        note = {"epoch": item.epoch, "step": item.step_in_epoch, "ids": indices.tolist()}
        with open(trace.with_suffix(".jsonl"), "a") as file:
            file.write(json.dumps(note) + "\n")
        return indices

    def slow_step(self: Trainer, *args: Any) -> Any:
        if self.step >= slow_from:
            time.sleep(delay_s)
        return plain_step(self, *args)

    Images.indices = traced_indices  # type: ignore[method-assign]
    Trainer.run_step = slow_step  # type: ignore[method-assign, assignment]
    runpy.run_module("train", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
