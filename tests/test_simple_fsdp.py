"""simple_fsdp.py: eight properties that hold for any nn.Module under data_parallel(); each test is named after its own.

    pytest tests/test_simple_fsdp.py            # 1 to 6: about 25 s on 2 cores; no GPU
    pytest tests/test_simple_fsdp*.py           # and 7, 8, the values on real ranks, the errors, the file itself
    pytest tests/test_simple_fsdp*.py -k property_8

These files travel with simple_fsdp.py, models_for_wrapper.py and harness.py. Here counts come from torch's fake process
group, in this process; what needs the values of real ranks is in test_simple_fsdp_ranks.py, under the same names.
"""

import copy
import functools
import gc
import pickle
import warnings
import weakref

import pytest
import torch
from models_for_wrapper import (
    BF16,
    PARTS,
    All,
    Block,
    Blocks,
    Comms,
    Frozen,
    Graphs,
    Tied,
    adamw,
    batch,
    compiled,
    count,
    fake_ranks,
    init_one,
    meta_first,
    with_one_thread,
)
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.fsdp import MixedPrecisionPolicy as FSDP2Policy
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import simple_fsdp
from simple_fsdp import MixedPrecisionPolicy, data_parallel, disable_data_parallel, unsharded

one_thread = pytest.fixture(scope="module", autouse=True)(with_one_thread)
fake = pytest.fixture(fake_ranks)

# --------------------------------------------------------------------------------- 1: state_dict and checkpoints


@pytest.mark.parametrize("mode", simple_fsdp.MODES)
def test_property_1_state_dict_keeps_its_names_and_holds_dtensors(fake, mode):
    mesh, model = fake(4, replicas=2 if mode == "hybrid_shard" else None), All()
    keys, names = list(model.state_dict()), [name for name, _ in model.named_parameters()]
    assert data_parallel(model, mesh, mode) is model
    state = model.state_dict()
    assert list(state) == keys
    assert [name for name, _ in model.named_parameters()] == names
    assert all(isinstance(state[name], DTensor) for name in names)
    assert all(isinstance(p, nn.Parameter) and p.device_mesh == mesh for p in model.parameters())
    assert model.load_state_dict(state).missing_keys == []


def test_property_1_checkpoint_helpers_inside_disable_data_parallel_run_no_collective(fake):
    model = data_parallel(All(), fake(4))
    opt = adamw(model)
    model(*batch(3)).sum().backward()
    opt.step()
    with Comms() as comms, disable_data_parallel():
        state, opt_state = dcp_state.get_state_dict(model, opt)
        dcp_state.set_state_dict(model, opt, model_state_dict=state, optim_state_dict=opt_state)
        dcp_state.set_model_state_dict(model, dcp_state.get_model_state_dict(model))
        dcp_state.set_optimizer_state_dict(model, opt, dcp_state.get_optimizer_state_dict(model, opt))
    assert comms.log == []


# ------------------------------------------------------------------------------------ 2: what is read, what comes back


@pytest.mark.parametrize("compile", [False, True])
def test_property_2_the_whole_parameter_is_read_in_param_dtype(fake, compile):
    class Look(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(5, 3))
            self.low = nn.Parameter(torch.randn(5, dtype=torch.float16))
            self.scale, self.none = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.zeros(0, 3))
            self.index = nn.Parameter(torch.arange(5), requires_grad=False)
            self.mask = nn.Parameter(torch.arange(5) > 2, requires_grad=False)
            self.z = nn.Parameter(torch.randn(5, dtype=torch.complex64))

        def forward(self):
            return [torch.clone(getattr(self, name)) for name in ("w", "low", "scale", "none", "index", "mask", "z")]

    stored, bf16 = [torch.float32, torch.float16, torch.float32, torch.float32], [torch.bfloat16] * 4
    left = [torch.int64, torch.bool, torch.complex64]
    for policy, floats in ((MixedPrecisionPolicy(), stored), (BF16, bf16)):
        model = data_parallel(Look(), fake(4), mp_policy=policy)
        seen = (compiled(model) if compile else model)()
        assert [type(t) for t in seen] == [torch.Tensor] * 7
        assert [tuple(t.shape) for t in seen] == [(5, 3), (5,), (), (0, 3), (5,), (5,), (5,)]
        assert [t.dtype for t in seen] == floats + left
        assert [t.requires_grad for t in seen] == [True] * 4 + [False, False, True]
        assert [p.dtype for p in model.parameters()] == stored + left


