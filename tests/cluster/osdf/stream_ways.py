"""The ways to train on a tar at the mini-OSDF that benchmarks/stream.py compares, as commands."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.stream_data import StreamSet
from benchmarks.stream_notes import Story, read_story
from benchmarks.stream_promises import (
    CURL,
    DISK_SHARES,
    FETCH,
    LOCAL,
    LOCAL_SLOW,
    MOSAIC,
    PELICANFS,
    SHUFFLED,
    SLOW_STEP,
    STREAM,
    TWO_NODES,
    WEBDATASET,
)
from dataset.names import TRAIN_TAR
from tests.cluster.osdf import service

ROOT = Path(__file__).resolve().parents[3]
CACHE = service.CACHE_HTTP_URLS[0]
PEERS = {PELICANFS: "pelicanfs", WEBDATASET: "webdataset", MOSAIC: "mosaic"}
PIXELS = 56
POLL_S = 0.02


@dataclass(frozen=True)
class Run:
    """One training: what, where, and how fast a step is."""

    data: StreamSet
    path: str  # of the tar in the federation
    folder: Path
    batch_size: int
    step_s: float
    epochs: int = 2
    window_bytes: int | None = None  # of the order; None: as it is for any set
    is_traced: bool = False
    shards: tuple[str, ...] = ()  # the paths of a rewritten set
    python: Path = Path(sys.executable)

    @property
    def steps(self) -> int:
        """The steps of an epoch."""
        return self.data.classes * self.data.per_class // self.batch_size

    @property
    def notes(self) -> Path:
        return self.folder / "notes"

    @property
    def story(self) -> Story:
        return read_story(self.notes)

    def find_end(self, epoch: int) -> float:
        """When an epoch ended; our trainer drops what does not fill a batch, and counts steps."""
        story = self.story
        return story.epochs_s[epoch] if story.epochs_s else story.ended_s[epoch * self.steps]


def trainer(run: Run, data: str, *flags: str, num_ranks: int = 1, rank: int = 0) -> list[str]:
    """Our trainer on a folder or a URL; of several ranks each has a folder of its own."""
    options: dict[str, Any] = {"notes": str(run.notes), "step_s": run.step_s}
    options |= {"trace": run.is_traced}
    if run.window_bytes is not None:
        options["window_bytes"] = run.window_bytes
    command = [sys.executable, "-m", "benchmarks.stream_train", json.dumps(options), data]
    command += ["-a", "alexnet", "-b", str(run.batch_size)]
    command += ["--microbatch", str(run.batch_size // num_ranks)]
    command += ["--epochs", str(run.epochs), "--image-size", str(PIXELS), "--device", "cpu"]
    command += ["-j", "2", "--threads", "1", "--precision", "fp32"]
    data_dir = run.folder / ("data" if num_ranks == 1 else f"data{rank}")
    command += ["--output", str(run.folder / "run"), "--data-dir", str(data_dir)]
    if run.is_traced:
        command += ["--checkpoint-minutes", "1e-9"]
    return [*command, "--federation", service.DIRECTOR_HTTP_URL, *flags]


def curl_first(run: Run) -> list[list[str]]:
    tar = run.folder / "data" / TRAIN_TAR
    curl = ["curl", "-sf", "--create-dirs", "-o", str(tar), CACHE + run.path]
    # Without the index: the trainer makes one, as of any tar.
    return [*([] if tar.exists() else [curl]), trainer(run, str(tar.parent))]


def fetch_first(run: Run) -> list[list[str]]:
    return [trainer(run, f"osdf://{run.path}", "--stream", "never")]


def stream(run: Run) -> list[list[str]]:
    return [trainer(run, f"osdf://{run.path}", "--stream", "always")]


def stream_to_disk(way: str) -> Callable[[Run], list[list[str]]]:
    """Onto a disk that holds a share of the tar."""

    def make(run: Run) -> list[list[str]]:
        limit = int(DISK_SHARES[way] * run.data.tar.stat().st_size)
        flags = ("--stream", "always", "--cache-limit", str(limit))
        return [trainer(run, f"osdf://{run.path}", *flags)]

    return make


def stream_to_nodes(run: Run) -> list[list[str]]:
    """Two ranks, each a node of its own: they share the link and nothing else."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    shared = (
        f"WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT={port}"
    )
    script = ""
    for rank in range(2):
        flags = ("--stream", "always")
        words = trainer(run, f"osdf://{run.path}", *flags, num_ranks=2, rank=rank)
        script += f"RANK={rank} GROUP_RANK={rank} {shared} {shlex.join(words)} & node{rank}=$!\n"
    return [["bash", "-c", script + "wait $node0 && wait $node1"]]


