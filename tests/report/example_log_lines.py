"""Logs as pytorch/examples' imagenet/main.py printed them over the years, made up for tests."""

from __future__ import annotations

from collections.abc import Iterator

YEARS = (2017, 2019, 2022)


def print_run(
    year: int = 2022,
    epochs: int = 2,
    num_batches: int = 100,
    step_s: float = 0.4,
    first_s: float = 4.4,
    wait_s: float = 0.1,
) -> list[str]:
    """The lines of one rank: a slow first batch, then equal ones, every tenth printed.

    All batches but the first take step_s, of which wait_s is spent waiting for data.
    """
    lines = ["=> creating model 'resnet50'"]
    for epoch in range(epochs):
        for index in range(0, num_batches, 10):
            mean_s = (first_s + step_s * index) / (index + 1)
            loss = 7.0 - epoch
            lines.append(
                name_batch(year, f"Epoch: [{epoch}]", index, num_batches)
                + "".join(print_meters(year, step_s, mean_s, wait_s, loss))
            )
        lines.append(
            name_batch(year, "Test: ", 0, 20) + "".join(print_meters(year, 0.5, 0.5, None, 6.0))
        )
        lines.append(print_result(year, 10.0 * (epoch + 1), 30.0 + epoch))
    return lines


def name_batch(year: int, prefix: str, index: int, num_batches: int) -> str:
    shown = index + 1 if year >= 2022 else index
    width = len(str(num_batches)) if year >= 2019 else 0
    return f"{prefix}[{shown:{width}d}/{num_batches}]"


def print_meters(
    year: int, value_s: float, mean_s: float, wait_s: float | None, loss: float
) -> Iterator[str]:
    width, name, digits = (6, "Acc", ".2f") if year >= 2019 else (0, "Prec", ".3f")
    yield f"\tTime {value_s:{width or ''}.3f} ({mean_s:{width or ''}.3f})"
    if wait_s is not None:
        yield f"\tData {wait_s:{width or ''}.3f} ({wait_s:{width or ''}.3f})"
    shape = ".4e" if year >= 2019 else ".4f"
    yield f"\tLoss {loss:{shape}} ({loss:{shape}})"
    yield f"\t{name}@1 {0.4:{width or ''}{digits}} ({0.5:{width or ''}{digits}})"
    yield f"\t{name}@5 {1.2:{width or ''}{digits}} ({2.5:{width or ''}{digits}})"


def print_result(year: int, acc1: float, acc5: float) -> str:
    if year >= 2022:
        return f" *   Acc@1 {acc1:.3f} Acc@5 {acc5:.3f}"
    name = "Acc" if year >= 2019 else "Prec"
    return f" * {name}@1 {acc1:.3f} {name}@5 {acc5:.3f}"
