"""What finetune.py does beside the loop: opens data and model, looks at the loaded model, says what is odd, exports."""

import os
import re
from contextlib import suppress
from copy import deepcopy
from functools import partial
from pathlib import Path

import torch

from trainer.attention_kernel import DTYPES
from trainer.checkpoint.load import on_rank_0, say
from trainer.checkpoint.manifest import Refused
from trainer.checks import check_fits, ranks_here
from trainer.finetuning import end_tokens
from trainer.finetuning.adapter_settings import adapter_note
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
    config: Config,
    vocab: int,
    rank: int = 0,
    world: int = 1,
    positions: bool = False,
    until: bool = False,
) -> ChatBatches:
    """The examples of --data, as resolved flags cut and pad them. positions, until: what the model needs, and may be
    given. DataError for bad ones, or a bad tokenizer."""
    tokenizer = tokenizer_of(config.model)
    note = replace_template(tokenizer, config.template) if config.template is not None else ""
    if note and rank == 0:
        tell(note)
    return ChatBatches(
        config.data,
        tokenizer,
        global_batch=config.effective_batch,
        seqlen=config.seqlen,
        vocab=vocab,
        seed=config.seed,
        rank=rank,
        world=world,
        pad=config.pad,
        hold_out=config.eval_every > 0,
        eval_source=config.eval_data,
        positions=positions,
        until=until,
        # A graph that is replayed has no number that changes.
        learned=config.loss != "full" and not config.cuda_graph,
        bad_lines=config.bad_lines,
        template_args=config.arguments,
        format=config.format,
        columns=parsed(config.columns),
        mask_history=config.mask_history,
        long_text=config.long_text,
    )


def open_model(config: Config) -> tuple[HuggingFaceModel, int]:
    """The model of --model on the meta device, and the size of its vocabulary. ValueError for flags that it cannot do,
    and where --export could not be written."""
    ratio = config.remat_ratio if config.remat == "block" else 0.0
    model = blank_model(config.model, ratio, DTYPES[config.param_dtype])
    if config.lora:
        from trainer.finetuning import adapters  # which imports peft

        adapters.attach(model, config.model, random=config.random, **config.adapters)
        say(adapters.in_words(model))
    freeze_what_has_no_gradient(model, config.seqlen)
    if config.pad == "longest":
        check_short_rows(model, config.seqlen)
    model.random_init = config.random
    if config.export is not None:
        files_of(model.model, config.model)  # raises now, not after training
    most = getattr(model.model.config, "max_position_embeddings", None)
    if most is not None and config.seqlen > most:
        raise ValueError(
            f"--seqlen {config.seqlen}: the model has only {most} positions (max_position_embeddings of its "
            f"config.json); use --seqlen {most} or less"
        )
    if "dynamic" in str(model.rotary.get("rope_type")) and config.compile not in ("none", "blocks"):
        raise ValueError(
            f"--compile {config.compile}: rope_type dynamic of config.json branches on values, which one "
            "graph cannot; use --compile none"
        )
    if config.cuda_graph and (usual := model.longest_short(config.seqlen)):
        raise ValueError(
            "--cuda-graph: cannot choose between longrope's short and long factors; use --seqlen "
            f"{usual} or less, or leave --cuda-graph out"
        )
    return model, model.model.get_input_embeddings().num_embeddings


def load_adapter(config: Config, model: HuggingFaceModel, run: Run) -> None:
    """Begins with the adapters of --adapter, unless the run has some of its own. Raises as adapters.load."""
    if config.adapter is not None and not run.resume_point:
        from trainer.finetuning import adapters

        if note := adapter_note(config.adapter, config.model):
            say(note)
        adapters.load(config, model, run.group)


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


def check_memory(config: Config, model: HuggingFaceModel, world: int) -> None:
    """ValueError where a batch on a CPU needs more than the host has, and a smaller one would not. config: with the
    model's shape. Counted are the weights with their moments and gradients, the inputs of all blocks and the logits:
    what is inside of blocks comes on top."""
    size = {"fp32": 4, "bf16": 2}
    parts = [*model.parameters()]
    trained = sum(p.numel() for p in parts if p.requires_grad)
    frozen = sum(p.numel() * p.element_size() for p in parts if not p.requires_grad)

    def step_bytes(config: Config, ranks: int, batch: int) -> float:
        sharded = ranks if config.mode != "replicate" else 1
        tokens = batch * config.seqlen
        width = size[config.param_dtype]
        logits = config.vocab * (
            tokens if config.loss == "full" else min(tokens, config.loss_chunk)
        )
        kept = (config.depth * config.width * tokens + logits) * width
        own = frozen + trained * (4 + 2 * moment_size(config))
        return own / sharded + max(kept, 4 * trained / sharded)

    check_fits(config, *ranks_here(config, world), step_bytes, shape=())


