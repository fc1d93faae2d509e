"""Faults planted in real runs (tests/planted.py): each ends as promised, in a line, and loses nothing.

    pytest tests/test_faults.py        # no GPU; a minute on one core; kill -9 in saves: tests/test_killed.py
"""

import errno
import os
import re
import resource
import shutil
import signal
import time
from multiprocessing import connection
from pathlib import Path
from types import SimpleNamespace

import planted
import pytest
import torch
import torch.distributed as dist
from forked import Job
from harness import free_port, processes, start_server
from running import TINY, end_of_signal, fails, read
from saved import assert_bitwise, contents, state_of, steps_in

from simple_fsdp import data_parallel
from trainer.checkpoint import save as saver
from trainer.checkpoint.manifest import verify
from trainer.distributed.control import Control, control_group
from trainer.fault_tolerance import errors, watchdog
from trainer.fault_tolerance.stragglers import Stragglers
from trainer.fault_tolerance.watchdog import Watchdog

pytestmark = pytest.mark.usefixtures("isolated")


# ------------------------------------------------------------------------------------------------------------ one rank


@pytest.mark.long
@pytest.mark.parametrize("fault, code", [
    ("*:3:data:term", 143), ("0:3:backward:int", 130), ("0:3:update:quit", 131), ("0:3:data:usr1", 138),
    ("0:3:backward:xcpu", 152),
])  # fmt: skip
def test_a_signal_ends_the_run_after_its_step_saved_and_what_resumes_is_bitwise_the_run(
    fault, code, train, tmp_path
):
    argv = "--log-every", 1, "--save"
    stopped = train(*argv, "run", fault=fault)
    assert stopped.code == code
    assert steps_in("run") == [3]
    name = signal.Signals(code - 128).name
    assert stopped.row["outcome"] == f"stopped: {name}"
    assert f"stopped by {name} after step 3" in stopped.err
    assert len(stopped.err.splitlines()) == (2 if name == "SIGINT" else 1), stopped.err
    resumed = assert_goes_on(stopped, argv, train, tmp_path)
    assert resumed.row["resumed_after"] == 3


def assert_goes_on(stopped, argv, train, folder):
    """The same command in `folder`/run trains on to what a run that nothing stops has; returns what it did."""
    resumed = train(*argv, folder / "run")
    assert train(*argv, folder / "whole").losses == stopped.losses + resumed.losses
    assert_bitwise(contents(folder / "run/step-00000006"), contents(folder / "whole/step-00000006"))
    return resumed


@pytest.mark.long
@pytest.mark.parametrize("sync", ["every", "last"])
def test_a_signal_between_micro_batches_drops_the_step_that_was_begun(sync, train, tmp_path):
    argv = "--grad-accum", 3, "--accum-sync", sync, "--log-every", 1, "--save"
    stopped = train(*argv, "run", fault="0:3:forward:term")
    assert stopped.code == 143 and steps_in("run") == [2] and len(stopped.steps) == 2
    assert state_of("run/step-00000002")["samples"] == 2 * 6
    assert_goes_on(stopped, argv, train, tmp_path)


def test_a_signal_without_save_or_before_a_step_or_at_the_end(train, trains, monkeypatch):
    unsaved = train(fault="0:2:data:term")
    assert unsaved.code == 143
    assert "after step 2; nothing is saved without --save" in end_of_signal(unsaved.err)
    trains("--save", "end", fault="0:6:update:term")
    assert steps_in("end") == [6], "it had come to its end"
    monkeypatch.setattr("trainer.run.header", lambda *_: os.kill(os.getpid(), signal.SIGTERM) or [])
    early = train("--save", "early")
    assert early.code == 143
    assert steps_in("early") == []
    assert "stopped by SIGTERM after step 0; there is nothing to save" in end_of_signal(early.err)


def test_what_ctrl_c_does_to_the_compiler_is_no_error_of_the_run(train, tmp_path, monkeypatch):
    """It reaches every process of the terminal."""

    def ended(code):
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", ended)
    done = train("--save", "run", fault="0:1:forward:int,0:1:backward:raise")
    assert done.code == 130 and done.row["outcome"] == "stopped: SIGINT" and [*(tmp_path / "run").iterdir()] == []
    assert done.err.splitlines()[1:] == ["stopped by SIGINT before the first step was done: nothing was saved"]
    assert train(fault="0:2:forward:int,0:2:backward:raise").code == 1, "there was something to save"


