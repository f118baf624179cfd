"""A small WebDAV server for tests of collections: a fake; the real XRootD is in tests/cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import Any, ClassVar
from urllib.parse import quote, unquote

from tests.dataset.small_server import Handler, running

RESPONSE = """<D:response><D:href>{}</D:href><D:propstat><D:prop>
<D:getcontentlength>{}</D:getcontentlength>{}</D:prop></D:propstat></D:response>"""
FOLDER = "<D:resourcetype><D:collection/></D:resourcetype>"


class TreeHandler(Handler):
    """Lists folders and serves the files of a mapping; `spell` encodes the paths of a listing."""

    files: Mapping[str, bytes] = {}
    folders: frozenset[str] = frozenset()
    spell: Callable[[str], str] = staticmethod(quote)
    gets: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        path = unquote(self.path)
        self.gets.append(path)
        if path in self.files:
            self.content = self.files[path]
            self.serve()
        else:
            self.answer(404, b"")

    def do_PROPFIND(self) -> None:
        path = unquote(self.path).rstrip("/") or "/"
        members = [RESPONSE.format(self.spell(path) + "/", 4096, FOLDER)]
        for name in sorted({*self.files, *self.folders} - {"/"}):
            if str(PurePosixPath(name).parent) == path:
                kind = FOLDER if name in self.folders else ""
                size = len(self.files.get(name, b""))
                members.append(RESPONSE.format(self.spell(name), size, kind))
        body = f'<D:multistatus xmlns:D="DAV:">{"".join(members)}</D:multistatus>'
        self.answer(207 if path in self.folders else 404, body.encode())

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def serving_tree(
    files: Mapping[str, bytes],
    spell: Callable[[str], str] = quote,
    empty_folders: tuple[str, ...] = (),
) -> Iterator[tuple[str, list[str]]]:
    """(address of the root, the decoded paths of all GETs so far) of a tree on loopback."""
    gets: list[str] = []
    parents = {str(parent) for path in files for parent in PurePosixPath(path).parents}
    folders = frozenset(parents | {*empty_folders})
    how: dict[str, Any] = {"spell": staticmethod(spell), "gets": gets}
    with running(TreeHandler, files=files, folders=folders, **how) as url:
        yield url, gets
