"""trainer/distributed/control.py and trainer/fault_tolerance/watchdog.py on one rank; several: test_faults.py"""

import faulthandler
import json
import os
import pickle
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from harness import free_port
from running import module, ran

from trainer.distributed import control, launch
from trainer.distributed.control import Control, Desync, Signals, Stopped, agree
from trainer.distributed.launch import first_here, fresh
from trainer.fault_tolerance import watchdog
from trainer.fault_tolerance.watchdog import Watchdog

GROUP = SimpleNamespace(size=lambda: 2, rank=lambda: 0)  # stands for a group whose collectives are planted


def test_a_signal_is_noted_and_the_handlers_come_back():
    before = [signal.getsignal(kind) for kind in Signals.KINDS]
    with Signals(speak=False) as signals:
        for kind in (signal.SIGTERM, signal.SIGINT):  # at once: a launcher's copy of the first
            os.kill(os.getpid(), kind)
        assert signals.got == signal.SIGTERM
    assert [signal.getsignal(kind) for kind in Signals.KINDS] == before


def test_a_signal_is_seen_by_another_thread_while_the_main_one_is_in_c_and_counts_once(monkeypatch):
    """As in a collective with a rank that hangs. Nothing holds this thread in C: its handler comes late by hand."""
    monkeypatch.setattr(control, "AGAIN_S", 0.0)
    later = []
    monkeypatch.setattr(Signals, "_handle", lambda self, *told: later.append(told))
    with Signals(speak=False) as signals:
        signals.note_pending()
        assert not signals.got
        os.kill(os.getpid(), signal.SIGTERM)
        signals.note_pending()
        assert signals.got == signal.SIGTERM
        assert len(later) == 1
        monkeypatch.undo()
        time.sleep(0.6)
        signals._handle(*later[0])  # a second signal would end the process
        os.kill(os.getpid(), signal.SIGWINCH)
        signals.note_pending()
    assert signals.got == signal.SIGTERM


@pytest.mark.parametrize("passed_on", ["", "SIGTERM,SIGINT", "SIGTERM,SIGHUP"])
def test_under_nohup_a_hangup_is_ignored_unless_torchrun_passes_it_on(passed_on, monkeypatch):
    """Torchrun handles SIGHUP under nohup, too: it sends it to the ranks, and kills them 30 s later."""
    monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", passed_on)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with Signals(speak=False) as signals:
        os.kill(os.getpid(), signal.SIGHUP)
        assert signals.got == (signal.SIGHUP if "SIGHUP" in passed_on else 0)
    assert signal.signal(signal.SIGHUP, before) is signal.SIG_IGN


@pytest.mark.parametrize("over", [False, True])
def test_a_second_signal_ends_the_process_at_once_unless_it_is_ending(over, monkeypatch):
    monkeypatch.setattr(control, "AGAIN_S", 0.0)
    child = os.fork()
    if not child:
        with Signals(speak=False) as signals:
            os.kill(os.getpid(), signal.SIGTERM)
            signals.over = over
            time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGTERM) != over


def test_a_limit_of_cpu_time_that_is_told_again_each_second_lets_the_run_save(monkeypatch):
    monkeypatch.setattr(control, "AGAIN_S", 0.0)
    with Signals(speak=False) as signals:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGXCPU)
            time.sleep(0.01)
        assert signals.got == signal.SIGXCPU


def test_a_second_signal_while_the_first_is_noted_ends_nothing(monkeypatch):
    signals = Signals(speak=False)
    others = [signal.SIGINT]
    clock = SimpleNamespace(monotonic=lambda: others and signals.note(others.pop()) or 1e6)
    monkeypatch.setattr(control, "time", clock)
    monkeypatch.setattr(signal, "signal", lambda *_: pytest.fail("the process would end"))
    signals.note(signal.SIGTERM)
    assert signals.got == signal.SIGTERM and signals.at == 1e6


