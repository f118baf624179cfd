"""What goes wrong is said once, first and with its fix; all ranks end; nothing good is lost."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dataset.errors import (
    BAD_DATA,
    CRASH,
    DIVERGED,
    DONE,
    INTERRUPTED,
    TRY_AGAIN,
    USER_MISTAKE,
)
from tests.mounts import mounted
from tests.train import hooks
from tests.train import started_ranks as ranks
from tests.train.data.small_batches import spoil
from tests.train.outcomes import EVERY_STEP, final_state, find_differences
from train.checkpoints.checkpoint import list_checkpoints
from train.records.record import read_epochs, read_run

pytestmark = pytest.mark.training

LARGE = ("-a", ranks.REAL_ARCH)  # a network whose checkpoints fill a disk
SAVED_BYTES = 3_000_000  # a little more than one of them


def argv_for(data: Path, out: Path, *more: str) -> list[str]:
    return [str(data), "--epochs", "2", "--output", str(out), *more]


# --- ranks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1])
def test_the_traceback_of_a_rank_that_raises_comes_first_and_all_ranks_end(
    images: Path, tmp_path: Path, rank: int
) -> None:
    out = tmp_path / "out"
    hook = partial(hooks.at_step, rank, 2, hooks.raise_fault)
    job = ranks.run(argv_for(images, out, "-b", "9"), tmp_path / "log", 3, hook=hook)
    assert job.codes == [CRASH] * 3
    lines = [
        line for line in job.log.splitlines() if "recipe:" not in line and " step " not in line
    ]
    assert lines[0].startswith("Traceback")
    fault = "RuntimeError: the fault that the test asked for"
    assert job.log.count("Traceback") == 1
    assert lines.index(f"error: {fault}") < min(
        (n for n, line in enumerate(lines) if " ends" in line), default=len(lines)
    )
    run = read_run(out)
    assert (run["status"], run["exit_code"]) == ("failed", CRASH)
    assert fault in run["attempts"][0]["reason"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_is_named_and_the_others_end(images: Path, tmp_path: Path, rank: int) -> None:
    hook = partial(hooks.at_step, rank, 2, hooks.kill_myself)
    job = ranks.run(argv_for(images, tmp_path / "out"), tmp_path / "log", 2, hook=hook)
    assert job.codes[rank] == -signal.SIGKILL
    assert job.codes[1 - rank] == CRASH
    assert f"lost contact with rank {rank}" in job.log
    assert "Traceback" not in job.log


def test_a_rank_that_hangs_is_named_when_the_others_give_up(images: Path, tmp_path: Path) -> None:
    """Its process lives and its thread beats: only how far it came tells it from the others."""
    hook = partial(hooks.at_step, 1, 2, partial(time.sleep, 100))
    argv = [*argv_for(images, tmp_path / "out"), "--timeout-minutes", "0.2"]
    job = ranks.run(argv, tmp_path / "log", 2, hook=hook)
    assert job.codes == [CRASH, CRASH]
    assert "rank 1 (reading data) hangs: it answers" in job.log
    assert "Traceback" not in job.log


@pytest.mark.parametrize("rank", [0, 1])
def test_the_workers_of_a_killed_rank_do_not_keep_the_others_waiting(
    images: Path, tmp_path: Path, rank: int
) -> None:
    """They inherit its sockets; torch's own watch over their parent is put off by the test."""
    intervals = ("torch.utils.data._utils.worker", "MP_STATUS_CHECK_INTERVAL", 1000.0)
    argv = argv_for(images, tmp_path / "out", "-j", "2", "--decoder", "pil", "--epochs", "900")
    hook = partial(hooks.set_value, *intervals)
    job = ranks.start(argv, tmp_path / "log", 2, hook=hook)
    job.wait_for_log("epoch 1 step 2/")
    pid = job.processes[rank].pid
    workers = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    job.send(signal.SIGKILL, rank)
    job.wait()
    assert job.codes[1 - rank] == CRASH
    assert f"lost contact with rank {rank}" in job.log
    assert len(workers) == 2
    while any(Path(f"/proc/{worker}").exists() for worker in workers):
        time.sleep(0.01)


