"""Predicts peak memory and time of a training step before anyone rents the GPUs. Nothing is run.

    python plan.py --gpu h100 --gpus 8 --remat none                        # main.py's flags; its default model
    python plan.py torchrun --nproc-per-node 8 main.py --compile blocks    # or the whole command
    python plan.py --hf Qwen2.5-7B/ --gpus 8 --batch 2 --remat block       # a Hugging Face config.json
    python plan.py --gpus 8 --nodes 2 --best                               # the fastest plan that fits
    python plan.py --gpus 8 --what-if seqlen 2048 4096 8192                # one line per value

Peak memory is a formula, checked against the memory of generated code. Time is a roofline with one stream for
computation and one for collectives (docs/planner.md). Each answer states its error on runs that were measured. It
needs tyro (pip install tyro), and torch only with --exact and for model classes that it has no formula for. Besides
the flags below it takes those of main.py that describe the model and the step (python main.py --help).
"""

import subprocess
import sys
from dataclasses import fields, replace
from importlib.util import find_spec

from trainer.terminal.output import answering, fail, put

if __name__ == "__main__":
    # It may run before any installation: all else that it imports is Python's own or lies beside it.
    if not find_spec("tyro"):
        fail("plan.py needs tyro: pip install tyro", 0)

from lab.planning import report, search
from lab.planning.search import Plan, parse, question, two_questions, unread
from trainer import config as flags
from trainer.terminal.command_line import flag
from trainer.terminal.text import did_you_mean

# By --what-if, of plan.py's own.
SWEPT = "gpu watts gpus nodes across hf logits master_dtype lora reserve_gib".split()


def sweep(request: Plan, words: list[str]) -> list[str]:
    """The lines of --what-if. ValueError for a flag or value that there is not."""
    name, *values = request.what_if
    name = name.lstrip("-").replace("-", "_")
    names = [*SWEPT, *(f.name for group in (flags.Training, flags.System) for f in fields(group))]
    if name not in names and (like := did_you_mean(name, names)):
        raise ValueError(f"--what-if {name}: no such flag{like}")
    if not values or name not in names:
        known = ", ".join(SWEPT)
        raise ValueError(
            f"--what-if {' '.join(request.what_if)}: expected a flag of main.py or one of {known}, and after it values"
        )
    lines = [report.HEADING]
    for text in values:
        new = request
        more = [flag(name), text]
        if name in SWEPT:
            new = replace(request, **{name: getattr(parse(more)[0], name)})
            more = []
        q = question(new, [*words, *more])
        lines.append(report.line(f"{name} {text}", q.answer(), q, new.reserve_gib))
    return lines


def fit(request: Plan, q: search.Question) -> list[str]:
    """The lines of --fit. ValueError if no number of GPUs divides the sequences of a step."""
    sequences = q.ranks * q.config.batch * q.config.grad_accum
    limit = q.gpu.memory - request.reserve_gib * 2**30
    asked = [n for n in request.fit if n > 0 and sequences % n == 0]
    if len(asked) < len(request.fit):
        wrong = next(n for n in request.fit if n not in asked)
        raise ValueError(
            f"--fit {wrong}: must divide the {sequences} sequences of a step (--gpus x --batch x --grad-accum)"
        )
    return report.fit_lines(
        search.fit_table(q, request.fit, (1, 2, 4, 8, 16, 32), sequences, limit), sequences
    )


def exact(request: Plan, q: search.Question, words: list[str]) -> int:
    """Runs lab.profiling.peak on the flags of main.py; returns its exit code."""
    if request.hf:
        raise ValueError("--exact: compiles main.py's own model; leave out --hf")
    for name, usual in (
        ("lora", 0),
        ("remat_ops", False),
        ("remat_keep", "none"),
        ("logits", "auto"),
        ("master_dtype", "fp32"),
    ):
        if getattr(request, name) != usual:
            raise ValueError(
                f"--exact: compiles main.py's step, which has no {flag(name)}; leave one of them out"
            )
    command = [
        sys.executable,
        "-m",
        "lab.profiling.peak",
        "--world",
        str(q.ranks),
        "--arch",
        q.gpu.arch,
        *words,
    ]
    return subprocess.run(command).returncode


def main(argv: list[str]) -> int:
    """Prints the answer; returns the exit code. What cannot be planned ends in one line and SystemExit(2)."""
    request, words = parse(argv, __doc__)
    try:
        if problem := two_questions(request, words):
            raise ValueError(problem)
        q = question(request, words)
        if request.exact:
            return exact(request, q, words)
        if request.fit:
            lines = fit(request, q)
        elif request.best:
            lines = report.best_lines(q, request.reserve_gib, request.plot)
        elif request.what_if:
            lines = sweep(request, words)
        else:
            lines = report.whole(q, request.reserve_gib, request.tokens, request.price)
    except ValueError as error:
        fail(str(error), 0)
    for text in [
        *lines,
        *report.error_notes(q, not (request.best or request.what_if or request.fit)),
        *unread([*words, *(flag(name.lstrip("-")) for name in request.what_if[:1])]),
    ]:
        put(text)
    return 0


if __name__ == "__main__":
    with answering():
        sys.exit(main(sys.argv[1:]))
