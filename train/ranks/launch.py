"""Which rank this is, and of how many: everything about launchers, from a mapping alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dataset.errors import UserError
from dataset.words import count
from train.ranks.batch_system import NO_JOB, Job, find_job, is_slurm_step, name_start
from train.ranks.launch_variables import (
    check_hint,
    check_part,
    check_rank,
    check_same,
    expand_hostlist,
    read_ports,
    read_whole,
    require,
    tasks_on_node,
)

MPI_NAMES = tuple(
    f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
)
SUBMITIT_NAMES = tuple(f"SUBMITIT_LOCAL_{name}" for name in ("GLOBALID", "NTASKS", "LOCALID"))
# The variables with the number of processes of launchers that are not supported: MPICH and Intel
# MPI (and the like), MVAPICH, IBM's jsrun, Flux.
FOREIGN_SIZES = ("PMI_SIZE", "MV2_COMM_WORLD_SIZE", "JSM_NAMESPACE_SIZE", "FLUX_JOB_SIZE")
LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Launch:
    """One process's place among the ranks of a run, and how it was found."""

    launcher: str  # torchrun, openmpi, submitit, condor, srun, single
    why: str
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    num_nodes: int = 1
    node_rank: int = 0
    is_node_told: bool = False  # by the launcher; else node_rank is a guess
    master_host: str | None = None  # None: all ranks are on this machine
    ports: tuple[int, ...] = ()  # empty: the launcher itself runs the rendezvous (torchrun)
    token: str = ""  # distinguishes this job's rendezvous from another job's
    job: Job = NO_JOB

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def detect_launch(env: Mapping[str, str]) -> Launch:
    """The Launch that the variables describe; a contradiction or a partial set is a UserError.

    The innermost launcher wins: torchrun inside srun is torchrun, a submitit task inside an
    allocation is submitit's. An HTCondor slot comes before SLURM, since a pilot is often itself a
    SLURM job and must never be requeued by its payload.
    """
    # Bytes that are not UTF-8 would fail later, in a hash or in torch's store.
    env = {name: value.encode(errors="backslashreplace").decode() for name, value in env.items()}
    if "RANK" in env:
        return _from_rank_variables(env)
    if any(name in env for name in MPI_NAMES):
        return _from_open_mpi(env)
    if _is_submitit_local(env):
        return _from_submitit_local(env)
    if is_slurm_step(env):
        return _from_slurm_step(env)
    return _alone(env)


