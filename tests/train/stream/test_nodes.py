"""Runs on several nodes that stream to folders of their own: each brings its share, once."""

from __future__ import annotations

import errno
import os
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from dataset.errors import CHECKPOINTED, DONE, TRY_AGAIN, USER_MISTAKE
from dataset.stream.plan import PlannedObject, Refusal, StreamPlan
from tests.dataset.small_server import Handler
from tests.dataset.tars import TRAIN, VAL
from tests.train import hooks
from tests.train.node_runs import UNIT, run_local, start_on_nodes, stream_of, write_served
from tests.train.outcomes import final_state, find_differences, read_trace
from tests.train.tar_server import answer, first_byte, serving_folder
from train.data.sample_order import SampleOrder
from train.ranks.comm import Comm
from train.ranks.launch import Launch, detect_launch
from train.ranks.nodes import Nodes, group_ranks, place_of
from train.records.record import read_run
from train.stream.nodes import (
    PREFIX,
    add_costs,
    agree_on_plan,
    describe_shares,
    detect_shared_folder,
    find_slots,
)

pytestmark = pytest.mark.training


@pytest.fixture(scope="module")
def served(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_served(images, tmp_path_factory.mktemp("served") / "tars")


@pytest.mark.parametrize(
    ("num_nodes", "ranks_a_node"),
    # Four nodes train in every run of the tests, too: below, where a run moves to other nodes.
    [(2, 1), (2, 2), pytest.param(4, 1, marks=pytest.mark.soak)],
)
def test_each_node_brings_its_share_and_the_run_is_the_local_one(
    served: Path, tmp_path: Path, num_nodes: int, ranks_a_node: int
) -> None:
    num_ranks = num_nodes * ranks_a_node
    local = run_local(served, tmp_path / "local", num_ranks, "--order", f"streamed:{num_nodes}")
    with serving_folder(served) as (url, _):
        urls = f"{url}/{TRAIN},{url}/{VAL}"
        layout = [ranks_a_node] * num_nodes
        job = start_on_nodes(urls, tmp_path / "a", layout).expect(DONE)
    assert read_trace(tmp_path / "a/trace") == read_trace(local / "trace")
    states = [final_state(folder / "run") for folder in (tmp_path / "a", local)]
    assert find_differences(states[0], states[1]) == []
    assert states[0]["identity"]["lanes"] == num_nodes
    val, size = ((served / name).stat().st_size for name in (VAL, TRAIN))
    stream = stream_of(tmp_path / "a")
    assert len(stream["bytes_of_nodes"]) == num_nodes
    assert sum(stream["bytes_of_nodes"]) == stream["bytes_fetched"]
    of_train = [num_bytes - val for num_bytes in stream["bytes_of_nodes"]]
    twice = sum(stream["bytes_twice"].values())  # a busy machine may ask for a unit a second time
    # A border unit belongs to two lanes, and 42 images are few: a unit is 2.4 % of the tar.
    assert max(of_train) <= size / num_nodes + 2 * UNIT + twice
    assert size - 20_000 <= sum(of_train) + 20_000 <= size + (num_nodes - 1) * 2 * UNIT + twice
    assert stream["bytes_refetched"] == 0 and "cache_limit" not in stream
    assert f"{num_nodes} nodes with folders of their own: each takes" in job.log
    for node in range(num_nodes):
        place = tmp_path / f"a/node{node}"
        assert (place / "data" / VAL).exists() and not (place / "data" / TRAIN).exists()
        assert list(place.glob("trainyard-stream-*")) == []


def test_a_run_goes_on_with_its_lanes_on_another_number_of_nodes(
    served: Path, tmp_path: Path
) -> None:
    """4 nodes, then 2, then one: the samples are those of the lanes, and the cost is said."""
    local = run_local(served, tmp_path / "local", 1, "--order", "streamed:4")
    with serving_folder(served) as (url, _):
        where = tmp_path / "a"
        first = ["--max-steps", "3"]
        start_on_nodes(f"{url}/{TRAIN}", where, [1] * 4, *first).expect(DONE)
        then = start_on_nodes(f"{url}/{TRAIN}", where, [1, 1], "--max-steps", "7").expect(DONE)
        start_on_nodes(f"{url}/{TRAIN}", where, [1]).expect(DONE)
    assert "(its order has 4 lanes)" in then.log
    assert read_trace(where / "trace") == read_trace(local / "trace")


def test_nodes_may_have_different_numbers_of_ranks(served: Path, tmp_path: Path) -> None:
    """2 ranks on one node and 1 on the other, then the reverse, then one on each: as one rank."""
    flags, where = ["-b", "12"], tmp_path / "a"
    local = run_local(served, tmp_path / "local", 1, "--order", "streamed:2", *flags)
    size = (served / TRAIN).stat().st_size
    with serving_folder(served) as (url, _):
        for layout, last_step in (([2, 1], 2), ([1, 2], 4), ([1, 1], 6)):
            until = ["--max-steps", f"{last_step}"]
            start_on_nodes(f"{url}/{TRAIN}", where, layout, *flags, *until).expect(DONE)
            # The slots of the node with 2 ranks reach into the other's lane.
            stream = stream_of(where)
            twice = sum(stream["bytes_twice"].values())
            assert sum(stream["bytes_of_nodes"]) <= 1.5 * size + 2 * UNIT + twice
    assert read_trace(where / "trace") == read_trace(local / "trace")


def test_a_folder_that_all_nodes_see_is_not_streamed_to(served: Path, tmp_path: Path) -> None:
    folder = ["--data-dir", str(tmp_path / "data")]
    with serving_folder(served) as (url, _):
        job = start_on_nodes(f"{url}/{TRAIN}", tmp_path / "a", [1, 1], *folder).expect(USER_MISTAKE)
        assert "is one folder for several of 2 nodes" in job.log
        flags = [*folder, "--stream", "auto", "--max-steps", "1"]
        job = start_on_nodes(f"{url}/{TRAIN}", tmp_path / "b", [1, 1], *flags).expect(DONE)
        flags = [*folder, "--max-steps", "1"]  # with --stream always: all is here
        again = start_on_nodes(f"{url}/{TRAIN}", tmp_path / "c", [1, 1], *flags).expect(DONE)
    assert "not streamed" not in again.log
    assert "not streamed but fetched whole first" in job.log
    assert "stream" not in read_run(tmp_path / "b/run")["attempts"][-1]
    assert (tmp_path / "data" / TRAIN).read_bytes() == (served / TRAIN).read_bytes()
    assert list((tmp_path / "data").glob(".trainyard-node-*")) == []


def test_what_a_killed_run_left_to_compare_folders_is_removed(tmp_path: Path) -> None:
    """Not what a run that starts at this moment has there, and no file of another name."""
    names = [f"{PREFIX}old", f"{PREFIX}new", "old"]
    for name in names:
        (tmp_path / name).touch()
    for name in (names[0], names[2]):
        os.utime(tmp_path / name, (0, 0))
    (tmp_path / f"{PREFIX}folder").mkdir()
    os.utime(tmp_path / f"{PREFIX}folder", (0, 0))
    assert not detect_shared_folder(tmp_path, Nodes(), Comm(Launch("single", "a test")))
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {f"{PREFIX}new", f"{PREFIX}folder", "old"}


def test_a_folder_that_cannot_be_written_may_have_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> tuple[int, str]:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(tempfile, "mkstemp", refuse)
    assert not detect_shared_folder(tmp_path, Nodes(), Comm(Launch("single", "a test")))


def test_a_stop_that_one_node_hears_of_stops_all(served: Path, tmp_path: Path) -> None:
    local, where = run_local(served, tmp_path / "local", 2, "--order", "streamed:2"), tmp_path / "a"
    stop = partial(hooks.at_step, 1, 4, hooks.terminate_myself)
    with serving_folder(served) as (url, _):
        urls = f"{url}/{TRAIN},{url}/{VAL}"
        start_on_nodes(urls, where, [1, 1], hook=stop).expect(CHECKPOINTED)
        assert list(where.glob("node*/trainyard-stream-*")) == []
        start_on_nodes(urls, where, [1, 1]).expect(DONE)
    assert read_trace(where / "trace") == read_trace(local / "trace")
    states = [final_state(folder / "run") for folder in (where, local)]
    assert find_differences(states[0], states[1]) == []


def test_nodes_may_have_little_disk_each(served: Path, tmp_path: Path) -> None:
    local = run_local(served, tmp_path / "local", 2, "--order", "streamed:2")
    with serving_folder(served) as (url, _):
        hook = ["--cache-limit", "3900000"]
        job = start_on_nodes(f"{url}/{TRAIN}", tmp_path / "a", [1, 1], *hook).expect(DONE)
    assert read_trace(tmp_path / "a/trace") == read_trace(local / "trace")
    assert "of its share of the tar kept for good" in job.log
    assert stream_of(tmp_path / "a")["cache_limit"] == 2 * 3_900_000


def refuse_later_units(handler: Handler) -> bool:
    """All but the beginning of the training tar is not to be had."""
    is_late = handler.path == f"/{TRAIN}" and first_byte(handler) > 4 * UNIT
    return is_late and answer(handler, 503)


def test_a_starved_node_ends_all_ranks_with_75(served: Path, tmp_path: Path) -> None:
    with serving_folder(served, refuse_later_units) as (url, _):
        job = start_on_nodes(f"{url}/{TRAIN}", tmp_path / "a", [1, 1], "--give-up-after", "5")
        job.expect(TRY_AGAIN)
    assert list(tmp_path.glob("a/node*/trainyard-stream-*")) == []


# --- the parts --------------------------------------------------------------------------------


def test_ranks_are_grouped_by_machine_number_of_the_node_and_local_rank() -> None:
    block = [("a", 0, 0), ("a", 0, 1), ("b", 1, 0), ("b", 1, 1)]
    assert group_ranks(block, 2) == Nodes(((0, 1), (2, 3)), 1, 2)
    cyclic = [("a", 0, 0), ("b", 1, 0), ("a", 0, 1), ("b", 1, 1)]
    assert group_ranks(cyclic, 3) == Nodes(((0, 2), (1, 3)), 1, 3)
    silent = [("a", 0, 0), ("a", 0, 1), ("a", 0, 0), ("a", 0, 1)]  # one machine, no numbers
    nodes = group_ranks(silent, 3)
    assert nodes.ranks == ((0, 1), (2, 3)) and nodes.leaders == [0, 2] and not nodes.is_leader


def test_ranks_that_mpirun_places_by_turns_are_on_their_machines() -> None:
    def place(rank: int) -> tuple[str, int, int]:
        env = {"RANK": rank, "WORLD_SIZE": 4, "LOCAL_RANK": rank // 2}
        env |= {"LOCAL_WORLD_SIZE": 2, "MASTER_PORT": 5000}
        names = {name: str(value) for name, value in env.items()}
        launch = detect_launch(names | {"MASTER_ADDR": "a"})
        return place_of("ab"[rank % 2], launch)

    assert group_ranks([place(rank) for rank in range(4)], 3) == Nodes(((0, 2), (1, 3)), 1, 3)


def test_a_node_uses_the_slots_of_its_ranks() -> None:
    assert find_slots(Nodes(), 8, 2) is None
    slots = find_slots(Nodes(((0, 2), (1, 3)), 1, 1), 8, 4)
    assert slots is not None and np.flatnonzero(slots).tolist() == [2, 3, 6, 7]


def test_nodes_stream_only_if_all_of_them_can() -> None:
    nodes = Nodes(((0, 1), (2, 3)), 1, 2)
    plans = [StreamPlan(Path(name), PlannedObject("u", Path(name), 1)) for name in "ab"]
    assert agree_on_plan([plans[0], None, plans[1], None], nodes) is plans[1]
    refusal = Refusal("no index")
    assert agree_on_plan([plans[0], None, refusal, None], nodes) is refusal
    here = StreamPlan(Path("c"), PlannedObject("u", Path("c"), 1, is_here=True))
    mixed = agree_on_plan([here, None, plans[1], None], nodes)
    assert str(mixed).startswith("1 of 2 nodes have all of it already: remove it there, or ")
    assert agree_on_plan([here, None, here, None], nodes) is here


def test_costs_of_nodes_are_added_up() -> None:
    row = {"bytes_fetched": 3, "bytes_twice": {"wrong": 1}, "network_wait_s": 2.0}
    more = row | {"bytes_fetched": 5, "bytes_twice": {"hedged": 2}, "network_wait_s": 4.0}
    rows = [row | {"is_whole": True, "index": "proven"}, more | {"is_whole": False}]
    rows[1]["index"] = "unproven"
    total = {
        "bytes_fetched": 8,
        "bytes_twice": {"hedged": 2, "wrong": 1},
        "network_wait_s": 3.0,
        "index": "unproven",
        "is_whole": False,
    }
    assert add_costs(rows) == total | {"bytes_of_nodes": [3, 5]}
    assert add_costs(rows[::-1]) == total | {"bytes_of_nodes": [5, 3]}
    limited, free = rows[0] | {"cache_limit": 7}, rows[1]  # the disk of one node alone is small
    for pair in ([limited, free], [free, limited]):
        assert add_costs(pair)["cache_limit"] == 7


def test_the_log_says_what_a_change_of_nodes_costs() -> None:
    plain, laned = SampleOrder(), SampleOrder(lanes=2)
    assert describe_shares([50, 52], 100, laned).endswith("all together 1.02 times the tar")
    assert describe_shares([90, 90], 100, plain).endswith(
        "1.80 times the tar (its order is uniform)"
    )