def read_local(run: Run) -> list[list[str]]:
    return [trainer(run, str(run.data.folder), "--order", "streamed")]


def peer(way: str) -> Callable[[Run], list[list[str]]]:
    """The loop of benchmarks/stream_peers.py."""

    def make(run: Run) -> list[list[str]]:
        urls = [CACHE + path for path in run.shards]
        if way == "pelicanfs":
            urls = [run.path]
        elif way == "mosaic":
            urls = [CACHE + str(Path(run.shards[0]).parent)]
        task = {"way": way, "tar": str(run.data.tar), "folder": str(run.folder / "kept")}
        task |= {
            "notes": str(run.notes),
            "federation": service.DIRECTOR_URL.replace("https", "pelican"),
        }
        fields: dict[str, Any] = {"urls": urls, "batch_size": run.batch_size, "pixels": PIXELS}
        fields |= {"epochs": run.epochs, "step_s": run.step_s, "trace": run.is_traced}
        return [[str(run.python), "-m", "benchmarks.stream_peers", json.dumps(task | fields)]]

    return make


WAYS: dict[str, Callable[[Run], list[list[str]]]] = {
    CURL: curl_first,
    FETCH: fetch_first,
    STREAM: stream,
    LOCAL: read_local,  # beside the row that it is compared with
    SLOW_STEP: stream,
    LOCAL_SLOW: read_local,
    SHUFFLED: lambda run: stream(replace(run, window_bytes=None)),
    **{way: stream_to_disk(way) for way in DISK_SHARES},
    TWO_NODES: stream_to_nodes,
    **{name: peer(way) for name, way in PEERS.items()},
}


def convert(name: str, data: StreamSet, out: Path, python: Path) -> float:
    """The seconds in which a peer's package rewrites the local tar to shards."""
    task = {"way": f"convert-{PEERS[name]}", "tar": str(data.tar), "folder": str(out)}
    started_s = time.monotonic()
    command = [str(python), "-m", "benchmarks.stream_peers", json.dumps(task)]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - started_s


@contextmanager
def started(run: Run, command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a group of its own, which ends with the block; its log lies in the folder."""
    run.folder.mkdir(parents=True, exist_ok=True)
    environ = os.environ | {"TMPDIR": str(run.folder), "SSL_CERT_FILE": str(service.CA_FILE)}
    with open(run.folder / "log", "ab") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environ, stdout=log, stderr=log, start_new_session=True
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def finish(name: str, run: Run, must_succeed: bool = True) -> bool:
    """Runs the commands of a way one after the other; whether all succeeded."""
    for command in WAYS[name](run):
        with started(run, command) as process:
            code = process.wait()
        if code != 0:
            if must_succeed:
                raise RuntimeError(f"{name}: {(run.folder / 'log').read_text()[-3000:]}")
            return False
    return True


def kill_at_step(name: str, run: Run, step: int) -> None:
    """Runs a way until a step is done, and kills all its processes."""
    *before, last = WAYS[name](run)
    for command in before:
        with started(run, command) as process:
            assert process.wait() == 0, command
    with started(run, last) as process:
        while step not in run.story.ended_s and process.poll() is None:
            time.sleep(POLL_S)
