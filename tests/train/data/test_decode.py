"""Decoding against Pillow and torchvision: the same pixels and crops, a name for bad bytes."""

from __future__ import annotations

import io
import math
import random
import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torchvision import transforms

from dataset.errors import DataError
from dataset.fake.picture import draw_picture
from train.data.decode import (
    UNIFORMS_PER_SAMPLE,
    choose_crop,
    decode_train,
    decode_val,
    ignore_pillow_warnings,
)
from train.data.sampler import sample_uniforms

SIZES = [(500, 375), (375, 500), (224, 224), (256, 256), (257, 300), (100, 91), (1000, 50), (31, 7)]


def encode(width: int, height: int, mode: str = "RGB", kind: str = "JPEG") -> bytes:
    """A picture with something in every corner."""
    y, x = np.mgrid[0:height, 0:width]
    waves = [np.sin(x / 7 + c) * 90 + np.cos(y / 5 - c) * 30 + 128 for c in range(3)]
    image = Image.fromarray(np.stack(waves, axis=-1).clip(0, 255).astype(np.uint8))
    buffer = io.BytesIO()
    image.convert(mode).save(buffer, kind, **({"quality": 92} if kind == "JPEG" else {}))
    return buffer.getvalue()


def uniforms_of(number: int) -> np.ndarray:
    drawn: np.ndarray = sample_uniforms(0, 0, np.array([number]), UNIFORMS_PER_SAMPLE)[0]
    return drawn


@pytest.mark.parametrize("size", [224, 64, 33])
@pytest.mark.parametrize(("width", "height"), SIZES)
def test_validation_pixels_are_torchvisions(width: int, height: int, size: int) -> None:
    data = encode(width, height)
    image = Image.open(io.BytesIO(data)).convert("RGB")
    steps = transforms.Compose(
        [transforms.Resize(int(size * 256 / 224)), transforms.CenterCrop(size)]
    )
    found = decode_val(data, "x.JPEG", size)
    assert found.shape == (size, size, 3)
    assert np.array_equal(found, np.asarray(steps(image)))


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_training_pixels_are_those_of_torchvisions_resized_crop(width: int, height: int) -> None:
    data = encode(width, height)
    image = Image.open(io.BytesIO(data)).convert("RGB")
    for number in range(8):
        uniforms = uniforms_of(number)
        left, top, w, h = choose_crop(width, height, uniforms)
        expected = transforms.functional.resized_crop(image, top, left, h, w, [64, 64])
        if uniforms[-1] < 0.5:
            expected = transforms.functional.hflip(expected)
        assert np.array_equal(decode_train(data, "x.JPEG", 64, uniforms), np.asarray(expected))


@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(0, 10**6))
def test_a_crop_lies_inside_its_image(width: int, height: int, number: int) -> None:
    left, top, w, h = choose_crop(width, height, uniforms_of(number))
    assert w > 0 and h > 0
    assert 0 <= left <= width - w
    assert 0 <= top <= height - h


def test_extreme_draws_stay_inside() -> None:
    for value in (0.0, np.nextafter(1.0, 0.0)):
        left, top, w, h = choose_crop(500, 375, np.full(UNIFORMS_PER_SAMPLE, value))
        assert 0 <= left <= 500 - w and 0 <= top <= 375 - h


@pytest.mark.parametrize(("width", "height"), [(500, 375), (375, 500), (900, 300), (64, 64)])
def test_crops_are_distributed_as_torchvisions(width: int, height: int) -> None:
    """Quartiles of area, ratio and place over 4,000 draws each; torchvision's own code draws."""
    torch.manual_seed(0)
    image = torch.empty(3, height, width)
    draw = transforms.RandomResizedCrop.get_params
    theirs = [draw(image, [0.08, 1.0], [3 / 4, 4 / 3]) for _ in range(4000)]  # top, left, h, w
    ours = [choose_crop(width, height, uniforms_of(number)) for number in range(4000)]

    def describe(left: float, top: float, w: float, h: float) -> list[float]:
        free_x, free_y = max(width - w, 1), max(height - h, 1)
        return [w * h / (width * height), math.log(w / h), left / free_x, top / free_y]

    a = np.array([describe(left, top, w, h) for top, left, h, w in theirs])
    b = np.array([describe(*crop) for crop in ours])
    points = [0.1, 0.25, 0.5, 0.75, 0.9]
    spread = np.array([1.0, 2 * math.log(4 / 3), 1.0, 1.0])
    difference = np.quantile(a, points, axis=0) - np.quantile(b, points, axis=0)
    assert abs(difference / spread).max() < 0.05


