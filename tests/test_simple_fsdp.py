"""simple_fsdp.py: eight properties that hold for any nn.Module under data_parallel(); each test is named after its own.

    pytest tests/test_simple_fsdp.py            # about 90 s on 2 cores; no GPU
    pytest tests/test_simple_fsdp.py -k property_8

Travels with simple_fsdp.py and harness.py. Values are compared on 2, 3 and 4 real gloo ranks, spawned once each and
only if a selected test needs them; counts come from torch's fake process group, in this process.
"""

import ast
import contextlib
import copy
import functools
import gc
import hashlib
import io
import logging
import pickle
import shutil
import sys
import tempfile
import warnings
import weakref
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from harness import spawn
from torch import nn
from torch._dynamo.backends.debugging import aot_eager, boxed_nop
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import simple_fsdp
from simple_fsdp import MixedPrecisionPolicy, data_parallel, describe, disable_data_parallel

BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)

# ------------------------------------------------------------------------------------------------------------ models
# Each part maps a batch (x [B, 4, 8] float, t [B, 4] int below 11) to the mean loss of its samples.


class Block(nn.Module):
    def __init__(self, width=8, hidden=17, remat=False):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.remat = remat

    def mlp(self, x):
        return self.down(F.gelu(self.up(self.norm(x))))

    def forward(self, x):
        return x + (checkpoint(self.mlp, x, use_reentrant=False) if self.remat else self.mlp(x))


class Blocks(nn.Module):
    def __init__(self, depth=3, **kwargs):
        super().__init__()
        self.blocks = nn.ModuleList([Block(**kwargs) for _ in range(depth)])

    def forward(self, x, t=None):
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.block, self.head = nn.Embedding(11, 8), Block(), nn.Linear(8, 11)
        self.head.weight = self.emb.weight

    def forward(self, x, t):
        logits = self.head(self.block(self.emb(t)))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), t[:, 1:].flatten())


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.base, self.last = nn.Linear(8, 8), nn.Linear(8, 7).requires_grad_(False), nn.Linear(7, 3)

    def forward(self, x, t):
        return self.last(torch.tanh(self.base(self.first(x)))).square().mean()


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.mha = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x, t):
        return (self.mha(x, x, x, need_weights=False)[0] - 1).square().mean()


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 13, dropout=0.0, batch_first=True)

    def forward(self, x, t):
        return (self.layer(x) * x).mean()


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(8, 5, num_layers=2, batch_first=True)

    def forward(self, x, t):
        return (self.lstm(x)[0] - 1).square().mean()


class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 5, 3, padding=1, bias=False), nn.BatchNorm2d(5), nn.ReLU(), nn.Conv2d(5, 2, (4, 8))
        )

    def forward(self, x, t):
        return (self.net(x.unsqueeze(1)).flatten(1) * x[:, 0, :2]).mean()


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8)
        self.again = self.lin

    def forward(self, x, t):
        return (self.lin(torch.tanh(self.again(x))) - x).square().mean()


class Lists(nn.Module):
    def __init__(self):
        super().__init__()
        self.chain = nn.ParameterList([torch.randn(8, 3), torch.randn(3, 7)])
        self.named = nn.ParameterDict({"bias": torch.randn(7), "scale": torch.randn(7)})

    def forward(self, x, t):
        for w in self.chain:
            x = torch.tanh(x @ w)
        return (x * self.named["scale"] + self.named["bias"]).square().mean()

    def reset_parameters(self):
        nn.init.normal_(self.chain[0], std=0.3)
        nn.init.trunc_normal_(self.chain[1], std=0.02)
        nn.init.uniform_(self.named["bias"])
        nn.init.ones_(self.named["scale"])


class Odd(nn.Module):
    """Scalar, empty, integer, boolean and transposed (not contiguous) parameters; one row for four ranks; a buffer."""

    def __init__(self):
        super().__init__()
        self.scale, self.empty = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.zeros(0, 4))
        self.row, self.wide = nn.Parameter(torch.randn(1, 8)), nn.Parameter(torch.randn(8, 6).t())
        self.index = nn.Parameter(torch.arange(6).flip(0), requires_grad=False)
        self.mask = nn.Parameter(torch.arange(6) % 3 > 0, requires_grad=False)
        self.register_buffer("offset", torch.full((6,), 0.5))

    def forward(self, x, t):
        y = ((x * self.row) @ self.wide.t())[..., self.index].masked_fill(~self.mask, 1.0)
        return self.scale * (y + self.offset).square().mean() + self.empty.sum()

    def reset_parameters(self):
        nn.init.constant_(self.scale, 1.5)
        nn.init.xavier_normal_(self.row)
        for p in (self.wide, self.index, self.mask, self.offset):
            nn.init.zeros_(p)
        with torch.no_grad():
            self.row.mul_(0.5).add_(torch.randn_like(self.row))


PARTS = dict(
    mlp=functools.partial(Blocks, 2), tied=Tied, frozen=Frozen, attention=Attention, encoder=Encoder, lstm=Recurrent,
    conv=Conv, twice=Twice, lists=Lists, odd=Odd,
)  # fmt: skip
COMPILED = [name for name in PARTS if name not in ("lstm", "encoder")]  # Dynamo breaks at RNNs; attention is enough
FEW = ["tied", "odd"]  # a compile of all of them takes 6 s and more


class All(nn.Module):
    """Every part side by side: one wrap and one compile for all of them."""

    def __init__(self, names=tuple(PARTS)):
        super().__init__()
        self.parts = nn.ModuleDict({name: PARTS[name]() for name in names})

    def forward(self, x, t):
        return torch.stack([part(x, t) for part in self.parts.values()])  # [parts]


def batch(samples=12, seed=7):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(samples, 4, 8, generator=g), torch.randint(11, (samples, 4), generator=g)


def slices(world, rank=None):
    parts = list(zip(*(t.chunk(world) for t in batch()), strict=True))
    return parts if rank is None else parts[rank]


