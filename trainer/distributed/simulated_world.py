"""A simulated world: this process plays one rank of N on one device; data really moves, links take modelled time.

    start(8, link("h100-nvlink"))                  # instead of dist.init_process_group; the rest runs unchanged
    log()                                          # every collective since the last clear
    stop()

All ranks are taken to hold equal tensors: a gather tiles the local shard, a sum multiplies by N, and clipping sees the
norm of N equal shards. A collective occupies its group's stream for max(copy, latency + bytes/bandwidth) and the
consumer waits for an event, as with NCCL; on a CPU a thread per group keeps time. Not simulated: other data or smaller
last shards on other ranks, stragglers, topology, contention except by our own copy.

The backend is torch's C++ FakeProcessGroup. The `c10d::` operators that every route ends in are replaced for the whole
process, so a simulated world never exists beside a real group. An all-to-all brings from each rank what this one sends
to itself, repeated or cut to the size that is expected. PREMUL_SUM (FSDP2's set_gradient_divide_factor), reducing to
one rank and point-to-point raise NotImplementedError.

Private names of torch: the signatures of the `c10d::` operators (`_KERNELS`); from torch._C._distributed_c10d
FakeProcessGroup and its _create_internal, FakeWork, ProcessGroup and _create_work_from_future; dist.Backend._plugins,
torch.cuda._compile_kernel, torch._C._AutoDispatchBelowAutograd, torch.library.Library._destroy.
"""

import time
import warnings
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (
    FakeProcessGroup,
    FakeWork,
    ProcessGroup,
    _create_work_from_future,
)

from trainer.collective_time import Link, link

__all__ = ["CollectiveCall", "Link", "link", "log", "start", "stop", "summary"]
NAME = "sim"  # of the backend; not "fake", which Inductor treats in its own way


class CollectiveCall(NamedTuple):  # as `log` lists it
    # "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "scatter", "gather",
    # "barrier".
    op: str
    group: str
    ranks: int
    # Of the whole, unsharded tensors; of an all-to-all what a rank has to send or to receive.
    nbytes: int
    async_op: bool
    seconds: float  # as modelled; the copy may have taken longer


class _World:
    def __init__(self, link: Link | Callable[[list[int]], Link]):
        self.link = link
        self.log = deque(maxlen=1_000_000)
        self.streams, self.clock = {}, None  # on CUDA
        # On a CPU, by group: the link's thread, and until when it is busy.
        self.workers = {}
        self.busy = {}
        self.library = torch.library.Library("c10d", "IMPL")
        # Torch warns that kernels are overridden, which is wanted.
        with warnings.catch_warnings(action="ignore"):
            for device in ("CPU", "CUDA"):
                for name, kernel in _KERNELS.items():
                    self.library.impl(name, kernel, device, allow_override=True)


_world: _World | None = None


def start(world: int, link: Link, device: torch.device | str = "cpu", rank: int = 0) -> None:
    """Makes the default process group, in which this process is `rank` of `world` ranks. link: between any two ranks.
    device: where collectives will run. Raises RuntimeError if there already is a process group."""
    global _world
    if dist.is_initialized():
        raise RuntimeError(
            "a simulated world needs a process of its own: there already is a process group"
        )
    if "SIM" not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
    _world = _World(link)
    dist.init_process_group(NAME, rank=rank, world_size=world, store=dist.HashStore())
    _world.clock = _Clock() if torch.device(device).type == "cuda" else None


def _create(options, _) -> FakeProcessGroup:
    return FakeProcessGroup._create_internal(options.group_rank, options.group_size)


def stop() -> None:
    """Ends the process group and restores the operators' own kernels. Does nothing without a simulated world."""
    global _world
    if _world is None:
        return
    if dist.is_initialized():
        dist.destroy_process_group()
    for worker in _world.workers.values():
        worker.shutdown(wait=False)
    _world.library._destroy()
    _world = None


