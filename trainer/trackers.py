"""Trackers: what draws the numbers of a run beside others, if --tracker asks for it. Never touches a tensor.

    trackers = Trackers(TrackerOptions(("wandb", "tensorboard"), group="mine"), config, folder, run_name)
    trackers.log({"step": 10, "loss": 3.21})
    trackers.summarize(row)
    trackers.finish()

A tracker is a class with `log`, `summarize` and `finish`, which imports its package when it is made and may raise
whatever it likes: that costs one warning, that tracker gets nothing more, and the run goes on. The JSONL files of
trainer/logging.py are the record.

What a kill loses (SIGKILL, or a second Ctrl-C; after a first signal the run ends by itself and `finish` is called):
W&B the last 11 to 16 s of rows, trackio the last half second, TensorBoard and the JSONL files nothing.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Protocol, TextIO

from trainer.terminal.output import tell
from trainer.terminal.text import one_line

PROJECT = "simple-fsdp-trainer"
# That a run waits for each tracker at its start, for one that takes a row, and for all of them at its end: launchers
# kill 30 s after a signal. The trackers' own limits are minutes or none.
START_S, LOG_S, FINISH_S = 30, 5, 9
HANGING: list[threading.Thread] = []  # that have not answered in time


@dataclass(frozen=True)
class TrackerOptions:
    """What the trackers of a run are asked for. group, name: of the run, where a tracker has them; a run without a name
    is called $SWEEP_NAME, else as its files. ids: by tracker, of the run that this one continues."""

    kinds: Sequence[str] = ()
    wandb_mode: str | None = None
    group: str | None = None
    name: str | None = None
    tags: Sequence[str] = ()
    job_type: str | None = None
    ids: dict[str, str] = field(default_factory=dict)


class Tracker(Protocol):
    id: str  # by which a resumed run continues this one; it is in each checkpoint
    place: str  # what a person opens or types to see the run
    first_step: int  # of those that it takes: it has the earlier ones from before a resume

    def log(self, step: int, values: dict[str, Any]) -> None: ...

    def summarize(self, row: dict[str, Any]) -> None: ...

    def finish(self) -> None: ...


class WandB:
    """A run of Weights & Biases. Its summary is the row."""

    def __init__(self, options: TrackerOptions, config: dict, folder: Path, run_name: str):
        import wandb

        limits = {"init_timeout": 20, "login_timeout": 20, "finish_timeout": FINISH_S - 1}
        # What W&B would add is the host, the user, the git remote, the command and paths; what matters is in the row.
        private = {
            "host": "",
            "disable_git": True,
            "disable_code": True,
            "x_disable_meta": True,
            "console": "off",
        }
        known = wandb.Settings.model_fields  # an older W&B refuses names that it does not know
        wanted = {name: value for name, value in (limits | private).items() if name in known}
        settings = wandb.Settings(**wanted)
        wandb.setup(settings)
        folder = os.path.relpath(os.environ.get("WANDB_DIR") or folder)  # W&B logs this path
        os.makedirs(folder, exist_ok=True)
        # W&B itself would put the run into the system's folder of temporary files, which is emptied.
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(f"{folder}: may not be written to; name another in WANDB_DIR")
        names = dict(group=options.group, name=options.name, tags=[*options.tags])
        names |= dict(job_type=options.job_type or "train")
        names |= dict(project=os.environ.get("WANDB_PROJECT") or PROJECT)
        # W&B's agent sets WANDB_RUN_ID, and so does whoever knows better.
        if "wandb" in options.ids and not os.environ.get("WANDB_RUN_ID"):
            names |= dict(id=options.ids["wandb"], resume="allow")
        mode = options.wandb_mode
        run = wandb.init(mode=mode, dir=folder, config=config, settings=settings, **names)
        if run.disabled:
            raise RuntimeError("no login; wandb login, or --wandb-mode offline")
        # A link into the user's home.
        files = Path(run.dir).parent
        files.joinpath("logs", "debug-core.log").unlink(missing_ok=True)
        # Losses stand over tokens, by which runs of different batches compare, all else over steps.
        losses = dict.fromkeys(("loss", "eval_loss", "eval_bpb", "eval_ppl"), "tokens")
        for name, axis in ({"step": None, "tokens": None, "*": "step"} | losses).items():
            run.define_metric(name, step_metric=axis)
        self.run = run
        self.config = config
        self.id = run.id
        self.place = getattr(run, "url", None) or f"wandb sync {os.path.relpath(files)}"
        self.first_step = getattr(run, "starting_step", 0)

    def log(self, step: int, values: dict[str, Any]) -> None:
        self.run.log(values, step)

    def summarize(self, row: dict[str, Any]) -> None:
        # Without what W&B has in the run's config.
        in_config = {name for name in row if self.config.get(name) == row[name]}
        left_out = in_config | {"flags", "loss_kind"}
        self.run.summary.update({name: row[name] for name in row if name not in left_out})

    def log_table(self, name: str, columns: list[str], data: list[list]) -> None:
        import wandb

        self.run.log({name: wandb.Table(columns=columns, data=data, allow_mixed_types=True)})

    def finish(self) -> None:
        self.run.finish()


class Trackio:
    """A run of Hugging Face's trackio: an SQLite file on this machine, or a Space that $TRACKIO_SPACE_ID names."""

    def __init__(self, options: TrackerOptions, config: dict, folder: Path, run_name: str):
        import trackio

        project = os.environ.get("TRACKIO_PROJECT") or PROJECT
        name = options.ids.get("trackio") or f"{options.name or ''} {run_name}".strip()
        resume = "allow" if "trackio" in options.ids else "never"
        # Its threads would log the load of the machine every 10 s, which other programs share.
        usage = dict(auto_log_cpu=False, auto_log_gpu=False)
        with muted_thread():
            self.run = trackio.init(
                project=project,
                name=name,
                group=options.group,
                config=config,
                resume=resume,
                embed=False,
                **usage,
            )
        self.run.config["_Username"] = None  # whom Hugging Face's token belongs to
        self.id = name
        self.place = f"trackio show --project {project}"
        self.last_step = 0
        self.first_step = getattr(self.run, "_next_step", 0) if resume == "allow" else 0

    def log(self, step: int, values: dict[str, Any]) -> None:
        # "step" is a name that trackio keeps for itself.
        self.last_step = step
        self.run.log({name: values[name] for name in values if name != "step"}, step=step)

    def summarize(self, row: dict[str, Any]) -> None:
        texts = {name: row[name] for name in row if isinstance(row[name], str | int | float)}
        # Without a step it would count as one, which a resumed run then lacks.
        self.run.log({f"row/{name}": texts[name] for name in texts}, step=self.last_step)

    def finish(self) -> None:
        with muted_thread():
            self.run.finish()


