"""Where the numbers of a run go: JSONL files (the record), the terminal, and W&B if asked. Never touches a tensor.

    sinks = Sinks("results/rows.jsonl", wandb="offline", rank=rank, total_steps=n, every=10)
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
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from trainer.distributed.terminal import grouped, tell

SECRET = re.compile(r"api_?key|private_?key|secret|passw|credential|(access|api|auth|hf)_?token|^token$", re.IGNORECASE)
LINE = {"loss": "loss {:.4f}", "lr": "lr {:.3g}", "grad_norm": "|g| {:.3f}", "ms": "{:,.1f} ms",
        "tok_s": "{:,.0f} tok/s"}  # fmt: skip


def _plain(value: Any) -> Any:
    """`value` as strict JSON: nan becomes "nan", unknown types their str. Entries named like a secret are left out."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(float(value))
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items() if not SECRET.search(str(key))}
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
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)  # a line that another process is still writing is not unfinished
        if (size := os.fstat(file).st_size) and os.pread(file, 1, size - 1) != b"\n":
            line = b"\n" + line
        if os.write(file, line) != len(line):
            raise OSError(f"disk full? a line was cut off in {path}")
        if fsync:
            os.fsync(file)
    finally:
        os.close(file)


def read_jsonl(path: Path, start: int = 0) -> list[dict]:
    """The rows of a file after byte `start`. Lines cut short by a killed run are passed over."""
    rows = []
    for line in path.read_bytes()[start:].splitlines():
        with suppress(ValueError):
            rows.append(json.loads(line))
    return [row for row in rows if isinstance(row, dict)]


def read_rows(path: Path, start: int = 0) -> dict[str, dict]:
    """Cell name -> its last row after byte `start`; empty without a file."""
    return {row["cell"]: row for row in read_jsonl(path, start) if "cell" in row} if path.exists() else {}


def check_writable(path: str | Path, flag: str = "--results") -> None:
    """Raise ValueError naming `flag` if nothing can be appended to `path`. Creates the file."""
    try:
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644))
    except OSError as error:
        raise ValueError(f"{flag} {path}: {error.strerror}; name a file in a folder that can be written") from None


def final_lines(row: dict) -> list[str]:
    """A row for people; the peak in use is named if the row has `peak_flops` (FLOP/s)."""
    kinds = dict(peak_alloc="allocated", peak_reserved="reserved", peak_rss="resident", first_step_peak="in step 1")
    memory = [f"{grouped(row[f'{k}_mib'])} MiB {kind}" for k, kind in kinds.items() if row.get(f"{k}_mib") is not None]
    memory += [row["peak_rss_note"]] if row.get("peak_rss_note") else []
    ms, low, high = (grouped(row.get(key), 1) for key in ("step_ms", "step_ms_min", "step_ms_max"))
    causal, palm, hfu, seconds = (grouped(row.get(key), 1) for key in ("mfu", "mfu_palm", "hfu", "compile_s"))
    peak = f" of {row['peak_flops'] / 1e12:.0f} TFLOP/s" if row.get("peak_flops") else ""
    skipped = f", {row['skipped']} update{'s' * (row['skipped'] > 1)} left out" if row.get("skipped") else ""
    return [
        f"outcome  {row.get('outcome', 'n/a')}, loss {grouped(row.get('loss'), 4)}{skipped}",
        f"memory   {', '.join(memory) or 'n/a'}",
        f"step     {ms} ms median [{low}-{high}] n {row.get('n', 0)}, compile {seconds} s",
        f"speed    {grouped(row.get('tok_s'))} tok/s, {grouped(row.get('tok_s_rank'))} tok/s/rank",
        f"MFU, %   {causal} causal, {palm} PaLM, {hfu} HFU{peak}",
    ]


