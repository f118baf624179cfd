#!/usr/bin/env python3
"""Prints what was detected here (launcher, GPUs, data ...), what is wrong, and what to run next."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from dataset.packages import PINNED_PYTHONS, require_packages

require_packages()  # first of all: an old Python may lack the modules below

import json
import os
import threading
from argparse import ArgumentTypeError
from dataclasses import asdict, dataclass, replace

from dataset.errors import USER_MISTAKE, UserError, run_command
from dataset.federation.pelican import OSDF_DISCOVERY, parse_federation
from dataset.flags import flag, make_parser, parse_flags
from dataset.redaction import redact
from scripts.checks.next_step import NextStep, find_next
from scripts.checks.place import (
    Place,
    ask_for_gpus,
    choose_setup_python,
    count_gpus,
    find_tools,
)
from scripts.checks.supplies import (
    find_discovery,
    look_at_data,
    look_at_decoder,
    look_at_federation,
    look_at_space,
    unreachable,
)
from scripts.checks.supply_state import DataState, find_data, inspect_data
from scripts.checks.surroundings import (
    OK,
    WRONG,
    Finding,
    look_at_bf16,
    look_at_cpus,
    look_at_gpus,
    look_at_job,
    look_at_launch,
    look_at_master,
    look_at_memory,
    look_at_packages,
)
from train.ranks.launch import Launch, detect_launch

NETWORK_S = 3.0
FIRST_HOUR = "the first hour on a GPU"
EXAMPLE = """examples:
  python scripts/doctor.py /data/imagenet          on a login node, before you submit
  srun --nodes=2 python scripts/doctor.py DATA     as the ranks will see it; rank 0 reports in full
  srun --ntasks=2 --gpus-per-task=1 python scripts/doctor.py --gpu DATA     speed, best flags
  srun --output=%t.json python scripts/doctor.py --json   one JSON object per rank

The last line is the command to run next. Without DATA it looks for ./data and ./demo.

