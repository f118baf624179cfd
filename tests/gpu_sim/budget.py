"""How many operators a step may ask of a GPU: docs/performance.md names these numbers."""

from __future__ import annotations

# Of one step of resnet50 in bf16, on one rank and on each of several.
BUDGET = {1: 505, 2: 669}
