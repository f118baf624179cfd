"""The same pictures from folder and tar, on any ranks and workers; bad images and dead workers."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from dataset.archive.index import build_index
from dataset.archive.index_file import TarIndex
from dataset.errors import DataError, PassingError, UserError
from tests.train.data.small_batches import (
    BATCH,
    MICROBATCH,
    NUM_TRAIN,
    NUM_VAL,
    SEED,
    SIZE,
    digest,
    items_of,
    load,
    open_images,
    spoil,
)
from train.data.batches import LOOK_S, Item
from train.data.decode import UNIFORMS_PER_SAMPLE, decode_train
from train.data.loader import _raise_once, load_batches
from train.data.sampler import epoch_order, sample_uniforms
from train.data.sources import Source, TarSource, explain_failed_read
from train.data.splits import fingerprint_of, needs_index, open_dataset
from train.failure import explain


@pytest.fixture(scope="module")
def expected(images: Path) -> dict[Item, object]:
    """What one rank without workers reads from the folder."""
    opened = open_images(images)
    return load(opened, items_of(opened))


def test_a_half_extracted_folder_is_refused(images: Path, tmp_path: Path) -> None:
    shutil.copytree(images, tmp_path / "data")
    for staging in (".train.extracting", ".val.extracting", "val/.val.extracting"):
        (tmp_path / "data" / staging).mkdir()
        with pytest.raises(UserError, match="not finished; run the same command again"):
            open_dataset(tmp_path / "data", None)
        (tmp_path / "data" / staging).rmdir()
    assert len(open_dataset(tmp_path / "data", None).train) == NUM_TRAIN


def test_a_folder_and_the_tars_it_came_from_are_one_data_set(images: Path, tars: Path) -> None:
    folder, tar = open_dataset(images, None), open_dataset(tars, None)
    assert (folder.kind, tar.kind) == ("folder", "tar")
    assert folder.fingerprint == tar.fingerprint
    for ours, theirs in ((folder.train, tar.train), (folder.val, tar.val)):
        assert ours is not None and theirs is not None
        assert ours.classes == theirs.classes
        assert ours.labels.tolist() == theirs.labels.tolist()
        for i in range(len(ours)):
            assert ours.read(i) == theirs.read(i)
            assert ours.name(i) == theirs.name(i)
    assert (len(folder.train), len(folder.val or [])) == (NUM_TRAIN, NUM_VAL)


def test_a_renamed_relabelled_or_removed_image_changes_the_fingerprint(
    images: Path, tmp_path: Path
) -> None:
    before = open_dataset(images, None).fingerprint
    changes: dict[str, Callable[[Path], object]] = {
        "renamed": lambda file: file.rename(file.with_name("n00_0.JPEG")),
        "removed": lambda file: file.unlink(),
        "relabelled": lambda file: file.rename(file.parents[1] / "n90000002" / file.name),
    }
    found = {before}
    for split in ("train", "val"):
        for name, change in changes.items():
            copy = shutil.copytree(images, tmp_path / split / name)
            change(sorted((copy / split / "n90000001").iterdir())[0])
            found.add(open_dataset(copy, None).fingerprint)
    assert len(found) == 7


def spell_fingerprint(*sources: Source) -> str:
    """The value that checkpoints hold, name by name: the first version of fingerprint_of."""
    digest = hashlib.sha256()
    for source in sources:
        digest.update("\0".join(source.classes).encode("utf-8", "surrogateescape"))
        digest.update(source.labels.astype("<i8").tobytes())
        for start in range(0, len(source), 4096):
            names = (source.name(i) for i in range(start, min(start + 4096, len(source))))
            digest.update("\0".join(names).encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:16]


def test_the_fingerprint_is_the_one_that_checkpoints_hold(images: Path) -> None:
    dataset = open_dataset(images, None)
    assert dataset.val is not None
    assert dataset.fingerprint == spell_fingerprint(dataset.train, dataset.val)


def test_names_of_any_bytes_have_one_fingerprint_for_folder_and_tar(tmp_path: Path) -> None:
    """More names than are hashed at once, and classes and files that are not UTF-8."""
    for wnid in (b"n\xff1", b"n2"):
        (tmp_path / "train" / os.fsdecode(wnid)).mkdir(parents=True)
        for number in range(2100):
            name = os.fsdecode(wnid + b"/\xe9_%d.JPEG" % number)
            (tmp_path / "train" / name).touch()
    folder = open_dataset(tmp_path, None).train
    files = [os.fsencode(folder.name(i).partition("/")[2]) for i in range(len(folder))]
    offset = np.cumsum([0, *map(len, files)])
    blob = np.frombuffer(b"".join(files), np.uint8)
    label = folder.labels.astype(np.int32)
    index = TarIndex(tmp_path, offset[:-1], offset[1:], label, folder.classes, blob, offset, "")
    assert fingerprint_of(folder) == spell_fingerprint(folder)
    assert fingerprint_of(TarSource(index)) == spell_fingerprint(folder)


def test_only_a_tar_without_an_index_needs_one(images: Path, tars: Path, tmp_path: Path) -> None:
    data = tmp_path / "tars"
    shutil.copytree(tars, data, ignore=shutil.ignore_patterns("*.index"))
    train, val = (data / f"ILSVRC2012_img_{half}.tar" for half in ("train", "val"))
    assert needs_index(data, None)
    build_index(train)
    assert needs_index(data, None) and needs_index(train, None) and needs_index(val, None)
    build_index(val)
    assert not any(needs_index(path, None) for path in (data, train, val))
    assert not needs_index(images, None)
    assert not needs_index(tmp_path / "missing", None)
    assert not needs_index(tmp_path, None)  # open_dataset says what is wrong with these two


def test_samples_are_in_the_bytewise_order_of_class_and_name(images: Path) -> None:
    source = open_dataset(images, None).train
    names = [source.name(i) for i in range(len(source))]
    assert names == sorted(names, key=os.fsencode)
    assert source.labels.tolist() == [source.classes.index(Path(n).parts[0]) for n in names]


@pytest.mark.parametrize("workers", [0, 1, 4])
def test_the_tar_gives_the_folders_pictures_with_any_number_of_workers(
    tars: Path, expected: dict[Item, object], workers: int
) -> None:
    opened = open_images(tars)
    assert load(opened, items_of(opened), workers) == expected


def test_the_kernels_threads_give_the_same_pictures_in_the_same_order(
    images: Path, tars: Path
) -> None:
    alone = open_images(images, decoder="auto")
    expected = load(alone, items_of(alone))
    for workers in (1, 4):
        opened = open_images(tars, decoder="auto")
        assert load(opened, items_of(opened), workers) == expected


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_share_the_pictures_of_each_step(
    images: Path, expected: dict[Item, object], world: int
) -> None:
    """Training items are the same ones, dealt out; validation is split, and checked by its sum."""
    found: dict[Item, object] = {}
    validated: list[int] = []
    for rank in range(world):
        opened = open_images(images, rank=rank, world=world)
        items = items_of(opened)
        found |= load(opened, [item for item in items if not item.is_val])
        validated += [int(i) for item in items if item.is_val for i in opened.indices(item)]
    assert found == {item: value for item, value in expected.items() if not item.is_val}
    assert sorted(validated) == sorted(2 * list(range(NUM_VAL)))  # twice, after each epoch


def test_a_resumed_order_is_the_rest_of_the_whole_one(images: Path) -> None:
    opened = open_images(images)
    whole = items_of(opened)
    for start in range(8):
        rest = items_of(opened, start)
        assert rest == whole[len(whole) - len(rest) :]
        done = {(i.epoch, i.step_in_epoch) for i in whole[: len(whole) - len(rest)] if not i.is_val}
        assert len(done) == start


def test_an_epoch_has_each_image_once_with_its_own_crop_and_label(images: Path) -> None:
    opened = open_images(images)
    order = epoch_order(SEED, 0, NUM_TRAIN)
    source = opened.train
    for item in items_of(opened, total=5):
        if item.is_val:
            continue
        first = item.step_in_epoch * BATCH + item.part * MICROBATCH
        indices = order[first : first + MICROBATCH]
        uniforms = sample_uniforms(SEED, 0, indices, UNIFORMS_PER_SAMPLE)
        batch = opened[item]
        assert batch.labels.tolist() == [source.labels[i] for i in indices]
        for slot, index in enumerate(indices):
            data, name = source.read(int(index)), source.name(int(index))
            pixels = decode_train(data, name, SIZE, uniforms[slot])
            assert np.array_equal(batch.images[slot].permute(1, 2, 0).numpy(), pixels)


def test_crops_differ_between_epochs(images: Path) -> None:
    opened = open_images(images)
    first, second = (
        sample_uniforms(SEED, epoch, np.arange(NUM_TRAIN), UNIFORMS_PER_SAMPLE) for epoch in (0, 1)
    )
    assert (first != second).all()
    assert opened.indices(Item(0, 0, 0)).tolist() != opened.indices(Item(1, 0, 0)).tolist()


# --- bad images -------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("decoder", ["pil", "auto"])
def test_a_bad_image_is_named(
    images: Path, tmp_path: Path, workers: int, split: str, decoder: str
) -> None:
    data, (name,) = spoil(images, tmp_path / "data", 7, split=split)
    opened = open_images(data, decoder=decoder)
    expected = rf"cannot decode {name}: .*; --skip-bad-images N"
    with pytest.raises(DataError, match=expected) as error:
        load(opened, items_of(opened), workers)
    assert "object at" not in str(error.value)


def test_the_next_image_fills_the_slot_of_a_bad_one(images: Path, tmp_path: Path) -> None:
    data, names = spoil(images, tmp_path / "data", 7, 8)
    good, bad = open_images(images, tolerate_bad=True), open_images(data, tolerate_bad=True)
    filled = 0
    for item in items_of(good, total=5):
        batch = bad[item]
        assert not batch.error
        if item.is_val:
            continue
        indices = good.indices(item).tolist()
        skipped = [names[n - 7 :] for n in indices if n in (7, 8)]
        assert batch.skipped == [name for found in skipped for name in found]
        for slot, index in enumerate(indices):
            label = int(good.train.labels[9 if index in (7, 8) else index])
            assert int(batch.labels[slot]) == label
            same = torch.equal(batch.images[slot], good[item].images[slot])
            assert same == (index not in (7, 8))
            filled += not same
    assert filled == 2


def test_bad_slots_are_filled_alike_on_any_ranks_and_workers(images: Path, tmp_path: Path) -> None:
    data, _ = spoil(images, tmp_path / "data", 0, 13, 41)  # 41 is the last: 0 follows, bad as well
    one = open_images(data, tolerate_bad=True)
    expected = load(one, [i for i in items_of(one) if not i.is_val])
    found: dict[Item, object] = {}
    for rank in range(2):
        opened = open_images(data, rank=rank, world=2, tolerate_bad=True)
        found |= load(opened, [i for i in items_of(opened) if not i.is_val], workers=rank)
    assert found == expected
    one, many = (open_images(data, decoder="auto", tolerate_bad=True) for _ in range(2))
    items = [i for i in items_of(one) if not i.is_val]
    assert load(many, items, workers=3) == load(one, items)


def test_a_bad_validation_image_is_counted_by_nobody(images: Path, tmp_path: Path) -> None:
    data, names = spoil(images, tmp_path / "data", 3, split="val")
    opened = open_images(data, tolerate_bad=True)
    batches = [opened[item] for item in items_of(opened, total=1) if item.is_val]
    labels = torch.cat([batch.labels for batch in batches])
    assert labels.tolist().count(-1) == 1
    assert int(labels[3]) == -1
    assert [name for batch in batches for name in batch.skipped] == names


def test_a_set_without_one_good_image_is_an_error(images: Path, tmp_path: Path) -> None:
    data, _ = spoil(images, tmp_path / "data", *range(NUM_TRAIN))
    opened = open_images(data, tolerate_bad=True)
    with pytest.raises(DataError, match="no training image can be decoded"):
        load(opened, [Item(0, 0, 0)])


def test_a_tar_that_was_cut_later_is_named(tars: Path, tmp_path: Path) -> None:
    """Damage after the index was made is a named error, not garbage pixels."""
    data = shutil.copytree(tars, tmp_path / "tars")
    opened = open_images(data)
    os.truncate(data / "ILSVRC2012_img_train.tar", 60_000)
    with pytest.raises(DataError, match=r"n9\d+_\d+\.JPEG in .*_train\.tar: the file ends after"):
        load(opened, items_of(opened, start=1))


def overwrite(tar: Path, how: str) -> None:
    """Puts other bytes of the same size in the place of a tar's images."""
    data = tar.read_bytes()
    other = data[:1024] + bytes(len(data) - 2048) + data[-1024:]
    if how == "in place":
        with open(tar, "r+b") as file:
            file.write(other)
        later = tar.stat().st_mtime_ns + 1  # a file system's clock may stand still for a moment
        os.utime(tar, ns=(later, later))
    else:
        before = tar.stat()
        tar.with_name("other").write_bytes(other)
        os.utime(tar.with_name("other"), ns=(before.st_atime_ns, before.st_mtime_ns))
        tar.with_name("other").replace(tar)


