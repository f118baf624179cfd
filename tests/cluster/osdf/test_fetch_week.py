"""A bad week in small: seeded mixes of faults, and the right bytes at the end of every one."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.cluster.osdf.fetching import MIB, Fetcher, Result, leftovers, make_content, write_index
from tests.cluster.osdf.rules import Fault

pytestmark = pytest.mark.osdf
SIZE = 256 * MIB
MAX_WASTED_SHARE = 0.05
NUM_IN_CI = 20
NUM_IN_SOAK = 100


@pytest.fixture(scope="module")
def stored(osdf: ModuleType) -> tuple[str, bytes]:
    content = make_content(SIZE, 11)
    return osdf.put("fetch-week/object.bin", content), content


def draw_faults(seed: int, path: str) -> list[Fault]:
    """Three to six faults at random servers, shares and times, as a bad week has them."""
    chance = random.Random(seed)
    menu: list[Callable[[], dict[str, Any]]] = [
        lambda: {"kind": "stall", "share": chance.uniform(0.02, 0.2)},
        lambda: {"kind": "drip", "share": chance.uniform(0.02, 0.1)},
        lambda: {"kind": "hang", "share": chance.uniform(0.02, 0.1)},
        lambda: {"kind": "reset", "share": chance.uniform(0.05, 0.3)},
        lambda: {"kind": "truncate", "share": chance.uniform(0.05, 0.3)},
        lambda: {"kind": "close", "share": chance.uniform(0.05, 0.3)},
        lambda: {"kind": "flip", "share": chance.uniform(0.01, 0.05), "times": 2},
        lambda: {"kind": "status", "share": 0.2, "status": chance.choice([404, 500, 502, 503])},
        lambda: {"kind": "status", "status": 429, "retry_after": "1", "share": 0.1, "times": 3},
        lambda: {"kind": "ingress", "for_s": chance.uniform(0.5, 2.0)},
        lambda: {"kind": "wrong_range", "what": "start", "share": 0.1},
        lambda: {"kind": "extend", "share": 0.1},
        lambda: {"kind": "loop", "share": 0.05},
    ]
    faults = []
    for make in chance.sample(menu, chance.randrange(3, 7)):
        server = chance.choice(["cache1", "cache2", "cache*", "[co]*", "director"])
        fields = make()
        if server == "director" and fields["kind"] in ("flip", "stall", "drip", "extend"):
            server = "cache*"
        faults.append(Fault(server=server, path=path, **fields))
    return faults


def live_through(osdf: ModuleType, stored: tuple[str, bytes], out: Path, seed: int) -> Result:
    path, content = stored
    out.mkdir(exist_ok=True)
    write_index(out / "object.bin.index", content)
    fetch = Fetcher(osdf, out)
    with osdf.faults(*draw_faults(seed, path), seed=seed):
        result = fetch(path, stall_s=4.0, give_up_s=60.0, missing_s=15.0)
    assert result.exit_code == 0, f"seed {seed}: {result.message}"
    assert result.path.read_bytes() == content, f"seed {seed}"
    assert leftovers(out) == []
    assert result.wasted < MAX_WASTED_SHARE * SIZE, f"seed {seed}: {result.summary.bytes_twice}"
    counted = sum(result.summary.bytes_twice.values())
    assert result.summary.fetched_bytes == SIZE + counted, "a byte was fetched twice uncounted"
    result.path.unlink()
    return result


@pytest.mark.parametrize("seed", range(NUM_IN_CI))
def test_a_bad_week(seed: int, osdf: ModuleType, stored: tuple[str, bytes], tmp_path: Path) -> None:
    live_through(osdf, stored, tmp_path, seed)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_hundred_bad_weeks(osdf: ModuleType, stored: tuple[str, bytes], tmp_path: Path) -> None:
    for seed in range(1000, 1000 + NUM_IN_SOAK):
        live_through(osdf, stored, tmp_path / str(seed), seed)
