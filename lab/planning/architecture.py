"""What a planner must know of a transformer: shapes, stored and active parameters, FLOPs. Imports no torch.

    a = reference(config)                    # of resolved flags of main.py
    a.parameters, a.active_parameters        # 973'234'176 at the reference setting, both
    read("Qwen3-30B-A3B/").parameters        # of a Hugging Face config.json: 30'532'122'624, of which 3'353'032'704
    active

Known are KINDS, and the text part of gemma3; others are counted on a model that transformers builds, which takes
seconds. What a class of transformers takes for a key that config.json leaves out is taken here as well.
D width, H query heads, K key/value heads, d head dimension, F hidden width of the MLP, V vocabulary, E experts.
"""

import json
import re
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from trainer import costs
from trainer.distributed.terminal import regular

NEEDED = "hidden_size intermediate_size num_hidden_layers num_attention_heads vocab_size".split()
EXPERTS = "num_local_experts num_experts n_routed_experts moe_num_experts".split()
MOST_BLOCKS = 2000  # so that an answer takes no minutes
WINDOWED = "mistral", "mixtral", "phi3"
# norms: of width D in a block; qk_norms: of queries and keys, of one head or of all; bias: of q, k and v; every: which
# block sees all keys; defaults: of the class in transformers, for keys that a config.json may leave out.
KINDS = {
    "llama": {},
    "mistral": {},
    "phi3": {},
    "smollm3": dict(tied=True),
    "qwen2": dict(bias=True),
    "qwen3": dict(head_dim=128, qk_norms="head"),
    "olmo2": dict(qk_norms="whole"),
    "mixtral": dict(experts=True),
    "qwen3_moe": dict(experts=True, qk_norms="head"),
    "gemma2": dict(norms=4, tied=True, every=2, defaults=dict(head_dim=256)),
    "gemma3_text": dict(
        norms=4,
        qk_norms="head",
        tied=True,
        every=6,
        defaults=dict(
            vocab_size=262208,
            hidden_size=2304,
            intermediate_size=9216,
            num_hidden_layers=26,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=256,
        ),
    ),
}


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
    counted: tuple[tuple[int, int], ...] = ()
    stored: int = 4  # bytes of an element in the model's files, as which frozen weights stay
    note: str = ""

    @property
    def attention_shapes(self) -> tuple[tuple[int, int], ...]:
        """(rows, columns) of attention's matrices in a block."""
        D = self.width
        q = self.heads * self.head_dim
        kv = self.kv_heads * self.head_dim
        return self.counted or ((q, D), (kv, D), (kv, D), (D, q))

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
        return self._products(0 if self.experts else 1)

    def _products(self, mlps_of_a_block: int) -> Counter:
        D, F = self.width, self.hidden
        found: Counter = Counter()
        for shape in self.attention_shapes:
            found[shape] += self.depth
        found[F, D] += (1 + self.gated) * self.depth * mlps_of_a_block
        found[D, F] += self.depth * mlps_of_a_block
        return +found

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
        outside = self.final_norm + self.depth * (self.biases + self.norms)
        return self.active_parameters - outside - (0 if self.tied else self.width * self.vocab)

    def keys(self, seqlen: int, convention: str) -> float:
        """Mean number of keys of a query over all blocks: all of them ("palm"), or those that no mask hides."""
        whole = seqlen if convention == "palm" else costs.causal_keys(seqlen)
        if not self.window or self.window >= seqlen:
            return whole
        # The first of a sequence see fewer.
        near = self.window * (1 - (self.window - 1) / (2 * seqlen))
        full = self.depth // self.every if self.every else 0
        return (
            full * whole + (self.depth - full) * (self.window if convention == "palm" else near)
        ) / self.depth

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
    heads = c.width // c.head_dim
    gated = costs.gated(c)
    return Architecture(
        "reference",
        c.depth,
        c.width,
        heads,
        heads // c.grouping,
        c.head_dim,
        c.grow * c.width,
        c.vocab,
        gated=gated,
        biases=0 if gated else (c.grow + 1) * c.width,
        norms=(2 if gated else 4) * c.width,
        final_norm=(1 if gated else 2) * c.width,
    )


def read(path: str) -> Architecture:
    """Of a config.json, or of the folder that holds it. ValueError, one line, for a file that cannot be read, a kind of
    model that is not known, a key that is missing, or sizes that do not fit together."""
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    try:
        config = json.loads(regular(file).read_text())
    except (OSError, ValueError, RecursionError) as error:
        said = error.strerror if isinstance(error, OSError) else "is no JSON"
        raise ValueError(
            f"--hf {path}: {said}; name a config.json or the folder that holds it"
        ) from error
    if not isinstance(config, dict):
        raise ValueError(f"--hf {path}: holds no JSON object; name the config.json of a model")
    try:
        kind = str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")
        stored = 2 if kind in ("bfloat16", "float16") else 4
        return replace(architecture(config, file.resolve().parent.name), stored=stored)
    except ValueError as error:
        raise ValueError(f"--hf {path}: {error}") from error
    except (AttributeError, KeyError, TypeError, ZeroDivisionError, OverflowError) as error:
        # Values of odd types.
        said = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"--hf {path}: holds values that no model of its kind has ({said}); mend the file"
        ) from error


