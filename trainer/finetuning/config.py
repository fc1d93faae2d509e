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

_DESCRIPTION = """Fine-tunes a causal language model of Hugging Face under simple_fsdp; its checkpoint is a folder.

    python finetune.py --model DIR --data chat.jsonl --preview               # what is learned of an example
    torchrun --nproc-per-node 8 finetune.py --model DIR --data chat.jsonl --export OUT --effective-batch 64 \\
        --remat block --loss chunked --save runs/a

The flags that most runs give:
    --model --data --export         folder of the model, files of examples, folder for the trained model
    --seqlen --batch                tokens per sequence, sequences per rank
    --effective-batch               sequences of an optimizer step on all ranks
    --epochs --lr                   how long, how fast
    --remat                         less memory: backward computes activations again
    --save                          checkpoints, from which the same command resumes
"""
DEFAULTS = {device: dict(batch=1, lr=1e-5, param_dtype=dtype)
            for device, dtype in (("cuda", "bf16"), ("cpu", "fp32"))}  # fmt: skip


@dataclass(frozen=True)
class Tuning(flags.Optimization):
    """May change the loss."""

    model: str = ""
    """Folder of the model: config.json, *.safetensors (with an index if they are several), the tokenizer's files."""
    random: bool = False
    """Begin with random weights: the folder needs no *.safetensors. To measure, or to train from the beginning."""
    data: Annotated[tuple[str, ...], arg(metavar="PATH[:WEIGHT] ...")] = ()
    """Files, folders or patterns: JSONL, arrays of JSON, parquet, Arrow, what datasets saves. Each line has "messages"
    (a list of role and content, of which what the assistant says is learned), "prompt" and "completion", or "text", all
    of which is learned; or the columns of --format. With weights (a.jsonl:0.7 b.parquet:0.3) these are the shares of
    examples (of rows, with --pad pack) that come from each; without, all are one."""
    format: Literal[FORMATS] = "auto"
    """Columns of --data. auto: what a line has: messages, prompt and completion, conversations of from and value
    (sharegpt), instruction, input and output (alpaca), text."""
    columns: Annotated[tuple[str, ...], arg(metavar="NAME=COLUMN ...")] = ()
    """Other names of these columns, and of role and content in a message: instruction=question output=answer."""
    eval_data: str | None = None
    """A file, folder or pattern for --eval-every. Without it the last 1/64 of --data, of each weighted part, is held
    out."""
    seqlen: int = 1024
    """Tokens per sequence. A longer example loses its end; one that then has nothing to learn is left out, counted."""
    batch: Annotated[int | None, default("1"), flags.MICRO_BATCH] = None
    """Sequences per rank and micro-batch."""
    lora: int = 0
    """Train adapters of this rank (LoRA) alone; the model stays as it is, in the dtype of its files. 0: train all."""
    lora_targets: Annotated[tuple[str, ...], arg(metavar="NAME ...")] = (ALL_LINEAR,)
    """Linear layers beside which they stand, by the ends of their names, such as q_proj v_proj; all-linear: all but the
    head. Experts that are stacked in one tensor are no linear layers: name them, too, by all-linear experts."""
    lora_alpha: Annotated[float | None, default("2 x --lora", "FLOAT")] = None
    """What adapters add is multiplied by this over their rank."""
    lora_rslora: bool = False
    """Multiply by --lora-alpha over the square root of the rank instead (rank-stabilised LoRA), which suits large
    ranks."""
    lora_modules_to_save: Annotated[tuple[str, ...], arg(metavar="NAME ...")] = ()
    """Modules, by the ends of their names, such as lm_head embed_tokens, that are trained whole, in fp32, and saved
    beside the adapters."""
    adapter: str | None = None
    """Folder of adapters, as peft or --export writes it, to begin with. Rank, alpha and targets are those of its
    adapter_config.json."""
    epochs: float = 1.0
    """Passes over the data, if --steps does not say how long."""
    steps: Annotated[int | None, default("as --epochs needs")] = None
    """Optimizer steps. 0: train nothing, but evaluate --model or --resume; needs --eval-every."""
    lr: Annotated[float | None, default("1e-05", "FLOAT")] = None
    """Peak learning rate. After --warmup it follows --schedule."""
    weight_decay: float = 0.0
    """Of matrices alone: norms and biases do not decay."""
    pad: Literal["fixed", "longest", "pack"] = "fixed"
    """fixed: rows of --seqlen. longest: as long as the longest of a step, rounded up to an eighth of --seqlen.
    pack: several examples in a row, which attention keeps apart; those of one chat, where a template splits it, share
    their beginning."""
    bad_lines: Literal["stop", "skip"] = "stop"
    """What to do with a line of --data that cannot be used: end with exit code 3 and its number, or count it."""
    long_text: Literal["cut", "chunks"] = "cut"
    """What becomes of "text" longer than --seqlen. cut: it loses its end, as other examples do. chunks: it is trained
    on in as many sequences as it needs."""
    mask_history: bool = False
    """Learn the last answer of a chat alone; those before are its history."""
    template: str | None = None
    """File with the chat template to train with, such as a copy of the tokenizer's own with {% generation %} in it, or
    the name of one of ours: deepseek-r1, glm-4.5. Where it writes another text than the tokenizer's, a line says so."""
    template_args: str | None = None
    """JSON object of arguments for the chat template, such as '{"enable_thinking": false}'. Those that a line has as
    "chat_template_kwargs" go before."""
    init: Suppress[str | None] = None
    depth: Suppress[int | None] = None
    width: Suppress[int | None] = None
    vocab: Suppress[int | None] = None


