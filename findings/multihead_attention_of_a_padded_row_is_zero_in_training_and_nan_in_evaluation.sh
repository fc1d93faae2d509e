#!/usr/bin/env bash
# With need_weights=False, nn.MultiheadAttention returns zeros for a fully padded row in training and nan in evaluation under no_grad.
#
# Seen: With key_padding_mask true for all keys of one row and need_weights=False the output of that row is 0 in
#   training and after eval() with gradients on, and nan after eval() under no_grad. With need_weights=True, the
#   default, it is nan in all three. F.scaled_dot_product_attention gives 0 for a row that is masked throughout, with a
#   boolean mask as with -inf.
# Versions: torch 2.13.0, numpy 2.4.6 on Python 3.11, on a CPU.
# Expected: The same value in training and evaluation.
# Why it matters: An empty example of a padded batch is harmless in training and gives nan in evaluation;
#   need_weights=True, the default, gives nan in both.
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
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
attention = nn.MultiheadAttention(8, 2, batch_first=True)
x = torch.randn(2, 4, 8)
padding = torch.tensor([[False] * 4, [True] * 4])


def output(evaluate, gradients, **options):
    attention.train(not evaluate)
    with torch.set_grad_enabled(gradients):
        y, _ = attention(x, x, x, key_padding_mask=padding, **options)
    assert y[0].isfinite().all()
    return "nan" if y[1].isnan().all() else "zeros" if not y[1].any() else "values"


found = {
    "training, need_weights=False": output(False, True, need_weights=False),
    "eval() with gradients, need_weights=False": output(True, True, need_weights=False),
    "eval() under no_grad, need_weights=False": output(True, False, need_weights=False),
    "training": output(False, True),
    "eval() with gradients": output(True, True),
    "eval() under no_grad": output(True, False),
}
q = x[:1, None]
for name, mask in (("bool", torch.zeros(4, 4, dtype=torch.bool)), ("-inf", torch.full((4, 4), -torch.inf))):
    y = F.scaled_dot_product_attention(q, q, q, attn_mask=mask)
    found[f"scaled_dot_product_attention, {name}"] = "nan" if y.isnan().any() else "zeros" if not y.any() else "values"
for name, value in found.items():
    print(f"{name}: {value}")
assert found["training, need_weights=False"] == "zeros", found
assert found["eval() with gradients, need_weights=False"] == "zeros", found
assert found["eval() under no_grad, need_weights=False"] == "nan", found
assert found["training"] == found["eval() with gradients"] == found["eval() under no_grad"] == "nan", found
assert found["scaled_dot_product_attention, bool"] == found["scaled_dot_product_attention, -inf"] == "zeros", found
END
"$python" finding.py