def architecture(config: dict, name: str = "model") -> Architecture:
    """Of the keys and values of a config.json. ValueError as `read`."""
    kind = config.get("model_type")
    note = ""
    if isinstance(config.get("text_config"), dict) and f"{kind}_text" in KINDS:
        config = config["text_config"]
        note = "the text part alone: what sees is left out"
        kind = f"{kind}_text"
    # Blocks of two kinds, with experts and without.
    mixed = config.get("mlp_only_layers") or config.get("decoder_sparse_step") not in (None, 1)
    if kind not in KINDS or mixed:
        return built(config, name)
    own = KINDS[kind]
    config = own.get("defaults", {}) | {
        key: value for key, value in config.items() if value is not None
    }
    experts_key = "num_experts" if "num_experts" in config else "num_local_experts"
    inner = "moe_intermediate_size" if kind == "qwen3_moe" else "intermediate_size"
    needed = NEEDED + own.get("experts", False) * [experts_key, "num_experts_per_tok", inner]
    if missing := [key for key in dict.fromkeys(needed) if key not in config]:
        raise ValueError(
            f"{', '.join(missing)} missing; add {'it' if len(missing) == 1 else 'them'} to config.json"
        )
    D, F, L, H, V = (size(config, key) for key in NEEDED)
    K = size(config, "num_key_value_heads", H)
    d = size(config, "head_dim", own.get("head_dim") or D // H)
    if H % K or not d:
        raise ValueError(
            f"{H} heads do not share {K} key/value heads evenly, or are more than {D} elements"
        )
    norms = D * own.get("norms", 2)
    norms += {"head": 2 * d, "whole": (H + K) * d}.get(own.get("qk_norms"), 0)
    biases = (H + 2 * K) * d if own.get("bias") or config.get("attention_bias") else 0
    biases += D if config.get("attention_bias") and kind != "qwen2" else 0
    biases += 2 * F + D if config.get("mlp_bias") and kind == "llama" else 0
    more = {}
    if own.get("experts"):
        E, active, F = (size(config, key) for key in (experts_key, "num_experts_per_tok", inner))
        if active > E:
            raise ValueError(
                f"num_experts_per_tok {active}: a token cannot pass more than the {E} experts"
            )
        more = dict(experts=E, active=active)
    if "every" in own:
        more |= dict(
            window=size(config, "sliding_window", 4096, least=0),
            every=size(config, "sliding_window_pattern", own["every"]),
        )
    elif config.get("sliding_window") and (kind in WINDOWED or config.get("use_sliding_window")):
        more |= dict(window=size(config, "sliding_window"))
    tied = config.get("tie_word_embeddings", own.get("tied", False))
    return Architecture(
        name,
        L,
        D,
        H,
        K,
        d,
        F,
        V,
        gated=True,
        tied=bool(tied),
        biases=biases,
        norms=norms,
        final_norm=D,
        note=note,
        **more,
    )


def size(config: dict, key: str, usual: int | None = None, least: int = 1) -> int:
    """A whole number of a config. ValueError for anything else, or one that no model has."""
    value = config.get(key, usual)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= 10**7:
        raise ValueError(
            f"{key} {str(value)[:40]}: must be a whole number from {least} to 10000000"
        )
    if key == "num_hidden_layers" and value > MOST_BLOCKS:
        raise ValueError(f"{key} {value}: more than {MOST_BLOCKS} blocks are not planned")
    return value


def built(config: dict, name: str) -> Architecture:
    """Counted on a model that transformers builds without memory: for kinds that are not known here. ValueError, one
    line, where that cannot be."""
    kind = config.get("model_type")
    try:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        known = ", ".join(KINDS)
        raise ValueError(
            f"model_type {kind} is not known without torch and transformers; known are {known}"
        ) from None
    try:
        own = AutoConfig.for_model(**config)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(own, attn_implementation="eager")
        note = f"model_type {kind}, counted on the model that transformers builds"
        return counted(model, own.get_text_config(), name, note)
    except Exception as error:
        said = " ".join(str(error).split())[:200]
        raise ValueError(
            f"model_type {kind} is not known, and transformers cannot build it: {said}"
        ) from None


def counted(model, text, name: str, note: str) -> Architecture:
    """Of a model and the config of its text part. A weight that is neither an expert's nor of an MLP of the stated
    width is counted with attention's."""
    table = model.get_input_embeddings().weight
    head = model.get_output_embeddings().weight
    V, D = table.shape
    L = text.num_hidden_layers
    H = text.num_attention_heads
    weights = {
        each: p
        for each, p in model.named_parameters()
        if p.dim() > 1 and p is not table and p is not head
    }
    # Of blocks, not of positions.
    weights = {each: p for each, p in weights.items() if re.search(r"\.\d+\.", each)}
    products = {each: p.numel() for each, p in weights.items()}
    E = next((getattr(text, key) for key in EXPERTS if getattr(text, key, None)), 0)
    spread = sum(n for each, n in products.items() if E and ".experts" in each)
    others = sum(products.values()) - spread
    if spread:
        hidden = spread // (3 * D * E * L)
        gated = True
        attention = others // L - E * D
    else:
        hidden = getattr(text, "intermediate_size", None) or 4 * D
        gated = any("gate" in each for each in weights)
        attention = others // L - (2 + gated) * D * hidden
    active = getattr(text, "num_experts_per_tok", None) or 1
    a = Architecture(
        name,
        L,
        D,
        H,
        getattr(text, "num_key_value_heads", None) or H,
        getattr(text, "head_dim", None) or D // H,
        hidden,
        V,
        gated=gated,
        tied=table is head,
        experts=E if spread else 0,
        active=active if spread else 0,
        counted=((max(attention // D, 1), D),),
        note=note,
    )
    return replace(a, final_norm=sum(p.numel() for p in model.parameters()) - a.parameters)
