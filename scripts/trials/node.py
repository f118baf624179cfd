"""What the nodes of a search's DAG run on the access point: ask Optuna, tell it, take the best.

DAGMan may run several at once, and one again after a crash: they take turns, and each can be
repeated. Jobs get their flags from a file, because the VARS of a DAG are fixed when it is written.
"""

from __future__ import annotations

import logging
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from dataset.durable import writing_whole
from dataset.errors import CRASH, DIVERGED, DONE, TRY_AGAIN, USER_MISTAKE, UserError, run_command
from report.search.trials import Trial, find_best
from scripts.jobs.run_folder import only_one
from scripts.trials.results import (
    ENOUGH_FAILURES,
    describe_params,
    drop_losers,
    find_end,
    read_metric,
)
from scripts.trials.search_file import SearchPlan, find_epochs, read_search
from scripts.trials.space import to_flags
from scripts.trials.store import Store
from train.records.record import RUN_FILE

log = logging.getLogger("trainyard")
SEARCH, BEST, EVALUATION = "search", "best", "evaluation"  # folders of the study
CHOSEN_FILE = "chosen.sub"
SKIP = 99  # of a PRE script (PRE_SKIP): this trial is over, and so is its node
LOG_LINES = 6
USAGE = """give one of these, in the folder of a study; study.dag does:
  ask TRIAL                             PRE of a trial: writes its flags
  tell TRIAL CODE JOB RETRY RETRIES     POST of a trial: what came of it
  best EPOCHS                           PRE of best; EPOCHS 0: as in the trials
  evaluate                              PRE of evaluate
  home FOLDER CODE JOB                  POST of best and evaluate"""


def main(words: Sequence[str] | None = None) -> int:
    """Does what one script of a node is there for; its exit code decides about the node."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    study = Path.cwd()
    match list(sys.argv[1:] if words is None else words):
        case ["ask", number]:
            return ask(study, int(number))
        case ["tell", number, code, job_id, retry, max_retries]:
            is_last = int(retry) >= int(max_retries)
            return tell(study, int(number), int(code), job_id, is_last)
        case ["best", epochs]:
            return choose_best(study, int(epochs))
        case ["evaluate"]:
            return choose_model(study)
        case ["home", folder, code, job_id]:
            bring_home(study / folder, job_id)
            return DONE if code == "0" else CRASH
        case _:
            raise UserError(USAGE)


@contextmanager
def opened(study: Path) -> Iterator[tuple[SearchPlan, Store]]:
    """The search of a study, while no other script of the DAG has it."""
    folder = study / SEARCH
    plan = read_search(folder)
    with only_one(folder, waits=True) as has_lock:
        yield plan, Store(folder, plan, has_lock)


def ask(study: Path, number: int) -> int:
    """Draws the trial's flags, unless that was done before, and writes them for its job."""
    with opened(study) as (_, store):
        known = store.trials.get(number)
        if known is not None and known.is_over:
            return SKIP
        if known is None:
            refuse_hopeless(study, list(store.trials.values()))
        trial = store.ask(number)
        write_chosen(study / SEARCH / trial.name, to_flags(trial.params))
        log.info("%s  starts: %s", trial.name, describe_params(trial))
    return DONE


def refuse_hopeless(study: Path, trials: Sequence[Trial]) -> None:
    """Raises when the first trials failed and none ended well: the next would fail, too."""
    if is_hopeless(trials):
        failed = sum(trial.state == "failed" for trial in trials)
        raise UserError(
            f"{failed} trials failed and none ended well, so no more are started; "
            f"{show_first_failure(study, trials)}"
        )


def is_hopeless(trials: Sequence[Trial]) -> bool:
    failed = [trial for trial in trials if trial.state == "failed"]
    over = [trial for trial in trials if trial.is_over]
    return len(failed) >= ENOUGH_FAILURES and len(failed) == len(over)


def show_first_failure(study: Path, trials: Sequence[Trial]) -> str:
    """Where the log of the first failed trial is, and its last line."""
    first = next((trial for trial in trials if trial.state == "failed"), None)
    if first is None:
        return "search.py status has the trials"
    tail = read_tail(study, first)
    return f"the log of {first.name} ends with: {tail[-1] if tail else 'nothing'}"


