"""Fine-tunes a causal language model of Hugging Face under simple_fsdp.data_parallel, from a folder to a folder.

    python finetune.py --model DIR --data chat.jsonl --export OUT                     # one rank, CPU or GPU
    torchrun --nproc-per-node 4 finetune.py --model DIR --data chat.jsonl --export OUT --micro-batch 2 \\
        --effective-batch 64 --remat block --remat-ratio 0.5 --loss chunked --save runs/a           # several
    python finetune.py --model DIR --data chat.jsonl --preview                        # what is learned of an example

The loop is here, from top to bottom; what surrounds it is trainer/run.py. Flags, rows, checkpoints and exit codes are
main.py's; see --help. Each rank reads its rows of each tensor, stores them in fp32, and no rank ever holds the whole
model. Needs the extra `hf`: pip install -e '.[hf]'.
"""

import os
import signal
import sys

from trainer.distributed.terminal import Progress, answering, fail, import_torch, put, ranks, tell
from trainer.finetuning import config
from trainer.finetuning.checks import check_at_once

if __name__ == "__main__":  # before torch is imported: --help and bad flags answer at once
    for NAME, VALUE in (("HF_HUB_OFFLINE", "1"), ("USE_HUB_KERNELS", "NO")):  # all is in --model
        os.environ.setdefault(NAME, VALUE)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C has no traceback; Signals takes over
    RANKS = ranks()
    CONFIG = config.parse(sys.argv[1:], RANKS[0], RANKS[2])
    if RANKS[0] == 0:
        check_at_once(CONFIG, RANKS[2])
    PROGRESS = Progress("importing torch and transformers", speak=RANKS[0] == 0)
    import_torch(RANKS[0], CONFIG.debug)

from trainer import config as flags
from trainer.data import DataError
from trainer.finetuning.checks import check, check_export
from trainer.finetuning.load import load_weights
from trainer.finetuning.model import blank_model
from trainer.finetuning.run import (
    check_memory,
    exported,
    has_exported,
    look,
    open_data,
    open_model,
    to_count,
)
from trainer.optimizer import learning_rate
from trainer.parallelize import make_optimizer, materialise, training_step, wrap
from trainer.run import Run

PREVIEW = 200  # characters of each part of the example that is shown before the first step


def show(c: config.Config, world: int) -> None:
    """Prints an example of --data, with what is learned of it marked."""
    try:
        c = flags.resolve(c, "cpu", world)
        vocab = blank_model(c.model).model.get_input_embeddings().num_embeddings
        with answering():
            put(open_data(c, vocab).preview(0, color=sys.stdout.isatty()))
    except (ValueError, DataError) as error:
        fail(str(error), 0, 3 if isinstance(error, DataError) else 2)


def main(
    c: config.Config, rank: int, local_rank: int, world: int, progress: Progress | None = None
) -> int:
    """One run of the flags; returns its exit code. B: rows of this rank in a batch, T: tokens of a row."""
    with Run(c, check, rank, local_rank, world, progress) as run:
        c = run.c
        device = run.device
        world = run.world
        model, vocab = open_model(c)  # on the meta device: no parameter has memory yet
        # longrope chooses its factors by the positions that there are, without padding.
        positions = model.longest_short(c.seqlen) > 0
        data = open_data(c, vocab, rank, world, positions, model.takes_until)
        shape = model.model.config
        c = c.completed(shape.num_hidden_layers, shape.hidden_size, vocab, data.epoch_samples)
        check_memory(c, model, world)
        check_export(c)  # again: --epochs are steps now
        attention = f"{shape._attn_implementation} of transformers"
        run.open(data, model, attention, c=c, counted=to_count(c, model))
        written = has_exported(run, c)
        if run.done:
            run.already_done()
            if c.export is None or written:
                return 0
        run.stages.add("model")

        # data_parallel: a parameter is this rank's shard, whole in forward.
        mesh = wrap(model, c, device, world)
        run.stages.add("wrap")
        materialise(model, c, device)  # memory on the device, and values
        run.stages.add("weights")
        optimizer = make_optimizer(c, model, mesh)
        run.stages.add("optimizer")
        step = training_step(
            c, model, optimizer, mesh, run.between, run.norms if c.verbose > 1 else None
        )
        step.dynamic = c.pad == "longest"
        run.agree_on_draws(model)
        # A checkpoint of --lora holds the adapters alone.
        if not c.random and (c.lora or not run.found):
            run.told |= load_weights(c, model, run.group)
        run.take(step)
        look(run, c, model, device)
        if run.done:
            with run.saver:
                run.say(exported(run, c, model))
            return 0

        with run.training(step) as train_step:
            if rank == 0:
                tell(
                    f"the first example, with [[what is learned]]:\n{data.preview(0, False, PREVIEW)}"
                )
            for k in range(run.first, c.steps):
                optimizer.lr.fill_(lr := learning_rate(c, k))
                with run.timed(k):
                    tokens, targets, inputs = run.batch()  # [B, T]
                    # Of the whole batch, averaged over all ranks.
                    loss = train_step(tokens, targets, inputs)
                run.log(k, loss, lr)
                if c.eval_every and ((k + 1) % c.eval_every == 0 or k + 1 == c.steps):
                    run.evaluate()
                if c.save_every and (k + 1) % c.save_every == 0:
                    run.save()
        if c.export is not None:
            with run.aside("export"):
                run.sampled.append(exported(run, c, model))
    return run.code


if __name__ == "__main__":
    with PROGRESS:
        if CONFIG.preview:
            status = show(CONFIG, RANKS[2]) if RANKS[0] == 0 else None
        else:
            status = main(CONFIG, *RANKS, PROGRESS)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, when another rank has left first
    sys.exit(status)
