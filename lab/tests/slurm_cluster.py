"""A real SLURM on one machine: slurmctld and two slurmd, the "nodes" n1 and n2. Needs root, and slurm-wlm and munge.

    with slurm(folder) as cluster:
        job = cluster.submit(script, "--time=5")       # sbatch; its output goes where the script says
        cluster.call("scancel", "--signal=TERM", job)
        cluster.wait_for(job, "COMPLETED")

Both nodes are this machine: they share its network, processes, disk and cores. A job in the partition `urgent` takes
them from another, which is requeued. No system service is used or changed.
"""

import contextlib
import os
import re
import secrets
import shutil
import socket
import subprocess
import time
from pathlib import Path

from harness import free_port

PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"  # where Debian has the daemons
CONFIG = """
ClusterName=tests
SlurmctldHost={host}
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={folder}/spool.%n
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/{track}
TaskPlugin=task/none
SelectType=select/cons_tres
MpiDefault=none
SwitchType=switch/none
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1
ReturnToService=2
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 RealMemory=4000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 RealMemory=4000
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=urgent Nodes=n1,n2 MaxTime=INFINITE State=UP PriorityTier=2 PreemptMode=OFF
"""


def missing() -> str:
    """Why there can be no SLURM here; empty if there can."""
    lacking = [name for name in ("munged", "slurmctld", "slurmd", "sbatch") if not shutil.which(name, path=PATH)]
    if lacking:
        return f"needs {', '.join(lacking)} (on Debian: apt-get install slurm-wlm munge)"
    return "" if os.geteuid() == 0 else "needs root, as which slurmd runs jobs"


class Slurm:
    """What a user of the cluster types; `folder` holds the logs of its daemons."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.env = os.environ | {"SLURM_CONF": f"{folder}/slurm.conf", "PATH": PATH}
        for name in [name for name in self.env if name.startswith(("SBATCH_", "SLURM_")) and name != "SLURM_CONF"]:
            del self.env[name]

    def call(self, *words: str, **how) -> str:
        """What a command prints. AssertionError if it fails."""
        done = subprocess.run([*map(str, words)], env=self.env, capture_output=True, text=True, **how)
        assert done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout.strip()

    def submit(self, script: str, *options: str, **env: str) -> str:
        """The number of the new job."""
        done = subprocess.run(["sbatch", "--parsable", *options], env=self.env | env, input=script, cwd="/",
                              capture_output=True, text=True)  # fmt: skip
        assert done.returncode == 0, f"{done.stderr}\n{script}"
        return done.stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        """What SLURM tells of a job, by SLURM's names."""
        return dict(re.findall(r"(\S+?)=(\S*)", self.call("scontrol", "show", "job", "-o", number)))

    def wait_for(self, number: str, *states: str, seconds: float = 300) -> dict[str, str]:
        """The job as soon as it is in one of these states. AssertionError if it is not in time."""
        until = time.monotonic() + seconds
        while (job := self.job(number))["JobState"] not in states:
            assert time.monotonic() < until, f"{job}\n{self.said(job)[-3000:]}"
            time.sleep(1)
        return job

    @staticmethod
    def said(job: dict[str, str]) -> str:
        """What a job has printed."""
        path = Path(job["StdOut"])
        return path.read_text(errors="replace") if path.exists() else ""


@contextlib.contextmanager
def slurm(folder: Path, track: str = "linuxproc"):
    """A Slurm with two idle nodes, whose files are in `folder`. track: SLURM's plugin that knows a job's processes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "state").mkdir()
    ports = [free_port() for _ in range(3)]
    config = CONFIG.format(host=socket.gethostname(), folder=folder, ports=ports, track=track)
    (folder / "slurm.conf").write_text(config)
    (folder / "munge.key").write_bytes(secrets.token_bytes(128))
    (folder / "munge.key").chmod(0o600)
    cluster = Slurm(folder)
    daemons = []
    munge = dict(key_file="munge.key", socket="munge.socket", pid_file="munged.pid", seed_file="munge.seed",
                 log_file="munged.log")  # fmt: skip
    options = [f"--{name.replace('_', '-')}={folder}/{file}" for name, file in munge.items()]
    commands = [["munged", "--foreground", "--force", *options], ["slurmctld", "-D"]]
    commands += [["slurmd", "-D", "-N", node] for node in ("n1", "n2")]
    try:
        with open(folder / "daemons.txt", "w") as out:
            for command in commands:
                daemons.append(subprocess.Popen(command, env=cluster.env, stdin=subprocess.DEVNULL, stdout=out,
                                                stderr=out, start_new_session=True))  # fmt: skip
        until = time.monotonic() + 60
        ask = ["sinfo", "-h", "-o", "%T %D"]
        while subprocess.run(ask, env=cluster.env, capture_output=True).stdout != b"idle 2\n":
            assert time.monotonic() < until, (folder / "slurmctld.log").read_text()[-3000:]
            time.sleep(0.3)
        yield cluster
    finally:
        with contextlib.suppress(AssertionError):
            cluster.call("scancel", "--full", "--signal=KILL", "--user=root")
            until = time.monotonic() + 30
            while cluster.call("squeue", "-h") and time.monotonic() < until:
                time.sleep(0.3)
        for daemon in reversed(daemons):
            daemon.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(10)
            daemon.kill()
            daemon.wait()
