"""SimpleFSDP: any nn.Module as sharded DTensors, gathered on use. One file: copy it.

    from overlap import compile_options  # a second file
    from simple_fsdp import MixedPrecisionPolicy, data_parallel

    mesh = torch.distributed.init_device_mesh("cuda", (world_size,))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = data_parallel(model, mesh, mp_policy=policy)

    # Without the last two lines it is eager. The options may be left out.
    options = compile_options(model)
    model = torch.compile(model, fullgraph=True, options=options)

While the model runs, forward or backward, reading `module.weight` gives the whole
parameter; elsewhere it gives the sharded DTensor itself. Its gradient arrives sharded,
in the stored dtype, and **averaged** over the ranks (torchtitan's sums now): a loss
that is normalised by a token count must be divided by the mean count per rank. Inputs
are not cast. Not for tensor or pipeline parallelism. Imports only torch, 2.11 to 2.14,
Python 3.11 or later. Paper: arXiv:2411.00284.

A **unit** is a module whose parameters are gathered by one collective and whose
gradients are reduced by one (one for each set that is alike in mesh, placement, dtype
and policy): as a rule a block of the model (`units_of`). A module in no unit gathers
its own parameters.

Three parts. The core is all that compiled code needs. Eager mode gathers units while
Python runs, each while the one before computes, and again in backward. Strictness
refuses most of what would be silently wrong (data_parallel() says what it cannot see),
and draws initial values as one process would.
"""

import functools
import hashlib
import inspect
import operator
import re
import threading
import warnings
import weakref
from collections import namedtuple
from collections.abc import Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import count, islice
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch._dynamo.eval_frame import skip_code
from torch._subclasses.fake_tensor import is_fake
from torch.distributed import DeviceMesh, get_backend
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.traceback import get_current_meta
from torch.nn.utils.parametrize import ParametrizationList, remove_parametrizations
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils import _python_dispatch as dispatch
from torch.utils import checkpoint
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.weak import WeakTensorKeyDictionary

# All that this file uses of torch's private names: the modules of is_fake, skip_code
# and dispatch, the names below, and the attributes Module._parameters,
# Module._compiled_call_impl, Module._forward_pre_hooks, Tensor._base, Tensor._version,
# Tensor._backward_hooks, Tensor._post_accumulate_grad_hooks, UntypedStorage._cdata,
# OpOverload._schema, DTensor._local_tensor, DTensor._spec, ProcessGroup._get_backend,
# ProcessGroupGloo.Options._threads, RNNBase._flat_weights, RNNBase._flat_weights_names,
# aten._is_any_true, nn.init._no_grad_trunc_normal_. A test of each says which is
# missing. Not documented: what get_proxy_mode and get_current_meta give, and the meta
# of a graph's nodes.
_c10d = torch.ops._c10d_functional
_top_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_below_autograd = torch._C._AutoDispatchBelowAutograd
_current_backward_id = torch._C._current_graph_task_id  # -1: no backward on this thread
# What Dynamo does with a new frame. None: no compiled code runs on this thread. False:
# only code that is compiled already is used.
_dynamo_callback = torch._C._dynamo.eval_frame.get_eval_frame_callback
# None: outside of torch.func's vmap, jvp and grad.
_transform = torch._C._functorch.peek_interpreter_stack
_without_transforms = torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack
_top_mode = dispatch._get_current_dispatch_mode
_without_top_mode = dispatch._pop_mode_temporarily
# The modes of a selective checkpoint: in forward, and where it is repeated.
_SELECTIVE = checkpoint._CachingTorchDispatchMode, checkpoint._CachedTorchDispatchMode
# Of a functional tensor: brings it up to date with writes to its memory; gives what it
# stands for.
_catch_up = torch._sync
_functional_value = torch._from_functional_tensor
# Of operations on DTensors; two are added, for an operation of ours and for
# detect_anomaly.
_handlers = DTensor._op_dispatcher._custom_op_handlers

MODES = ("replicate", "fully_shard", "hybrid_shard")
# Methods of modules that fill parameters.
INITIALISE = ("apply", "reset_parameters", "init_weights")


def _outside_dynamo(function):
    """Runs `function`, and all that it calls, where Dynamo does not look. Where
    compiled code falls back to Python (a graph break, a frame without tensors, the
    limit of recompilations), Dynamo takes what runs there for the user's code and
    compiles it; eager code of this file cannot be compiled."""
    closed = torch.compiler.disable(function)

    @functools.wraps(function)
    def run(*args, **kwargs):
        if _dynamo_callback() is None:
            return function(*args, **kwargs)
        return closed(*args, **kwargs)

    return _skipped_by_dynamo(run)


def _skipped_by_dynamo(function):
    """Dynamo does not compile `function` itself, but what it calls, which is the
    user's."""
    skip_code(function.__code__)
    return function


