"""The index command: what it writes, refuses, verifies and says."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path

import pytest

from dataset.archive.index import find_or_build_index, index_places
from tests.dataset.bad_tars import BAD
from tests.dataset.small_server import Handler, running
from tests.dataset.tars import TRAIN, VAL, flatten, make_tree, read_index, write_flat, write_nested
from tests.scripts.commands import run_script


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


run = partial(run_script, "index_tar")


def test_two_tars_are_indexed_in_one_go_and_again_at_no_cost(tmp_path: Path) -> None:
    tree = make_tree()
    write_nested(tmp_path, tree)
    _, val = write_flat(tmp_path)
    done = run(TRAIN, VAL, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "3 classes, 18 images in " in done.stderr
    assert read_index(find_or_build_index(tmp_path / TRAIN)) == flatten(tree)
    assert read_index(find_or_build_index(tmp_path / VAL)) == val
    lines = (tmp_path / "stages.jsonl").read_text().splitlines()
    assert [json.loads(line)["stage"] for line in lines] == ["index", "index"]
    stamp = (tmp_path / f"{TRAIN}.index").stat().st_mtime_ns
    assert "up to date" in run(TRAIN, cwd=tmp_path).stderr
    assert (tmp_path / f"{TRAIN}.index").stat().st_mtime_ns == stamp


def test_an_index_of_a_former_tar_is_written_again(tmp_path: Path) -> None:
    tar = write_nested(tmp_path, make_tree(2))
    assert run(tar).returncode == 0
    write_nested(tmp_path, make_tree(4))
    os.utime(tar, ns=(0, 0))  # a copy that kept an old time
    assert run(tar).returncode == 0
    assert len(find_or_build_index(tar).classes) == 4


def test_verify_names_the_damaged_bytes(tmp_path: Path) -> None:
    tar = write_nested(tmp_path, make_tree())
    assert run("--verify", tar).returncode == 2
    assert run("--checksums", tar).returncode == 0
    done = run("--verify", tar)
    assert done.returncode == 0
    assert "all blocks are right" in done.stderr
    data = bytearray(tar.read_bytes())
    data[1500] ^= 1
    tar.write_bytes(data)
    done = run("--verify", tar)
    assert done.returncode == 3
    assert done.stderr.startswith("error: ")
    assert f"bytes 0-{len(data) - 1}" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_an_index_in_the_users_cache_is_copied_to_the_folder_that_is_named(tmp_path: Path) -> None:
    """As a stream of file:// asks for, which looks there alone."""
    tar, folder = write_nested(tmp_path / "data", make_tree()), tmp_path / "indexes"
    cached = index_places(tar)[-1]
    cached.parent.mkdir(parents=True)
    assert run("--checksums", "--index-dir", tmp_path / "other", tar).returncode == 0
    (tmp_path / "other" / f"{TRAIN}.index").rename(cached)  # as if the tar's folder were read-only
    stamp = cached.stat().st_mtime_ns
    done = run("--checksums", "--index-dir", folder, tar)
    assert done.returncode == 0 and f"up to date: {folder / TRAIN}.index" in done.stderr
    assert (folder / f"{TRAIN}.index").read_bytes() == cached.read_bytes()
    assert not (tmp_path / "data" / f"{TRAIN}.index").exists()
    assert cached.stat().st_mtime_ns == stamp


def test_an_index_beside_the_tar_is_copied_to_the_folder_that_is_named(tmp_path: Path) -> None:
    tar, folder = write_nested(tmp_path, make_tree()), tmp_path / "indexes"
    assert run(tar).returncode == 0
    assert run("--index-dir", folder, tar).returncode == 0
    assert (folder / f"{TRAIN}.index").read_bytes() == Path(f"{tar}.index").read_bytes()


