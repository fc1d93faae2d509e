"""Keeps torch's gloo process groups from corrupting memory. Imports only torch and the
standard library: copy it.

    # On every rank, before its first init_process_group or init_device_mesh.
    one_worker_thread()

torch gives each gloo group two worker threads. After a collective its thread writes the
collective's name, without a lock, into one std::string of the group
(`pgStatus_->lastCompletedWorkName` in ProcessGroupGloo::runLoop; torch 2.11, 2.13 and
2.14). Long names, as "ALLGATHER_COALESCED", are on the heap, so that two threads may
free the same memory twice: the process dies now or later, or goes on with wrong values.
With one thread, the collectives of a group run one after the other, as those of NCCL
do. `python tests/gloo_race.py`, 40'000 collectives on two ranks, torch 2.13.0+cpu: a
rank dies or hangs in 9 of 10 runs with two threads, in 0 of 10 with one.
"""

import os
from datetime import timedelta

import torch.distributed as dist


def one_worker_thread() -> None:
    """Gives one worker thread to each gloo group made from now on. Does nothing without
    gloo or a second time."""
    if not dist.is_gloo_available():
        return
    gloo = dist.ProcessGroupGloo
    original = gloo.__init__
    if getattr(original, "__module__", None) == __name__:
        return  # it is ours already

    def init(
        self,
        store,
        rank: int,
        size: int,
        options=None,
        timeout: timedelta | None = None,
        **others,
    ) -> None:
        # torch also takes the timeout in fourth place.
        if isinstance(options, timedelta):
            options, timeout = None, options
        if options is None:
            options = _default_options(gloo, timeout, others)
        options._threads = 1
        original(self, store, rank, size, options)

    gloo.__init__ = init


def _default_options(gloo: type, timeout: timedelta | None, others: dict):
    """What torch itself uses where it is given no options. Only options can tell a
    group its number of threads."""
    options = gloo._Options()
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if len(interfaces) > 1:
        try:
            devices = [
                gloo.create_device(interface=name) for name in interfaces.split(",")
            ]
        except RuntimeError as error:
            raise ValueError(
                f"GLOO_SOCKET_IFNAME={interfaces}: gloo finds no address of it here; "
                "name interfaces of this machine"
            ) from error
        options._devices = devices
    else:
        options._devices = [gloo.create_default_device()]
    if timeout is not None:
        options._timeout = timeout
    for name, value in others.items():  # torch 2.14: enable_reconfigure
        setattr(options, name, value)
    return options
