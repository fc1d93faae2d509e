"""Kills a training job at random times, lets it go on, and compares the end with the same job left alone. On a CPU.

    python tests/soak.py --steps 400 --kills 8 --seconds 100 [-- FLAGS of main.py]

The job is main.py under torchrun --max-restarts. Killed, at random: one rank, or all of them (torchrun starts them
again); or torchrun, alone or with all its ranks, or torchrun by SIGTERM, SIGHUP or SIGQUIT (the same command is started
again). Most times a while after it trains again, sometimes while it starts. (Each moment of a save: test_killed.py.)

Checked after every kill: the next start goes on from the newest committed step and that nothing unfinished is
taken for a step or stays; whenever no rank runs, that each committed step verifies; in the end that the last step, its
train_state.json and every logged loss are those of the undisturbed job, bit for bit. One line on stdout, exit code 0;
or what was wrong, exit code 1.
"""

import argparse
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

if __name__ == "__main__":  # before torch is imported: --help answers at once
    sys.path.insert(1, str(Path(__file__).parent.parent))
    cut = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    how = dict(formatter_class=argparse.RawDescriptionHelpFormatter)
    parser = argparse.ArgumentParser(usage="soak.py [OPTIONS] [-- FLAGS]", description=__doc__, **how)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--kills", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=100, help="of training, over which the kills are spread")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0, help="of what is killed and when")
    parser.add_argument("--folder", type=Path, help="new; kept (default: a temporary one, kept on failure)")
    ARGS = vars(parser.parse_args(sys.argv[1:cut]))
    FLAGS = sys.argv[cut + 1 :]

import torch
import torch.distributed.checkpoint as dcp
from harness import free_port
from running import TINY, TORCHRUN
from saved import state_of

from trainer.checkpoint.manifest import CheckpointError, verify

STEP = re.compile(r"step-\d{8}")
UNFINISHED = re.compile("tmp.*")
STUCK = 300  # seconds without a line of output after which a job counts as hung; one that compiles is silent for long


class Wrong(Exception):
    """A promise that did not hold."""


def check(holds: bool, problem: str) -> None:
    if not holds:
        raise Wrong(problem)


def wait(log: Path, until: Callable[[str], bool]) -> None:
    """Until what `log` says is enough. Wrong if it says nothing new for STUCK seconds but that ranks wait."""
    told = ""
    before = ""
    since = time.monotonic()
    while not until(told):
        time.sleep(0.01)
        told = log.read_text() if log.exists() else ""
        now = re.sub("^waiting for the other ranks.*\n", "", told, flags=re.M)
        if len(now) != len(before):
            before = now
            since = time.monotonic()
        check(time.monotonic() - since < STUCK, f"no output for {STUCK} s; see {log}")


# ---------------------------------------------------------------------------------------------------- what is compared


def hashes(step: Path) -> dict[str, str]:
    """Of dtype, shape and bytes of every tensor of a saved step, read by torch's own reader."""
    saved = dcp.FileSystemReader(step).read_metadata().state_dict_metadata
    state = {name: torch.empty(t.size, dtype=t.properties.dtype) for name, t in saved.items()}
    with warnings.catch_warnings(action="ignore"):  # that there is no process group
        dcp.load(state, storage_reader=dcp.FileSystemReader(step), no_dist=True)
    return {name: hashlib.blake2b(f"{t.dtype} {t.shape}".encode() + t.reshape(-1).view(torch.uint8).numpy().tobytes(),
                                  digest_size=16).hexdigest() for name, t in state.items()}  # fmt: skip


def losses(folder: Path) -> list[tuple[int, float]]:
    """(step, loss) of all that the runs of `folder`/rows.jsonl logged, steps that were done again among them."""
    found = []
    for file in folder.glob("rows.steps/*.jsonl"):
        for line in file.read_text().splitlines():
            with suppress(ValueError):  # the line that a kill cut short
                row = json.loads(line)
                found.append((row["step"], row["loss"]))
    return found


