"""`python -m train`: runs the trainer and turns its end into an exit code."""

import os
import signal
import sys

from dataset.errors import run_command
from dataset.packages import require_packages

require_packages("torch", "torchvision", "numpy", "PIL")
# HTCondor sets it to the slot's CPUs. With 1, seen on a pool, the first backward pass never ends:
# torch runs it in a second thread, to which libgomp grants none.
os.environ.pop("OMP_THREAD_LIMIT", None)
# SLURM may warn while torch is still imported, which would kill the rank: the warning waits until
# train.interrupt takes it.
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGUSR2})

from train.run import main  # noqa: E402

if __name__ == "__main__":
    code = run_command(main)
    sys.stdout.flush()
    sys.stderr.flush()
    # The loader's workers and the process group need no farewell; their destructors may be slow.
    os._exit(code)
