"""Collections of a federation: listed with WebDAV, as a tree of files with their sizes."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from urllib.parse import urljoin, urlsplit

from dataset.errors import DataError, PassingError, UserError
from dataset.federation.connection import NETWORK_ERRORS, Pool, explain
from dataset.federation.document import RIVAL_S, get_with_rival
from dataset.federation.framing import read_retry_after
from dataset.federation.lookup import Lookup
from dataset.federation.pelican import Target, Verdict, speaks_for_federation
from dataset.federation.servers import MAX_RETRY_AFTER_S
from dataset.federation.tokens import may_carry_secret
from dataset.federation.webdav import Entry, parse_listing
from dataset.redaction import holds_secret, redact
from dataset.spelling import decode

log = logging.getLogger("trainyard.fetch")

MAX_FILES = 2_000_000  # an ImageNet folder has 1.3 million
MAX_FOLDERS = 100_000  # and 2,000 folders
MAX_DEPTH = 128  # folders in one another
FIRST_WAIT_S, MAX_WAIT_S = 0.5, 30.0
SILENCE = 3  # a server reads a large folder before it sends a byte: it gets so many stall times


class NoListing(OSError):
    """An answer to PROPFIND that is not a listing.

    `verdict` is 'missing', 'denied', 'unlistable' or 'broken'; '' when it may be better in a while.
    """

    def __init__(self, reason: str, verdict: str = "", retry_after_s: float = 0.0) -> None:
        super().__init__(reason)
        self.verdict = verdict
        self.retry_after_s = retry_after_s


def judge_status(status: int, is_trusted: bool) -> str:
    """The verdict of a status; final only if the server is one that can know."""
    verdicts = {401: "denied", 403: "denied", 404: "missing", 405: "unlistable", 501: "unlistable"}
    return verdicts.get(status, "") if is_trusted else ""


def _pick_wait(num_tries: int, retry_after_s: float) -> float:
    """Seconds before the next try: longer each time, and at least what the server asks for."""
    wait_s = min(MAX_WAIT_S, FIRST_WAIT_S * 2.0 ** min(num_tries, 8)) * random.uniform(0.5, 1.0)
    return max(wait_s, min(retry_after_s, MAX_RETRY_AFTER_S))


def has_collection_form(target: Target) -> bool:
    """Whether the user wrote the URL as that of a collection: ?recursive or a slash at the end."""
    return target.recursive or target.path.endswith("/")


def path_below(entry: Entry, target: Target) -> Path:
    """Where a member lies below the collection; its parts were checked when it was listed."""
    root = decode(target.path).rstrip("/")
    return Path(decode(entry.path)[len(root) :].lstrip("/"))


def looks_like_object(target: Target) -> bool:
    """Whether the name has an ending such as .tar: then the server need not be asked."""
    return bool(PurePosixPath(decode(target.path)).suffix)


class Lister:
    """Lists the folders of one federation or server; passing failures are tried again."""

    def __init__(self, lookup: Lookup, target: Target) -> None:
        self._lookup = lookup
        self._target = target
        self._pool = Pool(SILENCE * lookup.options.stall_s, lookup.reach)
        self._base: tuple[str, bool] | None = None

    def is_collection(self) -> bool:
        """Asks the server whether the path is a folder; False when it cannot be listed at all.

        A failure that stays temporary is raised: a folder must not be fetched like a file.
        """
        path = self._target.path.rstrip("/")
        try:
            entries = self._list(path, depth=0)
        except PassingError:
            raise
        except (UserError, DataError) as error:
            log.info("taken for an object: %s", error)
            return False
        return any(entry.is_folder for entry in entries)

    def walk(self) -> Iterator[Entry]:
        """Every file below the target, folder by folder.

        A folder that contains itself never ends, so depth, folders, files and the time without a
        new file are bounded. Beyond a bound nothing is fetched, rather than a part.
        """
        folders = [(self._target.path.rstrip("/"), 0)]
        num_files, num_folders, last_file_at = 0, 1, time.monotonic()
        while folders:
            folder, depth = folders.pop()
            self._lookup.check_time(
                time.monotonic(), last_file_at, "file", self._target, f"{num_folders} folders"
            )
            for entry in self._list(folder):
                if entry.is_folder:
                    num_folders += 1
                    folders.append((entry.path, depth + 1))
                else:
                    num_files, last_file_at = num_files + 1, time.monotonic()
                    yield entry
                self._check_bounds(entry, depth, num_folders, num_files)

    def _check_bounds(self, entry: Entry, depth: int, num_folders: int, num_files: int) -> None:
        name = self._target.identity
        fix = "does a folder contain itself? fetch its subfolders one by one"
        if entry.is_folder and depth >= MAX_DEPTH:
            end = decode(entry.path)[-60:]
            raise UserError(f"{name} has folders more than {MAX_DEPTH} deep (...{end}); {fix}")
        if num_folders > MAX_FOLDERS or num_files > MAX_FILES:
            what = f"{MAX_FILES} files" if num_files > MAX_FILES else f"{MAX_FOLDERS} folders"
            raise UserError(f"{name} has more than {what}; {fix}")

    def list_top(self) -> list[Entry]:
        """The members of the target itself, folders too."""
        return self._list(self._target.path.rstrip("/"))

    def _list(self, path: str, depth: int = 1) -> list[Entry]:
        """The members of a folder, or with depth 0 the path itself.

        Temporary failures are retried with backoff until it is time to give up. Final ones (no
        such folder, no permission) are believed after they were repeated for some time.
        """
        target, folder = self._target.child(path), path if depth else path.rpartition("/")[0]
        options, started = self._lookup.options, time.monotonic()
        agreed, since, num_tries = "", started, 0
        while True:
            failure = self._try(path, depth, folder)
            if not isinstance(failure, NoListing):
                return failure
            self._base, now, num_tries = None, time.monotonic(), num_tries + 1
            verdict = failure.verdict
            if verdict == "denied" and self._lookup.reread_token():
                verdict, num_tries = "", 0
            if verdict != agreed:
                agreed, since = verdict, now
            # Servers without listings are common: do not wait for one when asked about a name.
            wanted_s = 0.0 if agreed == "unlistable" and depth == 0 else options.missing_s
            if agreed and now - since >= wanted_s:
                raise self._final_error(agreed, target, str(failure))
            self._lookup.check_time(now, started, "listing", target, str(failure))
            self._lookup.tell(f"listing {target.identity}", str(failure))
            end = started + options.give_up_s
            end = min(end, since + wanted_s) if agreed else end
            time.sleep(max(0.01, min(_pick_wait(num_tries, failure.retry_after_s), end - now)))

    def _try(self, path: str, depth: int, folder: str) -> list[Entry] | NoListing:
        """One request; every failure is returned."""
        try:
            entries = parse_listing(self._ask(path, depth), folder)
            if any(holds_secret(entry.path) for entry in entries):  # it would name a file
                raise ValueError("it repeats our token in a name")
            return entries
        except NoListing as error:
            return error
        except NETWORK_ERRORS as error:  # before ValueError: a bad certificate is one as well
            return NoListing(explain(error))
        except ValueError as error:
            return NoListing(redact(str(error)), "broken")

    def _final_error(self, agreed: str, target: Target, problem: str) -> UserError | DataError:
        if agreed == "broken":
            return DataError(f"{target.identity} cannot be listed: {problem}")
        if agreed == "unlistable":
            return UserError(f"{target.identity} cannot be listed ({problem}); give its files")
        return self._lookup.final_error(agreed, target)

    def _ask(self, path: str, depth: int) -> bytes:
        if self._base is None:
            self._base = self._find_base()
        base, wants_token = self._base
        url = base + path
        headers = {"Depth": str(depth), **self._lookup.headers(url, wants_token)}
        # The same server: a cache would list what it has, which may be a part.
        status, found, body, _ = get_with_rival(
            self._pool, url, headers, "PROPFIND", rival_s=SILENCE * RIVAL_S
        )
        if status == 207:
            return body
        is_trusted = self._target.scheme != "pelican" or speaks_for_federation(found)
        raise NoListing(
            f"the server answered {status} to PROPFIND",
            judge_status(status, is_trusted),
            read_retry_after(found, time.time()),
        )

    def _find_base(self) -> tuple[str, bool]:
        """(scheme://host of the server that lists, whether it wants the token)."""
        if self._target.scheme != "pelican":
            return urljoin(self._target.url, "/").rstrip("/"), False
        answer = self._lookup.ask(method="PROPFIND")
        if answer.verdict is not Verdict.FOUND:
            raise NoListing(answer.reason, judge_status(answer.status, answer.is_pelican))
        where, wants_token = answer.namespace.collections_url, answer.namespace.require_token
        if not where or (wants_token and not may_carry_secret(where)):
            where = answer.sources[0]
        parts = urlsplit(where)
        return f"{parts.scheme}://{parts.netloc}", wants_token
