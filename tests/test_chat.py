"""Chat data of trainer/finetuning: what is learned token by token, what lines are refused, batches, the cache.

    python -m pytest tests/test_chat.py

On a CPU, with a small real tokenizer that is trained here and templates of the structure of known models.
"""

import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from model import IGNORE
from trainer.data import DataError
from trainer.finetuning import chat, examples
from trainer.finetuning.chat import ChatBatches, pack, preview
from trainer.finetuning.examples import LINE_BYTES, check_files

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install -e '.[hf]'")
tokenizers = pytest.importorskip("tokenizers")
pytestmark = pytest.mark.filterwarnings("error")

ROOT = Path(chat.__file__).parents[2]
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
TURNS = [dict(role="user", content="What is two and two?"), dict(role="assistant", content="Four, my friend."),
         dict(role="user", content="And three?"), dict(role="assistant", content="Five, I think.")]  # fmt: skip


@pytest.fixture(scope="module")
def backend():
    """A byte-level BPE of a small vocabulary, trained on the turns. It puts <|begin|> before texts, as Llama's does."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    how = dict(special_tokens=SPECIAL, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet())
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=500, show_progress=False, **how)
    made.train_from_iterator([repr(TURNS + chats(9)), "system user assistant model You are kind.", "\n\n"], trainer)
    begins = dict(single="<|begin|> $A", special_tokens=[("<|begin|>", 0)])
    made.post_processor = tokenizers.processors.TemplateProcessing(**begins)
    return made.to_str()


@pytest.fixture
def tokenizer(backend):
    """template -> a tokenizer."""
    def make(template=None, pad="<|pad|>", eos="<|end|>", **changes):
        how = dict(bos_token="<|begin|>", eos_token=eos, pad_token=pad, additional_special_tokens=SPECIAL[3:]) | changes
        made = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer.from_str(backend), **how)
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


def learned_text(stream, made, number=0):
    """What is learned of an example, run by run."""
    return [part.partition("]]")[0] for part in preview(stream.example(number), made, False).split("[[")[1:]]


def pairs(stream, steps):
    """All (tokens of the document so far, label) of so many batches, sorted."""
    found = []
    for _, (tokens, targets, inputs) in zip(range(steps), stream, strict=False):
        positions = inputs.get("position_ids", torch.arange(tokens.shape[1]).expand_as(tokens))
        for row, column in (targets != IGNORE).nonzero().tolist():
            first = column - int(positions[row, column])
            found.append((tokens[row, first : column + 1].tolist(), int(targets[row, column])))
    return sorted(found)


def steps_of(stream, count):
    return [next(stream) for _ in range(count)]


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
    assert learned_text(stream, made) == LEARNED[template]
    ids, learned = stream.example(0)
    whole = made.apply_chat_template(TURNS, tokenize=True)["input_ids"]
    assert ids.tolist() == whole  # the template's own tokens, so no second bos
    tokens, targets, inputs = next(stream)
    n = len(whole) - 1
    assert tokens[0, :n].tolist() == whole[:-1] and not inputs
    expected = [token if on else IGNORE for token, on in zip(whole[1:], learned[1:], strict=True)]
    assert targets[0, :n].tolist() == expected and set(targets[0, n:].tolist()) == {IGNORE}
    assert stream.labels == learned.sum() and stream.tokens == n


def test_labels_of_a_template_with_markers_are_those_of_transformers(batches, tokenizer):
    lines = [dict(messages=TURNS), *chats(3)]
    stream = batches(lines, "markers")
    for number, line in enumerate(lines):
        how = dict(return_assistant_tokens_mask=True, return_dict=True)
        theirs = tokenizer("markers").apply_chat_template(line["messages"], **how)
        ids, learned = stream.example(number)
        assert ids.tolist() == theirs["input_ids"] and learned.tolist() == [*map(bool, theirs["assistant_masks"])]


def test_an_answer_that_the_template_rewrites_later_is_learned_as_it_was_asked_for(batches, tokenizer):
    thought = [dict(each, content="<think>\nHm.\n</think>\n\n" * (each["role"] == "assistant") + each["content"])
               for each in TURNS]  # fmt: skip
    made, stream = tokenizer("qwen3"), batches([dict(messages=thought)], "qwen3")
    for number, answer in enumerate(["Four, my friend.", "Five, I think."]):
        assert learned_text(stream, made, number) == [f"<think>\nHm.\n</think>\n\n{answer}<|im_end|>"]
        asked = made.apply_chat_template(thought[: 2 * number + 1], add_generation_prompt=True, tokenize=True)
        n = len(asked["input_ids"])
        ids, learned = stream.example(number)
        assert ids[:n].tolist() == asked["input_ids"] and not learned[:n].any() and learned[n]
    assert "1 split, as the template" in stream.description


def test_what_follows_the_last_answer_is_cut_off_and_counted(batches, tokenizer):
    stream = batches([dict(messages=TURNS[:3])])
    assert learned_text(stream, tokenizer("qwen2.5")) == ["Four, my friend.<|im_end|>"]
    assert "three" not in preview(stream.example(0), tokenizer(), False)
    assert "1 with messages after the last answer" in stream.description


@pytest.mark.parametrize("pad", ["<|pad|>", "<|end|>", None])
def test_text_and_completion_are_learned_with_one_eos_whatever_pads(batches, tokenizer, pad):
    made = tokenizer(pad=pad)
    stream = batches([dict(text="Two and two."), dict(prompt="One and", completion=" one.\n"),
                      dict(text="<|begin|>Three.<|end|>")], made=made, pad="fixed")  # fmt: skip
    begin, end = made.convert_tokens_to_ids(["<|begin|>", "<|end|>"])
    for number, text in enumerate(["Two and two.", " one.\n", "<|begin|>Three."]):
        ids, learned = stream.example(number)
        assert ids.tolist().count(begin) == ids.tolist().count(end) == 1 and (ids[0], ids[-1]) == (begin, end)
        assert made.decode(ids[learned]) == text + "<|end|>"
    for _, targets, _ in steps_of(stream, 3):
        (at,) = (targets[0] == end).nonzero().tolist()
        assert set(targets[0, at[0] + 1 :].tolist()) == {IGNORE}  # the end is learned once, no padding is


def test_a_completion_of_messages_is_learned_alone(batches, tokenizer):
    """By the rule that TRL publishes for `completion_only_loss`, restated as TRL is not installed: the prompt with its
    generation prompt and the whole conversation are tokenised; the completion mask is 0 for as many tokens as the
    prompt has and 1 for the rest, and labels are -100 where it is 0 and in padding."""
    for template in ("qwen2.5", "markers"):
        made, stream = tokenizer(template), batches([dict(prompt=TURNS[:3], completion=TURNS[3:])], template)
        assert learned_text(stream, made) == ["Five, I think.<|im_end|>"]
        prompt = made.apply_chat_template(TURNS[:3], add_generation_prompt=True)["input_ids"]
        whole = made.apply_chat_template(TURNS)["input_ids"]
        after = made("\n", add_special_tokens=False)["input_ids"]  # TRL learns the line break after the turn as well
        labels = [-100] * len(prompt) + whole[len(prompt) : -len(after)] + [-100] * len(after)
        _, targets, _ = next(stream)
        assert targets[0, : len(whole) - 1].tolist() == labels[1:]
        assert set(targets[0, len(whole) - 1 :].tolist()) == {-100}


def test_offsets_that_leave_out_spaces_do_not_change_what_is_learned(batches, tokenizer):
    """As those of Llama 3's tokenizer, whose tokens of white space alone have no width."""
    lines = [dict(messages=TURNS), dict(prompt="One\n\n", completion=" \n\n two \n\n")]
    for template in ("llama3", "markers"):
        plain, made = tokenizer(template), tokenizer(template)
        made.backend_tokenizer.post_processor = tokenizers.processors.Sequence(
            [tokenizers.processors.ByteLevel(trim_offsets=True), made.backend_tokenizer.post_processor])
        one, other = batches(lines, made=plain), batches(lines, made=made)
        for number in range(2):
            for a, b in zip(one.example(number), other.example(number), strict=True):
                assert a.tolist() == b.tolist()


