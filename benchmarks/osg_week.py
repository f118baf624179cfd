"""What would each of the OSG study's 100 jobs have waited for its data, with our ways to bring it?

    python benchmarks/osg_week.py

A replay of recorded rows, not a measurement. First the study's own waste is reproduced from its
rows (transfers that HTCondor ends after 3,600 s); if that fails, the command says so and stops.
Then the same rows go through our fetch in the job and through streaming, for each reading of the
stalls. benchmarks/osg_week_model.py has the model and its assumptions.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.bench import ROOT, RecordFlags, write_result
from benchmarks.osg_week_model import (
    ASSUMPTIONS,
    EPOCHS,
    LIMIT_S,
    OBJECT_BYTES,
    READINGS,
    Floats,
    Parts,
    has_arrived,
    make_link,
    share_needed,
    split_wait,
    wait_of_fetch,
    waits_of_stream,
)
from dataset.errors import DataError, UserError, run_command
from dataset.flags import make_parser, parse_flags
from report.grid.osg_study import PRINTED_SUFFIX, read_study
from report.grid.replay import AS_IT_WAS, KIND, Check, make_replay_tables, shape_replay
from report.grid.rows import GridJob
from report.grid.totals import mean, median
from report.published_table import read_csv
from report.table import to_markdown

STUDY = ROOT / "run_results" / "published" / "osg_100_jobs_5_epochs.csv"
HOUR_S = 3600.0
SHOWN_HOURS = 0.05  # half of the last digit: the study's summary prints tenths of an hour


def main() -> int:
    flags = parse_flags(RecordFlags, make_parser(__doc__))
    result = replay(STUDY, share_needed())
    for table in make_replay_tables(shape_replay(result))[:2]:
        print(f"\n{to_markdown(table)}")
    print("written to", write_result("osg_week", result, flags))
    return 0


def replay(path: Path, needed: Floats) -> dict[str, Any]:
    """The record: every job's wait in every way; refused if the study's waste does not come out."""
    jobs = read_study(path)
    parts = {job.job_id: split_wait(job) for job in jobs if has_arrived(job)}
    checks = reproduce(jobs, parts, read_printed(path))
    wrong = [c for c in checks if abs(c.printed_h - c.replayed_h) > SHOWN_HOURS]
    if wrong:
        raise DataError(
            f"{path.name}: {wrong[0].label}: the replay gives {wrong[0].replayed_h:.2f} hours, the "
            f"study prints {wrong[0].printed_h:.2f}; nothing else is said before this agrees"
        )
    epochs_s = find_epochs(jobs)
    rows = [_replay_job(job, parts.get(job.job_id), needed, epochs_s) for job in jobs]
    return {
        "kind": KIND,
        "rounds": 1,
        "table": path.name,
        "checks": [asdict(check) for check in checks],
        "notes": [
            _describe_waste([parts[job.job_id] for job in jobs if job.succeeded]),
            _describe_untried(
                [row for row in rows if row["has_arrived"] and not parts[row["job_id"]].retried_s]
            ),
            f"before its first step streaming needs {needed[0] * OBJECT_BYTES / 1e9:.2f} of "
            f"{OBJECT_BYTES / 1e9:.1f} GB",
            *(f"assumed: {assumption}" for assumption in ASSUMPTIONS),
            jobs[0].citation,
        ],
        "ways": _name_ways(),
        "jobs": rows,
    }


def read_printed(path: Path) -> dict[str, float]:
    """The study's printed totals in seconds; of a figure that it prints twice, the finer one."""
    printed = path.with_name(path.stem + PRINTED_SUFFIX)
    rows = read_csv(printed, ("key", "value"))
    try:
        return {row["key"]: float(row["value"]) for _, row in reversed(rows)}
    except ValueError as error:
        raise UserError(f"{printed}: {error}; the column value has numbers") from None


def reproduce(
    jobs: Sequence[GridJob], parts: Mapping[str, Parts], printed_s: Mapping[str, float]
) -> list[Check]:
    """The study's figures on waiting beside those of the jobs as the limit replays them."""
    good = [(job, parts[job.job_id]) for job in jobs if job.succeeded]
    ends = [part.waited_s + job.compute_s + job.other_s for job, part in good]
    replayed_s = {
        "retried_successful": (
            "wasted by transfers that were retried (successful jobs)",
            sum(part.retried_s for _, part in good),
        ),
        "transfer_successful": (
            "last transfers of successful jobs",
            sum(part.last_s for _, part in good),
        ),
        "mean_match_to_end": ("mean time from first match to the end", mean(ends) or 0.0),
        "median_match_to_end": ("median time from first match to the end", median(ends) or 0.0),
    }
    missing = [key for key in replayed_s if key not in printed_s]
    if missing:
        raise UserError(f"the study's printed totals lack {missing[0]}; nothing to compare with")
    return [
        Check(label, printed_s[key] / HOUR_S, seconds / HOUR_S)
        for key, (label, seconds) in replayed_s.items()
    ]


