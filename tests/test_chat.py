"""Chat data of trainer/finetuning: what is learned token by token, and what lines are refused.

    python -m pytest tests/test_chat.py

On a CPU, with a small real tokenizer that is trained here and templates of the structure of known models. What becomes
of the examples has tests of its own: tests/test_chat_batches.py.
"""

import json
import os
import re
import subprocess
import sys

import pytest
from conversations import PROMPT, REFUSED, SPECIAL, TEMPLATES, TURNS, chats, refuse, steps_of
from running import ROOT

from model import IGNORE
from trainer.data import DataError
from trainer.finetuning.sources import check_files
from trainer.finetuning.templates import NAMED, render, replace_template

pytest.importorskip("transformers", reason="needs transformers: pip install -e '.[hf]'")
tokenizers = pytest.importorskip("tokenizers")
pytestmark = pytest.mark.filterwarnings("error")


def learned_text(stream, number=0):
    """What is learned of an example, run by run."""
    return [part.partition("]]")[0] for part in stream.preview(number, False).split("[[")[1:]]


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
    assert learned_text(stream) == LEARNED[template] == learned_text(batches(None, template))
    ids, learned = stream.example(0)
    whole = made.apply_chat_template(TURNS, tokenize=True)["input_ids"]
    if template == "llama3":  # this tokenizer has the two line breaks before an answer as one token, if nothing follows
        assert "1 with tokens across the start of an answer, cut there" in stream.description
        assert made.decode(ids) == made.decode(whole)
        whole = ids.tolist()
    assert ids.tolist() == whole  # the template's own tokens, so no second bos
    tokens, targets, inputs = next(stream)
    n = len(whole) - 1
    assert tokens[0, :n].tolist() == whole[:-1] and not inputs
    expected = [token if on else IGNORE for token, on in zip(whole[1:], learned[1:], strict=True)]
    assert targets[0, :n].tolist() == expected and set(targets[0, n:].tolist()) == {IGNORE}
    assert stream.labels == learned.sum() and stream.tokens == n


@pytest.mark.parametrize("template", LEARNED)
def test_of_a_chat_whose_history_is_masked_the_last_answer_is_learned_alone(batches, template):
    stream = batches([dict(messages=TURNS)], template)
    last = batches([dict(messages=TURNS)], template, mask_history=True)
    assert learned_text(last) == [LEARNED[template][-1].rstrip()]
    if template != "llama3":  # which is cut at each answer that is learned
        assert last.example(0)[0].tolist() == stream.example(0)[0].tolist()


def test_thoughts_of_a_masked_history_need_not_be_rendered(batches):
    thought = [dict(each, content="<think>\nHm.\n</think>\n\n" * (each["role"] == "assistant") + each["content"])
               for each in TURNS]  # fmt: skip
    last = batches([dict(messages=thought)], "qwen3", mask_history=True)
    assert len(last.data.chosen) == 1 and last.preview(0, False).count("Hm.") == 1
    assert learned_text(last) == ["<think>\nHm.\n</think>\n\nFive, I think.<|im_end|>"]


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
        assert learned_text(stream, number) == [f"<think>\nHm.\n</think>\n\n{answer}<|im_end|>"]
        asked = made.apply_chat_template(thought[: 2 * number + 1], add_generation_prompt=True, tokenize=True)
        n = len(asked["input_ids"])
        ids, learned = stream.example(number)
        assert ids[:n].tolist() == asked["input_ids"] and not learned[:n].any() and learned[n]
    assert "1 split, as the template" in stream.description


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
        assert learned_text(stream) == ["Five, I think.<|im_end|>"]
        prompt = made.apply_chat_template(TURNS[:3], add_generation_prompt=True)["input_ids"]
        whole = made.apply_chat_template(TURNS)["input_ids"]
        after = made("\n", add_special_tokens=False)["input_ids"]  # TRL learns the line break after the turn as well
        labels = [-100] * len(prompt) + whole[len(prompt) : -len(after)] + [-100] * len(after)
        _, targets, _ = next(stream)
        assert targets[0, : len(whole) - 1].tolist() == labels[1:]
        assert set(targets[0, len(whole) - 1 :].tolist()) == {-100}


