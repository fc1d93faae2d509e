"""AdamW's states whole on every rank, sharded over ranks (ZeRO stage 1), and everything sharded: memory, bytes sent.

    python -m lab.studies.zero1 --small               # starts 2 ranks of gloo
    python -m lab.studies.zero1 --ranks 2 --device cuda

Of P parameters in fp32 on N ranks each holds: whole 4 P of weights, 4 P of gradients, 8 P of moments; sharded 8 P / N
of moments; `--mode fully_shard` of main.py 4 P / N, 4 P / N, 8 P / N, and a block's weights while it runs.
`ShardedOptimizer` gives each parameter to one rank, by bytes, and broadcasts what that rank has updated. A step sends
2 (N-1)/N S to average gradients of S bytes, and (N-1)/N S to give out parameters; ZeRO stage 1 as it was published
scatters gradients to their owners instead, 2 (N-1)/N S in all. What is sent is counted on simulated ranks.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lab.studies.ddp import FULL, SMALL, Reducer, batch, whole_model, words
from lab.studies.study import check_ranks, main, milliseconds, on_ranks, published, section
from trainer.collective_time import link, sent_bytes
from trainer.distributed import simulated_world
from trainer.measuring.memory import memory_now, peak, reset_peak
from trainer.measuring.timing import stats
from trainer.optimizer import local
from trainer.parallelize import build

SAME = *SMALL, "ranks"
WAYS = "whole", "sharded", "fully_shard"
THEIRS = {"whole": "replicated", "sharded": "sharded"}
PIECES = "parameters", "gradients", "states"


class ShardedOptimizer(torch.optim.Optimizer):
    """Any optimizer class of torch whose states each rank holds for its own parameters alone.

        optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)

    `params` as torch's; a parameter that comes twice counts once. Every parameter goes to the rank that has least, the
    largest first. Gradients must be the same on all ranks, as after an all-reduce. `step` is collective: it updates
    this rank's parameters and hands them out. `state` and `state_dict` are of this rank's alone, and only a rank that
    owns the same parameters can load them."""

    def __init__(
        self,
        params: Iterable,
        kind: type[torch.optim.Optimizer],
        group=None,
        bucket_mb=25.0,
        **options,
    ):
        self.kind = kind
        self.options = options
        self.group = group
        self.cap = 1e6 * bucket_mb
        self.loads = [0] * dist.get_world_size(group)  # bytes of parameters
        self.rank = dist.get_rank(group)
        self.owner = {}
        self.local_optimizer = None
        self.pairs = []
        super().__init__(params, kind([torch.zeros(1)], **options).defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Also called for each group that __init__ is given."""
        params = param_group["params"]
        param_group["params"] = list(
            dict.fromkeys([params] if isinstance(params, Tensor) else params)
        )
        super().add_param_group(param_group)
        for p in sorted(param_group["params"], key=lambda p: -p.nbytes):
            self.owner[p] = self.loads.index(min(self.loads))
            self.loads[self.owner[p]] += p.nbytes
        mine = param_group | dict(
            params=[p for p in param_group["params"] if self.owner[p] == self.rank]
        )
        if mine["params"]:
            if self.local_optimizer is None:
                self.local_optimizer = self.kind([mine], **self.options)
                self.state = self.local_optimizer.state
            else:
                self.local_optimizer.add_param_group(mine)
            self.pairs.append((len(self.param_groups) - 1, self.local_optimizer.param_groups[-1]))

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        """An update of all parameters; returns what `closure` does."""
        with torch.enable_grad():
            loss = closure() if closure else None
        for number, mine in self.pairs:  # what a scheduler has changed
            group = self.param_groups[number]
            mine.update({name: value for name, value in group.items() if name != "params"})
        if self.local_optimizer:
            self.local_optimizer.step()
        last = None
        for sent in self.send():  # at most two buckets are on their way, and copied
            self.copy_received(*last) if last else None
            last = sent
        self.copy_received(*last)
        return loss

    def send(self) -> Iterable[tuple]:
        """(broadcast, copy, parameters) of each bucket, which is begun as it is asked for."""
        for owner, bucket in self.buckets():
            flat = torch.cat([p.reshape(-1) for p in bucket])
            source = dist.get_global_rank(self.group or dist.group.WORLD, owner)
            yield dist.broadcast(flat, source, group=self.group, async_op=True), flat, bucket

    def copy_received(self, work: dist.Work, flat: Tensor, bucket: list[Tensor]) -> None:
        work.wait()
        for p, new in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
            p.copy_(new.view_as(p))

    def buckets(self) -> Iterable[tuple[int, list[Tensor]]]:
        """(owner, parameters) of each broadcast: of one dtype, and at most `bucket_mb`, unless one alone has more."""
        for (owner, _), params in groupby(sorted(self.owner, key=self.place), key=self.place):
            bucket = []
            filled = 0
            for p in params:
                if bucket and filled + p.nbytes > self.cap:
                    yield owner, bucket
                    bucket = []
                    filled = 0
                bucket.append(p)
                filled += p.nbytes
            yield owner, bucket

    def place(self, p: Tensor) -> tuple:
        return self.owner[p], str(p.dtype)

    def load_state_dict(self, state_dict: dict) -> None:
        """What `state_dict` gave on this rank of as many ranks. ValueError for states of other parameters."""
        owners = [self.owner[p] for group in self.param_groups for p in group["params"]]
        if others := [i for i in state_dict["state"] if i >= len(owners) or owners[i] != self.rank]:
            raise ValueError(
                f"rank {self.rank} of {len(self.loads)} does not own parameters {others[:3]}"
            )
        super().load_state_dict(state_dict)
        if self.local_optimizer:
            self.local_optimizer.state = self.state


