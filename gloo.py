"""Gloo process groups that leave the heap whole. Imports only torch, and may be copied.

    one_worker_thread()       # on every rank, before its first init_process_group or init_device_mesh

torch gives each gloo group two worker threads. When a collective is done, both write its name into one std::string of
the group, with no lock (`pgStatus_->lastCompletedWorkName` in ProcessGroupGloo::runLoop; torch 2.11, 2.13 and 2.14),
and those of functional collectives ("ALLGATHER_COALESCED") are too long for the string's own buffer: memory is freed
twice, and the process dies of that now or later, or computes with what it reads there. With one thread the collectives
of a group run one after the other, as NCCL's do.

`python tests/gloo_race.py`, 40'000 collectives on two ranks, torch 2.13.0+cpu: a rank dies or hangs in 9 of 10 runs
with two threads, in 0 of 10 with one.
"""

import os
from datetime import timedelta

import torch.distributed as dist


def one_worker_thread() -> None:
    """All gloo groups that this process makes from now on have one worker thread. A second call does nothing."""
    if not dist.is_gloo_available():
        return
    gloo = dist.ProcessGroupGloo
    made = gloo.__init__
    if getattr(made, "__module__", None) == __name__:
        return

    def make(self, store, rank: int, size: int, options=None, timeout: timedelta | None = None, **others) -> None:
        if isinstance(options, timedelta):
            options, timeout = None, options
        if options is None:  # as torch does
            options = gloo._Options()
            names = os.environ.get("GLOO_SOCKET_IFNAME", "")
            devices = [gloo.create_device(interface=name) for name in names.split(",")] if len(names) > 1 else []
            options._devices = devices or [gloo.create_default_device()]
            if timeout is not None:
                options._timeout = timeout
            for name, value in others.items():  # torch 2.14: enable_reconfigure
                setattr(options, name, value)
        options._threads = 1
        made(self, store, rank, size, options)

    gloo.__init__ = make
