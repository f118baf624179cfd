"""Names of objects as bytes: UTF-8 or not, two of them are never one file."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import quote, unquote_to_bytes

import pytest

from dataset.federation.pelican import parse_target
from dataset.fetch.request import Request
from dataset.fetch.urls import fetch_urls
from dataset.spelling import decode, encode
from dataset.transfer.journal import CHUNK
from tests.dataset.dav_server import FOLDER, RESPONSE, TreeHandler
from tests.dataset.object_fetch import FAST, NOWHERE, fetch
from tests.dataset.small_server import running

NAMES = (b"a\xff", b"a\xfe", "é\n".encode(), b"a%41", b" #?;&=+")


@pytest.mark.parametrize("size", [1000, 5 * CHUNK], ids=["small", "large"])
def test_names_that_are_no_utf8_stay_apart(size: int, tmp_path: Path) -> None:
    files = {name: os.urandom(size) for name in NAMES}

    class Server(TreeHandler):
        def do_PROPFIND(self) -> None:
            members = [RESPONSE.format("/d/", 1, FOLDER)]
            members += [RESPONSE.format(f"/d/{quote(name)}", size, "") for name in files]
            body = f'<D:multistatus xmlns:D="DAV:">{"".join(members)}</D:multistatus>'
            self.answer(207, body.encode())

        def do_GET(self) -> None:
            self.content = files[unquote_to_bytes(self.path)[len("/d/") :]]
            self.serve()

    with running(Server) as url:
        for _ in range(2):  # the second start finds all of them here
            fetch_urls([f"{url}/d/"], Request(tmp_path, FAST, environ=NOWHERE))
        fetch(f"{url}/d/a%FF", tmp_path / "single")
    found = {os.fsencode(path.name): path.read_bytes() for path in (tmp_path / "d").iterdir()}
    assert found == files
    assert Path(tmp_path, "single", os.fsdecode(b"a\xff")).read_bytes() == files[b"a\xff"]


def test_a_local_file_of_any_name_is_copied(tmp_path: Path) -> None:
    source = tmp_path / os.fsdecode(b"a\xff #?.bin")
    source.write_bytes(b"x")
    fetch(str(source), tmp_path / "out")
    assert (tmp_path / "out" / source.name).read_bytes() == b"x"


def test_spelling_keeps_every_byte() -> None:
    name = os.fsdecode(bytes(range(1, 256)))
    assert decode(encode(name)) == name
    assert parse_target("https://host/d/\udcff.bin").path == "/d/%FF.bin"
