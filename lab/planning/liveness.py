"""What is alive when: operations in order, each of which reads and makes buffers -> the highest level of memory.

    tape = Tape(reuse=True)
    tape.op("up", reads=["x"], makes=[Make("h", 2**20)])    # bytes; dies after the last operation that reads it
    tape.peak()                                             # Peak(nbytes, moment, pieces)

The rules are Inductor's (torch/_inductor/codegen/wrapper.py and memory.py): a kernel may write over an input of the
same size that dies with it; a dead buffer is kept for a later one of the same size and dtype if, by the compiler's own
estimate, that does not raise the peak of the graph. CUDA's allocator rounds sizes up to 512 bytes. Imports no torch.
"""

from collections import Counter, defaultdict
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
    """A buffer that an operation makes. own: by itself, so that no dead buffer can serve (a collective, a custom
    op)."""

    name: str
    nbytes: float
    piece: str = WORKSPACE
    own: bool = False
    key: str = ""  # only buffers of one dtype can take each other's place


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
    """The operations of a step. reuse: Inductor's allow_buffer_reuse. blind: see `inputs`."""

    def __init__(self, reuse: bool = True, blind: bool = True):
        self.ops: list[Op] = []
        self.blind = blind
        self.reuse = reuse
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

    def inputs(self, lives: dict[str, Life], graph: int) -> list[float]:
        """Bytes at each operation, as the compiler counts them when it decides what a dead buffer may wait for: no
        buffer takes another's place. In a graph with collectives (`blind`) it counts only what earlier graphs made and
        this one still needs, since the passes of overlap.py leave out the one that would tell it the size of the
        others."""
        steps = [0.0] * (len(self.ops) + 2)
        for life in lives.values():
            own = self.ops[life.born].graph
            if own < graph or (own == graph and not self.blind):
                steps[life.born] += life.make.nbytes
                steps[life.last + 1] -= life.make.nbytes
        for i in range(len(self.ops)):
            steps[i + 1] += steps[i]
        return steps

    def homes(self, lives: dict[str, Life]) -> dict[str, str]:
        """Buffer -> the buffer in whose memory it lies, itself or an earlier one."""
        home = {}
        pool = defaultdict(list)
        dies = defaultdict(list)
        for name, life in lives.items():
            dies[life.last].append(name)
        graph = None
        for i, op in enumerate(self.ops):
            if op.graph != graph:
                graph = op.graph
                start = i
                guess = self.inputs(lives, op.graph)
                limit = max(guess[j] for j in range(i, len(self.ops)) if self.ops[j].graph == graph)
                pool.clear()
            gone = list(dies[i])
            for m in op.makes:
                key = (m.nbytes, m.key)
                where = m.name
                if op.over and m is op.makes[0]:
                    alike = [
                        n
                        for n in op.reads
                        if n in gone and (lives[n].make.nbytes, lives[n].make.key) == key
                    ]
                    if alike:
                        where = home[alike[0]]
                        gone.remove(alike[0])
                if where == m.name and not m.own and self.reuse and pool[key]:
                    freed, name = pool[key][-1]
                    if freed + 1 == i or m.nbytes + max(guess[freed + 1 : i]) <= limit:
                        pool[key].pop()
                        where = home[name]
                        for j in range(freed + 1, i):
                            guess[j] += m.nbytes
                home[m.name] = where
            for name in gone:
                # What an earlier graph made is an input here, and is only freed.
                if lives[name].born >= start:
                    pool[lives[name].make.nbytes, lives[name].make.key].append((i, name))
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
                kept = (
                    span.make.piece == WORKSPACE and self.ops[span.born].graph < self.ops[top].graph
                )
                pieces[KEPT if kept else span.make.piece] += span.make.nbytes
        pieces[WORKSPACE] += self.ops[top].inside
        found = {piece: size for piece, size in pieces.most_common() if size}
        return Peak(sum(found.values()), self.ops[top].where, found)

    def flops(self, op: Op) -> float:
        """Of an operation's products, as torch's FLOP counter sees them."""
        return sum(
            2 * w[1] * w[2] * w[3] if w[0] == "mm" else w[2] if w[0] == "attention" else 0
            for w in op.work
        )

    def pull(self, late: str, early: str) -> None:
        """What leads to the buffer `late` comes before the operation that makes `early`: the compiler fuses the kernel
        that makes `late` with one that stands before it."""
        made = {m.name: i for i, op in enumerate(self.ops) for m in op.makes}
        first = made[early]
        last = made[late]
        needed = set()
        wanted = [last]
        while wanted:
            if (i := wanted.pop()) >= first and i not in needed:
                needed.add(i)
                wanted += [made[name] for name in self.ops[i].reads if name in made]
        order = sorted(range(first, last + 1), key=lambda i: i not in needed)  # stable
        self.ops[first : last + 1] = [self.ops[i] for i in order]

    def hurry(self, ahead: float) -> None:
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
            if i > start:  # with the shard that is sent
                self.ops[start - 1 : i] = [
                    *self.ops[start + 1 : i],
                    *self.ops[start - 1 : start + 1],
                ]
        else:
            wait = self._at(graph, "wait", before)
            if i + 1 < wait:
                after = next(
                    j
                    for j in range(wait + 1, len(self.ops) + 1)
                    if j == len(self.ops) or not self.ops[j].tied
                )
                self.ops[i + 1 : after] = [*self.ops[wait:after], *self.ops[i + 1 : wait]]
