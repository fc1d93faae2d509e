"""Figures of result rows, SVG and PNG, with plain matplotlib.

    axis("depth", published.entries("depth", rows, small=False), folder)    # lines; of an axis of names bars
    of_rows("links", rows, folder)                                          # memory and time, a bar for each row
    fronts(runs.shared(rows), folder)                                       # time against memory
    losses(rows, folder)                                                    # training and held-out loss
    collectives(rows, folder)                                               # the collectives of a step

Each returns the files that it wrote, an SVG before its PNG. What would show nothing raises NoFigure, which says why.
"""

import re
import textwrap
from collections import Counter
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import matplotlib
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from lab.report import published
from lab.report.history import comparable, curves_of, setting
from lab.report.runs import cost_setting, flags_apart, front, memory_of
from trainer.terminal.text import grouped

WIDTH = 6  # inch
# Most rows of a table that are drawn, most settings with a figure each, most points named in it: of 100 MB of rows the
# figures would take minutes, and nobody turns so many pages.
MOST = 50
SETTINGS = 20
NAMED = 12
matplotlib.rcParams |= {
    "svg.fonttype": "none",
    "svg.hashsalt": "report",
    "font.size": 9,
    "axes.titlesize": 9,
    "legend.fontsize": 8,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.axisbelow": True,
    "lines.linewidth": 1.2,
    "lines.markersize": 4.5,
    "errorbar.capsize": 2,
    "savefig.format": "png",
}
# Colours that people who do not see red or green tell apart (Okabe and Ito).
COLORS = ("black", "#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00")
FILLS = ("#56b4e9", "#e69f00", "0.65", "#009e73", "#cc79a7", "#f0e442")
STYLES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
MARKERS = "osD^vPX*<>hp"
HELD_OUT = ", held out"  # ends the name of a curve
XLABELS = {"seqlen": "sequence length (tokens)", "depth": "depth (blocks)", "gpus": "ranks"}


class NoFigure(ValueError):
    """A figure of these rows would show nothing; says why."""


class Bar(NamedTuple):
    """A row as a bar of each panel: the heading that it stands below, its name, what its colour says, and published
    figures beside it, by the key of ours."""

    group: str
    name: str
    series: str
    row: dict
    published: dict[str, float] = {}


def column(height: float, width: float = WIDTH) -> Figure:
    """An empty figure, in inch."""
    plot = Figure(figsize=(width, height), layout="constrained")
    # Text is wider in the file than where it is laid out.
    plot.get_layout_engine().set(w_pad=0.15)
    return plot


def legend(plot: Figure, handles: dict, title: str | None = None, **how) -> None:
    """A legend below the axes, or where `how` says, never on them: words -> what is drawn for them."""
    how = dict(loc="outside lower center", title=title, title_fontsize=8) | how
    plot.legend(handles.values(), handles, **how)


def save(plot: Figure, folder: Path, name: str) -> list[Path]:
    """Writes NAME.svg and NAME.png, or what savefig.format says, into a folder, which is made."""
    ends = dict.fromkeys(("svg", matplotlib.rcParams["savefig.format"]))
    paths = [folder / f"{name}.{end}" for end in ends]
    folder.mkdir(parents=True, exist_ok=True)
    for path in paths:
        plot.savefig(path, dpi=160, metadata={"Date": None} if path.suffix == ".svg" else {})
    return paths


def names_of(rows: list[dict], settings: list[dict]) -> list[str]:
    """A name for each row: the flags that differ, for the usual ones compile mode and recomputation, and its run where
    others on as many ranks have the same."""
    texts = []
    for row, text in zip(rows, flags_apart(settings), strict=True):
        usual = [f"--{name} {row['flags'].get(name)}" for name in ("compile", "remat")]
        texts.append(text if text.startswith("-") else " ".join(usual))
    alike = Counter((text, ranks(row)) for text, row in zip(texts, rows, strict=True))
    return [
        text if alike[text, ranks(row)] == 1 else f"{text}, run {row.get('run') or number}"
        for number, (text, row) in enumerate(zip(texts, rows, strict=True), 1)
    ]


def wrapped(text: str, width: int) -> str:
    """The text on lines of `width`; a flag stays beside its first value where both fit."""

    def joined(pair: re.Match) -> str:
        return pair[0].replace(" ", "\xa0") if len(pair[0]) <= width else pair[0]

    whole = re.sub(r"--[\w-]+ (?!-)\S+", joined, text)
    return textwrap.fill(whole, width, break_on_hyphens=False).replace("\xa0", " ")


