"""A stream that begins before torch is imported: what it does, and when it is left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from dataset.errors import DONE, INTERRUPTED, USER_MISTAKE, PassingError, UserError
from dataset.stream.plan import Refusal, StreamPlan
from dataset.stream.spec import read_spec
from tests.conftest import ROOT
from tests.dataset.small_server import Handler, serving
from tests.dataset.tars import TRAIN, VAL
from tests.train.data.arriving import write_indexed
from tests.train.tar_server import serving_folder
from train.config import TrainConfig
from train.data.sample_order import SampleOrder
from train.ranks.comm import Comm
from train.ranks.launch import Launch
from train.ranks.nodes import Nodes
from train.stream import early as early_module
from train.stream.early import begin_early
from train.stream.run_stream import Stream
from train.stream.task import Task

ALONE = Launch("single", "a test")
# In a process without torch: begins, waits until bytes have come, and says what was imported.
BEGIN = """
import sys, time
from dataset.stream.arrivals import ArrivalMap
from train.config import parse_config
from train.ranks.launch import detect_launch
from train.stream.early import begin_early
early = begin_early(parse_config(sys.argv[1:]), detect_launch({}))
arrivals = ArrivalMap(early.node.map_path("train"))
while not arrivals.here.any():
    time.sleep(0.01)
print("torch" in sys.modules)
early.close()
"""

# `python -m train`, which does not wait long for its early plan.
QUICKLY = """
import sys
from dataset.errors import run_command
from train.stream import early
early.PLAN_S = 0.5
from train.__main__ import main
sys.exit(run_command(main))
"""


@pytest.fixture(scope="module")
def served(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The two tars and their indexes, as an origin would have them."""
    return write_indexed(images, tmp_path_factory.mktemp("served") / "tars")


@pytest.fixture(scope="module")
def url(served: Path) -> Iterator[str]:
    with serving_folder(served) as (url, _):
        yield url


