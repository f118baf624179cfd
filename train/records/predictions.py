"""What -e notes of every image: its best classes, their probabilities, and the worst mistakes."""

from __future__ import annotations

import errno
import logging
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from train.prepare import Setup
from train.ranks.comm import Comm
from train.records.eval_files import Mistake, encode_jpeg, write_mistakes, write_predictions
from train.records.record import MISTAKES_FILE, PREDICTIONS_FILE, name_evaluated

log = logging.getLogger("trainyard")

MOST_MISTAKES = 24
THUMBNAIL = 96  # pixels a side
READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)  # the folder of somebody else's run


@dataclass
class Mistakes:
    """Wrong answers: how confident, for which image of this rank, and the image itself."""

    confidence: torch.Tensor
    place: torch.Tensor
    images: torch.Tensor

    def take_worst(self) -> Mistakes:
        """The worst of them."""
        confidence, at = self.confidence.topk(min(MOST_MISTAKES, len(self.confidence)))
        return Mistakes(confidence, self.place[at], self.images[at])


class Predictions:
    """Those of one model on this rank's share; on the device until all are made."""

    def __init__(self) -> None:
        self._classes: list[torch.Tensor] = []
        self._probabilities: list[torch.Tensor] = []
        self._mistakes: Mistakes | None = None
        self._num_images = 0

    def add(
        self,
        images: torch.Tensor,
        labels: torch.Tensor,
        outputs: torch.Tensor,
        best: torch.Tensor,
    ) -> None:
        """Notes a batch: its images as bytes, and the best classes of each; waits for nothing."""
        probabilities = outputs.float().softmax(1).gather(1, best)
        is_skipped = labels < 0
        self._classes.append(best.int().masked_fill(is_skipped[:, None], -1))
        self._probabilities.append(probabilities)
        is_right = (best[:, 0] == labels) | is_skipped
        confidence = probabilities[:, 0].masked_fill(is_right, -1.0)
        place = torch.arange(len(labels), device=labels.device) + self._num_images
        worst = Mistakes(confidence, place, images).take_worst()
        worst.images = _shrink(worst.images)
        if self._mistakes is not None:
            both = zip(vars(self._mistakes).values(), vars(worst).values(), strict=True)
            worst = Mistakes(*map(torch.cat, both)).take_worst()
        self._mistakes = worst
        self._num_images += len(labels)

    def merge(
        self, comm: Comm, num_images: int
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """The best classes of every image and their probabilities, in the order of the set."""
        mine = None
        if self._classes:
            both = (self._classes, self._probabilities)
            mine = tuple(torch.cat(parts).cpu().numpy() for parts in both)
        parts = comm.gather(mine)
        width = next(part[0].shape[1] for part in parts if part is not None)
        classes = np.full((num_images, width), -1, np.int32)
        probabilities = np.zeros((num_images, width), np.float32)
        for rank, part in enumerate(parts):  # images are dealt to the ranks in turn
            if part is not None:
                classes[rank :: comm.world_size], probabilities[rank :: comm.world_size] = part
        return classes, probabilities

    def merge_mistakes(self, comm: Comm) -> dict[int, bytes]:
        """The small pictures of the most confident mistakes of all ranks, by sample number."""
        mine: dict[int, tuple[float, int]] = {}
        if self._mistakes is not None:
            columns = (self._mistakes.confidence.tolist(), self._mistakes.place.tolist())
            for row, (confidence, place) in enumerate(zip(*columns, strict=True)):
                if confidence >= 0:  # else it is no mistake
                    mine[place * comm.world_size + comm.rank] = (confidence, row)
        rows = [
            row for part in comm.gather([(-p, n) for n, (p, _) in mine.items()]) for row in part
        ]
        chosen = [number for _, number in sorted(rows)[:MOST_MISTAKES]]
        encoded = {n: self._encode(mine[n][1]) for n in chosen if n in mine}
        return {n: jpeg for part in comm.gather(encoded) for n, jpeg in part.items()}

    def _encode(self, row: int) -> bytes:
        assert self._mistakes is not None
        return encode_jpeg(self._mistakes.images[row].permute(1, 2, 0).cpu().numpy())


def _shrink(images: torch.Tensor) -> torch.Tensor:
    """Bytes of pictures that are at most THUMBNAIL pixels a side."""
    if max(images.shape[-2:]) <= THUMBNAIL:
        return images
    small = functional.interpolate(images.float(), size=(THUMBNAIL, THUMBNAIL), mode="area")
    return small.round().to(torch.uint8)


def save_predictions(found: Predictions, setup: Setup, comm: Comm, suffix: str) -> None:
    """Writes predictions.csv and mistakes.jsonl; rank 0 does, with what all ranks found."""
    data = setup.dataset
    assert data is not None and data.val is not None
    classes, probabilities = found.merge(comm, len(data.val))
    pictures = found.merge_mistakes(comm)
    if not setup.launch.is_main:
        return
    path = setup.output / name_evaluated(PREDICTIONS_FILE, suffix)
    names = data.train.classes  # a validation set may lack a class; its labels are these
    mistakes = [
        Mistake(
            data.val.name(number),
            names[data.val.labels[number]],
            names[classes[number, 0]],
            float(probabilities[number, 0]),
            jpeg,
        )
        for number, jpeg in pictures.items()
    ]
    try:
        setup.output.mkdir(parents=True, exist_ok=True)
        write_predictions(path, data.val, names, classes, probabilities)
        write_mistakes(setup.output / name_evaluated(MISTAKES_FILE, suffix), mistakes)
    except OSError as error:
        if error.errno not in READ_ONLY:
            raise
        fix = "name the checkpoint with --resume and a folder of yours with --output"
        log.warning("%s not written: %s; %s", path, error.strerror, fix)
        return
    log.info("each image: %s", path)
