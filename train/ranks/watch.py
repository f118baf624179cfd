"""Which rank is missing when all stand still, judged from their heartbeats by a thread of each.

The main thread cannot do it. On a GPU it is blocked in a full launch queue until NCCL's own
timeout aborts the process, without saying which rank was missing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

LOST_AFTER_S = 30.0  # a busy machine may keep a living rank silent for some seconds
READING = "reading data"


@dataclass(frozen=True)
class Beat:
    """How far a rank is, what it is doing, and a stamp that changes while it is alive."""

    progress: int
    doing: str
    stamp: str

    def pack(self) -> str:
        return f"{self.progress}|{self.doing}|{self.stamp}"


Beats = Sequence[Beat]  # by rank


def unpack_beat(raw: bytes) -> Beat:
    progress, doing, stamp = raw.decode().split("|")
    return Beat(int(progress), doing, stamp)


class Judge:
    """Compares the heartbeats of all ranks while its own rank stands still; names the missing."""

    def __init__(self, timeout_s: float, standstill_s: float | None) -> None:
        self._timeout_s = timeout_s
        self._standstill_s = standstill_s
        self._look_every_s = min(LOST_AFTER_S, timeout_s / 2)
        self._progress = -1
        self._since_s = self._looked_s = 0.0
        self._first: Beats = ()
        self._last: Beats = ()

    def judge(self, now_s: float, progress: int, read_beats: Callable[[], Beats]) -> str:
        """What is wrong, or an empty string; called at every heartbeat of its own rank."""
        if progress != self._progress:
            self._progress, self._since_s, self._looked_s = progress, now_s, now_s
            self._first = self._last = ()
        if now_s - self._looked_s < self._look_every_s:
            return ""
        self._looked_s = now_s
        before, self._last = self._last, read_beats()
        self._first = self._first or self._last
        silent = name_silent(before, self._last) if before else ""
        return silent or self._name_hanging(now_s)

    def _name_hanging(self, now_s: float) -> str:
        stands_still_s = now_s - self._since_s
        if stands_still_s < self._timeout_s:
            return ""
        pairs = zip(self._first, self._last, strict=True)
        moved = {rank for rank, (old, new) in enumerate(pairs) if old.progress < new.progress}
        if behind := name_behind(self._last, moved):
            return behind
        all_compute = not any(beat.doing == READING for beat in self._last)
        if self._standstill_s is None or moved or not all_compute:
            return ""
        if stands_still_s < self._standstill_s:
            return ""
        return (
            f"no rank made progress in {stands_still_s:.0f} s, but all of them answer: a GPU or "
            "the network between them hangs (NCCL_DEBUG=INFO shows more)"
        )


def name_silent(before: Beats, now: Beats) -> str:
    """The ranks without a new heartbeat since an earlier look, or an empty string."""
    pairs = zip(before, now, strict=True)
    names = ", ".join(f"rank {rank}" for rank, (old, new) in enumerate(pairs) if old == new)
    return f"lost contact with {names}" if names else ""


def name_behind(beats: Beats, moving: set[int] | frozenset[int] = frozenset()) -> str:
    """The ranks that are behind the furthest one, or an empty string."""
    furthest = max(beat.progress for beat in beats)
    names = [
        f"rank {rank} ({beat.doing})"
        for rank, beat in enumerate(beats)
        if beat.progress < furthest and rank not in moving
    ]
    if not names:
        return ""
    return f"{', '.join(names)} hangs: it answers, but is behind the others"
