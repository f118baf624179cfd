"""Batch-norm statistics move once a step by the mean over its microbatches, on any ranks."""

from __future__ import annotations

import copy
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.train import started_ranks as ranks
from train.network.batch_norm import StepStatistics
from train.ranks.comm import Comm
from train.ranks.interrupt import Vote
from train.ranks.launch import detect_launch

NUM_PARTS, NUM_STEPS, MOMENTUM = 4, 3, 0.1


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 5, 3),
        nn.BatchNorm2d(5, momentum=MOMENTUM),
        nn.Conv2d(5, 4, 3),
        nn.BatchNorm2d(4, momentum=MOMENTUM, affine=False),
        nn.BatchNorm2d(4, track_running_stats=False),
    )
    return model.double()


def microbatch(step: int, part: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + part)
    scale = 1 + part  # the groups differ, so that taking one for all is seen
    return scale * torch.randn(6, 3, 8, 8, generator=generator, dtype=torch.float64) + part


def run_microbatch(
    model: nn.Module, statistics: StepStatistics, step: int, part: int, is_last: bool
) -> None:
    """Forward and backward, as a training does it: backward refuses buffers that were touched."""
    loss = model(microbatch(step, part)).square().sum()
    statistics.after_forward(is_last)
    loss.backward()
    statistics.after_backward(is_last)


def run_steps(rank: int, world: int) -> dict[str, torch.Tensor]:
    """The state after some steps of this rank's microbatches."""
    model = make_model()
    mine = range(rank * NUM_PARTS // world, (rank + 1) * NUM_PARTS // world)
    statistics = StepStatistics(model, len(mine), world)
    for step in range(NUM_STEPS):
        statistics.begin()
        for part in mine:
            run_microbatch(model, statistics, step, part, is_last=part == mine[-1])
        statistics.finish()
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def by_hand() -> dict[str, torch.Tensor]:
    """running = 0.9 running + 0.1 x the mean of the groups' statistics, once a step."""
    model = make_model()
    norms = {"1": model[1], "3": model[3]}
    state = {}
    for name, norm in norms.items():
        assert isinstance(norm, nn.BatchNorm2d)
        state[f"{name}.running_mean"] = torch.zeros(norm.num_features, dtype=torch.float64)
        state[f"{name}.running_var"] = torch.ones(norm.num_features, dtype=torch.float64)
    seen: dict[str, list[torch.Tensor]] = {}
    for name, norm in norms.items():
        norm.register_forward_pre_hook(
            lambda _m, args, n=name: seen.setdefault(n, []).append(*args)
        )
    for step in range(NUM_STEPS):
        seen.clear()
        for part in range(NUM_PARTS):
            model(microbatch(step, part))
        for name in norms:
            groups = [group.transpose(0, 1).flatten(1) for group in seen[name]]
            means = torch.stack([group.mean(1) for group in groups]).mean(0)
            variances = torch.stack([group.var(1) for group in groups]).mean(0)
            for key, new in (("running_mean", means), ("running_var", variances)):
                old = state[f"{name}.{key}"]
                state[f"{name}.{key}"] = (1 - MOMENTUM) * old + MOMENTUM * new
    return state


def save_steps(folder: Path) -> None:
    launch = detect_launch(os.environ)
    comm = Comm(launch)
    comm.join(torch.device("cpu"), 60)
    torch.save(run_steps(launch.rank, launch.world_size), folder / f"{launch.rank}.pt")
    if launch.world_size == NUM_PARTS:
        vote_in_steps(launch.rank, launch.world_size)
    comm.close()


def vote_in_steps(rank: int, world: int) -> None:
    """Each vote, cast by one rank after the other, is heard by all; then it is forgotten."""
    model = make_model()
    statistics = StepStatistics(model, 1, world)
    assert statistics.carries_votes
    for voter, vote in enumerate([*Vote, Vote.SAVE, Vote.GO_ON]):
        mine = vote if voter % world == rank else Vote.GO_ON
        read = statistics.cast(mine)
        statistics.begin()
        run_microbatch(model, statistics, 0, rank, is_last=True)
        statistics.finish()
        assert read() is vote
    model(microbatch(0, 0).fill_(torch.nan))  # no number in the statistics is taken for a vote
    read = statistics.cast(Vote.EXIT if rank == 1 else Vote.REQUEUE)
    run_microbatch(model, statistics, 0, rank, is_last=True)
    statistics.finish()
    assert read() is Vote.EXIT


@pytest.mark.parametrize("world", [1, 2, 4])
def test_statistics_are_those_of_the_formula_on_every_rank(world: int, tmp_path: Path) -> None:
    ranks.call(partial(save_steps, tmp_path), tmp_path / "log", world).expect(0)
    expected = by_hand()
    states = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(world)]
    for name, value in expected.items():
        assert torch.allclose(states[0][name], value, rtol=1e-12, atol=0), name
    for state in states:
        assert all(torch.equal(state[name], states[0][name]) for name in state)
        assert int(state["1.num_batches_tracked"]) == NUM_STEPS


