"""Eager code gathers and reduces a block at once: what could go wrong with that. Counts: test_simple_fsdp_cost.py.

    pytest tests/test_eager_blocks.py       # seconds; fake process groups, no GPU
"""

import copy
import functools
import gc
import importlib.util
import weakref

import pytest
import torch
import torch.nn.functional as F
from models_for_wrapper import (
    BF16,
    INFERENCE,
    Block,
    Blocks,
    Comms,
    Made,
    fake_ranks,
    with_one_thread,
)
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import simple_fsdp
from simple_fsdp import MixedPrecisionPolicy, data_parallel, disable_data_parallel

one_thread = pytest.fixture(scope="module", autouse=True)(with_one_thread)
fake = pytest.fixture(fake_ranks)
aten = torch.ops.aten


class Sum(nn.Module):
    """Two parameters with one gradient, which is one element expanded."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(3, 2))

    def forward(self):
        return (self.a + self.b).sum()


def test_gradients_have_memory_of_their_own(fake):
    model = data_parallel(Sum(), fake(1))
    for _ in range(2):
        model().backward()
    assert [p.grad.to_local().tolist() for p in model.parameters()] == [[[2.0] * 2] * 3] * 2
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert norm.full_tensor().item() == pytest.approx(48**0.5)
    assert model.a.grad.to_local()[0, 0].item() == pytest.approx(48**-0.5 * 2, rel=1e-5)


def test_complex_parameters_keep_the_imaginary_part(fake):
    model = data_parallel(Sum(), fake(1), mp_policy=BF16)
    plain = Sum()
    for m in (plain, model):
        with torch.no_grad():
            m.a.data = m.a.data * 1.0
    plain.a = nn.Parameter(torch.full((3, 2), 1 + 2j))
    model = data_parallel(copy.deepcopy(plain), fake(1), mp_policy=BF16)
    for m in (plain, model):
        (m.forward() * (1 + 3j)).abs().backward()
    assert torch.equal(model.a.grad.to_local(), plain.a.grad) and plain.a.grad.imag.abs().min() > 0


def test_second_derivatives_of_some_parameters_of_a_block(fake):
    plain = Blocks(3)
    model, x = data_parallel(copy.deepcopy(plain), fake(1)), torch.randn(2, 4, 8)
    seen = []
    for m in (plain, model):
        weights = [p for name, p in m.named_parameters() if "weight" in name]
        grads = torch.autograd.grad(m(x), weights, create_graph=True)
        grads = torch.autograd.grad(sum(g.square().sum() for g in grads), weights)
        seen.append([getattr(g, "_local_tensor", g) for g in grads])
    for a, b in zip(*seen, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-7)


class Selective(Block):
    """A selective checkpoint around a part of the block."""

    ops = (aten.addmm.default, aten.mm.default)

    def forward(self, x):
        context = functools.partial(create_selective_checkpoint_contexts, list(self.ops))
        return x + checkpoint(self.mlp, x, use_reentrant=False, context_fn=context)


@pytest.mark.parametrize("ops", [Selective.ops, (aten.view.default,), (aten._to_copy.default,)])
@pytest.mark.parametrize("ranks, policy", [(1, MixedPrecisionPolicy()), (1, BF16), (2, BF16)])
def test_a_selective_checkpoint_of_a_part_of_a_block(fake, ranks, policy, ops):
    torch.manual_seed(1)
    plain, grads = nn.Sequential(*[Selective() for _ in range(3)]), []
    for cls in (Selective, Block):
        model = data_parallel(copy.deepcopy(plain), fake(ranks), mp_policy=policy)
        for block in model:
            block.ops = ops
            block.forward = functools.partial(cls.forward, block) if cls is Block else block.forward
        torch.manual_seed(2)
        model(torch.randn(4, 8, dtype=policy.param_dtype)).float().square().sum().backward()
        grads.append([p.grad.to_local() for p in model.parameters()])
    if ranks == 1:  # fake ranks reduce nothing
        assert all(torch.allclose(a, b, rtol=0.05, atol=0.05) for a, b in zip(*grads, strict=True))


@INFERENCE
@pytest.mark.parametrize("ranks", [1, 2])
def test_compiled_without_a_compiler_in_inference_mode(fake, ranks):
    model, x = data_parallel(nn.Linear(4, 4), fake(ranks)), torch.ones(2, 4)
    with torch.inference_mode():
        assert torch.compile(model, backend="eager")(x).shape == (2, 4)


@pytest.mark.parametrize("name", ["simple_fsdp", "a.b", "a_b", "with-hyphen"])
def test_copies_of_the_file_live_side_by_side(fake, name):
    copies = []
    for _ in range(2):
        spec = importlib.util.spec_from_file_location(name, simple_fsdp.__file__)
        copies.append(importlib.util.module_from_spec(spec))
        spec.loader.exec_module(copies[-1])
    code = {}
    exec(open(simple_fsdp.__file__).read(), code)  # as pasted into a notebook
    for wrap in (data_parallel, code["data_parallel"], *(each.data_parallel for each in copies)):
        model = wrap(nn.Linear(4, 4), fake(2))
        for call in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
            call(torch.ones(2, 4)).sum().backward()


def weights_alive(made):
    return sum(n for ref, n in made.made.values() if not ref.expired() and n >= 8 * 17 * 4)


@pytest.mark.parametrize("how", ["input", "input, retained", "frozen, retained", "one bias"])
def test_a_backward_that_ends_before_the_gathers_keeps_no_weight(fake, how):
    model, x = data_parallel(Blocks(4), fake(4)), torch.randn(1, 4, 8, requires_grad=True)
    model.requires_grad_("frozen" not in how)
    with Made() as made:
        loss = model(x)
        if how == "one bias":
            loss.backward(inputs=[x, model.blocks[0].down.bias])
        else:
            torch.autograd.grad(loss, x, retain_graph="retained" in how)
        assert weights_alive(made) == 0


def test_a_model_is_freed_and_so_is_a_module_that_is_taken_out(fake):
    class Model(Blocks):
        def __init__(self):
            super().__init__(4)
            self.head = nn.Linear(8, 2)

        def forward(self, x, t=None):
            return self.head(super().forward(x[..., :1].expand_as(x)) + x)

    model, x = data_parallel(Model(), fake(4)), torch.randn(2, 4, 8)
    model(x).sum().backward()
    gc.collect()
    gc.disable()
    try:
        head, model.head = weakref.ref(model.head), nn.Identity()
        assert head() is None
        with Comms() as comms:
            model(x)
        assert comms.count("all_gather_into_tensor") == 4
        alive = weakref.ref(model)
        del model
        assert alive() is None
    finally:
        gc.enable()


def test_what_holds_most_of_a_model_is_no_block(fake):
    net = nn.ModuleDict({name: nn.Sequential(*[nn.Linear(32, 32) for _ in range(16)]) for name in "ab"})
    data_parallel(net, fake(4))
    with Made() as made, torch.no_grad():
        peak, x = 0, torch.randn(1, 32)
        for layer in net["a"]:
            layer.register_forward_hook(lambda *_: seen.append(made.bytes()))
        seen = []
        net["a"](x)
        peak = max(seen)
    assert peak < 4 * 32 * 33 * 4


def test_another_wrapped_model_inside_a_block_frees_its_own_weights(fake):
    teacher = data_parallel(nn.Sequential(*[nn.Linear(32, 32) for _ in range(16)]), fake(4))
    seen = []

    class Student(Block):
        def forward(self, x):
            with torch.no_grad():
                teacher(torch.randn(1, 32))
            return super().forward(x)

    model = data_parallel(nn.Sequential(*[Student() for _ in range(3)]), fake(4))
    with Made() as made:
        for layer in teacher:
            layer.register_forward_hook(lambda *_: seen.append(made.bytes()))
        model(torch.randn(2, 8))
    assert max(seen) < 5 * 32 * 33 * 4


def test_forward_inside_disable_data_parallel_sends_nothing(fake):
    model = data_parallel(Blocks(3), fake(4))
    with Comms() as comms, disable_data_parallel(), pytest.raises(RuntimeError, match="mixed"):
        model(torch.randn(2, 4, 8))
    assert comms.log == []


class Experts(nn.Module):
    """Two layers of one shape, used in another order on another rank."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.turned = nn.Linear(8, 8), nn.Linear(8, 8), False

    def forward(self, x):
        first, second = (self.b, self.a) if self.turned else (self.a, self.b)
        return F.gelu(first(x)) + F.gelu(second(x * 2))


def test_what_is_gathered_again_has_an_order_that_does_not_depend_on_use(fake):
    asked = []
    for turned in (False, True):
        model = data_parallel(nn.Sequential(*[Experts() for _ in range(3)]), fake(4))
        for expert in model:
            expert.turned = turned
            nn.init.constant_(expert.b.weight, 7.0)
        loss, inputs = model(torch.randn(2, 8)).sum(), []

        class Inputs(Comms):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None, inputs=inputs):
                if "all_gather" in func.name():
                    inputs.append([t.mean().item() == 7.0 for t in args[0].chunk(2)])
                return super().__torch_dispatch__(func, types, args, kwargs)

        with Inputs():
            loss.backward()
        asked.append(inputs)
    assert asked[0] == asked[1] == [[False, True]] * 2  # the first block needs none
