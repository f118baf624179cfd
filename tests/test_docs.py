"""README and docs: links and pictures exist, commands have their flags, prose stays narrow."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from tests.forked_command import run_script

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")]
PAGES += sorted((ROOT / "docs").glob("*.md"))
PAGES.append(ROOT / "run_results/published/README.md")
MAX_COLUMNS = 120
MAX_PICTURE_BYTES = 300_000
GENERATED = re.compile(r"<!-- (begin|published table|faults|bench|end|/)")
LINK = re.compile(r"\]\(([^)#\s]+)[^)\s]*\)|<img src=\"([^\"]+)\"")
COMMAND = re.compile(r"python\S* (?:\$\w+/)?(-m train|scripts/\w+\.py)\b(.*)")
FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def read_prose(page: Path) -> list[tuple[int, str]]:
    """The lines that a person wrote as sentences: no table, code, HTML or generated block."""
    prose, is_code, is_generated, is_below_table = [], False, False, False
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if line.startswith("```"):
            is_code = not is_code
        marker = GENERATED.match(line)
        if marker:
            is_generated = marker[1] not in ("end", "/")
        if line:  # the notes below a table are printed with it
            is_below_table = line[0] == "|" or (is_below_table and line.startswith("- "))
        is_printed = is_code or is_generated or is_below_table
        if not is_printed and not line.startswith(("    ", "<", "!")):
            prose.append((number, line))
    return prose


def read_commands() -> dict[str, set[str]]:
    """Each command on the pages with every flag that is given to it somewhere."""
    flags: defaultdict[str, set[str]] = defaultdict(set)
    for page in PAGES:
        for command, rest in COMMAND.findall(page.read_text().replace("\\\n", " ")):
            own, _, for_trainer = re.split(r"[`#|]|&&", rest)[0].partition(" -- ")
            flags[command] |= set(FLAG.findall(own))
            flags["-m train"] |= set(FLAG.findall(for_trainer))
    return flags


COMMANDS = read_commands()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_prose_is_under_120_columns(page: Path) -> None:
    wide = [f"{page.name}:{n}" for n, line in read_prose(page) if len(line) > MAX_COLUMNS]
    assert wide == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_and_pictures_exist(page: Path) -> None:
    targets = [link or picture for link, picture in LINK.findall(page.read_text())]
    inside = [target for target in targets if "://" not in target]
    missing = [target for target in inside if not (page.parent / target).exists()]
    assert missing == []


def test_pictures_load_at_once() -> None:
    pictures = list((ROOT / "docs/pictures").glob("*.png"))
    assert pictures
    assert [path.name for path in pictures if path.stat().st_size > MAX_PICTURE_BYTES] == []


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_a_command_of_the_docs_has_the_flags_that_they_give_it(command: str) -> None:
    if command.startswith("scripts/"):
        answer = run_script(ROOT / command, ["--help"], cwd=ROOT)
    else:
        words = [sys.executable, *command.split(), "--help"]
        answer = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert answer.returncode == 0, answer.stderr
    known = set(FLAG.findall(answer.stdout))
    assert COMMANDS[command] - known == set()
