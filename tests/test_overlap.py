"""What the compiler is made to do with collectives, counted in its graphs: no GPU, one process, no code generated.

A fake process group of any size; the graphs of forward and backward are taken after Inductor's post-grad passes. Order
and bytes alive in the code that Inductor then generates are in test_generated.py.
"""

import copy
import re
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from models_for_wrapper import Block, private_names
from torch import nn
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch.distributed import DeviceMesh
from torch.distributed._functional_collectives import all_gather_tensor, all_reduce
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import overlap
from lab.profiling.collectives import (
    block_inputs,
    capture,
    collectives,
    gathered_alive,
    of_step,
    saved,
)
from model import ModelConfig, Transformer
from overlap import compile_options
from simple_fsdp import MixedPrecisionPolicy, data_parallel
from trainer.step import AdamW, check_mode, make_step

B, T, D, V = 1, 8, 128, 512
def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


def count(gm, kind) -> tuple[int, int]:
    """(collectives of a kind, those exposed: with no product between start and wait)"""
    gaps = [c.gap for c in collectives(gm) if c.kind == kind]
    return len(gaps), gaps.count(0)


def gathered_bytes_saved(graphs) -> int:
    return saved(graphs["forward"])["gathered"]


def build(mesh, depth=4, mode="fully_shard", reshard=True, min_bytes=0, **config):
    config = dict(width=D, head_dim=32, grouping=2, vocab=V) | config
    with torch.device("meta"):
        model = Transformer(ModelConfig(depth=depth, **config))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
    data_parallel(model, mesh, mode, policy, reshard_after_forward=reshard, min_bytes=min_bytes)
    return model.to_empty(device="cpu")


