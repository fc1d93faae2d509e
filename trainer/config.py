"""The flags of main.py: names, help, defaults by device, validation. Imports no torch, so --help is instant.

    config = parse(sys.argv[1:], world=4)      # exit 2 with one message for a bad command line
    config = resolve(config, "cpu", world=4)   # fills what depends on the device; ValueError for what does not fit

A flag left out is None until `resolve`. Groups are by consequence: what may change the loss, what must not, output.
"""

import io
import math
import re
import time
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stderr
from dataclasses import asdict, dataclass, fields, replace
from typing import Annotated, Literal

import tyro
from tyro.conf import OmitArgPrefixes, UseCounterAction, arg

from trainer.costs import link
from trainer.distributed.terminal import fail

# The reference setting on a GPU, a small one on a CPU.
DEFAULTS = {
    "cuda": dict(depth=4, width=4096, head_dim=128, vocab=32768, seqlen=4096, batch=8, steps=50, lr=3e-4,
                 param_dtype="bf16"),
    "cpu": dict(depth=4, width=128, head_dim=32, vocab=256, seqlen=192, batch=8, steps=40, lr=3e-3,
                param_dtype="fp32"),
}  # fmt: skip


def _by_device(name: str, metavar: str):
    gpu, cpu = DEFAULTS["cuda"][name], DEFAULTS["cpu"][name]
    both = f"(default: {gpu})" if gpu == cpu else f"(default: {gpu}, on a CPU {cpu})"
    return arg(metavar=metavar, help_behavior_hint=both)


@dataclass(frozen=True)
class Training:
    """May change the loss."""

    depth: Annotated[int | None, _by_device("depth", "INT")] = None
    """Number of blocks."""
    width: Annotated[int | None, _by_device("width", "INT")] = None
    """Width of the residual stream; a multiple of --head-dim."""
    head_dim: Annotated[int | None, _by_device("head_dim", "INT")] = None
    """Dimension of an attention head; even."""
    grouping: int = 4
    """Query heads per key/value head (1: multi-head); divides width / head-dim."""
    grow: int = 4
    """Width of the MLP, in units of --width."""
    vocab: Annotated[int | None, _by_device("vocab", "INT")] = None
    """Size of the vocabulary; at least 256 for byte data."""
    seqlen: Annotated[int | None, _by_device("seqlen", "INT")] = None
    """Tokens per sequence."""
    batch: Annotated[int | None, _by_device("batch", "INT")] = None
    """Sequences per rank and micro-batch. The global batch is ranks x batch x grad-accum."""
    grad_accum: int = 1
    """Micro-batches per step, accumulated in fp32."""
    data: str = "stdlib"
    """stdlib (bytes of Python's own sources), text:PATH (bytes of a file or a folder's files), bin:GLOB (token shards:
    raw uint16 or llm.c), random (fresh tokens each step), overfit (one batch for ever)."""
    steps: Annotated[int | None, _by_device("steps", "INT")] = None
    """Optimizer steps."""
    lr: Annotated[float | None, _by_device("lr", "FLOAT")] = None
    """Peak learning rate; cosine decay to a tenth of it at the last step."""
    warmup: int = 10
    """Steps of linear warm-up of the learning rate."""
    clip: float = 1.0
    """Largest global gradient norm; 0: no clipping."""
    nonfinite: Literal["stop", "skip"] = "stop"
    """A step whose loss or gradient norm is not finite changes nothing, on any rank. stop: the run then ends with exit
    code 5; the last checkpoint is good. skip: it goes on with the next batch. --optim in-backward can only stop."""
    max_skips: int = 3
    """Steps in a row that --nonfinite skip leaves out; one more ends the run. A resumed run counts anew."""
    norm_limit: float = 0.0
    """A step with a larger gradient norm, before clipping, counts as not finite; 0: none does."""
    spike: float = 10.0
    """Name each step whose gradient norm is more than this many times the mean of the last 100; 0: none."""
    seed: int = 0
    """Of the initial weights and of the order of the data."""
    init: str | None = None
    """Weights for step 0: a .safetensors, its .index.json or a .pt, such as python -m trainer.checkpoint.export writes.
    Moments are fresh. A checkpoint found in --save goes before."""
    param_dtype: Annotated[Literal["fp32", "bf16"] | None, _by_device("param_dtype", "{fp32,bf16}")] = None
    """Of gathered parameters, the all-gather and the computation. Masters are fp32."""
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """Of the gradient reduction."""
    adam_dtype: Literal["fp32", "bf16"] = "fp32"
    """Of Adam's two moments."""


