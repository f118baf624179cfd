"""Reading the variables of launchers: whole numbers, whole sets, and no contradictions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from dataset.errors import UserError

MAX_RANKS = 1_000_000


def read_whole(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    """The variable as a whole number, or the default where it is not set."""
    if default is not None and name not in env:
        return default
    text = env[name].strip()
    lowest, highest = _bounds(name)
    is_number = text.isascii() and text.removeprefix("-").isdecimal() and len(text) < 20
    if is_number and lowest <= int(text) <= highest:
        return int(text)
    what = f"in [{lowest}, {highest}]" if is_number else "a whole number"
    raise UserError(f"{name}={env[name][:50]!r} is not {what}; fix or unset it")


def _bounds(name: str) -> tuple[int, int]:
    """The values that a variable can have, by what its name counts."""
    if name == "MASTER_PORT":
        return 1, 65535
    if name.endswith(("SIZE", "NTASKS", "NUM_TASKS", "NUM_NODES")):
        return 1, MAX_RANKS
    return 0, 2**32  # ranks are compared with the size; job ids are 32 bits wide


def require(env: Mapping[str, str], names: Iterable[str], fix: str) -> None:
    """Refuses a set of variables of which some are missing."""
    missing = [name for name in names if name not in env]
    if missing:
        present = [name for name in names if name in env] or ["SLURM_STEP_ID"]
        raise UserError(f"{present[0]} is set but {', '.join(missing)} is not; {fix}")


def check_rank(rank_name: str, rank: int, size_name: str, size: int) -> None:
    """Raises if the rank is not below the number of ranks."""
    if not 0 <= rank < size:
        raise UserError(
            f"{rank_name}={rank} does not fit {size_name}={size}; use one launcher only"
        )


def check_part(part_name: str, part: int, whole_name: str, whole: int) -> None:
    """Refuses more ranks on a node, or more nodes, than there are ranks at all."""
    if part > whole:
        raise UserError(
            f"{part_name}={part} is more than {whole_name}={whole}; use one launcher only"
        )


def check_same(env: Mapping[str, str], name: str, other: str, launcher: str) -> None:
    """Raises if two variables for the same number differ; the launcher sets the second."""
    if name in env and other in env and env[name] != env[other]:
        raise UserError(
            f"{name}={env[name]} contradicts {other}={env[other]}; let {launcher} set the ranks "
            f"and unset {name}, or start torchrun inside"
        )


def check_hint(env: Mapping[str, str], name: str, value: int, other: str) -> None:
    """Raises if a job file's variable contradicts the launcher."""
    if name in env and read_whole(env, name) != value:
        raise UserError(
            f"{name}={env[name]} contradicts {other}={value}; unset {name} in the job file or "
            "make it the number of tasks"
        )