@pytest.mark.parametrize("reduce", [None, torch.float32])
def test_property_2_the_wire_carries_param_dtype_and_reduce_dtype(fake, reduce):
    model = data_parallel(nn.Linear(8, 12, bias=False), fake(4), mp_policy=MixedPrecisionPolicy(torch.bfloat16, reduce))
    with Comms() as comms:
        model(torch.randn(3, 8, dtype=torch.bfloat16)).sum().backward()
    gather, scatter = comms.log
    assert gather == ("all_gather_into_tensor", 24, torch.bfloat16, 4)
    assert scatter == ("reduce_scatter_tensor", 96, reduce or torch.bfloat16, 4)


def test_property_2_hybrid_shard_reduce_scatters_first_and_then_all_reduces_the_shard(fake):
    model = data_parallel(nn.Linear(8, 12, bias=False), fake(6, replicas=2), "hybrid_shard", BF16)
    with Comms() as comms:
        model(torch.randn(3, 8, dtype=torch.bfloat16)).sum().backward()
    assert comms.log == [
        ("all_gather_into_tensor", 32, torch.bfloat16, 3),
        ("reduce_scatter_tensor", 96, torch.float32, 3),
        ("all_reduce", 32, torch.float32, 2),
    ]


def test_property_2_frozen_parameters_get_no_gradient_and_no_reduction(fake):
    model = data_parallel(Frozen(), fake(4))
    with Comms() as comms:
        model(*batch(3)).backward()
    assert [p.grad is None for p in model.parameters()] == [False, False, True, True, False, False]
    assert comms.count("reduce_scatter_tensor") == 2  # weight and bias of a layer together


def test_property_2_min_bytes_leaves_smaller_parameters_and_scalars_and_empty_ones_replicated(fake):
    model = nn.ParameterList([torch.zeros(shape) for shape in ((4, 8), (31,), (), (0, 3), (32,))])
    data_parallel(model, fake(4), min_bytes=128)
    sharded = [p.placements == (Shard(0),) for p in model.parameters()]
    assert sharded == [True, False, False, False, True]


# ------------------------------------------------------------------------------------------------- 3: any nn.Module


def test_property_3_ties_stay_ties_frozen_stays_frozen_buffers_and_classes_are_kept(fake):
    model = All()
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    buffers, classes = dict(model.named_buffers()), [type(m) for m in model.modules()]
    model.parts["mlp"].blocks[0].up.weight.is_special = "kept"
    data_parallel(model, fake(4))
    tied = model.parts["tied"]
    assert tied.head._parameters["weight"] is tied.emb._parameters["weight"]
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == frozen
    assert all(b is buffers[name] for name, b in model.named_buffers())
    assert all(isinstance(m, cls) for m, cls in zip(model.modules(), classes, strict=True))
    assert model.parts["mlp"].blocks[0].up._parameters["weight"].is_special == "kept"
    model(*batch(3)).sum().backward()
    assert all(b is buffers[name] for name, b in model.named_buffers())
    assert type(nn.Linear(2, 2)) is nn.Linear and "weight" not in vars(nn.Linear)


def test_property_3_equal_modules_share_one_class(fake):
    model = data_parallel(Blocks(), fake(4))
    assert type(model.get_submodule("blocks.0")) is type(model.get_submodule("blocks.1"))
    assert type(model.get_submodule("blocks.0.up")) is type(model.get_submodule("blocks.2.up"))
    # Of another shape, it must not share compiled code: see below.
    assert type(model.get_submodule("blocks.0.up")) is not type(model.get_submodule("blocks.0.down"))
    other = data_parallel(Blocks(), fake(4), mp_policy=BF16)
    assert type(other.get_submodule("blocks.1.up")) is type(model.get_submodule("blocks.0.up"))


