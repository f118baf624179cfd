"""How much each searched flag matters, by Optuna; and our trials as Optuna's (no torch)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from report.search.trials import Search, Trial

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

MIN_TRIALS = 8  # with a value; below, the importance says little about the flags
# Optuna's default is the best tenth: of a search of 20 trials, 2 that tell what good ones share.
BEST_SHARE = 0.25


def to_optuna(trial: Trial) -> FrozenTrial:
    """A trial of ours as one of Optuna's."""
    import optuna

    return optuna.trial.create_trial(
        state=optuna.trial.TrialState[_STATES[trial.state]],
        value=trial.value,
        params=dict(trial.params),
        distributions={
            name: optuna.distributions.json_to_distribution(text)
            for name, text in trial.distributions.items()
        },
        intermediate_values=dict(trial.reports),
        system_attrs=dict(trial.attrs),
    )


_STATES = {"running": "RUNNING", "complete": "COMPLETE", "pruned": "PRUNED", "failed": "FAIL"}


def find_common_epoch(search: Search) -> int:
    """The last epoch that all trials with a value reached; 0 if there is none."""
    return min((max(t.reports, default=0) for t in search.trials if t.value is not None), default=0)


def find_importances(search: Search) -> dict[str, float]:
    """The share of each flag in what sets good trials apart (PED-ANOVA), the largest first.

    Trials are compared at the last epoch that all of them reached: those that were stopped early
    tell about the flags too. It is empty without Optuna, and for too few trials or equal ones.
    """
    try:
        import optuna
    except ImportError:
        return {}
    epoch = find_common_epoch(search)
    compared = [
        replace(trial, state="complete", value=trial.reports[epoch])
        for trial in search.trials
        if trial.value is not None and epoch in trial.reports
    ]
    if len(compared) < MIN_TRIALS or len({trial.value for trial in compared}) < 2:
        return {}
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize" if search.is_maximised else "minimize")
    study.add_trials([to_optuna(trial) for trial in compared])
    evaluator = optuna.importance.PedAnovaImportanceEvaluator(target_quantile=BEST_SHARE)
    return optuna.importance.get_param_importances(study, evaluator=evaluator)