def test_a_folder_that_cannot_be_written_leaves_the_index_beside_the_tar(tmp_path: Path) -> None:
    tar = write_nested(tmp_path, make_tree())
    assert run(tar).returncode == 0
    before = Path(f"{tar}.index").read_bytes()
    (tmp_path / "a-file").touch()
    done = run("--checksums", "--index-dir", "a-file", tar, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: --index-dir a-file cannot be written (")
    assert Path(f"{tar}.index").read_bytes() == before


def test_labels_and_index_dir_are_taken_from_the_flags(tmp_path: Path) -> None:
    tar, val = write_flat(tmp_path / "data")
    (tmp_path / "data" / "valprep.sh").rename(tmp_path / "my_labels.sh")
    done = run(tar)
    assert done.returncode == 2
    assert "labels are unknown" in done.stderr
    flags = ["--labels", tmp_path / "my_labels.sh", "--index-dir", tmp_path / "indexes"]
    done = run(tar, *flags)
    assert done.returncode == 0, done.stderr
    assert read_index(find_or_build_index(tar, index_dir=tmp_path / "indexes")) == val
    assert set(os.listdir(tmp_path / "data")) == {VAL, "stages.jsonl"}  # of the first, failed run


@pytest.mark.parametrize(
    ("case", "begins"),
    [("truncated class tar", 1), ("empty tar", 1), ("really gzip", 0), ("no archive", 0)],
)
def test_a_bad_tar_is_one_line_and_leaves_no_index(tmp_path: Path, case: str, begins: bool) -> None:
    make, words = BAD[case]
    (tmp_path / TRAIN).write_bytes(make())
    done = run(tmp_path / TRAIN)
    assert done.returncode in (2, 3)
    assert len(done.stderr.splitlines()) == 1
    assert words in done.stderr
    assert set(os.listdir(tmp_path)) == {TRAIN, *(["stages.jsonl"] if begins else [])}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no.tar", "no such file: no.tar; give the path of an uncompressed tar"),
        ("D", "D is a folder; name the tar in it, such as D/ILSVRC2012_img_train.tar"),
        ("file:///a.tar", "/a.tar is a file; give its path, not its URL"),
    ],
)
def test_what_is_no_tar_is_one_line_and_no_stage(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "D").mkdir()
    done = run(name, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, f"error: {message}\n")
    assert os.listdir(tmp_path) == ["D"] and not os.listdir(tmp_path / "D")


def test_a_wrong_name_among_several_is_refused_before_the_first_is_indexed(tmp_path: Path) -> None:
    write_nested(tmp_path, make_tree())
    assert run(TRAIN, "file:///a.tar", cwd=tmp_path).returncode == 2
    assert os.listdir(tmp_path) == [TRAIN]


def test_a_url_is_indexed_into_the_current_folder_and_the_tar_is_not_kept(tmp_path: Path) -> None:
    tar = write_nested(tmp_path / "in", make_tree())
    assert run("--checksums", tar).returncode == 0
    (tmp_path / "here").mkdir()
    with running(Handler, content=tar.read_bytes(), seen=[]) as url:
        done = run("--checksums", f"{url}/{TRAIN}", cwd=tmp_path / "here")
        again = run("--checksums", f"{url}/{TRAIN}", cwd=tmp_path / "here")
    assert done.returncode == again.returncode == 0, done.stderr
    assert "3 classes, 18 images in " in done.stderr and "not verified" in done.stderr
    assert "is of an object of this size" in again.stderr
    names = sorted(path.name for path in (tmp_path / "here").iterdir())
    assert names == [f"{TRAIN}.index", "stages.jsonl"]
    expected = (tmp_path / "in" / f"{TRAIN}.index").read_bytes()
    assert (tmp_path / "here" / f"{TRAIN}.index").read_bytes() == expected


def test_a_url_that_cannot_be_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.tar").touch()
    for words in (["ftp://host/a.tar"], ["--verify", "https://host/a.tar"], ["file:///a.tar"]):
        done = run("--index-dir", tmp_path / "out", *words)
        assert done.returncode == 2, done.stderr
        assert done.stderr.count("\n") == 1
