"""Damaged, forged and foreign checkpoints: each is refused by the name of its file, and nothing in them runs.

    pytest tests/test_manifest.py        # no GPU; seconds
"""

import copy
import errno
import itertools
import json
import os
import pickle
import random
import re
import shutil
import zlib
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from running import TINY, fails, resolved
from saved import contents, state_of, steps_in
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
)

from trainer.checkpoint import load as checkpoint
from trainer.checkpoint.load import TrainState
from trainer.checkpoint.manifest import CheckpointError, Damaged, discard, verify
from trainer.data import DataError

pytestmark = pytest.mark.usefixtures("isolated")


def sign(step):
    """A manifest that fits whatever the other files are now."""
    files = {}
    for path in step.iterdir():
        if path.name != "manifest.json":
            files[path.name] = [len(path.read_bytes()), zlib.crc32(path.read_bytes())]
    write_manifest(step, files)


def restate(step, **changed):
    """Other entries in a step's train_state.json, which is signed; the file."""
    path = step / "train_state.json"
    path.write_text(json.dumps(state_of(step) | changed))
    sign(step)
    return path


def write_manifest(step, files):
    digest = zlib.crc32(json.dumps(files, sort_keys=True).encode())
    (step / "manifest.json").write_text(json.dumps({"crc32": digest, "files": files}))


def test_100_flipped_bits_anywhere_are_100_refusals(folder):
    step = folder / "step-00000006"
    rng = random.Random(0)
    paths = sorted(step.iterdir())
    assert [p.name for p in paths] == [".metadata", "__0_0.distcp", "manifest.json", "train_state.json"]
    verify(str(step))
    for i in range(100):
        path = paths[i % len(paths)]
        content = bytearray(path.read_bytes())
        at = rng.randrange(len(content))
        bit = rng.randrange(8)
        path.write_bytes(bytes(content[:at]) + bytes([content[at] ^ 1 << bit]) + bytes(content[at + 1 :]))
        with pytest.raises(Damaged, match=path.name):
            verify(str(step))
        path.write_bytes(content)
    verify(str(step))


