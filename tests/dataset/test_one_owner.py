"""One owner of a state: what is known of a server and of a lease is written in one file each."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DATASET = ROOT / "dataset"
OWNERS = {
    "dataset/federation/servers.py": ("Server", "Servers"),
    "dataset/transfer/blocks.py": ("Lease",),
}
OTHERS = {"self", "summary"}  # variables that hold something else; a Summary has `seconds` too
CHANGES = {"append", "clear", "extend", "insert", "pop", "remove", "subtract", "update"}


def read(name: str) -> ast.Module:
    return ast.parse((ROOT / name).read_text(), name)


def fields_of(node: ast.ClassDef) -> set[str]:
    """The attributes of a class: its annotated fields, and what its methods give to self."""
    fields = {
        part.target.id
        for part in node.body
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
    }
    own = (
        part for part in ast.walk(node) if isinstance(part, ast.Attribute) and is_of(part, {"self"})
    )
    return fields | {part.attr for part in own if isinstance(part.ctx, ast.Store)}


def is_of(node: ast.Attribute, names: set[str]) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in names


def classes_of(tree: ast.Module) -> dict[str, set[str]]:
    found = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    return {node.name: fields_of(node) for node in found}


def iter_writes(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """(attribute, line) of each write into another object.

    x.name = ..., x.name += ..., del x.name, x.name[...] = ..., x.name.append(...), setattr.
    """
    for node in ast.walk(tree):
        target: ast.expr | None = None
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, (ast.Store, ast.Del)):
            target = node
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, (ast.Store, ast.Del)):
            target = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            target = node.func.value if node.func.attr in CHANGES else None
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id != "setattr", f"line {node.lineno}: setattr hides what it writes"
        if isinstance(target, ast.Attribute) and not is_of(target, OTHERS):
            yield target.attr, target.lineno


def find_strange_writes(tree: ast.Module, owned: set[str]) -> list[tuple[str, int]]:
    """Writes to owned attributes; a module's own classes may have fields of the same name."""
    own = set().union(*classes_of(tree).values())
    return [(attr, line) for attr, line in iter_writes(tree) if attr in owned - own]


@pytest.mark.parametrize("owner", OWNERS)
def test_a_state_is_written_by_its_owner_alone(owner: str) -> None:
    classes = classes_of(read(owner))
    owned = set().union(*(classes[name] for name in OWNERS[owner]))
    strange = [
        f"{path.relative_to(ROOT)}:{line} writes .{attr}"
        for path in sorted(DATASET.rglob("*.py"))
        if path != ROOT / owner
        for attr, line in find_strange_writes(read(str(path.relative_to(ROOT))), owned)
    ]
    assert strange == []


def test_the_fields_of_the_owners_are_found() -> None:
    classes = classes_of(read("dataset/federation/servers.py"))
    assert {"active", "refused", "errors"} <= classes["Server"]
    assert {"all", "are_all"} <= classes["Servers"]
    assert {"position", "rival"} <= classes_of(read("dataset/transfer/blocks.py"))["Lease"]


STRANGE = """
class Own:
    mine: int = 0

def work(server, own):
    server.active += 1
    server.errors["x"] += 1
    first, server.label = 1, "a"
    servers.all.clear()
    own.mine = 2
    server.begin(0.0)
    print(server.active, server.errors["x"])
"""


def test_the_reader_of_writes_can_fail() -> None:
    owned = {"active", "errors", "label", "all", "mine"}
    found = find_strange_writes(ast.parse(STRANGE), owned)
    assert sorted(found) == [("active", 6), ("all", 9), ("errors", 7), ("label", 8)]
