"""What the process that all ranks are forked from imports, once."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch._dynamo
import torch.distributed

import tests.train.hooks
import tests.train.tiny_net  # noqa: F401
import train.ranks.comm
import train.run
import train.saving

torch.set_num_threads(1)
# Rank 0 stays for two heartbeats after a failure, and a lost rank is missed after three.
for module in (train.ranks.comm, train.saving):
    vars(module).update(HEARTBEAT_S=0.5)
