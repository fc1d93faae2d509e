"""torchrun as ./launch.sh uses it: a run that fails ends with a line instead of forty, and with its rank's exit code.

    python -m trainer.distributed.torchrun --standalone --nproc-per-node 4 --start-method forkserver main.py --depth 8

Takes torchrun's flags. With `--start-method forkserver`, for ranks on CPUs, each rank is forked from one process that
has imported torch, which costs seconds only once, and does so while torchrun starts, on another core.
"""

import atexit
import locale
import logging
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from unittest import mock

from trainer.distributed.terminal import (
    LIMIT,
    LIMITS,
    Progress,
    check_host,
    import_torch,
    one_line,
    tell,
)

SIGNALS = signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT
# What torchrun passes on to the ranks; they read it, too.
HANDLED = "TORCHELASTIC_SIGNALS_TO_HANDLE"
# How ranks end after another one: in the same second, or ended by torchrun.
FOLLOWING = 7, 143, -signal.SIGTERM
# How ranks end that have heeded a signal, after saving. None: they cannot be ended, as on a dead disk.
STOPPED = {None, 0} | {end for kind in (signal.SIGINT, *SIGNALS) for end in (-kind, 128 + kind)}
GONE = 255  # exit code of all ranks for multiprocessing once the process that forks them is gone
MEMORY = (
    "; the kernel does so when the machine or a limit of its job has no memory left (see dmesg)"
)
PRELOAD = ["torch._inductor.compile_fx", "trainer.checkpoint.weights", "trainer.run", "tyro"]


def rank(script: str, *argv: str) -> None:
    """What a forked process does: it runs the script as its own main module."""
    os.setsid()  # Ctrl-C reaches torchrun alone, which passes it on
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for kind in SIGNALS:
        signal.signal(kind, signal.SIG_DFL if kind.name in os.environ[HANDLED] else signal.SIG_IGN)
    from torch.distributed.run import run_script_path

    try:
        run_script_path(script, *argv)
    except SystemExit as e:
        if e.code:
            raise
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception:
        traceback.print_exc()
        sys.exit(1)
    finally:
        atexit._run_exitfuncs()  # which multiprocessing leaves out: such as to give a lock back
    # Torchrun has it wait for the others, or be ended with them.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def failures_of_ranks() -> Iterator[dict]:
    """Yields a dict in which torchrun's record of each rank that it ends stands by its number, unless the rank has
    STOPPED: for a signal torchrun itself raises an exception that tells nothing of ranks."""
    from torch.distributed.elastic.multiprocessing.api import PContext
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    failures = {}
    close = PContext.close

    def close_and_note(ranks: PContext, *args, **kwargs) -> None:
        close(ranks, *args, **kwargs)
        failures.clear()  # of ranks that were started anew
        if hasattr(ranks, "subprocess_handlers"):
            codes = {n: each.proc.returncode for n, each in ranks.subprocess_handlers.items()}
        else:
            codes = {n: each.exitcode for n, each in enumerate(ranks._pc.processes)}
        for n, code in codes.items():
            if code not in STOPPED:
                own = ProcessFailure(n, ranks.pids()[n], code, ranks.error_files[n])
                failures[int(ranks.envs[n]["RANK"])] = own

    with mock.patch.object(PContext, "close", close_and_note):
        yield failures


def tell_first(failures: dict, when: str, hints: dict[int, str]) -> int:
    """Says which rank the others have followed, with the hint for its exit code; returns that code, 128 + N if signal N
    ended the rank. failures: torchrun's records, by rank."""
    own = {
        number: each for number, each in failures.items() if each.exitcode not in FOLLOWING
    } or failures
    # Whose clock ticks in seconds.
    number, failure = min(own.items(), key=lambda each: each[1].timestamp)
    code = failure.exitcode
    what = f"was ended by {failure.signal_name()}" if code < 0 else f"ended with exit code {code}"
    what += f"{when}{hints.get(code, '')}"
    tell(f"torchrun: rank {number}, process {failure.pid}, {what}", sys.stderr)
    return 128 - code if code < 0 else code


def main(argv: list[str]) -> int:
    """torchrun with these flags; returns the exit code: 0, that of the first rank that failed (128 + N if signal N
    ended it), 128 + N if signal N ended torchrun and no rank failed at that."""
    script = next((i for i, word in enumerate(argv) if word.endswith(".py")), len(argv))
    nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    os.environ[HANDLED] = "SIGTERM,SIGINT,SIGQUIT" + ",SIGHUP" * (not nohup)
    odd = locale.getpreferredencoding(False).lower() != "utf-8"
    if odd or any(name.startswith("TORCH_") for name in os.environ):
        import_torch(0)  # first: if it fails, the process that forks would show a traceback of it
    if fork := "forkserver" in argv[:script]:
        forkserver.set_forkserver_preload(PRELOAD)
        # SLURM may send SIGTERM to every process, a terminal that closes SIGHUP, Ctrl-C SIGINT. Without the one that
        # forks, ranks that still save seem to have ended.
        before = {kind: signal.signal(kind, signal.SIG_IGN) for kind in (signal.SIGINT, *SIGNALS)}
        forkserver.ensure_running()
        for kind, handler in before.items():
            signal.signal(kind, handler)
    with Progress("starting torchrun"):
        from torch.distributed import DistError, run
        from torch.distributed.elastic.multiprocessing import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.elastic.rendezvous import RendezvousError

        if fork:  # a process that ends at once comes when all is imported
            first = multiprocessing.get_context("forkserver").Process(target=int)
            first.start()
            first.join()
    for name in ("torch.distributed.elastic.multiprocessing.api", "torch.multiprocessing.spawn"):
        # They tell of a failed rank what is told below.
        logging.getLogger(name).setLevel(logging.CRITICAL)
    # Its warning of a signal, such as Ctrl-C, would stand above what the run says of it.
    logging.getLogger("torch.distributed.elastic.agent.server.api").setLevel(logging.ERROR)
    args = run.parse_args(argv)
    args.signals_to_handle = os.environ[HANDLED]
    if fork:
        args.run_path = True
        run.run_script_path = rank
    check_host(args.rdzv_endpoint.rpartition(":")[0].strip("[]") or args.master_addr)
    try:
        with failures_of_ranks() as failures:
            run.run(args)
    except SignalException as e:
        late = "; torchrun does so 30 s after it: what the rank had not saved is lost"
        name = signal.Signals(e.sigval).name
        if not failures:
            return 128 + e.sigval
        return tell_first(failures, f" after {name}", {-signal.SIGKILL: late})
    except ChildFailedError as e:
        forked = ", as when the process that has forked the ranks is killed" * fork
        hints = {-signal.SIGKILL: MEMORY, GONE: forked + MEMORY}
        return tell_first(e.failures, ", the first of this host to fail", hints)
    except (DistError, RendezvousError) as e:
        told = "the first host, by which all meet, does not answer; start all again with the same lines"
        if "EADDRINUSE" in str(e) or "in use" in str(e):
            told = "another program uses the port by which all meet; choose another MASTER_PORT"
        if LIMIT.search(str(e)):
            told = LIMITS
        tell(f"torchrun: {told}: {one_line(e)}", sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    # Ctrl-C has no traceback; torchrun's handler takes over.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(main(sys.argv[1:]))
