"""Fetches objects and collections from OSDF, another Pelican federation, https or a file."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import re
import sys
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dataset.packages import require_packages

require_packages()

from dataset.checksum import parse_given
from dataset.errors import UserError, run_command
from dataset.federation.lookup import Options
from dataset.fetch.inspect import describe_sources
from dataset.fetch.request import METHODS, Request, Summary
from dataset.fetch.urls import fetch_urls
from dataset.redaction import redact_all
from train.records.record import STAGES_FILE
from train.records.stage_meter import StageMeter, measure_stage

EXAMPLE = """example:
  python scripts/fetch_osdf.py osdf:///nrp/osdf/ILSVRC2012/ILSVRC2012_img_train.tar --out data
  python scripts/fetch_osdf.py https://HOST/v.tar --out data --md5 29b22e2961454d5413ddabcf34fc5622

Run the same command again to continue where it stopped. Exit codes: 0 done, 2 user error (the
message says how to fix it), 3 the bytes are wrong, 75 a temporary failure (try again), 130 Ctrl-C.
docs/fetch.md has the details.
"""


def main() -> int:
    args = _parse_args()
    logging.basicConfig(
        format="%(asctime)s %(message)s",
        datefmt="%H:%M:%S",
        level=logging.DEBUG if args.verbose else logging.INFO,
    )
    request = _read_request(args)
    if args.dry_run:
        for url in args.urls:
            print("\n".join(describe_sources(request.parse(url), request)))
        return 0
    with measure_stage("fetch", args.record or args.out) as meter:
        try:
            summaries = fetch_urls(args.urls, request)
        except Exception as error:
            with suppress(OSError):  # the first error is the one to report
                _report(args, meter, getattr(error, "summaries", []))
            raise
        _report(args, meter, summaries)
    return 0


def _report(args: argparse.Namespace, meter: StageMeter, summaries: list[Summary]) -> None:
    num_bytes = sum(summary.fetched_bytes for summary in summaries)
    meter.extra = {"method": args.method, "bytes_fetched": num_bytes}
    _write_summaries(args.summary, summaries)


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "urls",
        nargs="+",
        metavar="URL",
        help="osdf:///path, pelican://HOST/path, or an https, http or file URL",
    )
    add("--out", type=Path, required=True, help="folder to write to; objects keep their names")
    add("--md5", help="the MD5 that the object must have, in hex")
    add("--sha256", help="the SHA-256 that the object must have, in hex")
    add("--crc32", help="the CRC-32 that the object must have, in hex")
    add(
        "--require-digest",
        action="store_true",
        help="refuse an object that nothing verifies (exit 3)",
    )
    add("--index", type=Path, help="a TAR.index with block checksums (default: OUT/NAME.index)")
    add("--recursive", action="store_true", help="fetch all files below the URLs (collections)")
    add(
        "--connections",
        type=int,
        default=8,
        help="connections open at once, over all caches (default 8)",
    )
    add(
        "--caches",
        type=int,
        default=3,
        help="caches used at once; the others are spares (default 3)",
    )
    add(
        "--stall-seconds",
        type=float,
        default=20.0,
        help="drop a connection after this many seconds without data (default 20)",
    )
    add(
        "--give-up-after",
        default="6h",
        help="exit with 75 when no byte came for this long: seconds, or 30m, 6h (default 6h)",
    )
    add(
        "--missing-seconds",
        type=float,
        default=120.0,
        help="seconds that every server must answer 404 before the object counts as missing "
        "(default 120)",
    )
    add("--federation", help="discovery host for osdf:// URLs (default https://osg-htc.org)")
    add("--token", type=Path, help="file with a bearer token (default: see docs/fetch.md)")
    add("--netrc", type=Path, help="file with logins for https URLs (default: ~/.netrc)")
    add(
        "--method",
        choices=METHODS,
        default="auto",
        help="one of the three ways that the OSG study compared (default auto: as the URL says)",
    )
    add("--dry-run", action="store_true", help="only show the sources; fetch nothing")
    add("--summary", type=Path, help="file for the JSON summary ('-' for standard output)")
    add("--record", type=Path, help="folder for stages.jsonl (default: OUT)")
    add("--verbose", action="store_true", help="also log every failed request")
    return parser.parse_args()


def _read_request(args: argparse.Namespace) -> Request:
    given = {}
    for kind in ("md5", "sha256", "crc32"):
        if getattr(args, kind) is not None:
            try:
                given[kind] = parse_given(kind, getattr(args, kind))
            except ValueError as error:
                raise UserError(f"--{kind}: {error}") from None
    options = Options(
        connections=args.connections,
        stall_s=args.stall_seconds,
        give_up_s=_read_duration(args.give_up_after),
        missing_s=args.missing_seconds,
        max_caches=args.caches,
        require_digest=args.require_digest,
    )
    return Request(
        args.out,
        options,
        args.federation,
        args.token,
        args.netrc,
        given,
        args.index,
        args.recursive,
        args.method,
        own_files=_own_files(args),
    )


def _own_files(args: argparse.Namespace) -> tuple[Path, ...]:
    """The files that this command writes beside the objects."""
    stages = (args.record or args.out) / STAGES_FILE
    return (stages,) if args.summary in (None, Path("-")) else (stages, args.summary)


def _read_duration(text: str) -> float:
    """Seconds of '90', '30m', '6h' or '2d'."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text.strip())
    if not match:
        raise UserError(f"--give-up-after {text!r}: give seconds, or 30m, 6h, 2d")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]


def _write_summaries(path: Path | None, summaries: list[Summary]) -> None:
    told = redact_all([dataclasses.asdict(summary) for summary in summaries])
    text = json.dumps(told, indent=1) + "\n"
    if path == Path("-"):
        print(text, end="")
    elif path is not None:
        path.write_text(text)


if __name__ == "__main__":
    sys.exit(run_command(main))
