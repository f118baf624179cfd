"""A search as a DAG: check, index, the trials, the training of the best, its evaluation, report.

DAGMan runs the PRE script of every node whose parents are done, whatever MAXJOBS says. Trials that
waited for MAXJOBS alone would all be drawn at the start, before there is a result to learn from.
So they stand in lanes, one a job that may run at once: a trial is drawn when the one before it in
its lane has ended.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from urllib.parse import unquote

from dataset.errors import UserError
from dataset.names import INDEX_SUFFIX
from report.search.trials import MAX_TRIALS, name_trial
from scripts.jobs.run_folder import relative_data
from scripts.trials.node import BEST, CHOSEN_FILE, EVALUATION, SEARCH, SKIP
from scripts.trials.search_file import CONDOR, SearchPlan, base_flags, check_plan
from scripts.trials.space import parse_space
from train.config import parse_config

EPOCHS = "5"  # condor/train.sub's default

NODE = """#!/bin/bash
# Run by the nodes of study.dag; search.log has what it said.
export PYTHONPATH={root}
exec {python} -m scripts.trials.node "$@" >>search.log 2>&1
"""
INDEX = """#!/bin/bash
# The index of each tar, made once and not by every job.
shopt -s nullglob
tars=({data}/*.tar)
(( ${{#tars[@]}} == 0 )) || exec {index} "${{tars[@]}}" >>search.log 2>&1
"""
INDEX_URL = """#!/bin/bash
# The index of the training tar: with it all jobs train while the tar arrives. Its bytes pass once.
exec {index} --checksums --index-dir . {words} >>search.log 2>&1
"""
REPORT = """#!/bin/bash
# After all nodes, whatever became of them. $1: the DAG's status, $2: how many nodes failed.
mkdir -p {folders}
found=()
for path in {folders} study.log; do [[ ! -s $path ]] || found+=("$path"); done
if [[ -s study.log ]]; then
    {grid} study.log --runs {folders} --out report >report.log 2>&1 || exit 1
fi
{page} "${{found[@]}}" --out report.html >>report.log 2>&1 || exit 1
# The status of this node is that of the DAG: a failure leaves a rescue DAG that runs the rest.
[[ $1 == 0 && $2 == 0 ]]
"""


@dataclass(frozen=True)
class SearchDag:
    """What the DAG is made from."""

    plan: SearchPlan
    submit_file: Path
    values: Mapping[str, str]  # of condor/train.sub, the same for all jobs
    retries: int
    best_epochs: int  # 0: as in the trials
    index_url: str = ""  # of a tar whose index is made first, for the jobs to stream it

    @property
    def has_index(self) -> bool:
        """Whether an index is made first: of this URL, or of the tars in a folder."""
        is_folder = bool(self.plan.data) and "://" not in self.plan.data
        return is_folder or bool(self.index_url)

    @property
    def evaluates(self) -> bool:
        return bool(self.plan.data)  # made-up data has no validation images


def plan_search(
    data: str,
    trials: int,
    jobs: int,
    space: str,
    metric: str,
    macros: Mapping[str, str],
    folder: Path,
) -> SearchPlan:
    """The search; raises for flags and spaces that the trainer would refuse."""
    for name, value in (("search", trials), ("jobs", jobs)):
        if not 1 <= value <= MAX_TRIALS:
            raise UserError(f"--{name} {value}: must be from 1 to {MAX_TRIALS}")
    if unfit := re.search(r"[\"'\\$]", space):
        raise UserError(f"--space has a {unfit[0]}, which a submit file cannot carry; avoid it")
    words = ["--dummy"] if data == "dummy" else []
    if "epochs" not in parse_space(space) or "EPOCHS" in macros:
        words += ["--epochs", macros.get("EPOCHS", EPOCHS)]
    plan = SearchPlan(
        data="" if data == "dummy" else relative_data(data, folder.absolute()),
        cluster=CONDOR,
        trials=trials,
        jobs=min(jobs, trials),
        space=space,
        metric=metric,
        prune=False,
        seed=0,
        gpus=1,
        train_flags=(*words, *macros.get("TRAIN", "").split()),
    )
    check_plan(plan, folder.absolute())
    return plan


def find_index_to_make(
    plan: SearchPlan, folder: Path, macros: Mapping[str, str], unindexed: Collection[str]
) -> str:
    """The URL of the training tar if jobs would stream it, had it an index; else nothing.

    A job that does not stream fetches the tar whole and makes the index from its own disk, in less
    time than another pass over the network takes.
    """
    config = parse_config(base_flags(plan, folder.absolute()))
    urls = plan.data.split(",") if "://" in plan.data else []
    streams = (
        0 < len(urls) <= 2
        and all(url.partition("?")[0].endswith(".tar") for url in urls)
        and "never" not in (macros.get("STREAM", "auto"), config.stream)
        and macros.get("PLUGIN", "false") != "true"
        and macros.get("DATA_MODE", "tar") != "extract"
        and not macros.get("FETCH")
        and not config.val_share
    )
    is_known = config.index is not None or "INDEX" in macros
    return config.urls[0] if streams and not is_known and config.urls[0] in unindexed else ""


def make_files(dag: SearchDag, python: str, root: Path) -> dict[str, str]:
    """study.dag and its scripts, by their names; `python` is quoted for a shell."""

    def script(name: str) -> str:
        return f"{python} {shlex.quote(str(root / 'scripts' / name))}"

    folders = " ".join((SEARCH, BEST, EVALUATION))
    report = REPORT.format(grid=script("grid_report.py"), page=script("report.py"), folders=folders)
    files = {
        "search.sh": NODE.format(python=python, root=shlex.quote(str(root))),
        "report.sh": report,
        "study.dag": make_search_dag(dag),
    }
    if dag.index_url:
        federation = dag.values.get("FEDERATION", "")
        words = [_name_tar(dag.index_url), *(["--federation", federation] if federation else [])]
        files["index.sh"] = INDEX_URL.format(index=script("index_tar.py"), words=shlex.join(words))
    elif dag.has_index:
        data = shlex.quote(dag.values["DATA"])
        files["index.sh"] = INDEX.format(data=data, index=script("index_tar.py"))
    return files


def _name_tar(url: str) -> str:
    """A tar as index_tar.py takes it: the path of a file, else the URL."""
    return unquote(url.removeprefix("file://")) if url.startswith("file://") else url


def make_search_dag(dag: SearchDag) -> str:
    """The text of study.dag."""
    trials = [name_trial(number) for number in range(dag.plan.trials)]
    index = ["JOB index noop.sub NOOP", "SCRIPT DEFER 75 300 PRE index index.sh"]
    values = _training_values(dag)
    lines = [
        "# Written by scripts/condor_study.py. Submit it here: condor_submit_dag study.dag",
        "JOB check noop.sub NOOP",
        "SCRIPT DEFER 75 300 PRE check check.sh",
        *(index if dag.has_index else []),
    ]
    for number, name in enumerate(trials):
        lines += [
            *_job(dag, name, f"{SEARCH}/{name}", f"ask {number}", values),
            f"SCRIPT POST {name} search.sh tell {number} $RETURN $JOBID $RETRY $MAX_RETRIES",
            f"PRE_SKIP {name} {SKIP}",
        ]
    lines += [*_job(dag, "best", BEST, f"best {dag.best_epochs}", values)]
    lines += [f"SCRIPT POST best search.sh home {BEST} $RETURN $JOBID"]
    if dag.evaluates:
        lines += _job(dag, "evaluate", EVALUATION, "evaluate", _evaluation_values(values))
        lines += [f"SCRIPT POST evaluate search.sh home {EVALUATION} $RETURN $JOBID"]
    lines += ["", *_order(dag, trials), "", "FINAL report noop.sub NOOP"]
    lines += ["SCRIPT POST report report.sh $DAG_STATUS $FAILED_COUNT"]
    return "\n".join(lines) + "\n"


def _training_values(dag: SearchDag) -> Mapping[str, str]:
    """With the index that was made first."""
    if not dag.index_url:
        return dag.values
    name = unquote(PurePosixPath(dag.index_url.partition("?")[0]).name)  # as index_tar.py names it
    return dict(dag.values) | {"INDEX": name + INDEX_SUFFIX}


def _evaluation_values(values: Mapping[str, str]) -> dict[str, str]:
    """Its weights are those of best, whatever that training began with; it does not stream.

    With the index of the training tar it fetches the validation tar alone. With CACHE_GB there is
    an index, and room for that tar in CACHE_GB: it asks for no more disk than the trials.
    """
    words = [word for word in values.get("TRAIN", "").split() if word != "--pretrained"]
    kept = {name: value for name, value in values.items() if name != "CACHE_GB"}
    if "," in values["DATA"] and re.search("[1-9]", values.get("CACHE_GB", "")):
        kept["DATA_GB"] = values["CACHE_GB"]
    return kept | {"TRAIN": " ".join(words), "STREAM": "auto"}


def _job(dag: SearchDag, name: str, folder: str, pre: str, values: Mapping[str, str]) -> list[str]:
    own = {"RESULTS": folder, "TRIAL": f"{folder}/{CHOSEN_FILE}"}
    pairs = " ".join(f'{key}="{value}"' for key, value in (dict(values) | own).items())
    return [
        "",
        f"JOB {name} {dag.submit_file}",
        f"VARS {name} PREPEND {pairs}",
        f"RETRY {name} {dag.retries} UNLESS-EXIT 2",
        f"SCRIPT PRE {name} search.sh {pre}",
    ]


def _order(dag: SearchDag, trials: list[str]) -> list[str]:
    """Which node waits for which."""
    jobs, first = dag.plan.jobs, "index" if dag.has_index else "check"
    lines = ["PARENT check CHILD index"] if dag.has_index else []
    lines += [f"PARENT {first} CHILD {' '.join(trials[:jobs])}"]
    lines += [f"PARENT {a} CHILD {b}" for a, b in zip(trials, trials[jobs:], strict=False)]
    lines += [f"PARENT {' '.join(trials[-jobs:])} CHILD best"]
    return [*lines, *(["PARENT best CHILD evaluate"] if dag.evaluates else [])]
