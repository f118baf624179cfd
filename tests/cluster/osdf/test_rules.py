"""Which requests a fault strikes follows from the seed alone, whatever the order of arrival."""

from __future__ import annotations

import random

from tests.cluster.osdf.bodies import Pace
from tests.cluster.osdf.rules import Fault, FaultSet, Request

REQUESTS = [
    Request(server, "GET", "/public/x", f"bytes={k}-{k + 9}")
    for server in ("cache1", "cache2")
    for k in range(0, 1000, 10)
]


def _struck(faults: FaultSet, requests: list[Request]) -> dict[Request, list[tuple[str, int]]]:
    return {
        request: [(s.fault.kind, s.offset(1_000_000)) for s in faults.draw(request)]
        for request in requests
    }


def test_draws_do_not_depend_on_the_order_of_requests() -> None:
    faults = [Fault("stall", share=0.3), Fault("reset", share=0.2, server="cache2")]
    shuffled = REQUESTS.copy()
    random.Random(0).shuffle(shuffled)
    first = _struck(FaultSet(faults, seed=5), REQUESTS)
    assert first == _struck(FaultSet(faults, seed=5), shuffled)
    assert first != _struck(FaultSet(faults, seed=6), REQUESTS)


def test_share_is_near_what_was_asked_and_never_of_other_requests() -> None:
    faults = FaultSet([Fault("stall", share=0.3, server="cache1")], seed=1)
    struck = _struck(faults, REQUESTS)
    assert 20 <= faults.hits[0] <= 40
    assert not any(hits for request, hits in struck.items() if request.server == "cache2")


def test_repeated_request_has_its_own_draw() -> None:
    faults = FaultSet([Fault("reset", share=0.5)], seed=2)
    draws = [bool(faults.draw(REQUESTS[0])) for _ in range(50)]
    assert 10 < sum(draws) < 40


def test_skip_and_times_count_in_the_order_of_arrival() -> None:
    faults = FaultSet([Fault("status", skip=2, times=3)], seed=0)
    assert [len(faults.draw(request)) for request in REQUESTS[:8]] == [0, 0, 1, 1, 1, 0, 0, 0]


def test_only_the_first_of_a_kind_strikes_and_counts() -> None:
    faults = FaultSet([Fault("status", times=1), Fault("stall"), Fault("status", status=404)], 0)
    struck = [[s.fault.status for s in faults.draw(request)] for request in REQUESTS[:2]]
    assert struck == [[None, None], [None, 404]]
    assert faults.hits == [1, 2, 1]


def test_offset_is_bytes_or_a_share_or_drawn_inside_the_body() -> None:
    (strike,) = FaultSet([Fault("reset", after_bytes=700)], 0).draw(REQUESTS[0])
    assert (strike.offset(1000), strike.offset(500)) == (700, 500)
    (strike,) = FaultSet([Fault("reset", after_share=0.25)], 0).draw(REQUESTS[0])
    assert strike.offset(1000) == 250
    strikes = [FaultSet([Fault("reset")], seed).draw(REQUESTS[0])[0] for seed in range(20)]
    offsets = {strike.offset(1000) for strike in strikes}
    assert len(offsets) > 10
    assert all(0 <= offset < 1000 for offset in offsets)


def test_all_connections_share_a_link() -> None:
    """What one has sent, the next waits for."""
    link = Pace(bytes_per_s=10.0)
    assert link.pause_s(1000) < link.pause_s(1000)
