"""What a wrapped Hugging Face model returns is what the plain one returns, whatever it is asked for.

    pytest tests/test_hugging_face_outputs.py      # one process, a few seconds

transformers finds the modules whose outputs it records (hidden states, attentions, router logits) by their class.
"""

import pytest
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_flatten_with_path

from simple_fsdp import data_parallel

pytest.importorskip("transformers", reason="needs transformers: pip install -e '.[hf]'")

from other_models import build

NAMES = ["Llama", "Qwen3-MoE", "Mixtral", "T5", "ViT"]
EVERY = ["output_hidden_states", "output_attentions"]
DECODERS = ["Llama", "Qwen3-MoE", "Mixtral", "T5"]
MORE = {"Qwen3-MoE": ["output_router_logits"], "Mixtral": ["output_router_logits"]}
CALLS = [(name, {flag: True}) for name in NAMES for flag in EVERY + MORE.get(name, [])]
CALLS += [(name, dict.fromkeys(EVERY + MORE.get(name, []), True) | dict(return_dict=False)) for name in NAMES]
CALLS += [(name, dict(use_cache=True)) for name in DECODERS]
KEYS = {  # what must be among the outputs: two wrong models could agree on nothing
    "output_hidden_states": "hidden_states", "output_attentions": "attentions", "output_router_logits": "router_logits",
    "use_cache": "past_key_values",
}  # fmt: skip


@pytest.fixture(scope="module")
def models(one_thread):
    """models(name) -> the plain model, the wrapped one, and what to call them with."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    made = {}

    def pair(name):
        if name not in made:
            plain, inputs = build(name)
            plain.set_attn_implementation("eager")  # others return no attentions
            wrapped, _ = build(name)
            wrapped.set_attn_implementation("eager")
            inputs["labels"] = inputs.get("labels", inputs.get("input_ids"))
            made[name] = plain, data_parallel(wrapped, dist.init_device_mesh("cpu", (1,))), inputs
        return made[name]

    yield pair
    dist.destroy_process_group()


def flat(output):
    """Tensors by their place. A cache is what it keeps."""
    if isinstance(output, dict):
        output = dict(output)
    leaves, _ = tree_flatten_with_path(output)
    found = {}
    for path, value in leaves:
        for i, tensor in enumerate(tensors_of(value)):
            found[*map(str, path), i] = tensor
    return found


def tensors_of(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if hasattr(value, "self_attention_cache"):
        return tensors_of(value.self_attention_cache) + tensors_of(value.cross_attention_cache)
    return [t for layer in getattr(value, "layers", []) for t in (layer.keys, layer.values)]


def assert_same(plain, wrapped):
    assert type(plain) is type(wrapped)
    plain = flat(plain)
    wrapped = flat(wrapped)
    assert list(plain) == list(wrapped)
    for place, value in plain.items():
        assert type(wrapped[place]) is torch.Tensor and torch.equal(value, wrapped[place]), place


@pytest.mark.parametrize("name, asked", CALLS, ids=[f"{name} {' '.join(asked)}" for name, asked in CALLS])
def test_outputs_are_those_of_the_plain_model(models, name, asked):
    plain, wrapped, inputs = models(name)
    outputs = [model(**inputs, **asked) for model in (plain, wrapped)]
    assert_same(*outputs)
    if "return_dict" not in asked:
        for flag in asked:
            key = KEYS[flag]
            found = [k for k, v in outputs[1].items() if v is not None and (k == key or k.endswith("_" + key))]
            assert found, f"{flag}: no {key} in {list(outputs[1])}"


@pytest.mark.parametrize("name", [name for name in NAMES if name != "T5"])  # its parts have configurations of their own
def test_flags_of_the_configuration_count_too(models, name):
    plain, wrapped, inputs = models(name)
    outputs = []
    for model in (plain, wrapped):
        before, model.config.output_hidden_states = model.config.output_hidden_states, True
        outputs.append(model(**inputs))
        model.config.output_hidden_states = before
    assert_same(*outputs)
    assert any("hidden_states" in key for key in outputs[1])


@pytest.mark.parametrize("name", DECODERS)
def test_generated_tokens_are_those_of_the_plain_model(models, name):
    plain, wrapped, inputs = models(name)
    tokens = [model.generate(inputs["input_ids"], max_new_tokens=3, do_sample=False) for model in (plain, wrapped)]
    assert tokens[0].shape[1] > 1
    assert torch.equal(*tokens)
