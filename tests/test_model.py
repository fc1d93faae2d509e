"""model.py: its size and FLOPs to the last digit, equal results under every remat, backend and loss, and what it keeps.

    pytest tests/test_model.py        # about 15 s on one core, no GPU

FlexAttention trains on CUDA only; here the private check that says so is lifted and torch's dense stand-in runs.
"""

import ast
import importlib.util
import math
import sys
from collections import Counter
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention import flex_attention as flex
from torch.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

import model as under_test
from model import IGNORE, REMAT, ChunkedCrossEntropy, ModelConfig, Transformer, cross_entropy, flops_per_token

# B batch, T tokens, D width, H heads, K key/value heads, d head dimension, V vocabulary, N = B T
REFERENCE = ModelConfig()
SMALL = dict(depth=3, width=32, head_dim=8, grouping=2, grow=3, vocab=80)
B, T = 2, 12


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # small shapes, and sums in one order
    yield
    torch.set_num_threads(before)


@pytest.fixture
def flex_on_cpu(monkeypatch):
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)
    monkeypatch.setattr(under_test, "compiled_flex_attention", flex.flex_attention)


def build(seed=0, dtype=torch.float32, seqlen=T, **changes):
    torch.manual_seed(seed)
    model = Transformer(ModelConfig(**{**SMALL, **changes}))
    model.init_weights()
    model.set_seqlen(seqlen, "cpu")
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
        self.count, self.largest, self.made = Counter(), 0, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.count[func.name().removeprefix("aten::").split(".")[0]] += 1
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor):
                self.largest, storage = max(self.largest, t.numel()), t.untyped_storage()
                self.made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return out

    def held(self, model):
        """Bytes of the storages that something still holds, views of parameters aside."""
        own = {p.untyped_storage()._cdata for p in model.parameters()}
        return [nbytes for key, (storage, nbytes) in self.made.items() if key not in own and not storage.expired()]

    @property
    def products(self):
        return self.count["mm"] + self.count["addmm"] + self.count["bmm"]


# ------------------------------------------------------------------------------------------------- size and structure


def test_the_reference_setting_has_973_234_176_parameters():
    with torch.device("meta"):
        model = Transformer(REFERENCE)
    assert sum(p.numel() for p in model.parameters()) == 973_234_176
    assert (REFERENCE.heads, REFERENCE.kv_heads) == (32, 8)
    names = {name.rsplit(".", 1)[0] for name, _ in model.named_parameters() if name.endswith("bias")}
    assert all("norm" in name or "mlp" in name for name in names), "biases in norms and MLP only"


