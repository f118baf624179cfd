"""The optional JPEG kernel (jpeg_crop.c): built once, called through ctypes without the GIL.

`python -m train.data.jpeg` builds it beside this file; `make setup` does so where a C compiler and
the headers of libjpeg-turbo are there. It is linked with a copy of the libjpeg in Pillow's wheel,
which is put beside it: the two files can be copied to machines that have neither. Without the
kernel Pillow decodes, which is slower and needs nothing.

Written by hand because Pillow and torchvision decode whole images, and then crop: of training
images the loader of pytorch/examples makes less than half as many a second on the same cores, that
of torchvision.io about two thirds (benchmarks/loader.py, docs/performance.md).
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt

log = logging.getLogger("trainyard")

SOURCE = Path(__file__).with_name("jpeg_crop.c")
FLAGS = ("-O3", "-fPIC", "-shared", "-Wall", "-Wextra", "-Wl,-rpath,$ORIGIN")
CARRIED = "libjpeg-*.so.62*"  # in Pillow's wheel: ABI 62, as the headers of libjpeg-turbo have it
HINT = (
    "install a C compiler and libjpeg-turbo's headers (Debian: gcc libc6-dev libjpeg62-turbo-dev)"
)
ELSEWHERE = (
    "If you cannot install them, ask the administrators of this site, use conda (environment.yml), "
    "or build the kernel with `make setup` on another Linux machine of the same architecture and "
    "copy train/data/jpeg_crop-*.so and train/data/libjpeg-*.so* here."
)
Box = tuple[int, int, int, int]  # left, top, width, height


class Kernel:
    """The functions of the library; None or False means that Pillow must decode the image."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        self._size = library.jpeg_crop_size
        self._size.argtypes = [
            ctypes.c_char_p,
            ctypes.c_size_t,
            *[ctypes.POINTER(ctypes.c_int)] * 2,
        ]
        self._decode = library.jpeg_crop_decode
        self._decode.argtypes = [ctypes.c_char_p, ctypes.c_size_t, *[ctypes.c_int] * 10]
        self._decode.argtypes += [ctypes.c_void_p]

    def size(self, data: bytes) -> tuple[int, int] | None:
        """(width, height) of an image that the kernel can decode."""
        width, height = ctypes.c_int(), ctypes.c_int()
        if self._size(data, len(data), ctypes.byref(width), ctypes.byref(height)):
            return None
        return width.value, height.value

    def decode(
        self,
        data: bytes,
        box: Box,
        full: tuple[int, int],
        corner: tuple[int, int],
        flip: bool,
        out: npt.NDArray[np.uint8],
    ) -> bool:
        """Whether out [n, n, 3] now holds a part, from corner on, of box resized to full."""
        assert out.flags.c_contiguous and out.shape == (out.shape[0], out.shape[0], 3)
        where = out.ctypes.data
        return not self._decode(data, len(data), *box, *full, *corner, out.shape[0], flip, where)


@functools.lru_cache(maxsize=1)
def load_kernel() -> Kernel | None:
    """The kernel if it was built from this source for this machine, else None."""
    path = library_path()
    if not path.exists():
        return None
    try:
        return Kernel(path)
    except OSError as error:  # e.g. a node without libjpeg's run-time library
        log.warning("the JPEG kernel cannot be loaded (%s): Pillow decodes", error)
        return None


def library_path() -> Path:
    """The path of the library, named after its source, so that a stale one is never loaded."""
    digest = hashlib.sha256(SOURCE.read_bytes() + " ".join(FLAGS).encode()).hexdigest()[:12]
    return SOURCE.with_name(f"jpeg_crop-{platform.machine()}-{digest}.so")


def find_carried_libjpeg() -> Path | None:
    """The libjpeg inside Pillow's wheel, or None where Pillow uses the system's (conda, Debian)."""
    pillow = importlib.util.find_spec("PIL")
    if pillow is None or pillow.origin is None:
        return None
    libraries = Path(pillow.origin).parents[1] / "pillow.libs"
    return next(iter(sorted(libraries.glob(CARRIED))), None)


def build_kernel() -> str | None:
    """Builds the library; returns why it could not, or None."""
    path = library_path()
    if path.exists() and _can_load(path):
        return None
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    libjpeg = find_carried_libjpeg()
    problem = _compile(part, libjpeg)
    if problem:
        part.unlink(missing_ok=True)
        return problem
    beside = _copy_beside(libjpeg) if libjpeg else None
    part.replace(path)
    built = {*SOURCE.parent.glob(f"jpeg_crop-{platform.machine()}-*.so")}
    for stale in (built | {*SOURCE.parent.glob(CARRIED)}) - {path, beside}:
        stale.unlink(missing_ok=True)
    return None


def _can_load(path: Path) -> bool:
    """Whether it can be loaded: the libjpeg beside it may be missing."""
    try:
        Kernel(path)
    except OSError:
        return False
    return True


def _copy_beside(library: Path) -> Path:
    """A copy beside the source, where the kernel looks for it ($ORIGIN), on any machine."""
    target = SOURCE.with_name(library.name)
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    shutil.copy(library, part)
    part.replace(target)
    return target


def _compile(part: Path, libjpeg: Path | None) -> str | None:
    """Why the compiler could not write part, in one line, or None."""
    link = str(libjpeg) if libjpeg else "-ljpeg"
    try:
        compiler = _find_compiler()
        if not compiler:
            return f"no C compiler; {HINT}"
        command = [*compiler, *FLAGS, "-o", str(part), str(SOURCE), link, "-lm"]
        done = subprocess.run(command, capture_output=True, text=True)
    except (OSError, ValueError) as error:  # no such program, or a quote without its partner
        return (
            f"CC={os.environ.get('CC', '')!r} cannot be run ({error}); unset it or name a compiler"
        )
    if done.returncode == 0:
        return None
    lines = done.stderr.splitlines() or [f"{compiler[0]} ended with {done.returncode}"]
    reason = next((line for line in lines if "error" in line), lines[0])
    return f"{reason.strip()[:200]}; {HINT}"


def _find_compiler() -> list[str]:
    """The words of CC (it may be `ccache gcc`), else the system's compiler; empty without one."""
    wanted = shlex.split(os.environ.get("CC", ""))
    found = shutil.which("cc") or shutil.which("gcc")
    return wanted or ([found] if found else [])


def main() -> int:
    """Builds the kernel; a failure is not an error, since Pillow decodes, too."""
    problem = build_kernel()
    if problem:
        print(f"JPEG kernel not built, Pillow will decode (slower): {problem}\n{ELSEWHERE}")
    else:
        print(f"JPEG kernel: {library_path().name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
