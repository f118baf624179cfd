"""The one table of training recipes: every published value, with its source (no torch)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

PUBLISHED_EPOCHS = 90  # every point of the table was trained for 90 epochs


@dataclass(frozen=True)
class Recipe:
    """Everything that decides how the weights move, and where each value comes from."""

    name: str
    optimizer: str  # sgd, lars
    lr: float  # the peak, after the warm-up
    momentum: float
    weight_decay: float
    warmup_epochs: float
    label_smoothing: float
    schedule: str  # step, cosine, poly2
    decay_norm_and_bias: bool
    zero_init_gamma: bool
    lars_eta: float = 0.0
    lars_eps: float = 0.0
    source: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Point:
    """What a source published for one batch size; acc1_pct None: no accuracy beside it."""

    lr: float
    weight_decay: float
    warmup_epochs: float
    lars_eps: float = 0.0
    batch_per_gpu: int = 0
    acc1_pct: float | None = None
    remark: str = ""


@dataclass(frozen=True)
class Published:
    """A recipe as its authors gave it: the values that never change, and the points."""

    base: Recipe
    points: Mapping[int, Point]  # by global batch size, ascending
    scaling: str  # how the rate goes off the points: keep, linear, sqrt


_REFERENCE = Recipe(
    name="reference",
    optimizer="sgd",
    lr=0.1,
    momentum=0.9,
    weight_decay=1e-4,
    warmup_epochs=0.0,
    label_smoothing=0.0,
    schedule="step",
    decay_norm_and_bias=True,
    zero_init_gamma=False,
    source="pytorch/examples (imagenet/main.py); accuracy from run_results/published",
)
# Their 90-epoch scripts; the rate is per step here and per epoch there. The weight decays are
# powers of two: 6.1e-5 and 3.05e-5.
_SGD = replace(
    _REFERENCE,
    name="sgd",
    lr=1.024,
    momentum=0.875,
    weight_decay=2**-14,
    warmup_epochs=8.0,
    label_smoothing=0.1,
    schedule="cosine",
    decay_norm_and_bias=False,
    zero_init_gamma=True,
    source="NVIDIA DeepLearningExamples, ResNet-50 v1.5 for PyTorch",
)
_LARS = replace(
    _REFERENCE,
    name="lars",
    optimizer="lars",
    lr=2**3.5,
    warmup_epochs=1.25,
    label_smoothing=0.1,
    schedule="poly2",
    decay_norm_and_bias=False,
    lars_eta=0.001,
    lars_eps=1e-5,
    source="NUS-HPC-AI-Lab, LARS-ImageNet-PyTorch",
)

# A point's key is the global batch; its numbers: LR, weight decay, warm-up epochs, LARS epsilon,
# images a GPU (the batch-norm group), top-1 in per cent.
TABLE: Mapping[str, Published] = {
    "reference": Published(_REFERENCE, {256: Point(0.1, 1e-4, 0.0, 0.0, 256, 75.39)}, "keep"),
    "sgd": Published(
        _SGD,
        {
            1024: Point(1.024, 2**-14, 8.0, remark="listed for ResNeXt-101, the same settings"),
            2048: Point(2.048, 2**-15, 8.0, 0.0, 256, 77.12),
            4096: Point(
                4.096, 2**-15, 8.0, 0.0, 256, 77.10, remark="that run had 16 warm-up epochs"
            ),
        },
        "linear",
    ),
    "lars": Published(
        _LARS,
        {
            512: Point(4.0, 1e-4, 0.15625, 1e-5, 64, 77.02),
            1024: Point(2**2.5, 1e-4, 0.3125, 1e-5, 128, 76.96),
            4096: Point(2**3.5, 1e-4, 1.25, 1e-5, 128, 77.38),
            8192: Point(16.0, 1e-4, 2.5, 1e-5, 128, 77.14),
            16384: Point(2**4.5, 1e-4, 5.0, 1e-5, 128, 76.96),
            32768: Point(32.0, 1e-4, 14.0, 0.0, 64, 76.75),
        },
        "sqrt",
    ),
}
# (recipe, batch size) -> the run with this code that reached the published accuracy.
REPRODUCED: Mapping[tuple[str, int], str] = {}
