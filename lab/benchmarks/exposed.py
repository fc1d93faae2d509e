"""How much of the links' time a step hides behind its computation, on simulated ranks whose links are as slow as asked.

    python -m lab.benchmarks.exposed simple:fwdbwd fsdp2:blocks --results results/exposed.jsonl -- --depth 4 --width 256
    python -m lab.benchmarks.exposed --results results/exposed_ahead.jsonl --plot docs/exposed.png   # measures nothing

Links are given the bandwidth at which the step's collectives take 1/2, 1, 2 and 4 times as long as its computation, by
a few turns before those that count. All settings take turns, step by step. `ratio` is the step over the longer of both
times; 1 would be all that can be hidden, hidden. `ends_ms` is what no order of whole buckets can hide: the first
gathers, before there is anything to compute with (embedding and first block), and the last reductions, after there is
nothing left to compute. `lanes` holds the fastest of four more steps with links that take as long as the computation.
On a CPU: FSDP2 overlaps by CUDA's streams, so that its ratio here says nothing of a GPU.
"""

import argparse
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

from trainer import config as flags
from trainer.logging import append_jsonl, check_writable, read_jsonl
from trainer.terminal.output import Parser, fail, put
from trainer.terminal.text import grouped, markdown

if __name__ == "__main__":  # before torch is imported, as in main.py
    _cut = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    _parser = Parser(
        "python -m lab.benchmarks.exposed",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _parser.add_argument("settings", nargs="*", metavar="WRAPPER:COMPILE")
    _parser.add_argument("--results", default="runs/exposed.jsonl", metavar="FILE")
    _parser.add_argument(
        "--plot", metavar="FILE", help="draw `lanes` of the last row of each setting in --results"
    )
    OWN = _parser.parse_args(sys.argv[1:_cut])
    CONFIG = flags.parse(sys.argv[_cut + 1 :])

import torch
from torch.profiler import ProfilerActivity, profile

from lab.benchmarks.wrappers import WARMUP, check_settings, data, try_plot
from trainer.collective_time import Link, sent_bytes
from trainer.distributed import simulated_world
from trainer.distributed.launch import connect, shutdown
from trainer.measuring import timing
from trainer.parallelize import build

FACTORS = (0.5, 1.0, 2.0, 4.0)  # time of the links over time of the computation
# Turns that tell how long the computation takes beside slow links, and steps to draw one of; not
# counted.
TRIALS = 4
LOOKS = dict(
    all_gather=(1, "0.35", ""),
    reduce_scatter=(1, "0.7", ""),
    computation=(0, "white", "////"),
    waiting=(0, "0.9", ""),
)  # of a bar: its lane, colour, hatch
Lane = tuple[str, float, float]  # one of LOOKS, or another collective; begin and end in ms


def timed(step, batch: list[torch.Tensor]) -> float:
    """Milliseconds of a step."""
    began = time.perf_counter()
    step(*batch).item()
    return 1e3 * (time.perf_counter() - began)


def lanes(step, batch: list[torch.Tensor]) -> list[Lane]:
    """The computation; when, in one step, the link carries each collective, and when the computation waits for one."""
    simulated_world.log().clear()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        took = timed(step, batch)
    events = sorted(profiler.events(), key=lambda event: event.time_range.start)
    calls = iter(simulated_world.log())
    spans = [("computation", 0.0, took)]
    free = 0.0
    for event in events:
        start = (event.time_range.start - events[0].time_range.start) / 1e3
        if event.name.startswith("sim::"):
            call = next(calls)
            start = max(start, free)
            free = start + 1e3 * call.seconds
            spans.append((call.op, start, free))
            spans += [("waiting", start, free)] * (not call.async_op)
        elif event.name.endswith("::wait_tensor"):
            spans.append(("waiting", start, start + event.time_range.elapsed_us() / 1e3))
    return [(what, round(a, 2), round(b, 2)) for what, a, b in spans if b - a > 0.05]


def ends(calls: list, seconds: list[float]) -> float:
    """Seconds of the first two gathers and the last two reductions: those of the embedding and of the first block."""
    gathers = [s for call, s in zip(calls, seconds, strict=True) if call.op == "all_gather"]
    reductions = [s for call, s in zip(calls, seconds, strict=True) if call.op == "reduce_scatter"]
    return sum(gathers[:2] + reductions[-2:])


def measure(settings: list[str], config: flags.Config) -> list[dict]:
    """The rows: of each setting one per factor. Raises ValueError for flags that do not fit."""
    configs = [
        replace(
            config,
            system=replace(
                config.system, **dict(zip(("wrapper", "compile"), setting.split(":"), strict=True))
            ),
        )
        for setting in settings
    ]
    kind = "cuda" if config.device != "cpu" and torch.cuda.is_available() else "cpu"
    configs = [flags.resolve(one, kind, 1) for one in configs]
    config = configs[0]
    device = connect(config, 0, 0, 1)
    batch = [t.to(device) for t in next(data(config, 0, config.world))]
    runs = []
    ms = {}
    links = {}
    none = simulated_world.link("none")
    for setting, one in zip(settings, configs, strict=True):
        step = build(one, device, config.world)
        simulated_world.use(none)
        for _ in range(WARMUP):
            timed(step, batch)
        simulated_world.log().clear()
        ms[setting, 0.0] = [timed(step, batch)]
        runs.append((setting, one, step, list(simulated_world.log())))
    for turn in range(-TRIALS, config.steps):
        # How fast links are: by a step, then by trials.
        for setting, _, _, calls in runs if turn in (-TRIALS, 0) else ():
            sent = sum(sent_bytes(call.op, call.nbytes, call.ranks) for call in calls)
            compute = statistics.median(ms.pop((setting, 0.0)))
            links |= {
                (setting, f): Link(0.0, 1e3 * sent / (f * compute)) if f else none
                for f in (0.0, *FACTORS)
            }
            ms |= {(setting, f): [] for f in (0.0, *FACTORS)}
        for setting, _, step, _ in runs:
            for factor in (0.0, *FACTORS):
                simulated_world.use(links[setting, factor])
                ms[setting, factor].append(timed(step, batch))
    rows = []
    for setting, one, step, calls in runs:
        compute = statistics.median(ms[setting, 0.0])
        for factor in FACTORS:
            seconds = [
                links[setting, factor].seconds(call.op, call.nbytes, call.ranks) for call in calls
            ]
            longer = max(compute, 1e3 * sum(seconds))
            row = timing.environment(device) | dict(
                study="exposed", line=setting, flags=flags.setting(one), factor=factor
            )
            row |= timing.stats(ms[setting, factor]) | dict(
                world=flags.world_label(one, config.world),
                depth=one.depth,
                compute_ms=round(compute, 3),
                link_ms=round(1e3 * sum(seconds), 3),
                interleaved=settings,
            )
            row |= dict(
                ratio=round(row["step_ms"] / longer, 4),
                ends_ms=round(1e3 * ends(calls, seconds), 3),
            )
            # On a GPU the profiler's CPU events do not tell when a kernel waits.
            if factor == 1 and kind == "cpu":
                simulated_world.use(links[setting, factor])
                row["lanes"] = min(
                    (lanes(step, batch) for _ in range(TRIALS)), key=lambda spans: spans[0][2]
                )
            rows.append(row)
    return rows


def label(row: dict) -> str:
    """The setting, with the flags that change its schedule."""
    ahead = row["flags"]["ahead"]
    keeps_last = row["flags"]["keep_last"]
    return row["line"] + " --keep-last" * keeps_last + f" --ahead {ahead:g}" * (ahead != 1)


def table(rows: list[dict]) -> str:
    """Markdown: a line per row. `all but the ends` is (step - ends) over the longer of computation and links."""
    longer = [max(row["compute_ms"], row["link_ms"]) for row in rows]
    rest = [
        (row["step_ms"] - row["ends_ms"]) / most for row, most in zip(rows, longer, strict=True)
    ]
    columns = [
        ("", [*map(label, rows)]),
        ("depth", [str(row["depth"]) for row in rows]),
        ("links / computation", [f"{row['factor']:g}" for row in rows]),
    ]
    columns += [
        (name, [grouped(row[key], 1) for row in rows])
        for name, key in (
            ("computation ms", "compute_ms"),
            ("links ms", "link_ms"),
            ("step ms", "step_ms"),
        )
    ]
    columns.append(("ratio", [f"{row['ratio']:.3f}" for row in rows]))
    columns.append(("ends ms", [grouped(row["ends_ms"], 1) for row in rows]))
    return markdown([*columns, ("ratio without the ends", [f"{value:.3f}" for value in rest])])


def draw(rows: list[dict], path: str) -> None:
    """The `lanes` of the last row of each label and depth that has them: the link above, the computation below.
    ValueError without any."""
    shown = {(label(row), row["depth"]): row for row in rows if "lanes" in row}
    if not shown:
        raise ValueError("--results: no row of this benchmark in it; measure first, without --plot")
    try_plot(path)
    from matplotlib.figure import Figure

    plot = Figure(figsize=(7, 0.9 + 0.8 * len(shown)), layout="constrained")
    axes = plot.subplots(len(shown), sharex=True, squeeze=False)[:, 0]
    for ax, ((name, depth), row) in zip(axes, shown.items(), strict=True):
        for what, begin, end in row["lanes"]:
            if what in LOOKS:
                lane, color, hatch = LOOKS[what]
                ax.barh(
                    lane,
                    end - begin,
                    left=begin,
                    color=color,
                    hatch=hatch,
                    edgecolor="black",
                    linewidth=0.4,
                )
        ax.set_yticks([0, 1], ["computation", "link"])
        ax.set_title(
            f"{name}, depth {depth}: {row['ratio']:.2f} times the longer of both",
            fontsize=9,
            loc="left",
        )
    axes[-1].set_xlabel("ms of one step; links take as long as the computation")
    bars = [
        axes[0].barh(
            0, 0, color=color, hatch=hatch, edgecolor="black", label=what.replace("_", "-")
        )
        for what, (_, color, hatch) in LOOKS.items()
    ]
    plot.legend(handles=bars, loc="outside upper right", ncols=4, fontsize=8)
    plot.savefig(path, dpi=160)


def main(arguments: argparse.Namespace, config: flags.Config) -> int:
    """Measures and prints, or draws. Exit codes: 0, 2 settings or flags that do not fit."""
    try:
        if arguments.plot:
            draw(
                [
                    row
                    for row in read_jsonl(Path(arguments.results))
                    if row.get("study") == "exposed"
                ],
                arguments.plot,
            )
            return 0
        check_writable(arguments.results)
        check_settings(arguments.settings, 0)
        rows = measure(
            arguments.settings,
            replace(config, system=replace(config.system, world=config.world or 8)),
        )
    except ValueError as e:
        fail(str(e), 0)
    for row in rows:
        append_jsonl(arguments.results, row)
    put(table(rows))
    shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main(OWN, CONFIG))
