"""The end of a streamed run: what it waits for, what it leaves, and what ends it badly."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dataset.errors import DataError, PassingError
from tests.train.data.arriving import Arriving, write_padded
from train.ranks.interrupt import Vote
from train.stream import nodes
from train.stream.nodes import await_verification, prove_classes


@pytest.fixture
def tar(images: Path, tmp_path: Path) -> Arriving:
    tars = write_padded(images, tmp_path / "tars")
    return Arriving(tars / "ILSVRC2012_img_train.tar", tmp_path / "data")


def then(*actions: Callable[[], object]) -> Callable[[], Vote]:
    """Does one thing at each look, and never wants to stop."""
    left = list(actions)

    def ask() -> Vote:
        left.pop(0)()
        return Vote.GO_ON

    return ask


def stop() -> Vote:
    return Vote.EXIT


def never() -> Vote:
    raise AssertionError("it waits")


def test_it_waits_for_the_class_tars_that_are_still_to_come(tar: Arriving) -> None:
    tar.bring(0, 1, 2)
    ask = then(lambda: tar.bring(6), lambda: tar.bring(3, 4), lambda: tar.bring(5))
    assert prove_classes([tar.source], ask) is Vote.GO_ON
    assert tar.source.list_unproven() == []
    assert prove_classes([tar.source], never) is Vote.GO_ON


def test_a_stop_ends_the_waiting(tar: Arriving) -> None:
    assert prove_classes([tar.source], stop) is Vote.EXIT
    tar.bring_all()
    assert await_verification([tar.source], stop) is Vote.EXIT


def test_it_ends_with_what_ended_the_fetcher(tar: Arriving) -> None:
    ask = then(lambda: tar.map.fail(75, "nothing comes"))
    with pytest.raises(PassingError, match="nothing comes"):
        prove_classes([tar.source], ask)


def test_a_tar_that_is_all_here_is_waited_for_until_it_has_its_name(tar: Arriving) -> None:
    tar.bring_all()
    assert await_verification([tar.source], then(lambda: None, tar.finish)) is Vote.GO_ON
    assert tar.path.exists()


def test_a_tar_that_is_not_all_here_is_left_as_it_is(tar: Arriving) -> None:
    tar.bring(0, 1)
    assert await_verification([tar.source], never) is Vote.GO_ON


def test_a_wrong_digest_is_no_good_end(tar: Arriving) -> None:
    tar.bring_all()
    ask = then(lambda: tar.map.fail(3, "another digest"))
    with pytest.raises(DataError, match="another digest"):
        await_verification([tar.source], ask)


def test_a_passing_failure_of_the_verification_is_left_to_the_next_start(tar: Arriving) -> None:
    tar.bring_all()
    ask = then(lambda: tar.map.fail(75, "the origin is away"))
    assert await_verification([tar.source], ask) is Vote.GO_ON


def test_the_waiting_for_a_verification_has_an_end(
    tar: Arriving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "MAX_VERIFY_S", 0.0)
    tar.bring_all()
    assert await_verification([tar.source], lambda: Vote.GO_ON) is Vote.GO_ON
