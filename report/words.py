"""Numbers, times and names as people read them and write them: 1 rank, 2 ranks; 5 minutes."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Iterable
from dataclasses import dataclass

MAX_LABEL_CHARS = 40


def count(number: int, one: str, many: str = "") -> str:
    """`1 run`, `2 runs`; a plural that is no s is given: count(2, "process", "processes")."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


@dataclass(frozen=True)
class TimeUnit:
    """A unit of time with its length in seconds."""

    name: str
    short: str
    seconds: float

    def show(self, seconds: float) -> str:
        """`12.5 min`."""
        return f"{seconds / self.seconds:,.1f} {self.short}"


HOURS, MINUTES, SECONDS = (
    TimeUnit("hours", "h", 3600.0),
    TimeUnit("minutes", "min", 60.0),
    TimeUnit("seconds", "s", 1.0),
)


def choose_unit(seconds: float) -> TimeUnit:
    """Hours where there are two of them, minutes where there are two, else seconds."""
    return next((unit for unit in (HOURS, MINUTES) if seconds >= 2 * unit.seconds), SECONDS)


@dataclass(frozen=True)
class DeviceTime:
    """How a table shows the time of all ranks: `GPU-hours`, `Process-minutes`."""

    heading: str
    unit: TimeUnit

    def show(self, hours: float | None) -> str:
        if hours is None:
            return ""
        value = hours * HOURS.seconds / self.unit.seconds
        return (
            f"{value:,.3g}" if value < 10 else f"{value:,.1f}" if value < 100 else f"{value:,.0f}"
        )


def choose_device_time(devices: Iterable[str], hours: Iterable[float | None]) -> DeviceTime:
    """Hours or, where there is not one, minutes; a rank on a CPU is a process, and no GPU."""
    kinds = {"Process" if device == "cpu" else "GPU" for device in devices}
    kind = kinds.pop() if len(kinds) == 1 else "Device"
    unit = HOURS if max((h or 0.0 for h in hours), default=0.0) >= 1 else MINUTES
    return DeviceTime(f"{kind}-{unit.name}", unit)


def name_sizes(devices: Iterable[str]) -> str:
    """The heading of the column that says how many of them a run had."""
    return "#Processes" if set(devices) == {"cpu"} else "#GPUs"


def to_label(name: str) -> str:
    """A name as a picture can show it: short, and no formula, as matplotlib takes a $ to begin."""
    shown = "".join(c if c.isprintable() else "?" for c in name[: MAX_LABEL_CHARS + 1])
    if len(shown) > MAX_LABEL_CHARS:
        shown = shown[: MAX_LABEL_CHARS - 1] + "…"
    return shown.replace("$", r"\$")


def parse_counts(text: str) -> tuple[int, ...]:
    """The numbers of GPUs that a flag names, such as 1,2,4."""
    try:
        counts = tuple(int(number) for number in text.split(","))
    except ValueError:
        counts = (0,)
    if min(counts) < 1:
        raise ArgumentTypeError(f"{text!r} is not a list of GPU counts such as 1,2,4")
    return counts