def _from_rank_variables(env: Mapping[str, str]) -> Launch:
    """RANK is set: torchrun, or a wrapper that exports the same variables."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    world_size = read_whole(env, "WORLD_SIZE") if "WORLD_SIZE" in env else None
    missing = [name for name in names if name not in env]
    if missing and world_size != 1:
        raise UserError(
            f"RANK={env['RANK']} is set but {', '.join(missing)} is not; start the ranks with "
            "torchrun or srun, or unset RANK to run one process"
        )
    rank = read_whole(env, "RANK")
    world_size = world_size or 1
    check_rank("RANK", rank, "WORLD_SIZE", world_size)
    if world_size > 1:
        read_whole(env, "MASTER_PORT")  # the rendezvous uses it; a bad value is refused here
    by_torchrun = "TORCHELASTIC_RUN_ID" in env
    if not by_torchrun:
        _check_against_launcher(env)
    if world_size > 1 and "LOCAL_RANK" not in env and "SLURM_LOCALID" not in env:
        raise UserError(
            f"RANK={rank} and WORLD_SIZE={world_size} are set but LOCAL_RANK is not, so the "
            "device of this rank is unknown; export LOCAL_RANK or use torchrun"
        )
    local_rank = read_whole(env, "LOCAL_RANK" if "LOCAL_RANK" in env else "SLURM_LOCALID", 0)
    check_rank("LOCAL_RANK", local_rank, "WORLD_SIZE", world_size)
    local_size, num_nodes = _ranks_and_nodes(env, local_rank, world_size)
    return Launch(
        launcher="torchrun" if by_torchrun else "environment",
        why="TORCHELASTIC_RUN_ID and RANK are set" if by_torchrun else "RANK is set",
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_size,
        num_nodes=num_nodes,
        node_rank=read_whole(env, "GROUP_RANK", rank // local_size if num_nodes > 1 else 0),
        is_node_told="GROUP_RANK" in env,
        master_host=env.get("MASTER_ADDR"),
        token=name_start(env),
        job=find_job(env),
    )


def _check_against_launcher(env: Mapping[str, str]) -> None:
    """Raises if a RANK that torchrun did not set contradicts the launcher that we run under."""
    check_same(env, "RANK", MPI_NAMES[0], "mpirun")
    check_same(env, "WORLD_SIZE", MPI_NAMES[1], "mpirun")
    if is_slurm_step(env) and MPI_NAMES[0] not in env:
        check_same(env, "RANK", "SLURM_PROCID", "srun")
        check_same(env, "WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "srun")


def _ranks_and_nodes(env: Mapping[str, str], local_rank: int, world_size: int) -> tuple[int, int]:
    """(ranks on this node, nodes) of exported ranks; without a hint, every rank on its own node."""
    if "LOCAL_WORLD_SIZE" in env:
        local_size = read_whole(env, "LOCAL_WORLD_SIZE")
        check_rank("LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", local_size)
        check_part("LOCAL_WORLD_SIZE", local_size, "WORLD_SIZE", world_size)
    elif is_slurm_step(env) and "SLURM_STEP_TASKS_PER_NODE" in env:
        node_rank, num_nodes = read_whole(env, "SLURM_NODEID", 0), _nodes(env)
        local_size = tasks_on_node(env["SLURM_STEP_TASKS_PER_NODE"], node_rank)
        check_part("SLURM_STEP_TASKS_PER_NODE", local_size, "WORLD_SIZE", world_size)
        check_part("SLURM_STEP_NUM_NODES", num_nodes, "WORLD_SIZE", world_size)
        return local_size, num_nodes
    elif env.get("MASTER_ADDR", "localhost") in LOOPBACK:
        return world_size, 1
    else:
        return local_rank + 1, world_size
    return local_size, -(-world_size // local_size)


def _from_open_mpi(env: Mapping[str, str]) -> Launch:
    """mpirun's variables; its remote ranks also carry the SLURM_STEP_* of Open MPI's own daemon."""
    require(env, MPI_NAMES, "start the ranks with mpirun")
    rank, size, local_rank, local_size = (read_whole(env, name) for name in MPI_NAMES)
    check_rank(MPI_NAMES[0], rank, MPI_NAMES[1], size)
    check_rank(MPI_NAMES[2], local_rank, MPI_NAMES[3], local_size)
    check_part(MPI_NAMES[3], local_size, MPI_NAMES[1], size)
    check_hint(env, "WORLD_SIZE", size, MPI_NAMES[1])
    master = env.get("MASTER_ADDR")
    if master is None and local_size < size:
        hosts = expand_hostlist(env.get("SLURM_JOB_NODELIST", ""))
        if not hosts:
            raise UserError(
                "mpirun spans several machines and none of them is named: add "
                "-x MASTER_ADDR=<host of rank 0>"
            )
        master = hosts[0]
    job = env.get("OMPI_MCA_ess_base_jobid") or env.get("PMIX_NAMESPACE", "")
    token = f"{name_start(env)}/openmpi/{job}"
    return Launch(
        launcher="openmpi",
        why=f"{MPI_NAMES[0]} is set",
        rank=rank,
        world_size=size,
        local_rank=local_rank,
        local_world_size=local_size,
        num_nodes=-(-size // local_size),
        node_rank=rank // local_size,  # mpirun fills one node after the other by default
        master_host=master,
        ports=read_ports(env, token),
        token=token,
        job=find_job(env),
    )


def _is_submitit_local(env: Mapping[str, str]) -> bool:
    """Whether submitit's local executor is the innermost launcher, and not an srun in its task.

    In a step of one task (`srun --pty bash`) submitit started the ranks; if its only task runs a
    step of several, srun did.
    """
    if not any(name in env for name in SUBMITIT_NAMES):
        return False
    if not is_slurm_step(env) or read_whole(env, "SLURM_STEP_NUM_TASKS", 1) == 1:
        return True
    if read_whole(env, "SUBMITIT_LOCAL_NTASKS", 1) > 1:
        raise UserError(
            f"SUBMITIT_LOCAL_NTASKS={env['SUBMITIT_LOCAL_NTASKS']} contradicts "
            f"SLURM_STEP_NUM_TASKS={env['SLURM_STEP_NUM_TASKS']}; use one launcher only"
        )
    return False


def _from_submitit_local(env: Mapping[str, str]) -> Launch:
    require(env, SUBMITIT_NAMES, "start the tasks through submitit's local executor")
    rank, size, local_rank = (read_whole(env, name) for name in SUBMITIT_NAMES)
    check_rank(SUBMITIT_NAMES[0], rank, SUBMITIT_NAMES[1], size)
    check_rank(SUBMITIT_NAMES[2], local_rank, SUBMITIT_NAMES[1], size)
    job_id = env.get("SUBMITIT_LOCAL_JOB_ID")
    token = f"submitit/{job_id or ''}"
    return Launch(
        launcher="submitit",
        why="SUBMITIT_LOCAL_NTASKS is set: submitit's local executor",
        rank=rank,
        world_size=size,
        local_rank=local_rank,
        local_world_size=size,
        ports=read_ports(env, token) if size > 1 else (),
        token=token,
        job=Job(id=job_id),
    )


def _from_slurm_step(env: Mapping[str, str]) -> Launch:
    """A task of an srun step. WORLD_SIZE and MASTER_* here are hints from the sbatch file."""
    names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NODEID")
    require(env, names, "start the ranks with srun")
    rank, size, local_rank, node_rank = (read_whole(env, name) for name in names)
    check_rank(names[0], rank, names[1], size)
    check_hint(env, "WORLD_SIZE", size, "SLURM_STEP_NUM_TASKS")
    num_nodes = _nodes(env)
    check_part("SLURM_STEP_NUM_NODES", num_nodes, names[1], size)
    check_rank(names[3], node_rank, "SLURM_STEP_NUM_NODES", num_nodes)
    hosts = expand_hostlist(env.get("SLURM_STEP_NODELIST", env.get("SLURM_JOB_NODELIST", "")))
    per_node = env.get("SLURM_STEP_TASKS_PER_NODE", str(size))
    local_size = tasks_on_node(per_node, node_rank)
    check_part("SLURM_STEP_TASKS_PER_NODE", local_size, names[1], size)
    check_rank(names[2], local_rank, "SLURM_STEP_TASKS_PER_NODE", local_size)
    token = name_start(env)
    # On one node a hint is not needed, and the sbatch file may have named the submit host.
    master = (env.get("MASTER_ADDR") or (hosts[0] if hosts else None)) if num_nodes > 1 else None
    return Launch(
        launcher="srun",
        why=f"SLURM_STEP_ID={env['SLURM_STEP_ID']} with {count(size, 'task')}",
        rank=rank,
        world_size=size,
        local_rank=local_rank,
        local_world_size=local_size,
        num_nodes=num_nodes,
        node_rank=node_rank,
        is_node_told=True,
        master_host=master,
        ports=read_ports(env, token) if size > 1 else (),
        token=token,
        job=find_job(env),
    )


def _alone(env: Mapping[str, str]) -> Launch:
    """One process: a laptop, an HTCondor slot, or a batch script with a single task."""
    job = find_job(env)
    if "LOCAL_RANK" in env:
        raise UserError(
            f"LOCAL_RANK={env['LOCAL_RANK']} is set but RANK is not; start the ranks with "
            "torchrun or srun, or unset LOCAL_RANK to run one process"
        )
    if job.scheduler == "condor":
        why = "_CONDOR_JOB_AD is set: one process in an HTCondor slot"
        return Launch(launcher="condor", why=why, token=name_start(env), job=job)
    tasks = read_whole(env, "SLURM_NTASKS", 1)
    if tasks > 1 and "SLURM_JOB_ID" in env:
        raise UserError(
            f"SLURM_NTASKS={tasks} but this process is not in a step, so it would train alone on "
            "the whole allocation; start it with srun (srun python -m train ...)"
        )
    world_size = read_whole(env, "WORLD_SIZE", 1)
    if world_size > 1:
        raise UserError(
            f"WORLD_SIZE={world_size} is set but RANK is not, and no launcher was found; start "
            "the ranks with torchrun or srun, or unset WORLD_SIZE to run one process"
        )
    foreign = [name for name in FOREIGN_SIZES if read_whole(env, name, 1) > 1]
    if foreign:
        raise UserError(
            f"{foreign[0]}={env[foreign[0]]}: this launcher (MPICH's or Intel's mpiexec?) is not "
            "supported, and each process would train alone; start the ranks with srun, torchrun "
            "or Open MPI's mpirun"
        )
    why = "no launcher's variables are set" + (" in this SLURM job" if job.id else "")
    return Launch(launcher="single", why=why, token=name_start(env), job=job)


def _nodes(env: Mapping[str, str]) -> int:
    return read_whole(env, "SLURM_STEP_NUM_NODES", 1)
