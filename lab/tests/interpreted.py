"""A step whose generated GPU code runs on a CPU, its Triton kernels by Triton's interpreter, beside the eager step.

    python lab/tests/interpreted.py --attn cudnn --loss chunked      # flags of main.py; a tiny setting; needs Triton

Prints a line of JSON: relative errors of loss, gradients and update, and the kernels that ran. Of two simulated ranks,
whose collectives move real values. Products run by ATen, cuDNN's attention by its definition; everything else is what
a GPU would run. What the interpreter of Triton 3.7 lacks or gets wrong is mended here: it has no libdevice, reads a
broadcast mask of atomics as if it were contiguous, cuts bf16 off where it should round, and multiplies its bits as
integers.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import json
import sys

import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter
from torch._inductor import codecache
from torch._inductor.runtime import triton_helpers

from lab.profiling import gpu_code
from trainer import config as flags
from trainer.collective_time import link
from trainer.distributed import simulated_world
from trainer.parallelize import build

TINY = "--depth 1 --width 64 --head-dim 16 --grouping 2 --vocab 256 --seqlen 16 --batch 2 --reduce-dtype fp32".split()
EAGER = "--compile none --attn math --ahead 1"
WORLD = 2


class Libdevice:
    names = dict(rsqrt=lambda x: 1 / np.sqrt(x), mul_rn=np.multiply, pow=np.power)

    def __getattr__(self, name):
        function = self.names.get(name) or getattr(np, name)

        def call(first, *rest):
            data = [x.handle.data if isinstance(x, tl.tensor) else x for x in (first, *rest)]
            found = np.asarray(function(*data), dtype=data[0].dtype)
            return tl.tensor(interpreter.TensorHandle(found, first.handle.dtype), first.type)

        return call


class Atomics:
    real = interpreter._interpreter

    def __getattr__(self, name):
        return getattr(self.real, name)

    def atomic_rmw(self, op, pointers, values, mask, order):
        return self.real.atomic_rmw(op, *map(np.ascontiguousarray, (pointers, values, mask)), order)


def in_fp32(handle):
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    bits = handle.data.astype(np.uint32) << 16
    return interpreter.TensorHandle(bits.view(np.float32), tl.float32)


def mend() -> None:
    builder = interpreter.InterpreterBuilder
    dot = builder.create_dot
    cast = builder.cast_impl

    def rounded(self, t, to):
        if (t.dtype.scalar, to.scalar) != (tl.float32, tl.bfloat16):
            return cast(self, t, to)
        bits = torch.from_numpy(np.ascontiguousarray(t.data)).bfloat16().view(torch.int16)
        return interpreter.TensorHandle(bits.numpy().view(np.uint16), tl.bfloat16)

    builder.create_dot = lambda self, a, b, *more: dot(self, in_fp32(a), in_fp32(b), *more)
    builder.create_fp_trunc = builder.create_fp_ext = rounded
    interpreter._interpreter, triton_helpers.libdevice = Atomics(), Libdevice()


def attention(q, k, v, bias=None, lse=True, dropout=0.0, is_causal=True, debug=False, *, scale=None):
    """aten._scaled_dot_product_cudnn_attention on a CPU: (out, logsumexp, and what backward passes on)."""
    _, logits = weights(q, k)
    out = torch.empty_like(q).copy_(logits.softmax(-1) @ spread(v, q))
    none = torch.empty(0, dtype=torch.int64)
    return out, logits.logsumexp(-1, keepdim=True), none, none, q.shape[2], k.shape[2], none, none, none


def gradients(go, q, k, v, out, lse, *more, **kwargs):
    """Its backward: gradients of q, k, v, from the saved output and logsumexp."""
    scale, logits = weights(q, k)
    p = (logits - lse).exp()
    go = go.float()
    gs = p * (go @ spread(v, q).mT - (go * out.float()).sum(-1, keepdim=True)) * scale
    each = gs @ spread(k, q), gs.mT @ q.float(), p.mT @ go
    grouped = [g.unflatten(1, (t.shape[1], -1)).sum(2) for g, t in zip(each, (q, k, v), strict=True)]
    return tuple(torch.empty_like(t).copy_(g) for g, t in zip(grouped, (q, k, v), strict=True))


def spread(t, q):
    return t.float().repeat_interleave(q.shape[1] // t.shape[1], 1)


def weights(q, k):
    scale = q.shape[-1] ** -0.5
    T = q.shape[2]
    logits = scale * (q.float() @ spread(k, q).mT)
    return scale, logits.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -torch.inf)


def step_of(c: flags.Config):
    """(loss, gradients, the step that has run once)."""
    torch._dynamo.reset()
    step = build(c, torch.device("cpu"), WORLD, compiled_update=c.compile != "none")
    found = []
    tokens = torch.randint(c.vocab, (c.batch, c.seqlen), generator=torch.Generator().manual_seed(0))
    def note(phase, grads):
        if phase == "step":
            found.extend(g.clone() for g in grads or ())

    with step.watch_phases(note):
        loss = step(tokens, tokens.roll(-1, 1))
    return loss, found, step


def error(found, true) -> float:
    errors = [(a - b).norm() / b.norm().clamp(min=1e-12) for a, b in zip(found, true, strict=True)]
    return float(torch.stack(errors).max())  # of a NaN: NaN


def main(argv: list[str]) -> dict:
    """loss, gradients: relative errors [of the GPU code, of the eager step] to the eager step in fp32, of the worst
    tensor; update: of the compiled update to the eager one of the same gradients; kernels: how often each ran;
    missing: those that never did."""
    c, eager, true = (
        flags.resolve(flags.parse([*TINY, "--compile", "fwdbwd", *argv, *more.split()]), "cuda", WORLD)
        for more in ("", EAGER, f"{EAGER} --param-dtype fp32")
    )
    simulated_world.start(WORLD, link("h100-nvlink"))
    (true_loss, true, _), (loss, plain, _) = step_of(true), step_of(eager)
    ran: dict[str, int] = {}

    def run(self, *args, **kwargs):
        getattr(codecache.PyCodeCache.load(self.source), self.name).run(*args, **kwargs)
        ran[self.name] = ran.get(self.name, 0) + 1

    mend()
    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_dot_product_cudnn_attention", attention, "CPU")
    library.impl("_scaled_dot_product_cudnn_attention_backward", gradients, "CPU")
    gpu_code.pretend("sm_90")
    gpu_code.Kernel.run = run
    with gpu_code.generated(True, lambda is_backward: "backward" if is_backward else "forward") as codes:
        gpu_loss, gpu, after = step_of(c)
    untouched = build(eager, torch.device("cpu"), WORLD)
    begin = [p.to_local().clone() for p in untouched.model.parameters()]
    untouched.update([g.clone() for g in gpu], gpu_loss)
    moved = [[p.to_local() - b for p, b in zip(s.model.parameters(), begin, strict=True)] for s in (after, untouched)]
    assert all(change.any() for change in moved[0]), "a parameter that no step has moved"
    missing = sorted({name for code in codes for name in code.kernels} - ran.keys())
    losses = [abs(float(a - true_loss)) / float(true_loss) for a in (gpu_loss, loss)]
    found = dict(loss=losses, gradients=[error(gpu, true), error(plain, true)], update=error(*moved))
    return found | dict(kernels=ran, missing=missing)


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))