class TensorBoard:
    """An event file, written by the classes of the package `tensorboard`: torch's SummaryWriter would put the name of
    the host into its name. Each logged step is in the file before the next one begins."""

    def __init__(self, options: TrackerOptions, config: dict, folder: Path, run_name: str):
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb
        from tensorboard.summary.writer.record_writer import RecordWriter

        self.make_event = Event
        self.make_summary = Summary
        parts = [part.replace("/", "-") for part in (options.group, options.name) if part]
        # A checkpoint may come from a stranger, whose id would name another folder.
        continued = options.ids.get("tensorboard", "")
        resumes = bool(continued) and ".." not in continued and not os.path.isabs(continued)
        self.id = continued if resumes else "/".join([*parts, run_name])
        run_folder = folder / "tensorboard" / self.id
        run_folder.mkdir(parents=True, exist_ok=True)
        self.file = open(run_folder / f"events.out.tfevents.{time.time():.6f}.{run_name}", "ab")
        self.writer = RecordWriter(self.file)
        self.place = f"tensorboard --logdir {os.path.relpath(folder / 'tensorboard')}"
        self.first_step = 0
        self._write(file_version="brain.Event:2")
        # Of a run that continues, TensorBoard then drops the steps that are done again.
        self.restart = SessionLog(status=SessionLog.START) if resumes else None
        plain = {
            name: value if isinstance(value, str | int | float) else str(value)
            for name, value in config.items()
            if value is not None
        }
        self._write(summary=hparams_pb(plain))

    def _write(self, **content) -> None:
        event = self.make_event(wall_time=time.time(), **content)
        self.writer.write(event.SerializeToString())
        self.file.flush()

    def _write_numbers(self, step: int, values: dict[str, Any]) -> None:
        numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
        items = [self.make_summary.Value(tag=name, simple_value=numbers[name]) for name in numbers]
        self._write(step=step, summary=self.make_summary(value=items))

    def log(self, step: int, values: dict[str, Any]) -> None:
        if self.restart is not None:
            self._write(step=step, session_log=self.restart)
            self.restart = None
        self._write_numbers(step, {name: values[name] for name in values if name != "step"})

    def summarize(self, row: dict[str, Any]) -> None:
        numbers = "step_ms", "tok_s", "mfu", "peak_alloc_mib", "peak_rss_mib", "compile_s"
        self._write_numbers(0, {f"row/{name}": row[name] for name in numbers if name in row})

    def finish(self) -> None:
        self.file.close()


def _of_a_sweep(options: TrackerOptions, setting: str) -> TrackerOptions:
    """The options of a run that a sweep has started: called as the sweep calls it, with a tag for the axis."""
    job_type = options.job_type
    tags = options.tags
    if setting and job_type is None:
        job_type = "setting"
        tags = list(dict.fromkeys([*tags, setting.partition(" n=")[0][:64]]))
    # W&B takes no longer one, as of tags.
    name = (options.name or setting)[:128] or None
    return replace(options, name=name, tags=tags, job_type=job_type)


