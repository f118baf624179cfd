"""What the job asks in its slot: the answers are one line and the right exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from condor import slot

SCRIPT = Path(slot.__file__)
DONE = {"schema": 1, "status": "done", "exit_code": 0, "images_trained": 24}


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The sandbox of a job: its working directory."""
    (tmp_path / "out" / "ckpt").mkdir(parents=True)
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def ask(*question: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if "CUDA" not in name}
    clean["PYTHONPATH"] = str(SCRIPT.parents[1])  # in a slot train/ lies beside slot.py
    command: list[str | Path] = [sys.executable, SCRIPT, *question]
    return subprocess.run(command, capture_output=True, text=True, env=clean | env, timeout=280)


def write_run(**changes: Any) -> None:
    Path("out/run.json").write_text(json.dumps(DONE | changes))


def expect_error(result: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    assert result.returncode == code, result.stderr
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    for word in words:
        assert word in result.stderr


TAR, VAL = "osdf:///x/train.tar", "osdf:///x/val.tar?directread"


@pytest.mark.parametrize(
    ("way", "env"),
    [
        ("stream", {"DATA": TAR}),
        ("stream", {"DATA": f"{TAR},{VAL}", "STREAM": "auto", "PLUGIN": "false"}),
        ("stream", {"DATA": TAR, "STREAM": "always"}),
        ("fetch", {"DATA": TAR, "STREAM": "never"}),
        ("fetch", {"DATA": TAR, "FETCH": "--connections 4"}),
        ("fetch", {"DATA": TAR, "PLUGIN": "true"}),
        ("fetch", {"DATA": TAR, "DATA_MODE": "extract"}),
        ("fetch", {"DATA": f"{TAR},{VAL},osdf:///x/labels.csv"}),
        ("fetch", {"DATA": "osdf:///x/challenge.zip"}),
        ("fetch", {"DATA": "/data/imagenet"}),
        ("fetch", {"DATA": "dummy"}),
    ],
)
def test_the_urls_of_tars_are_streamed_unless_they_must_be_fetched_first(
    way: str, env: dict[str, str]
) -> None:
    assert slot.choose_way(env) == way


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"STREAM": "never"}, "CACHE_GB does not go with STREAM=never"),
        ({"PLUGIN": "true"}, "CACHE_GB does not go with PLUGIN=true"),
        ({"CACHE_GB": "much"}, "CACHE_GB=much: give a number"),
    ],
)
def test_a_cache_is_for_streams(more: dict[str, str], words: str) -> None:
    assert slot.choose_way({"DATA": TAR, "CACHE_GB": "20"}) == "stream"
    assert slot.choose_way({"DATA": TAR, "STREAM": "never", "CACHE_GB": "0"}) == "fetch"
    with pytest.raises(slot.SlotError, match=words) as caught:
        slot.choose_way({"DATA": TAR, "CACHE_GB": "20"} | more)
    assert caught.value.code == 2


@pytest.mark.parametrize(
    "more", [{"PLUGIN": "true"}, {"DATA_MODE": "extract"}, {"FETCH": "--md5 0"}, {"DATA": "dummy"}]
)
def test_always_is_refused_where_it_cannot_be(more: dict[str, str]) -> None:
    with pytest.raises(slot.SlotError, match="STREAM=always does not go with") as caught:
        slot.choose_way({"DATA": TAR, "STREAM": "always"} | more)
    assert caught.value.code == 2


def test_a_slot_without_a_gpu_is_refused_before_anything_starts() -> None:
    expect_error(ask("check", DATA="dummy"), 2, "no GPU", "ALLOW_CPU=1")


def test_a_gpu_that_torch_cannot_use_is_the_slots_fault() -> None:
    result = ask("check", DATA="dummy", CUDA_VISIBLE_DEVICES="GPU-a0223334")
    expect_error(result, 75, "GPU-a0223334", "tried again elsewhere")


def test_with_leave_the_job_goes_on_without_a_gpu() -> None:
    result = ask("check", DATA="dummy", ALLOW_CPU="1")
    assert (result.returncode, result.stdout) == (0, "cpu\n")


def test_the_log_says_which_decoder_will_run() -> None:
    result = ask("check", DATA="dummy", ALLOW_CPU="1")
    assert result.stdout.split() == ["cpu"]  # job.sh reads the device from it
    assert "JPEG decoder: the libjpeg-turbo kernel" in result.stderr


def test_data_that_does_not_fit_is_refused_with_both_numbers(scratch: Path) -> None:
    result = ask("check", DATA="osdf:///x/y.tar", DATA_GB="900000", ALLOW_CPU="1")
    expect_error(result, 75, "the data needs 9000", "GB are free", "DATA_GB")
    (scratch / "machine.ad").write_text('Disk = 1000000\nName = "slot1"\n')
    result = ask("check", DATA="osdf:///x/y.tar", DATA_GB="1", ALLOW_CPU="1",
                 _CONDOR_MACHINE_AD=str(scratch / "machine.ad"))  # fmt: skip
    expect_error(result, 75, "the data needs 3.0 GB more, but 1.0 GB are free in this slot")


