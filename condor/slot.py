#!/usr/bin/env python3
"""Answers job.sh's questions: torch, GPU, disk, time of the slot; how it gets its data; the end."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

OUT, DATA = Path("out"), Path("data")
NEEDED = ("torch", "torchvision", "numpy", "PIL")
GIB = 1 << 30  # as HTCondor counts
# Beside the data: checkpoints, the model and the index of the tar. It is what ResNet-50 needs, and
# the least that OTHER_GB of train.sub may be.
EXTRA_BYTES = 2 * GIB
LAST_MINUTES_S = 900.0  # a pilot nearer its end sets no deadline: eviction saves a checkpoint
USAGE = "give has-torch, check, way, deadline, minutes, extract or verify CODE; job.sh runs this"
LAST_STEP = Path("last_step")  # names the newest checkpoint at the last stop


class SlotError(Exception):
    """One line for the user, and the exit code: 2 user error, 75 a problem of this slot."""

    def __init__(self, message: str, code: int = 75) -> None:
        super().__init__(message)
        self.code = code


def read_ad(path: str | None) -> dict[str, str]:
    """The plain values of a ClassAd file, by lower-case name."""
    if not path or not Path(path).is_file():
        return {}
    pairs = [line.partition("=") for line in Path(path).read_text(errors="replace").splitlines()]
    return {name.strip().lower(): value.strip().strip('"') for name, _, value in pairs}


def require_torch() -> None:
    """Fails unless this Python can run the trainer."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing or sys.version_info < (3, 10):
        version = f"Python {sys.version.split()[0]}"
        raise SlotError(f"no {', '.join(missing)} in {version}" if missing else version, 2)


def check(env: Mapping[str, str]) -> str:
    """The device to train on; raises for what is missing, before anything long starts."""
    if "://" in env.get("DATA", ""):  # the network is checked by the fetch, in its first second
        check_disk(env)
    return check_gpu(env)


def check_disk(env: Mapping[str, str]) -> None:
    """Fails unless the data fits on the disk and into the slot's share of it."""
    copies = 2.1 if env.get("DATA_MODE") == "extract" else 1.0
    data_gb = read_cache_gb(env) or copies * float(env.get("DATA_GB") or 0)
    used = sum(path.lstat().st_blocks * 512 for path in Path().rglob("*") if path.is_file())
    needed = data_gb * GIB + EXTRA_BYTES - used
    free = shutil.disk_usage(".").free
    given_kib = read_ad(env.get("_CONDOR_MACHINE_AD")).get("disk", "")
    if given_kib.isdecimal():
        free = min(free, int(given_kib) * 1024 - used)
    if needed > free:
        raise SlotError(
            f"the data needs {needed / GIB:.1f} GB more, but {free / GIB:.1f} GB are free in this "
            "slot; the job is tried again elsewhere (are DATA_GB and OTHER_GB right?)"
        )


def read_cache_gb(env: Mapping[str, str]) -> float:
    """CACHE_GB: how much of the data a streamed job holds at a time; 0: all of it."""
    text = env.get("CACHE_GB") or "0"
    if not text.replace(".", "", 1).isdecimal():
        raise SlotError(f"CACHE_GB={text}: give a number of GB, or leave it out", 2)
    return float(text)


def check_gpu(env: Mapping[str, str]) -> str:
    """'cuda' or, where the user allows it, 'cpu'."""
    from dataset.errors import CommandError  # these travel with the job
    from train.ranks.gpus import explain_no_gpu, given_gpus, require_kernels

    # Only this variable is the slot's; the others belong to the pilot's own job.
    given = given_gpus({"CUDA_VISIBLE_DEVICES": env.get("CUDA_VISIBLE_DEVICES", "")})
    allowed = env.get("ALLOW_CPU") == "1"
    if not given and not allowed:
        fix = "was request_gpus removed? ALLOW_CPU=1 trains on the CPU"
        raise SlotError(f"this slot has no GPU; {fix}", 2)
    if allowed and not Path("/dev/nvidiactl").exists():
        return "cpu"
    import torch

    try:
        if torch.cuda.is_available():
            require_kernels(torch, 0)
            return "cuda"
        reason = f"torch can use no GPU here: {explain_no_gpu(torch)}"
    except CommandError as error:
        reason = str(error)
    if allowed:
        return "cpu"
    fix = "the job is tried again elsewhere (ALLOW_CPU=1 trains on the CPU)"
    raise SlotError(f"{given[0]} but {reason}; {fix}")


def name_decoder() -> str:
    """Which JPEG decoder will feed the GPU, for the job's log."""
    try:
        from train.data.jpeg import load_kernel
    except ImportError as error:
        return f"JPEG decoder: unknown ({error})"

    if load_kernel() is not None:
        return "JPEG decoder: the libjpeg-turbo kernel"
    return (
        "JPEG decoder: Pillow, at about half the kernel's speed; build the kernel where you submit "
        "(`make setup`, with gcc and libjpeg-turbo's headers): it travels with train/"
    )


