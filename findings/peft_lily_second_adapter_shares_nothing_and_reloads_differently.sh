#!/usr/bin/env bash
# A second Lily adapter on a PEFT model shares no matrix between layers, and a save and a load change its outputs.
#
# Seen: Lily shares its B matrices between all layers and its A matrices between stride_A layers. Of two equally
#   configured adapters with stride_A=2 the first has one A and one B for the query projections of both layers; the
#   second has two of each, which train apart (the routers are a layer's own in both). save_pretrained and from_pretrained
#   run, and the model that is loaded gives other logits than the one that was saved, by three fifths of what the
#   training changed. The cause: the sharing is done in _post_injection_hook, which only the constructor of the tuner
#   calls. add_adapter calls inject_adapter alone; from_pretrained, which constructs, shares.
# Versions: torch 2.13.0, transformers 5.23.0, peft 0.21.2, numpy 2.4.6 on Python 3.11, on a CPU.
# Expected: That the second adapter shares as the first does, and that a saved adapter gives the saved outputs.
# Why it matters: An adapter trained beside another one has more parameters than it should, and much of its training is
#   lost at the next load.
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
from peft import LilyConfig, PeftModel, get_peft_model
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


def lily():
    return LilyConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], stride_A=2)


def matrices(model, adapter, kind):
    return len({id(p) for name, p in model.named_parameters() if f"lily_{kind}.{adapter}" in name})


model = get_peft_model(base(), lily())
model.add_adapter("second", lily())
counts = {adapter: [matrices(model, adapter, kind) for kind in "AB"] for adapter in ("default", "second")}
print(f"A and B parameters of the query projections in two layers: {counts}")
lost, learned = {}, {}
for adapter, folder in (("default", "saved"), ("second", "saved/second")):
    model.set_adapter(adapter)
    untrained = logits(model, TOKENS)
    train(model)
    trained = logits(model, TOKENS)
    model.save_pretrained("saved")
    loaded = PeftModel.from_pretrained(base(), folder)
    lost[adapter], learned[adapter] = difference(logits(loaded, TOKENS), trained), difference(trained, untrained)
    print(
        f"{adapter}: training changed the logits by {learned[adapter]:.2e}, "
        f"saving and loading by {lost[adapter]:.2e}"
    )
assert counts == {"default": [1, 1], "second": [2, 2]}, counts
assert lost["default"] < 1e-5, lost
assert lost["second"] > 0.3 * learned["second"], (lost, learned)
END
"$python" finding.py
