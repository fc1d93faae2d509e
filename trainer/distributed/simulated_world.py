"""A simulated world: this process plays one rank of N on one device; data really moves, links take modelled time.

    start(8, link("h100-nvlink"))                  # instead of dist.init_process_group; the rest runs unchanged
    mesh = dist.init_device_mesh("cuda", (2, 4), mesh_dim_names=("replicate", "shard"))
    ...                                            # eager or compiled; simple_fsdp, FSDP2, DDP
    log()                                          # every collective since the last clear
    stop()

All ranks are taken to hold equal tensors: a gather tiles the local shard, a reduction by "sum" multiplies by N, one by
"avg" changes nothing. So with parameters whose shards are equal (`tile_`) losses and gradients are those of one
process, and a wrong scale shows; with coded=True rank j holds (1 + j/16) times the base: a wrong order shows as well.

Time: a collective occupies its group's stream for max(copy, latency + bytes/bandwidth) and the consumer waits for an
event, as with NCCL; on a CPU a thread per group keeps time. Not simulated: other data on other ranks, the smaller last
shards of other ranks, stragglers, topology, contention for SMs and memory bandwidth except by our own copy, NCCL's
buffers (which max_memory_allocated does not count either). Clipping sees the norm of N equal shards.

How: the backend is torch's C++ FakeProcessGroup, which keeps names, meshes, splits and coalescing. What it computes is
replaced below it, in the `c10d::` operators that every route ends in: functional collectives, DTensor, FSDP2 and DDP's
reducer. These replacements hold for the whole process, so a simulated world never exists beside a real group.
PREMUL_SUM (FSDP2's set_gradient_divide_factor), all-to-all and point-to-point raise NotImplementedError.

Private names of torch: the signatures of the `c10d::` operators (`_KERNELS`); from torch._C._distributed_c10d
FakeProcessGroup and its _create_internal, FakeWork, ProcessGroup and _create_work_from_future; dist.Backend._plugins,
torch.cuda._compile_kernel, torch._C._AutoDispatchBelowAutograd, torch.library.Library._destroy.
"""

import queue
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeProcessGroup, FakeWork, ProcessGroup, _create_work_from_future

from trainer.costs import Link, link

__all__ = ["CollectiveCall", "Link", "link", "log", "start", "stop", "summary", "tile_"]
NAME = "sim"  # of the backend; not "fake", which Inductor treats in its own way


class CollectiveCall(NamedTuple):
    """One call of a collective, as `log` lists it."""

    op: str  # "all_gather", "reduce_scatter", "all_reduce", "broadcast", "scatter", "gather" or "barrier"
    group: str
    ranks: int
    nbytes: int  # of the whole, unsharded tensors
    async_op: bool
    seconds: float  # as modelled; the copy may have taken longer


