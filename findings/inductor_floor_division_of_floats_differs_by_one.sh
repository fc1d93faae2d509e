#!/usr/bin/env bash
# Compiled float floor division is off by one where the quotient is near a whole number.
#
# Seen: Eager 1.5 // 0.1 is 14, as in Python (0.1 is a little more than a tenth); compiled code gives 15, since it
#   rounds the quotient and then takes its floor. The remainder beside it is computed as in eager mode, so q * 0.1 +
#   r is no longer x. inf // 2 is nan in eager mode and inf compiled.
# Versions: torch 2.13.0, numpy 2.4.6 on Python 3.11, on a CPU.
# Expected: Equal whole numbers: results of // are used as indices.
# Why it matters: Bins, buckets of a noise schedule and relative positions computed by // land in another row of a
#   table as soon as the model is compiled.
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
    install numpy==2.4.6 torch==2.13.0+cpu 2>/dev/null ||
        install --extra-index-url https://download.pytorch.org/whl/cpu numpy==2.4.6 torch==2.13.0
fi
export OMP_NUM_THREADS=1 HF_HOME=$folder/cache HF_HUB_OFFLINE=1 TORCHINDUCTOR_CACHE_DIR=$folder/inductor
cat > finding.py <<'END'
import torch


def parts(x):
    return x // 0.1, x % 0.1


x = torch.tensor([0.5, 1.5, 3.0, float("inf")])
eager = parts(x)
compiled = torch.compile(parts)(x)
print("x                ", x.tolist())
print("Python  x // 0.1 ", [v // 0.1 for v in x.tolist()])
print("eager   x // 0.1 ", eager[0].tolist())
print("compiled x // 0.1", compiled[0].tolist())
print("eager   x % 0.1  ", eager[1].tolist())
print("compiled x % 0.1 ", compiled[1].tolist())
assert eager[0][:3].tolist() == [4, 14, 29], eager
assert compiled[0][:3].tolist() == [5, 15, 30], compiled
assert eager[0][3].isnan() and compiled[0][3].isinf()
END
"$python" finding.py