def configure(url: str, folder: Path, **fields: object) -> TrainConfig:
    values: dict[str, object] = {"batch_size": 8, "data_dir": folder / "data", "epochs": 1}
    return TrainConfig(data=f"{url}/{TRAIN}", **(values | fields))  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def own_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def test_bytes_come_before_torch_is_imported(url: str, tmp_path: Path) -> None:
    flags = [f"{url}/{TRAIN}", "-b", "8", "--data-dir", str(tmp_path / "data")]
    done = subprocess.run(
        [sys.executable, "-c", BEGIN, *flags],
        cwd=ROOT, env=os.environ | {"TMPDIR": str(tmp_path)}, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (DONE, "False\n", "")
    assert list(tmp_path.glob("trainyard-stream-*")) == []


def test_the_fetcher_of_a_new_run_has_its_task_already(url: str, tmp_path: Path) -> None:
    cfg = configure(url, tmp_path)
    with closing(begin_early(cfg, ALONE)) as early:
        assert isinstance(early.plan, StreamPlan) and early.node is not None
        task = early._task
        assert task is not None and task.order.name == "streamed"
        assert early.follows(Task(cfg, task.order, task.num_samples))
        spec = read_spec(early.node.folder / "spec.json")
        assert spec.train.url == cfg.data and not spec.val_first
        assert (early.needs == 0).any()


def test_a_run_that_goes_on_is_another_task(url: str, tmp_path: Path) -> None:
    cfg = configure(url, tmp_path)
    with closing(begin_early(cfg, ALONE)) as early:
        task = early._task
        assert task is not None
        order, num = task.order, task.num_samples
        assert not early.follows(Task(cfg, order, num, step=1))
        assert not early.follows(Task(cfg, order, num, val_first=True))
        assert not early.follows(Task(cfg, SampleOrder(), num))


@pytest.mark.parametrize("has_resume", [False, True])
def test_where_there_may_be_a_checkpoint_only_the_plan_is_made(
    url: str, tmp_path: Path, has_resume: bool
) -> None:
    (tmp_path / "run/ckpt").mkdir(parents=True)
    named = {"resume": tmp_path / "a"} if has_resume else {"output": tmp_path / "run"}
    with closing(begin_early(configure(url, tmp_path, **named), ALONE)) as early:
        assert isinstance(early.plan, StreamPlan) and early.node is None


@pytest.mark.parametrize(
    "fields",
    [
        {"stream": "never"},
        {"evaluate": True},
        {"dummy": True},
        {"val_share": 0.1},
        {"show_recipe": True},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_what_is_not_streamed_is_not_asked_for(
    url: str, tmp_path: Path, fields: dict[str, object]
) -> None:
    early = begin_early(configure(url, tmp_path, **fields), ALONE)
    assert early.plan is None and early.node is None
    assert not (tmp_path / "data").exists()


def test_a_silent_server_does_not_hide_a_mistake(tmp_path: Path) -> None:
    """The name of the network is checked by torchvision, and so after the early plan."""

    def stay_silent(handler: Handler) -> bool:
        handler.close_connection = True
        return not handler.connection.recv(1)  # until the other side gives up

    with serving(b"", stay_silent) as (url, seen):
        place = f"{url.rpartition('/')[0]}/{TRAIN}"
        flags = [place, "-a", "resnet5O", "--data-dir", str(tmp_path / "data")]
        done = subprocess.run(
            [sys.executable, "-c", QUICKLY, *flags],
            cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=240,
        )  # fmt: skip
    assert done.returncode == USER_MISTAKE and "resnet5O" in done.stderr
    assert seen and "Traceback" not in done.stderr


def test_a_server_that_is_silent_at_first_is_asked_again(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def give_up(*_: object, give_up_s: float, **__: object) -> None:
        assert give_up_s == early_module.PLAN_S
        raise PassingError("nobody answers")

    monkeypatch.setattr(early_module, "ask_for_plan", give_up)
    with closing(begin_early(configure(url, tmp_path), ALONE)) as early:
        assert early.plan is None and early.node is None
        cfg = configure(url, tmp_path)
        stream = Stream(cfg, ALONE, Comm(ALONE), early)
        assert stream.plan(Nodes()) and stream.is_on
        stream.close()


def test_several_ranks_plan_when_they_have_met(url: str, tmp_path: Path) -> None:
    two = Launch("torchrun", "a test", world_size=2)
    assert begin_early(configure(url, tmp_path), two).plan is None


def test_a_refusal_is_kept_for_the_run_to_tell(served: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / TRAIN).write_bytes((served / TRAIN).read_bytes())
    with serving_folder(bare) as (url, _):
        early = begin_early(configure(url, tmp_path), ALONE)
    assert isinstance(early.plan, Refusal) and early.node is None


def test_a_val_tar_without_an_index_comes_first(served: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in (TRAIN, f"{TRAIN}.index", VAL):
        (bare / name).write_bytes((served / name).read_bytes())
    with serving_folder(bare) as (url, _):
        data = f"{url}/{TRAIN},{url}/{VAL}"
        cfg = TrainConfig(data=data, batch_size=8, data_dir=tmp_path / "data")
        with closing(begin_early(cfg, ALONE)) as early:
            assert early.node is not None and early._task is None


def test_what_fails_leaves_no_folder(url: str, tmp_path: Path) -> None:
    """8 images cannot be cut into 3 lanes."""
    with pytest.raises(UserError, match="3 lanes"):
        begin_early(configure(url, tmp_path, order="streamed:3"), ALONE)
    assert list(tmp_path.glob("trainyard-stream-*")) == []


def test_a_ctrl_c_while_torch_is_imported_leaves_no_folder(url: str, tmp_path: Path) -> None:
    """Nor a process: the fetcher ends with the command."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("print('importing', flush=True)\ninput()\n")
    (tmp_path / "tmp").mkdir()
    flags = [f"{url}/{TRAIN}", "-b", "8", "--data-dir", str(tmp_path / "data")]
    job = subprocess.Popen(
        [sys.executable, "-m", "train", *flags],
        cwd=ROOT, env=os.environ | {"TMPDIR": str(tmp_path / "tmp"), "PYTHONPATH": str(tmp_path)},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    with job:
        assert job.stdout is not None
        while job.stdout.readline() != "importing\n":
            assert job.poll() is None
        assert list((tmp_path / "tmp").glob("trainyard-stream-*"))
        job.send_signal(signal.SIGINT)
        assert job.communicate()[1] == "error: interrupted; run the same command again\n"
    assert job.returncode == INTERRUPTED
    assert list((tmp_path / "tmp").glob("trainyard-stream-*")) == []


def test_a_batch_of_more_than_all_starts_nothing(url: str, tmp_path: Path) -> None:
    with closing(begin_early(configure(url, tmp_path, batch_size=4096), ALONE)) as early:
        assert early._task is None
