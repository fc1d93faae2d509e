"""How far off the planner is: its peaks beside those of generated code, its peaks and times beside published ones.

    python -m lab.benchmarks.plans                                # all tables of docs/PLANNER.md, from committed rows
    python -m lab.benchmarks.plans --mfu                          # the published MFU table, recounted
    python -m lab.benchmarks.plans --trade                        # less recomputed, or a larger micro-batch
    python -m lab.benchmarks.plans --draw 36 --seed 18 > cells/plan_peaks.txt         # settings, drawn over all options
    python -m lab.sweeps.sweep cells/plan_peaks.txt --program "-m lab.benchmarks.peaks" --results FILE
    python -m lab.benchmarks.plans --results FILE                 # how far off the peaks of one file are

Sizes that are drawn are those of real training: by the floor of `trainer.costs.step_bytes`, between 4 and 80 GiB on a
rank.
"""

import argparse
import random
import re
import shlex
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

from lab.planning import hardware, search
from lab.planning.architecture import reference
from lab.planning.schedule import step_peak
from lab.planning.weights import remat_of
from lab.report.published import key_names, published
from trainer import config as flags
from trainer.costs import flops_per_token, kept_per_block, link, step_bytes
from trainer.distributed.spelling import modern
from trainer.distributed.terminal import grouped, markdown
from trainer.logging import read_jsonl

ROOT = Path(__file__).parents[2]
# How often each value comes: as often as it stands here.
CHOICES = {
    "depth": (2, 2, 3, 4),
    "width": (1024, 2048, 4096, 4096),
    "head_dim": (64, 128),
    "grouping": (1, 2, 4, 8),
    "grow": (3, 4),
    "vocab": (8192, 32768, 65536),
    "seqlen": (1024, 2048, 4096, 8192),
    "batch": (1, 2, 4, 8),
    "grad_accum": (1, 1, 1, 2, 4),
    "accum_sync": ("every", "every", "last"),
    "mode": ("fully_shard", "fully_shard", "hybrid_shard", "replicate"),
    "replicas": (2,),
    "reshard": (True, True, True, False),
    "reduce_dtype": ("fp32", "bf16"),
    "adam_dtype": ("fp32", "fp32", "bf16"),
    "attn": ("sdpa", "sdpa", "flex"),
    "ahead": (1.0, 1.0, 0.5, 0.05),
    "remat": ("none", "mlp", "attn", "both", "block", "pointwise"),
    "remat_ratio": (1.0, 1.0, 0.5),
    "remat_norm": (True, True, False),
    "remat_core": (False, False, True),
    "mlp": ("plain", "lean"),
    "mlp_chunk": (0, 4096),
    "loss": ("full", "chunked"),
    "chunk": (2048,),
}
PEAKS = (
    "plan_peaks_24.jsonl",
    "plan_peaks_23.jsonl",
    "plan_peaks.jsonl",
    "plan_peaks_seen.jsonl",
    "peaks.jsonl",
)
WORLDS = (1, 2, 4, 8, 16, 64)
SIZES = 4 * 2**30, 80 * 2**30
A100 = 312e12  # FLOP/s
# Of the published times: those on which the constants of a100-80 in hardware.toml are fitted.
FITTED = {
    "seqlen 1024",
    "seqlen 16384",
    "depth 16",
    "width 8192",
    "gpus 8 8 1",
    "mfu sdpa fully_shard 4 4 4096 both 4",
    "small-params 32 128 4 shard",
}


def draw(seed: int, settings: int) -> Iterator[list[str]]:
    """As many command lines of `lab.benchmarks.peaks`, of values that fit together. The same for the same seed."""
    rng = random.Random(seed)
    usual = flags.resolve(flags.parse([], world=1), "cuda", 64)
    while settings:
        world = rng.choice(WORLDS)
        drawn = {name: rng.choice(values) for name, values in CHOICES.items()}
        odd = {name: value for name, value in drawn.items() if value != getattr(usual, name)}
        parts = {name: flags.PARTS[name] for name in odd if name in flags.PARTS}
        if any(
            not each.fits(drawn[each.part.of])
            for name, each in parts.items()
            if name != "remat_ratio"
        ):
            continue  # without the one flag the other means nothing
        words = flags.command(odd)
        try:
            c = flags.resolve(flags.parse(words), "cuda", world)
        except ValueError:  # they do not fit together
            continue
        if c.accum_sync == "last" and c.grad_accum == 1:
            continue
        if SIZES[0] <= step_bytes(c, world, c.batch) <= SIZES[1]:
            settings -= 1
            yield ["--world", str(world), *words]


