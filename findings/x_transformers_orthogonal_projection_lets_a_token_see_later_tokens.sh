#!/usr/bin/env bash
# With x-transformers' orthogonal projections a causal decoder sees the tokens that follow, and its padding.
#
# Seen: With attn_orthog_projected_values, attn_orthog_projected_values_per_head or orthog_residual a Decoder's logits
#   of the first eight tokens change by a tenth of the largest logit if the six that follow are others; without the
#   options they do not change. Other tokens at masked places change them by 2 to 8 %. Greedy generation with the cache,
#   which is the default, gives other tokens than generation without it. The cause: orthog_project flattens all axes
#   after the batch before it projects, so that one coefficient is made of the whole sequence, not one of each token.
#   The sizes are of a random model whose matrices are drawn with a standard deviation of 0.3. The paper of the residual
#   option (arXiv 2505.11881) has a projection of whole samples, too, beside that of each feature vector.
# Versions: torch 2.13.0, x-transformers 2.31.10, numpy 2.4.6 on Python 3.11, on a CPU.
# Expected: A projection for each token (for each head), as a causal decoder needs it; no warning says otherwise.
# Why it matters: In training a token's loss uses tokens that it must predict, and the padding; generation then has
#   other logits than training saw.
set -euo pipefail
python=${BASE_PYTHON:+$(realpath -s "$BASE_PYTHON")}
packages=(x-transformers==2.31.10 numpy==2.4.6 torch==2.13.0)
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
from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

OPTIONS = (None, "attn_orthog_projected_values", "attn_orthog_projected_values_per_head", "orthog_residual")
torch.manual_seed(1)
TOKENS = torch.randint(1, 50, (3, 14))
OTHERS = TOKENS.clone()
OTHERS[:, 8:] = torch.randint(1, 50, (3, 6))


def build(option):
    torch.manual_seed(0)
    settings = {option: True} if option else {}
    layers = Decoder(dim=32, depth=2, heads=4, attn_dim_head=8, rotary_pos_emb=True, **settings)
    model = TransformerWrapper(num_tokens=50, max_seq_len=64, attn_layers=layers).eval()
    for weight in model.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.3)  # effects that are larger than those of a fresh model
    return model


for option in OPTIONS:
    model = build(option)
    mask = torch.arange(14).expand(3, 14) < 8
    with torch.no_grad():
        logits = model(TOKENS)
        scale = logits.abs().max()
        later = ((model(OTHERS) - logits)[:, :8].abs().max() / scale).item()
        masked = ((model(TOKENS, mask=mask) - model(OTHERS, mask=mask))[:, :8].abs().max() / scale).item()
        generator = AutoregressiveWrapper(model)
        texts = [generator.generate(TOKENS[:, :5], 12, temperature=0.0, cache_kv=cached) for cached in (True, False)]
    other = (texts[0] != texts[1]).sum().item()
    print(f"{option}: later tokens change the logits by {100 * later:.4f} % of the largest, ", end="")
    print(f"masked ones by {100 * masked:.4f} %; {other} of 36 generated tokens differ without the cache")
    if option:
        assert min(later, masked) > 1e-2 and other > 0, (later, masked, other)
    else:
        assert max(later, masked) < 1e-6 and other == 0, (later, masked, other)
END
"$python" finding.py
