"""The story of a run: prepare, train, evaluate, stop or finish. Reads from top to bottom."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from functools import partial

from dataset.errors import DONE
from dataset.names import VAL_TAR
from dataset.words import count
from train.attempt import Attempt
from train.config import TrainConfig, parse_config
from train.data.batches import Batch, check_skipped
from train.data.patience import Stranded
from train.data.stream_source import Refused, Starved
from train.device import choose_device, name_device
from train.epoch import EpochMeter, Standing, check_finite, describe_epoch
from train.evaluate import Accuracy, evaluate_only, validate
from train.failure import end_all_ranks
from train.feed import open_batches
from train.prepare import Setup, make_trainer, prepare, recipe_of
from train.ranks.batch_system import exits_for_checkpoints
from train.ranks.comm import Comm
from train.ranks.interrupt import Cast, CtrlC, Vote
from train.ranks.launch import Launch, detect_launch
from train.ranks.rank_log import set_up_logging
from train.recipe import describe
from train.records.output_writer import NO_VALIDATION, OutputWriter
from train.records.phases import process_start_s
from train.records.recorder import is_recorded_as_done
from train.records.stage_meter import measure_stage
from train.saving import Saver
from train.step import Trainer
from train.stream.early import EarlyStream

log = logging.getLogger("trainyard")


def main(argv: list[str] | None = None, early: EarlyStream | None = None) -> int:
    """Runs the trainer; the exit code says how it ended. early: a stream that has begun."""
    started_s = process_start_s()
    cfg = parse_config(sys.argv[1:] if argv is None else argv)
    if cfg.show_recipe:
        print(describe(recipe_of(cfg), cfg.batch_size))
        return DONE
    launch = detect_launch(os.environ)
    set_up_logging(launch)
    with CtrlC(launch.is_main) as ctrl_c:
        return run(cfg, launch, started_s, ctrl_c, early)


def run(
    cfg: TrainConfig,
    launch: Launch,
    started_s: float,
    ctrl_c: CtrlC,
    early: EarlyStream | None = None,
) -> int:
    """The whole run on this rank; any error ends all ranks at once."""
    device = choose_device(cfg.device, launch, os.environ)
    attempt = Attempt(cfg, launch, device, started_s, early)
    try:
        attempt.join_others()
        code = prepare_and_train(attempt, ctrl_c)
        attempt.stream.close()
        attempt.comm.close()
        return code
    except BaseException as error:
        attempt.stream.close()
        return end_all_ranks(error, attempt.comm, attempt.open_record)
    finally:
        attempt.interrupt.uninstall()


def prepare_and_train(attempt: Attempt, ctrl_c: CtrlC) -> int:
    """Prepares everything, then evaluates, or trains to the end or to a stop."""
    cfg, launch, comm = attempt.cfg, attempt.launch, attempt.comm
    setup, state = prepare(cfg, launch, comm, attempt.device, attempt.stream)
    trainer = make_trainer(setup, comm, state)
    if cfg.evaluate:
        evaluate_only(setup, trainer, comm, setup.output if launch.is_main else None)
        return DONE
    standing = Standing.from_state(state)
    if is_done(setup, trainer, standing, comm):
        log.info("%s: this run is done already, nothing to do", setup.output)
        return DONE
    attempt.interrupt.install()
    ctrl_c.saves = True
    writer = None
    if launch.is_main:
        writer = OutputWriter(setup, attempt.clock, trainer.step)
        attempt.recorder = writer.recorder
    if state is not None:
        log.info("continuing from step %d of %d", trainer.step, setup.total_steps)
    log_start(setup, trainer.step, attempt.stream.is_on)
    attempt.clock.end_startup()
    return Training(attempt, setup, trainer, standing, writer).go()


def is_done(setup: Setup, trainer: Trainer, standing: Standing, comm: Comm) -> bool:
    """Whether earlier attempts did it all, down to the record and the model; all ranks ask."""
    if trainer.step < setup.total_steps or not standing.is_evaluated:
        return False
    is_whole = setup.launch.is_main and is_recorded_as_done(setup.output)
    is_whole &= not setup.cfg.save_model or setup.model_path.exists()
    return bool(comm.from_main(is_whole))


def log_start(setup: Setup, step: int, is_streamed: bool) -> None:
    """What is about to be trained, where, and from which step on; a stream has said its order."""
    for note in setup.recipe.notes:
        log.info("recipe: %s", note)
    if setup.dataset and not setup.num_val:
        log.warning("%s (no val/ and no %s in the data; see --val-share)", NO_VALIDATION, VAL_TAR)
    if setup.order.layout is not None and not is_streamed:
        log.info("order: %s", setup.order.describe())
    if note := setup.order.note_narrow(setup.plan.batch_size):
        log.info("order: %s", note)
    log.info(
        "%s on %s, %s: %s (%s), batch %d in microbatches of %d, step %d of %d -> %s",
        setup.cfg.arch,
        name_device(setup.placement.device),
        setup.placement.precision,
        count(setup.launch.world_size, "rank"),
        setup.launch.launcher,
        setup.plan.batch_size,
        setup.plan.microbatch,
        step,
        setup.total_steps,
        setup.output,
    )


class Training:
    """A prepared run on one rank: epoch after epoch, to the end or to a stop."""

    def __init__(
        self,
        attempt: Attempt,
        setup: Setup,
        trainer: Trainer,
        standing: Standing,
        writer: OutputWriter | None,
    ) -> None:
        self.comm, self.clock, self.interrupt = attempt.comm, attempt.clock, attempt.interrupt
        self.setup, self.cfg, self.stream = setup, setup.cfg, attempt.stream
        self.trainer, self.standing = trainer, standing
        self.writer = writer  # rank 0's
        self.meter = EpochMeter(trainer, self.clock, self.comm, standing)
        self.saver = Saver(attempt, setup, trainer, standing, self.meter, writer)
        # Rank 0 alone writes the lines of its stages.
        self.stages_folder = setup.output if setup.launch.is_main else None

    def go(self) -> int:
        """Trains to the end or to a stop; returns the exit code."""
        self.saver.record_start()
        try:
            vote = self.train()
        except Stranded as stranded:
            log.warning("%s", stranded)
            vote = stranded.vote
            if self.comm.world_size > 1:
                self.saver.stop_stranded(stranded)
        except (Starved, Refused) as starved:
            # The other ranks of several wait in an exchange, and a checkpoint needs them all.
            if self.comm.world_size > 1 or not self.saver.has_moved:
                raise
            log.warning("%s", starved)
            return self.saver.stop(Vote.EXIT, str(starved))
        if not vote.stops:
            vote = self.stream.finish(self.vote_alone)
        return self.saver.stop(vote) if vote.stops else self.saver.finish()

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
        self.stream.look_at_classes()
        with measure_stage("train", self.stages_folder) as stage:
            end = (self.meter.epoch + 1) * self.setup.plan.steps_per_epoch
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
        self.stream.note_step(self.trainer.step)
        if self.trainer.step % self.cfg.print_freq == 0 or self.trainer.step == end:
            ahead = self.stream.describe_ahead(self.trainer.step)
            self.meter.show_progress(self.setup.total_steps, ahead)
            self.saver.touch_record()
        if vote is Vote.SAVE and self.trainer.step < end:
            self.saver.save()
        return vote

    def ask_for_checkpoint(self) -> None:
        """Rank 0 checks the checkpoint interval and the writer's findings."""
        if not self.writer:
            return
        self.writer.refuse_not_finite(self.trainer.step)
        if self.writer.is_due():
            on_grid = exits_for_checkpoints(os.environ)
            self.interrupt.wanted = Vote.SAVE_AND_EXIT if on_grid else Vote.SAVE
            self.writer.begin_interval()

    def agree(self, step_left_s: float, cast: Cast | None = None) -> Vote:
        """The vote that all ranks follow."""
        return self.interrupt.agree(step_left_s, self.saver.stop_cost_s, cast)

    def vote_alone(self) -> Vote:
        """This rank's own vote, while it waits for a batch."""
        return self.interrupt.vote_alone(self.saver.stop_cost_s)

    def evaluate_epoch(self, batches: Iterator[Batch]) -> Vote:
        """Validates and records the trained epoch; an urgent stop leaves that to the next start."""
        setup = self.setup
        with measure_stage("evaluate", self.stages_folder) as stage:
            with self.clock.phase("evaluation"):
                vote, results = validate(setup, self.trainer, self.comm, batches, self.agree)
            stage.extra |= {"epoch": self.meter.epoch, "images": setup.num_val}
        if vote.is_urgent:
            return vote
        self.finish_epoch(results)
        return vote if self.trainer.step < self.setup.total_steps else Vote.GO_ON

    def finish_epoch(self, results: list[Accuracy]) -> None:
        """Records and saves an epoch that was trained and evaluated."""
        sums, epoch = self.meter.total(), self.meter.epoch
        check_skipped(sums.skipped, self.cfg.skip_bad_images)
        check_finite(sums)
        is_best = self.standing.take(epoch, results)
        self.standing.is_evaluated = True
        for suffix, accuracy in zip(("", "_ema"), results, strict=False):
            acc1, acc5 = accuracy.acc1, accuracy.acc5
            log.info("epoch %d: val%s acc1 %.3f acc5 %.3f", epoch + 1, suffix, acc1, acc5)
        if self.writer:
            eval_s = self.clock.last_s["evaluation"]
            self.writer.add_epoch(describe_epoch(epoch, self.trainer, sums, results, eval_s))
        is_needed = is_best or self.trainer.step == self.setup.total_steps
        self.saver.save(is_best, sums, must_write=is_needed)
