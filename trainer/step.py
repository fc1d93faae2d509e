"""One training step, in every compile mode: (tokens, targets) -> the loss of the whole batch, averaged over all ranks.

    optimizer = AdamW(model.parameters(), lr=3e-4)
    step = make_step("fwdbwd", model, optimizer, grad_accum=2, clip=1.0, chunk=2048)
    loss = step(tokens, targets)              # [B, T] each, B = grad_accum micro-batches; fp32 scalar on the device
    step.grad_norm                            # of this step, before clipping; reading either is the only host sync

`none` eager; `blocks` each block compiled, one frame for all; `model` the model compiled, the loss eager; `fwdbwd`
forward and loss as one full graph, their backward as another, clipping and AdamW as a third (on a CPU torch's fused
kernel instead); `step` all of it as one.

Every micro-batch's loss is a sum over its labels divided by (labels of the global batch / ranks), and gradients are
averaged over ranks: the step equals one pass over the whole batch however it is cut, also when labels are IGNOREd.
Gradients accumulate in the stored dtype of the parameters (fp32).
"""

import logging
import types

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as funcol
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from model import IGNORE, cross_entropy
from overlap import compile_options

COMPILE_MODES = ("none", "blocks", "model", "fwdbwd", "step")


def _local(t: Tensor) -> Tensor:
    return t.to_local() if isinstance(t, DTensor) else t


class AdamW:
    """AdamW (Loshchilov and Hutter 2019) over the local shards: no collective, lr and step live on the device.

    Matrices decay, vectors (norms, biases) do not. `moment_dtype` below fp32 halves the moments; the arithmetic stays
    in the dtype of the parameters. `foreach` is the form that compiles into one fused graph; otherwise torch's fused
    kernel runs (the two agree to an ulp; fp32 moments only).
    """

    def __init__(self, params, lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, moment_dtype=None, foreach=False):
        params = [p for p in params if p.requires_grad]
        self.params = sorted(params, key=lambda p: p.ndim < 2)  # those that decay first
        self.decaying = sum(p.ndim >= 2 for p in params)
        shards = self.shards = [_local(p.detach()) for p in self.params]
        self.m = [torch.zeros_like(p, dtype=moment_dtype) for p in shards]
        self.v = [torch.zeros_like(p, dtype=moment_dtype) for p in shards]
        device = shards[0].device
        self.t = torch.zeros((), device=device)
        self.lr = torch.tensor(float(lr), device=device)
        self.betas, self.eps, self.weight_decay = betas, eps, weight_decay
        self.foreach = foreach or moment_dtype not in (None, torch.float32)

    @torch.no_grad()
    def step(self, grads: list[Tensor]) -> None:
        """grads: local shards, in the order of `self.params`."""
        if self.foreach:  # compiled: the shards must be read inside the graph, which also reads the parameters
            self._foreach([_local(p) for p in self.params], grads)
            return
        shards = self.shards
        groups = (slice(0, self.decaying), self.weight_decay), (slice(self.decaying, None), 0.0)
        steps = [self.t.clone() for _ in shards]
        for part, decay in groups:
            if shards[part]:
                adamw(
                    shards[part], grads[part], self.m[part], self.v[part], [], steps[part], fused=True, amsgrad=False,
                    beta1=self.betas[0], beta2=self.betas[1], lr=self.lr, weight_decay=decay, eps=self.eps,
                    maximize=False,
                )  # fmt: skip
        self.t += 1

    def _foreach(self, p: list[Tensor], g: list[Tensor]) -> None:
        b1, b2 = self.betas
        self.t += 1
        m, v = self.m, self.v
        if m[0].dtype != p[0].dtype:
            m, v = [x.to(p[0].dtype) for x in m], [x.to(p[0].dtype) for x in v]
        torch._foreach_lerp_(m, g, 1 - b1)
        torch._foreach_mul_(v, b2)
        torch._foreach_addcmul_(v, g, g, 1 - b2)
        if m is not self.m:
            torch._foreach_copy_(self.m, m)
            torch._foreach_copy_(self.v, v)
        size = self.lr / (1 - b1**self.t)
        d = torch._foreach_sqrt(v)
        torch._foreach_div_(d, (1 - b2**self.t).sqrt())
        torch._foreach_add_(d, self.eps)
        update = torch._foreach_div(m, d)
        torch._foreach_mul_(update, size)
        if self.decaying:
            torch._foreach_mul_(p[: self.decaying], 1 - self.lr * self.weight_decay)
        torch._foreach_sub_(p, update)


