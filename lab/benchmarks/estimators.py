"""How far off torch's own estimators (torch.distributed._tools) are, on published runs: MemTracker, FSDPMemTracker and
RuntimeEstimator watch an eager step under FSDP2, on tensors that have no memory, of 1 to 8 ranks that are not there.

    python -m lab.benchmarks.estimators --results results/estimators.jsonl

The published runs were compiled, and their wrapper was another; the estimators know eager modules alone. SDPA stands
for FlexAttention, whose eager form would hold all scores. An estimator that cannot run leaves its error in the row.
"""

import argparse
import sys
import time
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed._tools.runtime_estimator import RuntimeEstimator
from torch.testing._internal.distributed.fake_pg import FakeStore

from lab.benchmarks.plans import Run, runs
from lab.profiling import gpu_code
from trainer import config as flags
from trainer.distributed.terminal import grouped, markdown
from trainer.logging import append_jsonl
from trainer.measuring import timing
from trainer.optimizer import AdamW

SHOWN = (
    "gpus 8 8 1",
    "gpus 8 16 2",
    "gpus 8 32 4",
    "gpus 8 64 8",
    "seqlen 1024",
    "seqlen 16384",
    "depth 16",
    "width 2048",
)
ERROR = 200  # characters of an error that are kept


def estimate(name: str, step, tokens: torch.Tensor) -> float:
    """MiB at the highest level of a step, or its ms. Our AdamW is no torch.optim.Optimizer: its moments are added."""
    if name == "RuntimeEstimator":
        with RuntimeEstimator()("operator-level-cost-model") as estimator:
            step(tokens, tokens)
        return estimator.total_runtime
    tracker = FSDPMemTracker(step.model) if name == "FSDPMemTracker" else MemTracker()
    tracker.track_external(step.model, tokens)
    with tracker:
        step(tokens, tokens)
    moments = sum(t.nbytes for t in step.optimizer.m + step.optimizer.v)
    return (
        max(kinds["Total"] for kinds in tracker.get_tracker_snapshot("peak").values()) + moments
    ) / 2**20


def row(run: Run) -> dict:
    """What each estimator says of a published run, beside it; with `errors` of those that failed."""
    sizes = (
        "depth width head_dim grouping grow vocab seqlen batch remat remat_core remat_norm".split()
    )
    words = flags.command(
        dict(wrapper="fsdp2", compile="none") | {name: getattr(run.c, name) for name in sizes}
    )
    dist.init_process_group("fake", rank=0, world_size=run.ranks, store=FakeStore())
    c = flags.resolve(flags.parse(words), "cuda", run.ranks)
    began = time.process_time()
    found = timing.environment(torch.device("cpu")) | dict(
        study="estimators",
        run=run.name,
        flags=flags.setting(c),
        world=run.ranks,
        published_mib=run.mib,
        published_ms=run.ms,
        errors={},
    )
    # Fake tensors run that one for real, on zeros.
    still = mock.patch.object(AdamW, "_fused", lambda *_: None)
    with still, gpu_code.simulated(c, run.ranks, None) as (step, tokens, _):
        for name in ("RuntimeEstimator", "MemTracker", "FSDPMemTracker"):
            try:
                found[name] = round(estimate(name, step, tokens), 1)
            except Exception as error:  # what it says is the result
                found["errors"][name] = f"{type(error).__name__}: {error}"[:ERROR]
    dist.destroy_process_group()
    return found | dict(cpu_s=round(time.process_time() - began, 1))


def table(rows: list[dict]) -> str:
    """Markdown: published figures, estimates and their errors."""

    def cell(r: dict, name: str, truth: str) -> str:
        return (
            f"{grouped(r[name])} ({100 * (r[name] / r[truth] - 1):+.0f} %)"
            if name in r
            else "failed"
        )

    columns = [
        ("published run", [r["run"] for r in rows]),
        ("ranks", [str(r["world"]) for r in rows]),
        ("MiB", [grouped(r["published_mib"]) for r in rows]),
    ]
    columns += [
        (name, [cell(r, name, "published_mib") for r in rows])
        for name in ("MemTracker", "FSDPMemTracker")
    ]
    columns += [("ms", [grouped(r["published_ms"]) for r in rows])]
    return markdown(
        [
            *columns,
            ("RuntimeEstimator", [cell(r, "RuntimeEstimator", "published_ms") for r in rows]),
        ]
    )


def main(own: argparse.Namespace) -> int:
    """Appends the rows and prints their table; returns the exit code."""
    rows = []
    for run in (r for r in runs() if r.name in SHOWN):
        rows.append(row(run))
        append_jsonl(own.results, rows[-1])
    print(table(rows), *{error for r in rows for error in r["errors"].values()}, sep="\n")
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        "python -m lab.benchmarks.estimators",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--results", default="runs/estimators.jsonl", metavar="FILE")
    sys.exit(main(parser.parse_args()))
