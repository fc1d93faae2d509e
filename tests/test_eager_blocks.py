"""Eager code gathers and reduces a block at once: what could go wrong with that. Counts: test_simple_fsdp_cost.py.

    pytest tests/test_eager_blocks.py       # seconds; fake process groups, no GPU
"""

import copy
import functools
import gc
import importlib.util
import threading
import time
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
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
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import simple_fsdp
from simple_fsdp import MixedPrecisionPolicy, data_parallel, disable_data_parallel
from trainer.distributed import simulated_world as sim

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


class Twins(nn.Module):
    """Two modules of no unit with equal gradients: the compiler merges their reductions."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self):
        x = torch.arange(16.0).view(4, 4)
        return (self.a(x) + self.b(x)).sum()


@pytest.mark.long
@pytest.mark.parametrize("how", ["as it is", "frozen while it was wrapped", "copied"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", [Sum, Twins])
def test_compiled_gradients_have_memory_of_their_own(kind, ranks, how, fake):
    model = data_parallel(kind().requires_grad_("frozen" not in how), fake(ranks)).requires_grad_(True)
    model = copy.deepcopy(model) if how == "copied" else model
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    run().backward()
    once = [p.grad.to_local().clone() for p in model.parameters()]
    run().backward()
    for p, first in zip(model.parameters(), once, strict=True):
        assert torch.equal(p.grad.to_local(), 2 * first)


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


@pytest.mark.long
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


def test_what_is_gathered_again_and_its_order_do_not_depend_on_use(fake):
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
                    inputs.append([t.mean().item() == 7.0 for t in args[0].split([16, 2, 16, 2])])
                return super().__torch_dispatch__(func, types, args, kwargs)

        with Inputs():
            loss.backward()
        asked.append(inputs)
    assert asked[0] == asked[1] == [[False, False, True, False]] * 2  # the first block needs none


# ------------------------------------------------------------------------------ collectives beside the computation


class Turns:
    """What happens in turn, in `seen`: a collective begins (G: all-gather, S: reduce-scatter, R: all-reduce) or ends
    ("-" before it), or one of `units` runs, forward or backward, by the last letter of its name. Compiled code is not
    seen."""

    def __init__(self, model, units):
        self.seen, self.on_its_way, self.hooks = [], {}, []
        for name in units:
            hook, unit = lambda *_, name=name: self.seen.append(name[-1]), model.get_submodule(name)
            self.hooks += unit.register_forward_pre_hook(hook), unit.register_full_backward_pre_hook(hook)

    def __getattr__(self, name):
        """Takes the place of torch.ops._c10d_functional in simple_fsdp.py."""
        operation = getattr(torch.ops._c10d_functional, name)

        def run(tensor, *args):
            out, letter = operation(tensor, *args), dict(all_ga="G", reduce="S", all_re="R", wait_t="-")[name[:6]]
            if letter == "-":
                letter += self.on_its_way.pop(tensor.data_ptr())
            else:
                self.on_its_way[out.data_ptr()] = letter
            self.seen.append(letter)
            return out

        return run

    def step(self, model, x):
        with mock.patch.object(simple_fsdp, "_c10d", self):
            model(x).backward()
        for hook in self.hooks:
            hook.remove()
        assert not self.on_its_way
        return " ".join(self.seen)


def turns(model, units=None):
    """Those of a step, in words."""
    units = simple_fsdp.units_of(model) if units is None else units
    return Turns(model, units).step(model, torch.randn(2, 4, 8).requires_grad_())


OVERLAPPED = "0 G -G G 1 -G G 2 -G 2 G -G G S 1 -G G -S S 0 -G -S S -S"


@pytest.mark.parametrize("remat", [False, True])
def test_a_gather_begins_one_unit_early_and_a_reduction_ends_one_unit_late(fake, remat):
    model = data_parallel(Blocks(3, remat=remat), fake(4))
    # Nobody knows yet what forward gathers next; each reduction is waited for where its gather began.
    assert turns(model) == "0 G -G 1 G -G 2 G -G 2 G -G G S -S 1 -G G S -S 0 -G S -S"
    assert turns(model) == turns(model) == OVERLAPPED


def test_a_reentrant_checkpoint_gathers_a_block_again_at_once(fake):
    model = data_parallel(Blocks(3), fake(4))

    def step():
        x = torch.randn(2, 4, 8).requires_grad_()
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        x.sum().backward()

    step()
    with Comms() as comms:
        step()
    kinds = [name for name, *_ in comms.log]
    assert len(kinds) == 9 and sum("gather" in kind for kind in kinds) == 6, kinds


@pytest.mark.parametrize("mode, replicas, expected", [
    ("hybrid_shard", 2, "0 G -G G 1 -G G 2 -G 2 G -G G S -S R 1 -G G -R S -S R 0 -G -R S -S R -R"),
    ("replicate", None, "0 1 2 2 R 1 -R R 0 -R R -R"),
])  # fmt: skip
def test_collectives_of_other_modes_run_beside_the_computation(fake, mode, replicas, expected):
    model = data_parallel(Blocks(3), fake(4, replicas=replicas), mode)
    turns(model)
    assert turns(model) == expected


def test_a_unit_that_keeps_its_weights_gathers_once_and_one_rank_never(fake):
    model = data_parallel(Blocks(3), fake(4), reshard_after_forward=False)
    turns(model)
    assert turns(model) == "0 G -G G 1 -G G 2 -G 2 S 1 -S S 0 -S S -S"
    model = data_parallel(Blocks(3), fake(1))
    assert turns(model) == turns(model) == "0 1 2 2 1 0"


class Headed(Blocks):
    """A norm, which gives no time to hide the head's gather in, before a head as large as a block."""

    def __init__(self):
        super().__init__(2)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 32)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).sum()


