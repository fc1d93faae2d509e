"""SimpleFSDP: any nn.Module as sharded DTensors that are gathered on use. One file, imports only torch: copy it.

    from simple_fsdp import MixedPrecisionPolicy, data_parallel
    mesh = torch.distributed.init_device_mesh("cuda", (world_size,))
    model = data_parallel(model, mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    model = torch.compile(model, fullgraph=True, options=overlap.compile_options(model))    # or stay eager

While the model runs, reading `module.weight` gives the whole parameter; elsewhere it gives the sharded DTensor itself.
Its gradient arrives sharded, in the stored dtype, and **averaged** over the ranks (torchtitan's sums now): a loss
normalised by a token count divides by the mean count per rank. Inputs are not cast. Not for tensor or pipeline
parallelism. Torch 2.11 to 2.14, Python 3.11 or later. Paper: arXiv:2411.00284.

A **unit** is a module whose parameters are gathered by one collective and whose gradients are reduced by one: as a
rule a block of the model (`units_of`). A module in no unit gathers its own parameters.

Three parts. The core is all that compiled code needs. Eager mode gathers units while Python runs, and again in
backward. Strictness refuses what would be silently wrong, and draws initial values as one process would.
"""

import functools
import operator
import threading
import weakref
from collections import namedtuple
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import count, islice
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.distributed import DeviceMesh, get_backend
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.traceback import get_current_meta
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode_temporarily
from torch.utils._python_dispatch import _get_current_dispatch_mode as _top_mode
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.weak import WeakTensorKeyDictionary

# All that this file uses of torch's private names: the modules of is_fake and TorchDispatchMode (_python_dispatch), the
# functions below, and the attributes Module._parameters, Tensor._base, Tensor._version, Tensor._backward_hooks,
# Tensor._post_accumulate_grad_hooks, UntypedStorage._cdata, OpOverload._schema, DTensor._local_tensor, DTensor._spec,
# RNNBase._flat_weights, RNNBase._flat_weights_names, aten._is_any_true, nn.init._no_grad_trunc_normal_. A test of each
# says which is missing. Not documented: what get_proxy_mode and get_current_meta give, and the meta of a graph's nodes.
_c10d = torch.ops._c10d_functional
_top_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_SELECTIVE = checkpoint._CachingTorchDispatchMode, checkpoint._CachedTorchDispatchMode  # modes of selective checkpoints
_backward_runs = torch._C._current_graph_task_id  # -1: none on this thread
_compiled_code_runs = torch._C._dynamo.eval_frame.get_eval_frame_callback  # None: none on this thread
_transform = torch._C._functorch.peek_interpreter_stack  # None outside of torch.func's vmap, jvp, grad
_without_transforms = torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack
_catch_up, _behind = torch._sync, torch._from_functional_tensor  # of a functional tensor: with writes to its memory
_handlers = DTensor._op_dispatcher._custom_op_handlers  # of operations on DTensors; ours alone is added

MODES = ("replicate", "fully_shard", "hybrid_shard")
INITIALISE = ("apply", "reset_parameters", "init_weights")  # methods of modules that fill parameters

# ===================================================================================================== part 1: the core


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """`param_dtype`: dtype of the gathered parameter and of the all-gather (None: as stored). `reduce_dtype`: dtype of
    the gradient reduction (None: as the gradient was computed, i.e. param_dtype, which is FSDP2's rule). Gradients land
    in the stored dtype. Only floating-point parameters are cast, and alike at every world size, 1 included."""

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None


_enabled = True  # False inside disable_data_parallel()
_roots = weakref.WeakValueDictionary()  # by id: the modules given to data_parallel()
_shards = WeakTensorKeyDictionary()  # by unsharded parameter: one that several modules share stays shared
# What the other two parts replace. Without them parameters read as shards in eager mode, and nothing is checked.
_eager = SimpleNamespace(read=lambda module, p: p, run=lambda module, call, args, kwargs: call(*args, **kwargs))
_strict = SimpleNamespace(check=lambda *args: None, check_root=lambda root: None, drawing=nullcontext)

# ---------------------------------------------------------------- the pair: gather in forward, reduce in backward
#
# Two parameters, w [6, 4] and b [6], on 2 ranks, each of which holds w [3, 4] and b [3]:
#
#   gather    w [3, 4], b [3]   -> side by side, [1, 12 + 3]  -> all-gather     [2, 15] -> w [2, 12] as [6, 4], b [6]
#   reduce    grads [6, 4], [6] -> side by side, [2, 12 + 3]  -> reduce-scatter [1, 15] -> w [3, 4], b [3]


def _dtypes(p: DTensor, param_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None) -> tuple[torch.dtype, ...]:
    """The dtype that `p` is gathered in and the one that its gradient is reduced in."""
    if not p.dtype.is_floating_point:
        return p.dtype, p.dtype
    dtype = param_dtype or p.dtype
    return dtype, reduce_dtype or dtype


def _over(p: DTensor, dim: int) -> tuple[bool, int, str]:
    """Of a dimension of the mesh: whether `p` is sharded over it, the number of ranks, the name of their group."""
    return p.placements[dim].is_shard(), p.device_mesh.size(dim), p.device_mesh.get_group(dim).group_name


def _padded(t: Tensor, rows: int) -> Tensor:
    """`t` with zeros up to this number of rows: where N does not divide them, the last ranks hold fewer."""
    if len(t) < rows:
        t = nn.functional.pad(t, [0] * (2 * t.ndim - 1) + [rows - len(t)])
    return t.contiguous()  # after padding, too, which keeps channels_last


