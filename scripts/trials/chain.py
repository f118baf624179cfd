"""A search on SLURM as a chain of dependent jobs: search, train the best, evaluate it, report.

The first job only submits the trials and watches them. It puts itself back into the queue before
its time limit, so nothing of the chain needs the login node.
"""

from __future__ import annotations

import logging
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from dataset.errors import UserError
from scripts.jobs.run_folder import from_here
from scripts.jobs.submit import ROOT, require_sbatch
from scripts.jobs.train_run import count_nodes
from scripts.trials.search_file import SearchPlan

log = logging.getLogger("trainyard")
BEST, PAGE = "best", "report.html"  # in the search's folder
SBATCH_TIMEOUT_S = 60
# A job that submits jobs must not hand its own size on to them.
SEARCH = """#!/bin/bash
id=$SLURM_JOB_ID
trap 'scontrol requeue "$id"' USR1
for name in ${{!SLURM_@}}; do [[ $name == SLURM_CONF ]] || unset "$name"; done
{search} resume {folder} & child=$!
while kill -0 $child 2>/dev/null; do wait $child; code=$?; done
exit $code
"""
TRAIN = """#!/bin/bash
set -euo pipefail
flags=$({search} best {folder} {more})
mapfile -t words <<<"$flags"
export TRAINYARD_ROOT={root}
exec bash {root}/slurm/train.sbatch "${{words[@]}}" {last}
"""
REPORT = """#!/bin/bash
exec {report} {folder} --out {page}
"""


def submit_chain(folder: Path, plan: SearchPlan, best_epochs: int) -> list[str]:
    """The ids of the jobs, in their order; each starts when the one before it ended well."""
    require_sbatch()
    (folder / "chain").mkdir(parents=True, exist_ok=True)
    texts = make_scripts(folder, plan, best_epochs)
    job_ids: list[str] = []
    for name, text in texts.items():
        script = folder / "chain" / f"{name}.sh"
        script.write_text(text)
        before = [f"--dependency=afterok:{job_ids[-1]}"] if job_ids else []
        job_ids.append(_sbatch(name, [*before, *_options(folder, plan, name), str(script)]))
    return job_ids


def make_scripts(folder: Path, plan: SearchPlan, best_epochs: int) -> dict[str, str]:
    """The text of each job, in their order; made-up data has nothing to evaluate."""
    python, root = shlex.quote(sys.executable), shlex.quote(str(ROOT))
    words = {
        "search": f"{python} {root}/scripts/search.py",
        "report": f"{python} {root}/scripts/report.py",
        "root": root,
        "folder": shlex.quote(from_here(folder)),
        "page": shlex.quote(from_here(folder / PAGE)),
        "more": f"--epochs {best_epochs}" if best_epochs else "",
    }
    texts = {"search": SEARCH.format(**words), "train": TRAIN.format(**words, last="")}
    if plan.data:
        texts["evaluate"] = TRAIN.format(**words, last="--evaluate")
    return texts | {"report": REPORT.format(**words)}


def _options(folder: Path, plan: SearchPlan, name: str) -> list[str]:
    """sbatch's options of a job: those of a trial for train and evaluate, else one CPU."""
    slurm = plan.slurm
    nodes = count_nodes(plan.place, plan.gpus)
    given: Mapping[str, str | None] = {
        "job-name": f"{folder.name}-{name}",
        "output": f"{folder}/chain/{name}-%j.log",
        "open-mode": "append",
        "kill-on-invalid-dep": "yes",
        "time": slurm.time,
        "partition": slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "mem-per-cpu": slurm.mem_per_cpu,
    }
    options = [f"--{key}={value}" for key, value in given.items() if value is not None]
    if name not in ("train", "evaluate"):
        warning = ["--signal=B:USR1@120"] if name == "search" else []
        return [*options, "--requeue", "--ntasks=1", "--cpus-per-task=1", *warning]
    size = {"nodes": nodes, "ntasks-per-node": plan.gpus // nodes}
    size |= {"cpus-per-task": slurm.cpus_per_task}
    size |= {"gpus-per-node": plan.gpus // nodes} if plan.place.uses_gpus else {}
    options += [f"--{key}={value}" for key, value in size.items()]
    options += [f"--constraint={slurm.constraint}"] if slurm.constraint else []
    return [*options, "--requeue", "--signal=USR1@120"]


def _sbatch(name: str, words: list[str]) -> str:
    """The id of the submitted job."""
    command = ["sbatch", "--parsable", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SBATCH_TIMEOUT_S)
    if done.returncode != 0:
        raise UserError(f"sbatch refused the job {name}: {' '.join(done.stderr.split())}")
    job_id = done.stdout.strip().partition(";")[0]
    log.info("%s  job %s", name, job_id)
    return job_id
