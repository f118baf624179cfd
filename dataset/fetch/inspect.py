"""What a fetch would do: the servers, the size and the digest of an object; nothing is fetched."""

from __future__ import annotations

from dataset.federation.lookup import Lookup
from dataset.federation.pelican import Target
from dataset.federation.reach import check_network
from dataset.fetch.digests import ask_digest
from dataset.fetch.request import Request, check_native_size
from dataset.fetch.size import find_size
from dataset.fetch.urls import is_collection, list_files
from dataset.words import count


def describe_sources(target: Target, request: Request) -> list[str]:
    """Lines for a person."""
    if target.scheme != "file":
        check_network(target.discovery or target.url)
    if is_collection(target, request.access, request):
        files = list_files(target, request.access, request.options, request.out)
        num_bytes = sum(entry.size or 0 for entry, _ in files)
        unknown = sum(entry.size is None for entry, _ in files)
        note = f", {unknown} more of unknown size" if unknown else ""
        known = count(len(files) - unknown, "file")
        return [f"{target.identity}: {known}, {num_bytes} bytes{note}"]
    with Lookup(target, request.access, request.options) as lookup:
        size = find_size(lookup)
        if request.method == "native":
            check_native_size(target.name, size)
        lines = [f"{target.identity}: {size} bytes"]
        for server in lookup.servers.all:
            token = " (with the token)" if server.wants_token else ""
            lines.append(f"  source {server.label}{token}")
        digest = ask_digest(lookup, ["crc32c", "md5", "adler32"], request.options.stall_s)
        if digest is None:
            return [*lines, "  no server offers a digest"]
        return [*lines, f"  {digest.kind} {digest.value} by {digest.where}"]
