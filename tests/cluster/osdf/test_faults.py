"""Each fault does on the wire what its name says, on the requests that it is set for."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import socket
import threading
import time
from collections.abc import Callable
from types import ModuleType

import pytest

from tests.cluster.osdf.client import Response, connect, request
from tests.cluster.osdf.rules import Fault

pytestmark = pytest.mark.osdf
CONTENT = random.Random(4).randbytes(500_000)


@pytest.fixture(params=["http", "https"])
def url(request: pytest.FixtureRequest, osdf: ModuleType) -> str:
    """The object at the first cache, by either scheme."""
    urls: list[str] = osdf.CACHE_HTTP_URLS if request.param == "http" else osdf.CACHE_URLS
    return urls[0]


@pytest.fixture(scope="module")
def path(osdf: ModuleType) -> str:
    """An object of 500 kB."""
    result: str = osdf.put("faults/half-a-megabyte.bin", CONTENT)
    return result


def _get(osdf: ModuleType, url: str, timeout_s: float = 20.0, **headers: str) -> Response:
    return request(url, headers=headers, ca=osdf.CA_FILE, timeout_s=timeout_s)


@pytest.mark.parametrize("kind", ["hang", "stall"])
def test_silence_lasts_until_the_client_leaves(
    osdf: ModuleType, url: str, path: str, kind: str
) -> None:
    osdf.forget_traffic(path)
    half = len(CONTENT) // 2
    with osdf.faults(Fault(kind, path=path, after_share=0.5)) as faults:
        with contextlib.closing(connect(url, osdf.CA_FILE, 60)) as connection:
            connection.request("GET", path)
            if kind == "stall":
                answer = connection.getresponse()
                assert answer.read(half) == CONTENT[:half]
            _wait_until(lambda: faults.hits() == [1])
            connection.sock.settimeout(0.2)
            with pytest.raises(TimeoutError):
                answer.read(1) if kind == "stall" else connection.getresponse()
        _wait_until(lambda: osdf.traffic(path))  # an entry is written when the client has left
    (entry,) = osdf.traffic(path)
    assert entry["bytes"] == (0 if kind == "hang" else half)
    assert entry["faults"] == [kind]


def _wait_until(condition: Callable[[], object]) -> None:
    while not condition():
        time.sleep(0.02)


@pytest.mark.parametrize("kind", ["hang", "stall"])
def test_silence_of_some_seconds_ends(osdf: ModuleType, url: str, path: str, kind: str) -> None:
    with osdf.faults(Fault(kind, path=path, seconds=0.3)) as faults:
        assert _get(osdf, url + path).content == CONTENT
        assert faults.hits() == [1]


def test_drip_sends_at_its_speed_until_it_is_withdrawn(
    osdf: ModuleType, url: str, path: str
) -> None:
    faults = osdf.faults(Fault("drip", path=path, after_bytes=499_000, bytes_per_s=20.0))
    osdf.forget_traffic(path)
    got: list[Response] = []
    reader = threading.Thread(target=lambda: got.append(_get(osdf, url + path)))
    reader.start()
    while osdf.sent_bytes(path) < 499_003:
        time.sleep(0.02)
    assert osdf.sent_bytes(path) < 499_500
    faults.remove()
    reader.join()
    assert got[0].content == CONTENT


def test_truncate_ends_inside_the_body(osdf: ModuleType, url: str, path: str) -> None:
    with osdf.faults(Fault("truncate", path=path, after_bytes=1234)):
        with pytest.raises(http.client.IncompleteRead) as cut:
            _get(osdf, url + path)
    assert cut.value.partial == CONTENT[:1234]


@pytest.mark.parametrize("kind", ["reset", "close"])
def test_reset_and_close_break_the_connection(
    osdf: ModuleType, url: str, path: str, kind: str
) -> None:
    with osdf.faults(Fault(kind, path=path, after_share=0.9, times=1)):
        with pytest.raises((ConnectionError, http.client.HTTPException)):
            _get(osdf, url + path)
        assert _get(osdf, url + path).content == CONTENT


def test_reset_is_a_tcp_reset(osdf: ModuleType, path: str) -> None:
    host, port = osdf.CACHE_HTTP_URLS[0].removeprefix("http://").split(":")
    with osdf.faults(Fault("reset", path=path, after_bytes=0)):
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            with pytest.raises(ConnectionResetError):
                while connection.recv(100_000):
                    pass


def test_flip_spoils_the_same_byte_of_the_object_in_any_range(
    osdf: ModuleType, url: str, path: str
) -> None:
    spoilt = bytearray(CONTENT)
    spoilt[300_000] ^= 0xFF
    with osdf.faults(Fault("flip", path=path, at=[300_000])):
        assert _get(osdf, url + path).content == spoilt
        answer = _get(osdf, url + path, Range="bytes=299990-300010")
        assert answer.content == spoilt[299_990:300_011]
        answer = _get(osdf, url + path, Range="bytes=0-299999")
        assert answer.content == CONTENT[:300_000]


def test_flip_draws_one_byte_from_the_seed(osdf: ModuleType, url: str, path: str) -> None:
    def spoil(seed: int) -> bytes:
        with osdf.faults(Fault("flip", path=path), seed=seed):
            return _get(osdf, url + path).content

    first = spoil(1)
    assert sum(a != b for a, b in zip(first, CONTENT, strict=True)) == 1
    assert spoil(1) == first
    assert spoil(2) != first


@pytest.mark.parametrize("status", [404, 429, 500, 503])
@pytest.mark.parametrize("retry_after", [None, "7"])
def test_status_with_or_without_retry_after(
    osdf: ModuleType, path: str, status: int, retry_after: str | None
) -> None:
    with osdf.faults(Fault("status", path=path, status=status, retry_after=retry_after)):
        for url in (osdf.CACHE_HTTP_URLS[1], osdf.ORIGIN_HTTP_URL, osdf.DIRECTOR_HTTP_URL):
            answer = request(url + path)
            assert answer.status == status
            assert answer.headers.get("retry-after") == retry_after


def test_ignored_range_gives_the_whole_object(osdf: ModuleType, url: str, path: str) -> None:
    with osdf.faults(Fault("ignore_range", path=path)):
        answer = _get(osdf, url + path, Range="bytes=10-19")
    assert (answer.status, answer.content) == (200, CONTENT)


@pytest.mark.parametrize(
    ("what", "content_range", "content"),
    [
        ("start", "bytes 11-20/500000", CONTENT[10:20]),
        ("total", "bytes 10-19/500001", CONTENT[10:20]),
        ("body", "bytes 10-19/500000", bytes((b + 1) % 256 for b in CONTENT[10:20])),
    ],
)
def test_wrong_range_lies_about_one_thing(
    osdf: ModuleType, url: str, path: str, what: str, content_range: str, content: bytes
) -> None:
    with osdf.faults(Fault("wrong_range", path=path, what=what)):
        answer = _get(osdf, url + path, Range="bytes=10-19")
    assert answer.headers["content-range"] == content_range
    assert answer.content == content


def test_extend_sends_too_much(osdf: ModuleType, url: str, path: str) -> None:
    with osdf.faults(Fault("extend", path=path, extra_bytes=5)):
        assert _get(osdf, url + path, Range="bytes=10-19").content == CONTENT[10:20] + bytes(5)


def test_change_serves_another_object(osdf: ModuleType, url: str, path: str) -> None:
    other = osdf.put("faults/other.bin", b"another content")
    with osdf.faults(Fault("change", path=path, to=other, skip=1)):
        assert _get(osdf, url + path).content == CONTENT
        assert _get(osdf, url + path).content == b"another content"


def test_loop_redirects_to_itself(osdf: ModuleType, path: str) -> None:
    with osdf.faults(Fault("loop", path=path)):
        for url in (osdf.CACHE_HTTP_URLS[0], osdf.DIRECTOR_HTTP_URL):
            answer = request(url + path)
            assert (answer.status, answer.headers["location"]) == (307, path)


def test_ingress_page_is_not_the_director_and_passes(osdf: ModuleType, path: str) -> None:
    with osdf.faults(Fault("ingress", server="director", for_s=5.0)):
        answer = request(osdf.DIRECTOR_HTTP_URL + path)
        assert (answer.status, answer.headers["server"]) == (404, "nginx")
        assert b"404 Not Found" in answer.content
        while request(osdf.DIRECTOR_HTTP_URL + path).status != 307:
            time.sleep(0.05)


def test_headers_are_set_and_removed(osdf: ModuleType, url: str, path: str) -> None:
    with osdf.faults(Fault("headers", path=path, set_headers={"ETag": "x", "server": None})):
        headers = _get(osdf, url + path).headers
    assert headers["etag"] == "x"
    assert "server" not in headers


def test_links_are_what_the_director_is_told(osdf: ModuleType, path: str) -> None:
    with osdf.faults(Fault("links", path=path, caches=["cache2", "origin"])):
        headers = request(osdf.DIRECTOR_HTTP_URL + path).headers
    assert headers["location"] == osdf.CACHE_HTTP_URLS[1] + path
    assert headers["link"].count("rel=") == 2
    assert f"<{osdf.ORIGIN_HTTP_URL}{path}>" in headers["link"]


def test_wan_delays_and_slows_each_connection(osdf: ModuleType, url: str, path: str) -> None:
    with osdf.wan(path, delay_s=0.1, bytes_per_s=2.5e6):
        started_s = time.monotonic()
        assert _get(osdf, url + path).content == CONTENT
        # At least: the delay of two round trips, and 0.2 s for 500 kB less what is in flight.
        assert time.monotonic() - started_s > 0.35


def test_fault_strikes_only_what_it_is_set_for(osdf: ModuleType, path: str) -> None:
    fault = Fault("status", path=path, server="cache1", method="GET")
    with osdf.faults(fault) as faults:
        assert request(osdf.CACHE_HTTP_URLS[1] + path).status == 200
        assert request(osdf.CACHE_HTTP_URLS[0] + path, "HEAD").status == 200
        assert faults.hits() == [0]
        assert request(osdf.CACHE_HTTP_URLS[0] + path).status == 503
    assert request(osdf.CACHE_HTTP_URLS[0] + path).status == 200


def test_traffic_counts_bytes_and_never_holds_a_token(osdf: ModuleType) -> None:
    path = osdf.put("faults/counted.bin", b"x" * 1000, osdf.PROTECTED)
    token = osdf.make_token()
    url = osdf.CACHE_HTTP_URLS[0] + path
    request(url, headers={"Authorization": f"Bearer {token}", "Range": "bytes=0-99"})
    request(f"{url}?authz={token}")
    entries = osdf.traffic(path)
    assert [entry["bytes"] for entry in entries] == [100, 1000]
    assert [entry["token"] for entry in entries] == ["header", "query"]
    assert osdf.sent_bytes(path, "cache1") == 1100
    assert token not in json.dumps(entries)


def test_unknown_fault_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"no fault is called 'stal'; there are hang, close"):
        Fault("stal")
