"""What a whole file must pass before it gets its final name, and the search for its wrong bytes."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dataset import checksum
from dataset.errors import DataError, UserError
from dataset.federation.connection import NETWORK_ERRORS, Pool, explain
from dataset.federation.document import Watch, fill, watching
from dataset.federation.lookup import Lookup
from dataset.federation.servers import MAX_WRONG_BLOCKS, Fault, Server
from dataset.fetch.digests import ServerDigest
from dataset.fetch.request import Summary
from dataset.transfer.chunk_sums import compute_all, hash_file
from dataset.transfer.journal import CHUNK, chunk_length
from dataset.transfer.receive import check_answer, open_range
from dataset.transfer.store import ChunkStore

log = logging.getLogger("trainyard.fetch")

RUN_CHUNKS = 16
MAX_COMPARED_BYTES = 4 << 30  # at most: beyond it, fetching everything again costs the same
MAX_FAILURES = 3  # of one reference: then the next one is asked
MAX_DIFFERENT = 32  # more chunks than this differ: fetching a server's share again is quicker


def accept_existing(path: Path, given: Mapping[str, str], given_by: str, summary: Summary) -> None:
    """Accepts a file of that name that we did not fetch if its digest is right; else raises."""
    if not path.is_file():  # a pipe would block
        raise UserError(f"{path} is not a regular file, or a broken link; move it away")
    size = path.stat().st_size
    if size != summary.size:
        raise UserError(
            f"{path} was not fetched by this command and has {size} bytes; the object has "
            f"{summary.size}. Move it away or choose another --out"
        )
    if not given:
        raise UserError(
            f"{path} exists and was not fetched by this command; give its --md5, --sha256 or "
            "--crc32, or move it away"
        )
    with open(path, "rb") as file:
        for kind, wanted in given.items():
            found = hash_file(file.fileno(), kind, size)
            if found != wanted:
                raise DataError(f"{path} has {kind} {found}, not {wanted}; move it away")
            summary.verified.append(f"{kind} ({given_by})")


def verify_by_server(
    lookup: Lookup, store: ChunkStore, digest: ServerDigest | None, summary: Summary
) -> None:
    """Compares with a server's digest; logs it if there is none at all."""
    if digest is None:
        if not summary.verified:
            summary.say("no server offered a digest: the bytes are complete, but not verified")
        return
    kind, wanted, where, _ = digest
    if _compute(store, kind) != wanted:
        repair_or_refuse(lookup, store, kind, wanted, summary, where)
    summary.verified.append(f"{kind} ({where})")


def refuse_unverified(what: str, verified: Sequence[str]) -> None:
    """Raises, for --require-digest, unless something has verified the bytes."""
    if not verified:
        raise DataError(
            f"{what} cannot be verified: no server offers a digest of it, and --require-digest was "
            "given; give its --md5, --sha256 or --crc32"
        )


def repair_or_refuse(
    lookup: Lookup, store: ChunkStore, kind: str, wanted: str, summary: Summary, where: str
) -> None:
    """After a wrong digest of the whole: finds and replaces the wrong bytes, or raises (exit 3)."""

    def is_right() -> bool:
        return _compute(store, kind) == wanted

    if store.checks is None:  # otherwise every block was checked, and the digest itself is wrong
        summary.say(f"the {kind} is not that of {where}: comparing with other sources")
        for text in repair(lookup, store, is_right, is_cheap=kind in store.sums.kinds):
            summary.say(text)
    if not is_right():
        is_bounded = store.waste.compared >= MAX_COMPARED_BYTES
        where_looked = f" in the {store.waste.compared >> 30} GiB compared" if is_bounded else ""
        raise DataError(
            f"{lookup.target.identity} fails verification: its {kind} is not {wanted} ({where}), "
            f"and no other source has better bytes{where_looked}. The partial file is kept for "
            f"inspection; remove {store.part} to start over"
        )


def whole_checksum(store: ChunkStore, kind: str) -> str:
    """The checksum of the whole file, combined from those of its chunks."""
    return checksum.to_hex(kind, store.sums.of_chunks(kind, range(store.blocks.num_chunks)))


def _compute(store: ChunkStore, kind: str) -> str:
    if kind in store.sums.kinds:
        return whole_checksum(store, kind)
    return hash_file(store.fd, kind, store.blocks.size)


@dataclass(frozen=True)
class Repair:
    """A chunk that was replaced: whose it was, and whether this start had fetched it."""

    text: str
    sender: str
    is_new: bool


class TooDifferent(Exception):
    """More differs from a reference than damage explains: wrong senders, or a changed object."""

    def __init__(self, reference: Server, repairs: Sequence[Repair]) -> None:
        super().__init__(f"more than {MAX_DIFFERENT} MiB differ at {reference.label}")
        self.reference = reference
        self.repairs = tuple(repairs)


