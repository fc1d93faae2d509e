"""An MLP of any size with one flag for each switch: how much memory and time does a switch cost?

    python speed_mem_tests_mlp.py --compile fwdbwd --param-dtype bf16    # one row; several ranks: torchrun or --world N
    python speed_mem_tests_mlp.py --table mlp_4096 [--small]             # all rows of a published table, beside it

A plain loop on one batch. The model is what the published 4 x 4096 figures fit: eager peaks, counted, of 40'961 MiB
(published 40'977) and of 36'609 on 4 ranks (36'625). 3 x 1024 does not fit: an eager peak of 5'056 MiB (5'985).
`--table mlp_1024 --small`, torch 2.13.0+cpu, AMD EPYC, 1 thread, n 6: a step of 8.2 ms [6.5-10.6] sharded in eager, of
5.6 ms [5.4-6.1] with --compile fwdbwd (results/mlp_small.jsonl). GPU: not measured.
"""
# ruff: noqa: E402 (torch is imported when the flags have been read)

import argparse
import csv
import functools
import math
import os
import shlex
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from lab.sweeps import sweep
from trainer import config as flags
from trainer.distributed.environment import ranks
from trainer.terminal.command_line import flag
from trainer.terminal.output import fail, put
from trainer.terminal.text import grouped, markdown

WARMUP = 3  # steps in no median, the compiling ones among them
SIZES = "width seqlen blocks batch vocab grow steps".split()
SWITCHES = (
    "autocast data_parallel reshard compile compile_options param_dtype reduce_dtype init".split()
)
SMALL = "--width 64 --seqlen 64 --blocks 2 --batch 2 --vocab 512 --steps 9".split()
# The sizes of every table but mlp_1024, whose are the defaults.
LARGE = "--width 4096 --seqlen 4096 --blocks 4".split()
ALONE = "--no-data-parallel"
# A file per published table: the switches of its rows, in its order.
SETTINGS = Path(__file__).parent / "settings" / "mlp"


@dataclass(frozen=True)
class Config:
    width: int = 1024  # Width of the residual stream.
    seqlen: int = 1024  # Tokens per sequence.
    blocks: int = 3  # Number of blocks.
    batch: int = 8  # Sequences per rank.
    vocab: int = 32768  # Size of the vocabulary.
    grow: int = 4  # Width inside a block, in units of --width.
    steps: int = 23  # Optimizer steps; the first 3 are warm-up.
    small: bool = False  # Use sizes that a CPU can run, except those given by flags.
    # auto: CUDA where this torch sees a GPU, else the CPU.
    device: Literal["auto", "cpu", "cuda"] = "auto"
    autocast: bool = False  # Run forward and loss under torch.autocast to bf16.
    data_parallel: bool = True  # Shard with simple_fsdp.data_parallel.
    reshard: bool = True  # Free gathered weights after forward and gather them again in backward.
    # What to compile. model: the model alone, the loss is eager. fwdbwd: forward and loss as one full graph, their
    # backward as another. step: forward, loss, backward and optimizer as one function, with a graph break at backward.
    compile: Literal["none", "model", "step", "fwdbwd"] = "none"
    # Options of Inductor as NAME=VALUE; the word overlap adds the options of overlap.py.
    compile_options: tuple[str, ...] = ()
    param_dtype: Literal["fp32", "bf16"] = (
        "fp32"  # Dtype of gathered parameters and of the computation.
    )
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"  # Dtype of the gradient reduction.
    # device: build and initialise on the device. meta: build on the meta device, shard, allocate, initialise.
    init: Literal["device", "meta"] = "device"
    world: int = 0  # Simulate this many ranks in one process. 0: no simulation.
    link: str = "h100-nvlink"  # Link of the simulated ranks, as in main.py.
    results: str = "runs/mlp.jsonl"  # JSONL file, one row appended per run.
    # Run all rows of a published table, each in its own process, and print our rows beside the published ones. Rows
    # that --results already has are not run again. Switches cannot be given, because each row sets them.
    table: Literal["mlp_1024", "mlp_4096", "mlp_compile_options", "meta_init"] | None = None
    fresh: bool = False  # With --table: also run rows that --results already has.
    nproc: int = 0  # With --table: ranks of the sharded rows. 0: one per GPU.
    timeout: float = 1800.0  # With --table: seconds for one row.