def read_tail(study: Path, trial: Trial) -> list[str]:
    """The last lines that a trial's last job wrote."""
    lines: list[str] = []
    for suffix in ("out", "err"):
        path = study / SEARCH / f"{trial.name}.{trial.jobs[-1] if trial.jobs else ''}.{suffix}"
        lines += path.read_text(errors="replace").splitlines() if path.exists() else []
    return lines[-LOG_LINES:]


def tell(study: Path, number: int, code: int, job_id: str, is_last: bool) -> int:
    """Tells Optuna what came of a trial; 0 unless the same trial must be tried again."""
    with opened(study) as (plan, store):
        trial = store.trials[number]
        if trial.is_over:
            return DONE
        folder = study / SEARCH / trial.name
        bring_home(folder, job_id)
        if job_id not in trial.jobs:
            trial = store.save(trial.with_job(job_id))
        if code == DONE and (folder / RUN_FILE).exists():
            epochs = find_epochs(plan, study / SEARCH)
            values = read_metric(folder, plan.metric, "with --metric, in a new study")
            trial, _ = store.report(trial, values, epochs)
            trial = store.end(trial, *find_end(trial, plan.metric))
        elif code == DIVERGED:  # a result too: the sampler must keep away from there
            trial = store.end(trial, "pruned", None, "diverged")
        elif is_worth_a_retry(code, is_last):
            log.info("%s  job %s ended with %d; it is tried again", trial.name, job_id, code)
            return CRASH
        else:
            trial = store.end(trial, "failed", None, f"exit {code}")
            for line in read_tail(study, trial):
                log.error("    %s", line)
        drop_losers(plan, list(store.trials.values()), (), study / SEARCH)
        result = "" if trial.value is None else f" {plan.metric} {trial.value:.4g}"
        log.info("%s  %s%s %s", trial.name, trial.state, result, trial.note)
    return DONE


def is_worth_a_retry(code: int, is_last: bool) -> bool:
    """Whether a job may end well another time: a user error never does, and what is no failure of
    the training (75, a removed job, a lost result) remains to be done even after the last try."""
    if code in (DONE, TRY_AGAIN) or code < 0:
        return True
    return not is_last and code != USER_MISTAKE


def bring_home(folder: Path, job_id: str) -> None:
    """Moves what a job brought from FOLDER/JOB into FOLDER, in place of an earlier try's."""
    came = folder / job_id
    if not came.is_dir():
        return
    for path in came.iterdir():
        if (folder / path.name).is_dir():
            shutil.rmtree(folder / path.name)
        path.replace(folder / path.name)
    came.rmdir()


def choose_best(study: Path, epochs: int) -> int:
    """Writes the best trial's flags for the job that trains it; with EPOCHS, for so many."""
    with opened(study) as (plan, store):
        trials = list(store.trials.values())
    best = find_best(trials, plan.metric)
    if best is None:
        raise UserError(f"no trial has a result; {show_first_failure(study, trials)}")
    flags = to_flags({n: v for n, v in best.params.items() if not epochs or n != "epochs"})
    write_chosen(study / BEST, [*flags, *(["--epochs", str(epochs)] if epochs else [])])
    log.info("best: %s, %s %.4g", best.name, plan.metric, best.value)
    return DONE


def choose_model(study: Path) -> int:
    """Writes which model is evaluated: the one that the job of `best` brought."""
    models = sorted((study / BEST).glob("*.pt"))
    if len(models) != 1:
        raise UserError(f"{study / BEST} holds {len(models)} models, not 1; submit the DAG again")
    flags = (study / BEST / CHOSEN_FILE).read_text().partition("=")[2].split()
    write_chosen(study / EVALUATION, [*flags, "-e"], f"WEIGHTS = {BEST}/{models[0].name}\n")
    return DONE


def write_chosen(folder: Path, flags: Sequence[str], more: str = "") -> None:
    """Writes the file that condor/train.sub includes."""
    folder.mkdir(exist_ok=True)
    with writing_whole(folder / CHOSEN_FILE) as file:
        file.write(f"CHOSEN = {' '.join(flags)}\n{more}".encode())


if __name__ == "__main__":
    sys.exit(run_command(main))
