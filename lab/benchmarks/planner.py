"""How far off the planner is: beside training runs that others have published, and beside simulated peaks.

    python -m lab.benchmarks.planner             # a table per kind of answer, then every run, worst first
    python -m lab.benchmarks.planner --families  # every causal class of transformers: planned, or why not
    python -m lab.benchmarks.planner --fit       # lab/planning/field.toml: constants, and the error of each kind

The published runs are published/runs.csv and published/runs_mpt.csv. The constants are fitted to every third run of
each publication and GPU, those of scaled GPUs, too. The error of a kind comes from publications that the constants
were not fitted to: each publication in turn is left out whole, and predicted by what is fitted to the others.

Steps of the reference transformer (the tables of published/, results/h100.jsonl) are predicted by the constants of
hardware.toml, simulated peaks (rows of lab.benchmarks.peaks) by no constant at all.
"""

import argparse
import csv
import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

from lab.planning import hardware
from lab.planning.architecture import architecture
from lab.planning.liveness import Tape
from lab.planning.report import doubts, kind_of, network_decides, reserves
from lab.planning.schedule import reserved, step_peak
from lab.planning.search import Plan, Question, parse, question
from lab.planning.step_time import CORE, PRODUCTS, REST, SLOWEST, UPDATE, step_time
from lab.report.published import published as published_table
from trainer.collective_time import link
from trainer.logging import read_jsonl
from trainer.step_costs import flops_per_token, reference
from trainer.terminal.output import Parser, put

ROOT = Path(__file__).parents[2]
# Simulated peaks: of settings drawn over all options, then of the reference setting.
PEAKS = ("plan_peaks.jsonl", "peaks.jsonl")
# What a constant is without a row that says otherwise. The first FlashAttention takes about 1.7 times as long as the
# second (Dao 2023, arXiv:2307.08691, figures 4 to 7), whose rate hardware.toml has.
NEUTRAL = {
    "a100-80 products": 1.0,
    "h100 products": 1.0,
    "a100-80 memory": 1.0,
    "h100 memory": 1.0,
    "a100-80 first FlashAttention": 0.6,
    "h100 first FlashAttention": 0.6,
    "eager passes": 1.0,
    "straggling": 0.0,
}
ALIKE = 5.0  # weight of the square by which the logarithms of two GPUs' constants differ, beside that of one row
# What the programs of others do and main.py does not; not fitted. Bytes a token: Composer computes two metrics of the
# training logits, each a cast to fp32 and a log-softmax (read in its code); nanoGPT of December 2022 has all T x T
# scores of its 12 layers and heads in memory, forward and backward (inferred from the date, 30 bytes estimated).
METRICS = 28 * 50368
BESIDE = {
    "MosaicGPT 2023-04": METRICS,
    "llm-foundry MPT": METRICS,
    "nanoGPT README (model.py bench)": 30 * 12 * 12 * 1024,
}
FIRST_FLASH = ("MosaicGPT 2023-04", "llm-foundry MPT")  # the first FlashAttention, in Triton
FLOOR_US = 10.0  # of an eager operation: a launch of some kernels. Not fitted
CONTEXT_GIB = 0.5  # CUDA's, which nvidia-smi counts
WITHIN = 0.85  # part of the rows of a kind whose error is at most the stated one
A100 = 312e12  # FLOP/s
# Values without which transformers 5.23.0 does not build a class from its own defaults. Files of such models have them;
# these are made up.
INDEXER = dict(n_heads=16, kv_heads=1, head_dim=256, budget=2048, compress_ratio=4)
INDEXED = {f"indexer_{name}": value for name, value in INDEXER.items()}
LACKING = {
    "cohere_compass_text": dict(
        rope_parameters={
            kind: dict(rope_type="default", rope_theta=1e4)
            for kind in ("full_attention", "sliding_attention")
        }
    ),
    "dbrx": dict(attn_config=dict(rope_theta=5e5)),
    "dots1": dict(n_routed_experts=128, n_shared_experts=2, num_experts_per_tok=6),
    "hunyuan_v1_dense": dict(head_dim=128),
    "hunyuan_v1_moe": dict(head_dim=128),
    "lfm2_moe": dict(layer_types=["conv", "conv", "full_attention", "conv"] * 8),
    "ministral": dict(head_dim=128),
    "nemotron": dict(num_key_value_heads=8),
    "qwen4_exp": dict(text_config=INDEXED),
    "qwen4_exp_text": INDEXED,
    "reformer": dict(is_decoder=True),
}
# The steps that the constants `reached` of hardware.toml were fitted on (d945835).
FITTED = {
    "seqlen 1024",
    "seqlen 16384",
    "depth 16",
    "width 8192",
    "gpus 8 8 1",
    "mfu sdpa fully_shard 4 4 4096 both 4",
    "small-params 32 128 4 shard",
    *(f"row {number} of results/h100.jsonl" for number in (5, 8, 10, 18, 23, 26, 33)),
}


