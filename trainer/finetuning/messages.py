"""Messages of a conversation in one form, and the test that a chat template renders every text of them.

    turns = [cleaned(message, number) for number, message in enumerate(messages, 1)]    # BadLine for what has no form
    marked, texts = with_marks(turns)
    lost = [text for text in texts if not text.is_in(render(marked))]

In the one form content and reasoning are a string (a list of text parts is joined), the arguments of a tool call are an
object (a string of JSON is parsed), and what is null or empty is not there.

For the test the conversation is rendered once more with each text between two marks, letters of a script that no one
writes today. A text that the template drops, cuts or changes lacks them, even if the same words stand somewhere else.
"""

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from trainer.distributed.terminal import one_line

ROLES = "system", "developer", "user", "assistant", "tool"
# The last three: names of one thing.
PROSE = "content", "reasoning_content", "reasoning", "thinking"
FLAGS = "weight", "train"  # of a message: 0 or false if it is not learned
# Tell which result belongs to which call; templates need not write them.
LINKS = "tool_call_id", "id", "type", "index"
LEAVE_OUT = ", or leave such lines out with --bad-lines skip"  # who left them out is not told so
SKIP = f"mend the line{LEAVE_OUT}"
# Letters of Tangut: printable, so that no escape is made of them.
FIRST_MARK = 0x17000
MARKS = 0x1000
MARK = re.compile(f"[{chr(FIRST_MARK)}-{chr(FIRST_MARK + MARKS - 1)}]")
TAG = re.compile(r"(</?\w+>|\[/?\w+\])")  # where templates cut a text: before and after <think>
CORE = re.compile(r"\S(?:.*\S)?", re.DOTALL)  # what is left by templates that strip a text


class BadLine(Exception):
    """(expected, found, fix): what DataError says of a line."""


class Text(NamedTuple):
    """A piece of a message that has to be rendered."""

    number: int  # of the message, from 1
    key: str  # of the message
    text: str
    mark: str  # around it; empty if it has none

    def is_in(self, rendering: str, marked: bool = True) -> bool:
        """Whether it is there: as it is, or as it stands in a string of JSON or Python."""
        mark = self.mark if marked else ""
        forms = [json.dumps(self.text, ensure_ascii=ascii)[1:-1] for ascii in (False, True)]
        forms += [
            self.text,
            repr(self.text)[1:-1],
            dict(true="True", false="False").get(self.text, self.text),
        ]
        return any(mark + each + mark in rendering for each in forms)


def loaded(text: Any, expected: str) -> Any:
    """What a string of JSON holds; anything else as it is. Raises BadLine."""
    if not isinstance(text, str):
        return text
    try:
        return json.loads(text, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise BadLine(expected, one_line(error, kind=False), SKIP) from error


def _object(pairs: list[tuple[str, Any]]) -> dict:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice[:40]!r} twice in one object")
    return made


def objects(value: Any, what: str) -> list[dict]:
    """A list of JSON objects, which may be a string of JSON. Raises BadLine."""
    value = loaded(value, f"{what}, a list of objects or its JSON")
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise BadLine(f"{what}, a list of objects or its JSON", "something else", SKIP)
    return value


