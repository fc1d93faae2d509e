"""model.py: its size and FLOPs to the last digit, equal results of every backend and loss.

    pytest tests/test_model.py        # about 10 s on one core, no GPU

FlexAttention trains on CUDA only; here the private check that says so is lifted and torch's dense stand-in runs.
"""

import math
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from small_model import SMALL, B, Ops, T, assert_close, batch, build, counted_products, train
from torch._dynamo.testing import CompileCounter
from torch.nn.attention import flex_attention as flex
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.flop_counter import FlopCounterMode

import model as under_test
from lean import chunked_cross_entropy
from model import IGNORE, ModelConfig, Transformer, cross_entropy
from trainer.step_costs import flops_per_token, reference

pytestmark = pytest.mark.usefixtures("one_thread")

REFERENCE = ModelConfig()
OF_TRANSFORMERS = {"emb": "model.embed_tokens", "norm": "model.norm", "head": "lm_head", "blocks": "model.layers",
                   "norm1": "input_layernorm", "norm2": "post_attention_layernorm", "attn": "self_attn",
                   **{part: f"{part}_proj" for part in ("q", "k", "v", "o", "gate", "up", "down")}}  # fmt: skip


# ------------------------------------------------------------------------------------------------- size and structure


def test_the_reference_setting_has_973_234_176_parameters():
    with torch.device("meta"):
        model = Transformer(REFERENCE)
    assert sum(p.numel() for p in model.parameters()) == 973_234_176
    assert (REFERENCE.heads, REFERENCE.kv_heads) == (32, 8)
    names = {name.rsplit(".", 1)[0] for name, _ in model.named_parameters() if name.endswith("bias")}
    assert all("norm" in name or "mlp" in name for name in names), "biases in norms and MLP only"


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


def test_a_llama_block_is_that_of_transformers():
    """Loss and gradients of LlamaForCausalLM with the same weights, its embedding scaled as ours is."""
    transformers = pytest.importorskip("transformers", reason="needs the extra hf")
    ours, (tokens, targets) = build(block="llama"), batch(ignored=True)
    c = ours.config
    scale = math.sqrt(ours.config.width)
    sizes = dict(hidden_size=c.width, intermediate_size=c.grow * c.width, num_attention_heads=c.heads,
                 num_key_value_heads=c.kv_heads, num_hidden_layers=c.depth, vocab_size=c.vocab)  # fmt: skip
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**sizes, rms_norm_eps=1e-5, tie_word_embeddings=False)
    )
    for p in ours.parameters():  # also those of the norms
        p.data += torch.randn(p.shape) * p.std().clamp(0.1)
    names = {n: ".".join(OF_TRANSFORMERS.get(part, part) for part in n.split(".")) for n, _ in ours.named_parameters()}
    state = {names[n]: p.detach() * (scale if n == "emb.weight" else 1) for n, p in ours.named_parameters()}
    theirs.load_state_dict(state)
    logits = theirs(input_ids=tokens).logits
    loss, grads = train(ours, tokens, targets)
    cross_entropy(logits, targets).backward()
    others = {n: theirs.get_parameter(names[n]).grad * (scale if n == "emb.weight" else 1) for n in names}
    assert_close((loss, grads), (cross_entropy(logits, targets).detach(), others), 1e-5)
    torch.testing.assert_close(ours(tokens), logits, rtol=1e-5, atol=1e-5)


def test_under_autocast_queries_and_keys_of_a_llama_have_the_dtype_of_values():
    """As --wrapper ddp has it: the embedding is fp32, a product bf16; a kernel takes one dtype."""
    model, (tokens, targets) = build(block="llama", sdpa="flash"), batch()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(tokens, targets)
    torch.testing.assert_close(loss, build(block="llama")(tokens, targets), rtol=0.02, atol=0)


def test_a_model_without_a_block_named_is_what_it_was_before_there_were_two():
    """Names, and the sum of the first values from seed 0, as commit 324d8ac made them."""
    model = build()
    assert {type(m).__name__ for m in model.modules()} == {"Transformer", "Embedding", "ModuleList", "Block",
                                                           "LayerNorm", "Attention", "Linear", "MLP"}  # fmt: skip
    assert sum(p.numel() for p in model.parameters()) == 33_600
    assert sum(p.double().abs().sum().item() for p in model.parameters()) == pytest.approx(3282.9602070674146, rel=1e-9)


@pytest.mark.parametrize("block", ["gelu", "llama"])
def test_logits_do_not_depend_on_later_tokens(block):
    model, (tokens, _) = build(dtype=torch.float64, block=block), batch()
    later = tokens.clone()
    later[:, 7:] = (tokens[:, 7:] + 1) % SMALL["vocab"]
    with torch.no_grad():
        before = model(tokens)
        after = model(later)
    assert before.shape == (B, T, SMALL["vocab"])
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.equal(before[:, 7], after[:, 7])


def test_the_loss_is_the_fp32_sum_over_the_labels_that_count():
    model, (tokens, targets) = build(dtype=torch.bfloat16), batch(ignored=True)
    with torch.no_grad():
        loss = model(tokens, targets)
        logits = model(tokens)
    keep = targets != IGNORE
    expected = -logits.float().log_softmax(-1)[keep].gather(1, targets[keep, None]).sum()
    assert loss.dtype == torch.float32
    assert 0 < keep.sum() < keep.numel()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)


def test_flex_without_the_block_mask_of_its_length_says_what_to_call():
    model, (tokens, targets) = build(attn="flex", seqlen=16), batch()
    expected = r"no block mask for seqlen 12: call prepare\(12, device\) first"
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
    model = build(7)
    again = build(7)
    other = build(8)
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


