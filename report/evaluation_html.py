"""The part of the page on evaluations: classes, confusions, mistakes, calibration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from report.evaluation import Evaluation
from report.html import figure_html, notes_html, side_by_side, table_html, tiles_html
from report.plots import GRID, SERIES, Chart, finish_chart, new_figure
from report.table import Cell, Column, Table, Value
from report.words import count

MAX_EVALUATIONS = 6
MAX_SHOWN = 12  # classes of a confusion matrix
MAX_NARROW = 6  # of a matrix that fits beside another picture
MAX_ROWS = 100  # classes in the table; its CSV has all


def evaluations_html(evaluations: Sequence[Evaluation], with_pictures: bool) -> str:
    """Each evaluation in turn."""
    parts = [
        _one_html(evaluation, index, with_pictures)
        for index, evaluation in enumerate(evaluations[:MAX_EVALUATIONS])
    ]
    left = len(evaluations) - MAX_EVALUATIONS
    return "".join(parts) + notes_html([f"{left} more are not shown"] if left > 0 else [])


def _one_html(evaluation: Evaluation, index: int, with_pictures: bool) -> str:
    """The numbers, then the pictures and tables of one evaluation."""
    num = evaluation.num_images
    tiles = [(f"{100 * evaluation.num_right / num:.2f} %", "acc@1")]
    if len(evaluation.classes) > 5:  # else it is 100 %
        tiles.append((f"{100 * evaluation.num_right5 / num:.2f} %", "acc@5"))
    tiles += [
        (f"{num:,}", "images"),
        (f"{100 * evaluation.calibration_error:.1f} %", "calibration error (ECE)"),
    ]
    notes = []
    if evaluation.num_skipped:
        notes.append(f"{count(evaluation.num_skipped, 'image')} could not be decoded")
    figures = [_confusion_html(evaluation)]
    if with_pictures:
        figures.append(figure_html(calibration_chart(evaluation, index)))
    return (
        f"<h3>{escape(evaluation.source)}</h3>\n{tiles_html(tiles)}{notes_html(notes)}"
        f"{side_by_side(figures)}{table_html(class_table(evaluation))}{_mistakes_html(evaluation.mistakes)}"
    )


def calibration_chart(evaluation: Evaluation, index: int) -> Chart:
    """The reliability diagram: how often it is right, by how sure it is."""
    figure, axes = new_figure()
    bins = evaluation.bins
    shares = [100 * one.num_images / evaluation.num_images for one in bins]
    sure = [100 * one.confidence for one in bins]
    axes.bar(sure, shares, 6, color=GRID, label="share of the images")
    axes.plot([0, 100], [0, 100], "--", color=SERIES[7], label="as often as it says")
    right = [100 * one.accuracy for one in bins]
    axes.plot(sure, right, "o-", color=SERIES[0], label="accuracy")
    axes.set_xlim(0, 100)
    axes.set_ylim(0, 104)  # a point at 100 is whole
    axes.set_xlabel("probability of the best class (%)")
    axes.set_ylabel("%")
    error = 100 * evaluation.calibration_error
    title = f"Calibration: expected error {error:.1f} %"
    return finish_chart(figure, axes, f"calibration{index}", title)


def class_table(evaluation: Evaluation) -> Table:
    """The accuracy of each class, the worst first."""
    columns = (
        Column("class", "Class", is_number=False),
        Column("images", "Images"),
        Column("right", "Right"),
        Column("acc1", "Acc@1 (%)"),
        Column("mistaken_for", "Most often taken for", is_number=False),
        Column("mistaken", "Times"),
    )
    results = evaluation.class_results
    values: list[tuple[str, int, int, float, str, int]] = [
        (r.name, r.num_images, r.num_right, r.acc1, r.mistaken_for, r.num_mistaken) for r in results
    ]
    keys = [column.key for column in columns]
    data = tuple(dict[str, Value](zip(keys, row, strict=True)) for row in values)
    rows = tuple(
        (
            Cell(name, name),
            Cell(str(images), images),
            Cell(str(right), right),
            Cell(f"{acc1:.1f}", acc1),
            Cell(other, other),
            Cell(str(times) if times else "", times),
        )
        for name, images, right, acc1, other, times in values[:MAX_ROWS]
    )
    more = len(values) - MAX_ROWS
    notes = (f"the worst {MAX_ROWS} of {len(values):,} classes; the CSV has all",) * (more > 0)
    return Table("classes", "Accuracy by class", columns, rows, data, notes)


def _confusion_html(evaluation: Evaluation) -> str:
    """A matrix whose cells are shaded by their share of the row."""
    names, matrix = evaluation.confuse(MAX_SHOWN)
    title = "Confusion matrix"
    if len(evaluation.classes) > MAX_SHOWN:
        title += f" of the worst {MAX_SHOWN} of {len(evaluation.classes):,} classes"
    wide = ' class="wide"' if len(names) > MAX_NARROW else ""
    head = "".join(f'<th scope="col"><span>{escape(name)}</span></th>' for name in names)
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th>'
        + "".join(_confused_cell(number, sum(row), at == place) for at, number in enumerate(row))
        + "</tr>\n"
        for place, (name, row) in enumerate(zip(names, matrix.tolist(), strict=True))
    )
    return (
        f"<figure{wide}><figcaption>{escape(title)}: rows are the labels, columns the "
        'predictions</figcaption><div class="scroll" tabindex="0"><table class="confusion">'
        f"<thead><tr><td></td>{head}</tr></thead><tbody>{rows}</tbody></table></div></figure>"
    )


def _confused_cell(number: int, total: int, is_right: bool) -> str:
    share = number / total if total else 0.0
    kind = "right" if is_right else "wrong"
    return f'<td class="{kind}" style="--share:{100 * share:.0f}%">{number or ""}</td>'


def _mistakes_html(mistakes: Sequence[Mapping[str, Any]]) -> str:
    """Small pictures, the most confident mistake first."""
    if not mistakes:
        return ""
    figures = "".join(
        f'<figure><img alt="" src="data:image/jpeg;base64,{line["jpeg"]}">'
        f'<figcaption title="{escape(line["name"])}"><b>{escape(line["predicted"])}</b>, '
        f"{100 * line['probability']:.1f} % sure<br>label: {escape(line['label'])}</figcaption>"
        "</figure>\n"
        for line in mistakes
    )
    return f'<h3>Most confident mistakes</h3>\n<div class="mistakes">{figures}</div>\n'
