"""Figures of result rows for a column of a paper (3.4 inch, 8 pt), PNG and SVG, readable in grey. Needs matplotlib.

    axis("depth", published.entries("depth", rows, small=False), folder)    # lines; of an axis of names bars
    bars("links", [(None, row, None) for row in rows], folder)              # memory and time, a bar for each row
    fronts(runs.shared(rows), folder)                                       # time against memory
    losses(rows, folder)                                                    # curves of training and held-out loss
    overlap(rows, folder)                                                   # the collectives of a step

Each returns the files that it wrote, an SVG before its PNG. What would show nothing raises NoFigure, which says why.
"""

import shlex
import textwrap
from collections import Counter
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullFormatter

from lab.report import published
from lab.report.history import comparable, curves_of, setting
from lab.report.runs import memory_of, told
from lab.sweeps import sweep
from trainer.distributed.terminal import grouped

WIDTH, PAGE = 3.4, 7.5  # inch; a page's height without axes and legend
# Most rows of a table that are drawn, most settings with a figure each, most points named in it: of 100 MB of rows the
# figures would take minutes, and nobody turns so many pages.
MOST = 100
SETTINGS = 20
NAMED = 40
matplotlib.rcParams |= {
    "svg.fonttype": "none",
    "svg.hashsalt": "report",
    "font.size": 8,
    "axes.titlesize": 8,
    "legend.fontsize": 7,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.axisbelow": True,
    "lines.linewidth": 1,
    "lines.markersize": 4,
    "hatch.linewidth": 0.5,
    "errorbar.capsize": 1.5,
    "legend.handlelength": 2.6,
    "savefig.format": "png",
}
COLORS = ("black", "#d55e00", "#0072b2", "#009e73", "0.55", "#cc79a7")
STYLES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
MARKERS = "osD^vPX*<>hp"
FACES = ("0.7", "white", "0.9", "0.5")
HATCHES = ("", "/////", ".....", "xxxxx", "-----")
WORDS = {
    "attn": {"flex": "FlexAttention", "sdpa": "SDPA"},
    "compile": {
        "none": "eager",
        "blocks": "compiled blocks",
        "model": "compiled model",
        "fwdbwd": "compiled fwd + bwd",
        "step": "compiled step",
    },
    "remat": {
        "none": "no recomputation",
        "mlp": "MLP recomputed",
        "attn": "attention recomputed",
        "both": "MLP, attention recomputed",
        "block": "blocks recomputed",
        "pointwise": "pointwise recomputed",
    },
    "mode": {"fully_shard": "sharded", "replicate": "replicated", "hybrid_shard": "hybrid"},
    "wrapper": {"simple": "SimpleFSDP", "fsdp2": "FSDP2", "ddp": "DDP", "none": "no wrapper"},
    "loss": {"full": "full loss", "chunked": "chunked loss"},
    "mlp": {"lean": "lean MLP", "plain": "plain MLP"},
    "compile_options": {
        "()": "overlap.py",
        "plain": "without overlap.py",
        "allow_buffer_reuse=False": "no reuse of buffers",
    },
    "way": {"whole": "DDP", "sharded": "ZeRO-1", "fully_shard": "FSDP"},
    "small": {"replicate": "small ones replicated", "shard": "all sharded"},
}
NAMES = {
    "lr": "learning rate",
    "reduce_dtype": "gradients reduced in",
    "mlp_chunk": "MLP in chunks of",
    "cuda_graph": "CUDA graph",
}


class NoFigure(ValueError):
    """A figure of these rows would show nothing; says why."""


class Point(NamedTuple):
    """What a figure shows of a row: MiB, ms with least and most, MFU in percent, and how the run ended."""

    mib: float | None = None
    ms: float | None = None
    low: float | None = None
    high: float | None = None
    mfu: float | None = None
    outcome: str = ""


def column(height: float) -> Figure:
    """An empty figure as wide as a column; height in inch."""
    plot = Figure(figsize=(WIDTH, height), layout="constrained")
    plot.get_layout_engine().set(w_pad=0.06)
    return plot


