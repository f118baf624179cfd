"""kill -9 at any moment: no class is half under its name, and finished classes are not redone."""

from __future__ import annotations

import gzip
import hashlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from dataset.archive.extract import Extraction, extract_archive
from tests.dataset.tars import (
    Tree,
    flatten,
    make_tree,
    nested_bytes,
    read_tree,
    tar_bytes,
    write_flat,
    write_nested,
)

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "scripts" / "extract_ILSVRC_mp.py"
# Every call of these changes the disk: the moments at which a kill makes a difference.
CHANGES = (
    "open", "write", "sendfile", "close", "rename", "replace", "mkdir", "rmdir", "unlink", "fsync",
)  # fmt: skip

MakeJob = Callable[[Path], Extraction]


def run_until(job: Extraction, moment: int, changes: Sequence[str] = CHANGES) -> bool:
    """Extracts in a process that is killed before its moment-th change; True when it was."""
    child = os.fork()
    if child == 0:
        count = 0

        def count_down(call: Callable[..., Any]) -> Callable[..., Any]:
            def counted(*args: Any, **kwargs: Any) -> Any:
                nonlocal count
                count += 1
                if count == moment:
                    os.kill(os.getpid(), signal.SIGKILL)
                return call(*args, **kwargs)

            return counted

        for name in changes:
            setattr(os, name, count_down(getattr(os, name)))
        try:
            extract_archive(job)
        except BaseException:
            os._exit(1)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL), f"moment {moment}: status {status}"
    return status == signal.SIGKILL


def check_classes(folder: Path, expected: dict[str, bytes]) -> dict[str, int]:
    """The inodes of the classes under their final names, each of which must be whole."""
    if not folder.exists():
        return {}
    whole = {}
    for entry in os.scandir(folder):
        files = {f"{entry.name}/{n}": d for n, d in read_tree(Path(entry.path)).items()}
        assert files == {n: d for n, d in expected.items() if n.startswith(f"{entry.name}/")}
        whole[entry.name] = entry.inode()
    return whole


def kill_at_every_moment(
    make_job: MakeJob, expected: dict[str, bytes], tmp_path: Path, step: int
) -> int:
    """Kills a run at each moment and lets the next one finish; the number of kills."""
    moment = 1
    while True:
        out = tmp_path / f"out{moment}"
        job = make_job(out)
        folder = out / job.split
        if not run_until(job, moment):
            return moment // step
        before = check_classes(folder, expected)
        extract_archive(job)
        after = check_classes(folder, expected)
        assert read_tree(folder) == expected, f"moment {moment}"
        assert before.items() <= after.items(), f"moment {moment}: a finished class was redone"
        assert set(os.listdir(out)) == {job.split, f".{job.split}.extracted.json"}
        moment += step


@pytest.mark.parametrize("step", [4, pytest.param(1, marks=pytest.mark.soak)])
def test_a_run_killed_at_any_moment_goes_on(tmp_path: Path, step: int) -> None:
    tree = make_tree(2, 3)
    tar = write_nested(tmp_path, tree)
    make_job: MakeJob = lambda out: Extraction(tar, "train", out, num_threads=1)  # noqa: E731
    assert kill_at_every_moment(make_job, flatten(tree), tmp_path, step) > 30 // step


@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.soak)])
def test_a_verified_run_killed_at_any_moment_goes_on(tmp_path: Path, step: int) -> None:
    tree = make_tree(2, 2)
    tar = write_nested(tmp_path, tree)
    md5 = hashlib.md5(tar.read_bytes()).hexdigest()
    make_job: MakeJob = lambda out: Extraction(tar, "train", out, num_threads=2, md5=md5)  # noqa: E731
    assert kill_at_every_moment(make_job, flatten(tree), tmp_path, step) > 20 // step


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.soak)])
def test_val_killed_at_any_moment_goes_on(tmp_path: Path, step: int) -> None:
    tar, expected = write_flat(tmp_path, 8)
    make_job: MakeJob = lambda out: Extraction(tar, "val", out, num_threads=1)  # noqa: E731
    assert kill_at_every_moment(make_job, expected, tmp_path, step) > 30 // step


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.soak)])
@pytest.mark.parametrize("shape", ["nested", "tree"])
def test_a_stream_killed_at_any_moment_goes_on(tmp_path: Path, shape: str, step: int) -> None:
    tree = make_tree(3, 2)
    data = nested_bytes(tree) if shape == "nested" else tar_bytes(flatten(tree))
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(data))
    make_job: MakeJob = lambda out: Extraction(tmp_path / "a.tar.gz", "train", out)  # noqa: E731
    assert kill_at_every_moment(make_job, flatten(tree), tmp_path, step) > 30 // step


