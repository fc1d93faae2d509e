"""What a planner must know of a transformer: shapes, stored and active parameters, FLOPs. Imports no torch.

    a = reference(config)                    # of resolved flags of main.py
    a.parameters, a.active_parameters        # 973'234'176 at the reference setting, both
    read("Qwen3-30B-A3B/").parameters        # of a Hugging Face config.json: 30'532'122'624, of which 3'353'032'704
    active

Known there: llama, mistral, qwen2, qwen3, qwen3_moe, gemma3_text, and the text part of gemma3. What a class of
transformers takes for a key that config.json leaves out is taken here as well; what has no default must be there.
D width, H query heads, K key/value heads, d head dimension, F hidden width of the MLP, V vocabulary, E experts.
"""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from trainer import costs

NEEDED = "hidden_size intermediate_size num_hidden_layers num_attention_heads vocab_size".split()
MOE_NEEDED = "num_experts num_experts_per_tok moe_intermediate_size".split()
KINDS = "llama mistral qwen2 qwen3 qwen3_moe gemma3_text gemma3".split()
HEAD_DIM = {"qwen3": 128, "gemma3_text": 256}  # the classes' defaults; of the others hidden_size / heads
TIED = {"gemma3_text"}  # unless config.json says otherwise


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
    dense_blocks: int = 0  # of a mixture of experts: blocks that have an MLP of width dense_hidden instead
    dense_hidden: int = 0
    window: int = 0
    every: int = 0
    logit_bytes: int = 0  # of each logit at the loss, if it does not stay in the dtype of the products
    note: str = ""

    @property
    def attention_parameters(self) -> int:
        """Of the four products of one block: q and o [D, H d], k and v [D, K d]."""
        return 2 * self.width * self.head_dim * (self.heads + self.kv_heads)

    def mlp_parameters(self, experts: int, hidden: int) -> int:
        """Of the products of one MLP, or of so many experts and their router [D, E]."""
        products = (2 + self.gated) * self.width * hidden
        return experts * products + self.experts * self.width if experts else products

    def _total(self, experts: int) -> int:
        ends = self.width * self.vocab * (1 if self.tied else 2) + self.final_norm
        each = self.attention_parameters + self.biases + self.norms
        sparse = self.depth - self.dense_blocks
        mlps = sparse * self.mlp_parameters(experts, self.hidden)
        if self.dense_blocks:
            mlps += self.dense_blocks * self.mlp_parameters(0, self.dense_hidden)
        return ends + self.depth * each + mlps

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
        """Of the largest block, which is what one all-gather of a block brings."""
        return self.attention_parameters + self.biases + self.norms + self.mlp_parameters(self.experts, self.hidden)

    @property
    def hidden_matrices(self) -> dict[tuple[int, int], int]:
        """{(rows, columns): how many} of the matrices in blocks, which --optimizer muon gives to Muon."""
        D, q, kv = self.width, self.heads * self.head_dim, self.kv_heads * self.head_dim
        found: Counter = Counter()
        for shape, count in (((q, D), 1), ((kv, D), 2), ((D, q), 1)):  # shapes may be equal
            found[shape] += count * self.depth
        for blocks, experts, hidden in (
            (self.depth - self.dense_blocks, self.experts, self.hidden),
            (self.dense_blocks, 0, self.dense_hidden),
        ):
            found[hidden, D] += blocks * max(experts, 1) * (1 + self.gated)
            found[D, hidden] += blocks * max(experts, 1)
            found[experts, D] += blocks * (experts > 0)  # the router
        return {shape: count for shape, count in found.items() if count}

    @property
    def hidden_parameters(self) -> int:
        """Of those matrices."""
        return sum(m * n * count for (m, n), count in self.hidden_matrices.items())

    @property
    def multiplied(self) -> int:
        """Weights that a token is multiplied with: without embedding look-up, norms and biases."""
        outside = self.final_norm + self.depth * (self.biases + self.norms)
        return self.active_parameters - outside - (0 if self.tied else self.width * self.vocab)

    def keys(self, seqlen: int, convention: str) -> float:
        """Mean number of keys of a query over all blocks: all of them ("palm"), or those that no mask hides."""
        whole = seqlen if convention == "palm" else costs.causal_keys(seqlen)
        if not self.window or self.window >= seqlen:
            return whole
        near = self.window * (1 - (self.window - 1) / (2 * seqlen))  # the first of a sequence see fewer
        full = self.depth // self.every if self.every else 0
        return (full * whole + (self.depth - full) * (self.window if convention == "palm" else near)) / self.depth

    def flops_per_token(self, seqlen: int, convention: str) -> float:
        """Of one token's training step: 6 per weight that it is multiplied with, and the attention core thrice.
        convention: "linear", "causal" or "palm", as in costs.flops_per_token, whose figure this is for the reference
        transformer."""
        if convention == "linear":
            return 6 * self.multiplied
        core = costs.attention_flops(self.heads, self.head_dim, self.keys(seqlen, convention))
        return 6 * self.multiplied + 3 * self.depth * core


