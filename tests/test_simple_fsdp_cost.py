"""simple_fsdp.py, properties 7 and 8: what communicates and what stays in memory. The others: test_simple_fsdp.py.

    pytest tests/test_simple_fsdp_cost.py       # about 40 s on 2 cores; no GPU

Counts come from torch's fake process group, in this process.
"""

import contextlib
import copy
import functools
import io
import pickle

import pytest
import torch
import torch.distributed as dist
from models_for_wrapper import (
    BF16,
    INFERENCE,
    PARTS,
    All,
    Block,
    Blocks,
    Comms,
    Graphs,
    Made,
    Twice,
    adamw,
    batch,
    compiled,
    count,
    fake_ranks,
    weights_kept,
    with_one_thread,
)
from torch import nn

from simple_fsdp import MixedPrecisionPolicy, data_parallel, describe, unsharded

one_thread = pytest.fixture(scope="module", autouse=True)(with_one_thread)
fake = pytest.fixture(fake_ranks)

# ----------------------------------------------------------------------------------------- 7: no hidden collectives

QUIET = dict(
    repr=repr, print=lambda m: print(m, file=io.StringIO()), format=lambda m: f"{m} {m.parts['lists'].chain}",
    state_dict=lambda m: m.state_dict(), load_state_dict=lambda m: m.load_state_dict(m.state_dict()),
    named_parameters=lambda m: list(m.named_parameters()), modules=lambda m: [*m.modules(), *m.named_children()],
    describe=describe, deepcopy=copy.deepcopy, pickle=pickle.dumps, buffers=lambda m: list(m.named_buffers()),
    adamw=lambda m: torch.optim.AdamW(p for p in m.parameters() if p.requires_grad),
    fused=lambda m: torch.optim.AdamW((p for p in m.parameters() if p.requires_grad), fused=True),
    sgd=lambda m: torch.optim.SGD(p for p in m.parameters() if p.requires_grad), switches=lambda m: m.eval().train(),
    compile=lambda m: torch.compile(m), apply=lambda m: m.apply(lambda child: None), step=lambda m: adamw(m).step(),
    zero_grad=lambda m: m.zero_grad(), to=lambda m: m.to(torch.float64).to(torch.float32),
    freeze=lambda m: m.parts["mlp"].requires_grad_(False),
)  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("when", ["new", "used"])
def test_property_7_no_collective_outside_forward_and_backward(fake, when):
    model, loud = data_parallel(All(), fake(4)), {}
    if when == "used":
        model(*batch(3)).sum().backward()
    for what, do in QUIET.items():
        with Comms() as comms:
            try:
                do(model)
            except Exception as e:
                loud[what] = f"{type(e).__name__}: {e}"
        if comms.log:
            loud[what] = comms.log
    assert loud == {}


def test_property_7_clipping_communicates_norms_only(fake):
    model = data_parallel(All(), fake(4))
    model(*batch(3)).sum().backward()
    with Comms() as comms:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    count = len(list(model.parameters()))
    assert {name for name, *_ in comms.log} <= {"all_reduce"} and all(n <= count for _, n, *_ in comms.log)


def test_property_7_reading_a_parameter_is_seen_by_these_tests(fake):
    model = data_parallel(nn.Linear(4, 4), fake(4))
    with Comms() as comms, unsharded():
        assert model.weight.shape == (4, 4)
        dist.barrier()
    assert [name for name, *_ in comms.log] == ["all_gather_into_tensor", "barrier"]


def test_property_7_describe_has_one_row_per_parameter_with_what_this_rank_holds(fake):
    class Some(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 7), nn.Linear(3, 7, bias=False)
            self.b.weight = self.a.weight
            self.low = nn.Parameter(torch.zeros(2, 5, dtype=torch.bfloat16))
            self.scale = nn.Parameter(torch.tensor(1.0))

    rows = describe(data_parallel(Some(), fake(3, rank=2)))
    assert rows == [
        ("low", (2, 5), torch.bfloat16, "Shard(dim=0)", (0, 5), 0, ""),
        ("scale", (), torch.float32, "Replicate()", (), 4, ""),
        ("a.weight", (7, 3), torch.float32, "Shard(dim=0)", (1, 3), 12, ""),
        ("a.bias", (7,), torch.float32, "Shard(dim=0)", (1,), 4, ""),
    ]
    assert rows[0]._fields == ("name", "shape", "dtype", "placement", "local_shape", "local_bytes", "unit")
    hybrid = describe(data_parallel(nn.Linear(3, 7, bias=False), fake(4, replicas=2), "hybrid_shard"))
    assert hybrid == [("weight", (7, 3), torch.float32, "Shard(dim=0)", (4, 3), 48, "")]
    assert describe(nn.Linear(2, 2, bias=False)) == [("weight", (2, 2), torch.float32, "-", (2, 2), 16, "")]
    assert [row.unit for row in describe(data_parallel(Blocks(2), fake(2)))] == ["blocks.0"] * 6 + ["blocks.1"] * 6


