"""How the ranks of a job find each other, whom they take for a neighbour, and whom they miss."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from dataset.errors import CRASH, TRY_AGAIN, PassingError
from tests.train import hooks
from tests.train import started_ranks as ranks
from train.ranks import rendezvous
from train.ranks.launch import Launch
from train.ranks.launch_variables import candidate_ports
from train.records.record import read_run

pytestmark = pytest.mark.training

SOON = timedelta(seconds=90)


def launch_of(rank: int, token: str, ports: tuple[int, ...]) -> Launch:
    return Launch("srun", "a test", rank=rank, world_size=2, ports=ports, token=token)


def connect_in_background(launch: Launch, stores: dict[str, Any]) -> threading.Thread:
    def connect() -> None:
        stores[f"{launch.token} {launch.rank}"] = rendezvous.connect(launch, SOON)

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    return thread


@contextmanager
def listener(port: int = 0) -> Iterator[int]:
    """A foreign service that accepts connections and never says a word."""
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("0.0.0.0", port))
        server.listen()
        yield server.getsockname()[1]


def free_ports(count: int) -> tuple[int, ...]:
    return tuple(ranks.find_free_port() for _ in range(count))


def test_two_jobs_with_one_hinted_port_do_not_meet() -> None:
    """The Kempner project's sbatch file exports the same MASTER_PORT for every job."""
    hint, *others = free_ports(3)
    ports = {"A": (hint, others[0]), "B": (hint, others[1])}
    stores: dict[str, Any] = {}
    threads = [
        connect_in_background(launch_of(rank, token, ports[token]), stores)
        for rank in (1, 0)  # the others come first and must wait
        for token in ("A", "B")
    ]
    for thread in threads:
        thread.join(SOON.total_seconds())
    for token in ("A", "B"):
        stores[f"{token} 0"].set("who", token)
    assert [stores[f"{token} 1"].get("who") for token in ("A", "B")] == [b"A", b"B"]


def test_a_foreign_service_on_the_first_port_is_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rendezvous, "CLIENT_TIMEOUT_S", 0.3)
    with listener() as taken:
        stores: dict[str, Any] = {}
        ports = (taken, *free_ports(1))
        threads = [connect_in_background(launch_of(r, "A", ports), stores) for r in (1, 0)]
        for thread in threads:
            thread.join(SOON.total_seconds())
    stores["A 0"].set("key", "value")
    assert stores["A 1"].get("key") == b"value"


def test_no_free_port_is_a_passing_failure() -> None:
    with ExitStack() as stack:
        ports = tuple(stack.enter_context(listener()) for _ in range(4))
        with pytest.raises(PassingError, match="none of the 4 rendezvous ports"):
            rendezvous.connect(launch_of(0, "A", ports), SOON)


def test_a_taken_master_port_is_a_passing_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with listener() as taken:
        monkeypatch.setenv("MASTER_PORT", str(taken))
        with pytest.raises(PassingError, match=f"cannot serve .* MASTER_PORT={taken}"):
            rendezvous.connect(Launch("environment", "a test", world_size=2), SOON)


def test_an_absent_rank_zero_is_a_passing_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    (port,) = free_ports(1)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    launch = Launch("environment", "a test", rank=1, world_size=2)
    with pytest.raises(PassingError, match=r"rank 1 cannot reach .* did rank 0 not start"):
        rendezvous.connect(launch, timedelta(seconds=1))
    with pytest.raises(PassingError, match="rank 1 did not find rank 0"):
        rendezvous.connect(launch_of(1, "A", (port,)), timedelta(seconds=1))


def test_a_rank_that_never_comes_is_named(tmp_path: Path) -> None:
    argv = ["--dummy", "--output", str(tmp_path / "out"), "--timeout-minutes", "0.3"]
    job = ranks.run(argv, tmp_path / "log", num_ranks=3, absent=(1,))
    assert job.codes == [TRY_AGAIN, TRY_AGAIN]
    assert "rank 1 of 3 did not join" in job.log
    assert "Traceback" not in job.log


