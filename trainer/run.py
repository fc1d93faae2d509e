"""What surrounds the steps of main.py and of finetune.py: signals, hanging ranks, checkpoints, the log, the row.

    with Run(config, check, rank, local_rank, world) as run:    # flags get their values, the ranks meet
        run.find_checkpoint_and_open_log(data, model, attention, counted=model)     # run.first steps are done
        run.check_equal_weights(model)
        run.resume_into(step)                                   # loads the checkpoint into it, prepares to save
        with run.training(step, train_step) as step_fn:        # an end saves first; then --sample writes
            for k in range(run.first, run.config.steps):
                with run.timed(k):
                    tokens, targets, inputs = run.next_batch()
                    loss = step_fn(tokens, targets, **inputs)
                run.log_step(k, loss, lr)                       # step k is done: what is saved and timed counts by it
                run.evaluate_if_due(k)
                run.save_if_due(k)
    return run.code                                             # the exit code; an error has become a line and a row

What a run says of itself is made by trainer/summary.py, what steps cost is measured by trainer/measuring/steps.py, how
it ends is decided by trainer/fault_tolerance/errors.py.
"""

import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import torch
from torch import Tensor

from trainer import config as flags
from trainer.checkpoint import load as checkpoint
from trainer.checkpoint.save import Saver
from trainer.checks import never_run
from trainer.data import Batches, DataError
from trainer.distributed.control import (
    Control,
    Signals,
    Stopped,
    agree,
    agree_on_weights,
    control_group,
)
from trainer.distributed.launch import connect, set_deterministic, shutdown
from trainer.evaluation import evaluate, sample
from trainer.fault_tolerance.errors import ended_by
from trainer.fault_tolerance.nonfinite import FiniteCheck
from trainer.fault_tolerance.stragglers import Stragglers
from trainer.fault_tolerance.watchdog import Watchdog
from trainer.logging import Sinks, final_lines
from trainer.measuring import flops, memory, timing
from trainer.measuring.steps import WARMUP, StepMeasurements
from trainer.parallelize import compile_options
from trainer.step import LanguageModel, Step, check_mode, parameter_norms
from trainer.summary import figures, header, progress_text, row, same_on_all_ranks
from trainer.terminal.output import fail, tell
from trainer.terminal.progress import Progress
from trainer.trackers import FINISH_S, LOG_S, TrackerOptions