def repair(
    lookup: Lookup, store: ChunkStore, is_right: Callable[[], bool], is_cheap: bool
) -> list[str]:
    """Replaces chunks that differ at another server until `is_right`; yields what was replaced.

    The reference is the origin's copy where the federation names it, then each cache's. If
    `is_right` is cheap (computed from the checksums of chunks), it is called after every repair.
    """
    repaired: list[str] = []
    end_at = time.monotonic() + lookup.options.give_up_s
    for reference in _references(lookup):
        num_before = len(repaired)
        repairs: list[Repair] = []
        num_failures = 0
        for first in range(0, store.blocks.num_chunks, RUN_CHUNKS):
            end = min(first + RUN_CHUNKS, store.blocks.num_chunks)
            if all(store.sender(chunk) == reference.label for chunk in range(first, end)):
                continue
            if store.waste.compared >= MAX_COMPARED_BYTES or time.monotonic() > end_at:
                return repaired
            if num_failures >= MAX_FAILURES:
                break
            try:
                found = _compare_run(lookup, store, reference, first, end)
            except NETWORK_ERRORS as error:
                log.info("%s: %s while comparing", reference.label, explain(error))
                num_failures += 1
                continue
            repaired += [repair.text for repair in found]
            repairs += [repair for repair in found if repair.sender != reference.label]
            if len(repairs) > MAX_DIFFERENT:
                raise TooDifferent(reference, repairs)
            if found and is_cheap and is_right():
                return repaired
        if len(repaired) > num_before and not is_cheap and is_right():
            return repaired
    return repaired


def trust_reference(lookup: Lookup, store: ChunkStore, found: TooDifferent) -> str:
    """Drops all chunks of the senders that differ, to fetch them elsewhere; returns it in words.

    A sender is refused, unless only chunks of an earlier start differ: the object may have
    changed since. If the digest stays wrong, `repair` tries the next server, each one once.
    """
    reference = found.reference
    counts = Counter(repair.sender for repair in found.repairs)
    guilty = {name for name, count in counts.items() if count >= MAX_WRONG_BLOCKS} or set(counts)
    now_wrong = Counter(repair.sender for repair in found.repairs if repair.is_new)
    with lookup.lock:
        reference.trust()
        for server in lookup.servers.all:
            if server.label in guilty & now_wrong.keys():
                server.refuse_bytes(reference, now_wrong[server.label])
    num_bytes = store.drop_from(guilty)
    names = ", ".join(sorted(guilty))
    return f"{names}: other bytes than {reference.label}; {num_bytes >> 20} MiB are fetched again"


def _references(lookup: Lookup) -> list[Server]:
    """The origin, the caches, then servers that were refused in favour of one no better."""
    origin = lookup.ask(directread=True)
    with lookup.lock:
        lookup.servers.update(origin.sources, origin.namespace.require_token, is_origin=True)
        known = [s for s in lookup.servers.all if s.url.startswith("http")]
    usable = [s for s in known if not s.refused]
    doubted = [s for s in known if _is_doubted(s) and not s.was_trusted]
    return sorted(usable, key=lambda server: not server.is_origin) + doubted


def _is_doubted(server: Server) -> bool:
    """Whether it was refused only because another server has other bytes."""
    return server.refused is not None and server.refused.fault is Fault.OTHER_BYTES


def _compare_run(
    lookup: Lookup, store: ChunkStore, reference: Server, first: int, end: int
) -> list[Repair]:
    """Fetches a run from the reference and replaces the chunks that differ."""
    with watching(lookup.options.stall_s) as watch:
        return _compare_watched(lookup, store, reference, first, end, watch)


def _compare_watched(
    lookup: Lookup, store: ChunkStore, reference: Server, first: int, end: int, watch: Watch
) -> list[Repair]:
    size = store.blocks.size
    start, stop = first * CHUNK, min(end * CHUNK, size)
    pool: Pool = lookup.pool
    answer = open_range(pool, lookup, reference, start, stop, watch.hold)
    repaired = []
    keep = False
    try:
        found = check_answer(answer, start, stop, size, reference)
        reference.note_answer(found.etag, found.is_range)
        if found.skip or not reference.has_ranges:
            return []
        buffer = memoryview(bytearray(CHUNK))
        for chunk in range(first, end):
            view = buffer[: chunk_length(chunk, size)]
            fill(answer.readinto, view, watch.note_progress)
            with lookup.lock:
                reference.count_bytes(len(view))
                store.waste.compared += len(view)
            values = compute_all(store.sums.kinds, view)
            if values != store.sums.get(chunk):
                text = f"bytes {chunk * CHUNK}-{chunk * CHUNK + len(view) - 1}"
                sender, is_new = store.sender(chunk), store.is_new(chunk)
                log.warning("%s from %s differ at %s; replaced", text, sender, reference.label)
                store.replace(chunk, reference, view, values)
                text = f"{text} from {sender}, replaced from {reference.label}"
                repaired.append(Repair(text, sender, is_new))
        watch.let_go()
        keep = answer.release(stop - start)
    finally:
        if keep:
            pool.give(answer.connection)
        else:
            answer.connection.close()
    return repaired
