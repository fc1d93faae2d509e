"""Plants faults in a run, to see what it does about them: FAULT=rank:step:where:kind, several separated by commas.

    FAULT=1:5:forward:kill torchrun --nproc-per-node 2 main.py --save runs/a --save-every 2
    FAULT='*:3:data:term,0:7:write:enospc' python main.py --save runs/b --save-every 1

rank: a number, or * for all. step: from 1 on, as in the log. where: data (before the batch is read), forward, backward,
update, save (nothing is written yet), write (this rank's files are there, not committed), commit (before the rename).
kind: kill, stop (SIGKILL, SIGSTOP), term, int (SIGTERM, SIGINT), exit, segv, hang (sleeps for ever), raise, enospc,
oom, nan, inf (forward alone: this rank's loss). Each happens once, and not again after a restart by torchrun.

Without the variable nothing here is ever called.
"""

import ctypes
import os
import re
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from typing import NamedTuple
from unittest import mock

import torch

from trainer.checkpoint import save as saver
from trainer.config import Config
from trainer.data import Batches
from trainer.step import Step

WHERE = "data", "forward", "backward", "update", "save", "write", "commit"
SIGNALS = dict(kill=signal.SIGKILL, stop=signal.SIGSTOP, term=signal.SIGTERM, int=signal.SIGINT)
ERRORS = {
    "raise": lambda: RuntimeError("an injected fault"),
    "enospc": lambda: OSError(28, "No space left on device"),
    "oom": lambda: torch.OutOfMemoryError("Tried to allocate 1.00 GiB (an injected fault)"),
}
KINDS = (*SIGNALS, *ERRORS, "exit", "segv", "hang", "nan", "inf")


class Fault(NamedTuple):
    rank: str
    step: int
    where: str
    kind: str


def faults(text: str | None, c: Config, world: int | None = None) -> list[Fault]:
    """What FAULT says; ValueError in one line where it says nothing, or names a place that a run of `c` on `world`
    ranks has not."""
    found = []
    for part in filter(None, (text or "").split(",")):
        rank, step, where, kind, *more = (part.split(":") + [""] * 4)[: max(4, part.count(":") + 1)]
        inside = where in ("backward", "update") or kind in ("nan", "inf")
        problem = (
            "more than four parts" if more
            else f"rank {rank!r} is neither a number nor *" if not (rank == "*" or rank.isdecimal())
            else f"there is no rank {rank} among {world}" if rank != "*" and world and int(rank) >= world
            else f"step {step!r} is not a number from 1 on" if not (step.isdecimal() and int(step))
            else f"there is no step {step} of --steps {c.steps}" if int(step) > c.steps
            else f"where {where!r} is none of {', '.join(WHERE)}" if where not in WHERE
            else f"kind {kind!r} is none of {', '.join(KINDS)}" if kind not in KINDS
            else f"{kind} is of the forward, not of {where!r}" if kind in ("nan", "inf") and where != "forward"
            else "--compile step has no such place outside its graph" if inside and c.compile == "step"
            else "--optim in-backward has no update apart" if where == "update" and c.optim == "in-backward"
            else "--cuda-graph has no such place" if c.cuda_graph and (inside or where == "forward")
            else None
        )  # fmt: skip
        if problem:
            raise ValueError(f"FAULT {part}: {problem}; expected rank:step:where:kind (see {__name__})")
        found.append(Fault(rank, int(step), where, kind))
    return found


def _happen(kind: str) -> None:
    if kind in SIGNALS:
        os.kill(os.getpid(), SIGNALS[kind])
    elif kind in ERRORS:
        raise ERRORS[kind]()
    elif kind == "exit":
        os._exit(9)
    elif kind == "segv":
        ctypes.string_at(0)
    while kind == "hang":
        time.sleep(3600)


@contextmanager
def planted(text: str | None, c: Config, step: Step, first: int, rank: int):
    """Inside it, the faults of `text` wait in a run of resolved flags and this step, which begins after `first`
    steps."""
    mine = [f for f in faults(text, c) if f.rank in ("*", str(rank))]
    if not mine or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        yield
        return
    done, at = set(), [first]  # at: the step that is being done, counted by its batch

    def fire(where: str, step: int) -> str | None:
        for fault in mine:
            if fault.where == where and fault.step == step and fault not in done:
                done.add(fault)
                _happen(fault.kind)
                return fault.kind
        return None

    def before(where: str, work: Callable) -> Callable:
        def faulty(*args, **kwargs):
            fire(where, at[0])
            return work(*args, **kwargs)

        return faulty

    def forward(work: Callable) -> Callable:
        def faulty(*args):
            factor = dict(nan=float("nan"), inf=float("inf")).get(fire("forward", at[0]), 1.0)
            loss = work(*args) * factor
            loss.register_hook(lambda grad: fire("backward", at[0]) and None)
            return loss

        return faulty

    def saving(where: str, work: Callable) -> Callable:
        def faulty(*args):
            saved = int(re.findall(r"step-(\d{8})", " ".join(arg for arg in args if isinstance(arg, str)))[-1])
            if where != "write":
                fire(where, saved)
            result = work(*args)
            if where == "write":
                fire(where, saved)
            return result

        return faulty

    draw = Batches.__next__

    def draw_next(self):
        at[0] += 1
        fire("data", at[0])
        return draw(self)

    with ExitStack() as stack:
        def patch(owner, name: str, value) -> None:
            stack.enter_context(mock.patch.object(owner, name, value))

        patch(Batches, "__next__", draw_next)
        if c.compile == "step":
            patch(step, "graph", before("forward", step.graph))
        else:
            patch(step, "loss_fn", forward(step.loss_fn))
            patch(step, "update_fn", before("update", step.update_fn))
        for where, name in dict(save="_begin", write="_write", commit="_commit").items():
            patch(saver, name, saving(where, getattr(saver, name)))
        yield
