"""Images of a tar that is still arriving: a read waits for its bytes, and never takes a hole."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dataset.archive.index import build_index
from dataset.errors import CommandError, DataError, UserError
from dataset.stream.arrivals import ArrivalMap
from dataset.transfer.journal import CHUNK
from tests.dataset.tars import TRAIN, flatten, make_tree, nested_bytes, tar_bytes
from tests.train.data.arriving import Arriving, write_padded
from tests.train.data.small_batches import MICROBATCH, SEED, SIZE, digest, items_of
from train.data.batches import Images
from train.data.decode import choose_decoder
from train.data.loader import load_batches
from train.data.network_meter import NetworkMeter
from train.data.sampler import BatchPlan
from train.data.sources import TarSource
from train.data.stream_source import NETWORK, Starved, StreamSource

LARGE = {
    f"n{c:08d}": {f"n{c:08d}_{i}.JPEG": os.urandom(300_000 + i) for i in range(6)} for c in range(4)
}


@pytest.fixture(scope="session")
def padded(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_padded(images, tmp_path_factory.mktemp("padded") / "tars")


@pytest.fixture
def arriving(tmp_path: Path) -> Arriving:
    """Four class tars of 1.7 MiB."""
    (tmp_path / TRAIN).write_bytes(nested_bytes(LARGE))
    return Arriving(tmp_path / TRAIN, tmp_path / "data")


def wait_for(condition: Callable[[], object]) -> None:
    while not condition():
        threading.Event().wait(0.001)


# --- waiting ----------------------------------------------------------------------------------


def test_a_read_waits_until_its_last_chunk_is_here(arriving: Arriving) -> None:
    sample = next(i for i in range(24) if len(arriving.chunks_of(i)) == 2)
    first, second = arriving.chunks_of(sample)
    arriving.bring(first)
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(arriving.source.read, sample)
        wait_for(lambda: arriving.map.num_waiting == 1)
        assert not read.done() and arriving.source.explain_wait(sample) == NETWORK
        arriving.bring(second)
        assert read.result() == arriving.image(sample)
    assert arriving.map.num_waiting == 0 and "disk" in arriving.source.explain_wait(sample)
    assert (arriving.meter.hits, arriving.meter.misses) == (0, 1)
    waited_s = arriving.meter.waited_s
    assert waited_s > 0
    assert arriving.source.read(sample) == arriving.image(sample)
    assert (arriving.meter.hits, arriving.meter.misses) == (1, 1)
    assert arriving.meter.waited_s == waited_s


def test_all_images_are_those_of_the_whole_tar_in_any_order_of_arrival(arriving: Arriving) -> None:
    chunks = np.random.default_rng(1).permutation(len(arriving.map.here)).tolist()
    with ThreadPoolExecutor(8) as pool:
        reads = [pool.submit(arriving.source.read, i) for i in range(24)]
        wait_for(lambda: arriving.map.num_waiting == 8)
        for chunk in chunks:
            arriving.bring(chunk)
        found = [read.result() for read in reads]
    assert found == [arriving.image(i) for i in range(24)]
    assert arriving.map.num_waiting == 0
    assert arriving.source.list_unproven() == []


def test_the_time_of_two_that_wait_at_once_is_counted_once(arriving: Arriving) -> None:
    meter = arriving.meter
    with meter.waiting(lambda change: None):
        before_s = meter.waited_s
        with meter.waiting(lambda change: None):
            wait_for(lambda: meter.waited_s > before_s)
        inner_s = meter.waited_s
        wait_for(lambda: meter.waited_s > inner_s)
    assert meter.misses == 2
    ended_s = meter.waited_s
    with meter.waiting(lambda change: None):
        wait_for(lambda: meter.waited_s > ended_s)


def test_a_hole_is_never_an_image(arriving: Arriving, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk that turns out to be wrong while it is read is waited for once more."""
    (chunk,) = arriving.chunks_of(sample := 1)
    arriving.bring_all()
    read_bytes = TarSource._read_bytes
    reads: list[bytes] = []

    def take_back_first(*args: object) -> bytes:
        if not reads:
            arriving.map.unmark(chunk, chunk + 1)
            with open(arriving.part, "r+b") as file:
                file.seek(chunk * CHUNK)
                file.write(bytes(CHUNK))
        reads.append(read_bytes(*args))  # type: ignore[arg-type]
        return reads[-1]

    monkeypatch.setattr(TarSource, "_read_bytes", take_back_first)
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(arriving.source.read, sample)
        wait_for(lambda: arriving.map.num_waiting == 1)
        arriving.bring(chunk)
        assert read.result() == arriving.image(sample)
    assert len(reads) == 2 and not any(reads[0])