@dataclass(frozen=True)
class System(flags.System):
    """Must not change the loss by more than rounding."""

    remat: Literal["none", "block"] = "none"
    """block: backward computes the model's blocks again, but for the output of attention, instead of keeping what is
    inside."""
    prepared: str | None = None
    """Folder in which the first start saves the model as it shards it; later ones, of any number of ranks, load it."""
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
    """New folder for the trained model, which from_pretrained() opens: config, tokenizer and dtypes as in --model. With
    --lora it holds the adapters, which peft's PeftModel.from_pretrained() puts beside that model."""
    merge: bool = False
    """With --lora: --export the whole model with the adapters in its weights, instead of the adapters for peft."""
    keep_eos: bool = False
    """Leave the stop tokens (eos_token_id) of --export as in --model. Without it the token that ends learned turns is
    written beside them, so that generate() stops there."""
    max_shard_gb: float = 5.0
    """Largest size of a file of --export, in 10^9 bytes."""
    preview: bool = False
    """Print what a run would say of --data (lines left out with their reasons, what is learned, cut and padding) and
    the first example of each form of lines with what is learned of it marked, and end."""
    explain_memory: Suppress[bool] = False
    cast: Suppress[bool] = False
    sample: int = 0
    """Tokens, at most, with which the model answers a prompt, held out with --eval-every, after each evaluation and the
    last step, to be printed."""


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
             "simulated ranks hold no model worth saving; leave it out"),
            ("prepared", self.prepared is not None and dict(save=same, world=self.world, random=self.random,
             lora=self.lora), "is of weights that real ranks read and cast, in a folder of its own; leave one out"),
            ("adapter", self.adapter is not None and dict(random=self.random),
             "they fit the model's own weights; leave one out"),
            ("lora", not self.lora and self.adapter is None and dict(lora_alpha=self.lora_alpha is not None,
             merge=self.merge, lora_targets=self.lora_targets != (ALL_LINEAR,), lora_rslora=self.lora_rslora,
             lora_modules_to_save=self.lora_modules_to_save), "that is of adapters; add --lora RANK"),
            ("lora", self.lora and self.optimizer == "muon", "Muon is for whole matrices; use --optimizer adamw"),
            ("merge", self.merge and self.export is None, "needs --export"),
            ("cuda_graph", self.cuda_graph and self.pad != "fixed",
             "replays one shape without positions; use --pad fixed"),
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
