"""Trains the transformer of model.py under simple_fsdp.data_parallel; appends a row of what it cost. See --help.

    python main.py                                                      # one rank, CPU or GPU
    torchrun --nproc-per-node 4 main.py --depth 8 --compile fwdbwd      # the main job

A run reads from top to bottom: `main` makes model, step and data of the flags, and `train_step` is one step, each line
of it a method of `Step` in trainer/step.py. What surrounds it (signals, hanging ranks, checkpoints, the log, the row)
is `run`, of trainer/run.py.

Where to add what: a second loss term of logits and targets in `cross_entropy` of model.py (a sum over tokens; it counts
in training with --loss full; --loss chunked and evaluation compute the cross-entropy alone), an optimizer in
trainer/optimizer.py, made in `make_optimizer` of trainer/parallelize.py (CONTRIBUTING.md says what it must have), a
schedule in `learning_rate` of trainer/optimizer.py (each with its name in trainer/config.py, where the flags are), a
figure of each logged step as `run.log_step(k, loss, lr, name=value)` (if `run.logged`, since reading it waits for the
device), a column of the row as `run.extra_columns["name"] = value`. Exit codes: trainer/fault_tolerance/errors.py.

Shapes: B sequences of this rank in a batch, b of them in a micro-batch, T tokens in each (--seqlen).
"""

import signal
import sys

from trainer.terminal.output import import_torch, need_packages, tell

if __name__ == "__main__":
    need_packages("main.py", "torch", "tyro", "rich", "numpy", "safetensors")

from trainer import config as flags
from trainer.checks import check_before_torch, check_paths_and_memory, compile_note
from trainer.distributed.environment import ranks
from trainer.terminal.progress import Progress
from trainer.terminal.text import on_ranks

if __name__ == "__main__":  # before torch is imported: --help and bad flags answer at once
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C has no traceback; Signals takes over
    RANK, LOCAL_RANK, WORLD = ranks()
    CONFIG = flags.parse(sys.argv[1:], RANK, WORLD)
    if RANK == 0:
        check_before_torch(CONFIG, WORLD)
        if line := compile_note(CONFIG, WORLD):
            tell(line)
    PROGRESS = Progress(f"importing torch{on_ranks(WORLD)}", speak=RANK == 0)
    import_torch(RANK, CONFIG.debug)

import torch
from torch import Tensor

from trainer.attention_kernel import choose_kernel
from trainer.checkpoint.weights import initialise
from trainer.data import Batches
from trainer.optimizer import learning_rate
from trainer.parallelize import (
    make_mesh,
    make_optimizer,
    materialise,
    reference_model,
    training_step,
    wrap,
)
from trainer.run import Run
from trainer.step import Step
from trainer.trackers import leave


def train_step(step: Step, tokens: Tensor, targets: Tensor, **inputs: Tensor) -> Tensor:
    """One optimizer step. tokens, targets [B, T] -> the loss of the whole batch, averaged over all ranks. inputs: more
    of the batch by name, which model.py has none of."""
    # --compile step: nothing below runs. `OneGraph.step_graph` of trainer/step.py does all of it in one graph.
    if step.whole_step is not None:
        return step.whole_step(tokens, targets, **inputs)

    # How many labels the batch has on all ranks, divided by the ranks: each rank's loss is a sum over its labels
    # divided by this. So the step is that of one pass over the whole batch, however it is cut. One all-reduce.
    divisor = step.loss_divisor(targets)
    loss, grads = 0.0, None

    # The parameters are this rank's shards. (--accum-sync last: they are gathered here, once.)
    with step.trained_parameters() as params:
        # Between two micro-batches a signal may end the step with nothing changed.
        for x, y, extra in step.micro_batches(tokens, targets, inputs):  # [b, T]
            # Model and loss; each block's parameters are gathered before it runs and dropped after it.
            # --compile fwdbwd: one graph of `Step.micro_batch_loss`, of which the compiler makes backward as another.
            # model and blocks: only the model, or each of its blocks, is compiled. none: nothing is.
            micro_loss = step.forward(x, y, divisor, **extra)
            # The gradients, sharded as the parameters are: each block's are reduced, and so averaged over ranks,
            # as soon as they are there. Summed over micro-batches in fp32. (--wrapper fsdp2 and ddp: torch sums them in
            # .grad, and grads stay empty; `TorchWrapperStep` of trainer/parallelize.py.)
            grads = step.accumulate(grads, step.backward(micro_loss, params))
            loss = loss + micro_loss.detach()

    # What --accum-sync has left to reduce at the end, usually nothing. (--wrapper fsdp2 and ddp: grads come from .grad
    # here.) Then grads are those of the whole batch.
    grads = step.reduce(grads)
    loss = step.average(loss)
    with torch.no_grad():
        # On CUDA with --compile fwdbwd the lines below `else` do not run: `Step.update` of trainer/step.py, compiled,
        # does the same. (Not with adamw8bit, which torchao compiles; `training_step` of trainer/parallelize.py.)
        # These lines stand four times: here, in finetune.py, in `Step.__call__` and in `Step.update`. Change all four;
        # tests/test_house.py compares them.
        if step.compiled_update is not None:
            norm, skip = step.compiled_update(grads, loss)
        else:
            # Of the whole gradient: an all-reduce of the shards' squares.
            norm = step.gradient_norm(grads)
            # 1.0 if loss or norm is not finite, the norm 0 (as without labels) or above --norm-limit; else 0.0. It
            # stays on the device, where the optimizer reads it (adamw8bit: on the host, which waits). With 1.0 the
            # optimizer changes nothing, to the bit.
            skip = step.skip_update(loss, norm)
            # --clip; then each rank updates its shards.
            step.optimizer.step(step.clipped(grads, norm), skip)
    # For the log, and for what --nonfinite does about a skipped update.
    step.grad_norm, step.skipped = norm, skip
    return loss


