"""Proves on a machine with several GPUs what was never run on one, or names what does not hold: ./launch.sh verify.

    python -m lab.benchmarks.verify [--minutes 10]         # all GPUs of this machine; without one NPROC ranks on CPUs
    python -m lab.benchmarks.verify --only 1.5 2 --again   # some parts, also those that have a verdict
    python -m lab.benchmarks.verify --world 8              # simulated ranks in one process, which one GPU does anyway
    NNODES=2 NODE_RANK=0 MASTER_ADDR=first python -m lab.benchmarks.verify   # the same on each node, as `run`

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
from trainer.distributed.terminal import Progress, fail, markdown, one_line, tell
from trainer.logging import check_writable

if __name__ == "__main__":  # before torch is imported, as in main.py
    _parser = argparse.ArgumentParser(
        "verify",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
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

from lab.benchmarks.verify.cluster import Cluster
from lab.benchmarks.verify.machine import Machine, Verdict
from trainer.measuring import timing

SIMULATED = 8  # ranks on one GPU
NAMED = re.compile(r"(?<![\w.])~?/(?:[^\s:'\",()/]+/)*")  # the folders of a path


def machine(own: argparse.Namespace, settings: dict, there: int) -> Machine:
    """Where to run, of so many GPUs. ValueError, one line, for ranks that there are not."""
    cluster = Cluster.of(os.environ)
    said = os.environ.get("NPROC") or str(there or 4)
    ranks = int(said) if re.fullmatch("[1-9][0-9]?", said) else 0
    several = cluster.nodes > 1
    alone = ranks == 1 and not several
    world = own.world or (SIMULATED if there and alone else 0)
    problems = {
        f"--minutes {own.minutes:g}: must be above 0": not 0 < own.minutes < 1e5,
        f"--world {own.world}: must be at least 2": world == 1 or world < 0,
        f"--world {own.world}: one process simulates all; leave NNODES out": world and several,
        f"NPROC={said}: expected a number of processes below 100": not ranks,
        "NPROC=1: one rank has nobody to talk to; NPROC=2, or --world 8 to simulate": (
            alone and not world
        ),
        "torch sees no GPU: TORCH=cuda ./launch.sh install, or --device cpu": (
            there and not torch.cuda.is_available()
        ),
        f"NPROC={ranks}: there are {there} GPUs; give {there} at most, or --device cpu": (
            there and ranks > there
        ),
    }
    for problem, is_there in problems.items():
        if is_there:
            raise ValueError(problem)
    out = Path(os.environ.get("OUT") or "runs").resolve()
    check_writable(str(out / "verify.jsonl"))
    about = timing.environment(torch.device("cuda" if there else "cpu"))
    about |= dict(
        code=timing.code_digest(), gpus=there, arch="sm_90", nccl=None, nodes=cluster.nodes
    )
    if there:
        major, _ = torch.cuda.get_device_capability()
        about |= dict(arch=f"sm_{min(major, 10)}0", nccl=torch.cuda.nccl.version())
    processes = 1 if world else ranks * cluster.nodes
    m = Machine(processes, world, bool(there), own.tiny, out, 0.0, settings, about, {}, cluster)
    if several:
        where = f"{cluster.address}:{cluster.port}"
        tell(
            f"node {cluster.node} of {cluster.nodes}, which meet at {where}; node 0 has the verdicts"
        )
        cluster.meet(f"{m.mark}, NPROC={ranks}{', --tiny' * m.tiny}")
    m.until = time.monotonic() + 60 * own.minutes
    return m


def checked(m: Machine, number: str) -> dict:
    """The verdict of a check, as the file has it."""
    own = m.settings["checks"][number]
    start = time.monotonic()
    with Progress(f"{number} {own['name']}", speak=sys.stdout.isatty()):
        try:
            found = pkgutil.resolve_name(f"lab.benchmarks.verify.{own['check']}")(m, own)
        except Verdict as verdict:
            found = verdict
    words = NAMED.sub("", found.words)
    for host in filter(None, (socket.gethostname(), m.cluster.address)):
        words = words.replace(host, "HOST")
    seconds = round(time.monotonic() - start, 1)
    return dict(
        name=own["name"], status=found.status, words=words, figures=found.figures, seconds=seconds
    )


def name_of(m: Machine) -> str:
    """Of the file of a machine's verdicts."""
    kind = re.sub("[^A-Za-z0-9]+", "-", m.about["device"]) if m.cuda else "CPU"
    how = "-simulated" * bool(m.world) + "-tiny" * m.tiny
    nodes = f"-on-{m.cluster.nodes}-nodes" * (m.cluster.nodes > 1)
    return f"verify-{kind}-{m.all_ranks}{nodes}{how}.json"


def table(verdicts: dict) -> str:
    """A row for each check."""
    keys = dict(what="name", verdict="status", s="seconds")
    columns = [
        (title, [str(told[key]) for told in verdicts.values()]) for title, key in keys.items()
    ]
    return markdown([("part", [*verdicts]), *columns])


def main(own: argparse.Namespace, settings: dict, numbers: list[str]) -> int:
    """Checks, tells, writes the file; returns the exit code."""
    known = settings["checks"]
    try:
        if not numbers:
            raise ValueError(
                f"--only {' '.join(own.only)}: must be 1 to 5, or of {', '.join(known)}"
            )
        m = machine(own, settings, 0 if own.device == "cpu" else gpus())
    except ValueError as error:
        fail(str(error), 0)
    if m.cluster.node:
        return m.cluster.follow(60 * own.minutes)
    if not own.only and not m.world:
        numbers = [number for number in numbers if not number.startswith("5.")]
    path = m.out / name_of(m)
    before = json.loads(path.read_text()) if path.exists() else {}
    if before.get("mark") == m.mark:
        m.verdicts = before["verdicts"]
    simulated = " (simulated)" * bool(m.world)
    tell(f"verify on {m.all_ranks} ranks{simulated}, {m.about['device']}, torch {m.about['torch']}")
    for number in numbers:
        again = own.again or m.verdicts.get(number, {}).get("status", "not run") == "not run"
        if again:
            m.verdicts[number] = checked(m, number)
            all_told = dict(mark=m.mark, about=m.about, verdicts=m.verdicts)
            path.write_text(json.dumps(all_told, indent=1, sort_keys=True))
        told = m.verdicts[number]
        line = f"{number} {told['name']}: {told['status']}: {told['words']}"
        tell(line + " (as before)" * (not again))
    tell(f"\n{table({name: m.verdicts[name] for name in known if name in m.verdicts})}")
    tell(f"\n{path}: paste it into an issue of the project, whatever it says; docs/verify.md")
    return m.cluster.end(int(any(told["status"] == "not held" for told in m.verdicts.values())))


if __name__ == "__main__":
    try:
        sys.exit(main(OWN, SETTINGS, IDS))
    except KeyboardInterrupt:  # what has a verdict has one
        sys.exit(130)
    except (ConnectionError, TimeoutError) as error:
        fail(
            f"a node has gone: {one_line(error)}; the same line on all nodes goes on from here",
            0,
            1,
        )
