"""Commands in processes of their own or on two ranks, and the rows of main.py."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import main
from lab.profiling.gpu_code import no_triton

ROOT = Path(main.__file__).parent
TINY = "--compile none --depth 1 --width 32 --head-dim 16 --grouping 2 --seqlen 16 --steps 6 --batch 2".split()
TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SWEEP_LINE")


GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def on_gpu(test):
    """A test that needs a GPU; of a whole file: pytestmark = GPU."""
    marked, skipped = GPU
    return marked(skipped(test))


needs_triton = pytest.mark.skipif(no_triton() is not None, reason=no_triton() or "")


def rows_of(path):
    """The lines of a file as strict JSON, which knows no NaN."""

    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in Path(path).read_text().splitlines()]


def read(results):
    """The only row of a results file, and the steps of its run."""
    (row,) = rows_of(results)
    steps = Path(results).with_suffix(".steps") / f"{row['run']}.jsonl"
    return row, rows_of(steps) if steps.exists() else []


def resolved(argv=(), world=1, device="cpu"):
    """All flags of main.py, of a text or of words."""
    words = argv.split() if isinstance(argv, str) else map(str, argv)
    return main.flags.resolve(main.flags.parse([*words]), device, world)


def ran(*command, cwd=ROOT, timeout=400, **env):
    """A command in a process of its own: its exit code and both outputs."""
    environment = {k: v for k, v in os.environ.items() if k not in TORCHRUN} | {"COLUMNS": "100"} | env
    how = dict(capture_output=True, text=True, timeout=timeout)
    done = subprocess.run([*map(str, command)], env=environment, cwd=cwd, **how)
    return SimpleNamespace(code=done.returncode, out=done.stdout, err=done.stderr)


def python(*argv, env=(), trace=True):
    """main.py in this folder. `imports`, if asked for, are the modules that it imported; `err` is the rest."""
    command = [sys.executable, *["-X", "importtime"] * trace, ROOT / "main.py", *argv]
    done = ran(*command, cwd=None, **dict(OMP_NUM_THREADS="1") | dict(env))
    lines = done.err.splitlines(keepends=True)
    done.imports = {line.split("|")[-1].strip() for line in lines if line.startswith("import time:")}
    done.err = "".join(line for line in lines if not line.startswith("import time:"))
    return done


def module(*command, timeout=600, cwd=ROOT):
    """python -m COMMAND in a process of its own; or, if it begins with a line break, this text with what follows."""
    how = "-c" if command[0].startswith("\n") else "-m"
    return ran(sys.executable, "-W", "ignore", how, *command, cwd=cwd, timeout=timeout, PYTHONPATH=str(ROOT))


def one_line(err):
    """The message, which is all that was printed: an error of one line, or what tyro says, without its box."""
    said = " ".join(re.sub("[\u2500-\u257f]|-{9,}", " ", err).split())
    if re.search(r"For full helptext, (run|see) .+ --help$", said):
        assert said.count("For full helptext") == 1 and "error: " not in said, err
        return said
    lines = err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), err
    return lines[0]


def fails(done, code, *words):
    """The message with which a run ended, with this code, which is all that it said on stderr and holds these words."""
    line = one_line(done.err)
    assert done.code == code and all(word in line for word in words), (done.code, line, words)
    return line


def end_of_signal(err):
    """What a run says that a signal has ended, which is all that was printed, and no error."""
    [line] = err.splitlines()
    assert line.startswith("stopped by SIG"), err
    return line
