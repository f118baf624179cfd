"""The cores that a process may use, and the threads that are set from them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from train.device import (
    choose_threads,
)
from train.ranks import cpus
from train.ranks.cpus import (
    Binding,
    allowed_cpus,
    cgroup_cpus,
    count_sharing,
    cpus_of_rank,
    own_binding,
    settle_openmp,
)
from train.ranks.launch import Launch

CPU = torch.device("cpu")


def launch_of(local_rank: int = 0, local_world_size: int = 1) -> Launch:
    return Launch("a test", "", local_rank=local_rank, local_world_size=local_world_size)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node of 64 cores, all of them allowed, without a cgroup quota."""
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr(cpus, "cgroup_cpus", lambda: None)


STEP = {"SLURM_STEP_ID": "0", "SLURM_CPUS_PER_TASK": "16"}


@pytest.mark.parametrize(
    ("env", "local_world", "cores"),
    [
        ({}, 1, 64),
        ({}, 4, 16),
        (STEP, 4, 16),  # each task has its own 16
        (STEP | {"TORCHELASTIC_RUN_ID": "x"}, 4, 4),  # four ranks of torchrun in one task of 16
        ({"SLURM_CPUS_PER_TASK": "16"}, 1, 64),  # the batch script, not a step
    ],
)
def test_ranks_share_the_cores_that_are_theirs(
    machine: None, env: dict[str, str], local_world: int, cores: int
) -> None:
    assert cpus_of_rank(env, local_world) == cores


@pytest.mark.parametrize(
    ("masks", "cores"),
    [
        ([range(16), range(16, 32), range(32, 48), range(48, 64)], 16),  # mpirun, slot:PE=16
        ([range(64)] * 4, 16),  # not bound
        ([range(32), range(32), range(32, 64), range(32, 64)], 16),  # bound to sockets
        ([range(16), range(64), range(64), range(64)], 4),  # who may come here is counted in
        ([range(4)] * 4, 1),
        ([range(2)] * 4, 1),
    ],
)
def test_only_ranks_that_may_run_on_the_same_cores_divide_them(
    machine: None, monkeypatch: pytest.MonkeyPatch, masks: list[range], cores: int
) -> None:
    ranks = [Binding(node, frozenset(mask)) for node in ("node1", "node2") for mask in masks]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(masks[0]))
    assert cpus_of_rank({}, 4, count_sharing(ranks[0], ranks)) == cores