@dataclass(frozen=True)
class System:
    """Must not change the loss."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA where this torch sees a GPU, else the CPU."""
    world: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: those of torchrun)")] = None
    """Simulate this many ranks in one process: it is rank 0, data moves, links take modelled time."""
    link: str = "h100-nvlink"
    """Link of the simulated ranks: a100-nvlink, h100-nvlink, ndr-ib, 4090-pcie, none (takes no time), or
    alpha_us:GB_per_s such as 20:370."""
    wrapper: Literal["simple", "fsdp2", "ddp", "none"] = "simple"
    """simple: simple_fsdp.data_parallel. To compare with: fsdp2 (torch's fully_shard, per block), ddp (torch's, bf16 by
    autocast), none (the bare model, on one rank only)."""
    mode: Literal["replicate", "fully_shard", "hybrid_shard"] = "fully_shard"
    """replicate: DDP. fully_shard: ZeRO-3. hybrid_shard: sharded inside, replicated across."""
    replicas: int = 2
    """hybrid_shard: number of replicas; divides the number of ranks."""
    reshard: bool = True
    """Free gathered weights after forward and gather them again in backward."""
    accum_sync: Literal["every", "last"] = "every"
    """every: gradients are reduced after each micro-batch of --grad-accum: least memory. last: weights are gathered
    once a step, gradients kept whole in fp32 and reduced once: least communication."""
    min_shard_mib: float = 0.0
    """Parameters smaller than this (MiB, as stored) stay replicated."""
    compile: Literal["none", "blocks", "model", "fwdbwd", "step"] = "fwdbwd"
    """none: eager. blocks: one compiled block, reused; no prefetch across blocks. model: the model, loss eager. fwdbwd:
    forward and loss, their backward, and (on a GPU) the optimizer as a graph each: recommended. step: the whole
    training step as one graph; needs torch 2.13 and --grad-accum 1."""
    compile_options: tuple[str, ...] = ()
    """Inductor options for the model's graphs, each NAME=VALUE, such as max_autotune=True, on top of those of
    overlap.py (collectives bucketed per block and started early); with the word plain, instead of them."""
    cuda_graph: bool = False
    """Replay the whole step as one CUDA graph, without Python in between; captured at the third step."""
    deterministic: bool = False
    """The same bits whenever the same command runs or resumes. Without it compiled code on several CPU threads or a
    GPU adds up the embedding's gradient, and a GPU's attention its own, in an order that differs."""
    attn: Literal["sdpa", "flex"] = "sdpa"
    """Attention backend: torch's scaled_dot_product_attention, or compiled FlexAttention (training needs CUDA)."""
    sdpa: Literal["auto", "cudnn", "flash", "efficient", "math"] = "auto"
    """Kernel of --attn sdpa: that one or an error. auto: cuDNN on Hopper and newer GPUs, else FlashAttention; where
    they cannot run (fp32), efficient, then math; on a CPU what torch takes. efficient repeats K and V for each query
    head; math stores the T x T scores, and --remat recomputes them."""
    flex_options: str | None = None
    """File of searched kernel options for --attn flex: python -m benchmarks.attention --search writes it."""
    remat: Literal["none", "mlp", "attn", "both", "block", "pointwise"] = "none"
    """Recomputed in backward: the MLP, the attention branch, both apart, whole blocks (each keeps the attention
    output), or everything but products and attention."""
    remat_ratio: float = 1.0
    """Fraction of the blocks that --remat applies to, evenly spread (0.5 of 8: 4)."""
    remat_norm: bool = True
    """The norm before a recomputed branch is recomputed with it; --no-remat-norm keeps its output, as the published
    run did."""
    remat_core: bool = False
    """Recompute attention too, instead of keeping its output: less memory, more time."""
    mlp: Literal["plain", "lean"] = "plain"
    """lean: norm and MLP as one op that keeps its input alone, recomputes the rest, and whose backward holds two
    tensors of the MLP's hidden width at a time where others hold three."""
    mlp_chunk: int = 0
    """Tokens at a time of --mlp lean; 0: all. Several chunks sum their gradients in fp32."""
    optim: Literal["after", "in-backward"] = "after"
    """in-backward: each parameter is updated and its gradient freed as soon as backward has made it; needs --clip 0,
    --grad-accum 1 and --compile none or blocks (a whole graph's gradients come together)."""
    loss: Literal["full", "chunked"] = "full"
    """chunked: head and cross-entropy in chunks of tokens; the logits never exist as a whole."""
    chunk: int = 2048
    """Tokens per chunk of --loss chunked."""


