"""What the process that all ranks are forked from imports, once."""

import atexit
import functools
import gc
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import encodings.cp437  # of zip files: checkpoints
import encodings.idna  # noqa: F401 - of names of hosts

import torch
import torch._dynamo
import torch.distributed
import torch.utils.serialization.config
from PIL import Image

import tests.train.hooks
import tests.train.started_ranks
import tests.train.tiny_net  # noqa: F401
import train.records.output_writer as output_writer
import train.run  # noqa: F401

Image.preinit()  # imports Pillow's usual formats, as the first image that is opened would
torch.set_num_threads(1)
torch.manual_seed(0)  # the first one formats a stack, and reads the files of all that is on it
# The commit of the checkout, which every run writes down: one git for all of them.
commit = functools.cache(output_writer.current_commit)
commit()
vars(output_writer).update(current_commit=commit)
# A child whose collector walks through all of this takes 0.2 s of a core to copy and to search it.
gc.collect()
gc.freeze()
atexit.register(gc.unfreeze)  # or packages complain at exit that their objects leak
