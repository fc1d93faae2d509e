#!/usr/bin/env bash
# resize_token_embeddings discards a separately trained head if the configuration says the head is tied.
#
# Seen: from_pretrained had kept that head and warned that it did not tie it. After resize_token_embeddings the head is
#   the embedding, and the logits differ; its two messages are about the initial values of new rows.
# Versions: torch 2.13.0, transformers 5.23.0, numpy 2.4.6 on Python 3.11, on a CPU.
# Expected: That a head which was loaded untied stays so, or a message that it is discarded.
# Why it matters: Adding one special token to such a checkpoint throws away its trained head.
set -euo pipefail
python=${BASE_PYTHON:+$(realpath -s "$BASE_PYTHON")}
packages=(transformers==5.23.0 numpy==2.4.6 torch==2.13.0)
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
import logging
import warnings

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
head, embedding = model.lm_head.weight.detach().clone(), model.model.embed_tokens.weight.detach().clone()
model.save_pretrained("model")


def state(name, other):
    tied = other.lm_head.weight is other.model.embed_tokens.weight
    off = (other(tokens).logits[..., :64] - logits).abs().max().item()
    rows = other.lm_head.weight[:64]
    now = "the trained one" if torch.equal(rows, head) else "the embedding" if torch.equal(rows, embedding) else "new"
    print(f"{name}: config ties {other.config.tie_word_embeddings}, tied {tied}, head {now}, logits off by {off:.4f}")
    return other.config.tie_word_embeddings, tied, now, off > 1e-3


class Messages(logging.Handler):
    def __init__(self):
        super().__init__()
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


def heard(call):
    """What call returns, and the messages of Transformers and of warnings meanwhile."""
    messages = Messages()
    logger = logging.getLogger("transformers")
    logger.addHandler(messages)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = call()
    logger.removeHandler(messages)
    return result, messages.texts + [str(warning.message) for warning in caught]


loaded, at_loading = heard(lambda: LlamaForCausalLM.from_pretrained("model").eval())
first = state("loaded", loaded)
print("  messages of from_pretrained:", at_loading)
_, at_resize = heard(lambda: loaded.resize_token_embeddings(65))
second = state("one token more", loaded)
print("  messages of resize_token_embeddings:", at_resize)
assert first == (True, False, "the trained one", False), first
assert any("we will NOT tie them" in text for text in at_loading), at_loading
assert len(at_resize) == 2 and all("mean_resizing" in text for text in at_resize), at_resize
assert second == (True, True, "the embedding", True), second
END
"$python" finding.py
