"""Rungs of the memory ladder: each is the plain computation within a stated tolerance, and holds what it says.

    pytest tests/test_rungs.py        # about 60 s on one core, no GPU
"""

import pytest
import torch
import torch.distributed as dist
from small_model import B, Ops, T, assert_bitwise, assert_close, batch, build, train

from lab.profiling.collectives import inductor_passes
from lean import lean_mlp, lean_mlp_backward
from simple_fsdp import MixedPrecisionPolicy, data_parallel
from simple_fsdp import _cut_op as cut
from trainer.step import AdamW, make_step

pytestmark = pytest.mark.usefixtures("one_thread")
D, F = 16, 64  # width, hidden width


def operands(tokens=24, dtype=torch.float64):
    torch.manual_seed(0)
    shapes = (2, tokens // 2, D), (2, tokens // 2, D), (D,), (D,), (F, D), (F,), (D, F), (D,)
    return [torch.randn(*shape, dtype=dtype, requires_grad=True) for shape in shapes]


# ------------------------------------------------------------------------------------------------------------ lean MLP


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("remat", ["none", "attn", "both", "block"])
def test_the_lean_mlp_is_the_plain_one_bit_for_bit(remat, dtype):
    data = batch(ignored=True)
    lean = train(build(mlp="lean", remat=remat, dtype=dtype), *data)
    assert_bitwise(lean, train(build(dtype=dtype), *data), remat)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 0.02)])
@pytest.mark.parametrize("chunk", [5, 8, 24, 100])
def test_chunks_of_the_lean_mlp_sum_to_it(chunk, dtype, tolerance):
    data = batch(ignored=True)
    chunks = train(build(mlp="lean", mlp_chunk=chunk, dtype=dtype), *data)
    assert_close(chunks, train(build(dtype=dtype), *data), 0 if chunk >= B * T else tolerance)


def test_gradients_of_bf16_chunks_are_summed_in_fp32():
    """Of 1024 chunks, sums in bf16 are off by a quarter (as is torch's own layer_norm on a CPU, at once)."""
    x, y, *weights = operands(1024, torch.bfloat16)
    y = (x - x).detach()  # so that no sum of the two is rounded
    exact = torch.autograd.grad(lean_mlp(*(t.double() for t in (x, y, *weights)), 1e-5, 0).sum(), weights)
    found = torch.autograd.grad(lean_mlp(x, y, *weights, 1e-5, 1).sum(), weights)
    errors = [((f - e).norm() / e.norm()).item() for f, e in zip(found, exact, strict=True)]
    assert max(errors) < 0.01, errors


@pytest.mark.long
@pytest.mark.parametrize("chunk", [pytest.param(0, marks=pytest.mark.slow), 5])
def test_the_op_is_what_torch_asks_of_one(chunk):
    torch.library.opcheck(lean_mlp, (*operands(), 1e-5, chunk))
    assert torch.autograd.gradcheck(lambda *tensors: lean_mlp(*tensors, 1e-5, chunk), operands())


def most_wide(function, tokens):
    """Largest number of [tokens, F] tensors that `function` has alive at once."""
    most = 0

    class Wide(Ops):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal most
            out = super().__torch_dispatch__(func, types, args, kwargs)
            alive = [n for s, n in self.made.values() if not s.expired()]
            most = max(most, alive.count(tokens * F * 8))
            return out

    with Wide(), torch.no_grad():
        function()
    return most


@pytest.mark.parametrize(("chunk", "tokens"), [(0, 24), (4, 4)])
def test_its_backward_has_two_wide_tensors_at_a_time(chunk, tokens):
    x, y, *weights, b2 = (t.detach() for t in operands())
    body = lean_mlp_backward._init_fn  # a dispatch mode does not see inside a custom op
    assert most_wide(lambda: body(torch.ones_like(x), x, y, *weights, 1e-5, chunk), tokens) == 2
    assert most_wide(lambda: lean_mlp._init_fn(x, y, *weights, b2, 1e-5, chunk), tokens) == 1

    def plain():
        with torch.enable_grad():
            y = torch.nn.functional.linear(x.requires_grad_(), *weights[2:4])
            torch.nn.functional.linear(torch.nn.functional.gelu(y), weights[4].requires_grad_(), b2).sum().backward()

    assert chunk or most_wide(plain, tokens) >= 3


@pytest.mark.long
def test_under_inductors_passes_the_lean_mlp_stays_one_op_and_right(monkeypatch):
    """Compiled over shards, with both branches recomputed: forward and backward once each, gradients as in eager."""
    found = {}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh("cpu", (1,))
        for how in ("none", "fwdbwd"):
            model = build(depth=1, mlp="lean", remat="both")
            data_parallel(model, mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
            monkeypatch.setattr(torch, "compile", graphs_of(found) if how == "fwdbwd" else torch.compile)
            step = make_step(how, model, AdamW(model.parameters(), 1e-3), mesh=mesh)
            step.on_gradients = lambda params, grads, how=how: found.update({how: [g.clone() for g in grads]})
            tokens, targets = batch()
            found[how, "loss"] = step(tokens, targets)
    finally:
        torch._dynamo.reset()
        dist.destroy_process_group()
    torch.testing.assert_close(found["fwdbwd"], found["none"], rtol=0.1, atol=2e-3)  # bf16
    torch.testing.assert_close(found["fwdbwd", "loss"], found["none", "loss"], rtol=1e-3, atol=0)
    ops = {kind: [n.split(".", 1)[1] for n in found[kind] if "lean_mlp" in n] for kind in (False, True)}
    assert ops == {False: ["lean_mlp.default"], True: ["lean_mlp_backward.default"]}


def graphs_of(found):
    """torch.compile that runs graphs after Inductor's passes, without its code, and notes their ops in `found`."""
    from torch._inductor.compile_fx import compile_fx

    real = torch.compile

    def inner(gm, inputs, *, is_backward=False, is_inference=False, **_):
        inductor_passes(gm, inputs, is_inference)
        found[is_backward] = [str(n.target) for n in gm.graph.nodes if n.op == "call_function"]
        run = lambda args: gm(*list(args))  # noqa: E731
        run._boxed_call = True
        return run

    return lambda f, options=None, **how: real(f, backend=lambda *a: compile_fx(*a, inner_compile=inner), **how)


def test_moments_in_bf16_train_as_in_fp32():
    def losses(dtype):
        model = build()
        step = make_step("none", model, AdamW(model.parameters(), 3e-3, moment_dtype=dtype))
        values = [step(*batch()).item() for _ in range(30)]
        assert all(t.dtype == (dtype or torch.float32) for t in (*step.optimizer.m, *step.optimizer.v))
        return values

    full = losses(None)
    half = losses(torch.bfloat16)
    assert full[-1] < full[0] - 1
    assert max(abs(a - b) for a, b in zip(full, half, strict=True)) < 0.02


# ------------------------------------------------------------------------------------------- what cuts gathered buckets


def test_cut_copies_the_columns_of_a_bucket():
    bucket = torch.arange(24.0).view(3, 8)
    parts = cut(bucket, [1, 5, 2])
    assert [p.tolist() for p in parts] == [c.tolist() for c in bucket.split([1, 5, 2], 1)]
    assert all(p.is_contiguous() and p.untyped_storage()._cdata != bucket.untyped_storage()._cdata for p in parts)
    torch.library.opcheck(cut, (bucket, [1, 5, 2]), test_utils=("test_schema", "test_faketensor"))


