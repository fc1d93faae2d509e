"""Jobs of SLURM: what is printed for sbatch, and what a real SLURM with two nodes on this machine (slurm.py) makes of it.

    pytest tests/test_slurm.py -m 'not slow'      # the scripts alone, in seconds; the others need root and slurm-wlm
"""

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
