"""The doctor in a plain shell: what it sees, what it calls wrong, and that it needs no package."""

from __future__ import annotations

import http.server
import json
import os
import runpy
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from dataset.errors import USER_MISTAKE
from tests.cluster.slurm.jobs import clean_env
from tests.conftest import ROOT
from tests.train import started_ranks as ranks

NOWHERE = "http://127.0.0.1:9"  # the discard port, where nothing listens


def run_doctor(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    """The doctor in a plain shell; -S hides all packages, and saves importing torch."""
    command = [sys.executable, "-S", "scripts/doctor.py"]
    known = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")} | env
    return subprocess.run(
        [*command, "--federation", NOWHERE, *args],
        cwd=ROOT, env=known, capture_output=True, text=True, timeout=280,
    )  # fmt: skip


def find(*args: str, **env: str) -> dict[str, dict[str, str]]:
    """What the doctor found, by topic."""
    done = run_doctor("--json", *args, **env)
    assert done.stderr == ""
    record = json.loads(done.stdout)
    assert record["ok"] is (done.returncode == 0)
    return {finding["topic"]: finding for finding in record["findings"]}


def test_a_healthy_shell_exits_zero_and_says_why_and_what_comes_next(tmp_path: Path) -> None:
    (tmp_path / "train" / "n1").mkdir(parents=True)
    (tmp_path / "train" / "n1" / "a.JPEG").touch()
    doctor = partial(be_doctor, "--federation", NOWHERE, str(tmp_path))
    said = ranks.call(doctor, tmp_path / "log", env={"PATH": str(tmp_path)}).expect(0).log
    assert "launcher    single, because no launcher's variables are set" in said
    assert "no scheduler here: not a login node" in said
    assert "torch 2." in said
    assert "decoder     the JPEG kernel" in said or "decoder     Pillow" in said
    *_, verdict, _, why, _, command = said.splitlines()
    assert verdict.startswith("nothing is wrong here")
    assert why in ("next: try it on this CPU", "next: train on this GPU")
    assert f" -m train {tmp_path} -b 1" in command and command.startswith("    ")


def test_missing_packages_are_wrong_and_the_rest_is_still_told() -> None:
    done = run_doctor()
    assert done.returncode == 2
    assert "wrong: cannot import numpy" in done.stdout
    assert "run `make setup` once, then start the command with .venv/bin/python" in done.stdout
    assert "  rank        0 of 1" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE=4 is set but RANK is not"),
        ({"RANK": "0"}, "RANK=0 is set but WORLD_SIZE"),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}, "start it with srun"),
        ({"RANK": "5", "WORLD_SIZE": "x"}, "WORLD_SIZE='x' is not a whole number"),
    ],
)
def test_contradictory_variables_are_wrong(env: dict[str, str], words: str) -> None:
    finding = find(**env)["launcher"]
    assert finding["level"] == "wrong"
    assert words in finding["problem"]


@pytest.mark.parametrize("tool", ["sbatch", "condor_submit"])
def test_a_shell_that_can_submit_and_has_no_job_is_probably_a_login_node(
    tmp_path: Path, tool: str
) -> None:
    (tmp_path / tool).touch(mode=0o755)
    job = find(PATH=str(tmp_path))["job"]
    assert job["text"] == f"none, but {tool} is here: probably a login node"
    assert job["problem"].endswith("submit a job instead (the last line has the command)")


def test_a_job_without_scontrol_is_told_that_it_cannot_requeue_itself(tmp_path: Path) -> None:
    job = find(PATH=str(tmp_path), SLURM_JOB_ID="7")["job"]
    assert (job["level"], job["text"]) == ("note", "SLURM job 7, so no login node")
    assert "exit 85" in job["problem"]


