#!/usr/bin/env bash
# Transformers' cosine schedules climb back to the full learning rate after num_training_steps; the other schedules stay at their end.
#
# Seen: With 8 training steps get_cosine_schedule_with_warmup and get_cosine_with_min_lr_schedule_with_warmup reach
#   their minimum at step 8 and are back at the peak rate at step 14; linear, polynomial, WSD and cosine with hard
#   restarts stay where they ended.
# Versions: torch 2.13.0, transformers 5.23.0, numpy 2.4.6 on Python 3.11, on a CPU.
# Expected: That all of them hold the final rate, as their clamps (max(0, ..)) suggest.
# Why it matters: A run that goes on past the steps that were planned (more data, a resumed run with a larger
#   max_steps and a saved schedule, an off-by-factor of gradient accumulation) is annealed and then heated up again,
#   silently.
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
from transformers import optimization


def rates(make, steps=15):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    scheduler = make(optimizer)
    found = []
    for _ in range(steps):
        found.append(round(optimizer.param_groups[0]["lr"], 3))
        optimizer.step()
        scheduler.step()
    return found


schedules = {
    "cosine": lambda o: optimization.get_cosine_schedule_with_warmup(o, 2, 8),
    "cosine_with_min_lr": lambda o: optimization.get_cosine_with_min_lr_schedule_with_warmup(o, 2, 8, min_lr=0.1),
    "cosine_with_restarts": lambda o: optimization.get_cosine_with_hard_restarts_schedule_with_warmup(o, 2, 8),
    "linear": lambda o: optimization.get_linear_schedule_with_warmup(o, 2, 8),
    "polynomial": lambda o: optimization.get_polynomial_decay_schedule_with_warmup(o, 2, 8),
    "wsd": lambda o: optimization.get_wsd_schedule(o, 2, 4, num_training_steps=8),
}
found = {name: rates(make) for name, make in schedules.items()}
for name, values in found.items():
    print(f"{name:22}", *values)
for name, values in found.items():
    assert (values[14] > 0.99) == (name in ("cosine", "cosine_with_min_lr")), name
END
"$python" finding.py
