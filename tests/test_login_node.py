"""The tools about simulated GPUs with torch's CUDA build on a machine without a GPU, as a cluster's login node has it.

    pytest tests/test_login_node.py     # two minutes of CPU; skipped with a CPU build, of which test_peak.py is
"""

import re
import shlex

import pytest
import torch
from running import ROOT, module, needs_triton

from lab.sweeps import sweep
from trainer.logging import read_jsonl

HERE = torch.version.cuda is not None and not torch.cuda.is_available()
WHY = "needs a CUDA build of torch and a machine without a GPU"
pytestmark = [needs_triton, pytest.mark.skipif(not HERE, reason=WHY)]

RECORDED = [row for row in read_jsonl(ROOT / "results/peaks.jsonl") if row["flags"]["mlp"] == "lean"][0]


def flags_of(row):
    """The flags of a row's setting without --world, which each command names in its own way."""
    flags = sweep.parse(shlex.split(row["line"]))[1]
    del flags["--world"]
    return shlex.split(sweep.join(flags))


@pytest.mark.parametrize("command", [
    "lab.profiling.peak --arch sm_90 --world 4",
    "plan --exact --gpu h100 --gpus 4",
])  # fmt: skip
def test_the_peak_is_that_of_torch_s_cpu_build(command):
    """To the tenth of a MiB where the row is of the same release, else within 2 %."""
    done = module(*command.split(), *flags_of(RECORDED))
    assert done.code == 0, done.err
    peak = float(re.search(r"^simulated, not measured: .* ([\d'.]+)$", done.out, re.M)[1].replace("'", ""))
    same = torch.__version__.split("+")[0] == RECORDED["torch"].split("+")[0]
    assert peak == pytest.approx(RECORDED["simulated_mib"], rel=1e-6 if same else 0.02)


def test_every_kernel_compiles():
    done = module("lab.profiling.gpu_code", "--arch", "sm_90", "--world", "4", *flags_of(RECORDED))
    assert done.code == 0, done.err
    assert re.search(r"^sm_90, \d\d+ configurations compiled, 0 failed", done.out, re.M), done.out


def test_collectives_are_counted():
    done = module("lab.profiling.collectives", "--device", "cuda", "--world", "4", *flags_of(RECORDED))
    assert done.code == 0, done.err
    assert re.search(r"^per step and rank: \d+ all-gathers, \d+ reduce-scatters", done.out, re.M), done.out
