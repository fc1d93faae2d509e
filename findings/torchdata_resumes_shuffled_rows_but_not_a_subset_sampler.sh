#!/usr/bin/env bash
# A resumed StatefulDataLoader repeats rows and leaves others out if its sampler is SubsetRandomSampler.
#
# Seen: After three of six batches the state of the loader and of torch's random numbers is taken and both are
#   restored in a new loader. With shuffle=True the remaining three batches are those of the run that was not
#   interrupted. With sampler=SubsetRandomSampler(range(12)) rows come that were read before the stop, and others
#   never come. The sampler draws a new permutation and the loader skips as many entries of it as were read. No
#   warning is given.
# Versions: torch 2.13.0, torchdata 0.11.0, numpy 2.4.6 on Python 3.11, on a CPU.
# Expected: That both resume alike, or an error for a sampler whose order cannot be restored.
# Why it matters: After a resume some rows are trained on twice in an epoch and others not at all: a split made by
#   indices is just what this sampler is for.
set -euo pipefail
python=${BASE_PYTHON:+$(realpath -s "$BASE_PYTHON")}
packages=(torchdata==0.11.0 numpy==2.4.6 torch==2.13.0)
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
from torch.utils.data import SubsetRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

ROWS = list(range(12))


def loader(kind):
    torch.manual_seed(0)
    if kind == "shuffle=True":
        return StatefulDataLoader(ROWS, batch_size=2, shuffle=True)
    return StatefulDataLoader(ROWS, batch_size=2, sampler=SubsetRandomSampler(ROWS))


wrong = {}
for kind in ("shuffle=True", "SubsetRandomSampler"):
    rows = loader(kind)
    batches = iter(rows)
    before = [int(row) for _ in range(3) for row in next(batches)]
    state, random_state = rows.state_dict(), torch.get_rng_state()
    expected = [int(row) for batch in batches for row in batch]
    resumed = loader(kind)
    resumed.load_state_dict(state)
    torch.set_rng_state(random_state)
    after = [int(row) for batch in resumed for row in batch]
    twice, never = set(before) & set(after), set(ROWS) - set(before) - set(after)
    wrong[kind] = after != expected, len(twice), len(never)
    print(f"{kind}: before {before}, expected {expected}, resumed {after}, twice {sorted(twice)}, never {sorted(never)}")
assert wrong["shuffle=True"] == (False, 0, 0), wrong
assert all(wrong["SubsetRandomSampler"]), wrong
END
"$python" finding.py
