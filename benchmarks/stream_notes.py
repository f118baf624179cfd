"""What a training of benchmarks/stream.py writes down, and its step: a net that takes a fixed time.

Time is the clock that all processes of a machine share. A sample is known by the crc32 of the bytes
that went to the decoder, so a wrong byte is a sample that the set does not have.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

POOLED = 4


def make_net(num_classes: int) -> nn.Module:
    """A net that costs next to nothing: the time of a step is set by hold_step."""
    from torch import nn  # whoever makes notes may not have it yet

    pixels = POOLED * POOLED * 3
    return nn.Sequential(nn.AdaptiveAvgPool2d(POOLED), nn.Flatten(), nn.Linear(pixels, num_classes))


def hold_step(begin_s: float, step_s: float) -> None:
    """Sleeps until a step is as long as it shall be: as if an accelerator computed it."""
    time.sleep(max(0.0, begin_s + step_s - time.monotonic()))


class Notes:
    """Lines of JSON in a file, each appended at once; processes and threads may share it."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115

    def add(self, **note: Any) -> None:
        line = json.dumps(note | {"at_s": time.monotonic()}) + "\n"
        self._file.write(line.encode())


@dataclass(frozen=True)
class Story:
    """What the notes of a training tell: when each step ended, and its samples as last trained."""

    ended_s: dict[int, float]  # by step, from 1; of a step that was done twice, the first
    crcs: dict[int, list[int]]  # by step
    epochs_s: dict[int, float]  # when each epoch ended, from 1, if that was noted
    first_bytes: int  # that the first step needs; 0 if nothing is streamed


def read_story(path: Path) -> Story:
    """The story so far; a line that is being written is left out."""
    ended_s: dict[int, float] = {}
    crcs: dict[int, list[int]] = {}
    ids: dict[int, list[int]] = {}
    crc_of: dict[int, int] = {}
    epochs_s: dict[int, float] = {}
    first_bytes = 0
    text = path.read_text() if path.exists() else ""
    for line in text[: text.rfind("\n") + 1].splitlines():
        note = json.loads(line)
        if "first_bytes" in note:
            first_bytes = first_bytes or note["first_bytes"]
        elif "epoch" in note:
            epochs_s[note["epoch"]] = note["at_s"]
        elif "id" in note:
            crc_of[note["id"]] = note["crc"]
        elif "ids" in note:
            ids[note["loads"]] = note["ids"]
        else:
            ended_s.setdefault(note["step"], note["at_s"])
            if "crcs" in note:
                crcs[note["step"]] = note["crcs"]
    for step, numbers in ids.items():
        crcs[step] = [crc_of.get(number, -1) for number in numbers]
    return Story(ended_s, crcs, epochs_s, first_bytes)
