"""What the benchmarks share: their flags, data, interleaved rounds, ratios, tables, the record."""

from __future__ import annotations

import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.machine_load import MachineLoad
from dataset.flags import REQUIRED, flag

T = TypeVar("T")
Table = tuple[str, list[str], list[list[str]]]  # title, header, rows
ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "run_results" / "benchmarks"  # the committed records, which the docs show
LOCAL = RESULTS / "local"  # records of this checkout alone; git ignores them
FACTS = ("command", "commit", "date", "machine", "rounds")  # in every record
PAIRED = """\
Times and rates are medians over the rounds. A ratio is the median of the ratios of the single
rounds, so it can differ from the ratio of the medians; "tie" means that it is above 1 in some
rounds and below 1 in others."""
OF_MEDIANS = "A ratio is that of the two medians shown."
CACHE = ROOT / ".cache" / "benchmarks"
MAX_FOREIGN, MAX_TRIES, QUIET_S = 0.2, 3, 2.0


def interleave(cases: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """The values of each case, round by round, so that a slow minute hits all of them."""
    return interleave_with_shares(cases, rounds)[0]


def interleave_with_shares(
    cases: Mapping[str, Callable[[], T]], rounds: int
) -> tuple[dict[str, list[T]], dict[str, list[float]]]:
    """What interleave() gives, and the share of the cores that others used in each round."""
    values: dict[str, list[T]] = {name: [] for name in cases}
    shares: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(rounds):
        for name, case in cases.items():
            share, value = measure_with_share(case)
            values[name].append(value)
            shares[name].append(round(share, 3))
            print(f"round {number + 1}/{rounds}: {name}: {value}", file=sys.stderr)
    return values, shares


def measure_undisturbed(case: Callable[[], T], servers: Collection[int] = ()) -> T:
    """The case's value, as measure_with_share() finds it."""
    return measure_with_share(case, servers)[1]


def measure_with_share(case: Callable[[], T], servers: Collection[int] = ()) -> tuple[float, T]:
    """(the share of the cores that others used meanwhile, the case's value).

    It is measured again while others use the cores, some times at most; the quietest counts.
    `servers` are processes that work for the case without being started by it.
    """

    def measured() -> tuple[float, T]:
        load = MachineLoad(servers)
        value = case()
        return load.foreign_share(), value

    return repeat_disturbed(measured, lambda pair: pair[0])


def repeat_disturbed(case: Callable[[], T], share_of: Callable[[T], float]) -> T:
    """The least disturbed value of a case that measures by itself what share others had.

    It is measured again while that share is too large, some times at most.
    """
    found: list[T] = []
    for _ in range(MAX_TRIES):
        found.append(case())
        share = share_of(found[-1])
        if share <= MAX_FOREIGN:
            break
        print(f"disturbed: others used {share:.0%} of the cores", file=sys.stderr)
        time.sleep(QUIET_S)
    return min(found, key=share_of)


def describe_disturbance(shares: Iterable[float]) -> str:
    """A note for a row of which others disturbed a round; else nothing."""
    worst = max(shares, default=0.0)
    return f" (disturbed: {worst:.0%})" if worst > MAX_FOREIGN else ""


def median(values: list[float]) -> float:
    return statistics.median(values)


def round_ratios(above: list[float], below: list[float]) -> list[float]:
    """above / below of each round: neighbours in time are compared."""
    return [a / b for a, b in zip(above, below, strict=True)]


def median_ratio(above: list[float], below: list[float]) -> float:
    """The median over the rounds of above / below."""
    return median(round_ratios(above, below))


def is_tie(ratios: list[float]) -> bool:
    """Whether the rounds disagree on which of the two is larger."""
    return min(ratios) < 1 < max(ratios)


def describe_ratio(above: list[float], below: list[float]) -> str:
    """The median of the rounds' ratios, and whether it is a tie."""
    ratios = round_ratios(above, below)
    return f"{median(ratios):.2f}x" + (" (tie)" if is_tie(ratios) else "")


@dataclass(frozen=True, kw_only=True)
class RoundFlags:
    """How often each case is measured."""

    rounds: int = flag(REQUIRED, None)


@dataclass(frozen=True, kw_only=True)
class RecordFlags:
    """Where the record of a benchmark goes."""

    save: bool = flag(False, "write the committed record, run_results/benchmarks/", one_of="place")
    out: Path | None = flag(
        None,
        "write the record there (default run_results/benchmarks/local, ignored by git)",
        metavar="DIR",
        one_of="place",
    )

    @property
    def folder(self) -> Path:
        return self.out or (RESULTS if self.save else LOCAL)


@dataclass(frozen=True, kw_only=True)
class BenchFlags(RecordFlags, RoundFlags):
    """The flags of most benchmarks; each gives `rounds` its own default."""


def rounds_flag(default: int) -> Any:
    """The field `rounds` of a benchmark."""
    return flag(default, f"default {default}")


def measure_beside_service(module: str, *words: object) -> Any:
    """The answer of a measuring process, which starts the service that it needs and stops it.

    It lives with the service (`python -m tests.cluster...`) and writes JSON to a file.
    """
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        command = [sys.executable, "-m", module, str(answer), *map(str, words)]
        process = subprocess.Popen(command, cwd=ROOT)
        try:
            code = process.wait()
        except KeyboardInterrupt:  # it heard the Ctrl-C as well, and stops the service
            process.wait()
            raise
        if code != 0:
            raise SystemExit(code)  # it has said why
        return json.loads(answer.read_text())


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


def report(
    name: str,
    result: dict[str, Any],
    tables: Callable[[dict[str, Any]], list[Table]],
    flags: RecordFlags,
) -> int:
    """Prints the tables of a result and writes its record; returns the exit code."""
    for table in tables(result):
        print_table(*table)
    print("\nwritten to", write_result(name, result, flags))
    return 0


def write_result(name: str, result: dict[str, Any], flags: RecordFlags) -> Path:
    """The path of the record: the result as JSON with FACTS."""
    flags.folder.mkdir(parents=True, exist_ok=True)
    path = flags.folder / f"{name}.json"
    record = result | make_facts()
    missing = [fact for fact in FACTS if record.get(fact) is None]
    assert not (flags.save and missing), f"{name}: no {missing}"
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(record, indent=1) + "\n")
    part.replace(path)
    return path