class Saved:
    """A directory of checkpoints, and what was seen there so far."""

    def __init__(self, folder: Path):
        self.folder, self.newest, self.left, self.verified, self.seen = folder, 0, [], set(), Counter()

    def names(self, kind: re.Pattern) -> list[str]:
        return sorted(filter(kind.fullmatch, os.listdir(self.folder) if self.folder.exists() else []))

    def steps(self) -> list[int]:
        return [int(name.removeprefix("step-")) for name in self.names(STEP)]

    def verify(self) -> None:
        """Every committed step. Only while no rank runs: --keep removes steps."""
        for step in self.steps():
            try:
                verify(str(self.folder / f"step-{step:08d}"))
            except CheckpointError as error:
                raise Wrong(f"a committed step is damaged: {error}") from error
            self.verified.add(step)

    def note(self) -> None:
        """What a kill left, for `check_starts`."""
        self.newest, self.left = max(self.steps(), default=0), self.names(UNFINISHED)

    def check_starts(self, told: str, exact: bool) -> None:
        """Whether each start in what a log told went on from the newest step that `note` saw, or (not `exact`) a later
        one, which a rank that outlived another by a moment may have committed; and removed what was unfinished."""
        check("going back to" not in told, f"a committed step was refused: {told}")
        for start in re.finditer(r"^checkpoint: (?:none in .*fresh|(\S+): resuming after step (\d+),)", told, re.M):
            after = int(start[2] or 0)
            check(after == self.newest or (after > self.newest and not exact), f"{start[0]} Committed: {self.newest}")
            check(not after or start[1] == str(self.folder / f"step-{after:08d}"), start[0])
            there = set(self.left) & set(os.listdir(self.folder))
            check(not there, f"{there} there after a start")
            self.seen.update(starts=1, resumed=int(after > 0))


def compare(killed: Path, alone: Path) -> str:
    """Holds what a job that was killed left in its folder against that of an undisturbed one; says what is equal."""
    for folder in (killed, alone):
        Saved(folder / "run").verify()
        left = Saved(folder / "run").names(UNFINISHED)
        check(not left, f"{folder}: {left} left at the end")
    last = max(Saved(alone / "run").steps())
    one, two = (folder / f"run/step-{last:08d}" for folder in (killed, alone))
    check(one.exists(), f"{one}: is not there")
    a = hashes(one)
    b = hashes(two)
    differ = [name for name in a.keys() | b.keys() if a.get(name) != b.get(name)]
    check(not differ, f"step {last}: {len(differ)} of {len(a)} tensors differ: {differ[:5]}")
    states = [state_of(step) for step in (one, two)]
    check(states[0].pop("run") and states[1].pop("run"), "train_state.json names no run")
    check(states[0] == states[1], f"train_state.json: {states[0]}, undisturbed {states[1]}")
    expected = dict(losses(alone))
    logged = losses(killed)
    check({step for step, _ in logged} == expected.keys(), "not every step was logged")
    for step, loss in logged:
        check(loss == expected[step], f"step {step}: loss {loss}, undisturbed {expected[step]}")
    return (f"at step {last}, sample {states[0]['samples']}: {len(a)} tensors and {len(logged)} logged losses "
            f"({len(logged) - len(expected)} of steps done again) as undisturbed, bit for bit")  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------- run