def wrapper(row: dict) -> str:
    return f"--wrapper {(row.get('flags') or {}).get('wrapper')}"


def machine(row: dict) -> str:
    return f"{str(row.get('device') or 'no device').split(',')[0]}, torch {row.get('torch')}"


def ranks(row: dict) -> str:
    return f"ranks: {published.label(row)}"


def panels(rows: list[dict], wanted: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Those (key, words) of which any row has a figure. NoFigure where there is none."""
    if usable := [pair for pair in wanted if any(published.figure(row, pair[0]) for row in rows)]:
        return usable
    ends = ", ".join(sorted({str(row.get("outcome", "ok"))[:40] for row in rows}))
    raise NoFigure(f"no run has {wanted[-1][1]} ({ends})")


def memory_and_time(rows: list[dict]) -> list[tuple[str, str]]:
    key, words = memory_of(rows)
    return panels(rows, [(key, f"{words} (MiB)"), ("step_ms", "time of a step (ms)")])


def axis(name: str, entries: list, folder: Path) -> list[Path]:
    """What an axis of a sweep shows, a figure for GPUs and one for CPUs: lines over numbers, bars of names. Published
    figures are of GPUs and stand in theirs alone: a CPU's resident memory and its times do not compare with them."""
    names = published.key_names(name)
    paths = []
    why = []
    for kind in ("cpu", "gpu"):
        on_kind = [
            each for each in entries if each[1] and published.on_gpu(each[1]) == (kind == "gpu")
        ]
        if not on_kind:
            continue
        rows = [row for _, row, _ in on_kind]
        try:
            shown = panels(rows, [("mfu", "MFU (%)")]) if name == "mfu" else memory_and_time(rows)
        except NoFigure as error:
            why.append(f"on a {kind.upper()} {error}")
            continue
        if len(names) == 1 or name == "gpus":
            theirs = {key: each for key, _, each in entries if each and kind == "gpu"}
            made = [(words, curves(name, on_kind, theirs, key)) for key, words in shown]
            paths += lines(f"{name}-{kind}", made, XLABELS.get(name, names[0]), folder)
        else:
            beside = [figures(theirs) if kind == "gpu" else {} for *_, theirs in on_kind]
            paths += of_rows(f"{name}-{kind}", rows, folder, shown, beside)
    if not paths:
        raise NoFigure("; ".join(why) or "no run of ours")
    return paths


def figures(theirs: dict | None) -> dict[str, float]:
    """The figures of a published row, by the keys of ours."""
    keys = dict(peak_alloc_mib="mib", simulated_mib="mib", step_ms="ms", mfu="mfu")
    return {key: theirs[name] for key, name in keys.items() if theirs and theirs.get(name)}


def curves(name: str, ours: list, theirs: dict[tuple, dict], key: str) -> dict[str, list[tuple]]:
    """Name of a curve -> points of `lines`, of (key, row, ..) of ours and of published rows by key. Of the axis gpus a
    point belongs to the curve of as many sequences a rank, to that of as many in all, or to both."""
    points = []
    for at, row, *_ in ours:
        ends = [published.figure(row, key + end) for end in ("", "_min", "_max")]
        value = ends if ends[0] else [str(row.get("outcome", ""))[:12]]
        points.append((published.series(row, name), at, value))
    for at, each in theirs.items():
        curve = f"published {each['device']}" + f" n={each['ranks']}" * (name != "gpus")
        known = figures(each)
        value = known.get(key) or ("" if known else each["text"]["mib"][:12])
        points.append((curve, at, [value]))
    made = {}
    for curve, at, value in points:
        if name != "gpus":
            made.setdefault(curve, []).append((at[0], *value))
            continue
        batch, total, ranks = at
        side = [
            other for each, other, _ in points if each.startswith("pub") == curve.startswith("pub")
        ]
        if batch == min(other[0] for other in side):
            made.setdefault(f"{curve}, batch {batch} a rank", []).append((ranks, *value))
        if total == max(other[1] for other in side):
            made.setdefault(f"{curve}, batch {total} in all", []).append((ranks, *value))
    return made


def short(x: float) -> str:
    return grouped(x) if x >= 1000 else f"{x:g}"


def readable(side: Axis) -> None:
    """Plain numbers of an axis, of a logarithmic one as many as can be read."""
    side.set_major_formatter(lambda x, _: short(x))
    if side.get_scale() == "log":
        low, high = side.get_view_interval()
        subs = (1, 1.5, 2, 3, 5, 7) if high < 8 * low else (1, 3) if high < 500 * low else (1,)
        side.set(major_locator=LogLocator(subs=subs), minor_formatter=NullFormatter())


def lines(
    file: str,
    made: list[tuple[str, dict[str, list[tuple]]]],
    label: str,
    folder: Path,
    marks: dict[str, float] | None = None,
    **axes,
) -> list[Path]:
    """Panels below each other, (words for y, {name of a curve: points}) each. A point is (x, y), (x, y, least, most) or
    (x, words): no figure, but why. marks: {words: x} of vertical lines. axes: of matplotlib's Axes.set; both axes are
    logarithmic unless it says otherwise. Marks of published curves are white, and a curve whose name ends with
    HELD_OUT has the color of the one without. NoFigure without a point."""
    names = list(dict.fromkeys(name.removesuffix(HELD_OUT) for _, panel in made for name in panel))
    plot = column(1 + 2.3 * len(made) + 0.17 * (len(names) + len(marks or ())))
    handles = {}
    panes = plot.subplots(len(made), 1, sharex=True, squeeze=False)[:, 0]
    for ax, (words, panel) in zip(panes, made, strict=True):
        ax.set(**dict(xscale="log", yscale="log", ylabel=wrapped(words, 28)) | axes)
        for name, points in panel.items():
            number = names.index(name.removesuffix(HELD_OUT))
            known = [point for point in points if not isinstance(point[1], str)]
            known.sort(key=lambda point: point[0])
            color = COLORS[number % len(COLORS)]
            style = dict(color=color, linestyle=STYLES[number % len(STYLES)])
            if len(known) <= 12 or name.endswith(HELD_OUT):
                style["marker"] = MARKERS[number % len(MARKERS)]
            if name.startswith("published") or name.endswith(HELD_OUT):
                style["markerfacecolor"] = "white"
            if name.endswith(HELD_OUT):
                style["linestyle"] = "none"
            if known:
                x, y = zip(*(point[:2] for point in known), strict=True)
                ends = [
                    (y - (least or y), (most or y) - y)
                    for _, y, least, most in (
                        point if point[3:] else (*point, 0, 0) for point in known
                    )
                ]
                ends = [*zip(*ends, strict=True)] if any(map(any, ends)) else None
                handles[name] = ax.errorbar(x, y, ends, **style)
            for x, why in (point for point in points if isinstance(point[1], str) and point[1]):
                place = (x, 0.06 + 0.1 * (number % 6))
                how = dict(xycoords=ax.get_xaxis_transform(), ha="center", va="center", fontsize=7)
                ax.annotate(f"x {why}", place, color=color, **how)
    if not handles:
        raise NoFigure("no row has a figure")
    for number, (words, place) in enumerate((marks or {}).items(), 1):
        handles[words] = ax.axvline(place, color="0.4", linestyle=STYLES[number % len(STYLES)])
    places = sorted(
        {point[0] for _, panel in made for points in panel.values() for point in points}
    )
    for ax in panes:
        ax.margins(0.08, 0.12)
        readable(ax.xaxis)
        readable(ax.yaxis)
        if ax.get_xscale() == "log" and len(places) <= 8:
            ends = [*places, *(marks or {}).values()]
            ax.set_xlim(min(ends) / 1.3, max(ends) * 1.3)
            ax.set_xticks(places, [short(x) for x in places])
            ax.set_xticks([], minor=True)
    ax.set_xlabel(label)
    legend(plot, handles, ncols=2 if any(name.endswith(HELD_OUT) for name in handles) else 1)
    return save(plot, folder, file)


def bars(
    file: str, made: list[Bar], shown: list[tuple[str, str]], folder: Path, title: str = ""
) -> list[Path]:
    """Panels side by side, a bar with its name for each row, below the heading of its group. A bar of time ends at the
    smallest step, its line at the median: the largest step would squeeze all others. A diamond is published."""
    groups = {}
    for bar in made:
        groups.setdefault(bar.group, []).append(bar)
    entries = []  # (text, bar), of a heading (text, None)
    for group, inside in groups.items():
        entries += [(group, None)] * bool(group)
        entries += [(wrapped(bar.name, 44), bar) for bar in inside]
    heights = [0.1 + 0.14 * (1 + text.count("\n")) for text, _ in entries]  # inch
    middles = [end - height / 2 for height, end in zip(heights, accumulate(heights), strict=True)]
    series = list(dict.fromkeys(bar.series for bar in made))
    plot = column(1.3 + sum(heights) + 0.17 * len(series) * (len(series) > 1))
    if title:
        plot.suptitle(title, fontsize=9)
    handles = {}
    panes = plot.subplots(1, len(shown), sharey=True, squeeze=False)[0]
    for ax, (key, words) in zip(panes, shown, strict=True):
        for at, (_, bar) in zip(middles, entries, strict=True):
            if bar is None:
                continue
            median = published.figure(bar.row, key)
            if median:
                value = published.figure(bar.row, f"{key}_min") or median
                style = dict(color=FILLS[series.index(bar.series) % len(FILLS)], edgecolor="black")
                ends = [[0], [median - value]] if median > value else None
                handles[bar.series] = ax.barh(at, value, 0.17, xerr=ends, **style)
            else:
                end = str(bar.row.get("outcome", ""))[:24]
                ax.text(0, at, f" {end}", va="center", fontsize=7)
            if theirs := bar.published.get(key):
                style = dict(color="black", markerfacecolor="white")
                [handles["published"]] = ax.plot(theirs, at, "D", **style)
        label = wrapped(words, 22) + "\nbar: smallest,\nline: median" * (key == "step_ms")
        ax.set(xlabel=label, ylim=(sum(heights), 0))
        ax.set_xlim(0, 1.08 * ax.get_xlim()[1])
        ax.set_yticks(middles, [text for text, _ in entries])
        ax.tick_params(axis="y", length=0)
        ax.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
        readable(ax.xaxis)
        ax.grid(False, axis="y")
    for label, (_, bar) in zip(panes[0].get_yticklabels(), entries, strict=True):
        label.set_fontweight("normal" if bar else "bold")
    if len(handles) > 1:  # else it would say what all have
        legend(plot, handles)
    return save(plot, folder, file)


def of_rows(
    name: str,
    rows: list[dict],
    folder: Path,
    shown: list[tuple[str, str]] | None = None,
    beside: list[dict[str, float]] | None = None,
) -> list[Path]:
    """A bar for each row, in groups by ranks and links, coloured by wrapper. shown: (key, words) of the panels, memory
    and time if not given. beside: published figures of each row, its measured peak if not given. NoFigure: no row has
    a figure."""
    shown = shown or memory_and_time(rows)
    if beside is None:
        peaks = map(published.measured, rows)
        beside = [{shown[0][0]: mib} if mib else {} for mib in peaks]
    settings = [setting(row) for row in rows]
    for each in settings:
        each.pop("world", None), each.pop("link", None)  # the headings say them
    several = {what: len(set(map(what, rows))) > 1 for what in (ranks, wrapper, machine)}
    made = []
    for row, text, theirs in zip(rows, names_of(rows, settings), beside, strict=True):
        group = ranks(row) if several[ranks] else ""
        series = [what(row) for what in (wrapper, machine) if several[what]] or [wrapper(row)]
        made.append(Bar(group, text, ", ".join(series), row, theirs))
    return bars(name, made, shown, folder, "" if several[machine] else machine(rows[0]))


def fronts(settings: list[list[dict]], folder: Path, most: int = 8) -> list[Path]:
    """Time against memory of the rows of each setting. Of more than `most` variants those are named that no other beats
    in both, of these the NAMED fastest."""
    paths = []
    for number, rows in enumerate(settings, 1):
        key, words = memory_of(rows)
        points = [(row.get("step_ms_min", row["step_ms"]), row[key]) for row in rows]
        best = front(points)
        good = {*points} if len(rows) <= most else {*best}
        named = [i for i in sorted(range(len(rows)), key=points.__getitem__) if points[i] in good][
            :NAMED
        ]
        texts = names_of([rows[i] for i in named], [cost_setting(rows[i]) for i in named])
        plot = column(3.6, 7.5)
        ax = plot.subplots()
        ax.plot(*zip(*best, strict=True), "-", color="0.5", drawstyle="steps-post", zorder=1)
        handles = {}
        for at, (i, text) in enumerate(zip(named, texts, strict=True)):
            style = dict(color=COLORS[at % len(COLORS)], markerfacecolor="none", linestyle="none")
            [handles[wrapped(text, 36)]] = ax.plot(*points[i], MARKERS[at % len(MARKERS)], **style)
        if others := [point for i, point in enumerate(points) if i not in named]:
            # As an image: in an SVG each dot of thousands would be an element.
            style = dict(color="0.5", zorder=0, rasterized=len(others) > MOST)
            better = len(named) == len(good) < len(points)
            [handles[f"{len(others)} others" + ", none better in both" * better]] = ax.plot(
                *zip(*others, strict=True), ".", **style
            )
        ax.set(xlabel="time of the smallest step (ms)", ylabel=f"{words} (MiB)")
        ax.yaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 2.5, 5, 10], integer=True))
        readable(ax.yaxis)
        ax.margins(0.1)
        about = f"{machine(rows[0])}, {ranks(rows[0])}, {published.shape(rows[0])}"
        plot.suptitle(wrapped(about, 100), fontsize=9)
        legend(plot, handles, loc="outside right center", fontsize=7)
        paths += save(plot, folder, f"time-memory-{number}")
    if not settings:
        raise NoFigure("no three runs share shape, device, torch and ranks")
    return paths


