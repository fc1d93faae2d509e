#!/usr/bin/env bash
# nn.MultiheadAttention gives zeros for a row that is padded throughout while it trains, and nan when it evaluates.
#
# Seen: With key_padding_mask true for all keys of one row and need_weights=False the output is 0 (and the bias)
#   with gradients on, and nan under no_grad after eval(), where the fast path runs. With need_weights=True it is
#   nan in both. F.scaled_dot_product_attention itself gives 0 for a row that is masked throughout, with a boolean
#   mask as with -inf.
# Versions: torch 2.13.0, numpy 2.4.6 on Python 3.11, on a CPU.
# Expected: nan everywhere (softmax of -inf only), or 0 everywhere.
# Why it matters: An empty example of a padded batch is harmless in training and turns the evaluation loss of the
#   whole batch into nan; asking for the weights to look into it does, too.
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
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
attention = nn.MultiheadAttention(8, 2, batch_first=True)
x = torch.randn(2, 4, 8)
padding = torch.tensor([[False] * 4, [True] * 4])


def output(need_weights, evaluate):
    attention.train(not evaluate)
    with torch.set_grad_enabled(not evaluate):
        y, _ = attention(x, x, x, key_padding_mask=padding, need_weights=need_weights)
    assert y[0].isfinite().all()
    return "nan" if y[1].isnan().all() else "zeros" if not y[1].any() else "values"


found = {
    "training": output(False, False),
    "evaluation": output(False, True),
    "training, need_weights": output(True, False),
    "evaluation, need_weights": output(True, True),
}
q = x[:1, None]
for name, mask in (("bool", torch.zeros(4, 4, dtype=torch.bool)), ("-inf", torch.full((4, 4), -torch.inf))):
    y = F.scaled_dot_product_attention(q, q, q, attn_mask=mask)
    found[f"scaled_dot_product_attention, {name}"] = "nan" if y.isnan().any() else "zeros" if not y.any() else "values"
for name, value in found.items():
    print(f"{name}: {value}")
assert found["training"] == "zeros", found
assert found["evaluation"] == "nan", found
assert found["training, need_weights"] == found["evaluation, need_weights"] == "nan", found
assert found["scaled_dot_product_attention, bool"] == found["scaled_dot_product_attention, -inf"] == "zeros", found
END
"$python" finding.py
