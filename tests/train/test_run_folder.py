"""Which run --resume last means: the newest of this command that can go on."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from dataset.durable import write_json
from train.config import TrainConfig, parse_config
from train.records.record import RUN_FILE
from train.run_folder import RUNS, find_last, flags_of


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def make_run(
    name: str, start: object, cfg: TrainConfig, status: str = "checkpointed", *, saved: bool = True
) -> Path:
    folder = RUNS / "cpu" / name
    (folder / "ckpt").mkdir(parents=True)
    if saved:
        (folder / "ckpt" / "step-000000001.pt").touch()
    record = {"schema": 1, "status": status, "flags": flags_of(cfg), "attempts": [{"start": start}]}
    write_json(folder / RUN_FILE, record)
    return folder


def test_the_newest_unfinished_run_of_the_command_is_found_among_others() -> None:
    cfg = parse_config(["data"])
    assert find_last(cfg) is None
    make_run("old", 1.0, cfg)
    newest = make_run("new", 2.0, cfg)
    make_run("done", 3.0, cfg, "done")
    make_run("nothing-saved", 4.0, cfg, saved=False)
    make_run("other", 5.0, parse_config(["data", "--seed", "1"]))
    make_run("damaged", None, cfg)
    (RUNS / "cpu" / "loop").symlink_to("loop")
    assert find_last(cfg) == newest


def test_a_record_from_before_there_was_an_order_is_found() -> None:
    cfg = parse_config(["data"])
    folder = make_run("a", 1.0, cfg)
    record = json.loads((folder / RUN_FILE).read_text())
    del record["flags"]["order"]
    write_json(folder / RUN_FILE, record)
    assert find_last(cfg) == folder
    assert find_last(parse_config(["data", "--order", "streamed"])) is None


@pytest.mark.parametrize("argv", [["d\udcff"], ["data", "--weights", "w\udcff.pt"]])
def test_a_run_of_a_path_that_is_not_utf8_is_found(argv: list[str]) -> None:
    cfg = parse_config(argv)
    folder = make_run("a", 1.0, cfg)
    assert os.fsencode(argv[-1])  # as the shell gives such a name
    assert find_last(cfg) == folder
    assert find_last(parse_config([*argv[:-1], argv[-1].replace("\udcff", "\udcfe")])) is None


def test_a_path_is_recorded_as_given_and_found_however_it_is_spelled(tmp_path: Path) -> None:
    assert flags_of(parse_config(["data"]))["data"] == "data"
    folder = make_run("a", 1.0, parse_config(["data"]))
    assert find_last(parse_config([str(tmp_path / "data")])) == folder
    assert find_last(parse_config([str(tmp_path / "other")])) is None
