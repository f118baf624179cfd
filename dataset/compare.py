"""Finding wrong bytes when only a digest of the whole tells: other sources' copies are compared."""

from __future__ import annotations

import logging
from collections.abc import Callable

from dataset.connection import NETWORK_ERRORS, Pool, explain
from dataset.journal import CHUNK, chunk_length
from dataset.lookup import Lookup
from dataset.receive import check_answer, open_range
from dataset.sources import Source
from dataset.store import ChunkStore
from dataset.verify import compute_all

log = logging.getLogger("trainyard.fetch")

RUN_CHUNKS = 16
MAX_COMPARED_BYTES = 4 << 30  # the bound: beyond it, fetching all again costs the same
MAX_DIFFERENT = 32  # more chunks than this differ: it is another object, not damage


class TooDifferent(Exception):
    """So much differs between the sources that they do not hold the same object."""


def mend(
    lookup: Lookup, store: ChunkStore, is_right: Callable[[], bool], is_cheap: bool
) -> list[str]:
    """What was replaced: chunks that differ at another source get its bytes, until `is_right`.

    The origin's copy is the reference where the federation names it, then each cache's. A cheap
    `is_right` (from the checksums of the chunks alone) is asked after every repair.
    """
    mended: list[str] = []
    for reference in _references(lookup):
        num_before = len(mended)
        for first in range(0, store.blocks.num_chunks, RUN_CHUNKS):
            end = min(first + RUN_CHUNKS, store.blocks.num_chunks)
            if all(store.sender(chunk) == reference.label for chunk in range(first, end)):
                continue
            if store.waste.compared >= MAX_COMPARED_BYTES:
                return mended
            try:
                found = _compare_run(lookup, store, reference, first, end)
            except NETWORK_ERRORS as error:
                log.info("%s: %s while comparing", reference.label, explain(error))
                continue
            mended += found
            if len(mended) > MAX_DIFFERENT:
                raise TooDifferent(reference.label)
            if found and is_cheap and is_right():
                return mended
        if len(mended) > num_before and not is_cheap and is_right():
            return mended
    return mended


def _references(lookup: Lookup) -> list[Source]:
    origin = lookup.ask(directread=True)
    with lookup.lock:
        lookup.sources.update(origin.sources, origin.namespace.require_token, is_origin=True)
        usable = [s for s in lookup.sources.usable if s.url.startswith("http")]
    return sorted(usable, key=lambda source: not source.is_origin)


def _compare_run(
    lookup: Lookup, store: ChunkStore, reference: Source, first: int, end: int
) -> list[str]:
    """Fetches a run from the reference and replaces the chunks that differ."""
    size = store.blocks.size
    start, stop = first * CHUNK, min(end * CHUNK, size)
    pool: Pool = lookup.pool
    answer = open_range(pool, lookup, reference, start, stop)
    mended = []
    keep = False
    try:
        skip = check_answer(answer, start, stop, size, reference)
        if skip or not reference.has_ranges:
            return []
        buffer = memoryview(bytearray(CHUNK))
        for chunk in range(first, end):
            view = buffer[: chunk_length(chunk, size)]
            filled = 0
            while filled < len(view):
                got = answer.readinto(view[filled:])
                if not got:
                    raise OSError("ended early")
                filled += got
            with lookup.lock:
                reference.bytes += len(view)
                store.waste.compared += len(view)
            values = compute_all(store.sums.kinds, view)
            if values != store.sums.get(chunk):
                text = f"bytes {chunk * CHUNK}-{chunk * CHUNK + len(view) - 1}"
                sender = store.sender(chunk)
                log.warning("%s from %s differ at %s; replaced", text, sender, reference.label)
                store.replace(chunk, reference, view, values)
                mended.append(f"{text} from {sender}, replaced from {reference.label}")
        keep = answer.release(stop - start)
    finally:
        if keep:
            pool.give(answer.connection)
        else:
            answer.connection.close()
    return mended
