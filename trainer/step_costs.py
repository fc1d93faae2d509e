"""FLOPs and bytes of a training step by formula, and the peak FLOP/s of devices. Imports no torch.

flops_per_token(config, seqlen=4096)         # config: a model.ModelConfig, or anything with its fields
"""

import ctypes
import os
import re
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass

NEWTON_SCHULZ_STEPS = 5  # of Muon's iteration


def muon(config) -> bool:
    """Whether --optimizer muon is on. Rows of before there was that flag lack it."""
    return getattr(config, "optimizer", "adamw") == "muon"


def newton_schulz_flops(m: int, n: int, steps: int) -> int:
    """Of Muon's iteration on a matrix [m, n]: three products a step, one of which has the smaller side alone."""
    small, large = sorted((m, n))
    return steps * (4 * small**2 * large + 2 * small**3)


# Dense bf16 FLOP/s by the whole device name: a MIG slice, an RTX 4090 D, an H200 NVL or a GH200 has another peak than
# the name that it contains. A device that is not listed has no MFU.
PEAKS = {
    r"A100-(SXM4|PCIE)-(40|80)GB|A100 80GB PCIe": 312e12,
    r"H100 80GB HBM3|H200": 989e12,  # both SXM
    r"H100 PCIe": 756e12,
    r"H100 NVL": 835e12,
    r"GeForce RTX 4090": 165e12,  # fp32 accumulate
}


def device_peak(name: str) -> float | None:
    """Dense bf16 FLOP/s of a device named as `torch.cuda.get_device_name` names it; None where it is not known."""
    return next(
        (flops for names, flops in PEAKS.items() if re.fullmatch(f"(NVIDIA )?({names})", name)),
        None,
    )


def may_have_gpu() -> bool:
    """Whether torch could see a GPU, asked without torch: only if there is a driver to load (NVIDIA's, or ROCm's)."""
    with suppress(OSError):
        return bool(ctypes.CDLL("libcuda.so.1"))
    return os.path.exists("/dev/kfd")


def attention_flops(heads: int, head_dim: int, keys: float) -> float:
    """Of one query token in one layer, forward: a score with each of `keys` keys, and the sum of their values."""
    return 4 * heads * head_dim * keys


def causal_keys(seqlen: int) -> float:
    """Mean number of keys that a query sees under a causal mask."""
    return (seqlen + 1) / 2


def gated(config) -> bool:
    """Whether the MLP has a gate beside its up product. Rows of before there was --block lack it."""
    return getattr(config, "block", "gelu") == "llama"