def log() -> deque[CollectiveCall]:
    """Every collective so far; `log().clear()` empties it. Those of a CUDA graph are listed once, from its capture."""
    return _world.log


def use(link: Link | Callable[[list[int]], Link]) -> None:
    """From now on collectives take the time of `link`, or of that which it gives for the ranks of their group."""
    _world.link = link


def summary(collectives) -> dict[str, dict]:
    """{op: {"n": calls, "mib": MiB of whole tensors, "ms": modelled time}} of CollectiveCalls; no barriers."""
    table = {}
    for entry in collectives:
        if entry.op != "barrier":
            n, mib, ms = table.get(entry.op, (0, 0.0, 0.0))
            table[entry.op] = n + 1, mib + entry.nbytes / 2**20, ms + 1e3 * entry.seconds
    return {op: dict(n=n, mib=round(mib, 3), ms=round(ms, 3)) for op, (n, mib, ms) in table.items()}


def _gather(out: Tensor, shard: Tensor, ranks: int, rank: int) -> None:
    """Fills `out` with what `ranks` ranks hold of which this one, `rank`, holds `own`."""
    # `own` may be a chunk of `out`, as in FSDP2.
    out.view(ranks, -1).copy_(shard.reshape(1, -1).expand(ranks, -1))


def _reduce(t: Tensor, op, ranks: int) -> None:
    """Reduces `ranks` tensors that are all equal to `t`, into `t`. op: a ReduceOp, or one in a box."""
    kinds = dist.ReduceOp.RedOpType
    op = op.op() if hasattr(op, "op") else op
    if op == kinds.SUM:
        t.mul_(ranks)
    elif op == kinds.PRODUCT:
        t.pow_(ranks)
    elif op not in (kinds.AVG, kinds.MIN, kinds.MAX, kinds.BAND, kinds.BOR):
        raise NotImplementedError(f"a simulated world has no reduction by {kinds(op).name}")


class _Clock:
    """Keeps a CUDA stream busy for the time of a link or of the copy, whichever is longer: one kernel sets a deadline
    before the copy, and one waits for it after. Both read the GPU's nanosecond clock, not that of an SM."""

    SOURCE = """
    __device__ __forceinline__ unsigned long long now() {
        unsigned long long t; asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t)); return t;
    }
    extern "C" __global__ void set_deadline(unsigned long long* d, int us) { *d = now() + 1000ull * us; }
    extern "C" __global__ void wait_deadline(unsigned long long* d) {
        unsigned long long end = *d; while (now() < end) __nanosleep(200);
    }"""

    def __init__(self):  # compiled before any CUDA graph is captured
        from torch.utils import cpp_extension  # imports setuptools

        # Torch's compiler wants the headers of a toolkit, which pip's packages are not and these kernels do not need.
        with mock.patch.object(cpp_extension, "CUDA_HOME", cpp_extension.CUDA_HOME or "/usr"):
            made = [
                torch.cuda._compile_kernel(self.SOURCE, name)
                for name in ("set_deadline", "wait_deadline")
            ]
        self.set, self.wait = made
        self.deadlines = {}

    def occupy(self, device: torch.device, seconds: float, copy: Callable) -> None:
        """Runs `copy` on the current stream, which is then busy for at least `seconds`."""
        if seconds <= 0:
            copy()
            return
        key = (device, torch.cuda.current_stream(device).stream_id)
        one = (1, 1, 1)
        if key not in self.deadlines:
            self.deadlines[key] = torch.zeros(1, dtype=torch.int64, device=device)
        self.set(one, one, (self.deadlines[key], max(1, round(seconds * 1e6))))
        copy()
        self.wait(one, one, (self.deadlines[key],))


