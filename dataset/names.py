"""Names that the whole project goes by: the archives, their labels and index, what is an image."""

from __future__ import annotations

import re

from dataset.errors import UserError

TRAIN_TAR, VAL_TAR = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar"
KAGGLE_ZIP = "imagenet-object-localization-challenge.zip"
VALPREP = "valprep.sh"  # the labels of the validation images: lines `mv IMAGE CLASS/`
SOLUTION = "LOC_val_solution.csv"  # the same in Kaggle's form
INDEX_SUFFIX = ".index"  # of the index beside a tar

# For folders and archives alike: an image is what is_image says, and nothing else.
IMAGE_SUFFIXES = (b".jpeg", b".jpg", b".png")
_WNID = re.compile(rb"n\d{8}")
_NEXT_URL = re.compile(r",(?=[A-Za-z][A-Za-z0-9+.-]*://)")


def is_image(path: bytes) -> bool:
    """Whether a file is taken as an image: by its suffix, and neither it nor a folder is hidden."""
    is_known = path[-5:] == b".JPEG" or path[-5:].lower().endswith(IMAGE_SUFFIXES)
    return is_known and not is_hidden(path)


def is_class_tar(path: bytes) -> bool:
    """Whether a member of an outer tar holds the images of a class."""
    return path.endswith(b".tar") and not is_hidden(path[: -len(b".tar")])


def is_hidden(path: bytes) -> bool:
    """Whether a part of a path is hidden: macOS adds ._NAME files, Jupyter .ipynb_checkpoints."""
    if not path.startswith(b".") and b"/." not in path:
        return False
    return any(part[:1] == b"." and part not in (b".", b"..") for part in path.split(b"/"))


def is_wnid(name: bytes) -> bool:
    """Whether a folder is named like a class of ImageNet."""
    return _WNID.fullmatch(name) is not None


def is_of_val(name: str) -> bool:
    """Whether an archive is one of validation images, by its name."""
    return "val" in name.lower()


def split_urls(data: str) -> list[str]:
    """The URLs of DATA, none for a path: one, or those of a train and a val tar, in this order."""
    urls = _NEXT_URL.split(data) if "://" in data else []
    names = [url.partition("?")[0].rstrip("/").rpartition("/")[2] for url in urls]
    if len(urls) > 2 or (len(urls) == 2 and is_of_val(names[0]) == is_of_val(names[1])):
        raise UserError(
            f"{', '.join(names)}: give one URL, or those of a train and a val tar, the latter "
            "with 'val' in its name"
        )
    return urls[::-1] if len(urls) == 2 and is_of_val(names[0]) else urls