def test_what_follows_a_small_module_is_on_its_way_too(fake):
    model = data_parallel(Headed(), fake(4))
    turns(model)
    assert turns(model).split()[:9] == "0 G -G G 1 -G G G -G".split()  # norm and head
    assert turns(model).split()[9:15] == "-G G -G G G S".split()  # head, then norm and block 1; head's gradient


class Course(nn.Module):
    """Four blocks in the order that one asks for."""

    def __init__(self):
        super().__init__()
        self.blocks, self.order = nn.ModuleList([Block() for _ in range(4)]), [0, 1, 2, 3]

    def forward(self, x):
        for i in self.order:
            x = self.blocks[i](x)
        return x.square().mean()


@pytest.mark.parametrize("order, too_many", [([0, 2, 1, 3], 0), ([0, 1, 3], 1), ([0, 2], 1), ([3, 2, 1, 0], 0),
                                             ([0, 0, 1, 1], 0), ([0, 1, 2, 3, 0, 1], 0)])  # fmt: skip
def test_a_forward_that_goes_another_way_than_the_last_gathers_what_it_needs(fake, order, too_many):
    model = data_parallel(Course(), fake(4))
    turns(model)
    model.order = order
    first, then = (turns(model).split().count("G") for _ in range(2))
    assert first - then == too_many and then == turns(model).split().count("G") == len(order) * 2


def test_an_error_in_the_middle_leaves_no_collective_behind(fake):
    model = data_parallel(Blocks(3), fake(4))
    turns(model)
    seen, broken = Turns(model, []), model.blocks[1].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        seen.step(model, torch.randn(2, 4, 8))
    broken.remove()
    gc.collect()
    assert not seen.on_its_way and simple_fsdp._thread.schedule is None
    turns(model)
    assert turns(model) == OVERLAPPED


@pytest.mark.parametrize("how", ["input", "one bias", "retained"])
def test_a_backward_of_a_part_waits_for_all_that_it_began(fake, how):
    model, x = data_parallel(Blocks(4), fake(4)), torch.randn(2, 4, 8).requires_grad_()
    turns(model)
    seen = Turns(model, [])
    with mock.patch.object(simple_fsdp, "_c10d", seen):
        loss, bias = model(x), model.blocks[2].down.bias
        for _ in range(2 if how == "retained" else 1):
            torch.autograd.grad(loss, x if how == "input" else bias, retain_graph=how == "retained")
        del loss
    assert not seen.on_its_way


# ------------------------------------------------------------------------------------------- blocks that are compiled


def compile_blocks(model, backend="aot_eager"):
    for block in model.blocks:
        block.compile(backend=backend, fullgraph=True)
    return model


