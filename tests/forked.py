"""Jobs of main.py on several gloo ranks, each forked from one process that has imported torch: a start costs tenths
of a second where torchrun takes ten. The ranks are processes as any other: they can be killed.

    job = Job(2, ["--steps", "4"], "log")          # begins at once; argv of main.py, both outputs to one file
    job = Job(2, ["--steps", "4"], "out", err="err", cwd="folder")               # or to two, in another folder
    job = Job(2, ["finetune.py", "--model", "folder"], "log")                    # the other program
    job.wait()                                     # [0, 0]; -9 for a rank that was killed
"""

import gc
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

from harness import free_port, processes, start_server


def _rank(
    rank: int, world: int, port: int, argv: list[str], outputs: tuple, cwd: str | None, record: str | None, env: dict
) -> None:
    gc.freeze()  # what was imported stays
    for stream, path in zip((1, 2), outputs, strict=True):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644), stream)
    if cwd:
        os.chdir(cwd)
    names = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, LOCAL_WORLD_SIZE=world)
    os.environ.clear()
    os.environ |= env | {k: str(v) for k, v in names.items()} | dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))

    import torch
    from planted import planting

    import main  # is there already, from the process that this one is forked from
    from trainer.data import Batches
    from trainer.fault_tolerance import watchdog

    watchdog.ANSWER_S = float(env.get("ANSWER_S", 1))
    if rank:
        argv += env.get("RANK_1", "").split()
    if rank and "UNSEED" in env:
        torch.manual_seed = lambda seed, manual=torch.manual_seed: manual(seed + rank)
    if rank and "EVALUATE_ON_0" in env:
        main.Run.evaluate = lambda run: None
    if "SLOW" in env and env["SLOW"].startswith(f"{rank}:"):
        _slow_down(Batches, float(env["SLOW"].partition(":")[2]))
    if "TRACKER_ENDS_IN" in env:
        _end_slowly(float(env["TRACKER_ENDS_IN"]))
    if record:
        _record(Batches, f"{record}/{rank}.jsonl")
    with planting(env["FAULT"]) if "FAULT" in env else nullcontext():
        if argv[:1] != ["finetune.py"]:
            sys.exit(main.main(main.flags.parse(argv, rank), rank, rank, world))
        import finetune
        from trainer.finetuning import config

        sys.exit(finetune.main(config.parse(argv[1:], rank), rank, rank, world))


def _slow_down(batches: type, seconds: float) -> None:
    """Makes each step of this rank take so many seconds of CPU time more."""
    ask = batches.__next__

    def give(self):
        until = time.thread_time() + seconds
        while time.thread_time() < until:
            pass
        return ask(self)

    batches.__next__ = give


def _end_slowly(seconds: float) -> None:
    """Replaces TensorBoard by a tracker whose end takes so long."""
    from trainer import trackers

    nothing = lambda *_: None  # noqa: E731
    tracker = SimpleNamespace(id="id", place="nowhere", first_step=0, log=nothing, summarize=nothing)
    tracker.finish = lambda: time.sleep(seconds)
    trackers.KINDS["tensorboard"] = lambda *_: tracker


def _record(batches: type, path: str) -> None:
    """Makes `batches` write a line for each sample that it gives: its number, a hash of its tokens and targets."""
    ask = batches.__next__

    def give(self):
        first = self.sample + self.rank * self.rows
        tokens, targets = ask(self)
        with open(path, "a") as file:
            for i, row in enumerate(zip(tokens, targets, strict=True)):
                content = b"".join(t.numpy().tobytes() for t in row)
                file.write(json.dumps([first + i, hashlib.blake2b(content, digest_size=16).hexdigest()]) + "\n")
        return tokens, targets

    batches.__next__ = give


class Job:
    """`record`: a folder for what each rank trains on, a file <rank>.jsonl of [sample, hash]. err: a file for standard
    error, if it is to be apart from `log`. cwd: where the ranks run. env: of the ranks;
    ANSWER_S: seconds that a roll call waits; RANK_1: more argv for all ranks but the first; UNSEED: these draw other
    weights; EVALUATE_ON_0: these do not evaluate; FAULT: planted in the run, as tests/planted.py says;
    SLOW: "rank:seconds" of CPU time by which each step of a rank takes longer; TRACKER_ENDS_IN: seconds that the end of
    a stand-in for TensorBoard takes."""

    def __init__(
        self, world: int, argv: Iterable, log: str | Path, record: str | Path | None = None, *,
        err: str | Path | None = None, cwd: str | Path | None = None, **env: str,
    ):  # fmt: skip
        outputs = (str(log), str(err or log))
        folder = cwd and str(cwd)
        samples = record and str(record)
        args = world, free_port(), [*map(str, argv)], outputs, folder, samples, start_server() | env
        self.ranks = [processes.Process(target=_rank, args=(rank, *args), daemon=True) for rank in range(world)]
        for process in self.ranks:
            process.start()

    def ended(self) -> bool:
        return not any(process.is_alive() for process in self.ranks)

    def wait(self, timeout: float = 120) -> list[int]:
        """Exit codes of the ranks. TimeoutError, with no rank left running."""
        end = time.monotonic() + timeout
        for process in self.ranks:
            process.join(max(0, end - time.monotonic()))
        late = [process for process in self.ranks if process.is_alive()]
        for process in late:
            process.kill()
            process.join()
        if late:
            raise TimeoutError(f"{len(late)} ranks were still running after {timeout} s")
        return [process.exitcode for process in self.ranks]
