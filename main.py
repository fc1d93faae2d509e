"""Trains the transformer of model.py under simple_fsdp.data_parallel; appends a row of what it cost. See --help.

    python main.py                                                      # one rank, CPU or GPU
    torchrun --nproc-per-node 4 main.py --depth 8 --compile fwdbwd      # the main job

Parse, build, run, report. Exit codes: trainer/fault_tolerance/errors.py. A run that fails on its way has a row, too.
"""

import signal
import sys

from trainer import config as flags
from trainer.checks import check_at_once
from trainer.distributed.terminal import Progress, ranks

if __name__ == "__main__":  # before torch is imported: --help and bad flags answer at once
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C has no traceback; Signals takes over
    RANKS = ranks()
    CONFIG = flags.parse(sys.argv[1:], RANKS[0], RANKS[2])
    if RANKS[0] == 0:
        check_at_once(CONFIG, RANKS[2])
    PROGRESS = Progress("importing torch", speak=RANKS[0] == 0)

from trainer.run import Run, execute


def main(c: flags.Config, rank: int, local_rank: int, world: int, progress: Progress | None = None) -> int:
    """One run; returns its exit code, as trainer.run.execute."""
    return execute(Run, c, rank, local_rank, world, progress)


if __name__ == "__main__":
    with PROGRESS:
        status = main(CONFIG, *RANKS, PROGRESS)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, when another rank has left first
    sys.exit(status)