@pytest.mark.parametrize("template, found", [
    ("%{{ m.role + ': ' + m.content + '\n' }}%", "around message 4"),
    ("%[INST]{{ m.content }}%", "around message 4"),
    ("%{{ m.content + '\n' }}%", "a special token at the end of each"),
    ("%{% generation %}{{ m.content }}{% endgeneration %}{{ eos_token }}%", "a special token at the end of each"),
    ("%{% generation %}{% endgeneration %}{{ m.content }}%", "learned tokens, found none"),
    ("{{ messages | length }}%{{ m.content + eos_token }}%", "before or around message"),
])  # fmt: skip
def test_a_template_of_which_the_answers_cannot_be_told_is_refused(batches, template, found):
    before, each, after = re.split("(?<!{)%(?!})", template)
    template = f"{before}{{% for m in messages %}}{each}{{% endfor %}}{after}"
    with pytest.raises(DataError, match=r"chat.jsonl, line 1: expected .*; put {% generation %}") as error:
        batches([dict(messages=TURNS)], template)
    assert found in str(error.value)


def test_a_tokenizer_that_cannot_do_it_is_refused(batches, tokenizer):
    for skip in ("stop", "skip"):
        with pytest.raises(DataError, match="expected a chat template, .* found none; name the tokenizer of"):
            batches([dict(messages=TURNS)], None, bad_lines=skip)
        with pytest.raises(DataError, match="expected an eos token"):
            batches([dict(text="a")], made=tokenizer(eos=None), bad_lines=skip)
    batches([dict(text="a")], None)  # needs none
    top = int(batches(chats(3)).data.data.tokens.max())
    assert batches(chats(3), vocab=top + 1)
    with pytest.raises(DataError, match=f"below the model's vocabulary of {top}, found {top}; name the tokenizer"):
        batches(chats(3), vocab=top)


