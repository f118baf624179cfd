"""Parses a WebDAV server's listing of a folder, within bounds; no network."""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

from dataset.spelling import decode, encode
from dataset.untrusted import parse_count, shorten

MAX_XML_DEPTH = 32
MAX_XML_ELEMENTS = 1000  # of one member; XRootD sends about 15


@dataclass(frozen=True)
class Entry:
    """One member of a collection; `path` is percent-encoded, from the root of the federation."""

    path: str
    size: int | None  # None: the listing does not say it
    is_folder: bool


def parse_listing(body: bytes, folder: str) -> list[Entry]:
    """The members of a folder from a WebDAV answer; ValueError if it is not a listing.

    The folder keeps the user's spelling: a server may send = + @ : , ( ) encoded or not.
    """
    wanted = _split(folder)
    entries: dict[str, Entry] = {}
    has_folder = False
    for response in _iter_responses(body):
        href = urlsplit(response.findtext("{DAV:}href", "")).path
        parts = _split(href)
        if parts[: len(wanted)] != wanted or not all(map(_is_name, parts)):
            raise ValueError(f"the listing names {shorten(href)}, which cannot be in {folder}")
        if len(parts) != len(wanted) + 1:  # the folder itself, or what its own folders list, too
            has_folder = has_folder or parts == wanted
            continue
        entry = _read_member(response, f"{folder.rstrip('/')}/{encode(parts[-1])}", href)
        if entries.setdefault(parts[-1], entry) != entry:  # which of the two would be fetched?
            raise ValueError(f"the listing names {entry.path} twice, and differently")
    if not entries and not has_folder:  # RFC 4918, 9.1: it is always in its listing
        raise ValueError(f"the listing does not name {folder} itself")
    return sorted(entries.values(), key=lambda entry: entry.path)


def _iter_responses(body: bytes) -> Iterator[ElementTree.Element]:
    """Each <response> of the answer, forgotten once it is read: a large listing needs no tree."""
    depth = num_elements = 0
    top: ElementTree.Element | None = None
    try:
        for event, element in ElementTree.iterparse(io.BytesIO(body), events=("start", "end")):
            top = element if top is None else top
            is_start = event == "start"
            depth += 1 if is_start else -1
            num_elements += is_start
            if depth > MAX_XML_DEPTH or num_elements > MAX_XML_ELEMENTS:
                raise ValueError("not a listing (too many elements in one another)")
            if not is_start and depth <= 1:
                if element.tag == "{DAV:}response":
                    yield element
                top.clear()
                num_elements = 0
    except ElementTree.ParseError as error:
        raise ValueError(f"not a listing ({error})") from None


def _read_member(response: ElementTree.Element, path: str, href: str) -> Entry:
    status = response.findtext("{DAV:}status")
    if not _is_good(status):
        raise ValueError(f"the listing gives {status!r} for {path}")
    known = [s for s in response.iterfind("{DAV:}propstat") if _is_good(s.findtext("{DAV:}status"))]
    kinds = [kind for s in known if (kind := s.find(".//{DAV:}resourcetype")) is not None]
    # A server that names no types ends the path of a folder with a slash.
    is_folder = any(s.find(".//{DAV:}collection") is not None for s in known) or (
        not kinds and href.endswith("/")
    )
    sizes = [s.findtext(".//{DAV:}getcontentlength", "").strip() for s in known]
    size = next((parse_count(text) for text in sizes if text), None)
    return Entry(path, 0 if is_folder else size, is_folder)


def _is_good(status: str | None) -> bool:
    """Whether a status line such as 'HTTP/1.1 200 OK' means success, as a missing one does."""
    return status is None or re.match(r"\s*HTTP/\S+\s+2\d\d\b", status) is not None


def _split(path: str) -> list[str]:
    """The parts of a path as they are compared: not encoded, without empty ones."""
    return [decode(part) for part in path.split("/") if part]


def _is_name(part: str) -> bool:
    """Whether a file or folder can have this name."""
    return part not in (".", "..") and "/" not in part and "\0" not in part
