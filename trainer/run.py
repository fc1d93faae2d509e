"""Everything between the flags and the row: a run that is built, trained, saved, and tells what it cost.

    code = execute(Run, config, rank, local_rank, world)         # all of a program but its command line:
    run = Run(config, device, rank, world, signals, watchdog)    # agrees with the other ranks, finds what to resume
    run.build()                                                  # the model and its step
    run.train(sinks)                                             # raises what ends it early: Stopped, NonFinite, ..

What a run says of itself is made by experiments/summary.py, how it ends by fault_tolerance/errors.py.
"""

import math
import os
import sys
import time
import warnings
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
from trainer.checks import check, never_run
from trainer.data import Batches, DataError
from trainer.distributed import simulated_world
from trainer.distributed.compile_once import compile_once
from trainer.distributed.control import Control, Signals, Stopped, agree, control_group
from trainer.distributed.launch import connect, set_deterministic, shutdown
from trainer.distributed.terminal import Progress, fail, tell
from trainer.evaluation import evaluate, sample
from trainer.fault_tolerance import inject
from trainer.fault_tolerance.errors import ended_by
from trainer.fault_tolerance.nonfinite import FiniteCheck
from trainer.fault_tolerance.watchdog import Watchdog
from trainer.logging import Sinks, final_lines
from trainer.measuring import flops, memory, timeline, timing
from trainer.optimizer import local
from trainer.parallelize import build, compile_options, reference_model
from trainer.step import LanguageModel, Replayed, check_mode, global_norm, shard_group
from trainer.summary import doing, figures, header, row

WARMUP = 3  # steps that no statistic covers, the compiling ones among them
PROFILED = 3


