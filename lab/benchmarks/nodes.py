"""Which --mode is fastest on this network: its links and a step of each mode, measured, beside predictions of them.

    ./launch.sh nodes [--network WORDS] [--modes MODE...] [--mb SIZE...] [FLAGS of main.py]     # on each node, as `run`
    python -m lab.benchmarks.nodes --results FILE --plot FILE.png         # draws the rows of a file, measures nothing

1. The links: all-gather, reduce-scatter and all-reduce among the ranks of a node (`inside`), among those of the same
   number on all nodes (`across`), whose groups all talk at once, as in hybrid_shard, and among all ranks (`all`). To
   each link latency and bandwidth are fitted (lab/studies/collectives.py), as --link measured:FILE takes them.
2. A step of each mode that fits the ranks. The modes take turns, step by step; all models are in memory at once.
3. The same steps on simulated ranks: without links, which is the computation, then with the links of 1. Every rank
   simulates a world of its own, and all begin each step together: they share processors as the real ranks do.

`predicted` is the computation plus the links' time by formula, as if nothing hid any of it, `simulated` the simulated
step. All are medians: a step's collectives are many, and so they take their usual time together, never each its least.
"""

import argparse
import gc
import itertools
import multiprocessing
import os
import re
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from lab.sweeps.processes import follow_parent
from trainer import config as flags
from trainer.distributed.environment import ranks
from trainer.logging import append_jsonl, check_writable, read_jsonl
from trainer.terminal.output import Parser, fail, tell
from trainer.terminal.text import grouped, markdown

