"""Builds the make-believe libraries against the headers in the torch wheel, once a version."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import re
import shutil
import subprocess
import sysconfig
import tempfile
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = Path(__file__).with_name("csrc")
SITE = Path(sysconfig.get_paths()["purelib"])
RUNTIME = SITE / "nvidia/cu13/lib/libcudart.so.13"
NCCL = SITE / "nvidia/nccl/lib/libnccl.so.2"
HEADERS = SITE / "nvidia/cu13/include", SITE / "nvidia/nccl/include"
# Headers of the compiler, which the runtime's include and its wheel leaves out.
COMPILER_HEADERS = SITE / "triton/backends/nvidia/include/crt"
CACHE = ROOT / ".cache/gpu_sim"


def missing() -> str | None:
    """Why the simulator cannot be built here, or None."""
    if not shutil.which("g++") or not shutil.which("nm"):
        return "the simulated GPU needs g++ (make system)"
    absent = [path for path in (RUNTIME, NCCL, *HEADERS, COMPILER_HEADERS) if not path.exists()]
    return f"the simulated GPU needs {absent[0]}, of torch for CUDA 13" if absent else None


@functools.cache
def build() -> Path:
    """The folder of the libraries; the first who asks builds them (5 s), the others wait."""
    folder = CACHE / _fingerprint()
    if folder.exists():
        return folder
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
                _build_all(Path(scratch))
                (Path(scratch) / "lib").rename(folder)
    return folder


def simulated_environment() -> dict[str, str]:
    """What puts the make-believe CUDA under a process that is started with it."""
    lib = build()
    preload = f"{lib / 'libcudart.so.13'}:{lib / 'libnccl.so.2'}"
    return {"LD_PRELOAD": preload, "LD_LIBRARY_PATH": str(lib)}


def _fingerprint() -> str:
    digest = hashlib.sha256(f"{SITE} {metadata.version('torch')}".encode())
    for path in (*sorted(SOURCES.iterdir()), Path(__file__)):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _build_all(scratch: Path) -> None:
    lib, include = scratch / "lib", scratch / "include"
    lib.mkdir()
    include.mkdir()
    (include / "crt").symlink_to(COMPILER_HEADERS)
    flags = [f"-I{path}" for path in (include, *HEADERS)]
    parts = ("devices", "streams", "memory", "launches")
    objects = [_compile(scratch, f"{name}.cpp", flags) for name in parts]
    # Every call of the real runtime that is not simulated answers "not supported".
    objects.append(_compile_rest(scratch, objects, RUNTIME, r"(__)?cuda\w+", 801))
    (scratch / "version").write_text("libcudart.so.13 { global: *; };")
    versioned = f"-Wl,--version-script={scratch / 'version'}"
    _link(lib / "libcudart.so.13", objects, versioned, "-ldl", "-lpthread")
    objects = [_compile(scratch, "nccl.cpp", flags)]
    objects.append(_compile_rest(scratch, objects, NCCL, r"p?nccl[A-Z]\w+", 3))
    _link(lib / "libnccl.so.2", objects, f"-L{lib}", "-l:libcudart.so.13", "-lpthread", "-lrt")
    _link(lib / "libcuda.so.1", [_compile(scratch, "driver.c", [])])
    _link(lib / "libnvidia-ml.so.1", [_compile(scratch, "nvml.cpp", [])], "-ldl")


def _compile(scratch: Path, source: str, flags: list[str], folder: Path = SOURCES) -> Path:
    out = scratch / f"{source}.o"
    compiler = ["g++", "-std=c++17"] if source.endswith(".cpp") else ["gcc", "-w"]
    _run(*compiler, "-O1", "-fPIC", *flags, "-c", str(folder / source), "-o", str(out))
    return out


def _compile_rest(scratch: Path, objects: list[Path], real: Path, names: str, code: int) -> Path:
    """The calls of a real library that none of the objects has: each returns the code."""
    calls = {name for name in _symbols(real, "-D") if re.fullmatch(names, name)}
    for path in objects:
        calls -= _symbols(path)
    source = f"rest_of_{real.name}.c"
    lines = [f"int {name}() {{ return {code}; }}\n" for name in sorted(calls)]
    (scratch / source).write_text("".join(lines))
    return _compile(scratch, source, [], scratch)


def _symbols(path: Path, *flags: str) -> set[str]:
    lines = _run("nm", "--defined-only", *flags, str(path)).splitlines()
    return {line.split()[2].partition("@")[0] for line in lines if len(line.split()) == 3}


def _link(out: Path, objects: list[Path], *flags: str) -> None:
    soname = f"-Wl,-soname,{out.name}"
    _run("g++", "-shared", "-o", str(out), *map(str, objects), soname, *flags)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}:\n{done.stderr}"
    return done.stdout
