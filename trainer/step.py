"""One training step, in every compile mode: (tokens, targets) -> the loss of the whole batch, averaged over all ranks.

    optimizer = AdamW(model.parameters(), lr=3e-4)      # model: of data_parallel(model, mesh), or plain and mesh=None
    step = make_step("fwdbwd", model, optimizer, mesh=mesh, grad_accum=2, clip=1.0, chunk=2048)
    loss = step(tokens, targets)        # [B, T] each, B = grad_accum micro-batches; fp32 scalar on the device
    step.grad_norm                      # of the whole gradient, before clipping
    step.skipped                        # 1.0: no update: loss or norm is not finite, or the norm 0 or above norm_limit

A micro-batch's loss is the sum over its labels divided by (labels of the global batch / ranks), and gradients are
averaged over ranks: the step equals one pass over the whole batch however it is cut, also when labels are IGNOREd.
Loss and norm are those of all ranks, so that all skip the same updates. Everything stays on the device; reading the
loss, the norm or `skipped` is the only host sync (AdamW8bit reads it).
"""

import gc
import logging
import math
import re
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed import _functional_collectives as funcol
from torch.distributed.tensor import DTensor, Partial, Replicate

import overlap
from model import IGNORE, cross_entropy
from simple_fsdp import units_of
from trainer.optimizer import AdamW, local
from trainer.terminal.text import did_you_mean

COMPILE_MODES = ("none", "blocks", "model", "fwdbwd", "step")
# Options by which Inductor puts all collectives of one kind in a graph into buckets: for accum_sync="last".
BUCKETS = {f"bucket_{kind}_fx": "all" for kind in ("all_gathers", "reduce_scatters", "all_reduces")}
CUDA_GRAPH_WARMUP = 2  # steps that run as they are: they compile, and start cuBLAS, cuDNN and NCCL


class LanguageModel(Protocol):
    """What the trainer needs of an nn.Module, as model.Transformer and finetuning.model.HuggingFaceModel have it. Its
    repeated blocks are found by simple_fsdp.units_of, its FLOPs counted by trainer/measuring/flops.py."""

    # What a checkpoint and the model that loads it must have in common, by name.
    identity: dict[str, Any]

    def __call__(
        self, tokens: Tensor, targets: Tensor | None = None, chunk: int = 0, **inputs: Tensor
    ) -> Tensor:
        """tokens [B, T] -> logits [B, T, V]; with targets [B, T] the fp32 sum of the losses of those that are not
        IGNORE, by chunks of `chunk` tokens (0: at once). inputs: more of the batch, such as position_ids [B, T]."""

    def init_weights(self) -> None:
        """Fills parameters and buffers in place, from torch's default generator."""

    def prepare(self, seqlen: int, device: torch.device) -> None:
        """Whatever has to exist before the first batch of this length."""


def shard_group(p: Tensor):
    """(mesh, dimension) over which `p` is sharded; None where this rank has all of it."""
    if isinstance(p, DTensor):
        for dim, placement in enumerate(p.placements):
            if placement.is_shard() and p.device_mesh.size(dim) > 1:
                return p.device_mesh, dim
    return None


def global_norm(shard_groups: list, grads: list[Tensor]) -> Tensor:
    """2-norm of the whole gradient from its local shards, fp32 scalar on their device. A collective: one all-reduce per
    shard group. shard_groups: `shard_group` of each parameter, in the order of `grads`.

        norm = global_norm([shard_group(p) for p in params], [local(p.grad) for p in params])
    """
    total = None
    groups = {}
    for group, g in zip(shard_groups, grads, strict=True):
        groups.setdefault(group, []).append(g)
    for group, shards in groups.items():
        square = torch.stack(torch._foreach_norm([g.float() for g in shards])).square().sum()
        square = (
            square if group is None else funcol.wait_tensor(funcol.all_reduce(square, "sum", group))
        )
        total = square if total is None else total + square
    return total.sqrt()


