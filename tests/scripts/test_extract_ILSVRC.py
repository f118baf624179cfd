"""The extraction commands: the Kempner flags, one line a user error, full and read-only disks."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import pty
import runpy
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pytest

from tests.dataset.bad_tars import BAD
from tests.dataset.tars import (
    TRAIN,
    VAL,
    flatten,
    make_tree,
    nested_bytes,
    read_tree,
    write_files,
    write_flat,
    write_nested,
)

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "extract_ILSVRC_mp.py"
SHELL = ROOT / "scripts" / "extract_ILSVRC.sh"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the script in this process: (exit code, standard error)."""

    def run_script(*flags: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, flags)])
        with pytest.raises(SystemExit) as caught:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        return int(caught.value.code or 0), capsys.readouterr().err

    return run_script


def error_lines(text: str) -> list[str]:
    assert "Traceback" not in text
    return [line for line in text.splitlines() if line.startswith("error: ")]


def test_the_seeds_command_line_extracts_everything(tmp_path: Path) -> None:
    """As the README of the Kempner project has it, from another folder, as a process of its own."""
    tree = make_tree(4, 8)
    write_nested(tmp_path, tree)
    _, val = write_flat(tmp_path, 40)
    done = subprocess.run(
        [
            sys.executable,
            SCRIPT,
            *("--train_tar", TRAIN, "--val_tar", VAL, "--output_dir", "out"),
            *("--valprep_script", "valprep.sh", "--num_threads", "8", "--run_type", "all"),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert read_tree(tmp_path / "out" / "train") == flatten(tree)
    assert read_tree(tmp_path / "out" / "val") == val
    num_bytes = sum(map(len, flatten(tree).values()))
    assert f"out/train: 4 classes, 32 images, {num_bytes} bytes in " in done.stderr
    assert " MB/s)" in done.stderr


def test_a_line_for_each_stage_is_recorded(tmp_path: Path, run: Any) -> None:
    tree = make_tree()
    write_nested(tmp_path, tree)
    flags = ["--run_type", "train", "--train_tar", tmp_path / TRAIN, "--output_dir", tmp_path]
    assert run(*flags, "--record", tmp_path / "records")[0] == 0
    (line,) = (tmp_path / "records" / "stages.jsonl").read_text().splitlines()
    stage = json.loads(line)
    assert (stage["stage"], stage["status"], stage["images"]) == ("extract", "done", 18)
    assert stage["image_bytes"] == sum(map(len, flatten(tree).values()))


def test_missing_flags_and_files_are_one_line_and_exit_2(tmp_path: Path, run: Any) -> None:
    tar = write_nested(tmp_path, make_tree())
    out = tmp_path / "out"
    for flags, words in (
        (["--train_tar", tar], "--run_type all needs --val_tar"),
        (["--run_type", "val"], "--run_type val needs --val_tar"),
        (["--run_type", "train", "--train_tar", tmp_path / "no.tar"], "no such file"),
        (
            ["--run_type", "train", "--train_tar", tar, "--num_threads", 0],
            "0: must be at least 1",
        ),
        (["--run_type", "train", "--train_tar", tar, "--verify"], "not one of the published"),
        (["--run_type", "train", "--train_tar", tar, "--md5", "zz"], "32 hex digits"),
        (["--train_tar", tar, "--val_tar", tar, "--md5", "0" * 32], "--md5 is that of one archive"),
        (
            ["--train_tar", tar, "--val_tar", tar, "--valprep_script", "no"],
            "check --valprep_script",
        ),
    ):
        code, text = run(*flags, "--output_dir", out)
        assert code == 2
        assert len(error_lines(text)) == 1
        assert words in text
    assert not (out / "train").exists()


@pytest.mark.parametrize("case", BAD)
def test_a_bad_archive_is_one_line_and_nothing_under_a_final_name(
    tmp_path: Path, run: Any, case: str
) -> None:
    make, words = BAD[case]
    (tmp_path / TRAIN).write_bytes(make())
    out = tmp_path / "out"
    code, text = run("--run_type", "train", "--train_tar", tmp_path / TRAIN, "--output_dir", out)
    assert code in (2, 3)
    assert len(error_lines(text)) == len(text.splitlines()) == 1
    assert words in text
    assert set(os.listdir(tmp_path)) == {TRAIN, "out"}
    assert set(os.listdir(out)) <= {"stages.jsonl"}


def test_a_wrong_md5_is_exit_3_and_a_right_one_is_told(tmp_path: Path, run: Any) -> None:
    tar = write_nested(tmp_path, make_tree())
    flags = ["--run_type", "train", "--train_tar", tar, "--output_dir", tmp_path / "out"]
    assert run(*flags, "--md5", "0" * 32)[0] == 3
    assert read_tree(tmp_path / "out").keys() == {"stages.jsonl"}
    md5 = hashlib.md5(tar.read_bytes()).hexdigest()
    right = f"{command(tar, tmp_path / 'out')} --md5 {md5}"
    done = subprocess.run(right.split(), capture_output=True, text=True)
    assert done.returncode == 0
    assert "md5 verified" in done.stderr


def in_namespace(script: str) -> subprocess.CompletedProcess[str]:
    """Runs a shell script that may mount; its mounts end with it."""
    unshare = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-rm"]
    return subprocess.run([*unshare, "sh", "-c", script], capture_output=True, text=True)


def command(tar: Path, out: Path) -> str:
    return f"{sys.executable} {SCRIPT} --run_type train --train_tar {tar} --output_dir {out}"


def test_a_disk_that_is_too_small_is_said_before_the_first_byte(tmp_path: Path) -> None:
    tar = write_nested(tmp_path, {"n01440764": {f"{i}.JPEG": bytes(60_000) for i in range(40)}})
    (tmp_path / "disk").mkdir()
    problems = (("size=1m", "GB free, but the images need"), ("nr_inodes=30", "free inodes"))
    for option, words in problems:
        done = in_namespace(
            f"mount -t tmpfs -o {option} none {tmp_path}/disk && "
            f"{{ {command(tar, tmp_path / 'disk')}; echo code $?; find {tmp_path}/disk -name '*G';"
            " }"
        )
        assert done.stdout.split() == ["code", "2"], done.stderr
        assert len(error_lines(done.stderr)) == 1
        assert words in done.stderr


FULL = """
mount -t tmpfs -o size={size} none {out}
{python} - <<'EOF'
import os, runpy, sys
whole = os.statvfs
# The disk had room when it was asked, and others fill it meanwhile.
os.statvfs = lambda path: os.statvfs_result((4096, 4096) + (10**6,) * 6 + (0, 255, 0))
sys.argv = {argv!r}
runpy.run_path(sys.argv[0], run_name="__main__")
EOF
echo code $?
ls {out}/train
mount -o remount,size=64m {out}
{command}
echo code $?
diff -r {out}/train {expected} && echo same
"""


def test_a_disk_that_fills_up_stops_it_and_the_next_run_goes_on(tmp_path: Path) -> None:
    tree = {
        f"n{c:08d}": {f"n{c:08d}_{i}.JPEG": os.urandom(100_000) for i in range(10)}
        for c in range(8)
    }
    tar = write_nested(tmp_path, tree)
    write_files(tmp_path / "expected", flatten(tree))
    out = tmp_path / "disk"
    out.mkdir()
    flags = ["--run_type", "train", "--train_tar", str(tar), "--output_dir", str(out)]
    script = FULL.format(
        size="5m",
        out=out,
        python=sys.executable,
        argv=[str(SCRIPT), *flags, "--num_threads", "2"],
        command=command(tar, out),
        expected=tmp_path / "expected",
    )
    done = in_namespace(script)
    lines = done.stdout.splitlines()
    assert lines[0] == "code 2", done.stderr
    assert lines[-2:] == ["code 0", "same"], done.stderr
    finished = lines[1:-2]
    assert 1 <= len(finished) < 8
    assert "error: No space left on device: " in done.stderr
    assert len(error_lines(done.stderr)) == 1


def test_a_read_only_folder_is_one_line_and_exit_2(tmp_path: Path) -> None:
    tar = write_nested(tmp_path, make_tree())
    (tmp_path / "disk").mkdir()
    done = in_namespace(
        f"mount -t tmpfs -o ro none {tmp_path}/disk && "
        f"{{ {command(tar, tmp_path / 'disk' / 'out')}; echo code $?; }}"
    )
    assert done.stdout.split() == ["code", "2"], done.stderr
    (line,) = error_lines(done.stderr)
    assert "Read-only file system" in line


def test_ctrl_c_is_one_line_and_the_next_run_goes_on(tmp_path: Path) -> None:
    tree = make_tree(200, 40)
    tar = write_nested(tmp_path, tree)
    process = subprocess.Popen(
        command(tar, tmp_path / "out").split(), stderr=subprocess.PIPE, text=True
    )
    while process.poll() is None and not (tmp_path / "out" / "train").exists():
        pass
    process.send_signal(signal.SIGINT)
    text = process.communicate()[1]
    assert process.returncode in (0, 130)
    assert "Traceback" not in text
    if process.returncode == 130:
        assert "run the same command again to continue" in text
    assert read_tree(tmp_path / "out" / "train").items() <= flatten(tree).items()
    subprocess.run(command(tar, tmp_path / "out").split(), check=True, capture_output=True)
    assert read_tree(tmp_path / "out" / "train") == flatten(tree)


def test_a_terminal_gets_a_bar_in_bytes_and_images(tmp_path: Path) -> None:
    tar = write_nested(tmp_path, make_tree(5, 20))
    screen, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", 24, 100, 0, 0))
    process = subprocess.Popen(command(tar, tmp_path / "out").split(), stderr=terminal)
    os.close(terminal)
    shown = b""
    try:
        while chunk := os.read(screen, 4096):
            shown += chunk
    except OSError:  # the other end of a pseudo-terminal is closed
        pass
    assert process.wait() == 0
    assert b"100%" in shown
    assert b"B/s" in shown
    assert b"100 images" in shown


def test_two_extractors_at_once_leave_one_whole_set(tmp_path: Path) -> None:
    tree = make_tree(40, 20)
    tar = write_nested(tmp_path, tree)
    pair = [
        subprocess.Popen(command(tar, tmp_path / "out").split(), stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    texts = [process.communicate()[1] for process in pair]
    codes = {process.returncode for process in pair}
    assert codes in ({0}, {0, 75}), texts
    assert read_tree(tmp_path / "out" / "train") == flatten(tree)


def test_the_shell_baseline_extracts_the_same(tmp_path: Path, run: Any) -> None:
    tree = make_tree()
    write_nested(tmp_path / "data", tree)
    _, val = write_flat(tmp_path / "data", 30)
    done = subprocess.run([SHELL, tmp_path / "data"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:2] == ["train: 18 images", "val: 30 images"]
    assert read_tree(tmp_path / "data" / "train") == flatten(tree)
    assert read_tree(tmp_path / "data" / "val") == val


def test_the_shell_baseline_refuses_what_it_cannot_do(tmp_path: Path) -> None:
    def refused(words: str) -> None:
        done = subprocess.run([SHELL, tmp_path], capture_output=True, text=True)
        assert done.returncode == 2
        assert words in done.stderr

    refused("fetch them first")
    (tmp_path / TRAIN).write_bytes(nested_bytes(make_tree()))
    (tmp_path / "train").mkdir()
    refused("remove it first")


def test_help_shows_an_example(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    done = subprocess.run([sys.executable, SCRIPT, "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    assert "examples:" in done.stdout
    for flag in ("train_tar", "val_tar", "output_dir", "valprep_script", "num_threads", "run_type"):
        assert f"--{flag}" in done.stdout
