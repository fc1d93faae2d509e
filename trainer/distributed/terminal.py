"""What torchrun tells a process, and what the process tells people: lines, and errors with an exit code.

    rank, local_rank, world = ranks()      # (0, 0, 1) without torchrun
    fail("--depth 0: must be at least 1", rank)      # one line on stderr, exit code 2
    tell("step 1", sys.stdout)             # a line that never ends the run, even if nobody can read it
    with Progress("importing torch"): ...  # says every few seconds what takes so long

Imports no torch, so that bad flags are answered at once.
"""

import errno
import json
import logging
import os
import re
import resource
import signal
import socket
import sys
import threading
import time
import traceback
import unicodedata
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from difflib import get_close_matches
from pathlib import Path
from typing import NoReturn, TextIO

MORE = "LOCAL_WORLD_SIZE", "TORCHELASTIC_MAX_RESTARTS"  # numbers that torchrun also sets
# What the system says where a process may open no more files, or start no more threads.
LIMIT = re.compile(
    "EMFILE|ENFILE|too many open files|Resource temporarily unavailable|Cannot allocate memory|"
    "can't start new thread",
    re.IGNORECASE,
)
PARENT = os.getppid()  # now: it may be gone when torch is imported


def ranks() -> tuple[int, int, int]:
    """(rank, local rank, world) by torchrun's environment, (0, 0, 1) without; exits with 2 if that makes no sense."""
    names = "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"
    told = {name: os.environ[name] for name in (*names, *MORE) if os.environ.get(name)}
    there = [name for name in names[:3] if name in told]
    missing = [name for name in names if name not in told]
    if not there:
        return 0, 0, 1
    if missing:
        fail(
            f"{', '.join(there)} set but not {', '.join(missing)}: start with torchrun, or unset them for one rank",
            0,
        )
    # The others are numbers.
    check_host(told.pop("MASTER_ADDR"), int(os.environ.get("LOCAL_RANK") != "0"))
    n = {name: int(text) if text.isdecimal() else -1 for name, text in told.items()}
    if min(n.values()) < 0 or n["RANK"] >= n["WORLD_SIZE"] or not 0 < n["MASTER_PORT"] < 2**16:
        wrong = ", ".join(f"{name} {text}" for name, text in told.items())
        fail(f"{wrong}: must be numbers, RANK < WORLD_SIZE, MASTER_PORT from 1 to 65535", 0)
    return n["RANK"], n["LOCAL_RANK"], n["WORLD_SIZE"]


def check_host(name: str, rank: int = 0) -> None:
    """Ends the process if nobody knows the address of a host, which torch would ask for until its time is over."""
    try:
        socket.getaddrinfo(name, None)
    except (OSError, UnicodeError) as error:
        fail(
            f"MASTER_ADDR {name}: {error}; name the first host by an address, or as this one knows it",
            rank,
        )


def limit_behind(error: BaseException) -> str:
    """What to do where a limit of the system is behind an error, with the limits of this process; else empty."""
    if not LIMIT.search(str(error)):
        return ""
    names = {"-n": resource.RLIMIT_NOFILE, "-u": resource.RLIMIT_NPROC, "-v": resource.RLIMIT_AS}
    soft = {name: resource.getrlimit(which)[0] for name, which in names.items()}
    told = (
        f"{name} {'unlimited' if most == resource.RLIM_INFINITY else most}"
        for name, most in soft.items()
    )
    return f"raise the limits of files, processes and memory (ulimit {', '.join(told)}), or end other programs"


def has_launcher() -> bool:
    """Whether torchrun, if it has started this process, is still there: nobody else would ever end its ranks. A shell
    may leave its rank alone."""
    return os.getppid() == PARENT or "TORCHELASTIC_RUN_ID" not in os.environ


def fail(message: str, rank: int, code: int = 2) -> NoReturn:
    """Ends the process with one line on stderr and an exit code."""
    if rank:
        # If rank 0 fails as well, torchrun ends this rank meanwhile, and the line is printed only
        # once.
        time.sleep(5)
    tell_error(f"error: {message}")
    sys.exit(code)


def import_torch(rank: int, debug: bool = False) -> None:
    """Imports the greater part of torch. Ends the process in one line if that fails, as under some locales and where an
    environment variable of torch has a value that it does not know."""
    filter_libraries()
    try:
        import torch._inductor.compile_fx  # noqa: F401
    except Exception as error:
        if debug:
            raise
        fix = "correct the environment variables of torch or Python"
        fix = "set PYTHONUTF8=1" if isinstance(error, UnicodeError) else limit_behind(error) or fix
        fail(f"torch cannot be imported: {one_line(error, 200)}; {fix} (--debug shows where)", rank)