def flags(parser) -> None:
    parser.add_argument("--ranks", type=int, help="(2)")


def check(args) -> None:
    """Fills in what was not given. ValueError: ranks that there are not."""
    if args.ranks:
        check_ranks([args.ranks], args.device)
    args.ranks = args.ranks or 2  # if there is one GPU, the rows say so


def settings(args) -> list[dict]:
    shape = SMALL if args.small else FULL
    return [dict(kind="real", ranks=args.ranks, way=way) | shape for way in WAYS]


def held(
    params: list[Tensor], grads: list[Tensor] | None, states: Iterable[Tensor], device
) -> dict[str, float]:
    """Bytes that this rank holds of each piece that is given, and MiB in use."""
    pieces = {
        name: tensors
        for name, tensors in zip(PIECES, (params, grads, states), strict=True)
        if tensors is not None
    }
    bytes_by_piece = {
        name: sum(local(t).nbytes for t in tensors if t is not None)
        for name, tensors in pieces.items()
    }
    return bytes_by_piece | dict(now_mib=memory_now(device))


def trainer(
    setting: dict, device: torch.device
) -> tuple[Callable[[], Any], Callable[[], Any], dict[str, dict]]:
    """(a step, one that notes what is held, what it noted by moments); "after init" is there at once."""
    x, y = batch(setting, device)
    config = words(setting, device.type, False, "fully_shard")
    if setting["way"] == "fully_shard":
        step = build(config, device, setting["ranks"])
        params = step.optimizer.params
        states = [*step.optimizer.m, *step.optimizer.v]
        moments = {"after init": held(params, [p.grad for p in params], states, device)}

        def watcher(phase: str, grads: list[Tensor]) -> None:
            if phase == "step":
                moments["before the update"] = held(params, grads, states, device)

        def noted() -> None:
            with step.watch_phases(watcher):
                step(x, y)
            # What is left of gradients is not counted.
            moments["after the update"] = held(params, None, states, device)

        return lambda: step(x, y), noted, moments
    model = whole_model(config, device)
    params = list(model.parameters())
    kind = torch.optim.AdamW
    how = dict(lr=1e-3, fused=True)
    optimizer = (
        kind(params, **how) if setting["way"] == "whole" else ShardedOptimizer(params, kind, **how)
    )
    reducer = Reducer(params, 25e6, True)
    moments = {}

    def note(name: str) -> None:
        # No step counters.
        states = [t for state in optimizer.state.values() for t in state.values() if t.ndim]
        moments[name] = held(params, [p.grad for p in params], states, device)

    def training_step(on_moment: Callable[[str], None] = len) -> None:
        (model(x, y) / y.numel()).backward()
        reducer.finish()
        on_moment("before the update")
        optimizer.step()
        on_moment("after the update")
        optimizer.zero_grad()

    note("after init")
    return training_step, lambda: training_step(note), moments


def on_rank(
    rank: int, device: torch.device, setting: dict, repeat: int
) -> tuple[dict, list[float], dict]:
    """(what is held at each moment of the first step, ms of later steps, the peak of the second)"""
    step, noted, moments = trainer(setting, device)
    noted()
    reset_peak(device)
    step()
    most = peak(device)
    return (
        moments,
        milliseconds({"begin": dist.barrier, "step": step}, device, repeat, 1)["step"],
        most,
    )


def measure(setting: dict, args) -> dict:
    """What the rank that holds most of the states holds, by moments, and its peak in a step; bytes that a rank sends in
    a step, counted."""
    ranks = on_ranks(setting["ranks"], on_rank, setting, args.repeat, device=args.device)
    most, _, top = max(ranks, key=lambda rank: rank[0]["after the update"]["states"])
    return (
        stats(ranks[0][1])
        | dict(moments=most, sent=counted(setting, torch.device(args.device)))
        | top
    )


