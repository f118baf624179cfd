"""Removes secrets from all text that leaves this process, by their form and by their value."""

from __future__ import annotations

import logging
import re
import threading
from typing import Any
from urllib.parse import unquote

# The parts of a signed address that grant access to anyone who reads them.
SIGNATURES = (
    *("x-amz-signature", "x-amz-credential", "x-amz-security-token"),
    *("x-goog-signature", "x-goog-credential", "signature", "sig", "token", "access_token"),
    *("authz", "bearer_token", "awsaccesskeyid", "googleaccessid", "key-pair-id", "policy"),
    *("api_key", "apikey", "api-key", "access_key", "private_token", "auth_token", "auth", "jwt"),
    *("password", "passwd", "secret", "client_secret", "rlkey", "private_link"),
)
_SHAPES = (
    re.compile(rf"(?i)((?<![\w-])(?:{'|'.join(SIGNATURES)})=)[^&\s\"'<>;,)]+"),
    re.compile(r"(?i)(authz=|access_token=|bearer_token=)[^&\s\"'<>;,)]+"),
    re.compile(r"(?i)(authorization[\"']?\s*[:=]\s*[\"']?(?:bearer|basic)\s+)[^\s\"',;)]+"),
    re.compile(r"(?i)(\b(?:bearer|basic)(?:\s+|%20))[A-Za-z0-9._~+/=-]{8,}"),
    re.compile(r"(://)[^/?#\s\"'<>]+(?=@)"),  # user:password@host, up to the last @
    # A bare JWT. Its head is short; without a bound many heads in a row take quadratic time.
    re.compile(r"()\beyJ[A-Za-z0-9_-]{4,1000}\.[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]*)?"),
)
_REMOVED = "[removed]"
_PIECE = 16  # a server may repeat a part of a token, or a message may cut it off
_MIN_LENGTH = 4  # replacing a password of three letters would garble every message
_MIN_INSIDE = 8  # a shorter one is looked for as a whole word

_pieces: frozenset[str] = frozenset()  # of long secrets
_short: dict[str, re.Pattern[str]] = {}
_lock = threading.Lock()


def hold_secret(value: str) -> None:
    """Removes this value from all text from now on, wherever a server repeats it."""
    global _pieces, _short
    value = value.lower()
    if len(value) < _MIN_LENGTH:
        return
    with _lock:
        if len(value) >= _PIECE:
            _pieces |= {value[i : i + _PIECE] for i in range(len(value) - _PIECE + 1)}
        elif value not in _short:
            edge = ("", "") if len(value) >= _MIN_INSIDE else (r"(?<!\w)", r"(?!\w)")
            pattern = re.compile(f"(?i){edge[0]}{re.escape(value)}{edge[1]}")
            _short = {**_short, value: pattern}
    install_in_logging()


def forget_secrets() -> None:
    """Forgets all values, for tests."""
    global _pieces, _short
    with _lock:
        _pieces, _short = frozenset(), {}


def redact(text: str) -> str:
    """The text without tokens and passwords."""
    text = _redact_as_is(text)
    if "%" in text and (decoded := unquote(text)) != text:
        clean = _redact_values(decoded)
        return clean if clean != decoded else text
    return text


def printable(text: str) -> str:
    """The text in one line without control characters, which a server may put into a name."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def redact_name(text: str) -> str:
    """The name of an object without secrets, the same in every start.

    Short passwords stay: two objects whose paths hold one each must keep two names.
    """
    return _redact_pieces(_redact_shapes(text))


def holds_secret(text: str) -> bool:
    """Whether a part of a long secret stands in the text, percent-encoded or not."""
    return any(_redact_pieces(form) != form for form in (text, unquote(text)))


def redact_all(value: Any) -> Any:
    """A value as JSON has them, every text in it without secrets."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, dict):
        return {redact_all(key): redact_all(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact_all(item) for item in value]
    return value


def _redact_as_is(text: str) -> str:
    return _redact_values(_redact_shapes(text))


def _redact_shapes(text: str) -> str:
    for pattern in _SHAPES:
        text = pattern.sub(rf"\1{_REMOVED}", text)
    return text


def _redact_values(text: str) -> str:
    for pattern in _short.values():
        text = pattern.sub(_REMOVED, text)
    return _redact_pieces(text)


def _redact_pieces(text: str) -> str:
    """The text without any 16 characters in a row of a long secret."""
    pieces = _pieces
    if not pieces or len(text) < _PIECE:
        return text
    lower = text.lower()
    if len(lower) != len(text):  # a few letters change their length
        lower = text
    kept, end = [], 0  # `end`: behind the last piece
    for start in range(len(text) - _PIECE + 1):
        if lower[start : start + _PIECE] in pieces:
            if start > end or not end:
                kept += [text[end:start], _REMOVED]
            end = start + _PIECE
    return "".join([*kept, text[end:]])


def install_in_logging() -> None:
    """Every line that is logged in this process is redacted from now on."""
    make = logging.getLogRecordFactory()
    if getattr(make, "redacts", False):
        return

    def make_redacted(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(*args, **kwargs)
        record.msg, record.args = redact(record.getMessage()), None
        if record.exc_info:
            record.exc_text = redact(logging.Formatter().formatException(record.exc_info))
        return record

    make_redacted.redacts = True  # type: ignore[attr-defined]
    logging.setLogRecordFactory(make_redacted)
