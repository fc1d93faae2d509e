"""torchrun as ./launch.sh uses it: a run that fails ends with one line instead of forty, and with its rank's exit code.

    python -m trainer.distributed.torchrun --standalone --nproc-per-node 4 main.py --depth 8

Takes torchrun's flags, and starts, signals and restarts the ranks as torchrun does.
"""

import locale
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import pairwise
from unittest import mock

from trainer.distributed.environment import (
    address_of,
    check_host,
    wait_for_listener,
    without_stderr_of_torch,
)
from trainer.terminal.output import (
    CLEAR_LINE,
    import_torch,
    is_terminal,
    limit_behind,
    put,
    tell,
)
from trainer.terminal.progress import Progress
from trainer.terminal.text import counted, one_line

# How ranks end after another one: in the same second, or ended by torchrun.
FOLLOWING = 7, 143, -signal.SIGTERM
# How ranks end that have obeyed a signal. None: a process that cannot be ended, as one that waits for a dead disk.
STOPPED = {None, 0} | {
    code
    for kind in (
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGHUP,
        signal.SIGQUIT,
        signal.SIGUSR1,
        signal.SIGXCPU,
    )
    for code in (-kind, 128 + kind)
}
MEMORY = (
    "; the kernel does so when the machine or a limit of its job has no memory left (see dmesg)"
)
ELASTIC_S, STATIC_S = 60, 600  # torch's own limits of the wait for the first host
SLOW_S = 5  # at least, for the store behind a port on which somebody listens
LATE = "; torchrun does so 30 s after it: what the rank had not saved is lost"


NEXT = """\
next     ./launch.sh run --depth 8 --save runs/a       # Ctrl-C saves and ends, this line resumes
         .venv/bin/python plan.py --gpu h100 --gpus 8  # will a larger model fit, and how fast
         ./launch.sh sweep depth --small               # settings side by side, in one table
         docs/tutorial.md                              # your own loop: two files to copy"""


@contextmanager
def failures_after_signal() -> Iterator[dict]:
    """Yields a dict that gets torchrun's record of each rank that fails while torchrun ends it, by rank. After a signal
    torchrun raises an exception that holds no record of ranks."""
    from torch.distributed.elastic.multiprocessing.api import SubprocessContext
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    failures = {}
    close = SubprocessContext.close

    def close_and_record(context: SubprocessContext, *args, **kwargs) -> None:
        close(context, *args, **kwargs)
        failures.clear()  # those of ranks that were restarted
        for local_rank, handler in context.subprocess_handlers.items():
            code = handler.proc.returncode
            if code not in STOPPED:
                rank = int(context.envs[local_rank]["RANK"])
                file = context.error_files[local_rank]
                failures[rank] = ProcessFailure(local_rank, handler.proc.pid, code, file)

    with mock.patch.object(SubprocessContext, "close", close_and_record):
        yield failures


def report_first(failures: dict, when: str, hint: str) -> int:
    """Prints which rank failed first; returns its exit code, or 128 + N if signal N ended it. failures: torchrun's
    records by rank; hint: what to add if that was SIGKILL."""
    causes = {
        rank: failure for rank, failure in failures.items() if failure.exitcode not in FOLLOWING
    }
    # Time stamps are in whole seconds.
    rank, failure = min((causes or failures).items(), key=lambda item: item[1].timestamp)
    code = failure.exitcode
    what = f"was ended by {failure.signal_name()}" if code < 0 else f"ended with exit code {code}"
    what += when + hint * (code == -signal.SIGKILL)
    tell(f"torchrun: rank {rank}, process {failure.pid}, {what}", sys.stderr)
    return 128 - code if code < 0 else code


def ranks_to_start(argv: list[str]) -> str:
    """What torchrun's flags say, before torch reads them: "4 ranks"."""
    words = " ".join(argv).replace("=", " ").split()
    for word, following in pairwise([*words, ""]):
        if word in ("--nproc-per-node", "--nproc_per_node") and following.isdecimal():
            return counted(int(following), "rank")
    return "the ranks"


