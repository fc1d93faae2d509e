"""Jobs of SLURM: what is printed for sbatch, and what a real SLURM with two nodes on this machine (slurm.py) makes of it.

    pytest tests/test_slurm.py -m 'not slow'      # the scripts alone, in seconds; the others need root and slurm-wlm
"""

import contextlib
import json
import os
import re
import subprocess
import sys
import time

import pytest
from running import ROOT
from slurm import missing, slurm

TINY = "--device cpu --width 64 --depth 2 --head-dim 16 --vocab 257 --seqlen 32 --batch 2 --compile none --log-every 1"
CPU = "--gpus-per-node 0"


@pytest.fixture
def cluster(tmp_path):
    if reason := missing():
        pytest.skip(reason)
    with slurm(tmp_path / "slurm") as found:
        yield found


def launch(*words, **env):
    """launch.sh WORDS as a user types it: its exit code, stdout and stderr."""
    ours = {k: v for k, v in os.environ.items() if k not in ("NPROC", "CELL_TIMEOUT")}
    ours |= {"NO_INSTALL": "1", "PYTHON": sys.executable} | env
    done = subprocess.run([str(ROOT / "launch.sh"), *words], env=ours, capture_output=True, text=True, cwd="/")
    return done.returncode, done.stdout, done.stderr


def printed(*words, **env):
    """The script that launch.sh prints."""
    code, out, err = launch(*words, **env)
    assert code == 0, err
    return out


def losses(text):
    return [(int(step), loss) for step, loss in re.findall(r"^step +(\d+)/\d+ +loss ([\d.]+)", text, re.M)]


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_for(there, seconds=120):
    until = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < until, "it never happened"
        time.sleep(0.2)


@pytest.mark.slow
@pytest.mark.hosts
def test_a_job_goes_on_after_scancel_and_after_requeue_and_a_second_job_after_the_first(cluster, tmp_path):
    flags = f"{TINY} --steps 250 --save {tmp_path}/saved --results {tmp_path}/rows.jsonl"
    script = printed("slurm", "--nodes", "2", *CPU.split(), *flags.split())
    how = f"--output={tmp_path}/%j.out", "--time=5"
    first = cluster.submit(script, *how, NPROC="1")
    second = cluster.submit(script, *how, "--dependency=singleton", NPROC="1")
    wait_for(lambda: len(losses(cluster.said(cluster.job(first)))) > 9)
    assert cluster.job(second)["JobState"] == "PENDING"
    cluster.call("scancel", "--signal=TERM", first)
    job = cluster.wait_for(first, "FAILED", "COMPLETED")
    assert job["JobState"] == "FAILED"
    told = [losses(cluster.said(job))]
    assert f"stopped by SIGTERM after step {len(told[0])}; saved in {tmp_path}/saved" in cluster.said(job)

    wait_for(lambda: len(losses(cluster.said(cluster.job(second)))) > 9)
    cluster.call("scontrol", "requeue", second)
    told.append(losses(cluster.said(cluster.wait_for(second, "PENDING"))))
    cluster.call("scontrol", "update", f"JobId={second}", "StartTime=now")  # else SLURM waits for two minutes
    job = cluster.wait_for(second, "COMPLETED", "FAILED")
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "1"), cluster.said(job)
    told.append(losses(cluster.said(job))[len(told[1]) :])
    steps = [step for part in told for step, _ in part]
    assert steps == [*range(1, 251)] and all(told), "each step once"
    ends = [(row["outcome"], row["world"], row["resumed_after"]) for row in rows(tmp_path / "rows.jsonl")]
    assert ends == [("stopped: SIGTERM", 2, None), ("stopped: SIGTERM", 2, len(told[0])),
                    ("ok", 2, len(told[0]) + len(told[1]))]  # fmt: skip


