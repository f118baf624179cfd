"""The public data plane in loops of others: Lightning, timm, torchvision's reference, torchdata.

Each library is imported in its test: a start of pytest that runs none of them does not pay for it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, default_collate
from torchvision.transforms import v2

from tests.train.started_ranks import LAUNCHERS, RANKS
from tests.train.tiny_net import TinyNet
from train.torch_data import CentreCrop, RandomCrop, batches, open_images

pytestmark = pytest.mark.training

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/pytorch.md"
CLASSES, BATCH, SIZE, STEPS = 7, 8, 32, 5
TO_FLOAT = v2.ToDtype(torch.float32, scale=True)


def train_epoch(model: nn.Module, loader: Any) -> list[list[int]]:
    """The labels of each batch, after a step on it; the loss must stay finite."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    seen = []
    for images, labels in loader:
        loss = functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        assert torch.isfinite(loss)
        seen.append(labels.tolist() if labels.ndim == 1 else labels.argmax(1).tolist())
    return seen


# --- Lightning ----------------------------------------------------------------------------------


def make_lightning(folder: Path) -> Any:
    """(a module that notes its labels, a trainer that saves every third step and epoch)."""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net, self.num_validated = TinyNet(CLASSES), 0
            self.seen: list[list[int]] = []

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            images, labels = batch
            self.seen.append(labels.tolist())
            return functional.cross_entropy(self.net(TO_FLOAT(images)), labels)

        def validation_step(self, batch: Any, _: int) -> None:
            self.num_validated += len(batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    def make_trainer() -> Any:
        saved: dict[str, Any] = {"dirpath": folder, "save_top_k": -1}
        each_third = ModelCheckpoint(filename="{step}", every_n_train_steps=3, **saved)
        each_epoch = ModelCheckpoint(filename="end-{epoch}", **saved)
        quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
        return lightning.Trainer(
            max_epochs=2, accelerator="cpu", callbacks=[each_third, each_epoch], **quiet
        )

    return Module, make_trainer


@pytest.mark.filterwarnings("ignore")  # advice of Lightning about workers and versions
def test_lightning_trains_validates_and_resumes_exactly(tars: Path, tmp_path: Path) -> None:
    make_module, make_trainer = make_lightning(tmp_path)

    def open_both() -> tuple[Any, Any]:
        return batches(tars, BATCH, image_size=SIZE), batches(tars, BATCH, "val", image_size=SIZE)

    whole = make_module()
    make_trainer().fit(whole, *open_both())
    assert len(whole.seen) == 2 * STEPS
    assert whole.num_validated == 2 * BATCH + 2 * 35  # its check before the training, two epochs
    places = {"step=3.ckpt": 3, "step=6.ckpt": 6, "end-epoch=0.ckpt": STEPS}
    for name, step in places.items():
        again = make_module()
        make_trainer().fit(again, *open_both(), ckpt_path=tmp_path / name)
        assert again.seen == whole.seen[step:], name
        for mine, other in zip(again.parameters(), whole.parameters(), strict=True):
            assert torch.equal(mine, other)


@pytest.mark.filterwarnings("ignore")
def test_lightning_takes_the_images_in_a_dataloader(tars: Path, tmp_path: Path) -> None:
    make_module, make_trainer = make_lightning(tmp_path)
    module = make_module()
    images = open_images(tars, decode=RandomCrop(SIZE))
    make_trainer().fit(module, DataLoader(images, BATCH, shuffle=True))
    assert sorted(sum(module.seen[:6], [])) == images.targets  # noqa: RUF017


def test_two_processes_of_lightning_share_the_batches_and_resume_exactly(
    tars: Path, tmp_path: Path
) -> None:
    """As a user starts them; the batches come from train_dataloader and val_dataloader."""
    command = [sys.executable, "-m", "tests.train.lightning_ranks", str(tars), str(tmp_path)]
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith((*LAUNCHERS, *RANKS))
    }
    env |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    alone = batches(tars, BATCH, image_size=SIZE, num_workers=0)
    expected = [sorted(labels.tolist()) for _ in range(2) for _, labels in alone]
    shares = [noted["whole"] for noted in ranks]
    assert {len(share) for rank in shares for share in rank} == {BATCH // 2}
    assert [sorted(one + other) for one, other in zip(*shares, strict=True)] == expected
    assert [noted["again"] for noted in ranks] == [share[3:] for share in shares]
    assert sum(noted["validated"] for noted in ranks) == 2 * 35


# --- timm ---------------------------------------------------------------------------------------


def test_timm_takes_the_images_in_its_loader_and_the_batches_in_its_loop(tars: Path) -> None:
    import timm
    from timm.data import create_loader
    from timm.optim import create_optimizer_v2
    from timm.scheduler import CosineLRScheduler

    images = open_images(tars)
    loader = create_loader(
        images,
        input_size=(3, SIZE, SIZE),
        batch_size=BATCH,
        is_training=True,
        auto_augment="rand-m9-mstd0.5",
        num_workers=2,
        device=torch.device("cpu"),
        use_prefetcher=False,
        persistent_workers=False,
    )
    model = timm.create_model("test_resnet", num_classes=CLASSES)
    assert len(sum(train_epoch(model, loader), [])) == 40  # noqa: RUF017
    optimizer = create_optimizer_v2(model, opt="lamb", lr=0.01)
    scheduler = CosineLRScheduler(optimizer, t_initial=2)
    ready = batches(tars, BATCH, image_size=SIZE)
    for epoch in range(ready.epoch, 2):
        for images_u8, labels in ready:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(TO_FLOAT(images_u8)), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        scheduler.step(epoch + 1)
    assert ready.epoch == 2


# --- torchvision's reference --------------------------------------------------------------------


def test_the_reference_loop_of_torchvision_takes_the_images(tars: Path, images: Path) -> None:
    """Its presets, its mixing collate function, its distributed sampler, and workers."""
    preset = v2.Compose([v2.RandomResizedCrop(SIZE), v2.PILToTensor(), TO_FLOAT])
    mix = v2.RandomChoice([v2.MixUp(num_classes=CLASSES), v2.CutMix(num_classes=CLASSES)])

    def collate(items: Any) -> Any:
        return mix(*default_collate(items))

    theirs = open_images(images, "train", preset)
    sampler: Any = DistributedSampler(theirs, 2, 0, seed=1)
    orders = []
    for epoch in (0, 1):
        sampler.set_epoch(epoch)
        loader = DataLoader(
            theirs,
            BATCH,
            sampler=sampler,
            num_workers=2,
            collate_fn=collate,
            multiprocessing_context="fork",
        )
        orders.append(list(sampler))
        assert len(sum(train_epoch(TinyNet(CLASSES), loader), [])) == 21  # noqa: RUF017
    assert orders[0] != orders[1]
    val = open_images(tars, "val", TO_FLOAT, decode=CentreCrop(SIZE))
    model = TinyNet(CLASSES).eval()
    with torch.inference_mode():
        rows = [model(batch).shape[0] for batch, _ in DataLoader(val, BATCH, num_workers=0)]
    assert sum(rows) == 35


# --- torchdata ----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stateful_dataloader_resumes_with_the_images(tars: Path, num_workers: int) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    def open_loader() -> Any:
        images = open_images(tars, decode=CentreCrop(SIZE))
        generator = torch.Generator().manual_seed(3)
        return StatefulDataLoader(
            images, BATCH, shuffle=True, num_workers=num_workers, generator=generator
        )

    expected = [labels.tolist() for _, labels in open_loader()]
    loader = open_loader()
    loop = iter(loader)
    found = [next(loop)[1].tolist() for _ in range(2)]
    again = open_loader()
    again.load_state_dict(loader.state_dict())
    assert found + [labels.tolist() for _, labels in again] == expected


def test_batches_have_the_interface_of_torchdata(tars: Path) -> None:
    from torchdata.stateful_dataloader import Stateful

    assert isinstance(batches(tars, BATCH), Stateful)


# --- a program of one's own ---------------------------------------------------------------------


LEFT_EARLY = """
import sys
from train.torch_data import batches
ready = batches(sys.argv[1], 4, num_workers=2, decoder=sys.argv[2])
for images, labels in ready:
    kept = iter(ready)  # its workers are at work
    next(kept)
    break
"""


@pytest.mark.parametrize("decoder", ["pil", "kernel"])  # in worker processes, in threads
def test_a_program_that_leaves_its_loop_early_ends(tars: Path, decoder: str) -> None:
    """Workers ignore the SIGTERM of Python's exit; a thread inside torch would abort it."""
    command = [sys.executable, "-c", LEFT_EARLY, str(tars), decoder]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert (done.returncode, done.stderr) == (0, "")


# --- the page about it --------------------------------------------------------------------------


def test_the_loops_of_the_page_run(
    tars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they stand there, but for a smaller batch, network and number of epochs.

    The one over the network has its test on XRootD.
    """
    (tmp_path / "data").symlink_to(tars)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torchvision.models.resnet50", TinyNet)
    found = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    loop, images, resume = (code for code in found if "osdf://" not in code)
    names: dict[str, Any] = {}
    exec(loop.replace("256", "8").replace("90", "1"), names)
    assert names["loader"].epoch == 1
    names["loader"] = batches("data", BATCH)
    exec(resume, names)
    assert names["loader"].epoch == 1
    exec(images.replace("num_workers=8", "num_workers=0"), names)
    assert next(iter(names["loader"]))[0].shape == (42, 3, 224, 224)