@dataclass(frozen=True)
class Output:
    """Where results go."""

    results: str = "runs/results.jsonl"
    """JSONL file: one row is appended per run; its steps go to a file of their own beside it."""
    log_every: int = 10
    """Steps between logged lines."""
    save: str | None = None
    """Directory for checkpoints, one of its own for each run; the last step is always saved."""
    save_every: int = 0
    """Steps between checkpoints; 0: only after the last step."""
    save_async: bool = False
    """Only copy the state to host memory, in one buffer of its size; a thread writes it while training goes on."""
    save_errors: Literal["stop", "warn"] = "stop"
    """stop: a save that fails ends the run. warn: it costs a line, and the next save is tried; the last one must do."""
    keep: int = 3
    """Checkpoints that stay, the newest ones."""
    resume: Annotated[str, arg(metavar="{auto,never}|PATH")] = "auto"
    """auto: from the newest good checkpoint in --save, if there is one. never: start fresh. PATH: from that step's
    directory, or the newest in a directory of steps. --steps is the total; data, seed and global batch stay."""
    timeout: float = 600.0
    """Seconds after which a step or a save that does not end ends the run with exit code 7, the stacks of all ranks
    beside --results; 0: never."""
    first_timeout: float = 3600.0
    """The same up to the end of the first step, which compiles."""
    cast: bool = False
    """Resume also from a checkpoint of another --adam-dtype, whose moments are then converted; --init likewise."""
    wandb: Literal["off", "offline", "online"] = "off"
    """Weights & Biases; never fatal, the JSONL is the record."""
    group: str | None = None
    """W&B group of the run."""
    tags: tuple[str, ...] = ()
    """W&B tags of the run."""
    profile: str | None = None
    """Folder for traces (and on CUDA a memory snapshot) of three steps after warm-up, which enter no statistic."""
    explain_memory: bool = False
    """Print what the peaks of memory consist of, from one step after warm-up, which enters no statistic."""
    verbose: Annotated[UseCounterAction[int], arg(aliases=["-v"], help_behavior_hint="(default: 0, repeatable)")] = 0
    """-v: memory after each stage of start-up, every parameter's placement. -vv: also norms of every parameter and
    gradient at each logged step (slow)."""
    debug: bool = False
    """Tracebacks instead of one-line errors."""


