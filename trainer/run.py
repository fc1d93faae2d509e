"""Everything between the flags and the row: a run that is built, trained, saved, and tells what it cost.

    run = Run(config, device, rank, world, signals, watchdog)    # agrees with the other ranks, finds what to resume
    run.build()                                                  # the model and its step
    run.train(sinks)                                             # raises what ends it early: Stopped, NonFinite, ..

What a run says of itself is made by experiments/summary.py, how it ends by fault_tolerance/errors.py.
"""

import math
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path

import torch

from trainer import config as flags
from trainer import costs
from trainer.attention import choose_kernel
from trainer.checkpoint import load as checkpoint
from trainer.checkpoint.save import Saver
from trainer.checkpoint.weights import initialise
from trainer.data import Batches
from trainer.distributed import simulated_world
from trainer.distributed.compile_once import compile_once
from trainer.distributed.control import Control, Signals, Stopped, agree, control_group
from trainer.experiments.evaluation import evaluate, sample
from trainer.experiments.logging import Sinks
from trainer.experiments.summary import figures
from trainer.fault_tolerance.nonfinite import FiniteCheck
from trainer.fault_tolerance.watchdog import Watchdog
from trainer.optimizer import local
from trainer.parallelize import build, reference_model
from trainer.profiling import flops, memory, timeline, timing
from trainer.step import Replayed, global_norm, shard_group

WARMUP = 3  # steps that no statistic covers, the compiling ones among them
PROFILED = 3