class Row(NamedTuple):
    """A published run. tokens: per second and GPU. memory: GiB, or None; memory_is: what was measured."""

    publication: str
    setting: str
    tokens: float
    memory: float | None
    memory_is: str
    date: str
    name: str
    q: Question
    tape: Tape
    peak: float  # bytes allocated, planned

    def asked(self, constants: dict[str, float]) -> Question:
        eager = self.q.config.compile == "none"
        gpu = hardware.field(hardware.gpu(self.name), eager, constants)
        if self.first_flash:
            part = constants[f"{gpu.like} first FlashAttention"]
            rates = {k: tuple(part * rate for rate in pair) for k, pair in gpu.attention.items()}
            gpu = gpu._replace(attention=rates)
        return replace(self.q, gpu=gpu)

    @property
    def first_flash(self) -> bool:
        return self.publication in FIRST_FLASH

    @property
    def step_tokens(self) -> int:
        """Of one GPU."""
        return self.q.config.batch * self.q.config.grad_accum * self.q.config.seqlen

    def beside(self, gpu: hardware.Gpu) -> float:
        """Seconds of what the run did and main.py does not."""
        return BESIDE.get(self.publication, 0) * self.step_tokens / gpu.bandwidth

    def error(self, constants: dict[str, float]) -> float:
        """Planned tokens per second over the published ones, less 1."""
        q = self.asked(constants)
        seconds = q.time(self.tape).seconds + self.beside(q.gpu)
        return self.step_tokens / seconds / self.tokens - 1


@cache
def published() -> tuple[Row, ...]:
    """All rows, in the order of the files."""
    rows = []
    for name in ("runs", "runs_mpt"):
        for r in csv.DictReader((ROOT / f"published/{name}.csv").read_text().splitlines()):
            request, words = parse(r["flags"].replace("published/", f"{ROOT}/published/").split())
            q = question(request, words)
            source = r.get("source", "llm-foundry MPT")
            setting = r.get("setting") or " ".join(
                r[key] for key in ("model", "seqlen", "gpus", "gpu", "micro_batch")
            )
            memory = float(r["memory_gib"]) if r.get("memory_gib") else None
            tape = q.tape
            peak = q.peak().nbytes
            tokens = float(r["tok_s_per_gpu"])
            kind, date = r.get("memory_is", ""), r.get("date", "")
            rows.append(
                Row(source, setting, tokens, memory, kind, date, request.gpu, q, tape, peak)
            )
    return tuple(rows)


def doubted(row: Row) -> list[str]:
    """Why an answer calls itself extrapolated."""
    return doubts(row.q, row.q.peak())


def third(rows: Iterable[Row]) -> list[Row]:
    """Every third row of each publication and GPU, but those that a network decides which is not stated."""
    by_source = defaultdict(list)
    for row in rows:
        by_source[row.publication, row.name].append(row)
    return [row for mine in by_source.values() for row in mine[::3] if not network_decides(row.q)]


