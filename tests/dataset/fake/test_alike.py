"""Made-up sets in the shape of two workflows: class folders that the trainer takes as they are."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from dataset.errors import UserError
from dataset.fake.alike import ALIKE, list_items, make_alike, share_out


def count_files(folder: Path) -> dict[str, int]:
    return {path.name: len(list(path.iterdir())) for path in sorted((folder / "train").iterdir())}


def test_galaxies_are_424_pixels_wide_in_five_unequal_classes(tmp_path: Path) -> None:
    made = make_alike(tmp_path, "galaxy", 30)
    found = count_files(tmp_path)
    assert len(found) == 5 and sum(found.values()) == made.num_images == 30
    assert min(found.values()) == 1 and max(found.values()) > 7
    assert {Image.open(path).size for path in tmp_path.rglob("*.jpg")} == {(424, 424)}
    assert sum(ALIKE["galaxy"].classes.values()) == 28_793  # as in the study


def test_crisis_is_damaged_and_undamaged_and_the_seed_decides_the_bytes(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        make_alike(tmp_path / name, "crisis", 9, size=(48, 32), seed=seed)
    assert count_files(tmp_path / "a") == {"damaged": 3, "undamaged": 6}
    a, b, c = (
        {p.name: p.read_bytes() for p in (tmp_path / n).rglob("*.jpg")} for n in ("a", "b", "c")
    )
    assert a == b and a.keys() == c.keys() and all(a[name] != c[name] for name in a)
    assert len(set(a.values())) == 9
    assert not (tmp_path / "a" / "val").exists()


def test_some_pictures_look_like_another_class() -> None:
    names = list(ALIKE["galaxy"].classes)
    items = list_items("galaxy", 5000, (64, 64), 0)
    wrong = [item for item in items if names[item.label] != item.name.split("/")[0]]
    assert 100 < len(wrong) < 300  # of 200
    assert len({(item.label, item.number) for item in items}) == 5000


def test_images_are_shared_out_in_proportion_and_each_class_has_one() -> None:
    assert share_out(10, [1, 1000, 1]) == [1, 8, 1]
    assert share_out(90, [1, 2]) == [30, 60]


def test_a_second_call_finds_it_and_another_set_is_not_overwritten(tmp_path: Path) -> None:
    make_alike(tmp_path, "crisis", 6, size=(32, 32))
    again = make_alike(tmp_path, "crisis", 6, size=(32, 32))
    assert again.was_there and again.num_images == 6
    with pytest.raises(UserError, match="holds another made-up set"):
        make_alike(tmp_path, "crisis", 7, size=(32, 32))
    mine = tmp_path / "mine"
    (mine / "train").mkdir(parents=True)
    with pytest.raises(UserError, match="was not made by this command"):
        make_alike(mine, "crisis", 6, size=(32, 32))
    assert list((mine / "train").iterdir()) == []


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"num_images": 4}, "--images 4 is out of range; give 5 to"),
        ({"size": (4, 4)}, "--size 4x4"),
        ({"processes": 0}, "--processes 0"),
        ({"seed": -1}, "--seed -1"),
    ],
)
def test_values_out_of_range_are_named(tmp_path: Path, wrong: dict[str, int], words: str) -> None:
    with pytest.raises(UserError, match=words):
        make_alike(tmp_path / "out", "galaxy", **({"num_images": 9} | wrong))  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()
