"""A stream whose disk is bounded: what its task names, put together and run."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path

import numpy as np

from dataset.archive.header_check import MAX_PROOF, HeaderCheck
from dataset.archive.index_file import TarIndex, load_by_size
from dataset.errors import DataError, UserError
from dataset.federation.lookup import Lookup
from dataset.fetch.request import Request
from dataset.fetch.size import find_size
from dataset.stream.spec import CacheSpec, StreamedObject
from dataset.stream.unit_cache import UnitCache
from dataset.stream.unit_fetch import UnitFetch
from dataset.stream.unit_map import UnitMap, find_unit
from dataset.stream.unit_plan import NextUses


def fetch_units(
    thing: StreamedObject, cache: CacheSpec, request: Request, on_tick: Callable[[UnitFetch], None]
) -> None:
    """Brings the units of a tar as its readers need them; ends by an error, or with its process."""
    units = UnitMap(Path(thing.arrivals))
    index = load_by_size(Path(thing.index), Path(thing.path), units.size)
    if index is None or index.unit_sums is None:
        raise DataError(f"{thing.index} is no index of {thing.path} with checksums of units")
    with Lookup(request.parse(thing.url), request.access, request.options) as lookup:
        size = find_size(lookup, units.size)
        if size != units.size:
            raise DataError(f"the object had {units.size} bytes and has {size} now; start again")
        uses = NextUses(Path(cache.plans), len(units.here))
        held = UnitCache(Path(cache.folder), units, uses, cache.limit, cache.keep_bytes)
        prover = ClassProver(index, units)
        sums = index.unit_sums.values
        fetch = UnitFetch(lookup, held, sums, prover.prove, cache.num_ranks)
        fetch.run(lambda: on_tick(fetch))


class ClassProver:
    """Compares each class with the tar when the unit arrives that its first image lies in."""

    def __init__(self, index: TarIndex, units: UnitMap) -> None:
        self._headers, self._units, self._index = HeaderCheck(index), units, index

    @cached_property
    def _classes_of_units(self) -> dict[int, set[str]]:
        """The classes that each unit proves; none if no header tells them."""
        _, ends = self._headers.proofs
        found: dict[int, set[str]] = {}
        units = find_unit(self._units.bounds, ends).tolist()
        for label, unit in zip(np.unique(self._index.label).tolist(), units, strict=False):
            found.setdefault(unit, set()).add(self._index.classes[label])
        return found

    def prove(self, unit: int, data: bytes | bytearray) -> None:
        """Raises if the unit has the proof of a class, and that is another one."""
        expected = self._classes_of_units.get(unit)
        if expected is None:
            return
        begin, end = self._units.bounds[unit : unit + 2].tolist()

        def pread(length: int, offset: int) -> bytes:
            before = bytes(min(length, max(0, begin - offset)))  # the unit before is not here
            start = max(0, offset - begin)
            return before + bytes(data[start : start + length - len(before)])

        def can_read(first: int, last: int) -> bool:
            return begin < last <= end and last - first <= MAX_PROOF

        late = expected.intersection(self._headers.prove_classes(pread, can_read))
        if late:
            raise UserError(
                f"the class tar of {min(late)} does not adjoin its first image: this tar cannot be "
                "streamed in parts, as --cache-limit and several nodes do; use --stream never"
            )
