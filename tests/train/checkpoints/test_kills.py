"""Kills at random moments, of ranks and in the middle of writes: every start continues."""

from __future__ import annotations

import itertools
import json
import random
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from dataset.errors import CRASH, DONE
from tests.train import hooks
from tests.train import started_ranks as ranks
from tests.train.data.small_batches import open_streamed
from tests.train.outcomes import final_state, find_differences, strip_times
from train.checkpoints.checkpoint import list_checkpoints, load_checkpoint
from train.data.sample_order import STREAMED, SampleOrder
from train.records.record import read_epochs, read_run

pytestmark = pytest.mark.training

NUM_TRAIN, BATCH, STEPS = 42, 8, 5
EPOCHS = 4
MAX_ATTEMPTS_PER_KILL = 3  # a kill may come before the attempt has begun


class Chaos:
    """Starts a run again and again and kills it at random moments, until so many kills are done."""

    def __init__(
        self, data: Path, folder: Path, seed: int, epochs: int, order: SampleOrder
    ) -> None:
        self.random = random.Random(seed)
        self.out, self.trace, self.folder = folder / "out", folder / "trace", folder
        self.argv = [str(data), "--epochs", str(epochs), "--microbatch", "4", "--ema", "0.9"]
        self.argv += ["-a", ranks.REAL_ARCH]  # steps that last long enough to be met by a kill
        self.order = order
        self.hooks: list[Callable[[], None]] = [partial(hooks.trace_samples, self.trace)]
        if order.name == STREAMED:
            self.argv += ["--order", STREAMED]
            self.hooks.append(hooks.use_small_units)
        self.often = ["--output", str(self.out), "--checkpoint-minutes", "1e-9"]
        self.starts: list[int] = []  # the first step of each attempt
        self.num_kills = self.num_in_writes = 0

    def start(self) -> ranks.Job:
        world = self.random.choice([1, 2])
        log = self.folder / f"log{len(self.starts)}"
        hook = partial(hooks.all_of, *self.hooks)
        self.trace.touch()
        self.starts.append(len(self.trace.read_text().splitlines()))
        return ranks.start([*self.argv, *self.often], log, world, hook=hook)

    def kill_once(self) -> bool:
        """Whether the run was killed before it came to its end by itself."""
        job = self.start()
        wait = self.random.choice([self.wait_a_while, self.wait_for_a_write])
        wait(job)
        # One rank, or all of them as when a node dies; before they met, one would be waited for.
        one = self.random.randrange(len(job.processes))
        victims = (one,) if "recipe:" in job.log and self.random.random() < 0.4 else ()
        self.num_in_writes += bool(list(self.out.glob("ckpt/*.part")))
        job.send(signal.SIGKILL, *victims)
        codes = job.wait()
        assert set(codes) <= {-signal.SIGKILL, CRASH, DONE}, (codes, job.log)
        self.check_files()
        return -signal.SIGKILL in codes

    def wait_a_while(self, job: ranks.Job) -> None:
        end_s = time.monotonic() + self.random.uniform(0.05, 1.2)
        self._wait(job, lambda: time.monotonic() > end_s)

    def wait_for_a_write(self, job: ranks.Job) -> None:
        left = self.random.randrange(1, 4)
        seen: set[str] = set()

        def is_writing() -> bool:
            seen.update(path.name for path in self.out.glob("ckpt/*.part"))
            return len(seen) >= left

        self._wait(job, is_writing)

    def _wait(self, job: ranks.Job, condition: Callable[[], bool]) -> None:
        while job.is_alive() and not condition():
            time.sleep(0.003)

    def check_files(self) -> None:
        """No file under a final name is unreadable."""
        for path in [*list_checkpoints(self.out / "ckpt"), *self.out.glob("ckpt/best.pt")]:
            load_checkpoint(path)
        if (self.out / "run.json").exists():
            read_run(self.out)
        read_epochs(self.out)

    def surviving(self) -> dict[int, dict[int, list[int]]]:
        """step -> microbatch -> samples, of what the last attempt that reached it trained."""
        lines = [json.loads(line) for line in self.trace.read_text().splitlines()]
        trained: dict[int, dict[int, list[int]]] = {}
        bounds = [*self.starts, len(lines)]
        for begin, end in itertools.pairwise(bounds):
            attempt = lines[begin:end]
            first = min((note["step"] for note in attempt), default=None)
            if first is not None:  # what was trained beyond the checkpoint is given up
                trained = {step: parts for step, parts in trained.items() if step < first}
            for note in attempt:
                trained.setdefault(note["step"], {})[note["part"]] = note["ids"]
        return trained


