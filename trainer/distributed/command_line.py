"""What is wrong with a command line, in one line: the flag, its value, what would fit, what may have been meant.

    parse(Config, sys.argv[1:], check, "main.py", "Trains.")         # a Config, or one line and exit code 2
    explain(["--mdoe", "none"], {"mode": Literal["none", "all"]})    # "--mdoe: no such flag; did you mean --mode?"

Tyro parses. It answers in boxes, which show every flag that shares a syllable, and None among the choices; this module
says the same in the form of all other errors. It imports no torch.
"""

import io
import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from dataclasses import is_dataclass, replace
from typing import Any, get_origin, get_type_hints

import tyro
from tyro.conf import arg

from trainer.distributed.spelling import FLAG, flag, modern, parts_of, unfit, unfold
from trainer.distributed.terminal import answering, did_you_mean, fail, tell

HELP = "--help lists all flags"
OTHERS = dict(
    batch_size="batch",
    micro_batch_size="batch",
    layers="depth",
    num_layers="depth",
    n_layers="depth",
    hidden_size="width",
    d_model="width",
    seq_len="seqlen",
    context_length="seqlen",
    learning_rate="lr",
    vocab_size="vocab",
    max_steps="steps",
    gradient_accumulation_steps="grad_accum",
    per_device_train_batch_size="batch",
    max_length="seqlen",
    sequence_len="seqlen",
    cutoff_len="seqlen",
    num_train_epochs="epochs",
    num_epochs="epochs",
    model_name_or_path="model",
    base_model="model",
    lora_r="lora",
    lora_rank="lora",
    target_modules="lora_targets",
    lora_target="lora_targets",
    lora_target_modules="lora_targets",
    packing="pad",
    sample_packing="pad",
    neat_packing="pad",
    gradient_checkpointing="remat",
    disable_gradient_checkpointing="remat",
    merge_and_unload="merge",
    chat_template_path="template",
    chat_template="template",
    chat_template_jinja="template",
    chat_template_kwargs="template_args",
    enable_thinking="template_args",
    preserve_thinking="template_args",
)
GONE = {  # flags of before
    "--optim": "is gone: in-backward had no clipping, no accumulation and no whole graphs; leave it out",
}
PROCESSES = {"--nproc", "--nproc-per-node", "--gpus", "--ngpus"}


def as_given(name: str, value: Any) -> str:
    """A flag as a command line has it: --width 100, --reshard, --no-reshard, --compile-options a=1 b=2, -vv."""
    if name == "verbose":
        return "-" + "v" * value
    if isinstance(value, list | tuple):
        value = " ".join(map(str, value))
    return (
        flag(name if value else f"no_{name}")
        if isinstance(value, bool)
        else f"{flag(name)} {value}"
    )


def without_user(source: str) -> str:
    """A source of data, or a path, as rows have it: of one outside the working directory the last part."""
    kind, path = re.fullmatch("(text:|bin:)?(.*)", source, re.DOTALL).groups(default="")
    path = os.path.normpath(path)
    return kind + (os.path.basename(path) if path.startswith(("/", "~", "..")) else path)


def default(text: str, metavar: str = "INT"):
    """For the annotation of a flag without a value of its own: what --help says in its place."""
    return arg(metavar=metavar, help_behavior_hint=f"(default: {text})")


@answering()
def parse(
    kind: type,
    argv: Sequence[str],
    check: Callable[[Any], Any],
    prog: str,
    description: str,
    rank: int = 0,
) -> Any:
    """A `kind`, whose fields are groups of flags, from a command line. Ends the process with one line, which rank 0
    prints, and exit code 2 for a bad one, also where `check` raises a ValueError."""
    boxes = io.StringIO()  # of tyro, to which our own line is preferred
    for word in argv:
        try:
            os.fsencode(word)
        except UnicodeError:  # then no file of this name can be opened
            code = sys.getfilesystemencoding()
            fail(
                f"{word}: is no text in {code}, the encoding of this locale; set PYTHONUTF8=1", rank
            )
    argv = [re.sub("^--micro[-_]batch(?=$|=)", "--batch", word) for word in argv]
    parts = parts_of(*get_type_hints(kind).values())
    try:
        words, lines = modern(argv, parts)
        words, own = unfold(words, parts)
        with redirect_stderr(boxes):
            c = tyro.cli(
                kind, args=words, prog=prog, description=description, console_outputs=rank == 0
            )
        for name, group in vars(c).items():
            if is_dataclass(group):
                mine = {each: own[each] for each in own if hasattr(group, each)}
                c = replace(c, **{name: replace(group, **mine)})
        check(c)
        for line in lines * (rank == 0):
            tell(f"note: {line}", sys.stderr)
        return c
    except (SystemExit, ValueError) as error:
        if rank:
            time.sleep(5)  # or torchrun would end rank 0 before it has printed the message
        if rank or not getattr(error, "code", 2):  # --help
            sys.exit(getattr(error, "code", 2))
        kinds = kinds_of(*get_type_hints(kind).values())
        said = str(error) if isinstance(error, ValueError) else explain(words, kinds, ["verbose"])
    fail(said or " ".join(re.sub("[\u2500-\u257f]", " ", boxes.getvalue()).split()), rank)


