"""Sizes, listings, look-ups, digests and small files have the deadline and the rival of a block.

Time limits are long here where a rival must help, and give-up is far away: what would wait for
them ends with an error instead.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from dataset import checksum
from dataset.federation import collection, document
from dataset.federation.document import ask_rivals
from dataset.federation.framing import ProtocolError
from dataset.federation.lookup import Options
from dataset.federation.pelican import DISCOVERY_PATH
from dataset.fetch import digests, size, small_digests, small_files
from dataset.fetch.request import Request, Summary
from dataset.fetch.urls import fetch_urls
from tests.dataset.dav_server import TreeHandler, serving_tree
from tests.dataset.director_server import Decision, DirectorHandler
from tests.dataset.object_fetch import NOWHERE
from tests.dataset.small_server import Handler, running

CONTENT = b"the object " * 1000
HASTY = Options(stall_s=0.5, give_up_s=30.0, missing_s=5.0, connections=2)
SLOW = Options(stall_s=120.0, give_up_s=30.0, missing_s=5.0, connections=2)
Behave = Callable[[Any], bool]

DRIPS = {
    "a head": (b"HTTP/1.1 206 Partial Content\r\n", b"X: y\r\n"),
    "100 Continue": (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "a first line": (b"", b"H"),
}


@pytest.fixture
def over() -> Iterator[threading.Event]:
    """Set when the test is over: servers that drip for ever end then."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def quick_rivals(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (document, size, small_files, collection, small_digests):
        monkeypatch.setattr(module, "RIVAL_S", 0.1)


def drip(handler: Handler, over: threading.Event, kind: str = "a head") -> bool:
    """Sends a little again and again until the client leaves."""
    handler.close_connection = True
    start, piece = DRIPS[kind]
    try:
        handler.wfile.write(start)
        while not over.wait(0.02):
            handler.wfile.write(piece)
    except OSError:
        pass
    return True


def fetch(url: str, out: Path, options: Options, federation: str | None = None) -> list[Summary]:
    return fetch_urls([url], Request(out, options, federation=federation, environ=NOWHERE))


@pytest.mark.parametrize("kind", DRIPS)
def test_a_size_that_drips_once_is_asked_again(
    kind: str, tmp_path: Path, over: threading.Event
) -> None:
    asked: list[str] = []

    def misbehave(handler: Handler) -> bool:
        asked.append(handler.headers["Range"])
        return len(asked) == 1 and drip(handler, over, kind)

    with running(Handler, content=CONTENT, misbehave=staticmethod(misbehave)) as url:
        fetch(f"{url}/object.bin", tmp_path, HASTY)
    assert asked[:2] == ["bytes=0-0", "bytes=0-0"]
    assert (tmp_path / "object.bin").read_bytes() == CONTENT


@contextmanager
def federation_of(*caches: Behave, origin: Behave = lambda handler: False) -> Iterator[str]:
    """A federation whose caches and origin misbehave so."""
    with ExitStack() as stack:

        def serve(behave: Behave) -> str:
            server = running(Handler, content=CONTENT, misbehave=staticmethod(behave))
            return stack.enter_context(server) + "/ns/object.bin"

        named = [serve(behave) for behave in caches]
        source = serve(origin)

        def decide(handler: Any) -> Decision:
            urls = [source] if "directread" in handler.path else named
            links = (f'<{url}>; rel="duplicate"; pri={i}' for i, url in enumerate(urls))
            return 307, {
                "Link": ", ".join(links),
                "X-Pelican-Namespace": "namespace=/ns, require-token=false",
            }

        yield stack.enter_context(running(DirectorHandler, decide=staticmethod(decide)))


@pytest.mark.usefixtures("quick_rivals")
@pytest.mark.parametrize("num_dripping", [1, 2, 3])
def test_caches_that_drip_the_size_are_not_waited_for(
    num_dripping: int, tmp_path: Path, over: threading.Event
) -> None:
    """Of three caches the first ones drip their first answer; with all three the origin helps."""

    def make(number: int) -> Behave:
        asked: list[str] = []

        def behave(handler: Any) -> bool:
            asked.append(handler.path)
            return number < num_dripping and len(asked) == 1 and drip(handler, over)

        return behave

    with federation_of(*(make(number) for number in range(3))) as federation:
        fetch("osdf:///ns/object.bin", tmp_path, SLOW, federation)
    assert (tmp_path / "object.bin").read_bytes() == CONTENT


