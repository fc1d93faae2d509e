#!/usr/bin/env bash
# With gradient accumulation the Trainer weighs a mixture of experts' router loss by the number of micro-batches.
#
# Seen: The token loss is divided by num_items_in_batch, the tokens of all micro-batches, and the Trainer then
#   divides by nothing more. The auxiliary loss of the router is a mean over its own micro-batch and is added
#   undivided, so that k micro-batches sum to about k times router_aux_loss_coef. Without the auxiliary loss one
#   batch of two rows and two micro-batches of one row give the same update.
# Versions: torch 2.13.0, transformers 5.23.0, accelerate 1.15.0, numpy 2.4.6 on Python 3.11, on a CPU.
# Expected: That gradient accumulation changes only memory: router_aux_loss_coef means the same with 1 and with 16
#   micro-batches.
# Why it matters: The balance of the experts is weighed 16 times as much as in the configuration when somebody fits
#   the run onto a smaller GPU by 16 micro-batches.
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
    install transformers==5.23.0 accelerate==1.15.0 numpy==2.4.6 torch==2.13.0+cpu 2>/dev/null ||
        install --extra-index-url https://download.pytorch.org/whl/cpu transformers==5.23.0 accelerate==1.15.0 numpy==2.4.6 torch==2.13.0
fi
export OMP_NUM_THREADS=1 HF_HOME=$folder/cache HF_HUB_OFFLINE=1 TORCHINDUCTOR_CACHE_DIR=$folder/inductor
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
same = (token_loss[4].norm() / token_loss[1].norm()).item()
weight = ((both[4] - token_loss[4]).norm() / (both[1] - token_loss[1]).norm()).item()
print(f"update of the router by the token loss, 4 micro-batches over 1: {same:.3f}")
print(f"update of the router by its own loss,   4 micro-batches over 1: {weight:.3f}")
assert abs(same - 1) < 0.02, same
assert abs(weight - 4) < 0.1, weight
END
"$python" finding.py
