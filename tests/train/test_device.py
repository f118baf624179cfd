"""The device from what a rank can see, its cores from what it may use, its job from its scheduler.

There is no GPU here: torch.cuda's answers are given by the tests; tests/train/test_gpu.py asks one.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from dataset.errors import UserError
from train.device import (
    choose_device,
    choose_precision,
    choose_threads,
    prefers_channels_last,
)
from train.ranks import batch_system, cpus
from train.ranks.batch_system import (
    describe_slot,
    exits_for_checkpoints,
    find_deadline,
    parse_slurm_time,
    queue_seconds,
    requeue,
)
from train.ranks.cpus import (
    Binding,
    allowed_cpus,
    cgroup_cpus,
    count_sharing,
    cpus_of_rank,
    own_binding,
    settle_openmp,
)
from train.ranks.launch import Job, Launch

CPU = torch.device("cpu")


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """[the number of GPUs that this process can see]."""
    count = [0]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count[0] > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count[0])
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr("train.device.require_kernels", lambda *_: None)  # test_gpu_kinds.py
    return count


def launch_of(local_rank: int = 0, local_world_size: int = 1) -> Launch:
    return Launch("a test", "", local_rank=local_rank, local_world_size=local_world_size)


ALL_FOUR = {"CUDA_VISIBLE_DEVICES": "0,1,2,3", "SLURM_STEP_GPUS": "0,1,2,3"}
BOUND = {"CUDA_VISIBLE_DEVICES": "0", "SLURM_STEP_GPUS": "2"}  # --gpus-per-task=1


@pytest.mark.parametrize(
    ("seen", "env", "local_rank", "local_world", "index"),
    [
        (4, ALL_FOUR, 3, 4, 3),  # --gres=gpu:4: every task sees all
        (1, BOUND, 3, 4, 0),  # one bound to each task: its own is number 0, not SLURM_LOCALID
        (1, {}, 0, 1, 0),  # a workstation
        (8, {}, 5, 8, 5),  # torchrun
        (1, {"CUDA_VISIBLE_DEVICES": "GPU-a0223334"}, 0, 1, 0),  # an HTCondor slot
    ],
)
def test_the_gpu_is_chosen_from_what_the_rank_sees(
    gpus: list[int], seen: int, env: dict[str, str], local_rank: int, local_world: int, index: int
) -> None:
    gpus[0] = seen
    device = choose_device("auto", launch_of(local_rank, local_world), env)
    assert device == torch.device("cuda", index)
    assert choose_device("cpu", launch_of(), env) == CPU


@pytest.mark.parametrize(("seen", "local_rank"), [(2, 2), (1, 1), (1, 0)])
def test_more_ranks_than_gpus_are_refused(gpus: list[int], seen: int, local_rank: int) -> None:
    gpus[0] = seen
    with pytest.raises(UserError, match=f"4 ranks on this node see {seen} GPU"):
        choose_device("auto", launch_of(local_rank, 4), {})


def test_without_a_gpu_a_laptop_computes_and_an_allocation_does_not(gpus: list[int]) -> None:
    assert choose_device("auto", launch_of(), {}) == CPU
    assert choose_device("auto", launch_of(), {"CUDA_VISIBLE_DEVICES": ""}) == CPU
    for none in ("-1", "NoDevFiles", "10000"):  # CUDA's, SLURM's and PBS's, HTCondor's
        assert choose_device("auto", launch_of(), {"CUDA_VISIBLE_DEVICES": none}) == CPU
    for env in (ALL_FOUR, BOUND, {"SLURM_JOB_GPUS": "0"}):
        with pytest.raises(UserError, match="no usable CUDA device"):
            choose_device("auto", launch_of(), env)
        assert choose_device("cpu", launch_of(), env) == CPU
    with pytest.raises(UserError, match="no usable CUDA device"):
        choose_device("cuda", launch_of(), {})


def test_precision_is_what_the_device_is_fast_at(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda", 0)
    for major, precision in ((6, "fp32"), (7, "fp16"), (8, "bf16"), (9, "bf16")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, m=major: (m, 0))
        assert choose_precision("auto", cuda) == precision
    assert choose_precision("auto", CPU) == "fp32"
    assert choose_precision("bf16", CPU) == "bf16"
    for wanted in ("fp16", "tf32"):
        with pytest.raises(UserError, match="needs a GPU"):
            choose_precision(wanted, CPU)


# --- cores ------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1-02:03:04", 93784),
        ("02:03:04", 7384),
        ("03:04", 184),
        ("0:00", 0),
        ("UNLIMITED", None),
        ("NOT_SET", None),
        ("INVALID", None),
        ("", None),
    ],
)
def test_slurms_times_are_read(text: str, seconds: float | None) -> None:
    assert parse_slurm_time(text) == seconds


def test_the_deadline_is_slurms_and_nobody_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def squeue(_job: str, what: str) -> str:
        asked.append(what)
        return {"%L": "10:00", "%V %S": "2024-05-01T10:00:00 2024-05-01T10:01:30"}[what]

    monkeypatch.setattr(batch_system, "_ask_squeue", squeue)
    slurm = Launch("srun", "", job=Job("slurm", "42", "42"))
    assert find_deadline({"SLURM_JOB_ID": "42", "SLURM_JOB_END_TIME": "1700"}, slurm) == 1700.0
    assert asked == []  # newer SLURMs say it themselves
    found = find_deadline({"SLURM_JOB_ID": "42"}, slurm)
    assert found == pytest.approx(time.time() + 600, abs=30)
    assert queue_seconds({"SLURM_JOB_ID": "42"}, slurm) == 90.0
    # A pilot that is a SLURM job: neither its limit nor its queue is ours, and never its requeue.
    condor = Launch("condor", "", job=Job("condor"))
    assert find_deadline({"SLURM_JOB_ID": "42", "SLURM_JOB_END_TIME": "1700"}, condor) is None
    assert queue_seconds({"SLURM_JOB_ID": "42"}, condor) is None
    assert requeue(condor) is False


def test_a_slot_is_described_from_its_ads(tmp_path: Path) -> None:
    job, machine = tmp_path / "job.ad", tmp_path / "machine.ad"
    job.write_text('ClusterId = 12\nProcId = 3\nNumJobStarts = 2\nCmd = "a = b"\n')
    machine.write_text('Name = "slot1_4@node7"\nGLIDEIN_ResourceName = "Site-X"\n')
    env = {"_CONDOR_JOB_AD": str(job), "_CONDOR_MACHINE_AD": str(machine)}
    record = describe_slot(env, Launch("condor", "", job=Job("condor")))
    assert record["job_id"] == "12.3"
    assert (record["slot"], record["site"]) == ("slot1_4@node7", "Site-X")
    assert not exits_for_checkpoints(env)
    job.write_text(job.read_text() + "SuccessCheckpointExitCode = 85\n")
    assert exits_for_checkpoints(env)
    assert not exits_for_checkpoints({})
    assert not exits_for_checkpoints({"_CONDOR_JOB_AD": str(tmp_path / "gone")})


def test_the_memory_layout_follows_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Channels innermost on tensor cores, and on a CPU for large images in formats that gain."""
    cuda = torch.device("cuda", 0)
    for major in (6, 7, 8):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, m=major: (m, 0))
        assert prefers_channels_last(cuda, "fp16", 224) == (major >= 7)
    assert prefers_channels_last(CPU, "fp32", 224)
    assert not prefers_channels_last(CPU, "fp32", 64)
    assert not prefers_channels_last(CPU, "fp64", 224)  # torch computes float64 without oneDNN


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
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0
    assert "GOMP_SPINCOUNT = '1000'" in done.stderr
