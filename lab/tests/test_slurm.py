"""Jobs of SLURM: what is printed for sbatch, and what a real SLURM with two nodes here (slurm.py) makes of it.

    pytest lab/tests/test_slurm.py -m 'not slow'     # the scripts alone, in seconds; the others need root and slurm-wlm
"""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from running import ROOT, one_line
from slurm_cluster import missing, slurm

from lab.sweeps import slurm as slurm_script
from lab.sweeps import sweep

TINY = "--device cpu --width 64 --depth 2 --head-dim 16 --vocab 257 --seqlen 32 --batch 2 --compile none --log-every 1"
CPU = "--gpus-per-node 0"


# Stands in for main.py: --seed says how it ends; each start is a line of `starts`.
PROGRAM = """
import json, os, signal, sys, time
flags = dict(zip(sys.argv[1:], sys.argv[2:]))
how = flags["--seed"]
with open("starts", "a") as file: file.write(how + "\\n")
while how.startswith("until") and not os.path.exists(how): time.sleep(0.1)
if how == "killed": os.kill(os.getpid(), signal.SIGKILL)
with open(flags["--results"], "a") as file:
    file.write(json.dumps({"line": os.environ["SWEEP_LINE"], "outcome": "ok"}) + "\\n")
"""


@pytest.fixture
def cluster(tmp_path):
    if reason := missing():
        pytest.skip(reason)
    with slurm(tmp_path / "slurm") as found:
        yield found


def launch(*words, **env):
    """launch.sh WORDS as a user types it: its exit code, stdout and stderr."""
    ours = {k: v for k, v in os.environ.items() if k not in ("NPROC", "SETTING_TIMEOUT")}
    ours |= {"NO_INSTALL": "1", "PYTHON": sys.executable} | env
    done = subprocess.run([str(ROOT / "launch.sh"), *words], env=ours, capture_output=True, text=True, cwd="/")
    return done.returncode, done.stdout, done.stderr


def printed(*words, **env):
    """The script that launch.sh prints."""
    code, out, err = launch(*words, **env)
    assert code == 0, err
    return out


def read(path):
    return path.read_text(errors="replace") if path.exists() else ""


def losses(text):
    return [(int(step), loss) for step, loss in re.findall(r"^step +(\d+)/\d+ +loss ([\d.]+)", text, re.M)]


def rows(path):
    return [json.loads(line) for line in read(path).splitlines()]


def wait_for(there, seconds=300, poll=0.2):
    until = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < until, "it never happened"
        time.sleep(poll)


RESOURCES = """#!/bin/bash
#SBATCH --job-name=simple-fsdp
#SBATCH --nodes=2
#SBATCH --gpus-per-node=8
#SBATCH --time=01:00:00
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --chdir={root}
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=TERM@120
"""


def test_the_script_names_resources_by_slurms_names_and_trains_on_gpus_alone_unless_told():
    plain = printed("slurm")
    assert plain.startswith(RESOURCES.format(root=ROOT))
    subprocess.run(["bash", "-n"], input=plain, text=True, check=True)
    assert plain.endswith("node ./launch.sh run --depth 8 --compile fwdbwd --device cuda\n")
    options = "--nodes=4 --gpus-per-node a100:2 --time 2-00 --partition x --account=y --cpus-per-task 6 --mem 8G"
    code, own, err = launch("slurm", *options.split(), "--depth", "2", "--save", "my runs/a")
    assert (code, err) == (0, "")
    lines = {line.removeprefix("#SBATCH ") for line in own.splitlines() if line.startswith("#SBATCH ")}
    assert {"--nodes=4", "--gpus-per-node=a100:2", "--time=2-00", "--partition=x", "--account=y", "--mem=8G"} <= lines
    assert "--cpus-per-task=6" in lines and "--exclusive" not in lines
    assert own.splitlines()[-1].startswith("srun --kill-on-bad-exit=1 --cpus-per-task=6 bash -c ")
    assert own.endswith("--depth 2 --save 'my runs/a' --device cuda\n")
    on_cpus = printed("slurm", *CPU.split(), "--depth", "2")
    assert "gpus" not in on_cpus.lower().replace("slurm_gpus_on_node", "") and on_cpus.endswith("run --depth 2\n")


