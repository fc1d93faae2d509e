"""Peak memory of a training step from the code that the compiler generates: any setting, any number of ranks, no GPU.

    python -m lab.profiling.peak --world 8 --remat both --loss chunked     # the flags of main.py
    python -m lab.profiling.peak --wrapper fsdp2 --compile none

A step runs on tensors that have no memory, and every storage is counted from its birth to its death, as CUDA's
allocator would: sizes rounded up to 512 bytes, the inputs of a collective held until it is waited for. Compiled parts
run as the code that Inductor generates for the GPU, in its order, its kernels left out; custom ops run their own
Python, so that what they hold inside counts. Two allowances stand for what no graph shows: the workspaces of cuBLAS,
and the scratch of a fused attention's backward: the gradient of q in fp32, with grouped heads also those of k and v for
every head (measured on an H100). NCCL's buffers and what the allocator cannot give out again are not in it.
"""

import argparse
import signal
import sys
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from lab.profiling.command import parse_tool, tool
from trainer import config as flags
from trainer.terminal.output import fail, put

if __name__ == "__main__":  # before torch is imported, as in main.py
    _parser = tool("lab.profiling.peak", __doc__)
    _parser.add_argument(
        "--arch", choices=("sm_80", "sm_90", "sm_100"), default="sm_90", help="GPU (default: sm_90)"
    )
    _parser.add_argument(
        "--kernels",
        type=int,
        default=0,
        metavar="INT",
        help="list so many of the largest operations",
    )
    OWN, CONFIG = parse_tool(_parser, gpu=True)

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from lab.profiling import gpu_code
from overlap import FLOP_FORMULAS
from trainer.measuring.timeline import (
    GRADIENTS,
    NAMES,
    WEIGHTS,
    Event,
    Timeline,
    before,
    lines,
    mib,
    moved,
    sizes_of,
)

# Allowance: torch's default workspace (CUDAContextLight) for each of the threads of forward and backward.
CUBLAS_MIB = {"sm_80": 2 * 8.125, "sm_90": 2 * 32, "sm_100": 2 * 32}
WAIT = torch.ops._c10d_functional.wait_tensor.default
# Which argument of a product may be a weight, by operation.
FACTOR = {torch.ops.aten.mm: 1, torch.ops.aten.addmm: 2}


def storage_of(t: torch.Tensor) -> int:
    return t.untyped_storage()._cdata


