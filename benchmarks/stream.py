"""What does it save to train while the tar arrives, and what do the other ways cost?

    python benchmarks/stream.py                               (half an hour)
    python benchmarks/stream.py --megabytes 200 --rounds 1    (a quick look, no disk of 15 %)

Every way trains two epochs on the same tar at real XRootD servers, behind a proxy through which all
connections together have a fixed rate. All ways have the same step: a net that costs nothing, held
for a fixed time as if an accelerator computed, so that the compute of an epoch is half of the
link's time. Rows "ours" and those that train after a transfer are the real trainer; the peers are
in a plain loop with a DataLoader of two processes. pelicanfs speaks https only, is given the
offsets of our index, and asks for the images of a batch at once. Images are decoded at 56 pixels,
as two cores serve and train. Time counts from the start of the first process, imports and
conversion included; a conversion reads the tar from a local disk, and uploading the shards is not
counted.

A window of the order holds 4 GiB of the real set, 3 % of it. A set of 2 GB would be shuffled as a
whole, and little could be hidden: that row is shown, too. In the other rows the window is also 3 %
of the set, and the units are those of the real one. Two units of each class, which a window holds
elsewhere, would be a fifth of this set: it has 74 times fewer bytes, but only 10 times fewer
classes. How well such an order learns is not measured here.

Where the compute is the limit, an epoch is compared with that of a local tar and the same step, in
the same round: the trainer's own work between two steps is not the stream's. It is also compared
with the fixed times of the steps alone.

The rows with 15 % and 50 % of the disk have --cache-limit, and fetch in epoch 2 what they could not
keep. In the row with 2 nodes two ranks have folders of their own, and share the link; each keeps
its lane. A row that other programs disturbed is measured again, three times at most; one that is
disturbed each time says so.
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.bench import BenchFlags, measure_beside_service, report, rounds_flag
from benchmarks.stream_verdict import model_real_set, tables
from dataset.errors import UserError, run_command
from dataset.flags import flag, make_parser, parse_flags
from train.data.decode import choose_decoder

MEASURE = "tests.cluster.osdf.stream_benchmark"  # starts the mini-OSDF, and measures


@dataclass(frozen=True, kw_only=True)
class StreamFlags(BenchFlags):
    """The flags of benchmarks/stream.py."""

    rounds: int = rounds_flag(3)
    fault_rounds: int = flag(2, "of the epochs with a killed fetcher and a silent cache (2)")
    megabytes: int = flag(2000, "size of the tar (2000)")
    rate: float = flag(60.0, "MB/s of the link (60)")
    rtt: float = flag(0.02, "seconds of a round trip (0.02)")
    compute: float = flag(0.5, "compute of an epoch, in times of the link for the tar (0.5)")
    ways: str = flag("", "only these rows, with semicolons: 'ours, streamed;local'")


def main() -> int:
    flags = parse_flags(StreamFlags, make_parser(__doc__))
    if not shutil.which("curl"):
        raise UserError("curl is not here, and it is a peer: apt-get install curl")
    decoder = choose_decoder("kernel")  # where it is not built, this would measure another trainer
    asked = {name: getattr(flags, name) for name in ("megabytes", "rate", "rtt", "compute")}
    asked |= {"rounds": flags.rounds, "fault-rounds": flags.fault_rounds}
    words = [word for name, value in asked.items() for word in (f"--{name}", value)]
    if flags.ways:
        words += ["--ways", flags.ways]
    result: dict[str, Any] = measure_beside_service(MEASURE, *words)
    result |= {"rounds": flags.rounds, "decoder": decoder.name, **model_real_set()}
    return report("stream", result, tables, flags)


if __name__ == "__main__":
    sys.exit(run_command(main))