def whole(t):
    """The whole value of a tensor (a collective, if it is sharded)."""
    return (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone()


def adamw(model):
    # eps: some gradients are zero but for rounding (a key's bias in attention), which Adam would blow up to +-lr.
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-4)


# ----------------------------------------------------------------------------------------- what a test can look at


def group_size(group):
    return (dist.distributed_c10d._resolve_process_group(group) if isinstance(group, str) else group).size()


class Comms(TorchDispatchMode):
    """Logs collectives: (name, elements put in, dtype, ranks). Enter it outside disable_data_parallel()."""

    def __init__(self):
        super().__init__()
        self.log = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # let DTensor turn it into local operations first
        name = func.name().split("::")[-1].split(".")[0]
        if func.namespace == "_c10d_functional" and name not in ("wait_tensor", "_wrap_tensor_autograd"):
            self.log.append((name, args[0].numel(), args[0].dtype, group_size(args[-1])))
        elif func.namespace == "c10d":
            self.log.append((name, None, None, None))
        return func(*args, **(kwargs or {}))

    def count(self, name):
        return sum(entry[0] == name for entry in self.log)


class Made(TorchDispatchMode):
    """Storages made inside it; bytes() counts those still alive, gathered() those that came out of an all-gather."""

    def __init__(self):
        super().__init__()
        self.old, self.made, self.from_gather = {}, {}, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        for t in tree_leaves((args, kwargs)):
            if type(t) in (torch.Tensor, nn.Parameter):
                ref = StorageWeakRef(t.untyped_storage())
                if ref.cdata not in self.made:
                    self.old[ref.cdata] = ref
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if type(t) in (torch.Tensor, nn.Parameter):
                ref = StorageWeakRef(t.untyped_storage())
                if ref.cdata not in self.old:
                    self.made[ref.cdata] = ref, t.untyped_storage().nbytes()
                    if "all_gather" in func.name():
                        self.from_gather.add(ref.cdata)
        return out

    def bytes(self):
        return sum(n for ref, n in self.made.values() if not ref.expired())

    def gathered(self):
        return sum(not self.made[cdata][0].expired() for cdata in self.from_gather)


@contextlib.contextmanager
def silence():
    """Collects what torch warns about or logs as a warning inside it."""
    said, original = [], logging.Logger.handle

    def handle(logger, record):
        if record.levelno >= logging.WARNING:
            said.append(f"{record.name}: {record.getMessage()}")
        else:
            original(logger, record)

    with warnings.catch_warnings(record=True) as caught, mock.patch.object(logging.Logger, "handle", handle):
        warnings.simplefilter("always")
        yield said
    said += [f"{w.category.__name__}: {w.message} ({w.filename}:{w.lineno})" for w in caught]


class Graphs:
    """A backend of torch.compile: as "aot_eager", and keeps the graphs."""

    def __init__(self):
        self.forward, self.backward = [], []

    def __call__(self, gm, example_inputs):
        def keep(graphs):
            return lambda gm, example_inputs: graphs.append(gm.graph) or boxed_nop(gm, example_inputs)

        return aot_eager(gm, example_inputs, fw_compiler=keep(self.forward), bw_compiler=keep(self.backward))


def count(graph, collective):
    return sum(node.target is getattr(torch.ops._c10d_functional, collective).default for node in graph.nodes)


def weights_kept(graph):
    """Outputs of a forward graph that are computed from gathered weights alone."""
    ops, derived = torch.ops._c10d_functional, set()
    for node in graph.nodes:
        gathered = node.target is ops.wait_tensor.default and node.args[0].target is ops.all_gather_into_tensor.default
        inputs = node.all_input_nodes
        if gathered or (node.op == "call_function" and inputs and derived.issuperset(inputs)):
            derived.add(node)
    return [node.name for node in graph.output_node().all_input_nodes if node in derived]


def compiled(fn, backend="aot_eager"):
    return torch.compile(fn, backend=backend, fullgraph=True)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def fake():
    """fake(world, rank=0) -> a mesh of `world` ranks of which this process plays one; replicas=n makes it 2-D."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    logging.getLogger("torch.__trace").propagate = False  # pytest would print thousands of empty lines with a failure

    def end():
        torch._dynamo.reset()  # compiled code holds process groups
        if dist.is_initialized():
            if dist.get_rank():
                _clear_sharding_prop_cache()  # it keeps local shapes, which are other ones on rank 0
            dist.destroy_process_group()

    def start(world, rank=0, replicas=None):
        end()
        if rank:
            _clear_sharding_prop_cache()
        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
        if replicas:
            return init_device_mesh("cpu", (replicas, world // replicas), mesh_dim_names=("replicate", "shard"))
        return init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))

    yield start
    end()


# --------------------------------------------------------------------------------- checks that run on real gloo ranks


def two_d(mesh):
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def equivalence(mesh, mode, compile, names=tuple(PARTS), steps=3, **kwargs):
    """Trains All on this rank's slice, and in one process on every slice: {part: largest difference of ...}."""
    world, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(3)
    reference = All(names)
    model = data_parallel(copy.deepcopy(reference), mesh, mode, **kwargs)
    forward = compiled(model) if compile else model
    # batch norm sees one slice at a time: each slice has its own running statistics, as each rank has
    buffers = [{k: v.clone() for k, v in reference.named_buffers()} for _ in range(world)]
    opt, opt_reference, losses = adamw(model), adamw(reference), []
    with silence() as said:
        for _ in range(steps):
            loss = forward(*slices(world, rank))
            loss.sum().backward()
            opt.step()
            opt.zero_grad()
            dist.all_reduce(loss := loss.detach() / world)
            parts = [torch.func.functional_call(reference, b, s) for b, s in zip(buffers, slices(world), strict=True)]
            expected = torch.stack(parts).mean(0)
            expected.sum().backward()
            opt_reference.step()
            opt_reference.zero_grad()
            losses.append((loss - expected).abs())
    out = {name: dict(loss=d) for name, d in zip(names, torch.stack(losses).amax(0).tolist(), strict=True)}
    ours = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, p in {**dict(reference.named_parameters()), **buffers[rank]}.items():
        q, p = whole(ours[name]), p.detach()
        assert (q.dtype, q.shape) == (p.dtype, p.shape), name
        difference = (q.double() - p.double()).abs().max().item() if p.numel() else 0.0
        out[name.split(".")[1]][name] = difference
    return out, said


