"""`python -m tests.gpu_sim SCRIPT|-m MODULE ...`: runs it on the make-believe CUDA.

python -m tests.gpu_sim -m train --dummy -a resnet18 --image-size 32 -b 8 --max-steps 6
torchrun --nproc-per-node 2 -m tests.gpu_sim -m train --dummy ...      (CUDASIM_DEVICES=2)
"""

import os
import runpy
import sys
from pathlib import Path

from tests.gpu_sim.build import simulated_environment

if "cudart" not in os.environ.get("LD_PRELOAD", ""):
    os.environ |= simulated_environment()
    os.execv(sys.executable, [sys.executable, "-m", "tests.gpu_sim", *sys.argv[1:]])

os.environ.pop("LD_PRELOAD")  # not for the processes that this one starts
from tests.gpu_sim.operators import install

install()
sys.argv[:1] = []
if sys.argv[0] == "-m":
    sys.argv[:1] = []
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
else:
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