def test_property_3_every_parameter_has_its_own_reader(fake):
    model = data_parallel(nn.Linear(8, 4), fake(1))
    with torch.no_grad():
        model._parameters["weight"].fill_(1)
        model._parameters["bias"].fill_(2)
    with unsharded():
        assert torch.equal(model.weight, torch.ones(4, 8)) and torch.equal(model.bias, torch.full((4,), 2.0))


def policies(mesh):
    """Four models of one class, each with the dtype it computes in and the collectives of an eager step: each of its
    modules has two parameters."""
    return [
        (data_parallel(Block(), mesh["shard"], mp_policy=BF16), torch.bfloat16, [3, 3, 0]),
        (data_parallel(Block(), mesh["replicate"], "replicate"), torch.float32, [0, 0, 3]),
        (data_parallel(Block(), mesh, "hybrid_shard", MixedPrecisionPolicy(torch.float64)), torch.float64, [3, 3, 3]),
        (data_parallel(Block(hidden=18), mesh["shard"], mp_policy=MixedPrecisionPolicy(torch.float16)), torch.float16,
         [3, 3, 0]),
    ]  # fmt: skip


COLLECTIVES = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce")


def test_property_3_two_policies_in_one_process_do_not_mix_in_eager(fake):
    models = policies(fake(4, replicas=2))
    for model, dtype, collectives in (*models, *models[::-1]):
        with Comms() as comms:
            y = model(torch.randn(3, 4, 8, dtype=dtype))
        with Comms() as backward:
            y.sum().backward()
        assert y.dtype == dtype
        assert [comms.count(COLLECTIVES[0]), *map(backward.count, COLLECTIVES[1:])] == collectives
        assert {p.grad.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.long
def test_property_3_two_policies_in_one_process_do_not_mix_in_one_compiled_function(fake):
    models = policies(fake(4, replicas=2))
    backend, seen = Graphs(), {}
    call = compiled(lambda model, x: model(x), backend)
    for i in (0, 1, 2, 3, 3, 2, 1, 0):
        model, dtype, collectives = models[i]
        before = len(backend.forward)
        y = call(model, torch.randn(3, 4, 8, dtype=dtype))
        y.sum().backward()
        assert y.dtype == dtype
        assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
        if i not in seen:
            seen[i] = True
            assert len(backend.forward) == before + 1
            forward, backward = backend.forward[-1], backend.backward[-1]
            assert [count(forward, COLLECTIVES[0]), *(count(backward, name) for name in COLLECTIVES[1:])] == [
                n for n in collectives  # weight and bias together
            ]


@pytest.mark.parametrize("mode", simple_fsdp.MODES)
def test_property_3_copies_keep_mesh_ties_and_policy(fake, mode):
    mesh = fake(4, replicas=2 if mode == "hybrid_shard" else None)
    model = data_parallel(Tied(), mesh, mode, BF16)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.head._parameters["weight"] is other.emb._parameters["weight"]
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            assert isinstance(q, nn.Parameter) and q is not p and q.placements == p.placements
            assert q.device_mesh == mesh and q._local_tensor.data_ptr() != p._local_tensor.data_ptr()
        with Comms() as comms:
            logits = other.head(other.block(other.emb(batch(3)[1])))
        assert logits.dtype == torch.bfloat16
        assert {n for *_, n in comms.log} == {"hybrid_shard": {2}, "fully_shard": {4}, "replicate": set()}[mode]


@pytest.mark.long
@pytest.mark.parametrize("part", PARTS)
def test_property_3_nothing_keeps_the_unsharded_parameters(fake, part):
    model = PARTS[part]()
    refs = {name: weakref.ref(p) for name, p in model.named_parameters()}
    data_parallel(model, fake(4))
    gc.collect()
    assert [name for name, ref in refs.items() if ref() is not None] == []


# ------------------------------------------------------------------------------------------------------- 4: refusals


def with_dtensor(mesh):
    model = Blocks()
    up = model.get_submodule("blocks.2.up")
    up.weight = nn.Parameter(distribute_tensor(up.weight.detach(), mesh, [Shard(0)]))
    return model


def scripted():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        return torch.jit.script(nn.Linear(3, 3))


def after_linear(make):
    return lambda mesh: nn.Sequential(nn.Linear(3, 3), make())


def blocks(mesh):
    return Blocks()


class Scaled(nn.Parameter):
    """As libraries for quantised weights have them: values mean nothing without what the class knows."""


def of_class(cls):
    linear = nn.Linear(3, 3)
    linear.weight = cls(linear.weight.detach())
    return linear


REFUSED = dict(
    second_wrap=(lambda mesh: data_parallel(Blocks(), mesh["shard"]), {}, "wrapped already"),
    dtensor=(lambda mesh: with_dtensor(mesh["shard"]), {}, r"blocks\.2\.up\.weight.*DTensor"),
    mode=(blocks, dict(mode="zero3"), "zero3.*replicate, fully_shard, hybrid_shard"),
    dtype=(blocks, dict(mp_policy=MixedPrecisionPolicy("bfloat16")), "param_dtype must be a floating.*got 'bfloat16'"),
    whole_dtype=(blocks, dict(mp_policy=MixedPrecisionPolicy(None, torch.int8)), "reduce_dtype must be a floating"),
    policy_of_fsdp2=(blocks, dict(mp_policy=FSDP2Policy(torch.bfloat16)), "must be simple_fsdp's MixedPrecisionPol"),
    policy_none=(blocks, dict(mp_policy=None), "mp_policy must be simple_fsdp's MixedPrecisionPolicy, got None"),
    min_bytes=(blocks, dict(min_bytes="1 MiB"), "min_bytes must be a number of bytes, got '1 MiB'"),
    no_mesh=(blocks, dict(mesh="cpu"), r"^device_mesh must be a DeviceMesh .init_device_mesh., got "),
    mesh_2d=(blocks, dict(mesh="2-D"), "fully_shard.*1-D.*2-D"),
    mesh_1d=(blocks, dict(mode="hybrid_shard"), "hybrid_shard.*2-D.*1-D"),
    mesh_without_names=(blocks, dict(mesh="unnamed", mode="hybrid_shard"), "hybrid_shard.*mesh_dim_names"),
    sparse=(after_linear(lambda: nn.Embedding(4, 3, sparse=True)), {}, r"1\.weight.*sparse"),
    sparse_bag=(after_linear(lambda: nn.EmbeddingBag(4, 3, sparse=True)), {}, r"1\.weight.*sparse"),
    lazy=(after_linear(lambda: nn.LazyLinear(4)), {}, r"1\.weight.*no shape"),
    quantised=(after_linear(lambda: of_class(Scaled)), {}, r"1\.weight.*class Scaled would be lost"),
    script=(after_linear(scripted), {}, r"shard 1\b.*ScriptModule"),
    script_root=(lambda mesh: scripted(), {}, "ScriptModule"),
)


@pytest.mark.parametrize("case", REFUSED)
def test_property_4_what_cannot_work_is_one_value_error_and_changes_nothing(fake, case):
    make, kwargs, message = REFUSED[case]
    mesh = fake(4, replicas=2)
    meshes = {"1-D": mesh["shard"], "2-D": mesh, "unnamed": torch.distributed.DeviceMesh("cpu", [[0, 1], [2, 3]])}
    meshes["cpu"] = "cpu"
    model = make(mesh)

    def look():
        parameters = [[(name, id(p)) for name, p in m._parameters.items()] for m in model.modules()]
        return parameters, [(type(m), "_gather_policy" in vars(m)) for m in model.modules()]

    before = look()
    with pytest.raises(ValueError, match=message), Comms() as comms:
        data_parallel(model, meshes[kwargs.get("mesh", "1-D")], **{k: v for k, v in kwargs.items() if k != "mesh"})
    assert look() == before and comms.log == []


# ----------------------------------------------------------------------------------------------------- 5: meta first


INITS = dict(
    kaiming_uniform=nn.init.kaiming_uniform_, kaiming_normal=nn.init.kaiming_normal_, normal=nn.init.normal_,
    uniform=nn.init.uniform_, trunc_normal=functools.partial(nn.init.trunc_normal_, std=0.02, b=0.03),
    xavier_uniform=nn.init.xavier_uniform_, xavier_normal=nn.init.xavier_normal_, ones=nn.init.ones_,
    constant=lambda w: nn.init.constant_(w, 0.3), bernoulli=lambda w: w.data.bernoulli_(0.3),
    generator=lambda w: nn.init.normal_(w, generator=torch.Generator().manual_seed(3)),
    randn_like=lambda w: w.data.copy_(torch.randn_like(w) * 0.1), rand_like=lambda w: w.data.copy_(torch.rand_like(w)),
    randint_like=lambda w: w.data.copy_(torch.randint_like(w, 9)), twice=lambda w: nn.init.normal_(nn.init.uniform_(w)),
)  # fmt: skip
# What writes through views, or is no DTensor operation: (init, None if it is right, else the error that refuses it).
OURS, TORCH_MIXED, TORCH_NONE = "fill the whole parameter", "mixed torch.Tensor and DTensor", "sharding strategy"
HARD = dict(
    eye=(nn.init.eye_, None), slice=(lambda w: nn.init.ones_(w).data[:, 2:].normal_(), None),
    row=(lambda w: nn.init.ones_(w).data[3].fill_(0), OURS),
    dirac=(lambda w: nn.init.dirac_(nn.init.ones_(w).unsqueeze(-1)), OURS),
    rows=(lambda w: nn.init.ones_(w).data[1:3].fill_(0), OURS),
    chunks=(lambda w: [chunk.fill_(i) for i, chunk in enumerate(w.data.chunk(2))], OURS),
    bernoulli_of=(lambda w: w.data.copy_(torch.bernoulli(w.data.fill_(0.5))), OURS),
    normal_of=(lambda w: w.data.copy_(torch.normal(w.data.fill_(0.5), 1.0)), TORCH_NONE),
    sparse=(lambda w: nn.init.sparse_(nn.init.zeros_(w), 0.5), TORCH_MIXED),
)  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("init", INITS)
def test_property_5_every_init_draws_the_whole_tensor(fake, init):
    expected, state = init_one(INITS[init], (5, 7)), torch.get_rng_state()
    for world in (1, 2, 3, 4):
        shards = []
        with Comms() as comms:
            for rank in range(world):
                shards.append(init_one(INITS[init], (5, 7), fake(world, rank))._local_tensor)
                assert torch.equal(torch.get_rng_state(), state), "the next parameter would get other values"
        assert torch.equal(torch.cat(shards), expected), f"world size {world}"
        assert comms.log == []


@pytest.mark.parametrize("init", HARD)
def test_property_5_an_init_that_cannot_be_sharded_is_refused_and_not_silently_wrong(fake, init):
    fill, refusal = HARD[init]
    if refusal is None:
        # one rank is the yardstick: a slice of a plain tensor is drawn in another order than a contiguous one
        expected = init_one(fill, (10, 7), fake(1))._local_tensor
        shards = [init_one(fill, (10, 7), fake(3, rank))._local_tensor for rank in range(3)]
        assert torch.equal(torch.cat(shards), expected)
    else:
        for rank in range(3):
            with pytest.raises(RuntimeError, match=refusal):
                init_one(fill, (10, 7), fake(3, rank))


def test_property_5_reset_parameters_of_an_embedding_says_that_it_cannot_zero_its_padding_row(fake):
    with torch.device("meta"):
        model = data_parallel(nn.Embedding(8, 3, padding_idx=5), fake(4, rank=2)).to_empty(device="cpu")
    with disable_data_parallel(), pytest.raises(RuntimeError, match="fill the whole"):  # ours, not an accident
        model.reset_parameters()


@pytest.mark.long
@pytest.mark.parametrize("mode", simple_fsdp.MODES)
def test_property_5_meta_first_keeps_ties_and_runs_no_collective(fake, mode):
    mesh = fake(4, rank=1, replicas=2 if mode == "hybrid_shard" else None)
    with Comms() as comms:
        model = meta_first(mesh, mode)
    assert comms.log == []
    tied = model.parts["tied"]
    assert tied.head._parameters["weight"] is tied.emb._parameters["weight"]
    assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))
    assert sum(not p.requires_grad for p in model.parameters()) == 4


