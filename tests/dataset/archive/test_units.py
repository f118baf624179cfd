"""The units of a tar: every byte and every image in exactly one, cut by the rules."""

from __future__ import annotations

import dataclasses
import io
import tarfile
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataset.archive.index import build_index
from dataset.archive.tar_header import BLOCK, round_up
from dataset.archive.units import EMPTY, MAX_HEADERS, MIXED, UNIT_SIZE, Units, cut_units
from dataset.errors import DataError
from tests.dataset.tars import make_tree, nested_bytes, tar_bytes

Int64s = npt.NDArray[np.int64]
KIB, MIB = 1 << 10, 1 << 20
GOLDEN_BOUNDS = [0, 37888, 80384, 113152, 151552, 192512, 1255424, 1285632, 1318912]
GOLDEN_DIGEST = "3c7491ff59bc7aa0c5fcfa20504c5491c65395792df273ac415ccda126fd9ec9"
FEW = settings(deadline=None, max_examples=60)


@dataclasses.dataclass(frozen=True)
class Tar:
    """What an index says of a tar."""

    offset: Int64s
    size: Int64s
    label: Int64s
    tar_size: int

    def cut(self, unit_size: int = UNIT_SIZE) -> Units:
        return cut_units(self.offset, self.size, self.label, self.tar_size, unit_size)

    @property
    def header(self) -> Int64s:
        """The last byte behind the image before, in tar order: what is there are headers."""
        return np.append(0, self.end[:-1])

    @property
    def end(self) -> Int64s:
        return self.offset + (self.size + BLOCK - 1 & -BLOCK)


def lay_out(sizes: list[int], labels: list[int], gaps: list[int] | None = None) -> Tar:
    """A tar of images in this order, with so many bytes before each and two blocks at the end."""
    size, gap = np.array(sizes), np.array(gaps or [BLOCK] * len(sizes))
    taken = gap + (size + BLOCK - 1 & -BLOCK)
    offset = np.cumsum(taken) - taken + gap
    return Tar(offset, size, np.array(labels), int(taken.sum()) + 2 * BLOCK)


@st.composite
def tars(draw: st.DrawFn) -> tuple[Tar, int]:
    """Any tar, with long headers and stretches without images, and a size of units."""
    images = st.tuples(
        st.integers(1, 9000),
        st.integers(0, 3),
        st.sampled_from([1, 1, 1, 1, 3, 41, 2050, 2060, 5000]),  # blocks before it
    )
    sizes, labels, gaps = zip(*draw(st.lists(images, min_size=1, max_size=60)), strict=True)
    grouped = sorted(labels) if draw(st.booleans()) else list(labels)
    tar = lay_out(list(sizes), grouped, [BLOCK * blocks for blocks in gaps])
    return tar, draw(st.sampled_from([512, 4096, 20_000, 200_000]))


@given(tars())
@FEW
def test_every_byte_and_every_image_is_in_exactly_one_unit(case: tuple[Tar, int]) -> None:
    tar, unit_size = case
    units = tar.cut(unit_size)
    assert units.bounds[0] == 0 and units.bounds[-1] == tar.tar_size
    assert (units.num_bytes > 0).all()
    assert len(units.unit) == len(tar.offset) and (np.diff(units.unit) >= 0).all()
    begins, ends = units.bounds[units.unit], units.bounds[units.unit + 1]
    assert (np.maximum(tar.header, tar.offset - MAX_HEADERS) >= begins).all()
    assert (tar.end <= ends).all()


@given(tars())
@FEW
def test_the_group_of_a_unit_is_the_class_of_its_images(case: tuple[Tar, int]) -> None:
    tar, unit_size = case
    units = tar.cut(unit_size)
    for unit, group in enumerate(units.group.tolist()):
        classes = set(tar.label[units.unit == unit].tolist())
        assert group == (classes.pop() if len(classes) == 1 else MIXED if classes else EMPTY)


