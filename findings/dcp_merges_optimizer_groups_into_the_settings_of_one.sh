#!/usr/bin/env bash
# set_optimizer_state_dict gives every parameter the learning rate and decay of one saved group where the groups were two.
#
# Seen: Saved with two groups (matrices: lr 0.1, decay 0.01; norms and biases: lr 0.2, no decay) and set into an
#   optimizer of one group, all parameters get the LAST group's lr 0.2 and no decay. With
#   flatten_optimizer_state_dict=True, which stores the settings per parameter, the same call gives all of them the
#   FIRST group's. Flattened from one group into two, the undecayed group gets the decay. No warning; without
#   flattening, one into two leaves a group that has no lr at all, which the next step reads.
# Versions: torch 2.13.0, numpy 2.4.6 on Python 3.11, on a CPU.
# Expected: An error that the groups do not fit, as optimizer.load_state_dict raises, or, by parameter names, the
#   settings kept.
# Why it matters: A resume after the parameter groups were rearranged trains on with the wrong learning rate and
#   weight decay, and the moments are right, so that nothing looks odd.
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
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)


def build(groups, rates=(0.1, 0.2)):
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
    model(torch.randn(4, 2)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def moved(before, after, flatten):
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    state = get_optimizer_state_dict(*build(before), options=options)
    model, optimizer = build(after, (1.0, 2.0))
    set_optimizer_state_dict(model, optimizer, state, options=options)
    return [(group.get("lr"), group.get("weight_decay")) for group in optimizer.param_groups]


found = {}
for flatten in (False, True):
    for before, after in ((2, 1), (1, 2)):
        found[before, after, flatten] = moved(before, after, flatten)
        print(f"{before} group(s) into {after}, flatten={flatten}: (lr, decay)", found[before, after, flatten])
assert found[2, 1, False] == [(0.2, 0.0)], found
assert found[2, 1, True] == [(0.1, 0.01)], found
assert found[1, 2, True] == [(0.1, 0.01), (0.1, 0.01)], found
assert (None, None) in found[1, 2, False], found
END
"$python" finding.py
