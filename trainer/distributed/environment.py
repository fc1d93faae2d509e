"""What torchrun tells a process by its environment. Imports no torch.

rank, local_rank, world = ranks()      # (0, 0, 1) without torchrun
"""

import os
import re
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from trainer.terminal.output import fail

MORE = "LOCAL_WORLD_SIZE", "TORCHELASTIC_MAX_RESTARTS"  # numbers that torchrun also sets
PARENT = os.getppid()  # now: it may be gone when torch is imported


def ranks() -> tuple[int, int, int]:
    """(rank, local rank, world) by torchrun's environment, (0, 0, 1) without; exits with 2 if that makes no sense."""
    names = "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"
    variables = {name: os.environ[name] for name in (*names, *MORE) if os.environ.get(name)}
    there = [name for name in names[:3] if name in variables]
    missing = [name for name in names if name not in variables]
    if not there:
        return 0, 0, 1
    if missing:
        fail(
            f"{', '.join(there)} set but not {', '.join(missing)}: start with torchrun, or unset them for one rank",
            0,
        )
    # The others are numbers.
    check_host(variables.pop("MASTER_ADDR"), int(os.environ.get("LOCAL_RANK") != "0"))
    n = {
        name: int(text) if re.fullmatch("[0-9]{1,9}", text) else -1
        for name, text in variables.items()
    }
    if min(n.values()) < 0 or n["RANK"] >= n["WORLD_SIZE"] or not 0 < n["MASTER_PORT"] < 2**16:
        wrong = ", ".join(f"{name} {text}" for name, text in variables.items())
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


def wait_for_listener(host: str, port: int, seconds: float) -> None:
    """Returns as soon as a program listens at this address; TimeoutError if none does for so long. Torch's own client
    would wait twice as long, and print stack frames of C++ at each attempt."""
    until = time.monotonic() + seconds
    pause = 0.1
    while True:
        try:
            left = until - time.monotonic()
            return socket.create_connection((host, port), timeout=max(0.1, left)).close()
        except OSError as error:
            if time.monotonic() >= until:
                raise TimeoutError(f"nobody answers there ({error.strerror or error})") from None
        time.sleep(max(0, min(pause, until - time.monotonic())))
        pause = min(2, 2 * pause)


@contextmanager
def without_stderr_of_torch() -> Iterator[None]:
    """Inside it, what torch's C++ code writes to stderr is lost: stack frames of errors that it also raises. Nothing is
    lost where TORCH_CPP_LOG_LEVEL asks for it."""
    # A process may have been started without standard error.
    if os.environ.get("TORCH_CPP_LOG_LEVEL") or sys.__stderr__ is None:
        yield
        return
    stderr = os.dup(2)
    try:
        with open(os.devnull, "w") as null:
            os.dup2(null.fileno(), 2)
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)


def address_of(host: str) -> str:
    """What a name of a host means on this one, which may be wrong: "first (127.0.1.1)"; an address as it is."""
    with suppress(OSError, UnicodeError):
        address = socket.getaddrinfo(host, None)[0][4][0]
        return host if address == host else f"{host} ({address} on this host)"
    return host


def has_launcher() -> bool:
    """Whether torchrun, if it has started this process, is still there: nobody else would ever end its ranks. A shell
    may leave its rank alone."""
    return os.getppid() == PARENT or "TORCHELASTIC_RUN_ID" not in os.environ
