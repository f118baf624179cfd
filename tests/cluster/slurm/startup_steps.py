"""The measuring part of benchmarks/startup_exchange.py: its steps, on the real SLURM of the tests.

benchmarks/startup_exchange.py runs it as `python -m tests.cluster.slurm.startup_steps`; the tasks
of a step are that benchmark again.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks import startup_exchange
from benchmarks.bench import CACHE
from dataset.errors import run_command
from dataset.flags import REQUIRED, flag, make_parser, parse_flags
from tests.cluster.slurm import service


@dataclass(frozen=True, kw_only=True)
class MeasureFlags:
    """What benchmarks/startup_exchange.py asks for."""

    answer: Path = flag(REQUIRED, "the seconds go to this file, as JSON", "ANSWER")
    rounds: int = flag(REQUIRED, None)


def main() -> int:
    """Starts SLURM, runs a step of each size, and stops SLURM."""
    flags = parse_flags(MeasureFlags, make_parser(__doc__))
    service.up()
    try:
        seconds = {str(n): run_step(n, flags.rounds) for n in startup_exchange.RANKS}
    finally:
        service.down()
    flags.answer.write_text(json.dumps(seconds))
    return 0


def run_step(num_ranks: int, rounds: int) -> list[float]:
    """Seconds of each round of a SLURM step with so many tasks on up to four nodes."""
    folder = CACHE / f"startup-{num_ranks}-{time.time_ns()}"
    folder.mkdir(parents=True)
    num_nodes = min(num_ranks, startup_exchange.NUM_NODES)
    size = [f"--nodes={num_nodes}", f"--ntasks={num_ranks}"]
    task = [startup_exchange.__file__, "--task", str(folder), "--rounds", str(rounds)]
    done = service.srun(*size, sys.executable, *task, timeout_s=1200, env={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    ranks = [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))]
    assert len(ranks) == num_ranks, ranks
    return [max(times) for times in zip(*ranks, strict=True)]


if __name__ == "__main__":
    sys.exit(run_command(main))