@pytest.mark.parametrize("template, found", [
    ("%{{ m.role + ': ' + m.content + '\n' }}%", "around message 4"),
    ("%[INST]{{ m.content }}%", "around message 4"),
    ("%{{ m.content + '\n' }}%", "a special token at the end of each"),
    ("%{% generation %}{{ m.content }}{% endgeneration %}{{ eos_token }}%", "a special token at the end of each"),
    ("%{% generation %}{% endgeneration %}{{ m.content }}%", "tokens to train on, found none"),
    ("{{ messages | length }}%{{ m.content + eos_token }}%", "before or around message"),
])  # fmt: skip
def test_a_template_of_which_the_answers_cannot_be_told_is_refused(batches, template, found):
    before, each, after = re.split("(?<!{)%(?!})", template)
    template = f"{before}{{% for m in messages %}}{each}{{% endfor %}}{after}"
    with pytest.raises(DataError, match=r"chat.jsonl, line 1: expected .*; put {% generation %}") as error:
        batches([dict(messages=TURNS)], template)
    assert found in str(error.value)


OPENS, CLOSES = "<|im_start|>assistant\n<think>\n", "<|im_start|>assistant\n<think></think>"
SWITCH = "{% if enable_thinking is defined and not enable_thinking %}<|im_start|>assistant\n{% else %}%s{% endif %}"


@pytest.mark.parametrize(("prompt", "words", "fix"), [
    (OPENS, "prompt, which opens <think>, found '<.im_start.>assistant", "put {% generation %}"),
    (CLOSES, "prompt, which closes <think>, found '<.im_start.>assistant", "put {% generation %}"),
    (SWITCH.replace("%s", OPENS), "prompt, which opens <think>",
     'add "chat_template_kwargs": {"enable_thinking": false} to the line'),
    ("<|im_start|>model\n", "prompt, found '<.im_start.>model.n', then '<.im_sta", "put {% generation %}"),
])  # fmt: skip
def test_a_template_that_asks_for_thoughts_and_answers_without_says_so_and_what_helps(batches, prompt, words, fix):
    template = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    template += PROMPT.replace("%s", prompt)
    line = dict(messages=TURNS[:2])
    words = f"line 1: expected an answer that begins like the generation {words}.*; {re.escape(fix)}"
    refuse(words, batches, [line], template)
    if "kwargs" in fix:
        batches([line | dict(chat_template_kwargs=dict(enable_thinking=False))], template)


@pytest.mark.parametrize("name", NAMED)
def test_a_family_whose_own_template_is_refused_is_trained_with_one_of_ours(batches, tokenizer, name):
    again = [*TURNS, *TURNS[:2]]  # the first question twice
    thought = [TURNS[0], TURNS[1] | dict(reasoning_content="Add them.")]
    texts = {
        "deepseek-r1": (["\n</think>\n\nFour, my friend.<｜end▁of▁sentence｜>"],
                        ["Add them.\n</think>\n\nFour, my friend.<｜end▁of▁sentence｜>"]),
        "glm-4.5": (["\n<think></think>\nFour, my friend.<|user|>", "\n<think></think>\nFive, I think.<|user|>",
                     "\n<think></think>\nFour, my friend.<|user|>"],
                    ["\n<think>Add them.</think>\nFour, my friend.<|user|>"]),
    }[name]  # fmt: skip
    tokens = [*SPECIAL[3:], "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>", "<|user|>", "<|assistant|>"]
    own = REFUSED[name]
    made = tokenizer(own, additional_special_tokens=tokens)
    refuse(f"; add --template {name}$", batches, [dict(messages=TURNS)], made=made)
    assert f"--template {name}: writes " in replace_template(made, name)
    for messages, text in zip((again, thought), texts, strict=True):
        stream = batches([dict(messages=messages)], made=made, vocab=999)
        assert learned_text(stream, len(stream.data.chosen) - 1) == text
    for end in (1, 3, 5):  # what a model is asked with is as the family has it
        both = [render([dict(role="system", content="Be kind."), *again[:end]],
                       dict(chat_template=each, bos_token="<s>"), add_generation_prompt=True)[0]
                for each in (own, made.chat_template)]  # fmt: skip
        assert both[0] == both[1]
    with pytest.raises(ValueError, match=f"--template {name}: needs a model whose own template has "):
        replace_template(tokenizer("qwen2.5"), name)


def test_a_tokenizer_that_cannot_do_it_is_refused(batches, tokenizer):
    for skip in ("stop", "skip"):
        refuse("expected a chat template, .* found none; name the tokenizer of",
            batches, [dict(messages=TURNS)], None, bad_lines=skip)
        refuse("expected an eos token", batches, [dict(text="a")], made=tokenizer(eos=None), bad_lines=skip)
    batches([dict(text="a")], None)  # needs none
    top = batches(chats(3)).data.data.top
    assert batches(chats(3), vocab=top + 1)
    refuse(f"below the model's vocabulary of {top}, found {top}; name the tokenizer", batches, chats(3), vocab=top)


