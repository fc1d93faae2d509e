"""kill -9 at the moments of a save: what is committed is whole, the rest is removed, and the run goes on from there.
A power cut: what is committed was synced before.

    pytest tests/test_killed.py        # no GPU; seconds; -m "": every moment, and one rank of two
"""

import os
import sys
from pathlib import Path

import failures
import killed
import pytest
import torch
from harness import free_port
from running import ROOT, ran
from saved import assert_bitwise, contents, steps_in

from trainer.checkpoint import save as saver
from trainer.checkpoint.manifest import verify

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("isolated")]
EVERYDAY = {"an item in the background": [], "manifest": [], "rename": [], "after rename": [2], "removal": [2, 4]}
ALL = EVERYDAY | {"first item": [], "an item": [], "train state": [], "second save": [2], "half a removal": [4]}
SCRIPT = str(Path(killed.__file__))


def started(*command):
    return ran(sys.executable, *command, cwd=None, OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT)).out.splitlines()


@pytest.mark.parametrize("moments", [EVERYDAY, pytest.param(ALL, marks=pytest.mark.slow)], ids=["everyday", "all"])
def test_killed_at_any_moment_of_a_save_leaves_whole_steps_alone_and_the_run_goes_on(moments, trains, tmp_path):
    told = started(SCRIPT, str(tmp_path), *moments)  # steps: that are there then
    trains("--save", tmp_path / "straight")
    for moment, steps in moments.items():
        folder = tmp_path / moment
        assert f"{moment}: -9" in told
        left = [*folder.glob("tmp-*")]
        assert steps_in(folder) == steps
        assert len(left) == (moment not in ("after rename", "removal"))
        for path in folder.glob("step-*"):
            verify(str(path))
        done = trains("--save", folder, "--save-every", 2, *killed.MOMENTS[moment][-1].split())
        assert ("starting fresh" in done.out) == (not steps), done.err
        assert ("removed tmp-step-" in done.out) == bool(left)
        assert "took over the lock of pid" in done.out
        assert steps_in(folder)[-1] == 6 and not [*folder.glob("tmp-*")] and not (folder / "lock").exists()
        assert_bitwise(contents(folder / "step-00000006"), contents(tmp_path / "straight/step-00000006"))


@pytest.fixture
def synced(monkeypatch):
    """{inode: bytes of it that were synced}."""
    sizes = {}
    fsync = os.fsync

    def noted(file):
        fsync(file)
        sizes[os.fstat(file).st_ino] = os.fstat(file).st_size

    monkeypatch.setattr(os, "fsync", noted)
    return sizes


def test_all_of_a_step_and_the_way_to_it_are_synced_before_it_has_its_name(trains, tmp_path, synced, monkeypatch):
    rename = os.rename
    seen = []

    def checked(a, b):
        if Path(b).name == "step-00000006":
            assert not [p.name for p in Path(a).iterdir() if synced.get(p.stat().st_ino) != p.stat().st_size]
            assert Path(a).stat().st_ino in synced
            seen.append(len([*Path(a).iterdir()]))
        rename(a, b)

    monkeypatch.setattr(os, "rename", checked)
    trains("--save", tmp_path / "not/there")
    assert seen == [4]
    for path in (tmp_path, tmp_path / "not", tmp_path / "not/there"):
        assert path.stat().st_ino in synced, path


def test_metadata_that_fits_into_a_buffer_of_python_is_synced_too(tmp_path, synced, alone):
    saver.write_tensors(str(tmp_path), {"w": torch.zeros(3)}, None)
    for path in tmp_path.iterdir():
        assert synced[path.stat().st_ino] == path.stat().st_size > 0, path.name


@pytest.mark.slow
def test_one_rank_of_two_killed_in_the_first_save_leaves_no_step_and_the_same_line_begins_afresh(tmp_path):
    command = "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())
    started(*command, SCRIPT, str(tmp_path), "an item")
    folder = tmp_path / "an item"
    assert steps_in(folder) == []
    assert len([*folder.glob("tmp-step-00000002-*")]) == 1
    flags = [*killed.TINY, "--save", str(folder), "--save-every", "2", "--results", str(tmp_path / "rows.jsonl")]
    out = "\n".join(started(*command, str(ROOT / "main.py"), *flags))
    assert "removed tmp-step-00000002-" in out and "starting fresh" in out and steps_in(folder) == [2, 4, 6]
    for path in folder.glob("step-*"):
        verify(str(path))


@pytest.mark.slow
def test_runs_with_injected_failures_of_any_kind_end_as_the_undisturbed_one(tmp_path):
    """Some hundreds of them: results/failures.jsonl."""
    row = failures.measure(5, seed=2)
    assert row["failures"].total() == 5
    assert row["bit_equal"] == row["rows_readable"] == row["runs"], row
    assert row["flips_found"] == row["flipped"], row
    assert row["unforeseen"] == []
