#!/usr/bin/env bash
# torch.compile replaces x * 0 (a literal integer zero) by 0 even where x is nan or infinite.
#
# Seen: nan * 0 and inf * 0 are 0 with Inductor, and nan in eager mode and with backend="aot_eager". x * 0.0 and
#   x * torch.zeros(3) are nan with all three.
# Versions: torch 2.13.0, numpy 2.4.6 on Python 3.11, on a CPU.
# Expected: nan, as in eager mode.
# Why it matters: `loss + 0 * aux.sum()`, which keeps unused parameters in the graph, no longer shows in compiled code
#   that aux is nan.
set -euo pipefail
python=${BASE_PYTHON:+$(realpath -s "$BASE_PYTHON")}
packages=(numpy==2.4.6 torch==2.13.0)
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


def product(x):
    return x * 0


def loss(weight, unused):
    return weight.square().sum() + 0 * unused.sum()


def product_with_float(x):
    return x * 0.0


def product_with_tensor(x):
    return x * torch.zeros(3)


x = torch.tensor([1.0, float("nan"), float("inf")])
weight = torch.ones(2)
programs = {
    "x * 0": (product, x),
    "weight.square().sum() + 0 * x.sum()": (loss, weight, x),
    "x * 0.0": (product_with_float, x),
    "x * torch.zeros(3)": (product_with_tensor, x),
}
for name, (program, *inputs) in programs.items():
    eager = program(*inputs)
    aot_eager = torch.compile(program, backend="aot_eager")(*inputs)
    inductor = torch.compile(program)(*inputs)
    print(f"{name}: eager {eager.tolist()}, aot_eager {aot_eager.tolist()}, inductor {inductor.tolist()}")
    assert eager.isnan().any() and aot_eager.isnan().any(), name
    assert inductor.isnan().any() == (program in (product_with_float, product_with_tensor)), name
END
"$python" finding.py
