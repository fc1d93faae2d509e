"""Chat data of trainer/finetuning: every text of a message is in an example, or its line is reported.

    python -m pytest tests/test_chat_texts.py

On a CPU, with templates that do as known families do. Which tokens are learned: tests/test_chat.py.
"""

import itertools
import json
import random
import re
from collections import defaultdict

import pytest
from conversations import FAMILIES, TURNS, refuse
from test_chat import learned_text

from trainer.data import DataError
from trainer.finetuning.columns import OF_OTHERS
from trainer.finetuning.messages import MARK, MARKS, with_marks, without_nulls

pytest.importorskip("transformers", reason="needs transformers: pip install -e '.[hf]'")
pytest.importorskip("hypothesis", reason="needs hypothesis: ./launch.sh install")
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("error")]

USER, ANSWER = TURNS[:2]
CALL = dict(id="c1", type="function", function=dict(name="weather", arguments='{"city": "Par\\"is", "days": 3}'))


def called(**changes):
    return dict(role="assistant", content=None, tool_calls=[CALL | changes])


# Texts that nobody foresaw: each @ of a line becomes a word of its own


OTHER = st.text(st.characters(codec="utf-8", exclude_characters="@"), max_size=3)
TEXT = st.builds("{}@{}".format, OTHER, OTHER) | st.sampled_from([
    "@", " @\n", "@ <b>", "<think>@</think> a", 'a "@" \\ ü', "@\n\n", "<think>\na\n</think>\n\n@", "assistant @ a\ta"])
VALUE = st.recursive(TEXT | st.sampled_from([7, None, True]), lambda each: (
    st.lists(each, max_size=2) | st.dictionaries(TEXT.map(str.strip), each, max_size=2)), max_leaves=4)  # fmt: skip
ARGUMENTS = st.dictionaries(TEXT, VALUE, max_size=2)
FUNCTION = st.builds(dict, name=st.sampled_from(["f1", "f2"]), arguments=ARGUMENTS | ARGUMENTS.map(json.dumps))
CALL_OF = st.builds(dict, id=st.just("c"), type=st.just("function"), function=FUNCTION)
CALLS = st.lists(FUNCTION | CALL_OF, min_size=1, max_size=2)
CONTENT = TEXT | st.tuples(st.builds(dict, type=st.just("text"), text=TEXT), TEXT)
OF_ASSISTANT = dict(reasoning_content=TEXT, tool_calls=CALLS)
OTHERS = dict(thinking=TEXT, name=TEXT, function_call=VALUE, tool_call_id=st.just("c"), other=VALUE, weight=st.just(1))
TURNS_OF = st.lists(st.sampled_from(["user assistant ", "user assistant tool assistant "]), min_size=1, max_size=3)
ROLES = st.builds("".join, st.tuples(st.sampled_from(["", "system ", "developer "]), TURNS_OF.map("".join)))


@st.composite
def lines(draw):
    messages = []
    others = draw(st.sampled_from([0, 0, 0, 1, 2]))  # keys that few templates know
    for role in draw(ROLES).split():
        known = OF_ASSISTANT if role == "assistant" and draw(st.booleans()) else {}
        messages.append(draw(st.fixed_dictionaries(dict(role=st.just(role), content=CONTENT), optional=known)))
    for key in draw(st.lists(st.sampled_from([*OTHERS]), min_size=others, max_size=others)):
        draw(st.sampled_from(messages))[key] = draw(OTHERS[key])
    count = itertools.count()
    return dict(messages=json.loads(re.sub("@", lambda _: f"w{next(count)}x", json.dumps(messages))))


