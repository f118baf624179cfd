"""HTCondor's file-transfer plugin around our fetch engine; scripts/build_plugin.py packs it.

HTCondor calls `osdf_plugin -classad` to see what it can do, and `osdf_plugin -infile IN -outfile
OUT` with a ClassAd for each file. It runs on the host's Python (3.9 or later, standard library
only), outside of the job's container, and HTCondor's watchdog counts its run time as a stall: it
must end within a limit of its own.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataset.errors import CommandError, FinalError, PassingError, UserError
from dataset.federation.lookup import Options
from dataset.federation.pelican import parse_target
from dataset.federation.reach import check_network
from dataset.federation.tokens import Access, TokenStore
from dataset.fetch.job import FetchJob
from dataset.fetch.ledger import Ledger
from dataset.fetch.object import fetch_object
from dataset.redaction import redact
from dataset.untrusted import parse_number

CAPABILITIES = {
    "MultipleFileSupport": True,
    "PluginType": "FileTransfer",
    "PluginVersion": "0.1.0",
    "ProtocolVersion": 2,
    "SupportedMethods": "osdf,pelican",
}
MAX_MINUTES = 100_000.0
DEFAULT_MINUTES = 50.0  # HTCondor ends a plugin after 60 and calls it a stall
MISSING_SHARE = 0.1  # of the limit: every server must answer 404 for so long to be believed
MAX_MISSING_S = 30.0  # but not longer: a slot waits meanwhile
PATIENCE_SHARE = 0.9  # of the time left: the engine can say what was wrong, the alarm cannot
MAX_ERROR_CHARS = 1000
FINAL = "will not be tried again"  # train.sub looks for these words in HoldReason
_ATTRIBUTE = re.compile(r'(\w+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s;\]]+))')


@dataclass(frozen=True)
class Order:
    """One file that HTCondor wants."""

    url: str
    path: Path


class OutOfTime(BaseException):
    """The limit of the plugin is over; not an Exception, so that no retry loop catches it."""


def main(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """0 when every file is there, else 1: HTCondor knows no other codes."""
    if list(arguments) == ["-classad"]:
        print("\n".join(f"{name} = {to_classad(value)}" for name, value in CAPABILITIES.items()))
        return 0
    words = [word for word in arguments if word != "-upload"]
    if len(words) != 4 or {words[0], words[2]} != {"-infile", "-outfile"}:
        print("usage: osdf_plugin -classad | -infile IN -outfile OUT", file=sys.stderr)
        return 1
    places = {words[0]: words[1], words[2]: words[3]}
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    orders = list(read_orders(Path(places["-infile"]).read_text(errors="surrogateescape")))
    if "-upload" in arguments:
        error = UserError("uploads are not supported; use HTCondor's own file transfer")
        results = [describe(order, time.time(), error=error) for order in orders]
    else:
        try:
            results = fetch_all(orders, environ)
        except CommandError as error:  # in the settings: reported for every file
            results = [describe(order, time.time(), error=error) for order in orders]
    text = "".join(f"[ {write_ad(result)} ]\n" for result in results)
    Path(places["-outfile"]).write_text(text, errors="surrogateescape")
    return 0 if all(result["TransferSuccess"] for result in results) else 1


def fetch_all(orders: Sequence[Order], environ: Mapping[str, str]) -> list[dict[str, Any]]:
    """The result of each file; all of them share the plugin's time."""
    settings = read_settings(environ)
    limit_s = 60 * read_minutes(settings)
    end_s = time.monotonic() + limit_s
    access = Access(environ, TokenStore(environ, uid=os.getuid()))
    signal.signal(signal.SIGALRM, _raise_out_of_time)
    results = []
    for order in orders:
        begin = time.time()
        try:
            left_s = end_s - time.monotonic()
            options = make_options(limit_s, left_s)
            signal.setitimer(signal.ITIMER_REAL, left_s)
            size = fetch_one(order, settings.get("pluginfederation") or None, access, options)
            signal.setitimer(signal.ITIMER_REAL, 0)
            results.append(describe(order, begin, size=size))
        except OutOfTime:
            late = PassingError(f"{order.path.name} did not arrive within {limit_s / 60:g} minutes")
            results.append(describe(order, begin, error=late))
        except Exception as error:
            signal.setitimer(signal.ITIMER_REAL, 0)
            if not isinstance(error, (CommandError, OSError)):
                print(redact(traceback.format_exc()), file=sys.stderr)  # our bug
            results.append(describe(order, begin, error=error))
    return results


