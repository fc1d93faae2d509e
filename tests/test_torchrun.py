"""How ./launch.sh starts ranks (trainer/distributed/torchrun.py): what they leave, and what a failure says.

    pytest tests/test_torchrun.py        # CPU, gloo
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from harness import free_port
from running import ROOT, TINY, TORCHRUN, fails, ran, read, rows_of
from saved import assert_bitwise, contents, steps_in
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from trainer.distributed import torchrun

pytestmark = pytest.mark.long

ENV = {k: v for k, v in os.environ.items() if k not in TORCHRUN} | {"OMP_NUM_THREADS": "1", "COLUMNS": "100"}


OURS = ["trainer.distributed.torchrun"]
TORCHS = ["torch.distributed.run"]


def start(*flags, ranks=2, restarts=0, program=OURS, **how):
    command = [sys.executable, "-m", *program, "--nproc-per-node", str(ranks), "--max-restarts", str(restarts)]
    command += ["--master-port", str(free_port()), str(ROOT / "main.py"), *flags]
    how |= dict(env=ENV | {"PYTHONPATH": str(ROOT)}, text=True, start_new_session=True)
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **how)


def trains(folder, results="rows", **how):
    """A run that ends only when it is ended, after its first step."""
    run = start(*TINY, *f"--steps 400000 --log-every 1 --save {folder}/run --results {folder}/{results}".split(), **how)
    wait_for_step(run)
    return run


def said(run):
    """What a run that is ending says on stderr."""
    return run.communicate(timeout=200)[1]


@pytest.mark.parametrize("words", [["--nnodes", "\x9b2J"], ["--nnodes", "2:x"], ["--nproc-per-node", "\x1b[2J"]])
def test_a_bad_number_of_torchruns_is_one_line_that_controls_no_terminal(words, capsys):
    assert torchrun.main([*words, "main.py"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("torchrun: ValueError: ") and not {*line} & {*"\x1b\x9b"}


def test_a_rank_that_refuses_is_named_and_gives_its_exit_code():
    run = start(*TINY, "--data", "nothing")
    ours, last = said(run).splitlines()
    assert run.returncode == 2
    assert ours.startswith("error: --data nothing: expected one of ")
    assert re.fullmatch(r"torchrun: rank 0, process \d+, ended with exit code 2, the first of this host to fail", last)


@pytest.mark.parametrize(("argv", "message"), [
    ("--width 33", "error: --width 33: must be a multiple of --head-dim 16"),
    ("--init no.pt", "error: rank 0: failed: no.pt: No such file or directory"),
])  # fmt: skip
def test_the_last_lines_of_torchs_own_torchrun_say_what_was_wrong(argv, message, tmp_path, train):
    """They are made of the file that this rank leaves, also when the run had begun."""
    file = tmp_path / "error.json"
    done = train(*argv.split(), TORCHELASTIC_ERROR_FILE=str(file))
    failure = ProcessFailure(0, os.getpid(), done.code, str(file))
    assert done.code > 0
    assert fails(done, done.code).startswith(message)
    assert f"traceback : {done.err}" in str(ChildFailedError("main.py", {0: failure}))


@pytest.mark.parametrize(("nodes", "argv", "message"), [
    ("1", "--width 64", "--grouping 4: must divide the 2 heads (64 / 32), as --grouping 1"),
    ("2", "--effective-batch 9", "--effective-batch 9: must be 4 ranks x --batch 8 x a whole number (--grad-accum 1)"),
])  # fmt: skip
def test_flags_that_do_not_fit_together_are_one_line_before_torchrun_starts(nodes, argv, message):
    env = dict(PYTHON=sys.executable, NO_INSTALL="1", NNODES=nodes, NPROC="2", CUDA_VISIBLE_DEVICES="")
    done = ran(ROOT / "launch.sh", "run", "--device", "cpu", *argv.split(), cwd=None, **env)
    assert fails(done, 2) == f"error: {message}"
    assert done.out == ""


@pytest.fixture
def launched(tmp_path):
    """launched(NODES, RANK, FLAGS, **env) -> what `launch.sh run` does on a node with two ranks: it prints the words
    with which torchrun would be started."""
    python = tmp_path / "python"
    python.write_text(f"""#!/bin/sh\n[ "$1" = -m ] && echo "$*" || exec {sys.executable} "$@"\n""")
    python.chmod(0o755)

    def run(nodes, rank, argv, **env):
        node = dict(NNODES=nodes, NODE_RANK=rank, MASTER_ADDR="first", NPROC="2", CUDA_VISIBLE_DEVICES="")
        command = [ROOT / "launch.sh", "run", "--device", "cpu", *argv.split()]
        return ran(*command, cwd=None, PYTHON=str(python), NO_INSTALL="1", **node, **env)

    return run


