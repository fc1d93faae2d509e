"""What fits: the least recomputed share, and the accumulation, for a limit of memory; planned, then measured.

    ./launch.sh fit --model DIR --effective-batch 64 --micro-batch 1 2 4 8 --world 1 4 8 16 --seqlen 4096
    ./launch.sh fit --model DIR --plan --gpu a100-80                                      # planned alone, in seconds
    ./launch.sh fit --model TINY --device cpu --memory-mib 900 --compile none --steps 4   # resident memory, on a CPU

For each number of ranks and sequences of a micro-batch the planner (plan.py) says which --remat block:RATIO is the
least that fits. On a GPU, runs of finetune.py then begin there, with simulated ranks and random weights, and go up or
down until the least is found: one row for each run, and one for each answer. A second call runs what has no row yet.

The limit is one of what torch has allocated on a GPU, by default the GPU's memory less what is not the step's. On a CPU
(--device cpu, with --memory-mib) it is one of the resident memory of the run's process, Python and libraries among it,
after the first steps; there the planner adds its peak of the step to what a process holds that has imported them, and
times are not planned. Nothing enforces the limit: a run that takes more is measured, and counts as one that does not
fit; so does one that runs out of memory.
"""

import importlib.metadata
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

from tyro.conf import arg

from lab.planning import hardware, report, search
from lab.planning.architecture import read
from lab.report import published, tables
from lab.sweeps import sweep
from trainer import config as flags
from trainer.costs import link
from trainer.distributed.command_line import default, parse_beside
from trainer.distributed.spelling import flag
from trainer.distributed.terminal import fail, grouped, tell
from trainer.finetuning import config
from trainer.finetuning.checks import check_at_once
from trainer.logging import append_jsonl, check_writable, read_rows

PROGRAM = str(sweep.ROOT / "finetune.py")
FOUND = "--batch", "--remat", "--grad-accum"  # by this program
# Of what is measured.
NO_PART = "--export", "--save", "--resume", "--prepared", "--preview", "--eval-every"
IMPORTED = "import trainer.finetuning.run; from trainer.measuring.memory import memory_now; print(memory_now('cpu'))"


@dataclass(frozen=True)
class Fit:
    """All other flags are finetune.py's: python finetune.py --help lists them. They go to every run."""

    model: str = ""
    """Folder of the model: config.json and the tokenizer's files. Weights are random."""
    effective_batch: int = 64
    """Sequences of an optimizer step, on all ranks together."""
    micro_batch: Annotated[tuple[int, ...], arg(metavar="INT ...")] = (1, 2, 4, 8)
    """Sequences per rank and micro-batch, in turn."""
    world: Annotated[tuple[int, ...], arg(metavar="INT ...")] = (1, 4, 8, 16)
    """Numbers of ranks, in turn; more than one are simulated, over --link."""
    memory_mib: Annotated[
        float | None,
        default("of a GPU its memory less what is not the step's, as plan.py reserves it", "FLOAT"),
    ] = None
    """Limit of memory on a rank."""
    gpu: str = "h100"
    """GPU that is planned for, as plan.py names it."""
    plan: bool = False
    """Plan alone, run nothing."""
    results: str = "runs/fit.jsonl"
    """JSONL file to which rows are appended, and which says what has been measured."""
    plots: str | None = None
    """Folder for a figure of time against recomputed share. Needs matplotlib."""
    timeout: float = 1800.0
    """Seconds for one run."""
    any_commit: bool = False
    """Rows of other commits count as measured, too."""


