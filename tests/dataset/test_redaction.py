"""What leaves this process: no secret it holds, in whatever place a server repeats it."""

from __future__ import annotations

import json
import logging
import string
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

import pytest

from dataset.errors import CommandError, DataError, PassingError, run_command
from dataset.federation.lookup import Options
from dataset.fetch.request import Request
from dataset.fetch.urls import fetch_urls
from dataset.redaction import hold_secret, redact, redact_all, redact_name
from scripts.fetch_osdf import _write_summaries
from tests.dataset.dav_server import TreeHandler, serving_tree
from tests.dataset.small_server import Handler, running, serving

TOKEN = "Zx9-opaque_token.0123456789~abcdefghijkl"
FAST = Options(stall_s=2.0, give_up_s=0.6, missing_s=0.3, connections=2)
PATIENT = replace(FAST, give_up_s=60.0)  # where the fetch must succeed, however busy the machine


@pytest.mark.parametrize(
    "form",
    [
        lambda t: t,
        lambda t: f"https://evil.org/x?y={t}",
        lambda t: f"https://{t.lower()}.evil.org/",
        lambda t: t[:24],
        lambda t: f"...{t[-20:]}",
        lambda t: quote(t, safe=""),
        lambda t: "".join(f"%{ord(c):02x}" for c in t),
        lambda t: repr(f"{t}{t}"),
    ],
)
def test_a_token_is_removed_in_every_place_and_form(form: Callable[[str], str]) -> None:
    hold_secret(TOKEN)
    shown = redact(f"redirect to {form(TOKEN)} failed")
    assert shown.startswith("redirect to ") and shown.endswith(" failed")
    for start in range(len(TOKEN) - 16):
        assert TOKEN[start : start + 16].lower() not in shown.lower()


def test_a_short_password_is_removed_as_a_word() -> None:
    hold_secret("test")
    hold_secret("hunter2x")
    assert redact("/tests/test/x-test ahunter2xb") == "/tests/[removed]/x-[removed] a[removed]b"


def test_other_text_is_left_alone() -> None:
    hold_secret(TOKEN)
    text = f"{string.printable}{TOKEN[:15]} 100%25 {TOKEN[1:16]}"
    assert redact(text) == text


def test_short_passwords_do_not_give_two_objects_one_name() -> None:
    hold_secret("train")
    hold_secret("valid")
    assert redact_name("https://h/train/x.tar") != redact_name("https://h/valid/x.tar")


def test_json_is_cleaned_inside() -> None:
    hold_secret(TOKEN)
    told = redact_all({"a": [TOKEN, 1, None], TOKEN: {"b": (f"x{TOKEN}", True)}})
    assert told == {"a": ["[removed]", 1, None], "[removed]": {"b": ["x[removed]", True]}}


