"""`python -m train`: runs the trainer and turns its end into an exit code."""

import os
import signal
import sys
from contextlib import closing

from dataset.packages import leave_at_once, require_packages

require_packages("torch", "torchvision", "numpy", "PIL")

from dataset.errors import run_command  # noqa: E402
from train.config import TrainConfig, parse_config  # noqa: E402
from train.paths import check_paths  # noqa: E402
from train.ranks.cpu_isa import limit_bf16  # noqa: E402
from train.ranks.cpus import settle_openmp  # noqa: E402
from train.ranks.launch import Launch, detect_launch  # noqa: E402
from train.ranks.rank_log import set_up_logging  # noqa: E402

settle_openmp(os.environ)


def main() -> int:
    """Trains; user errors that need no torch, whose import takes seconds, are reported first."""
    cfg, launch = parse_config(sys.argv[1:]), detect_launch(os.environ)
    # Several ranks check this together later, so that an error is printed once and not by each.
    if launch.world_size == 1 and not cfg.show_recipe:
        check_paths(cfg)
    if cfg.precision == "bf16" and cfg.device != "cuda":
        limit_bf16()
    # SLURM's warning signal may come while torch is being imported and would kill the rank. It is
    # held back until train.ranks.interrupt handles it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGUSR2})
    if "://" in cfg.data:
        return train_on_urls(cfg, launch)
    with leave_at_once():
        from train.run import main as train
    return train()


def train_on_urls(cfg: TrainConfig, launch: Launch) -> int:
    """Trains on data that may begin to arrive while torch is being imported."""
    from train.stream.early import begin_early

    set_up_logging(launch)
    with closing(begin_early(cfg, launch)) as early:
        with leave_at_once(early.forget):
            from train.run import main as train
        return train(early=early)


if __name__ == "__main__":
    code = run_command(main)
    sys.stdout.flush()
    sys.stderr.flush()
    # The loader's workers and the process group need no clean-up, and their destructors are slow.
    os._exit(code)
