#!/usr/bin/env bash
# With use_seedable_sampler=True, every epoch after a break out of a prepared loader begins with the same rows.
#
# Seen: Three epochs of three batches each, ended by break, read the same six of twelve rows in the same order from a
#   map-style loader with shuffle=True that was prepared with DataLoaderConfiguration(use_seedable_sampler=True).
#   Epochs that run to their end have an order each. The counter that seeds the order is raised only at the end of a
#   full epoch (loader.set_epoch(epoch) sets it). Without the seedable sampler, and without prepare(), the orders
#   differ.
# Versions: torch 2.13.0, accelerate 1.15.0, numpy 2.4.6 on Python 3.11, on a CPU.
# Expected: Another order in every epoch, as from a DataLoader that is not prepared, or as from full epochs of the
#   prepared one.
# Why it matters: A training loop with a limit on the steps per epoch sees only the first part of its data, again and
#   again.
set -euo pipefail
python=${BASE_PYTHON:+$(realpath -s "$BASE_PYTHON")}
packages=(accelerate==1.15.0 numpy==2.4.6 torch==2.13.0)
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
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader


def map_style():
    return DataLoader([{"a": a} for a in range(12)], batch_size=2, shuffle=True)


def epochs(batches, prepared, seedable):
    accelerator = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=seedable)
    )
    set_seed(0)
    loader = map_style()
    if prepared:
        loader = accelerator.prepare(loader)
    orders = []
    for _ in range(3):
        order = []
        for number, batch in enumerate(loader, 1):
            order += batch["a"].tolist()
            if number == batches:
                break
        orders.append(order)
    return orders


distinct = {}
for name, prepared, seedable in (
    ("seedable sampler", True, True),
    ("plain sampler", True, False),
    ("not prepared", False, True),
):
    early, full = epochs(3, prepared, seedable), epochs(7, prepared, seedable)  # six batches are an epoch
    distinct[name] = len(set(map(tuple, early))), len(set(map(tuple, full)))
    print(f"{name}: left early {early}, orders {distinct[name][0]}; full epochs: orders {distinct[name][1]}")
assert distinct["seedable sampler"] == (1, 3), distinct
assert distinct["plain sampler"] == distinct["not prepared"] == (3, 3), distinct
END
"$python" finding.py
