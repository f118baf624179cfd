"""Logs of pytorch/examples' imagenet/main.py, read as the records of runs.

    Epoch: [0][  11/5005]	Time  0.350 ( 0.412)	Data  0.010 ( 0.100)	Loss 6.9e+00 (7.0e+00)
    Test: [  1/196]	Time  1.912 ( 1.912)	Loss ...
     *   Acc@1 69.758 Acc@5 89.078

The number in brackets is the average since the epoch began. Until 2022 main.py counted its batches
from 0, until 2019 it said Prec@1. Every rank prints these lines, so all lines of one batch are
averaged; what a torn line said is left out.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dataset.errors import UserError
from report.record_shape import is_number, to_positive
from report.words import count
from train.records.record import Record

LOG_COLUMNS = ("gpu", "batch_size", "num_nodes", "num_gpus", "log")
WALL_CLOCK = (
    "the wall clock of a log of pytorch/examples is its training and validation; start-up and "
    "checkpoints are not in it"
)
MAX_LINE_BYTES = 2**20
_PIECE = re.compile(r"(?=Epoch: \[|Test: \[)")
_EPOCH = re.compile(r"Epoch: \[\s*(\d{1,7})\]\[\s*(\d{1,9})/(\d{1,9})\]")
_TEST = re.compile(r"Test: \[\s*(\d{1,9})/(\d{1,9})\]")
_METER = re.compile(r"([A-Za-z][\w@]*)\s+[-+.\w]+\s+\(\s*([-+.\w]+)\)")
_RESULT = re.compile(r"\*\s+(?:Acc|Prec)@1\s+(\d+\.\d+)\s+(?:Acc|Prec)@5\s+(\d+\.\d+)")
_MODEL = re.compile(r"=> (?:creating|using pre-trained) model '([\w.-]{1,60})'")
_LOADED = re.compile(r"=> loaded checkpoint '.*' \(epoch (\d{1,7})\)")

Meters = dict[str, float]


@dataclass
class Progress:
    """The first and the last batch of a pass that were printed, with what each rank said there."""

    num_batches: int = 0
    first: int = 10**9
    last: int = -1
    at_first: list[Meters] = field(default_factory=list)
    at_last: list[Meters] = field(default_factory=list)

    def add(self, index: int, num_batches: int, meters: Meters) -> None:
        """Takes one line into account."""
        self.num_batches = max(self.num_batches, num_batches)
        if index < self.first:
            self.first, self.at_first = index, []
        if index > self.last:
            self.last, self.at_last = index, []
        if index == self.first:
            self.at_first.append(meters)
        if index == self.last:
            self.at_last.append(meters)

    def mean(self, *names: str) -> float | None:
        """The average of a meter over the ranks, as of the last line."""
        return _mean(self.at_last, names)

    def pace(self, name: str, offset: int) -> float:
        """Seconds a batch behind the first line, which has the start of the loader's workers."""
        begin, end = _mean(self.at_first, (name,)), self.mean(name)
        if begin is None or end is None or self.last == self.first:
            return end or 0.0
        spent_s = end * (self.last + offset) - begin * (self.first + offset)
        return max(spent_s, 0.0) / (self.last - self.first)

    def total(self, name: str, num_batches: int, offset: int) -> float:
        """Seconds of so many batches; those behind the last line are taken at the pace."""
        done = self.last + offset
        return (self.mean(name) or 0.0) * done + self.pace(name, offset) * (num_batches - done)


@dataclass
class Epoch:
    """What a log says about one epoch."""

    train: Progress = field(default_factory=Progress)
    test: Progress = field(default_factory=Progress)
    results: list[tuple[float, float]] = field(default_factory=list)

    @property
    def is_evaluated(self) -> bool:
        return bool(self.results) or self.test.last >= 0


@dataclass
class ExampleLog:
    """A log, sorted by epoch."""

    arch: str = ""
    epochs: dict[int, Epoch] = field(default_factory=dict)
    resumed_at: list[int] = field(default_factory=list)
    num_torn: int = 0

    @property
    def num_batches(self) -> int:
        """Batches of a whole epoch."""
        return max(epoch.train.num_batches for epoch in self.epochs.values())

    @property
    def offset(self) -> int:
        """What makes a printed index a number of batches: 1 if they are counted from 0."""
        return 0 if min(epoch.train.first for epoch in self.epochs.values()) == 1 else 1


def looks_like_example_log(path: Path) -> bool:
    """Whether the beginning of a file has a line of a training by main.py."""
    with open(path, "rb") as file:
        start = file.read(2**18).decode(errors="replace")
    found = _EPOCH.search(start)
    return found is not None and "Time" in start[found.end() :]


def refuse_bare_log(path: Path) -> None:
    """UserError for a log without the facts that it does not hold itself."""
    if path.is_file() and looks_like_example_log(path):
        columns = ",".join(LOG_COLUMNS)
        raise UserError(
            f"{path} is a log of pytorch/examples, which says neither its batch size nor its GPUs; "
            f"name it in a CSV with the columns {columns} and give that (docs/studies.md)"
        )


def read_log(path: Path) -> ExampleLog:
    """The log of one run; ranks may be mixed, lines torn, and parts repeated after a resume."""
    log = ExampleLog()
    current: Epoch | None = None
    for piece in _pieces(path):
        if found := _EPOCH.match(piece):
            current = _add_epoch_line(log, found, piece) or current
        elif found := _TEST.match(piece):
            index, num_batches, meters = int(found[1]), int(found[2]), _meters(piece)
            if current is not None and "Time" in meters and index <= num_batches:
                current.test.add(index, num_batches, meters)
        elif (model := _MODEL.search(piece)) and not log.arch:
            log.arch = model[1]
        elif loaded := _LOADED.search(piece):
            _resume(log, int(loaded[1]))
        if current is not None and (result := _RESULT.search(piece)):
            current.results.append((float(result[1]), float(result[2])))
    if not log.epochs:
        raise UserError(
            f"{path} has no line such as 'Epoch: [0][10/5005] Time 0.35 (0.41)'; "
            "give a log of pytorch/examples' imagenet/main.py"
        )
    return log