def test_ranks_started_by_hand_without_the_size_of_their_node_finish(
    images: Path, tmp_path: Path
) -> None:
    """Nobody says how many nodes there are: the ranks count themselves."""
    port = ranks.find_free_port()

    def by_hand(rank: int) -> dict[str, str]:
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_PORT": port}
        known = {name: str(number) for name, number in numbers.items()}
        return known | {"MASTER_ADDR": "127.0.0.2"}

    argv = [str(images), "--max-steps", "1", "--output", str(tmp_path / "out")]
    assert ranks.run(argv, tmp_path / "log", 2, env=by_hand).expect(0)


def test_ranks_of_submitit_find_each_other_beside_a_foreign_service(
    images: Path, tmp_path: Path
) -> None:
    """The whole way with candidate ports, the first of which is taken."""
    job_id = tmp_path.name
    with listener(candidate_ports(f"submitit/{job_id}")[0]):

        def task(rank: int) -> dict[str, str]:
            names = {"GLOBALID": rank, "LOCALID": rank, "NTASKS": 2, "JOB_ID": job_id}
            return {f"SUBMITIT_LOCAL_{name}": str(value) for name, value in names.items()}

        argv = [str(images), "--max-steps", "1", "--output", str(tmp_path / "out")]
        hurry = partial(hooks.set_value, "train.ranks.rendezvous", "CLIENT_TIMEOUT_S", 1.0)
        ranks.run(argv, tmp_path / "log", 2, env=task, hook=hurry).expect(0)
    assert read_run(tmp_path / "out")["attempts"][0]["launcher"] == "submitit"


def test_a_restart_by_torchrun_does_not_trip_over_the_keys_of_the_failed_start(
    images: Path, tmp_path: Path
) -> None:
    """torchrun's agent serves one store for all its restarts (its protocol, acted out here)."""
    agent = TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)

    def variables(rank: int, restarts: int) -> dict[str, str]:
        elastic = {"RUN_ID": "x", "USE_AGENT_STORE": "True", "RESTART_COUNT": str(restarts)}
        return ranks.rank_variables(rank, 2, agent.port) | {
            f"TORCHELASTIC_{name}": value for name, value in elastic.items()
        }

    argv = [str(images), "--max-steps", "2", "--output", str(tmp_path / "out")]
    fault = partial(hooks.at_step, 1, 1, hooks.raise_fault)
    first = ranks.run(argv, tmp_path / "log0", 2, env=partial(variables, restarts=0), hook=fault)
    assert first.codes == [CRASH, CRASH]
    ranks.run(argv, tmp_path / "log1", 2, env=partial(variables, restarts=1)).expect(0)
    assert read_run(tmp_path / "out")["status"] == "done"


def refuse_connection() -> None:
    raise RuntimeError(
        "NCCL error: unhandled system error: Connect to n2<4711>: Connection refused"
    )


def test_a_connection_that_fails_although_all_ranks_answer_is_said_as_it_is(
    images: Path, tmp_path: Path
) -> None:
    """A firewall between two nodes: no rank is missing, so none is blamed."""
    argv = [str(images), "--max-steps", "3", "--output", str(tmp_path / "out")]
    hook = partial(hooks.before, "torch.distributed", "all_reduce", refuse_connection)
    job = ranks.run(argv, tmp_path / "log", 2, hook=hook).expect(TRY_AGAIN)
    assert "Connect to n2<4711>: Connection refused" in job.log
    assert "NCCL_DEBUG=INFO" in job.log
    assert "lost contact" not in job.log


def test_only_the_killed_rank_is_named_although_clocks_differ(images: Path, tmp_path: Path) -> None:
    """Nodes without NTP: a rank whose clock is wrong is not a dead one."""
    hook = partial(
        hooks.all_of,
        partial(hooks.skew_clock, 2, -1000.0),
        partial(hooks.at_step, 1, 2, hooks.kill_myself),
    )
    argv = [str(images), "-b", "9", "--output", str(tmp_path / "out")]
    job = ranks.run(argv, tmp_path / "log", 3, hook=hook)
    assert job.codes == [CRASH, -signal.SIGKILL, CRASH]
    lost = {line.partition("lost contact with ")[2] for line in job.log.splitlines()} - {""}
    assert lost == {"rank 1"}
    assert read_run(tmp_path / "out")["status"] == "failed"
    assert os.listdir(tmp_path / "out" / "ckpt") == []
