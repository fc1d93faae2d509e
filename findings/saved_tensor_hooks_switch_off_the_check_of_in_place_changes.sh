#!/usr/bin/env bash
# Under save_on_cpu() a saved activation that is changed in place gives a wrong gradient instead of an error.
#
# Seen: y = 2x; z = y * y; y += 1. Backward of z raises as it should. The same program under
#   torch.autograd.graph.save_on_cpu(), or under any saved-tensor hooks, even ones that change nothing, returns 12
#   where the gradient is 8: hooks make autograd skip its check of tensor versions, and save_on_cpu() keeps no copy
#   of what already is on the CPU.
# Versions: torch 2.13.0, numpy 2.4.6 on Python 3.11, on a CPU.
# Expected: The error of the plain program, or the right gradient (an offloaded copy is one).
# Why it matters: Offloading of activations and everything else built on these hooks hides the error that tells of
#   an in-place bug; the model then trains on wrong gradients.
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
    "hooks that change nothing": gradient(graph.saved_tensors_hooks(lambda t: t, lambda t: t)),
}
print("d(2x)^2/dx at 1 is 8")
for name, value in found.items():
    print(f"{name}: {value}")
assert str(found["plain"]).startswith("refused"), found
assert found["save_on_cpu"] == found["hooks that change nothing"] == 12, found
END
"$python" finding.py
