"""Submits trainings through submitit, asks for the state of their jobs, ends them."""

from __future__ import annotations

import getpass
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import submitit
from submitit.slurm.slurm import SlurmExecutor

from dataset.errors import PassingError, UserError
from report.words import count
from scripts.jobs.train_run import Place, TrainRun
from train.ranks.gpus import count_devices

ROOT = Path(__file__).resolve().parents[2]
LOCAL_LIMIT_MIN = 60 * 24 * 365  # submitit ends a local job after two minutes unless told otherwise
SQUEUE_TIMEOUT_S = 60
KILL_AFTER_S = 60.0
# In what sbatch says when its controller is down or overloaded, and the job may be a good one.
_PASSING = ("timed out", "unable to contact", "temporarily", "not responding", "connection")


class _SlurmTextExecutor(SlurmExecutor):
    """Writes the sbatch text on machines without SLURM too: for --dry-run."""

    @classmethod
    def affinity(cls) -> int:
        return 2

    def text(self, num_repeats: int) -> str:
        if num_repeats > 1:
            self.parameters["map_count"] = num_repeats
        return self._make_submission_file_text(self._submitit_command_str, "dry-run")


def make_task(argv: Sequence[str]) -> Callable[[], None]:
    """The function that each rank of a job runs: the trainer, in submitit's own process.

    It is a closure, so that it is pickled whole: the job need not find this file. submitit's
    signal handlers act on rank 0 alone, so they are removed. During start-up SIGTERM ends the
    rank, and SLURM's warning (SIGUSR1) is held back. From the first step on the trainer handles
    all signals and requeues the job itself.
    """
    root, here, flags = str(ROOT), str(Path.cwd()), list(argv)

    def train_in_process() -> None:
        import os
        import signal
        import sys

        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGUSR2})
        os.chdir(here)  # what the paths in the flags refer to
        sys.path.insert(0, root)
        from train.ranks.cpus import settle_openmp

        settle_openmp(os.environ)  # before torch is imported, as `python -m train` does
        from dataset.errors import run_command
        from train.run import main

        code = run_command(lambda: main(flags))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # as `python -m train` ends: the exit code is the trainer's

    return train_in_process


def log_folder(folder: Path, run: TrainRun) -> Path:
    return folder / "logs" / run.group


def submit_local(place: Place, run: TrainRun, folder: Path, slot: int = 0) -> submitit.Job[Any]:
    """Starts a run on this machine; a Ctrl-C in this terminal does not reach its ranks.

    Runs that share the machine each have a slot of their own, and so other GPUs.
    """
    executor = submitit.LocalExecutor(log_folder(folder, run))
    executor.update_parameters(
        timeout_min=LOCAL_LIMIT_MIN,
        tasks_per_node=run.num_gpus,
        stderr_to_stdout=True,
        **_local_gpus(place, run, slot),
    )
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return executor.submit(make_task(run.argv))
    finally:
        signal.signal(signal.SIGINT, before)


def require_gpus(place: Place, num_jobs: int, num_gpus: int) -> None:
    """Raises if this machine has fewer GPUs than so many trainings at once use."""
    devices = count_devices()
    if place.cluster != "local" or not place.uses_gpus or not devices:
        return
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    there = devices if visible is None else len([name for name in visible.split(",") if name])
    if there < num_jobs * num_gpus:
        why = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"
        raise UserError(
            f"--jobs {num_jobs} with --gpus {num_gpus} needs {num_jobs * num_gpus} GPUs, here "
            f"{'is' if there == 1 else 'are'} {there}{why}; give fewer --jobs or --gpus"
        )


def _local_gpus(place: Place, run: TrainRun, slot: int) -> dict[str, Any]:
    """submitit hides all GPUs of this machine from a local job that does not ask for them."""
    if not place.uses_gpus or not count_devices():
        return {}
    first, end = slot * run.num_gpus, (slot + 1) * run.num_gpus
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return {"gpus_per_node": run.num_gpus, "visible_gpus": tuple(range(first, end))}
    names = [name for name in visible.split(",") if name]
    if len(names) < end or not all(name.isdigit() for name in names):
        raise UserError(
            f"CUDA_VISIBLE_DEVICES={visible} does not name {end} GPUs by number; "
            "export more of them or ask for fewer"
        )
    gpus = tuple(int(name) for name in names[first:end])
    return {"gpus_per_node": run.num_gpus, "visible_gpus": gpus}


def require_sbatch() -> None:
    """Raises where no job can be submitted."""
    if shutil.which("sbatch") is None:
        raise UserError("no sbatch here; run this on a login node, or use --cluster local")


def submit_slurm(place: Place, runs: Sequence[TrainRun], folder: Path) -> list[str]:
    """Submits the runs of one size, repeats as an array; returns their job ids."""
    require_sbatch()
    executor = SlurmExecutor(log_folder(folder, runs[0]))
    executor.update_parameters(**slurm_parameters(place, runs[0]))
    tasks = [make_task(run.argv) for run in runs]
    try:
        jobs = executor.submit_array(tasks) if len(tasks) > 1 else [executor.submit(tasks[0])]
    except (submitit.core.utils.FailedJobError, submitit.core.utils.FailedSubmissionError) as error:
        reason = " ".join(str(error).split())
        kind = PassingError if any(word in reason.lower() for word in _PASSING) else UserError
        raise kind(f"sbatch refused {runs[0].name}: {reason}") from None
    return [job.job_id for job in jobs]