KINDS: dict[str, Callable[..., Tracker]] = dict(
    wandb=WandB, trackio=Trackio, tensorboard=TensorBoard
)


class Trackers:
    """Those of a run, none of which ends it. config: JSON, the settings of the run. folder: where the rows are."""

    def __init__(self, options: TrackerOptions, config: dict, folder: Path, run_name: str):
        options = _of_a_sweep(options, os.environ.get("SWEEP_NAME") or "")
        self.running: dict[str, Tracker] = {}
        self.ids = dict(options.ids)
        self.places: dict[str, str] = {}
        kinds = dict.fromkeys(options.kinds)
        # W&B's own word for a run that logs nothing.
        if options.wandb_mode is None and os.environ.get("WANDB_MODE") == "disabled":
            kinds.pop("wandb", None)
        for kind in kinds:
            make = partial(KINDS[kind], options, config, folder, run_name)
            tracker = self._call(kind, within(START_S, make))
            if tracker is not None:
                self.running[kind] = tracker
                self.ids[kind] = tracker.id
                self.places[kind] = tracker.place

    def log(self, values: dict[str, Any]) -> None:
        """A logged step, which `step` in it numbers; null values are left out."""
        step = values["step"]
        values = {name: value for name, value in values.items() if value is not None}
        for kind, tracker in [*self.running.items()]:
            # A resumed run does steps again that the tracker has already, and takes no more.
            if step >= tracker.first_step:
                self._call(kind, within(LOG_S, partial(tracker.log, step, values)))

    def summarize(self, row: dict[str, Any]) -> None:
        """The row of the run, of JSON values."""
        row = {name: value for name, value in row.items() if value is not None}
        for kind, tracker in [*self.running.items()]:
            self._call(kind, within(LOG_S, partial(tracker.summarize, row)))

    def log_table(self, name: str, columns: list[str], data: list[list]) -> None:
        """A table of a sweep, for the tracker that shows one: W&B alone."""
        if tracker := self.running.get("wandb"):
            self._call("wandb", within(LOG_S, partial(tracker.log_table, name, columns, data)))

    def finish(self) -> None:
        """Ends them, all at once, in FINISH_S; a second call does nothing."""
        running = self.running
        self.running = {}
        until = time.monotonic() + FINISH_S
        waits = {
            kind: self._call(kind, partial(background, running[kind].finish)) for kind in running
        }
        for kind, wait in waits.items():
            if wait is not None:
                self._call(kind, partial(wait, until))

    def _call(self, kind: str, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except Exception as error:  # whatever it is, the run is worth more
            self.running.pop(kind, None)
            fix = ""
            if isinstance(error, ModuleNotFoundError):
                fix = f"; pip install -e '.[{kind}]'"
            tell(f"warning: {kind}: {one_line(error)}{fix}; the run goes on", sys.stderr)
            return None


def background(action: Callable[[], Any]) -> Callable[[float], Any]:
    """Starts an action in a thread of its own. What this returns waits for it until a time of time.monotonic, and
    returns or raises what it does; TimeoutError if it takes longer: its thread is then left alone."""
    ended = []
    start = time.monotonic()

    def work() -> None:
        try:
            ended.append((action(), None))
        except Exception as error:
            ended.append((None, error))

    def wait(until: float) -> Any:
        thread.join(max(0, until - time.monotonic()))
        if not ended:
            HANGING.append(thread)
            raise TimeoutError(f"no answer for {time.monotonic() - start:.2g} s")
        value, error = ended[0]
        if error is not None:
            raise error
        return value

    thread = threading.Thread(target=work, name="tracker", daemon=True)
    thread.start()
    return wait


def within(seconds: float, action: Callable[[], Any]) -> Callable[[], Any]:
    """The action in a thread of its own, which is waited for so long; then TimeoutError."""
    return lambda: background(action)(time.monotonic() + seconds)


def leave(code: int) -> NoReturn:
    """Ends the process. A tracker that has not answered is not waited for again: W&B does that at the end of a process
    for 13 s."""
    if any(thread.is_alive() for thread in HANGING):
        for stream in filter(None, (sys.stdout, sys.stderr)):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)
    sys.exit(code)


def muted_thread() -> redirect_stdout:
    """Inside it, what this thread prints is lost. The other threads print as ever, since the main thread goes on when
    it has waited long enough for this one."""
    # A process may have been started without standard output.
    return redirect_stdout(sys.stdout and _OfOtherThreads(sys.stdout))


class _OfOtherThreads:
    """A stream without what the thread prints that has made this."""

    def __init__(self, stream: TextIO):
        self.stream = stream
        self.thread = threading.get_ident()

    def write(self, text: str) -> int:
        if threading.get_ident() == self.thread:
            return len(text)
        return self.stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)
