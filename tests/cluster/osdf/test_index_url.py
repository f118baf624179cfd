"""The index of an object of the real federation, whose tar is never kept."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from dataset.archive.index import build_index
from tests.cluster.osdf.rules import Fault
from tests.dataset.tars import nested_bytes

pytestmark = pytest.mark.osdf
ROOT = Path(__file__).resolve().parents[3]
NAME = "classes_train.tar"


@pytest.fixture(scope="module")
def tar() -> bytes:
    """About 40 MiB of class tars."""
    draw = np.random.default_rng(60)
    sizes = draw.integers(50_000, 800_000, (10, 10)).tolist()
    return nested_bytes(
        {
            f"n{c:08d}": {f"n{c:08d}_{i}.JPEG": draw.bytes(size) for i, size in enumerate(row)}
            for c, row in enumerate(sizes)
        }
    )


def index(osdf: ModuleType, path: str, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "index_tar.py"), "--checksums"]
    command += ["--federation", osdf.DIRECTOR_HTTP_URL, "--index-dir", str(out), f"osdf://{path}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def index_file(folder: Path, content: bytes) -> bytes:
    folder.mkdir()
    (folder / NAME).write_bytes(content)
    return build_index(folder / NAME, checksums=True)[1].read_bytes()


def test_the_index_is_that_of_the_file_and_the_origin_vouches_for_it(
    osdf: ModuleType, tmp_path: Path, tar: bytes
) -> None:
    path = osdf.put(f"index-url/{NAME}", tar)
    done = index(osdf, path, tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "verified by " in done.stderr
    expected = index_file(tmp_path / "in", tar)
    assert (tmp_path / "out" / f"{NAME}.index").read_bytes() == expected
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert names == {f"{NAME}.index", "stages.jsonl"}


def test_a_cache_that_falls_silent_does_not_end_the_pass(
    osdf: ModuleType, tmp_path: Path, tar: bytes
) -> None:
    path = osdf.put(f"index-url-silent/{NAME}", tar)
    with osdf.faults(Fault("stall", server="cache1", path=path, after_share=0.3)):
        done = index(osdf, path, tmp_path / "out")
    assert done.returncode == 0, done.stderr
    expected = index_file(tmp_path / "in", tar)
    assert (tmp_path / "out" / f"{NAME}.index").read_bytes() == expected


def test_a_flipped_byte_gives_no_index(osdf: ModuleType, tmp_path: Path, tar: bytes) -> None:
    path = osdf.put(f"index-url-flip/{NAME}", tar)
    with osdf.faults(Fault("flip", server="cache*", path=path)):
        done = index(osdf, path, tmp_path / "out")
    assert done.returncode == 3, done.stderr
    assert not (tmp_path / "out" / f"{NAME}.index").exists()
