"""What is recomputed, what is kept: equal results under every --remat, bytes from forward to backward to the last one.

    pytest tests/test_remat.py        # about 60 s on one core, no GPU

U is [B, T, D] in the dtype of the parameters; counts of compiled graphs are those that Inductor schedules.
"""

import importlib.util
import sys
from collections import Counter
from itertools import product

import pytest
import torch
from small_model import SMALL, B, Ops, T, assert_bitwise, batch, build, counted_products, train
from torch.nn.attention import flex_attention as flex
from torch.profiler import profile

import model as under_test
from lab.profiling.collectives import capture, is_product, saved
from model import REMAT, ModelConfig, Transformer
from trainer.step_costs import flops_per_token, kept_per_block


@pytest.mark.long
@pytest.mark.parametrize(("remat", "ratio"), [("none", 1.0), *product(REMAT[1:], (1.0, 0.5, 0.25, 0.0))])
@pytest.mark.parametrize(("block", "mlp"), [("gelu", "plain"), ("gelu", "lean"), ("llama", "plain")])
def test_hardware_flops_count_what_a_remat_policy_multiplies_again(remat, ratio, block, mlp):
    if mlp == "lean" and remat in ("block", "pointwise"):
        return  # in eager a block's lean MLP is done again, which main.py knows; with pointwise it is refused
    model = build(depth=4, remat=remat, remat_ratio=ratio, block=block, mlp=mlp)
    c = model.config
    linear, causal, hardware = (flops_per_token(c, T, kind) for kind in ("linear", "causal", "hardware"))
    assert counted_products(model, *batch()) == B * T * (hardware - (causal - linear) * 7 / 6)
    if mlp == "plain" and (remat in ("none", "pointwise") or not ratio):
        assert hardware == causal + (causal - linear) / 6
    else:
        assert hardware > causal + (causal - linear) / 6


def test_recomputed_attention_is_counted_once_more():
    kept, again = (ModelConfig(**SMALL, remat="both", remat_core=core) for core in (False, True))
    core = flops_per_token(kept, T) - flops_per_token(kept, T, "linear")  # forward and backward, no recomputation
    assert flops_per_token(again, T, "hardware") - flops_per_token(kept, T, "hardware") == pytest.approx(core / 3)


pytestmark = pytest.mark.usefixtures("one_thread")

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
@pytest.mark.parametrize(("block", "grouping"), [("gelu", 1), ("gelu", 4), ("llama", 2)])
def test_every_remat_gives_the_loss_and_gradients_of_none_bit_for_bit(remat, ratio, block, grouping):
    data = batch(ignored=True)
    plain = build(block=block, grouping=grouping)
    other = build(block=block, grouping=grouping, remat=remat, remat_ratio=ratio)
    assert_bitwise(train(other, *data), train(plain, *data), remat)
    with torch.no_grad():
        assert torch.equal(other(*data), plain(*data))


@pytest.mark.parametrize(("depth", "block", "products"), [(1, "gelu", 6), (3, "gelu", 6), (3, "llama", 7)])
def test_pointwise_does_no_product_twice(depth, block, products):
    model = build(depth=depth, remat="pointwise", block=block)
    data = batch()
    with Ops() as forward:
        loss = model(*data)
    with Ops() as backward:
        loss.backward()
    assert (forward.products, backward.products) == (products * depth + 1, 2 * products * depth + 2)
    assert not any("scaled_dot_product" in op and "backward" not in op for op in backward.count)


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


@pytest.mark.long
def test_a_compiled_attention_kernel_runs_once_per_block_also_under_remat(monkeypatch):
    """An Inductor kernel within an eager checkpoint is one opaque call, and the FLOPs say that it is not made again."""

    def stand_in(q, k, v, block_mask, enable_gqa):  # nothing but products: needs no C++ compiler
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
        model.prepare(T, "cpu")
        model(*batch()).backward()
        with profile() as events:
            model(*batch()).backward()
        runs[remat] = sum(event.name == "aten::bmm" for event in events.events())
    assert runs == dict.fromkeys(REMAT, 6 * SMALL["depth"]), runs


# ------------------------------------------------------------------------------------------------- what a block keeps

