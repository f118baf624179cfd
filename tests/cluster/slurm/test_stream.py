"""slurm/train.sbatch on a URL: one node trains while the tar arrives, two fetch it first."""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType

import pytest

from dataset.archive.index import build_index
from dataset.names import INDEX_SUFFIX, TRAIN_TAR
from tests.cluster.slurm.conftest import BATCH, NUM_TRAIN, TRAIN_FLAGS
from tests.conftest import ROOT
from train.records.record import read_run

pytestmark = [pytest.mark.slurm, pytest.mark.osdf, pytest.mark.timeout(240)]


@pytest.fixture
def url(osdf: ModuleType, tiny_data: Path, tmp_path: Path) -> str:
    """The training tar of the small set, with an index with checksums beside it."""
    tar = tiny_data / TRAIN_TAR
    _, index = build_index(tar, index_dir=tmp_path, checksums=True)
    folder = f"slurm-stream-{os.urandom(4).hex()}"
    osdf.put(f"{folder}/{TRAIN_TAR}{INDEX_SUFFIX}", index)
    return f"osdf://{osdf.put(f'{folder}/{TRAIN_TAR}', tar)}"


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_two_ranks_on_a_url(
    slurm: ModuleType, osdf: ModuleType, tiny_data: Path, url: str, tmp_path: Path, num_nodes: int
) -> None:
    scale = [f"--nodes={num_nodes}", f"--ntasks-per-node={2 // num_nodes}"]
    flags = ["--federation", osdf.DIRECTOR_HTTP_URL, "--epochs", "1", *TRAIN_FLAGS]
    job = slurm.sbatch(*scale, ROOT / "slurm/train.sbatch", url, *flags, cwd=tmp_path)
    assert job.wait(110)["JobState"] == "COMPLETED", job.output()
    run = read_run(tmp_path / "run_results/cpu" / job.id)
    assert run["images_trained"] == NUM_TRAIN // BATCH * BATCH
    (attempt,) = run["attempts"]
    if num_nodes == 1:
        assert attempt["stream"]["is_whole"]
    else:
        assert "stream" not in attempt
        assert "not streamed but fetched whole first: on 2 nodes" in job.output()
    assert (tmp_path / "data" / TRAIN_TAR).read_bytes() == (tiny_data / TRAIN_TAR).read_bytes()
