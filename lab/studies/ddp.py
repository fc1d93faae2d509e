"""Ways to average gradients over ranks that hold whole models: what of the communication a step has to wait for.

    python -m lab.studies.ddp --small                       # 8 simulated ranks on a slow link, and 2 real ranks of gloo
    python -m lab.studies.ddp --link measured:runs/study-collectives.jsonl --buckets 1 10 100 1000 --device cuda

Naive: an all-reduce per parameter after backward, each waited for; flat: one of all gradients; overlapped: one per
parameter as soon as its gradient is there; buckets: one per so many MB (1e6 bytes), overlapped; torch's DDP; ours,
`--mode replicate`, compiled on simulated ranks. A step without communication, in turn with the step, tells what is
exposed. With buckets of s / n_b bytes the exposed time should be n_b o + s / (n_b w): the calls, and the last bucket,
which no computation hides, where the others' computation takes as long as their communication. o is the link's latency,
w the bytes of gradient that an all-reduce moves a second. Least at n_b = sqrt(s / (w o)), buckets of sqrt(s w o) bytes.
"""

import argparse
import math
import statistics
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lab.studies.collectives import fit
from lab.studies.study import (
    beside,
    check_ranks,
    curves,
    main,
    milliseconds,
    on_ranks,
    published,
    section,
)
from model import Transformer
from trainer import config as config_flags
from trainer.collective_time import link, measured, sent_bytes
from trainer.distributed import simulated_world
from trainer.measuring.timing import stats
from trainer.parallelize import build, model_config

SMALL = dict(block="llama", depth=2, width=128, head_dim=32, vocab=1024, seqlen=64, batch=4)
# The xl model.
FULL = dict(block="llama", depth=48, width=1600, head_dim=64, vocab=10000, seqlen=128, batch=4)
SAME = *SMALL, "link"
WAYS = "naive", "flat", "overlap", "bucketed", "ddp", "ours"
THEIRS = {
    "naive": "naive (one all-reduce per parameter)",
    "flat": "flat (one all-reduce of all gradients)",
    "overlap": "overlap individual parameters",
}


def flags(parser) -> None:
    parser.add_argument("--world", type=int, help="simulated ranks (8)")
    parser.add_argument("--ranks", type=int, help="real ranks (2)")
    parser.add_argument(
        "--link", help="of simulated ranks, as main.py names it (small: 500:0.2, else ndr-ib)"
    )
    parser.add_argument(
        "--buckets",
        type=float,
        nargs="+",
        metavar="MB",
        help="(small: 0.2 0.5 1 2, else 1 to 1000)",
    )


def check(args) -> None:
    """Fills in what was not given. ValueError: no such link, ranks that there are not."""
    if args.ranks:
        check_ranks([args.ranks], args.device)
    if args.world == 1:
        raise ValueError("--world 1: one rank has nobody to talk to; give 2 or more")
    # With one GPU there are simulated ranks alone.
    args.world = args.world or 8
    args.ranks = args.ranks or 2
    args.link = measured(args.link or ("500:0.2" if args.small else "ndr-ib"))
    args.buckets = args.buckets or ([0.2, 0.5, 1, 2] if args.small else [1, 10, 100, 1000])
    if not link(args.link).latency_s or link(args.link).bytes_per_s == math.inf:
        raise ValueError(
            f"--link {args.link}: has no latency or takes no time; the best bucket needs both"
        )


def settings(args) -> list[dict]:
    """Simulated ranks with every bucket; real ranks, which a CPU is slow to start, with two. Where GPUs are fewer than
    ranks there are only simulated ones."""
    shape = SMALL if args.small else FULL
    chosen = []
    real = args.device == "cpu" or torch.cuda.device_count() >= args.ranks
    for kind, n in [("simulated", args.world)] + [("real", args.ranks)] * real:
        buckets = args.buckets if kind == "simulated" or not args.small else args.buckets[1:2]
        for way in WAYS:
            for mb in buckets if way == "bucketed" else [None]:
                base = dict(
                    kind=kind, ranks=n, link=args.link if kind == "simulated" else None, way=way
                )
                chosen.append(base | ({"mb": mb} if mb else {}) | shape)
    return chosen


