"""A training of Lightning on two processes of a CPU, as a program of a user; it notes the labels.

    python -m tests.train.lightning_ranks DATA FOLDER

FOLDER gets rank0.json and rank1.json: the labels of each batch of two epochs, those after going on
from the checkpoint of step 3, and how many images were validated.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn import functional

from tests.train.tiny_net import TinyNet
from train.torch_data import batches

BATCH, SIZE, CLASSES, EPOCHS, SAVED_STEP = 8, 32, 7, 2, 3


class Module(lightning.LightningModule):  # type: ignore[misc]
    """Opens its batches when Lightning asks for them: after the ranks have met."""

    def __init__(self, data: str) -> None:
        super().__init__()
        self.data, self.net, self.num_validated = data, TinyNet(CLASSES), 0
        self.seen: list[list[int]] = []

    def train_dataloader(self) -> Any:
        return batches(self.data, BATCH, image_size=SIZE, num_workers=0)

    def val_dataloader(self) -> Any:
        return batches(self.data, BATCH, "val", image_size=SIZE, num_workers=0)

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        images, labels = batch
        self.seen.append(labels.tolist())
        return functional.cross_entropy(self.net(images.float() / 255), labels)

    def validation_step(self, batch: Any, _: int) -> None:
        self.num_validated += len(batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def main() -> None:
    data, folder = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    whole, _ = fit(data, folder, None)
    again, rank = fit(data, folder, folder / f"step={SAVED_STEP}.ckpt")
    noted = {"whole": whole.seen, "again": again.seen, "validated": whole.num_validated}
    (folder / f"rank{rank}.json").write_text(json.dumps(noted))


def fit(data: str, folder: Path, begin: Path | None) -> tuple[Module, int]:
    """(the trained module, this process's rank)."""
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    each_third = ModelCheckpoint(
        folder, filename="{step}", every_n_train_steps=SAVED_STEP, save_top_k=-1
    )
    trainer = lightning.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        num_sanity_val_steps=0,
        callbacks=[each_third],
        **quiet,
    )
    module = Module(data)
    trainer.fit(module, ckpt_path=begin)
    return module, trainer.global_rank


if __name__ == "__main__":
    main()
