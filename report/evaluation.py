"""An evaluation image by image, from predictions.csv: classes, confusions, calibration."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dataset.errors import DataError
from report.record_shape import MAX_CHARS, is_number
from report.words import count
from train.records.record import MISTAKES_FILE, PREDICTIONS_FILE, name_evaluated, read_lines

Int64s = npt.NDArray[np.int64]

MAX_FILE_BYTES = 2 << 30
MAX_PICTURE_CHARS = 40_000  # ours have about 4,000
NUM_BINS = 10
OTHERS = "all others"
_JPEG = re.compile(r"/9j/[A-Za-z0-9+/]+={0,2}")  # how the first three bytes of a JPEG begin


@dataclass(frozen=True)
class ClassResult:
    """How the images of one class were classified."""

    name: str
    num_images: int
    num_right: int
    mistaken_for: str  # the class that its wrong images got most often
    num_mistaken: int

    @property
    def acc1(self) -> float:
        return 100 * self.num_right / self.num_images


@dataclass(frozen=True)
class Bin:
    """The images whose best class has a probability in a certain range."""

    num_images: int
    confidence: float  # their mean probability
    accuracy: float  # the share of them that is right


@dataclass(frozen=True)
class Evaluation:
    """The images that have a prediction: label and best class as places in `classes`."""

    source: str
    classes: Sequence[str]
    labels: Int64s
    best: Int64s
    confidence: npt.NDArray[np.float64]
    num_right5: int
    num_skipped: int = 0
    mistakes: Sequence[Mapping[str, Any]] = ()

    @property
    def num_images(self) -> int:
        return len(self.labels)

    @property
    def num_right(self) -> int:
        return int((self.labels == self.best).sum())

    @cached_property
    def class_results(self) -> list[ClassResult]:
        """The classes that have images, the worst first."""
        sizes = np.bincount(self.labels, minlength=len(self.classes))
        right = np.bincount(self.labels[self.labels == self.best], minlength=len(self.classes))
        most = self._find_most_mistaken()
        results = [
            ClassResult(
                self.classes[place],
                int(sizes[place]),
                int(right[place]),
                *((self.classes[most[place][0]], most[place][1]) if place in most else ("", 0)),
            )
            for place in np.flatnonzero(sizes).tolist()
        ]
        return sorted(results, key=lambda result: (result.acc1, -result.num_images, result.name))

    def _find_most_mistaken(self) -> dict[int, tuple[int, int]]:
        """(the wrong class that its images got most often, how often) by class."""
        is_wrong = self.labels != self.best
        pairs = self.labels[is_wrong] * len(self.classes) + self.best[is_wrong]
        found, counts = np.unique(pairs, return_counts=True)
        most: dict[int, tuple[int, int]] = {}
        for place in np.argsort(counts, kind="stable").tolist():  # the last one stays
            label, best = divmod(int(found[place]), len(self.classes))
            most[label] = (best, int(counts[place]))
        return most

    def confuse(self, most: int) -> tuple[list[str], Int64s]:
        """Names, and how many images of each row's class were taken for each column's.

        Beyond `most` classes: the worst ones, and all others as one. The sum is always the set.
        """
        shown = list(self.classes)
        if len(shown) > most:
            shown = sorted(result.name for result in self.class_results[:most])
        places = {name: place for place, name in enumerate(shown)}
        size = len(shown) + (len(shown) < len(self.classes))
        to_shown = np.array([places.get(name, len(shown)) for name in self.classes], np.int64)
        pairs = to_shown[self.labels] * size + to_shown[self.best]
        matrix = np.bincount(pairs, minlength=size * size).reshape(size, size)
        return shown + [OTHERS] * (size - len(shown)), matrix

    @cached_property
    def bins(self) -> list[Bin]:
        """The images by the probability of their best class, in equal steps from 0 to 1."""
        at = np.minimum((self.confidence * NUM_BINS).astype(np.int64), NUM_BINS - 1)
        is_right = self.labels == self.best
        return [
            Bin(len(chosen), self.confidence[chosen].mean(), is_right[chosen].mean())
            for chosen in (np.flatnonzero(at == step) for step in range(NUM_BINS))
            if len(chosen)
        ]

    @property
    def calibration_error(self) -> float:
        """The expected calibration error: the mean gap of confidence and accuracy (0 to 1)."""
        gaps = (b.num_images * abs(b.accuracy - b.confidence) for b in self.bins)
        return float(sum(gaps) / self.num_images)


def load_evaluations(paths: Sequence[Path]) -> tuple[list[Evaluation], list[str]]:
    """The evaluations in and below folders, or of named files, and notes on what was left out."""
    evaluations, notes = [], []
    files = {file for path in paths for file in find_predictions(path)}
    for file in sorted(files):
        try:
            evaluation, num_odd = read_evaluation(file)
        except (DataError, OSError) as error:
            notes.append(f"left out: {error}")
            continue
        evaluations.append(evaluation)
        if num_odd:
            notes.append(f"{file}: {count(num_odd, 'damaged row')} left out")
    return evaluations, notes


def find_predictions(path: Path) -> list[Path]:
    """The files of predictions in and below a folder, or the file itself."""
    names = [name_evaluated(PREDICTIONS_FILE, suffix) for suffix in ("", "_ema")]
    if path.is_dir():
        return [file for name in names for file in path.rglob(name)]
    return [path] if path.name in names else []


def read_evaluation(path: Path) -> tuple[Evaluation, int]:
    """The evaluation of a predictions.csv, and how many of its rows are damaged."""
    if path.stat().st_size > MAX_FILE_BYTES:
        raise DataError(f"{path} has more than {MAX_FILE_BYTES >> 30} GiB")
    places: dict[str, int] = {}
    rows: list[tuple[int, int, float, bool]] = []
    num_skipped = num_odd = 0
    for row in _iter_rows(path):
        if row.get("name") and row.get("label") and row.get("top1") == "":
            num_skipped += 1
            continue
        shaped = _shape_row(row, places)
        if shaped is None:
            num_odd += 1
        else:
            rows.append(shaped)
    if not rows:
        raise DataError(f"{path} has no predictions; make it again with python -m train DATA -e")
    classes = sorted(places)
    ranks = np.argsort(np.array([places[name] for name in classes]))
    labels, best, confidence, hits = zip(*rows, strict=True)
    return Evaluation(
        source=str(path),
        classes=classes,
        labels=ranks[np.array(labels)],
        best=ranks[np.array(best)],
        confidence=np.array(confidence),
        num_right5=sum(hits),
        num_skipped=num_skipped,
        mistakes=_read_mistakes(path),
    ), num_odd


def _iter_rows(path: Path) -> Iterator[Mapping[str, str]]:
    with open(path, encoding="utf-8", errors="replace", newline="") as file:
        try:
            yield from csv.DictReader(file)
        except csv.Error as error:
            raise DataError(f"{path} is damaged ({error}); make it again with -e") from None


def _shape_row(
    row: Mapping[str, str | None], places: dict[str, int]
) -> tuple[int, int, float, bool] | None:
    """(label, best class, its probability, is the label among the best), or None if damaged."""
    label, best = row.get("label"), row.get("top1")
    try:
        confidence = float(row.get("p1") or "")
    except ValueError:
        return None
    if not label or not best or not 0 <= confidence <= 1:
        return None
    is_hit = label in [row.get(f"top{place}") for place in range(1, 6)]
    names = (label[:MAX_CHARS], best[:MAX_CHARS])
    first, second = (places.setdefault(name, len(places)) for name in names)
    return first, second, confidence, is_hit


def _read_mistakes(path: Path) -> list[Mapping[str, Any]]:
    """The lines of the file beside the predictions that have a picture and a name."""
    suffix = path.stem.removeprefix(Path(PREDICTIONS_FILE).stem)
    lines = read_lines(path.with_name(name_evaluated(MISTAKES_FILE, suffix)))
    return [line for line in lines if _is_mistake(line)]


def _is_mistake(line: Mapping[str, Any]) -> bool:
    texts = [line.get(name) for name in ("name", "label", "predicted", "jpeg")]
    if not all(isinstance(text, str) for text in texts) or not is_number(line.get("probability")):
        return False
    jpeg = line["jpeg"]
    return len(jpeg) <= MAX_PICTURE_CHARS and _JPEG.fullmatch(jpeg) is not None