# Policy -> U, outputs of attention (with their statistics), norms (with theirs), products of a block's backward without
# those of attention.
KEPT = {
    "none": (dict(), 14.5, 1, 2, 12),
    "mlp": (dict(remat="mlp"), 5.5, 1, 1, 13),
    "attn": (dict(remat="attn"), 12, 1, 1, 15),
    "published": (dict(remat="both", remat_norm=False, remat_core=True), 4, 0, 2, 16),
    "norm outside": (dict(remat="both", remat_norm=False), 5, 1, 2, 16),
    "both": (dict(remat="both"), 3, 1, 0, 16),
    "norm inside": (dict(remat="both", remat_core=True), 2, 0, 0, 16),
    "block": (dict(remat="block"), 2, 1, 0, 17),
    "one input": (dict(remat="block", remat_core=True), 1, 0, 0, 17),
    "pointwise": (dict(remat="pointwise"), 8.5, 1, 0, 12),
    "lean alone": (dict(mlp="lean"), 5.5, 1, 1, 9),  # the backward of a lean MLP is one op
    "both, lean": (dict(remat="both", mlp="lean"), 3, 1, 0, 12),
    "norm inside, lean": (dict(remat="both", remat_core=True, mlp="lean"), 2, 0, 0, 12),
    "one input, lean": (dict(remat="block", remat_core=True, mlp="lean"), 1, 0, 0, 13),
    "llama": (dict(block="llama"), 18.5, 1, 2, 14),
    "llama, mlp": (dict(block="llama", remat="mlp"), 5.5, 1, 1, 16),
    "llama, attn": (dict(block="llama", remat="attn"), 16, 1, 1, 17),
    "llama, norm outside": (dict(block="llama", remat="both", remat_norm=False), 5, 1, 2, 19),
    "llama, both": (dict(block="llama", remat="both"), 3, 1, 0, 19),
    "llama, block": (dict(block="llama", remat="block"), 2, 1, 0, 20),
    "llama, one input": (dict(block="llama", remat="block", remat_core=True), 1, 0, 0, 20),
    "llama, pointwise": (dict(block="llama", remat="pointwise"), 12.5, 1, 0, 14),
}
KEPT_COMPILED = ["one input", "pointwise"]
# Compiled, "norm inside, lean" keeps as little as "one input, lean": what `o` makes is made again.
MORE = "none", "published", "both", "one input, lean", "llama, both"
KEPT_COMPILED += [pytest.param(policy, marks=pytest.mark.slow) for policy in MORE]
SHAPE = dict(width=64, head_dim=16, grouping=4, grow=4, vocab=96, seqlen=32, dtype=torch.bfloat16)


def kept_bytes(policy, eager=False):
    """Bytes that a block of SHAPE keeps from forward to backward. eager: with silu(gate), which the compiler makes
    again, and of torch's RMSNorm on a CPU two fp32 tensors instead of its bf16 input."""
    settings, units, attentions, norms, _ = KEPT[policy]
    tokens = B * 32
    heads = 64 // 16
    statistics = attentions * heads * 4 + norms * 2 * 2  # of a token: log-sum-exp in fp32; mean and 1/std in bf16
    if eager and settings.get("block") == "llama":  # (of RMSNorm 1/rms in fp32)
        units += 3 * norms + 4 * (settings.get("remat", "attn") == "attn")
    return int(units * tokens * 64 * 2) + tokens * statistics


@pytest.mark.parametrize("policy", KEPT)
def test_what_a_block_keeps_is_what_the_formula_of_costs_says(policy):
    settings, units, *_ = KEPT[policy]
    assert kept_per_block(ModelConfig(grouping=4, grow=4, **settings)) == units


@pytest.mark.parametrize("policy", KEPT)
def test_bytes_that_a_block_keeps_in_eager(policy):
    held = {}
    for depth in (1, 3):
        model = build(depth=depth, **SHAPE, **KEPT[policy][0])
        with Ops() as ops:
            loss = model(*batch(96, seqlen=32))
        held[depth] = sum(ops.held(model))
        del loss
    assert (held[3] - held[1]) / 2 == kept_bytes(policy, eager=True)


@pytest.mark.long
@pytest.mark.parametrize("policy", KEPT_COMPILED)
def test_bytes_that_a_block_keeps_and_products_of_its_backward_compiled(policy):
    settings, _, attentions, _, products = KEPT[policy]
    products += 1 + (attentions == 0)  # attention's backward; attention itself where its output is not kept
    held = {}
    made = {}
    for depth in (1, 2):
        model = build(depth=depth, **SHAPE, **settings)
        graphs = capture(lambda tokens, model=model: model(tokens, tokens), batch(96, seqlen=32)[:1])
        held[depth] = sum(n for kind, n in saved(graphs["forward"]).items() if kind != "inputs")
        made[depth] = sum(is_product(n) for n in graphs["backward"].graph.nodes)
    # The statistics of norms are recomputed in fp32, those that are kept too; on a CPU torch before 2.14 keeps the
    # state of its random numbers for an attention that it recomputes.
    more = torch.get_rng_state().nbytes if settings.get("remat_core") and torch.__version__ < (2, 14) else 0
    assert held[2] - held[1] == kept_bytes(policy) + more
    assert made[2] - made[1] == products
    assert policy not in ("none", "pointwise") or made[2] == 2 * (12 + 1) + 2  # and the head: none is made again


@pytest.mark.slow
def test_the_chunked_loss_compiles_to_no_tensor_of_the_size_of_the_logits():
    tokens, targets = batch(640, rows=4, seqlen=32)
    model = build(**SHAPE | dict(vocab=640), depth=1)
    graphs = capture(lambda *data: model(*data, 16), (tokens, targets))
    nodes = [n for gm in graphs.values() for n in gm.graph.nodes]
    values = [t for n in nodes for t in torch.utils._pytree.tree_leaves(n.meta.get("val"))]
    largest = max(t.numel() for t in values if isinstance(t, torch.Tensor))
    assert largest == 640 * 64 < tokens.numel() * 640  # the head
