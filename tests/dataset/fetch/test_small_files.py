"""Small files of a collection: a kill at any step costs no more than what was under way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest

from dataset import checksum
from dataset.federation.lookup import Options
from dataset.fetch.ledger import Ledger
from dataset.fetch.request import Request
from dataset.fetch.urls import fetch_urls
from dataset.own_names import PART, RECORD
from tests.dataset.dav_server import TreeHandler, serving_tree
from tests.dataset.director_server import Decision, directing, name_source
from tests.dataset.object_fetch import NOWHERE
from tests.dataset.small_server import Handler, running

ROOT = Path(__file__).resolve().parents[3]
FAST = Options(stall_s=2.0, give_up_s=10.0, missing_s=0.5, connections=3)
FILES = {f"/ns/many/n{n % 3}/img_{n}.JPEG": f"{n} ".encode() * (n % 90) for n in range(100)}
# The command itself, which dies beside the 20th final name: the name given, or about to be.
KILLED = """
import os, runpy, signal, sys
from pathlib import Path
rename, num_renamed, moment = Path.replace, 0, sys.argv[1]
def replace(part, path):
    global num_renamed
    num_renamed += 1
    if num_renamed == 20 and moment == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    rename(part, path)
    if num_renamed >= 20:
        os.kill(os.getpid(), signal.SIGKILL)
Path.replace = replace
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_kill_beside_the_final_name_costs_only_what_is_missing(
    moment: str, tmp_path: Path
) -> None:
    script = ROOT / "scripts" / "fetch_osdf.py"
    with serving_tree(FILES) as (root, gets):
        command = [sys.executable, "-c", KILLED, moment]
        killed = subprocess.run(
            [*command, str(script), f"{root}/ns/many/", "--out", str(tmp_path)],
            cwd=tmp_path,
            capture_output=True,
            env=NOWHERE,
        )
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        here = {path for path in FILES if (tmp_path / path.removeprefix("/ns/")).exists()}
        assert 18 <= len(here) < 40
        gets.clear()
        fetch_urls([f"{root}/ns/many/"], Request(tmp_path, FAST, environ=NOWHERE))
    assert not here & set(gets)
    for path, content in FILES.items():
        assert (tmp_path / path.removeprefix("/ns/")).read_bytes() == content
    assert not list(tmp_path.rglob(f"*{PART}*"))


def test_every_file_is_recorded_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unrecorded = []
    rename = Path.replace

    def check_and_rename(part: Path, path: Path) -> Path:
        if f'"{path.relative_to(tmp_path)}"' not in (tmp_path / RECORD).read_text():
            unrecorded.append(path)
        return rename(part, path)

    monkeypatch.setattr(Path, "replace", check_and_rename)
    with serving_tree(FILES) as (root, _):
        fetch_urls([f"{root}/ns/many/"], Request(tmp_path, FAST, environ=NOWHERE))
    assert unrecorded == []


def test_an_origin_that_cannot_be_reached_for_digests_is_nobodys_fault(tmp_path: Path) -> None:
    with serving_tree(FILES) as (root, gets):

        def direct(handler: Any) -> Decision:
            path, _, query = handler.path.partition("?")
            return name_source(("http://127.0.0.1:1" if query == "directread" else root) + path)

        with directing(direct) as federation:
            request = Request(tmp_path, FAST, federation, environ=NOWHERE)
            summaries = fetch_urls(["osdf:///ns/many/"], request)
    assert len(summaries) == 1  # none went the long way
    assert all(source["errors"] == {} for source in summaries[0].sources)
    asked_twice = sum(gets.count(path) > 1 for path in FILES)
    assert asked_twice <= 1  # the first is asked for its size, too


class RepeatingOrigin(Handler):
    """An origin that repeats the first Digest of a connection, as XRootD was seen to do."""

    def do_HEAD(self) -> None:
        if not hasattr(self, "digest"):
            self.digest = zlib.adler32(FILES[self.path])
        self.send_response(200)
        self.send_header("Digest", f"adler32={self.digest:08x}")
        self.send_header("Content-Length", str(len(FILES[self.path])))
        self.end_headers()


def test_a_repeated_digest_is_asked_for_again_on_a_new_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checksum, "HAS_CRC32C", False)
    with serving_tree(FILES) as (root, _), running(RepeatingOrigin) as origin:

        def direct(handler: Any) -> Decision:
            path, _, query = handler.path.partition("?")
            return name_source((origin if query == "directread" else root) + path)

        with directing(direct) as federation:
            request = Request(tmp_path, FAST, federation, environ=NOWHERE)
            summaries = fetch_urls(["osdf:///ns/many/"], request)
    assert summaries[0].verified == ["digest of the origin"]
    assert all(source["errors"] == {} for source in summaries[0].sources)


def test_a_held_record_file_is_closed_and_can_be_written_again(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    for name in ("a", "b", "c"):
        (tmp_path / name).write_bytes(b"x")
    with ledger.hold_open():
        ledger.add([ledger.make(tmp_path / "a", "id-a", [], {})])
        ledger.add([ledger.make(tmp_path / "b", "id-b", [], {})])
    ledger.add([ledger.make(tmp_path / "c", "id-c", [], {})])
    again = Ledger(tmp_path)
    assert all(again.find(tmp_path / name, f"id-{name}") for name in ("a", "b", "c"))


def test_files_of_a_server_that_names_them_in_its_own_way_are_looked_up_one_by_one(
    tmp_path: Path,
) -> None:
    """/get?object=PATH: with another path before the query it would send the same file again."""
    files = {f"/ns/d/{number}": os.urandom(999) for number in range(3)}

    class Server(TreeHandler):
        def do_GET(self) -> None:
            self.content = files[self.path.partition("?object=")[2]]
            self.serve()

    folders = frozenset({"/ns", "/ns/d"})
    with running(Server, files=files, folders=folders, gets=[]) as url:

        def decide(handler: Any) -> Decision:
            namespace = f"namespace=/ns, require-token=false, collections-url={url}"
            location = f"{url}/get?object={handler.path.partition('?')[0]}"
            return 307, {"Location": location, "X-Pelican-Namespace": namespace}

        with directing(decide) as federation:
            request = Request(tmp_path, FAST, federation, environ=NOWHERE, recursive=True)
            fetch_urls(["osdf:///ns/d"], request)
    assert {f"/ns/d/{p.name}": p.read_bytes() for p in (tmp_path / "d").iterdir()} == files