def test_a_signal_in_a_save_waits_for_its_end(train, tmp_path):
    done = train("--save", "run", "--save-every", 2, fault="0:2:write:term")
    assert done.code == 143 and steps_in("run") == [2] and "after step 2" in end_of_signal(done.err)
    verify(str(tmp_path / "run/step-00000002"))


@pytest.mark.long
@pytest.mark.parametrize("argv", ["", "--save-async", "--save-async --save-errors warn"])
def test_a_signal_whose_save_fails_is_no_stop_after_saving(argv, train):
    fails(train("--save", "run", *argv.split(), fault="0:3:data:term,0:3:write:enospc"), 4, "No space left on device")
    assert steps_in("run") == []


def test_a_background_save_that_fails_is_seen_with_accumulation_too(train, monkeypatch):
    """Several ranks learn of it a boundary later, which is one between micro-batches."""

    def several(signals, group):
        made = Control(signals, group)
        made.group = group
        return made

    monkeypatch.setattr("trainer.run.Control", several)
    monkeypatch.setattr("trainer.run.Saver.failed", lambda saver: saver.pending is not None)
    argv = "--save", "run", "--save-every", "2", "--save-async", "--steps", 4, "--log-every", 1
    done = train(*argv, "--grad-accum", 2, fault="0:2:write:enospc")
    assert done.code == 4 and len(done.steps) == 3, "of the 4 after which the next save comes"


@pytest.mark.long
def test_each_save_has_its_own_time(trains, monkeypatch):
    """The last one may wait for the one before."""
    order = []
    beat = Watchdog.beat
    wait = saver.wait
    monkeypatch.setattr(Watchdog, "beat", lambda *args: order.append(args[-1]) or beat(*args))
    monkeypatch.setattr(saver, "wait", lambda futures: order.append("wait") or wait(futures))
    trains("--save", "run", "--save-every", "5", "--save-async")
    assert order[-6:] == ["save", "wait", "save", "wait", "save", "end"]


def test_a_run_that_hangs_when_its_row_is_written_gets_no_second_one(train, monkeypatch):
    seen = []
    monkeypatch.setattr("trainer.run.shutdown", lambda: None)
    monkeypatch.setattr(Watchdog, "__exit__", lambda dog, *_: seen.append(dog.on_end("failed: no progress")))
    assert train("--steps", 1).row["outcome"] == "ok"
    assert len(seen) == 1


@pytest.mark.long
@pytest.mark.parametrize("argv, seconds", [("", 3720), ("--timeout 5000", 5120), ("--timeout 0", 3e7)])
def test_no_group_gives_up_before_the_watchdog(argv, seconds, trains, monkeypatch):
    limits = []
    make = control_group

    def note():
        for group in (make(), dist.new_group()):
            limits.append(group._get_backend(torch.device("cpu")).options._timeout.total_seconds())
        return group

    monkeypatch.setattr("trainer.run.control_group", note)
    trains("--steps", 1, *argv.split())
    assert limits == [seconds, seconds]


@pytest.mark.long
@pytest.mark.parametrize("where, stage", [("forward", "fwd"), ("backward", "bwd"), ("update", "step")])
def test_out_of_memory_says_where_how_much_and_what_to_do(where, stage, train):
    for step in (1, 3):
        done = train("--log-every", 1, fault=f"0:{step}:{where}:oom")
        said = f"OOM {stage}", "wanted 1.00 GiB more, peak ", "--batch", "--remat", "more ranks"
        assert ("first step, which compiles" in fails(done, 6, *said)) == (step == 1)
        assert done.row["outcome"] == f"OOM {stage}"
        assert done.logged == [*range(1, step)]
        assert done.row["n"] == 0 and done.row["step_ms"] is None and done.row["world"] == 1


def test_a_connection_for_which_there_is_no_memory_is_not_lost():
    told = "NCCL error in: x.cpp:1, unhandled cuda error ... Last error: Cuda failure 2 'out of memory'"
    assert not errors.lost_connection(dist.DistBackendError(told))
    assert errors.lost_connection(dist.DistBackendError("NCCL error in: x.cpp:1, remote process exited"))


