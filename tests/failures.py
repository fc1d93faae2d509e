"""Injects failures into runs of main.py on two gloo ranks, each of which is started again by the same flags until it
ends, and compares the end bit for bit with that of a run that nothing disturbed. Appends a row.

    python tests/failures.py 25 --seed 1 --results results/failures.jsonl    # 25 failures; some minutes, no GPU
    python tests/failures.py 0 --results results/failures.jsonl              # sums up the rows of a file

seconds_lost of a failure: from the start that it ended until both ranks had ended, less the time of the steps that
the next start did not repeat. A start is a fork of a process that has imported torch; torchrun and that import take
longer. Five seconds of most are those in which a rank waits for an answer of the one that was killed.
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

if __name__ == "__main__":  # programs of the checkout are not installed
    sys.path.insert(1, str(Path(__file__).parent.parent))

import torch
from forked import Job
from running import TINY, rows_of
from saved import hashes, steps_in

from trainer.logging import append_jsonl, read_jsonl
from trainer.measuring import timing

LOCK = Lock()
STEPS = 40
SAVE_EVERY = 2
KILL, TERM, FULL = {-9, 7}, {143}, {4}  # what the ranks may exit with
PLACES = ("data", "forward", "backward", "update")  # of tests/planted.py
KINDS = {  # places, what happens there, exit codes
    "SIGKILL of a rank": (PLACES, "kill", KILL),
    "SIGKILL of a rank in the first step after a start": (PLACES, "kill", KILL),
    "SIGKILL of a rank during a save": (("save", "write", "commit"), "kill", KILL),
    "SIGKILL of all ranks at any time": ((), "", {-9}),
    "SIGTERM to a rank": (PLACES, "term", TERM),
    "full disk during a save": (("save", "write", "commit"), "enospc", FULL),
    "SIGKILL of a rank and a flipped bit in the newest checkpoint": (PLACES, "kill", KILL),
    "SIGKILL of a rank and a torn results file": (PLACES, "kill", KILL),
}


def fault(kind: str, done: int, chance: random.Random) -> str:
    """What tests/planted.py injects into a start after `done` steps, which has to reach it; empty: nothing."""
    places, what, _ = KINDS[kind]
    if not places:
        return ""
    place = chance.choice(places)
    step = done + (1 if "first step" in kind else chance.randint(1, 8))
    if "save" in kind:
        step += -step % SAVE_EVERY
    step = min(step, STEPS)
    # Rank 0 alone begins and commits a save.
    rank = 0 if place in ("save", "commit") else chance.randint(0, 1)
    return f"{rank}:{step}:{place}:{what}"


def flip(step: Path, chance: random.Random) -> tuple[str, bytes]:
    """Flips a bit of a file of a checkpoint; returns the file's path and what it holds now."""
    file = chance.choice(sorted(step.iterdir()))
    content = bytearray(file.read_bytes())
    bit = chance.randrange(8 * len(content))
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)
    return str(file), bytes(content)


def tear(results: Path, chance: random.Random) -> None:
    """Cuts the last line of the rows, as a full disk or a power cut does."""
    content = results.read_bytes() if results.exists() else b""
    results.write_bytes(content[: -chance.randint(1, 50)] if len(content) > 50 else b'{"outcome": "o')


class Trial:
    """A run in `folder` that is started until it ends. row: counts what happens in it."""

    def __init__(self, folder: Path, chance: random.Random, row: dict, step_s: float):
        self.folder = folder
        self.chance = chance
        self.row = row
        self.step_s = step_s
        self.flipped = []  # (file, what it holds since)
        self.flags = [*TINY, "--steps", STEPS, "--save", folder / "run", "--save-every", SAVE_EVERY, "--keep", 3]
        self.flags += ["--results", folder / "rows.jsonl", *["--save-async"] * chance.randint(0, 1)]

    def steps(self) -> list[int]:
        """Of the checkpoints that are whole, also those that were saved again after a bit had been flipped in them."""
        paths = [(Path(file), content) for file, content in self.flipped]
        flipped = {path.parent.name for path, content in paths if path.exists() and path.read_bytes() == content}
        return [k for k in steps_in(self.folder / "run") if f"step-{k:08d}" not in flipped]

    def start(self, kind: str) -> float | None:
        """Starts the run, injects a failure of this kind; returns the seconds that this took until both ranks had
        ended, or None if the run came to its end instead."""
        injected = fault(kind, max(self.steps(), default=0), self.chance)
        begin = time.monotonic()
        job = Job(2, self.flags, self.folder / "log", ANSWER_S="5", **{"FAULT": injected} if injected else {})
        if not injected:
            time.sleep(self.chance.uniform(0, 4))
            for rank in job.ranks:
                rank.kill()
        codes = job.wait()
        seconds = time.monotonic() - begin
        if codes == [0, 0]:
            return None
        if not {*codes} <= KINDS[kind][-1]:
            with LOCK:
                self.row["unforeseen"].append(f"{kind} ({injected}): exit codes {codes}")
        return seconds

    def until_its_end(self, most: int) -> int:
        """Injects at most so many failures; returns how many."""
        before = max(self.steps(), default=0)
        for injected in range(most):
            kind = self.chance.choice([*KINDS])
            seconds = self.start(kind)
            if seconds is None:
                return injected
            if "flipped" in kind and len(self.steps()) > 1:
                step = self.folder / f"run/step-{self.steps()[-1]:08d}"
                self.flipped.append(flip(step, self.chance))
            elif "flipped" in kind:  # the run would have no good one left
                kind = "SIGKILL of a rank"
            if "torn" in kind:
                tear(self.folder / "rows.jsonl", self.chance)
            kept = max(self.steps(), default=0) - before
            before += kept
            with LOCK:
                self.row["failures"][kind] += 1
                self.row["seconds_lost"].append([kind, round(seconds - kept * self.step_s, 2)])
        assert Job(2, self.flags, self.folder / "log").wait() == [0, 0], (self.folder / "log").read_text()[-3000:]
        return most


