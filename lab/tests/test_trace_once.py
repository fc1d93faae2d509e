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
from torch import fx, nn
from torch._inductor import compile_fx
from torch._inductor import config as inductor_config
from torch._inductor.virtualized import V
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import overlap
from lab.profiling.collectives import inductor_passes, tracing
from lab.regions import regions, trace_once
from simple_fsdp import data_parallel

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


class Logs(Plain):
    """Gives a second result, which only a log reads."""

    def __init__(self):
        super().__init__()
        self.side = nn.Linear(D, D)

    def forward(self, x, mask):
        return super().forward(x, mask), self.side(x).exp()


class Mixes(nn.Module):
    """Returns a view that is not contiguous."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x, mask):
        return torch.sigmoid(self.down(torch.tanh(self.up(x * mask)))).mT


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


def check_values(copies):
    """Each copy's value has the sizes, and shares memory with its inputs, as what its operation gives."""
    for n in copies:
        with V.fake_mode:
            again = n.target(*fx.map_arg(n.args, lambda m: m.meta["val"]), **n.kwargs)
        ours, theirs = tree_leaves(n.meta["val"]), tree_leaves(again)
        given = [t.untyped_storage() for m in n.all_input_nodes for t in tree_leaves(m.meta["val"])]
        shares = [[at._cdata == t.untyped_storage()._cdata for t in made for at in given] for made in (ours, theirs)]
        assert ([*map(trace_once.told, ours)], shares[0]) == ([*map(trace_once.told, theirs)], shares[1]), n


@pytest.fixture
def traced(monkeypatch):
    """Names of the blocks that were traced for others, and how many each stands for."""
    found, replace, inline = [], trace_once.Block.replace, regions.Inline.__call__

    def note(self, like, *args):
        found.append((id(like), self is like))
        return replace(self, like, *args)

    def checked(self, g):
        before = set(g.nodes)
        inline(self, g)
        check_values(n for n in g.nodes if n not in before)

    monkeypatch.setattr(trace_once.Block, "replace", note)
    monkeypatch.setattr(regions.Inline, "__call__", checked)
    return found


def run(mesh, model, x, train=True, same=True, rough=False):
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
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-2 if rough else 1e-5, atol=1e-6)
    assert [g is None for g in grads[0]] == [g is None for g in grads[1]]
    for ours, theirs in zip(grads[1], grads[0], strict=True):
        if ours is not None:
            atol = (5e-2 if rough else 1e-5) * theirs.abs().max().item()
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=atol)


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


def test_results_that_train_nothing_get_no_gradient(mesh_of, traced):
    """AdamW would decay a weight whose gradient is zero and not None."""

    class Logging(Net):
        def forward(self, x):
            x, mask, log = self.emb(x), torch.linspace(0, 1, D), torch.zeros(())
            for block in self.blocks:
                x, said = block(x, mask)
                log += said.detach().mean()
            return x.square().sum() + log

    run(mesh_of(1), Logging(Logs), torch.randn(3, D))
    assert len(traced) == 4


def test_only_the_block_whose_weight_others_use_is_traced_by_itself(mesh_of, traced):
    class Reads(Net):
        def forward(self, x):
            return super().forward(x) + F.linear(x, self.blocks[2].up.weight).sum()

    run(mesh_of(1), Reads(Plain), torch.randn(3, D))
    assert len(traced) == 3


@pytest.mark.parametrize("how", ["by index", "in place"])
def test_what_is_written_between_blocks_keeps_its_gradient(mesh_of, traced, how):
    class Collects(Net):
        def forward(self, x):
            x, mask, kept = self.emb(x), torch.linspace(0, 1, D), torch.zeros(len(self.blocks), 3, D)
            for i, block in enumerate(self.blocks):
                x = block(x, mask)
                if how == "in place":
                    kept[i].copy_(x)
                else:
                    kept[i] = x
            return kept.square().sum()

    run(mesh_of(1), Collects(Plain), torch.randn(3, D))
    assert len(traced) == 4


def test_adapters_beside_frozen_weights_are_traced_once(mesh_of, traced):
    model = Net(Plain)
    for block in model.blocks:
        block.up.requires_grad_(False)
        block.norm.requires_grad_(False)
    run(mesh_of(1), model, torch.randn(3, D))
    assert len(traced) == 4