def test_ctrl_c_is_answered_by_the_rank_that_speaks(capfd):
    for speak in (True, False):
        with Signals(speak):
            os.kill(os.getpid(), signal.SIGINT)
    assert capfd.readouterr().err == "Ctrl-C: stopping after this step; again: at once\n"


@pytest.mark.parametrize("stderr", [None, open(os.devnull)])
def test_a_signal_is_noted_where_nobody_can_be_told(stderr, monkeypatch):
    """`2>&-`, and `2>&1 | tee`, which Ctrl-C ends too: an error in a handler would end the run, unsaved."""
    monkeypatch.setattr(sys, "__stderr__", stderr)
    with Signals() as signals:
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.got == signal.SIGINT


CONNECT = """
from types import SimpleNamespace
from trainer.distributed.launch import connect, shutdown
print(connect(SimpleNamespace(device="cpu", world=0, link=""), 0, 0, 1, timeout=60))
shutdown()
"""


@pytest.mark.long
def test_a_rank_that_is_started_without_stderr_meets_the_others():
    address = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    ranks = dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
    done = ran("sh", "-c", 'exec "$@" 2>&-', "sh", sys.executable, "-c", CONNECT, **address, **ranks)
    assert done.code == 0 and done.out == "cpu\n", done


def test_ranks_that_are_restarted_see_nothing_of_those_before():
    store = dist.HashStore()  # torchrun's, which stays
    store.set_timeout(timedelta(seconds=5))
    for start in range(3):
        with ThreadPoolExecutor(3) as ranks:
            mine = [*ranks.map(lambda rank: fresh(store, rank, 3), range(3))]
        assert not any(each.check(["address"]) for each in mine), f"start {start} sees an older one"
        mine[start].set("address", "")
        assert all(each.check(["address"]) for each in mine), f"start {start}: not the same"
        dist.PrefixStore("start", store).set("word of 1", "of one that was killed before it had an answer")


def test_a_rank_that_does_not_come_is_named():
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=0.1))
    with pytest.raises(dist.DistStoreError, match="no word of ranks 1, 2"):
        fresh(store, 0, 3)


@pytest.fixture
def other(monkeypatch):
    """What another rank would give: its boundary's arguments, and whether it got a signal."""
    asked = []

    class Work:
        def wait(self):
            pass

    def all_reduce(numbers, op, group, async_op):
        assert op == dist.ReduceOp.MAX and group is GROUP and async_op
        k, norm, failed, signum = asked.pop(0)
        told = torch.tensor([k, -k, norm, -norm, failed, signum, False, 0.0, 0.5], dtype=numbers.dtype)
        numbers.copy_(torch.maximum(numbers, told))
        return Work()

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    return asked


def test_what_one_rank_notes_all_learn_at_the_next_boundary(other):
    signals = Signals()
    ranks = Control(signals, GROUP)
    other += [(0, 1.5, False, 0), (1, 1.5, True, 0), (2, 1.5, False, signal.SIGTERM)]
    assert not ranks.exchange(0, 1.5)
    assert not ranks.exchange(1, 1.5, cpu_s=0.25)
    assert ranks.cpu_s == [0.0, 0.5]
    assert ranks.exchange(2, 1.5), "that a save failed elsewhere"
    assert ranks.cpu_s == [0.25, 0.5], "of each rank"
    with pytest.raises(Stopped, match="SIGTERM") as stopped:
        ranks.finish()
    assert stopped.value.signum == signal.SIGTERM
    assert not ranks.finish()


@pytest.mark.parametrize("mine, theirs, told", [
    ((3, 1.0), (4, 1.0), "different steps: 3 to 4"), ((3, 1.0), (3, 1.01), "norms differ between ranks, 1.0 to 1.01"),
    ((3, 1.0), (3, -1.0), "norms differ"), ((3, 1.0), (3, 1.0), None), ((3, 1.0), (3, 1.0 + 1e-6), None),
    ((3, -1.0), (3, -1.0), None), ((3, 0.0), (3, 0.0), None), ((3, float("nan")), (3, -1.0), None),
])  # fmt: skip
def test_ranks_that_drift_apart_are_noticed(mine, theirs, told, other):
    ranks = Control(Signals(), GROUP)
    other.append((*theirs, False, 0))
    ranks.exchange(*mine)
    if told is None:
        assert ranks.finish() is False
    else:
        with pytest.raises(Desync, match=told):
            ranks.finish()


