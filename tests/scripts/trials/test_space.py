"""The space of a search: its grammar, and what the trainer would refuse."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from dataset.errors import UserError
from scripts.trials.space import check_space, parse_space, searchable_flags, to_flags
from train.config import parse_config

BASE = ["--dummy", "-b", "8"]


def test_each_form_becomes_its_distribution() -> None:
    space = parse_space("lr=log:0.01..10, wd = 0..1e-3,batch-size=8..64, recipe=sgd|lars")
    assert space == {
        "lr": FloatDistribution(0.01, 10.0, log=True),
        "wd": FloatDistribution(0.0, 1e-3),
        "batch_size": IntDistribution(8, 64),
        "recipe": CategoricalDistribution(("sgd", "lars")),
    }


def test_a_flag_may_be_written_as_on_the_command_line() -> None:
    names = ("batch_size", "batch-size", "b", "weight-decay", "wd", "label-smoothing")
    assert [searchable_flags()[name].option for name in names] == [
        *("--batch-size",) * 3,
        *("--wd",) * 2,
        "--label-smoothing",
    ]


def test_numbers_choices_and_switches_are_listed_too() -> None:
    space = parse_space("image_size=32|64, momentum=0.9|0.95, compile=true|false, ema=0.9..0.999")
    assert space == {
        "image_size": CategoricalDistribution((32, 64)),
        "momentum": CategoricalDistribution((0.9, 0.95)),
        "compile": CategoricalDistribution((True, False)),
        "ema": FloatDistribution(0.9, 0.999),
    }


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "names no flag to search"),
        (" , ", "choose from allow_empty_classes, arch, backbone_lr_scale"),
        ("lr", "give FLAG=VALUES"),
        ("lr=", "give FLAG=VALUES"),
        (
            "rate=0..1",
            "flag that can be searched; choose from allow_empty_classes, arch, backbone_lr_scale",
        ),
        ("output=a|b", "output is no flag that can be searched"),
        ("lr=1..0.1", "the first end must be below the second"),
        ("lr=1..1", "the first end must be below the second"),
        ("lr=log:0..1", "must begin above 0"),
        ("lr=a..b", "'a' is not a number"),
        ("lr=0..inf", "'inf' is not a finite number"),
        ("lr=nan..1", "'nan' is not a finite number"),
        ("batch_size=8..8.5", "'8.5' is not a whole number"),
        ("recipe=sgd..lars", "recipe is no number; list its values"),
        ("recipe=sgd", "at least two different values"),
        ("recipe=sgd|sgd", "at least two different values"),
        ("compile=yes|no", "'yes' is not true or false"),
        ("lr=0..1, lr=0..2", "names lr twice"),
        ("wd=0..1, weight-decay=0..2", "names wd twice"),
    ],
)
def test_an_impossible_space_is_one_line(text: str, words: str) -> None:
    with pytest.raises(UserError) as error:
        parse_space(text)
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("label_smoothing=0..1", "--label-smoothing 1.0: must be in"),
        ("recipe=sgd|adam", "invalid choice: 'adam'"),
        ("epochs=0..5", "--epochs 0: must be at least 1"),
        ("batch_size=8|16", "-b is given after -- and in --space"),
    ],
)
def test_what_the_trainer_would_refuse_is_refused_at_once(text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        check_space(parse_space(text), BASE)


@settings(deadline=None, max_examples=30)
@given(st.floats(0, 1e6, exclude_min=True), st.integers(1, 10**6), st.sampled_from([True, False]))
def test_the_flags_of_a_trial_carry_every_digit(lr: float, epochs: int, ema: bool) -> None:
    flags = to_flags({"lr": lr, "epochs": epochs, "compile": ema, "recipe": "lars"})
    config = parse_config(["--dummy", *flags])
    assert config.lr == lr and math.copysign(1, config.lr) == 1
    assert (config.epochs, config.compile, config.recipe) == (epochs, ema, "lars")