class Run:
    """One run of resolved flags on one rank. ValueError, DataError, CheckpointError or Desync: it cannot begin."""

    def __init__(self, c: flags.Config, device: torch.device, rank: int, world: int, signals: Signals,
                 watchdog: Watchdog):  # fmt: skip
        self.device, self.rank, self.world, self.watchdog = device, rank, world, watchdog
        self.group = None if c.world else control_group()
        self.control = Control(signals, self.group)
        self.stages = memory.Stages(device)
        self.timer = timing.StepTimer(device)
        self.environment = timing.environment(device)  # now: the checkout may change while it runs
        self.first_step_s = self.first_step_cpu_s = self.first_step_mib = None  # until it is done
        self.step_tokens = c.batch * c.grad_accum * c.seqlen  # of one step on one rank
        self.c, self.batches, self.blank = self.open(c)
        c = self.c
        self.finite = FiniteCheck(c, self.batches, rank)
        # Rank 0 alone writes results and tells W&B, and a folder of traces may be one on each host.
        same = {flags.flag(k): v for k, v in c.flat().items() if k not in ("results", "wandb", "group", "tags")}
        same |= {"--profile": c.profile is not None, "torch": torch.__version__}
        same |= {"the code (a checksum)": timing.code_digest()}
        agree(same | dict(data=(self.batches.description, self.batches.fingerprint)), self.group)
        self.found = None if c.world else checkpoint.find_start(c, self.batches, self.group, self.blank.identity)
        self.state = self.found.state if self.found else checkpoint.TrainState()
        self.first = self.saved = self.state.step  # steps of earlier runs
        self.warm = self.first + WARMUP
        self.profile = timing.Profile(c.profile, self.warm, PROFILED, rank, device)
        self.explained, self.explanation = min(self.warm, c.steps - 1) if c.explain_memory else None, []
        self.flops, self.uncounted = self.count_flops()
        self.collectives = simulated_world.log() if c.world else None
        self.evaluated, self.sampled, self.peak, self.told = {}, [], {}, {}
        self.step = self.replayed = None  # until `build`

    check = staticmethod(check)  # what is wrong with resolved flags and what they name

    def open(self, c: flags.Config) -> tuple[flags.Config, Batches, LanguageModel]:
        """Flags that lack nothing, the data, and the model on the meta device."""
        self.attention = choose_kernel(c, self.device)[-1]
        data = Batches(c.data, global_batch=c.effective_batch, seqlen=c.seqlen, vocab=c.vocab,
                       seed=c.seed, rank=self.rank, world=self.world, hold_out=c.eval_every > 0)  # fmt: skip
        return c, data, reference_model(c, self.device)

    def fill(self) -> None:
        """Gives a model that is built its first values, if they are not drawn."""
        if self.c.init is not None:
            initialise(self.c, self.step.model, self.found, self.group)

    def count_flops(self) -> tuple[dict[str, float], str]:
        """FLOPs of one step on one rank by convention, or none and why: "palm", "causal" and, where its formula holds,
        "hardware": not for the math kernel, nor where eager does a lean MLP in a recomputed block once more."""
        c, model = self.c, getattr(self.blank, "config", None)
        try:
            counted = flops.count(self.blank, c.seqlen)
        except ValueError as error:
            return {}, f"FLOPs are not counted, MFU is n/a: {error}"
        found = dict(causal=counted.causal, palm=counted.palm)
        odd = model is None or model.sdpa == "math" or (c.mlp, c.remat, c.compile) == ("lean", "block", "none")
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
        self.fill()
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
        """Between two micro-batches: raises Stopped on all ranks if a signal has come to any, DataError if one cannot
        read on."""
        self.control.boundary(self.state.step, failed=self.saver.failed(), problem=self.batches.error)

    def after_done(self) -> None:
        """What is left to do where a checkpoint has all steps of --steps."""

    def train(self, sinks: Sinks) -> None:
        """Raises, after saving, Stopped when a signal has come to any rank, DataError when one cannot read on."""
        start, cpu = time.perf_counter(), timing.cpu_seconds()
        try:
            for k in range(self.first, self.c.steps):
                self.one_step(k, sinks)
                if k == self.first:
                    self.finite.flush()  # waits for the step
                    self.first_step_s, self.first_step_mib = time.perf_counter() - start, self.stages.add("first step")
                    self.first_step_cpu_s = timing.cpu_seconds() - cpu
                    self.watchdog.limit, self.watchdog.begun = self.c.timeout, True
                if k == self.warm - 1 and k + 1 < self.c.steps:  # in a short run the peak is that of all steps
                    memory.reset_peak(self.device)
                    self.peak = {}
                self.state.step, self.state.samples = k + 1, self.batches.sample
                if self.c.eval_every and ((k + 1) % self.c.eval_every == 0 or k + 1 == self.c.steps):
                    self.evaluate(sinks)
                if self.c.save is not None and self.c.save_every and (k + 1) % self.c.save_every == 0:
                    self.save()
            with suppress(Stopped, DataError):  # too late to matter
                self.control.finish()
        except (Stopped, DataError):
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
            problem = self.batches.problem() if k + 1 < self.c.steps else self.batches.error
            if self.control.boundary(k, self.finite.norm, self.saver.failed(), problem):
                self.saver.wait()  # it failed on all
            tokens, targets, *more = next(self.batches)
            tokens, targets = (t.to(self.device, non_blocking=True) for t in (tokens, targets))
            inputs = {name: t.to(self.device, non_blocking=True) for each in more for name, t in each.items()}
            self.watchdog.beat(k + 1, "step")
            run = partial(self.explain, sinks.steps) if k == self.explained else self.replayed or self.step
            compiles = k == self.first != self.explained and self.c.compile != "none"
            with compile_once(self.device, self.group) if compiles else nullcontext():
                loss = run(tokens, targets, **inputs)
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
        state, self.evaluated = self.state, found | dict(eval_step=self.state.step)
        better = math.isfinite(loss := found["eval_loss"]) and loss < (math.inf if state.best is None else state.best)
        if better:
            state.best, state.best_step = loss, state.step
        self.evaluated |= dict(best_eval_loss=state.best, best_step=state.best_step)
        sinks.step(dict(step=self.state.step, tokens=self.state.samples * self.c.seqlen, loss=self.finite.loss) | found)
        if better and self.c.keep_best:
            self.save()

    @contextmanager
    def aside(self, place: str) -> Iterator[Callable[[], None]]:
        """What runs inside is no part of a step: not of the peak of memory, nor of the collectives that a row tells. It
        calls what this yields at every pause, where a signal ends it with Stopped on all ranks."""
        def between() -> None:
            self.watchdog.beat(self.state.step, place)
            self.between()

        self.peak, listed = memory.highest(self.peak, memory.peak(self.device)), [*(self.collectives or ())]
        yield between
        with suppress(Stopped, DataError):  # the next boundary tells it again
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

    def explain(self, file: Path | None, tokens: torch.Tensor, targets: torch.Tensor, **inputs) -> torch.Tensor:
        """The step, with what its memory consists of in `explanation` on rank 0, and as a figure beside `file`."""
        if self.rank:
            return self.step(tokens, targets, **inputs)
        loss, found, notes = timeline.watch(self.c, self.step, tokens, targets, **inputs)
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