def parameter_norms(
    model: nn.Module, params: list[Tensor], grads: list[Tensor]
) -> dict[str, float]:
    """The norms of each parameter, "norm/NAME", and of its gradient, "grad/NAME". grads: the local shards of the
    gradients of `params`. A collective per sharded tensor, and a host sync for each figure."""
    names = {id(p): name for name, p in model.named_parameters()}
    norms = {}
    for p, g in zip(params, grads, strict=True):
        for kind, shard in (("norm", local(p.detach())), ("grad", g)):
            norm = global_norm([shard_group(p)], [shard])
            norms[f"{kind}/{names[id(p)]}"] = norm.item()
    return norms


class UnshardedParameters:
    """accum_sync="last": the parameters gathered once, for micro-batches that then communicate nothing. Every rank
    holds, for the length of a step, the whole model in `param_dtype` and its whole gradient."""

    def __init__(self, model: nn.Module, optimizer: AdamW, param_dtype=None, reduce_dtype=None):
        self.slots = [
            (m, n, p) for m in model.modules() for n, p in m._parameters.items() if p is not None
        ]
        self.shards = list(model.parameters())
        self.trained = optimizer.params
        self.leaves = None
        self.param_dtype = param_dtype
        self.reduce_dtype = reduce_dtype
        self.gather_fn = self.gather
        self.reduce_fn = self.reduce

    def gather(self) -> list[Tensor]:
        """The unsharded parameters, in `param_dtype`. A collective."""
        cast = dict(forward_dtype=self.param_dtype)
        return [
            p.redistribute(placements=[Replicate()] * p.device_mesh.ndim, **cast).to_local()
            for p in self.shards
        ]

    def reduce(self, grads: list[Tensor]) -> list[Tensor]:
        """Whole gradients of this rank -> local shards of their average over ranks, in the stored dtype."""
        shards = []
        for p, g in zip(self.trained, grads, strict=True):
            mesh = p.device_mesh
            d = DTensor.from_local(
                g.to(self.reduce_dtype), mesh, [Partial("avg")] * mesh.ndim, run_check=False
            )
            # hybrid_shard: scattered inside, then the shard reduced across.
            for dim in reversed(range(mesh.ndim)):
                d = d.redistribute(placements=[*d.placements[:dim], *p.placements[dim:]])
            shards.append(d.to_local().to(p.dtype))
        return shards

    @contextmanager
    def __call__(self):
        """Inside it the model's parameters are whole and plain; yields those that the optimizer updates, in order."""
        with torch.no_grad():
            whole = self.gather_fn()
        if self.leaves is None:
            pairs = zip(self.shards, whole, strict=True)
            self.leaves = {id(p): w.detach().requires_grad_(p.requires_grad) for p, w in pairs}
        # The same objects in every step: compiled code knows them.
        for p, w in zip(self.shards, whole, strict=True):
            self.leaves[id(p)].data = w
        del whole, w
        for module, name, p in self.slots:
            module._parameters[name] = self.leaves[id(p)]
        try:
            yield [self.leaves[id(p)] for p in self.trained]
        finally:
            for module, name, p in self.slots:
                module._parameters[name] = p
            for leaf in self.leaves.values():
                leaf.data = leaf.data.new_empty(0)


