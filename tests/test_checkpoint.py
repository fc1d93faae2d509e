"""trainer/checkpoint/load.py: what is resumed is bitwise what went on, in any layout; a step is whole or not there.

    pytest tests/test_checkpoint.py   # no GPU; a minute; damage: test_manifest.py, ranks: test_checkpoint_ranks.py

Runs are those of main.py, eager and tiny, in this process.
"""

import os
import shutil
from unittest import mock

import pytest
import torch
from harness import ONE_GRAPH
from running import fails
from saved import assert_bitwise, contents, state_of, steps_in

from trainer.checkpoint import load as checkpoint
from trainer.checkpoint import lock
from trainer.step import local

pytestmark = pytest.mark.usefixtures("isolated")


# -------------------------------------------------------------------------------------------------------------- resume

SETTINGS = {
    "eager": "", "no wrapper": "--wrapper none", "fsdp2": "--wrapper fsdp2", "ddp": "--wrapper ddp",
    "bf16": "--adam-dtype bf16 --param-dtype bf16 --grad-accum 2",
}  # fmt: skip
COMPILED = {mode: f"--compile {mode}" for mode in ("blocks", "model", "fwdbwd", "step")}
LONG = [pytest.param(name, marks=pytest.mark.long) for name in ("no wrapper", "fsdp2", "ddp", "bf16")]
ALL = ["eager", *LONG, *(pytest.param(k, marks=[pytest.mark.slow, *[ONE_GRAPH] * (k == "step")]) for k in COMPILED)]


def trained(done):
    """What a run logged, without times."""
    return [[step[key] for key in ("loss", "lr", "grad_norm")] for step in done.steps]


@pytest.mark.parametrize("setting", ALL)
def test_a_run_that_was_stopped_and_resumed_is_bitwise_the_run_that_was_not(setting, train, trains, tmp_path):
    argv = (SETTINGS | COMPILED)[setting].split() + "--warmup 2 --steps 10 --log-every 1".split()
    straight = tmp_path / "straight"
    cut = tmp_path / "cut"
    whole = train(*argv, "--save", straight)
    trains(*argv, "--save", cut, "--save-every", 5)
    assert steps_in(cut) == [5, 10]
    shutil.rmtree(cut / "step-00000010")
    resumed = train(*argv, "--save", cut, "--save-every", 5)
    assert whole.code == resumed.code == 0, resumed.err
    assert "resuming after step 5" in resumed.out
    assert resumed.row["resumed_after"] == 5
    assert resumed.logged == [6, 7, 8, 9, 10]
    assert trained(resumed) == trained(whole)[5:]
    assert_bitwise(contents(straight / "step-00000010"), contents(cut / "step-00000010"))
    told, expected = (state_of(f / "step-00000010") for f in (cut, straight))
    assert told.pop("run") != expected.pop("run")  # a name of each
    assert told == expected and told["step"] == 10 and told["samples"] == 10 * told["global_batch"]


@pytest.mark.long
def test_with_no_checkpoint_a_run_is_the_one_without_the_flags(train, tmp_path):
    plain = train("--log-every", 1)
    saving = train("--log-every", 1, "--save", tmp_path / "new", "--save-every", 1)
    assert "checkpoint:" not in plain.out
    assert f"none in {tmp_path / 'new'}: starting fresh" in saving.out
    assert trained(plain) == trained(saving)


def test_a_run_that_is_done_says_so(trains, folder):
    for steps in (6, 5):
        done = trains("--save", folder, "--steps", steps)
        assert "already done" in done.out and "resuming" not in done.out and done.row is None
    assert steps_in(folder) == [2, 4, 6]


def test_more_steps_go_on_from_the_end_and_a_changed_flag_is_told(trains, folder):
    done = trains("--save", folder, "--steps", 8, "--lr", 0.001, "--log-every", 1)
    assert done.logged == [7, 8]
    assert "--lr 0.003 (now 0.001)" in done.out
    assert "--steps 6 (now 8)" in done.out
    assert done.steps[0]["lr"] == pytest.approx(0.001 * 7 / 10)


@pytest.mark.long
@pytest.mark.parametrize("what", ["step-00000004", "", "step-00000004/", "latest", "./", ".."])
def test_resume_takes_a_step_or_a_directory_of_steps(what, trains, folder, tmp_path, monkeypatch):
    (folder / "latest").symlink_to("step-00000004")
    monkeypatch.chdir(folder / "step-00000004")
    where = what if what.startswith(".") else f"{folder}/{what}"
    done = trains("--resume", where, "--steps", 7, "--save", tmp_path / "other")
    after = 6 if what in ("", "..") else 4
    assert done.row["resumed_after"] == after and steps_in(tmp_path / "other") == [7]


@pytest.mark.long
@pytest.mark.parametrize("where", ["absent", "empty", "step-00000009", ""])
def test_a_named_checkpoint_that_is_not_there_exits_4(where, train, tmp_path):
    (tmp_path / "empty").mkdir()
    done = train("--resume", where and tmp_path / where)
    fails(done, 4, f"--resume {where and tmp_path / where}")
    assert done.row is None


