"""The study's folder: the DAG, its scripts, and what is refused; the pool's tests run it."""

from __future__ import annotations

import os
import re
import subprocess
from functools import partial
from pathlib import Path

import pytest

from dataset.archive.index import find_or_build_index
from dataset.fake.make import make_fake_imagenet
from scripts.condor_study import find_settings
from tests.dataset.tars import drop_unit_sums
from tests.scripts.commands import run_script

ROOT = Path(__file__).resolve().parents[2]
URL = "osdf:///nrp/osdf/ILSVRC2012/ILSVRC2012_img_train.tar"


run = partial(run_script, "condor_study")


def expect_mistake(result: subprocess.CompletedProcess[str], *words: str) -> None:
    assert result.returncode == 2, result.stderr
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    for word in words:
        assert word in result.stderr


def test_one_node_a_job_between_check_and_report(tmp_path: Path) -> None:
    done = run(URL, "EPOCHS=3", "--jobs", "12", "--out", "study", "DATA_GB=138", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "cd study && condor_submit_dag study.dag" in done.stderr
    dag = (tmp_path / "study/study.dag").read_text()
    nodes = re.findall(r"^JOB (job\d+) .*/condor/train\.sub$", dag, re.MULTILINE)
    assert nodes == [f"job{i:02d}" for i in range(12)]
    assert re.findall(r'SEED="(\d+)"', dag) == [str(i) for i in range(12)]
    assert dag.count('EPOCHS="3" DATA_GB="138"') == 12
    assert dag.count(f'DATA="{URL}"') == 12
    assert re.findall(r"^RETRY job\d+ 2 UNLESS-EXIT 2$", dag, re.MULTILINE).__len__() == 12
    assert f"PARENT check CHILD {' '.join(nodes)}" in dag
    assert "FINAL report noop.sub NOOP" in dag
    for name in ("check.sh", "report.sh"):
        assert os.access(tmp_path / "study" / name, os.X_OK)
        subprocess.run(["bash", "-n", tmp_path / "study" / name], check=True)


@pytest.mark.parametrize(
    ("status", "failed", "code"), [("0", "0", 0), ("2", "1", 1), ("4", "0", 1)]
)
def test_the_report_node_ends_as_the_jobs_did(
    tmp_path: Path, status: str, failed: str, code: int
) -> None:
    """Its status is the DAG's: else no rescue DAG would be written."""
    run("dummy", "--out", "study", cwd=tmp_path)
    done = subprocess.run(["./report.sh", status, failed], cwd=tmp_path / "study")
    assert done.returncode == code


def test_a_study_is_never_overwritten(tmp_path: Path) -> None:
    assert run("dummy", "--out", tmp_path / "study").returncode == 0
    expect_mistake(
        run("dummy", "--out", tmp_path / "study"), "exists", "submit it again to continue"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["epochs=3"], "is not a NAME=VALUE"),
        (["SEED=3"], "SEED is set by the study itself"),
        (['TRAIN=--x "y"'], "quotes or backslashes"),
        (["--jobs", "0"], "--jobs N (at least 1)"),
        (["--retries", "-1"], "--retries -1: must be 0 or more"),
        (
            ["EPOCH=50"],
            "EPOCH is no setting of condor/train.sub; did you mean EPOCHS? docs/grid.md lists them",
        ),
        (["CODE=x"], "CODE is no setting of condor/train.sub; "),
        (["INDEX=a.index"], "INDEX=a.index: no such file"),
        (["QQQ=x"], "QQQ is no setting of condor/train.sub; docs/grid.md lists them"),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, words: list[str], message: str) -> None:
    expect_mistake(run("dummy", "--out", tmp_path / "study", *words), message)
    assert not (tmp_path / "study").exists()


def test_a_file_that_travels_is_named_by_its_whole_path(tmp_path: Path) -> None:
    """The DAG is submitted in the study's folder, and the check runs there."""
    (tmp_path / "a.index").touch()
    done = run("dummy", "--out", "study", "INDEX=a.index", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for name in ("study.dag", "check.sh"):
        assert str(tmp_path / "a.index") in (tmp_path / "study" / name).read_text()


def test_every_setting_of_the_submit_file_is_known() -> None:
    names = find_settings((ROOT / "condor/train.sub").read_text())
    assert {"EPOCHS", "DATA_GB", "PLUGIN", "PLUGIN_MINUTES", "PROJECT", "OAUTH", "IMAGE"} <= names
    assert {"MAX_RETRIES", "LIMIT_HOURS", "AVOID_SITES", "TRAIN", "N", "DATA", "LOG"} <= names
    assert not names & {"CODE", "DISK_KIB", "LIMIT_S", "NAME"}  # its own, and a word of its text


def test_dummy_data_needs_no_check() -> None:
    assert run("dummy", "--check").returncode == 0


def test_the_check_sees_data_that_is_too_large(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(b"x" * 3000)
    assert run(f"file://{tmp_path}/a.tar", "--check").returncode == 0
    done = run(f"file://{tmp_path}/a.tar", "--check", "DATA_GB=0.000001")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        "error: the data has 2.79e-06 GB, but DATA_GB=1e-06: jobs would run out of disk; "
        "give a larger DATA_GB"
    )


def test_the_check_sees_the_index_of_another_tar(tmp_path: Path) -> None:
    make_fake_imagenet(tmp_path, classes=2, train_per_class=2, val_per_class=1, size=(32, 32))
    tar = tmp_path / "ILSVRC2012_img_train.tar"
    find_or_build_index(tar, checksums=True)
    good = run(f"file://{tar}", "--check")
    assert (good.returncode, "index with block checksums" in good.stderr) == (0, True)
    drop_unit_sums(tmp_path / f"{tar.name}.index")
    limited = run(f"file://{tar}", "--check", "CACHE_GB=1")
    assert "index without checksums of units, which CACHE_GB needs" in limited.stderr
    with open(tar, "ab") as file:
        file.write(bytes(10240))
    stale = run(f"file://{tar}", "--check")
    assert stale.returncode == 2
    assert re.search(
        r"(?m)^error: ILSVRC2012_img_train.tar.index is for \d+ bytes, the object has \d+; make",
        stale.stderr,
    )
