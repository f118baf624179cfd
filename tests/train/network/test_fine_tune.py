"""Fine-tuning: a frozen backbone stays as it is, bit for bit, and a slow one moves slowly."""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torchvision
from torch import nn

from dataset.errors import DONE, USER_MISTAKE, UserError
from tests.gpu_sim import ranks as gpu
from tests.train import hooks, tiny_net
from tests.train import started_ranks as ranks
from tests.train.outcomes import EVERY_STEP, final_state, find_differences
from train.config import parse_config
from train.network.fine_tune import find_frozen_norms, find_head, freeze_backbone
from train.network.model import build_model, read_state_dict
from train.optim import make_optimizer, set_lr
from train.recipe import resolve_recipe

pytestmark = pytest.mark.training

State = dict[str, torch.Tensor]
# One of each family that ends in another way.
FAMILIES = [
    *("alexnet", "convnext_tiny", "efficientnet_b0", "googlenet", "inception_v3", "maxvit_t"),
    *("mobilenet_v3_small", "resnet18", "squeezenet1_1", "swin_t", "vgg16", "vit_b_16"),
]


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A trained network for 5 classes; the data has 7."""
    torch.manual_seed(11)
    model = tiny_net.TinyNet(5)
    model(torch.rand(8, 3, 32, 32) * 4)  # statistics that no new network has
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    return tmp_path / "weights.pt"


def split(state: State, head: str = "fc") -> tuple[State, State]:
    """(backbone, head) of a state dict, buffers included."""
    is_head = {name: name.rpartition(".")[0] == head for name in state}
    backbone = {name: value for name, value in state.items() if not is_head[name]}
    return backbone, {name: value for name, value in state.items() if is_head[name]}


def frozen_argv(images: Path, weights: Path, out: Path) -> list[str]:
    argv = [str(images), "--weights", str(weights), "--freeze", "--microbatch", "4"]
    return [*argv, "--momentum", "0.9", "--ema", "0.9", "--output", str(out)]


@pytest.mark.parametrize("world", [1, 2])
def test_a_frozen_backbone_stays_bit_equal_and_the_last_layer_learns(
    images: Path, weights: Path, tmp_path: Path, world: int
) -> None:
    """Weights, running statistics and batch counters; the averages (--ema) of the weights too."""
    out = tmp_path / "out"
    argv = [*frozen_argv(images, weights, out), "--epochs", "2"]
    ranks.run(argv, tmp_path / "log", world).expect(DONE)
    loaded, state = read_state_dict(weights), final_state(out)
    backbone, head = split(state["model"])
    assert len(backbone) == 12 and find_differences(backbone, split(loaded)[0]) == []
    averages = split(state["ema"])[0]
    assert find_differences(averages, {name: loaded[name] for name in averages}) == []
    torch.manual_seed(0)
    first = split(build_model(tiny_net.NAME, 7, False, weights).state_dict())[1]
    assert all(not torch.equal(head[name], first[name]) for name in head)
    assert sum(len(g["params"]) for g in state["optimizer"]["param_groups"]) == 2
    assert state["identity"]["freeze"] is True


def test_a_frozen_run_killed_in_an_epoch_goes_on_bit_for_bit(
    images: Path, weights: Path, tmp_path: Path
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    argv = [*frozen_argv(images, weights, whole), "--epochs", "1"]
    ranks.run(argv, tmp_path / "log", 2).expect(DONE)
    argv = [*frozen_argv(images, weights, parts), "--epochs", "1"]
    kill = partial(hooks.at_step, 0, 3, partial(hooks.wait_and_kill, parts, 2))
    killed = ranks.run([*argv, *EVERY_STEP], tmp_path / "log1", 2, hook=kill)
    assert killed.codes[0] == -signal.SIGKILL
    assert "continuing from step" in ranks.run(argv, tmp_path / "log2", 2).expect(DONE).log
    assert find_differences(final_state(parts), final_state(whole)) == []
    thawed = [flag for flag in argv if flag != "--freeze"]
    refused = ranks.run([*thawed, "--epochs", "2"], tmp_path / "log3").expect(USER_MISTAKE)
    assert "freeze: True -> None" in refused.log


@pytest.mark.gpusim
@pytest.mark.timeout(300)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_gpu_freezes_what_a_cpu_freezes(images: Path, tmp_path: Path, num_ranks: int) -> None:
    torch.manual_seed(3)
    start = tmp_path / "start.pt"
    torch.save(torchvision.models.get_model(ranks.REAL_ARCH, num_classes=4).state_dict(), start)
    argv = [str(images), "-a", ranks.REAL_ARCH, "--weights", str(start), "--freeze"]
    argv += ["--precision", "fp64", "--max-steps", "2"]
    log = tmp_path / "log"
    ranks.run([*argv, "--output", f"{tmp_path}/cpu"], log, num_ranks).expect(DONE)
    gpu.run([*argv, "--output", f"{tmp_path}/gpu"], log, num_ranks).expect(DONE)
    cpu, on_gpu = (final_state(tmp_path / name)["model"] for name in ("cpu", "gpu"))
    loaded = {name: value.to(cpu[name].dtype) for name, value in read_state_dict(start).items()}
    for state in (cpu, on_gpu):
        assert find_differences(split(state)[0], split(loaded)[0]) == []
    heads = zip(split(cpu)[1].values(), split(on_gpu)[1].values(), strict=True)
    assert all(torch.allclose(a, b, rtol=1e-9) for a, b in heads)


def test_only_a_frozen_batch_norm_keeps_its_statistics() -> None:
    model = tiny_net.TinyNet(3)
    assert find_frozen_norms(model) == []
    freeze_backbone(model)
    assert len(find_frozen_norms(model)) == 2


def test_a_slow_backbone_gets_its_share_of_the_rate() -> None:
    model = tiny_net.TinyNet(3)
    recipe = resolve_recipe("sgd", 256, 90, {})
    optimizer = make_optimizer(model, recipe, 0.1)
    set_lr(optimizer, 2.0)
    rates = {id(p): g["lr"] for g in optimizer.param_groups for p in g["params"]}
    decays = {id(p): g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    for name, param in model.named_parameters():
        assert rates[id(param)] == (2.0 if name.startswith("fc") else 0.2), name
        assert (decays[id(param)] > 0) == (param.ndim > 1), name
    plain = make_optimizer(model, recipe)
    assert all("lr_scale" not in group for group in plain.param_groups)


def test_a_run_with_a_slow_backbone_goes_on_with_it(
    images: Path, weights: Path, tmp_path: Path
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    argv = [str(images), "--weights", str(weights), "--backbone-lr-scale", "0.1", "--output"]
    ranks.run([*argv, str(whole), "--max-steps", "4"], tmp_path / "log").expect(DONE)
    for steps in ("2", "4"):
        ranks.run([*argv, str(parts), "--max-steps", steps], tmp_path / "log").expect(DONE)
    assert find_differences(final_state(parts)["model"], final_state(whole)["model"]) == []
    other = [*argv, str(parts), "--max-steps", "5", "--backbone-lr-scale", "0.5"]
    refused = ranks.run(other, tmp_path / "log1").expect(USER_MISTAKE)
    assert "backbone_lr_scale: 0.1 -> 0.5" in refused.log


@pytest.mark.parametrize("arch", FAMILIES)
def test_only_the_last_layer_of_a_network_depends_on_the_classes(arch: str) -> None:
    options = {"init_weights": False} if arch in ("googlenet", "inception_v3") else {}
    with torch.device("meta"):
        few, many = (
            torchvision.models.get_model(arch, num_classes=num, **options) for num in (7, 1000)
        )
    name, _ = find_head(few)
    if options:  # their auxiliary heads are not trained
        name = "fc"
    pairs = zip(few.state_dict().items(), many.state_dict().values(), strict=True)
    differing = [key for (key, small), large in pairs if small.shape != large.shape]
    assert {key.rpartition(".")[0] for key in differing if "ux" not in key} == {name}


def test_vgg16_keeps_its_backbone_when_the_classes_change(tmp_path: Path) -> None:
    """Its last layer is classifier[6]; the two linear layers before it are kept too."""
    path = tmp_path / "vgg.pt"
    with _small_linear_layers():
        state = torchvision.models.vgg16(num_classes=9).state_dict()
        torch.save(state, path)
        model = build_model("vgg16", 5, False, path)
        freeze_backbone(model)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained == ["classifier.6.weight", "classifier.6.bias"]
    backbone, head = split(model.state_dict(), "classifier.6")
    assert find_differences(backbone, split(state, "classifier.6")[0]) == []
    assert head["classifier.6.weight"].shape[0] == 5


class _small_linear_layers:
    """vgg16 without its 120 million weights of linear layers: 4096 features become 8."""

    def __enter__(self) -> None:
        self._plain: Callable[..., None] = nn.Linear.__init__

        def narrow(layer: nn.Linear, inputs: int, outputs: int, **options: object) -> None:
            sizes = (8 if inputs == 4096 else inputs, 8 if outputs == 4096 else outputs)
            self._plain(layer, *sizes, **options)

        nn.Linear.__init__ = narrow  # type: ignore[method-assign,assignment]

    def __exit__(self, *_: object) -> None:
        nn.Linear.__init__ = self._plain  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("data --freeze", "--freeze is for trained weights; name them with --weights FILE"),
        ("data --backbone-lr-scale 0.1", "--backbone-lr-scale is for trained weights"),
        ("data --backbone-lr-scale 0", "must be above 0 and at most 1 (0 is --freeze)"),
        ("data --backbone-lr-scale nan", "must be a finite number"),
        ("data --freeze --weights w.pt --backbone-lr-scale 0.1", "--freeze trains no backbone"),
        ("data --val-share 0", "--val-share 0.0: must be above 0 and below 1"),
        ("data --val-share 1", "--val-share 1.0: must be above 0 and below 1"),
        ("--dummy --val-share 0.5", "leave it out with --dummy"),
    ],
)
def test_flags_that_make_no_sense_are_one_line(argv: str, words: str) -> None:
    with pytest.raises(UserError) as refused:
        parse_config(argv.split())
    assert words in str(refused.value) and "\n" not in str(refused.value)