def test_log_lines_and_tracebacks_are_cleaned(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    hold_secret(TOKEN)

    def crash() -> int:
        try:
            raise KeyError(TOKEN)
        except KeyError:
            logging.getLogger("other").exception("with %s", TOKEN)
            raise

    assert run_command(crash) == 1
    assert "KeyError" in caplog.text and TOKEN not in caplog.text
    told = capsys.readouterr().err
    assert "Traceback" in told and "[removed]" in told and TOKEN not in told


def echo(handler: Handler) -> bool:
    """Repeats the token that it was sent wherever an answer has room for it."""
    token = handler.headers.get("Authorization", "").partition(" ")[2]
    places = {
        "/location": (302, {"Location": f"ftp://{token}/{token}"}),
        "/loop": (302, {"Location": f"/loop?x={token}"}),
        "/other": (302, {"Location": f"http://{token}.invalid/"}),
        "/range": (206, {"Content-Range": token}),
        "/coding": (200, {"Transfer-Encoding": token}),
        "/status": (503, {"Retry-After": token}),
        "/etag": (206, {"ETag": f'"{token}"', "Content-Range": "bytes 0-0/1"}),
    }
    status, headers = places[handler.path.partition("?")[0]]
    handler.send_response(status, token)
    for name, value in headers.items():
        handler.send_header(name, value)
    handler.send_header("Content-Length", "1")
    handler.end_headers()
    handler.wfile.write(b"x")
    return True


@pytest.mark.parametrize(
    "place", ["location", "loop", "other", "range", "coding", "status", "etag"]
)
def test_a_token_that_a_server_repeats_is_nowhere(
    place: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "token").write_text(TOKEN)
    out = tmp_path / "out"
    options = PATIENT if place == "etag" else FAST
    request = Request(out, options, token=tmp_path / "token", environ={"HOME": "/nonexistent"})
    caplog.set_level(logging.DEBUG)
    with serving(b"", echo) as (url, seen):
        summaries = []

        def fetch() -> int:
            try:
                summaries.extend(fetch_urls([url.replace("object.bin", place)], request))
            except CommandError as error:
                summaries.extend(error.summaries)  # type: ignore[attr-defined]
                raise
            return 0

        code = run_command(fetch)
    assert code == (0 if place == "etag" else PassingError.exit_code)
    assert seen[0]["authorization"] == f"Bearer {TOKEN}"
    _write_summaries(out / "summary.json", summaries)
    assert json.loads((out / "summary.json").read_text())[0]["status"]
    told = capsys.readouterr()
    texts = [caplog.text, told.out, told.err]
    texts += [path.read_text(errors="replace") for path in out.rglob("*") if path.is_file()]
    assert place in "".join(texts)
    assert TOKEN[:16].lower() not in "".join(texts).lower()


def test_an_error_about_a_listing_is_clean_in_itself(tmp_path: Path) -> None:
    class Echoing(TreeHandler):
        def do_PROPFIND(self) -> None:
            token = self.headers["Authorization"]
            member = f"<response><href>/d/x</href><status>{token}</status></response>"
            self.answer(207, f'<multistatus xmlns="DAV:">{member}</multistatus>'.encode())

    (tmp_path / "token").write_text(TOKEN)
    request = Request(
        tmp_path / "out", PATIENT, token=tmp_path / "token", environ={"HOME": "/nonexistent"}
    )
    with running(Echoing) as url, pytest.raises(DataError, match="listing gives") as caught:
        fetch_urls([f"{url}/d/"], request)
    assert "[removed]" in str(caught.value) and TOKEN[:16] not in str(caught.value)


def test_a_listing_that_repeats_the_token_names_no_file(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN)
    files = {f"/d/{TOKEN}.txt": b"x"}
    request = Request(
        tmp_path / "out", PATIENT, token=tmp_path / "token", environ={"HOME": "/nonexistent"}
    )
    with running(TreeHandler, files=files, folders=frozenset({"/", "/d"})) as url:
        with pytest.raises(DataError, match="repeats our token"):
            fetch_urls([f"{url}/d/"], request)
    names = [path.name for path in (tmp_path / "out").rglob("*")]
    assert not [name for name in names if TOKEN[:16] in name]


@pytest.mark.parametrize(
    "place",
    [
        *("//{}@", "//{}:x-oauth-basic@", "//me:{}@", "?api_key={}", "?password={}", "?jwt={}"),
        *("?private_link={}&x=1", "?x=1&Auth={}"),
    ],
)
def test_a_secret_in_the_address_itself_is_nowhere(
    place: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    secret = "ghp_ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"

    def misbehave(handler: Handler) -> bool:
        """Repeats the secret once, and is a good server then."""
        if len(seen) > 1:
            return False
        handler.send_response(302)
        handler.send_header("Location", f"ftp://host/{secret}")
        handler.send_header("Content-Length", "0")
        handler.end_headers()
        return True

    caplog.set_level(logging.DEBUG)
    with serving(b"bytes", misbehave) as (url, seen):
        place = place.format(secret)
        url = url.replace("//", place, 1) if place.startswith("//") else url + place
        request = Request(tmp_path, PATIENT, environ={"HOME": "/nonexistent"})
        _write_summaries(tmp_path / "summary.json", fetch_urls([url], request))
    assert (tmp_path / "object.bin").read_bytes() == b"bytes"
    told = capsys.readouterr()
    texts = [path.read_text() for path in tmp_path.iterdir()]
    assert "ftp:" in caplog.text
    assert secret[:16] not in "".join([caplog.text, told.out, told.err, *texts])


def test_a_name_writes_no_lines_and_no_control_characters_into_messages(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    name, large = "a\nerror: all is well\x1b[2J", "b\n\x1b[2J"
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / name).write_text("mine")
    caplog.set_level(logging.INFO)
    request = Request(tmp_path, PATIENT, environ={"HOME": "/nonexistent"})
    with serving_tree({f"/d/{name}": b"abc", f"/d/{large}": bytes(5 << 20)}) as (url, _):
        assert run_command(lambda: len(fetch_urls([f"{url}/d/"], request)) - 1) == 2
        assert run_command(lambda: len(fetch_urls([f"{url}/d/{quote(large)}"], request)) - 1) == 0
    told = capsys.readouterr().err
    assert "all is well" in told and "\\x1b" in told
    assert [line for line in told.splitlines() if line.startswith("error: all")] == []
    assert "\x1b" not in told + caplog.text
    assert all("\n" not in record.getMessage() for record in caplog.records)
