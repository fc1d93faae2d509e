"""`--explain-memory`: what the peaks of memory in one step consist of.

    loss, timeline, notes = watch(config, step, tokens, targets)      # runs the step
    print(*lines(timeline, notes), sep="\\n")

torch.profiler reports every allocation and free with the ops around it, in compiled code as well. Each block of memory
that the step allocates is counted as the first of these pieces that it fits:

    gradients   handed to the update or its reduction; input or output of a reduction in backward
    weights     input or output of an all-gather; or of a parameter's shape and the second factor of a product or the
                table of a lookup (which finds copies cut from a bucket, and casts)
    logits      as large as [B,T,V] (of a chunk [C,V]) and, where an op shows its shape, of that shape
    saved       allocated in forward and still alive when its backward begins
    workspace   the rest: temporaries, scratch of kernels, whole gradients that only generated kernels read
"""

import math
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C._profiler import _EventType, _TensorMetadata
from torch.profiler import ProfilerActivity, profile, record_function

from trainer.attention_kernel import DTYPES
from trainer.config import Config
from trainer.measuring.memory import recorded
from trainer.optimizer import local
from trainer.step import OneGraph, Step
from trainer.terminal.text import grouped

DIP = 0.02  # as a fraction of what the step adds at its highest peak
PIECES = (
    "parameters",
    "Adam's moments",
    "other from before the step",
    "saved for backward",
    "weights, gathered or cast",
    "logits",
    "gradients",
    "workspace",
)
PARAMETERS, MOMENTS, OTHER, SAVED, WEIGHTS, LOGITS, GRADIENTS, WORKSPACE = PIECES
MARK = "memory: "
NODE = "autograd::engine::evaluate_function: "
AROUND = (  # ranges that are no operation
    MARK,
    NODE,
    "## Call CompiledFxGraph",
    "TorchDynamo",
    "Torch-Compiled",
    "AOTDispatcher",
    "Pregraph",
    "CompiledFunction",
)
NAMES = {dtype: name for name, dtype in DTYPES.items()}
FACTOR = {"aten::mm": 1, "aten::addmm": 2, "aten::embedding": 0}  # the input that is a weight


class Event(NamedTuple):
    """What happens to the block at an address: it is allocated or freed, or an op reads it, which may tell more."""

    time: int  # ns
    ptr: int
    nbytes: int  # > 0: allocated; < 0: freed; 0: read
    where: str = ""  # the op
    piece: str = ""  # one of PIECES, if the op shows which
    shape: tuple[int, ...] = ()
    dtype: str = ""


@dataclass
class Block:
    """Memory between the event that allocates it and the one that frees it."""

    nbytes: int
    born: int  # index of an event
    where: str  # the op that allocates it
    died: float = math.inf  # index of an event; infinity: it outlives the step
    freed: str = "after the step"  # the op that frees it
    claims: set[str] = field(default_factory=set)  # the pieces that ops say it is
    shape: tuple[int, ...] = ()
    dtype: str = ""
    piece: str = WORKSPACE


class Peak(NamedTuple):
    """A local maximum of memory, and what is alive at it."""

    nbytes: int
    index: int  # of the event that reaches it
    moment: str
    pieces: dict[str, int]  # bytes; their sum is nbytes


class Sizes(NamedTuple):
    """What tells logits from other blocks."""

    elements: tuple[int, ...] = ()  # of the logits of a micro-batch, or of a chunk
    dtypes: tuple[str, ...] = ()
    vocab: int = 0
    rounded: bool = False  # the allocator rounds sizes up, as CUDA's does

    def fit(self, nbytes: int, elements: int, dtype: str) -> bool:
        """Whether a block of `nbytes` can be what the allocator gives to so many elements."""
        # A large block's rest stays with it.
        most = 0 if not self.rounded else 511 if nbytes <= 2**20 else 2**20 + 511
        return dtype in DTYPES and 0 <= nbytes - elements * DTYPES[dtype].itemsize <= most

    def logits(self, b: Block) -> bool:
        dtypes = [b.dtype] if b.dtype else self.dtypes
        large = any(
            self.fit(b.nbytes, n, d) for n in self.elements for d in dtypes if d in self.dtypes
        )
        return large and (not b.shape or self.vocab in b.shape)


