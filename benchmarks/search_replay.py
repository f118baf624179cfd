"""The two searchers of benchmarks/search.py on a recorded table: a trial takes no time at all."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

import optuna
from optuna.samplers import BaseSampler, RandomSampler, TPESampler

from benchmarks.search_task import Cell, SearchTask
from benchmarks.search_verdict import RANDOM, TPE
from scripts.trials.store import draw, seed_of

# A seed draws the same first 10 trials with both: TPE begins with Optuna's random sampler.
SEARCHERS: Mapping[str, Callable[[int], BaseSampler]] = {
    TPE: lambda seed: TPESampler(seed=seed),  # as scripts/search.py has it
    RANDOM: lambda seed: RandomSampler(seed=seed),
}


def replay_all(task: SearchTask, accuracies: Mapping[Cell, float]) -> dict[str, list[list[float]]]:
    """The best accuracy after each trial, of each searcher and seed."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return {
        name: [replay(task, accuracies, make, seed) for seed in range(task.num_seeds)]
        for name, make in SEARCHERS.items()
    }


def replay(
    task: SearchTask,
    accuracies: Mapping[Cell, float],
    make_sampler: Callable[[int], BaseSampler],
    seed: int,
) -> list[float]:
    """The best accuracy after each trial of one search; a cell may be drawn again."""
    study = optuna.create_study(direction="maximize", sampler=make_sampler(seed))
    found = []
    for number in range(task.num_trials):
        study.ask()
        draw(study, number, task.space, make_sampler(seed_of(seed, number)))
        drawn = study.get_trials(deepcopy=False)[number].params
        found.append(accuracies[task.cell_of(drawn)])
        study.tell(number, found[-1])
    return list(itertools.accumulate(found, max))
