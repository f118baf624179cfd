"""What the process that all ranks are forked from imports, once."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch._dynamo
import torch.distributed

import tests.train.hooks  # noqa: F401
import train.run  # noqa: F401

torch.set_num_threads(1)
