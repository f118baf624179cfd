"""torchvision's own weights: in a file that came along, in torch's cache, or from the network."""

from __future__ import annotations

import hashlib
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
import torchvision
from torch import nn

from dataset.errors import DataError, UserError


def load_pretrained(arch: str) -> nn.Module:
    """The network with torchvision's weights, as torchvision builds it."""
    url = _find_url(arch)
    name = url.rpartition("/")[2]
    beside = Path(name)
    cached = Path(torch.hub.get_dir(), "checkpoints", name)
    found = next((path for path in (beside, cached) if path.is_file()), None)
    if found is not None:
        _verify(found)
    try:
        with _taken_from(beside) if found == beside else nullcontext():
            model: nn.Module = torchvision.models.get_model(arch, weights="DEFAULT")
    except OSError as error:  # URLError is one
        raise UserError(
            f"no {name} in the current folder or in {cached.parent}, and {url} cannot be fetched "
            f"({error}); copy it to one of the two, or give another file with --weights"
        ) from None
    return model


def _find_url(arch: str) -> str:
    try:
        url: str = torchvision.models.get_model_weights(arch).DEFAULT.url
    except (AttributeError, RuntimeError, ValueError):
        raise UserError(f"torchvision has no weights for {arch}; leave out --pretrained") from None
    return url


def _verify(path: Path) -> None:
    """Raises unless the file has the digest that torchvision writes into its name."""
    expected = re.search(r"-([0-9a-f]{8,})\.", path.name)
    if expected is None:
        return
    hasher = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            hasher.update(piece)
    digest = hasher.hexdigest()
    if not digest.startswith(expected[1]):
        raise DataError(
            f"{path} is damaged or another file: its SHA-256 begins with "
            f"{digest[: len(expected[1])]}, not {expected[1]}; copy it again"
        )


@contextmanager
def _taken_from(path: Path) -> Iterator[None]:
    """torch looks into a folder of its own making, in which the file lies under its name."""
    usual = torch.hub.get_dir()
    with tempfile.TemporaryDirectory(prefix="trainyard-weights-") as folder:
        place = Path(folder, "checkpoints", path.name)
        place.parent.mkdir()
        place.symlink_to(path.absolute())
        torch.hub.set_dir(folder)
        try:
            yield
        finally:
            torch.hub.set_dir(usual)
