"""The least recomputation that fits a Hugging Face model: planned, then measured by runs of finetune.py.

    ./launch.sh fit --model DIR --effective-batch 64 --micro-batch 1 2 4 8 --world 1 4 8 16 --seqlen 4096
    ./launch.sh fit --model TINY --device cpu --memory-mib 900 --compile none --steps 4   # resident memory, on a CPU
    python plan.py --hf DIR --gpus 8 --batch 8 --seqlen 4096 --fit 1 4 8 16               # planned alone

For each number of ranks and sequences of a micro-batch the planner's search says which --remat-ratio is the
least that fits. On a GPU the same search begins there anew with runs of finetune.py, with simulated ranks and random
weights: one row for each run, and one for each answer. A second call runs what has no row yet.

The limit is one of what torch has allocated on a GPU, by default the GPU's memory less what is not the step's. On a CPU
(--device cpu, with --memory-mib) it is one of the resident memory of the run's process, Python and libraries among it,
after the first steps; there the planner adds its peak of the step to what a process holds that has imported them, and
times are not planned. Nothing enforces the limit: a run that takes more is measured, and counts as one that does not
fit; so does one that runs out of memory.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

from tyro.conf import arg

from lab.planning import hardware, report, search
from lab.planning.architecture import read
from lab.report import published, tables
from lab.sweeps import sweep
from trainer import config as flags
from trainer.collective_time import link
from trainer.finetuning import config
from trainer.finetuning.checks import check_before_torch
from trainer.logging import append_jsonl, check_writable, read_rows
from trainer.terminal.command_line import default, parse_known
from trainer.terminal.output import fail, put, tell
from trainer.terminal.text import grouped

PROGRAM = str(sweep.ROOT / "finetune.py")
SEARCHED = "--batch", "--remat", "--remat-ratio", "--grad-accum"  # by this program
NOT_MEASURED = "--export", "--save", "--resume", "--prepared", "--preview", "--eval-every"
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
    results: str = "runs/fit.jsonl"
    """JSONL file to which rows are appended, and which says what has been measured."""
    timeout: float = 1800.0
    """Seconds for one run."""
    any_commit: bool = False
    """Rows of other commits count as measured, too."""


def parse(argv: Sequence[str]) -> tuple[Fit, list[str]]:
    """Its own flags, and finetune.py's as words. Ends the process with exit code 2 and one line for a bad one."""
    options, words = parse_known(Fit, argv, "./launch.sh fit", __doc__)
    for name, values in (
        ("effective_batch", [options.effective_batch]),
        ("micro_batch", options.micro_batch),
        ("world", options.world),
        ("memory_mib", [] if options.memory_mib is None else [options.memory_mib]),
        ("timeout", [options.timeout]),
    ):
        search.check_range(name, values, 1, "1e9")
    words = [
        part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word])
    ]
    words = [word.replace("_", "-") if word.startswith("--") else word for word in words]
    for word in words:
        if word in SEARCHED:
            fail(f"{word}: is what is looked for; leave it out", 0)
        if word in NOT_MEASURED:
            fail(f"{word}: is no part of it; leave it out", 0)
    return options, words


def line_of(options: Fit, words: list[str], ranks: int, micro: int) -> list[str]:
    """The flags of a run of finetune.py, but --remat."""
    line = ["--model", options.model, "--random", "--effective-batch", str(options.effective_batch)]
    line += ["--batch", str(micro)]
    if "--data" not in words:
        line += ["--data", str(data_of(options))]
    if "--steps" not in words:
        line += ["--steps", "6"]
    if ranks > 1:
        line += ["--world", str(ranks)]
    return [*line, *words]


def data_of(options: Fit) -> Path:
    """The file of --data that this program writes if none is given: what it says has no influence on memory."""
    return Path(options.results).with_suffix(".data.jsonl")


def question(options: Fit, resolved: config.Config) -> search.Question:
    """What the planner is asked, of resolved flags. ValueError, one line, for what it cannot plan."""
    gpu = hardware.gpu(options.gpu)
    on_cpu = resolved.device == "cpu"
    gpu = gpu._replace(arch="cpu") if on_cpu else hardware.field(gpu, resolved.compile == "none")
    try:
        a = read(options.model)
    except ValueError as error:
        raise ValueError(str(error).replace("--hf ", "--model ")) from error
    shape = dict(depth=a.depth, width=a.width, head_dim=a.head_dim, vocab=a.vocab)
    asked = SimpleNamespace(**resolved.flat() | shape)
    if problem := search.misfit(asked, a, resolved.replicas):
        raise ValueError(problem)
    return search.Question(asked, a, gpu, 1, 10**9, link(resolved.link), link(resolved.link))