MISFITS = {  # flags of the resumed run, what the line says
    "--depth 2": "--depth 1 (now 2)", "--width 64": "--width 32 (now 64)", "--vocab 300": "--vocab 256 (now 300)",
    "--grow 2": "--grow 4 (now 2)", "--adam-dtype bf16": "--adam-dtype fp32 (now bf16)", "--seed 1": "--seed 0 (now 1)",
    "--block llama": "--block gelu (now llama)",
    "--seqlen 8": "--seqlen 16 (now 8)", "--batch 4": "--effective-batch 2 (now 4)",
    "--grad-accum 2": "--effective-batch 2 (now 4)",
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("argv", MISFITS)
def test_a_flag_that_must_stay_exits_4_saved_and_asked(argv, train, folder, no_model):
    fails(train("--save", folder, "--steps", 8, *argv.split()), 4, MISFITS[argv], "step-00000006")


def test_the_same_global_batch_may_be_cut_otherwise(trains, folder):
    done = trains("--save", folder, "--steps", 7, "--batch", 1, "--grad-accum", 2)
    assert "--batch 2 (now 1), --grad-accum 1 (now 2)" in done.out


@pytest.mark.long
@pytest.mark.parametrize(("old", "new"), [("fp32", "bf16"), ("bf16", "fp32")])
def test_cast_converts_the_moments_alone_and_says_so(old, new, train, trains):
    trains("--save", "old", "--adam-dtype", old)
    argv = "--resume", "old", "--steps", 7, "--save", "new", "--adam-dtype", new
    fails(train(*argv), 4, f"--adam-dtype {old} (now {new})", "--cast")
    seen = []

    def note(c, step, *_):
        seen.append({n: local(t).clone() for n, t in checkpoint.tensors(step).items()})
        return mock.MagicMock()

    with mock.patch("trainer.run.Saver", side_effect=note):
        done = train(*argv, "--cast")
    lock.release_all()  # as the saver would have done
    assert done.code == 0
    assert f"--cast: Adam's moments are converted from {old} to {new}" in done.out
    to = dict(fp32=torch.float32, bf16=torch.bfloat16)[new]
    saved = contents("old/step-00000006")
    assert_bitwise(seen[0], {n: t.to(to) if n[:2] in ("m.", "v.") else t for n, t in saved.items()})
    same = trains("--resume", "old", "--steps", 7, "--adam-dtype", old, "--cast")
    assert "converted" not in same.out


@pytest.mark.parametrize("change", ["missing", "more"])
def test_tensors_that_the_model_does_not_have_or_lacks_are_named(change, train, folder, monkeypatch):
    real = checkpoint.tensors

    def other(step):
        state = real(step)
        if change == "missing":
            return {name: t for name, t in state.items() if name != "m.norm.weight"}
        return state | {"norm.scale": torch.ones(3)}

    monkeypatch.setattr(checkpoint, "tensors", other)
    done = train("--save", folder, "--steps", 7)
    fails(done, 4, "m.norm.weight" if change == "missing" else "norm.scale None (now [[3]")
    assert done.row["outcome"].startswith("failed: ")


@pytest.mark.long
def test_auto_goes_back_to_the_older_step_says_so_and_sets_the_damaged_one_aside(trains, folder):
    expected = contents(folder / "step-00000006")
    os.truncate(folder / "step-00000006/__0_0.distcp", 1000)
    done = trains("--save", folder, "--save-every", 2, "--keep", 3)
    assert done.row["resumed_after"] == 4
    assert "step-00000006/__0_0.distcp: " in done.out
    assert f"going back to {folder / 'step-00000004'}" in done.out
    (aside,) = folder.glob("damaged-step-00000006-*")
    assert steps_in(folder) == [2, 4, 6]
    assert aside.name in done.out
    assert_bitwise(contents(folder / "step-00000006"), expected)
    os.truncate(folder / "step-00000006/__0_0.distcp", 1000)
    trains("--save", folder, "--steps", 5)
    assert len([*folder.glob("damaged-*")]) == 1 and not aside.exists(), "more would fill the disk"


def test_with_only_damaged_steps_auto_does_not_begin_again(train, folder):
    for step in folder.glob("step-*"):
        os.truncate(step / ".metadata", 1000)
    fails(train("--save", folder, "--steps", 8), 4, "step-00000006/.metadata")
    assert steps_in(folder) == [2, 4, 6]


# ---------------------------------------------------------------------------------------------------------------- save


def test_a_step_that_is_there_is_not_written_over(train, tmp_path, monkeypatch):
    planted = tmp_path / "run/step-00000006"
    before = checkpoint.find_checkpoint

    def choose(*args):
        found = before(*args)
        planted.mkdir()
        return found

    monkeypatch.setattr(checkpoint, "find_checkpoint", choose)
    fails(train("--save", tmp_path / "run"), 4, f"{planted}: already exists and is not overwritten")
    assert not [*planted.iterdir()]


@pytest.mark.long
def test_a_save_without_room_exits_4_with_a_row_and_leaves_the_older_steps(train, folder, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 2**20 // 10))
        done = train("--save", folder, "--steps", 8)
    fails(done, 4, f"{folder}/step-00000008: ", "disk full: needs 0.3 MiB, has 0.1 MiB")
    assert done.row["outcome"].startswith("failed: ")
    assert steps_in(folder) == [2, 4, 6]
    assert len([*folder.iterdir()]) == 3
    assert train("--save", folder, "--steps", 7).row["resumed_after"] == 6
