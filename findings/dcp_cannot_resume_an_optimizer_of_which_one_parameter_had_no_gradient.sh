#!/usr/bin/env bash
# A DCP optimizer checkpoint cannot be loaded if some parameter had no gradient before the save.
#
# Seen: get_optimizer_state_dict and dcp.save write no state for a parameter that never had a gradient;
#   get_optimizer_state_dict of a fresh optimizer makes state for all parameters, so that dcp.load raises "Missing key
#   in checkpoint state_dict: o.state.second.weight.step". With allow_partial_load=True it loads; the parameter starts
#   with step 1, where optimizer.load_state_dict leaves it without state.
# Versions: torch 2.13.0, numpy 2.4.6 on Python 3.11, on a CPU.
# Expected: That the checkpoint is loaded, as optimizer.load_state_dict does.
# Why it matters: An expert that no token has reached yet, or an auxiliary head that starts later: the save succeeds,
#   and the resume needs an option of the planner.
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
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict


def build():
    torch.manual_seed(0)
    model = nn.ModuleDict({"first": nn.Linear(2, 2), "second": nn.Linear(2, 2)})
    return model, torch.optim.AdamW(model.parameters())


def steps(model, optimizer):
    """The number of steps that the optimizer counts for each weight, or "no state"."""
    counts = {name: optimizer.state[model[name].weight].get("step") for name in model}
    return {name: "no state" if step is None else step.item() for name, step in counts.items()}


model, optimizer = build()
for _ in range(5):
    model["first"](torch.ones(1, 2)).sum().backward()  # the second is not used yet
    optimizer.step()
    optimizer.zero_grad()
torch.save(optimizer.state_dict(), "plain.pt")
dcp.save({"o": get_optimizer_state_dict(model, optimizer)}, checkpoint_id="checkpoint", no_dist=True)


def resumed(**options):
    model, optimizer = build()
    state = {"o": get_optimizer_state_dict(model, optimizer)}
    try:
        dcp.load(state, checkpoint_id="checkpoint", no_dist=True, **options)
    except BaseException as error:  # a CheckpointException is no Exception
        return str(error).strip().splitlines()[-1]
    set_optimizer_state_dict(model, optimizer, state["o"])
    return steps(model, optimizer)


model, optimizer = build()
optimizer.load_state_dict(torch.load("plain.pt"))
plain = steps(model, optimizer)
strict = resumed()
partial = resumed(planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
print("optimizer.load_state_dict, steps:", plain)
print("dcp.load:                        ", strict)
print("dcp.load, allow_partial_load=True, steps:", partial)
assert plain == {"first": 5, "second": "no state"}, plain
assert "Missing key in checkpoint state_dict: o.state.second" in strict, strict
assert partial == {"first": 5, "second": 1}, partial
END
"$python" finding.py
