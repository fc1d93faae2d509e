"""The host's part in steps that are not finite, and in spikes of the gradient norm: --nonfinite.

    check = FiniteCheck(config, batches, rank)
    check.put(k, step, loss)        # after the launch of step k (from 1); raises NonFinite if the run must end
    check.flush()                   # before a save, so that the newest step is known as well

The device refuses the update itself, before anything is changed (trainer/step.py); the host tells and counts it. The
numbers are those of all ranks, so that all decide alike. On CUDA they are read one step late: the host never waits for
the step that it has just launched.
"""

import math
from collections import deque

import torch
from torch import Tensor

from trainer.config import Config, written
from trainer.data import Batches
from trainer.step import Step
from trainer.terminal.output import tell

WINDOW = 100  # a spike is one against the mean gradient norm of so many steps before it
MOST_SKIPS = 3  # steps in a row that --nonfinite skip leaves out
SETTLED = 10  # no spike is reported before the mean is one of so many


class NonFinite(Exception):
    """Training must end, because a step was not finite, or too many in a row were not."""


class FiniteCheck:
    def __init__(self, config: Config, batches: Batches, rank: int = 0):
        self.config = config
        self.batches = batches
        self.rank = rank
        self.late = config.device == "cuda"
        self.loss, self.norm = None, -1.0  # of the newest step that was read
        self.skipped = self.in_a_row = 0  # updates left out
        self.norms = deque(maxlen=WINDOW)
        self.pending = None

    def put(self, k: int, step: Step, loss: Tensor, wait: bool = False) -> None:
        """Takes the numbers of step k, which `step` has just launched, and reads those of the step before it; with
        `wait`, or on a CPU, also those of step k. loss: fp32 scalar. Raises NonFinite."""
        self.flush()
        numbers = torch.stack((loss, step.grad_norm, step.skipped))
        event = None
        if self.late:
            numbers = numbers.to("cpu", non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        first = 0 if self.batches.overfit else self.batches.sample - self.batches.global_batch
        self.pending = k, numbers, event, f"samples {first}-{first + self.batches.global_batch - 1}"
        if wait or not self.late:
            self.flush()

    def flush(self) -> None:
        """Reads the numbers that were put and are not read yet. Raises NonFinite if the run must end."""
        if self.pending is None:
            return
        k, numbers, event, samples = self.pending
        self.pending = None
        if event is not None:
            event.synchronize()
        self.loss, norm, skipped = numbers.tolist()
        self.norm = norm
        if skipped:
            return self._refused(k, norm, samples)
        mean = sum(self.norms) / max(1, len(self.norms))
        if len(self.norms) >= SETTLED and 0 < self.config.norm_spike * mean < norm:
            self._say(
                f"step {k}: gradient norm {norm:.4g} is {norm / mean:.0f} times the mean of the last "
                f"{len(self.norms)} steps ({mean:.4g}), {samples}"
            )
        self.norms.append(norm)
        self.in_a_row = 0

    def _refused(self, k: int, norm: float, samples: str) -> None:
        """Tells and counts a step whose update the device has left out; raises NonFinite where the flags say so."""
        config = self.config
        finite = math.isfinite(self.loss + norm)
        if finite and norm == 0:
            self.skipped += 1
            self._say(
                f"step {k}: gradient norm 0, as of a batch without labels, {samples}: update left out on all ranks"
            )
            return
        what = f"gradient norm above {written(config, 'norm_limit')}" if finite else "not finite"
        message = f"step {k}: {what} (loss {self.loss:.4g}, gradient norm {norm:.4g}), {samples}"
        if config.nonfinite == "stop":
            other = "or leave such steps out with --nonfinite skip"
            raise NonFinite(f"{message}: lower --lr {config.lr}, {other}")
        self.skipped = self.skipped + 1
        self.in_a_row = self.in_a_row + 1
        if self.in_a_row > MOST_SKIPS:
            raise NonFinite(
                f"{message}: {self.in_a_row} updates in a row left out, more than the {MOST_SKIPS} of "
                f"{written(config, 'nonfinite')}; lower --lr {config.lr}"
            )
        self._say(f"{message}: update left out on all ranks ({self.in_a_row} in a row)")

    def _say(self, text: str) -> None:
        if self.rank == 0:
            tell(text)