def run_chaos(
    data: Path, folder: Path, num_kills: int, seed: int, order: SampleOrder | None = None
) -> None:
    chaos = Chaos(data, folder, seed, EPOCHS, order or SampleOrder())
    finished = 0
    for _ in range(MAX_ATTEMPTS_PER_KILL * num_kills):
        if chaos.num_kills >= num_kills:
            break
        chaos.num_kills += chaos.kill_once()
        if (chaos.out / "run.json").exists() and read_run(chaos.out)["status"] == "done":
            check_end(chaos, data, folder / f"end{finished}")
            finished += 1
            chaos = begin_anew(chaos, data, folder / f"again{finished}")
    assert chaos.num_kills >= num_kills
    chaos.start().expect(DONE)
    check_end(chaos, data, folder / "end")
    if num_kills >= 5:
        assert chaos.num_in_writes > num_kills // 15  # the writer was met, and not by luck


def begin_anew(old: Chaos, data: Path, folder: Path) -> Chaos:
    folder.mkdir()
    chaos = Chaos(data, folder, old.random.randrange(10**9), EPOCHS, old.order)
    chaos.num_kills, chaos.num_in_writes = old.num_kills, old.num_in_writes
    return chaos


def check_end(chaos: Chaos, data: Path, folder: Path) -> None:
    """The run that survived is the one that was never disturbed."""
    folder.mkdir()
    trained = chaos.surviving()
    assert sorted(trained) == list(range(EPOCHS * STEPS))
    for epoch in range(EPOCHS):
        steps = [trained[step] for step in range(epoch * STEPS, (epoch + 1) * STEPS)]
        seen = [i for parts in steps for part in sorted(parts) for i in parts[part]]
        assert len(set(seen)) == len(seen) == STEPS * BATCH  # at most once
        assert seen == chaos.order.permute(0, epoch, NUM_TRAIN)[: STEPS * BATCH].tolist()
    assert [line["epoch"] for line in read_epochs(chaos.out)] == list(range(EPOCHS))
    run = read_run(chaos.out)
    assert (run["status"], run["images_trained"]) == ("done", EPOCHS * STEPS * BATCH)
    assert {a["reason"] for a in run["attempts"][:-1]} <= {"killed"} | lost_ranks()
    plain = folder / "plain"
    hook = partial(hooks.all_of, *chaos.hooks[1:])
    ranks.run([*chaos.argv, "--output", str(plain)], folder / "log", hook=hook).expect(DONE)
    # Two gradients have one sum, so that one rank and two agree to the bit; the sums of losses
    # over an epoch or a validation are taken in another order.
    ends = final_state(chaos.out), final_state(plain)
    sums = ("/epoch_sums/loss", "/best/best_loss")
    assert [d for d in find_differences(*ends) if not d.startswith(sums)] == []
    found, expected = (end["best"]["best_loss"] for end in ends)
    assert found == (None if expected is None else pytest.approx(expected, rel=1e-6))
    both = (strip_times(read_epochs(out)) for out in (chaos.out, plain))
    for found, expected in zip(*both, strict=True):
        for name, value in expected.items():
            is_number = value is not None
            assert found[name] == (pytest.approx(value, rel=1e-6) if is_number else None)


def lost_ranks() -> set[str]:
    return {f"error: lost contact with rank {rank}" for rank in range(2)}


def test_a_few_random_kills(images: Path, tmp_path: Path) -> None:
    run_chaos(images, tmp_path, num_kills=2, seed=20240229)


@pytest.mark.usefixtures("small_units")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("num_kills", [1, pytest.param(50, marks=pytest.mark.soak)])
def test_random_kills_in_the_streamed_order(tars: Path, tmp_path: Path, num_kills: int) -> None:
    order = open_streamed(tars)
    assert order.window < NUM_TRAIN
    run_chaos(tars, tmp_path, num_kills, seed=19, order=order)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(4))
def test_two_hundred_random_kills(images: Path, tmp_path: Path, seed: int) -> None:
    run_chaos(images, tmp_path, num_kills=50, seed=seed)
