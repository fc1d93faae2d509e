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

from trainer.links import link, measured
from trainer.step_costs import may_have_gpu
from trainer.terminal import command_line
from trainer.terminal.command_line import as_given, default, without_user
from trainer.terminal.output import fail

_DESCRIPTION = """Trains the transformer of model.py under simple_fsdp and appends a row of results.

    python main.py                                                      # one rank, a small model on a CPU
    torchrun --nproc-per-node 8 main.py --depth 8 --compile fwdbwd      # eight GPUs
    torchrun --nproc-per-node 8 main.py --data bin:tokens/*.bin --batch 4 --effective-batch 256 --steps 5000 \\
        --remat block --loss chunked --save runs/a --save-every 500

The flags that most runs give:
    --depth --width --seqlen        size of the model, tokens per sequence
    --batch --effective-batch       sequences per rank, and of an optimizer step on all ranks
    --data --steps --lr             what to train on, how long, how fast
    --remat                         less memory: backward computes activations again
    --save                          checkpoints, from which the same command resumes
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
    """gelu: LayerNorm, sinusoids as positions, a GELU MLP, biases. llama: RMSNorm, rotary positions, SwiGLU, none."""
    depth: Annotated[int | None, _by_device("depth", "INT")] = None
    """Number of transformer blocks."""
    width: Annotated[int | None, _by_device("width", "INT")] = None
    """Width of the residual stream. Must be a multiple of --head-dim."""
    head_dim: Annotated[int | None, _by_device("head_dim", "INT")] = None
    """Dimension of one attention head. Must be even."""
    grouping: int = 4
    """Query heads per key/value head; 1: multi-head attention. Must divide the number of heads, width / head-dim."""
    grow: int = 4
    """Hidden width of the MLP, as a multiple of --width; --block llama has three matrices of it, gelu two."""
    vocab: Annotated[int | None, _by_device("vocab", "INT")] = None
    """Size of the vocabulary. Data that is read as bytes (stdlib, text, overfit) needs at least 256."""


@dataclass(frozen=True)
class Optimization:
    """What any model is trained with."""

    seqlen: Annotated[int | None, _by_device("seqlen", "INT")] = None
    """Tokens per sequence."""
    batch: Annotated[int | None, _by_device("batch", "INT"), MICRO_BATCH] = None
    """Sequences per rank and micro-batch."""
    grad_accum: Annotated[int | None, default("1, or as --effective-batch needs")] = None
    """Micro-batches per optimizer step. Their gradients are accumulated in fp32."""
    effective_batch: Annotated[int | None, default("ranks x batch x grad-accum")] = None
    """Sequences of an optimizer step, on all ranks together."""
    data: str = "stdlib"
    """stdlib: bytes of Python's own sources. text:PATH: of a file or all in a folder. bin:GLOB: files of token ids, raw
    uint16 or as llm.c writes them. random: new random tokens in each step. overfit: the same batch in each step."""
    eval_every: int = 0
    """Steps between evaluations, each eager and in no step's time; one follows the last step. 0: none, all data trains.
    Otherwise the last 1/64 of --data, at least one sequence, is held out. A resumed run must hold out the same."""
    eval_batches: int = 8
    """Batches of an evaluation, the same each time, or all that is held out if that is less."""
    steps: Annotated[int | None, _by_device("steps", "INT")] = None
    """Optimizer steps. 0: train nothing, but evaluate --init or --resume; needs --eval-every."""
    lr: Annotated[float | None, _by_device("lr", "FLOAT")] = None
    """Peak learning rate. After --warmup it follows --schedule."""
    warmup: int = 10
    """Steps in which the learning rate rises linearly to --lr."""
    warmup_ratio: float = 0.0
    """The same as a share of --steps, rounded up, in place of --warmup."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """cosine: along a cosine to a tenth of --lr at the last step. wsd (warm-up, stable, decay): stays, then falls
    linearly to a tenth in the last fifth of the steps. constant: stays."""
    weight_decay: float = 0.1
    """Of matrices alone: norms and biases do not decay."""
    clip: float = 1.0
    """Gradients whose global norm is larger are scaled down to this norm. 0: no clipping."""
    nonfinite: Literal["stop", "skip"] = "stop"
    """A step whose loss or gradient norm is not finite updates nothing. stop: end with exit code 5; the last checkpoint
    is good. skip: go on with the next batch; after 3 such steps in a row one more ends the run (a resumed run counts
    from 0)."""
    norm_limit: float = 0.0
    """A gradient norm above this, before clipping, is taken for one that is not finite. 0: no limit."""
    norm_spike: float = 10.0
    """Print a line for a gradient norm above this many times the mean of the last 100. 0: none."""
    seed: int = 0
    """Seed of the initial weights and of the order of the data."""
    init: str | None = None
    """File of weights to begin with: .safetensors, its .index.json or .pt, as python -m trainer.checkpoint.export
    writes it. Adam's moments begin at zero. If --save holds a checkpoint already, the run resumes from that instead."""
    param_dtype: Annotated[Literal["fp32", "bf16"] | None, _by_device("param_dtype", "{fp32,bf16}")] = None
    """Dtype of gathered parameters, and so of the all-gather and the computation. They are stored in fp32."""
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype in which gradients are reduced over ranks."""
    adam_dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype of Adam's two moments, and of Muon's momentum."""
    adam_beta1: float = 0.9
    """Decay of Adam's mean of gradients."""
    adam_beta2: float = 0.95
    """Decay of Adam's mean of squared gradients."""
    optimizer: Literal["adamw", "adamw8bit", "muon"] = "adamw"
    """adamw8bit: AdamW of torchao, both moments in 8 bits. muon: that of muon.py for the matrices in blocks; AdamW
    updates embedding, head and vectors."""
    muon_lr: Annotated[float | None, default("that of --lr", "FLOAT")] = None
    """Peak learning rate of Muon, which follows the schedule of --lr."""
    muon_adjust_lr: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """The factor of --muon-lr for a matrix [m, n]. match_rms_adamw: 0.2 sqrt(max(m, n)), which makes updates about as
    large as AdamW's. original: sqrt(max(1, m / n))."""
    muon_dtype: Literal["fp32", "bf16"] = "bf16"
    """Dtype in which Muon's iteration is computed and sent."""


