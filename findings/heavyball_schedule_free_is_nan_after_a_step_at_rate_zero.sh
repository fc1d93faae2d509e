#!/usr/bin/env bash
# HeavyBall's SFAdamW turns the weights into NaN if the learning rate of the first step is 0, as warm-ups often have it.
#
# Seen: A linear warm-up from 0 (step / 3, the form of transformers' schedules): the loss is NaN from the second step
#   on; HeavyBall warns only that the rate changes between steps. With constant rates it is the same, without a
#   warning, for the weights of a parameter group at rate 0. A first rate of 1e-12 is harmless. AdamW of the same
#   package and AdamWScheduleFree of schedulefree leave the weights as they were in a step at rate 0, and train on. It
#   is the same with HeavyBall's compilation, which this program switches off. The code catches ZeroDivisionError for
#   this case, but the 0 / 0 is of tensors and gives NaN. The original package had a sibling, which raised that error
#   (schedule_free#5, closed) and is mended there.
# Versions: torch 2.13.0, heavyball 3.2.1, schedulefree 1.4.1, numpy 2.4.6 on Python 3.11, on a CPU.
# Expected: Weights unchanged by a step whose learning rate is 0.
# Why it matters: The loss is finite at the first step and NaN from the second on, whatever the peak rate: one looks
#   for the fault in the data or in the precision.
set -euo pipefail
python=${BASE_PYTHON:+$(realpath -s "$BASE_PYTHON")}
packages=(heavyball==3.2.1 schedulefree==1.4.1 numpy==2.4.6 torch==2.13.0)
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
import heavyball
import schedulefree
import torch

heavyball.utils.compile_mode = None  # no compiler is needed then


def model():
    torch.manual_seed(0)
    return torch.nn.Linear(4, 4)


def losses(make, first_rate):
    """The losses of six steps at the rates first_rate, 1/3, 2/3 and 1 of 0.01."""
    net = model()
    optimizer = make(net.parameters(), lr=0.01)
    if hasattr(optimizer, "train"):
        optimizer.train()
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, step / 3) or first_rate / 0.01)
    found = []
    for _ in range(6):
        optimizer.zero_grad()
        loss = net(torch.ones(2, 4)).square().mean()
        loss.backward()
        optimizer.step()
        warm_up.step()
        found.append(loss.item())
    return found


for make in (heavyball.SFAdamW, heavyball.AdamW, schedulefree.AdamWScheduleFree):
    for first_rate in (0.0, 1e-12):
        found = losses(make, first_rate)
        print(f"{make.__module__}.{make.__name__}, first rate {first_rate}: losses {[round(loss, 4) for loss in found]}")
        if make is heavyball.SFAdamW and first_rate == 0:
            assert found[0] == found[0] and all(loss != loss for loss in found[1:]), found
        else:
            assert abs(found[1] - found[0]) < 1e-6 and found[-1] < found[0] - 1e-3, found

for frozen_rate in (0.0, 1e-12):
    net = model()
    optimizer = heavyball.SFAdamW([{"params": [net.weight]}, {"params": [net.bias], "lr": frozen_rate}], lr=0.01)
    optimizer.train()
    net(torch.ones(2, 4)).square().mean().backward()
    optimizer.step()
    print(f"a group at rate {frozen_rate}: bias {net.bias.tolist()}")
    assert net.weight.isfinite().all()
    assert net.bias.isnan().all().item() is (frozen_rate == 0), net.bias
END
"$python" finding.py
