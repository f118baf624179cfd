"""The index of a URL is that of the file, whatever the server does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from mmap import PROT_READ, mmap
from pathlib import Path

import pytest

from benchmarks.index import write_sparse_tar
from dataset.archive.index import build_index
from dataset.durable import lock_file
from dataset.errors import CommandError, DataError, PassingError, UserError
from dataset.own_names import PART
from dataset.stream import forward_pass, resumable_md5
from dataset.transfer.journal import CHUNK
from tests.dataset.bad_tars import BAD
from tests.dataset.director_server import federation
from tests.dataset.object_fetch import FAST
from tests.dataset.small_server import Handler
from tests.dataset.stream.url_index import (
    LARGE,
    ROOT,
    first_byte,
    index,
    index_file,
    list_folder,
    publish,
    serving_tar,
)
from tests.dataset.tars import (
    TRAIN,
    VAL,
    flatten,
    make_tree,
    tar_bytes,
    write_flat,
)


@pytest.mark.parametrize("checksums", [False, True])
@pytest.mark.parametrize(
    "content", [LARGE, tar_bytes(flatten(make_tree()))], ids=["nested", "tree"]
)
def test_the_index_is_that_of_the_file_to_the_byte(
    tmp_path: Path, content: bytes, checksums: bool
) -> None:
    expected = index_file(tmp_path / "in", content, checksums=checksums)
    with serving_tar(content) as (url, _):
        found = index(url, tmp_path / "out", checksums=checksums)
    assert found.place.read_bytes() == expected
    assert found.fetched_bytes == len(content)
    assert list_folder(tmp_path / "out") == [f"{TRAIN}.index"]


def test_a_window_smaller_than_a_class_tar_will_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward_pass, "WINDOW_CHUNKS", 2)
    with serving_tar(LARGE) as (url, _):
        found = index(url, tmp_path / "out", checksums=True)
    assert found.place.read_bytes() == index_file(tmp_path / "in", LARGE, checksums=True)


# The peak of rusage would be that of the parent, whose memory a new child shares for a moment.
SHOW_PEAK = """
import runpy, sys
sys.argv[0] = "scripts/index_tar.py"
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    print(open("/proc/self/status").read())
"""


@pytest.mark.parametrize(
    ("num_classes", "per_class", "image_sizes"),
    [
        (10, 100, range(600_000, 1_000_000)),  # 800 MB
        pytest.param(1000, 1281, range(1, 1000), marks=pytest.mark.soak),  # ImageNet's names
    ],
)
def test_a_pass_takes_little_memory_and_disk(
    tmp_path: Path, num_classes: int, per_class: int, image_sizes: range
) -> None:
    tar, out, on_disk = tmp_path / TRAIN, tmp_path / "out", [0]
    write_sparse_tar(tar, num_classes, per_class, image_sizes)

    def look(handler: Handler) -> bool:
        on_disk.append(sum(file.stat().st_size for file in out.glob("*")))
        return False

    with open(tar, "rb") as file, mmap(file.fileno(), 0, prot=PROT_READ) as content:
        with serving_tar(content, misbehave=look) as (url, _):  # type: ignore[arg-type]
            command = [sys.executable, "-c", SHOW_PEAK, "--checksums", "--index-dir", str(out), url]
            done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    (peak_kb,) = re.findall(r"^VmHWM:\s+(\d+) kB", done.stdout, re.MULTILINE)
    assert int(peak_kb) < 500_000_000 // 1024
    assert max(on_disk) < 200_000_000
    assert list_folder(out) == [f"{TRAIN}.index", "stages.jsonl"]


def test_labels_of_a_flat_tar_cost_no_second_pass(tmp_path: Path) -> None:
    tar, _ = write_flat(tmp_path / "in")
    expected = build_index(tar)[1].read_bytes()
    with serving_tar(tar.read_bytes(), VAL) as (url, seen):
        with pytest.raises(UserError, match="its labels are unknown"):
            index(url, tmp_path / "out")
        seen.clear()
        found = index(url, tmp_path / "out", labels=tmp_path / "in" / "valprep.sh")
    assert found.place.read_bytes() == expected
    assert found.fetched_bytes == 0
    assert {request["range"] for request in seen} == {"bytes=0-0"}, "only its size was asked"


def test_labels_in_the_folder_of_the_index_are_found(tmp_path: Path) -> None:
    tar, _ = write_flat(tmp_path / "in")
    expected = build_index(tar)[1].read_bytes()
    (tmp_path / "out").mkdir()
    (tmp_path / "in" / "valprep.sh").rename(tmp_path / "out" / "valprep.sh")
    with serving_tar(tar.read_bytes(), VAL) as (url, _):
        assert index(url, tmp_path / "out").place.read_bytes() == expected


def test_a_broken_label_file_is_refused_before_the_pass(tmp_path: Path) -> None:
    (tmp_path / "labels").write_text("nothing\n")
    with serving_tar(LARGE) as (url, seen):
        with pytest.raises(UserError, match="holds no labels"):
            index(url, tmp_path / "out", labels=tmp_path / "labels")
    assert seen == []


@pytest.mark.parametrize("case", BAD)
def test_a_bad_tar_is_refused_as_the_file_is(tmp_path: Path, case: str) -> None:
    make, words = BAD[case]
    content = make()
    with pytest.raises(CommandError) as of_file:
        index_file(tmp_path / "in", content)
    with serving_tar(content) as (url, _):
        with pytest.raises(CommandError, match=words) as of_url:
            index(url, tmp_path / "out")
    assert of_url.value.exit_code == of_file.value.exit_code
    assert list_folder(tmp_path / "out") == []


@pytest.mark.parametrize("has_libcrypto", [True, False])
def test_the_published_md5_is_computed_unasked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_libcrypto: bool
) -> None:
    if not has_libcrypto:
        monkeypatch.setattr(resumable_md5, "find_libcrypto", lambda: None)
    publish(monkeypatch, LARGE)
    with serving_tar(LARGE) as (url, _):
        assert index(url, tmp_path).verified == "md5 (published)"


def test_another_md5_than_the_published_one_gives_no_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(monkeypatch, LARGE, md5="0" * 32)
    with serving_tar(LARGE) as (url, _):
        with pytest.raises(DataError, match="no index was written") as caught:
            index(url, tmp_path)
    assert caught.value.exit_code == 3
    assert list_folder(tmp_path) == []


def test_a_silent_connection_is_replaced(tmp_path: Path) -> None:
    was_silent = False

    def hang_once(handler: Handler) -> bool:
        nonlocal was_silent
        if was_silent or first_byte(handler) < 4 * CHUNK:
            return False
        was_silent = True
        time.sleep(3)
        return True

    with serving_tar(LARGE, misbehave=hang_once) as (url, _):
        found = index(url, tmp_path / "out", options=replace(FAST, stall_s=1.0))
    assert was_silent
    assert found.place.read_bytes() == index_file(tmp_path / "in", LARGE)


def test_several_caches_of_a_federation_share_the_pass(tmp_path: Path) -> None:
    with federation([LARGE, LARGE], LARGE) as (director, *_):
        found = index(f"osdf:///ns/{TRAIN}", tmp_path / "out", discovery=director)
    assert found.place.read_bytes() == index_file(tmp_path / "in", LARGE)


def send_whole(handler: Handler) -> bool:
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(handler.content)))
    handler.end_headers()
    handler.wfile.write(handler.content)
    return True


def test_a_server_that_only_sends_the_whole_is_refused(tmp_path: Path) -> None:
    with serving_tar(LARGE, misbehave=send_whole) as (url, _):
        with pytest.raises(UserError, match="fetch_osdf") as caught:
            index(url, tmp_path)
    assert "\n" not in str(caught.value)
    assert list_folder(tmp_path) == []


def test_an_index_that_is_there_is_taken_unless_more_is_asked_for(tmp_path: Path) -> None:
    with serving_tar(LARGE) as (url, _):
        assert index(url, tmp_path).is_new
        assert not index(url, tmp_path).is_new
        assert index(url, tmp_path, checksums=True).is_new
        assert not index(url, tmp_path).is_new, "with checksums it has more than was asked for"


def test_two_passes_for_one_index_do_not_meet(tmp_path: Path) -> None:
    lock = tmp_path / f"{TRAIN}.index{PART}.lock"
    with serving_tar(LARGE) as (url, _):
        fd, _ = lock_file(lock)
        with pytest.raises(PassingError, match="is being made by another process"):
            index(url, tmp_path)
        os.close(fd)
        index(url, tmp_path)
    assert list_folder(tmp_path) == [f"{TRAIN}.index"]
