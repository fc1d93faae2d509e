"""Collectives by size, ranks, backend and dtype: their bandwidths, latency fitted, and a ring all-reduce written out.

    python -m lab.studies.collectives --small                       # starts its own ranks: 2 and 4 of gloo on a CPU
    python -m lab.studies.collectives --ranks 2 4 8 --mb 1 10 100 1000 --dtypes fp32 bf16 --device cuda
    python main.py --world 8 --link measured:runs/study-collectives.jsonl        # and plan.py: the link that was fitted

S bytes of the whole tensor, N ranks. Algorithm bandwidth is S over the time, bus bandwidth what each rank sends over
the time: 2 (N-1)/N S to all-reduce, (N-1)/N S to gather or scatter, S to broadcast. Every collective is fitted by
alpha + sent / W, by relative least squares; the residual is the root mean square of the relative errors. The link of
`--link measured:FILE` is one fit to all-reduce, all-gather and reduce-scatter, of the last row of a file.

The ring's formula is 2 (N-1) (alpha + S / (N W)), alpha and W of one exchange with both neighbours.
"""

import math
import statistics
import sys
import warnings
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from lab.studies.study import (
    check_ranks,
    curves,
    default_ranks,
    main,
    milliseconds,
    on_ranks,
    published,
    section,
)
from trainer.attention_kernel import DTYPES
from trainer.collective_time import sent_bytes

LIBRARY = "all_reduce", "all_gather", "reduce_scatter"
OPS = *LIBRARY, "broadcast", "exchange", "ring"
KINDS = DTYPES | {"fp16": torch.float16}
SAME = ("backend",)


def flags(parser) -> None:
    parser.add_argument("--ranks", type=int, nargs="+", metavar="N")
    parser.add_argument("--mb", type=float, nargs="+", help="sizes of the whole tensor, 1e6 bytes")
    parser.add_argument("--dtypes", nargs="+", choices=list(KINDS), default=["fp32"])
    parser.add_argument("--backend", help="gloo or nccl (default: nccl on a GPU)")
    parser.add_argument(
        "--pieces",
        type=int,
        default=4,
        help="of a chunk of the ring, each sent on once it is added",
    )


def check(args) -> None:
    """Fills in what was not given. ValueError: ranks that there are not, a backend that is not there."""
    if args.ranks:
        check_ranks(args.ranks, args.device)
    args.ranks = args.ranks or default_ranks([2, 4] if args.small else [2, 4, 6], args.device)
    args.mb = args.mb or ([0.01, 1, 10] if args.small else [1, 10, 100, 1000])
    args.backend = args.backend or ("nccl" if args.device == "cuda" else "gloo")
    known = [name for name in ("gloo", "nccl") if dist.is_backend_available(name)]
    if args.backend not in known or (args.backend == "nccl") > (args.device == "cuda"):
        available = [name for name in known if name != "nccl" or args.device == "cuda"]
        raise ValueError(
            f"--backend {args.backend}: not there for {args.device}; use {' or '.join(available)}"
        )


def settings(args) -> list[dict]:
    return [
        dict(ranks=n, backend=args.backend, dtype=dtype, mb=args.mb, pieces=args.pieces)
        for n in args.ranks
        for dtype in args.dtypes
    ]


def ring_all_reduce(t: Tensor, op: str = "sum", pieces: int = 4, group=None) -> None:
    """All-reduces `t` in place by point-to-point sends: "sum" or "avg". Each of N chunks travels once around the ring
    and is added up, then once more and is copied, so that all ranks hold the same bits. A chunk is cut into `pieces`,
    each of which is sent on as soon as it has been added, while the next is still on its way. Any size, also one that
    does not divide, or none. ValueError: another op, or the mean of integers, which has no exact result."""
    if op not in ("sum", "avg") or (op == "avg" and not t.is_floating_point()):
        raise ValueError(
            f"ring all-reduce, op {op} of {t.dtype}: expected sum, or avg of floating point numbers"
        )
    n = dist.get_world_size(group)
    rank = dist.get_rank(group)
    flat = t.detach().reshape(-1)  # [S], a copy where `t` is not contiguous
    chunks = [chunk.tensor_split(pieces) for chunk in flat.tensor_split(n)]
    left, right = (
        dist.get_global_rank(group or dist.group.WORLD, (rank + by) % n) for by in (-1, 1)
    )
    space = [torch.empty_like(piece) for piece in chunks[0]]  # the first chunk is as large as any

    def start(out: Tensor, into: Tensor, tag: int) -> list:
        """Sends to the right and receives from the left; the empty pieces of both neighbours are the same."""
        ops = [dist.P2POp(dist.isend, out, right, group, tag)] * (out.numel() > 0)
        ops += [dist.P2POp(dist.irecv, into, left, group, tag)] * (into.numel() > 0)
        return dist.batch_isend_irecv(ops) if ops else []

    def turn(first: int, add: bool) -> None:
        """n - 1 steps. In step s this rank sends chunk first - s and receives the chunk before it."""
        works = {}
        for s in range(n - 1):
            for j in range(pieces):
                own_chunk = chunks[(first - s) % n][j]
                other = chunks[(first - s - 1) % n][j]
                for work in works.get(j, ()):
                    work.wait()
                if s and add:
                    own_chunk += space[j][: own_chunk.numel()]
                works[j] = start(own_chunk, space[j][: other.numel()] if add else other, j)
        for j, piece in enumerate(chunks[(first - n + 1) % n] if n > 1 else ()):
            for work in works[j]:
                work.wait()
            if add:
                piece += space[j][: piece.numel()]

    turn(rank, add=True)
    if op == "avg":
        for piece in chunks[(rank + 1) % n]:
            piece /= n
    turn(rank + 1, add=False)
    if flat.data_ptr() != t.data_ptr():
        t.detach().copy_(flat.view_as(t))