def test_one_rank_stops_at_once():
    signals = Signals()
    alone = Control(signals, None)
    assert alone.exchange(1) is False
    assert alone.exchange(2, failed=True) is True
    signals.got = signal.SIGINT
    with pytest.raises(Stopped, match="SIGINT"):
        alone.exchange(3)


def test_facts_that_differ_are_named_with_the_rank(monkeypatch):
    everyone = [{"--depth": 4, "data": "a"}] * 3
    monkeypatch.setattr(dist, "get_world_size", lambda group: 3)
    monkeypatch.setattr(dist, "all_gather_object", lambda out, own, group: out.__setitem__(slice(None), everyone))
    agree(everyone[0], GROUP)
    agree({"--depth": 5}, None)
    everyone[1:] = [{"--depth": 4, "data": "a"}, {"--depth": 5, "data": "b"}]
    with pytest.raises(Desync, match="--depth: rank 0 has 4, rank 2 5; data: rank 0 has a, rank 2 b; start all"):
        agree(everyone[0], GROUP)
    everyone[1:] = [{"--depth": 5}] * 2
    with pytest.raises(Desync, match=r"--depth: rank 0 has 4, rank 1 5 \(2 ranks differ\); data: rank 0 has a, rank 1"):
        agree(everyone[0], GROUP)


# ------------------------------------------------------------------------------------------------------------- watchdog


class Ended(BaseException):
    """What `os._exit` would do to the thread that calls it."""


@pytest.fixture
def dog(monkeypatch, tmp_path):
    """dog(limit, rank, world): a watchdog that looks every 10 ms, and puts (exit code, what it told) into `ends`."""
    dogs = []
    store = dist.HashStore()
    monkeypatch.setattr(watchdog, "POLL_S", 0.01)
    monkeypatch.setattr(watchdog, "ANSWER_S", 1.0)  # a loaded machine may hold a thread up for tenths of a second
    monkeypatch.setattr(watchdog, "PATIENCE_S", 2.0)
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda *_, **__: None)  # it would end the tests

    def make(limit, rank=0, world=1):
        made = Watchdog(limit, rank, 1, tmp_path / "hang")
        made.world = world
        made.ends = []
        made.told = []
        made.store = store if world > 1 else None

        def end(code):
            made.ends.append(code)
            raise Ended

        made.end = end
        made.on_end = made.told.append
        dogs.append(made)
        return made

    def ended(*these):
        """What each has ended with and told, in the end."""
        for each in these:
            each.thread.join(20)
        return [(each.ends, each.told) for each in these]

    make.ended = ended

    yield make
    for each in dogs:
        each.__exit__()


@pytest.mark.parametrize("torchrun", [True, False])
def test_a_launcher_that_is_gone_is_a_signal_and_a_shell_that_is_gone_is_none(torchrun, dog, monkeypatch, capfd):
    if torchrun:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
        monkeypatch.setenv("LOCAL_RANK", "0")
    made = dog(60)
    made.begun = True
    monkeypatch.setattr(os, "getppid", lambda: 1)
    until = time.monotonic() + (10 if torchrun else 0.2)
    while not made.signals.got and time.monotonic() < until:
        time.sleep(0.01)
    assert made.signals.got == (signal.SIGTERM if torchrun else 0)
    told = capfd.readouterr().err
    while torchrun and "torchrun is gone" not in told and time.monotonic() < until:  # it is told after it is noted
        time.sleep(0.01)
        told += capfd.readouterr().err
    assert ("torchrun is gone" in told) == torchrun