@answering()
def parse_beside(
    own: type, others: Sequence[type], argv: Sequence[str], prog: str, description: str
) -> tuple[Any, list[str]]:
    """An `own`, and the words of a command line that are flags of `others`, groups of another program, whose values may
    still be wrong together. Ends the process with exit code 2 and one line for a bad flag or value."""
    boxes = io.StringIO()
    kinds = kinds_of(*others, own)
    parts = parts_of(*others)
    try:
        argv, lines = modern(argv, parts)
        problem = explain(unfold(argv, parts)[0], kinds, ["verbose"])
        with redirect_stderr(boxes):
            found, words = tyro.cli(
                own, args=argv, prog=prog, description=description, return_unknown_args=True
            )
    except (SystemExit, ValueError) as error:
        if not getattr(error, "code", 2):  # --help
            raise
        said = str(error) if isinstance(error, ValueError) else problem
        fail(said or " ".join(boxes.getvalue().split()), 0)
    if problem:
        fail(problem, 0)
    for line in lines:
        tell(f"note: {line}", sys.stderr)
    return found, words


def kinds_of(*groups: type) -> dict[str, Any]:
    """The type of each flag of the groups, by name; without those that a help text does not show."""
    found = {}
    for group in filter(is_dataclass, groups):
        marks = {
            n: getattr(t, "__metadata__", ())
            for n, t in get_type_hints(group, include_extras=True).items()
        }
        found |= {
            n: t for n, t in get_type_hints(group).items() if tyro.conf.Suppress not in marks[n]
        }
    return found


def explain(argv: Sequence[str], kinds: dict[str, Any], counters: Sequence[str] = ()) -> str | None:
    """The first thing that is wrong with a command line, or None. kinds: the type of each flag's field; tuple[...]
    takes any number of values, bool none. counters: those that take none either, as -v does."""
    own = {flag(name): kind for name, kind in kinds.items()}
    words = deque(argv)
    names = [*own, *(flag(f"no_{name}") for name, kind in kinds.items() if kind is bool)]
    bare = {flag(name) for name in counters} | {
        name for name in names if own.get(name, bool) is bool
    }
    while words:
        word = words.popleft()
        name, given, value = word.partition("=")
        name = name.replace("_", "-")
        if not FLAG.match(word):
            return f"{word}: {_stray(word, own)}"
        if re.fullmatch("-v+", word):
            continue
        if name not in names:
            if name in PROCESSES:
                return f"{name}: no flag of this program: NPROC=N ./launch.sh run, or torchrun --nproc-per-node N"
            if name in GONE:
                return f"{name}: {GONE[name]}"
            other = flag(OTHERS.get(name[2:].replace("-", "_"), ""))
            meant = f"; did you mean {other}?" if other in names else did_you_mean(name, names)
            return f"{name}: no such flag{meant or '; ' + HELP}"
        values = [value] if given else []
        most = len(words) if get_origin(own.get(name)) is tuple else 1 - len(values)
        while words and not FLAG.match(words[0]) and len(values) < most:
            values.append(words.popleft())
        if name in bare:
            if values:
                both = (
                    name
                    if own.get(name) is not bool
                    else f"{name} or {name.replace('--', '--no-', 1)}"
                )
                return f"{name} {values[0]}: takes no value; write {both}"
        elif not values and most == 1:
            return f"{name}: needs a value"
        for each in values if name not in bare else ():
            if problem := unfit(each, own[name]):
                return f"{name} {each[:50]}: {problem}"
    return None


def _stray(word: str, own: dict[str, Any]) -> str:
    """What is wrong with a word where a flag should stand."""
    name, given, value = word.partition("=")
    meant = (
        flag(name)
        if flag(name) in own
        else did_you_mean(name, own).removeprefix("; did you mean ").rstrip("?")
    )
    if given and meant:
        return f"flags begin with --; did you mean {meant} {value}?"
    return f"belongs to no flag{did_you_mean(name, own) or '; ' + HELP}"
