"""--save-async and --save-errors: what is saved is what was there at the call, and no error of a save is lost.

    pytest tests/test_save_async.py        # no GPU; seconds; two ranks: tests/test_checkpoint_ranks.py
"""

import errno
import inspect
import os
import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from running import fails, on_gpu
from saved import assert_bitwise, contents, made, state_of, steps_in
from torch.distributed.checkpoint import filesystem
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from trainer.checkpoint import load as checkpoint
from trainer.checkpoint import save as saver
from trainer.checkpoint.manifest import CheckpointError, verify
from trainer.checkpoint.save import Saver
from trainer.step import local

pytestmark = pytest.mark.usefixtures("isolated")
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def run(alone, tmp_path):
    """A run that saves in the background, after one step; `step()` makes one more."""
    c, step, batches = made(1, "--batch", 4, "--steps", 9, "--save", "run", "--save-async")
    (tmp_path / "run").mkdir()
    with Saver(c, step, batches) as s:
        run = SimpleNamespace(saver=s, folder=tmp_path / "run", step=lambda: step(*next(batches)))
        run.state = lambda: {name: local(t).clone() for name, t in checkpoint.tensors(step).items()}
        run.step()
        yield run


class Gate:
    """In place of the writer: waits until it is opened, then writes."""

    def __init__(self, write):
        self.write = write
        self.opened = threading.Event()
        self.now = 0
        self.most = 0

    def __call__(self, *args):
        self.now += 1
        self.most = max(self.most, self.now)
        assert self.opened.wait(60)
        self.now -= 1
        return self.write(*args)


@pytest.fixture
def gate(monkeypatch):
    gate = Gate(saver._write)
    monkeypatch.setattr(saver, "_write", gate)
    return gate


def failing(monkeypatch, *names):
    """Steps of these names cannot be written."""
    write = filesystem._write_item

    def full(transforms, stream, *args):
        if any(name in stream.name for name in names):
            raise FULL
        return write(transforms, stream, *args)

    monkeypatch.setattr(filesystem, "_write_item", full)


@pytest.mark.long
def test_what_is_saved_in_the_background_is_bitwise_what_is_saved_at_once(train, tmp_path):
    argv = "--steps", 6, "--log-every", 1
    sync = train(*argv, "--save", tmp_path / "sync", "--save-every", 2)
    background = train(*argv, "--save", tmp_path / "async", "--save-every", 2, "--save-async")
    assert sync.code == background.code == 0
    assert steps_in("async") == [2, 4, 6]
    assert sync.losses == background.losses
    for k in (2, 4, 6):
        a, b = (tmp_path / name / f"step-0000000{k}" for name in ("sync", "async"))
        verify(str(b))
        assert_bitwise(contents(a), contents(b))
        one, two = map(state_of, (a, b))
        assert one.pop("run") != two.pop("run")
        assert one == two
    resumed = train(*argv, "--resume", "async/step-00000002", "--save", "on", "--save-every", 2, "--save-async")
    assert resumed.losses == sync.losses[2:]
    assert_bitwise(contents("sync/step-00000006"), contents("on/step-00000006"))


def test_training_goes_on_and_what_is_saved_is_what_was_there(run, gate):
    before = run.state()
    run.saver.save(1)
    for _ in range(2):
        run.step()
    assert not run.saver.failed()
    assert steps_in(run.folder) == []
    assert not any(torch.equal(t, before[name]) for name, t in run.state().items())
    gate.opened.set()
    run.saver.pending[1].result()
    assert not run.saver.failed()
    run.saver.wait()
    assert steps_in(run.folder) == [1]
    assert not [*run.folder.glob("tmp-*")]
    assert_bitwise(contents(run.folder / "step-00000001"), before)


def test_one_save_is_in_flight_and_the_next_one_waits_for_it(run, gate):
    before = run.state()
    run.saver.save(1)
    run.step()
    opening = threading.Timer(0.2, gate.opened.set)
    opening.start()
    run.saver.save(2)
    assert gate.opened.is_set()
    assert 1 in steps_in(run.folder)
    run.saver.wait()
    opening.join()
    assert steps_in(run.folder) == [1, 2]
    assert gate.most == 1
    assert_bitwise(contents(run.folder / "step-00000001"), before)


def test_every_save_fills_the_same_buffer_of_the_size_of_the_state(run):
    def buffers():
        shards = {name: local(t) for name, t in run.saver.staged.items()}
        return {name: (t.data_ptr(), t.untyped_storage().nbytes()) for name, t in shards.items()}

    first = buffers()
    state = run.state()
    assert {name: size for name, (_, size) in first.items()} == {name: t.nbytes for name, t in state.items()}
    for k in (1, 2):
        run.saver.save(k)
        assert buffers() == first
    assert not {pointer for pointer, _ in first.values()} & {t.data_ptr() for t in state.values()}


def test_shards_over_a_mesh_of_gpus_are_staged_and_written_from_host_memory(alone, tmp_path, monkeypatch):
    mesh = DeviceMesh("cuda", [0], _init_backend=False)
    shard = torch.empty(5, 3, device="meta")  # stands in for one on a GPU
    state = {"w": DTensor.from_local(shard, mesh, [Shard(0)], run_check=False, shape=(5, 3), stride=(3, 1))}
    c, step, batches = made(1, "--batch", 4, "--save", tmp_path, "--save-async")
    monkeypatch.setattr(saver, "tensors", lambda _: state)
    with Saver(c, step, batches) as s:
        staged = s.staged["w"]
        assert staged.device_mesh == mesh and staged.placements == (Shard(0),) and local(staged).is_cpu
        monkeypatch.setattr(s, "_stage", lambda _: local(staged).fill_(3))
        s.save(1)
        s.wait()
        assert local(staged).is_cpu
    assert torch.equal(contents("step-00000001")["w"], torch.full((5, 3), 3.0))