def equal_eager(mesh):
    return equivalence(mesh, "fully_shard", False)


def equal_compiled(mesh):
    return equivalence(mesh, "fully_shard", True, COMPILED if dist.get_world_size() == 2 else FEW)


def equal_replicate_eager(mesh):
    return equivalence(mesh, "replicate", False)


def equal_replicate_compiled(mesh):
    return equivalence(mesh, "replicate", True, FEW)


def equal_no_reshard_eager(mesh):
    return equivalence(mesh, "fully_shard", False, reshard_after_forward=False)


def equal_no_reshard_compiled(mesh):
    return equivalence(mesh, "fully_shard", True, FEW, reshard_after_forward=False)


def equal_min_bytes_eager(mesh):
    return equivalence(mesh, "fully_shard", False, min_bytes=200)


def equal_hybrid_eager(mesh):
    return equivalence(two_d(mesh), "hybrid_shard", False)


def equal_hybrid_compiled(mesh):
    return equivalence(two_d(mesh), "hybrid_shard", True, FEW)


def fsdp2_bitwise(mesh):
    """20 AdamW steps beside torch's fully_shard: what differs, by step and name (nothing should)."""
    torch.manual_seed(5)
    ours = nn.Sequential(Encoder().layer, *Blocks().blocks)
    theirs = copy.deepcopy(ours)
    data_parallel(ours, mesh)
    for layer in theirs:
        fully_shard(layer, mesh=mesh)
    fully_shard(theirs, mesh=mesh)
    opts, differ = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (ours, theirs)], []
    for step in range(20):
        x, t = (part.chunk(2)[mesh.get_rank()] for part in batch(seed=step))
        losses = []
        for model, opt in zip((ours, theirs), opts, strict=True):
            losses.append(F.cross_entropy(model(x).flatten(0, 1), t.flatten() % 8))
            losses[-1].backward()
            opt.step()
            opt.zero_grad()
        if not torch.equal(*losses):
            differ.append((step, "loss", (losses[0] - losses[1]).item()))
        for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            p, q = p._local_tensor, q.to_local()
            if p.shape != q.shape or not torch.equal(p, q):
                differ.append((step, name, (p - q).abs().max().item()))
    return differ


def inductor(mesh):
    """Largest relative difference between eager and torch.compile as users call it, in loss and gradients."""
    torch.manual_seed(5)
    models = [data_parallel(Block(), mesh)]
    models.append(copy.deepcopy(models[0]))
    with torch._inductor.config.patch(fx_graph_cache=False), torch._functorch.config.patch(enable_autograd_cache=False):
        calls = models[0], compiled(models[1], "inductor")
        losses = [call(slices(2, mesh.get_rank())[0]).square().mean() for call in calls]
        for loss in losses:
            loss.backward()
    grads = zip(*([p.grad.to_local() for p in model.parameters()] for model in models), strict=True)
    return max(((a - b).abs().max() / a.abs().max()).item() for a, b in [losses, *grads])


def gradients(mesh):
    """Rank-dependent inputs, every policy: is each gradient, bit for bit, the mean of the ranks' own gradients?"""
    torch.manual_seed(5)
    inputs, plain, wrong, low = torch.randn(2, 6, 8), nn.Linear(8, 5), [], torch.bfloat16
    for mode in ("fully_shard", "replicate"):
        for param, reduce in ((None, None), (low, None), (low, torch.float32), (None, low)):
            model = data_parallel(copy.deepcopy(plain), mesh, mode, MixedPrecisionPolicy(param, reduce))
            compute = param or torch.float32
            y = model(inputs[mesh.get_rank()].to(compute))
            y.sum().backward()
            per_rank = []
            for rank, x in enumerate(inputs.to(compute)):
                one = copy.deepcopy(plain).to(compute)
                expected = one(x)
                expected.sum().backward()
                per_rank.append([p.grad.to(reduce or compute) for p in one.parameters()])
                if rank == mesh.get_rank() and not torch.equal(y, expected):
                    wrong.append((mode, param, reduce, "forward"))
            for (name, p), a, b in zip(model.named_parameters(), *per_rank, strict=True):
                mean = ((a + b) / 2).float()  # exact but for one rounding, to the dtype of the reduction
                placement = Replicate() if mode == "replicate" else Shard(0)
                if (p.grad.dtype, p.grad.placements) != (torch.float32, (placement,)):
                    wrong.append((mode, param, reduce, name, p.grad.dtype, p.grad.placements))
                if not torch.equal(whole(p.grad), mean):
                    wrong.append((mode, param, reduce, name, (whole(p.grad) - mean).abs().max().item()))
                if torch.allclose(mean, (a + b).float()):
                    wrong.append((mode, name, "the test cannot tell a mean from a sum"))
    return [str(w) for w in wrong]


class Phase(nn.Module):
    """A complex weight, used as it is, conjugated, and seen as real numbers."""

    def __init__(self, use):
        super().__init__()
        self.use, self.w = use, nn.Parameter(torch.randn(5, 8, dtype=torch.complex64))

    def forward(self, z):
        if self.use == "real":
            return (torch.view_as_real(self.w) * torch.view_as_real(z) ** 2).sum()
        return ((self.w.conj() if self.use == "conj" else self.w) * z).abs().square().sum()


def complex_weights(mesh):
    """Largest difference to one process in the gradients of a complex weight and of its input."""
    out = {}
    for use in ("plain", "conj", "real"):
        torch.manual_seed(5)
        plain, z = Phase(use), torch.randn(5, 8, dtype=torch.complex64)
        model, inputs = data_parallel(copy.deepcopy(plain), mesh), [z.clone().requires_grad_() for _ in range(2)]
        try:
            for m, x in zip((plain, model), inputs, strict=True):
                m(x).backward()
            pairs = [(plain.w.grad, whole(model._parameters["w"].grad)), [x.grad for x in inputs]]
            out[use] = max((a - b).abs().max().item() for a, b in pairs)
        except RuntimeError as e:
            out[use] = str(e)
    return out