def fit(rows: Sequence[Row]) -> dict[str, float]:
    """Constants that come nearest to the rows: coordinate descent on the mean of relative errors, by the parts of each
    step, which the constants divide."""
    start = dict(NEUTRAL, **{"eager floor_us": FLOOR_US})
    ones = start | dict.fromkeys(NEUTRAL, 1.0) | {"straggling": 0.0}
    asked = [row.asked(ones) for row in rows]
    parts = [
        (q.time(row.tape).parts, row.beside(q.gpu)) for row, q in zip(rows, asked, strict=True)
    ]

    def loss(x: dict[str, float]) -> float:
        off = 0.3 * sum(math.log(x[name] / usual) ** 2 for name, usual in NEUTRAL.items() if usual)
        off += ALIKE * sum(
            math.log(x[f"a100-80 {what}"] / x[f"h100 {what}"]) ** 2
            for what in ("products", "memory", "first FlashAttention")
        )
        for row, (terms, beside) in zip(rows, parts, strict=True):
            like = row.q.gpu.like
            eager = row.q.config.compile == "none"
            passes = (x["eager passes"] if eager else 1.0) / x[f"{like} memory"]
            core = x[f"{like} first FlashAttention"] if row.first_flash else 1.0
            seconds = (
                terms[PRODUCTS] / x[f"{like} products"]
                + terms[CORE] / core
                + passes * (terms[REST] + terms[UPDATE])
            )
            seconds += sum(
                s
                for what, s in terms.items()
                if what not in (PRODUCTS, CORE, REST, UPDATE, SLOWEST)
            )
            seconds *= 1 + x["straggling"] * math.log2(max(row.q.ranks / row.q.per_node, 1))
            seconds += beside / x[f"{like} memory"]
            off += abs(math.log(seconds * row.tokens / row.step_tokens))
        return off

    x = dict(start)
    step = 0.2
    best = loss(x)
    while step > 0.002:
        better = False
        for name in NEUTRAL:
            for sign in (1, -1):
                moved = (
                    x[name] + sign * step / 10
                    if name == "straggling"
                    else x[name] * (1 + step) ** sign
                )
                if moved >= 0 and (score := loss(x | {name: moved})) < best:
                    x = x | {name: moved}
                    best = score
                    better = True
        step *= 1 if better else 0.5
    return x


def publisher(publication: str) -> str:
    """Whose a publication is: its first word, unless they have several names."""
    name = publication.split()[0]
    return {"llm-foundry": "MosaicGPT", "float8nocompile": "torchtitan"}.get(name, name)


@cache
def left_out(publishers: bool = False) -> list[tuple[Row, float]]:
    """Each row, and its error with constants fitted without its publication, or without its publisher."""
    outcomes = []
    rows = published()
    sources = [publisher(row.publication) if publishers else row.publication for row in rows]
    for source in dict.fromkeys(sources):
        of_it = [name == source for name in sources]
        constants = fit(third(row for row, own in zip(rows, of_it, strict=True) if not own))
        outcomes += [
            (row, row.error(constants)) for row, own in zip(rows, of_it, strict=True) if own
        ]
    return outcomes


def quantile(values: Iterable[float], part: float) -> float:
    ranked = sorted(values)
    return ranked[min(math.ceil(part * len(ranked)), len(ranked)) - 1]


def bars(outcomes: Sequence[tuple[Row, float]]) -> dict[str, tuple[int, float]]:
    """{kind: (rows, error of which the part WITHIN of them, and of all compiled or eager ones, stays below)}"""
    by_kind = defaultdict(list)
    for row, error in outcomes:
        kind = kind_of(row.q)
        by_kind[kind].append(abs(error))
        by_kind[kind.split(",")[0]].append(abs(error))
    stated = {}
    for kind, errors in sorted(by_kind.items()):
        pool = by_kind[kind.split(",")[0]]
        stated[kind] = len(errors), max(quantile(errors, WITHIN), quantile(pool, WITHIN))
    return stated


def field_text() -> str:
    """What field.toml shall hold."""
    rows = published()
    lines = [
        "# Written by python -m lab.benchmarks.planner --fit, from the runs of published/.",
        "# constants: what others' steps reach, over what `reached` of hardware.toml says.",
        "# bars: [rows, error that 85 % of them, and of all compiled or eager ones, keep to, by constants",
        "# fitted without their publication]. ran: [runs planned above the limit, runs], all of which ran.",
        "# reserved: measured runs, their sources, and how much the allocator may reserve over what is planned; runs",
        "# that reserved more than the other sources say, and less than what is planned.",
        "",
        "[constants]",
    ]
    lines += [f'"{name}" = {value:.3f}' for name, value in fit(third(rows)).items()]
    lines += ["", "[ran]", f"beyond_limit = [{len(beyond(rows))}, {len(rows)}]"]
    return "\n".join(
        [
            *lines,
            "",
            "[bars]",
            *(f'"{kind}" = [{n}, {bar:.3f}]' for kind, (n, bar) in bars(left_out()).items()),
            "",
            "[reserved]",
            *reserved_text(reserved_runs()),
        ]
    )


