"""What gloo.py is for: gloo ranks that all-gather and all-reduce, several at a time, until one dies of it.

    python tests/gloo_race.py [--collectives 40000]     # two worker threads a group, as torch has it; then one

Prints the exit codes of the ranks: -6 or -11 is a heap found broken, and the other rank loses it; -9 hung. No GPU.
"""

import argparse
import multiprocessing as mp
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent))
from gloo import one_worker_thread  # noqa: E402


def _rank(rank: int, port: int, collectives: int, one: bool) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    if one:
        one_worker_thread()
    dist.init_process_group("gloo", rank=rank, world_size=2)
    ops = torch.ops._c10d_functional
    group = dist.group.WORLD.group_name
    x = torch.ones(64)
    for _ in range(collectives // 8):
        both = ((ops.all_gather_into_tensor(x, 2, group), ops.all_reduce(x, "sum", group)) for _ in range(4))
        for t in [t for pair in both for t in pair]:
            ops.wait_tensor(t)
    dist.destroy_process_group()


def race(port: int, collectives: int, one: bool, timeout: float = 60) -> list[int]:
    """Exit codes of two ranks. What is left of them after one has died, or after `timeout` seconds, is killed."""
    ranks = [mp.get_context("spawn").Process(target=_rank, args=(r, port, collectives, one)) for r in range(2)]
    for rank in ranks:
        rank.start()
    until = time.monotonic() + timeout
    while time.monotonic() < until and {None} <= {rank.exitcode for rank in ranks} <= {None, 0}:
        time.sleep(0.1)
    for rank in ranks:
        rank.join(5)
        rank.kill()
        rank.join()
    return [rank.exitcode for rank in ranks]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--collectives", type=int, default=40_000, help="of each rank")
    parser.add_argument("--port", type=int, default=29_871)
    args = parser.parse_args()
    print(f"torch {torch.__version__}")
    for threads in (2, 1):
        codes = race(args.port + threads, args.collectives, threads == 1)
        print(f"{threads} worker threads, {args.collectives} collectives: exit codes {codes}", flush=True)