class Reducer:
    """Averages the gradients of `params` over the ranks. cap: bytes of a bucket, None: all, 0: a bucket per parameter.
    overlap: a bucket is sent as soon as backward has made its gradients, in the same order on all ranks."""

    def __init__(self, params: list[nn.Parameter], cap: float | None, overlap: bool):
        self.buckets = []
        filled = math.inf
        for p in reversed(params):  # about the order in which gradients come
            if filled + p.nbytes > (math.inf if cap is None else cap) or not self.buckets:
                self.buckets.append([])
                filled = 0
            self.buckets[-1].append(p)
            filled += p.nbytes
        self.number = {p: i for i, bucket in enumerate(self.buckets) for p in bucket}
        self.on = True
        self.works = []
        self.left = [len(bucket) for bucket in self.buckets]
        # A hook that held this object would keep the parameters alive: autograd's hooks are not
        # collected.
        if overlap:
            ready = weakref.WeakMethod(self.ready)
            for p in params:
                p.register_post_accumulate_grad_hook(lambda p: (hook := ready()) and hook(p))
        self.overlap = overlap

    def ready(self, p: nn.Parameter) -> None:
        self.left[self.number[p]] -= 1
        while self.on and len(self.works) < len(self.buckets) and self.left[len(self.works)] <= 0:
            self.send()

    def send(self) -> None:
        """The next bucket."""
        grads = [
            torch.zeros_like(p) if p.grad is None else p.grad for p in self.buckets[len(self.works)]
        ]
        flat = torch.cat([g.reshape(-1) for g in grads]) if len(grads) > 1 else grads[0]
        work = dist.all_reduce(flat, async_op=True)
        if not self.overlap:
            work.wait()
        self.works.append((work, flat, grads))

    def finish(self) -> None:
        """After backward: the gradients are the mean over the ranks."""
        while self.on and len(self.works) < len(self.buckets):
            self.send()
        # None, if it is off.
        for bucket, (work, flat, grads) in zip(self.buckets, self.works, strict=False):
            work.wait()
            flat /= dist.get_world_size()
            for p, g, mean in zip(
                bucket, grads, flat.view(-1).split([g.numel() for g in grads]), strict=True
            ):
                p.grad = g if flat is g else g.copy_(mean.view_as(g))
        self.works = []
        self.left = [len(bucket) for bucket in self.buckets]

    def alone(self) -> list[tuple[int, Callable]]:
        """(bytes, all-reduce) of every bucket, on memory of its own."""
        flats = [
            torch.zeros(sum(p.numel() for p in b), dtype=b[0].dtype, device=b[0].device)
            for b in self.buckets
        ]
        return [(flat.nbytes, lambda flat=flat: dist.all_reduce(flat)) for flat in flats]


def words(
    setting: dict, device: str, compiled: bool, mode: str = "replicate"
) -> config_flags.Config:
    """The flags of main.py for the model of a setting."""
    shape = [word for name in SMALL for word in (f"--{name.replace('_', '-')}", str(setting[name]))]
    sim = (
        ["--world", str(setting["ranks"]), "--link", setting["link"]]
        if setting["kind"] == "simulated"
        else []
    )
    how = f"--mode {mode} --grouping 1 --param-dtype fp32 --reduce-dtype fp32 --remat none".split()
    how += ["--compile", "fwdbwd" if compiled else "none", "--device", device]
    return config_flags.resolve(config_flags.parse([*shape, *sim, *how]), device, setting["ranks"])