def from_rank_0(mesh):
    torch.manual_seed(mesh.get_rank())  # every rank builds another model
    model = data_parallel(Tied(), mesh)
    values = {name: whole(p) for name, p in model.named_parameters()}
    torch.manual_seed(0)
    return [name for name, p in Tied().named_parameters() if not torch.equal(p, values[name])]


def checkpoints(mesh):
    """Saves with torch.distributed.checkpoint, loads into a model of another seed: names whose values differ."""
    folder = [tempfile.mkdtemp() if mesh.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    models = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        models.append(data_parallel(All(["tied", "frozen", "encoder", "odd"]), mesh))
        opt = adamw(models[-1])
        models[-1](*slices(2, mesh.get_rank())).sum().backward()
        opt.step()
        with disable_data_parallel():
            models[-1].optimizer = dcp_state.get_optimizer_state_dict(models[-1], opt)
    saved, loaded = ({"model": m.state_dict(), "optimizer": m.optimizer} for m in models)
    dcp.save(saved, checkpoint_id=folder[0])
    dcp.load(loaded, checkpoint_id=folder[0])
    dist.barrier()
    if mesh.get_rank() == 0:
        shutil.rmtree(folder[0])
    differ = [name for name, p in saved["model"].items() if not torch.equal(whole(p), whole(loaded["model"][name]))]
    moments = zip(tree_leaves(saved["optimizer"]), tree_leaves(loaded["optimizer"]), strict=True)
    differ += ["optimizer" for a, b in moments if isinstance(a, torch.Tensor) and not torch.equal(whole(a), whole(b))]
    live = zip(*(m.parameters() for m in models), strict=True)  # loading wrote into the model itself
    return differ + ["live" for p, q in live if not torch.equal(p._local_tensor, q._local_tensor)]


def copies(mesh):
    """A deepcopy and an unpickled model train exactly as the original and share nothing with it: what is wrong."""
    wrong, inputs = [], slices(2, mesh.get_rank())
    for name, make in PARTS.items():
        for when in ("new", "used"):
            torch.manual_seed(5)
            policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
            models = {"original": data_parallel(make(), mesh, mp_policy=policy)}
            if when == "used":
                models["original"](*inputs).backward()
                models["original"].zero_grad()
            for how, make_copy in dict(deepcopy=copy.deepcopy, pickle=lambda m: pickle.loads(pickle.dumps(m))).items():
                try:
                    models[how] = make_copy(models["original"])
                except Exception as e:
                    wrong.append((name, when, how, str(e)[:100]))
            states = {}
            for how, model in reversed(models.items()):  # the original last: training a copy must not have changed it
                opt = adamw(model)
                model(*inputs).backward()
                opt.step()
                states[how] = [p._local_tensor.clone() for p in model.parameters()], list(map(type, model.modules()))
            for how, (values, classes) in states.items():
                expected = states["original"]
                if classes != expected[1] or not all(map(torch.equal, values, expected[0])):
                    wrong.append((name, when, how, "differs after a step"))
    return wrong


def initialise(model):
    for module in model.modules():
        for name in ("reset_parameters", "_reset_parameters"):
            if hasattr(module, name):
                getattr(module, name)()


def digest(state):
    data = b"".join(name.encode() + whole(p).contiguous().view(-1).numpy().tobytes() for name, p in state)
    return hashlib.sha256(data).hexdigest()


def meta_first(mesh, mode="fully_shard"):
    """All, initialised after wrapping on the meta device; without a mesh: initialised as usual (to_empty unties)."""
    with torch.device("cpu" if mesh is None else "meta"):
        model = All()
    if mesh is not None:
        data_parallel(model, mesh, mode).to_empty(device="cpu")
    torch.manual_seed(11)
    with disable_data_parallel():
        initialise(model)
    return model


def initial(mesh):
    model = meta_first(mesh)
    out = [digest([*model.named_parameters(), *model.named_buffers()])]
    if dist.get_world_size() == 4:
        model = meta_first(two_d(mesh), "hybrid_shard")
        out.append(digest([*model.named_parameters(), *model.named_buffers()]))
    return out


def orthogonal(mesh):
    """Whether it is "equal" to one process, "refused" or "wrong": its QR communicates, so only real ranks can tell."""
    out = {}
    for shape in ((10, 7), (6, 6), (5, 14)):
        try:
            shard = init_one(nn.init.orthogonal_, shape, mesh)
            out[shape] = "equal" if torch.equal(whole(shard), init_one(nn.init.orthogonal_, shape)) else "wrong"
        except (RuntimeError, NotImplementedError):
            out[shape] = "refused"
    return out


CHECKS = {
    2: [equal_eager, equal_compiled, equal_replicate_eager, equal_replicate_compiled, equal_no_reshard_eager,
        equal_no_reshard_compiled, fsdp2_bitwise, gradients, complex_weights, from_rank_0, checkpoints, copies, initial,
        inductor],
    3: [equal_eager, equal_compiled, equal_min_bytes_eager, initial, orthogonal],
    4: [equal_hybrid_eager, equal_hybrid_compiled, initial],
}  # fmt: skip


@pytest.fixture(scope="module")
def ranks():
    """ranks(world) -> results of CHECKS[world], which run at the first call."""
    done = {}

    def results(world):
        if world not in done:
            try:
                done[world] = spawn(world, CHECKS[world], timeout=240)
            except Exception as e:  # once is enough
                done[world] = e
        if isinstance(done[world], Exception):
            raise done[world]
        return done[world]

    return results


# ------------------------------------------------------------------------------------- equivalence with one process

EQUAL = [(world, check.__name__) for world, checks in CHECKS.items() for check in checks if "equal_" in check.__name__]


@pytest.mark.parametrize("world, check", EQUAL)
def test_training_equals_one_process(ranks, world, check):
    for rank, (parts, _) in enumerate(ranks(world)[check]):
        for part, differences in parts.items():
            for name, difference in differences.items():
                # the mean over 3 or 4 ranks is rounded in another order than the sum over the slices
                assert difference <= 2e-6, f"rank {rank}: {part}: {name} differs by {difference}"


@pytest.mark.parametrize("world, check", EQUAL)
def test_training_makes_torch_warn_of_nothing(ranks, world, check):
    for _, said in ranks(world)[check]:
        if check == "equal_no_reshard_compiled":
            said = [line for line in said if "context_fn is passed to torch.utils.checkpoint" not in line]
        assert not said


def test_training_is_bitwise_that_of_fully_shard_over_20_steps(ranks):
    assert ranks(2)["fsdp2_bitwise"] == [[], []]


def test_training_under_inductor_equals_eager(ranks):
    assert max(ranks(2)["inductor"]) < 2e-6  # fused kernels round in another order


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


def test_property_1_distributed_checkpoint_saves_and_loads_it(ranks):
    assert ranks(2)["checkpoints"] == [[], []]


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


def test_property_2_gradients_are_the_mean_over_the_ranks_in_the_stored_dtype(ranks):
    assert ranks(2)["gradients"] == [[], []]


def test_property_2_values_are_those_of_rank_0(ranks):
    assert ranks(2)["from_rank_0"] == [[], []]


@pytest.mark.parametrize("use", ["plain", "conj", "real"])
def test_property_2_complex_weights_have_the_gradients_of_one_process(ranks, use):
    for result in ranks(2)["complex_weights"]:
        assert result[use] == 0.0


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
    assert comms.count("reduce_scatter_tensor") == 4


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
    assert type(model.blocks[0]) is type(model.blocks[1])
    assert type(model.blocks[0].up) is type(model.blocks[2].down)
    assert type(data_parallel(nn.Linear(2, 2), fake(4), mp_policy=BF16)) is type(model.blocks[0].up)


def test_property_3_every_parameter_has_its_own_reader(fake):
    model = data_parallel(nn.Linear(8, 4), fake(1))
    with torch.no_grad():
        model._parameters["weight"].fill_(1)
        model._parameters["bias"].fill_(2)
    assert torch.equal(model.weight, torch.ones(4, 8)) and torch.equal(model.bias, torch.full((4,), 2.0))


def policies(mesh):
    """Four models of one class, each with the dtype it computes in and the collectives of its forward and backward."""
    return [
        (data_parallel(Block(), mesh["shard"], mp_policy=BF16), torch.bfloat16, [6, 6, 0]),
        (data_parallel(Block(), mesh["replicate"], "replicate"), torch.float32, [0, 0, 6]),
        (data_parallel(Block(), mesh, "hybrid_shard", MixedPrecisionPolicy(torch.float64)), torch.float64, [6, 6, 6]),
        (data_parallel(Block(hidden=18), mesh["shard"], mp_policy=MixedPrecisionPolicy(torch.float16)), torch.float16,
         [6, 6, 0]),
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
            assert [count(forward, COLLECTIVES[0]), *(count(backward, name) for name in COLLECTIVES[1:])] == collectives


def test_property_3_deepcopy_and_pickle_train_like_the_original(ranks):
    assert ranks(2)["copies"] == [[], []]


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
    up = model.blocks[2].up
    up.weight = nn.Parameter(distribute_tensor(up.weight.detach(), mesh, [Shard(0)]))
    return model


def scripted():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        return torch.jit.script(nn.Linear(3, 3))


def wrapped_inside(mesh):
    model = Blocks()
    data_parallel(model.blocks[2].up, mesh)
    return model


def after_linear(make):
    return lambda mesh: nn.Sequential(nn.Linear(3, 3), make())


def blocks(mesh):
    return Blocks()


REFUSED = dict(
    second_wrap=(lambda mesh: data_parallel(Blocks(), mesh["shard"]), {}, "wrapped already"),
    wrapped_inside=(lambda mesh: wrapped_inside(mesh["shard"]), {}, r"blocks\.2\.up.*wrapped already"),
    dtensor=(lambda mesh: with_dtensor(mesh["shard"]), {}, r"blocks\.2\.up\.weight.*DTensor"),
    mode=(blocks, dict(mode="zero3"), "zero3.*replicate, fully_shard, hybrid_shard"),
    mesh_2d=(blocks, dict(mesh="2-D"), "fully_shard.*1-D.*2-D"),
    mesh_2d_replicate=(blocks, dict(mesh="2-D", mode="replicate"), "replicate.*1-D.*2-D"),
    mesh_1d=(blocks, dict(mode="hybrid_shard"), "hybrid_shard.*2-D.*1-D"),
    mesh_without_names=(blocks, dict(mesh="unnamed", mode="hybrid_shard"), "hybrid_shard.*mesh_dim_names"),
    sparse=(after_linear(lambda: nn.Embedding(4, 3, sparse=True)), {}, r"1\.weight.*sparse"),
    sparse_bag=(after_linear(lambda: nn.EmbeddingBag(4, 3, sparse=True)), {}, r"1\.weight.*sparse"),
    lazy=(after_linear(lambda: nn.LazyLinear(4)), {}, r"1\.weight.*no shape"),
    script=(after_linear(scripted), {}, r"shard 1\b.*ScriptModule"),
    script_root=(lambda mesh: scripted(), {}, "ScriptModule"),
)


@pytest.mark.parametrize("case", REFUSED)
def test_property_4_what_cannot_work_is_one_value_error_and_changes_nothing(fake, case):
    make, kwargs, message = REFUSED[case]
    mesh = fake(4, replicas=2)
    meshes = {"1-D": mesh["shard"], "2-D": mesh, "unnamed": torch.distributed.DeviceMesh("cpu", [[0, 1], [2, 3]])}
    model = make(mesh)

    def look():
        parameters = [[(name, id(p)) for name, p in m._parameters.items()] for m in model.modules()]
        return parameters, [(type(m), "_data_parallel" in vars(m)) for m in model.modules()]

    before = look()
    with pytest.raises(ValueError, match=message), Comms() as comms:
        data_parallel(model, meshes[kwargs.get("mesh", "1-D")], kwargs.get("mode", "fully_shard"))
    assert look() == before and comms.log == []


# ----------------------------------------------------------------------------------------------------- 5: meta first


def test_property_5_initial_values_do_not_depend_on_the_world_size(ranks):
    one = meta_first(None)
    expected = digest([*one.named_parameters(), *one.named_buffers()])
    for world in (2, 3, 4):
        for rank in ranks(world)["initial"]:
            assert set(rank) == {expected}, f"world size {world}"


INITS = dict(
    kaiming_uniform=nn.init.kaiming_uniform_, kaiming_normal=nn.init.kaiming_normal_, normal=nn.init.normal_,
    uniform=nn.init.uniform_, trunc_normal=functools.partial(nn.init.trunc_normal_, std=0.02, b=0.03),
    xavier_uniform=nn.init.xavier_uniform_, xavier_normal=nn.init.xavier_normal_, ones=nn.init.ones_,
    constant=lambda w: nn.init.constant_(w, 0.3), bernoulli=lambda w: w.data.bernoulli_(0.3),
    generator=lambda w: nn.init.normal_(w, generator=torch.Generator().manual_seed(3)),
    randn_like=lambda w: w.data.copy_(torch.randn_like(w) * 0.1), rand_like=lambda w: w.data.copy_(torch.rand_like(w)),
    randint_like=lambda w: w.data.copy_(torch.randint_like(w, 9)), twice=lambda w: nn.init.normal_(nn.init.uniform_(w)),
)  # fmt: skip
# What writes through views of dimension 0, or is no DTensor operation: right or refused, never silently wrong.
HARD = dict(
    eye=nn.init.eye_, sparse=lambda w: nn.init.sparse_(nn.init.zeros_(w), 0.5),
    row=lambda w: nn.init.ones_(w).data[3].fill_(0),
    dirac=lambda w: nn.init.dirac_(nn.init.ones_(w).unsqueeze(-1)),
    rows=lambda w: nn.init.ones_(w).data[1:3].fill_(0), slice=lambda w: nn.init.ones_(w).data[:, 2:].normal_(),
    chunks=lambda w: [chunk.fill_(i) for i, chunk in enumerate(w.data.chunk(2))],
    bernoulli_of=lambda w: w.data.copy_(torch.bernoulli(w.data.fill_(0.5))),
    normal_of=lambda w: w.data.copy_(torch.normal(w.data.fill_(0.5), 1.0)),
)  # fmt: skip


def init_one(init, shape, mesh=None):
    """A parameter of `shape`, wrapped on the meta device and then initialised with `init`."""
    model = nn.Module()
    model.w = nn.Parameter(torch.empty(shape, device="meta"))
    if mesh is not None:
        data_parallel(model, mesh)
    model.to_empty(device="cpu")
    torch.manual_seed(3)
    with disable_data_parallel():
        init(model.w)
    return model._parameters["w"].detach()


@pytest.mark.parametrize("init", INITS)
def test_property_5_every_init_draws_the_whole_tensor(fake, init):
    expected = init_one(INITS[init], (5, 7))
    for world in (1, 2, 3, 4):
        with Comms() as comms:
            shards = [init_one(INITS[init], (5, 7), fake(world, rank))._local_tensor for rank in range(world)]
        assert torch.equal(torch.cat(shards), expected), f"world size {world}"
        assert comms.log == []


def test_property_5_orthogonal_is_right_or_refused(ranks):
    for rank in ranks(3)["orthogonal"]:
        assert "wrong" not in rank.values() and rank[10, 7] == rank[6, 6] == "equal"


@pytest.mark.parametrize("init", HARD)
def test_property_5_an_init_that_cannot_be_sharded_is_refused_and_not_silently_wrong(fake, init):
    # one rank is the yardstick: a slice of a plain tensor is drawn in another order than a contiguous one
    results = []
    for world in (1, 3):
        shards = []
        for rank in range(world):
            with contextlib.suppress(RuntimeError, NotImplementedError):
                shards.append(init_one(HARD[init], (10, 7), fake(world, rank))._local_tensor)
        assert len(shards) in (0, world)
        results.append(torch.cat(shards) if shards else None)
    assert results[1] is None or torch.equal(*results)


def test_property_5_reset_parameters_of_an_embedding_zeroes_its_padding_row_or_says_that_it_cannot(fake):
    with torch.device("meta"):
        model = data_parallel(nn.Embedding(8, 3, padding_idx=5), fake(4, rank=2)).to_empty(device="cpu")
    with Comms() as comms, disable_data_parallel():
        try:
            model.reset_parameters()
        except RuntimeError as e:
            assert "as a whole" in str(e)  # an error of ours, not an accident
            return
    assert comms.log == []
    assert model._parameters["weight"]._local_tensor[1].eq(0).all()


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
    with Comms() as comms:
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
        ("low", (2, 5), torch.bfloat16, "Shard(dim=0)", (0, 5), 0),
        ("scale", (), torch.float32, "Replicate()", (), 4),
        ("a.weight", (7, 3), torch.float32, "Shard(dim=0)", (1, 3), 12),
        ("a.bias", (7,), torch.float32, "Shard(dim=0)", (1,), 4),
    ]
    assert rows[0]._fields == ("name", "shape", "dtype", "placement", "local_shape", "local_bytes")
    hybrid = describe(data_parallel(nn.Linear(3, 7, bias=False), fake(4, replicas=2), "hybrid_shard"))
    assert hybrid == [("weight", (7, 3), torch.float32, "Shard(dim=0)", (4, 3), 48)]
    assert describe(nn.Linear(2, 2, bias=False)) == [("weight", (2, 2), torch.float32, "-", (2, 2), 16)]


# ------------------------------------------------------------------------------- 8: frames, gathers, gathered weights


@pytest.mark.parametrize("depth", [4, 12, 24])
def test_property_8_compiled_frames_do_not_grow_with_depth(fake, depth):
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    model = data_parallel(Blocks(depth), fake(4), mp_policy=BF16)
    for block in model.blocks:
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
    linear=(lambda: nn.Linear(8, 8), lambda m, x: m(x), 2),
    lstm=(lambda: nn.LSTM(8, 8, 2), lambda m, x: m(x)[0], 8),
    attention=(lambda: nn.MultiheadAttention(8, 2), lambda m, x: m(x, x, x)[0], 4),
    encoder=(lambda: nn.TransformerEncoderLayer(8, 2, 16), lambda m, x: m(x), 12),
    list=(lambda: nn.ParameterList([torch.randn(8, 8)] * 2), lambda m, x: x @ m[0] @ m[1], 2),
    twice=(Twice, lambda m, x: m(x, None), 4),  # two calls of one module with two parameters
)  # fmt: skip


