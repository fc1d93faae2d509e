"""Equal blocks traced once: the numbers of eager mode, and what is not equal, or not only computed, is left alone.

That the graphs are those of blocks traced one by one is in test_regions.py, losses of several ranks in
test_equivalence.py, the caches in test_compile_once.py. Here on one rank, compiled without code generation.
"""

import copy
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from models_for_wrapper import private_names
from torch import nn
from torch._inductor import compile_fx
from torch._inductor import config as inductor_config
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import regions
import trace_once
from simple_fsdp import data_parallel
from trainer.profiling.collectives import inductor_passes, tracing

pytestmark = pytest.mark.skipif(torch.__version__ < (2, 13), reason="regions need torch 2.13")
D = 8  # width


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, 12), nn.Linear(12, D, bias=False)

    def forward(self, x, mask):
        return x + self.down(F.gelu(self.up(self.norm(x)))) * mask


class Masks(Plain):
    """Makes of the common mask, and of nothing, what is the same in each block."""

    def forward(self, x, mask):
        ramp = torch.arange(D) * 0.5
        return super().forward(x, mask.exp() * ramp.sin())


class Checkpointed(Plain):
    def forward(self, x, mask):
        return checkpoint(super().forward, x, mask, use_reentrant=False)


class Drops(Plain):
    def forward(self, x, mask):
        return F.dropout(super().forward(x, mask), 0.5)


class Writes(Plain):
    def forward(self, x, mask):
        return super().forward(x.mul_(2.0), mask)


class WritesCommon(Plain):
    def forward(self, x, mask):
        x = x + mask
        mask.add_(0.5)
        return x + self.down(F.gelu(self.up(x)))


class Hands(Plain):
    """Returns its result and a view of it."""

    def forward(self, x, mask):
        y = super().forward(x, mask)
        self.seen.append(y[:1])
        return y

    seen = []


class Shards(Plain):
    """Reads a parameter as the sharded tensor that it is."""

    def forward(self, x, mask):
        bias = self._parameters["bias"]
        return super().forward(x, mask) * (bias.to_local() if isinstance(bias, DTensor) else bias).mean()

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.ones(D))


class Calls(Plain):
    """Counts in a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, mask):
        self.calls += 1.0
        return super().forward(x, mask) + self.calls * 0.0


class Net(nn.Module):
    def __init__(self, block, depth=4):
        super().__init__()
        torch.manual_seed(0)
        self.emb, self.blocks = nn.Linear(D, D), nn.ModuleList(block() for _ in range(depth))
        for p in self.parameters():
            nn.init.normal_(p, std=0.3)

    def forward(self, x):
        x, mask = self.emb(x), torch.linspace(0, 1, D)
        for block in self.blocks:
            x = block(x, mask)
        return x.square().sum()


@pytest.fixture
def traced(monkeypatch):
    """Names of the blocks that were traced for others, and how many each stands for."""
    found, replace = [], trace_once.Block.replace

    def note(self, like, *args):
        found.append((id(like), self is like))
        return replace(self, like, *args)

    monkeypatch.setattr(trace_once.Block, "replace", note)
    return found


def run(mesh, model, x, train=True, same=True):
    """Compares loss and gradients: eager, of an unwrapped copy; wrapped, of the graphs after Inductor's passes."""
    plain, wrapped = copy.deepcopy(model), data_parallel(model, mesh)

    def passes(gm, inputs, *, is_inference=False, **_):
        inductor_passes(gm, inputs, is_inference)
        assert not gm.graph.find_nodes(op="call_function", target=trace_once.BODY)
        f = lambda args: gm(*args)  # noqa: E731
        f._boxed_call = True
        return f

    with torch.set_grad_enabled(train), tracing(), inductor_config.patch(regions.compile_options(wrapped)):
        backend = partial(compile_fx.compile_fx, inner_compile=passes)
        f = torch.compile(lambda x: wrapped(x), fullgraph=True, backend=backend)
        losses = [plain(x.clone()), f(x.clone())]
        for loss in losses if train else ():
            loss.backward()
    grads = [[p.grad if p.grad is None else getattr(p.grad, "_local_tensor", p.grad) for p in m.parameters()]
             for m in (plain, wrapped)]  # fmt: skip
    if not same:
        return
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-6)
    assert [g is None for g in grads[0]] == [g is None for g in grads[1]]
    for ours, theirs in zip(grads[1], grads[0], strict=True):
        if ours is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * theirs.abs().max().item())


@pytest.mark.parametrize("block", [Plain, Masks, Checkpointed])
def test_equal_blocks_are_traced_once_and_give_the_numbers_of_eager_mode(mesh_of, traced, block):
    with warnings.catch_warnings(action="error", category=UserWarning):
        warnings.filterwarnings("ignore", message="dynamo_pgo|.*jit.script")
        run(mesh_of(1), Net(block), torch.randn(3, D))
    assert len(traced) == 4 and len(set(traced)) == 2  # one for four


def test_blocks_that_differ_are_traced_by_themselves(mesh_of, traced):
    model = Net(Plain, depth=6)
    model.blocks[1].up = nn.Linear(D, 12, bias=False)  # other operations
    model.blocks[2].norm.eps = 1e-3  # another number
    model.blocks[3].down.requires_grad_(False)
    run(mesh_of(1), model, torch.randn(3, D))
    assert len(traced) == 3 and len({like for like, _ in traced}) == 1


def test_what_trains_nothing_is_traced_as_before(mesh_of, traced):
    model = Net(Plain, depth=7)
    for part in (model.emb, *model.blocks[:3]):
        part.requires_grad_(False)
    with pytest.warns(UserWarning, match="traced one by one: each needs no gradient"):
        run(mesh_of(1), model, torch.randn(3, D))
    assert len(traced) == 3  # of the four that train: the first is given what needs no gradient


def test_evaluation_is_traced_as_before(mesh_of, traced):
    run(mesh_of(1), Net(Plain), torch.randn(3, D), train=False)
    assert not traced


@pytest.mark.parametrize(("block", "why"), [
    (Drops, "draws random numbers or holds graphs of its own"),
    (Writes, "changes what it is given"),
    (WritesCommon, "changes a tensor that others read, too"),
    (Hands, "returns tensors that share memory"),
    (Shards, "does more with sharded tensors than to gather them"),
    (Calls, "returns tensors that share memory"),
])  # fmt: skip
def test_what_is_more_than_computed_is_traced_block_by_block_with_a_warning(mesh_of, traced, block, why):
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match=f"regions: equal blocks are traced one by one: each {why}"):
        run(mesh_of(1), Net(block), torch.randn(3, D), same=block is not Drops)
    assert not traced


def test_shared_parameters(mesh_of, traced):
    model = Net(Plain)
    for block in model.blocks[1:]:
        block.up.weight = model.blocks[0].up.weight
    with pytest.warns(UserWarning, match="each shares parameters with other modules"):
        run(mesh_of(1), model, torch.randn(3, D))
    assert not traced


def test_the_private_names_of_torch_stand_at_the_head_of_the_file():
    assert private_names(Path(trace_once.__file__).read_text()) == {
        "_cdata", "_dispatch", "_dynamo_static_input_type", "_functorch", "_guards", "_inductor", "_local_tensor",
        "_ops", "_pytree", "_schema", "_spec", "_version",
    }  # fmt: skip
