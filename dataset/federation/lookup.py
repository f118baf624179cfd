"""Asks the federation where an object is, repeatedly, until it is clear or time is up."""

from __future__ import annotations

import logging
import random
import threading
import time
from dataclasses import dataclass

from dataset.errors import FinalError, PassingError, UserError
from dataset.federation.connection import NETWORK_ERRORS, Pool, explain
from dataset.federation.document import get_with_rival
from dataset.federation.pelican import (
    DISCOVERY_PATH,
    DirectorAnswer,
    Target,
    Verdict,
    parse_discovery,
    read_director_answer,
)
from dataset.federation.reach import Reach
from dataset.federation.servers import Servers
from dataset.federation.tokens import Access, hold_url_secrets
from dataset.redaction import redact

log = logging.getLogger("trainyard.fetch")

LOOKUP_S = 5.0  # the most between two look-ups while the director fails
MAX_LOOKUP_S = 30.0  # and while it is the servers that fail
LOOKUP_TIMEOUT_S = 15.0
AGAIN_S = 300.0  # a problem that comes back is logged again after this time
REREAD_S = 0.5  # the least time between two looks at the token's file


@dataclass(frozen=True)
class Options:
    """The options of a transfer; scripts/fetch_osdf.py has flags for them."""

    connections: int = 8
    stall_s: float = 20.0
    give_up_s: float = 6 * 3600.0
    missing_s: float = 120.0  # how long all servers must answer 404 (or 401/403) before it is final
    deadline_s: float | None = None  # of the whole transfer: a transfer plugin has a limit
    max_caches: int = 3  # asked at the same time; the others stand by
    require_digest: bool = False  # an object without any digest is refused

    def __post_init__(self) -> None:
        if not 1 <= self.connections <= 64:
            raise UserError(f"--connections {self.connections}: give 1 to 64")
        if self.max_caches < 1:
            raise UserError(f"--caches {self.max_caches}: give 1 or more")
        for name in ("stall_s", "give_up_s", "missing_s"):
            if not getattr(self, name) > 0:
                raise UserError(f"{name} is {getattr(self, name)}; give a number above 0")


class Teller:
    """Logs the problems of one look-up; those of an optional object only with --verbose."""

    def __init__(self, is_optional: bool = False) -> None:
        self._is_optional = is_optional
        self._told: dict[str, tuple[str, float]] = {}  # who -> its last problem, when it was told
        self._lock = threading.Lock()

    def tell(self, who: str, problem: str) -> None:
        """One line, unless it is the same as the last one about `who`."""
        now = time.monotonic()
        with self._lock:
            last, told_at = self._told.get(who, ("", 0.0))
            is_news = last != problem or now - told_at >= AGAIN_S
            if is_news:
                self._told[who] = (problem, now)
        log.log(
            logging.INFO if is_news and not self._is_optional else logging.DEBUG,
            "%s: %s",
            who,
            problem,
        )


