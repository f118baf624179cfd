"""A plain PyTorch loop reads from real XRootD caches while its tar arrives: that of the docs."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from dataset.names import INDEX_SUFFIX
from dataset.stream.arrivals import ArrivalMap
from tests.cluster.osdf.streamed_runs import STEPS, Served, serve_set
from tests.conftest import ROOT
from tests.dataset.tars import TRAIN
from tests.train.hooks import SMALL_UNITS
from tests.train.tiny_net import TinyNet
from train.torch_data import batches

pytestmark = [pytest.mark.osdf, pytest.mark.timeout(300)]
SIZES: dict[str, Any] = {"batch_size": 8, "image_size": 32}


@pytest.fixture(scope="module")
def served(osdf: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Served:
    return serve_set(osdf, tmp_path_factory.mktemp("served"))


@pytest.fixture(autouse=True)
def _small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small units, so that the small tar has many; temporary files in the test's folder."""
    for name, value in SMALL_UNITS.items():
        monkeypatch.setattr(name, value)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


class Watched(TinyNet):
    """A network that notes what it sees, and how much of the tar is here by then."""

    def __init__(self, folder: Path) -> None:
        super().__init__(num_classes=4)
        self.folder, self.seen, self.shares = folder, list[torch.Tensor](), list[float]()

    def forward(self, images: torch.Tensor) -> Any:
        (place,) = self.folder.glob("trainyard-stream-*/train.map")
        self.shares.append(float(ArrivalMap(place).here.mean()))
        self.seen.append(images.clone())
        return super().forward(images)


def read_loop() -> str:
    """The loop of the docs that reads a URL."""
    page = (ROOT / "docs" / "pytorch.md").read_text()
    (code,) = (c for c in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "osdf://" in c)
    assert isinstance(code, str) and len(code.splitlines()) <= 15
    return code


def adapt(code: str, changes: dict[str, str]) -> str:
    for old, new in changes.items():
        assert code.count(old) == 1, old
        code = code.replace(old, new)
    return code


def test_the_loop_of_the_docs_trains_while_its_tar_arrives(
    served: Served, osdf: ModuleType, tmp_path: Path
) -> None:
    url, data = f"osdf://{served.train_path}", tmp_path / "data"
    where = {"data_dir": data, "federation": served.federation, "stream": "always"}
    changes = {
        "osdf:///NAMESPACE/ILSVRC2012_img_train.tar": url,
        "resnet18(num_classes=1000)": "make_model()",
        "batch_size=256": "**settings",
        "range(90)": "range(2)",
    }
    model = Watched(tmp_path)
    with osdf.wan(path=served.train_path, delay_s=0.02, bytes_per_s=1e6):
        exec(adapt(read_loop(), changes), {"make_model": lambda: model, "settings": SIZES | where})
    assert len(model.seen) == 2 * STEPS
    assert model.shares[0] < 0.9  # it began before all was here
    local = batches(served.folder / TRAIN, **SIZES, order="streamed")
    expected = [images.float() / 255 for _ in range(2) for images, _ in local]
    assert all(torch.equal(a, b) for a, b in zip(model.seen, expected, strict=True))
    assert list(tmp_path.glob("trainyard-stream-*")) == []
    assert (data / (TRAIN + INDEX_SUFFIX)).exists()