def shown(text: str) -> str:
    """A text for a terminal: what would control that is a replacement character, half a character an escape."""
    text = text.encode("utf-8", "backslashreplace").decode()
    if text.isascii() and text.isprintable():
        return text
    return "".join(each if _harmless(each) else "\ufffd" for each in text)


def _harmless(character: str) -> bool:
    # Spaces of other scripts count as not printable.
    return character.isprintable() or character in "\n\t" or unicodedata.category(character) == "Zs"


def tell_error(line: str) -> None:
    """Prints on stderr why this rank ends, and leaves it where torchrun's last lines repeat it: its own traceback of
    thirty lines would else be all that is seen. What the line names may come from a stranger's files."""
    line = shown(line.replace("\n", "\\n"))  # of a file's name
    tell(line, sys.stderr)
    file = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    if file and not os.path.exists(file):
        told = dict(extraInfo=dict(py_callstack=line, timestamp=int(time.time())))
        with suppress(OSError), open(file, "w") as stream:
            json.dump(dict(message=told), stream)


def tell(text: str, stream: TextIO | None = None) -> None:
    """Prints a line to `stream` (None: stdout) as `put` does. If the stream takes no more, because its reader has left
    or its disk is full, this costs one warning, and all after that is lost."""
    stream = stream or sys.stdout
    try:
        put(text, stream=stream)
    except (OSError, ValueError) as error:
        _mute(stream)
        if stream is not sys.stderr:
            tell(f"warning: terminal: {type(error).__name__}: {error}; the run goes on", sys.stderr)


def put(
    *texts: object,
    stream: TextIO | None = None,
    sep: str = " ",
    end: str = "\n",
    safe: bool = False,
) -> None:
    """As `print`, and the only caller of it in all programs: names of files, rows and texts of strangers are in what
    they print, so that a text loses what would control a terminal (`shown`), unless it is `safe`: has lost that, and
    got colours. Characters that the encoding of the stream (None: stdout) lacks are escapes. Raises OSError or
    ValueError if the stream takes no more."""
    stream = stream or sys.stdout
    encoding = getattr(stream, "encoding", None) or "utf-8"
    text = sep.join(map(str, texts))
    text = text if safe else shown(text)
    text = text.encode(encoding, "backslashreplace").decode(encoding)
    print(text, file=stream, end=end, flush=True)


def filter_libraries() -> None:
    """From now on warnings, loggers and tracebacks of this process print what `put` would: matplotlib's, for instance,
    repeat what rows say."""

    def warn(message, category, filename, lineno, file=None, line=None):
        text = warnings.formatwarning(message, category, filename, lineno, line)
        tell(text.rstrip("\n"), file or sys.stderr)

    def record(*args, **kwargs) -> logging.LogRecord:
        made = logging.LogRecord(*args, **kwargs)
        with suppress(Exception):  # a logger's own mistake is told by itself
            made.msg, made.args = shown(made.getMessage()), None
        return made

    def uncaught(kind, error, trace):
        if fix := limit_behind(error):
            return tell_error(f"error: {one_line(error)}; {fix}")
        tell("".join(traceback.format_exception(kind, error, trace)).rstrip("\n"), sys.stderr)

    warnings.showwarning = warn
    logging.setLogRecordFactory(record)
    sys.excepthook = uncaught


