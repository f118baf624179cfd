"""Locks leave no file behind, and nothing of a person is deleted without a word."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.cluster import __main__ as command
from tests.cluster.condor import __main__ as pool_command
from tests.cluster.condor import pool
from tests.cluster.lifetime import Lifetime, locked


def count_up(folder: Path, times: int) -> None:
    for _ in range(times):
        with locked(folder / "lock"):
            number = int((folder / "number").read_text())
            (folder / "number").write_text(str(number + 1))


def test_a_lock_holds_and_leaves_no_file(tmp_path: Path) -> None:
    (tmp_path / "number").write_text("0")
    workers = [multiprocessing.Process(target=count_up, args=(tmp_path, 50)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert (tmp_path / "number").read_text() == "200"
    assert [path.name for path in tmp_path.iterdir()] == ["number"]


def test_a_service_that_is_down_leaves_no_file(tmp_path: Path) -> None:
    folder = tmp_path / "service"
    folder.mkdir()
    life = Lifetime(folder, folder.rmdir)
    with life.exclusive():
        life.join(started=True)
    with life.exclusive():
        assert life.leave()
    (folder / "started-by-tests").unlink()
    folder.rmdir()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "answer", "code"),
    [(["down"], "n", 2), (["down"], "y", 0), (["down"], None, 2), (["down", "--force"], None, 0)],
)
def test_a_persons_results_are_deleted_only_when_he_says_so(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    answer: str | None,
    code: int,
) -> None:
    """With a stand-in service: the real ones would take the results of whoever uses them."""
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "run.json").touch()
    stopped = []
    service = SimpleNamespace(
        files_of_people=lambda: tmp_path, missing=lambda: None, down=lambda: stopped.append(1)
    )
    monkeypatch.setattr(command, "load", lambda _: service)
    monkeypatch.setattr("sys.argv", ["tests.cluster", words[0], "condor", *words[1:]])
    monkeypatch.setattr("sys.stdin.isatty", lambda: answer is not None, raising=False)
    monkeypatch.setattr("builtins.input", lambda _: answer)
    assert command.main() == code
    assert bool(stopped) == (code == 0)
    if "--force" not in words:
        assert f"{tmp_path} holds 1 file of yours" in capsys.readouterr().out


def test_a_command_for_a_pool_that_is_down_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pool, "HOME", tmp_path)  # no process of this machine belongs to it
    monkeypatch.setattr("sys.argv", ["condor", "condor_q"])
    with pytest.raises(SystemExit) as end:
        pool_command.main()
    assert end.value.code == 2
    assert capsys.readouterr().err == (
        "error: the HTCondor pool is down; `make cluster-up` starts it\n"
    )
