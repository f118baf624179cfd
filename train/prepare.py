"""From the flags to a trainer ready to start: data, output, batch plan, checkpoint, model."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from train.checkpoints import checkpoint
from train.checkpoints.resume import choose_share, find_checkpoint, refuse_changes
from train.config import TrainConfig
from train.data.decode import Decoder, choose_decoder
from train.data.sample_order import STREAMED, UNIFORM, SampleOrder, name_order, order_as_before
from train.data.sampler import BatchPlan, ValidationShare, share_validation
from train.data.splits import Dataset
from train.data.tar_layout import find_layout
from train.data.val_share import hold_out
from train.device import (
    choose_precision,
    choose_threads,
    keep_freed_memory,
    name_device,
    prefers_channels_last,
    set_up_math,
)
from train.microbatch import make_plan, make_trial
from train.network.fine_tune import freeze_backbone
from train.network.model import COMMON_SIZE, build_model, check_arch, check_input, has_last_gamma
from train.open_data import open_together
from train.optim import zero_init_last_gamma
from train.ranks.comm import Comm
from train.ranks.cpus import count_sharing, own_binding
from train.ranks.launch import Launch
from train.recipe import FLAGS, Recipe, resolve_recipe
from train.records.classes import name_model, refuse_other_classes
from train.run_folder import choose_output
from train.step import Placement, Trainer
from train.stream.run_stream import Stream

log = logging.getLogger("trainyard")

DUMMY_TRAIN, DUMMY_CLASSES = 1_281_167, 1000  # the size of the real set


@dataclass(frozen=True)
class Setup:
    """Everything that is decided before the first step and does not change after it."""

    cfg: TrainConfig
    launch: Launch
    placement: Placement
    num_workers: int
    dataset: Dataset | None  # None: --dummy
    recipe: Recipe
    output: Path
    plan: BatchPlan
    decoder: Decoder
    order: SampleOrder

    @property
    def num_train(self) -> int:
        return self.plan.num_samples

    @property
    def num_val(self) -> int:
        return len(self.dataset.val) if self.dataset and self.dataset.val else 0

    @property
    def val_share(self) -> ValidationShare:
        return share_validation(self.plan, self.num_val)

    @property
    def classes(self) -> list[str] | None:
        return self.dataset.train.classes if self.dataset else None

    @property
    def model_path(self) -> Path:
        """Where --save-model writes the model."""
        return self.output / name_model(self.cfg.arch, self.classes)

    @property
    def num_classes(self) -> int:
        return len(self.dataset.train.classes) if self.dataset else DUMMY_CLASSES

    @property
    def schedule_steps(self) -> int:
        """The steps that the learning-rate schedule spans."""
        return self.cfg.epochs * self.plan.steps_per_epoch

    @property
    def total_steps(self) -> int:
        return min(self.schedule_steps, self.cfg.max_steps or self.schedule_steps)

    @property
    def identity(self) -> dict[str, Any]:
        """What must be the same for a checkpoint to be continued."""
        cfg = self.cfg
        return (
            recipe_values(self.recipe)
            | self.order.identity
            | fine_tuning_values(cfg)
            | {
                "arch": cfg.arch,
                "epochs": cfg.epochs,
                "batch_size": cfg.batch_size,
                "image_size": cfg.image_size,
                "seed": cfg.seed,
                "ema": cfg.ema,
                "precision": self.placement.precision,
                "decoder": self.decoder.name,
                "num_train": self.num_train,
                "num_classes": self.num_classes,
                "data": self.dataset.fingerprint if self.dataset else "dummy",
            }
        )

    def to_state(self) -> dict[str, Any]:
        """What a checkpoint holds of it."""
        return {
            "identity": self.identity,
            "microbatch": self.plan.microbatch,
            "resumed_from": str(self.cfg.resume) if self.cfg.resume else None,
        }


def prepare(
    cfg: TrainConfig, launch: Launch, comm: Comm, device: torch.device, stream: Stream
) -> tuple[Setup, checkpoint.State | None]:
    """The setup of a run, and the checkpoint to continue from, if any."""
    check_arch(cfg.arch)  # before a folder is made, and before the network is waited for
    precision = choose_precision(cfg.precision, device)
    binding = own_binding()
    num_sharing = count_sharing(binding, comm.gather(binding))
    threads, num_workers = choose_threads(cfg.threads, cfg.workers, device, launch, num_sharing)
    torch.set_num_threads(threads)
    set_up_math(precision, device)
    if device.type == "cpu":
        keep_freed_memory()
    output = Path(
        comm.from_main(choose_output(cfg, name_device(device), launch) if launch.is_main else None)
    )
    cfg = replace(cfg, resume=None) if cfg.resumes_last else cfg
    dataset = None if cfg.dummy else open_together(cfg, launch, comm, stream)
    state = find_checkpoint(cfg, output, launch, comm)
    if dataset is not None:
        dataset = hold_out(dataset, *choose_share(cfg, state, has_val=dataset.val is not None))
    order = choose_order_together(cfg, dataset, state, launch, comm, stream.num_lanes)
    if stream.is_on:
        stream.start(order, state)  # early: it fetches while the rest is prepared
    recipe = recipe_of(cfg)
    channels_last = prefers_channels_last(device, precision, cfg.image_size)
    placement = Placement(device, precision, channels_last)
    plan = cut_batch(cfg, launch, comm, placement, recipe, dataset, state)
    decoder = choose_decoder_together(cfg, state, comm)
    setup = Setup(
        cfg, launch, placement, num_workers, dataset, recipe, output, plan, decoder, order
    )
    if state is not None and not cfg.evaluate:
        refuse_changes(state, setup.identity, cfg, output)
    if cfg.evaluate and setup.classes is not None and (state or cfg.weights):
        refuse_other_classes(cfg.resume or cfg.weights or output / "ckpt" / "latest", setup.classes)
    return setup, state


def cut_batch(
    cfg: TrainConfig,
    launch: Launch,
    comm: Comm,
    placement: Placement,
    recipe: Recipe,
    dataset: Dataset | None,
    state: checkpoint.State | None,
) -> BatchPlan:
    """How the batch is cut: as in the run that is continued, or to fit on the GPUs."""
    num_train = len(dataset.train) if dataset else DUMMY_TRAIN
    num_classes = len(dataset.train.classes) if dataset else DUMMY_CLASSES
    last_step = cfg.epochs * (num_train // cfg.batch_size)
    is_over = state is not None and state["step"] >= min(last_step, cfg.max_steps or last_step)
    fits = None if is_over else make_trial(cfg, placement, recipe, num_classes, comm)
    return make_plan(cfg, num_train, launch, comm, state["microbatch"] if state else None, fits)


def recipe_of(cfg: TrainConfig) -> Recipe:
    """The recipe that the flags ask for."""
    overrides = {name: getattr(cfg, name) for name in FLAGS}
    recipe = resolve_recipe(cfg.recipe, cfg.batch_size, cfg.epochs, overrides)
    is_fresh = not (cfg.pretrained or cfg.weights)
    if recipe.zero_init_gamma and is_fresh and not has_last_gamma(cfg.arch):
        text = f"the last gamma of a block starts at 0, but {cfg.arch} has no such gamma"
        return replace(recipe, notes=(*recipe.notes, text))
    return recipe


def recipe_values(recipe: Recipe) -> dict[str, Any]:
    """The recipe under the names of the flags."""
    lars = {"lars_eta": recipe.lars_eta, "lars_eps": recipe.lars_eps}
    return {
        "recipe": recipe.name,
        "lr": recipe.lr,
        "momentum": recipe.momentum,
        "wd": recipe.weight_decay,
        "warmup_epochs": recipe.warmup_epochs,
        "label_smoothing": recipe.label_smoothing,
        "schedule": recipe.schedule,
    } | (lars if recipe.optimizer == "lars" else {})


def fine_tuning_values(cfg: TrainConfig) -> dict[str, Any]:
    """The flags of fine-tuning; none for a run without them, as in earlier checkpoints."""
    values = {"freeze": cfg.freeze, "val_share": cfg.val_share}
    scale = {"backbone_lr_scale": cfg.backbone_lr_scale} if cfg.backbone_lr_scale != 1 else {}
    return {name: value for name, value in values.items() if value} | scale


def choose_decoder_together(
    cfg: TrainConfig, state: checkpoint.State | None, comm: Comm
) -> Decoder:
    """The same decoder on all ranks; with --decoder auto also the same in all attempts."""
    was_pil = state is not None and state["identity"].get("decoder") == "pil"
    decoder = choose_decoder("pil" if was_pil and cfg.decoder == "auto" else cfg.decoder)
    if len(set(comm.gather(decoder.name))) > 1:  # a node without libjpeg
        return choose_decoder("pil")
    return decoder


def choose_order_together(
    cfg: TrainConfig,
    dataset: Dataset | None,
    state: checkpoint.State | None,
    launch: Launch,
    comm: Comm,
    num_lanes: int = 0,
) -> SampleOrder:
    """The same order on all ranks: --order, else the checkpoint's, else by where the data is.

    num_lanes: of a fresh run that streams; 0 for one that does not. Rank 0 alone reads the index; a
    layout is 8 bytes a sample.
    """
    before = state["identity"] if state is not None else {}
    fresh = STREAMED if num_lanes and state is None else UNIFORM
    name = name_order(cfg.order_name, before, fresh)
    if name != STREAMED or dataset is None or cfg.evaluate:
        return SampleOrder()
    order = None
    if launch.is_main:
        layout, units = find_layout(dataset.train, Path(dataset.path), cfg.index_dir)
        lanes = cfg.order_lanes, max(1, num_lanes)
        order = order_as_before(layout, units, cfg.batch_size, before, *lanes)
    shared: SampleOrder = comm.from_main(order)
    return shared


def make_trainer(setup: Setup, comm: Comm, state: checkpoint.State | None) -> Trainer:
    """The model and its optimiser, at the checkpoint or at the first step."""
    cfg = setup.cfg
    torch.manual_seed(cfg.seed)
    model = build_model(
        cfg.arch, setup.num_classes, cfg.pretrained, cfg.weights, may_fit=not cfg.evaluate
    )
    microbatch = setup.plan.microbatch
    if cfg.image_size != COMMON_SIZE or microbatch == 1 or cfg.pretrained:
        is_training = not (cfg.evaluate or cfg.freeze)  # frozen batch norm takes a single image
        check_input(model, cfg.arch, cfg.image_size, microbatch, is_training=is_training)
    if setup.recipe.zero_init_gamma and not (cfg.pretrained or cfg.weights):
        zero_init_last_gamma(model)
    if cfg.freeze:
        freeze_backbone(model)
    trainer = Trainer(
        model,
        setup.placement,
        setup.recipe,
        setup.plan,
        comm,
        seed=cfg.seed,
        schedule_steps=setup.schedule_steps,
        ema_decay=averages_decay(cfg, state),
        use_compile=cfg.compile,
        backbone_lr_scale=cfg.backbone_lr_scale,
    )
    if state is None:
        return trainer
    if cfg.evaluate:  # the optimiser may be that of another recipe
        trainer.load_weights(state)
        return trainer
    trainer.load(state)
    return trainer


def averages_decay(cfg: TrainConfig, state: checkpoint.State | None) -> float:
    """The decay of the averaged weights, 0 for none; -e averages if its checkpoint did."""
    if not cfg.evaluate:
        return cfg.ema
    return 0.5 if state and state["ema"] else 0.0  # they are only read: any decay will do
