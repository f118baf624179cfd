"""What a transfer fetched for nothing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Waste:
    """Bytes that were fetched twice, by cause."""

    wrong: int = 0  # failed a checksum
    hedged: int = 0  # a stalled block was asked of two servers and both sent it
    in_flight: int = 0  # less than a chunk when a connection broke
    skipped: int = 0  # a server without ranges had to be read from its start
    compared: int = 0  # fetched to find wrong bytes, when the digest of the whole was wrong
