"""Listings: what a WebDAV server says is read, and nothing outside the folder is believed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dataset import collection
from dataset.collection import (
    Entry,
    Lister,
    has_collection_form,
    looks_like_object,
    parse_listing,
)
from dataset.connection import Pool
from dataset.errors import PassingError, UserError
from dataset.federation import parse_target
from dataset.lookup import Access, Lookup, Options
from dataset.tokens import TokenStore
from tests.dataset.dav_server import TreeHandler
from tests.dataset.director_server import directing, name_source
from tests.dataset.small_server import running

LISTING = """<?xml version="1.0" encoding="utf-8"?>
<D:multistatus xmlns:D="DAV:">{}</D:multistatus>"""
FILE = """<D:response><D:href>{}</D:href><D:propstat><D:prop>
<D:getcontentlength>{}</D:getcontentlength></D:prop></D:propstat></D:response>"""
FOLDER = """<D:response><D:href>{}</D:href><D:propstat><D:prop><D:getcontentlength>4096
</D:getcontentlength><D:resourcetype><D:collection/></D:resourcetype></D:prop></D:propstat>
</D:response>"""


def listing(*responses: str) -> bytes:
    return LISTING.format("".join(responses)).encode()


def test_files_and_folders_are_told_apart() -> None:
    body = listing(
        FOLDER.format("/ns/d/"), FOLDER.format("/ns/d/sub"), FILE.format("/ns/d/a%20b.bin", 7)
    )
    assert parse_listing(body, "/ns/d") == [
        Entry("/ns/d/a%20b.bin", 7, False),
        Entry("/ns/d/sub", 0, True),
    ]


def test_addresses_with_a_host_are_read_by_their_path() -> None:
    body = listing(FILE.format("https://origin:8443/ns/d/x", 1))
    assert parse_listing(body, "/ns/d/") == [Entry("/ns/d/x", 1, False)]


@pytest.mark.parametrize("folder", ["/ns/a=b+c@d:e,(f)!", "/ns/a%3Db%2Bc%40d%3Ae%2C%28f%29%21"])
@pytest.mark.parametrize("href", ["/ns/a=b+c@d:e,(f)!", "/ns/a%3Db%2Bc%40d:e,%28f%29!"])
def test_a_folder_is_known_in_every_spelling(folder: str, href: str) -> None:
    body = listing(FOLDER.format(f"{href}/"), FILE.format(f"{href}/x=1 (2).bin", 3))
    assert parse_listing(body, folder) == [Entry(f"{folder}/x%3D1%20%282%29.bin", 3, False)]


def test_a_slash_too_many_does_not_hide_a_folder() -> None:
    body = listing(FILE.format("/ns/d/x", 1))
    assert parse_listing(body, "/ns//d/") == [Entry("/ns//d/x", 1, False)]


@pytest.mark.parametrize(
    "href",
    [
        *("/ns/other/x", "/ns/d/../../etc/passwd", "/ns/d/..", "/ns/d/sub/x", "/ns/d/%2e%2e", ""),
        *("/ns/d/a%2Fb", "/ns/d/a%00b"),
    ],
)
def test_nothing_outside_the_folder_is_believed(href: str) -> None:
    assert parse_listing(listing(FILE.format(href, 1)), "/ns/d") == []


@pytest.mark.parametrize("body", [b"<html>", b"", b"\0"])
def test_a_page_that_is_no_listing_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError, match="not a listing"):
        parse_listing(body, "/ns/d")


def test_a_listing_with_entities_cannot_grow() -> None:
    bomb = b'<!DOCTYPE x [<!ENTITY a "' + b"a" * 1000 + b'"><!ENTITY b "&a;&a;">]><x>&b;</x>'
    assert parse_listing(bomb, "/ns") == []


def test_the_form_of_a_url_tells_a_collection() -> None:
    assert has_collection_form(parse_target("osdf:///ns/d/"))
    assert has_collection_form(parse_target("osdf:///ns/d?recursive"))
    assert not has_collection_form(parse_target("osdf:///ns/d"))
    assert looks_like_object(parse_target("osdf:///ns/a.tar"))
    assert not looks_like_object(parse_target("osdf:///ns/ILSVRC2012"))


NOWHERE = {"HOME": "/nonexistent", "XDG_RUNTIME_DIR": "/nonexistent"}
FAST = Options(stall_s=1.0, give_up_s=1.5, missing_s=0.7)
Failure = Callable[[Any], int]  # the status that a request gets; 0: it is answered well


class FailingHandler(TreeHandler):
    """A tree of one folder with one file, whose listings fail as a test wants."""

    files, folders = {"/ns/d/x": b"abc"}, frozenset({"/", "/ns", "/ns/d"})
    fail: Failure

    def do_PROPFIND(self) -> None:
        status = self.fail(self)
        if status:
            self.answer(status, b"")
        else:
            super().do_PROPFIND()


@contextmanager
def failing_lister(
    fail: Failure,
    token: Path | None = None,
    server: str = "XrootD/v5.5.3",
    path: str = "/ns/d",
    options: Options = FAST,
) -> Iterator[Lister]:
    """Lists through a director that always answers and a server that fails."""
    fields = {"fail": staticmethod(fail), "server_version": server, "sys_version": ""}
    with running(FailingHandler, **fields) as tree:
        decision = name_source(f"{tree}{path}")
        decision[1]["X-Pelican-Namespace"] = "namespace=/ns, require-token=true"
        with directing(lambda handler: (decision[0], dict(decision[1]))) as federation:
            target = parse_target(f"osdf://{path}", federation)
            access = Access(NOWHERE, TokenStore(NOWHERE, token))
            yield Lister(Lookup(target, access, options, Pool(1.0)), target)


def failing_for(seconds: float, status: int) -> Failure:
    end = time.monotonic() + seconds
    return lambda handler: status if time.monotonic() < end else 0


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collection, "FIRST_WAIT_S", 0.05)
    monkeypatch.setattr(collection, "MAX_WAIT_S", 0.2)


@pytest.mark.parametrize("status", [404, 403, 500, 503])
def test_a_failure_that_passes_costs_a_listing_nothing(status: int) -> None:
    with failing_lister(failing_for(0.3, status)) as lister:
        assert [entry.path for entry in lister.walk()] == ["/ns/d/x"]


@pytest.mark.parametrize("status", [404, 403, 500, 503])
def test_a_failure_that_passes_does_not_turn_a_folder_into_a_file(status: int) -> None:
    with failing_lister(failing_for(0.3, status)) as lister:
        assert lister.is_collection()


def test_an_object_is_no_collection() -> None:
    class ObjectHandler(FailingHandler):
        def do_PROPFIND(self) -> None:
            self.answer(207, listing(FILE.format("/ns/d/x", 3)))

    with (
        running(ObjectHandler) as tree,
        directing(lambda handler: name_source(f"{tree}/ns/d/x")) as federation,
    ):
        target = parse_target("osdf:///ns/d/x", federation)
        access = Access(NOWHERE, TokenStore(NOWHERE))
        assert not Lister(Lookup(target, access, FAST, Pool(1.0)), target).is_collection()


def test_a_passing_failure_is_borne_until_it_is_time_to_give_up() -> None:
    with failing_lister(lambda handler: 503) as lister:
        began = time.monotonic()
        with pytest.raises(PassingError, match="503"):
            list(lister.walk())
        assert FAST.give_up_s <= time.monotonic() - began < FAST.give_up_s + 2
    with failing_lister(lambda handler: 503) as lister, pytest.raises(PassingError):
        lister.is_collection()


def test_a_404_of_the_server_itself_is_believed_after_a_time() -> None:
    with failing_lister(lambda handler: 404) as lister:
        began = time.monotonic()
        with pytest.raises(UserError, match="does not exist"):
            list(lister.walk())
        assert FAST.missing_s <= time.monotonic() - began < FAST.give_up_s


@pytest.mark.parametrize("status", [404, 403])
def test_an_ingress_page_is_a_passing_failure(status: int) -> None:
    with (
        failing_lister(lambda handler: status, server="nginx") as lister,
        pytest.raises(PassingError),
    ):
        list(lister.walk())


def test_a_refused_listing_says_the_same_about_the_token_as_an_object() -> None:
    with failing_lister(lambda handler: 403) as lister, pytest.raises(UserError, match="no token"):
        list(lister.walk())


def test_a_renewed_token_is_used_for_a_listing(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("old")

    def fail(handler: Any) -> int:
        if handler.headers["Authorization"] == "Bearer new":
            return 0
        token.write_text("new")
        return 401

    with failing_lister(fail, token) as lister:
        assert [entry.path for entry in lister.walk()] == ["/ns/d/x"]


def test_a_server_without_listings_does_not_keep_an_object_waiting() -> None:
    patient = Options(stall_s=1.0, give_up_s=60.0, missing_s=60.0)
    with failing_lister(lambda handler: 405, options=patient) as lister:
        assert not lister.is_collection()
