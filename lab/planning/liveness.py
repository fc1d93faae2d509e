"""What is alive when: operations in order, each of which reads and makes buffers -> the highest level of memory.

    tape = Tape()
    tape.op("up", reads=["x"], makes=[Make("h", 2**20)])    # bytes; dies after the last operation that reads it
    tape.peak()                                             # Peak(nbytes, moment, pieces)

The rule is Inductor's with the options of overlap.py: a kernel may write over an input of the same size that dies with
it; any other dead buffer is freed at once. CUDA's allocator rounds sizes up to 512 bytes. Imports no torch.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

KEPT = "saved for backward"
WEIGHTS = "gathered weights"
GRADIENTS = "gradients"
LOGITS = "logits"
WORKSPACE = "workspace"


class Make(NamedTuple):
    """A buffer that an operation makes."""

    name: str
    nbytes: float
    piece: str = WORKSPACE
    dtype: str = ""  # only buffers of one dtype can take each other's place


@dataclass(frozen=True)
class Op:
    """where: in words. over: it may write its first output over an input that dies here. inside: bytes that it holds
    while it runs. work: see step_time. graph: the number of the compiled graph that it belongs to. tied: it moves with
    the one before."""

    where: str
    reads: tuple[str, ...]
    makes: tuple[Make, ...]
    over: bool = False
    inside: float = 0
    work: tuple[tuple, ...] = ()
    graph: int = 0
    tied: bool = False


class Peak(NamedTuple):
    """The highest level of a step. pieces: {what: bytes}, largest first."""

    nbytes: float
    moment: str
    pieces: dict[str, float]


class Life(NamedTuple):
    make: Make
    born: int  # the operation that makes it
    last: int  # the last one that reads it


class Tape:
    """The operations of a step."""

    def __init__(self):
        self.ops: list[Op] = []
        self.number = 0
        self.forever = set()

    def op(self, where: str, reads: Iterable[str] = (), makes: Iterable[Make] = (), **more) -> None:
        makes = tuple(Make(m.name, -(-int(m.nbytes) // 512) * 512, *m[2:]) for m in makes)
        self.ops.append(Op(where, tuple(reads), makes, graph=self.number, **more))

    def graph(self) -> None:
        """What follows is another compiled graph."""
        self.number += 1

    def keep(self, *names: str) -> None:
        """These live to the end of the step."""
        self.forever.update(names)

    def lives(self) -> dict[str, Life]:
        """Every buffer by name, from the operation that makes it to the last one that reads it."""
        made = {}
        last = {}
        end = len(self.ops)
        for i, op in enumerate(self.ops):
            for m in op.makes:
                made[m.name] = (m, i)
                last[m.name] = i
            last.update((name, i) for name in op.reads if name in made)
        last.update((name, end) for name in self.forever if name in made)
        return {name: Life(*m, last[name]) for name, m in made.items()}

    def homes(self, lives: dict[str, Life]) -> dict[str, str]:
        """Buffer -> the buffer in whose memory it lies, itself or an earlier one."""
        home = {name: name for name in lives}
        for i, op in enumerate(self.ops):
            if not op.over:
                continue
            made = op.makes[0]
            for name in op.reads:
                before = lives.get(name)
                alike = before and (before.make.nbytes, before.make.dtype) == (
                    made.nbytes,
                    made.dtype,
                )
                if alike and before.last == i:
                    home[made.name] = home[name]
                    break
        return home

    def levels(self) -> tuple[list[float], list[Life]]:
        """Bytes during each operation, and the storages."""
        lives = self.lives()
        spans: dict[str, Life] = {}
        for name, home in self.homes(lives).items():
            span = spans.get(home, lives[home])
            spans[home] = span._replace(last=max(span.last, lives[name].last))
        steps = [0.0] * (len(self.ops) + 2)
        for span in spans.values():
            steps[span.born] += span.make.nbytes
            steps[span.last + 1] -= span.make.nbytes
        for i in range(len(self.ops)):
            steps[i + 1] += steps[i]
        return [steps[i] + op.inside for i, op in enumerate(self.ops)], [*spans.values()]

    def peak(self, base: dict[str, float] | None = None) -> Peak:
        """base: {piece: bytes} of what is there before the step."""
        levels, spans = self.levels()
        top = max(range(len(levels)), key=levels.__getitem__)
        pieces = Counter(base or {})
        for span in spans:
            if span.born <= top <= span.last:
                saved = (
                    span.make.piece == WORKSPACE and self.ops[span.born].graph < self.ops[top].graph
                )
                pieces[KEPT if saved else span.make.piece] += span.make.nbytes
        pieces[WORKSPACE] += self.ops[top].inside
        parts = {piece: size for piece, size in pieces.most_common() if size}
        return Peak(sum(parts.values()), self.ops[top].where, parts)

    def flops(self, op: Op) -> float:
        """Of an operation's products, as torch's FLOP counter sees them."""
        return sum(
            2 * w[1] * w[2] * w[3] if w[0] == "mm" else w[2] if w[0] == "attention" else 0
            for w in op.work
        )

    def shorten_overlap(self, ahead: float) -> None:
        """overlap.py's `ahead`: gathers but the first of a graph start later, and reductions are waited for sooner, so
        that each has this part of the products around it to hide behind."""
        for graph in range(self.number + 1):
            names = [
                w[1] for op in self.ops if op.graph == graph for w in op.work if w[0] == "start"
            ]
            for kind, wanted in (("all_gather", 1 - ahead), ("reduce", ahead), ("across", ahead)):
                mine = [name for name in names if self._kind(name, graph) == kind]
                for before, name in zip(mine, mine[1:], strict=False):
                    self._move(graph, before, name, kind, wanted)

    def give_way(self, ratio: float) -> None:
        """overlap.py's give_way_at_peak: the largest gather or reduce-scatter under way at the peak of a graph, if it
        is no more than a twelfth of it, starts later (behind no other start) or is waited for sooner. Two of a graph.
        ratio: bytes of a stored parameter over those that are sent; until then it counts as an input of the graph."""
        for graph in 2 * [*range(self.number + 1)]:
            self._give_way(graph, ratio)

    def _give_way(self, graph: int, ratio: float) -> None:
        inside = [i for i, op in enumerate(self.ops) if op.graph == graph]
        lives = self.lives()
        levels = [level - op.inside for level, op in zip(self.levels()[0], self.ops, strict=True)]
        for life in lives.values():  # to the pass a part of the kernel that reads it
            if life.make.name.startswith("normed"):
                for i in range(life.born, life.last + 1):
                    levels[i] -= life.make.nbytes
        for start in inside:
            if any(w[0] == "start" and w[2] == "all_gather" for w in self.ops[start].work):
                shard = ratio * sum(lives[name].make.nbytes for name in self.ops[start].reads)
                for i in range(inside[0], start):
                    levels[i] += shard
        peak = max(inside, key=levels.__getitem__)
        under_way = []
        for start in inside:
            op = self.ops[start]
            for _, name, kind, *_ in (w for w in op.work if w[0] == "start"):
                gather = kind == "all_gather"
                held = [m.name for m in op.makes] + list(op.reads) * (not gather)
                size = sum(lives[each].make.nbytes for each in held)
                wait = self._at(graph, "wait", name)
                small = 12 * size <= levels[peak] and not kind.startswith("all_reduce")
                if small and start < peak < wait:
                    under_way.append((size, start, wait, gather, held))
        if not under_way:
            return
        size, start, wait, gather, held = max(under_way, key=lambda transfer: transfer[:2])
        without = list(levels)
        for name in held:
            life = lives[name]
            for i in range(life.born, min(life.last, len(self.ops) - 1) + 1):
                without[i] -= life.make.nbytes
        room = max(without[i] for i in inside) - size
        if gather:
            at = wait
            while at > start + 1 and without[at - 1] <= room:
                at -= 1
            # Inductor's kernels stand where the first of what they fuse does, before the gather.
            while at > peak and not self.ops[at - 1].work:
                at -= 1
            passed = any(w[0] == "start" for op in self.ops[start + 1 : at] for w in op.work)
            if not passed and at > peak and any(map(self.flops, self.ops[at:wait])):
                self._start_at(start, at)
        else:
            at = start
            while at < wait - 1 and without[at + 1] <= room:
                at += 1
            if at < peak and any(map(self.flops, self.ops[start : at + 1])):
                self._wait_behind(at, wait)

    def _start_at(self, start: int, at: int) -> None:
        """A gather starts before the operation `at`, with the shard that is sent."""
        self.ops[start - 1 : at] = [*self.ops[start + 1 : at], *self.ops[start - 1 : start + 1]]

    def _wait_behind(self, at: int, wait: int) -> None:
        """A reduction is waited for behind the operation `at`, with what is tied to that."""
        after = wait + 1
        while after < len(self.ops) and self.ops[after].tied:
            after += 1
        self.ops[at + 1 : after] = [*self.ops[wait:after], *self.ops[at + 1 : wait]]

    def _kind(self, name: str, graph: int) -> str:
        op = next(
            w for op in self.ops if op.graph == graph for w in op.work if w[:2] == ("start", name)
        )[2]
        return op if op == "all_gather" else "across" if op.endswith("across") else "reduce"

    def _at(self, graph: int, kind: str, name: str) -> int:
        return next(
            i
            for i, op in enumerate(self.ops)
            if op.graph == graph and any(w[:2] == (kind, name) for w in op.work)
        )

    def _move(self, graph: int, before: str, name: str, kind: str, part: float) -> None:
        gather = kind == "all_gather"
        first = self._at(graph, "wait" if gather else "start", before) + 1
        last = self._at(graph, "wait" if gather else "start", name)
        done = [*accumulate(self.flops(op) for op in self.ops[first:last])]
        enough = (
            i
            for i in range(first, last)
            if self.flops(self.ops[i]) and done[i - first] >= part * done[-1]
        )
        if (i := next(enough, None)) is None:
            return
        if gather:
            start = self._at(graph, "start", name)
            if i > start:
                self._start_at(start, i)
        else:
            wait = self._at(graph, "wait", before)
            if i + 1 < wait:
                self._wait_behind(i, wait)