@pytest.mark.parametrize("words, said", [
    ("slurm --time 1h", "error: --time 1h: must be minutes, hours:mm:ss or days-hours"),
    ("slurm --nodes 0", "error: --nodes 0: must be a number from 1 on"),
    ("slurm --depth 2 --nodes", "error: --nodes: needs a value"),
    ("slurm --partition --depth 2", "error: --partition: needs a value"),
    ("slurm --gpus 8", "error: --gpus: no such flag; did you mean --gpus-per-node?"),
    ("slurm --partion x", "error: --partion: no such flag; did you mean --partition?"),
    ("slurm --depht 2", "Unrecognized options Unrecognized options: --depht, 2 Perhaps you meant: --depth INT"),
    ("slurm --depth 2.5", "Value error Error parsing --depth"),
    ("slurm --nodes 3 --gpus-per-node 1 --mode hybrid_shard", "error: --replicas 2: must divide the 3 ranks"),
    ("sweep depth --slurm --nodes 2", "sweep: --nodes 2: a setting runs on one node; leave it out"),
    ("sweep depth --slurm --time 1h", "sweep: --time 1h: must be minutes, hours:mm:ss or days-hours"),
    ("sweep depth --small --setting x", "sweep: --setting 'x': not a setting of depth on a machine with 0 GPUs"),
])  # fmt: skip
def test_bad_input_is_one_line_and_exit_2(words, said, monkeypatch, capsys):
    command, *given = words.split()
    monkeypatch.setenv("SWEEP_GPUS", "0")  # and back
    monkeypatch.setattr(sweep, "gpus", lambda: 0)
    monkeypatch.setattr(sys, "argv", [command, *given])
    with pytest.raises(SystemExit) as ended:
        (sweep if command == "sweep" else slurm_script).main()
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, ""), err
    assert (err if err.startswith("sweep: ") and err.count("\n") == 1 else one_line(err)).startswith(said), err


def test_a_job_that_saves_nothing_is_printed_with_a_note():
    assert launch("slurm")[2] == "note: without --save, a job that is stopped or requeued begins afresh\n"
    assert launch("slurm", "--save", "runs/a", "--time", "1h")[::2] == (
        2, "error: --time 1h: must be minutes, hours:mm:ss or days-hours\n")  # fmt: skip
    assert "--gpus-per-node" in launch("slurm", "--help")[1]


@pytest.fixture
def played(tmp_path):
    """played(script): runs it without SLURM; the words that apptainer or Python get, by node, and their environment."""
    for name, text in dict(
        srun='shift 1; for SLURM_NODEID in 0 1; do export SLURM_NODEID; "$@" || exit; done',
        apptainer='echo "apptainer $*" >> "$TOLD"; while [ "$1" != ./launch.sh ]; do shift; done; exec "$@"',
        python3='[ "$1" = -c ] || echo "$NODE_RANK/$NNODES $NPROC $MASTER_ADDR $MASTER_PORT $*" >> "$TOLD"',
    ).items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)

    def played(script, **env):
        told = tmp_path / "told"
        told.unlink(missing_ok=True)
        found = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "TOLD": str(told), "SLURM_NNODES": "2"}
        found = {k: v for k, v in found.items() if k != "NPROC"} | {"SLURM_JOB_ID": "10007"} | env
        subprocess.run(["bash"], input=script, env=found, cwd="/", text=True, check=True)  # from a spool folder
        return told.read_text().splitlines()

    return played