def parse(argv: list[str], rank: int = 0, world: int = 1) -> Config:
    """Exit code 2 and a message for an unknown flag, a bad value, or values that do not fit."""
    read = functools.partial(
        tyro.cli, Config, prog="speed_mem_tests_mlp.py", console_outputs=rank == 0
    )
    config = read(args=argv, description=__doc__.partition("\n")[0])
    large = config.table not in (None, "mlp_1024")
    config = read(
        args=[*LARGE * large, *SMALL * config.small, *argv]
    )  # of two equal flags the last counts
    low = [f"--{name} {getattr(config, name)}" for name in SIZES if getattr(config, name) < 1]
    set_too = [flag(name) for name in SWITCHES if getattr(config, name) != getattr(Config, name)]
    alone = [f"--{name}" for name in ("table", "world") if getattr(config, name)] + [ALONE] * (
        not config.data_parallel
    )
    for wrong, message in (
        (low, f"{' '.join(low)}: must be at least 1"),
        (
            config.steps <= WARMUP,
            f"--steps {config.steps}: must be above {WARMUP}, the number of warm-up steps",
        ),
        (
            min(config.world, config.nproc, config.timeout) < 0,
            "--world, --nproc, --timeout: must not be negative",
        ),
        (
            config.table and set_too,
            f"{' '.join(set_too)}: not with --table, which sets it for each row; leave it out",
        ),
        (
            alone and world > 1,
            f"{' '.join(alone)}: needs one process, but torchrun started {world}; start it without torchrun",
        ),
        (
            config.world and not config.data_parallel,
            f"--world {config.world}: simulates ranks of sharded training; leave out {ALONE}",
        ),
        (
            not config.data_parallel and "bf16" in (config.param_dtype, config.reduce_dtype),
            f"--param-dtype, --reduce-dtype: bf16 needs data parallelism; with {ALONE} use --autocast",
        ),
        (
            config.compile_options and config.compile == "none",
            "--compile-options: needs --compile model, step or fwdbwd",
        ),
    ):
        if wrong:
            fail(message, rank)
    return config


def setting(config: Config) -> dict:
    """What a row holds under `flags`: every size and switch."""
    return {name: getattr(config, name) for name in (*SIZES, *SWITCHES)}


if __name__ == "__main__":  # before torch is imported: --help and bad flags answer at once
    RANKS = ranks()
    CONFIG = parse(sys.argv[1:], RANKS[0], RANKS[2])

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import overlap
from simple_fsdp import MixedPrecisionPolicy, data_parallel, disable_data_parallel
from trainer.attention_kernel import DTYPES
from trainer.distributed.launch import connect, shutdown
from trainer.logging import append_jsonl, check_writable, final_lines
from trainer.measuring import memory, timing
from trainer.parallelize import compile_options
from trainer.step import check_mode


