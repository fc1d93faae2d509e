"""Trains the transformer of model.py under simple_fsdp.data_parallel; appends a row of what it cost. See --help.

    python main.py                                                      # one rank, CPU or GPU
    torchrun --nproc-per-node 4 main.py --depth 8 --compile fwdbwd      # the main job

Parse, build, run, report. Exit codes: trainer/fault_tolerance/errors.py. A run that fails after it began still appends
its row.
"""

import math
import os
import signal
import sys
import time
import zlib
from contextlib import suppress

from trainer import config as flags

if __name__ == "__main__":  # before torch is imported: --help and bad flags answer at once
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C has no traceback; Signals takes over
    RANKS = flags.ranks()
    CONFIG = flags.parse(sys.argv[1:], RANKS[0], RANKS[2])

import torch

from model import flops_per_token
from trainer.attention import choose_kernel
from trainer.checkpoint import load as checkpoint
from trainer.checkpoint.manifest import check_directory
from trainer.checkpoint.save import Saver
from trainer.checkpoint.weights import initialise
from trainer.cuda_graph import Replayed
from trainer.data import Batches, check_source
from trainer.distributed import simulated_world
from trainer.distributed.control import Control, Signals, Stopped, agree, control_group
from trainer.distributed.launch import connect, set_deterministic, shutdown
from trainer.distributed.terminal import tell
from trainer.experiments.logging import Sinks, check_writable, final_lines
from trainer.experiments.summary import header, row
from trainer.fault_tolerance import inject
from trainer.fault_tolerance.errors import ended_by
from trainer.fault_tolerance.nonfinite import FiniteCheck
from trainer.fault_tolerance.watchdog import Watchdog
from trainer.parallelize import build, model_config
from trainer.profiling import events, memory, timing
from trainer.step import check_mode, global_norm

WARMUP = 3  # steps that no statistic covers, the compiling ones among them
PROFILED = 3