def operation(
    op: str, numel: int, dtype: torch.dtype, device: torch.device, pieces: int, group=None
):
    """A function without arguments that runs the collective once, on tensors of its own. group: not for "exchange"."""
    n = dist.get_world_size(group)
    rank = dist.get_rank(group)
    whole = torch.randn(numel, device=device).to(dtype)
    part = whole.tensor_split(n)[rank].clone()
    if op == "ring":
        return lambda: ring_all_reduce(whole, "avg", pieces, group)
    if op == "exchange":
        other = torch.empty_like(whole)
        left = (rank - 1) % n
        right = (rank + 1) % n
        ops = [dist.P2POp(dist.isend, whole, right), dist.P2POp(dist.irecv, other, left)]
        return lambda: [work.wait() for work in dist.batch_isend_irecv(ops)]
    how = dict(group=group)
    return {
        "all_reduce": lambda: dist.all_reduce(whole, **how),
        "broadcast": lambda: dist.broadcast(whole, group_src=0, **how),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part, **how),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole, **how),
    }[op]


def times(
    rank: int, device: torch.device, setting: dict, repeat: int, ops=OPS, group=None
) -> dict[str, list[list[float]]]:
    """{op: [ms, ..] per size}, on each rank. All begin together, also those of several groups."""
    # Torch 2.13 has other names for two of them.
    warnings.filterwarnings("ignore", category=FutureWarning)
    measured = {}
    for op in ops:
        for numel in numels(setting):
            work = operation(op, numel, KINDS[setting["dtype"]], device, setting["pieces"], group)
            measured.setdefault(op, []).append(
                milliseconds({"begin": dist.barrier, op: work}, device, repeat)[op]
            )
    return measured


def numels(setting: dict) -> list[int]:
    """Elements of each size, a multiple of the ranks: what is gathered must divide."""
    size = KINDS[setting["dtype"]].itemsize
    return [
        max(1, round(1e6 * mb / size / setting["ranks"])) * setting["ranks"] for mb in setting["mb"]
    ]


def measure(setting: dict, args) -> dict:
    """As `fitted`, of ranks that are started for it."""
    how = dict(device=args.device, backend=setting["backend"])
    return fitted(
        setting, on_ranks(setting["ranks"], times, setting, args.repeat, **how), args.repeat
    )


def fitted(setting: dict, ranks: list[dict], repeat: int) -> dict:
    """{"ops": {op: {ms: [..] per size, of the slowest rank, alpha_us, gb_per_s, residual}}, "link": the joint fit} of
    the `times` of ranks."""
    n = setting["ranks"]
    nbytes = [numel * KINDS[setting["dtype"]].itemsize for numel in numels(setting)]
    fits = {}
    points = []
    for op in ranks[0]:
        slowest = [
            [max(of_one) for of_one in zip(*of_ranks, strict=True)]
            for of_ranks in zip(*(rank[op] for rank in ranks), strict=True)
        ]
        ms = [statistics.median(of_one) for of_one in slowest]
        sent_and_seconds = [
            (sent(op, size, n), 1e-3 * t) for size, t in zip(nbytes, ms, strict=True)
        ]
        points += sent_and_seconds * (op in LIBRARY)
        fits[op] = dict(ms=ms, ms_min=[min(of_one) for of_one in slowest]) | fit(sent_and_seconds)
    return dict(nbytes=nbytes, ops=fits, link=fit(points), n=repeat, world=n)


def sent(op: str, nbytes: float, ranks: int) -> float:
    """Bytes that a rank sends."""
    return (
        nbytes
        if op == "exchange"
        else sent_bytes("all_reduce" if op == "ring" else op, nbytes, ranks)
    )


