"""Validation against a plain torchvision loop, to the integer, at any world size."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torchvision import datasets, models, transforms

from dataset.errors import BAD_DATA, DONE, USER_MISTAKE
from tests.train import started_ranks as ranks
from tests.train import tiny_net
from tests.train.data.small_batches import spoil
from train.data.batches import Batch
from train.data.sampler import BatchPlan, ValidationShare, share_validation
from train.evaluate import evaluate, frozen
from train.ranks.comm import Comm
from train.ranks.interrupt import Vote
from train.ranks.launch import Launch
from train.records.record import read_lines
from train.step import MEAN, STD, Placement

pytestmark = pytest.mark.training

NUM_VAL, NUM_CLASSES = 35, 7
ALONE = Comm(Launch("single", "a test"))
CPU = Placement(torch.device("cpu"), "fp32")


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state dict whose predictions are spread over the classes."""
    return make_weights(tiny_net.NAME, tmp_path_factory.mktemp("weights") / "plain.pt")


def make_weights(arch: str, path: Path) -> Path:
    torch.manual_seed(5)
    model = models.get_model(arch, num_classes=NUM_CLASSES)
    with torch.no_grad():
        model.eval()
        for parameter in model.fc.parameters():
            parameter.mul_(20)
    torch.save(model.state_dict(), path)
    return path