def main(
    config: flags.Config, rank: int, local_rank: int, world: int, progress: Progress | None = None
) -> int:
    """One run of the flags; returns its exit code. On an error or a signal `run` ends it: a line, a row, a save."""
    with Run(config, check_paths_and_memory, rank, local_rank, world, progress) as run:
        # Flags: every one has a value now. --world: `world` is the number of simulated ranks.
        config = run.config
        device = run.device
        world = run.world

        # Data: each rank takes its rows of the same global batches.
        data = Batches(
            config.data,
            global_batch=config.effective_batch,
            seqlen=config.seqlen,
            vocab=config.vocab,
            seed=config.seed,
            rank=rank,
            world=world,
            hold_out=config.eval_every > 0,
        )

        # Model: on the meta device, where no parameter has memory yet.
        model = reference_model(config, device)
        attention = choose_kernel(config, device)[-1]
        # All ranks must have the same flags, code and data, and a checkpoint to resume from must be of these data.
        run.find_checkpoint_and_open_log(data, model, attention, counted=model)
        if run.done:
            return 0
        run.stages.add("model")

        # Mesh and wrapper: from here on a parameter is this rank's shard, which is whole in forward.
        mesh = make_mesh(config, device, world)
        wrap(model, config, mesh)
        run.stages.add("wrap")

        # Weights: memory for the shards on the device, with the same values for any number of ranks.
        materialise(model, config, device)
        run.stages.add("weights")

        # Optimizer: its state is sharded as the parameters are.
        optimizer = make_optimizer(config, model, mesh)
        run.stages.add("optimizer")

        # Step: the object whose methods train_step calls. Here --compile and --wrapper decide what they run; torch
        # compiles in the first step. norms_callback (-vv): called with the parameters and gradients of each step.
        norms_callback = run.log_norms if config.verbose > 1 else None
        step = training_step(config, model, optimizer, mesh, run.check_for_stop, norms_callback)
        run.check_equal_weights(model)
        if config.init is not None:
            initialise(config, model, run.resume_point, run.group)
        run.resume_into(step)  # if --save holds a checkpoint it is loaded: run.first steps are done

        # step_fn is train_step, with --cuda-graph replayed instead.
        with run.training(step, train_step) as step_fn:
            for k in range(run.first, config.steps):
                lr = learning_rate(config, k)
                optimizer.lr.fill_(lr)
                with run.timed(k):
                    tokens, targets, inputs = run.next_batch()  # [B, T]
                    loss = step_fn(tokens, targets, **inputs)
                run.log_step(k, loss, lr)  # ends the run, or warns, if the update was skipped
                run.evaluate_if_due(k)
                run.save_if_due(k)
    return run.code


if __name__ == "__main__":
    with PROGRESS:
        status = main(CONFIG, RANK, LOCAL_RANK, WORLD, PROGRESS)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, when another rank has left first
    leave(status)