def fit(points: list[tuple[float, float]]) -> dict[str, float]:
    """alpha and W of seconds = alpha + bytes / W that make the sum of the squared relative errors least, neither below
    zero; and the residual. W is None where it cannot be seen. points: (bytes, seconds)."""
    a11 = a12 = a22 = b1 = b2 = 0.0  # the normal equations of (alpha + x s) / t = 1
    for x, t in points:
        a11 = a11 + 1 / t**2
        a12 = a12 + x / t**2
        a22 = a22 + x**2 / t**2
        b1 = b1 + 1 / t
        b2 = b2 + x / t
    det = a11 * a22 - a12**2
    alpha, slope = (
        ((a22 * b1 - a12 * b2) / det, (a11 * b2 - a12 * b1) / det)
        if det > 1e-9 * a11 * a22
        else (-1, 1)
    )
    if slope <= 0:  # times that do not grow with the bytes show no bandwidth
        alpha = b1 / a11
        slope = 0.0
    elif alpha < 0:  # or there is only one size
        alpha = 0.0
        slope = b2 / a22
    errors = [(alpha + x * slope) / t - 1 for x, t in points]
    rms = math.sqrt(sum(error**2 for error in errors) / len(errors))
    speed = float(f"{1e-9 / slope:.6g}") if slope else None
    return dict(alpha_us=round(1e6 * alpha, 3), gb_per_s=speed, residual=round(rms, 4))


def by_fit(fit: dict, nbytes: float) -> float:
    """Milliseconds of `nbytes` sent."""
    return 1e-3 * fit["alpha_us"] + (1e-6 * nbytes / fit["gb_per_s"] if fit["gb_per_s"] else 0)


def ring_ms(row: dict, nbytes: float) -> float:
    """By formula, from the fit of one exchange."""
    n = row["setting"]["ranks"]
    link = row["ops"]["exchange"]
    return 2 * (n - 1) * by_fit(link, nbytes / n)


COLUMNS = {
    "collective": "{op}",
    "n": "{ranks}",
    "MB, dtype": "{size}",
    "ms, median": "{ms:.3f}",
    "algorithm GB/s": "{algorithm:.3f}",
    "bus GB/s": "{bus:.3f}",
    "by fit; ring: by formula, ms": "{formula:.3f}",
    "alpha, W, residual": "{fitted}",
    "published ms": "{mean_s:ms ,.0f}",
}


def table(rows: list[dict]) -> tuple[str, str]:
    last = next((row["link"] for row in reversed(rows) if "link" in row), None)
    speed = f"{last['gb_per_s']} GB/s" if last and last["gb_per_s"] else "no bandwidth to be seen"
    fitted = "No link was fitted."
    if last:
        fitted = f"The link that was fitted last: {last['alpha_us']} us and {speed}."
    text = f"Backend {rows[0]['setting']['backend']}; ranks of one machine. {fitted}"
    return section(rows, text, COLUMNS, entries(rows))


def entries(rows: list[dict]) -> Iterator[dict]:
    """A line per collective and size, then the published table and what two of its sizes say."""
    theirs = {
        (float(line["mb"]), int(line["processes"]), line["backend"]): float(line["mean_s"])
        for line in published("allreduce")
    }
    for row in rows:
        setting = row["setting"]
        n = setting["ranks"]
        if row["outcome"] != "ok":
            yield row
        for op, fit in row.get("ops", {}).items():
            speed = f"{fit['gb_per_s']:.3g}" if fit["gb_per_s"] else "no"
            fitted = f"{fit['alpha_us']:.0f} us, {speed} GB/s, {100 * fit['residual']:.0f} %"
            for mb, nbytes, ms in zip(setting["mb"], row["nbytes"], fit["ms"], strict=True):
                moved = sent(op, nbytes, n)
                yield row | dict(
                    op=op.replace("_", "-"),
                    size=f"{mb:g} {setting['dtype']}",
                    ms=ms,
                    algorithm=nbytes / 1e6 / ms,
                    bus=moved / 1e6 / ms,
                    formula=ring_ms(row, nbytes) if op == "ring" else by_fit(fit, moved),
                    fitted=fitted,
                    mean_s=theirs.get((mb, n, setting["backend"])) if op == "all_reduce" else None,
                )
    for (mb, n, backend), seconds in theirs.items():
        line = dict(op=f"published {backend}", ranks=n, size=f"{mb:g}", mean_s=seconds)
        first = theirs.get((1, n, backend))
        if first and mb == 1000:  # W, as of ours, is of what a rank sends
            speed = sent_bytes("all_reduce", 0.999, n) / (seconds - first)
            start = f"{1e3 * first:.0f} ms of start-up"
            line |= dict(fitted=f"{start}, and {speed:.1f} GB/s from 1 to 1000 MB")
        yield line


def figure(rows: list[dict], folder) -> list:
    """Milliseconds over the size at the most ranks; the ring also by formula."""
    row = max(rows, key=lambda row: row["setting"]["ranks"])
    made = {
        op.replace("_", "-"): list(zip(row["setting"]["mb"], fit["ms"], strict=True))
        for op, fit in row["ops"].items()
    }
    sizes = zip(row["setting"]["mb"], row["nbytes"], strict=True)
    made["ring by formula"] = [(mb, ring_ms(row, nbytes)) for mb, nbytes in sizes]
    return curves(folder, "collectives", made, "MB of the whole tensor", "ms")


if __name__ == "__main__":
    sys.exit(main(sys.modules[__name__]))
