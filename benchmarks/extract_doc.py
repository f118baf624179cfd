"""The tables of benchmarks/extract.py and index.py in docs/formats.md, made from their JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.bench import RESULTS, ROOT

DOC = ROOT / "docs" / "formats.md"
OURS, LIMIT = "ours, 2 threads", "limit: from memory, 2 processes"
SEED = "ThreadPool of tarfile, 8 threads (the seed's command)"
NO_PEERS = (OURS, "ours, as a command", LIMIT)
# What was asked for: at least x times the best peer and the seed's way, at most x the limit's time.
FLOORS = {"tmpfs": (3.0, 12.0, 1.3), "ext4": (2.5, 5.0, None)}
FLOOR_US, FLOOR_MB = 4.0, 500


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table, numbers to the right."""
    lines = ["| " + " | ".join(header) + " |", "|---|" + "---:|" * (len(header) - 1)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def extract_tables(result: dict[str, Any]) -> str:
    """Seconds and ratios of each way on each filesystem, and the floors."""
    return "\n\n".join(_extract_table(kind, result) for kind in ("tmpfs", "ext4"))


def _extract_table(kind: str, result: dict[str, Any]) -> str:
    cases, image_mb = result[kind]["cases"], result["image_mb"]
    ours_s = cases[OURS]["seconds"]
    rows = []
    for name, case in sorted(cases.items(), key=lambda item: item[1]["seconds"]):
        dirtied = f"{case['mb_dirtied']:.0f}" if kind != "tmpfs" else "–"
        seconds = case["seconds"]
        row = [name, f"{seconds:.3f}", f"{seconds / ours_s:.2f}", f"{image_mb / seconds:.0f}"]
        rows.append([*row, f"{case['cpu_s']:.2f}", dirtied])
    head = ["way", "seconds", "times ours", "MB/s", "CPU s", "MB dirtied"]
    title = (
        f"{kind}: {result['images']} images, {image_mb:.0f} MB, "
        f"medians of {result['rounds']} interleaved rounds"
    )
    if kind == "ext4":
        title += f"; {result['dirty']} may wait to be written"
    return f"{title}\n\n{table(head, rows)}\n\n{describe_ratios(kind, ratios(result[kind]))}"


def ratios(result: dict[str, Any]) -> dict[str, Any]:
    """Our time against the best peer's, the seed's and the limit's."""
    seconds = {name: case["seconds"] for name, case in result["cases"].items()}
    best = min((name for name in seconds if name not in NO_PEERS), key=seconds.__getitem__)
    return {
        "best_peer": best,
        "times_best_peer": seconds[best] / seconds[OURS],
        "times_seed": seconds[SEED] / seconds[OURS],
        "times_limit": seconds[OURS] / seconds[LIMIT],
    }


def describe_ratios(kind: str, found: dict[str, Any]) -> str:
    """The ratios beside what was asked for."""
    peer, seed, limit = FLOORS[kind]
    wanted = f" (wanted: at most {limit})" if limit else ""
    return (
        f"On {kind} {found['times_best_peer']:.2f} times as fast as the best peer, "
        f"{found['best_peer']} (wanted: {peer}), {found['times_seed']:.2f} times as fast as the "
        f"seed's way (wanted: {seed}), {found['times_limit']:.2f} times the limit's time{wanted}."
    )


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
    micro = result["real_bytes"]["us_per_image"]
    files, through = micro["random reads of files"], micro["random reads through the index"]
    walk, ours = micro["tarfile walk"], micro["index, header-only"]
    return (
        "Tars of class tars on tmpfs (cold: on the disk), images as holes "
        f"(wanted: {FLOOR_US} µs an image warm, {FLOOR_MB} MB)"
        f"\n\n{table([*head, 'peak MB'], growth)}\n\n"
        f"{result['real_bytes']['images']} images of a fake ImageNet, warm\n\n"
        + table(["way", "µs an image"], [[name, f"{us:.2f}"] for name, us in micro.items()])
        + f"\n\nReads through the index are {files / through:.2f} times as fast as reads of files "
        f"(wanted: 1); the index is made {walk / ours:.1f} times as fast as tarfile walks."
    )


def fill(text: str, name: str, part: str) -> str:
    """The text with what is between the marks of a name replaced."""
    begin, end = f"<!-- begin: {name} -->", f"<!-- end: {name} -->"
    before, rest = text.split(begin)
    return f"{before}{begin}\n\n{part}\n\n{end}{rest.split(end)[1]}"


def make_doc(text: str) -> str:
    """docs/formats.md with the tables of the JSON files that are there."""
    for name, make in (("extract", extract_tables), ("index", index_tables)):
        path = RESULTS / f"{name}.json"
        if path.exists():
            text = fill(text, name, make(json.loads(path.read_text())))
    return text


if __name__ == "__main__":
    DOC.write_text(make_doc(DOC.read_text()))