@pytest.mark.parametrize("how", ["in place", "by another file of the same time"])
@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_tar_that_is_overwritten_during_training_is_an_error_of_the_next_epoch(
    tars: Path, tmp_path: Path, how: str, split: str, workers: int
) -> None:
    data = shutil.copytree(tars, tmp_path / "tars")
    opened = open_images(data)
    tar = data / f"ILSVRC2012_img_{split}.tar"
    item = Item(0, 3, 0) if split == "train" else Item(0, -1, 1)
    list(load_batches(opened, [item], workers))
    overwrite(tar, how)
    first = Item(1, 0, 0) if split == "train" else Item(1, -1, 0)
    with pytest.raises(DataError, match=f"{tar} was changed during the training"):
        list(load_batches(opened, [first], workers))
    opened._looked_s -= LOOK_S  # within an epoch it is seen, too, some time later
    with pytest.raises(DataError, match="was changed"):
        list(load_batches(opened, [item], 0))


# --- disks that fail --------------------------------------------------------------------------

LOADERS = [("pil", 0), ("pil", 2), ("auto", 0), ("auto", 2)]


@pytest.mark.parametrize(("decoder", "workers"), LOADERS)
@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT])
def test_a_read_that_fails_names_the_file_and_may_be_tried_again(
    images: Path, monkeypatch: pytest.MonkeyPatch, decoder: str, workers: int, number: int
) -> None:
    """The failing disk is made up: pread answers as the kernel does when a server is away."""

    def fail(*_: object) -> bytes:
        raise OSError(number, os.strerror(number))

    opened = open_images(images, decoder=decoder)
    monkeypatch.setattr(os, "pread", fail)
    words = rf"cannot read {images}/train/n9\d+/\S+JPEG: {os.strerror(number)}; run the same"
    with pytest.raises(PassingError, match=words):
        load(opened, items_of(opened), workers)


