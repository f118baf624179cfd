"""The network: the images that it takes, and torchvision's weights with their last layer."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from torch import nn

from dataset.errors import USER_MISTAKE, UserError
from tests.train import started_ranks as ranks
from train.network.model import build_model, check_input


@pytest.fixture
def _no_download(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchvision gets random weights where it would fetch its own: there is no network here."""

    def fetch(url: str, **_: Any) -> dict[str, torch.Tensor]:
        arch = Path(url).name.split("-")[0].replace("_google", "")
        options = {"init_weights": False} if arch in ("inception_v3", "googlenet") else {}
        state: dict[str, torch.Tensor] = torchvision.models.get_model(arch, **options).state_dict()
        return state

    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", fetch)


@pytest.mark.parametrize(
    ("arch", "image_size", "num_images", "words"),
    [
        ("vit_b_32", 64, 2, "Expected 224 but got 64"),
        ("alexnet", 32, 2, "too small"),
        ("resnet18", 32, 1, "or a larger --microbatch"),
    ],
)
def test_images_that_a_network_cannot_take_are_refused_in_one_line(
    arch: str, image_size: int, num_images: int, words: str
) -> None:
    model = build_model(arch, 10, False, None)
    with pytest.raises(UserError) as refused:
        check_input(model, arch, image_size, num_images, is_training=True)
    message = str(refused.value)
    assert f"{arch} cannot take --image-size {image_size}" in message
    assert words in message and "\\n" not in message


def test_a_check_leaves_the_network_as_it_was() -> None:
    model = build_model(ranks.REAL_ARCH, 10, False, None)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    check_input(model, ranks.REAL_ARCH, 32, 8, is_training=True)
    check_input(model, ranks.REAL_ARCH, 32, 1, is_training=False)
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())


def test_a_start_with_a_wrong_image_size_is_one_line_and_exit_2(tmp_path: Path) -> None:
    argv = ["--dummy", "-a", "vit_b_32", "--image-size", "64", "-b", "2", "--max-steps", "1"]
    job = ranks.run([*argv, "--output", str(tmp_path / "out")], tmp_path / "log")
    assert "error: vit_b_32 cannot take --image-size 64" in job.expect(USER_MISTAKE).log
    assert "Traceback" not in job.log
    assert not (tmp_path / "out").exists()


def test_an_unknown_model_is_refused_before_the_log_names_a_folder(tmp_path: Path) -> None:
    argv = ["--dummy", "-a", "resnet5", "-b", "2", "--max-steps", "1"]
    job = ranks.run(argv, tmp_path / "log", hook=partial(os.chdir, tmp_path))
    (line,) = job.expect(USER_MISTAKE).log.splitlines()
    assert line.startswith("error: unknown --arch 'resnet5'; torchvision has ")


@pytest.mark.usefixtures("_no_download")
@pytest.mark.parametrize("num_classes", [1000, 7])
@pytest.mark.parametrize(
    ("arch", "image_size"), [("inception_v3", 96), ("googlenet", 64), ("squeezenet1_1", 64)]
)
def test_pretrained_networks_give_one_output_for_each_class(
    arch: str, image_size: int, num_classes: int
) -> None:
    model = build_model(arch, num_classes, True, None)
    model.train()
    outputs = model(torch.zeros(2, 3, image_size, image_size))
    assert outputs.shape == (2, num_classes)
    plain = build_model(arch, num_classes, False, None)
    plain.load_state_dict(model.state_dict())  # a checkpoint does not need --pretrained again
    images = torch.rand(2, 3, image_size, image_size)
    assert torch.equal(plain.eval()(images), model.eval()(images))


@pytest.mark.usefixtures("_no_download")
def test_pretrained_weights_of_other_classes_are_not_evaluated() -> None:
    with pytest.raises(UserError, match="for 1000 classes and the data has 7"):
        build_model("squeezenet1_1", 7, True, None, may_fit=False)


@pytest.mark.usefixtures("_no_download")
def test_a_new_last_layer_has_a_bias_where_the_old_one_had_it() -> None:
    classifier = build_model("maxvit_t", 7, True, None).classifier
    assert isinstance(classifier, nn.Sequential)
    last = classifier[-1]
    assert isinstance(last, nn.Linear) and last.out_features == 7 and last.bias is None
