"""trainer/checkpoint/export.py: others read the bits that were saved; two ranks and back to two in any layout.

    pytest tests/test_export.py        # no GPU; half a minute on one core; -m slow: peak memory of processes

What is written here is read by the safetensors library and by torch.load. How files are read: tests/test_weights.py.
"""

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import weakref
from contextlib import chdir
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fixtures import outcome
from harness import spawn
from outcomes import fine, refused
from running import ROOT, TINY, one_line
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from saved import assert_bitwise, made, parameters, raw
from torch import nn
from torch.distributed.tensor import DTensor

from trainer import config as flags
from trainer.checkpoint import export, weights
from trainer.checkpoint import load as checkpoint
from trainer.checkpoint.manifest import CheckpointError
from trainer.checkpoint.save import Saver
from trainer.data import Batches
from trainer.distributed.control import Desync
from trainer.distributed.launch import connect
from trainer.parallelize import build
from trainer.step import local

pytestmark = pytest.mark.usefixtures("isolated")


@pytest.fixture
def run(capfd):
    """python -m trainer.checkpoint.export in this process: its exit code and both outputs."""

    def run(*argv):
        def call():
            try:
                return export.main([*map(str, argv)])
            finally:
                assert not dist.is_initialized()

        return outcome(capfd, call)

    return run


def model_of(*argv: str) -> nn.Module:
    """With other weights, on one rank."""
    c = flags.resolve(flags.parse([*TINY, "--seed", "1", *argv]), "cpu", 1)
    if not dist.is_initialized():
        connect(c, 0, 0, 1)
    return build(c, torch.device("cpu"), 1).model


def through_index(index: Path) -> dict[str, torch.Tensor]:
    """As Hugging Face's libraries read several files."""
    state, told = {}, json.loads(index.read_text())
    for file in set(told["weight_map"].values()):
        state |= load_file(index.parent / file)
    assert told["metadata"]["total_size"] == sum(t.nbytes for t in state.values())
    assert told["weight_map"].keys() == state.keys()
    return state


# -------------------------------------------------------------------------------------------------------------- export


def test_the_safetensors_library_reads_what_was_saved(run, saved_run, tmp_path):
    out = tmp_path / "out.safetensors"
    done = fine(run(saved_run, out))
    assert done.err == "" and "16 tensors of " in done.out and "step-00000006" in done.out
    assert_bitwise(load_file(out), parameters(saved_run / "step-00000006"))
    assert [path.name for path in tmp_path.iterdir()] == ["out.safetensors"]
    with safe_open(out, "pt") as file:
        about = file.metadata()
    training = json.loads(about.pop("training"))
    assert about == dict(format="pt", step="6", samples="12", torch=torch.__version__)
    assert training["depth"] == 1 and training["seed"] == 0 and not {"data", "init"} & training.keys()
    assert str(saved_run.parent).encode() not in out.read_bytes()


def test_torch_reads_a_plain_state_dict_with_nothing_but_weights_and_mapped(run, saved_run, tmp_path):
    fine(run(saved_run / "step-00000004", tmp_path / "out.pt"))
    expected = parameters(saved_run / "step-00000004")
    for mmap in (True, False):
        state = torch.load(tmp_path / "out.pt", weights_only=True, mmap=mmap)
        assert type(state) is dict and all(t.device.type == "cpu" for t in state.values())
        assert_bitwise(state, expected)


def test_above_a_size_there_are_several_files_and_an_index(run, saved_run, tmp_path):
    done = run(saved_run, tmp_path / "out.safetensors", "--shard-gb", "20e-6")  # two tensors are larger
    names = [f"out-{i:05d}-of-00005.safetensors" for i in range(1, 6)]
    assert done.code == 0 and "5 files and out.safetensors.index.json" in done.out
    assert sorted(path.name for path in tmp_path.iterdir()) == [*names, "out.safetensors.index.json"]
    for name in names:
        sizes = [t.nbytes for t in load_file(tmp_path / name).values()]
        assert sum(sizes) <= 20_000 or len(sizes) == 1
    expected = parameters(saved_run / "step-00000006")
    assert_bitwise(through_index(tmp_path / "out.safetensors.index.json"), expected)
    for path in ("out.safetensors", "out.safetensors.index.json"):
        model = model_of()
        weights.load_weights(str(tmp_path / path), model)
        assert_bitwise({name: local(t) for name, t in model.state_dict().items()}, expected)


