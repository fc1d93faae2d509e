"""SimpleFSDP: any nn.Module as sharded DTensors that are gathered on use. One file, imports only torch: copy it.

    from simple_fsdp import MixedPrecisionPolicy, data_parallel
    mesh = torch.distributed.init_device_mesh("cuda", (world_size,))
    model = data_parallel(model, mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    model = torch.compile(model)                       # or stay eager; then train as on one device

While the model runs, reading `module.weight` all-gathers the parameter; elsewhere it is the sharded DTensor itself. Its
gradient arrives sharded, in the stored dtype, and **averaged** over the ranks (torchtitan's file sums): a loss
normalised by a token count divides by the mean count per rank. Not for use under tensor or pipeline parallelism. Torch
2.11 to 2.14, Python 3.11 or later. Paper: arXiv:2411.00284.
"""

import functools
import threading
import weakref
from collections import namedtuple
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh, get_backend
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.weak import WeakTensorKeyDictionary

# All that this file uses of torch's private names: the module of TorchDispatchMode above, the functions below, and the
# attributes Module._parameters, Tensor._version, Tensor._backward_hooks, Tensor._post_accumulate_grad_hooks,
# UntypedStorage._cdata, OpOverload._schema, DTensor._local_tensor, RNNBase._flat_weights, RNNBase._flat_weights_names,
# aten._is_any_true. A test of each says which is missing.
_top_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_wait_tensor = torch.ops._c10d_functional.wait_tensor.default
_backward_runs = torch._C._current_graph_task_id  # -1: none on this thread
_compiled_code_runs = torch._C._dynamo.eval_frame.get_eval_frame_callback  # None: none on this thread
_transform = torch._C._functorch.peek_interpreter_stack  # None outside of torch.func's vmap, jvp, grad
_without_transforms = torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack
_handlers = DTensor._op_dispatcher._custom_op_handlers  # of operations on DTensors

MODES = ("replicate", "fully_shard", "hybrid_shard")
_enabled = True  # False inside disable_data_parallel()
_roots = weakref.WeakValueDictionary()  # by id: the modules given to data_parallel()
_shards = WeakTensorKeyDictionary()  # by unsharded parameter: one that several modules share stays shared


class _Thread(threading.local):
    memo = None  # what the innermost running eager forward has gathered; None outside of any


_thread = _Thread()


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """`param_dtype`: dtype of the gathered parameter and of the all-gather (None: as stored). `reduce_dtype`: dtype of
    the gradient reduction (None: as the gradient was computed, i.e. param_dtype, which is FSDP2's rule). Gradients land
    in the stored dtype. Only floating-point parameters are cast, and alike at every world size, 1 included."""

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None


@dataclass(frozen=True)
class _Policy:
    """How the parameters of one data_parallel() call are gathered. replica: with hybrid_shard, the mesh to do it on."""

    mp: MixedPrecisionPolicy
    reshard_after_forward: bool
    replica: DeviceMesh | None

    def __deepcopy__(self, memo):  # the copy of a module communicates over the same mesh
        return self


