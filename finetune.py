"""Fine-tunes a causal language model of Hugging Face under simple_fsdp.data_parallel, from a folder to a folder.

    python finetune.py --model DIR --data chat.jsonl --export OUT                     # one rank, CPU or GPU
    torchrun --nproc-per-node 4 finetune.py --model DIR --data chat.jsonl --export OUT --micro-batch 2 \\
        --effective-batch 64 --remat block --remat-ratio 0.5 --loss chunked --save runs/a           # several
    python finetune.py --model DIR --data chat.jsonl --preview                        # what is learned of an example

A run reads from top to bottom, as main.py does, whose comments explain `train_step`; what differs is commented here.
Flags, rows, checkpoints and exit codes are main.py's; see --help. Each rank reads its rows of each tensor, stores them
in fp32, and no rank ever holds the whole model. Needs the extra `hf`: pip install -e '.[hf]'.

Shapes: B rows of this rank in a batch, b of them in a micro-batch, T tokens in each.
"""

import os
import signal
import sys

from trainer.terminal.output import answering, fail, import_torch, need_packages, put, tell

if __name__ == "__main__":
    need_packages("finetune.py", "torch", "tyro", "rich", "numpy", "safetensors")

from trainer.checks import likely_device
from trainer.distributed.environment import ranks
from trainer.finetuning import config as finetuning_flags
from trainer.finetuning.checks import check_before_torch
from trainer.terminal.progress import Progress
from trainer.terminal.text import on_ranks

if __name__ == "__main__":  # before torch is imported: --help and bad flags answer at once
    for NAME, VALUE in (("HF_HUB_OFFLINE", "1"), ("USE_HUB_KERNELS", "NO")):  # all is in --model
        os.environ.setdefault(NAME, VALUE)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C has no traceback; Signals takes over
    RANK, LOCAL_RANK, WORLD = ranks()
    CONFIG = finetuning_flags.parse(sys.argv[1:], RANK, WORLD)
    if RANK == 0:
        check_before_torch(CONFIG, WORLD)
        if not CONFIG.preview and CONFIG.compile != "none" and likely_device(CONFIG) == "cpu":
            tell("note: compiles for minutes on a CPU unless cached; --compile none does not")
    PROGRESS = Progress(f"importing torch and transformers{on_ranks(WORLD)}", speak=RANK == 0)
    import_torch(RANK, CONFIG.debug)

import torch
from torch import Tensor

from trainer import config as flags
from trainer.data import DataError
from trainer.finetuning.checks import check_export, check_paths_and_packages
from trainer.finetuning.load import load_weights
from trainer.finetuning.model import blank_model
from trainer.finetuning.run import (
    check_memory,
    export_and_describe,
    flops_model,
    has_exported,
    load_adapter,
    open_data,
    open_model,
    report_model,
)
from trainer.optimizer import learning_rate
from trainer.parallelize import make_mesh, make_optimizer, materialise, training_step, wrap
from trainer.run import Run
from trainer.step import Step
from trainer.trackers import leave

PREVIEW = 200  # characters of each part of the example that is shown before the first step


def show(config: finetuning_flags.Config, world: int) -> None:
    """Prints what a run would say of --data, and an example of each form with what is learned of it marked."""
    try:
        config = flags.resolve(config, "cpu", world)
        model = blank_model(config.model)
        vocab = model.model.get_input_embeddings().num_embeddings
        with answering():
            data = open_data(config, vocab, until=model.can_share_prefix)
            put(data.report(color=sys.stdout.isatty()), safe=True)
    except (ValueError, DataError) as error:
        fail(str(error), 0, 3 if isinstance(error, DataError) else 2)


