"""What -e writes of each image: one row for every image, and the counts of the evaluation."""

from __future__ import annotations

import base64
import csv
import errno
import io
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image

from dataset.errors import DONE, USER_MISTAKE
from report.evaluation import read_evaluation
from tests.gpu_sim import ranks as gpu
from tests.train import hooks, tiny_net
from tests.train import started_ranks as ranks
from tests.train.data.small_batches import spoil
from train.data.splits import open_dataset
from train.ranks.comm import Comm
from train.ranks.launch import Launch
from train.records.predictions import MOST_MISTAKES, Predictions
from train.records.record import read_lines

pytestmark = pytest.mark.training

NUM_VAL = 35


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights whose answers are spread over the classes."""
    torch.manual_seed(5)
    model = tiny_net.TinyNet(7)
    with torch.no_grad():
        for parameter in model.fc.parameters():
            parameter.mul_(20)
    path = tmp_path_factory.mktemp("weights") / "plain.pt"
    torch.save(model.state_dict(), path)
    return path


def evaluate(data: Path, weights: Path, out: Path, world: int = 1, *more: str) -> dict[str, Any]:
    """The stage line of an evaluation on so many ranks."""
    argv = [str(data), "-e", "--weights", str(weights), "--output", str(out), *more]
    ranks.run(argv, out.with_suffix(".log"), world).expect(DONE)
    (stage,) = read_lines(out / "stages.jsonl")
    return stage


def read_rows(out: Path) -> list[dict[str, str]]:
    with open(out / "predictions.csv", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("world", [1, 3])
def test_the_rows_are_the_images_and_count_as_the_evaluation_counts(
    images: Path, weights: Path, tmp_path: Path, world: int
) -> None:
    stage = evaluate(images, weights, tmp_path / "out", world)
    rows = read_rows(tmp_path / "out")
    val = open_dataset(images, None).val
    assert val is not None
    assert [row["name"] for row in rows] == [val.name(index) for index in range(NUM_VAL)]
    assert all(row["label"] == row["name"].split("/")[0] for row in rows)
    hits1 = sum(row["label"] == row["top1"] for row in rows)
    hits5 = sum(row["label"] in [row[f"top{k}"] for k in range(1, 6)] for row in rows)
    assert 0 < hits1 < hits5 < NUM_VAL
    assert [stage["acc1"], stage["acc5"]] == pytest.approx([100 * n / 35 for n in (hits1, hits5)])
    for row in rows:
        shares = [float(row[f"p{k}"]) for k in range(1, 6)]
        assert shares == sorted(shares, reverse=True) and 0 < sum(shares) <= 1.00001
    found, num_odd = read_evaluation(tmp_path / "out" / "predictions.csv")
    assert (found.num_right, found.num_right5, num_odd) == (hits1, hits5, 0)
    assert found.confuse(12)[1].sum() == found.confuse(3)[1].sum() == NUM_VAL


def test_any_number_of_ranks_and_the_tar_give_the_same_file(
    images: Path, tars: Path, weights: Path, tmp_path: Path
) -> None:
    evaluate(images, weights, tmp_path / "one")
    evaluate(tars, weights, tmp_path / "two", 2)
    one, two = (read_rows(tmp_path / name) for name in ("one", "two"))
    strip = [{k: v for k, v in row.items() if k[0] != "p"} for row in one]
    assert strip == [{k: v for k, v in row.items() if k[0] != "p"} for row in two]
    for a, b in zip(one, two, strict=True):  # a batch of another size may round otherwise
        assert float(a["p1"]) == pytest.approx(float(b["p1"]), abs=1e-5)


def test_mistakes_are_the_most_confident_ones_with_their_pictures(
    images: Path, weights: Path, tmp_path: Path
) -> None:
    evaluate(images, weights, tmp_path / "out", 2)
    rows = {row["name"]: row for row in read_rows(tmp_path / "out")}
    wrong = sorted((-float(r["p1"]), n) for n, r in rows.items() if r["top1"] != r["label"])
    lines = read_lines(tmp_path / "out" / "mistakes.jsonl")
    assert len(lines) == min(MOST_MISTAKES, len(wrong))
    shares = [line["probability"] for line in lines]
    assert shares == pytest.approx([-p for p, _ in wrong[: len(lines)]], abs=1e-5)
    for line in lines:
        row = rows[line["name"]]
        assert (line["label"], line["predicted"]) == (row["label"], row["top1"])
        picture = Image.open(io.BytesIO(base64.b64decode(line["jpeg"]))).convert("RGB")
        original = Image.open(images / "val" / line["name"]).convert("RGB")
        colours = [np.asarray(image).mean(axis=(0, 1)) for image in (picture, original)]
        assert np.abs(colours[0] - colours[1]).max() < 25  # a crop of the same image


def test_a_skipped_image_has_its_row_without_a_prediction(
    images: Path, weights: Path, tmp_path: Path
) -> None:
    data, names = spoil(images, tmp_path / "data", 3, 4, split="val")
    evaluate(data, weights, tmp_path / "out", 2, "--skip-bad-images", "2")
    rows = read_rows(tmp_path / "out")
    empty = [row["name"] for row in rows if not row["top1"]]
    assert len(rows) == NUM_VAL and [f"{data}/val/{name}" for name in empty] == names
    found, num_odd = read_evaluation(tmp_path / "out" / "predictions.csv")
    assert (found.num_images, found.num_skipped, num_odd) == (NUM_VAL - 2, 2, 0)


def test_averaged_weights_get_a_file_of_their_own(images: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    argv = [str(images), "--output", str(out)]
    ranks.run([*argv, "--ema", "0.9", "--lr", "1", "--max-steps", "3"], tmp_path / "log")
    ranks.run([*argv, "-e"], tmp_path / "log1").expect(DONE)
    stage = read_lines(out / "stages.jsonl")[-1]
    for suffix in ("", "_ema"):
        found, _ = read_evaluation(out / f"predictions{suffix}.csv")
        assert 100 * found.num_right / NUM_VAL == pytest.approx(stage[f"acc1{suffix}"])


def test_fewer_than_five_classes_and_more_ranks_than_images() -> None:
    """A rank without a batch has nothing to send."""
    comm = Comm(Launch("single", "a test"))
    found = Predictions()
    outputs = torch.tensor([[2.0, 0.0], [0.0, 3.0], [1.0, 0.0]])
    labels = torch.tensor([0, 0, -1])
    images = torch.zeros(3, 3, 200, 100, dtype=torch.uint8)
    found.add(images, labels, outputs, outputs.topk(2).indices)
    classes, shares = found.merge(comm, 3)
    assert classes.tolist() == [[0, 1], [1, 0], [-1, -1]]
    assert shares[1].tolist() == pytest.approx([0.952574, 0.047426], abs=1e-5)
    (number,) = pictures = found.merge_mistakes(comm)
    assert number == 1 and Image.open(io.BytesIO(pictures[1])).size == (96, 96)


def refuse_to_write(*_: object) -> None:
    raise PermissionError(errno.EACCES, "Permission denied")


def run_out_of_space(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device", "predictions.csv")


@pytest.mark.parametrize(
    ("write", "code", "words"),
    [
        (refuse_to_write, DONE, "predictions.csv not written: Permission denied; name the"),
        (run_out_of_space, USER_MISTAKE, "error: No space left on device: predictions.csv"),
    ],
)
def test_a_file_that_cannot_be_written_is_one_line_below_the_result(
    images: Path, weights: Path, tmp_path: Path, write: Any, code: int, words: str
) -> None:
    """The folder may be that of somebody else's run; root, who tests this, may write everywhere."""
    argv = [str(images), "-e", "--weights", str(weights), "--output", str(tmp_path / "out")]
    hook = partial(hooks.set_value, "train.records.predictions", "write_predictions", write)
    job = ranks.run(argv, tmp_path / "log", hook=hook).expect(code)
    assert words in job.log and "of 35 images, loss" in job.log and "Traceback" not in job.log


@pytest.mark.gpusim
@pytest.mark.timeout(300)
def test_a_gpu_notes_what_a_cpu_notes(images: Path, tmp_path: Path) -> None:
    torch.manual_seed(4)
    start = tmp_path / "start.pt"
    torch.save(torchvision.models.get_model(ranks.REAL_ARCH, num_classes=7).state_dict(), start)
    argv = [
        str(images),
        "-e",
        "-a",
        ranks.REAL_ARCH,
        "--weights",
        str(start),
        "--precision",
        "fp64",
    ]
    ranks.run([*argv, "--output", f"{tmp_path}/cpu"], tmp_path / "log", 2).expect(DONE)
    gpu.run([*argv, "--output", f"{tmp_path}/gpu"], tmp_path / "log", 2).expect(DONE)
    assert read_rows(tmp_path / "gpu") == read_rows(tmp_path / "cpu")
