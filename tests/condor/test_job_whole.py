"""condor/job.sh with everything real but the pool: fetch, extract and trainer of this project."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from dataset.fake.make import make_fake_imagenet

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    """A sandbox with the project's own code, as HTCondor transfers it."""
    folder = tmp_path / "sandbox"
    folder.mkdir()
    for name in ("condor/job.sh", "condor/slot.py"):
        shutil.copy(ROOT / name, folder)
    for name in ("train", "dataset", "scripts"):
        (folder / name).symlink_to(ROOT / name)
    return folder


def run(scratch: Path, **env: str) -> subprocess.CompletedProcess[str]:
    settings = {"ALLOW_CPU": "1", "PYTHON": sys.executable, "DATA_GB": "0.001", "EPOCHS": "1"}
    settings["TRAIN"] = "-a resnet18 -b 4 --image-size 32 -j 0 --threads 1"
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return subprocess.run(
        ["./job.sh"],
        cwd=scratch,
        env=kept | settings | env,
        capture_output=True,
        text=True,
        timeout=280,
    )


@pytest.mark.story
def test_fetched_extracted_trained_and_cleaned_up(scratch: Path, tmp_path: Path) -> None:
    made = make_fake_imagenet(
        tmp_path / "imagenet", classes=2, train_per_class=4, val_per_class=1, size=(40, 40)
    )
    urls = [f"file://{made.folder}/{name}" for name in sorted(made.files)]
    done = run(scratch, DATA=",".join(urls), DATA_MODE="extract")
    assert done.returncode == 0, done.stderr
    record = json.loads((scratch / "out/run.json").read_text())
    assert (record["status"], record["images_trained"]) == ("done", 8)
    assert record["dataset"]["source"] == "folder"
    lines = (scratch / "out/stages.jsonl").read_text().splitlines()
    stages = [json.loads(line)["stage"] for line in lines]
    assert stages[:2] == ["fetch", "extract"]
    assert (scratch / "out/resnet18_2_classes.pt").exists()
    assert not (scratch / "data").exists()


def test_no_network_is_said_before_the_transfer(scratch: Path) -> None:
    done = run(scratch, DATA="osdf:///x/y.tar", FEDERATION="https://no-such-host.invalid")
    assert done.returncode == 75
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert errors[0].startswith("error: no network: ")
    assert not (scratch / "data").exists()


@pytest.mark.osdf
def test_an_expired_token_is_the_users_mistake_and_is_not_printed(
    scratch: Path, osdf: ModuleType
) -> None:
    token = osdf.make_token(lifetime_s=-60)
    path = osdf.put(f"job/{os.urandom(4).hex()}.tar", b"x", namespace=osdf.PROTECTED)
    (scratch / "token").write_text(token)
    # The default believes a refusal after two minutes; a short patience ends it sooner.
    done = run(
        scratch,
        DATA=f"osdf://{path}",
        FEDERATION=osdf.DIRECTOR_HTTP_URL,
        BEARER_TOKEN_FILE=str(scratch / "token"),
        FETCH="--missing-seconds 2",
    )
    assert done.returncode == 2
    assert "the token expired at" in done.stderr
    assert token not in done.stderr + done.stdout
    assert not (scratch / "data").exists()
