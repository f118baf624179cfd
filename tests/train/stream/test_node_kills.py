"""Runs on several nodes of which ranks, fetchers and whole nodes are killed at random moments."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Condition

import pytest
import torch

from dataset.errors import CRASH, DONE, TRY_AGAIN
from dataset.own_names import units_path
from dataset.stream.unit_map import UnitMap
from tests.dataset.small_server import Handler
from tests.dataset.tars import TRAIN, VAL
from tests.train import hooks
from tests.train import started_ranks as ranks
from tests.train.cache_sizes import find_map, sampling
from tests.train.node_runs import run_local, start_on_nodes, write_served
from tests.train.outcomes import EVERY_STEP, final_state, find_differences, read_trace
from tests.train.tar_server import serving_folder

pytestmark = pytest.mark.training

FLAGS = ["-b", "12", "--epochs", "3"]  # 9 steps
CONNECTIONS = hooks.FEW_CONNECTIONS  # of a node
MAX_UNIT = 153_000  # bytes: an image and its header
LIMIT = 2_000_000  # of 6.5 MB: less than a node's share
KILLS = ("fetcher", "rank", "node", "fetcher")


class Valve:
    """Lets so many requests for units through; the others wait, each on its connection."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._num_left, self._is_open = 0, False
        self._asked: set[tuple[int, int]] = set()  # since the last kill: a hedge asks again
        self._num_before = 0

    def __call__(self, handler: Handler) -> bool:
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", handler.headers.get("Range", ""))
        begin, end = (int(found[1]), int(found[2]) + 1) if found else (0, 0)
        if handler.path == f"/{TRAIN}" and end - begin > 1:  # one byte: are there ranges?
            with self._changed:
                self._asked.add((begin, end))
                self._changed.wait_for(lambda: self._is_open or self._num_left > 0)
                self._num_left -= 1
        return False

    def note_kill(self) -> None:
        """What is asked for from now on counts anew."""
        with self._changed:
            self._num_before, self._asked = self.count_bytes(), set()

    def count_bytes(self) -> int:
        """The bytes that were asked for, in all."""
        return self._num_before + sum(end - begin for begin, end in self._asked)

    def open_for(self, num: int) -> None:
        with self._changed:
            self._num_left = num
            self._changed.notify_all()

    def open(self) -> None:
        with self._changed:
            self._is_open = True
            self._changed.notify_all()

    def is_shut(self) -> bool:
        return self._num_left <= 0


class Chaos:
    """A run of which something is killed again and again."""

    def __init__(
        self, url: str, folder: Path, layout: tuple[int, ...], valve: Valve, *flags: str
    ) -> None:
        self.url, self.folder, self.layout, self.valve = url, folder, layout, valve
        self.flags, self.max_lost = flags, 0
        self.job: ranks.Job | None = None

    @property
    def nodes(self) -> list[Path]:
        return [self.folder / f"node{number}" for number in range(len(self.layout))]

    def start(self) -> ranks.Job:
        """The run under way; all its fetchers have been heard of, so its ranks have met."""
        flags = [*FLAGS, *EVERY_STEP, *self.flags]
        where = (self.url, self.folder, self.layout)
        self.job = job = start_on_nodes(*where, *flags, hook=hooks.use_few_connections)
        job.wait_for(lambda: all(find_map(node) for node in self.nodes), "all fetchers")
        return job

    def kill(self, what: str, chance: random.Random) -> None:
        """Kills one rank, the fetcher of a node, or a node: all its ranks and the fetcher."""
        job = self.job or self.start()
        self.valve.open_for(chance.randrange(4))
        job.wait_for(self.valve.is_shut, "so many units")
        node = chance.randrange(len(self.layout))
        first = sum(self.layout[:node])
        own_ranks = range(first, first + self.layout[node])
        found = find_map(self.nodes[node])
        assert found is not None
        if what in ("fetcher", "node"):
            self.kill_fetcher(found, job if what == "fetcher" else None)
        if what != "fetcher":
            self.max_lost += len(self.layout) * CONNECTIONS * MAX_UNIT
            victims = own_ranks if what == "node" else [chance.choice(own_ranks)]
            job.send(signal.SIGKILL, *victims)
            job.send(signal.SIGKILL)  # the others wait for units; srun would end them, too
            self.end()

    def kill_fetcher(self, found: UnitMap, job: ranks.Job | None) -> None:
        """Kills it; with a job, that goes on with the next one."""
        pid = found.pid
        with suppress(ProcessLookupError):  # it has brought all that the node needs
            os.kill(pid, signal.SIGKILL)
            self.valve.note_kill()
            # On the other nodes too: what is late there is hedged, and that counts anew.
            self.max_lost += len(self.layout) * CONNECTIONS * MAX_UNIT
            if job is not None:
                job.wait_for(lambda: found.pid != pid, "the next fetcher")

    def kill_late(self, chance: random.Random) -> None:
        """Kills a rank after some step of a run that gets all it asks for; the others notice."""
        job, step = self.job or self.start(), chance.randrange(1, 5)
        self.valve.open()
        job.wait_for(lambda: self.find_step() >= step, f"step {step}")
        self.max_lost += len(self.layout) * CONNECTIONS * MAX_UNIT
        job.send(signal.SIGKILL, chance.randrange(sum(self.layout)))
        self.end()

    def find_step(self) -> int:
        """The step of the newest checkpoint."""
        found = (self.folder / "run/ckpt").glob("step-*.pt")
        return max((int(path.stem.removeprefix("step-")) for path in found), default=0)

    def end(self) -> None:
        """Waits for the ranks that were not killed, and removes what the others left."""
        assert self.job is not None
        self.job.expect(-signal.SIGKILL, CRASH, TRY_AGAIN, DONE)
        self.valve.note_kill()
        self.job = None
        for node in self.nodes:
            for left in node.glob("trainyard-stream-*"):
                shutil.rmtree(left)

    def count_here(self) -> int:
        """The bytes of the units on all nodes."""
        folders = [units_path(node / "data" / TRAIN) for node in self.nodes]
        return sum(f.stat().st_size for folder in folders for f in folder.glob("*[0-9]"))


