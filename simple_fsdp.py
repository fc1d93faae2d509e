"""SimpleFSDP: any nn.Module as sharded DTensors that are gathered on use. One file, imports only torch: copy it.

    from simple_fsdp import MixedPrecisionPolicy, data_parallel
    mesh = torch.distributed.init_device_mesh("cuda", (world_size,))
    model = data_parallel(model, mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    model = torch.compile(model, fullgraph=True, options=overlap.compile_options(model))    # or stay eager

While the model runs, reading `module.weight` all-gathers the parameter; elsewhere it is the sharded DTensor itself. Its
gradient arrives sharded, in the stored dtype, and **averaged** over the ranks (torchtitan's sums now): a loss
normalised by a token count divides by the mean count per rank. Inputs are not cast. Not for tensor or pipeline
parallelism. Torch 2.11 to 2.14, Python 3.11 or later. Paper: arXiv:2411.00284.
"""

import functools
import threading
import weakref
from collections import namedtuple
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import accumulate, count, islice

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.distributed import DeviceMesh, get_backend
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.weak import WeakTensorKeyDictionary

# All that this file uses of torch's private names: the module of is_fake, the functions below, and the attributes
# Module._parameters, Tensor._base, Tensor._version, Tensor._backward_hooks, Tensor._post_accumulate_grad_hooks,
# UntypedStorage._cdata, OpOverload._schema, DTensor._local_tensor, DTensor._spec, RNNBase._flat_weights,
# RNNBase._flat_weights_names, aten._is_any_true, nn.init._no_grad_trunc_normal_. A test of each says which is missing.
# Not documented: what get_proxy_mode gives, and the meta of a graph's nodes.
_c10d = torch.ops._c10d_functional
_top_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_modes = torch._C._len_torch_dispatch_stack  # how many dispatch modes are on
_backward_runs = torch._C._current_graph_task_id  # -1: none on this thread
_compiled_code_runs = torch._C._dynamo.eval_frame.get_eval_frame_callback  # None: none on this thread
_transform = torch._C._functorch.peek_interpreter_stack  # None outside of torch.func's vmap, jvp, grad
_without_transforms = torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack
_handlers = DTensor._op_dispatcher._custom_op_handlers  # of operations on DTensors
_trunc_normal = nn.init._no_grad_trunc_normal_  # what nn.init.trunc_normal_ looks up when it is called

MODES = ("replicate", "fully_shard", "hybrid_shard")
NOTES = {  # by words of torch's error: what to do where a model runs into it
    "mixed torch.Tensor and DTensor": "data_parallel: while the model runs, read a parameter as an attribute of its "
    "module, in the thread that called the model. What named_parameters() and get_parameter() give is the shard.",
    "yet support saved tensor hooks": "data_parallel: inside of a forward torch.func.grad, vjp and jacrev do not work: "
    "call them around the model, or torch.autograd.grad inside of it.",
}
_enabled = True  # False inside disable_data_parallel()
_roots = weakref.WeakValueDictionary()  # by id: the modules given to data_parallel()
_shards = WeakTensorKeyDictionary()  # by unsharded parameter: one that several modules share stays shared


class _Thread(threading.local):
    memo = None  # what the innermost running eager forward has gathered; None outside of any
    in_block = None  # of a block, which gathers for all modules in it: how many modes were on when it began


_thread = _Thread()


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """`param_dtype`: dtype of the gathered parameter and of the all-gather (None: as stored). `reduce_dtype`: dtype of
    the gradient reduction (None: as the gradient was computed, i.e. param_dtype, which is FSDP2's rule). Gradients land
    in the stored dtype. Only floating-point parameters are cast, and alike at every world size, 1 included."""

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None


def _dtypes(p: DTensor, param_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None) -> tuple[torch.dtype, ...]:
    dtype = param_dtype or p.dtype
    return (dtype, reduce_dtype or dtype) if p.dtype.is_floating_point else (p.dtype, p.dtype)


