"""The limit of a CPU's instructions is found by trying; such a CPU itself cannot be had here."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

import pytest

from scripts.checks import surroundings
from tests.train import started_ranks as ranks
from train.data import jpeg
from train.ranks.cpu_isa import (
    LADDER,
    PROBE,
    VARIABLE,
    cpu_flags,
    find_limit,
    is_killed_by_instruction,
)

AMX = {"fpu", "avx2", "amx_tile", "amx_bf16"}


def survives_up_to(best: str) -> list[str]:
    return list(LADDER[LADDER.index(best) :])


@pytest.mark.parametrize("best", LADDER[1:])
def test_the_largest_set_that_survives_is_taken(best: str) -> None:
    allowed = survives_up_to(best)
    assert find_limit({}, AMX, lambda isa: isa in allowed) == best


def test_a_cpu_that_keeps_its_word_gets_no_limit() -> None:
    assert find_limit({}, AMX, lambda isa: True) is None


def test_a_cpu_without_the_risky_flags_and_a_users_own_limit_are_not_probed() -> None:
    def refuse(isa: str) -> bool:
        raise AssertionError(f"probed {isa}")

    assert find_limit({}, {"fpu", "avx2", "avx512f"}, refuse) is None
    assert find_limit({VARIABLE: "AVX2"}, AMX, refuse) is None


def test_only_sigill_counts_as_a_forbidden_instruction() -> None:
    def ends(code: str) -> bool:
        return is_killed_by_instruction([sys.executable, "-c", code], os.environ)

    assert ends("import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    assert not ends("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert not ends("raise SystemExit(1)")
    assert not is_killed_by_instruction(["no-such-command"], os.environ)


@pytest.mark.parametrize("limit", [{}, {VARIABLE: "AVX2"}], ids=["this cpu", "the least"])
def test_the_probe_itself_runs(limit: dict[str, str], tmp_path: Path) -> None:
    """In a child of a process that has imported torch and computed nothing with it."""
    ranks.call(partial(exec, PROBE, {}), tmp_path / "log", env=limit).expect(0)


def test_the_flags_of_a_cpu_are_read(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nflags\t\t: fpu avx2 amx_tile\nbugs\t\t:\n")
    assert cpu_flags(cpuinfo) >= {"fpu", "avx2", "amx_tile"}
    assert cpu_flags(tmp_path / "none") == set()


def test_the_doctor_says_what_it_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(surroundings, "cpu_flags", lambda: AMX)
    monkeypatch.setattr(surroundings, "survives_bf16", lambda isa: isa == "AVX2")
    (finding,) = surroundings.look_at_bf16({})
    assert finding.level == surroundings.NOTE and f"{VARIABLE}=AVX2" in finding.problem
    monkeypatch.setattr(surroundings, "survives_bf16", lambda isa: True)
    (finding,) = surroundings.look_at_bf16({})
    assert finding.level == surroundings.OK
    assert surroundings.look_at_bf16({VARIABLE: "AVX2"}) == []


def test_the_jpeg_kernel_is_built_for_every_cpu_of_its_kind() -> None:
    """It travels to other machines; what it uses beyond the common set it chooses where it runs."""
    assert [
        flag for flag in jpeg.FLAGS if flag.startswith(("-march", "-mcpu", "-mtune", "-mavx"))
    ] == []
    source = jpeg.SOURCE.read_text()
    assert "target_clones" in source and "__builtin_cpu_supports" in source
