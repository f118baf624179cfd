"""Mistakes in paths are found by code that needs no torch, whose import takes seconds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dataset.errors import UserError
from train.config import parse_config
from train.paths import check_paths

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["data/train"], "data/train holds neither train/ nor ILSVRC2012_img_train.tar"),
        (["data/train"], "if its folders are the classes, move them into data/train/train"),
        (["foo://host/x"], "foo://host/x"),
        (["osdf:///a.tar,foo://host/val"], "foo://host/val"),
        (["osdf:///a,osdf:///b,osdf:///c"], "a, b, c: give one URL"),
        (["osdf:///a", "--index", "none"], "--index none: no such file"),
        (["data", "--token", "none"], "--token none: no such file"),
        (["data", "--index-dir", "a-file"], "--index-dir a-file is a file"),
        (["data", "--data-dir", "a-file"], "--data-dir a-file is a file"),
        (["data", "--output", "a-link"], "a-link is a broken link; fix it"),
        (["data", "--resume", "last"], "--resume last: no unfinished run of this command"),
        (["data", "-e"], "nothing to evaluate: name --weights FILE"),
        (["data", "-e", "--output", "data"], "nothing to evaluate: no checkpoint in data"),
    ],
)
def test_a_path_with_which_no_run_can_start_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argv: list[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data" / "train" / "n1").mkdir(parents=True)
    (tmp_path / "a-file").touch()
    (tmp_path / "a-link").symlink_to("nowhere")
    check_paths(parse_config(["data", "--output", "new"]))
    with pytest.raises(UserError, match=words):
        check_paths(parse_config(argv))


def test_looking_at_the_paths_imports_no_torch() -> None:
    code = "import sys, train.config, train.paths; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