@pytest.fixture(scope="module")
def served(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_served(images, tmp_path_factory.mktemp("served") / "tars")
    (folder / VAL).unlink()
    return folder


def survive_kills(
    served: Path, folder: Path, layout: tuple[int, ...], seed: int, num: int, *flags: str
) -> None:
    """So much is killed while units arrive, a rank later on, and then the run ends as the local."""
    order = ["--order", f"streamed:{len(layout)}"]
    local = run_local(served / TRAIN, folder / "local", sum(layout), *order, *FLAGS)
    chance, valve = random.Random(seed), Valve()
    with serving_folder(served, valve) as (url, _), ExitStack() as stack:
        chaos = Chaos(f"{url}/{TRAIN}", folder / "a", layout, valve, *flags)
        sizes = [stack.enter_context(sampling(node / "data")) for node in chaos.nodes]
        for number in range(num):
            chaos.kill(KILLS[number % len(KILLS)], chance)
        chaos.kill_late(chance)
        were_here, asked_before = chaos.count_here(), valve.count_bytes()
        chaos.start().expect(DONE)
    assert read_trace(folder / "a/trace") == read_trace(local / "trace")
    check_same_weights(folder / "a", local, sum(layout))
    if "--cache-limit" in flags:
        assert max(map(max, sizes)) <= LIMIT
    else:
        assert valve.count_bytes() - asked_before <= chaos.count_here() - were_here
        assert valve.count_bytes() <= chaos.count_here() + chaos.max_lost


def check_same_weights(folder: Path, local: Path, num_ranks: int) -> None:
    """The weights are those of the local run; those of 3 ranks that went on, but for rounding.

    DDP cuts its buckets anew after the first step of a start, and with them the sums of 3 numbers.
    """
    states = [final_state(place / "run") for place in (folder, local)]
    if num_ranks < 3:
        assert find_differences(states[0], states[1]) == []
    for name, weights in states[0]["model"].items():
        torch.testing.assert_close(weights, states[1]["model"][name], rtol=1e-5, atol=1e-6)


def test_kills_of_ranks_fetchers_and_nodes_cost_no_sample(served: Path, tmp_path: Path) -> None:
    survive_kills(served, tmp_path, (1, 1), 1, 3)


@pytest.mark.soak
@pytest.mark.parametrize("flags", [[], ["--cache-limit", f"{LIMIT}"]], ids=["all", "limit"])
@pytest.mark.parametrize("layout", [(1, 1), (1, 1, 1), (2, 1)])
@pytest.mark.parametrize("seed", range(5))
def test_many_kills_on_nodes_cost_no_sample(
    served: Path, tmp_path: Path, layout: tuple[int, ...], seed: int, flags: list[str]
) -> None:
    survive_kills(served, tmp_path, layout, 100 + seed, 12, *flags)
