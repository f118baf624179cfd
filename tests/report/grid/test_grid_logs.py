"""Event logs that a real HTCondor 23.9 wrote (tests/cluster/condor), read into the right rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from report.grid.eventlog import read_event_log
from report.grid.history import read_histories
from report.grid.rows import GridJob, make_row

DATA = Path(__file__).resolve().parents[1] / "data"


def read(name: str) -> GridJob:
    log = read_event_log(DATA / f"{name}.log")
    assert (log.num_torn, log.num_unreadable, log.unknown_kinds) == (0, 0, {})
    (history,) = read_histories(log.events)
    return make_row(history)


@pytest.mark.parametrize(
    ("name", "outcome", "num_evictions", "num_disconnects", "holds"),
    [
        ("vacated", "exit 0, output unchecked", 1, 0, ()),
        ("checkpoints", "exit 0, output unchecked", 0, 0, ()),
        ("starter_killed", "exit 0, output unchecked", 1, 1, ()),
        ("over_limit", "held", 0, 0, ("hold code 47.0",)),
        ("missing_output", "held", 1, 0, ("hold code 12.2",)),
        ("input_released", "exit 0, output unchecked", 1, 0, ("hold code 13.256",)),
    ],
)
def test_outcomes(
    name: str, outcome: str, num_evictions: int, num_disconnects: int, holds: tuple[str, ...]
) -> None:
    row = read(name)
    assert (row.outcome, row.holds) == (outcome, holds)
    assert (row.num_evictions, row.num_disconnects) == (num_evictions, num_disconnects)


def test_a_checkpoint_on_sigterm_loses_nothing_and_a_kill_what_came_after_the_last_one() -> None:
    assert read("vacated").lost_compute_s == 0
    assert read("starter_killed").lost_compute_s == 18  # 04:32:40 to 04:32:58


def test_compute_goes_on_over_exits_85() -> None:
    """TimeExecute of its 005 has 13 s, the last segment only."""
    row = read("checkpoints")
    assert (row.compute_s, row.output_s, row.slot_busy_s) == (71, 3, 74)


def test_a_failed_input_transfer_is_waste_until_the_next_one_arrives() -> None:
    row = read("input_released")
    assert [(t.seconds, t.succeeded) for t in row.transfers] == [(12, False), (0, True)]
    assert (row.transfer_retried_s, row.match_to_end_s) == (12, 23)
