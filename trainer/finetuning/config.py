"""The flags of finetune.py: those of main.py that mean the same, without a model's shape, and its own.

    config = parse(sys.argv[1:], world=4)      # as trainer/config.py; imports no torch

--model brings the shape, --data the number of steps: `completed` puts them in when both have been read.
"""

import json
import math
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

from tyro.conf import OmitArgPrefixes, Suppress, arg

from trainer import config as flags
from trainer.finetuning.adapter_settings import ALL_LINEAR, adapter_flags
from trainer.finetuning.columns import FORMATS, parsed
from trainer.finetuning.sources import weighted
from trainer.terminal.command_line import default
from trainer.terminal.output import fail

_DESCRIPTION = """Fine-tunes a Hugging Face causal language model with simple_fsdp.py, from a folder to a folder.

    python finetune.py --model DIR --data chat.jsonl --preview               # shows which tokens are trained on
    torchrun --nproc-per-node 8 finetune.py --model DIR --data chat.jsonl --export OUT --effective-batch 64 \\
        --remat block --loss chunked --save runs/a

The flags that most runs give:
    --model --data --export         folder of the model, files of examples, folder for the trained model
    --seqlen --batch                tokens per sequence, sequences per rank
    --effective-batch               sequences of an optimizer step on all ranks
    --epochs --lr                   passes over the data, learning rate
    --remat                         less memory: backward recomputes activations
    --save                          folder for checkpoints, from which the same command resumes
"""
DEFAULTS = {device: dict(batch=1, lr=1e-5, param_dtype=dtype)
            for device, dtype in (("cuda", "bf16"), ("cpu", "fp32"))}  # fmt: skip


@dataclass(frozen=True)
class Tuning(flags.Optimization):
    """May change the loss."""

    model: str = ""
    """Folder of the model, as save_pretrained() writes it: config.json, *.safetensors, the tokenizer's files. Nothing
    is downloaded."""
    random: bool = False
    """Start from random weights, to measure or to pretrain. The folder then needs no *.safetensors."""
    data: Annotated[tuple[str, ...], arg(metavar="PATH[:WEIGHT] ...")] = ()
    """Files, folders or patterns: JSONL, JSON arrays, parquet, Arrow, or what `datasets` saves. A line has "messages"
    (each with role and content; the assistant's are trained on), "prompt" and "completion" (trained on), "text" (all of
    it trained on), or the columns of --format. Weights (a.jsonl:0.7 b.parquet:0.3) set the share of examples, or with
    --pad pack of rows, from each source. Without weights the sources are concatenated."""
    format: Literal[FORMATS] = "auto"
    """Which columns of --data to read. auto: detected per line: messages; prompt and completion; conversations with
    from and value (sharegpt); instruction, input and output (alpaca); text."""
    columns: Annotated[tuple[str, ...], arg(metavar="NAME=COLUMN ...")] = ()
    """Names of these columns in your files, and of role and content in a message: instruction=question
    output=answer."""
    eval_data: str | None = None
    """File, folder or pattern to evaluate on with --eval-every. Without it, the last 1/64 of --data (of each weighted
    source) is held out."""
    seqlen: int = 1024
    """Tokens per sequence. Longer examples are truncated. An example that then has no token to train on is skipped and
    counted."""
    batch: Annotated[int | None, default("1"), flags.MICRO_BATCH] = None
    """Sequences of one micro-batch on one rank."""
    lora: int = 0
    """Rank of LoRA adapters. Only the adapters are trained; the model stays frozen in the dtype of its files. 0: no
    adapters, train all weights."""
    lora_targets: Annotated[tuple[str, ...], arg(metavar="NAME ...")] = (ALL_LINEAR,)
    """Linear layers that get adapters, by the ends of their names, such as q_proj v_proj. all-linear: all except the
    head. Experts stacked in one tensor are not linear layers; to include them write: all-linear experts."""
    lora_alpha: Annotated[float | None, default("2 x --lora", "FLOAT")] = None
    """The adapters' output is scaled by lora_alpha / rank."""
    lora_rslora: bool = False
    """Scale by lora_alpha / sqrt(rank) instead (rank-stabilised LoRA), which suits large ranks."""
    lora_modules_to_save: Annotated[tuple[str, ...], arg(metavar="NAME ...")] = ()
    """Modules that are trained in full, in fp32, and saved with the adapters, by the ends of their names, such as
    lm_head embed_tokens."""
    adapter: str | None = None
    """Folder of adapters to start from, as peft or --export writes it. Rank, alpha and targets come from its
    adapter_config.json."""
    epochs: float = 1.0
    """Passes over the data. --steps overrides it."""
    steps: Annotated[int | None, default("as --epochs needs")] = None
    """Optimizer steps. 0: only evaluate --model or --resume; needs --eval-every."""
    lr: Annotated[float | None, default("1e-05", "FLOAT")] = None
    """Peak learning rate. After --warmup it follows --schedule."""
    weight_decay: float = 0.0
    """Weight decay of matrices. Norms and biases do not decay."""
    pad: Literal["fixed", "longest", "pack"] = "fixed"
    """fixed: pad every sequence to --seqlen. longest: pad to the longest of the step, rounded up to an eighth of
    --seqlen. pack: several examples per sequence, which do not attend to each other. Examples made from one chat share
    their common beginning."""
    bad_lines: Literal["stop", "skip"] = "stop"
    """What to do with an unusable line of --data. stop: end with exit code 3 and the line's number. skip: skip and
    count it."""
    long_text: Literal["cut", "chunks"] = "cut"
    """What to do with a "text" longer than --seqlen. cut: truncate it, as other examples. chunks: split it into as many
    sequences as it needs."""
    mask_history: bool = False
    """Train only on the last answer of each chat."""
    label_smoothing: float = 0.0
    """Spread this share of each target's probability evenly over the vocabulary (takes --loss full). The loss of
    --eval-every is without it."""
    template: str | None = None
    """File with the chat template to train with, for example a copy of the tokenizer's with {% generation %} added; or
    one of the built-in deepseek-r1 and glm-4.5. A printed line says where its text differs from the tokenizer's."""
    template_args: str | None = None
    """Arguments of the chat template as a JSON object, such as '{"enable_thinking": false}'. A line's own
    "chat_template_kwargs" override them."""
    init: Suppress[str | None] = None
    depth: Suppress[int | None] = None
    width: Suppress[int | None] = None
    vocab: Suppress[int | None] = None


