"""condor/job.sh by itself: signals, exit codes and what it leaves, with a stand-in trainer."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Stands for `python -m train`: the real one is tested on the real pool. SCRIPT says what it does.
TRAINER = """\
import json, os, pathlib, signal, sys, time
out = pathlib.Path("out")
def end(code, **run):
    record = {"schema": 1, "status": "done", "exit_code": code, "images_trained": 8} | run
    (out / "run.json").write_text(json.dumps(record))
    sys.exit(code)
def stop(number, frame):
    (out / "ckpt").mkdir(exist_ok=True)
    (out / "ckpt" / "step-000000007.pt").write_bytes(b"x")
    end(85, status="checkpointed")
signal.signal(signal.SIGTERM, stop)
pathlib.Path("arguments").write_text(json.dumps(sys.argv[1:]))
pathlib.Path("data/part").write_bytes(b"some data")
exec(os.environ["SCRIPT"])
"""


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    """The sandbox as HTCondor fills it."""
    shutil.copy(ROOT / "condor/job.sh", tmp_path)
    shutil.copy(ROOT / "condor/slot.py", tmp_path)
    (tmp_path / "dataset").symlink_to(ROOT / "dataset")
    link_trainer(tmp_path / "train")
    kernel = "def load_kernel(): return True"
    for module, text in (("train.__main__", TRAINER), ("train.data.jpeg", kernel)):
        (tmp_path / f"{module.replace('.', '/')}.py").write_text(text)
    return tmp_path


def link_trainer(folder: Path) -> None:
    """What slot.py needs of train/, with its compiled modules; the two others are written anew."""
    built = shutil.ignore_patterns("*.so*", "__pycache__")
    shutil.copytree(ROOT / "train/data", folder / "data", ignore=built)
    for entry in (ROOT / "train").iterdir():
        if entry.name not in ("data", "__main__.py", "__pycache__"):
            (folder / entry.name).symlink_to(entry)


def start(scratch: Path, script: str, **env: str) -> subprocess.Popen[str]:
    settings = {"DATA": "dummy", "ALLOW_CPU": "1", "PYTHON": sys.executable, "SCRIPT": script}
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return subprocess.Popen(
        ["./job.sh"],
        cwd=scratch,
        env=kept | settings | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(scratch: Path, script: str, **env: str) -> tuple[int, str]:
    process = start(scratch, script, **env)
    _, errors = process.communicate(timeout=280)
    return process.returncode, errors.replace(DECODER, "")


URL = {"DATA": "osdf:///x/y.tar", "DATA_GB": "0.001"}
FETCHED = URL | {"STREAM": "never"}
DECODER = "JPEG decoder: the libjpeg-turbo kernel\n"  # said in every slot
FINISH = 'pathlib.Path("out/imagenet_resnet50.pt").write_bytes(b"w"); end(0)'


def test_a_finished_training_leaves_the_model_and_no_data(scratch: Path) -> None:
    code, errors = run(scratch, FINISH, EPOCHS="3", SEED="7", TRAIN="-b 64 --precision bf16")
    assert (code, errors) == (0, "")
    assert (scratch / "out/imagenet_resnet50.pt").exists()
    assert not (scratch / "data").exists()
    arguments = json.loads((scratch / "arguments").read_text())
    assert arguments[0] == "--dummy"
    assert " ".join(arguments[1:]) == (
        "--output out --epochs 3 --seed 7 --device cpu --save-model --checkpoint-minutes 120.0 "
        "-b 64 --precision bf16"
    )


def test_the_limit_counts_from_the_start_of_the_job_fetch_included(scratch: Path) -> None:
    (scratch / "job.ad").write_text("AllowedExecuteDuration = 72000\n")
    (scratch / "scripts").mkdir()
    (scratch / "scripts/fetch_osdf.py").write_text("import time; time.sleep(2)")
    before = int(time.time())
    code, _ = run(scratch, FINISH, **FETCHED,
                  _CONDOR_JOB_AD=str(scratch / "job.ad"))  # fmt: skip
    after = time.time()
    assert code == 0
    arguments = json.loads((scratch / "arguments").read_text())
    deadline = int(arguments[arguments.index("--deadline") + 1])
    assert before + 72000 <= deadline <= after + 72000 - 2


def test_sigterm_reaches_the_trainer_and_its_85_comes_back(scratch: Path) -> None:
    process = start(scratch, "time.sleep(60)")
    wait_for(scratch / "data/part")
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=280)
    assert (process.returncode, errors) == (85, DECODER)
    assert (scratch / "out/ckpt/step-000000007.pt").exists()
    assert (scratch / "data/part").exists()  # the next start may be in this sandbox


def test_a_sigterm_during_the_fetch_ends_it(scratch: Path) -> None:
    fetch = "import pathlib, time; pathlib.Path('fetching').touch(); time.sleep(60)"
    (scratch / "scripts").mkdir()
    (scratch / "scripts/fetch_osdf.py").write_text(fetch)
    process = start(scratch, FINISH, **FETCHED)
    wait_for(scratch / "fetching")
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=280)
    assert process.returncode == 75
    assert errors == DECODER + "error: ended by signal 15; try again\n"
    assert not (scratch / "data").exists()
    assert (scratch / "out").is_dir()


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline, f"no {path}"
        time.sleep(0.02)


@pytest.mark.parametrize(("code", "seen"), [(1, 1), (2, 2), (3, 3), (4, 4), (75, 75)])
def test_the_trainers_code_is_the_jobs_and_nothing_is_left(
    scratch: Path, code: int, seen: int
) -> None:
    assert run(scratch, f'end({code}, status="failed")')[0] == seen
    assert not (scratch / "data").exists()


def test_a_killed_trainer_is_tried_again(scratch: Path) -> None:
    code, errors = run(scratch, "os.kill(os.getpid(), 9)")
    assert (code, errors.splitlines()[-1]) == (75, "error: ended by signal 9; try again")


def test_an_exit_0_that_trained_nothing_is_no_success(scratch: Path) -> None:
    code, errors = run(scratch, FINISH.replace("end(0)", "end(0, images_trained=0)"))
    assert code == 3
    assert "nothing was trained" in errors
    assert not (scratch / "out/imagenet_resnet50.pt").exists()


def test_no_gpu_is_said_in_one_line_and_nothing_is_left(scratch: Path) -> None:
    code, errors = run(scratch, FINISH, ALLOW_CPU="0")
    assert code == 2
    assert errors.startswith("error: this slot has no GPU")
    assert errors.count("\n") == 1
    assert not (scratch / "data").exists()
    assert not (scratch / "arguments").exists()


def test_a_fetch_that_fails_ends_the_job_with_its_code(scratch: Path) -> None:
    (scratch / "scripts").mkdir()
    (scratch / "scripts/fetch_osdf.py").write_text("import sys; sys.exit(3)")
    code, _ = run(scratch, FINISH, **FETCHED)
    assert code == 3
    assert not (scratch / "arguments").exists()


def test_several_urls_and_the_federation_go_to_the_fetch(scratch: Path) -> None:
    (scratch / "scripts").mkdir()
    (scratch / "scripts/fetch_osdf.py").write_text("import sys; print(sys.argv[1:])")
    process = start(scratch, FINISH, DATA="osdf:///x/a.tar,osdf:///x/b.tar", DATA_GB="0.001",
                    FEDERATION="http://127.0.0.1:1", FETCH="--connections 4")  # fmt: skip
    out, _ = process.communicate(timeout=280)
    assert process.returncode == 0
    assert "'--out', 'data', '--record', 'out'" in out
    assert "'--federation', 'http://127.0.0.1:1', 'osdf:///x/a.tar', 'osdf:///x/b.tar'" in out
    assert "'--connections', '4'" in out
    assert json.loads((scratch / "arguments").read_text())[0] == "data"


@pytest.mark.parametrize(
    ("flags", "given"),
    [("--freeze", ["--freeze", "--weights", "w 1.pt"]), ("--pretrained", ["--pretrained"])],
)
def test_weights_that_came_along_are_named_unless_pretrained_finds_them(
    scratch: Path, flags: str, given: list[str]
) -> None:
    assert run(scratch, FINISH, WEIGHTS="/home/me/w 1.pt", TRAIN=flags) == (0, "")
    arguments = json.loads((scratch / "arguments").read_text())
    assert arguments[-len(given) :] == given


@pytest.mark.parametrize("stream", ["auto", "always"])
def test_a_streamed_job_gives_its_urls_to_the_trainer(scratch: Path, stream: str) -> None:
    """Nothing is fetched before: there is not even a script for it."""
    urls = "osdf:///x/train.tar,osdf:///x/val.tar"
    env = URL | {"DATA": urls, "STREAM": stream, "FEDERATION": "http://127.0.0.1:1"}
    assert run(scratch, FINISH, **env) == (0, "")
    arguments = json.loads((scratch / "arguments").read_text())
    assert " ".join(arguments).startswith(
        f"{urls} --data-dir data --stream {stream} --give-up-after 1h "
        "--federation http://127.0.0.1:1 --output out "
    )
    assert not (scratch / "data").exists()


@pytest.mark.parametrize(
    ("given", "limit"), [("0", ""), ("0.0", ""), ("20", "20GiB"), ("1.5", "1.5GiB")]
)
def test_a_small_disk_is_the_limit_of_the_cache(scratch: Path, given: str, limit: str) -> None:
    assert run(scratch, FINISH, **URL, CACHE_GB=given) == (0, "")
    arguments = json.loads((scratch / "arguments").read_text())
    found = dict(itertools.pairwise(arguments))
    assert found.get("--cache-limit", "") == limit


def test_an_index_that_came_along_is_that_of_the_stream(scratch: Path) -> None:
    assert run(scratch, FINISH, **URL, INDEX="/home/me/a.tar.index") == (0, "")
    found = dict(itertools.pairwise(json.loads((scratch / "arguments").read_text())))
    assert found["--index"] == "a.tar.index"
    assert run(scratch, FINISH, INDEX="/home/me/a.tar.index") == (0, "")
    assert "--index" not in json.loads((scratch / "arguments").read_text())


def test_a_streamed_job_that_is_vacated_keeps_what_has_arrived(scratch: Path) -> None:
    process = start(scratch, "time.sleep(60)", **URL)
    wait_for(scratch / "data/part")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=280)
    assert process.returncode == 85
    assert (scratch / "data/part").exists()
    assert (scratch / "out/ckpt/step-000000007.pt").exists()


def test_a_stream_that_starves_without_a_step_is_tried_elsewhere(scratch: Path) -> None:
    """The trainer's 75 before its first step, and its 85 without a new checkpoint."""
    for script in ('end(75, status="failed")', 'end(85, status="checkpointed")'):
        code, _ = run(scratch, script, **URL)
        assert code == 75
        assert not (scratch / "data").exists()


