"""Listings: what a WebDAV server says is read, and nothing outside the folder is believed."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from dataset.errors import PassingError, UserError
from dataset.federation import collection
from dataset.federation.collection import Lister, has_collection_form, looks_like_object
from dataset.federation.lookup import Lookup, Options
from dataset.federation.pelican import parse_target
from dataset.federation.tokens import Access, TokenStore
from dataset.federation.webdav import Entry, parse_listing
from tests.dataset.dav_server import TreeHandler
from tests.dataset.director_server import directing, name_source
from tests.dataset.object_fetch import NOWHERE
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
        *("/ns/other/x", "/ns/d/../../etc/passwd", "/ns/d/..", "/ns/d/%2e%2e", "", "/", "/ns"),
        *("/ns/d/a%2Fb", "/ns/d/a%00b", "/prefix/ns/d/x", "/ns/d%2Fx"),
    ],
)
def test_a_listing_that_names_what_is_not_in_its_folder_is_refused_as_a_whole(href: str) -> None:
    body = listing(FOLDER.format("/ns/d/"), FILE.format("/ns/d/x", 1), FILE.format(href, 1))
    with pytest.raises(ValueError, match="cannot be in /ns/d"):  # else files would be left out
        parse_listing(body, "/ns/d")


def test_a_listing_that_goes_deeper_than_asked_for_gives_the_members_alone() -> None:
    body = listing(FOLDER.format("/ns/d/sub/"), FILE.format("/ns/d/sub/x", 1))
    assert parse_listing(body, "/ns/d") == [Entry("/ns/d/sub", 0, True)]


def test_a_listing_without_anything_is_no_empty_folder() -> None:
    assert parse_listing(listing(FOLDER.format("/ns/d/")), "/ns/d") == []
    with pytest.raises(ValueError, match="itself"):
        parse_listing(listing(), "/ns/d")


@pytest.mark.parametrize("body", [b"<html>", b"", b"\0"])
def test_a_page_that_is_no_listing_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError, match="not a listing"):
        parse_listing(body, "/ns/d")


PROPS = "<D:propstat><D:prop>{}</D:prop><D:status>HTTP/1.1 {}</D:status></D:propstat>"
BARE = "<D:response><D:href>{}</D:href>{}</D:response>"


@pytest.mark.parametrize(
    "props",
    [
        *("", PROPS.format("", "200 OK"), PROPS.format("<D:getcontentlength/>", "200 OK")),
        PROPS.format("<D:getcontentlength/>", "404 Not Found"),
        PROPS.format("<D:getcontentlength>0</D:getcontentlength>", "403 Forbidden"),
    ],
)
def test_a_size_that_is_not_told_is_unknown_and_not_0(props: str) -> None:
    assert parse_listing(listing(BARE.format("/d/x", props)), "/d") == [Entry("/d/x", None, False)]


def test_a_path_with_a_slash_at_its_end_is_a_folder_where_no_types_are_told() -> None:
    assert parse_listing(listing(BARE.format("/d/x/", "")), "/d") == [Entry("/d/x", 0, True)]


@pytest.mark.parametrize("size", ["-3", "\u00b2", "1e3", "9" * 5000, "5 bytes"])
def test_a_size_that_is_no_number_is_refused(size: str) -> None:
    with pytest.raises(ValueError, match="number"):
        parse_listing(listing(FILE.format("/d/x", size)), "/d")


def test_a_member_that_the_server_could_not_read_is_not_left_out() -> None:
    refused = BARE.format("/d/x", "<D:status>HTTP/1.1 403 Forbidden</D:status>")
    with pytest.raises(ValueError, match="403"):
        parse_listing(listing(refused), "/d")


def test_a_member_that_is_named_twice_is_one_or_an_error() -> None:
    twice = listing(FILE.format("/d/x%41", 1), FILE.format("/d/xA", 1))
    assert parse_listing(twice, "/d") == [Entry("/d/xA", 1, False)]
    for other in (FILE.format("/d/x", 2), FOLDER.format("/d/x")):
        with pytest.raises(ValueError, match="twice"):
            parse_listing(listing(FILE.format("/d/x", 1), other), "/d")


@pytest.mark.parametrize("piece", ["<a>", "<a/>"])
def test_a_listing_without_end_is_refused_before_it_is_read_whole(piece: str) -> None:
    with pytest.raises(ValueError, match="too many elements"):
        parse_listing(f'<m xmlns="DAV:"><response>{piece * 100_000}'.encode(), "/d")


def test_a_listing_with_entities_cannot_grow() -> None:
    bomb = b'<!DOCTYPE x [<!ENTITY a "' + b"a" * 1000 + b'"><!ENTITY b "&a;&a;">]><x>&b;</x>'
    with pytest.raises(ValueError, match="itself"):  # read, and without a member
        parse_listing(bomb, "/ns")


def test_the_form_of_a_url_tells_a_collection() -> None:
    assert has_collection_form(parse_target("osdf:///ns/d/"))
    assert has_collection_form(parse_target("osdf:///ns/d?recursive"))
    assert not has_collection_form(parse_target("osdf:///ns/d"))
    assert looks_like_object(parse_target("osdf:///ns/a.tar"))
    assert not looks_like_object(parse_target("osdf:///ns/ILSVRC2012"))


FAST = Options(stall_s=1.0, give_up_s=1.5, missing_s=0.7)
PATIENT = Options(stall_s=60.0, give_up_s=600.0, missing_s=60.0)
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
    fields: dict[str, Any] = {"fail": staticmethod(fail), "server_version": server}
    with running(FailingHandler, sys_version="", **fields) as tree:
        decision = name_source(f"{tree}{path}")
        decision[1]["X-Pelican-Namespace"] = "namespace=/ns, require-token=true"
        with directing(lambda handler: (decision[0], dict(decision[1]))) as federation:
            target = parse_target(f"osdf://{path}", federation)
            access = Access(NOWHERE, TokenStore(NOWHERE, token))
            yield Lister(Lookup(target, access, options), target)


def failing_first(times: int, status: int) -> Failure:
    """Fails the first requests, however fast they come."""
    left = itertools.chain([status] * times, itertools.repeat(0))
    return lambda handler: next(left)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collection, "FIRST_WAIT_S", 0.05)
    monkeypatch.setattr(collection, "MAX_WAIT_S", 0.2)


@pytest.mark.parametrize("status", [404, 403, 500, 503])
def test_a_failure_that_passes_costs_a_listing_nothing(status: int) -> None:
    with failing_lister(failing_first(3, status), options=PATIENT) as lister:
        assert [entry.path for entry in lister.walk()] == ["/ns/d/x"]


@pytest.mark.parametrize("status", [404, 403, 500, 503])
def test_a_failure_that_passes_does_not_turn_a_folder_into_a_file(status: int) -> None:
    with failing_lister(failing_first(3, status), options=PATIENT) as lister:
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
        assert not Lister(Lookup(target, access, PATIENT), target).is_collection()


def test_a_passing_failure_is_borne_until_it_is_time_to_give_up() -> None:
    with failing_lister(lambda handler: 503) as lister:
        began = time.monotonic()
        with pytest.raises(PassingError, match="503"):
            list(lister.walk())
        assert time.monotonic() - began >= FAST.give_up_s  # never earlier, on any machine
    with failing_lister(lambda handler: 503) as lister, pytest.raises(PassingError):
        lister.is_collection()


def test_a_404_of_the_server_itself_is_believed_after_a_time() -> None:
    soon = replace(PATIENT, missing_s=0.7)  # long before it is time to give up
    with failing_lister(lambda handler: 404, options=soon) as lister:
        began = time.monotonic()
        with pytest.raises(UserError, match="does not exist"):
            list(lister.walk())
        assert time.monotonic() - began >= soon.missing_s


@pytest.mark.parametrize("status", [404, 403])
def test_an_ingress_page_is_a_passing_failure(status: int) -> None:
    with (
        failing_lister(lambda handler: status, server="nginx") as lister,
        pytest.raises(PassingError),
    ):
        list(lister.walk())


def test_a_refused_listing_says_the_same_about_the_token_as_an_object() -> None:
    soon = replace(PATIENT, missing_s=0.7)
    with (
        failing_lister(lambda handler: 403, options=soon) as lister,
        pytest.raises(UserError, match="no token"),
    ):
        list(lister.walk())


def test_a_renewed_token_is_used_for_a_listing(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("old")

    def fail(handler: Any) -> int:
        if handler.headers["Authorization"] == "Bearer new":
            return 0
        token.write_text("new")
        return 401

    with failing_lister(fail, token, options=PATIENT) as lister:
        assert [entry.path for entry in lister.walk()] == ["/ns/d/x"]


def test_a_server_without_listings_does_not_keep_an_object_waiting() -> None:
    patient = Options(stall_s=1.0, give_up_s=60.0, missing_s=60.0)
    with failing_lister(lambda handler: 405, options=patient) as lister:
        assert not lister.is_collection()


class EndlessHandler(TreeHandler):
    """A collection whose every folder holds the same members."""

    members: tuple[str, ...] = ()
    num_listings = 0

    def do_PROPFIND(self) -> None:
        type(self).num_listings += 1
        path = self.path.rstrip("/")
        members = [member.format(f"{path}/m{i}") for i, member in enumerate(self.members)]
        self.answer(207, listing(FOLDER.format(path + "/"), *members))


@contextmanager
def endless_lister(*members: str, options: Options = FAST) -> Iterator[Lister]:
    with running(EndlessHandler, members=members) as tree:
        target = parse_target(f"{tree}/d")
        access = Access(NOWHERE, TokenStore(NOWHERE))
        yield Lister(Lookup(target, access, options), target)


def test_two_folders_that_contain_themselves_are_refused() -> None:
    with (
        endless_lister(FOLDER, FOLDER, options=PATIENT) as lister,
        pytest.raises(UserError, match="more than 128 deep"),
    ):
        list(lister.walk())


def test_files_in_a_folder_that_contains_itself_do_not_hide_it() -> None:
    file = FILE.replace("{}</D:getc", "1</D:getc")
    with (
        endless_lister(file, FOLDER, options=PATIENT) as lister,
        pytest.raises(UserError, match="more than 128 deep"),
    ):
        list(lister.walk())


def test_more_folders_than_any_dataset_has_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collection, "MAX_FOLDERS", 50)
    with (
        endless_lister(*[FOLDER] * 20, options=PATIENT) as lister,
        pytest.raises(UserError, match="more than 50 folders"),
    ):
        list(lister.walk())


def test_folders_without_a_file_are_given_up_like_a_transfer_without_a_byte(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(collection, "MAX_DEPTH", 1_000_000)
    hasty = Options(stall_s=60.0, give_up_s=0.2, missing_s=60.0)
    with (
        endless_lister(FOLDER, FOLDER, options=hasty) as lister,
        pytest.raises(PassingError, match="no file of"),
    ):
        list(lister.walk())


def test_a_collection_of_forty_folders_in_one_another_is_listed_whole() -> None:
    deep = "/d" + "/sub" * 40
    files = {f"{deep}/x": b"abc", "/d/y": b"de"}
    folders = frozenset(str(parent) for path in files for parent in PurePosixPath(path).parents)
    with running(TreeHandler, files=files, folders=folders) as tree:
        target = parse_target(f"{tree}/d")
        access = Access(NOWHERE, TokenStore(NOWHERE))
        lister = Lister(Lookup(target, access, PATIENT), target)
        assert {entry.path for entry in lister.walk()} == set(files)
