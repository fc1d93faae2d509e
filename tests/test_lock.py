"""trainer/checkpoint/lock.py: one run writes to a directory at a time; what a dead one left stops nobody for long.

    pytest tests/test_lock.py        # no GPU; seconds
"""

import errno
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from running import fails, module
from saved import steps_in

from trainer.checkpoint import lock
from trainer.checkpoint import save as saver
from trainer.checkpoint.manifest import CheckpointError, Refused

pytestmark = pytest.mark.usefixtures("isolated")


@pytest.fixture(autouse=True)
def nothing_held(isolated):
    yield
    lock.release_all()


def foreign(folder, seconds_ago=0, **owner):
    """A lock of another run: by default of another machine."""
    folder.mkdir(exist_ok=True)
    path = folder / "lock"
    path.write_text(json.dumps(dict(host="node7", pid=4711, start="1", machine="node7 boot", nonce="x") | owner))
    os.utime(path, (path.stat().st_mtime - seconds_ago,) * 2)
    return path


class Clock:
    """In place of the lock's `time`: nobody waits. `then`: {seconds: what happens}."""

    def __init__(self):
        self.now = 0
        self.then = {}

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        for at in [at for at in self.then if at <= self.now]:
            self.then.pop(at)()


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(lock, "time", Clock())
    return lock.time


def here(pid, **other):
    """What a process of this machine writes into its lock."""
    return dict(pid=pid, start=lock.start_ticks(pid), machine=lock._machine(), host="this") | other


def gone():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.mark.long
def test_a_second_run_exits_2_with_host_and_pid_and_leaves_everything(train, folder, no_model):
    path = foreign(folder, **here(os.getppid()))
    pid = os.getppid()
    (folder / "tmp-step-00000008-12345678").mkdir()
    before = path.read_text(), sorted(folder.iterdir())
    done = train("--save", folder, "--steps", 8)
    fails(done, 2, f"--save {folder}: pid {pid} on host this")
    assert done.row is None
    assert (path.read_text(), sorted(folder.iterdir())) == before


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc to tell a reused pid")
@pytest.mark.parametrize("how", ["gone", "reused", "zombie"])
def test_the_lock_of_a_process_of_this_machine_that_is_gone_is_taken_over(how, trains, folder):
    zombie = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    zombie.stdout.read()  # it has ended, and nobody has asked how
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
    pid = dict(gone=gone, reused=os.getppid, zombie=lambda: zombie.pid)[how]()
    began = Path(f"/proc/{zombie.pid}/stat").read_text().rpartition(") ")[2].split()[19]
    foreign(folder, **here(pid, start=began))
    done = trains("--save", folder, "--steps", 7)
    zombie.wait()
    assert f"took over the lock of pid {pid} on host this, which has ended" in done.out
    assert done.row["resumed_after"] == 6 and steps_in(folder) == [4, 6, 7] and not [*folder.glob("lock*")]


ODD = ["", "[1]", '{"pid": -1}', "\0", "[" * 10**5, '{"pid": 1.5}', '{"pid": true}', "0" * 10**5]


@pytest.mark.parametrize("text", [None, *ODD], ids=lambda text: text and text[:9])
@pytest.mark.parametrize("ago, waits", [(150, 30), (181, 0), (-1e6, 180)])  # by the file system's clock, not this one
def test_another_machines_lock_is_taken_over_after_180_s_without_a_sign(ago, waits, text, clock, tmp_path, capsys):
    who = "pid 4711 on host node7" if text is None else "somebody"
    path = foreign(tmp_path)
    if text is not None:
        path.write_text(text)
    os.utime(path, (path.stat().st_mtime - ago,) * 2)
    assert lock.acquire(tmp_path) == f"took over the lock of {who}, which gave no sign of life for 180 s"
    told = capsys.readouterr().out
    assert waits - 5 <= clock.now <= waits + lock.POLL
    assert (f"{who} may be writing there" in told) == (waits > 0)
    assert (f"({path} is not a lock of this program)" in told) == (waits > 0 and text is not None)
    assert json.loads(path.read_text())["pid"] == os.getpid()


def test_a_process_of_another_machine_of_the_same_name_is_not_looked_for_among_those_here(tmp_path, clock):
    """Hosts are often called alike: localhost, the pods of a set. There it may well be alive."""
    foreign(tmp_path, host=socket.gethostname(), pid=gone(), machine=f"{lock._machine()} of another boot")
    assert "no sign of life for 180 s" in lock.acquire(tmp_path)
    assert clock.now >= 175


def test_a_run_that_its_launcher_starts_again_on_another_host_waits_for_its_own_lock_and_goes_on(trains, folder, clock):
    foreign(folder, seconds_ago=100)
    done = trains("--save", folder, "--steps", 7)
    assert done.row["resumed_after"] == 6 and 75 < clock.now <= 80 + lock.POLL
    assert "pid 4711 on host node7 may be writing there, its last sign of life was 10" in done.out
    assert "waiting " in done.out


AFTERWARDS = {  # what happens to another machine's lock while it is waited for, who is writing there
    "a sign": (lambda path: os.utime(path), "pid 4711 on host node7"),
    "taken over": (lambda path: foreign(path.parent, pid=4712), "pid 4712 on host node7"),
}  # fmt: skip


@pytest.mark.parametrize("how", AFTERWARDS)
def test_a_sign_of_another_machine_refuses_the_run_that_waits_and_leaves_everything(how, train, folder, clock):
    change, who = AFTERWARDS[how]
    path = foreign(folder, seconds_ago=10)
    (folder / "tmp-step-00000008-12345678").mkdir()
    clock.then[20] = lambda: change(path)
    before = sorted(folder.iterdir())
    done = train("--save", folder, "--steps", 8)
    fails(done, 2, f"--save {folder}: {who} is writing there; ")
    assert clock.now == 20
    assert sorted(folder.iterdir()) == before and "node7" in path.read_text() and done.row is None


