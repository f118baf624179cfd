"""64 and 128 ranks: plan, order, shares, steps, votes and records, all ranks in one process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]

from tests.train import thread_ranks
from train.data.batches import Batch, BatchOrder
from train.data.sampler import BatchPlan, epoch_order, share_validation, split_validation
from train.epoch import EpochMeter, Standing
from train.evaluate import evaluate, frozen
from train.ranks.comm import Comm
from train.ranks.interrupt import Interrupt, Vote
from train.ranks.launch import detect_launch
from train.recipe import resolve_recipe
from train.records.phases import PhaseClock, summarise_phases
from train.step import Placement, Trainer

pytestmark = pytest.mark.training

WORLDS = [64, 128]
NUM_TRAIN, NUM_VAL = 1_281_167, 50_000
CLASSES, PIXELS, STEPS = 5, 6, 3
CPU64 = Placement(torch.device("cpu"), "fp64")


def plans_of(world: int, num_samples: int, batch: int, microbatch: int) -> list[BatchPlan]:
    return [BatchPlan(num_samples, batch, microbatch, rank, world) for rank in range(world)]


# --- who does what ----------------------------------------------------------------------------


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(("per_rank", "microbatch"), [(256, 256), (256, 64), (1, 1)])
def test_the_ranks_of_an_epoch_see_the_whole_order_once(
    world: int, per_rank: int, microbatch: int
) -> None:
    order = epoch_order(0, 3, NUM_TRAIN)
    plans = plans_of(world, NUM_TRAIN, world * per_rank, microbatch)
    per_epoch = plans[0].steps_per_epoch
    for step in {0, 1, per_epoch - 1}:
        dealt = [plan.select(order, step, part) for plan in plans for part in plan.my_microbatches]
        expected = order[step * world * per_rank : (step + 1) * world * per_rank]
        assert np.array_equal(np.concatenate(dealt), expected)
    assert NUM_TRAIN - per_epoch * world * per_rank == plans[-1].num_dropped < world * per_rank
    assert len({len(plan.my_microbatches) for plan in plans}) == 1


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("num_images", [NUM_VAL, 1003, 127, 1])
def test_validation_images_are_counted_once_and_the_ranks_vote_equally_often(
    world: int, num_images: int
) -> None:
    plans = plans_of(world, NUM_TRAIN, world * 64, 64)
    dealt = [split_validation(num_images, 64, plan.rank, world) for plan in plans]
    seen = np.concatenate([part for parts in dealt for part in parts])
    assert np.array_equal(np.sort(seen), np.arange(num_images))
    shares = [share_validation(plan, num_images) for plan in plans]
    assert [share.num_batches for share in shares] == [len(parts) for parts in dealt]
    (num_common,) = {share.num_common for share in shares}
    assert num_common == min(map(len, dealt)) >= max(map(len, dealt)) - 1
    orders = [BatchOrder(p, s.num_batches, 0, 2) for p, s in zip(plans, shares, strict=True)]
    assert {sum(not item.is_val for item in order) for order in orders} == {2}


@pytest.mark.parametrize(("per_node", "is_cyclic"), [(8, False), (8, True), (4, False)])
def test_each_task_of_a_step_of_128_knows_its_place(per_node: int, is_cyclic: bool) -> None:
    num_nodes = 128 // per_node

    def task(rank: int) -> dict[str, str]:
        node, local = reversed(divmod(rank, num_nodes)) if is_cyclic else divmod(rank, per_node)
        numbers = {"PROCID": rank, "STEP_NUM_TASKS": 128, "LOCALID": local, "NODEID": node}
        step = {"STEP_ID": 0, "JOB_ID": 7, "STEP_NUM_NODES": num_nodes}
        lists = {
            "STEP_NODELIST": f"gpu[001-{num_nodes:03d}]",
            "STEP_TASKS_PER_NODE": f"{per_node}(x{num_nodes})",
        }
        return {f"SLURM_{name}": str(v) for name, v in (numbers | step | lists).items()}

    found = [detect_launch(task(rank)) for rank in range(128)]
    assert [launch.rank for launch in found] == list(range(128))
    assert len({(launch.node_rank, launch.local_rank) for launch in found}) == 128
    assert {launch.local_world_size for launch in found} == {per_node}
    assert {(launch.master_host, launch.ports, launch.token) for launch in found} == {
        ("gpu001", found[0].ports, found[0].token)
    }


# --- what they do together --------------------------------------------------------------------


def make_model() -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    linear = nn.Linear(4 * (PIXELS - 2) ** 2, CLASSES)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), linear)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1, generator=generator)
    return model


def make_trainer(plan: BatchPlan, comm: Comm) -> Trainer:
    recipe = resolve_recipe("sgd", plan.batch_size, 90, {"lr": 0.5, "warmup_epochs": 0.0})
    options: dict[str, Any] = {"seed": 0, "schedule_steps": 900, "use_compile": False}
    return Trainer(make_model(), CPU64, recipe, plan, comm, ema_decay=0.9, **options)


def make_batch(indices: np.ndarray) -> Batch:
    """Images that depend on the numbers of their samples alone."""
    pixels = torch.arange(3 * PIXELS**2).view(1, 3, PIXELS, PIXELS)
    numbers = torch.from_numpy(indices).view(-1, 1, 1, 1)
    images = ((numbers * 37 + pixels * 11) % 251).to(torch.uint8)
    return Batch(images, torch.from_numpy(indices) % CLASSES, [], "")


def make_batches(plan: BatchPlan) -> Iterator[Batch]:
    order = epoch_order(0, 0, plan.num_samples)
    for item in BatchOrder(plan, 0, 0, STEPS):
        yield make_batch(plan.select(order, item.step_in_epoch, item.part))


def train_and_validate(world: int, comm: Comm) -> dict[str, Any]:
    """Some steps on this rank, and what all of its exchanges gave."""
    plan = BatchPlan(4 * 2 * world, 2 * world, 2, comm.rank, comm.world_size)
    trainer, clock = make_trainer(plan, comm), PhaseClock(time.monotonic())
    watcher = Interrupt(comm, None)
    meter = EpochMeter(trainer, clock, comm, Standing())
    batches, votes = make_batches(plan), []
    for step in range(STEPS):
        if step == 1 and comm.rank == comm.world_size - 1:
            watcher.wanted = Vote.SAVE
        agree = partial(watcher.agree, stop_cost_s=0.0, cast=trainer.cast)
        votes.append(trainer.run_step(batches, clock, agree)[0])
        meter.count_step([], 0)
    meter.end()
    share = share_validation(plan, 10 * world + 3)
    parts = split_validation(share.num_images, 2, comm.rank, comm.world_size)
    over_gloo = partial(watcher.agree, stop_cost_s=0.0)
    validation = evaluate(
        [frozen(trainer.model)], map(make_batch, parts), share, CPU64, comm, over_gloo
    )
    watcher.settle()
    return {
        "votes": votes,
        "model": {name: value.clone() for name, value in trainer.model.state_dict().items()},
        "ema": trainer.ema.state_dict() if trainer.ema else {},
        "sums": meter.total(),
        "phases": summarise_phases(comm.gather(clock.totals(0.0))),
        "validation": validation,
    }


@pytest.fixture
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_one_thread")
@pytest.mark.parametrize("world", [32, pytest.param(128, marks=pytest.mark.soak)])
def test_many_ranks_train_vote_validate_and_count_as_one_does(world: int) -> None:
    (alone,) = thread_ranks.run(1, partial(train_and_validate, world))
    ranks = thread_ranks.run(world, partial(train_and_validate, world))
    first = ranks[0]
    for rank in ranks[1:]:
        torch.testing.assert_close(rank["model"], first["model"], rtol=0, atol=0)
        torch.testing.assert_close(rank["ema"], first["ema"], rtol=0, atol=0)
        for name in ("votes", "validation", "phases"):
            assert rank[name] == first[name], name
    torch.testing.assert_close(first["model"], alone["model"], rtol=1e-8, atol=1e-12)
    torch.testing.assert_close(first["ema"], alone["ema"], rtol=1e-8, atol=1e-12)
    assert first["votes"] == [Vote.GO_ON, Vote.GO_ON, Vote.SAVE]
    _, (accuracy,) = first["validation"]
    assert (accuracy.images, accuracy.skipped) == (10 * world + 3, 0)
    assert accuracy.correct1 == alone["validation"][1][0].correct1
    assert first["sums"].images == alone["sums"].images == STEPS * 2 * world
    assert first["sums"].correct == alone["sums"].correct
    assert first["sums"].loss == pytest.approx(alone["sums"].loss, rel=1e-8)


# --- what rank 0 is asked for -----------------------------------------------------------------


class CountingStore:
    """A client of the store that writes down how many keys each request is about."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.num_keys: list[int] = []

    def __getattr__(self, name: str) -> Any:
        def ask(keys: Any, *args: Any) -> Any:
            self.num_keys.append(len(keys) if isinstance(keys, list) else 1)
            return getattr(self._store, name)(keys, *args)

        return ask


def test_128_ranks_wait_for_each_other_with_requests_for_one_key() -> None:
    """Of one rank that asks for every other the store of rank 0 would get 16,384 keys a look."""
    world = 128
    server = HashStore()
    stores = [CountingStore(server) for _ in range(world)]
    comms = [thread_ranks.make_comm(rank, world, store=s) for rank, s in enumerate(stores)]
    threads = [threading.Thread(target=comm._wait_for_all, args=(60.0, "")) for comm in comms]
    for thread in threads[1:]:
        thread.start()
    assert not server.check(["all here"])  # the last one is still missing
    threads[0].start()
    for thread in threads:
        thread.join()
    assert all(set(store.num_keys) == {1} for store in stores)
    stores[5].num_keys.clear()
    assert len(comms[5]._read_beats()) == world
    assert stores[5].num_keys == [world]  # in one request