class Timeline:
    """The blocks, levels and peaks of one step. events: in any order. marks: (ns, phase), in order, for the begin of
    each phase ("fwd", "bwd", "step"), or none. base: {piece: bytes} alive before it. sizes: of logits."""

    def __init__(
        self, events: list[Event], marks: list[tuple[int, str]], base: dict[str, int], sizes: Sizes
    ):
        self.events = sorted(events, key=lambda e: e.time)  # stable: equal times stay in order
        self.base = base
        self.sizes = sizes
        self.marks = marks
        # First event of a phase.
        self.starts = [bisect_left(self.events, t, key=lambda e: e.time) for t, _ in marks]
        self.blocks: list[Block] = []
        # (index, bytes) of frees of blocks from before the step.
        self.unknown: list[tuple[int, int]] = []
        self.unseen = 0  # number of blocks whose free was not reported
        live: dict[int, Block] = {}
        for i, e in enumerate(self.events):
            if e.nbytes > 0:
                if old := live.get(e.ptr):
                    old.died = i
                    old.freed = "unseen"
                    self.unseen = self.unseen + 1
                live[e.ptr] = Block(e.nbytes, i, self.place(i), claims={e.piece} - {""})
                self.blocks.append(live[e.ptr])
            elif e.nbytes < 0 and e.ptr in live:
                b = live.pop(e.ptr)
                b.died = i
                b.freed = self.place(i)
            elif e.nbytes < 0:
                self.unknown.append((i, -e.nbytes))
            elif b := live.get(e.ptr):
                b.claims |= {e.piece} - {""}
                if not b.shape and self.sizes.fit(b.nbytes, math.prod(e.shape), e.dtype):
                    b.shape = e.shape
                    b.dtype = e.dtype
        for b in self.blocks:
            b.piece = self._piece(b)

    def phase(self, index: int) -> int:
        """The phase of an event, as an index of `marks`; -1: not known."""
        return bisect_right(self.starts, index) - 1

    def place(self, index: int) -> str:
        n = self.phase(index)
        where = self.events[index].where or "outside any op"
        return f"{self.marks[n][1]}, {where}" if n >= 0 else where

    def _piece(self, b: Block) -> str:
        n = self.phase(b.born)
        phase = self.marks[n][1] if n >= 0 else ""
        # Other reductions: of labels, of the norm.
        if GRADIENTS in b.claims and phase in ("bwd", ""):
            return GRADIENTS
        if WEIGHTS in b.claims:
            return WEIGHTS
        if self.sizes.logits(b):
            return LOGITS
        kept = phase == "fwd" and n + 1 < len(self.starts) and b.died >= self.starts[n + 1]
        return SAVED if kept else WORKSPACE

    def alive(self, index: int) -> list[Block]:
        """The blocks of the step that are alive right after an event."""
        return [b for b in self.blocks if b.born <= index < b.died]

    def pieces(self, index: int) -> dict[str, int]:
        """Bytes of every piece right after an event."""
        total = Counter(self.base)
        total[OTHER] -= sum(n for i, n in self.unknown if i <= index)
        for b in self.alive(index):
            total[b.piece] += b.nbytes
        return {p: total[p] for p in PIECES}

    def levels(self) -> list[int]:
        """Bytes in use after each event, those from before the step among them."""
        change = Counter({i: -n for i, n in self.unknown})
        for b in self.blocks:
            change[b.born] += b.nbytes
            change[b.died] -= b.nbytes
        change[0] += sum(self.base.values())
        return list(accumulate(change[i] for i in range(len(self.events))))

    def peaks(self, most: int = 3) -> list[Peak]:
        """At most `most` peaks, the highest first: maxima between which memory falls by DIP and rises by it again."""
        levels = self.levels()
        if not levels:
            return []
        dip = DIP * (max(levels) - sum(self.base.values()))
        tops = []
        rising = True
        top = 0
        low = 0
        for i, n in enumerate(levels):
            if rising and n > levels[top]:
                top = i
            elif rising and n < levels[top] - dip:
                tops.append(top)
                rising = False
                low = n
            elif not rising:
                low = min(low, n)
                rising = n > low + dip
                top = i
        tops += [top] if rising else []
        tops = sorted(tops, key=lambda i: -levels[i])[:most]  # stable: the earlier of equals first
        return [Peak(levels[i], i, self.place(i), self.pieces(i)) for i in tops]


def mib(nbytes: int) -> str:
    return grouped(nbytes / 2**20, 1)


def largest(timeline: Timeline, most: int = 10) -> list[tuple[int, int, str]]:
    """(how many, bytes of each, shape, if an op shows it; piece; allocated -> freed) of the `most` largest buffers at
    the highest peak. Equal ones are one entry, and so is the same buffer in every block of the model."""
    rows = Counter()
    for b in timeline.alive(timeline.peaks(1)[0].index) if timeline.levels() else ():
        born, freed = (re.sub(r"\.\d+\b", ".*", place) for place in (b.where, b.freed))
        shape = f"{[*b.shape]} {b.dtype}; ".replace(", ", ",") if b.shape else ""
        rows[b.nbytes, f"{shape}{b.piece}; {born} -> {freed}"] += 1
    return [
        (n, size, text)
        for (size, text), n in sorted(rows.items(), key=lambda row: -row[0][0])[:most]
    ]


