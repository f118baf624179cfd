"""The epochs as TensorBoard scalars, for those who ask with --tensorboard."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from dataset.errors import UserError


class EpochBoard:
    """Writes the numbers of an epoch's record under their own names."""

    def __init__(self, folder: Path) -> None:
        try:
            module = importlib.import_module("torch.utils.tensorboard")
        except ImportError:
            raise UserError(
                "--tensorboard needs the package of that name: pip install tensorboard"
            ) from None
        self._writer: Any = module.SummaryWriter(str(folder))

    def add(self, record: dict[str, Any]) -> None:
        for name, value in record.items():
            if name not in ("epoch", "step") and value is not None:
                self._writer.add_scalar(name, value, record["step"])
        self._writer.flush()
