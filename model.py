"""The reference transformer: pre-norm blocks of grouped-query attention and an MLP. Knows no mesh and no trainer.

    model = Transformer(ModelConfig(width=4096, depth=4))      # 973'234'176 parameters
    logits = model(tokens)                                     # [B, T] -> [B, T, V]
    loss = model(tokens, targets)                              # fp32 sum over the labels that are not IGNORE
    model.prepare(seqlen, device)                              # before the first batch, for attn="flex"

Token embedding (scaled by sqrt(D)), blocks, final norm, untied head. block="gelu": sinusoids added to the embedding,
LayerNorm, biases in norms and MLP only. block="llama": rotary positions, RMSNorm, an MLP with a gate, no biases.
Initialisation: every weight normal with std 1/sqrt(fan_in); what writes into the residual stream (`o`, `down`) further
divided by sqrt(2 depth), so that its variance does not grow with depth; the head with std 1/D, so that the first loss
is ln V + 1/(2D); the embedding with std 1/sqrt(D), so that after its scaling it has the size of the sinusoids' range.

B batch, T tokens, D width, H heads, K key/value heads, d head dimension, V vocabulary.
"""

import math
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from lean import IGNORE, LEAN, chunked_cross_entropy, lean_mlp

REMAT = ("none", "mlp", "attn", "both", "block", "pointwise")
aten = torch.ops.aten
MATMULS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}
ATTENTION = {
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.higher_order.flex_attention,
    # What compiled FlexAttention is in an eager region.
    torch.ops.higher_order.inductor_compiled_code,
}
# Eager flex materialises the T x T scores, so it is always compiled (lazily: no work here), and wrapped so that a
# selective checkpoint around it sees an op that it can keep.
compiled_flex_attention = torch.compile(
    flex_attention, options={"wrap_inductor_compiled_regions": True}
)


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and kernels of a Transformer. Not checked here: `head_dim` divides `width`, `grouping` (query heads per
    key/value head) divides the number of heads.

        ModelConfig(block="llama", depth=2, width=512, head_dim=64)

    block: "gelu" or "llama", see the head of the file. grow: hidden width of the MLP over `width`. attn: "sdpa" or
    "flex" (FlexAttention). remat: what backward recomputes, of `remat_ratio` of the blocks: "none", "mlp", "attn",
    "both", "block" or "pointwise" (Block.forward). mlp: "plain", or "lean" for lean.py's, `mlp_chunk` tokens at a time
    (0: all)."""

    block: str = "gelu"
    depth: int = 4
    width: int = 4096
    head_dim: int = 128
    grouping: int = 4
    grow: int = 4
    vocab: int = 32768
    attn: str = "sdpa"
    sdpa: str = "default"  # the kernel of attn="sdpa": see `sdpa_kernel`
    remat: str = "none"
    remat_ratio: float = 1.0
    remat_norm: bool = True
    remat_core: bool = False
    mlp: str = "plain"
    mlp_chunk: int = 0

    @property
    def identity(self) -> dict[str, int]:
        """The fields that a checkpoint and the model that loads it must have in common."""
        return {
            name: getattr(self, name)
            for name in "block depth width head_dim grouping grow vocab".split()
        }

    @property
    def heads(self) -> int:
        """Query heads, H."""
        return self.width // self.head_dim

    @property
    def kv_heads(self) -> int:
        """Key/value heads, K."""
        return self.heads // self.grouping

    def remat_of(self, block: int) -> str:
        """The policy of one block: remat_ratio of the blocks, evenly spread, have `remat`, the others "none"."""
        n = round(self.remat_ratio * self.depth)
        return self.remat if (block + 1) * n // self.depth > block * n // self.depth else "none"


def _save_attention(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op in ATTENTION else _save_lean(ctx, op)


def _save_lean(ctx, op, *args, **kwargs):
    """The output of a lean MLP is the input of the next block: to make it again would keep nothing less."""
    return CheckpointPolicy.MUST_SAVE if op is LEAN else CheckpointPolicy.PREFER_RECOMPUTE


def _save_products(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op in MATMULS else CheckpointPolicy.PREFER_RECOMPUTE


def _save_products_but_down(ctx, op, *args, **kwargs):
    """In eager. After attention come o, up and down; backward needs nothing that down makes, which alone narrows."""
    narrows = op in MATMULS and args[-2].shape[-1] > args[-1].shape[-1]
    return CheckpointPolicy.PREFER_RECOMPUTE if narrows else _save_products(ctx, op)


attention_saved = partial(create_selective_checkpoint_contexts, _save_attention)
_lean_saved = partial(create_selective_checkpoint_contexts, _save_lean)
_products_saved = partial(create_selective_checkpoint_contexts, _save_products)
_products_but_down_saved = partial(create_selective_checkpoint_contexts, _save_products_but_down)
# For compile caches.
attention_saved.cache_hash = "attention-saved-1"
_products_saved.cache_hash = "products-saved-1"
_lean_saved.cache_hash = "lean-saved-1"
# Nothing in a block is random.
_remat = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)


def sdpa_kernel(kernel: str, q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
    """Attention by one kernel, which runs or raises: "cudnn", "flash", "efficient", "math"; "default": torch chooses.
    q [B, H, T, d], k and v [B, K, T, d] -> [B, H, T, d].

    The kernels' own ATen ops and not torch.nn.attention.sdpa_kernel: that one switches a state of the process, and a
    graph with it in it bypasses AOTAutograd's cache. What F.scaled_dot_product_attention does before them is the
    choice, and padding for flash on CUDA: the head dimension must be a multiple of 8 there."""
    grouping = q.shape[1] // k.shape[1]
    if kernel == "default":
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouping > 1)
    if kernel == "math":
        return aten._scaled_dot_product_attention_math(
            q, k, v, is_causal=causal, enable_gqa=grouping > 1
        )[0]
    if kernel == "cudnn":
        return aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, is_causal=causal)[0]
    if kernel == "efficient":  # not every torch groups in it
        k, v = (t.repeat_interleave(grouping, 1) if grouping > 1 else t for t in (k, v))
        return aten._scaled_dot_product_efficient_attention(q, k, v, None, True, is_causal=causal)[
            0
        ]
    if kernel == "flash":
        cpu = q.device.type == "cpu"
        op = (
            aten._scaled_dot_product_flash_attention_for_cpu
            if cpu
            else aten._scaled_dot_product_flash_attention
        )
        return op(q, k, v, is_causal=causal)[0]
    raise ValueError(f"no kernel {kernel!r}: expected default, cudnn, flash, efficient or math")


class Attention(nn.Module):
    """Causal self-attention with grouped queries (Ainslie et al. 2023, arXiv:2305.13245), without biases."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.head_dim = config.head_dim
        self.flex = config.attn == "flex"
        self.grouped = config.grouping > 1
        self.sdpa = config.sdpa
        self.q = nn.Linear(config.width, config.width, bias=False)
        self.k = nn.Linear(config.width, config.kv_heads * config.head_dim, bias=False)
        self.v = nn.Linear(config.width, config.kv_heads * config.head_dim, bias=False)
        self.o = nn.Linear(config.width, config.width, bias=False)

    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, T, D] -> q [B, H, T, d], k and v [B, K, T, d]"""
        return tuple(
            f(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for f in (self.q, self.k, self.v)
        )

    def core(
        self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | None, rope: Tensor | None = None
    ) -> Tensor:
        """q [B, H, T, d], k and v [B, K, T, d], rope [T, d] -> [B, T, D]"""
        if rope is not None:
            q = rotated(q, rope)
            k = rotated(k, rope)
        # On meta, where only shapes and FLOPs are asked for, it has no kernel.
        if self.flex and not q.is_meta:
            y = compiled_flex_attention(q, k, v, block_mask=mask, enable_gqa=self.grouped)
        else:
            y = sdpa_kernel("math" if q.is_meta else self.sdpa, q, k, v)
        return y.transpose(1, 2).flatten(2)  # [B, H, T, d] -> [B, T, D]

    def forward(self, x: Tensor, mask: BlockMask | None, rope: Tensor | None = None) -> Tensor:
        """x [B, T, D], rope [T, d] -> [B, T, D]. mask: that of `causal_mask` for attn="flex"; else unused."""
        return self.o(self.core(*self.qkv(x), mask, rope))


class MLP(nn.Module):
    """Two products with biases around the tanh form of GELU: [B, T, D] -> [B, T, grow D] -> [B, T, D]."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.up = nn.Linear(config.width, config.grow * config.width)
        self.down = nn.Linear(config.grow * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)), [B, T, D] -> [B, T, D], without biases (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate, self.up = (
            nn.Linear(config.width, config.grow * config.width, bias=False) for _ in range(2)
        )
        self.down = nn.Linear(config.grow * config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def norm(config: ModelConfig) -> nn.Module:
    """RMSNorm for block="llama", else LayerNorm, over D."""
    return (
        nn.RMSNorm(config.width, eps=1e-5)
        if config.block == "llama"
        else nn.LayerNorm(config.width)
    )


class Block(nn.Module):
    """x + attention(norm1(x)), then y + mlp(norm2(y)). remat: what backward recomputes, see `forward`."""

    def __init__(self, config: ModelConfig, remat: str):
        super().__init__()
        self.remat = remat
        self.remat_norm = config.remat_norm
        self.remat_core = config.remat_core
        self.lean = config.mlp == "lean"
        self.mlp_chunk = config.mlp_chunk
        self.norm1 = norm(config)
        self.attn = Attention(config)
        self.norm2 = norm(config)
        self.mlp = SwiGLU(config) if config.block == "llama" else MLP(config)

    def attn_branch(self, x: Tensor, mask: BlockMask | None, rope: Tensor | None) -> Tensor:
        return self.attn(self.norm1(x), mask, rope)

    def mlp_branch(self, x: Tensor) -> Tensor:
        return self.mlp(self.norm2(x))

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """x [B, T, D], y [B, T, D] of the attention branch -> the output of the block."""
        if not self.lean:
            x = x + y
            return x + self.mlp_branch(x)
        norm = self.norm2
        up = self.mlp.up
        down = self.mlp.down
        weights = norm.weight, norm.bias, up.weight, up.bias, down.weight, down.bias
        return lean_mlp(x, y, *weights, norm.eps, self.mlp_chunk)

    def whole(self, x: Tensor, mask: BlockMask | None, rope: Tensor | None) -> Tensor:
        return self.add(x, self.attn_branch(x, mask, rope))

    def before_core(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.attn.qkv(self.norm1(x))

    def after_core(self, x: Tensor, y: Tensor) -> Tensor:
        return self.add(x, self.attn.o(y))

    def forward(
        self, x: Tensor, mask: BlockMask | None = None, rope: Tensor | None = None
    ) -> Tensor:
        """x [B, T, D], rope [T, d] -> [B, T, D]. Backward recomputes the attention branch ("attn"), the MLP branch
        ("mlp"), each by itself ("both"), the whole block ("block"), or all but matrix products ("pointwise"). The norms
        lie inside the checkpointed regions, so a region keeps its input alone (remat_norm=False: the norm's output
        too). The output of attention is kept (small, and slow to recompute) unless remat_core."""
        if self.remat == "none" or not torch.is_grad_enabled():
            return self.whole(x, mask, rope)
        lean = dict(context_fn=_lean_saved) if self.lean and self.remat == "block" else {}
        keep = lean if self.remat_core else dict(context_fn=attention_saved)
        if self.remat == "block":
            return _remat(self.whole, x, mask, rope, **keep)
        # Attention lies between two regions: kept also where it is a compiled kernel.
        if self.remat == "pointwise":
            q, k, v = _remat(self.before_core, x, context_fn=_products_saved)
            # The last product's output is not needed in backward. Eager keeps what the policy says, so it must not be
            # named there. The compiler drops it by itself; told to recompute it, it might do so to save another sum.
            keep = _products_saved if torch.compiler.is_compiling() else _products_but_down_saved
            core = self.attn.core  # what rotates is done again: q and k are kept before it alone
            core = core if rope is None else partial(_remat, core, context_fn=attention_saved)
            return _remat(self.after_core, x, core(q, k, v, mask, rope), context_fn=keep)
        if self.remat == "mlp":
            y = self.attn_branch(x, mask, rope)
        elif self.remat_norm:
            y = _remat(self.attn_branch, x, mask, rope, **keep)
        else:
            y = _remat(self.attn, self.norm1(x), mask, rope, **keep)
        if self.remat == "attn" or self.lean:  # the lean MLP recomputes itself
            return self.add(x, y)
        x = x + y
        return x + (
            _remat(self.mlp_branch, x) if self.remat_norm else _remat(self.mlp, self.norm2(x))
        )


def check_lean(config: ModelConfig) -> None:
    """Raises ValueError unless `lean_mlp` computes what a block's norm and MLP compute: it does not follow a change of
    the class MLP, such as a gate or another activation. Tried at width 8; not where tensors have no values."""
    tiny = replace(config, width=8, head_dim=2, grouping=1, grow=2)
    seeded = torch.Generator().manual_seed(0)
    with (
        torch.device("cpu"),
        torch.random.fork_rng(devices=[]),
        torch.no_grad(),
        torch.autocast("cpu", enabled=False),
    ):
        block = Block(tiny, "none")
        x = torch.randn(1, 4, 8, generator=seeded)
        if type(x) is not Tensor:
            return
        for p in block.parameters():
            p.normal_(std=4, generator=seeded)
        try:
            same = torch.allclose(
                block.add(x, x), 2 * x + block.mlp_branch(2 * x), rtol=1e-3, atol=1e-2
            )
        except (AttributeError, TypeError, RuntimeError):  # no up or down, no bias, another shape
            same = False
    if not same:
        raise ValueError(
            "--mlp lean: computes LayerNorm, up, GELU and down, which is not what this MLP computes; use "
            "--mlp plain"
        )


def sinusoids(T: int, D: int, device: torch.device) -> Tensor:
    """[T, D] fp32, sines then cosines, wavelengths 2 pi to 20'000 pi (Vaswani et al. 2017, 3.5)."""
    frequency = torch.exp(torch.arange(0, D, 2, device=device) * (-math.log(10000.0) / D))  # [D/2]
    angle = torch.arange(T, device=device)[:, None] * frequency  # [T, D/2]
    return torch.cat((angle.sin(), angle.cos()), 1)[:, :D]


def rotated(x: Tensor, rope: Tensor) -> Tensor:
    """x [B, H, T, d] with entries i and i + d/2 turned by the angle of frequency i (Su et al. 2021, arXiv:2104.09864).
    rope [T, d]: the sines and cosines of the angles, as `sinusoids` gives them."""
    # [B, T, H, d/2], [T, 1, d/2].
    a, b = x.transpose(1, 2).chunk(2, -1)
    sin, cos = rope[:, None].chunk(2, -1)
    # Under autocast rope is wider than x.
    turned = torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)
    return turned.transpose(1, 2)  # in the memory order of x


def causal_mask(T: int, device: torch.device) -> BlockMask:
    """For FlexAttention: each of T tokens sees itself and those before it."""
    return create_block_mask(lambda b, h, q, k: q >= k, None, None, T, T, device=device)


def cross_entropy(logits: Tensor, targets: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """logits [B, T, V], targets [B, T] -> fp32 sum over the targets that are not IGNORE. label_smoothing: share of a
    target's probability that is spread evenly over V."""
    return F.cross_entropy(
        logits.flatten(0, -2).float(),
        targets.flatten(),
        ignore_index=IGNORE,
        reduction="sum",
        label_smoothing=label_smoothing,
    )


class Transformer(nn.Module):
    """The model of a ModelConfig. ValueError for mlp="lean" beside an MLP that is not lean.py's."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.identity = config.identity
        if config.mlp == "lean":
            check_lean(config)
        self.emb = nn.Embedding(config.vocab, config.width)
        self.blocks = nn.ModuleList(Block(config, config.remat_of(i)) for i in range(config.depth))
        self.norm = norm(config)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        self.mask: BlockMask | None = None

    @torch.no_grad()
    def init_weights(self) -> None:
        """Fills every parameter in place from torch's default generator, in a fixed order."""
        for name, p in self.named_parameters():
            if "norm" in name or p.ndim == 1:
                nn.init.ones_(p) if name.endswith("weight") else nn.init.zeros_(p)
                continue
            std = 1 / math.sqrt(p.shape[1])
            if name.endswith(("o.weight", "down.weight")):
                std /= math.sqrt(2 * self.config.depth)
            nn.init.normal_(p, std=1 / self.config.width if name == "head.weight" else std)

    def prepare(self, seqlen: int, device: torch.device | str) -> None:
        """Builds the block mask that attn="flex" needs; call it before the first forward and for every new seqlen."""
        self.mask = causal_mask(seqlen, device) if self.config.attn == "flex" else None

    def forward(self, tokens: Tensor, targets: Tensor | None = None, chunk: int = 0) -> Tensor:
        """tokens [B, T] -> logits [B, T, V]; with targets [B, T] the fp32 sum of the losses of those that are not
        IGNORE, `chunk` tokens at a time if not 0. Targets are the next tokens: the caller shifts them. ValueError with
        attn="flex" for a T that `prepare` was not given."""
        T = tokens.shape[1]
        D = self.config.width
        rope = None
        flex = self.config.attn == "flex" and not tokens.is_meta
        if flex and (self.mask is None or self.mask.seq_lengths[0] != T):
            raise ValueError(f"no block mask for seqlen {T}: call prepare({T}, device) first")
        x = self.emb(tokens) * math.sqrt(D)  # [B, T, D]
        if self.config.block == "llama":
            rope = sinusoids(T, self.config.head_dim, x.device).to(x.dtype)  # [T, d]
        else:
            x = x + sinusoids(T, D, x.device).to(x.dtype)
        for block in self.blocks:
            x = block(x, self.mask, rope)
        x = self.norm(x)
        if targets is not None and chunk:
            return chunked_cross_entropy(x, self.head.weight, targets, chunk)
        logits = self.head(x)  # [B, T, V]
        return logits if targets is None else cross_entropy(logits, targets)
