"""Plants faults in runs of main.py and finetune.py, to see what they do about them.

    torchrun --nproc-per-node 2 tests/planted.py '*:3:data:term,1:7:write:enospc' main.py --save runs/b --save-every 1

The first word is rank:step:where:kind, or several with commas between; then come a program and its flags.

rank: a number, or * for all ranks. step: from 1 on, as in the log.
where: data (before the batch is read), forward, backward, update, save (before anything is written), write (this rank's
files are written, not committed), commit (before the directory gets its final name).
kind: kill, stop, term, int, hup, quit, usr1, xcpu, segv (signals), exit (code 9), hang (sleeps for ever), raise
(RuntimeError), enospc (disk full), oom (out of memory); only in forward, nan and inf (this rank's loss).
Each happens once, and not again after a restart by torchrun. The product does not know of them: `planting` patches it.
"""

import os
import re
import runpy
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple
from unittest import mock

if __name__ == "__main__":
    sys.path.insert(1, str(Path(__file__).parent.parent))

import torch

from trainer import run
from trainer.checkpoint import save as saver
from trainer.step import Step

WHERE = "data", "forward", "backward", "update", "save", "write", "commit"
SIGNALS = {
    name: signal.Signals[f"SIG{name.upper()}"]
    for name in ("kill", "stop", "term", "int", "hup", "quit", "usr1", "xcpu", "segv")
}
ERRORS = {
    "raise": lambda: RuntimeError("an injected fault"),
    "enospc": lambda: OSError(28, "No space left on device"),
    "oom": lambda: torch.OutOfMemoryError("Tried to allocate 1.00 GiB (an injected fault)"),
}
KINDS = (*SIGNALS, *ERRORS, "exit", "hang", "nan", "inf")


class Fault(NamedTuple):
    rank: str  # decimal, or "*"
    step: int
    where: str
    kind: str


def faults(text: str) -> list[Fault]:
    """The faults that `text` names."""
    found = []
    for part in text.split(","):
        rank, step, where, kind = part.split(":")
        assert where in WHERE and kind in KINDS, f"fault {part}: expected rank:step:where:kind (see tests/planted.py)"
        found.append(Fault(rank, int(step), where, kind))
    return found


def _happen(kind: str) -> None:
    if kind in SIGNALS:
        os.kill(os.getpid(), SIGNALS[kind])
    elif kind in ERRORS:
        raise ERRORS[kind]()
    elif kind == "exit":
        os._exit(9)
    while kind == "hang":
        time.sleep(3600)


class _Faults:  # of one rank
    def __init__(self, mine: list[Fault], first: int):
        self.mine, self.step = mine, first  # the step that is being done, counted by its batch

    def fire(self, where: str, step: int) -> str | None:
        """Lets the fault of this place and step happen, if there is one, and returns its kind if the process lives."""
        for fault in self.mine:
            if fault.where == where and fault.step == step:
                self.mine.remove(fault)
                _happen(fault.kind)
                return fault.kind
        return None

    def around(self, where: str, work: Callable, loss: bool) -> Callable:
        """`work` after the fault of this place, or before it if that is "write". loss: whether it returns the loss."""

        def faulty(*args, **kwargs):
            self.step += where == "data"
            # A save in the background may be of an earlier step: its path says of which.
            saved = re.findall(r"step-(\d{8})", " ".join(arg for arg in args if isinstance(arg, str)))
            step = int(saved[-1]) if saved else self.step
            kind = self.fire(where, step) if where != "write" else None
            result = work(*args, **kwargs)
            if where == "write":
                self.fire(where, step)
            if loss:
                result = result * (float(kind) if kind in ("nan", "inf") else 1.0)
                result.register_hook(lambda grad: self.fire("backward", step) and None)
            return result

        return faulty


@contextmanager
def _planted(text: str, own: run.Run, step: Step):
    """Inside it, the faults that `text` names for this rank wait in a run with this step."""
    c = own.config
    mine = [fault for fault in faults(text) if fault.rank in ("*", str(own.rank))]
    if not mine or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        yield
        return
    waiting = _Faults(mine, own.first)
    places = [
        ("data", type(own.batches), "__next__"), ("save", saver, "_begin"), ("write", saver, "_write"),
        ("commit", saver, "_commit"), ("forward", step, "graph" if c.compile == "step" else "loss_fn"),
    ]  # fmt: skip
    if c.compile != "step":
        places.append(("update", step, "compiled_update" if step.compiled_update else "gradient_norm"))
    with ExitStack() as stack:
        for where, owner, name in places:
            faulty = waiting.around(where, getattr(owner, name), loss=name == "loss_fn")
            stack.enter_context(mock.patch.object(owner, name, faulty))
        yield


@contextmanager
def planting(text: str):
    """Inside it every run of this process has the faults that `text` names."""
    training = run.Run.training

    @contextmanager
    def with_faults(own: run.Run, step: Step, train_step: Callable):
        with _planted(text, own, step), training(own, step, train_step) as step_fn:
            yield step_fn

    with mock.patch.object(run.Run, "training", with_faults):
        yield


if __name__ == "__main__":
    planted_faults = sys.argv[1]
    sys.argv = sys.argv[2:]
    with planting(planted_faults):
        runpy.run_path(sys.argv[0], run_name="__main__")
