"""The fetcher of a stream, in this process: by need, verified, and each failure as one line."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dataset.errors import CommandError, DataError, PassingError, UserError
from dataset.fetch.ledger import Ledger, lock_folder
from dataset.own_names import part_path
from dataset.stream.arrivals import ArrivalMap, State
from dataset.stream.spec import NEVER, StreamSpec
from dataset.transfer.journal import CHUNK, num_chunks
from tests.dataset.director_server import DirectorHandler, directing
from tests.dataset.object_fetch import FAST, fetch
from tests.dataset.small_server import Handler
from tests.dataset.stream.streams import (
    CONTENT,
    NUM_CHUNKS,
    Gate,
    Stage,
    find_chunk,
    first_chunks,
    serving_counted,
    shuffled_needs,
)


def is_for(handler: Handler, chunk: int) -> bool:
    return find_chunk(handler) == chunk


def refuse_if(handler: Handler, is_refused: Callable[[int], object]) -> bool:
    chunk = find_chunk(handler)
    if chunk is None or not is_refused(chunk):
        return False
    handler.send_error(503)
    return True


def count_once(stage: Stage) -> int:
    """The bytes that were fetched, without those that came twice: a busy machine hedges."""
    tally = stage.maps[0].tally
    return tally.fetched - sum((tally.twice or {}).values())


def test_chunks_come_in_the_order_of_need(tmp_path: Path) -> None:
    stage, needs = Stage(tmp_path), shuffled_needs()
    with serving_counted() as (url, seen, _):
        stage.run(stage.make(url, needs, connections=1))
    asked = [int(needs[chunk]) for chunk in first_chunks(seen)]
    assert len(asked) > NUM_CHUNKS // 2
    assert asked == sorted(asked)
    assert stage.path.read_bytes() == CONTENT
    assert stage.maps[0].state is State.WHOLE
    assert Ledger(stage.data).vouches_for(stage.path)
    assert count_once(stage) == len(CONTENT)


def test_what_readers_wait_for_comes_first_and_the_rest_from_front_to_back(tmp_path: Path) -> None:
    """One is asked for before the start, another when the first request is on its way."""
    stage = Stage(tmp_path)

    def misbehave(handler: Handler) -> bool:
        if is_for(handler, 20):
            stage.maps[0].ask(15 * CHUNK, 16 * CHUNK)
        return False

    with serving_counted(misbehave=misbehave) as (url, seen, _):
        train = replace(stage.add(url, None), is_asked=True)
        stage.maps[0].ask(20 * CHUNK, 20 * CHUNK + 1)
        stage.run(stage.tell(train, connections=1))
    assert first_chunks(seen)[:3] == [20, 15, 0]
    assert stage.path.read_bytes() == CONTENT
    assert count_once(stage) == len(CONTENT)


def test_a_chunk_is_marked_when_it_is_right_and_not_before(tmp_path: Path) -> None:
    stage, gate, needs = Stage(tmp_path), Gate(), np.arange(NUM_CHUNKS, dtype=np.int32) * 10
    wrong = bytearray(CONTENT)
    wrong[2 * CHUNK + 5] ^= 1

    def misbehave(handler: Handler) -> bool:
        handler.content = CONTENT
        if is_for(handler, 2) and not gate.num_held:
            handler.content = bytes(wrong)
            gate.num_held += 1
        elif is_for(handler, 2):  # asked again: so it was seen to be wrong
            marks.append(stage.maps[0].here.copy())
        return False

    marks: list[np.ndarray] = []
    with serving_counted(misbehave=misbehave) as (url, _, _):
        stage.run(stage.make(url, needs, connections=1))
    assert [int(mark[2]) for mark in marks] == [0]
    assert stage.maps[0].tally.twice is not None
    assert stage.maps[0].tally.twice["wrong"] == CHUNK
    assert stage.path.read_bytes() == CONTENT


def directing_to(caches: list[str]) -> AbstractContextManager[str]:
    """The address of a federation that names these caches, the nearest first."""
    links = [f'<{url}>; rel="duplicate"; pri={n}' for n, url in enumerate(caches, 1)]
    space = "namespace=/, require-token=false"
    headers = {"Link": ", ".join(links), "X-Pelican-Namespace": space}
    return directing(lambda handler: (307, dict(headers)))


@pytest.mark.parametrize("fault", ["silent", "wrong"])
def test_a_chunk_at_the_head_is_replaced_by_another_cache(fault: str, tmp_path: Path) -> None:
    """The silent connection is never given up by time: its limit is longer than the test's."""
    stage, needs, gate = Stage(tmp_path), shuffled_needs(), Gate()
    head = int(needs.argmin())
    wrong = bytearray(CONTENT)
    wrong[head * CHUNK] ^= 1
    is_first = threading.Lock()

    def misbehave(handler: Handler) -> bool:
        handler.content = CONTENT
        if not is_for(handler, head) or not is_first.acquire(blocking=False):
            return False
        if fault == "wrong":
            handler.content = bytes(wrong)
            return False
        gate.hold()
        return True

    with ExitStack() as stack:
        caches = [stack.enter_context(serving_counted(misbehave=misbehave))[0] for _ in range(2)]
        place = stack.enter_context(directing_to(caches))
        stage.run(stage.make("osdf:///ns/object.bin", needs, federation=place))
        gate.is_open.set()
    assert stage.path.read_bytes() == CONTENT


