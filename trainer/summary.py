"""What a run of main.py says of itself: the lines before its first step, and the row that it leaves."""

import math
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

from simple_fsdp import describe, units_of
from trainer import config as flags
from trainer import step_costs
from trainer.data import Batches
from trainer.distributed import simulated_world
from trainer.fault_tolerance.errors import RunView
from trainer.fault_tolerance.nonfinite import FiniteCheck
from trainer.fault_tolerance.watchdog import Watchdog
from trainer.measuring import flops, timing
from trainer.measuring.steps import StepMeasurements
from trainer.optimizer import Muon
from trainer.step import Step
from trainer.terminal.command_line import flag
from trainer.terminal.text import data_lines, fitted, grouped


class RunToSummarize(RunView, Protocol):
    """What a header and a row tell of a run (trainer.run.Run)."""

    world: int  # ranks, simulated ones too
    environment: dict[str, Any]  # of timing.environment
    attention: str  # the kernel, for people
    flops: dict[str, float]  # of one step on one rank: "causal", "palm", "hardware" if it is known
    uncounted: str  # why there are none
    step_tokens: int | None  # of one step on one rank; None if steps differ
    batches: Batches
    measured: StepMeasurements
    finite: FiniteCheck
    watchdog: Watchdog
    # eval_loss, eval_step, eval_bpb or eval_ppl, if it has been evaluated.
    evaluated: dict[str, float | int]
    extra_columns: dict[str, Any]  # more for the row


def same_on_all_ranks(config: flags.Config, data: Batches) -> dict[str, Any]:
    """What must be the same on all ranks of a run, by name. Rank 0 alone writes results and has trackers, and a
    folder of traces may be one on each host."""
    of_rank_0 = "results", "tracker", "tracker_group", "wandb_mode", "wandb_tags"
    shared = {flag(name): value for name, value in config.flat().items() if name not in of_rank_0}
    return shared | {
        "--profile": config.profile is not None,
        "torch": torch.__version__,
        "the code (a checksum)": timing.code_digest(),
        "data": (data.description, data.fingerprint),
    }


def figures(run: RunToSummarize, ms: float) -> dict[str, float]:
    """What a logged step of `ms` tells beside its loss: tokens so far, tok/s of all ranks, MFU in percent and MiB at
    the peak so far; without what is not known."""
    mfu = flops.utilisation(run.flops, ms / 1e3, step_costs.device_peak(run.environment["device"]))[
        "mfu"
    ]
    known = dict(mfu=mfu)
    if run.step_tokens is not None:
        known |= dict(
            tokens=run.batches.sample * run.config.seqlen,
            tok_s=run.world * run.step_tokens / ms * 1e3,
        )
    return {
        name: value
        for name, value in (known | run.measured.peak()).items()
        if isinstance(value, int | float)
    }


def row(run: RunToSummarize, outcome: str) -> dict:
    """The row of a run that ended with `outcome`: ms, MiB, MFU in percent, None where it is not known."""
    config = run.config
    stats = timing.stats(run.measured.timer.ms()) if outcome == "ok" else timing.stats([])
    seconds = stats["step_ms"] / 1e3 if stats["step_ms"] else None
    tok_s = (
        run.world * run.step_tokens / seconds if seconds and run.step_tokens is not None else None
    )
    compiled = (
        config.compile != "none" and run.measured.first_step_s is not None and seconds is not None
    )
    loss_kind = config.loss
    if loss_kind == "auto":  # of finetune.py, which sees the head with the weights
        loss_kind = "chunked" if run.step is None or run.step.chunk else "full"
    shown = "wrapper mode compile attn remat remat_ratio depth width seqlen batch grad_accum param_dtype reduce_dtype"
    row = (
        run.environment
        | timing.clocks(run.device)
        | dict(world=flags.world_label(config, run.world), loss_kind=loss_kind)
    )
    row |= {name: getattr(config, name) for name in shown.split()} | dict(
        attention=run.attention, flags=flags.setting(config)
    )
    row |= dict(outcome=outcome, line=os.environ.get("SWEEP_LINE"), skipped=run.finite.skipped)
    row |= dict(
        resumed_after=run.first or None,
        compile_s=round(run.measured.first_step_s - seconds, 2) if compiled else None,
    )
    row["first_step_cpu_s"] = (
        round(run.measured.first_step_cpu_s, 2)
        if run.measured.first_step_cpu_s is not None
        else None
    )
    row |= (
        dict.fromkeys(
            "eval_loss eval_bpb eval_ppl eval_examples eval_step best_eval_loss best_step".split()
        )
        | run.evaluated
    )
    row |= run.measured.peak() | dict(first_step_peak_mib=run.measured.first_step_mib) | stats
    row |= dict(tok_s=tok_s, tok_s_rank=tok_s / run.world if tok_s else None)
    if run.measured.collectives is not None:
        row["collectives"] = simulated_world.summary(run.measured.collectives)
    peak = step_costs.device_peak(row["device"])
    row |= run.extra_columns
    return (
        row
        | flops.utilisation(run.flops, seconds, peak)
        | dict(peak_flops=peak, loss=run.finite.loss)
    )


COMPILED = dict(
    none="the first step",
    blocks="compiling a block and the loss",
    model="compiling the model",
    fwdbwd="compiling forward and backward",
    step="compiling the whole step",
)

ASIDE = dict(
    save=", saving", eval=", evaluating", sample=", writing a sample", export=", exporting"
)


