"""Attention kernels: the one that is named runs, in eager and compiled, or a line says why not.

    pytest tests/test_attention.py        # under a minute, no GPU: kernels of a GPU run in tests/test_gpu.py
"""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from small_model import Ops
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

import main
import model as model_file
from model import REMAT, ModelConfig, Transformer, sdpa_kernel
from trainer import attention_kernel as kernels
from trainer import config
from trainer.attention_kernel import Shape

SHAPE = Shape(2, 4, 2, 16, 8, "fp32")
SMALL = dict(depth=2, width=32, head_dim=8, grouping=2, vocab=64)
CPU = torch.device("cpu")
CUDA = torch.device("cuda")
FLASH = "_scaled_dot_product_flash_attention_for_cpu"
BACKWARD = "_scaled_dot_product_flash_attention_for_cpu_backward"


pytestmark = pytest.mark.usefixtures("isolated")


def step(compile=False, **changes):
    """(flash ops in forward, in backward, loss, gradients) of a small model; a compiled one is compiled before."""
    torch.manual_seed(0)
    model = Transformer(ModelConfig(**SMALL, **changes))
    model.init_weights()
    f = torch.compile(model, fullgraph=True, backend="aot_eager") if compile else model  # the graphs; Inductor: below
    tokens = torch.arange(32).reshape(2, 16)
    if compile:
        f(tokens, tokens).backward()
        model.zero_grad()
    with Ops() as ops:
        loss = f(tokens, tokens)
        forward = ops.count[FLASH]
        loss.backward()
    return forward, ops.count[FLASH] - forward, ops.count[BACKWARD], loss.detach(), [p.grad for p in model.parameters()]