@pytest.mark.parametrize("mode", ["train", "eval", "no_grad", "inference"])
@pytest.mark.parametrize("case", GATHERS)
def test_property_8_eager_gathers_once_per_parameter_and_module_call(fake, case, mode):
    make, call, gathers = GATHERS[case]
    model, x = data_parallel(make(), fake(4)).train(mode == "train"), torch.randn(4, 3, 8)
    context = {"no_grad": torch.no_grad, "inference": torch.inference_mode}.get(mode, contextlib.nullcontext)
    for _ in range(2):
        with Comms() as comms, context():
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


@pytest.mark.parametrize("context", [contextlib.nullcontext, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("make", [functools.partial(Block, hidden=16), Fused])
def test_property_8_eager_frees_the_weights_of_a_module_when_its_forward_ends(fake, make, context):
    model, alive = data_parallel(nn.Sequential(*[make() for _ in range(4)]), fake(4)), []
    with Made() as made, context():
        for module in model:
            module.register_forward_pre_hook(lambda *_: alive.append(made.gathered()))
        model(torch.randn(3, 8))
    assert alive == [0] * 4


def step(model, *inputs):
    """Collectives of one eager forward and of its backward."""
    with Comms() as forward:
        loss = model(*inputs)
    with Comms() as backward:
        loss.backward()
    return forward, backward


@pytest.mark.parametrize("remat", [False, True])
def test_property_8_eager_gathers_again_in_backward_only_what_backward_needs_and_only_if_asked(fake, remat):
    inputs, reshard = batch(3), data_parallel(Blocks(remat=remat), fake(4))
    forward, backward = step(reshard, *inputs)
    assert forward.count("all_gather_into_tensor") == 18
    # both of norm, up and down of three blocks; a checkpointed block reads all its six parameters again
    assert backward.count("all_gather_into_tensor") == (18 if remat else 12)
    assert backward.count("reduce_scatter_tensor") == 18
    keep = data_parallel(Blocks(remat=remat), fake(4), reshard_after_forward=False)
    forward, backward = step(keep, *inputs)
    assert forward.count("all_gather_into_tensor") == 18
    assert backward.count("all_gather_into_tensor") == (18 if remat else 0)  # eager checkpoints keep nothing


@pytest.mark.parametrize("whole, remat, mesh", [
    (True, False, "uneven"), (True, True, "hybrid"), (True, True, "even"), (False, False, "hybrid"),
    (False, True, "uneven"),
])  # fmt: skip
def test_property_8_compiled_backward_gathers_again_and_forward_keeps_no_weight(fake, whole, remat, mesh):
    mesh = dict(even=lambda: fake(2), uneven=lambda: fake(3), hybrid=lambda: fake(6, replicas=2))[mesh]()
    mode = "hybrid_shard" if mesh.ndim == 2 else "fully_shard"
    x = torch.randn(3, 4, 8, dtype=torch.bfloat16, requires_grad=True)
    depth = 2 if whole else 1  # in a graph
    for reshard in (True, False):
        torch._dynamo.reset()
        model = data_parallel(Blocks(2, remat=remat, hidden=18), mesh, mode, BF16, reshard_after_forward=reshard)
        backend = Graphs()
        for module in [model] if whole else model.blocks:
            module.compile(backend=backend, fullgraph=True)
        model(x).backward()
        (forward,), (backward,) = backend.forward, backend.backward
        assert count(forward, "all_gather_into_tensor") == 6 * depth
        assert count(backward, "reduce_scatter_tensor") == 6 * depth
        gathers = count(backward, "all_gather_into_tensor")
        if reshard:
            assert weights_kept(forward) == []
            # norm (its kernel asks for the bias too), up and down; and up's bias where gelu's input is made again
            assert gathers == (5 if remat else 4) * depth
        else:
            assert len(weights_kept(forward)) >= 3 * depth and gathers == 0


def test_property_8_compiled_replicate_and_one_rank_keep_nothing_either(fake):
    for mesh, mode in ((fake(4), "replicate"), (fake(1), "fully_shard")):
        torch._dynamo.reset()
        model, backend = data_parallel(Blocks(), mesh, mode, BF16), Graphs()
        compiled(model, backend)(torch.randn(3, 4, 8, dtype=torch.bfloat16)).backward()
        (forward,) = backend.forward
        casts = [node for node in forward.nodes if node.target is torch.ops.prims.convert_element_type.default]
        casts += [node for node in forward.nodes if node.target is torch.ops.aten._to_copy.default]
        from_parameter = {node for node in casts if node.all_input_nodes[0].op == "placeholder"}
        assert len(from_parameter) == 18 and not from_parameter & set(forward.output_node().all_input_nodes)


# -------------------------------------------------------------------------------------------------- errors and scopes


def assert_clean(model):
    """No scope is left open: a parameter that is read twice outside any forward is gathered twice; no hook is left."""
    with Comms() as comms:
        assert model.weight is not model.weight
    assert comms.count("all_gather_into_tensor") == 2
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


CHANGES = dict(
    mul=lambda m: m[1]._parameters["weight"].mul_(2), local=lambda m: m[1]._parameters["weight"].to_local().mul_(2),
    load_state_dict=lambda m: m.load_state_dict(m.state_dict()),
    # DTensor's foreach and fused steps, alas, count no version
    optimizer=lambda m: torch.optim.SGD(m.parameters(), foreach=False, weight_decay=0.1).step(),
)  # fmt: skip


@pytest.mark.parametrize("how", CHANGES)
def test_a_parameter_that_changes_in_place_between_forward_and_backward_is_an_error(fake, how):
    # not on one rank without a cast: there the gathered weight is the parameter, whose changes DTensor does not count
    for world, policy in ((4, MixedPrecisionPolicy()), (4, BF16), (1, BF16)):
        model = data_parallel(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), fake(world), mp_policy=policy)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        loss = model(torch.randn(3, 8, dtype=policy.param_dtype)).sum()
        with torch.no_grad():
            CHANGES[how](model)
        with pytest.raises(RuntimeError, match="between its forward and its backward"):
            loss.backward()


def test_an_attribute_error_while_gathering_is_a_runtime_error_and_never_hands_out_the_shard(fake):
    model = data_parallel(nn.Linear(8, 8), fake(4))
    del model._data_parallel
    with pytest.raises(RuntimeError, match="weight.*Linear"):
        _ = model.weight
    with pytest.raises(RuntimeError, match="Linear"):
        model(torch.randn(3, 8))


def test_an_error_in_forward_leaves_no_scope_and_no_hook_behind(fake):
    model = data_parallel(nn.Sequential(nn.Linear(8, 8), Block(), nn.Linear(8, 8)), fake(4))
    for _ in range(2):
        with pytest.raises(RuntimeError):
            model(torch.randn(3, 7))
        model[2].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(torch.randn(3, 8))
        model[2]._forward_pre_hooks.clear()
        assert_clean(model[0])
    model(torch.randn(3, 8)).sum().backward()


def test_where_saved_tensor_hooks_are_forbidden_forward_leaves_no_scope_behind(fake):
    model = data_parallel(nn.Linear(8, 8), fake(4))
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"), contextlib.suppress(RuntimeError):
        model(torch.randn(3, 8))
    assert_clean(model)


def test_other_saved_tensor_hooks_stay_in_charge(fake):
    model, seen = data_parallel(Blocks(), fake(4)), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):
        model(*batch(3)).backward()
    assert len(seen) > 9 and all(p.grad is not None for p in model.parameters())


