"""Each fault of the fetch under a training that streams: the same weights, or the right exit code.

All runs allow bad images to be skipped: zeros of a hole, or wrong bytes, would change the weights.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest

from dataset.errors import BAD_DATA, CHECKPOINTED, DONE, TRY_AGAIN
from dataset.names import INDEX_SUFFIX
from dataset.own_names import part_path
from tests.cluster.osdf.fetch_cases import CASES, Case, sources
from tests.cluster.osdf.fetching import FAST
from tests.cluster.osdf.rules import Fault
from tests.cluster.osdf.streamed_runs import (
    ONE_EPOCH,
    Served,
    check_same_run,
    hurry,
    run_local,
    serve_set,
    start_run,
)
from tests.dataset.tars import TRAIN
from tests.train import started_ranks as ranks
from tests.train.outcomes import stopped_at
from train.records.record import read_run

pytestmark = [
    pytest.mark.osdf,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("no_leftovers"),
]

PER_CLASS, STEPS = 46, 23  # 27 MiB
# So many requests are answered before the fault begins: the training then has made some steps.
SKIPPED = {"director": 1, "cache1": 2, "cache*": 8, "[co]*": 16, "*": 0}
TIMES = 12  # what lasts some seconds in the fetch's table: a start of the trainer takes as long


@pytest.fixture(scope="module")
def served(osdf: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Served:
    return serve_set(osdf, tmp_path_factory.mktemp("served"), PER_CLASS)


@pytest.fixture(scope="module")
def local(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run from the local tars, in the streamed order."""
    return run_local(served, tmp_path_factory.mktemp("local"), *ONE_EPOCH)


def strike(case: Case, path: str) -> list[Fault]:
    """The faults of a case, to begin while the training streams."""
    return [_move(fault, path) for fault in case.faults]


def _move(fault: Fault, path: str) -> Fault:
    skip = 0 if fault.at else SKIPPED[fault.server]  # wrong places are wrong from the start
    times = fault.times if fault.for_s is None else (1 if fault.server == "director" else TIMES)
    return replace(fault, path=path, skip=skip, times=times, for_s=None)


def stream(served: Served, folder: Path, case: Case) -> ranks.Job:
    """A run under way, as impatient as the fetches of the table."""
    options = replace(FAST, **case.options)
    flags = ["--stream", "always", "--skip-bad-images", "99"]
    flags += ["--give-up-after", f"{options.give_up_s:.0f}"]
    hook = partial(hurry, options.stall_s, options.missing_s)
    return start_run(served.urls, served, folder, *ONE_EPOCH, *flags, hook=hook)


def check_refused(job: ranks.Job, folder: Path) -> None:
    """It ended with one line, before anything wrong got a name."""
    assert "Traceback" not in job.log and "skipped an image" not in job.log
    assert not (folder / "data" / TRAIN).exists()


@pytest.mark.parametrize(
    "case",
    [case for case in CASES if case.exit_code != TRY_AGAIN],
    ids=lambda case: case.name.replace(" ", "_"),
)
def test_a_fault_under_a_training(
    case: Case, served: Served, local: Path, osdf: ModuleType, tmp_path: Path
) -> None:
    with osdf.faults(*strike(case, served.train_path), seed=1) as faults:
        job = stream(served, tmp_path, case).expect(case.exit_code)
        is_certain = all(fault.share == 1 for fault in case.faults)
        assert all(faults.hits()) or not is_certain, "it did not strike"
    if case.exit_code == DONE:
        check_same_run(tmp_path, local, served)
        assert "skipped an image" not in job.log
    else:
        check_refused(job, tmp_path)


def test_503_for_ever_is_a_checkpoint_and_then_75(
    served: Served, local: Path, osdf: ModuleType, tmp_path: Path
) -> None:
    (case,) = [case for case in CASES if case.exit_code == TRY_AGAIN]
    with osdf.faults(*strike(case, served.train_path)):
        job = stream(served, tmp_path, case).expect(CHECKPOINTED)
        assert 0 < stopped_at(tmp_path / "run") < STEPS
        job = stream(served, tmp_path, case).expect(TRY_AGAIN)
    check_refused(job, tmp_path)
    assert "what has arrived is kept" in job.log.splitlines()[-1]
    assert part_path(tmp_path / "data" / TRAIN).exists()
    start_run(served.urls, served, tmp_path, *ONE_EPOCH).expect(DONE)
    check_same_run(tmp_path, local, served)
    assert read_run(tmp_path / "run")["attempts"][-1]["stream"]["bytes_resumed"] > 0


@pytest.mark.parametrize("is_as_long", [True, False])
def test_an_object_that_is_replaced_during_the_run_ends_it_with_3(
    served: Served, osdf: ModuleType, tmp_path: Path, is_as_long: bool
) -> None:
    size = (served.folder / TRAIN).stat().st_size
    other = osdf.put(f"{tmp_path.name}/other.tar", bytes(size if is_as_long else size - 512))
    case = Case("replaced", [sources("change", to=other)])
    with osdf.faults(*strike(case, served.train_path)):
        job = stream(served, tmp_path, case).expect(BAD_DATA)
    check_refused(job, tmp_path)


@pytest.mark.parametrize("server", ["director", "[co]*"])
def test_a_passing_fault_does_not_mean_that_there_is_no_index(
    served: Served, local: Path, osdf: ModuleType, tmp_path: Path, server: str
) -> None:
    """Else a job that must stream ends with 2, as if its user had made a mistake."""
    index = served.train_path + INDEX_SUFFIX
    case = Case("index", [Fault("status", server=server, path=index, status=502, times=1)])
    with osdf.faults(*case.faults) as faults:
        stream(served, tmp_path, case).expect(DONE)
        assert all(faults.hits())
    check_same_run(tmp_path, local, served)
