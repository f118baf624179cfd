"""The last layer of a network and its backbone, which fine-tuning treats differently."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def find_head(model: nn.Module) -> tuple[str, nn.Linear | nn.Conv2d]:
    """The name and the layer that gives the classes: the last linear one.

    SqueezeNet has none and ends in a convolution.
    """
    for kind in (nn.Linear, nn.Conv2d):
        found = [(name, m) for name, m in model.named_modules() if isinstance(m, kind)]
        if found:
            return found[-1]
    raise AssertionError("a classifier has a linear layer or a convolution")


def freeze_backbone(model: nn.Module) -> None:
    """Leaves only the last layer to be trained."""
    _, head = find_head(model)
    model.requires_grad_(False)
    head.requires_grad_(True)


def keeps_statistics(layer: _BatchNorm) -> bool:
    """Whether a batch norm is frozen: its running statistics then belong to its weights.

    A frozen one normalises by them in training too, as in an evaluation. Otherwise the features
    would depend on the batch, and the statistics of the new images would replace the old ones.
    """
    return layer.weight is not None and not layer.weight.requires_grad


def find_frozen_norms(model: nn.Module) -> list[_BatchNorm]:
    """The batch-norm layers that stay as they are."""
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    return [norm for norm in norms if keeps_statistics(norm)]


def scale_backbone(
    groups: list[dict[str, Any]], model: nn.Module, scale: float
) -> list[dict[str, Any]]:
    """The optimiser's groups, each cut in two: the backbone gets `scale` times the rate."""
    own = {id(param) for param in find_head(model)[1].parameters()}
    cut = []
    for group in groups:
        for is_head in (False, True):
            params = [param for param in group["params"] if (id(param) in own) == is_head]
            cut.append(group | {"params": params, "lr_scale": 1.0 if is_head else scale})
    return [group for group in cut if group["params"]]
