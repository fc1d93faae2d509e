#!/usr/bin/env bash
# With gradient accumulation the Trainer weighs Mixtral's router loss by the number of micro-batches.
#
# Seen: The part of the router's update that comes from the auxiliary loss is four times as large, element by element,
#   with four micro-batches of one row as with one batch of four rows. Without the auxiliary loss, one batch of four
#   rows and four micro-batches of one row give the same update: the token loss of a micro-batch is divided by the
#   tokens of all of them, the router loss is added to it whole. Over the ranks of DDP the same is reported as
#   huggingface/transformers issue 48690.
# Versions: torch 2.13.0, transformers 5.23.0, accelerate 1.15.0, numpy 2.4.6 on Python 3.11, on a CPU.
# Expected: That router_aux_loss_coef means the same with one and with four micro-batches.
# Why it matters: More and smaller micro-batches, for a smaller GPU, change the weight of the experts' balance.
set -euo pipefail
python=${BASE_PYTHON:+$(realpath -s "$BASE_PYTHON")}
packages=(transformers==5.23.0 accelerate==1.15.0 numpy==2.4.6 torch==2.13.0)
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
from transformers import MixtralConfig, MixtralForCausalLM, Trainer, TrainingArguments

ROWS = [{"input_ids": row, "labels": row} for row in torch.arange(8).repeat(4, 1)]  # equal rows: means are equal, too


def update(coefficient, micro_batches):
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        output_router_logits=True,
        router_aux_loss_coef=coefficient,
    )
    model = MixtralForCausalLM(config)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    arguments = TrainingArguments(
        "run",
        per_device_train_batch_size=4 // micro_batches,
        gradient_accumulation_steps=micro_batches,
        max_steps=1,
        learning_rate=1.0,
        optim="sgd",
        lr_scheduler_type="constant",
        max_grad_norm=0,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
    )
    Trainer(model, arguments, train_dataset=ROWS).train()
    (name,) = (name for name in before if "gate" in name and "proj" not in name)
    return before[name] - dict(model.named_parameters())[name].detach()


token_loss = {k: update(0.0, k) for k in (1, 4)}
both = {k: update(1.0, k) for k in (1, 4)}
router_loss = {k: both[k] - token_loss[k] for k in (1, 4)}


def error(found, expected):
    """The largest difference of two tensors over the largest element of the expected one."""
    return ((found - expected).abs().max() / expected.abs().max()).item()


same = (token_loss[4].norm() / token_loss[1].norm()).item()
weight = (router_loss[4].norm() / router_loss[1].norm()).item()
print(f"update of the router by the token loss, 4 micro-batches over 1: {same:.3f}")
print(f"update of the router by its own loss,   4 micro-batches over 1: {weight:.3f}")
print("largest difference from once and from four times the update: ", end="")
print(f"{error(token_loss[4], token_loss[1]):.1e}, {error(router_loss[4], 4 * router_loss[1]):.1e}")
assert error(token_loss[4], token_loss[1]) < 0.02, token_loss
assert error(router_loss[4], 4 * router_loss[1]) < 0.02, router_loss
END
"$python" finding.py