@dataclass(frozen=True)
class System(flags.System):
    """Must not change the loss by more than rounding."""

    loss: Literal["auto", "full", "chunked"] = "auto"
    """full: all logits at once. chunked: head and cross-entropy on one chunk of tokens at a time, and only on tokens
    that are trained on. auto: chunked, but full where the logits are more than the head's matrix product."""
    loss_chunk: int = 2048
    """Tokens per chunk of --loss auto and chunked."""
    remat: Literal["none", "block"] = "none"
    """Activation checkpointing. block: backward recomputes the model's blocks except attention's output, which is
    saved."""
    prepared: str | None = None
    """Folder that caches the sharded model for faster starts: the first start writes it, later ones load it, on any
    number of ranks."""
    wrapper: Suppress[str] = "simple"
    attn: Suppress[str] = "auto"
    remat_norm: Suppress[bool] = True
    remat_core: Suppress[bool] = False
    mlp: Suppress[str] = "plain"
    mlp_chunk: Suppress[int] = 0


@dataclass(frozen=True)
class Output(flags.Output):
    """Where results go, what is saved and printed, and when a run gives up."""

    export: str | None = None
    """New folder for the trained model, which from_pretrained() loads. Config, tokenizer and dtypes are those of
    --model. With --lora: the adapters alone, for peft."""
    merge: bool = False
    """With --lora: merge the adapters into the weights and export the whole model."""
    keep_eos: bool = False
    """Leave the stop tokens (eos_token_id) in --export as they are in --model. By default the token that ends a trained
    turn is added, so that generate() stops there."""
    max_shard_gb: float = 5.0
    """Largest file of --export, in 10^9 bytes."""
    preview: bool = False
    """Train nothing. Print a summary of --data (lines left out and why, tokens trained on, truncated and padded) and
    the first example of each kind of line, with the text that is trained on marked."""
    explain_memory: Suppress[bool] = False
    cast: Suppress[bool] = False
    sample: int = 0
    """After each evaluation and after the last step, generate and print an answer of at most this many tokens. The
    prompt is held out if --eval-every is set."""