def spread(value, heads: int):
    """Keys and values [B, K, T, D] as [B, heads, T, D]; whatever else as it is."""
    if not isinstance(value, torch.Tensor) or value.dim() != 4:
        return value
    return value.repeat_interleave(heads // value.shape[1], 1)


class Meter(TorchDispatchMode):
    """Notes the birth and the death of every storage, as events of a Timeline, and the work of every operation.

    codes: whose lines tell what a storage is for. known: storages from before the step, which are counted by
    themselves. gpu: add the scratch of attention's backward, see above."""

    def __init__(self, codes: list[gpu_code.Code], known: set[int], gpu: bool, seqlen: int):
        super().__init__()
        self.codes = {code.module.__file__: code for code in codes}
        self.known = known
        self.gpu = gpu
        self.seqlen = seqlen
        self.events: list[Event] = []
        self.size = dict.fromkeys(known, 0)  # by storage
        # Output of a collective -> its inputs, which NCCL reads until the wait.
        self.pending: dict[int, list] = {}
        self.work: dict[str, Counter] = defaultdict(Counter)  # operation -> calls, flops, nbytes

    @classmethod
    def is_infra_mode(cls) -> bool:  # or Dynamo would run everything eagerly below this mode
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(t not in (FakeTensor, torch.Tensor, torch.nn.Parameter) for t in types):
            return NotImplemented  # a DTensor runs operations on its shards, which come here again
        if func is WAIT:
            self.pending.pop(storage_of(args[0]), None)
            return args[0]
        kwargs = kwargs or {}
        definition = torch._library.custom_ops.OPDEFS.get(func._schema.name)
        if func.namespace == "aten" and func.overloadpacket not in FLOP_FORMULAS:
            with self:  # inside a custom op linear, matmul and the like come whole
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        if (
            definition is not None
        ):  # what it holds inside counts, and its products are counted there
            with self:
                out = definition._init_fn(*args, **kwargs)
        else:
            out = func(*args, **kwargs)
        made = [t for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]
        inputs = [
            t
            for t in torch.utils._pytree.tree_leaves((args, kwargs))
            if isinstance(t, torch.Tensor)
        ]
        for t in made:
            self.born(t, str(func))
        if piece := moved(func._schema.name):
            if func.namespace == "_c10d_functional":  # others are not waited for by an operation
                self.pending |= {storage_of(t): inputs for t in made}
            for t in inputs + made:
                self.read(t, piece)
        elif (
            func.overloadpacket in FACTOR and args[FACTOR[func.overloadpacket] - 1].stride(-1) == 1
        ):
            self.read(args[FACTOR[func.overloadpacket]], WEIGHTS)
        if self.gpu and "attention_backward" in func._schema.name:
            q, k = inputs[1:3]
            scratch = 4 * q.numel()  # the gradient of q, in fp32
            if q.shape[1] != k.shape[1]:  # those of k and v, spread over the heads
                scratch += 2 * q.nbytes
            self.events.append(
                Event(len(self.events), -1, scratch, "scratch of attention, an allowance")
            )
            self.events.append(Event(len(self.events), -1, -scratch))
        count = FLOP_FORMULAS.get(func.overloadpacket)
        if count is not None and definition is None:
            # Torch's formulas know no out_dtype.
            shapes = [a for a in args if not isinstance(a, torch.dtype)]
            if "attention" in func._schema.name:  # torch 2.11's know no grouped heads
                heads = max(t.shape[1] for t in inputs if t.dim() == 4)
                shapes = [spread(a, heads) for a in shapes]
            moves = sum(t.nbytes for t in inputs + made)
            self.work[str(func)].update(
                calls=1, flops=count(*shapes, **kwargs, out_val=out), nbytes=moves
            )
        return out

    def born(self, t: torch.Tensor, op: str) -> None:
        if storage_of(t) not in self.size:
            weakref.finalize(t.untyped_storage(), self.died, storage_of(t))
            self.sized(t.untyped_storage(), self.where(op))
            self.read(t, "")

    def sized(self, storage: torch.UntypedStorage, where: str) -> None:
        """Notes what a storage, new or resized, takes from now on: CUDA's allocator rounds up to 512 bytes."""
        self.died(storage._cdata)
        self.size[storage._cdata] = nbytes = -(-storage.nbytes() // 512) * 512
        if nbytes:
            self.events.append(Event(len(self.events), storage._cdata, nbytes, where))

    def died(self, which: int) -> None:
        if nbytes := self.size.pop(which, 0):
            self.events.append(Event(len(self.events), which, -nbytes))

    def read(self, t: torch.Tensor, piece: str) -> None:
        if self.size.get(storage_of(t)):
            dtype = NAMES.get(t.dtype, "")
            self.events.append(
                Event(len(self.events), storage_of(t), 0, "", piece, tuple(t.shape), dtype)
            )

    def where(self, op: str) -> str:
        """The operation, and the module that it belongs to, of the line of generated code that runs now."""
        frame = sys._getframe(2)
        while frame is not None and frame.f_code.co_filename not in self.codes:
            frame = frame.f_back
        if frame is None:
            return op
        code = self.codes[frame.f_code.co_filename]
        buffer = code.source.splitlines()[frame.f_lineno - 1].partition("=")[0].strip()
        module, operation = code.origins.get(buffer, ("", op))
        return f"{operation}, {module}".rstrip(", ")

    @contextmanager
    def metering(self) -> Iterator[None]:
        """Inside it everything is noted. FSDP2 frees and fills the storages of gathered weights by resizing them."""
        real = torch.UntypedStorage.resize_

        def resize(storage, nbytes):
            real(storage, nbytes)
            if storage._cdata not in self.known:
                self.sized(storage, "resize")

        def launched(kernel, args):
            tensors = [t for t in args if isinstance(t, torch.Tensor)]
            flops = 0
            # As torch counts SDPA.
            if kernel.name.startswith("triton_tem_") and "flex_attention" in kernel.name:
                elements = max(t.numel() for t in tensors)  # of q
                flops = (10 if "backward" in kernel.name else 4) * elements * self.seqlen
            self.work[kernel.name].update(
                calls=1, flops=flops, nbytes=sum(t.nbytes for t in tensors)
            )

        with (
            mock.patch.object(torch.UntypedStorage, "resize_", resize),
            mock.patch.object(gpu_code.Kernel, "launched", launched),
            self,
        ):
            yield


def simulate(config: flags.Config, world: int, arch: str | None) -> tuple[Timeline, Meter]:
    """The second step of resolved flags, as one rank of `world` sees it. arch, ValueError: as gpu_code.simulated."""
    marks = []
    with gpu_code.simulated(config, world, arch) as (step, tokens, codes):
        base, known = before(step, tokens, tokens, storage_of)
        meter = Meter(codes, known, arch is not None, config.seqlen)

        def note(phase, grads):
            if phase != "reduce":  # which belongs to backward
                marks.append((len(meter.events), phase))
            for g in grads:
                meter.read(g, GRADIENTS)

        with step.watch_phases(note), meter.metering():
            step(tokens, tokens)
    return Timeline(meter.events, marks or [(0, "step")], base, sizes_of(config)), meter


def report(timeline: Timeline, meter: Meter, most: int) -> list[str]:
    """The lines to print. most: how many of the largest operations to list."""
    levels = timeline.levels()
    text = lines(timeline, step=2)
    ends = [*timeline.starts[1:], len(levels)]
    for (_, phase), first, end in zip(timeline.marks, timeline.starts, ends, strict=True):
        text.append(f"peak of {phase}: {mib(max(levels[first:end], default=0))} MiB")
    flops = sum(count["flops"] for count in meter.work.values())
    text.append(f"products and attention: {flops / 1e12:.3f} TFLOP")
    for name, count in sorted(meter.work.items(), key=lambda item: -item[1]["nbytes"])[:most]:
        text.append(
            f"  {name}: {count['calls']} times, {count['flops'] / 1e12:.3f} TFLOP, {mib(count['nbytes'])} MiB"
        )
    return text


def run(
    arguments: argparse.Namespace, config: flags.Config
) -> tuple[flags.Config, Timeline, Meter]:
    """What the flags of a command ask for: they, resolved, and what was found. Prints the report. Bad flags, or no
    Triton: SystemExit(2)."""
    arch = None if config.device == "cpu" else arguments.arch
    if arch and (reason := gpu_code.no_triton()):
        fail(reason, 0)
    if arch:
        gpu_code.pretend(arch)
    dist.init_process_group("fake", rank=0, world_size=arguments.world, store=FakeStore())
    try:
        config = flags.resolve(config, "cuda" if arch else "cpu", arguments.world)
        timeline, meter = simulate(config, arguments.world, arch)
    except ValueError as e:
        fail(str(e), 0)
    dist.destroy_process_group()
    put(*report(timeline, meter, arguments.kernels), sep="\n")
    top = timeline.peaks(1)[0].nbytes
    more = CUBLAS_MIB.get(arch, 0)
    allowed = f"; with {more:g} for cuBLAS {mib(top + more * 2**20)}" * bool(more)
    put(f"simulated, not measured: {mib(top)} MiB{allowed}")
    return config, timeline, meter


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # | head
    run(OWN, CONFIG)