def test_no_progress_ends_the_process_with_the_place_and_the_stacks_in_a_file(dog, tmp_path, capfd):
    mine = dog(0.2)
    mine.beat(7, "data")
    [(ends, told)] = dog.ended(mine)
    assert ends == [7]
    assert len(told) == 1
    line = capfd.readouterr().err
    assert f"failed: {line.removeprefix('error: ')}" == f"{mine.told[0]}\n"
    assert "no progress for 0.2 s: the main thread hangs; rank 0: step 7, data" in line
    assert "tests/test_control.py:" in line
    assert "raise --timeout" in line
    stacks = (tmp_path / "hang/rank-0.txt").read_text()
    assert json.loads(stacks.splitlines()[0])["step"] == 7
    assert "in test_no_progress_ends" in stacks
    assert (tmp_path / "hang/flight-0").exists()


@pytest.mark.parametrize("backend, newest, begun", [("gloo", "gloo:all_reduce", 3), ("nccl", "nccl:all_gather", 10)])
def test_nccl_has_a_flight_recorder_of_its_own(backend, newest, begun, monkeypatch):
    def dump(name, begun):
        entries = [dict(pg_id=0, profiling_name="first"), dict(pg_id=0, profiling_name=name)]
        return pickle.dumps(dict(entries=entries, pg_status={"0": dict(last_enqueued_collective=begun)}))

    dumps = dict(gloo=dump("gloo:all_reduce", 3), nccl=dump("nccl:all_gather", 7))
    monkeypatch.setattr(torch._C._distributed_c10d, "_dump_fr_trace", lambda: dumps["gloo"])
    monkeypatch.setattr(torch._C._distributed_c10d, "_dump_nccl_trace", lambda: dumps["nccl"], raising=False)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    assert watchdog._collectives() == (dumps[backend], begun, newest)


@pytest.mark.long
def test_progress_or_no_limit_ends_nothing(dog):
    never = dog(0)
    often = dog(2.0)
    for k in range(250):
        often.beat(k, "step")
        time.sleep(0.01)
    assert not never.ends + often.ends and never.thread.is_alive() and often.thread.is_alive()


@pytest.mark.parametrize("place, who", [
    ("data", "the others wait for rank 1"), ("eval", "the ranks do different things"),
])  # fmt: skip
def test_the_rank_behind_is_named_by_the_first_that_answers(place, who, dog, capfd, monkeypatch):
    monkeypatch.setattr(watchdog, "ANSWER_S", 10.0)  # both do, and nothing waits for longer
    ahead = dog(0.1, 0, 2)
    behind = dog(0, 1, 2)
    ahead.beat(5, "step")
    behind.beat(4, place)
    assert [ends for ends, _ in dog.ended(ahead, behind)] == [[7], [7]], "the second has no limit: it was called"
    (line,) = capfd.readouterr().err.splitlines()
    assert f"no progress for 0.1 s: {who}; rank 1: step 4, {place}" in line
    assert "rank 0: step 5" in line
    assert ("every rank must call it" in line) == (place == "eval")


def test_a_rank_that_does_not_answer_is_named_and_one_that_has_said_why_is_not(dog, capfd, monkeypatch):
    monkeypatch.setattr(watchdog, "POLL_S", 60)  # their own threads say nothing meanwhile
    mine = dog(0, 1, 3)
    with pytest.raises(Ended):
        mine.roll_call("lost the connection to another rank")
    assert "error: lost the connection to another rank: no answer from ranks 0, 2; rank 1: " in capfd.readouterr().err
    other = dog(0, 0, 2)
    assert other.leave("had enough", 5) and not mine.leave("had it, too", 5), "who leaves first speaks"
    with pytest.raises(Ended):
        other.roll_call("lost the connection to another rank")
    assert capfd.readouterr().err == "" and other.ends == [7] and other.told == ["failed: rank 0: had enough"]