def test_the_script_starts_torchrun_once_on_each_node_wherever_it_lies(played, tmp_path):
    script = printed("slurm", "--depth", "2", "--save", "a b").replace(f"PYTHON={sys.executable}", "PYTHON=python3")
    script = script.replace("export NO_INSTALL", f"cd {ROOT}; export NO_INSTALL")  # sbatch does it: --chdir
    host = socket.gethostname()
    started = played(script, SLURM_GPUS_ON_NODE="8")
    assert [line.split()[:4] for line in started] == [[f"{n}/2", "8", host, "20007"] for n in (0, 1)]
    torchrun = {"--nnodes=2", "--node-rank=1", f"--master-addr={host}", "--master-port=20007", "--nproc-per-node"}
    assert torchrun <= {*started[1].split()}
    assert started[1].endswith(" --nproc-per-node 8 main.py --depth 2 --save a b --device cuda")
    assert [line.split()[1] for line in played(script, SLURM_GPUS_ON_NODE="8", NPROC="3")] == ["3", "3"]


def test_a_container_wraps_the_command_of_every_node(played):
    script = printed("slurm", "--container", "my.sif", "--depth", "2")
    told = played(script.replace("export NO_INSTALL", f"cd {ROOT}; export NO_INSTALL"), SLURM_GPUS_ON_NODE="1")
    assert told[0] == f"apptainer exec --nv --bind {ROOT} --pwd {ROOT} my.sif ./launch.sh run --depth 2 --device cuda"
    assert len(told) == 4 and told[3].startswith("1/2 1 ")  # with the image's own python3
    assert "--nv" not in printed("slurm", "--container", "my.sif", *CPU.split())


def test_an_array_has_a_task_for_each_setting_that_is_missing_as_its_nodes_would_run_it(tmp_path):
    rows = tmp_path / "rows.jsonl"
    words = ("sweep", "gpus", "--slurm", "--lr", "1e-3", "3e-3", "--timeout", "600")
    code, script, err = launch(*words, "--gpus-per-node", "4", "--results", str(rows), "--partition=x")
    settings = re.findall(r"^  '(.+)'$", script, re.M)
    listed = launch("sweep", "gpus", "--list", "--lr", "1e-3", "3e-3", SWEEP_GPUS="4")[1].splitlines()
    assert (code, settings) == (0, listed) and any(setting.startswith("nproc=4 ") for setting in settings)
    assert any("--world 8" in setting for setting in settings), "more ranks than a node has GPUs are simulated"
    lines = {f"--array=0-{len(settings) - 1}", "--time=15", "--nodes=1", "--gpus-per-node=4", "--partition=x"}
    assert lines <= {line.removeprefix("#SBATCH ") for line in script.splitlines()}
    task = f"./launch.sh sweep gpus --lr 1e-3 3e-3 --timeout 600 --results {rows} --nproc=2 --timeout=600 --setting "
    assert script.endswith(task + '"${settings[SLURM_ARRAY_TASK_ID]}"\n') and "bash -c" in script.splitlines()[-1]

    kinds = dict(gpu="NVIDIA H100", cpu="CPU x", failed="NVIDIA H100")
    about = [dict(line=setting, device=device, outcome="failed: x" if kind == "failed" else "ok")
             for setting, (kind, device) in zip(settings, kinds.items(), strict=False)]  # fmt: skip
    rows.write_text("".join(json.dumps(row) + "\n" for row in about))
    code, script, err = launch(*words, "--gpus-per-node", "4", "--results", str(rows))
    left = re.findall(r"^  '(.+)'$", script, re.M)
    assert sorted(left) == sorted(settings[1:]) and left[-1] == settings[2]  # what failed comes last
    assert err == f"{len(settings)} settings, 1 finished before; rows in {rows}\n"
    rows.write_text("".join(json.dumps(dict(line=setting, outcome="ok")) + "\n" for setting in settings))
    assert launch(*words, "--gpus-per-node", "4", "--results", str(rows))[:2] == (0, "")


