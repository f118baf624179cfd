"""How all ranks save a run together: on the way, at a stop, at the end, or when one is stranded."""

from __future__ import annotations

import logging
import os
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import torch

from dataset.errors import CHECKPOINTED, DONE
from train.attempt import Attempt
from train.checkpoints import checkpoint
from train.data.patience import Stranded
from train.epoch import EpochMeter, EpochSums, Standing
from train.network.model import save_state_dict
from train.prepare import Setup
from train.ranks.batch_system import requeue
from train.ranks.comm import HEARTBEAT_S
from train.ranks.interrupt import CANCELLED, GRACE_S, Vote
from train.records.output_writer import OutputWriter
from train.step import Trainer

log = logging.getLogger("trainyard")


class Saver:
    """What every rank does so that rank 0, which alone has a writer, can write it down."""

    def __init__(
        self,
        attempt: Attempt,
        setup: Setup,
        trainer: Trainer,
        standing: Standing,
        meter: EpochMeter,
        writer: OutputWriter | None,
    ) -> None:
        self._comm, self._clock, self._interrupt = attempt.comm, attempt.clock, attempt.interrupt
        self._setup, self._trainer, self._standing = setup, trainer, standing
        self._meter, self._writer, self._stream = meter, writer, attempt.stream
        self._saved_step = trainer.step  # of the last checkpoint

    @property
    def has_moved(self) -> bool:
        """Whether steps were trained since the last checkpoint."""
        return self._trainer.step > self._saved_step

    @property
    def stop_cost_s(self) -> float:
        """How long a stop will take, by the last checkpoint."""
        return 2 * self._writer.checkpoints.last_write_s if self._writer else 0.0

    def record_start(self) -> None:
        """A kill before the first checkpoint leaves a whole record too."""
        if self._writer:
            self._update([self._phases()], self._describe_progress())

    def touch_record(self) -> None:
        """Brings the attempt in the record up to date, now and then."""
        if self._writer:
            self._writer.recorder.touch([self._phases()], self._describe_attempt())

    def save(
        self, is_best: bool = False, sums: EpochSums | None = None, must_write: bool = True
    ) -> None:
        """Starts a checkpoint; the ranks exchange only their sums, phase times and stream costs."""
        with self._clock.phase("checkpoint"):
            sums = sums or self._meter.total()
            self._stream.meet()
            phases = self._comm.gather(self._phases())
            if not self._writer:
                return
            if must_write or not self._writer.is_too_soon():
                self._writer.save(self._state(sums), is_best)
                self._saved_step = self._trainer.step
        self._update(phases, self._describe_progress())

    def stop(self, vote: Vote, why: str = "checkpoint interval") -> int:
        """A durable checkpoint, then back into the queue or exit 85; why: unless a rank knows."""
        self.save()
        with self._clock.phase("checkpoint"):
            is_durable = self._comm.from_main(self._writer and self._writer.checkpoints.wait())
        self._stream.meet()
        # Checked only now: the job may have been cancelled during its last step or checkpoint.
        rows = self._comm.gather((self._interrupt.reason, self._phases()))
        if not self._writer:
            return CHECKPOINTED
        self._writer.refuse_not_finite(self._trainer.step)
        reasons = [reason for reason, _ in rows if reason] or [why]
        reason = next((reason for reason in reasons if reason in CANCELLED), reasons[0])
        recorder = self._writer.recorder
        self._update([phases for _, phases in rows], {})
        recorder.finish("checkpointed", CHECKPOINTED, reason)
        kind = "a" if is_durable else "NO NEW"
        step, total = self._trainer.step, self._setup.total_steps
        log.info("%s: stopped at step %d of %d with %s checkpoint", reason, step, total, kind)
        is_cancelled = not CANCELLED.isdisjoint((reason, self._interrupt.reason))
        is_restarted = vote is Vote.SAVE_AND_EXIT  # by HTCondor
        if vote.requeues and not is_cancelled:
            is_restarted = requeue(self._setup.launch.job)
        if not is_restarted:
            log.info("to continue, start the same command again%s", self._name_output())
        return CHECKPOINTED

    def stop_stranded(self, stranded: Stranded) -> NoReturn:
        """Ends all ranks with a checkpoint of this one, whose batch never comes: exits 85.

        The other ranks wait for it in an exchange that they cannot leave. After each finished step
        all ranks hold the same state. This rank holds the last state that all of them reached,
        since nobody can finish the current step without it.
        """
        setup, comm, reason = self._setup, self._comm, self._interrupt.reason
        while _has_pending_work(setup.placement.device):
            time.sleep(0.1)
        if not comm.claim("stop"):  # another rank does this already, and will tell this one
            time.sleep(2 * GRACE_S)
            _leave()
        state = self._state(self._meter.estimate())
        kind = "a" if _write_alone(setup.output / "ckpt", state) else "NO NEW"
        message = f"{reason}: stopped at step {state['step']} with {kind} checkpoint; {stranded}"
        log.warning("%s", message)
        if self._writer:
            self._writer.recorder.finish("checkpointed", CHECKPOINTED, message)
        comm.announce_failure(message, CHECKPOINTED)
        self._stream.close()
        time.sleep(2 * HEARTBEAT_S)  # rank 0 closes its record before a requeue ends it
        if stranded.vote.requeues and reason not in CANCELLED:
            requeue(setup.launch.job)
        _leave()

    def finish(self) -> int:
        """Waits for the last checkpoint, saves the model and closes the record."""
        self._stream.meet()
        phases = self._comm.gather(self._phases())
        if not self._writer:
            return DONE
        with self._clock.phase("checkpoint"):
            self._writer.checkpoints.wait()
        self._writer.refuse_not_finite(self._trainer.step)
        self._writer.require_durable()
        if self._setup.cfg.save_model:
            save_state_dict(self._trainer.model, self._setup.model_path)
        recorder = self._writer.recorder
        self._update([self._phases(), *phases[1:]], self._describe_progress())
        recorder.finish("done", DONE, "done")
        images, seconds = recorder.run["images_trained"], recorder.run["wall_clock_s"]
        log.info("done: %d images in %.0f s -> %s", images, seconds, self._setup.output)
        return DONE

    def _update(self, phases: list[dict[str, float]], fields: dict[str, Any]) -> None:
        assert self._writer is not None
        self._writer.recorder.update(phases, fields, self._describe_attempt())

    def _state(self, sums: EpochSums) -> checkpoint.State:
        return self._trainer.state() | self._standing.to_state(sums) | self._setup.to_state()

    def _phases(self) -> dict[str, float]:
        steps = self._meter.attempt_steps
        return self._clock.totals(self._trainer.exposed_communication_s(steps))

    def _describe_progress(self) -> dict[str, Any]:
        """The fields of run.json that change while a run trains."""
        steady = self._meter.steady_images_per_s
        return {
            "images_trained": self._trainer.step * self._setup.plan.batch_size,
            "result": self._standing.result | self._standing.best,
        } | ({"steady_images_per_s": steady} if steady else {})

    def _describe_attempt(self) -> dict[str, Any]:
        """The fields of this attempt in run.json."""
        first_s = self._meter.time_to_first_step_s
        timed = {"time_to_first_step_s": first_s} if first_s is not None else {}
        return timed | self._stream.describe()

    def _name_output(self) -> str:
        """What to add to the command to continue this run."""
        cfg, output = self._setup.cfg, self._setup.output
        return "" if cfg.output else f" with --output {output}, or with --resume last"


def _has_pending_work(device: torch.device) -> bool:
    """Whether the device waits for another rank, which is a step behind and saves instead."""
    return device.type == "cuda" and not torch.cuda.current_stream(device).query()


def _write_alone(folder: Path, state: checkpoint.State) -> bool:
    """Whether the state is on the disk; waits if rank 0 is still writing its last one."""
    deadline_s = time.monotonic() + GRACE_S
    while any(folder.glob("*.part")) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    writer = checkpoint.CheckpointWriter(folder)
    writer.save(state | {"schema": checkpoint.SCHEMA})
    return writer.wait()


def _leave() -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(CHECKPOINTED)
