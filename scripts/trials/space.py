"""The space of a search: which flags of the trainer are searched, and between what."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from dataset.errors import UserError
from dataset.flags import find_kind
from report.search.trials import Param
from train.config import TrainConfig, parse_config

EXAMPLE = "lr=log:0.01..10, label_smoothing=0..0.2, recipe=sgd|lars"
# What a search sets itself, or what changes nothing that is measured.
NOT_SEARCHED = {
    *("data", "output", "resume", "evaluate", "show_recipe", "force", "deadline", "print_freq"),
    *("data_dir", "federation", "token", "index_dir", "tensorboard", "checkpoint_minutes"),
    *("timeout_minutes", "save_model", "stream", "index", "cache_limit", "give_up_after"),
    *("threads", "device", "dummy"),
}
_RANGE = re.compile(r"(log:)?([^.|]+(?:\.[^.|]+)?)\.\.(.+)")
_WORDS = {"true": True, "false": False}

Space = Mapping[str, BaseDistribution]


@dataclasses.dataclass(frozen=True)
class TrainFlag:
    """A flag of the trainer that can be searched."""

    name: str  # the field of TrainConfig
    options: tuple[str, ...]  # what may stand on the command line
    kind: type

    @property
    def option(self) -> str:
        return next(option for option in self.options if option.startswith("--"))


@functools.cache
def searchable_flags() -> Mapping[str, TrainFlag]:
    """Each flag of the trainer that can be searched, by all of its names without their dashes."""
    hints = typing.get_type_hints(TrainConfig)
    flags = {}
    for field in dataclasses.fields(TrainConfig):
        if field.name in NOT_SEARCHED:
            continue
        options = field.metadata["names"] or ("--" + field.name.replace("_", "-"),)
        found = TrainFlag(field.name, options, find_kind(hints[field.name]))
        for name in (field.name, *(option.lstrip("-") for option in options)):
            flags[name] = found
    return flags


def parse_space(text: str) -> dict[str, BaseDistribution]:
    """The space that a text such as EXAMPLE describes, by fields of TrainConfig."""
    known = searchable_flags()
    flags = ", ".join(sorted({flag.name for flag in known.values()}))
    space: dict[str, BaseDistribution] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, values = (word.strip() for word in part.partition("="))
        if not equals or not values:
            raise UserError(f"--space {part!r}: give FLAG=VALUES, such as {EXAMPLE}")
        if name not in known:
            raise UserError(
                f"--space {part!r}: {name} is no flag that can be searched; choose from {flags}"
            )
        flag = known[name]
        if flag.name in space:
            raise UserError(f"--space names {flag.name} twice; give each flag once")
        space[flag.name] = _parse_values(flag, part, values)
    if not space:
        raise UserError(
            f"--space names no flag to search; give some, such as {EXAMPLE!r}; choose from {flags}"
        )
    return space


def _parse_values(flag: TrainFlag, part: str, values: str) -> BaseDistribution:
    if found := _RANGE.fullmatch(values):
        return _parse_range(flag, part, is_log=bool(found[1]), ends=(found[2], found[3]))
    choices = [_parse_choice(flag, part, word.strip()) for word in values.split("|")]
    if len(set(choices)) < 2 or len(set(choices)) < len(choices):
        raise UserError(
            f"--space {part!r}: give at least two different values, as in recipe=sgd|lars"
        )
    return CategoricalDistribution(choices)


def _parse_range(
    flag: TrainFlag, part: str, is_log: bool, ends: tuple[str, str]
) -> BaseDistribution:
    if flag.kind not in (int, float):
        raise UserError(f"--space {part!r}: {flag.name} is no number; list its values: A|B")
    low, high = (_parse_choice(flag, part, end.strip()) for end in ends)
    assert isinstance(low, int | float) and isinstance(high, int | float), (
        "their kind is a number's"
    )
    if not low < high:
        raise UserError(f"--space {part!r}: the first end must be below the second")
    if is_log and low <= 0:
        raise UserError(f"--space {part!r}: a logarithmic range must begin above 0")
    if flag.kind is int:
        return IntDistribution(int(low), int(high), log=is_log)
    return FloatDistribution(low, high, log=is_log)


def _parse_choice(flag: TrainFlag, part: str, word: str) -> Param:
    try:
        if flag.kind is bool:
            return _WORDS[word]
        value = word if flag.kind in (str, Path) else flag.kind(word)
    except (KeyError, ValueError):
        kind = {int: "a whole number", float: "a number", bool: "true or false"}[flag.kind]
        raise UserError(f"--space {part!r}: {word!r} is not {kind}") from None
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"--space {part!r}: {word!r} is not a finite number")
    return typing.cast(Param, value)


def check_space(space: Space, base: Sequence[str]) -> None:
    """Raises for what the trainer would refuse: a value at an end, a choice, a flag set twice."""
    known = searchable_flags()
    given = {word.partition("=")[0] for word in base}
    for name, distribution in space.items():
        if twice := given.intersection(known[name].options):
            raise UserError(
                f"{twice.pop()} is given after -- and in --space; leave one of them out"
            )
        for value in _extremes(distribution):
            parse_config([*base, *to_flags({name: value})])


def _extremes(distribution: BaseDistribution) -> Sequence[Any]:
    if isinstance(distribution, CategoricalDistribution):
        return distribution.choices
    assert isinstance(distribution, FloatDistribution | IntDistribution), "all that _parse makes"
    return distribution.low, distribution.high


def to_flags(params: Mapping[str, Param]) -> list[str]:
    """The parameters of a trial as flags of the trainer; a float keeps all of its digits."""
    flags = searchable_flags()
    words: list[str] = []
    for name, value in params.items():
        if isinstance(value, bool):
            words += [flags[name].option] if value else []
        else:
            words += [flags[name].option, value if isinstance(value, str) else repr(value)]
    return words
