"""Two operations of a transformer whose insides a compiler leaves alone, because it
would keep too much: the MLP with its residual sum, and the output layer with its loss.
Copy it along with model.py.

    # y: [B, T, D].
    y = lean_mlp(x, y, norm_weight, norm_bias, up, up_bias, down, down_bias, 1e-5, 4096)
    # The loss: a sum, in fp32.
    loss = chunked_cross_entropy(x, head, targets, 2048)

Each is a custom op with gradients of its own, the same in eager and in compiled code. C
tokens of a chunk, D width, F hidden width, N tokens, V vocabulary.
"""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

IGNORE = -100  # a target that is not trained on
# Of the ops below: two files must not register the same ones.
_LIBRARY = "simple_fsdp_" + __name__.replace(".", "_")
aten = torch.ops.aten


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total [m, n] += a [m, k] @ b [k, n], in place, without a tensor for the product.
    On a CPU the product needs one if total has another dtype than a and b."""
    if a.dtype == b.dtype == total.dtype:
        torch.addmm(total, a, b, out=total)
    elif total.is_cuda and a.dtype == b.dtype:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b


# Recomputation written as an autograd.Function is undone by the compiler, which merges
# it with the forward; of plain code it reorders the backward into three [C, F] tensors.
# With the sums outside, it would keep the gradient of the output in fp32, and make the
# norm before attention, which reads x too, together with z.
@torch.library.custom_op(f"{_LIBRARY}::lean_mlp", mutates_args=())
def lean_mlp(
    x: Tensor,
    y: Tensor,
    g: Tensor,
    b: Tensor,
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    b2: Tensor,
    eps: float,
    chunk: int,
) -> Tensor:
    """z + MLP(LayerNorm(z)) for z = x + y, [.., D], where MLP is down(gelu(up(z))) with
    the tanh form of GELU. Backward saves only the inputs and recomputes the rest; at
    most two [C, F] tensors exist at a time.

    x, y [.., D]; weight and bias of the norm g, b [D], of up w1 [F, D], b1 [F], of down
    w2 [D, F], b2 [D]; all of one dtype. eps: of the norm. chunk: tokens at a time; 0:
    all of them."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    for xc, yc, rows in _chunks(chunk, x, y, out):
        z = xc + yc
        h = F.linear(F.layer_norm(z, g.shape, g, b, eps), w1, b1)  # [C, F]
        torch.addmm(b2, aten.gelu_(h, approximate="tanh"), w2.t(), out=rows)
        rows += z
        del z, h  # before the next ones
    return out