exit codes: 0 nothing is wrong (there may be notes), 2 something is; the message says how to fix it
"""


def _batches(text: str) -> tuple[int, ...]:
    words = text.split(",")
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise ArgumentTypeError(f"{text} is not a list such as 64,128,256")
    return tuple(map(int, words))


@dataclass(frozen=True, kw_only=True)
class DoctorFlags:
    """The flags of scripts/doctor.py."""

    data: str = flag("", "folder or URL of the data", "DATA", nargs="?")
    output: Path | None = flag(None, "folder of the run that comes next; default ./run_results")
    federation: str = flag(OSDF_DISCOVERY, f"default {OSDF_DISCOVERY}", metavar="URL")
    json: bool = flag(False, "print one JSON object per rank")
    gpu: bool = flag(False, "measure the training speed and recommend flags", group=FIRST_HOUR)
    arch: str = flag("resnet50", "default resnet50", group=FIRST_HOUR)
    image_size: int = flag(224, "default 224", metavar="N", group=FIRST_HOUR)
    batches: tuple[int, ...] = flag(
        (64, 128, 256),
        "images per GPU to try; default 64,128,256",
        type=_batches,
        group=FIRST_HOUR,
    )
    steps: int = flag(20, "steps to time; default 20", metavar="N", group=FIRST_HOUR)


def main() -> int:
    """Looks at everything and prints it; 2 when something is wrong."""
    flags = parse_flags(DoctorFlags, make_parser(__doc__, EXAMPLE))
    launch = _detect()
    if flags.gpu:
        return measure_gpu(flags, launch)
    if not flags.data:
        flags = replace(flags, data=find_data([Path.cwd(), ROOT]))
    findings = examine(flags, launch)
    step = choose_next(flags, launch, findings)
    if flags.json:
        text = _to_json(findings, launch, step)
    elif isinstance(launch, UserError) or launch.is_main:
        text = f"{describe(findings)}\nnext: {step.why}\n\n    {step.command}\n"
    else:
        text = describe_briefly(findings, launch.rank)
    # In one piece, since the ranks of a job share a log; a path may have bytes that are no UTF-8.
    sys.stdout.buffer.write(text.encode(errors="surrogateescape"))
    return USER_MISTAKE if any(finding.level == WRONG for finding in findings) else 0


def examine(flags: DoctorFlags, launch: Launch | UserError) -> list[Finding]:
    """Everything that was found, in the order of reading."""
    is_main = isinstance(launch, UserError) or launch.is_main
    ask = _FederationQuestion(flags) if is_main else None  # answers while torch is imported
    packages, torch = look_at_packages()
    findings = look_at_launch(launch)
    if isinstance(launch, Launch):
        findings.append(look_at_master(launch, ask_slurm=torch is not None))
    local_rank = 0 if isinstance(launch, UserError) else launch.local_rank
    findings += [look_at_job(os.environ), look_at_cpus(os.environ), look_at_memory(), *packages]
    findings += look_at_bf16(os.environ)
    findings += [look_at_gpus(os.environ, torch, local_rank), look_at_decoder()]
    if flags.data:
        findings.append(look_at_data(flags.data))
    findings.append(look_at_space(flags.output or Path("run_results"), "space"))
    return findings + ([ask.finding()] if ask else [])


def choose_next(
    flags: DoctorFlags, launch: Launch | UserError, findings: list[Finding]
) -> NextStep:
    """The command to run after this one."""
    wrong = {finding.topic for finding in findings if finding.level == WRONG}
    tools = find_tools()
    place = Place(
        root=ROOT,
        cwd=Path.cwd(),
        python=sys.executable,
        env=os.environ,
        tools=tools,
        launch=launch if isinstance(launch, Launch) else None,
        data=DataState() if wrong else inspect_data(flags.data),
        num_gpus=count_gpus(sys.modules.get("torch")),
        has_cluster_gpus=not wrong and "sbatch" in tools and ask_for_gpus(),
        doctor_flags=tuple(sys.argv[1:]),
        output=str(flags.output or ""),
        federation="" if flags.federation == OSDF_DISCOVERY else flags.federation,
        has_wheels=sys.version_info[:2] in PINNED_PYTHONS,
        setup_python=choose_setup_python(),
    )
    step = find_next(place, wrong)
    return NextStep(step.why, redact(step.command))


def measure_gpu(flags: DoctorFlags, launch: Launch | UserError) -> int:
    """Trains for a moment in several ways and recommends the flags; rank 0 speaks."""
    if isinstance(launch, UserError):
        raise launch
    from scripts.checks.first_hour import Network, measure_all
    from train.device import choose_device

    device = choose_device("cuda", launch, os.environ)
    network = Network(flags.arch, flags.image_size, flags.steps, device)
    data = Path(flags.data) if flags.data else None

    def say(line: str) -> None:
        if launch.is_main:
            print(line, flush=True)

    return 0 if measure_all(network, flags.batches, data, launch, say) else USER_MISTAKE


def describe(findings: list[Finding]) -> str:
    """The report of rank 0: aligned, and what is wrong at the end, where it is seen."""
    width = max(len(finding.topic) for finding in findings)
    marks = {OK: " ", WRONG: "!"}
    lines = [f"{marks.get(f.level, '-')} {f.topic:<{width}}  {f.text}" for f in findings]
    for finding in sorted(findings, key=lambda f: f.level != WRONG):
        if finding.level != OK:
            lines += ["", f"{finding.level}: {finding.problem}"]
    if not any(finding.level == WRONG for finding in findings):
        num_notes = sum(finding.level != OK for finding in findings)
        above = f", but see the note{'s' * (num_notes > 1)} above" if num_notes else ""
        lines += ["", f"nothing is wrong here{above}"]
    return "\n".join(lines) + "\n"


def describe_briefly(findings: list[Finding], rank: int) -> str:
    """A line of another rank than 0, and one more for each thing that is wrong with it."""
    wrong = [f"rank {rank}: wrong: {f.problem}" for f in findings if f.level == WRONG]
    rank_text = next(finding.text for finding in findings if finding.topic == "rank")
    state = f"{len(wrong)} wrong" if wrong else "nothing is wrong"
    return "\n".join([f"rank {rank_text}, on {os.uname().nodename}: {state}", *wrong]) + "\n"


def _to_json(findings: list[Finding], launch: Launch | UserError, step: NextStep) -> str:
    record = {
        "ok": not any(finding.level == WRONG for finding in findings),
        "host": os.uname().nodename,
        "launch": asdict(launch) if isinstance(launch, Launch) else None,
        "findings": [asdict(finding) for finding in findings],
        "next": asdict(step),
    }
    return json.dumps(record) + "\n"


def _detect() -> Launch | UserError:
    try:
        return detect_launch(os.environ)
    except UserError as error:
        return error


class _FederationQuestion:
    """Asks in a thread of its own: looking up a name has no time-out that we could set."""

    def __init__(self, flags: DoctorFlags) -> None:
        needed = find_discovery(flags.data, flags.federation)
        self._discovery = needed or parse_federation(flags.federation)
        self._is_needed = needed is not None
        self._found: list[Finding] = []
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        self._found.append(look_at_federation(self._discovery, NETWORK_S, self._is_needed))

    def finding(self) -> Finding:
        """What was answered, waiting a little."""
        self._thread.join(NETWORK_S)
        if self._found:
            return self._found[0]
        return unreachable(self._discovery, f"no answer in {NETWORK_S:.0f} s", self._is_needed)


if __name__ == "__main__":
    sys.exit(run_command(main))