def step_graphs(mesh, compile="fwdbwd", accum_sync="every", seqlen=T, only=(), **kwargs):
    """The graphs of what a step of this mode compiles (`only` of these); one dict of them if it is only one thing."""
    model, tokens = build(mesh, **kwargs), torch.zeros(B, seqlen, dtype=torch.long)
    model.prepare(seqlen, "cpu")
    dtypes = dict(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    kwargs = dict(mesh=mesh, clip=1.0, accum_sync=accum_sync, **dtypes)
    step = make_step(compile, model, AdamW(model.parameters(), 1e-3), **kwargs)
    step.compiled = {name: what for name, what in step.compiled.items() if not only or name in only}
    with torch.device("meta"):
        blank = Transformer(model.config)
    blank.prepare(seqlen, "cpu")
    graphs = of_step(step, block_inputs(blank, tokens, torch.bfloat16), tokens, torch.bfloat16)
    return graphs if len(graphs) > 1 else next(iter(graphs.values()))


def sent(graphs) -> int:
    """Bytes that a rank sends, without the scalars of loss and gradient norm."""
    return sum(c.sent for gm in graphs.values() for c in collectives(gm) if c.full > 64)


ATTENTION = [f"_scaled_dot_product_flash_attention{of}" for of in ("", "_backward", "_for_cpu", "_for_cpu_backward")]
# Every private name of torch that overlap.py uses.
PRIVATE = {
    "torch._inductor": lambda: (overlap.CustomGraphPass, overlap.stable_topological_sort),
    "torch.ops._c10d_functional": lambda: torch.ops._c10d_functional.wait_tensor.default,
    "aten._to_copy": lambda: torch.ops.aten._to_copy.default,
    "aten._unsafe_view": lambda: torch.ops.aten._unsafe_view.default,
    **{f"aten.{name}": partial(getattr, torch.ops.aten, name) for name in ATTENTION},
}


def check_or_skip():
    try:
        check_mode("step")
    except ValueError as e:
        pytest.skip(str(e))


@pytest.fixture
def needs_step():
    check_or_skip()


def size(depth, world=1) -> int:
    """Parameters of the test model, each padded to shards of equal size."""
    with torch.device("meta"):
        model = Transformer(ModelConfig(depth=depth, width=D, head_dim=32, grouping=2, vocab=V))
    return sum(-(-len(p) // world) * world * (p.numel() // len(p)) for p in model.parameters())


def two_blocks(world) -> int:
    """Bytes of two blocks in bf16, padded as their shards are, and of two norms."""
    return 2 * 2 * (size(2, world) - size(1, world) + -(-D // world) * world)


def test_what_ahead_may_be(mesh_of):
    model = build(mesh_of(2), depth=1)
    for ahead in (1.5, -1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"ahead={ahead}: must be between 0 and 1, or a whole number above 1"):
            compile_options(model, ahead=ahead)


@pytest.mark.long
@pytest.mark.usefixtures("needs_step")
@pytest.mark.parametrize(("world", "remat", "depth"), [(64, "both", 2), slow(8, "none", 3)])
def test_one_graph_of_the_whole_step_gathers_again_and_overlaps(mesh_of, world, remat, depth):
    gm = step_graphs(mesh_of(world), "step", depth=depth, remat=remat)["forward"]
    # forward: blocks and 3, then each block again (norm and head are kept: their backward comes at once)
    assert count(gm, "all-gather") == (2 * depth + 3, 2)
    assert count(gm, "reduce-scatter") == (depth + 3, 2)
    assert gathered_alive(gm) <= two_blocks(world)


@pytest.mark.slow
@pytest.mark.usefixtures("needs_step")
def test_one_graph_without_reshard_gathers_once(mesh_of):
    gm = step_graphs(mesh_of(8), "step", depth=3, reshard=False, remat="both")["forward"]
    assert count(gm, "all-gather") == (6, 2)
    assert count(gm, "reduce-scatter") == (6, 2)


@pytest.mark.usefixtures("needs_step")
@pytest.mark.parametrize(("mode", "replicas"), [slow("replicate", 1), slow("hybrid_shard", 2)])
def test_one_graph_reduces_in_buckets_of_blocks(mesh_of, mode, replicas):
    gm = step_graphs(mesh_of(8, replicas), "step", depth=3, mode=mode)["forward"]
    assert count(gm, "reduce-scatter")[0] == (6 if mode == "hybrid_shard" else 0)
    reduced = [c.bucket for c in collectives(gm) if c.kind == "all-reduce" and c.full > 64]
    held = [{"".join(re.findall(r"blocks\.(\d)", member)) for member in bucket} for bucket in reduced]
    assert held == [{""}, {""}, {"2"}, {"1"}, {"0"}, {""}]  # head, norm, a block each, embedding


@pytest.mark.long
@pytest.mark.parametrize(("remat", "reshard", "world"), [
    ("block", True, 6), slow("pointwise", True, 64), slow("mlp", True, 2), slow("both", False, 2),
    slow("attn", True, 64),
])  # fmt: skip
def test_remat_changes_neither_buckets_nor_resharding(mesh_of, remat, reshard, world):
    graphs = step_graphs(mesh_of(world), remat=remat, reshard=reshard, depth=2)
    assert count(graphs["forward"], "all-gather") == (5, 2)
    gathers, exposed = count(graphs["backward"], "all-gather")
    # block 0's input may be recomputed from the embedding, which is then gathered again
    assert gathers in ((4, 5) if reshard else (0,)) and exposed <= (gathers == 5)
    assert count(graphs["backward"], "reduce-scatter") == (5, 2)
    assert (gathered_bytes_saved(graphs) == 0) == reshard
    assert not reshard or max(map(gathered_alive, graphs.values())) <= two_blocks(world)
    full = 6 * size(2) - (0 if gathers == 5 else 2 * V * D) if reshard else 4 * size(2)
    assert sent(graphs) == pytest.approx(full * (world - 1) / world, rel=0.05)


@pytest.mark.long
def test_replicate_reduces_once_per_block(mesh_of):
    graphs = step_graphs(mesh_of(8), mode="replicate", depth=2)
    assert count(graphs["forward"], "all-gather") == (0, 0)
    assert count(graphs["backward"], "all-reduce") == (5, 2)
    assert sent(graphs) == pytest.approx(4 * size(2) * 7 / 8, rel=0.001)


def of_world(world, mode):
    """Number of replicas, and what a rank sends of a tensor of size 1 within a shard group and across replicas."""
    replicas = 2 if mode == "hybrid_shard" else 1
    n = world // replicas
    return replicas, (n - 1) / n, (replicas - 1) / replicas / n


OTHERS = [slow(64, "replicate"), slow(2, "hybrid_shard")]


# fully_shard quickly in the test of --remat above, replicate in the one of its buckets.
@pytest.mark.long
@pytest.mark.parametrize(("world", "mode"), [(8, "hybrid_shard"), slow(64, "fully_shard"), *OTHERS])
def test_bytes_sent_per_step_follow_the_formula(mesh_of, world, mode):
    """--accum-sync every, per micro-batch: 6 P_blocks (N-1)/N + 4 P_embedding (N-1)/N in bf16 (norm and head are
    gathered twice too)."""
    (replicas, inner, across), p = of_world(world, mode), size(1)
    graphs = step_graphs(mesh_of(world, replicas), mode=mode, depth=1)
    expected = 4 * p * inner if mode == "replicate" else (6 * p - 2 * V * D) * inner + 4 * p * across
    assert sent(graphs) == pytest.approx(expected, rel=0.05)


@pytest.mark.long
@pytest.mark.parametrize(("world", "mode"), [(64, "fully_shard"), (8, "hybrid_shard"), *OTHERS])
def test_bytes_of_the_last_micro_batch_follow_the_formula(mesh_of, world, mode):
    """--accum-sync last, per step of any number of micro-batches: 4 P (N-1)/N, and the micro-batches send nothing."""
    (replicas, inner, across), p = of_world(world, mode), size(1)
    only = () if mode == "fully_shard" else ("gather", "reduce")  # a micro-batch has the same graph in all of them
    graphs = step_graphs(mesh_of(world, replicas), mode=mode, depth=1, accum_sync="last", remat="both", only=only)
    expected = 4 * p * inner + 4 * p * across
    assert sent(graphs["gather"]) + sent(graphs["reduce"]) == pytest.approx(expected, rel=0.05)
    scattered = mode != "replicate" and world > replicas
    assert len(collectives(graphs["gather"]["forward"])) == scattered
    assert len(collectives(graphs["reduce"]["forward"])) == scattered + (mode != "fully_shard")
    if not only:
        assert not any(collectives(gm) for gm in graphs["loss"].values()) and len(graphs["loss"]) == 2


@pytest.mark.usefixtures("needs_step")
@pytest.mark.slow
def test_bytes_of_one_graph_are_those_of_the_published_formula(mesh_of):
    """6 P_blocks (N-1)/N + 4 P_embedding+head (N-1)/N: norm and head stay for their backward."""
    gm = step_graphs(mesh_of(64), "step", depth=2)
    assert sent(gm) == pytest.approx((6 * size(2) - 4 * V * D) * 63 / 64, rel=0.05)


FLEX = [dict(remat="block")]
MORE = [dict(compile="step", remat="both"), dict(remat="none"), dict(remat="both")]
MORE += [dict(compile="blocks", remat="both"), dict(mode="hybrid_shard", remat="block")]
MORE += [dict(accum_sync="last", remat="pointwise")]
FLEX += map(slow, MORE)


@pytest.mark.long
@pytest.mark.parametrize("setting", FLEX, ids=lambda setting: " ".join(setting.values()))
def test_flex_attention_makes_no_matrix_of_scores(mesh_of, setting):
    """Under every compile mode, remat and mode; nothing as large as T x T, the mask where the model is."""
    if setting.get("compile") == "step":
        check_or_skip()
    # 640: no other size is as large as its square.
    long, replicas = 640, 2 if setting.get("mode") == "hybrid_shard" else 1
    narrow = dict(width=32, head_dim=16, grouping=1, vocab=64, attn="flex")
    graphs = step_graphs(mesh_of(4, replicas), depth=1, seqlen=long, **narrow, **setting)
    graphs = graphs.get("loss", graphs)
    flex = torch.ops.higher_order
    nodes = [n for gm in graphs.values() for n in gm.graph.nodes]
    assert sum(n.target is flex.flex_attention for n in nodes) == 1  # its output is kept, whatever is recomputed
    assert sum(n.target is flex.flex_attention_backward for n in nodes) == 1
    tensors = [t for n in nodes for t in torch.utils._pytree.tree_leaves(n.meta.get("val")) if torch.is_tensor(t)]
    assert max(t.numel() for t in tensors) < long * long
    assert {t.device.type for t in tensors} == {"cpu"}


@pytest.mark.slow
def test_small_replicated_parameters_are_reduced_in_buckets(mesh_of):
    graphs = step_graphs(mesh_of(8), min_bytes=4 * D + 1)  # norms and the bias of `down`
    assert count(graphs["forward"], "all-gather") == (6, 2)
    assert count(graphs["backward"], "all-reduce")[0] <= 6


@pytest.mark.long
def test_a_norm_starts_and_is_waited_for_with_the_head_beside_it(mesh_of):
    """In forward both gathers start a block early; in backward the head's reduction, too, is waited for only when the
    last block's has started, though the norm's starts in between."""
    model = build(mesh_of(8), depth=2)
    function = lambda x: model(x).float().sum()  # noqa: E731
    graphs = capture(function, (torch.zeros(B, T, dtype=torch.long),), compile_options(model))
    *_, block, norm, head = [c for c in collectives(graphs["forward"]) if c.kind == "all-gather"]
    assert norm.bucket[0].startswith("norm") and head.bucket[0].startswith("head")
    assert norm.start == head.start == block.start + block.gap and min(norm.gap, head.gap) > 0
    head, norm, block, *_ = [c for c in collectives(graphs["backward"]) if c.kind == "reduce-scatter"]
    assert norm.bucket[0].startswith("norm") and head.bucket[0].startswith("head")
    assert head.start + head.gap == norm.start + norm.gap == block.start


@pytest.mark.long
@pytest.mark.parametrize("remat", ["none", "both"])
def test_ranks_with_batches_of_other_shapes_start_their_collectives_in_the_same_order(mesh_of, remat):
    """Each rank compiles for its own shapes, and the peak, off which a collective is moved, lies elsewhere."""
    mesh = mesh_of(8)
    orders = []
    for rows in (8, 2048):
        torch._dynamo.reset()
        model, tokens = build(mesh, depth=4, remat=remat), torch.zeros(B, rows, dtype=torch.long)
        model.prepare(rows, "cpu")
        graphs = capture(lambda x, model=model: model(x).float().sum(), (tokens,), compile_options(model))
        orders.append({name: [(c.kind, c.bucket) for c in collectives(gm)] for name, gm in graphs.items()})
    assert all(order == orders[0] for order in orders)


def test_neighbours_in_no_unit_that_are_alike_are_gathered_one_ahead(mesh_of):
    model = data_parallel(nn.ModuleList(nn.Linear(D, D, bias=False) for _ in range(4)), mesh_of(8))
    x = torch.zeros(B, T, D, requires_grad=True)

    def loss(x):
        for layer in model:
            x = layer(x).relu()
        return x.sum()

    graphs = capture(loss, (x,), compile_options(model))
    assert [(c.start, c.gap) for c in collectives(graphs["forward"])] == [(0, 0), (0, 1), (1, 1), (2, 1)]
    assert gathered_alive(graphs["forward"]) == 2 * 4 * D * D


def test_options_for_a_graph_without_any_unit_are_a_warning(mesh_of):
    model = build(mesh_of(8), depth=1)
    options = compile_options(model)
    tokens = torch.zeros(B, T, dtype=torch.long)
    with pytest.warns(UserWarning, match=r"overlap: a graph gathers nothing in a unit, only in L\["):
        graphs = capture(lambda x: model.head(model.emb(x)).float().sum(), (tokens,), options)
    assert count(graphs["forward"], "all-gather")[0] == count(graphs["backward"], "reduce-scatter")[0] == 2


class GlobalNorm(nn.Module):
    """Statistics over all ranks, of a batch: an average of the model's own."""

    def __init__(self, mesh):
        super().__init__()
        self.mesh, self.weight = mesh, nn.Parameter(torch.ones(D))

    def forward(self, x):
        mean = all_reduce(x.detach().square().mean((0, 1)), "avg", self.mesh)
        return x * torch.rsqrt(mean + 1e-5) * self.weight


@pytest.mark.long
@pytest.mark.parametrize("mode", ["fully_shard", "replicate"])
def test_averages_of_the_model_s_own_are_left_where_they_are(mesh_of, mode):
    """Two in a block, of which the second needs what the first gave: they cannot be merged."""
    mesh = mesh_of(8)
    model = nn.Sequential(*(nn.Sequential(GlobalNorm(mesh), nn.Linear(D, D), GlobalNorm(mesh)) for _ in range(4)))
    data_parallel(model, mesh, mode)
    x = torch.zeros(B, T, D, requires_grad=True)
    graphs = capture(lambda x: model(x).sum(), (x,), compile_options(model))
    own = graphs["forward"].graph.find_nodes(op="call_function", target=overlap.REDUCE)
    assert len(own) == 8 and not any("bucket" in n.meta for n in own)
    kind = "all-reduce" if mode == "replicate" else "reduce-scatter"
    assert count(graphs["backward"], kind)[0] == 4


@pytest.mark.long
def test_collectives_of_a_size_that_varies_are_left_where_they_are(mesh_of):
    mesh = mesh_of(8)
    block = build(mesh, depth=1).blocks[0]
    x = torch.zeros(3, T, D, dtype=torch.bfloat16, requires_grad=True)
    torch._dynamo.mark_dynamic(x, 0)

    def loss(x):
        own = all_reduce(x.detach(), "avg", mesh), all_gather_tensor(x.detach(), 0, mesh)
        return block(x).float().sum() + sum(t.float().sum() for t in own)

    graphs = capture(loss, (x,), compile_options(block))
    mine = graphs["forward"].graph.find_nodes(op="call_function", target=overlap.REDUCE)
    mine += graphs["forward"].graph.find_nodes(op="call_function", target=overlap.GATHER)
    assert ["bucket" in n.meta for n in mine] == [False, True, False]  # the second: of the block's parameters
    assert count(graphs["backward"], "reduce-scatter")[0] == 1


@pytest.mark.long
def test_one_block_alone_is_one_bucket(mesh_of):
    block = build(mesh_of(8), depth=1).blocks[0]
    x = torch.zeros(B, T, D, dtype=torch.bfloat16, requires_grad=True)
    graphs = capture(lambda x: block(x).float().sum(), (x,), compile_options(block))
    assert count(graphs["forward"], "all-gather")[0] == 1
    assert count(graphs["backward"], "all-gather")[0] == count(graphs["backward"], "reduce-scatter")[0] == 1


def test_plan_and_source_are_in_the_cache_key(mesh_of):
    model = build(mesh_of(8), depth=2)
    keys = {compile_options(model, **kw)["post_grad_custom_post_pass"].uuid()
            for kw in ({}, dict(whole_step=True), dict(ahead=0.5))}  # fmt: skip
    assert len(keys) == 3


@pytest.mark.parametrize("name", PRIVATE)
def test_the_private_names_of_torch_still_exist(name):
    PRIVATE[name]()


def test_private_names_are_used_in_the_head_of_the_file_alone():
    head, body = Path(overlap.__file__).read_text().split("\ndef compile_options", 1)
    assert private_names(head) == {name.split(".")[-1] for name in PRIVATE}
    assert private_names("def compile_options" + body) == {"_data_parallel_unit"}  # simple_fsdp.py's


def test_on_one_rank_the_options_order_a_backward_and_move_nothing(mesh_of):
    model = build(mesh_of(1), depth=2)
    assert compile_options(model, whole_step=True)["allow_buffer_reuse"] is False
    with pytest.raises(ValueError, match="ahead=1.5: must be between 0 and 1"):
        compile_options(model, ahead=1.5)


@pytest.mark.parametrize("again", [False, True])
def test_attention_on_a_cpu_is_a_product_with_the_flops_of_flash_attention(again):
    """Backward makes the scores again: five products to forward's two. Keys and values have half the heads. Attention
    that a checkpoint repeats stands, before torch 2.14, in an operation for the state of its random numbers."""
    q, k, v = (torch.randn(2, heads, 16, 8, requires_grad=True) for heads in (4, 2, 2))
    attention = partial(F.scaled_dot_product_attention, enable_gqa=True)
    run = partial(checkpoint, attention, use_reentrant=False) if again else attention
    graphs = capture(lambda *qkv: run(*qkv).sin().sum(), (q, k, v))
    product = 2 * 2 * 4 * 16 * 16 * 8
    made = {}
    for name, gm in graphs.items():
        products = [n for n in gm.graph.nodes if overlap.is_product(n)]
        assert all("attention_for_cpu" in str(overlap.operation(n)) for n in products)
        made[name] = sum(map(overlap.flops_of, products))
    assert made == dict(forward=2 * product, backward=(7 if again else 5) * product)


@pytest.mark.parametrize("world", [1, 8])
@pytest.mark.parametrize("other", [nn.Linear(2, 2), nn.Identity(), torch.compile(nn.Linear(2, 2))],
                         ids=["not wrapped", "without parameters", "compiled, not wrapped"])  # fmt: skip
def test_options_of_what_is_not_wrapped_are_an_error_on_any_number_of_ranks(mesh_of, world, other):
    build(mesh_of(world), depth=1)
    with pytest.raises(ValueError, match="no parameter of the model is sharded: call data_parallel"):
        compile_options(other)


def of_another_model(model, mesh):
    return model, compile_options(data_parallel(nn.Linear(3, 3), mesh))


def of_a_model_that_this_rank_has_alone(model, mesh):
    return model, compile_options(data_parallel(nn.Linear(3, 3), DeviceMesh("cpu", [0])))


def of_a_part(model, mesh):
    return model, compile_options(model[0])


def before_it_is_copied(model, mesh):
    return copy.deepcopy(model), compile_options(model)


def before_it_is_moved(model, mesh):
    options = compile_options(model)
    return model.to(torch.float64).to("meta").to_empty(device="cpu"), options


OTHERS_OPTIONS = (of_another_model, of_a_model_that_this_rank_has_alone, of_a_part, before_it_is_copied,
                  before_it_is_moved)  # fmt: skip


@pytest.mark.long
def test_options_that_were_made_in_another_order_move_the_same_collectives(mesh_of):
    mesh, x, gaps = mesh_of(8), torch.zeros(2, D, dtype=torch.float64), []
    for of in (lambda model, mesh: (model, {}), lambda model, mesh: (model, compile_options(model)), *OTHERS_OPTIONS):
        model = nn.Sequential(*(Block(D, D) for _ in range(4))).double()
        model, options = of(data_parallel(model, mesh), mesh)
        graphs = capture(lambda x, model=model: model(x).sum(), (x,), options)
        gaps.append([(c.kind, c.gap) for gm in graphs.values() for c in collectives(gm)])
    assert gaps[0] != gaps[1] and gaps[2:] == [gaps[1]] * len(OTHERS_OPTIONS)


@pytest.mark.parametrize("world", [1, 8])
def test_a_function_compiled_and_run_before_the_wrap_is_compiled_again(mesh_of, world):
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.ones(2, 4)
    kinds = []

    def backend(gm, inputs):
        kinds.append("gather" in gm.print_readable(print_output=False))
        return gm

    compiled = torch.compile(model.forward, backend=backend)
    compiled(x)
    data_parallel(model, mesh_of(world))
    compiled(x)
    assert kinds == [False, True]


def test_attention_with_a_mask_that_is_larger_than_its_output_is_no_norm():
    """Of 256 tokens of width 16 the mask has 16 times as many elements. Marked as a norm, the output could neither be
    saved nor computed again: compilation failed."""

    def step(x, mask, w, tangents):
        norm = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True))
        q = (norm @ w).view(1, 1, 256, 16)
        attended, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q, attn_mask=mask)
        return (attended.view(256, 16) @ w @ w) * tangents

    sizes = (256, 16), (1, 1, 256, 256), (16, 16), (256, 16)
    graph = make_fx(step, tracing_mode="fake")(*(torch.ones(size) for size in sizes))
    overlap.RecomputeNorms()(graph)
    marked = [n.target for n in graph.graph.nodes if "recompute" in n.meta]
    assert marked == [torch.ops.aten.mul.Tensor], "the norm alone"


@pytest.mark.slow
def test_a_backward_ordered_for_memory_has_the_gradients_of_an_unordered_one_to_the_bit(mesh_of, monkeypatch):
    """On one rank, so that no sum of several ranks takes part. In bf16 they would differ in rounding: a norm's output
    that is computed again is fused into other kernels (they are equal under emulate_precision_casts)."""
    mesh = mesh_of(1)
    tokens = torch.randint(V, (2, 64), generator=torch.Generator().manual_seed(1))
    ordered = []

    def gradients():
        torch.manual_seed(0)
        config = ModelConfig(depth=1, width=D, head_dim=32, grouping=2, vocab=V)
        model = data_parallel(Transformer(config), mesh)
        torch._dynamo.reset()
        loss = torch.compile(lambda x, y: model(x, y), fullgraph=True, options=compile_options(model))
        # Else the second code would be the first's: a pass is known by its source.
        with inductor_config.patch(fx_graph_cache=False), functorch_config.patch(enable_autograd_cache=False):
            loss(tokens, tokens.roll(1, 1)).backward()
        return {name: p.grad.to_local() for name, p in model.named_parameters()}

    keep_order = overlap.keep_order
    monkeypatch.setattr(
        overlap, "keep_order", lambda g, *order: ordered.extend(map(len, order)) or keep_order(g, *order)
    )
    now = gradients()
    assert any(ordered), "nothing was ordered"
    for name in ("weight_gradients_first", "cast_weights_again", "cast_gradients_last"):
        monkeypatch.setattr(overlap, name, lambda g: {})
    monkeypatch.setattr(overlap.RecomputeNorms, "__call__", lambda self, g: None)
    ordered.clear()
    before = gradients()
    assert not any(ordered)
    assert now.keys() == before.keys()
    for name in now:
        assert torch.equal(now[name], before[name]), name
