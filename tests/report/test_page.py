"""The page in a real browser: loads, sorts, fits a phone, both themes, nothing from a network."""

from __future__ import annotations

import csv
import io
import json
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

import pytest

from report.curves import load_epochs
from report.grid.osg_study import read_study
from report.grid.replay import read_replay
from report.page import Contents, build_page
from report.runs import load_runs
from report.scaling import build_studies
from report.search.trials import load_search
from report.stages import read_published_stages, summarise_stages
from tests.report.chromium import Browser, start_browser
from tests.report.records import KEMPNER, PUBLISHED, REPLAY, write_run
from tests.report.searches import write_search

pytestmark = pytest.mark.browser
STAGE = {
    "stage": "train",
    "seconds": 60.0,
    "cpu_pct": 99.0,
    "peak_rss_bytes": 2_000_000_000,
    "bytes_read": 10_000_000,
    "bytes_written": 5_000_000,
}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with everything on it: our runs with repeats, published runs, stages, a grid."""
    from report.grid.report import make_report

    folder = tmp_path_factory.mktemp("page")
    for num_gpus in (1, 2, 4):
        for repeat in range(2):
            seconds = 100 / num_gpus + 10 + repeat
            write_run(folder, f"run{num_gpus}-{repeat}", num_gpus, wall_clock_s=seconds)
    write_run(folder, "failed", 8, status="failed", exit_code=4)
    runs, notes = load_runs([folder, KEMPNER], epochs=90)
    contents = Contents(
        title="All <of> it",
        runs=runs,
        studies=build_studies(runs, predict=[16]),
        epochs=load_epochs(runs)[0],
        stages=summarise_stages([STAGE]),
        published_stages=read_published_stages(),
        grids=[make_report("Grid", read_study(PUBLISHED / "osg_5_epochs_pilot.csv"))],
        replays=[read_replay(REPLAY)],
        searches=[load_search(write_search(folder / "search"))[0]],
        notes=[*notes, "a <note>"],
    )
    path = folder / "report.html"
    path.write_text(build_page(contents))
    return path


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with start_browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.mark.parametrize("dark", [False, True])
def test_it_loads_without_errors_or_requests_in_both_themes(
    browser: Browser, page: Path, dark: bool
) -> None:
    browser.open(page, dark=dark)
    assert browser.problems == []
    assert browser.run("document.title") == "All <of> it"
    colour = browser.run("getComputedStyle(document.body).backgroundColor")
    assert colour == ("rgb(20, 24, 28)" if dark else "rgb(255, 255, 255)")


def test_the_button_switches_the_theme(browser: Browser, page: Path) -> None:
    browser.open(page)
    ink = "getComputedStyle(document.querySelector('figure svg text')).fill"
    before = browser.run(ink)
    browser.run("document.getElementById('theme').click()")
    assert browser.run("document.documentElement.dataset.theme") == "dark"
    assert browser.run(ink) != before


def test_sections_come_in_order_with_their_tables_and_pictures(
    browser: Browser, page: Path
) -> None:
    browser.open(page)
    titles = browser.run("[...document.querySelectorAll('h2')].map(e => e.textContent)")
    assert titles == [
        "Summary",
        "Scaling",
        "Where the time went",
        "Loss and accuracy",
        "Search",
        "Stages",
        "Grid",
        "Replay",
        "Provenance",
    ]
    figures = browser.run(
        "[...document.querySelectorAll('figure')].map(f => [f.dataset.name, "
        "f.querySelectorAll('svg path').length, "
        "f.querySelector('svg').getBoundingClientRect().height])"
    )
    assert {name for name, _, _ in figures} >= {
        "efficiency",
        "speedup",
        "phases",
        "loss",
        "accuracy",
        "history",
        "parallel",
        "importance",
    }
    assert all(num_paths > 5 and height > 100 for _, num_paths, height in figures)
    tables = set(browser.run("[...document.querySelectorAll('table')].map(t => t.dataset.name)"))
    assert tables >= {
        "scaling",
        "phases",
        "fit",
        "time_to_accuracy",
        "stages",
        "runs",
        "jobs",
        "replay",
    }
    assert tables >= {"trials", "importance", "workflows", "placements"}


def test_ids_are_unique_and_every_reference_resolves(browser: Browser, page: Path) -> None:
    browser.open(page)
    ids = browser.run("[...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(ids) == len(set(ids))
    dangling = browser.run(
        "[...document.querySelectorAll('use')].map(u => u.getAttribute('xlink:href').slice(1))"
        ".filter(id => !document.getElementById(id))"
    )
    assert dangling == []


def test_tables_sort_by_number_and_by_word(browser: Browser, page: Path) -> None:
    browser.open(page)
    column = (
        "[...document.querySelectorAll('table[data-name=runs] tbody tr')]"
        ".map(row => row.cells[{}].textContent)"
    )
    click = "document.querySelectorAll('table[data-name=runs] th button')[{}].click()"
    browser.run(click.format(3))
    sizes = [int(text) for text in browser.run(column.format(3))]
    assert sizes == sorted(sizes) and len(set(sizes)) == 4
    browser.run(click.format(3))
    sizes = [int(text) for text in browser.run(column.format(3))]
    assert sizes == sorted(sizes, reverse=True)
    browser.run(click.format(1))
    words = browser.run(column.format(1))
    assert words == sorted(words)
    heading = "document.querySelectorAll('table[data-name=runs] th')[1].getAttribute('aria-sort')"
    assert browser.run(heading) == "ascending"


def test_nothing_overflows_on_a_phone(browser: Browser, page: Path) -> None:
    browser.open(page, width=400, height=800)
    assert browser.run("document.documentElement.scrollWidth") <= 400
    wide = browser.run(
        "[...document.querySelectorAll('body *')].filter(e => !e.closest('.scroll') && "
        "e.getBoundingClientRect().right > 401).map(e => e.outerHTML.slice(0, 80))"
    )
    assert wide == []


def test_text_of_pictures_can_be_read_on_a_phone(browser: Browser, page: Path) -> None:
    browser.open(page, width=400, height=800)
    smallest = browser.run(
        "Math.min(...[...document.querySelectorAll('figure[data-name=efficiency] svg text')]"
        ".map(t => t.getBoundingClientRect().height))"
    )
    assert smallest >= 8


def test_every_table_can_be_saved_as_csv(browser: Browser, page: Path) -> None:
    browser.open(page)
    links = browser.run(
        "[...document.querySelectorAll('a.csv')].map(a => [a.download, a.getAttribute('href')])"
    )
    assert len(links) == browser.run("document.querySelectorAll('table').length")
    data = urllib.parse.unquote(dict(links)["scaling.csv"].partition(",")[2])
    rows = list(csv.DictReader(io.StringIO(data)))
    assert [row["num_gpus"] for row in rows] == ["1", "2", "4", "8", "16"]
    assert rows[0]["num_repeats"] == "2"
    assert rows[3]["note"].startswith("predicted; failed")


def test_words_from_records_are_escaped(tmp_path: Path) -> None:
    write_run(tmp_path, "one", host="<script>alert(1)</script>", config={"arch": '"><b>x'})
    runs, notes = load_runs([tmp_path])
    text = build_page(Contents("t", runs, build_studies(runs), notes=notes))
    assert "<script>alert" not in text
    assert '"><b>x' not in text


def test_a_thousand_runs_make_a_page(tmp_path: Path, browser: Browser) -> None:
    from tests.report.records import run_record

    for index in range(1000):
        folder = tmp_path / f"run{index:04d}"
        folder.mkdir()
        record = run_record(folder.name, 2 ** (index % 6), wall_clock_s=50.0 + index % 7)
        (folder / "run.json").write_text(json.dumps(record))
    runs, notes = load_runs([tmp_path])
    path = tmp_path / "report.html"
    path.write_text(build_page(Contents("t", runs, build_studies(runs), notes=notes)))
    browser.open(path)
    assert browser.problems == []
    rows = "document.querySelectorAll('table[data-name=runs] tbody tr').length"
    assert browser.run(rows) == 1000
