"""torchvision's weights without a network: from a file beside, or from torch's cache."""

from __future__ import annotations

import hashlib
from pathlib import Path
from urllib.error import URLError

import pytest
import torch
import torchvision

from dataset.errors import DataError, UserError
from train.checkpoints import pretrained
from train.network.model import build_model

ARCH = "squeezenet1_1"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that a job runs in, with a cache of torch beside and no network."""
    folder = tmp_path / "job"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.setattr(torch.hub, "_hub_dir", None)

    def refuse(*_: object, **__: object) -> None:
        raise URLError("no network")

    monkeypatch.setattr(torch.hub, "download_url_to_file", refuse)
    return folder


def bring_weights(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, torch.Tensor]:
    """A file of weights whose name has its digest, as torchvision would name it."""
    torch.manual_seed(8)
    state = torchvision.models.get_model(ARCH).state_dict()
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(state, folder / "new.pth")
    digest = hashlib.sha256((folder / "new.pth").read_bytes()).hexdigest()
    path = (folder / "new.pth").rename(folder / f"{ARCH}-{digest[:8]}.pth")
    weights = torchvision.models.get_model_weights(ARCH).DEFAULT
    moved = type(weights.value)(
        f"https://server/{path.name}", *list(vars(weights.value).values())[1:]
    )
    monkeypatch.setattr(weights, "_value_", moved)
    return path, state["features.0.weight"]


@pytest.mark.parametrize("where", ["job", "torch/hub/checkpoints"])
def test_a_file_that_came_along_is_used_and_no_network(
    place: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    usual = torch.hub.get_dir()
    _, first = bring_weights(place.parent / where, monkeypatch)
    model = build_model(ARCH, 3, True, None)
    assert torch.equal(model.state_dict()["features.0.weight"], first)
    assert model(torch.zeros(1, 3, 64, 64)).shape == (1, 3)
    assert torch.hub.get_dir() == usual


@pytest.mark.usefixtures("place")
def test_without_a_file_one_line_names_it_and_both_places(tmp_path: Path) -> None:
    with pytest.raises(UserError) as refused:
        build_model("resnet50", 3, True, None)
    message = str(refused.value)
    assert "no resnet50-11ad3fa6.pth in the current folder" in message
    assert f"{tmp_path}/torch/hub/checkpoints" in message and "--weights" in message
    assert "\n" not in message


def test_another_file_under_that_name_is_bad_data(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = bring_weights(place, monkeypatch)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match="is damaged or another file: its SHA-256 begins with"):
        build_model(ARCH, 3, True, None)


def test_a_network_without_weights_of_torchvision_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torchvision.models, "get_model_weights", lambda _: object())
    with pytest.raises(UserError, match="torchvision has no weights for resnet18"):
        pretrained.load_pretrained("resnet18")