def losses(rows: list[dict], folder: Path) -> list[Path]:
    """Loss over tokens, a curve for each run and its held-out loss. A run that was resumed is one curve, from its first
    step on."""
    histories = [*curves_of(comparable(rows))]
    if not histories:
        raise NoFigure(
            "no logged step of a run on real ranks lies beside the rows (FILE.steps/RUN.jsonl)"
        )
    names = names_of([row for row, _ in histories], [setting(row) for row, _ in histories])
    over = "tokens" if all("tokens" in step for _, steps in histories for step in steps) else "step"
    made = {}
    for name, (_, steps) in zip(names, histories, strict=True):
        for step in steps:
            kind = "eval_loss" if "eval_loss" in step else "loss"
            curve = name + HELD_OUT * (kind == "eval_loss")
            made.setdefault(curve, []).append((step[over], step[kind]))
    panel = ("loss (nats per token)", made)
    return lines("loss", [panel], over, folder, xscale="linear", yscale="linear")


def lanes(spans: list[tuple[int, int]]) -> list[int]:
    """For spans (start, end), the lowest lane of each in which none before it is in its way."""
    taken = []
    chosen = []
    for start, end in spans:
        free = next((i for i, until in enumerate(taken) if until <= start), len(taken))
        taken[free:] = [max(end, start + 1), *taken[free + 1 :]]
        chosen.append(free)
    return chosen


