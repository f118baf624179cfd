"""Every fault that fetch must survive, alone: what is set, and how the fetch must end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.cluster.osdf.fetching import MIB, Fetcher, Result, write_index
from tests.cluster.osdf.rules import Fault

SIZE = 24 * MIB + 12345  # of the object that each case fetches
PATIENT = {"stall_s": 6.0}  # so that a silent block is hedged long before it is given up


@dataclass(frozen=True)
class Case:
    """One fault alone; `faults` lack the path, which the test fills in."""

    name: str
    faults: Sequence[Fault]
    exit_code: int = 0
    says: str = ""  # in the error, a note or a counted problem
    has_index: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    max_wasted: int = 4 * MIB


def cache1(kind: str, **fields: Any) -> Fault:
    return Fault(kind, server="cache1", **fields)


def sources(kind: str, **fields: Any) -> Fault:
    """At both caches and the origin."""
    return Fault(kind, server="[co]*", **fields)


def director(kind: str, **fields: Any) -> Fault:
    return Fault(kind, server="director", **fields)


CASES = [
    Case("cache takes requests and says nothing", [cache1("hang")], options=PATIENT),
    Case("cache closes without a word", [cache1("close")], says="broken answer"),
    Case(
        "cache stalls for ever after 30 % of each answer",
        [cache1("stall", after_share=0.3)],
        options=PATIENT,
    ),
    Case("cache stalls for 2 s", [cache1("stall", after_share=0.5, seconds=2.0)], options=PATIENT),
    Case("cache drips 1 B/s", [cache1("drip", after_share=0.2)], options=PATIENT),
    Case(
        "every source stalls for ever in a fifth of its answers",
        [sources("stall", share=0.2)],
        options={"stall_s": 3.0},
    ),
    Case("cache drips from the first byte", [cache1("drip", after_bytes=0)]),
    Case("cache truncates", [cache1("truncate")], says="ended early"),
    Case("cache resets the connection", [cache1("reset")]),
    Case("every source truncates half of its answers", [sources("truncate", share=0.5)]),
    Case("every source resets half of its answers", [sources("reset", share=0.5)]),
    Case(
        "cache flips a byte, index known",
        [cache1("flip")],
        says="are wrong according to object.bin.index; fetching them again elsewhere",
        has_index=True,
        max_wasted=24 * MIB,
    ),
    Case(
        "cache flips bytes, only a digest of the whole known",
        [cache1("flip", at=list(range(3, 24 * MIB, MIB)))],
        says="replaced from",
        max_wasted=24 * MIB,
    ),
    Case(
        "every source flips the same byte, index known",
        [sources("flip", at=[9 * MIB])],
        exit_code=3,
        says="bytes 8388608-12582911",
        has_index=True,
        max_wasted=24 * MIB,
    ),
    Case(
        "every source flips the same byte, digest only",
        [sources("flip", at=[9 * MIB])],
        exit_code=3,
        says="fails verification",
    ),
    Case("cache answers 404", [cache1("status", status=404)], says="404"),
    Case(
        "every source answers 404 for 2 s",
        [sources("status", status=404, for_s=2.0)],
        says="404",
        options={"missing_s": 30.0},
    ),
    Case(
        "every source answers 429, Retry-After 1",
        [sources("status", status=429, retry_after="1", for_s=1.5)],
        says="429",
    ),
    Case(
        "every source answers 500 for 2 s", [sources("status", status=500, for_s=2.0)], says="500"
    ),
    Case(
        "every source answers 502 for 2 s", [sources("status", status=502, for_s=2.0)], says="502"
    ),
    Case(
        "every source answers 503 for 2 s", [sources("status", status=503, for_s=2.0)], says="503"
    ),
    Case(
        "both caches answer 503 for ever: the origin serves",
        [Fault("status", server="cache*", status=503)],
        says="503",
    ),
    Case(
        "every source answers 503 for ever",
        [sources("status", status=503)],
        exit_code=75,
        says="what has arrived is kept",
        options={"give_up_s": 3.0},
    ),
    Case("cache ignores ranges", [cache1("ignore_range")]),
    Case("every source ignores ranges", [sources("ignore_range")], max_wasted=48 * MIB),
    Case(
        "cache sends a wrong start in Content-Range",
        [cache1("wrong_range", what="start")],
        says="wrong Content-Range",
    ),
    Case(
        "cache sends a wrong size in Content-Range",
        [cache1("wrong_range", what="total")],
        says="another size",
    ),
    Case(
        "cache sends other bytes under the right range, index known",
        [cache1("wrong_range", what="body")],
        has_index=True,
        max_wasted=24 * MIB,
    ),
    Case("cache sends too much", [cache1("extend")], says="wrong Content-Length"),
    Case("cache redirects to itself", [cache1("loop")], says="redirects in a loop"),
    Case("cache shows an ingress page", [cache1("ingress")], says="404"),
    Case("director restarts: an ingress page for 3 s", [director("ingress", for_s=3.0)]),
    Case("director hangs once", [director("hang", times=1)]),
    Case("director answers 500 for 2 s", [director("status", status=500, for_s=2.0)]),
    Case("director closes for 2 s", [director("close", for_s=2.0)]),
    Case("director redirects in a loop for 2 s", [director("loop", for_s=2.0)]),
    Case("director names one cache twice", [director("links", caches=["cache2", "cache2"])]),
    Case(
        "no server offers a digest",
        [Fault("headers", set_headers={"Digest": None})],
        says="not verified",
    ),
    Case(
        "the digest is mislabelled",
        [Fault("headers", set_headers={"Digest": "crc32c=abc"})],
        says="not verified",
    ),
]


def run_case(case: Case, osdf: ModuleType, path: str, content: bytes, out: Path) -> Result:
    """Sets the faults of a case for one object and fetches it."""
    if case.has_index:
        write_index(out / "object.bin.index", content)
    faults = [replace(fault, path=path) for fault in case.faults]
    with osdf.faults(*faults, seed=1):
        return Fetcher(osdf, out)(path, **case.options)
