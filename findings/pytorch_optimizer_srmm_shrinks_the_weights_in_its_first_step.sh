#!/usr/bin/env bash
# With default settings the first step of pytorch_optimizer's SRMM multiplies every weight by 0.71, at any learning rate.
#
# Seen: SRMM averages the weights, and the average starts from zero. Weights of -2, 0.5, 1 and 3 are 0.7071 of that
#   after the first step, at learning rates of 1e-8 and 1e-12 and with gradients of 1e-3. After ten steps they still
#   are. AdamW of the same package leaves them as they are within 1e-6. The package follows the published code of the
#   method's author (HanbaekLyu/SRMM, src/SRMM.py), which has the same averages from zero and the same first weight;
#   later ones differ.
# Versions: torch 2.13.0, pytorch_optimizer 4.1.0, numpy 2.4.6 on Python 3.11, on a CPU.
# Expected: That a step moves the weights by about the learning rate, and that an average over the weights starts from
#   the weights.
# Why it matters: A pretrained model loses 29 % of every weight, norms and biases included, before it learns anything; a
#   run from random weights starts from another scale than its initialisation.
set -euo pipefail
python=${BASE_PYTHON:+$(realpath -s "$BASE_PYTHON")}
packages=(pytorch_optimizer==4.1.0 numpy==2.4.6 torch==2.13.0)
unset PYTHONOPTIMIZE  # the checks are asserts
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
if [ -z "$python" ]; then
    python3 -m venv venv || exit 3
    python=$folder/venv/bin/python
    install() { "$python" -m pip install -q --no-compile "$@"; }
    # PyPI's torch brings gigabytes of CUDA: the CPU build (+cpu goes to torch, the last package)
    # from where pip looks anyway, else from its own index; then pip's error about the first is no failure
    install "${packages[@]}+cpu" ||
        install --extra-index-url https://download.pytorch.org/whl/cpu "${packages[@]}" || exit 3
fi
export OMP_NUM_THREADS=1 HF_HOME=$folder/cache HF_HUB_OFFLINE=1 TORCHINDUCTOR_CACHE_DIR=$folder/inductor
"$python" - "${packages[@]}" <<'END'
import importlib.metadata
import sys

for pinned in sys.argv[1:]:
    name, version = pinned.split("==")
    try:
        installed = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        installed = "not installed"
    print(name, installed)
    if installed.split("+")[0] != version:
        print(f"this program is about {name} {version}", file=sys.stderr)
        sys.exit(3)
END
cat > finding.py <<'END'
import torch
from pytorch_optimizer import load_optimizer

START = torch.tensor([-2.0, 0.5, 1.0, 3.0])


def ratios(name, rate, steps):
    """The weights after these steps, each over its value at first."""
    weight = torch.nn.Parameter(START.clone())
    optimizer = load_optimizer(name)([weight], lr=rate)
    for _ in range(steps):
        weight.grad = torch.full((4,), 1e-3)
        optimizer.step()
    return weight.detach() / START


for name, expected in (("adamw", 1.0), ("srmm", 2**-0.5)):
    for rate in (1e-8, 1e-12):
        for steps in (1, 2, 10):
            found = ratios(name, rate, steps)
            print(f"{name}, lr {rate}, {steps} steps: the weights over those at first {found.tolist()}")
            assert torch.allclose(found, torch.full((4,), expected), rtol=0, atol=1e-6 if name == "adamw" else 1e-4), found
END
"$python" finding.py
