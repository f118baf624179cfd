"""A stream beside others: a fetch before or after it, a second job, a token that ends, a halt."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest

from dataset.errors import CHECKPOINTED, DONE, TRY_AGAIN, USER_MISTAKE
from dataset.federation import tls
from dataset.stream.keeper import Keeper
from dataset.transfer.journal import CHUNK
from tests.cluster.osdf.control import FaultHandle
from tests.cluster.osdf.fetching import Fetcher
from tests.cluster.osdf.rules import Fault
from tests.cluster.osdf.streamed_runs import (
    ONE_EPOCH,
    Served,
    check_same_run,
    find_map,
    forget_maps,
    hurry,
    run_local,
    serve_set,
    start_run,
)
from tests.train import hooks
from tests.train import started_ranks as ranks
from tests.train.outcomes import EVERY_STEP, stopped_at
from train.records.record import read_run

pytestmark = [
    pytest.mark.osdf,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("no_leftovers"),
]

PER_CLASS = 46  # 27 MiB
FEW, MANY = 8, 20  # requests, of a MiB or for the size: the first step needs less than many
SILENT_S = 5.0  # in place of 10


@pytest.fixture(scope="module")
def served(osdf: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Served:
    """In the namespace that needs a token, over https."""
    return serve_set(osdf, tmp_path_factory.mktemp("served"), PER_CLASS, is_protected=True)


@pytest.fixture(scope="module")
def local(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_local(served, tmp_path_factory.mktemp("local"), *ONE_EPOCH)


@pytest.fixture
def token(osdf: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A good token in a file; ranks and fetchers trust the CA of the tests."""
    monkeypatch.setenv("SSL_CERT_FILE", str(osdf.CA_FILE))
    monkeypatch.setattr(tls, "_context", None)
    path = tmp_path / "token"
    path.write_text(osdf.make_token())
    return path


def start(served: Served, folder: Path, token: Path, hook: ranks.Hook | None = None) -> ranks.Job:
    flags = [*ONE_EPOCH, *EVERY_STEP, "--order", "streamed", "--token", str(token)]
    return start_run(served.urls, served, folder, *flags, hook=hook)


def hold(osdf: ModuleType, served: Served, num_answered: int = FEW) -> FaultHandle:
    """Nothing more is answered after some requests for the tar, until this is withdrawn."""
    fault = Fault("hang", server="[co]*", path=served.train_path, method="GET", skip=num_answered)
    handle: FaultHandle = osdf.faults(fault)
    return handle


def wait_for_some(job: ranks.Job, folder: Path) -> int:
    """Returns when some of the tar is here: the process id of the fetcher."""

    def has_some() -> bool:
        found = find_map(folder)
        return found is not None and bool(found.here.any())

    job.wait_for(has_some, "some of the tar")
    found = find_map(folder)
    assert found is not None
    return found.pid


def test_a_fetch_finishes_what_a_stream_began(
    served: Served, local: Path, osdf: ModuleType, token: Path, tmp_path: Path
) -> None:
    with hold(osdf, served):
        job = start(served, tmp_path, token)
        wait_for_some(job, tmp_path)
        job.end()
    forget_maps(tmp_path)
    fetch = Fetcher(osdf, tmp_path / "data", token=token, federation=served.federation)
    result = fetch(served.train_path)
    assert result.exit_code == DONE, result.message
    assert result.summary.resumed_bytes >= CHUNK
    start(served, tmp_path, token).expect(DONE)
    check_same_run(tmp_path, local, served)


def test_a_stream_finishes_what_a_fetch_began(
    served: Served, local: Path, osdf: ModuleType, token: Path, tmp_path: Path
) -> None:
    fetch = Fetcher(osdf, tmp_path / "data", token=token, federation=served.federation)
    stop = Fault("status", server="[co]*", path=served.train_path, method="GET", skip=5)
    with osdf.faults(stop):
        result = fetch(served.train_path, give_up_s=10.0, connections=1)
    assert result.exit_code == TRY_AGAIN, result.message
    start(served, tmp_path, token).expect(DONE)
    check_same_run(tmp_path, local, served)
    assert read_run(tmp_path / "run")["attempts"][-1]["stream"]["bytes_resumed"] > 0


def test_a_second_job_in_the_folder_ends_at_once_and_names_the_first(
    served: Served, local: Path, osdf: ModuleType, token: Path, tmp_path: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    with hold(osdf, served):
        job = start(served, first, token)
        wait_for_some(job, first)
        second.mkdir()
        (second / "data").symlink_to(first / "data")
        refused = start(served, second, token).expect(USER_MISTAKE)
        assert job.is_alive()
    assert "is being filled by process" in refused.log and "a stream of osdf:" in refused.log
    assert "Traceback" not in refused.log
    job.expect(DONE)
    check_same_run(first, local, served)


def test_a_token_that_ends_during_the_run_is_read_again(
    served: Served, local: Path, osdf: ModuleType, token: Path, tmp_path: Path
) -> None:
    with hold(osdf, served):
        osdf.forget_traffic(served.train_path)
        job = start(served, tmp_path, token, partial(hurry, missing_s=60.0))
        wait_for_some(job, tmp_path)
        osdf.revoke(token.read_text())
    job.wait_for(
        lambda: any(entry["status"] == 403 for entry in osdf.traffic(served.train_path)),
        "a refusal",
    )
    new = token.with_name("new")
    new.write_text(osdf.make_token())
    new.replace(token)
    job.expect(DONE)
    assert "the token expires at" in job.log  # within the hour: said at the start
    check_same_run(tmp_path, local, served)


def test_a_token_that_ends_for_good_is_a_checkpoint_and_then_exit_2(
    served: Served, osdf: ModuleType, token: Path, tmp_path: Path
) -> None:
    """No checkpoint but the one at the end: the others would be there already."""
    flags = [*ONE_EPOCH, "--token", str(token), "--checkpoint-minutes", "60"]
    with hold(osdf, served, MANY):
        job = start_run(served.urls, served, tmp_path, *flags, hook=hurry)
        job.wait_for_log("step 1/")
        osdf.revoke(token.read_text())
    job.expect(CHECKPOINTED)
    assert stopped_at(tmp_path / "run") >= 1
    job = start_run(served.urls, served, tmp_path, *flags, hook=hurry).expect(USER_MISTAKE)
    assert "token" in job.log.splitlines()[-1] and "Traceback" not in job.log
    assert token.read_text() not in job.log


def test_a_halted_fetcher_is_replaced(
    served: Served, local: Path, osdf: ModuleType, token: Path, tmp_path: Path
) -> None:
    keeper = partial(Keeper, silent_s=SILENT_S)
    with hold(osdf, served):
        job = start(
            served,
            tmp_path,
            token,
            partial(hooks.set_value, "dataset.stream.node", "Keeper", keeper),
        )
        pid = wait_for_some(job, tmp_path)
        os.kill(pid, signal.SIGSTOP)
        job.wait_for_log("was silent for 5 s; starting it again")
    job.expect(DONE)
    assert not Path(f"/proc/{pid}").exists()
    check_same_run(tmp_path, local, served)
    assert read_run(tmp_path / "run")["attempts"][-1]["stream"]["fetcher_restarts"] >= 1