def _gather(p: DTensor, policy: _Policy) -> Tensor:
    """The whole parameter as a plain tensor in param_dtype. Its backward reduces the gradient to a shard."""
    param_dtype = policy.mp.param_dtype if p.dtype.is_floating_point else None
    reduce_dtype = policy.mp.reduce_dtype if p.dtype.is_floating_point else None
    reduce_dtype = reduce_dtype or param_dtype
    if policy.replica is not None:
        # Gather within the replica alone: DTensor would all-reduce whole gradients over the 2-D mesh and then scatter
        # them. The first line moves nothing in forward; its backward all-reduces the shard that is scattered before.
        p = p.redistribute(placements=p.placements, backward_dtype=reduce_dtype)
        shard = p.to_local(grad_placements=[Partial("avg"), p.placements[1]])
        p = DTensor.from_local(shard, policy.replica, p.placements[1:], shape=p.shape, stride=p.stride())
    shape, ranks = p.shape, p.device_mesh.size()
    uneven = p.placements[0].is_shard() and shape[0] % ranks != 0
    if uneven and ranks > 64:
        # Every shard gets ceil(rows / ranks) rows: DTensor's own padding, rank by rank, takes minutes to compile. Ours
        # puts a DeviceMesh into the graph, which torch's compile cache cannot hold: worth it only for many ranks.
        shard = p.to_local()
        padding = [0] * (2 * p.ndim - 1) + [-(-shape[0] // ranks) - len(shard)]  # all at the end of dimension 0
        p = DTensor.from_local(nn.functional.pad(shard, padding), p.device_mesh, [Shard(0)])
    whole = p.redistribute(placements=[Replicate()], forward_dtype=param_dtype, backward_dtype=reduce_dtype)
    whole = whole.to_local(grad_placements=[Partial("avg")])
    return whole[: shape[0]] if uneven and ranks > 64 else whole


# In compiled code each gather is an activation checkpoint of its own, so that backward gathers again. With this context
# the gathered weight is kept instead, even where a checkpoint around the module would gather it again.
def _keep_gathered():
    return create_selective_checkpoint_contexts([_wait_tensor])
_keep_gathered.cache_hash = "simple_fsdp-keep-gathered-1"  # without one, AOTAutograd would not cache the graph

# In eager mode a layer saves its gathered weight for backward; hooks have autograd keep a _GatherAgain instead. The
# _Origin hangs on the storage of the gathered weight, where every view of it finds it and with which it is freed.
_Origin = namedtuple("_Origin", "parameter policy dtype")  # the dtype as gathered
_GatherAgain = namedtuple("_GatherAgain", "origin versions size stride offset")  # the last three are the view's


def _pack(saved: Tensor) -> Tensor | _GatherAgain:
    if saved.layout is not torch.strided:  # it has no storage
        return saved
    origin = getattr(saved.untyped_storage(), "_sharded", None)
    p = origin and origin.parameter
    if p is None or saved.dtype != origin.dtype or saved.is_conj():  # as_strided could not make the latter two again
        return saved
    versions = p._version, p._local_tensor._version  # one counts changes of the DTensor, one those of its local shard
    return _GatherAgain(origin, versions, saved.size(), saved.stride(), saved.storage_offset())


def _unpack(kept: Tensor | _GatherAgain) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    p = kept.origin.parameter
    if (p._version, p._local_tensor._version) != kept.versions:
        raise RuntimeError("a parameter was changed in place between its forward and its backward")
    with torch.no_grad():
        return _gather(p, kept.origin.policy).as_strided(kept.size, kept.stride, kept.offset)


class unsharded:
    """Inside it parameters read as whole tensors, as in forward: for a regulariser or a method that computes with them.
    Each is gathered at its first use and freed at the end; RuntimeError for one that was changed in place by then."""

    def __enter__(self):
        if torch.compiler.is_compiling():
            return
        # Saved tensors go through hooks. Not where there are hooks already: on top of an activation checkpoint's, ours
        # would switch it off, and it keeps no weight anyway. Nor where torch.func forbids them.
        hooks = torch.is_grad_enabled() and _top_saved_tensors_hooks(True) is None and _transform() is None
        hooks = torch.autograd.graph.saved_tensors_hooks(_pack, _unpack) if hooks else nullcontext()
        hooks.__enter__()
        self.__dict__.setdefault("entered", []).append((hooks, _thread.memo))
        _thread.memo = {}

    def __exit__(self, error, *_):
        if torch.compiler.is_compiling():
            return
        memo, (hooks, _thread.memo) = _thread.memo, self.entered.pop()
        hooks.__exit__(error, *_)
        for whole, version, name in memo.values() if error is None else ():
            if not whole.is_inference() and whole._version != version:
                raise RuntimeError(f"{name} was changed in place while it was gathered, which is lost: do it elsewhere")


def _gather_once(p: DTensor, policy: _Policy, name: str) -> Tensor:
    memo = {} if _thread.memo is None else _thread.memo  # outside of any forward nothing would free what it holds
    # A weight gathered under no_grad has no backward. An activation checkpoint, which sets hooks, gathers its own. Nor
    # does a parameter that has changed since read as it was.
    key = id(p), p._version, p._local_tensor._version, torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    key = *key, _top_saved_tensors_hooks(True)
    if key not in memo:
        with _without_transforms() if _transform() is not None else nullcontext():
            whole = _gather(p, policy)
        storage = whole.untyped_storage()
        is_parameter = storage._cdata == p._local_tensor.untyped_storage()._cdata  # one rank, no cast
        if policy.reshard_after_forward and not is_parameter:
            storage._sharded = _Origin(p, policy, whole.dtype)
        memo[key] = whole, 0 if whole.is_inference() else whole._version, name
    return memo[key][0]


def _reader(name: str) -> property:
    """What `module.name` is: while the model runs the gathered parameter, elsewhere the parameter itself."""

    def read(module: nn.Module) -> Tensor | None:
        if name not in module._parameters:  # deleted
            raise AttributeError(name)
        p, compiling = module._parameters[name], torch.compiler.is_compiling()
        try:
            if not _enabled or not isinstance(p, DTensor):  # functional_call puts tensors in the place of parameters
                return p
            policy = module._data_parallel
            if compiling:
                keep = {} if policy.reshard_after_forward else dict(context_fn=_keep_gathered)
                return checkpoint(_gather, p, policy, use_reentrant=False, preserve_rng_state=False, **keep)
            runs = _thread.memo is not None or _backward_runs() != -1 or _compiled_code_runs()
            return _gather_once(p, policy, f"{name} of {type(module).__name__}") if runs else p
        except AttributeError as e:  # nn.Module.__getattr__ would swallow it and hand out the shard
            raise RuntimeError(f"cannot gather {name} of {type(module).__name__}: {e}") from e

    def write(module: nn.Module, value: Tensor) -> None:  # parameters and None do not come here
        raise TypeError(f"cannot make {name} of {type(module).__name__} a computed tensor (weight_norm, prune) after "
                        "data_parallel(): do that before it, or change the parameter in place")  # fmt: skip

    return property(read, write)


@torch.compiler.assume_constant_result  # compiled: while tracing; takes no module, only constants
def _refuse_unsharded(root: int) -> None:
    """RuntimeError for a parameter that trains without being gathered: every rank would get another."""
    for path, module in _roots[root].named_modules() if root in _roots and torch.is_grad_enabled() else ():
        gathered = getattr(type(module), "_gathered", ())
        for name, p in module._parameters.items():
            sharded = name in gathered and isinstance(p, DTensor)
            if not sharded and isinstance(p, nn.Parameter) and p.requires_grad:  # functional_call puts plain tensors
                raise RuntimeError(
                    f"{path + '.' * bool(path)}{name} is not sharded: it came after data_parallel(). Copy new values "
                    "into the old parameter; call data_parallel(model, mesh) again for new modules (mode='replicate' "
                    "suits small adapters)")  # fmt: skip


@functools.cache
def _wrapped_class(cls: type, names: tuple[str, ...]) -> type:
    """The subclass of `cls` that gathers the parameters `names` when they are read. One for each (class, names), with
    all else on the instance, so that equal blocks share one compiled frame. Others, such as Hugging Face's registries,
    know a class by its name and module: they stay."""

    plain_forward = cls.forward  # read here: Dynamo cannot read it of a class that is allowed in graphs

    @functools.wraps(plain_forward)
    def forward(self, *args, **kwargs):
        if self._data_parallel_root:
            _refuse_unsharded(id(self))
        with unsharded():
            return plain_forward(self, *args, **kwargs)

    def __reduce_ex__(self, protocol):  # deepcopy and pickle cannot find this class: they make it again from its base
        return _new, (cls, names), self.__getstate__()

    def flat_weights(self):  # of torch's RNNs: the list that they keep and assign is ignored, it is read anew
        return [getattr(self, name, None) for name in self._flat_weights_names]

    attributes = {name: _reader(name) for name in names} | dict(forward=forward, __reduce_ex__=__reduce_ex__)
    attributes |= dict(__module__=cls.__module__, __qualname__=cls.__qualname__)
    attributes |= dict(_gathered=names, _data_parallel_root=False)  # True on a model given to data_parallel()
    for name in {"apply", "reset_parameters"} & {*dir(cls)}:  # initialise: what would be lost there is refused
        attributes[name] = disable_data_parallel()(getattr(cls, name))
    if issubclass(cls, nn.RNNBase):
        attributes["_flat_weights"] = property(flat_weights, lambda self, value: None)
        attributes["forward"] = torch.compiler.disable(forward)  # torch compiles none of them; not in pieces either
    return type(cls.__name__, (cls,), attributes)


def _new(cls: type, names: tuple[str, ...]) -> nn.Module:
    module = object.__new__(_wrapped_class(cls, names))
    _roots[id(module)] = module  # a copied root is checked, too
    return module


def _check(model: nn.Module, mesh: DeviceMesh, mode: str) -> None:
    if mode not in MODES:
        raise ValueError(f"mode={mode!r} does not exist: use one of {', '.join(MODES)}")
    ndim, kind = (2, "2-D mesh with mesh_dim_names") if mode == "hybrid_shard" else (1, "1-D mesh")
    if mesh.ndim != ndim or (ndim == 2 and not mesh.mesh_dim_names):
        raise ValueError(f"mode={mode!r} needs a {kind}, got {mesh.ndim}-D, names {mesh.mesh_dim_names}")
    if {"_data_parallel" in m.__dict__ for m in model.modules() if m._parameters} == {True}:
        raise ValueError("every module with parameters is wrapped already: call data_parallel() once")
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(f"cannot shard {path or 'the model'}: a ScriptModule cannot be wrapped, wrap its source")
        wrapped = "_data_parallel" in module.__dict__
        for name, p in module._parameters.items():
            name = f"{path}.{name}" if path else name
            if wrapped and p is not None and not isinstance(p, DTensor):
                raise ValueError(f"cannot shard {name}: its module is wrapped already, copy it into the old parameter")
            if p is not None and not wrapped and (p._backward_hooks or p._post_accumulate_grad_hooks):
                raise ValueError(f"cannot shard {name}: its hooks would be lost, register them after data_parallel()")
            if isinstance(p, DTensor) and not wrapped:
                raise ValueError(f"cannot shard {name}: it already is a DTensor with placements {p.placements}")
            if isinstance(p, nn.parameter.UninitializedParameter):
                raise ValueError(f"cannot shard {name}: it has no shape yet, run one forward before wrapping")
            if p is not None and getattr(module, "sparse", False) is True:
                raise ValueError(f"cannot shard {name}: its gradient is sparse, build the embedding with sparse=False")


def data_parallel(
    model: nn.Module, device_mesh: DeviceMesh, mode: str = "fully_shard",
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(), *,  # noqa: B008 (frozen)
    reshard_after_forward: bool = True, min_bytes: int = 0,
) -> nn.Module:  # fmt: skip
    """Shards every parameter of `model` in place over `device_mesh` and returns it; values are those of rank 0. Modules
    that are wrapped already stay as they are: a second call is for what was added since, such as adapters.

    mode: "replicate" (DDP), "fully_shard" (ZeRO-3, on dimension 0), "hybrid_shard" (2-D mesh: replicate, shard).
    reshard_after_forward: free gathered weights after forward and gather them again in backward.
    min_bytes: smaller parameters stay replicated, as do scalars and empty ones. Buffers are left alone.
    Raises ValueError, before anything is changed, for a wrong mode or mesh or a parameter that cannot be sharded."""
    _check(model, device_mesh, mode)
    # AOTAutograd's cache key lacks group names and ranks: code of another group or rank would be taken for this one's.
    tags = {f"{get_backend(g)}:{g.group_name}:{g.rank()}/{g.size()}" for g in device_mesh.get_all_groups()}
    torch.compiler.config.cache_key_tag = " ".join(sorted(tags.union(torch.compiler.config.cache_key_tag.split())))
    shard_mesh = device_mesh[device_mesh.mesh_dim_names[1]] if mode == "hybrid_shard" else None
    policy = _Policy(mp_policy, reshard_after_forward, shard_mesh)
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
            module._data_parallel = policy
            module.__class__ = _wrapped_class(type(module), tuple(own))
    model._data_parallel_root, _roots[id(model)] = True, model
    for name in _RANDOM:
        for overload in getattr(torch.ops.aten, name).overloads():
            _handlers[getattr(getattr(torch.ops.aten, name), overload)] = _draw_whole
    _handlers[torch.ops.aten._is_any_true.default] = lambda op, args, _: op(args[0].to_local())  # of detect_anomaly
    return model


_RANDOM = ("normal_ uniform_ bernoulli_ exponential_ geometric_ log_normal_ cauchy_ random_ "
           "rand_like randn_like randint_like").split()  # fmt: skip


def _draw_whole(func, args: tuple, kwargs: dict) -> DTensor:
    """What _RANDOM does to a DTensor from the first data_parallel() on: values are drawn whole, as on one device, and
    then sharded. Torch would have every rank draw its own, and others for another number of ranks."""
    target, *more = args
    shard = _share(func(_empty(target), *more, **kwargs), target)
    return target.copy_(shard) if func._schema.is_mutable else shard


def _empty(t: DTensor) -> Tensor:
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)


def _share(whole: Tensor, like: DTensor) -> DTensor:
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)  # sends nothing