def train_step(step: Step, tokens: Tensor, targets: Tensor, **inputs: Tensor) -> Tensor:
    """One optimizer step, that of main.py. tokens, targets [B, T] -> the loss of the whole batch, averaged over all
    ranks. inputs: more of the batch by name, such as position_ids [B, T]."""
    if step.whole_step is not None:
        return step.whole_step(tokens, targets, **inputs)
    divisor = step.loss_divisor(targets)
    loss, grads = 0.0, None
    with step.trained_parameters() as params:
        for x, y, extra in step.micro_batches(tokens, targets, inputs):  # [b, T]
            micro_loss = step.forward(x, y, divisor, **extra)
            grads = step.accumulate(grads, step.backward(micro_loss, params))
            loss = loss + micro_loss.detach()
    grads = step.reduce(grads)
    loss = step.average(loss)
    with torch.no_grad():
        if step.compiled_update is not None:
            norm, skip = step.compiled_update(grads, loss)
        else:
            norm = step.gradient_norm(grads)
            skip = step.skip_update(loss, norm)
            step.optimizer.step(step.clipped(grads, norm), skip)
    step.grad_norm, step.skipped = norm, skip
    return loss


def main(
    config: finetuning_flags.Config,
    rank: int,
    local_rank: int,
    world: int,
    progress: Progress | None = None,
) -> int:
    """One run of the flags; returns its exit code. On an error or a signal `run` ends it: a line, a row, a save."""
    with Run(config, check_paths_and_packages, rank, local_rank, world, progress) as run:
        config = run.config
        device = run.device
        world = run.world

        # Model of --model: on the meta device, where no parameter has memory yet.
        model, vocab = open_model(config)

        # Data: a template makes tokens of chats. longrope chooses its factors by the positions that there are, without
        # padding.
        positions = model.longest_short(config.seqlen) > 0
        data = open_data(config, vocab, rank, world, positions, model.can_share_prefix)

        # Flags: the model's shape, and steps for --epochs, are known now.
        shape = model.model.config
        config = config.completed(
            shape.num_hidden_layers, shape.hidden_size, vocab, data.epoch_samples
        )
        check_memory(config, model, world)
        check_export(config)  # again: --epochs are steps now
        attention = f"{shape._attn_implementation} of transformers"
        run.find_checkpoint_and_open_log(
            data, model, attention, config=config, counted=flops_model(config, model)
        )
        written = has_exported(run, config)
        if run.done and (config.export is None or written):
            return 0
        run.stages.add("model")

        # Mesh and wrapper: from here on a parameter is this rank's shard, which is whole in forward.
        mesh = make_mesh(config, device, world)
        wrap(model, config, mesh)
        run.stages.add("wrap")

        # Memory for the shards on the device.
        materialise(model, config, device)
        run.stages.add("weights")

        # Optimizer: its state is sharded as the parameters are.
        optimizer = make_optimizer(config, model, mesh)
        run.stages.add("optimizer")

        # Step: the object whose methods train_step calls, by --compile; torch compiles in the first step.
        norms_callback = run.log_norms if config.verbose > 1 else None
        step = training_step(config, model, optimizer, mesh, run.check_for_stop, norms_callback)
        step.dynamic = config.pad == "longest"
        run.check_equal_weights(model)

        # Weights of --model. A checkpoint has them all; of --lora it holds the adapters alone.
        if not config.random and (config.lora or not run.resume_point):
            run.extra_columns |= load_weights(config, model, run.group)
        load_adapter(config, model, run)
        run.resume_into(step)
        report_model(run, config, model, device)
        if run.done:  # all steps were, but not the export
            with run.saver:
                run.say(export_and_describe(run, config, model))
            return 0

        with run.training(step, train_step) as step_fn:
            if rank == 0:
                tell(
                    f"the first example, with [[what is learned]]:\n{data.preview(0, False, PREVIEW)}"
                )
            for k in range(run.first, config.steps):
                lr = learning_rate(config, k)
                optimizer.lr.fill_(lr)
                with run.timed(k):
                    tokens, targets, inputs = run.next_batch()  # [B, T]
                    loss = step_fn(tokens, targets, **inputs)
                run.log_step(k, loss, lr)
                run.evaluate_if_due(k)
                run.save_if_due(k)

        # Export: a folder that transformers reads.
        if config.export is not None:
            with run.outside_steps("export"):
                run.sampled.append(export_and_describe(run, config, model))
    return run.code


if __name__ == "__main__":
    with PROGRESS:
        if CONFIG.preview:
            status = show(CONFIG, WORLD) if RANK == 0 else None
        else:
            status = main(CONFIG, RANK, LOCAL_RANK, WORLD, PROGRESS)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, when another rank has left first
    leave(status)
