"""Numbers, errors and tables as text for people. Imports no torch.

grouped(14550)                         # 14'550
counted(2, "row")                      # 2 rows
one_line(error)                        # ValueError: what it says, without line breaks
folded("memory   492 MiB resident, 481 MiB in step 1", 30)      # two lines
markdown([("run", ["a"]), ("ms", ["1.5"])])      # a table
"""

import re
import textwrap
from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """ "; did you mean X?" with up to three of `choices` that are spelled like `word` or hold it, or an empty one."""
    plain = {choice.strip("-").replace("-", "_"): choice for choice in choices if choice != word}
    key = word.strip("-").replace("-", "_")
    similar = (
        get_close_matches(key, plain, 3, 0.7)
        or [name for name in plain if len(key) > 2 and f"_{key}" in name][:3]
    )
    return f"; did you mean {' or '.join(plain[name] for name in similar)}?" if similar else ""


def one_line(error: BaseException, most: int = 300, kind: bool = True) -> str:
    """The text of an error without line breaks, `most` characters of it, after its type if `kind`."""
    return f"{type(error).__name__}: " * kind + " ".join(str(error).split())[:most]


def grouped(value: float | str | None, digits: int = 0, missing: str = "n/a") -> str:
    """A number as people read it, with `digits` behind the point: 14'550; a string as it is; `missing` for None."""
    if value is None:
        return missing
    return value if isinstance(value, str) else f"{value:,.{digits}f}".replace(",", "'")


def counted(number: int, what: str) -> str:
    """1 line; 14'550 lines."""
    return f"{grouped(number)} {what}{'s' * (number != 1)}"


def on_ranks(number: int) -> str:
    """ " on 4 ranks", or nothing for one."""
    return f" on {number} ranks" if number > 1 else ""


def fitted(lines: Iterable[str], width: int = 100) -> list[str]:
    """Lines of at most `width` columns: a longer one goes on indented. Names and paths stay in one piece."""
    whole = dict(break_long_words=False, break_on_hyphens=False, subsequent_indent="    ")
    return [
        part
        for line in lines
        for part in (textwrap.wrap(line, width, **whole) if len(line) > width else [line])
    ]


HEAD = re.compile(
    r"(?:\w+(?: it)?  +| +)(?=\S)"
)  # how a line of a result begins: "memory   ", "draw it  "
COMMANDS = "repeat   ", "draw it  "
COMMENTED = re.compile(r"((?:next {5}| {9})\S.*?) +# (.*)")


def folded(text: str, width: int) -> str:
    """A text for a terminal of `width` columns: a longer line goes on indented, and none breaks within a word or, where
    two spaces part its facts, within a fact. A command goes on after a backslash, so that it can be pasted; only a word
    wider than the terminal is left to it."""
    return "\n".join(part for line in text.split("\n") for part in _fold(line, width))


def _fold(line: str, width: int) -> list[str]:
    if len(line) <= width:
        return [line]
    if commented := COMMENTED.fullmatch(line):
        return [*_fold(commented[1], width), *_fold(f"{' ' * 9}# {commented[2]}", width)]
    head = HEAD.match(line)
    indent = " " * (len(head[0]) if head and len(head[0]) == 9 else 4)
    between, end = " ", ""
    if line.startswith(COMMANDS):
        words = re.findall(r"(?:[^\s']|'[^']*')+", line[9:])  # a quoted name is one
        words[0] = line[:9] + words[0]
        end = " \\"
    else:
        words = re.split(r"(?<=\S)  (?=\S)", line)
        between = "  "
        if len(words) == 1 or max(map(len, words)) + len(indent) > width:
            whole = dict(break_long_words=False, break_on_hyphens=False)
            start = head[0] if head else ""
            how = dict(initial_indent=start, subsequent_indent=indent, **whole)
            return textwrap.wrap(line[len(start) :], width, **how)
    lines = [words[0]]
    for word in words[1:]:
        if len(lines[-1] + between + word + end) > width:
            lines[-1] += end
            lines.append(indent + word)
        else:
            lines[-1] += between + word
    return lines


def data_lines(description: str) -> list[str]:
    """What a run trains on, each fact of it (up to a ";" outside of parentheses) on a line of its own."""
    facts = [""]
    for part in description.split("; "):
        if facts[-1].count("(") > facts[-1].count(")"):
            facts[-1] += f"; {part}"
        else:
            facts.append(part)
    data, *more = facts[1:]
    return fitted([f"data {data}", *(f"     {fact}" for fact in more)])


def _in_a_cell(text: str) -> str:
    return " ".join(text.replace("|", "/").splitlines())


def markdown(columns: list[tuple[str, list[str]]]) -> str:
    """A Markdown table of (title, cells) columns. One with a number in it stands to the right, but for the first."""
    right = [
        i > 0 and any(text[:1].isdigit() for text in texts) for i, (_, texts) in enumerate(columns)
    ]
    head = [
        f"| {' | '.join(title for title, _ in columns)} |",
        f"|{''.join('---:|' if r else '---|' for r in right)}",
    ]
    lines = zip(*(texts for _, texts in columns), strict=True)
    return "\n".join(head + [f"| {' | '.join(map(_in_a_cell, line))} |" for line in lines])
