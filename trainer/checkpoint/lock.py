"""The lock of a directory that one run at a time may write to: a file `lock` in it, which names its owner. No torch.

    said = acquire(folder)  # Refused if another run has it; a line to print if it was taken over, else None
    renew(folder)           # a sign of life, also given every 30 s; CheckpointError if another run has taken it over
    release(folder)         # at the latest when the process exits

A lock is stale if its process ran on this machine and is gone, or if another machine holds it and gave no sign of life
for 180 s. The latter is waited for, so that a job started again on another host takes over its own old lock. Ages are
by the file system's clock. Nothing here needs flock, which network file systems may ignore.
"""

import atexit
import json
import os
import secrets
import socket
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

from trainer.checkpoint.manifest import CheckpointError, Refused
from trainer.terminal.output import limit_behind, regular, tell

SIGN = 30  # seconds between signs of life
STALE = 180  # seconds without one until another machine's lock is taken over
POLL = 2  # seconds between looks for a sign
LONGEST = 1 << 16  # characters of a lock that are read
# {absolute path of the folder: (content of its lock, end of signs, device and inode of the folder)}.
_held: dict[str, tuple[str, threading.Event, tuple[int, int]]] = {}


def acquire(folder: str, patient: bool = True) -> str | None:
    """Takes the lock of `folder`, unless this process has it already; returns a line to print if another run had it.
    Waits up to 180 s for a sign of another machine's lock; without `patient`, that lock refuses at once unless it is
    stale. Raises Refused, in one line that names host and pid, and CheckpointError where no lock can be written."""
    key = os.path.abspath(folder)
    path = os.path.join(folder, "lock")
    over = threading.Event()
    if key in _held:
        return None
    text = json.dumps(
        dict(
            host=socket.gethostname(),
            pid=os.getpid(),
            start=start_ticks(os.getpid()),
            machine=_machine(),
            nonce=secrets.token_hex(8),
        )
    )
    try:
        said = _evict(folder, path, patient) if os.path.lexists(path) else None
        _create(path, text)
        directory = _directory(folder)
    except FileExistsError:
        raise Refused(
            f"--save {folder}: another run has just begun to write there; save elsewhere"
        ) from None
    except OSError as error:
        fix = "free some space, or name a directory that can be written"
        fix = limit_behind(error) or fix
        raise CheckpointError(f"{path}: {error.strerror}; {fix}") from None
    _held[key] = text, over, directory
    threading.Thread(target=_signs, args=(key, over), daemon=True).start()
    return said


def _signs(folder: str, over: threading.Event) -> None:
    while not over.wait(SIGN):
        with suppress(OSError, CheckpointError):  # the next save raises it
            renew(folder)


def renew(folder: str) -> None:
    """A sign of life; nothing happens if this process does not have the lock. CheckpointError if another run has, or
    if the folder is another one: of a file system that is no longer mounted there is left the empty one below."""
    folder = os.path.abspath(folder)
    if folder not in _held:
        return
    path = os.path.join(folder, "lock")
    text, _, directory = _held[folder]
    current = content(folder)
    if current is None and _directory(folder) != directory:
        raise CheckpointError(
            f"{folder}: is not the directory that this run locked, as if its file system was unmounted; mount it and "
            "run the same command again"
        )
    elif current is None:  # somebody has removed it by hand
        _create(path, text)
    elif current != text:
        raise CheckpointError(
            f"{path}: {_who(current)} took over this directory, after this run gave no sign of life for {STALE} s; "
            "end one of the two runs"
        )
    else:
        os.utime(path)


def release(folder: str) -> None:
    folder = os.path.abspath(folder)
    if folder in _held:
        text, over, _ = _held.pop(folder)
        over.set()
        with suppress(OSError):
            if content(folder) == text:
                os.unlink(os.path.join(folder, "lock"))


@atexit.register
def release_all() -> None:
    for folder in [*_held]:
        release(folder)