def test_what_is_fetched_already_needs_no_room_again(scratch: Path) -> None:
    (scratch / "machine.ad").write_text("Disk = 2160000\n")  # 2.06 GB; 2 GB are for checkpoints
    env = {"DATA_GB": "0.05", "_CONDOR_MACHINE_AD": str(scratch / "machine.ad")}
    slot.check_disk(env)
    with open("data/part", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, 40_000_000)
    slot.check_disk(env)
    with pytest.raises(slot.SlotError, match="needs"):
        slot.check_disk(env | {"DATA_MODE": "extract"})


def test_the_nearest_limit_counts(scratch: Path) -> None:
    job, machine = scratch / "job.ad", scratch / "machine.ad"
    env = {"_CONDOR_JOB_AD": str(job), "_CONDOR_MACHINE_AD": str(machine)}
    assert slot.find_deadline(env, 1000.0) is None
    job.write_text('Cmd = "job.sh"\nAllowedExecuteDuration = 72000\n')
    assert slot.find_deadline(env, 1000.0) == 73000.0
    assert slot.find_deadline(env | {"BEGAN": "400"}, 1000.0) == 72400.0  # a fetch of 600 s
    machine.write_text("GLIDEIN_ToDie = 50000\n")
    assert slot.find_deadline(env, 1000.0) == 50000.0


def test_in_the_last_minutes_of_a_pilot_there_is_no_deadline(scratch: Path) -> None:
    """Else each start would stop at once, with 85, until the pilot ends."""
    (scratch / "machine.ad").write_text("GLIDEIN_ToDie = 50000\n")
    env = {"_CONDOR_MACHINE_AD": str(scratch / "machine.ad")}
    assert slot.find_deadline(env, 49_940.0) is None


def test_a_verified_model_goes_home_without_its_checkpoints(scratch: Path) -> None:
    write_run()
    (scratch / "out/imagenet_resnet50.pt").write_bytes(b"weights")
    (scratch / "out/ckpt/step-000000006.pt").write_bytes(b"state")
    assert ask("verify", "0").returncode == 0
    assert {path.name for path in (scratch / "out").iterdir()} == {
        "run.json",
        "imagenet_resnet50.pt",
    }


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"images_trained": 0}, "nothing was trained"),
        ({"status": "running", "exit_code": None}, "run.json says running"),
        ({"status": "failed", "exit_code": 3}, "run.json says failed, exit 3"),
    ],
)
def test_an_untrained_model_is_never_taken_home(
    scratch: Path, changes: dict[str, Any], words: str
) -> None:
    write_run(**changes)
    model = scratch / "out/imagenet_resnet50.pt"
    model.write_bytes(b"the first weights")
    expect_error(ask("verify", "0"), 3, words)
    assert not model.exists()


def test_a_run_without_record_or_model_is_no_success() -> None:
    expect_error(ask("verify", "0"), 3, "no run.json")
    write_run()
    expect_error(ask("verify", "0"), 3, "0 models")


def test_an_evaluation_brings_predictions_and_no_model(
    scratch: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRAIN", "-b 8 -e")
    assert slot.verify(0) == 3
    assert "the evaluation left no predictions.csv" in capsys.readouterr().err
    (scratch / "out/predictions.csv").touch()
    assert slot.verify(0) == 0


def test_the_trainers_own_exit_code_is_passed_on(scratch: Path) -> None:
    """run.json may still tell of the attempt before: its 85 would start the job for ever."""
    write_run(status="checkpointed", exit_code=85)
    (scratch / "out/ckpt/step-000000006.pt").write_bytes(b"state")
    assert ask("verify", "2").returncode == 2
    assert (scratch / "out/ckpt/step-000000006.pt").exists()


def test_only_the_newest_checkpoint_costs_a_transfer(scratch: Path) -> None:
    for step in (5, 10):
        (scratch / f"out/ckpt/step-{step:09d}.pt").write_bytes(b"state")
    assert ask("verify", "85").returncode == 85
    assert [path.name for path in (scratch / "out/ckpt").iterdir()] == ["step-000000010.pt"]


def test_a_job_that_stands_still_is_not_started_again_for_ever(scratch: Path) -> None:
    expect_error(ask("verify", "85"), 75, "without a step since the last checkpoint (none)")
    (scratch / "out/ckpt/step-000000010.pt").write_bytes(b"state")
    assert ask("verify", "85").returncode == 85
    expect_error(ask("verify", "85"), 75, "(step-000000010.pt)")


def test_this_python_can_train() -> None:
    assert ask("has-torch").returncode == 0