def test_bf16_is_rounded_and_says_so(run, saved_run, tmp_path):
    fine(run(saved_run, tmp_path / "out.safetensors", "--dtype", "bf16"))
    expected = parameters(saved_run / "step-00000006")
    assert_bitwise(load_file(tmp_path / "out.safetensors"), {name: t.bfloat16() for name, t in expected.items()})


def test_a_damaged_step_is_passed_over_said_and_never_exported(run, folder, tmp_path):
    os.truncate(folder / "step-00000006/__0_0.distcp", 1000)
    done = fine(run(folder, tmp_path / "out.safetensors"))
    assert "step-00000006/__0_0.distcp: " in done.out and "going back to" in done.out
    assert_bitwise(load_file(tmp_path / "out.safetensors"), parameters(folder / "step-00000004"))
    refused(4, "__0_0.distcp: 1000 bytes", run(folder / "step-00000006", tmp_path / "bad.safetensors"))
    assert not (tmp_path / "bad.safetensors").exists()


def test_a_step_that_its_run_removes_meanwhile_is_told(run, folder, tmp_path, monkeypatch):
    read = checkpoint.read
    monkeypatch.setattr(checkpoint, "read", lambda *args: (shutil.rmtree(folder, ignore_errors=True), read(*args))[1])
    refused(4, "step-00000006: was deleted meanwhile, as --keep", run(folder, tmp_path / "out.safetensors"))


@pytest.mark.parametrize("where", ["absent", "", "step-00000009"])
def test_where_there_is_no_checkpoint_the_exit_code_is_4(where, run, tmp_path):
    refused(4, str(tmp_path / where), run(tmp_path / where, tmp_path / "out.pt"))


OUTPUTS = {"out.bin": "must end in", "absent/out.pt": "absent is not a directory",
           "file/out.pt": "file is not a directory",
           "folder.pt": "is a directory", "there.pt": "already exists; add --overwrite"}  # fmt: skip


@pytest.mark.parametrize("name", OUTPUTS)
def test_an_output_that_cannot_be_exits_2_before_anything_is_read(name, run, tmp_path, monkeypatch):
    (tmp_path / "file").touch(), (tmp_path / "folder.pt").mkdir(), (tmp_path / "there.pt").write_text("mine")
    monkeypatch.setattr(checkpoint, "find", lambda _: pytest.fail("a checkpoint was looked for"))
    done = run(tmp_path, tmp_path / name)
    assert done.code == 2 and OUTPUTS[name] in one_line(done.err) and str(tmp_path / name) in done.err
    assert (tmp_path / "there.pt").read_text() == "mine"


def test_overwrite_leaves_the_files_of_one_export(run, saved_run, tmp_path):
    out, several = tmp_path / "out.safetensors", ("--shard-gb", "20e-6")
    (tmp_path / "out-00001-of-00005.safetensors").touch()  # an earlier one's
    assert run(saved_run, out).code == 2
    (tmp_path / "outer.safetensors").touch(), (tmp_path / "out-1.safetensors").touch()  # others'
    for argv, files in (((), 1), (several, 6), (("--shard-gb", "40e-6"), 4), ((), 1)):
        fine(run(saved_run, out, *argv, "--overwrite"))
        assert len([*tmp_path.iterdir()]) == files + 2, argv
        assert weights.table(str(out)).keys() == weights.table(str(out)).keys() and run(saved_run, out).code == 2
    assert_bitwise(load_file(out), parameters(saved_run / "step-00000006"))


FULL = "disk full: needs 0.1 MiB, has 0.0 MiB", "File too large|saving failed, perhaps because the disk is full"


