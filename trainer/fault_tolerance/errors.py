"""Why a run ended, for people and scripts: the row's outcome, the exit code and one line of text.

0 done, 1 anything not foreseen, 2 bad flags or environment, 3 bad data, 4 a checkpoint that cannot be used or written,
5 non-finite training, 6 out of memory, 7 a rank hangs, is gone or runs something else, 143 stopped by SIGTERM (130: by
Ctrl-C, 129: by SIGHUP, 131: by SIGQUIT, 138: by SIGUSR1, 152: by SIGXCPU) after saving.
"""

import re
import sys
import traceback
from pathlib import Path
from tempfile import gettempdir
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from trainer.checkpoint.load import TrainState
from trainer.checkpoint.manifest import CheckpointError, Refused
from trainer.config import Config
from trainer.data import DataError
from trainer.distributed.control import Desync, Stopped
from trainer.fault_tolerance.nonfinite import NonFinite
from trainer.fault_tolerance.watchdog import Watchdog
from trainer.measuring import memory
from trainer.step import Step
from trainer.terminal.output import limit_behind, tell, tell_error
from trainer.terminal.text import one_line

# Torch has no type for a peer that is gone.
LOST = re.compile(r"gloo|NCCL|[Cc]onnection (closed|reset)|Broken pipe")
# The C++ compiler failed, or what it made, or a module that Inductor wrote, could not be
# loaded.
COMPILER = re.compile(
    r"CppCompileError|\.so: |Failed to import \S+\.py\b|'torch\._inductor\.runtime\.compile_tasks\."
)
FULL = re.compile("No space left on device|Disk quota exceeded")
PHASES = dict(fwd="forward", bwd="backward", step="the update", init="init", eval="evaluation")


class Outcome(NamedTuple):
    text: str  # for the row
    code: int  # of the process
    line: str  # for people
    common: bool  # all ranks end alike, and one of them speaks


KINDS = (  # type, exit code, whether all ranks raise it together
    (DataError, 3, False),
    (CheckpointError, 4, True),
    (Refused, 2, False),
    (NonFinite, 5, True),
    (Desync, 7, True),
)


class RunView(Protocol):  # what has to be known of a trainer.run.Run to say how it ended
    config: Config
    device: torch.device
    rank: int
    first: int  # steps of earlier runs, from which this one resumed
    state: TrainState
    step: Step | None  # None until Run.resume_into


def ended_by(
    error: BaseException, run: RunView | None, watchdog: Watchdog, debug: bool
) -> tuple[str, int]:
    """Tells people and the other ranks why this rank ends; returns the row's outcome and the exit code, or ends the
    process if another rank is gone or a signal came before the first step was done. run: None before there is one."""
    stopped = isinstance(error, Stopped)
    signum = watchdog.signals.got
    if stopped:  # perhaps by another rank, which has seen it first
        watchdog.follow_launcher()
    elif debug:
        tell("".join(traceback.format_exception(error)).rstrip("\n"), sys.stderr)
    if signum and run is not None and not (watchdog.begun or stopped):
        # Ctrl-C ends the compiler as well, which then looks like an error of its own.
        watchdog.stop(signum)
    if watchdog.world > 1 and lost_connection(error):
        watchdog.roll_call(
            "lost the connection to another rank", f"; torch says: {one_line(error, kind=False)}"
        )
    outcome, code, line, common = outcome_of(error, run, watchdog.folder)
    first = watchdog.leave(line, code)
    if watchdog.rank == 0 if common else first:
        who = "error: " if run is None else f"error: rank {watchdog.rank}: "
        # Somebody asked for the end: that is no error.
        tell_error(line if stopped else who + line)
    return outcome, code


def outcome_of(
    error: BaseException, run: RunView | None = None, folder: Path = Path(".")
) -> Outcome:
    """What an error means for the row, the exit code and people. run: None before there is one, where a ValueError
    means bad flags; folder: for the allocator's state, written if memory ran out on a GPU."""
    if memory.out_of_memory(error):
        return _out_of_memory(error, run, folder)
    if isinstance(error, Stopped):
        saved = (
            f"saved in {run.config.save}: the same command goes on"
            if run.config.save
            else "nothing is saved without --save"
        )
        saved = saved if run.state.step > run.first else "there is nothing to save"
        line = f"stopped by {error} after step {run.state.step}; {saved}"
        return Outcome(f"stopped: {error}", 128 + error.signum, line, True)
    text = one_line(error, 500, kind=False)
    for kind, code, common in KINDS if run is not None else (*KINDS, (ValueError, 2, False)):
        if isinstance(error, kind):
            return Outcome(
                f"failed: {text}", code, text if run is None else f"failed: {text}", common
            )
    if fix := limit_behind(error):
        return Outcome(f"failed: {text}", 2, f"failed: {text}; {fix}", False)
    get_error_handler().record_exception(error)  # torchrun's summary shows the traceback
    text = f"failed: {one_line(error, 500)}"
    line = f"{text} (--debug shows where)"
    # Perhaps behind a compiler's command of a thousand characters.
    if full := FULL.search(str(error)):
        text += f"; {full[0]}"
        line += (
            f"; {full[0]}: free some in {cache_dir()} and {gettempdir()}, or name another in TMPDIR"
        )
    elif COMPILER.search(str(error)):
        # A killed compiler leaves half a library, with which each later run fails.
        line += f"; if a compilation was killed before, delete {cache_dir()} and start again"
    return Outcome(text, 1, line, False)


def lost_connection(error: BaseException) -> bool:
    """Whether a collective failed because another rank is gone."""
    known = (
        isinstance(error, dist.DistError)
        or isinstance(error, RuntimeError)
        and LOST.search(str(error))
    )
    return bool(known) and not memory.out_of_memory(error)  # NCCL allocates too


def _out_of_memory(error: BaseException, run: RunView | None, folder: Path) -> Outcome:
    phase = run.step.phase if run and run.step else "init"
    text = one_line(error, 400, kind=False)
    wanted = re.search(r"[Tt]ried to allocate ([0-9.]+ [KMG]iB|[0-9]+ bytes)", text)
    device = run.device if run is not None else torch.device("cpu")
    peak = memory.peak(device)
    has = peak.get("peak_alloc_mib") or peak.get("peak_rss_mib")
    where = PHASES[phase] + " of the first step, which compiles" * (
        phase != "init" and run.state.step == run.first
    )
    line = f"OOM {phase} ({where}): wanted {wanted[1] if wanted else 'an unknown amount'} more, peak {has} MiB; "
    fix = "lower --batch (raise --grad-accum), recompute (--remat block, --loss chunked), or "
    line += f"{fix if phase != 'init' else 'use a smaller model, or '}start more ranks"
    if device.type == "cuda":
        try:
            folder.mkdir(parents=True, exist_ok=True)
            memory.dump_snapshot(str(folder / f"memory-{run.rank}.pickle"))
            line += f"; allocations for pytorch.org/memory_viz in {folder}"
        except Exception as e:  # memory or disk: the message matters more
            line += f"; no snapshot ({type(e).__name__})"
    return Outcome(f"OOM {phase}", 6, f"{line}; torch says: {text}", False)
