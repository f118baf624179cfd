"""LARS against hand-computed and NumPy trajectories, the optimiser of a recipe, the EMA."""

from __future__ import annotations

import copy
import io
from dataclasses import replace

import numpy as np
import pytest
import torch
import torchvision
from torch import nn

from dataset.errors import UserError
from train.network.model import has_last_gamma
from train.optim import (
    EMA_BATCH,
    Ema,
    Lars,
    make_optimizer,
    match_layout,
    set_lr,
    zero_init_last_gamma,
)
from train.recipe import Recipe, lr_at, resolve_recipe


def small_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5)
    )


def give_gradients(model: nn.Module, seed: int) -> None:
    torch.manual_seed(seed)
    loss = nn.functional.cross_entropy(model(torch.randn(6, 3, 8, 8)), torch.arange(6) % 5)
    model.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]


def test_lars_follows_a_hand_computed_path_through_warm_up_and_decay() -> None:
    """A weight w and a bias b; every number below is exact in binary, so the match is exact."""
    base = resolve_recipe("lars", 4096, 90, {"lr": 0.5, "momentum": 0.5, "wd": 0.5})
    recipe = replace(base, warmup_epochs=0.5, lars_eta=0.5, lars_eps=0.0)
    assert [lr_at(recipe, step, 4, 4) for step in range(4)] == [0.25, 0.5, 0.5, 0.125]
    model = nn.Linear(1, 1)
    nn.init.constant_(model.weight, 4.0)
    nn.init.constant_(model.bias, 1.0)
    optimizer = make_optimizer(model, recipe)
    # w: gradient, ratio = 0.5 w / (g + 0.5 w), v = 0.5 v + g + 0.5 w, w - lr * ratio * v
    #    2         2 / (2 + 2) = 0.5             4                     4 - 0.25 * 0.5 * 4
    #    5.25      1.75 / (5.25 + 1.75) = 0.25   2 + 7                 3.5 - 0.5 * 0.25 * 9
    #    3.5625    1.1875 / 4.75 = 0.25          4.5 + 4.75            2.375 - 0.5 * 0.25 * 9.25
    #    0.609375  0.609375 / 1.21875 = 0.5      4.625 + 1.21875       1.21875 - 0.0625 * 5.84375
    # b: gradient 1, v = 1, 1.5, 1.75, 1.875 and b - lr * v, without ratio and decay
    gradients = (2.0, 5.25, 3.5625, 0.609375)
    expected = ((3.5, 0.75), (2.375, 0.0), (1.21875, -0.875), (0.853515625, -1.109375))
    for step, (gradient, values) in enumerate(zip(gradients, expected, strict=True)):
        model.weight.grad, model.bias.grad = torch.tensor([[gradient]]), torch.tensor([1.0])
        set_lr(optimizer, lr_at(recipe, step, 4, 4))
        optimizer.step()
        assert (model.weight.item(), model.bias.item()) == values


class NumpyLars:
    """The same rule written again, one array at a time, in double precision."""

    def __init__(self, arrays: list[np.ndarray], recipe: Recipe) -> None:
        self.arrays = [a.astype(np.float64) for a in arrays]
        self.speeds = [np.zeros_like(a) for a in self.arrays]
        self.recipe = recipe

    def step(self, grads: list[np.ndarray], lr: float) -> None:
        for i, (w, g) in enumerate(zip(self.arrays, grads, strict=True)):
            is_vector = w.ndim == 1
            decay = 0.0 if is_vector else self.recipe.weight_decay
            size, slope = np.sqrt((w * w).sum()), np.sqrt((g * g).sum())
            ratio = 1.0
            if not is_vector and size > 0 and slope > 0:
                ratio = self.recipe.lars_eta * size / (slope + decay * size + self.recipe.lars_eps)
            self.speeds[i] = self.recipe.momentum * self.speeds[i] + (g + decay * w)
            self.arrays[i] = w - lr * ratio * self.speeds[i]


def test_lars_matches_an_independent_numpy_version_on_random_tensors() -> None:
    model = small_model().double()
    recipe = resolve_recipe("lars", 8192, 3, {"warmup_epochs": 1.0, "wd": 0.01})
    optimizer = make_optimizer(model, recipe)
    peer = NumpyLars([p.detach().numpy().copy() for p in model.parameters()], recipe)
    rng = np.random.default_rng(0)
    for step in range(30):
        lr = lr_at(recipe, step, 10, 30)
        grads = [rng.normal(size=tuple(p.shape)) * 10.0 ** rng.integers(-4, 2) for p in peer.arrays]
        for p, g in zip(model.parameters(), grads, strict=True):
            p.grad = torch.from_numpy(g)
        set_lr(optimizer, lr)
        optimizer.step()
        peer.step(grads, lr)
        for p, array in zip(model.parameters(), peer.arrays, strict=True):
            np.testing.assert_allclose(p.detach().numpy(), array, rtol=1e-10, atol=1e-12)