def legend(plot: Figure, handles: dict, title: str | None = None, **how) -> None:
    """A legend below the axes: words -> what is drawn for them."""
    words = [textwrap.fill(text, 48) if len(text.split("\n")[0]) > 54 else text for text in handles]
    plot.legend(
        handles.values(),
        words,
        title=title,
        title_fontsize=7,
        **(dict(loc="outside lower center") | how),
    )


def save(plot: Figure, folder: Path, name: str, dpi: int = 300) -> list[Path]:
    """Writes NAME.svg and NAME.png, or what savefig.format says, into a folder, which is made."""
    ends = dict.fromkeys(("svg", matplotlib.rcParams["savefig.format"]))
    paths = [folder / f"{name}.{end}" for end in ends]
    folder.mkdir(parents=True, exist_ok=True)
    for path in paths:
        plot.savefig(path, dpi=dpi, metadata={"Date": None} if path.suffix == ".svg" else {})
    return paths


def word(name: str, value: object) -> str:
    """--NAME VALUE for people."""
    text = " ".join(map(str, value)) or "()" if isinstance(value, list | tuple) else str(value)
    if name == "ranks":
        n, _, link = text.removesuffix(")").partition("(sim ")
        return f"{n} simulated ranks, {link}" if link else f"{n} rank{'s' * (n != '1')}"
    name, words = NAMES.get(name, name.replace("_", " ")), WORDS.get(name, {})
    if value is None or value is False:
        return f"no {name}"
    return name if value is True else words.get(text, f"{name} {text.replace('_', ' ')}")


def wording(settings: list[dict]) -> list[str]:
    """Of settings, what tells each from the others, in words; of more than three things only what most do not have, or
    where that is nothing what they have."""
    names = dict.fromkeys(name for each in settings for name in each)
    values = {name: Counter(str(each.get(name)) for each in settings) for name in names}
    apart = {name: count.most_common(1)[0][0] for name, count in values.items() if len(count) > 1}
    usual = (
        {} if len(apart) <= 3 else {name: value for name, value in apart.items() if name != "ranks"}
    )
    texts = []
    for each in settings:
        own = [name for name in apart if name in each and str(each[name]) != usual.get(name)]
        own = (
            own
            if {*own} - {"ranks"}
            else [name for name in apart if name in each and name in (*WORDS, "ranks")]
        )
        texts.append(", ".join(word(name, each[name]) for name in own))
    return texts


def ours(row: dict, mib: str) -> Point:
    told = (
        published.figure(row, key) for key in (mib, "step_ms", "step_ms_min", "step_ms_max", "mfu")
    )
    return Point(*told, row.get("outcome", "ok"))


def curves(name: str, found: list, gpu: bool) -> dict[str, dict]:
    """Name of a curve -> {x: Point}. Of the axis gpus there are two each: one batch a rank, one in all."""
    names = published.key_names(name)
    made = {}
    keys = list(dict.fromkeys(key for key, *_ in found))
    own = []
    theirs = []
    mib = memory_of(o for _, o, _ in found if o and published.on_gpu(o) == gpu)[0]
    for key, o, p in found:
        if o and published.on_gpu(o) == gpu:
            own.append((key, published.series(o, name), ours(o, mib)))
        if p:
            point = Point(
                p["mib"], p["ms"], None, None, p.get("mfu"), "" if p["mib"] else p["text"]["mib"]
            )
            theirs.append(
                (
                    key,
                    f"published {p['device']}" + f" n={p['ranks']}" * ("ranks" not in names),
                    point,
                )
            )
    for side in (own, theirs):
        for key, curve, point in side:
            x = key[0] if len(names) == 1 else keys.index(key)
            parts = [""]
            if name == "gpus":
                x = key[2]
                least = min(each[0][0] for each in side)
                most = max(each[0][1] for each in side)
                parts = [f", batch {least} a rank"] * (key[0] == least) + [
                    f", batch {most} in all"
                ] * (key[1] == most)
            for part in parts:
                made.setdefault(curve + part, {})[x] = point
    return made


