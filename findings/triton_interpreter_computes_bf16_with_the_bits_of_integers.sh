#!/usr/bin/env bash
# Under TRITON_INTERPRET=1 arithmetic of bf16 tensors is done on their bits as integers.
#
# Seen: a + b, a * b, -a, a > b and tl.sum of bf16 values give numbers that have nothing to do with the operands
#   (1.5 + 2 is not 3.5; -3 > -5 is false), without an error. Converted to float32 in the kernel first, all are
#   right, as are tl.max and tl.abs. A conversion from float32 to bf16 cuts off instead of rounding.
# Versions: torch 2.13.0, triton 3.7.1, numpy 2.4.6 on Python 3.11, on a CPU.
# Expected: The values of the GPU, or at worst an error that bf16 is not supported.
# Why it matters: The interpreter is how kernels are tested where there is no GPU: a kernel that computes in bf16
#   fails there for no fault of its own, and one that passes by wide tolerances was rounded otherwise than on a GPU.
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
    install triton==3.7.1 numpy==2.4.6 torch==2.13.0+cpu 2>/dev/null ||
        install --extra-index-url https://download.pytorch.org/whl/cpu triton==3.7.1 numpy==2.4.6 torch==2.13.0
fi
export OMP_NUM_THREADS=1 HF_HOME=$folder/cache HF_HUB_OFFLINE=1 TORCHINDUCTOR_CACHE_DIR=$folder/inductor TRITON_INTERPRET=1
cat > finding.py <<'END'
import torch
import triton
import triton.language as tl


@triton.jit
def kernel(a_pointer, b_pointer, out_pointer, up: tl.constexpr, n: tl.constexpr):
    i = tl.arange(0, n)
    a = tl.load(a_pointer + i)
    b = tl.load(b_pointer + i)
    if up:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    tl.store(out_pointer + i, (a + b).to(tl.float32))
    tl.store(out_pointer + n + i, (a * b).to(tl.float32))
    tl.store(out_pointer + 2 * n + i, (-a).to(tl.float32))
    tl.store(out_pointer + 3 * n + i, tl.where(a > b, 1.0, 0.0))


@triton.jit
def cast(a_pointer, out_pointer, n: tl.constexpr):
    i = tl.arange(0, n)
    tl.store(out_pointer + i, tl.load(a_pointer + i).to(tl.bfloat16))


a = torch.tensor([1.5, -3.0, 4.0, -1.0]).bfloat16()
b = torch.tensor([2.0, -5.0, 0.5, 1.0]).bfloat16()
right = torch.stack([a + b, a * b, -a, (a > b).bfloat16()]).float()
found = {}
for up in (True, False):
    out = torch.zeros(4, 4)
    kernel[(1,)](a, b, out, up, 4)
    found[up] = out
for row, name in enumerate(("a + b", "a * b", "-a", "a > b")):
    print(f"{name}: torch {right[row].tolist()}, in bf16 {found[False][row].tolist()}, in fp32 {found[True][row].tolist()}")
x = torch.tensor([1.01171875, 1.51171875, 3.0, -1.01171875])
cut = torch.zeros(4).bfloat16()
cast[(1,)](x, cut, 4)
print(f"to bf16: torch {x.bfloat16().tolist()}, interpreter {cut.tolist()}")
assert torch.equal(found[True], right)
assert all(not torch.equal(found[False][row], right[row]) for row in range(4)), found
assert not torch.equal(cut, x.bfloat16()) and (cut.float().abs() <= x.abs()).all(), cut
END
"$python" finding.py