def test_collectives_of_a_background_save_have_a_group_of_their_own_that_is_given_back(run, monkeypatch):
    groups = []
    threads = []

    def recorded(real):
        def call(*args, **kwargs):
            groups.append(inspect.signature(real).bind(*args, **kwargs).arguments.get("group"))
            threads.append(threading.current_thread().name)
            return real(*args, **kwargs)

        return call

    for name in ("all_gather_object", "gather_object", "scatter_object_list", "broadcast_object_list"):
        monkeypatch.setattr(dist, name, recorded(getattr(dist, name)))
    run.saver.save(1)
    run.saver.wait()
    assert len(groups) > 5 and set(groups) == {run.saver.group} and run.saver.group not in (None, dist.group.WORLD)
    assert {name.rpartition("_")[0] for name in threads} == {"save"}
    for _ in range(2):
        run.saver.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("save")]
    assert not run.saver.staged
    with pytest.raises(ValueError):
        dist.get_backend(groups[0])


# -------------------------------------------------------------------------------------------------------------- errors


def test_an_error_in_the_background_is_told_by_failed_raised_by_wait_and_over(run, monkeypatch):
    with monkeypatch.context() as patch:
        failing(patch, "step-00000001")
        run.saver.save(1)
        until = time.monotonic() + 60
        while not run.saver.failed():
            assert time.monotonic() < until
            time.sleep(0.01)
    with pytest.raises(CheckpointError, match="No space left on device"):
        run.saver.wait()
    assert not run.saver.failed()
    assert [*run.folder.iterdir()] == []
    run.saver.wait()
    run.saver.save(2)
    run.saver.wait()
    assert not run.saver.failed()
    assert steps_in(run.folder) == [2]


@pytest.mark.parametrize("call", ["save", "close"])
def test_an_error_in_the_background_that_nobody_asked_for_is_raised_by_what_comes_next(call, run, monkeypatch):
    failing(monkeypatch, "step-00000001")
    run.saver.save(1)
    with pytest.raises(CheckpointError, match="No space left on device"):
        run.saver.save(2) if call == "save" else run.saver.close()
    assert steps_in(run.folder) == []


def test_an_interrupted_wait_does_not_lose_the_error(run, gate, monkeypatch):
    failing(monkeypatch, "step-00000001")
    run.saver.save(1)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(saver, "wait", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        run.saver.wait()
    gate.opened.set()
    with pytest.raises(CheckpointError, match="No space left on device"):
        run.saver.close()


MODES = [[], ["--save-async"]]


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("k", "errors", "left"), [
    (4, "stop", [2]), (4, "warn", [2, 6]), (6, "warn", [2, 4]),
])  # fmt: skip
def test_a_save_that_fails_stops_the_run_or_costs_a_line_and_the_last_one_must_do(
    k, errors, left, mode, train, tmp_path, monkeypatch
):
    failing(monkeypatch, f"step-0000000{k}")
    done = train("--save", tmp_path / "run", "--save-every", 2, *mode, "--save-errors", errors, "--log-every", 1)
    assert steps_in("run") == left
    assert len([*(tmp_path / "run").iterdir()]) == len(left)
    if errors == "warn" and k < 6:
        assert done.code == 0 and done.row["outcome"] == "ok" and len(done.steps) == 6
        step = tmp_path / f"run/step-0000000{k}"
        assert done.err.splitlines() == [f"warning: step {k} was not saved: {step}: OSError: {FULL}"]
    else:
        fails(done, 4, "No space left on device")
        assert done.row["outcome"].startswith("failed: ")


@pytest.mark.long
def test_a_run_that_ends_by_another_error_still_tells_what_its_last_save_met(train, monkeypatch):
    failing(monkeypatch, "step-00000001")
    argv = "--lr", "1e20", "--log-every", 1, "--save-every", "1", "--save-async"
    done = train("--save", "run", *argv, "--save-errors", "warn")
    told, error = done.err.splitlines()
    assert done.code == 5 and told.startswith("warning: step 1 was not saved: ") and error.startswith("error: ")
    monkeypatch.setattr(Saver, "failed", lambda _: False)  # nobody learns of it before the run ends
    done = train("--save", "run", *argv)
    assert done.code == 5 and "warning: " in done.err and "No space left" in done.err


@on_gpu
@pytest.mark.parametrize("wrapper", ["simple", "fsdp2"])
def test_on_a_gpu_the_buffer_is_pinned_and_what_is_saved_is_bitwise(wrapper, trains, tmp_path, monkeypatch):
    told = []
    stage = Saver._stage

    def recorded(self, state):
        stage(self, state)
        pinned = [local(t).is_cpu and local(t).is_pinned() for t in self.staged.values()]
        told.append((pinned, {name: local(t).cpu() for name, t in state.items()}))

    monkeypatch.setattr(Saver, "_stage", recorded)
    argv = "--device", "cuda", "--save-every", "2", "--save-async", "--wrapper", wrapper
    trains(*argv, "--save", "run")
    for k, (pinned, state) in zip((2, 4, 6), told, strict=True):
        assert all(pinned)
        assert_bitwise(contents(tmp_path / "run" / f"step-0000000{k}"), state)
