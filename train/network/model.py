"""The network: any torchvision classifier with its last layer fitted, and weights in and out."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import nn

from dataset.errors import UserError
from train.checkpoints.pretrained import load_pretrained
from train.checkpoints.torch_file import read_torch_file, write_torch_file
from train.network.fine_tune import find_head
from train.paths import check_weights

log = logging.getLogger("trainyard")

# Their training heads return several outputs; we train the main one alone.
_AUX_HEADS = {"inception_v3": ("AuxLogits",), "googlenet": ("aux1", "aux2")}
COMMON_SIZE = 224  # pixels a side that every classifier of torchvision takes


def build_model(
    arch: str, num_classes: int, pretrained: bool, weights: Path | None, *, may_fit: bool = True
) -> nn.Module:
    """The network with num_classes outputs; weights from torchvision, a file or the random seed.

    may_fit: the weights may be for other classes; the last layer is then new.
    """
    check_arch(arch)
    options: dict[str, Any] = {}
    if arch in _AUX_HEADS:
        # torchvision's weights expect scaled inputs; a state dict does not say whether it does.
        options = {"aux_logits": False, "init_weights": True, "transform_input": True}
    if pretrained:
        return _fit_last_layer(_load_own(arch), num_classes, may_fit)
    model: nn.Module = torchvision.models.get_model(arch, num_classes=num_classes, **options)
    if weights is not None:
        _load_fitting(model, read_state_dict(weights), weights, may_fit)
    return model


def check_arch(arch: str) -> None:
    """Raises if the name is not one of torchvision's classifiers."""
    known = torchvision.models.list_models(module=torchvision.models)
    if arch not in known:
        close = [name for name in known if arch[:6] in name][:5] or ["resnet18", "resnet50"]
        raise UserError(f"unknown --arch {arch!r}; torchvision has {', '.join(close)}, ...")


def has_last_gamma(arch: str) -> bool:
    """Whether train.optim.zero_init_last_gamma applies: only to ResNet and the like."""
    check_arch(arch)
    module: str = torchvision.models.get_model_builder(arch).__module__
    return module == "torchvision.models.resnet"


def check_input(
    model: nn.Module, arch: str, image_size: int, num_images: int, *, is_training: bool
) -> None:
    """Raises if the network cannot take images of this size; tries one or two black ones."""
    count = min(num_images, 2)
    buffers = {name: tensor.clone() for name, tensor in model.named_buffers()}
    was_training = model.training
    model.train(is_training)
    try:
        with torch.no_grad():
            images = torch.zeros(count, 3, image_size, image_size)
            torch.func.functional_call(model, buffers, (images,))
    except (AssertionError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        fix = "choose another size" + (" or a larger --microbatch" if count == 1 else "")
        raise UserError(f"{arch} cannot take --image-size {image_size} ({reason}); {fix}") from None
    finally:
        model.train(was_training)


def read_state_dict(path: Path) -> dict[str, torch.Tensor]:
    """The model's tensors from a plain state dict or from one of our checkpoints."""
    check_weights(path)
    state = read_torch_file(path, must_be_zip=False)
    for key in ("model", "state_dict"):
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
    if not isinstance(state, dict) or not all(torch.is_tensor(v) for v in state.values()):
        raise UserError(f"{path} holds no state dict; save the model's state_dict()")
    if not all(isinstance(name, str) for name in state):
        raise UserError(f"{path} holds tensors without names; save the model's state_dict()")
    return {name.removeprefix("module."): tensor for name, tensor in state.items()}


def save_state_dict(model: nn.Module, path: Path) -> None:
    """Writes the plain state dict, whole or not at all."""
    part = path.with_name(path.name + ".part")
    state = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
    try:
        write_torch_file(part, state)
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def _load_own(arch: str) -> nn.Module:
    """torchvision's weights, without the heads that we do not train."""
    model = load_pretrained(arch)
    if arch in _AUX_HEADS:
        model.aux_logits = False  # type: ignore[assignment]
    for name in _AUX_HEADS.get(arch, ()):
        setattr(model, name, None)
    return model


def _fit_last_layer(model: nn.Module, num_classes: int, may_fit: bool) -> nn.Module:
    """The model with a new last layer if its number of classes differs."""
    name, last = find_head(model)
    num_outputs = last.out_features if isinstance(last, nn.Linear) else last.out_channels
    if num_outputs == num_classes:
        return model
    if not may_fit:
        raise UserError(
            f"the weights are for {num_outputs} classes and the data has {num_classes}; "
            "evaluate them on data with their own classes"
        )
    parent_name, _, child_name = name.rpartition(".")
    setattr(model.get_submodule(parent_name), child_name, _make_last(last, num_classes))
    return model


def _make_last(last: nn.Linear | nn.Conv2d, num_classes: int) -> nn.Module:
    """A new layer in place of the last one, for so many classes."""
    has_bias = last.bias is not None
    if isinstance(last, nn.Linear):
        return nn.Linear(last.in_features, num_classes, bias=has_bias)
    return nn.Conv2d(last.in_channels, num_classes, kernel_size=1, bias=has_bias)


def _load_fitting(
    model: nn.Module, state: dict[str, torch.Tensor], path: Path, may_fit: bool
) -> None:
    """Loads the weights; only a last layer for another number of classes may be left out."""
    own = model.state_dict()
    fits = {k: v for k, v in state.items() if k in own and own[k].shape == v.shape}
    left = [name for name in own if name not in fits]
    head, _ = find_head(model)
    if any(name.rpartition(".")[0] != head for name in left):
        odd = next(name for name in left if name.rpartition(".")[0] != head)
        raise UserError(f"{path} is for another --arch: {odd} is missing or has another shape")
    if left and not may_fit:
        raise UserError(
            f"{path} is for another number of classes than the data's {own[left[0]].shape[0]}; "
            "evaluate it on data with its own classes"
        )
    if left:
        log.info("%s: the last layer is new, it had another number of classes", path)
    model.load_state_dict(own | fits)
