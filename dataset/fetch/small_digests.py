"""The origin's digests of small files, asked for each file as long as the origin offers any."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from urllib.parse import urlsplit

from dataset import checksum
from dataset.federation.connection import NETWORK_ERRORS, Pool, explain
from dataset.federation.document import RIVAL_S, get_document
from dataset.federation.framing import ProtocolError
from dataset.federation.lookup import Lookup
from dataset.federation.servers import name_server
from dataset.federation.webdav import Entry
from dataset.spelling import decode, encode

log = logging.getLogger("trainyard.fetch")

MAX_SILENT = 3


def address_beside(url: str, known_path: str, entry: Entry) -> str:
    """The address of an entry, derived from that of the known object on the same server."""
    parts = urlsplit(url)
    path, known = decode(parts.path), decode(known_path)  # a server may spell it anew
    prefix = encode(path[: len(path) - len(known)])
    return parts._replace(path=prefix + entry.path).geturl()


def names_by_path(url: str, known_path: str) -> bool:
    """Whether a server's addresses end in the object's path, so that others can be derived.

    A server with /get?object=PATH would send the known object for each of the others.
    """
    return decode(urlsplit(url).path).endswith(decode(known_path))


class SmallDigests:
    """Compares files with the origin's digests, until it gave none a few times in a row."""

    def __init__(self, lookup: Lookup, known_path: str) -> None:
        self._lookup = lookup
        self._known_path = known_path  # the object that the look-up's sources were named for
        self._num_silent = 0
        # A digest of a few MiB comes at once; if not, it is asked for again with more time.
        self._pool = Pool(min(RIVAL_S, lookup.pool.timeout_s), lookup.reach)
        origin = lookup.ask(directread=True)
        self._place, self._wants_token = "", origin.namespace.require_token
        named = [u for u in origin.sources[:1] if u.startswith("http")]
        if named and names_by_path(named[0], known_path):
            self._place = named[0]

    def close(self) -> None:
        self._pool.close()

    def verify(self, entry: Entry, data: bytearray) -> list[str]:
        """How the bytes were verified, if at all; raises for wrong bytes."""
        if not self._place or self._num_silent >= MAX_SILENT:
            return []
        kind = "crc32c" if checksum.HAS_CRC32C else "adler32"
        url = address_beside(self._place, self._known_path, entry)
        headers = {"Want-Digest": kind, **self._lookup.headers(url, self._wants_token)}
        found = checksum.to_hex(kind, checksum.compute(kind, data))
        digest, was_answered = self._ask(self._pool, url, headers, kind)
        if digest != found and (digest is not None or not was_answered):
            digest = self._ask_again(url, headers, kind)
        if digest is None:
            self._num_silent += 1
            if self._num_silent == MAX_SILENT:
                log.info("%s offers no digests; its files are not verified", name_server(url))
            return []
        self._num_silent = 0
        if digest != found:
            raise ProtocolError("wrong bytes")
        return [f"{kind} ({name_server(url)})"]

    def _ask_again(self, url: str, headers: Mapping[str, str], kind: str) -> str | None:
        """On a new connection: XRootD may repeat the Digest of an earlier request on a kept one."""
        with Pool(self._lookup.pool.timeout_s, self._lookup.reach) as pool:
            return self._ask(pool, url, headers, kind)[0]

    def _ask(
        self, pool: Pool, url: str, headers: Mapping[str, str], kind: str
    ) -> tuple[str | None, bool]:
        """(the origin's digest, whether it answered); no answer is not the sender's fault."""
        try:
            status, found, _, _ = get_document(pool, url, headers, "HEAD")
        except NETWORK_ERRORS as error:
            log.debug("no digest from %s: %s", name_server(url), explain(error))
            return None, False
        digest = checksum.parse_digest_header(found.get("digest", "")).get(kind)
        return (digest if status == 200 else None), True
