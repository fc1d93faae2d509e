"""What can be refused before anything is taken: data files, directories, more memory than there is. Imports no torch.

check_before_torch(config, world)       # on rank 0: ends the process with one line and exit code 2 or 3, or returns
check_paths_and_memory(config, world)   # on each rank: ValueError
compile_note(config, world)             # a line for a run that compiles on a CPU
never_run(torch.__version__)            # a line for a torch that is not in TORCH
"""

import importlib.util
import os
import re
from bisect import bisect_right
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from statistics import linear_regression, mean

from trainer import config as flags
from trainer import step_costs
from trainer.checkpoint.manifest import check_directory
from trainer.logging import check_writable, read_jsonl
from trainer.terminal.command_line import as_given
from trainer.terminal.output import fail
from trainer.terminal.text import grouped

WRITTEN = "save", "profile", "prepared", "export"  # flags of folders that a run writes
CACHE = "TORCHINDUCTOR_CACHE_DIR"  # where torch cannot make it, it cannot be imported
SHAPE = "depth", "width", "grow", "vocab", "seqlen"  # flags of the size of a model and its rows
HIDDEN = re.compile(r"\..")  # how names begin that are no data
FIRST_STEPS = Path(__file__).parents[1] / "results/first_step.jsonl"  # published rows
TORCH = "2.11.0", "2.12.1", "2.13.0", "2.14.1"  # a row each in docs/how_it_works.md


def never_run(version: str) -> str:
    """A warning where no version of torch with these first two numbers was ever run; empty elsewhere."""
    public = version.partition("+")[0]
    minors = {known.rpartition(".")[0] for known in TORCH}
    if ".".join(public.split(".")[:2]) in minors:
        return ""
    return (
        f"warning: torch {version} was never run with this program, {', '.join(TORCH)} were; "
        f"./launch.sh test versions {public} tests it"
    )


def check_paths_and_memory(config: flags.Config, world: int) -> None:
    """ValueError, one line, for what resolved flags name and need outside, data files apart."""
    from trainer.data import check_source  # with numpy, which --help does not need

    check_source(config.data)
    check_outputs(config)
    check_fits(config, *ranks_here(config, world))


def check_outputs(config: flags.Config) -> None:
    """ValueError where --results, --save, --profile or the folder of torch's compile cache cannot be written."""
    check_writable(config.results)
    cache = os.environ.get(CACHE) or None
    for flag, path in (("--save", config.save), ("--profile", config.profile), (CACHE, cache)):
        if path is not None:
            check_directory(path, flag)


def check_apart(config: flags.Config, read: Iterable[str | Path]) -> None:
    """ValueError where what a run writes is one of the files that it reads, `read`, or lies in such a folder of data
    and so changes it: a run that saves could not be resumed."""
    for name in ("results", *WRITTEN):
        if (path := getattr(config, name, None)) is None:
            continue
        for file in read:
            source = os.path.realpath(file)
            target = os.path.realpath(path)
            if target == source and os.path.isfile(source):
                raise ValueError(
                    f"{as_given(name, path)}: is a file that this run reads; name another"
                )
            inside = Path(os.path.relpath(target, source)).parts  # the first is .. if it is not
            if config.save and os.path.isdir(source) and not any(map(HIDDEN.match, inside)):
                raise ValueError(
                    f"{as_given(name, path)}: lies in {file}, whose files are the data, which must not change "
                    "if the run is to go on from --save; name a place outside, or a hidden folder in it"
                )


def check_before_torch(config: flags.Config, world: int) -> None:
    """For rank 0, before torch is imported and with flags as they are given: tells what `check_paths_and_memory` finds,
    and what is wrong with the data files as this rank sees them. A rank that sees others says so when all have met."""
    from trainer.data import DataError, check_files, inputs

    device = likely_device(config)
    try:
        if config.optimizer == "adamw8bit" and importlib.util.find_spec("torchao") is None:
            raise ValueError("--optimizer adamw8bit: needs torchao; pip install -e '.[lowbit]'")
        check_apart(config, [*inputs(config.data), *filter(None, [config.init])])
        filled = flags.filled(config, device).with_batch_sizes_for(config.world or world)
        check_paths_and_memory(filled, world)
        seqlen = config.seqlen or min(defaults["seqlen"] for defaults in flags.DEFAULTS.values())
        check_files(config.data, seqlen, hold_out=config.eval_every > 0)
    except ValueError as e:
        fail(str(e), 0)
    except DataError as e:
        fail(str(e), 0, 3)


