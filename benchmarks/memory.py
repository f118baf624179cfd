"""Does a rank's memory grow? The RSS of a rank and of its workers at the end of every epoch.

    python benchmarks/memory.py --epochs 20

resnet18 at 64 px from the tar, with a checkpoint and a validation every epoch: once with the JPEG
kernel (decoding threads), once with Pillow (two worker processes). Growth is the median of the last
quarter of the epochs over that of the second quarter.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.bench import CACHE, ROOT, RecordFlags, Table, make_data, median, report
from dataset.errors import run_command
from dataset.flags import flag, make_parser, parse_flags

DECODERS = {"kernel": "kernel, 2 threads", "pil": "Pillow, 2 worker processes"}
VALIDATED = ": val acc1"  # in the trainer's line of an epoch
TARGET = 1.05


@dataclass(frozen=True, kw_only=True)
class MemoryFlags(RecordFlags):
    """The flags of benchmarks/memory.py."""

    epochs: int = flag(20, None)


def main() -> int:
    flags = parse_flags(MemoryFlags, make_parser(__doc__))
    data = make_data(8, 32, 16, "500x375") / "ILSVRC2012_img_train.tar"
    result: dict[str, Any] = {"rounds": 1, "epochs": flags.epochs, "rss_mb": {}}
    for decoder, name in DECODERS.items():
        result["rss_mb"][name] = watch_run(data, decoder, flags.epochs)
    return report("memory", result, tables, flags)


def watch_run(data: Path, decoder: str, epochs: int) -> dict[str, list[float]]:
    """MB of the rank, and of its workers together, at the end of every epoch."""
    output = CACHE / "memory"
    shutil.rmtree(output, ignore_errors=True)
    command = [sys.executable, "-m", "train", str(data), "-a", "resnet18", "-b", "16"]
    command += ["--image-size", "64", "--epochs", str(epochs), "-j", "2", "--threads", "1"]
    command += ["--device", "cpu", "--decoder", decoder, "--output", str(output)]
    found: dict[str, list[float]] = {"rank": [], "workers": []}
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        for line in run.stdout:
            if VALIDATED in line:
                found["rank"].append(rss_mb(run.pid))
                found["workers"].append(sum(rss_mb(pid) for pid in children_of(run.pid)))
                print(line.strip(), {k: round(v[-1]) for k, v in found.items()}, file=sys.stderr)
    assert run.returncode == 0, run.returncode
    return found


def rss_mb(pid: int) -> float:
    """Resident memory of a process, 0 when it has just ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


def children_of(pid: int) -> list[int]:
    """The processes that a process has started, from any of its threads."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def growth(values: list[float]) -> float | None:
    """The last quarter against the second, None where there is nothing."""
    quarter = max(1, len(values) // 4)
    before = median(values[quarter : 2 * quarter])
    return median(values[-quarter:]) / before if before else None


def tables(result: dict[str, Any]) -> list[Table]:
    """MB early and late, and their ratio."""
    rows = []
    for name, series in result["rss_mb"].items():
        for process, values in series.items():
            ratio = growth(values)
            if ratio is None:
                continue
            ends = [f"{values[0]:.0f}", f"{values[len(values) // 2]:.0f}", f"{values[-1]:.0f}"]
            rows.append([f"{name}: {process}", *ends, f"{ratio:.3f}", f"at most {TARGET}"])
    title = f"resnet18 at 64 px, {result['epochs']} epochs, RSS in MB after an epoch"
    return [(title, ["process", "first", "middle", "last", "growth", "target"], rows)]


if __name__ == "__main__":
    sys.exit(run_command(main))
