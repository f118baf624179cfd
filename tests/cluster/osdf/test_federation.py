"""The mini-OSDF is a faithful stand-in: XRootD's answers, the director's, tokens, pelicanfs."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.cluster.osdf.client import request

pytestmark = pytest.mark.osdf
CONTENT = random.Random(3).randbytes(3_000_001)


@pytest.fixture(scope="module")
def path(osdf: ModuleType) -> str:
    """An object of 3 MB."""
    result: str = osdf.put("federation/three-megabytes.bin", CONTENT)
    return result


@pytest.mark.parametrize("place", ["ORIGIN_HTTP_URL", "BARE_ORIGIN_URL", "CACHE", "BARE_CACHE"])
def test_range_read_gives_206_and_these_bytes(osdf: ModuleType, path: str, place: str) -> None:
    urls = {"CACHE": osdf.CACHE_HTTP_URLS[0], "BARE_CACHE": osdf.BARE_CACHE_URLS[1]}
    url = urls.get(place) or getattr(osdf, place)
    answer = request(url + path, headers={"Range": "bytes=1000000-1999999"})
    assert answer.status == 206
    assert answer.headers["content-range"] == f"bytes 1000000-1999999/{len(CONTENT)}"
    assert answer.content == CONTENT[1_000_000:2_000_000]


def test_origin_gives_a_digest_and_a_cache_refuses(osdf: ModuleType, path: str) -> None:
    wanted = {"Want-Digest": "md5"}
    answer = request(osdf.ORIGIN_HTTP_URL + path, "HEAD", wanted)
    md5 = base64.b64encode(hashlib.md5(CONTENT).digest()).decode()
    assert answer.headers["digest"] == f"md5={md5}"
    assert request(osdf.CACHE_HTTP_URLS[0] + path, "HEAD", wanted).status == 405


def test_xrootd_sends_neither_etag_nor_last_modified(osdf: ModuleType, path: str) -> None:
    answer = request(osdf.ORIGIN_HTTP_URL + path, "HEAD")
    assert answer.headers["content-length"] == str(len(CONTENT))
    assert not {"etag", "last-modified"} & answer.headers.keys()


@pytest.mark.parametrize("scheme", ["https", "http"])
def test_director_names_every_cache_in_order(osdf: ModuleType, path: str, scheme: str) -> None:
    director = {"https": osdf.DIRECTOR_URL, "http": osdf.DIRECTOR_HTTP_URL}[scheme]
    caches = {"https": osdf.CACHE_URLS, "http": osdf.CACHE_HTTP_URLS}[scheme]
    origin = {"https": osdf.ORIGIN_URL, "http": osdf.ORIGIN_HTTP_URL}[scheme]
    for target in (path, f"/api/v1.0/director/object{path}"):
        answer = request(director + target, ca=osdf.CA_FILE)
        assert answer.status == 307
        assert answer.headers["location"] == caches[0] + path
        assert answer.headers["link"] == ", ".join(
            f'<{cache}{path}>; rel="duplicate"; pri={k}; depth=2'
            for k, cache in enumerate(caches, start=1)
        )
        assert answer.headers["x-pelican-namespace"] == (
            f"namespace=/public, require-token=false, collections-url={origin}"
        )


def test_director_names_the_origin_for_a_direct_read(osdf: ModuleType, path: str) -> None:
    for target in (f"/api/v1.0/director/origin{path}", f"{path}?directread"):
        answer = request(osdf.DIRECTOR_HTTP_URL + target)
        assert answer.status == 307
        assert answer.headers["location"].startswith(osdf.ORIGIN_HTTP_URL + path)


def test_discovery_names_the_director(osdf: ModuleType) -> None:
    for url in (osdf.DIRECTOR_URL, osdf.DIRECTOR_HTTP_URL):
        answer = request(f"{url}/.well-known/pelican-configuration", ca=osdf.CA_FILE)
        assert json.loads(answer.content)["director_endpoint"] == url


def test_director_says_404_itself_for_what_no_origin_has(osdf: ModuleType) -> None:
    for name in ("/public/federation/not-there", "/nowhere/x"):
        answer = request(osdf.DIRECTOR_HTTP_URL + name)
        assert answer.status == 404
        assert answer.headers["server"].startswith("pelican/")
        assert json.loads(answer.content)["status"] == "error"


def test_curl_gets_the_whole_object_through_the_director(osdf: ModuleType, path: str) -> None:
    command = ["curl", "-sfL", "--cacert", str(osdf.CA_FILE), osdf.DIRECTOR_URL + path]
    assert subprocess.run(command, capture_output=True, check=True, timeout=30).stdout == CONTENT


def test_protected_object_opens_with_a_token_only(osdf: ModuleType) -> None:
    path = osdf.put("federation/secret.bin", b"secret", osdf.PROTECTED)
    token = osdf.make_token()
    bearer = {"Authorization": f"Bearer {token}"}
    redirect = request(osdf.DIRECTOR_URL + path, headers=bearer, ca=osdf.CA_FILE)
    assert redirect.headers["x-pelican-namespace"].startswith(
        "namespace=/protected, require-token=true"
    )
    assert f"issuer={osdf.DIRECTOR_URL}" in redirect.headers["x-pelican-token-generation"]
    assert request(redirect.headers["location"], ca=osdf.CA_FILE).content == b"secret"
    cache = osdf.CACHE_URLS[1] + path
    assert request(cache, headers=bearer, ca=osdf.CA_FILE).content == b"secret"
    for bad in (
        {},
        {"Authorization": f"Bearer {token[:-4]}AAAA"},
        {"Authorization": f"Bearer {osdf.make_token(lifetime_s=-1)}"},
        {"Authorization": f"Bearer {osdf.make_token(scope='storage.read:/other')}"},
    ):
        assert request(cache, headers=bad, ca=osdf.CA_FILE).status == 403
    osdf.revoke(token)
    assert request(cache, headers=bearer, ca=osdf.CA_FILE).status == 403


def test_name_is_never_given_to_another_content(osdf: ModuleType) -> None:
    path = osdf.put("federation/once.bin", b"once")
    assert osdf.put("federation/once.bin", b"once") == path
    osdf.remove(path)
    with pytest.raises(ValueError, match="choose a new name"):
        osdf.put("federation/once.bin", b"twice")


def test_servers_are_not_reachable_from_outside(osdf: ModuleType) -> None:
    addresses = subprocess.run(["hostname", "-I"], capture_output=True, text=True).stdout.split()
    for address in (a for a in addresses if ":" not in a):
        for url in (osdf.BARE_ORIGIN_URL, osdf.DIRECTOR_HTTP_URL, osdf.ORIGIN_HTTP_URL):
            with pytest.raises(OSError):
                request(url.replace("127.0.0.1", address) + "/public")


def test_pelicanfs_reads_and_lists_through_it(osdf: ModuleType, path: str, tmp_path: Path) -> None:
    """The stand-in is faithful: a client of the real federation cannot tell the difference."""
    secret = osdf.put("pelicanfs/secret.bin", b"secret", osdf.PROTECTED)
    osdf.put("pelicanfs/folder/a.txt", b"a" * 10)
    osdf.put("pelicanfs/folder/b.txt", b"b" * 20)
    program = f"""