def panels(name: str, made: dict[str, dict], memory: str) -> list[tuple[str, str]]:
    """(field of Point, words) of what an axis shows: MFU of `mfu`, else memory and time; what no run of ours has is
    left out. NoFigure where nothing is left."""
    wanted = (
        [("mfu", "MFU (%)")]
        if name == "mfu"
        else [("mib", f"{memory} (MiB)"), ("ms", "time of a step (ms)")]
    )
    points = [
        point
        for curve, line in made.items()
        if not curve.startswith("published")
        for point in line.values()
    ]
    if found := [
        (key, words) for key, words in wanted if any(getattr(point, key) for point in points)
    ]:
        return found
    ends = ", ".join(sorted({point.outcome[:40] for point in points} - {"ok", ""}))
    lacks = (
        "no run has an MFU: the peak of their device is not known"
        if name == "mfu"
        else "no run has a figure"
    )
    raise NoFigure(lacks + f" ({ends})" * bool(ends))


# Over the first of its points that has the figure.
def relative(curve: dict, keys: list[tuple[str, str]]) -> dict:
    first = {
        key: next((getattr(p, key) for _, p in sorted(curve.items()) if getattr(p, key)), 1)
        for key, _ in keys
    }
    base = first | dict(low=first.get("ms", 1), high=first.get("ms", 1))
    return {
        x: p._replace(**{k: getattr(p, k) / n for k, n in base.items() if getattr(p, k)})
        for x, p in curve.items()
    }


def axis(name: str, found: list, folder: Path) -> list[Path]:
    """What an axis shows, one figure for GPUs and one for CPUs. Beside published figures a CPU's stand relative to
    their first, as those do: resident and allocated memory, or their times, compare as shapes only."""
    names = published.key_names(name)
    paths = []
    why = []
    for gpu in sorted({published.on_gpu(o) for _, o, _ in found if o}):
        here = {key for key, o, _ in found if o and published.on_gpu(o) == gpu}
        line = len(names) == 1 or name == "gpus"
        # No group of bars without one of ours.
        some = [each for each in found if line or each[0] in here]
        made = curves(name, some, gpu)
        memory = memory_of(o for _, o, _ in some if o and published.on_gpu(o) == gpu)[1]
        try:
            shown = panels(name, made, memory)
        except NoFigure as e:
            why.append(f"on a {'GPU' if gpu else 'CPU'} {e}")
            continue
        if not gpu and name != "mfu" and any(curve.startswith("published") for curve in made):
            made = {
                curve: relative(points, shown)
                for curve, points in made.items()
                if len(points) > 1 or not line
            }
            words = {"mib": f"{memory} (published: allocated)", "ms": "time of a step"}
            shown = [(key, f"{words[key]}, relative to the first") for key, _ in shown]
        file = f"{name}-{'gpu' if gpu else 'cpu'}"
        show = lines if line else draw_bars
        keys = dict(enumerate(dict.fromkeys(key for key, *_ in some)))
        settings = [
            dict(zip(names, key, strict=True))
            if names
            else sweep.given(sweep.parse(shlex.split(key[0]))[1])
            for key in keys.values()
        ]
        labels = (
            "ranks"
            if name == "gpus"
            else names[0]
            if line
            else dict(zip(keys, wording(settings), strict=True))
        )
        paths += show(file, made, shown, labels, folder)
    if not paths:
        raise NoFigure("; ".join(why) or "no run of ours")
    return paths