class MLP(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        linear = functools.partial(nn.Linear, bias=False)
        wide = config.grow * config.width
        blocks = (
            nn.Sequential(linear(config.width, wide), nn.GELU(), linear(wide, config.width))
            for _ in range(config.blocks)
        )
        self.embed = nn.Embedding(config.vocab, config.width)
        self.blocks = nn.ModuleList(blocks)
        self.head = linear(config.width, config.vocab)

    def forward(self, tokens: Tensor) -> Tensor:  # [B, T] -> [B, T, V]
        x = self.embed(tokens)  # [B, T, D]
        for block in self.blocks:
            x = x + block(x)
        return self.head(F.layer_norm(x, x.shape[-1:]))


def build(config: Config, device: torch.device, world: int, stage=lambda name: None) -> MLP:
    """The initialised model, the same for either --init and any number of ranks."""
    torch.manual_seed(0)
    with torch.device("meta" if config.init == "meta" else device):
        model = MLP(config)
    stage("model")
    if config.data_parallel:
        mesh = torch.distributed.init_device_mesh(device.type, (world,))
        policy = MixedPrecisionPolicy(DTYPES[config.param_dtype], DTYPES[config.reduce_dtype])
        data_parallel(model, mesh, mp_policy=policy, reshard_after_forward=config.reshard)
        stage("data_parallel")
    if config.init == "meta":
        model.to_empty(device=device)
        stage("to_empty")
        with disable_data_parallel():
            model.apply(lambda module: getattr(module, "reset_parameters", bool)())
        stage("init_weights")
    return model


class Step:
    """`run(tokens, targets)` -> loss, in every compile mode. `phase`: where it is, for when memory runs out."""

    def __init__(self, config: Config, model: nn.Module, device: torch.device):
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
        self.phase = "fwd"
        self.autocast = dict(device_type=device.type, dtype=torch.bfloat16, enabled=config.autocast)
        options = compile_options(config)
        options = (overlap.compile_options(model) if options.pop("overlap", None) else {}) | options

        def compiled(mode: str, f):
            return (
                torch.compile(f, fullgraph=mode != "step", options=options)
                if mode == config.compile
                else f
            )

        self.model = compiled("model", model)
        self.loss_fn = compiled("fwdbwd", self.loss)
        self.run = compiled("step", self.step)

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        # [B T, V], [B T].
        return F.cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten())

    def step(self, tokens: Tensor, targets: Tensor) -> Tensor:  # [B, T] each -> scalar
        """Forward, loss, backward, update; the loss."""
        self.phase = "fwd"
        with torch.autocast(**self.autocast):
            loss = self.loss_fn(tokens, targets)
        self.phase = "bwd"
        loss.backward()
        self.phase = "step"
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def train(
    config: Config, step: Step, device: torch.device, timer: timing.StepTimer, stages: memory.Stages
):
    """Every step, on one batch: (the last loss, seconds of the warm-up). FloatingPointError: the loss is not finite."""
    data = torch.randint(
        config.vocab, (config.batch, config.seqlen + 1), generator=torch.Generator().manual_seed(1)
    ).to(device)
    tokens, targets = data[:, :-1].contiguous(), data[:, 1:].contiguous()  # [B, T]
    start = time.perf_counter()
    for k in range(config.steps):
        with timer.step(excluded=k < WARMUP):
            loss = step.run(tokens, targets)
        if k < WARMUP:
            loss.item()  # waits for the step
            stages.add(f"step {k + 1}")
            warm_s = time.perf_counter() - start
    if not math.isfinite(loss.item()):
        raise FloatingPointError(f"loss {loss.item()}")
    return loss.item(), warm_s