# ----------------------------------------------------------------------------------------------------- 6: one rank


@pytest.mark.long
@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("mode", simple_fsdp.MODES)
def test_property_6_world_size_1_casts_as_world_size_n(fake, mode, compile):
    mesh, plain = fake(1, replicas=1 if mode == "hybrid_shard" else None), Block()
    model = data_parallel(copy.deepcopy(plain), mesh, mode, BF16)
    x = torch.randn(3, 4, 8, dtype=torch.bfloat16)
    y = (compiled(model) if compile else model)(x)
    manual = copy.deepcopy(plain).bfloat16()
    expected = manual(x)
    assert torch.equal(y, expected)
    y.float().square().sum().backward()
    expected.float().square().sum().backward()
    for p, q in zip(model.parameters(), manual.parameters(), strict=True):
        assert p.dtype == p.grad.dtype == torch.float32 and torch.equal(p.grad.to_local(), q.grad.float())


def test_property_6_world_size_1_without_casts_trains_bitwise_like_the_unwrapped_module(fake):
    plain = All([name for name in PARTS if name != "odd"])  # its transposed weight becomes contiguous: other kernels
    model = data_parallel(copy.deepcopy(plain), fake(1))
    opts = adamw(plain), adamw(model)
    for _ in range(3):
        losses = [m(*batch()) for m in (plain, model)]
        assert torch.equal(*losses)
        for loss, opt in zip(losses, opts, strict=True):
            loss.sum().backward()
            opt.step()
            opt.zero_grad()
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(p, q._local_tensor)


