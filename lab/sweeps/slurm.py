"""Batch scripts for SLURM. They are printed: to be read, changed, and given to sbatch, whose own options win.

    ./launch.sh slurm --nodes 2 --gpus-per-node 8 --time 4:00:00 --depth 8 --save runs/a | sbatch    trains
    ./launch.sh sweep depth --slurm --gpus-per-node 8 | sbatch        an array: a task for each missing setting

SLURM's names: --nodes --gpus-per-node (TYPE:N; 0: none) --cpus-per-task (without it whole nodes) --time --mem
--partition --account --qos --constraint --job-name; --container IMAGE runs in Apptainer. All else goes to main.py.
A job runs in this folder, with this Python, which all nodes must see. One that is stopped or requeued goes on from its
checkpoint; `sbatch --job-name NAME --dependency=singleton`, several times, makes jobs that follow each other. No torch.
"""

import contextlib
import os
import re
import shlex
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from trainer import config
from trainer.checkpoint import lock
from trainer.checkpoint.manifest import Refused
from trainer.terminal.command_line import PROCESSES, flag
from trainer.terminal.output import fail, put, tell
from trainer.terminal.text import did_you_mean

ROOT = Path(__file__).resolve().parents[2]
WORD = r"\S+", "one word"
OPTIONS = {  # what a value looks like, and in words
    "--job-name": WORD,
    "--nodes": (r"[1-9]\d*", "a number from 1 on"),
    "--gpus-per-node": (r"([\w.-]+:)?\d+", "a number, or TYPE:number; 0 for none"),
    "--cpus-per-task": (r"[1-9]\d*", "a number from 1 on"),
    "--time": (r"\d+(:[0-5]\d){0,2}|\d+-\d+(:[0-5]\d){0,2}", "minutes, hours:mm:ss or days-hours"),
    **dict.fromkeys(
        ("--mem", "--partition", "--account", "--qos", "--constraint", "--container"), WORD
    ),
}
DEFAULTS = {
    "--job-name": "simple-fsdp",
    "--nodes": "2",
    "--gpus-per-node": "8",
    "--time": "01:00:00",
}
WARNING_S = 120  # before the time limit SIGTERM comes; SLURM may send it up to 60 s earlier
# After SIGTERM torchrun kills ranks that still save; torch before 2.13 may know 30 s alone.
SAVING_S = 100


