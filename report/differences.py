"""What differs between two runs that a table compares: recipe, data, code, versions."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from report.runs import ReportedRun

# Fields that say where and how often, not what was trained; sizes and LR are judged apart.
# fmt: off
_NOT_THE_RECIPE = frozenset({
    "batch_size", "lr", "microbatch", "largest_microbatch", "seed",
    "data", "data_dir", "index_dir", "output", "resume", "weights",
    "print_freq", "deadline", "force", "tensorboard", "save_model", "show_recipe",
    "checkpoint_minutes", "timeout_minutes",
})
# fmt: on
_ABSENT = "absent"


def recipe_key(run: ReportedRun) -> str:
    """Equal for repeats of one point: everything that a difference would be flagged for."""
    return json.dumps([_facts(run), run.lr], sort_keys=True, default=str)


def differences(run: ReportedRun, baseline: ReportedRun) -> list[str]:
    """What is not as in the baseline, each as `name value (baseline value)`."""
    here, there = _facts(run), _facts(baseline)
    if "units" not in here or "units" not in there:  # the order says it already
        here, there = (
            {k: v for k, v in facts.items() if k not in ("units", "lanes")}
            for facts in (here, there)
        )
    return [
        f"{name} {_short(here.get(name, _ABSENT))} (baseline {_short(there.get(name, _ABSENT))})"
        for name in sorted({**here, **there})
        if here.get(name, _ABSENT) != there.get(name, _ABSENT)
    ]


def _facts(run: ReportedRun) -> dict[str, Any]:
    """What two comparable runs have in common; a published row has nothing to compare."""
    if not run.record:
        return {}
    record = run.record
    facts = {k: v for k, v in run.config.items() if k not in _NOT_THE_RECIPE}
    facts.setdefault("order", "uniform")  # as all runs were before there was --order
    if (units := (record.get("dataset") or {}).get("units")) is not None:
        facts["units"] = units  # the window is not compared: it grows with the batch
        facts["lanes"] = record["dataset"].get("lanes", 1)
    facts["data"] = (record.get("dataset") or {}).get("fingerprint")
    facts["code"] = record.get("commit")
    versions: Mapping[str, Any] = record.get("versions") or {}
    facts |= dict(versions)
    if run.config.get("microbatch") is not None:  # the groups that batch norm sees
        facts["microbatch"] = run.config["microbatch"]
    return facts


def flag_learning_rates(runs: Sequence[ReportedRun]) -> list[str | None]:
    """A flag for each run whose LR follows another rule than the second run's does.

    Against the first run an LR is unchanged, scaled with the batch, or something else; a table may
    use any one of these, but rows of different rules are different recipes.
    """
    rules = [_lr_rule(run, runs[0]) for run in runs]
    first_run, first = next(
        ((run, rule) for run, rule in zip(runs[1:], rules[1:], strict=True) if rule),
        (runs[0], set[str]()),
    )
    flags: list[str | None] = []
    for run, rule in zip(runs, rules, strict=True):
        if run is runs[0] or not rule or rule & first:
            flags.append(None)
        else:
            words = " or ".join(sorted(rule))
            unit = "processes" if run.gpu == "cpu" else "GPUs"
            there = " and ".join(sorted(first))
            flags.append(f"LR {words} (on {first_run.num_gpus} {unit}: {there})")
    return flags


def _lr_rule(run: ReportedRun, baseline: ReportedRun) -> set[str]:
    """The rules that an LR follows; both at the baseline's own batch."""
    if run.lr is None or baseline.lr is None:
        return set()
    rules = set()
    if math.isclose(run.lr, baseline.lr, rel_tol=1e-6):
        rules.add("unchanged")
    scaled = baseline.lr * run.batch_size / baseline.batch_size
    if math.isclose(run.lr, scaled, rel_tol=1e-6):
        rules.add("scaled with the batch")
    return rules or {"neither unchanged nor scaled"}


def _short(value: Any) -> str:
    """A value that fits a table: the start of a hash is enough to tell two apart."""
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 14 else text[:10] + "…"
