"""What a run of main.py says of itself: the lines before its first step, and the row that it leaves."""

import math
import os
from collections import deque
from typing import Any, Protocol

from overlap import describe_blocks
from simple_fsdp import describe
from trainer import config as flags
from trainer import costs
from trainer.data import Batches
from trainer.distributed import simulated_world
from trainer.distributed.terminal import grouped
from trainer.fault_tolerance.errors import RunView
from trainer.fault_tolerance.nonfinite import FiniteCheck
from trainer.profiling import flops, memory, timing
from trainer.step import Replayed


class ToldRun(RunView, Protocol):
    """What a header and a row tell of a run (trainer.run.Run)."""

    world: int  # ranks, simulated ones too
    environment: dict[str, Any]  # of timing.environment
    attention: str  # the kernel, for people
    flops: dict[str, float]  # of one step on one rank: "causal", "palm", "hardware" if it is known
    uncounted: str  # why there are none
    step_tokens: int  # of one step on one rank
    batches: Batches
    replayed: Replayed | None  # with --cuda-graph
    timer: timing.StepTimer
    finite: FiniteCheck
    collectives: deque | None  # of the last step, on simulated ranks
    first_step_s: float | None
    first_step_mib: float | None


def row(run: ToldRun, outcome: str) -> dict:
    """The row of a run that ended with `outcome`: ms, MiB, MFU in percent, None where it is not known."""
    c = run.c
    stats = timing.stats(run.timer.ms()) if outcome == "ok" else timing.stats([])
    seconds = stats["step_ms"] / 1e3 if stats["step_ms"] else None
    tok_s = run.world * run.step_tokens / seconds if seconds else None
    compiled = c.compile != "none" and run.first_step_s is not None and seconds is not None
    shown = "wrapper mode compile attn remat remat_ratio depth width seqlen batch grad_accum param_dtype reduce_dtype"
    row = run.environment | timing.clocks(run.device) | dict(world=flags.world_label(c, run.world), loss_kind=c.loss)
    row |= {name: getattr(c, name) for name in shown.split()} | dict(attention=run.attention, flags=flags.setting(c))
    row |= dict(outcome=outcome, cell=os.environ.get("SWEEP_CELL"), skipped=run.finite.skipped)
    row |= dict(resumed_after=run.first or None, compile_s=round(run.first_step_s - seconds, 2) if compiled else None)
    row |= memory.peak(run.device) | dict(first_step_peak_mib=run.first_step_mib) | stats
    if run.replayed is not None and run.replayed.peak_mib:  # since it was captured nothing was allocated
        row["peak_alloc_mib"] = max(run.replayed.peak_mib, row["peak_alloc_mib"])
    row |= dict(tok_s=tok_s, tok_s_rank=tok_s / run.world if tok_s else None)
    if run.collectives is not None:
        row["collectives"] = simulated_world.summary(run.collectives)
    peak = costs.device_peak(row["device"])
    return row | flops.utilisation(run.flops, seconds, peak) | dict(peak_flops=peak, loss=run.finite.loss)


def header(run: ToldRun) -> list[str]:
    """The anchors of sanity that a run prints before its first step."""
    c, env = run.c, run.environment
    rows = describe(run.step.model)
    parameters = grouped(sum(math.prod(r.shape) for r in rows))
    whole = [r for r in rows if r.placement.startswith("Replicate")]
    counted = run.uncounted
    if run.flops:
        causal, palm = (run.flops[kind] / run.step_tokens / 1e6 for kind in ("causal", "palm"))
        counted = f"{causal:.3f} MFLOP per token (causal; PaLM {palm:.3f}), "
        counted += f"{run.flops['causal'] / 1e12:.4g} TFLOP per step and rank"
    lines = [
        f"commit {env['commit'][:12]}{' (dirty)' * bool(env['dirty'])}, torch {env['torch']}, {env['device']}, "
        f"{flags.world_label(c, run.world)} rank{'s' * (run.world > 1)}",
        "  ".join(f"{k}={v}" for k, v in {**vars(c.training), **vars(c.system)}.items()),
        f"attention: {run.attention}",
        f"data {run.batches.description}",
        f"{parameters} parameters, {sum(r.local_bytes for r in rows) / 2**20:.1f} MiB on this rank; "
        f"{len(whole)} of {len(rows)} replicated" + f": under {c.min_shard_mib} MiB" * (c.min_shard_mib > 0),
        counted,
        f"ln V = {math.log(c.vocab):.4f}",
    ]
    if c.verbose:
        lines += [f"  {r.name:<28}{r.shape!s:<16}{r.placement:<14}{r.local_shape!s:<16}{r.dtype}" for r in rows]
        lines.append(describe_blocks(run.step.model))
    return lines
