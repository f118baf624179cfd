"""The hot loop of extraction: every byte once, whatever the disks and their filesystems do."""

from __future__ import annotations

import errno
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dataset.archive.output_folder import OutputFolder
from dataset.errors import DataError
from tests.dataset.tars import (
    extract,
    flatten,
    inodes,
    make_tree,
    read_tree,
    write_nested,
)


def test_an_error_of_a_worker_stops_all_and_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = make_tree(30, 20)
    tar = write_nested(tmp_path, tree)
    sendfile = os.sendfile

    def fail(fd: int, *rest: Any) -> int:
        path = Path(f"/proc/self/fd/{fd}").readlink()
        if path.name.endswith("_7007.JPEG") or path.parent.name == "n01455207":
            raise OSError(errno.ENOSPC, "No space left on device")
        return sendfile(fd, *rest)

    monkeypatch.setattr(os, "sendfile", fail)
    with pytest.raises(OSError, match="No space left on device") as caught:
        extract(tar, tmp_path / "out")
    assert str(tmp_path / "out" / "train") in str(caught.value)
    there = read_tree(tmp_path / "out" / "train")
    assert there.items() <= flatten(tree).items()
    for wnid in os.listdir(tmp_path / "out" / "train"):
        assert len(os.listdir(tmp_path / "out" / "train" / wnid)) == 20
    monkeypatch.undo()
    before = inodes(tmp_path / "out" / "train")
    extract(tar, tmp_path / "out")
    assert read_tree(tmp_path / "out" / "train") == flatten(tree)
    assert inodes(tmp_path / "out" / "train").items() >= before.items()


def test_short_copies_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = make_tree()
    tar = write_nested(tmp_path, tree)
    sendfile = os.sendfile

    def copy_half(to: int, source: int, offset: int, count: int) -> int:
        return sendfile(to, source, offset, max(1, count // 2))

    monkeypatch.setattr(os, "sendfile", copy_half)
    extract(tar, tmp_path / "out")
    monkeypatch.undo()
    assert read_tree(tmp_path / "out" / "train") == flatten(tree)


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_filesystem_without_sendfile_gets_the_same_files(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = make_tree()
    wnid = min(tree)
    tree[wnid][f"{wnid}_77.JPEG"] = bytes(range(256)) * 3000  # more than one piece
    tar = write_nested(tmp_path, tree)
    write = os.write

    def have_none(*args: Any) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "sendfile", have_none)
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[: max(1, len(data) // 2)]))
    extract(tar, tmp_path / "out")
    monkeypatch.undo()
    assert read_tree(tmp_path / "out" / "train") == flatten(tree)


def test_two_threads_find_out_together_that_there_is_no_sendfile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = make_tree(2)
    tar = write_nested(tmp_path, tree)
    both = threading.Barrier(2)

    def have_none(*args: Any) -> int:
        with suppress(threading.BrokenBarrierError):
            both.wait(timeout=5)
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "sendfile", have_none)
    extract(tar, tmp_path / "out")
    assert read_tree(tmp_path / "out" / "train") == flatten(tree)


def test_a_file_that_shrinks_while_it_is_read_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tar = write_nested(tmp_path, make_tree())
    begin = OutputFolder.begin

    def shrink(self: OutputFolder, archive: Any) -> None:
        os.truncate(tar, 2000)
        begin(self, archive)

    monkeypatch.setattr(OutputFolder, "begin", shrink)
    with pytest.raises(DataError, match="was it changed"):
        extract(tar, tmp_path / "out")


def test_every_byte_is_written_once(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    tree = {
        f"n{c:08d}": {f"n{c:08d}_{i}.JPEG": random.bytes(110_000) for i in range(10)}
        for c in range(4)
    }
    tar = write_nested(tmp_path, tree)
    before = _written()
    result = extract(tar, tmp_path / "out")
    assert _written() - before <= 1.03 * result.num_bytes


def _written() -> int:
    text = Path("/proc/self/io").read_text()
    return int(next(line.split()[1] for line in text.splitlines() if line.startswith("wchar")))


def test_an_unreadable_disk_is_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tar = write_nested(tmp_path, make_tree())

    def fail(fd: int, *rest: Any) -> Any:
        raise OSError(errno.EIO, "Input/output error")

    pread = os.pread

    def fail_after_the_headers(*args: Any) -> Any:
        return fail(*args) if args[1] % 512 else pread(*args)

    monkeypatch.setattr(os, "sendfile", fail)
    with pytest.raises(OSError, match="Input/output error"):  # of the file that is written
        extract(tar, tmp_path / "out")
    monkeypatch.setattr(os, "pread", fail_after_the_headers)
    with pytest.raises(DataError, match="cannot be read at byte"):
        extract(tar, tmp_path / "out")
    monkeypatch.setattr(os, "pread", fail)
    with pytest.raises(DataError, match="cannot be read: Input/output error"):
        extract(tar, tmp_path / "out")