def test_the_descriptor_outlives_the_final_name(arriving: Arriving) -> None:
    arriving.bring(0)
    assert arriving.source.read(0) == arriving.image(0)
    arriving.source.check_unchanged()
    arriving.finish()
    assert [arriving.source.read(i) for i in range(24)] == [arriving.image(i) for i in range(24)]
    arriving.source.check_unchanged()
    late = StreamSource(arriving.index, arriving.map, arriving.meter)
    assert late.read(23) == arriving.image(23)


@pytest.mark.parametrize("is_whole", [False, True])
def test_another_file_in_the_place_of_the_tar_is_noticed(
    arriving: Arriving, is_whole: bool
) -> None:
    arriving.source.check_unchanged()  # there may be no file yet
    arriving.bring_all()
    arriving.source.read(0)
    path = arriving.part
    if is_whole:
        arriving.finish()
        arriving.source.check_unchanged()
        path = arriving.path
    other = path.with_name("other")
    other.write_bytes(arriving.data)
    other.rename(path)
    with pytest.raises(DataError, match="was changed during the training"):
        arriving.source.check_unchanged()


# --- failures ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("code", "kind"), [(75, Starved), (3, DataError), (2, UserError)])
def test_a_failure_of_the_fetcher_ends_those_who_wait(
    arriving: Arriving, code: int, kind: type[CommandError]
) -> None:
    arriving.bring(*arriving.chunks_of(0))
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(arriving.source.read, 23)
        wait_for(lambda: arriving.map.num_waiting == 1)
        arriving.map.fail(code, "no more will come")
        with pytest.raises(kind, match="no more will come") as raised:
            read.result()
    assert raised.value.exit_code == code and arriving.map.num_waiting == 0
    assert arriving.source.read(0) == arriving.image(0)  # what is here can be used


def test_wrong_data_ends_also_those_who_have_all_they_need(arriving: Arriving) -> None:
    arriving.bring_all()
    arriving.source.read(0)
    arriving.map.fail(75, "the network has been gone for six hours")
    arriving.source.check_unchanged()
    arriving.map.fail(3, "its digest is wrong")
    with pytest.raises(DataError, match=r"^its digest is wrong$"):
        arriving.source.check_unchanged()


def test_a_rank_among_others_waits_no_longer_than_they_do(arriving: Arriving) -> None:
    arriving.source.count_on(arriving.meter, 0, max_wait_s=0.001)
    with pytest.raises(Starved, match=r"has not brought .* of ILSVRC2012_img_train.tar"):
        arriving.source.read(0)


# --- processes --------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes_share_the_map_and_the_counts(arriving: Arriving, method: str) -> None:
    arriving.bring(*arriving.chunks_of(0))
    arriving.source.read(0)
    context = multiprocessing.get_context(method)
    with context.Pool(2) as pool:
        reads = [pool.apply_async(arriving.source.read, (i,)) for i in (0, 23)]
        wait_for(lambda: arriving.map.num_waiting == 1)
        arriving.bring_all()
        assert [read.get() for read in reads] == [arriving.image(0), arriving.image(23)]
    assert (arriving.meter.hits, arriving.meter.misses) == (2, 1)
    assert arriving.map.num_waiting == 0


def test_each_rank_counts_for_itself(arriving: Arriving, tmp_path: Path) -> None:
    other: StreamSource = pickle.loads(pickle.dumps(arriving.source))
    meter = NetworkMeter(tmp_path / "other")
    other.count_on(meter, 5)
    arriving.bring(*arriving.chunks_of(0))
    other.read(0)
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(other.read, 23)
        wait_for(lambda: arriving.map.cursors[5, 1] == 1)
        assert arriving.map.num_waiting == 1
        arriving.bring_all()
        read.result()
    assert (meter.hits, meter.misses, arriving.meter.hits, arriving.meter.misses) == (1, 1, 0, 0)


# --- is the index true? -----------------------------------------------------------------------