class Lookup:
    """Keeps `servers` filled from the director, and says when an object is missing for good.

    Its connections are closed at the end of a `with`.
    """

    def __init__(
        self,
        target: Target,
        access: Access,
        options: Options,
        is_optional: bool = False,
    ) -> None:
        self.target = target
        self.access = access
        self.options = options
        self.servers = Servers(options.max_caches)
        self.lock = threading.RLock()
        self.tell = Teller(is_optional).tell
        self.answer = DirectorAnswer(Verdict.PASSING, reason="not asked yet")
        self.num_lookups = 0
        self.reach = Reach(target.discovery or target.url)
        self.pool = Pool(options.stall_s, self.reach)  # for the object's own bytes
        self._pool = Pool(min(options.stall_s, LOOKUP_TIMEOUT_S), self.reach)
        self._director: str | None = None
        self._next_lookup = 0.0
        self._failed_lookups = 0
        self._agreed_since: tuple[str, float] | None = None
        self._lookups_before = 0  # since when all have agreed
        self._asked_origin = False
        self._next_reread = 0.0
        self._started = time.monotonic()
        self._running = threading.Lock()
        hold_url_secrets(target.url)
        if target.scheme != "pelican":
            access.login(target.url)  # a broken ~/.netrc raises here, not in a thread

    def headers(self, url: str, wants_token: bool) -> dict[str, str]:
        """The Authorization of one request for the object's bytes."""
        if self.target.scheme == "pelican":
            return self.access.headers(url, wants_token)
        return self.access.login(url)

    def is_due(self, now: float) -> bool:
        """Whether it is time for another look-up."""
        return now >= self._next_lookup and not self._running.locked()

    def refresh(self, with_origin: bool = False) -> None:
        """Looks the object up again; at the origin too once the caches have failed."""
        if not self._running.acquire(blocking=False):
            return
        try:
            with self.lock:
                known = self.servers.all
                all_failed = bool(known) and all(s.failures or s.refused for s in known)
                wants_origin = with_origin or all_failed
            answer = self.ask(self.target.directread)
            origin = None
            if wants_origin and not self.target.directread:
                origin = self.ask(directread=True)
            self._take(answer, origin)
        finally:
            self._running.release()

    def _take(self, answer: DirectorAnswer, origin: DirectorAnswer | None) -> None:
        with self.lock:
            self.answer = answer
            self.num_lookups += 1
            token = answer.namespace.require_token
            self.servers.update(answer.sources, token, self.target.directread)
            if origin is not None and origin.verdict is Verdict.FOUND:
                self.servers.update(origin.sources, origin.namespace.require_token, is_origin=True)
            if origin is not None:
                self._asked_origin = origin.verdict in (Verdict.FOUND, Verdict.MISSING)
            failed = answer.verdict is not Verdict.FOUND
            self._failed_lookups = self._failed_lookups + 1 if failed else 0
            if failed:
                wait_s = min(LOOKUP_S, 0.5 * 1.5 ** min(self._failed_lookups - 1, 8))
                self._next_lookup = time.monotonic() + wait_s * random.uniform(0.7, 1.0)
                self.tell(f"look-up of {self.target.identity}", answer.reason)
            else:
                wait_s = 2.0 ** min(self.num_lookups - 1, 8)
                self._next_lookup = time.monotonic() + min(MAX_LOOKUP_S, wait_s)
            if answer.status in (401, 403):
                self.reread_token()

    def ask(self, directread: bool = False, method: str = "GET") -> DirectorAnswer:
        """One look-up; every failure of the network is a passing answer.

        PROPFIND asks for a server that lists collections.
        """
        if self.target.scheme != "pelican":
            return DirectorAnswer(Verdict.FOUND, (self.target.url,))
        try:
            director = self._director or self._discover()  # another thread may forget it meanwhile
            self._director = director
            url = director + self.target.path + ("?directread" if directread else "")
            headers = self.access.headers(url, wants_token=True)
            status, found, _, _ = get_with_rival(self._pool, url, headers, method, follow=False)
        except (*NETWORK_ERRORS, ValueError) as error:
            self._director = None
            return DirectorAnswer(Verdict.PASSING, reason=explain(error))
        answer = read_director_answer(status, found, url)
        if answer.verdict is Verdict.PASSING:
            self._director = None  # a federation may have moved its director
        return answer

    def _discover(self) -> str:
        url = f"{self.target.discovery}{DISCOVERY_PATH}"
        status, _, body, where = get_with_rival(self._pool, url, {})
        if status != 200:
            raise OSError(f"{url} answered {status}")
        director = parse_discovery(body, redact(where))
        plain = (self.target.discovery or "").startswith("http://")
        if director.startswith("http://") and not plain:
            raise OSError(f"{url} names a director over plain http: {director}")
        return director

    def reread_token(self) -> bool:
        """After a 401 or 403: True when there is another token to try."""
        with self.lock:
            if time.monotonic() < self._next_reread:
                return False
            self._next_reread = time.monotonic() + REREAD_S
            changed = self.access.tokens.reread()
            if changed:
                log.info("another token was found; going on with it")
                self.servers.unblock()
                self._next_lookup = 0.0
                if self.answer.verdict is Verdict.DENIED:  # that was about the old one
                    self.answer = DirectorAnswer(Verdict.PASSING, reason="not asked again yet")
            return changed

    def check_patience(self, now: float, last_progress: float) -> None:
        """Raises when the failure is final (exit 2) or has lasted too long (exit 75)."""
        with self.lock:
            agreed = self._find_agreement()
            if agreed == "denied" and self.reread_token():
                agreed = None  # that was about the old token
            if agreed is None:
                self._agreed_since = None
            elif self._agreed_since is None or self._agreed_since[0] != agreed:
                self._agreed_since, self._lookups_before = (agreed, now), self.num_lookups
            elif now - self._agreed_since[1] >= self.options.missing_s and self._is_confirmed():
                raise self.final_error(agreed, self.target)
            self.check_time(now, last_progress, "byte", self.target, self.describe_problems())

    def check_time(
        self, now: float, last_progress: float, what: str, target: Target, problems: str
    ) -> None:
        """Raises (exit 75) when there was no progress for too long, or the time of all is up."""
        kept = "what has arrived is kept: run the same command again"
        name, limit_s = target.identity, self.options.deadline_s
        if now - last_progress >= self.options.give_up_s:
            idle = f"no {what} of {name} for {now - last_progress:.0f} s"
            raise PassingError(f"{idle} ({problems}); {kept}")
        if limit_s is not None and now - self._started > limit_s:
            raise PassingError(f"{name} did not arrive within {limit_s:.0f} s; {kept}")

    def _is_confirmed(self) -> bool:
        """Whether the director has repeated its refusal since all servers agreed."""
        is_repeated = self.num_lookups > self._lookups_before
        return self.answer.verdict is not Verdict.DENIED or is_repeated

    def _find_agreement(self) -> str | None:
        """'missing' or 'denied' when the director itself and every server say so."""
        verdict = self.answer.verdict
        if self.target.scheme == "file":
            return None
        # While any server works, the director's refusal does not matter.
        is_stuck = all(server.failures for server in self.servers.usable)
        denied = (verdict is Verdict.DENIED and is_stuck) or self.servers.agree_on("denied")
        if denied:
            return "denied"
        if verdict is Verdict.MISSING:
            gone = not self.servers.usable or self.servers.agree_on("missing")
            return "missing" if gone else None
        if verdict is Verdict.FOUND and self.servers.agree_on("missing"):
            complete = self._asked_origin or self.target.scheme != "pelican"
            return "missing" if complete or self.target.directread else None
        return None

    def final_error(self, agreed: str, target: Target) -> UserError:
        """What to tell the user about a target that is 'missing' or 'denied' for good."""
        name, after = target.identity, f"for {self.options.missing_s:.0f} s"
        if agreed == "missing":
            return FinalError(f"{name} does not exist (404 everywhere {after}); check the path")
        if target.scheme != "pelican":
            return UserError(f"{name} is refused {after}; put user and password into ~/.netrc")
        return UserError(f"{name} is refused {after}: {self.access.tokens.describe()}")

    def describe_problems(self) -> str:
        """The last problem of each server in one line."""
        failed = [s for s in self.servers.all if s.failures or s.refused]
        problems = [f"{s.label}: {s.refused or s.last_problem}" for s in failed]
        if self.answer.verdict is not Verdict.FOUND:
            problems.insert(0, self.answer.reason)
        return "; ".join(problems) or "no server answers"

    def __enter__(self) -> Lookup:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.close()
        self.pool.close()
