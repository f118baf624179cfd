"""What the replayed searches of benchmarks/search.py say: regrets, a paired test, the table."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.bench import Table

TPE, RANDOM = "TPE", "random search"
NUM_SAME = 10  # trials: up to here TPE draws at random too
LOOKS = (10, 15, 20, 30)  # trials after which the two are compared
NEAR = 0.5  # points below the table's best that count as having found it
LEVEL = 0.01  # of the sign test, below which one of them is said to be better

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Comparison:
    """The two searchers after a number of trials, seed by seed, in points below the best."""

    num_trials: int
    tpe: Floats
    random: Floats

    @property
    def num_better(self) -> int:
        return int((self.tpe < self.random).sum())

    @property
    def num_worse(self) -> int:
        return int((self.tpe > self.random).sum())

    @property
    def num_equal(self) -> int:
        return len(self.tpe) - self.num_better - self.num_worse

    @property
    def p_value(self) -> float:
        return sign_test(self.num_better, self.num_worse)

    @property
    def words(self) -> str:
        if self.p_value >= LEVEL:
            return "no difference shown"
        return f"{TPE if self.num_better > self.num_worse else RANDOM} is better"


@dataclass(frozen=True)
class Verdict:
    """What a record says."""

    best_pct: float
    median_pct: float  # of the trainings
    num_near: int
    num_cells: int
    comparisons: list[Comparison]
    trials_to_near: dict[str, float]  # median over the seeds; infinite if most never come near


def sign_test(num_better: int, num_worse: int) -> float:
    """The two-sided p of a fair coin falling so unevenly; equal pairs do not count."""
    total, fewer = num_better + num_worse, min(num_better, num_worse)
    tail: float = sum(math.comb(total, k) for k in range(fewer + 1)) / 2**total
    return min(1.0, 2 * tail)


def judge(result: dict[str, Any]) -> Verdict:
    """The verdict on a record."""
    finals = [run["acc1_pct"][-1] for run in result["runs"]]
    best = max(finals)
    below = {
        name: np.round(best - np.array(curves), 6)
        for name, curves in result["best_so_far_pct"].items()
    }
    num_trials = below[TPE].shape[1]
    return Verdict(
        best,
        statistics.median(finals),
        sum(best - final <= NEAR for final in finals),
        len(finals),
        [
            Comparison(look, below[TPE][:, look - 1], below[RANDOM][:, look - 1])
            for look in LOOKS
            if look <= num_trials
        ],
        {name: _median_to_near(points) for name, points in below.items()},
    )


def _median_to_near(below: Floats) -> float:
    is_near = below <= NEAR
    first = np.where(is_near.any(axis=1), is_near.argmax(axis=1) + 1, np.inf)
    return float(np.median(first))


def summarise(verdict: Verdict) -> str:
    """What holds, a line each."""
    lines = [
        f"The best of the {verdict.num_cells} trainings has {verdict.best_pct:.1f} %, the median "
        f"{verdict.median_pct:.1f} %. Within {NEAR:g} points of the best: {verdict.num_near}, "
        "itself included."
    ]
    later = [found for found in verdict.comparisons if found.num_trials > NUM_SAME]
    for words in dict.fromkeys(found.words for found in later):
        looks = [str(found.num_trials) for found in later if found.words == words]
        lines.append(f"After {', '.join(looks)} trials: {words}.")
    lines.append(f"One of them counts as better if the p of the sign test is below {LEVEL:g}.")
    tpe, random = (_describe(verdict.trials_to_near[name]) for name in (TPE, RANDOM))
    lines.append(
        f"To come within {NEAR:g} points of the best, {TPE} needs {tpe} and {RANDOM} {random} "
        "(medians over the seeds)."
    )
    return "\n".join(lines)


def _describe(trials: float) -> str:
    return f"{trials:g} trials" if math.isfinite(trials) else "more trials than it had"


def tables(result: dict[str, Any]) -> list[Table]:
    """Both searchers after some numbers of trials."""
    header = ["trials", f"{TPE}: points below the best", f"{RANDOM}: points below the best"]
    header += [f"{name}: within {NEAR:g} points" for name in (TPE, RANDOM)]
    header += [f"{TPE} better / equal / worse", "p (sign test)"]
    rows = [
        [
            str(found.num_trials),
            *(_spread(points) for points in (found.tpe, found.random)),
            *(f"{100 * (points <= NEAR).mean():.0f} %" for points in (found.tpe, found.random)),
            f"{found.num_better} / {found.num_equal} / {found.num_worse}",
            "same draws" if found.num_trials <= NUM_SAME else _format_p(found.p_value),
        ]
        for found in judge(result).comparisons
    ]
    title = f"Medians (and quartiles) over {result['rounds']} seeds of each searcher"
    return [(title, header, rows)]


def _spread(points: Floats) -> str:
    low, middle, high = np.quantile(points, (0.25, 0.5, 0.75))
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def _format_p(p_value: float) -> str:
    return f"{p_value:.3f}" if p_value >= 0.001 else "< 0.001"