@pytest.mark.parametrize("name", ["out.safetensors", "out.pt"])
@pytest.mark.parametrize("text", FULL)
def test_a_full_disk_exits_4_and_leaves_the_old_file(text, name, run, saved_run, tmp_path, monkeypatch):
    (tmp_path / name).write_text("old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        if text == FULL[0]:
            monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 1000))
        else:
            resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
        done = run(saved_run, tmp_path / name, "--overwrite")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert done.code == 4 and re.search(text, one_line(done.err)) and str(tmp_path / name) in done.err
    assert [path.name for path in tmp_path.iterdir()] == [name] and (tmp_path / name).read_text() == "old"


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_export_leaves_nothing_and_nothing_has_the_final_name_before_its_end(
    kind, run, saved_run, tmp_path, monkeypatch
):
    seen, read = [], checkpoint.read

    def slow(found, name):
        seen.append([(path.name.partition(".tmp-")[1], (path / "lock").exists()) for path in tmp_path.iterdir()])
        if name == "blocks.0.mlp.up.weight":
            os.kill(os.getpid(), kind)
        return read(found, name)

    monkeypatch.setattr(checkpoint, "read", slow)
    done = run(saved_run, tmp_path / "out.safetensors")
    assert done.code == 128 + kind, done.err
    assert f"stopped by {kind.name}; {tmp_path}/out.safetensors was not written" in one_line(done.err)
    assert 5 < len(seen) < 16 and all(each == [(".tmp-", True)] for each in seen) and not [*tmp_path.iterdir()]


def test_a_signal_among_the_renames_comes_too_late(run, saved_run, tmp_path, monkeypatch):
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda *args: (os.kill(os.getpid(), signal.SIGTERM), replace(*args)))
    fine(run(saved_run, tmp_path / "out.safetensors", "--shard-gb", "20e-6"))
    assert_bitwise(through_index(tmp_path / "out.safetensors.index.json"), parameters(saved_run / "step-00000006"))


def test_what_a_killed_export_left_is_removed_by_the_next_and_nothing_else_is(run, saved_run, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "read", lambda *_: os._exit(9))  # as kill -9
    if (child := os.fork()) == 0:
        export.main([str(saved_run), str(tmp_path / "out.pt")])
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    monkeypatch.undo()
    (left,) = tmp_path.iterdir()
    assert re.fullmatch(r"out\.pt\.tmp-[0-9a-f]{8}", left.name)
    keep = {"my-out.pt.tmp-00000000", "out.pt.tmp-mine", "out.pt.tmp-12345678"}
    for name in keep:
        (tmp_path / name).mkdir()
    (tmp_path / "out.pt.tmp-12345678/lock").write_text('{"pid": 1, "machine": "another"}')  # a sign of life
    done = fine(run(saved_run, tmp_path / "out.pt"))
    assert f"removed {left.name}, which an export" in done.out
    assert {path.name for path in tmp_path.iterdir()} == keep | {"out.pt"}


def test_a_bad_size_is_refused(run):
    for size in ("0", "-1", "nan", "x"):
        assert run("a", "b.safetensors", "--shard-gb", size).code == 2


# ----------------------------------------------------------------------------------------------------------- two ranks

LAYOUTS = ["", "--mode hybrid_shard", "--mode replicate", "--wrapper fsdp2", "--wrapper ddp", "--min-shard-mib 0.01"]
FORMS = {"one": "out.safetensors", "several": "cut.safetensors", "pt": "out.pt"}


def whole(model) -> dict[str, bytes]:
    state = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in model.state_dict().items()}
    return {n: raw(t) for n, t in state.items()}


def save_and_export(mesh):
    """Both ranks read all of it, and write files of their own."""
    folder = os.environ["EXPORTS"]
    c, step, batches = made(2, "--batch", 2, "--save", f"{folder}/run")
    os.makedirs(c.save, exist_ok=True)
    for _ in range(2):
        step(*next(batches))
    Saver(c, step, batches).save(2)
    found = checkpoint.find(c.save)
    os.mkdir(f"{folder}/{dist.get_rank()}")
    for form, name in FORMS.items():
        how = dict(shard_bytes=30_000) if form == "several" else {}
        path = f"{folder}/{dist.get_rank()}/{name}"
        weights.write(path, checkpoint.parameters(found), lambda name: checkpoint.read(found, name), {}, **how)
    return whole(step.model)


