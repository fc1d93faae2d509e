"""How the value of a flag carries what belongs to it, --remat both:0.5:core, and how command lines said it before.

    parts = parts_of(Training, System, Output)     # fields that are Annotated[.., Suppress, Part(..)], by name
    unfold(["--remat", "both:0.5"], parts)         # (["--remat", "both"], {"remat_ratio": 0.5})
    folded(dict(remat="both", remat_ratio=0.5), parts)          # {"remat": "both:0.5"}
    modern("--remat both --remat-ratio 0.5".split(), parts)     # (["--remat", "both:0.5"], [a line that says so])

A part was a flag of its own before, with the name of its field. Code and rows go on using that name. Imports no torch.
"""

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from types import NoneType
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from trainer.distributed.terminal import did_you_mean

FLAG = re.compile(r"--?[A-Za-z]")  # how a word begins that is no value: -1 is one
# Values of before: (field, value) -> today's.
RENAMED = {("attn", "sdpa"): "auto", ("compile", "regions"): "blocks"}
# Before, these meant nothing beside some values, and no rule said so: such commands still run.
IDLE = {"chunk", "replicas", "remat_ratio", "group", "tags"}


class Part(NamedTuple):
    of: str  # the field whose flag carries it
    values: str  # a pattern: the values of that field that have this part
    word: str = (
        ""  # "core": written so, and then `value`; "limit=": before the value; "": the value alone
    )
    value: Any = True
    whole: bool = False  # written in the place of the flag's own value, which is then its default
    alone: str = (
        ""  # the flag's value where an old command line names the part alone; "": its default
    )


class Known(NamedTuple):
    part: Part
    kind: Any
    usual: Any
    owner: str  # the usual value of the flag that carries it

    def text(self, value: Any) -> str:
        """As it stands after a colon: core, 0.5, limit=2.0, tags=a,b."""
        if self.part.word and not self.part.word.endswith("="):
            return self.part.word
        return self.part.word + (",".join(value) if isinstance(value, tuple) else str(value))

    def fits(self, value: Any) -> bool:
        return re.fullmatch(self.part.values, str(value)) is not None

    @property
    def carriers(self) -> str:
        """The values that have this part, in a message."""
        return self.part.values if re.fullmatch(r"[\w|]+", self.part.values) else "VALUE"


Parts = dict[str, Known]


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


@functools.cache
def parts_of(*groups: type) -> Parts:
    """The fields of groups of flags that are parts of other flags."""
    found = {}
    for group in filter(is_dataclass, groups):
        kinds = get_type_hints(group)
        for name, kind in get_type_hints(group, include_extras=True).items():
            for part in getattr(kind, "__metadata__", ()):
                if isinstance(part, Part):
                    owner = part.alone or str(getattr(group, part.of))
                    found[name] = Known(part, kinds[name], getattr(group, name), owner)
    return found


def any_of(choices: Sequence) -> str:
    """("a", "b", "c") -> a, b or c."""
    *most, last = map(str, choices)
    return f"{', '.join(most)} or {last}" if most else last


def plain(kind: Any) -> Any:
    """The type of one value: of several of them, or of it or None."""
    kind = get_args(kind)[0] if get_origin(kind) is tuple else kind
    others = [each for each in get_args(kind) if each is not NoneType]
    return others[0] if NoneType in get_args(kind) else kind


def unfit(value: str, kind: Any) -> str | None:
    """Why `value` is no value of a type: int, float, str, a Literal, or one or None or several of them. None: it is."""
    kind = plain(kind)
    if get_origin(kind) is Literal and value not in (choices := get_args(kind)):
        return f"must be {any_of(choices)}{did_you_mean(value, choices)}"
    if kind in (int, float):
        try:
            kind(value)
        except ValueError:
            return f"must be a {'whole ' * (kind is int)}number"
    return None


def typed(text: str, kind: Any) -> Any:
    """A text that is not `unfit`, as a value."""
    if get_origin(kind) is tuple:
        return tuple(text.split(","))
    return plain(kind)(text) if plain(kind) in (int, float) else text


def unfold(argv: Sequence[str], parts: Parts) -> tuple[list[str], dict[str, Any]]:
    """The words of a command line without the parts that values carry, and these by name. Of a flag that comes twice
    the last one counts, with its parts. ValueError for a part that is none."""
    items = []
    found = {}
    for name, *values in _items(argv):
        own = {field: known for field, known in parts.items() if flag(known.part.of) == name}
        if own and values:
            value, read = _read(name, values[0], own)
            items = [item for item in items if item[0] != name]
            found = {field: each for field, each in found.items() if field not in own} | read
            values[0] = value
        items += [[name, *values]] if values[:1] != [None] else []
    return [word for item in items for word in item], found