def parse(argv: Sequence[str]) -> tuple[Fit, list[str]]:
    """Its own flags, and finetune.py's as words. Ends the process with exit code 2 and one line for a bad one."""
    own, words = parse_beside(
        Fit, (config.Tuning, config.System, config.Output, Fit), argv, "./launch.sh fit", __doc__
    )
    for name, low in (
        ("effective_batch", 1),
        ("micro_batch", 1),
        ("world", 1),
        ("memory_mib", 1),
        ("timeout", 1),
    ):
        values = (
            getattr(own, name) if isinstance(getattr(own, name), tuple) else (getattr(own, name),)
        )
        if wrong := [value for value in values if value is not None and not low <= value < 2**31]:
            fail(f"{flag(name)} {wrong[0]:g}: must be at least {low} and below 2**31", 0)
    words = [
        part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word])
    ]
    words = [word.replace("_", "-") if word.startswith("--") else word for word in words]
    if refused := next((word for word in words if word in (*FOUND, *NO_PART)), None):
        fail(
            f"{refused}: {'is what is looked for' if refused in FOUND else 'is no part of it'}; leave it out",
            0,
        )
    if not any(
        own.effective_batch % (n * micro) == 0 for n in own.world for micro in own.micro_batch
    ):
        fail(
            f"--effective-batch {own.effective_batch}: no --world x --micro-batch divides it; name others",
            0,
        )
    return own, words


def line_of(own: Fit, words: list[str], ranks: int, micro: int) -> list[str]:
    """The flags of a run of finetune.py, but --remat."""
    data = [] if "--data" in words else ["--data", str(data_of(own))]
    steps = [] if "--steps" in words else ["--steps", "6"]
    simulated = ["--world", str(ranks)] if ranks > 1 else []
    return [
        "--model",
        own.model,
        "--random",
        "--effective-batch",
        str(own.effective_batch),
        "--batch",
        str(micro),
        *data,
        *steps,
        *simulated,
        *words,
    ]


def data_of(own: Fit) -> Path:
    """The file of --data that this program writes if none is given: what it says has no influence on memory."""
    return Path(own.results).with_suffix(".data.jsonl")


def question(own: Fit, c: config.Config, runs: bool) -> search.Question | None:
    """What the planner is asked, of resolved flags. A model that it does not know: None and a line if there are runs,
    else ValueError."""
    on_cpu = c.device == "cpu"
    gpu = hardware.gpu(own.gpu)
    gpu = gpu._replace(arch="cpu") if on_cpu else hardware.field(gpu, c.compile == "none")
    try:
        a = read(own.model)
        shape = dict(depth=a.depth, width=a.width, head_dim=a.head_dim, vocab=a.vocab)
        asked = SimpleNamespace(**c.flat() | shape)
        if problem := search.misfit(asked, a, c.replicas):
            raise ValueError(problem)
    except ValueError as error:
        problem = str(error).replace("--hf ", "--model ")
        if not runs:
            raise ValueError(problem) from error
        tell(f"not planned: {problem}")
        return None
    return search.Question(asked, a, gpu, 1, 10**9, link(c.link), link(c.link))


def planned(
    q: search.Question | None, own: Fit, limit: float, base: float
) -> list[tuple[search.Cell, dict[str, Any]]]:
    """A cell for each number of ranks and micro-batch that divide the effective batch, and its planned figures. Where
    no ratio fits, the peak is that of the highest. limit, base: MiB, of a process and of what is not the step's."""
    if q is None:
        made = [
            search.Cell(n, b, None, own.effective_batch // (n * b))
            for n in own.world
            for b in own.micro_batch
            if own.effective_batch % (n * b) == 0
        ]
        return [(cell, {}) for cell in made]
    found = []
    for cell in search.fit_table(
        q, own.world, own.micro_batch, own.effective_batch, (limit - base) * 2**20
    ):
        ratio = 1.0 if cell.ratio is None else cell.ratio
        asked = replace(
            q.with_flags(batch=cell.micro, grad_accum=cell.accum, remat="block", remat_ratio=ratio),
            ranks=cell.ranks,
        )
        timed = q.gpu.arch != "cpu" and cell.ratio is not None
        told = dict(
            parameters=q.a.parameters,
            planned_ratio=cell.ratio,
            planned_mib=round(asked.peak().nbytes / 2**20 + base, 1),
            planned_ms=round(1e3 * asked.answer().time.seconds, 1) if timed else None,
        )
        found.append((cell, told))
    return found


def row_of(
    own: Fit, c: config.Config, cell: search.Cell, limit: float, told: dict, run: dict | None = None
) -> dict:
    """The row of an answer: planned, with what it was asked, and of `run`, the row of the run that it is taken from."""
    label = f"{cell.ranks}(sim {c.link})" if cell.ranks > 1 else 1
    asked = dict(
        model=Path(own.model).resolve().name,
        gpu=None if c.device == "cpu" else own.gpu,
        memory_mib=limit,
        effective_batch=own.effective_batch,
        seqlen=c.seqlen,
        batch=cell.micro,
        grad_accum=cell.accum,
        world=label,
    )
    about = dict(
        date=time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime()),
        commit=sweep.commit(),
        torch=importlib.metadata.version("torch"),
        outcome="planned",
        flags=flags.setting(c)
        | dict(
            batch=cell.micro,
            grad_accum=cell.accum,
            remat="block",
            remat_ratio=cell.ratio,
            world=cell.ranks if cell.ranks > 1 else None,
        ),
    )
    return (
        {key: value for key, value in (run or about).items() if key != "cell"}
        | asked
        | told
        | dict(study="fit")
    )