def test_a_rank_that_fails_while_the_last_checkpoint_is_written_ends_all(
    images: Path, tmp_path: Path
) -> None:
    """The others already wait at the end, and hear of it there, with its exit code."""
    hook = partial(hooks.poison, "conv1.1.running_var")
    argv = [str(images), "--max-steps", "1", "--output", str(tmp_path / "out")]
    job = ranks.run(argv, tmp_path / "log", 2, hook=hook)
    assert job.codes == [DIVERGED, DIVERGED]
    assert job.log.count("error: the weights are not finite") == 1


def test_control_c_before_the_first_step_is_one_line_and_exit_130(
    images: Path, tmp_path: Path
) -> None:
    hook = partial(
        hooks.before, "train.run", "make_trainer", partial(hooks.signal_myself, signal.SIGINT)
    )
    job = ranks.run(argv_for(images, tmp_path / "out"), tmp_path / "log", 2, hook=hook)
    job.expect(INTERRUPTED)  # the terminal sends it to all ranks
    assert job.log.count("error: interrupted; run the same command again") == 1
    assert "Traceback" not in job.log
    assert not (tmp_path / "out").exists()


# --- divergence -------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2])
def test_a_loss_that_is_no_number_ends_with_4_and_keeps_the_last_good_checkpoint(
    images: Path, tmp_path: Path, world: int
) -> None:
    out = tmp_path / "out"
    good = argv_for(images, out, "--max-steps", "2")
    ranks.run(good, tmp_path / "log0", world).expect(DONE)
    before = final_state(out)
    wild = argv_for(images, out, "--lr", "1e29", "--force")
    job = ranks.run(wild, tmp_path / "log1", world).expect(DIVERGED)
    assert "the last good checkpoint is kept" in job.log
    assert job.log.count("error: ") == 1
    assert "Traceback" not in job.log
    run = read_run(out)
    assert (run["status"], run["exit_code"]) == ("failed", DIVERGED)
    assert find_differences(final_state(out), before) == []
    job = ranks.run(argv_for(images, out), tmp_path / "log2", world).expect(DONE)
    assert "continuing from step 2 of 10" in job.log


def test_weights_that_are_not_finite_are_found_when_they_are_saved(
    images: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    hook = partial(hooks.poison, "conv1.1.running_var")
    job = ranks.run(argv_for(images, out, *EVERY_STEP), tmp_path / "log", hook=hook)
    assert job.expect(DIVERGED)
    assert "the weights are not finite" in job.log
    assert list_checkpoints(out / "ckpt") == []


# --- disks ------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem with room for the records and two checkpoints, not for more."""
    with mounted(tmp_path / "disk", f"size={int(3.5 * SAVED_BYTES)}") as folder:
        yield folder


def test_a_full_disk_at_a_checkpoint_does_not_stop_the_training(
    images: Path, tmp_path: Path, small_disk: Path
) -> None:
    """Full to the last byte from step 3 to step 7: records and checkpoints are made up later."""
    out = small_disk / "out"
    hook = partial(
        hooks.all_of,
        partial(hooks.at_step, 0, 3, partial(hooks.fill_disk, small_disk)),
        partial(hooks.at_step, 0, 7, partial(hooks.free_disk, small_disk)),
    )
    argv = argv_for(images, out, *LARGE, *EVERY_STEP, "--tensorboard")
    job = ranks.run(argv, tmp_path / "log", hook=hook).expect(DONE)
    assert "checkpoint of step 5 not written" in job.log
    assert "run.json not written" in job.log
    assert "epochs.jsonl not written" in job.log
    assert "Traceback" not in job.log
    assert [epoch["epoch"] for epoch in read_epochs(out)] == [0, 1]
    events = EventAccumulator(str(out / "tensorboard")).Reload()
    assert [scalar.step for scalar in events.Scalars("val_acc1")] == [5, 10]
    assert read_run(out)["status"] == "done"
    plain = argv_for(images, tmp_path / "plain", *LARGE)
    ranks.run(plain, tmp_path / "log1").expect(DONE)
    assert find_differences(final_state(out), final_state(tmp_path / "plain")) == []


def test_a_run_whose_last_checkpoint_was_not_written_is_not_done(
    images: Path, tmp_path: Path, small_disk: Path
) -> None:
    out = small_disk / "out"
    argv = argv_for(images, out, *LARGE)
    hook = partial(hooks.at_step, 0, 8, partial(hooks.fill_disk, small_disk))
    job = ranks.run(argv, tmp_path / "log0", hook=hook).expect(USER_MISTAKE)
    assert "the last checkpoint cannot be written" in job.log
    assert "free some space" in job.log
    hooks.free_disk(small_disk)
    assert final_state(out)["step"] == 5
    again = ranks.run(argv, tmp_path / "log1").expect(DONE)
    assert "continuing from step 5 of 10" in again.log
    assert [epoch["epoch"] for epoch in read_epochs(out)] == [0, 1]


def test_a_start_on_a_full_disk_is_one_line(images: Path, tmp_path: Path, small_disk: Path) -> None:
    hooks.fill_disk(small_disk)
    job = ranks.run(argv_for(images, small_disk / "out"), tmp_path / "log").expect(USER_MISTAKE)
    assert f"No space left on device: {small_disk}" in job.log
    assert "Traceback" not in job.log


# --- workers and images -----------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2])
def test_a_dead_loader_worker_is_a_passing_failure_with_advice(
    images: Path, tmp_path: Path, world: int
) -> None:
    argv = argv_for(images, tmp_path / "out", "-j", "2", "--decoder", "pil", "--epochs", "900")
    job = ranks.start(argv, tmp_path / "log", world)
    job.wait_for_log("epoch 1 step 2/")
    pid = job.processes[-1].pid
    worker = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0]
    os.kill(int(worker), signal.SIGKILL)
    job.expect(TRY_AGAIN)
    assert "a loader worker died" in job.log
    assert "Lower -j/--workers" in job.log
    assert "Traceback" not in job.log
    assert read_run(tmp_path / "out")["exit_code"] == TRY_AGAIN


