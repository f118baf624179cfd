"""The command line of fetch: one line for a mistake, the right exit code, help with an example."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.dataset.small_server import serving
from tests.scripts.commands import fork_script, run_script

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "fetch_osdf.py"


def run(*args: str | Path, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    env = {"PATH": "/usr/bin:/bin", "HOME": str(cwd), **environ}
    return run_script("fetch_osdf", *args, cwd=cwd, env=env)


def test_it_runs_from_any_folder_and_needs_no_other_program(tmp_path: Path) -> None:
    with serving(b"content") as (url, _):
        done = run(url, "--out", "out", cwd=tmp_path, PATH="")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "object.bin").read_bytes() == b"content"


def test_it_needs_nothing_beyond_the_standard_library(tmp_path: Path) -> None:
    command = [sys.executable, "-I", "-S", str(SCRIPT), "--out", str(tmp_path / "out")]
    with serving(b"content") as (url, _):
        done = subprocess.run([*command, url], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "object.bin").read_bytes() == b"content"


def test_a_summary_that_cannot_be_written_does_not_hide_what_went_wrong(tmp_path: Path) -> None:
    summary = tmp_path / "no_folder" / "summary.json"
    with serving(b"content") as (url, _):
        wrong = run(url, "--out", "a", "--md5", "0" * 32, "--summary", summary, cwd=tmp_path)
        right = run(url, "--out", "b", "--summary", summary, cwd=tmp_path)
    assert (wrong.returncode, right.returncode) == (3, 2)
    assert "fails verification" in wrong.stderr
    assert (tmp_path / "b" / "object.bin").read_bytes() == b"content"


def test_a_full_disk_leaves_a_summary(tmp_path: Path) -> None:
    summary = tmp_path / "summary.json"
    limit = ["prlimit", f"--fsize={1 << 20}", sys.executable, str(SCRIPT)]
    with serving(bytes(5 << 20)) as (url, _):
        command = [*limit, url, "--out", str(tmp_path / "out"), "--summary", str(summary)]
        done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    (record,) = json.loads(summary.read_text())
    assert record["status"] == "failed" and record["error"]


def test_help_has_an_example(tmp_path: Path) -> None:
    done = run("--help", cwd=tmp_path)
    assert done.returncode == 0
    assert "example:" in done.stdout and "osdf:///" in done.stdout


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["https://host/x"], "are required: --out; fetch_osdf.py --help lists the flags"),
        (["ftp://host/x", "--out", "o"], "use osdf:///path"),
        (["https://host/x", "--out", "o", "--md5", "123"], "32 hex digits"),
        (["https://h/x", "https://h/y", "--out", "o", "--md5", "0" * 32], "one URL"),
        (["https://host/x", "--out", "o", "--connections", "0"], "1 to 64"),
        (["https://host/x", "--out", "o", "--give-up-after", "soon"], "30m"),
        (["https://host/x", "--out", "o", "--token", "none"], "no such file"),
        (["https://host/x", "--out", "o", "--netrc", "none"], "no such file"),
        (["https://host/x", "--out", "o", "--index", "typo.index"], "no such file"),
        (["https://host/x", "--out", "o", "--index", "/etc/passwd"], "/etc/passwd is no index"),
        (["https://host/x", "--out", "o", "--caches", "0"], "1 or more"),
        (["file:///no/such/file", "--out", "o"], "No such file"),
        (["file:///usr", "--out", "o"], "/usr is a folder"),
        (["file:///usr/", "--out", "o"], "/usr is a folder"),
        (["https://host/x", "--out", "o", "--method", "osdf"], "--method osdf"),
        (["osdf:///ns/d", "--out", "o", "--recursive", "--md5", "0" * 32], "--recursive"),
        (["https://h/a/x", "https://h/b/x", "--out", "o"], "have the same name"),
    ],
)
def test_a_mistake_is_one_line_and_exit_2(args: list[str], words: str, tmp_path: Path) -> None:
    env = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    done = fork_script("fetch_osdf", *args, cwd=tmp_path, env=env)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr and "usage:" not in done.stderr
    assert len([line for line in done.stderr.splitlines() if line.startswith("error:")]) == 1


def test_a_machine_without_a_network_hears_so_first(tmp_path: Path) -> None:
    """In a network namespace of its own: loopback only, no route, no names."""
    command = ["unshare", "--net", sys.executable, str(SCRIPT), "osdf:///ns/a.tar", "--out", "o"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 75
    assert "error: no network" in done.stderr
    assert not (tmp_path / "o").exists() or not list((tmp_path / "o").glob("*-part*"))


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
