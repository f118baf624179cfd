"""The index of a tar finds every image, in sample order, and is refused for any other tar."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dataset import checksum
from dataset.archive.block_sums import BLOCK_SIZE, BLOCK_SIZES
from dataset.archive.extract import Extraction, extract_archive
from dataset.archive.index import (
    build_index,
    find_index,
    find_or_build_index,
    index_places,
    verify_tar,
)
from dataset.archive.index_file import TarIndex, load_index, write_whole
from dataset.errors import DataError, UserError
from tests.dataset.tars import (
    TRAIN,
    VAL,
    flatten,
    header,
    make_tree,
    make_val,
    nested_bytes,
    read_index,
    read_tree,
    tar_bytes,
    write_flat,
    write_nested,
    write_solution,
    write_valprep,
)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_the_index_gives_what_the_extracted_folder_gives(tmp_path: Path) -> None:
    """Names, labels, order and bytes: the same samples, whatever the source (invariant 2)."""
    tree = make_tree(5, 9)
    tar = write_nested(tmp_path, dict(reversed(tree.items())))
    extract_archive(Extraction(tar, "train", tmp_path))
    found = read_index(find_or_build_index(tar))
    folder = read_tree(tmp_path / "train")
    assert found == folder == flatten(tree)
    assert list(found) == sorted(folder, key=os.fsencode)


def test_the_file_has_the_arrays_of_the_contract(tmp_path: Path) -> None:
    tree = make_tree()
    tar = write_nested(tmp_path, tree)
    build_index(tar, checksums=True)
    with np.load(tmp_path / f"{TRAIN}.index", allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    n = len(flatten(tree))
    kinds = {name: (array.dtype.name, array.shape) for name, array in arrays.items()}
    assert kinds["offset"] == kinds["size"] == ("int64", (n,))
    assert kinds["label"] == ("int32", (n,))
    assert kinds["name_offset"] == ("int64", (n + 1,))
    assert kinds["names"][0] == kinds["classes"][0] == "uint8"
    assert kinds["block_crc32"] == ("uint32", (1,))
    assert int(arrays["format"]) == 2
    assert int(arrays["block_size"]) == BLOCK_SIZE
    assert (int(arrays["unit_version"]), int(arrays["unit_size"])) == (1, 2 << 20)
    assert kinds["unit_crc32"][0] == "uint32"
    assert int(arrays["tar_size"]) == tar.stat().st_size
    assert arrays["classes"].tobytes() == "".join(sorted(tree)).encode()
    names = [path.split("/")[1] for path in sorted(flatten(tree))]
    assert arrays["names"].tobytes() == "".join(names).encode()


def test_it_is_made_once_and_then_found(tmp_path: Path) -> None:
    tar = write_nested(tmp_path, make_tree())
    first = find_or_build_index(tar)
    stamp = (tmp_path / f"{TRAIN}.index").stat().st_mtime_ns
    again = find_or_build_index(tar)
    assert (tmp_path / f"{TRAIN}.index").stat().st_mtime_ns == stamp
    assert read_index(again) == read_index(first)
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize("source", ["valprep.sh", "LOC_val_solution.csv"])
def test_flat_val_takes_its_labels_from_beside_the_tar(tmp_path: Path, source: str) -> None:
    tar, expected = write_flat(tmp_path)
    labels = {path.split("/")[1]: path.split("/")[0] for path in expected}
    (tmp_path / "valprep.sh").unlink()
    with pytest.raises(UserError, match="labels are unknown"):
        find_or_build_index(tar)
    assert find_index(tar) is None
    writer = write_valprep if source == "valprep.sh" else write_solution
    writer(tmp_path / source, labels)
    found = read_index(find_or_build_index(tar))
    assert found == expected
    assert list(found) == sorted(expected)


def test_other_labels_make_another_index(tmp_path: Path) -> None:
    tar, expected = write_flat(tmp_path)
    find_or_build_index(tar)
    other = {path.split("/")[1]: "n09999999" for path in expected}
    write_valprep(tmp_path / "other.sh", other)
    assert find_or_build_index(tar, labels=tmp_path / "other.sh").classes == ["n09999999"]


def test_the_real_val_set_needs_no_labels(tmp_path: Path) -> None:
    names = [f"ILSVRC2012_val_{i:08d}.JPEG" for i in range(1, 50_001)]
    with open(tmp_path / VAL, "wb") as file:
        for name in names:
            file.write(header(name.encode(), 1) + b"x" + bytes(511))
        file.write(bytes(1024))
    index = find_or_build_index(tmp_path / VAL)
    assert (len(index), len(index.classes)) == (50_000, 1000)
    assert np.bincount(index.label).tolist() == [50] * 1000
    i = [index.name(int(k)) for k in np.flatnonzero(index.label == 0)].index(
        "ILSVRC2012_val_00000293.JPEG"
    )
    assert index.classes[0] == "n01440764"
    assert i == 0


@pytest.mark.parametrize("change", ["size", "first header", "last header"])
def test_an_index_of_another_tar_is_refused(tmp_path: Path, change: str) -> None:
    tar = write_nested(tmp_path, make_tree())
    find_or_build_index(tar)
    data = bytearray(tar.read_bytes())
    if change == "size":
        data += bytes(512)
    elif change == "first header":
        data[140] ^= 1  # a modification time
    else:
        data[data.rindex(b"n01442986.tar") + 140] ^= 1
    tar.write_bytes(data)
    with pytest.raises(DataError, match="does not belong to"):
        find_or_build_index(tar)


def test_a_damaged_index_is_refused_at_any_byte(tmp_path: Path) -> None:
    tar = write_nested(tmp_path, make_tree())
    good = find_or_build_index(tar)
    place = tmp_path / f"{TRAIN}.index"
    data = place.read_bytes()
    for length in (0, 10, len(data) // 2, len(data) - 30):
        place.write_bytes(data[:length])
        with pytest.raises(DataError, match="damaged"):
            find_or_build_index(tar)
    for position in range(0, len(data), 37):
        changed = bytearray(data)
        changed[position] ^= 0x10
        place.write_bytes(changed)
        try:
            index = load_index(place, tar)
        except DataError:
            continue
        assert np.array_equal(index.offset, good.offset)  # in a field of zip that no one reads
        assert np.array_equal(index.size, good.size)
        assert np.array_equal(index.label, good.label)
        assert index.names.tobytes() == good.names.tobytes()


def test_an_index_that_contradicts_itself_is_refused(tmp_path: Path) -> None:
    tar = write_nested(tmp_path, make_tree())
    find_or_build_index(tar)
    place = tmp_path / f"{TRAIN}.index"
    with np.load(place) as file:
        arrays = {name: file[name] for name in file.files}
    for name, value in (("label", 99), ("offset", 1 << 40), ("size", -1)):
        wrong = arrays[name].copy()
        wrong[3] = value
        with open(place, "wb") as out:
            np.savez(out, **(arrays | {name: wrong}))
        with pytest.raises(DataError, match="contradicts itself"):
            load_index(place, tar)
    with open(place, "wb") as out:
        np.savez(out, **(arrays | {"format": np.int64(3)}))
    with pytest.raises(DataError, match="format 3"):
        load_index(place, tar)


def test_an_index_with_pickled_objects_is_not_loaded(tmp_path: Path) -> None:
    tar = write_nested(tmp_path, make_tree())

    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, (f"touch {tmp_path}/was_run",)

    bomb = np.empty(1, object)
    bomb[0] = Bomb()
    with open(tmp_path / f"{TRAIN}.index", "wb") as file:
        np.savez(file, format=np.int64(1), offset=bomb)
    with pytest.raises(DataError, match="damaged"):
        find_or_build_index(tar)
    assert not (tmp_path / "was_run").exists()


def test_the_index_dir_is_used_when_given(tmp_path: Path) -> None:
    tar = write_nested(tmp_path / "data", make_tree())
    _, place = build_index(tar, index_dir=tmp_path / "indexes")
    assert place == tmp_path / "indexes" / f"{TRAIN}.index"
    assert os.listdir(tmp_path / "data") == [TRAIN]
    assert find_index(tar, tmp_path / "indexes") == place
    assert find_index(tar) is None


def test_the_index_in_the_index_dir_comes_before_the_one_beside_the_tar(tmp_path: Path) -> None:
    tar = write_nested(tmp_path / "data", make_tree())
    _, beside = build_index(tar)
    _, named = build_index(tar, index_dir=tmp_path / "indexes", checksums=True)
    assert find_index(tar) == beside
    assert find_index(tar, tmp_path / "indexes") == named


def test_an_index_of_a_former_tar_does_not_hide_the_one_made_instead(tmp_path: Path) -> None:
    tar = write_nested(tmp_path / "data", make_tree(seed=1))
    _, beside = build_index(tar)
    write_nested(tmp_path / "data", make_tree(4, seed=2))
    assert find_index(tar) == beside  # and is refused when it is loaded
    with pytest.raises(DataError):
        find_or_build_index(tar)
    cached = index_places(tar)[-1]
    _, made = build_index(tar, index_dir=tmp_path / "new")
    cached.parent.mkdir(parents=True, exist_ok=True)
    made.rename(cached)
    assert find_index(tar) == cached
    assert len(find_or_build_index(tar).classes) == 4


READ_ONLY = """
set -e
mkdir {data}/ro
mount -t tmpfs none {data}/ro
cp {data}/{tar} {data}/ro
mount -o remount,ro {data}/ro
{python} -c '
import sys
from pathlib import Path
from dataset.archive.index import build_index, find_index
tar = Path("{data}/ro/{tar}")
_, place = build_index(tar)
assert find_index(tar) == place
print(place)
_, place = build_index(tar, index_dir=Path("{data}/indexes"))
assert find_index(tar, Path("{data}/indexes")) == place
print(place)
'
"""


def test_the_index_of_a_read_only_folder_goes_into_the_cache(tmp_path: Path) -> None:
    """A real read-only mount, in a mount namespace that ends with the command."""
    write_nested(tmp_path, make_tree())
    script = READ_ONLY.format(data=tmp_path, tar=TRAIN, python=sys.executable)
    unshare = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-rm"]
    done = subprocess.run(
        [*unshare, "sh", "-c", script],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[3])},
    )
    assert done.returncode == 0, done.stderr
    cached, given = done.stdout.split()
    assert cached.startswith(f"{tmp_path}/cache/trainyard/index/")
    assert cached.endswith(f"-{TRAIN}.index")
    assert given == f"{tmp_path}/indexes/{TRAIN}.index"


def test_a_cached_index_of_a_former_tar_is_replaced(tmp_path: Path) -> None:
    tar = write_nested(tmp_path / "data", make_tree(seed=1))
    _, place = build_index(tar)
    cached = tmp_path / "cache" / "trainyard" / "index"
    cached.mkdir(parents=True)
    place.rename(index_places(tar)[-1])
    assert find_index(tar) == index_places(tar)[-1]
    tar.write_bytes(nested_bytes(make_tree(4)))
    assert find_index(tar) is None
    assert read_index(find_or_build_index(tar)) == flatten(make_tree(4))


def test_tars_of_one_name_do_not_share_a_cached_index(tmp_path: Path) -> None:
    places = {index_places(tmp_path / name / TRAIN)[-1] for name in ("a", "b")}
    assert len(places) == 2


def test_checksums_find_a_flipped_byte_and_name_its_range(tmp_path: Path) -> None:
    size = 3 * BLOCK_SIZE
    files = {f"n01440764/{i}.JPEG": os.urandom(size) for i in range(3)}
    tar = tmp_path / TRAIN
    tar.write_bytes(tar_bytes(files))
    index, _ = build_index(tar, checksums=True)
    verify_tar(index)
    assert index.sums is not None
    assert len(index.sums.values) == -(-tar.stat().st_size // BLOCK_SIZE)
    with open(tar, "r+b") as file:
        for position in (BLOCK_SIZE + 5, 2 * BLOCK_SIZE - 1, 5 * BLOCK_SIZE, 5 * BLOCK_SIZE + 9):
            file.seek(position)
            byte = file.read(1)[0]
            file.seek(position)
            file.write(bytes([byte ^ 1]))
    ranges = f"bytes {BLOCK_SIZE}-{2 * BLOCK_SIZE - 1}, {5 * BLOCK_SIZE}-{6 * BLOCK_SIZE - 1};"
    with pytest.raises(DataError, match=ranges):
        verify_tar(index)


def test_checksums_and_headers_come_from_one_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The headers are read right behind the sums: never a byte that was not just summed."""
    tree = {f"n{c:08d}": {f"{c}_{i}.JPEG": os.urandom(400_000) for i in range(9)} for c in range(9)}
    tar = write_nested(tmp_path, tree)
    reads: list[tuple[int, int]] = []
    pread = os.pread

    def note(fd: int, length: int, offset: int) -> bytes:
        reads.append((length, offset))
        return pread(fd, length, offset)

    monkeypatch.setattr(os, "pread", note)
    index, _ = build_index(tar, checksums=True)
    monkeypatch.undo()
    blocks = [offset for length, offset in reads if length == BLOCK_SIZE]
    assert index.sums is not None
    assert sorted(blocks) == [i * BLOCK_SIZE for i in range(len(index.sums.values))]
    summed = 0
    for length, offset in reads[reads.index((BLOCK_SIZE, 0)) :]:
        if length == BLOCK_SIZE:
            summed = max(summed, offset + length)
        elif offset:
            assert offset < summed
    assert read_index(index) == flatten(tree)


