"""The measuring part of benchmarks/fetch.py: curl, pelicanfs and ours against the mini-OSDF.

benchmarks/fetch.py runs it as `python -m tests.cluster.osdf.fetch_benchmark` and makes the table.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks.bench import measure_undisturbed
from benchmarks.fetch_table import ClientRun, Row, add, make_row, measure, slowdown
from dataset.checksum import compute
from dataset.errors import run_command
from dataset.flags import REQUIRED, flag, make_parser, parse_flags
from tests.cluster.osdf import service

log = logging.getLogger("trainyard")
ROOT = Path(__file__).resolve().parents[3]
MIB = 1 << 20
PELICANFS = """
import sys
from pelicanfs.core import PelicanFileSystem
PelicanFileSystem(sys.argv[1]).get_file(sys.argv[2], sys.argv[3])
"""
# What any client in Python has to do at least: receive, sum, write, on 3 connections to 2 caches.
BARE_LOOP = """
import http.client, os, sys, threading
from urllib.parse import urlsplit
from crc32c import crc32c
out, size, urls = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT), int(sys.argv[2]), sys.argv[3:]
def fetch(url, start, end):
    parts = urlsplit(url)
    server = http.client.HTTPConnection(parts.hostname, parts.port)
    server.request("GET", parts.path, headers={"Range": f"bytes={start}-{end - 1}"})
    body, buffer = server.getresponse(), memoryview(bytearray(1 << 20))
    while start < end:
        got = body.readinto(buffer[:end - start])
        crc32c(buffer[:got])
        start += os.pwrite(out, buffer[:got], start)