def test_a_result_that_is_not_contiguous(mesh_of, traced):
    run(mesh_of(1), Net(Mixes), torch.randn(2, D, D))
    assert len(traced) == 3  # the first is given a contiguous tensor


def test_equal_blocks_at_other_depths_of_the_model(mesh_of, traced):
    class Towers(Net):
        def __init__(self):
            super().__init__(Plain)
            self.tower = Net(Plain)

        def forward(self, x):
            return super().forward(x) + self.tower(x)

    run(mesh_of(1), Towers(), torch.randn(3, D))
    assert len(traced) == 8 and len({like for like, _ in traced}) == 2


@pytest.mark.parametrize("mode", [torch.no_grad, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_what_runs_in_another_mode_is_traced_block_by_block(mesh_of, traced, mode):
    class Sets(Net):
        def forward(self, x):
            x = self.emb(x)
            with mode():
                mask = torch.linspace(0, 1, D)
                for block in self.blocks[:3]:
                    x = block(x, mask)
            for block in self.blocks[3:]:
                x = block(x.float(), mask)
            return x.square().sum()

    with pytest.warns(UserWarning, match="each runs in a mode, or sets one, such as autocast or no_grad"):
        run(mesh_of(1), Sets(Plain, depth=7), torch.randn(3, D), rough=mode is not torch.no_grad)
    assert len(traced) == (3 if mode is torch.no_grad else 4)  # behind the mode; no_grad: the first has no gradient


def test_a_mode_inside_a_block(mesh_of, traced):
    class Casts(Plain):
        def forward(self, x, mask):
            with torch.autocast("cpu", torch.bfloat16):
                y = self.up(x)
            return super().forward(x, mask) + y.float().mean()

    run(mesh_of(1), Net(Casts), torch.randn(3, D), rough=True)
    assert not traced


def test_a_graph_that_does_what_nobody_knows_is_traced_block_by_block(mesh_of, traced):
    class Checks(Net):
        def forward(self, x):
            x = super().forward(x)
            torch._assert_async(x == x)
            return x

    with pytest.warns(UserWarning, match=r"each runs in a graph that does more than to compute \(_assert_async\)"):
        run(mesh_of(1), Checks(Plain), torch.randn(3, D))
    assert not traced


def test_sizes_that_are_not_fixed(mesh_of, traced):
    model = data_parallel(Net(Plain), mesh_of(1))

    def backend(gm, inputs):
        with pytest.warns(UserWarning, match="each has inputs or results other than tensors of fixed sizes"):
            trace_once.TraceOnce(overlap.passes(model)[0])(gm.graph)
        return gm

    torch.compile(lambda x: model(x), fullgraph=True, backend=backend, dynamic=True)(torch.randn(3, D))
    assert not traced


def test_a_name_tells_all_that_it_stands_for(mesh_of):
    names = set()
    for scale in (1.0, 2.0):

        class Scaled(Plain):
            def forward(self, x, mask):
                return super().forward(x, mask) * scale  # noqa: B023

        before = set(trace_once.bodies)
        run(mesh_of(1), Net(Scaled), torch.randn(3, D))
        names |= set(trace_once.bodies) - before
        torch.distributed.destroy_process_group()
    assert len(names) == 2 * 4 * 2  # models, blocks, forward and backward


def test_evaluation_is_traced_as_before(mesh_of, traced):
    run(mesh_of(1), Net(Plain), torch.randn(3, D), train=False)
    assert not traced


@pytest.mark.parametrize(("block", "why"), [
    (Drops, "draws random numbers"),
    (Writes, "changes what it is given"),
    (WritesCommon, "changes what it is given"),
    (Hands, trace_once.SHARED),
    (Shards, "does more with sharded tensors than to gather them"),
    (Calls, trace_once.SHARED),
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
        "_C", "_cdata", "_dynamo_static_input_type", "_enter_autocast", "_exit_autocast", "_functorch", "_guards",
        "_inductor", "_local_tensor", "_log_api_usage_once", "_ops", "_pytree", "_schema", "_set_grad_enabled", "_spec",
        "_subclasses", "_version", "_data_parallel_unit",  # the last: simple_fsdp.py's
    }  # fmt: skip