def init_every_layout(mesh):
    """What each layout then holds, and of each the bytes that this rank read and those that it holds."""
    states, read, real = {}, [], weights.Region.read

    def counting(*args):
        part = real(*args)
        read.append(part.nbytes)
        return part

    # Comparing the files between ranks reads the first bytes of each tensor in the same way: that is not counted.
    with mock.patch.object(weights.Region, "read", counting), mock.patch.object(weights, "glimpse", str):
        for layout in LAYOUTS:
            _, step, _ = made(2, "--batch", 2, *layout.split(), "--seed", 1)
            held = sum(local(t).nbytes for t in step.model.state_dict().values())
            for form, name in FORMS.items():
                with torch.no_grad():
                    for p in step.model.parameters():
                        local(p).zero_()
                read.clear()
                c = SimpleNamespace(init=f"{os.environ['EXPORTS']}/0/{name}", cast=False)
                weights.initialise(c, step.model, None)
                states[layout, form] = whole(step.model), sum(read), held
    return states


def refuse_on_both(mesh):
    """What both ranks raise where only rank 1 reads what is not finite."""
    _, step, _ = made(2, "--batch", 2)
    state = load_file(f"{os.environ['EXPORTS']}/0/out.safetensors")
    state["emb.weight"][200, 3] = float("nan")
    path = f"{os.environ['EXPORTS']}/{dist.get_rank()}-nan.safetensors"
    save_file(state, path)
    try:
        weights.initialise(SimpleNamespace(init=path, cast=False), step.model, None)
    except CheckpointError as e:
        return str(e)


def see_different_files(mesh):
    """What both ranks raise where rank 1 has a file that differs in one tensor under the same name; and none."""
    _, step, _ = made(2, "--batch", 2)
    rank, told = dist.get_rank(), []
    with chdir(f"{os.environ['EXPORTS']}/{rank}"):
        state = load_file("out.safetensors")
        save_file(state | {"norm.bias": state["norm.bias"] + rank}, "other.safetensors")
        if rank == 0:
            save_file(state, "absent.safetensors")
        for name in ("other.safetensors", "absent.safetensors"):
            try:
                c = SimpleNamespace(init=name, cast=False)
                weights.initialise(c, step.model, None, dist.group.WORLD)
            except Desync as e:
                told.append(str(e))
    return told


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    with mock.patch.dict(os.environ, EXPORTS=str(folder)):
        return folder, spawn(2, [save_and_export, init_every_layout, refuse_on_both, see_different_files])


@pytest.mark.long
def test_every_layout_of_two_ranks_has_the_same_bits_and_each_rank_reads_its_own_rows(two_ranks):
    folder, results = two_ranks
    for expected, states in zip(results["save_and_export"], results["init_every_layout"], strict=True):
        assert len(states) == len(LAYOUTS) * len(FORMS) and len(expected) == 16
        for (layout, form), (state, read, held) in states.items():
            assert state == expected and read == held, (layout, form, read, held)
        sizes = {layout: held for (layout, _), (_, _, held) in states.items()}
        assert sizes[""] == sizes["--wrapper fsdp2"] < 0.51 * sizes["--mode replicate"]
        assert sizes[""] < sizes["--min-shard-mib 0.01"] < sizes["--mode replicate"]
    told = f"{folder}/1-nan.safetensors: emb.weight has values that are not finite in float32"
    assert results["refuse_on_both"] == [told] * 2


@pytest.mark.long
def test_ranks_that_see_different_files_are_told_which_rank_sees_what(two_ranks):
    told, same = two_ranks[1]["see_different_files"]
    other, absent = told
    assert same == told
    assert re.search(r"in --init other.safetensors: rank 0 has (16 tensors of \d+ bytes), CRC-32 (\w{8}), rank 1 \1, "
                     r"CRC-32 (?!\2)\w{8};", other), other  # fmt: skip
    assert "CRC-32" in absent and "rank 1 nothing (absent.safetensors: No such file or directory);" in absent


