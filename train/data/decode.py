"""One image from bytes to pixels, by Pillow or by the JPEG kernel (no torch)."""

from __future__ import annotations

import io
import math
import warnings

import numpy as np
import numpy.typing as npt
from PIL import Image, UnidentifiedImageError

from dataset.errors import DataError, UserError
from train.data.jpeg import Kernel, load_kernel

Pixels = npt.NDArray[np.uint8]  # [size, size, 3]
Uniforms = npt.NDArray[np.float64]

CROP_TRIES = 10
UNIFORMS_PER_SAMPLE = 4 * CROP_TRIES + 1  # area, ratio, top and left of each try, and the flip
MIN_AREA = 0.08
LOG_RATIO = math.log(4 / 3)
MAX_RESIZED_PIXELS = 1 << 24  # 64 MB in Pillow: only images above 200:1 come to more at 224
VAL_RESIZE = 256 / 224  # the shorter side before the centre crop, as pytorch/examples has it


def ignore_pillow_warnings() -> None:
    """Silences the warnings of Pillow's modules for good, e.g. about EXIF, which is not used here.

    Done once, at import: catch_warnings around each image is not thread-safe, and two loader
    threads could leave every warning of the process ignored.
    """
    warnings.filterwarnings("ignore", module=r"PIL\.")


ignore_pillow_warnings()


def decode_train(data: bytes, name: str, size: int, uniforms: Uniforms) -> Pixels:
    """A random resized crop with a random flip, both determined by uniform random numbers."""
    image = open_image(data, name)
    left, top, width, height = choose_crop(image.width, image.height, uniforms)
    crop = image.crop((left, top, left + width, top + height))
    crop = crop.resize((size, size), Image.Resampling.BILINEAR)
    if uniforms[-1] < 0.5:
        crop = crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return np.asarray(crop)


def decode_val(data: bytes, name: str, size: int) -> Pixels:
    """The centre of the resized image: pixel for pixel torchvision's Resize and CenterCrop."""
    image = open_image(data, name)
    full, (left, top) = centre_window(image.width, image.height, size)
    if full[0] * full[1] > MAX_RESIZED_PIXELS:
        return np.asarray(_resize_window(image, full, left, top, size))
    if full != image.size:
        image = image.resize(full, Image.Resampling.BILINEAR)
    return np.asarray(image.crop((left, top, left + size, top + size)))


def _resize_window(
    image: Image.Image, full: tuple[int, int], left: int, top: int, size: int
) -> Image.Image:
    """The same window without resizing the rest: a 1 x 65500 image would take 6 GB.

    Not used for all images, because the filter's weights are rounded differently (one level).
    """
    across, down = image.width / full[0], image.height / full[1]
    box = (left * across, top * down, (left + size) * across, (top + size) * down)
    return image.resize((size, size), Image.Resampling.BILINEAR, box=box)


class PilDecoder:
    """Pillow: the pixels that torchvision's transforms give."""

    name = "pil"
    releases_gil = False  # not all the time: with more than two cores its threads would wait

    def train(self, data: bytes, name: str, uniforms: Uniforms, out: Pixels) -> None:
        out[:] = decode_train(data, name, out.shape[0], uniforms)

    def val(self, data: bytes, name: str, out: Pixels) -> None:
        out[:] = decode_val(data, name, out.shape[0])


class KernelDecoder:
    """libjpeg-turbo on the rows and columns of the crop; unusual images are left to Pillow."""

    name = "kernel"
    releases_gil = True

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._pil = PilDecoder()

    def __reduce__(self) -> tuple[object, ...]:
        return choose_decoder, ("kernel",)

    def train(self, data: bytes, name: str, uniforms: Uniforms, out: Pixels) -> None:
        size = self._kernel.size(data)
        if size is not None:
            box, side = choose_crop(*size, uniforms), out.shape[0]
            flip = bool(uniforms[-1] < 0.5)
            if self._kernel.decode(data, box, (side, side), (0, 0), flip, out):
                return
        self._pil.train(data, name, uniforms, out)

    def val(self, data: bytes, name: str, out: Pixels) -> None:
        size = self._kernel.size(data)
        if size is not None:
            full, corner = centre_window(*size, out.shape[0])
            if self._kernel.decode(data, (0, 0, *size), full, corner, False, out):
                return
        self._pil.val(data, name, out)


Decoder = PilDecoder | KernelDecoder


def choose_decoder(wanted: str) -> Decoder:
    """The decoder by name; auto is the kernel where it was built."""
    if wanted not in ("auto", "kernel", "pil"):
        raise UserError(f"decoder {wanted!r} is none of 'auto', 'kernel' and 'pil'")
    kernel = None if wanted == "pil" else load_kernel()
    if kernel is not None:
        return KernelDecoder(kernel)
    if wanted == "kernel":
        raise UserError(
            "the JPEG kernel is not built; run `python -m train.data.jpeg`, it says why"
        )
    return PilDecoder()


def centre_window(width: int, height: int, size: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """(size after the resize, corner of the centre crop), rounded as torchvision does."""
    short = int(size * VAL_RESIZE)
    if width <= height:
        full = (short, int(short * height / width))
    else:
        full = (int(short * width / height), short)
    return full, (round((full[0] - size) / 2.0), round((full[1] - size) / 2.0))


def choose_crop(width: int, height: int, uniforms: Uniforms) -> tuple[int, int, int, int]:
    """(left, top, width, height) of a crop of 8-100 % of the area and a ratio of 3/4 to 4/3."""
    for t in range(CROP_TRIES):
        u_area, u_ratio, u_top, u_left = uniforms[4 * t : 4 * t + 4]
        area = width * height * (MIN_AREA + (1 - MIN_AREA) * u_area)
        ratio = math.exp((2 * u_ratio - 1) * LOG_RATIO)
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return int(u_left * (width - w + 1)), int(u_top * (height - h + 1)), w, h
    return _central_crop(width, height)


def _central_crop(width: int, height: int) -> tuple[int, int, int, int]:
    """The largest centred crop whose ratio is allowed: for very long or very tall images."""
    w, h = width, height
    if width / height < 3 / 4:
        h = round(width / (3 / 4))
    elif width / height > 4 / 3:
        w = round(height * (4 / 3))
    return (width - w) // 2, (height - h) // 2, w, h


def open_image(data: bytes, name: str) -> Image.Image:
    """The whole picture in RGB."""
    try:
        image = Image.open(io.BytesIO(data))
        if image.format == "EPS":  # a program, which Pillow has Ghostscript run
            raise DataError(f"cannot decode {name}: it is PostScript")
        # The 16 bits of a PNG are mode "I" before Pillow 11.3.
        is_deep = image.mode.startswith("I;16") or (image.mode, image.format) == ("I", "PNG")
        return _from_16_bits(image) if is_deep else image.convert("RGB")
    except UnidentifiedImageError:  # its text only has the address of our buffer
        reason = "its first bytes are not those of an image" if data else "it is empty (0 bytes)"
        raise DataError(f"cannot decode {name}: {reason}") from None
    except (DataError, MemoryError):
        raise
    except Exception as error:  # Pillow's readers raise errors of any kind
        reason = str(error).replace("\n", " ") or type(error).__name__
        raise DataError(f"cannot decode {name}: {reason}") from None


def _from_16_bits(image: Image.Image) -> Image.Image:
    """The upper 8 bits of each pixel: Pillow would make white of all that is above 255."""
    grey = np.asarray(image).astype(np.int64)
    return Image.fromarray((grey >> 8).clip(0, 255).astype(np.uint8)).convert("RGB")
