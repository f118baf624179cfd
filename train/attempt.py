"""One start of a run on one rank: it joins the other ranks, and ends with them if one fails."""

from __future__ import annotations

import os
import sys

import torch

from dataset.errors import UserError
from train.config import TrainConfig
from train.device import identify_gpu, name_device
from train.failure import call_before_abort, end_all_ranks, record_failure
from train.ranks.batch_system import find_deadline
from train.ranks.comm import Comm
from train.ranks.interrupt import Interrupt
from train.ranks.launch import Launch
from train.records.phases import PhaseClock
from train.records.recorder import Recorder, is_recorded_as_done
from train.run_folder import default_output, lock_folder
from train.stream.early import EarlyStream
from train.stream.run_stream import Stream


class Attempt:
    """What a rank has before anything is prepared: its place, its device, its clock, its record."""

    def __init__(
        self,
        cfg: TrainConfig,
        launch: Launch,
        device: torch.device,
        started_s: float,
        early: EarlyStream | None = None,
    ) -> None:
        self.cfg, self.launch, self.device = cfg, launch, device
        self.comm, self.clock = Comm(launch), PhaseClock(started_s)
        self.interrupt = Interrupt(self.comm, cfg.deadline)  # until the ranks agree on a deadline
        self.stream = Stream(cfg, launch, self.comm, early)
        self.clock.read_network_s = self.stream.waited_s
        self.recorder: Recorder | None = None  # rank 0's, once it writes to the run's folder
        self._has_joined = False

    def join_others(self) -> None:
        """Joins the other ranks, and agrees with them on the time limit."""
        timeout_s, gpu = self.cfg.timeout_minutes * 60, identify_gpu(self.device)
        self.comm.join(self.device, timeout_s, gpu, self._end_because_of_another)
        call_before_abort(self.device, self._end_because_of_nccl)
        launch = self.launch
        deadline = find_deadline(os.environ, launch.job) if launch.is_main else None
        deadline = self.cfg.deadline or self.comm.from_main(deadline)
        self.interrupt = Interrupt(self.comm, deadline)
        self._has_joined = True

    def open_record(self) -> Recorder | None:
        """Where rank 0 records how this attempt ended, even if it never joined the others.

        A failure between joining and the first step is only printed: there may be no folder yet.
        """
        if self.recorder:
            return self.recorder
        has_no_folder = self.cfg.evaluate or self.cfg.resumes_last
        if self._has_joined or has_no_folder or not self.launch.is_main:
            return None
        folder = self.cfg.output or default_output(name_device(self.device), self.launch)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock_folder(folder)
        except UserError:  # another run writes it
            return None
        if is_recorded_as_done(folder):
            return None
        recorder = Recorder(folder, self.launch)
        recorder.begin(self.clock.started_s, None, {})
        return recorder

    def _end_because_of_nccl(self, error: RuntimeError) -> None:
        """Called by NCCL's watching thread, which would abort this process."""
        end_all_ranks(error, self.comm, self.open_record)

    def _end_because_of_another(self, message: str, code: int) -> None:
        """Called by the watching thread: the main thread may hang in a collective."""
        print(f"rank {self.launch.rank} ends because of {message}", file=sys.stderr, flush=True)
        record_failure(self.open_record, message, code)
        self.stream.close()
        os._exit(code)