def _mute(stream: TextIO) -> None:
    """All that a stream still gets is lost; else Python would fail at exit, with code 120, on what is buffered."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@contextmanager
def answering() -> Iterator[None]:
    """Around a program, or its --help, whose whole work is what it prints on stdout. If that takes no more, it ends in
    one line with exit code 2, and without a word, as SIGPIPE would end it, if its reader has left."""
    filter_libraries()
    # A process may have been started without.
    sys.stdout = sys.stdout or open(os.devnull, "w")
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.filename is not None:
            raise
        _mute(sys.stdout)
        if error.errno == errno.EPIPE:
            sys.exit(128 + signal.SIGPIPE)
        fail(f"standard output: {error.strerror}; free some space, or name another file", 0)


def regular(path: str | Path) -> Path:
    """The path of a file that is to be read. OSError for a pipe or device, or a link to one, which has no end."""
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
        raise OSError(errno.EINVAL, "is a pipe or device", str(path))
    return Path(path)


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """ "; did you mean X?" with up to three of `choices` that are spelled like `word` or hold it, or an empty one."""
    found = {choice.strip("-").replace("-", "_"): choice for choice in choices if choice != word}
    key = word.strip("-").replace("-", "_")
    like = (
        get_close_matches(key, found, 3, 0.7)
        or [each for each in found if len(key) > 2 and f"_{key}" in each][:3]
    )
    return f"; did you mean {' or '.join(found[each] for each in like)}?" if like else ""


def one_line(error: BaseException, most: int = 300, kind: bool = True) -> str:
    """The text of an error without line breaks, `most` characters of it, after its type if `kind`."""
    return f"{type(error).__name__}: " * kind + " ".join(str(error).split())[:most]


def grouped(value: float | str | None, digits: int = 0, missing: str = "n/a") -> str:
    """A number as people read it, with `digits` behind the point: 14'550; a string as it is; `missing` for None."""
    if value is None:
        return missing
    return value if isinstance(value, str) else f"{value:,.{digits}f}".replace(",", "'")


def counted(number: int, what: str) -> str:
    """1 line; 14'550 lines."""
    return f"{grouped(number)} {what}{'s' * (number != 1)}"


def _in_a_cell(text: str) -> str:
    return " ".join(text.replace("|", "/").splitlines())


def markdown(columns: list[tuple[str, list[str]]]) -> str:
    """A Markdown table of (title, cells) columns. One with a number in it stands to the right, but for the first."""
    right = [
        i > 0 and any(text[:1].isdigit() for text in texts) for i, (_, texts) in enumerate(columns)
    ]
    head = [
        f"| {' | '.join(title for title, _ in columns)} |",
        f"|{''.join('---:|' if r else '---|' for r in right)}",
    ]
    lines = zip(*(texts for _, texts in columns), strict=True)
    return "\n".join(head + [f"| {' | '.join(map(_in_a_cell, line))} |" for line in lines])


class Progress(AbstractContextManager):
    """Says what this process is doing and for how long. On a terminal that is a line with a spinner, which stays below
    all that is printed; elsewhere a line for the first stage, and one for each EVERY_S that a stage lasts.

    speak: False on all ranks but one. stage: words, to which seconds are added before a "; ", or a function that gives
    them, which another thread calls; off a terminal empty words are not said."""

    EVERY_S = 10.0

    def __init__(self, stage: str = "", speak: bool = True, stream: TextIO | None = None):
        self.stream = stream or sys.stdout
        self.live = None
        self.over = threading.Event()
        self.stage(stage)
        # A process may have been started without standard output.
        if not speak or self.stream is None:
            return
        if self.stream.isatty() and os.environ.get("TERM") != "dumb":
            from rich.console import Console
            from rich.live import Live
            from rich.spinner import Spinner

            self.spinner = Spinner("dots")
            console = Console(file=self.stream)
            how = dict(transient=True, refresh_per_second=5, redirect_stderr=sys.stderr.isatty())
            self.live = Live(get_renderable=self._spin, console=console, **how)
            self.live.start(refresh=True)
            console.show_cursor()  # a process that is killed could not bring it back
        else:
            tell(f"{self}", self.stream)
            with suppress(RuntimeError):  # no more threads: what needs one says so
                threading.Thread(target=self._repeat, name="progress", daemon=True).start()

    def stage(self, stage: str | Callable[[], str]) -> None:
        """What is done from now on."""
        self.words = stage
        self.said = None
        self.since = 0.0
        str(self)

    def __str__(self) -> str:
        words = self.words() if callable(self.words) else self.words
        if words != self.said:
            self.since = time.monotonic()  # before `said`, by which another thread takes it for set
            self.said = words
        what, mark, hint = words.partition("; ")
        seconds = int(time.monotonic() - self.since)
        return what + f", {seconds} s" * (seconds > 0 and what != "") + mark + hint

    def _spin(self):
        self.spinner.update(text=str(self))
        return self.spinner

    def _repeat(self) -> None:
        while not self.over.wait(self.EVERY_S):
            if text := str(self):
                tell(text, self.stream)

    def __exit__(self, *_) -> None:
        """Removes the line; a second call does nothing."""
        self.over.set()
        if self.live:
            self.live.stop()
