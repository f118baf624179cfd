"""`python -m train`: runs the trainer and turns its end into an exit code."""

import os
import signal
import sys

from dataset.packages import leave_at_once, require_packages

require_packages("torch", "torchvision", "numpy", "PIL")

from dataset.errors import run_command  # noqa: E402
from train.config import parse_config  # noqa: E402
from train.paths import check_paths  # noqa: E402
from train.ranks.cpu_isa import limit_bf16  # noqa: E402
from train.ranks.cpus import settle_openmp  # noqa: E402
from train.ranks.launch import detect_launch  # noqa: E402

settle_openmp(os.environ)


def main() -> int:
    """Trains; user errors that need no torch, whose import takes seconds, are reported first."""
    cfg = parse_config(sys.argv[1:])
    # Several ranks check this together later, so that an error is printed once and not by each.
    if detect_launch(os.environ).world_size == 1 and not cfg.show_recipe:
        check_paths(cfg)
    if cfg.precision == "bf16" and cfg.device != "cuda":
        limit_bf16()
    # SLURM's warning signal may come while torch is being imported and would kill the rank. It is
    # held back until train.ranks.interrupt handles it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGUSR2})
    with leave_at_once():
        from train.run import main as train
    return train()


if __name__ == "__main__":
    code = run_command(main)
    sys.stdout.flush()
    sys.stderr.flush()
    # The loader's workers and the process group need no clean-up, and their destructors are slow.
    os._exit(code)