import hashlib, json
from pelicanfs import PelicanFileSystem
fs = PelicanFileSystem("pelican://{osdf.DIRECTOR_URL.removeprefix("https://")}")
whole = fs.cat("{path}")
with fs.open("{path}", "rb") as file:
    file.seek(1_000_000)
    part = file.read(1000)
listing = {{entry["name"]: entry["size"] for entry in fs.ls("/public/pelicanfs/folder")}}
direct = PelicanFileSystem(fs.discovery_url, direct_reads=True).cat("{path}")
print(json.dumps([hashlib.md5(whole).hexdigest(), hashlib.md5(part).hexdigest(), listing,
                  direct == whole, fs.cat("{secret}").decode()]))
"""
    environment = {**os.environ, "SSL_CERT_FILE": str(osdf.CA_FILE)}
    environment |= {"REQUESTS_CA_BUNDLE": str(osdf.CA_FILE), "BEARER_TOKEN": osdf.make_token()}
    environment["XDG_CACHE_HOME"] = str(tmp_path)  # where it keeps the issuer's keys
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout) == [
        hashlib.md5(CONTENT).hexdigest(),
        hashlib.md5(CONTENT[1_000_000:1_001_000]).hexdigest(),
        {"/public/pelicanfs/folder/a.txt": 10, "/public/pelicanfs/folder/b.txt": 20},
        True,
        "secret",
    ]