def warn(c: flags.Config, rank: int) -> None:
    """On rank 0, in a line each: a torch that was never run, and one that lacks what --compile regions needs."""
    lines = [never_run(torch.__version__)]
    if c.compile == "regions" and torch.__version__ < (2, 13):
        warnings.filterwarnings("ignore", "regions: need torch 2.13")  # the same by regions.py, on each rank
        why = f"--compile regions needs torch 2.13, this is {torch.__version__}"
        lines.append(f"warning: {why}: each block is compiled, as by --compile fwdbwd")
    for line in filter(None, lines if rank == 0 else []):
        tell(line, sys.stderr)


def execute(kind: type[Run], c: flags.Config, rank: int, local_rank: int, world: int,
            progress: Progress | None = None) -> int:  # fmt: skip
    """One run of the `kind` that the flags describe; returns its exit code. What cannot work ends in one line and
    SystemExit(2), before any process group. progress: on rank 0, says what is being done."""
    progress = progress or Progress(speak=False)
    device_type = ("cuda" if torch.cuda.is_available() else "cpu") if c.device == "auto" else c.device
    try:
        c = flags.resolve(c, device_type, world)
        world = c.world or world
        warn(c, rank)
        check_mode(c.compile, compile_options(c))
        inject.faults(os.environ.get("FAULT"), c, world)
        kind.check(c, world)
        limit = max(c.timeout, c.first_timeout) + 120 if c.timeout and c.first_timeout else 3e7  # after the watchdog's
        set_deterministic(c.deterministic)
        progress.stage("waiting for the other ranks" if world > 1 and not c.world else "starting")
        device = connect(c, rank, local_rank, world, limit)
    except ValueError as e:
        fail(str(e), rank)
    hang, ranks = f"{os.path.splitext(c.results)[0]}.hang", 1 if c.world else world
    with Signals(rank == 0) as signals, Watchdog(c.first_timeout, rank, ranks, hang, signals) as watchdog:
        code = perform(kind, c, device, rank, world, signals, watchdog, progress)
        if code in (0, *signals.CODES):  # all ranks are here
            shutdown()
    return code


def perform(kind: type[Run], c: flags.Config, device: torch.device, rank: int, world: int, signals: Signals,
            watchdog: Watchdog, progress: Progress) -> int:  # fmt: skip
    """Builds, trains, reports; the exit code."""
    say, run, sinks, outcome, code = tell if rank == 0 else lambda _: None, None, None, "ok", 0
    try:
        progress.stage("reading the data")
        run = kind(c, device, rank, world, signals, watchdog)
        c = run.c
        if run.first >= c.steps:
            say(f"already done: {run.found.path} has the {c.steps} steps of --steps, or more")
            run.after_done()
            return 0
        settings = flags.setting(c) | dict(world=flags.world_label(c, world))
        sinks = Sinks(c.results, c.wandb, c.group, None, settings, c.tags, rank, c.steps, c.log_every,
                      resume=run.state.wandb)  # fmt: skip
        before, run.state.run, run.state.wandb = run.state.run, sinks.run, sinks.wandb_id  # in each checkpoint from now
        watchdog.on_end = lambda outcome: sinks.row(row(run, outcome))
        progress.stage("building the model")
        run.build()
        say("\n".join(header(run, sinks.write_settings(settings, before, run.first))))
        progress.stage(doing(run, progress.live is not None))
        with inject.planted(os.environ.get("FAULT"), c, run.step, run.batches, run.first), run.saver:
            run.train(sinks)
    except (Exception, KeyboardInterrupt) as e:
        outcome, code = ended_by(e, run, watchdog, c.debug)
        if sinks is None:  # nothing has begun: as bad flags
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
    say("\n".join([*run.explanation, *run.profile.notes, *run.profile.paths, *run.sampled, *final_lines(told, WARMUP)]))
    if run.replayed is not None:
        run.replayed.close()
    return 0
