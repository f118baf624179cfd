"""What changes the weights: LARS, the optimiser of a recipe, and the moving average (EMA)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from dataset.errors import UserError
from train.network.fine_tune import scale_backbone
from train.recipe import Recipe

EMA_BATCH = 256  # --ema DECAY is the decay of one step of this many images


class Lars(torch.optim.Optimizer):
    """LARS with the rate and the trust ratio outside the momentum buffer.

    For a group with lars=True, at each step:
        ratio = eta * |w| / (|g| + decay * |w| + eps), or 1 where |w| or |g| is 0
        v     = momentum * v + g + decay * w
        w     = w - lr * ratio * v
    A group with lars=False has ratio 1. Torch has no LARS, and the literature has several: with
    the rate, or the rate and the ratio, inside v. This is the form that the published rates of
    train/recipe.py belong to (docs/recipes.md).
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        eta: float = 0.001,
        eps: float = 0.0,
    ) -> None:
        if lr < 0 or not 0 <= momentum < 1 or weight_decay < 0 or eta <= 0 or eps < 0:
            raise ValueError(f"bad LARS setting: {lr=} {momentum=} {weight_decay=} {eta=} {eps=}")
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "eta": eta,
            "eps": eps,
            "lars": True,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """The closure's loss, after one update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                self._update(group, params)
        return loss

    def _update(self, group: dict[str, Any], params: list[Tensor]) -> None:
        grads = [p.grad for p in params if p.grad is not None]
        decay = group["weight_decay"]
        ratios = _trust_ratios(params, grads, group) if group["lars"] else None
        buffers = [self._buffer(p) for p in params]
        torch._foreach_mul_(buffers, group["momentum"])
        torch._foreach_add_(buffers, grads)
        if decay != 0:
            torch._foreach_add_(buffers, params, alpha=decay)
        if ratios is None:
            torch._foreach_add_(params, buffers, alpha=-group["lr"])
        else:  # the ratios broadcast over their tensors: no temporary of the size of the model
            torch._foreach_addcmul_(params, buffers, ratios, -group["lr"])

    def _buffer(self, param: Tensor) -> Tensor:
        """The momentum of a parameter; it starts at 0, so the first v is the decayed gradient."""
        state = self.state[param]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(param)
        buffer: Tensor = state["momentum_buffer"]
        return buffer


def _trust_ratios(
    params: list[Tensor], grads: list[Tensor], group: dict[str, Any]
) -> tuple[Tensor, ...]:
    """One 0-dimensional tensor for each parameter, computed on the device without a sync."""
    weight = torch.stack(torch._foreach_norm(params))
    grad = torch.stack(torch._foreach_norm(grads))
    ratio = group["eta"] * weight / (grad + group["weight_decay"] * weight + group["eps"])
    ratio = torch.where((weight > 0) & (grad > 0), ratio, torch.ones_like(ratio))
    return tuple(ratio.unbind())


def make_optimizer(
    model: nn.Module, recipe: Recipe, backbone_lr_scale: float = 1.0
) -> torch.optim.Optimizer:
    """The recipe's optimiser over the model's parameters, which must be on their device already."""
    groups = _make_groups(model, recipe)
    if backbone_lr_scale != 1.0:
        groups = scale_backbone(groups, model, backbone_lr_scale)
    if recipe.optimizer == "lars":
        return Lars(
            groups,
            lr=recipe.lr,
            momentum=recipe.momentum,
            weight_decay=recipe.weight_decay,
            eta=recipe.lars_eta,
            eps=recipe.lars_eps,
        )
    assert recipe.optimizer == "sgd", recipe.optimizer
    optimizer = torch.optim.SGD(
        groups,
        lr=recipe.lr,
        momentum=recipe.momentum,
        weight_decay=recipe.weight_decay,
        **_fastest_sgd(groups[0]["params"]),
    )
    if recipe.momentum:
        _start_momentum(optimizer)
    return optimizer


def _make_groups(model: nn.Module, recipe: Recipe) -> list[dict[str, Any]]:
    """Two groups, with weight decay and without (batch norm, biases), or one for all."""
    params = [p for p in model.parameters() if p.requires_grad]
    if not params:
        raise UserError("the model has no parameter that can be trained")
    if recipe.decay_norm_and_bias:
        return [{"params": params}]
    decayed = [p for p in params if p.ndim > 1]
    others = [p for p in params if p.ndim <= 1]  # gamma, beta and biases are the vectors
    plain: dict[str, Any] = {"params": others, "weight_decay": 0.0}
    if recipe.optimizer == "lars":
        plain["lars"] = False
    return [group for group in ({"params": decayed}, plain) if group["params"]]


def _start_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Gives every parameter a momentum of 0, which does not change the first step.

    The fused SGD of torch 2.15 allocates its buffers without filling them. If the first step
    overflows they stay so, and the second step would add whatever the memory held.
    """
    for group in optimizer.param_groups:
        for param in group["params"]:
            optimizer.state[param]["momentum_buffer"] = torch.zeros_like(param)