def lines(
    file: str, made: dict[str, dict], shown: list[tuple[str, str]], label: str, folder: Path
) -> list[Path]:
    """A panel below the other, both axes logarithmic; bars from the least to the most. What has no figure is an x near
    the bottom, with its outcome, higher for each curve."""
    plot = column(0.7 + 1.7 * len(shown) + 0.15 * len(made))
    handles = {}
    ticks = sorted({x for curve in made.values() for x in curve})
    middle = (ticks[0] * ticks[-1]) ** 0.5
    for ax, (key, words) in zip(
        plot.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0], shown, strict=True
    ):
        for number, (name, curve) in enumerate(made.items()):
            color = COLORS[number % len(COLORS)]
            line = STYLES[number % len(STYLES)]
            how = dict(color=color, linestyle=line, marker=MARKERS[number % len(MARKERS)])
            how |= dict(markerfacecolor="white") if name.startswith("published") else {}
            if has := [(x, p) for x, p in sorted(curve.items()) if getattr(p, key)]:
                ends = (
                    [(p.ms - (p.low or p.ms), (p.high or p.ms) - p.ms) for _, p in has]
                    if key == "ms"
                    else None
                )
                spread = [*zip(*ends, strict=True)] if ends and any(map(any, ends)) else None
                handles[name] = ax.errorbar(
                    [x for x, _ in has], [getattr(p, key) for _, p in has], spread, **how
                )
            for x, p in curve.items():
                if not getattr(p, key) and p.outcome not in ("", "ok"):
                    low = 0.07 + 0.12 * (number % 6)
                    across = ax.get_xaxis_transform()
                    side = 1 - 2 * (x > middle)
                    ax.plot([x], [low], "x", color=color, transform=across)
                    ax.annotate(
                        p.outcome[:12],
                        (x, low),
                        (4 * side, 0),
                        xycoords=across,
                        textcoords="offset points",
                        color=color,
                        ha="left" if side > 0 else "right",
                        va="center",
                        fontsize=6,
                    )
        ax.set(xscale="log", yscale="log", ylabel=textwrap.fill(words, 24))
        ax.margins(0.08, 0.12)
        ax.set_xticks(
            ticks,
            [str(x) for x in ticks],
            rotation=90 if sum(len(str(x)) for x in ticks) > 32 else 0,
        )
        ax.set_xticks([], minor=True)
        low, high = ax.get_ylim()
        subs = (1, 1.5, 2, 3, 5, 7) if high < 8 * low else (1, 3) if high < 500 * low else (1,)
        ax.yaxis.set(major_locator=LogLocator(subs=subs), minor_formatter=NullFormatter())
        ax.yaxis.set_major_formatter(lambda y, _: grouped(y, 0 if y == int(y) else 1))
    ax.set_xlabel(
        {"seqlen": "sequence length (tokens)", "depth": "depth (blocks)"}.get(label, label)
    )
    legend(plot, handles)
    return save(plot, folder, file)


