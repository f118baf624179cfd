"""Damaged files are found before they are used, and whole ones of others are told apart."""

from __future__ import annotations

import random
import resource
import shutil
import signal
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from dataset.errors import BAD_DATA, DIVERGED, DONE, USER_MISTAKE, DataError, UserError
from tests.train import hooks
from tests.train import started_ranks as ranks
from tests.train.checkpoints.small_states import save, state_at
from train.checkpoints import checkpoint
from train.checkpoints.checkpoint import (
    CheckpointWriter,
    list_checkpoints,
    load_checkpoint,
    load_latest,
)
from train.checkpoints.torch_file import find_damage, write_torch_file
from train.network.model import read_state_dict


def flip(path: Path, bit: int) -> None:
    with open(path, "r+b") as file:
        file.seek(bit // 8)
        (byte,) = file.read(1)
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


def test_a_flip_of_any_bit_of_a_checkpoint_is_found(tmp_path: Path) -> None:
    """Every bit of a small file: of the data, the padding, the zip's headers and the checksum."""
    path = tmp_path / "x.pt"
    write_torch_file(path, {"w": torch.zeros(3)})
    whole = path.read_bytes()
    assert find_damage(path) == ""
    missed = []
    for bit in range(8 * len(whole)):
        flip(path, bit)
        missed += [] if find_damage(path) else [bit]
        flip(path, bit)
    assert path.read_bytes() == whole
    assert missed == []


def test_a_flip_in_a_file_of_plain_torch_is_found_or_changes_nothing(tmp_path: Path) -> None:
    """An older checkpoint, or the weights of somebody else: the zip sums its records alone."""
    path = tmp_path / "x.pt"
    torch.save(state_at(1), path)
    num_bits = 8 * path.stat().st_size
    random_bits = [random.Random(seed).randrange(num_bits) for seed in range(300)]
    with zipfile.ZipFile(path) as archive:  # its directory calls data/0 a folder
        directory = path.read_bytes().rindex(b"/data/0") - len("x") - 46
        assert archive.infolist()[4].filename == "x/data/0"
    headers = range(8 * directory, num_bits, 13)
    num_found = 0
    for bit in (*random_bits, 8 * (directory + 38) + 4, *range(0, 8 * 30, 5), *headers):
        flip(path, bit)
        try:
            loaded = load_checkpoint(path)
            assert torch.equal(loaded["model"]["w"], torch.full((1000,), 1.0)), bit
            assert loaded["step"] == 1
        except (DataError, UserError):
            num_found += 1
        flip(path, bit)
    assert load_checkpoint(path)["step"] == 1
    assert num_found > 200


def test_a_damaged_latest_is_named_and_the_one_before_is_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = CheckpointWriter(tmp_path)
    save(writer, 1)
    save(writer, 2)
    damaged = tmp_path / checkpoint.file_name(2)
    flip(damaged, 8 * (damaged.stat().st_size // 2))
    with caplog.at_level("WARNING", "trainyard"):
        checkpoint.log.propagate = True
        path, loaded = load_latest(tmp_path)
    assert loaded is not None and loaded["step"] == 1 and path == tmp_path / checkpoint.file_name(1)
    assert f"{damaged} is damaged (its checksum differs)" in caplog.text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("step", -5),
        ("step", True),
        ("step", "7"),
        ("microbatch", 2.0),
        ("model", [1]),
        ("optimizer", None),
        ("identity", "arch"),
        ("is_evaluated", 1),
        ("resumed_from", 3),
    ],
)
def test_a_field_of_another_type_is_refused_by_name(
    tmp_path: Path, name: str, value: object
) -> None:
    torch.save(state_at(1) | {name: value}, tmp_path / "x.pt")
    with pytest.raises(UserError, match=f"{name} is"):
        load_checkpoint(tmp_path / "x.pt")


def test_a_folder_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is a folder"):
        load_checkpoint(tmp_path)


def test_weights_that_are_damaged_or_of_another_kind_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    torch.save({"w": torch.ones(1000)}, path)
    assert read_state_dict(path).keys() == {"w"}
    flip(path, 8 * 2000)
    with pytest.raises(DataError, match="damaged"):
        read_state_dict(path)
    torch.save({3: torch.ones(10)}, path)
    with pytest.raises(UserError, match="without names"):
        read_state_dict(path)
    path.write_bytes(b"")
    with pytest.raises(DataError, match="it is empty"):
        read_state_dict(path)


def test_weights_of_an_old_torch_are_read_and_called_not_verified(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "old.pt"
    torch.save({"w": torch.ones(2)}, path, _use_new_zipfile_serialization=False)
    with caplog.at_level("WARNING", "trainyard"):
        checkpoint.log.propagate = True
        assert read_state_dict(path).keys() == {"w"}
    assert "not verified" in caplog.text


# --- what a run does with them ----------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a run of two steps that were saved one by one."""
    folder = tmp_path_factory.mktemp("trained")
    argv = [str(images), "--max-steps", "2", "--checkpoint-minutes", "1e-9"]
    ranks.run([*argv, "--output", str(folder / "out")], folder / "log").expect(DONE)
    return folder / "out"


def copy_of(trained: Path, out: Path) -> list[Path]:
    """The checkpoints of a copy of the run, the older first."""
    shutil.copytree(trained, out)
    return list_checkpoints(out / "ckpt")


def test_a_run_goes_on_from_the_older_checkpoint_and_says_so(
    images: Path, trained: Path, tmp_path: Path
) -> None:
    _, newer = copy_of(trained, tmp_path / "out")
    argv = [str(images), "--output", str(tmp_path / "out"), "--max-steps", "3"]
    flip(newer, 8 * 5000)
    job = ranks.run(argv, tmp_path / "log").expect(DONE)
    assert f"{newer} is damaged" in job.log
    assert "continuing from step 1 " in job.log
    kept = list_checkpoints(tmp_path / "out" / "ckpt")
    assert [load_checkpoint(path)["step"] for path in kept] == [1, 3]  # and not the damaged one
    for path in kept:
        flip(path, 8 * 5000)
    job = ranks.run([*argv, "-e"], tmp_path / "log1", 2).expect(BAD_DATA)
    assert job.log.count("error: no checkpoint") == 1 and "Traceback" not in job.log


def test_an_evaluation_names_its_checkpoint_and_refuses_damaged_and_useless_ones(
    images: Path, trained: Path, tmp_path: Path
) -> None:
    older, newer = copy_of(trained, tmp_path / "out")
    argv = [str(images), "-e"]
    job = ranks.run([*argv, "--output", str(tmp_path / "out")], tmp_path / "log0").expect(DONE)
    assert f"evaluating {newer}, step 2" in job.log
    flip(older, 8 * 5000)
    for number, flag in enumerate(("--resume", "--weights")):
        job = ranks.run([*argv, flag, str(older)], tmp_path / f"log1{number}").expect(BAD_DATA)
        assert f"error: {older} is damaged" in job.log
    state = load_checkpoint(newer)
    state["model"]["fc.weight"].fill_(float("inf"))  # whole, and of no use
    write_torch_file(tmp_path / "inf.pt", state)
    argv += ["--resume", str(tmp_path / "inf.pt"), "--output", str(tmp_path / "useless")]
    job = ranks.run(argv, tmp_path / "log2").expect(DIVERGED)
    assert "not finite" in job.log and "Traceback" not in job.log


def test_an_output_without_a_checkpoint_is_named_by_an_evaluation(
    images: Path, tmp_path: Path
) -> None:
    argv = [str(images), "-e", "--output", str(tmp_path / "empty")]
    job = ranks.run(argv, tmp_path / "log").expect(USER_MISTAKE)
    assert f"error: nothing to evaluate: no checkpoint in {tmp_path / 'empty'}" in job.log


def change_optimizer(state: dict[str, Any]) -> None:
    first = state["optimizer"]["state"][0]
    first["momentum_buffer"] = first["momentum_buffer"][:1].clone()


def change_groups(state: dict[str, Any]) -> None:
    state["optimizer"] = {"param_groups": [3]}


def change_model(state: dict[str, Any]) -> None:
    state["model"] = {5: torch.zeros(1)}


def change_sums(state: dict[str, Any]) -> None:
    state["epoch_sums"] = {"loss": "much"}


def change_best(state: dict[str, Any]) -> None:
    state["best"] = {"best_acc1": "99"}


@pytest.mark.parametrize(
    "change", [change_optimizer, change_groups, change_model, change_sums, change_best]
)
def test_a_whole_checkpoint_with_strange_contents_is_one_line(
    images: Path, trained: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    _, newer = copy_of(trained, tmp_path / "out")
    state = load_checkpoint(newer)
    change(state)
    write_torch_file(newer, state)
    argv = [str(images), "--resume", str(newer), "--output", str(tmp_path / "new")]
    job = ranks.run(argv, tmp_path / "log").expect(USER_MISTAKE)
    assert job.log.count("error: the ") == 1 and "Traceback" not in job.log


def test_a_disk_that_is_full_when_the_model_is_saved_is_one_line(
    images: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    argv = [str(images), "--max-steps", "1", "--output", str(out), "--save-model"]
    argv += ["-a", ranks.REAL_ARCH]  # its file is larger than what may be written
    hook = partial(hooks.before, "train.saving", "save_state_dict", partial(limit_files, 1 << 18))
    job = ranks.run(argv, tmp_path / "log", hook=hook).expect(USER_MISTAKE)
    assert f"{ranks.REAL_ARCH}_7_classes.pt.part; this disk or a limit" in job.log
    assert "Traceback" not in job.log and "inline_container" not in job.log
    assert not list(out.glob("*.pt*"))
    ranks.run(argv, tmp_path / "log1").expect(DONE)  # the same command ends it
    assert find_damage(out / f"{ranks.REAL_ARCH}_7_classes.pt") == ""


def limit_files(size: int) -> None:
    """No file of this process may get larger: the disk says so as it says that it is full."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
