"""Causal attention alone: ms and TFLOP/s of forward and backward per backend; searches FlexAttention's kernel options.

    python -m benchmarks.attention --results results/attention.jsonl             # the reference shape at three lengths
    python -m benchmarks.attention --small --backends flash math                 # a CPU
    python -m benchmarks.attention --search --options results/flex_options.json  # then: main.py --flex-options FILE

python -m trainer.report attention --results FILE prints rows as a table. FLOPs: 4 d per head and pair of a
query with a key that it sees; backward 2.5 times that.
"""

import argparse
import itertools
import json
import math
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from model import causal_mask, compiled_flex_attention, sdpa_kernel
from trainer import config
from trainer.attention import BACKENDS, DTYPES, Shape, options_key, read_options, refusal
from trainer.costs import attention_flops, causal_keys
from trainer.distributed.terminal import fail, markdown
from trainer.experiments.logging import append_jsonl
from trainer.profiling import memory, timing
from trainer.report.tables import attention

WARMUP = 3
SMALL = "--seqlen 64 256 --head-dim 32 --heads 8 --kv-heads 2 --tokens 1024 --dtype fp32".split()
Options = dict[str, int]
SQUARES = ((128, 64), (128, 128), (64, 128), (64, 64), (128, 32), (64, 32))
# What --search tries, in this order. Every block divides the 128 of the block mask: the backward does not check it. M1
# divides N1 and N2 divides M2, as the kernel asserts.
FORWARD = [
    dict(fwd_BLOCK_M=m, fwd_BLOCK_N=n, fwd_num_warps=warps, fwd_num_stages=stages)
    for (m, n), warps, stages in itertools.product(SQUARES, (4, 8), (2, 3, 4))
]
BACKWARD = [
    dict(bwd_BLOCK_M1=m, bwd_BLOCK_N1=n, bwd_BLOCK_M2=n, bwd_BLOCK_N2=m, bwd_num_warps=warps, bwd_num_stages=stages)
    for (m, n), warps, stages in itertools.product(((64, 128), (32, 128), (64, 64), (32, 64)), (4, 8), (1, 2, 3, 4))
]


