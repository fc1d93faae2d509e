"""Ends a run that hangs, with exit code 7 and one line: which rank, in which step and collective. Files hold stacks.

    with Watchdog(3600, rank, world, "runs/hang") as watchdog:  # seconds without progress that are too many
        watchdog.beat(5, "data")                                # progress: assignments, no call to the system

A thread on each rank. The first whose main thread makes no progress for too long calls the roll through the store of
the process group: every rank that answers writes its stacks (rank-0.txt) and torch's flight recorder (flight-0, read by
torchfrtrace -p flight- FOLDER). Then all end themselves, since a main thread in a collective cannot be woken. A rank
also ends if it still waits after another has left (`leave`) or SIGTERM, or at a signal before the first step is done.
A torchrun that is gone, as after kill -9, is what SIGTERM is: nobody else would ever end its ranks.
"""

import faulthandler
import json
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainer.checkpoint.lock import release_all
from trainer.distributed.control import Signals
from trainer.distributed.environment import has_launcher
from trainer.terminal.output import tell

POLL_S = 1.0  # between looks at the clock and at the store
ANSWER_S = 5.0  # for the answers of the others
# More than one turn of the watchdog's loop takes while the store does not answer (two questions: 21
# s).
GRACE_S = 25.0
# Without progress, after another rank has left or a signal came; launchers wait for 30.
PATIENCE_S = 10.0
ROOT, LIBRARY = Path(__file__).parents[2], Path(os.__file__).parent  # of this project, of Python


def _collectives() -> tuple[bytes, int, str]:
    """(flight recorder of the default group, collectives begun in all groups, name of the default group's newest)."""
    # Of groups that are not NCCL's, which has its own.
    dumps = [torch._C._distributed_c10d._dump_fr_trace()]
    if dist.is_initialized() and dist.get_backend() == "nccl":
        dumps.insert(0, torch._C._distributed_c10d._dump_nccl_trace())
    traces = [pickle.loads(dump) for dump in dumps]
    newest = [entry["profiling_name"] for entry in traces[0]["entries"] if entry["pg_id"] == 0][-1:]
    begun = sum(
        each["last_enqueued_collective"] for trace in traces for each in trace["pg_status"].values()
    )
    return dumps[0], begun, "".join(newest)


def _where(thread: int) -> str:
    """The innermost line that a thread is in, of this project or of a program of one's own that uses this file."""
    for frame, line in traceback.walk_stack(sys._current_frames()[thread]):
        path = Path(frame.f_code.co_filename)
        library = path.is_relative_to(LIBRARY) or "site-packages" in path.parts
        if not library and path.name not in ("watchdog.py", "errors.py"):
            return f"{path.relative_to(ROOT) if path.is_relative_to(ROOT) else path.name}:{line}"
    return "?"


