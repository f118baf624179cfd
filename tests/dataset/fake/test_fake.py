"""The fake ImageNet: formats of the real one, same bytes for the same seed, nothing overwritten."""

from __future__ import annotations

import csv
import io
import re
import subprocess
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dataset.errors import PassingError, UserError
from dataset.fake.make import MARKER, make_fake_imagenet
from dataset.fake.picture import draw_picture

SMALL: dict[str, Any] = {"classes": 3, "train_per_class": 6, "val_per_class": 4, "size": (64, 64)}


def read_tar(data: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return {m.name: tar.extractfile(m).read() for m in tar if m.isfile()}  # type: ignore[union-attr]


def test_nested_tar_holds_a_tar_for_each_class(tmp_path: Path) -> None:
    make_fake_imagenet(tmp_path, **SMALL)
    outer = read_tar((tmp_path / "ILSVRC2012_img_train.tar").read_bytes())
    assert sorted(outer) == ["n90000001.tar", "n90000002.tar", "n90000003.tar"]
    for name, data in outer.items():
        pictures = read_tar(data)
        assert len(pictures) == 6
        assert all(re.fullmatch(rf"{name[:9]}_\d+\.JPEG", picture) for picture in pictures)
        for picture in pictures.values():
            assert Image.open(io.BytesIO(picture)).format == "JPEG"


def test_tree_and_zip_hold_the_same_pictures_as_nested(tmp_path: Path) -> None:
    for shape in ("nested", "tree", "zip"):
        make_fake_imagenet(tmp_path / shape, shape=shape, **SMALL)
    outer = read_tar((tmp_path / "nested" / "ILSVRC2012_img_train.tar").read_bytes())
    nested = {
        f"{name[:9]}/{picture}": data
        for name, inner in outer.items()
        for picture, data in read_tar(inner).items()
    }
    tree = read_tar((tmp_path / "tree" / "ILSVRC2012_img_train.tar").read_bytes())
    assert {name.split("/", 1)[1]: data for name, data in tree.items()} == nested
    assert {name.split("/", 1)[0] for name in tree} == {"ILSVRC2012_img_train"}
    with zipfile.ZipFile(tmp_path / "zip" / "imagenet-object-localization-challenge.zip") as z:
        prefix = "ILSVRC/Data/CLS-LOC/"
        zipped = {n.removeprefix(prefix): z.read(n) for n in z.namelist() if n.startswith(prefix)}
        assert z.read("LOC_val_solution.csv").startswith(b"ImageId,PredictionString\n")
    val = read_tar((tmp_path / "nested" / "ILSVRC2012_img_val.tar").read_bytes())
    expected = {f"train/{name}": data for name, data in nested.items()}
    assert zipped == expected | {f"val/{name}": data for name, data in val.items()}


def test_valprep_script_and_solution_csv_agree(tmp_path: Path) -> None:
    make_fake_imagenet(tmp_path, **SMALL)
    val = tmp_path / "val"
    val.mkdir()
    with tarfile.open(tmp_path / "ILSVRC2012_img_val.tar") as tar:
        tar.extractall(val, filter="data")
    names = sorted(path.name for path in val.iterdir())
    assert names == [f"ILSVRC2012_val_{i:08d}.JPEG" for i in range(1, 13)]
    subprocess.run(["bash", str(tmp_path / "valprep.sh")], cwd=val, check=True)
    by_script = {path.stem: path.parent.name for path in val.glob("n*/*.JPEG")}
    with open(tmp_path / "LOC_val_solution.csv") as file:
        rows = list(csv.DictReader(file))
    by_csv = {row["ImageId"]: row["PredictionString"].split()[0] for row in rows}
    assert by_script == by_csv
    assert all(list(by_csv.values()).count(wnid) == 4 for wnid in set(by_csv.values()))
    for row in rows:
        _, *corners = row["PredictionString"].split()
        x0, y0, x1, y1 = map(int, corners)
        width, height = Image.open(val / by_csv[row["ImageId"]] / f"{row['ImageId']}.JPEG").size
        assert 0 <= x0 < x1 < width
        assert 0 <= y0 < y1 < height


def test_bytes_depend_on_the_seed_and_not_on_the_processes(tmp_path: Path) -> None:
    many = SMALL | {"train_per_class": 40}  # more than one chunk, so that the pool's order matters
    one = make_fake_imagenet(tmp_path / "one", processes=1, **many)
    three = make_fake_imagenet(tmp_path / "three", processes=3, **many)
    other = make_fake_imagenet(tmp_path / "other", processes=1, seed=1, **many)
    for name in one.files:
        assert (one.folder / name).read_bytes() == (three.folder / name).read_bytes(), name
        assert (one.folder / name).read_bytes() != (other.folder / name).read_bytes(), name


def test_oddities_are_a_cmyk_a_grey_and_a_png_picture(tmp_path: Path) -> None:
    make_fake_imagenet(tmp_path, shape="tree", oddities=True, **SMALL)
    tree = read_tar((tmp_path / "ILSVRC2012_img_train.tar").read_bytes())
    assert all(name.endswith(".JPEG") for name in tree)
    kinds = [Image.open(io.BytesIO(data)) for data in tree.values()]
    odd = sorted((i.format, i.mode) for i in kinds if (i.format, i.mode) != ("JPEG", "RGB"))
    assert odd == [("JPEG", "CMYK"), ("JPEG", "L"), ("PNG", "RGB")]


def test_default_pictures_weigh_what_imagenet_pictures_weigh() -> None:
    pictures = [draw_picture(0, 0, i % 10, i, (500, 375)) for i in range(40)]
    assert 90e3 < np.mean([len(p.data) for p in pictures]) < 130e3
    assert 450 < np.mean([p.width for p in pictures]) < 550
    assert len({(p.width, p.height) for p in pictures}) > 30


def test_spectrum_of_a_picture_falls_as_in_photos() -> None:
    """Photos of the world have amplitudes near 1/f^1: a slope between -0.6 and -1.6 in log-log."""
    slopes = []
    for number in range(8):
        image = Image.open(io.BytesIO(draw_picture(0, 0, number, number, (500, 375)).data))
        pixels = np.asarray(image.convert("L"), dtype=float)[:256, :256]
        window = np.hanning(256)[:, None] * np.hanning(256)[None, :]
        amplitude = np.abs(np.fft.fft2((pixels - pixels.mean()) * window))
        f = np.hypot(np.fft.fftfreq(256)[:, None], np.fft.fftfreq(256)[None, :])
        band = (f > 4 / 256) & (f < 0.2)
        slopes.append(np.polyfit(np.log(f[band]), np.log(amplitude[band]), 1)[0])
    assert -1.6 < np.mean(slopes) < -0.6


def test_pictures_of_a_class_are_alike_and_classes_differ() -> None:
    """Nearest mean colour histogram, far above chance: there is something to learn."""

    def features(split: int, label: int, number: int) -> np.ndarray:
        image = Image.open(io.BytesIO(draw_picture(0, split, label, number, (64, 64)).data))
        pixels = np.asarray(image)[16:48, 16:48].reshape(-1, 3) // 64
        return np.bincount(pixels @ [16, 4, 1], minlength=64) / len(pixels)

    means = np.stack([np.mean([features(0, c, n) for n in range(20)], axis=0) for c in range(10)])
    right = [
        int(np.argmin(np.abs(means - features(1, c, n)).sum(axis=1)) == c)
        for c in range(10)
        for n in range(10)
    ]
    assert np.mean(right) > 0.5


def test_a_second_call_finds_the_files_and_writes_nothing(tmp_path: Path) -> None:
    made = make_fake_imagenet(tmp_path, **SMALL)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    again = make_fake_imagenet(tmp_path, **SMALL)
    assert again.was_there and not made.was_there
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before


def test_a_missing_file_is_made_again(tmp_path: Path) -> None:
    made = make_fake_imagenet(tmp_path, **SMALL)
    (tmp_path / "valprep.sh").unlink()
    again = make_fake_imagenet(tmp_path, **SMALL)
    assert not again.was_there
    assert again.files == made.files
    assert (tmp_path / "valprep.sh").exists()


def test_another_data_set_is_not_overwritten(tmp_path: Path) -> None:
    real = tmp_path / "ILSVRC2012_img_train.tar"
    real.write_bytes(b"a week of downloading")
    with pytest.raises(UserError, match="not made by this command"):
        make_fake_imagenet(tmp_path, **SMALL)
    assert real.read_bytes() == b"a week of downloading"


def test_other_flags_in_the_same_folder_are_refused(tmp_path: Path) -> None:
    make_fake_imagenet(tmp_path, **SMALL)
    with pytest.raises(UserError, match="seed=0"):
        make_fake_imagenet(tmp_path, seed=1, **SMALL)


def test_a_changed_file_is_not_overwritten(tmp_path: Path) -> None:
    make_fake_imagenet(tmp_path, **SMALL)
    (tmp_path / "valprep.sh").write_text("my own script\n")
    with pytest.raises(UserError, match=r"valprep\.sh was changed"):
        make_fake_imagenet(tmp_path, **SMALL)


def test_an_interrupted_call_leaves_no_final_name(tmp_path: Path) -> None:
    def interrupt(num_images: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_fake_imagenet(tmp_path, progress=interrupt, **SMALL)
    assert list(tmp_path.iterdir()) == []


def test_a_killed_call_is_continued_by_the_next(tmp_path: Path) -> None:
    """A kill between two renames leaves the marker and a part of the files."""
    made = make_fake_imagenet(tmp_path, **SMALL)
    (tmp_path / "ILSVRC2012_img_val.tar").unlink()
    leftover = tmp_path / ".fake_imagenet.part"
    leftover.mkdir()
    (leftover / "ILSVRC2012_img_train.tar").write_bytes(b"half")
    assert make_fake_imagenet(tmp_path, **SMALL).files == made.files
    assert {path.name for path in tmp_path.iterdir()} == {*made.files, MARKER}


def test_two_calls_at_once_do_not_mix(tmp_path: Path) -> None:
    refusals: list[str] = []

    def second_call(num_images: int) -> None:
        if not refusals:
            with pytest.raises(PassingError) as error:
                make_fake_imagenet(tmp_path, **SMALL)
            refusals.append(str(error.value))

    make_fake_imagenet(tmp_path, progress=second_call, **SMALL)
    assert "another process is filling" in refusals[0]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"classes": 0}, "--classes 0"),
        ({"train_per_class": 0}, "--train-per-class 0"),
        ({"size": (4, 4)}, "--size 4x4"),
        ({"shape": "cube"}, "--shape cube"),
        ({"processes": 0}, "--processes 0"),
        ({"seed": -1}, "--seed -1"),
    ],
)
def test_values_out_of_range_are_named(
    tmp_path: Path, wrong: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        make_fake_imagenet(tmp_path, **(SMALL | wrong))
