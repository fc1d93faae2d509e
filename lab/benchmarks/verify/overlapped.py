"""2. Overlapped: the order of collectives in the compiled graph, and what NCCL's kernels do beside others on GPUs."""

import gzip
import json
import re
import statistics
from pathlib import Path
from typing import NamedTuple

from lab.benchmarks.verify.machine import Machine, Verdict, judged
from lab.benchmarks.verify.ranks import PROFILED

LINE = r"(?m)^  (all-gather|reduce-scatter) +(\d+) "  # of lab.profiling.collectives
PRODUCTS = "(?i)gemm|nvjet|cutlass|xmma|fmha|flash|attention|cudnn"


def counted(m: Machine, small: str) -> list[tuple[str, int]]:
    """(collective, products between start and wait) of a step, in order. No GPU is used."""
    words = f"-m lab.profiling.collectives --device cuda --world {m.all_ranks} {small * m.tiny}"
    return [(kind, int(between)) for kind, between in re.findall(LINE, m.run(words.split()))]


def letters(kinds: list[str]) -> str:
    """G for a gather, R for a reduction."""
    return "".join("G" if "gather" in kind.lower() else "R" for kind in kinds)


def order(m: Machine, own: dict) -> Verdict:
    """Which collectives wait at once, in the graph that Inductor schedules."""
    found = counted(m, own["small"])
    at_once = letters([kind for kind, between in found if not between])
    gathers = at_once.count("G")
    reductions = at_once.count("R")
    within = max(gathers, reductions) <= own["at_once"]
    return judged(
        own,
        within,
        gathers=gathers,
        reductions=reductions,
        order=letters([kind for kind, _ in found]),
    )


class Kernel(NamedTuple):
    """Of a trace; times in us."""

    name: str
    begin: float
    end: float
    stream: int
    blocks: int  # of the grid

    def beside(self, others: list["Kernel"]) -> float:
        """The part of its time in which at least one of the others, in order of their begins, runs."""
        covered = 0.0
        at = self.begin
        for other in others:
            begin = max(at, other.begin)
            end = min(self.end, other.end)
            if end > begin:
                covered = covered + end - begin
                at = end
        return covered / (self.end - self.begin)


def kernels(trace: Path) -> list[Kernel]:
    """Those of a Chrome trace, by their begins."""
    found = []
    for each in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]:
        if each.get("cat") == "kernel" and each["dur"] > 0:
            own = each["args"]
            begin = each["ts"]
            found.append(
                Kernel(each["name"], begin, begin + each["dur"], own["stream"], own["grid"][0])
            )
    return sorted(found, key=lambda kernel: kernel.begin)


def looked_at(found: list[Kernel]) -> dict:
    """What kernels say of NCCL's gathers and reductions, which run one after the other."""
    nccl = [kernel for kernel in found if re.search("nccl.*(AllGather|ReduceScatter)", kernel.name)]
    if not nccl:
        raise Verdict("not run", "no kernel of NCCL in the trace")
    others = [kernel for kernel in found if "nccl" not in kernel.name]
    products = [kernel for kernel in others if re.search(PRODUCTS, kernel.name)]
    ms = [(kernel.end - kernel.begin) / 1e3 for kernel in nccl]
    hidden = sum(each * kernel.beside(others) for each, kernel in zip(ms, nccl, strict=True))
    under = sum(each * kernel.beside(products) for each, kernel in zip(ms, nccl, strict=True))
    times: dict = {}
    for kernel in products:
        place = times.setdefault(kernel.name, {}).setdefault(kernel.beside(nccl) > 0.5, [])
        place.append(kernel.end - kernel.begin)
    ratios = [
        statistics.median(own[True]) / statistics.median(own[False])
        for own in times.values()
        if len(own) == 2
    ]
    return dict(
        nccl_ms=sum(ms) / PROFILED,
        exposed_ms=(sum(ms) - hidden) / PROFILED,
        share=hidden / sum(ms),
        share_of_products=under / sum(ms),
        order=letters([kernel.name for kernel in nccl[: len(nccl) // PROFILED]]),
        own_streams=len({kernel.stream for kernel in nccl} - {kernel.stream for kernel in others}),
        sms=max(kernel.blocks for kernel in nccl),
        products_beside=round(statistics.median(ratios), 3) if ratios else None,
    )


def timed(m: Machine, own: dict) -> Verdict:
    """Ours, FSDP2 compiled by blocks, and ours without overlap.py, interleaved."""
    m.needs_gpus()
    found = {}
    with m.folder() as folder:
        trained = m.trained(m.ranks, own["settings"], own["steps"], traces=folder)
        for name, each in trained.items():
            found[name] = looked_at(kernels(Path(folder, name, "rank0.trace.json.gz")))
            found[name]["step_ms"] = statistics.median(each["ms"])
    ours = found["ours"]
    graph = letters([kind for kind, _ in counted(m, "")])
    exposed = {name: found[name]["exposed_ms"] for name in ("fsdp2", "plain")}
    within = (
        ours["share"] >= own["least"]
        and ours["exposed_ms"] <= own["exposed"] * exposed["fsdp2"]
        and ours["order"] == graph
        and ours["own_streams"] > 0
    )
    verdict = judged(own | exposed | ours, within, graph=graph)
    verdict.figures = found
    return verdict
