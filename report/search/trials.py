"""The trials of a search, read from their folders: trial.json in each, search.json above them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dataset.errors import CommandError, DataError, UserError
from report.record_shape import check_field, is_number
from report.words import count
from train.records.record import parse_json

SEARCH_FILE, TRIAL_FILE = "search.json", "trial.json"
SCHEMA = 1
STATES = ("running", "complete", "pruned", "failed")
MAX_TRIALS = 10**5

Param = str | int | float | bool


@dataclass(frozen=True)
class Trial:
    """One trial: what was chosen for it, and what came of it."""

    number: int
    params: Mapping[str, Param]  # by the name of the trainer's flag, as its dataclass has it
    distributions: Mapping[str, str]  # what each was drawn from, in Optuna's JSON
    state: str = "running"
    value: float | None = None
    reports: Mapping[int, float] = field(default_factory=dict)  # the metric by epoch, from 1 on
    attrs: Mapping[str, Any] = field(default_factory=dict)  # the pruner's own notes
    jobs: tuple[str, ...] = ()  # oldest first
    slot: int | None = None  # of those at once, the place of its last job: which GPUs it has
    began_s: float = 0.0  # unix time
    ended_s: float | None = None
    note: str = ""  # why it failed or was stopped

    @property
    def name(self) -> str:
        return name_trial(self.number)

    @property
    def is_over(self) -> bool:
        return self.state != "running"

    def with_job(self, job_id: str) -> Trial:
        """The same with one more job."""
        return replace(self, jobs=(*self.jobs, job_id))


@dataclass(frozen=True)
class Search:
    """A search as the page shows it."""

    folder: Path
    metric: str
    trials: Sequence[Trial]

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def is_maximised(self) -> bool:
        return is_maximised(self.metric)


def name_trial(number: int) -> str:
    """The name of a trial's folder."""
    return f"trial{number:04d}"


def is_maximised(metric: str) -> bool:
    """Whether more is better: of everything but a loss."""
    return "loss" not in metric


def find_best(trials: Sequence[Trial], metric: str) -> Trial | None:
    """The best trial of those that were trained to their end; the earlier one of two equals."""
    done = [t for t in trials if t.state == "complete" and t.value is not None]
    sign = -1 if is_maximised(metric) else 1
    return min(done, key=lambda t: (sign * (t.value or 0.0), t.number), default=None)


def find_searches(paths: Sequence[Path]) -> list[Path]:
    """The folders of searches at or below the paths."""
    found = {file.parent for path in paths if path.is_dir() for file in path.rglob(SEARCH_FILE)}
    return sorted(found)


def load_search(folder: Path) -> tuple[Search, list[str]]:
    """A search, and a note for each trial whose file cannot be read."""
    plan = read_object(folder / SEARCH_FILE).get("plan")
    metric = plan.get("metric") if isinstance(plan, dict) else None
    if not isinstance(metric, str):
        raise DataError(f"{folder / SEARCH_FILE}: no metric; was it edited by hand?")
    trials, notes = [], []
    for file in sorted(folder.glob(f"*/{TRIAL_FILE}")):
        try:
            trials.append(read_trial(file.parent))
        except CommandError as error:
            notes.append(f"left out: {error}")
    trials.sort(key=lambda t: t.number)
    same = [t for t in trials if t.distributions == trials[0].distributions]
    if len(same) < len(trials):
        others = count(len(trials) - len(same), "trial")
        notes.append(f"{folder}: {others} of another space left out")
    return Search(folder, metric, same), notes


def read_trial(folder: Path) -> Trial:
    """The trial of a folder; DataError for a file that is not one of ours."""
    path = folder / TRIAL_FILE
    record = read_object(path)
    try:
        return _trial_from(record)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} cannot be read ({error!r}); was it edited by hand?") from None


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object of search.json or trial.json, of a schema that this code knows."""
    try:
        record = parse_json(path.read_bytes())
    except ValueError as error:
        raise DataError(f"{path} is not JSON ({error}); restore it, or move it away") from None
    if not isinstance(record, dict) or type(record.get("schema")) is not int:
        raise DataError(f"{path} has no schema number; it is not of a search")
    if record["schema"] > SCHEMA:
        raise UserError(f"{path} has schema {record['schema']}; update this code to read it")
    return record


def _trial_from(record: Mapping[str, Any]) -> Trial:
    number, state, value = record["number"], record["state"], record["value"]
    check_field(type(number) is int and 0 <= number < MAX_TRIALS, "number", number)
    check_field(state in STATES, "state", state)
    check_field(value is None or is_number(value), "value", value)
    params = dict(record["params"])
    check_field(
        all(isinstance(p, str | int | float | bool) for p in params.values()), "params", params
    )
    distributions = {str(name): str(text) for name, text in record["distributions"].items()}
    check_field(params.keys() == distributions.keys(), "distributions", sorted(distributions))
    for name, text in distributions.items():
        check_field(is_within(params[name], read_range(text)), name, params[name])
    reports = {int(epoch): reported for epoch, reported in record["reports"].items()}
    check_field(all(map(is_number, reports.values())), "reports", reports)
    began_s, ended_s = record["began_s"], record["ended_s"]
    check_field(is_number(began_s), "began_s", began_s)
    check_field(ended_s is None or is_number(ended_s), "ended_s", ended_s)
    slot = record.get("slot")  # not in a search of an earlier version
    check_field(slot is None or (type(slot) is int and 0 <= slot < MAX_TRIALS), "slot", slot)
    return Trial(
        number=number,
        params=params,
        distributions=distributions,
        state=state,
        value=value,
        reports=reports,
        attrs=dict(record["attrs"]),
        jobs=tuple(map(str, record["jobs"])),
        slot=slot,
        began_s=began_s,
        ended_s=ended_s,
        note=str(record["note"]),
    )


@dataclass(frozen=True)
class Range:
    """What a flag was drawn from: choices, or numbers from low to high."""

    choices: tuple[Param, ...] = ()
    low: float = 0.0
    high: float = 0.0
    is_log: bool = False


def read_range(text: str) -> Range:
    """What Optuna's JSON of a distribution says; ValueError or KeyError for another text."""
    attributes = parse_json(text)["attributes"]
    if "choices" in attributes:
        return Range(choices=tuple(attributes["choices"]))
    low, high, is_log = (attributes[name] for name in ("low", "high", "log"))
    check_field(is_number(low) and is_number(high) and low < high, "range", attributes)
    check_field(isinstance(is_log, bool) and (low > 0 or not is_log), "range", attributes)
    return Range(low=float(low), high=float(high), is_log=is_log)


def is_within(value: Param, drawn_from: Range) -> bool:
    """Whether a value can have been drawn from there."""
    if drawn_from.choices:
        return value in drawn_from.choices
    return is_number(value) and drawn_from.low <= float(value) <= drawn_from.high