def test_a_task_runs_its_setting_alone_and_leaves_out_what_another_process_runs(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM.replace('"starts"', f'"{tmp_path}/starts"'))
    (tmp_path / "settings.txt").write_text("--seed a\n--seed b\n--seed c\n")
    words = ["sweep", f"{tmp_path}/settings.txt", "--program", f"{tmp_path}/program.py", "--nproc", "1",
             "--results", f"{tmp_path}/rows.jsonl"]  # fmt: skip
    code, out, err = launch(*words, "--setting", "nproc=1 --seed b")
    assert code == 0 and "| 1 | --seed b | ok |" in out and "1 settings, 0 finished before" in out, err
    folder = sweep.place("nproc=1 --seed c", tmp_path / "rows.jsonl")
    with slurm_script.claimed(folder, wait=False) as free:
        assert free
        code, out, _ = launch(*words)  # a whole sweep shares the settings, too
    assert code == 1 and f"left out: pid {os.getpid()} on host {socket.gethostname()} runs it" in out
    assert (tmp_path / "starts").read_text().split() == ["b", "a"]
    assert launch(*words)[0] == 0 and (tmp_path / "starts").read_text().split() == ["b", "a", "c"]


@pytest.mark.slow
@pytest.mark.hosts
def test_a_job_goes_on_where_one_before_was_stopped_and_where_it_was_preempted_itself(cluster, tmp_path):
    flags = f"{TINY} --steps 250 --save {tmp_path}/saved --results {tmp_path}/rows.jsonl"
    script = printed("slurm", "--nodes", "2", *CPU.split(), *flags.split())
    how = f"--output={tmp_path}/%j.out", "--time=30"
    first = cluster.submit(script, *how, NPROC="1")
    second = cluster.submit(script, *how, "--dependency=singleton", NPROC="1")
    wait_for(lambda: len(losses(read(tmp_path / f"{first}.out"))) > 9)
    assert cluster.job(second)["JobState"] == "PENDING"
    cluster.call("scancel", "--signal=TERM", first)
    job = cluster.wait_for(first, "FAILED", "COMPLETED")
    assert job["JobState"] == "FAILED"
    told = [losses(cluster.said(job))]
    assert f"stopped by SIGTERM after step {len(told[0])}; saved in {tmp_path}/saved" in cluster.said(job)
    assert "Broken pipe" not in cluster.said(job), "torchrun waits for ranks that save"

    wait_for(lambda: len(losses(read(tmp_path / f"{second}.out"))) > 9)
    urgent = "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null"
    urgent = cluster.submit("#!/bin/bash\nsrun true", *urgent)
    told.append(losses(cluster.said(cluster.wait_for(second, "PENDING"))))
    cluster.wait_for(urgent, "COMPLETED")
    cluster.call("scontrol", "update", f"JobId={second}", "StartTime=now")  # else SLURM waits for two minutes
    job = cluster.wait_for(second, "COMPLETED", "FAILED")
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "1"), cluster.said(job)
    told.append(losses(cluster.said(job))[len(told[1]) :])
    steps = [step for part in told for step, _ in part]
    assert steps == [*range(1, 251)] and all(told), "each step once"
    ends = [(row["outcome"], row["world"], row["resumed_after"]) for row in rows(tmp_path / "rows.jsonl")]
    assert ends == [("stopped: SIGTERM", 2, None), ("stopped: SIGTERM", 2, len(told[0])),
                    ("ok", 2, len(told[0]) + len(told[1]))]  # fmt: skip


def processes_of(job, rank):
    """Ids of the processes that torchrun started as this rank of a job, and of their children."""
    wanted = {f"SLURM_JOB_ID={job}".encode(), f"RANK={rank}".encode()}
    found = []
    for file in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if wanted <= {*file.read_bytes().split(b"\0")}:
                found.append(int(file.parent.name))
    return found


