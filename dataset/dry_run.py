"""What a fetch would do: the sources, the size and the digest of an object, nothing fetched."""

from __future__ import annotations

from dataset.connection import Pool
from dataset.federation import Target
from dataset.lookup import Lookup
from dataset.probe import ask_digest, check_network, find_size
from dataset.request import Request, check_native_size


def describe_sources(target: Target, request: Request) -> list[str]:
    """Lines for a person."""
    pool = Pool(request.options.stall_s)
    lookup = Lookup(target, request.access, request.options, pool)
    try:
        if target.scheme != "file":
            check_network(target.discovery or target.url)
        size = find_size(lookup)
        if request.method == "native":
            check_native_size(target.name, size)
        lines = [f"{target.identity}: {size} bytes"]
        for source in lookup.sources.all:
            token = " (with the token)" if source.wants_token else ""
            lines.append(f"  source {source.label}{token}")
        digest = ask_digest(lookup, ["crc32c", "md5", "adler32"], request.options.stall_s)
        if digest is None:
            return [*lines, "  no server offers a digest"]
        return [*lines, f"  {digest[0]} {digest[1]} by {digest[2]}"]
    finally:
        lookup.close()
        pool.close()