def test_what_plain_ddp_and_accumulation_do_is_far_from_it() -> None:
    """The test above can fail: rank 0's buffers alone, or an update a microbatch, are seen."""
    expected = by_hand()["1.running_var"]
    plain = make_model()
    for step in range(NUM_STEPS):
        plain(microbatch(step, 0))
    assert (plain[1].get_buffer("running_var") - expected).abs().max() > 0.1
    accumulated = make_model()
    for step in range(NUM_STEPS):
        for part in range(NUM_PARTS):
            accumulated(microbatch(step, part))
    assert (accumulated[1].get_buffer("running_var") - expected).abs().max() > 0.1


def test_one_microbatch_on_one_rank_is_plain_batch_norm() -> None:
    ours, plain = make_model(), make_model()
    statistics = StepStatistics(ours, 1, 1)
    for step in range(NUM_STEPS):
        statistics.begin()
        run_microbatch(ours, statistics, step, 0, is_last=True)
        statistics.finish()
        plain(microbatch(step, 0))
    pairs = zip(ours.state_dict().values(), plain.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("done", range(NUM_PARTS))
def test_an_abandoned_step_leaves_no_trace(done: int) -> None:
    model = make_model()
    statistics = StepStatistics(model, NUM_PARTS, 1)
    for step in range(2):
        statistics.begin()
        for part in range(NUM_PARTS):
            run_microbatch(model, statistics, step, part, is_last=part == NUM_PARTS - 1)
        statistics.finish()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    statistics.begin()
    for part in range(done):
        run_microbatch(model, statistics, 9, part, is_last=False)
    statistics.abandon()
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down the operators that are dispatched: on a GPU each is a launch or more."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.names.append(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (1, ["_foreach_add_"]),  # the counters
        (3, ["_foreach_copy_"] * 4 + ["_foreach_add_"] * 2 + ["_foreach_div_", "_foreach_copy_"]
            + ["_foreach_add_"]),
    ],
)  # fmt: skip
def test_the_statistics_of_a_step_cost_few_launches_however_many_layers(
    parts: int, expected: list[str]
) -> None:
    model = make_model()
    statistics = StepStatistics(model, parts, 1)
    with Operators() as operators:
        statistics.begin()
        for part in range(parts):
            statistics.after_forward(part == parts - 1)
            statistics.after_backward(part == parts - 1)
        statistics.finish()
    assert sorted(operators.names) == sorted(expected)
    with Operators() as operators:
        model(microbatch(0, 0))
    assert "add_" not in operators.names  # no layer counts its batches


def test_the_counter_of_a_layer_is_saved_and_loaded() -> None:
    model, other = make_model(), make_model()
    statistics, _ = StepStatistics(model, 1, 1), StepStatistics(other, 1, 1)
    for _ in range(NUM_STEPS):
        statistics.begin()
        run_microbatch(model, statistics, 0, 0, is_last=True)
        statistics.finish()
    other.load_state_dict(model.state_dict())
    assert [int(m.state_dict()["1.num_batches_tracked"]) for m in (model, other)] == [NUM_STEPS] * 2


@pytest.mark.parametrize("world", [1, 2])
def test_a_model_without_batch_norm_is_left_alone(world: int) -> None:
    """Not one operator is asked for, nor an exchange: there is no process group in this test."""
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 5, 3), nn.GroupNorm(1, 5), nn.BatchNorm2d(5, track_running_stats=False))
    model = nn.Sequential(*layers).double()
    before = copy.deepcopy(model.state_dict())
    statistics = StepStatistics(model, NUM_PARTS, world)
    assert not statistics.carries_votes
    with Operators() as asked:
        statistics.begin()
        for part in range(NUM_PARTS):
            statistics.after_forward(part == NUM_PARTS - 1)
            statistics.after_backward(part == NUM_PARTS - 1)
        statistics.finish()
        statistics.abandon()
    assert asked.names == []
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
