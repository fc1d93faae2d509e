"""What finetune.py does beside the loop: opens data and model, looks at the loaded model, says what is odd, exports."""

import os
import re
from contextlib import suppress
from copy import deepcopy
from pathlib import Path

import torch

from trainer.attention import DTYPES
from trainer.checkpoint.load import on_rank_0, say
from trainer.checkpoint.manifest import Refused
from trainer.checks import check_fits, ranks_here
from trainer.finetuning import stopping
from trainer.finetuning.chat import ChatBatches, shortest_of
from trainer.finetuning.checks import EXPORTED, export_mark, was_exported
from trainer.finetuning.columns import parsed
from trainer.finetuning.config import Config
from trainer.finetuning.export import export
from trainer.finetuning.load import files_of
from trainer.finetuning.model import HuggingFaceModel, blank_model, tokenizer_of
from trainer.finetuning.templates import replace_template
from trainer.run import Run
from trainer.step_costs import moment_size
from trainer.terminal.output import tell

NAMED = 6  # parameters in a line


def open_data(
    c: Config,
    vocab: int,
    rank: int = 0,
    world: int = 1,
    positions: bool = False,
    until: bool = False,
) -> ChatBatches:
    """The examples of --data, as resolved flags cut and pad them. positions, until: what the model needs, and may be
    given. DataError for bad ones, or a bad tokenizer."""
    tokenizer = tokenizer_of(c.model)
    note = replace_template(tokenizer, c.template) if c.template is not None else ""
    if note and rank == 0:
        tell(note)
    return ChatBatches(
        c.data,
        tokenizer,
        global_batch=c.effective_batch,
        seqlen=c.seqlen,
        vocab=vocab,
        seed=c.seed,
        rank=rank,
        world=world,
        pad=c.pad,
        hold_out=c.eval_every > 0,
        eval_source=c.eval_data,
        positions=positions,
        until=until,
        bad_lines=c.bad_lines,
        template_args=c.arguments,
        format=c.format,
        columns=parsed(c.columns),
    )


def open_model(c: Config) -> tuple[HuggingFaceModel, int]:
    """The model of --model on the meta device, and the size of its vocabulary. ValueError for flags that it cannot do,
    and where --export could not be written."""
    ratio = c.remat_ratio if c.remat == "block" else 0.0
    model = blank_model(c.model, ratio, DTYPES[c.param_dtype])
    if c.lora:
        from trainer.finetuning import adapters  # which imports peft

        adapters.attach(model, c.model, random=c.random, **c.adapters)
        say(adapters.in_words(model))
    freeze_what_has_no_gradient(model, c.seqlen)
    if c.pad == "longest":
        check_short_rows(model, c.seqlen)
    model.drawn = c.random
    if c.export is not None:
        files_of(model.model, c.model)  # raises now, not after training
    most = getattr(model.model.config, "max_position_embeddings", None)
    if most is not None and c.seqlen > most:
        raise ValueError(
            f"--seqlen {c.seqlen}: the model knows {most} positions (max_position_embeddings of its "
            f"config.json); add --seqlen {most}, or less"
        )
    if "dynamic" in str(model.rotary.get("rope_type")) and c.compile not in ("none", "blocks"):
        raise ValueError(
            f"--compile {c.compile}: rope_type dynamic of config.json branches on values, which one "
            "graph cannot; use --compile none"
        )
    if c.cuda_graph and (usual := model.longest_short(c.seqlen)):
        raise ValueError(
            "--cuda-graph: takes no positions, by which longrope chooses its factors; use --seqlen "
            f"{usual}, or leave it out"
        )
    return model, model.model.get_input_embeddings().num_embeddings


def freeze_what_has_no_gradient(model: HuggingFaceModel, seqlen: int) -> None:
    """Takes parameters out of training on which the loss does not depend, and names them: they stay as they are and do
    not decay."""
    names = copy_on_meta(model).without_gradient(seqlen)
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    if names:
        say(
            f"{len(names)} parameters get no gradient from text of {seqlen} tokens and stay as they are, without "
            f"weight decay: {', '.join(in_short(names))}"
        )


def check_short_rows(model: HuggingFaceModel, seqlen: int) -> None:
    """ValueError where rows of --pad longest can be so short that some parameters have no gradient then."""
    shortest = shortest_of(seqlen)
    if names := copy_on_meta(model).without_gradient(shortest):
        raise ValueError(
            f"--pad longest: may have rows of {shortest} tokens, in which {len(names)} parameters get no "
            f"gradient ({', '.join(in_short(names))}); use --pad fixed"
        )


def in_short(names: list[str]) -> list[str]:
    """Names without the number of their block, each once; of many the first."""
    kinds = [*dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in names)]
    return [*kinds[:NAMED], f"and {len(kinds) - NAMED} more kinds"] if len(kinds) > NAMED else kinds