@pytest.mark.long
def test_a_store_that_never_answers_keeps_no_rank_from_ending(dog, capfd):
    """That of a machine that is gone: no connection is closed, and a call waits for ever."""
    mine = dog(0.2, 1, 2)
    for_ever = threading.Event()
    mine.store = SimpleNamespace(**dict.fromkeys(("check", "get", "set", "compare_set"), lambda *_: for_ever.wait(60)))
    mine.thread.join(20)
    for_ever.set()
    assert mine.ends == [7]
    assert "no progress for 0.2 s: no answer from rank 0" in capfd.readouterr().err


@pytest.mark.long
def test_a_rank_that_waits_for_one_that_has_left_ends_with_its_reason(dog, capfd):
    left = dog(0, 0, 3)
    waits = dog(0, 1, 3)
    works = dog(0, 2, 3)
    works.at += 1000
    left.leave("failed: ValueError: a", 1)
    signalled = dog(0, 3, 4)  # by the launcher, for that reason
    signalled.signals.note(signal.SIGTERM)
    assert dog.ended(waits, signalled) == [([7], ["failed: rank 0: failed: ValueError: a"])] * 2
    assert not works.ends and works.thread.is_alive(), "it will come to see it"
    assert not left.ends and left.thread.is_alive(), "it is on its way"
    assert capfd.readouterr().err == ""


@pytest.mark.long
def test_a_signal_before_the_first_step_is_done_ends_all_ranks_with_its_code(dog, capfd):
    signalled = dog(0, 0, 3)
    other = dog(0, 1, 3)
    late = dog(0, 2, 3)
    late.begun = True  # the others have it behind them, too, but do not know it yet
    signalled.signals.note(signal.SIGTERM)
    assert dog.ended(signalled, other, late) == [([143], ["stopped: SIGTERM"])] * 3
    line = "stopped by SIGTERM before the first step was done: nothing was saved\n"
    assert capfd.readouterr().err == line
    alone = dog(0)
    leaves = dog(0)
    leaves.signals.note(signal.SIGTERM)
    leaves.leave("failed: out of data", 3)
    alone.signals.note(signal.SIGINT)
    with pytest.raises(Ended):
        alone.stop(signal.SIGINT)  # what Ctrl-C did to the compiler came first
    time.sleep(2 * watchdog.ANSWER_S)
    assert not leaves.ends, "it is ending, and writes its row"
    assert alone.ends == [130]
    assert capfd.readouterr().err.endswith(line.replace("TERM", "INT"))


@pytest.mark.long
def test_a_signal_and_no_progress_asks_who_is_there_and_names_who_is_not(dog, capfd):
    """A launcher sends it when a rank was killed, which a device that waits for it does not notice."""
    single = dog(0)
    first = dog(0, 0, 2)
    second = dog(0, 1, 2)
    first.store.set("here 1", "")  # it answers at once
    for each in (single, first):
        each.begun = True
        each.signals.note(signal.SIGTERM)
    end = time.monotonic() + 20
    while not first.store.check(["here 0"]) and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(2 * watchdog.ANSWER_S)
    assert first.store.check(["probe"]) and not single.ends + first.ends + second.ends, "a long step or save"
    alone = dog(0, 0, 3)
    alone.begun = True
    alone.signals.note(signal.SIGTERM)
    alone.thread.join(20)
    assert alone.ends == [7]
    assert "SIGTERM came, and nothing moves since: " in capfd.readouterr().err


def test_time_in_which_the_process_was_stopped_does_not_count(dog, monkeypatch):
    """As by Ctrl-Z and fg."""
    clock = SimpleNamespace(ahead=0.0, jump=0.0)
    fake = SimpleNamespace(monotonic=lambda: time.monotonic() + clock.ahead, sleep=time.sleep)
    monkeypatch.setattr(watchdog, "time", fake)
    mine = dog(100)
    looked = threading.Semaphore(0)
    wait = mine.ended.wait

    def stopped(seconds):
        clock.ahead = clock.ahead + clock.jump
        clock.jump = 0.0
        looked.release()
        return wait(seconds)

    mine.ended.wait = stopped
    for jump in (1000.0, 99.0, 0.0, 0.0):
        clock.jump = jump
        assert looked.acquire(timeout=10)
        assert looked.acquire(timeout=10)
    assert not mine.ends
    assert clock.ahead == 1099
    clock.jump = 0.0
    mine.at -= 101
    mine.thread.join(10)
    assert mine.ends == [7]