def test_blocks_compiled_alone_gather_before_their_code_which_they_share(fake):
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    plain = Blocks(3)
    model = compile_blocks(data_parallel(copy.deepcopy(plain), fake(4)), counter)
    with torch._dynamo.config.patch(error_on_recompile=True):
        turns(model, [])
        assert turns(model, []) == " ".join(each for each in OVERLAPPED.split() if not each.isdigit())
    assert counter.frame_count == 1
    weights, gather = [], simple_fsdp._Gather.forward

    def seen(*args):
        wholes = gather(*args)
        weights.extend(StorageWeakRef(t.untyped_storage()) for t in wholes)
        return wholes

    with mock.patch.object(simple_fsdp._Gather, "forward", staticmethod(seen)):
        loss = model(torch.randn(2, 4, 8).requires_grad_())
    assert loss.requires_grad and len(weights) == 18 and all(each.expired() for each in weights)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    one = compile_blocks(data_parallel(copy.deepcopy(plain), fake(1)))
    x = torch.randn(2, 4, 8)
    for m in (plain, one):
        m(x).backward()
    for p, q in zip(one.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad.to_local(), q.grad)


CALLS = dict(
    checkpoint=lambda m, x: functools.reduce(lambda x, b: checkpoint(b, x, use_reentrant=False), m.blocks, x),
    copy=lambda m, x: compile_blocks(copy.deepcopy(m))(x),
    compiled=lambda m, x: torch.compile(m, backend="aot_eager", fullgraph=True)(x),
    no_grad=lambda m, x: torch.no_grad()(m)(x),
    block=lambda m, x: m.blocks[0](x),
)


@pytest.mark.long
@pytest.mark.parametrize("call", CALLS)
def test_a_compiled_block_is_called_in_other_ways(fake, call):
    plain, x = Blocks(2), torch.randn(2, 4, 8).requires_grad_()
    model = compile_blocks(data_parallel(copy.deepcopy(plain), fake(1)))
    expected, given = CALLS[call](copy.deepcopy(plain), x), CALLS[call](model, x)
    assert torch.allclose(given, expected, atol=1e-6)
    if call != "no_grad":
        grads = [torch.autograd.grad(out.sum(), x)[0] for out in (expected, given)]
        assert torch.allclose(*grads, atol=1e-6)

def test_a_compiled_block_whose_code_fails_has_its_shards_again(fake):
    model = data_parallel(Blocks(2), fake(4))
    compile_blocks(model, lambda gm, inputs: lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(torch.randn(2, 4, 8))
    assert all(isinstance(p, DTensor) for p in model.parameters()) and simple_fsdp._thread.memo is None


@pytest.mark.parametrize("when", ["before it is used", "after it was used", "while it is on its way"])
def test_a_shard_that_changes_during_the_forward(fake, when):
    """Backward would gather the new weight: an error. What was on its way for a later module is gathered anew."""

    class Changing(nn.Linear):
        def forward(self, x):
            weight = self.weight
            if when == "before it is used":
                change()
            out = F.linear(x, weight)
            change() if when == "after it was used" else None
            return out

    class Model(nn.Sequential):
        def forward(self, x):
            x = self[0](x)
            if when == "while it is on its way":
                change()
            return self[1](x)

    def change():
        with torch.no_grad():
            shard._local_tensor.mul_(1.5)

    model = data_parallel(Model(Changing(8, 8, bias=False), nn.Linear(8, 8, bias=False)), fake(2))
    shard, x = model[0].weight, torch.randn(2, 8, requires_grad=True)
    if when == "while it is on its way":
        shard = model[1].weight
        model(x)  # now it knows what comes next
        seen = Turns(model, [])
        with mock.patch.object(simple_fsdp, "_c10d", seen):
            model(x).sum().backward()
        assert seen.seen[:6] == ["G", "-G", "G", "-G", "G", "-G"] and not seen.on_its_way
    else:
        with pytest.raises(RuntimeError, match="changed in place between its forward and its backward"):
            model(x).sum().backward()


# ------------------------------------------------------------------ what must not depend on a rank, or on a step before


class Side(nn.Module):
    """A unit whose output the loss does not use."""

    def __init__(self):
        super().__init__()
        self.first, self.side, self.last = Block(), Block(hidden=33), Block()

    def forward(self, x):
        x = self.first(x)
        self.kept = self.side(x.detach()) if self.keeps else self.side(x.detach()).detach()
        return self.last(x).square().mean()


def test_backward_gathers_the_same_whether_or_not_a_rank_keeps_an_output(fake):
    model, seen = data_parallel(Side(), fake(4)), []
    for model.keeps in (True, False):
        with Comms() as comms:
            model(torch.ones(2, 4, 8)).backward()
        seen.append(comms.log)
    assert seen[0] == seen[1]


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.down(self.up(x).tanh())


def test_backward_gathers_the_same_whether_or_not_the_input_needs_a_gradient(fake):
    """As where another rank's batch has no images: a block's first layer saves its weight, or not."""
    model, seen = data_parallel(nn.Sequential(*[Layers() for _ in range(2)]), fake(4)), []
    for needs in (True, False):
        with Comms() as comms:
            model(torch.ones(2, 8, requires_grad=needs)).sum().backward()
        seen.append(comms.log)
    assert seen[0] == seen[1]


def test_a_block_that_was_taken_out_is_begun_no_more_whether_or_not_it_was_collected(fake):
    model = compile_blocks(data_parallel(Blocks(4), fake(4)))  # compiled, a module is in a reference cycle
    turns(model, [])
    gc.disable()
    try:
        alive = weakref.ref(model.blocks[2])
        del model.blocks[2]
        first = turns(model, [])
        assert alive() is not None and first.split().count("G") == 6
    finally:
        gc.enable()


def test_a_backward_that_failed_leaves_no_gradient_to_the_next():
    """On simulated ranks: a fake group of torch 2.11 and 2.12 scatters nothing."""
    sim.start(2, sim.link("none"), "cpu")
    try:
        model, broken = data_parallel(Blocks(3), dist.init_device_mesh("cpu", (2,))), []
        model.blocks[0].register_full_backward_pre_hook(lambda *_: 1 / len(broken) and None)
        broken += [1]
        x, params = torch.randn(2, 4, 8).requires_grad_(), list(model.parameters())
        model(x)
        loss = model(x)
        good = torch.autograd.grad(loss, params, create_graph=True)
        broken.clear()
        with pytest.raises(ZeroDivisionError):
            torch.autograd.grad(loss, params, retain_graph=True)
        broken += [1]
        again = torch.autograd.grad(loss, params, create_graph=True)
        assert all(torch.equal(a.to_local(), b.to_local()) for a, b in zip(good, again, strict=True))
    finally:
        sim.stop()


def test_a_gather_that_failed_in_backward_is_made_again(fake, monkeypatch):
    model = data_parallel(Blocks(3), fake(2))
    loss = model(torch.randn(2, 4, 8))
    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(simple_fsdp, "_unpad", mock.Mock(side_effect=torch.OutOfMemoryError()))
        loss.backward(retain_graph=True)
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())