@pytest.mark.slow
@pytest.mark.hosts
def test_a_rank_that_is_killed_ends_the_job_and_the_row_names_it(cluster, tmp_path):
    flags = f"{TINY} --steps 4000 --results {tmp_path}/rows.jsonl"
    script = printed("slurm", "--nodes", "2", *CPU.split(), *flags.split())
    job = cluster.submit(script, f"--output={tmp_path}/%j.out", "--time=30", NPROC="1")
    wait_for(lambda: len(losses(read(tmp_path / f"{job}.out"))) > 4)
    ranks = processes_of(job, 1)
    assert ranks
    for each in ranks:
        os.kill(each, signal.SIGKILL)
    job = cluster.wait_for(job, "FAILED", "COMPLETED")
    [row] = rows(tmp_path / "rows.jsonl")
    assert job["JobState"] == "FAILED" and "no answer from rank 1" in row["outcome"], row["outcome"]


@pytest.mark.slow
@pytest.mark.hosts
def test_an_array_runs_each_setting_once_though_it_is_submitted_twice_and_requeued(cluster, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM.replace('"starts"', f'"{tmp_path}/starts"').replace(
        "os.path.exists(how)", f'os.path.exists("{tmp_path}/" + how)'))  # fmt: skip
    (tmp_path / "settings.txt").write_text("--seed until1\n--seed ok\n--seed until2\n--seed killed\n")
    words = ["sweep", f"{tmp_path}/settings.txt", "--program", f"{tmp_path}/program.py", "--slurm", *CPU.split(),
             "--results", f"{tmp_path}/rows.jsonl", "--nproc", "1"]  # fmt: skip

    def submit(script, *options):
        return cluster.submit(script, *options, f"--output={tmp_path}/%A_%a.out")

    def starts():
        return read(tmp_path / "starts").split()

    script = printed(*words)
    one = submit(script, "--array=0")
    other = submit(script, "--array=0")
    ended = next(job for job in (one, other, one, other) if "left out" in said(cluster, job))
    assert starts() == ["until1"] and rows(tmp_path / "rows.jsonl") == []
    (tmp_path / "until1").touch()
    running = cluster.wait_for(f"{one if ended == other else other}_0", "COMPLETED")
    assert "| 1 | --seed until1 | ok |" in cluster.said(running)

    code, script, err = launch(*words)
    assert "--array=0-2\n" in script and "4 settings, 1 finished before" in err
    one = submit(script)
    other = submit(script)
    wait_for(lambda: "until2" in starts())
    task = next(f"{job}_1" for job in (one, other) if cluster.job(f"{job}_1")["JobState"] == "RUNNING")
    cluster.call("scontrol", "requeue", task)
    cluster.wait_for(task, "PENDING")
    (tmp_path / "until2").touch()
    cluster.call("scontrol", "update", f"JobId={task}", "StartTime=now")
    wait_for(lambda: not cluster.call("squeue", "-h"), poll=1)
    told = {row["line"].split()[-1]: row["outcome"] for row in rows(tmp_path / "rows.jsonl")}
    killed = "failed: exit -9 (SIGKILL): no output"
    assert told == {"until1": "ok", "ok": "ok", "until2": "ok", "killed": killed}
    found = starts()
    assert [found.count(how) for how in ("until1", "ok", "until2")] == [1, 1, 2]  # requeued: begun twice, one row
    assert len(rows(tmp_path / "rows.jsonl")) == 3 + found.count("killed")
    code, script, err = launch(*words)
    assert code == 0 and "--seed killed'\n" in script and "--array=0-0\n" in script and "4 settings, 3 finished" in err


def said(cluster, job, task=0):
    """What a task of an array has printed when it has ended, or after ten seconds."""
    with contextlib.suppress(AssertionError):
        cluster.wait_for(f"{job}_{task}", "COMPLETED", "FAILED", seconds=10)
    return cluster.said(cluster.job(f"{job}_{task}"))
