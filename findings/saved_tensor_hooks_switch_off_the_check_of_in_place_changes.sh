#!/usr/bin/env bash
# Saved-tensor hooks disable autograd's check for in-place changes.
#
# Seen: y = 2x; z = y * y; y += 1. Backward of z raises, as it should. The same program with saved-tensor hooks that
#   detach, or under torch.autograd.graph.save_on_cpu() with tensors on the CPU, returns 12 where the gradient is 8.
# Versions: torch 2.13.0, numpy 2.4.6 on Python 3.11, on a CPU.
# Expected: The error of the plain program, or the right gradient.
# Why it matters: A hook that keeps the tensor itself, or save_on_cpu() of a tensor already on the CPU, gives a wrong
#   gradient where plain autograd raises.
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
import contextlib

import torch


def gradient(context):
    with context:
        x = torch.ones(1, requires_grad=True)
        y = 2 * x
        z = y * y
        with torch.no_grad():
            y.add_(1)
    try:
        z.sum().backward()
    except RuntimeError as error:
        return "refused: " + str(error)[:80]
    return x.grad.item()


graph = torch.autograd.graph
found = {
    "plain": gradient(contextlib.nullcontext()),
    "save_on_cpu": gradient(graph.save_on_cpu()),
    "hooks that detach": gradient(graph.saved_tensors_hooks(lambda t: t.detach(), lambda t: t)),
}
print("d(2x)^2/dx at 1 is 8")
for name, value in found.items():
    print(f"{name}: {value}")
assert str(found["plain"]).startswith("refused"), found
assert found["save_on_cpu"] == found["hooks that detach"] == 12, found
END
"$python" finding.py
