"""Ranks talking to each other: the collectives, and who is missing when one fails."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dataset.errors import CRASH, PassingError, UserError
from train.ranks.compat import has_keys, init_process_group
from train.ranks.interfaces import choose_interfaces, share_own_address
from train.ranks.launch import Launch
from train.ranks.rendezvous import connect, is_served
from train.ranks.watch import (
    LOST_AFTER_S,
    Beat,
    Judge,
    name_behind,
    name_silent,
    unpack_beat,
)

HEARTBEAT_S = 1.0
# The collectives' own timeouts come this much later than ours, because our watching thread knows
# which rank is missing, and NCCL's timeout aborts the process without a record.
COLLECTIVES_LATER_S = 60.0
RANK_0_LOST = "lost contact with rank 0 (it no longer answers)"


class Comm:
    """The process group of a run; with one rank every method returns at once."""

    def __init__(self, launch: Launch) -> None:
        self.rank = launch.rank
        self.world_size = launch.world_size
        self._launch = launch
        self.control: Any = None
        self._store: Any = None
        self._closing = False
        self._progress, self._doing = 0, ""
        self._is_armed = False  # from the first step on the ranks move together

    def join(
        self,
        device: torch.device,
        timeout_s: float,
        gpu: str = "",
        on_failure: Callable[[str, int], None] | None = None,
    ) -> None:
        """Joins the other ranks; `gpu` identifies this rank's GPU, if it has one.

        From then on, even while the groups are made, on_failure is called when another rank fails.
        """
        launch = self._launch
        standstill_s = timeout_s + COLLECTIVES_LATER_S / 2 if device.type == "cuda" else None
        self._judge = Judge(timeout_s, standstill_s)
        if launch.world_size == 1:
            return
        if launch.num_nodes == 1:
            # Gloo would look up this machine's name, which need not resolve on a laptop.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self._store = connect(launch, timedelta(seconds=timeout_s))
        own_address = share_own_address(self._store) if launch.num_nodes > 1 else None
        self._wait_for_all(timeout_s, gpu)
        if on_failure is not None:
            self.watch(on_failure)
        self._refuse_shared_gpus()
        if launch.num_nodes > 1:
            choose_interfaces(self._store, own_address, os.environ)
        timeout = timedelta(seconds=timeout_s + COLLECTIVES_LATER_S)
        # The main thread meets a GPU that fails, too, and knows what to do. The watching thread of
        # torch's older NCCL backend would sometimes abort the process first, without a record.
        os.environ.setdefault("TORCH_NCCL_RETHROW_CUDA_ERRORS", "0")
        init_process_group(
            device, store=self._store, rank=self.rank, world_size=self.world_size, timeout=timeout
        )
        # Stop votes and small host values go through gloo, so that they never wait for the device.
        self.control = dist.new_group(backend="gloo", timeout=timeout)

    def advance(self, doing: str) -> None:
        """Notes progress of this rank, which shows who hangs when the others wait for it.

        Every rank must call it equally often.
        """
        self._progress += 1
        self._doing = doing
        self._is_armed = True

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor summed over all ranks, in place."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def gather(self, value: Any) -> list[Any]:
        """Each rank's value, in the order of the ranks, on every rank."""
        if self.control is None:
            return [value]
        self._progress += 1
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def from_main(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        if self.control is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.control)
        return box[0]

    def wait_until_done(self, what: str, num_ranks: int) -> None:
        """Waits, for as long as it takes, until this many ranks have said that they are done."""
        if self._store is None:
            return
        beats, last_look_s = self._read_beats(), time.monotonic()
        while self._store.add(f"done/{what}", 0) < num_ranks:
            time.sleep(0.2)
            if time.monotonic() - last_look_s > LOST_AFTER_S:  # the watching thread beats meanwhile
                lost = name_silent(beats, now := self._read_beats())
                beats, last_look_s = now, time.monotonic()
                if lost:
                    raise PassingError(f"while waiting for {what}: {lost}")

    def say_done(self, what: str) -> None:
        if self._store is not None:
            self._store.add(f"done/{what}", 1)

    def claim(self, what: str) -> bool:
        """Whether this rank is the first to claim something; True without a store."""
        return self._store is None or bool(self._store.add(f"claim/{what}", 1) == 1)

    def watch(self, on_failure: Callable[[str, int], None]) -> None:
        """Starts the thread that sends this rank's heartbeat and watches the others'."""
        if self._store is not None:
            threading.Thread(target=self._beat_and_listen, args=(on_failure,), daemon=True).start()

    def claim_failure(self) -> bool:
        """Whether this rank is the first to fail; only its error is printed."""
        if self._store is None:
            return True
        self._closing = True
        try:
            return bool(self._store.add("failures", 1) == 1)
        except RuntimeError:  # rank 0 and its store are gone
            return True

    def announce_failure(self, message: str, code: int) -> None:
        """Tells the other ranks that this one fails, and gives them time to notice."""
        self._closing = True  # this rank's own thread need not hear it
        self._announce(message, code)

    def _announce(self, message: str, code: int) -> None:
        if self._store is None:
            return
        try:
            self._store.set("failed", f"{code} rank {self.rank}: {message}")
        except RuntimeError:
            return
        if self.rank == 0:
            time.sleep(2 * HEARTBEAT_S)  # the store dies with this process

    def first_failure(self) -> tuple[str, int] | None:
        """(message, exit code) of another rank that failed: announced, or noticed from here.

        Waits a moment for an announcement. None: no rank is missing; the failure is our own.
        """
        if self._store is None:
            return None
        deadline_s = time.monotonic() + 3 * HEARTBEAT_S
        try:
            beats = self._read_beats()
            while time.monotonic() < deadline_s:
                if has_keys(self._store, ["failed"]):
                    return _parse_failure(self._store.get("failed"))
                time.sleep(0.05)
            now = self._read_beats()
            missing = name_silent(beats, now) or name_behind(now)
            return (missing, CRASH) if missing else None
        except RuntimeError:
            return RANK_0_LOST, CRASH

    def close(self) -> None:
        """Leaves the group; a rank that leaves first must not look like one that died."""
        if self.world_size > 1:
            dist.barrier(self.control)  # rank 0 may still fail to save: until then all listen
            self._closing = True
            dist.destroy_process_group()

    def _wait_for_all(self, timeout_s: float, gpu: str) -> None:
        """Returns when every rank has joined; the error names those that never did.

        The last one to join tells all: if each of 128 ranks asked for every other, rank 0 would
        have to answer for 16,384 keys twenty times a second.
        """
        keys = self._here_keys()
        deadline_s = time.monotonic() + timeout_s
        try:
            self._store.set(f"alive/{self.rank}", Beat(0, "starting", "").pack())
            self._store.set(keys[self.rank], gpu)
            if self._store.add("num here", 1) == self.world_size:
                self._store.set("all here", "yes")
            while not has_keys(self._store, ["all here"]):
                if time.monotonic() > deadline_s:
                    self._refuse_absent(keys, timeout_s)
                time.sleep(0.05)
        except RuntimeError as error:
            raise PassingError(
                f"rank 0 was lost at the start ({error}); its log says why"
            ) from None

    def _here_keys(self) -> list[str]:
        return [f"here/{rank}" for rank in range(self.world_size)]

    def _refuse_shared_gpus(self) -> None:
        """Raises if two ranks share a GPU: NCCL would refuse them with an obscure message."""
        first: dict[bytes, int] = {}
        for rank, gpu in enumerate(self._store.multi_get(self._here_keys())):
            other = first.setdefault(gpu, rank)
            if gpu and other != rank:
                name = gpu.decode().rpartition("/")[2]
                raise UserError(
                    f"rank {other} and rank {rank} share one GPU ({name}); ask for one per task "
                    "(--gpus-per-task=1), or start fewer ranks"
                )

    def _refuse_absent(self, keys: list[str], timeout_s: float) -> None:
        absent = [str(rank) for rank, key in enumerate(keys) if not has_keys(self._store, [key])]
        if self.rank == 0:
            time.sleep(2 * HEARTBEAT_S)  # the store dies with this process: the others look first
        raise PassingError(
            f"rank {', '.join(absent)} of {self.world_size} did not join within "
            f"{timeout_s:.0f} s; its log says why"
        )

    def _beat_and_listen(self, on_failure: Callable[[str, int], None]) -> None:
        while not self._closing:
            try:
                failure = self._beat()
            except RuntimeError:
                time.sleep(LOST_AFTER_S)  # a main thread that is not stuck knows more by then
                if is_served(self._store):  # only this connection broke: the collectives go on
                    return
                failure = RANK_0_LOST, CRASH
            if failure is not None and not self._closing:
                on_failure(*failure)
                return
            time.sleep(HEARTBEAT_S)

    def _beat(self) -> tuple[str, int] | None:
        """Sends this rank's heartbeat; returns what is wrong with another rank, if anything."""
        stamp = str(time.monotonic())
        self._store.set(f"alive/{self.rank}", Beat(self._progress, self._doing, stamp).pack())
        if has_keys(self._store, ["failed"]):
            return _parse_failure(self._store.get("failed"))
        if not self._is_armed:
            return None
        missing = self._judge.judge(time.monotonic(), self._progress, self._read_beats)
        if not missing:
            return None
        self._announce(missing, CRASH)
        return missing, CRASH

    def _read_beats(self) -> list[Beat]:
        """The last heartbeat of each rank; only changes count, as the nodes' clocks may differ."""
        keys = [f"alive/{rank}" for rank in range(self.world_size)]
        return [unpack_beat(raw) for raw in self._store.multi_get(keys)]


def _parse_failure(raw: bytes) -> tuple[str, int]:
    code, _, message = raw.decode(errors="replace").partition(" ")
    return message, int(code)
