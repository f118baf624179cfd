"""What is to be done for one object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from dataset.federation.pelican import Target
from dataset.fetch.ledger import Ledger
from dataset.known_archives import find_published
from dataset.own_names import check_no_part
from dataset.transfer.blocks import BlockMap
from dataset.transfer.store import MapMaker


@dataclass(frozen=True)
class FetchJob:
    """One object to fetch: from where, to where, and what it must be."""

    target: Target
    path: Path
    ledger: Ledger
    given: Mapping[str, str] = field(default_factory=dict)  # kind -> hex, from the user
    index: Path | None = None  # a TAR.index with block checksums
    given_by: str = "given"
    make_map: MapMaker = BlockMap  # in which order it comes, and who is told
    has_readers: bool = False  # others read the partial file: it is never begun anew
    asks_digest: bool = False  # of a server, even if the index vouches for every block

    def with_published(self, size: int) -> FetchJob:
        """The same job, with the published MD5 if its name and size are those of a real archive."""
        known = find_published(self.target.name, size)
        if known is None or self.given:
            return self
        return replace(self, given={"md5": known.md5}, given_by="published")

    def __post_init__(self) -> None:
        check_no_part(Path(self.path.name))
