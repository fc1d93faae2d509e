"""What the compiler is made to do with collectives, counted in its graphs: no GPU, one process, no code generated.

A fake process group of any size; the graphs of forward and backward are taken after Inductor's post-grad passes.
"""

import re
from collections import namedtuple

import pytest
import torch
import torch._functorch.config as functorch_config
import torch._inductor.compile_fx as compile_fx
import torch._inductor.config as inductor_config
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from model import ModelConfig, Transformer
from overlap import GATHER, REDUCE, SCATTER, compile_options, wait_of
from simple_fsdp import MixedPrecisionPolicy, data_parallel
from trainer.step import AdamW, Step

C10D = torch.ops._c10d_functional
KINDS = {GATHER: "gather", SCATTER: "scatter", REDUCE: "reduce", C10D.all_reduce_.default: "reduce"}
PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default}
Collective = namedtuple("Collective", "kind gap sent full")  # gap: products between start and wait; bytes
B, T, D, V = 1, 8, 128, 512


@pytest.fixture
def mesh_of():
    def make(world, replicas=1):
        dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
        if replicas > 1:
            return dist.init_device_mesh("cpu", (replicas, world // replicas), mesh_dim_names=("replicate", "shard"))
        return dist.init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))

    yield make
    torch._dynamo.reset()
    dist.destroy_process_group()


def capture(function, args, options, backward=True) -> dict[str, torch.fx.GraphModule]:
    """The post-grad graphs {"forward", "backward"} of `function` under torch.compile(options=options)."""
    graphs = {}

    def inner(gm, inputs, *, is_backward=False, is_inference=False, **_):
        compile_fx.view_to_reshape(gm)
        with compile_fx.V.set_fake_mode(compile_fx.fake_tensor_prop(gm, inputs)):
            compile_fx._recursive_post_grad_passes(gm, is_inference=is_inference)
        graphs["backward" if is_backward else "forward"] = gm

        def run(args):
            return gm(*list(args))

        run._boxed_call = True
        return run

    off = functorch_config.patch(force_non_lazy_backward_lowering=True, enable_autograd_cache=False)
    with off, inductor_config.patch(force_disable_caches=True, **options):
        torch._dynamo.reset()
        backend = lambda g, i: compile_fx.compile_fx(g, i, inner_compile=inner)  # noqa: E731
        loss = torch.compile(function, fullgraph=True, backend=backend)(*args)
        if backward:
            loss.backward()
    return graphs


def collectives(gm) -> list[Collective]:
    nodes, out = list(gm.graph.nodes), []
    place = {n: i for i, n in enumerate(nodes)}
    for n in nodes:
        if n.op == "call_function" and n.target in KINDS:
            kind, value = KINDS[n.target], n.meta["val"]
            ranks = dist.get_world_size(dist.distributed_c10d._resolve_process_group(n.args[-1]))
            full = (n.args[0].meta["val"] if kind == "scatter" else value).nbytes
            sent = full * (ranks - 1) // ranks * (2 if kind == "reduce" else 1)
            gap = sum(m.target in PRODUCTS for m in nodes[place[n] : place[wait_of(n)]])
            out.append(Collective(kind, gap, sent, full))
    return out


def count(gm, kind) -> tuple[int, int]:
    """(collectives of a kind, those exposed: with no product between start and wait)"""
    gaps = [c.gap for c in collectives(gm) if c.kind == kind]
    return len(gaps), gaps.count(0)


def gathered_bytes_saved(graphs) -> int:
    """Bytes of forward outputs that hold a gathered weight: reached from a gather's wait through views and copies."""
    held, seen = 0, set()
    gm = graphs["forward"]
    for n in gm.graph.find_nodes(op="call_function", target=C10D.wait_tensor.default):
        todo = [n]
        while todo:
            m = todo.pop()
            seen.add(m)
            name = str(m.target)
            views = ("view", "reshape", "split", "getitem", "permute", "transpose", "slice", "alias", "wait", ".t.")
            todo += [u for u in m.users if u not in seen and any(v in str(u.target) for v in views)] if name else []
    for output in gm.graph.output_node().args[0]:
        held += output.meta["val"].nbytes if output in seen else 0
    return held


def build(mesh, depth=4, mode="fully_shard", reshard=True, remat="none", **kwargs):
    with torch.device("meta"):
        model = Transformer(ModelConfig(depth=depth, width=D, head_dim=32, grouping=2, vocab=V, remat=remat))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
    data_parallel(model, mesh, mode, policy, reshard_after_forward=reshard, **kwargs).to_empty(device="cpu")
    return model


def step_graphs(mesh, chunk=0, **kwargs):
    model = build(mesh, **kwargs)
    step = Step(model, AdamW(model.parameters(), 1e-3), mesh=mesh, chunk=chunk)
    tokens = torch.zeros(B, T, dtype=torch.long)
    return capture(step.loss_sum, (tokens, tokens, torch.tensor(8.0)), compile_options(model))


@pytest.mark.parametrize(("world", "depth"), [(8, 2), (8, 5), (64, 4), (512, 4)])
def test_one_bucket_per_block_issued_a_block_early(mesh_of, world, depth):
    graphs = step_graphs(mesh_of(world), depth=depth)
    assert count(graphs["forward"], "gather") == (depth + 2, 2)  # the embedding and block 0 have nothing to hide behind
    assert count(graphs["backward"], "gather") == (depth + 1, 0)  # the embedding is not needed
    assert count(graphs["backward"], "scatter") == (depth + 2, 2)  # nor is there anything after block 0's
    assert gathered_bytes_saved(graphs) == 0