class _World:
    def __init__(self, link: Link, coded: bool):
        self.link, self.coded = link, coded
        self.log = deque(maxlen=1_000_000)
        self.streams, self.workers, self.clock = {}, {}, None
        self.library = torch.library.Library("c10d", "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that kernels are overridden, which is wanted
            for device in ("CPU", "CUDA"):
                for name, kernel in _KERNELS.items():
                    self.library.impl(name, kernel, device, allow_override=True)


_world: _World | None = None


def start(world: int, link: Link, device: torch.device | str = "cpu", rank: int = 0, coded: bool = False) -> None:
    """Makes the default process group, in which this process is `rank` of `world` ranks.

    link: between any two ranks. device: where collectives will run. coded: the shards of rank j are taken to be
    (1 + j/16) times a common one, instead of equal. Raises RuntimeError if there already is a process group."""
    global _world
    if dist.is_initialized():
        raise RuntimeError("a simulated world needs a process of its own: there already is a process group")
    if "SIM" not in dist.Backend._plugins:

        def create(options, _):
            return FakeProcessGroup._create_internal(options.group_rank, options.group_size)

        dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu", "cuda"])
    _world = _World(link, coded)
    dist.init_process_group(NAME, rank=rank, world_size=world, store=dist.HashStore())
    if torch.device(device).type == "cuda":
        _world.clock = _Clock()


def stop() -> None:
    """Ends the process group and restores the operators' own kernels. Does nothing without a simulated world."""
    global _world
    if _world is None:
        return
    if dist.is_initialized():
        dist.destroy_process_group()
    for worker in _world.workers.values():
        worker.jobs.put(None)
    _world.library._destroy()
    _world = None


def log() -> deque[CollectiveCall]:
    """Every collective so far, in order of calls; `log().clear()` empties it. The replay of a CUDA graph calls no
    operator, so its collectives are listed once, from the capture."""
    return _world.log


def summary(collectives) -> dict[str, dict]:
    """{op: {"n": calls, "mib": MiB of whole tensors, "ms": modelled time}} of CollectiveCalls; no barriers."""
    table = {}
    for each in collectives:
        if each.op != "barrier":
            row = table.setdefault(each.op, dict(n=0, mib=0.0, ms=0.0))
            for key, value in dict(n=1, mib=each.nbytes / 2**20, ms=1e3 * each.seconds).items():
                row[key] += value
    return {op: {k: round(v, 3) for k, v in row.items()} for op, row in table.items()}


@torch.no_grad()
def tile_(p: Tensor, ranks: int, coded: bool = False) -> None:
    """Overwrites a whole parameter [R, ...] so that its `ranks` shards on dimension 0 are equal: its first chunk,
    repeated (coded: times 1 + j/16 for rank j). For a comparison of a simulated world with one process: done after
    each step of an elementwise optimizer there, it gives what rank 0's step gives here. Raises ValueError where R does
    not divide by `ranks`."""
    if p.shape[0] % ranks:
        raise ValueError(f"shape {tuple(p.shape)}: dimension 0 must divide by {ranks} for its shards to be equal")
    chunks = p.view(ranks, -1)
    chunks.copy_(chunks[:1].clone() * (_codes(chunks) if coded else 1.0))


# ---------------------------------------------------------------- what the ranks hold


def _codes(chunks: Tensor) -> Tensor:
    return (1 + torch.arange(len(chunks), device=chunks.device, dtype=chunks.dtype) / 16).view(-1, 1)


def _gather(out: Tensor, own: Tensor, ranks: int, rank: int) -> None:
    chunks, own = out.view(ranks, -1), own.reshape(1, -1)
    if _world.coded and out.is_floating_point():
        codes = _codes(chunks)
        own = own / codes[rank] * codes
    chunks.copy_(own.expand_as(chunks))  # expanded, it may be a chunk of `out`, as FSDP2 has it


def _reduce(t: Tensor, op, ranks: int) -> None:
    """Reduces `ranks` tensors that are all equal to `t`, into `t`."""
    kinds = dist.ReduceOp.RedOpType
    if op == kinds.SUM:
        t.mul_(ranks)
    elif op == kinds.PRODUCT:
        t.pow_(ranks)
    elif op not in (kinds.AVG, kinds.MIN, kinds.MAX, kinds.BAND, kinds.BOR):
        raise NotImplementedError(f"a simulated world has no reduction by {kinds(op).name}")


def _scatter(out: Tensor, whole: Tensor, op, ranks: int, rank: int) -> None:
    out.view(-1).copy_(whole.view(ranks, -1)[rank])
    _reduce(out, op, ranks)


# ---------------------------------------------------------------- when they have it


class _Clock:
    """Keeps a CUDA stream busy for the time of a link: a kernel sets a deadline before the copy, and after it another
    one, a single thread, waits for that deadline. Both read the GPU's nanosecond clock, which does not depend on the
    clock of the SMs. The stream is so occupied for the link's time or the copy's, whichever is longer."""

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
            made = [torch.cuda._compile_kernel(self.SOURCE, name) for name in ("set_deadline", "wait_deadline")]
        self.set, self.wait = made
        self.deadlines = {}

    def occupy(self, device: torch.device, seconds: float, copy: Callable) -> None:
        """Runs `copy` on the current stream, which is then busy for at least `seconds`."""
        if seconds <= 0:
            copy()
            return
        key, one = (device, torch.cuda.current_stream(device).stream_id), (1, 1, 1)
        if key not in self.deadlines:
            self.deadlines[key] = torch.zeros(1, dtype=torch.int64, device=device)
        self.set(one, one, (self.deadlines[key], max(1, round(seconds * 1e6))))
        copy()
        self.wait(one, one, (self.deadlines[key],))


class _Worker(threading.Thread):
    """The link of one group on a CPU: a thread that runs one collective at a time."""

    def __init__(self):
        super().__init__(daemon=True)
        self.jobs = queue.SimpleQueue()
        self.start()

    def run(self):
        while (job := self.jobs.get()) is not None:
            seconds, copy, future, value = job
            try:
                _sleeping(seconds, copy)
                future.set_result(value)
            except BaseException as e:
                future.set_exception(e)
            del job, copy, future, value


def _sleeping(seconds: float, copy: Callable) -> None:
    end = time.perf_counter() + seconds
    copy()
    time.sleep(max(0.0, end - time.perf_counter()))


def _on_cuda(pg: ProcessGroup, device: torch.device, seconds: float, async_op: bool, copy: Callable, value: list):
    current, clock = torch.cuda.current_stream(device), _world.clock
    if not async_op:  # like NCCL since torch 2.8: it runs on the current stream, and wait() does nothing
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
        future.set_result(value)  # records an event on `stream`, for which wait() makes the then current one wait
    return _create_work_from_future(future)


def _run(op: str, pg: ProcessGroup, outs: list[Tensor], ins: list[Tensor], async_op: bool, body: Callable, nbytes: int):
    """Logs a collective and runs `body`, which fills `outs` from `ins`, for as long as the link takes. Returns the
    boxed Work. nbytes: of the whole, unsharded tensors."""
    seconds = _world.link.seconds(op, nbytes, pg.size())
    _world.log.append(CollectiveCall(op, pg.group_name, pg.size(), nbytes, bool(async_op), seconds))

    def copy():
        below = torch._C._AutoDispatchBelowAutograd()
        with torch.no_grad(), below, torch.profiler.record_function(f"{NAME}::{op}[{pg.size()}]"):
            body()

    value = [*outs, *ins]  # kept alive as long as the Work, as NCCL does
    device = value[0].device
    if device.type == "cuda":
        return _on_cuda(pg, device, seconds, async_op, copy, value).boxed()
    if not async_op:
        _sleeping(seconds, copy)
        return FakeWork().boxed()
    future = torch.futures.Future()
    if seconds:
        if pg.group_name not in _world.workers:
            _world.workers[pg.group_name] = _Worker()
        _world.workers[pg.group_name].jobs.put((seconds, copy, future, value))
    else:
        copy()
        future.set_result(value)
    return _create_work_from_future(future).boxed()


# ---------------------------------------------------------------- the c10d operators


def _nbytes(tensors) -> int:
    return sum(t.nbytes for t in tensors)


def _group(boxed) -> tuple[ProcessGroup, int, int]:
    pg = boxed if isinstance(boxed, ProcessGroup) else ProcessGroup.unbox(boxed)
    return pg, pg.size(), pg.rank()


def _kind(boxed):
    return boxed.op() if hasattr(boxed, "op") else boxed


def _gather_coalesced(outs, ins, group, async_op=True, *_):
    pg, n, r = _group(group)
    body = lambda: [_gather(o, i, n, r) for o, i in zip(outs, ins, strict=True)]  # noqa: E731
    return _run("all_gather", pg, outs, ins, async_op, body, _nbytes(outs))


def _gather_base(out, own, group, async_op=True, *_):
    return out, _gather_coalesced([out], [own], group, async_op)


def _gather_list(outs, ins, group, async_op=True, *_):
    pg, n, r = _group(group)
    flat = [t for each in outs for t in each]

    def body():
        for each, own in zip(outs, ins, strict=True):
            whole = own.new_empty(n, *own.shape)
            _gather(whole, own, n, r)
            for t, chunk in zip(each, whole, strict=True):
                t.copy_(chunk)

    return outs, _run("all_gather", pg, flat, ins, async_op, body, _nbytes(flat))


def _gather_list_coalesced(outs, ins, group, async_op=True, *_):
    return _gather_list(outs, ins, group, async_op)[1]


def _scatter_coalesced(outs, ins, group, op, async_op=True, *_):
    pg, n, r = _group(group)
    body = lambda: [_scatter(o, i, _kind(op), n, r) for o, i in zip(outs, ins, strict=True)]  # noqa: E731
    return _run("reduce_scatter", pg, outs, ins, async_op, body, _nbytes(ins))


def _scatter_base(out, whole, group, op, async_op=True, *_):
    return out, _scatter_coalesced([out], [whole], group, op, async_op)


def _scatter_list(outs, ins, group, op, async_op=True, *_):
    pg, n, r = _group(group)
    flat = [t for each in ins for t in each]

    def body():
        for out, each in zip(outs, ins, strict=True):
            _reduce(out.copy_(each[r]), _kind(op), n)

    return outs, _run("reduce_scatter", pg, outs, flat, async_op, body, _nbytes(flat))


def _all_reduce(tensors, group, op, sparse_indices=None, async_op=True, *_):
    pg, n, _r = _group(group)
    body = lambda: [_reduce(t, _kind(op), n) for t in tensors]  # noqa: E731
    return tensors, _run("all_reduce", pg, tensors, [], async_op, body, _nbytes(tensors))


def _all_reduce_coalesced(tensors, group, op, async_op=True, *_):
    return _all_reduce(tensors, group, op, None, async_op)[1]


def _broadcast(tensors, group, root, root_tensor, async_op=True, *_):
    work = _run("broadcast", _group(group)[0], tensors, [], async_op, lambda: None, _nbytes(tensors))
    return tensors, work


def _scatter_from(outs, ins, group, root, async_op=True, *_):
    """Only the root knows what it scatters, so this rank must be the root; it receives its own chunk."""
    pg, n, r = _group(group)
    if r != root:
        raise NotImplementedError("a simulated rank does not know what another scatters: pass src_data_rank=None")
    return outs, _run("scatter", pg, outs, ins[0], async_op, lambda: outs[0].copy_(ins[0][r]), n * _nbytes(outs))


def _gather_to(outs, ins, group, root, async_op=True, *_):
    pg, n, _r = _group(group)
    flat = [t for each in outs for t in each]
    return _run("gather", pg, flat, ins, async_op, lambda: [t.copy_(ins[0]) for t in flat], n * _nbytes(ins))


def _barrier(tensor, group, device_ids, async_op=True, *_):
    return _run("barrier", _group(group)[0], [tensor], [], False, lambda: None, 0)


def _refuse(name: str) -> Callable:
    def kernel(*_, **__):
        raise NotImplementedError(f"a simulated world has no c10d::{name}")

    return kernel


_KERNELS = {
    "_allgather_base_": _gather_base, "allgather_into_tensor_coalesced_": _gather_coalesced,
    "allgather_": _gather_list, "allgather_coalesced_": _gather_list_coalesced,
    "_reduce_scatter_base_": _scatter_base, "reduce_scatter_tensor_coalesced_": _scatter_coalesced,
    "reduce_scatter_": _scatter_list, "allreduce_": _all_reduce, "allreduce_coalesced_": _all_reduce_coalesced,
    "broadcast_": _broadcast, "scatter_": _scatter_from, "gather_": _gather_to, "barrier": _barrier,
}  # fmt: skip
_KERNELS |= {n: _refuse(n) for n in ("reduce_", "alltoall_base_", "alltoall_", "send", "recv_", "recv_any_source_")}
