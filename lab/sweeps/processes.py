"""The processes of a sweep: those of a setting end with it, and all with the sweep. Imports no torch."""

import contextlib
import ctypes
import multiprocessing
import os
import re
import runpy
import signal
import subprocess
import sys
import threading
from pathlib import Path

GRACE_S = 10  # from SIGTERM to SIGKILL
VMSTAT = Path("/proc/vmstat")


def end_at_signals() -> None:
    """At the first SIGINT, SIGTERM or SIGHUP that is not ignored this process ends by SystemExit; others do nothing."""

    def end(signum, frame):
        for number in ends:
            signal.signal(number, signal.SIG_IGN)
        raise SystemExit(128 + signum)

    ends = [
        s
        for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(s) is not signal.SIG_IGN
    ]
    for number in ends:
        signal.signal(number, end)


def oom_kills() -> int:
    """Processes that the kernel has ended to free memory since it started; 0 where it does not tell (not Linux)."""
    with contextlib.suppress(OSError, TypeError):
        return int(re.search(r"^oom_kill (\d+)", VMSTAT.read_text(), re.M)[1])
    return 0


def follow_parent() -> None:
    """This process ends when its parent does, where the system offers that (PR_SET_PDEATHSIG, Linux)."""
    if prctl := getattr(ctypes.CDLL(None), "prctl", None):
        prctl(1, signal.SIGTERM)


class Forked:
    """A run of a Python file with `argv`, as subprocess.Popen would start it, in a process that is forked from one that
    has imported torch and what lies on it, which takes longer than a small run. For CPUs: CUDA must not be forked."""

    def __init__(self, argv: list[str], out, env: dict[str, str]):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["trainer.run"])
        self.argv = argv
        self.process = context.Process(target=Forked.begin, args=(argv, out.name, os.getcwd(), env))
        self.process.start()
        self.pid = self.process.pid

    @staticmethod
    def begin(argv: list[str], log: str, folder: str, env: dict[str, str]) -> None:
        """What the new process does."""
        # The process that forks is another one, and lives longer.
        sweep = multiprocessing.parent_process()
        threading.Thread(
            target=lambda: (sweep.join(), os.kill(os.getpid(), signal.SIGTERM)), daemon=True
        ).start()
        os.setsid()
        os.chdir(folder)
        out = os.open(log, os.O_WRONLY | os.O_APPEND)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for target, source in enumerate((nothing, out, out)):
            os.dup2(source, target)
        sys.stdout, sys.stderr = (open(n, "w", buffering=1, closefd=False) for n in (1, 2))
        os.environ.clear()
        os.environ.update(env | {"SWEEP_FORKED": "1"})
        sys.argv = argv
        runpy.run_path(argv[0], run_name="__main__")

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        return self.process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """The exit status. subprocess.TimeoutExpired after `timeout` seconds."""
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired(self.argv, timeout)
        return self.process.exitcode


def stop(child: subprocess.Popen | Forked, token: str) -> None:
    """End a setting's processes. torchrun's workers lead sessions of their own: they are found by their environment."""
    if child.poll() is None:
        # It may not lead its group yet.
        with contextlib.suppress(subprocess.TimeoutExpired, ProcessLookupError):
            os.killpg(child.pid, signal.SIGTERM)
            child.wait(GRACE_S)
    # None on macOS, where the process group has to do.
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if token.encode() in environ.read_bytes():
                os.kill(int(environ.parent.name), signal.SIGKILL)
    for end in (os.killpg, *[os.kill] * (child.poll() is None)):  # it may not lead a group yet
        with contextlib.suppress(OSError):
            end(child.pid, signal.SIGKILL)
    child.wait()