class Run:
    """Everything between the flags and the row."""

    def __init__(self, c: flags.Config, device: torch.device, rank: int, world: int):
        self.c, self.device, self.rank, self.world = c, device, rank, world
        self.group = None if c.world else control_group()
        self.stages = memory.Stages(device)
        self.timer = timing.StepTimer(device)
        self.environment = timing.environment(device)  # now: the checkout may change while it runs
        self.first_step_s = self.first_step_mib = None
        self.batches = Batches(
            c.data, global_batch=world * c.batch * c.grad_accum, seqlen=c.seqlen, vocab=c.vocab, seed=c.seed,
            rank=rank, world=world,
        )  # fmt: skip
        self.watch = FiniteCheck(c, self.batches, rank)
        same = {flags.flag(k): v for k, v in c.flat().items()} | dict(torch=torch.__version__)
        agree(same | dict(data=(self.batches.description, self.batches.fingerprint)), self.group)
        self.found = None if c.world else checkpoint.choose_kernel(c, self.batches, self.group)
        self.first = self.done = self.saved = self.found.about["step"] if self.found else 0  # an earlier run's steps
        self.warm = self.first + WARMUP
        self.profile = timing.Profile(c.profile, self.warm, PROFILED, rank, device)
        self.explained, self.explanation = min(self.warm, c.steps - 1) if c.explain_memory else None, []
        self.attention, model = choose_kernel(c, device).text, model_config(c, device)
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
        same = {n: ([*p.shape], str(p.dtype)) for n, p in self.model.named_parameters()}
        drawn = torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else torch.get_rng_state()
        agree(same | {"initial weights (random state)": zlib.crc32(drawn.numpy())}, self.group)
        if self.c.init is not None:
            initialise(self.c, self.model, self.found, self.group)
        if self.found:
            checkpoint.load(self.found, self.step, self.group)
            self.batches.sample = self.found.about["samples"]
        self.sample = self.batches.sample  # where the next step begins
        origin = self.found.about.get("origin") if self.found else None
        self.saver = Saver(self.c, self.step, self.batches, self.group, origin)

    def lr(self, k: int) -> float:
        """Linear warm-up, then cosine to a tenth."""
        if k < self.c.warmup:
            return self.c.lr * (k + 1) / self.c.warmup
        progress = (k - self.c.warmup) / max(1, self.c.steps - self.c.warmup)
        return self.c.lr * (0.55 + 0.45 * math.cos(math.pi * progress))

    def train(self, sinks: Sinks, signals: Signals, watchdog: Watchdog) -> None:
        """Raises Stopped, after saving, when a signal has come to any rank."""
        control = Control(signals, self.group)
        self.step.between = lambda: control.boundary(self.done, failed=self.saver.failed())
        self.saver.beat = lambda: watchdog.beat(self.done, "save")
        start = time.perf_counter()
        try:
            for k in range(self.first, self.c.steps):
                self.one_step(k, sinks, control, watchdog)
                if k == self.first:
                    self.watch.flush()  # waits for the step
                    self.first_step_s, self.first_step_mib = time.perf_counter() - start, self.stages.add("first step")
                    watchdog.limit, watchdog.begun = self.c.timeout, True
                if k == min(self.warm, self.c.steps) - 1:
                    memory.reset_peak(self.device)
                self.done, self.sample = k + 1, self.batches.sample
                if self.c.save is not None and self.c.save_every and (k + 1) % self.c.save_every == 0:
                    self.save(watchdog)
            with suppress(Stopped):  # too late to matter
                control.finish()
        except Stopped:
            self.batches.sample = self.sample  # of a step that was begun nothing is kept
            self.saver.ending = True
            self.save(watchdog)
            self.saver.wait()
            raise
        self.save(watchdog)

    def one_step(self, k: int, sinks: Sinks, control: Control, watchdog: Watchdog) -> None:
        c, logged, lr, norms = self.c, sinks.due(k + 1), self.lr(k), {}
        self.step.optimizer.lr.fill_(lr)
        if self.collectives:
            self.collectives.clear()  # the row tells those of the last step
        self.step.inspect = (lambda p, g, to=norms: self.norms(p, g, to)) if c.verbose > 1 and logged else None
        excluded = k < self.warm or self.profile.covers(k) or k == self.explained
        watchdog.beat(k + 1, "data")
        with self.timer.step(excluded), self.profile.step(k):
            if control.boundary(k, self.watch.norm, self.saver.failed()):
                self.saver.wait()  # it failed on all
            tokens, targets = (t.to(self.device, non_blocking=True) for t in next(self.batches))
            watchdog.beat(k + 1, "step")
            loss = (self.explain if k == self.explained else self.step)(tokens, targets)
        if logged:
            norm, ms = self.step.grad_norm.item(), self.timer.last()
            tok_s = self.world * self.batches_tokens() / ms * 1e3
            sinks.step(dict(step=k + 1, loss=loss.item(), lr=lr, grad_norm=norm, ms=ms, tok_s=tok_s, **norms))
        self.watch.put(k + 1, self.step, loss, wait=logged)

    def save(self, watchdog: Watchdog) -> None:
        """After `self.done` steps, unless it is done already or there is nowhere to."""
        if self.c.save is None or self.done == self.saved:
            return
        watchdog.beat(self.done, "save")
        self.watch.flush()
        self.saver.save(self.done)
        self.saved = self.done

    def explain(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The step, with what its memory consists of in `explanation` on rank 0."""
        if self.rank:
            return self.step(tokens, targets)
        loss, timeline, notes = events.watch(self.c, self.step, tokens, targets)
        self.explanation = timeline.lines(timeline, notes, self.explained + 1)
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


def main(c: flags.Config, rank: int, local_rank: int, world: int) -> int:
    device_type = ("cuda" if torch.cuda.is_available() else "cpu") if c.device == "auto" else c.device
    try:
        c = flags.resolve(c, device_type, world)
        world = c.world or world
        check_mode(c.compile, flags.compile_options(c))
        check_source(c.data)
        inject.faults(os.environ.get("FAULT"), c, world)
        check_writable(c.results)
        if c.save is not None:
            check_directory(c.save)
        limit = max(c.timeout, c.first_timeout) + 120 if c.timeout and c.first_timeout else 3e7  # after the watchdog's
        set_deterministic(c.deterministic)
        device = connect(c, rank, local_rank, world, limit)
    except ValueError as e:
        flags.fail(str(e), rank)
    hang, ranks = f"{os.path.splitext(c.results)[0]}.hang", 1 if c.world else world
    with Signals(rank == 0) as signals, Watchdog(c.first_timeout, rank, ranks, hang, signals) as watchdog:
        code = perform(c, device, rank, world, signals, watchdog)
        if code in (0, *signals.CODES):  # all ranks are here
            shutdown()
    return code


def perform(
    c: flags.Config, device: torch.device, rank: int, world: int, signals: Signals, watchdog: Watchdog
) -> int:
    """Builds, trains, reports; the exit code."""
    say, run, outcome, code = tell if rank == 0 else lambda _: None, None, "ok", 0
    try:
        run = Run(c, device, rank, world)
        if run.first >= c.steps:
            say(f"already done: {run.found.path} has the {c.steps} steps of --steps, or more")
            return 0
        settings = flags.setting(c) | dict(world=flags.world_label(c, world))
        sinks = Sinks(c.results, c.wandb, c.group, None, settings, c.tags, rank, c.steps, c.log_every)
        watchdog.on_end = lambda outcome: sinks.row(row(run, outcome))
        run.build()
        say("\n".join(header(run)))
        with inject.planted(os.environ.get("FAULT"), run, rank), run.saver:
            run.train(sinks, signals, watchdog)
    except (Exception, KeyboardInterrupt) as e:
        outcome, code = ended_by(e, run, watchdog, c.debug)
        if run is None:  # nothing has begun: as bad flags
            return code
    finally:
        signals.over = True
        if run is not None:
            run.profile.close()
    told = row(run, outcome)
    sinks.row(told)
    watchdog.on_end = lambda outcome: None
    sinks.close()
    if code:
        return code
    if c.verbose:
        say("\n".join(run.stages.lines()))
    for line in [*run.explanation, *run.profile.notes, *run.profile.paths, *final_lines(told)]:
        say(line)
    if c.cuda_graph:
        run.step.close()
    return 0


if __name__ == "__main__":
    status = main(CONFIG, *RANKS)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, when another rank has left first
    sys.exit(status)
