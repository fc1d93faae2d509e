"""Conversations, and chat templates of the structure of known models, for the tests of chat data."""

import json

import pytest

from trainer.data import DataError

SPECIAL = ["<|begin|>", "<|end|>", "<|pad|>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>",
           "<|eot_id|>", "<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]"]  # fmt: skip
PROMPT = "{% if add_generation_prompt %}%s{% endif %}"
TEMPLATES = {  # of the structure of the known ones, without tools
    "qwen2.5": "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are kind.<|im_end|>\n{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    + PROMPT.replace("%s", "<|im_start|>assistant\n"),
    "qwen3": "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% set parts = m.content.split('</think>') %}{% if loop.index0 > ns.last %}"
    "{{ '<think>\n' + (parts[0].split('<think>')[-1].strip() if parts|length > 1 else '') + '\n</think>\n\n' }}"
    "{% endif %}"
    "{{ parts[-1].lstrip() }}{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    + PROMPT.replace("%s", "<|im_start|>assistant\n"),
    "llama3": "{% for m in messages %}{% if loop.first %}{{ bos_token }}{% endif %}{{ '<|start_header_id|>' + m.role + "
    "'<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}{% endfor %}"
    + PROMPT.replace("%s", "<|start_header_id|>assistant<|end_header_id|>\n\n"),
    "gemma3": "{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ '<start_of_turn>' + ('model' if m.role == 'assistant' "
    "else m.role) + '\n' + m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
    + PROMPT.replace("%s", "<start_of_turn>model\n"),
    "mistral": "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]"
    "{% else %} {{ m.content | trim }}{{ eos_token }}{% endif %}{% endfor %}",
    "markers": "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + '<|im_end|>\n' }}{% endgeneration %}"
    "{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    + PROMPT.replace("%s", "<|im_start|>assistant\n"),
}
REFUSED = {  # of the structure of known ones that are refused, by the name of what trains instead
    "deepseek-r1": "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}"
    "{{ '<｜Assistant｜>' + m.content.split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}"
    "{% else %}{{ '<｜User｜>' * (m.role == 'user') + m.content }}{% endif %}{% endfor %}"
    + PROMPT.replace("%s", "<｜Assistant｜><think>\n"),
    "glm-4.5": "[gMASK]<sop>{% for m in messages %}{{ '<|' + m.role + '|>\n' }}{% if m.role == 'assistant' %}"
    "{{ '<think>' + (m.reasoning_content or '') + '</think>\n' }}{% endif %}{{ m.content }}{% endfor %}"
    + PROMPT.replace("%s", "<|assistant|>"),
}
TURNS = [dict(role="user", content="What is two and two?"), dict(role="assistant", content="Four, my friend."),
         dict(role="user", content="And three?"), dict(role="assistant", content="Five, I think.")]  # fmt: skip


def chats(n, answer="Yes. "):
    """So many conversations of different lengths."""
    return [dict(messages=[dict(role="user", content=f"Question {i}?"),
                           dict(role="assistant", content=f"Answer {i}: {answer * (i % 7 + 1)}".strip())])
            for i in range(n)]  # fmt: skip


def long_chats(n):
    """Conversations of which Qwen3's template makes several examples, of two answers one where a tool comes between."""
    answers = [dict(role="assistant", content=f"<think>\nHm {i}.\n</think>\n\nIt is {i}.") for i in range(9)]
    question = dict(role="user", content="What is it?")
    turns = [[question, answers[i], dict(question, role="tool"), answers[i - 1]] for i in range(n)]
    return [dict(messages=[dict(role="system", content=f"Chat {i}."), *sum(turns[:i], [])]) for i in range(1, n + 1)]


def jsonl(path, rows):
    """Writes a file of these lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def refuse(words, make, *given, **how):
    """Asserts that data cannot be used, by what is said."""
    with pytest.raises(DataError, match=words):
        make(*given, **how)


def steps_of(stream, count):
    return [next(stream) for _ in range(count)]


HEAD = "{{ '<|im_start|>' + m.role + '\n' }}"
CALLS = ("{% for call in m.tool_calls or [] %}{% set call = call.function or call %}{{ '<call>' + call.name + ' ' }}"
         "%s{% endfor %}")  # fmt: skip
FAMILIES = {  # what known ones do with messages that are more than role and content
    "all": HEAD + "{% if m.reasoning_content %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}"
    "{{ m.content or '' }}" + CALLS.replace("%s", "{{ call.arguments | tojson }}"),
    "no developer": "{% if m.role != 'developer' %}" + HEAD + "{{ m.content }}{% endif %}",
    "content alone": HEAD + "{{ m.content | trim }}",
    "no thoughts": HEAD + "{{ m.content.split('</think>')[-1].lstrip('\n') }}",
    "thoughts of the last": HEAD + "{% if '</think>' in m.content and not loop.last %}"
    "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}",
    "arguments as sent": HEAD + "{% if m.content is none %}" + CALLS.replace("%s", "{{ '' + call.arguments }}")
    + "{% else %}{{ m.content }}{% endif %}",
    "short": HEAD + "{{ m.content[:9] }}",
    "name for content": HEAD + "{{ (m.name or '') + m.content }}",
}  # fmt: skip
for name, each in FAMILIES.items():
    TEMPLATES[name] = "{% for m in messages %}" + each + "{{ '<|im_end|>\n' }}{% endfor %}"
    TEMPLATES[name] += PROMPT.replace("%s", "<|im_start|>assistant\n")
