"""What torchrun tells a process by its environment. Imports no torch.

rank, local_rank, world = ranks()      # (0, 0, 1) without torchrun
"""

import os
import socket

from trainer.terminal.output import fail

MORE = "LOCAL_WORLD_SIZE", "TORCHELASTIC_MAX_RESTARTS"  # numbers that torchrun also sets
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


def has_launcher() -> bool:
    """Whether torchrun, if it has started this process, is still there: nobody else would ever end its ranks. A shell
    may leave its rank alone."""
    return os.getppid() == PARENT or "TORCHELASTIC_RUN_ID" not in os.environ
