"""Where the samples of a data set lie in its tar, by the tar's index; of a folder too (no torch).

A folder that was extracted from a tar has the same samples under the same numbers. So an index of
that tar gives the folder's layout, and a run may go from one to the other in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from dataset.archive.index import user_cache
from dataset.archive.index_file import TarIndex, load_index_alone
from dataset.archive.units import EMPTY, UNIT_SIZE, cut_units
from dataset.errors import DataError, UserError
from dataset.names import INDEX_SUFFIX, TRAIN_TAR
from train.data.sources import Source, TarSource, list_names
from train.data.streamed_order import Layout
from train.data.val_share import Subset

INDEX_NAME = TRAIN_TAR + INDEX_SUFFIX
NAMES_AT_ONCE = 1 << 16


def find_layout(train: Source, folder: Path, index_dir: Path | None) -> tuple[Layout, str]:
    """The layout of the training samples, and the digest of its cuts.

    An index of the tar that a folder came from is looked for in the folder of the data set. Images
    that are held out for validation (--val-share) lie in the same units as the others.
    """
    part = train if isinstance(train, Subset) else None
    whole = part.whole if part else train
    index = whole.index if isinstance(whole, TarSource) else _find_index(whole, folder, index_dir)
    # UNIT_SIZE is read here, so that a test can make small units.
    units = cut_units(index.offset, index.size, index.label, index.tar_size, UNIT_SIZE)
    num_bytes = int(units.num_bytes[units.group != EMPTY].sum())
    unit = units.unit[part.numbers] if part else units.unit
    return Layout(unit, units.group, num_bytes), units.digest


def _find_index(train: Source, folder: Path, index_dir: Path | None) -> TarIndex:
    """The first index that has exactly the images of a folder."""
    others = []
    for place, index in _load_indexes(folder, index_dir):
        if _has_same_samples(index, train):
            return index
        others.append(str(place))
    strange = f" ({', '.join(others)}: of other images)" if others else ""
    raise UserError(
        f"the streamed order of {folder} needs the index of the tar it came from, {INDEX_NAME}, "
        f"and there is none{strange}; write it: "
        f"python scripts/index_tar.py --index-dir {folder} {TRAIN_TAR}; images that came from no "
        "tar have the uniform order only: leave out --order"
    )


def _load_indexes(folder: Path, index_dir: Path | None) -> Iterator[tuple[Path, TarIndex]]:
    """Indexes of a training tar: in --index-dir, in the folder, in the user's cache."""
    for place in [path / INDEX_NAME for path in (index_dir, folder) if path is not None]:
        if place.is_file():
            yield place, load_index_alone(place)
    for place in sorted((user_cache() / "index").glob(f"*-{INDEX_NAME}")):
        try:
            yield place, load_index_alone(place)
        except (DataError, OSError):
            continue  # nobody asked for this one


def _has_same_samples(index: TarIndex, train: Source) -> bool:
    """Whether an index and a source have the same classes, labels and names in the same order."""
    if index.classes != train.classes or not np.array_equal(index.label, train.labels):
        return False
    bounds = range(0, len(train), NAMES_AT_ONCE)
    ends = [min(start + NAMES_AT_ONCE, len(train)) for start in bounds]
    pairs = zip(bounds, ends, strict=True)
    return all(list_names(index, a, b) == train.raw_names(a, b) for a, b in pairs)