@torch.library.custom_op(f"{_LIBRARY}::lean_mlp_backward", mutates_args=())
def lean_mlp_backward(
    go: Tensor,
    x: Tensor,
    y: Tensor,
    g: Tensor,
    b: Tensor,
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    eps: float,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """From `go` [.., D], the gradient of the output: one gradient for both x and y, and
    those of g, b, w1, b1, w2, b2, all in the dtype of x. Sums over several chunks are
    accumulated in fp32."""
    gx = torch.empty_like(x, memory_format=torch.contiguous_format)
    several = 0 < chunk < x[..., 0].numel()
    dtype = torch.promote_types(x.dtype, torch.float32) if several else x.dtype
    sums = [torch.zeros_like(t, dtype=dtype) for t in (g, b, w1, b1, w2, b)]
    for xc, yc, oc, gc in _chunks(chunk, x, y, go, gx):
        z = xc + yc
        n, mean, rstd = aten.native_layer_norm(z, g.shape, g, b, eps)
        h = F.linear(n, w1, b1)  # [C, F]
        a = F.gelu(h, approximate="tanh")
        add_product(sums[4], oc.t(), a)
        sums[5] += oc.sum(0)
        torch.mm(oc, w2, out=a)  # the gradient of the GELU's output takes its place
        aten.gelu_backward.grad_input(a, h, approximate="tanh", grad_input=a)
        del h
        add_product(sums[2], a.t(), n)
        sums[3] += a.sum(0)
        gn = a @ w1
        del a, n
        gz, *norm = aten.native_layer_norm_backward(
            gn, z, g.shape, mean, rstd, g, b, [True] * 3
        )
        torch.add(gz, oc, out=gc)
        sums[0] += norm[0]
        sums[1] += norm[1]
        del z, gn, gz
    return gx, *(sums.pop(0).to(x.dtype) for _ in range(6))


def _chunks(chunk: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same rows of tensors [.., D] as [C, D], `chunk` at a time; 0: all at once."""
    rows = [t.flatten(0, -2) for t in tensors]  # [N, D]
    return zip(*(t.split(chunk or len(t)) for t in rows), strict=True)


LEAN = getattr(torch.ops, _LIBRARY).lean_mlp.default


@lean_mlp.register_fake
def _(x, y, g, b, w1, b1, w2, b2, eps, chunk):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@lean_mlp_backward.register_fake
def _(go, x, y, g, b, w1, b1, w2, eps, chunk):
    saved = (x, g, b, w1, b1, w2)
    return *(
        torch.empty_like(t, memory_format=torch.contiguous_format) for t in saved
    ), w2.new_empty(w2.shape[0])


def _keep_inputs(ctx, inputs, output):
    *tensors, _, ctx.eps, ctx.chunk = inputs
    ctx.save_for_backward(*tensors)


def _lean_gradients(ctx, go: Tensor):
    gx, *gradients = lean_mlp_backward(
        go.contiguous(), *ctx.saved_tensors, ctx.eps, ctx.chunk
    )
    return gx, gx, *gradients, None, None


lean_mlp.register_autograd(_lean_gradients, setup_context=_keep_inputs)
register_flop_formula(getattr(torch.ops, _LIBRARY).lean_mlp)(
    lambda x, y, g, b, w1, *args, **kwargs: 2 * 2 * math.prod(x[:-1]) * math.prod(w1)
)
register_flop_formula(getattr(torch.ops, _LIBRARY).lean_mlp_backward)(
    lambda go, x, y, g, b, w1, *args, **kwargs: (
        5 * 2 * math.prod(x[:-1]) * math.prod(w1)
    )
)


# One op, because of its loop the compiler makes one kernel for all chunks, so that the
# logits of every chunk exist.
@torch.library.custom_op(f"{_LIBRARY}::chunked_loss", mutates_args=())
def chunked_loss(
    x: Tensor,
    w: Tensor,
    y: Tensor,
    chunk: int,
    grad: bool,
    frozen: bool = False,
    learned: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states x [N, D], head w [V, D], targets y [N] -> (the summed loss in fp32,
    the gradient of x, that of w). The gradients have the dtypes of x and w; that of w
    is accumulated in fp32. Without `grad` both are empty; with `frozen` that of w is.
    learned: see chunked_cross_entropy."""
    if learned is not None:
        # In their order; no read of the device, whose host would wait for it.
        rows = (y == IGNORE).argsort(stable=True)[: int(learned.sum())]
        loss, gx, gw = chunked_loss(x[rows], w, y[rows], chunk, grad, frozen)
        return loss, torch.zeros_like(x).index_copy_(0, rows, gx) if grad else gx, gw
    loss = torch.zeros((), dtype=torch.float32, device=x.device)
    gx = torch.empty_like(x if grad else x[:0])
    gw = torch.zeros_like(w if grad and not frozen else w[:0], dtype=torch.float32)
    for i in range(0, len(x), chunk):
        xc = x[i : i + chunk]
        yc = y[i : i + chunk].unsqueeze(1)
        z = xc @ w.t()  # [C, V]
        p = z.float()  # fp32 logits, then probabilities, then their gradient
        ok = yc != IGNORE
        t = torch.where(ok, yc, 0)
        zt = p.gather(1, t)
        m = p.amax(-1, keepdim=True)
        s = p.sub_(m).exp_().sum(-1, keepdim=True)
        loss += ((s.log() + m - zt) * ok).sum()
        if grad:
            g = z.copy_(p.div_(s).scatter_add_(1, t, -torch.ones_like(s)).mul_(ok))
            del p
            gx[i : i + chunk] = g @ w
            if not frozen:
                add_product(gw, g.t(), xc)
            del g
        del z
    return loss, gx, gw.to(w.dtype)


@chunked_loss.register_fake
def _(x, w, y, chunk, grad, frozen=False, learned=None):
    gradients = (
        torch.empty_like(x if grad else x[:0]),
        torch.empty_like(w if grad and not frozen else w[:0]),
    )
    return x.new_empty((), dtype=torch.float32), *gradients


def _keep_gradients(ctx, inputs, output):
    ctx.save_for_backward(*output[1:])


def _scaled_gradients(ctx, go: Tensor, *_):
    if torch.is_grad_enabled():
        raise RuntimeError(
            "chunked loss: it computes its gradients in forward, so they cannot be "
            "differentiated again; use F.cross_entropy (main.py: --loss full)"
        )
    gx, gw = ctx.saved_tensors
    of_w = (gw * go).to(gw.dtype) if ctx.needs_input_grad[1] else None
    return (gx * go).to(gx.dtype), of_w, None, None, None, None, None


chunked_loss.register_autograd(_scaled_gradients, setup_context=_keep_gradients)
register_flop_formula(getattr(torch.ops, _LIBRARY).chunked_loss)(
    lambda x, w, y, chunk, grad, frozen=False, learned=None, **kwargs: (
        (1 + grad + (grad and not frozen)) * 2 * x[0] * math.prod(w)
    )
)


def chunked_cross_entropy(
    x: Tensor, w: Tensor, targets: Tensor, chunk: int, learned: Tensor | None = None
) -> Tensor:
    """Hidden states x [B, T, D], head w [V, D], targets [B, T] -> the summed
    `cross_entropy` of x @ w.T, a scalar in fp32, `chunk` tokens at a time. No [B, T, V]
    tensor exists. Forward also computes the gradients, so that w is read (under FSDP:
    gathered) once per step and its gradient reduced once. Targets of IGNORE count
    nothing.

        targets = tokens[:, 1:]
        loss = chunked_cross_entropy(x[:, :-1], head.weight, targets, 2048)
        (loss / (targets != IGNORE).sum()).backward()

    learned: a tensor of integers on the CPU whose sum is the number of targets that are
    not IGNORE; then no logits are computed for the others. RuntimeError for a gradient
    of the gradient."""
    grad = torch.is_grad_enabled()
    frozen = not w.requires_grad
    x, targets = x.flatten(0, 1), targets.flatten()
    return chunked_loss(x, w, targets, chunk, grad, frozen, learned)[0]