@given(tars(), st.integers(0, 1000))
@FEW
def test_the_numbers_of_the_samples_do_not_move_a_cut(case: tuple[Tar, int], seed: int) -> None:
    tar, unit_size = case
    mixed = np.random.default_rng(seed).permutation(len(tar.offset))
    other = Tar(tar.offset[mixed], tar.size[mixed], tar.label[mixed], tar.tar_size).cut(unit_size)
    units = tar.cut(unit_size)
    assert other.bounds.tolist() == units.bounds.tolist()
    assert other.group.tolist() == units.group.tolist()
    assert other.unit.tolist() == units.unit[mixed].tolist()


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 60)), min_size=1, max_size=30),
    st.integers(1, 12),
)
@FEW
def test_units_of_small_images_are_half_to_one_and_a_half_units(
    runs: list[tuple[int, int]], blocks: int
) -> None:
    """Of runs of any length: only the last unit, behind which nothing comes, may be smaller."""
    labels = [label for label, length in runs for _ in range(length)]
    units = lay_out([BLOCK * blocks] * len(labels), labels).cut(unit_size := 64 * KIB)
    image = BLOCK * (blocks + 1)
    assert (units.num_bytes[:-1] >= unit_size // 2).all()
    assert (units.num_bytes <= 1.5 * unit_size + image).all()


def test_a_class_of_half_a_unit_shares_no_unit_and_a_smaller_one_does() -> None:
    half = 32
    for num, is_shared in ((half, False), (half - 1, True)):
        labels = [0] * num + [1] * 100
        groups = lay_out([KIB - BLOCK] * len(labels), labels).cut(64 * KIB).group.tolist()
        assert (MIXED in groups) == is_shared
        assert groups[0] == (MIXED if is_shared else 0) and groups[-1] == 1


def test_an_image_larger_than_a_unit_is_not_cut() -> None:
    large = lay_out([5 * MIB] * 20, [0] * 10 + [1] * 10).cut()
    assert large.unit.tolist() == list(range(20))
    some = lay_out([KIB] * 100 + [9 * MIB] + [KIB] * 100, [0] * 201).cut()
    assert len(set(some.unit.tolist())) <= 3
    assert MIXED not in some.group and EMPTY not in some.group


def test_a_tar_in_random_order_has_one_group() -> None:
    labels = np.random.default_rng(0).integers(0, 1000, 2000).tolist()
    units = lay_out([110_000] * 2000, labels).cut()
    assert set(units.group.tolist()) == {MIXED}
    assert units.num_bytes[:-1].min() >= UNIT_SIZE // 2


def test_stretches_without_images_are_units_of_their_own() -> None:
    """At the front, between two images of one class, and at the end."""
    long = 7 * MIB
    tar = lay_out([110_000] * 40, [0] * 40, [long] + [BLOCK] * 19 + [long] + [BLOCK] * 19)
    units = dataclasses.replace(tar, tar_size=tar.tar_size + long).cut()
    assert units.group.tolist() == [EMPTY] * 3 + [0] * 2 + [EMPTY] * 3 + [0] * 2 + [EMPTY] * 4
    empty = units.num_bytes[units.group == EMPTY]
    assert empty.sum() == 3 * long - 2 * MAX_HEADERS + 2 * BLOCK
    assert UNIT_SIZE // 2 <= empty.min() <= empty.max() <= 1.5 * UNIT_SIZE


def test_short_stretches_go_with_the_image_behind_them() -> None:
    """Class tars end in up to 10 KiB of zeros, and the next begins with a header."""
    tar = lay_out([110_000] * 40, [0] * 20 + [1] * 20, ([BLOCK] * 19 + [20 * BLOCK]) * 2)
    units = tar.cut()
    assert units.group.tolist() == [0, 1]
    assert units.bounds[1] == tar.end[19]


@pytest.mark.parametrize("offsets", [[BLOCK, 2 * BLOCK], [BLOCK, BLOCK], [0, 4 * BLOCK]])
def test_images_without_room_for_a_header_are_refused(offsets: list[int]) -> None:
    with pytest.raises(DataError, match="without room for its header"):
        cut_units(np.array(offsets), np.array([BLOCK, BLOCK]), np.array([0, 0]), 10_000)


def test_the_cuts_are_what_they_were_when_the_rules_were_fixed() -> None:
    """A run is resumed years later: the digest of the same index must not change."""
    units = golden_tar().cut(32 * KIB)
    assert units.bounds.tolist() == GOLDEN_BOUNDS
    assert units.group.tolist() == [0, MIXED, 2, 2, EMPTY, 2, 2, 2]
    assert units.digest == GOLDEN_DIGEST


def golden_tar() -> Tar:
    labels = [0] * 9 + [1] * 2 + [2] * 14
    gaps = [BLOCK] * 20 + [MAX_HEADERS + 40 * KIB] + [BLOCK] * 4
    return lay_out([1000 + 613 * i for i in range(25)], labels, gaps)


def test_the_digest_names_everything_that_decides_the_order() -> None:
    tar = golden_tar()
    units = tar.cut(32 * KIB)
    other_label = tar.label.copy()
    other_label[:9] = 3
    others = [
        tar.cut(33 * KIB),
        dataclasses.replace(tar, tar_size=tar.tar_size + BLOCK).cut(32 * KIB),
        dataclasses.replace(tar, label=other_label).cut(32 * KIB),
        dataclasses.replace(units, unit=units.unit[::-1]),
    ]
    assert len({units.digest, *(other.digest for other in others)}) == 5
    assert tar.cut(32 * KIB).digest == units.digest
    names = dataclasses.replace(tar, label=tar.label.astype(np.int32)).cut(32 * KIB)
    assert names.digest == units.digest


def test_a_real_tar_of_class_tars(tmp_path: Path) -> None:
    path = tmp_path / "train.tar"
    path.write_bytes(nested_bytes(make_tree(6, 30)))
    index, _ = build_index(path)
    data = path.read_bytes()
    units = cut_units(index.offset, index.size, index.label, len(data), 32 * KIB)
    assert len(units) > 6
    for i, unit in enumerate(units.unit.tolist()):
        begin, end = units.bounds[unit : unit + 2].tolist()
        header = tarfile.TarInfo.frombuf(
            data[index.offset[i] - BLOCK : index.offset[i]], "utf-8", "strict"
        )
        assert (header.name, header.size) == (index.name(i), index.size[i])
        assert begin <= index.offset[i] - BLOCK
        assert index.offset[i] + round_up(int(index.size[i])) <= end


@pytest.mark.parametrize("format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_name_records_and_padding_are_in_the_unit_of_their_image(
    tmp_path: Path, format: int
) -> None:
    """A tree of long names that also holds val, between the classes of train."""
    deep = "d" * 200
    files = {f"{deep}/train/a/{i}.jpeg": bytes(3000) for i in range(9)}
    files |= {f"{deep}/val/{c}/{i}.jpeg": bytes(300_000) for c in "ab" for i in range(3)}
    files |= {f"{deep}/train/b/{i}.jpeg": bytes(3000) for i in range(9)}
    path = tmp_path / "both.tar"
    path.write_bytes(tar_bytes(files, format))
    index, _ = build_index(path, split="train")
    size = path.stat().st_size
    units = cut_units(index.offset, index.size, index.label, size, 16 * KIB)
    assert EMPTY in units.group and units.bounds[-1] == size
    with tarfile.open(fileobj=io.BytesIO(path.read_bytes())) as tar:
        members = {member.offset_data: member for member in tar if "/train/" in member.name}
    for i, unit in enumerate(units.unit.tolist()):
        member = members.pop(int(index.offset[i]))
        assert member.offset < member.offset_data - BLOCK  # its name record
        begin, end = units.bounds[unit : unit + 2].tolist()
        assert begin <= member.offset and member.offset_data + round_up(member.size) <= end
    assert not members
