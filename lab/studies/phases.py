"""Milliseconds of forward, backward and optimizer by model size, precision, compilation and steps of warm-up.

    python -m lab.studies.phases --small
    python -m lab.studies.phases --sizes small medium large xl 2.7b --device cuda

Forward is the loss of the llama-style transformer of model.py, backward its gradients, optimizer AdamW's update; bf16
is torch.autocast. Each row is of a process of its own, in which nothing ran before, so that without warm-up the first
step also pays for what comes once: memory that the allocator has yet to ask for, libraries that start at the first
product, kernels that are chosen, and compilation, whose caches on disk are empty. `excess_ms` is what the first step
that counts takes beyond the median of the others; on a GPU the first allocation and the first product, whose factors
are there before, are timed by themselves first. On a CPU they are as good as any others.
"""

import statistics
import sys
from contextlib import nullcontext

import torch
from torch._inductor.utils import fresh_cache

from lab.studies.study import (
    SIZES,
    Columns,
    beside,
    check_default,
    curves,
    main,
    milliseconds,
    on_ranks,
    published,
    section,
    transformer,
)
from trainer.measuring.timing import stats
from trainer.optimizer import AdamW
from trainer.step_costs import flops_per_token, reference
from trainer.terminal.text import grouped

WARMUPS = 0, 1, 2, 5
SAME = "batch", "context", "repeat"
PARTS = "forward", "backward", "optimizer"
# (reference file, device, precision, compiled, columns of forward and backward)
PUBLISHED = [
    ("phases_h100", "H100, precision not told", "fp32", False, "fwd_mean_s bwd_mean_s"),
    ("phases_a100_bf16", "A100", "fp32", False, "fwd_s bwd_s"),
    ("phases_a100_bf16", "A100", "bf16", False, "fwd_bf16_s bwd_bf16_s"),
    ("compiled_model", "no GPU named", "fp32", False, "fwd_s bwd_s"),
    ("compiled_model", "no GPU named", "fp32", True, "compiled_fwd_s compiled_bwd_s"),
]
NAMES = {"med": "medium", "xlarge": "xl"}  # what one of them calls these sizes


def flags(parser) -> None:
    parser.add_argument(
        "--sizes", nargs="+", choices=list(SIZES), help="(default: the published five)"
    )
    parser.add_argument("--batch", type=int, default=4, help="sequences")
    parser.add_argument("--context", type=int, default=128, help="tokens of a sequence")


def check(args) -> None:
    """Sizes of a GPU on a CPU, unless they are asked for."""
    check_default(args, "sizes", "sizes are")


def settings(args) -> list[dict]:
    """Every size in both precisions, eager and compiled, warmed up; the first also with less warm-up. --small: one row
    is compiled, that of the first size without warm-up, since it takes as long as all others."""
    sizes = args.sizes or (
        ["tiny"] if args.small else [name for name in SIZES if SIZES[name][0] >= 768]
    )
    base = dict(batch=args.batch, context=args.context, repeat=args.repeat)
    chosen = [
        dict(size=sizes[0], precision="fp32", compiled=compiled, warmup=warmup)
        for compiled in (False, True)
        for warmup in WARMUPS[:-1]
    ]
    chosen += [
        dict(size=size, precision=precision, compiled=compiled, warmup=WARMUPS[-1])
        for size in sizes
        for precision in ("fp32", "bf16")
        for compiled in (False, True)
    ]
    if args.small:
        compiled = [setting for setting in chosen if setting["compiled"]]
        chosen = [setting for setting in chosen if setting not in compiled[1:]]
    return [base | setting for setting in chosen]


def measure(setting: dict, args) -> dict:
    """The figures of a setting, from a new process."""
    return on_ranks(1, work, setting, device=args.device)[0]


def work(rank: int, device: torch.device, setting: dict) -> dict:
    """In the new process: what starts first, then the phases. What was compiled before must not be found."""
    with fresh_cache() if setting["compiled"] else nullcontext():
        return starts(device) | phases(device, setting)


def starts(device: torch.device) -> dict:
    """By how much on a GPU the first allocation and the first product take longer than the second."""
    if device.type == "cpu":  # the C library may have the bytes, and the product starts nothing
        return {}
    a, b = (torch.randn(256, 256, device=device) for _ in range(2))
    parts = {
        "allocation": lambda: torch.empty(2**24, device=device).fill_(0.0),
        "product": lambda: a @ b,
    }
    first = milliseconds(parts, device, repeat=2, warmup=0)
    return {f"first_{name}_excess_ms": round(a - b, 3) for name, (a, b) in first.items()}


