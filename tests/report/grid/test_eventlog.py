"""Event logs are read whole: torn, odd, mixed and rotated ones too."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataset.errors import UserError
from report.grid.eventlog import EventLog, JobId, read_event_log, read_event_logs
from tests.report.eventlogs import EVERY_KIND, START, LogWriter, write_event


@pytest.fixture
def new_york(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def read_text(folder: Path, text: str) -> EventLog:
    path = folder / "job.log"
    path.write_text(text)
    return read_event_log(path)


def kinds(log: EventLog) -> list[int]:
    return [event.kind for event in log.events]


def test_every_documented_kind_is_read(tmp_path: Path) -> None:
    import htcondor2

    documented = {int(kind) for kind in htcondor2.JobEventType if int(kind) < 100}
    assert set(EVERY_KIND) == documented
    log = read_text(tmp_path, "".join(write_event(k, body) for k, body in EVERY_KIND.items()))
    assert kinds(log) == sorted(EVERY_KIND)
    assert (log.num_torn, log.num_unreadable, log.unknown_kinds) == (0, 0, {})


def test_an_unknown_kind_is_counted_and_what_follows_is_read(tmp_path: Path) -> None:
    text = write_event(98, "Something new\n\tand = 1\n") * 2 + write_event(9, EVERY_KIND[9])
    log = read_text(tmp_path, text)
    assert log.unknown_kinds == {98: 2}
    assert kinds(log) == [98, 98, 9]


def test_the_body_that_the_bindings_refuse_leaves_its_header(tmp_path: Path) -> None:
    text = write_event(5, "Job terminated.\n\tnonsense\n", at_s=7) + write_event(9, EVERY_KIND[9])
    log = read_text(tmp_path, text)
    assert log.num_unreadable == 1
    assert kinds(log) == [5, 9]
    assert (log.events[0].fields, log.events[0].job) == ({}, JobId(100, 0))
    assert log.events[0].time_s == START.timestamp() + 7


@settings(max_examples=40, deadline=None)
@given(cut=st.integers(min_value=0, max_value=10_000))
def test_a_log_cut_anywhere_gives_its_whole_events(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    writer = LogWriter().transfer("Started input", 1).transfer("Finished input", 2).execute(3)
    text = writer.hold(4, 13, 22).terminate(9).text
    cut %= len(text) + 1
    num_whole = f"{text[:cut]}\n".count("\n...\n")  # the last line end may be missing
    if num_whole == 0:
        return
    log = read_text(tmp_path_factory.mktemp("cut"), text[:cut])
    assert kinds(log) == [0, 40, 40, 1, 12, 5][:num_whole]
    assert log.num_torn == (0 if text[:cut].rstrip("\n").endswith("\n...") else 1)


def test_events_after_a_torn_one_are_not_lost(tmp_path: Path) -> None:
    torn = write_event(12, EVERY_KIND[12])[:60]
    text = write_event(0, EVERY_KIND[0]) + torn + write_event(1, EVERY_KIND[1])
    text += "a line that is no event\n...\n" + write_event(9, EVERY_KIND[9])
    log = read_text(tmp_path, text)
    assert kinds(log) == [0, 1, 9]
    assert log.num_torn == 2


def test_interleaved_clusters_keep_their_ids(tmp_path: Path) -> None:
    text = "".join(
        write_event(40, EVERY_KIND[40], job=f"{cluster}.{proc:03d}.000")
        for proc in range(3)
        for cluster in (794569, 794570)
    )
    jobs = [str(event.job) for event in read_text(tmp_path, text).events]
    assert jobs == [f"{c}.{p:03d}.000" for p in range(3) for c in (794569, 794570)]


def test_all_time_formats_mean_the_same_moment(tmp_path: Path, new_york: None) -> None:
    formats = ["2026-09-01 06:01:00", "2026-09-01T10:01:00Z", "2026-09-01T10:01:00.250Z",
               "2026-09-01 06:01:00.250", "09/01 06:01:00"]  # fmt: skip
    text = "".join(f"009 (1.{i:03d}.000) {t} {EVERY_KIND[9]}...\n" for i, t in enumerate(formats))
    path = tmp_path / "job.log"
    path.write_text(text)
    moment = 1788256860  # 2026-09-01 10:01:00 UTC
    os.utime(path, (moment + 3600, moment + 3600))
    times = [event.time_s for event in read_event_log(path).events]
    assert times == [moment, moment, moment + 0.25, moment + 0.25, moment]


def test_a_date_without_a_year_lies_before_the_file_was_written(tmp_path: Path) -> None:
    path = tmp_path / "job.log"
    path.write_text(
        f"009 (1.000.000) 12/31 23:00:00 {EVERY_KIND[9]}...\n"
        f"009 (1.000.000) 01/01 01:00:00 {EVERY_KIND[9]}...\n"
    )
    written = time.mktime((2025, 1, 2, 0, 0, 0, 0, 0, -1))
    os.utime(path, (written, written))
    first, second = (event.time_s for event in read_event_log(path).events)
    assert second - first == 7200
    assert time.localtime(first).tm_year == 2024


def test_rotated_files_come_in_the_order_of_time_and_copies_count_once(tmp_path: Path) -> None:
    old, new, again = tmp_path / "job.log.old", tmp_path / "job.log", tmp_path / "nodes.log"
    writer = LogWriter().transfer("Started input", 1)
    old.write_text(writer.text)
    newer = LogWriter()
    newer.text = ""
    new.write_text(newer.execute(2).message(3, "one").message(3, "two").terminate(9).text)
    again.write_text(writer.text + newer.text)
    for paths in ([new, old], [new, old, again], [again, again]):
        assert kinds(read_event_logs(paths)) == [0, 40, 1, 21, 21, 5]


def test_xml_and_json_logs_are_read(tmp_path: Path) -> None:
    xml = """<?xml version="1.0"?>
<!DOCTYPE classads SYSTEM "classads.dtd">
<classads>
<c>
    <a n="MyType"><s>ExecuteEvent</s></a>
    <a n="EventTypeNumber"><i>1</i></a>
    <a n="EventTime"><s>2026-09-01T10:00:00</s></a>
    <a n="ExecuteHost"><s>&lt;127.0.0.1:1></s></a>
    <a n="Cluster"><i>17</i></a>
    <a n="Proc"><i>3</i></a>
    <a n="Subproc"><i>0</i></a>
</c>
"""
    as_json = """{
"MyType":"ExecuteEvent","EventTypeNumber":1,"EventTime":"2026-09-01T10:00:00",
"ExecuteHost":"<127.0.0.1:1>","Cluster":17,"Proc":3,"Subproc":0}
"""
    for text in (xml, as_json):
        (event,) = read_text(tmp_path, text).events
        assert (event.kind, event.job, event.time_s) == (1, JobId(17, 3), START.timestamp())


@pytest.mark.parametrize("content", [b"hello\nworld\n", bytes(range(256)), b"a,b\n1,2\n"])
def test_a_file_that_is_no_log_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"no HTCondor event in .*notes\.txt; give the file"):
        read_event_log(path)


def test_an_empty_log_has_no_events(tmp_path: Path) -> None:
    assert read_text(tmp_path, "").events == ()


def test_a_message_with_a_dotted_line_does_not_split_an_event(tmp_path: Path) -> None:
    log = read_text(
        tmp_path, write_event(12, "Job was held.\n\twait ...\n\t...\n\tCode 1 Subcode 0\n")
    )
    assert (kinds(log), log.num_torn) == ([12], 0)
