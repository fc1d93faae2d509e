"""Time of a training step: two streams in the order of the graph, read off the tape of schedule.py. Imports no torch.

    t = step_time(config, 8, architecture, gpu, link)  # Time(seconds, parts, exposed)

The compute stream runs one operation after the other; the other stream runs collectives, each from where the graph
starts it; where the graph waits, compute stands still until the collective is done. What stands still is the exposed
time. With --compile-options plain there is one collective per parameter, waited for at once.

An operation takes the longer of what its FLOPs and its bytes take, and at least the time to launch it.
"""

import heapq
import math
from collections import Counter
from typing import NamedTuple

from lab.planning.liveness import Tape
from lab.planning.schedule import PlannedStep
from lab.planning.weights import SIZE, shard_group, trained, update_bytes
from trainer.collective_time import Link
from trainer.step_costs import NEWTON_SCHULZ_STEPS, Architecture, muon

TILE = 256, 128  # of a product's output that one SM computes at a time
START = 128  # of a product's sum: what a tile costs before it begins and after it ends, in elements
DEEP = 2048  # elements of a sum that are worth an SM of their own
BLOCK = 128  # keys that a kernel of attention visits at a time: a causal mask is left out by blocks
PARAMETERS_OF_A_BLOCK = 12


class Gpu(NamedTuple):
    """What a device reaches. Rates in FLOP/s and bytes/s; attention by kernel; floor: seconds of the shortest
    operation. scaled: from which GPU the rates are scaled, if they were not measured. link: between GPUs, as
    links.link reads it; serial_link: of --compile-options plain. error: median and worst error of steps, as fractions,
    and of how many rows."""

    name: str
    peak: float
    products: float
    bandwidth: float
    memory: float  # bytes
    sms: int
    attention: dict[str, tuple[float, float]]  # kernel -> forward, backward
    floor: float
    scaled: str = ""
    arch: str = "sm_90"
    link: str = "none"
    serial_link: str = ""
    error: tuple[float, ...] = ()
    source: str = ""
    like: str = ""  # the GPU whose fractions these are
    passes: float = 1.0  # bytes of elementwise work, over those of fused kernels
    # Part of a step for which all wait for the slowest, each time the nodes double.
    straggling: float = 0.0
    limited: bool = False  # below the power that the maker states


class Time(NamedTuple):
    """Of one step. parts: {what: seconds} that add up to `seconds`."""

    seconds: float
    parts: dict[str, float]

    @property
    def exposed(self) -> float:
        return self.parts.get(EXPOSED, 0.0)


PRODUCTS = "products"
CORE = "attention"
REST = "elementwise"
UPDATE = "optimizer"
EXPOSED = "exposed communication"
ITERATION = "Muon's products"


SLOWEST = "waiting for the slowest node"


def product_seconds(gpu: Gpu, rows: int, inner: int, cols: int, size: int = 2) -> float:
    """Of [rows, inner] @ [inner, cols]. Its tiles run in waves over the SMs; the last wave is as long as a full one,
    which counts while there are few. A small product is bound by reading its operands."""
    tiles = math.ceil(rows / TILE[0]) * math.ceil(cols / TILE[1])
    waves = tiles / gpu.sms
    steps = waves * (inner + START)
    if waves < 2:  # a tile may be the sum of several parts of `inner`, each on an SM of its own
        steps = min(
            math.ceil(waves) * (inner + START),
            *(
                math.ceil(waves * parts) * (max(inner / parts, DEEP) + START)
                for parts in (2, 3, 4, 6, 8, 16)
            ),
        )
    flops = 2 * steps * gpu.sms * TILE[0] * TILE[1]
    nbytes = size * (rows * inner + inner * cols + rows * cols)
    return max(flops / gpu.products, nbytes / gpu.bandwidth, gpu.floor)


def kernel_of(config, gpu: Gpu) -> str:
    """The attention kernel that resolved flags run on a GPU: as trainer.attention_kernel chooses. ValueError for one of
    which no rate is known."""
    automatic = "flash" if gpu.arch == "sm_80" else "cudnn"
    kernel = automatic if config.attn == "auto" else config.attn
    if kernel not in gpu.attention:
        raise ValueError(
            f"--attn {kernel}: was not measured on {gpu.name}; use {' or '.join(gpu.attention)}"
        )
    return kernel


class Clock:
    """Runs a tape. link(op, nbytes) -> seconds of a collective."""

    def __init__(
        self, config, a: Architecture, gpu: Gpu, links: dict[str, tuple[Link, int]], serial: bool
    ):
        self.config = config
        self.a = a
        self.gpu = gpu
        self.links = links
        self.serial = serial
        self.now = self.free = 0.0
        self.done: dict[str, float] = {}
        self.parts: Counter = Counter()
        self.rates = dict(
            zip(("forward", "backward"), gpu.attention[kernel_of(config, gpu)], strict=True)
        )
        self.seen = (a.keys(config.seqlen, "causal") + BLOCK / 2) / config.seqlen

    def spend(self, what: str, seconds: float) -> None:
        self.now += seconds
        self.parts[what] += seconds

    def collective(self, name: str, op: str, nbytes: float) -> None:
        link, ranks = self.links["across" if op.endswith("across") else "inside"]
        seconds = link.seconds(op.split()[0], nbytes, ranks)
        if self.serial and ranks > 1:  # one for each parameter
            seconds += (
                (PARAMETERS_OF_A_BLOCK - 1)
                * link.latency_s
                * ("emb" not in name and "head" not in name)
            )
        self.free = max(self.now, self.free) + seconds
        self.done[name] = self.free
        if self.serial:
            self.wait(name)

    def wait(self, name: str) -> None:
        if (late := self.done.pop(name, self.now) - self.now) > 0:
            self.spend(EXPOSED, late)

    def run(self, tape: Tape) -> None:
        """One operation after the other; what has no work of its own moves what it reads and makes."""
        sizes = {m.name: m.nbytes for op in tape.ops for m in op.makes}
        for op in tape.ops:
            for w in op.work or (
                (
                    "bytes",
                    sum(m.nbytes for m in op.makes) + sum(sizes.get(name, 0) for name in op.reads),
                ),
            ):
                if w[0] == "mm":
                    self.spend(PRODUCTS, product_seconds(self.gpu, *w[1:]))
                elif w[0] == "attention":
                    self.spend(CORE, max(w[2] * self.seen / self.rates[w[1]], self.gpu.floor))
                elif w[0] == "bytes":
                    self.spend(
                        REST,
                        max(self.gpu.passes * w[1] / self.gpu.bandwidth, self.gpu.floor)
                        if w[1]
                        else 0,
                    )
                elif w[0] == "start":
                    self.collective(*w[1:])
                else:
                    self.wait(w[1])


