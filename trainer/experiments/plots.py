"""Plots of result rows: an axis beside the published line, memory against speed, overlap. Needs matplotlib.

    axis("seqlen", entries("seqlen", rows, small=False), Path("plots"))     # plots/seqlen-gpu.svg, plots/seqlen-cpu.svg
    fronts(rows, Path("plots"))                                             # plots/front-1.svg, ...
    overlap(rows, Path("docs"))                                             # docs/collectives.svg and .png
"""

import textwrap
from dataclasses import fields
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from trainer import config
from trainer.distributed.terminal import grouped
from trainer.experiments import published

matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "report", "font.size": 9}
MIB = {True: ("peak_alloc_mib", "peak allocated MiB"), False: ("peak_rss_mib", "peak resident MiB")}


def save(plot: Figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    plot.savefig(path, dpi=160, metadata={"Date": None} if path.suffix == ".svg" else {})
    return path


def curves(name: str, found: list, gpu: bool) -> dict[str, dict]:
    """Name of a curve -> {x: (MiB, ms, outcome)}. Of the axis gpus there are two each: one batch a rank, one in all."""
    names, made = published.key_names(name), {}
    keys, ours, theirs = list(dict.fromkeys(key for key, *_ in found)), [], []
    for key, o, p in found:
        if o and published.on_gpu(o) == gpu:
            point = published.figure(o, MIB[gpu][0]), published.figure(o, "step_ms"), o.get("outcome", "")
            ours.append((key, published.series(o, name), point))
        if p:
            point = p["mib"], p["ms"], "" if p["mib"] else p["text"]["mib"]
            theirs.append((key, f"published {p['device']}" + f" n={p['ranks']}" * ("ranks" not in names), point))
    for side in (ours, theirs):
        for key, curve, point in side:
            x, parts = key[0] if len(names) == 1 else keys.index(key), [""]
            if name == "gpus":
                x, least, most = key[2], min(each[0][0] for each in side), max(each[0][1] for each in side)
                parts = [f", batch {least} a rank"] * (key[0] == least) + [f", batch {most} in all"] * (key[1] == most)
            for part in parts:
                made.setdefault(curve + part, {})[x] = point
    return made


def draw(ax, made: dict[str, dict], i: int, line: bool, scale: bool) -> None:
    """One panel (i: 0 MiB, 1 ms). What has no figure is an x near the top, with its outcome, lower for each curve."""
    for number, (name, curve) in enumerate(made.items()):
        points = [(x, point[i]) for x, point in sorted(curve.items()) if point[i]]
        first, color = points[0][1] if points and scale else 1, f"C{number}"
        style = ("--" if name.startswith("published") else "-") * line + "o"
        ax.plot([x for x, _ in points], [y / first for _, y in points], style, color=color, label=name, markersize=4)
        for x, (*_, outcome) in curve.items():
            if outcome not in ("", "ok"):
                top = 0.97 - 0.16 * (number % 6)
                ax.plot([x], [top], "x", color=color, transform=ax.get_xaxis_transform(), markersize=4)
                ax.annotate(outcome[:16], (x, top - 0.02), xycoords=ax.get_xaxis_transform(), color=color, rotation=90,
                            ha="center", va="top", fontsize=6)  # fmt: skip


def axis(name: str, found: list, folder: Path) -> list[Path]:
    """Peak MiB and step ms along an axis, one file for GPUs and one for CPUs. Beside published figures a CPU's stand
    relative to their first, as those do: resident and allocated memory, or their times, compare as shapes only."""
    names, paths = published.key_names(name), []
    line = len(names) == 1 or name == "gpus"  # else the axis is a list of names
    for gpu in sorted({published.on_gpu(ours) for _, ours, _ in found if ours}):
        made = curves(name, found, gpu)
        scale = not gpu and any(each.startswith("published") for each in made)
        plot = Figure(figsize=(11, 5.5), layout="constrained")
        plot.suptitle(f"{name}{', each relative to its first point' * scale}")
        for i, (ax, unit) in enumerate(zip(plot.subplots(1, 2), (MIB[gpu][1], "median ms per step"), strict=True)):
            draw(ax, made, i, line, scale)
            ax.set_ylabel(unit + " (published: allocated)" * (scale and i == 0) + ", relative" * scale)
            ticks = sorted({x for curve in made.values() for x in curve})
            if line:
                ax.set(xscale="log", yscale="log", xlabel="ranks" if name == "gpus" else f"--{name}")
                ax.set_xticks(ticks, [str(x) for x in ticks], rotation=90 if len(ticks) > 9 else 0)
                ax.set_xticks([], minor=True)
                ax.yaxis.set(major_locator=LogLocator(subs=(1, 1.5, 2, 3, 5, 7)), minor_formatter=NullFormatter())
            else:
                texts = list(dict.fromkeys(" ".join(map(str, key)) for key, *_ in found))
                ax.set_xticks(ticks, [texts[x] for x in ticks], rotation=90)
                ax.set_ylim(bottom=0)
            ax.yaxis.set_major_formatter(lambda y, _: grouped(y, 0 if y == int(y) else 1))
            ax.grid(alpha=0.3)
        plot.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8)
        paths.append(save(plot, folder / f"{name}-{'gpu' if gpu else 'cpu'}.svg"))
    return paths


