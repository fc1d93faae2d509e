#!/usr/bin/env bash
# A causal language model with a PEFT Lily adapter sees the tokens that follow and the other rows of its batch.
#
# Seen: Lily routes by the mean of the router's probabilities over all tokens of the batch. So the logits of the
#   first six tokens change if six more tokens follow, those of a row change if another row stands in the batch, and
#   those of a text that is fed token by token with a cache, as in generation, differ from those of the whole text: by
#   3 %, 1 % and 10 % of what the training changed. Without an adapter and with a LoRA adapter all three differences are
#   below 1e-5. The code that the method's authors published takes the same mean.
# Versions: torch 2.13.0, transformers 5.23.0, peft 0.21.2, numpy 2.4.6 on Python 3.11, on a CPU.
# Expected: That a causal model stays causal and a row's output does not depend on its neighbours, as with LoRA, or a
#   word about it in the documentation, which says that the router depends on the input of the layer.
# Why it matters: In training a token's loss uses tokens that it must predict. Generation then has other logits than
#   training saw, and an evaluation loss depends on the batch size.
set -euo pipefail
python=${BASE_PYTHON:+$(realpath -s "$BASE_PYTHON")}
packages=(peft==0.21.2 transformers==5.23.0 numpy==2.4.6 torch==2.13.0)
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
from peft import LilyConfig, LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM


def base():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config)


def train(model):
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(50):
        optimizer.zero_grad()
        model(input_ids=TOKENS, labels=TOKENS).loss.backward()
        optimizer.step()


def logits(model, tokens):
    model.eval()
    with torch.no_grad():
        return model(input_ids=tokens).logits


def token_by_token(model, tokens):
    model.eval()
    found, cache = [], None
    with torch.no_grad():
        for i in range(tokens.shape[1]):
            output = model(input_ids=tokens[:, i : i + 1], past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            found.append(output.logits)
    return torch.cat(found, 1)


def difference(a, b):
    return (a - b).abs().max().item()


torch.manual_seed(1)
TOKENS = torch.randint(0, 64, (2, 12))

plain = base()
models, effects = {"without an adapter": plain}, {}
for name, kind in (("LoRA", LoraConfig), ("Lily", LilyConfig)):
    model = get_peft_model(base(), kind(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj", "up_proj"]))
    train(model)
    models[name] = model
    effects[name] = difference(logits(model, TOKENS), logits(plain, TOKENS))
    print(f"{name}: effect of the training on the logits {effects[name]:.2e}")
changes = {}
for name, model in models.items():
    whole = logits(model, TOKENS)
    later = difference(logits(model, TOKENS[:, :6]), whole[:, :6])
    row = difference(logits(model, TOKENS[:1]), whole[:1])
    single = difference(token_by_token(model, TOKENS), whole)
    changes[name] = later, row, single
    print(f"{name}: later tokens change the logits by {later:.2e}, the other row by {row:.2e}, ", end="")
    print(f"feeding token by token by {single:.2e}")
assert max(changes["without an adapter"] + changes["LoRA"]) < 1e-5, changes
assert min(changes["Lily"]) > 5e-3 * effects["Lily"], (changes, effects)
END
"$python" finding.py
