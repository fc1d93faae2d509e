"""The collectives of a training step (lab.profiling.collectives) as a row of results. No GPU is needed or used.

    python -m lab.benchmarks.collectives --device cuda --world 8 --results results/collectives.jsonl
    python -m lab.benchmarks.collectives --device cuda --world 8 --compile-options plain --results FILE
    python -m lab.report collectives --results results/collectives.jsonl --plots docs

A row holds, of each graph, its number of products and [kind, products before its start, products between start and
wait, MiB of the whole tensor, MiB that a rank sends] of each collective but those of single numbers. They are counted
in the graphs that Inductor schedules. That is an order, no time.
"""

import argparse
import shlex
import signal
import sys

from lab.profiling.command import parse_tool, tool
from trainer import config as flags

if __name__ == "__main__":  # before torch is imported, as in main.py
    OWN, CONFIG = parse_tool(tool("lab.benchmarks.collectives", __doc__))

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from lab.profiling import collectives
from overlap import is_product
from trainer.logging import append_jsonl, check_writable
from trainer.measuring import timing
from trainer.terminal.output import put

MIB = 2**20
SCALARS = 64  # bytes; below are the loss and the norm


def graph_row(gm: torch.fx.GraphModule) -> dict:
    """The products and collectives of one graph, in order."""
    calls = [call for call in collectives.collectives(gm) if call.full > SCALARS]
    rows = [
        [call.kind, call.start, call.gap, round(call.full / MIB, 4), round(call.sent / MIB, 4)]
        for call in calls
    ]
    alive = round(collectives.gathered_alive(gm) / MIB, 1)
    return dict(products=sum(map(is_product, gm.graph.nodes)), gathered_mib=alive, collectives=rows)


def main(arguments: argparse.Namespace, config: flags.Config) -> int:
    """Prints the report and appends the row to --results; returns the exit code. Bad flags: SystemExit(2)."""
    device = (
        config.device if config.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    )
    dist.init_process_group("fake", rank=0, world_size=arguments.world, store=FakeStore())
    try:
        check_writable(config.results)
        config = flags.resolve(config, device, arguments.world)
        if config.compile == "none":
            raise ValueError("--compile none: there is no graph; use another mode")
        model, graphs = collectives.of_trainer(config, arguments.world)
    except ValueError as e:
        flags.fail(str(e), 0)
    put("\n".join(collectives.report(model, graphs, config.grad_accum)))
    made = {
        f"{name}, {part}": graph_row(gm)
        for name, pair in graphs.items()
        for part, gm in pair.items()
    }
    row = timing.environment(torch.device("cpu")) | dict(
        device="no device, graphs",
        world=arguments.world,
        study="collectives",
        flags=flags.setting(config),
        outcome="ok",
        graphs=made,
    )
    append_jsonl(config.results, row | dict(command=shlex.join(sys.argv[1:])))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # | head
    sys.exit(main(OWN, CONFIG))
