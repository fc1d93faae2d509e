"""What comes from outside: the environment, flags, data files, a terminal that is gone, secrets.

    pytest tests/test_inputs.py        # about 30 s on one core, no GPU; more in test_config.py, test_data.py
"""

import ast
import os
import pickle
import re
import signal
import socket
import struct
import sys
import threading
import time
from pathlib import Path
from typing import get_type_hints
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fixtures import outcome
from forked import Job
from harness import free_port
from running import ROOT, TINY, fails, python, read, resolved
from saved import steps_in

from trainer import config as flags
from trainer import data
from trainer.config import Output, System, Training
from trainer.data import Batches
from trainer.distributed import environment, launch, torchrun
from trainer.distributed.environment import ranks
from trainer.measuring import memory
from trainer.terminal import output
from trainer.terminal.command_line import flag

pytestmark = pytest.mark.usefixtures("isolated")


def refused(argv, capfd, **how):
    """What the parser says to a command line that ends in exit code 2."""
    done = outcome(capfd, lambda: flags.parse(argv, **how))
    assert done.out == ""
    return fails(done, 2)


# --------------------------------------------------------------------------------------------------------- environment

GOOD = dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")


@pytest.mark.parametrize(("name", "value"), [
    ("MASTER_PORT", "http"), ("MASTER_PORT", "0"), ("MASTER_PORT", "65536"), ("MASTER_PORT", "-1"),
    ("LOCAL_WORLD_SIZE", "two"), ("LOCAL_RANK", "-1"), ("WORLD_SIZE", "1.5"), ("WORLD_SIZE", "0"), ("RANK", "one"),
    ("RANK", "2"), ("WORLD_SIZE", "9" * 5000),
])  # fmt: skip
def test_a_number_of_torchruns_that_is_none_is_named(name, value, environ, capfd):
    environ(**GOOD | {name: value})
    fails(outcome(capfd, ranks), 2, f"{name} {value}")


@pytest.mark.parametrize("name", ["no-such-host.invalid", "a" * 80 + ".b", "-"])
def test_a_first_host_that_nobody_knows_is_one_line_at_once(name, environ, capfd):
    environ(**GOOD | dict(MASTER_ADDR=name))
    fails(outcome(capfd, ranks), 2, f"error: MASTER_ADDR {name}: ")


def test_without_torchrun_what_it_left_behind_does_not_count(train, environ):
    environ(LOCAL_WORLD_SIZE="x", MASTER_ADDR="nowhere", MASTER_PORT="http", RANK="")
    assert ranks() == (0, 0, 1)
    assert train("--steps", 1).row["world"] == 1


@pytest.mark.long
@pytest.mark.parametrize("other", ["nobody", pytest.param("another program", marks=pytest.mark.slow)])
def test_ranks_one_of_which_takes_another_host_for_the_first_end_alike_within_one_bound(other, environ, capfd):
    """Rank 0 waits for it in vain; rank 1 finds nobody at that address, or what accepts it and is silent, for which
    torch would wait without end. Neither prints a stack."""
    lines = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        if other == "nobody":
            server.close()
        for rank in ("0", "1"):
            wrong = server.getsockname()[1] if other != "nobody" else free_port()
            environ(**GOOD | dict(RANK=rank, MASTER_PORT=str(wrong if rank == "1" else free_port())))
            begin = time.monotonic()
            with pytest.raises(ValueError, match="the ranks have not met within 1 s") as caught:
                launch.connect(resolved(), int(rank), 0, 2, timeout=1)
            assert time.monotonic() - begin < 15
            lines.append(str(caught.value))
    end = "; does MASTER_ADDR mean the first host on every host, and do all ranks run?"
    assert all(line.startswith("MASTER_ADDR:MASTER_PORT 127.0.0.1:") and line.endswith(end) for line in lines), lines
    assert "".join(capfd.readouterr()) == ""


def test_a_name_of_a_host_is_told_with_the_address_that_it_has_here():
    assert environment.address_of("127.0.0.1") == "127.0.0.1"
    assert re.fullmatch(r"localhost \((127\.0\.0\.1|::1) on this host\)", environment.address_of("localhost"))
    assert environment.address_of("no-such-host.invalid") == "no-such-host.invalid"