def lines(timeline: Timeline, notes: Iterable[str] = (), step: int = 1) -> list[str]:
    """What to print: the peaks with their pieces, then the largest buffers at the highest peak. notes: lines to add;
    step: its number, for the heading."""
    text = [f"peaks of memory in step {step}, MiB (pieces under 0.05 are left out)"]
    for n, p in enumerate(timeline.peaks(), 1):
        text.append(f"{n}. {mib(p.nbytes):>10}  {p.moment}")
        text += [
            f"   {mib(size):>10}  {piece}"
            for piece, size in p.pieces.items()
            if size >= 0.05 * 2**20
        ]
    text.append(
        "largest buffers at the first peak, MiB each: shape, if known; piece; allocated -> freed"
    )
    text += [f"   {n:>3} x {mib(size):>8}  {what}" for n, size, what in largest(timeline)]
    if timeline.unknown:
        size = mib(sum(n for _, n in timeline.unknown))
        text.append(
            f"{len(timeline.unknown)} blocks from before the step, {size} MiB, were freed in it"
        )
    if timeline.unseen:
        text.append(
            f"{timeline.unseen} blocks were freed unseen: they count until their address is given out again"
        )
    return [*text, *notes]


def _where(names: list[str], following: str) -> str:
    """The outermost op around an event, or the one that starts after it, or nothing. names: the ranges around it."""
    op = next((n for n in names if "::" in n and not n.startswith(AROUND)), "")
    return op or (f"before {following}" if following else "")


def _gathers(names: list[str]) -> bool:
    """Whether the ranges around an event are of simple_fsdp.py's autograd functions in eager forward."""
    functions = [n for n in names if "::" not in n and not n.startswith(AROUND)]
    return functions[:1] in (["_Gather"], ["_Begin"], ["_End"]) and not any(
        n.startswith(NODE) for n in names
    )


def moved(op: str) -> str:
    """The piece that a collective gathers or reduces; "" for other ops."""
    if not op.startswith(("_c10d_functional", "c10d::", "fsdp::")):
        return ""
    return WEIGHTS if re.search("all_?gather", op) else GRADIENTS if "reduce" in op else ""


def _reads(e, shapes: set[tuple[int, ...]]) -> Iterator[Event]:
    """What the inputs of an op tell of the blocks that they lie in. shapes: of the parameters, each sorted."""
    inputs = e.typed[1].inputs
    at = FACTOR.get(e.name)
    for i, entry in enumerate(inputs):
        for t in entry if isinstance(entry, list) else [entry]:
            if isinstance(t, _TensorMetadata) and t.storage_data_ptr:
                weight = (
                    i == at
                    and tuple(sorted(t.sizes)) in shapes
                    and (not i or inputs[i - 1].strides[-1] == 1)
                )
                piece = WEIGHTS if weight else moved(e.name)
                yield Event(
                    e.start_time_ns,
                    t.storage_data_ptr,
                    0,
                    "",
                    piece,
                    tuple(t.sizes),
                    NAMES.get(t.dtype, ""),
                )


def read(
    roots: list, device: str, shapes: set[tuple[int, ...]]
) -> tuple[list[Event], list[tuple[int, str]]]:
    """(events, marks) for a Timeline. roots: the profiler's trees; device: whose blocks count; shapes: as `_reads`."""
    events = []
    marks = []

    def walk(siblings: list, names: list[str]) -> None:
        following = ""
        after = []
        for e in reversed(siblings):
            after.append(following)
            if e.tag == _EventType.TorchOp and not e.name.startswith(AROUND):
                following = e.name
        for e, following in zip(siblings, reversed(after), strict=True):
            if e.tag == _EventType.Allocation:
                a = e.typed[1]
                if a.device.type == device:
                    where = _where(names, following)
                    piece = WEIGHTS if _gathers(names) else ""
                    events.append(Event(e.start_time_ns, a.ptr, a.alloc_size, where, piece))
            elif e.tag == _EventType.TorchOp:
                if e.name.startswith(MARK):
                    marks.append((e.start_time_ns, e.name.removeprefix(MARK)))
                events.extend(_reads(e, shapes))
                walk(e.children, [*names, e.name])

    walk(sorted(roots, key=lambda e: e.start_time_ns), [])
    return events, sorted(marks)


