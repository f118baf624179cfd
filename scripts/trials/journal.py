"""Optuna's journal of a search: a file that a kill at any moment leaves usable."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path

import optuna
from optuna.pruners import BasePruner, NopPruner, SuccessiveHalvingPruner
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from report.search.trials import Trial, is_maximised
from scripts.trials.search_file import SearchPlan

log = logging.getLogger("trainyard")
JOURNAL = "journal.log"
STUDY = "search"
REDUCTION = 3  # of successive halving: a third goes on from a ninth and a third of the epochs
OUR_STATES: Mapping[TrialState, str] = {
    TrialState.RUNNING: "running",
    TrialState.COMPLETE: "complete",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
}


def open_study(folder: Path, plan: SearchPlan, num_epochs: int) -> optuna.Study:
    """The study of the journal; a new one if there is none. The caller holds the folder's lock."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    path = str(folder.absolute() / JOURNAL)
    storage = JournalStorage(JournalFileBackend(path, lock_obj=JournalFileOpenLock(path)))
    pruner = make_pruner(plan, num_epochs)
    if any(study.study_name == STUDY for study in storage.get_all_studies()):
        return optuna.load_study(study_name=STUDY, storage=storage, pruner=pruner)
    return optuna.create_study(
        study_name=STUDY, storage=storage, direction=find_direction(plan), pruner=pruner
    )


def find_direction(plan: SearchPlan) -> StudyDirection:
    """Optuna's word for what is better."""
    is_more = is_maximised(plan.metric)
    return StudyDirection.MAXIMIZE if is_more else StudyDirection.MINIMIZE


def make_pruner(plan: SearchPlan, num_epochs: int) -> BasePruner:
    """Successive halving with its rungs at a ninth and a third of the epochs."""
    if not plan.prune:
        return NopPruner()
    first = max(1, num_epochs // REDUCTION**2)
    return SuccessiveHalvingPruner(min_resource=first, reduction_factor=REDUCTION)


def mend_journal(folder: Path, is_sole: bool) -> None:
    """Cuts a line that was being written at a kill, and takes over the lock of that process.

    `is_sole`: we hold the folder's lock, so whoever made the journal's own is dead. Without such
    locks Optuna takes it over itself, when it has not changed for 30 s.
    """
    path = folder / JOURNAL
    if is_sole:
        for lock in folder.glob(f"{JOURNAL}.lock*"):
            lock.unlink(missing_ok=True)
    if not path.exists():
        return
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        log.warning("%s: cut a torn last line (%d bytes)", path, len(data) - whole)
        os.truncate(path, whole)


def set_aside(folder: Path) -> None:
    """Renames a journal that cannot be read; the study is made again from the trials' folders."""
    path = folder / JOURNAL
    number = 1
    while (aside := path.with_name(f"{JOURNAL}.damaged{number}")).exists():
        number += 1
    path.rename(aside)
    log.warning("%s cannot be used and is now %s; made again from the trials", path, aside.name)


def from_optuna(frozen: FrozenTrial) -> Trial:
    """A trial of Optuna's as one of ours."""
    begin, end = frozen.datetime_start, frozen.datetime_complete
    return Trial(
        number=frozen.number,
        params=dict(frozen.params),
        distributions={
            name: optuna.distributions.distribution_to_json(distribution)
            for name, distribution in frozen.distributions.items()
        },
        state=OUR_STATES[frozen.state],
        value=frozen.value,
        reports=dict(frozen.intermediate_values),
        attrs=dict(frozen.system_attrs),
        began_s=begin.timestamp() if begin else 0.0,
        ended_s=end.timestamp() if end else None,
    )


def is_same(trial: Trial, frozen: FrozenTrial) -> bool:
    """Whether both are of one draw: then the file may be ahead of the journal, no more."""
    ours = json.dumps([dict(trial.params), dict(trial.distributions)], sort_keys=True)
    theirs = from_optuna(frozen)
    return ours == json.dumps([dict(theirs.params), dict(theirs.distributions)], sort_keys=True)