# ===================================================================== part 1: the core


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes of the collectives. FSDP2's class of this name has the same two fields:

        MixedPrecisionPolicy(torch.bfloat16, torch.float32)

    `param_dtype`: of the gathered parameter and of the all-gather (None: as stored).
    `reduce_dtype`: of the gradient reduction (None: as the gradient was computed, i.e.
    param_dtype). Gradients land in the stored dtype. Only floating-point parameters are
    cast, and alike at every world size, 1 included. data_parallel() raises ValueError
    for a dtype that is not floating-point."""

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None


class GatherPolicy(NamedTuple):
    """How a module's parameters are gathered: a MixedPrecisionPolicy's dtypes, and
    reshard_after_forward as in data_parallel(), which makes it."""

    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    reshard_after_forward: bool


# A collective: `next` starts it, the end waits for it and returns what it made.
PendingCollective = Generator[None, None, list[Tensor]]
_enabled = True  # False inside disable_data_parallel()
# By id: the modules given to data_parallel(), and copies of wrapped ones.
_roots = weakref.WeakValueDictionary()
# By unsharded parameter: one that modules share stays shared.
_shards = WeakTensorKeyDictionary()


def _run_only(module, call, args, kwargs):
    return call(*args, **kwargs)


# What the other two parts replace. Without them parameters read as shards in eager
# mode, and nothing is checked.
_eager = SimpleNamespace(
    read=lambda module, p: p, run=_run_only, run_compiled=_run_only
)
_strict = SimpleNamespace(
    check=lambda *args: None,
    check_root=lambda root: None,
    check_saved=lambda *args: None,
    warn_of_dtype=lambda: None,
    refuse_removal=lambda module: None,
    watch_optimizers=lambda: None,
    attributes=lambda cls: {},
    drawing=nullcontext,
)

# -------------------------------------- the pair: gather in forward, reduce in backward
#
# Two parameters, w [6, 4] and b [6], on N = 2 ranks. Each holds w [3, 4], b [3]:
#
#   gather   w [3, 4], b [3] -> side by side [1, 12 + 3] -> all-gather [2, 15]
#            -> cut up: [2, 12] is w [6, 4], [2, 3] is b [6]
#   reduce   gradients [6, 4], [6] -> side by side [2, 12 + 3] -> reduce-scatter [1, 15]
#            -> cut up: [1, 12] is w [3, 4], [1, 3] is b [3]


def _dtypes(p: DTensor, policy: GatherPolicy) -> tuple[torch.dtype, torch.dtype]:
    """The dtype that `p` is gathered in and the one that its gradient is reduced in."""
    if not p.dtype.is_floating_point:
        return p.dtype, p.dtype
    dtype = policy.param_dtype or p.dtype
    return dtype, policy.reduce_dtype or dtype


def _shard_count(p: DTensor) -> int:
    """Into how many shards a parameter is cut: its rows, over the last dimension of the
    mesh."""
    *outer, last = p.placements
    if not (last.is_shard(0) or last.is_replicate()) or any(
        placement.is_shard() for placement in outer
    ):
        raise RuntimeError(
            f"cannot gather a parameter with placements {p.placements}: expected those "
            "that data_parallel() gives it, Shard(0) or Replicate(); redistribute() it"
        )
    return p.device_mesh.size(-1) if last.is_shard() else 1


def _pad(t: Tensor, rows: int) -> Tensor:
    """`t` with zeros up to this number of rows. Where N does not divide them, the last
    ranks hold fewer."""
    if len(t) < rows:
        # All but the end of dimension 0, which stands last.
        sides = [0] * (2 * t.ndim - 1)
        t = nn.functional.pad(t, [*sides, rows - len(t)])
    return t.contiguous()  # after padding, too, which keeps channels_last


def _unpad(t: Tensor, shape: torch.Size) -> Tensor:
    """What a collective gave, without the padding, in this shape."""
    if t.numel() != shape.numel():
        t = t.view(-1)[: shape.numel()]
    return t if t.shape == shape else t.view(shape)


def _concat_rows(tensors: list[Tensor], rows: int) -> Tensor:
    """Tensors side by side, each as [rows, n], as one flat tensor; one alone as it
    is."""
    if len(tensors) == 1:
        return tensors[0]
    return torch.cat([t.view(rows, -1) for t in tensors], 1).view(-1)


def _split_rows(flat: Tensor, rows: int, sizes: list[int], cut) -> list[Tensor]:
    """What `_concat_rows` laid side by side, cut up again into [rows, size] for each
    size."""
    return [flat] if len(sizes) == 1 else cut(flat.view(rows, -1), sizes, 1)


def _collective(call, *args) -> Tensor:
    """Calls a functional collective below autograd. Its Autograd key has a fallback
    that asks whether gradients are needed, which doubles the host time of a call; here
    the gradient is written by hand (_Gather, _Reduce)."""
    with _below_autograd():
        return call(*args)


# The next three are generators, which stop once where their last collective (if there
# is one) is on its way, so that eager mode can compute before it waits. One that is
# dropped there waits, too. On one rank _reduce does not stop.


def _all_gather(params: list[DTensor], dtype: torch.dtype) -> PendingCollective:
    """Parameters that are alike -> whole tensors."""
    shards = [p._local_tensor.to(dtype) for p in params]
    pairs = zip(shards, params, strict=True)
    shard_count = _shard_count(params[0])
    if shard_count == 1:
        yield
        # Without a cast this is the shard: a view of it, so that autograd tells them
        # apart.
        return [t.view_as(t) if t is p._local_tensor else t for t, p in pairs]
    shards = [_pad(t, -(-len(p) // shard_count)) for t, p in pairs]  # each [n / N, ..]
    flat = _concat_rows(shards, 1)
    name = params[0].device_mesh.get_group(-1).group_name
    flat = _collective(_c10d.all_gather_into_tensor, flat, shard_count, name)
    try:
        yield
    finally:
        flat = _collective(_c10d.wait_tensor, flat)
    parts = _split_rows(flat, shard_count, [t.numel() for t in shards], _cut_op)
    return [_unpad(t, p.shape) for t, p in zip(parts, params, strict=True)]


def _average(grads: list[Tensor], p: DTensor, cut) -> PendingCollective:
    """Whole gradients, of parameters like `p` -> flat averages over the ranks, of the
    shards."""
    shard_count = _shard_count(p)
    grads = [
        _pad(t, -(-len(t) // shard_count) * shard_count) if t.ndim else t for t in grads
    ]
    flat = _concat_rows(grads, shard_count)
    # hybrid_shard: scatters, then reduces the shards.
    mesh = p.device_mesh
    dims = [dim for dim in reversed(range(mesh.ndim)) if mesh.size(dim) > 1]
    for dim in dims:
        name = mesh.get_group(dim).group_name
        if p.placements[dim].is_shard():
            n = mesh.size(dim)
            flat = _collective(_c10d.reduce_scatter_tensor, flat, "avg", n, name)
        else:
            flat = _collective(_c10d.all_reduce, flat, "avg", name)
        try:
            if dim == dims[-1]:
                yield
        finally:
            flat = _collective(_c10d.wait_tensor, flat)
    return _split_rows(flat, 1, [t.numel() // shard_count for t in grads], cut)


def _reduce(
    node_meta: dict | None, dtype: torch.dtype, params, *grads: Tensor
) -> Generator[None, None, tuple[DTensor, ...]]:
    """Whole gradients -> averages over the ranks, as shards in the stored dtype."""
    with _annotated(node_meta):
        shards = [grad.to(dtype) for grad in grads]
        if params[0].device_mesh.size() > 1:
            # Graphs get views: Inductor fuses the copy into whatever reads them. In
            # eager mode a view would hold the gradients of the whole unit.
            cut = torch.split_with_sizes if node_meta else torch.split_with_sizes_copy
            shards = yield from _average(shards, params[0], cut)
        shards = [
            _unpad(t, p._local_tensor.shape).to(p.dtype)
            for t, p in zip(shards, params, strict=True)
        ]
    if node_meta is None:
        # On one rank, without a cast, nothing was copied: autograd may have given
        # several the same memory, or an expanded tensor that is one element.
        copy = functools.partial(torch.clone, memory_format=torch.contiguous_format)
        shards = [
            copy(t) if t is grad else t for t, grad in zip(shards, grads, strict=True)
        ]
    return tuple(
        DTensor(t, p._spec, requires_grad=False)
        for t, p in zip(shards, params, strict=True)
    )


def _run_to_end(pending: PendingCollective):
    """Waits for a collective (starts it, if it has not): what the generator returns."""
    while True:
        try:
            next(pending)
        except StopIteration as end:
            return end.value


def _map_non_none(function, grads, params) -> list:
    """Calls `function(params, *grads)` with the gradients that are not None and their
    parameters; returns a list as long as `grads`, with None where there was None. All
    ranks must lack the same ones: else sizes do not match or, unseen, gradients of
    different parameters are averaged. Experts that got no token need a gradient of
    zeros."""
    pairs = zip(grads, params, strict=True)
    present = [(grad, p) for grad, p in pairs if grad is not None]
    results = iter(())
    if present:
        present_grads, present_params = zip(*present, strict=True)
        results = iter(function(present_params, *present_grads))
    return [None if grad is None else next(results) for grad in grads]


class _Gather(torch.autograd.Function):
    """Parameters, alike in dtypes, mesh and placements -> whole plain tensors in
    `dtype`, by one all-gather. node_meta: for the nodes that a graph gets in backward
    (compiled code), or None. pending: the gather, if it exists already. Subclasses
    share backward, which gives three Nones for the arguments before `params`."""

    @staticmethod
    def forward(ctx, node_meta, dtypes, pending, *params: DTensor):
        ctx.node_meta = node_meta
        dtype, ctx.reduce_dtype = dtypes
        ctx.params = params
        ctx.set_materialize_grads(False)
        wholes = _run_to_end(pending or _all_gather(params, dtype))
        frozen = [t for t, p in zip(wholes, params, strict=True) if not p.requires_grad]
        ctx.mark_non_differentiable(*frozen)
        return tuple(wholes)

    @staticmethod
    @_outside_dynamo
    def backward(ctx, *grads):
        reduce = functools.partial(_Reduce.apply, ctx.node_meta, ctx.reduce_dtype)
        return None, None, None, *_map_non_none(reduce, grads, ctx.params)


class _Reduce(torch.autograd.Function):
    """Whole gradients of these parameters -> their averages over the ranks as shards,
    in the stored dtype. With _Gather each is the other's backward, so that gradients of
    gradients work too."""

    @staticmethod
    def forward(ctx, node_meta, dtype, params, *grads: Tensor):
        ctx.dtypes = (grads[0].dtype, dtype)
        ctx.params = params
        ctx.set_materialize_grads(False)
        return _run_to_end(_reduce(node_meta, dtype, params, *grads))

    @staticmethod
    @_outside_dynamo
    def backward(ctx, *grads):
        def gather(params, *grads):
            shards = [
                grad.redistribute(placements=p.placements)
                for grad, p in zip(grads, params, strict=True)
            ]
            return _Gather.apply(None, ctx.dtypes, None, *shards)

        return None, None, None, *_map_non_none(gather, grads, ctx.params)


# ----------------------------------------------------- the operations for compiled code
#
# Dynamo does not look into these operations, AOTAutograd does: what stands in its graph
# are the collectives. A unit's forward begins with `gather_unit`, which gathers its
# parameters. Each `gather` that follows, where a module reads one of them, finds it on
# `p`. That is the DTensor which AOTAutograd has made for this trace, never the module's
# parameter: what is left on it dies with the trace, and Dynamo sees no side effect.

_library = torch.library.Library("simple_fsdp", "FRAGMENT")
_operations = torch.ops.simple_fsdp
_loader = globals().get("__loader__")
_readable = hasattr(_loader, "get_data")  # not where it was pasted into a notebook
# Of this file's source, for the compile caches.
_VERSION = (
    hashlib.blake2b(_loader.get_data(__file__), digest_size=8).hexdigest()
    if _readable
    else id(_library)
)
# Which copy of this file it is in the process: each has operations of its own.
_COPY = next(i for i in count() if not hasattr(_operations, f"gather_{i}"))
_POLICY = "ScalarType? param_dtype, ScalarType? reduce_dtype, bool reshard"
_NAME = _library.define(f"gather_{_COPY}(Tensor p, {_POLICY}) -> Tensor")
_UNIT_NAME = _library.define(f"gather_unit_{_COPY}(Tensor[] params, {_POLICY}) -> ()")
_CUT_NAME = _library.define(
    f"cut_{_COPY}(Tensor rows, SymInt[] sizes, int dim=1) -> Tensor[]"
)
_gather_op = getattr(_operations, _NAME).default
# It has no result: without this the compiler would drop it.
_gather_unit_op = torch.fx.node.has_side_effect(
    getattr(_operations, _UNIT_NAME).default
)
_cut_op = getattr(_operations, _CUT_NAME).default


# Gathered rows are cut up by an operation that Inductor does not look into, so that
# their memory is free again. Of views, Inductor would copy each where it is used, and
# hold all rows until the last.
@torch.library.impl(_library, _CUT_NAME, "CompositeExplicitAutograd")
def _cut_impl(rows: Tensor, sizes: list[int], dim: int = 1) -> list[Tensor]:
    return torch.split_with_sizes_copy(rows, sizes, dim)


@torch.library.register_fake(_cut_op, lib=_library)
def _cut_fake(rows: Tensor, sizes: list[int], dim: int = 1) -> list[Tensor]:
    return [rows.new_empty(len(rows), size) for size in sizes]


@contextmanager
def _annotated(node_meta: dict | None) -> Iterator[list]:
    """Copies `node_meta` into the meta of each node that AOTAutograd's graph gets while
    it is open. Gives a list, which holds those nodes once it is closed. None: does
    nothing."""
    nodes = []
    graph = get_proxy_mode().tracer.graph.nodes if node_meta else ()
    before = len(graph)
    yield nodes
    nodes += islice(reversed(graph), len(graph) - before)
    for node in nodes:
        node.meta.update(node_meta)


def _traced_gather(params: list[DTensor], policy: GatherPolicy) -> tuple[Tensor, ...]:
    """Gathers, in the graph that AOTAutograd makes, parameters that are alike.
    overlap.py reads what is noted: the path of the unit in the graph, "" for what lies
    in none, and of each parameter that path, or else its module's, and its shape."""
    # From the outermost on.
    modules = (get_current_meta().get("nn_module_stack") or {}).values()
    path = unit = ""
    for path, cls in modules:
        unit = path if _is_unit(cls) else unit
    shapes = [(unit or path, tuple(p.shape)) for p in params]
    node_meta = dict(unit=unit, bucket=shapes)
    with _annotated(node_meta) as nodes:
        wholes = _Gather.apply(node_meta, _dtypes(params[0], policy), None, *params)

    # Backward gathers again, as it would under a checkpoint. Without
    # reshard_after_forward the parts are saved, not the rows that they were cut from.
    parts = (
        (_cut_op, operator.getitem) if len(params) > 1 else (_c10d.wait_tensor.default,)
    )
    for node in nodes:
        saved = not policy.reshard_after_forward and node.target in parts
        node.meta["recompute"] = (
            CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE
        )
        # A region id of its own, larger than that of any checkpoint in the graph. Read
        # by cleanup_recompute_tags (torch/_functorch/partitioners.py): of a node whose
        # reader has a larger id it saves the result, here the gathered weight.
        node.meta["ac_graph_id"] = 1 << 60
    return wholes


