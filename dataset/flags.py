"""The flags of a command, made from the fields of its frozen dataclass: one field, one flag."""

from __future__ import annotations

import argparse
import dataclasses
import re
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from dataset.errors import UserError

T = TypeVar("T")
REQUIRED = dataclasses.MISSING  # as a default: the flag must be given
_NOT_ARGPARSE = ("names", "group", "one_of")


def flag(default: Any, text: str | None, *names: str, **options: Any) -> Any:
    """A field and its flag, of the field's type; --like-the-field unless names are given.

    A name without a dash makes a positional argument, shown by that name. `options` are those of
    argparse's add_argument, and two more: `group` is the title of the part of the help that the
    flag stands in, `one_of` a word that flags share of which only one may be given.
    """
    return dataclasses.field(default=default, metadata={"help": text, "names": names, **options})


def flags_of(config: type, title: str) -> Any:
    """A field that is a dataclass of flags itself: a part of the help with its own title."""
    return dataclasses.field(default_factory=config, metadata={"group": title})


def parse_duration(name: str, text: str) -> float:
    """Seconds of '90', '30m', '6h' or '2d', the value of a flag of this name."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text.strip())
    if not match:
        raise UserError(f"{name} {text!r}: give seconds, or 30m, 6h, 2d")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]


def parse_size(name: str, text: str) -> int:
    """Bytes of '500MB', '20GB' or '20GiB', the value of a flag of this name."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kMGT]i?)?B?", text.strip())
    if not match:
        raise UserError(f"{name} {text!r}: give a size such as 500MB, 20GB or 20GiB")
    unit = match[2] or ""
    base = 1024 if unit.endswith("i") else 1000
    return int(float(match[1]) * base ** " kMGT".index(unit[:1] or " "))


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong with the flags in one line, without the usage of all of them."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; {self.prog} --help lists the flags")


def make_parser(
    description: str | None, example: str | None = None, *, prog: str | None = None
) -> OneLineParser:
    """A parser whose help shows both texts as they are written; `prog`: not the script's name."""
    raw = argparse.RawDescriptionHelpFormatter
    return OneLineParser(prog, description=description, epilog=example, formatter_class=raw)


def parse_flags(
    config: type[T],
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None = None,
    *,
    intermixed: bool = False,
    metavars: Mapping[type, str] | None = None,
) -> T:
    """The command line as the dataclass; `intermixed`: flags may stand between arguments.

    With `metavars`, by type, each flag shows its metavar, and its default at the end of its help.
    """
    _add_flags(parser, config, metavars)
    parse = parser.parse_intermixed_args if intermixed else parser.parse_args
    made: T = _build(config, vars(parse(arguments)))
    return made


def split_words(words: list[str]) -> tuple[list[str], list[str]]:
    """The words before -- (ours), and those after it (another command's)."""
    if "--" not in words:
        return words, []
    cut = words.index("--")
    return words[:cut], words[cut + 1 :]


def _add_flags(
    parser: argparse._ActionsContainer, config: Any, metavars: Mapping[type, str] | None
) -> None:
    hints = typing.get_type_hints(config)
    places: dict[str, argparse._ActionsContainer] = {}
    for spec in dataclasses.fields(config):
        title, shared = spec.metadata.get("group"), spec.metadata.get("one_of")
        place = parser
        if title is not None:
            place = places[title] = places.get(title) or parser.add_argument_group(title)
        elif shared is not None:
            place = places[shared] = places.get(shared) or parser.add_mutually_exclusive_group()
        if dataclasses.is_dataclass(hints[spec.name]):
            _add_flags(place, hints[spec.name], metavars)
        else:
            _add_flag(place, spec, hints[spec.name], metavars)


def _add_flag(
    place: argparse._ActionsContainer,
    spec: dataclasses.Field[Any],
    hint: Any,
    metavars: Mapping[type, str] | None,
) -> None:
    options = {name: value for name, value in spec.metadata.items() if name not in _NOT_ARGPARSE}
    names: tuple[str, ...] = spec.metadata["names"]
    if spec.default is not REQUIRED:
        options["default"] = spec.default
    kind = find_kind(hint)
    if kind is not bool and "type" not in options:
        options["type"] = kind
    if names and not names[0].startswith("-"):
        place.add_argument(spec.name, metavar=names[0], **options)
        return
    names = names or ("--" + spec.name.replace("_", "-"),)
    if kind is bool:
        place.add_argument(*names, dest=spec.name, action="store_true", **options)
        return
    if metavars is not None:
        if "choices" not in options:
            options.setdefault("metavar", metavars[kind])
        if hint is kind and spec.default not in (REQUIRED, ""):
            options["help"] += f" (default {spec.default})"
    place.add_argument(*names, dest=spec.name, required=spec.default is REQUIRED, **options)


def find_kind(hint: Any) -> Any:
    """The type of one value: int of `int`, of `int | None` and of `tuple[int, ...]`."""
    if isinstance(hint, types.UnionType):
        hint = next(arm for arm in typing.get_args(hint) if arm is not type(None))
    return typing.get_args(hint)[0] if typing.get_origin(hint) is tuple else hint


def _build(config: Any, values: Mapping[str, Any]) -> Any:
    hints = typing.get_type_hints(config)
    made = {}
    for name in (spec.name for spec in dataclasses.fields(config)):
        if dataclasses.is_dataclass(hints[name]):
            made[name] = _build(hints[name], values)
        else:
            made[name] = tuple(values[name]) if isinstance(values[name], list) else values[name]
    return config(**made)
