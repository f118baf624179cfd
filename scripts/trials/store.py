"""The trials of a search in their folders and in Optuna's journal, which say the same.

A trial's file is written before the journal hears of its end, and after the journal has drawn it.
So after a kill one of the two is a step ahead, and the other is brought up to it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import optuna
from optuna.distributions import (
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.samplers import BaseSampler, TPESampler
from optuna.trial import TrialState

from dataset.durable import sync, write_json
from dataset.errors import UserError
from report.search.importance import to_optuna
from report.search.trials import SCHEMA, TRIAL_FILE, Trial, name_trial, read_trial
from scripts.trials.journal import (
    OUR_STATES,
    find_direction,
    from_optuna,
    is_same,
    mend_journal,
    open_study,
    set_aside,
)
from scripts.trials.search_file import SearchPlan, check_plan, find_epochs
from scripts.trials.space import Space

log = logging.getLogger("trainyard")


class Store:
    """All trials of a search; the caller holds the folder's lock."""

    def __init__(self, folder: Path, plan: SearchPlan, is_sole: bool) -> None:
        self._folder, self._plan = folder, plan
        self._space = check_plan(plan, folder)
        self.trials = read_trials(folder)
        mend_journal(folder, is_sole)
        try:
            self._study = self._open()
            is_other = self._study.direction != find_direction(plan) or any(
                not is_same(self.trials[t.number], t) for t in self._known()
            )
        # A line in the middle may be anything: Optuna's reader then fails in many ways.
        except (ValueError, KeyError, TypeError, AssertionError, AttributeError):
            is_other = True
        if is_other:
            set_aside(folder)
            self._study = self._open()
        self._agree()

    def _open(self) -> optuna.Study:
        return open_study(self._folder, self._plan, find_epochs(self._plan, self._folder))

    def _known(self) -> list[optuna.trial.FrozenTrial]:
        """The trials of the journal that have a file too."""
        return [t for t in self._study.get_trials(deepcopy=False) if t.number in self.trials]

    def _agree(self) -> None:
        """Brings the journal and the files to the same state."""
        for number in range(max(self.trials, default=-1) + 1):
            if number < len(self._study.get_trials(deepcopy=False)):
                continue
            if number in self.trials:
                self._study.add_trial(to_optuna(self.trials[number]))
            else:
                self._study.ask()  # drawn when its turn comes
        for frozen in self._study.get_trials(deepcopy=False):
            ours = self.trials.get(frozen.number)
            state = OUR_STATES[frozen.state]
            if ours is None:
                if frozen.params.keys() == self._space.keys():
                    self.save(from_optuna(frozen))
            elif ours.is_over and state == "running":
                self._tell(ours)
            elif not ours.is_over and state != "running":
                self.save(replace(from_optuna(frozen), jobs=ours.jobs))

    def ask(self, number: int) -> Trial:
        """The trial of this number, drawn now unless it was drawn before."""
        if number in self.trials:
            return self.trials[number]
        while len(self._study.get_trials(deepcopy=False)) <= number:
            self._study.ask()
        draw(self._study, number, self._space, TPESampler(seed=seed_of(self._plan.seed, number)))
        drawn = from_optuna(self._frozen(number))
        return self.save(replace(drawn, began_s=time.time()))

    def report(
        self, trial: Trial, values: Mapping[int, float], num_epochs: int
    ) -> tuple[Trial, bool]:
        """The trial with the metric of new epochs; and whether it is hopeless before its last."""
        known = self._frozen(trial.number).intermediate_values
        handle = optuna.trial.Trial(self._study, self._trial_id(trial.number))
        is_hopeless = False
        for epoch in sorted(values.keys() - known.keys()):
            handle.report(values[epoch], epoch)
            is_hopeless = is_hopeless or (epoch < num_epochs and handle.should_prune())
        attrs = self._frozen(trial.number).system_attrs
        return self.save(replace(trial, reports=dict(values), attrs=dict(attrs))), is_hopeless

    def end(self, trial: Trial, state: str, value: float | None = None, note: str = "") -> Trial:
        """The trial at its end: first in its folder, then in the journal."""
        ended = replace(trial, state=state, value=value, note=note, ended_s=time.time())
        self.save(ended)
        self._tell(ended)
        return ended

    def save(self, trial: Trial) -> Trial:
        """Writes the trial's file."""
        folder = self._folder / trial.name
        is_new = not folder.exists()
        folder.mkdir(exist_ok=True)
        write_trial(folder, trial)
        if is_new:
            sync(self._folder)
        self.trials[trial.number] = trial
        return trial

    def _tell(self, trial: Trial) -> None:
        if trial.state == "complete":
            self._study.tell(trial.number, trial.value)
        else:
            states = {"pruned": TrialState.PRUNED, "failed": TrialState.FAIL}
            self._study.tell(trial.number, state=states[trial.state])

    def _frozen(self, number: int) -> optuna.trial.FrozenTrial:
        return self._study.get_trials(deepcopy=False)[number]

    def _trial_id(self, number: int) -> int:
        return self._frozen(number)._trial_id


def seed_of(search_seed: int, number: int) -> int:
    """The seed of one trial's draw.

    One sampler a trial: a search that was resumed draws what an undisturbed one would.
    """
    (seed,) = np.random.SeedSequence([search_seed, number]).generate_state(1)
    return int(seed)


def draw(study: optuna.Study, number: int, space: Space, sampler: BaseSampler) -> None:
    """Draws the flags of a trial that the study has asked for.

    If a kill came after some of them, those stay. They are drawn once more all the same and thrown
    away, so that the next ones get the random numbers that they would have had.
    """
    study.sampler = sampler
    frozen = study.get_trials(deepcopy=False)[number]
    trial, known = optuna.trial.Trial(study, frozen._trial_id), set(frozen.params)
    for name, distribution in space.items():
        if name in known:
            if name not in (trial.relative_params or ()):
                sampler.sample_independent(study, frozen, name, distribution)
        elif isinstance(distribution, FloatDistribution):
            trial.suggest_float(name, distribution.low, distribution.high, log=distribution.log)
        elif isinstance(distribution, IntDistribution):
            trial.suggest_int(name, distribution.low, distribution.high, log=distribution.log)
        elif isinstance(distribution, CategoricalDistribution):
            trial.suggest_categorical(name, distribution.choices)


def write_trial(folder: Path, trial: Trial) -> None:
    """Writes trial.json."""
    write_json(folder / TRIAL_FILE, {"schema": SCHEMA, **asdict(trial)})


def read_trials(folder: Path) -> dict[int, Trial]:
    """The trials that have a file, by number."""
    found = {}
    for file in sorted(folder.glob(f"trial*/{TRIAL_FILE}")):
        trial = read_trial(file.parent)
        if file.parent.name != name_trial(trial.number):
            raise UserError(f"{file} is of {trial.name}; move {file.parent} away")
        found[trial.number] = trial
    return found