def links_of(
    config, ranks: int, link: Link, across: Link | None = None
) -> dict[str, tuple[Link, int]]:
    """The link and the ranks of the collectives inside a shard group, and across replicas. across: the link between
    groups, if it is another one."""
    group = shard_group(config, ranks)
    if group == 1:  # replicated: what is reduced is reduced over all
        return {"inside": (across or link, ranks), "across": (across or link, ranks)}
    return {"inside": (link, group), "across": (across or link, ranks // group)}


class Node(NamedTuple):
    """GPUs of a node, the link between them, and that of one of them to GPUs of other nodes."""

    gpus: int
    inside: Link
    port: Link


def step_time(
    config,
    ranks: int,
    a: Architecture,
    gpu: Gpu,
    link: Link,
    across: Link | None = None,
    tape: Tape | None = None,
    node: Node | None = None,
) -> Time:
    """Of one step of resolved flags, --grad-accum micro-batches and the update, on each of `ranks`. tape: of that step,
    if it is there already. node: where ranks are of several."""
    serial = "plain" in config.compile_options
    clock = Clock(config, a, gpu, links_of(config, ranks, link, across), serial)
    clock.run(tape or PlannedStep(config, a, ranks).tape)
    seconds = clock.now * config.grad_accum
    parts = Counter({k: v * config.grad_accum for k, v in clock.parts.items()})
    if config.accum_sync == "last":  # gathered and reduced once, by themselves
        inside, n = links_of(config, ranks, link, across)["inside"]
        sent = (
            SIZE[config.param_dtype] * a.parameters,
            SIZE[config.reduce_dtype] * trained(config, a),
        )
        moved = sum(
            inside.seconds(op, size, n)
            for op, size in zip(("all_gather", "reduce_scatter"), sent, strict=True)
        )
        if ranks > n:  # hybrid_shard: the shards' gradients, over the replicas
            between, replicas = links_of(config, ranks, link, across)["across"]
            moved += between.seconds("all_reduce", sent[1] / n, replicas)
        parts[EXPOSED] += moved
        seconds += moved
    if config.accum_sync == "shards":
        across, replicas = links_of(config, ranks, link, across)["across"]
        size = (
            SIZE[getattr(config, "master_dtype", "fp32")] * trained(config, a) / (ranks // replicas)
        )
        moved = across.seconds("all_reduce", size, replicas)
        parts[EXPOSED] += moved
        seconds += moved
    update = gpu.passes * update_bytes(config, a, ranks) / gpu.bandwidth
    parts[UPDATE] += update
    if muon(config):
        iteration = iteration_seconds(config, a, ranks, gpu)
        sent = exchange_seconds(config, a, ranks, node or Node(ranks, link, link))
        parts[ITERATION] += iteration
        parts[EXPOSED] += sent
        update += iteration + sent
    return Time(seconds + update, dict(parts))


def iteration_seconds(config, a: Architecture, ranks: int, gpu: Gpu) -> float:
    """Of Muon's products on the rank that owns most, as muon.plan distributes matrices: the costliest first, each to
    the rank that has the least."""
    loads = [0.0] * ranks
    costs = []
    for (m, n), count in a.hidden_matrices.items():
        m, n = sorted((m, n))
        size = SIZE[config.muon_dtype]
        products = ((m, n, m), (m, m, m), (m, m, n))
        costs += [
            NEWTON_SCHULZ_STEPS * sum(product_seconds(gpu, *each, size) for each in products)
        ] * count
    heapq.heapify(loads)
    for cost in sorted(costs, reverse=True):
        heapq.heapreplace(loads, loads[0] + cost)
    return max(loads)


def exchange_seconds(config, a: Architecture, ranks: int, node: Node) -> float:
    """Of Muon's all-to-alls, two for each shape, one if every rank has whole matrices; as if nothing hid them. What is
    for GPUs of the node goes by its links, and at the same time the rest by each GPU's own port. Experts that are
    sharded by experts send nothing."""
    shards = shard_group(config, ranks)
    still = shards > 1 and a.experts >= shards
    shapes = {
        (m, n): count
        for (m, n), count in a.hidden_matrices.items()
        if not (still and a.hidden in (m, n))
    }
    near = min(node.gpus, ranks)
    seconds = 0.0
    for (m, n), count in shapes.items():
        nbytes = m * n * count * SIZE[config.muon_dtype] / shards / ranks  # to one rank
        seconds += max(
            node.inside.seconds("all_to_all", nbytes * near, near),
            node.port.seconds("send", nbytes * (ranks - near), ranks - near + 1),
        )
    return (1 + (shards > 1)) * seconds
