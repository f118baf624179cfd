"""The network: any torchvision classifier with its last layer fitted, and weights in and out."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import nn

from dataset.errors import UserError

log = logging.getLogger("trainyard")

# Their training heads return several outputs; we train the main one alone.
_AUX_HEADS = ("inception_v3", "googlenet")


def build_model(
    arch: str, num_classes: int, pretrained: bool, weights: Path | None, *, may_fit: bool = True
) -> nn.Module:
    """The network with num_classes outputs; weights from torchvision, a file or the random seed.

    may_fit: given weights may be for other classes, and the last layer is then new.
    """
    known = torchvision.models.list_models(module=torchvision.models)
    if arch not in known:
        close = [name for name in known if arch[:6] in name][:5] or ["resnet18", "resnet50"]
        raise UserError(f"unknown --arch {arch!r}; torchvision has {', '.join(close)}, ...")
    options: dict[str, Any] = {}
    if arch in _AUX_HEADS and not pretrained:
        options = {"aux_logits": False, "init_weights": True}
    if pretrained:
        return _fit_last_layer(_download(arch), num_classes, may_fit)
    model: nn.Module = torchvision.models.get_model(arch, num_classes=num_classes, **options)
    if weights is not None:
        _load_fitting(model, read_state_dict(weights), weights, may_fit)
    return model


def read_state_dict(path: Path) -> dict[str, torch.Tensor]:
    """The model's tensors of a plain state dict, or of one of our checkpoints."""
    if not path.exists():
        raise UserError(f"no such weights: {path}; give a .pt file of a state dict or a checkpoint")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a foreign file's bytes are read as instructions and raise anything
        reason = (str(error) or type(error).__name__).splitlines()[0][:150]
        raise UserError(f"{path} is not a state dict that can be loaded safely: {reason}") from None
    for key in ("model", "state_dict"):
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
    if not isinstance(state, dict) or not all(torch.is_tensor(v) for v in state.values()):
        raise UserError(f"{path} holds no state dict; save the model's state_dict()")
    return {name.removeprefix("module."): tensor for name, tensor in state.items()}


def save_state_dict(model: nn.Module, path: Path) -> None:
    """Writes the plain state dict, whole or not at all."""
    part = path.with_name(path.name + ".part")
    state = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
    torch.save(state, part)
    part.replace(path)


def _download(arch: str) -> nn.Module:
    try:
        model: nn.Module = torchvision.models.get_model(arch, weights="DEFAULT")
        return model
    except OSError as error:  # URLError is one
        raise UserError(
            f"cannot download torchvision's weights for {arch} ({error}); this machine has no way "
            "to them: copy the file here and give it with --weights FILE"
        ) from None


def _fit_last_layer(model: nn.Module, num_classes: int, may_fit: bool) -> nn.Module:
    """The model with a new last linear layer when the number of classes is another."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if not names:
        raise UserError("this arch has no last linear layer to fit; leave out --pretrained")
    parent_name, _, child_name = names[-1].rpartition(".")
    parent = model.get_submodule(parent_name)
    last = getattr(parent, child_name)
    if last.out_features != num_classes:
        if not may_fit:
            raise UserError(
                f"the weights are for {last.out_features} classes and the data has {num_classes}; "
                "evaluate them on data with their own classes"
            )
        setattr(parent, child_name, nn.Linear(last.in_features, num_classes))
    return model


def _load_fitting(
    model: nn.Module, state: dict[str, torch.Tensor], path: Path, may_fit: bool
) -> None:
    """Loads what fits; only a last layer for another number of classes may stay as it was."""
    own = model.state_dict()
    fits = {k: v for k, v in state.items() if k in own and own[k].shape == v.shape}
    left = [name for name in own if name not in fits]
    last = list(own)[-2:]
    if any(name not in last for name in left):
        raise UserError(f"{path} is of another arch: {left[0]} is missing or has another shape")
    if left and not may_fit:
        raise UserError(
            f"{path} is for another number of classes than the data's {own[left[0]].shape[0]}; "
            "evaluate it on data with its own classes"
        )
    if left:
        log.info("%s: the last layer is new, it had another number of classes", path)
    model.load_state_dict(own | fits)
