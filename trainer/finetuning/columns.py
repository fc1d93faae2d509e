"""Examples as other programs write them, in the form that examples.py reads: {"messages": [..]}, or prompt and text.

    columns = Columns("auto", {"instruction": "question"})
    line, words = columns.read(line)        # words: what was recognised, "" for this program's own form; BadLine

ShareGPT's have "conversations", a list of {from, value}; Alpaca's have "instruction", perhaps "input", and "output".
"""

import json
from typing import NamedTuple

from trainer.finetuning import messages as forms
from trainer.finetuning.messages import BadLine

NEEDED = dict(
    messages=["messages"],
    prompt=["prompt", "completion"],
    sharegpt=["conversations"],
    alpaca=["instruction", "output"],
    text=["text"],
)
FORMATS = "auto", *NEEDED
OF_MESSAGES = "role", "content"  # keys in a message
OPTIONAL = "system", "input", "history", "tools"
NAMES = (*(name for names in NEEDED.values() for name in names), *OPTIONAL, *OF_MESSAGES)
# Keys beside an example by which others decide what is learned: (the value that is refused, ANY or a number but 1, what
# was expected, the way on). Other keys are named in the summary.
ANY, NOT_ONE = "any", "a number but 1"
OF_OTHERS = {
    "label": (False, "label true, which KTO gives to answers that are learned", forms.SKIP),
    "kto_tag": (False, "kto_tag true, which KTO gives to answers that are learned", forms.SKIP),
    "weight": (NOT_ONE, "weight in messages, not in the line", "put weight 0 or 1 into messages"),
    "train": (False, "train in messages, not in the line", "put train: false into messages"),
    "functions": (ANY, "tools, the newer name of functions", "add --columns tools=functions"),
    "documents": (ANY, "documents in the content of a message", "write them into a message"),
    **{
        name + plural: (ANY, f"text without {kind}", forms.SKIP)
        for name, kind in dict(image="images", video="videos", audio="sounds").items()
        for plural in ("", "s")
    },
    "input_ids": (ANY, "text, which finetune.py tokenises", "leave input_ids out"),
    "labels": (ANY, "text, for which finetune.py makes the labels", "leave labels out"),
}
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


def parsed(words: tuple[str, ...]) -> dict[str, str]:
    """{name here: column} of --columns NAME=COLUMN .. ValueError, one line, for anything else."""
    pairs = {word: word.partition("=") for word in words}
    for word, (name, _, column) in pairs.items():
        if name not in NAMES or not column:
            names = ", ".join(NAMES)
            raise ValueError(f"--columns {word}: must be NAME=COLUMN, where NAME is one of {names}")
    return {name: column for name, _, column in pairs.values()}


class Columns(NamedTuple):
    """format: one of FORMATS. columns: {name here: name in the data}, of a line or of its messages."""

    format: str
    columns: dict[str, str]

    def read(self, line: dict) -> tuple[dict, str]:
        """A line in the form of examples.py, and what it was. Raises BadLine."""
        line = dict(line)
        values = {}
        for name, column in self.columns.items():
            if column in line and name not in OF_MESSAGES:
                values[name] = line.pop(column)
            elif name not in (*OF_MESSAGES, *OPTIONAL):
                found = ", ".join(line)[:200] or "no key"
                raise BadLine(f"the column {column} of --columns", found)
        line |= values
        check_keys(line)
        kind = self.format if self.format != "auto" else _kind(line)
        missing = [name for name in NEEDED.get(kind, ()) if not forms.there(line.get(name))]
        if missing:
            raise BadLine(f"{' and '.join(NEEDED[kind])} (--format {kind})", f"no {missing[0]}")
        if kind == "alpaca":
            return _of_alpaca(line)
        if kind == "sharegpt" or (kind == "messages" and {*OF_MESSAGES} & {*self.columns}):
            return self.of_conversations(line, NEEDED[kind][0])
        if kind == "messages" and forms.there(line.get("system")):
            line = _with_system(
                line, forms.objects(line["messages"], "messages, a list of messages")
            )
        if self.format == "auto":
            return line, ""
        others = {name for other, names in NEEDED.items() if other != kind for name in names}
        own = {key: value for key, value in line.items() if key not in others}
        return own, f"read as --format {kind} says"

    def of_conversations(self, line: dict, key: str) -> tuple[dict, str]:
        """A line of which a key holds the messages, under names of ShareGPT or of --columns."""
        turns = forms.objects(line.pop(key), f"{key}, a list of messages")
        usual = ("from", "value") if turns and "from" in turns[0] else OF_MESSAGES
        role, content = map(self.columns.get, OF_MESSAGES, usual)
        made = [
            _message(turn, f" in message {i}", role, content) for i, turn in enumerate(turns, 1)
        ]
        return _with_system(line, made), f"read as ShareGPT's: {key} of {role} and {content}"


def check_keys(line: dict) -> None:
    """Raises BadLine for a key of OF_OTHERS with a value that would decide what is learned."""
    for key, (wrong, expected, fix) in OF_OTHERS.items():
        value = line.get(key)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        refused = {ANY: forms.there(value), NOT_ONE: number and value != 1}
        if refused.get(wrong, value is False):
            shown = json.dumps(value, default=str)[:40]
            raise BadLine(expected, f"{key} {shown} in a line to train on", fix)


def _kind(line: dict) -> str:
    """What an example is by its keys; "" if nothing of it is known."""
    for kind, names in NEEDED.items():
        if all(forms.there(line.get(name)) for name in names):
            return kind
    return ""


def _with_system(line: dict, turns: list[dict]) -> dict:
    """A line with these messages, after that of its key "system" if it has one."""
    system = line.pop("system", None)
    first = [dict(role="system", content=system)] if forms.there(system) else []
    if first and turns[0].get("role") in ("system", "developer"):
        raise BadLine(
            "one system message", "the key system, and messages that begin with a system message"
        )
    return line | dict(messages=first + turns)


def _message(turn: dict, where: str, role: str, content: str) -> dict:
    """A message by the names of this program. Raises BadLine."""
    if role not in turn or (content not in turn and "tool_calls" not in turn):
        raise BadLine(f"{role} and {content} in each message", ", ".join(turn)[:100] + where)
    speaker = turn[role]
    if speaker not in ROLES:
        raise BadLine(f"one of the roles {', '.join(ROLES)}", f"{str(speaker)[:40]!r}{where}")
    rest = {key: value for key, value in turn.items() if key not in (role, content)}
    message = dict(role=ROLES[speaker], content=turn.get(content))
    if speaker == "function_call":
        calls = forms.loaded(turn[content], f"function calls as JSON{where}")
        calls = calls if isinstance(calls, list) else [calls]
        made = [dict(type="function", function=call) for call in calls]
        message |= dict(content="", tool_calls=made)
    return message | rest


def _of_alpaca(line: dict) -> tuple[dict, str]:
    """Instruction and input are the question, a blank line between them; history holds earlier pairs."""
    pairs = line.pop("history", None) or []
    if not isinstance(pairs, list) or not all(
        isinstance(pair, list) and len(pair) == 2 for pair in pairs
    ):
        raise BadLine("history, a list of pairs", json.dumps(pairs)[:60])
    parts = filter(forms.there, (line.pop("instruction"), line.pop("input", None)))
    try:
        question = "\n\n".join(parts)
    except TypeError as error:
        raise BadLine("instruction and input as text", str(error)) from error
    turns = [
        dict(role=role, content=text)
        for pair in [*pairs, (question, line.pop("output"))]
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]
    return _with_system(line, turns), "read as Alpaca's: instruction, input and output"
