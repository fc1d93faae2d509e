"""What the studies share: flags, rows that a second call does not measure again, the timing loop, ranks, curves.

A study is a module of this folder: a question, its formula, its measurement, and the published figures beside it.

    settings(args) -> [dict]            # plain values; a row each
    measure(setting, args) -> dict      # the figures of a row. An exception becomes the row's outcome, OOM or failed
    table(rows) -> (about, markdown)    # of rows that `newest` has chosen, published figures beside ours
    figure(rows, folder) -> [Path]      # one plot, of one or more rows that are ok; NoFigure says why there is none
    flags(parser), check(args)          # if it has flags of its own; check raises ValueError, one line with the fix
    SAME = "batch",                     # what settings of one table have in common, if there is any

`python -m lab.studies.NAME` runs `main`, `python -m lab.studies` all of them. `python -m lab.report --study NAME` has
the table of rows that are there. A study that needs ranks starts them itself (`on_ranks`): no torchrun.
"""

import argparse
import csv
import importlib
import json
import math
import pickle
import re
import string
import sys
import tempfile
import time
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from gloo import one_worker_thread
from lab.report.published import REFERENCE
from model import ModelConfig, Transformer
from trainer.distributed.environment import ranks
from trainer.logging import append_jsonl, check_writable, read_jsonl
from trainer.measuring import memory, timing
from trainer.step_costs import device_peak
from trainer.terminal.output import fail, put, tell
from trainer.terminal.text import did_you_mean, markdown, one_line

# (width, blocks, heads) of the published models, whose MLP is 4 times as wide and vocabulary VOCAB; two for a CPU
SIZES = {
    "tiny": (64, 2, 2),
    "mini": (128, 4, 4),
    "small": (768, 12, 12),
    "medium": (1024, 24, 16),
    "large": (1280, 36, 20),
    "xl": (1600, 48, 25),
    "2.7b": (2560, 32, 32),
}
VOCAB = 10_000
MOST_RANKS = 16  # processes on the CPUs of one machine
PATIENCE_S = 300  # that a collective of a study may take
# By the maker's datasheets, device names as in step_costs.PEAKS: (TFLOP/s in fp32 without tensor cores, TB/s of memory)
LIMITS = {
    r"A100-(SXM4|PCIE)-40GB": (19.5, 1.555),
    r"A100-(SXM4|PCIE)-80GB|A100 80GB PCIe": (19.5, 2.039),
    r"H100 80GB HBM3": (67, 3.35),
    r"H200": (67, 4.8),
    r"H100 PCIe": (51, 2.0),
    r"GeForce RTX 4090": (82.6, 1.008),
}
# Bytes that may be in a cache, and not in memory: more than the second level of any of these holds.
CACHED = 80e6


class Parser(argparse.ArgumentParser):
    """What is wrong, in one line of the form of all other programs here, and exit code 2."""

    def error(self, message: str):
        text = re.sub(r"^argument (\S+): (.*)$", r"\1: \2; --help lists all flags", message)
        fail(
            re.sub(
                r"^unrecognized arguments: (\S+).*$",
                r"\1: no such flag; --help lists all flags",
                text,
            ),
            0,
        )


def arguments(study: ModuleType, argv: list[str]) -> argparse.Namespace:
    """The command line of a study, checked. Ends the process with exit code 2 and one line for what does not fit."""
    name = name_of(study)
    parser = Parser(
        prog=f"lab.studies.{name}", allow_abbrev=False, description=study.__doc__.split("\n")[0]
    )
    parser.add_argument("--small", action="store_true", help="sizes for a CPU: under a minute")
    parser.add_argument(
        "--results", type=Path, metavar="FILE", help=f"rows (runs/study-{name}.jsonl, or -small)"
    )
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument(
        "--repeat", type=int, default=10, help="timed repetitions, after the warm-up"
    )
    parser.add_argument("--again", action="store_true", help="measure also what has a row")
    parser.add_argument(
        "--any-commit", action="store_true", help="rows of other commits count as measured, too"
    )
    parser.add_argument(
        "--plots",
        type=Path,
        metavar="DIR",
        help="folder of the plot (default: plots beside the rows)",
    )
    getattr(study, "flags", bool)(parser)
    args = parser.parse_args(argv)
    args.results = args.results or default_results(name, args.small)
    cuda = torch.cuda.is_available()
    try:
        for flag, value in vars(args).items():
            for item in value if isinstance(value, list) else [value]:
                if (
                    isinstance(item, int | float)
                    and not isinstance(item, bool)
                    and not 0 < item < 2**53
                ):
                    least = "at least 1" if isinstance(item, int) else "above 0"
                    raise ValueError(
                        f"--{flag.replace('_', '-')} {item:g}: must be {least} and below 2**53"
                    )
        if args.device == "cuda" and not cuda:
            raise ValueError(
                f"--device cuda: torch {torch.__version__} sees no GPU; use --device cpu"
            )
        if ranks()[2] > 1:
            raise ValueError(
                f"a study starts its own ranks: run python -m lab.studies.{name}, without torchrun"
            )
        args.device = ("cuda" if cuda else "cpu") if args.device == "auto" else args.device
        getattr(study, "check", bool)(args)
        check_writable(args.results)
        args.plots = args.plots or args.results.parent / "plots"
        check_folder(args.plots)
    except ValueError as error:
        fail(str(error), 0)
    return args


