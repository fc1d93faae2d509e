#!/usr/bin/env bash
# Saved-tensor hooks that keep an alias of the tensor give a wrong gradient where plain autograd refuses.
#
# Seen: y = 2x; z = y * y; y += 1. Backward of z raises, as it should. With saved-tensor hooks autograd does not check
#   for in-place changes. Hooks that detach, and torch.autograd.graph.save_on_cpu() with tensors on the CPU, keep an
#   alias and return 12 where the gradient is 8. Hooks that clone return the right 8.
# Versions: torch 2.13.0, numpy 2.4.6 on Python 3.11, on a CPU.
# Expected: The error of the plain program, or the right gradient.
# Why it matters: A program that offloads or counts its saved tensors loses the check that it had, and with an alias
#   the gradient is wrong.
set -euo pipefail
python=${BASE_PYTHON:+$(realpath -s "$BASE_PYTHON")}
packages=(numpy==2.4.6 torch==2.13.0)
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
    "hooks that clone": gradient(graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t)),
    "hooks that detach": gradient(graph.saved_tensors_hooks(lambda t: t.detach(), lambda t: t)),
}
print("d(2x)^2/dx at 1 is 8")
for name, value in found.items():
    print(f"{name}: {value}")
assert str(found["plain"]).startswith("refused"), found
assert found["save_on_cpu"] == found["hooks that detach"] == 12, found
assert found["hooks that clone"] == 8, found
END
"$python" finding.py