@dataclass(frozen=True)
class Config(flags.Config):
    """All flags of finetune.py."""

    PROGRAM: ClassVar = "finetune.py"
    DEFAULTS: ClassVar = DEFAULTS
    training: OmitArgPrefixes[Tuning]
    system: OmitArgPrefixes[System]
    output: OmitArgPrefixes[Output]

    def misfits(self, started: int) -> list[tuple]:
        """As of main.py's flags, without those of a shape and of flags that finetune.py does not have."""
        shared = [
            *flags.run_misfits(self, started, self.world or started),
            *flags.step_misfits(self),
        ]
        same = None not in (self.prepared, self.save) and os.path.realpath(
            self.prepared
        ) == os.path.realpath(self.save)
        return [
            ("eval_data", self.eval_data is not None and not self.eval_every, "needs --eval-every"),
            ("export", self.export is not None and dict(world=self.world),
             "simulated ranks train no usable model; leave one of them out"),
            ("prepared", self.prepared is not None and dict(save=same, world=self.world, random=self.random,
             lora=self.lora), "caches weights that real ranks read from --model, in its own folder; leave one out"),
            ("adapter", self.adapter is not None and dict(random=self.random),
             "the adapters belong to the weights of --model; leave one of them out"),
            ("lora", not self.lora and self.adapter is None and dict(lora_alpha=self.lora_alpha is not None,
             merge=self.merge, lora_targets=self.lora_targets != (ALL_LINEAR,), lora_rslora=self.lora_rslora,
             lora_modules_to_save=self.lora_modules_to_save), "needs adapters; add --lora RANK"),
            ("lora", self.lora and self.optimizer == "muon", "Muon is not for adapters; use --optimizer adamw"),
            ("merge", self.merge and self.export is None, "needs --export"),
            ("cuda_graph", self.cuda_graph and self.pad != "fixed",
             "replays sequences of one length; use --pad fixed"),
            *(rule for rule in shared if rule[0] not in ("init", "wrapper", "mlp", "attn")),
        ]  # fmt: skip

    @property
    def adapters(self) -> dict:
        """--lora and what belongs to it, as adapters.attach takes it; empty without."""
        alpha = self.lora_alpha or 2.0 * self.lora
        targets = sorted({*self.lora_targets})
        flags = dict(lora=self.lora, lora_alpha=alpha, lora_targets=targets)
        flags |= dict(lora_rslora=self.lora_rslora)
        flags |= dict(lora_modules_to_save=sorted({*self.lora_modules_to_save}))
        return flags if self.lora else {}

    @property
    def arguments(self) -> dict | None:
        """--template-args, or None if it holds no JSON object."""
        with suppress(ValueError):
            arguments = json.loads(self.template_args or "{}")
            return arguments if isinstance(arguments, dict) else None

    def completed(self, depth: int, width: int, vocab: int, rows: int) -> "Config":
        """With the model's shape, and the steps that --epochs of an epoch of so many rows take."""
        needed = max(1, math.ceil(self.epochs * rows / self.effective_batch))
        steps = needed if self.steps is None else self.steps
        return replace(
            self,
            training=replace(self.training, depth=depth, width=width, vocab=vocab, steps=steps),
        )


def parse(argv: Sequence[str], rank: int = 0, world: int | None = None) -> Config:
    """As trainer.config.parse; --model and --data have to be there."""
    config = flags.parse(argv, rank, world, Config, "finetune.py", _DESCRIPTION)
    try:
        weighted(config.data)
        parsed(config.columns)
        if config.arguments is None:
            raise ValueError(f"{flags.written(config, 'template_args')}: must be a JSON object")
        if config.adapter is not None:
            config = _with_adapter(config)
        if config.eval_data is not None and weighted([config.eval_data], "--eval-data")[0][1] is not None:
            raise ValueError(
                f"--eval-data {config.eval_data}: takes no weight; name a file, folder or pattern"
            )
    except ValueError as error:
        fail(str(error), rank)
    for name, what in (("model", "the folder of a model"), ("data", "files of examples"),
                       ("lora_targets", "a name, such as q_proj")):  # fmt: skip
        if not getattr(config, name):
            fail(f"--{name.replace('_', '-')}: needs {what}; --help lists all flags", rank)
    return config


def _with_adapter(config: Config) -> Config:
    """The flags with those of --adapter's folder. ValueError where others were given."""
    own = adapter_flags(config.adapter)
    for name, value in own.items():
        if getattr(config, name) not in (getattr(Tuning, name), value):
            raise ValueError(
                f"{flags.written(config, name)}: not with --adapter {config.adapter}, which has "
                f"{flags.as_given(name, value)}; leave it out"
            )
    return replace(config, training=replace(config.training, **own))