def check_default(args: argparse.Namespace, flag: str, what: str) -> None:
    """ValueError where what is measured by default is for a GPU, which is not there, and `flag` names nothing else."""
    if args.device == "cpu" and not (args.small or getattr(args, flag)):
        raise ValueError(f"--device cpu: the default {what} for a GPU; give --small, or --{flag}")


def check_folder(path: Path) -> None:
    """Makes the folder of --plots. ValueError: it cannot be written."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise ValueError(
            f"--plots {path}: {error.strerror}; name a folder that can be written"
        ) from None


def default_results(name: str, small: bool) -> Path:
    return Path(f"runs/study-{name}{'-small' * small}.jsonl")


def name_of(study: ModuleType) -> str:
    return Path(study.__file__).stem


def names() -> list[str]:
    """Of all studies."""
    modules = sorted(path.stem for path in Path(__file__).parent.glob("*.py"))
    return [name for name in modules if name not in ("study", "__init__", "__main__")]


def study(name: str) -> ModuleType:
    """The module of a study. ValueError, one line, for a name that is none."""
    if name not in names():
        raise ValueError(
            f"--study {name}: must be one of {', '.join(names())}{did_you_mean(name, names())}"
        )
    return importlib.import_module(f"lab.studies.{name}")


def newest(name: str, rows: Iterable[dict]) -> list[dict]:
    """The last row of each setting on each device and torch, in the order of the first. What SAME of a study names must
    be as it was last, for all rows that have it. ValueError if there is no row."""
    last = {}
    same = getattr(study(name), "SAME", ()) if name in names() else ()
    of_study = [row for row in rows if row.get("study") == name and "setting" in row]
    alike = {
        key: value
        for row in of_study
        for key, value in row["setting"].items()
        if key in same and value is not None
    }
    for row in of_study:
        if all(row["setting"].get(key) in (None, value) for key, value in alike.items()):
            key = json.dumps([row["setting"], row["device"], row["torch"]], sort_keys=True)
            if row["outcome"] == "ok" or last.get(key, {}).get("outcome") != "ok":
                last[key] = row
    if not last:
        wrote = f"python -m lab.studies.{name} writes them"
        raise ValueError(
            f"--study {name}: no rows of this study; {wrote}, or name their file by --results"
        )
    return list(last.values())


def run(name: str, settings: list[dict], measure: Callable, args: argparse.Namespace) -> list[dict]:
    """Measures what has no row yet on this device and commit and appends it, a row per setting. Returns a row for each
    setting. What failed before, or has a row of
    changes that were not committed, is measured again; what ran out of memory is not."""
    device = torch.device(args.device)
    here = timing.environment(device)
    before = read_jsonl(args.results) if args.results.exists() and not args.again else []
    alike = ["device", "torch"] + ["commit"] * (not args.any_commit)
    done = {
        json.dumps(row["setting"], sort_keys=True): row
        for row in before
        if row.get("study") == name
        and "setting" in row
        and not row["outcome"].startswith(("failed", "n/a"))
        and all(row[key] == here[key] for key in alike)
        and (args.any_commit or not row.get("dirty"))
    }
    rows = []
    for number, setting in enumerate(settings, 1):
        known = done.get(json.dumps(setting, sort_keys=True))
        if known is None:
            start = time.monotonic()
            row = (
                timing.environment(device)
                | dict(study=name, setting=setting)
                | outcome(measure, setting, args)
            )
            append_jsonl(args.results, row)
        took = "there already" if known else f"{time.monotonic() - start:.1f} s"
        rows.append(known or row)
        words = " ".join(f"{key} {value}" for key, value in setting.items())[:90]
        tell(f"{name} {number}/{len(settings)}: {words}: {rows[-1]['outcome']}, {took}")
    return rows


def outcome(measure: Callable, setting: dict, args: argparse.Namespace) -> dict:
    """What `measure` found, with "outcome": ok; "OOM ..", "n/a: .." (ranks that are not there) or "failed: .." for an
    exception; "refused: .." where a time is below what the device can, in which case nothing of it is kept. Figures
    name what can be checked like this: of "forward_ms" `flops` {"forward": FLOPs}, `moved_bytes` {"forward": bytes},
    and `peak_of`, the products' dtype."""
    device = torch.device(args.device)
    try:
        row = {"outcome": "ok"} | measure(setting, args)
    except Exception as error:  # is a result; the other settings still run
        kind = (
            "OOM"
            if memory.out_of_memory(error)
            else "n/a:"
            if isinstance(error, NoRanks)
            else "failed:"
        )
        return {"outcome": f"{kind} {one_line(error)}"}
    device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    flops, moved = (row.get(key, {}) for key in ("flops", "moved_bytes"))
    for name in flops | moved:
        ms = row.get(f"{name}_ms_min", row.get(f"{name}_ms"))
        work = flops.get(name, 0), ms, moved.get(name, 0), row.get("peak_of", "bf16")
        if reason := impossible(device_name, *work):
            return {
                "outcome": f"refused: {name} in {ms:g} ms would be {reason}: was it synchronised?",
                "flops": flops,
            }
    return row


