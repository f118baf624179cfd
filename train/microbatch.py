"""How many images go through the network at once: as many as the memory of every GPU takes."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

import torch

from dataset.errors import CommandError, PassingError, UserError
from dataset.words import count
from train.config import TrainConfig
from train.data.batches import Batch
from train.data.sampler import BatchPlan, check_batch
from train.network.fine_tune import freeze_backbone
from train.network.model import build_model
from train.ranks.comm import Comm
from train.ranks.launch import Launch
from train.recipe import Recipe
from train.step import Placement, Trainer

log = logging.getLogger("trainyard")

Fits = Callable[[int], bool]
# What a run takes after its first step: cuDNN's and NCCL's buffers, gaps between allocations.
SPARE_BYTES = 256 << 20
BATCHES_AHEAD = 3  # on the GPU, as bytes: the one in use, the next, and the one that is copied
_NO_MEMORY = ("out of memory", "ALLOC_FAILED")  # of CUDA, cuDNN and cuBLAS beside torch's own error


def make_plan(
    cfg: TrainConfig,
    num_train: int,
    launch: Launch,
    comm: Comm,
    earlier: int | None = None,
    fits: Fits | None = None,
) -> BatchPlan:
    """How the batch is cut; `earlier` is the microbatch of the run that is continued."""
    if cfg.evaluate:
        batch_per_rank = max(1, cfg.batch_size // launch.world_size)
        batch_size = batch_per_rank * launch.world_size
        return BatchPlan(num_train, batch_size, batch_per_rank, launch.rank, launch.world_size)
    check_batch(num_train, cfg.batch_size, launch.world_size)
    batch_per_rank = cfg.batch_size // launch.world_size
    ranks = count(launch.world_size, "rank")
    for flag, value in (
        ("--microbatch", cfg.microbatch),
        ("--largest-microbatch", cfg.largest_microbatch),
    ):
        if value and batch_per_rank % value:
            raise UserError(
                f"{flag} {value} does not divide the {batch_per_rank} images of a rank "
                f"(batch {cfg.batch_size} over {ranks}); use a divisor"
            )
    microbatch = choose_microbatch(cfg, batch_per_rank, comm, earlier, fits)
    if earlier not in (None, microbatch) and launch.is_main:
        log.warning("batch norm now uses groups of %d images, before %d", microbatch, earlier)
    return BatchPlan(num_train, cfg.batch_size, microbatch, launch.rank, launch.world_size)


def choose_microbatch(
    cfg: TrainConfig, batch_per_rank: int, comm: Comm, earlier: int | None, fits: Fits | None
) -> int:
    """What the flag says, what the run had before, or the largest that fits on every rank."""
    if cfg.microbatch is not None:
        return cfg.microbatch
    if earlier is not None and batch_per_rank % earlier == 0:
        if fits is not None and not all(comm.gather(fits(earlier))):
            raise refuse_for_memory(
                f"this run normalises over groups of {earlier} images, which do not fit into the "
                f"memory of this GPU; use a larger one, or --microbatch {largest_divisor(earlier)},"
                " which changes the groups",
                os.environ,
            )
        return earlier
    largest = cfg.largest_microbatch or batch_per_rank
    if fits is None:
        return largest
    least = int(min(comm.gather(next(filter(fits, divisors(largest)), 0))))
    if least == 0:
        raise refuse_for_memory(
            f"not even one image of {cfg.image_size} pixels fits into the memory of the GPU with "
            f"{cfg.arch}; use a smaller --arch or --image-size, or a larger GPU",
            os.environ,
        )
    if least < largest:
        text = "microbatches of %d: %d images at once do not fit into the memory of every GPU"
        log.info(text, least, largest)
    return least


def divisors(number: int) -> Iterator[int]:
    """The divisors of a number, the largest first."""
    return (n for n in range(number, 0, -1) if number % n == 0)


def largest_divisor(number: int) -> int:
    """The largest divisor below the number itself, or 1."""
    return next((n for n in divisors(number) if n < number), 1)


def refuse_for_memory(message: str, env: Mapping[str, str]) -> CommandError:
    """The error for a GPU that is too small; in an HTCondor job the next one may be larger."""
    if "_CONDOR_JOB_AD" in env:
        return PassingError(f"{message}; the job is tried again elsewhere")
    return UserError(message)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that the memory of the GPU is used up."""
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _NO_MEMORY)


def make_trial(
    cfg: TrainConfig, placement: Placement, recipe: Recipe, num_classes: int, comm: Comm
) -> Fits | None:
    """A function that tries whether a microbatch fits on this rank; None if none is needed."""
    if placement.device.type != "cuda" or cfg.evaluate or cfg.microbatch is not None:
        return None
    comm.sum(torch.zeros(1, device=placement.device))  # NCCL takes its buffers with the first one
    return partial(_fits, cfg, placement, recipe, num_classes)


def _fits(
    cfg: TrainConfig, placement: Placement, recipe: Recipe, num_classes: int, microbatch: int
) -> bool:
    """Whether one step of a temporary network runs without an out-of-memory error."""
    device = placement.device
    with torch.random.fork_rng(devices=[device.index]):
        survived = _survives(cfg, placement, recipe, num_classes, microbatch)
    free_memory(device)
    return survived


def free_memory(device: torch.device) -> None:
    """Frees unused GPU memory and resets the peak statistics."""
    gc.collect()  # an error keeps what its frames held
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)


def _survives(
    cfg: TrainConfig, placement: Placement, recipe: Recipe, num_classes: int, microbatch: int
) -> bool:
    try:
        model = build_model(cfg.arch, num_classes, False, None)
        if cfg.freeze:  # no gradients, no momentum and few activations
            freeze_backbone(model)
        trainer = Trainer(
            model,
            replace(placement),  # it keeps tensors
            recipe,
            BatchPlan(microbatch, microbatch, microbatch, 0, 1),
            Comm(Launch("single", "a trial")),
            seed=cfg.seed,
            schedule_steps=1,
            ema_decay=cfg.ema,
            use_compile=False,  # which needs no more memory, and minutes
        )
        pixels = torch.zeros(
            microbatch,
            cfg.image_size,
            cfg.image_size,
            3,
            dtype=torch.uint8,
            device=placement.device,
        )
        labels = torch.zeros(microbatch, dtype=torch.int64, device=placement.device)
        # The momentum, which the first step makes at its end, and the second set of gradients that
        # DDP holds while it sorts them into other buckets.
        weights = sum(p.numel() * p.element_size() for p in trainer.model.parameters())
        reserved = 2 * weights + BATCHES_AHEAD * pixels.numel() + SPARE_BYTES
        ballast = torch.empty(reserved, dtype=torch.uint8, device=placement.device)
        trainer.run_once(Batch(pixels.permute(0, 3, 1, 2), labels, [], ""))
        torch.cuda.synchronize(placement.device)  # a kernel's error comes here
        return len(ballast) > 0
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return False