def test_the_snapshot_of_a_gpu_out_of_memory_has_no_path_of_this_machine(tmp_path, monkeypatch):
    monkeypatch.setattr("trainer.measuring.memory.peak", lambda device: dict(peak_alloc_mib=1))
    monkeypatch.setattr("trainer.measuring.memory.dump_snapshot", lambda path: Path(path).touch())
    state = SimpleNamespace(step=1)
    step = SimpleNamespace(phase="bwd")
    run = SimpleNamespace(device=torch.device("cuda"), rank=3, step=step, state=state, first=0)
    told = errors.outcome_of(torch.OutOfMemoryError("Tried to allocate 2.00 GiB"), run, tmp_path / "hang")
    assert told.code == 6
    assert f"memory_viz in {tmp_path}/hang" in told.line
    assert (tmp_path / "hang/memory-3.pickle").exists(), "by measure.dump_snapshot, which leaves them out"


def test_memory_that_runs_out_while_building_is_told_as_such(train, monkeypatch):
    monkeypatch.setattr("main.materialise", lambda *_: planted._happen("oom"))
    done = train()
    fails(done, 6, "OOM init (init): wanted 1.00 GiB", "smaller model", "ranks")
    assert done.row["outcome"] == "OOM init"
    assert done.steps == []


@pytest.mark.long
@pytest.mark.parametrize("where", ["save", "write", "commit"])
def test_each_part_of_a_save_may_fail_and_the_older_steps_stay(where, train, tmp_path):
    fails(train("--save", "run", "--save-every", 2, fault=f"0:4:{where}:enospc"), 4, "No space left on device")
    assert steps_in("run") == [2]
    assert len([*(tmp_path / "run").iterdir()]) == 1


@pytest.mark.long
@pytest.mark.parametrize(("call", "code"), [
    ("rename", errno.ESTALE), ("fsync", errno.EIO), ("fsync", errno.EDQUOT),
    ("rename that was done all the same", errno.EIO),
])  # fmt: skip
def test_what_a_network_file_system_or_a_quota_fails_with_is_a_failed_save_and_the_same_command_goes_on(
    call, code, train, trains, tmp_path, monkeypatch
):
    """NFS tells of a full disk or quota when a file is synced, and may fail a rename that the server has done."""
    name = call.partition(" ")[0]
    real = getattr(os, name)
    failed = []

    def fails_once(*args):
        step = any("step-00000004" in os.fspath(arg) for arg in args if isinstance(arg, str))
        due = step if name == "rename" else bool(steps_in("run"))
        if not due or failed:
            return real(*args)
        failed.append(args)
        if "done" in call:
            real(*args)
        raise OSError(code, os.strerror(code))

    argv = "--save", "run", "--save-every", 2
    monkeypatch.setattr(os, name, fails_once)
    stopped = train(*argv)
    fails(stopped, 4, os.strerror(code))
    assert failed and stopped.row["outcome"].startswith("failed: ")
    assert steps_in("run") == [2] + [4] * ("done" in call)
    assert not [*(tmp_path / "run").glob("tmp-*")] and not (tmp_path / "run/lock").exists()
    assert trains(*argv).row["resumed_after"] == (4 if "done" in call else 2)
    trains("--save", "whole")
    assert_bitwise(contents("run/step-00000006"), contents("whole/step-00000006"))


def test_a_limit_of_the_size_of_files_is_told_and_the_older_steps_stay(train, trains, tmp_path):
    """Torch itself tells of an unexpected position."""
    trains("--save", tmp_path / "run", "--steps", 2)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, before[1]))
    try:
        done = train("--save", tmp_path / "run")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert done.code == 4
    assert steps_in(tmp_path / "run") == [2]
    told = "step-00000006: disk full, or a limit of the size of a file (ulimit -f): "
    assert f"failed: {tmp_path}/run/{told}" in done.err


# ----------------------------------------------------------------------------------------------------------- two ranks


def two(tmp_path, *argv, ranks=2, **env):
    """A job of main.py: exit codes, what both said, the row."""
    log = tmp_path / "log"
    results = tmp_path / "rows.jsonl"
    log.unlink(missing_ok=True)
    flags = [*TINY, "--save", tmp_path / "run", "--save-every", "2", *argv]
    codes = Job(ranks, [*flags, "--results", results], log, **env).wait(90)
    text = log.read_text()
    errors = [line for line in text.splitlines() if line.startswith(("error: ", "stopped by "))]
    row = read(results)[0] if results.exists() and results.stat().st_size else None
    return SimpleNamespace(codes=codes, out=text, errors=errors, row=row, steps=steps_in(tmp_path / "run"))


