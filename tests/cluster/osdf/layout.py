"""Where the parts of the mini-OSDF listen and keep their files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.cluster.lifetime import instance, state_folder
from tests.cluster.ports import FIRST

HOST = "127.0.0.1"
SERVERS = ("origin", "cache1", "cache2")
CACHES = ("cache1", "cache2")
PUBLIC = "/public"  # anyone may read
PROTECTED = "/protected"  # readers show a token
NAMESPACES = (PUBLIC, PROTECTED)


@dataclass(frozen=True)
class Layout:
    """One mini-OSDF: its folder, and its ports counted from a base."""

    folder: Path
    base_port: int

    def director_port(self, scheme: str, bare: bool = False) -> int:
        return self.base_port + (2 if bare else 0) + (scheme == "https")

    @property
    def control_port(self) -> int:
        return self.base_port + 9

    def proxy_port(self, server: str, scheme: str) -> int:
        return self._block(server) + (scheme == "https")

    def http_port(self, server: str) -> int:
        """XRootD's own HTTP port, behind the fault proxy."""
        return self._block(server) + 2

    def root_port(self, server: str) -> int:
        """XRootD's port for its own protocol, through which a cache reads the origin."""
        return self._block(server) + 3

    def _block(self, server: str) -> int:
        return self.base_port + 10 * (1 + SERVERS.index(server))

    def director_url(self, scheme: str, bare: bool = False) -> str:
        return f"{scheme}://{HOST}:{self.director_port(scheme, bare)}"

    def proxy_url(self, server: str, scheme: str) -> str:
        return f"{scheme}://{HOST}:{self.proxy_port(server, scheme)}"

    def bare_url(self, server: str) -> str:
        return f"http://{HOST}:{self.http_port(server)}"

    @property
    def ports(self) -> list[int]:
        """Every port that the service listens on."""
        own = [self.director_port(s, bare) for s in ("http", "https") for bare in (False, True)]
        served = [self._block(server) + k for server in SERVERS for k in range(4)]
        return [*own, self.control_port, *served]

    def data(self, server: str) -> Path:
        """The folder that an XRootD serves: the objects of the origin, the blocks of a cache."""
        return self.folder / server / "data"

    @property
    def certificates(self) -> Path:
        return self.folder / "certificates"


def default_layout() -> Layout:
    """The mini-OSDF of this TRAINYARD_INSTANCE."""
    return Layout(state_folder("osdf"), FIRST + 100 * instance())