def least(
    grid: Sequence[float], first: float, fits: Callable[[float], bool | None]
) -> float | None:
    """The least value of an ascending grid that fits, if all above one that fits do, too; else None. It is looked for
    from the first that is not below `first` on, in growing steps and then by halves. fits(value) None: not known, ends
    the search."""
    low = 0
    high = len(grid)
    step = 1
    at = next((i for i, value in enumerate(grid) if value >= first), len(grid) - 1)
    while low < high:
        at = at if low <= at < high else (low + high) // 2
        yes = fits(grid[at])
        if yes is None:
            return None
        low, high, at = (low, at, at - step) if yes else (at + 1, high, at + step)
        step *= 2
    return grid[low] if low < len(grid) else None


def measured(
    own: Fit, words: list[str], cell: search.Cell, told: dict, limit: float, depth: int
) -> dict | None:
    """Runs what is needed to find the least ratio; the row that it is taken from, with `ratio` and all that was
    `tried`, as [ratio, MiB at the peak, outcome]. None: a run failed, and nothing is known."""
    rows = sweep.current(read_rows(Path(own.results)), own.any_commit)
    args = Namespace(results=Path(own.results), program=[PROGRAM], output=[], timeout=own.timeout)
    found: dict[float, dict] = {}

    def fits(ratio: float) -> bool | None:
        line = [*line_of(own, words, cell.ranks, cell.micro), "--remat", f"block:{ratio:g}"]
        name = sweep.cell_of(shlex.join(line), False, 1, {})
        if sweep.unfinished([name], rows):
            print(
                f"[{cell.ranks} ranks, micro-batch {cell.micro}] --remat block:{ratio:g}",
                flush=True,
            )
            rows[name] = sweep.attempt(
                name,
                args,
                own.timeout,
                f"fit n={cell.ranks} --batch {cell.micro} --remat block:{ratio:g}",
                sweep.given(sweep.parse(line)[1]),
            )
        found[ratio] = row = rows[name]
        if sweep.unfinished([name], rows):
            return None
        return row["outcome"] == "ok" and peak_of(row) <= limit

    grid = [
        r
        for i, r in enumerate(search.GRID)
        if not i or round(r * depth) != round(search.GRID[i - 1] * depth)
    ]
    first = told.get("planned_ratio")
    ratio = least(grid, 1.0 if first is None and told else first or 0.0, fits)
    # A little recomputation may take more memory than none.
    if ratio and grid[0] not in found and fits(grid[0]):
        ratio = grid[0]
    if any(sweep.unfinished([""], {"": row}) for row in found.values()):
        return None
    tried = [[each, peak_of(row), row["outcome"]] for each, row in sorted(found.items())]
    if ratio is None:
        return found[grid[-1]] | dict(ratio=None, tried=tried, outcome="does not fit")
    return found[ratio] | dict(ratio=ratio, tried=tried)


def peak_of(row: dict) -> float | None:
    """MiB at the peak of a run, its start included: allocated on a GPU, resident on a CPU."""
    peaks = row.get("peak_alloc_mib", row.get("peak_rss_mib")), row.get("first_step_peak_mib")
    return max(filter(None, peaks), default=None)


