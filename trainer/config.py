"""The flags of main.py: names, help texts, defaults by device, and which values do not fit together.

    config = parse(sys.argv[1:], world=4)      # exit code 2 and one message for a bad command line
    config = resolve(config, "cpu", world=4)   # fills in the defaults of the device; ValueError for what does not fit
    config.depth                               # short for config.training.depth

A field's docstring is its help text, _RANGES limits its values, `_..._misfits` tell what does not fit. Needs no torch.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_type_hints

from tyro.conf import OmitArgPrefixes, UseCounterAction, arg

from trainer.collective_time import link, measured
from trainer.step_costs import may_have_gpu
from trainer.terminal import command_line
from trainer.terminal.command_line import as_given, default, without_user
from trainer.terminal.output import fail

_DESCRIPTION = """Trains the transformer of model.py with simple_fsdp.py and appends one row of results to a file.

    python main.py                                                      # one rank, a small model on a CPU
    torchrun --nproc-per-node 8 main.py --depth 8 --compile fwdbwd      # eight GPUs
    torchrun --nproc-per-node 8 main.py --data bin:tokens/*.bin --batch 4 --effective-batch 256 --steps 5000 \\
        --remat block --loss chunked --save runs/a --save-every 500

The flags that most runs give:
    --depth --width --seqlen        size of the model, tokens per sequence
    --batch --effective-batch       sequences per rank and micro-batch, and per optimizer step on all ranks
    --data --steps --lr             what to train on, number of steps, learning rate
    --remat                         less memory: backward recomputes activations
    --save                          folder for checkpoints, from which the same command resumes
"""
MICRO_BATCH = arg(aliases=["--micro-batch"])  # another name of --batch
KERNELS = "auto", "cudnn", "flash", "efficient", "math"  # of torch's scaled_dot_product_attention
DEFAULTS = dict(  # the reference setting on a GPU, a small one on a CPU
    cuda=dict(depth=4, width=4096, head_dim=128, vocab=32768, seqlen=4096, batch=8, steps=50, lr=3e-4,
              param_dtype="bf16"),
    cpu=dict(depth=4, width=128, head_dim=32, vocab=256, seqlen=192, batch=8, steps=40, lr=3e-3, param_dtype="fp32"),
)  # fmt: skip


def _by_device(name: str, metavar: str):
    gpu = DEFAULTS["cuda"][name]
    cpu = DEFAULTS["cpu"][name]
    return default(f"{gpu}" if gpu == cpu else f"{gpu}, on a CPU {cpu}", metavar)


@dataclass(frozen=True)
class Shape:
    """Of the reference transformer."""

    block: Literal["gelu", "llama"] = "gelu"
    """gelu: LayerNorm, sinusoidal positions, a GELU MLP, biases. llama: RMSNorm, rotary positions, SwiGLU, no
    biases."""
    depth: Annotated[int | None, _by_device("depth", "INT")] = None
    """Number of transformer blocks."""
    width: Annotated[int | None, _by_device("width", "INT")] = None
    """Width of the residual stream. Must be a multiple of --head-dim."""
    head_dim: Annotated[int | None, _by_device("head_dim", "INT")] = None
    """Dimension of one attention head. Must be even."""
    grouping: int = 4
    """Query heads per key/value head (1: multi-head attention). Must divide the number of heads, --width /
    --head-dim."""
    grow: int = 4
    """Hidden width of the MLP as a multiple of --width. --block llama has three matrices of this width, gelu two."""
    vocab: Annotated[int | None, _by_device("vocab", "INT")] = None
    """Size of the vocabulary. --data stdlib, text and overfit are bytes and need at least 256."""


@dataclass(frozen=True)
class Optimization:
    """What any model is trained with."""

    seqlen: Annotated[int | None, _by_device("seqlen", "INT")] = None
    """Tokens per sequence."""
    batch: Annotated[int | None, _by_device("batch", "INT"), MICRO_BATCH] = None
    """Sequences of one micro-batch on one rank."""
    grad_accum: Annotated[int | None, default("1, or as --effective-batch needs")] = None
    """Micro-batches per optimizer step. Their gradients are accumulated in fp32."""
    effective_batch: Annotated[int | None, default("ranks x batch x grad-accum")] = None
    """Sequences of one optimizer step on all ranks together: ranks x --batch x --grad-accum."""
    data: str = "stdlib"
    """stdlib: the bytes of Python's own library. text:PATH: the bytes of a file, or of all files in a folder. bin:GLOB:
    files of token ids, raw uint16 or in llm.c's format. random: new random tokens in each step. overfit: the same batch
    in each step."""
    eval_every: int = 0
    """Steps between evaluations; one more follows the last step. The last 1/64 of --data, at least one sequence, is
    then held out for them. Evaluation runs eagerly and does not count in step times. 0: no evaluation, train on all
    data. A resumed run must use the same held-out data, so it cannot switch evaluation on or off."""
    eval_batches: int = 8
    """Batches of an evaluation, the same ones each time. If fewer are held out, all of them."""
    steps: Annotated[int | None, _by_device("steps", "INT")] = None
    """Optimizer steps. 0: only evaluate the weights of --init or --resume; needs --eval-every."""
    lr: Annotated[float | None, _by_device("lr", "FLOAT")] = None
    """Peak learning rate. After --warmup it follows --schedule."""
    warmup: int = 10
    """Steps in which the learning rate rises linearly to --lr."""
    warmup_ratio: float = 0.0
    """Warm-up as a fraction of --steps, rounded up. Replaces --warmup."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """Learning rate after warm-up. cosine: decays along a cosine to a tenth of --lr at the last step. wsd (warm-up,
    stable, decay): constant, then decays linearly to a tenth in the last fifth of the steps. constant: no decay."""
    weight_decay: float = 0.1
    """Weight decay of matrices. Norms and biases do not decay."""
    clip: float = 1.0
    """Largest global gradient norm; larger gradients are scaled down to it. 0: no clipping."""
    nonfinite: Literal["stop", "skip"] = "stop"
    """What to do if a step's loss or gradient norm is not finite; such a step never changes the weights. stop: end the
    run with exit code 5; the last checkpoint is good. skip: continue with the next batch, but end the run at the fourth
    such step in a row (a resumed run counts from 0)."""
    norm_limit: float = 0.0
    """Treat a gradient norm above this, before clipping, as not finite. 0: no limit."""
    norm_spike: float = 10.0
    """Print a line if the gradient norm exceeds this many times the mean of the last 100. 0: never."""
    seed: int = 0
    """Seed of the initial weights and of the order of the data."""
    init: str | None = None
    """File of initial weights (.safetensors, its .index.json, or .pt), as `python -m trainer.checkpoint.export` writes
    it. Adam's moments start at zero. If --save already contains a checkpoint, the run resumes from that instead."""
    param_dtype: Annotated[Literal["fp32", "bf16"] | None, _by_device("param_dtype", "{fp32,bf16}")] = None
    """Dtype of the all-gather and of the computation. Parameters are stored in fp32."""
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype in which gradients are averaged over ranks."""
    adam_dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype of Adam's two moments, and of Muon's momentum."""
    adam_beta1: float = 0.9
    """Decay of Adam's mean of gradients."""
    adam_beta2: float = 0.95
    """Decay of Adam's mean of squared gradients."""
    optimizer: Literal["adamw", "adamw8bit", "muon"] = "adamw"
    """adamw8bit: torchao's AdamW with both moments in 8 bits. muon: Muon (muon.py) for the matrices in blocks, AdamW
    for embedding, head and vectors."""
    muon_lr: Annotated[float | None, default("that of --lr", "FLOAT")] = None
    """Peak learning rate of Muon. It follows the same --schedule as --lr."""
    muon_adjust_lr: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """Factor of --muon-lr for a matrix [m, n]. match_rms_adamw: 0.2 sqrt(max(m, n)), so updates are about as large as
    AdamW's. original: sqrt(max(1, m / n))."""
    muon_dtype: Literal["fp32", "bf16"] = "bf16"
    """Dtype in which Muon's Newton-Schulz iteration is computed and sent."""


@dataclass(frozen=True)
class Training(Optimization, Shape):
    """May change the loss."""


@dataclass(frozen=True)
class System:
    """Must not change the loss by more than rounding. Exceptions: the loss under --world means nothing, because all
    simulated ranks hold equal shards; and --device selects the defaults above that differ on a CPU."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA if torch sees a GPU, otherwise the CPU."""
    world: Annotated[int | None, default("simulate none")] = None
    """Simulate this many ranks in one process, to measure step time and memory. Only rank 0 runs; each collective
    copies its data locally and is delayed as on --link. The other ranks are assumed to hold the same shards as rank
    0."""
    link: str = "h100-nvlink"
    """Network that --world simulates: a100-nvlink, h100-nvlink, ndr-ib, 4090-pcie, none (no delay), us:GB/s (latency
    and bandwidth), or measured:FILE with a file that lab.studies.collectives writes."""
    wrapper: Literal["simple", "fsdp2", "ddp", "none"] = "simple"
    """simple: data_parallel of simple_fsdp.py. For comparison: fsdp2 (torch's fully_shard on each block), ddp (torch's
    DistributedDataParallel, with autocast for bf16), none (the model without a wrapper, on one rank only)."""
    mode: Literal["replicate", "fully_shard", "hybrid_shard"] = "fully_shard"
    """replicate: each rank holds the whole model (DDP). fully_shard: each rank holds a shard of every parameter
    (ZeRO-3). hybrid_shard: ranks form --replicas groups; the model is sharded within a group and replicated across
    groups."""
    replicas: int = 2
    """Number of groups of --mode hybrid_shard. Must divide the number of ranks."""
    reshard: bool = True
    """Free gathered weights after forward and gather them again in backward: less memory, more communication."""
    keep_last: bool = False
    """Keep the last block gathered through the loss: one all-gather less, one block's weights more in memory."""
    accum_sync: Literal["every", "shards", "last"] = "every"
    """When --grad-accum reduces gradients. every: after each micro-batch; least memory. shards (--mode hybrid_shard):
    within a group after each micro-batch, across groups once per step. last: once per step; weights are gathered once
    and unsharded gradients are kept in fp32; least communication."""
    min_shard_mib: float = 0.0
    """Parameters smaller than this, in MiB of their stored dtype, are replicated instead of sharded."""
    compile: Literal["none", "blocks", "model", "fwdbwd", "step"] = "fwdbwd"
    """fwdbwd: one graph for forward and loss, one for backward, and on a GPU one for the optimizer; recommended.
    blocks: one compiled block that all blocks share, and the loss; compile time does not grow with depth, so
    recommended for deep models. none: eager. model: the model as one graph, the loss eager. step: the whole training
    step as one graph; needs torch 2.13 and --grad-accum 1."""
    compile_options: tuple[str, ...] = ()
    """Inductor options for the model's graphs, each NAME=VALUE, such as max_autotune=True. They are added to those of
    overlap.py, which start collectives early and wait for them late. The word plain leaves those of overlap.py out."""
    ahead: float = 1.0
    """How many blocks of computation a collective may overlap with. 1: the next block's weights are gathered while this
    block computes, and gradients are reduced during the next block. Below 1: less memory, for a faster network. 2, 3
    ..: for slow networks; each costs one more block's weights and gradients. No effect on --compile none and blocks."""
    cuda_graph: bool = False
    """Capture the whole step as one CUDA graph at the third step and replay it, which removes Python's overhead."""
    deterministic: bool = False
    """Bit-identical results whenever the same command runs or resumes. Without it some sums vary in order: the gradient
    of the embedding (compiled, on several CPU threads or a GPU) and of attention (on a GPU)."""
    attn: Literal[*KERNELS, "flex"] = "auto"
    """Attention kernel; one that cannot run is an error. auto: cuDNN on Hopper and newer GPUs, otherwise
    FlashAttention; where neither can run (in fp32) efficient, then math; on a CPU what torch picks. efficient repeats K
    and V for each query head. math stores the scores [seqlen, seqlen] of each head, and recomputes them with --remat.
    flex: compiled FlexAttention, which needs CUDA to train; with --compile-options max_autotune=True torch tunes its
    block sizes, and those of matrix products."""
    remat: Literal["none", "mlp", "attn", "both", "block", "pointwise"] = "none"
    """Activation checkpointing: what backward recomputes instead of saving it. mlp: the MLP. attn: the attention branch
    except attention's output, which is saved. both: mlp and attn. block: whole blocks except attention's output.
    pointwise: everything except matrix products."""
    remat_ratio: float = 1.0
    """Fraction of the blocks that --remat applies to, evenly spread."""
    remat_core: bool = False
    """With --remat attn, both or block: recompute attention itself, too. Less memory, more time."""
    remat_norm: bool = True
    """With --remat mlp, attn or both: recompute the norm before the branch, too. --no-remat-norm saves its output, as
    the published figures do."""
    mlp: Literal["plain", "lean"] = "plain"
    """plain: norm, two matrix products and an activation. lean: all of these as one operation that saves only its input
    and recomputes the rest. Its backward holds two tensors of the MLP's hidden width at a time, plain three."""
    mlp_chunk: int = 0
    """Tokens that --mlp lean computes at a time. Gradients of several chunks are summed in fp32. 0: all tokens."""
    loss: Literal["full", "chunked"] = "full"
    """full: all logits at once. chunked: head and cross-entropy on one chunk of tokens at a time, so that the logits of
    all tokens never exist together."""
    loss_chunk: int = 2048
    """Tokens per chunk of --loss chunked."""


Tracker = Literal["wandb", "trackio", "tensorboard"]
WandbMode = Literal["online", "offline"]


@dataclass(frozen=True)
class Output:
    """Where results go, what is saved and printed, and when a run gives up."""

    results: str = "runs/results.jsonl"
    """JSONL file to which each run appends one row. Its logged steps go to a separate file in FILE.steps/."""
    log_every: int = 10
    """Steps between printed lines."""
    save: str | None = None
    """Folder for checkpoints, a separate one for each run. The last step is always saved. The same command resumes."""
    save_every: int = 0
    """Steps between checkpoints. 0: save only the last step."""
    save_async: bool = False
    """Write checkpoints in the background. Training stops only while the state is copied to host memory."""
    save_errors: Literal["stop", "warn"] = "stop"
    """What to do if saving fails. stop: end the run with exit code 4. warn: print a line and continue; if the last step
    cannot be saved the run still fails."""
    keep: int = 3
    """Number of checkpoints to keep. Older ones are deleted."""
    keep_best: bool = False
    """Also save after each evaluation with the lowest loss so far, and keep that checkpoint until a better one."""
    resume: Annotated[str, arg(metavar="{auto,never}|PATH")] = "auto"
    """auto: resume from the newest intact checkpoint in --save, if any. never: start from scratch. PATH: resume from a
    step's folder, or from the newest step in a folder. --steps counts both runs; --data, --seed and --effective-batch
    must not change."""
    timeout: float = 600.0
    """Seconds that a step or a save may take. After that the run ends with exit code 7 and writes all stacks beside
    --results. 0: no limit."""
    timeout_first: float = 3600.0
    """The same limit for everything up to the end of the first step, which compiles. 0: no limit."""
    cast: bool = False
    """Allow --resume from a checkpoint of another --adam-dtype, and --init from weights of another dtype, and convert
    them."""
    tracker: Annotated[tuple[Tracker, ...], arg(metavar="{wandb,trackio,tensorboard} ...")] = ()
    """Also log to Weights & Biases, trackio (local, no account) or TensorBoard. If a tracker fails, the run continues
    and --results is complete."""
    tracker_group: str | None = None
    """Group name of the run in its trackers."""
    wandb_mode: Annotated[WandbMode | None, default("$WANDB_MODE, else online", "{online,offline}")] = None
    """offline: write to disk; `wandb sync` sends it later."""
    wandb_tags: Annotated[tuple[str, ...], arg(metavar="TAG ...")] = ()
    """Tags of the run in Weights & Biases."""
    profile: str | None = None
    """Folder for profiler traces (on CUDA also a memory snapshot) of three steps after warm-up. These steps do not
    count in step times."""
    explain_memory: bool = False
    """Print the tensors that make up the memory peaks of one step after warm-up. On CUDA also write a memory snapshot
    beside the steps."""
    sample: int = 0
    """Generate and print this many tokens (bytes for text) after each evaluation and after the last step."""
    config: str | None = None
    """Start from the flags of an earlier run: its .settings.json in FILE.steps/, or a results file, whose last run is
    taken. Flags of the command line override them. --results, --save, --resume and time limits are not included."""
    verbose: Annotated[UseCounterAction[int], arg(aliases=["-v"], help_behavior_hint="(default: 0, repeatable)")] = 0
    """-v: also print memory by stage and the placement of each parameter. -vv: also every norm at logged steps
    (slow)."""
    force: bool = False
    """Start even if the estimated memory exceeds the machine's. The estimate is made on a CPU only."""
    debug: bool = False
    """Print tracebacks instead of one-line errors."""


@dataclass(frozen=True)
class Config:
    """All flags. Frozen. `parse` checks them one by one, `resolve` together."""

    PROGRAM: ClassVar = "main.py"
    DEFAULTS: ClassVar = DEFAULTS  # by device, for what no flag sets
    training: OmitArgPrefixes[Training]
    system: OmitArgPrefixes[System]
    output: OmitArgPrefixes[Output]

    def flat(self) -> dict:
        """Every flag and its value."""
        return {k: v for group in asdict(self).values() for k, v in group.items()}

    def __post_init__(self):
        vars(self).update(self.flat())  # config.depth is config.training.depth; no field has the name of another

    @property
    def warmup_steps(self) -> int:
        """Of --warmup, or of --warmup-ratio once --steps are known."""
        return math.ceil(self.warmup_ratio * self.steps) if self.warmup_ratio else self.warmup

    def with_batch_sizes_for(self, ranks: int) -> "Config":
        """With --grad-accum and --effective-batch, each as the other one and so many ranks need it."""
        t = self.training
        rows = ranks * self.batch
        accum = t.grad_accum or max(1, (t.effective_batch or rows) // rows)
        return replace(self, training=replace(t, grad_accum=accum, effective_batch=t.effective_batch or rows * accum))

    def misfits(self, started: int) -> list[tuple]:
        """Of resolved values on so many processes: rows (flag, whether it does not fit, or {other flag: whether it does
        not fit that}, what is wrong and the fix)."""
        return [*_shape_misfits(self), *run_misfits(self, started, self.world or started), *step_misfits(self)]


ONLY_WITH = {  # a flag that means something only with some values of another flag -> that flag, and these values
    "replicas": ("mode", ("hybrid_shard",)),
    "remat_ratio": ("remat", ("mlp", "attn", "both", "block", "pointwise")),
    "remat_core": ("remat", ("attn", "both", "block")),
    "remat_norm": ("remat", ("mlp", "attn", "both")),
    "mlp_chunk": ("mlp", ("lean",)),
    "loss_chunk": ("loss", ("chunked", "auto")),
    "muon_lr": ("optimizer", ("muon",)),
    "muon_adjust_lr": ("optimizer", ("muon",)),
    "muon_dtype": ("optimizer", ("muon",)),
    "tracker_group": ("tracker", ("wandb", "trackio", "tensorboard")),
    "wandb_mode": ("tracker", ("wandb",)),
    "wandb_tags": ("tracker", ("wandb",)),
}


def _any_in(value: Any, fits: tuple) -> bool:
    """Whether a flag's value, or one of its values, is among those that fit."""
    return any(each in fits for each in value) if isinstance(value, tuple | list) else value in fits


def used(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values of fields, with None for each that means nothing beside the others."""
    idle = {name for name, (other, fits) in ONLY_WITH.items() if not _any_in(values.get(other), fits)}
    return {name: None if name in idle else value for name, value in values.items()}


_RANGES = [
    ("depth width head_dim grouping grow vocab seqlen batch grad_accum world replicas loss_chunk log_every keep "
     "eval_batches effective_batch", lambda v: v >= 1, "at least 1"),
    ("lr muon_lr epochs max_shard_gb lora_alpha", lambda v: 0 < v < 1e38, "a positive number below 1e38"),
    ("steps warmup mlp_chunk save_every eval_every sample lora", lambda v: v >= 0, "0 or more"),
    ("seed", lambda v: 0 <= v < 2**64, "0 or more and below 2**64"),
    ("clip weight_decay min_shard_mib norm_limit norm_spike timeout timeout_first",
     lambda v: 0 <= v < math.inf, "0 or a positive number"),
    ("init", lambda v: v.endswith((".safetensors", ".safetensors.index.json", ".pt")),
     "a file that ends with .safetensors, .safetensors.index.json or .pt"),
    ("results save profile prepared export eval_data adapter", lambda v: v[:1] not in ("", "~"),
     "a path; write $HOME for ~, which the shell expands only where a word begins"),
    ("adam_beta1 adam_beta2 label_smoothing", lambda v: 0 <= v < 1, "0 or more and below 1"),
    ("remat_ratio warmup_ratio", lambda v: 0 <= v <= 1, "between 0 and 1"),
    ("ahead", lambda v: 0 <= v <= 1 or v % 1 == 0 < v, "between 0 and 1, or a whole number above 1"),
]  # fmt: skip


def written(config: Config, *names: str) -> str:
    """Flags as a command line has them."""
    return " ".join(as_given(name, getattr(config, name)) for name in names)


def check_ranges(config: Config) -> None:
    """ValueError, one line, for the first flag whose value is none for any other flags."""
    for names, fits, allowed in _RANGES:
        for name in names.split():
            if (value := getattr(config, name, None)) is not None and not fits(value):
                raise ValueError(f"{written(config, name)[:80]}: must be {allowed}")
    for name, value in config.flat().items():
        if isinstance(value, int | float) and value >= 2**31 and name not in ("lr", "clip", "seed"):
            whose = " (ranks x --batch x --grad-accum)" * (name == "effective_batch")
            raise ValueError(f"{written(config, name)[:80]}{whose}: must be below 2**31")
    for name, (other, fits) in ONLY_WITH.items():
        options = next(group for group in (config.training, config.system, config.output) if hasattr(group, name))
        if getattr(config, name) != getattr(type(options), name) and not _any_in(getattr(config, other), fits):
            named = " or ".join(each for each in fits if each != "auto")  # which comes to one of the others
            raise ValueError(f"{written(config, name)[:80]}: needs {as_given(other, named)}")
    link(config.link)
    for option in config.compile_options:
        if "=" not in option and option != "plain":
            raise ValueError(f"--compile-options {option}: must be NAME=VALUE or plain")


def _misfit(config: Config, started: int) -> str | None:
    """The first thing that is wrong with resolved values together, or None."""
    for name, bad, why in config.misfits(started):
        wrong = [odd_name for odd_name, odd in bad.items() if odd] if isinstance(bad, dict) else []
        if wrong or bad and not isinstance(bad, dict):
            return f"{written(config, name)}: {f'not with {written(config, *wrong)}: ' * bool(wrong)}{why}"
    return None


def _shape_misfits(config: Config) -> list[tuple]:
    heads = config.width // config.head_dim
    is_bytes = config.data.split(":")[0] in ("stdlib", "text", "overfit")
    return [
        ("width", config.width % config.head_dim, f"must be a multiple of --head-dim {config.head_dim}"),
        ("head_dim", config.head_dim % 2, "must be even"),
        ("grouping", heads % config.grouping,
         f"must divide the {heads} heads ({config.width} / {config.head_dim}), as --grouping 1"),
        ("vocab", is_bytes and config.vocab < 256, f"must be at least 256 for the bytes of --data {config.data}"),
    ]  # fmt: skip


def run_misfits(config: Config, started: int, ranks: int) -> list[tuple]:
    """Rows, as Config.misfits gives them, of where a run begins and ends, its ranks and their wrapper."""
    named = config.resume not in ("auto", "never")
    unsaved = config.save is None
    modes = dict(fsdp2=("fully_shard", "hybrid_shard"), ddp=("replicate",)).get(config.wrapper, (config.mode,))
    hooked = config.wrapper in ("fsdp2", "ddp")
    bare = config.wrapper == "none"
    n = f"{ranks} rank{'s' * (ranks > 1)}"
    return [
        *((name, unsaved and getattr(config, name) != getattr(Output, name), "needs --save DIR")
          for name in ("save_every", "save_async", "save_errors", "keep", "keep_best")),
        ("keep_best", config.keep_best and (not config.eval_every or config.save_errors == "warn"),
         "needs --eval-every, and --save-errors stop"),
        ("eval_batches", config.eval_batches != Optimization.eval_batches and not config.eval_every,
         "needs --eval-every N"),
        ("explain_memory", config.explain_memory and dict(profile=config.profile is not None),
         "both inspect the same step; leave one of them out"),
        ("world", config.world and dict(save=not unsaved, init=config.init is not None, resume=named,
         sample=config.sample),
         "simulated ranks train no usable model; leave one of them out"),
        ("init", dict(resume=config.init is not None and named), "both give initial weights; leave one of them out"),
        ("warmup", config.warmup != Optimization.warmup and dict(warmup_ratio=config.warmup_ratio),
         "both set the length of warm-up; leave one of them out"),
        ("steps", config.steps == 0 and not config.eval_every,
         "would do nothing; add --eval-every 1 to evaluate, or a number of steps"),
        ("steps", config.steps == 0 and dict(save=not unsaved, explain_memory=config.explain_memory,
         profile=config.profile),
         "only evaluates, so there is no step to save or inspect; name the checkpoint to evaluate by --resume"),
        ("effective_batch", config.effective_batch != ranks * config.batch * config.grad_accum,
         f"must be {n} x --batch {config.batch} x a whole number (--grad-accum {config.grad_accum})"),
        ("world", config.world and started not in (1, config.world),
         f"simulates all ranks in one process, but torchrun started {started}; start it without torchrun"),
        ("replicas", config.mode == "hybrid_shard" and ranks % config.replicas,
         f"must divide the {n}"),
        ("wrapper", bare and (ranks > 1 or config.param_dtype != "fp32"),
         f"needs one rank and --param-dtype fp32, got {n} and {config.param_dtype}"),
        ("wrapper", hooked and dict(compile=config.compile not in ("none", "blocks"), mode=config.mode not in modes,
         min_shard_mib=config.min_shard_mib, cuda_graph=config.cuda_graph,
         reduce_dtype=config.wrapper == "ddp" and config.reduce_dtype == "bf16" and config.device == "cpu"),
         f"needs --compile none or blocks and --mode {' or '.join(modes)}, and ddp reduces in bf16 on CUDA only; "
         "change that, or use --wrapper simple"),
    ]  # fmt: skip


def step_misfits(config: Config) -> list[tuple]:
    """Rows of what a step is made of."""
    cpu = config.device == "cpu"
    bf16 = config.param_dtype == "bf16"
    uncut = "plain" in config.compile_options
    return [
        ("mlp", config.mlp == "lean" and dict(remat=config.remat == "pointwise",
         wrapper=config.wrapper == "ddp" and bf16),
         "lean recomputes the products that pointwise saves, and ddp's autocast does not cast its inputs; leave one of "
         "them out, or with ddp add --param-dtype fp32"),
        ("remat_core", config.remat_core and cpu and config.compile != "none" and config.wrapper != "none",
         f"on a CPU torch cannot compile this over shards (--compile {config.compile}); use --compile none"),
        ("ahead", config.ahead != 1 and dict(compile=config.compile in ("none", "blocks"), compile_options=uncut),
         "has no effect there; use it with --compile fwdbwd, model or step, and without plain"),
        ("keep_last", config.keep_last and dict(reshard=not config.reshard, wrapper=config.wrapper != "simple",
         accum_sync=config.accum_sync == "last", mode=config.mode == "replicate"),
         "needs --wrapper simple, --mode fully_shard, --reshard, --accum-sync every"),
        ("cuda_graph", config.cuda_graph and dict(device=cpu, world=config.world, explain_memory=config.explain_memory,
         verbose=config.verbose > 1), "needs CUDA, and no host code can run in a captured step; leave one out"),
        ("compile", config.compile == "step" and dict(grad_accum=config.grad_accum > 1,
         accum_sync=config.accum_sync != "every",
         verbose=config.verbose > 1),
         "step is one graph for one micro-batch, and its gradients cannot be read; use --compile fwdbwd"),
        ("optimizer", config.optimizer == "adamw8bit" and dict(compile=config.compile == "step",
         cuda_graph=config.cuda_graph,
         adam_dtype=config.adam_dtype != "fp32"),
         "torchao compiles its own update, and the host must read whether a step is skipped; leave the other flag out"),
        ("accum_sync", config.accum_sync == "shards" and config.mode != "hybrid_shard",
         "shards needs --mode hybrid_shard"),
        ("attn", cpu and config.attn in ("flex", "cudnn", "efficient"),
         "needs CUDA to train; use auto, flash or math on a CPU"),
    ]  # fmt: skip


def filled(config: Config, device: str) -> Config:
    """`config` with the defaults of `device` where no flag gives a value; whether the values fit is not checked."""
    unset = {name: default for name, default in config.DEFAULTS[device].items() if getattr(config, name) is None}
    mode = "replicate" if config.wrapper == "ddp" and config.mode == "fully_shard" else config.mode  # DDP replicates
    values = dict(device=device, mode=mode, link=measured(config.link))  # a row holds figures, not a file's name
    return replace(config, training=replace(config.training, **unset), system=replace(config.system, **values))


def resolve(config: Config, device: str, world: int) -> Config:
    """`filled`, and checked: ValueError names flag, value and fix for what does not fit together on `world` ranks."""
    config = filled(config, device).with_batch_sizes_for(config.world or world)
    check_ranges(config)
    if problem := _misfit(config, world):
        raise ValueError(problem)
    return config


def world_label(config: Config, world: int) -> int | str:
    """The number of ranks as a row has it: 8, or for simulated ones "8(sim h100-nvlink)"."""
    return f"{config.world}(sim {config.link})" if config.world else world


# Flags that only say where results go and how long to wait.
NO_SETTINGS = {"results", "debug", "force", "save", "resume", "timeout", "timeout_first", "config"}


def setting(config: Config) -> dict:
    """The whole setting of a run, for its row and for W&B: every resolved flag but those that only say where results go
    and how long to wait. Of a path outside the working directory only the last part is kept: it may name a user."""
    values = {name: value for name, value in config.flat().items() if name not in NO_SETTINGS}
    for name in ("data", "init", "profile", "model", "eval_data", "prepared", "export", "adapter", "template"):
        if isinstance(value := values.get(name), str):
            values[name] = without_user(value)
        elif value is not None:
            values[name] = [without_user(text) for text in value]
    return values


def settings_words(argv: Sequence[str], kind: type[Config]) -> list[str]:
    """The flags of the run that --config names, as words that stand before those of `argv`: of a flag that is given
    twice the last counts. ValueError, one line, for a file that no run wrote, or that another program wrote."""
    path = None
    for word, following in zip(argv, [*argv, ""][1:], strict=True):
        flag, equals, value = word.partition("=")
        if flag == "--config":
            path = value if equals else following
    if path is None:
        return []
    try:
        if Path(path).exists() and not Path(path).is_file():  # a pipe would be read for ever
            raise OSError(0, "no regular file")
        text = Path(path).read_text().strip()
        stored = json.loads(text.splitlines()[-1] if path.endswith(".jsonl") else text)
        stored = stored.get("flags", stored)
        settings = {name: stored[name] for name in stored if name not in ("continues", "after_step", "grad_accum")}
        for name, other in (("warmup", "warmup-ratio"), ("warmup_ratio", "warmup")):
            if any(word.partition("=")[0] == f"--{other}" for word in argv):
                settings.pop(name, None)  # the two exclude each other, and the command line counts
    except OSError as error:
        raise ValueError(f"--config {path}: {error.strerror}; name the settings or the results of a run") from None
    except (ValueError, AttributeError, TypeError, IndexError, RecursionError):
        raise ValueError(f"--config {path}: no run wrote this; name its .settings.json or a results file") from None
    names = {field.name for group in get_type_hints(kind).values() if is_dataclass(group) for field in fields(group)}
    if others := sorted(settings.keys() - (names - NO_SETTINGS)):
        raise ValueError(f"--config {path}: has {', '.join(others[:5])}, which are no settings of this program; "
                         "name the settings of one of its own runs")  # fmt: skip
    words = []
    for name, value in settings.items():
        values = value if isinstance(value, list) else [value]
        # A word that begins as a flag does would be one.
        odd = any(isinstance(each, str) and each.startswith("-") for each in values)
        if odd or (name == "verbose" and value not in (None, *range(10))):
            raise ValueError(f"--config {path}: has {name} {str(value)[:60]}, which no run wrote; correct it")
        if value is None or value == [] or (name == "verbose" and not value):
            continue  # as without the flag
        if name == "verbose" or isinstance(value, bool):
            words.append(as_given(name, value))
        else:
            words += [command_line.flag(name), *map(str, values)]
    return words


def parse(argv: Sequence[str], rank: int = 0, world: int | None = None, kind: type[Config] = Config,
          prog: str = "main.py", description: str = _DESCRIPTION) -> Config:  # fmt: skip
    """The flags of a command line. Ends the process with exit code 2 and one line, which rank 0 prints, for an unknown
    flag or a bad value, and, if `world` is given, for values that do not fit together on any device there may be."""
    try:
        argv = [*settings_words(argv, kind), *argv]
    except ValueError as error:
        fail(str(error), rank)
    config = command_line.parse(kind, argv, check_ranges, prog, description, rank)
    auto = config.device == "auto" and may_have_gpu()
    devices = [*config.DEFAULTS] if auto else [config.device.replace("auto", "cpu")]
    ranks = config.world or world
    filled_by_device = [filled(config, device).with_batch_sizes_for(ranks) for device in devices] if world else []
    problems = [_misfit(each, world) for each in filled_by_device] or [None]
    if all(problems):  # if one device would do, torch must first say which it is
        fail(problems[0], rank)
    return config