@dataclass(frozen=True)
class Config:
    training: OmitArgPrefixes[Training]
    system: OmitArgPrefixes[System]
    output: OmitArgPrefixes[Output]

    def __getattr__(self, name: str):
        for group in ("training", "system", "output"):
            if name in (f.name for f in fields(type(self.__dict__[group]))):
                return getattr(self.__dict__[group], name)
        raise AttributeError(name)

    def flat(self) -> dict:
        return {k: v for group in asdict(self).values() for k, v in group.items()}

    def __post_init__(self):
        for names, fits, allowed in _RANGES:
            for name in names.split():
                value = getattr(self, name)
                if value is not None and not fits(value):
                    raise ValueError(f"{flag(name)} {value}: must be {allowed}")
        for name, value in self.flat().items():
            if isinstance(value, int | float) and value >= 2**31 and name not in ("lr", "clip", "seed"):
                raise ValueError(f"{flag(name)} {value}: must be below 2**31")
        link(self.link)
        for option in self.compile_options:
            if "=" not in option and option != "plain":
                raise ValueError(f"--compile-options {option}: must be NAME=VALUE or plain")


_RANGES = [
    ("depth width head_dim grouping grow vocab seqlen batch grad_accum steps world replicas chunk log_every keep "
     "max_skips", lambda v: v >= 1, "at least 1"),
    ("lr", lambda v: 0 < v < 1e38, "a positive number below 1e38"),
    ("warmup mlp_chunk save_every", lambda v: v >= 0, "0 or more"),
    ("seed", lambda v: 0 <= v < 2**64, "0 or more and below 2**64"),
    ("clip min_shard_mib norm_limit spike timeout first_timeout",
     lambda v: 0 <= v < math.inf, "0 or a positive number"),
    ("init", lambda v: v.endswith((".safetensors", ".safetensors.index.json", ".pt")), "a .safetensors or a .pt"),
    ("remat_ratio", lambda v: 0 <= v <= 1, "between 0 and 1"),
]  # fmt: skip


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _check_fit(c: Config, device: str, world: int) -> str | None:
    """What is wrong with resolved values together, or None."""
    heads = c.width // c.head_dim
    for name in ("save_every", "keep", "save_async", "save_errors") if c.save is None else ():
        value = getattr(c, name)
        if value != getattr(Output, name):
            return f"{flag(name)}{'' if value is True else f' {value}'}: needs --save DIR"
    if c.world and (c.save is not None or c.init is not None or c.resume not in ("auto", "never")):
        return f"--world {c.world}: simulated ranks hold no model worth saving; leave out --save, --resume and --init"
    if c.init is not None and c.resume not in ("auto", "never"):
        return f"--init {c.init}: --resume {c.resume} has weights of its own; leave one of them out"
    if c.world and world not in (1, c.world):
        return f"--world {c.world}: simulates ranks in one process, here are {world}; start it without torchrun"
    world = c.world or world
    if c.width % c.head_dim:
        return f"--width {c.width}: must be a multiple of --head-dim {c.head_dim}"
    if c.head_dim % 2:
        return f"--head-dim {c.head_dim}: must be even"
    if heads % c.grouping:
        return f"--grouping {c.grouping}: must divide the {heads} heads (--width {c.width} / --head-dim {c.head_dim})"
    if c.data.split(":")[0] in ("stdlib", "text", "overfit") and c.vocab < 256:
        return f"--vocab {c.vocab}: must be at least 256 for the bytes of --data {c.data}"
    if c.mode == "hybrid_shard" and world % c.replicas:
        return f"--replicas {c.replicas}: must divide the {world} rank{'s' * (world > 1)} of --mode hybrid_shard"
    if c.wrapper == "none" and world > 1:
        return f"--wrapper none: works on one rank, this is {world}; use --wrapper simple"
    if c.wrapper == "none" and c.param_dtype != "fp32":
        return f"--wrapper none: computes in the stored fp32; add --param-dtype fp32 (now {c.param_dtype})"
    if c.wrapper in ("fsdp2", "ddp"):
        if c.compile not in ("none", "blocks"):
            return f"--wrapper {c.wrapper}: is compiled per block, not by --compile {c.compile}; use blocks or none"
        if c.mode not in dict(fsdp2=("fully_shard", "hybrid_shard"), ddp=("replicate",))[c.wrapper]:
            return f"--wrapper {c.wrapper}: does not do --mode {c.mode}; leave --mode out, or use --wrapper simple"
        if c.min_shard_mib:
            return f"--wrapper {c.wrapper}: has no --min-shard-mib (now {c.min_shard_mib}); leave it out"
    if c.wrapper == "ddp" and c.reduce_dtype == "bf16" and device == "cpu":
        return "--wrapper ddp: --reduce-dtype bf16 needs CUDA (a hook of DDP's); use --reduce-dtype fp32"
    if c.mlp == "lean" and c.remat == "pointwise":
        return "--mlp lean: recomputes the products that --remat pointwise keeps; use one of the two"
    if c.mlp == "lean" and c.wrapper == "ddp" and c.param_dtype == "bf16":
        return "--mlp lean: is not cast by the autocast of --wrapper ddp; use --param-dtype fp32 or --wrapper fsdp2"
    if c.mlp_chunk and c.mlp != "lean":
        return f"--mlp-chunk {c.mlp_chunk}: is for --mlp lean, this is --mlp {c.mlp}"
    if c.remat_core and c.remat not in ("attn", "both", "block"):
        return f"--remat-core: changes nothing of --remat {c.remat}; use it with attn, both or block"
    if not c.remat_norm and c.remat not in ("attn", "mlp", "both"):
        return f"--no-remat-norm: changes nothing of --remat {c.remat}; use it with attn, mlp or both"
    if c.remat_core and device == "cpu" and c.compile != "none" and c.wrapper != "none":
        return f"--remat-core: on a CPU torch cannot compile it over shards (--compile {c.compile}); use --compile none"
    if c.nonfinite == "stop" and c.max_skips != 3:
        return f"--max-skips {c.max_skips}: needs --nonfinite skip"
    if c.optim == "in-backward":
        if c.nonfinite == "skip" or c.norm_limit:
            needs = f"--norm-limit {c.norm_limit}" if c.norm_limit else "--nonfinite skip"
            return f"{needs}: --optim in-backward has updated before the gradient norm is known; use --optim after"
        if c.clip:
            return f"--optim in-backward: --clip {c.clip} needs every gradient before the first update; add --clip 0"
        if c.grad_accum > 1:
            return f"--optim in-backward: would update in each of --grad-accum {c.grad_accum} micro-batches; use 1"
        if c.compile not in ("none", "blocks"):
            return f"--optim in-backward: --compile {c.compile} makes all gradients at once; use --compile blocks"
        if c.wrapper not in ("simple", "none"):
            return f"--optim in-backward: is not for --wrapper {c.wrapper}; use --wrapper simple"
        if c.verbose > 1:
            return "-vv: --optim in-backward keeps no gradients to take norms of; use --optim after"
    if c.cuda_graph:
        if device == "cpu":
            return "--cuda-graph: needs CUDA; leave it out on a CPU"
        if c.wrapper not in ("simple", "none"):
            return f"--cuda-graph: does not capture the hooks of --wrapper {c.wrapper}; use --wrapper simple"
        if c.world:
            return f"--cuda-graph: the links of --world {c.world} are timed by the host; leave one of them out"
        if c.optim == "in-backward" or c.verbose > 1 or c.explain_memory:
            other = "--explain-memory" if c.explain_memory else "-vv" if c.verbose > 1 else "--optim in-backward"
            return f"--cuda-graph: a replayed step has no moment for {other}; leave one of them out"
    if c.attn == "flex" and device == "cpu":
        return "--attn flex: FlexAttention needs CUDA to train; use --attn sdpa on a CPU"
    if c.attn == "flex" and c.sdpa != "auto":
        return f"--sdpa {c.sdpa}: is a kernel of --attn sdpa; leave it out with --attn flex"
    if c.attn == "sdpa" and c.flex_options is not None:
        return f"--flex-options {c.flex_options}: needs --attn flex"
    if c.sdpa in ("cudnn", "efficient") and device == "cpu":
        return f"--sdpa {c.sdpa}: needs CUDA; use auto, flash or math on a CPU"
    if c.compile == "step" and c.grad_accum > 1:
        return f"--compile step: one graph holds one micro-batch, --grad-accum is {c.grad_accum}; use --compile fwdbwd"
    if c.compile == "step" and c.accum_sync == "last":
        return "--accum-sync last: --compile step reduces inside its one graph; use --compile fwdbwd"
    if c.explain_memory and c.profile is not None:
        return "--explain-memory: not together with --profile, each of which needs torch's profiler; use one per run"
    if c.compile == "step" and c.verbose > 1:
        return "-vv: --compile step has no gradients outside its graph; use --compile fwdbwd"
    return None