def _gather_key(p: DTensor, policy: GatherPolicy) -> tuple:
    """(key, shard). A parameter that was gathered in this trace is gathered again where
    the key differs: by the tracer (torch.cond or a checkpoint trace a graph inside of a
    graph, and share the parameter), by the policy, by whether a gradient is needed, or
    by the shard. The shard is the tensor that functionalization has for the parameter:
    another one after each write to its memory. Whoever stores the key stores the shard
    with it: its id stands in the key, and Python gives the id of a freed object to a
    new one."""
    _catch_up(p._local_tensor)  # which is a functional tensor while AOTAutograd traces
    shard = _functional_value(p._local_tensor.elem)
    trace = id(get_proxy_mode().tracer)
    return (trace, policy, torch.is_grad_enabled(), p.requires_grad, id(shard)), shard


@torch.library.impl(_library, _UNIT_NAME, "CompositeImplicitAutograd")
def _gather_unit_impl(params: list[DTensor], *policy) -> None:
    if get_proxy_mode() is None:  # Dynamo asks for shapes: there are none
        return
    policy = GatherPolicy(*policy)
    # A unit that runs twice is gathered once, and reduces the sum of its gradients. So
    # is a tied parameter.
    keys = {p: _gather_key(p, policy)[0] for p in params}
    new = [p for p in keys if getattr(p, "_gathered", (None,))[0] != keys[p]]
    for group in _group_by_layout(new):
        wholes = _traced_gather(group, policy)
        for p, whole in zip(group, wholes, strict=True):
            # The key again: the gather itself may have made functionalization give the
            # shard another tensor, whose id is part of the key.
            p._gathered = *_gather_key(p, policy), whole


@torch.library.impl(_library, _NAME, "CompositeImplicitAutograd")
def _gather_impl(p: DTensor, *policy) -> Tensor:
    # Dynamo, and AOTAutograd before it has a graph, ask for shapes. backend="eager"
    # makes no graph: there each parameter is gathered alone, and kept for backward.
    if get_proxy_mode() is None:
        return _Gather.apply(None, _dtypes(p, GatherPolicy(*policy)), None, p)[0]
    _gather_unit_impl([p], *policy)
    return p._gathered[-1]


# In inference mode, backend="eager".
_handlers[_gather_op] = lambda op, args, _: _gather_impl(*args)
# detect_anomaly asks each gradient, and ours are DTensors, which lack this operation. A
# rank asks of its own shard, and raises alone.
_handlers[torch.ops.aten._is_any_true.default] = lambda op, args, _: op(
    args[0].to_local()
)


def _group_by_layout(params: Iterable[DTensor]) -> Iterable[list[DTensor]]:
    """Sets of parameters that one collective can carry."""
    sets = {}
    for p in params:
        sets.setdefault((p.device_mesh, p.placements, p.dtype), []).append(p)
    return sets.values()


# -------------------------------------------------------------- which modules are units


def _is_unit(cls: type) -> bool:
    return getattr(cls, "_data_parallel_unit", False)


def _unwrapped_class(module: nn.Module) -> type:
    """The class of a module before data_parallel()."""
    return getattr(type(module), "_data_parallel_class", type(module))


def _is_list(module: nn.Module) -> bool:
    """A ModuleList, ModuleDict or Sequential, unless it has a forward of its own."""
    plain = _unwrapped_class(module).forward in (
        nn.Sequential.forward,
        nn.Module.forward,
    )
    return plain and isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential)


def _is_built(module: nn.Module) -> bool:
    """Whether a module is made of others that hold parameters."""
    return any(True for child in module.children() for _ in child.parameters())


def _holds_blocks(module: nn.Module, listed: bool) -> bool:
    """Whether a module holds a list of blocks: built modules, of which two have one
    class, or just one. Then it is looked into, and its blocks are the units. A member
    of a list (`listed`) counts as a stage only if the blocks in it are made of built
    modules. Three models, and what is asked of which module:

        layers: [Block(attention, mlp), Block, ..]        the model: yes
        stages: [Stage(blocks: [Block(conv, conv)]), ..]  the model: yes, a Stage: yes
        layers: [Block(attention, experts: [Mlp(up, down), Mlp, ..]), ..]
                                                          the model: yes, a Block: no

    Experts are no units: ranks whose tokens choose different experts would gather at
    different times, and deadlock. What tells them from blocks: attention stands beside
    their list, and an expert is made of layers, or of a Sequential of them."""
    built = [
        m
        for m in module.modules()
        if m is not module and _is_built(m) and not _is_list(m)
    ]
    for container in filter(_is_list, module.modules()):
        blocks = [m for m in container.children() if m in built]
        classes = {_unwrapped_class(m) for m in blocks}
        if len(blocks) != 1 and len(classes) == len(blocks):
            continue  # a list of different things
        inner = [child for m in blocks for child in m.children()]
        if any(_is_built(child) and not _is_list(child) for child in inner):
            return True
        inside = set(container.modules())
        beside = [
            m for m in built if m not in inside and container not in set(m.modules())
        ]
        if not listed and not beside:
            return True
    return False


def _unit_candidates(parent: nn.Module, listed: bool = False) -> Iterator[tuple]:
    """(module, whether it is in a list) of the built children, and of the members of
    lists in place of a list."""
    for child in parent.children():
        members = (
            [m for m in child.children() if _is_built(m)] if _is_list(child) else []
        )
        if members or isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _unit_candidates(child, True)
        elif _is_built(child):
            yield child, listed


def units_of(model: nn.Module) -> list[str]:
    """Names of the units of a model, as in named_modules(). A unit is a module whose
    parameters share one all-gather and whose gradients share one reduce-scatter.

        units_of(transformer)  # ["blocks.0", "blocks.1", ...]

    For a wrapped model: the units that data_parallel() took. Before that: its guess,
    the outermost modules that contain other modules and no list of blocks. A Sequential
    with a third of the parameters or more, and the only child of a module, are not
    units themselves; their children may be. The model itself is "". An empty list means
    that each module gathers its own parameters. Runs no collective."""
    units = [m for m in model.modules() if _is_unit(type(m))]
    if not any("_gather_policy" in m.__dict__ for m in model.modules()):
        units = _find_units(model)
    return [name for name, module in model.named_modules() if module in units]


def _listed_units(model: nn.Module, units: Iterable) -> list[list[nn.Module]]:
    """The modules that data_parallel(units=..) names, as a list of groups that are
    gathered together. ValueError for what is no unit of the model."""
    by_name = dict(model.named_modules())
    names = {module: name for name, module in by_name.items()}
    groups = []
    seen = set()
    for entry in [units] if isinstance(units, str) else units:
        entries = entry if isinstance(entry, list | tuple) else [entry]
        group = [
            by_name.get(listed) if isinstance(listed, str) else listed
            for listed in entries
        ]
        for module, listed in zip(group, entries, strict=True):
            if not isinstance(module, nn.Module) or module not in names:
                raise ValueError(
                    f"units: {listed!r} is not a module of the model: expected a "
                    "module, or its name in named_modules()"
                )
            name = names[module] or "the model"
            if module in seen:
                raise ValueError(f"units: {name} is listed twice: list it once")
            if next(module.parameters(), None) is None:
                raise ValueError(f"units: {name} has no parameters: leave it out")
            if "_gather_policy" in module.__dict__:
                raise ValueError(
                    f"units: {name} is already wrapped: pass units= in the first "
                    "call of data_parallel()"
                )
            seen.add(module)
        groups.append(group)
    return groups