def inputs(shape: Shape, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v that want gradients, and the output's gradient: [B, H or K, T, d] in the memory order of the model."""
    torch.manual_seed(0)

    def normal(heads):
        made = torch.randn(shape.batch, shape.seqlen, heads, shape.head_dim, dtype=DTYPES[shape.dtype], device=device)
        return made.transpose(1, 2)

    qkv = [normal(n).requires_grad_() for n in (shape.heads, shape.kv_heads, shape.kv_heads)]
    return *qkv, normal(shape.heads)


def function(backend: str, shape: Shape, device: torch.device, options: Options) -> Callable[..., Tensor]:
    """(q, k, v) -> [B, H, T, d] by a kernel of --sdpa, or by "flex" with `options`."""
    if backend != "flex":
        return partial(sdpa_kernel, backend)
    torch._dynamo.reset()  # a recompilation per search candidate would meet Dynamo's limit
    mask, grouped = causal_mask(shape.seqlen, device), shape.heads > shape.kv_heads
    return partial(compiled_flex_attention, block_mask=mask, enable_gqa=grouped, kernel_options=options or None)


def milliseconds(run: Callable[..., Tensor], tensors: tuple, repeat: int, backward: bool = True) -> dict[str, list]:
    """{"forward": [ms, ..], "backward": [ms, ..]}. Every backward follows its own forward, whose tensors it frees."""
    *qkv, gradient = tensors
    timers = [timing.StepTimer(gradient.device) for _ in range(2)]
    for i in range(WARMUP + repeat):
        with timers[0].step(excluded=i < WARMUP):
            y = run(*qkv)
        if backward:
            with timers[1].step(excluded=i < WARMUP):
                torch.autograd.grad(y, qkv, gradient)
    return dict(zip(("forward", "backward"), (timer.ms() for timer in timers), strict=True))


def bench(backend: str, shape: Shape, device: torch.device, repeat: int, options: Options) -> dict:
    """The row of one backend; its `outcome` is ok, "n/a: why" or "failed: why"."""
    row = timing.environment(device) | dict(study="attention", backend=backend, options=options) | shape._asdict()
    flex = "FlexAttention needs CUDA to train" if device.type == "cpu" else None
    if reason := flex if backend == "flex" else refusal(backend, shape, device):
        return row | dict(outcome=f"n/a: {reason}")
    try:
        tensors = inputs(shape, device)
        memory.reset_peak(device)
        times = milliseconds(function(backend, shape, device, options), tensors, repeat)
    except Exception as e:  # a backend that fails is a result; the others still run
        text = " ".join(str(e).split())[:300]
        return row | dict(outcome="OOM" if memory.out_of_memory(e) else f"failed: {type(e).__name__}: {text}")
    flops = shape.batch * shape.seqlen * attention_flops(shape.heads, shape.head_dim, causal_keys(shape.seqlen))
    for (name, ms), times_forward in zip(times.items(), (1, 2.5), strict=True):
        row |= timing.stats(ms, name)
        row[f"{name}_tflops"] = round(times_forward * flops / row[f"{name}_ms"] / 1e9, 6)
    return row | timing.clocks(device) | memory.peak(device) | dict(outcome="ok")


def store(path: Path, key: str, entry: dict) -> None:
    """Puts `entry` into the file, beside what others have stored there. Readers see the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    found = read_options(path, missing_ok=True) | {key: entry}
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    os.replace(draft, path)


def search(time: Callable[[Options, str], float], path: Path, key: str, about: dict, say=print) -> dict:
    """The best options and their ms, stored under `key` after each improvement. `time`: (options, "forward" or
    "backward") -> ms; an exception skips the candidate. The stored options are tried first, so that a search cut short
    cannot lose them, then torch's own. ValueError where no candidate of a direction runs."""
    entry = read_options(path, missing_ok=True).get(key, {}) | about
    chosen = dict(entry.get("options", {}))
    for direction, prefix, more in (("forward", "fwd_", FORWARD), ("backward", "bwd_", BACKWARD)):
        other = {name: value for name, value in chosen.items() if not name.startswith(prefix)}
        stored = {name: value for name, value in chosen.items() if name.startswith(prefix)}
        best = math.inf
        for options in [stored, *(each for each in ({}, *more) if each != stored)]:
            try:
                ms = time(other | options, direction)
            except Exception as e:
                say(f"{direction} {options}: skipped, {type(e).__name__}: {' '.join(str(e).split())[:100]}")
                continue
            if not options:
                entry[f"default_{direction}_ms"] = ms
            if ms < best:
                best, chosen = ms, other | options
                entry |= {"options": chosen, f"{direction}_ms": ms}
                store(path, key, entry)
                say(f"{direction} {options}: {ms:.3f} ms")
        if best == math.inf:
            raise ValueError(f"no options run {direction}")
        store(path, key, entry)  # with the time of the defaults
    return entry


def candidate_timer(shape: Shape, device: torch.device, repeat: int) -> Callable[[Options, str], float]:
    """What `search` calls on a GPU: the median. Raises for options whose results are not those of FlashAttention."""
    *qkv, gradient = tensors = inputs(shape, device)
    kernel = "flash" if refusal("flash", shape, device) is None else "efficient"
    y = sdpa_kernel(kernel, *qkv)
    right = [y.detach(), *torch.autograd.grad(y, qkv, gradient)]

    def time(options: Options, direction: str) -> float:
        run = function("flex", shape, device, options)
        y = run(*qkv)
        found = [y.detach(), *(torch.autograd.grad(y, qkv, gradient) if direction == "backward" else ())]
        for a, b in zip(found, right, strict=False):  # forward: the output alone
            error = ((a - b).float().norm() / b.float().norm()).item()
            if not error < 0.02:
                raise ValueError(f"wrong result: relative error {error:.3g}")
        return timing.stats(milliseconds(run, tensors, repeat, direction == "backward")[direction])["step_ms"]

    return time


def arguments(argv: list[str]) -> argparse.Namespace:
    """The command line, checked; exit code 2 and one line for what does not fit."""
    parser = argparse.ArgumentParser(prog="attention", allow_abbrev=False, description=__doc__.split("\n")[0])
    parser.add_argument("--seqlen", nargs="+", type=int, default=[4096, 8192, 16384])
    parser.add_argument("--backends", nargs="+", choices=["flex", *BACKENDS], default=["flex", "flash", "cudnn"])
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32768, help="of a batch, whatever the length")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bf16")
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--results", default="runs/attention.jsonl", metavar="FILE")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--small", action="store_true", help="8 heads of 32 at lengths 64 and 256, fp32: for a CPU")
    parser.add_argument("--search", action="store_true", help="search FlexAttention's kernel options instead")
    parser.add_argument("--options", type=Path, metavar="FILE", help="searched options: flex runs with them; --search "
                        "stores them there (default: results/flex_options.json)")  # fmt: skip
    args = parser.parse_args([*SMALL * ("--small" in argv), *argv])  # what is given wins
    if wrong := [name for name in ("head_dim", "heads", "kv_heads", "tokens", "repeat") if getattr(args, name) < 1]:
        parser.error(f"{config.flag(wrong[0])} {getattr(args, wrong[0])}: must be at least 1")
    if args.heads % args.kv_heads:
        parser.error(f"--kv-heads {args.kv_heads}: must divide the {args.heads} heads")
    if wrong := [T for T in args.seqlen if T < 1 or args.tokens % T]:
        parser.error(f"--seqlen {wrong[0]}: must divide the {args.tokens} tokens")
    cuda = torch.cuda.is_available()
    args.device = ("cuda" if cuda else "cpu") if args.device == "auto" else args.device
    if args.device == "cuda" and not cuda or args.device == "cpu" and args.search:
        parser.error(f"--device {args.device}: {'--search needs CUDA' if args.search else 'this torch sees no GPU'}")
    return args


def main(argv: list[str]) -> int:
    """Times every backend at every length, or searches options. Exit codes: 0, also if a backend fails, 2 bad flags."""
    args = arguments(argv)
    device, rows = torch.device(args.device), []
    try:
        stored = read_options(args.options, missing_ok=args.search) if args.options else {}
    except ValueError as e:
        fail(f"--options {e}", 0)
    try:
        for T in args.seqlen:
            shape = Shape(args.tokens // T, args.heads, args.kv_heads, T, args.head_dim, args.dtype)
            key = options_key(shape, device)
            if args.search:
                about = {k: timing.environment(device)[k] for k in ("date", "commit")} | dict(batch=shape.batch)
                path = args.options or Path("results/flex_options.json")
                print(key, search(candidate_timer(shape, device, args.repeat), path, key, about), sep="\n", flush=True)
                continue
            for backend in args.backends:
                own = stored.get(key, {}).get("options", {}) if backend == "flex" else {}
                rows.append(bench(backend, shape, device, args.repeat, own))
                append_jsonl(args.results, rows[-1])
                print(f"seqlen {T} {backend}: {rows[-1]['outcome']}", flush=True)
    except ValueError as e:
        fail(f"--search: {e}", 0)
    if rows:
        print("", markdown(attention(rows)[1]), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
