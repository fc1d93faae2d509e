"""What torchrun is told where nodes may come and go, if the flags of main.py do for every number of them. No torch.

    export NNODES=1:2 NODE_RANK=0 MASTER_ADDR=first MASTER_PORT=29500 MAX_RESTARTS=9
    torchrun $(python -m trainer.elastic 8 FLAGS) --nproc-per-node 8 main.py FLAGS     # as launch.sh does

Nodes meet at a store of the first one. Torchrun numbers them in the order of their --local-addr, so that the first one
keeps rank 0, with its results and its lock of --save.
"""

import os
import re
import sys
from collections.abc import Mapping

from trainer import config
from trainer.distributed.terminal import fail


def words(nproc: int, argv: list[str], env: Mapping[str, str]) -> list[str]:
    """Flags of torchrun. argv: those of main.py, for `nproc` ranks on each node. Ends the process with one line and
    exit code 2 where they do not do for one of the numbers of nodes, or could not go on with another."""
    nodes = env["NNODES"]
    found = re.fullmatch("([1-9][0-9]*):([1-9][0-9]*)", env["NNODES"])
    least, most = map(int, found.groups()) if found else (1, 0)
    if least > most:
        fail(f"NNODES={nodes}: expected the least and the most nodes, as 1:2", 0)
    for n in range(least, most + 1):
        c = config.parse(argv, world=n * nproc)
    if c.save is None or not c.save_every or c.effective_batch is None:
        what = "--save DIR and --save-every N, to go on from, and --effective-batch N, to keep"
        fail(f"NNODES={nodes}: nodes that leave need {what}", 0)
    first = env["MASTER_ADDR"]
    port = env.get("MASTER_PORT") or "29500"
    rank = env["NODE_RANK"]
    # A name for the order alone, but for the first.
    own = first if rank == "0" else f"{first}.{rank}"
    return [
        f"--nnodes={nodes}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={first}:{port}",
        f"--rdzv-conf=is_host={int(rank == '0')}",
        f"--local-addr={own}",
        f"--max-restarts={env.get('MAX_RESTARTS') or 9}",
    ]


if __name__ == "__main__":
    print(" ".join(words(int(sys.argv[1]), sys.argv[2:], os.environ)))
