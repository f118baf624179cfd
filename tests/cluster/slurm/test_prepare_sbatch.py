"""slurm/prepare.sbatch on the real SLURM: fetch, index, extract, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from tests.cluster.slurm.conftest import NUM_TRAIN, NUM_VAL
from tests.conftest import ROOT

pytestmark = pytest.mark.slurm

PREPARE = ROOT / "slurm/prepare.sbatch"
TARS = ("ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar")


def test_a_url_is_fetched_with_its_labels_and_indexed(
    slurm: ModuleType, tiny_data: Path, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    source = f"file://{tiny_data}"
    flags = ("index", "--connections", "2")  # what follows goes to fetch_osdf.py
    job = slurm.sbatch("--partition=cpu", PREPARE, source, data, *flags, cwd=tmp_path)
    assert job.wait()["JobState"] == "COMPLETED", job.output()
    for name in TARS:
        assert (data / name).read_bytes() == (tiny_data / name).read_bytes()
        assert (data / f"{name}.index").exists()
    assert (data / "valprep.sh").exists()  # the built-in labels are those of the real set
    assert job.output().splitlines()[-1] == f"ready: sbatch slurm/train.sbatch {data}"
    assert (tmp_path / f"trainyard-prepare-{job.id}.log").exists()


def test_a_folder_is_extracted_and_a_second_job_has_nothing_to_do(
    slurm: ModuleType, tiny_data: Path, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    for _ in range(2):
        job = slurm.sbatch(PREPARE, tiny_data, data, "extract", cwd=tmp_path)
        assert job.wait()["JobState"] == "COMPLETED", job.output()
        assert len(list(data.glob("train/*/*.JPEG"))) == NUM_TRAIN
        assert len(list(data.glob("val/*/*.JPEG"))) == NUM_VAL
    assert not list(data.glob("*.tar")), "a folder's archives are not to be copied"


def test_other_words_are_refused_with_the_way_to_call_it(slurm: ModuleType, tmp_path: Path) -> None:
    job = slurm.sbatch(PREPARE, "/data", "/scratch", "unpack", cwd=tmp_path)
    assert job.wait()["ExitCode"] == "2:0"
    assert (
        "use: sbatch slurm/prepare.sbatch SOURCE DATA [index|extract] [fetch flags]" in job.output()
    )


def test_a_failing_step_is_the_jobs_exit_code(slurm: ModuleType, tmp_path: Path) -> None:
    job = slurm.sbatch(PREPARE, tmp_path / "nothing", tmp_path / "data", cwd=tmp_path)
    assert job.wait()["ExitCode"] == "2:0"
    assert "ready:" not in job.output()
