"""The story of a run: prepare, train, evaluate, stop or finish. Reads from top to bottom."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dataset.errors import CHECKPOINTED, DONE
from dataset.names import VAL_TAR
from dataset.words import count
from train.config import TrainConfig, parse_config
from train.data.batches import Batch
from train.data.patience import Stranded
from train.device import choose_device, identify_gpu, name_device
from train.epoch import EpochMeter, EpochSums, Standing, check_finite, describe_epoch
from train.evaluate import Accuracy, check_skipped, evaluate_only, validate
from train.failure import end_all_ranks, record_failure
from train.feed import open_batches
from train.model import save_state_dict
from train.prepare import make_trainer, prepare, recipe_of
from train.ranks.batch_system import exits_for_checkpoints, find_deadline, requeue
from train.ranks.comm import Comm
from train.ranks.interrupt import CANCELLED, Cast, CtrlC, Interrupt, Vote
from train.ranks.launch import Launch, detect_launch
from train.ranks.nccl import call_before_abort
from train.recipe import describe
from train.records.classes import name_model
from train.records.output_writer import NO_VALIDATION, OutputWriter
from train.records.phases import PhaseClock, process_start_s
from train.records.recorder import Recorder, is_recorded_as_done, record_start
from train.records.stage_meter import measure_stage
from train.run_folder import default_output
from train.stranded import stop_for_all

log = logging.getLogger("trainyard")


def main(argv: list[str] | None = None) -> int:
    """Runs the trainer; the exit code says how it ended."""
    started_s = process_start_s()
    cfg = parse_config(sys.argv[1:] if argv is None else argv)
    if cfg.show_recipe:
        print(describe(recipe_of(cfg), cfg.batch_size))
        return DONE
    launch = detect_launch(os.environ)
    set_up_logging(launch)
    with CtrlC(launch.is_main) as ctrl_c:
        return run(cfg, launch, started_s, ctrl_c)


def run(cfg: TrainConfig, launch: Launch, started_s: float, ctrl_c: CtrlC) -> int:
    """The whole run on this rank; any error ends all ranks at once."""
    device = choose_device(cfg.device, launch, os.environ)
    comm = Comm(launch)
    run = Run(cfg, launch, comm, PhaseClock(started_s), device, ctrl_c)
    try:
        run.join_others()
        code = run.go()
        comm.close()
        return code
    except BaseException as error:
        return end_all_ranks(error, comm, run.open_record)
    finally:
        run.interrupt.uninstall()


class Run:
    """One attempt at a run on one rank."""

    def __init__(
        self,
        cfg: TrainConfig,
        launch: Launch,
        comm: Comm,
        clock: PhaseClock,
        device: torch.device,
        ctrl_c: CtrlC,
    ) -> None:
        self.ctrl_c = ctrl_c
        self.cfg, self.launch, self.comm, self.clock = cfg, launch, comm, clock
        self.device = device
        self.interrupt = Interrupt(comm, cfg.deadline)
        self.has_joined = False
        self.writer: OutputWriter | None = None  # rank 0's, once the folder is known

    def join_others(self) -> None:
        """Joins the other ranks, and agrees with them on the time limit."""
        timeout_s, gpu = self.cfg.timeout_minutes * 60, identify_gpu(self.device)
        self.comm.join(self.device, timeout_s, gpu, self.end_because_of_another)
        call_before_abort(self.device, self.end_because_of_nccl)
        deadline = find_deadline(os.environ, self.launch.job) if self.launch.is_main else None
        deadline = self.cfg.deadline or self.comm.from_main(deadline)
        self.interrupt = Interrupt(self.comm, deadline)
        self.has_joined = True

    def go(self) -> int:
        """Prepare, then train to the end or to a stop."""
        self.setup, state = prepare(self.cfg, self.launch, self.comm, self.device)
        self.plan, self.output = self.setup.plan, self.setup.output
        self.trainer = make_trainer(self.setup, self.comm, state)
        if self.cfg.evaluate:
            folder = self.cfg.output if self.launch.is_main else None
            evaluate_only(self.setup, self.trainer, self.comm, folder)
            return DONE
        self.standing = Standing.from_state(state)
        if self.is_done():
            log.info("%s: this run is done already, nothing to do", self.output)
            return DONE
        self.interrupt.install()
        self.ctrl_c.saves = True
        if self.launch.is_main:
            self.writer = OutputWriter(self.setup, self.clock, self.trainer.step)
        if state is not None:
            log.info("continuing from step %d of %d", self.trainer.step, self.setup.total_steps)
        self.describe_start()
        self.clock.end_startup()
        self.meter = EpochMeter(self.trainer, self.clock, self.comm, self.standing)
        if self.writer:  # a kill before the first checkpoint leaves a whole record too
            self.writer.recorder.update([self.phases()], self.describe_progress())
        try:
            vote = self.train()
        except Stranded as stranded:
            log.warning("%s", stranded)
            vote = stranded.vote
            if self.comm.world_size > 1:
                reason, estimate = self.interrupt.reason, lambda: self.state(self.meter.estimate())
                stop_for_all(stranded, reason, self.setup, self.comm, self.open_record(), estimate)
        return self.stop(vote) if vote.stops else self.finish()

    def is_done(self) -> bool:
        """Whether earlier attempts did it all, down to the record and the model."""
        if self.trainer.step < self.setup.total_steps or not self.standing.is_evaluated:
            return False
        is_whole = self.launch.is_main and is_recorded_as_done(self.output)
        is_whole &= not self.cfg.save_model or self.model_path.exists()
        return bool(self.comm.from_main(is_whole))

    def open_record(self) -> Recorder | None:
        """Where rank 0 records how this attempt ended, even if it never joined the others.

        A failure between joining and the first step is only printed: there may be no folder yet.
        """
        if self.writer:
            return self.writer.recorder
        has_no_folder = self.cfg.evaluate or self.cfg.resumes_last
        if self.has_joined or has_no_folder or not self.launch.is_main:
            return None
        output = self.cfg.output or default_output(name_device(self.device), self.launch)
        return record_start(output, self.launch, self.clock.started_s)

    @property
    def model_path(self) -> Path:
        return self.output / name_model(self.cfg.arch, self.setup.classes)

    @property
    def main_output(self) -> Path | None:
        """Where rank 0 alone writes the lines of its stages."""
        return self.output if self.launch.is_main else None

    def describe_start(self) -> None:
        setup, plan, launch = self.setup, self.plan, self.launch
        for note in setup.recipe.notes:
            log.info("recipe: %s", note)
        if setup.dataset and not setup.num_val:
            log.warning("%s (no val/ and no %s in the data)", NO_VALIDATION, VAL_TAR)
        log.info(
            "%s on %s, %s: %s (%s), batch %d in microbatches of %d, step %d of %d -> %s",
            self.cfg.arch,
            name_device(setup.placement.device),
            setup.placement.precision,
            count(launch.world_size, "rank"),
            launch.launcher,
            plan.batch_size,
            plan.microbatch,
            self.trainer.step,
            setup.total_steps,
            self.output,
        )

    # --- train ---------------------------------------------------------------------------------

    def train(self) -> Vote:
        """Trains epoch by epoch; returns the vote that stopped it, or GO_ON at the end."""
        standing, total, vote = self.standing, self.setup.total_steps, Vote.GO_ON
        is_due = not standing.is_evaluated
        batches = open_batches(self.setup, self.trainer.step, is_due, self.vote_alone)
        while not vote.stops and (self.trainer.step < total or not standing.is_evaluated):
            vote = self.train_epoch(batches) if standing.is_evaluated else Vote.GO_ON
            if not vote.stops:
                vote = self.evaluate_epoch(batches)
        self.interrupt.settle()
        return vote

    def train_epoch(self, batches: Iterator[Batch]) -> Vote:
        """Steps to the end of the epoch or of the run, or to an agreed stop."""
        self.meter.begin()
        with measure_stage("train", self.main_output) as stage:
            end = (self.meter.epoch + 1) * self.plan.steps_per_epoch
            end = min(end, self.setup.total_steps)
            vote = Vote.GO_ON
            while self.trainer.step < end and not vote.stops:
                vote = self.train_step(batches, end)
            if self.trainer.step == end:
                self.meter.end()
                self.standing.is_evaluated = False
            stage.extra |= {"epoch": self.meter.epoch, "step": self.trainer.step}
        return vote

    def train_step(self, batches: Iterator[Batch], end: int) -> Vote:
        """One step, and what is due after it: a progress line, a checkpoint."""
        self.ask_for_checkpoint()
        agree = partial(self.agree, cast=self.trainer.cast)
        vote, skipped = self.trainer.run_step(batches, self.clock, agree)
        if vote.abandons_step:
            return vote
        self.meter.count_step(skipped, self.cfg.skip_bad_images)
        if self.trainer.step % self.cfg.print_freq == 0 or self.trainer.step == end:
            self.meter.show_progress(self.setup.total_steps)
            if self.writer:
                self.writer.recorder.touch([self.phases()])
        if vote is Vote.SAVE and self.trainer.step < end:
            self.save()
        return vote

    def agree(self, step_left_s: float, cast: Cast | None = None) -> Vote:
        return self.interrupt.agree(step_left_s, self.stop_cost_s, cast)

    def vote_alone(self) -> Vote:
        return self.interrupt.vote_alone(self.stop_cost_s)

    @property
    def stop_cost_s(self) -> float:
        return 2 * self.writer.checkpoints.last_write_s if self.writer else 0.0

    def ask_for_checkpoint(self) -> None:
        """Rank 0 checks the checkpoint interval and the writer's findings."""
        if not self.writer:
            return
        self.writer.refuse_not_finite(self.trainer.step)
        if self.writer.is_due():
            on_grid = exits_for_checkpoints(os.environ)
            self.interrupt.wanted = Vote.SAVE_AND_EXIT if on_grid else Vote.SAVE
            self.writer.begin_interval()

    # --- evaluate ------------------------------------------------------------------------------

    def evaluate_epoch(self, batches: Iterator[Batch]) -> Vote:
        """Validates and records the trained epoch; an urgent stop leaves that to the next start."""
        with measure_stage("evaluate", self.main_output) as stage, self.clock.phase("evaluation"):
            setup, trainer = self.setup, self.trainer
            vote, results = validate(setup, trainer, self.comm, batches, self.agree)
            stage.extra |= {"epoch": self.meter.epoch, "images": self.setup.num_val}
        if vote.is_urgent:
            return vote
        self.finish_epoch(results)
        return vote if self.trainer.step < self.setup.total_steps else Vote.GO_ON

    def finish_epoch(self, results: list[Accuracy]) -> None:
        """Record and checkpoint an epoch that was trained and evaluated."""
        sums, epoch = self.meter.total(), self.meter.epoch
        check_skipped(sums.skipped, self.cfg.skip_bad_images)
        check_finite(sums)
        is_best = self.standing.take(epoch, results)
        self.standing.is_evaluated = True
        for suffix, accuracy in zip(("", "_ema"), results, strict=False):
            log.info(
                "epoch %d: val%s acc1 %.3f acc5 %.3f",
                epoch + 1,
                suffix,
                accuracy.acc1,
                accuracy.acc5,
            )
        if self.writer:
            eval_s = self.clock.last_s["evaluation"]
            self.writer.add_epoch(describe_epoch(epoch, self.trainer, sums, results, eval_s))
        is_needed = is_best or self.trainer.step == self.setup.total_steps
        self.save(is_best, sums, must_write=is_needed)

    # --- save and end --------------------------------------------------------------------------

    def save(
        self, is_best: bool = False, sums: EpochSums | None = None, must_write: bool = True
    ) -> None:
        """Starts a checkpoint; the ranks exchange only their sums and phase times."""
        with self.clock.phase("checkpoint"):
            sums = sums or self.meter.total()
            phases = self.comm.gather(self.phases())
            if not self.writer:
                return
            if must_write or not self.writer.is_too_soon():
                self.writer.save(self.state(sums), is_best)
        self.writer.recorder.update(phases, self.describe_progress())

    def state(self, sums: EpochSums) -> dict[str, Any]:
        return self.trainer.state() | self.standing.to_state(sums) | self.setup.to_state()

    def describe_progress(self) -> dict[str, Any]:
        steady = self.meter.steady_images_per_s
        return {
            "images_trained": self.trainer.step * self.plan.batch_size,
            "result": self.standing.result | self.standing.best,
        } | ({"steady_images_per_s": steady} if steady else {})

    def phases(self) -> dict[str, float]:
        return self.clock.totals(self.trainer.exposed_communication_s(self.meter.attempt_steps))

    def stop(self, vote: Vote) -> int:
        """A durable checkpoint, then back into the queue or exit 85."""
        self.save()
        with self.clock.phase("checkpoint"):
            is_durable = self.comm.from_main(self.writer and self.writer.checkpoints.wait())
        # Checked only now: the job may have been cancelled during its last step or checkpoint.
        rows = self.comm.gather((self.interrupt.reason, self.phases()))
        if not self.writer:
            return CHECKPOINTED
        self.writer.refuse_not_finite(self.trainer.step)
        reasons = [reason for reason, _ in rows if reason] or ["checkpoint interval"]
        reason = next((reason for reason in reasons if reason in CANCELLED), reasons[0])
        recorder = self.writer.recorder
        recorder.update([phases for _, phases in rows], {})
        recorder.finish("checkpointed", CHECKPOINTED, reason)
        kind = "a" if is_durable else "NO NEW"
        step, total = self.trainer.step, self.setup.total_steps
        log.info("%s: stopped at step %d of %d with %s checkpoint", reason, step, total, kind)
        is_cancelled = not CANCELLED.isdisjoint((reason, self.interrupt.reason))
        is_restarted = vote is Vote.SAVE_AND_EXIT  # by HTCondor
        if vote.requeues and not is_cancelled:
            is_restarted = requeue(self.launch.job)
        if not is_restarted:
            log.info("to continue, start the same command again%s", self.name_output())
        return CHECKPOINTED

    def name_output(self) -> str:
        """What to add to the command to continue this run."""
        return "" if self.cfg.output else f" with --output {self.output}, or with --resume last"

    def finish(self) -> int:
        """Waits for the last checkpoint, saves the model and closes the record."""
        phases = self.comm.gather(self.phases())
        if not self.writer:
            return DONE
        with self.clock.phase("checkpoint"):
            self.writer.checkpoints.wait()
        self.writer.refuse_not_finite(self.trainer.step)
        self.writer.require_durable()
        if self.cfg.save_model:
            save_state_dict(self.trainer.model, self.model_path)
        recorder = self.writer.recorder
        recorder.update([self.phases(), *phases[1:]], self.describe_progress())
        recorder.finish("done", DONE, "done")
        images, seconds = recorder.run["images_trained"], recorder.run["wall_clock_s"]
        log.info("done: %d images in %.0f s -> %s", images, seconds, self.output)
        return DONE

    def end_because_of_nccl(self, error: RuntimeError) -> None:
        """Called by NCCL's watching thread, which would abort this process."""
        end_all_ranks(error, self.comm, self.open_record)

    def end_because_of_another(self, message: str, code: int) -> None:
        """Called by the watching thread: the main thread may hang in a collective."""
        print(f"rank {self.launch.rank} ends because of {message}", file=sys.stderr, flush=True)
        record_failure(self.open_record, message, code)
        os._exit(code)


def set_up_logging(launch: Launch) -> None:
    """Rank 0 logs everything; the others only warnings and errors."""
    handler = logging.StreamHandler(sys.stdout)
    rank = "" if launch.is_main else f"rank {launch.rank}: "
    handler.setFormatter(logging.Formatter(f"%(asctime)s {rank}%(message)s", "%H:%M:%S"))
    log.handlers[:] = [handler]
    log.setLevel(logging.INFO if launch.is_main else logging.WARNING)
    log.propagate = False