def check_memory(c: Config, model: HuggingFaceModel, world: int) -> None:
    """ValueError where a batch on a CPU needs more than the host has, and a smaller one would not. c: with the model's
    shape. Counted are the weights with their moments and gradients, the inputs of all blocks and the logits: what is
    inside of blocks comes on top."""
    size = {"fp32": 4, "bf16": 2}
    parts = [*model.parameters()]
    trained = sum(p.numel() for p in parts if p.requires_grad)
    frozen = sum(p.numel() * p.element_size() for p in parts if not p.requires_grad)

    def step_bytes(c: Config, ranks: int, batch: int) -> float:
        sharded = ranks if c.mode != "replicate" else 1
        tokens = batch * c.seqlen
        width = size[c.param_dtype]
        logits = c.vocab * (tokens if c.loss == "full" else min(tokens, c.loss_chunk))
        kept = (c.depth * c.width * tokens + logits) * width
        own = frozen + trained * (4 + 2 * moment_size(c))
        return own / sharded + max(kept, 4 * trained / sharded)

    check_fits(c, *ranks_here(c, world), step_bytes, shape=())


def to_count(c: Config, model: HuggingFaceModel) -> HuggingFaceModel | None:
    """A copy to count FLOPs on; None where rows have no one length."""
    return None if c.pad == "longest" else copy_on_meta(model)


def copy_on_meta(model: HuggingFaceModel) -> HuggingFaceModel:
    """A copy of a model on meta, to be run there: longrope leaves a tensor on meta in what is run."""
    copy = deepcopy(model)
    for module in copy.modules():
        vars(module).pop("forward", None)  # what is computed again is no work of the model
    copy.model.set_experts_implementation("batched_mm")  # as many products, and it runs on meta
    return copy


def report_model(run: Run, c: Config, model: HuggingFaceModel, device: torch.device) -> None:
    """Checks the model with the weights that it now has. Says what the reader should know of it and of the data."""
    if not c.random:  # else it has been done
        model.look(device)
    if c.pad == "pack":
        model.check_packed(device, run.batches.until)
    if model.noise:
        say(f"noise is off: {model.noise} of config.json")
    in_fp32 = {name for own in model.parts_in_fp32.values() for name in own}
    kept = [name for name in model.kept_in_fp32 if c.accum_sync == "last" or name not in in_fp32]
    if c.param_dtype != "fp32" and kept:
        say(
            f"{len(kept)} parameters, which transformers keeps in fp32, are gathered in {c.param_dtype}, such as "
            f"{kept[0]}; use --param-dtype fp32 to compute with them as it does"
        )
    say_whether_it_stops(run, c, model)
    if usual := model.longest_short(c.seqlen):
        say(
            f"longrope: a micro-batch has the long factors where an example in it is longer than {usual} tokens, else "
            "the short ones, as in inference; where lengths are mixed, --batch 1 gives each its own"
        )
    passes = c.effective_batch / run.batches.epoch_samples
    if passes > 1:
        say(
            f"each step passes {passes:.1f} times over all {run.batches.epoch_samples} rows of --data; "
            "--effective-batch says how many rows it takes"
        )


def say_whether_it_stops(run: Run, c: Config, model: HuggingFaceModel) -> None:
    """Names the tokens that end what is learned and at which generation goes on. --sample stops where
    the export does."""
    stops = stopping.stop_tokens(c.model, model.model.config)
    new = stopping.not_stopping(stops, run.batches.learned_ends)
    run.batches.ends = {*stops} if c.keep_eos else {*stops, *new.values()}
    if not new:
        return
    if c.keep_eos:
        what = f"--keep-eos leaves that so: {stopping.call(stops, new)}"
    elif c.lora and not c.merge:
        what = f"adapters cannot change that: {stopping.call(stops, new)}, or --merge"
    else:
        what = f"--export writes {stopping.KEY} {[*stops, *new.values()]}"
    say(
        f"answers end with {stopping.in_words(new)}, at which generation of --model does not stop "
        f"({stopping.KEY} {stops}); {what}"
    )


def has_exported(run: Run, c: Config) -> bool:
    """Whether this run, which has no steps left, wrote --export, as rank 0 sees it. Refused on all ranks where it has
    some, in the end of which --export would be in the way."""

    def written() -> bool:
        if not run.done and os.path.lexists(c.export):
            raise Refused(f"--export {c.export}: is there already; name a new folder")
        return was_exported(c)

    return c.export is not None and on_rank_0(written, run.group)


def exported(run: Run, c: Config, model: HuggingFaceModel) -> str:
    """Writes --export; returns the line to print. Raises CheckpointError."""
    ends = run.batches.learned_ends
    line = export(c, model, run.group, lambda: run.watchdog.beat(run.state.step, "export"), ends)
    if run.rank == 0 and c.save is not None:
        # The export is whole: without this the same command would only refuse it.
        with suppress(OSError, UnicodeError):
            Path(c.save, EXPORTED).write_text(f"{run.state.step}\n{export_mark(c)}")
    return f"export   {line}"