def test_verify_without_checksums_says_how_to_get_them(tmp_path: Path) -> None:
    tar = write_nested(tmp_path, make_tree())
    with pytest.raises(UserError, match="--checksums"):
        verify_tar(find_or_build_index(tar))
    assert find_or_build_index(tar, checksums=True).sums is not None


def test_crc32c_is_castagnolis() -> None:
    assert checksum.compute("crc32c", b"123456789") == 0xE3069283
    assert checksum.compute("crc32c", b"") == 0
    assert checksum.compute("crc32c", bytes(32)) == 0x8A9136AA


def write_older_sums(tar: Path) -> Path:
    """Gives the index of a tar the sums of earlier versions: the crc32c of 4 MiB blocks."""
    place = build_index(tar, checksums=True)[1]
    with np.load(place) as file:
        newer = ("block_crc32", "unit_version", "unit_size", "unit_crc32")
        arrays = {name: file[name] for name in file.files if name not in newer}
    content, size = tar.read_bytes(), BLOCK_SIZES["crc32c"]
    blocks = [content[start : start + size] for start in range(0, len(content), size)]
    sums = np.array([checksum.compute("crc32c", block) for block in blocks], np.uint32)
    older = {"format": np.int64(1), "block_size": np.int64(size), "block_crc32c": sums}
    write_whole({**arrays, **older}, place)
    return place