@dataclass(frozen=True)
class Training(Optimization, Shape):
    """May change the loss."""


@dataclass(frozen=True)
class System:
    """Must not change the loss by more than rounding. Two flags can: the ranks that --world simulates all hold equal
    shards, and --device picks those defaults above that differ on a CPU."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA if this torch sees a GPU, otherwise the CPU."""
    world: Annotated[int | None, default("those of torchrun")] = None
    """Simulate this many ranks in one process, to measure speed and memory. The process is rank 0; data is really
    copied, links take modelled time, and every rank is taken to hold the same shards as rank 0."""
    link: str = "h100-nvlink"
    """Of --world: a100-nvlink, h100-nvlink, ndr-ib, 4090-pcie, none, us:GB/s or measured:FILE (lab.studies.collectives
    writes it)."""
    wrapper: Literal["simple", "fsdp2", "ddp", "none"] = "simple"
    """simple: simple_fsdp.data_parallel. Others to compare it with: fsdp2 (torch's fully_shard on each block), ddp
    (torch's DistributedDataParallel, bf16 by autocast), none (the bare model, on one rank only)."""
    mode: Literal["replicate", "fully_shard", "hybrid_shard"] = "fully_shard"
    """replicate: each rank holds the whole model (DDP). fully_shard: each rank holds a part of it (ZeRO-3).
    hybrid_shard: ranks form --replicas groups; the model is sharded within a group and replicated across groups."""
    replicas: int = 2
    """Groups of --mode hybrid_shard. Must divide the number of ranks."""
    reshard: bool = True
    """Gather weights again in backward instead of keeping them from forward: less memory, more communication."""
    keep_last: bool = False
    """Keep the last block's weights from forward on, as backward needs them at once. Costs their memory at the loss."""
    accum_sync: Literal["every", "shards", "last"] = "every"
    """every: reduce gradients after each micro-batch of --grad-accum; least memory. shards (--mode
    hybrid_shard): reduce within a replica after each micro-batch, across replicas once. last: gather weights once per
    step, keep whole gradients in fp32 and reduce them once; least communication."""
    min_shard_mib: float = 0.0
    """Parameters smaller than this (MiB, in the dtype in which they are stored) are replicated instead of sharded."""
    compile: Literal["none", "blocks", "model", "fwdbwd", "step"] = "fwdbwd"
    """none: eager. blocks: one compiled block that all blocks share, and the loss; compiles as fast at any depth, so
    recommended for deep models. model: the model as one graph, the loss eager. fwdbwd: one graph for forward and loss,
    one for backward, on a GPU one for the optimizer; recommended. step: the whole training step as one graph; needs
    torch 2.13 and --grad-accum 1."""
    compile_options: tuple[str, ...] = ()
    """Inductor options for the model's graphs, each NAME=VALUE, such as max_autotune=True. They are added to those of
    overlap.py, which bucket collectives per block and start them early; the word plain leaves those out."""
    ahead: float = 1.0
    """Blocks of computing that a collective may hide behind. 1: the next block's weights are gathered once this block's
    are there, gradients are reduced during the next block. Less saves memory and needs a faster network. 2, 3 ..: that
    many blocks, for slow networks; each holds one more block's weights and gradients. Not in --compile none, blocks."""
    cuda_graph: bool = False
    """Replay the whole step as one CUDA graph, without any Python in between. It is captured at the third step."""
    deterministic: bool = False
    """Get the same bits each time the same command runs or resumes. Without it the order of some sums varies: of the
    embedding's gradient in compiled code on several CPU threads or a GPU, and of attention's gradient on a GPU."""
    attn: Literal[*KERNELS, "flex"] = "auto"
    """Kernel of attention; one that cannot run is an error. auto: cuDNN on Hopper and newer GPUs, otherwise
    FlashAttention; where neither can run (in fp32) efficient, then math; on a CPU what torch picks. efficient repeats K
    and V for each query head. math stores the scores, seqlen x seqlen, and with --remat computes them again. flex:
    compiled FlexAttention, which needs CUDA to train; with --compile-options max_autotune=True torch times its block
    sizes, and those of matrix products, and takes the fastest."""
    remat: Literal["none", "mlp", "attn", "both", "block", "pointwise"] = "none"
    """What backward computes again instead of keeping it. mlp: the MLP. attn: the attention branch, but for attention's
    output, which is kept. both: the two of them. block: whole blocks, but for attention's output. pointwise: all but
    matrix products."""
    remat_ratio: float = 1.0
    """Fraction of the blocks in which --remat computes again, evenly spread."""
    remat_core: bool = False
    """With --remat attn, both or block: compute attention again, too. Less memory, more time."""
    remat_norm: bool = True
    """With --remat mlp, attn or both: compute the norm before the branch again, too. The published run keeps its
    output."""
    mlp: Literal["plain", "lean"] = "plain"
    """plain: norm, two products and an activation. lean: all of it as one operation that keeps only its input and
    recomputes the rest; its backward holds two tensors of the MLP's hidden width at a time, others hold three."""
    mlp_chunk: int = 0
    """Tokens that --mlp lean computes at a time; the gradients of several chunks are summed in fp32. 0: all."""
    loss: Literal["full", "chunked"] = "full"
    """full: all logits at once. chunked: output layer and cross-entropy by chunks of tokens; never all the logits."""
    loss_chunk: int = 2048
    """Tokens of a chunk of --loss chunked."""