@dataclass(frozen=True)
class Architecture:
    """A decoder of equal blocks: attention, then an MLP or E experts of which a token passes `active`. Widths in
    elements. gated: the MLP has a gate beside its up product (three weights). biases, norms: elements of one block
    outside the products. window, every: all but each `every`-th block attend to `window` keys (0: to all)."""

    name: str
    depth: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocab: int
    gated: bool = False
    tied: bool = False
    biases: int = 0
    norms: int = 0
    final_norm: int = 0
    experts: int = 0
    active: int = 0
    window: int = 0
    every: int = 0
    # (rows, columns) of attention's matrices, if not the usual four.
    attention_matrices: tuple[tuple[int, int], ...] = ()
    # ((rows, columns), how many) of the linear layers that adapters stand beside, if not one for each product.
    linear: tuple[tuple[tuple[int, int], int], ...] = ()
    counted: int = 0  # weights that a token is multiplied with, if they were counted on the model
    stored: int = 4  # bytes of an element in the model's files, as which frozen weights stay
    note: str = ""

    @property
    def attention_shapes(self) -> tuple[tuple[int, int], ...]:
        """(rows, columns) of attention's matrices in a block."""
        D = self.width
        q = self.heads * self.head_dim
        kv = self.kv_heads * self.head_dim
        return self.attention_matrices or ((q, D), (kv, D), (kv, D), (D, q))

    @property
    def attention_parameters(self) -> int:
        """Of those matrices."""
        return sum(m * n for m, n in self.attention_shapes)

    def _block(self, experts: int) -> int:
        """Parameters of a block: of one MLP, or of so many experts and the router [E, D]."""
        mlp = (2 + self.gated) * self.width * self.hidden * max(experts, 1)
        router = self.experts * self.width
        return self.attention_parameters + self.biases + self.norms + mlp + router

    def _total(self, experts: int) -> int:
        ends = self.width * self.vocab * (1 if self.tied else 2) + self.final_norm
        return ends + self.depth * self._block(experts)

    @property
    def parameters(self) -> int:
        """All that is stored, a tied weight once."""
        return self._total(self.experts)

    @property
    def active_parameters(self) -> int:
        """Those that one token passes."""
        return self._total(self.active)

    @property
    def block_parameters(self) -> int:
        """Of one block, which is what one all-gather of a block brings."""
        return self._block(self.experts)

    @property
    def products(self) -> Counter:
        """{(rows, columns): how many} of the matrices in blocks that tokens are multiplied with, without routers."""
        return self._products(max(self.experts, 1))

    @property
    def adapted(self) -> Counter:
        """Of those the ones that adapters stand beside: all but the experts, which are stacked in one tensor."""
        return Counter(dict(self.linear)) or self._products(0 if self.experts else 1)

    def _products(self, mlps_of_a_block: int) -> Counter:
        D, F = self.width, self.hidden
        products: Counter = Counter()
        for shape in self.attention_shapes:
            products[shape] += self.depth
        products[F, D] += (1 + self.gated) * self.depth * mlps_of_a_block
        products[D, F] += self.depth * mlps_of_a_block
        return +products

    @property
    def hidden_matrices(self) -> Counter:
        """Those and the routers: what --optimizer muon gives to Muon."""
        routers = {(self.experts, self.width): self.depth} if self.experts else {}
        return self.products + Counter(routers)

    @property
    def hidden_parameters(self) -> int:
        """Of those matrices."""
        return sum(m * n * count for (m, n), count in self.hidden_matrices.items())

    @property
    def multiplied(self) -> int:
        """Weights that a token is multiplied with: without embedding look-up, norms and biases."""
        if self.counted:
            return self.counted
        outside = self.final_norm + self.depth * (self.biases + self.norms)
        return self.active_parameters - outside - (0 if self.tied else self.width * self.vocab)

    def keys(self, seqlen: int, convention: str) -> float:
        """Mean number of keys of a query over all blocks: all of them ("palm"), or those that no mask hides."""
        whole = seqlen if convention == "palm" else causal_keys(seqlen)
        if not self.window or self.window >= seqlen:
            return whole
        # The first of a sequence see fewer.
        near = self.window * (1 - (self.window - 1) / (2 * seqlen))
        full = self.depth // self.every if self.every else 0
        return (
            full * whole + (self.depth - full) * (self.window if convention == "palm" else near)
        ) / self.depth

    def flops_per_token(self, seqlen: int, convention: str) -> float:
        """Of one token's training step, forward once and backward twice. convention: "linear": 6 per weight that the
        token is multiplied with (not the embedding). "palm": plus the attention core over all keys (Chowdhery et al.
        2022, appendix B). "causal": plus the core over the mean number of keys that no mask hides."""
        if convention == "linear":
            return 6 * self.multiplied
        core = attention_flops(self.heads, self.head_dim, self.keys(seqlen, convention))
        return 6 * self.multiplied + 3 * self.depth * core


def reference(config) -> Architecture:
    """The transformer of model.py at resolved flags."""
    heads = config.width // config.head_dim
    gate = gated(config)
    return Architecture(
        "reference",
        config.depth,
        config.width,
        heads,
        heads // config.grouping,
        config.head_dim,
        config.grow * config.width,
        config.vocab,
        gated=gate,
        biases=0 if gate else (config.grow + 1) * config.width,
        norms=(2 if gate else 4) * config.width,
        final_norm=(1 if gate else 2) * config.width,
    )


