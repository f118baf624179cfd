"""Every fault alone, run now, with its outcome: the record of the fault table of docs/fetch.md.

python -m tests.cluster.osdf.fault_table
"""

from __future__ import annotations

import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.bench import RecordFlags, write_result
from benchmarks.fetch_doc import fault_table
from dataset.errors import run_command
from dataset.flags import make_parser, parse_flags
from tests.cluster.osdf import service
from tests.cluster.osdf.fetch_cases import CASES, SIZE, Case, run_case
from tests.cluster.osdf.fetching import Fetcher, Result, make_content


def main() -> int:
    flags = parse_flags(RecordFlags, make_parser(__doc__))
    logging.disable(logging.CRITICAL)
    was_up = service.is_up()
    service.up()
    content = make_content(SIZE)
    path = service.put("fault-table/object.bin", content)
    faults = []
    try:
        with tempfile.TemporaryDirectory() as out:
            clean_s = Fetcher(service, Path(out))(path).seconds
        for case in CASES:
            with tempfile.TemporaryDirectory() as out:
                result = run_case(case, service, path, content, Path(out))
                faults.append(describe(case, result, content))
                print(faults[-1], file=sys.stderr)
    finally:
        service.remove(path)
        if not was_up:
            service.down()
    record = {"rounds": 1, "object_bytes": SIZE, "clean_s": clean_s, "faults": faults}
    print(fault_table(record))
    print("\nwritten to", write_result("fault_table", record, flags))
    return 0


def describe(case: Case, result: Result, content: bytes) -> dict[str, Any]:
    """The record of one fault.

    Bytes that were fetched twice by hedging are with the others: a silent block is asked of another
    cache from its last byte on, so there are next to none. What shows it is the number of stalls.
    """
    is_right = result.exit_code != 0 or result.path.read_bytes() == content
    return {
        "fault": case.name,
        "exit_code": result.exit_code,
        "must_exit": case.exit_code,
        "is_right": is_right,
        "seconds": round(result.seconds, 2),
        "stalls": sum(source["stalls"] for source in result.summary.sources),
        "bytes_twice": result.summary.bytes_twice,
    }


if __name__ == "__main__":
    sys.exit(run_command(main))
