"""What each batch size gets, what is refused or noted, and the schedules step by step."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path

import pytest
import torchvision

from dataset.errors import DONE, UserError
from tests.train import started_ranks as ranks
from train.config import parse_config
from train.optim import make_optimizer
from train.prepare import recipe_of, recipe_values
from train.recipe import FLAGS, LARS_FROM_BATCH, choose_recipe, describe, lr_at, resolve_recipe
from train.recipe_table import TABLE, Recipe

DOCS = Path(__file__).resolve().parents[2] / "docs" / "recipes.md"


@pytest.mark.parametrize(
    ("batch_size", "name", "lr", "wd", "warmup_epochs", "eps"),
    [
        (256, "sgd", 0.256, 6.103515625e-05, 8, 0),
        (1024, "sgd", 1.024, 6.103515625e-05, 8, 0),
        (2048, "sgd", 2.048, 3.0517578125e-05, 8, 0),
        (3000, "sgd", 3.0, 3.0517578125e-05, 8, 0),
        (4096, "lars", 11.313708, 1e-4, 1.25, 1e-5),
        (8192, "lars", 16, 1e-4, 2.5, 1e-5),
        (16384, "lars", 22.627417, 1e-4, 5, 1e-5),
        (32768, "lars", 32, 1e-4, 14, 0),
    ],
)
def test_auto_gives_each_batch_its_published_values(
    batch_size: int, name: str, lr: float, wd: float, warmup_epochs: float, eps: float
) -> None:
    recipe = resolve_recipe("auto", batch_size, 90, {})
    assert (recipe.name, recipe.optimizer) == (name, name)
    assert recipe.lr == pytest.approx(lr, rel=1e-7)
    assert (recipe.weight_decay, recipe.warmup_epochs, recipe.lars_eps) == (wd, warmup_epochs, eps)
    assert recipe.label_smoothing == 0.1
    assert not recipe.decay_norm_and_bias
    assert recipe.momentum == (0.875 if name == "sgd" else 0.9)
    assert recipe.schedule == ("cosine" if name == "sgd" else "poly2")
    assert recipe.zero_init_gamma == (name == "sgd")


def test_sgd_at_4096_has_its_own_published_point() -> None:
    recipe = resolve_recipe("sgd", 4096, 90, {})
    assert (recipe.lr, recipe.weight_decay, recipe.notes) == (4.096, 2**-15, ())


@pytest.mark.parametrize("batch_size", [256, 2048, 16384])
def test_reference_keeps_its_values_at_every_batch(batch_size: int) -> None:
    recipe = resolve_recipe("reference", batch_size, 90, {})
    assert (recipe.lr, recipe.momentum, recipe.weight_decay) == (0.1, 0.9, 1e-4)
    assert (recipe.warmup_epochs, recipe.label_smoothing, recipe.schedule) == (0, 0, "step")
    assert recipe.decay_norm_and_bias
    assert not recipe.zero_init_gamma
    assert bool(recipe.notes) == (batch_size != 256)


def test_lars_between_points_goes_by_the_square_root_and_says_so() -> None:
    recipe = resolve_recipe("lars", 12288, 90, {})
    assert recipe.lr == pytest.approx(16 * math.sqrt(1.5))
    assert recipe.warmup_epochs == pytest.approx(3.75)
    assert "between the published points 8192 and 16384" in recipe.notes[0]
    assert "square root" in recipe.notes[0]


@pytest.mark.parametrize("name", ["sgd", "lars"])
def test_a_scaled_rate_is_continuous_at_the_published_points(name: str) -> None:
    for batch_size in TABLE[name].points:
        at = resolve_recipe(name, batch_size, 90, {}).lr
        for near in (batch_size - 1, batch_size + 1):
            assert resolve_recipe(name, near, 90, {}).lr == pytest.approx(at, rel=2e-3)


@pytest.mark.parametrize(
    ("name", "batch_size", "words"),
    [
        ("sgd", 8192, "above the largest published for sgd, 4096"),
        ("lars", 65536, "above the largest published for lars, 32768"),
        ("lars", 64, "below the smallest published for lars"),
        ("sgd", 256, "below the smallest published for sgd"),
        ("reference", 4096, "the LR stays at 0.1"),
    ],
)
def test_a_batch_outside_the_table_is_noted(name: str, batch_size: int, words: str) -> None:
    recipe = resolve_recipe(name, batch_size, 90, {})
    assert words in " ".join(recipe.notes)
    assert f"note: {recipe.notes[0]}" in describe(recipe, batch_size)


def test_auto_says_what_it_took_and_a_pinned_name_stays() -> None:
    assert "auto took lars" in " ".join(resolve_recipe("auto", LARS_FROM_BATCH, 90, {}).notes)
    pinned = choose_recipe("auto", LARS_FROM_BATCH - 1)
    assert pinned == "sgd"
    assert resolve_recipe(pinned, 32768, 90, {}).name == "sgd"


def test_given_values_win_and_are_noted() -> None:
    given = {"lr": 0.5, "momentum": 0.8, "wd": 0.0, "warmup_epochs": 2.5, "label_smoothing": 0.2}
    recipe = resolve_recipe("sgd", 1024, 90, given)
    assert (recipe.lr, recipe.momentum, recipe.weight_decay) == (0.5, 0.8, 0)
    assert (recipe.warmup_epochs, recipe.label_smoothing) == (2.5, 0.2)
    for flag in ("--lr 0.5", "--momentum 0.8", "--wd 0", "--warmup-epochs 2.5"):
        assert flag in " ".join(recipe.notes)


def test_every_value_of_a_recipe_has_its_flag() -> None:
    """What is left decides which recipe it is: its optimiser, its schedule, its two switches."""
    numbers = {f.name for f in dataclasses.fields(Recipe) if f.type == "float"}
    assert {name for _, name in FLAGS.values()} == numbers
    cfg = parse_config(["DATA", *(f"{flag}=0.25" for flag, _ in FLAGS.values()), "--recipe=lars"])
    recipe = recipe_of(cfg)
    assert {name: getattr(recipe, name) for name in numbers} == dict.fromkeys(numbers, 0.25)


def test_the_trust_coefficient_and_the_epsilon_can_be_given_to_lars() -> None:
    recipe = resolve_recipe("auto", 4096, 90, {"lars_eta": 0.002, "lars_eps": 0.0})
    assert (recipe.lars_eta, recipe.lars_eps) == (0.002, 0.0)
    text = describe(recipe, 4096)
    assert "eta 0.002, epsilon 0" in text and "77.38" not in text
    assert "--lars-eta 0.002 was given in place of the recipe's 0.001" in text
    (group, _) = make_optimizer(torchvision.models.resnet18(), recipe).param_groups
    assert (group["eta"], group["eps"]) == (0.002, 0.0)
    assert recipe_values(recipe).items() >= {"lars_eta": 0.002, "lars_eps": 0.0}.items()


@pytest.mark.parametrize("key", ["lars_eta", "lars_eps"])
@pytest.mark.parametrize(("name", "taken"), [("auto", "sgd"), ("sgd",) * 2, ("reference",) * 2])
def test_a_value_of_lars_is_refused_where_no_lars_reads_it(key: str, name: str, taken: str) -> None:
    flag = "--" + key.replace("_", "-")
    with pytest.raises(UserError, match=f"{flag} is not read by recipe {taken}; .*--recipe lars"):
        resolve_recipe(name, 256, 90, {key: 0.001})


def test_a_trust_coefficient_of_zero_is_refused() -> None:
    with pytest.raises(UserError, match="--lars-eta 0 would train nothing"):
        resolve_recipe("lars", 4096, 90, {"lars_eta": 0.0})


@pytest.mark.training
def test_a_recipe_with_a_zero_gamma_says_when_the_network_has_none(tmp_path: Path) -> None:
    words = f"the last gamma of a block starts at 0, but {ranks.REAL_ARCH} has no such gamma"
    argv = ["--dummy", "-a", ranks.REAL_ARCH, "-b", "4", "--max-steps", "1", "--output"]
    job = ranks.run([*argv, str(tmp_path / "a")], tmp_path / "log", 2).expect(DONE)
    assert job.log.count(words) == 1
    for more in (["--recipe", "reference"], ["-a", "resnet18"], ["--weights", "x.pt"]):
        cfg = parse_config(["DATA", "-a", ranks.REAL_ARCH, *more])
        assert "no such gamma" not in " ".join(recipe_of(cfg).notes)
    with pytest.raises(UserError, match="unknown --arch 'resnet5'"):
        recipe_of(parse_config(["DATA", "-a", "resnet5"]))


def test_a_value_that_was_not_given_changes_nothing() -> None:
    none = dict.fromkeys(FLAGS)
    assert resolve_recipe("sgd", 1024, 90, none) == resolve_recipe("sgd", 1024, 90, {})


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"lr": -0.1}, "--lr -0.1"),
        ({"lr": 0.0}, "--lr 0"),
        ({"lr": math.nan}, "--lr nan"),
        ({"lr": math.inf}, "--lr inf"),
        ({"momentum": 1.0}, "--momentum 1"),
        ({"wd": -1e-4}, "--wd -0.0001"),
        ({"warmup_epochs": -1.0}, "--warmup-epochs -1"),
        ({"warmup_epochs": 91.0}, "--warmup-epochs 91 is longer than the training of 90 epochs"),
        ({"label_smoothing": 1.0}, "--label-smoothing 1"),
        ({"beta": 0.5}, "beta is not read by recipe sgd"),
    ],
)
def test_a_bad_value_is_refused_by_name(overrides: dict[str, float], words: str) -> None:
    with pytest.raises(UserError) as caught:
        resolve_recipe("sgd", 1024, 90, overrides)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("name", "batch_size", "epochs", "words"),
    [
        ("adam", 256, 90, "--recipe adam"),
        ("sgd", 0, 90, "--batch-size 0"),
        ("sgd", 9, 0, "--epochs"),
    ],
)
def test_a_bad_request_is_refused(name: str, batch_size: int, epochs: int, words: str) -> None:
    with pytest.raises(UserError, match=words):
        resolve_recipe(name, batch_size, epochs, {})


def test_a_short_training_gets_the_published_share_of_warm_up() -> None:
    recipe = resolve_recipe("lars", 32768, 9, {})
    assert recipe.warmup_epochs == pytest.approx(1.4)
    assert "warm-up shortened from 14 to 1.4 epochs" in " ".join(recipe.notes)
    own = resolve_recipe("lars", 32768, 9, {"warmup_epochs": 9.0})
    assert own.warmup_epochs == 9
    assert "shortened" not in " ".join(own.notes)


def test_warm_up_climbs_to_the_peak_and_decay_ends_at_zero() -> None:
    for name, batch_size in (("sgd", 1024), ("lars", 4096)):
        recipe = resolve_recipe(name, batch_size, 90, {})
        num_warmup = round(recipe.warmup_epochs * 100)
        rates = [lr_at(recipe, step, 100, 9000) for step in range(9000)]
        assert rates[0] == pytest.approx(recipe.lr / num_warmup)
        assert rates[num_warmup - 1] == recipe.lr
        assert rates[num_warmup] == recipe.lr
        assert rates[:num_warmup] == sorted(rates[:num_warmup])
        assert rates[num_warmup:] == sorted(rates[num_warmup:], reverse=True)
        assert 0 < rates[-1] < 1e-5 * recipe.lr
        assert lr_at(recipe, 9000, 100, 9000) == 0


def test_cosine_and_power_two_have_their_shape_half_way() -> None:
    sgd = resolve_recipe("sgd", 1024, 90, {"warmup_epochs": 10.0})
    assert lr_at(sgd, 500, 10, 900) == pytest.approx(sgd.lr / 2)
    assert lr_at(sgd, 300, 10, 900) == pytest.approx(sgd.lr * (1 + math.cos(math.pi / 4)) / 2)
    lars = resolve_recipe("lars", 4096, 90, {"warmup_epochs": 10.0})
    assert lr_at(lars, 500, 10, 900) == pytest.approx(lars.lr / 4)


def test_reference_drops_by_ten_after_each_30_epochs() -> None:
    recipe = resolve_recipe("reference", 256, 90, {})
    rates = [lr_at(recipe, epoch * 7, 7, 630) for epoch in range(90)]
    assert rates == pytest.approx([0.1] * 30 + [0.01] * 30 + [0.001] * 30)
    assert lr_at(recipe, 30 * 7 - 1, 7, 630) == 0.1
    short = resolve_recipe("reference", 256, 30, {})
    assert "never in 30" in " ".join(short.notes)


def test_a_fraction_of_an_epoch_of_warm_up_is_counted_in_steps() -> None:
    recipe = resolve_recipe("lars", 4096, 90, {})  # 1.25 epochs
    assert lr_at(recipe, 0, 10, 900) == pytest.approx(recipe.lr / 12)
    assert lr_at(recipe, 11, 10, 900) == recipe.lr


def test_warm_up_of_less_than_a_step_starts_at_the_peak() -> None:
    recipe = resolve_recipe("lars", 4096, 1, {})  # 1.25 / 90 of an epoch
    assert lr_at(recipe, 0, 4, 4) == recipe.lr


@pytest.mark.parametrize("batch_size", [256, 1024, 3000, 4096, 16384, 32768])
def test_description_names_every_value_and_its_source(batch_size: int) -> None:
    recipe = resolve_recipe("auto", batch_size, 90, {})
    text = describe(recipe, batch_size)
    assert f"{recipe.name} for a global batch of {batch_size}" in text
    assert f"{recipe.lr:.4g}" in text
    assert f"published by {recipe.source}" in text
    assert "not reproduced here" in text


def test_description_prints_the_published_accuracy_at_its_batch_only() -> None:
    at = describe(resolve_recipe("lars", 16384, 90, {}), 16384)
    assert "top-1 76.96 % published (128 images a GPU, 90 epochs)" in at
    small = describe(resolve_recipe("lars", 512, 90, {}), 512)  # on 8 GPUs
    assert "top-1 77.02 % published (64 images a GPU, 90 epochs)" in small
    off = describe(resolve_recipe("lars", 16000, 90, {}), 16000)
    assert "none published for this batch" in off
    changed = describe(resolve_recipe("lars", 16384, 90, {"lr": 20.0}), 16384)
    assert "76.96" not in changed
    assert "--lr 20 was given in place of the recipe's 22.6274" in changed


def test_the_docs_show_what_the_command_prints() -> None:
    blocks = re.findall(r"--show-recipe -b (\d+)\n(.*?)\n```", DOCS.read_text(), re.DOTALL)
    assert [int(batch) for batch, _ in blocks] == [256, 1024, 3000, 4096, 16384, 32768]
    for batch, text in blocks:
        assert text == describe(resolve_recipe("auto", int(batch), 90, {}), int(batch))