def find_epochs(jobs: Sequence[GridJob]) -> dict[str, float]:
    """The median epoch of the successful jobs of each site, in seconds."""
    compute_s: defaultdict[str, list[float]] = defaultdict(list)
    for job in jobs:
        if job.succeeded:
            compute_s[job.site].append(job.compute_s)
    return {site: (median(values) or 0.0) / EPOCHS for site, values in compute_s.items()}


def _describe_waste(parts: Sequence[Parts]) -> str:
    """What the reproduced hours are made of, and what of it was a test of the limit."""
    cut_h, between_h, kept_h = (
        sum(getattr(part, name) for part in parts) / HOUR_S
        for name in ("cut_s", "between_s", "kept_s")
    )
    return (
        f"the reproduced {cut_h + between_h + kept_h:.1f} hours are {cut_h:.1f} in transfers cut "
        f"at {LIMIT_S:,.0f} s, {between_h:.1f} between two tries and {kept_h:.1f} beside "
        "evictions and holds; only the first follow from the limit, the others are what each row "
        "has left, so the sum comes out by construction; the rows could have contradicted the "
        "limit by a stall that cost less or an arrived transfer that took longer, and none does"
    )


def _describe_untried(rows: Sequence[Mapping[str, Any]]) -> str:
    """The jobs whose first transfer arrived: no reading of the stalls changes them."""
    was_h, stream_h = (
        sum(row["waited_s"][key] for row in rows) / HOUR_S
        for key in (AS_IT_WAS, f"stream_{READINGS[0].key}")
    )
    return (
        f"the {len(rows)} jobs whose first transfer arrived do not depend on what the stalls were: "
        f"they waited {was_h:.1f} hours, with our fetch as long, and with streaming {stream_h:.1f}"
    )


def _name_ways() -> list[dict[str, str]]:
    ways = [{"key": AS_IT_WAS, "way": "as it was", "stalls": "as recorded"}]
    for reading in READINGS:
        for kind, words in (("fetch", "fetch in the job"), ("stream", "streaming")):
            key = f"{kind}_{reading.key}"
            ways.append({"key": key, "way": words, "stalls": reading.words})
    return ways


def _replay_job(
    job: GridJob, parts: Parts | None, needed: Floats, epochs_s: Mapping[str, float]
) -> dict[str, Any]:
    """One job's row of the record: seconds before the first step, and seconds waited, by way."""
    if parts is None:  # its data never arrived
        first = waited = dict.fromkeys((way["key"] for way in _name_ways()), job.transfer_span_s)
    else:
        epoch_s = job.compute_s / EPOCHS if job.succeeded else epochs_s[job.site]
        first, waited = _wait_in_all_ways(job, parts, needed, epoch_s)
    return {
        "job_id": job.job_id,
        "site": job.site,
        "outcome": job.outcome,
        "has_arrived": parts is not None,
        "succeeded": job.succeeded,
        "num_stalls": job.num_stalls,
        "compute_s": job.compute_s + job.other_s,
        "first_step_s": first,
        "waited_s": waited,
    }


def _wait_in_all_ways(
    job: GridJob, parts: Parts, needed: Floats, epoch_s: float
) -> tuple[dict[str, float], dict[str, float]]:
    first, waited = {AS_IT_WAS: parts.waited_s}, {AS_IT_WAS: parts.waited_s}
    for reading in READINGS:
        link = make_link(parts, job.num_stalls, reading)
        fetch, stream = f"fetch_{reading.key}", f"stream_{reading.key}"
        first[fetch] = waited[fetch] = round(parts.kept_s + wait_of_fetch(link), 1)
        waits_s = waits_of_stream(link, needed, epoch_s)
        first[stream], waited[stream] = (round(parts.kept_s + wait_s, 1) for wait_s in waits_s)
    return first, waited


if __name__ == "__main__":
    sys.exit(run_command(main))
