"""How long from `python -m train` to the first optimiser step, from a folder and from a tar?

    python benchmarks/time_to_first_step.py --rounds 3

resnet50 at 224 px, 8 images, two threads, a warm page cache. Python itself says how long imports
take (PYTHONPROFILEIMPORTTIME); then comes the preparation (data, index, model, records), until the
trainer says that it starts, then the first batch and step.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.bench import (
    CACHE,
    ROOT,
    BenchFlags,
    Table,
    describe_ratio,
    interleave,
    make_data,
    median,
    report,
    rounds_flag,
)
from dataset.errors import run_command
from dataset.flags import flag, make_parser, parse_flags

ARCH, BATCH = "resnet50", 8
STARTS, STEPPED = " in microbatches of ", "step 1/"  # in the trainer's lines
USUAL = "tar with index"
PARTS = ("imports", "preparation", "first batch and step")


@dataclass(frozen=True, kw_only=True)
class FirstStepFlags(BenchFlags):
    """The flags of benchmarks/time_to_first_step.py."""

    rounds: int = rounds_flag(3)
    images_per_class: int = flag(160, "of 8 classes")


def main() -> int:
    flags = parse_flags(FirstStepFlags, make_parser(__doc__))
    folder = make_data(8, flags.images_per_class, flags.images_per_class // 2, "500x375")
    tar = folder / "ILSVRC2012_img_train.tar"
    cases = {
        "folder": partial(time_start, folder, True),
        USUAL: partial(time_start, tar, True),
        "tar without index": partial(time_start, tar, False),
    }
    time_start(tar, True)  # warms the caches
    result: dict[str, Any] = {"arch": ARCH, "batch": BATCH, "rounds": flags.rounds}
    result |= {"images": 12 * flags.images_per_class, "parts_s": interleave(cases, flags.rounds)}
    print("\n" + name_largest(result))
    return report("time_to_first_step", result, tables, flags)


def time_start(data: Path, has_index: bool) -> list[float]:
    """Seconds of PARTS, to the line of the first step; the run is then ended."""
    if not has_index:
        for index in data.parent.glob("*.index"):
            index.unlink()
    output = CACHE / "time_to_first_step"
    shutil.rmtree(output, ignore_errors=True)
    command = [sys.executable, "-m", "train", str(data), "-a", ARCH, "-b", str(BATCH), "-p", "1"]
    command += ["-j", "1", "--threads", "2", "--device", "cpu", "--output", str(output)]
    env = os.environ | {"PYTHONPROFILEIMPORTTIME": "1"}
    marks_s = [time.perf_counter()]
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True, env=env
        ) as run,
    ):
        assert run.stdout is not None
        for line in run.stdout:
            if (STARTS, STEPPED)[len(marks_s) - 1] in line:
                marks_s.append(time.perf_counter())
            if len(marks_s) == 3:
                break
        run.kill()
        errors.seek(0)
        log = errors.read()
    if len(marks_s) < 3:
        raise RuntimeError(f"no first step: {' '.join(command)}\n{log[-2000:]}")
    imports_s = seconds_of_import(log, "train.run")
    start_s, step_s = marks_s[1] - marks_s[0], marks_s[2] - marks_s[1]
    return [imports_s, start_s - imports_s, step_s]


def seconds_of_import(log: str, module: str) -> float:
    """What Python said of a module and all that it imports."""
    found = re.search(rf"import time: +\d+ \| +(\d+) \| +{re.escape(module)}$", log, re.MULTILINE)
    assert found, log[-2000:]
    return int(found[1]) / 1e6


def parts_of(result: dict[str, Any], name: str) -> list[float]:
    """The median seconds of PARTS."""
    return [median(list(column)) for column in zip(*result["parts_s"][name], strict=True)]


def name_largest(result: dict[str, Any]) -> str:
    """What dominates, of the usual way: a tar with its index."""
    parts = dict(zip(PARTS, parts_of(result, USUAL), strict=True))
    largest = max(parts, key=parts.__getitem__)
    share = parts[largest] / sum(parts.values())
    return f"What dominates: {largest}, {share:.0%} of the start from a tar with an index."


def tables(result: dict[str, Any]) -> list[Table]:
    """Seconds to the first step by source, and their parts."""
    totals_s = {name: [sum(parts) for parts in runs] for name, runs in result["parts_s"].items()}
    rows = []
    for name, seconds in totals_s.items():
        ratio = describe_ratio(seconds, totals_s["folder"]) if name != "folder" else ""
        parts = [f"{part_s:.2f}" for part_s in parts_of(result, name)]
        rows.append([name, f"{median(seconds):.2f}", ratio, *parts])
    title = (
        f"{result['arch']} at 224 px, batch {result['batch']}, {result['images']} images, "
        f"median of {result['rounds']} rounds"
    )
    header = ["source", "s to the first step", "against the folder", *[f"{p}, s" for p in PARTS]]
    return [(title, header, rows)]


if __name__ == "__main__":
    sys.exit(run_command(main))
