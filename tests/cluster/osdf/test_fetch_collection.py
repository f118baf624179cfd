"""Collections from real servers: kills, odd names, full disks; and starts without a network."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from tests.cluster.osdf.fetching import MIB, Fetcher, make_content
from tests.mounts import mounted

pytestmark = pytest.mark.osdf
ROOT = Path(__file__).resolve().parents[3]
NUM_FILES = 600
ODD = "odd=a+b@c:d,(e)!"


def start_fetch(osdf: ModuleType, path: str, out: Path, *before: str) -> subprocess.Popen[str]:
    command = [
        *(*before, sys.executable, str(ROOT / "scripts" / "fetch_osdf.py"), f"osdf://{path}"),
        *("--federation", osdf.DIRECTOR_HTTP_URL, "--out", str(out)),
    ]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def content_of(number: int) -> bytes:
    return f"{number} ".encode() * (number % 50 + 1)


@pytest.fixture(scope="module")
def killed(osdf: ModuleType) -> str:
    for number in range(NUM_FILES):
        osdf.put(f"fetch-small-kill/n{number % 7}/{number}.JPEG", content_of(number))
    return "/public/fetch-small-kill/"


@pytest.mark.parametrize("seed", range(3))
def test_kills_among_small_files_cost_only_what_was_in_flight(
    seed: int, osdf: ModuleType, killed: str, tmp_path: Path
) -> None:
    root = tmp_path / "fetch-small-kill"
    chance = random.Random(seed)
    here: set[Path] = set()
    for share in (0.3, 0.6):
        goal = NUM_FILES * share * chance.uniform(0.5, 1.0)
        process = start_fetch(osdf, killed, tmp_path)
        while process.poll() is None and len(list(root.rglob("*.JPEG"))) < goal:
            time.sleep(0.002)
        process.kill()
        process.communicate()
        here = set(root.rglob("*.JPEG"))
    assert 0 < len(here) < NUM_FILES
    result = Fetcher(osdf, tmp_path)(killed, stall_s=10.0)
    assert result.exit_code == 0, result.message
    missing = [n for n in range(NUM_FILES) if root / f"n{n % 7}" / f"{n}.JPEG" not in here]
    assert result.summaries[0].fetched_bytes == sum(len(content_of(n)) for n in missing)
    for number in range(NUM_FILES):
        assert (root / f"n{number % 7}" / f"{number}.JPEG").read_bytes() == content_of(number)
    assert not list(tmp_path.rglob("*-part*"))


@pytest.mark.parametrize("end", ["", "/"])
def test_a_collection_with_an_odd_name_is_fetched(
    end: str, osdf: ModuleType, tmp_path: Path
) -> None:
    contents = {"a=1.bin": b"one", f"{ODD}/b (2).bin": b"two", "c@3.bin": make_content(5 * MIB, 60)}
    for name, content in contents.items():
        osdf.put(f"{ODD}/{name}", content)
    result = Fetcher(osdf, tmp_path)(f"/public/{ODD}{end}", stall_s=10.0)
    assert result.exit_code == 0, result.message
    for name, content in contents.items():
        assert (tmp_path / ODD / name).read_bytes() == content


def test_too_little_space_for_a_collection_is_said_before_its_first_file(
    osdf: ModuleType, tmp_path: Path
) -> None:
    for number in range(12):
        osdf.put(f"fetch-space/{number}.bin", make_content(MIB, number))
    osdf.forget_traffic("/public/fetch-space/*")
    with mounted(tmp_path / "disk", "size=24m") as out:
        result = Fetcher(osdf, out)("/public/fetch-space/", stall_s=10.0)
    assert result.exit_code == 2
    assert "free some space" in result.message
    assert osdf.sent_bytes("/public/fetch-space/*.bin", "cache*") == 0


def test_a_finished_tar_is_found_on_a_node_without_a_network(
    osdf: ModuleType, tmp_path: Path
) -> None:
    """In a network namespace of its own, where nobody can be asked; no index lies beside it."""
    path = osdf.put("fetch-offline/a.tar", make_content(2 * MIB, 61))
    online = start_fetch(osdf, path, tmp_path)
    assert online.wait() == 0, online.communicate()
    offline = start_fetch(osdf, path, tmp_path, "unshare", "--net")
    _, errors = offline.communicate()
    assert offline.returncode == 0, errors
    assert "a.tar is here already" in errors
    assert "cannot be reached" not in errors