def impossible(
    device: str, flops: float, ms: float | None, nbytes: float = 0, dtype: str = "bf16"
) -> str | None:
    """Why a time cannot be true on a device, named as torch.cuda.get_device_name does, whose products in `dtype` are
    `flops` and whose memory `nbytes` go to or come from; None where it can, or where the device's limits are not
    known. Products in fp32 are taken for those of tensor cores where torch is told to use TF32."""
    size_limits = (
        limits for names, limits in LIMITS.items() if re.fullmatch(f"(NVIDIA )?({names})", device)
    )
    fp32, tb_per_s = next(size_limits, (0, 0))
    whole = dtype == "fp32" and torch.get_float32_matmul_precision() == "highest"
    peak = 1e12 * fp32 if whole and fp32 else device_peak(device)
    if ms is None:
        return None
    seconds = max(1e-3 * ms, 1e-12)
    problems = []
    if peak and flops > seconds * peak:
        problems.append(f"{flops / seconds / 1e12:.0f} TFLOP/s of at most {peak / 1e12:.0f}")
    if tb_per_s and nbytes - CACHED > 1e12 * seconds * tb_per_s:
        problems.append(f"{nbytes / seconds / 1e12:.0f} TB/s of at most {tb_per_s:g}")
    return ", ".join(problems) or None


def milliseconds(
    parts: dict[str, Callable[[], object]], device, repeat: int, warmup: int = 3
) -> dict[str, list]:
    """{name: ms of each of `repeat` calls}. The parts run one after the other, each timed by itself, `warmup` rounds
    before it counts."""
    timers = {name: timing.StepTimer(device) for name in parts}
    for i in range(warmup + repeat):
        for name, work in parts.items():
            with timers[name].step(excluded=i < warmup):
                work()
    return {name: timer.ms() for name, timer in timers.items()}


class Held:
    """Bytes that autograd holds for backward, each storage once, without `tensors`; `most` of them at once."""

    def __init__(self, tensors: Iterable[torch.Tensor]):
        self.own = {t.untyped_storage().data_ptr() for t in tensors}
        self.users = Counter()
        self.now = 0
        self.most = 0

    def hooks(self):
        return torch.autograd.graph.saved_tensors_hooks(self.pack, lambda box: box.tensor)

    def pack(self, t: torch.Tensor):
        storage = t.untyped_storage()
        key = storage.data_ptr()
        nbytes = storage.nbytes()
        box = _Box(t)
        if key not in self.own:
            self.users[key] += 1
            self.now += nbytes * (self.users[key] == 1)
            self.most = max(self.most, self.now)
            weakref.finalize(box, self.drop, key, nbytes)
        return box

    def drop(self, key: int, nbytes: int) -> None:
        self.users[key] -= 1
        self.now -= nbytes * (self.users[key] == 0)