@pytest.mark.long
def test_one_rank_exports_and_starts_from_what_two_saved(two_ranks, run, tmp_path):
    folder, results = two_ranks
    fine(run(folder / "run", tmp_path / "out.safetensors"))
    assert_bitwise(load_file(tmp_path / "out.safetensors"), load_file(folder / "1/out.safetensors"))
    for argv in ("", "--mode replicate", "--mode hybrid_shard --replicas 1", "--wrapper none", "--wrapper fsdp2"):
        for form in FORMS.values():
            model = model_of("--vocab", "257", *argv.split())
            weights.load_weights(f"{folder}/0/{form}", model)
            assert whole(model) == results["save_and_export"][0], (argv, form)


# -------------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize(("name", "limit"), [("out.safetensors", 40_000), ("out.pt", 0)])
def test_the_tensors_of_one_file_are_in_memory_and_of_a_pt_and_in_loading_one_tensor(
    name, limit, run, saved_run, tmp_path, monkeypatch
):
    alive, most = weakref.WeakSet(), []

    def tracked(real, limit):
        def read(*args):
            assert sum(t.nbytes for t in alive) <= limit, "tensors before are still there"
            t = real(*args)
            alive.add(t)
            most.append(t.nbytes)
            return t

        return read

    monkeypatch.setattr(checkpoint, "read", tracked(checkpoint.read, limit))
    monkeypatch.setattr(weights.Region, "read", tracked(weights.Region.read, 0))
    several = ["--shard-gb", f"{limit / 1e9}"] if limit else []
    assert run(saved_run, tmp_path / name, *several).code == 0 and len(most) == 16
    weights.load_weights(str(tmp_path / name), model_of())
    assert len(most) == 32 and sum(most) == 2 * 112_000 and max(most) < 40_000


MEASURED = """
import sys, torch
from trainer import config
from trainer.checkpoint import export, weights
from trainer.parallelize import build
from trainer.measuring import memory
device = torch.device("cpu")
small, big, what = sys.argv[1:4]
weights.MAPPED = 4 * 2**20
if what == "load":
    c = config.resolve(config.parse(sys.argv[4:]), "cpu", 1)
    model = build(c, device, 1).model
    work = lambda path: weights.load_weights(path, model)
else:
    several = ["--shard-gb", "0.01"] * (what == "safetensors")
    work = lambda path: export.main([path, f"{path}-{what}.{what}", *several])
    work(small)
before = memory.reset_peak(device) or memory.peak(device)["peak_rss_mib"]
work(big)
print(memory.peak(device)["peak_rss_mib"] - before)
"""


@pytest.mark.slow
def test_peak_memory_of_a_process_is_far_below_the_model(saved_run, tmp_path):
    """96 MiB in tensors of 1 MiB: export holds 32 MiB to verify and files of 10 MB, of a .pt one tensor; loading holds
    one tensor, and as much of a mapped file as weights.MAPPED (here 4 MiB), beside the model."""
    big = "--compile none --depth 36 --width 256 --head-dim 32 --seqlen 16 --wrapper none".split()
    c = flags.resolve(flags.parse([*big, "--save", str(tmp_path / "big")]), "cpu", 1)
    connect(c, 0, 0, 1)
    os.mkdir(tmp_path / "big")
    step = build(c, torch.device("cpu"), 1)
    batches = Batches("random", global_batch=4, seqlen=16, vocab=256, seed=0, rank=0, world=1)
    next(batches)
    Saver(c, step, batches).save(1)
    size = sum(p.nbytes for p in step.model.parameters()) / 2**20
    grown = {}
    for what, path in (("safetensors", "big"), ("pt", "big"), ("load", "big-safetensors.safetensors"),
                       ("load", "big-pt.pt")):  # fmt: skip
        shutil.copytree(saved_run, tmp_path / "small", dirs_exist_ok=True)
        argv = [sys.executable, "-c", MEASURED, str(tmp_path / "small"), str(tmp_path / path), what, *big]
        done = subprocess.run(argv, capture_output=True, text=True, cwd=ROOT, timeout=120)
        assert done.returncode == 0, done.stderr
        grown[what, path] = float(done.stdout.split()[-1])
    print(f"\n{size:.1f} MiB: {grown}")
    assert size > 90 and max(mib for (what, _), mib in grown.items() if what != "load") < 45
    # 8.7 to 10.3 were seen on three machines: the rest is what the allocator keeps.
    assert max(mib for (what, _), mib in grown.items() if what == "load") < 16