def read_minutes(settings: Mapping[str, str]) -> float:
    """The limit of the plugin from the job's ad."""
    text = settings.get("pluginminutes") or str(DEFAULT_MINUTES)
    try:
        return parse_number(text, MAX_MINUTES)
    except ValueError as error:
        raise UserError(f"PluginMinutes: {error}; give minutes, such as 50") from None


def make_options(limit_s: float, left_s: float) -> Options:
    """The engine's options for the time that is left."""
    if left_s <= 0:
        raise OutOfTime
    missing_s = min(MAX_MISSING_S, MISSING_SHARE * limit_s)
    patience_s = PATIENCE_SHARE * left_s
    return Options(give_up_s=patience_s, missing_s=missing_s, deadline_s=patience_s)


def fetch_one(order: Order, federation: str | None, access: Access, options: Options) -> int:
    """Fetches one file to its place, leaving nothing else behind; returns its size."""
    try:
        target = parse_target(order.url, federation)
    except UserError as error:
        raise FinalError(str(error)) from None
    check_network(target.discovery or target.url)
    ledger = Ledger(order.path.parent, is_kept=False)
    return fetch_object(FetchJob(target, order.path, ledger), access, options).size


def describe(
    order: Order, begin: float, size: int = 0, error: BaseException | None = None
) -> dict[str, Any]:
    """What HTCondor is told about one file; an error goes to the event log, readable by all."""
    result: dict[str, Any] = {
        "TransferSuccess": error is None,
        "TransferFileName": str(order.path),
        "TransferUrl": redact(order.url),
        "TransferProtocol": order.url.partition(":")[0],
        "TransferType": "download",
        "TransferTotalBytes": size,
        "TransferFileBytes": size,
        "TransferStartTime": int(begin),
        "TransferEndTime": int(time.time()),
    }
    if error is not None:
        text = f"{FINAL}: {error}" if isinstance(error, FinalError) else str(error)
        text = " ".join(redact(text or type(error).__name__).split())
        result["TransferError"] = text[:MAX_ERROR_CHARS]
        result["TransferRetryable"] = isinstance(error, PassingError)
    return result


def read_orders(text: str) -> Iterator[Order]:
    """The files of an -infile: ClassAds in brackets, one after the other."""
    for ad in re.findall(r'\[((?:[^"\]]|"(?:[^"\\]|\\.)*")*)\]', text):
        values = {name.lower(): _unquote(quoted) for name, quoted, _ in _ATTRIBUTE.findall(ad)}
        if "url" in values:
            path = Path(values.get("localfilename") or values["url"].rpartition("/")[2])
            yield Order(values["url"], path.absolute())


def read_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """The attributes of the job's ad: the only way to pass settings to a plugin."""
    path = Path(environ.get("_CONDOR_JOB_AD") or ".job.ad")
    text = path.read_text(errors="replace") if path.is_file() else ""
    found = (_ATTRIBUTE.match(line) for line in text.splitlines())
    return {m[1].lower(): _unquote(m[2]) if m[2] is not None else m[3] for m in found if m}


def write_ad(values: Mapping[str, Any]) -> str:
    """The inside of a ClassAd."""
    return " ".join(f"{name} = {to_classad(value)};" for name, value in values.items())


def to_classad(value: Any) -> str:
    """A value as ClassAds write it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return str(value)


def _unquote(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text)


def _raise_out_of_time(_number: int, _frame: Any) -> None:
    raise OutOfTime


if __name__ == "__main__":
    # Threads that still wait for a dead server must not keep the plugin alive.
    code = main(sys.argv[1:], os.environ)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