class Watchdog(AbstractContextManager):
    """Ends this process with exit code 7 if `beat` is not called for `limit` seconds, see the head of the file.

    limit: seconds, 0: for ever; may be changed, as after the first step. rank, world: of torch.distributed. folder: for
    the files with stacks. begun: whether a step is done: a signal then waits for the next boundary. on_end(outcome):
    called once, before the end."""

    def __init__(
        self,
        limit: float,
        rank: int = 0,
        world: int = 1,
        folder: str | Path = ".",
        signals: Signals | None = None,
    ):
        self.limit = limit
        self.rank = rank
        self.world = world
        self.folder = Path(folder)
        self.signals = signals or Signals()
        self.begun = False
        self.leaving = False
        self.step = 0
        self.place = "start"
        self.at = time.monotonic()
        self.orphaned = threading.Lock()  # held once it is known that torchrun is gone
        self.main = threading.get_ident()
        self.ended = threading.Event()
        self.lock = threading.Lock()
        self.on_end: Callable[[str], None] = lambda outcome: None
        self.clear: Callable[[], None] = lambda: None  # removes what stands on a terminal
        self.end = os._exit
        self.store = None
        self.asking = threading.Lock()
        self.silent = False
        if world > 1:  # a connection of its own: the main thread may be waiting in the group's
            self.store = dist.PrefixStore(
                "watchdog", dist.distributed_c10d._get_default_store().clone()
            )
        self._arm(limit)  # the thread may never come to its first turn
        self.thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self.thread.start()

    def beat(self, step: int, place: str) -> None:
        """Notes progress. step: the one that is being done, from 1 on; place: what of it, as "data"."""
        self.step = step
        self.place = place
        self.at = time.monotonic()

    def __exit__(self, *_) -> None:
        self.ended.set()
        self.thread.join()
        faulthandler.cancel_dump_traceback_later()

    def _arm(self, seconds: float) -> None:
        """Writes all stacks to stderr after `seconds` and GRACE_S, unless called again: by faulthandler's timer, since
        a C function that hangs may hold the interpreter's lock, without which this thread stands still. The timer does
        not end the process, because it also counts the time in which one is stopped (Ctrl-Z, a suspended job)."""
        faulthandler.cancel_dump_traceback_later()
        if self.limit and sys.__stderr__ is not None:
            faulthandler.dump_traceback_later(max(0, seconds) + GRACE_S, file=sys.__stderr__)

    def _watch(self) -> None:
        # When another rank was seen to have left; when it was asked who is there.
        left = probed = 0.0
        before = time.monotonic()
        while not self.ended.wait(POLL_S):
            now = time.monotonic()
            # This process was stopped, as by Ctrl-Z, and its main thread with it.
            if now - before > 10 * POLL_S:
                self.at = min(self.at + now - before, now)
            self.follow_launcher()
            self.signals.note_pending()
            still = now - self.at
            got = self.signals.got
            self._arm(self.limit - still)
            roll, gone, probe = self._heard("roll", "left", "probe")
            left = left or now * (gone is not None)
            if probe is not None:
                self._ask(lambda: self.store.set(f"here {self.rank}", ""))
            if self.limit and still > self.limit:
                self.roll_call(f"no progress for {self.limit:g} s")
            elif (
                roll is not None
                or left
                and not self.leaving
                and min(still, now - left) > PATIENCE_S
            ):
                self.roll_call(None)
            elif self.leaving or not got:
                pass
            elif not self.begun and now - self.signals.at > ANSWER_S:
                self.stop(got)
            elif (
                self.store is not None
                and not probed
                and min(still, now - self.signals.at) > PATIENCE_S
            ):
                probed = now
                self._ask(lambda: self.store.set("probe", ""))
            elif probed and still > now - probed > ANSWER_S:
                if not self._ask(
                    lambda: self.store.check([f"here {rank}" for rank in range(self.world)])
                ):
                    self.roll_call(f"{signal.Signals(got).name} came, and nothing moves since")
            before = time.monotonic()

    def follow_launcher(self) -> None:
        """Stops, as at SIGTERM, when torchrun is gone, and says so once."""
        if has_launcher() or not self.orphaned.acquire(blocking=False):
            return
        if not self.signals.got:
            self.signals.note(signal.SIGTERM)
        if os.environ.get("LOCAL_RANK") == "0":
            tell("warning: torchrun is gone: its ranks stop, as at SIGTERM", sys.stderr)

    def _ask(self, work: Callable[[], Any]) -> Any:
        """What `work` gets from the store; None if it fails or takes ANSWER_S, as when the store's machine is gone."""
        answer = []
        if self.store is None or not self.asking.acquire(timeout=0 if self.silent else ANSWER_S):
            return None  # the main thread asks as well

        def ask() -> None:
            with suppress(Exception):  # the main thread will learn of it
                answer.append(work())
            self.asking.release()

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(ANSWER_S)
        self.silent = thread.is_alive()
        return answer[0] if answer else None

    def _heard(self, *keys: str) -> list[str | None]:
        """The values of these keys in the store; None for a key that it does not have."""

        def read() -> list[str | None]:
            has = self.store.check
            return [self.store.get(key).decode() if has([key]) else None for key in keys]

        return self._ask(read) or [None] * len(keys)

    def leave(self, why: str, code: int) -> bool:
        """Tells the others why this rank ends; they end in silence. Returns whether it is the first, which speaks."""
        self.leaving = True
        own = json.dumps([code, f"rank {self.rank}: {why}"])
        first = self._ask(lambda: self.store.compare_set("left", "", own).decode())
        return first in (own, None)

    def stop(self, signum: int) -> None:
        """Ends the process at once with the exit code of a signal: there is nothing to save."""
        with self.lock:
            if self.ended.is_set():
                return
            self.ended.set()
            name = signal.Signals(signum).name
            if not self.leave(name, 128 + signum):
                return self._follow()
            line = f"stopped by {name} before the first step was done: nothing was saved"
            self._end(line, f"stopped: {name}", 128 + signum)

    def roll_call(self, why: str | None, more: str = "") -> None:
        """Collects where every rank is, and ends the process with exit code 7. why: what happened, or None on a rank
        that was only called; more: text to put after the line that says it."""
        with self.lock:  # the main thread and this one may both find out
            if self.ended.is_set():
                return
            self.ended.set()
            self._arm(2 * GRACE_S)  # the roll call must not hang either
            if why is not None:
                self._ask(lambda: self.store.set("roll", why))
            if self._heard("left") != [None]:
                return self._follow()
            answers = self._answers(why)
            text = (
                self._verdict(
                    answers, next((a["why"] for a in answers.values() if a["why"]), "called")
                )
                + more
            )
            if speaks := self.rank == min(answers):
                heard = [f"heard {rank}" for rank in answers if rank != self.rank]
                self._wait_for(heard, ANSWER_S)
            else:  # launchers end the others as soon as one is gone
                self._wait_for(["reported"], 3 * ANSWER_S)  # it waits, then may need 2 * ANSWER_S
            self._end(f"error: {text}" if speaks else None, f"failed: {text}", 7)

    def _follow(self) -> None:
        """Ends for the reason of the rank that was the first to leave, which has said it."""
        code, text = json.loads(self._heard("left")[0] or '[7, "another rank has left"]')
        stopped = code in Signals.CODES
        outcome = f"stopped: {signal.Signals(code - 128).name}" if stopped else f"failed: {text}"
        self._end(None, outcome, code if stopped else 7)

    def _end(self, line: str | None, outcome: str, code: int) -> None:
        def last() -> None:
            self.clear()
            if line is not None:
                tell(line, sys.stderr)
            # os._exit calls no exit handler, which would give the locks of directories back.
            release_all()
            self.on_end(outcome)
            with suppress(OSError, ValueError):
                sys.stdout.flush()
            if line is not None:
                self._ask(lambda: self.store.set("reported", ""))

        spoken = threading.Thread(target=last, daemon=True)  # a thread, because it may hang as well
        spoken.start()
        spoken.join(2 * ANSWER_S)  # a row asks nvidia-smi, which may hang too, for 5 s
        self.end(code)

    def _answers(self, why: str | None) -> dict[int, dict]:
        """{rank: what it says of itself}, of ranks that answer in ANSWER_S. Writes this one's stacks and recorder."""
        own = dict(
            step=self.step, place=self.place, why=why, at=_where(self.main), begun=0, newest=""
        )
        trace = b""
        with suppress(Exception):
            trace, own["begun"], own["newest"] = _collectives()
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            with open(self.folder / f"rank-{self.rank}.txt", "w") as file:
                print(json.dumps(own), file=file, flush=True)
                faulthandler.dump_traceback(file, all_threads=True)
            (self.folder / f"flight-{self.rank}").write_bytes(trace)
        answers = {self.rank: own}
        until = time.monotonic() + ANSWER_S
        self._ask(lambda: self.store.set(str(self.rank), json.dumps(own)))
        while len(answers) < self.world and time.monotonic() < until:
            silent = [rank for rank in range(self.world) if rank not in answers]
            replies = zip(silent, self._heard(*map(str, silent)), strict=True)
            answers |= {rank: json.loads(text) for rank, text in replies if text is not None}
            time.sleep(0.1)
        # The rank that speaks may hold the store, which the others still ask.
        self._ask(lambda: self.store.set(f"heard {self.rank}", "1"))
        return answers

    def _wait_for(self, keys: list[str], seconds: float) -> None:
        """Until the store has them, so long at most. A store that is gone, with the rank that has spoken, ends it."""
        until = time.monotonic() + seconds
        while self._ask(lambda: self.store.check(keys)) is False and time.monotonic() < until:
            time.sleep(0.1)

    def _verdict(self, answers: dict[int, dict], why: str) -> str:
        """The line for people: which ranks are behind or silent, and where they and one of the others are."""
        silent = sorted(set(range(self.world)) - answers.keys())
        progress = {rank: (a["step"], a["begun"]) for rank, a in sorted(answers.items())}
        behind = [rank for rank, far in progress.items() if far == min(progress.values())]
        # Ranks that have begun as many collectives, but other ones.
        newest = {(a["begun"], a["newest"]) for a in answers.values()}
        places = {a["place"] for a in answers.values()} - {"start", "data"}
        apart = len(places) > 1 or len(newest) > len({a["begun"] for a in answers.values()})
        if not silent and apart:
            who = "the ranks do different things"
        elif silent or len(behind) < len(answers):
            ranks = silent or behind
            does = "no answer from" if silent else "the others wait for"
            who = f"{does} rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:8]))}"
        else:
            who = "all ranks hang at the same place" if self.world > 1 else "the main thread hangs"
        shown = [*behind[:2], *(rank for rank in answers if rank not in behind)][:3]
        places_of_ranks = []
        for rank, a in ((rank, answers[rank]) for rank in shown):
            begun = f"{a['begun']} collectives begun" + f", the last {a['newest']}" * bool(
                a["newest"]
            )
            places_of_ranks.append(
                f"rank {rank}: step {a['step']}, {a['place']}, {a['at']}, {begun}"
            )
        advice = "; a slow step? raise --timeout" * ("no progress" in why)
        if apart:  # a habit of DDP, where it works
            advice = "; no rank may evaluate, sample or save alone: every rank must call it"
        return f"{why}: {who}; {'; '.join(places_of_ranks)}; stacks in {self.folder}{advice}"
