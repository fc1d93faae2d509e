"""What ranks decide together: that they run the same thing, and when to stop.

    group = control_group()                # of all ranks, over gloo; None: there is one rank
    agree({"--depth": 4, ...}, group)      # raises Desync, naming what differs and on which rank
    with Signals() as signals:             # SIGTERM, Ctrl-C, .. are noted; a second one ends the process at once
        control = Control(signals, group)
        control.exchange(k)                # between steps: raises Stopped on all ranks if any rank got a signal
        control.finish()                   # after the last boundary

At a boundary, between steps or micro-batches, the ranks all-reduce seven numbers on the host, and with them the CPU
time of each rank's last step. They read them at the next one: no step waits for them, all ranks stop at the same
boundary, and ranks that have come apart are noticed.
"""

import math
import os
import signal
import sys
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from trainer.terminal.output import CLEAR_LINE, is_terminal

# S; a signal this soon after the first is taken for the same, sent by both the launcher and the
# terminal.
AGAIN_S = 0.5
# Relative, between the gradient norms that the ranks have computed for one step.
NORM_TOLERANCE = 1e-3


Group = dist.ProcessGroup | None  # None: there is one rank


class Desync(Exception):
    """The ranks do not run the same thing."""


class Stopped(Exception):
    """A signal asked for the end; `signum` is the same on all ranks."""

    def __init__(self, signum: int):
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


def control_group() -> dist.ProcessGroup:
    """A gloo group of all ranks beside the default one, for the host: no device waits for it. Collective."""
    group = dist.new_group(backend="gloo")
    # In torch 2.11 a group's first collective changes a map that is not locked: now, not beside another group's.
    dist.all_reduce(torch.zeros(1, device="cpu"), group=group)
    return group


def agree(facts: dict[str, Any], group: Group) -> None:
    """Raises Desync, naming up to three differences, on all ranks if one has other facts than rank 0. facts: objects
    that can be pickled and compared, by name. Collective; with a group of None it does nothing."""
    if group is None:
        return
    everyone: list[dict] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(everyone, facts, group=group)
    first = everyone[0]
    lines = []
    for name in sorted({name for each in everyone for name in each}):
        if others := [
            rank for rank, each in enumerate(everyone) if each.get(name) != first.get(name)
        ]:
            lines.append(
                f"{name}: rank 0 has {first.get(name)}, rank {others[0]} {everyone[others[0]].get(name)}"
                + f" ({len(others)} ranks differ)" * (len(others) > 1)
            )
    if lines:
        more = f"; and {len(lines) - 3} more" * (len(lines) > 3)
        raise Desync(
            f"ranks differ in {'; '.join(lines[:3])}{more}; start all ranks with the same command and files"
        )


def agree_on_weights(model: torch.nn.Module, device: torch.device, group: Group) -> None:
    """Desync where ranks have drawn other initial values, or hold other parameters. Collective, as `agree`."""
    facts = {name: ([*p.shape], str(p.dtype)) for name, p in model.named_parameters()}
    drawn = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
    agree(facts | {"initial weights (random state)": zlib.crc32(drawn.numpy())}, group)


