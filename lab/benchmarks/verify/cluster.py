"""The nodes of a proof: node 0 decides what runs, and the others run their part of it at the same time.

    cluster = Cluster.of(os.environ)         # by NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT, as ./launch.sh run
    cluster.meet("commit, torch, ranks")     # what must be the same on all nodes
    cluster.run([*cluster.torchrun(4), "main.py"], limit=480, env={}, on_all=True)     # node 0
    cluster.follow(seconds=600)              # the others, until node 0 ends

A job is the arguments of Python, sent as a line of JSON. No other node decides anything, so none can differ.
"""

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from lab.sweeps.processes import follow_parent, stop
from trainer.distributed.terminal import check_host

ROOT = Path(__file__).parents[3]
MEET_S = 300  # for all nodes to be started
ANSWER_S = 60  # for a node to answer, beside the limit of its job


class Peer:
    """Another node, to which lines of JSON are sent. OSError: it has ended, or does not answer."""

    def __init__(self, connection: socket.socket):
        self.connection = connection
        self.lines = connection.makefile("rw")

    def send(self, message) -> None:
        self.lines.write(json.dumps(message) + "\n")
        self.lines.flush()

    def receive(self, seconds: float):
        self.connection.settimeout(max(1, seconds))
        if not (line := self.lines.readline()):
            raise ConnectionError("it has ended")
        return json.loads(line)


@dataclass
class Cluster:
    """One node of several, or the only one."""

    nodes: int = 1
    node: int = 0
    address: str = ""  # of node 0
    port: int = 0
    peers: list[Peer] = field(default_factory=list)  # of node 0: all others; of another: node 0

    @classmethod
    def of(cls, env: dict[str, str]) -> "Cluster":
        """That of an environment. ValueError: it names none."""
        if env.get("NNODES", "1") == "1":
            return cls()
        told = {
            name: env.get(name) for name in ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
        }
        told["MASTER_PORT"] = told["MASTER_PORT"] or "29500"
        words = " ".join(f"{name}={text}" for name, text in told.items())
        found = re.fullmatch(
            r"NNODES=(\d+) NODE_RANK=(\d+) MASTER_ADDR=(\S+) MASTER_PORT=(\d+)", words
        )
        if not found or int(found[2]) >= int(found[1]):
            raise ValueError(
                f"{words}: expected how many nodes, which this is from 0 on, and the first one's address"
            )
        check_host(found[3])
        return cls(int(found[1]), int(found[2]), found[3], int(found[4]))

    def meet(self, same: str) -> None:
        """Waits for all nodes. ValueError: one does not come, or has another `same`."""
        try:
            if self.node:
                self.peers = [self._connected()]
                self.peers[0].send([self.node, same])
                problem = self.peers[0].receive(MEET_S)
            else:
                problem = self._accepted(same)
        except (OSError, OverflowError) as error:
            where = f"{self.address}:{self.port}"
            raise ValueError(f"the {self.nodes} nodes do not meet at {where}: {error}") from error
        if problem:
            raise ValueError(problem)

    def _accepted(self, same: str) -> str:
        """What does not fit of the other nodes, which are told; or nothing."""
        expected = [[node, same] for node in range(1, self.nodes)]
        with socket.create_server(("", self.port)) as server:
            server.settimeout(MEET_S)
            self.peers = [Peer(server.accept()[0]) for _ in expected]
        told = sorted(peer.receive(ANSWER_S) for peer in self.peers)
        problem = f"the other nodes are {told}, expected {expected}: start one line on all"
        problem *= told != expected
        for peer in self.peers:
            peer.send(problem)
        return problem

    def _connected(self) -> Peer:
        until = time.monotonic() + MEET_S
        while True:
            try:
                return Peer(socket.create_connection((self.address, self.port), ANSWER_S))
            except OSError:  # node 0 may be started later
                if time.monotonic() > until:
                    raise
            time.sleep(0.5)

    def torchrun(self, ranks: int, on_all: bool) -> list[str]:
        """Arguments of Python that start so many ranks, on each of all nodes or on this one."""
        meeting = ["--standalone"]
        if on_all:
            with socket.create_server(("", 0)) as server:
                port = server.getsockname()[1]  # which is free
            meeting = [
                f"--nnodes={self.nodes}",
                f"--master-addr={self.address}",
                f"--master-port={port}",
            ]
        return ["-m", "trainer.distributed.torchrun", *meeting, "--nproc-per-node", str(ranks)]

    def execute(self, words: list[str], limit: float, env: dict) -> tuple[int | None, str]:
        """The exit code of Python on this node, None if it did not end within `limit` seconds, and what it printed."""
        token = f"{os.getpid()}.{time.time_ns()}"
        paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        own = dict(OMP_NUM_THREADS="1", PYTHONPATH=paths, SWEEP_TOKEN=token)
        own |= dict(PET_NODE_RANK=str(self.node))  # --node-rank of torchrun
        with tempfile.TemporaryFile("w+", errors="replace") as log:
            child = subprocess.Popen(
                [sys.executable, *words],
                cwd=ROOT,
                env=os.environ | own | env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=follow_parent,
            )
            try:
                code = child.wait(limit)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                stop(child, token)
            log.seek(0)
            return code, log.read()

    def run(self, on_all: bool, **job) -> tuple[list[int | None], str]:
        """What execute gives of a job on this node or on all: exit codes, and all that was printed."""
        peers = self.peers if on_all else []
        for peer in peers:
            peer.send(job)
        endings = [self.execute(**job)]
        endings += [peer.receive(job["limit"] + ANSWER_S) for peer in peers]
        return [code for code, _ in endings], "".join(said for _, said in endings)

    def end(self, code: int) -> int:
        """Tells the other nodes the exit code, which it returns."""
        for peer in self.peers:
            peer.send(dict(code=code))
        return code

    def follow(self, seconds: float) -> int:
        """Runs what node 0 sends, for so long at most; returns the exit code that it tells."""
        until = time.monotonic() + seconds
        (first,) = self.peers
        while "code" not in (job := first.receive(until - time.monotonic())):
            code, said = self.execute(**job)
            first.send([code, said.replace(socket.gethostname(), "HOST")])
        return job["code"]
