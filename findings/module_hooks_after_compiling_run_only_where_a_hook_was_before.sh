#!/usr/bin/env bash
# A hook added to a module of a compiled model runs only if the module had a hook when it was first called.
#
# Seen: Added after the first compiled call, register_forward_hook, register_forward_pre_hook and
#   register_full_backward_hook are never called on a module that had no hook until then: no recompilation, no
#   warning. A hook on its weight is. On a module that had any hook the same calls recompile, and all of them run.
# Versions: torch 2.13.0, numpy 2.4.6 on Python 3.11, on a CPU.
# Expected: A recompilation in both cases, as after other changes of a module (freezing, another weight, another
#   mode).
# Why it matters: Activation statistics or a debugger's probe attached in the middle of a run report nothing, or
#   work in a small test where some other hook was there.
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
from torch import nn


def called(hook_before):
    torch._dynamo.reset()
    calls = []
    model = nn.Sequential(nn.Linear(2, 2))
    if hook_before:
        first = model[0].register_forward_hook(lambda *_: None)
    compiled = torch.compile(model, backend="aot_eager")
    x = torch.ones(1, 2, requires_grad=True)
    compiled(x).sum().backward()
    if hook_before:
        first.remove()
    model[0].register_forward_pre_hook(lambda *_: calls.append("forward pre-hook"))
    model[0].register_forward_hook(lambda *_: calls.append("forward hook"))
    model[0].register_full_backward_hook(lambda *_: calls.append("backward hook"))
    model[0].weight.register_hook(lambda _: calls.append("hook of the weight"))
    compiled(x).sum().backward()
    return sorted(calls)


without, beside = called(False), called(True)
print("the module had no hook at first: ", without)
print("it had one, which is removed now:", beside)
assert without == ["hook of the weight"], without
assert len(beside) == 4, beside
END
"$python" finding.py