def test_a_lock_that_another_machine_gives_back_is_taken_at_once(tmp_path, clock):
    path = foreign(tmp_path)
    clock.then[20] = path.unlink
    assert lock.acquire(tmp_path) is None and clock.now == 20 and json.loads(path.read_text())["pid"] == os.getpid()


@pytest.mark.parametrize(("start", "alive"), [(None, True), ("5", True), ("6", False)])
def test_a_process_of_another_user_that_proc_hides_is_not_taken_for_dead(start, alive, monkeypatch):
    monkeypatch.setattr(os, "kill", lambda *_: (_ for _ in ()).throw(PermissionError))
    monkeypatch.setattr(lock, "start_ticks", lambda _: start)
    assert lock._alive(dict(pid=4711, start="5")) == alive


def test_of_two_runs_that_take_over_at_once_one_is_refused(tmp_path, monkeypatch):
    foreign(tmp_path, seconds_ago=200)
    rename = os.rename

    def overtaken(a, b):
        monkeypatch.setattr(os, "rename", rename)
        foreign(tmp_path, pid=4712)
        rename(a, b)

    monkeypatch.setattr(os, "rename", overtaken)
    with pytest.raises(Refused, match="pid 4712 on host node7 has just begun"):
        lock.acquire(tmp_path)
    assert json.loads((tmp_path / "lock").read_text())["pid"] == 4712
    assert len([*tmp_path.iterdir()]) == 1


ENDS = {  # flags, exit code
    "done": ("--steps 7", 0), "nothing to do": ("--steps 6", 0), "not fit": ("--depth 2", 4),
    "other data": ("--data random --steps 7", 3), "not finite": ("--lr 1e20 --steps 30", 5),
    "failed save": ("--steps 7", 4),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("end", ENDS)
def test_a_run_that_ends_by_itself_leaves_no_lock(end, train, folder, monkeypatch):
    argv, code = ENDS[end]
    if end == "failed save":
        monkeypatch.setattr(saver, "_write", lambda *_: open("/nowhere/file"))
    assert train("--save", folder, *argv.split()).code == code and not [*folder.glob("lock*")] and not lock._held


def test_an_exit_in_between_leaves_no_lock_and_signs_keep_no_process_alive(tmp_path):
    code = "import os, sys; from trainer.checkpoint import lock; d = sys.argv[1]; lock.acquire(d); "
    code += "print(os.listdir(d)); sys.exit(3)"
    done = module("\n" + code, tmp_path, timeout=20)
    assert (done.code, done.out) == (3, "['lock']\n")
    assert not [*tmp_path.iterdir()]


def test_signs_are_given_in_between_and_with_each_save(train, tmp_path, monkeypatch):
    old = 1e9
    monkeypatch.setattr(lock, "SIGN", 0.01)
    lock.acquire(tmp_path / ".")
    path = tmp_path / "lock"
    until = time.monotonic() + 20
    os.utime(path, (old, old))
    while path.stat().st_mtime == old:
        assert time.monotonic() < until
        time.sleep(0.01)
    lock.release(tmp_path)
    monkeypatch.undo()
    lock.acquire(tmp_path)
    os.utime(path, (old, old))
    lock.renew(f"{tmp_path}/")
    assert path.stat().st_mtime > old


@pytest.mark.long
@pytest.mark.parametrize("before", ["_begin", "_write"])
def test_a_run_whose_directory_was_taken_over_saves_no_more_and_leaves_the_others_lock(
    before, train, folder, monkeypatch
):
    real = getattr(saver, before)
    monkeypatch.setattr(saver, before, lambda *args: foreign(folder) and real(*args))
    fails(train("--save", folder, "--steps", 7), 4, "pid 4711 on host node7 took over this directory")
    assert steps_in(folder) == [2, 4, 6]
    assert "node7" in (folder / "lock").read_text()
    assert not [*folder.glob("tmp-*")]


def test_a_lock_that_somebody_removed_is_written_again(tmp_path):
    lock.acquire(tmp_path)
    before = (tmp_path / "lock").read_text()
    (tmp_path / "lock").unlink()
    lock.renew(tmp_path)
    assert (tmp_path / "lock").read_text() == before
    with pytest.raises(CheckpointError):
        foreign(tmp_path)
        lock.renew(tmp_path)


# ------------------------------------------------------------------------------- directories that cannot be written to


def test_a_directory_without_permission_exits_2(train, tmp_path):
    (tmp_path / "closed").mkdir(mode=0o500)
    if os.access(tmp_path / "closed", os.W_OK):
        pytest.skip("this user may write to any directory: root")
    for where in ("closed", "closed/deep"):
        done = train("--save", tmp_path / where)
        assert fails(done, 2, f"--save {tmp_path / where}: ", "Permission denied")
        assert done.row is None


@pytest.mark.parametrize("call", ["mkdir", "TemporaryFile", "open"])
def test_a_read_only_file_system_exits_2_before_a_model_is_built(call, train, tmp_path, monkeypatch, no_model):
    where = tmp_path / "run"
    before = getattr(tempfile if call == "TemporaryFile" else os, call)

    def read_only(path=None, *args, **kwargs):
        if str(where) in (f"{path}", f"{kwargs.get('dir')}", os.path.dirname(f"{path}")):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return before(*([path] if path is not None else []), *args, **kwargs)

    monkeypatch.setattr(tempfile if call == "TemporaryFile" else os, call, read_only)
    done = train("--save", where)
    assert fails(done, 2, f"--save {where}: ", "Read-only file system")
    assert done.row is None