class Signals:
    """Notes SIGTERM, SIGINT, SIGHUP (of a terminal that closes), SIGQUIT, SIGUSR1 (SLURM's --signal=USR1@120) and
    SIGXCPU (a limit of CPU time) in `got`. A second one, later than AGAIN_S, ends the process; a second SIGXCPU does
    not, since the system sends one each second. Under nohup SIGHUP stays ignored, unless torchrun passes it on and then
    ends who ignores it. Main thread only; but Python calls no handler while that is in C, as in a collective: another
    thread may `note_pending`."""

    KINDS = (
        signal.SIGTERM,
        signal.SIGINT,
        signal.SIGHUP,
        signal.SIGQUIT,
        signal.SIGUSR1,
        signal.SIGXCPU,
    )
    CODES = tuple(128 + kind for kind in KINDS)

    def __init__(self, speak: bool = True):  # whether to answer Ctrl-C with a line on stderr
        self.got = 0
        self.at = 0.0
        self.speak = speak
        self.before = {}
        self.pipe = None
        self.over = False  # set to True when nothing is left to stop: signals are then ignored
        self.before_kill: Callable[[], None] = lambda: None
        self.early = 0  # a signal that `note_pending` has seen before its handler

    def __enter__(self):
        passed = "SIGHUP" in os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE", "")
        nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN and not passed
        kinds = [kind for kind in self.KINDS if not (nohup and kind == signal.SIGHUP)]
        self.before = {kind: signal.signal(kind, self._handle) for kind in kinds}
        self.pipe = os.pipe()  # gets the number of each signal that comes
        for end in self.pipe:
            os.set_blocking(end, False)
        self.others = signal.set_wakeup_fd(self.pipe[1], warn_on_full_buffer=False)
        return self

    def __exit__(self, *_):
        signal.set_wakeup_fd(self.others)
        for kind, handler in self.before.items():
            signal.signal(kind, handler)
        for end in self.pipe:
            os.close(end)

    def note_pending(self) -> None:
        """Notes a first signal whose handler has not been called yet. For a thread beside the main."""
        came = set()
        with suppress(BlockingIOError):
            came = {*os.read(self.pipe[0], 512)} & self.before.keys() if self.pipe else came
        for signum in came if not self.got else ():
            self.early = signum
            self.note(signum)

    def _handle(self, signum: int, _frame) -> None:
        if signum == self.early:
            self.early = 0
        else:
            self.note(signum)

    def note(self, signum: int) -> None:
        """What a signal does; also called by a thread that has seen a reason to stop."""
        if self.over:
            return
        if not self.got:
            # Before `got`: a signal that comes meanwhile is a first one, not a second that kills.
            self.at = time.monotonic()
            self.got = signum
            if self.speak and signum == signal.SIGINT:  # somebody sits at the terminal
                # Stderr may be a pipe to `tee`, which the same Ctrl-C has ended.
                with suppress(Exception):
                    line = "Ctrl-C: stopping after this step; again: at once\n"
                    # A terminal shows "^C" and the line of Progress there.
                    before = CLEAR_LINE if is_terminal(sys.__stderr__) else ""
                    os.write(sys.__stderr__.fileno(), (before + line).encode())
        elif signum != signal.SIGXCPU and time.monotonic() - self.at > AGAIN_S:
            self.before_kill()
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)


class Control:
    """Every rank calls `exchange` equally often, and `finish` once after the last. group: None if there is one rank."""

    def __init__(self, signals: Signals, group: Group):
        self.signals = signals
        self.work = None
        self.numbers = None
        self.cpu_s: list[float] = []  # by rank, of step `cpu_step`; 0: of none
        self.cpu_step = 0
        self.group = group if group is not None and group.size() > 1 else None

    def exchange(
        self,
        k: int,
        norm: float = -1.0,
        failed: bool = False,
        problem: Exception | None = None,
        cpu_s: float = 0.0,
    ) -> bool:
        """Begins the exchange of this boundary and reads that of the one before. k: steps done. norm: of the newest
        gradient that the host has read, or -1. failed: an asynchronous save of this rank has failed. Returns whether
        one has on any rank. problem: raised on all ranks. cpu_s: of the newest step that is done. Raises Stopped if
        any rank got a signal, and Desync for ranks at other steps or norms."""
        # The maximum of NaN and a number is not defined.
        norm = norm if math.isfinite(norm) else -1.0
        if self.group is None:
            if self.signals.got:
                raise Stopped(self.signals.got)
            if problem:
                raise problem
            return failed
        failed_before = self.finish()
        self.problem = problem
        common = [k, -k, norm, -norm, failed, self.signals.got, problem is not None]
        # Each rank fills its own place: the maximum over ranks has the times of all.
        times = [0.0] * self.group.size()
        times[self.group.rank()] = cpu_s
        self.numbers = torch.tensor(common + times, dtype=torch.float64, device="cpu")
        self.work = dist.all_reduce(
            self.numbers, dist.ReduceOp.MAX, group=self.group, async_op=True
        )
        return failed_before

    def finish(self) -> bool:
        """Reads the exchange that the last boundary began; returns and raises as `exchange` does."""
        if self.work is None:
            return False
        work = self.work
        self.work = None
        work.wait()
        k, fewest, norm, least, failed, signum, problem, *self.cpu_s = self.numbers.tolist()
        self.cpu_step = int(k)
        if k != -fewest:
            raise Desync(f"ranks are at different steps: {-fewest:.0f} to {k:.0f} are done")
        if norm + least > NORM_TOLERANCE * abs(norm):
            raise Desync(
                f"gradient norms differ between ranks, {-least} to {norm}, when {k:.0f} steps were done"
            )
        if signum:
            raise Stopped(int(signum))
        if problem:
            everyone: list[Exception | None] = [None] * self.group.size()
            dist.all_gather_object(everyone, self.problem, group=self.group)
            raise next(filter(None, everyone))
        return bool(failed)