def test_sums_of_an_earlier_version_still_find_a_flipped_byte(tmp_path: Path) -> None:
    tar = tmp_path / TRAIN
    tar.write_bytes(tar_bytes({f"n01440764/{i}.JPEG": os.urandom(3 << 20) for i in range(3)}))
    place = write_older_sums(tar)
    index = load_index(place, tar)
    verify_tar(index)
    kept = find_or_build_index(tar).sums
    assert kept is not None and kept.kind == "crc32c"
    with open(tar, "r+b") as file:
        file.seek((5 << 20) + 1)
        byte = file.read(1)[0]
        file.seek((5 << 20) + 1)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(DataError, match=f"bytes {4 << 20}-{(8 << 20) - 1};"):
        verify_tar(index)


def test_without_the_crc32c_package_sums_are_made_and_checked_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tar = write_nested(tmp_path, make_tree())
    older = load_index(write_older_sums(tar), tar)
    monkeypatch.setattr(checksum, "HAS_CRC32C", False)
    with pytest.raises(UserError, match="run: pip install crc32c"):
        verify_tar(older)
    index = find_or_build_index(tar, checksums=True)
    assert index.sums is not None and index.sums.kind == "crc32", "the older sums are replaced"
    verify_tar(index)
    assert read_index(index) == flatten(make_tree())