def test_lars_update_is_the_same_for_any_scale_of_the_gradient() -> None:
    """The point of LARS: with no decay and momentum, |dw| = lr * eta * |w| whatever |g|."""
    for scale in (1e-6, 1.0, 1e6):
        w = nn.Parameter(torch.full((4, 4), 0.5, dtype=torch.float64))
        before = w.detach().clone()
        optimizer = Lars([w], lr=2.0, momentum=0.0, eta=0.01)
        w.grad = torch.randn(4, 4, dtype=torch.float64) * scale
        optimizer.step()
        assert (w - before).norm().item() == pytest.approx(2.0 * 0.01 * before.norm().item())


def test_lars_leaves_out_parameters_without_a_gradient_and_handles_zeros() -> None:
    moved, still, zero = (nn.Parameter(torch.ones(2, 2)) for _ in range(3))
    moved.grad, zero.grad = torch.ones(2, 2), torch.ones(2, 2)
    with torch.no_grad():
        zero.zero_()
    Lars([moved, still, zero], lr=0.1, eta=1.0).step()
    assert torch.equal(still, torch.ones(2, 2))
    assert torch.allclose(moved, torch.full((2, 2), 0.9))
    assert torch.allclose(zero, torch.full((2, 2), -0.1))  # ratio 1: the norm of w is 0


def test_lars_closure_returns_its_loss() -> None:
    w = nn.Parameter(torch.ones(2, 2))
    optimizer = Lars([w], lr=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (w * w).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    assert optimizer.step(closure).item() == 4.0
    assert w.sum() < 4


def test_bad_lars_settings_are_refused() -> None:
    for bad in ({"lr": -1.0}, {"lr": 1.0, "momentum": 1.0}, {"lr": 1.0, "eta": 0.0}):
        with pytest.raises(ValueError, match="bad LARS setting"):
            Lars([nn.Parameter(torch.ones(1))], **bad)


@pytest.mark.parametrize("name", ["reference", "sgd", "lars"])
def test_a_saved_optimizer_continues_bit_for_bit(name: str) -> None:
    recipe = resolve_recipe(name, 4096, 90, {"lr": 0.5})
    model = small_model()
    optimizer = make_optimizer(model, recipe)
    for step in range(3):
        give_gradients(model, step)
        optimizer.step()
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    twin = small_model(1)
    twin.load_state_dict(saved["model"])
    twin_optimizer = make_optimizer(twin, recipe)
    twin_optimizer.load_state_dict(saved["optimizer"])
    for step in range(3, 6):
        for m, o in ((model, optimizer), (twin, twin_optimizer)):
            give_gradients(m, step)
            o.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("name", ["reference", "lars"])
def test_momentum_in_another_memory_layout_is_added_to_the_right_weights(name: str) -> None:
    """A checkpoint of a GPU is channels_last; fused updates do not look at strides."""
    recipe = resolve_recipe(name, 4096, 90, {"lr": 0.5})
    first, second = small_model(), small_model().to(memory_format=torch.channels_last)
    optimizers = [make_optimizer(model, recipe) for model in (first, second)]
    give_gradients(second, 0)
    optimizers[1].step()
    saved = copy.deepcopy((second.state_dict(), optimizers[1].state_dict()))
    for model, optimizer in zip((first, second), optimizers, strict=True):
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(copy.deepcopy(saved[1]))
        match_layout(optimizer)
        give_gradients(model, 1)
        optimizer.step()
    layouts = [model[0].get_parameter("weight").stride() for model in (first, second)]
    assert layouts[0] != layouts[1]
    for p, q in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["sgd", "lars"])
def test_an_overflowed_step_under_grad_scaler_changes_nothing(name: str) -> None:
    model = small_model()
    optimizer = make_optimizer(model, resolve_recipe(name, 4096, 90, {"lr": 0.5}))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    plain = copy.deepcopy(model)
    plain_optimizer = make_optimizer(plain, resolve_recipe(name, 4096, 90, {"lr": 0.5}))
    for seed, has_overflow in ((0, False), (1, True), (2, False)):
        torch.manual_seed(seed)
        images, labels = torch.randn(6, 3, 8, 8), torch.arange(6) % 5
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        scaler.scale(nn.functional.cross_entropy(model(images), labels)).backward()  # type: ignore[no-untyped-call]
        if has_overflow:
            gradient = next(model.parameters()).grad
            assert gradient is not None
            gradient.fill_(torch.inf)
        scaler.step(optimizer)
        scaler.update()
        if has_overflow:
            assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
            continue
        plain_optimizer.zero_grad()
        nn.functional.cross_entropy(plain(images), labels).backward()  # type: ignore[no-untyped-call]
        plain_optimizer.step()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["sgd", "lars"])