def _pieces(path: Path) -> Iterator[str]:
    """The lines of a log, split also where a rank wrote into the line of another."""
    with open(path, "rb") as file:
        while line := file.readline(MAX_LINE_BYTES):
            for part in line.decode(errors="replace").replace("\r", "\n").splitlines():
                yield from _PIECE.split(part)


def _add_epoch_line(log: ExampleLog, found: re.Match[str], piece: str) -> Epoch | None:
    number, index, num_batches = map(int, found.groups())
    meters = _meters(piece)
    if "Time" not in meters or index > num_batches or num_batches < 1:
        log.num_torn += 1
        return None
    epoch = log.epochs.setdefault(number, Epoch())
    epoch.train.add(index, num_batches, meters)
    return epoch


def _resume(log: ExampleLog, start: int) -> None:
    """Forgets what the checkpoint does not hold: it is trained again."""
    if start not in log.resumed_at:
        log.resumed_at.append(start)
    for number in [number for number in log.epochs if number >= start]:
        del log.epochs[number]


def _meters(piece: str) -> Meters:
    """The averages of a line by the names that it gives them; NaN and torn numbers are left out."""
    meters: Meters = {}
    for name, text in _METER.findall(piece):
        try:
            value = float(text)
        except ValueError:
            continue
        if is_number(value) and (name != "Time" or to_positive(value)):
            meters[name] = value
    return meters


def _mean(meters: Sequence[Meters], names: Sequence[str]) -> float | None:
    values = [line[name] for line in meters for name in names if name in line]
    return statistics.fmean(values) if values else None


def to_record(log: ExampleLog, batch_size: int) -> tuple[Record, list[Record]]:
    """The log as parts of a run.json and as lines of an epochs.jsonl; sizes are the caller's."""
    lines: list[Record] = []
    num_batches, steady_batches, wait_s, train_s, eval_s, steady_s = 0, 0, 0.0, 0.0, 0.0, 0.0
    for number in sorted(log.epochs):
        epoch = log.epochs[number]
        line = _to_line(epoch, number, batches := _count_batches(log, number), log.offset)
        printed = epoch.train.last - epoch.train.first
        num_batches, steady_batches = num_batches + batches, steady_batches + printed
        steady_s += printed * epoch.train.pace("Time", log.offset)
        train_s += line["seconds"]
        wait_s += line["data_wait_s"]
        eval_s += line.get("eval_s", 0.0)
        if _is_whole(log, number):
            lines.append(line)
    record: Record = {
        "status": "done",
        "images_trained": num_batches * batch_size,
        "wall_clock_s": train_s + eval_s,
        "phases": {
            "data_wait": {"mean_s": wait_s},
            "compute": {"mean_s": max(train_s - wait_s, 0.0)},
            "evaluation": {"mean_s": eval_s},
        },
        "communication_method": "a part of compute, since the log does not tell it apart",
        "result": _last_result(lines),
    }
    if steady_batches and to_positive(steady_s):
        record["steady_images_per_s"] = steady_batches * batch_size / steady_s
    return record, lines


def _to_line(epoch: Epoch, number: int, num_batches: int, offset: int) -> Record:
    train, test = epoch.train, epoch.test
    line: Record = {
        "epoch": number,
        "seconds": train.total("Time", num_batches, offset),
        "data_wait_s": train.total("Data", num_batches, offset),
    }
    known = {"train_loss": train.mean("Loss"), "train_acc1": train.mean("Acc@1", "Prec@1")}
    if test.last >= 0:
        known["eval_s"] = test.total("Time", test.num_batches, offset)
    if epoch.results:  # equal on all ranks; of a tie the later one, which is that after a resume
        votes = Counter(reversed(epoch.results))
        known["val_acc1"], known["val_acc5"] = max(votes, key=lambda result: votes[result])
    return line | {name: value for name, value in known.items() if value is not None}


def _count_batches(log: ExampleLog, number: int) -> int:
    """Batches of an epoch: all of them, or those up to the last line if the log ends in it."""
    train = log.epochs[number].train
    if _is_whole(log, number):
        return train.num_batches
    return min(train.last + log.offset, train.num_batches)


def _is_whole(log: ExampleLog, number: int) -> bool:
    return number < max(log.epochs) or log.epochs[number].is_evaluated


def _last_result(lines: Sequence[Record]) -> Record:
    last = next((line for line in reversed(lines) if "val_acc1" in line), None)
    return {"final_acc1": last["val_acc1"], "final_acc5": last["val_acc5"]} if last else {}


def describe_gaps(log: ExampleLog, path: Path) -> list[str]:
    """What a reader of the table must know about a log."""
    last = max(log.epochs)
    missing = [number for number in range(min(log.epochs), last) if number not in log.epochs]
    notes = []
    if missing:
        notes.append(
            f"{path}: nothing about {count(len(missing), 'epoch')} (the first: {missing[0]})"
        )
    if not _is_whole(log, last):
        done, whole = _count_batches(log, last), log.epochs[last].train.num_batches
        notes.append(f"{path} ends in epoch {last}, after {done} of {whole} batches")
    if log.resumed_at:
        epochs = ", ".join(map(str, log.resumed_at))
        notes.append(f"{path}: resumed at epoch {epochs}; what was trained twice counts once")
    if log.num_torn:
        notes.append(f"{path}: {count(log.num_torn, 'torn line')} left out")
    return notes
