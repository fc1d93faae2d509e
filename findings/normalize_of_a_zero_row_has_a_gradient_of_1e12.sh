#!/usr/bin/env bash
# F.normalize and F.cosine_similarity of a row of zeros have gradients of 1e12 and 1e8.
#
# Seen: The value at a zero row is 0 and finite, and so is the gradient, which is why no check for nan sees it:
#   1/eps, 1e12 an entry for F.normalize and of the order of 1e8 for F.cosine_similarity. The gradient of the norm
#   itself is 0 there, that of layer_norm some 300 (1/sqrt(eps)).
# Versions: torch 2.13.0, numpy 2.4.6 on Python 3.11, on a CPU.
# Expected: 0, or something of the size of the other rows' gradients.
# Why it matters: One padded or dead embedding in a contrastive loss makes the gradient norm 1e12; clipping to 1
#   then divides every other gradient of the model by 1e12, and an optimizer with moments keeps that step for
#   thousands more.
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
import torch.nn.functional as F
from torch import nn


def gradient(function):
    x = torch.tensor([[0.0, 0.0, 0.0], [1.0, 2.0, 2.0]], requires_grad=True)
    function(x).sum().backward()
    return x.grad.abs().amax(1).tolist()


found = {
    "norm": gradient(lambda x: x.norm(dim=1)),
    "layer_norm": gradient(lambda x: F.layer_norm(x, (3,)) * torch.tensor([1.0, 2.0, 3.0])),
    "normalize": gradient(F.normalize),
    "cosine_similarity": gradient(lambda x: F.cosine_similarity(x, torch.ones(1, 3))),
}
for name, (zero, other) in found.items():
    print(f"{name:18} largest gradient of a zero row {zero:.3g}, of the row (1, 2, 2) {other:.3g}")

table = nn.Embedding(4, 3)
head = nn.Linear(3, 1)
with torch.no_grad():
    table.weight[0] = 0  # a dead or padded entry
loss = head(F.normalize(table(torch.tensor([0, 1, 2])))).sum()
loss.backward()
norm = torch.nn.utils.clip_grad_norm_([*table.parameters(), *head.parameters()], 1.0)
print(f"loss {'finite' if loss.isfinite() else 'not finite'}, gradient norm {norm.item():.3g}; "
      f"after clipping to 1 the head's largest gradient is {head.bias.grad.abs().max().item():.3g}")
assert found["norm"][0] == 0, found
assert found["normalize"][0] > 1e11 and found["cosine_similarity"][0] > 1e7, found
assert norm > 1e10 and head.bias.grad.abs().max() < 1e-9
END
"$python" finding.py