ELASTIC = "--batch 2 --save runs/a --save-every 5 --effective-batch 8"


def test_the_first_node_holds_what_nodes_that_come_and_go_meet_by_and_stays_the_first(launched):
    start = "-m trainer.distributed.torchrun --nnodes=1:2 --rdzv-backend=c10d --rdzv-endpoint=first:"
    end = f"--nproc-per-node 2 main.py --device cpu {ELASTIC}\n"
    first, second = launched("1:2", "0", ELASTIC), launched("1:2", "1", ELASTIC)
    assert first.out == f"{start}29500 --rdzv-conf=is_host=1 --local-addr=first --max-restarts=9 {end}", first.err
    assert second.out == f"{start}29500 --rdzv-conf=is_host=0 --local-addr=first.1 --max-restarts=9 {end}", second.err
    other = launched("1:2", "1", ELASTIC, MASTER_PORT="3", MAX_RESTARTS="0")
    assert other.out == f"{start}3 --rdzv-conf=is_host=0 --local-addr=first.1 --max-restarts=0 {end}"
    assert sorted(["first.2", "first.1", "first"])[0] == "first"  # as torchrun numbers them


@pytest.mark.parametrize(("nodes", "message"), [
    ("2:1", "launch.sh: NNODES=2:1: expected a number of nodes, or a minimum and a maximum such as 1:2"),
    ("1:x", "launch.sh: NNODES=1:x: expected a number"), ("0:2", "launch.sh: NNODES=0:2: expected a number"),
    ("0", "launch.sh: NNODES=0: expected a number"), ("1:2:3", "launch.sh: NNODES=1:2:3: expected a number"),
    ("1:3", "error: --effective-batch 8: must be 6 ranks x --batch 2 x a whole number"),  # 3 nodes of 2 ranks
])  # fmt: skip
def test_flags_that_do_not_do_for_every_number_of_nodes_are_refused(nodes, message, launched):
    done = launched(nodes, "0", ELASTIC)
    assert done.code == 2 and done.out == "" and done.err.count("\n") == 1 and done.err.startswith(message), done.err


@pytest.mark.parametrize(("codes", "first"), [({0: 7, 1: 1}, 1), ({0: 7, 1: 7}, 0), ({0: -15, 1: -9, 2: 7}, 1)])
def test_the_exit_code_is_that_of_the_rank_that_the_others_followed(codes, first, monkeypatch, capsys):
    """Times of failures are in seconds."""
    failures = {rank: ProcessFailure(rank, 100 + rank, code, f"/nowhere/{rank}") for rank, code in codes.items()}
    for each in failures.values():
        each.timestamp = 5

    def fail(args):
        raise ChildFailedError("main.py", failures)

    monkeypatch.setattr("torch.distributed.run.run", fail)
    code = codes[first]
    assert torchrun.main(["main.py"]) == (128 - code if code < 0 else code)
    told = capsys.readouterr().err
    assert f"torchrun: rank {first}, process {100 + first}, " in told
    assert ("no memory left" in told) == (code == -9)


@pytest.mark.slow
def test_ctrl_c_and_a_killed_rank_which_a_restart_resumes(tmp_path):
    """Ctrl-C goes to all processes of a terminal's foreground group: here to torchrun's, in which no rank is."""
    run = trains(tmp_path)
    os.killpg(run.pid, signal.SIGINT)
    err = said(run)
    assert run.returncode == 130 and "Traceback" not in err, err
    row, _ = read(tmp_path / "rows")
    assert row["outcome"] == "stopped: SIGINT" and row["world"] == 2 and [*(tmp_path / "run").glob("step-*")]
    run = trains(tmp_path, restarts=1)  # resumes
    os.kill(ranks_of(run)[-1], signal.SIGKILL)
    assert any("resuming after step " in line for line in run.stdout)  # started again
    wait_for_step(run)
    killed = ranks_of(run)[-1]
    os.kill(killed, signal.SIGKILL)
    err = said(run)
    first = re.findall(r"^torchrun: rank \d, process (\d+), (.*), the first of this host to fail(?:; .*)?$", err, re.M)
    assert first == [(str(killed), "was ended by SIGKILL")] and run.returncode == 137 and "Traceback" not in err, err