class Torchrun:
    """A job under torchrun that can be hit; `starts` counts its own starts, `log` gets all output."""

    def __init__(self, folder: Path, ranks: int, restarts: int, argv: list):
        self.log = folder.with_suffix(".log")
        self.process = None
        self.command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
        self.command += ["--max-restarts", str(restarts), "--master-port"]
        output = ["--results", folder / "rows.jsonl", "--save", folder / "run"]
        self.argv = [str(Path(__file__).parent.parent / "main.py"), *map(str, [*argv, *output])]

    def start(self) -> None:
        environment = {k: v for k, v in os.environ.items() if k not in TORCHRUN} | dict(OMP_NUM_THREADS="1")
        with open(self.log, "a") as log:
            command = [*self.command, str(free_port()), *self.argv]
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def ended(self) -> bool:
        return self.process.poll() is not None

    def ranks(self) -> list[int]:
        """Process ids of the ranks that run: children of torchrun that run main.py."""
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):  # it ended meanwhile
                parent = int(stat.read_text().rpartition(")")[2].split()[1])
                if parent == self.process.pid and b"main.py" in (stat.parent / "cmdline").read_bytes():
                    found.append(int(stat.parent.name))
        return found

    def hit(self, what: str, rng: random.Random) -> None:
        """SIGKILL to one rank, all of them, torchrun and all, or torchrun alone; or a signal to torchrun. With torchrun
        all have ended at the return."""
        ranks = self.ranks()
        if what.startswith("SIG"):
            self.process.send_signal(signal.Signals[what])
        elif what in ("torchrun", "torchrun alone"):
            self.process.kill()
        for pid in rng.sample(ranks, dict(one=min(1, len(ranks)), all=len(ranks), torchrun=len(ranks)).get(what, 0)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if what not in ("one", "all"):
            wait(self.log, lambda _: self.ended() and not any(map(runs, ranks)))

    def close(self) -> None:
        if self.process and not self.ended():
            self.hit("torchrun", random.Random())


def runs(pid: int) -> bool:
    """Whether a rank is still there: its id may be another's by now."""
    with suppress(OSError):
        return b"main.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def run(folder: Path, ranks: int, steps: int, kills: int, seconds: float, seed: int, argv: list[str]) -> str:
    """Wrong, or the line that says what was seen."""
    rng = random.Random(seed)
    saved = Saved(folder / "killed/run")
    hits = Counter()
    began = time.monotonic()
    flags = [*TINY, "--data", "stdlib", "--log-every", 1, "--steps", steps, "--save-every", 5, *argv]
    with closing(Torchrun(folder / "killed", ranks, kills, flags)) as job:
        job.start()
        mark = 0  # characters of the log up to the last hit
        for _ in range(kills):
            if rng.random() < 0.8:
                wait(job.log, lambda told, mark=mark: job.ended() or re.search(r"^step +\d", told[mark:], re.M))
            time.sleep(rng.random() * 2 * seconds / kills)
            if job.ended():
                break
            told = job.log.read_text()
            saved.check_starts(told[mark:], exact=False)
            saved.note()
            mark = len(told)
            what = rng.choices(HITS, [4, 1, 1, 2, 2, 1, 1])[0]
            job.hit(what, rng)
            hits[what] += 1
            if job.ended():
                saved.verify()
                job.start()
        wait(job.log, lambda _: job.ended())
        check(not job.process.returncode, f"torchrun: exit code {job.process.returncode}; see {job.log}")
        saved.check_starts(job.log.read_text()[mark:], exact=False)
    took = time.monotonic() - began
    with closing(Torchrun(folder / "alone", ranks, 0, flags)) as alone:
        alone.start()
        wait(alone.log, lambda _: alone.ended())
        check(not alone.process.returncode, f"undisturbed: exit code {alone.process.returncode}; see {alone.log}")
    told = ", ".join(f"{n} {what}" for what, n in hits.items())
    seen = saved.seen
    equal = compare(folder / "killed", folder / "alone")
    return (f"{sum(hits.values())} hits ({told}) in {took:.0f} s; {seen['starts']} starts seen, {seen['resumed']} "
            f"resumed, each from the newest; {equal}")  # fmt: skip


HITS = ["one", "all", "torchrun", "torchrun alone", "SIGTERM", "SIGHUP", "SIGQUIT"]


def main(folder: Path | None, flags: list[str], **options) -> int:
    kept = folder is not None
    folder = folder or Path(tempfile.mkdtemp(prefix="soak-"))
    (folder / "killed").mkdir(parents=True)
    try:
        seen = run(folder.resolve(), argv=flags, **options)
    except (Wrong, TimeoutError) as problem:
        print(f"soak: FAILED: {problem}; all is in {folder}")
        return 1
    print(f"soak: {seen}")
    if not kept:
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(flags=FLAGS, **ARGS))