def slurm_parameters(place: Place, run: TrainRun) -> dict[str, Any]:
    """The options of a run's job, in submitit's names."""
    options = place.slurm
    more: dict[str, Any] = {"requeue": True, "time": options.time}
    named = {"partition": options.partition, "account": options.account, "qos": options.qos}
    named |= {"constraint": options.constraint, "mem_per_cpu": options.mem_per_cpu}
    return {
        "job_name": run.group,
        "nodes": run.num_nodes,
        "ntasks_per_node": run.ranks_per_node,
        "cpus_per_task": options.cpus_per_task,
        # Since SLURM 22.05 srun does not inherit --cpus-per-task from sbatch; and when one rank
        # fails, the others must end too.
        "srun_args": ["--kill-on-bad-exit=1", f"--cpus-per-task={options.cpus_per_task}"],
        "signal_delay_s": 120,
        "stderr_to_stdout": True,
        "wckey": None,
        "additional_parameters": more,
        **({"gpus_per_node": run.ranks_per_node} if place.uses_gpus else {}),
        **{name: value for name, value in named.items() if value is not None},
    }


def describe(place: Place, runs: Sequence[TrainRun], folder: Path) -> str:
    """What would be submitted: the command of each run and, on SLURM, the sbatch text."""
    command = "python -m train " + "{}"
    lines = [
        f"# {run.name}: {count(run.num_gpus, 'rank')}\n{command.format(shlex.join(run.argv))}"
        for run in runs
    ]
    if place.cluster == "slurm":
        executor = _SlurmTextExecutor(log_folder(folder, runs[0]), python=sys.executable)
        executor.update_parameters(**slurm_parameters(place, runs[0]))
        lines.append(executor.text(len(runs)))
    return "\n".join(lines) + "\n"


def slurm_states(job_ids: Sequence[str]) -> dict[str, str]:
    """The states of the jobs that are queued or running: `RUNNING`, `PENDING Priority`."""
    known = {line[0]: " ".join(line[1:]) for line in _squeue("--array", "--format=%i %T %r")}
    return {job_id: known[job_id] for job_id in job_ids if job_id in known}


def _squeue(*options: str) -> list[list[str]]:
    """The words of squeue's lines about this user's jobs, three a line at most."""
    command = ["squeue", "--noheader", "--user", getpass.getuser(), *options]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=SQUEUE_TIMEOUT_S)
    except FileNotFoundError:
        raise UserError("no squeue here; run this on a login node of the cluster") from None
    except subprocess.TimeoutExpired:
        raise PassingError("squeue does not answer; ask again later") from None
    if answer.returncode != 0:
        raise PassingError(f"squeue failed: {answer.stderr.strip()}; ask again later")
    lines = [line.split(maxsplit=2) for line in answer.stdout.splitlines()]
    return [line for line in lines if len(line) >= 2]


def slurm_end(job_id: str) -> str:
    """How a job ended, while SLURM remembers it: `TIMEOUT`, `NODE_FAIL`, `OUT_OF_MEMORY`."""
    command = ["scontrol", "show", "job", "--oneliner", job_id]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=SQUEUE_TIMEOUT_S)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return ""
    fields = dict(word.split("=", 1) for word in answer.stdout.split() if "=" in word)
    return fields.get("JobState", "")


def is_local_alive(job_id: str) -> bool:
    """Whether the controller of a local job runs, and not another process with a reused id."""
    try:
        command = Path(f"/proc/{job_id}/cmdline").read_bytes()
    except OSError:
        return False
    return b"submitit.local._local" in command


def adopt_job(cluster: str, run: TrainRun, folder: Path) -> str | None:
    """The job that has this run now, though whoever started it was killed before noting its id."""
    logs = log_folder(folder, run)
    if cluster == "local":
        pids = (path.name for path in Path("/proc").iterdir() if path.name.isdigit())
        return next((pid for pid in pids if _controls(pid, logs)), None)
    jobs = _squeue(f"--name={run.group}", "--format=%i %o")  # %o: the script, which lies there
    return next((line[0] for line in jobs if Path(" ".join(line[1:])).parent == logs), None)


def _controls(pid: str, logs: Path) -> bool:
    """Whether a process is submitit's controller of a job with these logs."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return b"submitit.local._local" in words and os.fsencode(logs) in words


def cancel_jobs(cluster: str, job_ids: Sequence[str]) -> None:
    """Ends jobs with a checkpoint, if they have begun to train."""
    if cluster == "slurm":
        cancel_slurm(job_ids)
    for job_id in job_ids if cluster == "local" else ():
        cancel_local(job_id)


def cancel_slurm(job_ids: Sequence[str]) -> None:
    """Ends jobs for good: the trainer does not requeue after scancel."""
    if not job_ids:
        return
    command = ["scancel", *job_ids]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=SQUEUE_TIMEOUT_S)
    except FileNotFoundError:
        raise UserError("no scancel here; run this on a login node of the cluster") from None
    except subprocess.TimeoutExpired:
        raise PassingError("scancel does not answer; try again later") from None
    if answer.returncode != 0:
        reason = " ".join(answer.stderr.split())
        raise PassingError(f"scancel failed: {reason}; try again later")


def cancel_local(job_id: str) -> None:
    """Asks a local job to write a checkpoint and end; kills it if it does not react."""
    deadline_s = time.monotonic() + KILL_AFTER_S
    while is_local_alive(job_id):
        if time.monotonic() > deadline_s:
            children = Path(f"/proc/{job_id}/task/{job_id}/children").read_text().split()
            for pid in [*children, job_id]:
                os.kill(int(pid), signal.SIGKILL)
            return
        # Repeated, because submitit drops the signal until the trainer's module is loaded.
        os.kill(int(job_id), signal.SIGTERM)
        reap(int(job_id))
        time.sleep(1.0)


def reap(pid: int) -> None:
    """Collects a child of ours that has ended; until then it would look alive."""
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        pass