def test_a_tokenizer_that_drops_text_is_told_and_the_preview_shows_what_is_left(batches, tokenizer):
    normalizers = pytest.importorskip("tokenizers").normalizers
    rows = [dict(messages=[TURNS[0], dict(role="assistant", content=f"zed {i} \u00e9\u3000e\u0301")]) for i in range(9)]
    assert "tokenizer drops" not in batches(rows).description
    made = tokenizer("qwen2.5")
    made.backend_tokenizer.normalizer = normalizers.Replace("z", "")
    stream = batches(rows, made=made)
    assert "9 of the first 256 with text that the tokenizer drops (--preview shows what is left)" in stream.description
    assert "[[ed 0 " in stream.preview(0, False)


def test_a_preview_shows_what_is_learned_and_does_not_control_the_terminal(batches):
    turns = [TURNS[0], dict(role="assistant", content="a\x1b[2Jb")]
    stream = batches([dict(messages=turns)])
    shown = stream.preview(0, True)
    assert "\x1b[32ma\ufffd[2Jb<|im_end|>\x1b[0m\n" in shown
    assert "[[a\ufffd[2Jb<|im_end|>]]\n" in stream.preview(0, False)


# Bad lines


def line(**changes):
    return dict(messages=[TURNS[0], TURNS[1] | changes])


