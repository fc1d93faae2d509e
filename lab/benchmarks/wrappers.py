"""Compares wrappers and compile modes side by side, in one process group: the same model, optimizer and batches.

    python -m lab.benchmarks.wrappers simple:fwdbwd none:fwdbwd simple:none [-- FLAGS of main.py]
    torchrun --nproc-per-node 8 -m lab.benchmarks.wrappers simple:fwdbwd simple:blocks fsdp2:blocks ddp:blocks
    python -m lab.benchmarks.wrappers simple:none simple:none:muon simple:none:torch-muon -- --world 8

A setting is WRAPPER:COMPILE; fsdp2 and ddp are torch's own, compiled per block. A third word names the optimizer:
torch-muon is torch.optim.Muon on the DTensors that muon has, with the same AdamW for the rest. All settings' steps are
interleaved, so that a busy machine slows all of them alike; `ratio` is the median of the step-by-step ratios to the
first setting. All models are in memory at once: no memory is compared. Several ranks on one CPU measure the scheduler.
"""

import statistics
import sys
from dataclasses import replace

from trainer import config as flags
from trainer.distributed.environment import ranks
from trainer.terminal.output import fail, put

if __name__ == "__main__":  # before torch is imported, as in main.py
    _cut = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    if {"-h", "--help"} & {*sys.argv[1:_cut]}:
        sys.exit(put(__doc__))
    RANKS = ranks()
    SETTINGS = sys.argv[1:_cut]
    CONFIG = flags.parse(sys.argv[_cut + 1 :], RANKS[0])

import torch
from torch.distributed.tensor import DTensor

from trainer.data import Batches, DataError
from trainer.distributed.launch import connect, set_deterministic, shutdown
from trainer.logging import append_jsonl
from trainer.measuring import timing
from trainer.optimizer import Muon
from trainer.parallelize import build
from trainer.step import COMPILE_MODES

WARMUP = 3


def check_settings(settings: list[str], rank: int) -> None:
    """Exit code 2 and one line for what is no setting."""
    modes = dict(
        simple=COMPILE_MODES, none=COMPILE_MODES, fsdp2=("none", "blocks"), ddp=("none", "blocks")
    )
    unknown = [
        setting for setting in settings if parts(setting)[1] not in modes.get(parts(setting)[0], ())
    ]
    unknown += [
        setting for setting in settings if parts(setting)[2] not in ("adamw", "muon", "torch-muon")
    ]
    if unknown or not settings:
        fail(
            f"settings {' '.join(unknown) or '(none)'}: give WRAPPER:COMPILE, such as simple:fwdbwd fsdp2:blocks, or "
            "WRAPPER:COMPILE:OPTIMIZER, such as simple:none:muon",
            rank,
        )


def parts(setting: str) -> tuple[str, str, str]:
    """Wrapper, compile mode, optimizer."""
    wrapper, _, rest = setting.partition(":")
    mode, _, optimizer = rest.partition(":")
    return wrapper, mode, optimizer or "adamw"


class TorchMuon:
    """torch.optim.Muon in place of the Muon of a step, which is not told of refused steps."""

    def __init__(self, optimizer: Muon):
        self.ours = optimizer
        how = dict(optimizer.how)
        how.pop("ns_dtype")  # it is bf16
        self.theirs = torch.optim.Muon(
            optimizer.matrices, lr=float(optimizer.lr) * optimizer.ratio, **how
        )

    def __getattr__(self, name: str):
        return getattr(self.ours, name)

    @torch.no_grad()
    def step(self, grads: list[torch.Tensor], skip: torch.Tensor) -> None:
        n = len(self.ours.matrices)
        self.ours.adamw.step(grads[n:], skip)
        for p, grad in zip(self.ours.matrices, grads[:n], strict=True):
            p.grad = DTensor.from_local(
                grad, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
            )
        self.theirs.step()
        for p in self.ours.matrices:
            p.grad = None


def data(config: flags.Config, rank: int, world: int) -> Batches:
    """The batches of a rank, real or simulated."""
    sizes = dict(
        global_batch=world * config.batch * config.grad_accum,
        seqlen=config.seqlen,
        vocab=config.vocab,
    )
    return Batches(config.data, **sizes, seed=config.seed, rank=rank, world=world)


def try_plot(path: str) -> None:
    """Writes an empty figure. ValueError, one line, where that fails."""
    try:
        from matplotlib.figure import Figure

        Figure().savefig(path)
    except (ImportError, OSError, ValueError) as e:
        raise ValueError(f"--plot {path}: {e}; name a .png or .svg in a folder that exists") from e


def interleave(
    steps: list[tuple], batches: Batches, n: int, device: torch.device, rank: int = 0, begin=bool
) -> None:
    """Runs n steps of every (step, StepTimer), which take turns; warm-up does not count. begin: called before each."""
    for k in range(n):
        batch = [t.to(device) for t in next(batches)]
        turn = k % len(steps)  # each goes first as often as the others
        for step, timer in steps[turn:] + steps[:turn]:
            begin()
            with timer.step(excluded=k < WARMUP):
                loss = step(*batch)
        if rank == 0 and k in (0, n - 1):
            put(f"step {k + 1}: loss of the last setting {loss.item():.4f}")


def compare(
    settings: list[str], config: flags.Config, device: torch.device, rank: int = 0, world: int = 1
) -> list[dict]:
    """Rows of every setting, in order; the first is what `ratio` refers to."""
    configs = []
    for wrapper, mode, optimizer in map(parts, settings):
        system = replace(config.system, wrapper=wrapper, compile=mode)
        options = (
            replace(config.training, optimizer=optimizer.removeprefix("torch-"))
            if optimizer != "adamw"
            else config.training
        )
        configs.append(
            flags.resolve(
                replace(config, system=system, training=options),
                device.type,
                1 if config.world else world,
            )
        )
    config = configs[0]
    steps = [(build(one, device, world), timing.StepTimer(device)) for one in configs]
    for (step, _), setting in zip(steps, settings, strict=True):
        if parts(setting)[2] == "torch-muon":
            step.optimizer = TorchMuon(step.optimizer)
    interleave(steps, data(config, rank, world), config.steps, device, rank)
    rows = []
    first = steps[0][1].ms()
    for setting, options, (_, timer) in zip(settings, configs, steps, strict=True):
        ratio = statistics.median(a / b for a, b in zip(timer.ms(), first, strict=True))
        row = timing.environment(device) | dict(
            study="baselines", line=setting, flags=flags.setting(options)
        )
        row |= timing.stats(timer.ms()) | dict(
            world=flags.world_label(config, world), ratio=round(ratio, 4)
        )
        rows.append(row | dict(against=settings[0], interleaved=settings))
    return rows


def main(settings: list[str], config: flags.Config, rank: int, local_rank: int, world: int) -> int:
    """Compares, prints and appends rows. Exit codes: 0, 2 settings or flags that do not fit, 3 bad data."""
    check_settings(settings, rank)
    set_deterministic(config.deterministic)
    try:
        rows = compare(
            settings, config, connect(config, rank, local_rank, world), rank, config.world or world
        )
    except (ValueError, DataError) as e:
        fail(str(e), rank, 3 if isinstance(e, DataError) else 2)
    for row in rows if rank == 0 else ():
        append_jsonl(config.results, row)
        put(
            f"{row['line']:<16} {row['step_ms']:>8.1f} ms [{row['step_ms_min']:.1f}-{row['step_ms_max']:.1f}] "
            f"n {row['n']}  {row['ratio']:.3f} of {settings[0]}"
        )
    shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main(SETTINGS, CONFIG, *RANKS))
