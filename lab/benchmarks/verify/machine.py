"""Programs of this project as processes with a limit, and verdicts on what they did."""

import json
import re
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from lab.benchmarks.verify.cluster import Cluster
from trainer.distributed.torchrun import FOLLOWING
from trainer.logging import read_jsonl

NO_FAULT = 2, 6  # exit codes: flags that were refused, memory that is too small
WHY = re.compile(r"error: |\d+ of \d+ cells without")  # of a program, of a sweep
LATE = "the time of --minutes is over; the same line goes on from here"


class Verdict(Exception):
    """status: held, not held, not run or not measured. words: by how much, or why. Returned or raised by a check."""

    def __init__(self, status: str, words: str, **figures):
        super().__init__(words)
        self.status = status
        self.words = words
        self.figures = figures


def judged(own: dict, within: bool, **figures) -> Verdict:
    """Of a check with these settings, whose `said` becomes the words."""
    return Verdict("held" if within else "not held", own["said"].format(**own | figures), **figures)


def beside(own: dict, value: float, reference: float, **figures) -> Verdict:
    """Of a check that holds if a value is off the reference by `most` of it."""
    off = value / reference - 1
    return judged(own, abs(off) <= own["most"], off=off, **figures)


@dataclass
class Machine:
    """Where checks run."""

    ranks: int  # processes, on all nodes
    world: int  # ranks that one process simulates; 0: none
    cuda: bool
    tiny: bool
    out: Path  # folder of rows and verdicts
    until: float  # time.monotonic() when --minutes are over
    settings: dict  # settings.toml
    about: dict  # of timing.environment
    verdicts: dict  # by the numbers of checks
    cluster: Cluster = field(default_factory=Cluster)

    @property
    def all_ranks(self) -> int:
        return self.world or self.ranks

    @property
    def kind(self) -> str:
        return "cuda" if self.cuda else "cpu"

    @property
    def mark(self) -> str:
        """What must be the same for a row or a verdict to count still."""
        return " ".join(self.about[key] for key in ("commit", "code", "torch", "device"))

    def needs_ranks(self) -> None:
        """Raises a verdict on simulated ranks."""
        if self.world:
            raise Verdict("not measured", f"{self.world} ranks are simulated in one process")

    def needs_gpus(self) -> None:
        """Raises a verdict on CPUs and on simulated ranks."""
        self.needs_ranks()
        if not self.cuda:
            raise Verdict("not measured", "there is no GPU")

    def folder(self) -> tempfile.TemporaryDirectory:
        """For the files of a check, which ranks on other nodes may have to see."""
        return tempfile.TemporaryDirectory(dir=self.out if self.cluster.nodes > 1 else None)

    def run(self, words: list[str], code: int = 0, on_all: bool = False, **env: str) -> str:
        """What a program prints. Raises a verdict if it ends with another code, or not in time."""
        limit = self.settings["limits"]["program"]
        left = self.until - time.monotonic()
        how = dict(limit=max(0, min(limit, left)), env=env, on_all=on_all)
        codes, said = self.cluster.run(words=words, **how)
        if None in codes:
            if limit < left:
                raise Verdict("not held", f"{words[0]} did not end within {limit} s")
            raise Verdict("not run", LATE)
        # Of the node that failed first: others follow.
        ended = max(codes, key=lambda each: (each not in (0, *FOLLOWING), each))
        if ended != code:
            lines = [line for line in said.splitlines() if line.strip()] or ["it said nothing"]
            line = next((line for line in lines if WHY.match(line)), lines[-1])
            status = "not run" if ended in NO_FAULT or "OutOfMemoryError" in said else "not held"
            raise Verdict(status, f"exit code {ended}, expected {code}: {line[:300]}")
        return said

    def nodes_of(self, n: int) -> int:
        """1 or all, by which n ranks run on as many nodes; 0 if they cannot, with as many on each."""
        nodes = self.cluster.nodes
        if n <= self.ranks // nodes:
            return 1
        return 0 if n % nodes else nodes

    def on_ranks(self, n: int, script: str, *words: str, **how) -> str:
        """The same of a script on n ranks."""
        nodes = self.nodes_of(n)
        if not nodes:
            raise Verdict("not run", f"{n} ranks do not divide among {self.cluster.nodes} nodes")
        start = []
        if n > 1:
            start = self.cluster.torchrun(n // nodes, nodes > 1)
            start += ["--start-method", "forkserver"] * (not self.cuda)
        return self.run([*start, script, *words], on_all=nodes > 1, **how)

    def trained(
        self, n: int, settings: dict[str, str], steps: int = 10, traces: str = ""
    ) -> dict[str, dict]:
        """What ranks.py tells of settings, given as flags of main.py."""
        with self.folder() as folder:
            file = Path(folder) / "told.json"
            asked = dict(
                settings=settings,
                steps=steps,
                traces=traces,
                world=self.world,
                folder=folder,
                limits=self.settings["limits"],
            )
            self.on_ranks(n, "lab/benchmarks/verify/ranks.py", str(file), json.dumps(asked))
            return json.loads(file.read_text())

    def row(self, flags: str) -> dict:
        """The row of main.py with these flags on all ranks, which is not run again if OUT/verify.jsonl has it."""
        results = self.out / "verify.jsonl"
        cell = f"{self.mark} nproc={self.ranks} {flags}"
        simulated = ["--world", str(self.world)] if self.world else []
        for _ in range(2):
            for row in read_jsonl(results) if results.exists() else []:
                if row.get("cell") == cell and row["outcome"] == "ok":
                    return row
            own = [*flags.split(), *simulated, "--device", self.kind, "--results", str(results)]
            self.on_ranks(self.ranks, "main.py", *own, SWEEP_CELL=cell)
        raise Verdict("not held", "main.py ended well and left no row")
