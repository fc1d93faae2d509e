"""Tiny models of Hugging Face with random weights, and a tokenizer that is trained here, in folders; runs of them."""

import json
from pathlib import Path

import torch
from conversations import jsonl
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

from trainer import config as flags
from trainer.finetuning import config
from trainer.finetuning.run import open_model
from trainer.parallelize import build

logging.set_verbosity_error()
logging.disable_progress_bar()
SMALL = dict(hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2)
IDS = dict(bos_token_id=None, eos_token_id=1, pad_token_id=0)
KINDS = {  # model_type and what differs from SMALL
    "llama": ("llama", {}), "qwen2.5": ("qwen2", dict(tie_word_embeddings=True)), "qwen3": ("qwen3", dict(head_dim=16)),
    "mistral": ("mistral", dict(sliding_window=8)), "gemma3": ("gemma3_text", dict(head_dim=16)),
    "qwen3-moe": ("qwen3_moe", dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)),
}  # fmt: skip
OTHERS = {
    "mixtral": ("mixtral", dict(num_local_experts=4, router_jitter_noise=0.1)),
    "gpt-oss": ("gpt_oss", dict(num_local_experts=4, head_dim=16)), "falcon": ("falcon", {}), "mamba": ("mamba", {}),
    "lfm2": ("lfm2", dict(layer_types=["conv", "full_attention"])),
    "diffllama": ("diffllama", {}), "tuples": ("qwen2", dict(return_dict=False)),
    "llama4": ("llama4_text", dict(head_dim=8, intermediate_size_mlp=48, num_local_experts=2)),
    "gpt2": ("gpt2", dict(n_inner=48)), "bloom": ("bloom", {}),
    "opt": ("opt", dict(ffn_dim=48, word_embed_proj_dim=32, dropout=0)),
    "longrope": ("phi3", dict(
        max_position_embeddings=64, original_max_position_embeddings=32,
        rope_parameters=dict(rope_type="longrope", rope_theta=10000.0, original_max_position_embeddings=32,
                             short_factor=[1.0] * 4, long_factor=[2.0] * 4))),
    "deepseek": ("deepseek_v3", dict(
        n_routed_experts=4, n_group=1, topk_group=1, num_experts_per_tok=2, moe_intermediate_size=16, q_lora_rank=8,
        first_k_dense_replace=1, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8)),
    "xglm": ("xglm", dict(ffn_dim=48, max_position_embeddings=64)),
    "minimax": ("minimax", dict(num_local_experts=2, layer_types=["linear_attention", "full_attention"])),
    "qwen3.5": ("qwen3_5", dict(
        text_config=SMALL | IDS | dict(
            vocab_size=400, head_dim=16, layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2,
            linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8),
        vision_config=dict(depth=1, hidden_size=16, num_heads=2))),
}  # fmt: skip
TEMPLATE = ("{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")  # fmt: skip
TOKENS = torch.arange(24).reshape(2, 12) * 7 % 400


def lines(number: int) -> list[dict]:
    """Sums, to be learned."""
    pairs = (divmod(7 * i, 60) for i in range(number))
    turns = ((f"What is {a} plus {b}?", f"{a} plus {b} is {a + b}.") for a, b in pairs)
    return [dict(messages=[dict(role="user", content=q), dict(role="assistant", content=a)]) for q, a in turns]


def write_data(path: Path, number: int = 64) -> Path:
    return jsonl(path, lines(number))


def write_tokenizer(folder: Path, vocab: int = 400) -> None:
    """A byte-level BPE of at most `vocab` tokens, 0 for padding, 1 for the end of a turn, with a chat template."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = ["<|pad|>", "<|im_end|>", "<|im_start|>"]
    made.train_from_iterator(map(json.dumps, lines(200)), trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False))  # fmt: skip
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>", pad_token="<|pad|>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)


def write_model(folder: Path, kind: str = "qwen2.5", vocab: int = 400, **more) -> Path:
    """Saves a model of one of KINDS or OTHERS, its weights of random numbers in bf16, and the tokenizer."""
    model_type, own = (KINDS | OTHERS)[kind]
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **SMALL | IDS | dict(vocab_size=vocab) | own | more)
    kinds = AutoModelForImageTextToText if "text_config" in own else AutoModelForCausalLM
    kinds.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def edit_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def logits(folder, **how):
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder, **how).eval()(input_ids=TOKENS).logits


def resolved(folder, *argv, world=2):
    """The flags of finetune.py for a model."""
    words = "--model", folder, "--data", "x", "--compile", "none", *argv
    return flags.resolve(config.parse([*map(str, words)]), "cpu", world)


def built(c, world=2):
    """The step of these flags, whose weights are still to be loaded."""
    return build(c, torch.device("cpu"), world, model=open_model(c)[0])
