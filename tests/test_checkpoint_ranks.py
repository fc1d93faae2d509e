"""Checkpoints of two ranks: every layout loads every other; what one rank cannot do fails on both.

    pytest tests/test_checkpoint_ranks.py        # no GPU; one spawn of two ranks
"""

import json
import os
import shutil
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist
from harness import spawn
from saved import contents, made, raw, start_of, steps_in, whole
from torch.distributed.checkpoint import filesystem

from trainer.checkpoint import load as checkpoint
from trainer.checkpoint import lock
from trainer.checkpoint import save as saver
from trainer.checkpoint.manifest import CheckpointError, Damaged, Refused, check_directory
from trainer.checkpoint.save import Saver

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("isolated")]

LAYOUTS = {
    "fully_shard": "--adam-dtype bf16", "hybrid_shard": "--mode hybrid_shard --adam-dtype bf16",
    "replicate": "--mode replicate --adam-dtype bf16", "fsdp2": "--wrapper fsdp2 --adam-dtype bf16",
    "ddp": "--wrapper ddp --adam-dtype bf16",
}  # fmt: skip
def save_in_every_layout(mesh):
    states = {}
    for layout, argv in LAYOUTS.items():
        c, step, batches = made(2, "--batch", 2, *argv.split(), "--save", f"{os.environ['CHECKPOINTS']}/{layout}")
        check_directory(c.save)
        for _ in range(2):
            step(*next(batches))
        states[layout] = whole(step)
        Saver(c, step, batches).save(2)
    return states


def load_into_every_other_layout(mesh):
    """Saved as fully_shard and as ddp, loaded as everything."""
    states = {}
    for origin in ("fully_shard", "ddp"):
        for layout, argv in LAYOUTS.items():
            resume = "--resume", f"{os.environ['CHECKPOINTS']}/{origin}", "--steps", 3
            c, step, batches = made(2, "--batch", 2, *argv.split(), *resume)
            checkpoint.load(start_of(c, step, batches), step)
            states[origin, layout] = whole(step)
    return states


def fail_on_rank_1(mesh):
    """What both ranks raise where only rank 1 cannot write, and where only it sees a damaged shard."""
    folder = f"{os.environ['CHECKPOINTS']}/fails"
    told = []
    c, step, batches = made(2, "--batch", 2, "--save", folder)
    check_directory(folder)
    full = mock.Mock(side_effect=OSError(28, "No space left on device"))
    with mock.patch.object(filesystem, "_write_item", full) if dist.get_rank() else mock.MagicMock():
        try:
            Saver(c, step, batches).save(1)
        except CheckpointError as e:
            told.append(str(e))
    dist.barrier()
    told.append(os.listdir(folder))
    dist.barrier()  # the other may begin to save
    Saver(c, step, batches).save(1)
    if dist.get_rank() == 0:
        os.truncate(f"{folder}/step-00000001/__1_0.distcp", 1000)
    dist.barrier()
    try:
        start_of(c, step, batches)
    except CheckpointError as e:
        told.append(str(e))
    return told


def read_what_differs_on_rank_1(mesh):
    """The step that both load where rank 1 alone refuses the newest one when it is verified; what both raise where each
    has a copy of its own, of which rank 1's is damaged where rank 0 looks, and where it is of another run."""
    rank = dist.get_rank()
    told = []
    folder = Path(os.environ["CHECKPOINTS"])
    for lr, name in ((0.1, "a"), (0.2, "b")):
        c, step, batches = made(2, "--batch", 2, "--save", folder / name, "--steps", 9, "--lr", lr)
        check_directory(c.save)
        for k in (1, 2):
            step(*next(batches))
            Saver(c, step, batches).save(k)
    once = dict(wraps=checkpoint._open, side_effect=[Damaged("another file"), mock.DEFAULT])
    with mock.patch.object(checkpoint, "_open", **once) if rank else mock.MagicMock():
        c, step, batches = made(2, "--batch", 2, "--resume", folder / "a")
        told.append(start_of(c, step, batches).state.step)
    for name in "ab":
        own = shutil.copytree(folder / (name if rank else "a"), folder / f"{name}-node{rank}")
        if rank and name == "a":
            os.truncate(own / "step-00000002/__1_0.distcp", 1000)
        try:
            told.append(checkpoint.newest([str(own / "step-00000002")]).path)
        except CheckpointError as e:
            told.append(str(e))
    return told


