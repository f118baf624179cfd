"""What a run will read and where it will write, and what of that is wrong: data, space, network."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import urlsplit

from dataset.archive.output_folder import find_unfinished
from dataset.errors import DataError, UserError
from dataset.federation.connection import NETWORK_ERRORS, Pool, explain
from dataset.federation.document import get_document
from dataset.federation.pelican import DISCOVERY_PATH, parse_discovery, parse_target
from dataset.federation.reach import Reach
from dataset.fetch.ledger import Ledger
from dataset.names import KAGGLE_ZIP, TRAIN_TAR, VAL_TAR
from dataset.redaction import redact
from scripts.checks.surroundings import NOTE, OK, WRONG, Finding, free_bytes, gib

MIN_FREE_BYTES = 2 << 30  # three ResNet-50 checkpoints (0.2 GB each) and the records


def look_at_data(data: str) -> Finding:
    """What kind of data DATA is, as the trainer will see it; it reads no archive."""
    if "://" in data:
        try:
            target = parse_target(data)
        except UserError as error:
            return Finding("data", "unknown", WRONG, str(error))
        return Finding("data", f"{target.identity}, fetched before the first epoch")
    path = Path(data)
    if not path.exists():
        problem = f"no such data: {path}; name a folder with train/ and val/, or with the tars"
        return Finding("data", "missing", WRONG, problem)
    if not os.access(path, os.R_OK | (os.X_OK if path.is_dir() else 0)):
        problem = f"{path} cannot be read by you; check the permissions"
        return Finding("data", "unreadable", WRONG, problem)
    try:
        return _describe_data(path)
    except ImportError as error:
        return Finding("data", f"{path} exists; {error.name} is needed to say more")


def _describe_data(path: Path) -> Finding:
    if (path / "train").is_dir():
        return _describe_folder(path)
    folder = path if path.is_dir() else path.parent
    tar = folder / TRAIN_TAR if path.is_dir() or path.name == VAL_TAR else path
    if not tar.exists():
        problem = f"{path} holds neither train/ nor {TRAIN_TAR}"
        if (folder / KAGGLE_ZIP).exists():
            problem += f"; extract {KAGGLE_ZIP} with scripts/extract_ILSVRC_mp.py"
        return Finding("data", "unknown", WRONG, f"{problem}; name the folder that has one of them")
    return _describe_tars(tar, folder / VAL_TAR)


def _describe_tars(tar: Path, val_tar: Path) -> Finding:
    # Here and not above: these need numpy, and a doctor must also speak where it is missing.
    from dataset.archive.index import find_index
    from dataset.archive.index_file import load_index

    index = find_index(tar)
    indexed = f"indexed by {index}" if index else "no index yet"
    text = f"a tar of {gib(tar.stat().st_size)}, {indexed}"
    if not val_tar.exists():
        problem = f"there is no {val_tar.name} beside the tar, so accuracy cannot be measured"
        return Finding("data", text, NOTE, f"{problem}; fetch it")
    if index is None:
        problem = "rank 0 will index the tar while the others wait; do it once, ahead"
        return Finding("data", text, NOTE, f"{problem}: python scripts/index_tar.py {tar}")
    places = {"train": (index, tar), "val": (find_index(val_tar), val_tar)}
    indexed_halves = [(half, i, t) for half, (i, t) in places.items() if i is not None]
    try:
        classes = {half: load_index(i, t).classes for half, i, t in indexed_halves}
    except DataError as error:
        return Finding("data", text, WRONG, str(error))
    newer = [problem for _, i, t in indexed_halves if (problem := _find_newer(t, i))]
    if newer:
        return Finding("data", text, NOTE, newer[0])
    classes.setdefault("val", classes["train"])  # not indexed yet
    return Finding("data", text, *_compare_classes(tar.parent, classes))


def _find_newer(tar: Path, index: Path) -> str:
    """What to do about a tar that was written after its index, and not by a fetch."""
    if tar.stat().st_mtime_ns <= index.stat().st_mtime_ns or Ledger(tar.parent).vouches_for(tar):
        return ""
    return (
        f"{tar} is newer than its index {index}; if it was overwritten, index it again: python "
        f"scripts/index_tar.py {tar} (with --verify it is compared with the index's checksums)"
    )


def _describe_folder(folder: Path) -> Finding:
    from dataset.archive.class_folders import list_classes

    halves = [half for half in ("train", "val") if (folder / half).is_dir()]
    try:
        classes = {half: list_classes(folder / half) for half in halves}
    except UserError as error:
        return Finding("data", "an extracted folder", WRONG, str(error))
    counts = ", ".join(f"{len(names)} classes in {half}/" for half, names in classes.items())
    text = f"an extracted folder: {counts}"
    if find_unfinished(folder):
        problem = f"the extraction into {folder} is not finished; run the same command again"
        return Finding("data", text, WRONG, problem)
    try:
        for half in halves:
            _check_classes(folder / half, classes[half])
        return Finding("data", text, *_compare_classes(folder, classes))
    except UserError as error:
        return Finding("data", text, WRONG, str(error))


def _check_classes(half: Path, names: list[str]) -> None:
    """Refuses what the trainer refuses; of a class it looks no further than its first image."""
    from dataset.archive.class_folders import has_image, refuse_empty

    if not names:
        raise UserError(f"no class folders in {half}; run scripts/extract_ILSVRC_mp.py")
    refuse_empty(half, [name for name in names if not has_image(half / name)])


def _compare_classes(data: Path, classes: dict[str, list[str]]) -> tuple[str, str]:
    """(level, problem) of the classes of the two halves."""
    if "val" not in classes:
        fix = "extract with --run_type val"
        return NOTE, f"no val/ in {data}, so accuracy cannot be measured; {fix}"
    strange = sorted(set(classes["val"]) - set(classes["train"]))
    missing = sorted(set(classes["train"]) - set(classes["val"]))
    if strange:
        text = f"{len(strange)} validation classes have no training images, e.g. {strange[0]}"
        return WRONG, f"{text}; is val/ sorted into class folders?"
    if missing:
        text = f"{len(missing)} of {len(classes['train'])} training classes have no validation"
        return NOTE, f"{text} images, e.g. {missing[0]}: accuracy says nothing about them"
    return OK, ""


def look_at_decoder() -> Finding:
    """Which JPEG decoder the loader will use."""
    try:
        from train.data.jpeg import HINT, library_path, load_kernel
    except ImportError as error:
        return Finding("decoder", f"unknown; {error.name} is needed to say more")
    if load_kernel() is not None:
        return Finding("decoder", f"the JPEG kernel in threads, {library_path().name}")
    text = "Pillow in worker processes; the JPEG kernel is not built, or cannot be loaded"
    problem = f"Pillow decodes more slowly than the JPEG kernel; {HINT}"
    return Finding("decoder", text, NOTE, f"{problem} and run python -m train.data.jpeg")


def look_at_space(folder: Path, what: str) -> Finding:
    """Free space where something will be written, at the nearest folder that exists."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    free = free_bytes(place)
    text = f"{gib(free)} free in {place}"
    if not os.access(place, os.W_OK):
        return Finding(what, text, WRONG, f"{place} cannot be written; choose another folder")
    if free < MIN_FREE_BYTES:
        problem = f"{gib(free)} is too little for checkpoints; free some space, or use --output"
        return Finding(what, text, WRONG, problem)
    return Finding(what, text)


def find_discovery(data: str, federation: str) -> str | None:
    """Where the federation that DATA lies in is described, or None when it needs none."""
    try:
        return parse_target(data, federation).discovery if "://" in data else None
    except UserError:  # look_at_data says it
        return None


def look_at_federation(discovery: str, timeout_s: float, is_needed: bool) -> Finding:
    """Whether the federation's discovery answers from here."""
    host = urlsplit(discovery).netloc
    try:
        with Pool(timeout_s, Reach(discovery)) as pool:
            status, _, body, _ = get_document(pool, discovery + DISCOVERY_PATH, {})
        if status != 200:
            return unreachable(host, f"it answered {status}", is_needed)
        return Finding("federation", redact(f"{host}: director {parse_discovery(body, host)}"))
    except (*NETWORK_ERRORS, ValueError) as error:
        return unreachable(host, explain(error), is_needed)


def unreachable(host: str, why: str, is_needed: bool) -> Finding:
    """The finding about a federation that does not answer: an error only when DATA needs it."""
    problem = f"{host} does not answer ({why}); fetch on a node with a network first"
    level = WRONG if is_needed else OK
    return Finding("federation", f"{host}: not reachable ({why})", level, problem)
