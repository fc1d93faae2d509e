#!/usr/bin/env bash
# A mask, even one of ones alone, switches off the entropy loss of vector-quantize-pytorch's LFQ.
#
# Seen: In training LFQ(codebook_size=64, dim=16) returns an entropy loss of -0.33 for a batch, and 0.0 for the same
#   batch with a mask that is True everywhere; the gradient of the input falls from 3e-2 to 3e-10. With a mask of seven
#   of ten places the loss is 0.0 as well, where the batch that is cut to seven places has -0.30. With diversity_gamma=2
#   the masked loss is the entropy of single samples times minus its weight (0.1): it asks for undecided codes, where
#   the loss without a mask asks for decided ones. The cause: the mask takes away the axis of the places before the
#   first two axes are joined, so that the places end where the codebooks are expected, and the mean over the batch is
#   of single places. The quantised output is right where the mask is of ones. A related report: the masked commitment
#   loss of LFQ (vector-quantize-pytorch#188, closed).
# Versions: torch 2.13.0, vector-quantize-pytorch 1.32.0, numpy 2.4.6 on Python 3.11, on a CPU.
# Expected: With a mask of ones the loss without a mask, and with another mask that of the places that are left, as
#   VectorQuantize of the same package has it.
# Why it matters: The entropy loss is what makes LFQ use its codes. Whoever pads audio or text and passes the mask
#   trains without it, and a loss of 0 looks like success.
set -euo pipefail
python=${BASE_PYTHON:+$(realpath -s "$BASE_PYTHON")}
packages=(vector-quantize-pytorch==1.32.0 numpy==2.4.6 torch==2.13.0)
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
from vector_quantize_pytorch import LFQ, VectorQuantize

torch.manual_seed(0)
BATCH = torch.randn(4, 10, 16)
ONES = torch.ones(4, 10, dtype=torch.bool)
SEVEN = (torch.arange(10) < 7).expand(4, 10)


def run(kind, batch, mask=None, **settings):
    """The loss, the largest gradient of the input, the output, and the entropies of LFQ."""
    torch.manual_seed(1)
    model = kind(codebook_size=64, dim=16, **settings).train()
    batch = batch.clone().requires_grad_()
    extra = {"return_loss_breakdown": True} if kind is LFQ else {}
    result = model(batch, mask=mask, **extra)
    (output, _, loss), breakdown = result if extra else (result, None)
    loss.sum().backward()
    return loss.sum().item(), batch.grad.abs().max().item(), output.detach(), breakdown


found = {}
for kind in (LFQ, VectorQuantize):
    for name, batch, mask in (
        ("no mask", BATCH, None),
        ("a mask of ones", BATCH, ONES),
        ("a mask of 7", BATCH, SEVEN),
        ("cut to 7", BATCH[:, :7], None),
    ):
        loss, gradient, output, breakdown = found[kind, name] = run(kind, batch, mask)
        entropies = ""
        if breakdown:
            single, whole = breakdown.per_sample_entropy, breakdown.batch_entropy
            entropies = f", entropy of single samples {single:.4f}, of the batch {whole:.4f}"
        print(f"{kind.__name__}, {name}: loss {loss:.4f}, gradient up to {gradient:.1e}{entropies}")
    assert torch.equal(found[kind, "no mask"][2], found[kind, "a mask of ones"][2])
for a, b in (("no mask", "a mask of ones"), ("cut to 7", "a mask of 7")):
    assert abs(found[VectorQuantize, a][0] - found[VectorQuantize, b][0]) < 1e-5, (a, b)
    assert found[LFQ, a][0] < -0.2 and abs(found[LFQ, b][0]) < 1e-6, (a, b)
    assert found[LFQ, b][1] < 1e-5 * found[LFQ, a][1], (a, b)

for name, mask in (("no mask", None), ("a mask of ones", ONES)):
    loss, _, _, breakdown = run(LFQ, BATCH, mask, diversity_gamma=2.0)
    single = breakdown.per_sample_entropy.item()
    print(f"diversity_gamma=2, {name}: loss {loss:.4f}, entropy of single samples {single:.4f}")
    assert (abs(loss + 0.1 * single) < 1e-6) is (mask is not None), (loss, single)
END
"$python" finding.py