def save_beside_training(mesh):
    """What a background save wrote while rank 1's writer was late and both went on; what both raise where it fails."""
    rank = dist.get_rank()
    write = saver._write
    folder = f"{os.environ['CHECKPOINTS']}/async"
    opened = threading.Event()
    c, step, batches = made(2, "--batch", 2, "--steps", 9, "--save", folder, "--save-async")
    check_directory(folder)
    start_of(c, step, batches)
    step(*next(batches))
    state = whole(step)
    seen = []
    with Saver(c, step, batches) as s:
        with mock.patch.object(saver, "_write", lambda *a: (rank == 0 or opened.wait(60)) and write(*a)):
            s.save(1)
            for i in range(20):
                everyone = [None, None]
                dist.all_gather_object(everyone, (rank, i))
                seen.append(everyone == [(0, i), (1, i)])
            step(*next(batches))
            flying = not s.pending[1].done()
            dist.barrier()
            opened.set()
            s.wait()
        full = mock.Mock(side_effect=OSError(28, "No space left on device"))
        with mock.patch.object(filesystem, "_write_item", full) if rank else mock.MagicMock():
            s.save(2)
            while not s.failed():
                time.sleep(0.01)
            with pytest.raises(CheckpointError) as error:
                s.wait()
        s.save(2)
    return state, all(seen) and flying, str(error.value), os.listdir(folder)


def claim_directories(mesh):
    """What both raise where each has a directory of its own; who holds the lock of one that they share."""
    told = []
    folder = os.environ["CHECKPOINTS"]
    for where in (f"{folder}/node{dist.get_rank()}", f"{folder}/shared"):
        c, step, batches = made(2, "--batch", 2, "--steps", 9, "--save", where)
        check_directory(where)
        try:
            start_of(c, step, batches)
        except Refused as e:
            told.append(str(e))
        told.append(os.listdir(where))
    told.append((os.getpid(), json.loads(Path(f"{where}/lock").read_text())["pid"]))
    dist.barrier()
    lock.release(where)
    return told


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    with mock.patch.dict(os.environ, CHECKPOINTS=str(folder)):
        checks = [save_in_every_layout, load_into_every_other_layout, fail_on_rank_1, save_beside_training]
        results = spawn(2, [*checks, claim_directories, read_what_differs_on_rank_1])
    return folder, results


def test_two_ranks_write_a_shard_each_and_what_one_cannot_do_fails_on_both(two_ranks):
    folder, results = two_ranks
    assert (folder / "fully_shard/step-00000002/__0_0.distcp").stat().st_size > 1000
    assert (folder / "fully_shard/step-00000002/__1_0.distcp").stat().st_size > 1000
    told = results["fail_on_rank_1"]
    assert told[0] == told[1] and "No space left on device" in told[0][0] and told[0][1] == []
    assert "__1_0.distcp: 1000 bytes instead of" in told[0][2]


def test_what_rank_1_alone_does_not_see_as_it_was_saved_is_loaded_by_neither(two_ranks):
    for step, copy, other in two_ranks[1]["read_what_differs_on_rank_1"]:
        assert step == 1
        assert "a-node1/step-00000002/__1_0.distcp: 1000 bytes instead of" in copy
        assert "step-00000002: differs between rank 0 and rank 1" in other


def test_two_ranks_save_in_the_background_while_both_go_on_and_both_learn_what_one_cannot_do(two_ranks):
    folder, results = two_ranks
    for _, undisturbed, error, left in results["save_beside_training"]:
        assert undisturbed and "No space left on device" in error and "step-00000001" in left
    state = results["save_beside_training"][0][0]
    saved = {n: raw(t) for n, t in contents(folder / "async/step-00000001").items()}
    assert saved == {name: content for name, (_, _, content) in state.items()}
    assert steps_in(folder / "async") == [1, 2]
    assert not [*(folder / "async").glob("lock")]


def test_ranks_that_see_different_directories_are_refused_and_rank_0_holds_the_lock(two_ranks):
    folder, results = two_ranks
    told = results["claim_directories"]
    for rank, (error, left, shared, (_, holder)) in enumerate(told):
        assert error.startswith(f"--save {folder}/node{rank}: ")
        assert "not seen by rank 1;" in error
        assert left == [] and "lock" in shared and holder == told[0][-1][0]


def test_any_layout_loads_what_another_saved_bit_by_bit(two_ranks):
    _, results = two_ranks
    for saved, loaded in zip(results["save_in_every_layout"], results["load_into_every_other_layout"], strict=True):
        assert len(loaded) == 2 * len(LAYOUTS)
        for (origin, layout), state in loaded.items():
            assert state == saved[origin], f"{origin} into {layout}"
            assert state["m.emb.weight"][:2] == ("torch.bfloat16", (257, 32))


@pytest.mark.parametrize("wrapper", ["simple", "none"])
def test_one_rank_loads_what_two_saved_bit_by_bit(wrapper, two_ranks, alone):
    folder, results = two_ranks
    for layout in LAYOUTS:
        argv = "--batch", 4, "--wrapper", wrapper, "--adam-dtype", "bf16", "--resume", folder / layout, "--steps", 3
        c, step, batches = made(1, *argv)
        found = start_of(c, step, batches)
        checkpoint.load(found, step)
        assert whole(step) == results["save_in_every_layout"][0][layout], layout
        assert found.state.samples == 8 and step.optimizer.t == 2 and any(v.any() for v in step.optimizer.v)
