"""How a process of a run begins and ends: deterministic algorithms, joining a process group, leaving it again.

    set_deterministic(False)                                           # before anything is compiled
    device = connect(config, rank, local_rank, world, timeout=600)     # then torch.distributed works as usual
    shutdown()                                                         # on all ranks, after a run that succeeded

The group is that of the ranks that torchrun has started (NCCL on CUDA, gloo on a CPU); without torchrun it has one
rank; with --world it is a simulated one (trainer/distributed/simulated_world.py).
"""

import os
import re
import secrets
import socket
import subprocess
import threading
import time
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._inductor import config as inductor
from torch._inductor import cpp_builder, cpu_vec_isa

from gloo import one_worker_thread
from trainer.distributed import simulated_world
from trainer.distributed.environment import (
    address_of,
    has_launcher,
    wait_for_listener,
    without_stderr_of_torch,
)
from trainer.terminal.output import limit_behind

SLOW_S = 5  # by which torch's own limits are exceeded on a busy machine


def set_deterministic(on: bool) -> None:
    """Whether all that runs from now on must give the same bits every time. RuntimeError if an operator cannot."""
    torch.use_deterministic_algorithms(on)
    # No code here reads uninitialized memory.
    torch.utils.deterministic.fill_uninitialized_memory = False
    # It would else time kernels, and the one it picks may add in another order.
    inductor.deterministic = on
    if on:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def skip_probes_of_vector_instructions() -> None:
    """Has Inductor take the CPU's widest vector instructions if the C++ compiler knows their flags. Inductor itself
    compiles a library for each set and loads it, in every rank: a third of the CPU time in which four ranks compile
    their first step. A setting of the user's stands."""
    if inductor.cpp.vec_isa_ok is not None or os.environ.get("ATEN_CPU_CAPABILITY"):
        return
    supported = cpu_vec_isa.x86_isa_checker()
    for instructions in cpu_vec_isa.supported_vec_isa_list:
        if all(flag in supported for flag in str(instructions).split()):
            flags = instructions.build_arch_flags().split()
            # An older compiler may lack the flags: Inductor then finds out what works.
            with suppress(Exception):
                command = [cpp_builder.get_cpp_compiler(), *flags, "-E", "-x", "c++", os.devnull]
                subprocess.run(command, check=True, capture_output=True)
                inductor.cpp.vec_isa_ok = True
            return


def connect(config, rank: int, local_rank: int, world: int, timeout: float = 0) -> torch.device:
    """Joins the process group, which must not exist yet, and returns the device of this rank. config: the flags
    `device`, `world` and `link`. timeout: seconds that a collective may take, in groups made later too; 0: torch's own
    limit. Raises ValueError, one line with the fix: a device that is not there, too few GPUs, ranks that do not
    meet."""
    cuda = torch.cuda.is_available() if config.device == "auto" else config.device == "cuda"
    torchrun = bool(os.environ.get("RANK"))
    device = torch.device("cpu")
    limit = {}
    how = {} if torchrun else dict(store=dist.HashStore(), rank=0, world_size=1)
    if cuda:
        if not torch.cuda.is_available():
            raise ValueError(
                f"--device cuda: torch {torch.__version__} sees no GPU; use --device cpu"
            )
        n = torch.cuda.device_count()
        ranks = int(torchrun and os.environ.get("LOCAL_WORLD_SIZE") or local_rank + 1)
        if ranks > n:  # every rank raises it, also one that would have a GPU
            raise ValueError(f"--nproc-per-node {ranks}: there are {n} GPUs; start {n} at most")
        if not config.world and not dist.is_nccl_available():
            raise ValueError(
                f"--device cuda: torch {torch.__version__} has no NCCL; use --device cpu"
            )
        device = how["device_id"] = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    if device.type == "cpu":
        skip_probes_of_vector_instructions()
    one_worker_thread()
    # The default of groups that are made later: the dimensions of a mesh, the host's control group.
    if timeout:
        c10d = dist.distributed_c10d
        limit["timeout"] = timedelta(seconds=timeout)
        c10d.default_pg_timeout = c10d.default_pg_nccl_timeout = limit["timeout"]
    if config.world:
        simulated_world.start(config.world, simulated_world.link(config.link), device)
        return device
    patience = timeout or dist.distributed_c10d.default_pg_timeout.total_seconds()
    connected = threading.Event()
    threading.Thread(target=end_without_launcher, args=(connected,), daemon=True).start()
    try:
        if torchrun:
            store = meet(rank, patience)
            restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS") or 0)
            store = fresh(store, rank, world) if restarts else first_here(store, rank)
            how |= dict(store=store, rank=rank, world_size=world)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", **how, **limit)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TimeoutError) as e:
        host, port = (os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
        where = f"MASTER_ADDR:MASTER_PORT {host}:{port}: " * torchrun
        cause = str(e).splitlines()[0]
        fix = limit_behind(e) or "is it the first rank's address, and do all ranks run?"
        if "in use" in cause:
            fix = "choose another port"
        elif torchrun and re.search("timed? ?out|nobody answers", cause, re.IGNORECASE):
            where = f"MASTER_ADDR:MASTER_PORT {address_of(host)}:{port}: the ranks have not met within {patience:g} s: "
            fix = "does MASTER_ADDR mean the first host on every host, and do all ranks run?"
        raise ValueError(f"{where}{cause}; {fix}") from e
    finally:
        connected.set()
    return device


def meet(rank: int, seconds: float) -> dist.Store:
    """The store at MASTER_ADDR:MASTER_PORT. TimeoutError or DistError: no store answers there within so many seconds,
    or not all ranks come to it."""
    until = time.monotonic() + seconds
    if rank and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        wait_for_listener(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), seconds)
    left = max(1, until - time.monotonic())
    answers: list[dist.Store | Exception] = []

    def ask() -> None:
        try:
            store, *_ = next(dist.rendezvous("env://", timeout=timedelta(seconds=left)))
            answers.append(store)
        except Exception as error:
            answers.append(error)

    # A thread: what listens there may be no store, and torch waits for its first word without end.
    thread = threading.Thread(target=ask, daemon=True)
    with without_stderr_of_torch():
        thread.start()
        thread.join(left + SLOW_S)
    if not answers:
        raise TimeoutError("nobody answers there as a store of torch does")
    if isinstance(answers[0], Exception):
        raise answers[0]
    return answers[0]