def flops_per_token(config, seqlen: int, convention: str = "causal") -> int | float:
    """FLOPs of one token's training step of the reference transformer.
    convention: "linear", "palm" or "causal", as of `Architecture.flops_per_token`. "hardware": causal, plus what is
    multiplied again in backward: the scores inside the core's backward (7/6 of the core) and what recomputation and the
    lean MLP repeat, but the last product of a region, which nothing needs."""
    a = reference(config)
    if convention != "hardware":
        return a.flops_per_token(seqlen, convention)
    linear, causal = (a.flops_per_token(seqlen, kind) for kind in ("linear", "causal"))
    core = causal - linear
    kv = a.kv_heads * a.head_dim
    qkv, up, o = (
        2 * config.width * n
        for n in (config.width + 2 * kv, (1 + a.gated) * a.hidden, config.width)
    )
    once = core / (3 * config.depth) if config.remat_core else 0  # a forward of the core
    attention = dict(attn=qkv + once, both=qkv + once, block=qkv + o + once)
    recomputed = sum(attention.get(config.remat_of(i), 0) for i in range(config.depth))
    recomputed += up * sum(
        config.mlp == "lean" or config.remat_of(i) in ("mlp", "both", "block")
        for i in range(config.depth)
    )
    return linear + core * 7 / 6 + recomputed


def kept_per_block(config, remat: str | None = None) -> float:
    """What a block of the reference transformer, under `remat` (None: that of `config`), keeps for backward, in tensors
    [B, T, D]; no statistics (< 0.1). Of --block llama in compiled code: eager keeps silu(gate), too, `grow` more."""
    kv = 2 / config.grouping
    remat = remat or config.remat
    if remat == "block":
        return 1 if config.remat_core else 2
    if remat == "pointwise":  # the block's input, q, k, v, attention's output, o, up (and gate)
        return 4 + kv + (1 + gated(config)) * config.grow
    attention = 4 + kv  # its input, the norm's output, q, k, v and attention's output
    if remat in ("attn", "both"):
        attention = 1 + (not config.remat_core) + (not config.remat_norm)
    # Its input, the norm's output, what is before and after the activation.
    mlp = 2 + (2 + gated(config)) * config.grow
    if config.mlp == "lean":
        mlp = 1
    elif remat in ("mlp", "both"):
        mlp = 1 + (not config.remat_norm)
    return attention + mlp


def moment_size(config) -> float:
    """Bytes of one of Adam's moments of a parameter; in 8 bits there is a scale in fp32 for each 256."""
    if getattr(config, "optimizer", "adamw") == "adamw8bit":
        return 1 + 4 / 256
    return {"fp32": 4, "bf16": 2}[config.adam_dtype]


def step_bytes(config, ranks: int, batch: int) -> float:
    """About what a training step of resolved flags holds on one of `ranks` at its peak, with `batch` sequences at once:
    weights and Adam's moments, and whichever is more, what is kept for backward and the logits, or the gradients."""
    size = {"fp32": 4, "bf16": 2}
    sharded = config.wrapper != "none" and config.mode != "replicate"
    parameters = reference(config).parameters / (
        ranks // (config.replicas if config.mode == "hybrid_shard" else 1) if sharded else 1
    )
    tokens = batch * config.seqlen
    width = size[config.param_dtype]
    kept = config.remat_ratio * kept_per_block(config) + (1 - config.remat_ratio) * kept_per_block(
        config, "none"
    )
    kept *= config.depth * tokens * config.width * width
    logits = (
        2
        * config.vocab
        * (tokens if config.loss == "full" else min(tokens, config.loss_chunk))
        * width
    )
    return parameters * (4 + 2 * moment_size(config)) + max(kept + logits, 4 * parameters)
