"""Two ranks open one data set: one a node lists it or makes its index, the others receive it."""

from __future__ import annotations

import os
import shutil
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from dataset.archive.index import build_index
from dataset.errors import DONE, USER_MISTAKE
from dataset.fetch.ledger import lock_folder
from dataset.own_names import part_path
from tests.dataset.tars import TRAIN, VAL, drop_unit_sums
from tests.train import hooks
from tests.train import started_ranks as ranks
from tests.train.data.arriving import write_padded
from tests.train.tar_server import serving_folder

pytestmark = pytest.mark.training


def refuse_to_open(module: str, name: str) -> None:
    """Rank 1 fails where it would read from the shared disk itself."""
    if os.environ["RANK"] == "1":
        hooks.set_value(module, name, _refuse)


def _refuse(*_: object, **__: object) -> None:
    raise AssertionError("rank 1 reads from the shared disk")


def argv_for(data: Path, out: Path) -> list[str]:
    return [str(data), "--max-steps", "1", "--output", str(out)]


ONE_OPENS = partial(refuse_to_open, "train.open_data", "open_dataset")


def test_one_rank_of_a_node_makes_the_index_and_the_other_receives_it(
    tars: Path, tmp_path: Path
) -> None:
    data = tmp_path / "tars"
    shutil.copytree(tars, data, ignore=shutil.ignore_patterns("*.index"))
    argv = argv_for(data, tmp_path / "out1")
    job = ranks.run(argv, tmp_path / "log1", 2, hook=ONE_OPENS).expect(DONE)
    assert job.log.count("making it, once") == 2  # of training and validation, by one rank


def test_one_rank_of_a_node_lists_a_folder_and_reads_the_checkpoint(
    images: Path, tmp_path: Path
) -> None:
    argv = argv_for(images, tmp_path / "out")
    ranks.run(argv, tmp_path / "log", 2, hook=ONE_OPENS).expect(DONE)
    hook = partial(refuse_to_open, "train.checkpoints.checkpoint", "load_checkpoint")
    more = [*argv, "--max-steps", "2"]
    job = ranks.run(more, tmp_path / "log1", 2, hook=hook).expect(DONE)
    assert "continuing from step 1 of" in job.log
    named = [*argv_for(images, tmp_path / "other"), "--max-steps", "3"]
    named += ["--resume", str(tmp_path / "out" / "ckpt" / "step-000000002.pt")]
    job = ranks.run(named, tmp_path / "log2", 2, hook=hook).expect(DONE)
    assert "continuing from step 2 of" in job.log


@pytest.mark.parametrize("what", ["another memory", "no room"])
def test_a_rank_that_finds_no_list_of_its_node_opens_the_data_itself(
    images: Path, tmp_path: Path, what: str
) -> None:
    """Containers on one node without a common /dev/shm, and one that is full."""
    name = "_take_up" if what == "another memory" else "_put_down"
    hook = partial(hooks.set_value, "train.open_data", name, _nothing)
    ranks.run(argv_for(images, tmp_path / "out"), tmp_path / "log", 2, hook=hook).expect(DONE)


def _nothing(_: object) -> None:
    return None


def be_on_own_node(folder: Path) -> None:
    """A hook: each rank is on a node of its own, with its own current folder."""
    rank = os.environ["RANK"]
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": rank}
    os.chdir(folder / f"node{rank}")


def test_nodes_that_stream_must_have_the_same_validation_images(
    images: Path, tmp_path: Path
) -> None:
    """Else some ranks would validate, and wait for the others for ever."""
    served = write_padded(images, tmp_path / "served")
    build_index(served / TRAIN, checksums=True)
    for node in range(2):
        (tmp_path / f"node{node}/data").mkdir(parents=True)
    shutil.copy(served / VAL, tmp_path / "node1/data")
    hook = partial(be_on_own_node, tmp_path)
    with serving_folder(served) as (url, _):
        argv = [f"{url}/{TRAIN}", "--stream", "always", "--data-dir", "data", "--max-steps", "1"]
        argv += ["--output", str(tmp_path / "out")]
        job = ranks.run(argv, tmp_path / "log", 2, hook=hook).expect(USER_MISTAKE)
    assert "the ranks see different data" in job.log and "validation images or none" in job.log


