"""What the peaks of memory in one step consist of: from the allocator's events to blocks, peaks and words.

    timeline = Timeline(events, marks, base, sizes)      # trainer/profiling/events.py collects them from a step
    print(*lines(timeline), sep="\\n")

Each block of memory that the step allocates is counted as the first of these pieces that it fits:

    gradients   handed to the update (or to the reduction of --accum-sync last); input or output of a reduction in
                backward
    weights     input or output of an all-gather; or of a parameter's shape and the second factor w of a product x @ w
                with x not transposed, or the table of a lookup (which finds copies cut from a bucket, and casts)
    logits      as large as [B,T,V] (of a chunk [C,V]) and, where an op shows its shape, of that shape
    saved       allocated in forward and still alive when its backward begins
    workspace   the rest: temporaries, scratch of kernels, whole gradients that only generated kernels read

What was alive before the step is counted by itself. B sequences, T tokens, V vocabulary, C tokens of a chunk.
"""

import math
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate

from trainer.distributed.terminal import grouped

DIP = 0.02  # as a fraction of what the step adds at its highest peak
PIECES = ("parameters", "Adam's moments", "other from before the step", "saved for backward",
          "weights, gathered or cast", "logits", "gradients", "workspace")  # fmt: skip
PARAMETERS, MOMENTS, OTHER, SAVED, WEIGHTS, LOGITS, GRADIENTS, WORKSPACE = PIECES
BYTES = dict(bf16=2, fp32=4)


@dataclass(frozen=True)
class Event:
    """What happens to the block at an address: it is allocated or freed, or an op reads it, which may tell more."""

    time: int  # ns
    ptr: int
    nbytes: int  # > 0: allocated; < 0: freed; 0: read
    where: str = ""  # the op and the module, in words
    piece: str = ""  # one of PIECES, if the op tells
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


@dataclass(frozen=True)
class Peak:
    """A local maximum of memory, and what is alive at it."""

    nbytes: int
    index: int  # of the event that reaches it
    moment: str
    pieces: dict[str, int]  # bytes; their sum is nbytes


@dataclass(frozen=True)
class Sizes:
    """What a model's tensors are called, by their sizes."""

    names: tuple[tuple[str, int, str], ...] = ()  # (name, elements, dtype), the likeliest first
    vocab: int = 0
    rounded: bool = False  # the allocator rounds sizes up, as CUDA's does

    def fit(self, nbytes: int, elements: int, dtype: str) -> bool:
        """Whether a block of `nbytes` can be what the allocator gives to so many elements."""
        most = 0 if not self.rounded else 511 if nbytes <= 2**20 else 2**20 + 511  # a large block's rest stays with it
        return dtype in BYTES and 0 <= nbytes - elements * BYTES[dtype] <= most

    def of(self, b: Block) -> list[str]:
        """Every name that fits the bytes of a block and, where an op has shown it, its dtype."""
        return [f"{n} {d}" for n, e, d in self.names if b.dtype in ("", d) and self.fit(b.nbytes, e, d)]

    def name(self, b: Block) -> str:
        return " or ".join(self.of(b)) or (f"{[*b.shape]} {b.dtype}".replace(", ", ",") if b.shape else "")

    def logits(self, b: Block) -> bool:
        return any(",V]" in name for name in self.of(b)) and (not b.shape or self.vocab in b.shape)


