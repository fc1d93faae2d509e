#!/usr/bin/env bash
# torch.compile computes x * 0 as 0 where x is nan or infinite.
#
# Seen: Inductor's graph passes replace the product with a constant 0, so that nan * 0 and inf * 0 are 0 in compiled
#   code and nan in eager code and with backend='aot_eager'.
# Versions: torch 2.13.0, numpy 2.4.6 on Python 3.11, on a CPU.
# Expected: nan, as in eager mode; Inductor is not told to use fast math.
# Why it matters: `loss + 0 * aux.sum()` (to keep unused parameters in the graph) or a mask made of zeros no longer
#   shows that aux is nan: a check of the loss passes in compiled code alone.
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


def product(x):
    return x * 0


def loss(weight, unused):
    return weight.square().sum() + 0 * unused.sum()


x = torch.tensor([1.0, float("nan"), float("inf")])
weight = torch.ones(2)
found = {"eager": (product(x), loss(weight, x))}
for backend in ("aot_eager", "inductor"):
    found[backend] = (torch.compile(product, backend=backend)(x), torch.compile(loss, backend=backend)(weight, x))
for name, (values, total) in found.items():
    print(f"{name}: x * 0 = {values.tolist()}, weight.square().sum() + 0 * x.sum() = {total.item()}")
for name, (values, total) in found.items():
    assert values.isnan().any().item() == (name != "inductor"), name
    assert total.isnan().item() == (name != "inductor"), name
END
"$python" finding.py