def test_a_class_whose_class_tar_is_not_here_is_proven_later(arriving: Arriving) -> None:
    """The last class begins in chunk 5, its last image ends in chunk 6."""
    arriving.bring(*arriving.chunks_of(23))
    assert arriving.source.read(23) == arriving.image(23)
    assert arriving.source.list_unproven() == [f"n{c:08d}" for c in range(4)]
    arriving.bring(5)
    assert arriving.source.list_unproven() == [f"n{c:08d}" for c in range(3)]
    arriving.bring_all()
    assert arriving.source.list_unproven() == []


def test_a_tree_and_a_flat_tar_need_no_class_tar(tmp_path: Path) -> None:
    (tmp_path / TRAIN).write_bytes(tar_bytes(flatten(LARGE)))
    tree = Arriving(tmp_path / TRAIN, tmp_path / "data")
    tree.bring(0)
    assert tree.source.read(0) == tree.image(0)
    assert tree.source.list_unproven() == [f"n{c:08d}" for c in range(1, 4)]
    tree.bring_all()
    assert tree.source.list_unproven() == []
    flat = replace(tree.index, labels_from="a label file")
    source = StreamSource(flat, ArrivalMap(tree.map.path), tree.meter)
    assert source.list_unproven() == [] and len(source.proofs[0]) == 0


@pytest.mark.parametrize("comes", ["class tar first", "class tar last"])
def test_permuted_classes_are_refused_as_soon_as_a_class_tar_is_here(
    arriving: Arriving, tmp_path: Path, comes: str
) -> None:
    names = arriving.index.classes
    wrong = replace(arriving.index, classes=[*names[1:], names[0]])
    source = StreamSource(wrong, arriving.map, arriving.meter)
    arriving.bring(*(arriving.chunks_of(23) if comes == "class tar last" else [0, 1]))
    if comes == "class tar last":
        assert source.read(23) == arriving.image(23)
        arriving.bring(5)
        with pytest.raises(DataError, match="is wrong: it has all images of n00000000"):
            source.list_unproven()
    else:
        with pytest.raises(DataError, match="is wrong: it has all images of n00000001"):
            source.read(0)


def test_shifted_offsets_are_refused(arriving: Arriving) -> None:
    wrong = replace(arriving.index, offset=arriving.index.offset - 512)
    arriving.bring(0, 1)
    with pytest.raises(DataError, match=r"the index of .* is wrong"):
        StreamSource(wrong, arriving.map, arriving.meter).read(0)


def test_long_names_are_looked_up_in_the_same_unit(tmp_path: Path) -> None:
    """The image lies at the start of chunk 1, its name in a record that ends chunk 0."""
    name, tree = "a" * 120, make_tree()
    files = {"n00000000/" + f"{name}{i}.JPEG": bytes([i]) * (CHUNK - 1600) for i in range(3)}
    (tmp_path / TRAIN).write_bytes(tar_bytes(files | flatten(tree)))
    tar = Arriving(tmp_path / TRAIN, tmp_path / "data")
    sample = 1
    assert tar.index.offset[sample] % CHUNK < 4096
    tar.bring(*tar.chunks_of(sample))
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(tar.source.read, sample)
        tar.bring_all()
        assert read.result() == tar.image(sample)


# --- batches ----------------------------------------------------------------------------------


def bring_at_random(tar: Arriving) -> None:
    for chunk in np.random.default_rng(2).permutation(len(tar.map.here)).tolist():
        tar.bring(chunk)


@pytest.fixture
def both(padded: Path, tmp_path: Path) -> Iterator[list[Arriving]]:
    yield [Arriving(tar, tmp_path / tar.stem) for tar in sorted(padded.glob("*.tar"))]


@pytest.mark.parametrize(("decoder", "workers"), [("pil", 0), ("pil", 2), ("kernel", 2)])
def test_batches_are_those_of_the_local_tars(
    both: list[Arriving], padded: Path, decoder: str, workers: int
) -> None:
    """In place, in worker processes, and in threads."""
    plan = BatchPlan(42, 8, MICROBATCH, 0, 1)

    def make(sources: list[TarSource]) -> Images:
        return Images(sources[0], sources[1], plan, SIZE, SEED, choose_decoder(decoder))

    local = make([TarSource(build_index(tar)[0]) for tar in sorted(padded.glob("*.tar"))])
    streamed = make([tar.source for tar in both])
    items = items_of(streamed)
    with ThreadPoolExecutor(2) as pool:
        brought = pool.map(bring_at_random, both)
        found = list(map(digest, load_batches(streamed, items, workers)))
        list(brought)
    assert found == list(map(digest, load_batches(local, items, 0)))