def batch(setting: dict, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """tokens and targets [B, T] of this rank."""
    torch.manual_seed(dist.get_rank())
    tokens = torch.randint(
        0, setting["vocab"], (setting["batch"], setting["seqlen"] + 1), device=device
    )
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def whole_model(config: config_flags.Config, device: torch.device) -> Transformer:
    """The model of resolved flags, the same on all ranks."""
    torch.manual_seed(0)
    model = Transformer(model_config(config, device)).to(device)
    model.init_weights()
    return model


def trainer(
    setting: dict, device: torch.device
) -> tuple[Callable, Callable | None, Reducer | None]:
    """(a step, the same without communication, the reducer), None where the way has none."""
    cap = {"naive": 0, "overlap": 0, "flat": None, "bucketed": 1e6 * setting.get("mb", 0)}
    x, y = batch(setting, device)
    config = words(setting, device.type, setting["kind"] == "simulated")
    if setting["way"] == "ours":
        step = build(config, device, setting["ranks"])
        return lambda: step(x, y), None, None
    model = whole_model(config, device)
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(params, lr=1e-3, fused=True)
    call = (
        DistributedDataParallel(model, gradient_as_bucket_view=True)
        if setting["way"] == "ddp"
        else model
    )
    reducer = (
        None
        if setting["way"] == "ddp"
        else Reducer(params, cap[setting["way"]], setting["way"] in ("overlap", "bucketed"))
    )

    def step(on: bool = True) -> None:
        if reducer:
            reducer.on = on
        with nullcontext() if on or reducer else call.no_sync():
            (call(x, y) / y.numel()).backward()
        if reducer:
            reducer.finish()
        optimizer.step()
        optimizer.zero_grad()

    step.model = model
    return step, lambda: step(False), reducer


def measure(setting: dict, args: argparse.Namespace) -> dict:
    """Milliseconds of a step, what of it is exposed, and the collectives of a step."""
    if setting["kind"] == "real":
        return on_ranks(setting["ranks"], real, setting, args.repeat, device=args.device)[0]
    return simulated(setting, args.repeat, torch.device(args.device))


def simulated(setting: dict, repeat: int, device: torch.device) -> dict:
    """On rank 0 of ranks that are not there: a step with the link and one with a link that takes no time, in turn."""
    simulated_world.start(setting["ranks"], link(setting["link"]), device)
    try:
        step, *_ = trainer(setting, device)

        def on(which: str) -> None:
            simulated_world.use(link(which))
            step()

        times = milliseconds(
            {"step": lambda: on(setting["link"]), "none": lambda: on("none")}, device, repeat
        )
        simulated_world.log().clear()
        on(setting["link"])
        calls = [call for call in simulated_world.log() if call.op == "all_reduce"]
    finally:
        torch._dynamo.reset()  # compiled code holds the group
        simulated_world.stop()
    return figures(times["step"], times["none"]) | dict(
        calls=len(calls),
        nbytes=sum(call.nbytes for call in calls),
        communication_ms=round(1e3 * sum(call.seconds for call in calls), 3),
    )


def real(rank: int, device: torch.device, setting: dict, repeat: int) -> dict:
    """The same on ranks; communication is that of the buckets by themselves, one after the other."""
    step, without, reducer = trainer(setting, device)
    parts = {"begin": dist.barrier, "step": step} | (
        {"again": dist.barrier, "none": without} if without else {}
    )
    times = milliseconds(parts, device, repeat)
    row = figures(times["step"], times.get("none"))
    if reducer:
        points = [
            (size, milliseconds({"all": work}, device, 3, 1)["all"])
            for size, work in reducer.alone()
        ]
        points = [(size, statistics.median(ms)) for size, ms in points]
        row |= dict(
            points=points,
            calls=len(points),
            nbytes=sum(size for size, _ in points),
            communication_ms=round(sum(ms for _, ms in points), 3),
        )
    torch._dynamo.reset()
    return row


def figures(step: list[float], none: list[float] | None) -> dict:
    """Medians, and that of what a step takes longer than the step without communication that followed it."""
    if not none:
        return stats(step)
    exposed = statistics.median(a - b for a, b in zip(step, none, strict=True))
    return stats(none, "compute") | stats(step) | dict(exposed_ms=round(exposed, 3))


def overhead(n: float, nbytes: float, o: float, w: float) -> float:
    """Seconds of n buckets: the calls, and the last bucket."""
    return n * o + nbytes / (n * w)


def best(nbytes: float, o: float, w: float) -> tuple[float, float]:
    """(number of buckets, bytes of one) at which `overhead` is least. o: seconds a call, w: bytes of gradient/s."""
    return math.sqrt(nbytes / (w * o)), math.sqrt(nbytes * w * o)


def constants(rows: list[dict]) -> tuple[float, float] | None:
    """(o, w) of rows of one kind: of simulated ranks those of their link, of real ones fitted to their buckets. None
    where a fit sees no bandwidth."""
    setting = rows[0]["setting"]
    if setting["kind"] == "simulated":
        fast_link = link(setting["link"])
        return fast_link.latency_s, fast_link.bytes_per_s / sent_bytes(
            "all_reduce", 1.0, setting["ranks"]
        )
    fitted = fit(
        [(size, 1e-3 * ms) for row in rows for size, ms in row.get("points", [])] or [(1.0, 1.0)]
    )
    return (
        (1e-6 * fitted["alpha_us"], 1e9 * fitted["gb_per_s"])
        if fitted["alpha_us"] and fitted["gb_per_s"]
        else None
    )


COLUMNS = {
    "ranks": "{kind}, {ranks}",
    "way": "{name}",
    "step ms": "{step_ms:,.1f}",
    "all-reduces": "{calls}",
    "communication %": "{communication_share:.0f}",
    "exposed %": "{exposed_share:.0f}",
    "exposed ms": "{exposed_ms:,.1f}",
    "by formula, ms": "{formula_ms:,.1f}",
    "published step s": "{published}",
}


def table(rows: list[dict]) -> tuple[str, str]:
    """A line per way, then the best bucket by formula; published steps are of other sizes and no ratio is taken."""
    theirs = {}
    for line in published("ddp"):
        step = f"{float(line['step_s']):.3f}" if line["step_s"] else line["notes"]
        name = line["variant"]
        theirs[name] = dict(kind="published", ranks=2, name=name, published=step)
    setting = rows[0]["setting"]
    text = (
        f"Depth {setting['depth']}, width {setting['width']}, {setting['batch']} x {setting['seqlen']} "
        f"tokens a rank, fp32; simulated link {setting['link']}. Published: the xl model on 2 GPUs."
    )
    entries = beside(measured_ways(rows), theirs, lambda line: line["variant"])
    return section(rows, text, COLUMNS, entries)


def measured_ways(rows: list[dict]) -> Iterator[dict]:
    """The lines of the table: each way of reducing beside the others of its kind and number of ranks."""

    def place(row: dict) -> tuple[str, int]:
        return row["setting"]["kind"], row["setting"]["ranks"]

    for kind, ranks in dict.fromkeys(map(place, rows)):
        of_place = [row for row in rows if place(row) == (kind, ranks)]
        fitted = constants(of_place)
        nbytes = max(row.get("nbytes", 0) for row in of_place)
        for row in of_place:
            setting = row["setting"]
            name = f"{setting['way']} {setting['mb']:g} MB" if "mb" in setting else setting["way"]
            line = row | dict(name=name, variant=THEIRS.get(setting["way"], name))
            step = row.get("step_ms")
            for part in ("communication", "exposed"):
                if step and row.get(f"{part}_ms") is not None:
                    line[f"{part}_share"] = 100 * row[f"{part}_ms"] / step
            if setting["way"] == "bucketed" and fitted and step:
                line["formula_ms"] = 1e3 * overhead(row["calls"], nbytes, *fitted)
            yield line
        if fitted and nbytes:
            n, size = best(nbytes, *fitted)
            line = dict(kind=kind, ranks=ranks, variant=None, calls=f"{n:.1f}")
            line |= dict(name=f"best by formula: {size / 1e6:.2g} MB")
            yield line | dict(formula_ms=1e3 * overhead(n, nbytes, *fitted))


def figure(rows: list[dict], folder) -> list:
    """Exposed time of simulated ranks over the size of a bucket, the formula, and its best bucket."""
    simulated_rows = [row for row in rows if row["setting"]["kind"] == "simulated"]
    fitted = constants(simulated_rows) if simulated_rows else None
    nbytes = max((row["nbytes"] for row in simulated_rows), default=0)
    made = {
        "measured": [
            (row["setting"]["mb"], row["exposed_ms"])
            for row in simulated_rows
            if "mb" in row["setting"]
        ]
    }
    made["n o + s / (n w)"] = [
        (row["setting"]["mb"], 1e3 * overhead(row["calls"], nbytes, *fitted))
        for row in simulated_rows
        if fitted and "mb" in row["setting"]
    ]
    marks = {"best by formula": best(nbytes, *fitted)[1] / 1e6} if fitted else {}
    return curves(folder, "ddp", made, "MB of a bucket", "exposed ms of a step", marks)


if __name__ == "__main__":
    sys.exit(main(sys.modules[__name__]))