@pytest.mark.parametrize("other", ["nobody", "another program"])
def test_the_launcher_of_another_host_waits_for_the_first_one_no_longer_than_torch(other, monkeypatch, capfd):
    """And not without end, as torch does where another program listens."""
    for name in ("STATIC_S", "ELASTIC_S", "SLOW_S"):
        monkeypatch.setattr(torchrun, name, 0.5)
    server = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{free_port() if other == 'nobody' else server.getsockname()[1]}"
    static = "--nnodes 2 --node-rank 1 --master-addr 127.0.0.1 --master-port", address.partition(":")[2]
    elastic = "--nnodes 1:2 --rdzv-backend c10d --rdzv-conf is_host=0 --rdzv-endpoint", address
    for words in (static, elastic):
        assert torchrun.main([*" ".join(words).split(), "main.py"]) == 1
        line = capfd.readouterr().err.splitlines()[-1]
        assert line.startswith("torchrun: the first host, by which all meet, does not answer; start all again")
        assert "where MASTER_ADDR means it on every host; here it is 127.0.0.1: " in line
    server.close()
    for thread in threading.enumerate():  # it prints that the server has gone
        if thread.name == "store":
            thread.join(30)
            assert not thread.is_alive()
    capfd.readouterr()


@pytest.mark.parametrize(("error", "fix"), [
    (dist.DistStoreError("Timed out after 601 seconds waiting for clients. 1/2 clients joined."), "do all ranks run"),
    (dist.DistBackendError("NCCL error in: x.cpp:1"), "is it the first rank's address"),
    (dist.DistNetworkError("The client socket has timed out\n  frame #0"), "mean the first host on every host"),
    (dist.DistNetworkError("... port: 29511 ... EADDRINUSE: address already in use"), "choose another port"),
])  # fmt: skip
def test_ranks_that_do_not_meet_are_told_the_address(error, fix, train, monkeypatch):
    monkeypatch.setattr(dist, "rendezvous", lambda *_, **__: iter([(dist.HashStore(), 0, 2)]))
    monkeypatch.setattr(dist, "init_process_group", mock.Mock(side_effect=error))
    fails(train(world=2, **GOOD), 2, "127.0.0.1:29511", str(error).splitlines()[0], fix)


