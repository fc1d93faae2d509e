#!/usr/bin/env bash
# The first step of HeavyBall's Scion replaces every weight of the model by a new one of its own, at any learning rate.
#
# Seen: At a learning rate of 1e-12 a first step turns each matrix into an orthogonal one that has nothing to do with
#   the weights before, and each vector, norm gains included, into zeros. Classifiers of eight classes that got every
#   row of their training set right get 27 and 12 % right afterwards. The matrices are drawn from a seed that is the
#   place of the parameter in its group: two models with different weights have the same ones after their first step,
#   and the order of the parameters decides which. Neither the docstring nor a warning says so. In the published code
#   of the method's authors (LIONS-EPFL/scion, scion.py) this start is a method of its own, init(), which step() does
#   not call. AdamW and Muon of the same package leave the weights as they are within 1e-6.
# Versions: torch 2.13.0, heavyball 3.2.1 (its compilation switched off), numpy 2.4.6 on Python 3.11, on a CPU.
# Expected: That a step moves the weights that the optimizer was given.
# Why it matters: Whoever fine-tunes a pretrained model with it, or loads weights and builds the optimizer anew, trains
#   from random weights and sees only a high loss; an initialisation of one's own and torch.manual_seed count for
#   nothing.
set -euo pipefail
python=${BASE_PYTHON:+$(realpath -s "$BASE_PYTHON")}
packages=(heavyball==3.2.1 numpy==2.4.6 torch==2.13.0)
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
import torch

heavyball.utils.compile_mode = None  # no compiler is needed then
ROWS, CLASSES, WIDTH = 256, 8, 32
torch.manual_seed(0)
CENTRES = 3 * torch.randn(CLASSES, WIDTH)
LABELS = torch.randint(CLASSES, (ROWS,))
INPUTS = CENTRES[LABELS] + torch.randn(ROWS, WIDTH)


def model(seed):
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(WIDTH, WIDTH), torch.nn.LayerNorm(WIDTH), torch.nn.GELU(), torch.nn.Linear(WIDTH, CLASSES)
    )


def steps(net, optimizer, number):
    for _ in range(number):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(INPUTS), LABELS).backward()
        optimizer.step()


def right(net):
    return (net(INPUTS).argmax(1) == LABELS).float().mean().item()


trained = {}
for seed in (1, 2):
    net = model(seed)
    steps(net, torch.optim.AdamW(net.parameters(), lr=1e-2), 100)
    trained[seed] = net
    print(f"trained from seed {seed}: {right(net):.3f} right")
    assert right(net) == 1

after = {}
for make in (heavyball.AdamW, heavyball.Muon, heavyball.Scion):
    for seed, net in trained.items():
        copy = model(seed)
        copy.load_state_dict(net.state_dict())
        steps(copy, make(copy.parameters(), lr=1e-12), 1)
        moved = max((a - b).abs().max().item() for a, b in zip(copy.parameters(), net.parameters(), strict=True))
        after[make, seed] = copy
        print(f"{make.__name__}, seed {seed}, one step: weights moved by {moved:.1e}, {right(copy):.3f} right", end="")
        print(f", norm gains {copy[1].weight.min().item():.2f} to {copy[1].weight.max().item():.2f}")
        if make is heavyball.Scion:
            assert moved > 0.5 and right(copy) < 0.5 and not copy[1].weight.abs().max() > 1e-6, moved
        else:
            assert moved < 1e-6 and right(copy) == 1, moved

one, two = after[heavyball.Scion, 1], after[heavyball.Scion, 2]
apart = max((a - b).abs().max().item() for a, b in zip(one.parameters(), two.parameters(), strict=True))
before = max((a - b).abs().max().item() for a, b in zip(*(net.parameters() for net in trained.values()), strict=True))
print(f"the two models differed by {before:.2f} before their first step of Scion and by {apart:.1e} after it")
assert before > 0.1 and apart < 1e-6, (before, apart)
square = one[0].weight
off = (square @ square.T - torch.eye(WIDTH)).abs().max().item()
print(f"a matrix times its transpose differs from the identity by {off:.1e}")
assert off < 1e-4, off

orders = []
for reverse in (False, True):
    pair = [torch.nn.Parameter(torch.ones(4, 4)), torch.nn.Parameter(torch.ones(4, 4))]
    for weight in pair:
        weight.grad = torch.ones(4, 4)
    heavyball.Scion(pair[::-1] if reverse else pair, lr=1e-12).step()
    orders.append(pair[0].detach())
print(f"a first parameter that is given last differs by {(orders[0] - orders[1]).abs().max():.2f}")
assert (orders[0] - orders[1]).abs().max() > 0.1
END
"$python" finding.py