@pytest.mark.parametrize("template", FAMILIES)
def test_any_text_in_any_field_is_in_an_example_or_its_line_is_reported(batches, tokenizer, template):
    made = tokenizer(template)
    good = []

    # Enough of them for the count below, whatever constants Hypothesis finds in this program's sources.
    @settings(max_examples=250, derandomize=True, deadline=None, database=None, suppress_health_check=HealthCheck,
              phases=[Phase.generate, Phase.shrink])  # fmt: skip
    @given(lines())
    def check(line):
        try:
            stream = batches([line], made=made, seqlen=10_000, vocab=9999)
        except DataError as error:
            assert re.search(r"line 1: expected .*(message \d+|answer|template)", str(error)), error
            return
        shown = "\n".join(stream.preview(i, False) for i in range(len(stream.data.chosen)))
        # A key whose value is null is left out, also of what a tool is called with, which is counted.
        kept = json.dumps(without_nulls(line))
        assert not [word for word in re.findall(r"w\d+x", kept) if word not in shown], shown
        nulls = re.findall(r"w\d+x", json.dumps(line)) != re.findall(r"w\d+x", kept)
        assert not nulls or "with nulls in tools or calls of them" in stream.description, stream.description
        good.append(line)

    check()
    assert len(good) > 20 or template == "short", len(good)


DROPPED = [
    ("no developer", [dict(role="developer", content="a"), USER, ANSWER], "no 'a' of the content in message 1 (dev"),
    ("no developer", [dict(role="developer", content="user"), USER, ANSWER], "no 'user' of the content in message 1"),
    ("content alone", [USER, ANSWER | dict(reasoning_content="Hm.")], "no 'Hm.' of the reasoning_content in message 2"),
    ("content alone", [USER | dict(name="Bob"), ANSWER], "no 'Bob' of the name in message 1 (user); use a role"),
    ("content alone", [USER, called(), dict(role="tool", content="Sun."), ANSWER], "of the tool_calls in message 2"),
    ("no thoughts", [USER, ANSWER | dict(content="<think>\nHm.\n</think>\n\nFour.")], "no '<think>' of the content"),
    ("short", [USER, ANSWER], "no 'What is two and two?' of the content in message 1 (user)"),
    ("arguments as sent", [USER, called() | dict(content="Let me see.")], "of the tool_calls in message 2"),
]  # fmt: skip


@pytest.mark.parametrize(("template", "messages", "found"), DROPPED)
def test_what_a_template_drops_is_named_even_where_the_same_words_stand_elsewhere(batches, template, messages, found):
    refuse(re.escape(found), batches, [dict(messages=messages)], template)
    good = dict(messages=[dict(role=role, content="a") for role in ("user", "assistant")])
    stream = batches([good, dict(messages=messages), dict(messages=messages)], template, bad_lines="skip")
    assert re.search(r"2 lines left out as bad \(expected [^;]*: 2; the first: ", stream.description)
    assert found in stream.description


def test_thoughts_that_a_template_drops_later_are_in_the_example_of_their_own_answer(batches):
    turns = [dict(each, content="<think>Hm.</think>" * (i % 2) + each["content"]) for i, each in enumerate(TURNS)]
    stream = batches([dict(messages=turns)], "thoughts of the last")
    assert [learned_text(stream, i)[0][:18] for i in range(2)] == ["<think>Hm.</think>"] * 2
    # No example of its own.
    refuse("no 'Hm.' of the content in message 2",
        batches, [dict(messages=[turns[0], turns[1] | dict(weight=0), *turns[2:]])], "thoughts of the last")


# Values of other types