@pytest.mark.parametrize("argv", [[], ["--device", "cuda"]])
def test_a_gpu_without_nccl_is_not_left_for_the_cpu_unasked(argv, train, trains, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    fails(train(*argv), 2, "NCCL; use --device cpu")
    trains("--device", "cpu", "--steps", 1)


ENVIRONMENT = dict(PYTHONHASHSEED="7", LC_ALL="C", TZ="Asia/Kathmandu", PYTHONIOENCODING="ascii")


# torch's files are seldom compiled for -O, and compiling them takes longer than all else here
@pytest.mark.long
@pytest.mark.parametrize("optimise", ["0", pytest.param("1", marks=pytest.mark.slow)])
def test_nothing_in_the_environment_changes_a_bit_of_the_training(optimise, train, tmp_path):
    """Hash seed, locale, time zone, encoding, another working directory; python -O."""
    text, env = tmp_path / "d\u00e4ta.txt", ENVIRONMENT | dict(PYTHONOPTIMIZE=optimise)  # more than ascii holds
    text.write_bytes(Path(data.__file__).read_bytes())
    argv = [*TINY, "--log-every", 1, "--data", f"text:{text}"]
    other = python(*argv, "--results", tmp_path / "other.jsonl", env=env, trace=False)  # in tmp_path
    assert (other.code, other.err) == (0, "")
    assert "d\\xe4ta.txt" in other.out
    here = train(*argv).steps
    there = read(tmp_path / "other.jsonl")[1]
    assert len(here) == len(there) == 6
    for a, b in zip(here, there, strict=True):
        assert all(a[key] == b[key] for key in ("loss", "lr", "grad_norm")), (a, b)


def test_the_number_of_threads_changes_no_more_than_the_order_of_sums(train):
    one = train("--log-every", 1)
    torch.set_num_threads(3)
    other = train("--log-every", 1)
    assert other.losses == pytest.approx(one.losses, rel=1e-6)
    assert [s["lr"] for s in one.steps] == [s["lr"] for s in other.steps]


def test_no_check_is_an_assert_that_python_O_removes():
    folders = ("", "trainer/**/", "lab/**/", "examples/")
    found = [file for folder in folders for file in ROOT.glob(f"{folder}*.py")]
    files = [file for file in found if "tests" not in file.relative_to(ROOT).parts]
    assert len(files) > 40
    for file in files:
        tree = [*ast.walk(ast.parse(file.read_text()))]
        assert not [node.lineno for node in tree if isinstance(node, ast.Assert)], file.name
        assert not [node.lineno for node in tree if getattr(node, "id", None) == "__debug__"], file.name


# --------------------------------------------------------------------------------------------------------------- flags


@pytest.mark.parametrize(("flag", "name", "code", "found"), [
    ("--data", "text:fifo", 3, "found a pipe"), ("--data", "bin:fifo", 3, "found none"),
    ("--init", "fifo.safetensors", 4, "pipe"), ("--init", "fifo.pt", 4, "pipe"), ("--results", "fifo", 2, "is a pipe"),
])  # fmt: skip
def test_a_pipe_that_is_named_as_a_file_is_refused_and_not_read_for_ever(flag, name, code, found, train):
    path = name.partition(":")[2] or name
    os.mkfifo(path)
    signal.alarm(60)  # ends the process, where opening a pipe waits for its other end
    done = train(flag, name)
    signal.alarm(0)
    fails(done, code, f"{path}: ", found)


@pytest.mark.long
def test_a_number_too_large_for_any_machine_is_refused_by_its_flag(capfd):
    kinds = {k: v for group in (Training, System, Output) for k, v in get_type_hints(group).items()}
    bounded = {name for name, kind in kinds.items() if kind in (int, int | None)} - {"seed", "verbose"}
    assert {"depth", "steps", "loss_chunk", "mlp_chunk", "keep"} < bounded
    for name in [*sorted(bounded), "min_shard_mib", "timeout"]:
        words = [flag(name), str(2**31)]
        if name in flags.ONLY_WITH:
            other, values = flags.ONLY_WITH[name]
            words += [flag(other), values[0]]
        err = refused(words, capfd)
        assert words[0] in err and f"{2**31}" in err.replace(".0", "") and "must be below 2**31" in err, name
    assert "--lr 1e+38: must be a positive number below 1e38" in refused(["--lr", "1e38"], capfd)
    c = flags.parse(["--steps", str(2**31 - 1), "--lr", "9e37", "--clip", "1e300", "--seed", str(2**64 - 1)])
    assert c.steps == 2**31 - 1


@pytest.mark.parametrize(("argv", "world", "says"), [
    ("--width 100", 1, "--width 100: must be a multiple of --head-dim (32|128)"),  # on neither
    ("--width 100 --device cpu", 1, "--width 100: must be a multiple of --head-dim 32"),
    ("--width 100 --head-dim 24", 1, "--width 100: must be a multiple of --head-dim 24"),
    ("--mode hybrid_shard", 3, "--replicas 2: must divide the 3 ranks"),
    ("--wrapper none --param-dtype fp32", 2, "--wrapper none: needs one rank and --param-dtype fp32, got 2 ranks .*"),
])  # fmt: skip
def test_values_that_fit_on_no_device_end_before_torch_is_asked_for_one(argv, world, says, capfd):
    assert re.fullmatch(f"error: {says}", refused(argv.split(), capfd, world=world))


@pytest.mark.parametrize("argv", ["--width 128", "--attn flex", "--grouping 8", ""])
def test_values_whose_fit_hangs_on_the_device_wait_for_it(argv, monkeypatch):
    monkeypatch.setattr(flags, "may_have_gpu", lambda: True)
    assert flags.parse(argv.split(), world=1).device == "auto"  # 1 head or 4, flex on CUDA, 32 heads or 4


# ---------------------------------------------------------------------------------------------------------------- data


def planted(path, ids):
    path.write_bytes(struct.pack(f"<{len(ids)}H", *ids))
    return path


@pytest.mark.long
@pytest.mark.parametrize(("cut", "world"), [(2 * 30_000, 1), (None, 1), (0, 2)])
def test_a_data_file_that_shrinks_while_it_is_read_exits_3_with_its_name_after_saving(cut, world, tmp_path):
    """A mapped page that is no longer there would end every rank with SIGBUS, unsaved."""
    path = planted(tmp_path / "a.bin", [7] * 60_000)
    rows = tmp_path / "rows.jsonl"
    argv = [*TINY, "--data", f"bin:{path}", "--steps", 1_000_000, "--log-every", 1, "--save", tmp_path / "run"]
    evaluated = ["--eval-every", "1", "--eval-batches", "3"] if cut is None else []
    job = Job(world, [*argv, "--results", rows, *evaluated], tmp_path / "log", ANSWER_S="5")
    until = time.monotonic() + 100
    while not (begun := [*tmp_path.glob("rows.steps/*.jsonl")]) and time.monotonic() < until and not job.ended():
        time.sleep(0.05)
    assert begun, (tmp_path / "log").read_text()
    os.truncate(path, 2 * 59_100 if cut is None else cut)  # what is held out alone, half, all
    assert job.wait() == [3] * world
    row, steps = read(rows)
    told = [line for line in (tmp_path / "log").read_text().splitlines() if line.startswith("error: ")]
    assert len(told) == 1 and f"{path}, byte " in told[0] and "the file has shrunk" in told[0]
    assert row["outcome"].startswith(f"failed: {path}")
    assert steps_in(tmp_path / "run") == [steps[-1]["step"]]


CHANGES = {  # what happens to the two files between save and resume
    "the first byte": lambda a, b: planted(a, [9, *range(1, 150)]),
    "the header of the second": lambda a, b: planted(b, [*range(511), 9]),
    "a file less": lambda a, b: b.unlink(),
    "their order": lambda a, b: a.rename(b.with_name("z.bin")),
}


@pytest.mark.long
@pytest.mark.parametrize("change", CHANGES)
def test_data_that_changed_since_the_save_exits_3(change, train, trains, tmp_path):
    files = planted(tmp_path / "a.bin", range(150)), planted(tmp_path / "b.bin", range(512))
    argv = "--data", f"bin:{tmp_path}/?.bin", "--save", tmp_path / "run", "--vocab", 600
    trains(*argv, "--steps", 1)
    CHANGES[change](*files)
    done = train(*argv, "--steps", 2)
    assert fails(done, 3, f"--data bin:{tmp_path}/?.bin", "step-00000001", "give the same files")
    assert done.row is None


def test_no_rank_runs_out_before_another_whatever_the_shards(tmp_path):
    """Files of which one is shorter than a sample, over four epochs that no number of steps fills."""
    for name, ids in (("a", range(3)), ("b", range(3, 203)), ("c", range(203, 253))):
        planted(tmp_path / f"{name}.bin", ids)
    how = dict(global_batch=4, seqlen=8, vocab=257, seed=0)
    whole, *ranks = (Batches(f"bin:{tmp_path}/?.bin", **how, **more)
                     for more in ({}, *(dict(rank=rank, world=2) for rank in range(2))))  # fmt: skip
    assert whole.epoch_samples == 30
    for step in range(31):
        batch = torch.cat([next(rank)[0] for rank in ranks])
        assert torch.equal(batch, next(whole)[0])
        assert batch.shape == (4, 8)
        assert {each.sample for each in (whole, *ranks)} == {4 * step + 4}


# ------------------------------------------------------------------------------------------------------- what is output


def test_a_reader_that_leaves_costs_one_warning_and_not_the_run(trains, monkeypatch, unread):
    monkeypatch.setattr(sys, "stdout", unread)
    done = trains("--log-every", 1, "--save", "run", "-v")
    assert done.row["outcome"] == "ok" and len(done.steps) == 6
    assert done.err == "warning: terminal: BrokenPipeError: [Errno 32] Broken pipe; the run goes on\n"


def test_a_full_disk_under_the_terminal_costs_one_warning_and_not_the_run(train, monkeypatch):
    with open("/dev/full", "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        done = train()
        stdout.flush()
    assert done.code == 0
    assert done.row["outcome"] == "ok"
    assert len(done.err.splitlines()) == 1
    assert "No space left on device; the run goes on" in done.err


@pytest.fixture
def unread():
    """A stream whose reader has left."""
    gone, pipe = os.pipe()
    os.close(gone)
    with open(pipe, "w") as stream:
        yield stream
        stream.flush()  # what Python does at exit


@pytest.mark.parametrize(("argv", "code"), [("--lr 1e20", 5), ("--data text:absent", 3), ("--head-dim 3", 2)])
def test_an_error_that_nobody_reads_keeps_its_exit_code(argv, code, train, monkeypatch, unread):
    monkeypatch.setattr(sys, "stderr", unread)
    assert train(*argv.split()).code == code


def test_what_an_encoding_lacks_is_escaped(tmp_path):
    with open(tmp_path / "out", "w", encoding="ascii") as stream:
        output.tell("|g| \u00e4 \udcff", stream)
    assert (tmp_path / "out").read_text() == "|g| \\xe4 \\udcff\n"


def test_stacks_in_a_memory_snapshot_name_files_from_home_on(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/ann")
    shared = dict(filename="/home/ann/fsdp/main.py", line=1, name="f")
    frames = [shared, dict(filename="/usr/lib/torch.py", line=2, name="g"), dict(shared, filename="/home/anna/x.py")]
    snapshot = dict(segments=[dict(address=1, frames=[shared], blocks=[dict(size=2, frames=frames), dict(size=3)])],
                    device_traces=[[], [dict(action="alloc", frames=frames), dict(action="oom")]])  # fmt: skip
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: snapshot)
    memory.dump_snapshot(str(tmp_path / "a.pickle"))
    told = pickle.loads((tmp_path / "a.pickle").read_bytes())
    names = ["~/fsdp/main.py", "/usr/lib/torch.py", "/home/anna/x.py"]
    for entry in (told["segments"][0]["blocks"][0], told["device_traces"][1][0]):
        assert [frame["filename"] for frame in entry["frames"]] == names
    assert told["segments"][0]["frames"][0]["filename"] == names[0]
    assert told["device_traces"][1][1]["action"] == "oom"