def one_after_another(place: Path, failures: int, seed: str, row: dict, expected: dict, step_s: float) -> None:
    """Runs, until so many failures have been injected into them."""
    chance = random.Random(seed)
    while failures:
        folder = Path(tempfile.mkdtemp(dir=place))
        trial = Trial(folder, chance, row, step_s)
        failures -= trial.until_its_end(failures)
        log = (folder / "log").read_text()
        flips = Counter(file for file, _ in trial.flipped)
        counts = dict(
            runs=1,
            bit_equal=hashes(folder / f"run/step-{STEPS:08d}") == expected,
            rows_readable=read_jsonl(folder / "rows.jsonl")[-1]["outcome"] == "ok",
            flipped=flips.total(),
            flips_found=sum(min(n, log.count(f"{file}: ")) for file, n in flips.items()),
        )
        with LOCK:  # of all threads
            for name, count in counts.items():
                row[name] += count
        print(f"{row['failures'].total()} failures, {row['bit_equal']} of {row['runs']} runs bit-equal", flush=True)


def measure(failures: int, seed: int, at_once: int = 1) -> dict:
    """The row of so many failures."""
    row = dict(study="failures", world=2, steps=STEPS, seed=seed, at_once=at_once, failures=Counter(), runs=0)
    row |= dict(bit_equal=0, rows_readable=0, flipped=0, flips_found=0, seconds_lost=[], unforeseen=[])
    with tempfile.TemporaryDirectory() as place:
        flags = [*TINY, "--steps", STEPS, "--save", f"{place}/run", "--results", f"{place}/rows.jsonl"]
        assert Job(2, flags, f"{place}/log").wait() == [0, 0], Path(place, "log").read_text()
        expected = hashes(Path(place, f"run/step-{STEPS:08d}"))
        step_s = rows_of(f"{place}/rows.jsonl")[-1]["step_ms"] / 1e3
        shares = [failures // at_once + (i < failures % at_once) for i in range(at_once)]
        with ThreadPoolExecutor(at_once) as threads:
            work = [
                threads.submit(one_after_another, Path(place), share, f"{seed} {i}", row, expected, step_s)
                for i, share in enumerate(shares)
            ]
        for each in work:
            each.result()
    return row | dict(outcome="ok")


def summary(rows: list[dict]) -> str:
    failures = sum((Counter(row["failures"]) for row in rows), Counter())
    by_kind = {kind: [lost for row in rows for own, lost in row["seconds_lost"] if own == kind] for kind in failures}
    seconds = [lost for kind in by_kind.values() for lost in kind]
    unforeseen = [text for row in rows for text in row["unforeseen"]]
    total = {name: sum(row[name] for row in rows) for name in ("runs", "bit_equal", "flipped", "flips_found")}
    return "\n".join((
        f"{failures.total()} failures in {total['runs']} runs, {total['bit_equal']} of which ended bit-equal; "
        f"{total['flips_found']} of {total['flipped']} flipped bits found",
        f"seconds lost per failure: median {statistics.median(seconds):.1f}, worst {max(seconds):.1f}",
        *(f"{n:4} {kind}: median {statistics.median(by_kind[kind]):.1f} s" for kind, n in failures.most_common()),
        *(f"unforeseen: {text}" for text in unforeseen),
    ))  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("failures", type=int, help="how many to inject")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--at-once", type=int, default=1, help="runs at the same time")
    parser.add_argument("--results", default="results/failures.jsonl")
    args = parser.parse_args()
    if args.failures:
        environment = timing.environment(torch.device("cpu"))
        append_jsonl(args.results, environment | measure(args.failures, args.seed, args.at_once))
    print(summary(rows_of(args.results)))


if __name__ == "__main__":
    main()
