"""Units of a stream with little disk, once the whole tar comes: they go, and their place counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from dataset import durable
from dataset.fetch import ledger
from dataset.fetch.ledger import SPARE_BYTES, NoSpace, check_space, check_space_of_all
from dataset.own_names import units_path
from dataset.stream.unit_map import name_unit
from tests.dataset.object_fetch import CONTENT, fetch
from tests.dataset.small_server import serving
from tests.dataset.stream.url_index import list_folder

NAME = "object.bin"


def leave_units(folder: Path, num_bytes: int) -> Path:
    """Two units and one that was being written."""
    units = units_path(folder / NAME)
    units.mkdir()
    for name in (name_unit(0), name_unit(10_000_000), f"{name_unit(2)}.part"):
        (units / name).write_bytes(bytes(num_bytes))
    return units


def test_units_go_when_the_whole_object_comes(tmp_path: Path) -> None:
    with serving(CONTENT) as (url, _):
        leave_units(tmp_path, 1000)
        summary = fetch(url, tmp_path)
        assert any("single units" in note for note in summary.notes)
        assert list_folder(tmp_path) == [".fetch.lock", "fetched.jsonl", NAME]
        leave_units(tmp_path, 1000)
        fetch(url, tmp_path)  # it is here already
    assert list_folder(tmp_path) == [".fetch.lock", "fetched.jsonl", NAME]


def test_a_file_of_the_user_among_the_units_stays(tmp_path: Path) -> None:
    units = leave_units(tmp_path, 1000)
    (units / "mine").write_bytes(b"mine")
    with serving(CONTENT) as (url, _):
        fetch(url, tmp_path)
    assert list_folder(units) == ["mine"]


def test_the_place_of_units_counts_as_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = 3 << 20
    room = durable.find_room(tmp_path)
    tight = room._replace(num_bytes=SPARE_BYTES + (1 << 20))
    monkeypatch.setattr(ledger, "find_room", lambda folder: tight)
    with pytest.raises(NoSpace):
        check_space(tmp_path / NAME, size)
    leave_units(tmp_path, 1 << 20)
    check_space(tmp_path / NAME, size)
    check_space_of_all(tmp_path, [(tmp_path / NAME, size)])