@pytest.mark.parametrize("world", [1, 2])
def test_a_bad_image_is_named_and_ends_with_3(images: Path, tmp_path: Path, world: int) -> None:
    data, names = spoil(images, tmp_path / "data", 7, 19)
    job = ranks.run(argv_for(data, tmp_path / "out"), tmp_path / "log", world).expect(BAD_DATA)
    assert any(f"error: cannot decode {name}" in job.log for name in names)
    assert "Traceback" not in job.log
    assert read_run(tmp_path / "out")["exit_code"] == BAD_DATA


def test_bad_images_are_replaced_named_counted_and_limited_over_all_ranks(
    images: Path, tmp_path: Path
) -> None:
    """Of 42 images 40 are trained; whichever are dropped, at least one of three bad ones is met."""
    data, names = spoil(images, tmp_path / "data", 7, 19, 33)
    for world in (1, 2):
        out = tmp_path / f"out{world}"
        argv = argv_for(data, out, "--skip-bad-images", "3", "--microbatch", "4")
        job = ranks.run(argv, tmp_path / f"log{world}", world).expect(DONE)
        assert {name for name in names if name in job.log} == set(names)
    one, two = (read_epochs(tmp_path / f"out{world}") for world in (1, 2))
    counts = [epoch["samples_skipped"] for epoch in one]
    assert counts == [epoch["samples_skipped"] for epoch in two]
    assert all(1 <= count <= 3 for count in counts) and max(counts) > 1
    # Each rank meets fewer than all of them; the limit is for the epoch, not for a rank.
    argv = argv_for(data, tmp_path / "few", "--skip-bad-images", str(max(counts) - 1))
    job = ranks.run(argv, tmp_path / "log3", 2).expect(BAD_DATA)
    assert f"--skip-bad-images allows {max(counts) - 1}" in job.log


# --- one folder, two runs ---------------------------------------------------------------------