@pytest.mark.long
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "-".join(map(str, s)))
@pytest.mark.parametrize("block", ["gelu", "llama"])
def test_linear_flops_equal_torchs_counter_to_the_last_flop(shape, block, flex_on_cpu, monkeypatch):
    def hidden(q, k, v, block_mask, enable_gqa):
        return Uncounted.apply(q, k, v, block_mask, enable_gqa)

    monkeypatch.setattr(under_test, "compiled_flex_attention", hidden)
    *sizes, rows, seqlen, attn, chunk = shape
    names = ("depth", "width", "head_dim", "grouping", "grow", "vocab")
    model = build(block=block, **dict(zip(names, sizes, strict=True)), attn=attn, seqlen=seqlen)
    assert reference(model.config).parameters == sum(p.numel() for p in model.parameters())
    counted = counted_products(model, *batch(model.config.vocab, rows, seqlen), chunk)
    linear = flops_per_token(model.config, seqlen, "linear")
    assert isinstance(linear, int)
    assert rows * seqlen * linear == counted


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


# ------------------------------------------------------------------------------------------------- attention backends


@pytest.mark.long
@pytest.mark.parametrize(("remat", "grouping"), [("none", 1), ("none", 2), ("block", 2), ("pointwise", 4)])
@pytest.mark.parametrize("block", ["gelu", "llama"])
def test_flex_and_sdpa_agree_within_1e_5(remat, grouping, block, flex_on_cpu, monkeypatch):
    compiled = torch.compile(flex.flex_attention, backend="aot_eager")
    monkeypatch.setattr(under_test, "compiled_flex_attention", compiled)
    data = batch(ignored=True)
    sdpa = train(build(grouping=grouping, block=block), *data)
    assert_close(train(build(attn="flex", grouping=grouping, remat=remat, block=block), *data), sdpa, 1e-5, remat)


# --------------------------------------------------------------------------------------------------------- chunked loss


@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize("chunk", [1, 7, 12, B * T, 1000])
def test_the_chunked_loss_equals_the_full_one_within_2e_6(chunk, ignored):
    model = build()
    data = batch(ignored=ignored)
    assert_close(train(model, *data, chunk), train(model, *data), 2e-6)


@pytest.mark.parametrize("chunk", [7, 1000])
def test_a_chunk_gives_the_same_value_without_gradients(chunk):
    model = build()
    data = batch(ignored=True)
    expected = model(*data, chunk)
    with torch.no_grad(), FlopCounterMode(display=False) as flops:
        value = model(*data, chunk)
    assert torch.equal(value, expected)
    assert not value.requires_grad
    made = flops.get_flop_counts()["Global"][torch.ops.simple_fsdp_lean.chunked_loss]
    assert made == 2 * B * T * SMALL["width"] * SMALL["vocab"], "gradients were made"


def chunked_loss(x, w, y, chunk=50, learned=None):
    return chunked_cross_entropy(x[None], w, y[None], chunk, learned)


@pytest.mark.parametrize("ignored", [0, 1, 6])  # none, all, every sixth
def test_tokens_that_are_not_learned_cost_no_logits_where_their_number_is_known(ignored):
    x, w, y = rows(torch.float32, n=130)
    y = torch.where(y == IGNORE, 3, y)
    if ignored:
        y[::ignored] = IGNORE
    loss = chunked_loss(x, w, y)
    expected = torch.autograd.grad(loss, (x, w))
    broken = x.detach().clone()
    broken[y == IGNORE] = math.nan  # no product may have seen these
    counts = torch.tensor([[0], [int((y != IGNORE).sum())]])
    step = torch.compile(chunked_loss, backend="aot_eager", fullgraph=True)
    for call in (chunked_loss, step):
        made = call(broken.requires_grad_(), w, y, learned=counts)
        grads = torch.autograd.grad(made, (broken, w))
        torch.testing.assert_close((made, *grads), (loss, *expected), rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(chunked_loss(broken, w, y, learned=counts), loss, rtol=1e-6, atol=0)


def test_other_numbers_of_learned_tokens_compile_nothing_again():
    x, w, y = rows(torch.float32, n=130)
    step = torch.compile(chunked_loss, backend=(counter := CompileCounter()), fullgraph=True)
    for ignored in (2, 3, 5):
        y = torch.where(torch.arange(130) % ignored == 0, IGNORE, 3)
        step(x, w, y, learned=(y != IGNORE).sum().reshape(1, 1))
    assert counter.frame_count == 1


def test_of_a_frozen_head_the_chunked_loss_makes_no_gradient():
    x, w, y = rows(torch.float32)
    (expected,) = torch.autograd.grad(chunked_loss(x, w, y), x)
    with FlopCounterMode(display=False) as flops:
        (grad,) = torch.autograd.grad(chunked_loss(x, w.detach(), y), x)
    made = flops.get_flop_counts()["Global"][torch.ops.simple_fsdp_lean.chunked_loss]
    assert torch.equal(grad, expected)
    assert made == 2 * 2 * x.numel() * len(w)


def test_a_gradient_of_the_chunked_gradient_is_refused():
    x, w, y = rows(torch.float32)
    with pytest.raises(RuntimeError, match="cannot be differentiated again; use F.cross_entropy"):
        torch.autograd.grad(chunked_loss(x, w, y), x, create_graph=True)


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
        assert loss.dtype == torch.float32
        assert all(g.dtype == torch.bfloat16 for g in grads)
        return [abs(loss - exact) / exact, *((g - t).norm() / t.norm() for g, t in zip(grads, truth, strict=True))]

    chunked = errors(chunked_loss(x, w, y))
    full = errors(cross_entropy(F.linear(x, w), y))
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
    loss = chunked_loss(x, w, y)
    other = compiled(x, w, y)
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
