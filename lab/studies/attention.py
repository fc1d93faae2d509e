"""Attention alone: ms of forward and backward, and bytes held between them, beside the formula.

    python -m lab.studies.attention --small
    python -m lab.studies.attention --sweep published long --device cuda
    python -m lab.studies.attention --sweep reference --results results/attention.jsonl

plain: softmax(q k^T / sqrt d) v, whose [T, T] matrices exist; compiled: the same under torch.compile; flex-autotuned:
FlexAttention whose configurations torch has timed (its mode max-autotune-no-cudagraphs); the others are kernels of SDPA
and FlexAttention. Between forward and backward plain holds its probabilities, s b H T^2 bytes where
a number has s, and T^2 more for a causal mask; math holds them in fp32, also q and k, scaled (and v, if it had to be
cast); a fused kernel its output and a log-sum for each row, (s d + 4) b H T. What is held is counted: storages that
autograd saves and that are no inputs. FLOPs: 4 d per head and pair of a query with a key that it sees; backward 2 times
that, 2.5 where the scores are computed again.
"""

import math
import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from lab.studies import study
from lab.studies.study import beside, curves, impossible, published, section
from model import causal_mask, compiled_flex_attention, sdpa_kernel
from trainer.attention_kernel import BACKENDS, DTYPES, Shape, refusal
from trainer.measuring import memory, timing
from trainer.step_costs import attention_flops, causal_keys
from trainer.terminal.text import grouped

WHOLE = "plain", "compiled", "math"  # hold [T, T]
FLEX = "flex", "flex-autotuned"
ALL = ("plain", "compiled", *FLEX, *BACKENDS)
SWEEPS = {  # lists are combined; tokens: of a batch, whatever the length
    "published": dict(
        batch=[8],
        heads=[1],
        kv_heads=[1],
        head_dim=[16, 32, 64, 128],
        dtype=["fp32"],
        causal=[False],
        seqlen=[256, 1024, 4096, 8192, 16384],
        backend=["plain", "compiled"],
    ),
    "long": dict(
        batch=[1],
        heads=[1],
        kv_heads=[1],
        head_dim=[16, 32, 64, 128],
        dtype=["bf16", "fp32"],
        causal=[True],
        seqlen=[2**n for n in range(7, 17)],
        backend=ALL,
    ),
    "reference": dict(
        tokens=32768,
        heads=[32],
        kv_heads=[8],
        head_dim=[128],
        dtype=["bf16"],
        causal=[True],
        seqlen=[4096, 8192, 16384],
        backend=[*FLEX, "flash", "cudnn"],
    ),
    "small": dict(
        batch=[2],
        heads=[1],
        kv_heads=[1],
        head_dim=[16, 64],
        dtype=["fp32"],
        causal=[False, True],
        seqlen=[128, 512],
        backend=["plain", "math", "flash"],
    ),
}
# Flags that take the place of a sweep's values.
GIVEN = "backend dtype seqlen head_dim heads kv_heads batch".split()


