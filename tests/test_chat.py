"""Chat data of trainer/finetuning: what is learned token by token, what lines are refused, batches, the cache.

    python -m pytest tests/test_chat.py

On a CPU, with a small real tokenizer that is trained here and templates of the structure of known models.
"""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from model import IGNORE
from trainer.finetuning import chat
from trainer.finetuning.chat import ChatBatches, preview

pytestmark = pytest.mark.filterwarnings("error")

ROOT = Path(chat.__file__).parents[2]
SPECIAL = ["<|begin|>", "<|end|>", "<|pad|>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>",
           "<|eot_id|>", "<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]"]  # fmt: skip
PROMPT = "{% if add_generation_prompt %}%s{% endif %}"
TEMPLATES = {  # of the structure of the known ones, without tools
    "qwen2.5": "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are kind.<|im_end|>\n{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    + PROMPT.replace("%s", "<|im_start|>assistant\n"),
    "qwen3": "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% set parts = m.content.split('</think>') %}{% if loop.index0 > ns.last %}"
    "{{ '<think>\n' + (parts[0].split('<think>')[-1].strip() if parts|length > 1 else '') + '\n</think>\n\n' }}{% endif %}"
    "{{ parts[-1].lstrip() }}{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    + PROMPT.replace("%s", "<|im_start|>assistant\n"),
    "llama3": "{% for m in messages %}{% if loop.first %}{{ bos_token }}{% endif %}{{ '<|start_header_id|>' + m.role + "
    "'<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}{% endfor %}"
    + PROMPT.replace("%s", "<|start_header_id|>assistant<|end_header_id|>\n\n"),
    "gemma3": "{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ '<start_of_turn>' + ('model' if m.role == 'assistant' "
    "else m.role) + '\n' + m.content | trim + '<end_of_turn>\n' }}{% endfor %}" + PROMPT.replace("%s", "<start_of_turn>model\n"),
    "mistral": "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]"
    "{% else %} {{ m.content | trim }}{{ eos_token }}{% endif %}{% endfor %}",
    "markers": "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + '<|im_end|>\n' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}" + PROMPT.replace("%s", "<|im_start|>assistant\n"),
}
TURNS = [dict(role="user", content="What is two and two?"), dict(role="assistant", content="Four, my friend."),
         dict(role="user", content="And three?"), dict(role="assistant", content="Five, I think.")]  # fmt: skip


@pytest.fixture(scope="module")
def backend():
    """A byte-level BPE of a small vocabulary, trained on this file. It puts <|begin|> before texts, as Llama's does."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator([Path(__file__).read_text()],
                             trainers.BpeTrainer(vocab_size=500, special_tokens=SPECIAL, initial_alphabet=alphabet,
                                                 show_progress=False))
    made.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 0)])
    return made.to_str()


@pytest.fixture
def tokenizer(backend):
    """template -> a tokenizer."""
    def make(template=None, pad="<|pad|>", eos="<|end|>", **changes):
        how = dict(bos_token="<|begin|>", eos_token=eos, pad_token=pad, additional_special_tokens=SPECIAL[3:]) | changes
        made = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(backend), **how)
        made.chat_template = TEMPLATES.get(template, template)
        return made

    return make


@pytest.fixture
def batches(tmp_path, tokenizer):
    """lines, as dictionaries or bytes -> batches; of one row and from a new file unless told otherwise."""
    def make(lines, template="qwen2.5", made=None, **changes):
        path = tmp_path / "chat.jsonl"
        if lines is not None:
            path.write_bytes(b"".join((x if isinstance(x, bytes) else json.dumps(x).encode()) + b"\n" for x in lines))
        how = dict(global_batch=1, seqlen=128, vocab=512, seed=3, cache=str(tmp_path / "cache")) | changes
        return ChatBatches(str(path), made or tokenizer(template), **how)

    return make


def chats(n, answer="Yes. "):
    """So many conversations of different lengths."""
    return [dict(messages=[dict(role="user", content=f"Question {i}?"),
                           dict(role="assistant", content=f"Answer {i}: {answer * (i % 7 + 1)}".strip())])
            for i in range(n)]  # fmt: skip


def pieces(batches, made, number=0):
    """The text of an example as (learned, text) runs."""
    shown = preview(batches.example(number), made, color=False)
    found = [(i > 0 or part.startswith("[["), part) for i, part in enumerate(shown.split("[["))]
    out = []
    for on, part in found:
        inside, _, after = part.partition("]]") if on else ("", "", part)
        out += [inside] if on else []
        out += []
    return out


# What is learned


LEARNED = {
    "qwen2.5": ["Four, my friend.<|im_end|>", "Five, I think.<|im_end|>"],
    "llama3": ["Four, my friend.<|eot_id|>", "Five, I think.<|eot_id|>"],
    "gemma3": ["Four, my friend.<end_of_turn>", "Five, I think.<end_of_turn>"],
    "mistral": [" Four, my friend.<|end|>", " Five, I think.<|end|>"],
    "markers": ["Four, my friend.<|im_end|>\n", "Five, I think.<|im_end|>\n"],
}


@pytest.mark.parametrize("template", LEARNED)
def test_of_messages_the_answers_are_learned_with_the_token_that_ends_each(batches, tokenizer, template):
    made = tokenizer(template)
    stream = batches([dict(messages=TURNS)], template)
    assert pieces(stream, made) == LEARNED[template]
    ids, learned = stream.example(0)
    whole = made.apply_chat_template(TURNS, tokenize=True)["input_ids"]
    assert ids.tolist() == whole  # the template's own tokens, so no second bos
    tokens, targets, inputs = next(stream)
    n = len(whole) - 1
    assert tokens[0, :n].tolist() == whole[:-1] and not inputs
    expected = [token if on else IGNORE for token, on in zip(whole[1:], learned[1:], strict=True)]
    assert targets[0, :n].tolist() == expected and set(targets[0, n:].tolist()) == {IGNORE}


def test_labels_of_a_template_with_markers_are_those_of_transformers(batches, tokenizer):
    stream = batches([dict(messages=TURNS), *chats(3)], "markers")
    for number, line in enumerate([TURNS, *(each["messages"] for each in chats(3))]):
        theirs = tokenizer("markers").apply_chat_template(line, return_assistant_tokens_mask=True, return_dict=True)
        ids, learned = stream.example(number)
        assert ids.tolist() == theirs["input_ids"] and learned.tolist() == [*map(bool, theirs["assistant_masks"])]