def test_a_folder_that_another_run_writes_to_is_refused(images: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = ranks.start(argv_for(images, out, "--epochs", "9000", *EVERY_STEP), tmp_path / "log0")
    first.wait_for(lambda: list_checkpoints(out / "ckpt"), "a checkpoint")
    second = ranks.run(argv_for(images, out, "--epochs", "9000"), tmp_path / "log1", 2)
    assert second.expect(USER_MISTAKE)
    assert f"another run writes to {out}" in second.log
    assert "continuing from step" not in second.log
    seen = first.log.count("\n")
    first.wait_for(lambda: first.log.count("\n") > seen, "more progress")
    assert read_run(out)["status"] == "running"
    first.end()


def test_after_a_kill_the_folder_is_free_at_once(images: Path, tmp_path: Path) -> None:
    """The loader's workers live for some seconds after a kill -9 and must not hold its lock."""
    out = tmp_path / "out"
    argv = argv_for(images, out, "-j", "2", "--decoder", "pil", "--epochs", "900", *EVERY_STEP)
    first = ranks.start(argv, tmp_path / "log0")
    first.wait_for(lambda: list_checkpoints(out / "ckpt"), "a checkpoint")
    first.send(signal.SIGKILL)
    assert first.wait() == [-signal.SIGKILL]
    one_more = str(final_state(out)["step"] + 1)
    ranks.run([*argv, "--max-steps", one_more], tmp_path / "log1").expect(DONE)


# --- the user's mistakes ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "world", "words"),
    [
        (["-b", "9"], 2, "cannot be split evenly over 2 ranks; use a multiple of 2"),
        (["--microbatch", "3"], 1, "--microbatch 3 does not divide the 8 images"),
        (["-b", "64"], 2, "42 training images are fewer than one batch of 64 on 2 ranks"),
        (["-a", "resnet5"], 1, "unknown --arch 'resnet5'; torchvision has resnet"),
        (["-a", "fasterrcnn_resnet50_fpn"], 1, "unknown --arch"),
        (["--weights", "nowhere.pt"], 1, "no such weights: nowhere.pt"),
        (["--precision", "fp16"], 1, "--precision fp16 needs a GPU"),
        (["--device", "cuda"], 2, "no usable CUDA device"),
        (["--tensorboard", "--output", "/dev/null/x"], 1, "/dev/null"),
    ],
)
def test_a_mistake_is_one_line_with_the_fix_and_writes_nothing(
    images: Path, tmp_path: Path, flags: list[str], world: int, words: str
) -> None:
    out = tmp_path / "out"
    job = ranks.run(argv_for(images, out, *flags), tmp_path / "log", world).expect(USER_MISTAKE)
    assert words in job.log
    # A rank that hears of it before it finds it itself says so instead.
    own = {line for line in job.log.splitlines() if " ends because of rank " not in line}
    assert len(own) == 1, job.log
    assert not out.exists()


def test_missing_data_is_one_line(tmp_path: Path) -> None:
    job = ranks.run(argv_for(tmp_path / "no", tmp_path / "out"), tmp_path / "log", 2)
    job.expect(USER_MISTAKE)
    assert f"error: no such data: {tmp_path / 'no'}" in job.log
    assert job.log.count("error: ") == 1


def test_a_gpu_allocation_without_a_usable_gpu_is_refused_unless_told(
    images: Path, tmp_path: Path
) -> None:
    """No silent week on a CPU."""
    argv = [str(images), "--max-steps", "1", "--output", str(tmp_path / "out"), "--device", "auto"]
    for number, name in enumerate(("SLURM_STEP_GPUS", "SLURM_JOB_GPUS", "CUDA_VISIBLE_DEVICES")):
        env = partial(give, name=name, value="0")
        job = ranks.run(argv, tmp_path / f"log{number}", env=env).expect(USER_MISTAKE)
        assert f"no usable CUDA device ({name}=0)" in job.log and "--device cpu" in job.log
    ranks.run([*argv, "--device", "cpu"], tmp_path / "log", env=env).expect(DONE)


def give(_rank: int, name: str, value: str) -> dict[str, str]:
    return {name: value}


