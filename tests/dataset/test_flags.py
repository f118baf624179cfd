"""Flags from a dataclass: what argparse is told, and what comes back."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from dataset.errors import UserError, run_command
from dataset.flags import REQUIRED, flag, flags_of, make_parser, parse_flags


@dataclass(frozen=True)
class Limits:
    memory: str = flag("4G", "default 4G")
    time_s: int | None = flag(None, "seconds")


@dataclass(frozen=True, kw_only=True)
class Command:
    files: tuple[Path, ...] = flag(REQUIRED, "what to read", "FILE", nargs="+")
    out: Path = flag(REQUIRED, "where to write")
    rate: float = flag(0.5, "default 0.5", "-r", "--rate")
    kind: str = flag("md", "default md", choices=("md", "csv"))
    quiet: bool = flag(False, "say nothing", one_of="voice")
    loud: bool = flag(False, "say all", one_of="voice")
    tags: tuple[str, ...] = flag((), "words", nargs="*")
    limits: Limits = flags_of(Limits, "limits of the job")

    def __post_init__(self) -> None:
        if self.rate < 0:
            raise UserError(f"--rate {self.rate}: must be 0 or more")


def parse(*words: str, intermixed: bool = False) -> Command:
    return parse_flags(Command, make_parser("text"), words, intermixed=intermixed)


def test_defaults_are_those_of_the_fields() -> None:
    command = parse("a", "--out", "o")
    assert command == Command(files=(Path("a"),), out=Path("o"))


def test_every_value_has_the_type_of_its_field() -> None:
    words = ["a", "b", "--out", "o", "-r", "2", "--quiet", "--kind", "csv"]
    command = parse(*words, "--tags", "x", "y", "--time-s", "7", "--memory", "1G")
    assert command.files == (Path("a"), Path("b"))
    assert (command.rate, command.kind, command.quiet, command.loud) == (2.0, "csv", True, False)
    assert command.tags == ("x", "y")
    assert command.limits == Limits("1G", 7)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a"], "the following arguments are required: --out"),
        (["--out", "o"], "the following arguments are required: FILE"),
        (["a", "--out", "o", "--rate", "x"], "argument -r/--rate: invalid float value: 'x'"),
        (["a", "--out", "o", "--kind", "x"], "argument --kind: invalid choice: 'x'"),
        (["a", "--out", "o", "--quiet", "--loud"], "argument --loud: not allowed with argument"),
    ],
)
def test_a_wrong_flag_is_one_line_and_exit_2(
    words: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.argv", ["scripts/name.py"])
    assert run_command(lambda: bool(parse(*words))) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {message}")
    assert line.endswith("; name.py --help lists the flags")


def test_the_checks_of_the_dataclass_are_made() -> None:
    with pytest.raises(UserError, match=r"--rate -1\.0: must be 0 or more"):
        parse("a", "--out", "o", "--rate=-1")


def test_flags_may_stand_between_arguments_where_that_is_asked_for() -> None:
    command = parse("a", "--out", "o", "b", intermixed=True)
    assert command.files == (Path("a"), Path("b"))


def test_a_group_has_its_own_part_of_the_help() -> None:
    parser = make_parser("text", "example")
    parse_flags(Command, parser, ["a", "--out", "o"])
    page = parser.format_help()
    assert "limits of the job:\n  --memory MEMORY" in page
    assert "[--quiet | --loud]" in page
    assert page.endswith("example\n")


def test_metavars_by_type_come_with_the_defaults() -> None:
    parser = make_parser("text")
    metavars: dict[type, str] = {Path: "PATH", float: "X", str: "NAME", int: "N"}
    parse_flags(Command, parser, ["a", "--out", "o"], metavars=metavars)
    page = " ".join(parser.format_help().split())
    assert "--out PATH where to write" in page
    assert "--rate X default 0.5 (default 0.5)" in page
    assert page.endswith("--time-s N seconds")
