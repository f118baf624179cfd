"""Extraction writes what GNU tar writes, once, and goes on where it was stopped."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import signal
import subprocess
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from dataset import known_archives
from dataset.archive.extract import Extraction, extract_archive
from dataset.archive.output_folder import OutputFolder
from dataset.errors import DataError, PassingError, UserError
from tests.dataset.tars import (
    END,
    TRAIN,
    extract,
    flatten,
    header,
    inodes,
    make_tree,
    make_val,
    pack,
    read_tree,
    sorted_by_class,
    tar_bytes,
    write_files,
    write_flat,
    write_nested,
    write_valprep,
)

FORMATS = ("v7", "ustar", "gnu", "posix")


def diff(first: Path, second: Path) -> str:
    return subprocess.run(["diff", "-r", first, second], capture_output=True, text=True).stdout


@pytest.mark.parametrize("program", ["tar", "bsdtar"])
@pytest.mark.parametrize("form", FORMATS)
def test_the_files_are_those_of_gnu_tar(tmp_path: Path, program: str, form: str) -> None:
    tree = make_tree(4, 9)
    if form != "v7":
        tree["n01440764"]["x" * 90 + ".JPEG"] = os.urandom(2_500_000)
    write_files(tmp_path / "tree", flatten(tree))
    pack(program, form, tmp_path / "tree", tmp_path / "tree.tar", dot=True)
    (tmp_path / "nested").mkdir()
    for wnid in tree:
        class_tar = tmp_path / "nested" / f"{wnid}.tar"
        pack(program, form, tmp_path / "tree" / wnid, class_tar)
    pack(program, form, tmp_path / "nested", tmp_path / "nested.tar")
    gnu = tmp_path / "gnu"
    gnu.mkdir()
    subprocess.run(["tar", "-xf", tmp_path / "tree.tar", "-C", gnu], check=True)
    for shape in ("tree", "nested"):
        result = extract(tmp_path / f"{shape}.tar", tmp_path / shape / "out")
        assert diff(gnu, tmp_path / shape / "out" / "train") == ""
        assert result.num_images == len(flatten(tree))
        assert result.num_bytes == sum(map(len, flatten(tree).values()))


def test_val_goes_into_its_class_folders(tmp_path: Path) -> None:
    tar, expected = write_flat(tmp_path / "in", 300)
    result = extract(tar, tmp_path / "out", "val", num_threads=3)
    assert read_tree(tmp_path / "out" / "val") == expected
    assert (result.num_classes, result.num_images) == (3, 300)


def test_an_image_without_a_label_stops_it_or_is_left_out(tmp_path: Path) -> None:
    images, labels = make_val()
    (tmp_path / "val.tar").write_bytes(tar_bytes(images))
    victim = min(labels)
    write_valprep(tmp_path / "valprep.sh", {n: w for n, w in labels.items() if n != victim})
    with pytest.raises(DataError, match=f"no label for 1 image .{victim}"):
        extract(tmp_path / "val.tar", tmp_path / "out", "val")
    assert read_tree(tmp_path / "out") == {}
    with pytest.raises(DataError, match=victim):
        extract(tmp_path / "val.tar", tmp_path / "out", "val", keep_going=True)
    del images[victim]
    assert read_tree(tmp_path / "out" / "val") == sorted_by_class(images, labels)


def test_done_is_found_and_nothing_is_written_again(tmp_path: Path) -> None:
    tar = write_nested(tmp_path, make_tree())
    extract(tar, tmp_path / "out")
    before = inodes(tmp_path / "out")
    again = extract(tar, tmp_path / "out")
    assert inodes(tmp_path / "out") == before
    assert again.num_bytes_written == 0
    assert again.num_images == 18


def test_a_folder_alone_is_not_taken_for_done(tmp_path: Path) -> None:
    tree = make_tree()
    tar = write_nested(tmp_path, tree)
    extract(tar, tmp_path / "out")
    victim = next((tmp_path / "out" / "train" / "n01440764").iterdir())
    victim.unlink()
    others = inodes(tmp_path / "out" / "train" / "n01441875")
    extract(tar, tmp_path / "out")
    assert read_tree(tmp_path / "out" / "train") == flatten(tree)
    assert inodes(tmp_path / "out" / "train" / "n01441875") == others


def test_verify_looks_at_the_size_of_every_file(tmp_path: Path) -> None:
    """As after a power cut, which leaves files of 0 bytes behind a rename."""
    tree = make_tree()
    tar = write_nested(tmp_path, tree)
    extract(tar, tmp_path / "out")
    victim = next((tmp_path / "out" / "train" / "n01440764").iterdir())
    victim.write_bytes(b"")
    extract(tar, tmp_path / "out", md5=hashlib.md5(tar.read_bytes()).hexdigest())
    assert read_tree(tmp_path / "out" / "train") == flatten(tree)


def test_another_archive_is_refused_in_the_same_folder(tmp_path: Path) -> None:
    first = write_nested(tmp_path / "a", make_tree(seed=1))
    second = write_nested(tmp_path / "b", make_tree(seed=2))
    extract(first, tmp_path / "out")
    before = inodes(tmp_path / "out")
    with pytest.raises(UserError, match="another archive"):
        extract(second, tmp_path / "out")
    assert inodes(tmp_path / "out") == before


@pytest.mark.parametrize("content", ["n01440764/mine.JPEG", "notes.txt"])
def test_a_folder_that_holds_something_else_is_left_alone(tmp_path: Path, content: str) -> None:
    tar = write_nested(tmp_path, make_tree())
    write_files(tmp_path / "out" / "train", {content: b"mine"})
    with pytest.raises(UserError, match="holds something else"):
        extract(tar, tmp_path / "out")
    assert read_tree(tmp_path / "out") == {f"train/{content}": b"mine"}
    assert not list((tmp_path / "out").glob(".*"))


def test_a_stranger_that_appears_later_is_refused(tmp_path: Path) -> None:
    tar = write_nested(tmp_path, make_tree())
    extract(tar, tmp_path / "out")
    next((tmp_path / "out" / "train" / "n01440764").iterdir()).unlink()
    (tmp_path / "out" / "train" / "mine").mkdir()
    with pytest.raises(UserError, match="'mine', which is not a class"):
        extract(tar, tmp_path / "out")


def test_the_output_may_be_the_folder_of_the_tars(tmp_path: Path) -> None:
    tree = make_tree()
    tar = write_nested(tmp_path, tree)
    extract(tar, tmp_path)
    assert read_tree(tmp_path / "train") == flatten(tree)


def test_train_may_be_a_link_to_another_disk(tmp_path: Path) -> None:
    tree = make_tree()
    tar = write_nested(tmp_path, tree)
    (tmp_path / "disk" / "imagenet").mkdir(parents=True)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "train").symlink_to(tmp_path / "disk" / "imagenet")
    extract(tar, tmp_path / "out")
    assert read_tree(tmp_path / "disk" / "imagenet") == flatten(tree)
    assert extract(tar, tmp_path / "out").num_bytes_written == 0


def test_md5_is_checked_and_a_wrong_archive_names_no_class(tmp_path: Path) -> None:
    tar = write_nested(tmp_path, make_tree())
    md5 = hashlib.md5(tar.read_bytes()).hexdigest()
    with pytest.raises(DataError, match=f"has the md5 {md5}, expected {'0' * 32}"):
        extract(tar, tmp_path / "out", md5="0" * 32)
    assert list(tmp_path.rglob("*.JPEG")) == []
    assert extract(tar, tmp_path / "out", md5=md5.upper()).checked == "md5"
    with pytest.raises(UserError, match="32 hex digits"):
        extract(tar, tmp_path / "out", md5="abc")


def test_verify_needs_a_published_sum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = make_tree()
    tar = write_nested(tmp_path, tree)
    with pytest.raises(UserError, match="not one of the published"):
        extract(tar, tmp_path / "out", verify=True)
    data = tar.read_bytes()
    real = known_archives.PublishedArchive(
        TRAIN,
        len(data),
        hashlib.md5(data).hexdigest(),
        hashlib.sha256(data).hexdigest(),
        3,
        18,
    )
    monkeypatch.setattr(known_archives, "published_archives", lambda: {len(data): real})
    assert extract(tar, tmp_path / "out", verify=True).checked in ("md5", "sha256")
    damaged = bytearray(data)
    damaged[1100] ^= 1  # in an image: no header tells
    tar.write_bytes(damaged)
    with pytest.raises(DataError, match="expected"):
        extract(tar, tmp_path / "out2", verify=True)
    assert read_tree(tmp_path / "out2") == {}


def test_a_real_archives_size_with_other_contents_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tar = write_nested(tmp_path, make_tree())
    size = tar.stat().st_size
    real = known_archives.PublishedArchive(TRAIN, size, "", "", 1000, 1281167)
    monkeypatch.setattr(known_archives, "published_archives", lambda: {size: real})
    with pytest.raises(DataError, match="3 classes and 18 images, not 1000 and 1281167"):
        extract(tar, tmp_path / "out")


def test_the_published_table_has_the_two_archives() -> None:
    table = {row.file: row for row in known_archives.published_archives().values()}
    train, val = table["ILSVRC2012_img_train.tar"], table["ILSVRC2012_img_val.tar"]
    assert (train.num_bytes, train.num_images) == (147897477120, 1281167)
    assert (val.num_bytes, val.num_images) == (6744924160, 50000)
    assert train.md5 == "1d675b47d978889d74fa0da5fadfb00e"
    assert val.md5 == "29b22e2961454d5413ddabcf34fc5622"
    assert len(train.sha256) == len(val.sha256) == 64


def test_too_little_space_or_inodes_is_said_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tar = write_nested(tmp_path, make_tree())

    def statvfs(path: Any, free: int, inodes: int) -> os.statvfs_result:
        return os.statvfs_result((4096, 4096, 0, free, free, 10**6, inodes, inodes, 0, 255, 0))

    monkeypatch.setattr(os, "statvfs", lambda path: statvfs(path, 17, 10**6))
    with pytest.raises(UserError, match="GB free, but the images need"):
        extract(tar, tmp_path / "out")
    monkeypatch.setattr(os, "statvfs", lambda path: statvfs(path, 10**6, 20))
    with pytest.raises(UserError, match="20 free inodes, but the data needs 21"):
        extract(tar, tmp_path / "out")
    assert list((tmp_path / "out").rglob("*.JPEG")) == []
    monkeypatch.setattr(os, "statvfs", lambda path: statvfs(path, 10**6, 21))
    assert extract(tar, tmp_path / "out").num_images == 18


def test_a_second_extractor_is_told_to_wait(tmp_path: Path) -> None:
    tar = write_nested(tmp_path, make_tree())
    with OutputFolder(tmp_path / "out", "train"):
        with pytest.raises(PassingError, match="another process"):
            extract(tar, tmp_path / "out")
    assert extract(tar, tmp_path / "out").num_images == 18


def test_without_file_locks_two_extractors_leave_whole_classes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = make_tree(30, 20)
    tar = write_nested(tmp_path, tree)

    def no_locks(fd: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    errors: list[BaseException] = []

    def run() -> None:
        try:
            extract(tar, tmp_path / "out")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    there = read_tree(tmp_path / "out" / "train")
    assert there.items() <= flatten(tree).items()
    assert all(isinstance(error, OSError | DataError) for error in errors), errors
    monkeypatch.undo()
    extract(tar, tmp_path / "out")
    assert read_tree(tmp_path / "out" / "train") == flatten(tree)


def test_memory_does_not_grow_with_the_archive(tmp_path: Path) -> None:
    """One image of 80 MB (a hole) passes through a buffer of 1 MiB."""
    size = 80 << 20
    path = tmp_path / "a.tar"
    with open(path, "wb") as file:
        file.write(header(b"n01/a.JPEG", size))
        file.seek(size, os.SEEK_CUR)
        file.write(END)
    tracemalloc.start()
    extract(path, tmp_path / "out")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20 << 20
    assert (tmp_path / "out" / "train" / "n01" / "a.JPEG").stat().st_size == size


def test_ctrl_c_stops_soon_and_the_next_run_goes_on(tmp_path: Path) -> None:
    tree = make_tree(20, 30)
    tar = write_nested(tmp_path, tree)
    published_one = threading.Event()

    def progress(num_bytes: int, num_images: int) -> None:
        if not published_one.is_set():
            published_one.set()
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        extract_archive(Extraction(tar, "train", tmp_path / "out"), progress=progress)
    there = read_tree(tmp_path / "out" / "train")
    assert there.items() <= flatten(tree).items()
    extract(tar, tmp_path / "out")
    assert read_tree(tmp_path / "out" / "train") == flatten(tree)


def test_the_marker_tells_what_was_extracted(tmp_path: Path) -> None:
    tar = write_nested(tmp_path, make_tree())
    extract(tar, tmp_path / "out")
    marker = json.loads((tmp_path / "out" / ".train.extracted.json").read_text())
    assert marker["classes"] == {"n01440764": 6, "n01441875": 6, "n01442986": 6}
    assert marker["archive"]["size"] == tar.stat().st_size


@pytest.mark.parametrize("torn", ["", "{"])
def test_a_marker_torn_by_a_power_cut_is_still_ours(tmp_path: Path, torn: str) -> None:
    tree = make_tree()
    tar = write_nested(tmp_path, tree)
    extract(tar, tmp_path / "out")
    (tmp_path / "out" / ".train.extracted.json").write_text(torn)
    victim = next((tmp_path / "out" / "train" / "n01440764").iterdir())
    victim.write_bytes(b"")
    others = inodes(tmp_path / "out" / "train" / "n01441875")
    extract(tar, tmp_path / "out")
    assert read_tree(tmp_path / "out" / "train") == flatten(tree)
    assert inodes(tmp_path / "out" / "train" / "n01441875") == others


def test_a_staged_class_that_is_not_whole_never_gets_its_name(tmp_path: Path) -> None:
    """Left by a run with --md5 that was killed, then damaged by a power cut."""
    tree = make_tree()
    tar = write_nested(tmp_path, tree)
    md5 = hashlib.md5(tar.read_bytes()).hexdigest()
    with pytest.raises(KeyboardInterrupt):
        extract_archive(
            Extraction(tar, "train", tmp_path / "out", md5=md5, num_threads=1),
            progress=lambda num_bytes, num_images: _interrupt(),
        )
    staged = tmp_path / "out" / ".train.extracting" / "whole"
    write_files(staged, {"n01441875/n01441875_1.JPEG": b""})
    seen: list[set[str]] = []
    extract_archive(
        Extraction(tar, "train", tmp_path / "out", num_threads=1),
        start=lambda num_bytes, num_images: seen.append(
            set(os.listdir(tmp_path / "out" / "train"))
        ),
    )
    assert "n01441875" not in seen[0]
    assert read_tree(tmp_path / "out" / "train") == flatten(tree)


def _interrupt() -> None:
    raise KeyboardInterrupt
