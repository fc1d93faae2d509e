"""A simulated peak (lab.profiling.peak) as a row of results: the goals, the baseline, the published runs.

    python -m lab.benchmarks.peaks --world 2 --remat both --loss chunked --results results/peaks.jsonl
    python -m lab.sweeps.sweep settings/peaks.txt --program "-m lab.benchmarks.peaks" --results results/peaks.jsonl

`--published`: with the policy of the runs in published/, which their peaks tell. A gathered weight is freed after
forward only where a checkpointed region gathers it again; backward writes into nothing that forward kept; a loss
outside the compiled graph (--compile model) reads bf16 logits. The compiler of then may not have reordered for the sake
of the peak: `--compile-options reorder_for_peak_memory=False`.
"""

import argparse
import os
import shlex
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from unittest import mock

from lab.profiling.command import parse_tool, tool
from trainer import config as flags

if __name__ == "__main__":  # before torch is imported, as in main.py
    _parser = tool("lab.benchmarks.peaks", __doc__)
    _parser.add_argument(
        "--arch", choices=("sm_80", "sm_90", "sm_100"), default="sm_90", help="GPU (default: sm_90)"
    )
    _parser.add_argument(
        "--published", action="store_true", help="with the policy of the published runs"
    )
    OWN, CONFIG = parse_tool(_parser)

import torch
import torch._functorch.config as functorch_config
import torch.nn.functional as F

import trainer.step
from lab.profiling import peak
from model import IGNORE
from trainer import parallelize
from trainer.logging import append_jsonl, check_writable
from trainer.measuring import timing
from trainer.measuring.timeline import Timeline, largest


@contextmanager
def published() -> Iterator[None]:
    """Inside it steps are built as the published runs were, see above."""
    wrap = parallelize.wrap

    def wrapped(model, config, mesh):
        wrap(model, config, mesh)
        regions = {"attn", "mlp"} if config.remat in ("both", "block") else {config.remat}
        for name, m in model.named_modules():
            if hasattr(m, "_gather_policy") and not regions & set(name.split(".")):
                # Its dtypes, and whether it reshards after forward.
                m._gather_policy = m._gather_policy._replace(reshard_after_forward=False)

    def loss(logits, targets):
        return F.cross_entropy(
            logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORE, reduction="sum"
        )

    with (
        mock.patch.object(parallelize, "wrap", wrapped),
        mock.patch.object(trainer.step, "cross_entropy", loss),
        functorch_config.patch(donated_buffer=False),
    ):
        yield


def row(
    arguments: argparse.Namespace, config: flags.Config, timeline: Timeline, meter: peak.Meter
) -> dict:
    """simulated_mib: the peak, allowances included; phases_mib, buffers [[how many, MiB, what]] and kernels without."""
    top, *_ = timeline.peaks(1)
    levels = timeline.levels()
    ends = [*timeline.starts[1:], len(levels)]
    phases = zip(timeline.marks, timeline.starts, ends, strict=True)
    allowance = peak.CUBLAS_MIB[arguments.arch]
    kernels = Counter()
    for code in meter.codes.values():
        kernels[code.name] += len(code.kernels)
    result = timing.environment(torch.device("cpu")) | dict(
        device=f"simulated {arguments.arch}",
        world=arguments.world,
        study="peak",
        line=os.environ.get("SWEEP_LINE"),
        flags=flags.setting(config),
        published=arguments.published,
        outcome="ok",
        simulated_mib=round(top.nbytes / 2**20 + allowance, 1),
        allowance_mib=allowance,
        moment=top.moment,
        tflop=round(sum(work["flops"] for work in meter.work.values()) / 1e12, 4),
        phases_mib={
            name: round(max(levels[a:b], default=0) / 2**20, 1) for (_, name), a, b in phases
        },
        buffers=[[n, round(size / 2**20, 1), text] for n, size, text in largest(timeline)],
    )
    return result | dict(kernels=dict(kernels), command=shlex.join(sys.argv[1:]))


def main(arguments: argparse.Namespace, config: flags.Config) -> int:
    """Prints the report and appends the row to --results; returns the exit code. Bad flags: SystemExit(2)."""
    if config.device == "cpu":
        flags.fail("--device cpu: a simulated peak is of a GPU's code; use lab.profiling.peak", 0)
    try:
        check_writable(config.results)
    except ValueError as e:
        flags.fail(str(e), 0)
    with published() if arguments.published else nullcontext():
        config, timeline, meter = peak.run(argparse.Namespace(**vars(arguments), kernels=0), config)
    append_jsonl(config.results, row(arguments, config, timeline, meter))
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # | head
    sys.exit(main(OWN, CONFIG))
