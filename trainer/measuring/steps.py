"""What the steps of a run cost: time, memory at its peak, collectives of simulated ranks; some of them looked into.

    measured = StepMeasurements(config, device, rank, first)   # `first` steps were done by earlier runs
    measured.attach(step, train_step)       # train_step(step, tokens, targets, **inputs) runs it
    with measured.step(k):
        loss = measured.train_step(tokens, targets)     # with --cuda-graph replayed, with --explain-memory watched once
    measured.first_step_done(stages)
    measured.after(k)
    with measured.outside_steps():          # evaluation, a sample, an export
        ...

The numbers are for trainer/summary.py, which makes the row of them.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from trainer.config import Config
from trainer.distributed import simulated_world
from trainer.measuring import memory, timeline, timing
from trainer.step import CudaGraphStep, Step

WARMUP = 3  # steps that no statistic covers, the compiling ones among them
PROFILED = 3


class StepMeasurements:
    """Of resolved flags, on one rank."""

    def __init__(self, config: Config, device: torch.device, rank: int, first: int):
        self.config = config
        self.device = device
        self.rank = rank
        self.first = first
        self.warm = first + WARMUP
        self.timer = timing.StepTimer(device)
        self.profile = timing.Profile(config.profile, self.warm, PROFILED, rank, device)
        # Of the last step, on simulated ranks.
        self.collectives = simulated_world.log() if config.world else None
        self.earlier_peak = {}  # of memory, before the last evaluation
        self.replayed: CudaGraphStep | None = None  # with --cuda-graph
        self.explained = min(self.warm, config.steps - 1) if config.explain_memory else None
        self.explanation: list[str] = []
        # Until the first step is done.
        self.first_step_s = self.first_step_cpu_s = self.first_step_mib = None

    def attach(
        self, step: Step, train_step: Callable[..., Tensor], snapshot: Path | None = None
    ) -> None:
        """The step that is measured, which train_step(step, tokens, targets, **inputs) runs. snapshot: where
        --explain-memory leaves on CUDA what the allocator did."""
        self.snapshot = snapshot
        self.attached = step
        self.run_step = partial(train_step, step)
        self.replayed = CudaGraphStep(step, self.run_step) if self.config.cuda_graph else None
        eager = self.config.compile == "none"
        self.profile.ranges = partial(timing.named_ranges, step, eager)

    @contextmanager
    def step(self, k: int) -> Iterator[None]:
        """Around step k, from 0 on: timed, and profiled with --profile."""
        self.k = k
        if k == self.first:
            self.started = time.perf_counter(), timing.cpu_seconds()
        if self.collectives:
            self.collectives.clear()
        excluded = k < self.warm or self.profile.covers(k) or k == self.explained
        with self.timer.step(excluded), self.profile.step(k):
            yield

    def train_step(self, tokens: Tensor, targets: Tensor, **inputs: Tensor) -> Tensor:
        """tokens, targets [B, T] -> the loss of the whole batch."""
        if self.k == self.explained and self.rank == 0:
            return self._explain(partial(self.run_step, **inputs), tokens, targets)
        return (self.replayed or self.run_step)(tokens, targets, **inputs)

    def _explain(
        self, train_step: Callable[..., Tensor], tokens: Tensor, targets: Tensor
    ) -> Tensor:
        """The step, with what its memory consists of in `explanation`; on CUDA also a snapshot, which
        pytorch.org/memory_viz draws."""
        loss, memory_timeline, notes = timeline.watch(
            self.config,
            self.attached,
            tokens,
            targets,
            snapshot=str(self.snapshot) if self.snapshot else None,
            train_step=train_step,
        )
        self.explanation = timeline.lines(memory_timeline, notes, self.explained + 1)
        return loss

    def first_step_done(self, stages: memory.Stages) -> None:
        """The device has done the first step, which compiles."""
        wall, cpu = self.started
        self.first_step_s = time.perf_counter() - wall
        self.first_step_mib = stages.add("first step")
        self.first_step_cpu_s = timing.cpu_seconds() - cpu

    def after(self, k: int) -> None:
        """Step k was launched and logged."""
        # In a short run the peak is that of all steps.
        if k == self.warm - 1 and k + 1 < self.config.steps:
            memory.reset_peak(self.device)
            self.earlier_peak = {}

    def peak(self) -> dict[str, float | str]:
        """Memory at its peak so far, as a row has it."""
        peaks = memory.highest(self.earlier_peak, memory.peak(self.device))
        # Since it was captured nothing was allocated.
        if self.replayed is not None and self.replayed.peak_mib:
            peaks["peak_alloc_mib"] = max(self.replayed.peak_mib, peaks["peak_alloc_mib"])
        return peaks

    @contextmanager
    def outside_steps(self) -> Iterator[None]:
        """What runs inside counts neither for the peak of memory nor among the collectives."""
        self.earlier_peak = memory.highest(self.earlier_peak, memory.peak(self.device))
        listed = [*(self.collectives or ())]
        yield
        memory.reset_peak(self.device)
        if self.collectives is not None:
            self.collectives.clear()
            self.collectives.extend(listed)