# ------------------------------------------------------------------------------- 8: frames, gathers, gathered weights


@pytest.mark.long
@pytest.mark.parametrize("depth", [4, 12, 24])
def test_property_8_compiled_frames_do_not_grow_with_depth(fake, depth):
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    model = data_parallel(Blocks(depth), fake(4), mp_policy=BF16)
    for block in model.get_submodule("blocks"):
        block.compile(backend=counter, fullgraph=True)
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(2):
            # the first block's input requires no gradient, as no embedding comes before it: another frame, rightly
            model(torch.randn(2, 4, 8, dtype=torch.bfloat16, requires_grad=True)).backward()
    assert counter.frame_count == 1
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]


GATHERS = dict(
    linear=(lambda: nn.Linear(8, 8), lambda m, x: m(x), 1),
    lstm=(lambda: nn.LSTM(8, 8, 2), lambda m, x: m(x)[0], 1),
    attention=(lambda: nn.MultiheadAttention(8, 2), lambda m, x: m(x, x, x)[0], 2),  # its own, and its layer's two
    encoder=(lambda: nn.TransformerEncoderLayer(8, 2, 16), lambda m, x: m(x), 6),
    blocks=(lambda: nn.Sequential(*[nn.TransformerEncoderLayer(8, 2, 16) for _ in range(3)]), lambda m, x: m(x), 3),
    list=(lambda: nn.ParameterList([torch.randn(8, 8)] * 2), lambda m, x: x @ m[0] @ m[1], 1),
    twice=(Twice, lambda m, x: m(x, None), 2),  # two calls of one module
)  # fmt: skip


@pytest.mark.parametrize("mode", ["train", "eval", "no_grad", pytest.param("inference", marks=INFERENCE)])
@pytest.mark.parametrize("case", GATHERS)
def test_property_8_eager_gathers_once_per_module_call_or_block(fake, case, mode):
    make, call, gathers = GATHERS[case]
    model, x = data_parallel(make(), fake(4)).train(mode == "train"), torch.randn(4, 3, 8)
    context = {"no_grad": torch.no_grad, "inference": torch.inference_mode}.get(mode, contextlib.nullcontext)
    for _ in range(2):
        with Comms() as comms, context(), unsharded() if case == "list" else contextlib.nullcontext():
            call(model, x)
        assert comms.count("all_gather_into_tensor") == gathers


def held(model, *inputs):
    """Bytes that live because the graph of `model(*inputs)` does."""
    with Made() as made:
        loss = model(*inputs)
        assert loss.requires_grad
        return made.bytes()


@pytest.mark.parametrize("part, low", [*((p, False) for p in PARTS), ("mlp", True), ("tied", True), ("lstm", True)])
def test_property_8_no_gathered_weight_lives_from_forward_to_backward_in_eager(fake, part, low):
    plain, (x, t), dtype = PARTS[part](), batch(3), torch.bfloat16 if low else torch.float32
    model = data_parallel(copy.deepcopy(plain), fake(3), mp_policy=MixedPrecisionPolicy(dtype))
    for p in plain.parameters():
        p.data = p.data.to(dtype) if p.is_floating_point() else p.data
    assert held(model, x.to(dtype), t) == held(plain, x.to(dtype), t)


@pytest.mark.parametrize("mode", ["fully_shard", "hybrid_shard"])
@pytest.mark.parametrize("remat", [False, True])
def test_property_8_eager_holds_as_much_as_one_process_with_checkpoints_and_hybrid(fake, remat, mode):
    plain, inputs = Blocks(3, remat=remat), batch(3)
    mesh = fake(6, replicas=2) if mode == "hybrid_shard" else fake(3)
    model = data_parallel(copy.deepcopy(plain), mesh, mode)
    expected = held(plain, *inputs)
    assert held(model, *inputs) == expected
    again = data_parallel(copy.deepcopy(plain), mesh, mode, reshard_after_forward=False)
    weights = 4 * sum(m.weight.numel() for m in plain.modules() if isinstance(m, nn.Linear | nn.LayerNorm))
    assert held(again, *inputs) - expected >= (0 if remat else weights)


class Fused(nn.Module):
    """Has no parameter of its own and reads those of its children."""

    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x):
        return x + x @ (self.q.weight * self.k.weight)


@pytest.mark.parametrize("context", [
    contextlib.nullcontext, torch.no_grad, pytest.param(torch.inference_mode, marks=INFERENCE),
])  # fmt: skip
@pytest.mark.parametrize("make", [functools.partial(Block, hidden=16), Fused])
def test_property_8_eager_frees_the_weights_of_a_module_when_its_forward_ends(fake, make, context):
    model, alive = data_parallel(nn.Sequential(*[make() for _ in range(4)]), fake(4)), []
    with Made() as made, context():
        for module in model:
            module.register_forward_pre_hook(lambda *_: alive.append(made.gathered()))
        model(torch.randn(3, 8))
        first = made.gathered()
        model(torch.randn(3, 8))
    # From the second time on, while one runs the next is on its way.
    assert alive == [0] * 4 + [0, 1, 1, 1] and first == made.gathered() == 0