def _fastest_sgd(params: list[Tensor]) -> dict[str, Any]:
    """fused where this torch has it for the device (CUDA from 2.3, CPU from 2.4), else foreach."""
    has_fused = "fused" in inspect.signature(torch.optim.SGD).parameters
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    on_cuda = params[0].is_cuda
    if has_fused and (on_cuda or version >= (2, 4)):
        return {"fused": True}
    return {"foreach": True}


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Gives every group the rate of the next step, scaled for a backbone that is fine-tuned."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)


@torch.no_grad()
def match_layout(optimizer: torch.optim.Optimizer) -> None:
    """Gives the loaded buffers the memory layout of their parameters.

    A fused update ignores strides: the momentum in a GPU's checkpoint (channels_last) would
    otherwise be added to the wrong weights of a model on a CPU.
    """
    for param, state in optimizer.state.items():
        for name, value in state.items():
            if torch.is_tensor(value) and value.shape == param.shape:
                state[name] = torch.empty_like(param).copy_(value)
            elif value is not None:
                raise UserError(f"{name} of the checkpoint does not fit a weight of {param.shape}")


def zero_init_last_gamma(model: nn.Module) -> int:
    """The number of residual blocks whose last batch norm now starts at 0; 0 without any."""
    count = 0
    for module in model.modules():
        last = getattr(module, "bn3", None) or getattr(module, "bn2", None)
        if hasattr(module, "downsample") and isinstance(last, nn.BatchNorm2d):
            nn.init.zeros_(last.weight)
            count += 1
    return count


class Ema:
    """A moving average of a model's parameters; batch-norm statistics stay the model's own.

    The decay is given for steps of EMA_BATCH images and raised to batch_size / EMA_BATCH, so that
    the average spans the same number of images at every batch. It is never above
    (1 + step) / (10 + step), so that the random first weights are soon forgotten.
    """

    def __init__(self, model: nn.Module, decay: float, batch_size: int) -> None:
        if not 0 < decay < 1:
            raise UserError(f"--ema {decay:g} is not a decay; give a value in (0, 1), e.g. 0.9999")
        self.decay = decay ** (batch_size / EMA_BATCH)
        self.names = [name for name, _ in model.named_parameters()]
        self.averages = [p.detach().clone() for p in model.parameters()]

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        """Moves the average towards the weights after optimiser step `step` (from 0)."""
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(self.averages, list(model.parameters()), 1 - decay)

    def state_dict(self) -> dict[str, Tensor]:
        """The averages by parameter name."""
        return dict(zip(self.names, self.averages, strict=True))

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Loads the averages of a checkpoint; raises for those of another model."""
        if set(state) != set(self.names):
            odd = sorted(set(state) ^ set(self.names))[0]
            raise UserError(f"the averages in the checkpoint are of another model: {odd} differs")
        for name, own in self.state_dict().items():
            if not torch.is_tensor(state[name]) or state[name].shape != own.shape:
                raise UserError(
                    f"the averages in the checkpoint are of another model: {name} differs"
                )
        _copy(self.averages, [state[name] for name in self.names])


@torch.no_grad()
def _copy(targets: Iterable[Tensor], sources: Iterable[Tensor]) -> None:
    """In place, so that the optimiser, DDP and a compiled graph keep their tensors."""
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)
