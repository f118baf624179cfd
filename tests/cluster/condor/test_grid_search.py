"""A search as a DAG on a real pool: drawn, evicted, failing, removed and submitted again, done."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from dataset.fake.make import make_fake_imagenet
from report.search.trials import find_best
from scripts.trials.search_file import read_search
from scripts.trials.store import read_trials
from tests.cluster.condor.grid_mode import ROOT, wait_until
from tests.cluster.condor.jobs import Job, read_events
from tests.scripts.trials.searches import find_disagreements
from train.records.record import read_run

pytestmark = [pytest.mark.condor, pytest.mark.timeout(1500)]
END_S = 900.0
TRAIN = "-a shufflenet_v2_x0_5 -b 4 --image-size 32 -j 0 -p 1 --threads 1"
# In place of PYTHON: each training of trial 1 fails; those of trial 0 stop after their third step
# until a SIGTERM comes, twice, and tell the test. An epoch has 50 steps: the stop comes in time.
PYTHON = """#!/bin/bash
chosen() {{
    local flags=$(sed -n 's/^CHOSEN = //p' {folder}/study/search/trial000$1/chosen.sub)
    [[ $TRAIN == *" $flags" ]]
}}
[[ "$*" == "-m train "* && ! -e {folder}/study/best/chosen.sub ]] || exec {python} "$@"
if chosen 1; then echo "error: this trial fails" >&2; exit 1; fi
for number in 1 2; do
    if chosen 0 && [[ ! -e {folder}/stopped$number ]]; then
        {python} "$@" >log 2>&1 & child=$!
        trap 'kill -CONT $child; kill -TERM $child' TERM
        until grep -q ' step 3/' log || ! kill -0 $child; do sleep 0.02; done
        kill -STOP $child
        touch {folder}/stopped$number
        while kill -0 $child 2>/dev/null; do wait $child; code=$?; done
        cat log
        exit $code
    fi
done
exec {python} "$@"
"""


def write_study(condor: ModuleType) -> Path:
    """A study of three trials in a folder of the pool's user."""
    folder: Path = condor.make_folder()
    folder.chmod(0o777)  # jobs leave their marks there
    make_fake_imagenet(
        folder / "data", classes=2, train_per_class=100, val_per_class=4, size=(40, 40)
    )
    wrapper = folder / "python"
    wrapper.write_text(PYTHON.format(folder=folder, python=condor.PYTHON))
    wrapper.chmod(0o755)
    words = [condor.PYTHON, ROOT / "scripts/condor_study.py", folder / "data"]
    words += [
        "--search",
        "3",
        "--jobs",
        "2",
        "--space",
        "lr=log:0.001..0.1, label_smoothing=0..0.2",
    ]
    words += ["--retries", "1", "--best-epochs", "2", "--out", folder / "study"]
    words += ["DATA_GB=1", "CPUS=1", "MEMORY_GB=2", "ALLOW_CPU=1", "MAX_RETRIES=0", "EPOCHS=1"]
    words += [f"PYTHON={wrapper}", f"TRAIN={TRAIN}"]
    subprocess.run(words, check=True, capture_output=True)
    subprocess.run(["chown", "-R", "--reference", folder, folder], check=True)
    return folder / "study"


def submit_dag(condor: ModuleType, study: Path) -> Job:
    answer = condor.run("condor_submit_dag study.dag", cwd=study)
    found = re.search(r"submitted to cluster (\d+)", answer)
    assert found is not None, answer
    return Job(int(found[1]), study, study / "study.dag.dagman.log", condor.run)


def find_job(condor: ModuleType, study: Path, node: str) -> Job:
    """The last job of a node."""
    log = study / "study.log"
    found = [e.cluster for e in read_events(log) if e.type.name == "SUBMIT" and node in str(e)]
    return Job(found[-1], study, log, condor.run)


def read_said(study: Path) -> str:
    return "\n".join(path.read_text() for path in study.glob("*.log") if path.is_file())


def test_a_search_is_drawn_evicted_removed_and_goes_on_to_its_page(condor: ModuleType) -> None:
    study = write_study(condor)
    search = study / "search"
    dagman = submit_dag(condor, study)
    wait_until((study.parent / "stopped1").exists, "first start of trial 0", END_S)
    drawn = read_trials(search)[0]
    dagman.act("rm")
    dagman.wait_for("JOB_ABORTED", timeout_s=END_S)

    dagman = submit_dag(condor, study)
    wait_until((study.parent / "stopped2").exists, "second start of trial 0", END_S)
    find_job(condor, study, "trial0000").act("vacate_job")
    assert dagman.wait(timeout_s=END_S) == 0, read_said(study)

    trials = read_trials(search)
    assert [trial.state for trial in trials.values()] == ["complete", "failed", "complete"]
    assert trials[0].params == drawn.params
    assert find_disagreements(search, read_search(search)) == []
    reasons = [attempt["reason"] for attempt in read_run(search / "trial0000")["attempts"]]
    assert reasons == ["SIGTERM", "done"]
    assert "error: this trial fails" in (study / "search.log").read_text()
    best = find_best(list(trials.values()), "acc1")
    assert best is not None
    record = read_run(study / "best")
    assert (record["config"]["epochs"], record["config"]["lr"]) == (2, best.params["lr"])
    assert len((study / "evaluation/predictions.csv").read_text().splitlines()) == 1 + 8
    assert "best acc1 of 3 trials" in (study / "report.html").read_text()
    assert (study / "report/report.md").exists()
