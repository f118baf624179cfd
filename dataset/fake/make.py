"""A fake ImageNet: ILSVRC-shaped archives of drawn pictures, the same bytes for the same seed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from dataset.durable import lock_file
from dataset.errors import PassingError, UserError
from dataset.fake.archives import FakeImageNet, write_archives
from dataset.fake.draw import CountPictures, open_drawer
from dataset.names import KAGGLE_ZIP, SOLUTION, TRAIN_TAR, VAL_TAR, VALPREP
from dataset.untrusted import parse_json

MARKER = "fake_imagenet.json"
DEFAULT_SIZE = (500, 375)
SMALL_WORK_PIXELS = 20_000_000  # below this a pool costs more than it saves (about 1 s of one core)


@dataclass(frozen=True)
class Made:
    """What was made, or found made by the same call before."""

    folder: Path
    files: dict[str, int]
    num_images: int
    mean_bytes: float
    was_there: bool


def make_fake_imagenet(
    out: Path | str,
    *,
    classes: int = 10,
    train_per_class: int = 50,
    val_per_class: int = 10,
    size: tuple[int, int] = DEFAULT_SIZE,
    shape: str = "nested",
    seed: int = 0,
    oddities: bool = False,
    processes: int | None = None,
    progress: CountPictures | None = None,
) -> Made:
    """The archives in `out`, made once: a second call with the same values finds them there."""
    spec = FakeImageNet(classes, train_per_class, val_per_class, size, shape, seed, oddities)
    num_processes = choose_processes(processes, spec.num_train + spec.num_val, size)
    out = Path(out)
    found = _find_made(out, spec)
    if found:
        return found
    out.mkdir(parents=True, exist_ok=True)
    with work_folder(out) as work:
        with open_drawer(num_processes, progress) as draw:
            num_bytes = write_archives(spec, work, draw)
        files = {path.name: path.stat().st_size for path in sorted(work.iterdir())}
        mean_bytes = num_bytes / (spec.num_train + spec.num_val)
        # The marker goes first: files that a killed call leaves are then known to be ours.
        marker = {"spec": _as_json(spec), "files": files, "mean_bytes": round(mean_bytes)}
        (work / MARKER).write_text(json.dumps(marker, indent=1) + "\n")
        for name in (MARKER, *files):
            (work / name).replace(out / name)
    return Made(out, files, spec.num_train + spec.num_val, mean_bytes, was_there=False)


def _find_made(out: Path, spec: FakeImageNet) -> Made | None:
    """What an earlier call with the same values left here; anything else in the way is refused."""
    names = {TRAIN_TAR, VAL_TAR, KAGGLE_ZIP, VALPREP, SOLUTION}
    present = {name: (out / name).stat().st_size for name in names if (out / name).exists()}
    if not (out / MARKER).exists():
        if present:
            raise UserError(
                f"{out} already holds {', '.join(sorted(present))}, not made by this command; "
                "give another --out"
            )
        return None
    files, made_from, mean_bytes = read_marker(out)
    if made_from != _as_json(spec):
        differing = [key for key, value in _as_json(spec).items() if made_from.get(key) != value]
        was = ", ".join(f"{key}={made_from.get(key)}" for key in differing)
        raise UserError(
            f"{out} holds another fake ImageNet ({was}); remove it or give another --out"
        )
    changed = [name for name, size in present.items() if files.get(name) != size]
    if changed:
        raise UserError(f"{out / changed[0]} was changed after it was made; give another --out")
    if present != files:
        return None
    return Made(out, files, spec.num_train + spec.num_val, mean_bytes, was_there=True)


def read_marker(out: Path) -> tuple[dict[str, int], dict[str, object], float]:
    """(files, values, mean size of a picture) of the call that made what lies here."""
    try:
        marker = parse_json((out / MARKER).read_bytes())
        return marker["files"], marker["spec"], marker["mean_bytes"]
    except (ValueError, KeyError, TypeError):
        raise UserError(
            f"{out / MARKER} is damaged; remove the folder or give another --out"
        ) from None


def _as_json(spec: FakeImageNet) -> dict[str, object]:
    return asdict(spec) | {"size": list(spec.size)}


@contextmanager
def work_folder(out: Path) -> Iterator[Path]:
    """A temporary folder beside the final names, for one process at a time."""
    work = out / ".fake_imagenet.part"
    lock_path = out / ".fake_imagenet.lock"
    try:
        lock, _ = lock_file(lock_path)
    except BlockingIOError:
        raise PassingError(f"another process is filling {out}; wait for it to end") from None
    try:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)
        lock_path.unlink(missing_ok=True)
        os.close(lock)


def choose_processes(wanted: int | None, num_images: int, size: tuple[int, int]) -> int:
    """The number asked for, else one per core, or just one for little work."""
    if wanted is not None:
        if wanted < 1:
            raise UserError(f"--processes {wanted} is out of range; give 1 or more")
        return wanted
    pixels = num_images * size[0] * size[1]
    return 1 if pixels < SMALL_WORK_PIXELS else len(os.sched_getaffinity(0))
