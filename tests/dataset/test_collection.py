"""Listings: what a WebDAV server says is read, and nothing outside the folder is believed."""

from __future__ import annotations

import pytest

from dataset.collection import Entry, has_collection_form, looks_like_object, parse_listing
from dataset.federation import parse_target

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
