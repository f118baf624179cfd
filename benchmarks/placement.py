"""What does it cost to bring the data to the jobs? Five placements of the same small grid study.

    python benchmarks/placement.py --jobs 8 --slots 2

As the WORKS'21 study did: each job fetches and extracts for itself (baseline); the environment is
already on the worker (from here on); one folder that all jobs share; jobs clustered on one staged
copy; and the tar in place, which that study did not have. A job reads and decodes every training
image once and sends a result back. All transfers share one link of --link-mb-s. This machine's disk
stands for the shared folder, so what a network file system costs its readers is not in the numbers;
a tar of --environment-mb with many small files stands for the environment.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from argparse import SUPPRESS
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.bench import (
    ROOT,
    BenchFlags,
    Table,
    describe_ratio,
    make_data,
    median,
    report,
    rounds_flag,
)
from benchmarks.slow_server import serve_folder
from dataset.errors import run_command
from dataset.flags import flag, make_parser, parse_flags

TARS = ("ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar", "valprep.sh")
ENVIRONMENT = "environment.tar"
NUM_CLASSES = 8


@dataclass
class Costs:
    """Seconds summed over all jobs, what was moved, and the wall clock of the whole."""

    stage_in_s: float = 0.0
    compute_s: float = 0.0
    stage_out_s: float = 0.0
    makespan_s: float = 0.0
    bytes_moved: int = 0
    files_made: int = 0

    def add(self, other: Costs) -> None:
        for name in vars(self):
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass(frozen=True)
class PlacementStudy:
    """What all placements share."""

    url: str
    work: Path
    jobs: int
    slots: int
    result_bytes: int

    def stage_in(self, folder: Path, names: tuple[str, ...], extract: bool) -> Costs:
        """Fetches files over the link into a folder and unpacks them, as a job does."""
        begin_s = time.monotonic()
        run_script("fetch_osdf.py", *[f"{self.url}/{name}" for name in names], "--out", folder)
        if ENVIRONMENT in names:
            with tarfile.open(folder / ENVIRONMENT) as tar:
                tar.extractall(folder / "environment", filter="data")
        if extract:
            flags: list[str | Path] = [
                "--train_tar",
                folder / TARS[0],
                "--val_tar",
                folder / TARS[1],
            ]
            flags += ["--valprep_script", folder / TARS[2], "--output_dir", folder]
            run_script("extract_ILSVRC_mp.py", *flags, "--num_threads", "1", "--run_type", "all")
        elif TARS[0] in names:
            run_script("index_tar.py", folder / TARS[0])
        num_files = sum(path.is_file() for path in folder.rglob("*"))
        return Costs(stage_in_s=time.monotonic() - begin_s, files_made=num_files)

    def compute(self, data: Path, folder: Path) -> Costs:
        """The work of one job, and its result on the way back."""
        begin_s = time.monotonic()
        command = [sys.executable, __file__, "--job", str(data)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        end_s = time.monotonic()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "model.pt").write_bytes(bytes(self.result_bytes))
        (self.work / "results").mkdir(exist_ok=True)
        shutil.copy(folder / "model.pt", self.work / "results" / f"{folder.name}.pt")
        return Costs(0.0, end_s - begin_s, time.monotonic() - end_s, 0.0, self.result_bytes, 1)

    def in_slots(self, tasks: list[Callable[[], Costs]]) -> Costs:
        """The costs of tasks that run as many at a time as there are slots."""
        total = Costs()
        with ThreadPoolExecutor(self.slots) as pool:
            for costs in pool.map(lambda task: task(), tasks):
                total.add(costs)
        return total


def alone(study: PlacementStudy, names: tuple[str, ...]) -> Costs:
    """Each job fetches and extracts for itself, and cleans up."""

    def job(number: int) -> Costs:
        folder = study.work / f"job{number}"
        costs = study.stage_in(folder, names, extract=True)
        costs.add(study.compute(folder, folder / f"out{number}"))
        shutil.rmtree(folder)
        return costs

    return study.in_slots([partial(job, number) for number in range(study.jobs)])


def shared(study: PlacementStudy, extract: bool) -> Costs:
    """One copy is staged for all, extracted or as the tar that it came as."""
    folder = study.work / "shared"
    total = study.stage_in(folder, TARS, extract)
    outputs = [study.work / f"job{number}" for number in range(study.jobs)]
    total.add(study.in_slots([partial(study.compute, folder, output) for output in outputs]))
    return total


def clustered(study: PlacementStudy) -> Costs:
    """One larger job a slot: it stages once and does the work of many."""

    def cluster(slot: int) -> Costs:
        folder = study.work / f"cluster{slot}"
        costs = study.stage_in(folder, TARS, extract=True)
        for number in range(slot, study.jobs, study.slots):
            costs.add(study.compute(folder, study.work / f"job{number}"))
        return costs

    return study.in_slots([partial(cluster, slot) for slot in range(study.slots)])


PLACEMENTS: dict[str, Callable[[PlacementStudy], Costs]] = {
    "each job for itself (baseline)": lambda study: alone(study, (*TARS, ENVIRONMENT)),
    "environment on the worker": lambda study: alone(study, TARS),
    "shared folder": lambda study: shared(study, extract=True),
    "clustered on one copy": clustered,
    "tar in place": lambda study: shared(study, extract=False),
}


@dataclass(frozen=True, kw_only=True)
class PlacementFlags(BenchFlags):
    """The flags of benchmarks/placement.py."""

    rounds: int = rounds_flag(3)
    jobs: int = flag(8, None)
    slots: int = flag(2, "jobs that run at once")
    images_per_class: int = flag(50, f"of {NUM_CLASSES} classes")
    link_mb_s: float = flag(50.0, "of all transfers together")
    environment_mb: float = flag(50.0, "about what the data weighs")
    result_mb: float = flag(10.0, None)
    job: Path | None = flag(None, SUPPRESS)


def main() -> int:
    flags = parse_flags(PlacementFlags, make_parser(__doc__))
    if flags.job is not None:
        print(decode_all(flags.job))
        return 0
    data = make_data(NUM_CLASSES, flags.images_per_class, 10, "500x375")
    make_environment(data / ENVIRONMENT, flags.environment_mb)
    results: dict[str, list[Costs]] = {name: [] for name in PLACEMENTS}
    for number in range(flags.rounds):
        for name, place in PLACEMENTS.items():
            results[name].append(measure(place, data, flags))
            seconds = results[name][-1].makespan_s
            print(f"round {number + 1}/{flags.rounds}: {name}: {seconds:.1f} s", file=sys.stderr)
    settings = {k: v for k, v in vars(flags).items() if k not in ("job", "rounds", "save", "out")}
    costs = {name: [vars(found) for found in rounds] for name, rounds in results.items()}
    result = {"rounds": flags.rounds, "settings": settings, "costs": costs}
    return report("placement", result, tables, flags)


def measure(place: Callable[[PlacementStudy], Costs], data: Path, flags: PlacementFlags) -> Costs:
    """One placement from an empty disk to the last result."""
    with (
        tempfile.TemporaryDirectory(prefix="placement-") as work,
        serve_folder(data, flags.link_mb_s * 1e6) as link,
    ):
        study = PlacementStudy(
            link.url, Path(work), flags.jobs, flags.slots, int(flags.result_mb * 1e6)
        )
        begin_s = time.monotonic()
        costs = place(study)
        costs.makespan_s = time.monotonic() - begin_s
        costs.bytes_moved += link.num_sent()
    return costs


def tables(result: dict[str, Any]) -> list[Table]:
    """The medians, and the makespan against the baseline of the same round."""
    makespans = {n: [run["makespan_s"] for run in runs] for n, runs in result["costs"].items()}
    baseline = next(iter(makespans))
    rows = []
    for name, runs in result["costs"].items():
        middle = {key: median([float(run[key]) for run in runs]) for key in runs[0]}
        ratio = describe_ratio(makespans[baseline], makespans[name]) if name != baseline else ""
        seconds = [f"{middle[key]:.1f}" for key in ("stage_in_s", "compute_s")]
        seconds += [f"{middle['stage_out_s']:.2f}", f"{middle['makespan_s']:.1f}"]
        moved = [f"{middle['bytes_moved'] / 1e6:.0f}", f"{middle['files_made']:.0f}"]
        rows.append([name, *seconds, ratio, *moved])
    header = ["placement", "stage-in (s)", "compute (s)", "stage-out (s)", "makespan (s)"]
    header += ["faster", "MB moved", "files made"]
    had = result["settings"]
    title = (
        f"{had['jobs']} jobs on {had['slots']} slots over one link of {had['link_mb_s']:g} MB/s; "
        f"a job decodes {NUM_CLASSES * had['images_per_class']} images once; "
        f"medians of {result['rounds']} rounds"
    )
    return [(title, header, rows)]


def decode_all(folder: Path) -> int:
    """Decodes every training image, from the class folders or straight from the tar."""
    from PIL import Image

    if (folder / "train").is_dir():
        files = sorted((folder / "train").rglob("*.JPEG"))
        return sum(Image.open(path).convert("RGB").width > 0 for path in files)
    from dataset.archive.index import find_or_build_index

    index = find_or_build_index(folder / TARS[0])
    with open(folder / TARS[0], "rb") as tar:
        for offset, size in zip(index.offset, index.size, strict=True):
            tar.seek(int(offset))
            Image.open(io.BytesIO(tar.read(int(size)))).convert("RGB")
    return len(index.offset)


def make_environment(path: Path, megabytes: float) -> None:
    """A tar of 20 KB files, as an installed environment has them."""
    if path.exists() and abs(path.stat().st_size / 1e6 - megabytes) < 1:
        return
    part = path.with_suffix(".part")
    num_files = max(1, int(megabytes * 1e6 / 20_480))
    with tarfile.open(part, "w") as tar:
        for number in range(num_files):
            info = tarfile.TarInfo(f"lib/module{number}.so")
            info.size = 19_456
            tar.addfile(info, io.BytesIO(number.to_bytes(8, "big") * (info.size // 8)))
    part.replace(path)


def run_script(name: str, *arguments: str | Path) -> None:
    command = [sys.executable, str(ROOT / "scripts" / name), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{name} failed: {done.stderr.strip()}")


if __name__ == "__main__":
    sys.exit(run_command(main))
