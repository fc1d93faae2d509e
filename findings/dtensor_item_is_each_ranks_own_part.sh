#!/usr/bin/env bash
# Python's float(), bool() and .item() of a reduced DTensor give each rank its own part.
#
# Seen: max, sum, norm and any of a row shard are right as tensors (full_tensor()), but .item(), float() and bool()
#   read the local part of the pending reduction, without a word: rank 0 sees a maximum of 1 where the tensor holds
#   8, and False for (x > 5).any().
# Versions: torch 2.13.0, numpy 2.4.6 on Python 3.11, on a CPU.
# Expected: The value of the whole tensor on each rank, or an error that names the pending reduction.
# Why it matters: Logged norms are wrong, and `if grad.isnan().any(): skip the step` takes another branch on each
#   rank, which ends in a hang or in ranks that differ.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python=${BASE_PYTHON:-}
if [ -z "$python" ]; then
    python3 -m venv venv
    python=$folder/venv/bin/python
    install() { "$python" -m pip install -q --no-compile "$@"; }
    # PyPI's torch brings gigabytes of CUDA: the CPU build from where pip looks anyway, else from its own index
    install numpy==2.4.6 torch==2.13.0+cpu 2>/dev/null ||
        install --extra-index-url https://download.pytorch.org/whl/cpu numpy==2.4.6 torch==2.13.0
fi
export OMP_NUM_THREADS=1 HF_HOME=$folder/cache HF_HUB_OFFLINE=1 TORCHINDUCTOR_CACHE_DIR=$folder/inductor
cat > finding.py <<'END'
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
x = torch.tensor([1.0, -3.0, 0.0, 8.0])
shard = distribute_tensor(x, mesh, [Shard(0)])
mine = dict(
    max=shard.max().item(),
    sum=float(shard.sum()),
    norm=shard.norm().item() ** 2,
    any=bool((shard > 5).any()),
)
tensors = dict(
    max=shard.max().full_tensor().item(),
    sum=float(shard.sum().full_tensor()),
    norm=shard.norm().full_tensor().item() ** 2,
    any=bool((shard > 5).any().full_tensor()),
)
ranks = [None, None]
dist.all_gather_object(ranks, {k: round(float(v), 3) for k, v in mine.items()})
if dist.get_rank() == 0:
    print("whole tensor:", {k: round(float(v), 3) for k, v in tensors.items()})
    for rank, values in enumerate(ranks):
        print(f"read by rank {rank}:", values)
assert ranks[0] == {"max": 1.0, "sum": -2.0, "norm": 10.0, "any": 0.0}, ranks
assert ranks[1] == {"max": 8.0, "sum": 8.0, "norm": 64.0, "any": 1.0}, ranks
dist.barrier()
dist.destroy_process_group()
END
"$python" -m torch.distributed.run --standalone --nproc-per-node 2 finding.py