def end_without_launcher(connected: threading.Event) -> None:
    """Ends a process that still waits for the others when torchrun, by which they meet, is gone."""
    before = not store_answers()  # it was killed before this process could know whose child it is
    while not connected.wait(1):
        if before or not has_launcher():
            os._exit(143)


def store_answers() -> bool:
    """Whether anybody listens where ranks meet, if torchrun does: it does so before it starts them, until its end."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return True
    try:
        place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        socket.create_connection(place, timeout=60).close()
    except ConnectionRefusedError:
        return False
    except OSError:  # a slow network: torch itself tells what is wrong with it
        pass
    return True


def first_here(store: dist.Store, rank: int) -> dist.Store:
    """The `store` by which ranks meet that are started once. DistStoreError: another run has such a rank there."""
    if store.add(f"rank {rank} has come", 1) > 1:
        raise dist.DistStoreError(
            f"another process has joined as rank {rank}: two runs use one port; give this one another MASTER_PORT"
        )
    return dist.PrefixStore("run", store)


def fresh(store: dist.Store, rank: int, world: int) -> dist.Store:
    """torchrun's `store` under a new prefix: after a restart it still holds the addresses of the ranks before. Rank 0
    chooses the prefix. Each rank sends a random word and waits for the answer to it, so that the words of dead ranks do
    no harm, until all have confirmed. Collective. DistStoreError: a rank does not come within the store's timeout."""
    talk = dist.PrefixStore("start", store)
    prefix = secrets.token_hex(8)
    if rank:
        word = secrets.token_hex(8)
        talk.set(f"word of {rank}", word)
        prefix = talk.get(word).decode()  # waits for it
        talk.set(f"{prefix} {rank}", "")
        return dist.PrefixStore(prefix, store)
    missing = set(range(1, world))
    until = time.monotonic() + store.timeout.total_seconds()
    while missing:
        if time.monotonic() > until:
            raise dist.DistStoreError(
                f"no word of ranks {', '.join(map(str, sorted(missing)[:8]))}"
            )
        for other in missing:
            if talk.check([f"word of {other}"]):
                talk.set(talk.get(f"word of {other}").decode(), prefix)
        time.sleep(0.01)
        missing = {other for other in missing if not talk.check([f"{prefix} {other}"])}
    return dist.PrefixStore(prefix, store)


def shutdown() -> None:
    """Ends the process group, real or simulated; collective."""
    torch._dynamo.reset()  # compiled code holds the group, and the exit could hang or abort
    if dist.is_initialized():
        dist.barrier()
        simulated_world.stop()
    if dist.is_initialized():
        dist.destroy_process_group()