@pytest.mark.slow
@pytest.mark.hosts
def test_a_rank_that_is_killed_ends_the_job_and_the_row_names_it(cluster, tmp_path):
    flags = f"{TINY} --steps 400 --results {tmp_path}/rows.jsonl"
    script = printed("slurm", "--nodes", "2", *CPU.split(), *flags.split())
    job = cluster.submit(script, f"--output={tmp_path}/%j.out", "--time=5", NPROC="1", FAULT="1:5:backward:kill")
    job = cluster.wait_for(job, "FAILED", "COMPLETED")
    [row] = rows(tmp_path / "rows.jsonl")
    assert job["JobState"] == "FAILED" and "no answer from rank 1" in row["outcome"], row["outcome"]


# Stands in for main.py: --seed says how it ends; each start is a line of `starts`.
PROGRAM = """
import json, os, signal, sys, time
flags = dict(zip(sys.argv[1:], sys.argv[2:]))
how = flags["--seed"]
with open("starts", "a") as file: file.write(how + "\\n")
while how.startswith("until") and not os.path.exists(how): time.sleep(0.1)
if how == "killed": os.kill(os.getpid(), signal.SIGKILL)
with open(flags["--results"], "a") as file:
    file.write(json.dumps({"cell": os.environ["SWEEP_CELL"], "outcome": "ok"}) + "\\n")
"""


@pytest.mark.slow
@pytest.mark.hosts
def test_an_array_runs_each_cell_once_though_it_is_submitted_twice_and_requeued(cluster, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM.replace('"starts"', f'"{tmp_path}/starts"').replace(
        "os.path.exists(how)", f'os.path.exists("{tmp_path}/" + how)'))  # fmt: skip
    (tmp_path / "cells.txt").write_text("--seed until1\n--seed ok\n--seed until2\n--seed killed\n")
    words = ["sweep", f"{tmp_path}/cells.txt", "--program", f"{tmp_path}/program.py", "--slurm", *CPU.split(),
             "--results", f"{tmp_path}/rows.jsonl", "--nproc", "1"]  # fmt: skip

    def submit(script, *options):
        return cluster.submit(script, *options, f"--output={tmp_path}/%A_%a.out")

    def starts():
        return (tmp_path / "starts").read_text().split() if (tmp_path / "starts").exists() else []

    script = printed(*words)
    one, other = submit(script, "--array=0"), submit(script, "--array=0")
    ended = next(job for job in (one, other, one, other) if "left out" in said(cluster, job))
    assert starts() == ["until1"] and rows(tmp_path / "rows.jsonl") == []
    (tmp_path / "until1").touch()
    running = cluster.wait_for(f"{one if ended == other else other}_0", "COMPLETED")
    assert "| 1 | --seed until1 | ok |" in cluster.said(running)

    code, script, err = launch(*words)
    assert "--array=0-2\n" in script and "4 cells, 1 finished before" in err
    one, other = submit(script), submit(script)
    wait_for(lambda: "until2" in starts())
    task = next(f"{job}_1" for job in (one, other) if cluster.job(f"{job}_1")["JobState"] == "RUNNING")
    cluster.call("scontrol", "requeue", task)
    cluster.wait_for(task, "PENDING")
    (tmp_path / "until2").touch()
    cluster.call("scontrol", "update", f"JobId={task}", "StartTime=now")
    wait_for(lambda: not cluster.call("squeue", "-h"))
    told = {row["cell"].split()[-1]: row["outcome"] for row in rows(tmp_path / "rows.jsonl")}
    killed = "failed: exit -9 (SIGKILL): no output"
    assert told == {"until1": "ok", "ok": "ok", "until2": "ok", "killed": killed}
    found = starts()
    assert [found.count(how) for how in ("until1", "ok", "until2")] == [1, 1, 2]  # requeued: begun twice, one row
    assert len(rows(tmp_path / "rows.jsonl")) == 3 + found.count("killed")
    code, script, err = launch(*words)
    assert code == 0 and "--seed killed'\n" in script and "--array=0-0\n" in script and "4 cells, 3 finished" in err


def said(cluster, job, task=0):
    """What a task of an array has printed when it has ended, or after ten seconds."""
    with contextlib.suppress(AssertionError):
        cluster.wait_for(f"{job}_{task}", "COMPLETED", "FAILED", seconds=10)
    return cluster.said(cluster.job(f"{job}_{task}"))
