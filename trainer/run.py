"""What surrounds the loop of main.py and of finetune.py: signals, hanging ranks, checkpoints, what is logged, the row.

    with Run(c, check, rank, local_rank, world) as run:     # flags get their values, the ranks meet
        run.open(data, model, attention, counted=model)     # finds the newest checkpoint; run.first steps are done
        run.take(step)                                      # loads it into the step's model, prepares to save
        with run.training(step) as train_step:              # an end saves first; then --sample writes
            for k in range(run.first, run.c.steps):
                with run.timed(k):
                    loss = train_step(*run.batch())
                run.log(k, loss, lr)                        # step k is done: what is saved and timed counts by it
    return run.code                                         # the exit code; an error has become a line and a row

What a run says of itself is made by trainer/summary.py, how it ends by trainer/fault_tolerance/errors.py.
"""

import math
import os
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial

import torch
from torch import Tensor

from trainer import config as flags
from trainer import costs
from trainer.checkpoint import load as checkpoint
from trainer.checkpoint.save import Saver
from trainer.checks import never_run
from trainer.data import Batches, DataError
from trainer.distributed import simulated_world
from trainer.distributed.command_line import flag
from trainer.distributed.control import Control, Signals, Stopped, agree, control_group
from trainer.distributed.launch import connect, set_deterministic, shutdown
from trainer.distributed.terminal import Progress, fail, tell
from trainer.evaluation import evaluate, sample
from trainer.fault_tolerance.errors import ended_by
from trainer.fault_tolerance.nonfinite import FiniteCheck
from trainer.fault_tolerance.watchdog import Watchdog
from trainer.logging import Sinks, final_lines
from trainer.measuring import flops, memory, timeline, timing
from trainer.optimizer import local
from trainer.parallelize import compile_options
from trainer.step import LanguageModel, Replayed, Step, check_mode, global_norm, shard_group
from trainer.summary import doing, figures, header, row

WARMUP = 3  # steps that no statistic covers, the compiling ones among them
PROFILED = 3


