"""Plans compared: what fits, what is fastest, what to turn first, sweeps. Imports no torch.

    question = Question(c, architecture, gpu("h100"), ranks=8, per_node=8)
    question.answer()                      # Answer(config, ranks, peak, time)
    best(question, limit), relief(question, limit), fit_table(...)

A plan's flags are varied in copies of a SimpleNamespace of resolved flags; which of them go together is what config.py
says.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from types import SimpleNamespace
from typing import NamedTuple

from trainer.costs import Link, link
from trainer.planning.architecture import Architecture
from trainer.planning.liveness import Peak
from trainer.planning.schedule import Step, step_peak, whole
from trainer.planning.step_time import Gpu, Time, step_time

GRID = [round(0.05 * i, 2) for i in range(21)]  # of --remat-ratio
FASTER_FIRST = [  # what lowers memory, about from cheap to dear
    dict(adam_dtype="bf16"), dict(ahead=0.05), dict(reshard=True), dict(mode="fully_shard"), dict(accum_sync="every"),
    dict(remat="pointwise"), dict(remat="mlp"), dict(remat="both"), dict(remat="block"), dict(loss="chunked"),
    dict(mlp="lean"), dict(mlp="lean", mlp_chunk=4096), dict(remat="block", mlp="lean", loss="chunked"),
    dict(remat="block", remat_core=True, mlp="lean", mlp_chunk=4096, loss="chunked", ahead=0.05),
]  # fmt: skip


class Answer(NamedTuple):
    c: SimpleNamespace
    ranks: int
    peak: Peak
    time: Time

    @property
    def tokens_per_second(self) -> float:
        """Of all ranks together."""
        return self.ranks * self.c.batch * self.c.grad_accum * self.c.seqlen / self.time.seconds


@dataclass(frozen=True)
class Question:
    """c: resolved flags. inside, across: links between GPUs of a node and between nodes; per_node: GPUs of a node."""

    c: SimpleNamespace
    a: Architecture
    gpu: Gpu
    ranks: int
    per_node: int
    inside: Link
    across: Link

    def with_flags(self, **flags) -> "Question":
        return replace(self, c=SimpleNamespace(**(vars(self.c) | flags)))

    def peak(self) -> Peak:
        return step_peak(self.c, self.ranks, self.a, self.gpu.arch)

    def answer(self) -> Answer:
        """Peak and time, with the links that the ranks of a group have between them."""
        inside = self.inside
        if self.gpu.serial_link and "plain" in self.c.compile_options:
            inside = link(self.gpu.serial_link)
        group = self.ranks // self.c.replicas if self.c.mode == "hybrid_shard" else self.ranks
        if group > self.per_node:  # a ring is as fast as its slowest link
            inside = self.across
        across = self.across if self.ranks > self.per_node else inside
        tape = Step(self.c, self.a, self.ranks, whole(self.c, self.ranks)).tape
        peak = step_peak(self.c, self.ranks, self.a, self.gpu.arch, tape)
        return Answer(
            self.c, self.ranks, peak, step_time(self.c, self.ranks, self.a, self.gpu, inside, across, tape=tape)
        )


def misfit(c: SimpleNamespace, a: Architecture, ranks: int) -> str | None:
    """Why flags do not go together, or None: the rules of config.py that a plan can break, and those of an
    architecture."""
    if c.mode == "hybrid_shard" and ranks % c.replicas:
        return f"--replicas {c.replicas}: must divide the {ranks} GPUs of --mode hybrid_shard"
    if c.mlp == "lean" and (a.gated or a.experts):
        return "--mlp lean: computes LayerNorm, up, GELU and down, which is not what this MLP computes; use --mlp plain"
    if c.mlp == "lean" and c.remat == "pointwise":
        return "--mlp lean: recomputes what --remat pointwise keeps; use one of the two"
    if c.mlp_chunk and c.mlp != "lean":
        return f"--mlp-chunk {c.mlp_chunk}: is for --mlp lean"
    if c.remat_core and c.remat not in ("attn", "both", "block"):
        return f"--remat-core: changes nothing of --remat {c.remat}"
    return None


def label(c: SimpleNamespace, usual: SimpleNamespace) -> str:
    """The flags by which `c` differs from `usual`."""
    words = []
    for name, value in vars(c).items():
        if value != getattr(usual, name):
            flag = "--" + name.replace("_", "-")
            words.append(flag if value is True else f"--no-{flag[2:]}" if value is False else f"{flag} {value}")
    return " ".join(words) or "as asked"


def relief(q: Question) -> list[tuple[str, float, float, Answer]]:
    """What lowers the peak of a plan: (flags, bytes saved, seconds lost, answer), least time lost for a byte saved
    first."""
    now, found = q.answer(), []
    options = [*FASTER_FIRST]
    if q.c.batch % 2 == 0:
        options.append(dict(batch=q.c.batch // 2, grad_accum=2 * q.c.grad_accum))
    for flags in options:
        new = q.with_flags(**flags)
        if vars(new.c) == vars(q.c) or misfit(new.c, q.a, q.ranks):
            continue
        answer = new.answer()
        saved, lost = now.peak.nbytes - answer.peak.nbytes, answer.time.seconds - now.time.seconds
        if saved > 0:
            found.append((label(new.c, q.c), saved, lost, answer))
    return sorted(found, key=lambda each: max(each[2], 0) / each[1])


def plans(q: Question) -> Iterable[Question]:
    """Plans for the same global batch: mode, replicas, recomputation, loss, MLP, micro-batches and when they
    communicate."""
    sequences = q.c.batch * q.c.grad_accum
    micro = [b for b in (1, 2, 4, 8, 16, 32) if sequences % b == 0]
    modes = [dict(mode="fully_shard")]
    if q.ranks > 1:
        modes.append(dict(mode="replicate"))
    if q.ranks > q.per_node and q.ranks % q.per_node == 0:
        modes.append(dict(mode="hybrid_shard", replicas=q.ranks // q.per_node))
    remats = [dict(remat="none", remat_core=False), dict(remat="pointwise", remat_core=False),
              dict(remat="both", remat_core=False), dict(remat="block", remat_core=False)]  # fmt: skip
    mlps = [dict(mlp="plain", mlp_chunk=0)] + ([] if q.a.gated else [dict(mlp="lean", mlp_chunk=4096)])
    for mode, remat, mlp, loss, batch in product(modes, remats, mlps, ("full", "chunked"), micro):
        accum = sequences // batch
        for sync in ("every", "last") if accum > 1 and q.ranks > 1 else ("every",):
            new = q.with_flags(**mode, **remat, **mlp, loss=loss, batch=batch, grad_accum=accum, accum_sync=sync)
            if not misfit(new.c, q.a, q.ranks):
                yield new


def best(q: Question, limit: float) -> tuple[Answer | None, list[Answer]]:
    """The fastest plan whose peak is at most `limit` bytes (None: there is none), and the Pareto front of memory
    against time: plans of which none is both smaller and faster."""
    answers = [plan.answer() for plan in plans(q)]
    fitting = [each for each in answers if each.peak.nbytes <= limit]
    front, fastest = [], float("inf")
    for each in sorted(answers, key=lambda each: (each.peak.nbytes, each.time.seconds)):
        if each.time.seconds < fastest:
            front.append(each)
            fastest = each.time.seconds
    return min(fitting, key=lambda each: each.time.seconds, default=None), front


class Cell(NamedTuple):
    ranks: int
    micro: int
    ratio: float | None  # the least fraction of recomputed blocks that fits; None: none does
    accum: int


def fit_table(q: Question, gpus: Sequence[int], micro: Sequence[int], sequences: int, limit: float) -> list[Cell]:
    """For every number of GPUs and sequences of a micro-batch that divide the `sequences` of a step: the least
    recomputation, on a grid of 0.05, with which a step fits into `limit` bytes, and the accumulation that follows."""
    cells = []
    for ranks, batch in product(gpus, micro):
        if sequences % (ranks * batch):
            continue
        accum = sequences // (ranks * batch)
        asked = replace(q.with_flags(batch=batch, grad_accum=accum), ranks=ranks)
        asked = asked if asked.c.remat != "none" else asked.with_flags(remat="block")
        low, high = 0, len(GRID)  # the peak falls with the ratio
        while low < high:
            middle = (low + high) // 2
            if asked.with_flags(remat_ratio=GRID[middle]).peak().nbytes <= limit:
                high = middle
            else:
                low = middle + 1
        cells.append(Cell(ranks, batch, GRID[low] if low < len(GRID) else None, accum))
    return cells
