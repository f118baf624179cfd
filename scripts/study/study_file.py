"""study.json: what a study was asked for and the jobs that it submitted, kept to be continued."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from dataset.durable import write_json
from dataset.errors import UserError
from report.record_shape import check_field
from scripts.jobs.train_run import CLUSTERS, SlurmOptions
from scripts.study.plan import StudyPlan, make_runs
from train.records.record import parse_json

STUDY_FILE = "study.json"
SCHEMA = 1
MAX_COUNT = 10**5  # of GPUs or repeats


@dataclass(frozen=True)
class StudyFile:
    """study.json: the plan, and the jobs that were submitted for each run, oldest first."""

    plan: StudyPlan
    jobs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def with_job(self, name: str, job_id: str) -> StudyFile:
        """The same with one more job of a run."""
        return replace(self, jobs={**self.jobs, name: (*self.jobs.get(name, ()), job_id)})

    @property
    def last_jobs(self) -> dict[str, str]:
        """The last job of each run that had one."""
        return {name: ids[-1] for name, ids in self.jobs.items() if ids}


def write_study(folder: Path, study: StudyFile) -> None:
    """Saves the study, so that it can be continued from another shell or after a reboot."""
    record = {"schema": SCHEMA, "plan": asdict(study.plan), "jobs": dict(study.jobs)}
    write_json(folder / STUDY_FILE, record)


def read_study(folder: Path) -> StudyFile:
    """The study of a folder."""
    path = folder / STUDY_FILE
    if not path.exists():
        raise UserError(
            f"{folder} is not a study: no {STUDY_FILE} in it; give the --out of a study"
        )
    try:
        record = parse_json(path.read_bytes())
        if record["schema"] > SCHEMA:
            raise UserError(f"{path} has schema {record['schema']}; update this code to read it")
        return StudyFile(_plan_from(record["plan"]), _jobs_from(record["jobs"]))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path} cannot be read ({error!r}); was it edited by hand?") from None


def extend_study(old: StudyFile, wanted: StudyPlan, folder: Path) -> StudyFile:
    """The study of a folder with the runs of the new plan; another recipe is refused.

    More sizes or repeats, or other options of SLURM, continue a study; a run that exists
    must keep its command, because its run would be resumed.
    """
    gpus = tuple(sorted({*old.plan.gpus, *wanted.gpus}))
    repeats = max(old.plan.repeats, wanted.repeats)
    merged = replace(wanted, gpus=gpus, repeats=repeats, microbatch=old.plan.microbatch)
    before = {run.name: run.argv for run in make_runs(old.plan, folder)}
    after = {run.name: run.argv for run in make_runs(merged, folder)}
    changed = [name for name, argv in before.items() if after.get(name) != argv]
    if changed or old.plan.cluster != wanted.cluster:
        raise UserError(
            f"{folder} holds another study (its flags: {_describe(old.plan)}); give another --out, "
            f"or continue it with: scaling_study.py resume {folder}"
        )
    return replace(old, plan=merged)


def _plan_from(record: dict[str, Any]) -> StudyPlan:
    """The plan of study.json; ValueError for a field of the wrong type, KeyError without one."""
    slurm = record["slurm"]
    check_field(isinstance(slurm, dict), "slurm", slurm)
    for name, value in slurm.items():
        check_field(value is None or isinstance(value, str | int), name, value)
    for name in ("data", "cluster", "mode"):
        check_field(isinstance(record[name], str), name, record[name])
    check_field(record["cluster"] in CLUSTERS, "cluster", record["cluster"])
    gpus, flags, repeats = record["gpus"], record["train_flags"], record["repeats"]
    check_field(isinstance(gpus, list) and all(map(_is_count, gpus)), "gpus", gpus)
    check_field(isinstance(flags, list) and all(isinstance(f, str) for f in flags), "flags", flags)
    check_field(_is_count(repeats), "repeats", repeats)
    microbatch = record.get("microbatch")  # not in a study of an earlier version
    check_field(microbatch is None or _is_count(microbatch), "microbatch", microbatch)
    return StudyPlan(
        data=record["data"],
        cluster=record["cluster"],
        gpus=tuple(gpus),
        mode=record["mode"],
        repeats=repeats,
        train_flags=tuple(flags),
        slurm=SlurmOptions(**slurm),
        microbatch=microbatch,
    )


def _jobs_from(record: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    for name, ids in record.items():
        check_field(isinstance(ids, list) and all(isinstance(i, str) for i in ids), name, ids)
    return {name: tuple(ids) for name, ids in record.items()}


def _is_count(value: Any) -> bool:
    return type(value) is int and 1 <= value <= MAX_COUNT


def _describe(plan: StudyPlan) -> str:
    gpus = ",".join(map(str, plan.gpus))
    flags = " ".join(plan.train_flags)
    return f"{plan.data} --gpus {gpus} --cluster {plan.cluster} --{plan.mode} -- {flags}"