def test_without_reshard_backward_gathers_nothing(mesh_of):
    graphs = step_graphs(mesh_of(8), reshard=False)
    assert count(graphs["forward"], "gather") == (6, 2)
    assert count(graphs["backward"], "gather") == (0, 0)
    assert gathered_bytes_saved(graphs) > 0


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("remat", ["mlp", "attn", "both", "block", "pointwise"])
def test_remat_changes_neither_buckets_nor_resharding(mesh_of, remat, reshard):
    graphs = step_graphs(mesh_of(8), remat=remat, reshard=reshard, depth=3)
    assert count(graphs["forward"], "gather") == (5, 2)
    gathers, exposed = count(graphs["backward"], "gather")
    # block 0's input may be recomputed from the embedding, which is then gathered again
    assert gathers in ((4, 5) if reshard else (0,)) and exposed <= (gathers == 5)
    assert count(graphs["backward"], "scatter") == (5, 2)
    assert (gathered_bytes_saved(graphs) == 0) == reshard


def test_replicate_reduces_once_per_block(mesh_of):
    graphs = step_graphs(mesh_of(8), mode="replicate")
    assert count(graphs["forward"], "gather") == (0, 0)
    assert count(graphs["backward"], "reduce") == (6, 2)


def test_hybrid_reduces_across_only_the_shard(mesh_of):
    graphs = step_graphs(mesh_of(8, replicas=2), mode="hybrid_shard")
    assert count(graphs["forward"], "gather") == (6, 2)
    scattered, reduced = ([c for c in collectives(graphs["backward"]) if c.kind == k] for k in ("scatter", "reduce"))
    assert len(scattered) == len(reduced) == 6
    assert sum(c.full for c in reduced) == sum(c.full for c in scattered) // 4  # gradient bytes / shard degree


@pytest.mark.parametrize("mode", ["fully_shard", "replicate", "hybrid_shard"])
@pytest.mark.parametrize("world", [2, 8, 64])
def test_bytes_sent_per_step_follow_the_formula(mesh_of, mode, world):
    """6 P_blocks (N-1)/N + 4 P_emb+head (N-1)/N, in bf16: norm and head are gathered twice too."""
    replicas = 2 if mode == "hybrid_shard" else 1
    graphs = step_graphs(mesh_of(world, replicas), mode=mode, depth=3)
    with torch.device("meta"):
        model = Transformer(ModelConfig(depth=3, width=D, head_dim=32, grouping=2, vocab=V))
    size = sum(p.numel() for p in model.parameters())
    once = V * D  # the embedding's second gather is not needed
    n = world // replicas
    inner, across = (n - 1) / n, (replicas - 1) / replicas
    want = dict(
        fully_shard=(6 * size - 2 * once) * inner,
        replicate=4 * size * inner,
        hybrid_shard=(6 * size - 2 * once) * inner + 4 * size / n * across,
    )[mode]
    got = sum(c.sent for gm in graphs.values() for c in collectives(gm))
    assert got == pytest.approx(want, rel=0.05)


def test_uneven_shards_are_bucketed_too(mesh_of):
    graphs = step_graphs(mesh_of(6), depth=2)
    assert count(graphs["forward"], "gather") == (4, 2)
    assert count(graphs["backward"], "scatter") == (4, 2)


def test_small_replicated_parameters_are_reduced_in_buckets(mesh_of):
    graphs = step_graphs(mesh_of(8), min_bytes=4 * D + 1)  # norms and the bias of `down`
    assert count(graphs["forward"], "gather") == (6, 2)
    assert count(graphs["backward"], "reduce")[0] <= 6


def test_a_plan_that_matches_nothing_is_an_error(mesh_of):
    model = build(mesh_of(8), depth=1)
    with pytest.raises(ValueError, match="blocks: layers.0: no such module.*blocks.0.attn.q"):
        compile_options(model, blocks=["layers.0"])
    options = compile_options(model)
    tokens = torch.zeros(B, T, dtype=torch.long)
    with pytest.raises(Exception, match=re.escape("blocks: no collective is in blocks.0; they are in L['")):
        capture(lambda x: model.head(model.emb(x)).float().sum(), (tokens,), options)


def test_one_block_alone_is_one_bucket(mesh_of):
    model = build(mesh_of(8), depth=1)
    x = torch.zeros(B, T, D, dtype=torch.bfloat16, requires_grad=True)
    graphs = capture(lambda x: model.blocks[0](x).float().sum(), (x,), compile_options(model.blocks[0]))
    assert count(graphs["forward"], "gather")[0] == 1
    assert count(graphs["backward"], "gather")[0] == count(graphs["backward"], "scatter")[0] == 1


def test_the_cap_limits_a_bucket_of_no_block(mesh_of):
    model = build(mesh_of(8), depth=1)
    x = torch.zeros(B, T, D, dtype=torch.bfloat16, requires_grad=True)
    options = compile_options(model.blocks[0], cap_mib=0.02)
    graphs = capture(lambda x: model.blocks[0](x).float().sum(), (x,), options)
    sizes = [c.full for c in collectives(graphs["forward"])]
    biggest = 4 * D * D * 2  # `up`: one parameter may be larger than the cap
    assert len(sizes) > 1 and all(s <= max(biggest, 0.02 * 2**20) for s in sizes)


def test_plan_and_source_are_in_the_cache_key():
    model = Transformer(ModelConfig(depth=2, width=16, head_dim=8, grouping=1, vocab=32))
    keys = {compile_options(model, **kw)["post_grad_custom_post_pass"].uuid()
            for kw in ({}, dict(cap_mib=1.0), dict(blocks=["blocks.0"]))}  # fmt: skip
    assert len(keys) == 3
