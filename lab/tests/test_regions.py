"""Equal blocks as one subgraph: the same collectives in the same order, the same bytes kept, the same numbers.

Graphs are those of tests/test_overlap.py, or a few operations long; losses against eager are in test_equivalence.py.
"""

import operator
from collections import Counter
from pathlib import Path

import pytest
import torch
from models_for_wrapper import private_names
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

import overlap
from lab.profiling.collectives import capture, collectives, gathered_alive, inlined, report, saved
from lab.regions import regions
from model import ModelConfig, Transformer
from simple_fsdp import MixedPrecisionPolicy, data_parallel

aten, WAIT = torch.ops.aten, overlap.WAIT
needs_213 = pytest.mark.skipif(torch.__version__ < (2, 13), reason="regions need torch 2.13")


def graphs_of(source, mesh, mode="fully_shard", reshard=True, min_bytes=0, ahead=1.0, tied=False, frozen=False,
              **config):  # fmt: skip
    """The graphs of forward with loss, and of backward; and the pass that made them."""
    config = dict(depth=3, width=64, head_dim=16, grouping=2, vocab=256) | config
    with torch.device("meta"):
        model = Transformer(ModelConfig(**config))
    if tied:
        model.head.weight = model.emb.weight
    if frozen:
        model.blocks[0].requires_grad_(False)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    data_parallel(model, mesh, mode, policy, reshard_after_forward=reshard, min_bytes=min_bytes).to_empty(device="cpu")
    tokens, options = torch.zeros(2, 16, dtype=torch.long), source.compile_options(model, ahead=ahead)
    graphs = capture(lambda x, y: model(x, y), (tokens, tokens), options)
    return model, graphs, options.get("post_grad_custom_post_pass")


def told(graphs) -> list:
    found = [[c._replace(bucket=()) for c in collectives(gm)] + [gathered_alive(gm)] for gm in graphs.values()]
    kept = saved(graphs["forward"])
    kept["other"] += kept.pop("products")  # of a product and a sum of one size the partitioner may keep either
    return [*found, kept]


CASES = [  # slow, all of them: a dozen seconds each
    dict(remat="both", remat_ratio=0.5, depth=4), {}, dict(remat="pointwise"), dict(remat="block", mlp="lean"),
    dict(reshard=False), dict(min_bytes=600), dict(tied=True),
    dict(frozen=True, depth=4), dict(mode="replicate"), dict(mode="hybrid_shard"), dict(world=6),
    dict(ahead=2, depth=4),
]  # fmt: skip


@needs_213
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(map(str, case.values())) or "plain")
def test_collectives_their_order_and_all_that_is_kept_are_those_without_regions(mesh_of, case):
    case = dict(case)
    mesh = mesh_of(case.pop("world", 8), 2 if case.get("mode") == "hybrid_shard" else 1)
    _, plain, _ = graphs_of(overlap, mesh, **case)
    model, shared, moves = graphs_of(regions, mesh, **case)
    assert told(shared) == told(plain)
    blocks = case.get("depth", 3) - 2  # at least, of equal ones in the middle
    assert len(moves.found) >= 2 and sum(moves.found.values()) >= 2 * blocks
    assert sum((gm.meta.get("calls", Counter()) for gm in shared.values()), Counter()) == moves.found
    if case.get("depth") == 4 and "remat" in case:  # said in the tool's report
        assert "  compiled once, and called: " in "\n".join(report(model, {"loss": shared}))


@needs_213
@pytest.mark.slow
def test_on_one_rank_stretches_begin_with_blocks(mesh_of):
    _, shared, moves = graphs_of(regions, mesh_of(1), depth=4)
    assert min(shared["forward"].meta["calls"].total(), shared["backward"].meta["calls"].total()) >= 2