def likely_device(config: flags.Config) -> str:
    """The device of a run before torch can say which there are."""
    if config.device == "auto":
        return "cuda" if step_costs.may_have_gpu() else "cpu"
    return config.device


def first_step_cpu_s(mode: str, depth: int, rows: Iterable[dict]) -> float | None:
    """CPU seconds of one rank's first step under --compile `mode`, without a cache, by rows of
    lab.benchmarks.first_step: their mean, or on a line over depth where they have several depths. None where no row has
    that mode."""
    times = [
        (row["depth"], row["first_step_cpu_s"])
        for row in rows
        if row["cache"] == "cold" and row["compile"] == mode and "model" not in row["flags"]
    ]
    if len({layers for layers, _ in times}) > 1:
        slope, start = linear_regression(*zip(*times, strict=True))
        return start + slope * depth
    return mean(seconds for _, seconds in times) if times else None


def compile_note(config: flags.Config, world: int, rows: Path = FIRST_STEPS) -> str:
    """A line on how long the first step will take where it compiles on a CPU, and what is shorter; empty elsewhere."""
    device = likely_device(config)
    depth = flags.filled(config, device).depth
    if device != "cpu" or config.compile == "none" or not rows.exists():
        return ""
    measured = read_jsonl(rows)
    seconds = first_step_cpu_s(config.compile, depth, measured)
    blocks = first_step_cpu_s("blocks", depth, measured)
    each = " a rank" * (world > 1 and not config.world)
    takes = "minutes" if seconds is None else f"about {seconds:.0f} s of CPU time{each}"
    shorter = "none: 0 s"
    if blocks is not None and config.compile != "blocks":
        shorter = f"blocks: {blocks:.0f} s, {shorter}"
    return f"note: compiles for {takes} unless cached; --compile {shorter}"


def available() -> int:
    """Bytes of the host's memory that this process and others may still take, by the system and by its container."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    with suppress(OSError, TypeError):  # macOS
        limits.append(
            int(re.search(r"^MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text(), re.M)[1])
            * 1024
        )
    for file in memory_limits():
        with suppress(OSError, ValueError):  # "max"
            limits.append(int(file.read_text()))
    return min(limits)


def memory_limits(cgroups: Path = Path("/proc/self/cgroup")) -> list[Path]:
    """The files that may limit this process's memory: of its control groups and of all around them. A batch system or
    systemd makes a group for each job, a container hides those around it."""
    files = []
    for line in cgroups.read_text().splitlines() if cgroups.exists() else []:
        _, kinds, path = line.split(":", 2)
        # Of cgroup 1, of cgroup 2, which names no kinds.
        name = "memory.limit_in_bytes" if kinds else "memory.max"
        root = Path("/sys/fs/cgroup", "memory" * (kinds != ""))
        if not kinds or "memory" in kinds.split(","):
            files += [
                root / group.relative_to("/") / name for group in (Path(path), *Path(path).parents)
            ]
    return files


def ranks_here(config: flags.Config, world: int) -> tuple[int, int]:
    """How many ranks there are, and how many of them this machine runs; of simulated ones it runs one."""
    several = world > 1 and not config.world
    return config.world or world, int(os.environ.get("LOCAL_WORLD_SIZE") or 1) if several else 1


def check_fits(
    config: flags.Config,
    ranks: int,
    here: int,
    step_bytes=step_costs.step_bytes,
    shape: Iterable[str] = SHAPE,
) -> None:
    """ValueError with the batch that would fit, if a step of resolved flags on `ranks`, of which `here` run on this
    machine, needs more than the host has. For a CPU alone: a GPU's allocator says so itself, and harms nobody. shape:
    the flags to lower where no batch fits; without them such a run is left to fail by itself."""
    free = available() / here
    needs = step_bytes(config, ranks, config.batch)
    if config.device != "cpu" or config.force or needs <= free:
        return
    room = 0.8 * free  # a process also holds torch itself, and what the formula leaves out
    most = (
        bisect_right(range(config.batch), room, key=lambda batch: step_bytes(config, ranks, batch))
        - 1
    )
    if not (sizes := ("batch",) if most > 0 else shape):
        return
    accum = -(-config.batch * config.grad_accum // max(1, most))
    fix = f"--batch {most} --grad-accum {accum} would fit" if most > 0 else "lower one of them"
    needs, has = (f"{grouped(nbytes / 2**30, 1)} GiB" for nbytes in (needs * here, free * here))
    who = f"{here} ranks" if here > 1 else "a step"
    asked = flags.written(config, *sizes)
    raise ValueError(
        f"{asked}: {who} would take about {needs}, this machine has {has} free; {fix}; --force "
        "tries it"
    )