HELD = """
import ctypes, faulthandler, sys, time
from trainer.fault_tolerance import watchdog

def hold(library):
    library.sleep(6 if sys.argv[1] == "held" else 60)

watchdog.GRACE_S = 1.0
watchdog.POLL_S = 0.4  # ten turns missed, 4 s, count as time in which the process was stopped
with watchdog.Watchdog(1.0, folder=sys.argv[2]) as dog:
    for step in range(3 * (sys.argv[1] == "progress")):
        dog.beat(step, "step")
        time.sleep(0.9)
    if sys.argv[1] != "progress":
        hold(dict(held=ctypes.PyDLL, free=ctypes.CDLL)[sys.argv[1]](None))
time.sleep(2.5)
print("went on")
"""


@pytest.mark.long
@pytest.mark.parametrize("kind, code", [
    ("held", 0), ("free", 7), pytest.param("progress", 0, marks=pytest.mark.slow)])  # fmt: skip
def test_a_call_that_hangs_with_the_interpreters_lock_shows_its_stacks_all_the_same(kind, code, tmp_path):
    """PyDLL keeps the lock in a call, CDLL gives it back, so that the watchdog can call the roll. A call that ends
    after all is forgiven: the watchdog stood still too, as in a process that was stopped."""
    before = time.monotonic()
    done = module(HELD, kind, tmp_path / "hang", timeout=120)
    assert done.code == code, done.err
    assert ("Timeout (" in done.err and "in hold" in done.err) == (kind == "held")
    assert ("main thread hangs" in done.err and "in hold" in (tmp_path / "hang/rank-0.txt").read_text()
            if kind == "free" else not (tmp_path / "hang").exists())  # fmt: skip
    assert ("went on" in done.out) == (kind != "free")
    assert time.monotonic() - before < 55


def test_a_rank_that_another_run_has_where_it_meets_the_others_is_refused():
    """As where two runs on one machine were given one MASTER_PORT: it would wait for an hour."""
    store = dist.HashStore()
    for rank in (0, 1):
        first_here(store, rank)
    with pytest.raises(dist.DistStoreError, match="as rank 1: two runs use one port; .* MASTER_PORT"):
        first_here(store, 1)


@pytest.mark.parametrize(("setting", "compiler", "expected"), [
    (None, "knows", True), (None, "does not know", None), (None, "missing", None), (False, "knows", False),
])  # fmt: skip
def test_vector_instructions_are_taken_unprobed_if_the_compiler_knows_their_flags(
    setting, compiler, expected, monkeypatch, tmp_path
):
    """A compiler that lacks them, as g++ 10 those of AMX, would fail on each kernel."""
    program = tmp_path / "compiler"
    if compiler != "missing":
        program.write_text(f"#!/bin/sh\necho $* > {tmp_path}/flags\nexit {int(compiler != 'knows')}\n")
        program.chmod(0o755)
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    monkeypatch.setattr(launch.cpu_vec_isa, "x86_isa_checker", lambda: ["avx2", "avx512"])
    monkeypatch.setattr(launch.cpp_builder, "get_cpp_compiler", lambda: str(program))
    with launch.inductor.patch({"cpp.vec_isa_ok": setting}):
        launch.skip_probes_of_vector_instructions()
        assert launch.inductor.cpp.vec_isa_ok is expected
    if setting is None and compiler != "missing":
        assert "-mavx512f" in (tmp_path / "flags").read_text()
