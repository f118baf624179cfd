"""An MD5 whose state can be saved and taken up by a later process, which hashlib's cannot."""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import hashlib
from typing import Any

_CONTEXT_BYTES = 92  # of libcrypto's MD5_CTX: 4 + 2 + 16 + 1 words of 32 bits
_SPARE_BYTES = 164
_DIGEST_BYTES = 16
_NAMES = ("libcrypto.so.3", "libcrypto.so.1.1")  # where find_library finds nothing


class ResumableMd5:
    """The MD5 of a stream, by libcrypto; `state` is all that there is to know of it."""

    def __init__(self, library: Any, state: bytes = b"") -> None:
        self._library = library
        self._context = ctypes.create_string_buffer(_CONTEXT_BYTES + _SPARE_BYTES)
        if state:
            ctypes.memmove(self._context, state, _CONTEXT_BYTES)
        else:
            library.MD5_Init(self._context)

    @property
    def state(self) -> bytes:
        return self._context.raw[:_CONTEXT_BYTES]

    def update(self, data: memoryview) -> None:
        """Takes in bytes; the view must be writable, as that of a buffer is."""
        view = (ctypes.c_char * len(data)).from_buffer(data)
        self._library.MD5_Update(self._context, view, ctypes.c_size_t(len(data)))

    def hexdigest(self) -> str:
        """The digest so far; the stream may go on."""
        copy = ctypes.create_string_buffer(self._context.raw, len(self._context))
        digest = ctypes.create_string_buffer(_DIGEST_BYTES)
        self._library.MD5_Final(digest, copy)
        return digest.raw.hex()


class PlainMd5:
    """The same by hashlib; its state cannot be saved."""

    state = b""

    def __init__(self) -> None:
        self._hash = hashlib.md5(usedforsecurity=False)

    def update(self, data: memoryview) -> None:
        self._hash.update(data)

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


Md5 = ResumableMd5 | PlainMd5


def start_md5() -> Md5:
    """The MD5 of a stream from its start."""
    library = find_libcrypto()
    return PlainMd5() if library is None else ResumableMd5(library)


def continue_md5(state: bytes) -> Md5 | None:
    """The MD5 of a stream that an earlier process began; None when nobody can go on with it."""
    library = find_libcrypto()
    if library is None or len(state) != _CONTEXT_BYTES:
        return None
    return ResumableMd5(library, state)


@functools.cache
def find_libcrypto() -> Any:
    """The library, if there is one whose MD5 can be saved and is right."""
    for name in (ctypes.util.find_library("crypto"), *_NAMES):
        try:
            library = ctypes.CDLL(name) if name else None
            if library is not None and _is_right(library):
                return library
        except (OSError, AttributeError):  # not here, or built without the old functions
            continue
    return None


def _is_right(library: Any) -> bool:
    """Whether a digest is right that was saved and taken up in the middle of a block."""
    data = memoryview(bytearray(range(200)))
    first = ResumableMd5(library)
    first.update(data[:77])
    second = ResumableMd5(library, first.state)
    second.update(data[77:])
    return second.hexdigest() == hashlib.md5(data, usedforsecurity=False).hexdigest()