@pytest.fixture(scope="module")
def trained(images: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two tars, of which validation lacks a class, and a run from them with its evaluation."""
    folder = tmp_path_factory.mktemp("trained")
    chosen = folder / "images"
    shutil.copytree(images, chosen)
    shutil.rmtree(sorted((chosen / "val").iterdir())[0])  # the label of all others is another
    served = write_padded(chosen, folder / "served")
    argv = [str(served), "--max-steps", "1", "--output", str(folder / "run")]
    ranks.run(argv, folder / "log").expect(DONE)
    evaluate(str(served), folder, folder)
    return served, folder


def test_a_malformed_url_is_said_once(tmp_path: Path) -> None:
    argv = ["http://a/x.tar,http://a/y.tar,http://a/z.tar", "--output", str(tmp_path / "out")]
    job = ranks.run(argv, tmp_path / "log", 2).expect(USER_MISTAKE)
    assert job.log.count("error: ") == 1, job.log


def evaluate(data: str, trained: Path, folder: Path, num_ranks: int = 1, *flags: str) -> str:
    """What -e says of the model of a run; its predictions are in folder/out."""
    resume = ["-e", "--resume", str(trained / "run/ckpt/step-000000001.pt")]
    argv = [data, *resume, "--output", str(folder / "out"), *flags]
    argv += ["--data-dir", str(folder / "data")] if "://" in data else []
    return ranks.run(argv, folder / "log", num_ranks).expect(DONE).log


def is_of_a_byte(request: dict[str, str]) -> bool:
    """Whether a request asks for no more than the size."""
    return request.get("range") == "bytes=0-0"


@pytest.mark.parametrize(("num_ranks", "has_units"), [(1, False), (2, True)])
def test_an_evaluation_of_urls_leaves_the_training_tar_where_it_is(
    trained: tuple[Path, Path], tmp_path: Path, num_ranks: int, has_units: bool
) -> None:
    """Also with an index of format 1, and after a stream that was stopped half-way."""
    served, folder = trained
    index = build_index(served / TRAIN, index_dir=tmp_path, checksums=True)[1]
    if not has_units:
        drop_unit_sums(index)
    (tmp_path / "data").mkdir()
    part_path(tmp_path / "data" / TRAIN).touch()
    with serving_folder(served) as (url, seen):
        both = f"{url}/{TRAIN},{url}/{VAL}"
        flags = ["--index", str(index)]
        log = evaluate(both, folder, tmp_path, num_ranks, *flags)
    assert "the training tar, too" not in log
    assert all(is_of_a_byte(request) for request in seen if request["path"] == f"/{TRAIN}")
    assert not (tmp_path / "data" / TRAIN).exists() and (tmp_path / "data" / VAL).exists()
    found, expected = (p / "out/predictions.csv" for p in (tmp_path, folder))
    assert found.read_bytes() == expected.read_bytes()


def test_an_evaluation_without_an_index_says_why_it_fetches_both(
    trained: tuple[Path, Path], tmp_path: Path
) -> None:
    served, folder = trained
    hidden = shutil.copytree(served, tmp_path / "s", ignore=shutil.ignore_patterns("*.index"))
    with serving_folder(hidden) as (url, _):
        log = evaluate(f"{url}/{TRAIN},{url}/{VAL}", folder, tmp_path)
    assert f"-e fetches the training tar, too: there is no {TRAIN}.index beside" in log
    assert (tmp_path / "data" / TRAIN).exists()
    found, expected = (p / "out/predictions.csv" for p in (tmp_path, folder))
    assert found.read_bytes() == expected.read_bytes()


def test_an_evaluation_waits_for_a_fetch_into_the_same_folder(
    trained: tuple[Path, Path], tmp_path: Path
) -> None:
    """Which may be that of another evaluation; the training tar is not fetched for it."""
    served, folder = trained
    (tmp_path / "data").mkdir()
    index = build_index(served / TRAIN, index_dir=tmp_path, checksums=True)[1]
    resume = ["-e", "--resume", str(folder / "run/ckpt/step-000000001.pt"), "--index", str(index)]
    with serving_folder(served) as (url, _), ExitStack() as held:
        held.enter_context(lock_folder(tmp_path / "data", 0.0))
        argv = [f"{url}/{TRAIN},{url}/{VAL}", *resume, "--output", str(tmp_path / "out")]
        argv += ["--data-dir", str(tmp_path / "data")]
        job = ranks.start(argv, tmp_path / "log")
        job.wait_for_log("waits: ")
        held.close()
        job.expect(DONE)
    assert "is fetching into the same folder" in job.log
    assert not (tmp_path / "data" / TRAIN).exists() and (tmp_path / "data" / VAL).exists()


def test_an_evaluation_with_an_index_of_another_tar_is_refused(
    trained: tuple[Path, Path], tmp_path: Path
) -> None:
    served, folder = trained
    index = build_index(served / VAL, index_dir=tmp_path, checksums=True)[1]
    resume = ["-e", "--resume", str(folder / "run/ckpt/step-000000001.pt"), "--index", str(index)]
    with serving_folder(served) as (url, _):
        argv = [f"{url}/{TRAIN},{url}/{VAL}", *resume, "--output", str(tmp_path / "out")]
        argv += ["--data-dir", str(tmp_path / "data")]
        job = ranks.run(argv, tmp_path / "log").expect(USER_MISTAKE)
    assert "give --index the index of" in job.log
    assert not (tmp_path / "data" / TRAIN).exists()
