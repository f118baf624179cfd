"""`python -m train`: runs the trainer and turns its end into an exit code."""

import os
import signal
import sys

from dataset.packages import leave_at_once, require_packages

require_packages("torch", "torchvision", "numpy", "PIL")

from dataset.errors import run_command  # noqa: E402
from train.config import parse_config  # noqa: E402
from train.ranks.cpu_isa import limit_bf16  # noqa: E402
from train.ranks.cpus import settle_openmp  # noqa: E402
from train.ranks.launch import detect_launch  # noqa: E402
from train.paths import check_paths  # noqa: E402

settle_openmp(os.environ)


def main() -> int:
    """Finds the mistakes that can be found without torch, whose import takes seconds."""
    cfg = parse_config(sys.argv[1:])
    # Several ranks look together, later: the mistake is then said once and not by each of them.
    if detect_launch(os.environ).world_size == 1 and not cfg.show_recipe:
        check_paths(cfg)
    if cfg.precision == "bf16" and cfg.device != "cuda":
        limit_bf16()
    # SLURM may warn while torch is still imported, which would kill the rank: the warning waits
    # until train.ranks.interrupt takes it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGUSR2})
    with leave_at_once():
        from train.run import main as train
    return train()


if __name__ == "__main__":
    code = run_command(main)
    sys.stdout.flush()
    sys.stderr.flush()
    # The loader's workers and the process group need no farewell; their destructors may be slow.
    os._exit(code)