def truncated(name):
    return lambda step: os.truncate(step / name, (step / name).stat().st_size // 2)


def edited(step):
    files = json.loads((step / "manifest.json").read_text())["files"]
    shutil.copy(step / "__0_0.distcp", step.parent / "outside")
    write_manifest(step, files | {"../outside": files["__0_0.distcp"]})


def linked(step):
    (step / "__0_0.distcp").rename(step.parent / "outside")
    (step / "__0_0.distcp").symlink_to("../outside")


def linked_step(step):
    step.rename(step.parent / "elsewhere")
    step.symlink_to("elsewhere")


NAMES = "__0_0.distcp", ".metadata", "manifest.json", "train_state.json"
DAMAGE = {  # what happens to step 6, what the line names
    **{f"truncated {name}": (truncated(name), f"/{name}: ") for name in NAMES},
    **{f"missing {name}": (lambda step, name=name: (step / name).unlink(), f"/{name}: No such file") for name in NAMES},
    "emptied shard": (lambda step: (step / "__0_0.distcp").write_bytes(b""), "/__0_0.distcp: 0 bytes instead of "),
    "emptied manifest": (lambda step: (step / "manifest.json").write_bytes(b""), "/manifest.json: is not a manifest"),
    "another JSON": (lambda step: (step / "manifest.json").write_text("[1, {}]"), "/manifest.json: is not a manifest"),
    "short manifest": (lambda step: write_manifest(step, {}), "/manifest.json: lacks .metadata"),
    "another step's shard": (lambda step: shutil.copy(step.parent / "step-00000004/__0_0.distcp", step),
                             "/__0_0.distcp: checksum differs"),
    "path out of the directory": (edited, "/manifest.json: names '../outside'"),
    "linked shard": (linked, "/__0_0.distcp: is not a plain file"),
    "linked step": (linked_step, ": is a symbolic link"),
}  # fmt: skip


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_step_is_refused_by_the_name_of_its_file(how, folder):
    damage, named = DAMAGE[how]
    step = folder / "step-00000006"
    damage(step)
    with pytest.raises(Damaged, match=re.escape(f"{step}{named}")):
        verify(str(step))


def test_a_step_under_another_name_is_refused(train, folder):
    (folder / "step-00000006").rename(folder / "step-00000008")
    done = train("--resume", folder / "step-00000008", "--steps", 9)
    fails(done, 4, "step-00000008/train_state.json: ValueError: holds step 6, unlike the name of its folder")


@pytest.mark.parametrize(("number", "code"), [(errno.EIO, 0), (errno.ESTALE, 4), (errno.EMFILE, 4)])
@pytest.mark.parametrize("name", ["__0_0.distcp", "train_state.json"])
def test_a_step_that_cannot_be_read_just_now_is_not_taken_for_damaged(number, code, name, train, folder, monkeypatch):
    read = open
    path = str(folder / "step-00000006" / name)

    def unreadable(file, *args, **kwargs):
        if str(file) == path:
            raise OSError(number, os.strerror(number), path)
        return read(file, *args, **kwargs)

    monkeypatch.setattr("builtins.open", unreadable)
    done = train("--save", folder, "--steps", 5)
    assert done.code == code
    assert f"{path}: {os.strerror(number)}" in (done.err if code else done.out)
    assert steps_in(folder) == ([2, 4, 6] if code else [2, 4, 5])


class Planted:
    def __reduce__(self):
        return os.mkdir, (os.path.abspath("ran"),)


def test_a_planted_pickle_is_refused_by_name_and_does_not_run(train, folder):
    (folder / "step-00000006/.metadata").write_bytes(pickle.dumps(Planted()))
    sign(folder / "step-00000006")
    fails(train("--resume", folder / "step-00000006", "--steps", 7), 4, ".metadata: ", "posix.mkdir")
    assert not Path("ran").exists()
    pickle.loads((folder / "step-00000006/.metadata").read_bytes())  # what was planted does work
    assert Path("ran").exists()


def forged(step, change):
    metadata = pickle.loads((step / ".metadata").read_bytes())
    change(metadata)
    (step / ".metadata").write_bytes(pickle.dumps(metadata))
    sign(step)


def elsewhere(metadata):
    next(iter(metadata.storage_data.values())).relative_path = "../outside"


def pickled_entry(metadata):
    metadata.state_dict_metadata["t"] = BytesStorageMetadata()


@pytest.mark.parametrize(("change", "named"), [
    (elsewhere, "'../outside', which is not in the manifest"), (pickled_entry, "BytesStorageMetadata"),
    (lambda metadata: metadata.state_dict_metadata.pop("t"), "lists other tensors than train_state.json"),
])  # fmt: skip
def test_metadata_that_leads_elsewhere_is_refused(change, named, train, folder):
    forged(folder / "step-00000006", change)
    fails(train("--resume", folder / "step-00000006", "--steps", 7), 4, ".metadata: ", named)


# ------------------------------------------------------------------------------------- well signed, and of another kind

ODD = "missing", None, True, -5, 0, 7, 10**30, 0.5, float("nan"), float("inf"), "x", "", [], [1], {}, {"a": 1}
ACCEPTED = {"format 0", "world 0", "world 7", "torch x", "torch ", "training {}", "training {'a': 1}"}
ACCEPTED |= {"trackers missing", "trackers {}", "trackers {'a': 1}"}  # a run of each tracker then begins anew


@pytest.mark.long
def test_every_entry_of_a_train_state_that_is_missing_or_odd_is_damage_or_means_nothing(folder, alone):
    """Also those of its entries, which are compared with flags."""
    step = folder / "step-00000006"
    c = resolved(TINY)
    files = verify(str(step))
    about = state_of(step)
    batches = SimpleNamespace(global_batch=2, **about["data"])
    accepted = set()
    cases = [(within, name, odd) for within in ("", "training", "data", "model", "tensors")
             for name in [*(about[within] if within else about)][: 4 if within == "tensors" else None] for odd in ODD]
    for within, name, odd in cases:
        changed = copy.deepcopy(about)
        holder = changed[within] if within else changed
        holder[name] = odd
        if odd == "missing":
            del holder[name]
        (step / "train_state.json").write_text(json.dumps(changed))
        try:
            found = checkpoint._open(str(step), files)
        except CheckpointError as error:
            assert isinstance(error, Damaged) or name == "format"
            continue
        accepted |= set() if within else {f"{name} {odd}"}
        with suppress(CheckpointError, DataError):
            checkpoint._check(found, c, batches, about["model"])
    means_nothing = {case for case in accepted if case.split()[0] in ("model", "run")}
    assert len(cases) > 500
    assert accepted - means_nothing == ACCEPTED


def test_other_json_than_a_step_has_is_damage(folder, alone):
    step = folder / "step-00000006"
    files = verify(str(folder / "step-00000006"))
    for name, odd in itertools.product(("manifest.json", "train_state.json"), (*ODD, "[" * 10**5, '{"a":' * 10**5)):
        kept = (step / name).read_bytes()
        (step / name).write_text(odd if isinstance(odd, str) else json.dumps(odd))
        with pytest.raises(Damaged, match=name):
            checkpoint._open(str(step), verify(str(step)) if name == "manifest.json" else files)
        (step / name).write_bytes(kept)
    for odd in ODD:
        write_manifest(step, files | {"__0_0.distcp": odd})
        with pytest.raises(Damaged):
            verify(str(step))


@pytest.mark.long
def test_a_signed_step_with_odd_samples_is_refused_and_the_step_before_is_resumed(train, folder):
    path = restate(folder / "step-00000006", samples=5)
    fails(train("--resume", path.parent, "--steps", 7), 4, f"{path}: ValueError: samples is 5, expected 12")
    assert train("--save", folder, "--steps", 7).row["resumed_after"] == 4


def edit(metadata, rng):
    """Changes one thing of a random chunk, its tensor or its place in a file; or cuts or doubles the list of chunks."""
    name = rng.choice(sorted(metadata.state_dict_metadata))
    t = metadata.state_dict_metadata[name]
    stored = metadata.storage_data
    chunk = rng.choice(t.chunks or [None])
    info = stored[rng.choice(sorted(stored, key=str))]
    what = rng.choice(["chunks", "offsets", "sizes", "size", "stored", "offset", "length", "split"])
    number = rng.choice([-1, 0, 1, 2, 16, 10**9])
    if what == "chunks":
        t.chunks = t.chunks * rng.choice([0, 2])
    elif what == "stored":
        del stored[rng.choice(sorted(stored, key=str))]
    elif what in ("offset", "length"):
        setattr(info, what, number)
    elif t.size and what == "split":
        half = torch.Size([max(1, t.size[0] // 2), *t.size[1:]])
        t.chunks = [ChunkStorageMetadata(chunk.offsets, half)]
    elif t.size:
        owner = t if what == "size" else chunk
        at = rng.randrange(len(t.size))
        changed = [*getattr(owner, what)]
        changed[at] = number
        setattr(owner, what, torch.Size(changed))


@pytest.mark.long
def test_metadata_that_does_not_say_where_each_element_lies_is_damage(folder, alone):
    """What is read is bit for bit what was saved, or nothing is."""
    step = folder / "step-00000006"
    rng = random.Random(0)
    refused = 0
    original = (step / ".metadata").read_bytes()
    files = verify(str(folder / "step-00000006"))
    whole = contents(step)
    for _ in range(150):
        metadata = pickle.loads(original)
        edit(metadata, rng)
        (step / ".metadata").write_bytes(pickle.dumps(metadata))
        try:
            found = checkpoint._open(str(step), files)
            for name, t in whole.items():
                assert torch.equal(checkpoint.read(found, name), t), name
        except CheckpointError as error:
            refused += isinstance(error, Damaged)
    assert 75 < refused


def test_a_newer_format_exits_4_and_an_older_step_is_no_way_out(train, folder):
    path = restate(folder / "step-00000006", format=checkpoint.FORMAT + 1)
    fails(train("--save", folder, "--steps", 7), 4, f"{path}: format 2 is newer")


def test_another_torch_is_told(trains, folder):
    restate(folder / "step-00000006", torch="2.9.0")
    done = trains("--resume", folder / "step-00000006", "--steps", 7)
    assert "torch 2.9.0 (now " in done.out


def test_a_step_that_another_commit_saved_is_resumed_as_long_as_its_format_is_known(trains, folder):
    """It may say more than this one knows, and lack what was added since; the tensors decide."""
    path = restate(folder / "step-00000006", written_by="another commit", more={"of": [1]})
    path.write_text(json.dumps({k: v for k, v in state_of(path.parent).items() if k not in ("run", "wandb")}))
    sign(path.parent)
    resumed = trains("--save", folder, "--steps", 8)
    assert resumed.row["resumed_after"] == 6
    assert steps_in(folder)[-1] == 8


@pytest.mark.long
def test_the_allow_list_is_what_our_checkpoints_name_and_no_more(trains, folder, tmp_path, monkeypatch):
    trains("--save", "bf16", "--adam-dtype", "bf16")
    named = set()
    find = checkpoint._Unpickler.find_class

    def record(self, *name):
        named.add(name)
        return find(self, *name)

    monkeypatch.setattr(checkpoint._Unpickler, "find_class", record)
    for each in (folder, tmp_path / "bf16"):
        trains("--resume", each, "--steps", 6, "--adam-dtype", "bf16" if each != folder else "fp32")
    # Codes of moments in 8 bits: where torchao is, tests/test_adamw8bit.py resumes such a checkpoint.
    assert named | {("torch", "uint8")} == checkpoint.ALLOWED


# ----------------------------------------------------------------------------------------------------------- what stays


@pytest.mark.long
def test_the_newest_stay(trains, tmp_path):
    trains("--save", "run", "--save-every", 1, "--keep", 2)
    assert steps_in("run") == [5, 6]
    assert len([*(tmp_path / "run").iterdir()]) == 2
    trains("--save", "last")
    assert steps_in("last") == [6]


@pytest.mark.long
def test_a_directory_of_another_run_is_refused_at_the_start(train, trains, folder):
    for argv in (["--resume", "never"], ["--resume", folder / "step-00000002"]):
        done = train("--save", folder, *argv)
        fails(done, 4, "holds step-00000006")
        assert done.row is None
        assert "starting fresh" not in done.out
    trains("--save", "new", "--resume", "never")


@pytest.mark.long
def test_steps_of_another_run_are_not_counted_by_keep_but_refused(train, trains, folder, tmp_path):
    for step in (4, 6):
        shutil.rmtree(folder / f"step-0000000{step}")
    trains("--save", "one")
    argv = "--save", folder, "--keep", 1, "--steps", 7, "--resume"
    fails(train(*argv, "one"), 4, "already holds step-00000002, but --resume")
    assert steps_in(folder) == [2]
    (tmp_path / "same").symlink_to(folder)
    trains(*argv, "same/step-00000002")
    assert steps_in(folder) == [7]


@pytest.mark.long
@pytest.mark.parametrize("path", ["", "/step-00000004"])
def test_a_run_that_began_elsewhere_is_resumed_by_the_same_command(path, train, trains, folder, tmp_path):
    """As its launcher does: the directory that it began from still holds what it held."""
    shutil.rmtree(folder / "step-00000006")
    argv = "--resume", f"{folder}{path}", "--steps", 9, "--save-every", 2, "--log-every", 1, "--save"
    whole = train(*argv, "whole")
    assert train(*argv, "new", fault="0:7:data:raise").code == 1
    assert steps_in("new") == [6]
    again = trains(*argv, "new")
    assert f"the run in new began at --resume {folder}{path}; resuming from its own newest step" in again.out
    assert again.row["resumed_after"] == 6 and steps_in("new") == [6, 8, 9] and steps_in(folder) == [2, 4]
    assert again.losses == whole.losses[2:]
    trains(*argv, "new")  # done
    other = train(*argv[:1], folder / "step-00000002", *argv[2:], tmp_path / "new")
    fails(other, 4, "already holds step-00000009, but --resume")


@pytest.mark.long
def test_what_cannot_be_removed_costs_a_warning_and_neither_the_run_nor_the_next(trains, folder, monkeypatch):
    argv = "--save", folder, "--keep", 2, "--steps"
    with monkeypatch.context() as patch:  # as on NFS, where another process has a file of it open
        patch.setattr(shutil, "rmtree", mock.Mock(side_effect=OSError(errno.ENOTEMPTY, "Directory not empty", ".nfs1")))
        for steps in (7, 8):
            done = trains(*argv, steps)
            assert "could not be removed completely (Directory not empty: .nfs1)" in done.err, done.err
        assert steps_in(folder) == [7, 8]
        assert len([*folder.glob("tmp-*")]) == 3
        patch.setattr(os, "rename", mock.Mock(side_effect=PermissionError(errno.EPERM, "Operation not permitted")))
        assert not discard(str(folder / "step-00000007"), "tmp")
        assert steps_in(folder) == [7, 8]
    done = trains(*argv, 9)
    assert done.err == "" and steps_in(folder) == [8, 9] and not [*folder.glob("tmp-*")]


def test_how_far_a_run_is_survives_train_state_json_also_one_without_the_newer_entries(folder):
    for state in (TrainState(3, 24), TrainState(3, 24, origin="a", best=0.5), TrainState(3, 24, best=0.0)):
        assert TrainState.from_dict(json.loads(json.dumps(state.as_dict() | dict(world=2)))) == state
    saved = state_of(folder / "step-00000006")
    assert not {"origin", "best"} & saved.keys()
    assert TrainState.from_dict(saved) == TrainState(6, 12, run=saved["run"])
    with pytest.raises(KeyError):
        TrainState.from_dict(dict(step=3))
