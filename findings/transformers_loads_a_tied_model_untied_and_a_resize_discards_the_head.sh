#!/usr/bin/env bash
# A model whose configuration ties the head is loaded untied if the file has a head of its own, until resize_token_embeddings discards that head.
#
# Seen: After the head of a tied model was given weights of its own, save_pretrained writes both matrices and leaves
#   tie_word_embeddings true. from_pretrained then keeps both and does not tie, which a warning says: logits are
#   right, config.tie_word_embeddings still says True. resize_token_embeddings (or any tie_weights()) on the loaded
#   model ties them, so that the trained head is gone, and of that no warning speaks.
# Versions: torch 2.13.0, transformers 5.23.0, numpy 2.4.6 on Python 3.11, on a CPU.
# Expected: That the configuration decides at loading (tied, as transformers 4 did), or that an untied model is
#   untied in its configuration and stays so.
# Why it matters: Adding one special token to such a checkpoint throws away its trained head; and code that asks the
#   configuration whether two matrices are one (exporters, servers, sharding) is wrong about it.
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
    install transformers==5.23.0 numpy==2.4.6 torch==2.13.0+cpu 2>/dev/null ||
        install --extra-index-url https://download.pytorch.org/whl/cpu transformers==5.23.0 numpy==2.4.6 torch==2.13.0
fi
export OMP_NUM_THREADS=1 HF_HOME=$folder/cache HF_HUB_OFFLINE=1 TORCHINDUCTOR_CACHE_DIR=$folder/inductor
cat > finding.py <<'END'
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=4,
    tie_word_embeddings=True,
)
tokens = torch.arange(8)[None]
model = LlamaForCausalLM(config).eval()
model.lm_head.weight = nn.Parameter(-model.lm_head.weight.detach())  # untied, as after training the head alone
logits = model(tokens).logits
model.save_pretrained("model")


def state(name, other):
    tied = other.lm_head.weight is other.model.embed_tokens.weight
    off = (other(tokens).logits[..., :64] - logits).abs().max().item()
    print(f"{name}: config ties {other.config.tie_word_embeddings}, tied {tied}, logits off by {off:.4f}")
    return other.config.tie_word_embeddings, tied, off > 1e-3


loaded = LlamaForCausalLM.from_pretrained("model").eval()
first = state("loaded", loaded)
loaded.resize_token_embeddings(65)
second = state("one token more", loaded)
assert first == (True, False, False), first
assert second == (True, True, True), second
END
"$python" finding.py
