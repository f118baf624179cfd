"""`python -m tests.cluster up|down|status [service...]`: the services of the tests, for people."""

from __future__ import annotations

import argparse
import importlib
import sys

from tests.cluster import SERVICES


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster", description=__doc__)
    parser.add_argument("action", choices=["up", "down", "status"])
    parser.add_argument("service", nargs="*", default=list(SERVICES), help=f"of {SERVICES}")
    args = parser.parse_args()
    left_out = 0
    for name in args.service:
        service = importlib.import_module(f"tests.cluster.{name}.service")
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
