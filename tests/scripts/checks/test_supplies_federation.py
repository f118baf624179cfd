"""The doctor's look at a federation: whatever answers there, a finding comes back in time."""

from __future__ import annotations

import time
from typing import Any

import pytest

from scripts.checks.supplies import look_at_federation
from scripts.checks.surroundings import OK, WRONG
from tests.dataset.director_server import directing
from tests.dataset.small_server import Handler, running


def drip(handler: Any) -> bool:
    handler.close_connection = True
    try:
        while True:
            handler.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            time.sleep(0.02)
    except OSError:
        return True


def fail(handler: Any) -> bool:
    handler.send_response(503)
    handler.send_header("Content-Length", "0")
    handler.end_headers()
    return True


def test_the_director_is_named() -> None:
    with directing(lambda handler: (404, {})) as url:
        finding = look_at_federation(url, 30.0, is_needed=True)
    assert finding.level == OK and f"director {url}" in finding.text


@pytest.mark.parametrize("behave", [drip, fail, lambda handler: False])
def test_a_server_that_is_no_federation_is_said(behave: Any) -> None:
    content = b"[" * 100_000
    with running(Handler, misbehave=staticmethod(behave), content=content) as url:
        finding = look_at_federation(url, 1.0, is_needed=True)
    assert finding.level == WRONG and "does not answer" in finding.problem
