"""What a run is asked to do: one frozen dataclass, from which flags, help and checks come."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataset.errors import UserError
from dataset.flags import flag, make_parser, parse_duration, parse_flags, parse_size
from dataset.names import split_urls
from dataset.redaction import redact_name

EXAMPLE = """examples:
  python -m train DATA -a resnet50 -b 256 --output runs/a      one process
  srun python -m train DATA -b 1024 --output runs/b            one rank per task, under SLURM
  torchrun --nproc-per-node 4 -m train DATA -b 1024 --output runs/c    one rank per GPU
  python -m train --dummy -b 256 --max-steps 50                speed without reading data

exit codes: 0 done, 1 crash, 2 user error, 3 bad data, 4 diverged, 75 try again,
            85 stopped with a checkpoint: run the same command again, with its --output,
            130 Ctrl-C before the first step, or twice: ended without a checkpoint
"""


MAX_SEED = 2**63  # torch takes no more than 64 bits
MAX_WHOLE = 2**31 - 1  # of a count; beyond it torch and C libraries overflow
MAX_CORES = 4096  # of one machine, which some take a thread or a process each
ORDER = re.compile("auto|uniform|streamed(:[1-9][0-9]{0,5})?")
METAVARS: dict[type, str] = {int: "N", float: "X", Path: "PATH", str: "NAME"}


@dataclass(frozen=True)
class TrainConfig:
    """The flags of `python -m train`; None: taken from the recipe, the device or the launch."""

    data: str = flag(
        "",
        "folder with train/ and val/, folder or URL with the ILSVRC tars, or URL,URL of the tars "
        "of training and validation",
        "DATA",
        nargs="?",
    )
    arch: str = flag("resnet50", "a torchvision classification model", "-a", "--arch")
    epochs: int = flag(90, "passes over the training set", "--epochs")
    batch_size: int = flag(256, "GLOBAL batch, over all ranks", "-b", "--batch-size")
    microbatch: int | None = flag(
        None, "images per forward pass; default: a rank's whole batch, or what fits on the GPU"
    )
    largest_microbatch: int | None = flag(
        None, "the largest --microbatch to try when none is given; scaling studies set it"
    )
    recipe: str = flag(
        "auto", "how LR, decay and optimiser are set", choices=("auto", "reference", "sgd", "lars")
    )
    lr: float | None = flag(None, "learning rate; default: the recipe's")
    momentum: float | None = flag(None, "momentum; default: the recipe's")
    wd: float | None = flag(None, "weight decay; default: the recipe's", "--wd", "--weight-decay")
    warmup_epochs: float | None = flag(None, "linear warm-up; default: the recipe's")
    label_smoothing: float | None = flag(None, "label smoothing; default: the recipe's")
    lars_eta: float | None = flag(None, "LARS's trust coefficient; default: the recipe's")
    lars_eps: float | None = flag(None, "LARS's epsilon; default: the recipe's")
    ema: float = flag(0.0, "decay of the averaged weights at batch 256; 0: no averaging")
    workers: int | None = flag(
        None,
        "cores per rank that load images; 0: in-process; default: chosen from its cores",
        "-j",
        "--workers",
    )
    threads: int | None = flag(None, "compute threads per rank on a CPU; default: its cores")
    decoder: str = flag(
        "auto", "JPEG decoder; auto: the kernel if built", choices=("auto", "kernel", "pil")
    )
    order: str = flag(
        "auto",
        "auto, uniform, streamed or streamed:LANES: order of the samples; streamed: along the tar "
        "(docs/training.md), with a lane for each node that has a disk of its own; auto: the "
        "checkpoint's, else streamed for data that is still arriving, uniform for local data",
        metavar="ORDER",
    )
    image_size: int = flag(224, "width and height of a training crop in pixels")
    seed: int = flag(0, "seed of the order, the crops and the first weights")
    precision: str = flag(
        "auto", "number format", choices=("auto", "fp32", "tf32", "bf16", "fp16", "fp64")
    )
    device: str = flag("auto", "where to compute", choices=("auto", "cuda", "cpu"))
    compile: bool = flag(False, "torch.compile the model")
    dummy: bool = flag(False, "made-up images on the device, to measure the computation alone")
    max_steps: int | None = flag(None, "stop after this many optimiser steps in total")
    print_freq: int = flag(10, "steps between progress lines", "-p", "--print-freq")
    evaluate: bool = flag(
        False, "only evaluate: --weights, --resume or the latest checkpoint", "-e", "--evaluate"
    )
    pretrained: bool = flag(
        False, "start from torchvision's weights: a file in this folder, torch's cache or a network"
    )
    weights: Path | None = flag(
        None, "start from this state dict or checkpoint; for other classes the last layer is new"
    )
    freeze: bool = flag(False, "train the last layer alone; all others stay as they were loaded")
    backbone_lr_scale: float = flag(1.0, "learning rate of all layers but the last, times --lr")
    val_share: float | None = flag(
        None, "hold out this share of each class for validation, by --seed; for data without val/"
    )
    save_model: bool = flag(False, "write the model, a plain state dict, at the end")
    output: Path | None = flag(None, "the run's folder; default run_results/DEVICE/RUN_ID")
    resume: Path | None = flag(
        None,
        "checkpoint to continue from (default: the latest in --output), or 'last': the newest "
        "unfinished run of this command in run_results/",
    )
    force: bool = flag(False, "resume even if the data or the recipe changed")
    checkpoint_minutes: float = flag(15.0, "write a checkpoint at least this often")
    deadline: float | None = flag(None, "unix time to stop by; default: SLURM's time limit")
    timeout_minutes: float = flag(10.0, "how long ranks wait for each other")
    data_dir: Path | None = flag(None, "folder that a URL is fetched to; default ./data")
    stream: str = flag(
        "auto",
        "train while the tar of a URL arrives; auto: if it has an index with checksums, and the "
        "disk holds it; always: or exit 2",
        choices=("auto", "never", "always"),
    )
    index: str | None = flag(
        None,
        "the index of the tar at the URL; default: in --data-dir, or beside it",
        metavar="FILE|URL",
    )
    cache_limit: str | None = flag(
        None,
        "stream with at most this much disk, 20GB or 20GiB: units and the validation tar; what "
        "fits is kept, the rest is fetched again in each epoch (docs/training.md)",
        metavar="SIZE",
    )
    give_up_after: str = flag(
        "6h",
        "exit with 75, or 85, when no byte of a URL came for this long: seconds, 30m, 6h",
        metavar="TIME",
    )
    federation: str | None = flag(
        None, "discovery host of osdf:// URLs; default OSDF's", metavar="HOST"
    )
    token: Path | None = flag(None, "file with the bearer token for a protected URL")
    index_dir: Path | None = flag(None, "where tar indexes go when DATA is read-only")
    allow_empty_classes: bool = flag(False, "class folders without an image are classes too")
    skip_bad_images: int = flag(0, "undecodable images to tolerate per epoch")
    tensorboard: bool = flag(False, "also write TensorBoard events to the output folder")
    show_recipe: bool = flag(False, "print the recipe of this batch size and stop")

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if type(value) is float:
                _check(math.isfinite(value), name, value, "a finite number")
            if type(value) is int and name != "seed":
                _check(value <= MAX_WHOLE, name, value, f"at most {MAX_WHOLE}")
        for name in ("epochs", "batch_size", "image_size", "print_freq"):
            _check(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        for name in ("microbatch", "largest_microbatch", "max_steps", "threads"):
            value = getattr(self, name)
            _check(value is None or value >= 1, name, value, "at least 1")
        recipe = ("lr", "wd", "momentum", "warmup_epochs", "lars_eta", "lars_eps")
        for name in ("workers", "skip_bad_images", *recipe):
            value = getattr(self, name)
            _check(value is None or value >= 0, name, value, "0 or more")
        _check(0 <= self.seed < MAX_SEED, "seed", self.seed, f"in [0, {MAX_SEED})")
        _check(0 <= self.ema < 1, "ema", self.ema, "in [0, 1)")
        smoothing = self.label_smoothing
        ok = smoothing is None or 0 <= smoothing < 1
        _check(ok, "label_smoothing", smoothing, "in [0, 1)")
        for name in ("checkpoint_minutes", "timeout_minutes"):
            _check(getattr(self, name) > 0, name, getattr(self, name), "above 0")
        _check(self.timeout_minutes <= 1e6, "timeout_minutes", self.timeout_minutes, "at most 1e6")
        for name in ("threads", "workers"):
            value = getattr(self, name) or 0
            _check(value <= MAX_CORES, name, value, f"at most {MAX_CORES}")
        share = self.val_share
        _check(share is None or 0 < share < 1, "val_share", share, "above 0 and below 1")
        scale = self.backbone_lr_scale
        _check(0 < scale <= 1, "backbone_lr_scale", scale, "above 0 and at most 1 (0 is --freeze)")
        self._check_fine_tuning()
        if self.pretrained and self.weights:
            raise UserError("--pretrained and --weights both give the first weights; use one")
        if self.resumes_last and self.output:
            raise UserError("--resume last finds the folder itself; leave out --output")
        self._check_order()
        if self.dummy and self.val_share:
            raise UserError("--val-share holds out images of DATA; leave it out with --dummy")
        if self.give_up_s <= 0:
            raise UserError(f"--give-up-after {self.give_up_after}: must be above 0")
        if self.stream == "always" and (self.dummy or self.evaluate or not self.urls):
            raise UserError("--stream always is for training on the tar of a URL; leave it out")
        if self.cache_limit is not None:
            self._check_cache_limit()
        if not self.data and not self.dummy and not self.show_recipe:
            raise UserError("no DATA; name a folder, a tar's folder or a URL, or use --dummy")

    def _check_cache_limit(self) -> None:
        if self.cache_bytes <= 0:
            raise UserError(f"--cache-limit {self.cache_limit}: must be above 0")
        if self.dummy or self.evaluate or not self.urls or self.stream == "never":
            raise UserError("--cache-limit is for a training that streams a URL; leave it out")
        if self.order == "uniform":
            raise UserError("--cache-limit takes --order streamed; leave out --order uniform")

    def _check_fine_tuning(self) -> None:
        if self.freeze and self.backbone_lr_scale != 1:
            raise UserError("--freeze trains no backbone: leave out --backbone-lr-scale")
        needs_weights = self.freeze or self.backbone_lr_scale != 1
        has_weights = self.pretrained or self.weights or self.resume or self.dummy
        if needs_weights and not has_weights and not self.evaluate:
            flag_name = "--freeze" if self.freeze else "--backbone-lr-scale"
            raise UserError(f"{flag_name} is for trained weights; name them with --weights FILE")

    def _check_order(self) -> None:
        if not ORDER.fullmatch(self.order):
            raise UserError(
                f"--order {self.order}: must be one of auto, uniform, streamed, or streamed:LANES "
                "with a whole number from 1 to 999999"
            )
        if self.dummy and self.order_name == "streamed":
            raise UserError("--order streamed needs data in a tar; leave it out with --dummy")

    @property
    def urls(self) -> list[str]:
        """The URLs of DATA: one, or those of the tars of training and validation."""
        return split_urls(self.data)

    @property
    def order_name(self) -> str:
        return self.order.partition(":")[0]

    @property
    def order_lanes(self) -> int | None:
        """The lanes of a streamed order; None: the run's own."""
        lanes = self.order.partition(":")[2]
        return int(lanes) if lanes else None

    @property
    def cache_bytes(self) -> int:
        """The limit of the cache; 0 without one."""
        return parse_size("--cache-limit", self.cache_limit) if self.cache_limit else 0

    @property
    def give_up_s(self) -> float:
        return parse_duration("--give-up-after", self.give_up_after)

    @property
    def resumes_last(self) -> bool:
        return self.resume == Path("last")

    def as_record(self) -> dict[str, Any]:
        """The fields as plain JSON values."""
        # URLs may be signed.
        data = ",".join(map(redact_name, self.urls)) or redact_name(self.data)
        index = redact_name(self.index) if self.index else None
        values = {**dataclasses.asdict(self), "data": data, "index": index}
        return {k: str(v) if isinstance(v, Path) else v for k, v in values.items()}


def parse_config(argv: list[str]) -> TrainConfig:
    """The configuration that the command line asks for."""
    description = "Trains an image classifier on one or many ranks; continues where it stopped."
    parser = make_parser(description, EXAMPLE, prog="python -m train")
    return parse_flags(TrainConfig, parser, argv, metavars=METAVARS)


def _check(ok: bool, name: str, value: object, expected: str) -> None:
    if not ok:
        raise UserError(f"--{name.replace('_', '-')} {value}: must be {expected}")
