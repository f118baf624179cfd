"""What the benchmarks of the trainer share: data, interleaved rounds, medians, a table, a JSON."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.load import Load
from train.records.recorder import current_commit

T = TypeVar("T")
Table = tuple[str, list[str], list[list[str]]]  # title, header, rows
ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "run_results" / "benchmarks"
CACHE = ROOT / ".cache" / "benchmarks"
MAX_FOREIGN, MAX_TRIES, QUIET_S = 0.2, 3, 2.0


def interleave(cases: dict[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """The values of each case, round by round, so that a slow minute hits all of them."""
    values: dict[str, list[T]] = {name: [] for name in cases}
    for number in range(rounds):
        for name, case in cases.items():
            values[name].append(measure_undisturbed(case))
            print(f"round {number + 1}/{rounds}: {name}: {values[name][-1]}", file=sys.stderr)
    return values


def measure_undisturbed(case: Callable[[], T], servers: Collection[int] = ()) -> T:
    """The case's value; it is measured again while others use the cores, some times at most.

    `servers` are processes that work for the case without being started by it.
    """
    found: list[tuple[float, T]] = []
    for _ in range(MAX_TRIES):
        load = Load(servers)
        value = case()
        found.append((load.foreign_share(), value))
        if found[-1][0] <= MAX_FOREIGN:
            break
        print(f"disturbed: others used {found[-1][0]:.0%} of the cores", file=sys.stderr)
        time.sleep(QUIET_S)
    return min(found, key=lambda pair: pair[0])[1]


def median(values: list[float]) -> float:
    return statistics.median(values)


def median_ratio(above: list[float], below: list[float]) -> float:
    """The median over the rounds of above / below: neighbours in time are compared."""
    return median([a / b for a, b in zip(above, below, strict=True)])


def make_parser(text: str | None) -> argparse.ArgumentParser:
    """The parser of a benchmark: its help is the text at the top of its file, example included."""
    return argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def make_data(classes: int, train_per_class: int, val_per_class: int, size: str) -> Path:
    """A fake ImageNet with both halves, as tars and extracted, made once and kept."""
    folder = CACHE / f"data-{classes}-{train_per_class}-{val_per_class}-{size}"
    made = ["--out", str(folder), "--classes", str(classes), "--size", size]
    made += ["--train-per-class", str(train_per_class), "--val-per-class", str(val_per_class)]
    run_script("make_fake_imagenet.py", *made)
    if not (folder / "val").is_dir():
        tars = ["--train_tar", str(folder / "ILSVRC2012_img_train.tar")]
        tars += ["--val_tar", str(folder / "ILSVRC2012_img_val.tar"), "--run_type", "all"]
        tars += ["--valprep_script", str(folder / "valprep.sh"), "--num_threads", "2"]
        run_script("extract_ILSVRC_mp.py", *tars, "--output_dir", str(folder))
    return folder


def run_script(name: str, *arguments: str) -> None:
    command = [sys.executable, str(ROOT / "scripts" / name), *arguments]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def print_table(title: str, header: list[str], rows: list[list[str]]) -> None:
    """A Markdown table on standard output."""
    print("\n" + format_table(title, header, rows))


def format_table(title: str, header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table under its title."""
    lines = [title, "", "| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def write_result(name: str, result: dict[str, Any]) -> Path:
    """The result as JSON, with the command, the commit, the date and the machine."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    command = shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    machine = {"cpus": os.cpu_count(), "machine": platform.machine(), "processor": _processor()}
    source = {"command": command, "commit": current_commit(), "date": time.strftime("%Y-%m-%d")}
    path.write_text(json.dumps(result | {"machine": machine} | source, indent=1) + "\n")
    return path


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
