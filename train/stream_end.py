"""The end of a streamed run: no class stays unproven, and a tar that is all here gets its name."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from dataset.errors import DataError
from dataset.stream.arrivals import State
from dataset.words import count
from train.data.stream_source import StreamSource
from train.ranks.interrupt import Vote

log = logging.getLogger("trainyard")

POLL_S = 0.05
MAX_VERIFY_S = 600.0  # the MD5 of ImageNet's tar takes minutes

Ask = Callable[[], Vote]  # whether the run is to stop


def prove_classes(sources: Sequence[StreamSource], ask: Ask) -> Vote:
    """Waits until the class tars of all classes have come; raises if the index has one wrong."""
    has_told = False
    for source in sources:
        while late := source.list_unproven():
            if not has_told:
                classes = count(len(late), "class", "classes")
                log.info("trained; waits for what proves the labels of %s", classes)
                has_told = True
            source.ask_for_proofs()
            failure = source.arrivals.failure
            if failure is not None:
                raise failure
            if (vote := ask()).is_urgent:
                return vote
            time.sleep(POLL_S)
    return Vote.GO_ON


def await_verification(sources: Sequence[StreamSource], ask: Ask) -> Vote:
    """Waits while a tar that has all arrived is verified; one that has not is left as it is."""
    deadline_s, has_told = time.monotonic() + MAX_VERIFY_S, False
    for arrivals in (source.arrivals for source in sources if source.keeps_all):
        while arrivals.state is State.COMING and arrivals.here.all():
            if not has_told:
                log.info("all has arrived; waits until it is verified and has its name")
                has_told = True
            if (vote := ask()).is_urgent:
                return vote
            if time.monotonic() > deadline_s:
                log.info("not verified after %.0f s; the next start goes on", MAX_VERIFY_S)
                return Vote.GO_ON
            time.sleep(POLL_S)
        if isinstance(arrivals.failure, DataError):
            raise arrivals.failure
    return Vote.GO_ON
