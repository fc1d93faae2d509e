"""Trains the transformer of model.py under simple_fsdp.data_parallel; appends a row of what it cost. See --help.

    python main.py                                                      # one rank, CPU or GPU
    torchrun --nproc-per-node 4 main.py --depth 8 --compile fwdbwd      # the main job

Parse, build, run, report. Exit codes: 0 done, 2 bad flags or environment, 3 bad data, 4 a checkpoint that cannot be
used or written, 5 non-finite training, 6 out of memory, 1 anything else. A run that fails after it began still appends
its row, with the outcome.
"""

import math
import os
import sys
import time

from trainer import config as flags

if __name__ == "__main__":  # before torch is imported: --help and bad flags answer at once
    RANKS = flags.ranks()
    CONFIG = flags.parse(sys.argv[1:], RANKS[0])

import torch

from model import flops_per_token
from simple_fsdp import describe
from trainer import checkpoint, measure, memory, memory_events, simulated_world
from trainer.baselines import build, connect, model_config
from trainer.cuda_graph import Replayed
from trainer.data import Batches, DataError, check_source
from trainer.kernels import choose
from trainer.manifest import CheckpointError, check_directory
from trainer.nonfinite import NonFinite, Watch
from trainer.sinks import Sinks, check_writable, final_lines
from trainer.step import check_mode, global_norm, shutdown

WARMUP = 3  # steps that no statistic covers, the compiling ones among them
PROFILED = 3