def planned(
    options: Fit, resolved: config.Config, runs: bool, limit: float, base: float
) -> list[search.Setting]:
    """The planner's answers, printed. None for a setting that it cannot plan, if there are runs, else ValueError.
    limit, base: MiB, of a process and of what is not the step's."""
    try:
        q = question(options, resolved)
    except ValueError as error:
        if not runs:
            raise
        tell(f"not planned: {error}")
        return [
            search.Setting(n, b, None, options.effective_batch // (n * b))
            for n, b in product(options.world, options.micro_batch)
            if options.effective_batch % (n * b) == 0
        ]
    nbytes = (limit - base) * 2**20
    settings = search.fit_table(
        q, options.world, options.micro_batch, options.effective_batch, nbytes
    )
    tell("\n".join(report.fit_lines(settings, options.effective_batch)))
    if resolved.device == "cpu":
        tell(f"a process holds {grouped(base)} MiB alone")
    else:
        tell("\n".join(report.error_notes(q, False)))
    if resolved.compile not in ("none", "blocks", "fwdbwd"):
        tell(f"planned as --compile fwdbwd, not {resolved.compile}")
    return settings


def answer_of(
    options: Fit, resolved: config.Config, setting: search.Setting, limit: float, base: float
) -> dict:
    """What is recorded of an answer beside the run that it is taken from: what was asked, and what was planned."""
    asked = dict(
        study="fit",
        model=Path(options.model).resolve().name,
        gpu=None if resolved.device == "cpu" else options.gpu,
        memory_mib=limit,
        effective_batch=options.effective_batch,
        seqlen=resolved.seqlen,
        batch=setting.micro,
        grad_accum=setting.accum,
        world=f"{setting.ranks}(sim {resolved.link})" if setting.ranks > 1 else 1,
    )
    if not (q := setting.question):
        return asked
    timed = resolved.device != "cpu" and setting.ratio is not None
    return asked | dict(
        parameters=q.a.parameters,
        planned_ratio=setting.ratio,
        planned_mib=round(q.peak().nbytes / 2**20 + base, 1),
        planned_ms=round(1e3 * q.answer().time.seconds, 1) if timed else None,
    )


def measured(options: Fit, words: list[str], setting: search.Setting, limit: float) -> dict | None:
    """Runs what is needed to find the least ratio; the row that it is taken from, with `ratio` and all that was
    `tried`, as [ratio, MiB at the peak, outcome]. None: a run failed, and nothing is known."""
    rows = sweep.current(read_rows(Path(options.results)), options.any_commit)
    args = Namespace(
        results=Path(options.results), program=[PROGRAM], output=[], timeout=options.timeout
    )
    tried: dict[float, dict] = {}

    def fits(ratio: float) -> bool | None:
        remat = f"--remat block --remat-ratio {ratio:g}"
        line = [*line_of(options, words, setting.ranks, setting.micro), *remat.split()]
        name = sweep.setting_of(shlex.join(line), False, 1, {})
        if sweep.unfinished([name], rows):
            put(f"[{setting.ranks} ranks, micro-batch {setting.micro}] {remat}")
            title = f"fit n={setting.ranks} --batch {setting.micro} {remat}"
            flags = sweep.values_of(sweep.parse(line)[1])
            rows[name] = sweep.attempt(name, args, options.timeout, title, flags)
        tried[ratio] = row = rows[name]
        if sweep.unfinished([name], rows):
            return None
        return row["outcome"] == "ok" and peak_of(row) <= limit

    grid = search.GRID
    first = 0.0
    if q := setting.question:
        grid = [
            ratio
            for i, ratio in enumerate(grid)
            if not i or round(ratio * q.a.depth) != round(grid[i - 1] * q.a.depth)
        ]
        first = 1.0 if setting.ratio is None else setting.ratio
    ratio = search.least(grid, fits, first)
    # A little recomputation may take more memory than none.
    if ratio and grid[0] not in tried and fits(grid[0]):
        ratio = grid[0]
    if any(sweep.unfinished([""], {"": row}) for row in tried.values()):
        return None
    ends = [
        [tried_ratio, peak_of(row), row["outcome"]] for tried_ratio, row in sorted(tried.items())
    ]
    if ratio is None:
        return tried[grid[-1]] | dict(ratio=None, tried=ends, outcome="does not fit")
    return tried[ratio] | dict(ratio=ratio, tried=ends)


def peak_of(row: dict) -> float | None:
    """MiB at the peak of a run, its start included: allocated on a GPU, resident on a CPU."""
    peaks = row.get("peak_alloc_mib", row.get("peak_rss_mib")), row.get("first_step_peak_mib")
    return max(filter(None, peaks), default=None)


def limits(options: Fit, resolved: config.Config) -> tuple[float, float]:
    """(limit, of which are not the step's) in MiB. ValueError, one line, without a limit for a CPU."""
    if resolved.device != "cpu":
        whole = hardware.gpu(options.gpu).memory / 2**20
        return options.memory_mib or whole - 2**10 * hardware.RESERVE_GIB, 0.0
    if options.memory_mib is None:
        raise ValueError(
            "--device cpu: needs --memory-mib, the limit of a process's resident memory"
        )
    command = [sys.executable, "-c", IMPORTED]
    done = subprocess.run(command, cwd=sweep.ROOT, capture_output=True, check=True)
    return options.memory_mib, float(done.stdout)


def prepare(options: Fit, resolved: config.Config, words: list[str]) -> None:
    """What runs need: data, a check of the flags that costs seconds, and memory that returns when it is freed."""
    if "--data" not in words:
        text = " ".join(map(str, range(resolved.seqlen + 1)))
        data_of(options).write_text(json.dumps({"text": text}) + "\n")
    check_before_torch(resolved, 1)
    if resolved.device == "cpu":
        os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "65536")