def _parameter_elements(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _find_units(model: nn.Module) -> set[nn.Module]:
    units = set()
    third = _parameter_elements(model) / 3

    def walk(parent):
        parts = list(_unit_candidates(parent))
        for part, listed in parts:
            large = _is_list(part) and _parameter_elements(part) >= third
            alone = len(parts) == 1 and not listed
            if large or alone or _holds_blocks(part, listed):
                walk(part)
            else:
                units.add(part)

    walk(model)
    for module in model.modules():
        wrapped = module is not model and getattr(
            type(module), "_data_parallel_root", False
        )
        if wrapped and _is_built(module) and not _holds_blocks(module, False):
            units.add(module)
    return units


def _members(unit: nn.Module) -> Iterator[nn.Module]:
    """The modules whose parameters a unit gathers: all that it holds, other units
    apart."""
    yield unit
    for child in unit.children():
        if not _is_unit(type(child)):
            yield from _members(child)


def _modules_gathered_by(owner: nn.Module) -> list[nn.Module]:
    """The modules whose parameters are gathered with those of a unit (of all units of
    its group, if `units` has put it into one), or of a module of no unit."""
    if not _is_unit(type(owner)):
        return [owner]
    group = owner._data_parallel_group or (owner,)
    return [member for unit in group for member in _members(unit)]


# ---------------------------------------------------- the class that gathers on reading


def _reader(name: str) -> property:
    """What `module.name` is: while the model runs the gathered parameter, elsewhere the
    parameter itself."""

    def read(module):
        try:  # and not `in`, which Dynamo pays for with a guard
            p = module._parameters[name]
        except KeyError as e:  # deleted
            raise AttributeError(name) from e
        # No DTensor: functional_call puts tensors in its place.
        if not _enabled or not isinstance(p, DTensor):
            return p
        try:
            if torch.compiler.is_compiling():
                return _gather_op(p, *module._gather_policy)
            return _eager.read(module, p)
        except AttributeError as e:
            # nn.Module.__getattr__ would swallow it and give the shard.
            message = f"cannot gather {name} of {type(module).__name__}: {e}"
            raise RuntimeError(message) from e

    def write(module, value):  # parameters and None do not come here
        raise TypeError(
            f"cannot make {name} of {type(module).__name__} a computed tensor "
            "(weight_norm, prune) after data_parallel(): do that before wrapping, or "
            "change the parameter in place"
        )

    return property(read, write)


@functools.cache
def _wrapped_class(
    cls: type, names: tuple[tuple, ...], role: str, is_root: bool
) -> type:
    """The subclass of `cls` that gathers the parameters `names` when they are read.
    role: "unit", "part" of one, or "alone", which is in no unit and gathers only the
    parameters that it holds itself (the root, a container, a last norm). There is one
    class for each set of
    arguments, with all else on the instance, so that equal blocks share one compiled
    frame. Beside each name is the shape: of a DTensor Dynamo guards the shard's alone,
    which 5 and 6 rows on two ranks have in common. Registries, such as those of Hugging
    Face, know a class by its name and module: they stay. `cls` is asked for its methods
    at each call: one that is replaced later, as kernel libraries do, is the one that
    runs."""

    @functools.wraps(cls.forward)  # tools read the names of the arguments
    def forward(self, *args, **kwargs):
        plain_forward = super(wrapped, self).forward
        if not torch.compiler.is_compiling():
            return _eager.run(self, plain_forward, args, kwargs)
        if is_root:
            _strict.check_root(id(self))
        if role != "part" and _enabled:
            _gather_members(self)
        return plain_forward(*args, **kwargs)

    # Around hooks, and a forward that is set on the instance.
    def call(self, *args, **kwargs):
        plain_call = super(wrapped, self).__call__
        if torch.compiler.is_compiling():
            return plain_call(*args, **kwargs)
        return _eager.run(self, plain_call, args, kwargs)

    # Around code that is compiled for this unit alone.
    def compile(self, *args, **kwargs):
        super(wrapped, self).compile(*args, **kwargs)
        code = self._compiled_call_impl

        def run(*args, **kwargs):
            return _eager.run_compiled(self, code, args, kwargs)

        self._compiled_call_impl = run

    def initialising(method):
        def run(self, *args, **kwargs):
            with disable_data_parallel():
                return getattr(super(wrapped, self), method)(*args, **kwargs)

        return run

    # While the model runs it gives what the attribute reads as, and no error for a
    # parameter that is none then.
    def get_parameter(self, target):
        path, _, name = target.rpartition(".")
        module = self.get_submodule(path)
        if name in dict(getattr(module, "_data_parallel_names", ())):
            return getattr(module, name)
        return super(wrapped, self).get_parameter(target)

    # These give shards, in the stored dtype, while the model runs, too: what forward
    # freezes or averages in place is the parameter.
    def asking(method):
        def run(self, *args, **kwargs):
            if torch.compiler.is_compiling() and self._gather_policy.param_dtype:
                _strict.warn_of_dtype()
            return getattr(super(wrapped, self), method)(*args, **kwargs)

        return run

    # copy.deepcopy and pickle cannot find this class: they make it anew.
    def reduce_ex(self, protocol):
        return _new, (cls, names, role, is_root), self.__getstate__()

    # A copied parameter has lost its hooks.
    def setstate(self, state):
        super(wrapped, self).__setstate__(state)
        for p in self._parameters.values():
            if isinstance(p, DTensor):
                _separate_gradients_of(p)

    attributes = dict(
        forward=forward,
        get_parameter=get_parameter,
        __reduce_ex__=reduce_ex,
        __setstate__=setstate,
        __module__=cls.__module__,
        __qualname__=cls.__qualname__,
        _data_parallel_class=cls,
        _data_parallel_names=names,
        _data_parallel_role=role,
        _data_parallel_unit=role == "unit",
        _data_parallel_group=(),  # the units gathered with this one: of the instance
        _data_parallel_root=is_root,
    )
    attributes |= {name: _reader(name) for name, _ in names}
    attributes |= {
        method: initialising(method) for method in INITIALISE if hasattr(cls, method)
    }
    attributes |= {
        method: asking(method) for method in ("named_parameters", "state_dict")
    }
    attributes |= _strict.attributes(cls)
    if is_root:
        attributes["__call__"] = call
    if role == "unit":
        attributes["compile"] = compile
    if issubclass(cls, nn.RNNBase):
        # The list that RNNs keep and assign is ignored: it is read anew each time.
        def weights(self):
            return [getattr(self, name, None) for name in self._flat_weights_names]

        attributes["_flat_weights"] = property(weights, lambda self, value: None)
        # torch compiles no RNN; not in pieces either.
        attributes["forward"] = torch.compiler.disable(forward)
    wrapped = type(cls.__name__, (cls,), attributes)
    return wrapped


def _new(*of_class):
    module = object.__new__(_wrapped_class(*of_class))
    _roots[id(module)] = module  # a copied root is checked, too
    return module


def _gather_members(module: nn.Module) -> None:
    """In compiled code: gathers what a unit gathers, or a module its own parameters,
    those of one policy at once."""
    sets = {}
    for member in _modules_gathered_by(module):
        parameters = [p for p in member._parameters.values() if isinstance(p, DTensor)]
        if parameters:
            sets.setdefault(member._gather_policy, []).extend(parameters)
    for policy, params in sets.items():
        if len(params) > 1:  # one alone is gathered where it is read
            _gather_unit_op(params, *policy)


def data_parallel(
    model: nn.Module,
    device_mesh: DeviceMesh,
    mode: str = "fully_shard",
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 (frozen)
    *,
    reshard_after_forward: bool = True,
    min_bytes: int = 0,
    units: Iterable[str | nn.Module | list] | None = None,
) -> nn.Module:
    """Shards every parameter of `model` in place over `device_mesh` and returns the
    model. All ranks get the values of rank 0.

        mesh = torch.distributed.init_device_mesh("cuda", (world_size,))
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        model = data_parallel(model, mesh, mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters())  # after wrapping

    On N ranks a parameter [m, ...] becomes a DTensor whose local shard has
    ceil(m / N) rows, on the last ranks fewer or none. While the model runs,
    module.weight is the unsharded tensor in param_dtype. Gradients are averaged over
    the mesh, in reduce_dtype, and stored as the parameter is.

    Modules that are already wrapped keep their shards and policy. So a part may be
    wrapped before its model, for example with another policy; it is then a unit if it
    contains other modules, unless it holds blocks. A second call for the model wraps
    what was added since, such as adapters.

    mode: "replicate" (DDP, a mesh of any shape), "fully_shard" (a 1-D mesh; ZeRO-3,
    arXiv:1910.02054), "hybrid_shard" (a 2-D mesh with mesh_dim_names: replicas, then
    shards).

    reshard_after_forward: free gathered weights after forward and gather them again in
    backward.

    min_bytes: parameters of fewer bytes, in their stored dtype, stay replicated, as do
    scalars and empty ones.

    units: the modules, or their names, whose parameters are gathered by one collective
    each; a list among them is gathered together: `["layers.0", "layers.1", ["norm",
    "head"]]`. In eager mode such a group stays whole until the outermost forward ends.
    None: the blocks that units_of() finds.

    All ranks must run units in the same order, and the same parameters must get a
    gradient on all ranks (zeros where an expert got no token). Otherwise they hang or,
    without an error, average gradients of different parameters.

    Not seen, and lost on more than one rank: a parameter that forward changes in place
    in compiled code (eager mode raises) or through `.data`, and one that a backward
    hook changes. A view of a weight that is kept for a later forward keeps old values.

    Buffers are not changed, and inputs are not cast.

    Raises ValueError, before anything is changed, for a wrong argument, for a parameter
    that cannot be sharded, and where all is wrapped already. Later RuntimeError for an
    optimizer that was built before, and for a parameter that came after."""
    _strict.check(model, device_mesh, mode, mp_policy, min_bytes)
    groups = _listed_units(model, units) if units is not None else []
    _strict.watch_optimizers()
    _tag_compile_cache(device_mesh)
    policy = GatherPolicy(
        mp_policy.param_dtype, mp_policy.reduce_dtype, reshard_after_forward
    )
    listed = {module for group in groups for module in group}
    if units is not None or getattr(model, "_data_parallel_units_listed", False):
        model._data_parallel_units_listed = True  # a second call keeps them
        wrapped = {module for module in model.modules() if _is_unit(type(module))}
        unit_modules = listed | wrapped
    else:
        unit_modules = _find_units(model)
    for group in groups:
        if len(group) > 1:
            for module in group:
                module._data_parallel_group = tuple(group)
    inside = {member for unit in unit_modules for member in unit.modules()}
    for module in list(model.modules()):
        if "_gather_policy" not in module.__dict__:
            if module is not model and next(module.parameters(), None) is None:
                continue
            _shard_own(module, device_mesh, mode, min_bytes)
            module._gather_policy = policy
            module.register_load_state_dict_pre_hook(_strict.check_saved)
            _strict.refuse_removal(module)
        cls = type(module)
        own_shapes = tuple(
            (name, p.shape) for name, p in module._parameters.items() if p is not None
        )
        names = getattr(cls, "_data_parallel_names", own_shapes)
        role = (
            "unit"
            if module in unit_modules
            else "part"
            if module in inside
            else "alone"
        )
        is_root = module is model or getattr(cls, "_data_parallel_root", False)
        module.__class__ = _wrapped_class(
            _unwrapped_class(module), names, role, is_root
        )
    _roots[id(model)] = model
    return model


def _tag_compile_cache(mesh: DeviceMesh) -> None:
    """AOTAutograd's cache key lacks group names, ranks and what lies behind an
    operation: without them it would give other code."""
    tags = {f"{_NAME}:{_VERSION}", *torch.compiler.config.cache_key_tag.split()}
    for group in mesh.get_all_groups():
        tags.add(
            f"{get_backend(group)}:{group.group_name}:{group.rank()}/{group.size()}"
        )
    torch.compiler.config.cache_key_tag = " ".join(sorted(tags))


class _Replaced(nn.Parameter):
    """A parameter whose place a shard has taken: an optimizer that still has it trains
    nothing, nor does a backward to it, of a loss that holds it or of a model that
    shared it."""

    def _refuse(self, *value):
        raise RuntimeError(
            "this parameter was replaced by its shard: build the optimizer after "
            "data_parallel(). If another module holds it, wrap that module, too; to "
            "only read it, use detach()"
        )

    grad = property(_refuse, _refuse)


@_outside_dynamo
def _separate(p: DTensor) -> None:
    """Compiled code may give parameters of equal gradients the same memory, or one
    element for all. Gradients are added up and clipped in place: each needs its own."""
    if p.grad is None:  # another hook's doing
        return
    local = p.grad._local_tensor
    owners = local.untyped_storage().__dict__.setdefault("_owners", {})
    owner = owners.setdefault(local.storage_offset(), id(p))
    if owner != id(p) or 0 in local.stride():
        p.grad = p.grad.clone(memory_format=torch.contiguous_format)


def _separate_gradients_of(p: DTensor) -> None:
    """Of a frozen parameter, too: it may be unfrozen later."""
    hooks = p._post_accumulate_grad_hooks or {}
    if (p.is_floating_point() or p.is_complex()) and _separate not in hooks.values():
        requires_grad = p.requires_grad
        p.requires_grad_(True)  # torch takes no hook of another
        p.register_post_accumulate_grad_hook(_separate)
        p.requires_grad_(requires_grad)


def _shard_own(module: nn.Module, mesh: DeviceMesh, mode: str, min_bytes: int) -> None:
    """Puts a DTensor in the place of each parameter that a module itself holds."""
    for name, p in module._parameters.items():
        if p is None:
            continue
        if p not in _shards:
            small = p.ndim == 0 or p.numel() == 0 or p.nbytes < min_bytes
            last = Replicate() if mode == "replicate" or small else Shard(0)
            placements = [Replicate()] * (mesh.ndim - 1) + [last]
            shard = distribute_tensor(p.detach(), mesh, placements)
            _shards[p] = nn.Parameter(shard, p.requires_grad)
            _separate_gradients_of(_shards[p])
            # Attributes that others have set on it.
            _shards[p].__dict__.update(p.__dict__)
            if p.requires_grad and not is_fake(p):
                p.__class__ = _Replaced
                p.register_post_accumulate_grad_hook(_Replaced._refuse)
        module._parameters[name] = _shards[p]
    # An RNN's list of the unsharded parameters.
    module.__dict__.pop("_flat_weights", None)


@contextmanager
def disable_data_parallel():
    """Context manager in which a parameter is its sharded DTensor, in forward too, and
    reading it gathers nothing: for initialisation, checkpoint helpers, inspection.

        with disable_data_parallel():
            nn.init.normal_(model.head.weight, std=0.02)

    Random values are those that one process would draw. All ranks need the same seed;
    otherwise replicas would differ. Re-entrant, but not thread-safe: reading changes
    for the whole process, drawing for this thread."""
    global _enabled
    before = _enabled
    _enabled = False
    try:
        with _strict.drawing():
            yield
    finally:
        _enabled = before


ParameterRow = namedtuple(
    "ParameterRow", "name shape dtype placement local_shape local_bytes unit"
)


def describe(model: nn.Module) -> list[ParameterRow]:
    """One row per parameter (tied ones once): what this rank holds, and the unit that
    gathers it ("": the module that holds it). Placement "-": not wrapped. Runs no
    collective.

        for row in describe(model):
            print(row.name, row.shape, row.local_shape, row.unit)

    shape and local_shape: of the parameter and of this rank's shard. dtype and
    local_bytes: as stored."""
    units = units_of(model)
    rows = []
    for name, p in model.named_parameters():
        local = getattr(p, "_local_tensor", p)
        placement = "-" if local is p else repr(p.placements[-1])
        around = [unit for unit in units if not unit or name.startswith(f"{unit}.")]
        unit = max(around, key=len) or "(model)" if around else ""
        rows.append(
            ParameterRow(
                name,
                tuple(p.shape),
                p.dtype,
                placement,
                tuple(local.shape),
                local.nbytes,
                unit,
            )
        )
    return rows


# =================================================================== part 2: eager mode
#
# [Note: two units in eager mode]
#
#   forward   _Begin(1) _End(1) _Begin(2) layers 1, _End(2) _Begin(3) layers 2, ..
#   backward  .., layers 2, _Begin(3) _End(2), layers 1, _Begin(2) _End(1) _Begin(1)
#
# A gather is two nodes of the autograd graph, shards -> _Begin -> token -> _End ->
# whole tensors. _Begin starts the all-gather and _End waits for it; in backward _End
# starts the reduce-scatter and _Begin waits for it. _End takes the shards, too: under
# create_graph, or where nothing may overlap, it returns their gradients. Autograd runs
# the node with the latest sequence number first, so what forward ran between _Begin and
# _End has its backward between theirs: whatever hides a gather in forward hides the
# reduction in backward. _Begin(2) runs before the layers of 1 since a _GatherSchedule
# remembers what followed 1 the last time.
#
# The whole tensors lie in a memo until the unit's forward ends. What a layer saves for
# backward, hooks replace by a _SavedView: the first that is unpacked has its _Bucket
# gather the unit again, and begin the one before it. The bucket hangs on the storage of
# the whole tensor, where every view of it finds it; the saved views, the two nodes and
# the bucket of the next unit keep it when that storage is freed. A checkpoint, which
# repeats a part of forward inside of backward, finds the bucket by the parameter. A
# unit that is compiled by itself runs in the same way. Where a whole model is compiled
# there is none of this: `gather_unit` puts one all-gather and its wait into the graph,
# the partitioner repeats them in backward, and overlap.py moves them.
#
# Streams. On CUDA a functional collective runs on the stream of its process group.
# ProcessGroupNCCL makes that stream wait for the current one, and wait_tensor makes the
# current one wait for the collective; until that wait torch's registry of pending
# functional collectives holds the buffers, so the caching allocator cannot give their
# memory away. After it everything is ordered by the current stream alone. This is what
# torch's source says (Functional.cpp, ProcessGroupNCCL.cpp); of more than one GPU it
# was never run.


class _Thread(threading.local):
    # By _ParameterState: what the innermost running forward has gathered; None outside
    # of any.
    memo = None
    module = None  # whose forward that is
    schedule = None  # the _GatherSchedule of the outermost


_thread = _Thread()
_swapping = threading.RLock()  # for the time that a unit's modules hold whole tensors
# By _ParameterState: the last to gather it, while backward may ask.
_buckets = weakref.WeakValueDictionary()
# By module and purpose of _gathering: which modules the last one gathered, in turn.
_last_gather_orders = weakref.WeakKeyDictionary()
_Whole = namedtuple("_Whole", "tensor version name bucket")  # a gathered parameter
_SavedView = namedtuple("_SavedView", "bucket param versions size stride offset")


def _may_overlap(mesh: DeviceMesh) -> bool:
    """Whether its collectives may run beside each other. Torch's gloo gives groups two
    worker threads, of which ranks die then (gloo.py of this project makes groups with
    one)."""
    device = torch.device(mesh.device_type)
    threads = [
        getattr(getattr(group._get_backend(device), "options", None), "_threads", 1)
        for group in mesh.get_all_groups()
    ]
    return mesh.size() > 1 and max(threads) == 1


@contextmanager
def _outside_user_modes(grad: bool) -> Iterator[None]:
    """With or without gradients, whatever runs. torch.func's transforms do not see it,
    nor does a selective checkpoint, which is a mode: forward and what repeats it gather
    at different places."""
    with ExitStack() as stack:
        if _transform() is not None:
            stack.enter_context(_without_transforms())
        while isinstance(_top_mode(), _SELECTIVE):
            stack.enter_context(_without_top_mode())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.set_grad_enabled(grad))
        yield