class _Box:
    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor


def transformer(size: str, device, **more) -> Transformer:
    """The llama-style model of one of SIZES, with its first values. more: of model.ModelConfig."""
    width, depth, heads = SIZES[size]
    shape = dict(width=width, depth=depth, head_dim=width // heads, grouping=1, vocab=VOCAB)
    torch.manual_seed(0)
    with torch.device(device):
        model = Transformer(ModelConfig(block="llama", **shape | more))
    model.init_weights()
    return model


class NoRanks(ValueError):
    """A number of ranks that a study cannot start."""


def check_ranks(numbers: list[int], device: str, flag: str = "--ranks", least: int = 2) -> None:
    """NoRanks for less than `least`, for more than there are GPUs, or than a CPU is asked to bear."""
    most = torch.cuda.device_count() if device == "cuda" else MOST_RANKS
    if min(numbers) < least:
        raise NoRanks(f"{flag} {min(numbers)}: one rank has nobody to talk to; give 2 or more")
    if max(numbers) > most:
        available = (
            f"GPUs there are: {most}"
            if device == "cuda"
            else f"a study starts {most} processes at most"
        )
        raise NoRanks(
            f"{flag} {max(numbers)}: {available}; {f'give {most} or less' if most > 1 else 'use --device cpu'}"
        )


def default_ranks(numbers: list[int], device: str) -> list[int]:
    """Those of them that a study can start; where it can start none the first, whose row then says so."""
    most = torch.cuda.device_count() if device == "cuda" else MOST_RANKS
    return [n for n in numbers if n <= most] or numbers[:1]


def on_ranks(
    n: int, work: Callable, *args, device: str = "cpu", backend: str | None = None
) -> list:
    """work(rank, torch.device, *args) on n new processes, the ranks of a process group; what each returns. `work` is a
    function of a module. A rank's exception ends all of them and is raised here as a RuntimeError of one line.
    NoRanks: more ranks than check_ranks allows."""
    check_ranks([n], device, least=1)
    threads = max(1, torch.get_num_threads() // n)
    backend = backend or ("nccl" if device == "cuda" else "gloo")
    heavy = ["lab.studies.study", "trainer.parallelize"]  # imported once, and not in every rank
    multiprocessing.get_context("forkserver").set_forkserver_preload(heavy)
    with tempfile.TemporaryDirectory() as folder:
        try:
            all_args = (n, folder, device, backend, threads, work, args)
            multiprocessing.start_processes(_rank, all_args, n, start_method="forkserver")
        except multiprocessing.ProcessRaisedException as error:
            # The first in time: others fail next, since they wait for it.
            first = min(Path(folder).glob("failed-*"))
            raise RuntimeError(first.read_text()) from error
        return [pickle.loads((Path(folder) / f"{rank}").read_bytes()) for rank in range(n)]


def _rank(rank: int, n: int, folder: str, *how):
    try:
        _work(rank, n, folder, *how)
    except Exception as error:
        words = traceback.format_exception_only(error)[0].splitlines()[0]
        (Path(folder) / f"failed-{time.time_ns()}-{rank}").write_text(words)
        raise


def _work(
    rank: int,
    n: int,
    folder: str,
    device: str,
    backend: str,
    threads: int,
    work: Callable,
    args: tuple,
):
    torch.set_num_threads(threads)
    here = torch.device(device, rank) if device == "cuda" else torch.device(device)
    if device == "cuda":
        torch.cuda.set_device(here)
    one_worker_thread()
    how = dict(init_method=f"file://{folder}/meeting", timeout=timedelta(seconds=PATIENCE_S))
    dist.init_process_group(backend, rank=rank, world_size=n, **how)
    result = work(rank, here, *args)
    (Path(folder) / f"{rank}").write_bytes(pickle.dumps(result))
    dist.barrier()  # nobody leaves while another still waits for its last message
    dist.destroy_process_group()


def published(name: str) -> list[dict[str, str]]:
    """The lines of published/NAME.csv."""
    return list(csv.DictReader((REFERENCE / f"{name}.csv").read_text().splitlines()))


class Cells(string.Formatter):
    """str.format, in which a comma groups by apostrophes, a unit before the format converts bytes or seconds to it
    ("{nbytes:MiB ,.2f}"), and text of a csv file is read where a number is asked for. KeyError also for None."""

    UNITS = {"KiB": 2**-10, "MiB": 2**-20, "ms": 1e3}

    def get_field(self, name: str, args, kwargs):
        value, first = super().get_field(name, args, kwargs)
        if value is None:
            raise KeyError(name)
        return value, first

    def format_field(self, value, spec: str) -> str:
        unit, _, spec = spec.rpartition(" ")
        number = spec.endswith(("f", "g", "%"))
        value = self.UNITS.get(unit, 1) * float(value) if number else value
        return format(value, spec).replace(*",'" if "," in spec else ",,")


# {heading: a format of a line's values, or a function of the line}
Columns = dict[str, str | Callable[[dict], str]]


def lines(rows: Iterable[dict], columns: Columns) -> str:
    """A Markdown table of a line per row, {name: value}, beside which its "setting" is looked into. A cell whose values
    a row lacks is empty; the first such cell of a row that failed holds the outcome."""
    table = []
    for row in rows:
        row = row.get("setting", {}) | row
        missing = row["outcome"] if row.get("outcome", "ok") != "ok" else ""
        table.append([])
        for value in columns.values():
            try:
                text = value(row) if callable(value) else Cells().vformat(value, (), row)
            except KeyError:
                text, missing = missing, ""
            table[-1].append(text)
    return markdown([(title, [line[i] for line in table]) for i, title in enumerate(columns)])


def beside(rows: Iterable[dict], others: dict[Any, dict], key: Callable[[dict], Any]) -> list[dict]:
    """Each row with the values of the published line that has its key, then the published lines that have no row."""
    rows = [(key(row), row) for row in rows]
    seen = {key for key, _ in rows}
    joined = [others.get(key, {}) | row.get("setting", {}) | row for key, row in rows]
    return joined + [line for key, line in others.items() if key not in seen]


def section(
    rows: list[dict], text: str, columns: Columns, entries: Iterable[dict]
) -> tuple[str, str]:
    """The text above a table: the study, where its rows come from, and what it asks; and the table of `entries`."""

    def value_of(key: str) -> str:
        return ", ".join(sorted({str(row[key])[: 7 if key == "commit" else None] for row in rows}))

    dirty = " (uncommitted changes)" * any(row.get("dirty") for row in rows)
    about = f"**{rows[0]['study']}**: commit {value_of('commit')}{dirty}, "
    about += f"torch {value_of('torch')}, {value_of('device')}."
    return f"{about} {text}", lines(entries, columns)


def figure(study: ModuleType, rows: list[dict], folder: Path) -> list[Path]:
    """The plot of what is ok. NoFigure: it would show nothing."""
    from lab.report import plots

    if not (done := [row for row in rows if row["outcome"] == "ok"]):
        raise plots.NoFigure("no row has a figure")
    return study.figure(done, folder)


def curves(
    folder: Path,
    name: str,
    made: dict[str, list[tuple]],
    x: str,
    y: str,
    marks: dict[str, float] | None = None,
    **axes,
) -> list[Path]:
    """Draws {words: [(x, y)]} into study-NAME.svg and .png; what has no y, or none above zero on a logarithmic axis, is
    left out. marks: {words: x} of vertical lines. axes: of matplotlib's Axes.set, such as xscale="linear": both are
    logarithmic unless it says otherwise. NoFigure where nothing is left."""
    from lab.report import plots

    least = 0 if axes.get("yscale", "log") == "log" else -math.inf  # a logarithm has no zero
    points = {
        words: [(a, b) for a, b in line if b is not None and b > least]
        for words, line in made.items()
    }
    return plots.lines(f"study-{name}", [(y, points)], x, folder, marks, **axes)


def main(module: ModuleType, argv: list[str] | None = None) -> int:
    """Measures, prints the table, draws the plot. Exit codes: 0, also if a setting fails, 2 bad flags."""
    args = arguments(module, sys.argv[1:] if argv is None else argv)
    name = name_of(module)
    rows = newest(name, run(name, module.settings(args), module.measure, args))
    caption, text = module.table(rows)
    put("", caption, "", text, "", sep="\n")
    try:
        put(*figure(module, rows, args.plots), sep="\n")
    except ImportError as error:  # matplotlib
        put(f"no plot: {error}; pip install matplotlib, or the extra plot")
    except ValueError as error:  # plots.NoFigure, which only matplotlib's users can import
        put(f"no plot: {error}")
    return 0