def choose_way(env: Mapping[str, str]) -> str:
    """'stream' if the trainer gets the URLs themselves, 'fetch' if their files come first."""
    stream, data = env.get("STREAM") or "auto", env.get("DATA", "")
    if stream not in ("auto", "never", "always"):
        raise SlotError(f"STREAM={stream}: give auto, never or always", 2)
    urls = data.split(",") if "://" in data else []
    is_tars = 1 <= len(urls) <= 2 and all(u.partition("?")[0].endswith(".tar") for u in urls)
    reasons = {
        "PLUGIN=true": env.get("PLUGIN") == "true",
        "DATA_MODE=extract": env.get("DATA_MODE") == "extract",
        "FETCH": bool(env.get("FETCH")),
        "a DATA other than the URLs of one or two tars": not is_tars,
    }
    obstacle = next((name for name, is_so in reasons.items() if is_so), "")
    if read_cache_gb(env):
        obstacle = obstacle or ("STREAM=never" if stream == "never" else "")
    wish = "CACHE_GB" if read_cache_gb(env) else "STREAM=always" if stream == "always" else ""
    if wish and obstacle:
        raise SlotError(f"{wish} does not go with {obstacle}; leave one of them out", 2)
    return "fetch" if obstacle or stream == "never" else "stream"


def find_deadline(env: Mapping[str, str], now: float) -> float | None:
    """The unix time by which to have stopped: the job's own limit, or the end of the pilot."""
    job, machine = read_ad(env.get("_CONDOR_JOB_AD")), read_ad(env.get("_CONDOR_MACHINE_AD"))
    limits = []
    if job.get("allowedexecuteduration", "").isdecimal():  # counted from the start of job.sh
        began = float(env.get("BEGAN") or now)
        limits.append(began + int(job["allowedexecuteduration"]))
    pilot_end = machine.get("glidein_todie", "")
    if pilot_end.isdecimal() and int(pilot_end) > now + LAST_MINUTES_S:
        limits.append(float(pilot_end))
    return min(limits, default=None)


def extract() -> None:
    """Unpacks the tars in data/ beside them; quick when that was done before."""
    found = {kind: DATA / f"ILSVRC2012_img_{kind}.tar" for kind in ("train", "val")}
    kinds = [kind for kind, tar in found.items() if tar.exists()]
    if not kinds:
        raise SlotError("DATA_MODE=extract needs ILSVRC2012_img_train.tar or _val.tar in DATA", 2)
    command = [sys.executable, "scripts/extract_ILSVRC_mp.py", "--output_dir", str(DATA)]
    command += ["--record", str(OUT)]
    for kind in kinds:
        command += [f"--{kind}_tar", str(found[kind])]
    command += ["--run_type", "all" if len(kinds) == 2 else kinds[0]]
    raise SystemExit(subprocess.run(command).returncode)


def verify(code: int) -> int:
    """The job's exit code; a model that was not trained to the end is deleted.

    An evaluation (-e) has no record and no model of its own: its predictions must be there.
    """
    evaluates = bool({"-e", "--evaluate"} & set(os.environ.get("TRAIN", "").split()))
    if code == 0 and evaluates:
        is_there = (OUT / "predictions.csv").is_file()
        problem = "" if is_there else "the evaluation left no predictions.csv"
    elif code == 0:
        problem = find_problem(_read_run())
    else:
        problem = find_standstill() if code == 85 else ""
    if problem:
        print(f"error: {problem}", file=sys.stderr)
        code = 3 if code == 0 else 75
    if code == 85:
        keep_newest_checkpoint()
    if code != 0:
        for model in OUT.glob("*.pt"):
            model.unlink()
    elif os.environ.get("KEEP_CHECKPOINTS") != "1":
        shutil.rmtree(OUT / "ckpt", ignore_errors=True)
    return code


def list_checkpoints() -> list[Path]:
    """The checkpoints in out/, the newest last."""
    return sorted((OUT / "ckpt").glob("step-*.pt"))


def find_standstill() -> str:
    """Why a stop made no progress, or an empty string: such a job would be restarted for ever."""
    steps = list_checkpoints()
    newest = steps[-1].name if steps else ""
    before = LAST_STEP.read_text() if LAST_STEP.exists() else ""
    if newest == before:
        return f"stopped without a step since the last checkpoint ({before or 'none'}); try again"
    return ""


def keep_newest_checkpoint() -> None:
    """Deletes the older ones, since each costs a transfer, and notes which is the newest."""
    steps = list_checkpoints()
    LAST_STEP.write_text(steps[-1].name if steps else "")
    for old in steps[:-1]:
        old.unlink()


def find_problem(run: Mapping[str, Any]) -> str:
    """Why out/ does not hold a trained model, or an empty string."""
    from train.records.record import explain_untrained  # travels with the job

    if not run:
        return "the trainer left no run.json; no model is returned"
    if untrained := explain_untrained(run):
        return f"{untrained}; no model is returned"
    models = list(OUT.glob("*.pt"))
    if len(models) != 1 or models[0].stat().st_size == 0:
        return f"out/ holds {len(models)} models, not 1; no model is returned"
    return ""


def _read_run() -> dict[str, Any]:
    try:
        run = json.loads((OUT / "run.json").read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return run if isinstance(run, dict) else {}


def main(arguments: list[str]) -> int:
    """Answers one question of job.sh on stdout; an error is one line and an exit code."""
    env, question = os.environ, arguments[0] if arguments else ""
    try:
        if question == "has-torch":
            require_torch()
        elif question == "check":
            print(check(env))
            print(name_decoder(), file=sys.stderr)
        elif question == "way":
            print(choose_way(env))
        elif question == "deadline":
            deadline = find_deadline(env, time.time())
            print("" if deadline is None else f"{deadline:.0f}")
        elif question == "minutes":
            print(60 * float(env.get("CHECKPOINT_HOURS") or 2))
        elif question == "extract":
            extract()
        elif question == "verify":
            return verify(int(arguments[1]))
        else:
            raise SlotError(USAGE, 2)
    except SlotError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