@pytest.mark.parametrize(("decoder", "workers"), LOADERS)
def test_a_failing_read_of_a_tar_names_the_tar_and_the_member(
    tars: Path, tmp_path: Path, decoder: str, workers: int
) -> None:
    data = shutil.copytree(tars, tmp_path / "tars")
    opened = open_images(data, decoder=decoder)
    tar = data / "ILSVRC2012_img_train.tar"
    tar.unlink()
    tar.symlink_to("/proc/self/mem")  # reads of its first pages are answered with EIO
    with pytest.raises(PassingError, match=rf"cannot read n9\d+/\S+JPEG in {tar}: Input/output"):
        load(opened, items_of(opened, start=1), workers)


@pytest.mark.parametrize(("decoder", "workers"), LOADERS)
def test_an_image_that_is_gone_is_the_users_to_mend(
    images: Path, tmp_path: Path, decoder: str, workers: int
) -> None:
    data = shutil.copytree(images, tmp_path / "data")
    opened = open_images(data, decoder=decoder)
    shutil.rmtree(data / "train" / "n90000001")
    words = rf"No such file or directory: {data}/train/n90000001/\S+JPEG; check the path"
    with pytest.raises(UserError, match=words):
        load(opened, items_of(opened), workers)


def test_forbidden_reads_do_not_pass_and_a_disk_that_is_away_does() -> None:
    denied = PermissionError(errno.EACCES, "Permission denied")
    assert explain(explain_failed_read(denied, "a.JPEG")) == (
        "Permission denied: a.JPEG; check the permissions",
        2,
    )
    stale = OSError(errno.ESTALE, "Stale file handle", "/data/train")  # while it is listed
    message, code = explain(stale)
    assert (code, "/data/train" in message) == (75, True)


