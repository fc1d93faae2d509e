"""Examples as other programs write them, in the form that examples.py reads: {"messages": [..]}, or prompt and text.

    columns = Columns("auto", {"instruction": "question"})
    line, words = columns.read(line)        # words: what was recognised, "" for this program's own form; BadLine

ShareGPT's have "conversations", a list of {from, value}; Alpaca's have "instruction", perhaps "input", and "output".
"""

import json
from typing import Any, NamedTuple

from trainer.finetuning import messages as forms
from trainer.finetuning.messages import SKIP, BadLine

FORMATS = "auto", "messages", "prompt", "text", "sharegpt", "alpaca"
NAMES = (
    "messages",
    "prompt",
    "completion",
    "text",
    "tools",
    "conversations",
    "system",
    "instruction",
    "input",
    "output",
    "history",
    "role",
    "content",
)
OF_MESSAGES = "role", "content"  # the names among them of keys in a message
ROLES = dict(
    human="user",
    user="user",
    gpt="assistant",
    assistant="assistant",
    bot="assistant",
    chatgpt="assistant",
    model="assistant",
    system="system",
    tool="tool",
    observation="tool",
    function_response="tool",
    function_call="assistant",
    developer="developer",
)
NEEDED = dict(
    messages=["messages"],
    prompt=["prompt", "completion"],
    text=["text"],
    sharegpt=["conversations"],
    alpaca=["instruction", "output"],
)


def parsed(words: tuple[str, ...]) -> dict[str, str]:
    """{name here: column} of --columns NAME=COLUMN .. ValueError, one line, for anything else."""
    found = {}
    for word in words:
        name, equals, column = word.partition("=")
        if name not in NAMES or not equals or not column:
            raise ValueError(
                f"--columns {word}: must be NAME=COLUMN, with a name of {', '.join(NAMES)}"
            )
        found[name] = column
    return found


class Columns(NamedTuple):
    """format: one of FORMATS. columns: {name here: name in the data}, of a line or of its messages."""

    format: str
    columns: dict[str, str]

    def read(self, line: dict) -> tuple[dict, str]:
        """A line in the form of examples.py, and what it was. Raises BadLine."""
        line = dict(line)
        own = {name: column for name, column in self.columns.items() if name not in OF_MESSAGES}
        optional = ("system", "input", "history", "tools")
        if absent := [
            column for name, column in own.items() if column not in line and name not in optional
        ]:
            raise BadLine(
                f"the column {absent[0]} of --columns", ", ".join(line)[:200] or "no key", SKIP
            )
        values = {name: line[column] for name, column in own.items() if column in line}
        line = {key: value for key, value in line.items() if key not in own.values()} | values
        kind = self.format if self.format != "auto" else _kind(line)
        if lacks := [name for name in NEEDED.get(kind, ()) if not forms.there(line.get(name))]:
            raise BadLine(f"{' and '.join(NEEDED[kind])} (--format {kind})", f"no {lacks[0]}", SKIP)
        if kind == "alpaca":
            return _of_alpaca(line)
        if kind == "sharegpt":
            return self.of_conversations(line)
        if forms.there(line.get("messages")) and {*OF_MESSAGES} & self.columns.keys():
            return self.of_conversations(line, "messages")
        if self.format == "auto":
            return line, ""
        others = {name for other, names in NEEDED.items() if other != kind for name in names}
        return {
            key: value for key, value in line.items() if key not in others
        }, f"read as --format {kind} says"

    def of_conversations(self, line: dict, key: str = "conversations") -> tuple[dict, str]:
        """A line of which a key holds the messages, under names of ShareGPT or of --columns."""
        turns = forms.loaded(line.pop(key), f"{key}, a list of messages")
        if (
            not isinstance(turns, list)
            or not turns
            or not all(isinstance(turn, dict) for turn in turns)
        ):
            raise BadLine(f"{key}, a list of messages", "none or something else", SKIP)
        usual = ("from", "value") if "from" in turns[0] else OF_MESSAGES
        names = [
            self.columns.get(name, other) for name, other in zip(OF_MESSAGES, usual, strict=True)
        ]
        made = [_message(turn, number, *names) for number, turn in enumerate(turns, 1)]
        return _with_system(line, made), f"read as ShareGPT's: {key} of {names[0]} and {names[1]}"


def _kind(line: dict) -> str:
    """What an example is by its keys; "" if nothing of it is known."""
    for kind in ("messages", "prompt", "sharegpt", "alpaca"):
        if all(forms.there(line.get(name)) for name in NEEDED[kind]):
            return kind
    return ""


def _with_system(line: dict, turns: list[dict]) -> dict:
    """A line with these messages, after that of its key "system" if it has one."""
    system = line.pop("system", None)
    if forms.there(system):
        turns = [dict(role="system", content=system), *turns]
    return line | dict(messages=turns)


def _message(turn: dict, number: int, role: str, content: str) -> dict:
    """A message by the names of this program. Raises BadLine."""
    if role not in turn or content not in turn and "tool_calls" not in turn:
        raise BadLine(
            f"{role} and {content} in each message",
            f"{', '.join(turn)[:100]} in message {number}",
            SKIP,
        )
    said = turn[role]
    if said not in ROLES:
        raise BadLine(
            f"a role of {', '.join(ROLES)}", f"{str(said)[:40]!r} in message {number}", SKIP
        )
    rest = {key: value for key, value in turn.items() if key not in (role, content)}
    if said != "function_call":
        return dict(role=ROLES[said], content=turn.get(content)) | rest
    calls = forms.loaded(turn[content], f"a call or calls of functions as JSON in message {number}")
    made = [
        dict(type="function", function=call)
        for call in (calls if isinstance(calls, list) else [calls])
    ]
    return dict(role="assistant", content="", tool_calls=made) | rest


def _of_alpaca(line: dict) -> tuple[dict, str]:
    """Instruction and input are the question, a blank line between them; history holds earlier pairs."""
    pairs = line.pop("history", None) or []
    if not isinstance(pairs, list) or not all(
        isinstance(pair, list) and len(pair) == 2 for pair in pairs
    ):
        raise BadLine("history, a list of pairs", json.dumps(pairs)[:60], SKIP)
    asked: Any = [line.pop("instruction"), line.pop("input", None)]
    parts = [part for part in asked if forms.there(part)]
    if not all(isinstance(part, str) for part in parts):
        raise BadLine(
            "instruction and input as text",
            " and ".join(type(part).__name__ for part in parts),
            SKIP,
        )
    turns = []
    for question, answer in [*pairs, ("\n\n".join(parts), line.pop("output"))]:
        turns += [dict(role="user", content=question), dict(role="assistant", content=answer)]
    return _with_system(line, turns), "read as Alpaca's: instruction, input and output"
