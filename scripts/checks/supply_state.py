"""The data as the next command needs it: its kind, what is not indexed yet, how many images."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

ENOUGH_IMAGES = 1 << 15  # no batch that we propose is larger
USUAL_PLACES = ("data", "demo")  # of README's examples, and of `make demo`
TRAIN_TAR = "ILSVRC2012_img_train.tar"  # as in train.data.sources, which needs numpy
GIB = 1 << 30


@dataclass(frozen=True)
class DataState:
    """Nothing, a URL, or a folder (or tar) that can be trained on."""

    name: str = ""  # as it was given or found; empty: there is none
    tars: tuple[Path, ...] = ()  # to read images out of: of training, and of validation
    unindexed: tuple[Path, ...] = ()  # those of them without an index
    num_images: int = 0  # to train on, at most ENOUGH_IMAGES; 0: unknown

    @property
    def is_there(self) -> bool:
        return bool(self.name)

    @property
    def is_url(self) -> bool:
        return "://" in self.name

    @property
    def names_tar(self) -> bool:
        """Whether the URL is of one archive, and not of the folder that has both."""
        return urlsplit(self.name).path.endswith(".tar")

    @property
    def url_folder(self) -> str:
        return self.name.rpartition("/")[0] if self.names_tar else self.name.rstrip("/")


def find_data(folders: list[Path]) -> str:
    """Data in one of the usual places of these folders, or an empty string."""
    places = [folder / name for folder in folders for name in USUAL_PLACES]
    found = (p for p in places if (p / "train").is_dir() or (p / TRAIN_TAR).is_file())
    return str(next(found, ""))


def list_urls(data: DataState) -> tuple[list[str], int]:
    """What a slot must fetch of a URL, and its size in GiB: the tar that was named, or both."""
    from dataset.known_archives import published_archives

    known = [(archive.file, size) for size, archive in published_archives().items()]
    if data.names_tar:
        file = urlsplit(data.name).path.rpartition("/")[2]
        sizes = [size for name, size in known if name == file] or [known[0][1]]
        return [data.name], -(-sizes[0] // GIB)
    urls = [f"{data.url_folder}/{name}" for name, _ in known]
    return urls, -(-sum(size for _, size in known) // GIB)


def inspect_data(name: str) -> DataState:
    """The state of data in which the doctor found nothing wrong."""
    if not name or "://" in name:
        return DataState(name)
    from dataset.archive.index import find_index
    from dataset.archive.index_file import load_index
    from dataset.names import VAL_TAR

    path = Path(name)
    if (path / "train").is_dir():
        return DataState(name, num_images=_count_images(path / "train"))
    folder = path if path.is_dir() else path.parent
    tar = folder / TRAIN_TAR if path.is_dir() or path.name == VAL_TAR else path
    tars = tuple(t for t in (tar, folder / VAL_TAR) if t.is_file())
    unindexed = tuple(t for t in tars if find_index(t) is None)
    index = find_index(tar)
    count = len(load_index(index, tar)) if index else 0
    return DataState(name, tars, unindexed, min(count, ENOUGH_IMAGES))


def _count_images(half: Path) -> int:
    """Images in class folders, looking at no more folders than are needed to know enough."""
    from dataset.archive.class_folders import list_classes, list_images

    count = 0
    for wnid in list_classes(half):
        count += len(list_images(half / wnid))
        if count >= ENOUGH_IMAGES:
            break
    return min(count, ENOUGH_IMAGES)
