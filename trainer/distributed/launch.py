"""How a process of a run begins and ends: determinism, the process group of real or simulated ranks, shutdown.

    set_deterministic(False)
    device = connect(config, rank, local_rank, world)      # ValueError, one line, where ranks cannot meet
    shutdown()                                             # compiled code first, which holds the process group
"""

import os
import secrets
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._inductor import config as inductor

from gloo import one_worker_thread
from trainer.distributed import simulated_world


def set_deterministic(on: bool) -> None:
    """Whether all that runs and is compiled from now on gives the same bits every time; torch raises RuntimeError for
    an operator that cannot."""
    torch.use_deterministic_algorithms(on)
    torch.utils.deterministic.fill_uninitialized_memory = False  # nothing here reads it
    inductor.deterministic = on  # measures nothing to choose a kernel whose sums have another order
    if on:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def connect(c, rank: int, local_rank: int, world: int, timeout: float = 0) -> torch.device:
    """Joins the process group: NCCL on CUDA, gloo on a CPU; without torchrun one of its own; with --world a simulated
    one. timeout: of its collectives, in seconds; 0: torch's. ValueError in one line."""
    cuda = c.device == "cuda"
    if cuda and not torch.cuda.is_available():
        raise ValueError(f"--device cuda: torch {torch.__version__} sees no GPU; use --device cpu")
    torchrun, n = bool(os.environ.get("RANK")), torch.cuda.device_count() if cuda else 0
    ranks = int(torchrun and os.environ.get("LOCAL_WORLD_SIZE") or local_rank + 1)
    if cuda and ranks > n:  # on every rank alike: also on those that have a GPU
        raise ValueError(f"--nproc-per-node {ranks}: there are {n} GPUs; start {n} at most")
    if cuda and not c.world and not dist.is_nccl_available():
        raise ValueError(f"--device cuda: torch {torch.__version__} has no NCCL; use --device cpu")
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    limit = dict(timeout=timedelta(seconds=timeout)) if timeout else {}
    one_worker_thread()
    if timeout:  # also of the groups that are made later: parts of the mesh, the host's own
        c10d = dist.distributed_c10d
        c10d.default_pg_timeout = c10d.default_pg_nccl_timeout = limit["timeout"]
    how = limit | ({} if torchrun else dict(store=dist.HashStore(), rank=0, world_size=1))
    if cuda:
        torch.cuda.set_device(device)
        how["device_id"] = device
    if c.world:
        simulated_world.start(c.world, simulated_world.link(c.link), device)
        return device
    try:
        if torchrun and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS") or 0):
            store, *_ = next(dist.rendezvous("env://", **limit))
            how |= dict(store=fresh(store, rank, world), rank=rank, world_size=world)
        dist.init_process_group("nccl" if cuda else "gloo", **how)
    except (dist.DistNetworkError, dist.DistStoreError) as e:
        address, told = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}", str(e).splitlines()[0]
        fix = "choose another port" if "in use" in told else "is it the first rank's address, and do all ranks run?"
        raise ValueError(f"MASTER_ADDR:MASTER_PORT {address}: {told}; {fix}") from e
    return device


def fresh(store: dist.Store, rank: int, world: int) -> dist.Store:
    """`store`, torchrun's, without what ranks that it has restarted left in it, whose addresses torch would take for
    new ones: under a new prefix. Rank 0 names it in answer to a word of each rank, those of the dead among them, until
    all have confirmed. Collective; DistStoreError if a rank does not come within the store's timeout."""
    talk, prefix = dist.PrefixStore("start", store), secrets.token_hex(8)
    if rank:
        word = secrets.token_hex(8)
        talk.set(f"word of {rank}", word)
        prefix = talk.get(word).decode()  # waits for it
        talk.set(f"{prefix} {rank}", "")
        return dist.PrefixStore(prefix, store)
    missing, until = set(range(1, world)), time.monotonic() + store.timeout.total_seconds()
    while missing:
        if time.monotonic() > until:
            raise dist.DistStoreError(f"no word of ranks {', '.join(map(str, sorted(missing)[:8]))}")
        for other in missing:
            if talk.check([f"word of {other}"]):
                talk.set(talk.get(f"word of {other}").decode(), prefix)
        time.sleep(0.01)
        missing = {other for other in missing if not talk.check([f"{prefix} {other}"])}
    return dist.PrefixStore(prefix, store)


def shutdown() -> None:
    """Frees compiled code before the process group, which it holds; otherwise the exit can hang or abort."""
    torch._dynamo.reset()
    if dist.is_initialized():
        dist.barrier()
        simulated_world.stop()
    if dist.is_initialized():
        dist.destroy_process_group()