BAD = {
    "broken": (b'{"messages": [', "a JSON object, found Expecting value"),
    "deep": (b"[" * 100_000, "a JSON object"),
    "list": (b"[1, 2]", "a JSON object, found list"),
    "not utf-8": (b'{"text": "caf\xe9"}', "UTF-8, found byte 0xe9 at 13"),
    "surrogate": (b'{"text": "a \\ud800 b"}', "half of a surrogate pair"),
    "other keys": (dict(conversations=[], id=1),
                   "messages, prompt and completion .*, found conversations, id; name its columns .--columns "),
    "mixed": (dict(prompt="a", completion=[TURNS[1]]), "found prompt, completion"),
    "messages empty": (dict(messages=[]), "messages, a list of"),
    "roles of a template": (dict(messages=[TURNS[0], dict(role="tool", content="a"), TURNS[1]]), "no results here"),
    "role": (line(role="gpt"), "one of the roles system, .*, found 'gpt' in message 2"),
    "empty content": (line(content=" \n"), "text as content, found empty content in message 2"),
    "another part": (line(content=[dict(type="image", url="a")]), "text parts, as content, found dict in content"),
    "part with more": (line(content=[dict(text="a", alt="b")]), "text parts, as content, found dict in content in mes"),
    "number": (line(content=3), "text parts, as content, found int in content in message 2"),
    "key twice": (b'{"text": "a", "text": "b"}', "a JSON object, found the key 'text' twice in one object"),
    "special token": (line(content="a<|im_end|>b"), r"special tokens, found <\|im_end\|> in message 2"),
    "weight": (line(weight=0.5), r"weight 0 or 1, train true or false, found \[0.5\] in message 2"),
    "flags that differ": (line(weight=1, train=False), r"found \[1, False\] in message 2"),
    "weight of a user": (dict(messages=[TURNS[0] | dict(train=True), TURNS[1]]),
                         "weight 1 only in messages of the assistant, found 1 in message 1"),
    "nothing to learn": (line(weight=0), r"an answer \(role assistant\) to train on, found none"),
    "tools": (dict(messages=TURNS, tools=[dict(name="f")]), "arguments that the chat template uses, found tools"),
    "tools of numbers": (dict(messages=TURNS, tools=[1]), "tools as a list of objects or as JSON, found a list with"),
    "tools not JSON": (dict(messages=TURNS, tools="f"), "tools as a list of objects or as JSON, found Expecting value"),
    "tool calls": (line(content="", tool_calls=[dict(name="f")]), "renders all texts, found no 'f' of the tool_calls"),
    "arguments": (line(tool_calls=[dict(function=dict(name="f", arguments="a"))]), "arguments of a tool call in mess"),
    "list of arguments": (line(tool_calls=[dict(arguments="[1]")]), "arguments of a tool call .*, found list"),
    "function": (line(tool_calls=[dict(function="f")]), "an object as function of a tool call, found str in message 2"),
    "template arguments": (dict(messages=TURNS, chat_template_kwargs=dict(think=True)),
                           "template uses, found think, which it does not use"),
    "other arguments": (dict(messages=TURNS, chat_template_kwargs=[1]),
                        "chat_template_kwargs as an object, found list"),
    "no answer": (dict(messages=TURNS[:1]), r"an answer \(role assistant\) to train on, found none"),
    "answer first": (dict(messages=TURNS[1:2]), "messages that the chat template accepts, found UndefinedError"),
    "text empty": (dict(text=""), "text to train on, found empty content"),
    "text a number": (dict(text=3), "text to train on, found int"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_line_is_named_or_counted(batches, kind):
    bad, words = BAD[kind]
    template = "{% for m in messages if m.role == 'tool' %}{{ raise_exception('no results here') }}{% endfor %}"
    template += TEMPLATES["qwen2.5"]
    lines = [chats(1)[0], bad, *chats(2)]
    with pytest.raises(DataError, match=rf"chat\.jsonl, line 2: expected .*{words}") as error:
        batches(lines, template)
    assert "--bad-lines skip" in str(error.value) and "\n" not in str(error.value)
    stream = batches(lines, template, bad_lines="skip")
    reasons = re.search(r"3 examples, 1 line left out as bad \((.*): 1; the first: .*line 2: ", stream.description)[1]
    assert "--bad-lines" not in stream.description  # it was given
    assert reasons.startswith("expected ") and not re.search(r"in message \d", reasons)
    refuse("line 1: expected", batches, [bad], template, bad_lines="skip")


def test_what_others_write_into_lines_changes_nothing(batches):
    """A mark of the byte order before the first line, as Windows writes it, and null for what is not there."""
    plain = batches([dict(messages=TURNS), dict(text="Two.")])
    nulls = dict(messages=[dict(each, weight=None) for each in TURNS], prompt=None)
    marked = b"\xef\xbb\xbf" + json.dumps(nulls).encode()
    other = batches([marked, dict(messages=None, text="Two.")])
    assert other.fingerprint == plain.fingerprint
    assert "left out" not in batches([b" ", *chats(2), b""]).description  # a blank line is none
    refuse("lines of JSON, found blank ones", batches, [b" "])


def test_a_template_that_writes_the_date_writes_the_same_every_day(batches):
    for marks in (("", ""), ("{% generation %}", "{% endgeneration %}")):
        template = "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}|{% endif %}"
        template += '{{ strftime_now("%Y-%m-%d") }}'
        template += "{% for m in messages %}{{ '<|im_start|>' + m.role }}" + marks[0] + "{{ m.content + '<|im_end|>' }}"
        template += marks[1] + "{% endfor %}" + PROMPT.replace("%s", "<|im_start|>assistant")
        stream = batches([dict(messages=TURNS)], template)
        assert stream.preview(0, False).startswith("26 Jul 2024|2024-07-26<|im_start|>user")
    variable = "{% set how = '%Y' %}{{ strftime_now(how) }}" + TEMPLATES["qwen2.5"]
    refuse("today's date, found strftime_now of a variable", batches, [dict(messages=TURNS)], variable)


def test_files_are_found_and_those_that_cannot_be_used_named_before_anything_heavy_is_imported(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "notes.txt"):
        (tmp_path / name).write_text('{"text": "a"}\n')
    both = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    assert check_files(str(tmp_path)) == check_files(f"{tmp_path}/*.jsonl") == both
    assert check_files(f"{tmp_path}/notes.txt") == [tmp_path / "notes.txt"]
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "a.CSV").write_text("prompt,completion\n")
    os.mkfifo(tmp_path / "pipe")
    code = ("import sys; from trainer.data import DataError; from trainer.finetuning import chat\n"
            "from trainer.finetuning.sources import check_files\n"
            "for source in sys.argv[1:]:\n"
            "    try: check_files(source, '--eval-data')\n"
            "    except DataError as error: print(error)\n"
            "assert not {'torch', 'transformers', 'tokenizers', 'datasets', 'pyarrow'} & {*sys.modules}")  # fmt: skip
    words = {"empty.jsonl": "empty file.*--eval", "missing.jsonl": "found none.*--eval", "*.json": "found none.*--eval",
             "pipe": "pipe or device.*--eval", "a.CSV": "expected a .jsonl, .* found a .CSV one; save it as lines of"}
    run = subprocess.run([sys.executable, "-c", code, *(f"{tmp_path}/{name}" for name in words)], check=True,
                         env=os.environ | dict(PYTHONPATH=str(ROOT)), capture_output=True, text=True, timeout=60)
    for found, expected in zip(run.stdout.splitlines(), words.values(), strict=True):
        assert re.search(expected, found)
