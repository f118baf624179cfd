"""Folders: full disks, read-only ones, collections of many files, the data set of a training."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from dataset.errors import UserError
from dataset.fetch.urls import fetch_dataset
from tests.cluster.osdf.fetching import FAST, MIB, Fetcher, leftovers, make_content, write_index
from tests.cluster.osdf.rules import Fault
from tests.mounts import mounted

pytestmark = pytest.mark.osdf
ROOT = Path(__file__).resolve().parents[3]
NUM_SMALL = 5000


def test_too_little_space_is_said_before_the_transfer(osdf: ModuleType, tmp_path: Path) -> None:
    path = osdf.put("fetch-folder/space.bin", make_content(40 * MIB, 30))
    osdf.forget_traffic(path)
    with mounted(tmp_path / "small", "size=24m") as out:
        result = Fetcher(osdf, out)(path)
    assert result.exit_code == 2
    assert "free some space" in result.message
    assert osdf.sent_bytes(path, "cache*") <= 4  # the size was asked, and once more, but no more


def test_a_disk_that_fills_up_is_exit_2_and_the_next_start_goes_on(
    osdf: ModuleType, tmp_path: Path
) -> None:
    content = make_content(24 * MIB, 31)
    path = osdf.put("fetch-folder/full.bin", content)
    with mounted(tmp_path / "disk", "size=48m") as out:
        osdf_wan = osdf.wan(path=path, delay_s=0.0, bytes_per_s=4e6)
        filler = (
            "import sys, time, pathlib\n"
            "folder = pathlib.Path(sys.argv[1])\n"
            "while not list(folder.glob('*.journal')): time.sleep(0.01)\n"
            "with open(folder / 'other', 'wb', buffering=0) as file:\n"
            "    try:\n"
            "        while True: file.write(bytes(1 << 20))\n"
            "    except OSError: pass\n"
        )
        other = subprocess.Popen([sys.executable, "-c", filler, str(out)])
        first = Fetcher(osdf, out)(path)
        assert other.wait() == 0
        osdf_wan.remove()
        assert first.exit_code == 2, first.message
        assert "No space left" in first.message
        assert not first.path.exists()
        (out / "other").unlink()
        second = Fetcher(osdf, out)(path)
        assert second.exit_code == 0, second.message
        assert second.path.read_bytes() == content


def test_a_read_only_folder_is_exit_2(osdf: ModuleType, tmp_path: Path) -> None:
    path = osdf.put("fetch-folder/readonly.bin", make_content(MIB, 32))
    with mounted(tmp_path / "ro", "ro") as out:
        result = Fetcher(osdf, out)(path)
    assert result.exit_code == 2
    assert "Read-only" in result.message


@pytest.fixture(scope="module")
def many(osdf: ModuleType) -> str:
    """A collection of 5,000 files in 50 folders, as ImageNet has a thousand."""
    for number in range(NUM_SMALL):
        name = f"fetch-many/n{number % 50:08d}/img_{number}.JPEG"
        osdf.put(name, f"{number} ".encode() * (number % 300))
    return "/public/fetch-many"


def check_many(root: Path) -> None:
    for number in range(NUM_SMALL):
        file = root / f"n{number % 50:08d}" / f"img_{number}.JPEG"
        assert file.read_bytes() == f"{number} ".encode() * (number % 300)


def test_five_thousand_small_files(osdf: ModuleType, many: str, tmp_path: Path) -> None:
    federation = osdf.BARE_DIRECTOR_HTTP_URL
    result = Fetcher(osdf, tmp_path, federation=federation)(many + "/", stall_s=10.0)
    assert result.exit_code == 0, result.message
    check_many(tmp_path / "fetch-many")
    assert leftovers(tmp_path) == []
    # Said only when all 5,000 digests came in time, which a busy origin may not manage.
    assert result.summaries[0].verified in (["digest of the origin"], [])
    (tmp_path / "fetch-many" / "n00000007" / "img_7.JPEG").unlink()
    again = Fetcher(osdf, tmp_path, federation=federation)(many)
    assert again.exit_code == 0
    assert again.summaries[0].fetched_bytes == len("7 " * 7)


def test_a_small_file_that_comes_wrong_or_not_at_all_goes_the_long_way(
    osdf: ModuleType, tmp_path: Path
) -> None:
    contents = {f"f{n}.bin": make_content(50_000, 40 + n) for n in range(30)}
    for name, content in contents.items():
        osdf.put(f"fetch-odd/{name}", content)
    faults = [
        Fault("flip", server="cache1", path="/public/fetch-odd/*"),
        Fault("stall", server="cache2", path="/public/fetch-odd/f1.bin"),
        Fault("reset", server="cache*", path="/public/fetch-odd/f2*", share=0.5),
    ]
    with osdf.faults(*faults, seed=3):
        result = Fetcher(osdf, tmp_path)("/public/fetch-odd/", give_up_s=60.0)
    assert result.exit_code == 0, result.message
    for name, content in contents.items():
        assert (tmp_path / "fetch-odd" / name).read_bytes() == content


def test_a_data_set_is_fetched_by_its_folder_or_by_its_archive(
    osdf: ModuleType, tmp_path: Path
) -> None:
    files = {
        "ILSVRC2012_img_train.tar": make_content(5 * MIB, 50),
        "ILSVRC2012_img_val.tar": make_content(MIB, 51),
        "notes.txt": b"not needed",
    }
    for name, content in files.items():
        osdf.put(f"fetch-data/{name}", content)
    federation = osdf.DIRECTOR_HTTP_URL
    url = "osdf:///public/fetch-data"
    found = fetch_dataset(url, tmp_path / "a", federation=federation, options=FAST)
    assert found == tmp_path / "a"
    assert (found / "ILSVRC2012_img_train.tar").read_bytes() == files["ILSVRC2012_img_train.tar"]
    assert (found / "ILSVRC2012_img_val.tar").exists()
    assert not (found / "notes.txt").exists()
    one = f"{url}/ILSVRC2012_img_train.tar"
    found = fetch_dataset(one, tmp_path / "b", federation=federation, options=FAST)
    assert found == tmp_path / "b" / "ILSVRC2012_img_train.tar"
    osdf.put("fetch-nothing/a.txt", b"x")
    with pytest.raises(UserError, match="neither"):
        fetch_dataset(
            "osdf:///public/fetch-nothing", tmp_path / "c", federation=federation, options=FAST
        )


def test_an_index_beside_the_tar_is_fetched_and_its_checksums_used(
    osdf: ModuleType, tmp_path: Path
) -> None:
    content = make_content(10 * MIB, 52)
    path = osdf.put("fetch-index/a.tar", content)
    osdf.put("fetch-index/a.tar.index", write_index(tmp_path / "index", content))
    with osdf.faults(Fault("flip", server="cache1", path=path)):
        result = Fetcher(osdf, tmp_path / "out")(path)
    assert result.exit_code == 0, result.message
    assert result.path.read_bytes() == content
    assert result.summary.verified == ["block_crc32c (a.tar.index)"]


def test_the_command_reports_what_it_did(osdf: ModuleType, tmp_path: Path) -> None:
    content = make_content(9 * MIB, 53)
    path = osdf.put("fetch-folder/command.bin", content)
    md5 = hashlib.md5(content).hexdigest()
    command = [
        *(sys.executable, str(ROOT / "scripts" / "fetch_osdf.py"), f"osdf://{path}"),
        *("--federation", osdf.DIRECTOR_HTTP_URL, "--out", str(tmp_path / "out"), "--md5", md5),
        *("--summary", str(tmp_path / "summary.json")),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (summary,) = json.loads((tmp_path / "summary.json").read_text())
    assert summary["verified"] == ["md5 (given)"]
    assert summary["fetched_bytes"] == len(content)
    assert sum(source["bytes"] for source in summary["sources"]) == len(content)
    assert set(summary["bytes_twice"]) == {"wrong", "hedged", "in_flight", "skipped", "compared"}
    (stage,) = [
        json.loads(line) for line in (tmp_path / "out" / "stages.jsonl").read_text().splitlines()
    ]
    assert (stage["stage"], stage["status"], stage["bytes_fetched"]) == ("fetch", "done", 9 * MIB)
    wrong = subprocess.run(
        [*command[:-3], "0" * 32, "--out", str(tmp_path / "b")], text=True, capture_output=True
    )
    assert wrong.returncode == 3
    assert "fails verification" in wrong.stderr
    assert not (tmp_path / "b" / "command.bin").exists()


def test_a_dry_run_shows_the_sources_and_fetches_nothing(osdf: ModuleType, tmp_path: Path) -> None:
    path = osdf.put("fetch-folder/dry.bin", make_content(MIB, 54))
    command = [
        *(sys.executable, str(ROOT / "scripts" / "fetch_osdf.py"), f"osdf://{path}", "--dry-run"),
        *("--federation", osdf.DIRECTOR_HTTP_URL, "--out", str(tmp_path / "out")),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for url in osdf.CACHE_HTTP_URLS:
        assert f"source {url}" in done.stdout
    assert f"{MIB} bytes" in done.stdout
    assert "crc32c" in done.stdout
    assert not (tmp_path / "out").exists()


def test_the_studys_methods_can_be_chosen(osdf: ModuleType, tmp_path: Path) -> None:
    content = make_content(2 * MIB, 55)
    path = osdf.put("fetch-folder/methods.bin", content)
    osdf.forget_traffic(path)
    script = [sys.executable, str(ROOT / "scripts" / "fetch_osdf.py"), f"osdf://{path}"]
    flags = ["--federation", osdf.DIRECTOR_HTTP_URL, "--out"]
    https = subprocess.run([*script, *flags, str(tmp_path / "https"), "--method", "https"])
    assert https.returncode == 0
    assert (tmp_path / "https" / "methods.bin").read_bytes() == content
    assert osdf.traffic(path, "cache*") == []
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    (scratch / "methods.bin").write_bytes(content)
    native = subprocess.run(
        [*script, *flags, str(tmp_path / "native"), "--method", "native"],
        env={"_CONDOR_SCRATCH_DIR": str(scratch)},
    )
    assert native.returncode == 0
    assert (tmp_path / "native" / "methods.bin").read_bytes() == content
