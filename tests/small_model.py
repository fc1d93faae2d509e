"""A small transformer, its batch and its gradients, and a counter of what runs and of what is held."""

from collections import Counter

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from model import IGNORE, ModelConfig, Transformer

# B batch, T tokens, D width, H heads, K key/value heads, d head dimension, V vocabulary, N = B T
SMALL = dict(depth=3, width=32, head_dim=8, grouping=2, grow=3, vocab=80)
B = 2
T = 12


def build(seed=0, dtype=torch.float32, seqlen=T, **changes):
    torch.manual_seed(seed)
    model = Transformer(ModelConfig(**{**SMALL, **changes}))
    model.init_weights()
    model.prepare(seqlen, "cpu")
    return model.to(dtype)


def batch(vocab=SMALL["vocab"], rows=B, seqlen=T, ignored=False):
    generator = torch.Generator().manual_seed(1)
    tokens, targets = torch.randint(vocab, (2, rows, seqlen), generator=generator)
    if ignored:
        targets = targets.masked_fill(torch.rand(rows, seqlen, generator=generator) < 0.4, IGNORE)
    return tokens, targets  # [B, T] each


def train(model, *args):
    """The loss and every gradient by name."""
    model.zero_grad()
    loss = model(*args)
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_close(a, b, tolerance, what=""):
    """`tolerance` on the loss, relative, and on every gradient, in units of its largest entry."""
    (loss, grads), (other, others) = a, b
    assert abs(loss - other) <= tolerance * abs(other), (what, loss, other)
    assert grads.keys() == others.keys()
    for name, grad in grads.items():
        error = (grad - others[name]).abs().max() / others[name].abs().max()
        assert error <= tolerance, f"{what} {name}: differs by {error:.2e} of its largest entry"


def assert_bitwise(a, b, what=""):
    assert torch.equal(a[0], b[0]), (what, a[0], b[0])
    for name, grad in a[1].items():
        assert torch.equal(grad, b[1][name]), (what, name, (grad - b[1][name]).abs().max())


class Ops(TorchDispatchMode):
    """Counts ops and remembers the storages that they made: the largest, and which are alive."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls):
        return True  # else torch.compile, also within eager FlexAttention, gives way to it

    def __init__(self):
        super().__init__()
        self.count = Counter()
        self.largest = 0
        self.made = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.count[func.name().removeprefix("aten::").split(".")[0]] += 1
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor):
                self.largest = max(self.largest, t.numel())
                storage = t.untyped_storage()
                self.made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return out

    def held(self, model):
        """Bytes of the storages that something still holds, views of parameters aside."""
        own = {p.untyped_storage()._cdata for p in model.parameters()}
        return [nbytes for key, (storage, nbytes) in self.made.items() if key not in own and not storage.expired()]

    @property
    def products(self):
        return self.count["mm"] + self.count["addmm"] + self.count["bmm"]


def counted_products(model, *args):
    """FLOPs of every product of a training step but those of attention, as torch's counter sees them."""
    with FlopCounterMode(display=False) as counter:
        model(*args).backward()
    ops = {str(op).removeprefix("aten."): n for op, n in counter.get_flop_counts()["Global"].items()}
    products = {op: n for op, n in ops.items() if op in ("mm", "addmm") or "lean_mlp" in op or "chunked_loss" in op}
    assert all(op in products or "scaled_dot_product" in op for op in ops), ops
    return sum(products.values())