class _Bucket:
    """Parameters that are gathered at once; and again in backward. There it is idle;
    then `pending`, from begin() on; then `wholes` are there, from the first read on;
    and idle again once all reads were counted or _End's backward has passed. Another
    backward through the same graph starts over."""

    # The bucket that forward gathered just before this one. A strong reference: else
    # each rank's garbage collector would decide whether its backward begins it ahead.
    previous = None

    def __init__(self, params: list[DTensor], policy: GatherPolicy):
        self.params = params
        self.dtypes = _dtypes(params[0], policy)
        self.may_overlap = _may_overlap(params[0].device_mesh)
        # How often backward will read one of the parameters: _pack counts up, for each
        # view that is saved, and _read_whole, for each read under a checkpoint's hooks.
        self.reads_expected = 0
        self.wholes = {}  # by parameter, once they were gathered again
        # How many of those reads are left: `whole` counts down, and frees at 0. A
        # checkpoint may stop before its last read: then _End frees.
        self.reads_remaining = 0
        self.has_finished = False  # backward has had all reads: not to be begun again
        self.states = ()  # the _ParameterState of each parameter
        self.pending = None  # a gather that is on its way
        self.reduction = None  # (parameters, a reduction that is on its way)

    def begin(self) -> None:
        """Begins to gather."""
        self.pending = _all_gather(self.params, self.dtypes[0])
        if self.may_overlap:
            next(self.pending)

    def whole(self, p: DTensor) -> Tensor:
        """A parameter, for backward: gathered at the first call. All others are
        gathered with it, whichever it needs here: another rank may need others."""
        if not self.wholes:
            with _outside_user_modes(grad=False):
                if self.pending is None:
                    self.begin()
                # If it fails, as without memory, the next read gathers anew.
                pending, self.pending = self.pending, None
                self.wholes = dict(zip(self.params, _run_to_end(pending), strict=True))
                self.reads_remaining = self.reads_expected
                self.has_finished = False
                self.begin_next()
        whole = self.wholes[p]
        self.reads_remaining -= 1
        if self.reads_remaining == 0:
            self.has_finished = True
            self.free()
        return whole

    def begin_next(self) -> None:
        """Begins to gather what backward needs next: as many elements as it has
        here."""
        budget = _gathered_elements([self])
        bucket = self.previous
        while budget > 0 and bucket is not None:
            # A unit that holds another is gathered first, and read last, behind that
            # one: in backward it may be whole already, or have had all its reads.
            if bucket.reads_expected > 0 and not bucket.has_finished:
                budget -= _gathered_elements([bucket])
                if bucket.pending is None and not bucket.wholes:
                    bucket.begin()
            bucket = bucket.previous

    def free(self) -> None:
        self.wholes = {}
        self.pending = None


