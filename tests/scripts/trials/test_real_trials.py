"""A search of real trainings of a tiny network: killed, resumed, pruned, reproduced."""

from __future__ import annotations

import functools
import json
import random
import shlex
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from dataset.fake.make import make_fake_imagenet
from report.search.trials import Trial, find_best
from scripts.trials import run_search as loop
from scripts.trials.run_search import run_search
from scripts.trials.search_file import read_search
from scripts.trials.store import read_trials
from tests.forked_command import start_script
from tests.scripts.commands import ROOT
from tests.scripts.trials.forked_ranks.server import RankServer, train_at
from tests.scripts.trials.forked_trainings import ForkedTrainings
from tests.scripts.trials.kills import kill_jobs, take_stock
from tests.scripts.trials.pauses import Pause, TrialFile, choose_moments
from tests.scripts.trials.searches import find_disagreements, make_plan
from tests.scripts.trials.stand_in import SPACE
from tests.train import started_ranks as ranks
from train.records.record import read_epochs

pytestmark = pytest.mark.training

SCRIPT = ROOT / "scripts" / "search.py"
NUM_TRIALS, NUM_KILLS, EPOCHS = 12, 10, 3
TRAIN = (
    *("-a", ranks.ARCH, "-b", "8", "--image-size", "32", "--device", "cpu", "--threads", "1"),
    *("-j", "0", "--recipe", "sgd", "--epochs", str(EPOCHS)),
)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A folder with a little data; nothing that a test started outlives it."""
    make_fake_imagenet(
        tmp_path / "data", classes=3, train_per_class=8, val_per_class=8, size=(40, 40)
    )
    (tmp_path / "s").mkdir()
    yield tmp_path
    kill_jobs(tmp_path / "s")
    ranks.end_leftovers()


class KilledSearch:
    """scripts/search.py in a process of its own, started again and again."""

    def __init__(self, home: Path, server: RankServer) -> None:
        self.folder, self._home, self._server = home / "s", home, server
        self._num_starts = 0

    @property
    def _outputs(self) -> tuple[Path, Path]:
        names = (f"{name}-{self._num_starts}" for name in ("stdout", "stderr"))
        stdout, stderr = (self._home / name for name in names)
        return stdout, stderr

    @property
    def stdout(self) -> str:
        return self._outputs[0].read_text()

    @property
    def stderr(self) -> str:
        path = self._outputs[1]
        return path.read_text() if path.exists() else ""

    def start(self, *words: str | Path) -> None:
        self._num_starts += 1
        env = ranks.plain_environment() | self._server.variables
        self._process = start_script(SCRIPT, words, cwd=self._home, env=env, outputs=self._outputs)

    def kill_at(self, moment: Pause | TrialFile, *, with_jobs: bool) -> None:
        """SIGKILL when it looks after its trials and the moment has come; with_jobs: for all."""
        while f": {NUM_TRIALS} trials\n" not in self.stderr or not moment.is_reached:
            self._server.serve()
            assert self._process.is_alive(), self.stderr
        self._process.kill()
        self._process.join()
        assert self._process.exitcode == -signal.SIGKILL
        if with_jobs:
            self._server.end_all()
            kill_jobs(self.folder)
            self._server.end_all()
        moment.release()

    def wait(self) -> int | None:
        """The exit code at its own end."""
        while self._process.is_alive():
            self._server.serve()
        self._process.join()
        return self._process.exitcode


def check_killed_search(home: Path, server: RankServer, seed: int) -> None:
    """No trial is lost or twice, and the best one's command reproduces its accuracy exactly.

    Every other kill meets the trainings, too.
    """
    search, known = KilledSearch(home, server), dict[int, Trial]()
    words: list[str | Path] = [
        *("data", "--trials", str(NUM_TRIALS), "--jobs", "2", "--out", "s", "--space", SPACE),
        *("--", *TRAIN),
    ]
    sizes = (NUM_KILLS, NUM_TRIALS, EPOCHS)
    for number, moment in enumerate(choose_moments(search.folder, *sizes, random.Random(seed))):
        search.start(*words)
        search.kill_at(moment, with_jobs=number % 2 == 0)
        known = take_stock(search.folder, known, home / "copy")
        words = ["resume", "s"]
    search.start(*words)
    assert search.wait() == 0, search.stderr
    trials = list(take_stock(search.folder, known, home / "copy").values())
    assert find_disagreements(search.folder, read_search(search.folder)) == []
    assert [trial.state for trial in trials] == ["complete"] * NUM_TRIALS
    for trial in trials:
        epochs = read_epochs(search.folder / trial.name)
        assert [epoch["epoch"] for epoch in epochs] == [*range(EPOCHS)]
    assert server.doubles == []
    check_best(search, trials)


def check_best(search: KilledSearch, trials: list[Trial]) -> None:
    """The printed command trains the best trial again, bit for bit; only its checkpoints stay."""
    folder, best = search.folder, find_best(trials, "acc1")
    assert best is not None
    assert [path.parent.name for path in folder.glob("trial*/ckpt")] == [best.name]
    lines = search.stdout.splitlines()
    command = next(line for line in lines if line.startswith("    python -m train "))
    train = functools.partial(train_at, folder.parent, shlex.split(command)[3:])
    ranks.call(train, folder / "best.log").expect(0)
    ours, again = (read_epochs(folder / name) for name in (best.name, "best"))
    assert again[-1]["val_acc1"] == best.value
    assert [e["val_loss"] for e in again] == [e["val_loss"] for e in ours]


@pytest.fixture
def server() -> Iterator[RankServer]:
    server = RankServer()
    yield server
    server.close()


def test_twelve_trials_killed_ten_times_lose_nothing(home: Path, server: RankServer) -> None:
    check_killed_search(home, server, seed=0)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(1, 21))
def test_twelve_trials_killed_at_other_moments_lose_nothing(
    home: Path, server: RankServer, seed: int
) -> None:
    check_killed_search(home, server, seed)


def test_a_hopeless_trial_is_stopped_with_a_checkpoint(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer gets a SIGTERM and saves."""
    folder = home / "s"
    monkeypatch.setattr(loop, "POLL_S", {"local": 0.02})
    jobs = ForkedTrainings()
    jobs.install(monkeypatch)
    plan = make_plan(
        data="../data",
        trials=5,
        space="lr=log:0.0001..3",
        metric="val_loss",
        prune=True,
        keep_checkpoints=True,
        train_flags=("--epochs", "27"),
    )
    assert run_search(folder, plan) == 0
    trials = read_trials(folder).values()
    behind = [t for t in trials if t.state == "pruned"]
    assert behind and find_disagreements(folder, plan) == []
    for trial in behind:
        record = json.loads((folder / trial.name / "run.json").read_text())
        assert (record["status"], record["exit_code"]) == ("checkpointed", 85)
        assert list((folder / trial.name / "ckpt").glob("step-*.pt"))
        assert len(read_epochs(folder / trial.name)) < 27
