"""Kills, restarts and objects that change: nothing is fetched twice, nothing is mixed."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from dataset.own_names import journal_path, part_path
from dataset.transfer.journal import CHUNK, chunk_length, read_journal
from tests.cluster.osdf.fetching import MIB, Fetcher, leftovers, make_content
from tests.cluster.osdf.rules import Fault

pytestmark = pytest.mark.osdf
ROOT = Path(__file__).resolve().parents[3]
CONNECTIONS = 4
KILL_SIZE = 64 * MIB + 999


PATIENT = ("--stall-seconds", "60")  # a busy machine's pause is no stall


def start_fetch(osdf: ModuleType, path: str, out: Path, *more: str) -> subprocess.Popen[bytes]:
    command = [
        *(sys.executable, str(ROOT / "scripts" / "fetch_osdf.py"), f"osdf://{path}"),
        *("--federation", osdf.DIRECTOR_HTTP_URL, "--out", str(out)),
        *("--connections", str(CONNECTIONS), "--stall-seconds", "1", *more),
    ]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def journalled_chunks(out: Path, name: str) -> set[int]:
    progress = read_journal(journal_path(out / name))
    return set(progress.chunks) if progress else set()


def journalled_bytes(out: Path, name: str) -> int:
    progress = read_journal(journal_path(out / name))
    return sum(chunk_length(n, progress.size) for n in progress.chunks) if progress else 0


def chunks_of(asked: str) -> range:
    """The chunks of a Range header; none where it asks for the size, with a range of one byte."""
    found = re.fullmatch(r"bytes=(\d+)-(\d+)", asked)
    if found is None or found[1] == found[2]:
        return range(0)
    return range(int(found[1]) // CHUNK, int(found[2]) // CHUNK + 1)


def fails_after(num_blocks: int, path: str) -> Fault:
    """Two questions for the size and so many blocks are answered, then nothing any more."""
    return Fault("status", server="[co]*", path=path, method="GET", skip=2 + num_blocks)


@pytest.fixture(scope="module")
def kill_object(osdf: ModuleType) -> tuple[str, bytes]:
    content = make_content(KILL_SIZE, 1)
    return osdf.put("fetch-kill/kill.bin", content), content


def kill_and_resume(osdf: ModuleType, stored: tuple[str, bytes], out: Path, seed: int) -> None:
    """One kill -9 at a random moment, then a start that must fetch just what is missing."""
    path, content = stored
    chance = random.Random(seed)
    wan = osdf.wan(path=path, delay_s=0.01, bytes_per_s=20e6)
    process = start_fetch(osdf, path, out)
    goal = chance.random() * len(content)
    while process.poll() is None and journalled_bytes(out, "kill.bin") < goal:
        time.sleep(0.002)
    process.kill()
    process.wait()
    is_whole = (out / "kill.bin").exists()  # it had ended before the kill
    every = set(range(-(-len(content) // CHUNK)))
    kept = len(content) if is_whole else journalled_bytes(out, "kill.bin")
    kept_chunks = every if is_whole else journalled_chunks(out, "kill.bin")
    wan.remove()
    osdf.forget_traffic(path)
    if not is_whole:
        part = part_path(out / "kill.bin").read_bytes()
        progress = read_journal(journal_path(out / "kill.bin"))
        assert progress is not None
        for chunk in progress.chunks:  # what the journal vouches for is in the file
            at = slice(chunk * CHUNK, (chunk + 1) * CHUNK)
            assert part[at] == content[at]
    assert start_fetch(osdf, path, out, "--summary", str(out / "summary.json")).wait() == 0
    assert (out / "kill.bin").read_bytes() == content
    assert leftovers(out) == []
    (summary,) = json.loads((out / "summary.json").read_text())
    missing = len(content) - kept
    assert summary["fetched_bytes"] == missing + sum(summary["bytes_twice"].values())
    # The requests and not the bytes that left the servers: when the rest of a slow block is shared
    # near the end (on a busy machine every block is slow), its server goes on sending until the
    # connection is closed: 2,848 bytes in one start, a socket's buffers at the most.
    asked = {chunk for entry in osdf.traffic(path) for chunk in chunks_of(entry["range"])}
    assert asked.isdisjoint(kept_chunks)


@pytest.mark.parametrize("seed", range(10))
def test_a_kill_costs_only_what_was_in_flight(
    seed: int, osdf: ModuleType, kill_object: tuple[str, bytes], tmp_path: Path
) -> None:
    kill_and_resume(osdf, kill_object, tmp_path, seed)


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_fifty_kills(osdf: ModuleType, kill_object: tuple[str, bytes], tmp_path: Path) -> None:
    for seed in range(100, 150):
        out = tmp_path / str(seed)
        kill_and_resume(osdf, kill_object, out, seed)
        (out / "kill.bin").unlink()


def test_a_kill_loses_at_most_a_mib_for_each_connection(
    osdf: ModuleType, kill_object: tuple[str, bytes], tmp_path: Path
) -> None:
    path, content = kill_object
    osdf.forget_traffic(path)
    with osdf.wan(path=path, delay_s=0.0, bytes_per_s=4e6):
        process = start_fetch(osdf, path, tmp_path, *PATIENT)
        while journalled_bytes(tmp_path, "kill.bin") < 8 * MIB and process.poll() is None:
            time.sleep(0.01)
        process.kill()
        process.wait()
    kept = journalled_bytes(tmp_path, "kill.bin")
    assert start_fetch(osdf, path, tmp_path, *PATIENT).wait() == 0
    # Every byte that left a server, in both starts: the chunk that each connection was filling,
    # and the pieces of 256 KiB that were under way to it.
    entries = [e for e in osdf.traffic(path) if e["server"] != "director"]
    refetched = sum(entry["bytes"] for entry in entries) - len(content)
    assert kept >= 8 * MIB
    assert refetched <= CONNECTIONS * (MIB + MIB // 4) + 4


def test_a_second_start_of_a_finished_fetch_asks_nobody(osdf: ModuleType, tmp_path: Path) -> None:
    path = osdf.put("fetch-resume/done.bin", make_content(3 * MIB, 2))
    fetch = Fetcher(osdf, tmp_path)
    assert fetch(path).exit_code == 0
    osdf.forget_traffic(path)
    again = fetch(path)
    assert again.exit_code == 0
    assert again.summary.fetched_bytes == 0
    assert osdf.traffic(path) == []


def test_a_finished_file_that_was_touched_is_not_taken_for_the_object(
    osdf: ModuleType, tmp_path: Path
) -> None:
    path = osdf.put("fetch-resume/touched.bin", make_content(3 * MIB, 3))
    fetch = Fetcher(osdf, tmp_path)
    result = fetch(path)
    with result.path.open("r+b") as file:
        file.write(b"damage")
    again = fetch(path)
    assert again.exit_code == 2
    assert "move it away" in again.message


def test_what_a_passing_failure_leaves_is_used_by_the_next_start(
    osdf: ModuleType, tmp_path: Path
) -> None:
    content = make_content(16 * MIB, 4)
    path = osdf.put("fetch-resume/later.bin", content)
    fetch = Fetcher(osdf, tmp_path)
    with osdf.faults(fails_after(2, path)):
        first = fetch(path, give_up_s=10.0)
    assert first.exit_code == 75
    assert not first.path.exists()
    kept = journalled_bytes(tmp_path, "later.bin")
    assert kept > 0
    second = fetch(path)
    assert second.exit_code == 0
    assert second.path.read_bytes() == content
    assert second.summary.resumed_bytes == kept
    twice = sum(second.summary.bytes_twice.values())  # a busy machine hedges
    assert second.summary.fetched_bytes == len(content) - kept + twice


@pytest.mark.parametrize("new_size", [12 * MIB, 16 * MIB], ids=["other_size", "same_size"])
def test_an_object_that_changed_since_is_fetched_anew_and_that_is_said(
    new_size: int, osdf: ModuleType, tmp_path: Path
) -> None:
    old, new = make_content(16 * MIB, 5), make_content(new_size, 6)
    path = osdf.put(f"fetch-resume/changing{new_size}.bin", old)
    changed = osdf.put(f"fetch-resume/changed{new_size}.bin", new)
    fetch = Fetcher(osdf, tmp_path)
    with osdf.faults(fails_after(3, path)):
        assert fetch(path, give_up_s=10.0).exit_code == 75
    progress = read_journal(journal_path(tmp_path / f"changing{new_size}.bin"))
    assert progress is not None and progress.digests  # asked for when half of it was here
    with osdf.faults(Fault("change", server="[co]*", path=path, to=changed)):
        result = fetch(path)
    assert result.exit_code == 0, result.message
    assert result.path.read_bytes() == new
    assert any("starting over" in note for note in result.summary.notes)


@pytest.mark.parametrize("size", [24 * MIB, 96 * MIB], ids=["24_MiB", "96_MiB"])
def test_an_object_that_changes_under_our_hands_is_never_mixed(
    size: int, osdf: ModuleType, tmp_path: Path
) -> None:
    old, new = make_content(size, 7), make_content(size, 8)
    path = osdf.put(f"fetch-resume/mixed{size}.bin", old)
    changed = osdf.put(f"fetch-resume/mixed-new{size}.bin", new)
    with osdf.faults(Fault("change", server="[co]*", path=path, to=changed, skip=4)):
        result = Fetcher(osdf, tmp_path)(path)
    assert result.exit_code == 0, result.message
    assert result.path.read_bytes() == new


def test_an_etag_that_changes_at_a_source_starts_over(osdf: ModuleType, tmp_path: Path) -> None:
    content = make_content(16 * MIB, 9)
    path = osdf.put("fetch-resume/etag.bin", content)
    first = Fault("headers", server="[co]*", path=path, set_headers={"ETag": '"v1"'})
    fetch = Fetcher(osdf, tmp_path)
    with osdf.faults(first, fails_after(2, path)):
        assert fetch(path, give_up_s=10.0).exit_code == 75
    second = Fault("headers", server="[co]*", path=path, set_headers={"ETag": '"v2"'})
    with osdf.faults(second):
        result = fetch(path)
    assert result.exit_code == 0
    assert result.path.read_bytes() == content
    assert any("ETag" in note and "starting over" in note for note in result.summary.notes)


def test_two_starts_on_one_folder_take_turns(osdf: ModuleType, tmp_path: Path) -> None:
    content = make_content(24 * MIB, 10)
    path = osdf.put("fetch-resume/turns.bin", content)
    osdf.forget_traffic(path)
    with osdf.wan(path=path, delay_s=0.0, bytes_per_s=10e6):
        both = [start_fetch(osdf, path, tmp_path, *PATIENT) for _ in range(2)]
        codes = [process.wait() for process in both]
    assert codes == [0, 0]
    assert (tmp_path / "turns.bin").read_bytes() == content
    sent = sum(e["bytes"] for e in osdf.traffic(path) if e["server"] != "director")
    # The second one found the file; up to 5 % may come twice when a connection falls silent.
    assert sent <= 1.05 * len(content)


def test_memory_stays_small_for_any_size(osdf: ModuleType, tmp_path: Path) -> None:
    sparse = tmp_path / "big.bin"
    with sparse.open("wb") as file:
        file.truncate(512 << 20)
    path = osdf.put("fetch-resume/huge.bin", sparse)
    record = tmp_path / "record"
    url = osdf.BARE_DIRECTOR_HTTP_URL
    command = [
        *(sys.executable, str(ROOT / "scripts" / "fetch_osdf.py"), f"osdf://{path}"),
        *("--federation", url, "--out", str(tmp_path / "out"), "--record", str(record)),
    ]
    assert subprocess.run(command, stderr=subprocess.DEVNULL).returncode == 0
    osdf.remove(path)
    (stage,) = (json.loads(line) for line in (record / "stages.jsonl").read_text().splitlines())
    assert stage["peak_rss_bytes"] < 300e6
    assert (tmp_path / "out" / "huge.bin").stat().st_size == 512 << 20