class Run:
    """One run of the flags on one rank. check(config, world): ValueError for what resolved flags name and is not there.
    progress: on rank 0, says what is being done. `world` counts simulated ranks, too. What cannot work ends in one line
    and SystemExit(2) here, before the ranks meet; later errors end in `code`, the exit code."""

    def __init__(
        self,
        config: flags.Config,
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
        device = config.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            self.config = config = flags.resolve(config, device, world)
            self.world = world = config.world or world  # simulated ranks, too
            if (line := never_run(torch.__version__)) and rank == 0:
                tell(line, sys.stderr)
            check_mode(config.compile, compile_options(config))
            check(config, world)
            set_deterministic(config.deterministic)
            several = world > 1 and not config.world
            self.progress.stage("waiting for the other ranks" if several else "starting")
            limits = config.timeout, config.timeout_first
            # Longer than the watchdog's.
            patience = max(limits) + 120 if all(limits) else 3e7
            self.device = connect(config, rank, local_rank, world, patience)
        except ValueError as error:
            fail(str(error), rank)
        self.prepared = False
        self.sinks = None
        self.step = None
        # For the row: losses, lines at the end, more entries.
        self.evaluated = {}
        self.sampled = []
        self.extra_columns = {}

    def __enter__(self) -> "Run":
        config = self.config
        hang = f"{os.path.splitext(config.results)[0]}.hang"
        ranks = 1 if config.world else self.world
        with ExitStack() as around:
            self.signals = around.enter_context(Signals(self.rank == 0))
            self.watchdog = around.enter_context(
                Watchdog(config.timeout_first, self.rank, ranks, hang, self.signals)
            )
            self.group = None if config.world else control_group()
            self.around = around.pop_all()
        self.watchdog.clear = self.signals.before_kill = self.progress.clear
        self.control = Control(self.signals, self.group)
        self.stragglers = Stragglers()
        self.step_cpu_s = 0.0  # of the main thread, in the last step
        self.stages = memory.Stages(self.device)
        # now: the checkout may change while it runs.
        self.environment = timing.environment(self.device)
        self.progress.stage("reading the data")
        return self

    def __exit__(self, kind, error: BaseException | None, trace) -> bool:
        """Tells why the run ended, writes its row and leaves the other ranks. Nothing but SystemExit goes on."""
        with self.around:
            caught = isinstance(error, Exception | KeyboardInterrupt)
            if caught:
                run = self if self.prepared else None
                self.outcome, self.code = ended_by(error, run, self.watchdog, self.config.debug)
            self.signals.over = True
            if self.prepared:
                self.measured.profile.close()
            if self.sinks is not None and (caught or error is None):
                self._write_row()
            if (caught or error is None) and self.code in (0, *Signals.CODES):  # all ranks are here
                if self.prepared and self.measured.replayed is not None:
                    self.measured.replayed.close()
                shutdown()
        return caught

    def _write_row(self) -> None:
        result = row(self, self.outcome)
        # Rank 0 waits for its trackers, and the other ranks for rank 0, which is no hang.
        if self.watchdog.limit:
            self.watchdog.limit += LOG_S + FINISH_S
        self.sinks.row(result)
        self.watchdog.on_end = lambda outcome: None
        if not self.code:
            lines = self.stages.lines() if self.config.verbose else []
            profile = self.measured.profile
            lines += [*self.measured.explanation, *profile.notes, *profile.paths, *self.sampled]
            lines += [*final_lines(result, WARMUP), *self.closing_lines()]
            self.say("\n".join(lines))
        self.watchdog.beat(self.state.step, "end")
        self.sinks.close()

    def closing_lines(self) -> list[str]:
        """`Sinks.closing_lines` of this run."""
        # Without torchrun the variable may be left from another run, and mean nothing.
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or 1) if os.environ.get("RANK") else 1
        return self.sinks.closing_lines(self.config.PROGRAM, ranks)

    def say(self, text: str) -> None:
        if self.rank == 0:
            tell(text)

    def find_checkpoint_and_open_log(
        self,
        data: Batches,
        model: LanguageModel,
        attention: str,
        *,
        config: flags.Config | None = None,
        counted: LanguageModel | None = None,
    ) -> None:
        """Checks that all ranks have the same flags, code and data, finds the newest checkpoint, `resume_point`, after
        which `first` steps are done, counts the FLOPs of a step, and opens the log. model: on meta. attention: the
        kernel, for people. config: the flags, where the model has completed them. counted: the model to count FLOPs on;
        None: they are not counted, since batches differ. DataError, CheckpointError, Desync or ValueError: the run
        cannot begin."""
        self.config = config = config or self.config
        self.batches = data
        self.attention = attention
        self.finite = FiniteCheck(config, data, self.rank)
        agree(same_on_all_ranks(config, data), self.group)
        self.resume_point = None
        if not config.world:
            self.resume_point = checkpoint.find_checkpoint(config, data, self.group, model.identity)
        self.state = self.resume_point.state if self.resume_point else checkpoint.TrainState()
        self.first = self.saved = self.state.step  # steps of earlier runs
        self.measured = StepMeasurements(config, self.device, self.rank, self.first)
        # Of a step on one rank.
        tokens = config.batch * config.grad_accum * config.seqlen
        self.step_tokens = None if counted is None else tokens
        self.flops, self.uncounted = flops.of_step(config, counted)
        self.prepared = True
        self.done = self.first >= config.steps > 0
        if self.done:
            self.say(
                f"already done: {self.resume_point.path} has the {config.steps} steps of --steps, or more"
            )
        else:
            self._open_log()
            self.progress.stage("building the model")

    def _open_log(self) -> None:
        config = self.config
        self.settings = flags.setting(config) | dict(world=flags.world_label(config, self.world))
        trackers = TrackerOptions(
            config.tracker,
            config.wandb_mode,
            config.tracker_group,
            tags=config.wandb_tags,
            ids=self.state.trackers,
        )
        self.sinks = Sinks(
            config.results,
            trackers,
            self.settings,
            self.rank,
            max(config.steps, self.first),
            config.log_every,
        )
        # In each checkpoint from now on.
        self.continues = self.state.run
        self.state.run = self.sinks.run
        self.state.trackers = self.sinks.trackers.ids
        self.watchdog.on_end = self._end_at_once

    def _end_at_once(self, outcome: str) -> None:
        """The row, where the main thread will not come to writing it; a tracker has what it was given."""
        self.sinks.row(row(self, outcome))
        self.sinks.close()

    def check_equal_weights(self, model: LanguageModel) -> None:
        """Desync where ranks have drawn other initial values, or hold other parameters."""
        agree_on_weights(model, self.device, self.group)

    def resume_into(self, step: Step) -> None:
        """The step that will be trained and saved, whose model has its first values: loads the checkpoint into it if
        there is one."""
        self.step = step
        if self.resume_point:
            checkpoint.load(self.resume_point, step, self.group)
        self.batches.sample = self.state.samples
        beat = lambda: self.watchdog.beat(self.state.step, "save")  # noqa: E731
        self.saver = Saver(self.config, step, self.batches, self.group, self.state, beat)

    def check_for_stop(self) -> None:
        """Between two micro-batches: raises Stopped on all ranks if a signal has come to any, DataError if one cannot
        read on."""
        self.control.exchange(
            self.state.step,
            failed=self.saver.failed(),
            problem=self.batches.error,
            # The next step reads the times of ranks from the exchange before it, which is this one.
            cpu_s=self.step_cpu_s,
        )
        self._compare_ranks()

    def _compare_ranks(self) -> None:
        """Names a slow rank by the times that the last exchange has told."""
        if line := self.stragglers.add(self.control.cpu_s, self.control.cpu_step):
            self.say(line)

    @contextmanager
    def training(self, step: Step, train_step: Callable[..., Tensor]) -> Iterator[Callable]:
        """Around the loop. Yields what to call for each batch: train_step(step, ..), with --cuda-graph replayed, and
        watched once with --explain-memory. At its end, and when a signal has come to any rank (Stopped) or one cannot
        read on (DataError), the run is saved. Then --sample writes. With --steps 0 it evaluates."""
        settings = self.sinks.write_settings(flags.setting(self.config), self.continues, self.first)
        file = self.sinks.steps
        self.measured.attach(step, train_step, file and file.with_suffix(".memory.pickle"))
        self.say("\n".join(header(self, settings)))
        self.progress.stage(progress_text(self, self.progress.live is not None))
        with self.saver:
            try:
                if not self.config.steps:
                    self.evaluate()
                yield self.measured.train_step
                with suppress(Stopped, DataError):  # too late to matter
                    self.control.finish()
            except (Stopped, DataError):
                self.batches.sample = self.state.samples  # of a step that was begun nothing is kept
                self.saver.ending = True
                self.save()
                self.saver.wait()
                raise
            self.save()
            if self.config.sample:
                self.sampled = self.sample()

    @contextmanager
    def timed(self, k: int) -> Iterator[None]:
        """Around step k, from 0 on: timed, profiled, and ended with Stopped where a signal has come to any rank."""
        self.logged = self.sinks.due(k + 1)
        self.logged_norms = {}
        self.watchdog.beat(k + 1, "data")
        with self.measured.step(k):
            last = k + 1 == self.config.steps
            problem = self.batches.error if last else self.batches.problem()
            failed = self.saver.failed()
            if self.control.exchange(k, self.finite.norm, failed, problem, self.step_cpu_s):
                self.saver.wait()  # it failed on all
            self._compare_ranks()
            began = time.thread_time()
            yield
            # The first step compiles.
            self.step_cpu_s = time.thread_time() - began if k > self.first else 0.0

    def next_batch(self) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """tokens, targets [B, T] and more inputs by name: the next batch of this rank, on its device but for counts
        (`learned`), which the host reads."""
        tokens, targets, *extra = next(self.batches)
        inputs = {name: t for named in extra for name, t in named.items()}
        tokens, targets = (t.to(self.device, non_blocking=True) for t in (tokens, targets))
        inputs = {
            name: t if name == "learned" else t.to(self.device, non_blocking=True)
            for name, t in inputs.items()
        }
        self.watchdog.beat(self.state.step + 1, "step")
        return tokens, targets, inputs

    def log_norms(self, params: list[Tensor], grads: list[Tensor]) -> None:
        """-vv: the norms of every parameter and its gradient, for the line of a logged step."""
        if self.logged:
            self.logged_norms = parameter_norms(self.step.model, params, grads)

    def log_step(self, k: int, loss: Tensor, lr: float, **metrics: float) -> None:
        """Step k is done: its line if it is logged, with `metrics` in files and trackers, and NonFinite if the run must
        end for it. What is saved, evaluated and stopped from now on is after this step."""
        if self.logged:
            norm = self.step.grad_norm.item()
            ms = self.measured.timer.last()
            line = dict(step=k + 1, loss=loss.item(), lr=lr, grad_norm=norm, ms=ms)
            line |= metrics | figures(self, ms)
            if self.stragglers.ratio is not None:
                line["slowest_rank_ratio"] = round(self.stragglers.ratio, 3)
            if k == self.first and self.config.compile != "none":
                # It compiles: its time is that of no step, and no rate comes of it.
                line = {name: line[name] for name in line if name not in ("ms", "tok_s", "mfu")}
                line["first_step_s"] = ms / 1e3
            self.sinks.step(line | self.logged_norms)
        self.finite.put(k + 1, self.step, loss, wait=self.logged)
        if k == self.first:
            self.finite.flush()  # waits for the step
            self.measured.first_step_done(self.stages)
            self.watchdog.limit = self.config.timeout
            self.watchdog.begun = True
        self.measured.after(k)
        self.state.step = k + 1
        self.state.samples = self.batches.sample

    def evaluate_if_due(self, k: int) -> None:
        """Evaluates after step k every --eval-every steps, and after the last."""
        every = self.config.eval_every
        if every and ((k + 1) % every == 0 or k + 1 == self.config.steps):
            self.evaluate()

    def evaluate(self) -> None:
        """The loss on held-out data after the step that is done, and its line beside the training loss."""
        self.finite.flush()
        with self.outside_steps("eval") as check_for_stop:
            result = evaluate(self.config, self.step, self.batches, self.device, check_for_stop)
        state = self.state
        loss = result["eval_loss"]
        best = math.inf if state.best is None else state.best
        if better := loss < best:  # which no NaN is
            state.best = loss
            state.best_step = state.step
        self.evaluated = result | dict(
            eval_step=state.step, best_eval_loss=state.best, best_step=state.best_step
        )
        tokens = state.samples * self.config.seqlen
        self.sinks.step(dict(step=state.step, tokens=tokens, loss=self.finite.loss) | result)
        if better and self.config.keep_best:
            self.save()
        if self.config.sample and state.step < self.config.steps:  # else `training` writes one
            self.say("\n".join(self.sample()))

    def sample(self) -> list[str]:
        """Lines with what the model writes after the step that is done."""
        with self.outside_steps("sample") as check_for_stop:
            return sample(self.config, self.step, self.batches, self.device, check_for_stop)

    @contextmanager
    def outside_steps(self, place: str) -> Iterator[Callable[[], None]]:
        """What runs inside is no part of a step: not of the peak of memory, nor of the collectives that a row tells. It
        calls what this yields at every pause, where a signal ends it with Stopped on all ranks."""

        def beat_and_check() -> None:
            self.watchdog.beat(self.state.step, place)
            self.check_for_stop()

        with self.measured.outside_steps():
            yield beat_and_check
            with suppress(Stopped, DataError):  # the next boundary tells it again
                self.control.finish()

    def save_if_due(self, k: int) -> None:
        """Saves after step k every --save-every steps."""
        if self.config.save_every and (k + 1) % self.config.save_every == 0:
            self.save()

    def save(self) -> None:
        """Saves the step that is done, if --save names a folder and it is not saved yet."""
        if self.config.save is None or self.state.step == self.saved:
            return
        self.watchdog.beat(self.state.step, "save")
        self.finite.flush()
        self.saver.save(self.state.step)
        self.saved = self.state.step
