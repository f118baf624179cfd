"""The doctor looks at the same small data set as the trainer's tests."""

from tests.train.conftest import _no_leftovers, images, tars

__all__ = ["_no_leftovers", "images", "tars"]