def test_a_silent_chunk_is_asked_again_of_the_only_server(tmp_path: Path) -> None:
    stage, needs, gate = Stage(tmp_path), shuffled_needs(), Gate()
    head = int(needs.argmin())

    def misbehave(handler: Handler) -> bool:
        if is_for(handler, head) and not gate.num_held:
            gate.hold()
            return True
        return False

    with serving_counted(misbehave=misbehave) as (url, _, _):
        stage.run(stage.make(url, needs))
        gate.is_open.set()
    assert stage.path.read_bytes() == CONTENT


def test_a_stream_goes_on_where_a_fetch_stopped(tmp_path: Path) -> None:
    stage, is_broken = Stage(tmp_path), True

    def break_down(handler: Handler) -> bool:
        return is_broken and refuse_if(handler, lambda chunk: chunk > 4)

    with serving_counted(misbehave=break_down) as (url, _, _):
        with pytest.raises(PassingError):
            fetch(url, stage.data, replace(FAST, give_up_s=3.0, connections=1))
        is_broken = False
        stage.run(stage.make(url))
    resumed = stage.maps[0].tally.resumed
    assert resumed >= CHUNK and count_once(stage) == len(CONTENT) - resumed
    assert stage.path.read_bytes() == CONTENT


def test_a_fetch_finishes_what_a_stream_began(tmp_path: Path) -> None:
    stage, needs, is_broken = Stage(tmp_path), shuffled_needs(), True

    def break_down(handler: Handler) -> bool:
        return is_broken and refuse_if(handler, lambda chunk: needs[chunk] > 100)

    with serving_counted(misbehave=break_down) as (url, _, _):
        with pytest.raises(PassingError):
            stage.run(stage.make(url, needs, give_up_s=3.0))
        assert stage.maps[0].here.any() and stage.find_wrong_marks() == []
        assert isinstance(stage.maps[0].failure, PassingError)
        is_broken = False
        summary = fetch(url, stage.data)
    assert summary.resumed_bytes >= CHUNK
    fetched_once = summary.fetched_bytes - sum(summary.bytes_twice.values())
    assert fetched_once == len(CONTENT) - summary.resumed_bytes
    assert stage.path.read_bytes() == CONTENT


def test_what_is_whole_is_marked_at_once_without_a_server(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    with serving_counted() as (url, _, _):
        fetch(url, stage.data)
    stage.run(stage.make(url))
    assert stage.maps[0].state is State.WHOLE
    assert stage.maps[0].has(0, len(CONTENT))


def test_a_source_without_ranges_is_read_from_front_to_back_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def ignore_range(handler: Handler) -> bool:
        del handler.headers["Range"]
        return False

    stage = Stage(tmp_path)
    caplog.set_level("INFO")
    with serving_counted(misbehave=ignore_range) as (url, _, _):
        stage.run(stage.make(url))
    assert stage.path.read_bytes() == CONTENT
    assert stage.maps[0].state is State.WHOLE
    assert sum("from front to back" in line for line in caplog.messages) == 1


@pytest.mark.parametrize("shown_by", ["the size", "a block"])
def test_one_of_two_caches_without_ranges_is_asked_no_more_once_it_has_shown_that(
    shown_by: str, tmp_path: Path
) -> None:
    """Its answer to a block is not waited for: until it is hung up on, the other one is silent."""
    stage, asked, left_at, is_left = Stage(tmp_path), [], [], threading.Event()

    def ignore_range(handler: Handler) -> bool:
        chunk = find_chunk(handler)
        if chunk is None:
            if shown_by == "the size":
                del handler.headers["Range"]
            return False
        asked.append(chunk)
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(CONTENT)))
        handler.end_headers()
        with suppress(OSError):
            handler.connection.recv(1)  # ends when the fetcher hangs up
        left_at.append(int(stage.maps[0].here.sum()))
        is_left.set()
        handler.close_connection = True
        return True

    def be_silent(handler: Handler) -> bool:
        if asked and find_chunk(handler) is not None:
            is_left.wait(60)  # for ever, but for a fetcher that does not hang up
        return False

    with ExitStack() as stack:
        bare, _, _ = stack.enter_context(serving_counted(misbehave=ignore_range))
        good, _, _ = stack.enter_context(serving_counted(misbehave=be_silent))
        place = stack.enter_context(directing_to([bare, good]))
        url = "osdf:///ns/object.bin"
        stage.run(stage.make(url, connections=1, stall_s=200.0, federation=place))
    assert stage.path.read_bytes() == CONTENT
    assert len(asked) == 1 or (shown_by == "the size" and not asked)
    assert left_at == [0] * len(asked)