@needs_213
@pytest.mark.slow
def test_no_subgraph_of_backward_writes_over_what_it_is_given(monkeypatch, mesh_of):
    from torch._inductor import graph, ir

    lowered, place = [], graph.SubgraphLowering.placeholder

    def placeholder(self, *args, **kwargs):
        made = value = place(self, *args, **kwargs)
        while (value := getattr(value, "data", None)) is not None and not isinstance(value, ir.InputBuffer):
            pass
        lowered.append((self.is_backward, isinstance(value, ir.DonatedBuffer)))
        return made

    monkeypatch.setattr(graph.SubgraphLowering, "placeholder", placeholder)

    class Gated(nn.Module):  # one weight and more that is kept: the numbers of the latter are those of a subgraph, too
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x, gate):
            return self.linear(x * gate).tanh() * gate

    model = data_parallel(nn.ModuleList(Gated() for _ in range(3)), mesh_of(1))

    def loss(x):
        gate = x.sigmoid()
        for block in model:
            x = block(x, gate)
        return x.square().sum()

    x = torch.randn(4, 8, requires_grad=True)
    with torch._inductor.config.patch(force_disable_caches=True):
        torch.compile(loss, fullgraph=True, options=regions.compile_options(model))(x).backward()
    compiled, x.grad = x.grad, None
    loss(x).backward()
    assert torch.allclose(compiled, x.grad, atol=1e-6)
    assert {backward for backward, _ in lowered} == {False, True} and not any(donated for _, donated in lowered)


class Nothing:
    """In the place of overlap.Overlap: moves nothing, knows of no block."""

    warned = False

    def __call__(self, g):
        pass

    def uuid(self):
        return ""

    def block_of(self, node):
        return None


def built(lines, inputs, outputs) -> tuple[fx.GraphModule, list]:
    """A graph of lines (name, target, *args), in which a string names a line or an input, cut by waits; real inputs."""
    g, env = fx.Graph(), {}
    for name in inputs:
        env[name] = g.placeholder(name)
    for name, target, *args in lines:
        env[name] = g.call_function(target, tuple(env.get(a, a) if isinstance(a, str) else a for a in args))
    g.output(tuple(env[name] for name in outputs))
    gm, real = fx.GraphModule(nn.Module(), g), [torch.randn(4, 4) for _ in inputs]
    mode = FakeTensorMode()
    FakeTensorProp(gm, mode).propagate(*real)
    return gm, real


def block(i, x, scale=2.0, keep=()):
    """Lines of a block that reads `x` and weights w<i>; its output is y<i>."""
    w = f"w{i}"
    return [(f"t{i}", aten.permute.default, w, [1, 0]), (f"m{i}", aten.mm.default, x, f"t{i}"),
            (f"v{i}", aten.reshape.default, f"m{i}", [2, 8]), (f"s{i}", aten.mul.Tensor, f"m{i}", scale),
            (f"y{i}", aten.add.Tensor, f"s{i}", x), (f"gone{i}", WAIT, f"y{i}")]  # fmt: skip


def through(gm, real):
    with_regions = regions.Regions(Nothing())
    before = gm(*real)
    with_regions(gm.graph)
    gm.recompile()
    return with_regions, before, gm(*real)


def test_what_computes_the_same_becomes_one_subgraph_and_gives_the_same_numbers(mesh_of):
    mesh_of(2)
    lines = [*block(0, "x"), *block(1, "y0"), *block(2, "y1", scale=3.0), *block(3, "y2")]
    outputs = ["y3", "v0", "m0", "t1", "v1", "m1", "t0", "v3", "m3", "t3"]  # views of results and of inputs
    moves, before, after = through(*built(lines, ["x", "w0", "w1", "w2", "w3"], outputs))
    assert moves.found == {"region_0": 3}  # the third multiplies by another number
    torch.testing.assert_close(after, before, rtol=0, atol=0)


@pytest.mark.parametrize(("what", "second"), [
    ("a number", [("m1", aten.mul.Tensor, "x", 3.0), ("y1", aten.add.Tensor, "m1", "w1")]),
    ("an integer", [("m1", aten.mul.Tensor, "x", 2), ("y1", aten.add.Tensor, "m1", "w1")]),
    ("an operation", [("m1", aten.mul.Tensor, "x", 2.0), ("y1", aten.sub.Tensor, "m1", "w1")]),
    ("the order", [("m1", aten.mul.Tensor, "x", 2.0), ("y1", aten.add.Tensor, "w1", "m1")]),
    ("what is read twice", [("m1", aten.mul.Tensor, "x", 2.0), ("y1", aten.add.Tensor, "m1", "x")]),
    ("writing", [("m1", aten.mul.Tensor, "x", 2.0), ("y1", aten.add_.Tensor, "m1", "w1")]),
])  # fmt: skip
def test_what_differs_in_anything_is_not_shared(mesh_of, what, second):
    mesh_of(2)
    first = [("m0", aten.mul.Tensor, "x", 2.0), ("y0", aten.add.Tensor, "m0", "w0"), ("gone0", WAIT, "y0")]
    moves, before, after = through(*built([*first, *second], ["x", "w0", "w1"], ["y0", "y1"]))
    assert not moves.found
    torch.testing.assert_close(after, before, rtol=0, atol=0)


