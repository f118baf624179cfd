"""What the check of a grid study says of the index beside a tar."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dataset.errors import PassingError
from dataset.federation.lookup import Options
from dataset.fetch.request import Request
from dataset.names import INDEX_SUFFIX
from scripts.checks import study_data
from tests.dataset.small_server import Handler, running

SIZE = 1000


def answer_the_index_with(status: int, handler: Handler) -> bool:
    if not handler.path.endswith(INDEX_SUFFIX):
        return False
    handler.send_response(status)
    handler.send_header("Content-Length", "0")
    handler.end_headers()
    return True


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    soon = replace(study_data.OF_INDEX, give_up_s=0.5, missing_s=0.1)
    monkeypatch.setattr(study_data, "OF_INDEX", soon)


def ask(status: int) -> str:
    def misbehave(handler: Handler) -> bool:
        return answer_the_index_with(status, handler)

    with running(Handler, content=b"x" * SIZE, misbehave=staticmethod(misbehave)) as server:
        request = Request(Path(), Options(), None)
        target = request.parse(f"{server}/a.tar")
        return study_data.describe_index(target, SIZE, request, has_units=False)


def test_an_index_that_is_not_there_is_told() -> None:
    assert ask(404) == "no index beside it"


def test_a_server_that_is_busy_does_not_mean_that_there_is_no_index() -> None:
    with pytest.raises(PassingError):
        ask(503)
