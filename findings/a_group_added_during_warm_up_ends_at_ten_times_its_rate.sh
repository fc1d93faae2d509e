#!/usr/bin/env bash
# A parameter group that is added while LinearLR or ConstantLR warms up ends at a multiple of the rate that it was given.
#
# Seen: add_param_group(lr=0.1) after LinearLR(start_factor=0.1) was made: the group trains at 0.325, 0.55, .. and
#   stays at 1.0 after the warm-up, where the old group arrives at 0.1: each step multiplies what is there, and the
#   new group never had the factor 0.1. ExponentialLR and StepLR decay the new group along from its 0.1, LambdaLR
#   ends in an error of zip().
# Versions: torch 2.13.0, numpy 2.4.6 on Python 3.11, on a CPU.
# Expected: The rate that was given, untouched, or an error with every scheduler.
# Why it matters: Layers that are unfrozen in the first steps of a run train at ten times their learning rate (a
#   hundred times with start_factor=0.01) for the rest of it, silently.
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
from torch.optim import lr_scheduler

SCHEDULERS = {
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, 1.0, 4),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.1, 3),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.5),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda k: min(1.0, (k + 1) / 4)),
}


def rates(make, steps=5):
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    scheduler = make(optimizer)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "lr": 0.1})
    found = []
    try:
        for _ in range(steps):
            optimizer.step()
            scheduler.step()
            found.append([round(group["lr"], 4) for group in optimizer.param_groups])
    except (ValueError, KeyError) as error:
        return repr(error)
    return found


found = {name: rates(make) for name, make in SCHEDULERS.items()}
for name, values in found.items():
    print(f"{name}: {values}")
assert found["LinearLR"][-1] == found["ConstantLR"][-1] == [0.1, 1.0], found
assert found["ExponentialLR"][-1] == [0.0031, 0.0031], found
assert "zip" in found["LambdaLR"], found
END
"$python" finding.py