def test_model_imports_neither_the_wrapper_nor_the_trainer():
    tree, modules = ast.parse(Path(under_test.__file__).read_text()), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.name.split(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert not node.level, "a relative import"
            modules.add(node.module.split(".")[0])
    assert modules - set(sys.stdlib_module_names) == {"torch"}


@pytest.mark.parametrize("grouping", [1, 2, 4])
def test_attention_is_softmax_over_earlier_keys_of_the_groups_head(grouping):
    attention = build(dtype=torch.float64, grouping=grouping).blocks[1].attn
    x = torch.randn(B, T, SMALL["width"], dtype=torch.float64)
    q, k, v = (part.transpose(1, 2) for part in attention.qkv(x))  # [B, T, heads, d]
    expected = torch.zeros_like(q)
    for b, t, h in product(range(B), range(T), range(q.shape[2])):
        scores = k[b, : t + 1, h // grouping] @ q[b, t, h] / math.sqrt(q.shape[3])
        expected[b, t, h] = scores.softmax(0) @ v[b, : t + 1, h // grouping]
    torch.testing.assert_close(attention(x, None), attention.o(expected.flatten(2)), rtol=1e-12, atol=1e-12)


def test_logits_do_not_depend_on_later_tokens():
    model, (tokens, _) = build(dtype=torch.float64), batch()
    later = tokens.clone()
    later[:, 7:] = (tokens[:, 7:] + 1) % SMALL["vocab"]
    with torch.no_grad():
        before, after = model(tokens), model(later)
    assert before.shape == (B, T, SMALL["vocab"])
    assert torch.equal(before[:, :7], after[:, :7]) and not torch.equal(before[:, 7], after[:, 7])


def test_the_loss_is_the_fp32_sum_over_the_labels_that_count():
    model, (tokens, targets) = build(dtype=torch.bfloat16), batch(ignored=True)
    with torch.no_grad():
        loss, logits = model(tokens, targets), model(tokens)
    keep = targets != IGNORE
    expected = -logits.float().log_softmax(-1)[keep].gather(1, targets[keep, None]).sum()
    assert loss.dtype == torch.float32 and 0 < keep.sum() < keep.numel()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)


def test_flex_without_the_block_mask_of_its_length_says_what_to_call():
    model, (tokens, targets) = build(attn="flex", seqlen=16), batch()
    expected = r"no block mask for seqlen 12: call set_seqlen\(12, device\) first"
    with pytest.raises(ValueError, match=expected):
        model(tokens, targets)
    model.mask = None
    with pytest.raises(ValueError, match=expected):
        model(tokens)


# ------------------------------------------------------------------------------------------------------ initial values


def test_initial_standard_deviations_are_those_of_the_docstring():
    model = build(depth=4, width=128, head_dim=16, grouping=2, grow=4, vocab=256)
    stds = {"emb": 128**-0.5, "head": 1 / 128, "q": 128**-0.5, "k": 128**-0.5, "v": 128**-0.5, "up": 128**-0.5}
    stds |= {"o": (128 * 8) ** -0.5, "down": (4 * 128 * 8) ** -0.5}
    for name, p in model.named_parameters():
        *_, module, kind = name.split(".")
        if kind == "bias":
            assert not p.any(), name
        elif "norm" in module:
            assert (p == 1).all(), name
        else:
            assert abs(p.std() / stds[module] - 1) < 0.03, (name, p.std(), stds[module])
            assert abs(p.mean()) < 5 * stds[module] / math.sqrt(p.numel()), name


def test_initial_values_come_from_the_default_generator_in_the_order_of_the_parameters():
    model, again, other = build(7), build(7), build(8)
    torch.manual_seed(7)
    Transformer(model.config)  # what building draws comes before
    for (name, p), q, r in zip(model.named_parameters(), again.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q), name
        assert p.ndim == 1 or not torch.equal(p, r), name
        if p.ndim == 2:
            drawn = torch.empty_like(p).normal_()
            torch.testing.assert_close(p / p.std(), drawn / drawn.std(), rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize(("width", "vocab", "depth"), [(64, 256, 2), (64, 4096, 1), (128, 1024, 8)])
def test_the_first_loss_is_ln_v(width, vocab, depth):
    model = build(width=width, vocab=vocab, depth=depth, head_dim=16, seqlen=64)
    tokens, targets = batch(vocab, rows=16, seqlen=64)
    with torch.no_grad():
        loss = model(tokens, targets) / targets.numel()
    assert abs(loss - math.log(vocab)) < 0.1
    assert abs(loss - math.log(vocab) - 1 / (2 * width)) < 0.02


# --------------------------------------------------------------------------------------------------------------- FLOPs

SHAPES = [  # depth, width, head_dim, grouping, grow, vocab, B, T, backend, chunk
    (1, 16, 8, 1, 4, 32, 1, 8, "sdpa", 0), (3, 24, 8, 3, 3, 40, 2, 16, "sdpa", 0),
    (2, 40, 8, 5, 5, 56, 3, 7, "sdpa", 0), (4, 32, 4, 8, 4, 33, 2, 5, "sdpa", 3),
    (2, 48, 16, 1, 3, 257, 1, 33, "sdpa", 0), (1, 64, 32, 2, 5, 96, 4, 12, "sdpa", 16),
    (5, 8, 2, 2, 1, 19, 2, 1, "sdpa", 0), (2, 32, 16, 1, 4, 48, 2, 16, "flex", 0),
    (1, 48, 16, 3, 3, 64, 1, 24, "flex", 0), (3, 32, 8, 2, 5, 80, 2, 9, "flex", 5),
]  # fmt: skip


class Uncounted(torch.autograd.Function):
    """FlexAttention hidden from FlopCounterMode, which refuses it in eager."""

    @staticmethod
    def forward(ctx, q, k, v, mask, grouped):
        with _disable_current_modes(), torch.enable_grad():
            ctx.inputs = [t.detach().requires_grad_() for t in (q, k, v)]
            ctx.out = flex.flex_attention(*ctx.inputs, block_mask=mask, enable_gqa=grouped)
        return ctx.out.detach()

    @staticmethod
    def backward(ctx, g):
        with _disable_current_modes():
            return *torch.autograd.grad(ctx.out, ctx.inputs, g), None, None


def counted_products(model, *args):
    """FLOPs of every product of a training step but those of attention, as torch's counter sees them."""
    with FlopCounterMode(display=False) as counter:
        model(*args).backward()
    ops = {str(op).removeprefix("aten."): n for op, n in counter.get_flop_counts()["Global"].items()}
    assert all(op in ("mm", "addmm") or "scaled_dot_product" in op for op in ops), ops
    return sum(n for op, n in ops.items() if op in ("mm", "addmm"))


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "-".join(map(str, s)))
def test_linear_flops_equal_torchs_counter_to_the_last_flop(shape, flex_on_cpu, monkeypatch):
    def hidden(q, k, v, block_mask, enable_gqa, kernel_options):
        return Uncounted.apply(q, k, v, block_mask, enable_gqa)

    monkeypatch.setattr(under_test, "compiled_flex_attention", hidden)
    *sizes, rows, seqlen, attn, chunk = shape
    names = ("depth", "width", "head_dim", "grouping", "grow", "vocab")
    model = build(**dict(zip(names, sizes, strict=True)), attn=attn, seqlen=seqlen)
    counted = counted_products(model, *batch(model.config.vocab, rows, seqlen), chunk)
    linear = flops_per_token(model.config, seqlen, "linear")
    assert isinstance(linear, int) and rows * seqlen * linear == counted


def test_the_reference_figures_of_a_step():
    tokens = 8 * 4096
    assert flops_per_token(REFERENCE, 4096, "linear") * tokens == 164_926_744_166_400
    assert round(flops_per_token(REFERENCE, 4096) * tokens / 1e12, 2) == 178.12
    assert round(flops_per_token(REFERENCE, 4096, "palm") * tokens / 1e12, 2) == 191.32
    assert flops_per_token(REFERENCE, 4096) == flops_per_token(REFERENCE, 4096, "causal")


def test_the_attention_core_counts_the_keys_that_a_query_sees():
    for grouping, seqlen in product((1, 4), (1, 2, 7, 64)):
        c = ModelConfig(**{**SMALL, "grouping": grouping})
        linear, causal, palm = (flops_per_token(c, seqlen, kind) for kind in ("linear", "causal", "palm"))
        seen = sum(range(1, seqlen + 1))  # pairs of query and key in a sequence
        forward = 2 * 2 * c.depth * c.heads * c.head_dim * seen  # scores and values
        assert (causal - linear) * seqlen == 3 * forward
        assert palm - linear == 12 * c.depth * c.width * seqlen


@pytest.mark.parametrize(("remat", "ratio"), [("none", 1.0), *product(REMAT[1:], (1.0, 0.5, 0.25, 0.0))])
def test_hardware_flops_count_what_a_remat_policy_multiplies_again(remat, ratio):
    model = build(depth=4, remat=remat, remat_ratio=ratio)
    c = model.config
    linear, causal, hardware = (flops_per_token(c, T, kind) for kind in ("linear", "causal", "hardware"))
    assert counted_products(model, *batch()) == B * T * (hardware - (causal - linear) * 7 / 6)
    if remat in ("none", "pointwise") or not ratio:
        assert hardware == causal + (causal - linear) / 6
    else:
        assert hardware > causal + (causal - linear) / 6


# --------------------------------------------------------------------------------------------------------------- remat


def test_a_ratio_of_one_half_gives_four_of_eight_blocks():
    c = ModelConfig(depth=8, remat="block", remat_ratio=0.5)
    assert Counter(c.remat_of(i) for i in range(8)) == {"block": 4, "none": 4}
    with torch.device("meta"):
        blocks = Transformer(c).blocks
    assert [block.remat for block in blocks] == [c.remat_of(i) for i in range(8)]


@pytest.mark.parametrize("depth", [1, 2, 3, 5, 8, 13])
def test_a_ratio_is_rounded_to_whole_blocks_and_spread_evenly(depth):
    for ratio in (0.0, 0.1, 0.25, 1 / 3, 0.5, 0.6, 0.75, 0.99, 1.0):
        c = ModelConfig(depth=depth, remat="mlp", remat_ratio=ratio)
        on = [c.remat_of(i) == "mlp" for i in range(depth)]
        assert abs(sum(on) - ratio * depth) <= 0.5, (ratio, on)
        for size in range(1, depth + 1):
            sums = {sum(on[i : i + size]) for i in range(depth - size + 1)}
            assert max(sums) - min(sums) <= 1, f"ratio {ratio}: {on} is uneven in stretches of {size}"


@pytest.mark.parametrize(("remat", "ratio"), [*product(REMAT[1:], (1.0, 0.5))])
@pytest.mark.parametrize("grouping", [1, 4])
def test_every_remat_gives_the_loss_and_gradients_of_none_bit_for_bit(remat, ratio, grouping):
    data = batch(ignored=True)
    plain = build(grouping=grouping)
    other = build(grouping=grouping, remat=remat, remat_ratio=ratio)
    assert_bitwise(train(other, *data), train(plain, *data), remat)
    with torch.no_grad():
        assert torch.equal(other(*data), plain(*data))


@pytest.mark.parametrize(
    ("remat", "most"), dict(none=15.2, mlp=6.2, attn=12.2, both=3.2, block=2.2, pointwise=10.2).items()
)
def test_a_block_holds_from_forward_to_backward_no_more_than_its_remat_says(remat, most):
    """In units of [B, T, D]: 1 for the input of a region, 1.1 for attention; pointwise: q, k, v and o 3, the MLP 5."""
    held = {}
    for depth in (1, 3):
        model = build(depth=depth, width=64, head_dim=16, grouping=2, grow=4, seqlen=32, remat=remat)
        with Ops() as ops:
            loss = model(*batch(seqlen=32))
        held[depth] = sum(ops.held(model))
        del loss
    per_block = (held[3] - held[1]) / 2 / (B * 32 * 64 * 4)
    assert per_block <= most, per_block


@pytest.mark.parametrize("depth", [1, 3])
def test_pointwise_does_no_product_twice(depth):
    model, data = build(depth=depth, remat="pointwise"), batch()
    with Ops() as forward:
        loss = model(*data)
    with Ops() as backward:
        loss.backward()
    assert (forward.products, backward.products) == (6 * depth + 1, 12 * depth + 2)
    assert not any("scaled_dot_product" in op and "backward" not in op for op in backward.count)


@pytest.mark.parametrize("remat", ["attn", "both", "block", "pointwise"])
def test_attention_runs_once_per_block_also_under_remat(remat):
    model, data = build(remat=remat), batch()
    with Ops() as ops:
        model(*data).backward()
    runs = sum(n for op, n in ops.count.items() if "scaled_dot_product" in op and "backward" not in op)
    assert runs == SMALL["depth"], ops.count


@pytest.mark.parametrize("remat", REMAT)
def test_flex_runs_once_per_block_and_keeps_no_matrix_of_scores(remat, flex_on_cpu):
    seqlen = 128  # the scores of one head, [T, T], are larger than any activation of one row, [T, grow D]
    model = build(attn="flex", remat=remat, seqlen=seqlen, grow=2)
    tokens, targets = batch(rows=1, seqlen=seqlen)
    with Ops() as ops:
        loss = model(tokens, targets)
        kept = max(ops.held(model))
        loss.backward()
    assert ops.count["flex_attention"] == SMALL["depth"], ops.count
    assert kept < seqlen * seqlen * 4, f"{kept} bytes are held from forward to backward"
    assert ops.largest < seqlen * seqlen


def test_a_compiled_attention_kernel_runs_once_per_block_also_under_remat(monkeypatch):
    """An Inductor kernel within an eager checkpoint is one opaque call, and the FLOPs say that it is not made again."""

    def stand_in(q, k, v, block_mask, enable_gqa, kernel_options):  # nothing but products: needs no C++ compiler
        return (q @ k.mT) @ v

    monkeypatch.setattr(flex, "flex_attention", stand_in)
    spec = importlib.util.spec_from_file_location("model_with_a_stand_in", under_test.__file__)
    again = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, again)
    spec.loader.exec_module(again)  # compiles the stand-in as it would FlexAttention
    runs = {}
    for remat in REMAT:
        model = again.Transformer(ModelConfig(**{**SMALL, "grouping": 1, "attn": "flex", "remat": remat}))
        model.init_weights()
        model.set_seqlen(T, "cpu")
        model(*batch()).backward()
        with profile() as events:
            model(*batch()).backward()
        runs[remat] = sum(event.name == "aten::bmm" for event in events.events())
    assert runs == dict.fromkeys(REMAT, 6 * SMALL["depth"]), runs


# ------------------------------------------------------------------------------------------------- attention backends


@pytest.mark.parametrize(("remat", "grouping"), [("none", 1), ("none", 2), ("block", 2), ("pointwise", 4)])
def test_flex_and_sdpa_agree_within_1e_5(remat, grouping, flex_on_cpu, monkeypatch):
    compiled = torch.compile(flex.flex_attention, backend="aot_eager")
    monkeypatch.setattr(under_test, "compiled_flex_attention", compiled)
    data = batch(ignored=True)
    sdpa = train(build(grouping=grouping), *data)
    assert_close(train(build(attn="flex", grouping=grouping, remat=remat), *data), sdpa, 1e-5, remat)


# --------------------------------------------------------------------------------------------------------- chunked loss


@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize("chunk", [1, 7, 12, B * T, 1000])
def test_the_chunked_loss_equals_the_full_one_within_2e_6(chunk, ignored):
    model, data = build(), batch(ignored=ignored)
    assert_close(train(model, *data, chunk), train(model, *data), 2e-6)


@pytest.mark.parametrize("chunk", [7, 1000])
def test_a_chunk_gives_the_same_value_without_gradients(chunk):
    model, data = build(), batch(ignored=True)
    expected = model(*data, chunk)
    with torch.no_grad(), Ops() as ops:
        value = model(*data, chunk)
    assert torch.equal(value, expected) and not value.requires_grad
    assert ops.products == 6 * SMALL["depth"] + math.ceil(B * T / chunk), "gradients were made"


def chunked_loss(x, w, y, chunk=50):
    return ChunkedCrossEntropy.apply(x, w, y, chunk, True)


def rows(dtype, n=330, width=64, vocab=512):
    """x [N, D], w [V, D], y [N] with every sixth IGNOREd"""
    generator = torch.Generator().manual_seed(2)
    x, w = (torch.randn(k, width, generator=generator).to(dtype) for k in (n, vocab))
    y = torch.randint(vocab, (n,), generator=generator)
    y[::6] = IGNORE
    return x.requires_grad_(), (w / 4).requires_grad_(), y


def test_in_bf16_the_chunked_loss_is_as_near_to_fp64_as_the_full_one():
    x, w, y = rows(torch.bfloat16)
    exact_x, exact_w = (t.detach().double().requires_grad_() for t in (x, w))
    exact = F.cross_entropy(exact_x @ exact_w.T, y, ignore_index=IGNORE, reduction="sum")
    truth = torch.autograd.grad(exact, (exact_x, exact_w))

    def errors(loss):
        grads = torch.autograd.grad(loss, (x, w))
        assert loss.dtype == torch.float32 and all(g.dtype == torch.bfloat16 for g in grads)
        return [abs(loss - exact) / exact, *((g - t).norm() / t.norm() for g, t in zip(grads, truth, strict=True))]

    chunked, full = errors(chunked_loss(x, w, y)), errors(cross_entropy(F.linear(x, w), y))
    assert chunked[0] < 1e-4 and max(chunked[1:]) < 6e-3, chunked
    assert all(a <= 1.5 * b + 1e-6 for a, b in zip(chunked, full, strict=True)), (chunked, full)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", [0, 7])
def test_a_batch_without_a_label_gives_loss_0_and_gradients_0(chunk, dtype):
    tokens, targets = batch()
    loss, grads = train(build(dtype=dtype), tokens, torch.full_like(targets, IGNORE), chunk)
    assert loss == 0
    assert all(torch.equal(g, torch.zeros_like(g)) for g in grads.values()), "a gradient is not 0 (or NaN)"


def test_the_chunked_gradients_scale_with_the_incoming_one():
    x, w, y = rows(torch.float32)
    once = torch.autograd.grad(chunked_loss(x, w, y), (x, w))
    scaled = torch.autograd.grad(chunked_loss(x, w, y) * 2.5, (x, w))
    assert all(torch.equal(a * 2.5, b) for a, b in zip(once, scaled, strict=True))


def test_the_form_that_is_compiled_equals_eager_bit_for_bit():
    x, w, y = rows(torch.float32, n=130)
    compiled = torch.compile(chunked_loss, backend="aot_eager", fullgraph=True)
    loss, other = chunked_loss(x, w, y), compiled(x, w, y)
    assert torch.equal(loss, other)
    for a, b in zip(torch.autograd.grad(loss, (x, w)), torch.autograd.grad(other, (x, w)), strict=True):
        assert torch.equal(a, b), (a - b).abs().max()


def test_with_a_chunk_no_tensor_has_the_size_of_the_logits():
    model, (tokens, targets) = build(vocab=2000, seqlen=64), batch(2000, seqlen=64)
    logits, sizes = targets.numel() * 2000, {}  # 256'000; the head has 64'000, a chunk of logits 32'000
    for chunk in (0, 16):
        with Ops() as ops:
            model(tokens, targets, chunk).backward()
        sizes[chunk] = ops.largest
    assert sizes == {0: logits, 16: 2000 * SMALL["width"]}