def test_a_quota_and_a_slot_are_for_all_ranks_however_they_are_bound(
    machine: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    assert cpus_of_rank(STEP, 4, num_sharing=1) == 16
    assert cpus_of_rank(STEP | {"SLURM_CPUS_PER_TASK": "8"}, 4, num_sharing=1) == 8
    (tmp_path / "ad").write_text("Cpus = 12\n")
    assert cpus_of_rank({"_CONDOR_MACHINE_AD": str(tmp_path / "ad")}, 4, num_sharing=1) == 3
    monkeypatch.setattr(cpus, "cgroup_cpus", lambda: 8.0)
    assert cpus_of_rank(STEP, 4, num_sharing=1) == 2


def test_a_process_knows_its_machine_and_its_cores(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    here = own_binding()
    assert here == own_binding()
    assert here.cores == os.sched_getaffinity(0)
    monkeypatch.setattr(cpus, "BOOT_ID", tmp_path / "missing")
    assert own_binding().machine == os.uname().nodename


def test_affinity_and_quota_bound_the_cores(machine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 4})
    assert allowed_cpus({}) == 2
    monkeypatch.setattr(cpus, "cgroup_cpus", lambda: 1.5)
    assert allowed_cpus({}) == 1
    assert cpus_of_rank({}, 8) == 1


@pytest.mark.parametrize(
    ("ad", "cores"),
    [
        ('Name = "slot1_4@node7"\nTotalCpus = 64\nCpus = 4\nDisk = 9\n', 4),
        ("cpus=2", 2),
        ("Cpus = 128\n", 64),  # more than there are
        ("Cpus = 0\n", 64),
        ("Cpus = undefined\nTotalSlotCpus = 8\n", 64),
        ("", 64),
        (b"\xff\xfe\0\nCpus = 4\n", 4),
        (None, 64),
    ],
)
def test_an_htcondor_slot_bounds_the_cores(
    machine: None, tmp_path: Path, ad: str | bytes | None, cores: int
) -> None:
    """By default HTCondor sets neither an affinity nor a quota."""
    path = tmp_path / "machine.ad"
    if ad is not None:
        path.write_bytes(ad if isinstance(ad, bytes) else ad.encode())
    env = {"_CONDOR_MACHINE_AD": str(path)}
    assert allowed_cpus(env) == cores
    assert cpus_of_rank(env, 1) == cores


def test_the_quota_of_the_own_cgroup_is_found_below_the_root(tmp_path: Path) -> None:
    """Without a namespace the root of v2 has no cpu.max, and a group around ours may be tighter."""
    own = tmp_path / "cgroup"
    root = tmp_path / "root"
    group = root / "system.slice" / "htcondor" / "slot1"
    group.mkdir(parents=True)
    (group / "cpu.max").write_text("800000 100000\n")
    own.write_text("1:cpu:/elsewhere\n0::/system.slice/htcondor/slot1\n")
    assert cgroup_cpus(root, own) == 8.0
    (group.parent / "cpu.max").write_text("400000 100000\n")
    (group.parent.parent / "cpu.max").write_text("max 100000\n")
    assert cgroup_cpus(root, own) == 4.0
    for text in ("0::/\n", "0::/../../slot1\n", "0::/gone\n", "nonsense"):
        own.write_text(text)
        assert cgroup_cpus(root, own) is None


def test_cgroup_quotas_of_both_versions_are_read(tmp_path: Path) -> None:
    assert cgroup_cpus(tmp_path) is None
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("250000\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert cgroup_cpus(tmp_path) == 2.5
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("-1\n")
    assert cgroup_cpus(tmp_path) is None
    (tmp_path / "cpu.max").write_text("400000 100000\n")
    assert cgroup_cpus(tmp_path) == 4.0
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert cgroup_cpus(tmp_path) is None


def test_threads_and_workers_fit_the_cores(machine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert choose_threads(None, None, torch.device("cuda", 0), launch_of(0, 4)) == (1, 16)
    assert choose_threads(None, None, CPU, launch_of(0, 4)) == (16, 2)
    assert choose_threads(None, None, CPU, launch_of(0, 64)) == (1, 0)
    assert choose_threads(3, 5, CPU, launch_of()) == (3, 5)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert choose_threads(None, None, CPU, launch_of(0, 4)) == (2, 2)
    monkeypatch.setenv("OMP_NUM_THREADS", "64")  # HTCondor: the cores of the slot, for all ranks
    assert choose_threads(None, None, CPU, launch_of(0, 4)) == (16, 2)
    assert choose_threads(None, None, CPU, launch_of(0, 4), num_sharing=1) == (64, 8)
    assert choose_threads(48, None, CPU, launch_of(0, 4)) == (48, 2)


# --- the job ----------------------------------------------------------------------------------


def test_waiting_threads_soon_sleep_unless_the_user_wants_otherwise() -> None:
    for given, expected in (
        ({}, {"GOMP_SPINCOUNT": "1000"}),
        ({"OMP_THREAD_LIMIT": "1"}, {"GOMP_SPINCOUNT": "1000"}),
        ({"OMP_WAIT_POLICY": "active"}, {"OMP_WAIT_POLICY": "active"}),
        ({"GOMP_SPINCOUNT": "9"}, {"GOMP_SPINCOUNT": "9"}),
    ):
        env: dict[str, str] = dict(given)
        settle_openmp(env)
        assert env == expected


def test_the_trainer_settles_openmp_before_torch_reads_it() -> None:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_"))}
    command = [sys.executable, "-m", "train", "--show-recipe", "-b", "256"]
    done = subprocess.run(
        command,
        env=env | {"OMP_DISPLAY_ENV": "verbose"},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0
    assert "GOMP_SPINCOUNT = '1000'" in done.stderr
