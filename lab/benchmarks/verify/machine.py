"""Programs of this project as processes with a limit, and verdicts on what they did."""

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from lab.sweeps.processes import follow_parent, stop
from trainer.logging import read_jsonl

ROOT = Path(__file__).parents[3]
NO_FAULT = 2, 6  # exit codes: flags that were refused, memory that is too small
LATE = "the time of --minutes is over; the same line goes on from here"


class Verdict(Exception):
    """status: held, not held, not run or not measured. words: by how much, or why. Returned or raised by a check."""

    def __init__(self, status: str, words: str, **figures):
        super().__init__(words)
        self.status, self.words, self.figures = status, words, figures


def judged(own: dict, within: bool, **figures) -> Verdict:
    """Of a check with these settings, whose `said` becomes the words."""
    return Verdict("held" if within else "not held", own["said"].format(**own | figures), **figures)


@dataclass
class Machine:
    """Where checks run."""

    ranks: int  # processes
    world: int  # ranks that one process simulates; 0: none
    cuda: bool
    tiny: bool
    out: Path  # folder of rows and verdicts
    until: float  # time.monotonic() when --minutes are over
    settings: dict  # settings.toml
    about: dict  # of timing.environment
    verdicts: dict  # by the numbers of checks

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

    def run(
        self, words: list[str], code: int = 0, program: str = sys.executable, **env: str
    ) -> str:
        """What a program prints. Raises a verdict if it ends with another code, or not in time."""
        limit, left = self.settings["limits"]["program"], self.until - time.monotonic()
        token = f"{os.getpid()}.{time.time_ns()}"
        paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        env = os.environ | dict(OMP_NUM_THREADS="1", PYTHONPATH=paths, SWEEP_TOKEN=token) | env
        with tempfile.TemporaryFile("w+", errors="replace") as log:
            how = dict(stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
            child = subprocess.Popen(
                [program, *words], cwd=ROOT, env=env, preexec_fn=follow_parent, **how
            )
            try:
                ended = child.wait(max(0, min(limit, left)))
            except subprocess.TimeoutExpired:
                hung = Verdict("not held", f"{words[0]} did not end within {limit} s")
                raise hung if limit < left else Verdict("not run", LATE) from None
            finally:
                stop(child, token)
            log.seek(0)
            said = log.read()
        if ended != code:
            lines = [line for line in said.splitlines() if line.strip()] or ["it said nothing"]
            line = next((line for line in lines if line.startswith("error: ")), lines[-1])
            status = "not run" if ended in NO_FAULT or "OutOfMemoryError" in said else "not held"
            raise Verdict(status, f"exit code {ended}, expected {code}: {line[:300]}")
        return said

    def on_ranks(self, n: int, script: str, *words: str, **how) -> str:
        """The same of a script on n ranks."""
        start = ["-m", "trainer.distributed.torchrun", "--standalone", "--nproc-per-node", str(n)]
        if not self.cuda:
            start += ["--start-method", "forkserver"]
        return self.run([*(start if n > 1 else []), script, *words], **how)

    def trained(
        self, n: int, settings: dict[str, str], steps: int = 10, traces: str = ""
    ) -> dict[str, dict]:
        """What ranks.py tells of settings, given as flags of main.py."""
        limits = self.settings["limits"]
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "told.json"
            asked = dict(
                settings=settings,
                steps=steps,
                traces=traces,
                world=self.world,
                folder=folder,
                limits=limits,
            )
            self.on_ranks(n, "lab/benchmarks/verify/ranks.py", str(file), json.dumps(asked))
            return json.loads(file.read_text())

    def row(self, flags: str) -> dict:
        """The row of main.py with these flags on all ranks, which is not run again if OUT/verify.jsonl has it."""
        results, cell = self.out / "verify.jsonl", f"{self.mark} nproc={self.ranks} {flags}"
        simulated = ["--world", str(self.world)] if self.world else []
        for _ in range(2):
            for row in read_jsonl(results) if results.exists() else []:
                if row.get("cell") == cell and row["outcome"] == "ok":
                    return row
            own = [*flags.split(), *simulated, "--device", self.kind, "--results", str(results)]
            self.on_ranks(self.ranks, "main.py", *own, SWEEP_CELL=cell)
        raise Verdict("not held", "main.py ended well and left no row")
