"""The next command for this place: a login node, a step, a slot or a laptop, with or without data.

What was found is handed in. Every command runs as it is printed, in the current folder.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from scripts.checks.place import Place
from scripts.checks.supply_state import list_urls
from train.ranks.launch import Launch

GPU_BATCH, CPU_BATCH = 256, 32  # images of a rank
# Minutes on a CPU: whether all works, not a model to keep.
CPU_TRIAL = ["-a", "resnet18", "--image-size", "64", "--epochs", "1", "--max-steps", "100"]
CPU_TRIAL += ["--device", "cpu"]
FAKE = ["--classes", "10", "--train-per-class", "50", "--val-per-class", "10"]
SITE = "add --partition= and --account= after sbatch if your site asks for them"


@dataclass(frozen=True)
class NextStep:
    """What it is for, in a line, and the command."""

    why: str
    command: str


def find_next(place: Place, wrong: set[str]) -> NextStep:
    """What to run now; `wrong` has the topics of what must be fixed first."""
    if wrong & {"Python", "packages"}:
        return _install(place)
    doctor = _doctor(place, place.python_word)
    if wrong == {"launcher"} and _lacks_step(place):
        words = ["srun", *_cpus_per_task(place), *doctor]
        return NextStep("ask again as the ranks will be started", shlex.join(words))
    if wrong:
        return NextStep("fix what is wrong above, then ask again", shlex.join(doctor))
    launch = place.launch
    assert launch is not None, "a contradiction is a wrong launcher"
    is_free = launch.launcher == "single" and launch.job.scheduler == "none"
    if is_free and "sbatch" in place.tools:
        return _submit_to_slurm(place)
    if is_free and "condor_submit" in place.tools:
        return _submit_to_condor(place)
    return _train_here(place, launch)


def _install(place: Place) -> NextStep:
    """Packages are missing, or Python is too old."""
    venv = place.root / ".venv" / "bin" / "python"
    if venv.exists() and place.python != str(venv):
        why = "the packages are in .venv: ask again with its Python"
        return NextStep(why, shlex.join(_doctor(place, place.show(venv))))
    if venv.exists() or (place.has_wheels and _is_own_environment(place.env)):
        pip = [
            place.python_word,
            "-m",
            "pip",
            "install",
            "-r",
            place.in_project("requirements.txt"),
        ]
        return NextStep("install the packages into this environment", shlex.join(pip))
    if "make" in place.tools:
        words = ["make", *(["-C", str(place.root)] if place.cwd != place.root else []), "setup"]
        words += [f"PYTHON={place.setup_python}"] if place.setup_python else []
    else:
        words = [place.in_project("scripts/setup.sh"), ".venv", place.setup_python or "python3"]
    why = "install the packages, 6 GB (another disk, Python or CUDA: docs/install.md)"
    return NextStep(why, shlex.join(words))


def _is_own_environment(env: Mapping[str, str]) -> bool:
    """Whether the user made the active environment; conda's base is shared, and is left alone."""
    if "VIRTUAL_ENV" in env:
        return True
    return "CONDA_PREFIX" in env and env.get("CONDA_DEFAULT_ENV") != "base"


def _lacks_step(place: Place) -> bool:
    """Whether this is a SLURM job in which srun must start the ranks."""
    env = place.env
    return "SLURM_JOB_ID" in env and "SLURM_STEP_ID" not in env and "srun" in place.tools


def _doctor(place: Place, python: str) -> list[str]:
    return [python, place.in_project("scripts/doctor.py"), *place.doctor_flags]


def _submit_to_slurm(place: Place) -> NextStep:
    """A login node: the data first, then a job of one GPU."""
    data = place.data
    prepare = ["sbatch", place.in_project("slurm/prepare.sbatch")]
    if data.is_url:
        flags = ["index", "--federation", place.federation] if place.federation else []
        why = f"fetch and index the data as a job, then ask again about `data`; {SITE}"
        return NextStep(why, shlex.join([*prepare, data.url_folder, "data", *flags]))
    if data.unindexed and len(data.tars) == 2:
        folder = place.show(data.tars[0].parent)
        return NextStep(f"index the tars as a job; {SITE}", shlex.join([*prepare, folder, folder]))
    on_gpu = place.has_cluster_gpus
    words = ["sbatch", *([] if on_gpu else ["--gpus-per-task=0"])]
    words += [place.in_project("slurm/train.sbatch"), *_train_flags(place, on_gpu, 1)]
    what = "train on one GPU" if on_gpu else "try it on CPUs, since no node here has a GPU"
    made_up = "" if data.is_there else ", on made-up images (real ones: docs/imagenet.md)"
    return NextStep(f"{what}{made_up}; {SITE}", shlex.join(words))


