"""The architecture (trainer.step_costs) that a Hugging Face config.json describes. Imports no torch.

    read("Qwen3-30B-A3B/").parameters        # 30'532'122'624, of which 3'353'032'704 active

Known are KINDS, and the text part of gemma3; others are counted on a model that transformers builds, which takes
seconds. What a class of transformers takes for a key that config.json leaves out is taken here as well.
D width, H query heads, K key/value heads, d head dimension, F hidden width of the MLP, V vocabulary, E experts.
"""

import json
import re
import sys
from collections import Counter
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

from trainer.step_costs import Architecture
from trainer.terminal.output import regular, tell

NEEDED = "hidden_size intermediate_size num_hidden_layers num_attention_heads vocab_size".split()
EXPERTS = "num_local_experts num_experts n_routed_experts moe_num_experts".split()
ACTIVE = "num_experts_per_tok num_experts_per_token moe_topk moe_k top_k_experts moe_top_k".split()
COUNTED_TOKENS = 12  # of a pass on the meta device; a recurrent model takes as many steps
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
            f"--hf {path}: holds a value that no such model has ({said}); correct the file"
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
    sizes = KINDS[kind]
    config = sizes.get("defaults", {}) | {
        key: value for key, value in config.items() if value is not None
    }
    experts_key = "num_experts" if "num_experts" in config else "num_local_experts"
    inner = "moe_intermediate_size" if kind == "qwen3_moe" else "intermediate_size"
    needed = NEEDED + sizes.get("experts", False) * [experts_key, "num_experts_per_tok", inner]
    if missing := [key for key in dict.fromkeys(needed) if key not in config]:
        raise ValueError(
            f"{', '.join(missing)} missing; add {'it' if len(missing) == 1 else 'them'} to config.json"
        )
    D, F, L, H, V = (size(config, key) for key in NEEDED)
    K = size(config, "num_key_value_heads", H)
    d = size(config, "head_dim", sizes.get("head_dim") or D // H)
    if H % K or not d:
        raise ValueError(
            f"num_attention_heads {H} must be a multiple of num_key_value_heads {K}, and at most hidden_size {D}"
        )
    norms = D * sizes.get("norms", 2)
    norms += {"head": 2 * d, "whole": (H + K) * d}.get(sizes.get("qk_norms"), 0)
    biases = (H + 2 * K) * d if sizes.get("bias") or config.get("attention_bias") else 0
    biases += D if config.get("attention_bias") and kind != "qwen2" else 0
    biases += 2 * F + D if config.get("mlp_bias") and kind == "llama" else 0
    more = {}
    if sizes.get("experts"):
        E, active, F = (size(config, key) for key in (experts_key, "num_experts_per_tok", inner))
        if active > E:
            raise ValueError(
                f"num_experts_per_tok {active}: must be at most the {E} experts of the model"
            )
        more = dict(experts=E, active=active)
    if "every" in sizes:
        more |= dict(
            window=size(config, "sliding_window", 4096, least=0),
            every=size(config, "sliding_window_pattern", sizes["every"]),
        )
    elif config.get("sliding_window") and (kind in WINDOWED or config.get("use_sliding_window")):
        more |= dict(window=size(config, "sliding_window"))
    if kind == "phi3":  # q, k and v are one layer, gate and up another
        shapes = ((H + 2 * K) * d, D), (D, H * d), (2 * F, D), (D, F)
        more |= dict(linear=tuple((shape, L) for shape in shapes))
    tied = config.get("tie_word_embeddings", sizes.get("tied", False))
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
        raise ValueError(f"{key} {value}: must be at most {MOST_BLOCKS}")
    return value


def built(config: dict, name: str) -> Architecture:
    """Counted on the model that finetune.py builds, without memory: for kinds that are not known here. Of a model that
    also sees or hears, on its text part. ValueError, one line, where that cannot be."""
    kind = config.get("model_type")
    try:
        from trainer.data import DataError
        from trainer.finetuning.model import blank_model

        import_module("transformers")
    except ImportError:
        known = ", ".join(KINDS)
        raise ValueError(
            f"model_type {kind} is not known without torch and transformers; known are {known}"
        ) from None
    why = ""
    for part in (config, config.get("text_config")):
        if not isinstance(part, dict):
            continue
        with TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(part))
            try:
                model = blank_model(folder)
            except (DataError, ValueError) as error:
                why = why or str(error).partition("found: ")[2].removesuffix("; use another model")
                why = why or str(error)
                continue
        note = f"model_type {kind}, counted on the model that transformers builds"
        return counted(model, name, note + (", the text part alone" if part is not config else ""))
    raise ValueError(
        f"model_type {kind}: transformers builds no causal model from this config.json, which may lack a value ({why})"
    )