class Run:
    """One run of resolved flags on one rank. ValueError, DataError, CheckpointError or Desync: it cannot begin."""

    def __init__(self, c: flags.Config, device: torch.device, rank: int, world: int, signals: Signals,
                 watchdog: Watchdog):  # fmt: skip
        self.c, self.device, self.rank, self.world, self.watchdog = c, device, rank, world, watchdog
        self.group = None if c.world else control_group()
        self.control = Control(signals, self.group)
        self.stages = memory.Stages(device)
        self.timer = timing.StepTimer(device)
        self.environment = timing.environment(device)  # now: the checkout may change while it runs
        self.first_step_s = self.first_step_cpu_s = self.first_step_mib = None  # until it is done
        self.step_tokens = c.batch * c.grad_accum * c.seqlen  # of one step on one rank
        self.batches = Batches(c.data, global_batch=world * c.batch * c.grad_accum, seqlen=c.seqlen, vocab=c.vocab,
                               seed=c.seed, rank=rank, world=world, hold_out=c.eval_every > 0)  # fmt: skip
        self.finite = FiniteCheck(c, self.batches, rank)
        # Rank 0 alone writes results and tells W&B, and a folder of traces may be one on each host.
        same = {flags.flag(k): v for k, v in c.flat().items() if k not in ("results", "wandb", "group", "tags")}
        same |= {"--profile": c.profile is not None, "torch": torch.__version__}
        agree(same | dict(data=(self.batches.description, self.batches.fingerprint)), self.group)
        self.blank = reference_model(c, device)
        self.found = None if c.world else checkpoint.find_start(c, self.batches, self.group, self.blank.identity)
        self.state = self.found.state if self.found else checkpoint.TrainState()
        self.first = self.saved = self.state.step  # steps of earlier runs
        self.warm = self.first + WARMUP
        self.profile = timing.Profile(c.profile, self.warm, PROFILED, rank, device)
        self.explained, self.explanation = min(self.warm, c.steps - 1) if c.explain_memory else None, []
        self.attention = choose_kernel(c, device)[-1]
        self.flops, self.uncounted = self.count_flops()
        self.collectives = simulated_world.log() if c.world else None
        self.evaluated, self.sampled, self.peak = {}, [], {}
        self.step = self.replayed = None  # until `build`

    def count_flops(self) -> tuple[dict[str, float], str]:
        """FLOPs of one step on one rank by convention, or none and why: "palm", "causal" and, where its formula holds,
        "hardware": not for the math kernel, nor where eager does a lean MLP in a recomputed block once more."""
        c, model = self.c, self.blank.config
        try:
            counted = flops.count(self.blank, c.seqlen)
        except ValueError as error:
            return {}, f"FLOPs are not counted, MFU is n/a: {error}"
        found = dict(causal=counted.causal, palm=counted.palm)
        odd = model.sdpa == "math" or (c.mlp, c.remat, c.compile) == ("lean", "block", "none")
        if not odd and counted.causal == costs.flops_per_token(model, c.seqlen):
            found["hardware"] = costs.flops_per_token(model, c.seqlen, "hardware")
        return {kind: each * self.step_tokens for kind, each in found.items()}, ""

    def build(self) -> None:
        """The model, whose values are drawn, loaded or resumed, its step and what saves it."""
        c = self.c
        self.step = build(c, self.device, self.world, self.stages.add, model=self.blank, between=self.between,
                          inspect=self.norms if c.verbose > 1 else None)  # fmt: skip
        self.replayed = Replayed(self.step) if c.cuda_graph else None
        same = {n: ([*p.shape], str(p.dtype)) for n, p in self.step.model.named_parameters()}
        drawn = torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else torch.get_rng_state()
        agree(same | {"initial weights (random state)": zlib.crc32(drawn.numpy())}, self.group)
        if c.profile:
            self.profile.names = timing.Names(self.step)
        if c.init is not None:
            initialise(c, self.step.model, self.found, self.group)
        if self.found:
            checkpoint.load(self.found, self.step, self.group)
        self.batches.sample = self.state.samples
        beat = lambda: self.watchdog.beat(self.state.step, "save")  # noqa: E731
        self.saver = Saver(c, self.step, self.batches, self.group, self.state, beat)

    def lr(self, k: int) -> float:
        """The learning rate of step k, from 0 on: linear warm-up, then --schedule."""
        c = self.c
        if k < c.warmup:
            return c.lr * (k + 1) / c.warmup
        if c.schedule == "constant":
            return c.lr
        if c.schedule == "wsd":
            return c.lr * min(1, 0.1 + 0.9 * (c.steps - k) / max(1, c.steps / 5))
        progress = (k - c.warmup) / max(1, c.steps - c.warmup)
        return c.lr * (0.55 + 0.45 * math.cos(math.pi * progress))

    def between(self) -> None:
        """Between two micro-batches: raises Stopped on all ranks if a signal has come to any."""
        self.control.boundary(self.state.step, failed=self.saver.failed())

    def train(self, sinks: Sinks) -> None:
        """Raises Stopped, after saving, when a signal has come to any rank."""
        start, cpu = time.perf_counter(), timing.cpu_seconds()
        try:
            for k in range(self.first, self.c.steps):
                self.one_step(k, sinks)
                if k == self.first:
                    self.finite.flush()  # waits for the step
                    self.first_step_s, self.first_step_mib = time.perf_counter() - start, self.stages.add("first step")
                    self.first_step_cpu_s = timing.cpu_seconds() - cpu
                    self.watchdog.limit, self.watchdog.begun = self.c.timeout, True
                if k == min(self.warm, self.c.steps) - 1:
                    memory.reset_peak(self.device)
                    self.peak = {}
                self.state.step, self.state.samples = k + 1, self.batches.sample
                if self.c.eval_every and ((k + 1) % self.c.eval_every == 0 or k + 1 == self.c.steps):
                    self.evaluate(sinks)
                if self.c.save is not None and self.c.save_every and (k + 1) % self.c.save_every == 0:
                    self.save()
            with suppress(Stopped):  # too late to matter
                self.control.finish()
        except Stopped:
            self.batches.sample = self.state.samples  # of a step that was begun nothing is kept
            self.saver.ending = True
            self.save()
            self.saver.wait()
            raise
        self.save()
        if self.c.sample:
            with self.aside("sample") as between:
                self.sampled = sample(self.c, self.step, self.batches, self.device, between)

    def one_step(self, k: int, sinks: Sinks) -> None:
        """Step k, from 0 on, and its line if it is logged."""
        self.logged, self.logged_norms, lr = sinks.due(k + 1), {}, self.lr(k)
        self.step.optimizer.lr.fill_(lr)
        if self.collectives:
            self.collectives.clear()  # the row tells those of the last step
        excluded = k < self.warm or self.profile.covers(k) or k == self.explained
        self.watchdog.beat(k + 1, "data")
        with self.timer.step(excluded), self.profile.step(k):
            if self.control.boundary(k, self.finite.norm, self.saver.failed()):
                self.saver.wait()  # it failed on all
            tokens, targets = (t.to(self.device, non_blocking=True) for t in next(self.batches))
            self.watchdog.beat(k + 1, "step")
            run = partial(self.explain, sinks.steps) if k == self.explained else self.replayed or self.step
            compiles = k == self.first != self.explained and self.c.compile != "none"
            with compile_once(self.device, self.group) if compiles else nullcontext():
                loss = run(tokens, targets)
        if self.logged:
            norm, ms = self.step.grad_norm.item(), self.timer.last()
            told = dict(step=k + 1, loss=loss.item(), lr=lr, grad_norm=norm, ms=ms)
            sinks.step(told | figures(self, ms) | self.logged_norms)
        self.finite.put(k + 1, self.step, loss, wait=self.logged)

    def evaluate(self, sinks: Sinks) -> None:
        """The loss on held-out data after the step that is done, and its line beside the training loss."""
        self.finite.flush()
        with self.aside("eval") as between:
            found = evaluate(self.c, self.step, self.batches, self.device, between)
        self.evaluated = found | dict(eval_step=self.state.step)
        if math.isfinite(found["eval_loss"]):
            best = self.state.best
            self.state.best = found["eval_loss"] if best is None else min(best, found["eval_loss"])
        sinks.step(dict(step=self.state.step, tokens=self.state.samples * self.c.seqlen, loss=self.finite.loss) | found)

    @contextmanager
    def aside(self, place: str) -> Iterator[Callable[[], None]]:
        """What runs inside is no part of a step: not of the peak of memory, nor of the collectives that a row tells. It
        calls what this yields at every pause, where a signal ends it with Stopped on all ranks."""
        def between() -> None:
            self.watchdog.beat(self.state.step, place)
            self.between()

        self.peak, listed = memory.highest(self.peak, memory.peak(self.device)), [*(self.collectives or ())]
        yield between
        with suppress(Stopped):  # the next boundary tells it again
            self.control.finish()
        memory.reset_peak(self.device)
        if self.collectives is not None:
            self.collectives.clear()
            self.collectives.extend(listed)

    def save(self) -> None:
        if self.c.save is None or self.state.step == self.saved:
            return
        self.watchdog.beat(self.state.step, "save")
        self.finite.flush()
        self.saver.save(self.state.step)
        self.saved = self.state.step

    def explain(self, file: Path | None, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The step, with what its memory consists of in `explanation` on rank 0, and as a figure beside `file`."""
        if self.rank:
            return self.step(tokens, targets)
        loss, found, notes = timeline.watch(self.c, self.step, tokens, targets)
        self.explanation = timeline.lines(found, notes, self.explained + 1)
        self.explanation += timeline.drawn(found, str(file.with_suffix(".memory"))) if file else []
        return loss

    def norms(self, params: list, grads: list) -> None:
        """-vv: the norms of every parameter and its gradient, for the line of a logged step."""
        if not self.logged:
            return
        names = {id(p): name for name, p in self.step.model.named_parameters()}
        for p, g in zip(params, grads, strict=True):
            self.logged_norms["norm/" + names[id(p)]] = global_norm([shard_group(p)], [local(p.detach())]).item()
            self.logged_norms["grad/" + names[id(p)]] = global_norm([shard_group(p)], [g]).item()
