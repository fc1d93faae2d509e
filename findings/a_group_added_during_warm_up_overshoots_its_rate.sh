#!/usr/bin/env bash
# A parameter group added during LinearLR or ConstantLR warm-up overshoots the learning rate that it was given.
#
# Seen: It ends at lr x end_factor / (the factor in force when it was added); with ConstantLR at lr / factor. With
#   add_param_group(lr=0.1) before the first step of LinearLR(start_factor=0.1) the group trains at 0.325, 0.55, 0.775
#   and 1.0, where the old group arrives at 0.1; with start_factor=0.5 it ends at 0.2. Added halfway, at the factor
#   0.55, it ends at 0.1818. ConstantLR(factor=0.1) ends at 1.0 whenever the group is added. The scheduler multiplies
#   the current rate at every step, and the new group was never scaled down. ExponentialLR and StepLR decay the new
#   group from its 0.1, LambdaLR ends in a ValueError of zip().
# Versions: torch 2.13.0, numpy 2.4.6 on Python 3.11, on a CPU.
# Expected: The rate that was given, at the end of the warm-up, or an error, as LambdaLR gives.
# Why it matters: Layers that are unfrozen during the warm-up train at a multiple of their learning rate from its end
#   on: at ten times it with start_factor=0.1 and an add before the first step.
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
import torch
from torch import nn
from torch.optim import lr_scheduler

SCHEDULERS = {
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, 1.0, 4),
    "LinearLR from a half": lambda o: lr_scheduler.LinearLR(o, 0.5, 1.0, 4),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.1, 3),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.5),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda k: min(1.0, (k + 1) / 4)),
}


def rates(make, steps=5, before=0):
    """The groups' rates after each step; the second group is added after `before` steps."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    scheduler = make(optimizer)
    for _ in range(before):
        optimizer.step()
        scheduler.step()
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
found["LinearLR, added after 2 of 4 steps"] = rates(SCHEDULERS["LinearLR"], before=2)
found["ConstantLR, added after 1 of 3 steps"] = rates(SCHEDULERS["ConstantLR"], before=1)
for name, values in found.items():
    print(f"{name}: {values}")
assert found["LinearLR"][-1] == found["ConstantLR"][-1] == [0.1, 1.0], found
assert found["LinearLR, added after 2 of 4 steps"][-1] == [0.1, round(0.1 / 0.55, 4)], found
assert found["ConstantLR, added after 1 of 3 steps"][-1] == [0.1, 1.0], found
assert found["LinearLR from a half"][-1] == [0.1, 0.2], found
assert found["ExponentialLR"][-1] == [0.0031, 0.0031], found
assert found["StepLR"][-1] == [0.025, 0.025], found
assert "zip" in found["LambdaLR"], found
END
"$python" finding.py
