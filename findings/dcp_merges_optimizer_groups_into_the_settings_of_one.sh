#!/usr/bin/env bash
# set_optimizer_state_dict silently loads two parameter groups into one and keeps the settings of only one of them.
#
# Seen: Saved with two groups (matrices: lr 0.1, decay 0.01; norms and biases: lr 0.2, no decay) and set into an
#   optimizer of one group, all parameters get the LAST group's lr 0.2 and no decay. With
#   flatten_optimizer_state_dict=True the same call gives all of them the settings saved for the first parameter of
#   the new group, here 0.1 and 0.01. No warning, the moments are the saved ones, and training goes on. The
#   flattened call compares the values of a group, but reads only its first parameter's. Related, and noisy: an empty
#   parameter group is reported to lose its settings (pytorch#143828, closed).
# Versions: torch 2.13.0, numpy 2.4.6 on Python 3.11, on a CPU.
# Expected: An error that the groups do not fit, as optimizer.load_state_dict raises, or the settings kept.
# Why it matters: A resume after the parameter groups were merged trains on with the wrong learning rate and weight
#   decay.
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
import warnings

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)


def build(groups, rates=(0.1, 0.2), scale=1.0):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    if groups == 1:
        settings = [{"params": matrices + vectors, "lr": rates[0], "weight_decay": 0.01}]
    else:
        settings = [
            {"params": matrices, "lr": rates[0], "weight_decay": 0.01},
            {"params": vectors, "lr": rates[1], "weight_decay": 0.0},
        ]
    optimizer = torch.optim.AdamW(settings)
    (scale * model(torch.randn(4, 2)).square().sum()).backward()
    optimizer.step()
    return model, optimizer


def moments(model, optimizer):
    return torch.cat([optimizer.state[p]["exp_avg"].flatten() for p in model.parameters()])


def merged(flatten):
    """The one group's (lr, weight_decay) and whether the moments are the saved ones; a step must run."""
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    saved_model, saved = build(2)
    state = get_optimizer_state_dict(saved_model, saved, options=options)
    model, optimizer = build(1, (1.0, 2.0), scale=3.0)
    assert not torch.equal(moments(model, optimizer), moments(saved_model, saved))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        set_optimizer_state_dict(model, optimizer, state, options=options)
    groups = [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    same = torch.equal(moments(model, optimizer), moments(saved_model, saved))
    optimizer.step()
    return groups, same


for flatten, expected in ((False, (0.2, 0.0)), (True, (0.1, 0.01))):
    groups, same = merged(flatten)
    print(f"(0.1, 0.01) and (0.2, 0.0) into one, flatten={flatten}: (lr, decay) {groups}, moments as saved: {same}")
    assert groups == [expected] and same, (groups, same)
_, one = build(1)
_, two = build(2)
try:
    one.load_state_dict(two.state_dict())
    plain = "loaded"
except ValueError as error:
    plain = repr(error)
print("2 groups into 1 by optimizer.load_state_dict:", plain)
assert "different number of parameter groups" in plain, plain
END
"$python" finding.py
