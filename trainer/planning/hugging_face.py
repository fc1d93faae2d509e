"""The architecture that a Hugging Face config.json describes, without transformers. Imports no torch.

    read("Qwen3-30B-A3B/").parameters       # 30'532'122'624, of which 3'353'032'704 are active

Known: llama, mistral, qwen2, qwen3, qwen3_moe, gemma3_text, and the text part of gemma3. What a class takes for a key
that config.json leaves out (such as head_dim) is taken here as well; what has no default must be there.
"""

import json
from pathlib import Path

from trainer.planning.architecture import Architecture

NEEDED = "hidden_size intermediate_size num_hidden_layers num_attention_heads vocab_size".split()
MOE_NEEDED = "num_experts num_experts_per_tok moe_intermediate_size".split()
KINDS = "llama mistral qwen2 qwen3 qwen3_moe gemma3_text gemma3".split()
HEAD_DIM = {"qwen3": 128, "gemma3_text": 256}  # the classes' defaults; of the others hidden_size / heads
TIED = {"gemma3_text"}  # unless config.json says otherwise


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
