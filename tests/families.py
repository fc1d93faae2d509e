"""Tiny configurations of all causal classes of the installed transformers, made from each class's own defaults.

tiny("llama")       # a configuration of some ten thousand parameters; raises what its class says against it
"""

import re

from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

FAMILIES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
LAYERS = "num_hidden_layers", "n_layer", "n_layers", "num_layers"
SIZES = {  # names of sizes, and what each is at most
    r"(num|n|encoder|decoder)_(\w+_)?layers?|depth": 2,
    r"hidden_size\w*|d_model|n_embd|emb_dim|\w*embedding_size|dim|dim_model|\w*embed_dim|word_embed_proj_dim": 32,
    r"num_attention_heads\w*|n_heads?|num_heads|\w+_attention_heads": 4,
    r"num_key_value_heads|num_kv_heads|n_kv_heads": 2,
    r"\w*intermediate_size\w*|\w*ffn_dim|d_ff|d_inner|n_inner|dim_ff|\w*ffn_hidden_size|\w*feed_forward\w*": 48,
    r"\w*vocab_size\w*": 400,
    r"max_position_embeddings|n_positions|max_seq_len|seq_length|n_ctx|max_sequence_length": 64,
    r"\w*num_experts|num_local_experts|n_routed_experts|zero_expert_num": 4,
    r"num_experts_per_tok(en)?|\w*_top_?k|experts_per_tok\w*|moe_k": 2,
    r"n_group|topk_group|n_groups": 1,
    r"\w*_rank|\w*head_dim|kv_channels|d_head|d_kv|\w*_head_size|rotary_dim|n_state|state_size": 8,
}
MAMBA = dict(mamba_n_heads=8, mamba_d_head=8, mamba_d_state=8)
GEMMA4 = dict(per_layer_config={"01": dict(head_dim=16)})
SHARED = dict(attention_hidden_size=64, attention_head_dim=16, num_key_value_heads=4, num_hidden_layers=3,
              layers_block_type=["linear_attention", "hybrid", "hybrid"])  # fmt: skip
OWN = {  # what sizes that fit together need beside these
    "bamba": MAMBA, "granitemoehybrid": MAMBA | dict(layer_types=["mamba", "attention"]),
    "mamba2": dict(num_heads=8, head_dim=8), "deepseek_v2": dict(num_experts_per_tok=2),
    "hunyuan_v1_dense": dict(head_dim=8), "hunyuan_v1_moe": dict(head_dim=8), "ministral": dict(head_dim=8),
    "nemotron": dict(head_dim=8, num_key_value_heads=2), "longcat_flash": dict(qk_head_dim=16),
    "xmod": dict(default_language="en_XX"), "reformer": dict(axial_pos_embds_dim=[8, 24], axial_pos_shape=[8, 8]),
    "dots1": dict(n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1),
    "lfm2_moe": dict(layer_types=["conv", "full_attention"], num_dense_layers=1),
    "gemma4_text": GEMMA4, "gemma4_unified_text": GEMMA4,
    "gemma3n_text": dict(num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2,
                         num_kv_shared_layers=2, intermediate_size=[48] * 4,
                         activation_sparsity_pattern=[0.9, 0.0, 0.0, 0.0]),
    "inkling_text": dict(swa_num_key_value_heads=2), "inkling2_text": dict(swa_num_key_value_heads=2),
    "zamba": SHARED,
    "zamba2": SHARED | dict(mamba_headdim=8, n_mamba_heads=8, mamba_d_state=8, hybrid_layer_ids=[1, 2]),
}  # fmt: skip


def _small(name: str, value):
    """An entry of a configuration, at most as large as a tiny one needs."""
    if isinstance(value, dict):
        return value if name.startswith("rope") else smaller(value)
    if name.endswith("token_id") and value is not None:
        return 0 if name.startswith("pad") else 1
    if isinstance(value, int) and not isinstance(value, bool):
        return min([value, *(size for names, size in SIZES.items() if re.fullmatch(names, name))])
    return value


def smaller(entries: dict) -> dict:
    """Entries of a configuration; of lists with an item for each layer there remain two items, of two kinds if they
    have two."""
    layers = next((entries[name] for name in LAYERS if name in entries), None)
    made = {}
    for name, value in entries.items():
        if isinstance(value, list) and layers and len(value) == layers:
            kinds = [each for i, each in enumerate(value) if each not in value[:i]]
            made[name] = [_small(name, each) for each in (kinds + value)[:2]]
        else:
            made[name] = _small(name, value) if isinstance(name, str) else value
    return made


def tiny(family: str):
    """A configuration of a model type, of a decoder."""
    kind = CONFIG_MAPPING[family]
    entries = smaller(kind().to_dict()) | dict(per_layer_config=None)
    if entries.get("kv_lora_rank"):
        entries["num_key_value_heads"] = 4
    if not entries.get("is_encoder_decoder"):
        entries["is_decoder"] = entries.get("is_decoder") is not None
    entries |= OWN.get(family, {})
    known = vars(kind()) | {name: 1 for name in OWN.get(family, {})}
    return kind.from_dict({name: value for name, value in entries.items() if name in known and name != "model_type"})
