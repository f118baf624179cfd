"""`python -m tests.cluster up|down|status [service...]`: the services of the tests, for people."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from types import ModuleType

from report.words import count
from tests.cluster import SERVICES


def may_delete(names: list[str]) -> bool:
    """Whether nothing of yours would be lost, or you said that it may."""
    folders = [module.files_of_people() for module in map(load, names)]
    found = [(folder, number) for folder in folders if (number := count_files(folder))]
    for folder, number in found:
        files = count(number, "file")
        print(f"{folder} holds {files} of yours (results, logs, objects)", flush=True)
    if not found:
        return True
    if sys.stdin.isatty():
        return input("delete them with the services? [y/N] ").strip().lower() in ("y", "yes")
    print("error: copy what you need, then: make cluster-down FORCE=1", file=sys.stderr)
    return False


def count_files(folder: Path | None) -> int:
    files = folder.rglob("*") if folder is not None else ()
    return sum(path.is_file() and not path.is_symlink() for path in files)


def load(name: str) -> ModuleType:
    return importlib.import_module(f"tests.cluster.{name}.service")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster", description=__doc__)
    parser.add_argument("action", choices=["up", "down", "status"])
    parser.add_argument("service", nargs="*", default=list(SERVICES), help=f"of {SERVICES}")
    parser.add_argument("--force", action="store_true", help="down: delete your files there, too")
    args = parser.parse_args()
    if args.action == "down" and not args.force and not may_delete(args.service):
        return 2
    left_out = 0
    for name in args.service:
        service = load(name)
        reason = service.missing()
        if reason:
            print(f"{name}: LEFT OUT: {reason}")
            left_out += 1
        elif args.action == "up":
            print(f"{name}: starting ...", flush=True)
            service.up()
            print(f"{name}: up\n{service.how_to_use()}")
        elif args.action == "down":
            service.down()
            print(f"{name}: down")
        else:
            print(f"{name}: {'up' if service.is_up() else 'down'}")
    return 2 if left_out and args.action == "up" else 0


if __name__ == "__main__":
    sys.exit(main())