def test_an_htcondor_slot_is_one_process_whatever_its_pilot_says() -> None:
    found = find(_CONDOR_JOB_AD="/nowhere", SLURM_JOB_ID="7", SLURM_STEP_ID="0", SLURM_PROCID="3")
    assert found["launcher"]["text"].startswith("condor, because")
    assert found["job"]["text"] == "an HTCondor slot, so no login node"


def test_given_gpus_that_torch_cannot_use_are_wrong(tmp_path: Path) -> None:
    """In a child of a process that has imported torch, which takes the doctor its time."""
    doctor = partial(be_doctor, "--json", "--federation", NOWHERE)
    job = ranks.call(doctor, tmp_path / "log", env={"CUDA_VISIBLE_DEVICES": "0"})
    expected = ("ok", 0) if Path("/dev/nvidia0").exists() else ("wrong", USER_MISTAKE)
    (code,) = job.wait()
    (found,) = [f for f in json.loads(job.log)["findings"] if f["topic"] == "GPUs"]
    assert (found["level"], code) == expected


def be_doctor(*words: str) -> None:
    sys.argv = ["doctor.py", *words]
    try:
        runpy.run_path(str(ROOT / "scripts/doctor.py"), run_name="__main__")
    except SystemExit as end:
        sys.stdout.flush()
        os._exit(int(end.code or 0))


def test_a_limit_of_the_cpus_is_seen() -> None:
    done = subprocess.run(
        ["taskset", "--cpu-list", "0", sys.executable, "-S", "scripts/doctor.py", "--json"],
        cwd=ROOT, env=clean_env(), capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    texts = {f["topic"]: f["text"] for f in json.loads(done.stdout)["findings"]}
    assert texts["CPUs"].startswith("1 usable:")
    assert ", 1 by affinity," in texts["CPUs"]


def test_kinds_of_data_are_told_apart(tmp_path: Path) -> None:
    for half in ("train", "val"):
        (tmp_path / "folder" / half / "n01440764").mkdir(parents=True)
        (tmp_path / "folder" / half / "n01440764" / "a.JPEG").touch()
    for name in (
        "tars",
        "zip",
        "empty",
        "unsorted/train",
        "half/train/n01",
        "half/.train.extracting",
    ):
        (tmp_path / name).mkdir(parents=True)
    for half in ("train", "val"):
        (tmp_path / "tars" / f"ILSVRC2012_img_{half}.tar").touch()
    (tmp_path / "zip" / "imagenet-object-localization-challenge.zip").touch()
    names = ("folder", "tars", "zip", "empty", "unsorted", "half")
    found = {name: _data(tmp_path / name) for name in names}
    assert found["folder"]["text"].endswith("1 classes in train/, 1 classes in val/")
    assert found["folder"]["level"] == "ok"
    assert "no index yet" in found["tars"]["text"]
    assert "scripts/index_tar.py" in found["tars"]["problem"]
    assert "scripts/extract_ILSVRC_mp.py" in found["zip"]["problem"]
    assert "holds neither train/ nor ILSVRC2012_img_train.tar" in found["empty"]["problem"]
    assert "no class folders" in found["unsorted"]["problem"]
    assert "half is not finished" in found["half"]["problem"]
    wrong = [name for name in names if found[name]["level"] == "wrong"]
    assert wrong == ["zip", "empty", "unsorted", "half"]


def test_classes_that_differ_and_folders_without_an_image_are_said(tmp_path: Path) -> None:
    def add(*names: str) -> dict[str, str]:
        for name in names:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).touch()
        return _data(tmp_path)

    both = [f"{half}/n{n}/a.JPEG" for half in ("train", "val") for n in (1, 2, 3)]
    assert add(*both, "train/.hidden/a.JPEG")["level"] == "ok"
    more = add("train/n4/a.JPEG", "train/n5/a.JPEG")
    assert more["level"] == "note"
    assert "2 of 5 training classes have no validation images, e.g. n4" in more["problem"]
    assert "e.g. m0" in add("val/m0/a.JPEG")["problem"]
    empty = add("train/bare/notes.txt")
    assert empty["level"] == "wrong"
    (tmp_path / "train" / "n0").symlink_to("nowhere")
    broken = _data(tmp_path)
    (tmp_path / "train" / "n0").unlink()
    assert broken["level"] == "wrong" and "n0 is a broken link" in broken["problem"]
    assert "1 class folder" in empty["problem"] and ": bare; remove" in empty["problem"]


