#!/usr/bin/env bash
# A checkpoint of an optimizer saved before some parameter had its first gradient cannot be loaded by the documented recipe.
#
# Seen: get_optimizer_state_dict + dcp.save writes no state for a parameter that never had a gradient. On resume
#   get_optimizer_state_dict of a fresh optimizer makes state for all parameters (it steps once with zero
#   gradients), so that dcp.load raises 'Missing key in checkpoint state_dict: o.state.second.weight.step'. With
#   DefaultLoadPlanner(allow_partial_load=True) it loads, and the parameter gets a step count of its own.
# Versions: torch 2.13.0, numpy 2.4.6 on Python 3.11, on a CPU.
# Expected: That what was saved by the recipe is loaded by the recipe, as optimizer.load_state_dict does.
# Why it matters: An expert that no token has reached yet, an auxiliary head that starts later, a layer that is
#   unfrozen in mid-run: the job saves happily for days and cannot be resumed, unless one knows the planner's
#   option.
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
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict


def build():
    torch.manual_seed(0)
    model = nn.ModuleDict({"first": nn.Linear(2, 2), "second": nn.Linear(2, 2)})
    return model, torch.optim.AdamW(model.parameters())


model, optimizer = build()
model["first"](torch.ones(1, 2)).sum().backward()  # the second is not used yet
optimizer.step()
optimizer.zero_grad()
dcp.save({"o": get_optimizer_state_dict(model, optimizer)}, checkpoint_id="checkpoint", no_dist=True)


def resumed(**options):
    model, optimizer = build()
    state = {"o": get_optimizer_state_dict(model, optimizer)}
    try:
        dcp.load(state, checkpoint_id="checkpoint", no_dist=True, **options)
    except BaseException as error:  # a CheckpointException is no Exception
        return str(error).strip().splitlines()[-1]
    set_optimizer_state_dict(model, optimizer, state["o"])
    return "loaded"


strict = resumed()
partial = resumed(planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
print("as documented:     ", strict)
print("allow_partial_load:", partial)
assert "Missing key in checkpoint state_dict: o.state.second" in strict, strict
assert partial == "loaded", partial
END
"$python" finding.py