def test_arguments_and_tools_as_strings_of_json_are_what_they_hold(batches, tokenizer):
    tools = [dict(type="function", function=dict(name="weather", parameters={}))]
    template = "{% if tools %}{{ tools | tojson }}{% endif %}" + tokenizer("all").chat_template
    parsed = CALL | dict(function=dict(name="weather", arguments=dict(city='Par"is', days=3)))
    sun = dict(role="tool", content="Sun.")
    both = [dict(messages=[USER, called(), sun | dict(tool_call_id="c1"), ANSWER], tools=json.dumps(tools)),
            dict(messages=[USER, called(**parsed) | dict(content=""), sun, ANSWER], tools=tools)]  # fmt: skip
    stream = batches(both, template, seqlen=300)
    one, other = (stream.preview(i, False) for i in range(2))
    assert one == other and '<call>weather {"city": "Par\\"is", "days": 3}' in one and '"name": "weather", "par' in one
    sent = batches([dict(messages=[USER, called(**parsed)])], "arguments as sent")  # some templates add strings
    assert learned_text(sent, 0) == ['<call>weather {"city": "Par\\"is", "days": 3}<|im_end|>']
    empty = CALL | dict(function=dict(name="now", arguments=""))
    sent = batches([dict(messages=[USER, called(**empty)])], "all")
    assert learned_text(sent) == ["<call>now {}<|im_end|>"]


def test_content_in_parts_is_one_text(batches):
    parts = [dict(type="text", text="What is "), "two", dict(type="text", text=" and two?", extra=None)]
    users = [dict(role="user", content=each) for each in (USER["content"], parts)]
    whole, cut = (batches([dict(messages=[user, ANSWER])]) for user in users)
    assert whole.fingerprint == cut.fingerprint


# What a line says of its own


def test_messages_of_weight_0_are_read_and_not_learned(batches):
    for template in ("qwen2.5", "markers"):
        for flag in (dict(weight=0), dict(train=False)):
            turns = [TURNS[0], TURNS[1] | flag, TURNS[2], TURNS[3] | dict(weight=1)]
            stream = batches([dict(messages=turns)], template)
            assert learned_text(stream) == ["Five, I think.<|im_end|>"]
            assert "Four, my friend." in stream.preview(0, False)
            first = batches([dict(messages=[*TURNS[:3], TURNS[3] | flag])], template)
            assert "1 with messages after the last answer" in first.description
            assert "Five" not in first.preview(0, False)


def test_template_arguments_of_a_line_go_before_those_of_the_flag(batches, tokenizer):
    template = "{{ mood | default('plain') }}|" + tokenizer("qwen2.5").chat_template
    lines = [dict(messages=TURNS), dict(messages=TURNS, chat_template_kwargs=dict(mood="loud"))]
    for arguments, found in (({}, ["plain", "loud"]), (dict(mood="calm"), ["calm", "loud"])):
        stream = batches(lines, template, template_args=arguments)
        assert [stream.preview(i, False).split("|")[0] for i in range(2)] == found
    for wrong in (dict(tone="a"), dict(messages=[])):
        refuse(f"expected arguments that the chat template uses, found {[*wrong][0]}, which",
            batches, lines, template, template_args=wrong)


def test_other_keys_of_a_line_are_named_in_the_summary(batches):
    lines = dict(messages=TURNS, source="a"), dict(text="a", source="b", id=None), dict(messages=TURNS, source="")
    stream = batches(lines)
    assert "1 with 'source' beside messages, which is not read, 1 with 'source' beside text" in stream.description


SUN = dict(role="tool", content="Sun.")


def test_the_name_of_a_result_need_not_be_written_if_a_call_has_it(batches):
    """Of OpenAI's and TRL's form. FAMILIES["all"] writes the name of the call, and none of a result."""
    named, other = ([USER, called(), SUN | dict(name=name), ANSWER] for name in ("weather", "wether"))
    plain = batches([dict(messages=[USER, called(), SUN, ANSWER])], "all", seqlen=300)
    assert batches([dict(messages=named)], "all", seqlen=300).fingerprint == plain.fingerprint
    refuse("no 'wether' of the name in message 3", batches, [dict(messages=other)], "all")
    first = [USER | dict(name="weather"), *named[1:]]
    refuse("no 'weather' of the name in message 1", batches, [dict(messages=first)], "all")


