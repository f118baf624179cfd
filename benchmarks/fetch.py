"""Is fetch faster than curl and pelicanfs, and what does a stalling cache cost?

    python benchmarks/fetch.py --rounds 5 --wan-rounds 3

All clients run one after the other in each round. Over the emulated WAN curl is measured in every
round too, with and without the stall; it takes most of the time.
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.bench import BenchFlags, measure_beside_service, rounds_flag, write_result
from benchmarks.fetch_table import Row, format_table
from dataset.errors import UserError, run_command
from dataset.flags import flag, make_parser, parse_flags

MEASURE = "tests.cluster.osdf.fetch_benchmark"  # starts the mini-OSDF, and measures


@dataclass(frozen=True, kw_only=True)
class FetchBenchFlags(BenchFlags):
    """The flags of benchmarks/fetch.py."""

    rounds: int = rounds_flag(5)
    wan_rounds: int = flag(3, "over the emulated WAN (3)")
    megabytes: int = flag(1500, "size of the object on loopback (1500)")
    wan_megabytes: int = flag(1000, "size over the emulated WAN (1000)")
    tmpfs: Path = flag(Path("/dev/shm"), "where the files go (/dev/shm)")


def main() -> int:
    flags = parse_flags(FetchBenchFlags, make_parser(__doc__))
    if not shutil.which("curl"):
        raise UserError("curl is not here, and it is the peer: apt-get install curl")
    sizes = ["--megabytes", flags.megabytes, "--wan-megabytes", flags.wan_megabytes]
    rounds = ["--rounds", flags.rounds, "--wan-rounds", flags.wan_rounds]
    rows = measure_beside_service(MEASURE, *rounds, *sizes, "--tmpfs", flags.tmpfs.absolute())
    print(format_table([Row(**row) for row in rows]))
    result: dict[str, Any] = {"rounds": flags.rounds, "wan_rounds": flags.wan_rounds, "rows": rows}
    print("\nwritten to", write_result("fetch", result, flags))
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