cuts = [0, size // 3, 2 * size // 3, size]
pieces = [(urls[n % len(urls)], cuts[n], cuts[n + 1]) for n in range(3)]
threads = [threading.Thread(target=fetch, args=piece) for piece in pieces]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""
RETRY_SPEED = ["--speed-limit", "1", "--speed-time", "20"]  # the stall time of both clients


@dataclass(frozen=True, kw_only=True)
class MeasureFlags:
    """What benchmarks/fetch.py asks for."""

    answer: Path = flag(REQUIRED, "the rows go to this file, as JSON", "ANSWER")
    rounds: int = flag(REQUIRED, None)
    wan_rounds: int = flag(REQUIRED, None)
    megabytes: int = flag(REQUIRED, None)
    wan_megabytes: int = flag(REQUIRED, None)
    tmpfs: Path = flag(REQUIRED, None)


def main() -> int:
    """Starts the mini-OSDF if it is down, measures, and leaves it as it was."""
    flags = parse_flags(MeasureFlags, make_parser(__doc__))
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S", level=logging.INFO)
    was_up = service.is_up()
    service.up()
    work = flags.tmpfs / "trainyard-bench-fetch"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        bench = Bench(work, flags.megabytes * 10**6, flags.wan_megabytes * 10**6)
        rows = bench.run(flags.rounds, flags.wan_rounds)
    finally:
        shutil.rmtree(work, ignore_errors=True)
        if not was_up:
            service.down()
    flags.answer.write_text(json.dumps([asdict(row) for row in rows]))
    return 0


class Bench:
    """The objects at the origin, and the clients that fetch them."""

    def __init__(self, work: Path, num_bytes: int, wan_bytes: int) -> None:
        self.work = work
        self.num_bytes, self.wan_bytes = num_bytes, wan_bytes
        self.servers = service.processes()
        self.path, self.md5, self.index = self._put("big", num_bytes)
        self.wan_path, _, self.wan_index = self._put("wan", wan_bytes)

    def _put(self, name: str, num_bytes: int) -> tuple[str, str, Path]:
        """(path, md5, index) of an object of random bytes, made piece by piece."""
        source, chance = self.work / "source", np.random.default_rng(len(name))
        md5, sums = hashlib.md5(usedforsecurity=False), []
        with source.open("wb") as file:
            for start in range(0, num_bytes, 4 * MIB):
                piece = chance.bytes(min(4 * MIB, num_bytes - start))
                file.write(piece)
                md5.update(piece)
                sums.append(compute("crc32c", piece))
        path = service.put(f"bench-fetch/{name}-{num_bytes}.tar", source)
        source.unlink()
        index = self.work / f"{name}.index"
        with index.open("wb") as file:
            np.savez(
                file,
                tar_size=np.int64(num_bytes),
                block_size=np.int64(4 * MIB),
                block_crc32c=np.array(sums, np.uint32),
            )
        return path, md5.hexdigest(), index

    def run(self, rounds: int, wan_rounds: int) -> list[Row]:
        rows = self.compare_on_loopback(rounds)
        rows += self.compare_on_wan(wan_rounds)
        service.remove(self.path)
        service.remove(self.wan_path)
        return rows

    def compare_on_loopback(self, rounds: int) -> list[Row]:
        """curl, pelicanfs and ours on XRootD's own ports, one after the other in each round."""
        url = service.BARE_CACHE_URLS[0] + self.path
        clients: dict[str, Callable[[], ClientRun]] = {
            "curl": lambda: self.curl(url),
            "ours, block checksums": lambda: self.ours("--index", str(self.index)),
            "curl && md5sum": lambda: self.curl(url, then_md5=True),
            "ours --md5": lambda: self.ours("--md5", self.md5),
            "pelicanfs 1.5.0": self.pelicanfs,
            "bare loop": self.bare_loop,
        }
        for cache in service.BARE_CACHE_URLS:  # both caches warm, and the code paths too
            self.curl(cache + self.path)
        runs: dict[str, list[ClientRun]] = {name: [] for name in clients}
        for number in range(rounds):
            for name, client in clients.items():
                runs[name].append(measure_undisturbed(client, self.servers))
                log.info("round %d, %s: %.2f s", number + 1, name, runs[name][-1].seconds)
        gb = self.num_bytes / 1e9
        loopback = f"ours, {gb:.1f} GB on loopback"
        return [
            make_row(loopback, "curl", runs["curl"], runs["ours, block checksums"], ">= 1.2", gb),
            make_row(
                f"{loopback}, md5",
                "curl && md5sum",
                runs["curl && md5sum"],
                runs["ours --md5"],
                ">= 1",
                gb,
            ),
            make_row(
                loopback,
                "pelicanfs 1.5.0",
                runs["pelicanfs 1.5.0"],
                runs["ours, block checksums"],
                "",
                gb,
            ),
            make_row(
                loopback,
                "a bare loop: 3 threads receive, sum and write",
                runs["bare loop"],
                runs["ours, block checksums"],
                "",
                gb,
            ),
        ]

    def compare_on_wan(self, rounds: int) -> list[Row]:
        """60 ms, 25 MB/s a connection; then one of two caches stalls after 30 % of each answer."""
        gb = self.wan_bytes / 1e9
        urls = [cache + self.wan_path for cache in service.CACHE_HTTP_URLS]
        for url in urls:
            self.curl(url)
        index = ("--index", str(self.wan_index))
        stall = service.Fault("stall", server="cache1", path=self.wan_path, after_share=0.3)
        clean: list[ClientRun] = []
        stalled: list[ClientRun] = []
        curl: list[ClientRun] = []
        retry: list[ClientRun] = []
        with service.wan(path=self.wan_path):
            for number in range(rounds):
                curl.append(self.curl(urls[0]))
                clean.append(self.ours(*index, wan=True))
                with service.faults(stall):
                    stalled.append(self.ours(*index, wan=True))
                    failed = self.curl(urls[0], *RETRY_SPEED, fails=True)
                    retry.append(add(failed, self.curl(urls[1])))
                seconds = [runs[-1].seconds for runs in (curl, clean, stalled, retry)]
                log.info(
                    "WAN, round %d: curl %.1f, ours %.1f; stall: %.1f, curl %.1f s",
                    number + 1,
                    *seconds[:3],
                    seconds[3],
                )
        wan = f"{gb:.1f} GB over a WAN"
        bad = f"{wan}, one of two caches stalls after 30 % of each answer"
        bad_curl = f"curl, which starts again on the other cache, {bad}"
        return [
            make_row(f"ours, {wan}", "curl, one stream", curl, clean, ">= 3", gb),
            slowdown(f"ours, {bad}", "our clean time", clean, stalled, "<= 1.3", gb),
            slowdown(bad_curl, "our clean time", clean, retry, "> 3", gb),
            slowdown(bad_curl, "curl's clean time", curl, retry, "", gb),
        ]

    def curl(self, url: str, *flags: str, then_md5: bool = False, fails: bool = False) -> ClientRun:
        out = self.work / "curl"
        out.unlink(missing_ok=True)
        run = measure(["curl", "-sf", *flags, "-o", str(out), url], fails=fails)
        if then_md5:
            run = add(run, measure(["md5sum", str(out)]))
        out.unlink(missing_ok=True)
        return run

    def ours(self, *flags: str, wan: bool = False) -> ClientRun:
        out = self.work / "ours"
        shutil.rmtree(out, ignore_errors=True)
        federation = service.DIRECTOR_HTTP_URL if wan else service.BARE_DIRECTOR_HTTP_URL
        path = self.wan_path if wan else self.path
        run = measure(
            [
                *(sys.executable, str(ROOT / "scripts" / "fetch_osdf.py"), f"osdf://{path}"),
                *("--federation", federation, "--out", str(out), *flags),
            ]
        )
        shutil.rmtree(out)
        return run

    def bare_loop(self) -> ClientRun:
        out = self.work / "bare"
        urls = [cache + self.path for cache in service.BARE_CACHE_URLS]
        run = measure([sys.executable, "-c", BARE_LOOP, str(out), str(self.num_bytes), *urls])
        out.unlink()
        return run

    def pelicanfs(self) -> ClientRun:
        out = self.work / "pelicanfs"
        federation = service.BARE_DIRECTOR_URL.replace("https", "pelican")
        environ = {"SSL_CERT_FILE": str(service.CA_FILE)}
        run = measure([sys.executable, "-c", PELICANFS, federation, self.path, str(out)], environ)
        out.unlink()
        return run


if __name__ == "__main__":
    sys.exit(run_command(main))