def _read_in_child(index: TarIndex, queue: multiprocessing.Queue[dict[str, bytes]]) -> None:
    queue.put(read_index(index))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_an_index_goes_to_worker_processes(tmp_path: Path, method: str) -> None:
    tree = make_tree()
    index = find_or_build_index(write_nested(tmp_path, tree))
    context: Any = multiprocessing.get_context(method)
    queue = context.Queue()
    worker = context.Process(target=_read_in_child, args=(index, queue))
    worker.start()
    assert queue.get(timeout=250) == flatten(tree)
    worker.join()
    assert len(pickle.loads(pickle.dumps(index))) == len(index)


def test_processes_that_build_at_the_same_time_leave_one_whole_index(tmp_path: Path) -> None:
    tar = write_nested(tmp_path, make_tree(20, 10))
    context = multiprocessing.get_context("fork")
    crowd = [context.Process(target=build_index, args=(tar,)) for _ in range(6)]
    for process in crowd:
        process.start()
    for process in crowd:
        process.join()
    assert [process.exitcode for process in crowd] == [0] * 6
    assert sorted(os.listdir(tmp_path)) == [TRAIN, f"{TRAIN}.index"]
    assert read_index(find_or_build_index(tar)) == flatten(make_tree(20, 10))


def test_memory_of_an_index_is_a_few_hundred_bytes_an_image(tmp_path: Path) -> None:
    """1.28 million members must fit into 500 MB: 390 bytes each; measured on 16,000."""
    tar = tmp_path / TRAIN
    num_classes, per_class = 20, 800
    with open(tar, "wb") as file:
        for c in range(num_classes):
            inner = b"".join(
                header(b"n%08d_%d.JPEG" % (c, i), 1) + b"x" + bytes(511) for i in range(per_class)
            )
            file.write(header(b"n%08d.tar" % c, len(inner) + 1024) + inner + bytes(1024))
        file.write(bytes(1024))
    tracemalloc.start()
    index, _ = build_index(tar)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(index) == num_classes * per_class
    assert peak / len(index) < 390


def test_images_unlabelled_or_missing_are_refused(tmp_path: Path) -> None:
    images, labels = make_val()
    (tmp_path / VAL).write_bytes(tar_bytes(dict(list(images.items())[:-2])))
    write_valprep(tmp_path / "valprep.sh", dict(list(labels.items())[1:]))
    with pytest.raises(DataError, match=r"no label for 1 image.*labels 2 images .*00000011"):
        find_or_build_index(tmp_path / VAL)
