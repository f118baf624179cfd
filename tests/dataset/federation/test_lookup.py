"""Look-ups: what the director refuses, and when that is the end of a transfer."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dataset.errors import PassingError, UserError
from dataset.federation.lookup import Lookup, Options
from dataset.federation.pelican import Verdict, parse_target
from dataset.federation.tokens import Access, TokenStore
from dataset.fetch.request import Request
from dataset.fetch.urls import fetch_urls
from tests.dataset.director_server import Decision, directing, name_source
from tests.dataset.small_server import serving

NOWHERE = {"XDG_RUNTIME_DIR": "/nonexistent"}
FAST = Options(stall_s=60.0, give_up_s=60.0, missing_s=0.2)
SOURCE = name_source("http://127.0.0.1:1/ns/a.tar")


@contextmanager
def looking_up(
    decide: Callable[[Any], Decision], token: Path | None = None, options: Options = FAST
) -> Iterator[Lookup]:
    with directing(decide) as url:
        target = parse_target("osdf:///ns/a.tar", url)
        with Lookup(target, Access(NOWHERE, TokenStore(NOWHERE, token)), options) as lookup:
            yield lookup


def wait_for_patience(
    lookup: Lookup, seconds: float, until: Callable[[], bool] = lambda: False
) -> None:
    """Lives as a transfer does: looks up when it is due and checks its patience."""
    end = time.monotonic() + seconds
    while (now := time.monotonic()) < end and not until():
        if all(server.failures for server in lookup.servers.usable) and lookup.is_due(now):
            lookup.refresh()
        lookup.check_patience(now, now)
        time.sleep(0.02)


def test_a_refusal_of_the_director_does_not_end_a_transfer_that_flows() -> None:
    answers = [SOURCE, (403, {})]
    with looking_up(lambda handler: answers[min(lookup.num_lookups, 1)]) as lookup:
        lookup.refresh()
        lookup.servers.delivered(lookup.servers.all[0], 1, 1.0)
        lookup.refresh()
        assert lookup.answer.verdict is Verdict.DENIED
        wait_for_patience(lookup, 4 * FAST.missing_s)


def test_a_refusal_is_final_when_no_source_is_left_and_it_is_repeated() -> None:
    with looking_up(lambda handler: (403, {})) as lookup, pytest.raises(UserError, match="token"):
        wait_for_patience(lookup, 100.0)
    assert lookup.num_lookups >= 2


def test_one_refusal_is_not_believed_before_another_look_up() -> None:
    with looking_up(lambda handler: (403, {})) as lookup:
        lookup.refresh()
        end = time.monotonic() + 3 * FAST.missing_s
        while (now := time.monotonic()) < end:
            lookup.check_patience(now, now)
            time.sleep(0.02)
        assert lookup.num_lookups == 1


def test_a_refusal_by_an_ingress_is_a_passing_failure() -> None:
    impatient = Options(stall_s=1.0, give_up_s=1.0, missing_s=0.2)
    with looking_up(lambda handler: (403, {"Server": "nginx"}), options=impatient) as lookup:
        wait_for_patience(lookup, 0.8)
        with pytest.raises(PassingError):
            lookup.check_patience(time.monotonic(), time.monotonic() - 1.1)


def test_a_new_token_clears_a_refusal(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("old")

    def decide(handler: Any) -> Decision:
        return SOURCE if handler.headers["Authorization"] == "Bearer new" else (401, {})

    # Plain http on loopback may carry the token.
    patient = Options(stall_s=60.0, give_up_s=600.0, missing_s=60.0)
    with looking_up(decide, token, patient) as lookup:
        wait_for_patience(lookup, 50.0, lambda: lookup.answer.verdict is Verdict.DENIED)
        before = lookup.answer.verdict
        token.write_text("new")
        wait_for_patience(lookup, 50.0, lambda: lookup.answer.verdict is Verdict.FOUND)
        assert (before, lookup.answer.verdict) == (Verdict.DENIED, Verdict.FOUND)


def test_a_token_that_another_thread_noticed_clears_a_refusal(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("old")
    with looking_up(lambda handler: (401, {}), token) as lookup:
        lookup.refresh()
        token.write_text("new")
        lookup._next_reread = 0.0
        assert lookup.reread_token()
        assert lookup.answer.verdict is Verdict.PASSING


def test_a_director_that_another_thread_forgets_is_no_crash(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known: list[str | None] = [None]

    def read_once(lookup: Lookup) -> str | None:
        """What it was, and forgotten at once, as by a thread that comes in between."""
        director, known[0] = known[0], None
        return director

    def write(lookup: Lookup, director: str | None) -> None:
        known[0] = director

    monkeypatch.setattr(Lookup, "_director", property(read_once, write), raising=False)
    with looking_up(lambda handler: SOURCE) as lookup:
        known[0] = lookup.target.discovery  # the fake director is the discovery as well
        assert lookup.ask().verdict is Verdict.FOUND


def count_lines(caplog: pytest.LogCaptureFixture, text: str) -> int:
    lines = [r for r in caplog.records if r.levelno >= logging.INFO and text in r.getMessage()]
    return len(lines)


def test_a_problem_that_comes_back_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    statuses = iter([404, 404, 404, 500, 500, 404])
    with (
        looking_up(lambda handler: (next(statuses), {})) as lookup,
        caplog.at_level(logging.DEBUG),
    ):
        for _ in range(6):
            lookup.refresh()
    assert count_lines(caplog, "the director answered 404") == 2
    assert count_lines(caplog, "the director answered 500") == 1


def test_an_index_that_is_not_there_is_not_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    content = b"a tar " * 100
    with serving(content) as (cache, _), caplog.at_level(logging.INFO):

        def decide(handler: Any) -> Decision:
            return (404, {}) if ".index" in handler.path else name_source(cache)

        with directing(decide) as federation:
            fetch_urls(["osdf:///ns/a.tar"], Request(tmp_path, FAST, federation, environ=NOWHERE))
    assert (tmp_path / "a.tar").read_bytes() == content
    assert count_lines(caplog, "404") == count_lines(caplog, "index") == 0


@pytest.mark.parametrize("num_dead", [6, 12])
def test_caches_beyond_the_sixth_are_asked_when_the_first_are_dead(
    num_dead: int, tmp_path: Path
) -> None:
    content = b"from the last one"
    with serving(content) as (cache, _), socket.socket() as dead:
        dead.bind(("127.0.0.1", 0))  # and not listening: every connection is refused
        port = dead.getsockname()[1]
        urls = [f"http://127.0.0.1:{port}/{n}/a.bin" for n in range(num_dead)]

        def decide(handler: Any) -> Decision:
            named = urls if "directread" in handler.path else [*urls, cache]
            links = [f'<{url}>; rel="duplicate"; pri={n}' for n, url in enumerate(named, 1)]
            namespace = "namespace=/ns, require-token=false"
            return 307, {"Link": ", ".join(links), "X-Pelican-Namespace": namespace}

        with directing(decide) as federation:
            request = Request(tmp_path, replace(FAST, give_up_s=30.0), federation, environ=NOWHERE)
            fetch_urls(["osdf:///ns/a.bin"], request)
    assert (tmp_path / "a.bin").read_bytes() == content