def inputs(shape: Shape, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v that want gradients, and the output's gradient: [B, H or K, T, d] in the memory order of the model."""
    torch.manual_seed(0)

    def normal(heads):
        made = torch.randn(
            shape.batch,
            shape.seqlen,
            heads,
            shape.head_dim,
            dtype=DTYPES[shape.dtype],
            device=device,
        )
        return made.transpose(1, 2)

    qkv = [normal(n).requires_grad_() for n in (shape.heads, shape.kv_heads, shape.kv_heads)]
    return *qkv, normal(shape.heads)


def plain(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """q [B, H, T, d], k and v [B, K, T, d] -> [B, H, T, d], by way of [B, H, T, T]."""
    if q.shape[1] > k.shape[1]:
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = q @ k.mT / math.sqrt(q.shape[3])
    if causal:
        hidden = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    return scores.softmax(-1) @ v


def function(backend: str, shape: Shape, device: torch.device, causal: bool = True) -> Callable:
    """(q, k, v) -> [B, H, T, d] by one of ALL."""
    if backend in BACKENDS:
        return partial(sdpa_kernel, backend, causal=causal)
    torch._dynamo.reset()  # many shapes would meet Dynamo's limit of recompilations
    if backend in ("plain", "compiled"):
        run = partial(plain, causal=causal)
        return torch.compile(run, dynamic=False) if backend == "compiled" else run
    flex = compiled_flex_attention
    if backend == "flex-autotuned":
        flex = torch.compile(flex_attention, mode="max-autotune-no-cudagraphs")
    mask = causal_mask(shape.seqlen, device) if causal else None
    return partial(flex, block_mask=mask, enable_gqa=shape.heads > shape.kv_heads)


def milliseconds(run: Callable[..., Tensor], tensors: tuple, repeat: int) -> dict[str, list]:
    """{"forward": [ms, ..], "backward": [ms, ..]}. Every backward follows its own forward, whose tensors it frees."""
    *qkv, gradient = tensors
    made = {}
    parts = {
        "forward": lambda: made.update(y=run(*qkv)),
        "backward": lambda: torch.autograd.grad(made.pop("y"), qkv, gradient),
    }
    return study.milliseconds(parts, gradient.device, repeat)


def held(run: Callable[..., Tensor], qkv: list[Tensor]) -> int:
    """Bytes that autograd saves for backward, inputs left out, each storage once."""
    counter = study.Held(qkv)
    with counter.hooks():
        run(*qkv)
    return counter.most


def formula(backend: str, shape: Shape, causal: bool) -> int:
    """Bytes held by the formula of the docstring."""
    size = DTYPES[shape.dtype].itemsize
    rows = shape.batch * shape.heads * shape.seqlen
    if backend == "math":
        return 4 * rows * (shape.seqlen + (2 if size == 4 else 3) * shape.head_dim)
    if backend in WHOLE:
        return size * rows * shape.seqlen + causal * shape.seqlen**2
    return (size * shape.head_dim + 4) * rows


def measure(setting: dict, args) -> dict:
    """The figures of one backend; its `outcome` is ok, or "n/a: why" where the kernel does not run."""
    device = torch.device(args.device)
    causal = setting["causal"]
    backend = setting["backend"]
    shape = Shape(**{name: setting[name] for name in Shape._fields})
    row = dict(backend=backend) | shape._asdict()
    reason = refusal(backend, shape, device) if backend in BACKENDS else None
    if backend in FLEX and device.type == "cpu":
        reason = "FlexAttention needs CUDA to train"
    if reason:
        return row | dict(outcome=f"n/a: {reason}")
    tensors = inputs(shape, device)
    memory.reset_peak(device)
    run = function(backend, shape, device, causal)
    row |= dict(held_bytes=held(run, tensors[:3]), formula_bytes=formula(backend, shape, causal))
    times = milliseconds(run, tensors, args.repeat)
    pairs = shape.batch * shape.seqlen * (causal_keys(shape.seqlen) if causal else shape.seqlen)
    flops = dict(forward=attention_flops(shape.heads, shape.head_dim, 1) * pairs)
    flops |= dict(backward=(2 if backend in WHOLE else 2.5) * flops["forward"])
    for name, ms in times.items():
        row |= timing.stats(ms, name)
        row[f"{name}_tflops"] = round(flops[name] / max(row[f"{name}_ms"], 1e-3) / 1e9, 6)
    # Forward writes what it holds, backward reads it.
    moved = dict.fromkeys(flops, row["held_bytes"])
    # Whose fp32 products run on tensor cores.
    peak_of = "bf16" if backend == "efficient" else shape.dtype
    return (
        row
        | dict(flops=flops, moved_bytes=moved, peak_of=peak_of)
        | timing.clocks(device)
        | memory.peak(device)
    )


def flags(parser) -> None:
    """Adds those of this study."""
    parser.add_argument(
        "--sweep", nargs="+", choices=list(SWEEPS), help="(default: published long, or small)"
    )
    parser.add_argument("--backend", nargs="+", choices=ALL)
    parser.add_argument("--dtype", nargs="+", choices=list(DTYPES))
    for name in GIVEN[2:]:
        parser.add_argument(f"--{name.replace('_', '-')}", nargs="+", type=int, metavar="N")


def check(args) -> None:
    """Heads that do not share keys and values, a length that does not divide, lengths of a GPU on a CPU unless they are
    asked for."""
    for setting in settings(args):
        if setting["heads"] % setting["kv_heads"]:
            raise ValueError(
                f"--kv-heads {setting['kv_heads']}: must divide the {setting['heads']} heads"
            )
    if args.device == "cpu" and not (args.small or args.seqlen or args.sweep == ["small"]):
        raise ValueError(
            "--device cpu: the default lengths are for a GPU; give --small, or --seqlen"
        )


def settings(args) -> list[dict]:
    """A row per backend, shape and dtype of the sweeps, with the values of flags that are given."""
    usual = ["small"] if args.small else ["published", "long"]
    chosen = []
    for name in args.sweep or usual:
        values = dict(SWEEPS[name]) | {
            key: getattr(args, key) for key in GIVEN if getattr(args, key)
        }
        tokens = values.pop("tokens", 0)
        for combination in product(*values.values()):
            setting = dict(zip(values, combination, strict=True))
            if "batch" not in setting:
                if tokens % setting["seqlen"]:
                    raise ValueError(
                        f"--seqlen {setting['seqlen']}: must divide the {tokens} tokens; or give --batch"
                    )
                setting["batch"] = tokens // setting["seqlen"]
            chosen += [setting] if setting not in chosen else []
    return chosen


COLUMNS = {
    "d": "{head_dim}",
    "T": "{seqlen}",
    "dtype": "{dtype}",
    "causal": lambda row: "yes" if row["causal"] else "no",
    "backend": "{backend}",
    "forward ms": "{forward_ms:,.3f}",
    "backward ms": "{backward_ms:,.3f}",
    "both": lambda row: grouped(row["forward_ms"] + row["backward_ms"], 3),
    "held KiB": "{held_bytes:KiB ,.0f}",
    "by formula": "{formula_bytes:KiB ,.0f}",
    "published forward + backward, ms": "{forward_s:ms ,.3f} + {backward_s:ms ,.3f}",
    "held, GB": "{mem_gb:,.2f}",
    "of its forward": "{suspicious}",
}


def table(rows: list[dict]) -> tuple[str, str]:
    """A line per row; published times of the same shape beside it, marked where they cannot be true."""
    theirs = {}
    for line in published("attention_h100"):
        d, T = int(line["head_dim"]), int(line["seq"])
        more = dict(head_dim=d, seqlen=T, dtype="fp32", causal=False, suspicious=suspicious(line))
        theirs[d, T] = line | more
    same = dict(backend="plain", dtype="fp32", batch=8, causal=False)

    def key(row: dict) -> tuple[int, int] | None:
        setting = row["setting"]
        return (setting["head_dim"], setting["seqlen"]) if setting | same == setting else None

    batches = ", ".join(sorted({str(row["setting"]["batch"]) for row in rows}))
    text = f"Batch {batches} (published: 8, one head, H100). Medians. Held: between forward and backward."
    return section(rows, text, COLUMNS, beside(rows, theirs, key))


def suspicious(line: dict[str, str]) -> str:
    """What cannot be true of a published forward, b = 8, one head, fp32, on an H100: what study.impossible says."""
    T = int(line["seq"])
    d = int(line["head_dim"])
    ms = 1e3 * float(line["forward_s"])
    why = impossible(
        "H100 80GB HBM3", 8 * T * attention_flops(1, d, T), ms, 1e9 * float(line["mem_gb"]), "fp32"
    )
    return f"impossible: {why}" if why else ""


def figure(rows: list[dict], folder) -> list[Path]:
    """Forward and backward over the length, by backend, at the largest head dimension, in the first dtype."""
    most = max(row["head_dim"] for row in rows)
    dtype = rows[0]["dtype"]
    made = {}
    for row in rows:
        if (row["head_dim"], row["dtype"]) == (most, dtype):
            name = f"{row['backend']}{', causal' * row['setting']['causal']}"
            made.setdefault(name, []).append(
                (row["seqlen"], row["forward_ms"] + row["backward_ms"])
            )
    return curves(
        folder, "attention", made, f"tokens, d = {most}, {dtype}", "ms, forward and backward"
    )


if __name__ == "__main__":
    sys.exit(study.main(sys.modules[__name__]))
