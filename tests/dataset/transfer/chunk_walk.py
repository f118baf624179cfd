"""A random walk over the chunks of a file: taken, given back, hedged and arrived in any order."""

from __future__ import annotations

import random
from collections.abc import Callable

from dataset.federation.servers import Server
from dataset.transfer.blocks import ARRIVED, MISSING, BlockMap, Lease

# What else may happen to a running lease: says whether it did.
Disturb = Callable[[Lease], bool]


def walk(blocks: BlockMap, chance: random.Random, disturb: Disturb) -> None:
    """Moves until all is complete, or for 10,000 moves."""
    running: list[Lease] = []
    for _ in range(10_000):
        if blocks.is_complete:
            return
        head = blocks.peek()
        if head is not None and chance.random() < 0.5:
            lease = blocks.take(chance.randrange(1, 20), head)
            lease.server = Server("http://a/x", "a")
            running.append(lease)
        if not running:
            continue
        lease = chance.choice(running)
        roll = chance.random()
        if lease.cancelled or lease.position >= lease.end or roll < 0.1:
            running.remove(lease)
            if not lease.cancelled:
                blocks.give_back(lease)
        elif roll < 0.2 and lease.rival is None:
            blocks.hedge(lease)
        elif roll >= 0.3 or not disturb(lease):
            _arrive(blocks, lease)


def _arrive(blocks: BlockMap, lease: Lease) -> None:
    """The next chunk of a lease comes; of two rivals that ends the other one."""
    loser = blocks.settle_rivals(lease)
    if loser is not None:
        loser.cancel("lost")
    if blocks.state[lease.position] == MISSING:
        blocks.state[lease.position] = ARRIVED
        blocks.mark_done(lease.position)
    lease.position += 1