def reference(c) -> Architecture:
    """The transformer of model.py at resolved flags."""
    heads, gated = c.width // c.head_dim, costs.gated(c)
    return Architecture(
        "reference", c.depth, c.width, heads, heads // c.grouping, c.head_dim, c.grow * c.width, c.vocab,
        gated=gated, biases=0 if gated else (c.grow + 1) * c.width, norms=(2 if gated else 4) * c.width,
        final_norm=(1 if gated else 2) * c.width,
    )  # fmt: skip


def read(path: str) -> Architecture:
    """Of a config.json, or of the folder that holds it. ValueError, one line, for a file that cannot be read, a kind of
    model that is not known, a key that is missing, or sizes that do not fit together."""
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        said = error.strerror if isinstance(error, OSError) else "is no JSON"
        raise ValueError(f"--hf {path}: {said}; name a config.json or the folder that holds it") from error
    if not isinstance(config, dict):
        raise ValueError(f"--hf {path}: holds no JSON object; name the config.json of a model")
    try:
        return architecture(config, file.resolve().parent.name)
    except ValueError as error:
        raise ValueError(f"--hf {path}: {error}") from error


def architecture(config: dict, name: str = "model") -> Architecture:
    """Of the keys and values of a config.json. ValueError as `read`."""
    kind, note = config.get("model_type"), ""
    if kind not in KINDS:
        raise ValueError(f"model_type {kind} is not known; known are {', '.join(KINDS)}")
    if kind == "gemma3":
        config, note = config.get("text_config", {}), "the text part alone: the vision tower is left out"
        kind = "gemma3_text"
    if missing := [key for key in NEEDED + MOE_NEEDED * (kind == "qwen3_moe") if key not in config]:
        raise ValueError(f"{', '.join(missing)} missing; add {'it' if len(missing) == 1 else 'them'} to config.json")
    D, F, L, H, V = (int(config[key]) for key in NEEDED)
    K = int(config.get("num_key_value_heads") or H)
    d = int(config.get("head_dim") or HEAD_DIM.get(kind) or D // H)
    if min(D, F, L, H, V, K, d) < 1 or H % K:
        raise ValueError(f"{H} heads do not share {K} key/value heads evenly, or a size is below 1")
    norms, biases = 2 * D, 0
    if kind in ("qwen3", "qwen3_moe", "gemma3_text"):
        norms += 2 * d  # of q and of k, one for all heads
    if kind == "gemma3_text":
        norms += 2 * D  # after attention and after the MLP as well
    if kind == "qwen2" or config.get("attention_bias"):
        biases += (H + 2 * K) * d + (0 if kind == "qwen2" else D)
    if config.get("mlp_bias") and kind == "llama":
        biases += 2 * F + D
    more = {}
    if kind == "qwen3_moe":
        plain, step = config.get("mlp_only_layers") or [], config.get("decoder_sparse_step", 1)
        dense = sum(i in plain or (i + 1) % step > 0 for i in range(L))
        more = dict(experts=int(config["num_experts"]), active=int(config["num_experts_per_tok"]))
        more |= dict(dense_blocks=dense, dense_hidden=F)
        F = int(config["moe_intermediate_size"])
    if kind == "gemma3_text":
        more = dict(window=config.get("sliding_window") or 4096, every=config.get("sliding_window_pattern", 6))
    elif config.get("sliding_window") and (kind == "mistral" or config.get("use_sliding_window")):
        more |= dict(window=int(config["sliding_window"]))
    tied = config.get("tie_word_embeddings", kind in TIED)
    return Architecture(name, L, D, H, K, d, F, V, gated=True, tied=bool(tied), biases=biases, norms=norms,
                        final_norm=D, note=note, **more)  # fmt: skip
