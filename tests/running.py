"""Commands in processes of their own or on two ranks, and the rows of main.py."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from harness import free_port

import main
from lab.profiling.gpu_code import no_triton

ROOT = Path(main.__file__).parent
TINY = "--compile none --depth 1 --width 32 --head-dim 16 --grouping 2 --seqlen 16 --steps 6 --batch 2".split()
TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SWEEP_CELL")


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


def python(*argv, env=(), trace=True, timeout=400):
    """main.py in a process of its own. `imports`, if asked for, are the modules that it imported; `err` is the rest."""
    environment = {k: v for k, v in os.environ.items() if k not in TORCHRUN}
    environment |= {"OMP_NUM_THREADS": "1", "COLUMNS": "100"} | dict(env)
    command = [sys.executable, *["-X", "importtime"] * trace, str(ROOT / "main.py"), *map(str, argv)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
    lines = done.stderr.splitlines(keepends=True)
    imports = {line.split("|")[-1].strip() for line in lines if line.startswith("import time:")}
    err = "".join(line for line in lines if not line.startswith("import time:"))
    return SimpleNamespace(code=done.returncode, out=done.stdout, err=err, imports=imports)


def module(*command, timeout=600, cwd=ROOT):
    """python -m COMMAND in a process of its own; or, if it begins with a line break, this text with what follows."""
    how = ["-c"] if command[0].startswith("\n") else ["-m"]
    environment = os.environ | {"COLUMNS": "100", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", *how, *command]
    done = subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=timeout)
    return SimpleNamespace(code=done.returncode, out=done.stdout, err=done.stderr)


def torchrun(*argv, ranks=2, cwd=None):
    """main.py on gloo ranks. `code` is that of the first rank that failed, as torchrun reports it; `err` is ours."""
    environment = {k: v for k, v in os.environ.items() if k not in TORCHRUN}
    environment |= {"OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    command += ["--master-port", str(free_port()), str(ROOT / "main.py"), *map(str, argv)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, cwd=cwd)
    report = done.stderr.partition("Root Cause")[2]
    code = int(re.search(r"exitcode\s*: (-?\d+)", report)[1]) if report else done.returncode
    ours = re.split(r"^[WE]\d{4} .*torch/distributed/elastic", done.stderr, maxsplit=1, flags=re.MULTILINE)[0]
    return SimpleNamespace(code=code, out=done.stdout, err=ours)


def one_line(err):
    """The error, which is all that was printed."""
    lines = err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), err
    return lines[0]


def end_of_signal(err):
    """What a run says that a signal has ended, which is all that was printed, and no error."""
    [line] = err.splitlines()
    assert line.startswith("stopped by SIG"), err
    return line