def options(row: dict) -> set[tuple[str, str]]:
    """(name, value) of the flags that are not the shape of the model, nor without influence on memory and time."""
    apart = {*published.SHAPE, *(each.name for each in fields(config.Output))}
    return {(name, str(value)) for name, value in (row.get("flags") or {}).items()
            if name not in apart and config.flag(name) not in published.NEUTRAL}  # fmt: skip


def front(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Of (ms, MiB) those that no other undercuts in both, fastest first."""
    best = []
    for point in sorted(set(points)):
        if not best or point[1] < best[-1][1]:
            best.append(point)
    return best


def fronts(rows: list[dict], folder: Path) -> list[Path]:
    """A scatter of ms against MiB for every setting (shape, device, torch, ranks) that at least three rows share."""
    settings, paths = {}, []
    for row in published.newest(rows, lambda row: (published.shape(row), *sorted(options(row)))):
        if published.figure(row, "step_ms") and published.figure(row, MIB[published.on_gpu(row)][0]):
            key = published.shape(row), row.get("device"), row.get("torch"), published.label(row)
            settings.setdefault(key, []).append(row)
    for (at, device, torch, n), those in settings.items():
        if len(those) < 3:
            continue
        key, unit = MIB[published.on_gpu(those[0])]
        plot = Figure(figsize=(9, 6), layout="constrained")
        ax = plot.subplots()
        points = [(row["step_ms"], row[key]) for row in those]
        shared = set.intersection(*map(options, those))
        ax.plot(*zip(*points, strict=True), "o")
        ax.plot(*zip(*front(points), strict=True), "-", drawstyle="steps-post", label="nothing is better in both")
        for row, point in zip(those, points, strict=True):
            text = " ".join(map("=".join, sorted(options(row) - shared)))
            ax.annotate(text, point, xytext=(4, 4), textcoords="offset points", fontsize=7)
        ax.set(xlabel="median ms per step", ylabel=unit)
        ax.set_title(textwrap.fill(f"{device}, torch {torch}, n={n}: {at}", 90), fontsize=9)
        ax.margins(0.15)
        ax.grid(alpha=0.3)
        ax.legend()
        paths.append(save(plot, folder / f"front-{len(paths) + 1}.svg"))
    return paths


def lanes(spans: list[tuple[int, int]]) -> list[int]:
    """For spans (start, end), the lowest lane of each in which none before it is in its way."""
    taken, found = [], []
    for start, end in spans:
        free = next((i for i, until in enumerate(taken) if until <= start), len(taken))
        taken[free:] = [max(end, start + 1), *taken[free + 1 :]]
        found.append(free)
    return found


def overlap(rows: list[dict], folder: Path) -> list[Path]:
    """The collectives of a step above its products, as benchmarks/collectives.py counts them: the last row with plain
    Inductor options and the last with ours. A bar goes from start to wait; a cross has no product between. Without
    either row no file."""
    shown = {"plain" in row["flags"]["compile_options"]: row for row in rows if row.get("study") == "collectives"}
    if len(shown) < 2:
        return []
    names, looks = ("torch.compile alone", "with overlap.py"), {"all-gather": ("0.2", "weights gathered"),
             "reduce-scatter": ("0.6", "gradients reduced"), "all-reduce": ("0.8", "gradients summed")}  # fmt: skip
    plot, handles = Figure(figsize=(6.5, 4.4), layout="constrained"), {}
    for ax, row, name in zip(plot.subplots(2, 1, sharex=True, height_ratios=(8, 4)), (shown[True], shown[False]), names,
                             strict=True):  # fmt: skip
        before, found = 0, []
        for part, graph in row["graphs"].items():
            found += [(before + start, gap, kind, mib) for kind, start, gap, mib, _ in graph["collectives"]]
            ax.text(before + graph["products"] / 2, -1, f"{part.split(', ')[-1]}: {graph['products']} products",
                    ha="center", va="center")  # fmt: skip
            ax.barh(-1, graph["products"] - 0.2, 0.9, before, color="0.92", edgecolor="0.5", align="center")
            before += graph["products"]
        for (start, gap, kind, mib), y in zip(found, lanes([(at, at + gap) for at, gap, *_ in found]), strict=True):
            color, label = looks[kind]
            if gap:
                handles[label] = ax.barh(y, gap - 0.6, 0.8, start, color=color)
                ink, text = "white" if color < "0.5" else "black", f"{mib:.0f} MiB" if gap > 4 else ""
                ax.text(start + gap / 2 - 0.3, y, text, ha="center", va="center", fontsize=7, color=ink)
            else:
                [handles[f"{label}, no product meanwhile"]] = ax.plot(start, y, "x", color=color, markersize=5)
        exposed = sum(not gap for _, gap, *_ in found)
        ax.set_title(f"{name}: {len(found)} collectives, {exposed} of them exposed", fontsize=9, loc="left")
        ax.set(yticks=[], xlim=(-1, before + 1.5))
        ax.spines[["left", "right", "top"]].set_visible(False)
    ax.set_xlabel("matrix products of the step that have begun (order, not time)")
    plot.legend(handles.values(), handles, loc="outside lower center", ncols=2, fontsize=8)
    return [save(plot, folder / f"collectives.{end}") for end in ("svg", "png")]
