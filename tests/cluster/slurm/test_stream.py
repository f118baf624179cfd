"""Jobs on a URL: one node, or several with folders of their own, train while the tar arrives.

Several nodes that see one folder fetch the tar first.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from dataset.archive.index import build_index
from dataset.names import INDEX_SUFFIX, TRAIN_TAR
from tests.cluster.osdf.streamed_runs import Served, serve_set
from tests.cluster.slurm.conftest import BATCH, NUM_TRAIN, TRAIN_FLAGS
from tests.conftest import ROOT
from tests.dataset.tars import VAL
from tests.train.outcomes import read_trace
from train.records.record import read_run

pytestmark = [pytest.mark.slurm, pytest.mark.osdf, pytest.mark.timeout(900)]


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
    assert job.wait()["JobState"] == "COMPLETED", job.output()
    run = read_run(tmp_path / "run_results/cpu" / job.id)
    assert run["images_trained"] == NUM_TRAIN // BATCH * BATCH
    (attempt,) = run["attempts"]
    if num_nodes == 1:
        assert attempt["stream"]["is_whole"]
    else:
        assert "stream" not in attempt
        assert "not streamed but fetched whole first: data is one folder for" in job.output()
    assert (tmp_path / "data" / TRAIN_TAR).read_bytes() == (tiny_data / TRAIN_TAR).read_bytes()


# --- several nodes with folders of their own -------------------------------------------------

# In place of `python -m train`: the trainer with small units, on a node with folders of its own.
OWN_FOLDERS = """
import os, runpy, sys, tempfile
sys.path.insert(0, {root!r})
from pathlib import Path
from tests.train import hooks
node = Path({folder!r}) / f"node{{os.environ['SLURM_NODEID']}}"
node.mkdir(exist_ok=True)
tempfile.tempdir = str(node)
hooks.use_small_units()
hooks.trace_samples(Path({folder!r}) / "trace")
sys.argv += ["--data-dir", str(node / "data")]
runpy.run_module("train", run_name="__main__", alter_sys=True)
"""
SHARED = ["-a", "shufflenet_v2_x0_5", "--image-size", "32", "--device", "cpu", "--threads", "1"]
FLAGS = [*SHARED, "-j", "0", "-p", "10", "-b", "24", "--microbatch", "2", "--epochs", "1"]


@pytest.fixture(scope="module")
def served(osdf: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Served:
    """64 MiB in 432 images, and a unit for each."""
    return serve_set(osdf, tmp_path_factory.mktemp("set"))


def train_on_nodes(
    slurm: ModuleType, served: Served, folder: Path, num_nodes: int, *flags: str
) -> str:
    """The output of a job with one rank on each node; its records and trace are in the folder."""
    folder.mkdir(exist_ok=True)
    script = folder / "train.py"
    script.write_text(OWN_FOLDERS.format(root=str(ROOT), folder=str(folder)))
    argv = [served.urls, *FLAGS, "--federation", served.federation, "--output", folder / "run"]
    words = map(shlex.quote, map(str, [sys.executable, script, *argv, *flags]))
    batch = folder / "job.sh"
    batch.write_text(f"#!/bin/bash\nexport PYTHONUNBUFFERED=1\nexec srun -K1 {' '.join(words)}\n")
    scale = [f"--nodes={num_nodes}", "--ntasks-per-node=1"]
    job = slurm.sbatch(*scale, batch, cwd=folder)
    assert job.wait()["JobState"] == "COMPLETED", job.output()
    output: str = job.output()
    return output


@pytest.fixture(scope="module")
def train_on_one(
    slurm: ModuleType, served: Served, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], Path]:
    """Trains once on one node, from its own whole tar, for each number of lanes: its trace."""

    @cache
    def train(num_lanes: int) -> Path:
        folder = tmp_path_factory.mktemp(f"one-{num_lanes}")
        lanes = ["--order", f"streamed:{num_lanes}", "--stream", "never"]
        train_on_nodes(slurm, served, folder, 1, *lanes)
        return folder / "trace"

    return train


@pytest.mark.parametrize("num_nodes", [2, 3, 4])
def test_each_node_fetches_its_share_of_the_tar(
    slurm: ModuleType,
    osdf: ModuleType,
    served: Served,
    train_on_one: Callable[[int], Path],
    tmp_path: Path,
    num_nodes: int,
) -> None:
    """By its own count and the servers'; and trains on one node's samples of the same lanes."""
    osdf.forget_traffic(served.train_path)
    output = train_on_nodes(slurm, served, tmp_path / "many", num_nodes)
    assert f"{num_nodes} nodes with folders of their own" in output
    size, val = ((served.folder / name).stat().st_size for name in (TRAIN_TAR, VAL))
    stream = read_run(tmp_path / "many/run")["attempts"][0]["stream"]
    of_train = [num_bytes - val for num_bytes in stream["bytes_of_nodes"]]
    assert len(of_train) == num_nodes
    assert max(of_train) <= (1 / num_nodes + 0.03) * size
    assert 0.97 * size < sum(of_train) <= 1.03 * size
    hedged = stream["bytes_twice"]["hedged"]  # a busy machine may ask for a unit a second time
    assert 0.97 * size < osdf.sent_bytes(served.train_path) <= 1.03 * size + hedged
    trained = read_trace(tmp_path / "many/trace")
    assert len(trained) == 432 // 24
    assert trained == read_trace(train_on_one(num_nodes))


def test_a_resume_on_another_number_of_nodes_trains_the_same_samples(
    slurm: ModuleType, served: Served, train_on_one: Callable[[int], Path], tmp_path: Path
) -> None:
    train_on_nodes(slurm, served, tmp_path / "moved", 4, "--max-steps", "5")
    output = train_on_nodes(slurm, served, tmp_path / "moved", 3, "--max-steps", "10")
    assert "(its order has 4 lanes)" in output
    train_on_nodes(slurm, served, tmp_path / "moved", 2)
    assert read_trace(tmp_path / "moved/trace") == read_trace(train_on_one(4))
