"""The JPEG kernel against Pillow: the same pixels to rounding, and every oddity left to Pillow."""

from __future__ import annotations

import io
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dataset.errors import DataError
from tests.train.data.jpeg_fuzz import fuzz, make_picture, to_jpeg
from train.data import jpeg
from train.data.decode import UNIFORMS_PER_SAMPLE, KernelDecoder
from train.data.jpeg import Kernel, build_kernel, find_carried_libjpeg, load_kernel

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def kernel() -> Kernel:
    """Built here: the machine of the tests has a compiler and the headers (`make system`)."""
    assert build_kernel() is None
    load_kernel.cache_clear()
    kernel = load_kernel()
    assert kernel is not None
    return kernel


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
    assert Image.MAX_IMAGE_PIXELS is not None
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
    assert fuzz(kernel, num_images=300) > 100


def test_the_sanitizers_find_nothing_in_damaged_bytes_and_odd_boxes(tmp_path: Path) -> None:
    """The same kernel built with AddressSanitizer and UndefinedBehaviorSanitizer."""
    checked = tmp_path / "checked.so"
    libjpeg = str(find_carried_libjpeg() or "-ljpeg")
    flags = ["-g", "-O1", "-fPIC", "-shared", "-fsanitize=address,undefined"]
    flags += ["-fno-sanitize-recover=all"]
    subprocess.run(["gcc", *flags, "-o", checked, jpeg.SOURCE, libjpeg, "-lm"], check=True)
    asan = subprocess.run(["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True)
    env = os.environ | {
        "LD_PRELOAD": asan.stdout.strip(),
        "LD_LIBRARY_PATH": str(Path(libjpeg).parent),
        "ASAN_OPTIONS": "detect_leaks=0",  # of Python itself, at its end
    }
    command = [sys.executable, "-m", "tests.train.data.jpeg_fuzz", str(checked)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_it_runs_from_a_folder_with_nothing_but_its_two_files(
    kernel: Kernel, tmp_path: Path
) -> None:
    """As in a slot: HTCondor brings train/, and the site has neither compiler nor libjpeg."""
    libjpeg = find_carried_libjpeg()
    assert libjpeg is not None, "the tests' Pillow is a wheel"
    for path in (jpeg.library_path(), jpeg.SOURCE.with_name(libjpeg.name)):
        shutil.copy(path, tmp_path)
    code = (
        "import ctypes, sys; ctypes.CDLL(sys.argv[1]);"
        "print(*{l.split()[-1] for l in open('/proc/self/maps') if 'libjpeg' in l})"
    )
    command = [sys.executable, "-c", code, str(tmp_path / jpeg.library_path().name)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(tmp_path / libjpeg.name)]


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
def test_a_cc_that_cannot_be_run_is_no_error_and_told_with_other_ways(
    unbuilt: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    compiler: str,
) -> None:
    monkeypatch.setenv("CC", compiler)
    assert jpeg.main() == 0
    said = capsys.readouterr().out
    first, second = said.splitlines()
    assert first.startswith("JPEG kernel not built")
    assert "administrators" in second and "jpeg_crop-*.so" in second
    assert [path.name for path in unbuilt.iterdir()] == ["jpeg_crop.c"]