def _shard_group(p: Tensor):
    """(mesh, dimension) over which `p` is sharded, or None."""
    if isinstance(p, DTensor):
        for dim, placement in enumerate(p.placements):
            if placement.is_shard() and p.device_mesh.size(dim) > 1:
                return p.device_mesh, dim
    return None


def global_norm(params: list[Tensor], grads: list[Tensor], where: list | None = None) -> Tensor:
    """2-norm of the whole gradient from its local shards, fp32 scalar: one scalar all-reduce, none if unsharded.
    where: `_shard_group` of each parameter, if known."""
    total, groups = None, {}
    for group, g in zip(where or [_shard_group(p) for p in params], grads, strict=True):
        groups.setdefault(group, []).append(g)
    for where, shards in groups.items():
        square = torch.stack(torch._foreach_norm([g.float() for g in shards])).square().sum()
        square = square if where is None else funcol.wait_tensor(funcol.all_reduce(square, "sum", where))
        total = square if total is None else total + square
    return total.sqrt()


class Step:
    """The step of every mode but "step". `backward` is separate so that compiled and eager differ in `loss` alone."""

    def __init__(self, model: nn.Module, optimizer: AdamW, *, mesh=None, grad_accum=1, clip=0.0, chunk=0):
        self.model, self.optimizer, self.grad_accum, self.clip, self.chunk = model, optimizer, grad_accum, clip, chunk
        self.mesh = mesh
        self.ranks = mesh.size() if mesh is not None else 1
        self.loss_fn, self.update_fn = self.loss_sum, self.update
        self.where = [_shard_group(p) for p in optimizer.params]
        self.grad_norm: Tensor | None = None
        self.phase = "fwd"  # where it is: "fwd", "bwd" or "step", for the message when memory runs out
        self.inspect = None  # called with (parameters, gradients' local shards) before the update, if set

    def loss_sum(self, tokens: Tensor, targets: Tensor, share: Tensor) -> Tensor:
        return self.model(tokens, targets, self.chunk) / share

    def over_ranks(self, t: Tensor, op: str) -> Tensor:
        """All-reduce over every rank of the mesh (both dimensions of a 2-D one)."""
        for dim in range(self.mesh.ndim if self.mesh is not None else 0):
            if self.mesh.size(dim) > 1:
                t = funcol.wait_tensor(funcol.all_reduce(t, op, (self.mesh, dim)))  # on CUDA the stream waits
        return t

    def share(self, targets: Tensor) -> Tensor:
        """Labels of the global batch per rank, at least 1: what a rank divides its sum of token losses by."""
        labels = self.over_ranks((targets != IGNORE).sum(), "sum")
        return labels.clamp(min=1) / self.ranks

    def update(self, grads: list[Tensor]) -> Tensor:
        norm = global_norm(self.optimizer.params, grads, self.where)
        if self.clip:
            grads = torch._foreach_mul(grads, (self.clip / (norm + 1e-6)).clamp(max=1.0))
        self.optimizer.step(grads)
        return norm

    def __call__(self, tokens: Tensor, targets: Tensor) -> Tensor:
        share, total, params = self.share(targets), 0.0, self.optimizer.params
        for x, y in zip(tokens.chunk(self.grad_accum), targets.chunk(self.grad_accum), strict=True):
            self.phase = "fwd"
            loss = self.loss_fn(x, y, share)
            self.phase = "bwd"
            if self.grad_accum == 1:  # .grad would cost a dispatch through DTensor per parameter
                grads = torch.autograd.grad(loss, params)
            else:
                loss.backward()
            total = total + loss.detach()
        self.phase = "step"
        with torch.no_grad():  # with gradients on, to_local() is an autograd function
            if self.grad_accum > 1:
                grads = [p.grad for p in params]
                self.model.zero_grad()
            grads = [_local(g) for g in grads]
            if self.inspect is not None:
                self.inspect(params, grads)
            self.grad_norm = self.update_fn(grads)
            return self.over_ranks(total, "avg")