@pytest.mark.usefixtures("quick_rivals")
@pytest.mark.parametrize("question", [DISCOVERY_PATH, "/ns/object.bin"])
def test_a_look_up_that_drips_once_is_asked_again(
    question: str, tmp_path: Path, over: threading.Event
) -> None:
    asked: list[str] = []

    class Dripping(DirectorHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            if not (self.path == question and asked.count(question) == 1 and drip(self, over)):
                super().do_GET()

    with running(Handler, content=CONTENT) as cache:

        def decide(handler: Any) -> Decision:
            namespace = "namespace=/ns, require-token=false"
            return 307, {"Location": f"{cache}/ns/object.bin", "X-Pelican-Namespace": namespace}

        with running(Dripping, decide=staticmethod(decide)) as federation:
            fetch("osdf:///ns/object.bin", tmp_path, SLOW, federation)
    assert asked.count(question) >= 2
    assert (tmp_path / "object.bin").read_bytes() == CONTENT


@pytest.mark.usefixtures("quick_rivals")
def test_a_listing_that_drips_once_is_asked_again(tmp_path: Path, over: threading.Event) -> None:
    asked: list[str] = []

    class Dripping(TreeHandler):
        files, folders = {"/d/x": b"abc"}, frozenset({"/", "/d"})

        def do_PROPFIND(self) -> None:
            asked.append(self.path)
            if not (len(asked) == 1 and drip(self, over)):
                super().do_PROPFIND()

    with running(Dripping) as url:
        fetch(f"{url}/d/", tmp_path, SLOW)
    assert (tmp_path / "d" / "x").read_bytes() == b"abc"


@pytest.mark.usefixtures("quick_rivals")
def test_a_cache_that_drips_small_files_is_not_waited_for(
    tmp_path: Path, over: threading.Event
) -> None:
    files = {f"/ns/d/{n}.txt": f"file {n}".encode() for n in range(20)}
    folders = frozenset({"/", "/ns", "/ns/d"})
    dripped: list[str] = []

    class Dripping(TreeHandler):
        def do_GET(self) -> None:
            if self.headers["Range"] == "bytes=0-0":  # its size is told, its bytes are not
                super().do_GET()
            else:
                dripped.append(self.path)
                drip(self, over)

    with (
        running(Dripping, files=files, folders=folders) as bad,
        serving_tree(files) as (good, _),
    ):

        def decide(handler: Any) -> Decision:
            path = handler.path.partition("?")[0]
            links = [
                f'<{url}{path}>; rel="duplicate"; pri={i}' for i, url in enumerate([bad, good])
            ]
            return 307, {
                "Link": ", ".join(links),
                "X-Pelican-Namespace": f"namespace=/ns, collections-url={good}",
            }

        with running(DirectorHandler, decide=staticmethod(decide)) as federation:
            (summary,) = fetch("osdf:///ns/d/", tmp_path, SLOW, federation)
    assert dripped and summary.hedges >= 1
    assert {path: (tmp_path / path[4:]).read_bytes() for path in files} == files


@pytest.mark.usefixtures("quick_rivals")
def test_an_origin_that_drips_its_digest_gives_way_to_a_cache(
    tmp_path: Path, over: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checksum, "HAS_CRC32C", False)
    monkeypatch.setattr(digests, "RIVAL_SHARE", 0.001)

    class Cache(Handler):
        content, is_origin = CONTENT, False

        def do_HEAD(self) -> None:
            if self.is_origin:
                drip(self, over)
                return
            self.send_response(200)
            self.send_header("Digest", f"adler32={zlib.adler32(CONTENT):08x}")
            self.send_header("Content-Length", "0")
            self.end_headers()

    with running(Cache) as cache, running(Cache, is_origin=True) as origin:

        def decide(handler: Any) -> Decision:
            url = origin if "directread" in handler.path else cache
            namespace = "namespace=/ns, require-token=false"
            return 307, {"Location": f"{url}/ns/object.bin", "X-Pelican-Namespace": namespace}

        with running(DirectorHandler, decide=staticmethod(decide)) as federation:
            (summary,) = fetch("osdf:///ns/object.bin", tmp_path, SLOW, federation)
    assert summary.verified == [f"adler32 ({cache})"]


def test_rivals_are_asked_in_turn() -> None:
    never = threading.Event()
    hang = lambda: "late" if never.wait(60) else None  # noqa: E731

    def fail() -> str:
        raise ProtocolError("broken")

    assert ask_rivals([lambda: None, lambda: "second"], 60.0, 60.0) == "second"
    assert ask_rivals([hang, lambda: "rival"], 0.01, 60.0) == "rival"
    assert ask_rivals([hang, hang], 0.01, 0.05) is None
    with pytest.raises(ProtocolError, match="broken"):
        ask_rivals([fail, lambda: "not asked"], 60.0, 60.0)
    never.set()


@pytest.mark.parametrize("content", [b"", CONTENT])
def test_an_empty_object_is_believed_of_a_plain_request_and_not_of_an_impossible_range(
    content: bytes, tmp_path: Path
) -> None:
    """XRootD 5.5 answers so to a range of an empty object, and sends no byte of the one it says."""

    def answer_like_xrootd(handler: Handler) -> bool:
        if handler.headers.get("Range") != "bytes=0-0":
            return False
        handler.send_response(206)
        handler.send_header("Content-Range", "bytes 0-0/0")
        handler.send_header("Content-Length", "1")
        handler.end_headers()
        return True

    with running(Handler, content=content, misbehave=staticmethod(answer_like_xrootd)) as url:
        fetch(f"{url}/object.bin", tmp_path, SLOW)
    assert (tmp_path / "object.bin").read_bytes() == content
