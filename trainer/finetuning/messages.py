"""Messages of a conversation in one form, and the test that a chat template renders every text of them.

    turns = [cleaned(message, number) for number, message in enumerate(messages, 1)]    # BadLine for what has no form
    marked, texts = with_marks(turns)
    lost = [text for text in texts if not text.is_in(render(marked), places)]

In the one form content and reasoning are a string (a list of text parts is joined), the arguments of a tool call are an
object (a string of JSON is parsed), and what is null or empty is not there.

For the test the conversation is rendered once more with each text between two marks, letters of a script that no one
writes today. A text that the template drops, cuts or changes lacks them, even if the same words stand somewhere else.
"""

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from trainer.finetuning.sources import parsed
from trainer.terminal.text import one_line

ROLES = "system", "developer", "user", "assistant", "tool"
# The last three: names of one thing.
PROSE = "content", "reasoning_content", "reasoning", "thinking"
FLAGS = "weight", "train"  # of a message: 0 or false if it is not learned
# Tell which result belongs to which call; templates need not write them.
LINKS = "tool_call_id", "id", "type", "index"
LEAVE_OUT = ", or skip such lines with --bad-lines skip"  # not for who has left them out
SKIP = f"correct the line{LEAVE_OUT}"
# Letters of Tangut: printable, so that no escape is made of them.
FIRST_MARK = 0x17000
MARKS = 0x1000
MARK = re.compile(f"[{chr(FIRST_MARK)}-{chr(FIRST_MARK + MARKS - 1)}]")
TAG = re.compile(r"(</?\w+>|\[/?\w+\])")  # where templates cut a text: before and after <think>
CORE = re.compile(r"\S(?:.*\S)?", re.DOTALL)  # what is left by templates that strip a text


class BadLine(Exception):
    """A line that cannot be used: what was expected, what was found, the way on."""

    def __init__(self, expected: str, found: str, fix: str = SKIP):
        super().__init__(expected, found, fix)


class Text(NamedTuple):
    """A piece of a message that has to be rendered."""

    number: int  # of the message, from 0
    key: str  # of the message
    text: str
    mark: str  # around it; empty if it has none

    def is_in(self, rendering: str, places: dict[str, list[int]] | None) -> bool:
        """Whether it is there: as it is, or as it stands in a string of JSON or Python. places: where each mark is;
        None: the rendering has none."""
        escaped = (json.dumps(self.text, ensure_ascii=ascii)[1:-1] for ascii in (False, True))
        in_python = dict(true="True", false="False").get(self.text, repr(self.text)[1:-1])
        written = self.text, *escaped, in_python
        if places is None or not self.mark:
            return any(text in rendering for text in written)
        # At its marks alone: a search for each text takes time that grows with the square of the turns.
        return any(
            rendering.startswith(self.mark + text + self.mark, at)
            for at in places[self.mark]
            for text in written
        )


def loaded(text: Any, expected: str) -> Any:
    """What a string of JSON holds; anything else as it is. Raises BadLine."""
    if not isinstance(text, str):
        return text
    try:
        return parsed(text.encode())
    except (ValueError, RecursionError) as error:
        raise BadLine(expected, one_line(error, kind=False)) from error


def objects(value: Any, expected: str) -> list[dict]:
    """A list of JSON objects, which may be a string of JSON. Raises BadLine."""
    value = without_nulls(loaded(value, expected))
    if not isinstance(value, list) or not value or not all(isinstance(x, dict) for x in value):
        found = "a list with other values" if isinstance(value, list) else type(value).__name__
        raise BadLine(expected, found if there(value) else "none")
    return value


