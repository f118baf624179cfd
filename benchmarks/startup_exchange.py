"""How does the start-up exchange grow with the number of ranks? Real SLURM steps of 1 to 16 tasks.

    python benchmarks/startup_exchange.py --rounds 5

Measured is what the ranks do together before the first step: they find rank 0, wait for each
other, build gloo's connections of all with all, twice, and exchange what `prepare` exchanges. Not
measured: SLURM's own start and the imports, which on a cluster each rank does on its own cores.
Every round is a new exchange of processes that were forked when torch was imported; the time is
that of the slowest rank. All ranks share this machine's cores, so that it is the CPU time of all
ranks together, which on a cluster each rank spends on cores of its own. What a network adds is not
in it. (On GPUs gloo has one group and not two.)
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

from benchmarks.bench import BenchFlags, Table, measure_beside_service, median, report, rounds_flag
from dataset.errors import run_command
from dataset.flags import flag, make_parser, parse_flags
from train.ranks.comm import Comm
from train.ranks.cpus import own_binding
from train.ranks.launch import detect_launch

RANKS, NUM_NODES = (1, 2, 4, 8, 16), 4
MEASURE = "tests.cluster.slurm.startup_steps"  # starts SLURM, and the steps


@dataclass(frozen=True, kw_only=True)
class ExchangeFlags(BenchFlags):
    """The flags of benchmarks/startup_exchange.py."""

    rounds: int = rounds_flag(5)
    task: Path | None = flag(None, "used by the benchmark itself: be a task")


def main() -> int:
    flags = parse_flags(ExchangeFlags, make_parser(__doc__))
    if flags.task:
        return be_task(flags.task, flags.rounds)
    seconds = measure_beside_service(MEASURE, "--rounds", flags.rounds)
    result = {"rounds": flags.rounds, "seconds": seconds, "load_1min": os.getloadavg()[0]}
    return report("startup_exchange", result, tables, flags)


def be_task(folder: Path, rounds: int) -> int:
    """A task of the step: each round is an exchange in a process of its own."""
    rank = int(os.environ["SLURM_PROCID"])
    times = [_measure_round(folder, rank, number) for number in range(rounds)]
    (folder / f"rank-{rank:03d}.json").write_text(json.dumps(times))
    return 0


def _measure_round(folder: Path, rank: int, number: int) -> float:
    _meet(folder / f"round-{number}", rank)  # all have imported torch, and ended the last round
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.environ["SLURM_RESTART_COUNT"] = str(number)  # other ports than in the last round
        begin_s = time.monotonic()
        exchange()
        os.write(writing, str(time.monotonic() - begin_s).encode())
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status == 0, f"rank {rank} failed in round {number}"
    return float(os.read(reading, 100))


def _meet(folder: Path, rank: int) -> None:
    """Waits until every task is here; by files, so that nothing measured is used before."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / str(rank)).touch()
    while len(list(folder.iterdir())) < int(os.environ["SLURM_STEP_NUM_TASKS"]):
        time.sleep(0.02)


def exchange() -> None:
    """What the ranks of a run exchange before their first step (train/prepare.py)."""
    comm = Comm(detect_launch(os.environ))
    comm.join(torch.device("cpu"), 600)
    comm.from_main(None)  # the deadline
    comm.gather(own_binding())
    for _ in range(4):  # nodes, missing indexes, fingerprints, decoders
        comm.gather("0123456789abcdef")
    for _ in range(3):  # output, checkpoint, whether it is done
        comm.from_main("0123456789abcdef")
    comm.close()


def count_pairs(num_ranks: int) -> float:
    return num_ranks * (num_ranks - 1) / 2


SHAPES: dict[str, Callable[[int], float]] = {"rank": float, "pair of ranks": count_pairs}


@dataclass(frozen=True)
class Fit:
    """Seconds of N ranks: a fixed part, and a part for each rank or for each pair of them."""

    shape: str
    fixed_s: float
    each_s: float

    def predict(self, num_ranks: int) -> float:
        return self.fixed_s + self.each_s * SHAPES[self.shape](num_ranks)


def fit_seconds(fastest: dict[int, float]) -> Fit:
    """The fit whose shape errs least on points that it was not shown."""

    def error(shape: str) -> float:
        hidden = {n: {k: v for k, v in fastest.items() if k != n} for n in fastest}
        return sum(
            abs(_fit_shape(shape, shown).predict(n) / fastest[n] - 1) for n, shown in hidden.items()
        )

    return _fit_shape(min(SHAPES, key=error), fastest)


def _fit_shape(shape: str, fastest: dict[int, float]) -> Fit:
    """Least squares of the relative errors."""
    seconds = np.array(list(fastest.values()))
    columns = np.array([[1.0, SHAPES[shape](ranks)] for ranks in fastest])
    (fixed_s, each_s), *_ = np.linalg.lstsq(
        columns / seconds[:, None], np.ones_like(seconds), rcond=None
    )
    return Fit(shape, float(fixed_s), float(each_s))


def tables(result: dict[str, Any]) -> list[Table]:
    """Seconds by number of ranks, and the curve through the fastest rounds: others only add."""
    found = {int(name): values for name, values in result["seconds"].items()}
    fit = fit_seconds({ranks: min(values) for ranks, values in found.items() if ranks > 1})
    rows = []
    for ranks, values in found.items():
        fitted = f"{fit.predict(ranks):.2f}" if ranks > 1 else ""
        rows.append([str(ranks), f"{min(values):.2f}", f"{median(values):.2f}", fitted])
    title = (
        f"N ranks on up to {NUM_NODES} nodes of SLURM that share this machine's cores, "
        f"{result['rounds']} rounds: {fit.fixed_s:.2f} s and {1000 * fit.each_s:.0f} ms for each "
        f"{fit.shape}"
    )
    return [(title, ["ranks", "fastest, s", "median, s", "fitted to the fastest, s"], rows)]


if __name__ == "__main__":
    sys.exit(run_command(main))