def main(config: Config, rank: int, local_rank: int, world: int) -> int:
    """One row. Exit codes: 0 done, 2 bad flags or environment, 5 non-finite, 6 out of memory, 1 anything else."""
    options = compile_options(config)
    cuda = config.device == "cuda" or torch.cuda.is_available()
    try:
        if (config.device == "cpu" or not cuda) and (
            only := [name for name in options if name.startswith("triton.")]
        ):
            raise ValueError(
                f"--compile-options {' '.join(only)}: needs CUDA; leave it out on a CPU"
            )
        check_mode("none", {name: value for name, value in options.items() if name != "overlap"})
        check_writable(config.results)
        device = connect(config, rank, local_rank, world)
    except ValueError as e:
        fail(str(e), rank)
    row = (
        timing.environment(device)
        | dict(study="mlp", world=flags.world_label(config, world))
        | setting(config)
    )
    row |= dict(
        flags=setting(config),
        line=os.environ.get("SWEEP_LINE"),
        outcome="ok",
        loss=None,
        compile_s=None,
    )
    row |= timing.stats([])
    stages = memory.Stages(device)
    timer = timing.StepTimer(device)
    step = None
    code = 0
    try:
        step = Step(config, build(config, device, config.world or world, stages.add), device)
        stages.add("optimizer")
        row["loss"], warm_s = train(config, step, device, timer, stages)
        row |= timing.stats(timer.ms())
        if config.compile != "none":
            row["compile_s"] = round(warm_s - WARMUP * row["step_ms"] / 1e3, 2)
    except Exception as e:
        text = " ".join(f"{type(e).__name__}: {e}".split())[:500]
        oom = memory.out_of_memory(e)
        row["outcome"] = f"OOM {step.phase if step else 'init'}" if oom else f"failed: {text}"
        code = 6 if oom else 5 if isinstance(e, FloatingPointError) else 1
        put(
            f"error: rank {rank}: {row['outcome']}{f': {text}; lower --batch' * oom}",
            stream=sys.stderr,
        )
    peaks = {name: mib for name, _, mib in stages.rows}
    started = {
        f"after_{name}_mib": mib for name, mib in peaks.items() if not name.startswith("step")
    }
    row |= started | dict(
        init_mib=peaks.get("model"), pre_step0_mib=max(started.values(), default=None)
    )
    row |= dict(first_step_peak_mib=peaks.get("step 1"), second_step_peak_mib=peaks.get("step 2"))
    row |= memory.peak(device) | timing.clocks(device)
    if rank == 0:
        append_jsonl(config.results, row, fsync=True)
        put("\n".join([*stages.lines(), *final_lines(row)[:3]]))
    if code == 0:
        shutdown()
    return code


def table(config: Config) -> int:
    """Sweeps the rows of --table and prints them beside the published ones. 0: every row ended, if only with OOM."""
    check_writable(config.results)
    handed = [*SIZES, "device"] + ["world", "link"] * (config.world > 0)
    words = [word for name in handed for word in (flag(name), str(getattr(config, name)))]
    n = config.nproc or torch.cuda.device_count() or 1
    results = Path(config.results)
    [lines] = sweep.studies(str(SETTINGS / f"{config.table}.txt"), False, n, words).values()
    settings = {line: setting(parse(shlex.split(line)[1:])) for line in lines}
    how = dict(
        program=[__file__],
        results=results,
        output=[],
        timeout=config.timeout,
        budget=math.inf,
        fresh=config.fresh,
    )
    finished = sweep.sweep(
        {config.table: lines}, argparse.Namespace(**how, any_commit=False, report=False), settings
    )
    rows = sweep.read_rows(results)
    put(f"\n{beside_published(config.table, [rows[line] for line in lines])}")
    return 0 if finished else 1


def beside_published(name: str, rows: list[dict]) -> str:
    """Markdown: a line per row of the published table `name`, our figures and its."""
    with (Path(__file__).parent / "published" / f"{name}.csv").open() as file:
        published = [*csv.DictReader(file)]
    label, *keys = published[0]
    cpu = any("peak_rss_mib" in row for row in rows)
    columns = [(label, [theirs[label] for theirs in published])]
    columns += [(key, [str(row[key]) for row in rows]) for key in ("outcome", "world")]
    peaks = [
        "first_step_peak_mib",
        "second_step_peak_mib",
        "peak_rss_mib" if cpu else "peak_alloc_mib",
    ]
    for key in keys:
        for names in peaks if key == "peak_mib" else [key]:
            columns.append((names, [grouped(row.get(names), 1, missing="") for row in rows]))
        columns.append(("published", [theirs[key] for theirs in published]))
    figures = [
        f"{row['device']}, torch {row['torch']}, commit {row['commit'][:12]}"
        for row in rows
        if "init_mib" in row
    ]
    kind = "resident on a CPU, to compare with nothing published" if cpu else "allocated"
    return f"{name}, MiB {kind}; ours: {'; '.join(dict.fromkeys(figures))}\n\n{markdown(columns)}"


if __name__ == "__main__":
    if CONFIG.table:
        # sweep.run ends its processes on the way out.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(table(CONFIG) if CONFIG.table else main(CONFIG, *RANKS))
