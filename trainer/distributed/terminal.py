"""What torchrun tells a process, and what the process tells people: lines, and errors with an exit code.

    rank, local_rank, world = ranks()      # (0, 0, 1) without torchrun
    fail("--depth 0: must be at least 1", rank)      # one line on stderr, exit code 2
    tell("step 1", sys.stdout)             # a line that never ends the run, even if nobody can read it

Imports no torch, so that bad flags are answered at once.
"""

import os
import sys
import time
from contextlib import suppress
from typing import NoReturn, TextIO


def ranks() -> tuple[int, int, int]:
    """(rank, local rank, world) by torchrun's environment, (0, 0, 1) without; exits with 2 if that makes no sense."""
    names = "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"
    told = {name: os.environ[name] for name in (*names, "LOCAL_WORLD_SIZE") if os.environ.get(name)}
    there, missing = [name for name in names[:3] if name in told], [name for name in names if name not in told]
    if not there:
        return 0, 0, 1
    if missing:
        fail(f"{', '.join(there)} set but not {', '.join(missing)}: start with torchrun, or unset them for one rank", 0)
    del told["MASTER_ADDR"]  # the others are numbers
    n = {name: int(text) if text.isdecimal() else -1 for name, text in told.items()}
    if min(n.values()) < 0 or n["RANK"] >= n["WORLD_SIZE"] or not 0 < n["MASTER_PORT"] < 2**16:
        wrong = ", ".join(f"{name} {text}" for name, text in told.items())
        fail(f"{wrong}: must be numbers, RANK < WORLD_SIZE, MASTER_PORT from 1 to 65535", 0)
    return n["RANK"], n["LOCAL_RANK"], n["WORLD_SIZE"]


def fail(message: str, rank: int, code: int = 2) -> NoReturn:
    """Ends the process with one line on stderr and an exit code."""
    if rank:
        time.sleep(5)  # if rank 0 fails as well, torchrun ends this rank meanwhile, and the line is printed only once
    tell(f"error: {message}", sys.stderr)
    sys.exit(code)


def tell(text: str, stream: TextIO | None = None) -> None:
    """Prints a line to `stream` (None: stdout), characters that its encoding lacks as escapes. If the stream takes no
    more, because its reader has left or its disk is full, this costs one warning, and all after that is lost."""
    stream = stream or sys.stdout
    try:
        encoding = getattr(stream, "encoding", None) or "utf-8"
        print(text.encode(encoding, "backslashreplace").decode(encoding), file=stream, flush=True)
    except (OSError, ValueError) as error:
        with suppress(OSError, ValueError):  # else Python would fail at exit, with code 120, on what is buffered
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        if stream is not sys.stderr:
            tell(f"warning: terminal: {type(error).__name__}: {error}; the run goes on", sys.stderr)


def one_line(error: BaseException, most: int = 300, kind: bool = True) -> str:
    """The text of an error without line breaks, `most` characters of it, after its type if `kind`."""
    return f"{type(error).__name__}: " * kind + " ".join(str(error).split())[:most]


def grouped(value: float | str | None, digits: int = 0, missing: str = "n/a") -> str:
    """A number as people read it, with `digits` behind the point: 14'550; a string as it is; `missing` for None."""
    if value is None:
        return missing
    return value if isinstance(value, str) else f"{value:,.{digits}f}".replace(",", "'")


def markdown(columns: list[tuple[str, list[str]]]) -> str:
    """A Markdown table of (title, cells) columns. One with a number in it stands to the right, but for the first."""
    right = [i > 0 and any(text[:1].isdigit() for text in texts) for i, (_, texts) in enumerate(columns)]
    head = [f"| {' | '.join(title for title, _ in columns)} |", f"|{''.join('---:|' if r else '---|' for r in right)}"]
    lines = zip(*(texts for _, texts in columns), strict=True)
    return "\n".join(head + [f"| {' | '.join(text.replace('|', '/') for text in line)} |" for line in lines])
