"""What a GPU does with the trainer: speed by number format and batch, the loader, the link."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from train.data.batches import Batch, Images, Item
from train.data.decode import choose_decoder
from train.data.loader import load_batches
from train.data.sampler import BatchPlan
from train.data.splits import open_dataset
from train.device import (
    choose_threads,
    identify_gpu,
    name_device,
    prefers_channels_last,
    set_up_math,
)
from train.microbatch import free_memory, is_out_of_memory
from train.network.model import build_model
from train.ranks.comm import Comm
from train.ranks.launch import Launch
from train.recipe import resolve_recipe
from train.step import Placement, Trainer

NUM_CLASSES = 1000
JOIN_S = 600.0  # ranks wait so long for each other
FORMATS = ("bf16", "fp16")
WARM_UP_STEPS = 3
GRADIENT_BYTES = 102_228_128  # of ResNet-50 in fp32: what the ranks exchange in a step
LOADER_BATCHES = 12
Say = Callable[[str], None]


@dataclass(frozen=True)
class Trial:
    """A way to train, and what came out; `problem` says why nothing did."""

    precision: str
    batch: int
    is_compiled: bool
    images_per_s: float = 0.0
    peak_gb: float = 0.0
    problem: str = ""

    @property
    def flags(self) -> str:
        return f"--precision {self.precision}" + (" --compile" if self.is_compiled else "")

    def describe(self) -> str:
        head = f"{self.precision:<9}  {self.batch:>5}  {'yes' if self.is_compiled else 'no':<7}"
        if self.problem:
            return f"{head}  {self.problem}"
        return f"{head}  {self.images_per_s:>8.0f}  {self.peak_gb:>6.1f}"


HEADER = "precision  batch  compile  images/s      GB"


@dataclass(frozen=True)
class Network:
    """What is trained in the trials."""

    arch: str
    image_size: int
    num_steps: int
    device: torch.device


def measure_all(
    network: Network, batches: Sequence[int], data: Path | None, launch: Launch, say: Say
) -> bool:
    """Measures and says everything; whether anything could be trained. Every rank must call it."""
    world_size = launch.world_size
    comm = Comm(launch)
    comm.join(network.device, JOIN_S, identify_gpu(network.device))
    ranks = f", {world_size} ranks at once" if world_size > 1 else ""
    say(f"{network.arch} at {network.image_size} px on {name_device(network.device)}{ranks}")
    best = find_best(try_all(network, batches, say))
    loader_per_s = link_ms = 0.0
    if data is not None:
        _, num_workers = choose_threads(None, None, network.device, launch)
        loader_per_s = measure_loader(data, max(batches), network.image_size, num_workers)
        say(f"loader alone: {loader_per_s:.0f} images/s with {num_workers} workers")
    else:
        say("loader alone: not measured; give DATA")
    if world_size > 1:
        link_ms, gb_per_s = measure_link(network.device, world_size, network.num_steps)
        say(f"link: {link_ms:.1f} ms for ResNet-50's gradient, {gb_per_s:.1f} GB/s a rank")
    else:
        say("link: not measured; start two ranks (srun --ntasks=2, torchrun --nproc-per-node 2)")
    for line in advise(best, world_size, loader_per_s, link_ms):
        say(line)
    comm.close()
    return best is not None


def try_all(network: Network, batches: Sequence[int], say: Say) -> list[Trial]:
    """Every format with every batch; then --compile with the faster format."""
    say(HEADER)
    trials: list[Trial] = []

    def run(precision: str, is_compiled: bool) -> None:
        for batch in batches:
            trials.append(_try_one(network, precision, batch, is_compiled))
            say(trials[-1].describe())

    for precision in FORMATS:
        run(precision, is_compiled=False)
    best = find_best(trials)
    if best is not None:
        run(best.precision, is_compiled=True)
    return trials


def find_best(trials: Sequence[Trial]) -> Trial | None:
    """The fastest; among those within 2 % of it the largest batch, which needs the fewest steps."""
    done = [trial for trial in trials if not trial.problem]
    fastest = max((trial.images_per_s for trial in done), default=0.0)
    near = [trial for trial in done if trial.images_per_s >= 0.98 * fastest]
    return max(near, key=lambda trial: (trial.batch, not trial.is_compiled), default=None)


def _try_one(network: Network, precision: str, batch: int, is_compiled: bool) -> Trial:
    """One way to train, measured or with the reason why it cannot be."""
    trial = partial(Trial, precision, batch, is_compiled)
    try:
        return trial(*_measure_steps(network, precision, batch, is_compiled))
    except Exception as error:  # whatever a compiler, a driver or a small GPU says is the result
        if is_out_of_memory(error):
            return trial(problem="does not fit into the memory")
        reason = (str(error) or type(error).__name__).strip().splitlines()[0][:120]
        return trial(problem=f"cannot run here: {reason}")
    finally:
        torch._dynamo.reset()
        free_memory(network.device)


def _measure_steps(
    network: Network, precision: str, batch: int, is_compiled: bool
) -> tuple[float, float]:
    """(images a second, peak of reserved memory in GB) of whole steps on one batch."""
    device, size = network.device, network.image_size
    set_up_math(precision, device)
    channels_last = prefers_channels_last(device, precision, size)
    trainer = Trainer(
        build_model(network.arch, NUM_CLASSES, False, None),
        Placement(device, precision, channels_last),
        resolve_recipe("sgd", batch, 90, {}),
        BatchPlan(batch, batch, batch, 0, 1),
        Comm(Launch("single", "a trial")),
        seed=0,
        schedule_steps=1,
        ema_decay=0.0,
        use_compile=is_compiled,
    )
    pixels = torch.zeros(batch, size, size, 3, dtype=torch.uint8, device=device)
    labels = torch.zeros(batch, dtype=torch.int64, device=device)
    images = Batch(pixels.permute(0, 3, 1, 2), labels, [], "")
    counters.clear()
    for _ in range(WARM_UP_STEPS):
        trainer.run_once(images)
    if is_compiled and not counters["frames"].get("ok"):
        raise RuntimeError("torch.compile left the network as it is")
    torch.cuda.synchronize(device)
    begin_s = time.monotonic()
    for _ in range(network.num_steps):
        trainer.run_once(images)
    torch.cuda.synchronize(device)
    seconds = time.monotonic() - begin_s
    peak = torch.cuda.max_memory_reserved(device)
    return network.num_steps * batch / seconds, peak / 1e9


def measure_loader(data: Path, batch: int, image_size: int, num_workers: int) -> float:
    """Images a second that the loader makes of the training set, without a GPU's help."""
    dataset = open_dataset(data, None)
    batch = min(batch, len(dataset.train))
    plan = BatchPlan(len(dataset.train), batch, batch, 0, 1)
    images = Images(dataset.train, None, plan, image_size, 0, choose_decoder("auto"))
    per_epoch = plan.steps_per_epoch
    items = [Item(n // per_epoch, n % per_epoch, 0) for n in range(LOADER_BATCHES + 2)]
    loaded: Iterator[Batch] = load_batches(images, items, num_workers)
    next(loaded)  # threads and caches are warm
    begin_s = time.monotonic()
    num_images = sum(len(made.labels) for made in islice(loaded, LOADER_BATCHES))
    return num_images / (time.monotonic() - begin_s)


def measure_link(device: torch.device, num_ranks: int, num_rounds: int) -> tuple[float, float]:
    """(milliseconds, GB/s a rank) of an all-reduce of ResNet-50's gradient over the ranks.

    The second is NCCL's bus bandwidth, which does not depend on the number of ranks.
    """
    gradient = torch.zeros(GRADIENT_BYTES // 4, device=device)
    for _ in range(WARM_UP_STEPS):
        dist.all_reduce(gradient)
    torch.cuda.synchronize(device)
    begin_s = time.monotonic()
    for _ in range(num_rounds):
        dist.all_reduce(gradient)
    torch.cuda.synchronize(device)
    seconds = (time.monotonic() - begin_s) / num_rounds
    return 1e3 * seconds, 2 * (num_ranks - 1) / num_ranks * GRADIENT_BYTES / seconds / 1e9


def advise(best: Trial | None, num_ranks: int, loader_per_s: float, link_ms: float) -> list[str]:
    """The flags to train with, and what will hold the GPU up."""
    if best is None:
        return ["nothing ran: the lines above say why"]
    lines = [f"use: {best.flags} -b {best.batch * num_ranks}"]
    step_ms = 1e3 * best.batch / best.images_per_s
    if 0 < loader_per_s < best.images_per_s:
        lines.append(
            f"the loader gives {loader_per_s:.0f} images/s, the GPU takes {best.images_per_s:.0f}: "
            "ask for more CPUs a task, or the GPU waits"
        )
    if link_ms > step_ms / 2:
        lines.append(
            f"an exchange of {link_ms:.0f} ms is long for a step of {step_ms:.0f} ms: look at "
            "NCCL_DEBUG=INFO, or use a larger batch a GPU"
        )
    return lines
