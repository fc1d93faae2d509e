"""Where the numbers of a run go: JSONL files (the record), the terminal, and trackers. Never touches a tensor.

    sinks = Sinks("results/rows.jsonl", rank=rank, total_steps=n, every=10)
    sinks.step({"step": k, "loss": 3.21, "lr": 3e-4})     # where sinks.due(k)
    sinks.row(row)                                        # and in the end, whatever happened, sinks.close()

Rank 0 alone writes: rows to rows.jsonl, the steps of a run to rows.steps/<run>.jsonl. A sink that fails in mid-run (the
disk is full, the network gone, the reader of a pipe has left) costs one warning and never the run.
"""

import fcntl
import json
import math
import os
import re
import secrets
import shlex
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from trainer.terminal.output import regular, tell
from trainer.terminal.text import counted, grouped, one_line
from trainer.trackers import TrackerOptions, Trackers

# Entries of a row that decide what becomes of it, and what a run writes there; any of them may be null.
TEXTS = frozenset("line commit date device error outcome run study torch".split())
FIGURES = frozenset(
    "loss eval_loss step step_ms step_ms_min step_ms_max mfu simulated_mib peak_alloc_mib peak_rss_mib "
    "first_step_peak_mib".split()
)
SETTINGS = frozenset(("flags", "setting"))
NOT_FINITE = ["nan", "inf", "-inf"]  # as `_plain` writes them


