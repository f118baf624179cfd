"""Numbers, times and names as people read them: 1 rank, 2 ranks; 5 minutes, not 0.1 hours."""

from __future__ import annotations

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


def device_hours(device: str) -> str:
    """What the hours of a run are: a rank on a CPU is a process, and no GPU."""
    return "Process-hours" if device == "cpu" else "GPU-hours"


def to_label(name: str) -> str:
    """A name as a picture can show it: short, and no formula, as matplotlib takes a $ to begin."""
    shown = "".join(c if c.isprintable() else "?" for c in name[: MAX_LABEL_CHARS + 1])
    if len(shown) > MAX_LABEL_CHARS:
        shown = shown[: MAX_LABEL_CHARS - 1] + "…"
    return shown.replace("$", r"\$")