def strings(value: Any) -> Iterator[str]:
    """All strings in a value of JSON, those that are keys among them."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for each in value:
            yield from strings(each)
    elif isinstance(value, dict):
        for each in (*value, *value.values()):
            yield from strings(each)


def there(value: Any) -> bool:
    """Whether a value is neither null nor empty. 0 and false are there."""
    return value is not None and value not in ("", [], {})


def is_learned(message: dict, number: int) -> bool:
    """Whether the flags of a message, if it has some, say that it is learned. Raises BadLine for others than those."""
    flags = {name: message[name] for name in FLAGS if message.get(name) is not None}
    told = (
        ", ".join(f"{name} {value!r}"[:60] for name, value in flags.items())
        + f" in message {number}"
    )
    if (
        any(value not in (0, 1) for value in flags.values())
        or len({*map(bool, flags.values())}) > 1
    ):
        raise BadLine("weight 0 or 1, train true or false", told, SKIP)
    if any(flags.values()) and message["role"] != "assistant":
        raise BadLine("weight 0 or no weight for what the assistant does not say", told, SKIP)
    return message["role"] == "assistant" and all(flags.values())


def cleaned(message: dict, number: int) -> dict:
    """A message in the one form, without its flags. Raises BadLine."""
    role = message.get("role")
    where = f" in message {number}"
    if role not in ROLES:
        raise BadLine(f"a role of {', '.join(ROLES)}", f"{str(role)[:40]!r}{where}", SKIP)
    turn = dict(role=role, content="")
    for key, value in message.items():
        if key in PROSE:
            turn[key] = _prose(value, key + where)
        elif key == "tool_calls" and there(value):
            turn[key] = [_call(call, where) for call in objects(value, "tool_calls" + where)]
        elif key not in FLAGS:
            turn[key] = value
    turn = {key: value for key, value in turn.items() if there(value) or key == "content"}
    if not any(
        _is_text(key, value) and any(map(str.strip, strings(value))) for key, value in turn.items()
    ):
        raise BadLine("text as content", "empty content" + where, SKIP)
    return turn


def _prose(value: Any, where: str) -> str:
    if isinstance(value, str) or not there(value):
        return value or ""
    texts = list(map(_text_of, value)) if isinstance(value, list) else [None]
    if None in texts:
        wrong = value[texts.index(None)] if isinstance(value, list) else value
        kind = isinstance(value, list) and isinstance(wrong, dict) and wrong.get("type")
        found = f"{str(kind or type(wrong).__name__)[:40]} in {where}"
        raise BadLine("text, or a list of text parts, as content", found, SKIP)
    return "".join(texts)


def _text_of(part: Any) -> str | None:
    """The text of a part of a list; None if it is anything else, or more."""
    if isinstance(part, dict) and {key for key in part if there(part[key])} <= {"type", "text"}:
        part = part.get("text", "") if part.get("type") in ("text", None) else None
    return part if isinstance(part, str) else None


def _call(call: dict, where: str) -> dict:
    call = {key: value for key, value in call.items() if there(value) or key == "arguments"}
    function = call.get("function")
    if function is not None and not isinstance(function, dict):
        raise BadLine("function of a tool call, an object", type(function).__name__ + where, SKIP)
    if function is not None:
        return call | dict(function=_call(function, where))
    if "arguments" in call:
        expected = f"arguments of a tool call{where}, an object or its JSON"
        call["arguments"] = loaded(
            call["arguments"] if there(call["arguments"]) else "{}", expected
        )
        if not isinstance(call["arguments"], dict):
            raise BadLine(expected, type(call["arguments"]).__name__, SKIP)
    return call


def as_sent(turn: dict) -> dict:
    """A message with tool calls as servers send it, which a few templates need: arguments as a string, no content."""
    if "tool_calls" not in turn:
        return turn

    def sent(call: dict) -> dict:
        if "function" in call:
            return call | dict(function=sent(call["function"]))
        return call | dict(arguments=json.dumps(call.get("arguments", {}), ensure_ascii=False))

    return turn | dict(
        content=turn["content"] or None, tool_calls=[sent(call) for call in turn["tool_calls"]]
    )


def _is_text(key: str, value: Any) -> bool:
    """Whether a key of a message holds text, which has to be rendered. Other names with one value may be switches."""
    return key in (*PROSE, "tool_calls") or (
        key not in ("role", *LINKS) and isinstance(value, list | dict)
    )


def switches(turn: dict) -> list[str]:
    """Keys of a message with one value that no one here knows."""
    return [
        key
        for key, value in turn.items()
        if key not in ("role", *LINKS) and not _is_text(key, value)
    ]


def with_marks(turns: list[dict]) -> tuple[list[dict], list[Text]]:
    """The conversation with each of its texts between marks of its own, and these texts."""
    texts: list[Text] = []
    marked = []
    for number, turn in enumerate(turns, 1):
        marked.append(dict(turn))
        for key, value in turn.items():
            if _is_text(key, value):
                marked[-1][key] = _Marker(number, key, texts).mark(
                    value, links=LINKS if key == "tool_calls" else ()
                )
    return marked, texts


class _Marker(NamedTuple):
    number: int
    key: str
    texts: list[Text]

    def mark(self, value: Any, links: tuple[str, ...] = ()) -> Any:
        """A value of JSON with marks around its strings. links: keys of the objects in a list that are left alone."""
        if isinstance(value, str):
            pieces = TAG.split(value) if TAG.sub("", value).strip() else [value]
            return "".join(
                self.keep(each) if i % 2 else CORE.sub(self.wrap, each)
                for i, each in enumerate(pieces)
            )
        if isinstance(value, list):
            return [self.mark(each, links) for each in value]
        if isinstance(value, dict):
            names = [name for name in value if name not in links]
            for name in names:
                if name not in ("function", "name", "arguments"):
                    self.keep(name)
            return value | {name: self.mark(value[name]) for name in names}
        if value is not None:
            self.keep(json.dumps(value))
        return value

    def wrap(self, core: re.Match) -> str:
        return self.keep(core[0], chr(FIRST_MARK + len(self.texts) % MARKS))

    def keep(self, text: str, mark: str = "") -> str:
        self.texts.append(Text(self.number, self.key, text, mark))
        return mark + text + mark
