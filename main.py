"""Trains the transformer of model.py under simple_fsdp.data_parallel; appends a row of what it cost. See --help.

    python main.py                                                      # one rank, CPU or GPU
    torchrun --nproc-per-node 4 main.py --depth 8 --compile fwdbwd      # the main job

Parse, build, run, report. Exit codes: trainer/fault_tolerance/errors.py. A run that fails on its way has a row, too.
"""

import os
import signal
import sys

from trainer import config as flags
from trainer.distributed.terminal import Progress, fail, ranks, tell
from trainer.experiments.checks import check_at_once
from trainer.experiments.logging import Sinks, final_lines

if __name__ == "__main__":  # before torch is imported: --help and bad flags answer at once
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C has no traceback; Signals takes over
    RANKS = ranks()
    CONFIG = flags.parse(sys.argv[1:], RANKS[0], RANKS[2])
    if RANKS[0] == 0:
        check_at_once(CONFIG, RANKS[2])
    PROGRESS = Progress("importing torch", speak=RANKS[0] == 0)

import torch

from trainer.distributed.control import Signals
from trainer.distributed.launch import connect, set_deterministic, shutdown
from trainer.experiments.summary import doing, header, row
from trainer.fault_tolerance import inject
from trainer.fault_tolerance.errors import ended_by
from trainer.fault_tolerance.watchdog import Watchdog
from trainer.parallelize import compile_options
from trainer.run import WARMUP, Run
from trainer.step import check_mode


def main(c: flags.Config, rank: int, local_rank: int, world: int, progress: Progress | None = None,
         kind: type[Run] = Run) -> int:  # fmt: skip
    """One run; returns its exit code. What cannot work ends in one line and SystemExit(2), before any process group.
    progress: on rank 0, says what is being done. kind: what the flags describe."""
    progress = progress or Progress(speak=False)
    device_type = ("cuda" if torch.cuda.is_available() else "cpu") if c.device == "auto" else c.device
    try:
        c = flags.resolve(c, device_type, world)
        world = c.world or world
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
    say, run, outcome, code = tell if rank == 0 else lambda _: None, None, "ok", 0
    try:
        progress.stage("reading the data")
        run = kind(c, device, rank, world, signals, watchdog)
        c = run.c
        if run.first >= c.steps:
            say(f"already done: {run.found.path} has the {c.steps} steps of --steps, or more")
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
        with inject.planted(os.environ.get("FAULT"), c, run.step, run.first, rank), run.saver:
            run.train(sinks)
    except (Exception, KeyboardInterrupt) as e:
        outcome, code = ended_by(e, run, watchdog, c.debug)
        if run is None:  # nothing has begun: as bad flags
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


if __name__ == "__main__":
    with PROGRESS:
        status = main(CONFIG, *RANKS, PROGRESS)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, when another rank has left first
    sys.exit(status)
