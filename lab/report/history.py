"""The logged steps of runs, which lie beside the rows: FILE.steps/RUN.jsonl, one line for a step or an evaluation.

    for row, steps in curves_of(published.read([Path("runs/results.jsonl")])):
        print(row["run"], [(each["step"], each["loss"]) for each in steps])

A resumed run has a file of its own; its settings name the run that it continues and the last step of it that counts. So
a step stands once in a history, also where a killed run had logged steps after its last checkpoint.
"""

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields
from math import isfinite
from pathlib import Path

from lab.report.published import simulated
from trainer.config import Output
from trainer.logging import read_jsonl
from trainer.terminal.output import regular


def setting(row: dict) -> dict:
    """The flags of a row but those of output, which change no result, and what follows from others."""
    apart = {each.name for each in fields(Output)} | {"effective_batch"}
    return {name: value for name, value in (row.get("flags") or {}).items() if name not in apart}


def parts(steps: Path) -> list[tuple[Path, float]]:
    """(file, its last step that counts) of a run and of those that it continues, the earliest first."""
    pieces = []
    last = float("inf")
    while steps.is_file() and steps not in [path for path, _ in pieces]:
        pieces.append((steps, last))
        file = steps.with_suffix(".settings.json")
        about = {}
        with suppress(OSError, ValueError):  # none was written
            about = json.loads(regular(file).read_text())
        names = (
            [name for name in ("continues", "after_step") if name in about]
            if isinstance(about, dict)
            else None
        )
        if names is None or [type(about[name]) for name in names] not in ([], [str, int]):
            raise ValueError(
                f"{file}: no run writes such settings; take the file away, or name other rows"
            )
        if not about.get("continues"):
            break
        steps = steps.with_name(f"{Path(about['continues']).name}.jsonl")
        last = min(last, about["after_step"])
    return pieces[::-1]


def history(steps: Path) -> list[dict]:
    """Every logged step of a run and of those that it continues, once and in order."""
    return [
        step
        for path, last in parts(steps)
        for step in read_jsonl(path)
        if step.get("step", last + 1) <= last
    ]


def learned_from(row: dict) -> tuple:
    """What two runs must share if their losses are to be compared: the program, its data, model and vocabulary."""
    flags = row.get("flags") or {}
    return ("depth" in flags, *(flags.get(name) for name in ("data", "model", "vocab")))


def comparable(rows: list[dict]) -> list[dict]:
    """The runs that have a curve, and whose loss can be compared with that of the last one of them."""
    trained = [row for row, _ in curves_of(rows)]
    return [row for row in trained if learned_from(row) == learned_from(trained[-1])]


def curves_of(rows: list[dict]) -> Iterator[tuple[dict, list[dict]]]:
    """(row, its history) of every row that has one, without steps whose loss is not finite. A run that another
    continues has no curve of its own, nor has one of simulated ranks. The steps of one run are held."""
    files = {row["history"]: row for row in rows if row.get("history") and not simulated(row)}
    continued = {str(path) for file in files for path, _ in parts(Path(file))[:-1]}

    def has_loss(step: dict) -> bool:
        loss = step.get("eval_loss", step.get("loss"))
        return isinstance(loss, int | float) and isfinite(loss)

    for file in filter(lambda file: file not in continued, files):
        steps = [*filter(has_loss, history(Path(file)))]
        if any("eval_loss" not in step for step in steps):
            yield files[file], steps
