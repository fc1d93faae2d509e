"""What saving costs at the flags of main.py: steps without it, in the foreground, with :async, in one run.

    python -m lab.benchmarks.saving [--rounds 5] [--between 8] [--check] [--small] [-- FLAGS of main.py]
    torchrun --nproc-per-node 8 -m lab.benchmarks.saving --check -- --save /shared/disk

A round: steps; a save in the foreground; steps; a save in the background and the steps beside it (none in the first, so
that the peaks of resident memory of both kinds compare). MB/s are of one rank, read from the page cache. Files go to a
new directory in --save (or here), which is removed at the end. --check: with --deterministic, a model of another seed
that loads a step must hold the same bits as the saved one, and 5 steps later the same losses and bits.
"""

import argparse
import gc
import hashlib
import os
import shutil
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from lab.sweeps.sweep import TINY
from trainer import config as flags
from trainer.distributed.terminal import fail, ranks

if __name__ == "__main__":  # before torch is imported, as in main.py
    _parser = argparse.ArgumentParser(
        prog="saving", allow_abbrev=False, description=__doc__.split("\n")[0]
    )
    _parser.add_argument("--rounds", type=int, default=5)
    _parser.add_argument("--between", type=int, default=8, help="steps beside each save")
    _parser.add_argument("--check", action="store_true", help="bitwise resumption")
    _parser.add_argument("--small", action="store_true", help="toy sizes on a CPU, to try it out")
    _parser.add_argument("flags", nargs="*", metavar="-- FLAGS", help="of main.py")
    RANKS = ranks()
    ARGS = _parser.parse_args()
    if ARGS.rounds < 1:
        fail(f"--rounds {ARGS.rounds}: must be at least 1", RANKS[0])
    CONFIG = flags.parse([*TINY * ARGS.small, *ARGS.flags], RANKS[0])

import torch
import torch.distributed as dist

from trainer.checkpoint import load as checkpoint
from trainer.checkpoint.manifest import check_directory, digest, verify
from trainer.checkpoint.save import Saver, write_tensors
from trainer.data import Batches
from trainer.distributed.control import control_group
from trainer.distributed.launch import connect, set_deterministic, shutdown
from trainer.logging import append_jsonl
from trainer.measuring import memory, timing
from trainer.parallelize import build
from trainer.step import local


class Trained:
    """A step, its batches, and savers to FOLDER/sync and FOLDER/async."""

    def __init__(
        self, c: flags.Config, device: torch.device, world: int, group, folder: str, seed: int = 0
    ):
        self.c = c
        self.device = device
        self.group = group
        self.folder = folder
        self.k = 0
        self.step = build(replace(c, training=replace(c.training, seed=seed)), device, world)
        shape = dict(global_batch=world * c.batch * c.grad_accum, seqlen=c.seqlen, vocab=c.vocab)
        self.batches = Batches(c.data, **shape, seed=0, rank=dist.get_rank(), world=world)

    def ms(self, work, *args) -> float:
        wait = torch.cuda.synchronize if self.device.type == "cuda" else bool
        wait()
        start = time.perf_counter()
        self.result = work(*args)
        wait()
        return 1e3 * (time.perf_counter() - start)

    def train(self, n: int) -> list[float]:
        """ms of n steps; `losses` are theirs."""
        times = []
        self.losses = []
        self.k = self.k + n
        for _ in range(n):
            times.append(self.ms(self.step, *(t.to(self.device) for t in next(self.batches))))
            self.losses.append(self.result.item())
        return times

    def saver(self, kind: str) -> Saver:
        os.makedirs(where := f"{self.folder}/{kind}", exist_ok=True)
        output = replace(self.c.output, save=where, save_async=kind == "async", keep=1)
        return Saver(replace(self.c, output=output), self.step, self.batches, self.group)

    def bits(self) -> tuple:
        """The last losses, and a hash of this rank's parameters, moments and step count."""
        found = hashlib.blake2b()
        for name, t in sorted(checkpoint.tensors(self.step).items()):
            found.update(
                name.encode()
                + local(t).cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            )
        return self.losses, found.digest()


