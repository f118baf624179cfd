"""One fetch from start to end: look up, resume, transfer, verify, and only then the final name."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from dataset import checksum
from dataset.durable import sync
from dataset.errors import DataError, PassingError
from dataset.federation.lookup import Lookup, Options
from dataset.federation.tokens import Access
from dataset.fetch.digests import DigestAsker, HashFollower, ServerDigest, pick_kinds
from dataset.fetch.job import FetchJob
from dataset.fetch.ledger import NoSpace, check_space, make_folder
from dataset.fetch.request import Summary
from dataset.fetch.size import find_size
from dataset.fetch.verify import (
    TooDifferent,
    accept_existing,
    refuse_unverified,
    repair_or_refuse,
    trust_reference,
    verify_by_server,
    whole_checksum,
)
from dataset.own_names import journal_path, part_path
from dataset.redaction import redact
from dataset.transfer.chunk_sums import BlockChecks, NoChecks, NoIndex, read_block_checks
from dataset.transfer.engine import ObjectChanged, OtherSizes, Transfer
from dataset.transfer.journal import Arrivals, Journal, read_journal_head
from dataset.transfer.own_files import check_absent
from dataset.transfer.resume import adopt_older, discard, discard_units, holding_part, resume
from dataset.transfer.store import ChunkStore, DiskError

log = logging.getLogger("trainyard.fetch")

MAX_STARTS = 5  # an object that changes again and again under our hands
Tick = Callable[[Transfer], None]


def fetch_object(
    job: FetchJob, access: Access, options: Options, on_tick: Tick = lambda transfer: None
) -> Summary:
    """Fetches one object to its final name; an exception carries the summary as `summary`."""
    summary = Summary(job.target.identity, str(job.path))
    started = time.monotonic()
    with Lookup(job.target, access, options) as lookup:
        try:
            _fetch(job, lookup, summary, on_tick)
            summary.status = "done"
        except Exception as error:
            summary.error = redact(str(error))
            error.summary = summary  # type: ignore[attr-defined]
            raise
        finally:
            summary.seconds = round(time.monotonic() - started, 3)
            summary.sources = [server.describe() for server in lookup.servers.all]
            summary.lookups = lookup.num_lookups
    return summary


def _fetch(job: FetchJob, lookup: Lookup, summary: Summary, on_tick: Tick) -> None:
    record = _find_record(job)
    if record is not None:
        _accept_record(job, record, summary, lookup.options.require_digest)
        return
    adopt_older(job.path, job.target.identity, job.ledger.knows)
    odd_size: int | None = None
    for _ in range(MAX_STARTS):
        before = read_journal_head(journal_path(job.path))
        summary.size = find_size(lookup, before.size if before is not None else None)
        make_folder(job.path.parent)
        if summary.size != odd_size and _is_odd(job, before, summary.size):
            odd_size = summary.size  # a broken answer may claim any size: ask once more
            lookup.servers.forget()
            continue
        job = job.with_published(summary.size)
        if os.path.lexists(job.path):
            accept_existing(job.path, job.given, job.given_by, summary)
            _record_existing(job, summary)
            return
        try:
            _fetch_once(job, lookup, summary, on_tick)
            return
        except OtherSizes as error:  # ask again; if the size is the same, the partial file stays
            summary.say(f"the object seems to have another size now ({error}); asking again")
            lookup.servers.forget()
        except (ObjectChanged, TooDifferent) as error:
            if job.has_readers:  # of the bytes that would be discarded
                raise DataError(
                    f"{job.target.identity} changed at its source ({error}); make its index again, "
                    "remove the partial file and start again"
                ) from None
            summary.say(f"the object changed at its source ({error}); starting over")
            discard(job.path)
            lookup.servers.forget()
    raise PassingError(f"{job.target.identity} keeps changing at its source; try again later")


def _record_existing(job: FetchJob, summary: Summary) -> None:
    record = job.ledger.make(job.path, job.target.identity, summary.verified, job.given)
    job.ledger.add([record])


def _is_odd(job: FetchJob, before: Arrivals | None, size: int) -> bool:
    """Whether to ask again: this size would discard the partial file, or does not fit the disk."""
    if os.path.lexists(job.path):
        return False
    if before is not None and before.identity == job.target.identity and before.size != size:
        return True
    try:
        check_space(job.path, size)
    except NoSpace:
        return True
    return False


def _find_record(job: FetchJob) -> dict[str, Any] | None:
    """The record of a file that was fetched before and verified with the digests given now."""
    record = job.ledger.find(job.path, job.target.identity)
    known = record.get("digests", {}) if record else {}
    is_same = all(known.get(kind) == value for kind, value in job.given.items())
    return record if is_same else None


def _accept_record(
    job: FetchJob, record: Mapping[str, Any], summary: Summary, must_verify: bool
) -> None:
    """Takes the file that is here; one that was never verified is, if its digest is known now."""
    summary.size = summary.resumed_bytes = record["size"]
    summary.verified = list(record.get("verified", ()))
    job = job.with_published(record["size"])
    if not summary.verified and job.given:  # an earlier version did not know its digest
        accept_existing(job.path, job.given, job.given_by, summary)
        _record_existing(job, summary)
    if must_verify:
        refuse_unverified(str(job.path), summary.verified)
    by = ", ".join(summary.verified) or "its size alone"
    summary.say(f"{job.path.name} is here already, verified by {by}")
    discard_units(job.path, summary.say)
    discard(job.path)  # what a kill between the last two steps of a fetch left


def _read_checks(job: FetchJob, summary: Summary) -> BlockChecks | None:
    """The block checksums of the index, if there are any; what is wrong with them is said."""
    try:
        return read_block_checks(job.index, summary.size) if job.index else None
    except NoChecks as error:
        if job.has_readers:
            raise DataError(f"nothing can vouch for {job.target.identity}: {error}") from None
        if isinstance(error, NoIndex):
            return None
        summary.say(f"block checksums are not used: {error}")
        return None


def _fetch_once(job: FetchJob, lookup: Lookup, summary: Summary, on_tick: Tick) -> None:
    checks = _read_checks(job, summary)
    check_space(job.path, summary.size)
    with holding_part(job.path) as fd:
        discard_units(job.path, summary.say)
        kinds = pick_kinds(job.given, checks.kind if checks is not None else None)
        arrivals = resume(
            job.path, job.target.identity, summary.size, kinds, summary.say, job.has_readers
        )
        if not _ignores_etags(job, checks):
            _compare_etags(lookup, arrivals)
        os.ftruncate(fd, summary.size)  # its full length, but sparse
        _fill_part(job, lookup, fd, arrivals, checks, summary, on_tick)
        _finish(job, summary)


def _fill_part(
    job: FetchJob,
    lookup: Lookup,
    fd: int,
    arrivals: Arrivals,
    checks: BlockChecks | None,
    summary: Summary,
    on_tick: Tick,
) -> None:
    """Completes and verifies the partial file, and syncs it to the disk."""
    journal = Journal.create(journal_path(job.path), arrivals)
    try:
        store = ChunkStore(
            fd, journal, arrivals, lookup.lock, lookup.servers, checks, summary.say, job.make_map
        )
        while not _fill(job, Transfer(lookup, store), arrivals, summary, on_tick):
            pass
        store.flush()
    except DiskError as error:
        raise error.error from None
    finally:
        with lookup.lock:  # a late digest may be on its way into the journal
            journal.close()


def _fill(
    job: FetchJob, transfer: Transfer, arrivals: Arrivals, summary: Summary, on_tick: Tick
) -> bool:
    """Transfers and verifies; False when much was wrong and must be fetched from other servers."""
    store, digest = transfer.store, None
    try:
        digest = _run(job, transfer, arrivals, summary, on_tick)
        if store.checks is not None:
            summary.verified.append(f"block_{store.checks.kind} ({store.checks.where})")
        verify_by_server(transfer.lookup, store, digest, summary)
        if transfer.lookup.options.require_digest:
            refuse_unverified(job.target.identity, summary.verified)
        return True
    except TooDifferent as found:
        if digest is not None:
            again = DigestAsker(transfer, arrivals).wait()
            if again is None or again[:2] != digest[:2]:
                raise  # another object than before, not wrong bytes
        summary.say(trust_reference(transfer.lookup, store, found))
        summary.verified.clear()
        return False
    finally:
        _count(transfer, summary)


def _ignores_etags(job: FetchJob, checks: BlockChecks | None) -> bool:
    """Whether a cache may have another ETag than before: a cache that fetches it anew often has.

    A fetch then begins anew; under readers it goes on where sums vouch for every block.
    """
    return job.has_readers and checks is not None


def _compare_etags(lookup: Lookup, arrivals: Arrivals) -> None:
    """Raises if a server's ETag shows that the object changed since an earlier start."""
    for server in lookup.servers.all:
        known = arrivals.etags.get(server.label)
        if known is not None and server.etag is not None and known != server.etag:
            raise ObjectChanged(f"{server.label}: its ETag was {known} and is {server.etag}")
        server.note_etag(known)