def _mark(name: str) -> None:
    with record_function(MARK + name):
        pass


@contextmanager
def _observed(step: Step) -> Iterator[list[dict[int, int]]]:
    """Marks the phases of a step. Yields {address: bytes} of the gradients at each mark."""
    seen = []

    def note(phase: str, grads: list[Tensor]) -> None:
        if phase != "reduce":  # which belongs to backward
            _mark(phase)
        if grads:
            _mark(GRADIENTS)
            storages = [g.untyped_storage() for g in grads]
            seen.append({s.data_ptr(): s.nbytes() for s in storages})

    if not isinstance(step, OneGraph):
        _mark("fwd")
    with step.watch_phases(note):
        yield seen


def sizes_of(config: Config) -> Sizes:
    """Of resolved flags."""
    tokens = config.batch * config.seqlen
    rows = {tokens}
    if config.loss != "full":
        rows = {min(config.loss_chunk, tokens), tokens % config.loss_chunk} - {0}
    return Sizes(
        tuple(n * config.vocab for n in rows),
        (config.param_dtype, "fp32"),
        config.vocab,
        rounded=config.device == "cuda",
    )


def address(t: Tensor) -> int:
    return t.untyped_storage().data_ptr()


def before(
    step: Step, tokens: Tensor, targets: Tensor, key: Callable[[Tensor], int] = address
) -> tuple[dict[str, int], set[int]]:
    """({piece: bytes}, keys of the storages) of what is alive before a step; of OTHER on a CPU only what is known to be
    there."""
    o = step.optimizer
    total = Counter()
    known = set()
    groups = {
        PARAMETERS: step.model.parameters(),
        MOMENTS: [t for *_, t in o.moments()],
        OTHER: [*step.model.buffers(), o.t, o.lr, tokens, targets],
    }
    for piece, tensors in groups.items():
        for t in (local(t.detach()) for t in tensors):
            if key(t) not in known:
                known.add(key(t))
                total[piece] += t.untyped_storage().nbytes()
    if tokens.is_cuda:
        total[OTHER] = (
            torch.cuda.memory_allocated(tokens.device) - total[PARAMETERS] - total[MOMENTS]
        )
    return dict(total), known


def watch(
    config: Config,
    step: Step,
    tokens: Tensor,
    targets: Tensor,
    snapshot: str | None = None,
    train_step: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> tuple[Tensor, Timeline, list[str]]:
    """Runs step(tokens, targets), [B, T] each, built of these flags: (loss, Timeline, notes on what is unknown).
    snapshot: where a step on CUDA leaves what its allocator did, a path that the notes end with. train_step: what runs
    `step`, if it is not called itself."""
    base, known = before(step, tokens, targets)
    if tokens.is_cuda:
        torch.cuda.reset_peak_memory_stats(tokens.device)
    record = recorded(snapshot) if snapshot and tokens.is_cuda else nullcontext([])
    with (
        profile(
            activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=True
        ) as profiler,
        record as written,
        _observed(step) as seen,
    ):
        loss = (train_step or step)(tokens, targets)
    shapes = {tuple(sorted(p.shape)) for p in step.model.parameters() if p.ndim == 2}
    events, marks = read(
        profiler.profiler.kineto_results.experimental_event_tree(), config.device, shapes
    )
    for time, grads in zip([time for time, name in marks if name == GRADIENTS], seen, strict=True):
        events += [Event(time, ptr, 0, piece=GRADIENTS) for ptr in grads]
    made = {e.ptr for e in events if e.nbytes > 0} | known
    kept = sum({ptr: n for grads in seen for ptr, n in grads.items() if ptr not in made}.values())
    base[GRADIENTS] = kept
    phases = [m for m in marks if m[1] != GRADIENTS]
    phases = [m for i, m in enumerate(phases) if not i or m[1] != phases[i - 1][1]]
    notes = [
        "a CPU's kernels allocate copies of their own (oneDNN packs operands): workspace, not so on CUDA",
        "a CPU's allocator does not report frees of what was there before the step",
        "the resident memory of this run holds the profiler's events as well",
    ]
    if tokens.is_cuda:
        base[OTHER] -= kept
        notes = [
            f"torch.cuda.max_memory_allocated {mib(torch.cuda.max_memory_allocated(tokens.device))}"
        ]
    if config.vocab in (config.width, config.grow * config.width):
        notes.append("--vocab is a width of activations here: those count as logits")
    if not phases:
        notes.append(
            "one graph, no phases: what is saved for backward cannot be told from temporaries, nor gradients "
            "that no collective reads; both are workspace"
        )
    return loss, Timeline(events, phases, base, sizes_of(config)), notes + written
