"""The DAG of a study on a real pool: check, jobs, a retry, a rescue, and the report at its end."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

from tests.cluster.condor.grid_mode import ROOT, TINY
from tests.cluster.condor.jobs import Job

pytestmark = [pytest.mark.condor, pytest.mark.timeout(900)]
# In place of PYTHON: the job with seed 1 fails at its first try, the one with seed 2 until `fixed`.
FLAKY = """#!/bin/bash
if [[ "$*" == "-m train "* ]]; then
    if [[ $SEED == 1 && ! -e {folder}/tried ]]; then touch {folder}/tried; exit 1; fi
    if [[ $SEED == 2 && ! -e {folder}/fixed ]]; then exit 1; fi
fi
exec {python} "$@"
"""


def write_study(condor: ModuleType) -> Path:
    """A study of three jobs in a folder of the pool's user."""
    folder: Path = condor.make_folder()
    folder.chmod(0o777)  # jobs leave their marks there
    wrapper = folder / "python"
    wrapper.write_text(FLAKY.format(folder=folder, python=condor.PYTHON))
    wrapper.chmod(0o755)
    macros = [
        *("DATA_GB=1", "CPUS=1", "MEMORY_GB=2", "ALLOW_CPU=1", "MAX_RETRIES=0", "EPOCHS=1"),
        *(f"PYTHON={wrapper}", f"TRAIN={TINY} --max-steps 2"),
    ]
    words = [condor.PYTHON, ROOT / "scripts/condor_study.py", "dummy", *macros]
    words += ["--jobs", "3", "--retries", "1", "--out", folder / "study"]
    subprocess.run(words, check=True, capture_output=True)
    subprocess.run(["chown", "-R", "--reference", folder, folder / "study"], check=True)
    return folder / "study"


def run_dag(condor: ModuleType, study: Path) -> int:
    """Submits the DAG and returns how DAGMan ended."""
    answer = condor.run("condor_submit_dag study.dag", cwd=study)
    found = re.search(r"submitted to cluster (\d+)", answer)
    assert found is not None, answer
    dagman = Job(int(found[1]), study, study / "study.dag.dagman.log", condor.run)
    return dagman.wait()


def count_outcomes(study: Path) -> Counter[str]:
    with open(study / "report/jobs.csv", newline="") as file:
        return Counter(row["outcome"] for row in csv.DictReader(file))


def test_a_study_retries_reports_and_goes_on_where_it_stopped(condor: ModuleType) -> None:
    study = write_study(condor)
    assert run_dag(condor, study) != 0
    assert (study / "study.dag.rescue001").exists()
    # Job 1: one failure, then success; job 2: two failures, the first try and its one retry.
    assert count_outcomes(study) == {"success": 2, "wrong output": 3}

    (study.parent / "fixed").touch()
    assert run_dag(condor, study) == 0
    assert count_outcomes(study) == {"success": 3, "wrong output": 3}
    assert (study / "report/report.md").exists()


@pytest.mark.osdf
def test_the_check_of_a_study(condor: ModuleType, osdf: ModuleType) -> None:
    path = osdf.put("grid-check/some.tar", b"x" * 2_000_000)

    def check(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(ROOT / "scripts/condor_study.py"), "--check", *words]
        command.append(f"FEDERATION={osdf.DIRECTOR_HTTP_URL}")
        return subprocess.run(command, capture_output=True, text=True)

    good = check(f"osdf://{path}", "DATA_GB=1")
    assert good.returncode == 0, good.stderr
    assert "2000000 bytes, no index beside it" in good.stderr
    small = check(f"osdf://{path}", "DATA_GB=0.001")
    assert (small.returncode, small.stderr.count("error:")) == (2, 1)
    assert "DATA_GB=0.001: jobs would run out of disk" in small.stderr