def filled(c: Config, device: str) -> Config:
    """`c` with the defaults of `device` where no flag gives a value; whether the values fit is not checked."""
    unset = {name: default for name, default in DEFAULTS[device].items() if getattr(c.training, name) is None}
    mode = "replicate" if c.wrapper == "ddp" and c.mode == "fully_shard" else c.mode  # what DDP is
    return replace(c, training=replace(c.training, **unset), system=replace(c.system, device=device, mode=mode))


def resolve(c: Config, device: str, world: int) -> Config:
    """Fills the defaults of `device` ("cpu" or "cuda"). Raises ValueError, one line, where values do not fit."""
    c = filled(c, device)
    if problem := _check_fit(c, device, world):
        raise ValueError(problem)
    return c


def world_label(c: Config, world: int) -> int | str:
    """The number of ranks; of simulated ones "8(sim h100-nvlink)"."""
    return f"{c.world}(sim {c.link})" if c.world else world


def setting(c: Config) -> dict:
    """The whole setting of a run, for its row and for W&B: every resolved flag, apart from those that only say where
    results go and how long to wait. Of a path that is not below the working directory only the last part is kept, so
    that no folder of this machine gets into a row."""
    skip = {"results", "verbose", "debug", "log_every", "save", "resume", "timeout", "first_timeout"}
    found = {name: value for name, value in c.flat().items() if name not in skip}
    for name in ("data", "init", "flex_options", "profile"):
        if found[name] is not None:
            found[name] = re.sub(r"^(text:|bin:)?(?:/|~|\.\.).*?([^/]*)/*$", r"\1\2", found[name])
    return found