def draw_bars(
    file: str, made: dict[str, dict], shown: list[tuple[str, str]], labels: dict, folder: Path
) -> list[Path]:
    """Panels side by side: a group of bars for each label, one for each curve of ours; what is published is a mark.
    What does not fit on a page has several files."""
    own, theirs = (
        [name for name in made if name.startswith("published") == yes] for yes in (False, True)
    )
    texts = {x: textwrap.fill(text, 24, break_on_hyphens=False) for x, text in labels.items()}
    inside = {x: [name for name in own if x in made[name]] for x in texts}
    # Inch.
    room = {
        x: 0.07 + max(0.12 * (1 + text.count("\n")), 0.13 * len(inside[x]))
        for x, text in texts.items()
    }
    if sum(room.values()) > PAGE:
        page = {
            x: int(end // PAGE) for x, end in zip(texts, accumulate(room.values()), strict=True)
        }
        return [
            path
            for n in dict.fromkeys(page.values())
            for path in draw_bars(
                f"{file}-{n + 1}",
                {
                    name: {x: p for x, p in curve.items() if page[x] == n}
                    for name, curve in made.items()
                },
                shown,
                {x: text for x, text in labels.items() if page[x] == n},
                folder,
            )
        ]
    places = {x: end - room[x] / 2 for x, end in zip(texts, accumulate(room.values()), strict=True)}
    plot = column(0.85 + sum(room.values()) + 0.15 * len(made))
    axes = plot.subplots(1, len(shown), sharey=True, squeeze=False)[0]
    handles = {}
    for ax, (key, words) in zip(axes, shown, strict=True):
        for number, name in enumerate(own):
            how = dict(
                color=FACES[number % len(FACES)],
                hatch=HATCHES[number % len(HATCHES)],
                edgecolor="black",
            )
            for x, p in made[name].items():
                at = places[x] + 0.13 * (inside[x].index(name) - (len(inside[x]) - 1) / 2)
                if value := (p.low or p.ms) if key == "ms" else getattr(p, key):
                    # The largest would squeeze all others.
                    ends = [[0], [p.ms - value]] if key == "ms" else None
                    handles[name] = ax.barh(
                        at,
                        value,
                        0.115,
                        xerr=ends,
                        error_kw=dict(linewidth=0.7),
                        linewidth=0.5,
                        **how,
                    )
                elif p.outcome not in ("", "ok"):
                    ax.annotate(
                        p.outcome[:14],
                        (0, at),
                        (2, 0),
                        textcoords="offset points",
                        va="center",
                        fontsize=6,
                    )
        for number, name in enumerate(theirs):
            if has := [
                (getattr(p, key), places[x]) for x, p in made[name].items() if getattr(p, key)
            ]:
                [handles[name]] = ax.plot(
                    *zip(*has, strict=True),
                    "Dv^s"[number % 4],
                    color="black",
                    markersize=4,
                    markerfacecolor="white",
                )
        ax.margins(x=0.08)
        ax.set(xlabel=textwrap.fill(words, 18), ylim=(sum(room.values()), 0))
        ax.set_xlim(left=0)
        ax.set_yticks([*places.values()], [*texts.values()])
        ax.tick_params(axis="y", length=0)
        ticks = MaxNLocator(3, steps=[1, 2, 5, 10])  # more of them would touch
        ax.xaxis.set(
            major_locator=ticks, major_formatter=lambda x, _: grouped(x, 0 if x == int(x) else 1)
        )
        ax.grid(False, axis="y")
    spread = any(p.low for name in own for p in made[name].values()) and "ms" in dict(shown)
    legend(
        plot, handles, "time: bars to the smallest step, lines to the median" if spread else None
    )
    return save(plot, folder, file)


def bars(name: str, found: list, folder: Path) -> list[Path]:
    """Memory and time of rows, a bar for each, named by what differs between them. found: (None, row, published peak
    MiB or None) each. NoFigure where no row has either."""
    rows = [row for _, row, _ in found]
    key, memory = memory_of(rows)
    labels = dict(enumerate(wording([told(row) for row in rows])))
    made = {}
    for i, (_, row, mib) in enumerate(found):
        at = f"{str(row.get('device') or 'no device').split(',')[0]}, torch {row.get('torch')}"
        made.setdefault(at, {})[i] = ours(row, key)
        if mib:
            made.setdefault("published, measured", {})[i] = Point(mib)
    return draw_bars(name, made, panels(name, made, memory), labels, folder)


def front(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Of (ms, MiB) those that no other undercuts in both, fastest first."""
    best = []
    for point in sorted(set(points)):
        if not best or point[1] < best[-1][1]:
            best.append(point)
    return best


def fronts(settings: list[list[dict]], folder: Path, most: int = 8) -> list[Path]:
    """Time against memory of the rows of each setting. Of more than `most` variants those are named that no other beats
    in both, of these the NAMED fastest."""
    paths = []
    for number, those in enumerate(settings, 1):
        device = those[0].get("device")
        torch = those[0].get("torch")
        n = published.label(those[0])
        key, unit = memory_of(those)
        points = [(row.get("step_ms_min", row["step_ms"]), row[key]) for row in those]
        best = front(points)
        few = {*points} if len(those) <= most else {*best}
        good = sorted((i for i, point in enumerate(points) if point in few), key=points.__getitem__)
        named = good[:NAMED]
        texts = [textwrap.fill(text, 54) for text in wording([told(those[i]) for i in named])]
        plot = column(2.9 + 0.115 * sum(2 + text.count("\n") for text in texts))
        ax = plot.subplots()
        handles = {}
        ax.plot(*zip(*best, strict=True), "-", color="0.5", drawstyle="steps-post", zorder=1)
        for i, (at, text) in enumerate(zip(named, texts, strict=True)):
            # none: a mark behind another is seen.
            face = "none" if i < len(MARKERS) else COLORS[i % len(COLORS)]
            [handles[text]] = ax.plot(
                *points[at],
                MARKERS[i % len(MARKERS)],
                color=COLORS[i % len(COLORS)],
                markerfacecolor=face,
                markersize=5.5,
                linestyle="none",
            )
        if others := [point for i, point in enumerate(points) if i not in named]:
            # As an image: in an SVG each dot of thousands would be an element.
            [dots] = ax.plot(
                *zip(*others, strict=True),
                ".",
                color="0.5",
                zorder=0,
                rasterized=len(others) > MOST,
            )
            better = ": one of these is as good or better in both" * (good == named)
            handles[f"{len(others)} others{better}"] = dots
        ax.set(xlabel="time of the smallest step (ms)", ylabel=f"{unit} (MiB)")
        about = f"{str(device).split(',')[0]}, torch {torch}, {word('ranks', n)}, {where(those[0])}"
        plot.suptitle(textwrap.fill(about, 54), fontsize=8)
        # Whole MiB: of ticks at halves two would have one label.
        ax.yaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 2.5, 5, 10], integer=True))
        ax.yaxis.set_major_formatter(lambda y, _: grouped(y))
        ax.margins(0.1)
        legend(plot, handles, loc="outside lower left", fontsize=6.5)
        paths += save(plot, folder, f"time-memory-{number}")
    if not settings:
        raise NoFigure("no three runs share shape, device, torch and ranks")
    return paths


def where(row: dict) -> str:
    """The shape of a row in words."""
    s = {name: published.setting(row, name) for name in ("depth", "width", "batch", "seqlen")}
    return f"depth {s['depth']}, width {s['width']}, {s['batch']} x {grouped(s['seqlen'])} tokens a rank"


def losses(rows: list[dict], folder: Path) -> list[Path]:
    """Loss over tokens, a curve for each run: lines of training, marks of held-out data. A run that was resumed is one
    curve, from its first step on."""
    found = [*curves_of(comparable(rows))]
    if not found:
        raise NoFigure(
            "no logged step of a run on real ranks lies beside the rows (FILE.steps/RUN.jsonl)"
        )
    texts = wording([setting(row) for row, _ in found])
    texts = [
        text if texts.count(text) == 1 else f"{text} {row.get('run', i)}".strip()
        for i, (text, (row, _)) in enumerate(zip(texts, found, strict=True))
    ]
    over = "tokens" if all("tokens" in s for _, steps in found for s in steps) else "step"
    plot = column(2.4 + 0.15 * len(found))
    ax = plot.subplots()
    handles = {}
    held = False
    for i, (text, (_, steps)) in enumerate(zip(texts, found, strict=True)):
        color = COLORS[i % len(COLORS)]
        line = STYLES[i % len(STYLES)]
        train = [(s[over], s["loss"]) for s in steps if "eval_loss" not in s]
        tested = [(s[over], s["eval_loss"]) for s in steps if "eval_loss" in s]
        mark = MARKERS[i % len(MARKERS)] if tested else ""
        ax.plot(*zip(*train, strict=True), linestyle=line, color=color)
        ax.plot(
            *zip(*tested, strict=True), mark, color=color, markerfacecolor="white"
        ) if tested else None
        [handles[textwrap.fill(text or "the run", 48)]] = ax.plot(
            [], [], marker=mark, linestyle=line, color=color, markerfacecolor="white"
        )
        held |= bool(tested)
    ax.set(xlabel="tokens" if over == "tokens" else "steps", ylabel="loss (nats per token)")
    ax.xaxis.set_major_formatter(EngFormatter(sep=" "))
    legend(plot, handles, "lines: training; marks: held-out data" if held else None)
    return save(plot, folder, "loss")


def fits(rows: list[dict], folder: Path) -> list[Path]:
    """Time of a step against the recomputed share of what fits, a line for each number of ranks; dashed: planned."""
    plot = column(3.2)
    ax = plot.subplots()
    handles = {}
    for i, label in enumerate(dict.fromkeys(map(published.label, rows))):
        for line, words, x, y in (
            ("-", "", "ratio", "step_ms"),
            ("--", ", planned", "planned_ratio", "planned_ms"),
        ):
            found = [
                r for r in rows if published.label(r) == label and r.get(x) is not None and r.get(y)
            ]
            how = dict(
                linestyle=line, marker=MARKERS[i % len(MARKERS)], color=COLORS[i % len(COLORS)]
            )
            if found:
                [handles[word("ranks", label) + words]] = ax.plot(
                    [r[x] for r in found], [r[y] for r in found], **how
                )
            for r in found:
                ax.annotate(
                    r["batch"], (r[x], r[y]), (3, 3), textcoords="offset points", fontsize=6
                )
    if not handles:
        raise NoFigure("no row has a ratio that fits and a time")
    ax.set(
        xlabel="recomputed share of the blocks", ylabel="time of a step (ms)", xlim=(-0.05, 1.05)
    )
    legend(plot, handles, "numbers: sequences of a micro-batch")
    return save(plot, folder, "fit")


def lanes(spans: list[tuple[int, int]]) -> list[int]:
    """For spans (start, end), the lowest lane of each in which none before it is in its way."""
    taken = []
    found = []
    for start, end in spans:
        free = next((i for i, until in enumerate(taken) if until <= start), len(taken))
        taken[free:] = [max(end, start + 1), *taken[free + 1 :]]
        found.append(free)
    return found


def overlap(rows: list[dict], folder: Path) -> list[Path]:
    """Collectives of a step above its products, as lab/benchmarks/collectives.py counts them: the last row with plain
    Inductor options and the last with ours. A bar goes from start to wait; a cross has no product between. NoFigure
    without either row."""
    shown = {
        "plain" in row["flags"]["compile_options"]: row
        for row in rows
        if row.get("study") == "collectives"
    }
    if len(shown) < 2:
        raise NoFigure("it takes a row with plain Inductor options and one without")
    names = ("torch.compile alone", "with overlap.py")
    looks = {
        "all-gather": ("0.2", "weights gathered"),
        "reduce-scatter": ("0.6", "gradients reduced"),
        "all-reduce": ("0.8", "gradients summed"),
    }
    plot = Figure(figsize=(6.5, 4.4), layout="constrained")
    handles = {}
    for ax, row, name in zip(
        plot.subplots(2, 1, sharex=True, height_ratios=(8, 4)),
        (shown[True], shown[False]),
        names,
        strict=True,
    ):
        before = 0
        found = []
        for part, graph in row["graphs"].items():
            found += [
                (before + start, gap, kind, mib)
                for kind, start, gap, mib, _ in graph["collectives"]
            ]
            ax.text(
                before + graph["products"] / 2,
                -1,
                f"{part.split(', ')[-1]}: {graph['products']} products",
                ha="center",
                va="center",
            )
            ax.barh(
                -1,
                graph["products"] - 0.2,
                0.9,
                before,
                color="0.92",
                edgecolor="0.5",
                align="center",
            )
            before += graph["products"]
        for (start, gap, kind, mib), y in zip(
            found, lanes([(at, at + gap) for at, gap, *_ in found]), strict=True
        ):
            color, label = looks[kind]
            if gap:
                handles[label] = ax.barh(y, gap - 0.6, 0.8, start, color=color)
                ink = "white" if color < "0.5" else "black"
                size = f"{mib:.0f} MiB" if mib >= 1 else "< 1 MiB"
                text = size if gap > 4 else ""
                ax.text(
                    start + gap / 2 - 0.3, y, text, ha="center", va="center", fontsize=7, color=ink
                )
            else:
                [handles[f"{label}, no product meanwhile"]] = ax.plot(
                    start, y, "x", color=color, markersize=5
                )
        exposed = sum(not gap for _, gap, *_ in found)
        ax.set_title(
            f"{name}: {len(found)} collectives, {exposed} of them exposed", fontsize=9, loc="left"
        )
        ax.grid(False)
        ax.set(yticks=[], xlim=(-1, before + 1.5))
        ax.spines[["left", "right", "top"]].set_visible(False)
    ax.set_xlabel("matrix products of the step that have begun (order, not time)")
    plot.legend(handles.values(), handles, loc="outside lower center", ncols=2, fontsize=8)
    return save(plot, folder, "collectives", 160)