# --- workers ----------------------------------------------------------------------------------


def test_workers_leave_the_schedulers_signals_to_their_rank(
    images: Path, expected: dict[Item, object]
) -> None:
    """SLURM and HTCondor signal every process of a job, the loader's workers too."""
    opened = open_images(images)
    items = items_of(opened)
    others = child_pids()  # such as those that ranks are forked from, which a signal would end
    batches = load_batches(opened, items, 2)
    found = [digest(next(batches)), digest(next(batches))]  # both workers are past their start
    workers = child_pids() - others
    assert len(workers) == 2
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT):
        for pid in workers:
            os.kill(pid, number)
    found += [digest(batch) for batch in batches]
    assert dict(zip(items, found, strict=True)) == expected


def test_a_dead_worker_is_told_of_once() -> None:
    """torch's handler would raise at each later SIGCHLD, also in the lines that end the run."""

    def tell(number: int, frame: object) -> None:
        raise RuntimeError("DataLoader worker (pid 1) is killed by signal: Killed.")

    before = signal.signal(signal.SIGCHLD, tell)
    try:
        _raise_once()
        _raise_once()  # for another loader
        with pytest.raises(RuntimeError, match="DataLoader worker"):
            signal.raise_signal(signal.SIGCHLD)
        signal.raise_signal(signal.SIGCHLD)
    finally:
        signal.signal(signal.SIGCHLD, before)