def test_disable_data_parallel_is_reentrant_and_ends_with_an_error_too(fake):
    model = data_parallel(nn.Linear(8, 8), fake(4))
    with disable_data_parallel():
        assert isinstance(model.weight, DTensor) and model.weight is model._parameters["weight"]
        with disable_data_parallel():
            assert isinstance(model.weight, DTensor)
        assert isinstance(model.weight, DTensor)
        with contextlib.suppress(ZeroDivisionError), disable_data_parallel():
            raise ZeroDivisionError
        assert isinstance(model.weight, DTensor)
        repr(model)
        assert isinstance(model.weight, DTensor)
    assert not isinstance(model.weight, DTensor)


def test_nothing_we_do_makes_torch_warn(fake):
    mesh = fake(4)
    with silence() as said:
        model = meta_first(mesh)
        model(*batch(3)).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        copy.deepcopy(model.parts["mlp"]).load_state_dict(model.parts["mlp"].state_dict())
        assert repr(model) and describe(model)
    assert not said


# ------------------------------------------------------------------------------------------------------ the file itself

SOURCE = Path(simple_fsdp.__file__).read_text()
# Every private name of torch that the file uses, and where it lives.
PRIVATE = {
    "torch._C": lambda: torch._C,
    "torch._C._autograd": lambda: torch._C._autograd,
    "_autograd._top_saved_tensors_default_hooks": lambda: torch._C._autograd._top_saved_tensors_default_hooks(True),
    "torch.utils._python_dispatch": lambda: torch.utils._python_dispatch.TorchDispatchMode,
    "torch.ops._c10d_functional": lambda: torch.ops._c10d_functional.wait_tensor.default,
    "Module._parameters": lambda: nn.Linear(1, 1)._parameters["weight"],
    "Tensor._version": lambda: torch.empty(0)._version,
    "UntypedStorage._cdata": lambda: torch.empty(0).untyped_storage()._cdata,
    "OpOverload._schema": lambda: torch.ops.aten.normal_.default._schema.name,
    "DTensor._local_tensor": lambda: DTensor._local_tensor,
    "RNNBase._flat_weights_names": lambda: nn.LSTM(1, 1)._flat_weights_names,
}  # fmt: skip
OWN = {"_sharded", "_data_parallel"}  # what it hangs on a storage and on a module


@pytest.mark.parametrize("name", PRIVATE)
def test_the_private_names_of_torch_still_exist(name):
    PRIVATE[name]()


def test_the_list_of_private_names_is_complete():
    tree = ast.parse(SOURCE)
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    used |= {part for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for part in node.module.split(".")}
    own = OWN | {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    private = {name for name in used if name.startswith("_") and not name.endswith("__")} - own
    assert private == {name.split(".")[-1] for name in PRIVATE if "." in name}


def test_the_file_imports_only_torch_and_the_standard_library():
    modules = set()
    for node in ast.walk(ast.parse(SOURCE)):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            modules.add(node.module)
    assert {name.split(".")[0] for name in modules} - set(sys.stdlib_module_names) == {"torch"}


def test_the_file_has_at_most_250_lines():
    assert len(SOURCE.splitlines()) <= 250


def test_the_file_does_nothing_at_import():
    allowed = ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef | ast.Assign
    docstring, *statements = ast.parse(SOURCE).body
    assert isinstance(docstring.value, ast.Constant)
    assert [ast.unparse(s) for s in statements if not isinstance(s, allowed)] == []