def by_publication(outcomes: Sequence[tuple[Row, float]]) -> list[str]:
    """A line for each publication, and for all rows."""
    errors_of = defaultdict(list)
    for row, error in outcomes:
        errors_of[row.publication].append(100 * error)
    errors_of["all"] = [100 * error for _, error in outcomes]
    lines = ["publication, predicted by the others: rows, median %, signed median %, worst %"]
    for publication, mine in errors_of.items():
        figures = quantile(map(abs, mine), 0.5), quantile(mine, 0.5), max(map(abs, mine))
        lines.append(
            f"{publication}: {len(mine)}, {figures[0]:.1f}, {figures[1]:+.1f}, {figures[2]:.1f}"
        )
    return lines


def families() -> Iterator[str]:
    """A line for each causal class of the installed transformers: what is planned, or the sentence that refuses it. Of
    its own configuration, with LACKING, and with at most four layers; where layers have settings of their own, with all
    of them, as a file that leaves out what is usual."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    for kind in sorted(CAUSAL):
        more = LACKING.get(kind, {})
        start = time.monotonic()
        try:
            try:
                a = architecture(json.loads(shallow(AutoConfig.for_model(kind, **more))))
            except Exception:
                text = AutoConfig.for_model(kind, **more).to_json_string(use_diff=True)
                a = architecture(json.loads(text) | {"model_type": kind})
            answer = f"planned, {a.parameters} parameters, {a.active_parameters} active, {a.note}"
        except Exception as error:
            answer = f"refused, {' '.join(str(error).split())[:200]}"
        yield f"{kind}: {answer} ({time.monotonic() - start:.1f} s)"


def shallow(config) -> str:
    """A configuration of transformers as JSON, with at most four layers."""
    text = config.get_text_config()
    if (getattr(text, "num_hidden_layers", None) or 0) > 4:
        text.num_hidden_layers = 4
        for name in ("layer_types", "mlp_layer_types"):
            if isinstance(getattr(text, name, None), list):
                setattr(text, name, getattr(text, name)[:4])
    return config.to_json_string(use_diff=False)


def line(kind: str, mine: Sequence[tuple[Row, float]]) -> str:
    """A kind's errors in percent."""
    stated = hardware.field_data()["bars"]
    errors = [100 * error for _, error in mine]
    sure = [100 * abs(error) for row, error in mine if not doubted(row)]
    inside = sum(abs(error) <= stated[kind_of(row.q)][1] for row, error in mine)
    figures = [
        f"{len(mine)}",
        f"{quantile(map(abs, errors), 0.5):.1f}",
        f"{quantile(errors, 0.5):+.1f}",
        f"{max(map(abs, errors)):.1f}",
        f"{max(sure):.1f}" if sure else "-",
        f"{100 * inside / len(mine):.0f}",
    ]
    return f"{kind}: {', '.join(figures)}"


def summary(outcomes: Sequence[tuple[Row, float]]) -> list[str]:
    """A line for each kind, and for all compiled and all eager ones."""
    by_kind = defaultdict(list)
    for row, error in outcomes:
        by_kind[kind_of(row.q)].append((row, error))
        by_kind[f"all {kind_of(row.q).split(',')[0]}"].append((row, error))
    head = "kind: rows, median %, signed median %, worst %, worst that is not called extrapolated %, inside its bar %"
    return [head, *(line(kind, mine) for kind, mine in sorted(by_kind.items()))]


HERE = "one H100 and one H200 here"
# Since pull request 643 its launch script sets expandable_segments, unless whoever starts a run sets another.
TORCHTITAN_EXPANDABLE = "2024-10-22"