@pytest.mark.parametrize("what", ["strides", "dtype"])
def test_other_strides_or_dtypes_are_not_shared(mesh_of, what):
    mesh_of(2)
    other = (aten.permute.default, "z", [1, 0]) if what == "strides" else (aten._to_copy.default, "z")
    lines = [("a", *other), ("gone", WAIT, "a"),
             ("m0", aten.mul.Tensor, "x", 2.0), ("y0", aten.neg.default, "m0"), ("gone0", WAIT, "y0"),
             ("m1", aten.mul.Tensor, "a", 2.0), ("y1", aten.neg.default, "m1")]  # fmt: skip
    gm, real = built(lines, ["x", "z"], ["y0", "y1"])
    if what == "dtype":
        node = next(n for n in gm.graph.nodes if n.target is aten._to_copy.default)
        node.kwargs = dict(dtype=torch.float64)
        FakeTensorProp(gm, FakeTensorMode()).propagate(*real)
        gm.recompile()
    moves, before, after = through(gm, real)
    assert not moves.found
    torch.testing.assert_close(after, before, rtol=0, atol=0)


def test_views_that_others_alone_read_do_not_tell_blocks_apart(mesh_of):
    """Such as, in backward, the gradients of the block before, of which the first block has none."""
    mesh_of(2)
    lines = []
    for i, x in enumerate(["x", "y0", "y1"]):
        lines += [(f"m{i}", aten.mul.Tensor, x, 2.0), (f"y{i}", aten.add.Tensor, f"m{i}", f"w{i}")]
        if i:
            lines += [(f"parts{i}", aten.split_with_sizes.default, "x", [1, 3]),
                      (f"p{i}", operator.getitem, f"parts{i}", i - 1), (f"v{i}", aten.reshape.default, f"p{i}", [-1])]
        if i < 2:
            lines += [(f"seen{i}", aten.reshape.default, f"y{i}", [2, 8])]
        lines += [(f"gone{i}", WAIT, f"y{i}")]
    gm, real = built(lines, ["x", "w0", "w1", "w2"], ["y2", "v1", "v2", "seen0", "seen1"])
    moves, before, after = through(gm, real)
    assert moves.found == {"region_0": 3}
    torch.testing.assert_close(after, before, rtol=0, atol=0)


@needs_213
@pytest.mark.slow
def test_in_backward_all_blocks_but_one_share_their_code(mesh_of):
    _, shared, _ = graphs_of(regions, mesh_of(8), depth=5)
    assert max(shared["backward"].meta["calls"].values()) == 4  # the last of backward starts no gather before it


def test_small_results_for_backward_are_made_in_the_stretch_that_they_come_from(mesh_of):
    mesh_of(2)
    lines = [line for i in (0, 1) for line in (
        (f"e{i}", aten.exp.default, f"w{i}"), (f"y{i}", aten.neg.default, f"e{i}"), (f"z{i}", WAIT, f"y{i}"))]
    lines += [(f"d{i}", aten.div.Tensor, f"e{i}", 4.0) for i in (0, 1)]
    gm, real = built(lines, ["w0", "w1"], ["y0", "y1", "d0", "d1"])
    moves, before, after = through(gm, real)
    assert moves.found == {"region_0": 2} and not gm.graph.find_nodes(op="call_function", target=aten.div.Tensor)
    torch.testing.assert_close(after, before, rtol=0, atol=0)


def test_what_one_stretch_widens_for_others_is_kept_narrow_between(mesh_of):
    mesh_of(2)
    lines = []
    for i in (0, 1):
        lines += [(f"f{i}", regions.CAST, f"w{i}", torch.float64), (f"y{i}", aten.exp.default, f"f{i}"),
                  (f"z{i}", WAIT, f"y{i}"), (f"m{i}", aten.mul.Tensor, f"f{i}", "x"),
                  (f"n{i}", aten.neg.default, f"m{i}"), (f"u{i}", WAIT, f"n{i}")]  # fmt: skip
    gm, real = built(lines, ["x", "w0", "w1"], ["y0", "n0", "y1", "n1"])
    moves, before, after = through(gm, real)
    assert moves.found == {"region_0": 2, "region_1": 2}
    read = {a.name for n in gm.graph.nodes if n.target is regions.CALL for a in n.args[2:]}
    assert read == {"x", "w0", "w1"}  # and no fp64 tensor
    torch.testing.assert_close(after, before, rtol=0, atol=0)