def test_a_run_killed_again_and_again_gets_done(tmp_path: Path) -> None:
    """No start gets to the end by itself, but the classes of all add up.

    A kill comes by the classes that have got their names: threads may write the files of all of
    them before the first is named.
    """
    tree = make_tree(8, 6)
    tar = write_nested(tmp_path, tree)
    job = Extraction(tar, "train", tmp_path / "out", num_threads=1)
    num_kills = 0
    while run_until(job, 3, ("rename", "replace")):
        check_classes(tmp_path / "out" / "train", flatten(tree))
        num_kills += 1
        assert num_kills < 20
    assert num_kills >= 2
    assert read_tree(tmp_path / "out" / "train") == flatten(tree)


def kill_command(tar: Path, out: Path, tree: Tree, after_classes: int) -> None:
    """Kills the real command once some classes have their names, and checks what it left."""
    command: list[str | Path] = [sys.executable, SCRIPT, "--run_type", "train", "--train_tar", tar]
    process = subprocess.Popen(
        [*command, "--output_dir", out, "--num_threads", "2"], stderr=subprocess.DEVNULL
    )
    while process.poll() is None and _num_classes(out / "train") < after_classes:
        pass
    process.kill()
    process.wait()
    check_classes(out / "train", flatten(tree))


def _num_classes(folder: Path) -> int:
    try:
        return len(os.listdir(folder))
    except FileNotFoundError:
        return 0


def run_command_to_the_end(tar: Path, out: Path) -> None:
    command: list[str | Path] = [sys.executable, SCRIPT, "--run_type", "train", "--train_tar", tar]
    subprocess.run([*command, "--output_dir", out], check=True, capture_output=True)


def test_the_command_killed_between_classes_goes_on(tmp_path: Path) -> None:
    tree = make_tree(40, 10)
    tar = write_nested(tmp_path, tree)
    for after_classes in (1, 25):
        kill_command(tar, tmp_path / "out", tree, after_classes)
    run_command_to_the_end(tar, tmp_path / "out")
    assert read_tree(tmp_path / "out" / "train") == flatten(tree)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_the_command_killed_a_hundred_times_goes_on(tmp_path: Path) -> None:
    tree = make_tree(120, 30)
    tar = write_nested(tmp_path, tree)
    chance = random.Random(0)
    for round_number in range(10):
        out = tmp_path / f"out{round_number}"
        for after_classes in sorted(chance.sample(range(1, 119), 10)):
            kill_command(tar, out, tree, after_classes)
        run_command_to_the_end(tar, out)
        assert read_tree(out / "train") == flatten(tree)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_many_extractors_on_one_folder_leave_one_whole_set(tmp_path: Path) -> None:
    tree = make_tree(80, 20)
    tar = write_nested(tmp_path, tree)
    command: list[str | Path] = [sys.executable, SCRIPT, "--run_type", "train", "--train_tar", tar]
    for round_number in range(20):
        out = tmp_path / f"out{round_number}"
        crowd = [
            subprocess.Popen([*command, "--output_dir", out], stderr=subprocess.PIPE, text=True)
            for _ in range(4)
        ]
        texts = [process.communicate()[1] for process in crowd]
        assert {process.returncode for process in crowd} <= {0, 75}, texts
        assert 0 in {process.returncode for process in crowd}
        assert read_tree(out / "train") == flatten(tree)
