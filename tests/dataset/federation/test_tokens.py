"""Where secrets come from, who gets them, and that they never show."""

from __future__ import annotations

import base64
import json
import time
from pathlib import Path

import pytest

from dataset.errors import UserError
from dataset.federation.tokens import (
    TokenStore,
    find_login,
    may_carry_secret,
    read_expiry,
    read_logins,
)
from dataset.redaction import redact


def make_jwt(expires_in_s: float) -> str:
    payload = json.dumps({"exp": time.time() + expires_in_s}).encode()
    parts = [b'{"alg":"none"}', payload, b"signature"]
    return ".".join(base64.urlsafe_b64encode(part).rstrip(b"=").decode() for part in parts)


def test_the_usual_places_are_looked_at_in_order(tmp_path: Path) -> None:
    creds = tmp_path / "creds"
    creds.mkdir()
    (creds / "scitokens.use").write_text('{"access_token": "from-condor", "expires_in": 60}')
    environ = {"_CONDOR_CREDS": str(creds), "XDG_RUNTIME_DIR": str(tmp_path)}
    assert TokenStore(environ, uid=7).token == "from-condor"
    (tmp_path / "bt_u7").write_text("from-runtime-dir\n")
    assert TokenStore(environ, uid=7).token == "from-runtime-dir"
    (tmp_path / "file").write_text("from-file\n")
    environ["BEARER_TOKEN_FILE"] = str(tmp_path / "file")
    assert TokenStore(environ, uid=7).token == "from-file"
    environ["BEARER_TOKEN"] = "from-environment"
    assert TokenStore(environ, uid=7).token == "from-environment"
    (tmp_path / "given").write_text("given")
    assert TokenStore(environ, tmp_path / "given", uid=7).token == "given"


def test_an_expired_token_gives_way_to_one_that_is_not(tmp_path: Path) -> None:
    good = make_jwt(600)
    (tmp_path / "bt_u0").write_text(good)
    environ = {"BEARER_TOKEN": make_jwt(-60), "XDG_RUNTIME_DIR": str(tmp_path)}
    assert TokenStore(environ).token == good


def test_a_renewed_token_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("first")
    store = TokenStore({}, file)
    assert not store.reread()
    file.write_text("second")
    assert store.reread()
    assert store.token == "second"


def test_a_token_file_that_is_not_there_is_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        TokenStore({}, tmp_path / "none")


def test_the_message_about_an_expired_token_says_when_and_not_what(tmp_path: Path) -> None:
    token = make_jwt(-60)
    store = TokenStore({"BEARER_TOKEN": token, "XDG_RUNTIME_DIR": str(tmp_path)})
    assert "expired at" in store.describe()
    assert token not in store.describe()
    assert read_expiry("opaque") is None


@pytest.mark.parametrize(
    "text",
    [
        "https://cache/x?authz=Bearer%20abcdefgh12345678&y=1",
        "https://cache/x?y=1&authz=abcdefgh12345678",
        "Authorization: Bearer abcdefgh12345678",
        "{'Authorization': 'Basic abcdefgh12345678'}",
        "https://abcdefgh12345678:abcdefgh12345678@host/x",
        "got eyJabcdefgh12345678.abcdefgh12345678.abcdefgh12345678 back",
        "access_token=abcdefgh12345678",
        "https://user:p@abcdefgh12345678@host/x",
        "https://s3/x?X-Amz-Signature=abcdefgh12345678&x=1",
        "https://s3/x?X-Amz-Credential=abcdefgh12345678%2F2026&x=1",
        "https://s3/x?X-Amz-Security-Token=abcdefgh12345678",
        "https://s3/x?a=1&Signature=abcdefgh12345678",
        "https://blob/x?sig=abcdefgh12345678",
        "https://host/x?token=abcdefgh12345678",
    ],
)
def test_no_form_of_a_secret_survives_redaction(text: str) -> None:
    assert "abcdefgh12345678" not in redact(text)


def test_redaction_leaves_ordinary_addresses_alone() -> None:
    text = (
        "https://cache-a.example:8443/ns/a.tar?directread from 10.0.0.1, require-token=true, "
        "https://host/a?mail=me@host&design=1"
    )
    assert redact(text) == text


@pytest.mark.parametrize(
    ("url", "may"),
    [
        ("https://cache/x", True),
        ("http://cache/x", False),
        ("http://127.0.0.1:8000/x", True),
        ("http://[::1]:8000/x", True),
        ("http://localhost/x", True),
        ("http://127.0.0.1.evil.org/x", False),
        ("file:///x", False),
    ],
)
def test_secrets_travel_over_https_or_loopback_only(url: str, may: bool) -> None:
    assert may_carry_secret(url) is may


def test_a_login_comes_from_netrc_for_its_own_host(tmp_path: Path) -> None:
    file = tmp_path / "netrc"
    file.write_text("machine image-net.org login me password secret\n")
    file.chmod(0o600)
    logins = read_logins({}, file)
    found = find_login("https://image-net.org/a.tar", logins)
    assert found == "Basic " + base64.b64encode(b"me:secret").decode()
    assert find_login("https://elsewhere.org/a.tar", logins) is None
    assert find_login("http://image-net.org/a.tar", logins) is None  # in the clear


def test_a_broken_netrc_is_named_without_its_content(tmp_path: Path) -> None:
    file = tmp_path / "netrc"
    file.write_text("machine image-net.org lgin me password hunter2\n")
    file.chmod(0o600)
    with pytest.raises(UserError) as caught:
        read_logins({}, file)
    assert "hunter2" not in str(caught.value)


def test_a_netrc_that_is_no_text_is_the_users_mistake(tmp_path: Path) -> None:
    file = tmp_path / "netrc"
    file.write_bytes(b"machine a login \xff\xfe password b\n")
    with pytest.raises(UserError, match="not a text"):
        read_logins({}, file)


def test_only_a_netrc_that_was_named_must_be_there(tmp_path: Path) -> None:
    assert read_logins({"HOME": str(tmp_path)}) is None
    with pytest.raises(UserError, match="no such file"):
        read_logins({}, tmp_path / "none")


@pytest.mark.parametrize("exp", ["1e400", "1e300", "-1e300", "[" * 5000, "9" * 5000, "[]"])
def test_an_absurd_expiry_is_none(exp: str, tmp_path: Path) -> None:
    payload = base64.urlsafe_b64encode(f'{{"exp": {exp}}}'.encode()).decode().rstrip("=")
    token = f"e30.{payload}.x"
    (tmp_path / "token").write_text(token)
    store = TokenStore({}, tmp_path / "token")
    assert store.token == token
    assert "not accepted" in store.describe()


def test_a_token_file_of_hostile_json_holds_no_token(tmp_path: Path) -> None:
    for text in ('{"a":' * 5000, '{"access_token": ' + "9" * 5000 + "}"):
        (tmp_path / "token").write_text(text)
        assert TokenStore({}, tmp_path / "token").token is None
