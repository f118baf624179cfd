"""scripts/make_fake_imagenet.py as a person runs it."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.scripts.commands import run_script


def run(cwd: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return run_script("make_fake_imagenet", *flags, cwd=cwd)


def test_it_runs_from_any_folder_and_reports_the_mean_size(tmp_path: Path) -> None:
    flags = ("--out", "here", "--classes", "2", "--train-per-class", "5", "--size", "64x64")
    made = run(tmp_path, *flags)
    assert made.returncode == 0, made.stderr
    assert "30 images, mean " in made.stderr
    assert (tmp_path / "here" / "ILSVRC2012_img_train.tar").exists()
    again = run(tmp_path, *flags)
    assert again.returncode == 0
    assert "nothing to do" in again.stderr


def test_a_mistake_is_one_line_and_exit_2(tmp_path: Path) -> None:
    zero = run(tmp_path, "--out", "here", "--classes", "0")
    assert zero.returncode == 2
    assert zero.stderr.splitlines() == ["error: --classes 0 is out of range; give 1 to 100000"]
    size = run(tmp_path, "--out", "here", "--size", "big")
    assert size.returncode == 2
    assert "big is not WIDTHxHEIGHT" in size.stderr.splitlines()[-1]
    (tmp_path / "file").write_text("")
    not_a_folder = run(tmp_path, "--out", "file/here")
    assert not_a_folder.returncode == 2
    assert len(not_a_folder.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_like_makes_class_folders_and_refuses_the_flags_of_archives(tmp_path: Path) -> None:
    flags = ("--out", "here", "--like", "crisis", "--images", "6", "--size", "32x32")
    made = run(tmp_path, *flags)
    assert made.returncode == 0, made.stderr
    assert len(list((tmp_path / "here" / "train" / "damaged").iterdir())) == 2
    for strange, words in (
        (("--like", "galaxy", "--classes", "3"), "--classes is for archives; leave it out with"),
        (("--images", "3"), "--images needs --like"),
    ):
        refused = run(tmp_path, "--out", "there", *strange)
        assert refused.returncode == 2
        assert refused.stderr.startswith(f"error: {words}")
        assert len(refused.stderr.splitlines()) == 1