def collectives(rows: list[dict], folder: Path) -> list[Path]:
    """Collectives of a step above its matrix products, as lab/benchmarks/collectives.py counts them: the last row with
    plain Inductor options and the last with those of overlap.py. Bar: overlapped with products. Cross: exposed, so a
    GPU idles. NoFigure without either row."""
    shown = {
        "plain" in row["flags"]["compile_options"]: row
        for row in rows
        if row.get("study") == "collectives"
    }
    if len(shown) < 2:
        raise NoFigure("it takes a row with plain Inductor options and one without")
    looks = {
        "all-gather": ("0.2", "weights gathered"),
        "reduce-scatter": ("0.6", "gradients reduced"),
        "all-reduce": ("0.8", "gradients summed"),
    }
    plot = Figure(figsize=(6.5, 4.4), layout="constrained")
    handles = {}
    both = (("torch.compile alone", shown[True]), ("with overlap.py", shown[False]))
    for ax, (name, row) in zip(
        plot.subplots(2, 1, sharex=True, height_ratios=(8, 4)), both, strict=True
    ):
        before = 0
        spans = []
        for part, graph in row["graphs"].items():
            number = graph["products"]
            spans += [
                (before + start, gap, kind, mib)
                for kind, start, gap, mib, _ in graph["collectives"]
            ]
            ax.barh(-1, number - 0.2, 0.9, before, color="0.92", edgecolor="0.5", align="center")
            text = f"{part.split(', ')[-1]}: {number} products"
            ax.text(before + number / 2, -1, text, ha="center", va="center")
            before += number
        heights = lanes([(at, at + gap) for at, gap, *_ in spans])
        for (start, gap, kind, mib), y in zip(spans, heights, strict=True):
            color, label = looks[kind]
            if not gap:
                [handles[f"{label}, exposed"]] = ax.plot(start, y, "x", color=color, markersize=5)
                continue
            handles[label] = ax.barh(y, gap - 0.6, 0.8, start, color=color)
            if gap > 4:
                ink = "white" if color < "0.5" else "black"
                size = f"{mib:.0f} MiB" if mib >= 1 else "< 1 MiB"
                ax.text(
                    start + gap / 2 - 0.3, y, size, ha="center", va="center", fontsize=7, color=ink
                )
        exposed = sum(not gap for _, gap, *_ in spans)
        ax.set_title(f"{name}: {len(spans)} collectives, {exposed} of them exposed", loc="left")
        ax.grid(False)
        ax.set(yticks=[], xlim=(-1, before + 1.5))
        ax.spines[["left", "right", "top"]].set_visible(False)
    ax.set_xlabel("matrix products of the step that have begun (order, not time)")
    legend(plot, handles, "bar: overlapped with products; cross: exposed, the GPU idles", ncols=2)
    return save(plot, folder, "collectives")