class Run:
    """One run of the flags on one rank. check(c, world): ValueError for what resolved flags name and is not there.
    progress: on rank 0, says what is being done. `world` counts simulated ranks, too. What cannot work ends in one line
    and SystemExit(2) here, before the ranks meet; later errors end in `code`, the exit code."""

    def __init__(
        self,
        c: flags.Config,
        check: Callable[[flags.Config, int], None],
        rank: int,
        local_rank: int,
        world: int,
        progress: Progress | None = None,
    ):
        self.rank = rank
        self.progress = progress or Progress(speak=False)
        self.code = 0
        self.outcome = "ok"
        device_type = (
            ("cuda" if torch.cuda.is_available() else "cpu") if c.device == "auto" else c.device
        )
        try:
            self.c = c = flags.resolve(c, device_type, world)
            self.world = world = c.world or world  # simulated ranks, too
            warn(c, rank)
            check_mode(c.compile, compile_options(c))
            check(c, world)
            set_deterministic(c.deterministic)
            self.progress.stage(
                "waiting for the other ranks" if world > 1 and not c.world else "starting"
            )
            patience = (
                max(c.timeout, c.timeout_first) + 120 if c.timeout and c.timeout_first else 3e7
            )
            # Longer than the watchdog's.
            self.device = connect(c, rank, local_rank, world, patience)
        except ValueError as error:
            fail(str(error), rank)
        self.opened = False
        self.sinks = None
        self.step = None
        self.replayed = None
        # For the row: losses, lines at the end, more entries.
        self.evaluated = {}
        self.sampled = []
        self.told = {}
        self.first_step_s = self.first_step_cpu_s = self.first_step_mib = None  # until it is done

    def __enter__(self) -> "Run":
        c = self.c
        hang = f"{os.path.splitext(c.results)[0]}.hang"
        ranks = 1 if c.world else self.world
        with ExitStack() as around:
            self.signals = around.enter_context(Signals(self.rank == 0))
            self.watchdog = around.enter_context(
                Watchdog(c.timeout_first, self.rank, ranks, hang, self.signals)
            )
            self.group = None if c.world else control_group()
            self.around = around.pop_all()
        self.control = Control(self.signals, self.group)
        self.stages = memory.Stages(self.device)
        self.timer = timing.StepTimer(self.device)
        # now: the checkout may change while it runs.
        self.environment = timing.environment(self.device)
        self.progress.stage("reading the data")
        return self

    def __exit__(self, kind, error: BaseException | None, trace) -> bool:
        """Tells why the run ended, writes its row and leaves the other ranks. Nothing but SystemExit goes on."""
        with self.around:
            caught = isinstance(error, Exception | KeyboardInterrupt)
            if caught:
                run = self if self.opened else None
                self.outcome, self.code = ended_by(error, run, self.watchdog, self.c.debug)
            self.signals.over = True
            if self.opened:
                self.profile.close()
            if self.sinks is not None and (caught or error is None):
                self._finish()
            if (caught or error is None) and self.code in (0, *Signals.CODES):  # all ranks are here
                if self.replayed is not None:
                    self.replayed.close()
                shutdown()
        return caught

    def _finish(self) -> None:
        told = row(self, self.outcome)
        self.sinks.row(told)
        self.watchdog.on_end = lambda outcome: None
        self.sinks.close()
        if self.code:
            return
        lines = self.stages.lines() if self.c.verbose else []
        lines += [*self.explanation, *self.profile.notes, *self.profile.paths, *self.sampled]
        self.say("\n".join([*lines, *final_lines(told, WARMUP), *self.sinks.left(self.c.report)]))

    def say(self, text: str) -> None:
        if self.rank == 0:
            tell(text)

    def open(
        self,
        data: Batches,
        model: LanguageModel,
        attention: str,
        *,
        c: flags.Config | None = None,
        counted: LanguageModel | None = None,
    ) -> None:
        """Takes the data and the model, which is on meta: agrees with the other ranks on them, and finds the newest
        checkpoint, `found`, after which `first` steps are done. attention: the kernel, for people. c: the flags, where
        the model has completed them. counted: what FLOPs are counted on; None: on nothing, since batches differ.
        DataError, CheckpointError, Desync or ValueError: the run cannot begin."""
        self.c = c = c or self.c
        self.batches = data
        self.attention = attention
        self.collectives = simulated_world.log() if c.world else None
        self.peak = {}
        self.finite = FiniteCheck(c, data, self.rank)
        # Rank 0 alone writes results and tells W&B, and a folder of traces may be one on each host.
        same = {
            flag(k): v
            for k, v in c.flat().items()
            if k not in ("results", "wandb", "wandb_group", "wandb_tags")
        }
        same |= {"--profile": c.profile is not None, "torch": torch.__version__}
        same |= {
            "the code (a checksum)": timing.code_digest(),
            "data": (data.description, data.fingerprint),
        }
        agree(same, self.group)
        self.found = None if c.world else checkpoint.find_start(c, data, self.group, model.identity)
        self.state = self.found.state if self.found else checkpoint.TrainState()
        self.first = self.saved = self.state.step  # steps of earlier runs
        self.warm = self.first + WARMUP
        self.profile = timing.Profile(c.profile, self.warm, PROFILED, self.rank, self.device)
        self.explained = min(self.warm, c.steps - 1) if c.explain_memory else None
        self.explanation = []
        # Of a step on one rank.
        self.step_tokens = None if counted is None else c.batch * c.grad_accum * c.seqlen
        self.flops, self.uncounted = count_flops(c, counted)
        self.opened = True
        self.done = self.first >= c.steps > 0
        if not self.done:
            self._begin_log()

    def already_done(self) -> int:
        """Says that the checkpoint has all steps; the exit code."""
        self.say(
            f"already done: {self.found.path} has the {self.c.steps} steps of --steps, or more"
        )
        return 0

    def _begin_log(self) -> None:
        c = self.c
        self.settings = flags.setting(c) | dict(world=flags.world_label(c, self.world))
        self.sinks = Sinks(
            c.results,
            c.wandb,
            c.wandb_group,
            None,
            self.settings,
            c.wandb_tags,
            self.rank,
            max(c.steps, self.first),
            c.log_every,
            resume=self.state.wandb,
        )
        # In each checkpoint from now on.
        self.continues = self.state.run
        self.state.run = self.sinks.run
        self.state.wandb = self.sinks.wandb_id
        self.watchdog.on_end = lambda outcome: self.sinks.row(row(self, outcome))
        self.progress.stage("building the model")

    def take(self, step: Step) -> None:
        """The step that will be trained and saved, whose model has its first values: loads the checkpoint into it if
        there is one."""
        c = self.c
        self.step = step
        units = c.compile == "none"
        self.profile.ranges = partial(timing.named_ranges, step, units)
        if self.found:
            checkpoint.load(self.found, step, self.group)
        self.batches.sample = self.state.samples
        beat = lambda: self.watchdog.beat(self.state.step, "save")  # noqa: E731
        self.saver = Saver(c, step, self.batches, self.group, self.state, beat)

    def agree_on_draws(self, model: LanguageModel) -> None:
        """Desync where ranks have drawn other initial values, or hold other parameters."""
        same = {n: ([*p.shape], str(p.dtype)) for n, p in model.named_parameters()}
        drawn = (
            torch.cuda.get_rng_state(self.device)
            if self.device.type == "cuda"
            else torch.get_rng_state()
        )
        agree(same | {"initial weights (random state)": zlib.crc32(drawn.numpy())}, self.group)

    def between(self) -> None:
        """Between two micro-batches: raises Stopped on all ranks if a signal has come to any, DataError if one cannot
        read on."""
        self.control.boundary(
            self.state.step, failed=self.saver.failed(), problem=self.batches.error
        )

    @contextmanager
    def training(self, step: Step) -> Iterator[Callable[..., Tensor]]:
        """Around the loop. Yields what to call for each batch: the step, with --cuda-graph replayed, and watched once
        with --explain-memory. At its end, and when a signal has come to any rank (Stopped) or one cannot read on
        (DataError), the run is saved. Then --sample writes. With --steps 0 it evaluates."""
        self.replayed = Replayed(step) if self.c.cuda_graph else None
        settings = self.sinks.write_settings(self.settings, self.continues, self.first)
        self.say("\n".join(header(self, settings)))
        self.progress.stage(doing(self, self.progress.live is not None))
        with self.saver:
            try:
                if not self.c.steps:
                    self.evaluate()
                yield self._call
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
                self.sampled = self.sample()

    def _call(self, tokens: Tensor, targets: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        k = self.state.step
        if k == self.explained and self.rank == 0:
            return self._explain(tokens, targets, **inputs)
        return (self.replayed or self.step)(tokens, targets, **inputs)

    @contextmanager
    def timed(self, k: int) -> Iterator[None]:
        """Around step k, from 0 on: timed, profiled, and ended with Stopped where a signal has come to any rank."""
        if k == self.first:
            self.started = time.perf_counter(), timing.cpu_seconds()
        self.logged = self.sinks.due(k + 1)
        self.logged_norms = {}
        if self.collectives:
            self.collectives.clear()  # the row tells those of the last step
        excluded = k < self.warm or self.profile.covers(k) or k == self.explained
        self.watchdog.beat(k + 1, "data")
        with self.timer.step(excluded), self.profile.step(k):
            problem = self.batches.problem() if k + 1 < self.c.steps else self.batches.error
            if self.control.boundary(k, self.finite.norm, self.saver.failed(), problem):
                self.saver.wait()  # it failed on all
            yield

    def batch(self) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """tokens, targets [B, T] and more inputs by name: the next batch of this rank, on its device."""
        tokens, targets, *more = next(self.batches)
        tokens, targets = (t.to(self.device, non_blocking=True) for t in (tokens, targets))
        inputs = {
            name: t.to(self.device, non_blocking=True) for each in more for name, t in each.items()
        }
        self.watchdog.beat(self.state.step + 1, "step")
        return tokens, targets, inputs

    def log(self, k: int, loss: Tensor, lr: float, **more: float) -> None:
        """Step k is done: its line if it is logged, with `more` in files and W&B, and NonFinite if the run must end for
        it. What is saved, evaluated and stopped from now on is after this step."""
        if self.logged:
            norm = self.step.grad_norm.item()
            ms = self.timer.last()
            told = dict(step=k + 1, loss=loss.item(), lr=lr, grad_norm=norm, ms=ms)
            self.sinks.step(told | more | figures(self, ms) | self.logged_norms)
        self.finite.put(k + 1, self.step, loss, wait=self.logged)
        if k == self.first:
            self.finite.flush()  # waits for the step
            wall, cpu = self.started
            self.first_step_s = time.perf_counter() - wall
            self.first_step_mib = self.stages.add("first step")
            self.first_step_cpu_s = timing.cpu_seconds() - cpu
            self.watchdog.limit = self.c.timeout
            self.watchdog.begun = True
        # In a short run the peak is that of all steps.
        if k == self.warm - 1 and k + 1 < self.c.steps:
            memory.reset_peak(self.device)
            self.peak = {}
        self.state.step = k + 1
        self.state.samples = self.batches.sample

    def evaluate(self) -> None:
        """The loss on held-out data after the step that is done, and its line beside the training loss."""
        self.finite.flush()
        with self.aside("eval") as between:
            found = evaluate(self.c, self.step, self.batches, self.device, between)
        state = self.state
        self.evaluated = found | dict(eval_step=self.state.step)
        loss = found["eval_loss"]
        best = math.inf if state.best is None else state.best
        if better := loss < best:  # which no NaN is
            state.best = loss
            state.best_step = state.step
        self.evaluated |= dict(best_eval_loss=state.best, best_step=state.best_step)
        told = dict(step=state.step, tokens=state.samples * self.c.seqlen, loss=self.finite.loss)
        self.sinks.step(told | found)
        if better and self.c.keep_best:
            self.save()
        if self.c.sample and state.step < self.c.steps:  # else `training` writes one
            self.say("\n".join(self.sample()))

    def sample(self) -> list[str]:
        """Lines with what the model writes after the step that is done."""
        with self.aside("sample") as between:
            return sample(self.c, self.step, self.batches, self.device, between)

    @contextmanager
    def aside(self, place: str) -> Iterator[Callable[[], None]]:
        """What runs inside is no part of a step: not of the peak of memory, nor of the collectives that a row tells. It
        calls what this yields at every pause, where a signal ends it with Stopped on all ranks."""

        def between() -> None:
            self.watchdog.beat(self.state.step, place)
            self.between()

        self.peak = memory.highest(self.peak, memory.peak(self.device))
        listed = [*(self.collectives or ())]
        yield between
        with suppress(Stopped, DataError):  # the next boundary tells it again
            self.control.finish()
        memory.reset_peak(self.device)
        if self.collectives is not None:
            self.collectives.clear()
            self.collectives.extend(listed)

    def save(self) -> None:
        """Saves the step that is done, if --save names a folder and it is not saved yet."""
        if self.c.save is None or self.state.step == self.saved:
            return
        self.watchdog.beat(self.state.step, "save")
        self.finite.flush()
        self.saver.save(self.state.step)
        self.saved = self.state.step

    def _explain(self, tokens: Tensor, targets: Tensor, **inputs: Tensor) -> Tensor:
        """The step, with what its memory consists of in `explanation`; on CUDA also a snapshot beside the steps' file,
        which pytorch.org/memory_viz draws."""
        file = self.sinks.steps
        snapshot = str(file.with_suffix(".memory.pickle")) if file else None
        how = dict(snapshot=snapshot) | inputs
        loss, found, notes = timeline.watch(self.c, self.step, tokens, targets, **how)
        self.explanation = timeline.lines(found, notes, self.explained + 1)
        return loss

    def norms(self, params: list, grads: list) -> None:
        """-vv: the norms of every parameter and its gradient, for the line of a logged step."""
        if not self.logged:
            return
        names = {id(p): name for name, p in self.step.model.named_parameters()}
        for p, g in zip(params, grads, strict=True):
            for kind, shard in (("norm", local(p.detach())), ("grad", g)):
                norm = global_norm([shard_group(p)], [shard])
                self.logged_norms[f"{kind}/{names[id(p)]}"] = norm.item()


def count_flops(c: flags.Config, model: LanguageModel | None) -> tuple[dict[str, float], str]:
    """FLOPs of one step on one rank by convention, or none and why: "palm", "causal" and, where its formula holds,
    "hardware": not for the math kernel, nor where eager does a lean MLP in a recomputed block once more."""
    if model is None:
        return {}, "FLOPs are not counted, MFU and tok/s are n/a: batches differ in length"
    try:
        counted = flops.count(model, c.seqlen)
    except ValueError as error:
        return {}, f"FLOPs are not counted, MFU is n/a: {error}"
    found = dict(causal=counted.causal, palm=counted.palm)
    shape = getattr(model, "config", None)
    odd = (
        shape is None
        or shape.sdpa == "math"
        or (c.mlp, c.remat, c.compile) == ("lean", "block", "none")
    )
    if not odd and counted.causal == costs.flops_per_token(shape, c.seqlen):
        found["hardware"] = costs.flops_per_token(shape, c.seqlen, "hardware")
    return {kind: each * c.batch * c.grad_accum * c.seqlen for kind, each in found.items()}, ""


def warn(c: flags.Config, rank: int) -> None:
    """On rank 0, in a line: a torch that was never run."""
    if (line := never_run(torch.__version__)) and rank == 0:
        tell(line, sys.stderr)
