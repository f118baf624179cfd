"""The objects of the mini-OSDF: made at the origin, each name for one content."""

from __future__ import annotations

import hashlib
import shutil
import time
from pathlib import Path
from urllib.parse import quote

from tests.cluster.osdf.layout import SERVERS, Layout


def put_object(layout: Layout, path: str, content: bytes | Path) -> None:
    """Makes an object from bytes or a file; a used name is refused for another content.

    Objects are immutable in a federation. A cache that was asked for the old one lately would mix
    both, although it was removed from its disk (seen with XRootD 5.5: for 30 s and more).
    """
    digest = _digest(content)
    known = layout.folder / "names" / quote(path, safe="")
    if known.exists() and known.read_text() != digest:
        raise ValueError(
            f"{path} was put before with another content, which caches may still serve; "
            "choose a new name, or start the service again (python -m tests.cluster down osdf)"
        )
    known.parent.mkdir(exist_ok=True)
    _write(layout, path, content)
    known.write_text(digest)


def remove_object(layout: Layout, path: str) -> None:
    """Removes an object, or a folder of them, from the origin and from the disks of the caches."""
    for server in SERVERS:
        place = layout.data(server) / path.strip("/")
        if place.is_dir():
            shutil.rmtree(place, ignore_errors=True)
        for file in (place, place.with_name(place.name + ".cinfo")):
            file.unlink(missing_ok=True)


def _write(layout: Layout, path: str, content: bytes | Path) -> None:
    target = layout.data("origin") / path.lstrip("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.part")
    if isinstance(content, Path):
        shutil.copyfile(content, part)
    else:
        part.write_bytes(content)
    for made in (part, *target.parents):
        if made == layout.data("origin"):
            break
        shutil.chown(made, "xrootd", "xrootd")
    part.replace(target)


def _digest(content: bytes | Path) -> str:
    if isinstance(content, bytes):
        return hashlib.md5(content).hexdigest()
    digest = hashlib.md5()
    with open(content, "rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def wait_until_kept(cache: str) -> None:
    """Waits until the cache has written what it answers from its memory, and says so of itself."""
    end_s = time.monotonic() + 10
    while time.monotonic() < end_s:
        files = [path for path in Path(cache).rglob("x*") if path.name in ("x", "x.cinfo")]
        if len(files) >= 2 and all(path.stat().st_blocks for path in files):
            break
        time.sleep(0.05)
    time.sleep(0.5)