# ------------------------------------------------------------------- a gathered weight is that of its moment and policy


CHANGES = dict(
    itself=lambda p: p.fill_(1.0), data=lambda p: p.data.add_(1.0), detached=lambda p: p.detach().mul_(2.0),
    shard=lambda p: p.to_local().add_(1.0), foreach=lambda p: torch._foreach_mul_([p], 2.0), none=lambda p: p.sum(),
)  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("change", CHANGES)
def test_a_parameter_that_a_graph_changes_is_gathered_again(fake, change):
    model, backend = data_parallel(Blocks(1), fake(2)), Graphs()

    @torch.no_grad()
    def twice(x):
        before = model(x)
        CHANGES[change](model.get_submodule("blocks.0.up")._parameters["bias"])
        return before + model(x)

    compiled(twice, backend)(torch.ones(2, 4, 8))
    gathers = 1 + (change != "none")  # the unit, and afterwards what has changed
    assert count(backend.forward[-1], COLLECTIVES[0]) == gathers


@pytest.mark.parametrize("call", [lambda fn: fn, compiled], ids=["eager", "compiled"])
def test_a_tied_weight_has_the_dtype_of_the_module_that_reads_it(fake, call):
    class Ends(nn.Module):
        def __init__(self):
            super().__init__()
            self.block, self.head = Blocks(1).get_submodule("blocks.0"), nn.Linear(8, 17, bias=False)
            self.head.weight = self.block.up.weight

        def forward(self, x):
            return self.block.up.bias.sum() * self.block.up.weight, self.head.weight * x

    model = Ends()
    data_parallel(model.block, fake(2), mp_policy=BF16)
    data_parallel(model, fake(2))
    assert [t.dtype for t in call(model)(torch.ones(()))] == [torch.bfloat16, torch.float32]


class Rows(nn.Module):
    def __init__(self, rows):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(rows))

    def forward(self, x):
        return x * self.weight


def test_parameters_with_equal_shards_and_other_shapes_do_not_share_compiled_code(fake):
    """Dynamo guards the shape of a DTensor's shard, not its own."""
    model = data_parallel(nn.ModuleList([Rows(6), Rows(5)]), fake(2))
    assert {each.weight.to_local().shape for each in model} == {torch.Size([3])}
    run = torch.compile(lambda each: each(torch.ones(())), backend="aot_eager", fullgraph=True)
    assert [run(each).shape for each in model] == [(6,), (5,)]
    assert data_parallel(Rows(6), fake(2)).__class__ is data_parallel(Rows(6), fake(2)).__class__
