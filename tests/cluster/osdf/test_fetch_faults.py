"""Each fault alone: the right bytes or the right exit code, and nothing left behind."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import ModuleType

import pytest

from dataset.fetch import verify
from tests.cluster.osdf.fetch_cases import CASES, SIZE, Case, run_case
from tests.cluster.osdf.fetching import MIB, Fetcher, leftovers, make_content
from tests.cluster.osdf.rules import Fault

pytestmark = pytest.mark.osdf


@pytest.fixture(scope="module")
def stored(osdf: ModuleType) -> tuple[str, bytes]:
    content = make_content(SIZE)
    return osdf.put("fetch-faults/object.bin", content), content


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "_"))
def test_a_fault_alone(
    case: Case, osdf: ModuleType, stored: tuple[str, bytes], tmp_path: Path
) -> None:
    path, content = stored
    result = run_case(case, osdf, path, content, tmp_path)
    assert result.exit_code == case.exit_code, result.message
    texts = [result.message, *result.summary.notes, *result.errors, str(result.summary.sources)]
    assert any(case.says in text for text in texts), texts
    if case.exit_code == 0:
        assert result.path.read_bytes() == content
        assert leftovers(tmp_path) == []
        assert result.wasted <= case.max_wasted
        twice = sum(result.summary.bytes_twice.values())
        assert result.summary.fetched_bytes == SIZE + twice, "fetched twice, uncounted"
    else:
        assert not result.path.exists()


@pytest.mark.parametrize("has_given", [True, False], ids=["given_md5", "digest_of_the_origin"])
def test_a_cache_that_corrupts_all_it_sends_is_refused_and_the_rest_is_kept(
    has_given: bool, osdf: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "MAX_DIFFERENT", 16)  # a small share of a busy machine, too
    content = make_content(96 * MIB, 30)
    path = osdf.put("fetch-faults/large.bin", content)
    fetch = Fetcher(osdf, tmp_path)
    if has_given:
        fetch.given = {"md5": hashlib.md5(content).hexdigest()}
    with osdf.faults(Fault("flip", server="cache1", path=path, at=list(range(3, 96 * MIB, MIB)))):
        result = fetch(path)
    assert result.exit_code == 0, result.message
    assert result.path.read_bytes() == content
    assert not any("starting over" in note for note in result.summary.notes)
    refused = [source for source in result.summary.sources if source["refused"]]
    assert len(refused) == 1 and refused[0]["wrong_blocks"] > 16
    twice = sum(result.summary.bytes_twice.values())
    assert result.summary.fetched_bytes == len(content) + twice
    assert sum(source["bytes"] for source in result.summary.sources) == len(content) + twice