def limits(own: Fit, c: config.Config) -> tuple[float, float]:
    """(limit, of which are not the step's) in MiB. ValueError, one line, without a limit for a CPU."""
    if c.device != "cpu":
        return own.memory_mib or hardware.gpu(
            own.gpu
        ).memory / 2**20 - 2**10 * hardware.RESERVE_GIB, 0.0
    if own.memory_mib is None:
        raise ValueError(
            "--device cpu: needs --memory-mib, the limit of a process's resident memory"
        )
    command = [sys.executable, "-c", IMPORTED]
    return own.memory_mib, float(
        subprocess.run(command, cwd=sweep.ROOT, capture_output=True, check=True).stdout
    )


def show(own: Fit) -> None:
    """Prints the table of all answers in --results, and draws it. ValueError, one line: --plots cannot."""
    about, table = tables.section("fit", rows := published.read([Path(own.results)]), small=False)
    tell(f"\n{about}\n\n{table}")
    if own.plots:
        try:
            from lab.report import plots

            tell("\n".join(map(str, plots.fits(tables.LAYOUTS["fit"](rows)[0], Path(own.plots)))))
        except plots.NoFigure as error:
            tell(f"no figure: {error}")
        except (ImportError, OSError) as error:
            raise ValueError(
                f"--plots {own.plots}: {error}; it needs matplotlib and a folder"
            ) from error


def main(argv: list[str]) -> int:
    """Prints and records what is planned, measures it, prints the table; returns the exit code, 1 if a run failed."""
    own, words = parse(argv)
    pairs = [
        (n, b) for n in own.world for b in own.micro_batch if own.effective_batch % (n * b) == 0
    ]
    # Says what is wrong with any.
    c = [config.parse(line_of(own, words, n, b), 0, 1) for n, b in pairs][-1]
    if others := {(n, b) for n in own.world for b in own.micro_batch} - {*pairs}:
        told = ", ".join(f"{n} x {b}" for n, b in sorted(others))
        tell(
            f"left out, as they do not divide --effective-batch {own.effective_batch}: {told} (ranks x micro-batch)"
        )
    runs = not own.plan and (c.device == "cpu" or sweep.gpus() > 0)
    failed = 0
    c = flags.filled(c, "cpu" if c.device == "cpu" else "cuda")
    try:
        check_writable(own.results)
        if runs:
            if "--data" not in words:
                data_of(own).write_text(
                    json.dumps({"text": " ".join(map(str, range(c.seqlen + 1)))}) + "\n"
                )
            check_at_once(c, 1)
            if c.device == "cpu":
                # What is freed does not stay resident.
                os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "65536")
        q = question(own, c, runs)
        limit, base = limits(own, c)
        cells = planned(q, own, limit, base)
        if q:
            shape = dict(depth=q.a.depth, width=q.a.width, vocab=q.a.vocab)
            c = replace(c, training=replace(c.training, **shape))
            tell("\n".join(report.fit_lines([cell for cell, _ in cells], own.effective_batch)))
            alone = [f"a process holds {grouped(base)} MiB alone"]
            tell("\n".join(report.honesty(q, False) if c.device == "cuda" else alone))
            if c.compile not in ("none", "fwdbwd"):
                tell(f"planned as --compile fwdbwd, not {c.compile}")
        old = published.read([Path(own.results)])
        for cell, told in cells if q else ():
            new = json.loads(json.dumps(row_of(own, c, cell, limit, told)))  # as it is read
            if not any(
                row.get("study") == "fit" and (row | new) | {"date": 0} == row | {"date": 0}
                for row in old
            ):
                append_jsonl(own.results, new)
        for cell, told in cells if runs else ():
            found = measured(own, words, cell, told, limit, q.a.depth if q else len(search.GRID))
            failed += found is None
            if found:
                append_jsonl(own.results, row_of(own, c, cell, limit, told, found))
        if not (runs or own.plan):
            tell(
                "not measured: no GPU here; --device cpu --memory-mib N measures a small model's resident memory"
            )
        show(own)
    except (ValueError, OSError, subprocess.SubprocessError) as error:
        fail(str(error), 0)
    if failed:
        tell(
            f"{failed} of {len(cells)} not measured, since a run failed; the same command tries again",
            sys.stderr,
        )
    return int(failed > 0)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # | head
    # No traceback; the run under way follows its parent.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(main(sys.argv[1:]))