def costs(run: Trained, rounds: int, between: int) -> dict:
    """ms of steps and saves, MiB resident."""
    run.train(3)
    sync = run.saver("sync")
    background = None
    peaks = {}
    times = {kind: [] for kind in ("step", "sync", "async", "beside", "written")}

    def peak(kind: str) -> None:  # since the last call
        peaks.setdefault(f"peak_{kind}_rss_mib", memory.peak("cpu")["peak_rss_mib"])
        memory.reset_peak("cpu")

    memory.reset_peak("cpu")
    with ExitStack() as stack:
        for r in range(rounds):
            times["step"] += run.train(between)
            peak("step")
            times["sync"].append(run.ms(sync.save, run.k))
            peak("sync")
            times["step"] += run.train(between)
            background = background or stack.enter_context(run.saver("async"))
            start = time.perf_counter()
            times["async"].append(run.ms(background.save, run.k))
            future = background.pending[1]
            future.add_done_callback(
                lambda _, at=start: times["written"].append(1e3 * (time.perf_counter() - at))
            )
            for _ in range(between if r else 0):
                ms = run.train(1)
                times["beside"] += ms if not future.done() else []
            background.wait()
            peak("beside" if r else "async")
    row = dict(first_async_ms=round(times["async"][0], 3)) | peaks
    for kind, ms in times.items():
        told = timing.stats(ms, kind)
        row |= {f"{kind}_n": told.pop("n"), **told}
    return row | dict(async_over_sync=round(row["async_ms"] / row["sync_ms"], 4))


def rates(run: Trained) -> dict:
    """MB/s of this rank's tensors, in steps of a save and a resumption."""
    state = checkpoint.tensors(run.step)
    rank = dist.get_rank()
    folder = f"{run.folder}/sync"
    size = sum(local(t).nbytes for t in state.values())
    saved = f"{folder}/{checkpoint.steps_in(folder)[0]}"
    new = checkpoint.on_rank_0(lambda: tempfile.mkdtemp(dir=folder), run.group)
    ms = dict(
        write=run.ms(write_tensors, new, state, run.group),
        crc=run.ms(digest, f"{new}/__{rank}_0.distcp"),
        verify=run.ms(verify, saved, rank, dist.get_world_size()),
        load=run.ms(checkpoint.load, checkpoint.newest([saved], run.group), run.step, run.group),
    )
    return dict(state_mib=round(size / 2**20, 1)) | {
        f"{k}_mb_s": round(size / t / 1e3, 1) for k, t in ms.items()
    }


def resumed(make) -> dict:
    """Whether another model that loads a step has its bits, and after 5 more steps the losses and bits of the first."""
    run = make(seed=0)
    run.train(3)
    with run.saver("async") as saver:
        saver.save(run.k)
        saved = run.bits()
        run.train(5)
    expected = run.bits()
    path = f"{run.folder}/async/step-00000003"
    del saver, run
    run = make(seed=1)
    found = checkpoint.newest([path])
    run.losses = saved[0]
    run.batches.sample = found.about["samples"]
    differed = run.bits() != saved
    checkpoint.load(found, run.step, run.group)
    same = differed and run.bits() == saved
    run.train(5)
    every = checkpoint.on_all(lambda: (same, run.bits() == expected), run.group)
    return dict(
        resumed_bitwise=all(state for state, _ in every),
        went_on_bitwise=all(steps for _, steps in every),
    )


def main(args: argparse.Namespace, c: flags.Config, rank: int, local_rank: int, world: int) -> int:
    """Measures, then checks if asked to. Exit codes: 0, 2 flags that do not fit, 4 resumed bits differ."""
    device_type = (
        ("cuda" if torch.cuda.is_available() else "cpu") if c.device == "auto" else c.device
    )
    try:
        c = flags.resolve(c, device_type, world)
        check_directory(c.save or ".")
        set_deterministic(c.deterministic)
        device = connect(c, rank, local_rank, world)
    except ValueError as e:
        fail(str(e), rank)
    # By way of what removes the folder.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    folder = checkpoint.on_rank_0(lambda: tempfile.mkdtemp(prefix="save-cost-", dir=c.save or "."))
    make = partial(Trained, c, device, world, control_group())
    row = timing.environment(device) | dict(study="save", world=world, flags=flags.setting(c))
    check = row | dict(study="resume", flags=row["flags"] | dict(deterministic=True))

    def tell(row: dict) -> None:
        if rank == 0:
            append_jsonl(c.results, row)
            shown = {key: value for key, value in row.items() if key != "flags"}
            print("\n".join(f"{key:<20} {value}" for key, value in shown.items()), flush=True)

    try:
        run = make(folder)
        row |= costs(run, args.rounds, args.between) | rates(run)
        row |= memory.peak(device) if device.type == "cuda" else {}
        tell(row)
        if args.check:
            del run
            torch._dynamo.reset()  # compiled code holds the model
            gc.collect()
            set_deterministic(True)
            check |= resumed(partial(make, f"{folder}/resumed"))
            tell(check)
    finally:
        set_deterministic(c.deterministic)
        if rank == 0:
            shutil.rmtree(folder)
        signal.signal(signal.SIGTERM, before)
    shutdown()
    return 0 if check.get("resumed_bitwise", True) and check.get("went_on_bitwise", True) else 4


if __name__ == "__main__":
    sys.exit(main(ARGS, CONFIG, *RANKS))
