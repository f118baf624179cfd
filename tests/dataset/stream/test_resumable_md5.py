"""An MD5 that is saved and taken up again is that of the whole."""

from __future__ import annotations

import hashlib
import os

import pytest

from dataset.stream import resumable_md5
from dataset.stream.resumable_md5 import ResumableMd5, continue_md5, find_libcrypto, start_md5

CONTENT = memoryview(bytearray(os.urandom(3 * 64 + 17)))


def test_a_hash_is_continued_at_every_byte() -> None:
    assert find_libcrypto(), "Debian's pip cannot do without it"
    for cut in range(len(CONTENT) + 1):
        first = start_md5()
        first.update(CONTENT[:cut])
        assert first.hexdigest() == hashlib.md5(CONTENT[:cut]).hexdigest()
        second = continue_md5(first.state)
        assert isinstance(second, ResumableMd5)
        second.update(CONTENT[cut:])
        assert second.hexdigest() == hashlib.md5(CONTENT).hexdigest()


def test_without_libcrypto_a_hash_is_right_but_cannot_be_continued(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resumable_md5, "find_libcrypto", lambda: None)
    plain = start_md5()
    plain.update(CONTENT)
    assert plain.hexdigest() == hashlib.md5(CONTENT).hexdigest()
    assert plain.state == b""
    assert continue_md5(plain.state) is None
    assert continue_md5(bytes(92)) is None


@pytest.mark.parametrize("state", [b"", b"short", bytes(93)])
def test_a_state_of_another_form_is_not_used(state: bytes) -> None:
    assert continue_md5(state) is None