class Timeline:
    """The blocks, levels and peaks of one step. events: in any order. marks: (ns, phase), in order, for the begin of
    each phase ("fwd", "bwd", "step"), or none. base: {piece: bytes} alive before it. sizes: names of blocks."""

    def __init__(self, events: list[Event], marks: list[tuple[int, str]], base: dict[str, int], sizes: Sizes):
        self.events = sorted(events, key=lambda e: e.time)  # stable: equal times stay in order
        self.base, self.sizes, self.marks = base, sizes, marks
        self.starts = [bisect_left(self.events, t, key=lambda e: e.time) for t, _ in marks]  # first event of a phase
        self.blocks: list[Block] = []
        self.unknown: list[tuple[int, int]] = []  # (index, bytes) of frees of blocks from before the step
        self.unseen = 0  # number of blocks whose free was not reported
        self._follow()
        for b in self.blocks:
            b.piece = self._piece(b)

    def _follow(self) -> None:
        live: dict[int, Block] = {}
        for i, e in enumerate(self.events):
            if e.nbytes > 0:
                if old := live.get(e.ptr):
                    old.died, old.freed, self.unseen = i, "unseen", self.unseen + 1
                live[e.ptr] = Block(e.nbytes, i, self.place(i))
                self.blocks.append(live[e.ptr])
            elif e.nbytes < 0 and e.ptr in live:
                b = live.pop(e.ptr)
                b.died, b.freed = i, self.place(i)
            elif e.nbytes < 0:
                self.unknown.append((i, -e.nbytes))
            elif b := live.get(e.ptr):
                b.claims |= {e.piece} - {""}
                if not b.shape and self.sizes.fit(b.nbytes, math.prod(e.shape), e.dtype):
                    b.shape, b.dtype = e.shape, e.dtype

    def phase(self, index: int) -> int:
        """The phase of an event, as an index of `marks`; -1: not known."""
        return bisect_right(self.starts, index) - 1

    def place(self, index: int) -> str:
        n, where = self.phase(index), self.events[index].where or "outside any op"
        return f"{self.marks[n][1]}, {where}" if n >= 0 else where

    def _piece(self, b: Block) -> str:
        n = self.phase(b.born)
        phase = self.marks[n][1] if n >= 0 else ""
        if GRADIENTS in b.claims and phase in ("bwd", ""):  # other reductions: of labels, of the norm
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
        tops, rising, top, low = [], True, 0, 0
        for i, n in enumerate(levels):
            if rising and n > levels[top]:
                top = i
            elif rising and n < levels[top] - dip:
                tops.append(top)
                rising, low = False, n
            elif not rising:
                low = min(low, n)
                rising, top = n > low + dip, i
        tops += [top] if rising else []
        tops = sorted(tops, key=lambda i: -levels[i])[:most]  # stable: the earlier of equals first
        return [Peak(levels[i], i, self.place(i), self.pieces(i)) for i in tops]


def mib(nbytes: int) -> str:
    return grouped(nbytes / 2**20, 1)


def lines(timeline: Timeline, notes: Iterable[str] = (), step: int = 1, most: int = 10) -> list[str]:
    """What to print: the peaks with their pieces, then the `most` largest buffers at the highest peak, where the same
    buffer in every block of the model is one line. notes: lines to add; step: its number, for the heading."""
    peaks, rows = timeline.peaks(), Counter()
    text = [f"peaks of memory in step {step}, MiB (pieces under 0.05 are left out)"]
    for n, p in enumerate(peaks, 1):
        text.append(f"{n}. {mib(p.nbytes):>10}  {p.moment}")
        text += [f"   {mib(size):>10}  {piece}" for piece, size in p.pieces.items() if size >= 0.05 * 2**20]
    for b in timeline.alive(peaks[0].index) if peaks else ():
        born, freed = (re.sub(r"\.\d+\b", ".*", place) for place in (b.where, b.freed))
        rows[b.nbytes, timeline.sizes.name(b), b.piece, born, freed] += 1
    text.append("largest buffers at the first peak, MiB each: name by size; piece; allocated -> freed")
    for (size, name, piece, born, freed), n in sorted(rows.items(), key=lambda row: -row[0][0])[:most]:
        text.append(f"   {n:>3} x {mib(size):>8}  {name or '(no name fits)'}; {piece}; {born} -> {freed}")
    if timeline.unknown:
        size = mib(sum(n for _, n in timeline.unknown))
        text.append(f"{len(timeline.unknown)} blocks from before the step, {size} MiB, were freed in it")
    if timeline.unseen:
        text.append(f"{timeline.unseen} blocks were freed unseen: they count until their address is given out again")
    if double := sum(b.nbytes for b in timeline.blocks if b.piece == LOGITS and len(timeline.sizes.of(b)) > 1):
        text.append(f"logits: {mib(double)} MiB of them, over the whole step, fit another name by their size as well")
    return [*text, *notes]