def content(folder: str) -> str | None:
    """Of the lock in `folder`, which no other lock has; None without a lock."""
    with suppress(FileNotFoundError):
        return _read(os.path.join(folder, "lock"))
    return None


def _directory(folder: str) -> tuple[int, int] | None:
    with suppress(FileNotFoundError):
        about = os.stat(folder)
        return about.st_dev, about.st_ino
    return None


def _create(path: str, text: str) -> None:
    with open(path, "x") as file:
        try:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())  # NFS tells of a full disk or quota here
        except OSError:  # an empty lock would be waited for
            os.unlink(path)
            raise


def _read(path: str) -> str:
    with open(regular(path), encoding="utf-8", errors="replace") as file:
        return file.read(LONGEST)


def _owner(text: str) -> dict:
    """The content of a lock; {} of one that is not written yet or is not this program's."""
    with suppress(ValueError, LookupError, TypeError, RecursionError):
        owner = json.loads(text)
        return owner if type(owner["pid"]) is int and 0 < owner["pid"] < 2**31 else {}
    return {}


def _who(text: str) -> str:
    owner = _owner(text)
    return f"pid {owner['pid']} on host {str(owner.get('host'))[:99]}" if owner else "somebody"


def _evict(folder: str, path: str, patient: bool) -> str | None:
    """Removes a stale lock; returns a line that says whose it was. Raises Refused if it is not stale."""
    try:
        text = _read(path)
        here = _owner(text).get("machine") == _machine()
        if _alive(_owner(text)) if here else _signs_again(folder, path, text, patient):
            raise Refused(
                f"--save {folder}: {_who(_read(path))} is writing there; wait, stop it, or save elsewhere"
            )
    except FileNotFoundError:  # its run has just ended
        return None
    aside = f"{path}-{secrets.token_hex(4)}"
    os.rename(path, aside)
    if _read(aside) != text:  # another run that starts now was faster: what was moved is its lock
        os.rename(aside, path)
        raise Refused(
            f"--save {folder}: {_who(_read(path))} has just begun to write there; save elsewhere"
        )
    os.unlink(aside)
    return f"took over the lock of {_who(text)}, " + (
        "which has ended" if here else f"which gave no sign of life for {STALE} s"
    )


def _signs_again(folder: str, path: str, text: str, patient: bool) -> bool:
    """Whether another machine's lock gives a sign before it is stale, which is assumed, not waited for, if not
    `patient`. Raises FileNotFoundError if the lock is given back."""
    with tempfile.TemporaryFile(dir=folder) as now:
        mark = os.stat(path).st_mtime
        left = STALE - max(0, os.fstat(now.fileno()).st_mtime - mark)
    if left > 0:
        if not patient:
            return True
        odd = "" if _owner(text) else f" ({path} is not a lock of this program)"
        tell(
            f"checkpoint: {folder}: {_who(text)} may be writing there, its last sign of life was {STALE - left:.0f} s "
            f"ago; waiting {left:.0f} s for another{odd}"
        )
    until = time.monotonic() + left
    while time.monotonic() < until:
        time.sleep(POLL)
        # Opening it makes NFS ask for its times again.
        if _read(path) != text or os.stat(path).st_mtime != mark:
            return True
    return False


def _machine() -> str:
    """Where a pid has a meaning: a host since its boot and, where containers have pids of their own, a container."""
    names = [socket.gethostname()]
    with suppress(OSError):
        names += [
            Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            os.readlink("/proc/self/ns/pid"),
        ]
    return " ".join(names)


def start_ticks(pid: int) -> str | None:
    """When a process began, in clock ticks since boot; None if it is gone or a zombie, or where there is no /proc."""
    with suppress(OSError):
        # From the 3rd on.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
        return None if fields[0] in "ZX" else fields[19]
    return None


def _alive(owner: dict) -> bool:
    try:
        os.kill(owner["pid"], 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's process, which /proc may hide
        return start_ticks(owner["pid"]) in (None, owner.get("start"))
    return start_ticks(owner["pid"]) == owner.get("start")  # else a later process has the pid
