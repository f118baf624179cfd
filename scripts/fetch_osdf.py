"""Fetches objects and collections from OSDF, another Pelican federation, https or a file."""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
from contextlib import suppress
from dataclasses import dataclass
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
from dataset.flags import REQUIRED, flag, make_parser, parse_duration, parse_flags
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


@dataclass(frozen=True, kw_only=True)
class FetchFlags:
    """The flags of scripts/fetch_osdf.py."""

    urls: tuple[str, ...] = flag(
        REQUIRED,
        "osdf:///path, pelican://HOST/path, or an https, http or file URL",
        "URL",
        nargs="+",
    )
    out: Path = flag(REQUIRED, "folder to write to; objects keep their names")
    md5: str | None = flag(None, "the MD5 that the object must have, in hex")
    sha256: str | None = flag(None, "the SHA-256 that the object must have, in hex")
    crc32: str | None = flag(None, "the CRC-32 that the object must have, in hex")
    require_digest: bool = flag(False, "refuse an object that nothing verifies (exit 3)")
    index: Path | None = flag(None, "a TAR.index with block checksums (default: OUT/NAME.index)")
    recursive: bool = flag(False, "fetch all files below the URLs (collections)")
    connections: int = flag(8, "connections open at once, over all caches (default 8)")
    caches: int = flag(3, "caches used at once; the others are spares (default 3)")
    stall_seconds: float = flag(
        20.0, "drop a connection after this many seconds without data (default 20)"
    )
    give_up_after: str = flag(
        "6h", "exit with 75 when no byte came for this long: seconds, or 30m, 6h (default 6h)"
    )
    missing_seconds: float = flag(
        120.0,
        "seconds that every server must answer 404 before the object counts as missing "
        "(default 120)",
    )
    federation: str | None = flag(
        None, "discovery host for osdf:// URLs (default https://osg-htc.org)"
    )
    token: Path | None = flag(None, "file with a bearer token (default: see docs/fetch.md)")
    netrc: Path | None = flag(None, "file with logins for https URLs (default: ~/.netrc)")
    method: str = flag(
        "auto",
        "one of the three ways that the OSG study compared (default auto: as the URL says)",
        choices=METHODS,
    )
    dry_run: bool = flag(False, "only show the sources; fetch nothing")
    summary: Path | None = flag(None, "file for the JSON summary ('-' for standard output)")
    record: Path | None = flag(None, "folder for stages.jsonl (default: OUT)")
    verbose: bool = flag(False, "also log every failed request")

    @property
    def digests(self) -> dict[str, str]:
        """The checksums that were given: kind -> hex."""
        texts = {"md5": self.md5, "sha256": self.sha256, "crc32": self.crc32}
        given = {kind: text for kind, text in texts.items() if text is not None}
        for kind, text in given.items():
            try:
                given[kind] = parse_given(kind, text)
            except ValueError as error:
                raise UserError(f"--{kind}: {error}") from None
        return given

    @property
    def options(self) -> Options:
        return Options(
            connections=self.connections,
            stall_s=self.stall_seconds,
            give_up_s=parse_duration("--give-up-after", self.give_up_after),
            missing_s=self.missing_seconds,
            max_caches=self.caches,
            require_digest=self.require_digest,
        )

    @property
    def own_files(self) -> tuple[Path, ...]:
        """The files that this command writes beside the objects."""
        stages = (self.record or self.out) / STAGES_FILE
        return (stages,) if self.summary in (None, Path("-")) else (stages, self.summary)

    def make_request(self) -> Request:
        """The request that is asked for; raises for a value that cannot be."""
        return Request(
            self.out,
            given=self.digests,
            options=self.options,
            federation=self.federation,
            token=self.token,
            netrc=self.netrc,
            index=self.index,
            recursive=self.recursive,
            method=self.method,
            own_files=self.own_files,
        )


def main() -> int:
    flags = parse_flags(FetchFlags, make_parser(__doc__, EXAMPLE))
    logging.basicConfig(
        format="%(asctime)s %(message)s",
        datefmt="%H:%M:%S",
        level=logging.DEBUG if flags.verbose else logging.INFO,
    )
    request = flags.make_request()
    if flags.dry_run:
        for url in flags.urls:
            print("\n".join(describe_sources(request.parse(url), request)))
        return 0
    with measure_stage("fetch", flags.record or flags.out) as meter:
        try:
            summaries = fetch_urls(flags.urls, request)
        except Exception as error:
            with suppress(OSError):  # the first error is the one to report
                _report(flags, meter, getattr(error, "summaries", []))
            raise
        _report(flags, meter, summaries)
    return 0


def _report(flags: FetchFlags, meter: StageMeter, summaries: list[Summary]) -> None:
    num_bytes = sum(summary.fetched_bytes for summary in summaries)
    meter.extra = {"method": flags.method, "bytes_fetched": num_bytes}
    _write_summaries(flags.summary, summaries)


def _write_summaries(path: Path | None, summaries: list[Summary]) -> None:
    told = redact_all([dataclasses.asdict(summary) for summary in summaries])
    text = json.dumps(told, indent=1) + "\n"
    if path == Path("-"):
        print(text, end="")
    elif path is not None:
        path.write_text(text)


if __name__ == "__main__":
    sys.exit(run_command(main))
