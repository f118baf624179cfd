"""Every launcher, what contradicts it, what is missing from it, and how ranks find one port."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataset.errors import UserError
from train.ranks.batch_system import SLURM_INTERACTIVE_STEP
from train.ranks.launch import detect_launch as detect
from train.ranks.launch_variables import (
    FIRST_PORT,
    NUM_PORTS,
    candidate_ports,
    expand_hostlist,
    tasks_on_node,
)

EPHEMERAL = range(32768, 61000)  # where Linux puts outgoing connections

TORCHRUN = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
}
# What a task sees in `srun -N2 -n4` inside sbatch, as seen on the real SLURM.
STEP = {
    "SLURM_JOB_ID": "42",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}
BATCH = {"SLURM_JOB_ID": "42", "SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",  # Open MPI's name for the rank within the node
    "PMIX_NAMESPACE": "7001",
}
# Open MPI's remote ranks carry the step of its own daemon: one task a node, none of them ours.
MPI_DAEMON_STEP = STEP | {"SLURM_STEP_ID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}
SUBMITIT = {
    "SUBMITIT_LOCAL_GLOBALID": "1",
    "SUBMITIT_LOCAL_NTASKS": "2",
    "SUBMITIT_LOCAL_LOCALID": "1",
    "SUBMITIT_LOCAL_JOB_ID": "777",
}
CONDOR = {"_CONDOR_JOB_AD": "/slot/.job.ad"}
ONE_TASK_STEP = STEP | {
    "SLURM_NTASKS": "1",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NODELIST": "n1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}


@pytest.mark.parametrize(
    ("env", "launcher", "rank", "world", "local", "local_world", "nodes", "node"),
    [
        pytest.param({}, "single", 0, 1, 0, 1, 1, 0, id="a laptop"),
        pytest.param(TORCHRUN, "torchrun", 5, 8, 1, 4, 2, 1, id="torchrun on two nodes"),
        pytest.param(STEP | TORCHRUN, "torchrun", 5, 8, 1, 4, 2, 1, id="torchrun in srun"),
        pytest.param(MPI | TORCHRUN, "torchrun", 5, 8, 1, 4, 2, 1, id="torchrun in mpirun"),
        pytest.param(CONDOR | TORCHRUN, "torchrun", 5, 8, 1, 4, 2, 1, id="torchrun in a slot"),
        pytest.param(
            {k: v for k, v in TORCHRUN.items() if k != "TORCHELASTIC_RUN_ID"},
            *("environment", 5, 8, 1, 4, 2, 1),
            id="torchrun's variables by hand",
        ),
        pytest.param(
            {"RANK": "0", "WORLD_SIZE": "1"}, "environment", 0, 1, 0, 1, 1, 0, id="1 of 1"
        ),
        pytest.param(
            STEP | {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "n1", "MASTER_PORT": "29500"},
            *("environment", 3, 4, 1, 2, 2, 1),
            id="a wrapper in srun that exports RANK=$SLURM_PROCID",
        ),
        pytest.param(
            {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}
            | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"},
            *("environment", 1, 2, 1, 2, 1, 0),
            id="two ranks by hand on this machine",
        ),
        pytest.param(STEP, "srun", 3, 4, 1, 2, 2, 1, id="srun"),
        pytest.param(
            STEP | {"WORLD_SIZE": "4", "MASTER_ADDR": "n1", "MASTER_PORT": "12340"},
            *("srun", 3, 4, 1, 2, 2, 1),
            id="srun with the Kempner project's exported hints",
        ),
        pytest.param(ONE_TASK_STEP, "srun", 0, 1, 0, 1, 1, 0, id="srun of one task"),
        pytest.param(BATCH, "single", 0, 1, 0, 1, 1, 0, id="a batch script with one task"),
        pytest.param(MPI, "openmpi", 3, 4, 1, 2, 2, 1, id="mpirun"),
        pytest.param(
            MPI_DAEMON_STEP | MPI, "openmpi", 3, 4, 1, 2, 2, 1, id="mpirun's remote rank in SLURM"
        ),
        pytest.param(CONDOR | MPI, "openmpi", 3, 4, 1, 2, 2, 1, id="mpirun in a slot"),
        pytest.param(CONDOR, "condor", 0, 1, 0, 1, 1, 0, id="an HTCondor slot"),
        pytest.param(CONDOR | STEP, "condor", 0, 1, 0, 1, 1, 0, id="a pilot that is a SLURM step"),
        pytest.param(
            CONDOR | BATCH | {"SLURM_NTASKS": "8"},
            *("condor", 0, 1, 0, 1, 1, 0),
            id="a pilot that is a SLURM batch job of 8 tasks",
        ),
        pytest.param(SUBMITIT, "submitit", 1, 2, 1, 2, 1, 0, id="submitit's local executor"),
        pytest.param(
            ONE_TASK_STEP | SUBMITIT, "submitit", 1, 2, 1, 2, 1, 0, id="submitit in srun --pty bash"
        ),
        pytest.param(
            SUBMITIT | {"SUBMITIT_LOCAL_NTASKS": "1", "SUBMITIT_LOCAL_GLOBALID": "0"} | STEP,
            *("srun", 3, 4, 1, 2, 2, 1),
            id="srun inside a submitit task",
        ),
    ],
)
def test_a_rank_is_found_under_every_launcher(
    env: dict[str, str],
    launcher: str,
    rank: int,
    world: int,
    local: int,
    local_world: int,
    nodes: int,
    node: int,
) -> None:
    if "OMPI_COMM_WORLD_RANK" in env:
        env = {"MASTER_ADDR": "n1"} | env
    launch = detect(env)
    found = (launch.launcher, launch.rank, launch.world_size, launch.local_rank)
    assert found == (launcher, rank, world, local)
    assert (launch.local_world_size, launch.num_nodes, launch.node_rank) == (
        local_world,
        nodes,
        node,
    )
    assert launch.is_main == (rank == 0)
    assert launch.why


@pytest.mark.parametrize(
    ("env", "both"),
    [
        (STEP | {"WORLD_SIZE": "8"}, ("WORLD_SIZE=8", "SLURM_STEP_NUM_TASKS=4")),
        (
            STEP | TORCHRUN | {"TORCHELASTIC_RUN_ID": None},
            ("RANK=5", "SLURM_PROCID=3"),
        ),
        (
            STEP | TORCHRUN | {"TORCHELASTIC_RUN_ID": None, "RANK": "3"},
            ("WORLD_SIZE=8", "SLURM_STEP_NUM_TASKS=4"),
        ),
        (TORCHRUN | {"RANK": "8"}, ("RANK=8", "WORLD_SIZE=8")),
        (TORCHRUN | {"RANK": "-1"}, ("RANK='-1'", "in [0, ")),
        (TORCHRUN | {"WORLD_SIZE": "0", "RANK": "0"}, ("WORLD_SIZE='0'", "in [1, ")),
        ({"WORLD_SIZE": "0", "RANK": "0"}, ("WORLD_SIZE='0'", "in [1, ")),
        ({"WORLD_SIZE": "0"}, ("WORLD_SIZE='0'", "in [1, ")),
        (TORCHRUN | {"WORLD_SIZE": "-8"}, ("WORLD_SIZE='-8'", "in [1, ")),
        (TORCHRUN | {"WORLD_SIZE": "9" * 5000}, ("WORLD_SIZE='999", "whole number")),
        (TORCHRUN | {"WORLD_SIZE": "8_0"}, ("WORLD_SIZE='8_0'", "whole number")),
        (TORCHRUN | {"MASTER_PORT": "99999"}, ("MASTER_PORT='99999'", "in [1, 65535]")),
        (TORCHRUN | {"MASTER_PORT": "0"}, ("MASTER_PORT='0'", "in [1, 65535]")),
        (STEP | {"MASTER_PORT": "-1"}, ("MASTER_PORT='-1'", "in [1, 65535]")),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "0"}, ("LOCAL_WORLD_SIZE='0'", "in [1, ")),
        (
            TORCHRUN | {"LOCAL_RANK": "9", "LOCAL_WORLD_SIZE": None},
            ("LOCAL_RANK=9", "WORLD_SIZE=8"),
        ),
        (STEP | {"SLURM_STEP_NUM_TASKS": "0"}, ("SLURM_STEP_NUM_TASKS='0'", "in [1, ")),
        (STEP | {"SLURM_LOCALID": "2"}, ("SLURM_LOCALID=2", "SLURM_STEP_TASKS_PER_NODE=2")),
        (STEP | {"SLURM_NODEID": "7"}, ("SLURM_NODEID=7", "SLURM_STEP_NUM_NODES=2")),
        (STEP | {"SLURM_JOB_ID": "../x"}, ("SLURM_JOB_ID='../x'", "whole number")),
        (STEP | {"SLURM_STEP_TASKS_PER_NODE": "2(x9999999999)"}, ("TASKS_PER_NODE", "absurdly")),
        (STEP | {"SLURM_STEP_NODELIST": "n[0-9999999999]"}, ("n[0-9999999999]", "absurdly")),
        (
            MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "9"},
            ("OMPI_COMM_WORLD_LOCAL_SIZE=9", "OMPI_COMM_WORLD_SIZE=4"),
        ),
        (
            SUBMITIT | {"SUBMITIT_LOCAL_LOCALID": "2"},
            ("SUBMITIT_LOCAL_LOCALID=2", "SUBMITIT_LOCAL_NTASKS=2"),
        ),
        (TORCHRUN | {"LOCAL_RANK": "4"}, ("LOCAL_RANK=4", "LOCAL_WORLD_SIZE=4")),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "9"}, ("LOCAL_WORLD_SIZE=9", "WORLD_SIZE=8")),
        (STEP | {"SLURM_PROCID": "4"}, ("SLURM_PROCID=4", "SLURM_STEP_NUM_TASKS=4")),
        (
            MPI | {"OMPI_COMM_WORLD_RANK": "4"},
            ("OMPI_COMM_WORLD_RANK=4", "OMPI_COMM_WORLD_SIZE=4"),
        ),
        (MPI | {"WORLD_SIZE": "2"}, ("WORLD_SIZE=2", "OMPI_COMM_WORLD_SIZE=4")),
        (
            MPI | TORCHRUN | {"TORCHELASTIC_RUN_ID": None},
            ("RANK=5", "OMPI_COMM_WORLD_RANK=3"),
        ),
        (SUBMITIT | STEP, ("SUBMITIT_LOCAL_NTASKS=2", "SLURM_STEP_NUM_TASKS=4")),
        (
            SUBMITIT | {"SUBMITIT_LOCAL_GLOBALID": "2"},
            ("SUBMITIT_LOCAL_GLOBALID=2", "SUBMITIT_LOCAL_NTASKS=2"),
        ),
        ({"WORLD_SIZE": "x", "RANK": "0"}, ("WORLD_SIZE='x'", "whole number")),
        (
            STEP | {"SLURM_STEP_TASKS_PER_NODE": "9"},
            ("SLURM_STEP_TASKS_PER_NODE=9", "SLURM_STEP_NUM_TASKS=4"),
        ),
        (
            STEP | {"SLURM_STEP_NUM_NODES": "5"},
            ("SLURM_STEP_NUM_NODES=5", "SLURM_STEP_NUM_TASKS=4"),
        ),
        (STEP | {"SLURM_PROCID": ""}, ("SLURM_PROCID=''", "whole number")),
    ],
)
def test_a_contradiction_is_refused_and_names_both_values(
    env: dict[str, str | None], both: tuple[str, str]
) -> None:
    with pytest.raises(UserError) as refused:
        detect({name: value for name, value in env.items() if value is not None})
    assert all(value in str(refused.value) for value in both), refused.value


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"WORLD_SIZE": "4"}, ("WORLD_SIZE=4", "RANK is not", "torchrun or srun")),
        ({"WORLD_SIZE": "4", "MASTER_ADDR": "n1"}, ("WORLD_SIZE=4", "RANK is not")),
        ({"RANK": "1"}, ("RANK=1", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")),
        ({"RANK": "1", "WORLD_SIZE": "2"}, ("RANK=1", "MASTER_ADDR", "MASTER_PORT")),
        ({"LOCAL_RANK": "1"}, ("LOCAL_RANK=1", "RANK is not")),
        (TORCHRUN | {"LOCAL_RANK": None}, ("RANK=5", "LOCAL_RANK")),
        (STEP | {"SLURM_PROCID": None}, ("SLURM_PROCID", "srun")),
        (STEP | {"SLURM_LOCALID": None}, ("SLURM_LOCALID", "srun")),
        (MPI | {"OMPI_COMM_WORLD_SIZE": None}, ("OMPI_COMM_WORLD_SIZE", "mpirun")),
        (MPI | {"OMPI_COMM_WORLD_RANK": None}, ("OMPI_COMM_WORLD_RANK", "mpirun")),
        (MPI, ("several machines", "MASTER_ADDR")),
        (SUBMITIT | {"SUBMITIT_LOCAL_LOCALID": None}, ("SUBMITIT_LOCAL_LOCALID", "submitit")),
        (SUBMITIT | {"SUBMITIT_LOCAL_NTASKS": None}, ("SUBMITIT_LOCAL_NTASKS", "submitit")),
    ],
)
def test_a_partial_set_is_refused_with_what_is_missing_and_the_fix(
    env: dict[str, str | None], words: tuple[str, ...]
) -> None:
    with pytest.raises(UserError) as refused:
        detect({name: value for name, value in env.items() if value is not None})
    assert all(word in str(refused.value) for word in words), refused.value


def test_bare_python_in_a_batch_job_of_several_tasks_is_sent_to_srun() -> None:
    with pytest.raises(UserError, match=r"SLURM_NTASKS=4 .*srun python -m train"):
        detect(BATCH | {"SLURM_NTASKS": "4"})


@pytest.mark.parametrize("name", ["PMI_SIZE", "MV2_COMM_WORLD_SIZE", "FLUX_JOB_SIZE"])
def test_ranks_of_a_launcher_that_we_do_not_read_do_not_train_one_by_one(name: str) -> None:
    """mpiexec of MPICH and Intel MPI: each of its processes would take cuda:0."""
    with pytest.raises(UserError, match=rf"{name}=4.* srun, torchrun or Open MPI's mpirun"):
        detect({"PMI_RANK": "2", name: "4"})
    assert detect({name: "1"}).launcher == "single"
    assert detect(STEP | {"PMI_RANK": "1", name: "4"}).launcher == "srun"  # srun --mpi=pmi2


def test_the_interactive_step_of_salloc_is_a_shell_and_not_a_launch() -> None:
    shell = STEP | {"SLURM_STEP_ID": SLURM_INTERACTIVE_STEP, "SLURM_STEP_NUM_TASKS": "1"}
    with pytest.raises(UserError, match="srun"):
        detect(shell)
    alone = detect(shell | {"SLURM_NTASKS": "1"})
    assert (alone.launcher, alone.world_size) == ("single", 1)


@pytest.mark.parametrize(
    ("env", "scheduler", "job_id", "requeue_id"),
    [
        (STEP, "slurm", "42", "42"),
        (BATCH, "slurm", "42", "42"),
        (
            STEP | {"SLURM_ARRAY_JOB_ID": "40", "SLURM_ARRAY_TASK_ID": "3"},
            *("slurm", "40_3", "40_3"),
        ),
        (STEP | TORCHRUN, "slurm", "42", "42"),
        (MPI_DAEMON_STEP | MPI, "slurm", "42", "42"),
        (CONDOR, "condor", None, None),
        (CONDOR | STEP, "condor", None, None),  # the pilot's job is not ours to requeue
        (CONDOR | STEP | TORCHRUN, "condor", None, None),
        (CONDOR | STEP | MPI, "condor", None, None),
        (SUBMITIT, "none", "777", None),
        ({}, "none", None, None),
    ],
)
def test_the_job_and_what_may_be_requeued(
    env: dict[str, str], scheduler: str, job_id: str | None, requeue_id: str | None
) -> None:
    job = detect(env).job
    assert (job.scheduler, job.id, job.requeue_id) == (scheduler, job_id, requeue_id)


def test_rank_zero_is_sought_on_the_first_node_of_the_step() -> None:
    later = STEP | {"SLURM_JOB_NODELIST": "n[1-4]", "SLURM_STEP_NODELIST": "n[3-4]"}
    assert detect(later).master_host == "n3"
    assert detect(later | {"MASTER_ADDR": "10.0.0.3"}).master_host == "10.0.0.3"
    on_one_node = ONE_TASK_STEP | {"SLURM_STEP_NUM_TASKS": "2", "MASTER_ADDR": "login1"}
    assert detect(on_one_node).master_host is None  # no name to resolve, whatever the hint says
    assert detect(MPI_DAEMON_STEP | MPI).master_host == "n1"


def test_ranks_of_a_step_agree_on_ports_and_other_jobs_have_others() -> None:
    def ports(**changes: str) -> tuple[int, ...]:
        return detect(STEP | changes).ports

    assert ports(SLURM_PROCID="0", SLURM_NODEID="0") == ports()
    neighbours = [{"SLURM_JOB_ID": "43"}, {"SLURM_STEP_ID": "1"}, {"SLURM_RESTART_COUNT": "1"}]
    for change in neighbours:
        assert ports(**change) != ports()
        assert detect(STEP | change).token != detect(STEP).token
    assert (
        detect(MPI | {"MASTER_ADDR": "n1"}).ports
        != detect(MPI | {"MASTER_ADDR": "n1", "PMIX_NAMESPACE": "7002"}).ports
    )
    assert detect(TORCHRUN).ports == ()  # torchrun runs the rendezvous
    assert detect(ONE_TASK_STEP).ports == ()


def test_the_port_of_an_sbatch_file_is_tried_first_and_is_not_the_only_one() -> None:
    hinted = detect(STEP | {"MASTER_PORT": "12340"}).ports
    assert hinted[0] == 12340
    assert hinted[1:] == detect(STEP).ports


@given(st.text())
def test_candidate_ports_are_distinct_and_outside_the_ephemeral_range(token: str) -> None:
    ports = candidate_ports(token)
    assert len(set(ports)) == NUM_PORTS
    assert all(FIRST_PORT <= port < EPHEMERAL.start for port in ports)
    assert ports == candidate_ports(token)


@pytest.mark.parametrize(
    ("short", "hosts"),
    [
        ("rack[1-2]n[03-04],gpu7", "rack1n03 rack1n04 rack2n03 rack2n04 gpu7"),
        ("n1", "n1"),
        ("n[1,3-5]", "n1 n3 n4 n5"),
        ("n[008-011]", "n008 n009 n010 n011"),
        ("n[8-11]-ib", "n8-ib n9-ib n10-ib n11-ib"),
        ("a-b-[1-2].site.org,c", "a-b-1.site.org a-b-2.site.org c"),
        ("", ""),
    ],
)
def test_hostlists_are_expanded_as_scontrol_does(short: str, hosts: str) -> None:
    assert expand_hostlist(short) == hosts.split()


@given(st.lists(st.integers(0, 999), min_size=1, max_size=20, unique=True), st.booleans())
def test_any_list_of_numbered_hosts_is_expanded_in_its_order(
    numbers: list[int], padded: bool
) -> None:
    names = [f"{n:03d}" if padded else str(n) for n in numbers]
    assert expand_hostlist(f"n[{','.join(names)}]") == [f"n{name}" for name in names]


@pytest.mark.parametrize("broken", ["n[1-", "n[1-x]", "n[a]", "n]1[", "n[3-1]", "n[]"])
def test_a_broken_hostlist_is_a_users_error(broken: str) -> None:
    with pytest.raises(UserError, match="cannot read the host list"):
        expand_hostlist(broken)


@pytest.mark.parametrize(
    ("short", "counts"), [("2(x3),1", [2, 2, 2, 1]), ("4", [4]), ("1,3(x2)", [1, 3, 3])]
)
def test_tasks_per_node_are_read_in_slurms_short_form(short: str, counts: list[int]) -> None:
    assert [tasks_on_node(short, node) for node in range(len(counts))] == counts


@pytest.mark.parametrize("broken", ["2(y3)", "1(x0)", "0", "", "2(x3),"])
def test_unreadable_tasks_per_node_are_a_users_error(broken: str) -> None:
    with pytest.raises(UserError, match="SLURM_STEP_TASKS_PER_NODE"):
        tasks_on_node(broken, 0)


@pytest.mark.parametrize("name", ["SLURM_STEP_ID", "SLURM_RESTART_COUNT", "TORCHELASTIC_RUN_ID"])
def test_a_variable_that_is_not_utf8_still_names_the_rendezvous(name: str) -> None:
    launch = detect(STEP | {name: os.fsdecode(b"7\xff")})
    assert launch.ports
    launch.token.encode()