@pytest.mark.slow
def test_ranks_that_run_other_code_do_not_begin(tmp_path):
    """Rank 1 has a copy in which one file differs."""
    other = tmp_path / "other"
    shutil.copytree(ROOT / "trainer", other / "trainer")
    for path in ROOT.glob("*.py"):
        shutil.copy(path, other)
    with open(other / "trainer/step.py", "a") as file:
        file.write("\n")
    env = ENV | dict(WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    runs = []
    for rank, root in enumerate((ROOT, other)):
        own = env | {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}"}
        command = [sys.executable, root / "main.py", *TINY]
        how = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=tmp_path, text=True)
        runs.append(subprocess.Popen(command, env=own, **how))
    told = [run.communicate(timeout=200)[0] for run in runs]
    assert [run.returncode for run in runs] == [7, 7], told
    assert "error: ranks differ in the code (a checksum): rank 0 has " in "".join(told)


@pytest.mark.slow
@pytest.mark.parametrize(("program", "kind"), [(OURS, signal.SIGHUP), (TORCHS, signal.SIGHUP), (OURS, signal.SIGQUIT)])
def test_a_terminal_that_closes_stops_the_ranks_after_saving_and_nohup_keeps_them(program, kind, tmp_path):
    """The signal goes to every process of the session, and torchrun passes it on."""
    run = trains(tmp_path, program=program)
    os.killpg(run.pid, kind)
    err = said(run)
    row, steps = read(tmp_path / "rows")
    assert row["outcome"] == f"stopped: {kind.name}"
    assert f"stopped by {kind.name} after step" in err
    assert [*(tmp_path / "run").glob(f"step-{steps[-1]['step']:08d}")], err
    if program is OURS:
        assert run.returncode == 128 + kind
    if kind == signal.SIGHUP:
        ignore = lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)  # noqa: E731
        run = trains(tmp_path, "more", program=program, preexec_fn=ignore)
        os.killpg(run.pid, kind)
        if program is OURS:
            for _ in range(20):
                wait_for_step(run)
            os.kill(run.pid, signal.SIGTERM)
        said(run)
        row, _ = read(tmp_path / "more")
        assert row["outcome"] == f"stopped: {'SIGTERM' if program is OURS else 'SIGHUP'}"


def test_ctrl_c_is_two_quiet_lines_and_no_error(tmp_path):
    """It goes to torchrun alone, which passes it on; torch's torchrun would warn of it."""
    run = trains(tmp_path)
    os.kill(run.pid, signal.SIGINT)
    err = said(run)
    step = read(tmp_path / "rows")[1][-1]["step"]
    assert run.returncode == 130 and err.splitlines() == [
        "Ctrl-C: stopping after this step; again: at once",
        f"stopped by SIGINT after step {step}; saved in {tmp_path}/run: the same command goes on",
    ]


def test_told_to_end_the_exit_code_is_that_of_a_last_save_that_fails(tmp_path):
    """Torchrun itself knows no more than that it has passed a signal on."""
    run = trains(tmp_path)
    (tmp_path / "run").rename(tmp_path / "away")
    os.kill(run.pid, signal.SIGTERM)
    first, last = said(run).splitlines()
    assert first.startswith(f"error: rank 0: failed: {tmp_path}/run: is not the directory that this run locked"), first
    assert re.fullmatch(r"torchrun: rank [01], process \d+, ended with exit code 4 after SIGTERM", last)
    assert run.returncode == 4