class _NothingLost(TorchDispatchMode):
    """Inside disable_data_parallel(): what would fill a copy of a parameter, or draw other values, is an error."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        first, kwargs = args[0] if args else None, kwargs or {}
        target = first if isinstance(first, DTensor) else kwargs.get("out")
        if not isinstance(target, DTensor) or target.is_meta:
            return func(*args, **kwargs)
        if target is not first:  # made of numbers alone, as by torch.eye(n, out=parameter)
            return target.copy_(_share(func(*args, **kwargs | dict(out=_empty(target))), target))
        result = func(*args, **kwargs)
        views = result if isinstance(result, list | tuple) else [result]
        own = target._local_tensor.untyped_storage()._cdata
        random = torch.Tag.nondeterministic_seeded in func.tags and func not in _handlers
        # A view of a shard may be a copy, redistributed: what is written there would not reach the parameter.
        if random or (func.is_view and any(v._local_tensor.untyped_storage()._cdata != own for v in views)):
            name = func._schema.name
            raise RuntimeError(f"{name} of a shard is not the parameter's: fill it in place and as a whole")
        return result


@contextmanager
def disable_data_parallel():
    """Inside it a parameter is its own sharded DTensor in forward too, nothing communicates, and what cannot be done to
    shards is an error: for initialisation, checkpoint helpers, inspection. Re-entrant; for the whole process."""
    global _enabled
    before, _enabled = _enabled, False
    try:
        with _NothingLost():
            yield
    finally:
        _enabled = before


ParameterRow = namedtuple("ParameterRow", "name shape dtype placement local_shape local_bytes")


def describe(model: nn.Module) -> list[ParameterRow]:
    """One row per parameter (ties once), with what this rank holds (placement "-": not wrapped). No collective runs."""
    rows = []
    for name, p in model.named_parameters():
        local = getattr(p, "_local_tensor", p)
        placement = "-" if local is p else repr(p.placements[-1])
        rows.append(ParameterRow(name, tuple(p.shape), p.dtype, placement, tuple(local.shape), local.nbytes))
    return rows
