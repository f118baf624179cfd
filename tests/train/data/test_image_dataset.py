"""Images one by one: as torchvision's ImageFolder gives them, and from a tar in place."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from dataset.errors import DataError, UserError
from dataset.names import TRAIN_TAR, VAL_TAR
from tests.train.data.small_batches import NUM_TRAIN, SIZE, spoil
from train.torch_data import CentreCrop, ImageDataset, RandomCrop, open_images

SPLITS = ("train", "val")


def pictures(images: Any) -> list[tuple[bytes, int]]:
    """Every picture with its class, in the order of a plain loop."""
    return [(np.asarray(image).tobytes(), label) for image, label in images]


@pytest.mark.parametrize("split", SPLITS)
def test_a_folder_is_what_image_folder_makes_of_it(images: Path, split: Any) -> None:
    theirs, ours = ImageFolder(str(images / split)), open_images(images, split)
    assert (ours.classes, ours.class_to_idx) == (theirs.classes, theirs.class_to_idx)
    assert ours.samples == theirs.samples == list(ours.imgs)
    assert ours.targets == theirs.targets
    assert len(ours) == len(theirs)
    assert pictures(ours) == pictures(theirs)


@pytest.mark.parametrize("split", SPLITS)
def test_a_tar_has_the_pictures_of_the_folder_in_its_order(
    images: Path, tars: Path, split: Any
) -> None:
    folder, tar = open_images(images, split), open_images(tars, split)
    assert (tar.classes, tar.targets) == (folder.classes, folder.targets)
    assert pictures(tar) == pictures(folder)
    where, label = tar.samples[-1]
    assert (label, where.endswith(TRAIN_TAR if split == "train" else VAL_TAR)) == (6, True)


def test_one_split_can_be_named_by_itself(
    images: Path, tars: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for split, tar in zip(SPLITS, (TRAIN_TAR, VAL_TAR), strict=True):
        expected = pictures(open_images(images, split))  # type: ignore[arg-type]
        assert pictures(open_images(images / split)) == expected
        assert pictures(open_images(tars / tar)) == expected
    monkeypatch.chdir(images)
    assert open_images("train").samples == ImageFolder("train").samples


def test_classes_that_a_validation_lacks_do_not_move_its_labels(
    images: Path, tmp_path: Path
) -> None:
    """ImageFolder would number the classes of val/ anew."""
    data = shutil.copytree(images, tmp_path / "data")
    shutil.rmtree(data / "val" / "n90000001")
    val = open_images(data, "val")
    assert val.classes == open_images(data).classes
    assert min(val.targets) == 1


def test_transforms_are_those_of_image_folder(images: Path) -> None:
    steps = v2.Compose([v2.Resize(20), v2.CenterCrop(16), v2.PILToTensor()])
    theirs = ImageFolder(str(images / "train"), steps, target_transform=str)
    ours: Any = open_images(images, "train", steps, str)
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine[0], other[0])
        assert mine[1] == other[1]
    ours.transform = None  # some libraries set it later
    assert ours[0][0].mode == "RGB"


def test_any_function_may_decode(images: Path) -> None:
    raw = open_images(images, decode=lambda data, where: (len(data), where))
    assert raw[3][0] == (Path(raw.samples[3][0]).stat().st_size, raw.samples[3][0])


def test_numbers_count_as_in_a_list(images: Path) -> None:
    ours = open_images(images)
    assert ours.samples[-1] == ours.samples[NUM_TRAIN - 1]
    assert ours.samples[3:9:2] == [ours.samples[n] for n in (3, 5, 7)]
    assert pictures([ours[-1]]) == pictures([ours[torch.tensor(NUM_TRAIN - 1)]])
    for read in (lambda: ours[NUM_TRAIN], lambda: ours.samples[NUM_TRAIN]):
        with pytest.raises(IndexError):
            read()


@pytest.mark.parametrize("decoder", ["pil", "kernel"])
def test_the_centre_is_what_torchvision_cuts_out(images: Path, decoder: str) -> None:
    steps = v2.Compose([v2.Resize(int(SIZE * 256 / 224)), v2.CenterCrop(SIZE), v2.PILToTensor()])
    theirs = ImageFolder(str(images / "val"), steps)
    ours: Any = open_images(images, "val", decode=CentreCrop(SIZE, decoder))
    assert ours[0][0].shape == (3, SIZE, SIZE)
    for mine, other in zip(ours, theirs, strict=True):
        difference = (mine[0].int() - other[0].int()).abs().max()
        assert int(difference) <= (0 if decoder == "pil" else 2)


def test_random_crops_follow_the_seed_of_torch(tars: Path) -> None:
    ours = open_images(tars, decode=RandomCrop(SIZE))
    torch.manual_seed(1)
    first, second = ours[0][0], ours[0][0]
    torch.manual_seed(1)
    assert torch.equal(first, ours[0][0])
    assert (first.dtype, first.shape) == (torch.uint8, (3, SIZE, SIZE))
    assert not torch.equal(first, second)


@pytest.mark.parametrize(("method", "num_workers"), [("fork", 2), ("spawn", 1)])
def test_workers_read_what_one_process_reads(tars: Path, method: str, num_workers: int) -> None:
    ours = open_images(tars, decode=CentreCrop(SIZE))
    alone = list(DataLoader(ours, 8))  # the tar is open now, as in a loop that looked at an image
    there = list(DataLoader(ours, 8, num_workers=num_workers, multiprocessing_context=method))
    assert len(alone) == len(there) == 6
    for mine, other in zip(alone, there, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, other, strict=True))


def test_a_pickle_of_it_reads_the_same(tars: Path) -> None:
    ours = open_images(tars)
    assert pictures(pickle.loads(pickle.dumps(ours))) == pictures(ours)


def test_a_distributed_sampler_deals_every_image_once(images: Path) -> None:
    ours = open_images(images)
    shares: list[Any] = [DistributedSampler(ours, 2, rank, shuffle=True, seed=4) for rank in (0, 1)]
    dealt = [index for share in shares for index in share]
    assert sorted(dealt) == list(range(NUM_TRAIN))
    loader = DataLoader(ours, 7, sampler=shares[1], collate_fn=lambda items: [i[1] for i in items])
    assert [label for labels in loader for label in labels] == [ours.targets[i] for i in shares[1]]


# --- what is wrong with the data is said as the trainer says it ---------------------------------


def test_an_empty_class_is_refused_unless_it_is_allowed(images: Path, tmp_path: Path) -> None:
    data = shutil.copytree(images, tmp_path / "data")
    (data / "train" / "n95555555").mkdir()
    for place in (data, data / "train"):
        with pytest.raises(UserError, match=r"without an image: n95555555; .*allow_empty=True"):
            open_images(place)
        assert len(open_images(place, allow_empty=True).classes) == 8


def test_what_is_no_data_is_one_line_with_the_fix(images: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    only_train = tmp_path / "half"
    shutil.copytree(images / "train", only_train / "train")
    cases: dict[tuple[Path, Any], str] = {
        (tmp_path / "nowhere", "train"): "no such data",
        (tmp_path / "empty", "train"): "no class folders",
        (only_train, "val"): "has no validation images",
        (images, "test"): "split 'test' is neither",
    }
    for (path, split), words in cases.items():
        with pytest.raises(UserError, match=words) as raised:
            open_images(path, split)
        assert "\n" not in str(raised.value)


def test_an_unfinished_extraction_is_refused_also_by_the_name_of_its_split(
    images: Path, tmp_path: Path
) -> None:
    data = shutil.copytree(images, tmp_path / "data")
    (data / ".train.extracting").mkdir()
    for path in (data, data / "train"):
        with pytest.raises(UserError, match="not finished"):
            open_images(path)


@pytest.mark.parametrize("decode", [None, RandomCrop(SIZE), CentreCrop(SIZE)])
def test_a_bad_image_is_named(images: Path, tmp_path: Path, decode: Any) -> None:
    data, (name,) = spoil(images, tmp_path / "data", 7)
    Path(name).write_bytes(b"no image")
    ours = open_images(data, **({"decode": decode} if decode else {}))
    with pytest.raises(DataError, match=rf"cannot decode {name}"):
        ours[7]


def test_an_error_in_a_worker_keeps_its_type_and_ends_with_its_line(
    images: Path, tmp_path: Path
) -> None:
    data, (name,) = spoil(images, tmp_path / "data", 7)
    Path(name).write_bytes(b"no image")
    ours = open_images(data, decode=CentreCrop(SIZE))
    with pytest.raises(DataError) as raised:
        list(DataLoader(ours, 8, num_workers=1, multiprocessing_context="fork"))
    last = str(raised.value).splitlines()[-1]
    assert last.startswith(f"dataset.errors.DataError: cannot decode {name}")


def test_a_worker_that_dies_ends_the_loop(images: Path) -> None:
    ours = open_images(images, decode=_die)
    with pytest.raises(RuntimeError, match=r"worker .* exited unexpectedly|killed by signal"):
        list(DataLoader(ours, 8, num_workers=1, multiprocessing_context="fork"))


def _die(data: bytes, where: str) -> None:
    os._exit(9)


def test_it_says_what_it_is(tars: Path) -> None:
    ours: ImageDataset = open_images(tars)
    assert repr(ours) == f"42 images of 7 classes: train of {tars}"