def make_facts() -> dict[str, Any]:
    """The command, the commit, the date and the machine."""
    machine = {"cpus": os.cpu_count(), "machine": platform.machine(), "processor": _processor()}
    date = time.strftime("%Y-%m-%d")
    return {"command": _command(), "commit": find_commit(), "date": date, "machine": machine}


def describe_source(result: dict[str, Any]) -> str:
    """Where, when and how a record was made."""
    machine = result["machine"]
    where = f"Measured on {machine['cpus']} cores of {machine['processor']}"
    if "commit" not in result:  # a record of before
        return f"{where}, before records named their commit."
    when = f"{where} on {result['date']} at commit {result['commit']} with"
    return f"{when}\n`{result['command']}`."


def _command() -> str:
    spec = sys.modules["__main__"].__spec__
    if spec is not None:
        return shlex.join(["python", "-m", spec.name, *sys.argv[1:]])
    return shlex.join(["python", os.path.relpath(sys.argv[0], ROOT), *sys.argv[1:]])


def find_commit(root: Path = ROOT) -> str | None:
    """The commit of the code that runs, "-dirty" where tracked files differ; None without git.

    Records and docs do not count: a batch of benchmarks writes its records one after the other.
    """
    commit = _ask_git(root, "rev-parse", "--short=12", "HEAD")
    not_code = (":(exclude)run_results", ":(exclude)docs")
    changed = _ask_git(root, "status", "--porcelain", "-uno", "--", ".", *not_code)
    return f"{commit}-dirty" if commit and changed else commit


def _ask_git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", root, *arguments], capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
