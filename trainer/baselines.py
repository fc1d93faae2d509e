"""The trainer's model, optimizer and step under each --wrapper and --compile; alone, compares them in one process.

    python -m trainer.baselines simple:fwdbwd none:fwdbwd simple:none [-- FLAGS of main.py]

Cells are WRAPPER:COMPILE. They take turns, step by step, on the same batches, so that what disturbs the machine
disturbs all of them alike; printed and appended to --results: median, minimum and maximum ms, and the median of the
step-by-step ratios to the first cell. One rank (several processes on one CPU would measure the scheduler).
"""

import statistics
import sys

from trainer import config as flags

if __name__ == "__main__":  # before torch is imported, as in main.py
    _cut = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    CELLS, CONFIG = sys.argv[1:_cut], flags.parse(sys.argv[_cut + 1 :])

import torch
import torch.distributed as dist

from model import ModelConfig, Transformer
from simple_fsdp import MixedPrecisionPolicy, data_parallel, disable_data_parallel
from trainer import measure
from trainer.data import Batches
from trainer.sinks import append_jsonl
from trainer.step import AdamW, Step, make_step, shutdown

DTYPES = dict(fp32=torch.float32, bf16=torch.bfloat16)
WARMUP = 3


def model_config(c: flags.Config) -> ModelConfig:
    names = "depth width head_dim grouping grow vocab attn remat remat_ratio".split()
    return ModelConfig(**{name: getattr(c, name) for name in names})


def wrap(model: torch.nn.Module, c: flags.Config, device: torch.device, world: int) -> dist.DeviceMesh | None:
    """Puts `model` under the wrapper of resolved flags; returns the mesh of `world` ranks (wrapper "none": None)."""
    if c.wrapper == "none":
        return None
    shape = (c.replicas, world // c.replicas) if c.mode == "hybrid_shard" else (world,)
    mesh = dist.init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    policy = MixedPrecisionPolicy(DTYPES[c.param_dtype], DTYPES[c.reduce_dtype])
    small = int(c.min_shard_mib * 2**20)
    data_parallel(model, mesh, c.mode, policy, reshard_after_forward=c.reshard, min_bytes=small)
    return mesh


def build(c: flags.Config, device: torch.device, world: int, stage=lambda name: None, init: bool = True) -> Step:
    """The step of resolved flags, its model (`.model` of a mode that does not compile it) initialised from --seed.
    `stage` is called with the name of each stage that is done. Needs a process group unless c.wrapper is "none"."""
    with torch.device("meta"):
        model = Transformer(model_config(c))
    stage("model")
    mesh = wrap(model, c, device, world)
    stage("wrap")
    model.to_empty(device=device)
    stage("to_empty")
    if init:
        torch.manual_seed(c.seed)
        with disable_data_parallel():
            model.init_weights()
    stage("init")
    optimizer = AdamW(model.parameters(), c.lr, moment_dtype=DTYPES[c.adam_dtype])
    stage("optimizer")
    model.set_seqlen(c.seqlen, device)
    stage("mask")
    chunk = c.chunk if c.loss == "chunked" else 0
    options = flags.compile_options(c)
    step = make_step(
        c.compile, model, optimizer, options=options, mesh=mesh, grad_accum=c.grad_accum, clip=c.clip, chunk=chunk,
        accum_sync=c.accum_sync, param_dtype=DTYPES[c.param_dtype], reduce_dtype=DTYPES[c.reduce_dtype],
    )  # fmt: skip
    step.bare_model = model
    return step


def compare(cells: list[str], c: flags.Config, device: torch.device) -> list[dict]:
    """Rows of every cell, in order; the first is what `ratio` refers to."""
    from dataclasses import replace

    configs = []
    for cell in cells:
        wrapper, _, mode = cell.partition(":")
        configs.append(flags.resolve(replace(c, system=replace(c.system, wrapper=wrapper, compile=mode)), c.device, 1))
    c = configs[0]
    steps = [build(each, device, 1) for each in configs]
    batches = Batches(c.data, global_batch=c.batch * c.grad_accum, seqlen=c.seqlen, vocab=c.vocab, seed=c.seed)
    timers = [measure.StepTimer(device) for _ in steps]
    for k in range(c.steps):
        batch = [t.to(device) for t in next(batches)]
        turn = k % len(steps)  # each goes first as often as the others
        for step, timer in [*zip(steps, timers, strict=True)][turn:] + [*zip(steps, timers, strict=True)][:turn]:
            with timer.step(excluded=k < WARMUP):
                loss = step(*batch)
        if k == 0 or k == c.steps - 1:
            print(f"step {k + 1}: loss of the last cell {loss.item():.4f}", flush=True)
    times = [timer.ms() for timer in timers]
    rows = []
    for cell, each, ms in zip(cells, configs, times, strict=True):
        ratio = statistics.median(a / b for a, b in zip(ms, times[0], strict=True))
        row = measure.environment(device) | dict(study="baselines", cell=cell, world=1, flags=flags.changed(each))
        rows.append(row | measure.stats(ms) | dict(ratio=round(ratio, 4), against=cells[0], interleaved=cells))
    return rows


def main(cells: list[str], c: flags.Config) -> int:
    auto = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(auto if c.device == "auto" else c.device)
    known = [(w, m) for w in ("simple", "none") for m in ("none", "blocks", "model", "fwdbwd", "step")]
    bad = [cell for cell in cells if tuple(cell.split(":")) not in known]
    if bad or not cells:
        flags.fail(f"cells {' '.join(bad) or '(none)'}: give WRAPPER:COMPILE, such as simple:fwdbwd none:fwdbwd", 0)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        rows = compare(cells, flags.resolve(c, device.type, 1), device)
    except ValueError as e:
        flags.fail(str(e), 0)
    for row in rows:
        append_jsonl(c.results, row)
        print(f"{row['cell']:<16} {row['step_ms']:>8.1f} ms [{row['step_ms_min']:.1f}-{row['step_ms_max']:.1f}] "
              f"n {row['n']}  {row['ratio']:.3f} of {cells[0]}")  # fmt: skip
    shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main(CELLS, CONFIG))