def _on_cuda(
    pg: ProcessGroup,
    device: torch.device,
    seconds: float,
    async_op: bool,
    copy: Callable,
    value: list,
):
    current = torch.cuda.current_stream(device)
    clock = _world.clock
    # Like NCCL since torch 2.8: it runs on the current stream, and wait() does nothing.
    if not async_op:
        clock.occupy(device, seconds, copy)
        return FakeWork()
    key = pg.group_name, device
    if key not in _world.streams:
        _world.streams[key] = torch.cuda.Stream(device)
    stream = _world.streams[key]
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        clock.occupy(device, seconds, copy)
        future = torch.futures.Future(devices=[device])
        # Records an event on `stream`, for which wait() makes the then current one wait.
        future.set_result(value)
    return _create_work_from_future(future)


def _sleep_until(end: float) -> None:
    time.sleep(max(0.0, end - time.perf_counter()))


def _on_cpu(pg: ProcessGroup, seconds: float, async_op: bool, copy: Callable, value: list):
    """The data moves at once, so that errors are raised here; who waits for it waits until the link has brought it."""
    began = time.perf_counter()
    copy()
    # The link of this group brings one collective after the other: by the clock, since its thread may wake up late.
    end = _world.busy[pg.group_name] = max(began, _world.busy.get(pg.group_name, 0.0)) + seconds
    if not async_op:
        _sleep_until(end)
        return FakeWork()
    future = torch.futures.Future()

    def arrive() -> None:
        _sleep_until(end)
        future.set_result(value)

    if seconds:
        if pg.group_name not in _world.workers:
            _world.workers[pg.group_name] = ThreadPoolExecutor(1)
        _world.workers[pg.group_name].submit(arrive)
    else:
        arrive()
    return _create_work_from_future(future)


def _run(
    op: str,
    group,
    outs: list,
    ins: list,
    async_op: bool,
    body: Callable[[int, int], None],
    nbytes: int,
):
    """Logs a collective and runs `body(ranks, rank)`, which fills `outs`, for the link's time. Returns boxed Work."""
    pg = _unboxed(group)
    link = _world.link(dist.get_process_group_ranks(pg)) if callable(_world.link) else _world.link
    seconds = link.seconds(op, nbytes, pg.size())
    _world.log.append(CollectiveCall(op, pg.group_name, pg.size(), nbytes, bool(async_op), seconds))

    def copy():
        below = torch._C._AutoDispatchBelowAutograd()
        with torch.no_grad(), below, torch.profiler.record_function(f"{NAME}::{op}[{pg.size()}]"):
            body(pg.size(), pg.rank())

    value = _flat([*outs, *ins])  # kept alive as long as the Work, as NCCL does
    if value[0].is_cuda:
        return _on_cuda(pg, value[0].device, seconds, async_op, copy, value).boxed()
    return _on_cpu(pg, seconds, async_op, copy, value).boxed()


def _flat(tensors: list) -> list[Tensor]:
    return [t for item in tensors for t in ([item] if isinstance(item, Tensor) else item)]


def _nbytes(tensors: list) -> int:
    return sum(t.nbytes for t in _flat(tensors))


def _unboxed(group) -> ProcessGroup:
    return group if isinstance(group, ProcessGroup) else ProcessGroup.unbox(group)


# Here and in `_reduce_scatter` each whole tensor is one tensor, or the list of its N chunks.
def _all_gather(outs, ins, group, async_op=True, *_):
    def body(n, r):
        for out, shard in zip(outs, ins, strict=True):
            whole = out if isinstance(out, Tensor) else shard.new_empty(n, *shard.shape)
            _gather(whole, shard, n, r)
            if whole is not out:
                for t, chunk in zip(out, whole, strict=True):
                    t.copy_(chunk)

    return _run("all_gather", group, outs, ins, async_op, body, _nbytes(outs))


def _reduce_scatter(outs, ins, group, op, async_op=True, *_):
    def body(n, r):
        for out, whole in zip(outs, ins, strict=True):
            chunks = whole.view(n, -1) if isinstance(whole, Tensor) else whole
            _reduce(out.copy_(chunks[r].view_as(out)), op, n)

    return _run("reduce_scatter", group, outs, ins, async_op, body, _nbytes(ins))


