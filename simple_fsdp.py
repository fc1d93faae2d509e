"""SimpleFSDP: any nn.Module as sharded DTensors that are gathered on use. One file, imports only torch: copy it.

    from simple_fsdp import MixedPrecisionPolicy, data_parallel
    mesh = torch.distributed.init_device_mesh("cuda", (world_size,))
    model = data_parallel(model, mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    model = torch.compile(model)                       # or stay eager; then train as on one device

Reading `module.weight` all-gathers the parameter; its gradient arrives **averaged** over the ranks (torchtitan's file
sums), sharded, in the stored dtype: a loss normalised by a token count divides by the mean count per rank. Not for use
under tensor or pipeline parallelism. Torch 2.11 to 2.14, Python 3.11 or newer. After arXiv:2411.00284 (Zhang et al.).
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

MODES = ("replicate", "fully_shard", "hybrid_shard")
_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks  # private, as is TorchDispatchMode's module
_enabled = True  # what disable_data_parallel() turns off
_thread = threading.local()  # .scopes: one memo per running forward, innermost last


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """`param_dtype`: dtype of the gathered parameter and of the all-gather (None: as stored). `reduce_dtype`: dtype of
    the gradient reduction (None: as the gradient was computed, i.e. param_dtype, which is FSDP2's rule). Gradients land
    in the stored dtype. Only floating-point parameters are cast, and alike at every world size, 1 included."""

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None


class _Policy(namedtuple("_Policy", "mp reshard inner")):  # one per data_parallel() call; inner: hybrid's shard mesh
    __deepcopy__ = lambda self, memo: self  # noqa: E731


def _materialize(p: DTensor, policy: _Policy) -> Tensor:
    """The whole parameter in param_dtype; its backward reduces the gradient to the placements of `p`."""
    cast, reduce = (policy.mp.param_dtype, policy.mp.reduce_dtype) if p.dtype.is_floating_point else (None, None)
    if policy.inner is not None:  # inside first: both at once would all-reduce the whole gradient and then scatter it
        shard = p.redistribute(placements=p.placements, backward_dtype=reduce or cast)
        shard = shard.to_local(grad_placements=[Partial("avg"), p.placements[1]])
        p = DTensor.from_local(shard, policy.inner, p.placements[1:], run_check=False, shape=p.shape, stride=p.stride())
    mesh, rows = p.device_mesh, p.shape[0] if p.placements[-1].is_shard() else 0
    if uneven := rows % mesh.size() and mesh.size() > 64:  # DTensor pads the gradient in N pieces: minutes to compile
        p = p.to_local()
        p = nn.functional.pad(p, [0] * (2 * p.ndim - 1) + [-(-rows // mesh.size()) - len(p)])
        p = DTensor.from_local(p, mesh, [Shard(0)], run_check=False)
    full = p.redistribute(placements=[Replicate()] * mesh.ndim, forward_dtype=cast, backward_dtype=reduce or cast)
    full = full.to_local(grad_placements=[Partial("avg")] * mesh.ndim)
    return full[:rows] if uneven else full  # a mesh in the graph costs the warm compile cache: not for few ranks


# While compiling: a checkpoint around the gather tags it for the partitioner, so that it is gathered again in backward
# (reshard) or kept even where a surrounding activation checkpoint would gather again (no reshard: this policy).
def _keep():  # a lambda or partial would have no key in AOTAutograd's cache
    return create_selective_checkpoint_contexts([torch.ops._c10d_functional.wait_tensor.default])
_keep.cache_hash = "simple_fsdp-keep-gathered-1"


# In eager: autograd keeps (parameter, geometry) in place of a gathered weight and gathers again in backward.
def _pack(t: Tensor):
    mark = getattr(t.untyped_storage(), "_sharded", None) if t.layout is torch.strided else None
    if mark is None or (p := mark[0]()) is None or t.dtype != mark[2] or t.is_conj():
        return t
    return mark, (p._version, p._local_tensor._version), (t.size(), t.stride(), t.storage_offset())


def _unpack(packed) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    (parameter, policy, _), versions, geometry = packed
    if (p := parameter()) is None or (p._version, p._local_tensor._version) != versions:
        raise RuntimeError("a parameter was changed in place or replaced between its forward and its backward")
    with torch.no_grad():
        return _materialize(p, policy).as_strided(*geometry)


@contextmanager
def _scope():
    """Around each eager forward: one gather per parameter and module call, and the two hooks above, except where other
    hooks are on top: inside activation checkpointing ours would switch it off, and there no weight is kept anyway."""
    ours, before = torch.is_grad_enabled() and _top_hooks(True) is None, getattr(_thread, "memo", None)
    with torch.autograd.graph.saved_tensors_hooks(_pack, _unpack) if ours else nullcontext():
        _thread.memo = {}
        try:
            yield
        finally:
            _thread.memo = before


def _read(module: nn.Module, name: str) -> Tensor | None:
    p = module._parameters[name]
    try:
        if not _enabled or not isinstance(p, DTensor):
            return p
        policy = module._data_parallel
        if torch.compiler.is_compiling():
            how = {} if policy.reshard else dict(context_fn=_keep)
            return checkpoint(_materialize, p, policy, use_reentrant=False, preserve_rng_state=False, **how)
        memo = {} if getattr(_thread, "memo", None) is None else _thread.memo
        key = id(p), torch.is_grad_enabled(), (_top_hooks(True) or (None,))[0]
        if key not in memo:
            full = memo[key] = _materialize(p, policy)
            storage = full.untyped_storage()  # at world size 1 without a cast it is the parameter's own
            if policy.reshard and storage._cdata != p._local_tensor.untyped_storage()._cdata:
                storage._sharded = weakref.ref(p), policy, full.dtype  # lives as long as the storage, for every view
        return memo[key]
    except AttributeError as e:  # nn.Module.__getattr__ would swallow it and hand out the shard
        raise RuntimeError(f"cannot gather {name} of {type(module).__name__}: {e}") from e


@functools.cache
def _wrapped_class(cls: type, names: tuple[str, ...]) -> type:
    """One class per (class, parameter names), all state on the instance: equal blocks share one compiled frame."""

    @functools.wraps(cls.forward)
    def forward(self, *args, **kwargs):
        with nullcontext() if torch.compiler.is_compiling() else _scope():
            return cls.forward(self, *args, **kwargs)

    def __reduce_ex__(self, protocol):  # deepcopy and pickle: make the class again from its base
        with disable_data_parallel():
            return _new, (cls, names), self.__getstate__()

    own = {name: property(lambda self, name=name: _read(self, name)) for name in names}
    own |= dict(forward=forward, __reduce_ex__=__reduce_ex__, __module__=cls.__module__)
    # extra_repr reads parameters; so does an RNN in to(), to_empty() and deepcopy, and it keeps a list between calls
    own |= {name: disable_data_parallel()(getattr(cls, name)) for name in ("__repr__", "_apply", "__setstate__")}
    if issubclass(cls, nn.RNNBase):
        flat = property(lambda self: [getattr(self, n, None) for n in self._flat_weights_names], lambda self, _: None)
        own["_flat_weights"] = flat
    return type("FSDP" + cls.__name__, (cls,), own)


def _new(cls: type, names: tuple[str, ...]) -> nn.Module:
    return object.__new__(_wrapped_class(cls, names))


def _check(model: nn.Module, mesh: DeviceMesh, mode: str) -> None:
    if mode not in MODES:
        raise ValueError(f"mode={mode!r} does not exist: use one of {', '.join(MODES)}")
    ndim, want = (2, "2-D mesh with mesh_dim_names") if mode == "hybrid_shard" else (1, "1-D mesh")
    if mesh.ndim != ndim or (ndim == 2 and not mesh.mesh_dim_names):
        raise ValueError(f"mode={mode!r} needs a {want}, got {mesh.ndim}-D, names {mesh.mesh_dim_names}")
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(f"cannot shard {path or 'the model'}: a ScriptModule cannot be wrapped, wrap its source")
        if "_data_parallel" in module.__dict__:
            raise ValueError(f"cannot shard {path or 'the model'}: it is wrapped already, call data_parallel() once")
        for name, p in module._parameters.items():
            name = f"{path}.{name}" if path else name
            if isinstance(p, DTensor):
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
    """Shards every parameter of `model` in place over `device_mesh` and returns it; values are those of rank 0.

    mode: "replicate" (DDP), "fully_shard" (ZeRO-3, on dimension 0), "hybrid_shard" (2-D mesh: replicate, shard).
    reshard_after_forward: free gathered weights after forward and gather them again in backward.
    min_bytes: smaller parameters stay replicated, as do scalars and empty ones. Buffers are left alone.
    Raises ValueError, before anything is changed, for a wrong mode or mesh or a parameter that cannot be sharded.
    """
    _check(model, device_mesh, mode)
    inner = device_mesh[device_mesh.mesh_dim_names[1]] if mode == "hybrid_shard" else None
    tag = {f"{get_backend(g)}:{g.group_name}:{g.rank()}/{g.size()}" for g in device_mesh.get_all_groups()}
    # AOTAutograd's cache key lacks them: a group of another name, another rank's uneven shard would be taken for ours
    torch.compiler.config.cache_key_tag = " ".join(sorted(tag.union(torch.compiler.config.cache_key_tag.split())))
    policy, done = _Policy(mp_policy, reshard_after_forward, inner), {}  # done keeps ties tied
    for module in list(model.modules()):
        own = {name: p for name, p in module._parameters.items() if p is not None}
        for name, p in own.items():
            if id(p) not in done:
                whole = mode == "replicate" or p.ndim == 0 or p.numel() == 0 or p.nbytes < min_bytes
                placements = [Replicate()] * (device_mesh.ndim - 1) + [Replicate() if whole else Shard(0)]
                shard = nn.Parameter(distribute_tensor(p.detach(), device_mesh, placements), p.requires_grad)
                shard.__dict__.update(p.__dict__)  # what others noted on it
                done[id(p)] = p, shard
            module._parameters[name] = done[id(p)][1]
        if module is model or next(module.parameters(), None) is not None:
            module.__dict__.pop("_flat_weights", None)  # an RNN's list of what is no longer its parameters
            module._data_parallel = policy
            module.__class__ = _wrapped_class(type(module), tuple(own))
    return model


class _DrawWhole(TorchDispatchMode):
    """Initialisation draws the whole tensor and keeps the shard, as on one device; what would go wrong is refused."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, kwargs, t = func._schema.name, kwargs or {}, args[0] if args else None
        t, made = (kwargs["out"], True) if "out" in (kwargs or {}) and not isinstance(t, DTensor) else (t, False)
        if not isinstance(t, DTensor) or t.is_meta:
            return func(*args, **kwargs)
        whole, seeded = functools.partial(torch.empty, t.shape), torch.Tag.nondeterministic_seeded in func.tags
        if made:  # out of numbers alone: torch.eye(out=)
            full = func(*args, **kwargs | dict(out=whole(dtype=t.dtype, device=t.device)))
        elif seeded and (name.endswith("_") or "_like" in name):
            full = func(whole(dtype=t.dtype, device=t.device), *args[1:], **kwargs)
        else:
            y, own = func(*args, **kwargs), t._local_tensor.untyped_storage()._cdata
            views = (y if isinstance(y, list | tuple) else [y]) if func.is_view else ()
            if seeded or any(v._local_tensor.untyped_storage()._cdata != own for v in views):
                raise RuntimeError(f"{name} of a shard is not the parameter's: fill it in place and as a whole")
            return y
        shard = distribute_tensor(full, t.device_mesh, t.placements, src_data_rank=None)  # communicates nothing
        return shard if "_like" in name else t.copy_(shard)


@contextmanager
def disable_data_parallel():
    """Inside it a parameter reads as its own sharded DTensor and nothing communicates: for initialisation (random
    values do not depend on the world size), checkpoint helpers, inspection. Re-entrant; for the whole process."""
    global _enabled
    before, _enabled = _enabled, False
    try:
        with _DrawWhole():
            yield
    finally:
        _enabled = before


ParameterRow = namedtuple("ParameterRow", "name shape dtype placement local_shape local_bytes")


def describe(model: nn.Module) -> list[ParameterRow]:
    """One row per parameter (ties once), with what this rank holds (placement "-": not wrapped). No collective runs."""
    return [
        ParameterRow(n, tuple(p.shape), p.dtype, "-" if t is p else repr(p.placements[-1]), tuple(t.shape), t.nbytes)
        for n, p in model.named_parameters() for t in [getattr(p, "_local_tensor", p)]
    ]  # fmt: skip