def split(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """{"--nodes": "2"} of the options among `words`, and the other words. ValueError for a bad value, or none."""
    options = {}
    others = []
    left = deque(words)
    while left:
        word = left.popleft()
        name, sign, value = word.partition("=")
        if name not in OPTIONS:
            others.append(word)
            continue
        pattern, expected = OPTIONS[name]
        if not sign:
            if not left or left[0].startswith("--"):
                raise ValueError(f"{name}: needs a value")
            value = left.popleft()
        if not re.fullmatch(pattern, value):
            raise ValueError(f"{name} {value}: must be {expected}")
        options[name] = value
    return options, others


def gpus(options: dict[str, str]) -> int:
    """GPUs of a node: 2 of {"--gpus-per-node": "a100:2"}."""
    return int(options["--gpus-per-node"].rpartition(":")[2])


def script(options: dict[str, str], more: list[str], body: list[str]) -> str:
    """A batch script. more: options that are no user's; body: its lines, whose last one is the command."""
    # For the job's output, without which it fails and says nothing.
    os.makedirs(ROOT / "runs", exist_ok=True)
    shown = {name: value for name, value in options.items() if name != "--container"}
    if not gpus(options):
        del shown["--gpus-per-node"]
    lines = [f"{name}={value}" for name, value in shown.items()] + ["--ntasks-per-node=1"]
    lines += ["--exclusive"] * ("--cpus-per-task" not in options)
    lines += [f"--chdir={shlex.quote(str(ROOT))}", "--open-mode=append", "--requeue", *more]
    python = sys.executable if "--container" not in options else "python3"
    install = "TORCH=cuda " * bool(gpus(options)) + "./launch.sh install"
    first = [
        "# Every node must see this folder and this Python, which must have what this installs:",
        f"#   {install}",
        f"export NO_INSTALL=1 PYTHON={shlex.quote(python)}",
    ]
    return "\n".join(["#!/bin/bash", *(f"#SBATCH {line}" for line in lines), *first, *body])


def command(options: dict[str, str], words: list[str]) -> str:
    """The line that starts `words` once on every node of a job, if need be in a container. SLURM may send signals to
    the process of the task alone: that is ours, by exec. When one node fails, SIGTERM ends the others."""
    srun = ["srun", "--kill-on-bad-exit=1"]
    srun += (
        [f"--cpus-per-task={options['--cpus-per-task']}"] if "--cpus-per-task" in options else []
    )
    if "--container" in options:
        place = ["--bind", str(ROOT), "--pwd", str(ROOT), options["--container"]]
        words = ["apptainer", "exec", *["--nv"] * bool(gpus(options)), *place, *words]
    return shlex.join([*srun, "bash", "-c", 'NODE_RANK=$SLURM_NODEID exec "$@"', "node", *words])


def training(words: list[str]) -> str:
    """The script that trains. ValueError for a bad option; a bad flag of main.py ends the process with 2."""
    options_given, flags = split(words)
    options = DEFAULTS | options_given
    groups = config.Training, config.System, config.Output
    known_flags = {flag(field.name) for group in groups for field in fields(group)}
    for name in (word.partition("=")[0] for word in flags if word.startswith("--")):
        meant = (
            "; did you mean --gpus-per-node?" if name in PROCESSES else did_you_mean(name, OPTIONS)
        )
        if meant and not {name, name.replace("--no-", "--")} & known_flags:
            raise ValueError(f"{name}: no such flag{meant}")
    flags = flags or "--depth 8 --compile fwdbwd".split()
    if gpus(options) and not {"--device", "--world"} & {word.partition("=")[0] for word in flags}:
        flags += ["--device", "cuda"]  # never a CPU unasked
    resolved = config.parse(flags, world=int(options["--nodes"]) * gpus(options) or None)
    if resolved.save is None:
        tell("note: without --save, a job that is stopped or requeued begins afresh", sys.stderr)
    more = [
        f"--signal=TERM@{WARNING_S}",
        f"--output={shlex.quote(str(ROOT / 'runs'))}/slurm-%j.out",
    ]
    return script(
        options,
        more,
        [
            "export NPROC=${NPROC:-${SLURM_GPUS_ON_NODE:-}} NNODES=$SLURM_NNODES",
            "export MASTER_ADDR=$(hostname) MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))  # of the first node",
            f"export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={SAVING_S}  # seconds that torchrun leaves its ranks for a save",
            command(options, ["./launch.sh", "run", *flags]),
        ],
    )


def for_settings(options_given: dict[str, str], small: bool, seconds: float) -> dict[str, str]:
    """The options of an array whose tasks run a setting each, of `seconds` at most. ValueError: more nodes than one."""
    if options_given.get("--nodes", "1") != "1":
        raise ValueError(
            f"--nodes {options_given['--nodes']}: a setting runs on one node; leave it out"
        )
    defaults = {"--job-name": "sweep", "--nodes": "1"} | ({"--gpus-per-node": "0"} if small else {})
    limit = {"--time": f"{int(seconds // 60) + 5}"} if seconds < 1e7 else {}
    return DEFAULTS | defaults | limit | options_given


def array(settings: list[str], options: dict[str, str], words: list[str]) -> str:
    """The script of an array with a task for each of `settings`. words: the arguments of the sweep that has them."""
    more = [
        f"--array=0-{len(settings) - 1}",
        f"--output={shlex.quote(str(ROOT / 'runs'))}/slurm-%A_%a.out",
    ]
    task = command(options, ["./launch.sh", "sweep", *words, "--setting"])
    quoted = [f"  {shlex.quote(setting)}" for setting in settings]
    return script(
        options, more, ["settings=(", *quoted, ")", f'{task} "${{settings[SLURM_ARRAY_TASK_ID]}}"']
    )


@contextlib.contextmanager
def claimed(folder: Path, wait: bool) -> Iterator[bool]:
    """Whether what `folder` stands for is this process's alone inside. If not, a line says whose it is. wait: up to
    180 s for a sign of life of a process on another machine, which may be gone."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        said = lock.acquire(str(folder), patient=wait)
    except Refused as error:
        who = str(error).removeprefix(f"--save {folder}: ").partition(";")[0]
        put(f"    left out: {who.replace('is writing there', 'runs it')}")
        yield False
        return
    try:
        put(f"    {said}\n" * (said is not None), end="")
        yield True
    finally:
        lock.release(str(folder))


def main() -> None:
    """Prints the script that trains. Exit code 2: bad input, in one line."""
    if {"-h", "--help"} & {*sys.argv[1:]}:
        return put(__doc__)
    try:
        text = training(sys.argv[1:])
    except ValueError as error:
        fail(str(error), 0)
    print(text)  # for a shell, which must get each character


if __name__ == "__main__":
    main()