class Shifted(nn.Module):
    """Its last parameter is read behind the last tensor that is saved: a checkpoint's repetition ends before it."""

    def __init__(self):
        super().__init__()
        self.up, self.shift = nn.Linear(8, 8, bias=False), nn.Parameter(torch.zeros(8))

    def forward(self, x):
        return self.up(x).relu() + self.shift


def test_two_forwards_with_checkpoints_and_one_backward_keep_one_unit_whole(fake):
    model, whole = data_parallel(nn.ModuleList([Shifted() for _ in range(5)]), fake(2)), []

    def run(x):
        for block in model:
            x = checkpoint(block, x, use_reentrant=False)
        return x

    def count(*_):
        whole.append(sum(bool(bucket.wholes) for bucket in {*simple_fsdp._buckets.values()}))

    for block in model:
        block.register_full_backward_hook(count)
    a, b = (torch.randn(2, 8, requires_grad=True) for _ in range(2))
    (run(a) - run(b)).square().mean().backward()
    assert len(whole) == 10 and max(whole) <= 1


def test_reading_in_unsharded_leaves_what_the_next_forward_gathers_early(fake):
    model = data_parallel(Headed(), fake(4))
    turns(model)
    expected = turns(model)
    with simple_fsdp.unsharded(model):
        model.head.weight.square().sum()
    assert turns(model) == expected


def test_tokens_of_autograd_lie_where_the_parameters_do(fake):
    """On another device autograd would run them in another thread, in an order of its own."""
    model = data_parallel(nn.Linear(4, 4).to("meta"), fake(2))
    token = simple_fsdp._Begin.apply(simple_fsdp._Bucket([model.weight], model._gather_policy), model.weight)
    assert token.device.type == "meta" and token.requires_grad


def test_threads_take_turns_in_a_compiled_block(fake):
    model, inside = data_parallel(Blocks(1), fake(1)), []

    def backend(gm, inputs):
        def run(*args):
            inside.append(1)
            time.sleep(0.05)
            together.append(len(inside))
            out = gm(*args)
            inside.pop()
            return out

        return run

    together, x = [], torch.randn(2, 4, 8)
    model.blocks[0].compile(backend=backend)
    call = torch.no_grad()(lambda: model(x))
    call()
    threads = [threading.Thread(target=call) for _ in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert together == [1] * 4 and all(isinstance(p, DTensor) for p in model.parameters())