def assert_close(a, b):
    for x, y in zip([a[-2], *a[-1]], [b[-2], *b[-1]], strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------------------------- the kernel that runs


@pytest.mark.long
@pytest.mark.parametrize("block", ["gelu", "llama"])
@pytest.mark.parametrize("remat", REMAT)
def test_in_eager_the_named_kernel_runs_in_every_region_and_all_agree(remat, block):
    default, flash, math = (step(remat=remat, sdpa=kernel, block=block) for kernel in ("default", "flash", "math"))
    assert default[:3] == flash[:3] == (2, 0, 2)  # once per block, also where a region is recomputed
    assert math[:3] == (0, 0, 0)
    assert torch.equal(flash[-2], default[-2])
    assert_close(math, default)


@pytest.mark.long
def test_compiled_the_named_kernel_runs_in_regions_and_another_model_keeps_its_own():
    math, default, flash = (step(compile=True, remat="both", sdpa=kernel) for kernel in ("math", "default", "flash"))
    assert math[:3] == (0, 0, 0)
    assert default[:3] == flash[:3] == (2, 0, 2)
    assert_close(math, flash)
    assert_close(default, flash)


@pytest.mark.slow
def test_one_compile_cache_keeps_the_kernels_apart_and_finds_each_again():
    """With torch's own context manager in place of the ops the last line fails: AOTAutograd does not cache it."""
    q = torch.randn(1, 2, 16, 8, requires_grad=True)
    hits = []
    ran = []
    with fresh_cache():
        for kernel in ("default", "flash", "math") * 2:
            torch._dynamo.reset()
            counters.clear()
            f = torch.compile(lambda q, kernel=kernel: sdpa_kernel(kernel, q, q, q).sum(), fullgraph=True)
            with torch.no_grad():
                q.copy_(torch.randn(q.shape))
            f(q).backward()
            hits.append(bool(counters["aot_autograd"]["autograd_cache_hit"]))
            with Ops() as ops:
                f(q)
            ran.append(ops.count[FLASH])
    assert ran == [1, 1, 0] * 2
    assert hits[3:] == [True] * 3
    assert not hits[2]


@pytest.mark.parametrize(("kernel", "op"), [("cudnn", "_scaled_dot_product_cudnn_attention"),
                                            ("flash", "_scaled_dot_product_flash_attention"),
                                            ("efficient", "_scaled_dot_product_efficient_attention")])  # fmt: skip
def test_the_ops_of_a_gpu_take_these_arguments(kernel, op):
    """On the meta device: this torch's schemas and the shapes that its kernels promise."""
    q = torch.empty(2, 16, 4, 8, device="meta", dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
    k = torch.empty(2, 16, 2, 8, device="meta", dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
    with Ops() as ops:
        y = sdpa_kernel(kernel, q, k, k)
        gradients = torch.autograd.grad(y, (q, k), torch.empty_like(y))
    assert y.shape == q.shape
    assert [g.shape for g in gradients] == [q.shape, k.shape]
    assert ops.count[op] == ops.count[f"{op}_backward"] == 1
    assert getattr(torch.ops.aten, op).default in model_file.ATTENTION  # what recomputation keeps


def test_an_unknown_kernel_is_refused():
    with pytest.raises(ValueError, match="'fast'.*cudnn"):
        sdpa_kernel("fast", *(torch.zeros(1, 1, 2, 8),) * 3)


# ------------------------------------------------------------------------------------------------------ what is chosen


def test_auto_on_a_cpu_adds_nothing_and_says_what_torch_takes():
    assert kernels.sdpa("auto", SHAPE, CPU) == ("default", "sdpa flash (auto)")
    assert kernels.sdpa("math", SHAPE, CPU) == ("math", "sdpa math")


@pytest.mark.parametrize(("capability", "refused", "chosen"), [
    ((9, 0), "", "cudnn"), ((10, 3), "", "cudnn"), ((8, 0), "", "flash"), ((9, 0), "cudnn", "flash"),
    ((9, 0), "cudnn flash", "efficient"), ((8, 9), "flash efficient", "math"),
])  # fmt: skip
def test_auto_on_a_gpu_takes_the_first_that_runs_and_says_why_not_the_others(monkeypatch, capability, refused, chosen):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(kernels, "refusal", lambda kernel, *_: f"no {kernel}" if kernel in refused.split() else None)
    kernel, text = kernels.sdpa("auto", SHAPE, CUDA)
    assert kernel == chosen
    assert text.startswith(f"sdpa {chosen} (auto")
    assert all(f"not {name}: no {name}" in text for name in refused.split())


def torch_takes(monkeypatch, refused=()):
    """A torch on a Hopper that takes any kernel it is restricted to, apart from those in `refused`."""

    def choice(*_, **__):
        asked = torch.nn.attention._cur_sdpa_kernel_backends()[0]
        return 0 if asked in [kernels.BACKENDS[name] for name in refused] else int(asked)

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(kernels, "CHOICE", choice)
    monkeypatch.setattr(Shape, "empty", lambda *_: (torch.empty(1, 2, 1, 1),) * 2)


def test_auto_falls_to_efficient_where_torch_refuses_the_half_precision_kernels(monkeypatch):
    torch_takes(monkeypatch, refused=("cudnn", "flash"))
    assert kernels.sdpa("auto", SHAPE._replace(seqlen=128), CUDA)[0] == "efficient"
    torch_takes(monkeypatch)
    assert kernels.sdpa("auto", SHAPE._replace(seqlen=128, dtype="bf16"), CUDA)[0] == "cudnn"


@pytest.mark.parametrize(("version", "seqlen", "kernel"), [(91002, 100, "flash"), (91002, 256, "cudnn"),
                                                           (91501, 100, "cudnn")])  # fmt: skip
def test_an_old_cudnn_gets_no_length_that_it_gets_wrong(monkeypatch, version, seqlen, kernel):
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    torch_takes(monkeypatch)
    shape = SHAPE._replace(seqlen=seqlen, dtype="bf16")
    assert kernels.sdpa("auto", shape, CUDA)[0] == kernel
    if kernel == "flash":
        with pytest.raises(ValueError, match="^--attn cudnn: .*91002.*100"):
            kernels.sdpa("cudnn", shape, CUDA)


def test_the_reason_is_torchs_own(monkeypatch):
    monkeypatch.setitem(kernels.DTYPES, "fp8", torch.float8_e4m3fn)
    with pytest.raises(ValueError) as error:
        kernels.sdpa("flash", SHAPE._replace(dtype="fp8"), CPU)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith("--attn flash: cannot run on fp8 q [2, 4, 16, 8], 2 kv heads: Expected query, ")


def test_asking_changes_nothing_in_the_process():
    before = torch.nn.attention._cur_sdpa_kernel_backends(with_priority=True)
    for kernel in kernels.BACKENDS:
        kernels.refusal(kernel, SHAPE, CPU)
    assert torch.nn.attention._cur_sdpa_kernel_backends(with_priority=True) == before


def test_flex_has_no_kernel_to_choose():
    c = config.resolve(config.parse([]), "cpu", 1)
    assert kernels.choose_kernel(replace(c, system=replace(c.system, attn="flex")), CPU) == ("default", "flex")


def test_a_kernel_that_cannot_run_ends_main_before_training(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(kernels, "refusal", lambda *_: "it is Saturday")
    c = config.parse(["--device", "cpu", "--attn", "flash", "--results", str(tmp_path / "rows.jsonl")])
    code = main.main(c, 0, 0, 1)
    dist.destroy_process_group()
    out, err = capsys.readouterr()
    assert code == 2 and out == "" and (tmp_path / "rows.jsonl").read_text() == ""
    assert err.startswith("error: --attn flash: cannot run on fp32 q [8, 4, 192, 32], 1 kv heads: it is Saturday")
    assert err.count("\n") == 1
