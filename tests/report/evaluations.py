"""Made-up evaluations for the tests of the page: predictions.csv and its mistakes."""

from __future__ import annotations

import base64
import csv
import io
import json
from pathlib import Path

import numpy as np
from PIL import Image


def write_evaluation(folder: Path, num_classes: int, num_images: int, seed: int = 0) -> Path:
    """A predictions.csv whose answers are right as often as they say, and three mistakes."""
    rng = np.random.default_rng(seed)
    names = [f"class <{place}>" for place in range(num_classes)]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "predictions.csv"
    mistakes = []
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        width = min(5, num_classes)
        writer.writerow(
            ["name", "label", *(f"{c}{k}" for k in range(1, width + 1) for c in ("top", "p"))]
        )
        for number in range(num_images):
            label, confidence = int(rng.integers(num_classes)), rng.uniform(0.3, 1.0)
            is_right = rng.random() < confidence
            shift = 0 if is_right else int(rng.integers(1, num_classes))
            best = [(label + shift + k) % num_classes for k in range(width)]
            shares = [confidence, *([(1 - confidence) / width] * (width - 1))]
            name = f"{names[label]}/{number}.jpg"
            cells = [
                c for place, p in zip(best, shares, strict=True) for c in (names[place], f"{p:.6f}")
            ]
            writer.writerow([name, names[label], *cells])
            if shift:
                mistakes.append((confidence, name, names[label], names[best[0]]))
    lines = [
        {"name": n, "label": a, "predicted": b, "probability": p, "jpeg": make_jpeg(seed)}
        for p, n, a, b in sorted(mistakes, reverse=True)[:3]
    ]
    (folder / "mistakes.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def make_jpeg(seed: int) -> str:
    pixels = np.random.default_rng(seed).integers(0, 256, (48, 48, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG")
    return base64.b64encode(buffer.getvalue()).decode()
