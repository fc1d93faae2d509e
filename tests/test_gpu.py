"""What only a GPU can show: `./launch.sh gpu`. One process, NCCL, fp32 unless said; skipped without CUDA."""

import pytest
import torch
import torch.distributed as dist
from running import GPU

from lab.studies import attention
from model import REMAT, ModelConfig, Transformer, sdpa_kernel
from simple_fsdp import MixedPrecisionPolicy, data_parallel, disable_data_parallel
from trainer import attention_kernel as kernels
from trainer.fault_tolerance.watchdog import _collectives
from trainer.step import COMPILE_MODES, AdamW, CudaGraphStep, check_mode, make_step
from trainer.step_costs import device_peak

pytestmark = GPU
SHAPE = dict(depth=2, width=256, head_dim=64, grouping=2, vocab=512)


@pytest.fixture(scope="module")
def mesh():
    device = torch.device("cuda", 0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    yield dist.init_device_mesh("cuda", (1,))
    torch._dynamo.reset()
    dist.destroy_process_group()


def step_of(mesh, compile="none", dtype=None, chunk=0, **config):
    """A step of a small wrapped model."""
    torch._dynamo.reset()
    with torch.device("meta"):
        model = Transformer(ModelConfig(**SHAPE, **config))
    data_parallel(model, mesh, mp_policy=MixedPrecisionPolicy(dtype, torch.float32)).to_empty(device="cuda")
    torch.manual_seed(0)
    with disable_data_parallel():
        model.init_weights()
    model.prepare(256, "cuda")
    return make_step(compile, model, AdamW(model.parameters(), 1e-3), mesh=mesh, chunk=chunk, clip=1.0)


def losses(mesh, *args, steps=8, graph=False, **settings):
    step = step_of(mesh, *args, **settings)
    batch = torch.randint(512, (4, 257), device="cuda")  # the same for ever: the loss must fall
    step = CudaGraphStep(step) if graph else step
    values = torch.stack([step(batch[:, :-1], batch[:, 1:]).clone() for _ in range(steps)]).tolist()
    if graph:
        assert step.graph is not None
        assert step.peak_mib > 0
        step.close()
    return values


@pytest.fixture(scope="module")
def eager(mesh):
    return losses(mesh)


def close(a, b, tolerance):
    assert max(abs(x - y) for x, y in zip(a, b, strict=True)) < tolerance, (a, b)
    assert a[-1] < a[0] - 0.5


@pytest.mark.parametrize("mode", COMPILE_MODES[1:])
def test_compile_modes_agree_with_eager_in_fp32(mesh, eager, mode):
    try:
        check_mode(mode)
    except ValueError as e:
        pytest.skip(str(e))
    close(losses(mesh, mode), eager, 1e-4)


@pytest.mark.parametrize("compile", ["none", "blocks", "fwdbwd"])
def test_flex_attention_agrees_with_sdpa(mesh, eager, compile):
    close(losses(mesh, compile, attn="flex"), eager, 1e-3)


SDPA = kernels.Shape(2, 8, 2, 256, 64, "bf16")


def needs(kernel, shape=SDPA):
    if reason := kernels.refusal(kernel, shape, torch.device("cuda", 0)):
        pytest.skip(f"{kernel}: {reason}")


def attended(kernel, shape=SDPA, compile=False):
    """Output and gradients of seeded inputs, and the names of the GPU kernels that made them."""
    torch._dynamo.reset()
    *qkv, gradient = attention.inputs(shape, torch.device("cuda", 0))
    f = torch.compile(sdpa_kernel, fullgraph=True) if compile else sdpa_kernel
    torch.autograd.grad(f(kernel, *qkv), qkv, gradient)  # compiles
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        y = f(kernel, *qkv)
        found = [y.detach(), *torch.autograd.grad(y, qkv, gradient)]
        torch.cuda.synchronize()
    return found, " ".join(event.key for event in profile.key_averages()).lower()


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize(("kernel", "dtype"), [("cudnn", "bf16"), ("flash", "bf16"), ("efficient", "bf16"),
                                               ("efficient", "fp32")])  # fmt: skip
def test_every_kernel_of_sdpa_is_the_one_that_runs_and_agrees_with_math(mesh, kernel, dtype, compile):
    needs(kernel, SDPA._replace(dtype=dtype))
    *qkv, gradient = attention.inputs(SDPA._replace(dtype=dtype), torch.device("cuda", 0))
    y = sdpa_kernel("math", *(t.double() for t in qkv))
    exact = [y, *torch.autograd.grad(y, qkv, gradient.double())]
    found, names = attended(kernel, SDPA._replace(dtype=dtype), compile)
    math, others = attended("math", SDPA._replace(dtype=dtype), compile)
    for name, which in ((kernel, found), ("math", math)):
        for a, b in zip(which, exact, strict=True):
            assert (a - b).norm() < 0.02 * b.norm(), (name, a.shape, a.stride())
    own = dict(cudnn="cudnn", flash="flash", efficient="fmha")[kernel]
    assert own in names and not any(word in others for word in ("cudnn_gen", "flash", "fmha")), (names, others)


@pytest.mark.parametrize("compile", ["none", "blocks", "fwdbwd"])
@pytest.mark.parametrize("kernel", ["cudnn", "flash", "efficient", "math"])
def test_every_kernel_of_sdpa_trains_also_where_regions_are_recomputed(mesh, eager, kernel, compile):
    needs(kernel)
    close(losses(mesh, compile, dtype=torch.bfloat16, sdpa=kernel, remat="both"), eager, 0.05)


def test_auto_is_cudnn_on_hopper_flash_before_it_and_efficient_in_fp32(mesh):
    device = torch.device("cuda", 0)
    hopper = torch.cuda.get_device_capability() >= (9, 0)
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("flash and bf16 need compute capability 8.0")
    kernel, text = kernels.sdpa("auto", SDPA, device)
    assert kernel == ("cudnn" if hopper else "flash"), text
    assert kernel in attended(kernel)[1]
    assert kernels.sdpa("auto", SDPA._replace(dtype="fp32"), device)[0] == "efficient"
    with pytest.raises(ValueError, match="^--attn flash: cannot run on fp32 .*dtype"):
        kernels.sdpa("flash", SDPA._replace(dtype="fp32"), device)


@pytest.mark.parametrize("backend", attention.FLEX)
def test_flex_attention_of_the_study_agrees_with_math(backend):
    *qkv, gradient = attention.inputs(SDPA, torch.device("cuda", 0))
    y = attention.function(backend, SDPA, torch.device("cuda", 0))(*qkv)
    found = [y, *torch.autograd.grad(y, qkv, gradient)]
    y = sdpa_kernel("math", *(t.double() for t in qkv))
    for a, b in zip(found, [y, *torch.autograd.grad(y, qkv, gradient.double())], strict=True):
        assert (a - b).norm() < 0.02 * b.norm()


@pytest.mark.parametrize("compile", ["none", "fwdbwd"])
@pytest.mark.parametrize("attn", ["sdpa", "flex"])
@pytest.mark.parametrize("remat", REMAT[1:])
def test_remat_agrees_with_none(mesh, eager, remat, attn, compile):
    close(losses(mesh, compile, attn=attn, remat=remat), eager, 1e-3)


@pytest.mark.parametrize("compile", ["none", "fwdbwd"])
def test_chunked_loss_agrees_with_full(mesh, eager, compile):
    close(losses(mesh, compile, chunk=100), eager, 1e-4)


@pytest.mark.parametrize("compile", ["none", "fwdbwd"])
def test_bf16_parameters_train(mesh, eager, compile):
    close(losses(mesh, compile, dtype=torch.bfloat16), eager, 0.05)


@pytest.mark.parametrize("compile", ["none", "blocks", "fwdbwd", "step"])
def test_a_replayed_step_trains_as_the_step_itself(mesh, compile):
    try:
        check_mode(compile)
    except ValueError as e:
        pytest.skip(str(e))
    close(losses(mesh, compile, graph=True), losses(mesh, compile), 1e-5)


@pytest.mark.parametrize("compile", ["none", "fwdbwd"])
@pytest.mark.parametrize("config", [
    dict(mlp="lean", remat="both"), dict(mlp="lean", mlp_chunk=300), dict(remat="block", remat_core=True),
    dict(remat="both", remat_core=True, remat_norm=False), dict(remat="block", remat_core=True, attn="flex"),
], ids=lambda c: " ".join(map(str, c.values())))  # fmt: skip
def test_rungs_of_memory_agree_with_none(mesh, eager, config, compile):
    close(losses(mesh, compile, **config), eager, 1e-3)


def test_a_step_never_waits_for_the_device(mesh):
    step = step_of(mesh)
    batch = torch.randint(512, (2, 65), device="cuda")
    step(batch[:, :-1], batch[:, 1:])
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(batch[:, :-1], batch[:, 1:])
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_flight_recorder_has_the_collectives_of_nccl(mesh):
    dist.all_reduce(torch.ones(1, device="cuda"))
    _, begun, newest = _collectives()
    assert begun > 0
    assert newest == "nccl:all_reduce"


def test_the_peak_of_this_device_is_known_or_it_is_said(mesh):
    name = torch.cuda.get_device_name()
    assert device_peak(name) or not any(card in name for card in ("A100-SXM", "H100 80GB HBM3", "H200"))
