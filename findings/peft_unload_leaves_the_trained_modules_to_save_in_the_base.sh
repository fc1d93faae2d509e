#!/usr/bin/env bash
# PeftModel.unload() removes the LoRA layers but leaves a trained output layer of modules_to_save in the base model.
#
# Seen: With LoRA on the query projections and modules_to_save=['lm_head'], disable_adapter() gives the logits of
#   the base model bit for bit. unload() gives a model without LoRA but with the trained output layer: neither the
#   base nor the trained model.
# Versions: torch 2.13.0, transformers 5.23.0, peft 0.21.2, numpy 2.4.6 on Python 3.11, on a CPU.
# Expected: The base model: its documentation says that it returns the base model by removing all modules of PEFT,
#   and it merges nothing.
# Why it matters: Whoever unloads an adapter to train or to compare the next one on the same base starts from a
#   changed output layer or embedding.
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
from peft import LoraConfig, get_peft_model
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
    for _ in range(6):
        optimizer.zero_grad()
        model(input_ids=TOKENS, labels=TOKENS).loss.backward()
        optimizer.step()


def logits(model, tokens):
    model.eval()
    with torch.no_grad():
        return model(input_ids=tokens).logits


def difference(a, b):
    return (a - b).abs().max().item()


torch.manual_seed(1)
TOKENS = torch.randint(0, 64, (2, 12))

before = logits(base(), TOKENS)
config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"], modules_to_save=["lm_head"])
model = get_peft_model(base(), config)
train(model)
trained = logits(model, TOKENS)
with model.disable_adapter():
    disabled = logits(model, TOKENS)
head = dict(model.named_parameters())["base_model.model.lm_head.modules_to_save.default.weight"]
unloaded = model.unload()
after = logits(unloaded, TOKENS)
print(f"training changed the logits by {difference(trained, before):.2e}")
print(f"disable_adapter() differs from the base by {difference(disabled, before):.2e}")
print(f"unload() differs from the base by {difference(after, before):.2e}")
print(f"the unloaded output layer is the trained one: {torch.equal(unloaded.lm_head.weight, head)}")
assert torch.equal(disabled, before)
assert difference(after, before) > 1e-2
assert torch.equal(unloaded.lm_head.weight, head)
END
"$python" finding.py