def test_a_system_beside_messages_is_their_first_message(batches):
    first = dict(role="system", content="Be terse.")
    plain = batches([dict(messages=[first, *TURNS])])
    for changes in ({}, dict(format="messages")):
        other = batches([dict(messages=TURNS, system="Be terse.")], **changes)
        assert other.fingerprint == plain.fingerprint and "'system' beside" not in other.description
    refuse("one system message, found the key system, and messages", batches,
        [dict(messages=[first, *TURNS], system="Be kind.")])  # fmt: skip


OTHERS_KEYS = [  # key, value that is refused, values with which nothing changes, words
    ("label", False, [True, None, 0, "good"], "label true, which KTO gives to .*, found label false"),
    ("kto_tag", False, [True], "found kto_tag false"),
    ("weight", 0.5, [1, 1.0, "heavy"], "put weight 0 or 1 into messages"),
    ("train", False, [True], "put train: false into messages"),
    ("functions", [dict(name="f")], [[]], "add --columns tools=functions"),
    ("documents", [dict(text="a")], [None], "write them into a message"),
    ("images", ["a.png"], [[]], 'without images, found images ."a.png'),
    ("videos", ["a"], [None], "without videos"), ("audios", ["a"], [None], "without sounds"),
    ("image", dict(path="a.png"), [None], "without images, found image "), ("video", "a", [None], "without videos"),
    ("audio", "a", [None], "without sounds"),
    ("input_ids", [1, 2], [[]], "leave input_ids out"), ("labels", [1], [None], "leave labels out"),
]  # fmt: skip


@pytest.mark.parametrize(("key", "wrong", "harmless", "words"), OTHERS_KEYS)
def test_a_key_by_which_others_decide_what_is_learned_is_refused_or_harmless(batches, key, wrong, harmless, words):
    forms = dict(messages=TURNS), dict(prompt="a", completion=" b"), dict(text="a")
    for form in forms:
        refuse(words, batches, [form | {key: wrong}])
        for value in harmless:
            stream = batches([form | {key: value}])
            assert stream.fingerprint == batches([form]).fingerprint and "not read" not in stream.description
    stream = batches([forms[0], forms[0] | {key: wrong}], bad_lines="skip")
    assert "1 line left out as bad" in stream.description


def test_every_key_of_the_table_has_a_test():
    assert {*OF_OTHERS} == {key for key, *_ in OTHERS_KEYS}


def test_a_chat_of_very_many_turns_is_refused(batches, monkeypatch):
    monkeypatch.setattr("trainer.finetuning.templates.MOST_MESSAGES", 4)
    monkeypatch.setattr("trainer.finetuning.templates.MOST_MARKED", 6)
    assert len(learned_text(batches([dict(messages=TURNS[:4])]))) == 2
    long = dict(messages=[*TURNS[:2]] * 3)
    refuse(r"expected at most 4 messages, or {% generation %} in the template, found 6 messages; cut", batches, [long])
    assert len(learned_text(batches([long], "markers"))) == 3
    longer = dict(messages=[*TURNS[:2]] * 4)
    refuse(r"expected at most 6 messages, found 8 messages; cut the line in two", batches, [longer], "markers")


class Unsearched(str):
    def __contains__(self, text):
        raise AssertionError(f"the whole text is searched for {text!r}")


def test_a_text_is_looked_for_at_its_marks_alone():
    """Of more texts than there are marks, which then stand at several places."""
    drawn = random.Random(3)
    contents = [drawn.choice(['a "b"', "same", "two\nlines", "é"]) + str(i // 2) for i in range(3 * MARKS)]
    marked, texts = with_marks([dict(role="user", content=each) for each in contents])
    kept = [drawn.random() < 0.9 for _ in contents]
    escaped = [json.dumps(turn["content"], ensure_ascii=False)[1:-1] for turn in marked]
    written = [each if drawn.random() < 0.5 else turn["content"] for each, turn in zip(escaped, marked, strict=True)]
    page = "|".join(itertools.compress(written, kept))
    places = defaultdict(list)
    for found in MARK.finditer(page):
        places[found[0]].append(found.start())
    assert [text.is_in(Unsearched(page), places) for text in texts] == kept
