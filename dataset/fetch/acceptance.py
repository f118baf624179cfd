"""What a whole file must pass before it gets its final name, and the search for its wrong bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from dataset import checksum
from dataset.errors import DataError, UserError
from dataset.federation.lookup import Lookup
from dataset.fetch.compare import MAX_COMPARED_BYTES, repair
from dataset.fetch.size import Digest
from dataset.fetch.summary import Summary
from dataset.transfer.chunk_sums import hash_file
from dataset.transfer.store import ChunkStore


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
    lookup: Lookup, store: ChunkStore, digest: Digest | None, summary: Summary
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