def child_pids() -> set[int]:
    me = os.getpid()
    children = Path(f"/proc/{me}/task/{me}/children").read_text().split()
    return {int(pid) for pid in children if b"resource_tracker" not in _command(pid)}


def _command(pid: str) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


# --- what is not a data set -------------------------------------------------------------------


def test_what_is_not_a_data_set_is_refused_with_the_fix(images: Path, tmp_path: Path) -> None:
    (tmp_path / "empty" / "train").mkdir(parents=True)
    (tmp_path / "classes" / "train" / "n01").mkdir(parents=True)
    flat = shutil.copytree(images, tmp_path / "flat")
    (flat / "val" / "n99999999").mkdir()
    shutil.copy(next((flat / "val" / "n90000001").iterdir()), flat / "val" / "n99999999")
    cases = {
        tmp_path / "missing": "no such data",
        tmp_path: "holds neither train/ nor ILSVRC2012_img_train.tar",
        tmp_path / "empty": "no class folders",
        tmp_path / "classes": "no images",
        flat: "n99999999.*is val/ sorted",
    }
    for path, words in cases.items():
        with pytest.raises(UserError, match=words):
            open_dataset(path, None)


def test_a_validation_set_that_lacks_a_class_keeps_the_training_labels(
    images: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(images, tmp_path / "data")
    shutil.rmtree(copy / "val" / "n90000001")
    dataset = open_dataset(copy, None)
    assert dataset.val is not None
    assert sorted(set(dataset.val.labels.tolist())) == [1, 2, 3, 4, 5, 6]