def step(model, *inputs):
    """Collectives of one eager forward and of its backward."""
    with Comms() as forward:
        loss = model(*inputs)
    with Comms() as backward:
        loss.backward()
    return forward, backward


@pytest.mark.parametrize("remat", [False, True])
def test_property_8_eager_gathers_again_in_backward_only_if_asked(fake, remat):
    inputs, reshard = batch(3), data_parallel(Blocks(remat=remat), fake(4))
    forward, backward = step(reshard, *inputs)
    assert forward.count("all_gather_into_tensor") == 3
    assert backward.count("all_gather_into_tensor") == 3  # a checkpoint in a block asks three times, gathered is once
    assert backward.count("reduce_scatter_tensor") == 3
    once, again = (sum(n for name, n, *_ in c.log if "gather" in name) for c in (forward, backward))
    assert once == again  # all of a block: what one rank's backward does not need, another's may
    keep = data_parallel(Blocks(remat=remat), fake(4), reshard_after_forward=False)
    forward, backward = step(keep, *inputs)
    assert forward.count("all_gather_into_tensor") == 3
    assert backward.count("all_gather_into_tensor") == (3 if remat else 0)  # eager checkpoints keep nothing


@pytest.mark.parametrize("channels", [5, 8])
def test_gradients_in_channels_last_are_reduced_together(fake, channels):
    model = data_parallel(nn.Conv2d(3, channels, 2).to(memory_format=torch.channels_last), fake(4))
    x = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    with Comms() as comms:
        model(x).square().sum().backward()
    assert comms.count("reduce_scatter_tensor") == 1 and model.weight.grad.shape == model.weight.shape


@pytest.mark.long
@pytest.mark.parametrize("remat, mesh", [
    (False, "uneven"), (True, "hybrid"), pytest.param(True, "even", marks=pytest.mark.slow),
])  # fmt: skip
def test_property_8_compiled_backward_gathers_again_and_forward_keeps_no_weight(fake, remat, mesh):
    mesh = dict(even=lambda: fake(2), uneven=lambda: fake(3), hybrid=lambda: fake(6, replicas=2))[mesh]()
    mode = "hybrid_shard" if mesh.ndim == 2 else "fully_shard"
    x = torch.randn(3, 4, 8, dtype=torch.bfloat16, requires_grad=True)
    for reshard in (True, False):
        torch._dynamo.reset()
        model = data_parallel(Blocks(2, remat=remat, hidden=18), mesh, mode, BF16, reshard_after_forward=reshard)
        backend = Graphs()
        model.compile(backend=backend, fullgraph=True)
        model(x).backward()
        (forward,), (backward,) = backend.forward, backend.backward
        assert count(forward, "all_gather_into_tensor") == 2
        assert count(backward, "reduce_scatter_tensor") == 2
        gathers = count(backward, "all_gather_into_tensor")
        if reshard:
            assert weights_kept(forward) == []
            assert gathers == 2
        else:
            assert len(weights_kept(forward)) >= 6 and gathers == 0


@pytest.mark.long
@pytest.mark.parametrize("remat", [False, True])
def test_a_block_compiled_alone_has_no_collective_in_its_code_and_keeps_no_weight(fake, remat):
    x = torch.randn(3, 4, 8, dtype=torch.bfloat16, requires_grad=True)
    model, backend = data_parallel(Blocks(2, remat=remat, hidden=18), fake(3), mp_policy=BF16), Graphs()
    for block in model.blocks:
        block.compile(backend=backend, fullgraph=True)
    model(x).backward()
    (forward,), (backward,) = backend.forward, backend.backward
    for graph in (forward, backward):
        assert not [node for node in graph.nodes if "c10d" in str(node.target)]
    # Of a weight backward gets the input itself, which the wrapper gathers again: no cast, no other layout.
    kept = forward.output_node().all_input_nodes
    weights = [tuple(p.shape) for p in model.blocks[0].parameters() if p.ndim == 2]
    shapes = [tuple(node.meta["val"].shape) for node in kept if node.op != "placeholder"]
    assert not [shape for shape in shapes if shape in weights or shape[::-1] in weights]


@pytest.mark.long
def test_property_8_compiled_replicate_and_one_rank_keep_nothing_either(fake):
    for mesh, mode in ((fake(4), "replicate"), (fake(1), "fully_shard")):
        torch._dynamo.reset()
        model, backend = data_parallel(Blocks(1), mesh, mode, BF16), Graphs()
        compiled(model, backend)(torch.randn(3, 4, 8, dtype=torch.bfloat16)).backward()
        (forward,) = backend.forward
        casts = [node for node in forward.nodes if node.target is torch.ops.prims.convert_element_type.default]
        casts += [node for node in forward.nodes if node.target is torch.ops.aten._to_copy.default]
        from_parameter = {node for node in casts if node.all_input_nodes[0].op == "placeholder"}
        assert len(from_parameter) == 6 and not from_parameter & set(forward.output_node().all_input_nodes)
