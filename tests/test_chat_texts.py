"""Chat data of trainer/finetuning: every text of a message is in an example, or its line is reported.

    python -m pytest tests/test_chat_texts.py

On a CPU, with templates that do as known families do. Which tokens are learned: tests/test_chat.py.
"""

import itertools
import json
import re

import pytest
from conversations import FAMILIES, TURNS, refuse
from test_chat import learned_text

from trainer.data import DataError

pytest.importorskip("transformers", reason="needs transformers: pip install -e '.[hf]'")
pytest.importorskip("hypothesis", reason="needs hypothesis: ./launch.sh install")
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.filterwarnings("error")

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

    @settings(max_examples=150, derandomize=True, deadline=None, database=None, suppress_health_check=HealthCheck,
              phases=[Phase.generate, Phase.shrink])  # fmt: skip
    @given(lines())
    def check(line):
        try:
            stream = batches([line], made=made, seqlen=10_000, vocab=9999)
        except DataError as error:
            assert re.search(r"line 1: expected .*(message \d+|answer|template)", str(error)), error
            return
        shown = "\n".join(stream.preview(i, False) for i in range(len(stream.data.chosen)))
        assert not [word for word in re.findall(r"w\d+x", json.dumps(line)) if word not in shown], shown
        good.append(line)

    check()
    assert len(good) > 20 or template == "short", len(good)


DROPPED = [
    ("no developer", [dict(role="developer", content="a"), USER, ANSWER], "no 'a' of the content in message 1 (dev"),
    ("no developer", [dict(role="developer", content="user"), USER, ANSWER], "no 'user' of the content in message 1"),
    ("content alone", [USER, ANSWER | dict(reasoning_content="Hm.")], "no 'Hm.' of the reasoning_content in message 2"),
    ("content alone", [USER | dict(name="Bob"), ANSWER], "no 'Bob' of the name in message 1 (user); give it a role"),
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
        refuse(f"expected what the chat template knows, found {[*wrong][0]}, which",
            batches, lines, template, template_args=wrong)


def test_other_keys_of_a_line_are_named_in_the_summary(batches):
    lines = dict(messages=TURNS, source="a"), dict(text="a", source="b", id=None), dict(messages=TURNS, source="")
    stream = batches(lines)
    assert "1 with 'source' beside messages, which is not read, 1 with 'source' beside text" in stream.description