def test_the_tools_find_a_gathered_weight_that_a_subgraph_keeps(mesh_of):
    """Planted: two calls of one subgraph, each of which returns the transposed weight as something for backward."""
    group = mesh_of(2).get_group().group_name
    lines = [line for i in (0, 1) for line in (
        (f"start{i}", overlap.GATHER, f"w{i}", 2, group), (f"whole{i}", WAIT, f"start{i}"))]  # fmt: skip
    gm, _ = built(lines, ["w0", "w1", "x"], ["whole0"])
    inner, holders = fx.Graph(), {}
    for name in ("x", "w"):
        holders[name] = inner.placeholder(name)
    turned = inner.call_function(aten.permute.default, (holders["w"], [1, 0]))
    inner.output((inner.call_function(aten.mm.default, (holders["x"], turned)), turned))
    gm.register_module("sub", fx.GraphModule(nn.Module(), inner))
    nodes, output = {n.name: n for n in gm.graph.nodes}, gm.graph.output_node()
    waits = gm.graph.find_nodes(op="call_function", target=WAIT)
    products, results = [], []
    with gm.graph.inserting_before(output):
        for wait in waits:
            call = gm.graph.call_function(regions.CALL, (gm.graph.get_attr("sub"), "sub", nodes["x"], wait))
            products.append(gm.graph.call_function(operator.getitem, (call, 0)))
            results.append(gm.graph.call_function(operator.getitem, (call, 1)))
    output.args = ((*products, *results),)
    output.meta["user_visible_output_idxs"] = [0, 1]
    flat = inlined(gm)
    assert flat.meta["calls"] == Counter(sub=2)
    assert not flat.graph.find_nodes(op="call_function", target=regions.CALL)
    kept = saved(flat)
    assert kept["gathered"] == 2 * 8 * 4 * 4  # two weights [8, 4] of fp32
    assert kept["products"] == kept["other"] == 0
    assert gathered_alive(flat) >= 2 * 8 * 4 * 4
    assert sum(map(overlap.is_product, flat.graph.nodes)) == 2


def test_blocks_of_which_no_two_are_equal_are_compiled_with_a_warning(mesh_of, monkeypatch):
    mesh_of(2)
    gm, real = built([("y", aten.mul.Tensor, "x", 2.0)], ["x"], ["y"])
    moves = regions.Regions(Nothing())
    numbers = iter(range(100))
    monkeypatch.setattr(regions, "unit_of", lambda node: str(next(numbers)))
    with pytest.warns(UserWarning, match=r"regions: no two of 3 blocks in a graph compute the same: each is compiled"):
        moves(gm.graph)
    assert moves.found == {}


def test_an_older_torch_compiles_every_block_with_a_warning(monkeypatch, mesh_of):
    model = data_parallel(nn.Sequential(nn.Linear(4, 4)), mesh_of(2))
    version = type(torch.__version__)
    monkeypatch.setattr(torch, "__version__", version("2.12.1"))
    with pytest.warns(UserWarning, match="regions: need torch 2.13, this is 2.12.1: each block is compiled"):
        options = regions.compile_options(model)
    assert type(options["post_grad_custom_post_pass"]) is overlap.Overlap


def test_plan_and_source_are_in_the_cache_key(mesh_of):
    model = data_parallel(nn.Sequential(nn.Linear(4, 4)), mesh_of(2))
    keys = {regions.Regions(overlap.passes(model, **how)[0]).uuid() for how in ({}, dict(whole_step=True))}
    keys.add(overlap.passes(model)[0].uuid())
    assert len(keys) == 3


def test_the_private_names_of_torch_stand_at_the_head_of_the_file():
    assert private_names(Path(regions.__file__).read_text()) == {
        "_ops", "_guards", "_schema", "_cdata", "_inductor", "_subclasses",
    }  # fmt: skip
    assert torch.empty(1).untyped_storage()._cdata and aten.add_.Tensor._schema.is_mutable