# Bad lines


def line(**changes):
    return dict(messages=[TURNS[0], TURNS[1] | changes])


BAD = {
    "broken": (b'{"messages": [', "a JSON object, found Expecting value"),
    "deep": (b"[" * 100_000, "a JSON object"),
    "list": (b"[1, 2]", "a JSON object, found list"),
    "not utf-8": (b'{"text": "caf\xe9"}', "UTF-8, found byte 0xe9 at 13"),
    "surrogate": (b'{"text": "a \\ud800 b"}', "half of a surrogate pair"),
    "surrogate in a message": (line(content="\ud800"), "half of a surrogate pair"),
    "long": (b'{"text": "' + b"a" * LINE_BYTES + b'"}', "at most 10'485'760 bytes, found more"),
    "other keys": (dict(conversations=[], id=1), "messages, prompt and completion .*, found conversations, id"),
    "completion missing": (dict(prompt="a"), "found prompt"),
    "mixed": (dict(prompt="a", completion=[TURNS[1]]), "found prompt, completion"),
    "messages empty": (dict(messages=[]), "messages, a list"),
    "messages null": (dict(messages=None), "or text, found messages"),
    "role": (line(role="gpt"), "a role of system, .*, found 'gpt' in message 2"),
    "no role": (dict(messages=[dict(content="a")]), "found 'None' in message 1"),
    "empty content": (line(content=" \n"), "text as content, found empty content in message 2"),
    "content null": (line(content=None), "found empty content in message 2"),
    "parts": (line(content=[dict(type="text", text="a")]), "text as content, found list in message 2"),
    "special token": (line(content="a<|im_end|>b"), r"special tokens, found <\|im_end\|> in message 2"),
    "weight": (line(weight=0), "weight 1, .* found 0 in message 2"),
    "tools": (dict(messages=TURNS, tools=[dict(name="f")]), "what the chat template knows, found tools"),
    "tool calls": (line(content="", tool_calls=[dict(name="f")]), "the chat template knows, found tool_calls"),
    "no answer": (dict(messages=TURNS[:1]), r"an answer \(role assistant\), found none"),
    "answer first": (dict(messages=TURNS[1:2]), "what the chat template takes, found ValueError"),
    "no answer in the completion": (dict(prompt=TURNS, completion=TURNS[:1]), "an answer"),
    "text empty": (dict(text=""), "text to learn, found empty content"),
    "text a number": (dict(text=3), "text to learn, found int"),
    "completion empty": (dict(prompt="a", completion=" "), "text to learn, found empty content"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_line_is_named_or_counted(batches, kind):
    bad, words = BAD[kind]
    lines = [chats(1)[0], bad, *chats(2)]
    with pytest.raises(DataError, match=rf"chat\.jsonl, line 2: expected .*{words}") as error:
        batches(lines)
    assert "--bad-lines skip" in str(error.value) and "\n" not in str(error.value)
    stream = batches(lines, bad_lines="skip")
    assert "3 examples, 1 lines left out as bad (the first: " in stream.description and "line 2: " in stream.description
    assert "left out" not in batches([lines[0], b" ", *lines[2:]]).description  # a blank line is none
    with pytest.raises(DataError, match="line 1: expected"):
        batches([bad], bad_lines="skip")


def test_tools_too_deep_for_python_are_a_bad_line(batches):
    tools = json.loads('[{"a": ' * 450 + "1" + "}]" * 450)
    template = TEMPLATES["qwen2.5"] + "{% if tools %}{{ tools | tojson }}{% endif %}"
    with pytest.raises(DataError, match="line 1: expected"):
        batches([dict(messages=TURNS, tools=tools)], template)


def test_what_others_write_into_lines_changes_nothing(batches, tokenizer):
    """A mark of the byte order before the first line, as Windows writes it, and null for what is not there."""
    plain = batches([dict(messages=TURNS), dict(text="Two.")])
    nulls = dict(messages=[dict(each, weight=None) for each in TURNS], prompt=None)
    marked = b"\xef\xbb\xbf" + json.dumps(nulls).encode()
    other = batches([marked, dict(messages=None, text="Two.")])
    assert other.fingerprint == plain.fingerprint


def test_a_template_that_writes_the_date_writes_the_same_every_day(batches, tokenizer):
    for marks in (("", ""), ("{% generation %}", "{% endgeneration %}")):
        template = "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}|{% endif %}"
        template += '{{ strftime_now("%Y-%m-%d") }}'
        template += "{% for m in messages %}{{ '<|im_start|>' + m.role }}" + marks[0] + "{{ m.content + '<|im_end|>' }}"
        template += marks[1] + "{% endfor %}" + PROMPT.replace("%s", "<|im_start|>assistant")
        stream = batches([dict(messages=TURNS)], template)
        assert preview(stream.example(0), tokenizer(), False).startswith("26 Jul 2024|2024-07-26<|im_start|>user")


def test_a_template_whose_date_cannot_be_fixed_is_refused(batches):
    with pytest.raises(DataError, match="a chat template without today's date, found strftime_now of a variable"):
        batches([dict(messages=TURNS)], "{% set how = '%Y' %}{{ strftime_now(how) }}" + TEMPLATES["qwen2.5"])


def test_a_template_may_refuse_a_conversation(batches):
    twice = dict(messages=[TURNS[0], *TURNS[:2]])
    with pytest.raises(DataError, match="line 2: .* found TemplateError: roles must alternate"):
        batches([chats(1)[0], twice], "gemma3")


def test_files_are_found_and_those_that_cannot_be_used_named_before_anything_heavy_is_imported(tmp_path, batches):
    for name in ("b.jsonl", "a.jsonl", "notes.txt"):
        (tmp_path / name).write_text('{"text": "a"}\n')
    both = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    assert check_files(str(tmp_path)) == check_files(f"{tmp_path}/*.jsonl") == both
    assert check_files(f"{tmp_path}/notes.txt") == [tmp_path / "notes.txt"]
    (tmp_path / "empty.jsonl").touch()
    os.mkfifo(tmp_path / "pipe")
    code = ("import sys; from trainer.data import DataError; from trainer.finetuning import chat\n"
            "from trainer.finetuning.examples import check_files\n"
            "for source in sys.argv[1:]:\n"
            "    try: check_files(source, '--eval-data')\n"
            "    except DataError as error: print(error)\n"
            "assert not {'torch', 'transformers', 'tokenizers', 'jinja2', 'safetensors'} & {*sys.modules}")  # fmt: skip
    sources = [f"{tmp_path}/{name}" for name in ("empty.jsonl", "missing.jsonl", "*.json", "pipe")]
    run = subprocess.run([sys.executable, "-c", code, *sources], env=os.environ | dict(PYTHONPATH=str(ROOT)),
                         capture_output=True, text=True, check=True, timeout=60)  # fmt: skip
    found = run.stdout.splitlines()
    assert len(found) == 4 and all("--eval-data" in each for each in found)
    assert "empty file" in found[0] and "found none" in found[1] and "found none" in found[2] and "pipe" in found[3]
    with pytest.raises(DataError, match="lines of JSON, found blank ones"):
        batches([b" "])


# Rows


def test_packed_rows_hold_the_same_contexts_and_labels_as_rows_of_one_example(batches):
    lines = [*chats(30), dict(text="Some text."), dict(messages=TURNS)]
    plain, packed, longest = (batches(lines, pad=pad) for pad in chat.PADS[::2] + ("longest",))
    assert packed.epoch_samples < plain.epoch_samples == 32
    expected = pairs(plain, 32)
    assert pairs(packed, packed.epoch_samples) == pairs(longest, 32) == expected and len(expected) == plain.labels
    assert (packed.labels, packed.tokens) == (plain.labels, plain.tokens)
    for tokens, targets, inputs in steps_of(packed, packed.epoch_samples):
        positions = inputs["position_ids"]
        starts = (positions[0] == 0).nonzero()[:, 0]
        assert starts[0] == 0 and tokens.shape == targets.shape == positions.shape == (1, 128)
        assert int((positions[0].diff() != 1).sum()) == len(starts) - 1  # they count on within a document
        for start in starts[1:]:  # what stands before the first token does not predict it
            assert targets[0, start - 1] != tokens[0, start]


def test_packing_fills_rows_and_loses_nothing():
    lengths = np.random.default_rng(0).integers(1, 65, 2000)
    rows = pack(lengths, 64)
    assert sorted(sum(rows, [])) == [*range(2000)] and max(lengths[row].sum() for row in rows) <= 64
    assert len(rows) <= 1.02 * lengths.sum() / 64 + 1


def test_rows_that_are_as_long_as_needed_have_one_length_on_all_ranks_and_eight_in_all(batches):
    lines = [dict(text="word" * (i // 2 + 1)) for i in range(60)]
    lengths = set()
    ranks = [batches(lines, pad="longest", seqlen=100, global_batch=4, rank=rank, world=2) for rank in range(2)]
    whole = batches(lines, pad="fixed", seqlen=100, global_batch=4)
    for _ in range(30):
        (a, x, _), (b, y, _), (tokens, targets, _) = (next(each) for each in (*ranks, whole))
        assert a.shape == b.shape == x.shape == y.shape and a.shape[1] in {*range(13, 100, 13), 100}
        assert torch.equal(torch.cat((a, b)), tokens[:, : a.shape[1]])
        assert torch.equal(torch.cat((x, y)), targets[:, : a.shape[1]])
        assert not (targets[:, a.shape[1] :] != IGNORE).any()
        assert (targets[:, a.shape[1] // 13 * 13 - 13 :] != IGNORE).any()  # not longer than needed
        lengths.add(a.shape[1])
    assert len(lengths) > 2


def test_examples_are_cut_to_the_row_and_dropped_without_a_label_and_counted(batches, tokenizer):
    lines = [*chats(3), dict(prompt="long " * 100, completion="yes"), dict(text="long " * 100)]
    whole, stream = batches(lines, seqlen=600), batches(lines, seqlen=80)
    assert "5 examples; 5 to train on" in whole.description
    assert "5 examples, 2 cut to 81 tokens, 1 dropped for want of a label; 4 to train on" in stream.description
    ids, learned = whole.example(4)
    assert [each.tolist() for each in stream.example(3)] == [ids[:81].tolist(), learned[:81].tolist()]
    found = [next(stream) for _ in range(4)]
    assert sum(int((targets != IGNORE).sum()) for _, targets, _ in found) == stream.labels
    with pytest.raises(DataError, match="an example with a label, found .*1 cut to 41 .*1 dropped.*; raise --seqlen"):
        batches(lines[3:4], seqlen=40)


# Order


def test_ranks_share_each_global_batch_and_epochs_run_on(batches):
    lines = chats(10)
    whole = batches(lines, global_batch=4)
    steps = steps_of(whole, 10)  # four epochs, of which two end within a batch
    for world in (2, 4):
        ranks = [batches(None, global_batch=4, rank=rank, world=world) for rank in range(world)]
        assert len({each.fingerprint for each in ranks}) == len({each.description for each in ranks}) == 1
        for tokens, targets, _ in steps:
            parts = [next(each) for each in ranks]
            assert torch.equal(torch.cat([part[0] for part in parts]), tokens)
            assert torch.equal(torch.cat([part[1] for part in parts]), targets)
    rows = [tuple(row) for tokens, *_ in steps for row in tokens.tolist()]
    epochs = [rows[i : i + 10] for i in range(0, 40, 10)]
    assert len({*rows}) == 10 and all(sorted(each) == sorted(epochs[0]) for each in epochs)
    assert len({*map(tuple, epochs)}) == 4  # each in its own order
    assert whole.epoch_samples == 10 and whole.sample == 40
    assert not torch.equal(next(batches(None, global_batch=4, seed=4))[0], steps[0][0])
    with pytest.raises(ValueError, match="--batch"):
        batches(None, global_batch=4, world=3)


@pytest.mark.parametrize("pad", chat.PADS)
def test_a_jump_by_start_or_by_sample_equals_iterating(batches, pad):
    lines = chats(40)
    stream = batches(lines, pad=pad, global_batch=3)
    steps = steps_of(stream, 20)
    other = batches(None, pad=pad, global_batch=3, start=33)
    for step in (11, 0, 19, 7):
        other.sample = 3 * step if step != 11 else other.sample
        for one, two in zip(next(other)[:2], steps[step][:2], strict=True):
            assert torch.equal(one, two)


# What is held out


@pytest.mark.parametrize("pad", chat.PADS)
def test_what_is_held_out_is_never_trained_on_and_the_same_for_any_number_of_ranks(batches, pad):
    lines = chats(200)
    everything = batches(lines, pad=pad)
    stream = batches(None, pad=pad, hold_out=True, global_batch=4)
    assert "197 to train on" in stream.description and "; 3 held out" in stream.description
    trained = pairs(stream, -(-stream.epoch_samples // 4))
    held = list(stream.held_out(9))
    assert len(held) == -(-len(stream.held) // 4) == 1 and (held[0][1][len(stream.held) :] == IGNORE).all()
    apart = pairs(iter(held), 1)
    assert apart and not {str(each) for each in apart if len(each[0]) > 20} & {str(each) for each in trained}
    assert len(apart) + stream.labels == everything.labels
    for rank in range(4):
        mine = batches(None, pad=pad, hold_out=True, global_batch=4, rank=rank, world=4)
        for (tokens, targets, _), (whole, all_targets, _) in zip(mine.held_out(9), held, strict=True):
            assert torch.equal(tokens, whole[rank : rank + 1]) and torch.equal(targets, all_targets[rank : rank + 1])
    assert stream.fingerprint != everything.fingerprint
    assert not everything.held and not list(everything.held_out(9))
    assert torch.equal(stream.row(0, held=True)[:9], held[0][0][0, :9])
    assert torch.equal(stream.row(stream.sample)[:9], next(stream)[0][0, :9])


def test_a_line_is_never_on_both_sides(batches):
    lines = [*chats(5), dict(messages=TURNS)]
    stream = batches(lines, "qwen3", hold_out=True)  # the last line is two examples
    assert "7 examples" in stream.description and "5 to train on" in stream.description and len(stream.held) == 2
    with pytest.raises(DataError, match="two lines with a label"):
        batches(lines[-1:], "qwen3", hold_out=True)


def test_a_second_source_is_held_out(batches, tokenizer, tmp_path):
    other = tmp_path / "eval.jsonl"
    other.write_text("".join(json.dumps(each) + "\n" for each in chats(3, "No. ")))
    stream = batches(chats(9), eval_source=str(other), hold_out=True, global_batch=2)
    assert stream.epoch_samples == 9 and len(stream.held) == 3 and f"3 held out of {other}" in stream.description
    one, two = stream.held_out(5)
    assert "Answer 0: No." in tokenizer().decode(one[0][0]) and (two[1][1] == IGNORE).all()
    with pytest.raises(ValueError, match="--eval-data .*: .*chat.jsonl is also in --data"):
        batches(None, eval_source=f"{tmp_path}/*.jsonl")
    other.write_text("nothing\n")
    with pytest.raises(DataError, match="eval.jsonl, line 1"):
        batches(None, eval_source=str(other))


def test_flags_are_checked(batches):
    for wrong in (dict(pad="none"), dict(bad_lines="ignore")):
        with pytest.raises(ValueError, match=f"--{next(iter(wrong)).replace('_', '-')} "):
            batches(chats(3), **wrong)


# The cache


@pytest.fixture
def reads(monkeypatch):
    """One entry for each time that data is tokenised."""
    calls, real = [], examples.read
    monkeypatch.setattr(examples, "read", lambda *given, **how: calls.append(given) or real(*given, **how))
    return calls


def test_the_cache_is_used_until_something_changes(batches, tokenizer, tmp_path, monkeypatch, reads):
    first, made = batches(chats(9)), tokenizer("qwen2.5")
    with monkeypatch.context() as patch:
        patch.setattr(type(made), "__call__", None)  # the tokenizer is not called again
        patch.setattr(type(made), "apply_chat_template", None)
        again = batches(None, made=made, seqlen=127, pad="pack", hold_out=True)
    assert len(reads) == 1 and again.labels + again.data.labels[-1] == first.labels
    (path,) = (tmp_path / "cache").glob("*.safetensors")
    assert str(path) in Path("/proc/self/maps").read_text()
    batches(None, template="llama3")
    batches(None, made=tokenizer("qwen2.5", eos="<|im_end|>"))
    larger = tokenizer("qwen2.5")
    larger.add_tokens(["Answer"])
    batches(None, made=larger)
    batches(chats(10))
    assert len(reads) == 5
    assert {each.suffix for each in (tmp_path / "cache").iterdir()} == {".safetensors", ".lock"}


@pytest.mark.parametrize("damage", ["cut", "flipped", "emptied"])
def test_a_damaged_cache_is_made_again(batches, tmp_path, capsys, damage):
    stream = batches(chats(9))
    (path,) = (tmp_path / "cache").glob("*.safetensors")
    whole = path.read_bytes()
    flipped = whole[:-5] + bytes([whole[-5] ^ 1]) + whole[-4:]
    del stream
    path.unlink()  # a process that has it mapped keeps what it has
    path.write_bytes(dict(cut=whole[:-9], flipped=flipped, emptied=b"")[damage])
    capsys.readouterr()
    batches(None)
    assert "damaged" in capsys.readouterr().out and path.read_bytes() == whole
    batches(None)
    assert capsys.readouterr().out == ""


def test_of_several_at_once_one_tokenises_and_the_others_wait(batches, tmp_path, reads):
    batches(chats(50))
    for path in (tmp_path / "cache").iterdir():
        path.unlink()
    made = []
    threads = [threading.Thread(target=lambda: made.append(batches(None))) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(reads) == 2 and len(made) == 4 and len({each.fingerprint for each in made}) == 1


def test_a_cache_with_bad_lines_is_no_way_around_them(batches):
    lines = [*chats(3), b"broken"]
    skipped = batches(lines, bad_lines="skip")
    assert batches(None, bad_lines="skip").description == skipped.description
    with pytest.raises(DataError, match="line 4"):
        batches(None)


def test_without_a_cache_the_data_is_the_same(batches, tmp_path, capsys):
    stream = batches(chats(9))
    (tmp_path / "file").touch()
    other = batches(None, cache=str(tmp_path / "file"))
    assert "tokenises the data for itself" in capsys.readouterr().out
    assert other.fingerprint == stream.fingerprint and pairs(other, 9) == pairs(stream, 9)


def test_the_fingerprint_is_that_of_the_tokens(batches):
    stream = batches(chats(9))
    same = batches([json.dumps(each, indent=None, separators=(",", ":")).encode() for each in chats(9)])
    assert same.fingerprint == stream.fingerprint  # white space alone has changed
    assert batches(chats(10)).fingerprint != stream.fingerprint
    assert batches(chats(9, "Yep. ")).fingerprint != stream.fingerprint
    assert batches(chats(9), pad="pack").fingerprint != stream.fingerprint


def test_a_preview_shows_what_is_learned_and_does_not_control_the_terminal(batches, tokenizer):
    turns = [TURNS[0], dict(role="assistant", content="a\x1b[2Jb")]
    made, stream = tokenizer("qwen2.5"), batches([dict(messages=turns)])
    shown = preview(stream.example(0), made, color=True)
    assert "\x1b[32ma\ufffd[2Jb<|im_end|>\x1b[0m\n" in shown
    assert "[[a\ufffd[2Jb<|im_end|>]]\n" in preview(stream.example(0), made, color=False)