def test_pretrained_weights_without_a_network_are_a_clear_error(
    images: Path, tmp_path: Path
) -> None:
    def offline(_rank: int) -> dict[str, str]:
        nowhere = "http://127.0.0.1:9"
        proxies = dict.fromkeys(("http_proxy", "https_proxy", "HTTPS_PROXY"), nowhere)
        return proxies | {"TORCH_HOME": str(tmp_path / "empty"), "no_proxy": "", "NO_PROXY": ""}

    argv = argv_for(images, tmp_path / "out", "--pretrained", "-a", ranks.REAL_ARCH)
    job = ranks.run(argv, tmp_path / "log", env=offline).expect(USER_MISTAKE)
    assert "Connection refused" in job.log and "with --weights" in job.log
    assert "Traceback" not in job.log


# --- the record of it all ---------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2])
def test_the_record_adds_up_over_attempts(images: Path, tmp_path: Path, world: int) -> None:
    """A kill, a stop and an end: phases sum to the attempts, the attempts to the wall clock."""
    out = tmp_path / "out"
    argv = argv_for(images, out, *EVERY_STEP)
    begin_s = time.time()
    kill = partial(hooks.at_step, 0, 3, partial(hooks.wait_and_kill, out, 2))
    stop = partial(hooks.at_step, 0, 5, hooks.terminate_myself)
    for number, hook in enumerate((kill, stop, None)):
        ranks.run(argv, tmp_path / f"log{number}", world, hook=hook)
    run = read_run(out)
    attempts = run["attempts"]
    assert [attempt["reason"] for attempt in attempts] == ["killed", "SIGTERM", "done"]
    assert run["wall_clock_s"] == pytest.approx(sum(a["seconds"] for a in attempts))
    total = sum(phase["mean_s"] for phase in run["phases"].values())
    assert total == pytest.approx(run["wall_clock_s"], rel=1e-6)
    for attempt in attempts:
        parts = attempt["phases"].values()
        assert attempt["seconds"] == pytest.approx(sum(p["mean_s"] for p in parts))
        # A time of day is a float of 1.8e9 s: exact to 0.2 microseconds, however short the attempt.
        end = attempt["start"] + attempt["seconds"]
        assert attempt["end"] == pytest.approx(end, rel=0, abs=1e-6)
        # The wall clock is adjusted all the time, by microseconds too; durations are monotonic.
        assert begin_s - 0.1 <= attempt["start"] < attempt["end"] <= time.time() + 0.1
        assert all(0 <= p["mean_s"] <= p["max_s"] + 1e-9 for p in parts)
        assert attempt["ranks"] == world
    assert all(a["end"] <= b["start"] + 0.1 for a, b in itertools.pairwise(attempts))
    assert run["phases"]["compute"]["mean_s"] > 0 and run["phases"]["evaluation"]["mean_s"] > 0
    assert run["images_trained"] == 80
    assert run["result"]["final_acc1"] == read_epochs(out)[-1]["val_acc1"]
    assert run["result"]["best_acc1"] == max(epoch["val_acc1"] for epoch in read_epochs(out))
    assert run["steady_images_per_s"] is None or run["steady_images_per_s"] > 0


def test_made_up_data_measures_the_compute_alone(tmp_path: Path) -> None:
    out, trace = tmp_path / "out", tmp_path / "trace"
    argv = ["--dummy", "-a", ranks.REAL_ARCH, "--max-steps", "8", "--output", str(out)]
    hook = partial(hooks.trace_samples, trace)
    ranks.run(argv, tmp_path / "log", 2, hook=hook).expect(DONE)
    assert not trace.exists()  # no sample was asked for
    run = read_run(out)
    assert run["dataset"]["source"] == "dummy"
    assert run["steady_images_per_s"] > 0
    assert (run["images_trained"], run["result"]["final_acc1"]) == (64, None)


def test_the_saved_model_loads_into_torchvision(images: Path, tmp_path: Path) -> None:
    import torch
    from torchvision import models

    out = tmp_path / "out"
    argv = [str(images), "--max-steps", "1", "--output", str(out), "--save-model"]
    ranks.run([*argv, "-a", ranks.REAL_ARCH], tmp_path / "log", 2).expect(DONE)
    state = torch.load(out / f"{ranks.REAL_ARCH}_7_classes.pt", weights_only=True)
    assert not any(name.startswith("module.") for name in state)
    models.get_model(ranks.REAL_ARCH, num_classes=7).load_state_dict(state)
    assert not list(out.rglob("*.part"))
    shutil.rmtree(out)