def test_batch_norm_and_biases_are_left_out_of_decay(name: str) -> None:
    model = torchvision.models.resnet18(num_classes=7)
    optimizer = make_optimizer(model, resolve_recipe(name, 4096, 90, {}))
    decayed, others = optimizer.param_groups
    kinds = {id(p): n for n, p in model.named_parameters()}
    assert all("bn" not in kinds[id(p)] and "bias" not in kinds[id(p)] for p in decayed["params"])
    assert {kinds[id(p)] for p in others["params"]} >= {"bn1.weight", "bn1.bias", "fc.bias"}
    assert len(decayed["params"]) + len(others["params"]) == len(list(model.parameters()))
    assert (decayed["weight_decay"] > 0, others["weight_decay"]) == (True, 0)
    if name == "lars":
        assert (decayed["lars"], others["lars"]) == (True, False)


def test_reference_decays_everything_as_pytorch_examples_does() -> None:
    model = torchvision.models.resnet18(num_classes=7)
    recipe = resolve_recipe("reference", 256, 90, {})
    optimizer = make_optimizer(model, recipe)
    twin = copy.deepcopy(model)
    peer = torch.optim.SGD(twin.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    assert len(optimizer.param_groups) == 1
    for seed in range(3):
        rng = torch.Generator().manual_seed(seed)
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            p.grad = torch.randn(p.shape, generator=rng)
            q.grad = p.grad.clone()
        optimizer.step()
        peer.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_schedules_agree_with_torchs_own_where_torch_has_them() -> None:
    model = small_model()
    schedulers = torch.optim.lr_scheduler
    for name, make_peer in (
        ("reference", lambda o: schedulers.StepLR(o, step_size=30 * 7)),
        ("sgd", lambda o: schedulers.CosineAnnealingLR(o, T_max=90 * 7)),
        ("lars", lambda o: schedulers.PolynomialLR(o, total_iters=90 * 7, power=2.0)),
    ):
        recipe = resolve_recipe(name, 4096, 90, {"warmup_epochs": 0.0})
        optimizer = torch.optim.SGD(model.parameters(), lr=recipe.lr)
        peer = make_peer(optimizer)
        for step in range(90 * 7):
            expected = optimizer.param_groups[0]["lr"]
            assert lr_at(recipe, step, 7, 90 * 7) == pytest.approx(expected, abs=1e-6 * recipe.lr)
            optimizer.step()
            peer.step()


def test_frozen_parameters_get_no_optimizer_and_an_all_frozen_model_is_refused() -> None:
    model = small_model()
    model[0].requires_grad_(False)
    optimizer = make_optimizer(model, resolve_recipe("lars", 4096, 90, {}))
    assert sum(len(g["params"]) for g in optimizer.param_groups) == 4
    with pytest.raises(UserError, match="no parameter that can be trained"):
        make_optimizer(model.requires_grad_(False), resolve_recipe("sgd", 256, 90, {}))


@pytest.mark.parametrize(
    ("arch", "count"),
    [
        ("resnet18", 8),
        ("resnet50", 16),
        ("resnext50_32x4d", 16),
        ("wide_resnet50_2", 16),
        ("alexnet", 0),
        ("mobilenet_v2", 0),
        ("regnet_y_400mf", 0),
        ("shufflenet_v2_x0_5", 0),
    ],
)
def test_the_last_gamma_of_each_residual_block_starts_at_zero(arch: str, count: int) -> None:
    model = getattr(torchvision.models, arch)()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    assert zero_init_last_gamma(model) == count
    assert has_last_gamma(arch) == (count > 0)
    changed = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    last = "bn2" if arch == "resnet18" else "bn3"
    assert all(n.endswith(f"{last}.weight") and n.startswith("layer") for n in changed)
    assert len(changed) == count


def test_ema_spans_the_same_images_at_every_batch() -> None:
    model = small_model()
    small, large = Ema(model, 0.999, EMA_BATCH), Ema(model, 0.999, 16 * EMA_BATCH)
    assert small.decay**16 == pytest.approx(large.decay)
    assert small.decay == 0.999


def test_ema_follows_its_formula_with_a_short_start() -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 1.0)
    ema = Ema(model, 0.5, EMA_BATCH)
    expected = 1.0
    for step in range(20):
        nn.init.constant_(model.weight, float(step))
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * step
        ema.update(model, step)
        assert ema.averages[0].item() == pytest.approx(expected, rel=1e-6)


def test_ema_state_returns_through_a_checkpoint_and_anothers_is_refused() -> None:
    model = small_model()
    ema = Ema(model, 0.9, EMA_BATCH)
    ema.update(small_model(1), 3)
    twin = Ema(small_model(2), 0.9, EMA_BATCH)
    twin.load_state_dict(ema.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(ema.averages, twin.averages, strict=True))
    with pytest.raises(UserError, match="another model"):
        twin.load_state_dict({"odd": torch.ones(1)})


@pytest.mark.parametrize("decay", [0.0, 1.0, -0.5, 2.0])
def test_a_decay_that_is_none_is_refused(decay: float) -> None:
    with pytest.raises(UserError, match="--ema"):
        Ema(small_model(), decay, EMA_BATCH)


def test_an_unknown_optimizer_is_our_bug() -> None:
    with pytest.raises(AssertionError):
        make_optimizer(small_model(), replace(resolve_recipe("sgd", 256, 90, {}), optimizer="adam"))
