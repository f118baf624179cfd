"""The JPEG kernel against Pillow: the same pixels to rounding, and every oddity left to Pillow."""

from __future__ import annotations

import io
import random
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dataset.errors import DataError
from train import jpeg
from train.decode import UNIFORMS_PER_SAMPLE, KernelDecoder
from train.jpeg import Kernel, build_kernel, load_kernel


@pytest.fixture(scope="module")
def kernel() -> Kernel:
    """Built here: the machine of the tests has a compiler and the headers (`make system`)."""
    assert build_kernel() is None
    load_kernel.cache_clear()
    kernel = load_kernel()
    assert kernel is not None
    return kernel


def make_picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Smooth colours with edges and noise: what subsampling and filters can get wrong."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (height // 8 + 2, width // 8 + 2, 3), dtype=np.uint8)
    smooth = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
    noisy = np.asarray(smooth).astype(int) + rng.normal(0, 8, (height, width, 3))
    noisy[height // 3 : height // 2, width // 4 : width // 2] = (250, 10, 30)
    return Image.fromarray(noisy.clip(0, 255).astype(np.uint8))


def to_jpeg(picture: Image.Image, **options: object) -> bytes:
    file = io.BytesIO()
    picture.save(file, "JPEG", **({"quality": 90} | options))
    return file.getvalue()


def decode(kernel: Kernel, data: bytes, box: tuple[int, int, int, int], size: int) -> np.ndarray:
    out = np.zeros((size, size, 3), dtype=np.uint8)
    assert kernel.decode(data, box, (size, size), (0, 0), False, out)
    return out


def expect(data: bytes, box: tuple[int, int, int, int], size: int) -> np.ndarray:
    left, top, width, height = box
    image = Image.open(io.BytesIO(data)).convert("RGB")
    crop = image.crop((left, top, left + width, top + height))
    return np.asarray(crop.resize((size, size), Image.Resampling.BILINEAR))


@pytest.mark.parametrize("subsampling", [0, 1, 2], ids=["444", "422", "420"])
@pytest.mark.parametrize("progressive", [False, True])
def test_random_crops_differ_from_pillow_by_rounding(
    kernel: Kernel, subsampling: int, progressive: bool
) -> None:
    picture = make_picture(333, 251)
    data = to_jpeg(picture, subsampling=subsampling, progressive=progressive)
    assert kernel.size(data) == (333, 251)
    rng = random.Random(0)
    for _ in range(25):
        width, height = rng.randint(1, 333), rng.randint(1, 251)
        box = (rng.randint(0, 333 - width), rng.randint(0, 251 - height), width, height)
        size = rng.choice([1, 32, 97, 224])
        difference = decode(kernel, data, box, size).astype(int) - expect(data, box, size)
        assert np.abs(difference).max() <= 2, box
        assert abs(difference.mean()) < 0.05
        assert np.square(difference).mean() < 255**2 / 10**5  # a PSNR of 50 dB


@pytest.mark.parametrize(
    ("width", "height", "size"),
    [(400, 2470, 64), (3310, 3310, 64), (600, 8645, 224), (30000, 16, 1), (16, 30000, 1)],
)
def test_white_stays_white_however_much_it_shrinks(
    kernel: Kernel, width: int, height: int, size: int
) -> None:
    data = to_jpeg(Image.new("RGB", (width, height), "white"))
    assert (decode(kernel, data, (0, 0, width, height), size) == 255).all()


@pytest.mark.parametrize(
    ("width", "height", "sizes"),
    [(2896, 2896, (32, 96, 224)), (20000, 64, (1, 32, 224)), (64, 20000, (1, 32, 224))],
)
def test_large_noise_shrinks_as_pillow_shrinks_it(
    kernel: Kernel, width: int, height: int, sizes: tuple[int, ...]
) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    data = to_jpeg(Image.fromarray(noise))
    box = (0, 0, width, height)
    for size in sizes:
        difference = decode(kernel, data, box, size).astype(int) - expect(data, box, size)
        assert abs(difference.mean()) < 0.05, size
        assert np.square(difference).mean() < 255**2 / 10**5, size  # a PSNR of 50 dB


def test_a_window_of_a_resize_is_pillows_resize_then_crop(kernel: Kernel) -> None:
    data = to_jpeg(make_picture(500, 375))
    out = np.empty((224, 224, 3), dtype=np.uint8)
    assert kernel.decode(data, (0, 0, 500, 375), (341, 256), (58, 16), False, out)
    whole = Image.open(io.BytesIO(data)).resize((341, 256), Image.Resampling.BILINEAR)
    wanted = np.asarray(whole.crop((58, 16, 58 + 224, 16 + 224)))
    assert np.abs(out.astype(int) - wanted).max() <= 1


def test_flip_mirrors_the_columns(kernel: Kernel) -> None:
    data = to_jpeg(make_picture(120, 90))
    plain = decode(kernel, data, (10, 5, 80, 70), 64)
    flipped = np.empty_like(plain)
    assert kernel.decode(data, (10, 5, 80, 70), (64, 64), (0, 0), True, flipped)
    assert np.array_equal(flipped, plain[:, ::-1])


def test_grey_images_become_rgb(kernel: Kernel) -> None:
    data = to_jpeg(make_picture(100, 80).convert("L"))
    box = (3, 2, 90, 70)
    assert np.abs(decode(kernel, data, box, 50).astype(int) - expect(data, box, 50)).max() <= 1


def test_oddities_are_left_to_pillow(kernel: Kernel) -> None:
    picture = make_picture(100, 80)
    png = io.BytesIO()
    picture.save(png, "PNG")
    whole = to_jpeg(picture)
    cmyk = to_jpeg(picture.convert("CMYK"))
    for data in (png.getvalue(), cmyk, whole[:-500], whole[:100], b"", b"\xff\xd8" * 100):
        assert kernel.size(data) is None


def declare_size(data: bytes, width: int, height: int) -> bytes:
    """The same JPEG with another size in its header."""
    at = data.index(b"\xff\xc0") + 5  # marker, length, precision; then height and width
    return data[:at] + height.to_bytes(2, "big") + width.to_bytes(2, "big") + data[at + 4 :]


def test_more_pixels_than_pillow_takes_are_left_to_pillow(kernel: Kernel) -> None:
    small = to_jpeg(make_picture(100, 80))
    most = 2 * Image.MAX_IMAGE_PIXELS
    assert 13377 * 13377 <= most < 13378 * 13377
    assert kernel.size(declare_size(small, 13377, 13377)) == (13377, 13377)
    out = np.empty((32, 32, 3), dtype=np.uint8)
    for width, height in ((13378, 13377), (65500, 65500)):
        bomb = declare_size(small, width, height)
        assert kernel.size(bomb) is None
        assert not kernel.decode(bomb, (0, 0, 50, 50), (32, 32), (0, 0), False, out)
        with pytest.raises(DataError, match=r"cannot decode n01/bomb\.JPEG: .*exceeds limit"):
            KernelDecoder(kernel).val(bomb, "n01/bomb.JPEG", out)
        with pytest.raises(DataError, match=r"cannot decode n01/bomb\.JPEG: .*exceeds limit"):
            KernelDecoder(kernel).train(
                bomb, "n01/bomb.JPEG", np.full(UNIFORMS_PER_SAMPLE, 0.5), out
            )


def test_a_box_outside_the_image_is_refused(kernel: Kernel) -> None:
    data = to_jpeg(make_picture(100, 80))
    out = np.empty((32, 32, 3), dtype=np.uint8)
    for box in ((-1, 0, 50, 50), (60, 0, 50, 50), (0, 40, 50, 50)):
        assert not kernel.decode(data, box, (32, 32), (0, 0), False, out)


def test_damaged_bytes_never_crash(kernel: Kernel) -> None:
    whole = to_jpeg(make_picture(160, 120))
    rng = random.Random(1)
    out = np.empty((64, 64, 3), dtype=np.uint8)
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 20)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        size = kernel.size(bytes(data))
        if size:
            box = (0, 0, min(size[0], 160), min(size[1], 120))
            kernel.decode(bytes(data), box, (64, 64), (0, 0), False, out)


@pytest.fixture
def unbuilt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The source alone in a folder of its own, where the build then happens."""
    source = tmp_path / "jpeg_crop.c"
    source.write_bytes(jpeg.SOURCE.read_bytes())
    monkeypatch.setattr(jpeg, "SOURCE", source)
    return tmp_path


def test_cc_may_have_several_words(unbuilt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "env LC_ALL=C cc")  # stands for `ccache gcc`
    assert build_kernel() is None
    assert jpeg.library_path().parent == unbuilt and Kernel(jpeg.library_path())


@pytest.mark.parametrize("compiler", ["/no/such/cc -m64", "env no-such-cc", "false", "'gcc"])
def test_a_cc_that_cannot_be_run_is_one_line_and_no_error(
    unbuilt: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    compiler: str,
) -> None:
    monkeypatch.setenv("CC", compiler)
    assert jpeg.main() == 0
    said = capsys.readouterr().out
    assert said.startswith("JPEG kernel not built") and said.count("\n") == 1
    assert [path.name for path in unbuilt.iterdir()] == ["jpeg_crop.c"]
