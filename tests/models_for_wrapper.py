"""What the test_simple_fsdp*.py files share: models to wrap, logs of what a test can look at, a fake process group."""

import ast
import contextlib
import functools
import logging
import re
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._dynamo.backends.debugging import aot_eager, boxed_nop
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, _collective_utils
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from simple_fsdp import MixedPrecisionPolicy, data_parallel, disable_data_parallel

BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
INFERENCE = pytest.mark.skipif(torch.__version__ < (2, 12), reason="torch 2.11 has no detach_ of a DTensor")

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


def private_names(source):
    """Names with a leading underscore that a source file uses and does not make itself: attributes, parts of imported
    modules, and strings, as for getattr()."""
    used, made = set(), set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            used.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            used.add(node.value)
        elif isinstance(node, ast.ImportFrom):
            used.update([*node.module.split("."), *(alias.name for alias in node.names)])
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            made.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            made.add(node.id)
    return {name for name in used - made if re.fullmatch(r"_[A-Za-z]\w*", name)}


# --------------------------------------------------------------------------- wrapped on meta, then initialised


def initialise(model):
    for module in model.modules():
        for name in ("reset_parameters", "_reset_parameters"):
            if hasattr(module, name):
                getattr(module, name)()


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


# ------------------------------------------- generators that each file makes fixtures of: fake, one_thread


def with_one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def fake_ranks():
    """fake(world, rank=0) -> a mesh of `world` ranks of which this process plays one; replicas=n makes it 2-D."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

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

    scatter = _collective_utils.scatter

    def filled(output, scatter_list, group, **how):
        """What the fake group of torch 2.11 and 2.12 leaves uninitialised: the shards of `distribute_tensor`."""
        done = scatter(output, scatter_list, group=group, **how)
        output.copy_(scatter_list[dist.get_rank(group)]) if scatter_list else output.zero_()
        return done

    old = torch.__version__ < (2, 13)
    with mock.patch.object(_collective_utils, "scatter", filled) if old else contextlib.nullcontext():
        yield start
    end()
