"""Runs checks on real gloo ranks: processes are spawned once per file, each check runs on all of them in turn.

    results = spawn(2, [check_a, check_b])        # check(mesh) -> anything that pickles
    results["check_a"]                            # one value per rank; an error on any rank raises here
"""

import gc
import os
import socket
import traceback
from contextlib import suppress
from datetime import timedelta
from multiprocessing import forkserver
from pathlib import Path
from queue import Empty
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from gloo import one_worker_thread

ONE_GRAPH = pytest.mark.skipif(torch.__version__ < (2, 13), reason="--compile step needs torch 2.13")

# New processes are copies of one that has imported these and run nothing: importing costs more than most checks.
# (The last: tyro would import it in every process.)
processes = mp.get_context("forkserver")
processes.set_forkserver_preload(["torch._inductor.compile_fx", "torch.distributed.fsdp", "main", "typeguard"])


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start_server() -> dict[str, str]:
    """Starts what new processes are copies of, if it does not run; the environment that they must be given."""
    with mock.patch.dict(os.environ, PYTHONPATH=str(Path(__file__).parent.parent), OMP_NUM_THREADS="1"):
        forkserver.ensure_running()
    return dict(os.environ)


def _worker(rank, world, port, checks, queue, threads, env):
    gc.freeze()  # what was imported stays
    os.environ.clear()
    os.environ.update(env)
    if not torch.__version__.startswith("2.11"):  # there AOTAutograd's log prints a mesh and fails on a fake tensor
        os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    torch.set_num_threads(threads)
    one_worker_thread()
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world, timeout=timedelta(seconds=300)
    )
    mesh = dist.init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))
    for check in checks:
        torch.manual_seed(0)
        torch._dynamo.reset()
        try:
            queue.put((check.__name__, rank, True, check(mesh)))
        except Exception:
            queue.put((check.__name__, rank, False, traceback.format_exc()))
            break  # the other ranks may wait for this one for ever: stop here
    else:
        torch._dynamo.reset()  # compiled code holds process groups
        dist.barrier()
        dist.destroy_process_group()


class Results(dict):
    def __missing__(self, name):
        raise KeyError(f"{name} did not run: {self.get('error', 'no such check')}")

    def __getitem__(self, name):
        values = super().__getitem__(name)
        if wrong := [f"{name} on rank {rank}:\n{value}" for rank, (ok, value) in sorted(values.items()) if not ok]:
            raise AssertionError("\n".join(wrong))
        return [value for _, (_, value) in sorted(values.items())]


def spawn(world: int, checks: list, timeout: float = 300, threads: int = 1) -> Results:
    """Results of every check, by its name, one value per rank. Ends its processes after `timeout` seconds."""
    queue = processes.Queue()
    port = free_port()
    args = [(rank, world, port, checks, queue, threads, start_server()) for rank in range(world)]
    ranks = [processes.Process(target=_worker, args=a, daemon=True) for a in args]
    for p in ranks:
        p.start()
    results = Results()
    left = len(checks) * world
    failed = False
    try:
        while left and not failed:
            name, rank, ok, value = queue.get(timeout=timeout)
            results.setdefault(name, {})[rank] = ok, value
            left = left - 1
            failed = not ok
        with suppress(Empty):  # what the other ranks say to that: one of them knows the cause
            while failed:
                name, rank, *result = queue.get(timeout=10)
                results.setdefault(name, {})[rank] = result
        for p in ranks:
            p.join(0 if failed else 60)
    finally:
        for p in ranks:
            if p.is_alive():
                p.kill()
            p.join()
    return results