def _gathered_elements(buckets: Iterable[_Bucket]) -> int:
    """How many elements they gather."""
    return sum(p.numel() for bucket in buckets for p in bucket.params)


def _token(p: DTensor) -> Tensor:
    """Nothing, on the device of `p`: autograd has a thread, and an order, for each
    device."""
    return torch.empty(0, device=p._local_tensor.device)


class _Begin(torch.autograd.Function):
    """Parameters -> a token. Forward begins a gather, which _End waits for. Backward
    waits for the reduction that _End's has begun. Autograd runs the latest nodes first:
    what forward ran between _Begin and _End has its backward between theirs."""

    @staticmethod
    def forward(ctx, bucket: _Bucket, *params: DTensor):
        ctx.bucket = bucket
        ctx.params = params
        bucket.begin()
        return _token(params[0])

    @staticmethod
    @_outside_dynamo
    def backward(ctx, _):
        averages = {}
        if ctx.bucket.reduction is not None:
            params, pending = ctx.bucket.reduction
            ctx.bucket.reduction = None
            averages = dict(zip(params, _run_to_end(pending), strict=True))
        return None, *(averages.get(p) for p in ctx.params)


class _End(_Gather):
    """A token and its parameters -> whole tensors."""

    @staticmethod
    def forward(ctx, bucket: _Bucket, token: Tensor, *params: DTensor):
        ctx.bucket = bucket
        pending = bucket.pending
        bucket.pending = None
        return _Gather.forward(ctx, None, bucket.dtypes, pending, *params)

    @staticmethod
    @_outside_dynamo
    def backward(ctx, *grads):
        ctx.bucket.free()  # backward has had each
        # A checkpoint of any forward reads from the last one's: see _read_whole.
        last_bucket = _buckets.get(ctx.bucket.states[0])
        if last_bucket is not None:
            last_bucket.free()
        ctx.bucket.reduction = None  # of a backward that failed
        if torch.is_grad_enabled() or not ctx.bucket.may_overlap:
            # _Gather.forward has three arguments before the parameters, _End two.
            _, *gradients = _Gather.backward(ctx, *grads)
            return tuple(gradients)

        def begin(params, *grads):
            pending = _reduce(None, ctx.reduce_dtype, params, *grads)
            next(pending)
            ctx.bucket.reduction = params, pending
            return [None] * len(params)

        return None, _token(ctx.params[0]), *_map_non_none(begin, grads, ctx.params)


class _Attach(_Gather):
    """A parameter that was gathered without gradients before -> the same tensor, with
    them."""

    @staticmethod
    def forward(ctx, whole: Tensor, dtypes, unused, p: DTensor):
        ctx.node_meta = None
        _, ctx.reduce_dtype = dtypes
        ctx.params = (p,)
        return whole.detach()


def _address(p: DTensor) -> int:
    return p._local_tensor.untyped_storage()._cdata


def _versions(p: DTensor) -> tuple[int, int]:
    # One counts changes of the DTensor, one those of its local shard.
    return p._version, p._local_tensor._version


@_outside_dynamo
def _pack(saved: Tensor) -> tuple[Tensor, int] | _SavedView:
    # Of what goes through hooks, torch does not check the version.
    kept = saved, saved._version
    # as_strided could not make it again.
    if saved.layout is not torch.strided or saved.is_conj():
        return kept
    bucket, p, versions = getattr(
        saved.untyped_storage(), "_sharded", (None, None, None)
    )
    if bucket is None or saved.dtype != bucket.dtypes[0]:
        return kept
    bucket.reads_expected += 1
    return _SavedView(
        bucket, p, versions, saved.size(), saved.stride(), saved.storage_offset()
    )


@_outside_dynamo
def _unpack(kept: tuple[Tensor, int] | _SavedView) -> Tensor:
    if not isinstance(kept, _SavedView):
        saved, version = kept
        if saved._version != version:
            raise RuntimeError(
                f"a tensor of shape {tuple(saved.shape)} was changed in place, but "
                "backward needs its old value: change a clone() of it"
            )
        return saved
    if _versions(kept.param) != kept.versions:
        raise RuntimeError(
            "a parameter was changed in place between its forward and its backward: "
            "step the optimizer after backward"
        )
    return kept.bucket.whole(kept.param).as_strided(kept.size, kept.stride, kept.offset)


@contextmanager
def unsharded(module: nn.Module | None = None):
    """Context manager in which parameters read as unsharded tensors in param_dtype, as
    in forward: for a regulariser, or a method that computes with weights. A collective:
    every rank must enter it and read the same parameters.

        with unsharded():
            penalty = model.head.weight.square().sum()

    Each parameter is gathered at its first use (with all of `module`, if that is a
    unit) and freed at the end. Gradients go through it as through forward. In compiled
    code it does nothing: there parameters are unsharded anyway. Raises RuntimeError if
    one was changed in place. On one rank alone it hangs."""
    if torch.compiler.is_compiling():
        yield
        return
    with _gathering(module, "unsharded"):
        yield


@contextmanager
def _gathering(module: nn.Module | None, purpose: str):
    """unsharded(). purpose: in the next of the same module and purpose, modules are
    expected to be gathered in the same order."""
    # Saved tensors go through hooks. Not where there are hooks already: on top of an
    # activation checkpoint's, ours would switch it off, and it keeps no weight anyway.
    # Nor where torch.func forbids them.
    free = _top_saved_tensors_hooks(True) is None and _transform() is None
    hooks = nullcontext()
    if free and torch.is_grad_enabled():
        hooks = torch.autograd.graph.saved_tensors_hooks(_pack, _unpack)
    before = _thread.memo, _thread.module, _thread.schedule
    memo = dict(_thread.memo or ())
    with hooks:
        _thread.memo = memo
        _thread.module = module
        _thread.schedule = _thread.schedule or _GatherSchedule(module, memo, purpose)
        try:
            yield
        finally:
            _thread.memo, _thread.module, _thread.schedule = before
    for whole in memo.values():
        if whole.tensor._version != whole.version:
            raise RuntimeError(
                f"{whole.name} was changed in place while it was gathered, which is "
                "lost: change the parameter outside forward and unsharded()"
            )


class _ParameterState(NamedTuple):
    """What a gathered parameter was gathered from. In another state, changed in place
    or frozen since, it is gathered again."""

    id: int
    policy: GatherPolicy
    versions: tuple[int, int]
    requires_grad: bool


def _state_of(p: DTensor, policy: GatherPolicy) -> _ParameterState:
    return _ParameterState(id(p), policy, _versions(p), p.requires_grad)


