#!/usr/bin/env bash
# SmoothAPLoss of pytorch-metric-learning takes neighbours in the batch for positives, whatever their labels are.
#
# Seen: Four classes of three rows, in order of the classes: the loss of embeddings in tight clusters by class is 0.31,
#   and training reaches a loss of 0 with embeddings whose nearest row is of the same class for 42 per cent; with the
#   classes in turn, 0.58 and none. The batch is cut into blocks of as many rows as there are classes, here of four, and
#   each block counts as a class; the labels serve only to count them and to check that all have equally many rows. Only
#   as many classes as rows per class, in order, are treated rightly. TripletMarginLoss gives 0 for the clusters and
#   neighbours of the same class in all cases.
# Versions: torch 2.13.0, pytorch-metric-learning 2.9.0, numpy 2.4.6 on Python 3.11, on a CPU. Version 3, which needs
#   Python 3.12, says in its documentation that the positives come from the labels.
# Expected: A loss near 0 for perfect clusters; embeddings trained to a loss of 0 that are clustered by label.
# Why it matters: MPerClassSampler with a batch of 32 and m=4 has eight classes of four rows: the loss falls to 0 and
#   the network has learned to bring different classes together.
set -euo pipefail
python=${BASE_PYTHON:+$(realpath -s "$BASE_PYTHON")}
packages=(pytorch-metric-learning==2.9.0 numpy==2.4.6 torch==2.13.0)
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
export OMP_NUM_THREADS=1
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
from pytorch_metric_learning.losses import SmoothAPLoss, TripletMarginLoss


def trained(loss_function, labels):
    """The loss after training free embeddings, and the part of rows whose nearest row is of their class."""
    torch.manual_seed(0)
    embeddings = torch.nn.Parameter(torch.randn(len(labels), 16))
    optimizer = torch.optim.Adam([embeddings], lr=0.05)
    for _ in range(500):
        optimizer.zero_grad()
        loss = loss_function(embeddings, labels)
        loss.backward()
        optimizer.step()
    rows = torch.nn.functional.normalize(embeddings.detach())
    similarity = (rows @ rows.T).fill_diagonal_(-2)
    return loss.item(), (labels[similarity.argmax(1)] == labels).float().mean().item()


def clustered(loss_function, labels):
    torch.manual_seed(0)
    return loss_function(torch.eye(16)[labels] + 0.01 * torch.randn(len(labels), 16), labels).item()


for classes, rows in ((4, 3), (8, 4), (3, 4), (4, 4)):
    in_order = torch.arange(classes).repeat_interleave(rows)
    in_turn = torch.arange(classes).repeat(rows)
    for order, labels in (("in order", in_order), ("in turn", in_turn)):
        for loss_function in (SmoothAPLoss(), TripletMarginLoss()):
            perfect = clustered(loss_function, labels)
            loss, neighbours = trained(loss_function, labels)
            name = type(loss_function).__name__
            print(
                f"{classes} classes of {rows}, {order}, {name}: {perfect:.3f} for perfect clusters; "
                f"trained to {loss:.3f}, nearest row of the same class for {neighbours:.0%}"
            )
            if name == "TripletMarginLoss" or (classes == rows and order == "in order"):
                assert perfect < 0.01 and neighbours == 1, (perfect, neighbours)
            else:
                assert perfect > 0.2 and loss < 0.01 and neighbours < 0.7, (perfect, loss, neighbours)

torch.manual_seed(0)
embeddings = torch.randn(12, 16)
one, other = torch.arange(4).repeat_interleave(3), torch.arange(4).repeat(3)
assert SmoothAPLoss()(embeddings, one) == SmoothAPLoss()(embeddings, other)
END
"$python" finding.py
