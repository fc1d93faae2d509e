"""The command line of a program: tyro reads it, and this module checks what no type can say.

    parse(Config, sys.argv[1:], check, "main.py", "Trains.")      # a Config, or a message and exit code 2
    parse_known(Plan, sys.argv[1:], "plan.py", "Plans.")          # (a Plan, the words of other programs' flags)
    as_given("width", 100)                                        # "--width 100"

It imports no torch.
"""

import ast
import inspect
import io
import os
import re
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, redirect_stderr, suppress
from dataclasses import is_dataclass
from itertools import pairwise
from typing import Annotated, Any, get_type_hints

import tyro
from tyro.conf import DisallowNone, arg

from trainer.terminal.output import answering, fail, put, shown

PROCESSES = {"--nproc", "--nproc-per-node", "--gpus", "--ngpus"}  # flags of torchrun and the like


def flag(name: str) -> str:
    """The flag of a field: remat_ratio -> --remat-ratio."""
    return "--" + name.replace("_", "-")


def as_given(name: str, value: Any) -> str:
    """A flag as a command line has it: --width 100, --reshard, --no-reshard, --compile-options a=1 b=2, -vv."""
    if name == "verbose":
        return "-" + "v" * value
    if isinstance(value, bool):
        return flag(name if value else f"no_{name}")
    if isinstance(value, list | tuple):
        value = " ".join(map(str, value))
    return f"{flag(name)} {value}"


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
    """A `kind`, whose fields are groups of flags, from a command line. Ends the process with exit code 2 and a message,
    which rank 0 prints, for a bad one: tyro's for what is no flag or no value of one, and one line where `check` raises
    a ValueError."""
    # Tyro prints a value error on every rank, whatever console_outputs says (1.0.16).
    quiet = redirect_stderr(io.StringIO()) if rank else nullcontext()
    try:
        with quiet:
            config = _read(kind, argv, prog, description, console_outputs=rank == 0)
        check(config)
        return config
    except (SystemExit, ValueError) as error:
        if rank:
            time.sleep(5)  # or torchrun would end rank 0 before it has printed the message
            sys.exit(getattr(error, "code", 2))
        if isinstance(error, SystemExit):
            raise
        fail(str(error), rank)


@answering()
def parse_known(
    kind: type, argv: Sequence[str], prog: str, description: str
) -> tuple[Any, list[str]]:
    """A `kind`, and the words of a command line that are no flags of it, for the parser of another program. Ends the
    process with exit code 2 and tyro's message for a bad value."""
    try:
        return _read(kind, argv, prog, description, return_unknown_args=True)
    except ValueError as error:
        fail(str(error), 0)


def _read(kind: type, argv: Sequence[str], prog: str, description: str, **how: Any) -> Any:
    for word in argv:
        try:
            os.fsencode(word)
        except UnicodeError:  # then no file of this name can be opened
            code = sys.getfilesystemencoding()
            raise ValueError(
                f"{word}: is no text in {code}, the encoding of this locale; set PYTHONUTF8=1"
            ) from None
    how |= dict(args=argv, prog=prog, description=description, config=(DisallowNone,))
    if not {"-h", "--help"} & {*argv}:
        said = io.StringIO()
        config = None
        with suppress(SystemExit), redirect_stderr(said):
            config = tyro.cli(kind, **how)
        if config is not None:
            put(said.getvalue(), stream=sys.stderr, end="")
            return config
    # It prints help texts, also of flags that a wrong one may mean.
    for group in filter(is_dataclass, (kind, *get_type_hints(kind).values())):
        _join_help_texts(group)
    # Tyro repeats a bad word as it is: one with control characters is shown without them, though not in colour.
    printed = io.StringIO()
    odd = any(shown(word) != word for word in argv)
    try:
        with redirect_stderr(printed) if odd else nullcontext():
            return tyro.cli(kind, **how)
    finally:
        if odd:
            put(printed.getvalue(), stream=sys.stderr, end="")


def _join_help_texts(group: type) -> None:
    """Makes running text of the docstrings of fields: tyro prints the line breaks of an indented docstring, which leave
    lone words. Reading the source takes 0.1 s, so only a help text is worth it."""
    for owner in filter(is_dataclass, group.__mro__):
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
        for field, text in pairwise(tree.body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                annotation = owner.__annotations__[field.target.id]
                source = ast.unparse(field.annotation)
                is_unset = field.value is not None and ast.unparse(field.value) in ("None", "()")
                says_default = "default(" in source or "_by_device(" in source
                help_text = arg(
                    help=" ".join(ast.literal_eval(text.value).split()),
                    # Not "(default: None)" or "(default: )".
                    help_behavior_hint="(default: none)" if is_unset and not says_default else None,
                )
                owner.__annotations__[field.target.id] = Annotated[annotation, help_text]
