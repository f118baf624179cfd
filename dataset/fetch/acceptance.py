"""What a whole file must pass before it gets its final name, and the search for its wrong bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from dataset import checksum
from dataset.fetch.compare import MAX_COMPARED_BYTES, mend
from dataset.errors import DataError, UserError
from dataset.federation.lookup import Lookup
from dataset.fetch.probe import Digest
from dataset.transfer.store import ChunkStore
from dataset.fetch.summary import Summary
from dataset.transfer.verify import hash_file


def accept_existing(path: Path, given: Mapping[str, str], given_by: str, summary: Summary) -> None:
    """A file of that name that we did not fetch: taken when it proves right, never overwritten."""
    if not path.is_file():  # a pipe would block
        raise UserError(f"{path} is no regular file, or a link that leads nowhere; move it away")
    size = path.stat().st_size
    if size != summary.size:
        raise UserError(
            f"{path} exists with {size} bytes and is not from here; the object has "
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
    """Compares with a server's digest; none at all is said."""
    if digest is None:
        if not summary.verified:
            summary.say("no server offered a digest: the bytes are complete, but not verified")
        return
    kind, wanted, where, _ = digest
    if _compute(store, kind) != wanted:
        mend_or_refuse(lookup, store, kind, wanted, summary, where)
    summary.verified.append(f"{kind} ({where})")


def refuse_unverified(what: str, verified: Sequence[str]) -> None:
    """Raises where --require-digest was given and nothing vouches for the bytes."""
    if not verified:
        raise DataError(
            f"{what} cannot be verified: no server offers a digest of it, and --require-digest was "
            "given; give its --md5, --sha256 or --crc32"
        )


def mend_or_refuse(
    lookup: Lookup, store: ChunkStore, kind: str, wanted: str, summary: Summary, where: str
) -> None:
    """The digest of the whole is wrong: looks for the wrong bytes; exit 3 when it stays wrong."""

    def is_right() -> bool:
        return _compute(store, kind) == wanted

    if store.checks is None:  # else every block is proven, and the digest itself is wrong
        summary.say(f"the {kind} is not that of {where}: comparing with other sources")
        for text in mend(lookup, store, is_right, is_cheap=kind in store.sums.kinds):
            summary.say(text)
    if not is_right():
        is_bounded = store.waste.compared >= MAX_COMPARED_BYTES
        where_looked = f" in the {store.waste.compared >> 30} GiB compared" if is_bounded else ""
        raise DataError(
            f"{lookup.target.identity} fails verification: its {kind} is not {wanted} ({where}), "
            f"and no other source has better bytes{where_looked}. The partial file is kept for a "
            f"look; remove {store.part} to start over"
        )


def whole_checksum(store: ChunkStore, kind: str) -> str:
    """The checksum of the whole file, combined from those of its chunks."""
    return checksum.to_hex(kind, store.sums.of_chunks(kind, range(store.blocks.num_chunks)))


def _compute(store: ChunkStore, kind: str) -> str:
    if kind in store.sums.kinds:
        return whole_checksum(store, kind)
    return hash_file(store.fd, kind, store.blocks.size)