def _over(p: DTensor, dim: int) -> tuple[bool, int, str]:
    """Of a dimension of the mesh: whether `p` is sharded over it, the number of ranks, the name of their group."""
    return p.placements[dim].is_shard(), p.device_mesh.size(dim), p.device_mesh.get_group(dim).group_name


def _padded(t: Tensor, rows: int) -> Tensor:
    t = nn.functional.pad(t, [0] * (2 * t.ndim - 1) + [rows - len(t)]) if len(t) < rows else t
    return t.contiguous()  # padding keeps channels_last


def _fit(t: Tensor, shape: torch.Size) -> Tensor:
    return t if t.shape == shape else t.view(-1)[: shape.numel()].view(shape)  # without the padding


def _together(tensors: list[Tensor], rows: int, rows_after: int, collective, *args) -> list[Tensor]:
    """One collective for several tensors: they lie side by side, each as [rows, n], and are cut out of its result."""
    if len(tensors) == 1:
        return [_c10d.wait_tensor(collective(tensors[0], *args))]
    flat = torch.cat([t.view(rows, -1) for t in tensors], 1).view(-1)
    result = _c10d.wait_tensor(collective(flat, *args)).view(rows_after, -1)
    return torch.split_with_sizes_copy(result, [t.numel() // rows for t in tensors], 1)


def _memory(p: DTensor) -> int:
    return p._local_tensor.untyped_storage()._cdata


class _Gather(torch.autograd.Function):
    """Parameters, alike in dtypes, mesh and placements -> whole plain tensors in `dtype`, by one all-gather."""

    @staticmethod
    def forward(ctx, call: "_Call | bool | None", dtype: torch.dtype, reduce_dtype: torch.dtype, *params: DTensor):
        ctx.call, ctx.reduce_dtype, ctx.params = call and weakref.ref(call), reduce_dtype, params
        ctx.set_materialize_grads(False)
        (sharded, ranks, group), wholes = _over(params[0], -1), [p._local_tensor.to(dtype) for p in params]
        if sharded and ranks > 1 and call is False:  # only shapes are asked for
            wholes = [t.new_empty(p.shape) for t, p in zip(wholes, params, strict=True)]
        elif sharded and ranks > 1:
            wholes = [_padded(t, -(-len(p) // ranks)) for t, p in zip(wholes, params, strict=True)]
            wholes = _together(wholes, 1, ranks, _c10d.all_gather_into_tensor, ranks, group)
            wholes = [_fit(t, p.shape) for t, p in zip(wholes, params, strict=True)]
        wholes = [t if t is not p._local_tensor else t.view_as(t) for t, p in zip(wholes, params, strict=True)]
        ctx.mark_non_differentiable(*(t for t, p in zip(wholes, params, strict=True) if not p.requires_grad))
        return tuple(wholes)

    @staticmethod
    def backward(ctx, *grads: Tensor | None):
        if call := ctx.call and ctx.call():
            call.again = {}
        like = [p for p, grad in zip(ctx.params, grads, strict=True) if grad is not None]
        given = (grad for grad in grads if grad is not None)
        with _noted():
            shards = iter(_Reduce.apply(ctx.call is not None, ctx.reduce_dtype, like, *given) if like else ())
        return None, None, None, *(grad if grad is None else next(shards) for grad in grads)


class _Reduce(torch.autograd.Function):
    """Whole gradients of the parameters `like` -> their averages over the ranks as shards, in the stored dtype. With
    _Gather each is the other's backward, so that gradients of gradients work too."""

    @staticmethod
    def forward(ctx, eager: bool, dtype: torch.dtype, like: list[DTensor], *given: Tensor):
        ctx.dtypes, ctx.like = (given[0].dtype, dtype), like
        ctx.set_materialize_grads(False)
        grads = [grad.to(dtype) for grad in given]
        for dim in reversed(range(like[0].device_mesh.ndim)):  # hybrid_shard: reduces what was scattered before
            sharded, ranks, group = _over(like[0], dim)
            if sharded and ranks > 1:
                grads = [_padded(t, -(-len(t) // ranks) * ranks) for t in grads]
                grads = _together(grads, ranks, 1, _c10d.reduce_scatter_tensor, "avg", ranks, group)
            elif ranks > 1:
                grads = _together([t.contiguous() for t in grads], 1, 1, _c10d.all_reduce, "avg", group)
        shards = [_fit(t, p._local_tensor.shape).to(p.dtype) for t, p in zip(grads, like, strict=True)]
        if eager:  # autograd may give several the same memory, or a whole one element's
            own = functools.partial(torch.clone, memory_format=torch.contiguous_format)
            shards = [own(t) if t is grad else t for t, grad in zip(shards, given, strict=True)]
        return tuple(DTensor(t, p._spec, requires_grad=False) for t, p in zip(shards, like, strict=True))

    @staticmethod
    def backward(ctx, *grads: DTensor | None):
        given = [g.redistribute(placements=p.placements) for g, p in zip(grads, ctx.like, strict=True) if g is not None]
        wholes = iter(_Gather.apply(None, *ctx.dtypes, *given) if given else ())
        return None, None, None, *(grad if grad is None else next(wholes) for grad in grads)


# Compiled code gathers by this operation, one parameter each: Dynamo does not look into it, AOTAutograd does. Another
# copy of this file has one of another name.
_library, _loader = torch.library.Library("simple_fsdp", "FRAGMENT"), globals().get("__loader__")
_NAME = next(name for i in count() if not hasattr(torch.ops.simple_fsdp, name := f"gather_{i}"))
_NAME = _library.define(f"{_NAME}(Tensor p, ScalarType? dtype, ScalarType? reduce_dtype, bool again) -> Tensor")
_gather = getattr(torch.ops.simple_fsdp, _NAME).default
_VERSION = hash(int.from_bytes(_loader.get_data(__file__))) if hasattr(_loader, "get_data") else id(_library)


@torch.library.impl(_library, _NAME, "CompositeImplicitAutograd")
def _gather_one(p: DTensor, dtype: torch.dtype | None, reduce_dtype: torch.dtype | None, again: bool) -> Tensor:
    if get_proxy_mode() is None:  # before AOTAutograd makes its graph, Dynamo and it ask for the shape
        return _Gather.apply(False if is_fake(p._local_tensor) else None, *_dtypes(p, dtype, reduce_dtype), p)[0]
    with _noted() as nodes:
        whole = _Gather.apply(None, *_dtypes(p, dtype, reduce_dtype), p)[0]
    for node in nodes:  # noted as under a checkpoint, or to be kept even there
        keep = not again and node.target is _c10d.wait_tensor.default
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE
        node.meta["ac_graph_id"] = 1 << 60  # of no region before another, whose input would be kept
    return whole


@contextmanager
def _noted() -> Iterator[list]:
    """What AOTAutograd's graph gets inside of it is noted as ours, for overlap.py; listed, too."""
    mode, nodes = get_proxy_mode(), []
    before = len(mode.tracer.graph.nodes) if mode else 0
    yield nodes
    if mode:
        added = mode.tracer.graph.nodes
        nodes += islice(reversed(added), len(added) - before)
    for node in nodes:
        node.meta["simple_fsdp"] = True


# In eager mode a layer saves its gathered weight for backward; hooks have autograd keep a _GatherAgain instead. The
# call that gathered it hangs on the storage of the weight, where every view of it finds it and with which it is freed.
_GatherAgain = namedtuple("_GatherAgain", "call index versions size stride offset")  # the last three are the view's


class _Call:
    """Parameters that are gathered at once; and again, those that backward needs, until it has had each."""

    def __init__(self, params: list[DTensor], *policy: torch.dtype | None):
        self.params, self.dtypes = params, _dtypes(params[0], *policy)
        self.needed, self.again, self.saved, self.used = set(), {}, 0, 0


def _versions(p: DTensor) -> tuple[int, int]:
    return p._version, p._local_tensor._version  # one counts changes of the DTensor, one those of its local shard


def _pack(saved: Tensor) -> Tensor | _GatherAgain:
    call, i = getattr(saved.untyped_storage(), "_sharded", (None, 0)) if saved.layout is torch.strided else (None, 0)
    if call is None or saved.dtype != call.dtypes[0] or saved.is_conj():  # as_strided could not make the latter again
        return saved
    call.needed.add(i)
    call.saved += 1
    return _GatherAgain(call, i, _versions(call.params[i]), saved.size(), saved.stride(), saved.storage_offset())


def _unpack(kept: Tensor | _GatherAgain) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    call = kept.call
    if _versions(call.params[kept.index]) != kept.versions:
        raise RuntimeError("a parameter was changed in place between its forward and its backward")
    if kept.index not in call.again:
        needed = sorted(call.needed)  # on all ranks in the same order
        with torch.no_grad():
            wholes = _Gather.apply(None, *call.dtypes, *(call.params[i] for i in needed))
        call.again, call.used = dict(zip(needed, wholes, strict=True)), 0
    whole, call.used = call.again[kept.index], call.used + 1
    if call.used == call.saved:
        call.again = {}
    return whole.as_strided(kept.size, kept.stride, kept.offset)


@contextmanager
def unsharded():
    """Inside it parameters read as whole tensors, as in forward: for a regulariser or a method that computes with them.
    Each is gathered at its first use and freed at the end; RuntimeError for one that was changed in place by then."""
    if torch.compiler.is_compiling():
        yield
        return
    # Saved tensors go through hooks. Not where there are hooks already: on top of an activation checkpoint's, ours
    # would switch it off, and it keeps no weight anyway. Nor where torch.func forbids them.
    hooks = torch.is_grad_enabled() and _top_saved_tensors_hooks(True) is None and _transform() is None
    before, memo = (_thread.memo, _thread.in_block), dict(_thread.memo or ())
    with torch.autograd.graph.saved_tensors_hooks(_pack, _unpack) if hooks else nullcontext():
        _thread.memo, _thread.in_block = memo, None
        try:
            yield
        finally:
            _thread.memo, _thread.in_block = before
    for whole, version, name in memo.values():
        if not whole.is_inference() and whole._version != version:
            raise RuntimeError(f"{name} was changed in place while it was gathered, which is lost: do it elsewhere")


def _key(p: DTensor) -> tuple:
    # A weight gathered under no_grad, or while it was frozen, has no backward. Nor does a parameter that has changed
    # since read as it was. A selective checkpoint, which is a mode, must see in forward the gathers that it will see
    # when that is repeated.
    return id(p), *_versions(p), p.requires_grad, torch.is_grad_enabled(), torch.is_inference_mode_enabled(), _modes()


def _gather_into(memo: dict, modules: Iterable[nn.Module], only: str | None = None) -> None:
    """Gathers the modules' own parameters, or that of one name: those that are alike by one collective."""
    alike = {}
    for module in modules:
        policy = module.__dict__.get("_data_parallel")
        for name, p in module._parameters.items() if policy else ():
            if isinstance(p, DTensor) and only in (None, name) and (key := _key(p)) not in memo:
                group = alike.setdefault((p.device_mesh, p.placements, p.dtype, policy), {})
                group[key] = p, f"{name} of {type(module).__name__}"
    for (*_, (dtype, reduce_dtype, reshard_after_forward)), group in alike.items():
        call = _Call([p for p, _ in group.values()], dtype, reduce_dtype)
        with _without_transforms() if _transform() is not None else nullcontext():
            wholes = _Gather.apply(call, *call.dtypes, *call.params)
        for i, (whole, (key, (p, name))) in enumerate(zip(wholes, group.items(), strict=True)):
            storage = whole.untyped_storage()
            if reshard_after_forward and storage._cdata != _memory(p):  # which it is on one rank without a cast
                storage._sharded = call, i
            memo[key] = whole, 0 if whole.is_inference() else whole._version, name


def _reader(name: str) -> property:
    """What `module.name` is: while the model runs the gathered parameter, elsewhere the parameter itself."""

    def read(module: nn.Module) -> Tensor | None:
        try:  # and not `in`, which Dynamo pays for with a guard
            p, compiling = module._parameters[name], torch.compiler.is_compiling()
        except KeyError as e:  # deleted
            raise AttributeError(name) from e
        try:
            if not _enabled or not isinstance(p, DTensor):  # functional_call puts tensors in the place of parameters
                return p
            policy = module._data_parallel
            if compiling:
                return _gather(p, *policy)
            if _thread.memo is None and _backward_runs() == -1 and not _compiled_code_runs():
                return p
            memo, key = {} if _thread.memo is None else _thread.memo, _key(p)  # nothing would free what a memo holds
            if key not in memo:
                _gather_into(memo, [module], name)
            return memo[key][0]
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
        for name, p in module._parameters.items():
            sharded = isinstance(p, DTensor) and name in getattr(module, "_gathered", ())
            if not sharded and isinstance(p, nn.Parameter) and p.requires_grad:  # functional_call puts plain tensors
                raise RuntimeError(f"{path + '.' * bool(path)}{name} is not sharded: it came after data_parallel(). "
                                   "Copy new values into the old parameter; call data_parallel(model, mesh) again for "
                                   "new modules (mode='replicate' suits small adapters)")  # fmt: skip


@functools.cache
def _wrapped_class(cls: type, names: tuple[str, ...], is_root: bool) -> type:
    """The subclass of `cls` that gathers the parameters `names` when they are read. One for each set of arguments, with
    all else on the instance, so that equal blocks share one compiled frame. Others, such as Hugging Face's registries,
    know a class by its name and module: they stay. `cls` is asked for its forward at each call: one that is replaced
    later, as kernel libraries do, is the one that runs."""

    @functools.wraps(cls.forward)
    def forward(self, *args, **kwargs):
        plain_forward = super(wrapped, self).forward
        if self._data_parallel_root:
            _refuse_unsharded(id(self))
        if torch.compiler.is_compiling() or not _enabled or self._data_parallel_inside and _thread.in_block == _modes():
            return plain_forward(*args, **kwargs)
        with unsharded():
            if self._data_parallel_with is None:
                _thread.in_block = _modes()
                _gather_into(_thread.memo, self.modules())
            else:
                _gather_into(_thread.memo, [self, *_present(self, self._data_parallel_with)])
            return plain_forward(*args, **kwargs)

    def call(self, *args, **kwargs):  # around hooks, and around a forward that was set on the instance
        plain_call = super(wrapped, self).__call__
        if torch.compiler.is_compiling() or not _enabled or _thread.memo is not None:
            return plain_call(*args, **kwargs)
        _refuse_unsharded(id(self))
        try:
            with unsharded():
                return plain_call(*args, **kwargs)
        except RuntimeError as e:
            for note in [note for words, note in NOTES.items() if words in str(e)]:
                e.add_note(note)
            raise

    def again(self, protocol):  # deepcopy and pickle cannot find this class: they make it again from its base
        return _new, (cls, names, is_root), self.__getstate__()

    attributes = {name: _reader(name) for name in names}
    attributes |= dict(forward=forward, __reduce_ex__=again, __module__=cls.__module__, __qualname__=cls.__qualname__)
    attributes |= dict(_gathered=names, _data_parallel_root=False, _data_parallel_with=(), _data_parallel_inside=False)
    attributes |= dict(__call__=call) if is_root else {}
    if issubclass(cls, nn.RNNBase):  # the list that they keep and assign is ignored, it is read anew
        weights = lambda self: [getattr(self, name, None) for name in self._flat_weights_names]  # noqa: E731
        attributes["_flat_weights"] = property(weights, lambda self, value: None)
        attributes["forward"] = torch.compiler.disable(forward)  # torch compiles none of them; not in pieces either
    wrapped = type(cls.__name__, (cls,), attributes)
    return wrapped


def _present(root: nn.Module, names: Iterable[str]) -> list[nn.Module]:
    """The modules of these names that are still there."""
    found = (functools.reduce(lambda m, key: getattr(m, key, None), name.split("."), root) for name in names)
    return [m for m in found if isinstance(m, nn.Module)]


def _new(*of_class) -> nn.Module:
    module = object.__new__(_wrapped_class(*of_class))
    _roots[id(module)] = module  # a copied root is checked, too
    return module


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
        wrapped = "_data_parallel" in module.__dict__
        for name, p in ((name, p) for name, p in module._parameters.items() if p is not None):
            sharded, hooks = isinstance(p, DTensor), p._backward_hooks or p._post_accumulate_grad_hooks
            why = ("its module is wrapped already, copy it into the old parameter" if wrapped and not sharded else
                   f"it already is a DTensor with placements {p.placements}" if sharded and not wrapped else
                   "its hooks would be lost, register them after data_parallel()" if hooks and not wrapped else
                   "it has no shape yet, run one forward before wrapping"
                   if isinstance(p, nn.parameter.UninitializedParameter) else
                   f"its class {type(p).__name__} would be lost, make it a plain nn.Parameter"
                   if type(p) is not nn.Parameter and not is_fake(p) and not wrapped else
                   "its gradient is sparse, build the embedding with sparse=False"
                   if getattr(module, "sparse", False) is True else "")  # fmt: skip
            if why:
                raise ValueError(f"cannot shard {path + '.' * bool(path)}{name}: {why}")


def _plan_eager(model: nn.Module) -> None:
    """What eager code gathers at once: all that a block holds, and with the model what lies in no block, up to the size
    of a block. Blocks are members of lists, made of modules, without such lists, at most a third of the model each."""

    def members(module: nn.Module) -> list[nn.Module]:
        lists = [m for m in module.modules() if isinstance(m, nn.ModuleList | nn.ModuleDict | nn.Sequential)]
        found = [m for each in lists for m in each.children()]
        return [m for m in found if any(True for child in m.children() for _ in child.parameters())]

    nbytes = {m: sum(p.nbytes for p in m.parameters()) for m in (model, *members(model))}
    blocks = [m for m in members(model) if not members(m) and 3 * nbytes[m] <= nbytes[model]]
    inside = {m for block in blocks for m in block.modules()}
    ends = [(name, m) for name, m in model.named_modules() if m is not model and m not in inside]
    sizes = accumulate(sum(p.nbytes for p in m.parameters(recurse=False)) for _, m in ends)
    room = max((nbytes[m] for m in blocks), default=0)
    model._data_parallel_with = tuple(name for (name, _), n in zip(ends, sizes, strict=True) if n <= room)
    for module in inside:
        module._data_parallel_inside = module not in blocks
    for block in blocks:
        block._data_parallel_with = None


def data_parallel(
    model: nn.Module, device_mesh: DeviceMesh, mode: str = "fully_shard",
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(), *,  # noqa: B008 (frozen)
    reshard_after_forward: bool = True, min_bytes: int = 0,
) -> nn.Module:  # fmt: skip
    """Shards every parameter of `model` in place over `device_mesh` and returns it; values are those of rank 0. Modules
    that are wrapped already stay as they are: a second call is for what was added since, such as adapters.

    mode: "replicate" (DDP, a mesh of any shape), "fully_shard" (ZeRO-3, on dimension 0), "hybrid_shard" (2-D mesh:
    replicate, shard).
    reshard_after_forward: free gathered weights after forward and gather them again in backward.
    min_bytes: smaller parameters stay replicated, as do scalars and empty ones. Buffers are left alone.
    Raises ValueError, before anything is changed, for a wrong argument or a parameter that cannot be sharded."""
    _check(model, device_mesh, mode, mp_policy)
    # AOTAutograd's cache key lacks group names, ranks and what lies behind an operation: it would take other code.
    tags = {f"{get_backend(g)}:{g.group_name}:{g.rank()}/{g.size()}" for g in device_mesh.get_all_groups()}
    tags.add(f"{_NAME}:{_VERSION}")
    torch.compiler.config.cache_key_tag = " ".join(sorted(tags.union(torch.compiler.config.cache_key_tag.split())))
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
            module.__class__ = _wrapped_class(type(module), tuple(own), module is model)
    model._data_parallel_root, _roots[id(model)] = True, model
    _plan_eager(model)
    _teach_dtensor()
    return model


@functools.cache
def _teach_dtensor() -> None:
    """From the first data_parallel() on a DTensor is filled at random as a whole tensor would be, from the seed of each
    rank (torch would draw other values for another number of ranks), and writing into a copy of it is refused."""

    def handle(handler, names: Iterable[str]) -> None:
        packets = [getattr(torch.ops.aten, name, None) for name in names]
        ops = [getattr(packet, overload) for packet in packets if packet for overload in packet.overloads()]
        one = [op for op in ops if handler is _write or [str(a.type) for a in op._schema.arguments].count("Tensor") < 2]
        _handlers.update({op: handler for op in one if op not in _handlers})

    handle(_draw_whole, "normal_ uniform_ bernoulli_ exponential_ geometric_ log_normal_ cauchy_ random_ rand_like "
                        "randn_like randint_like eye".split())  # fmt: skip
    handle(_write, ["bernoulli", *(name for name in dir(Tensor) if name[0] != "_" and name[-1] == "_")])
    _handlers[_gather] = lambda op, args, _: _gather_one(*args)  # in inference mode
    _handlers[torch.ops.aten._is_any_true.default] = lambda op, args, _: op(args[0].to_local())  # of detect_anomaly
    nn.init._no_grad_trunc_normal_ = _truncated_normal


@torch.compiler.disable
def _draw_whole(func, args: tuple, kwargs: dict) -> DTensor:
    """Values are drawn whole, as on one device, and then sharded. Sends nothing."""
    target, *more = (kwargs["out"], *args) if "out" in kwargs else args
    whole = torch.empty_strided(target.shape, target.stride(), dtype=target.dtype, device=target.device)
    drawn = func(*args, **kwargs | dict(out=whole)) if "out" in kwargs else func(whole, *more, **kwargs)
    shard = distribute_tensor(drawn, target.device_mesh, target.placements, src_data_rank=None)
    return target.copy_(shard) if drawn is whole else shard


@torch.no_grad()
def _truncated_normal(tensor: Tensor, *args, **kwargs) -> Tensor:
    """nn.init.trunc_normal_ draws again until no value lies outside of the limits (since torch 2.12). Asked of a shard,
    ranks would draw a different number of times and then differ in all later values; torch 2.14 runs a collective."""
    if isinstance(tensor, DTensor):
        return _draw_whole(_trunc_normal, (tensor, *args), kwargs)
    return _trunc_normal(tensor, *args, **kwargs)


@torch.compiler.disable
def _write(func, args: tuple, kwargs: dict) -> Tensor:
    """As torch does it, but not where the result would not reach the parameter, or depend on the number of ranks."""
    base = getattr(args[0], "_base", None)  # of a view; what an index gives of a shard is a copy, redistributed
    lost = isinstance(base, DTensor) and base.is_leaf and _memory(base) != _memory(args[0])
    if lost or not func._schema.is_mutable:
        raise RuntimeError(f"{func._schema.name} would not reach the sharded tensor: fill it in place and as a whole")
    _handlers.pop(func, None)  # which would come here again
    try:
        return func(*args, **kwargs)
    finally:
        _handlers[func] = _write


@contextmanager
def disable_data_parallel():
    """Inside it a parameter is its own sharded DTensor in forward too, and nothing communicates: for initialisation,
    checkpoint helpers, inspection. Re-entrant; for the whole process."""
    global _enabled
    _teach_dtensor()
    before, _enabled = _enabled, False
    try:
        yield
    finally:
        _enabled = before


ParameterRow = namedtuple("ParameterRow", "name shape dtype placement local_shape local_bytes")


def describe(model: nn.Module) -> list[ParameterRow]:
    """One row per parameter (ties once), with what this rank holds (placement "-": not wrapped). No collective runs."""
    found = [(name, p, getattr(p, "_local_tensor", p)) for name, p in model.named_parameters()]
    return [ParameterRow(name, tuple(p.shape), p.dtype, "-" if own is p else repr(p.placements[-1]),
                         tuple(own.shape), own.nbytes) for name, p, own in found]  # fmt: skip
