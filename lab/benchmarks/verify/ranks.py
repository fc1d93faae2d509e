"""The ranks of a check: they train each of several settings on the same batches and tell losses, norms and times.

    torchrun --nproc-per-node 2 lab/benchmarks/verify/ranks.py TOLD.json ASKED

ASKED, as JSON: {"settings": {name: flags of main.py}, "steps": 10, "traces": a folder or "", "world": simulated ranks
or 0, "limits": {"first_step", "step"}: seconds without progress, "folder": where stacks go then}. With traces, the
steps of settings take turns, so that a busy machine slows all alike, and rank 0 profiles two more of each. TOLD.json
gets {name: {"losses", "norms": of each step, "bits": a checksum of all parameters, "ms": of the steps after warm-up}}.
"""

import json
import sys
import zlib
from dataclasses import replace
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from lab.benchmarks.nodes import data
from lab.benchmarks.wrappers import interleave
from simple_fsdp import disable_data_parallel
from trainer import config as flags
from trainer.distributed.launch import connect, set_deterministic, shutdown
from trainer.distributed.terminal import fail, ranks
from trainer.fault_tolerance.watchdog import Watchdog
from trainer.measuring import timing
from trainer.parallelize import build
from trainer.step import Step

PROFILED = 2


def checksum(step: Step) -> int:
    """Of all parameters, whole. Collective."""
    found = 0
    with disable_data_parallel():
        for p in step.model.parameters():
            whole = p.full_tensor() if isinstance(p, DTensor) else p
            found = zlib.crc32(whole.detach().cpu().numpy().tobytes(), found)
    return found


class Trained:
    """The step of a setting, which notes losses and norms and does not wait for the device."""

    def __init__(
        self, c: flags.Config, device: torch.device, world: int, watchdog: Watchdog, limits: dict
    ):
        self.c = c
        self.device = device
        self.watchdog = watchdog
        self.limits = limits
        self.step = build(c, device, world)
        self.timer = timing.StepTimer(device)
        self.losses = []
        self.norms = []

    def __call__(self, *batch: torch.Tensor) -> torch.Tensor:
        number = len(self.losses) + 1
        self.watchdog.limit = self.limits["step" if self.losses else "first_step"]
        self.watchdog.beat(number, "step")
        loss = self.step(*batch)
        self.losses.append(loss.detach().clone())
        self.norms.append(self.step.grad_norm.clone())
        return loss

    def told(self) -> dict:
        losses, norms = ([t.item() for t in each] for each in (self.losses, self.norms))
        return dict(losses=losses, norms=norms, ms=self.timer.ms(), bits=checksum(self.step))


def train(
    asked: dict,
    configs: dict[str, flags.Config],
    device: torch.device,
    rank: int,
    world: int,
    watchdog: Watchdog,
) -> dict[str, dict]:
    """What each setting did. Collective."""
    told = {}
    for names in [[*configs]] if asked["traces"] else [[name] for name in configs]:
        torch._dynamo.reset()
        trained = {
            name: Trained(configs[name], device, world, watchdog, asked["limits"]) for name in names
        }
        batches = data(configs[names[0]], rank, world)
        interleave(
            [(each, each.timer) for each in trained.values()],
            batches,
            asked["steps"],
            device,
            rank=1,
        )
        for name, each in trained.items():
            told[name] = each.told()
            first = len(each.losses)
            folder = f"{asked['traces']}/{name}" if rank == 0 else None
            profile = timing.Profile(folder, first, PROFILED, rank, device)
            for k in range(first, first + PROFILED if asked["traces"] else first):
                with profile.step(k):
                    each(*(t.to(device) for t in next(batches)))
    return told


def main(file: str, asked: dict, rank: int, local_rank: int, processes: int) -> None:
    """Trains, and writes the file on rank 0. ValueError: flags that do not fit."""
    world = asked["world"] or processes
    parsed = {name: flags.parse(words.split(), rank) for name, words in asked["settings"].items()}
    c = next(iter(parsed.values()))
    set_deterministic(c.deterministic)
    device = connect(
        replace(c, system=replace(c.system, world=asked["world"] or None)),
        rank,
        local_rank,
        processes,
    )
    configs = {name: flags.resolve(each, device.type, processes) for name, each in parsed.items()}
    with Watchdog(asked["limits"]["first_step"], rank, processes, asked["folder"]) as watchdog:
        told = train(asked, configs, device, rank, world, watchdog)
    shutdown()
    if rank == 0:
        Path(file).write_text(json.dumps(told))


if __name__ == "__main__":
    RANKS = ranks()
    try:
        main(sys.argv[1], json.loads(sys.argv[2]), *RANKS)
    except ValueError as error:
        fail(str(error), RANKS[0])