def _fit(t: Tensor, shape: torch.Size) -> Tensor:
    """What a collective gave, without the padding, in this shape."""
    return t if t.shape == shape else t.view(-1)[: shape.numel()].view(shape)


def _joined(tensors: list[Tensor], rows: int) -> Tensor:
    """Tensors side by side, each as [rows, n], as one flat tensor."""
    return tensors[0] if len(tensors) == 1 else torch.cat([t.view(rows, -1) for t in tensors], 1).view(-1)


def _apart(flat: Tensor, rows: int, sizes: list[int], cut) -> list[Tensor]:
    """The reverse: of each tensor [rows, size]."""
    return [flat] if len(sizes) == 1 else cut(flat.view(rows, -1), sizes, 1)


def _averaged(grads: list[Tensor], like: DTensor, cut) -> list[Tensor]:
    """Whole gradients, of parameters as this one -> flat averages over the ranks, as sharded as the parameters are."""
    ranks = like.device_mesh.size(-1) if like.placements[-1].is_shard() else 1
    grads = [_padded(t, -(-len(t) // ranks) * ranks) if t.ndim else t for t in grads]
    flat = _joined(grads, ranks)
    for dim in reversed(range(like.device_mesh.ndim)):  # hybrid_shard: scatters, then reduces the shards
        sharded, n, group = _over(like, dim)
        if sharded and n > 1:
            flat = _c10d.wait_tensor(_c10d.reduce_scatter_tensor(flat, "avg", n, group))
        elif n > 1:
            flat = _c10d.wait_tensor(_c10d.all_reduce(flat, "avg", group))
    return _apart(flat, 1, [t.numel() // ranks for t in grads], cut)


class _Gather(torch.autograd.Function):
    """Parameters, alike in dtypes, mesh and placements -> whole plain tensors in `dtype`, by one all-gather."""

    @staticmethod
    def forward(ctx, source, dtype: torch.dtype, reduce_dtype: torch.dtype, *params: DTensor):
        """source: a note for the nodes of a graph (compiled code), a _Call (eager mode), None, False: only shapes are
        asked for, or a Tensor: what was gathered before."""
        ctx.source, ctx.reduce_dtype, ctx.params = source, reduce_dtype, params
        ctx.set_materialize_grads(False)
        sharded, ranks, group = _over(params[0], -1)
        wholes = [p._local_tensor.to(dtype) for p in params] if not isinstance(source, Tensor) else [source.detach()]
        if isinstance(source, Tensor):
            ctx.source = None
        elif sharded and ranks > 1 and source is False:
            wholes = [t.new_empty(p.shape) for t, p in zip(wholes, params, strict=True)]
        elif sharded and ranks > 1:
            shards = [_padded(t, -(-len(p) // ranks)) for t, p in zip(wholes, params, strict=True)]
            flat = _c10d.wait_tensor(_c10d.all_gather_into_tensor(_joined(shards, 1), ranks, group))
            cut = _cut if isinstance(source, dict) else torch.split_with_sizes_copy
            wholes = _apart(flat, ranks, [t.numel() for t in shards], cut)
            wholes = [_fit(t, p.shape) for t, p in zip(wholes, params, strict=True)]
        # On one rank without a cast this is the shard itself: a view, so that autograd tells them apart.
        wholes = [t.view_as(t) if t is p._local_tensor else t for t, p in zip(wholes, params, strict=True)]
        ctx.mark_non_differentiable(*(t for t, p in zip(wholes, params, strict=True) if not p.requires_grad))
        return tuple(wholes)

    @staticmethod
    def backward(ctx, *grads: Tensor | None):
        note = ctx.source if isinstance(ctx.source, dict) else None
        if ctx.source and note is None:
            ctx.source.again = {}
        like = [p for p, grad in zip(ctx.params, grads, strict=True) if grad is not None]
        present = [grad for grad in grads if grad is not None]
        shards = iter(_Reduce.apply(note, ctx.reduce_dtype, like, *present) if like else ())
        return None, None, None, *(None if grad is None else next(shards) for grad in grads)


class _Reduce(torch.autograd.Function):
    """Whole gradients of the parameters `like` -> their averages over the ranks as shards, in the stored dtype. With
    _Gather each is the other's backward, so that gradients of gradients work too."""

    @staticmethod
    def forward(ctx, note: dict | None, dtype: torch.dtype, like: list[DTensor], *grads: Tensor):
        ctx.dtypes, ctx.like = (grads[0].dtype, dtype), like
        ctx.set_materialize_grads(False)
        with _noted(note):
            shards = [grad.to(dtype) for grad in grads]
            if like[0].device_mesh.size() > 1:
                # Graphs get views, and copy where the optimizer reads. In eager mode a gradient would hold all others.
                cut = torch.split_with_sizes if note else torch.split_with_sizes_copy
                shards = _averaged(shards, like[0], cut)
            shards = [_fit(t, p._local_tensor.shape).to(p.dtype) for t, p in zip(shards, like, strict=True)]
        if note is None:  # autograd may give several the same memory, or a whole tensor that of one element
            pairs = zip(shards, grads, strict=True)
            shards = [t.clone(memory_format=torch.contiguous_format) if t is grad else t for t, grad in pairs]
        return tuple(DTensor(t, p._spec, requires_grad=False) for t, p in zip(shards, like, strict=True))

    @staticmethod
    def backward(ctx, *grads: DTensor | None):
        pairs = [(grad, p) for grad, p in zip(grads, ctx.like, strict=True) if grad is not None]
        present = [grad.redistribute(placements=p.placements) for grad, p in pairs]
        wholes = iter(_Gather.apply(None, *ctx.dtypes, *present) if present else ())
        return None, None, None, *(None if grad is None else next(wholes) for grad in grads)


# ------------------------------------------------------------------------------ the operations for compiled code
#
# Dynamo does not look into these operations, AOTAutograd does: what stands in its graph are the collectives. A unit's
# forward begins with `gather_unit`, which gathers its parameters. Each `gather` that follows, where a module reads one
# of them, finds it on the parameter, which is an object of this trace alone: Dynamo sees no side effect.

_library, _loader = torch.library.Library("simple_fsdp", "FRAGMENT"), globals().get("__loader__")
_VERSION = hash(int.from_bytes(_loader.get_data(__file__))) if hasattr(_loader, "get_data") else id(_library)
_COPY = next(i for i in count() if not hasattr(torch.ops.simple_fsdp, f"gather_{i}"))  # of this file in the process
_POLICY = "ScalarType? param_dtype, ScalarType? reduce_dtype, bool reshard"
_NAME = _library.define(f"gather_{_COPY}(Tensor p, {_POLICY}) -> Tensor")
_UNIT_NAME = _library.define(f"gather_unit_{_COPY}(Tensor[] params, {_POLICY}) -> ()")
_CUT_NAME = _library.define(f"cut_{_COPY}(Tensor rows, SymInt[] sizes, int dim=1) -> Tensor[]")
_gather = getattr(torch.ops.simple_fsdp, _NAME).default
_gather_unit = torch.fx.node.has_side_effect(getattr(torch.ops.simple_fsdp, _UNIT_NAME).default)  # it has no result
_cut = getattr(torch.ops.simple_fsdp, _CUT_NAME).default

# Gathered rows are cut up by an operation that Inductor does not look into, so that their memory is free again. Of
# views, Inductor would copy each where it is used, and hold all rows until the last of them.
@torch.library.impl(_library, _CUT_NAME, "CompositeExplicitAutograd")
def _cut_up(rows: Tensor, sizes: list[int], dim: int = 1) -> list[Tensor]:
    return torch.split_with_sizes_copy(rows, sizes, dim)


@torch.library.register_fake(_cut, lib=_library)
def _shapes(rows: Tensor, sizes: list[int], dim: int = 1) -> list[Tensor]:
    return [rows.new_empty(len(rows), size) for size in sizes]


@contextmanager
def _noted(note: dict | None) -> Iterator[list]:
    """Notes at the nodes that AOTAutograd's graph gets inside of it whose they are; gives a list of them, too."""
    nodes, all_nodes = [], get_proxy_mode().tracer.graph.nodes if note else ()
    before = len(all_nodes)
    yield nodes
    nodes += islice(reversed(all_nodes), len(all_nodes) - before)
    for node in nodes:
        node.meta.update(note)


def _traced(params: list[DTensor], policy: tuple, reshard: bool) -> tuple[Tensor, ...]:
    """Gathers, in the graph that AOTAutograd makes, parameters that are alike. overlap.py reads what is noted: the path
    of the unit in the graph, "" for what lies in none, and of each parameter a path and its shape."""
    stack = list((get_current_meta().get("nn_module_stack") or {}).values())
    path = stack[-1][0] if stack else ""
    unit = next((path for path, cls in reversed(stack) if _is_unit(cls)), "")
    note = dict(unit=unit, bucket=[(unit or path, tuple(p.shape)) for p in params])
    with _noted(note) as nodes:
        wholes = _Gather.apply(note, *_dtypes(params[0], *policy), *params)
    # Backward gathers again, as it would under a checkpoint. To be kept are the parts, not the rows that they were cut
    # from. The region's number is of its own: otherwise the partitioner takes the gather for a part of some other
    # checkpoint, and saves that one's input.
    parts = (_cut, operator.getitem) if len(params) > 1 else (_c10d.wait_tensor.default,)
    for node in nodes:
        saved = not reshard and node.target in parts
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE
        node.meta["ac_graph_id"] = 1 << 60
    return wholes


def _moment(p: DTensor, *policy: torch.dtype | None) -> tuple[tuple, Tensor]:
    """In which trace, how, and how differentiable a parameter is gathered: at another moment it is another tensor. And
    what functionalization has for its shard: another tensor once anything has changed that memory, whose id is among
    the former, and is its own as long as it is kept."""
    _catch_up(p._local_tensor)
    shard = _behind(p._local_tensor.elem)
    return (id(get_proxy_mode().tracer), policy, torch.is_grad_enabled(), p.requires_grad, id(shard)), shard


@torch.library.impl(_library, _UNIT_NAME, "CompositeImplicitAutograd")
def _gather_all(params: list[DTensor], param_dtype, reduce_dtype, reshard: bool) -> None:
    if get_proxy_mode() is None:  # Dynamo asks for shapes: there are none
        return
    policy = param_dtype, reduce_dtype
    # A unit that runs twice is gathered once, and reduces the sum of its gradients. So is a tied parameter.
    new = [p for p in dict.fromkeys(params) if getattr(p, "_gathered", (None,))[0] != _moment(p, *policy)[0]]
    for alike in _alike(new):
        for p, whole in zip(alike, _traced(alike, policy, reshard), strict=True):
            p._gathered = *_moment(p, *policy), whole


@torch.library.impl(_library, _NAME, "CompositeImplicitAutograd")
def _gather_one(p: DTensor, param_dtype, reduce_dtype, reshard: bool) -> Tensor:
    if get_proxy_mode() is None:  # Dynamo, and AOTAutograd before it makes its graph, ask for the shape
        source = False if is_fake(p._local_tensor) else None
        return _Gather.apply(source, *_dtypes(p, param_dtype, reduce_dtype), p)[0]
    _gather_all([p], param_dtype, reduce_dtype, reshard)
    return p._gathered[-1]


_handlers[_gather] = lambda op, args, _: _gather_one(*args)  # in inference mode
# detect_anomaly asks each gradient, and ours are DTensors. DTensor lacks this operation: it would raise.
_handlers[torch.ops.aten._is_any_true.default] = lambda op, args, _: op(args[0].to_local())


def _alike(params: Iterable[DTensor]) -> Iterable[list[DTensor]]:
    """Sets of parameters that one collective can carry."""
    sets = {}
    for p in params:
        sets.setdefault((p.device_mesh, p.placements, p.dtype), []).append(p)
    return sets.values()


# ------------------------------------------------------------------------------------- which modules are units


def _is_unit(cls: type) -> bool:
    return getattr(cls, "_data_parallel_unit", False)


def _plain(module: nn.Module) -> type:
    """The class of a module before data_parallel()."""
    return getattr(type(module), "_data_parallel_class", type(module))


def _is_list(module: nn.Module) -> bool:
    """A ModuleList, ModuleDict or Sequential, unless it has a forward of its own."""
    plain = _plain(module).forward in (nn.Sequential.forward, nn.Module.forward)
    return plain and isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential)


def _is_built(module: nn.Module) -> bool:
    """Whether a module is made of others that hold parameters."""
    return any(True for child in module.children() for _ in child.parameters())


def _holds_blocks(module: nn.Module, listed: bool) -> bool:
    """Whether a module holds a list of blocks: built modules, of which two have one class, or just one. A member of a
    list counts as a stage only if the blocks in it are made of built modules; an attribute also if nothing built
    stands beside its list, as attention does beside a list of experts."""
    built = [m for m in module.modules() if m is not module and _is_built(m) and not _is_list(m)]
    for each in filter(_is_list, module.modules()):
        blocks = [m for m in each.children() if m in built]
        classes = {_plain(m) for m in blocks}
        if len(blocks) == 1 or len(classes) < len(blocks):
            inside = set(each.modules())
            beside = [m for m in built if m not in inside and each not in set(m.modules())]
            if any(_is_built(child) for m in blocks for child in m.children()) or not (listed or beside):
                return True
    return False


def _parts(parent: nn.Module, listed: bool = False) -> Iterator[tuple[nn.Module, bool]]:
    """(module, whether it is in a list) of the built children, and of the members of lists in place of a list."""
    for child in parent.children():
        members = [m for m in child.children() if _is_built(m)] if _is_list(child) else []
        if members or isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _parts(child, True)
        elif _is_built(child):
            yield child, listed


def units_of(model: nn.Module) -> list[str]:
    """Names of the units of a model: the outermost modules, made of others, that hold no list of blocks, and such that
    were given to data_parallel() before the model; no Sequential of layers that is a third of the model. Of a wrapped
    model those that data_parallel() took."""
    units = [m for m in model.modules() if _is_unit(type(m))]
    if not any("_data_parallel" in m.__dict__ for m in model.modules()):
        units = _find_units(model)
    return [name for name, module in model.named_modules() if module in units]


def _elements(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _find_units(model: nn.Module) -> set[nn.Module]:
    units, third = set(), _elements(model) / 3

    def walk(parent: nn.Module) -> None:
        parts = list(_parts(parent))
        for part, listed in parts:
            large = _is_list(part) and _elements(part) >= third
            if large or _holds_blocks(part, listed) or (len(parts) == 1 and not listed):
                walk(part)
            else:
                units.add(part)

    walk(model)
    before = (m for m in islice(model.modules(), 1, None) if getattr(type(m), "_data_parallel_root", False))
    return units.union(m for m in before if _is_built(m) and not _holds_blocks(m, False))


def _members(unit: nn.Module) -> Iterator[nn.Module]:
    """The modules whose parameters a unit gathers: all that it holds, other units apart."""
    yield unit
    for child in unit.children():
        if not _is_unit(type(child)):
            yield from _members(child)


# --------------------------------------------------------------------------- the class that gathers on reading


def _reader(name: str) -> property:
    """What `module.name` is: while the model runs the gathered parameter, elsewhere the parameter itself."""

    def read(module: nn.Module) -> Tensor | None:
        try:  # and not `in`, which Dynamo pays for with a guard
            p = module._parameters[name]
        except KeyError as e:  # deleted
            raise AttributeError(name) from e
        if not _enabled or not isinstance(p, DTensor):  # functional_call puts tensors in the place of parameters
            return p
        try:
            policy = module._data_parallel
            return _gather(p, *policy) if torch.compiler.is_compiling() else _eager.read(module, p)
        except AttributeError as e:  # nn.Module.__getattr__ would swallow it and hand out the shard
            raise RuntimeError(f"cannot gather {name} of {type(module).__name__}: {e}") from e

    def write(module: nn.Module, value: Tensor) -> None:  # parameters and None do not come here
        raise TypeError(f"cannot make {name} of {type(module).__name__} a computed tensor (weight_norm, prune) after "
                        "data_parallel(): do that before it, or change the parameter in place")  # fmt: skip

    return property(read, write)


@functools.cache
def _wrapped_class(cls: type, names: tuple[str, ...], kind: str, is_root: bool) -> type:
    """The subclass of `cls` that gathers the parameters `names` when they are read. kind: "unit", "part" of one, or
    "alone". There is one class for each set of arguments, with all else on the instance, so that equal blocks share one
    compiled frame. Registries, such as those of Hugging Face, know a class by its name and module: they stay. `cls` is
    asked for its methods at each call: one that is replaced later, as kernel libraries do, is the one that runs."""

    @functools.wraps(cls.forward)  # tools read the names of the arguments
    def forward(self, *args, **kwargs):
        plain_forward = super(wrapped, self).forward
        if not torch.compiler.is_compiling():
            return _eager.run(self, plain_forward, args, kwargs)
        if is_root:
            _strict.check_root(id(self))
        if kind != "part" and _enabled:
            _gather_members(self)
        return plain_forward(*args, **kwargs)

    def call(self, *args, **kwargs):  # around hooks, and around a forward that is set on the instance
        plain_call = super(wrapped, self).__call__
        if torch.compiler.is_compiling():
            return plain_call(*args, **kwargs)
        return _eager.run(self, plain_call, args, kwargs)

    def initialising(method: str):
        def run(self, *args, **kwargs):
            with disable_data_parallel():
                return getattr(super(wrapped, self), method)(*args, **kwargs)

        return run

    def again(self, protocol):  # deepcopy and pickle cannot find this class: they make it again from its base
        return _new, (cls, names, kind, is_root), self.__getstate__()

    attributes = {method: initialising(method) for method in INITIALISE if hasattr(cls, method)}
    attributes |= {name: _reader(name) for name in names}
    attributes |= dict(forward=forward, __reduce_ex__=again, __module__=cls.__module__, __qualname__=cls.__qualname__)
    attributes |= dict(_data_parallel_class=cls, _data_parallel_names=names, _data_parallel_kind=kind)
    attributes |= dict(_data_parallel_unit=kind == "unit", _data_parallel_root=is_root)
    if is_root:
        attributes["__call__"] = call
    if issubclass(cls, nn.RNNBase):  # the list that they keep and assign is ignored, it is read anew
        weights = lambda self: [getattr(self, name, None) for name in self._flat_weights_names]  # noqa: E731
        attributes["_flat_weights"] = property(weights, lambda self, value: None)
        attributes["forward"] = torch.compiler.disable(forward)  # torch compiles none of them; not in pieces either
    wrapped = type(cls.__name__, (cls,), attributes)
    return wrapped


def _new(*of_class) -> nn.Module:
    module = object.__new__(_wrapped_class(*of_class))
    _roots[id(module)] = module  # a copied root is checked, too
    return module


def _gather_members(module: nn.Module) -> None:
    """In compiled code: gathers what a unit gathers, or a module its own parameters, those of one policy at once."""
    sets = {}
    for member in _members(module) if _is_unit(type(module)) else (module,):
        own = [p for p in member._parameters.values() if isinstance(p, DTensor)]
        if own:
            sets.setdefault(member._data_parallel, []).extend(own)
    for policy, params in sets.items():
        if len(params) > 1:
            _gather_unit(params, *policy)


def data_parallel(
    model: nn.Module,
    device_mesh: DeviceMesh,
    mode: str = "fully_shard",
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 (frozen)
    *,
    reshard_after_forward: bool = True,
    min_bytes: int = 0,
) -> nn.Module:
    """Shards every parameter of `model` in place over `device_mesh` and returns it; values are those of rank 0. Modules
    that are wrapped already stay as they are. A part that is wrapped before its model, say with another policy, is a
    unit, unless it holds blocks. A second call for the model is for what was added since, such as adapters.

    mode: "replicate" (DDP, a mesh of any shape), "fully_shard" (ZeRO-3, on dimension 0), "hybrid_shard" (2-D mesh:
    replicate, shard).
    reshard_after_forward: free gathered weights after forward and gather them again in backward.
    min_bytes: smaller parameters stay replicated, as do scalars and empty ones. Buffers are left alone.
    Raises ValueError, before anything is changed, for a wrong argument or a parameter that cannot be sharded."""
    _strict.check(model, device_mesh, mode, mp_policy)
    # AOTAutograd's cache key lacks group names, ranks and what lies behind an operation: it would take other code.
    tags = {f"{get_backend(g)}:{g.group_name}:{g.rank()}/{g.size()}" for g in device_mesh.get_all_groups()}
    tags.add(f"{_NAME}:{_VERSION}")
    torch.compiler.config.cache_key_tag = " ".join(sorted(tags.union(torch.compiler.config.cache_key_tag.split())))
    units = _find_units(model)
    for module in [m for m in model.modules() if "_data_parallel" not in m.__dict__]:
        own = {name: p for name, p in module._parameters.items() if p is not None}
        for name, p in own.items():
            if p not in _shards:
                replicated = mode == "replicate" or p.ndim == 0 or p.numel() == 0 or p.nbytes < min_bytes
                placements = [Replicate()] * (device_mesh.ndim - 1) + [Replicate() if replicated else Shard(0)]
                _shards[p] = nn.Parameter(distribute_tensor(p.detach(), device_mesh, placements), p.requires_grad)
                _shards[p].__dict__.update(p.__dict__)  # attributes that others have set on it
            module._parameters[name] = _shards[p]
        if module is model or next(module.parameters(), None) is not None:
            module.__dict__.pop("_flat_weights", None)  # an RNN's list, which holds the unsharded parameters
            module._data_parallel = mp_policy.param_dtype, mp_policy.reduce_dtype, reshard_after_forward
            module.__class__ = _wrapped_class(type(module), tuple(own), "alone", module is model)
    _roots[id(model)] = model
    inside = {member for unit in units for member in unit.modules()}
    for module in [m for m in model.modules() if "_data_parallel" in m.__dict__]:
        kind = "unit" if module in units else "part" if module in inside else "alone"
        cls, is_root = type(module), module is model or type(module)._data_parallel_root
        module.__class__ = _wrapped_class(cls._data_parallel_class, cls._data_parallel_names, kind, is_root)
    return model


@contextmanager
def disable_data_parallel():
    """Inside it a parameter is its own sharded DTensor in forward too, and nothing communicates: for initialisation,
    checkpoint helpers, inspection. Values are drawn as one process would. Re-entrant; for the whole process."""
    global _enabled
    before, _enabled = _enabled, False
    try:
        with _strict.drawing():
            yield
    finally:
        _enabled = before


ParameterRow = namedtuple("ParameterRow", "name shape dtype placement local_shape local_bytes unit")


def describe(model: nn.Module) -> list[ParameterRow]:
    """One row per parameter (ties once), with what this rank holds (placement "-": not wrapped) and the unit that
    gathers it ("": the module that holds it). No collective runs."""
    units, rows = units_of(model), []
    for name, p in model.named_parameters():
        own = getattr(p, "_local_tensor", p)
        placement = "-" if own is p else repr(p.placements[-1])
        unit = max((unit for unit in units if name.startswith(f"{unit}.")), key=len, default="")
        rows.append(ParameterRow(name, tuple(p.shape), p.dtype, placement, tuple(own.shape), own.nbytes, unit))
    return rows


# ================================================================================================ part 2: eager mode
#
# A unit's parameters are gathered when its forward first reads one of them, kept in a memo, and freed when it ends. A
# layer saves its gathered weight for backward; hooks have autograd keep a _GatherAgain instead. The _Call that gathered
# it hangs on the storage of the weight, where every view of it finds it and with which it is freed.


class _Thread(threading.local):
    memo = None  # what the innermost running forward has gathered; None outside of any
    module = None  # whose forward that is
    mode = None  # _mode() when it began


_thread = _Thread()
_calls = weakref.WeakValueDictionary()  # by _key: what has gathered a parameter last, as long as backward may need it
_GatherAgain = namedtuple("_GatherAgain", "call index versions size stride offset")  # the last three are the view's


class _Call:
    """Parameters that are gathered at once; and again, those that backward needs, until it has had each."""

    def __init__(self, params: list[DTensor], *policy: torch.dtype | None):
        self.params, self.dtypes = params, _dtypes(params[0], *policy)
        self.needed, self.again, self.saved, self.used = set(), {}, 0, 0

    def need(self, i: int) -> None:
        """Backward will ask for the i-th once more."""
        self.needed.add(i)
        self.saved += 1

    def whole(self, i: int) -> Tensor:
        """The i-th, gathered again; at the first call with all others that backward needs."""
        if i not in self.again:
            needed = sorted(self.needed.union([i]))  # on all ranks in the same order
            with torch.no_grad(), _unseen():
                wholes = _Gather.apply(None, *self.dtypes, *(self.params[j] for j in needed))
            self.again, self.used = dict(zip(needed, wholes, strict=True)), 0
        whole = self.again[i]
        self.used += 1
        if self.used == self.saved:
            self.again = {}
        return whole


def _memory(p: DTensor) -> int:
    return p._local_tensor.untyped_storage()._cdata


def _versions(p: DTensor) -> tuple[int, int]:
    return p._version, p._local_tensor._version  # one counts changes of the DTensor, one those of its local shard


def _pack(saved: Tensor) -> Tensor | _GatherAgain:
    call, i = getattr(saved.untyped_storage(), "_sharded", (None, 0)) if saved.layout is torch.strided else (None, 0)
    if call is None or saved.dtype != call.dtypes[0] or saved.is_conj():  # as_strided could not make the latter again
        return saved
    call.need(i)
    return _GatherAgain(call, i, _versions(call.params[i]), saved.size(), saved.stride(), saved.storage_offset())


def _unpack(kept: Tensor | _GatherAgain) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    if _versions(kept.call.params[kept.index]) != kept.versions:
        raise RuntimeError("a parameter was changed in place between its forward and its backward")
    return kept.call.whole(kept.index).as_strided(kept.size, kept.stride, kept.offset)


@contextmanager
def unsharded(module: nn.Module | None = None):
    """Inside it parameters read as whole tensors, as in forward: for a regulariser or a method that computes with them.
    Each is gathered at its first use (with all of `module`, if that is a unit) and freed at the end. RuntimeError for
    one that was changed in place by then."""
    if torch.compiler.is_compiling():
        yield
        return
    # Saved tensors go through hooks. Not where there are hooks already: on top of an activation checkpoint's, ours
    # would switch it off, and it keeps no weight anyway. Nor where torch.func forbids them.
    hooks = torch.is_grad_enabled() and _top_saved_tensors_hooks(True) is None and _transform() is None
    before, memo = (_thread.memo, _thread.module, _thread.mode), dict(_thread.memo or ())
    with torch.autograd.graph.saved_tensors_hooks(_pack, _unpack) if hooks else nullcontext():
        _thread.memo, _thread.module, _thread.mode = memo, module, _mode()
        try:
            yield
        finally:
            _thread.memo, _thread.module, _thread.mode = before
    for whole, version, name, *_ in memo.values():
        if not whole.is_inference() and whole._version != version:
            raise RuntimeError(f"{name} was changed in place while it was gathered, which is lost: do it elsewhere")


@contextmanager
def _unseen():
    """Inside it a selective checkpoint, which is a mode, sees nothing: its forward and what repeats that gather at
    different places."""
    with ExitStack() as stack:
        while isinstance(_top_mode(), _SELECTIVE):
            stack.enter_context(_pop_mode_temporarily())
        yield


def _mode() -> tuple:
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled()  # a weight gathered under no_grad has no backward


def _key(p: DTensor, policy: tuple) -> tuple:
    """What makes a gathered weight another one: a parameter that has changed, or is frozen now, is gathered again."""
    return id(p), policy, *_versions(p), p.requires_grad, *_mode()


def _gather_into(memo: dict, modules: Iterable[nn.Module], only: DTensor | None = None) -> None:
    """Gathers the modules' own parameters, or just one: those that are alike by one collective."""
    sets = {}
    for module in modules:
        policy = module.__dict__.get("_data_parallel")
        for name, p in module._parameters.items() if policy else ():
            if isinstance(p, DTensor) and (only is None or only is p) and (key := _key(p, policy)) not in memo:
                alike = sets.setdefault((p.device_mesh, p.placements, p.dtype, policy), {})
                alike[key] = p, f"{name} of {type(module).__name__}"
    for (*_, (dtype, reduce_dtype, reshard)), alike in sets.items():
        call = _Call([p for p, _ in alike.values()], dtype, reduce_dtype)
        with _unseen(), _without_transforms() if _transform() is not None else nullcontext():
            wholes = _Gather.apply(call, *call.dtypes, *call.params)
        for i, (whole, (key, (p, name))) in enumerate(zip(wholes, alike.items(), strict=True)):
            storage = whole.untyped_storage()
            if reshard and storage._cdata != _memory(p):  # which it is on one rank without a cast
                storage._sharded = call, i
            memo[key] = whole, 0 if whole.is_inference() else whole._version, name, call, i, reshard
            _calls[key] = call


def _read(module: nn.Module, p: DTensor) -> Tensor:
    """The gathered parameter inside of a forward, of backward and of recomputation; elsewhere the parameter itself."""
    memo, key = _thread.memo, _key(p, module._data_parallel)
    if _backward_runs() != -1 and (call := _calls.get(key)):  # a checkpoint repeats a part of the forward
        i = next(i for i, own in enumerate(call.params) if own is p)
        with _unseen():
            return _Gather.apply(call.whole(i), *call.dtypes, p)[0]
    if memo is None:
        if _backward_runs() == -1 and not _compiled_code_runs():
            return p
        memo = {}  # nothing would free what a memo holds
    elif key not in memo and _is_unit(type(_thread.module)) and _thread.mode == _mode():
        _gather_into(memo, _members(_thread.module))
    if key not in memo:  # under another mode, as in no_grad, one by one
        _gather_into(memo, [module], None if module is _thread.module or _thread.mode == _mode() else p)
    whole, *_, call, i, reshard = memo[key]
    if _top_saved_tensors_hooks(True) not in (None, (_pack, _unpack)):  # in a checkpoint, which will ask again
        call.need(i)
        if not reshard:
            call.again[i] = whole.detach()
    return whole


CURES = {  # by words of torch's error: what to do where a model runs into it
    "mixed torch.Tensor and DTensor": "data_parallel: while the model runs, read a parameter as an attribute of its "
    "module, in the thread that called the model. What named_parameters() and get_parameter() give is the shard.",
    "yet support saved tensor hooks": "data_parallel: inside of a forward torch.func.grad, vjp and jacrev do not work: "
    "call them around the model, or torch.autograd.grad inside of it.",
}


def _run(module: nn.Module, call, args: tuple, kwargs: dict):
    """Runs a module's __call__ or forward. Parameters that are read meanwhile are gathered, and freed afterwards."""
    running = _is_unit(type(_thread.module)) and _thread.mode == _mode()
    covered = module._data_parallel_kind == "part" and running
    if not _enabled or covered or _thread.module is module:
        return call(*args, **kwargs)
    if type(module)._data_parallel_root:
        _strict.check_root(id(module))
    try:
        with unsharded(module):
            return call(*args, **kwargs)
    except RuntimeError as e:
        for words, cure in CURES.items():
            if words in str(e) and cure not in getattr(e, "__notes__", ()):
                e.add_note(cure)
        raise


_eager.read, _eager.run = _read, _run

# =============================================================================================== part 3: strictness


def _check(model: nn.Module, mesh: DeviceMesh, mode: str, mp: MixedPrecisionPolicy) -> None:
    if not isinstance(mp, MixedPrecisionPolicy):
        raise ValueError(f"mp_policy must be simple_fsdp's MixedPrecisionPolicy, got {mp!r}")
    if mode not in MODES:
        raise ValueError(f"mode={mode!r} does not exist: use one of {', '.join(MODES)}")
    ndim, kind = (2, "2-D mesh with mesh_dim_names") if mode == "hybrid_shard" else (1, "1-D mesh")
    if mode != "replicate" and (mesh.ndim != ndim or (ndim == 2 and not mesh.mesh_dim_names)):
        raise ValueError(f"mode={mode!r} needs a {kind}, got {mesh.ndim}-D, names {mesh.mesh_dim_names}")
    if {"_data_parallel" in m.__dict__ for m in model.modules() if m._parameters} == {True}:
        raise ValueError("every module with parameters is wrapped already: call data_parallel() once")
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(f"cannot shard {path or 'the model'}: a ScriptModule cannot be wrapped, wrap its source")
        for name, p in module._parameters.items():
            if p is not None and (why := _why_not(module, p)):
                raise ValueError(f"cannot shard {path + '.' * bool(path)}{name}: {why}")


def _why_not(module: nn.Module, p: nn.Parameter) -> str:
    """Why a parameter cannot be sharded; "" if it can."""
    if "_data_parallel" in module.__dict__:
        return "" if isinstance(p, DTensor) else "its module is wrapped already, copy it into the old parameter"
    if isinstance(p, DTensor):
        return f"it already is a DTensor with placements {p.placements}"
    if p._backward_hooks or p._post_accumulate_grad_hooks:
        return "its hooks would be lost, register them after data_parallel()"
    if isinstance(p, nn.parameter.UninitializedParameter):
        return "it has no shape yet, run one forward before wrapping"
    if type(p) is not nn.Parameter and not is_fake(p):
        return f"its class {type(p).__name__} would be lost, make it a plain nn.Parameter"
    if getattr(module, "sparse", False) is True:
        return "its gradient is sparse, build the embedding with sparse=False"
    return ""


@torch.compiler.assume_constant_result  # compiled: while tracing; takes no module, only constants
def _check_root(root: int) -> None:
    """RuntimeError for a parameter that trains without being gathered: every rank would get another."""
    for path, module in _roots[root].named_modules() if root in _roots and torch.is_grad_enabled() else ():
        for name, p in module._parameters.items():
            sharded = isinstance(p, DTensor) and name in getattr(module, "_data_parallel_names", ())
            if not sharded and isinstance(p, nn.Parameter) and p.requires_grad:  # functional_call puts plain tensors
                raise RuntimeError(f"{path + '.' * bool(path)}{name} is not sharded: it came after data_parallel(). "
                                   "Copy new values into the old parameter; call data_parallel(model, mesh) again for "
                                   "new modules (mode='replicate' suits small adapters)")  # fmt: skip


# What random values a DTensor gets depends on the number of ranks. Inside disable_data_parallel() each rank draws the
# whole tensor, from its own seed, and keeps its shard.
DRAWS = ("normal_ uniform_ bernoulli_ exponential_ geometric_ log_normal_ cauchy_ random_ rand_like randn_like "
         "randint_like eye").split()  # fmt: skip


class _Drawing(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        target = kwargs.get("out", args[0] if args else None)
        if not isinstance(target, DTensor):
            return func(*args, **kwargs)
        name, base = func.overloadpacket.__name__, target._base  # of a view; an index gives a copy of a shard
        lost = isinstance(base, DTensor) and base.is_leaf and _memory(base) != _memory(target)
        if (lost and func._schema.is_mutable) or name == "bernoulli":
            name = func._schema.name
            raise RuntimeError(f"{name} would not reach the sharded tensor: fill it in place and as a whole")
        if name in DRAWS and sum(isinstance(arg, Tensor) for arg in args) < 2:
            return _draw_whole(func, target, args, kwargs)
        return func(*args, **kwargs)


def _draw_whole(draw, target: DTensor, args: tuple, kwargs: dict) -> DTensor:
    """Sends nothing."""
    whole = torch.empty_strided(target.shape, target.stride(), dtype=target.dtype, device=target.device)
    if "out" in kwargs:
        drawn = draw(*args, **kwargs | dict(out=whole))
    else:
        drawn = draw(whole, *args[1:], **kwargs)
    shard = distribute_tensor(drawn, target.device_mesh, target.placements, src_data_rank=None)
    return target.copy_(shard) if drawn is whole else shard


@contextmanager
def _drawing() -> Iterator[None]:
    # nn.init.trunc_normal_ draws again until no value lies outside of the limits (since torch 2.12). Asked of a shard,
    # ranks would draw a different number of times and then differ in all later values; torch 2.14 runs a collective.
    before = nn.init._no_grad_trunc_normal_

    @torch.no_grad()
    def truncated(tensor: Tensor, *args, **kwargs) -> Tensor:
        if isinstance(tensor, DTensor):
            return _draw_whole(before, tensor, (tensor, *args), kwargs)
        return before(tensor, *args, **kwargs)

    nn.init._no_grad_trunc_normal_ = truncated
    try:
        with _Drawing():
            yield
    finally:
        nn.init._no_grad_trunc_normal_ = before


_strict.check, _strict.check_root, _strict.drawing = _check, _check_root, _drawing