def number(config, *names: str, usual: int = 0) -> int:
    """The first of these that a config has; the largest, where layers have their own."""
    for name in names:
        try:
            value = getattr(config, name, None)
        except RuntimeError:
            # transformers raises it for what differs by layer: Gemma 4's heads are wider in every sixth.
            layers = config.per_layer_config
            value = [getattr(layers[i], name, None) for i in range(len(layers))]
        if isinstance(value, list | tuple):
            value = max((number for number in value if isinstance(number, int)), default=0)
        if isinstance(value, int) and value > 0:
            return value
    return usual


def counted(model, name: str, note: str) -> Architecture:
    """Of a HuggingFaceModel on the meta device. Blocks are as if all were equal: a weight that is neither an expert's
    nor of an MLP of the stated width is counted with attention's."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    from simple_fsdp import units_of
    from trainer.measuring import flops

    inner = model.model
    text = inner.config.get_text_config()
    table = inner.get_input_embeddings().weight
    output = inner.get_output_embeddings()
    head = table if output is None else output.weight
    V, D = table.shape
    L = len(units_of(inner)) or number(text, "num_hidden_layers", usual=1)
    H = number(text, "num_attention_heads", usual=max(D // 64, 1))
    # Of blocks, not of positions.
    products = {
        each: p.numel()
        for each, p in inner.named_parameters()
        if p.dim() > 1 and p is not table and p is not head and re.search(r"\.\d+\.", each)
    }
    routed = getattr(text, "ffn_config", text)  # of dbrx
    E = number(routed, *EXPERTS)
    spread = sum(n for each, n in products.items() if E and ".experts" in each)
    others = sum(products.values()) - spread
    gated = bool(spread) or any("gate" in each for each in products)
    if spread:
        hidden = spread // (3 * D * E * L)
        attention = others // L - E * D
    else:
        hidden = number(text, "intermediate_size", "ffn_dim", "n_inner", usual=4 * D)
        attention = others // L - (2 + gated) * D * hidden
        if attention <= 0:  # no MLP, or a narrower one
            hidden = max(others // L // ((2 + gated) * D), 1)
    shapes = Counter(
        tuple(m.weight.shape)
        for m in inner.modules()
        if isinstance(m, nn.Linear | Conv1D) and m is not output
    )
    multiplied = 0
    if not spread:  # whose routers need values
        how = "one operation at a time, in Python, which takes 1 to 20 s"
        tell(f"{note}: counting its FLOPs {how}", sys.stderr)
        try:
            multiplied = round(flops.count(model, COUNTED_TOKENS).linear / 6)
            note += ", FLOPs too"
        except ValueError as error:
            note += f", FLOPs by formula ({error})"
    a = Architecture(
        name,
        L,
        D,
        H,
        number(text, "num_key_value_heads", usual=H),
        number(text, "head_dim", usual=max(D // H, 1)),
        hidden,
        V,
        gated=gated,
        tied=head is table,
        experts=E if spread else 0,
        active=number(routed, *ACTIVE, usual=1) if spread else 0,
        attention_matrices=((max(attention // D, 1), D),),
        linear=tuple(shapes.items()),
        counted=multiplied,
        note=note,
    )
    return replace(a, final_norm=sum(p.numel() for p in inner.parameters()) - a.parameters)
