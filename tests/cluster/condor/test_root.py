"""A cached root is used only when it is whole and of today's recipe; else it is made again."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from tests.cluster.condor import root


@pytest.fixture
def builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The roots that were built, in an empty cache; a small tree stands in for a minute of work."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    built: list[Path] = []

    def make_tree(command: list[str], **environment: str) -> None:
        if command[0] == "debootstrap":
            target = Path(command[3])
            assert not target.exists()
            for name in ("usr/lib/a.so", "usr/lib/x/b.so", "usr/sbin/condor_master"):
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                (target / name).write_text(name)
            built.append(target)

    monkeypatch.setattr(root, "_run_apart", make_tree)
    monkeypatch.setattr(root, "apt_install", lambda *packages: None)
    monkeypatch.setattr(root, "find_mirror", lambda: "http://mirror.invalid/debian")
    return built


def test_root_is_built_once_and_outside_the_clone(builds: list[Path], tmp_path: Path) -> None:
    first = root.find_or_build_root()
    assert root.find_or_build_root() == first
    assert len(builds) == 1
    assert first == tmp_path / "trainyard" / f"condor-root-{root.fingerprint()}"


def test_half_made_root_is_removed_and_made_again(builds: list[Path], tmp_path: Path) -> None:
    part = tmp_path / "trainyard" / f"condor-root-{root.fingerprint()}.part"
    (part / "usr/lib").mkdir(parents=True)
    made = root.find_or_build_root()
    assert root.is_whole(made)
    assert not part.exists()


@pytest.mark.parametrize("lost", ["usr/lib/x/b.so", "usr/sbin/condor_master", "made.json"])
def test_root_that_lost_a_file_is_made_again(builds: list[Path], lost: str) -> None:
    made = root.find_or_build_root()
    (made / lost).unlink()
    assert not root.is_whole(made)
    assert root.is_whole(root.find_or_build_root())
    assert len(builds) == 2


def test_changed_recipe_makes_another_root_and_removes_the_old_one_unless_in_use(
    builds: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    oldest = root.find_or_build_root()
    monkeypatch.setattr(root, "SUITE", "forky")
    with open(f"{oldest}.users", "w") as users:
        fcntl.flock(users, fcntl.LOCK_SH)
        newer = root.find_or_build_root()
        assert newer != oldest
        assert oldest.exists()
    monkeypatch.setattr(root, "SUITE", "sid")
    newest = root.find_or_build_root()
    assert [newest.exists(), newer.exists(), oldest.exists()] == [True, False, False]


def test_mirror_list_of_apt_is_resolved_to_an_address(tmp_path: Path) -> None:
    listed = tmp_path / "mirrors.list"
    listed.write_text("http://one.invalid/debian\tpriority:1\nhttp://two.invalid/debian\n")
    assert root._resolve_mirror(f"mirror+file:{listed}/") == "http://one.invalid/debian"
    assert root._resolve_mirror("http://three.invalid/") == "http://three.invalid/"


@pytest.mark.soak
@pytest.mark.condor
@pytest.mark.timeout(600)
def test_root_is_built_from_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = root.find_or_build_root()
    assert root.is_whole(made)
    assert (made / "usr/sbin/condor_master").exists()
    assert (made / "usr/bin/apptainer").exists()