class _GatherSchedule:
    """Of an outermost forward: which modules were gathered so far, and what is on its
    way for those that followed the last time. All ranks must gather in the same order;
    nothing detects that one does not, and then collectives hang until the process
    group's timeout, or end in an error where sizes differ."""

    @_outside_dynamo
    def __init__(self, module: nn.Module | None, memo: dict, purpose: str = ""):
        self.memo = memo  # of the outermost forward
        self.last_order = []
        self.order = []
        self.in_flight = {}  # by module or first unit of a group: what `start` gave
        self.last_bucket = None
        if module is not None:
            # A module that was taken out of the model is None, also on a rank where it
            # still exists.
            inside = {id(child) for child in module.modules()}
            orders = _last_gather_orders.setdefault(module, {})
            last = [child() for child in orders.get(purpose, ())]
            self.last_order = [child if id(child) in inside else None for child in last]
            orders[purpose] = self.order

    def gather(
        self, memo: dict, state: _ParameterState, owner: nn.Module, module: nn.Module
    ) -> None:
        """Gathers a parameter of `module` into the memo, with all that `owner`, its
        unit or itself, gathers. Starts to gather what comes next, until as many
        elements are on their way as this gives."""
        budget = self.finish(memo, self.in_flight.pop(owner, ()))
        if state not in memo:
            modules = [*_modules_gathered_by(owner), module]
            budget += self.finish(memo, self.start(memo, modules))
        self.order.append(weakref.ref(owner))
        done = len(self.order)
        # This forward goes another way than the last (a None is a module that is gone).
        if self.last_order[done - 1 : done] not in ([owner], [None]):
            self.last_order = []
        followers = islice(self.last_order, done, None)
        while budget > 0 and (follower := next(followers, None)) is not None:
            if follower not in self.in_flight:
                modules = _modules_gathered_by(follower)
                self.in_flight[follower] = self.start(memo, modules)
            budget -= _gathered_elements(
                bucket for bucket, *_ in self.in_flight[follower]
            )

    def start(self, memo: dict, modules: Iterable[nn.Module]) -> list[tuple]:
        """Starts to gather the modules' own parameters that are not in the memo, those
        that are alike by one collective: a list of (bucket, token, a (state, name) for
        each parameter)."""
        sets = {}  # by policy: {parameter: (its state, its name)}
        in_flight = []
        for module in modules:
            policy = module.__dict__.get("_gather_policy")
            for name, p in module._parameters.items() if policy else ():
                if not isinstance(p, DTensor):
                    continue
                state = _state_of(p, policy)
                if state not in memo:
                    name = f"{name} of {type(module).__name__}"
                    sets.setdefault(policy, {})[p] = state, name
        for policy, states_and_names in sets.items():
            for params in _group_by_layout(states_and_names):
                bucket = _Bucket(params, policy)
                # With gradients, even under no_grad: forward may read it outside of
                # that, too.
                with _outside_user_modes(grad=True):
                    token = _Begin.apply(bucket, *params)
                in_flight.append((bucket, token, [states_and_names[p] for p in params]))
        return in_flight

    def finish(self, memo: dict, in_flight: Iterable[tuple]) -> int:
        """Waits for what `start` gave, and puts it into the memo. Returns the number of
        elements."""
        for bucket, token, states_and_names in in_flight:
            bucket.previous = self.last_bucket
            bucket.states = [state for state, _ in states_and_names]
            self.last_bucket = bucket
            with _outside_user_modes(grad=True):
                wholes = _End.apply(bucket, token, *bucket.params)
            for (state, name), p, whole in zip(
                states_and_names, bucket.params, wholes, strict=True
            ):
                memo[state] = _Whole(whole, whole._version, name, bucket)
                _buckets[state] = bucket
                storage = whole.untyped_storage()
                # Without a collective and a cast (one rank, a replica) it is the
                # shard's own memory. What a reentrant checkpoint gathers again,
                # backward reads at once.
                reshard = state.policy.reshard_after_forward
                is_copy = storage._cdata != _address(p)
                if reshard and is_copy and _current_backward_id() == -1:
                    storage._sharded = bucket, p, state.versions
        return _gathered_elements(bucket for bucket, *_ in in_flight)


@_skipped_by_dynamo
def _read(module: nn.Module, p: DTensor) -> Tensor:
    """The gathered parameter inside of a forward, of backward, of recomputation and of
    compiled code; elsewhere the parameter itself."""
    is_compiled_code = _dynamo_callback() is not None
    if _thread.memo is None and _current_backward_id() == -1 and not is_compiled_code:
        return p
    return _read_whole(module, p)


@_outside_dynamo
def _read_whole(module: nn.Module, p: DTensor) -> Tensor:
    memo = _thread.memo
    state = _state_of(p, module._gather_policy)
    # In backward three kinds of code read here. A checkpoint that is not reentrant
    # repeats a part of the forward, and has what the bucket gathers again. A reentrant
    # one ran its forward without gradients, so that the bucket expects no reads, and
    # gathers anew, into a memo of its own. An autograd.Function of the user's computes
    # with a weight, and may want its gradient: _Attach.
    bucket = _buckets.get(state) if _current_backward_id() != -1 else None
    if bucket and bucket.reads_expected > 0 and state not in (memo or ()):
        return _Attach.apply(bucket.whole(p), bucket.dtypes, None, p)
    if memo is None:
        memo = {}  # nothing would free what the thread's holds
    schedule = _thread.schedule or _GatherSchedule(None, memo)
    owner = _thread.module if _is_unit(type(_thread.module)) else module
    if _is_unit(type(owner)) and owner._data_parallel_group:
        # Whole for all units of the group: the forward of one ends before the next, and
        # with it its memo, but not the outermost.
        owner = owner._data_parallel_group[0]
        memo = schedule.memo
    if state not in memo:
        schedule.gather(memo, state, owner, module)
    whole = memo[state]
    # Somebody else's hooks are taken for a checkpoint's, which will ask again.
    if _top_saved_tensors_hooks(True) not in (None, (_pack, _unpack)):
        whole.bucket.reads_expected += 1
    return whole.tensor


# By a pattern of torch's error: what to do where a model runs into it.
CURES = {
    "is a view and i": "data_parallel: a parameter was changed in place while it was "
    "gathered, which would be lost: change the parameter outside forward and "
    "unsharded().",
    "mixed torch.Tensor and DTensor": "data_parallel: while the model runs, read a "
    "parameter as an attribute of its module, in the thread that called the model. "
    "named_parameters() and state_dict() give the shard.",
    "dtype|scalar type|(weight|bias) type": "data_parallel: while the model runs, "
    "weights read as attributes are in param_dtype, but parameters() (which self.dtype "
    "of many libraries reads) and state_dict() give shards in the stored dtype. Cast "
    "an input to the dtype of such an attribute: x.to(self.proj.weight.dtype).",
    "yet support saved tensor hooks": "data_parallel: torch.func.grad, vjp and "
    "jacrev do not work inside a forward: call them around the model, or use "
    "torch.autograd.grad inside it.",
    "closed by peer": "data_parallel: another rank has probably ended, or does "
    "something else. Every rank must call the model equally often, in evaluation, too.",
}


@_skipped_by_dynamo
def _run_compiled(module: nn.Module, call, args: tuple, kwargs: dict):
    """Runs a unit that was compiled by itself. It is gathered before its code, and
    reduced behind it, as in eager mode; equal units then share their code."""
    if not _enabled or torch.compiler.is_compiling():
        return call(*args, **kwargs)
    with _gathering(module, "forward"), _swapping:
        members = [
            (m, m._parameters)
            for m in _modules_gathered_by(module)
            if "_gather_policy" in m.__dict__
        ]
        shards = [dict(sharded) for _, sharded in members]
        try:
            for member, sharded in members:
                for name, p in sharded.items():
                    sharded[name] = _read(member, p) if isinstance(p, DTensor) else p
            return call(*args, **kwargs)
        finally:
            for (_, sharded), before in zip(members, shards, strict=True):
                sharded.update(before)


@_skipped_by_dynamo
def _run(module: nn.Module, call, args: tuple, kwargs: dict):
    """Runs a module's __call__ or forward. Parameters that are read meanwhile are
    gathered, and freed afterwards."""
    in_unit = module._data_parallel_role == "part" and _is_unit(type(_thread.module))
    if not _enabled or in_unit or _thread.module is module:
        return call(*args, **kwargs)
    if type(module)._data_parallel_root:
        _strict.check_root(id(module))
    try:
        with _gathering(module, "forward"):
            return call(*args, **kwargs)
    except RuntimeError as e:
        policy = module.__dict__.get("_gather_policy")
        casts = policy is not None and policy.param_dtype is not None
        for pattern, cure in CURES.items():
            is_about = re.search(pattern, str(e)) and (casts or "dtype" not in pattern)
            if is_about and cure not in getattr(e, "__notes__", ()):
                e.add_note(cure)
        raise


_eager.read = _read
_eager.run = _run
_eager.run_compiled = _run_compiled

# =================================================================== part 3: strictness


