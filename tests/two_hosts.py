"""Two hosts on one machine: two network namespaces joined by a pair of virtual network cards. Needs root and Linux.

    with two_hosts() as (a, b):
        runs = [host.start("--steps 20", nproc=2) for host in (a, b)]     # launch.sh on each, as a user types it
        b.link("down")                                                     # pulls the cable
"""

import contextlib
import itertools
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COUNT = itertools.count()


def missing() -> str:
    """Why there can be no two hosts here; empty if there can."""
    if not shutil.which("ip"):
        return "needs the command `ip` (iproute2)"
    if os.geteuid() != 0:
        return "needs root, for network namespaces"
    name = f"p{os.getpid()}"
    probe = f"""ip netns add {name} && ip link add {name}a type veth peer name {name}b &&
                ip link set {name}a netns {name} && ip netns exec {name} mount -t tmpfs none /mnt
                status=$?; ip netns del {name}; exit $status"""
    tried = subprocess.run(["sh", "-c", probe], capture_output=True, text=True)
    return f"needs network namespaces: {tried.stderr.strip()}" if tried.returncode else ""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class Host:
    """A network namespace with one card, `card`, at `address`."""

    def __init__(self, rank: int, folder: Path):
        self.rank, self.name = rank, f"fsdp{os.getpid()}n{next(COUNT)}"
        self.card, self.address, self.folder, self.runs = f"e{self.name[4:]}", f"10.77.0.{rank + 1}", folder, []
        folder.mkdir(parents=True, exist_ok=True)

    def link(self, state: str) -> None:
        """The cable: "up" or "down"."""
        ip("-n", self.name, "link", "set", self.card, state)

    def start(self, flags: str, port: int = 29555, private: Path | None = None, **env: str) -> subprocess.Popen:
        """launch.sh run FLAGS as host `rank` of two, with two ranks. Its output goes to `folder`/out.txt. private: a
        folder that is another one, empty, on each host. env: over that of launch.sh."""
        ours = {"NNODES": "2", "NODE_RANK": str(self.rank), "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": str(port)}
        ours |= {"NPROC": "2", "NO_INSTALL": "1", "PYTHON": sys.executable}
        command = ["ip", "netns", "exec", self.name]  # which has mounts of its own, too
        command += ["sh", "-c", f'mount -t tmpfs none {private} && exec "$@"', "sh"] if private else []
        command += [str(ROOT / "launch.sh"), "run", *flags.split()]
        with open(self.folder / "out.txt", "a") as out:
            env = {k: v for k, v in os.environ.items() if k != "GLOO_SOCKET_IFNAME"} | ours | env
            self.runs.append(subprocess.Popen(command, env=env, stdout=out, stderr=out,
                                              stdin=subprocess.DEVNULL, start_new_session=True))  # fmt: skip
        return self.runs[-1]

    def pids(self) -> list[int]:
        """All processes on this host."""
        return [*map(int, subprocess.run(["ip", "netns", "pids", self.name], capture_output=True).stdout.split())]

    def die(self) -> None:
        """What a power cut does to its processes."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    @contextlib.contextmanager
    def stopped(self):
        """Inside it the ranks here do not run, torchrun does; gives their pids."""
        ranks = [pid for pid in self.pids() if pid != self.runs[-1].pid]
        for pid in ranks:
            os.kill(pid, signal.SIGSTOP)
        yield ranks
        for pid in ranks:
            os.kill(pid, signal.SIGCONT)

    def ranks(self) -> set[str]:
        """The exit codes of ranks, as torchrun has told them."""
        return set(re.findall(r"exitcode  : (-?\d+)", self.said()))

    def said(self) -> str:
        """What has been printed here."""
        return (self.folder / "out.txt").read_text(errors="replace")

    def wait_for(self, text: str, seconds: float = 120) -> str:
        """What has been printed here as soon as it holds `text`; AssertionError if it does not in time."""
        until = time.monotonic() + seconds
        while text not in self.said():
            assert time.monotonic() < until and self.runs[-1].poll() is None, self.said()[-3000:]
            time.sleep(0.2)
        return self.said()


@contextlib.contextmanager
def two_hosts(folder: Path):
    """Two Hosts with a cable between them, and their own folders in `folder`."""
    hosts = [Host(rank, folder / f"host{rank}") for rank in range(2)]
    try:
        for host in hosts:
            ip("netns", "add", host.name)
        ip("link", "add", hosts[0].card, "type", "veth", "peer", "name", hosts[1].card)
        for host in hosts:
            names = Path("/etc/netns", host.name)  # `ip netns exec` puts this in the place of /etc/hosts
            names.mkdir(parents=True, exist_ok=True)
            own = f"{host.address} {socket.gethostname()}\n"
            (names / "hosts").write_text(f"127.0.0.1 localhost\n{own}10.77.0.1 first\n10.77.0.2 second\n")
            ip("link", "set", host.card, "netns", host.name)
            ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", host.card)
            ip("-n", host.name, "link", "set", "lo", "up")
            host.link("up")
        yield hosts
    finally:
        for host in hosts:
            host.die()
            for run in host.runs:
                run.wait()
            subprocess.run(["ip", "netns", "del", host.name], capture_output=True)
            shutil.rmtree(Path("/etc/netns", host.name), ignore_errors=True)
