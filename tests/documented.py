"""The commands that the two README.md and docs/ name, each given to its program up to its flags; nothing is run.

    python tests/documented.py [COMMAND..]    # a line for each that is refused: page, command, reason; some seconds

A program has read its flags where trainer.config.parse returns, where it imports torch, or, in ALONE, where argparse is
done. Of a sweep its first setting is read by main.py.
"""

import argparse
import contextlib
import io
import re
import runpy
import shlex
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)  # its language and its text
INLINE = re.compile(r"`([^`\n]+)`")
SETTING = re.compile("n=|nproc=|ranks=")
ASSIGNED = re.compile(r"[A-Z_]+=\S*")
# Words of docs that stand for some value of the reader's.
VALUES = {"N": "2", "FLAGS": "", "..": ""}
OF_LAUNCH = dict(run="main.py", profile="main.py", sweep="-m lab.sweeps.sweep", fit="-m lab.fit",
                 nodes="lab/benchmarks/nodes.py", slurm="-m lab.sweeps.slurm",
                 studies="-m lab.studies")  # fmt: skip
UNREAD = {"test", "verify", "gpu", "install", "--help"}  # commands of launch.sh without flags of a program
# Programs that have no flags of main.py.
ALONE = ("lab.report", "lab.studies", "lab.benchmarks.planner", "lab.benchmarks.trl", "lab.benchmarks.first_step",
         "trainer.checkpoint.export",
         "trainer.finetuning.export")  # fmt: skip
OWN_LIST = re.compile(r"A file of your own, here `([^`]+)`.*?```text\n(.*?)```", re.DOTALL)


class Read(BaseException):
    """A program has read its flags."""


def commands() -> list[tuple[str, str]]:
    """(page, command) of all that a shell would run."""
    found = {}
    for path in (ROOT / "README.md", ROOT / "lab/README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = path.read_text()
        page = str(path.relative_to(ROOT))
        shell = [block for language, block in FENCE.findall(text) if language in ("", "bash", "sh")]
        blocks = [block.replace("\\\n", " ").splitlines() for block in shell]
        inline = INLINE.findall(re.sub("```.*?```", "", text, flags=re.DOTALL))
        # In a sentence a command without flags is the name of a program.
        lines = [line for block in blocks for line in block] + [line for line in inline if " --" in line]
        for line in lines:
            for command in re.sub(r"\s#\s.*", "", line).split("&&"):
                words = [word for word in command.partition(" |")[0].split() if not ASSIGNED.fullmatch(word)]
                if words and (words[0] in ("./launch.sh", "torchrun") or words[0].endswith("python")):
                    found[page, shlex.join(shlex.split(" ".join(words)))] = None
    return [*found]


def program(command: str) -> list[str] | None:
    """The words of a command from its program on, "-m" apart; None if no program reads its flags."""
    first, *words = (VALUES.get(word, word) for word in shlex.split(command))
    words = [word for word in words if word]
    if first == "./launch.sh":
        name, *words = words if words and not words[0].startswith("--") else ["run", *words]
        if name in UNREAD:
            return None
        words = [*OF_LAUNCH[name].split(), *words]
    elif first == "torchrun":
        start = next((i for i, word in enumerate(words) if word == "-m" or word.endswith(".py")), len(words))
        words = words[start:]
        if words[:1] == ["tests/planted.py"]:
            words = words[2:]  # the program in which it plants a fault
    return None if not words or "-c" in words else [word for word in words if word != "-m"]


def read(words: list[str]) -> str:
    """What a program says of flags that it refuses; empty where it has read them."""
    name = words[0]
    argv = sys.argv
    said = io.StringIO()
    sweeps = name == "lab.sweeps.sweep" and "--slurm" not in words
    words = [*words, "--list"] if sweeps else words
    before = argparse.ArgumentParser.parse_args
    modules = dict(sys.modules)

    def parse_args(parser, *args, **kwargs):
        found = before(parser, *args, **kwargs)
        if name.startswith(ALONE):
            raise Read
        return found

    sys.argv, argparse.ArgumentParser.parse_args = words, parse_args
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            if name.endswith(".py"):
                runpy.run_path(name, run_name="__main__")
            else:
                runpy.run_module(name, run_name="__main__", alter_sys=True)
    except Read:
        return ""
    except SystemExit as end:
        text = said.getvalue()
        if sweeps and not end.code and "--program" not in words:  # each line is a setting: n=2 --depth 4
            return read(["main.py", *(word for word in shlex.split(text.splitlines()[0]) if not SETTING.match(word))])
        return f"{end.code}: {text[-300:]}" if end.code else ""
    finally:
        sys.argv, argparse.ArgumentParser.parse_args = argv, before
        for module in sys.modules.keys() - modules.keys():
            if not module.startswith(
                ("tyro", "numpy", "rich", "trainer.config", "trainer.finetuning.config", "trainer.distributed")
            ):
                del sys.modules[module]
    return f"ran to its end: {said.getvalue()[-300:]}"


class NoTorch:
    """Whoever imports torch has read the flags."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name in ("torch", "transformers", "matplotlib"):
            raise Read


def refusals(asked: list[tuple[str, str]]) -> list[tuple[str, str, str]]:
    """(page, command, reason). Ends what else this process could do: it can import torch no more."""
    from trainer import config
    from trainer.finetuning import config as finetuning

    parse = config.parse
    of_models = finetuning.parse

    def parse_and_end(*args, **kwargs):
        found = parse(*args, **kwargs)
        if finetuning.Config in args:  # finetune.py, which asks more of them
            return found
        raise Read

    def parse_of_models_and_end(*args, **kwargs):
        of_models(*args, **kwargs)
        raise Read

    config.parse = parse_and_end
    finetuning.parse = parse_of_models_and_end
    sys.meta_path.insert(0, NoTorch)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        text = (ROOT / "docs/commands.md").read_text()
        named, lines = OWN_LIST.search(text).groups()
        own = Path(folder) / "own.txt"
        own.write_text(lines)
        for page, command in asked:
            words = program(command.replace(named, str(own)))
            if words and (reason := read(words)):
                found.append((page, command, reason))
    return found


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    given = [("", line) for line in sys.argv[1:]] or commands()
    for page, command, reason in refusals(given):
        print(page, command, " ".join(reason.split()), sep="\t")