def trade(gpu: str = "h100", ranks: int = 8) -> list[tuple[str, list[str]]]:
    """Planned ms of a step as (title, cells), for each width, tokens of a micro-batch and link: 8 micro-batches with
    nothing recomputed / 2 micro-batches of four times the tokens with all blocks recomputed but attention's core. A !
    marks where the second is slower. Sequences of 1024 tokens, depth 8; the reference transformer."""
    links = ("none", "h100-nvlink", "ndr-ib", "10:10")
    own = hardware.gpu(gpu)
    lines = []
    for width, micro in product((1024, 4096, 8192), (1, 2, 4, 8, 16, 32)):
        line = [f"{width}", f"{1024 * micro}"]
        for name in links:
            both = []
            for batch, accum, ratio in ((micro, 8, 0.0), (4 * micro, 2, 1.0)):
                words = [
                    "--depth",
                    "8",
                    "--width",
                    width,
                    "--seqlen",
                    "1024",
                    "--remat",
                    f"block:{ratio}",
                    "--batch",
                    batch,
                    "--grad-accum",
                    accum,
                ]
                c = SimpleNamespace(
                    **flags.resolve(flags.parse([*map(str, words)]), "cuda", ranks).flat()
                )
                q = search.Question(c, reference(c), own, ranks, ranks, link(name), link(name))
                both.append(1e3 * q.answer().time.seconds)
            line.append(f"{grouped(both[0])} / {grouped(both[1])}" + "!" * (both[1] > both[0]))
        lines.append(line)
    titles = "width", "tokens", *(f"link {name}" for name in links)
    return [(title, [line[i] for line in lines]) for i, title in enumerate(titles)]


def hidden_from(gpu: str, name: str, ranks: int = 8) -> float:
    """Tokens of a micro-batch from which on a link's time is no longer than the computation's, to first order: a
    parameter is gathered in bf16 twice and reduced in fp32, 8 bytes (N-1)/N, and multiplied for 6 FLOPs a token."""
    return 8 * (ranks - 1) / ranks / link(name).bytes_per_s * hardware.gpu(gpu).products / 6


class Compared(NamedTuple):
    name: str
    predicted: float
    truth: float

    @property
    def error(self) -> float:
        """As a fraction of the truth."""
        return self.predicted / self.truth - 1


def simulated(path: Path) -> list[Compared]:
    """MiB of rows of `lab.benchmarks.peaks` that a plan covers: --compile fwdbwd, --wrapper simple, our own policy."""
    found = []
    for row in read_jsonl(path):
        c = SimpleNamespace(**row["flags"])
        if (
            row["outcome"] == "ok"
            and not row["published"]
            and (c.compile, c.wrapper) == ("fwdbwd", "simple")
        ):
            peak = step_peak(c, row["world"], arch=row["device"].split()[-1]).nbytes / 2**20
            words = re.sub(r"--results \S+ ?", "", row["command"]).split()
            told = " ".join(modern(words, flags.PARTS)[0])  # as such a line is written now
            found.append(Compared(told, peak, row["simulated_mib"]))
    return found


def published_peak(c, ranks: int) -> float:
    """Bytes, by the policy of the published runs: states of 12 bytes a parameter, what blocks keep, gathered weights
    that no recomputation gathers again, and whichever is more: logits with their gradient or the
    MLP's backward of a block, with the gradients of the blocks before it. U: one [B, T, D]."""
    a = reference(c)
    U, W = 2 * c.batch * c.seqlen * c.width, 2 * c.width * a.hidden  # of one of the MLP's weights
    block = 4 * a.block_parameters / ranks  # gradients of a block
    held = dict(none=a.attention_parameters + W, attn=W, mlp=a.attention_parameters).get(c.remat, 0)
    states = 12 * a.parameters / ranks + 21 * 2**20
    whole = 2 * c.width * c.vocab
    kept = kept_per_block(c) * U
    logits = 2 * c.batch * c.seqlen * c.vocab
    at_loss = c.depth * (kept + 2 * held) + (2 + (c.compile == "model")) * logits + 2 * U + whole
    head = 2 * whole / ranks
    at_mlp = [
        (c.depth - k) * kept + 3 * 2 * c.batch * c.seqlen * a.hidden + 3 * W + head + k * block + U
        for k in range(c.depth)
    ]
    return states + max([at_loss, *at_mlp] if c.remat == "both" else [at_loss])


class Run(NamedTuple):
    """A published run of the transformer. mib, ms: None where none was published."""

    name: str
    c: SimpleNamespace
    ranks: int
    device: str
    mib: float | None
    ms: float | None


def runs() -> Iterator[Run]:
    """Those of reference/ that say what was run; of mfu.csv the time is computed back from the published count."""
    usual = read_jsonl(ROOT / "results/published_peaks.jsonl")[0]["flags"] | {"seqlen": 4096}
    for axis in ("seqlen", "depth", "width", "gpus", "variants", "small-params", "mfu"):
        for key, p in published(axis).items():
            changed = {
                name: p[name] for name in usual.keys() & p.keys() if name not in ("attn", "compile")
            }
            remat = p.get("remat", "both")
            changed |= dict(
                remat_core=remat in ("attn", "both"),
                remat_norm=remat == "none",
                attn=p.get("attn", "flex")[:4],
                compile=p.get("compile", "fwdbwd"),
            )
            c = SimpleNamespace(**(usual | changed))
            ms = p["ms"]
            if axis == "mfu":
                c.heads = 32
                c.kv_heads = 32 // c.grouping
                c.remat_of = partial(remat_of, c)
                ms = 1e5 * flops_per_token(c, c.seqlen) * c.batch * c.seqlen / (p["mfu"] * A100)
            if "max-autotune" not in str(p.get("attn")) and (p["mib"] or ms):
                yield Run(
                    f"{axis} {' '.join(map(str, key))}", c, p["ranks"], p["device"], p["mib"], ms
                )


