"""Where the proof runs: programs of this project as processes with a limit, on the GPUs or CPU ranks of one machine."""

import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch

from lab.sweeps.processes import follow_parent, stop
from trainer.logging import check_writable, read_jsonl

ROOT = Path(__file__).parents[3]
RANKS = Path(__file__).with_name("ranks.py")
LIMIT_S = 480  # after which a program counts as hanging
NO_MEMORY = 6  # exit code of a setting that this machine is too small for
SIMULATED = 8  # ranks on one GPU
# No number of ranks divides 257, and 60 has few divisors, so shards are uneven.
TINY = "--depth 2 --width 60 --head-dim 10 --grouping 2 --vocab 257 --seqlen 32 --lr 3e-3 --param-dtype fp32"
SEQUENCES = 24  # of a step of the tiny model, or the least multiple that the ranks divide
REFERENCE = "--remat none --steps 16"  # all else as the defaults on a GPU


@dataclass(frozen=True)
class Machine:
    """The ranks that programs get."""

    device: str  # "cuda" or "cpu"
    processes: int
    simulated: int  # ranks that one process simulates; 0: none
    out: Path  # folder of rows

    @property
    def ranks(self) -> int:
        return self.simulated or self.processes

    def needs_ranks(self) -> None:
        if self.simulated:
            pytest.skip(f"{self.simulated} ranks are simulated in one process")

    def needs_gpus(self, real: bool = True) -> None:
        if self.device == "cpu":
            pytest.skip("there is no GPU")
        if real:
            self.needs_ranks()

    def run(self, *command: object, code: int = 0, **environment: str) -> str:
        """What a program prints, whose exit code must be this one. Fails or skips the test otherwise."""
        words = [*map(str, command)]
        token = f"{os.getpid()}.{time.time_ns()}"
        paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment |= dict(SWEEP_TOKEN=token, PYTHONPATH=paths, OMP_NUM_THREADS="1")
        how = dict(cwd=ROOT, env=os.environ | environment, stdin=subprocess.DEVNULL, start_new_session=True)
        with tempfile.TemporaryFile("w+", errors="replace") as log:
            child = subprocess.Popen(words, stdout=log, stderr=log, preexec_fn=follow_parent, **how)
            try:
                ended = child.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                pytest.fail(f"{' '.join(words)} did not end within {LIMIT_S} s", pytrace=False)
            finally:
                stop(child, token)
            log.seek(0)
            said = log.read()
        if ended != code:
            lines = [line for line in said.splitlines() if line.strip()]
            errors = [line for line in lines if line.startswith("error: ")] or lines[-20:]
            problem = "\n".join([f"{' '.join(words)}: exit code {ended}, expected {code}", *errors])
            pytest.skip(problem) if ended == NO_MEMORY else pytest.fail(problem, pytrace=False)
        return said

    def on_ranks(self, processes: int, script: str | Path, *words: object, **how) -> str:
        """What a script prints on so many ranks, as ./launch.sh run starts it."""
        start = ["-m", "trainer.distributed.torchrun", "--standalone", "--nproc-per-node", processes]
        return self.run(sys.executable, *start * (processes > 1), script, *words, **how)

    def tiny(self, ranks: int, *more: str) -> str:
        """Flags of the tiny model on so many ranks, which have the same sequences together on any number."""
        sequences = math.lcm(SEQUENCES, self.ranks)
        words = [TINY, "--device", self.device, "--batch", str(sequences // ranks), *more]
        words += ["--deterministic", "--attn", "math"] * (self.device == "cuda")
        words += ["--world", str(self.simulated)] * bool(self.simulated)
        return " ".join(words)

    def trained(self, processes: int, settings: dict[str, str]) -> dict[str, dict]:
        """What ranks.py writes of settings, which are flags of main.py."""
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "settings.json").write_text(json.dumps(settings))
            try:
                self.on_ranks(processes, RANKS, folder)
            except pytest.fail.Exception as error:
                stacks = sorted(path for path in Path(folder).glob("stacks-*") if path.stat().st_size)
                which = "\n".join(f"{path.name}: {path.read_text()[:300]}" for path in stacks)
                pytest.fail(f"{error}\n{which}", pytrace=False)
            return json.loads(Path(folder, "trained.json").read_text())

    @cache  # noqa: B019  # a machine lives as long as its session
    def row(self, flags: str) -> dict:
        """The row of main.py with these flags, on all ranks."""
        results = self.out / "verify.jsonl"
        words = [*flags.split(), *["--world", self.simulated] * bool(self.simulated)]
        words += ["--device", self.device, "--results", results]
        self.on_ranks(self.processes, "main.py", *words)
        return read_jsonl(results)[-1]


def machine(device: str, world: int, environment: dict[str, str], out: Path) -> Machine | None:
    """That of the flags and of NPROC; None if there is no GPU and no --device cpu. ValueError: what does not fit."""
    gpus = torch.cuda.device_count() if device == "cuda" else 0
    processes = environment.get("NPROC") or str(gpus or 2)
    if environment.get("NNODES", "1") != "1":
        raise ValueError("NNODES: the proof is of one machine; ./launch.sh nodes measures several")
    if world < 0 or world == 1:
        raise ValueError(f"--world {world}: must be at least 2")
    if not re.fullmatch("[1-9][0-9]?", processes):
        raise ValueError(f"NPROC={processes}: expected a number of processes below 100")
    if gpus and int(processes) > gpus:
        raise ValueError(f"NPROC={processes}: there are {gpus} GPUs; give {gpus} at most, or --device cpu")
    if device == "cuda" and not gpus:
        return None
    alone = int(processes) == 1
    if alone and not gpus and not world:
        raise ValueError("NPROC=1: one rank has nobody to talk to; NPROC=2, or --world 8 to simulate")
    check_writable(str(out / "verify.jsonl"))
    simulated = world or (SIMULATED if alone else 0)
    return Machine(device, 1 if simulated else int(processes), simulated, out)