@pytest.fixture(scope="module")
def averaged(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with --ema, by another recipe than the default one."""
    folder = tmp_path_factory.mktemp("averaged")
    argv = [str(images), "--epochs", "1", "--recipe", "reference", "--ema", "0.9"]
    argv += ["--output", str(folder), "--decoder", "pil", "--lr", "1"]  # so that averages differ
    ranks.run(argv, folder / "log").expect(DONE)
    return folder


def split_checkpoint(path: Path, folder: Path) -> tuple[Path, Path]:
    """The weights of a checkpoint and their averages, each as a plain state dict."""
    state = torch.load(path, weights_only=True)
    raw, ema = folder / "raw.pt", folder / "ema.pt"
    torch.save(state["model"], raw)
    torch.save(state["model"] | state["ema"], ema)
    return raw, ema


def plain_loop(val: Path, weights: Path, arch: str = tiny_net.NAME) -> tuple[int, int, float]:
    """(top-1, top-5, mean loss) by torchvision's own data set and transforms."""
    steps = [
        transforms.Resize(int(32 * 256 / 224)),
        transforms.CenterCrop(32),
        transforms.ToTensor(),
        transforms.Normalize(MEAN, STD),
    ]
    data = datasets.ImageFolder(str(val), transforms.Compose(steps))
    model = models.get_model(arch, num_classes=NUM_CLASSES)
    model.load_state_dict(torch.load(weights, weights_only=True))
    model.eval()
    top1 = top5 = 0
    loss = 0.0
    with torch.no_grad():
        for images, labels in torch.utils.data.DataLoader(data, batch_size=8):
            outputs = model(images)
            best = outputs.topk(5, dim=1).indices
            top1 += int((best[:, 0] == labels).sum())
            top5 += int((best == labels[:, None]).any(dim=1).sum())
            loss += float(functional.cross_entropy(outputs, labels, reduction="sum"))
    return top1, top5, loss / len(data)


def read_result(log: str) -> tuple[int, int, int, float]:
    """(top-1, top-5, images, loss) of the one line that -e prints."""
    (found,) = read_results(log)
    assert not found[0], log
    return found[1:]


def read_results(log: str) -> list[tuple[str, int, int, int, float]]:
    """What each line of -e is about, and its numbers."""
    numbers = r"acc1 \S+ \((\d+)\) acc5 \S+ \((\d+)\) of (\d+) images, loss (\S+)"
    found = re.findall(r"^[\d:]+ (.*)" + numbers, log, re.MULTILINE)
    return [(kind, int(a), int(b), int(c), float(d)) for kind, a, b, c, d in found]


def evaluate_argv(data: Path, weights: Path, *more: str) -> list[str]:
    argv = [str(data), "-e", "--weights", str(weights), "--decoder", "pil"]
    return [*argv, "--output", str(weights.parent / "evaluated"), *more]


@pytest.mark.parametrize(
    ("world", "arch"),
    [(1, tiny_net.NAME), (2, ranks.REAL_ARCH), (3, tiny_net.NAME), (4, tiny_net.NAME)],
)
def test_evaluation_equals_a_plain_torchvision_loop(
    images: Path, tmp_path: Path, world: int, arch: str
) -> None:
    """35 images on 1 to 4 ranks: no rank count but 1 divides them, nor 8 x 3 the batch."""
    weights = make_weights(arch, tmp_path / "weights.pt")
    argv = evaluate_argv(images, weights, "--output", str(tmp_path / "out"), "-a", arch)
    job = ranks.run(argv, tmp_path / "log", world).expect(DONE)
    top1, top5, loss = plain_loop(images / "val", weights, arch)
    assert 0 < top1 < top5 < NUM_VAL  # the comparison says something
    *counts, found_loss = read_result(job.log)
    assert counts == [top1, top5, NUM_VAL]
    assert found_loss == pytest.approx(loss, abs=1e-4)
    (stage,) = read_lines(tmp_path / "out" / "stages.jsonl")
    assert (stage["stage"], stage["images"]) == ("evaluate", NUM_VAL)
    assert stage["acc1"] == pytest.approx(100 * top1 / NUM_VAL)


def test_evaluation_from_the_tars_equals_the_folders(
    images: Path, tars: Path, weights: Path, tmp_path: Path
) -> None:
    job = ranks.run(evaluate_argv(tars, weights, "-j", "2"), tmp_path / "log", 2).expect(DONE)
    assert list(read_result(job.log))[:2] == list(plain_loop(images / "val", weights))[:2]


def test_more_ranks_than_validation_images(images: Path, weights: Path, tmp_path: Path) -> None:
    """Some ranks have no batch at all, and must not wait for votes or sums that nobody sends."""
    data = tmp_path / "data"
    (data / "val" / "n90000001").mkdir(parents=True)
    (data / "train").symlink_to(images / "train")
    for source in sorted((images / "val" / "n90000001").iterdir())[:2]:
        (data / "val" / "n90000001" / source.name).symlink_to(source)
    job = ranks.run(evaluate_argv(data, weights), tmp_path / "log", 4).expect(DONE)
    assert read_result(job.log)[2] == 2


def test_the_default_batch_need_not_divide_and_may_exceed_the_training_set(
    images: Path, weights: Path, tmp_path: Path
) -> None:
    argv = evaluate_argv(images, weights, "-b", "256")
    job = ranks.run(argv, tmp_path / "log", 3).expect(DONE)
    assert read_result(job.log)[2] == NUM_VAL


def test_named_weights_are_evaluated_and_not_the_checkpoint_of_the_output(
    images: Path, weights: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    train = [str(images), "--epochs", "1", "--output", str(out), "--save-model", "--decoder", "pil"]
    ranks.run(train, tmp_path / "log", 1).expect(DONE)
    named = ranks.run(evaluate_argv(images, weights, "--output", str(out)), tmp_path / "log1")
    top1, top5, _ = plain_loop(images / "val", weights)
    assert read_result(named.expect(DONE).log)[:2] == (top1, top5)
    saved = out / f"{ranks.ARCH}_7_classes.pt"
    expected = plain_loop(images / "val", saved)
    for number, given in enumerate(
        (
            ["--output", str(out)],
            ["--resume", str(out / "ckpt" / "best.pt")],
            ["--weights", str(saved)],
        )
    ):
        kept = ["--output", str(tmp_path / "evaluated"), *given]
        job = ranks.run([str(images), "-e", "--decoder", "pil", *kept], tmp_path / f"log{number}x")
        assert read_result(job.expect(DONE).log)[:2] == expected[:2]


def test_a_training_with_ema_reports_the_accuracy_of_the_averages(
    images: Path, averaged: Path, tmp_path: Path
) -> None:
    (line,) = read_lines(averaged / "epochs.jsonl")
    raw, ema = split_checkpoint(averaged / "ckpt" / "best.pt", tmp_path)
    for suffix, path in (("", raw), ("_ema", ema)):
        top1, top5, loss = plain_loop(images / "val", path)
        assert line[f"val_acc1{suffix}"] == pytest.approx(100 * top1 / NUM_VAL)
        assert line[f"val_acc5{suffix}"] == pytest.approx(100 * top5 / NUM_VAL)
        assert line[f"val_loss{suffix}"] == pytest.approx(loss, rel=1e-4)
    assert line["val_loss_ema"] != pytest.approx(line["val_loss"], rel=1e-2)


@pytest.mark.parametrize("world", [1, 2])
def test_a_checkpoint_is_evaluated_under_any_recipe_with_its_averages(
    images: Path, averaged: Path, tmp_path: Path, world: int
) -> None:
    """Trained with one group of parameters, evaluated with a recipe of two, and without --ema."""
    path, out = averaged / "ckpt" / "best.pt", tmp_path / "out"
    argv = [str(images), "-e", "--resume", str(path), "--recipe", "auto", "--decoder", "pil"]
    job = ranks.run([*argv, "--output", str(out)], tmp_path / "log", world).expect(DONE)
    results = read_results(job.log)
    (stage,) = read_lines(out / "stages.jsonl")
    expected = zip(("", "averaged weights: "), split_checkpoint(path, tmp_path), strict=True)
    for (kind, weights), found in zip(expected, results, strict=True):
        top1, top5, loss = plain_loop(images / "val", weights)
        assert found[:4] == (kind, top1, top5, NUM_VAL)
        assert found[4] == pytest.approx(loss, rel=1e-4)
        suffix = "_ema" if kind else ""
        assert stage[f"acc1{suffix}"] == pytest.approx(100 * top1 / NUM_VAL)
        assert stage[f"acc5{suffix}"] == pytest.approx(100 * top5 / NUM_VAL)


def test_weights_without_averages_have_one_result(
    images: Path, weights: Path, tmp_path: Path
) -> None:
    job = ranks.run(evaluate_argv(images, weights, "--ema", "0.9"), tmp_path / "log").expect(DONE)
    assert read_result(job.log)[2] == NUM_VAL


def test_weights_for_other_classes_or_of_another_arch_are_refused(
    images: Path, weights: Path, tmp_path: Path
) -> None:
    """A new random last layer would give an accuracy that means nothing."""
    state = torch.load(weights, weights_only=True)
    other = tmp_path / "other.pt"
    torch.save(
        state | {"fc.weight": torch.zeros(9, tiny_net.WIDTH), "fc.bias": torch.zeros(9)}, other
    )
    job = ranks.run(evaluate_argv(images, other), tmp_path / "log").expect(USER_MISTAKE)
    assert "another number of classes" in job.log
    job = ranks.run([*evaluate_argv(images, weights), "-a", "squeezenet1_1"], tmp_path / "log1")
    assert "for another --arch" in job.expect(USER_MISTAKE).log
    assert "Traceback" not in job.log
    job = ranks.run([str(images), "-e"], tmp_path / "log2").expect(USER_MISTAKE)
    assert "nothing to evaluate" in job.log


def test_bad_validation_images_are_named_counted_and_limited(
    images: Path, weights: Path, tmp_path: Path
) -> None:
    data, names = spoil(images, tmp_path / "data", 3, 4, split="val")
    refused = ranks.run(evaluate_argv(data, weights), tmp_path / "log0").expect(BAD_DATA)
    assert f"cannot decode {names[0]}" in refused.log
    job = ranks.run(evaluate_argv(data, weights, "--skip-bad-images", "2"), tmp_path / "log1", 2)
    assert read_result(job.expect(DONE).log)[2] == NUM_VAL - 2
    assert all(name in job.log for name in names)
    argv = evaluate_argv(data, weights, "--skip-bad-images", "1")
    job = ranks.run(argv, tmp_path / "log2", 2).expect(BAD_DATA)
    assert "2 images of this epoch cannot be decoded" in job.log


# --- the counting itself ----------------------------------------------------------------------


def batches_of(labels: list[int], batch: int = 4) -> list[Batch]:
    """Images that hold their label in every pixel."""
    made = []
    for start in range(0, len(labels), batch):
        part = torch.tensor(labels[start : start + batch])
        pixels = part.clamp(min=0).view(-1, 1, 1, 1).expand(-1, 3, 2, 2).to(torch.uint8)
        made.append(Batch(pixels, part, [], ""))
    return made


class Guess(nn.Module):
    """Ranks the classes by distance from the label, shifted: right at top-1 where shift is 0."""

    def __init__(self, num_classes: int, shift: float) -> None:
        super().__init__()
        self.classes, self.shift = torch.arange(num_classes), shift

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        mean, std = torch.tensor(MEAN[0]), torch.tensor(STD[0])
        label = (images[:, 0, 0, 0] * std + mean) * 255
        return -(self.classes[None, :] - label[:, None] - self.shift).abs()


def count(labels: list[int], model: nn.Module, num_images: int | None = None) -> Any:
    batches = batches_of(labels)
    share = ValidationShare(num_images or len(labels), len(batches), len(batches))
    _, (result,) = evaluate([frozen(model)], iter(batches), share, CPU, ALONE)
    return result


def test_top_1_and_top_5_are_counted() -> None:
    labels = list(range(10)) * 2
    assert count(labels, Guess(10, 0.0)).correct1 == 20
    shifted = count(labels, Guess(10, 3.2))
    guesses = [[c for _, c in sorted((abs(c - y - 3.2), c) for c in range(10))] for y in labels]
    assert shifted.correct1 == sum(g[0] == y for g, y in zip(guesses, labels, strict=True)) == 2
    assert shifted.correct5 == sum(y in g[:5] for g, y in zip(guesses, labels, strict=True)) == 10
    assert (shifted.acc1, shifted.acc5) == (10.0, 50.0)


@pytest.mark.parametrize("num_classes", [1, 2, 4])
def test_with_fewer_than_5_classes_top_5_is_all(num_classes: int) -> None:
    result = count(list(range(num_classes)) * 3, Guess(num_classes, 0.9))
    assert result.correct5 == result.images == 3 * num_classes


def test_skipped_images_are_neither_right_nor_wrong() -> None:
    result = count([0, -1, 1, -1, 2], Guess(3, 0.0))
    assert (result.correct1, result.images, result.skipped, result.acc1) == (3, 3, 2, 100.0)


def test_a_lost_or_repeated_image_is_our_bug_and_is_noticed() -> None:
    for wrong in (4, 6):
        with pytest.raises(AssertionError):
            count([0, 1, 2, 0, 1], Guess(3, 0.0), num_images=wrong)


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30])
def test_a_loss_that_is_no_number_is_not_packed_into_garbage(value: float) -> None:
    class Broken(nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return torch.stack([torch.zeros(len(images)), torch.full((len(images),), value)], 1)

    assert math.isnan(count([0, 0, 0], Broken()).loss)


def test_two_models_are_evaluated_on_one_pass() -> None:
    batches = batches_of([0, 1, 2, 3, 4, 5])
    share = ValidationShare(6, len(batches), len(batches))
    both = [frozen(Guess(6, 0.0)), frozen(Guess(6, 1.0))]
    _, (right, wrong) = evaluate(both, iter(batches), share, CPU, ALONE)
    assert (right.correct1, wrong.correct1) == (6, 1)


def answer_with(votes: Iterator[Vote], _wait_s: float) -> Vote:
    return next(votes)


def test_an_urgent_vote_ends_a_validation_at_once_and_another_does_not() -> None:
    batches = batches_of([0, 1, 2, 3] * 4)
    share = ValidationShare(16, 4, 4)
    for asked, left in ((Vote.EXIT, 3), (Vote.REQUEUE_NOW, 3), (Vote.SAVE_AND_EXIT, 0)):
        votes = iter([Vote.GO_ON, asked, Vote.GO_ON, Vote.GO_ON])
        source = iter(batches)
        agree = partial(answer_with, votes)
        vote, results = evaluate([frozen(Guess(4, 0.0))], source, share, CPU, ALONE, agree)
        assert vote is asked
        assert len(list(source)) == left
        assert bool(results) == (asked is Vote.SAVE_AND_EXIT)


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
def test_all_ranks_vote_equally_often(world: int) -> None:
    for num_images in range(1, 40):
        plans = [BatchPlan(100, 4 * world, 4, rank, world) for rank in range(world)]
        shares = [share_validation(plan, num_images) for plan in plans]
        assert len({share.num_common for share in shares}) == 1
        assert shares[0].num_common == min(share.num_batches for share in shares)


def test_training_without_validation_images_says_so_at_its_start_and_in_its_record(
    images: Path, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "train").symlink_to(images / "train")
    told = "no validation images: accuracy is not measured"
    for folder, is_told in ((data, True), (images, False)):
        out = tmp_path / f"out-{is_told}"
        argv = [str(folder), "--max-steps", "1", "--output", str(out)]
        log = ranks.run(argv, tmp_path / f"log-{is_told}").expect(DONE).log
        dataset = json.loads((out / "run.json").read_text())["dataset"]
        assert (told in log, dataset.get("note") == told, dataset["num_val"] == 0) == (is_told,) * 3
