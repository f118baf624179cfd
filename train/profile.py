"""What a stage (fetch, index, extract, train, evaluate) used of the machine (no torch)."""

from __future__ import annotations

import logging
import os
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from train.record import STAGES_FILE, append_line

try:
    import psutil
except ImportError:  # a bare container: the line then lacks what only psutil can see
    psutil = None

log = logging.getLogger("trainyard")

SAMPLE_S = 0.5


class StageMeter:
    """Samples this process and its children; `extra` is for the caller's own figures."""

    def __init__(self) -> None:
        self.extra: dict[str, Any] = {}
        self._peak_rss = 0
        self._gpu_pct: list[float] = []
        self._peak_gpu_memory = 0
        self._stop = threading.Event()
        self._start_s = time.monotonic()
        self._start_time = time.time()
        self._cpu_s = _cpu_seconds()
        self._io = _io_bytes()
        self._children_io: dict[int, tuple[int, int]] = {}
        self._gpus = _open_gpus()
        self._thread = threading.Thread(target=self._sample_until_stopped, daemon=True)
        self._thread.start()

    def finish(self) -> dict[str, Any]:
        """The figures of the stage, from the start of the meter to now."""
        self._stop.set()
        self._thread.join()
        self._sample()
        seconds = time.monotonic() - self._start_s
        read, written = (now - then for now, then in zip(_io_bytes(), self._io, strict=True))
        read += sum(io[0] for io in self._children_io.values())
        written += sum(io[1] for io in self._children_io.values())
        record: dict[str, Any] = {
            "start": self._start_time,
            "seconds": round(seconds, 3),
            "cpu_pct": round(100 * (_cpu_seconds() - self._cpu_s) / max(seconds, 1e-9), 2),
            "peak_rss_bytes": self._peak_rss,
            "bytes_read": read,
            "bytes_written": written,
        }
        if self._gpu_pct:
            record["gpu_pct"] = round(sum(self._gpu_pct) / len(self._gpu_pct), 2)
            record["peak_gpu_memory_bytes"] = self._peak_gpu_memory
        return record | self.extra

    def _sample_until_stopped(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            self._sample()

    def _sample(self) -> None:
        if psutil is None:
            peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            self._peak_rss = max(self._peak_rss, peak_kib * 1024)
        else:
            self._sample_tree()
        for nvml, handle in self._gpus:
            self._gpu_pct.append(float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu))
            used = int(nvml.nvmlDeviceGetMemoryInfo(handle).used)
            self._peak_gpu_memory = max(self._peak_gpu_memory, used)

    def _sample_tree(self) -> None:
        me = psutil.Process()
        rss = me.memory_info().rss
        for child in me.children(recursive=True):
            try:
                rss += child.memory_info().rss
                io = child.io_counters()
                self._children_io[child.pid] = (io.read_chars, io.write_chars)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        self._peak_rss = max(self._peak_rss, rss)


@contextmanager
def measure_stage(stage: str, folder: Path | None) -> Iterator[StageMeter]:
    """A meter around one stage; its line goes to folder/stages.jsonl, failed stages too."""
    meter = StageMeter()
    status = "failed"
    try:
        yield meter
        status = "done"
    finally:
        record = {"stage": stage, "status": status, "host": os.uname().nodename} | meter.finish()
        if folder is not None:
            _append(folder, record)


def _append(folder: Path, record: dict[str, Any]) -> None:
    """Writes the line of a stage; a full disk neither ends the stage nor hides why it failed."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        append_line(folder / STAGES_FILE, record)
    except OSError as error:
        log.warning("%s not written: %s", folder / STAGES_FILE, error.strerror)


def _cpu_seconds() -> float:
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in usage)


def _io_bytes() -> tuple[int, int]:
    """Bytes that this process asked to read and write (rchar and wchar of the kernel)."""
    try:
        fields = dict(
            line.split(": ") for line in Path("/proc/self/io").read_text().splitlines() if line
        )
        return int(fields["rchar"]), int(fields["wchar"])
    except (OSError, KeyError, ValueError):
        return 0, 0


_GPU_DEVICES = ("/dev/nvidiactl", "/dev/dxg")  # the driver's own, on Linux and under Windows


def _open_gpus() -> list[tuple[Any, Any]]:
    """(nvml module, device handle) of each GPU that this process may use."""
    if not any(map(os.path.exists, _GPU_DEVICES)):
        return []  # saves the import
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible is None:
            count = pynvml.nvmlDeviceGetCount()
            return [(pynvml, pynvml.nvmlDeviceGetHandleByIndex(i)) for i in range(count)]
        names = [name.strip() for name in visible.split(",") if name.strip()]
        return [(pynvml, _gpu_handle(pynvml, name)) for name in names]
    except pynvml.NVMLError:
        return []


def _gpu_handle(nvml: Any, name: str) -> Any:
    """A device by its index, or by its UUID as HTCondor writes it (GPU-a0223334…)."""
    if name.isdigit():
        return nvml.nvmlDeviceGetHandleByIndex(int(name))
    return nvml.nvmlDeviceGetHandleByUUID(name)