class ModelStep(Step):
    """`model`: the compiled model makes logits, the loss is eager (with chunked loss the compiled model makes it)."""

    def loss_sum(self, tokens: Tensor, targets: Tensor, share: Tensor) -> Tensor:
        if self.chunk:
            return self.model(tokens, targets, self.chunk) / share
        return cross_entropy(self.model(tokens), targets) / share


class OneGraph(Step):
    """`step`: forward, loss, backward, clipping and AdamW as one graph. Lazily traced: the first call compiles."""

    def __init__(self, *args, options=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.graph = torch.compile(self.whole, fullgraph=True, options=options)
        self.phase = "step"

    def whole(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        loss = self.loss_sum(tokens, targets, self.share(targets))
        grads = [_local(g) for g in torch.autograd.grad(loss, self.optimizer.params)]
        with torch.no_grad():
            norm = self.update(grads)
            return self.over_ranks(loss.detach(), "avg"), norm

    def __call__(self, tokens: Tensor, targets: Tensor) -> Tensor:
        if self.inspect is not None:
            raise ValueError("-vv: --compile step has no gradients outside its graph; use --compile fwdbwd")
        with torch._dynamo.config.patch(trace_autograd_ops=True):
            loss, self.grad_norm = self.graph(tokens, targets)
        return loss


def check_mode(mode: str, options: dict | None = None) -> None:
    """Raises ValueError in one line where the installed torch cannot do `mode`, or has no such Inductor options."""
    try:
        torch.compile(lambda: None, options={k: v for k, v in (options or {}).items() if k != "plain"})
    except RuntimeError as e:
        raise ValueError(f"--compile-options: {str(e).partition(', known options')[0]}") from e
    # 2.11 has torch._dynamo.config.trace_autograd_ops too, but fails an assertion with it.
    if mode == "step" and tuple(int(n) for n in torch.__version__.split(".")[:2]) < (2, 13):
        raise ValueError(f"--compile step needs torch >= 2.13 (this is {torch.__version__}): use --compile fwdbwd")


def make_step(mode: str, model: nn.Module, optimizer: AdamW, *, options: dict | None = None, **kwargs) -> Step:
    """The step of a compile mode. kwargs: mesh, grad_accum, clip, chunk (tokens per chunk of the loss, 0: all at once).

    options: Inductor options on top of overlap.compile_options (`step` gets these alone: its graph is not
    bucketed); {"plain": True} leaves those out. Raises ValueError for a mode that this torch cannot do."""
    check_mode(mode)
    # Torch logs, on every rank, that a region with a context_fn must have no in-place op: ours have none.
    logging.getLogger("torch._higher_order_ops.wrap").addFilter(lambda r: "context_fn is passed" not in str(r.msg))
    if mode == "step" and kwargs.get("grad_accum", 1) > 1:
        raise ValueError("--compile step: one graph holds one micro-batch; use --compile fwdbwd to accumulate")
    cuda = optimizer.lr.is_cuda  # on a CPU the fused kernel is as fast and need not be compiled, which takes a minute
    optimizer.foreach = optimizer.foreach or mode == "step" or (mode == "fwdbwd" and cuda)
    options = dict(options or {})
    plain = options.pop("plain", False)
    if mode == "step":
        return OneGraph(model, optimizer, options=options, **kwargs)
    step = (ModelStep if mode == "model" else Step)(model, optimizer, **kwargs)
    if mode == "blocks":
        options = options if plain else compile_options(model.blocks[0]) | options
        for block in model.blocks:
            block.compile(fullgraph=True, options=options)
        return step
    options = options if plain else compile_options(model) | options
    if mode == "model":
        step.model = torch.compile(model, fullgraph=True, options=options)
    elif mode == "fwdbwd":
        # Code of its own: Dynamo keeps what it compiled by code object, and would try another model's guards first.
        plain_loss = type(step).loss_sum
        own = types.FunctionType(plain_loss.__code__.replace(), plain_loss.__globals__, plain_loss.__name__)
        step.loss_fn = torch.compile(types.MethodType(own, step), fullgraph=True, options=options)
        step.update_fn = torch.compile(step.update, fullgraph=True) if cuda else step.update
    return step


def shutdown() -> None:
    """Frees compiled code before the process group, which it holds; otherwise the exit can hang or abort."""
    torch._dynamo.reset()
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
