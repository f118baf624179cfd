"""The URLs of DATA: how they are told apart and put in order."""

from __future__ import annotations

import pytest

from dataset.errors import UserError
from dataset.names import split_urls

TRAIN, VAL = "osdf:///a/b_train.tar", "https://h/validate/my_val.tar?authz=x,y"


@pytest.mark.parametrize(
    ("data", "urls"),
    [
        ("data", []),
        (TRAIN, [TRAIN]),
        ("osdf:///set/", ["osdf:///set/"]),
        (f"{TRAIN},{VAL}", [TRAIN, VAL]),
        (f"{VAL},{TRAIN}", [TRAIN, VAL]),
        (f"{VAL},HTTPS://h/train.tar", ["HTTPS://h/train.tar", VAL]),
        ("https://h/val/train.tar,https://h/train/val.tar",
         ["https://h/val/train.tar", "https://h/train/val.tar"]),
    ],
)  # fmt: skip
def test_training_comes_first_whatever_the_order(data: str, urls: list[str]) -> None:
    assert split_urls(data) == urls


@pytest.mark.parametrize("data", [f"{TRAIN},{TRAIN}", f"{VAL},{VAL}", f"{TRAIN},{VAL},{VAL}"])
def test_urls_that_are_not_one_of_each_are_refused(data: str) -> None:
    with pytest.raises(UserError, match="a train and a val tar"):
        split_urls(data)
