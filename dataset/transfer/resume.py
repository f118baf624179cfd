"""The partial file of an earlier start, and how much of it can be used."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from dataset.own_names import (
    doubted_path,
    journal_path,
    list_units,
    older_path,
    part_path,
    units_path,
)
from dataset.transfer.chunk_sums import compute_all
from dataset.transfer.journal import CHUNK, Arrivals, chunk_length, read_boot_id, read_journal
from dataset.transfer.own_files import hold_part

Say = Callable[[str], None]
MAX_OLDER_BYTES = 255


def resume(
    path: Path,
    identity: str,
    size: int,
    kinds: Sequence[str],
    say: Say,
    has_readers: bool = False,
) -> Arrivals:
    """What an earlier start left that can be used; with nothing left, all chunks are missing.

    After a kill the journal's chunks are taken as claims: the transfer reads them while it fetches
    the others. After a reboot, on another node or after a disk error they are read here, from the
    disk itself. Readers would wait for that for minutes, so for them such chunks are claims, too,
    and come in the order of need.
    """
    fresh = Arrivals(identity, size, tuple(kinds), read_boot_id())
    part, found = part_path(path), read_journal(journal_path(path))
    if found is None or not part.is_file():
        return fresh
    if found.identity != identity:
        say(f"{part.name} belongs to {found.identity}; starting over")
        return fresh
    if found.size != size:
        say(f"the object had {found.size} bytes and has {size} now; starting over")
        return fresh
    if part.stat().st_size != size:
        say(f"{part.name} has {part.stat().st_size} bytes instead of {size}; starting over")
        return fresh
    was_killed_only = found.boot_id == fresh.boot_id != ""
    if has_readers and not was_killed_only and found.kinds == fresh.kinds:
        with open(part, "rb", buffering=0) as file:
            _forget_pages(file.fileno())
        # The journal keeps its boot: what is not read by the end of this start is doubted again.
        say(f"an earlier start left {len(found.chunks)} MiB, which are read again by need")
    elif not was_killed_only or found.kinds != fresh.kinds:
        num_before = len(found.chunks)
        found = _check_again(part, found, fresh, was_killed_only)
        say(f"checked {num_before} MiB of an earlier start: {len(found.chunks)} MiB are right")
    elif found.chunks:
        say(f"an earlier start left {len(found.chunks)} MiB")
    return found


def _check_again(part: Path, found: Arrivals, fresh: Arrivals, is_sure: bool) -> Arrivals:
    """Reads every journalled chunk; keeps those with the right bytes, with the new checksums.

    A checksum that cannot be computed here (no crc32c package) counts as right only if the
    machine was not rebooted.
    """
    checked = Arrivals(fresh.identity, fresh.size, fresh.kinds, fresh.boot_id, were_read=True)
    checked.sources, checked.digests, checked.etags = found.sources, found.digests, found.etags
    buffer = memoryview(bytearray(CHUNK))
    with open(part, "rb", buffering=0) as file:
        if not is_sure:
            _forget_pages(file.fileno())
        for chunk, (source, values) in sorted(found.chunks.items()):
            view = buffer[: chunk_length(chunk, fresh.size)]
            if not read_chunk(file.fileno(), view, chunk * CHUNK):
                continue
            known = _try_compute(found.kinds, view)
            if known == values or (known is None and is_sure):
                checked.chunks[chunk] = (source, compute_all(fresh.kinds, view))
    return checked


def _forget_pages(fd: int) -> None:
    """Drops cached pages, so that later reads come from the disk.

    A page that could not be written stays in memory and would look right. Pages that are still to
    be written are written first; if that fails, the reads will show it.
    """
    with suppress(OSError):
        os.fdatasync(fd)
    with suppress(OSError):  # only a hint, which not every file system follows
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def read_chunk(fd: int, view: memoryview, offset: int) -> bool:
    """Whether all bytes of a chunk could be read; if not, it is fetched again."""
    try:
        return os.preadv(fd, [view], offset) == len(view)
    except OSError:
        return False


def _try_compute(kinds: Sequence[str], view: memoryview) -> tuple[int, ...] | None:
    """None when a checksum of the earlier start cannot be computed here (no crc32c package)."""
    try:
        return compute_all(kinds, view)
    except ValueError:
        return None


@contextmanager
def holding_part(path: Path) -> Iterator[int]:
    """The descriptor of the partial file, locked against other processes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = hold_part(part_path(path))
    try:
        yield fd
    finally:
        os.close(fd)


def adopt_older(path: Path, identity: str, is_object: Callable[[Path], bool]) -> None:
    """Renames the files that an earlier version left of this object to today's names.

    A NAME.part without a journal of ours is not ours, and stays.
    """
    journal = journal_path(path)
    names = (part_path(path), doubted_path(journal), journal)  # a kill between two does no harm
    older = {new: older_path(path, new) for new in names}
    if len(os.fsencode(older[names[1]].name)) > MAX_OLDER_BYTES:
        return  # too long a name: there cannot be any
    found = read_journal(older[journal])
    if found is None or found.identity != identity or any(map(is_object, older.values())):
        return
    for new in names:
        if older[new].exists() and not new.exists():
            older[new].replace(new)


def discard_units(path: Path, say: Say) -> None:
    """Removes the units that a stream with little disk has left: now all of the tar comes.

    Their bytes are not taken over, as a unit does not end where a chunk of the journal does.
    """
    units = list_units(path)
    if not units:
        return
    num_bytes = 0
    for file in units:
        num_bytes += file.stat().st_size
        file.unlink()
    with suppress(OSError):  # a file of the user in it
        units_path(path).rmdir()
    say(f"{path.name} comes whole: removed {num_bytes / 1e9:.2f} GB of single units of it")


def discard(path: Path) -> None:
    """Removes the partial file; its journals first, so that they never describe other bytes."""
    journal = journal_path(path)
    for leftover in (doubted_path(journal), journal, part_path(path)):
        if leftover.exists():  # a read-only folder with a finished file must do
            leftover.unlink()
