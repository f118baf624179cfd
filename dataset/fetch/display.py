"""Shows the progress of a transfer: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import logging
import time
from typing import IO, Any

from dataset.redaction import printable
from dataset.transfer.engine import Transfer
from dataset.transfer.journal import CHUNK

log = logging.getLogger("trainyard.fetch")

LINE_S = 10.0
BAR_S = 0.2


class Display:
    """Shows bytes, speed and each cache's share; one for a whole command."""

    def __init__(self, stream: IO[str]) -> None:
        self._tqdm: Any = _find_tqdm() if stream.isatty() else None
        self._stream = stream
        self._bar: Any = None
        self._next_s = 0.0
        self._last: tuple[float, int] | None = None

    def show(self, transfer: Transfer) -> None:
        """Called again and again while a transfer runs."""
        now = time.monotonic()
        if now < self._next_s and not transfer.blocks.is_complete:
            return
        size = transfer.blocks.size
        here = min(transfer.blocks.num_done * CHUNK, size)
        if self._tqdm is not None:
            self._next_s = now + BAR_S
            self._show_bar(transfer, here, size)
        else:
            self._next_s = now + LINE_S
            self._show_line(transfer, here, size, now)

    def _show_bar(self, transfer: Transfer, here: int, size: int) -> None:
        if self._bar is None:
            name = printable(transfer.lookup.target.name)
            self._bar = self._tqdm(
                total=size, initial=here, unit="B", unit_scale=True, desc=name, file=self._stream
            )
        self._bar.set_postfix_str(describe_shares(transfer), refresh=False)
        self._bar.update(here - self._bar.n)
        if here == size:
            self.close()

    def _show_line(self, transfer: Transfer, here: int, size: int, now: float) -> None:
        then, before = self._last or (now, here)
        self._last = (now, here)
        rate = (here - before) / max(now - then, 1e-9) / 1e6 if now > then else 0.0
        log.info(
            "%s: %.1f of %.1f MB, %.1f MB/s (%s)",
            printable(transfer.lookup.target.name),
            here / 1e6,
            size / 1e6,
            rate,
            describe_shares(transfer),
        )
        if here == size:
            self.close()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        self._bar, self._last, self._next_s = None, None, 0.0


def describe_shares(transfer: Transfer) -> str:
    """Each server's share of the bytes of this start: 'cache-a 70%, cache-b 30%'."""
    total = sum(server.bytes for server in transfer.servers.all)
    if not total:
        return "no bytes yet"
    shares = [
        f"{server.label.partition('://')[2] or server.label} {server.bytes / total:.0%}"
        for server in transfer.servers.all
        if server.bytes
    ]
    return ", ".join(shares)


def _find_tqdm() -> Any:
    try:
        from tqdm import tqdm
    except ImportError:  # tqdm is not installed: plain lines
        return None
    return tqdm
