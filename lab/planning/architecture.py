"""The architecture (trainer.costs) that a Hugging Face config.json describes. Imports no torch.

    read("Qwen3-30B-A3B/").parameters        # 30'532'122'624, of which 3'353'032'704 active

Known are KINDS, and the text part of gemma3; others are counted on a model that transformers builds, which takes
seconds. What a class of transformers takes for a key that config.json leaves out is taken here as well.
D width, H query heads, K key/value heads, d head dimension, F hidden width of the MLP, V vocabulary, E experts.
"""

import json
import re
from dataclasses import replace
from pathlib import Path

from trainer.step_costs import Architecture
from trainer.terminal.output import regular

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
        attention_matrices=((max(attention // D, 1), D),),
        note=note,
    )
    return replace(a, final_norm=sum(p.numel() for p in model.parameters()) - a.parameters)