def _submit_to_condor(place: Place) -> NextStep:
    """An access point: one job."""
    data = place.data
    if data.is_url:
        urls, num_gib = list_urls(data)
        why, words = "train once", [f"DATA={','.join(urls)}", f"DATA_GB={num_gib}"]
    elif data.is_there:
        folder = place.absolute(data.name)
        why, words = "train once; slots must see the folder", [f"DATA={folder}", "DATA_GB=0"]
    else:
        words = ["DATA=dummy", "DATA_GB=1", "EPOCHS=1", "TRAIN=--max-steps 50"]
        why = "try one slot with made-up images"
    words += [f"FEDERATION={place.federation}"] if place.federation else []
    words += [f"PYTHON={place.python}"]
    why += "; add IMAGE= where slots have no torch, PROJECT= on the OSPool (docs/grid.md)"
    submit = place.in_project("condor/train.sub")
    return NextStep(why, shlex.join(["condor_submit", submit, *words]))


def _train_here(place: Place, launch: Launch) -> NextStep:
    """A step, a slot or a laptop: on what this process was given."""
    data, python = place.data, place.python_word
    if not data.is_there and launch.world_size == 1:
        script = place.in_project("scripts/make_fake_imagenet.py")
        why = "make a small data set that a network can learn, then ask again (the tour: make demo)"
        return NextStep(why, shlex.join([python, script, "--out", "data", *FAKE]))
    if data.unindexed and launch.world_size == 1:
        tars = [place.show(tar) for tar in data.unindexed]
        script = place.in_project("scripts/index_tar.py")
        return NextStep("index the tars, then ask again", shlex.join([python, script, *tars]))
    num_ranks, start, why = _start_ranks(place, launch)
    words = [*start, "-m", "train", *_train_flags(place, place.num_gpus > 0, num_ranks)]
    if launch.launcher == "condor" and not place.output:
        words += ["--output", "out"]  # the folder that goes home
    path = "" if place.cwd == place.root else f"PYTHONPATH={shlex.quote(str(place.root))} "
    return NextStep(why, path + shlex.join(words))


def _start_ranks(place: Place, launch: Launch) -> tuple[int, list[str], str]:
    """(ranks, the words up to Python, what it is for)."""
    python, num_ranks = place.python_word, launch.world_size
    torchrun = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    if num_ranks == 1 and place.num_gpus > 1 and launch.launcher == "single":
        return place.num_gpus, [*torchrun, str(place.num_gpus)], f"train on {place.num_gpus} GPUs"
    if num_ranks == 1:
        return 1, [python], "train on this GPU" if place.num_gpus else "try it on this CPU"
    why = f"train on {num_ranks} ranks, as they are here"
    if launch.launcher == "srun":
        shape = [f"--nodes={launch.num_nodes}", f"--ntasks={num_ranks}", *_cpus_per_task(place)]
        shape += ["--gpus-per-task=1"] if place.num_gpus else []
        return num_ranks, ["srun", *shape, python], why
    if launch.launcher == "openmpi":
        return num_ranks, ["mpirun", "-n", str(num_ranks), python], why
    if launch.launcher == "torchrun" and launch.num_nodes == 1:
        return num_ranks, [*torchrun, str(num_ranks)], why
    return num_ranks, [python], f"train on {num_ranks} ranks: start this as you started the doctor"


def _cpus_per_task(place: Place) -> list[str]:
    """Since SLURM 22.05 srun does not take it over."""
    count = place.env.get("SLURM_CPUS_PER_TASK")
    return [f"--cpus-per-task={count}"] if count else []


def _train_flags(place: Place, on_gpu: bool, num_ranks: int) -> list[str]:
    """The trainer's flags for this data: no batch is larger than the training set."""
    data, batch = place.data, GPU_BATCH if on_gpu else CPU_BATCH
    while data.num_images and batch > 1 and batch * num_ranks > data.num_images:
        batch //= 2
    flags = [data.name if data.is_url else place.show(data.name)] if data.is_there else ["--dummy"]
    flags += ["-b", str(batch * num_ranks)]
    if not on_gpu:
        flags += CPU_TRIAL
    elif not data.is_there:
        flags += ["--max-steps", "100"]
    flags += ["--federation", place.federation] if place.federation and data.is_url else []
    return flags + (["--output", place.output] if place.output else [])