class Step:
    """The step of every mode. train_step of main.py has its parts in the order in which they run; here `__call__` has.
    model: the module whose parameters train; `run_model` runs it (compiled, or inside DDP). check_for_stop: called
    between micro-batches; it may raise, to end the step with nothing changed. on_gradients: called with (parameters,
    the local shards of their gradients) before each update. The others as make_step's.
    compiled: what make_step handed to torch.compile, {name: (function, options)}.
    whole_step: what runs in place of the parts in mode "step", of class OneGraph; else None. compiled_update: `update`,
    compiled, in mode "fwdbwd" on CUDA (not for AdamW8bit); else None, and its parts are called."""

    whole_step: Callable[..., Tensor] | None = None
    compiled_update: Callable[..., tuple[Tensor, Tensor]] | None = None

    def __init__(
        self,
        model: nn.Module,
        optimizer: AdamW,
        *,
        mesh=None,
        grad_accum: int = 1,
        clip: float = 0.0,
        chunk: int = 0,
        accum_sync: str = "every",
        param_dtype=None,
        reduce_dtype=None,
        norm_limit: float = 0.0,
        check_for_stop: Callable[[], Any] | None = None,
        on_gradients: Callable[[list, list], Any] | None = None,
    ):
        self.model = model
        self.run_model = model
        self.optimizer = optimizer
        self.grad_accum = grad_accum
        self.clip = clip
        self.chunk = chunk
        self.norm_limit = norm_limit
        self.check_for_stop = check_for_stop or (lambda: None)
        self.on_gradients = on_gradients
        # Modes "model" and "blocks": the model gives logits, unless the loss is chunked.
        self.loss_outside_model = False
        self.cross_entropy = cross_entropy
        self.mesh = mesh
        self.unsharded_parameters = None
        self.compiled = {}
        # Backward averages over the shards alone; the end of the step averages over the replicas.
        self.average_replicas_at_end = accum_sync == "shards"
        if accum_sync == "last" and mesh is not None:
            self.unsharded_parameters = UnshardedParameters(
                model, optimizer, param_dtype, reduce_dtype or param_dtype
            )
        self.ranks = mesh.size() if mesh is not None else 1
        self.loss_fn = self.micro_batch_loss
        self.shard_groups = [shard_group(p) for p in optimizer.params]
        if mesh is None and any(
            isinstance(p, DTensor) and p.device_mesh.size() > 1 for p in optimizer.params
        ):
            raise ValueError(
                "mesh: is None, but the parameters are DTensors on several ranks, whose loss would not be averaged; "
                "pass the mesh of data_parallel"
            )
        groups = {
            None if group is None else group[0].get_group(group[1]).group_name
            for group in self.shard_groups
        }
        dims = [dim for dim, n in enumerate(mesh.shape if mesh is not None else ()) if n > 1]
        # Dimensions of the mesh over which not all parameters are sharded.
        self.replicated_mesh_dims = [
            dim for dim in dims if groups != {mesh.get_group(dim).group_name}
        ]
        self.grad_norm = self.skipped = None  # until the first step
        # "fwd", "bwd" (reducing counts as that) or "step" (the update; in mode "step" all of it): for the message when
        # memory runs out.
        self.phase = "fwd"
        self.watcher: Callable[[str, list[Tensor]], None] | None = None
        self.dynamic = False  # whether batches differ in T: one graph for all, from the first on

    @contextmanager
    def watch_phases(self, watcher: Callable[[str, list[Tensor]], None]) -> Iterator[None]:
        """Inside it `watcher` is called with the name of each phase that begins, and the gradients that it begins with:
        those of this rank that "reduce" and "step" are given."""
        self.watcher = watcher
        try:
            yield
        finally:
            self.watcher = None

    def enter(self, phase: str, grads: list[Tensor] | None = None) -> None:
        """Begins "fwd", "bwd", "reduce" or "step": for `watch_phases`, and for the message when memory runs out."""
        self.phase = "bwd" if phase == "reduce" else phase
        if self.watcher is not None:
            self.watcher(phase, grads or [])

    def micro_batch_loss(
        self, tokens: Tensor, targets: Tensor, divisor: Tensor, **inputs: Tensor
    ) -> Tensor:
        """tokens, targets [b, T] of a micro-batch -> its part of the loss: the sum over its labels / `divisor`. The one
        function that --compile fwdbwd compiles for forward, and with it backward."""
        if self.loss_outside_model and not self.chunk:
            return self.cross_entropy(self.run_model(tokens, **inputs), targets) / divisor
        return self.run_model(tokens, targets, self.chunk, **inputs) / divisor

    def micro_batches(
        self, tokens: Tensor, targets: Tensor, inputs: dict[str, Tensor]
    ) -> Iterator[tuple]:
        """(tokens, targets, inputs) of each micro-batch, calling `check_for_stop` between two of them."""
        parts = {name: t.chunk(self.grad_accum) for name, t in inputs.items()}
        pairs = zip(tokens.chunk(self.grad_accum), targets.chunk(self.grad_accum), strict=True)
        for i, (x, y) in enumerate(pairs):
            if i:
                self.check_for_stop()
            yield (
                self.mark_length_dynamic(x),
                self.mark_length_dynamic(y),
                {name: self.mark_length_dynamic(part[i]) for name, part in parts.items()},
            )

    def mark_length_dynamic(self, t: Tensor) -> Tensor:
        """`t` [B, T] itself. Where batches differ in T (`dynamic`) torch.compile is told so and makes one graph for
        all."""
        if self.dynamic:
            torch._dynamo.maybe_mark_dynamic(t, 1)
        return t

    def all_reduce(self, t: Tensor, op: str, dims: list[int] | None = None) -> Tensor:
        """All-reduce over every rank of the mesh (both dimensions of a 2-D one), or along some of its dimensions. op:
        "sum", "avg" or "max". Returns a new tensor where more than one rank takes part, else `t` itself."""
        for dim in range(self.mesh.ndim if self.mesh is not None else 0) if dims is None else dims:
            if self.mesh.size(dim) > 1:
                # On CUDA the stream waits.
                t = funcol.wait_tensor(funcol.all_reduce(t, op, (self.mesh, dim)))
        return t

    def loss_divisor(self, targets: Tensor) -> Tensor:
        """Labels of the global batch (none count as one) divided by ranks: what a rank divides its sum of token losses
        by. One all-reduce."""
        return self.all_reduce((targets != IGNORE).sum(), "sum").clamp(min=1) / self.ranks

    def gradient_norm(self, grads: list[Tensor]) -> Tensor:
        """`global_norm`, with the same bits on all ranks. Each replica computes it, perhaps on a device that rounds
        otherwise, and would then clip and skip differently: all take the largest, or NaN if one is not finite."""
        norm = global_norm(self.shard_groups, grads)
        if not self.replicated_mesh_dims:
            return norm
        norm, broken = self.all_reduce(
            torch.stack((norm, (~norm.isfinite()).float())), "max", self.replicated_mesh_dims
        )
        return torch.where(broken > 0, math.nan, norm)  # a maximum may pass over NaN

    def skip_update(self, loss: Tensor, norm: Tensor) -> Tensor:
        """1.0 if a step of this loss and norm changes nothing, else 0.0: where one is not finite, the norm above
        `norm_limit`, or 0, as without labels, where an update would only decay the weights."""
        good = (loss + norm).isfinite() & (norm > 0)
        return 1.0 - (good & (norm <= self.norm_limit) if self.norm_limit else good).float()

    def clipped(self, grads: list[Tensor], norm: Tensor) -> list[Tensor]:
        """The gradients, scaled down to a global norm of `clip` if theirs, `norm`, is larger; as they are if `clip` is
        0."""
        if not self.clip:
            return grads
        return torch._foreach_mul(grads, (self.clip / (norm + 1e-6)).clamp(max=1.0))

    def trained_parameters(self) -> AbstractContextManager[list[Tensor]]:
        """Inside it the model computes with the parameters that it yields, of which backward makes the gradients: with
        accum_sync="last" they are whole, gathered here."""
        return (
            self.unsharded_parameters()
            if self.unsharded_parameters
            else nullcontext(self.optimizer.params)
        )

    def forward(self, tokens: Tensor, targets: Tensor, divisor: Tensor, **inputs: Tensor) -> Tensor:
        """tokens, targets [b, T] of a micro-batch -> its part of the loss, fp32 scalar. Gathers parameters."""
        self.enter("fwd")
        return self.loss_fn(tokens, targets, divisor, **inputs)

    def backward(self, loss: Tensor, params: list[Tensor]) -> Sequence[Tensor]:
        """The gradients of `params`; where these are sharded, so are they, and averaged over ranks
        (accum_sync="shards": over those of a shard group)."""
        self.enter("bwd")
        # .grad would cost a dispatch through DTensor per parameter.
        return torch.autograd.grad(loss, params)

    @torch.no_grad()  # with gradients on, to_local() is an autograd function
    def accumulate(self, grads: list[Tensor] | None, new: Sequence[Tensor]) -> list[Tensor]:
        """`grads` with the local shards of `new` added in place. grads: the sum over the micro-batches before, None at
        the first. new: of one micro-batch. The sum is in fp32, but of a single micro-batch in the dtype of `new`."""
        new = [local(g) for g in new]
        if self.grad_accum > 1:
            new = [g.float() for g in new]
        if grads:
            torch._foreach_add_(grads, new)
        return grads or new

    @torch.no_grad()
    def reduce(self, grads: list[Tensor]) -> list[Tensor]:
        """The local shards of the step's gradients, averaged over all ranks. Backward has done that, but for
        accum_sync="last" (all of it is left) and "shards" (left are the replicas). The phase "step" begins here, and
        `on_gradients` sees the gradients."""
        if self.unsharded_parameters:
            self.enter("reduce", grads)
            grads = self.unsharded_parameters.reduce_fn(grads)
        if self.average_replicas_at_end:
            self.enter("reduce", grads)
            for i, grad in enumerate(grads):  # one by one: each may be freed
                grads[i] = self.all_reduce(grad, "avg", [0])
        self.enter("step", grads)
        if self.on_gradients is not None:
            self.on_gradients(self.optimizer.params, grads)
        return grads

    @torch.no_grad()
    def average(self, loss: Tensor) -> Tensor:
        """The mean over all ranks, the same on each."""
        return self.all_reduce(loss, "avg")

    def update(self, grads: list[Tensor], loss: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient norm, and whether the update was skipped; `loss` is that of all ranks. What `__call__` does
        after the average of the loss, in one function to compile; a test holds the two equal."""
        norm = self.gradient_norm(grads)
        skip = self.skip_update(loss, norm)
        self.optimizer.step(self.clipped(grads, norm), skip)
        return norm, skip

    def __call__(self, tokens: Tensor, targets: Tensor, **inputs: Tensor) -> Tensor:
        """tokens, targets [B, T] -> the loss of the whole batch, averaged over all ranks. inputs: see LanguageModel.
        The same lines as train_step of main.py, where each has a comment; for programs with nothing to add to them."""
        if self.whole_step is not None:
            return self.whole_step(tokens, targets, **inputs)
        divisor = self.loss_divisor(targets)
        loss, grads = 0.0, None
        with self.trained_parameters() as params:
            for x, y, extra in self.micro_batches(tokens, targets, inputs):
                micro_loss = self.forward(x, y, divisor, **extra)
                grads = self.accumulate(grads, self.backward(micro_loss, params))
                loss = loss + micro_loss.detach()
        grads = self.reduce(grads)
        loss = self.average(loss)
        with torch.no_grad():
            if self.compiled_update is not None:
                norm, skip = self.compiled_update(grads, loss)
            else:
                norm = self.gradient_norm(grads)
                skip = self.skip_update(loss, norm)
                self.optimizer.step(self.clipped(grads, norm), skip)
        self.grad_norm, self.skipped = norm, skip
        return loss


class OneGraph(Step):
    """--compile step: forward, loss, backward, clipping and the optimizer as one graph, compiled at the first call."""

    def __init__(self, *args, options=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.graph = torch.compile(self.step_graph, fullgraph=True, options=options)
        self.compiled["step"] = self.step_graph, options
        self.phase = "step"

    def step_graph(
        self, tokens: Tensor, targets: Tensor, **inputs: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """tokens, targets [B, T] -> the loss, the gradient norm, whether the update was skipped. What is compiled."""
        divisor = self.loss_divisor(targets)
        loss = self.micro_batch_loss(tokens, targets, divisor, **inputs)
        grads = [local(g) for g in torch.autograd.grad(loss, self.optimizer.params)]
        with torch.no_grad():
            loss = self.all_reduce(loss.detach(), "avg")
            return loss, *self.update(grads, loss)

    def whole_step(self, tokens: Tensor, targets: Tensor, **inputs: Tensor) -> Tensor:
        """tokens, targets [B, T] -> the loss of the whole batch."""
        tokens = self.mark_length_dynamic(tokens)
        targets = self.mark_length_dynamic(targets)
        with torch._dynamo.config.patch(trace_autograd_ops=True):
            loss, self.grad_norm, self.skipped = self.graph(tokens, targets, **inputs)
        return loss


class CudaGraphStep:
    """`--cuda-graph`: a whole step as one CUDA graph, captured after CUDA_GRAPH_WARMUP calls, then replayed without
    Python, which fills `grad_norm` and `skipped` of `step` again. Shapes may not change; learning rate and step count
    live on the device. train_step(tokens, targets): what to capture, if it is not step itself. peak_mib: of the
    capture; a replay allocates nothing."""

    def __init__(self, step: Step, train_step: Callable[..., Tensor] | None = None):
        self.step = step
        self.train_step = train_step or step
        self.calls = 0
        self.inputs = None
        self.graph = None
        self.peak_mib = None

    def __call__(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """tokens, targets [B, T] -> fp32 scalar, which the next call overwrites."""
        # From the first on: other strides recompile.
        self.inputs = self.inputs or (tokens.clone(), targets.clone())
        for buffer, new in zip(self.inputs, (tokens, targets), strict=True):
            if buffer.shape != new.shape:
                raise ValueError(
                    f"--cuda-graph: captured for a batch {[*buffer.shape]}, got {[*new.shape]}"
                )
            buffer.copy_(new)
        self.calls += 1
        if self.calls <= CUDA_GRAPH_WARMUP:
            return self.train_step(*self.inputs)
        if self.graph is None:
            self._capture()
        self.graph.replay()
        return self.loss

    def _capture(self) -> None:
        """Records the step without running it."""
        self.step.grad_norm = self.step.skipped = None
        # Torch then empties the allocator's cache: with the graph's own pool it would be twice the
        # peak.
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.loss = self.train_step(*self.inputs)
        self.graph = graph
        self.peak_mib = round(torch.cuda.max_memory_allocated() / 2**20, 1)

    def close(self) -> None:
        """Before the process group ends: NCCL waits for graphs that hold its collectives."""
        if self.graph is not None:
            torch.cuda.synchronize()
            self.graph.reset()


def check_mode(mode: str, options: dict | None = None) -> None:
    """Raises ValueError in one line where the installed torch cannot do `mode`, or has no such Inductor options."""
    other_options = {name: value for name, value in (options or {}).items() if name != "plain"}
    try:
        if other_options:  # asking torch costs tenths of a second
            torch.compile(lambda: None, options=other_options)
    except RuntimeError as e:
        problem, _, known = str(e).partition(", known options")
        like = did_you_mean(problem.split()[-1], re.findall(r"'([\w.]+)'", known))
        raise ValueError(f"--compile-options: {problem}{like}") from e
    # 2.11 has torch._dynamo.config.trace_autograd_ops too, but fails an assertion with it.
    if mode == "step" and tuple(int(n) for n in torch.__version__.split(".")[:2]) < (2, 13):
        raise ValueError(
            f"--compile step needs torch >= 2.13 (this is {torch.__version__}): use --compile fwdbwd"
        )


def blocks_to_compile(model: nn.Module, otherwise: str) -> list[nn.Module]:
    """The repeated blocks of `model`. ValueError, which names the mode to use otherwise, if it has none."""
    blocks = [model.get_submodule(name) for name in units_of(model)]
    if not blocks:
        what = "--compile blocks: the model has no repeated blocks"
        raise ValueError(f"{what}; use --compile {otherwise}")
    return blocks


def make_step(
    mode: str,
    model: nn.Module,
    optimizer: AdamW,
    *,
    options: dict | None = None,
    ahead: float = 1.0,
    compiled_update: bool | None = None,
    **kwargs,
) -> Step:
    """The step of a compile mode. What is compiled: "none", "blocks" (each block of the model), "model" (without the
    loss), "fwdbwd" (model and loss as one graph), "step" (the optimizer, too).

        step = make_step("fwdbwd", model, optimizer, mesh=mesh, grad_accum=2, clip=1.0)
        loss = step(tokens, targets)        # [B, T] each -> fp32 scalar

    kwargs: mesh, that of data_parallel(). grad_accum: micro-batches of a step. clip: largest gradient norm (0: any).
    chunk: tokens per chunk of the loss (0: all at once). norm_limit: a step with a larger norm is skipped (0: none is).
    accum_sync: when gradients are reduced. "every" micro-batch. "shards": once a step over replicas, dimension 0,
    for a model wrapped on the other dimension alone. "last": all once a step, which needs the wrapper's param_dtype and
    reduce_dtype. check_for_stop, on_gradients: see Step.

    options: Inductor options on top of overlap.compile_options(ahead=ahead); {"plain": True} leaves those out.
    compiled_update: in mode fwdbwd, whether `Step.update` is compiled. None: on CUDA alone; on a CPU torch's fused
    AdamW is as fast, and compiling would take a minute. False for an optimizer that cannot be compiled, as AdamW8bit.

    Raises ValueError for what mode or torch cannot do, and for a sharded model without a mesh."""
    check_mode(mode, options)
    if kwargs.get("on_gradients") is not None and mode == "step":
        raise ValueError("on_gradients: this step has no gradients outside its graph")
    # Torch logs, on every rank, that a region with a context_fn must have no in-place op: ours have none.
    logging.getLogger("torch._higher_order_ops.wrap").addFilter(
        lambda r: "context_fn is passed" not in str(r.msg)
    )
    if mode == "step" and (
        kwargs.get("grad_accum", 1) > 1 or kwargs.get("accum_sync", "every") != "every"
    ):
        raise ValueError(
            "--compile step: one graph holds one micro-batch; use --compile fwdbwd to accumulate"
        )
    compiled_update = mode == "fwdbwd" and (
        optimizer.lr.is_cuda if compiled_update is None else compiled_update
    )
    if mode == "step" or compiled_update:
        # torch.compile fuses lists of operations, not the fused kernel. Muon has an AdamW inside.
        getattr(optimizer, "adamw", optimizer).foreach = True
    options = dict(options or {})
    plain = options.pop("plain", False) or not any(
        isinstance(p, DTensor) for p in model.parameters()
    )

    def with_overlap(part: nn.Module, **how) -> dict:
        return ({} if plain else overlap.compile_options(part, ahead=ahead, **how)) | options

    def compiled(name: str, function: Callable, options: dict) -> Callable:
        step.compiled[name] = function, options
        return torch.compile(function, fullgraph=True, options=options)

    if mode == "step":
        return OneGraph(model, optimizer, options=with_overlap(model, whole_step=True), **kwargs)
    step = Step(model, optimizer, **kwargs)
    if mode == "none":
        return step
    blocks = blocks_to_compile(model, "fwdbwd") if mode == "blocks" else []
    if whole := step.unsharded_parameters:
        # All parameters are gathered at once, without units to overlap with.
        own_options = ({} if plain else BUCKETS) | options
        whole.gather_fn = compiled("gather", whole.gather, own_options)
        whole.reduce_fn = compiled("reduce", whole.reduce, own_options)
    # Also for a model that gathers nothing: the options of overlap.py order backward for memory, too.
    options = with_overlap(blocks[0] if blocks else model)
    if mode == "blocks":
        step.compiled["block"] = blocks[0], options
        for block in blocks:
            block.compile(fullgraph=True, options=options)
        step.cross_entropy = torch.compile(cross_entropy, fullgraph=True, options=options)
        step.loss_outside_model = True
    elif mode == "model":
        step.run_model = compiled("model", model, options)
        step.loss_outside_model = True
    elif mode == "fwdbwd":
        # Code of its own: Dynamo keeps what it compiled by code object, and would try another model's guards first.
        plain_loss = type(step).micro_batch_loss
        own_code = types.FunctionType(
            plain_loss.__code__.replace(),
            plain_loss.__globals__,
            plain_loss.__name__,
            plain_loss.__defaults__,
            plain_loss.__closure__,
        )
        step.loss_fn = compiled("loss", types.MethodType(own_code, step), options)
        if compiled_update:
            step.compiled_update = torch.compile(step.update, fullgraph=True)
    return step