def _shared(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A dictionary whose short texts, most of them the same in each row, are in memory once."""
    return {
        sys.intern(k): sys.intern(v) if type(v) is str and len(v) < 100 else v for k, v in pairs
    }


DECODER = json.JSONDecoder(
    object_pairs_hook=_shared,
    parse_constant={"NaN": "nan", "Infinity": "inf", "-Infinity": "-inf"}.get,
)
LOCK_S = 5.0  # that another process may keep a file locked
KEPT_LOCKED: set[str] = set()  # paths that one kept for longer
LARGEST = 1e300  # of a figure: far above any, and statistics of it are still finite
SECRET = re.compile(
    r"api_?key|private_?key|secret|passw|credential|(access|api|auth|hf)_?token|^token$",
    re.IGNORECASE,
)
LINE = {
    "loss": "loss {:.4f}",
    "lr": "lr {:.3g}",
    "grad_norm": "|g| {:.3f}",
    "ms": "{:,.1f} ms",
    "first_step_s": "{:,.1f} s with compilation",
    "tok_s": "{:,.0f} tok/s",
    "eval_loss": "held-out loss {:.4f}",
    "eval_bpb": "{:.4f} bits per byte",
    "eval_ppl": "perplexity {:.3f}",
    "eval_examples": "examples {:,}",
}


def _plain(value: Any) -> Any:
    """`value` as strict JSON: nan becomes "nan", a tensor without dimensions its number, unknown types their str.
    Entries named like a secret are left out."""
    if getattr(value, "ndim", None) == 0:
        with suppress(Exception):  # one without a value, as on meta
            value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else str(float(value))
    if isinstance(value, dict):
        return {
            str(key): _plain(item) for key, item in value.items() if not SECRET.search(str(key))
        }
    if isinstance(value, list | tuple | set):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, str | int) else str(value)


def append_jsonl(path: str | Path, obj: dict, *, fsync: bool = False) -> None:
    """Append a line of strict JSON in one O_APPEND write, so that processes can share a file; creates the folder.
    A line that somebody left unfinished (disk full, kill) is ended first. Raises OSError."""
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    line = (json.dumps(_plain(obj), allow_nan=False) + "\n").encode()
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        _lock(file, path)
        if (size := os.fstat(file).st_size) and os.pread(file, 1, size - 1) != b"\n":
            line = b"\n" + line
        if os.write(file, line) != len(line):
            raise OSError(f"disk full? a line was cut off in {path}")
        if fsync:
            os.fsync(file)
    finally:
        os.close(file)


def _lock(file: int, path: str | Path) -> None:
    """Waits for the lock of an open file, with which a line that another process is still writing is not taken for an
    unfinished one. Goes on without it, with one warning, where another process keeps it for longer than LOCK_S: lines
    are whole all the same, each of them being one write."""
    until = time.monotonic() + LOCK_S * (str(path) not in KEPT_LOCKED)
    with suppress(OSError):  # a file system without locks
        while True:
            with suppress(BlockingIOError):
                return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if time.monotonic() > until:
                break
            time.sleep(0.01)
        if str(path) not in KEPT_LOCKED:
            KEPT_LOCKED.add(str(path))
            tell(f"warning: {path}: another process keeps it locked; it is written to", sys.stderr)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def _odd_entry(row: dict) -> str:
    """The first entry that decides what becomes of a row and is of another kind than a run writes; else empty."""
    for name, value in row.items():
        if name in TEXTS:
            right = isinstance(value, str)
        elif name in FIGURES:
            right = value in NOT_FINITE or type(value) in (int, float) and abs(value) < LARGEST
        else:
            right = name not in SETTINGS or isinstance(value, dict)
        if not right and value is not None:
            return f"{name} {repr(value)[:40]}"
    return ""


def read_jsonl(path: Path, start: int = 0) -> list[dict]:
    """The rows of `each_row`."""
    return [*each_row(path, start)]


def each_row(path: Path, start: int = 0) -> Iterator[dict]:
    """The rows of a file after byte `start`, of which one is held. Lines cut short by a killed run are passed over.
    ValueError: no file, or an entry of another kind than a run writes."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # a pipe would be read for ever
            raise ValueError(f"{path}: is no file; name a file of rows")
        with open(path, "rb") as file:
            file.seek(start)
            for number, line in enumerate(file, 1):
                row = None
                with suppress(ValueError, RecursionError):
                    row = DECODER.decode(line.decode())
                if not isinstance(row, dict):
                    continue
                if odd := _odd_entry(row):
                    place = f"{path}, line {number}" + f" from byte {start} on" * (start > 0)
                    raise ValueError(
                        f"{place}: {odd}: no run writes that; take the line out, or name other files"
                    )
                yield row
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; name a file of rows") from None


def read_rows(path: Path, start: int = 0) -> dict[str, dict]:
    """Setting name -> its last row after byte `start`; empty without a file."""
    rows = read_jsonl(path, start) if path.exists() else []
    return {row["line"]: row for row in rows if row.get("line") and row.get("outcome")}


def check_writable(path: str | Path, flag: str = "--results") -> None:
    """Raise ValueError naming `flag` if nothing can be appended to `path`. Creates the file."""
    try:
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        regular(path)  # the reader of a pipe may be gone, or slower than the run
        os.close(os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644))
    except OSError as error:
        raise ValueError(
            f"{flag} {path}: {error.strerror}; name a file in a folder that can be written"
        ) from None


