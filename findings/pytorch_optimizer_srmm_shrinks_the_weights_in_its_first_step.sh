#!/usr/bin/env bash
# The first step of SRMM multiplies every weight by 0.71, however small the learning rate is.
#
# Seen: SRMM averages the weights, and the average starts from zero. With the default settings the first step gives
#   0.7071 times the weights, at a learning rate of 1e-8 and with gradients of 1e-3. Later steps do not bring the
#   weights back. AdamW of the same package and learning rate leaves them at 1 within 1e-6.
# Versions: torch 2.13.0, pytorch_optimizer 4.1.0, numpy 2.4.6 on Python 3.11, on a CPU.
# Expected: That a step moves the weights by about the learning rate, and that an average over the weights starts
#   from the weights.
# Why it matters: A pretrained model loses 29 % of every weight, norms and biases included, before it learns
#   anything; a run from random weights starts from another scale than its initialisation.
set -euo pipefail
python=${BASE_PYTHON:+$(realpath -s "$BASE_PYTHON")}
packages=(pytorch_optimizer==4.1.0 numpy==2.4.6 torch==2.13.0)
unset PYTHONOPTIMIZE  # the checks are asserts
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
if [ -z "$python" ]; then
    python3 -m venv venv
    python=$folder/venv/bin/python
    install() { "$python" -m pip install -q --no-compile "$@"; }
    # PyPI's torch brings gigabytes of CUDA: the CPU build (+cpu goes to torch, the last package)
    # from where pip looks anyway, else from its own index; then pip's error about the first is no failure
    install "${packages[@]}+cpu" ||
        install --extra-index-url https://download.pytorch.org/whl/cpu "${packages[@]}"
fi
export OMP_NUM_THREADS=1 HF_HOME=$folder/cache HF_HUB_OFFLINE=1 TORCHINDUCTOR_CACHE_DIR=$folder/inductor
"$python" - "${packages[@]}" <<'END'
import importlib.metadata
import sys

for pinned in sys.argv[1:]:
    name, version = pinned.split("==")
    installed = importlib.metadata.version(name)
    print(name, installed)
    if installed.split("+")[0] != version:
        sys.exit(f"this program is about {name} {version}")
END
cat > finding.py <<'END'
import torch
from pytorch_optimizer import load_optimizer


def weights(name, steps):
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = load_optimizer(name)([weight], lr=1e-8)
    for _ in range(steps):
        weight.grad = torch.full((4,), 1e-3)
        optimizer.step()
    return weight.mean().item()


after = {name: [weights(name, steps) for steps in (1, 2, 10)] for name in ("adamw", "srmm")}
for name, means in after.items():
    print(f"{name}: the weights, 1 at first, after 1, 2 and 10 steps: " + ", ".join(f"{mean:.6f}" for mean in means))
assert all(abs(mean - 1) < 1e-6 for mean in after["adamw"]), after
assert all(abs(mean - 2**-0.5) < 1e-4 for mean in after["srmm"]), after
END
"$python" finding.py