def phases(device: torch.device, setting: dict) -> dict:
    """Times of the parts, and by what they are checked: parameters are read, gradients and states written."""
    model = transformer(setting["size"], device)
    optimizer = AdamW(model.parameters(), lr=1e-4)
    call = torch.compile(model) if setting["compiled"] else model
    tokens, targets = torch.randint(
        model.config.vocab, (2, setting["batch"], setting["context"]), device=device
    )
    made = {}
    bad = torch.zeros((), device=device)

    def forward():
        with torch.autocast(device.type, torch.bfloat16, enabled=setting["precision"] == "bf16"):
            made.update(loss=call(tokens, targets))

    def backward():
        made.update(grads=torch.autograd.grad(made.pop("loss"), optimizer.params))

    parts = dict(
        zip(
            PARTS,
            (forward, backward, lambda: optimizer.step([*made.pop("grads")], bad)),
            strict=True,
        )
    )
    times = milliseconds(parts, device, setting["repeat"], setting["warmup"])
    forward_flops = flops_per_token(model.config, setting["context"]) / 3 * tokens.numel()
    row = dict(
        parameters=reference(model.config).parameters,
        flops=dict(forward=forward_flops, backward=2 * forward_flops),
    )
    moved = dict(backward=4 * row["parameters"], optimizer=28 * row["parameters"])
    row |= dict(moved_bytes=moved, peak_of=setting["precision"])
    for part, ms in times.items():
        row |= summary(part, ms)
    return row


def summary(part: str, ms: list[float]) -> dict:
    """Median, minimum, maximum, mean and deviation, and by how much the first is above the median of the others."""
    row = stats(ms, part) | {f"{part}_mean_ms": round(statistics.mean(ms), 3)}
    row |= {f"{part}_std_ms": round(statistics.stdev(ms), 3)} if len(ms) > 1 else {}
    return row | (
        {f"{part}_excess_ms": round(ms[0] - statistics.median(ms[1:]), 3)} if len(ms) > 1 else {}
    )


def published_times() -> dict[tuple[str, str, bool], dict]:
    """{(size, precision, compiled): a line of published ms of forward + backward, and on what}"""
    published_rows = {}
    for size in SIZES:
        for precision, compiled in (("fp32", False), ("bf16", False), ("fp32", True)):
            texts = []
            for name, device, machine, compiles, columns in PUBLISHED:
                for line in published(name) if (machine, compiles) == (precision, compiled) else ():
                    if NAMES.get(line["size"], line["size"]) == size:
                        ms = (grouped(1e3 * float(line[key]), 1) for key in columns.split())
                        texts.append(f"{' + '.join(ms)} ({device})")
            line = dict(size=size, precision=precision, compiled=compiled)
            if texts:
                published_rows[tuple(line.values())] = line | dict(published="; ".join(texts))
    return published_rows


def columns(gpu: bool) -> Columns:
    timed = "{%s_mean_ms:,.2f} ± {%s_std_ms:,.2f}, {%s_ms:,.2f}"
    first = "{first_allocation_excess_ms:,.1f}, {first_product_excess_ms:,.1f}"
    return {
        "size": "{size}",
        "how": lambda row: f"{row['precision']}, {'compiled' if row['compiled'] else 'eager'}",
        "warm-up": "{warmup}",
        **{f"{part}, ms": timed.replace("%s", part) for part in PARTS},
        **({"excess: allocation, product, ms": first} if gpu else {}),
        "excess: step, ms": "{excess_ms:,.1f}",
        "published forward + backward, ms": "{published}",
    }


def table(rows: list[dict]) -> tuple[str, str]:
    """A line per row, mean, deviation and median; published means beside what was warmed up."""

    def key(row: dict) -> tuple[str, str, bool] | None:
        setting = row["setting"]
        warm = setting["warmup"] == WARMUPS[-1]
        return (setting["size"], setting["precision"], setting["compiled"]) if warm else None

    gpu = any(not row["device"].startswith("CPU") for row in rows)
    setting = rows[0]["setting"]
    text = (
        f"{setting['batch']} x {setting['context']} tokens, {setting['repeat']} steps; mean ± standard deviation, "
        "median. Excess: "
        f"what the first {'allocation and product take more than the second, and the first ' * gpu}step takes more "
        "than the median of the others."
    )
    return section(rows, text, columns(gpu), beside(map(entry, rows), published_times(), key))


def entry(row: dict) -> dict:
    """The line of a row. One step alone has no deviation, and no excess over others."""
    if row["outcome"] != "ok":
        return row
    line = {f"{part}_std_ms": 0 for part in PARTS} | row
    return line | dict(excess_ms=sum(row.get(f"{part}_excess_ms", 0) for part in PARTS))


def figure(rows: list[dict], folder) -> list:
    """Excess of the first step that counts over the steps of warm-up before it."""
    made = {}
    for row in rows:
        if row["setting"]["precision"] == "fp32" and "forward_excess_ms" in row:
            name = (
                f"{row['setting']['size']}, {'compiled' if row['setting']['compiled'] else 'eager'}"
            )
            excess = sum(row[f"{part}_excess_ms"] for part in PARTS)
            made.setdefault(name, []).append((row["setting"]["warmup"], max(excess, 0)))
    made = {name: sorted(line) for name, line in made.items() if len(line) > 1}
    axes = dict(xscale="linear", yscale="symlog")
    return curves(
        folder, "phases", made, "steps of warm-up", "excess of the first step, ms", **axes
    )


if __name__ == "__main__":
    sys.exit(main(sys.modules[__name__]))
