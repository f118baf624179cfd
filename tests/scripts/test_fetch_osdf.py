"""The command line of fetch: one line for a mistake, the right exit code, help with an example."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.dataset.small_server import serving

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "fetch_osdf.py"


def run(*args: str | Path, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, args)]
    env = {"PATH": "/usr/bin:/bin", "HOME": str(cwd), **environ}
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=env)


def test_it_runs_from_any_folder_and_needs_no_other_program(tmp_path: Path) -> None:
    with serving(b"content") as (url, _):
        done = run(url, "--out", "out", cwd=tmp_path, PATH="")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "object.bin").read_bytes() == b"content"


def test_help_has_an_example(tmp_path: Path) -> None:
    done = run("--help", cwd=tmp_path)
    assert done.returncode == 0
    assert "example:" in done.stdout and "osdf:///" in done.stdout


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["ftp://host/x", "--out", "o"], "use osdf:///path"),
        (["https://host/x", "--out", "o", "--md5", "123"], "32 hex digits"),
        (["https://h/x", "https://h/y", "--out", "o", "--md5", "0" * 32], "one URL"),
        (["https://host/x", "--out", "o", "--connections", "0"], "1 to 64"),
        (["https://host/x", "--out", "o", "--give-up-after", "soon"], "30m"),
        (["https://host/x", "--out", "o", "--token", "none"], "no such file"),
        (["https://host/x", "--out", "o", "--netrc", "none"], "no such file"),
        (["https://host/x", "--out", "o", "--index", "typo.index"], "no such file"),
        (["https://host/x", "--out", "o", "--caches", "0"], "1 or more"),
        (["file:///no/such/file", "--out", "o"], "No such file"),
        (["file:///usr", "--out", "o"], "/usr is a folder"),
        (["file:///usr/", "--out", "o"], "/usr is a folder"),
        (["https://host/x", "--out", "o", "--method", "osdf"], "--method osdf"),
    ],
)
def test_a_mistake_is_one_line_and_exit_2(args: list[str], words: str, tmp_path: Path) -> None:
    done = run(*args, cwd=tmp_path)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert len([line for line in done.stderr.splitlines() if line.startswith("error:")]) == 1


def test_a_machine_without_a_network_hears_so_first(tmp_path: Path) -> None:
    """In a network namespace of its own: loopback only, no route, no names."""
    command = ["unshare", "--net", sys.executable, str(SCRIPT), "osdf:///ns/a.tar", "--out", "o"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 75
    assert "error: no network" in done.stderr
    assert not (tmp_path / "o").exists() or not list((tmp_path / "o").glob("*.part"))


def test_a_wrong_digest_is_exit_3(tmp_path: Path) -> None:
    with serving(b"content") as (url, _):
        done = run(url, "--out", "out", "--md5", "0" * 32, cwd=tmp_path)
    assert done.returncode == 3
    assert not (tmp_path / "out" / "object.bin").exists()


def test_plain_lines_are_logged_where_there_is_no_terminal(tmp_path: Path) -> None:
    with serving(bytes(3 << 20)) as (url, _):
        done = run(url, "--out", "out", cwd=tmp_path)
    assert "3.1 of 3.1 MB" in done.stderr
    assert "\r" not in done.stderr
