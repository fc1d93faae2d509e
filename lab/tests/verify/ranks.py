"""Trains each of several settings on the same batches, and writes losses, gradient norms and a checksum of the result.

    torchrun --nproc-per-node 2 lab/tests/verify/ranks.py FOLDER

FOLDER/settings.json is {name: flags of main.py}. Rank 0 writes FOLDER/trained.json, {name: {"losses", "norms": of each
step, "checksum": of all parameters in the end, or "refused": why this torch or so many ranks cannot run it}}. A rank
without progress writes its stacks to FOLDER/stacks-RANK and ends, and torchrun ends the others.
"""

import faulthandler
import json
import sys
import zlib
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lab.benchmarks.wrappers import data
from simple_fsdp import disable_data_parallel
from trainer import config as flags
from trainer.distributed.environment import ranks
from trainer.distributed.launch import connect, set_deterministic, shutdown
from trainer.parallelize import build
from trainer.step import Step

STEPS = 10
FIRST_STEP_S = 200  # seconds without progress: in a first step, which compiles
STEP_S = 60  # and in any other


def checksum(step: Step) -> int:
    """Of all parameters, whole. Collective."""
    found = 0
    with disable_data_parallel():
        for p in step.model.parameters():
            whole = p.full_tensor() if isinstance(p, DTensor) else p
            found = zlib.crc32(whole.detach().cpu().numpy().tobytes(), found)
    return found


def train(words: str, device: torch.device, rank: int, world: int, stacks) -> dict:
    """What one setting does. Collective."""
    torch._dynamo.reset()
    faulthandler.dump_traceback_later(FIRST_STEP_S, exit=True, file=stacks)
    try:
        c = flags.resolve(flags.parse(words.split(), rank), device.type, world)
        step = build(c, device, c.world or world)
    except ValueError as error:  # on all ranks alike
        return dict(refused=str(error))
    batches = data(c, rank, c.world or world)
    losses: list[Tensor] = []
    norms: list[Tensor] = []
    for _ in range(STEPS):
        losses.append(step(*(t.to(device) for t in next(batches))).item())
        norms.append(step.grad_norm.item())
        faulthandler.dump_traceback_later(STEP_S, exit=True, file=stacks)
    return dict(losses=losses, norms=norms, checksum=checksum(step))


def main(folder: Path, rank: int, local_rank: int, world: int) -> None:
    """Trains every setting; rank 0 writes what they did."""
    settings = json.loads((folder / "settings.json").read_text())
    first = flags.parse(next(iter(settings.values())).split(), rank)
    set_deterministic(first.deterministic)
    device = connect(first, rank, local_rank, world)
    with open(folder / f"stacks-{rank}", "w") as stacks:
        trained = {
            name: train(words, device, rank, world, stacks) for name, words in settings.items()
        }
        faulthandler.cancel_dump_traceback_later()
    shutdown()
    if rank == 0:
        (folder / "trained.json").write_text(json.dumps(trained))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *ranks())
