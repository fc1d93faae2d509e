"""Proves on a machine with several GPUs what was never run on one, or names what does not hold: ./launch.sh verify.

    python -m lab.benchmarks.verify [--minutes 10]         # all GPUs of this machine; without one NPROC ranks on CPUs
    python -m lab.benchmarks.verify --only 1.5 2 --again   # some parts, also those that have a verdict
    python -m lab.benchmarks.verify --world 8              # simulated ranks in one process, which one GPU does anyway

A line for each check, then a table and one file, verify-*.json, without names of hosts and folders. A second call does
what has no verdict yet of this code on this machine. Exit codes: 0, 1 if a check is not held, 2 for what does not fit.
docs/verify.md says how to read it, settings.toml when a check is held.
"""

import argparse
import json
import os
import pkgutil
import re
import socket
import sys
import time
import tomllib
from pathlib import Path

from lab.sweeps.sweep import gpus
from trainer.distributed.terminal import Progress, fail, markdown, tell
from trainer.logging import check_writable

if __name__ == "__main__":  # before torch is imported, as in main.py
    _parser = argparse.ArgumentParser("verify", description=__doc__, allow_abbrev=False,
                                      formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    _parser.add_argument("--minutes", type=float, default=10.0, help="for all of it (default: 10)")
    _parser.add_argument(
        "--only", nargs="+", metavar="PART", default=[], help="such as 1.5, or 1 for all of part 1"
    )
    _parser.add_argument("--again", action="store_true", help="also what has a verdict already")
    _parser.add_argument(
        "--world", type=int, default=0, metavar="N", help="simulate N ranks in one process"
    )
    _parser.add_argument(
        "--device", choices=("auto", "cpu"), default="auto", help="cpu: as if there were no GPU"
    )
    _parser.add_argument(
        "--tiny", action="store_true", help="small settings, for CPUs; part 1 compiles nothing"
    )
    _parser.error = lambda message: fail(message.removeprefix("argument "), 0)
    OWN = _parser.parse_args()
    SETTINGS = tomllib.loads(Path(__file__).with_name("settings.toml").read_text())
    IDS = [
        name
        for name in SETTINGS["checks"]
        if not OWN.only or {name, name.partition(".")[0]} & {*OWN.only}
    ]

import torch

from lab.benchmarks.verify.machine import Machine, Verdict
from trainer.measuring import timing

SIMULATED = 8  # ranks on one GPU
NAMED = re.compile(r"(?<![\w.])~?/(?:[^\s:'\",()/]+/)*")  # the folders of a path


def machine(own: argparse.Namespace, settings: dict, there: int) -> Machine:
    """Where to run, of so many GPUs. ValueError, one line, for ranks that there are not."""
    said = os.environ.get("NPROC") or str(there or 4)
    ranks = int(said) if re.fullmatch("[1-9][0-9]?", said) else 0
    world = own.world or (SIMULATED if there == ranks == 1 else 0)
    problems = [
        (not 0 < own.minutes < 1e5, f"--minutes {own.minutes:g}: must be above 0"),
        (own.world and own.world < 2, f"--world {own.world}: must be at least 2"),
        (not ranks, f"NPROC={said}: expected a number of processes below 100"),
        (
            os.environ.get("NNODES", "1") != "1",
            "NNODES: verify is of one machine; for several: ./launch.sh nodes",
        ),
        (
            ranks == 1 and not world,
            "NPROC=1: one rank has nobody to talk to; NPROC=2, or --world 8 to simulate",
        ),
        (
            there and not torch.cuda.is_available(),
            "torch sees no GPU: TORCH=cuda ./launch.sh install, or --device cpu",
        ),
        (
            there and ranks > there,
            f"NPROC={ranks}: there are {there} GPUs; give {there} at most, or --device cpu",
        ),
    ]
    if problem := next((text for wrong, text in problems if wrong), None):
        raise ValueError(problem)
    out, device = (
        Path(os.environ.get("OUT") or "runs").resolve(),
        torch.device("cuda" if there else "cpu"),
    )
    check_writable(str(out / "verify.jsonl"))
    about = timing.environment(device) | dict(
        code=timing.code_digest(), gpus=there, arch="sm_90", nccl=None
    )
    if there:
        major, _ = torch.cuda.get_device_capability()
        about |= dict(arch=f"sm_{min(major, 10)}0", nccl=torch.cuda.nccl.version())
    until = time.monotonic() + 60 * own.minutes
    return Machine(
        1 if world else ranks, world, bool(there), own.tiny, out, until, settings, about, {}
    )


def checked(m: Machine, number: str) -> dict:
    """The verdict of a check, as the file has it."""
    own, start = m.settings["checks"][number], time.monotonic()
    with Progress(f"{number} {own['name']}", speak=sys.stdout.isatty()):
        try:
            found = pkgutil.resolve_name(f"lab.benchmarks.verify.{own['check']}")(m, own)
        except Verdict as verdict:
            found = verdict
    words = NAMED.sub("", found.words).replace(socket.gethostname(), "HOST")
    seconds = round(time.monotonic() - start, 1)
    return dict(
        name=own["name"], status=found.status, words=words, figures=found.figures, seconds=seconds
    )


def main(own: argparse.Namespace, settings: dict, numbers: list[str]) -> int:
    """Checks, tells, writes the file; returns the exit code."""
    try:
        if not numbers:
            raise ValueError(
                f"--only {' '.join(own.only)}: must be 1 to 5, or of {', '.join(settings['checks'])}"
            )
        m = machine(own, settings, 0 if own.device == "cpu" else gpus())
    except ValueError as error:
        fail(str(error), 0)
    if not own.only:  # what one GPU can show is one line elsewhere
        numbers = [
            name for name in numbers if not (name == "5" if m.world else name.startswith("5."))
        ]
    kind = re.sub("[^A-Za-z0-9]+", "-", m.about["device"]) if m.cuda else "CPU"
    path = (
        m.out / f"verify-{kind}-{m.all_ranks}{'-simulated' * bool(m.world)}{'-tiny' * m.tiny}.json"
    )
    before = json.loads(path.read_text()) if path.exists() else {}
    verdicts = m.verdicts = before["verdicts"] if before.get("mark") == m.mark else {}
    tell(
        f"verify on {m.all_ranks} ranks{' (simulated)' * bool(m.world)}, {m.about['device']}, torch {m.about['torch']}"
    )
    for number in numbers:
        known = number in verdicts and verdicts[number]["status"] != "not run" and not own.again
        if not known:
            verdicts[number] = checked(m, number)
            path.write_text(
                json.dumps(
                    dict(mark=m.mark, about=m.about, verdicts=verdicts), indent=1, sort_keys=True
                )
            )
        told = verdicts[number]
        tell(f"{number} {told['name']}: {told['status']}: {told['words']}" + " (as before)" * known)
    shown = {name: verdicts[name] for name in settings["checks"] if name in verdicts}
    columns = [("part", [*shown])]
    for title, key in (("what", "name"), ("verdict", "status"), ("s", "seconds")):
        columns.append((title, [str(told[key]) for told in shown.values()]))
    tell(
        f"\n{markdown(columns)}\n\n{path}: paste it into an issue of the project, whatever it says; docs/verify.md"
    )
    return int(any(told["status"] == "not held" for told in verdicts.values()))


if __name__ == "__main__":
    try:
        sys.exit(main(OWN, SETTINGS, IDS))
    except KeyboardInterrupt:  # what has a verdict has one
        sys.exit(130)
