"""The page's part on an evaluation: its sums are the set's, and damage is said and left out."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from dataset.errors import DataError
from report.evaluation import OTHERS, Evaluation, load_evaluations, read_evaluation
from report.evaluation_html import MAX_ROWS, MAX_SHOWN, class_table, evaluations_html
from tests.report.chromium import start_browser
from tests.report.evaluations import write_evaluation
from tests.scripts.commands import run_script


def small() -> Evaluation:
    """Six images: a is right twice of three, b once of two, c never."""
    return Evaluation(
        source="x",
        classes=["a", "b", "c", "d"],
        labels=np.array([0, 0, 0, 1, 1, 2]),
        best=np.array([0, 0, 1, 1, 3, 0]),
        confidence=np.array([0.95, 0.85, 0.55, 0.95, 0.35, 0.15]),
        num_right5=6,
    )


def test_classes_are_counted_the_worst_first_with_what_they_were_taken_for() -> None:
    rows = [(r.name, r.num_images, r.num_right, r.mistaken_for) for r in small().class_results]
    assert rows == [("c", 1, 0, "a"), ("b", 2, 1, "d"), ("a", 3, 2, "b")]


def test_the_matrix_has_labels_in_rows_and_sums_to_the_set() -> None:
    names, matrix = small().confuse(4)
    assert names == ["a", "b", "c", "d"]
    assert matrix.tolist() == [[2, 1, 0, 0], [0, 1, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0]]
    names, matrix = small().confuse(2)
    assert names == ["b", "c", OTHERS]
    assert matrix.tolist() == [[1, 0, 1], [0, 0, 1], [1, 0, 2]] and matrix.sum() == 6


def test_the_calibration_error_is_the_mean_gap_of_its_bins() -> None:
    bins = [(b.num_images, b.confidence, b.accuracy) for b in small().bins]
    expected = [(1, 0.15, 0), (1, 0.35, 0), (1, 0.55, 0), (1, 0.85, 1), (2, 0.95, 1)]
    assert bins == [pytest.approx(b) for b in expected]
    assert small().calibration_error == pytest.approx((0.15 + 0.35 + 0.55 + 0.15 + 2 * 0.05) / 6)


def test_answers_that_are_right_as_often_as_they_say_have_a_small_error(tmp_path: Path) -> None:
    found, _ = read_evaluation(write_evaluation(tmp_path, 6, 4000))
    assert found.calibration_error < 0.03
    assert found.num_images == 4000 and len(found.mistakes) == 3


def test_many_classes_are_cut_to_the_worst_and_the_csv_has_all(tmp_path: Path) -> None:
    found, _ = read_evaluation(write_evaluation(tmp_path, 150, 3000))
    names, matrix = found.confuse(MAX_SHOWN)
    assert len(names) == MAX_SHOWN + 1 and matrix.sum() == 3000
    table = class_table(found)
    assert len(table.rows) == MAX_ROWS and len(table.data) == 150
    assert sum(int(str(row["images"])) for row in table.data) == 3000


def test_damage_is_left_out_and_said(tmp_path: Path) -> None:
    path = write_evaluation(tmp_path / "a", 3, 50)
    text = path.read_text()
    lines = text.splitlines()
    bad = [re.sub(r",0\.\d+", ",nan", lines[3], count=1), lines[4][:9], "x,y,z,7,a,b,c,d,e"]
    path.write_text("\n".join([*lines, *bad]) + "\n")
    (tmp_path / "a" / "mistakes.jsonl").write_text(
        '{"name": 3}\n{"name": "n", "label": "l", "predicted": "p", "probability": 0.5, '
        '"jpeg": "\\"><script>alert(1)</script>"}\n{torn'
    )
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "predictions.csv").write_bytes(b"\0\xff\n" * 9)
    (found,), notes = load_evaluations([tmp_path])
    assert found.num_images == 50 and found.mistakes == []
    assert notes == [
        f"{path}: 3 damaged rows left out",
        f"left out: {tmp_path}/b/predictions.csv has no predictions; make it again with python -m "
        "train DATA -e",
    ]
    with pytest.raises(DataError, match="has no predictions"):
        read_evaluation(tmp_path / "b" / "predictions.csv")


def test_names_are_escaped(tmp_path: Path) -> None:
    found, _ = read_evaluation(write_evaluation(tmp_path, 4, 60))
    html = evaluations_html([found], with_pictures=False)
    assert "class &lt;1&gt;" in html and "class <" not in html


def test_report_takes_a_folder_with_an_evaluation_alone_and_the_file(tmp_path: Path) -> None:
    path = write_evaluation(tmp_path / "out", 4, 60)
    for given in (path.parent, path):
        made = run_script("report", str(given), "--out", "page.html", cwd=tmp_path)
        assert made.returncode == 0, made.stderr
        page = (tmp_path / "page.html").read_text()
        assert page.count("data:image/jpeg;base64,") == 3 and "Confusion matrix" in page
    path.write_text("name,label\n")
    (path.parent / "mistakes.jsonl").unlink()
    refused = run_script("report", str(path), "--out", "page.html", cwd=tmp_path)
    assert refused.returncode == 2 and "has no predictions" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1


@pytest.mark.browser
def test_it_is_shown_in_both_themes_and_fits_a_phone(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    paths = [write_evaluation(tmp_path / f"{num}", num, 400) for num in (5, 40)]
    run_script("report", *map(str, paths), "--out", str(page), cwd=tmp_path)
    with start_browser(tmp_path / "profile") as browser:
        shades = []
        for dark in (False, True):
            browser.open(page, dark=dark)
            assert browser.problems == []
            shade = "getComputedStyle(document.querySelector('.confusion .right')).backgroundColor"
            shades.append(browser.run(shade))
            sizes = "[...document.images].map(image => image.naturalWidth)"
            assert browser.run(sizes) == [48] * 6
        assert shades[0] != shades[1]
        browser.open(page, width=390)
        assert browser.run("document.documentElement.scrollWidth") <= 390