def test_a_wrong_setting_of_stream_is_said_before_anything_starts(scratch: Path) -> None:
    code, errors = run(scratch, FINISH, **URL, STREAM="yes")
    assert (code, errors) == (2, "error: STREAM=yes: give auto, never or always\n")
    assert not (scratch / "arguments").exists()


def test_what_the_plugin_brought_is_trained_on(scratch: Path) -> None:
    for name in ("a.tar", "labels.csv"):
        (scratch / name).write_bytes(b"brought")
    script = "pathlib.Path('seen').write_text(' '.join(sorted(os.listdir('data')))); " + FINISH
    urls = "osdf:///x/a.tar,osdf:///x/labels.csv"
    assert run(scratch, script, DATA=urls, DATA_GB="0.001", PLUGIN="true") == (0, "")
    assert (scratch / "seen").read_text() == "a.tar labels.csv part"
    assert not (scratch / "a.tar").exists()


def test_a_slot_without_torch_is_the_users_mistake_and_names_what_was_tried(scratch: Path) -> None:
    bare = scratch / "python3"
    bare.write_text(
        "#!/bin/sh\necho 'Traceback'; echo 'error: no torch in Python 3.9' >&2; exit 2\n"
    )
    bare.chmod(0o755)
    (scratch / "slot.py").write_text("raise SystemExit('no torch')")
    code, errors = run(scratch, FINISH, PYTHON="/nowhere/python", PATH=f"{scratch}:/usr/bin:/bin")
    assert code == 2
    assert errors.startswith(
        "error: no Python >= 3.10 with torch, torchvision, numpy and pillow here; choose another "
        "IMAGE or PYTHON (tried PYTHON=/nowhere/python: not found; python3: no torch in Python 3.9;"
    )
    assert errors.count("\n") == 1
    assert not (scratch / "data").exists()


def test_the_kernel_of_the_image_serves_a_job_that_brings_none(scratch: Path) -> None:
    image = scratch / "image/train/data"
    image.mkdir(parents=True)
    for name in ("jpeg_crop-x86_64-0123.so", "libjpeg-0123.so.62.4.0", "jpeg.py"):
        (image / name).write_text("of the image")
    (scratch / "train/data/libjpeg-0123.so.62.4.0").write_text("of the job")
    code, errors = run(scratch, FINISH, TRAINYARD_IMAGE=str(scratch / "image"))
    assert (code, errors) == (0, "")
    assert (scratch / "train/data/jpeg_crop-x86_64-0123.so").read_text() == "of the image"
    assert (scratch / "train/data/libjpeg-0123.so.62.4.0").read_text() == "of the job"
    assert "load_kernel" in (scratch / "train/data/jpeg.py").read_text()


def test_an_image_without_a_kernel_is_no_error(scratch: Path) -> None:
    code, errors = run(scratch, FINISH, TRAINYARD_IMAGE=str(scratch / "nothing"))
    assert (code, errors) == (0, "")
