"""A TAR.index that somebody made, with a zip in order: refused, never a traceback."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dataset.archive.index import find_or_build_index
from dataset.errors import DataError
from tests.dataset.tars import make_tree, write_nested


def crafted(arrays: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Indexes whose zip is in order and whose content is not, by what is wrong with them."""
    n, tar_size = len(arrays["offset"]), int(arrays["tar_size"])

    def put(name: str, place: int, value: int) -> dict[str, Any]:
        changed = arrays[name].copy()
        changed[place] = value
        return {name: changed}

    few = {name: arrays[name][:0] for name in ("offset", "size", "label")}
    return {
        "negative offset": put("offset", 0, -512),
        "negative size": put("size", 1, -1),
        "size that overflows": put("size", 2, 2**63 - 1),
        "offset that overflows": put("offset", 2, 2**63 - 1),
        "offset beyond the tar": put("offset", 3, tar_size),
        "offset of another kind": {"offset": arrays["offset"].astype(np.float64)},
        "offset of two dimensions": {"offset": arrays["offset"].reshape(-1, 1)},
        "offset as a number": {"offset": np.int64(512)},
        "label out of range": put("label", 0, 99),
        "negative label": put("label", 0, -1),
        "labels out of order": {"label": arrays["label"][::-1].copy()},
        "labels as text": {"label": arrays["label"].astype("U3")},
        "label as a structure": {"label": np.zeros(n, [("a", "i4"), ("b", "i4")])},
        "names that go back": put("name_offset", 1, int(arrays["name_offset"][-1])),
        "negative name": put("name_offset", 1, -1),
        "name that overflows": put("name_offset", 1, 2**63 - 1),
        "no class": {"classes": arrays["classes"][:0], "class_offset": np.zeros(1, np.int64)},
        "no bounds of classes": {"class_offset": np.zeros(0, np.int64)},
        "classes that go back": put("class_offset", 1, 10**6),
        "nothing in it": few | {"name_offset": np.zeros(1, np.int64)},
        "tar size as a list": {"tar_size": np.array([tar_size, tar_size])},
        "tar size as text": {"tar_size": np.array("many")},
        "negative tar size": {"tar_size": np.int64(-1)},
        "negative last header": {"last_header_offset": np.int64(-(2**63))},
        "last header as a fraction": {"last_header_offset": np.float64("nan")},
        "last header far away": {"last_header_offset": np.int64(2**62)},
        "header of another kind": {"first_header": np.array("x")},
        "labels that are no text": {"labels_from": np.array([255, 254], np.uint8)},
        "format as a list": {"format": np.array([1, 1])},
        "format as a structure": {"format": np.zeros((), [("a", "i8")])},
        "too few checksums": {"block_size": np.int64(1 << 22), "block_crc32c": np.zeros(0, "u4")},
        "blocks of no size": {"block_size": np.int64(0), "block_crc32c": np.zeros(1, "u4")},
        "checksums without a size": {"block_crc32c": np.zeros(1, "u4")},
        "too few sums of today": {
            "block_size": np.int64(1 << 20),
            "block_crc32": np.zeros(0, "u4"),
        },
        "sums of blocks of 4 MiB": {
            "block_size": np.int64(1 << 22),
            "block_crc32": np.zeros(1, "u4"),
        },
    }


@pytest.fixture
def tar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tar with its index beside it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = write_nested(tmp_path, make_tree())
    find_or_build_index(path)
    return path


def index_of(tar: Path) -> tuple[Path, dict[str, Any]]:
    place = tar.with_name(tar.name + ".index")
    with np.load(place) as file:
        return place, {name: file[name] for name in file.files}


def test_a_crafted_index_is_refused_whatever_is_wrong_with_it(tar: Path) -> None:
    """Nothing but DataError comes: it is exit 3, and a traceback would be ours."""
    place, arrays = index_of(tar)
    taken = []
    for what, change in crafted(arrays).items():
        with open(place, "wb") as out:
            np.savez(out, **(arrays | change))
        try:
            find_or_build_index(tar)
            taken.append(what)
        except DataError as error:
            assert "index the tar again" in str(error) or "scripts/index_tar.py" in str(error), what
    assert taken == []


def test_an_index_without_one_of_its_fields_is_refused(tar: Path) -> None:
    place, arrays = index_of(tar)
    for name in arrays:
        with open(place, "wb") as out:
            np.savez(out, **{n: a for n, a in arrays.items() if n != name})
        with pytest.raises(DataError, match=f"it has no {name}"):
            find_or_build_index(tar)


def test_an_index_that_claims_more_than_it_holds_takes_no_memory(tar: Path) -> None:
    place, arrays = index_of(tar)
    with open(place, "wb") as out:
        np.savez_compressed(out, **(arrays | {"names": np.zeros(1 << 24, np.uint8)}))
    with pytest.raises(DataError, match="would unpack to more than it is"):
        find_or_build_index(tar)
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "<i8", "fortran_order": False, "shape": (1 << 50,)}
    )
    with zipfile.ZipFile(place, "w") as packed:
        packed.writestr("format.npy", header.getvalue())
    with pytest.raises(DataError, match="damaged"):
        find_or_build_index(tar)
