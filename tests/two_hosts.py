"""Two hosts on one machine: two network namespaces joined by a pair of virtual network cards. Needs root and Linux.

    with two_hosts(folder) as (a, b):
        runs = [host.start("--steps 20") for host in (a, b)]     # launch.sh on each, as a user types it
        b.link("down")                                           # pulls the cable
        b.throttle(0.1)                                          # GB/s
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
AHEAD_S = 600
CLOCK = """
#define _GNU_SOURCE
#include <pthread.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
int clock_gettime(clockid_t id, struct timespec *t) {
    int failed = syscall(SYS_clock_gettime, id, t);
    if (!failed && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) t->tv_sec += AHEAD;
    return failed;
}
int gettimeofday(struct timeval *t, void *zone) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    t->tv_sec = now.tv_sec, t->tv_usec = now.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *out) {
    struct timeval now;
    gettimeofday(&now, 0);
    return out ? *out = now.tv_sec : now.tv_sec;
}
int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex, const struct timespec *until) {
    int by_date = until->tv_sec > 1000000000;  // else by the clock that counts from the boot
    struct timespec t = {until->tv_sec - (by_date ? AHEAD : 0), until->tv_nsec};
    return pthread_cond_clockwait(condition, mutex, by_date ? CLOCK_REALTIME : CLOCK_MONOTONIC, &t);
}
"""


def missing() -> str:
    """Why there can be no two hosts here; empty if there can."""
    if gone := [name for name in ("ip", "tc", "cc") if not shutil.which(name)]:
        return f"needs the command{'s' * (len(gone) > 1)} {', '.join(gone)} (of iproute2 and a C compiler)"
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
    """A network namespace with one card, `card`, at `address`. env: of all that is started here."""

    def __init__(self, rank: int, folder: Path):
        self.rank = rank
        self.name = f"fsdp{os.getpid()}n{next(COUNT)}"
        self.card = f"e{self.name[4:]}"
        self.address = f"10.77.0.{rank + 1}"
        self.folder = folder
        self.runs = []
        self.env = {}
        folder.mkdir(parents=True, exist_ok=True)

    def link(self, state: str) -> None:
        """The cable: "up" or "down"."""
        ip("-n", self.name, "link", "set", self.card, state)

    def set_clock(self) -> None:
        """From now on it is AHEAD_S later for what is started here: by a library that stands in for libc's, since all
        namespaces have the kernel's clock. Times of files are the kernel's, as those on a shared disk are its own."""
        build = ["cc", "-shared", "-fPIC", f"-DAHEAD={AHEAD_S}", "-o", str(self.folder / "clock.so"), "-xc", "-"]
        subprocess.run(build, input=CLOCK, check=True, capture_output=True, text=True)
        self.env["LD_PRELOAD"] = build[5]

    def throttle(self, gb_per_s: float) -> None:
        """What this host sends takes at least this long. Delay would need netem, which not every kernel has."""
        rate, burst = f"{8e9 * gb_per_s:.0f}bit", f"{max(2**14, 2e5 * gb_per_s):.0f}b"  # 0.2 ms, or some packets
        self.run(*f"tc qdisc replace dev {self.card} root tbf rate {rate} burst {burst} latency 50ms".split())

    def run(self, *command: str) -> str:
        """What a short command prints here."""
        command = ("ip", "netns", "exec", self.name, *command)
        env = os.environ | self.env
        return subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout

    def start(self, flags: str, port: int = 29555, private: Path | None = None, command: str = "run",
              **env: str) -> subprocess.Popen:  # fmt: skip
        """launch.sh COMMAND FLAGS as host `rank` of two, with two ranks. Its output goes to `folder`/out.txt. private:
        a folder that is another one, empty, on each host. env: beside that of this process."""
        ours = {"NNODES": "2", "NODE_RANK": str(self.rank), "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": str(port)}
        ours |= {"PYTHONPATH": str(ROOT), "NPROC": "2", "NO_INSTALL": "1", "PYTHON": sys.executable}
        argv = ["ip", "netns", "exec", self.name]  # which has mounts of its own, too
        argv += ["sh", "-c", f'mount -t tmpfs none {private} && exec "$@"', "sh"] if private else []
        argv += [str(ROOT / "launch.sh"), command, *flags.split()]
        with open(self.folder / "out.txt", "a") as out:
            env = {k: v for k, v in os.environ.items() if k != "GLOO_SOCKET_IFNAME"} | ours | self.env | env
            self.runs.append(subprocess.Popen(argv, env=env, stdout=out, stderr=out,
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
        ranks = [pid for pid in self.pids() if os.getsid(pid) == pid != self.runs[-1].pid]  # each leads a session
        for pid in ranks:
            os.kill(pid, signal.SIGSTOP)
        yield ranks
        for pid in ranks:
            os.kill(pid, signal.SIGCONT)

    def ranks(self) -> set[str]:
        """The exit codes of ranks that failed first, as torchrun has told them."""
        return set(re.findall(r"^torchrun: rank .* ended with exit code (\d+)", self.said(), re.M))

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