class Run:
    """Everything between the flags and the row."""

    def __init__(self, c: flags.Config, device: torch.device, rank: int, world: int):
        self.c, self.device, self.rank, self.world = c, device, rank, world
        self.stages = measure.Stages(device)
        self.timer = measure.StepTimer(device)
        self.environment = measure.environment(device)  # now: the checkout may change while it runs
        self.first_step_s = self.first_step_mib = None
        self.batches = Batches(
            c.data, global_batch=world * c.batch * c.grad_accum, seqlen=c.seqlen, vocab=c.vocab, seed=c.seed,
            rank=rank, world=world,
        )  # fmt: skip
        self.watch = Watch(c, self.batches, rank)
        self.found = None if c.world else checkpoint.choose(c, self.batches)
        self.first = self.found.about["step"] if self.found else 0  # steps that an earlier run did
        self.warm = self.first + WARMUP
        self.profile = measure.Profile(c.profile, self.warm, PROFILED, rank, device)
        self.explained, self.explanation = min(self.warm, c.steps - 1) if c.explain_memory else None, []
        self.attention, model = choose(c, device).text, model_config(c, device)
        # flops_per_token does not know what the math kernel multiplies, nor that eager does a lean MLP in a block again
        unknown = model.sdpa == "math" or (c.mlp, c.remat, c.compile) == ("lean", "block", "none")
        self.flops = {
            kind: flops_per_token(model, c.seqlen, kind) * c.batch * c.grad_accum * c.seqlen
            for kind in ("causal", "palm", "hardware")[: 2 if unknown else 3]
        }
        self.collectives = simulated_world.log() if c.world else None

    def build(self) -> None:
        step = build(self.c, self.device, self.world, self.stages.add)
        self.step = Replayed(step) if self.c.cuda_graph else step
        self.model = self.step.bare_model
        if self.found:
            checkpoint.load(self.found, self.step)
            self.batches.sample = self.found.about["samples"]

    def lr(self, k: int) -> float:
        """Linear warm-up, then cosine to a tenth."""
        if k < self.c.warmup:
            return self.c.lr * (k + 1) / self.c.warmup
        progress = (k - self.c.warmup) / max(1, self.c.steps - self.c.warmup)
        return self.c.lr * (0.55 + 0.45 * math.cos(math.pi * progress))

    def train(self, sinks: Sinks) -> None:
        c, start = self.c, time.perf_counter()
        for k in range(self.first, c.steps):
            logged = sinks.due(k + 1)
            saved = c.save is not None and (k + 1 == c.steps or (c.save_every and (k + 1) % c.save_every == 0))
            lr, norms = self.lr(k), {}
            self.step.optimizer.lr.fill_(lr)
            if self.collectives:
                self.collectives.clear()  # the row tells those of the last step
            self.step.inspect = (lambda p, g, to=norms: self.norms(p, g, to)) if c.verbose > 1 and logged else None
            excluded = k < self.warm or self.profile.covers(k) or k == self.explained
            with self.timer.step(excluded), self.profile.step(k):
                tokens, targets = (t.to(self.device, non_blocking=True) for t in next(self.batches))
                loss = (self.explain if k == self.explained else self.step)(tokens, targets)
            if k == self.first:
                loss.item()  # waits for the step
                self.first_step_s, self.first_step_mib = time.perf_counter() - start, self.stages.add("first step")
            if k == min(self.warm, c.steps) - 1:
                measure.reset_peak(self.device)
            if logged:
                norm, ms = self.step.grad_norm.item(), self.timer.last()
                tok_s = self.world * self.batches_tokens() / ms * 1e3
                sinks.step(dict(step=k + 1, loss=loss.item(), lr=lr, grad_norm=norm, ms=ms, tok_s=tok_s, **norms))
            self.watch.put(k + 1, self.step, loss, wait=logged or saved)
            if saved:
                checkpoint.save(c, k + 1, self.step, self.batches)

    def explain(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The step, with what its memory consists of in `explanation` on rank 0."""
        if self.rank:
            return self.step(tokens, targets)
        loss, timeline, notes = memory_events.watch(self.c, self.step, tokens, targets)
        self.explanation = memory.lines(timeline, notes, self.explained + 1)
        return loss

    def batches_tokens(self) -> int:
        """Tokens of one step on one rank."""
        return self.c.batch * self.c.grad_accum * self.c.seqlen

    def norms(self, params: list, grads: list, to: dict) -> None:
        names = {id(p): name for name, p in self.model.named_parameters()}
        for p, g in zip(params, grads, strict=True):
            local = p.detach().to_local() if hasattr(p, "to_local") else p.detach()
            to["norm/" + names[id(p)]] = global_norm([p], [local]).item()
            to["grad/" + names[id(p)]] = global_norm([p], [g]).item()

    def row(self, outcome: str) -> dict:
        c = self.c
        stats = measure.stats(self.timer.ms()) if outcome == "ok" else measure.stats([])
        seconds = stats["step_ms"] / 1e3 if stats["step_ms"] else None
        tok_s = self.world * self.batches_tokens() / seconds if seconds else None
        compiled = c.compile != "none" and self.first_step_s is not None and seconds is not None
        row = self.environment | measure.clocks(self.device) | dict(loss_kind=c.loss, attention=self.attention)
        row["world"] = flags.world_label(c, self.world)
        row |= {k: getattr(c, k) for k in "wrapper mode compile attn remat remat_ratio depth width seqlen".split()}
        row |= {k: getattr(c, k) for k in "batch grad_accum param_dtype reduce_dtype".split()}
        row |= dict(flags=flags.changed(c), outcome=outcome, cell=os.environ.get("SWEEP_CELL"))
        row |= dict(resumed_after=self.first or None, skipped=self.watch.skipped)
        row |= measure.peak(self.device) | dict(first_step_peak_mib=self.first_step_mib) | stats
        if captured := getattr(getattr(self, "step", None), "peak_mib", None):  # since then nothing was allocated
            row["peak_alloc_mib"] = max(captured, row["peak_alloc_mib"])
        row |= dict(compile_s=round(self.first_step_s - seconds, 2) if compiled else None)
        row |= dict(tok_s=tok_s, tok_s_rank=tok_s / self.world if tok_s else None)
        if self.collectives is not None:
            row["collectives"] = simulated_world.summary(self.collectives)
        peak = measure.device_peak(row["device"])
        return row | measure.utilisation(self.flops, seconds, peak) | dict(peak_flops=peak, loss=self.watch.loss)

    def header(self) -> list[str]:
        """The anchors of sanity that the run prints before its first step."""
        c, env = self.c, self.environment
        rows = describe(self.model)
        grouped = f"{sum(math.prod(r.shape) for r in rows):,}".replace(",", "'")
        whole = [r for r in rows if r.placement.startswith("Replicate")]
        per_token = {k: v / self.batches_tokens() for k, v in self.flops.items()}
        lines = [
            f"commit {env['commit'][:12]}{' (dirty)' * bool(env['dirty'])}, torch {env['torch']}, {env['device']}, "
            f"{flags.world_label(c, self.world)} rank{'s' * (self.world > 1)}",
            "  ".join(f"{k}={v}" for k, v in {**vars(c.training), **vars(c.system)}.items()),
            f"attention: {self.attention}",
            f"data {self.batches.description}",
            f"{grouped} parameters, {sum(r.local_bytes for r in rows) / 2**20:.1f} MiB on this rank; "
            f"{len(whole)} of {len(rows)} replicated" + f": under {c.min_shard_mib} MiB" * (c.min_shard_mib > 0),
            f"{per_token['causal'] / 1e6:.3f} MFLOP per token (causal; PaLM {per_token['palm'] / 1e6:.3f}), "
            f"{self.flops['causal'] / 1e12:.4g} TFLOP per step and rank",
            f"ln V = {math.log(c.vocab):.4f}",
        ]
        if c.verbose:
            lines += [f"  {r.name:<28}{r.shape!s:<16}{r.placement:<14}{r.local_shape!s:<16}{r.dtype}" for r in rows]
        return lines


def main(c: flags.Config, rank: int, local_rank: int, world: int) -> int:
    device_type = ("cuda" if torch.cuda.is_available() else "cpu") if c.device == "auto" else c.device
    try:
        c = flags.resolve(c, device_type, world)
        world = c.world or world
        check_mode(c.compile, flags.compile_options(c))
        check_source(c.data)
        check_writable(c.results)
        if c.save is not None:
            check_directory(c.save)
        device = connect(c, rank, local_rank, world)
        run = Run(c, device, rank, world)
    except ValueError as e:
        flags.fail(str(e), rank)
    except (DataError, CheckpointError) as e:
        flags.fail(str(e), rank, code=3 if isinstance(e, DataError) else 4)
    say = print if rank == 0 else lambda *_, **__: None
    if run.first >= c.steps:
        say(f"already done: {run.found.path} has the {c.steps} steps of --steps, or more")
        shutdown()
        return 0
    outcome, code, settings = "ok", 0, c.flat() | dict(world=flags.world_label(c, world))
    sinks = Sinks(c.results, c.wandb, c.group, None, settings, c.tags, rank, c.steps, c.log_every)
    try:
        run.build()
        say("\n".join(run.header()), flush=True)
        run.train(sinks)
    except (Exception, KeyboardInterrupt) as e:
        if c.debug:
            raise
        outcome, code, more = failure(e, getattr(run, "step", None))
        if rank == 0 or code not in (4, 5):  # these are the same on all ranks
            print(f"error: rank {rank}: {outcome}{more}", file=sys.stderr, flush=True)
    finally:
        run.profile.close()
    row = run.row(outcome)
    sinks.row(row)
    sinks.close()
    if code:
        return code
    if c.verbose:
        say("\n".join(run.stages.lines()))
    for line in [*run.explanation, *run.profile.notes, *run.profile.paths, *final_lines(row)]:
        say(line)
    if c.cuda_graph:
        run.step.close()
    shutdown()
    return 0


def failure(error: BaseException, step) -> tuple[str, int, str]:
    """(outcome of the row, exit code, what the message adds) of what ended the run."""
    text = " ".join(str(error).split())[:500]
    if measure.out_of_memory(error):
        advice = "lower --batch, recompute (--remat block), --loss chunked, or start more ranks"
        return f"OOM {getattr(step, 'phase', 'init')}", 6, f": {text}; {advice}"
    for kind, code in ((DataError, 3), (CheckpointError, 4), (NonFinite, 5)):
        if isinstance(error, kind):
            return f"failed: {error}", code, ""
    return f"failed: {type(error).__name__}: {text}", 1, ""


if __name__ == "__main__":
    sys.exit(main(CONFIG, *RANKS))