def flops_model(config: Config, model: HuggingFaceModel) -> HuggingFaceModel | None:
    """A copy to count FLOPs on; None where rows have no one length."""
    return None if config.pad == "longest" else copy_on_meta(model)


def copy_on_meta(model: HuggingFaceModel) -> HuggingFaceModel:
    """A copy of a model on meta, to be run there: longrope leaves a tensor on meta in what is run."""
    copy = deepcopy(model)
    for module in copy.modules():
        vars(module).pop("forward", None)  # what is computed again is no work of the model
    copy.model.set_experts_implementation("batched_mm")  # as many products, and it runs on meta
    return copy


def report_model(run: Run, config: Config, model: HuggingFaceModel, device: torch.device) -> None:
    """Checks the model with the weights that it now has. Says what the reader should know of it and of the data."""
    if not config.random:  # else it has been done
        model.probe(device)
    if config.label_smoothing:
        model.plain_head = False
        run.step.loss_outside_model = True
        run.step.cross_entropy = partial(
            run.step.cross_entropy, label_smoothing=config.label_smoothing
        )
    if not model.plain_head and config.loss != "full":
        why = (
            f"the loss of {type(model.model).__name__} is not the cross-entropy of its head's product alone (scaled, "
            "capped, smoothed)"
        )
        if config.loss == "chunked":
            raise Refused(f"--loss chunked: {why}; use --loss full")
        run.step.chunk = 0
        say(f"--loss full: {why}")
    if config.pad == "fixed" and run.batches.padding > 0.5:
        run.say(
            "note: padding is computed, too; --pad longest or a smaller --seqlen computes less of it"
        )
    if config.pad == "pack":
        model.check_packed(device, run.batches.until)
    if model.noise:
        say(f"noise is off: {model.noise} of config.json")
    in_fp32 = {name for own in model.parts_in_fp32.values() for name in own}
    kept = [
        name for name in model.kept_in_fp32 if config.accum_sync == "last" or name not in in_fp32
    ]
    if config.param_dtype != "fp32" and kept:
        say(
            f"{len(kept)} parameters, which transformers keeps in fp32, are gathered in {config.param_dtype}, such as "
            f"{kept[0]}; use --param-dtype fp32 to compute with them as it does"
        )
    say_whether_it_stops(run, config, model)
    if usual := model.longest_short(config.seqlen):
        say(
            f"longrope: a micro-batch has the long factors where an example in it is longer than {usual} tokens, else "
            "the short ones, as in inference; where lengths are mixed, --batch 1 gives each its own"
        )
    passes = config.effective_batch / run.batches.epoch_samples
    if passes > 1:
        say(
            f"each step uses all {run.batches.epoch_samples} rows of --data {passes:.1f} times; a smaller "
            "--effective-batch uses each at most once"
        )


def say_whether_it_stops(run: Run, config: Config, model: HuggingFaceModel) -> None:
    """Names the tokens that end what is learned and at which generation goes on. --sample stops where
    the export does."""
    stops = end_tokens.stop_tokens(config.model, model.model.config)
    new = end_tokens.not_stopping(stops, run.batches.learned_ends)
    run.batches.ends = {*stops} if config.keep_eos else {*stops, *new.values()}
    if not new:
        return
    if config.keep_eos:
        what = f"--keep-eos leaves that so: {end_tokens.call(stops, new)}"
    elif config.lora and not config.merge:
        what = f"adapters cannot change that: {end_tokens.call(stops, new)}, or --merge"
    else:
        what = f"--export writes {end_tokens.KEY} {[*stops, *new.values()]}"
    say(
        f"answers end with {end_tokens.in_words(new)}, at which generation of --model does not stop "
        f"({end_tokens.KEY} {stops}); {what}"
    )


def has_exported(run: Run, config: Config) -> bool:
    """Whether this run, which has no steps left, wrote --export, as rank 0 sees it. Refused on all ranks where it has
    some, in the end of which --export would be in the way."""

    def written() -> bool:
        if not run.done and os.path.lexists(config.export):
            raise Refused(f"--export {config.export}: already exists; name a new folder")
        return was_exported(config)

    return config.export is not None and on_rank_0(written, run.group)


def export_and_describe(run: Run, config: Config, model: HuggingFaceModel) -> str:
    """Writes --export; returns the line to print. Raises CheckpointError."""
    ends = run.batches.learned_ends
    line = export(
        config, model, run.group, lambda: run.watchdog.beat(run.state.step, "export"), ends
    )
    if run.rank == 0 and config.save is not None:
        # The export is whole: without this the same command would only refuse it.
        with suppress(OSError, UnicodeError):
            Path(config.save, EXPORTED).write_text(f"{run.state.step}\n{export_mark(config)}")
    return f"export   {line}"
