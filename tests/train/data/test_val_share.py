"""Images held out for validation: the same from any source, on any rank, in any attempt."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dataset.errors import DONE, USER_MISTAKE, UserError
from tests.train import started_ranks as ranks
from train.data.splits import Dataset, open_dataset
from train.data.tar_layout import find_layout
from train.data.val_share import Subset, choose_held_out, hold_out


@pytest.fixture(scope="module")
def folder(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The training images alone, as a folder."""
    data = tmp_path_factory.mktemp("folder")
    (data / "train").symlink_to(images / "train")
    return data


@pytest.fixture(scope="module")
def tar(tars: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same images as a tar, without the validation tar."""
    data = tmp_path_factory.mktemp("tar")
    shutil.copy(tars / "ILSVRC2012_img_train.tar", data)
    return data


def names_of(source: Any) -> list[str]:
    names = [source.name(index) for index in range(len(source))]
    assert [name.encode() for name in names] == source.raw_names(0, len(source))
    return names


def split(data: Path, share: float, seed: int) -> tuple[Dataset, list[str], list[str]]:
    dataset = hold_out(open_dataset(data, None), share, seed)
    return dataset, names_of(dataset.train), names_of(dataset.val)


def test_a_folder_and_its_tar_hold_out_the_same_images(folder: Path, tar: Path) -> None:
    (one, train, val), (other, *rest) = split(folder, 0.3, 5), split(tar, 0.3, 5)
    assert [train, val] == rest
    assert (len(train), len(val)) == (28, 14)
    assert not set(train) & set(val)
    assert sorted(train + val) == names_of(open_dataset(folder, None).train)
    assert one.fingerprint == other.fingerprint == open_dataset(tar, None).fingerprint
    assert one.val is not None and other.val is not None
    for number in range(len(val)):
        assert one.val.read(number) == other.val.read(number)
        assert one.val.classes[one.val.labels[number]] == val[number].split("/")[0]


def test_the_seed_decides_which_and_the_share_how_many(folder: Path) -> None:
    held = {seed: set(split(folder, 0.3, seed)[2]) for seed in range(4)}
    assert held[0] == set(split(folder, 0.3, 0)[2])
    assert len({frozenset(names) for names in held.values()}) == 4
    assert {len(names) for names in held.values()} == {14}  # 0.3 of 6 images is 2, 7 times


def test_each_class_gives_its_share_and_keeps_an_image() -> None:
    sizes = [1, 2, 5, 10, 0, 1000]
    labels = np.repeat(np.arange(6), sizes)
    for share, expected in (
        (0.1, [0, 0, 1, 1, 0, 100]),
        (0.5, [0, 1, 3, 5, 0, 500]),
        (0.999, [0, 1, 4, 9, 0, 999]),
    ):
        is_held = choose_held_out(labels, 6, share, 1)
        assert np.bincount(labels[is_held], minlength=6).tolist() == expected
    counts = np.zeros(1000)
    for seed in range(300):
        counts += choose_held_out(labels, 6, 0.1, seed)[-1000:]
    assert counts.min() > 5 and counts.max() < 70  # 30 on average: no image is favoured


def test_the_streamed_order_of_what_is_left_lies_in_the_units_of_the_tar(
    folder: Path, tar: Path, small_units: None
) -> None:
    whole, _ = find_layout(open_dataset(tar, None).train, tar.parent, None)
    dataset = split(tar, 0.3, 5)[0]
    layout, _ = find_layout(dataset.train, Path(dataset.path), None)
    assert isinstance(dataset.train, Subset) and len(layout) == len(dataset.train) == 28
    assert layout.unit.tolist() == whole.unit[dataset.train.numbers].tolist()
    assert len(layout.group) == len(whole.group)


def test_a_split_that_cannot_be_made_is_refused(images: Path, folder: Path) -> None:
    with pytest.raises(UserError, match="has validation images of its own; leave out --val-share"):
        hold_out(open_dataset(images, None), 0.1, 0)
    with pytest.raises(UserError, match="is no image: the largest has 6 images; give a larger"):
        hold_out(open_dataset(folder, None), 0.01, 0)


def read_dataset(out: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((out / "run.json").read_text())["dataset"]
    return record


def test_a_run_validates_on_what_it_held_out_and_goes_on_from_any_source_and_ranks(
    folder: Path, tar: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    argv = ["--val-share", "0.3", "--seed", "5", "--output", str(out), "--epochs", "2"]
    first = ranks.run([str(folder), *argv, "--max-steps", "2"], tmp_path / "log").expect(DONE)
    assert "14 of 42 images (7 of 7 classes) are held out for validation" in first.log
    ranks.run([str(tar), *argv], tmp_path / "log1", 2).expect(DONE)
    found = read_dataset(out)
    assert (found["num_train"], found["num_val"], found["val_share"]) == (28, 14, 0.3)
    other = [str(tar), *argv, "--val-share", "0.4"]
    refused = ranks.run(other, tmp_path / "log2").expect(USER_MISTAKE)
    assert "val_share: 0.3 -> 0.4" in refused.log


def test_an_evaluation_takes_the_images_that_the_run_held_out(folder: Path, tmp_path: Path) -> None:
    """Other ones would be images that it was trained on, whatever --seed says."""
    out = tmp_path / "out"
    argv = [str(folder), "--output", str(out)]
    train = [*argv, "--val-share", "0.3", "--seed", "5", "--max-steps", "1"]
    ranks.run(train, tmp_path / "log").expect(DONE)
    job = ranks.run([*argv, "-e"], tmp_path / "log1", 2).expect(DONE)
    assert "of 14 images, loss" in job.log
    rows = (out / "predictions.csv").read_text().splitlines()[1:]
    assert [row.split(",")[0] for row in rows] == split(folder, 0.3, 5)[2]
    refused = ranks.run([*argv, "-e", "--val-share", "0.2"], tmp_path / "log2")
    assert "the run of this checkpoint held out 0.3" in refused.expect(USER_MISTAKE).log
