"""How far a long pass over an archive is: a tqdm bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from types import TracebackType
from typing import IO, Any

from dataset.words import count

_log = logging.getLogger("trainyard.progress")
_LINE_S = 10.0


class ByteMeter:
    """Counts bytes and images; `start` says how many there are."""

    def __init__(self, what: str, stream: IO[str]) -> None:
        self._what, self._stream = what, stream
        self._bar: Any = None
        self._done = self._images = self._total = self._total_images = 0
        self._start_s = self._line_s = time.monotonic()

    def __enter__(self) -> ByteMeter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def start(self, num_bytes: int, num_images: int = 0) -> None:
        """Notes the amount of work; 0 bytes: not known."""
        self._total, self._total_images = num_bytes, num_images
        if self._stream.isatty():
            with suppress(ImportError):  # tqdm is not installed: lines instead of a bar
                from tqdm import tqdm

                self._bar = tqdm(
                    total=num_bytes or None,
                    unit="B",
                    unit_scale=True,
                    desc=self._what,
                    file=self._stream,
                )

    def update(self, num_bytes: int, num_images: int = 0) -> None:
        """Notes what was just done."""
        self._done += num_bytes
        self._images += num_images
        if self._bar is not None:
            if self._total_images or self._images:
                self._bar.set_postfix_str(f"{self._images} images", refresh=False)
            self._bar.update(num_bytes)
        elif time.monotonic() - self._line_s >= _LINE_S:
            self._line_s = time.monotonic()
            _log.info("%s", self.describe())

    def describe(self) -> str:
        """The plain line."""
        rate = self._done / 1e6 / max(time.monotonic() - self._start_s, 1e-9)
        total = f" of {self._total / 1e6:.0f}" if self._total else ""
        images = f", {count(self._images, 'image')}" if self._images else ""
        return f"{self._what}: {self._done / 1e6:.0f}{total} MB{images}, {rate:.0f} MB/s"
