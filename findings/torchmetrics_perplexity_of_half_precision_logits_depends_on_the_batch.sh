#!/usr/bin/env bash
# TorchMetrics' Perplexity of float16 logits is inf where the loss is finite, and of bfloat16 logits moves with the batch.
#
# Seen: A text of 8192 tokens, 16 rows of 512, with a perplexity of 3740 (exp of the double cross entropy of the same
#   rounded logits). In float16, Perplexity gives that within 0.2 % in batches of 1 to 8 rows and inf in one of 16:
#   the losses of a batch are summed in float16, which ends at 65504. One token with a loss of 30 also makes a whole
#   float16 text inf, as its probability is rounded to 0, where exp(cross entropy) is 1808. In bfloat16 the result is
#   3739 by single rows, 3768 in batches of 2 and 3828, 2.3 % too much, in batches of 8. With float32 logits all are
#   equal. The logits are random, hence a perplexity above the 512 words of the vocabulary.
# Versions: torch 2.13.0, torchmetrics 1.9.0, numpy 2.4.6 on Python 3.11, on a CPU.
# Expected: That a metric which takes half precision sums in the float32 of its state, and that a perplexity does not
#   depend on how the text is cut into batches.
# Why it matters: Evaluations of bfloat16 logits at different batch sizes differ by more than models often do; in
#   float16 one hard token, or a larger batch, makes a model's perplexity infinite.
set -euo pipefail
python=${BASE_PYTHON:+$(realpath -s "$BASE_PYTHON")}
packages=(torchmetrics==1.9.0 numpy==2.4.6 torch==2.13.0)
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
from torch.nn.functional import cross_entropy
from torchmetrics.text import Perplexity

VOCABULARY = 512
torch.manual_seed(0)
LOGITS = 2 * torch.randn(16, 512, VOCABULARY)
LABELS = torch.randint(VOCABULARY, (16, 512))


def true_perplexity(logits, labels):
    return cross_entropy(logits.double().flatten(0, 1), labels.flatten()).exp().item()


def by_batches(logits, labels, rows):
    metric = Perplexity()
    for batch, batch_labels in zip(logits.split(rows), labels.split(rows)):
        metric.update(batch, batch_labels)
    return metric.compute().item()


for dtype in (torch.float32, torch.float16, torch.bfloat16):
    logits = LOGITS.to(dtype)
    expected = true_perplexity(logits, LABELS)
    found = {rows: by_batches(logits, LABELS, rows) for rows in (1, 2, 4, 8, 16)}
    print(f"{dtype}: exp of the mean loss {expected:.1f}, Perplexity by rows in a batch {found}")
    off = {rows: value / expected - 1 for rows, value in found.items()}
    if dtype == torch.float32:
        assert all(abs(value) < 1e-3 for value in off.values()), off
    if dtype == torch.float16:
        assert all(abs(off[rows]) < 3e-3 for rows in (1, 2, 4, 8)), off
        assert found[16] == float("inf"), found
    if dtype == torch.bfloat16:
        assert abs(off[1]) < 2e-3 and off[8] > 0.01, off

one_hard_token = torch.zeros(1, 4, 8)
one_hard_token[..., 0] = 30
labels = torch.tensor([[0, 0, 0, 1]])
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    found, expected = by_batches(one_hard_token.to(dtype), labels, 1), true_perplexity(one_hard_token, labels)
    print(f"{dtype}, one token of four with a loss of 30: exp of the mean loss {expected:.1f}, Perplexity {found:.1f}")
    assert (found == float("inf")) is (dtype == torch.float16), found
    assert found == float("inf") or abs(found / expected - 1) < 0.01, found
END
"$python" finding.py