def final_lines(row: dict, warmup: int = 0) -> list[str]:
    """A row for people; the peak in use is named if the row has `peak_flops` (FLOP/s). warmup: steps not timed."""
    kinds = dict(
        peak_alloc="allocated",
        peak_reserved="reserved",
        peak_rss="resident",
        first_step_peak="in step 1",
    )
    memory = [
        f"{grouped(row[f'{k}_mib'])} MiB {kind}"
        for k, kind in kinds.items()
        if row.get(f"{k}_mib") is not None
    ]
    memory += [row["peak_rss_note"]] if row.get("peak_rss_note") else []
    ms, low, high = (grouped(row.get(key), 1) for key in ("step_ms", "step_ms_min", "step_ms_max"))
    causal, palm, hfu, seconds = (
        grouped(row.get(key), 1) for key in ("mfu", "mfu_palm", "hfu", "compile_s")
    )
    device = str(row.get("device", "this device"))
    mfu = [] if device.startswith("CPU") else [f"MFU, %   n/a: no peak is known of {device}"]
    if row.get("peak_flops"):
        peak = f"{row['peak_flops'] / 1e12:.0f} TFLOP/s"
        mfu = [f"MFU, %   {causal} causal, {palm} PaLM, {hfu} HFU of {peak}"]
    compiled = f", compile {seconds} s" if row.get("compile_s") is not None else ""
    skipped = (
        f", {row['skipped']} update{'s' * (row['skipped'] > 1)} left out"
        if row.get("skipped")
        else ""
    )
    lines = [
        f"outcome  {row.get('outcome', 'n/a')}, loss {grouped(row.get('loss'), 4)}{skipped}",
        f"memory   {', '.join(memory) or 'n/a'}",
    ]
    if row.get("eval_loss") is not None:
        more = f", {grouped(row['eval_bpb'], 4)} bits per byte" * (row.get("eval_bpb") is not None)
        more += f", perplexity {grouped(row['eval_ppl'], 3)}" * (row.get("eval_ppl") is not None)
        if row.get("eval_examples") is not None:
            more += f", of {counted(row['eval_examples'], 'example')}"
        lines.insert(
            1,
            f"held out loss {grouped(row['eval_loss'], 4)}{more}, after step {row['eval_step']}; "
            f"best {grouped(row.get('best_eval_loss'), 4)}, after step {row.get('best_step')}",
        )
    if (row.get("flags") or {}).get("steps") == 0:  # which only evaluates
        return lines
    if row.get("outcome") == "ok" and warmup and not row.get("n"):
        untimed = f"the first {warmup} steps of a run (they compile and warm up) and those that a profiler watches"
        return [
            *lines,
            f"step     n/a, as are speed and MFU: no step was timed; {untimed} never are; raise --steps",
        ]
    return [
        *lines,
        f"step     {ms} ms median of {counted(row.get('n', 0), 'step')} [{low}-{high}]{compiled}",
        f"speed    {grouped(row.get('tok_s'))} tok/s, {grouped(row.get('tok_s_rank'))} tok/s/rank",
        *mfu,
    ]


def this_python() -> str:
    """The interpreter of this process, to be typed in this folder, where .venv may not be activated."""
    return sys.executable.removeprefix(f"{os.getcwd()}/")


def page_command(results: Path, run: str | None = None) -> str:
    """The command that writes the rows of a file, or one of its runs, as a page, to be typed in this folder."""
    return shlex.join([this_python(), "-m", "lab.report", *page_flags(results, run)])


def page_flags(results: Path, run: str | None = None) -> list[str]:
    """What lab.report is told to write the rows of a file, or one of its runs, as a page beside them."""
    if run is None:
        return [str(results), "--html", str(results.with_suffix(".html"))]
    return [
        str(results),
        "--run",
        run,
        "--html",
        str(results.with_suffix(".steps") / f"{run}.html"),
    ]


