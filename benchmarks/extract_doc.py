"""The tables of benchmarks/extract.py and index.py in docs/formats.md, made from their JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.bench import (
    PAIRED,
    RESULTS,
    ROOT,
    describe_ratio,
    describe_source,
    median,
    median_ratio,
)
from benchmarks.extract_peers import KEMPNER, LIMIT, OUR_COMMAND, OURS

DOC = ROOT / "docs" / "formats.md"
NO_PEERS = (OURS, OUR_COMMAND, LIMIT)
# Our own targets: x times as fast as the best peer and as the Kempner extractor, at most x times
# the time of the limit.
TARGETS = {"tmpfs": (3.0, 12.0, 1.3), "ext4": (2.5, 5.0, None)}
TARGET_US, TARGET_MB = 4.0, 500


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table, numbers to the right."""
    lines = ["| " + " | ".join(header) + " |", "|---|" + "---:|" * (len(header) - 1)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def extract_tables(result: dict[str, Any]) -> str:
    """Seconds and ratios of each way on each filesystem, and our targets."""
    found = [_extract_table(kind, result) for kind in ("tmpfs", "ext4")]
    return "\n\n".join([*found, PAIRED])


def _extract_table(kind: str, result: dict[str, Any]) -> str:
    cases, image_mb = result[kind]["cases"], result["image_mb"]
    ours = cases[OURS]["all_seconds"]
    rows = []
    for name, case in sorted(cases.items(), key=lambda item: item[1]["seconds"]):
        dirtied = f"{case['mb_dirtied']:.0f}" if kind != "tmpfs" else "–"
        seconds = case["seconds"]
        times = describe_ratio(case["all_seconds"], ours) if name != OURS else ""
        row = [name, f"{seconds:.3f}", times, f"{image_mb / seconds:.0f}"]
        rows.append([*row, f"{case['cpu_s']:.2f}", dirtied])
    head = ["way", "seconds", "time / ours", "MB/s", "CPU s", "MB dirtied"]
    title = (
        f"{kind}: {result['images']} images, {image_mb:.0f} MB, "
        f"medians of {result['rounds']} interleaved rounds"
    )
    if kind == "ext4":
        title += f"; {result['dirty']} may wait to be written"
    return f"{title}\n\n{table(head, rows)}\n\n{describe_ratios(kind, result[kind])}"


def describe_ratios(kind: str, result: dict[str, Any]) -> str:
    """Our speed as a call and as a command beside our targets."""
    seconds = {name: case["all_seconds"] for name, case in result["cases"].items()}
    peers = [name for name in seconds if name not in NO_PEERS]
    best = min(peers, key=lambda name: median(seconds[name]))
    called, command = (
        {peer: describe_ratio(seconds[peer], seconds[ours]) for peer in (best, KEMPNER)}
        for ours in (OURS, OUR_COMMAND)
    )
    peer, kempner, limit = TARGETS[kind]
    target = f" (target: at most {limit}x)" if limit else ""
    lines = [
        f"Speed on {kind}, ours as a call and, with the start of Python and numpy, as a command:",
        "",
        f"- {called[best]} the best peer, {best} (target: {peer}x); as a command {command[best]}.",
        f"- {called[KEMPNER]} the Kempner extractor (target: {kempner}x); as a command "
        f"{command[KEMPNER]}.",
        f"- Our time is {median_ratio(seconds[OURS], seconds[LIMIT]):.2f}x that of the limit"
        f"{target}.",
    ]
    return "\n".join(lines)


def index_tables(result: dict[str, Any]) -> str:
    """Cost of an index by size, and reads through it."""
    growth = [
        [
            f"{row['images']}",
            f"{row['tar_gb']}",
            f"{row['warm_s']:.2f}",
            f"{row['warm_us_per_image']:.2f}",
            f"{row['cold_s']:.1f}" if row["cold_s"] else "–",
            f"{1e6 * row['cold_s'] / row['images']:.0f}" if row["cold_s"] else "–",
            f"{row['peak_mb']:.0f}",
        ]
        for row in result["growth"]
    ]
    head = ["images", "tar GB", "warm s", "warm µs an image", "cold s", "cold µs an image"]
    micro: dict[str, list[float]] = result["real_bytes"]["us_per_image"]
    files, through = micro["random reads of files"], micro["random reads through the index"]
    walk, ours = micro["tarfile walk"], micro["index, header-only"]
    return (
        "Tars of class tars on tmpfs (cold: on the disk), images as holes "
        f"(target: {TARGET_US} µs an image warm, {TARGET_MB} MB)"
        f"\n\n{table([*head, 'peak MB'], growth)}\n\n"
        f"{result['real_bytes']['images']} images of a fake ImageNet, warm\n\n"
        + table(["way", "µs an image"], [[name, f"{median(us):.2f}"] for name, us in micro.items()])
        + "\n\nSpeed of reads through the index against reads of files: "
        f"{describe_ratio(files, through)} (target: 1x); of making the index against a walk with "
        f"tarfile: {describe_ratio(walk, ours)}.\n\n{PAIRED}"
    )


MAKERS = {"extract": extract_tables, "index": index_tables}


def make_part(name: str, result: dict[str, Any]) -> str:
    """What docs/formats.md shows of a benchmark."""
    return f"{MAKERS[name](result)}\n\n{describe_source(result)}"


def fill(text: str, name: str, part: str) -> str:
    """The text with what is between the marks of a name replaced."""
    begin, end = f"<!-- begin: {name} -->", f"<!-- end: {name} -->"
    before, rest = text.split(begin)
    return f"{before}{begin}\n\n{part}\n\n{end}{rest.split(end)[1]}"


def fill_from(
    text: str, record: Path, make_part: Callable[[dict[str, Any]], str], not_run: str
) -> str:
    """The text with what a record says between the marks of its name; `not_run` without one."""
    part = make_part(json.loads(record.read_text())) if record.exists() else not_run
    return fill(text, record.stem, part)


def fill_all(
    text: str, names: Iterable[str], make_part: Callable[[str, dict[str, Any]], str]
) -> str:
    """The text with the parts of those benchmarks whose records are there; the others stay."""
    for name in names:
        path = RESULTS / f"{name}.json"
        if path.exists():
            text = fill(text, name, make_part(name, json.loads(path.read_text())))
    return text


if __name__ == "__main__":
    DOC.write_text(fill_all(DOC.read_text(), MAKERS, make_part))
