"""Tokens: who sees them, what an expired one does, and that none is ever written down."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest

from dataset.federation import tls
from dataset.own_names import journal_path
from tests.cluster.osdf.fetching import MIB, Fetcher, make_content
from tests.cluster.osdf.rules import Fault

pytestmark = pytest.mark.osdf


@pytest.fixture
def https_fetch(osdf: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fetcher:
    """Fetches over https, trusting the test CA."""
    monkeypatch.setenv("SSL_CERT_FILE", str(osdf.CA_FILE))
    monkeypatch.setattr(tls, "_context", None)
    out = tmp_path / "out"
    token = tmp_path / "token"
    token.write_text(osdf.make_token())
    return Fetcher(osdf, out, token=token, federation=osdf.DIRECTOR_URL)


def all_text(folder: Path) -> str:
    return "".join(p.read_text(errors="replace") for p in folder.rglob("*") if p.is_file())


def test_a_protected_object_is_fetched_with_the_token_in_a_header(
    osdf: ModuleType, https_fetch: Fetcher
) -> None:
    content = make_content(9 * MIB, 20)
    path = osdf.put("fetch-access/a.bin", content, osdf.PROTECTED)
    osdf.forget_traffic(path)
    result = https_fetch(path)
    assert result.exit_code == 0, result.message
    assert result.path.read_bytes() == content
    seen = {entry["token"] for entry in osdf.traffic(path) if entry["server"] != "director"}
    assert seen == {"header"}
    assert {entry["scheme"] for entry in osdf.traffic(path)} == {"https"}


def test_a_public_object_does_not_get_the_token_from_the_environment(
    osdf: ModuleType, https_fetch: Fetcher
) -> None:
    path = osdf.put("fetch-access/public.bin", make_content(MIB, 21))
    osdf.forget_traffic(path)
    assert https_fetch(path).exit_code == 0
    assert {e["token"] for e in osdf.traffic(path) if e["server"] != "director"} == {""}


def test_a_redirect_from_a_cache_gets_no_token(osdf: ModuleType, https_fetch: Fetcher) -> None:
    path = osdf.put("fetch-access/loop.bin", make_content(MIB, 22), osdf.PROTECTED)
    osdf.forget_traffic(path)
    with osdf.faults(Fault("loop", server="cache1", path=path)):
        result = https_fetch(path)
    assert result.exit_code == 0, result.message
    asked = [e for e in osdf.traffic(path, "cache1") if e["method"] == "GET"]
    with_token = [entry for entry in asked if entry["token"]]
    assert asked and len(with_token) < len(asked), "only the first request of a chain has it"
    assert len(with_token) <= len(asked) // 2


def wait_until(condition: Callable[[], bool], timeout_s: float = 90.0) -> None:
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, "it did not happen"
        time.sleep(0.02)


def test_a_token_that_expires_halfway_is_read_again(osdf: ModuleType, https_fetch: Fetcher) -> None:
    content = make_content(24 * MIB, 23)
    path = osdf.put("fetch-access/halfway.bin", content, osdf.PROTECTED)
    token = https_fetch.token
    assert token is not None

    def count_refused() -> int:
        return sum(entry["status"] == 403 for entry in osdf.traffic(path))

    def renew() -> None:
        """Once the first bytes came the token is revoked, and once that was noticed a new one is
        written, as HTCondor does with the files of _CONDOR_CREDS.
        """
        wait_until(lambda: osdf.sent_bytes(path) > MIB)
        before = count_refused()
        osdf.revoke(token.read_text())
        wait_until(lambda: count_refused() > before)
        new = token.with_name("new")
        new.write_text(osdf.make_token())
        new.replace(token)

    osdf.forget_traffic(path)
    with osdf.wan(path=path, delay_s=0.0, bytes_per_s=1e6), ThreadPoolExecutor(1) as pool:
        renewed = pool.submit(renew)
        result = https_fetch(path, missing_s=60.0, give_up_s=100.0)
        renewed.result()
    assert result.exit_code == 0, result.message
    assert result.path.read_bytes() == content
    assert result.errors.get("403", 0) + result.errors.get("401", 0) > 0


@pytest.mark.parametrize("kind", ["none", "expired", "other"])
def test_a_bad_token_is_exit_2_and_says_why_without_showing_it(
    kind: str, osdf: ModuleType, https_fetch: Fetcher, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    path = osdf.put("fetch-access/closed.bin", make_content(MIB, 24), osdf.PROTECTED)
    token = osdf.make_token(lifetime_s=-60) if kind == "expired" else osdf.make_token(scope="x:/y")
    assert https_fetch.token is not None
    if kind == "none":
        https_fetch.token = None
    else:
        https_fetch.token.write_text(token)
    result = https_fetch(path)
    assert result.exit_code == 2
    words = {"none": "no token found", "expired": "expired at", "other": "not accepted"}
    assert words[kind] in result.message
    for text in (result.message, caplog.text, all_text(https_fetch.out), str(result.summaries)):
        assert token not in text


def test_no_secret_is_left_in_any_file_or_line(
    osdf: ModuleType, https_fetch: Fetcher, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    path = osdf.put("fetch-access/clean.bin", make_content(16 * MIB, 25), osdf.PROTECTED)
    assert https_fetch.token is not None
    token = https_fetch.token.read_text()
    with osdf.faults(Fault("status", server="[co]*", path=path, method="GET", skip=4)):
        result = https_fetch(path, give_up_s=2.0)
    assert result.exit_code == 75
    journal = journal_path(https_fetch.out / "clean.bin")
    for text in (journal.read_text(), result.message, caplog.text, str(result.summaries)):
        assert token not in text
        assert "authz" not in text.lower()


def test_a_director_that_restarts_costs_seconds_and_not_the_job(
    osdf: ModuleType, tmp_path: Path
) -> None:
    content = make_content(8 * MIB, 26)
    path = osdf.put("fetch-access/restart.bin", content)
    with osdf.faults(Fault("ingress", server="director", for_s=4.0)):
        result = Fetcher(osdf, tmp_path)(path, missing_s=1.0, give_up_s=60.0)
    assert result.exit_code == 0, result.message
    assert result.path.read_bytes() == content


@pytest.mark.soak
def test_a_director_that_is_away_for_30_s_is_waited_for(osdf: ModuleType, tmp_path: Path) -> None:
    path = osdf.put("fetch-access/restart30.bin", make_content(8 * MIB, 27))
    with osdf.faults(Fault("ingress", server="director", for_s=30.0)):
        result = Fetcher(osdf, tmp_path)(path, missing_s=5.0, give_up_s=60.0)
    assert result.exit_code == 0, result.message


def test_an_object_that_nobody_has_is_exit_2_after_the_agreed_time(
    osdf: ModuleType, tmp_path: Path
) -> None:
    started = time.monotonic()
    result = Fetcher(osdf, tmp_path)("/public/fetch-access/never.bin", missing_s=2.0)
    assert result.exit_code == 2
    assert "does not exist" in result.message
    assert time.monotonic() - started >= 2.0


def test_caches_that_miss_an_object_which_the_director_knows_are_agreed_with_the_origin(
    osdf: ModuleType, tmp_path: Path
) -> None:
    path = osdf.put("fetch-access/gone.bin", make_content(MIB, 28))
    with osdf.faults(Fault("status", server="[co]*", path=path, status=404)):
        result = Fetcher(osdf, tmp_path)(path, missing_s=2.0)
    assert result.exit_code == 2
    with osdf.faults(Fault("status", server="cache*", path=path, status=404)):
        assert Fetcher(osdf, tmp_path)(path, missing_s=1.0).exit_code == 0
