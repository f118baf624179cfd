"""Which size of an object is believed when a server says something absurd, once or always."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dataset.errors import PassingError, UserError
from dataset.own_names import journal_path, part_path
from dataset.transfer.journal import CHUNK
from tests.dataset.director_server import federation
from tests.dataset.object_fetch import CONTENT, FAST, fetch, leave_partial
from tests.dataset.small_server import Handler, serving

ABSURD = 10**17


def tell_size(size: int, num_times: int) -> Callable[[Handler], bool]:
    """Answers the first questions for the size with another one."""
    num_told = [0]

    def misbehave(handler: Handler) -> bool:
        if handler.headers.get("Range") != "bytes=0-0" or num_told[0] == num_times:
            return False
        num_told[0] += 1
        handler.send_response(206)
        handler.send_header("Content-Range", f"bytes 0-0/{size}")
        handler.send_header("Content-Length", "1")
        handler.end_headers()
        handler.wfile.write(b"x")
        return True

    return misbehave


def test_one_absurd_size_is_not_a_lack_of_space(tmp_path: Path) -> None:
    with serving(CONTENT, tell_size(ABSURD, 1)) as (url, _):
        fetch(url, tmp_path)
    assert (tmp_path / "object.bin").read_bytes() == CONTENT


def test_a_size_that_is_said_again_and_does_not_fit_is_a_lack_of_space(tmp_path: Path) -> None:
    with (
        serving(CONTENT, tell_size(ABSURD, 99)) as (url, _),
        pytest.raises(UserError, match="needs 100000000"),
    ):
        fetch(url, tmp_path)
    assert not part_path(tmp_path / "object.bin").exists()


@pytest.mark.parametrize("size", [5, len(CONTENT) + 1])
def test_one_wrong_size_does_not_cost_the_partial_file(size: int, tmp_path: Path) -> None:
    with serving(CONTENT, tell_size(size, 1)) as (url, _):
        leave_partial(tmp_path / "object.bin", url, ("crc32c",))
        summary = fetch(url, tmp_path)
    assert (tmp_path / "object.bin").read_bytes() == CONTENT
    assert summary.resumed_bytes > 0
    assert not journal_path(tmp_path / "object.bin").exists()


def test_one_cache_with_an_empty_object_does_not_decide_alone(tmp_path: Path) -> None:
    with federation([b""], CONTENT) as (director, *_):
        fetch("osdf:///object.bin", tmp_path, federation=director)
    assert (tmp_path / "object.bin").read_bytes() == CONTENT


def test_an_object_that_is_empty_everywhere_arrives(tmp_path: Path) -> None:
    with federation([b""], b"") as (director, *_):
        fetch("osdf:///object.bin", tmp_path, federation=director)
    assert (tmp_path / "object.bin").read_bytes() == b""


def test_a_server_that_once_calls_the_object_empty_is_still_asked_for_ranges(
    tmp_path: Path,
) -> None:
    def say_empty(handler: Handler) -> bool:
        if handler.headers.get("Range") != "bytes=0-0":
            return False
        handler.send_response(206)
        handler.send_header("Content-Range", "bytes 0-0/0")
        handler.send_header("Content-Length", "0")
        handler.end_headers()
        return True

    with serving(CONTENT, say_empty) as (url, seen):
        fetch(url, tmp_path)
    assert (tmp_path / "object.bin").read_bytes() == CONTENT
    assert [request.get("range") for request in seen].count(None) == 1


def test_sources_that_disagree_with_nobody_to_decide_are_named(tmp_path: Path) -> None:
    options = replace(FAST, give_up_s=3.0)
    with (
        federation([CONTENT, CONTENT[:CHUNK]]) as (director, *caches),
        pytest.raises(PassingError, match="disagree on its size") as caught,
    ):
        fetch("osdf:///object.bin", tmp_path, options, federation=director)
    assert all(
        f"{cache} {size}" in str(caught.value)
        for cache, size in zip(caches, (len(CONTENT), CHUNK), strict=True)
    )
    assert not (tmp_path / "object.bin").exists()