def _run(
    job: FetchJob, transfer: Transfer, arrivals: Arrivals, summary: Summary, on_tick: Tick
) -> ServerDigest | None:
    """Transfers, with hashes following and the server's digest asked beside it."""
    store = transfer.store
    hashes = [kind for kind in job.given if kind in checksum.HASHES]
    follower = HashFollower(store, hashes)
    # On a fast network the hash is the slowest part; in another order it begins when all is here.
    transfer.stays_behind = bool(hashes) and store.blocks.is_front_to_back
    transfer.ignores_etags = _ignores_etags(job, store.checks)
    asker = None
    if not job.given and (store.checks is None or job.asks_digest):
        asker = DigestAsker(transfer, arrivals)

    def tick() -> None:
        if asker is not None:
            asker.start_when_late()
        on_tick(transfer)

    try:
        transfer.run(tick)
        on_tick(transfer)
        found = follower.finish()
    finally:
        follower.stop()
    for kind, wanted in job.given.items():
        value = found[kind] if kind in found else whole_checksum(store, kind)
        if value != wanted:
            repair_or_refuse(transfer.lookup, store, kind, wanted, summary, job.given_by)
        summary.verified.append(f"{kind} ({job.given_by})")
    return asker.wait() if asker is not None else None


def _count(transfer: Transfer, summary: Summary) -> None:
    waste = transfer.store.waste
    summary.resumed_bytes = transfer.store.resumed_bytes
    summary.fetched_bytes = sum(server.bytes for server in transfer.servers.all)
    summary.bytes_twice = vars(waste)
    summary.hedges += transfer.num_hedges


def _finish(job: FetchJob, summary: Summary) -> None:
    """Gives the file its final name, durably; its record goes first, so a kill costs nothing."""
    check_absent(job.path)
    job.ledger.add_before_rename(job.path, job.target.identity, summary.verified, job.given)
    part_path(job.path).replace(job.path)
    journal_path(job.path).unlink()
    sync(job.path.parent)