def compile_options(c: Config) -> dict | None:
    """--compile-options as a dict, values read as Python literals where they are one."""
    import ast

    options = {}
    for option in c.compile_options:
        name, _, value = option.partition("=")
        value = value or "True"
        try:
            options[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[name] = value
    return options or None


def parse(argv: Sequence[str], rank: int = 0, world: int | None = None) -> Config:
    """Exit code 2 and one message, on rank 0, for an unknown flag or a bad value, and, if `world` is told, for values
    that do not fit together whatever the device."""
    try:
        with nullcontext() if rank == 0 else redirect_stderr(io.StringIO()):  # console_outputs does not silence all
            about = dict(prog="main.py", description=_DESCRIPTION, console_outputs=rank == 0)
            c = tyro.cli(Config, args=list(argv), **about)
    except SystemExit:
        if rank:
            time.sleep(5)  # torchrun would end rank 0 before it has spoken
        raise
    problems = {_check_fit(filled(c, d), d, world) for d in (DEFAULTS if c.device == "auto" else [c.device]) if world}
    if len(problems) == 1 and (problem := problems.pop()):  # else torch must be asked for the device
        fail(problem, rank)
    return c


_DESCRIPTION = """Trains the transformer of model.py under simple_fsdp and appends a row of results.
One rank: python main.py. Several: torchrun --nproc-per-node 4 main.py --depth 8 --compile fwdbwd"""
