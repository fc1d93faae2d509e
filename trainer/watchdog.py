"""Ends a run that hangs, with exit code 7 and one line: which rank, in which step and collective. Files hold the rest.

    watchdog = Watchdog(3600, rank, world, "runs/hang")  # seconds without progress that are too many
    watchdog.limit = 600                                 # after the first step, which compiles
    watchdog.beat(5, "data")                             # progress: assignments, no call to the system
    watchdog.roll_call("lost the connection")            # by hand: who answers, and where is everybody?
    with watchdog: ...                                   # or its thread goes on

A thread on each rank. The first whose main thread makes no progress for too long calls the roll through the store of
the process group: every rank that still runs writes the stacks of its threads (rank-0.txt) and torch's flight recorder
(flight-0; torchfrtrace -p flight- FOLDER reads it) and says where it is; a rank that does not answer is stopped or
gone. Then all end themselves: a main thread in a collective cannot be woken.
"""

import faulthandler
import json
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

from trainer.sinks import tell

POLL_S, ANSWER_S = 1.0, 5.0  # between looks at the clock and at the store; for the answers of the others
ROOT = Path(__file__).parent.parent


def _collectives() -> tuple[bytes, int, str]:
    """Of this process: the flight recorder of the default group's backend; number of collectives begun in all groups;
    the newest of the default one. All private functions of torch's."""
    dumps = [torch._C._distributed_c10d._dump_fr_trace()]  # of groups that are not NCCL's, which has its own
    if dist.is_initialized() and dist.get_backend() == "nccl":
        dumps.insert(0, torch._C._distributed_c10d._dump_nccl_trace())
    traces = [pickle.loads(dump) for dump in dumps]
    newest = [entry["profiling_name"] for entry in traces[0]["entries"] if entry["pg_id"] == 0][-1:]
    begun = sum(each["last_enqueued_collective"] for trace in traces for each in trace["pg_status"].values())
    return dumps[0], begun, "".join(newest)


def _where(thread: int) -> str:
    """The innermost line of this project that a thread is in."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT) and path.name != "watchdog.py" and "site-packages" not in path.parts:
            return f"{path.relative_to(ROOT)}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


class Watchdog:
    """limit: seconds without progress, 0 for no limit; to be changed at will.
    on_end(text): called once, before the process ends."""

    def __init__(self, limit: float, rank: int = 0, world: int = 1, folder: str | Path = "."):
        self.limit, self.rank, self.world, self.folder = limit, rank, world, Path(folder)
        self.step, self.place, self.at = 0, "start", time.monotonic()
        self.main, self.ended, self.lock = threading.get_ident(), threading.Event(), threading.Lock()
        self.on_end: Callable[[str], None] = lambda text: None
        self.end = os._exit
        self.store = None
        if world > 1:  # a connection of its own: the main thread may be waiting in the group's
            self.store = dist.PrefixStore("watchdog", dist.distributed_c10d._get_default_store().clone())
        self.thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self.thread.start()

    def beat(self, step: int, place: str) -> None:
        """step: the one that is being done, from 1 on."""
        self.step, self.place, self.at = step, place, time.monotonic()

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self.ended.set()
        self.thread.join()

    def _watch(self) -> None:
        while not self.ended.wait(POLL_S):
            if self.limit and time.monotonic() - self.at > self.limit:
                self.roll_call(f"no progress for {self.limit:g} s")
            elif self._said("roll") is not None:
                self.roll_call(None)

    def _said(self, key: str) -> str | None:
        with suppress(Exception):  # a store that is gone: the main thread will learn of it
            return self.store.get(key).decode() if self.store.check([key]) else None
        return None

    def leave(self, why: str) -> None:
        """This rank has told why it ends: the others will be silent."""
        with suppress(Exception):
            self.store.set("left", f"rank {self.rank}: {why}")

    def roll_call(self, why: str | None) -> None:
        """Collects where every rank is, and ends the process with exit code 7. why: what happened, or None on a rank
        that was only called."""
        with self.lock:  # the main thread and this one may both find out
            if self.ended.is_set():
                return
            self.ended.set()
            if why is not None:
                with suppress(Exception):
                    self.store.set("roll", why)
            text = self._said("left")
            if text is None:
                answers = self._answers(why)
                text = self._verdict(answers, next((a["why"] for a in answers.values() if a["why"]), "called"))
                if self.rank == min(answers):
                    tell(f"error: {text}", sys.stderr)
            spoken = threading.Thread(target=self.on_end, args=(text,), daemon=True)  # it may hang in its turn
            spoken.start()
            spoken.join(ANSWER_S)
            with suppress(OSError, ValueError):
                sys.stdout.flush()
            self.end(7)

    def _answers(self, why: str | None) -> dict[int, dict]:
        """What each rank that answers says, this one among them."""
        own, trace = dict(step=self.step, place=self.place, why=why, at=_where(self.main), begun=0, newest=""), b""
        with suppress(Exception):
            trace, own["begun"], own["newest"] = _collectives()
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            with open(self.folder / f"rank-{self.rank}.txt", "w") as file:
                print(json.dumps(own), file=file, flush=True)
                faulthandler.dump_traceback(file, all_threads=True)
            (self.folder / f"flight-{self.rank}").write_bytes(trace)
        answers, until = {self.rank: own}, time.monotonic() + ANSWER_S
        with suppress(Exception):
            self.store.set(str(self.rank), json.dumps(own))
            while len(answers) < self.world and time.monotonic() < until:
                for rank in set(range(self.world)) - answers.keys():
                    if self.store.check([str(rank)]):
                        answers[rank] = json.loads(self.store.get(str(rank)))
                time.sleep(0.1)
        return answers

    def _verdict(self, answers: dict[int, dict], why: str) -> str:
        silent = sorted(set(range(self.world)) - answers.keys())
        progress = {rank: (a["step"], a["begun"]) for rank, a in sorted(answers.items())}
        behind = [rank for rank, far in progress.items() if far == min(progress.values())]
        if silent or len(behind) < len(answers):
            ranks, does = silent or behind, "no answer from" if silent else "the others wait for"
            who = f"{does} rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:8]))}"
        else:
            who = "all ranks hang at the same place" if self.world > 1 else "the main thread hangs"
        shown = [*behind[:2], *(rank for rank in answers if rank not in behind)][:3]
        told = []
        for rank, a in ((rank, answers[rank]) for rank in shown):
            begun = f"{a['begun']} collectives begun" + f", the last {a['newest']}" * bool(a["newest"])
            told.append(f"rank {rank}: step {a['step']}, {a['place']}, {a['at']}, {begun}")
        advice = "; a slow step? raise --timeout" * ("no progress" in why)
        return f"{why}: {who}; {'; '.join(told)}; stacks in {self.folder}{advice}"