@pytest.mark.long
def test_a_signal_to_one_rank_stops_all_of_them_at_one_boundary(tmp_path):
    done = two(tmp_path, FAULT="1:3:data:term")
    assert done.codes == [143, 143] and len(done.errors) == 1 and "stopped by SIGTERM" in done.errors[0]
    assert done.steps == [2, 4], "noted in step 3, seen by all after step 4"
    assert "Traceback" not in done.out


@pytest.mark.long
@pytest.mark.parametrize("kind, code", [("kill", -9), ("exit", 9)])
def test_a_rank_that_dies_ends_the_others_and_is_named(kind, code, tmp_path):
    done = two(tmp_path, FAULT=f"1:5:forward:{kind}")
    assert done.codes == [7, code]
    assert done.steps == [2, 4]
    assert len(done.errors) == 1
    assert "lost the connection to another rank: no answer from rank 1" in done.errors[0]
    assert done.row["outcome"].startswith("failed: lost the connection")
    assert (tmp_path / "rows.hang/rank-0.txt").exists()


@pytest.mark.long
def test_a_rank_that_raises_says_why_and_the_other_nothing(tmp_path):
    done = two(tmp_path, FAULT="1:5:update:raise")
    assert done.codes == [7, 1]
    assert done.steps == [2, 4]
    assert done.row["outcome"].startswith("failed: rank 1: failed: RuntimeError: an injected fault")
    assert len(done.errors) == 1
    assert "rank 1: failed: RuntimeError: an injected fault" in done.errors[0]


@pytest.mark.long
@pytest.mark.parametrize("kind", ["hang", "stop"])
def test_a_rank_that_hangs_is_named_with_its_step_and_the_stacks_of_all_that_answer(kind, tmp_path):
    log = tmp_path / "log"
    flags = [*TINY, "--timeout", "2", "--results", tmp_path / "rows.jsonl"]
    job = Job(2, flags, log, FAULT=f"1:5:data:{kind}", ANSWER_S="10" if kind == "hang" else "1")
    job.ranks[0].join(60)
    if kind == "stop":
        os.kill(job.ranks[1].pid, signal.SIGKILL)  # as the launcher does
    # Rank 0 has the store: without it rank 1 does not wait 3 * ANSWER_S.
    assert job.wait(20) == [7, 7 if kind == "hang" else -9]
    (line,) = [line for line in log.read_text().splitlines() if line.startswith(("error: ", "stopped by "))]
    assert "no progress for 2 s" in line and "rank 0: step 5, step, " in line and " collectives begun" in line
    there = sorted(path.name for path in (tmp_path / "rows.hang").iterdir())
    if kind == "hang":
        assert "the others wait for rank 1; rank 1: step 5, data, tests/planted.py:" in line
        assert there == ["flight-0", "flight-1", "rank-0.txt", "rank-1.txt"]
        assert "planted.py" in (tmp_path / "rows.hang/rank-1.txt").read_text()
    else:
        assert "no answer from rank 1" in line
        assert there == ["flight-0", "rank-0.txt"]
    assert read(tmp_path / "rows.jsonl")[0]["outcome"].startswith("failed: no progress for 2 s")


@pytest.mark.long
@pytest.mark.parametrize("flags", ["--grad-accum 1", "--grad-accum 2", "--eval-every 2"])
def test_a_rank_that_is_slower_than_the_others_is_named_once_and_logged(tmp_path, flags):
    """By the CPU time of its steps: the others, which wait for it, take as long by the clock."""
    done = two(tmp_path, "--steps", "64", "--log-every", "1", *flags.split(), SLOW="1:0.03")
    notes = [line for line in done.out.splitlines() if line.startswith("note: rank ")]
    assert done.codes == [0, 0] and len(notes) == 1, done.out
    assert re.fullmatch(r"note: rank 1 is slow: its steps take \d+\.\d\d times the CPU time .* \(20 steps\)", notes[0])
    _, steps = read(tmp_path / "rows.jsonl")
    ratios = [step.get("slowest_rank_ratio") for step in steps if "eval_loss" not in step]
    assert ratios[:20] == [None] * 20 and all(ratio > 1.2 for ratio in ratios[24:]), ratios