def counted(setting: dict, device: torch.device) -> dict[str, float]:
    """{collective: bytes that a rank sends}, the mean over the ranks, in the second step on simulated ranks."""
    simulated_world.start(setting["ranks"], link("none"), device)
    try:
        step, *_ = trainer(setting, device)
        step()
        simulated_world.log().clear()
        step()
        sent: dict[str, float] = {}
        for call in simulated_world.log():
            # Of a broadcast: the last of a ring sends nothing on.
            share = (call.ranks - 1) / call.ranks
            nbytes = (
                share * call.nbytes
                if call.op == "broadcast"
                else sent_bytes(call.op, call.nbytes, call.ranks)
            )
            sent[call.op] = sent.get(call.op, 0.0) + nbytes
    finally:
        simulated_world.stop()
    return sent


def arithmetic(way: str, parameters: float, n: int) -> tuple[float, float, float]:
    """Bytes of parameters, gradients and states on a rank."""
    whole = 4 * parameters
    part = 4 * parameters / n
    rest = part if way == "fully_shard" else whole
    return rest, rest, 2 * (whole if way == "whole" else part)


COLUMNS = {
    "way": "{way}",
    "moment": "{moment}",
    **{piece: f"{{{piece}:MiB ,.2f}}" for piece in PIECES},
    "by arithmetic": "{arithmetic}",
    "rest": "{rest_mib:,.1f}",
    "peak": "{top_mib:,.1f}",
    "step ms": "{step_ms:,.1f}",
    "sent MiB": "{sent_bytes:MiB .2f}",
    "published": "{peak_gb} GB, {step_s} s",
}


def table(rows: list[dict]) -> tuple[str, str]:
    first = rows[0]["setting"]
    whole = max((row["moments"]["after init"]["parameters"] for row in measured(rows)), default=0)
    stage_1 = 2 * (first["ranks"] - 1) / first["ranks"] * whole / 2**20
    text = (
        f"{first['ranks']} ranks, depth {first['depth']}, width {first['width']}, fp32, MiB of the rank with most "
        f"states. ZeRO stage 1 as published would send {stage_1:.2f} MiB a step. "
        "The rest is of the device's allocator, or on a CPU of the whole process, as is the peak, of the second step."
    )
    return section(rows, text, COLUMNS, entries(rows))


def measured(rows: list[dict]) -> list[dict]:
    return [row for row in rows if row["outcome"] == "ok"]


def entries(rows: list[dict]) -> Iterator[dict]:
    """A line per way and moment; bytes sent beside those of ZeRO stage 1."""
    theirs = {line["optimizer_state"]: line for line in published("zero1")}
    for row in rows:
        if row["outcome"] != "ok":
            yield row
            continue
        shape = row["setting"]
        way = shape["way"]
        parameters = measured(rows)[0]["moments"]["after init"]["parameters"] / 4
        formula = (f"{size / 2**20:.2f}" for size in arithmetic(way, parameters, shape["ranks"]))
        for moment, peaks in row["moments"].items():
            line = dict(way=way, moment=moment) | peaks
            if peaks.keys() >= set(PIECES):
                line["rest_mib"] = peaks["now_mib"] - sum(peaks[piece] for piece in PIECES) / 2**20
            if moment == "after init":
                line["sent_bytes"] = sum(row["sent"].values())
            if moment == "after the update":
                line |= theirs.get(THEIRS.get(way), {})
                line |= dict(arithmetic=" + ".join(formula), step_ms=row["step_ms"])
                line["top_mib"] = row.get("peak_alloc_mib", row.get("peak_rss_mib"))
            yield line


def figure(rows: list[dict], folder) -> list:
    """What a rank holds after an update, way by way."""
    from lab.report import plots

    plot = plots.column(2.4)
    ax = plot.subplots()
    low = [0.0] * len(rows)
    handles = {}
    names = {"whole": "DDP", "sharded": "ZeRO-1", "fully_shard": "FSDP"}
    for piece, color in zip(PIECES, plots.FILLS, strict=False):
        sizes = [
            row["moments"]["before the update" if piece == "gradients" else "after the update"][
                piece
            ]
            / 2**20
            for row in rows
        ]
        how = dict(color=color, edgecolor="black", linewidth=0.5)
        handles[piece] = ax.bar(
            [names[row["setting"]["way"]] for row in rows], sizes, bottom=low, **how
        )
        low = [a + b for a, b in zip(low, sizes, strict=True)]
    ax.set_ylabel("MiB of a rank, counted")
    plots.legend(plot, handles, ncols=3)
    return plots.save(plot, folder, "study-zero1")


if __name__ == "__main__":
    sys.exit(main(sys.modules[__name__]))
