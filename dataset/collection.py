"""Collections of a federation: listed with WebDAV, as a tree of files with their sizes."""

from __future__ import annotations

import logging
import re
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from urllib.parse import quote, unquote, urljoin, urlsplit

from dataset.connection import NETWORK_ERRORS, Pool, explain, get_document
from dataset.errors import DataError, PassingError, UserError
from dataset.federation import Target, Verdict
from dataset.lookup import Lookup

log = logging.getLogger("trainyard.fetch")

MAX_FILES = 2_000_000  # an ImageNet folder has 1.3 million
MAX_DEPTH = 32
RETRY_S = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0)


@dataclass(frozen=True)
class Entry:
    """One member of a collection; `path` is percent-encoded, from the root of the federation."""

    path: str
    size: int
    is_folder: bool


def parse_listing(body: bytes, folder: str) -> list[Entry]:
    """The members of a folder from a WebDAV answer; ValueError when it is none.

    The folder keeps the user's spelling: a server may write = + @ : , ( ) as they are or encoded.
    """
    try:
        root = ElementTree.fromstring(body)
    except ElementTree.ParseError as error:
        raise ValueError(f"not a listing ({error})") from None
    entries = []
    for response in root.iter("{DAV:}response"):
        href = _decode(urlsplit(response.findtext("{DAV:}href", "")).path)
        parent, _, name = href.rpartition("/")
        if parent != _decode(folder) or name in ("", ".", "..") or "\0" in name:
            continue  # the folder itself; and nothing from elsewhere is believed
        path = f"{folder.rstrip('/')}/{quote(name)}"
        is_folder = response.find(".//{DAV:}collection") is not None
        size = response.findtext(".//{DAV:}getcontentlength", "0")
        entries.append(Entry(path, 0 if is_folder else int(size), is_folder))
    return sorted(entries, key=lambda entry: entry.path)


def _decode(path: str) -> str:
    """A path as it is compared: not encoded, with single slashes and none at the end."""
    return re.sub("/+", "/", unquote(path)).rstrip("/")


def has_collection_form(target: Target) -> bool:
    """Whether the user wrote the URL as that of a collection: ?recursive or a slash at the end."""
    return target.recursive or target.path.endswith("/")


def looks_like_object(target: Target) -> bool:
    """Whether the name has an ending, as .tar: a look at the server is saved then."""
    return bool(PurePosixPath(unquote(target.path)).suffix)


class Lister:
    """Lists the folders of one federation or server; passing failures are tried again."""

    def __init__(self, lookup: Lookup, target: Target) -> None:
        self._lookup = lookup
        self._target = target
        self._pool = Pool(lookup.options.stall_s)
        self._base: tuple[str, bool] | None = None

    def is_collection(self) -> bool:
        """Asks the server what the path is; False when it cannot tell."""
        try:
            return any(entry.is_folder for entry in self._self_entry())
        except (*NETWORK_ERRORS, ValueError) as error:
            log.debug("cannot tell whether %s is a collection: %s", self._target.path, error)
            return False

    def walk(self) -> Iterator[Entry]:
        """Every file below the target, folder by folder."""
        folders = [(self._target.path.rstrip("/"), 0)]
        num_files = 0
        while folders:
            folder, depth = folders.pop()
            for entry in self._list(folder):
                if entry.is_folder and depth < MAX_DEPTH:
                    folders.append((entry.path, depth + 1))
                elif not entry.is_folder:
                    num_files += 1
                    yield entry
                if num_files > MAX_FILES:
                    raise UserError(f"more than {MAX_FILES} files below {self._target.identity}")

    def list_top(self) -> list[Entry]:
        """The members of the target itself, folders too."""
        return self._list(self._target.path.rstrip("/"))

    def _self_entry(self) -> list[Entry]:
        body = self._ask(self._target.path.rstrip("/"), depth=0)
        parent = self._target.path.rstrip("/").rpartition("/")[0]
        return parse_listing(body, parent)

    def _list(self, folder: str) -> list[Entry]:
        where = self._target.child(folder).identity
        for wait_s in (*RETRY_S, None):
            try:
                return parse_listing(self._ask(folder, depth=1), folder)
            except ValueError as error:
                raise DataError(f"{where} cannot be listed: {error}") from None
            except FileNotFoundError:
                problem = "404"
            except NETWORK_ERRORS as error:
                problem = explain(error)
            self._base = None
            if wait_s is not None:
                log.info("listing %s: %s", where, problem)
                time.sleep(wait_s)
        if problem == "404":
            raise UserError(f"{where} does not exist or has no listing; check the path")
        raise PassingError(f"{where} cannot be listed ({problem}); try again later")

    def _ask(self, path: str, depth: int) -> bytes:
        if self._base is None:
            self._base = self._find_base()
        base, wants_token = self._base
        url = base + path
        headers = {"Depth": str(depth), **self._lookup.headers(url, wants_token)}
        status, _, body, _ = get_document(self._pool, url, headers, method="PROPFIND")
        if status == 404:
            raise FileNotFoundError(404, "no such collection")
        if status != 207:
            raise OSError(f"the server answered {status} to PROPFIND")
        return body

    def _find_base(self) -> tuple[str, bool]:
        """(scheme://host of the server that lists, whether it wants the token)."""
        if self._target.scheme != "pelican":
            return urljoin(self._target.url, "/").rstrip("/"), False
        answer = self._lookup.ask(method="PROPFIND")
        if answer.verdict is Verdict.MISSING:
            raise FileNotFoundError(404, "no such namespace")
        if answer.verdict is not Verdict.FOUND:
            raise OSError(answer.reason)
        where = answer.namespace.collections_url or answer.sources[0]
        parts = urlsplit(where)
        return f"{parts.scheme}://{parts.netloc}", answer.namespace.require_token