def strings(value: Any) -> Iterator[str]:
    """All strings in a value of JSON, those that are keys among them."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        parts = value if isinstance(value, list) else [*value, *value.values()]
        for part in parts:
            yield from strings(part)


def there(value: Any) -> bool:
    """Whether a value is neither null nor empty. 0 and false are there."""
    return value is not None and value not in ("", [], {})


def without_nulls(value: Any) -> Any:
    """A value of JSON without the keys whose value is null: in a table a row has them because others do."""
    if isinstance(value, dict):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value


def is_learned(message: dict, where: str) -> bool:
    """Whether the flags of a message, if it has some, say that it is learned. Raises BadLine for others than those."""
    flags = [message[name] for name in FLAGS if message.get(name) is not None]
    if flags not in ([], [0], [1], [0, 0], [1, 1]):
        raise BadLine("weight 0 or 1, train true or false", f"{str(flags)[:60]}{where}")
    if any(flags) and message["role"] != "assistant":
        raise BadLine("weight 1 only in messages of the assistant", f"1{where}")
    return message["role"] == "assistant" and all(flags)


def cleaned(message: dict, where: str) -> dict:
    """A message in the one form, without its flags. where: " in message 2". Raises BadLine."""
    role = message.get("role")
    if role not in ROLES:
        raise BadLine(f"one of the roles {', '.join(ROLES)}", f"{str(role)[:40]!r}{where}")
    turn = dict(role=role, content="")
    for key, value in message.items():
        if key in PROSE:
            turn[key] = _prose(value, key + where)
        elif key == "tool_calls" and there(value):
            expected = f"tool_calls{where} as a list of objects or as JSON"
            turn[key] = [_call(call, where) for call in objects(value, expected)]
        elif key not in FLAGS and there(value):
            turn[key] = value
    turn = {key: value for key, value in turn.items() if there(value) or key == "content"}
    texts = (text for key in turn if key not in ("role", *LINKS) for text in strings(turn[key]))
    if not any(map(str.strip, texts)):
        raise BadLine("text as content", "empty content" + where)
    return turn


def _prose(value: Any, where: str) -> str:
    """A text, or the parts of a list joined. What is more than a text, such as an image, is refused."""
    texts = []
    for part in value if isinstance(value, list) else [value]:
        if isinstance(value, list) and isinstance(part, dict):
            kept = {key: each for key, each in part.items() if there(each)}
            part = kept.pop("text", "") if kept.pop("type", "text") == "text" else kept
            part = kept or part
        if not isinstance(part, str | None):
            found = f"{type(part).__name__} in {where}"
            raise BadLine("text, or a list of text parts, as content", found)
        texts.append(part or "")
    return "".join(texts)


def _call(call: dict, where: str) -> dict:
    """A tool call of which the arguments are an object."""
    call = {key: value for key, value in call.items() if there(value) or key == "arguments"}
    function = call.get("function")
    if isinstance(function, dict):
        return call | dict(function=_call(function, where))
    if function is not None:
        raise BadLine("an object as function of a tool call", type(function).__name__ + where)
    if "arguments" in call:
        expected = f"arguments of a tool call{where} as an object or as JSON"
        call["arguments"] = loaded(call["arguments"] or {}, expected)
        if not isinstance(call["arguments"], dict):
            raise BadLine(expected, type(call["arguments"]).__name__)
    return call


def as_sent(turn: dict) -> dict:
    """A message with tool calls as servers send it, which a few templates need: arguments as a string, no content."""

    def sent(call: dict) -> dict:
        if "function" in call:
            return call | dict(function=sent(call["function"]))
        return call | dict(arguments=json.dumps(call.get("arguments", {}), ensure_ascii=False))

    if "tool_calls" not in turn:
        return turn
    return turn | dict(content=turn["content"] or None, tool_calls=[*map(sent, turn["tool_calls"])])


def called(turns: list[dict]) -> set[str]:
    """The names of the functions that messages call."""
    calls = (call for turn in turns for call in turn.get("tool_calls", ()))
    names = (call.get("function", call).get("name") for call in calls)
    return {name for name in names if isinstance(name, str)}


def with_marks(turns: list[dict]) -> tuple[list[dict], list[Text]]:
    """The conversation with each of its texts between marks of its own, and these texts."""
    texts: list[Text] = []

    def keep(text: str, mark: str = "") -> str:
        texts.append(Text(number, key, text, mark))
        return mark + text + mark

    def wrap(core: re.Match) -> str:
        return keep(core[0], chr(FIRST_MARK + len(texts) % MARKS))

    def marked(value: Any, links: tuple[str, ...] = ()) -> Any:
        """A value of JSON with marks around its strings. links: keys of the objects in a list that are left alone."""
        if isinstance(value, str):
            pieces = TAG.split(value) if TAG.sub("", value).strip() else [value]
            tags = [
                keep(piece) if i % 2 else CORE.sub(wrap, piece) for i, piece in enumerate(pieces)
            ]
            return "".join(tags)
        if isinstance(value, list):
            return [marked(each, links) for each in value]
        if isinstance(value, dict):
            names = [name for name in value if name not in links]
            for name in names:
                if name not in ("function", "name", "arguments"):
                    keep(name)
            return value | {name: marked(value[name]) for name in names}
        if value is not None:
            keep(json.dumps(value))
        return value

    made: list[dict] = []
    names = called(turns)
    for turn in turns:
        number = len(made)
        made.append(dict(turn))
        for key, value in turn.items():
            # A result names the function, which its call has named.
            link = key == "name" and turn["role"] == "tool" and value in names
            if key not in ("role", *LINKS) and not link:
                made[-1][key] = marked(value, LINKS if key == "tool_calls" else ())
    return made, texts