def test_tars_that_do_not_fit_their_indexes_are_said(tmp_path: Path) -> None:
    from dataset.archive.index import build_index
    from dataset.fake.make import make_fake_imagenet
    from dataset.fetch.ledger import Ledger

    make_fake_imagenet(tmp_path, classes=2, train_per_class=1, val_per_class=1, size=(32, 32))
    tars = [tmp_path / f"ILSVRC2012_img_{half}.tar" for half in ("train", "val")]
    indexes = [build_index(tar)[1] for tar in tars]
    assert _data(tmp_path)["level"] == "ok"
    for tar, index in zip(tars, indexes, strict=True):
        before, later = tar.stat().st_mtime_ns, index.stat().st_mtime_ns + 1
        os.utime(tar, ns=(later, later))
        assert f"{tar} is newer than its index {index}" in _data(tmp_path)["problem"]
        os.utime(tar, ns=(before, before))
    os.utime(tars[0], ns=(later, later))
    ledger = Ledger(tmp_path)
    ledger.add([ledger.make(tars[0], "osdf:///somewhere", ["md5"], {})])
    assert _data(tmp_path)["level"] == "ok"  # the index was fetched first
    indexes[1].write_bytes(indexes[1].read_bytes()[:-100])
    damaged = _data(tmp_path)
    assert damaged["level"] == "wrong"
    assert f"{indexes[1]} is damaged" in damaged["problem"]


def test_notes_are_pointed_at_when_nothing_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "train" / "n1").mkdir(parents=True)
    (tmp_path / "train" / "n1" / "a.JPEG").touch()
    from scripts.checks.supplies import look_at_data
    from scripts.doctor import describe

    assert describe([look_at_data(str(tmp_path))]).endswith("but see the note above\n")


def _data(path: Path) -> dict[str, str]:
    """In this process, which has numpy: a new one for each would only cost time."""
    from scripts.checks.supplies import look_at_data

    finding = look_at_data(str(path))
    return {"text": finding.text, "level": finding.level, "problem": finding.problem}


def test_missing_data_is_wrong_with_the_fix() -> None:
    finding = find("/no/such/data")["data"]
    assert finding["problem"].startswith("no such data: /no/such/data; name a folder with train/")


def test_an_output_that_cannot_be_written_is_wrong(tmp_path: Path) -> None:
    finding = find("--output", "/proc/runs")["space"]
    assert finding["level"] == "wrong"
    assert find("--output", str(tmp_path / "new" / "runs"))["space"]["level"] == "ok"


@pytest.fixture
def federation() -> Iterator[str]:
    """A federation's discovery on loopback."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"director_endpoint": "https://director.example.org"}')

        def log_message(self, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_federation_that_answers_is_named(federation: str) -> None:
    found = find("--federation", federation, "osdf:///ns/imagenet")
    assert found["federation"]["text"].endswith("director https://director.example.org")
    assert found["data"]["text"].endswith("/ns/imagenet, fetched before the first epoch")


def test_a_silent_federation_is_wrong_only_when_data_needs_it() -> None:
    assert find()["federation"]["level"] == "ok"
    assert "not reachable" in find()["federation"]["text"]
    finding = find("osdf:///ns/imagenet")["federation"]
    assert finding["level"] == "wrong"
    assert "fetch on a node with a network" in finding["problem"]


def test_a_url_that_nothing_can_fetch_is_wrong() -> None:
    assert find("ftp://host/imagenet")["data"]["level"] == "wrong"
