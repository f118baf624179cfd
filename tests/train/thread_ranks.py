"""Ranks that are threads of this process: world sizes for which no machine of ours is large enough.

Torch's own test backend joins them: collectives are real, nothing is sent. Everything above the
process group is the trainer's own code; launcher, rendezvous, gloo and NCCL are not in it.
"""

from __future__ import annotations

import importlib
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from train.ranks.comm import Comm
from train.ranks.launch import Launch

T = TypeVar("T")
# Private to torch, and without types.
c10d: Any = importlib.import_module("torch._C._distributed_c10d")
threaded: Any = importlib.import_module("torch.testing._internal.distributed.multi_threaded_pg")


def run(world_size: int, function: Callable[[Comm], T]) -> list[T]:
    """What the function gives on each rank."""
    results: list[Any] = [None] * world_size
    errors: list[str] = []
    store = HashStore()

    def be_rank(rank: int) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=world_size, store=store)
            results[rank] = function(make_comm(rank, world_size, dist.group.WORLD))
            dist.destroy_process_group()
        except BaseException as error:
            errors.append(f"rank {rank}: {traceback.format_exc()}")
            threaded.ProcessLocalGroup.exception_handle(error)  # the others stop waiting

    with _isolated_threads():
        threads = [threading.Thread(target=be_rank, args=(rank,)) for rank in range(world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors, errors[0]
    return results


def make_comm(rank: int, world_size: int, control: Any = None, store: Any = None) -> Comm:
    """A Comm over a group and a store that are there already."""
    comm = Comm(Launch("srun", "a test", rank=rank, world_size=world_size))
    comm.control, comm._store = control, store
    return comm


@contextmanager
def _isolated_threads() -> Iterator[None]:
    """Every thread has process groups of its own."""
    c10d._set_thread_isolation_mode(True)
    threaded._install_threaded_pg()
    try:
        yield
    finally:
        threaded._uninstall_threaded_pg()
        c10d._set_thread_isolation_mode(False)
        threaded.ProcessLocalGroup.reset()