@pytest.mark.parametrize("times, named", [
    ([[0.10, 0.10, 0.13, 0.10]] * 20, 2),  # 30 % slower in each step
    ([[0.10, 0.10, 0.11, 0.10]] * 20, None),  # 10 %
    ([[0.10, 0.10, 0.10, 0.90]] + [[0.10] * 4] * 19, None),  # once, as in a compilation
    ([[0.10, 0.10, 0.10, 0.90]] * 19, None),  # not yet 20 steps
    ([[0.10, 0.0, 0.10, 0.90]] * 20, None),  # a rank has no time
    ([[0.001, 0.001, 0.002, 0.001]] * 20, None),  # noise
    ([[0.10, 0.13]] * 20, 1),
    ([[0.10]] * 20, None),
    ([], None),
])  # fmt: skip
def test_a_straggler_is_20_percent_slower_than_the_median_of_the_others_over_20_steps(times, named):
    stragglers = Stragglers()
    add = lambda first: [line for k, seconds in enumerate(times, first) if (line := stragglers.add(seconds, k))]  # noqa: E731
    assert [line.split()[2] for line in add(1)] == ([] if named is None else [str(named)])
    if named is not None:
        assert not add(1 + len(times)), "it is named once"


def test_a_step_that_is_told_twice_counts_once():
    stragglers = Stragglers()
    told = [stragglers.add([0.10, 0.13], k // 2) for k in range(2, 42)]
    assert [k for k, line in enumerate(told) if line] == [38], "20 steps, of which the last was told first then"


APART = "; no rank may evaluate, sample or save alone: every rank must call it"


@pytest.mark.long
def test_evaluation_on_rank_0_alone_is_told_with_the_place_of_each_rank(tmp_path):
    done = two(tmp_path, "--eval-every", 3, "--timeout", 2, EVALUATE_ON_0="1", ANSWER_S="10")
    assert done.codes == [7, 7] and len(done.errors) == 1, done.out
    assert "the ranks do different things; rank 0: step 3, eval, " in done.errors[0], done.errors
    assert "rank 1: step 4, step, " in done.errors[0] and done.errors[0].endswith(APART), done.errors


def own_program(rank, port, folder):
    os.dup2(os.open(folder / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644), 2)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    model = data_parallel(torch.nn.Linear(8, 8), dist.init_device_mesh("cpu", (2,)))
    speak, watchdog.tell = watchdog.tell, lambda *line: (time.sleep(2), speak(*line))  # on a busy machine
    with Watchdog(2, rank, 2, folder / "hang"):
        if rank == 0:
            model(torch.ones(2, 8))
        dist.barrier()


@pytest.mark.long
def test_a_watchdog_in_a_program_of_ones_own_says_which_rank_waits_where(tmp_path):
    start_server()
    port = free_port()
    ranks = [processes.Process(target=own_program, args=(r, port, tmp_path), daemon=True) for r in range(2)]
    for each in ranks:
        each.start()
    connection.wait([each.sentinel for each in ranks], 60)
    for each in ranks:  # as torchrun does once a rank has ended
        each.terminate()
        each.join(60)
    lines = (tmp_path / "log").read_text().splitlines()
    (line,) = (each for each in lines if each.startswith("error: "))  # one rank speaks
    assert {7} <= {each.exitcode for each in ranks} <= {7, -signal.SIGTERM}, line
    assert "the ranks do different things; rank 0: step 0, start, simple_fsdp.py:" in line
    assert line.endswith(APART)
    assert "the last gloo:all_gather; rank 1: step 0, start, tests/test_faults.py:" in line


@pytest.mark.long
def test_out_of_memory_on_one_rank_is_told_by_that_rank(tmp_path):
    done = two(tmp_path, FAULT="1:3:backward:oom")
    assert done.codes == [7, 6] and len(done.errors) == 1 and "error: rank 1: OOM bwd" in done.errors[0]


@pytest.mark.long
@pytest.mark.parametrize("flag, told", [("--depth", "--depth: rank 0 has 1, rank 1 2"), ("--lr", "--lr: rank 0 has ")])
def test_ranks_with_other_flags_do_not_begin(flag, told, tmp_path):
    done = two(tmp_path, RANK_1=f"{flag} {2 if flag == '--depth' else 0.5}")
    assert done.codes == [7, 7] and len(done.errors) == 1 and told in done.errors[0] and done.row is None


@pytest.mark.long
def test_bad_data_on_one_rank_is_told_by_that_rank(tmp_path):
    done = two(tmp_path, RANK_1="--data bin:/absent/here.bin")
    assert done.codes == [7, 3] and len(done.errors) == 1 and "error: /absent/here.bin: " in done.errors[0]


@pytest.mark.long
def test_ranks_that_draw_other_weights_do_not_begin(tmp_path):
    done = two(tmp_path, UNSEED="1")
    assert done.codes == [7, 7] and "initial weights (random state)" in done.errors[0] and done.steps == []


# ---------------------------------------------------------------------------------------------------- the compile cache


@pytest.mark.parametrize("text", [
    "CppCompileError: C++ compile error", "ImportError: /c/ab/cut.so: file too short",
    "RuntimeError: Failed to import /c/ab/cut.py SyntaxError: '(' was never closed (cut.py, line 41)",
])  # fmt: skip
def test_a_failed_compilation_names_the_cache_to_delete_to_people_and_no_path_to_the_row(text, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    told = f"; if a compilation was killed before, delete {tmp_path} and start again"
    end = errors.outcome_of(RuntimeError(text), SimpleNamespace())
    assert end.code == 1 and end.line.endswith(told) and text in end.text and str(tmp_path) not in end.text
    assert str(tmp_path) not in errors.outcome_of(RuntimeError("no compiler"), SimpleNamespace()).line


@pytest.mark.parametrize("full", ["No space left on device", "Disk quota exceeded"])
def test_a_disk_that_is_full_while_compiling_is_told_behind_the_longest_command(full):
    text = f"CppCompileError: C++ compile error Command: g++ {'-D A ' * 999} fatal error: {full}"
    end = errors.outcome_of(RuntimeError(text), SimpleNamespace())
    assert end.text.endswith(f"; {full}")
    assert "or name another in TMPDIR" in end.line
    assert "delete" not in end.line
    assert len(end.line) < 1000


def compiled_run(folder, mode="blocks"):
    """A run in a process of its own with a compile cache in `folder`: its exit codes, what it said, its losses."""
    number = len(list(folder.glob("*.log")))
    results = folder / f"{number}.jsonl"
    argv = *TINY, "--compile", mode, "--log-every", 1, "--results", results
    cache = str(folder / "cache")
    codes = Job(1, [*map(str, argv)], folder / f"{number}.log", TORCHINDUCTOR_CACHE_DIR=cache).wait(300)
    return codes, (folder / f"{number}.log").read_text(), [step["loss"] for step in read(results)[1]]


@pytest.mark.slow
def test_a_damaged_compile_cache_costs_a_compilation_or_is_named_and_trains_on_nothing_else(tmp_path):
    """As a full disk or a power cut leaves it. Libraries of machine code: the test below."""
    codes, said, expected = compiled_run(tmp_path, "fwdbwd")
    assert codes == [0] and len(expected) == 6, said
    files = [path for path in (tmp_path / "cache").rglob("*") if path.is_file() and path.suffix not in (".so", ".lock")]
    entries = [path for path in files if not path.suffix]
    whole = {path: path.read_bytes() for path in files}
    assert entries and len(entries) < len(files)
    for damaged in entries, [path for path in files if path.suffix]:
        for damage in (lambda old: old[: len(old) // 2], lambda old: b"", lambda old: b"\x93" * len(old)):
            for path, old in whole.items():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(damage(old) if path in damaged else old)
            codes, said, losses = compiled_run(tmp_path, "fwdbwd")
            told = re.findall("if a compilation was killed before, delete (.*) and start again", said)
            assert (codes, losses) == ([0], expected) or (codes, told) == ([1], [str(tmp_path / "cache")]), said
    shutil.rmtree(tmp_path / "cache")  # what the error says
    codes, said, losses = compiled_run(tmp_path, "fwdbwd")
    assert (codes, losses) == ([0], expected), said


@pytest.mark.slow
def test_a_run_after_a_compiler_was_killed_says_what_to_delete_and_the_next_one_trains(tmp_path):
    def run():
        return compiled_run(tmp_path)[:2]

    assert run()[0] == [0]
    libraries = sorted((tmp_path / "cache").glob("*/*.so"))
    kernels = [path for path in libraries if "_chk_kernel" not in path.with_suffix(".cpp").read_text()]  # no probe
    for i, path in enumerate(kernels):
        # empty, or cut in its header: the loader of a library that is cut later ends the process by SIGBUS
        path.write_bytes(path.read_bytes()[: i % 2 * 40])
    code, said = run()
    (told,) = re.findall("if a compilation was killed before, delete (.*) and start again", said)
    assert code == [1] and told == str(tmp_path / "cache"), said
    shutil.rmtree(told)
    code, said = run()
    assert code == [0], said
