"""Answers that could put a wrong byte into the file are refused, each for its reason."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dataset.federation.framing import ProtocolError, read_retry_after
from dataset.federation.servers import Server
from dataset.transfer.receive import OtherSize, OtherVersion, StatusError, check_answer


def answer(status: int, length: int | None, url: str = "http://a/x", **headers: str) -> Any:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return SimpleNamespace(status=status, length=length, headers=names, url=url)


def check(reply: Any, etag: str | None = None, size: int | None = 1000) -> int:
    return check_answer(reply, 100, 200, size, Server("http://a/x", "a", etag=etag)).skip


def test_exactly_the_range_is_taken() -> None:
    assert check(answer(206, 100, content_range="bytes 100-199/1000")) == 0
    assert check(answer(206, None, content_range="bytes 100-199/1000")) == 0


def test_a_whole_object_is_read_up_to_the_range() -> None:
    assert check(answer(200, 1000)) == 100


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (answer(206, 100, content_range="bytes 101-200/1000"), OSError),
        (answer(206, 100, content_range="bytes 100-198/1000"), OSError),
        (answer(206, 100, content_range="bytes 100-199/*"), OSError),
        (answer(206, 100), OSError),
        (answer(206, 101, content_range="bytes 100-199/1000"), OSError),
        (answer(206, 99, content_range="bytes 100-199/1000"), OSError),
        (answer(206, 100, content_range="bytes 100-199/1001"), OtherSize),
        (answer(200, 999), OtherSize),
        (answer(200, None), OSError),
        (answer(416, 0, content_range="bytes */50"), OtherSize),
        (answer(416, 0), OSError),
        (answer(416, 0, content_range="bytes */1000"), ProtocolError),
        (answer(416, 0, content_range="bytes */500"), ProtocolError),
        (answer(206, 100, content_range="bytes 100-199/0"), ProtocolError),
        (answer(206, 100, content_range="bytes 100-199/199"), ProtocolError),
        (answer(206, 100, content_range="bytes */1000"), ProtocolError),
        (answer(206, 100, content_range="bytes 100-199/1000", content_encoding="gzip"), OSError),
        (answer(503, 0), StatusError),
        (answer(304, 0), StatusError),
    ],
)
def test_any_other_answer_is_refused(reply: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        check(reply)


def test_a_page_says_nothing_of_the_object() -> None:
    """Neither its size, where the server gave ranges before, nor its bytes."""
    server = Server("http://a/x", "a")
    good = answer(206, 100, content_range="bytes 100-199/1000")
    assert check_answer(good, 100, 200, 1000, server).is_range
    assert not server.gave_range, "a check changes nothing"
    server.note_answer(None, is_range=True)
    with pytest.raises(ProtocolError, match="instead of a range"):
        check_answer(answer(200, 999), 100, 200, 1000, server)
    with pytest.raises(ProtocolError, match="login"):
        check(answer(200, 1000, content_type="text/html; charset=utf-8"), size=None)
    page = answer(200, 1000, url="http://a/x.html", content_type="text/html")
    assert check(page, size=None) == 100


def test_the_etags_of_mirrors_and_weak_ones_are_no_other_version() -> None:
    asked = {"content_range": "bytes 100-199/1000"}
    assert check(answer(206, 100, "http://mirror/x", etag='"v2"', **asked), etag='"v1"') == 0
    assert check(answer(206, 100, etag='W/"v1"', **asked), etag='"v1"') == 0


def test_an_etag_that_changes_at_one_source_is_another_version() -> None:
    reply = answer(206, 100, content_range="bytes 100-199/1000", etag='"v2"')
    assert check(reply, etag='"v2"') == 0
    with pytest.raises(OtherVersion):
        check(reply, etag='"v1"')


def test_retry_after_is_a_number_or_a_date() -> None:
    assert read_retry_after({"retry-after": "7"}, 0.0) == 7
    assert read_retry_after({"retry-after": "Thu, 01 Jan 1970 00:01:00 GMT"}, 20.0) == 40
    for text in ("soon", "²", "9" * 5000, "-1", "Thu, 01 Jan 99999999999999999999 00:00:00 GMT"):
        assert read_retry_after({"retry-after": text}, 0.0) == 0
    assert read_retry_after({}, 0.0) == 0