def recounted() -> list[tuple[str, list[str]]]:
    """The published MFU table as (title, cells): % as counted by its author; the step that this count comes from; and %
    of that step in our counts (trainer.costs.flops_per_token)."""
    found = [r for r in runs() if r.name.startswith("mfu ")]
    theirs = published("mfu")
    columns = [(name, [str(key[i]) for key in theirs]) for i, name in enumerate(key_names("mfu"))]
    columns += [
        ("published %", [p["text"]["mfu"].partition(",")[0] for p in theirs.values()]),
        ("step ms", [f"{r.ms:.0f}" for r in found]),
    ]
    for title, convention in (("mfu %", "causal"), ("mfu_palm %", "palm"), ("hfu %", "hardware")):
        done = [
            flops_per_token(r.c, r.c.seqlen, convention) * r.c.batch * r.c.seqlen for r in found
        ]
        columns.append(
            (title, [f"{1e5 * n / (r.ms * A100):.1f}" for n, r in zip(done, found, strict=True)])
        )
    return columns


def published_times(device: str = "A100SXM", gpu: str = "a100-80") -> list[Compared]:
    """Milliseconds of the published runs on a device."""
    own = hardware.gpu(gpu)
    chosen = [r for r in runs() if r.ms and r.device == device]
    found = [hardware.sample(r.name, r.c, r.ranks, link(own.link), r.ms) for r in chosen]
    return [Compared(s.name, hardware.predicted_ms(s, own), s.ms) for s in found]


def summary(title: str, found: list[Compared]) -> str:
    errors = sorted(abs(each.error) for each in found)
    inside = sum(e <= 0.01 for e in errors)
    return (
        f"{title}: {len(errors)} rows, {inside} within 1 %, median {100 * errors[len(errors) // 2]:.2f} %, "
        f"worst {100 * errors[-1]:.2f} %"
    )


def table(title: str, found: list[Compared], digits: int = 0) -> list[str]:
    """Rows, largest error first, under their summary."""
    lines = [summary(title, found), "error %, predicted, truth, what"]
    ranked = sorted(found, key=lambda each: -abs(each.error))
    return lines + [
        f"{100 * e.error:+6.2f}  {e.predicted:8.{digits}f}  {e.truth:8.{digits}f}  {e.name}"
        for e in ranked
    ]


def main(own: argparse.Namespace) -> None:
    """Prints drawn settings, the MFU table, or all tables."""
    if own.draw:
        print(f"# python -m lab.benchmarks.plans --draw {own.draw} --seed {own.seed}")
        for words in draw(own.seed, own.draw):
            print(shlex.join(words))
        return
    if own.trade:
        print(markdown(trade()))
        told = ", ".join(
            f"{name} {grouped(hidden_from('h100', name))}"
            for name in ("h100-nvlink", "ndr-ib", "10:10")
        )
        print(
            f"tokens from which on a link is hidden, by 8 (N-1)/N bytes and 6 FLOPs a parameter: {told}"
        )
        return
    if own.mfu:
        print(markdown(recounted()))
        return
    paths = [Path(own.results)] if own.results else [ROOT / "results" / name for name in PEAKS]
    for path in paths:
        print(*table(f"peaks, {path.name}", simulated(path)), "", sep="\n")
    if not own.results:
        peaks = [
            Compared(r.name, published_peak(r.c, r.ranks) / 2**20, r.mib) for r in runs() if r.mib
        ]
        print(*table("published peaks, MiB", peaks), "", sep="\n")
        times = published_times()
        print(
            *table("published times, ms, not fitted", [t for t in times if t.name not in FITTED]),
            "",
            sep="\n",
        )
        print(
            *table("published times, ms, fitted", [t for t in times if t.name in FITTED]),
            "",
            sep="\n",
        )
        print(
            *table("published times, ms, RTX 4090", published_times("RTX4090", "rtx-4090")),
            sep="\n",
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        "python -m lab.benchmarks.plans",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--mfu", action="store_true", help="print the published MFU table, recounted"
    )
    parser.add_argument(
        "--trade", action="store_true", help="print larger micro-batches against less recomputation"
    )
    parser.add_argument("--draw", type=int, metavar="INT", help="print so many drawn settings")
    parser.add_argument("--seed", type=int, default=18, metavar="INT")
    parser.add_argument("--results", metavar="FILE", help="rows of lab.benchmarks.peaks")
    main(parser.parse_args())