Tracker = Literal["wandb", "trackio", "tensorboard"]
WandbMode = Literal["online", "offline"]


@dataclass(frozen=True)
class Output:
    """Where results go, what is saved and printed, and when a run gives up."""

    results: str = "runs/results.jsonl"
    """JSONL file to which each run appends one row. The logged steps of a run go to a file of its own beside it."""
    log_every: int = 10
    """Steps between logged lines."""
    save: str | None = None
    """Directory for checkpoints; each run needs its own. The last step is always saved."""
    save_every: int = 0
    """Steps between checkpoints; 0: only after the last step."""
    save_async: bool = False
    """Stop training only to copy the state to host memory (a buffer of its size); a thread then writes it."""
    save_errors: Literal["stop", "warn"] = "stop"
    """What to do if saving fails. stop: end the run with exit code 4. warn: print a line and go on; only the last step
    must be saved."""
    keep: int = 3
    """Number of checkpoints to keep. Older ones are removed."""
    keep_best: bool = False
    """Also save after an evaluation with a lower loss than any before, and keep that step until another is better."""
    resume: Annotated[str, arg(metavar="{auto,never}|PATH")] = "auto"
    """auto: resume from the newest good checkpoint in --save, if any. never: start afresh. PATH: resume from a step's
    directory, or the newest step in a directory. --steps counts both runs; data, --seed and global batch must stay."""
    timeout: float = 600.0
    """Seconds until a step or a save ends the run, with exit code 7 and all stacks beside --results. 0: no limit."""
    timeout_first: float = 3600.0
    """The same until the first step, which compiles, is done. 0: no limit."""
    cast: bool = False
    """Also resume from another --adam-dtype, or --init from weights of another dtype, and convert them."""
    tracker: Annotated[tuple[Tracker, ...], arg(metavar="{wandb,trackio,tensorboard} ...")] = ()
    """Log to these as well: Weights & Biases, trackio (local, no account), TensorBoard. None of them ends a run; the
    JSONL files are the record."""
    tracker_group: str | None = None
    """Group of the run in its trackers."""
    wandb_mode: Annotated[WandbMode | None, default("$WANDB_MODE, else online", "{online,offline}")] = None
    """offline: nothing is sent before `wandb sync`."""
    wandb_tags: Annotated[tuple[str, ...], arg(metavar="TAG ...")] = ()
    """Tags of the run in Weights & Biases."""
    profile: str | None = None
    """Folder for traces (on CUDA also a memory snapshot) of three steps after warm-up, which enter no statistic."""
    explain_memory: bool = False
    """Print what memory holds in a step after warm-up; on CUDA also leave a snapshot of it beside the steps."""
    sample: int = 0
    """Tokens (of text: bytes) that the model writes after each evaluation and the last step, to be printed."""
    config: str | None = None
    """Begin with the flags of another run: the .settings.json that it wrote beside its steps, or a results file, of
    which the last run counts. Other flags change it. Where results and checkpoints go is not in it."""
    verbose: Annotated[UseCounterAction[int], arg(aliases=["-v"], help_behavior_hint="(default: 0, repeatable)")] = 0
    """-v: print memory by stages and the placement of parameters, too. -vv: also all norms at logged steps (slow)."""
    force: bool = False
    """Begin even if the machine does not seem to have the memory that this needs; checked on a CPU only."""
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

    def on(self, ranks: int) -> "Config":
        """With --grad-accum and --effective-batch, each as the other one and so many ranks need it."""
        t = self.training
        rows = ranks * self.batch
        accum = t.grad_accum or max(1, (t.effective_batch or rows) // rows)
        return replace(self, training=replace(t, grad_accum=accum, effective_batch=t.effective_batch or rows * accum))

    def misfits(self, started: int) -> list[tuple]:
        """Of resolved values on so many processes: rows (flag, whether it does not fit, or {other flag: whether it does
        not fit that}, what is wrong and the fix)."""
        return [*_shape_misfits(self), *run_misfits(self, started, self.world or started), *step_misfits(self)]


BESIDE = {  # a flag that means something beside some values of another flag alone -> that flag, and these values
    "replicas": ("mode", ("hybrid_shard",)),
    "remat_ratio": ("remat", ("mlp", "attn", "both", "block", "pointwise")),
    "remat_core": ("remat", ("attn", "both", "block")),
    "remat_norm": ("remat", ("mlp", "attn", "both")),
    "mlp_chunk": ("mlp", ("lean",)),
    "loss_chunk": ("loss", ("chunked",)),
    "muon_lr": ("optimizer", ("muon",)),
    "muon_adjust_lr": ("optimizer", ("muon",)),
    "muon_dtype": ("optimizer", ("muon",)),
    "tracker_group": ("tracker", ("wandb", "trackio", "tensorboard")),
    "wandb_mode": ("tracker", ("wandb",)),
    "wandb_tags": ("tracker", ("wandb",)),
}


def _beside(value: Any, fits: tuple) -> bool:
    """Whether a flag's value, or one of its values, is among those that fit."""
    return any(each in fits for each in value) if isinstance(value, tuple | list) else value in fits


def used(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values of fields, with None for each that means nothing beside the others."""
    idle = {name for name, (other, fits) in BESIDE.items() if not _beside(values.get(other), fits)}
    return {name: None if name in idle else value for name, value in values.items()}


_RANGES = [
    ("depth width head_dim grouping grow vocab seqlen batch grad_accum world replicas loss_chunk log_every keep "
     "eval_batches effective_batch", lambda v: v >= 1, "at least 1"),
    ("lr muon_lr epochs max_shard_gb lora_alpha", lambda v: 0 < v < 1e38, "a positive number below 1e38"),
    ("steps warmup mlp_chunk save_every eval_every sample lora", lambda v: v >= 0, "0 or more"),
    ("seed", lambda v: 0 <= v < 2**64, "0 or more and below 2**64"),
    ("clip weight_decay min_shard_mib norm_limit norm_spike timeout timeout_first",
     lambda v: 0 <= v < math.inf, "0 or a positive number"),
    ("init", lambda v: v.endswith((".safetensors", ".safetensors.index.json", ".pt")), "a .safetensors or a .pt"),
    ("results save profile prepared export eval_data adapter", lambda v: v[:1] not in ("", "~"),
     "a path; ~ is $HOME, which the shell puts in its place only where a word begins"),
    ("adam_beta1 adam_beta2", lambda v: 0 <= v < 1, "0 or more and below 1"),
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
    for name, (other, fits) in BESIDE.items():
        options = next(group for group in (config.training, config.system, config.output) if hasattr(group, name))
        if getattr(config, name) != getattr(type(options), name) and not _beside(getattr(config, other), fits):
            raise ValueError(f"{written(config, name)[:80]}: needs {as_given(other, ' or '.join(fits))}")
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
         "both look into the same step; ask for one of them"),
        ("world", config.world and dict(save=not unsaved, init=config.init is not None, resume=named,
         sample=config.sample),
         "simulated ranks hold no model worth saving or asking"),
        ("init", dict(resume=config.init is not None and named), "both have weights; leave one of them out"),
        ("warmup", config.warmup != Optimization.warmup and dict(warmup_ratio=config.warmup_ratio),
         "both say when the learning rate has risen; leave one of them out"),
        ("steps", config.steps == 0 and not config.eval_every,
         "trains nothing; add --eval-every 1 to evaluate, or give steps"),
        ("steps", config.steps == 0 and dict(save=not unsaved, explain_memory=config.explain_memory,
         profile=config.profile),
         "evaluates alone: nothing is saved, and no step looked into; name by --resume what to evaluate"),
        ("effective_batch", config.effective_batch != ranks * config.batch * config.grad_accum,
         f"must be {n} x --batch {config.batch} x a whole number (--grad-accum {config.grad_accum})"),
        ("world", config.world and started not in (1, config.world),
         f"simulates ranks in one process, here are {started}; start it without torchrun"),
        ("replicas", config.mode == "hybrid_shard" and ranks % config.replicas,
         f"must divide the {n}"),
        ("wrapper", bare and (ranks > 1 or config.param_dtype != "fp32"),
         f"works on one rank, this is {ranks}, with --param-dtype fp32, this is {config.param_dtype}"),
        ("wrapper", hooked and dict(compile=config.compile not in ("none", "blocks"), mode=config.mode not in modes,
         min_shard_mib=config.min_shard_mib, cuda_graph=config.cuda_graph,
         reduce_dtype=config.wrapper == "ddp" and config.reduce_dtype == "bf16" and config.device == "cpu"),
         f"takes --compile none or blocks and --mode {' or '.join(modes)}, and bf16 is reduced by ddp on CUDA alone; "
         "use that, or --wrapper simple"),
    ]  # fmt: skip


def step_misfits(config: Config) -> list[tuple]:
    """Rows of what a step is made of."""
    cpu = config.device == "cpu"
    bf16 = config.param_dtype == "bf16"
    uncut = "plain" in config.compile_options
    return [
        ("mlp", config.mlp == "lean" and dict(remat=config.remat == "pointwise",
         wrapper=config.wrapper == "ddp" and bf16),
         "it recomputes what pointwise keeps, and ddp's autocast does not cast it; add --param-dtype fp32"),
        ("remat_core", config.remat_core and cpu and config.compile != "none" and config.wrapper != "none",
         f"on a CPU torch cannot compile this over shards (--compile {config.compile}); use --compile none"),
        ("ahead", config.ahead != 1 and dict(compile=config.compile in ("none", "blocks"), compile_options=uncut),
         "moves nothing there; use it with --compile fwdbwd, model or step, without plain"),
        ("keep_last", config.keep_last and dict(reshard=not config.reshard, wrapper=config.wrapper != "simple",
         accum_sync=config.accum_sync == "last", mode=config.mode == "replicate"),
         "needs --wrapper simple, --mode fully_shard, --reshard, --accum-sync every"),
        ("cuda_graph", config.cuda_graph and dict(device=cpu, world=config.world, explain_memory=config.explain_memory,
         verbose=config.verbose > 1), "needs CUDA, and has no moment for the host in a step; leave one of them out"),
        ("compile", config.compile == "step" and dict(grad_accum=config.grad_accum > 1,
         accum_sync=config.accum_sync != "every",
         verbose=config.verbose > 1),
         "is one graph of one micro-batch, which gives no gradients; use --compile fwdbwd"),
        ("optimizer", config.optimizer == "adamw8bit" and dict(compile=config.compile == "step",
         cuda_graph=config.cuda_graph,
         adam_dtype=config.adam_dtype != "fp32"),
         "torchao compiles its update itself, and the host reads whether a step is refused; leave the other flag out"),
        ("accum_sync", config.accum_sync == "shards" and config.mode != "hybrid_shard",
         "shards needs --mode hybrid_shard"),
        ("attn", cpu and config.attn in ("flex", "cudnn", "efficient"),
         "needs CUDA to train; use auto, flash or math on a CPU"),
    ]  # fmt: skip


def filled(config: Config, device: str) -> Config:
    """`c` with the defaults of `device` where no flag gives a value; whether the values fit is not checked."""
    unset = {name: default for name, default in config.DEFAULTS[device].items() if getattr(config, name) is None}
    mode = "replicate" if config.wrapper == "ddp" and config.mode == "fully_shard" else config.mode  # DDP replicates
    values = dict(device=device, mode=mode, link=measured(config.link))  # a row holds figures, not a file's name
    return replace(config, training=replace(config.training, **unset), system=replace(config.system, **values))


def resolve(config: Config, device: str, world: int) -> Config:
    """`filled`, and checked: ValueError names flag, value and fix for what does not fit together on `world` ranks."""
    config = filled(config, device).on(config.world or world)
    check_ranges(config)
    if problem := _misfit(config, world):
        raise ValueError(problem)
    return config


def world_label(config: Config, world: int) -> int | str:
    """The number of ranks as a row has it: 8, or for simulated ones "8(sim h100-nvlink)"."""
    return f"{config.world}(sim {config.link})" if config.world else world


def setting(config: Config) -> dict:
    """The whole setting of a run, for its row and for W&B: every resolved flag but those that only say where results go
    and how long to wait. Of a path outside the working directory only the last part is kept: it may name a user."""
    skip = {"results", "debug", "force", "save", "resume", "timeout", "timeout_first", "config"}
    values = {name: value for name, value in config.flat().items() if name not in skip}
    for name in ("data", "init", "profile", "model", "eval_data", "prepared", "export", "adapter"):
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
        text = Path(path).read_text().strip()
        stored = json.loads(text.splitlines()[-1] if path.endswith(".jsonl") else text)
        stored = stored.get("flags", stored)
        settings = {name: stored[name] for name in stored if name not in ("continues", "after_step", "grad_accum")}
    except OSError as error:
        raise ValueError(f"--config {path}: {error.strerror}; name the settings or the results of a run") from None
    except (ValueError, AttributeError, TypeError, IndexError):
        raise ValueError(f"--config {path}: no run wrote this; name its .settings.json or a results file") from None
    names = {field.name for group in get_type_hints(kind).values() if is_dataclass(group) for field in fields(group)}
    if others := sorted(settings.keys() - names):
        raise ValueError(f"--config {path}: has {', '.join(others[:5])}, which are no flags of this program; "
                         "name the settings of one of its own runs")  # fmt: skip
    words = []
    for name, value in settings.items():
        if value is None or value == [] or (name == "verbose" and not value):
            continue  # as without the flag
        if name == "verbose" or isinstance(value, bool):
            words.append(as_given(name, value))
        else:
            words += [command_line.flag(name), *map(str, value if isinstance(value, list) else [value])]
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
    problems = [_misfit(filled(config, device).on(ranks), world) for device in devices] if world else [None]
    if all(problems):  # if one device would do, torch must first say which it is
        fail(problems[0], rank)
    return config