class Sinks:
    """config: the settings of the run, for trackers. stream (stdout) gets a line per logged step."""

    def __init__(
        self,
        results: str | Path | None,
        trackers: TrackerOptions | None = None,
        config: dict | None = None,
        rank: int = 0,
        total_steps: int = 0,
        every: int = 1,
        stream: TextIO | None = None,
    ):
        self.rank = rank
        self.total = total_steps
        self.every = max(1, every)
        self.run = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{secrets.token_hex(3)}"
        self.results = Path(results) if results else None
        self.steps = self.results.with_suffix(".steps") / f"{self.run}.jsonl" if results else None
        self.stream = stream or sys.stdout
        self._warned = set()
        options = trackers if rank == 0 and trackers else TrackerOptions()
        folder = self.results.parent if self.results else Path(".")
        self.trackers = Trackers(options, _plain(config or {}), folder, self.run)

    def write_settings(
        self, settings: dict, continues: str | None = None, after_step: int = 0
    ) -> Path | None:
        """Writes the whole setting of the run beside its steps; returns the file, or None where there is none.
        continues: the name of the run that this one goes on with after that step."""
        path = self.steps and self.steps.with_suffix(".settings.json")
        settings = settings | (
            dict(continues=continues, after_step=after_step) if continues else {}
        )
        text = json.dumps(_plain(settings), indent=1, allow_nan=False)
        return (
            path
            if self.rank == 0 and path and self._try("settings file", lambda: _write(path, text))
            else None
        )

    def due(self, k: int) -> bool:
        """Whether step k (1 to n) is logged: the first, every `every`-th, the last. The same on every rank."""
        return k in (1, self.total) or k % self.every == 0

    def step(self, stats: dict) -> None:
        """A logged step: `step` (1 to n), any of loss, lr, grad_norm, ms, tok_s, and more for files and
        trackers only."""
        if self.rank == 0 and self.steps:
            self._try("steps file", lambda: append_jsonl(self.steps, stats))
        self.trackers.log(stats)
        if self.rank == 0:
            self._show(stats)

    def row(self, row: dict) -> None:
        """The row of the run, to which `run`, the name of its steps file, is added."""
        row = {**row, "run": self.run}
        write = self.rank == 0 and self.results
        if write and not self._try(
            "results file", lambda: append_jsonl(self.results, row, fsync=True)
        ):
            tell(
                f"warning: the row that is not in {self.results}: {json.dumps(_plain(row))}",
                sys.stderr,
            )
        self.trackers.summarize(_plain(row))

    def closing_lines(self, program: str, ranks: int) -> list[str]:
        """Where the run has left its row and its logged steps and where trackers show it, and the commands that repeat
        and draw it, for people. ranks: processes on this machine. Empty where no file is written."""
        if self.rank or not self.results:
            return []
        settings = self.steps.with_suffix(".settings.json")
        start = [this_python()]
        if ranks > 1:
            start = [
                os.path.join(os.path.dirname(start[0]), "torchrun"),
                "--nproc-per-node",
                str(ranks),
            ]
        lines = [
            f"row      {self.results}",
            f"curve    {self.steps}",
            f"repeat   {shlex.join([*start, program, '--config', str(settings)])}",
        ]
        lines += [f"{kind:<8} {place}" for kind, place in self.trackers.places.items()]
        return [*lines, f"draw it  {page_command(self.results, self.run)}"]

    def close(self) -> None:
        """Ends the trackers; a second call does nothing."""
        self.trackers.finish()

    def _try(self, sink: str, action: Callable[[], Any]) -> bool:
        try:
            action()
        except Exception as error:  # whatever it is, the run is worth more
            if sink not in self._warned:
                tell(f"warning: {sink}: {one_line(error)}; the run goes on", sys.stderr)
            self._warned.add(sink)
            return False
        return True

    def _show(self, stats: dict) -> None:
        have = [text.format(stats[key]) for key, text in LINE.items() if stats.get(key) is not None]
        left_s = (self.total - stats["step"]) * (stats.get("ms") or 0) / 1e3
        have += [f"{left_s / 60:,.0f} min left"] if left_s >= 60 else []
        line = "  ".join(have).replace(",", "'")
        tell(f"step {stats['step']:>{len(str(self.total))}}/{self.total}  {line}", self.stream)


def log_tables(tables: dict[str, list[dict]], results: Path, trackers: TrackerOptions) -> None:
    """A run of trackers of its own, with a table per study whose nested values are JSON. Costs a warning at most."""
    options = replace(trackers, name=trackers.name or trackers.group, job_type="table")
    sinks = Sinks(results, options)
    for study, rows in tables.items():
        if rows:
            rows = _plain(rows)
            columns = list(dict.fromkeys(key for row in rows for key in row))
            lines = [[row.get(key) for key in columns] for row in rows]
            lines = [
                [json.dumps(cell) if isinstance(cell, dict | list) else cell for cell in line]
                for line in lines
            ]
            sinks.trackers.log_table(study, columns, lines)
    sinks.close()