def resolved(options: Fit, words: list[str]) -> config.Config:
    """The flags of a run, of which each setting is checked. Ends the process with exit code 2 and one line."""
    pairs = [*product(options.world, options.micro_batch)]
    fitting = [(n, b) for n, b in pairs if options.effective_batch % (n * b) == 0]
    name = f"--effective-batch {options.effective_batch}"
    if not fitting:
        fail(f"{name}: no --world x --micro-batch divides it; name others", 0)
    checked = [config.parse(line_of(options, words, n, b), 0, 1) for n, b in fitting][-1]
    if others := sorted({*pairs} - {*fitting}):
        pairs = ", ".join(f"{n} x {b}" for n, b in others)
        tell(f"left out, as they do not divide {name}: {pairs} (ranks x micro-batch)")
    return flags.filled(checked, "cpu" if checked.device == "cpu" else "cuda")


def main(argv: list[str]) -> int:
    """Prints what is planned, measures and records it, prints the table; returns the exit code, 1 if a run failed."""
    options, words = parse(argv)
    resolved_config = resolved(options, words)
    failed = 0
    try:
        check_writable(options.results)
        runs = resolved_config.device == "cpu" or sweep.gpus() > 0
        if runs:
            prepare(options, resolved_config, words)
        limit, base = limits(options, resolved_config)
        settings = planned(options, resolved_config, runs, limit, base)
        if not runs:
            tell(
                "not measured: no GPU here; --device cpu --memory-mib N measures a small model's resident memory"
            )
            return 0
        for setting in settings:
            run = measured(options, words, setting, limit)
            failed += run is None
            if run:
                row = {key: value for key, value in run.items() if key != "line"}
                append_jsonl(
                    options.results, row | answer_of(options, resolved_config, setting, limit, base)
                )
        if failed < len(settings):
            about, table = tables.section(
                "fit", published.read([Path(options.results)]), small=False
            )
            tell(f"\n{about}\n\n{table}")
    except (ValueError, OSError, subprocess.SubprocessError) as error:
        fail(str(error), 0)
    if failed:
        tell(
            f"{failed} of {len(settings)} not measured, since a run failed; the same command tries again",
            sys.stderr,
        )
    return int(failed > 0)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # | head
    # No traceback; the run under way follows its parent.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(main(sys.argv[1:]))
