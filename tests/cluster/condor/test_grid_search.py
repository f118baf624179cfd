"""A search as a DAG on a real pool: drawn, evicted, failing, removed and submitted again, done."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from dataset.fake.make import make_fake_imagenet
from dataset.names import INDEX_SUFFIX, TRAIN_TAR, VAL_TAR
from report.search.trials import find_best
from scripts.trials.search_file import read_search
from scripts.trials.store import read_trials
from tests.cluster.condor.grid_mode import ROOT, wait_until
from tests.cluster.condor.jobs import Job, read_events
from tests.scripts.trials.searches import find_disagreements
from train.records.record import read_run

pytestmark = [pytest.mark.condor, pytest.mark.osdf, pytest.mark.timeout(1500)]
END_S = 900.0
# Batches of 4 and a last feature map of one pixel: with a rate of 0.013 the validation loss was 10,
# 1,100 or not finite, by the seed, and with the last the evaluation of the best rightly ends with
# 4; with 0.001 it is below 1.
SPACE = "lr=log:0.0001..0.001, label_smoothing=0..0.2"
TRAIN = "-a shufflenet_v2_x0_5 -b 4 --image-size 32 -j 0 -p 1 --threads 1"
# A training that stops itself after its third step: on a busy machine another process would come
# too late for it.
STOP = """
import logging, os, runpy, signal, sys
def stop(record):
    if " step 3/" in record.getMessage():
        os.kill(os.getpid(), signal.SIGSTOP)
    return True
logging.getLogger("trainyard").addFilter(stop)  # the trainer replaces its handlers
runpy.run_module("train", run_name="__main__", alter_sys=True)
"""
# In place of PYTHON: each training of trial 1 fails; those of trial 0 stop until a SIGTERM comes,
# twice, and tell the test.
PYTHON = """#!/bin/bash
chosen() {{
    local flags=$(sed -n 's/^CHOSEN = //p' {folder}/study/search/trial000$1/chosen.sub)
    [[ $TRAIN == *" $flags" ]]
}}
[[ "$*" == "-m train "* && ! -e {folder}/study/best/chosen.sub ]] || exec {python} "$@"
if chosen 1; then echo "error: this trial fails" >&2; exit 1; fi
for number in 1 2; do
    if chosen 0 && [[ ! -e {folder}/stopped$number ]]; then
        {python} {folder}/stop.py "${{@:3}}" >log 2>&1 & child=$!
        trap 'kill -CONT $child; kill -TERM $child' TERM
        until [[ $(</proc/$child/stat) == *") T "* ]] || ! kill -0 $child; do sleep 0.02; done
        touch {folder}/stopped$number
        while kill -0 $child 2>/dev/null; do wait $child; code=$?; done
        cat log
        exit $code
    fi
done
exec {python} "$@"
"""


def put_data(osdf: ModuleType, folder: Path) -> str:
    """The URLs of two tars with class folders and without an index beside them."""
    place, urls = f"grid-search-{os.urandom(4).hex()}", []
    for name, num_images in ((TRAIN_TAR, 100), (VAL_TAR, 4)):
        make_fake_imagenet(
            folder / name,
            classes=2,
            train_per_class=num_images,
            val_per_class=1,
            size=(40, 40),
            shape="tree",
        )
        urls.append("osdf://" + osdf.put(f"{place}/{name}", folder / name / TRAIN_TAR))
    return ",".join(urls)


def write_study(condor: ModuleType, osdf: ModuleType) -> Path:
    """A study of three trials in a folder of the pool's user."""
    folder: Path = condor.make_folder()
    folder.chmod(0o777)  # jobs leave their marks there
    (folder / "stop.py").write_text(STOP)
    wrapper = folder / "python"
    wrapper.write_text(PYTHON.format(folder=folder, python=condor.PYTHON))
    wrapper.chmod(0o755)
    words = [condor.PYTHON, ROOT / "scripts/condor_study.py", put_data(osdf, folder / "data")]
    words += [
        "--search",
        "3",
        "--jobs",
        "2",
        "--space",
        SPACE,
    ]
    words += ["--retries", "1", "--best-epochs", "2", "--out", folder / "study"]
    words += ["DATA_GB=1", "CPUS=1", "MEMORY_GB=2", "ALLOW_CPU=1", "MAX_RETRIES=0", "EPOCHS=1"]
    words += [f"PYTHON={wrapper}", f"TRAIN={TRAIN}", f"FEDERATION={osdf.DIRECTOR_HTTP_URL}"]
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


def count_fetched_for_evaluation(condor: ModuleType, osdf: ModuleType, study: Path) -> int:
    """The bytes of the training tar that were sent once the evaluation ran."""
    found = re.search(rf"osdf://([^,]*/{TRAIN_TAR})", (study / "study.dag").read_text())
    assert found is not None
    start_s = find_job(condor, study, "evaluate").wait_for("EXECUTE").timestamp
    return sum(e["bytes"] for e in osdf.traffic(found[1]) if e["started_s"] >= start_s)


def test_a_search_is_drawn_evicted_removed_and_goes_on_to_its_page(
    condor: ModuleType, osdf: ModuleType
) -> None:
    study = write_study(condor, osdf)
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
    assert (study / f"{TRAIN_TAR}{INDEX_SUFFIX}").exists()
    for folder in (search / "trial0000", search / "trial0002", study / "best"):
        assert read_run(folder)["attempts"][-1]["stream"]["is_whole"], "by the index of its node"
    assert "error: this trial fails" in (study / "search.log").read_text()
    best = find_best(list(trials.values()), "acc1")
    assert best is not None
    record = read_run(study / "best")
    assert (record["config"]["epochs"], record["config"]["lr"]) == (2, best.params["lr"])
    assert len((study / "evaluation/predictions.csv").read_text().splitlines()) == 1 + 8
    assert count_fetched_for_evaluation(condor, osdf, study) < 1000  # bytes that ask for the size
    assert "best acc1 of 3 trials" in (study / "report.html").read_text()
    assert (study / "report/report.md").exists()
