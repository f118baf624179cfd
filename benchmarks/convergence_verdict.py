"""What the runs of benchmarks/convergence.py say: paired differences, equivalence, the table."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.bench import Table

UNIFORM, STREAMED, CONTROL = "uniform", "streamed", "file order + buffer"
MARGIN = 1.5  # points of top-1 that count as no difference
MIN_LOSS = 10.0  # points that the control must lose, or the experiment could not have seen a loss
ROUNDING = 0.01  # points by which two roundings of one accuracy may differ
EQUIVALENT, NOT_SHOWN = f"equivalent within {MARGIN:g} points", "equivalence not shown"
NO_POWER = f"no power, as the control lost {MIN_LOSS:g} points or less"
# Student's t: 95 % lie below it, for 1, 2, ... degrees of freedom (2 to 12 pairs).
T_95 = (6.3138, 2.9200, 2.3534, 2.1318, 2.0150, 1.9432, 1.8946, 1.8595, 1.8331, 1.8125, 1.7959)
# The same for 97.5 %: what is left of 5 % for each of two looks.
T_97 = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281, 2.2010)

Runs = Sequence[dict[str, Any]]  # each with its set, order, seed and accuracies
BySeed = dict[int, float]


@dataclass(frozen=True)
class Difference:
    """The mean of paired differences and its 90 % interval, in points."""

    pairs: tuple[float, ...]
    mean: float
    low: float
    high: float

    @property
    def is_within_margin(self) -> bool:
        """Whether two one-sided tests at 5 % (TOST) both refuse a difference of MARGIN."""
        return self.low > -MARGIN and self.high < MARGIN

    def __str__(self) -> str:
        return f"{self.mean:+.2f} ({self.low:+.2f} to {self.high:+.2f})"


def compare(ours: BySeed, theirs: BySeed, table: Sequence[float] = T_95) -> Difference:
    """The difference of runs that are paired by their seeds; both have at least those of `ours`."""
    pairs = tuple(value - theirs[seed] for seed, value in ours.items())
    mean = statistics.fmean(pairs)
    reach = table[len(pairs) - 2] * statistics.stdev(pairs) / math.sqrt(len(pairs))
    return Difference(pairs, mean, mean - reach, mean + reach)


@dataclass(frozen=True)
class Verdict:
    """What the runs of one set say, in one way to weight its classes."""

    name: str
    finals: dict[str, BySeed]  # the final accuracy, by order

    @property
    def streamed(self) -> Difference:
        return compare(self.finals[STREAMED], self.finals[UNIFORM])

    @property
    def control(self) -> Difference:
        return compare(self.finals[CONTROL], self.finals[UNIFORM])

    @property
    def between_seeds(self) -> float:
        """How far two uniform runs of other seeds are apart, in the mean: the floor of noise."""
        pairs = itertools.combinations(self.finals[UNIFORM].values(), 2)
        return statistics.fmean(abs(a - b) for a, b in pairs)

    @property
    def words(self) -> str:
        if self.control.mean >= -MIN_LOSS:
            return NO_POWER
        return EQUIVALENT if self.streamed.is_within_margin else NOT_SHOWN


def judge(runs: Runs) -> list[Verdict]:
    """The verdicts on each set: on its top-1, and if it is unbalanced on the mean of its classes.

    A net that always names the most frequent class has a high top-1 already.
    """
    verdicts = []
    for name in list_sets(runs):
        own = [run for run in runs if run["set"] == name]
        verdicts.append(Verdict(name, _group(own, lambda run: run["acc1_pct"][-1])))
        if any(abs(run["acc1_pct"][-1] - run["class_mean_pct"]) > ROUNDING for run in own):
            alike = _group(own, lambda run: run["class_mean_pct"])
            verdicts.append(Verdict(f"{name}, classes weighted alike", alike))
    return verdicts


def list_sets(runs: Runs) -> list[str]:
    """The names of the sets, in the order of the runs."""
    return list(dict.fromkeys(run["set"] for run in runs))


def _group(runs: Runs, final: Callable[[dict[str, Any]], float]) -> dict[str, BySeed]:
    """An accuracy of each seed, by order."""
    in_seeds = sorted(runs, key=lambda run: int(run["seed"]))
    return {
        order: {run["seed"]: final(run) for run in in_seeds if run["order"] == order}
        for order in (UNIFORM, STREAMED, CONTROL)
    }


def summarise(verdicts: Sequence[Verdict]) -> str:
    """What holds on which set."""
    found = []
    for words in (EQUIVALENT, NOT_SHOWN, NO_POWER):
        if names := [verdict.name for verdict in verdicts if verdict.words == words]:
            found.append(f"{words[0].upper()}{words[1:]}: {'; '.join(names)}.")
    return "\n".join(found)


def describe_second_looks(result: dict[str, Any]) -> list[str]:
    """What the sets say in each look that got more seeds after their first pairs were seen."""
    if not result.get("earlier"):
        return []
    looks = []
    for name in list_sets(result["runs"]):
        own = [run for run in result["runs"] if run["set"] == name]
        new_seeds = {int(run["seed"]) for run in own if run["commit"] == result["commit"]}
        for verdict in judge(own):
            streamed = verdict.finals[STREAMED]
            new = {seed: streamed[seed] for seed in streamed if seed in new_seeds}
            first = {seed: streamed[seed] for seed in streamed if seed not in new_seeds}
            if min(len(new), len(first)) > 1:  # fewer have no interval
                looks.append(_describe_second_look(verdict, first, new))
    return looks


def _describe_second_look(verdict: Verdict, first: BySeed, new: BySeed) -> str:
    uniform, streamed = verdict.finals[UNIFORM], verdict.finals[STREAMED]
    both = compare(streamed, uniform, T_97)
    is_within = "within" if both.is_within_margin else "not within"
    return (
        f"{verdict.name}: the first {len(first)} pairs gave {compare(first, uniform)}. After that "
        f"was seen, {len(new)} further seeds were trained; these alone give "
        f"{compare(new, uniform)}. All {len(streamed)} pairs, with the interval widened to 95 % "
        f"for the two looks: {both}, {is_within} {MARGIN:g} points."
    )


def tables(result: dict[str, Any]) -> list[Table]:
    """The final accuracy in the three orders, and the differences."""
    rows = [
        [
            v.name,
            *(_spread(list(v.finals[order].values())) for order in (UNIFORM, STREAMED, CONTROL)),
            str(len(v.streamed.pairs)),
            str(v.streamed),
            f"{v.control.mean:+.1f}",
            f"{v.between_seeds:.2f}",
            v.words,
        ]
        for v in judge(result["runs"])
    ]
    header = ["set", *(f"{order}, %" for order in (UNIFORM, STREAMED, CONTROL))]
    header += ["pairs", "streamed - uniform (90 % interval)", "control - uniform"]
    header += ["two uniform seeds", "verdict"]
    title = (
        "Final top-1, means of the seeds (lowest to highest); differences of pairs, in points; "
        f"{result['rounds']} seeds of the control"
    )
    return [(title, header, rows)]


def _spread(values: list[float]) -> str:
    return f"{statistics.fmean(values):.1f} ({min(values):.1f} to {max(values):.1f})"
