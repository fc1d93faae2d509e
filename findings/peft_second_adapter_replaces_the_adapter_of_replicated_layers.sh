#!/usr/bin/env bash
# Adding a second LoRA adapter to a PEFT model with layer_replication changes what the first one computes.
#
# Seen: Two layers, replicated to three by layer_replication=[[0, 2], [1, 2]], are trained with LoRA. add_adapter
#   with the same settings, as for a second task, changes the logits of the first adapter, which is still active, by
#   two fifths of what its training changed. The file that save_pretrained writes for the first adapter afterwards
#   gives the changed logits, too; one that is written before gives those of the training. The replication is applied
#   again, to the layers that were replicated already.
# Versions: torch 2.13.0, transformers 5.23.0, peft 0.21.2, numpy 2.4.6 on Python 3.11, on a CPU.
# Expected: That a new adapter, which is not active, changes nothing, as it does without layer_replication.
# Why it matters: The adapter that was trained first is damaged, in memory and at the next save.
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
from peft import LoraConfig, PeftModel, get_peft_model
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


def lora(replication):
    return LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "o_proj"], layer_replication=replication)


changes = {}
for name, replication in (("two layers", None), ("replicated to three", [[0, 2], [1, 2]])):
    model = get_peft_model(base(), lora(replication))
    untrained = logits(model, TOKENS)
    train(model)
    trained = logits(model, TOKENS)
    model.save_pretrained("before")
    before = difference(logits(PeftModel.from_pretrained(base(), "before"), TOKENS), trained)
    model.add_adapter("second", lora(replication))
    assert model.active_adapter == "default"
    added = difference(logits(model, TOKENS), trained)
    model.save_pretrained(name)
    loaded = difference(logits(PeftModel.from_pretrained(base(), name), TOKENS), trained)
    changes[name] = added, loaded
    assert before < 1e-5, before
    assert not replication or min(added, loaded) > 0.1 * difference(trained, untrained), changes
    print(
        f"{name}: training changed the logits by {difference(trained, untrained):.2e}, a save and a load by {before:.2e}, "
        f"the second adapter by {added:.2e}, a save and a load then by {loaded:.2e}"
    )
assert max(changes["two layers"]) < 1e-5, changes
END
"$python" finding.py