@pytest.mark.slow
def test_told_to_end_a_rank_that_has_not_saved_after_30_s_is_named(tmp_path):
    run = trains(tmp_path)
    stopped = ranks_of(run)[-1]
    os.kill(stopped, signal.SIGSTOP)
    os.kill(run.pid, signal.SIGTERM)
    err = said(run)
    assert "error: SIGTERM came, and nothing moves since: no answer from rank" in err, err
    told = r"torchrun: rank \d, process (\d+), was ended by SIGKILL after SIGTERM; torchrun does so 30 s after it: "
    assert re.match(told, err.splitlines()[-1])[1] == str(stopped)
    assert run.returncode == 137


# Of torchrun, of its first rank.
@pytest.mark.parametrize("line", ["importing torch, to start 2 ranks\n", "importing torch on 2 ranks\n"])
def test_ctrl_c_while_torch_is_imported_has_no_traceback(line):
    run = start(*TINY)
    while (said_first := run.stdout.readline()) != line:
        assert said_first, run.stderr.read()
    time.sleep(0.5)
    os.killpg(run.pid, signal.SIGINT)  # as a terminal does
    err = said(run)
    assert "Traceback" not in err and run.returncode == (130 if "on 2" in line else -signal.SIGINT), err


def test_the_main_job_writes_a_sample_and_ends_with_what_to_do_next(tmp_path, monkeypatch, capsys):
    (tmp_path / "python").write_text('#!/bin/sh\n[ "$1" = -c ] || echo "$MAIN_JOB $@"\n')
    (tmp_path / "python").chmod(0o755)
    env = dict(PYTHON=f"{tmp_path}/python", NO_INSTALL="1")
    assert re.match("1 -m trainer.distributed.torchrun .* main.py .* --sample ", ran("bash", "launch.sh", **env).out)
    assert ran("bash", "launch.sh", "run", "--depth", "1", **env).out.startswith(" -m trainer.distributed.torchrun")
    monkeypatch.setattr("torch.distributed.run.run", lambda args: None)
    for main_job, lines in (("1", 4), ("", 0)):
        monkeypatch.setenv("MAIN_JOB", main_job)
        assert torchrun.main(["--standalone", "main.py"]) == 0
        told = capsys.readouterr().out.partition("the ranks\n")[2].splitlines()
        assert len(told) == lines and all(len(line) <= 100 for line in told)
    for word in ("--save", "plan.py", "sweep", "docs/tutorial.md"):
        assert word in torchrun.NEXT


@pytest.mark.slow
@pytest.mark.parametrize("program", [OURS, TORCHS])
def test_ranks_whose_launcher_is_killed_stop_after_saving(program, tmp_path):
    """As by the kernel when memory runs out: nobody else would ever end them."""
    run = trains(tmp_path, program=program)
    os.kill(run.pid, signal.SIGKILL)
    err = said(run)  # until the last rank has closed its end
    row, steps = read(tmp_path / "rows")
    assert row["outcome"] == "stopped: SIGTERM" and err.count("torchrun is gone") == 1, err
    assert [*(tmp_path / "run").glob(f"step-{steps[-1]['step']:08d}")], err


def wait_for_step(run):
    for line in run.stdout:
        if line.startswith("step "):
            return
    raise AssertionError(run.stderr.read())


def table():
    """(pid, parent, session) of every process that has not ended."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            state, parent, _, session = stat.read_text().rpartition(")")[2].split()[:4]
            found += [(int(stat.parent.name), int(parent), int(session))] * (state != "Z")
    return found


def ranks_of(run):
    """Torchrun starts each rank in a session of its own."""
    return [pid for pid, parent, session in table() if parent == run.pid and session == pid]


def restarted(folder, *program):
    """A run of six steps on two ranks, which torchrun starts again once; a save after every second step."""
    command = [sys.executable, "-m", *OURS, "--nproc-per-node", "2", "--max-restarts", "1"]
    command += ["--master-port", str(free_port()), *program, ROOT / "main.py"]
    flags = [*TINY, "--save", folder / "run", "--save-every", "2", "--log-every", "1"]
    return ran(*command, *flags, "--results", folder / "rows.jsonl", OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))


@pytest.mark.slow
def test_a_restart_by_torchrun_in_the_first_save_starts_again_and_removes_the_remains(tmp_path):
    done = restarted(tmp_path, ROOT / "tests/planted.py", "1:2:write:kill")
    assert done.code == 0, done.err
    assert "resuming after step" not in done.out
    assert done.out.count("starting fresh") == 2
    assert "removed tmp-step-00000002-" in done.out
    assert steps_in(tmp_path / "run") == [2, 4, 6]


KILLED = """
import os, runpy, signal, sys
from trainer.checkpoint import load, save