def fail(stage: Stage, spec: StreamSpec) -> CommandError:
    """The error of a stream; readers learn the same."""
    with pytest.raises(CommandError) as caught:
        stage.run(spec)
    for arrivals in stage.maps:
        told = arrivals.failure
        assert told is not None and told.exit_code == caught.value.exit_code
        assert str(told) == str(caught.value)
        assert "\n" not in str(told)
    return caught.value


def test_bytes_that_are_wrong_everywhere_end_it_with_3(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    with serving_counted(bytes(len(CONTENT))) as (url, _, _):
        error = fail(stage, stage.make(url))
    assert isinstance(error, DataError)
    assert not stage.maps[0].here.any()
    assert not stage.path.exists()


def test_503_for_ever_ends_it_with_75(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    with serving_counted(misbehave=lambda h: refuse_if(h, lambda chunk: True)) as (url, _, _):
        assert isinstance(fail(stage, stage.make(url, give_up_s=3.0)), PassingError)


def test_an_expired_token_is_named(tmp_path: Path) -> None:
    claims = base64.urlsafe_b64encode(json.dumps({"exp": time.time() - 60}).encode()).decode()
    token = tmp_path / "token"
    token.write_text(f"e30.{claims.rstrip('=')}.sig")
    stage = Stage(tmp_path / "stage")

    def decide(handler: DirectorHandler) -> tuple[int, dict[str, str]]:
        return 403, {}

    with directing(decide) as place:
        spec = stage.make("osdf:///ns/object.bin", federation=place, token=str(token))
        error = fail(stage, spec)
    assert isinstance(error, UserError) and "the token expired at" in str(error)


def test_an_object_of_another_size_than_its_index_ends_it_with_3(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    with serving_counted(CONTENT[:-1]) as (url, _, _):
        error = fail(stage, stage.make(url))
    assert isinstance(error, DataError) and str(len(CONTENT)) in str(error)


def test_another_etag_is_no_matter_where_every_mib_is_verified(tmp_path: Path) -> None:
    stage, number = Stage(tmp_path), 0

    def misbehave(handler: Handler) -> bool:
        nonlocal number
        number += 1
        send = handler.end_headers

        def end_headers() -> None:
            handler.send_header("ETag", f'"{number // 4}"')
            handler.end_headers = send  # type: ignore[method-assign]
            send()

        handler.end_headers = end_headers  # type: ignore[method-assign]
        return False

    with serving_counted(misbehave=misbehave) as (url, _, _):
        stage.run(stage.make(url))
    assert stage.path.read_bytes() == CONTENT


def test_a_second_job_in_the_folder_ends_at_once_and_names_the_first(tmp_path: Path) -> None:
    stage, gate = Stage(tmp_path), Gate()

    def hold(handler: Handler) -> bool:
        if not is_for(handler, 0) and "bytes=0-0" in handler.headers.get("Range", ""):
            gate.hold()
        return False

    with serving_counted(misbehave=hold) as (url, _, _):
        spec = stage.make(url)
        first = threading.Thread(target=stage.run, args=(spec,))
        first.start()
        other = Stage(tmp_path / "other")
        second = replace(other.make(url), data_dir=str(stage.data))
        while not gate.num_held:
            time.sleep(0.01)
        error = fail(other, second)
        gate.is_open.set()
        first.join()
    assert isinstance(error, UserError)
    assert "is being filled by process" in str(error) and f"a stream of {url}" in str(error)
    with lock_folder(stage.data, 0.0):  # it was given back
        assert stage.path.read_bytes() == CONTENT


VAL = CONTENT[: 3 * CHUNK + 5]


@pytest.mark.parametrize("val_first", [False, True])
def test_val_comes_behind_the_first_steps_or_before_all(val_first: bool, tmp_path: Path) -> None:
    stage, needs = Stage(tmp_path), shuffled_needs()
    at_val: list[int] = []

    def note(handler: Handler) -> bool:
        if not at_val:
            at_val.append(int((needs[stage.maps[0].here == 1] < 50).sum()))
        return False

    with serving_counted(piece_s=0.001) as (url, _, _):
        with serving_counted(VAL, note, name="val.bin") as (val_url, _, _):
            train, val = stage.add(url, needs), stage.add(val_url, None, VAL)
            stage.run(stage.tell(train, val=val, val_first=val_first, first_steps=50))
    assert at_val == [0 if val_first else (needs < 50).sum()]
    assert (stage.data / "val.bin").read_bytes() == VAL
    assert all(arrivals.state is State.WHOLE for arrivals in stage.maps)


def test_val_without_an_index_is_marked_when_it_is_whole_and_not_before(tmp_path: Path) -> None:
    stage, seen_marks = Stage(tmp_path), []

    def note(handler: Handler) -> bool:
        seen_marks.append(int(stage.maps[1].here.sum()))
        return False

    with serving_counted() as (url, _, _):
        with serving_counted(VAL, note, name="val.bin") as (val_url, _, _):
            train = stage.add(url, shuffled_needs())
            val = stage.add(val_url, None, VAL, has_index=False)
            stage.run(stage.tell(train, val=val))
    assert set(seen_marks) == {0}
    assert stage.maps[1].here.all() and stage.maps[1].state is State.WHOLE


def test_an_error_of_val_ends_the_stream(tmp_path: Path) -> None:
    stage = Stage(tmp_path)

    def refuse(handler: Handler) -> bool:
        handler.send_error(404)
        return True

    with serving_counted(piece_s=0.001) as (url, _, _):
        with serving_counted(VAL, refuse, name="val.bin") as (val_url, _, _):
            train, val = stage.add(url, shuffled_needs()), stage.add(val_url, None, VAL)
            with pytest.raises(UserError, match=r"val\.bin does not exist"):
                stage.run(stage.tell(train, val=val))
    assert isinstance(stage.maps[1].failure, UserError)


def test_marks_that_the_journal_does_not_vouch_for_are_taken_back(tmp_path: Path) -> None:
    stage, marks = Stage(tmp_path), []

    def note(handler: Handler) -> bool:
        if find_chunk(handler) is not None:
            marks.append(int(stage.maps[0].here[3]))
        return False

    with serving_counted(misbehave=note) as (url, _, _):
        spec = stage.make(url, np.arange(NUM_CHUNKS, dtype=np.int32)[::-1] * 10, connections=1)
        stage.maps[0].mark(3)
        stage.run(spec)
    assert marks[0] == 0
    assert stage.path.read_bytes() == CONTENT


def test_what_changed_on_the_disk_since_is_unmarked_and_fetched_again(tmp_path: Path) -> None:
    stage, needs, is_broken = Stage(tmp_path), shuffled_needs(), True

    def break_down(handler: Handler) -> bool:
        return is_broken and refuse_if(handler, lambda chunk: needs[chunk] > 100)

    with serving_counted(misbehave=break_down) as (url, _, _):
        with pytest.raises(PassingError):
            stage.run(stage.make(url, needs, give_up_s=3.0))
        damaged = int(np.flatnonzero(stage.maps[0].here)[0])
        with open(part_path(stage.path), "r+b") as file:
            file.seek(damaged * CHUNK)
            file.write(b"\0" * 1000)
        is_broken = False
        stage.run(stage.make(url, needs))
    assert stage.path.read_bytes() == CONTENT


def test_what_no_step_uses_arrives_too(tmp_path: Path) -> None:
    stage, needs = Stage(tmp_path), np.full(NUM_CHUNKS, NEVER, np.int32)
    needs[11] = 0
    with serving_counted() as (url, seen, _):
        stage.run(stage.make(url, needs, connections=1))
    assert first_chunks(seen)[0] == 11
    assert stage.path.read_bytes() == CONTENT


def test_a_map_of_another_size_is_refused(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    with serving_counted() as (url, _, _):
        thing = stage.add(url, shuffled_needs())
        small = ArrivalMap.create(tmp_path / "small", len(CONTENT) - CHUNK)
        assert num_chunks(small.size) == NUM_CHUNKS - 1
        spec = stage.tell(replace(thing, arrivals=str(small.path)))
        with pytest.raises(DataError, match="is for 24 chunks"):
            stage.run(spec)
