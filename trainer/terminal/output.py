"""What a process prints: lines, and errors with an exit code. Imports no torch.

    fail("--depth 0: must be at least 1", rank)      # one line on stderr, exit code 2
    tell("step 1", sys.stdout)             # a line that never ends the run, even if nobody can read it

Bad flags are answered at once, since nothing here waits for torch.
"""

import argparse
import errno
import json
import logging
import os
import re
import resource
import shutil
import signal
import sys
import time
import traceback
import unicodedata
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn, TextIO

from trainer.terminal.text import folded, one_line

# What the system says where a process may open no more files, or start no more threads.
LIMIT = re.compile(
    "EMFILE|ENFILE|too many open files|Resource temporarily unavailable|Cannot allocate memory|"
    "can't start new thread",
    re.IGNORECASE,
)


def limit_behind(error: BaseException) -> str:
    """What to do where a limit of the system is behind an error, with the limits of this process; else empty."""
    if not LIMIT.search(str(error)):
        return ""
    names = {"-n": resource.RLIMIT_NOFILE, "-u": resource.RLIMIT_NPROC, "-v": resource.RLIMIT_AS}
    soft = {name: resource.getrlimit(which)[0] for name, which in names.items()}
    limits = (
        f"{name} {'unlimited' if most == resource.RLIM_INFINITY else most}"
        for name, most in soft.items()
    )
    return f"raise the limits of files, processes and memory (ulimit {', '.join(limits)}), or end other programs"


def fail(message: str, rank: int, code: int = 2) -> NoReturn:
    """Ends the process with one line on stderr and an exit code."""
    if rank:
        # If rank 0 fails as well, torchrun ends this rank meanwhile, and the line is printed only
        # once.
        time.sleep(5)
    tell_error(f"error: {message}")
    sys.exit(code)


def need_packages(program: str, *names: str) -> None:
    """Ends the process in one line, which names the first that is missing, where this Python lacks such a package."""
    if missing := [name for name in names if not find_spec(name)]:
        fix = "source .venv/bin/activate (./launch.sh install makes .venv)"
        rank = os.environ.get("RANK", "0") != "0"
        fail(f"{program} needs {missing[0]}: {fix}", rank)


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
    return "".join(letter if _harmless(letter) else "\ufffd" for letter in text)


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
        message = dict(extraInfo=dict(py_callstack=line, timestamp=int(time.time())))
        with suppress(OSError), open(file, "w") as stream:
            json.dump(dict(message=message), stream)


# The first word of a line -> how a terminal shows it.
COLOURS = {"error": "1;31", "warning": "33", "note": "36", "outcome  ok": "1;32", "outcome": "1;31"}
HEADS = re.compile(f"^(?:{'|'.join(COLOURS)})(?=[:, ])", re.MULTILINE)
WIDTH = 100  # columns, at most, of a line on a terminal
CLEAR_LINE = "\r\x1b[2K"


def is_terminal(stream: TextIO) -> bool:
    """Whether a person looks at this stream, on a terminal that understands more than text."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def coloured(text: str, stream: TextIO) -> str:
    """The text with the first word of errors, notes and outcomes in colour, on a terminal where NO_COLOR is not set."""
    if os.environ.get("NO_COLOR") or not is_terminal(stream):
        return text
    return HEADS.sub(lambda head: f"\x1b[{COLOURS[head[0]]}m{head[0]}\x1b[0m", text)


def tell(text: str, stream: TextIO | None = None) -> None:
    """Prints a line to `stream` (None: stdout) as `put` does, on a terminal `folded` to its width. If the stream takes
    no more, because its reader has left or its disk is full, this costs one warning, and all after that is lost."""
    stream = stream or sys.stdout
    try:
        text = shown(text)
        if is_terminal(stream):
            text = folded(text, min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns))
        put(coloured(text, stream), stream=stream, safe=True)
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

    def make_record(*args, **kwargs) -> logging.LogRecord:
        record = logging.LogRecord(*args, **kwargs)
        # Logging itself reports a message that does not fit its arguments.
        with suppress(Exception):
            record.msg, record.args = shown(record.getMessage()), None
            # Torch's caches warn with a traceback of each entry that cannot be loaded.
            if record.levelno < logging.ERROR and record.exc_info and record.exc_info[1]:
                record.msg += f" ({one_line(record.exc_info[1], 200)})"
                record.exc_info = None
        return record

    def uncaught(kind, error, trace):
        if fix := limit_behind(error):
            return tell_error(f"error: {one_line(error)}; {fix}")
        tell("".join(traceback.format_exception(kind, error, trace)).rstrip("\n"), sys.stderr)

    warnings.showwarning = warn
    logging.setLogRecordFactory(make_record)
    sys.excepthook = uncaught


class Parser(argparse.ArgumentParser):
    """Of a command line, whose words an error repeats."""

    def _print_message(self, message: str, file: TextIO | None = None) -> None:
        super()._print_message(shown(message), file)


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