owner, name, rank, part = {place}
original = getattr(owner, name)

def dies(*args):
    if (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) == (rank, "0") and part in str(args):
        for pid in {pids}:
            os.kill(pid, signal.SIGKILL)
    return original(*args)

setattr(owner, name, dies)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
LOADS = "load, 'reader', '1', ''"
RENAMES = "os, 'rename', '0', 'step-00000004'"  # after the manifest
WRITES = "save, '_write', '1', 'step-00000004'"


def killed(folder, place, pids="[os.getpid()]"):
    """A program before main.py, in which a rank is killed once, at a call: owner, name, rank, a part of its words."""
    path = folder / "dies.py"
    path.write_text(KILLED.format(place=place, pids=pids))
    return path


@pytest.mark.slow
def test_a_restart_by_torchrun_while_a_checkpoint_is_loaded_loads_it_again(tmp_path):
    assert restarted(tmp_path).code == 0
    shutil.rmtree(tmp_path / "run/step-00000006")
    done = restarted(tmp_path, killed(tmp_path, LOADS))
    assert done.code == 0 and "no answer from rank 1" in done.err, (done.out, done.err)
    rows = rows_of(tmp_path / "rows.jsonl")
    assert rows[-1]["resumed_after"] == 4 and rows[-1]["loss"] == rows[0]["loss"]
    assert steps_in(tmp_path / "run") == [2, 4, 6]


@pytest.mark.slow
def test_a_restart_by_torchrun_between_manifest_and_rename_goes_on_from_the_step_before(tmp_path):
    for folder in (tmp_path / "whole", tmp_path / "killed"):
        folder.mkdir()
    assert restarted(tmp_path / "whole").code == 0
    done = restarted(tmp_path / "killed", killed(tmp_path, RENAMES))
    assert done.code == 0, done.err
    assert "resuming after step 2" in done.out and "removed tmp-step-00000004-" in done.out
    ends = [tmp_path / kind / "run/step-00000006" for kind in ("whole", "killed")]
    assert_bitwise(*map(contents, ends))


@pytest.mark.slow
def test_an_elastic_host_that_dies_in_a_save_costs_the_steps_since_the_save_before(tmp_path):
    """Torchrun and its rank of the second host end together."""
    flags = f"--save {tmp_path}/run --save-every 2 --log-every 1 --effective-batch 4 --timeout 20".split()
    whole = ran(sys.executable, ROOT / "main.py", *TINY, *flags[4:], "--results", tmp_path / "whole.jsonl")
    assert whole.code == 0, whole.err
    elastic = f"--nnodes 1:2 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:{free_port()} --max-restarts 9".split()
    program = killed(tmp_path, WRITES, "[os.getppid(), os.getpid()]")
    env = ENV | {"PYTHONPATH": str(ROOT), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    hosts = []
    for host in range(2):
        own = ["--rdzv-conf", f"is_host={1 - host}", "--local-addr", ["127.0.0.1", "127.0.0.1.1"][host]]
        command = [sys.executable, "-m", *OURS, *elastic, *own, "--nproc-per-node", "1", program, ROOT / "main.py"]
        command += [*TINY, *flags, "--results", tmp_path / "rows.jsonl"]
        how = dict(env=env, text=True, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        hosts.append(subprocess.Popen(command, **how))
    out, err = hosts[0].communicate(timeout=200)
    assert hosts[1].wait(10) == -signal.SIGKILL
    assert hosts[0].returncode == 0, (out, err)
    assert "resuming after step 2" in out and "ranks 2 (now 1)" in out, (out, err)
    assert steps_in(tmp_path / "run") == [2, 4, 6] and not [*(tmp_path / "run").glob("tmp-*")]
    assert rows_of(tmp_path / "rows.jsonl")[-1]["loss"] == pytest.approx(rows_of(tmp_path / "whole.jsonl")[0]["loss"])