def wait_for_store(host: str, port: int, seconds: float) -> None:
    """Returns as soon as the first host's store answers; TimeoutError if none does for so long. Torch itself waits
    without end for the first word of another program that listens there."""
    from torch.distributed import TCPStore

    until = time.monotonic() + seconds
    wait_for_listener(host, port, seconds)
    left = timedelta(seconds=max(SLOW_S, until - time.monotonic()))
    answers: list[TCPStore | Exception] = []

    def ask() -> None:
        try:
            how = dict(is_master=False, wait_for_workers=False, timeout=left)
            answers.append(TCPStore(host, port, **how))
        except Exception as error:
            answers.append(error)

    thread = threading.Thread(target=ask, daemon=True, name="store")
    with without_stderr_of_torch():
        thread.start()
        thread.join(left.total_seconds())
    if not answers or isinstance(answers[0], Exception):
        raise TimeoutError("what answers there is no store of torch")


def main(argv: list[str]) -> int:
    """torchrun with these flags. Returns 0, or the exit code of the first rank that failed (128 + N if signal N ended
    it), or 128 + N if signal N ended torchrun and every rank obeyed."""
    unusual = locale.getpreferredencoding(False).lower() != "utf-8"
    if unusual or any(name.startswith("TORCH_") for name in os.environ):
        import_torch(0)  # says in one line why torch cannot be imported
    with Progress(f"importing torch, to start {ranks_to_start(argv)}"):
        from torch.distributed import DistError, run
        from torch.distributed.elastic.multiprocessing import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.elastic.rendezvous import RendezvousError

    # They report at length what is reported below.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    logging.getLogger("torch.distributed.elastic.agent.server.api").setLevel(logging.ERROR)
    args = run.parse_args(argv)
    try:
        run.config_from_args(args)
    except ValueError as error:
        tell(f"torchrun: {one_line(error)}", sys.stderr)
        return 2
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # under nohup
        args.signals_to_handle = "SIGTERM,SIGINT,SIGQUIT"
    endpoint, _, port = args.rdzv_endpoint.rpartition(":")
    host = endpoint.strip("[]") or args.master_addr
    port = int(port) if port.isdecimal() else int(args.master_port or 29500)
    check_host(host)
    try:
        if "is_host=0" in args.rdzv_conf:
            wait_for_store(host, port, ELASTIC_S)
        elif args.rdzv_backend == "static" and args.node_rank > 0:
            wait_for_store(host, port, STATIC_S)
        with failures_after_signal() as failures:
            run.run(args)
    except SignalException as e:
        if failures:
            return report_first(failures, f" after {signal.Signals(e.sigval).name}", LATE)
        return 128 + e.sigval
    except ChildFailedError as e:
        return report_first(e.failures, ", the first of this host to fail", MEMORY)
    except (DistError, RendezvousError, TimeoutError) as e:
        cause = "the first host, by which all meet, does not answer; start all again with the same lines"
        if isinstance(e, TimeoutError):
            cause += f", where MASTER_ADDR means it on every host; here it is {address_of(host)}"
        elif "waiting for clients" in str(e):
            cause = f"not all hosts have come; MASTER_ADDR must mean this one on each, {address_of(host)}"
        if "EADDRINUSE" in str(e) or "in use" in str(e):
            cause = "another program uses the port by which all meet; choose another MASTER_PORT"
        cause = limit_behind(e) or cause
        tell(f"torchrun: {cause}: {one_line(e)}", sys.stderr)
        return 1
    finally:
        # A rank that was killed leaves the line of its Progress, to which the shell's prompt would be glued.
        if sys.stdout is not None and is_terminal(sys.stdout):
            put(f"{CLEAR_LINE}\x1b[?25h", end="", safe=True)
    if os.environ.get("MAIN_JOB"):
        tell(NEXT)
    return 0


if __name__ == "__main__":
    # Until torchrun handles it, Ctrl-C ends this process without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(main(sys.argv[1:]))
