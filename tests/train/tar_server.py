"""The tars of a folder on a small server, for runs that stream: a fake, in place of XRootD."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import ClassVar

from tests.dataset.small_server import Handler, running

Misbehave = Callable[[Handler], bool]


class FolderHandler(Handler):
    """Serves the files of a folder, with ranges."""

    files: ClassVar[dict[str, bytes]] = {}

    def serve(self) -> None:
        content = self.files.get(self.path.lstrip("/"))
        if content is None:
            answer(self, 404)
            return
        self.content = content
        with suppress(ConnectionError):  # the fetcher was killed
            super().serve()


def answer(handler: Handler, status: int) -> bool:
    """Answers with nothing but a status."""
    handler.send_response(status)
    handler.send_header("Content-Length", "0")
    handler.end_headers()
    return True


@contextmanager
def serving_folder(
    folder: Path, misbehave: Misbehave = lambda handler: False
) -> Iterator[tuple[str, list[dict[str, str]]]]:
    """(address, the requests so far) of the files of a folder."""
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    seen: list[dict[str, str]] = []
    faults = staticmethod(misbehave)
    with running(FolderHandler, files=files, misbehave=faults, seen=seen) as url:
        yield url, seen