def _check(
    model: nn.Module, mesh: DeviceMesh, mode: str, policy, min_bytes: int
) -> None:
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(
            f"device_mesh must be a DeviceMesh (init_device_mesh), got {mesh!r}"
        )
    if not isinstance(policy, MixedPrecisionPolicy):
        raise ValueError(
            f"mp_policy must be simple_fsdp's MixedPrecisionPolicy, got {policy!r}"
        )
    for name, dtype in vars(policy).items():
        if dtype is not None and not (
            isinstance(dtype, torch.dtype) and dtype.is_floating_point
        ):
            raise ValueError(
                f"{name} must be a floating-point torch.dtype or None, got {dtype!r}"
            )
    if not isinstance(min_bytes, int | float):
        raise ValueError(f"min_bytes must be a number of bytes, got {min_bytes!r}")
    if mode not in MODES:
        raise ValueError(f"mode={mode!r} does not exist: use one of {', '.join(MODES)}")
    got = f"got {mesh.ndim}-D, names {mesh.mesh_dim_names}"
    if mode == "fully_shard" and mesh.ndim != 1:
        raise ValueError(f"mode={mode!r} needs a 1-D mesh, {got}")
    if mode == "hybrid_shard" and (mesh.ndim != 2 or not mesh.mesh_dim_names):
        raise ValueError(f"mode={mode!r} needs a 2-D mesh with mesh_dim_names, {got}")
    wrapped = {"_gather_policy" in m.__dict__ for m in model.modules() if m._parameters}
    if wrapped == {True} and "_gather_policy" in model.__dict__:
        raise ValueError(
            "every module with parameters is wrapped already: call data_parallel() "
            "only once"
        )
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(
                f"cannot shard {path or 'the model'}: it is a ScriptModule; wrap the "
                "module that it was scripted from"
            )
        for name, p in module._parameters.items():
            why = _why_not(module, p) if p is not None else ""
            if why:
                path = f"{path}.{name}".lstrip(".")
                raise ValueError(f"cannot shard {path}: {why}")


def _why_not(module: nn.Module, p: nn.Parameter) -> str:
    """Why a parameter cannot be sharded; "" if it can."""
    if "_gather_policy" in module.__dict__:
        if isinstance(p, DTensor):
            return ""
        return "its module is already wrapped; copy_() it into the old parameter"
    if isinstance(p, DTensor):
        return (
            f"it already is a DTensor with placements {p.placements}; pass a model "
            "with plain parameters"
        )
    if p._backward_hooks or (
        p._post_accumulate_grad_hooks and type(p) is not _Replaced
    ):
        return "its hooks would be lost; register them after data_parallel()"
    if isinstance(p, nn.parameter.UninitializedParameter):
        return "it has no shape yet; run one forward before wrapping"
    if type(p) not in (nn.Parameter, _Replaced) and not is_fake(p):
        return (
            f"its class {type(p).__name__} would be lost; make it a plain nn.Parameter"
        )
    if getattr(module, "sparse", False) is True:
        return "its gradient is sparse; build the embedding with sparse=False"
    return ""


# In compiled code it runs while tracing; takes no module, only constants.
@torch.compiler.assume_constant_result
@_skipped_by_dynamo
def _check_root(root: int) -> None:
    """RuntimeError for a parameter that trains without being gathered: every rank would
    get another one."""
    if root not in _roots or not torch.is_grad_enabled():
        return
    for path, module in _roots[root].named_modules():
        wrapped = dict(getattr(module, "_data_parallel_names", ()))
        for name, p in module._parameters.items():
            if isinstance(p, DTensor) and name in wrapped:
                continue
            # functional_call puts tensors in its place, which are no nn.Parameter.
            if isinstance(p, nn.Parameter) and p.requires_grad:
                path = f"{path}.{name}".lstrip(".")
                raise RuntimeError(
                    f"{path} is not sharded: it came after data_parallel(). For a new "
                    "value, copy_() it into the old parameter. For a new module, call "
                    "data_parallel(model, mesh) again (mode='replicate' suits small "
                    "adapters)"
                )


# It, too, runs while tracing: torch's error comes when the compiled code runs, where
# nothing of this file does.
@torch.compiler.assume_constant_result
@_skipped_by_dynamo
def _warn_of_dtype() -> None:
    warnings.warn(
        "data_parallel: compiled code calls parameters() or state_dict(), which give "
        "shards in the stored dtype, while weights are read in param_dtype. If the "
        "code needs a dtype, read it from a weight: x.to(self.proj.weight.dtype)",
        stacklevel=2,
    )


def _check_saved(module, state, prefix, *_) -> None:
    """RuntimeError for shards that another rank has saved: what a file of rank 0 alone
    gives all the others."""
    for name, p in module.named_parameters(prefix[:-1], False):  # its own
        saved = state.get(name)
        if Shard(0) in getattr(saved, "placements", ()):
            # A mesh that comes from a file knows whose it was.
            if (
                saved.device_mesh.get_coordinate()[-1]
                != p.device_mesh.get_coordinate()[-1]
            ):
                raise RuntimeError(
                    f"{name} is the shard of another rank: torch.save() wrote the "
                    "shards of one rank. Save whole tensors (get_model_state_dict "
                    "with full_state_dict=True), or save on every rank with "
                    "torch.distributed.checkpoint"
                )


def _check_moments(optimizer: torch.optim.Optimizer, *_) -> None:
    """RuntimeError for moments that are whole while the parameters are shards, as the
    optimizer of a DDP checkpoint has them: load_state_dict takes it, and the step would
    end in an error that names no cause. Others than torch's may mean it."""
    if not type(optimizer).__module__.startswith("torch.optim"):
        return
    for p, state in islice(optimizer.state.items(), 1):
        for name, t in state.items() if isinstance(p, DTensor) else ():
            if type(t) is Tensor and t.ndim and t.shape == p.shape:
                raise RuntimeError(
                    f"data_parallel: {name} of the optimizer is a whole tensor, as in "
                    "a checkpoint of DDP, but its parameter is a shard. Before "
                    "load_state_dict() replace each such tensor t by "
                    "distribute_tensor(t, p.device_mesh, p.placements)"
                )


@functools.cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_check_moments)


# torch computes the weight and puts it where the shards were: of shards it ends
# half-way in errors that name no cause, inside unsharded() every rank would train its
# own.
def _cannot_remove(*args):
    raise RuntimeError(
        "data_parallel: parametrizations, pruning, weight norm and spectral norm "
        "cannot be removed from a wrapped model. Get its whole tensors "
        "(get_model_state_dict with full_state_dict=True), load them into an unwrapped "
        "model, and remove them there"
    )


def _refuse_removal(module: nn.Module) -> None:
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, BasePruningMethod | WeightNorm | SpectralNorm):
            hook.remove = _cannot_remove
    if isinstance(module, ParametrizationList):
        module._is_tensor = module.__dict__.pop("is_tensor")


def _is_tensor(parametrizations: ParametrizationList) -> bool:
    """The first that remove_parametrizations() asks, and the last that this file can
    answer before something is changed."""
    if not torch.compiler.is_compiling():
        if inspect.currentframe().f_back.f_code is remove_parametrizations.__code__:
            _cannot_remove()
    return parametrizations._is_tensor


def _attributes_of(cls: type) -> dict:
    is_list = issubclass(cls, ParametrizationList)
    return dict(is_tensor=property(_is_tensor)) if is_list else {}


# What random values a DTensor gets depends on the number of ranks. Inside
# disable_data_parallel() each rank draws the whole tensor and keeps its shard; nothing
# is sent, so all ranks must have been seeded alike. What DRAWS lacks (torch.normal,
# multinomial), DTensor refuses.
DRAWS = (
    "normal_ uniform_ bernoulli_ exponential_ geometric_ log_normal_ cauchy_ random_ "
    "rand_like randn_like randint_like eye"
).split()


class _Drawing(dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        target = kwargs.get("out", args[0] if args else None)
        if not isinstance(target, DTensor):
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        base = target._base  # of a view; an index gives a copy of a shard
        lost = (
            isinstance(base, DTensor)
            and base.is_leaf
            and _address(base) != _address(target)
        )
        # bernoulli, without _, would read a shard.
        if (lost and func._schema.is_mutable) or name == "bernoulli":
            raise RuntimeError(
                f"{func._schema.name} would change a copy, not the sharded tensor: "
                "fill the whole parameter in place, not an index or a view of it"
            )
        tensors = sum(isinstance(arg, Tensor) for arg in args)
        if name in DRAWS and tensors < 2:
            return _draw_whole(func, target, args, kwargs)
        return func(*args, **kwargs)


def _draw_whole(draw, target: DTensor, args: tuple, kwargs: dict) -> DTensor:
    """Draws the whole tensor and keeps this rank's shard. Sends nothing."""
    whole = torch.empty_strided(
        target.shape, target.stride(), dtype=target.dtype, device=target.device
    )
    if "out" in kwargs:
        drawn = draw(*args, **kwargs | dict(out=whole))
    else:
        drawn = draw(whole, *args[1:], **kwargs)
    shard = distribute_tensor(
        drawn, target.device_mesh, target.placements, src_data_rank=None
    )
    return target.copy_(shard) if drawn is whole else shard


@contextmanager
def _drawing() -> Iterator[None]:
    # nn.init.trunc_normal_ draws again until no value lies outside of the limits (since
    # torch 2.12). Asked of a shard, ranks would draw a different number of times and
    # then differ in all later values; torch 2.14 runs a collective.
    before = nn.init._no_grad_trunc_normal_

    @torch.no_grad()
    def truncated(tensor, *args, **kwargs):
        if isinstance(tensor, DTensor):
            return _draw_whole(before, tensor, (tensor, *args), kwargs)
        return before(tensor, *args, **kwargs)

    nn.init._no_grad_trunc_normal_ = truncated
    try:
        with _Drawing():
            yield
    finally:
        nn.init._no_grad_trunc_normal_ = before


_strict.check = _check
_strict.check_root = _check_root
_strict.warn_of_dtype = _warn_of_dtype
_strict.refuse_removal = _refuse_removal
_strict.attributes = _attributes_of
_strict.watch_optimizers = _watch_optimizers
_strict.drawing = _drawing
_strict.check_saved = _check_saved
