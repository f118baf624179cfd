"""The table of disks and speeds in docs/grid.md is what the model says."""

from __future__ import annotations

from benchmarks import disk_model
from benchmarks.extract_doc import fill


def test_the_page_has_the_table_of_the_model() -> None:
    text = disk_model.DOC.read_text()
    assert fill(text, disk_model.NAME, disk_model.make_part()) == text


def test_the_speed_is_that_of_the_link_until_the_gpu_is_the_limit() -> None:
    assert disk_model.find_speed(10**9, 10_000, 40e6) == 400
    assert disk_model.find_speed(0, 10_000, 40e6) == disk_model.GPU_IMAGES