class Size(NamedTuple):
    """A measured peak, bytes, beside what is planned, allocated or reserved. memory_is: what was measured."""

    publication: str
    setting: str
    memory_is: str
    planned: float
    measured: float
    expandable: bool = False  # segments of the allocator, as far as is known

    @property
    def ratio(self) -> float:
        return self.measured / self.planned


def sizes() -> list[Size]:
    """Of published runs, and of single GPUs here. nvidia-smi's figures without CUDA's context."""
    peaks = [
        Size(
            row.publication,
            row.setting,
            row.memory_is,
            row.peak if row.memory_is.endswith("allocated") else reserves(row.q, row.q.peak())[0],
            (row.memory - CONTEXT_GIB * (row.memory_is == "nvidia-smi")) * 2**30,
            publisher(row.publication) == "torchtitan" and row.date > TORCHTITAN_EXPANDABLE,
        )
        for row in published()
        if row.memory
    ]
    settings = []
    # Of h100.jsonl the eager rows: compiled ones are from before overlap.py ordered a backward for memory.
    for gpu, file, modes in (
        ("H100", "h100", ["none"]),
        ("H200", "h200_order", ["fwdbwd", "blocks"]),
    ):
        for number, r in enumerate(read_jsonl(ROOT / f"results/{file}.jsonl"), 1):
            config = SimpleNamespace(**(r.get("flags") or {"compile": ""}))
            known = r.get("peak_reserved_mib") and config.compile in modes
            if not known or not {"remat", "ahead"} <= vars(config).keys():
                continue
            flags = config.__dict__ | dict(
                link=None
            )  # another link is the same memory, and no second measurement
            if flags in settings:
                continue
            settings.append(flags)
            peak = step_peak(config, config.world or r["world"])
            held = reserved(config, config.world or r["world"], reference(config), peak)
            name = f"row {number} of results/{file}.jsonl"
            for key, kind, planned in (
                ("peak_alloc_mib", "allocated", peak.nbytes),
                ("peak_reserved_mib", "reserved", held),
            ):
                measured = r[key] * 2**20
                peaks.append(Size(HERE, f"{gpu}, {name}", f"max {kind}", planned, measured))
    return peaks


def reserved_runs() -> list[Size]:
    return [size for size in sizes() if not size.memory_is.endswith("allocated")]


def upper(runs: Iterable[Size]) -> float:
    """How much a run of another source may reserve over what is planned. Of n sources whose largest
    ratios are alike, 1 in n + 1 exceeds the largest, which of 9 is too many. So this end lies as far above the largest
    as that is above the second, in logarithms (Robson and Whitlock 1964, Estimation of a truncation point)."""
    most = defaultdict(float)
    for run in runs:
        most[run.publication] = max(most[run.publication], run.ratio)
    second, first = sorted(most.values())[-2:]
    return first * first / second


def outside(runs: Sequence[Size], source: Callable[[str], str] = str) -> tuple[int, int]:
    """Runs that reserved more than those of all other sources say, and runs that reserved less than is planned."""
    above = sum(
        run.ratio > upper(x for x in runs if source(x.publication) != source(run.publication))
        for run in runs
    )
    return above, sum(run.ratio < 1 for run in runs)


def reserved_text(runs: Sequence[Size]) -> list[str]:
    above, below = outside(runs)
    return [
        f"runs = {len(runs)}",
        f"sources = {len({run.publication for run in runs})}",
        f"most = {upper(runs):.3f}",
        f"above = {above}",
        f"below = {below}",
    ]