def test_an_image_without_room_for_a_crop_gets_torchvisions_central_one() -> None:
    for width, height in ((1000, 10), (10, 1000), (2, 1)):
        image = torch.empty(3, height, width)
        random.seed(0)
        top, left, h, w = transforms.RandomResizedCrop.get_params(image, [5.0, 6.0], [3 / 4, 4 / 3])
        uniforms = np.full(UNIFORMS_PER_SAMPLE, 0.999999)
        uniforms[1::4] = 0.0 if width > height else 0.999999  # a ratio that never fits
        assert choose_crop(width, height, uniforms) == (left, top, w, h)


def test_half_of_the_pictures_are_flipped() -> None:
    flips = [uniforms_of(number)[-1] < 0.5 for number in range(4000)]
    assert 0.46 < np.mean(flips) < 0.54


@pytest.mark.parametrize(
    ("mode", "kind"),
    [("CMYK", "JPEG"), ("L", "JPEG"), ("RGB", "PNG"), ("RGBA", "PNG"), ("P", "PNG"), ("LA", "PNG")],
)
def test_odd_kinds_of_images_are_what_pillow_converts_to_rgb(mode: str, kind: str) -> None:
    data = encode(100, 80, mode, kind)
    image = Image.open(io.BytesIO(data)).convert("RGB")
    steps = transforms.Compose([transforms.Resize(73), transforms.CenterCrop(64)])
    assert np.array_equal(decode_val(data, "x.JPEG", 64), np.asarray(steps(image)))
    assert decode_train(data, "x.JPEG", 64, uniforms_of(0)).shape == (64, 64, 3)


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_truncated_and_empty_files_are_named(kind: str) -> None:
    whole = encode(120, 90, kind=kind)
    for data in (b"", whole[:10], whole[: len(whole) // 2], b"not an image at all"):
        for decode in (lambda d: decode_val(d, "n01/odd.JPEG", 32), decode_train_first):
            with pytest.raises(DataError, match=r"cannot decode n01/odd\.JPEG: ") as error:
                decode(data)
            assert "\n" not in str(error.value)


def decode_train_first(data: bytes) -> np.ndarray:
    return decode_train(data, "n01/odd.JPEG", 32, uniforms_of(0))


JPEG, PNG = draw_picture(0, 0, 1, 2, (64, 64)).data, encode(40, 30, kind="PNG")


@settings(max_examples=300)
@given(st.sampled_from([JPEG, PNG]), st.data())
def test_damaged_bytes_give_pixels_or_a_data_error_and_no_other_crash(
    data: bytes, draw: st.DataObject
) -> None:
    damaged = bytearray(data)
    for _ in range(draw.draw(st.integers(1, 12))):
        damaged[draw.draw(st.integers(0, len(data) - 1))] = draw.draw(st.integers(0, 255))
    keep = draw.draw(st.integers(0, len(data)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a warning would be printed once for each bad image
        ignore_pillow_warnings()
        try:
            assert decode_val(bytes(damaged[:keep]), "x", 16).shape == (16, 16, 3)
        except DataError as error:
            assert "cannot decode x" in str(error)


ROOT = Path(__file__).resolve().parents[3]
DECODE_ODD = """
import sys, warnings
from train.data.decode import decode_val
assert decode_val(sys.stdin.buffer.read(), "x", 16).shape == (16, 16, 3)
try:
    warnings.warn("of somebody else")
except UserWarning:
    print("heard")
"""


def test_importing_the_decoder_silences_pillow_and_nobody_else() -> None:
    file = io.BytesIO()
    broken_exif = b"Exif\0\0MM\0*\0\0\0\x08\0\x04"  # four entries, none there
    Image.new("RGB", (40, 30)).save(file, "JPEG", exif=broken_exif)
    with pytest.warns(UserWarning, match="EXIF"):
        Image.open(io.BytesIO(file.getvalue()))
    command = [sys.executable, "-W", "error", "-c", DECODE_ODD]
    done = subprocess.run(command, input=file.getvalue(), capture_output=True, cwd=ROOT)
    assert (done.stdout.strip(), done.stderr) == (b"heard", b"")


def test_two_images_at_once_leave_warnings_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second image is opened while the first is, and closed after it."""
    second_is_open, first_is_done = threading.Event(), threading.Event()
    really_open = Image.open
    first, second = encode(40, 30), encode(50, 30)

    def open_in_turn(file: io.BytesIO) -> Image.Image:
        if file.getvalue() == first:
            assert second_is_open.wait(30)
        else:
            second_is_open.set()
            assert first_is_done.wait(30)
        return really_open(file)

    monkeypatch.setattr(Image, "open", open_in_turn)
    before = list(warnings.filters)
    with ThreadPoolExecutor(2) as pool:
        tasks = [pool.submit(decode_val, data, "x", 16) for data in (first, second)]
        tasks[0].add_done_callback(lambda _: first_is_done.set())
        for task in tasks:
            task.result()
    assert list(warnings.filters) == before


LONG = """
import io, resource, sys
from PIL import Image
from train.data.decode import choose_decoder
import numpy as np
decoder = choose_decoder(sys.argv[1])
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (200 << 20), resource.RLIM_INFINITY))
for kind, width, height in (("JPEG", 1, 65500), ("JPEG", 65500, 1), ("PNG", 1, 1_000_000)):
    image = Image.new("RGB", (width, height), (200, 40, 90))
    buffer = io.BytesIO()
    image.save(buffer, kind)
    out = np.zeros((224, 224, 3), np.uint8)
    decoder.val(buffer.getvalue(), "long", out)
    assert abs(out.astype(int) - (200, 40, 90)).max() <= 3, out
    decoder.train(buffer.getvalue(), "long", np.full(41, 0.5), out)
    assert abs(out.astype(int) - (200, 40, 90)).max() <= 3, out
"""


@pytest.mark.parametrize("decoder", ["pil", "auto"])
def test_a_very_long_image_takes_no_more_memory_than_another(decoder: str) -> None:
    """Its shorter side of 1 pixel becomes 256, and the longer one 16.8 million: 6 GB, if made."""
    command = [sys.executable, "-c", LONG, decoder]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_a_window_alone_has_the_pixels_of_the_whole_resize(
    width: int, height: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = encode(width, height)
    whole = decode_val(data, "x.JPEG", 64).astype(int)
    monkeypatch.setattr("train.data.decode.MAX_RESIZED_PIXELS", 0)
    assert abs(decode_val(data, "x.JPEG", 64) - whole).max() <= 1


def test_grey_of_16_bits_keeps_its_upper_8() -> None:
    """Pillow's own conversion clips at 255: nearly every picture would be white."""
    grey = np.linspace(0, 65535, 48 * 48).astype(np.uint16).reshape(48, 48)
    file = io.BytesIO()
    Image.fromarray(grey).save(file, "PNG")
    found = decode_val(file.getvalue(), "x.png", 42)[..., 0]  # the resize leaves 48 x 48 as it is
    assert np.array_equal(found, (grey >> 8)[3:45, 3:45])


def test_postscript_is_no_image() -> None:
    """Pillow would have Ghostscript run it, where that is installed."""
    file = io.BytesIO()
    Image.new("RGB", (40, 30)).save(file, "EPS")
    with pytest.raises(DataError, match=r"cannot decode x\.jpg: it is PostScript"):
        decode_val(file.getvalue(), "x.jpg", 16)


def test_what_any_reader_of_pillow_raises_is_a_data_error() -> None:
    """Web images are often of another format than their name says; BLP's reader has own errors."""
    file = io.BytesIO()
    Image.new("P", (40, 30)).save(file, "BLP")
    damaged = bytearray(file.getvalue())
    damaged[4] = 0xFF  # its compression
    with pytest.raises(DataError, match=r"cannot decode x\.jpg: Unknown BLP compression"):
        decode_val(bytes(damaged), "x.jpg", 16)
