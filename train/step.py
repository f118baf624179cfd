"""One optimiser step, cut into microbatches: forward, backward, batch-norm statistics, update."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dataset.errors import UserError
from train.data.batches import Batch
from train.data.patience import Stranded
from train.data.sampler import BatchPlan, derive_key
from train.data.stream_source import Refused, Starved
from train.network.batch_norm import StepStatistics
from train.network.fine_tune import find_frozen_norms
from train.optim import Ema, make_optimizer, match_layout, set_lr
from train.ranks.comm import Comm
from train.ranks.compat import compile_model, make_scaler, wrap_ddp
from train.ranks.interrupt import Cast, Vote
from train.ranks.watch import READING
from train.recipe import Recipe, lr_at
from train.records.phases import PhaseClock

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
AMP_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Placement:
    """Where, in which number format and in which memory layout the model computes."""

    device: torch.device
    precision: str
    channels_last: bool = False

    @property
    def weights_dtype(self) -> torch.dtype:
        return torch.float64 if self.precision == "fp64" else torch.float32

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        dtype = AMP_DTYPES.get(self.precision)
        if dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=dtype)

    def place_model(self, model: nn.Module) -> nn.Module:
        model = model.to(self.device, self.weights_dtype)
        if self.channels_last:
            model = model.to(memory_format=torch.channels_last)
        return model

    def normalise(self, images: torch.Tensor) -> torch.Tensor:
        """uint8 images as the model's input, on the device, in the order of torchvision's steps."""
        if self.channels_last:
            # Whole rows of pixels: with the channels innermost a loop over three values is slow.
            width = images.shape[3]
            rows = images.permute(0, 2, 3, 1).flatten(2).to(self.weights_dtype)
            rows.div_(255).sub_(self._row(MEAN, width)).div_(self._row(STD, width))
            return rows.view(*rows.shape[:2], width, 3).permute(0, 3, 1, 2)
        images = images.contiguous().to(self.weights_dtype)
        mean, std = self._row(MEAN, 1).view(3, 1, 1), self._row(STD, 1).view(3, 1, 1)
        return images.div_(255).sub_(mean).div_(std)

    def _row(self, values: tuple[float, ...], width: int) -> torch.Tensor:
        """The values of the channels, once for each pixel of a row; made once on the device."""
        key = (values, width)
        if key not in self._rows:
            row = torch.tensor(values * width, dtype=self.weights_dtype, device=self.device)
            self._rows[key] = row
        return self._rows[key]

    @functools.cached_property
    def _rows(self) -> dict[tuple[tuple[float, ...], int], torch.Tensor]:
        return {}


# What torch raises for a state dict of another model or optimiser, or for something else.
_STRANGE = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)


class Trainer:
    """Everything that an optimiser step changes; after each step it is the same on all ranks."""

    def __init__(
        self,
        model: nn.Module,
        placement: Placement,
        recipe: Recipe,
        plan: BatchPlan,
        comm: Comm,
        *,
        seed: int,
        schedule_steps: int,
        ema_decay: float,
        use_compile: bool,
        backbone_lr_scale: float = 1.0,
    ) -> None:
        self.model = placement.place_model(model)
        self._comm = comm
        self.placement, self.recipe, self.plan = placement, recipe, plan
        self.seed, self.schedule_steps = seed, schedule_steps
        self.step = 0
        self.optimizer = make_optimizer(self.model, recipe, backbone_lr_scale)
        self._frozen_norms = find_frozen_norms(self.model)
        enabled = placement.precision == "fp16" and placement.device.type == "cuda"
        self.scaler = make_scaler(placement.device.type, enabled)
        self.ema = Ema(self.model, ema_decay, plan.batch_size) if ema_decay else None
        parts = plan.microbatches_per_rank
        self.statistics = StepStatistics(self.model, parts, plan.world_size)
        self.criterion = nn.CrossEntropyLoss(label_smoothing=recipe.label_smoothing)
        self.ddp = wrap_ddp(self.model, placement.device) if comm.world_size > 1 else None
        self.called: nn.Module = self.ddp or self.model
        if use_compile:
            self.called = compile_model(self.called)
        # loss x images and correct images of this rank, on the device: of the whole steps since the
        # epoch began, and of the step under way
        self.sums = torch.zeros(2, dtype=torch.float64, device=placement.device)
        self._step_sums = torch.zeros_like(self.sums)
        self._microbatch_s = 0.0

    @property
    def lr(self) -> float:
        return lr_at(self.recipe, self.step, self.plan.steps_per_epoch, self.schedule_steps)

    @property
    def cast(self) -> Cast | None:
        """Sends a vote with a step; None if a step has several votes, or no batch norm."""
        return self.statistics.cast if self.statistics.carries_votes else None

    def run_step(
        self, batches: Iterator[Batch], clock: PhaseClock, agree: Callable[[float], Vote]
    ) -> tuple[Vote, list[str]]:
        """The ranks' vote, and the skipped images; an abandoned step is undone."""
        vote = Vote.GO_ON
        skipped: list[str] = []
        set_lr(self.optimizer, self.lr)
        self.statistics.begin()
        parts = self.plan.my_microbatches
        for number, part in enumerate(parts):
            if not vote.stops:
                vote = max(vote, agree(self._microbatch_s * (len(parts) - number)))
            if vote.abandons_step:
                self._abandon()
                return vote, skipped
            begin_s = time.monotonic()
            self._comm.advance(READING)
            with clock.waiting_for_data():
                batch = self._next(batches)
            self._comm.advance("training")
            with clock.phase("compute"):
                self._accumulate(batch, part, is_last=number == len(parts) - 1)
            skipped += batch.skipped
            self._estimate(time.monotonic() - begin_s)
        with clock.phase("compute"):
            self._update()
        return vote, skipped

    def run_once(self, batch: Batch) -> None:
        """One step on one batch, without the other ranks."""
        self.statistics.begin()
        self._accumulate(batch, 0, is_last=True)
        self._update()

    def _next(self, batches: Iterator[Batch]) -> Batch:
        try:
            return next(batches)
        except (Stranded, Starved, Refused):
            self._abandon()
            raise

    def _estimate(self, microbatch_s: float) -> None:
        """Measures a microbatch, even in the first step, which may be too long to finish."""
        before_s = self._microbatch_s or microbatch_s
        self._microbatch_s = 0.8 * before_s + 0.2 * microbatch_s

    def _accumulate(self, batch: Batch, part: int, is_last: bool) -> None:
        device, num_parts = self.placement.device, self.plan.microbatches_per_rank
        images = self.placement.normalise(batch.images.to(device, non_blocking=True))
        labels = batch.labels.to(device, non_blocking=True)
        # Dropout and its like depend on the step and the microbatch, not on the rank.
        torch.manual_seed(derive_key(self.seed, self.step, part) >> 1)
        self.called.train()
        for norm in self._frozen_norms:
            norm.eval()
        # Only the last microbatch's backward talks to the other ranks.
        with self.ddp.no_sync() if self.ddp and not is_last else contextlib.nullcontext():
            with self.placement.autocast():
                outputs = self.called(images)
                loss = self.criterion(outputs, labels)
            self.statistics.after_forward(is_last)
            self.scaler.scale(loss / num_parts).backward()
        self.statistics.after_backward(is_last)
        with torch.no_grad():
            correct = (outputs.argmax(1) == labels).sum()
            sums = torch.stack([loss.detach().double() * len(labels), correct.double()])
            self._step_sums += sums

    def _update(self) -> None:
        # Reading the scale waits for the device, so it is read only where something depends on it.
        must_look = self.scaler.is_enabled() and self.ema is not None
        scale = self.scaler.get_scale() if must_look else 0.0
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.statistics.finish()
        # A step that the scaler skipped moves the schedule and not the average.
        was_skipped = must_look and self.scaler.get_scale() < scale
        if self.ema is not None and not was_skipped:
            self.ema.update(self.model, self.step)
        self.sums += self._step_sums
        self._step_sums.zero_()
        self.step += 1

    def _abandon(self) -> None:
        self._step_sums.zero_()
        self.optimizer.zero_grad(set_to_none=True)
        self.statistics.abandon()

    def exposed_communication_s(self, steps: int) -> float:
        """An estimate, from DDP's own samples, of all-reduce time not hidden by backward."""
        if self.ddp is None:
            return 0.0
        sampled = self.ddp._get_ddp_logging_data()  # type: ignore[no-untyped-call]
        comm_ns = float(sampled.get("avg_backward_comm_time", 0))
        hidden_ns = float(sampled.get("avg_backward_compute_comm_overlap_time", 0))
        return max(0.0, (comm_ns - hidden_ns) * 1e-9) * steps

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds of the training; the tensors are the live ones."""
        return {
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "ema": self.ema.state_dict() if self.ema else {},
        }

    def load(self, state: dict[str, Any]) -> None:
        """Restores a checkpoint; rates and decays stay those of this run's recipe."""
        self.load_weights(state)
        groups = self.optimizer.param_groups
        own = [{k: v for k, v in g.items() if k not in ("params", "lr")} for g in groups]
        try:
            self.optimizer.load_state_dict(state["optimizer"])
            match_layout(self.optimizer)
            if self.scaler.is_enabled() and state["scaler"]:
                self.scaler.load_state_dict(state["scaler"])
        except _STRANGE as error:
            raise UserError(f"the checkpoint is of another optimiser: {_shorten(error)}") from None
        for group, settings in zip(self.optimizer.param_groups, own, strict=True):
            group.update(settings)
        self.step = state["step"]

    def load_weights(self, state: dict[str, Any]) -> None:
        """Loads only the weights and their averages of a checkpoint, of any recipe."""
        try:
            self.model.load_state_dict(state["model"])
        except _STRANGE as error:
            reason = f"of another arch or number of classes: {_shorten(error)}"
            raise UserError(f"the checkpoint is {reason}") from None
        if self.ema:  # one that starts now, with --force, starts from these weights
            self.ema.load_state_dict(state["ema"] or dict(self.model.named_parameters()))


def _shorten(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
