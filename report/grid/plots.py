"""The OSG study's four pictures from any grid report, as PNG and SVG; and those of a replay."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dataset.errors import UserError
from report.grid.replay import AS_IT_WAS, Replay, ReplayedJob, Way
from report.grid.report import GridReport, count_causes
from report.grid.rows import GridJob
from report.grid.totals import mean, median
from report.words import choose_unit, count, to_label

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

# Okabe and Ito's colours: told apart by colour-blind readers too.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#F0E442", "#000000")
GREY = "#666666"
MAX_BARS = 40
MAX_SITES = 12
_WAITS = {1: "1 s", 10: "10 s", 60: "1 min", 600: "10 min", 3600: "1 h", 36000: "10 h"}


def draw_grid_charts(report: GridReport, folder: Path) -> list[Path]:
    """Writes each picture that the jobs have something to show for; returns the files."""
    matplotlib = _import_matplotlib()
    folder.mkdir(parents=True, exist_ok=True)
    charts: dict[str, Callable[[GridReport], Canvas | None]] = {
        "completion_time": draw_completion_times,
        "compute_per_site": draw_site_compute,
        "stall_time": draw_stall_times,
        "failure_causes": draw_failure_causes,
    }
    files = []
    # A fixed salt and no date: the same report gives the same bytes.
    with matplotlib.rc_context({"svg.hashsalt": "trainyard", "font.size": 10}):
        for name, draw in charts.items():
            canvas = draw(report)
            if canvas is None:
                continue
            for suffix, options in (
                ("png", {"dpi": 150}),
                ("svg", {"metadata": {"Date": None}}),
            ):
                files.append(folder / f"{name}.{suffix}")
                canvas.savefig(files[-1], **options)
    return files


def draw_completion_times(report: GridReport) -> Canvas | None:
    """First match to the end of each successful job, in order, coloured by site."""
    jobs = [job for job in report.jobs if job.succeeded and job.match_to_end_s is not None]
    if not jobs:
        return None
    canvas, axes = _new_canvas(9.0, 4.2)
    seconds = [job.match_to_end_s or 0.0 for job in jobs]
    unit = choose_unit(max(seconds))
    times = [value / unit.seconds for value in seconds]
    axes.vlines(range(len(jobs)), 0, times, color="#dddddd", linewidth=1, zorder=1)
    for (site, places), colour in zip(_group_sites(jobs).items(), cycle(COLOURS), strict=False):
        label = f"{to_label(site) or 'unknown site'} ({len(places)})"
        axes.scatter(places, [times[i] for i in places], s=22, color=colour, label=label, zorder=2)
    for value, style, name in ((mean(seconds), "-", "mean"), (median(seconds), "--", "median")):
        assert value is not None
        label = f"{name} {unit.show(value)}"
        height = value / unit.seconds
        axes.axhline(height, color=GREY, linewidth=1, linestyle=style, label=label, zorder=1)
    axes.set(ylim=(0, None), xlim=(-1, len(jobs)))
    axes.set_ylabel(f"{unit.name} from first match to the end")
    ends = f"{to_label(jobs[0].job_id)} to {to_label(jobs[-1].job_id)}"
    axes.set_xlabel(f"successful jobs in order ({ends})")
    axes.set_title("Completion time of each successful job")
    axes.legend(frameon=False, fontsize=8)
    return canvas


def draw_site_compute(report: GridReport) -> Canvas | None:
    """Mean and median compute of the successful jobs of each site, of the largest ones."""
    sites = [site for site in report.sites if site.num_jobs]
    if not sites:
        return None
    largest = sorted(sites, key=lambda site: site.num_jobs, reverse=True)[:MAX_SITES]
    sites = [site for site in sites if site in largest]
    canvas, axes = _new_canvas(max(5.0, 1.6 * len(sites) + 2), 4.2)
    width = 0.38
    for shift, colour, name, attribute in (
        (-width / 2, COLOURS[0], "mean", "compute_mean_s"),
        (width / 2, COLOURS[5], "median", "compute_median_s"),
    ):
        values = [getattr(site, attribute) for site in sites]
        places = [place + shift for place in range(len(sites))]
        bars = axes.bar(places, values, width, color=colour, label=name)
        axes.bar_label(bars, [f"{value:,.0f}" for value in values], fontsize=8, padding=2)
    labels = [f"{to_label(site.site)}\n{count(site.num_jobs, 'job')}" for site in sites]
    axes.set_xticks(range(len(sites)), labels)
    axes.set_ylabel("seconds")
    axes.margins(y=0.12)
    axes.set_title("Compute time of successful jobs by site")
    axes.legend(frameon=False)
    return canvas


def draw_stall_times(report: GridReport) -> Canvas | None:
    """Time that each job lost to input transfers that had to be tried again, the worst first."""
    losers = [job for job in report.jobs if job.transfer_retried_s > 0]
    losers.sort(key=lambda job: job.transfer_retried_s, reverse=True)
    if not losers:
        return None
    shown = losers[:MAX_BARS]
    canvas, axes = _new_canvas(8.0, 0.21 * len(shown) + 1.4)
    unit = choose_unit(shown[0].transfer_retried_s)
    times = [job.transfer_retried_s / unit.seconds for job in shown]
    colours = [COLOURS[0] if job.succeeded else COLOURS[1] for job in shown]
    bars = axes.barh(range(len(shown)), times, color=colours, height=0.7)
    axes.set_yticks(range(len(shown)), [to_label(job.job_id) for job in shown])
    labels = [
        f"{unit.show(job.transfer_retried_s)}, {count(job.num_stalls, 'stall')}" for job in shown
    ]
    axes.bar_label(bars, labels, fontsize=7, padding=3)
    axes.tick_params(axis="y", labelsize=7)
    axes.invert_yaxis()
    axes.margins(x=0.16, y=0.01)
    axes.set_xlabel(f"{unit.name} before the last input transfer")
    total_s = sum(job.transfer_retried_s for job in losers)
    total = choose_unit(total_s)
    worst = f", the worst {MAX_BARS} shown" if len(losers) > MAX_BARS else ""
    axes.set_title(
        f"Lost to stalled and repeated transfers: {total_s / total.seconds:,.0f} {total.short} in "
        f"{count(len(losers), 'job')}{worst}",
        fontsize=11,
    )
    handles = [_swatch(COLOURS[0]), _swatch(COLOURS[1])]
    axes.legend(handles, ["job succeeded", "job failed"], frameon=False, loc="lower right")
    return canvas


def draw_failure_causes(report: GridReport) -> Canvas | None:
    """The failed jobs by cause, with their share of all failures."""
    causes = count_causes(report.jobs).most_common()
    if not causes:
        return None
    canvas, axes = _new_canvas(7.0, 0.5 * len(causes) + 1.4)
    num_failed = sum(count for _, count in causes)
    bars = axes.barh(range(len(causes)), [n for _, n in causes], color=COLOURS[1])
    axes.set_yticks(range(len(causes)), [to_label(cause) for cause, _ in causes])
    labels = [f"{count} ({100 * count / num_failed:.1f} %)" for _, count in causes]
    axes.bar_label(bars, labels, padding=4)
    axes.invert_yaxis()
    axes.margins(x=0.2)
    axes.locator_params(axis="x", integer=True)
    axes.set_xlabel("jobs")
    axes.set_title(f"Causes of failure: {num_failed} of {count(len(report.jobs), 'job')}")
    return canvas


def draw_replay(replay: Replay) -> list[Canvas]:
    """A picture for each reading of the stalls: what each job waited, as it was and otherwise."""
    jobs = sorted(replay.arrived, key=lambda job: -job.waited_s[AS_IT_WAS])
    ways: defaultdict[str, list[Way]] = defaultdict(list)
    for way in replay.ways:
        if way.key != AS_IT_WAS:
            ways[way.stalls].append(way)
    was = next(way for way in replay.ways if way.key == AS_IT_WAS)
    return [_draw_waits(jobs, [was, *others]) for others in ways.values()]


def _draw_waits(jobs: list[ReplayedJob], ways: list[Way]) -> Canvas:
    canvas, axes = _new_canvas(8.0, 3.6)
    # The first dots are larger: they are seen behind later ones on the same place.
    dots = ((GREY, 26), (COLOURS[5], 9), (COLOURS[2], 9))
    for way, (colour, size) in zip(ways, dots, strict=False):
        waits = [job.waited_s[way.key] for job in jobs]
        axes.scatter(range(len(jobs)), waits, s=size, color=colour, label=to_label(way.way))
    axes.set_yscale("log")
    axes.set_yticks(list(_WAITS), list(_WAITS.values()))
    axes.minorticks_off()
    axes.grid(True, axis="y", color="#dddddd", linewidth=0.5)
    axes.set_axisbelow(True)
    axes.set_xlabel(f"{count(len(jobs), 'job')} that got the data, the longest wait first")
    axes.set_ylabel("waited for data")
    axes.set_title(f"Waiting, replayed (not measured); stalls were {to_label(ways[-1].stalls)}")
    axes.legend(frameon=False, fontsize=8, loc="upper right")
    return canvas


def _group_sites(jobs: list[GridJob]) -> dict[str, list[int]]:
    """The places of the jobs of each site; those of small sites together, if there are many."""
    places: defaultdict[str, list[int]] = defaultdict(list)
    large = {site for site, _ in Counter(job.site for job in jobs).most_common(MAX_SITES)}
    for place, job in enumerate(jobs):
        places[job.site if job.site in large else "other sites"].append(place)
    return dict(sorted(places.items()))


def _new_canvas(width_in: float, height_in: float) -> tuple[Canvas, Axes]:
    from matplotlib.figure import Figure

    canvas = Figure(figsize=(width_in, height_in), layout="constrained")
    axes = canvas.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return canvas, axes


def _swatch(colour: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(color=colour)


def _import_matplotlib() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise UserError("the charts need matplotlib; run: pip install matplotlib") from None
    return matplotlib