def _read(name: str, text: str, own: Parts) -> tuple[str | None, dict[str, Any]]:
    """The value of a flag itself, None for its default, and of its parts."""
    for field, (part, kind, *_) in own.items():
        values = {part.word: part.value} if part.word else {each: each for each in get_args(kind)}
        if part.whole and text in values:
            return None, {field: values[text]}
    own = {field: known for field, known in own.items() if not known.part.whole}
    value, *rest = text.split(":") if own else [text]
    written = {known.part.word: field for field, known in own.items() if known.fits(value)}
    found = {}
    problem = ""
    for each in rest:
        key, given, _ = each.partition("=")
        field = (written.get(key + given) or written.get(given)) if each else None
        if field is None:
            usage = [f"{known.carriers}:{shown(other, known)}" for other, known in own.items()]
            problem = f"'{each[:50]}' is no part of {value}; there are {', '.join(usage)}"
        elif field in found:
            problem = f"{shown(field, own[field])} stands there twice"
        elif each == own[field].part.word:
            found[field] = own[field].part.value
        else:
            content = each.removeprefix(own[field].part.word)
            if why := unfit(content, own[field].kind):
                problem = f"{shown(field, own[field])} {why}"
            else:
                found[field] = typed(content, own[field].kind)
        if problem:
            raise ValueError(f"{name} {text[:50]}: {problem}{did_you_mean(each, written)}")
    return value, found


def shown(name: str, known: Known) -> str:
    """A part in a message: core, limit=LIMIT, RATIO."""
    word = known.part.word
    if word and not word.endswith("="):
        return word
    return word + (word[:-1] or name.rpartition("_")[2]).upper()


def label(name: str, parts: Parts) -> str:
    """A field in a message that tells its value apart: --depth, --optimizer's beta1."""
    return f"{flag(parts[name].part.of)}'s {name}" if name in parts else flag(name)


def folded(values: Mapping[str, Any], parts: Parts) -> dict[str, Any]:
    """Values of fields as a command line has them: parts in the value of the flag that carries them. Those of a value
    that has no such part mean nothing, and are left out."""
    found = {name: value for name, value in values.items() if name not in parts}
    for name, known in parts.items():
        part = known.part
        value = values.get(name, known.usual)
        value = tuple(value) if isinstance(value, list) else value
        if part.of not in values or not known.fits(values[part.of]) or value is None:
            continue
        if part.whole and (value != known.usual or not part.word):
            found[part.of] = known.text(value)
        elif value != known.usual:
            found[part.of] = f"{found[part.of]}:{known.text(value)}"
    return found


def modern(argv: Sequence[str], parts: Parts) -> tuple[list[str], list[str]]:
    """An old command line in today's spelling, and a line for each flag that is written anew. ValueError for one that
    cannot be: its flag, as given, does not have that part."""
    words = []
    lines = []
    old = {}
    for name, *values in _items(argv):
        field = name.replace("-", "_").removeprefix("__").removeprefix("no_")
        if now := RENAMED.get((field, *values)):
            lines.append(f"{name} {values[0]}: is written {name} {now} now")
            values = [now]
        if field not in parts or not name.startswith("--"):
            words += [name, *values]
            continue
        kind = parts[field].kind
        most = 0 if kind is bool else len(values) if get_origin(kind) is tuple else 1
        said = " ".join([name, *values])[:80]
        if len(values) != most:
            raise ValueError(f"{said}: takes {['no', 'one'][min(most, 1)]} value")
        for each in values:
            if problem := unfit(each, kind):
                raise ValueError(f"{said}: {problem}")
        on = name[2:5] != "no-"
        old[field] = said, on if kind is bool else typed(",".join(values), kind)
    for field in [
        field for field in parts if field in old
    ]:  # in the order in which parts are written
        said, value = old[field]
        lines.append(f"{said}: {_put(words, field, said, value, parts[field])}")
    return words, lines


def _items(argv: Sequence[str]) -> list[list[str]]:
    """The flags of a command line, each with the words that follow it. --depth=8 is --depth and 8."""
    items = []
    for word in argv:
        name, given, text = word.partition("=")
        if FLAG.match(word):
            name = name.replace("_", "-")
            items.append(
                [name, text] if given and not FLAG.match(text) else [name + word[len(name) :]]
            )
        elif items:
            items[-1].append(word)
        else:
            items.append([word])
    return items


def _put(words: list[str], field: str, said: str, value: Any, known: Known) -> str:
    """Puts the value of an old flag, `said`, into that of the flag that carries it now; says what it has become."""
    name = flag(known.part.of)
    text = known.text(value)
    own = known.owner
    if value == known.usual:
        return f"leave it out, it is the default of what {name} carries now"
    if name in words[:-1]:
        own = words[len(words) - words[::-1].index(name)]  # its last value
    if field in IDLE and not known.fits(own.split(":")[0]):
        return f"leave it out, {name} {own} has no such part"
    if not known.fits(own.split(":")[0]):
        now = text if known.part.whole else f"{known.carriers}:{text}"
        raise ValueError(f"{said}: is written {name} {now} now, this is {name} {own}")
    own = text if known.part.whole else f"{own}:{text}"
    if name not in words[:-1]:
        words += [name, own]
    words[len(words) - words[::-1].index(name)] = own
    return f"is written {name} {own} now"
