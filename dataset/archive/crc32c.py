"""crc32c (Castagnoli) of a block: by an installed wheel at hardware speed, else by numpy."""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

from dataset.checksum import crc32c as _fast

_POLYNOMIAL = 0x82F63B78
_LANES = 4096  # pieces of a block that are summed side by side

Words = npt.NDArray[np.uint32]


def crc32c(data: bytes) -> int:
    """The crc32c of data."""
    return crc32c_numpy(data) if _fast is None else _fast(data)


def crc32c_numpy(data: bytes) -> int:
    """The crc32c of data with numpy alone: equal pieces side by side, then joined."""
    array = np.frombuffer(data, np.uint8)
    length = len(array) // _LANES // 2 * 2
    state = 0xFFFFFFFF
    if length >= 16:
        lanes = array[: length * _LANES].view("<u2").reshape(_LANES, length // 2)
        state = _join(_sum_lanes(np.ascontiguousarray(lanes.T)), length, state)
        array = array[length * _LANES :]
    table = _byte_table()
    for byte in array.tolist():
        state = int(table[(state ^ byte) & 0xFF]) ^ (state >> 8)
    return state ^ 0xFFFFFFFF


def _sum_lanes(rows: npt.NDArray[np.uint16]) -> Words:
    """The register of every lane after its bytes, taken in pairs, each started from zero."""
    table = _pair_table()
    state = np.zeros(rows.shape[1], np.uint32)
    for row in rows:
        state = table[(state ^ row) & 0xFFFF] ^ (state >> 16)
    return state


def _join(lanes: Words, length: int, state: int) -> int:
    """One register from those of neighbouring pieces of the same length (the sum is linear)."""
    shift = _shift_table(length)
    for lane in lanes.tolist():
        moved = lane
        for byte_index in range(4):
            moved ^= shift[byte_index][(state >> (8 * byte_index)) & 0xFF]
        state = moved
    return state


@functools.cache
def _byte_table() -> Words:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(_POLYNOMIAL), table >> 1)
    return table.astype(np.uint32)


@functools.cache
def _pair_table() -> Words:
    table, pairs = _byte_table(), np.arange(65536, dtype=np.uint32)
    for _ in range(2):
        pairs = table[pairs & 0xFF] ^ (pairs >> 8)
    return pairs


@functools.cache
def _shift_table(length: int) -> list[list[int]]:
    """The effect of `length` zero bytes on each value of each byte of the register."""
    table = _byte_table()
    state = np.array([[value << 8 * byte for value in range(256)] for byte in range(4)], np.uint32)
    for _ in range(length):
        state = table[state & 0xFF] ^ (state >> 8)
    return [list(map(int, row)) for row in state]