def _all_reduce(tensors, group, op, sparse_indices=None, async_op=True, *_):
    def body(n, r):
        for t in tensors:
            _reduce(t, op, n)

    return _run("all_reduce", group, tensors, [], async_op, body, _nbytes(tensors))


def _all_reduce_coalesced(tensors, group, op, async_op=True, *_):
    return _all_reduce(tensors, group, op, None, async_op)


def _broadcast(tensors, group, root, root_tensor, async_op=True, *_):
    return _run("broadcast", group, tensors, [], async_op, lambda n, r: None, _nbytes(tensors))


def _scatter(outs, ins, group, root, async_op=True, *_):
    """Only the root knows what it scatters, so this rank must be the root; it receives its own chunk."""
    if _unboxed(group).rank() != root:
        raise NotImplementedError(
            "a simulated rank does not know what another scatters: pass src_data_rank=None"
        )
    return _run(
        "scatter", group, outs, ins, async_op, lambda n, r: outs[0].copy_(ins[0][r]), _nbytes(ins)
    )


def _gather_to(outs, ins, group, root, async_op=True, *_):
    def body(n, r):
        for t in _flat(outs):
            t.copy_(ins[0])

    return _run("gather", group, outs, ins, async_op, body, _unboxed(group).size() * _nbytes(ins))


def _all_to_all(out, outgoing, group, out_sizes, own_sizes, async_op=True, *_):
    def body(n, r):
        sizes, sent = (
            each or [len(t) // n] * n for each, t in ((out_sizes, out), (own_sizes, outgoing))
        )
        mine = outgoing.split(sent)[r].flatten()
        for t in out.split(sizes):
            if t.numel():
                # It owns nothing: any values of that size.
                source = mine if len(mine) else outgoing.flatten()
                source = source if len(source) else t.new_zeros(1)
                t.copy_(source.repeat(-(-t.numel() // len(source)))[: t.numel()].view_as(t))

    return _run(
        "all_to_all", group, [out], [outgoing], async_op, body, max(out.nbytes, outgoing.nbytes)
    )


def _barrier(tensor, group, device_ids, async_op=True, *_):
    return _run("barrier", group, [tensor], [], False, lambda n, r: None, 0)


def _with_outputs(kernel: Callable) -> Callable:
    """For an operator that returns its outputs beside the Work."""
    return lambda outs, *args: (outs, kernel(outs, *args))


def _of_one(kernel: Callable) -> Callable:
    """For an operator of one tensor in and one out, which returns the latter beside the Work."""
    return lambda out, shard, *args: (out, kernel([out], [shard], *args))


def _refuse(name: str) -> Callable:
    def kernel(*_, **__):
        raise NotImplementedError(f"a simulated world has no c10d::{name}")

    return kernel


_KERNELS = {
    "_allgather_base_": _of_one(_all_gather),
    "allgather_into_tensor_coalesced_": _all_gather,
    "allgather_": _with_outputs(_all_gather),
    "allgather_coalesced_": _all_gather,
    "_reduce_scatter_base_": _of_one(_reduce_scatter),
    "reduce_scatter_tensor_coalesced_": _reduce_scatter,
    "reduce_scatter_": _with_outputs(_reduce_scatter),
    "allreduce_": _with_outputs(_all_reduce),
    "allreduce_coalesced_": _all_reduce_coalesced,
    "broadcast_": _with_outputs(_broadcast),
    "scatter_": _with_outputs(_scatter),
    "gather_": _gather_to,
    "barrier": _barrier,
    "alltoall_base_": _all_to_all,
}
REFUSED = "reduce_", "alltoall_", "send", "recv_", "recv_any_source_"
_KERNELS |= {name: _refuse(name) for name in REFUSED}
