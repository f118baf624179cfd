"""What a stage used: its own process, its children, and GPUs that do not tell all."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from train.records import stage_meter
from train.records.stage_meter import StageMeter

NUM_BYTES = 50_000_000
BUSY_S = 0.4
# A worker that does a piece of work for each line that it is sent, and answers with a line: the
# CPU time that it has used so far, by the kernel's count for itself.
WORKER = f"""
import sys, time
for line in sys.stdin:
    open("/dev/null", "wb").write(bytes({NUM_BYTES}))
    end = time.process_time() + {BUSY_S}
    while time.process_time() < end:
        pass
    print(time.process_time(), flush=True)
"""


@contextmanager
def worker() -> Iterator[Callable[[], float]]:
    """A living child, and how to make it work once: the CPU time it has used since its start."""
    command = [sys.executable, "-c", WORKER]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin and child.stdout

        def work() -> float:
            assert child.stdin and child.stdout
            child.stdin.write("go\n")
            child.stdin.flush()
            return float(child.stdout.readline())

        yield work
        child.stdin.close()


def cpu_s(record: dict[str, Any]) -> float:
    return float(record["cpu_pct"] * record["seconds"] / 100)


def test_a_living_child_counts_with_what_it_did_in_the_stage() -> None:
    with worker() as work:
        before, own = work(), time.process_time()
        first = StageMeter()
        used = work() - before
        one = first.finish()
        own_of_one = time.process_time() - own
        second = StageMeter()
        nothing = second.finish()
        own_of_both = time.process_time() - own
    assert NUM_BYTES <= one["bytes_written"] < 1.5 * NUM_BYTES
    assert 0.8 * used < cpu_s(one) < 1.5 * used + own_of_one
    assert nothing["bytes_written"] < 0.5 * NUM_BYTES
    assert cpu_s(nothing) < 0.5 * used + own_of_both


def test_a_child_that_ends_in_the_stage_counts_once() -> None:
    with worker() as work:
        before, own = work(), time.process_time()
        meter = StageMeter()
        used = work() - before
        meter._sample()  # while it lives, as the thread would
    record = meter.finish()
    assert NUM_BYTES <= record["bytes_written"] < 1.5 * NUM_BYTES
    assert 0.8 * used < cpu_s(record) < 1.5 * used + time.process_time() - own


# --- GPUs -------------------------------------------------------------------------------------


class NVMLError(Exception):
    """As pynvml's."""


class FakeNvml:
    """Stands for pynvml, for there is no GPU here; a handle is the set of what it does not tell."""

    NVMLError = NVMLError

    def nvmlDeviceGetUtilizationRates(self, handle: set[str]) -> SimpleNamespace:
        return self._tell("gpu", 40, handle)

    def nvmlDeviceGetMemoryInfo(self, handle: set[str]) -> SimpleNamespace:
        return self._tell("used", 7_000, handle)

    def _tell(self, name: str, value: int, handle: set[str]) -> SimpleNamespace:
        if name in handle:
            raise NVMLError("Not Supported")
        return SimpleNamespace(**{name: value})


@pytest.mark.parametrize(
    ("handles", "expected"),
    [
        ([set()], {"gpu_pct": 40.0, "peak_gpu_memory_bytes": 7_000}),
        ([{"gpu"}], {"peak_gpu_memory_bytes": 7_000}),  # MIG mode
        ([{"gpu", "used"}], {}),  # lost
        ([{"gpu", "used"}, set()], {"gpu_pct": 40.0, "peak_gpu_memory_bytes": 7_000}),
    ],
)
def test_a_gpu_that_does_not_answer_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, handles: list[set[str]], expected: dict[str, float]
) -> None:
    nvml = FakeNvml()
    monkeypatch.setattr(stage_meter, "_open_gpus", lambda: [(nvml, handle) for handle in handles])
    record = StageMeter().finish()
    assert {name: value for name, value in record.items() if "gpu" in name} == expected


def test_a_file_of_the_user_called_stages_gets_no_line(tmp_path: Path) -> None:
    (tmp_path / "stages.jsonl").write_text("mine\n")
    with stage_meter.measure_stage("fetch", tmp_path):
        pass
    assert (tmp_path / "stages.jsonl").read_text() == "mine\n"
    (tmp_path / "stages.jsonl").unlink()
    for _ in range(2):
        with stage_meter.measure_stage("fetch", tmp_path):
            pass
    assert (tmp_path / "stages.jsonl").read_text().count('"stage": "fetch"') == 2
