"""Trains the transformer of model.py under simple_fsdp.data_parallel; appends a row of what it cost. See --help.

    python main.py                                                      # one rank, CPU or GPU
    torchrun --nproc-per-node 4 main.py --depth 8 --compile fwdbwd      # the main job

The loop is here, from top to bottom. What surrounds it (signals, hanging ranks, checkpoints, the log, the row) is
trainer/run.py. Where to add what: a second loss term in `cross_entropy` of model.py (a sum over tokens), an optimizer
as a subclass of AdamW in trainer/optimizer.py with a `step` of its own, made in `make_optimizer` of
trainer/parallelize.py, a schedule in `learning_rate` of trainer/optimizer.py (each with its name in trainer/config.py,
where the flags are), a figure of each logged step as `run.log(k, loss, lr, name=value)`, a column of the row as
`run.told["name"] = value`. Exit codes: trainer/fault_tolerance/errors.py.
"""

import signal
import sys

from trainer import config as flags
from trainer.checks import check, check_at_once
from trainer.distributed.terminal import Progress, import_torch, ranks

if __name__ == "__main__":  # before torch is imported: --help and bad flags answer at once
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C has no traceback; Signals takes over
    RANKS = ranks()
    CONFIG = flags.parse(sys.argv[1:], RANKS[0], RANKS[2])
    if RANKS[0] == 0:
        check_at_once(CONFIG, RANKS[2])
    PROGRESS = Progress("importing torch", speak=RANKS[0] == 0)
    import_torch(RANKS[0], CONFIG.debug)

from trainer.attention import choose_kernel
from trainer.checkpoint.weights import initialise
from trainer.data import Batches
from trainer.optimizer import learning_rate
from trainer.parallelize import make_optimizer, materialise, reference_model, training_step, wrap
from trainer.run import Run


def main(
    c: flags.Config, rank: int, local_rank: int, world: int, progress: Progress | None = None
) -> int:
    """One run of the flags; returns its exit code. B: rows of this rank in a batch, T: --seqlen."""
    with Run(c, check, rank, local_rank, world, progress) as run:
        # Every flag has a value; simulated ranks count.
        c = run.c
        device = run.device
        world = run.world
        attention = choose_kernel(c, device)[-1]
        data = Batches(
            c.data,
            global_batch=c.effective_batch,
            seqlen=c.seqlen,
            vocab=c.vocab,
            seed=c.seed,
            rank=rank,
            world=world,
            hold_out=c.eval_every > 0,
        )
        model = reference_model(c, device)  # on the meta device: no parameter has memory yet
        run.open(data, model, attention, counted=model)
        if run.done:
            return run.already_done()
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
        run.agree_on_draws(model)
        if c.init is not None:
            initialise(c, model, run.found, run.group)
        run.take(step)

        with run.training(step) as train_step:
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
    return run.code


if __name__ == "__main__":
    with PROGRESS:
        status = main(CONFIG, *RANKS, PROGRESS)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, when another rank has left first
    sys.exit(status)