class Sinks:
    """`wandb`: off, offline or online; a run without a `name` is called $SWEEP_NAME, else W&B makes one up. `stream`
    (stdout) gets a line per logged step or, if it is a terminal, a progress bar."""

    def __init__(self, results: str | Path | None, wandb: str = "off", group: str | None = None,
                 name: str | None = None, config: dict | None = None, tags: Sequence[str] = (), rank: int = 0,
                 total_steps: int = 0, every: int = 1, stream: TextIO | None = None, job_type: str | None = None):
        self.rank, self.total, self.every = rank, total_steps, max(1, every)
        self.run = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{secrets.token_hex(3)}"
        self.results = Path(results) if results else None
        self.steps = self.results.with_suffix(".steps") / f"{self.run}.jsonl" if results else None
        self.stream, self._warned, self._bar, self._wandb = stream or sys.stdout, set(), None, None
        if rank == 0 and wandb != "off":
            name = (name or os.environ.get("SWEEP_NAME") or "")[:128] or None  # W&B takes no longer one
            names = dict(group=group, name=name, tags=list(tags), job_type=job_type)
            self._try("wandb", partial(self._start_wandb, wandb, config or {}, **names))
        if rank == 0 and total_steps and self.stream.isatty():
            self._try("progress bar", self._start_bar)

    def due(self, k: int) -> bool:
        """Whether step k (1 to n) is logged: the first, every `every`-th, the last. The same on every rank."""
        return k in (1, self.total) or k % self.every == 0

    def step(self, stats: dict) -> None:
        """A logged step: `step` (1 to n), any of loss, lr, grad_norm, ms, tok_s, and more for files and W&B only."""
        if self.rank == 0 and self.steps:
            self._try("steps file", lambda: append_jsonl(self.steps, stats))
        if self._wandb:
            self._try("wandb", lambda: self._wandb.log({k: v for k, v in stats.items() if k != "step"}, stats["step"]))
        if self.rank == 0:
            self._try("progress bar", lambda: self._show(stats))

    def row(self, row: dict) -> None:
        """The row of the run, to which `run`, the name of its steps file, is added."""
        row = {**row, "run": self.run}
        write = self.rank == 0 and self.results
        if write and not self._try("results file", lambda: append_jsonl(self.results, row, fsync=True)):
            tell(f"warning: the row that is not in {self.results}: {json.dumps(_plain(row))}", sys.stderr)
        if self._wandb:
            self._try("wandb", lambda: self._wandb.summary.update(_plain(row)))

    def close(self) -> None:
        """End the progress bar and the W&B run; a second call does nothing."""
        (bar, run), self._bar, self._wandb = (self._bar, self._wandb), None, None
        self._try("progress bar", bar.stop if bar else bool)
        self._try("wandb", run.finish if run else bool)

    def _try(self, sink: str, action: Callable[[], Any]) -> bool:
        try:
            action()
        except Exception as error:  # whatever it is, the run is worth more
            self._wandb = None if sink == "wandb" else self._wandb
            if sink not in self._warned:
                told = f"{sink}: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
                tell(f"warning: {told}; the run goes on", sys.stderr)
            self._warned.add(sink)
            return False
        return True

    def _show(self, stats: dict) -> None:
        have = [text.format(stats[key]) for key, text in LINE.items() if stats.get(key) is not None]
        line = "  ".join(have).replace(",", "'")
        if self._bar:
            self._bar.update(self._bar.task_ids[0], completed=stats["step"], line=line, refresh=True)
        else:
            tell(f"step {stats['step']:>{len(str(self.total))}}/{self.total}  {line}", self.stream)

    def _start_bar(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        columns = TextColumn("step {task.completed}/{task.total}"), BarColumn(20), TextColumn("{task.fields[line]}")
        self._bar = Progress(*columns, console=Console(file=self.stream), auto_refresh=False)  # starts no thread
        self._bar.add_task("", total=self.total, line="")
        self._bar.start()

    def _start_wandb(self, mode: str, config: dict, **names) -> None:
        import wandb

        own = {"init_timeout": 20, "login_timeout": 20, "finish_timeout": 30}  # seconds; its own are minutes or endless
        # What W&B would add is the host, the user, the git remote, the command and paths; what matters is in the row.
        own |= {"host": "", "disable_git": True, "disable_code": True, "x_disable_meta": True, "console": "off"}
        settings = wandb.Settings(**{name: v for name, v in own.items() if name in wandb.Settings.model_fields})
        wandb.setup(settings)
        folder = os.environ.get("WANDB_DIR") or (self.results.parent if self.results else ".")
        names["project"] = os.environ.get("WANDB_PROJECT") or "simple-fsdp-trainer"
        folder = os.path.relpath(folder)  # W&B logs the path of its logs
        run = wandb.init(mode=mode, dir=folder, config=_plain(config), settings=settings, **names)
        if run.disabled:
            raise RuntimeError("no login")
        Path(run.dir).parent.joinpath("logs", "debug-core.log").unlink(missing_ok=True)  # a link into the user's home
        self._wandb = run


def log_tables(tables: dict[str, list[dict]], results: Path, wandb: str, group: str, tags: Sequence[str] = ()) -> None:
    """A W&B run of its own, with a table per study whose nested values are JSON. Costs a warning at most."""
    sinks = Sinks(results, wandb, group, group, tags=tags, job_type="table")

    def log(study: str, rows: list[dict]) -> None:
        import wandb

        columns = list(dict.fromkeys(key for row in rows for key in row))
        lines = [[row.get(key) for key in columns] for row in rows]
        lines = [[json.dumps(each) if isinstance(each, dict | list) else each for each in line] for line in lines]
        sinks._wandb.log({study: wandb.Table(columns=columns, data=lines, allow_mixed_types=True)})

    for study, rows in tables.items():
        if sinks._wandb and rows:
            sinks._try("wandb", partial(log, study, _plain(rows)))
    sinks.close()
