"""The protocol of a Pelican federation, parsed without a network."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataset.errors import UserError
from dataset.federation.pelican import (
    OSDF_DISCOVERY,
    Link,
    Namespace,
    Verdict,
    drop_authz,
    parse_discovery,
    parse_links,
    parse_namespace,
    parse_target,
    read_director_answer,
)

LINK = (
    '<https://cache-b:8443/ns/x?a=1,2>; rel="duplicate"; pri=2; depth=3, '
    '<https://cache-a:8443/ns/x>; rel="duplicate"; pri=1; depth=3'
)
PELICAN = {"server": "pelican/7.19.1"}


@pytest.mark.parametrize(
    ("text", "identity"),
    [
        ("osdf:///nrp/osdf/a.tar", "pelican://osg-htc.org/nrp/osdf/a.tar"),
        ("osdf://nrp/osdf/a.tar", "pelican://osg-htc.org/nrp/osdf/a.tar"),
        ("pelican://fed.org:8444/ns/a.tar", "pelican://fed.org:8444/ns/a.tar"),
        ("https://host/a%20b.tar", "https://host/a%20b.tar"),
        ("https://host/a b.tar", "https://host/a%20b.tar"),
        ("file:///data/a.tar", "file:///data/a.tar"),
        ("/data/a.tar", "file:///data/a.tar"),
    ],
)
def test_every_kind_of_url_is_read(text: str, identity: str) -> None:
    assert parse_target(text).identity == identity


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("osdf:///ns/file#1.tar", "file#1.tar"),
        ("pelican://fed.org/ns/file#1.tar?directread", "file#1.tar"),
        ("file:///data/a#1.tar", "a#1.tar"),
        ("file:///data/a?1.tar", "a?1.tar"),
        ("/data/a?1#2.tar", "a?1#2.tar"),
        ("/data/a%201.tar", "a%201.tar"),
        ("osdf:///ns/a%3F1.tar", "a?1.tar"),
        ("https://host/a.tar?version=2#part", "a.tar"),
    ],
)
def test_a_name_is_the_one_that_was_written(text: str, name: str) -> None:
    target = parse_target(text)
    assert target.name == name
    assert not target.recursive
    assert target.directread == text.endswith("?directread")


def test_a_question_mark_in_a_federated_name_is_refused_with_the_way_to_write_it() -> None:
    with pytest.raises(UserError, match="%3F"):
        parse_target("osdf:///ns/a?1.tar")


def test_a_child_of_a_path_with_two_slashes_stays_on_its_server() -> None:
    child = parse_target("https://host//a/b.tar").child("//a/b.tar.index")
    assert child.url == "https://host//a/b.tar.index"


def test_osdf_asks_its_own_discovery_host_unless_told_otherwise() -> None:
    assert parse_target("osdf:///ns/a").discovery == OSDF_DISCOVERY
    assert parse_target("osdf:///ns/a", "fed.example").discovery == "https://fed.example"
    assert parse_target("osdf:///ns/a", "http://127.0.0.1:9/x").discovery == "http://127.0.0.1:9"


@pytest.mark.parametrize(
    "text",
    [
        *("osdf:///", "pelican:///ns/a", "ftp://host/a", "relative/path", "https:///a"),
        *("file://host/a", "http://[", "osdf://[/a", "https://a..b/x", "https://host:port/x"),
    ],
)
def test_a_url_that_names_nothing_is_refused_with_a_hint(text: str) -> None:
    with pytest.raises(UserError):
        parse_target(text)


@pytest.mark.parametrize("text", ["osdf:///ns/..", "https://host/", "https://host/a%2Fb"])
def test_a_name_cannot_leave_the_output_folder(text: str) -> None:
    with pytest.raises(UserError):
        _ = parse_target(text).name


def test_a_token_in_a_federation_url_is_refused_and_not_repeated() -> None:
    with pytest.raises(UserError) as caught:
        parse_target("osdf:///ns/a?authz=SECRETSECRET")
    assert "SECRET" not in str(caught.value)


def test_a_signed_https_url_keeps_its_query_but_never_shows_its_token() -> None:
    target = parse_target("https://user:pw@host/a?authz=SECRETSECRET&x=1")
    assert "authz=SECRETSECRET" in target.url
    assert "SECRET" not in target.identity
    assert "pw" not in target.identity


@pytest.mark.parametrize(
    "query",
    [
        "X-Amz-Algorithm=AWS4&X-Amz-Credential=SECRET&X-Amz-Date={0}&X-Amz-Expires={0}"
        "&X-Amz-Signature=SECRET{0}&X-Amz-Security-Token=SECRET",
        "AWSAccessKeyId=SECRET&Expires={0}&Signature=SECRET{0}",
        "sv=2024&se={0}&sr=b&sp=r&sig=SECRET{0}",
        "token=SECRET{0}",
        "access_token=SECRET{0}",
        "authz=SECRET{0}",
    ],
)
def test_an_address_that_is_signed_again_names_the_same_object(query: str) -> None:
    first, second = (
        parse_target(f"https://host/a.tar?version=2&{query.format(n)}") for n in (1, 2)
    )
    assert first.identity == second.identity == "https://host/a.tar?version=2"
    assert "SECRET1" in first.url


def test_an_ordinary_query_stays_in_the_identity() -> None:
    url = "https://host/a.tar?st=1&se=2&expires=never&design=3"
    assert parse_target(url).identity == url


@pytest.mark.parametrize(
    "text",
    ["https://user:p@ss@host/a", "pelican://user:p@ss@host/a"],
)
def test_a_password_with_an_at_sign_does_not_show(text: str) -> None:
    assert "ss@" not in parse_target(text).identity


@pytest.mark.parametrize("text", ["https://user:p/ss@host/a", "https://user:p#ss@host/a"])
def test_a_password_that_breaks_the_address_does_not_show(text: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_target(text)
    assert "ss@" not in str(caught.value)


@pytest.mark.parametrize("location", ["http://[", "https://a..b/x", "root://c/x", "http://h:x/"])
def test_a_broken_location_of_the_director_passes(location: str) -> None:
    answer = read_director_answer(307, {**PELICAN, "location": location}, "https://director/ns/x")
    assert answer.verdict is Verdict.PASSING


def test_sources_come_nearest_first_with_commas_inside_addresses() -> None:
    assert [link.url for link in parse_links(LINK)] == [
        "https://cache-a:8443/ns/x",
        "https://cache-b:8443/ns/x?a=1,2",
    ]
    assert [link.depth for link in parse_links(LINK)] == [3, 3]


def test_a_cache_named_twice_counts_once_and_many_caches_have_a_bound() -> None:
    twice = f"{LINK}, {LINK}"
    assert len(parse_links(twice)) == 2
    many = ", ".join(f'<https://c{n}/x>; rel="duplicate"; pri={n}' for n in range(1, 99))
    assert [link.url for link in parse_links(many)] == [f"https://c{n}/x" for n in range(1, 65)]


def test_links_of_another_relation_or_scheme_are_left_out() -> None:
    value = '<https://a/x>; rel="next", <root://b/x>; rel="duplicate", <https://c/x>; rel=duplicate'
    assert [link.url for link in parse_links(value)] == ["https://c/x"]


@pytest.mark.parametrize("number", ["²", "9" * 5000, "-1", "1e3"])
def test_a_priority_or_depth_that_is_no_number_is_as_if_it_were_not_there(number: str) -> None:
    value = f"<https://a/x>; rel=duplicate; pri={number}; depth={number}, {LINK}"
    assert parse_links(value)[0] == Link("https://a/x", 1, 0)


@given(st.text())
def test_no_link_header_can_crash_the_parser(value: str) -> None:
    assert all(link.url.startswith("http") for link in parse_links(value))


def test_the_namespace_header_is_read_in_any_order_and_case() -> None:
    value = "require-token=True,namespace=/ns,collections-url=https://o:8443,new=1"
    assert parse_namespace(value) == Namespace("/ns", True, "https://o:8443")
    assert parse_namespace("") == Namespace("", False, None)


def test_a_redirect_names_the_sources_and_the_namespace() -> None:
    headers = {
        **PELICAN,
        "link": LINK,
        "location": "https://cache-a:8443/ns/x?authz=SECRET",
        "x-pelican-namespace": "namespace=/ns, require-token=true",
    }
    answer = read_director_answer(307, headers, "https://director/ns/x")
    assert answer.verdict is Verdict.FOUND
    assert answer.sources[0] == "https://cache-a:8443/ns/x"
    assert answer.namespace.require_token


def test_a_token_that_the_director_puts_into_the_location_is_dropped() -> None:
    headers = {**PELICAN, "location": "https://cache/ns/x?directread=&authz=SECRET"}
    answer = read_director_answer(307, headers, "https://director/ns/x")
    assert answer.sources == ("https://cache/ns/x?directread=",)
    assert drop_authz("https://c/x?authz=SECRET") == "https://c/x"


@pytest.mark.parametrize(
    ("status", "headers", "verdict"),
    [
        (404, PELICAN, Verdict.MISSING),
        (404, {"x-pelican-jobid": "1"}, Verdict.MISSING),
        (404, {"server": "nginx"}, Verdict.PASSING),  # the ingress, while the director restarts
        (404, {}, Verdict.PASSING),
        (401, PELICAN, Verdict.DENIED),
        (403, PELICAN, Verdict.DENIED),
        (403, {"server": "nginx"}, Verdict.PASSING),  # an ingress or a firewall
        (401, {}, Verdict.PASSING),
        (429, PELICAN, Verdict.PASSING),
        (500, PELICAN, Verdict.PASSING),
        (200, PELICAN, Verdict.PASSING),
        (302, {"server": "nginx", "location": "https://login.example/"}, Verdict.PASSING),
    ],
)
def test_only_the_director_itself_can_say_that_an_object_is_missing_or_refused(
    status: int, headers: dict[str, str], verdict: Verdict
) -> None:
    assert read_director_answer(status, headers, "https://director/ns/x").verdict is verdict


def test_the_discovery_document_names_the_director() -> None:
    assert parse_discovery(b'{"director_endpoint": "https://d:1/"}', "here") == "https://d:1"
    assert parse_discovery(b'{"director_endpoint": "d.org"}', "here") == "https://d.org"


@pytest.mark.parametrize(
    "body",
    [
        b"<html>",
        b"{}",
        b"[]",
        b'{"director_endpoint": 3}',
        b'{"director_endpoint": "x://"}',
        b"[" * 100_000,
    ],
)
def test_a_discovery_document_without_a_director_says_where(body: bytes) -> None:
    with pytest.raises(ValueError, match="here"):
        parse_discovery(body, "here")