if __name__ == "__main__":  # before torch is imported, as in main.py
    RANKS = ranks()
    _parser = Parser(
        "nodes",
        allow_abbrev=False,
        description=__doc__,
        epilog="Others: main.py's.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _parser.add_argument("--network", default="", metavar="WORDS", help="what it is, for the rows")
    _parser.add_argument(
        "--modes",
        nargs="+",
        metavar="MODE",
        help="such as fully_shard hybrid_shard:4, which has 4 "
        "replicas (default: all, with every number of replicas)",
    )
    _parser.add_argument(
        "--mb", nargs="+", type=float, help="sizes for the links, 1e6 bytes of the whole tensor"
    )
    _parser.add_argument(
        "--repeat", type=int, default=10, help="repetitions of each collective (default: 10)"
    )
    _parser.add_argument("--plot", metavar="FILE", help="draw the last rows of --results")
    _parser.add_argument("--check", action="store_true", help="look at the flags and do nothing")
    _parser.error = lambda message: fail(message.removeprefix("argument "), RANKS[0])
    OWN, _others = _parser.parse_known_args()
    CONFIG = flags.parse(_others, RANKS[0])
    _one = re.compile("replicate|fully_shard|hybrid_shard:[1-9][0-9]*")
    if _bad := [each for each in OWN.modes or () if not _one.fullmatch(each)]:
        fail(
            f"--modes {_bad[0]}: must be replicate, fully_shard or hybrid_shard:REPLICAS", RANKS[0]
        )
    if OWN.repeat < 1 or not min(OWN.mb or [1]) > 0:
        fail(f"--repeat {OWN.repeat} --mb {OWN.mb}: must be above 0", RANKS[0])
    if OWN.check:
        sys.exit()

import torch
import torch.distributed as dist

from lab.benchmarks.wrappers import data, interleave, try_plot
from lab.report.tables import LAYOUTS
from lab.studies.collectives import LIBRARY, fitted, times
from trainer.collective_time import Link
from trainer.data import DataError
from trainer.distributed import simulated_world
from trainer.distributed.control import Desync, agree, control_group
from trainer.distributed.launch import connect, set_deterministic, shutdown
from trainer.measuring import timing
from trainer.parallelize import build


def kind(group: list[int], local: int) -> str:
    """Of a group of ranks, `local` of which are on a node: inside one, across (one on each), or all (a mixture)."""
    nodes = {rank // local for rank in group}
    return "inside" if len(nodes) == 1 else "across" if len(nodes) == len(group) else "all"


def settings_of(
    modes: list[str] | None, config: flags.Config, device: torch.device, world: int
) -> dict[str, flags.Config]:
    """The settings by name. ValueError: one does not fit the ranks."""
    fits = [f"hybrid_shard:{n}" for n in range(2, world) if world % n == 0]
    by_name = {}
    for name in modes or ["replicate", "fully_shard", *fits]:
        mode, _, n = name.partition(":")
        replicas = int(n) if n else flags.System.replicas
        one = replace(config, system=replace(config.system, mode=mode, replicas=replicas))
        by_name[name] = flags.resolve(one, device.type, world)
    return by_name


def links(
    arguments: argparse.Namespace, device: torch.device, rank: int, world: int, local: int
) -> dict[str, dict]:
    """The row, without environment, of each link. Collective."""
    mesh = dist.init_device_mesh(
        device.type, (world // local, local), mesh_dim_names=("across", "inside")
    )
    groups = [mesh.get_group("inside"), mesh.get_group("across"), dist.group.WORLD]
    groups = {
        kind(dist.get_process_group_ranks(group), local): group
        for group in groups
        if group.size() > 1
    }
    mb = arguments.mb or ([0.01, 0.1, 1.0] if device.type == "cpu" else [0.1, 1.0, 10.0, 100.0])
    measured = {}
    for name, group in groups.items():
        setting = dict(
            link=name,
            network=arguments.network,
            ranks=group.size(),
            nodes=world // local,
            mb=mb,
            dtype="fp32",
            backend=dist.get_backend(group),
            pieces=1,
        )
        # The others of this group: nobody waits for those of another.
        everyone = [None] * group.size()
        dist.all_gather_object(
            everyone, times(rank, device, setting, arguments.repeat, LIBRARY, group), group
        )
        measured[name] = dict(study="nodes", setting=setting, outcome="ok") | fitted(
            setting, everyone, arguments.repeat
        )
    return measured


def meeting(world: int) -> Callable[[], None]:
    """What waits until all ranks have called it; it needs no process group."""
    store, *_ = next(dist.rendezvous("env://", timeout=timedelta(hours=1)))
    count = itertools.count()

    def meet() -> None:
        key = f"nodes {os.environ.get('TORCHELASTIC_RESTART_COUNT')} {next(count)}"
        if store.add(key, 1) == world:
            store.set(f"{key} met", "")
        store.wait([f"{key} met"])

    return meet


def simulate(
    settings: dict[str, flags.Config],
    links_found: dict[str, dict],
    device,
    rank: int,
    world: int,
    local: int,
):
    """Figures of each setting on simulated ranks, in a process of its own: torch's caches hold groups that ended."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # Without a bandwidth that was seen: latency alone.
    link = {name: row["link"] for name, row in links_found.items()}
    link = {
        name: Link(1e-6 * fit["alpha_us"], 1e9 * (fit["gb_per_s"] or 1e9))
        for name, fit in link.items()
    }
    simulated_world.start(world, none := Link(0.0, float("inf")), device, rank)
    first_config = next(iter(settings.values()))
    meet = meeting(world)
    steps = [build(one, device, world) for one in settings.values()]
    rows = [{} for _ in steps]
    batch = [t.to(device) for t in next(data(first_config, rank, world))]
    for what, network in (("compute", none), ("simulated", lambda ranks: link[kind(ranks, local)])):
        simulated_world.use(network)
        timed = [(step, timing.StepTimer(device)) for step in steps]
        # Rank 1 prints no loss.
        interleave(
            timed, data(first_config, rank, world), first_config.steps, device, rank=1, begin=meet
        )
        for row, (step, timer) in zip(rows, timed, strict=True):
            simulated_world.log().clear()
            step(*batch)
            calls = [*simulated_world.log()]
            row |= timing.stats(timer.ms(), what) | dict(
                collectives=simulated_world.summary(calls),
                link_ms=round(1e3 * sum(call.seconds for call in calls), 3),
            )
    simulated_world.stop()
    return rows


def measure(
    arguments: argparse.Namespace, config: flags.Config, device: torch.device, rank: int, world: int
) -> list[dict]:
    """The rows of links and modes. Ends the process group. ValueError, DataError or Desync: it cannot begin."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    same = dict(config.flat() | vars(arguments), ranks_of_a_node=local, torch=torch.__version__)
    agree(
        {
            name: value
            for name, value in same.items()
            if name not in ("results", "tracker_group", "wandb_tags")
        },
        control_group(),
    )
    settings = settings_of(arguments.modes, config, device, world)
    about = timing.environment(device)
    measured_links = links(arguments, device, rank, world, local)
    config = next(iter(settings.values()))
    rows = [about | row for row in measured_links.values()]
    real = [(build(one, device, world), timing.StepTimer(device)) for one in settings.values()]
    interleave(real, data(config, rank, world), config.steps, device, rank)
    real = [timer.ms() for _, timer in real]
    shutdown()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), follow_parent) as process:
        simulated = process.submit(
            simulate, settings, measured_links, device, rank, world, local
        ).result()
    for name, ms, more in zip(settings, real, simulated, strict=True):
        row = about | dict(
            study="nodes",
            line=name,
            network=arguments.network,
            nodes=world // local,
            world=world,
            outcome="ok",
            flags=flags.setting(settings[name]),
            interleaved=[*settings],
            ratio=round(statistics.median(a / b for a, b in zip(ms, real[0], strict=True)), 4),
        )
        rows.append(row | more | timing.stats(ms))
    return rows


def summary_lines(rows: list[dict]) -> str:
    """The fitted links, a line for each, the table of the modes, and which mode is fastest."""
    best, *others = sorted((row for row in rows if "line" in row), key=lambda row: row["step_ms"])
    links = [
        f"{row['setting']['network']} {row['setting']['link']}, {row['setting']['ranks']} ranks: latency "
        f"{grouped(row['link']['alpha_us'])} us, bandwidth of a rank {grouped(row['link']['gb_per_s'], 4, 'no')} GB/s, "
        f"residual {grouped(100 * row['link']['residual'])} %".strip()
        for row in rows
        if "setting" in row
    ]
    than = ""
    for row in others:
        than += f"; {row['line']} takes {row['step_ms'] / best['step_ms']:.2f} times that"
        than += ", which cannot be told apart" * (row["step_ms_min"] <= best["step_ms"])
    return "\n\n".join(
        [
            "\n".join(links),
            markdown(LAYOUTS["nodes"](rows)[1]),
            f"{best['line']} is fastest on this network: {best['step_ms']:.1f} ms a step{than}",
        ]
    )


def draw(rows: list[dict], path: str) -> None:
    """Bars for each mode and network: measured, predicted, simulated. ValueError without rows."""
    rows = LAYOUTS["nodes"](rows)[0]
    if not rows:
        raise ValueError("--results: no row of this benchmark in it; measure first, without --plot")
    try_plot(path)
    from matplotlib.figure import Figure

    networks = list(dict.fromkeys(row["network"] for row in rows))
    plot = Figure(figsize=(7, 0.8 + 1.3 * len(networks)), layout="constrained")
    axes = plot.subplots(len(networks), squeeze=False)[:, 0]
    looks = dict(measured=("0.25", ""), predicted=("0.7", ""), simulated=("white", "////"))
    for ax, network in zip(axes, networks, strict=True):
        of_network = [row for row in rows if row["network"] == network]
        for at, (label, (color, hatch)) in enumerate(looks.items()):
            ms = dict(
                measured=[row["step_ms"] for row in of_network],
                simulated=[row["simulated_ms"] for row in of_network],
                predicted=[row["compute_ms"] + row["link_ms"] for row in of_network],
            )[label]
            places = [number + 0.27 * (at - 1) for number in range(len(of_network))]
            ax.barh(
                places,
                ms,
                0.25,
                color=color,
                hatch=hatch,
                edgecolor="black",
                linewidth=0.4,
                label=label,
            )
        ax.set(
            yticks=range(len(of_network)),
            yticklabels=[row["line"] for row in of_network],
            title=network or "the network",
        )
    axes[-1].set_xlabel("ms of a step")
    plot.legend(
        *axes[0].get_legend_handles_labels(), loc="outside upper right", ncols=3, fontsize=8
    )
    plot.savefig(path, dpi=160)


def main(
    arguments: argparse.Namespace, config: flags.Config, rank: int, local_rank: int, world: int
) -> int:
    """Measures, or draws. Exit codes: 0, 2 flags or ranks that do not fit, 3 bad data, 7 ranks that differ."""
    try:
        if arguments.plot:
            if rank == 0:
                draw(read_jsonl(Path(config.results)), arguments.plot)
            return 0
        check_writable(config.results)
        if config.world or world < 2:
            alone = "one rank has nobody to talk to; NPROC=2 ./launch.sh nodes"
            both = "real ranks are compared with simulated ones; leave it out"
            raise ValueError(f"--world {config.world or 1}: {both if config.world else alone}")
        set_deterministic(config.deterministic)
        rows = measure(
            arguments, config, connect(config, rank, local_rank, world, config.timeout), rank, world
        )
    except (ValueError, DataError, Desync) as e:
        fail(str(e), rank, 3 if isinstance(e, DataError) else 7 if isinstance(e, Desync) else 2)
    for row in rows if rank == 0 else ():
        append_jsonl(config.results, row)
    tell(summary_lines(rows)) if rank == 0 else None
    return 0


if __name__ == "__main__":
    sys.exit(main(OWN, CONFIG, *RANKS))
