"""python -m lab.profiling.gpu_code: every kernel of ours compiles for the GPUs we name; what does not fit is told.

    pytest lab/tests/test_gpu_code.py -m "slow or not slow"     # four minutes on two cores, no GPU; needs Triton
"""

import json
import re
import sys
from pathlib import Path

import pytest
from running import module, needs_triton, one_line

from lab.profiling import gpu_code

SMALL = "--depth 1 --width 512 --seqlen 512 --batch 4 --vocab 4096"
COMMAND = "lab.profiling.gpu_code"
INTERPRETED = Path(__file__).with_name("interpreted.py")
CELLS = {  # flags -> kernels, most bytes of stack; with torch 2.13.0 and triton 3.7.1
    "--arch sm_90 --remat both --attn cudnn": (55, 32),
    "--arch sm_80 --attn flex --remat both": (58, 600),  # its backward spills; all but attention's are as with sdpa
    "--arch sm_90 --attn flex --loss chunked --remat block --mlp lean --mlp-chunk 1024 --ahead 0.05": (40, 248),
}


def rows(out: str) -> list[tuple[str, int, int, int]]:
    """(kernel, registers, stack, shared) of each line of the table."""
    found = re.findall(r"^(triton_\w+) +\d+ +(\d+) +(\d+) +(\d+)", out, re.M)
    return [(name, *map(int, numbers)) for name, *numbers in found]


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("line", CELLS)
def test_every_kernel_compiles_and_fits(line):
    done = module(COMMAND, "--world", "4", *SMALL.split(), *line.split())
    assert done.code == 0 and re.search(r"^sm_[89]0, \d\d+ configurations compiled, 0 failed", done.out, re.M), done
    kernels = rows(done.out)
    assert all(0 < registers <= 255 for _, registers, *_ in kernels), done.out
    n, most = CELLS[line]
    assert len(kernels) == pytest.approx(n, rel=0.1), done.out
    assert max(stack for *_, stack, _ in kernels) <= most, done.out
    assert any("flex" in name or "tem" in name for name, *_ in kernels) == ("flex" in line), done.out


@pytest.fixture
def mine(tmp_path):
    """A folder with a model of one layer, mine:build."""
    (tmp_path / "mine.py").write_text("""
import torch
def build():
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()), (torch.randn(8, 64),)
""")
    return tmp_path


@pytest.mark.slow
@needs_triton
def test_code_of_your_own_model_is_saved_by_graph_and_kernel(mine):
    done = module(COMMAND, "--model", "mine:build", "--world", "2", "--no-kernels", "--save", "out", cwd=mine)
    files = {path.name for path in (mine / "out").iterdir()}
    assert done.code == 0 and {"0_forward.py", "1_backward.py"} < files, done
    assert any(name.startswith("0_forward_triton_") for name in files)


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("line", [
    "--param-dtype fp32 --attn flex --remat both",
    "--param-dtype bf16 --remat both --attn cudnn",
    "--param-dtype bf16 --loss chunked --loss-chunk 16 --remat block --mlp lean --mlp-chunk 16 --ahead 0.05 "
    "--attn cudnn",
])  # fmt: skip
def test_generated_kernels_compute_what_eager_code_does(line):
    """In Triton's interpreter, as exact as an eager step of the same dtypes. Every kernel of these steps runs in it."""
    done = module(f"\nimport runpy\nrunpy.run_path({str(INTERPRETED)!r}, run_name='__main__')", *line.split())
    assert done.code == 0, done.err
    found = json.loads(done.out.splitlines()[-1])
    for gpu, eager in (found["loss"], found["gradients"]):  # how far eager bf16 is from fp32 depends on the CPU
        assert gpu < 1.2 * eager + (2e-6 if "fp32" in line else 2e-5), found
    assert found["update"] < 1e-4 and len(found["kernels"]) > 30 and not found["missing"], found


BROKEN = """
import argparse, sys
from trainer import config
from lab.profiling import gpu_code

real = gpu_code.resources
def resources(kernel):
    return [row | {"shared": 10**6} for row in real(kernel)]
gpu_code.resources = resources
own = argparse.Namespace(arch="sm_90", world=2, model="mine:build", save=None, no_kernels=False)
sys.exit(gpu_code.main(own, config.parse(sys.argv[1:])))
"""


@pytest.mark.slow
@needs_triton
def test_a_kernel_that_exceeds_the_gpu_is_named_and_ends_with_1(mine):
    done = module(BROKEN, cwd=mine)
    assert done.code == 1 and "needs 1000000 bytes of shared memory, sm_90 has 232448" in done.out, done


@needs_triton
def test_what_is_no_setting_of_a_gpu_is_refused_in_one_line():
    done = module(COMMAND, "--attn", "flash", "--param-dtype", "fp32")
    assert done.code == 2 and "--attn flash" in one_line(done.err)


def test_without_triton_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    assert "pip install" in gpu_code.no_triton() and "\n" not in gpu_code.no_triton()
