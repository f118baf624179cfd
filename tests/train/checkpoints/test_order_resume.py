"""A run keeps its order: --order, what a checkpoint says of it, what is refused or recorded."""

from __future__ import annotations

import shutil
import signal
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from dataset.archive.index import build_index
from dataset.errors import BAD_DATA, DONE, USER_MISTAKE
from tests.train import hooks
from tests.train import started_ranks as ranks
from tests.train.data.small_batches import open_streamed
from tests.train.outcomes import EVERY_STEP, final_state, find_differences, read_trace
from train.checkpoints.checkpoint import list_checkpoints, load_checkpoint
from train.checkpoints.torch_file import write_torch_file
from train.data.sample_order import SampleOrder, order_along
from train.records.record import read_run

pytestmark = pytest.mark.training

NUM_TRAIN, BATCH, STEPS = 42, 8, 5  # images, batch, steps an epoch
STREAMED = ["--order", "streamed"]
SMALL_UNITS = hooks.use_small_units


def run(argv: list[str], log: Path, world: int = 1, hook: object = SMALL_UNITS) -> ranks.Job:
    return ranks.run(argv, log, world, hook=hook)


def check_samples(trace: Path, order: SampleOrder, epochs: int) -> None:
    """Each step trained on what the order promises."""
    trained = read_trace(trace)
    assert sorted(trained) == list(range(epochs * STEPS))
    for step, parts in trained.items():
        ids = order.permute(0, step // STEPS, NUM_TRAIN)[step % STEPS * BATCH :][:BATCH]
        assert [i for part in sorted(parts) for i in parts[part]] == ids.tolist()


@pytest.mark.usefixtures("small_units")
def test_a_streamed_run_moves_between_ranks_and_from_the_tar_to_a_folder(
    tars: Path, images: Path, tmp_path: Path
) -> None:
    """2 ranks from the tar, killed; then 1 rank and workers from the folder, without --order."""
    order = open_streamed(tars)
    out, trace = tmp_path / "out", tmp_path / "trace"
    argv = ["--epochs", "2", "--microbatch", "2", "--output", str(out)]
    tracing = partial(hooks.trace_samples, trace)
    kill = partial(hooks.at_step, 0, 7, partial(hooks.wait_and_kill, out, 6))
    hook = partial(hooks.all_of, SMALL_UNITS, tracing, kill)
    first = run([str(tars), *argv, *STREAMED, *EVERY_STEP], tmp_path / "log", 2, hook)
    assert first.codes[0] == -signal.SIGKILL
    assert f"order: streamed, a window of {order.window} of 42 images" in first.log

    shutil.copytree(images, tmp_path / "folder")
    build_index(tars / "ILSVRC2012_img_train.tar", index_dir=tmp_path / "folder")
    hook = partial(hooks.all_of, SMALL_UNITS, tracing)
    moved = run([str(tmp_path / "folder"), *argv, "-j", "2"], tmp_path / "log2", 1, hook)
    moved.expect(DONE)
    assert "order: streamed" in moved.log and "continuing from step" in moved.log
    check_samples(trace, order, epochs=2)
    identity = final_state(out)["identity"]
    assert order.identity.items() <= identity.items()
    record = read_run(out)
    assert record["config"]["order"] == "streamed"
    assert (record["dataset"]["units"], record["dataset"]["window"]) == (order.units, order.window)


@pytest.mark.usefixtures("small_units")
def test_a_run_keeps_its_lanes_on_any_ranks(tars: Path, tmp_path: Path) -> None:
    """4 lanes on one rank, then on 2; `streamed` means the checkpoint's lanes, too."""
    plain = open_streamed(tars)
    assert plain.layout is not None
    order = order_along(plain.layout, plain.units, BATCH, None, 4)
    out, trace = tmp_path / "out", tmp_path / "trace"
    argv = [str(tars), "--epochs", "2", "--microbatch", "2", "--output", str(out)]
    hook = partial(hooks.all_of, SMALL_UNITS, partial(hooks.trace_samples, trace))
    lanes = ["--order", "streamed:4", "--max-steps", "3"]
    first = run([*argv, *lanes], tmp_path / "log", 1, hook).expect(DONE)
    assert "order: streamed, all in each of 4 lanes of 42 images" in first.log
    refused = run([*argv, "--order", "streamed:2"], tmp_path / "log1").expect(USER_MISTAKE)
    assert "lanes: 4 -> 2" in refused.log
    run([*argv, *STREAMED], tmp_path / "log2", 2, hook).expect(DONE)
    check_samples(trace, order, epochs=2)
    assert final_state(out)["identity"]["lanes"] == read_run(out)["dataset"]["lanes"] == 4


def test_a_checkpoint_without_lanes_has_one(tars: Path, tmp_path: Path) -> None:
    argv = [str(tars), "--output", str(tmp_path / "out"), "--max-steps"]
    run([*argv, "2", *STREAMED], tmp_path / "log").expect(DONE)
    assert "lanes" not in final_state(tmp_path / "out")["identity"]
    refused = run([*argv, "3", "--order", "streamed:2"], tmp_path / "log1").expect(USER_MISTAKE)
    assert "lanes: 1 -> 2" in refused.log
    run([*argv, "3", "--order", "streamed:1"], tmp_path / "log2").expect(DONE)


def test_a_batch_that_lanes_do_not_divide_is_exit_2(tars: Path, tmp_path: Path) -> None:
    argv = [str(tars), "--order", "streamed:3", "--output", str(tmp_path / "out")]
    refused = run(argv, tmp_path / "log").expect(USER_MISTAKE)
    assert "--batch-size 8 cannot be cut into 3 lanes" in refused.log


def test_a_resumed_streamed_run_is_bit_for_bit_the_undisturbed_one(
    tars: Path, tmp_path: Path
) -> None:
    argv = [str(tars), "--epochs", "2", *STREAMED]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run([*argv, "--output", str(whole)], tmp_path / "log0").expect(DONE)
    run([*argv, "--max-steps", "3", "--output", str(parts)], tmp_path / "log1").expect(DONE)
    run([*argv, "--output", str(parts)], tmp_path / "log2").expect(DONE)
    differences = find_differences(final_state(parts), final_state(whole))
    # The part that ended at step 3 was validated there, too, and may have been the best.
    assert [line for line in differences if not line.startswith("/best/")] == []


def test_without_the_flag_a_run_is_uniform_and_its_record_says_so(
    tars: Path, tmp_path: Path
) -> None:
    out, trace = tmp_path / "out", tmp_path / "trace"
    argv = [str(tars), "--epochs", "1", "--output", str(out)]
    job = run(argv, tmp_path / "log", hook=partial(hooks.trace_samples, trace)).expect(DONE)
    assert "order:" not in job.log
    check_samples(trace, SampleOrder(), epochs=1)
    assert final_state(out)["identity"]["order"] == read_run(out)["config"]["order"] == "uniform"
    assert "window" not in read_run(out)["dataset"]


def test_a_checkpoint_without_an_order_is_uniform(tars: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    argv = [str(tars), "--output", str(out), "--max-steps"]
    run([*argv, "2"], tmp_path / "log").expect(DONE)
    (path,) = list_checkpoints(out / "ckpt")
    state = load_checkpoint(path)
    del state["identity"]["order"]
    write_torch_file(path, state)
    refused = run([*argv, "3", *STREAMED], tmp_path / "log1").expect(USER_MISTAKE)
    assert "order: uniform -> streamed" in refused.log
    went_on = run([*argv, "3", "--order", "uniform"], tmp_path / "log2").expect(DONE)
    assert "continuing from step 2 of 3" in went_on.log


def test_an_index_with_other_cuts_is_refused_with_both_digests(tars: Path, tmp_path: Path) -> None:
    """Here the cuts differ by the size of a unit, as they would for a tar that was repacked."""
    out = tmp_path / "out"
    argv = [str(tars), "--output", str(out), "--max-steps"]
    run([*argv, "2", *STREAMED], tmp_path / "log").expect(DONE)
    before = final_state(out)["identity"]["units"]
    other = partial(hooks.set_value, "train.data.tar_layout", "UNIT_SIZE", 3 * 8192)
    hook = partial(hooks.all_of, SMALL_UNITS, other)
    refused = run([*argv, "3"], tmp_path / "log2", hook=hook).expect(USER_MISTAKE)
    (line,) = [line for line in refused.log.splitlines() if "error:" in line]
    assert f"units: {before} -> " in line and "--index-dir" in line
    refused = run([*argv, "3", "--order", "uniform"], tmp_path / "log3").expect(USER_MISTAKE)
    assert "order: streamed -> uniform" in refused.log
    forced = run([*argv, "3", "--force"], tmp_path / "log4", hook=hook).expect(DONE)
    assert "continuing from step 2 of 3" in forced.log


def test_a_streamed_order_needs_an_index(images: Path, tmp_path: Path) -> None:
    out = ["--output", str(tmp_path / "out")]
    for world in (1, 2):
        job = run([str(images), *STREAMED, *out], tmp_path / f"log{world}", world)
        assert USER_MISTAKE in job.codes and DONE not in job.codes
        assert "write it: python scripts/index_tar.py --index-dir" in job.log
        assert "Traceback" not in job.log
    dummy = run(["--dummy", *STREAMED, *out], tmp_path / "log").expect(USER_MISTAKE)
    assert "--order streamed needs data in a tar" in dummy.log


def test_small_sets_are_told_that_little_can_be_hidden(tars: Path, tmp_path: Path) -> None:
    """With units and a window as they are outside of tests."""
    argv = [str(tars), *STREAMED, "--max-steps", "1", "--output", str(tmp_path / "out")]
    job = run(argv, tmp_path / "log", hook=None).expect(DONE)
    assert "order: streamed, all of 42 images" in job.log
    assert "16 batches of 8 are more than half of the set: little of a transfer" in job.log


@pytest.mark.parametrize("wrong", ["labels", "offsets"])
def test_a_wrong_index_ends_the_training_with_3(tars: Path, tmp_path: Path, wrong: str) -> None:
    """It belongs to its tar by size and headers, and contradicts itself nowhere."""
    data = shutil.copytree(tars, tmp_path / "data")
    place = data / "ILSVRC2012_img_train.tar.index"
    build_index(data / "ILSVRC2012_img_train.tar")
    with np.load(place) as file:
        arrays = {name: file[name] for name in file.files}
    if wrong == "labels":  # all classes have names of one length: the bounds stay true
        names = arrays["classes"].reshape(7, -1)
        arrays["classes"] = np.roll(names, 1, axis=0).ravel()
    else:
        arrays["offset"] = arrays["offset"] - 512
    with open(place, "wb") as out:
        np.savez(out, **arrays)
    argv = [str(data), "--max-steps", "1", "--skip-bad-images", "99"]
    job = run([*argv, "--output", str(tmp_path / "out")], tmp_path / "log", hook=None)
    job.expect(BAD_DATA)
    assert "the index of" in job.log and "is wrong" in job.log and "Traceback" not in job.log