def memory() -> list[str]:
    """A line for each kind of measured memory, what lies outside the interval if whole sources are left out, what is
    known of allocators, and a line for each row."""
    peaks = sizes()
    head = "memory, measured over planned: rows, least, median, most"
    by_kind = defaultdict(list)
    for size in peaks:
        by_kind[size.publication, size.memory_is].append(size.ratio)
    lines = [head, *(ratios(f"{', '.join(kind)}", mine) for kind, mine in by_kind.items())]
    runs = reserved_runs()
    lines.append("reserved, runs left out with: rows, sources, above the interval, below, inside %")
    for name, source in (("their publication", str), ("their publisher", publisher)):
        above, below = outside(runs, source)
        sources = len({source(run.publication) for run in runs})
        inside = 100 * (len(runs) - above - below) / len(runs)
        lines.append(f"{name}: {len(runs)}, {sources}, {above}, {below}, {inside:.0f}")
    lines.append("reserved, by the allocator's segments: rows, least, median, most")
    for name, known in (("expandable, by the date", True), ("fixed or not known", False)):
        lines.append(ratios(name, [run.ratio for run in runs if run.expandable == known]))
    rows = ["", "planned GiB, measured GiB, measured over planned, row"]
    for size in peaks:
        figures = f"{size.planned / 2**30:.1f}, {size.measured / 2**30:.1f}, {size.ratio:.2f}"
        rows.append(f"{figures}, {size.publication}, {size.setting}, {size.memory_is}")
    return lines + rows


def ratios(name: str, mine: Sequence[float]) -> str:
    figures = min(mine), quantile(mine, 0.5), max(mine)
    return f"{name}: {len(mine)}, {', '.join(f'{x:.2f}' for x in figures)}"


def beyond(rows: Sequence[Row]) -> list[Row]:
    """All of these ran: those which the plan says do not fit."""
    return [row for row in rows if row.peak > row.q.gpu.memory - Plan().reserve_gib * 2**30]


def too_full(rows: Sequence[Row]) -> str:
    above = sum(row.peak > row.q.gpu.memory for row in rows)
    named = "".join(f"; {row.setting}" for row in beyond(rows))
    return (
        f"ran, but planned as not fitting: {len(beyond(rows))} of {len(rows)}, {above} of them above the whole "
        f"memory{named}"
    )


def errors(rows: Sequence[Row]) -> list[tuple[Row, float]]:
    """Each row and its error with the constants of field.toml."""
    constants = hardware.field_data()["constants"]
    return [(row, row.error(constants)) for row in rows]


class Compared(NamedTuple):
    """A prediction beside what was measured, or simulated."""

    name: str
    predicted: float
    truth: float

    @property
    def error(self) -> float:
        """As a fraction of the truth."""
        return self.predicted / self.truth - 1


def simulated(path: Path) -> list[Compared]:
    """MiB of rows of `lab.benchmarks.peaks` that a plan covers: of our own policy, --compile fwdbwd or blocks."""
    compared = []
    for row in read_jsonl(path):
        config = SimpleNamespace(**row["flags"])
        covered = config.compile in ("fwdbwd", "blocks") and not row["published"]
        if covered and row["outcome"] == "ok":
            peak = step_peak(config, row["world"], arch=row["device"].split()[-1]).nbytes / 2**20
            compared.append(Compared(row["line"] or row["command"], peak, row["simulated_mib"]))
    return compared


def published_steps(device: str) -> Iterator[tuple[str, SimpleNamespace, int, float]]:
    """(name, resolved flags, ranks, ms) of the tables of published/ that say what was run. Of mfu.csv the time is
    computed back from the published count."""
    usual = read_jsonl(ROOT / "results/published_peaks.jsonl")[0]["flags"] | {"seqlen": 4096}
    for axis in ("seqlen", "depth", "width", "gpus", "variants", "small-params", "mfu"):
        for key, p in published_table(axis).items():
            changed = {
                name: p[name] for name in usual.keys() & p.keys() if name not in ("attn", "compile")
            }
            remat = p.get("remat", "both")
            changed |= dict(
                remat_core=remat in ("attn", "both"),
                remat_norm=remat == "none",
                attn="flex" if p.get("attn", "flex").startswith("flex") else "auto",
                compile=p.get("compile", "fwdbwd"),
            )
            config = SimpleNamespace(**(usual | changed))
            ms = p["ms"]
            if axis == "mfu":
                ms = (
                    1e5
                    * flops_per_token(config, config.seqlen)
                    * config.batch
                    * config.seqlen
                    / (p["mfu"] * A100)
                )
            if ms and p["device"] == device and "max-autotune" not in str(p.get("attn")):
                yield f"{axis} {' '.join(map(str, key))}", config, p["ranks"], ms