def progress_text(run: RunToSummarize, live: bool) -> Callable[[], str]:
    """For Progress: what a run that trains is doing, in words. live: say it of every step, not of the first alone."""
    config = run.config
    dog = run.watchdog
    began = []
    first = COMPILED[config.compile] + "; minutes the first time, seconds when cached" * (
        config.compile != "none"
    )

    def words() -> str:
        if not dog.begun:
            return first if config.steps else "evaluating"
        began[:] = began or [(time.monotonic(), dog.step)]
        start, step = began[0]
        aside = ASIDE.get(dog.place, "")
        left = (time.monotonic() - start) / max(1, dog.step - step) * (config.steps - dog.step + 1)
        time_left = f"{left / 60:.0f} min" if left > 90 else f"{left:.0f} s"
        about = f", about {time_left} left" if dog.step > step else ""
        loss = "" if run.finite.loss is None else f", loss {run.finite.loss:.4f}"
        return f"step {dog.step}/{config.steps}{loss}{about}{aside}" if live else ""

    return words


def notes(config: flags.Config) -> list[str]:
    """What resolved flags ask for and will not get, though that is no error."""
    texts = []
    if config.warmup_steps >= config.steps > 0:
        top = config.lr * config.steps / config.warmup_steps
        flag = flags.written(config, "warmup_ratio" if config.warmup_ratio else "warmup")
        texts.append(
            f"{flag} leaves none of --steps {config.steps} after warm-up: the learning rate ends at {top:.3g}"
        )
    if config.world:
        texts.append(
            "ranks are simulated, and all hold the same: times and memory count, the loss is no result"
        )
    if config.wrapper == "ddp":
        texts.append("--wrapper ddp shards nothing: --mode is replicate")
    return [f"note: {text}" for text in texts]


def muon_or_adamw_lines(step: Step) -> list[str]:
    """Of --optimizer muon, which parameters Muon updates and which AdamW; numbers in names are written as *."""
    if not isinstance(step.optimizer, Muon):
        return []
    names = {id(p): re.sub(r"\.\d+\.", ".*.", name) for name, p in step.model.named_parameters()}
    rest = step.optimizer.adamw.params
    both = step.optimizer.matrices, [p for p in rest if p.ndim > 1]
    texts = [
        f"{len(matrices)} matrices ({', '.join(dict.fromkeys(names[id(p)] for p in matrices))})"
        for matrices in both
    ]
    return [f"muon for {texts[0]}", f"adamw for {texts[1]} and {len(rest) - len(both[1])} vectors"]


def units_in_words(rows: list, units: list[str]) -> str:
    """What is gathered at once, and how many parameters lie in no unit."""
    outside = [math.prod(r.shape) for r in rows if not r.unit]
    ends = " to ".join(units[:1] + units[1:][-1:])
    elements = f"{sum(outside):,}".replace(",", "'")
    return f"units ({len(units)}): {ends}; in none: {len(outside)} of {len(rows)} parameters, {elements} elements"


def header(run: RunToSummarize, settings: Path | None = None) -> list[str]:
    """The anchors of sanity that a run prints before its first step. settings: the file that holds all flags."""
    config = run.config
    env = run.environment
    rows = describe(run.step.model)
    parameters = grouped(sum(math.prod(r.shape) for r in rows))
    whole = [r for r in rows if r.placement.startswith("Replicate")]
    usual = type(config)(
        *(type(group)() for group in (config.training, config.system, config.output))
    )
    usual = flags.filled(usual, config.device).with_batch_sizes_for(run.world)
    both = {**vars(config.training), **vars(config.system)}.items()
    different = [(name, value) for name, value in both if value != getattr(usual, name)]
    changed = [
        f"{name}={' '.join(value) if isinstance(value, tuple) else value}"
        for name, value in different
    ]
    optimizer = run.step.optimizer
    still = len(run.step.optimizer.params) - run.step.optimizer.decayed_count
    costs = [run.uncounted]
    if run.flops:
        causal, palm = (run.flops[kind] / run.step_tokens / 1e6 for kind in ("causal", "palm"))
        costs = [
            f"{causal:.3f} MFLOP per token (causal; PaLM {palm:.3f})",
            f"{run.flops['causal'] / 1e12:.4g} TFLOP per step and rank",
        ]
    device = env["device"].replace(", 1 threads", ", 1 thread")
    replicated = f"{len(whole)} of {len(rows)} parameters are replicated"
    replicated += f": under {config.min_shard_mib} MiB" * (config.min_shard_mib > 0)
    lines = [
        f"commit {env['commit'][:12]}{' (dirty)' * bool(env['dirty'])}, torch {env['torch']}",
        f"{device}, {flags.world_label(config, run.world)} rank{'s' * (run.world > 1)}",
        "  ".join(changed) or "every flag has its default",
        *([f"all flags: {settings}"] if settings is not None else []),
        f"attention: {run.attention}",
        *data_lines(run.batches.description),
        f"{parameters} parameters, {sum(r.local_bytes for r in rows) / 2**20:.1f} MiB on this rank",
        *([replicated] if whole else []),
        f"weight decay {config.weight_decay:g} for {optimizer.decayed_count} parameters, "
        f"none for the {still} with one dimension",
        *costs,
        f"ln V = {math.log(config.vocab):.4f}: the loss where every token is equally likely",
        *muon_or_adamw_lines(run.step),
        *notes(config),
    ]
    lines = fitted(lines)
    if config.verbose:
        lines += [
            f"  {r.name:<28}{r.shape!s:<16}{r.placement:<14}{r.local_shape!s:<16}{r.dtype}"
            for r in rows
        ]
        lines.append(units_in_words(rows, units_of(run.step.model)))
    return lines
