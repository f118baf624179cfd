"""Where servers may lead a fetch: not to this machine's services, and not out of https."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from dataset.errors import CommandError
from dataset.federation import reach
from dataset.federation.collection import Lister
from dataset.federation.connection import redirect_target
from dataset.federation.framing import ProtocolError
from dataset.federation.lookup import Lookup, Options
from dataset.federation.pelican import Verdict, parse_target, read_director_answer
from dataset.federation.reach import Reach, is_own_address
from dataset.federation.tokens import Access, TokenStore
from dataset.fetch.request import Request
from dataset.fetch.urls import fetch_urls
from tests.dataset.dav_server import FOLDER, RESPONSE, TreeHandler
from tests.dataset.director_server import DirectorHandler, directing, name_source
from tests.dataset.object_fetch import NOWHERE
from tests.dataset.small_server import Handler, running, serving

FAST = Options(stall_s=2.0, give_up_s=1.5, missing_s=0.3, connections=2)
PUBLIC = "127.0.0.2"  # stands for a host on the network: this machine may have no other address


@pytest.mark.parametrize(
    "address",
    [
        *(
            "127.0.0.1",
            "127.9.9.9",
            "0.0.0.0",
            "0.1.2.3",
            "169.254.169.254",
            "::1",
            "::",
            "fe80::1",
        ),
        *("fe80::1%lo", "::ffff:127.0.0.1", "::ffff:169.254.1.1", "::127.0.0.1", "2002:7f00:1::"),
        *("64:ff9b::7f00:1", "::ffff:0:0", "::1"),
    ],
)
def test_addresses_of_this_machine_and_its_link_are_known(address: str) -> None:
    assert is_own_address(address)


@pytest.mark.parametrize(
    "address", ["192.0.2.1", "10.0.0.1", "2001:db8::1", "::ffff:192.0.2.1", "64:ff9b::c000:201"]
)
def test_other_addresses_are_not_taken_for_this_machine(address: str) -> None:
    assert not is_own_address(address)


def resolve(*addresses: str) -> list[Any]:
    return [socket.getaddrinfo(address, 80, type=socket.SOCK_STREAM)[0] for address in addresses]


@pytest.mark.parametrize(
    "host", ["127.1", "2130706433", "0x7f.1", "0177.0.0.1", "0", "::1", "::ffff:7f00:1"]
)
def test_every_spelling_of_loopback_is_refused_to_a_public_host(host: str) -> None:
    with pytest.raises(ProtocolError, match="loopback or link-local"):
        Reach("https://192.0.2.1/x").choose(host, resolve(host))
    named = Reach(f"http://[{host}]/x" if ":" in host else f"http://{host}/x")
    assert named.choose(host, resolve(host))  # the user may name it
    assert named.choose("127.0.0.1", resolve("127.0.0.1"))


def test_a_name_with_a_public_and_a_local_address_leads_to_the_public_one() -> None:
    found = resolve("127.0.0.1", "192.0.2.1", "::1")
    assert Reach("https://192.0.2.9/x").choose("evil.org", found) == found[1:2]


def test_a_host_that_was_public_once_opens_nothing_when_it_becomes_local() -> None:
    judge = Reach("https://evil.org/x")
    assert judge.choose("evil.org", resolve("192.0.2.1"))
    for host in ("evil.org", "EVIL.org.".lower(), "127.0.0.1"):
        with pytest.raises(ProtocolError):
            judge.choose(host, resolve("127.0.0.1"))
    turned = Reach("https://evil.org/x")
    assert turned.choose("evil.org", resolve("127.0.0.1"))
    assert turned.choose("evil.org", resolve("192.0.2.1"))
    with pytest.raises(ProtocolError):
        turned.choose("127.0.0.1", resolve("127.0.0.1"))


@pytest.fixture
def public(monkeypatch: pytest.MonkeyPatch) -> str:
    """An address of a server that counts as one on the network."""
    monkeypatch.setattr(reach, "is_own_address", lambda a: a != PUBLIC and is_own_address(a))
    return PUBLIC


def redirecting(location: Callable[[], str]) -> type[Handler]:
    class Redirecting(Handler):
        def do_GET(self) -> None:
            self.send_response(307)
            self.send_header("Location", location())
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_PROPFIND = do_HEAD = do_GET

    return Redirecting


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "2130706433", "0.0.0.0", "127.1"])
@pytest.mark.parametrize("path", ["object.bin", "folder/"])
def test_a_redirect_of_a_public_server_does_not_reach_a_service_of_this_machine(
    host: str, path: str, public: str, tmp_path: Path
) -> None:
    with serving(b"internal") as (inside, seen):
        location = f"http://{host}:{urlsplit(inside).port}/{path}"
        with running(redirecting(lambda: location), host=public) as url:
            with pytest.raises(CommandError, match="loopback or link-local"):
                fetch_urls([f"{url}/{path}"], Request(tmp_path, FAST, environ=NOWHERE))
        assert seen == []


def test_a_director_on_the_network_cannot_name_a_service_of_this_machine(
    public: str, tmp_path: Path
) -> None:
    with serving(b"internal") as (inside, seen):
        fields = {"decide": staticmethod(lambda handler: name_source(inside))}
        with running(DirectorHandler, host=public, **fields) as url:
            with pytest.raises(CommandError, match="loopback or link-local"):
                fetch_urls(
                    ["osdf:///ns/a.bin"], Request(tmp_path, FAST, federation=url, environ=NOWHERE)
                )
    assert seen == []


def test_a_user_who_names_this_machine_is_led_where_it_says(tmp_path: Path) -> None:
    with serving(b"mine") as (inside, _):
        location = inside.replace("127.0.0.1", "localhost")
        with running(redirecting(lambda: location)) as url:
            patient = replace(FAST, give_up_s=60.0)
            fetch_urls([f"{url}/object.bin"], Request(tmp_path, patient, environ=NOWHERE))
    assert (tmp_path / "object.bin").read_bytes() == b"mine"


def test_no_redirect_leads_from_https_to_http() -> None:
    for location in ("http://host/x", "HTTP://host/x", "http://127.0.0.1/x"):
        with pytest.raises(ProtocolError, match="from https"):
            redirect_target("https://host/x", location)
    assert redirect_target("http://host/x", "http://other/x") == "http://other/x"
    assert redirect_target("http://host/x", "https://other/x") == "https://other/x"
    assert redirect_target("https://host/x", "//other/x") == "https://other/x"


def name_http(require_token: bool, *links: str) -> dict[str, str]:
    links = links or ("http://old-cache.org:8000/ns/x",)
    return {
        "server": "pelican/7",
        "x-pelican-namespace": f"namespace=/ns, require-token={str(require_token).lower()}",
        "link": ", ".join(f'<{link}>; rel="duplicate"; pri={i}' for i, link in enumerate(links)),
    }


def test_a_director_may_name_http_for_a_public_object_alone() -> None:
    base = "https://director/ns/x"
    assert read_director_answer(307, name_http(False), base).verdict is Verdict.FOUND
    refused = read_director_answer(307, name_http(True), base)
    assert (refused.verdict, refused.sources) == (Verdict.PASSING, ())
    both = name_http(True, "http://old-cache.org:8000/ns/x", "https://cache.org/ns/x")
    assert read_director_answer(307, both, base).sources == ("https://cache.org/ns/x",)


def test_a_token_is_not_sent_over_http_to_the_network(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("a-token-for-this-test")
    access = Access(NOWHERE, TokenStore(NOWHERE, tmp_path / "token"))
    for url in ("http://host/x", "http://127.0.0.1.evil.org/x", "http://[::ffff:1.2.3.4]/x"):
        assert access.headers(url, wants_token=True) == access.login(url) == {}


def test_a_listing_server_over_http_gets_no_request_for_a_protected_folder() -> None:
    asked: list[str] = []

    class Tree(TreeHandler):
        def do_PROPFIND(self) -> None:
            asked.append(self.headers["Host"])
            member = RESPONSE.format("/ns/d/x", 1, "") + RESPONSE.format("/ns/d/", 0, FOLDER)
            body = f'<D:multistatus xmlns:D="DAV:">{member}</D:multistatus>'
            self.answer(207, body.encode())

    with running(Tree) as tree:
        namespace = "namespace=/ns, require-token=true, collections-url=http://192.0.2.1:9"
        headers = {"Location": f"{tree}/ns/d", "X-Pelican-Namespace": namespace}
        with directing(lambda handler: (307, dict(headers))) as federation:
            target = parse_target("osdf:///ns/d", federation)
            lookup = Lookup(target, Access(NOWHERE, TokenStore(NOWHERE)), FAST)
            assert [entry.path for entry in Lister(lookup, target).walk()] == ["/ns/d/x"]
    assert asked == [urlsplit(tree).netloc]