def predicted_ms(config: SimpleNamespace, ranks: int, gpu: hardware.Gpu, link_name: str) -> float:
    """Of a step of the reference transformer over a link, as --link names it."""
    serial = gpu.serial_link and "plain" in config.compile_options
    bandwidth = link(gpu.serial_link if serial else link_name)
    return 1e3 * step_time(config, ranks, reference(config), gpu, bandwidth).seconds


def published_times(device: str = "A100SXM", name: str = "a100-80") -> list[Compared]:
    """Milliseconds of the published steps on a device."""
    gpu = hardware.gpu(name)
    return [
        Compared(step, predicted_ms(config, ranks, gpu, gpu.link), ms)
        for step, config, ranks, ms in published_steps(device)
    ]


def own_times(
    gpu: str = "h100", file: str = "h100", modes: Sequence[str] = ("fwdbwd",)
) -> list[Compared]:
    """Milliseconds of the steps of one GPU that a plan covers. The smallest step counts, since a median holds what
    else the machine did."""
    compared = []
    for number, row in enumerate(read_jsonl(ROOT / f"results/{file}.jsonl"), 1):
        flags = row.get("flags") or {}
        whole = {"depth", "remat", "ahead", "link", "compile_options"} <= flags.keys()
        if not whole or flags["compile"] not in modes or flags["wrapper"] == "ddp":
            continue
        if flags["ahead"] <= 1 and not flags.get("keep_last") and row.get("step_ms_min"):
            config = SimpleNamespace(**flags)
            ranks = config.world or row["world"]
            planned = predicted_ms(config, ranks, hardware.gpu(gpu), config.link)
            name = f"row {number} of results/{file}.jsonl"
            compared.append(Compared(name, planned, row["step_ms_min"]))
    return compared


def table(title: str, compared: Sequence[Compared]) -> list[str]:
    """Rows, largest error first, under their summary."""
    off = sorted(100 * abs(each.error) for each in compared)
    inside = sum(error <= 1 for error in off)
    lines = [
        "",
        f"{title}: {len(off)} rows, {inside} within 1 %, median {off[len(off) // 2]:.2f} %, worst {off[-1]:.2f} %",
        "error %, predicted, truth, what",
    ]
    for each in sorted(compared, key=lambda each: -abs(each.error)):
        figures = f"{each.predicted:8.0f}  {each.truth:8.0f}"
        lines.append(f"{100 * each.error:+6.2f}  {figures}  {each.name}")
    return lines


def show() -> None:
    """Prints all tables."""
    outcomes = errors(published())
    put(
        *summary(outcomes),
        "",
        "the same, each publication predicted by constants fitted to the others",
        sep="\n",
    )
    put(
        *summary(left_out()),
        "",
        "the same, each publisher predicted by constants fitted to the others",
        *summary(left_out(publishers=True))[1:3],
        "",
        *by_publication(left_out()),
        "",
        *memory(),
        "",
        too_full(published()),
        sep="\n",
    )
    put("", "tokens/s, error %, row, why extrapolated", sep="\n")
    for row, error in sorted(outcomes, key=lambda each: -abs(each[1])):
        put(
            f"{100 * error:+.1f}, {row.publication}, {row.name}, {row.setting}, {'; '.join(doubted(row))}"
        )
    for name in PEAKS:
        put(*table(f"simulated peaks, MiB, {name}", simulated(ROOT / "results" / name)), sep="\n")
    for title, times in (
        ("published times, ms, A100", published_times()),
        ("published times, ms, RTX 4090", published_times("RTX4090", "rtx-4090")),
        ("steps of one H100, ms", own_times()),
        ("steps of one H200, ms", own_times("h200", "h200_order", ("fwdbwd", "blocks"))),
    ):
        others = [each for each in times if each.name not in FITTED]
        put(*table(f"{title}, not fitted", others), sep="\n")


if __name__ == "__main__":
    parser = Parser(
        "python -m lab.benchmarks.planner",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--fit", action="store_true", help="print lab/planning/field.toml")
    parser.add_argument(
        "--families", action="store_true", help="plan every causal class of transformers (minutes)"
    )
    asked = parser.parse_args()
    if asked.families:
        for text in families():
            put(text)
    else:
        put(field_text()) if asked.fit else show()
