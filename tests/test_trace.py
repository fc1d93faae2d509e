"""What --profile leaves can be read: a trace has forward, backward and optimizer as ranges, in them the model's blocks
by name, in these collectives with the names of the blocks whose parameters they move; unprofiled steps have none.

    pytest tests/test_trace.py                  # about 15 s; one process, ranks are simulated
    pytest tests/test_trace.py -m slow          # compiled by Inductor: about 90 s of CPU
"""

import gzip
import json

import pytest
import torch
from torch._inductor.codecache import PyCodeCache
from torch._inductor.graph import GraphLowering

import simple_fsdp
from trainer.measuring import timing

pytestmark = pytest.mark.usefixtures("isolated")
PLAIN = GraphLowering.compile_to_module, simple_fsdp._all_gather, simple_fsdp._reduce


def nested(path, number):
    """{(name of a range, .., name of the one inside)} of a step in a trace, without the ranges of DDP's module."""
    events = json.loads(gzip.open(path).read())["traceEvents"]
    events = [e for e in events if e.get("ph") == "X" and e.get("cat") == "user_annotation"]
    events = [e for e in events if not e["name"].startswith("DistributedDataParallel")]
    assert {e["name"] for e in events if e["name"].startswith("step ")} == {"step 3", "step 4", "step 5"}
    events.sort(key=lambda e: (e["ts"], -e["dur"]))
    (step,) = (e for e in events if e["name"] == f"step {number}")
    found = []
    open_ = []
    for e in events:  # gloo's own thread has ranges too, which nest in nothing
        if e["tid"] == step["tid"] and step["ts"] < e["ts"] < step["ts"] + step["dur"]:
            open_ = [each for each in open_ if e["ts"] + e["dur"] <= each["ts"] + each["dur"]]
            open_.append(e)
            found.append(tuple(each["name"] for each in open_))
    return found


@pytest.fixture
def traced(train, tmp_path):
    """A run of 9 steps, of which it profiles three: what its trace holds of the last of these."""

    def run(*argv):
        torch._dynamo.utils.counters.clear()
        done = train("--profile", tmp_path / "traces", "--depth", 2, "--steps", 9, *argv)
        assert done.code == 0 and done.row["n"] == 3, done.err  # neither warm-up nor what is profiled is timed
        assert (GraphLowering.compile_to_module, simple_fsdp._all_gather, simple_fsdp._reduce) == PLAIN
        assert timing.TAG not in torch.compiler.config.cache_key_tag
        trace = tmp_path / "traces/rank0.trace.json.gz"
        assert str(trace) in done.out
        assert "memory snapshot: it needs CUDA" in done.out
        return nested(trace, 5)

    return run


def assert_named(found, places=("emb", "blocks.0", "blocks.1", "norm", "head")):
    for place in places:
        assert ("forward", place) in found, place
    for phase in ("forward", "backward"):
        blocks = [names[1] for names in found if names[0] == phase and len(names) == 2 and names[1].startswith("block")]
        assert [*dict.fromkeys(blocks)] == sorted({*blocks}, reverse=phase == "backward") == (
            ["blocks.0", "blocks.1"] if phase == "forward" else ["blocks.1", "blocks.0"])  # fmt: skip
    assert ("optimizer",) in found


def named(found, phase, what):
    """What follows `what` in the names of the collectives of a phase."""
    ends = [names[-1] for names in found if names[0] == phase]
    return {name.removeprefix(what).strip() for name in ends if name.startswith(what)}


def test_an_eager_step_names_phases_blocks_and_collectives(traced):
    found = traced("--world", 4)
    assert_named(found)
    begun = [(*names[:2], names[2]) for names in found if len(names) == 4]
    # A gather begins in the module before; where that is small, so does the next one's. A reduction runs meanwhile.
    assert begun == [
        ("forward", "emb", "all-gather emb"), ("forward", "emb", "all-gather blocks.0"),
        ("forward", "blocks.0", "all-gather blocks.1"), ("forward", "blocks.1", "all-gather norm"),
        ("forward", "blocks.1", "all-gather head"),
        ("backward", "head", "all-gather head"), ("backward", "head", "all-gather norm"),
        ("backward", "head", "all-gather blocks.1"), ("backward", "head", "reduce head"),
        ("backward", "norm", "reduce norm"), ("backward", "blocks.1", "all-gather blocks.0"),
        ("backward", "blocks.1", "reduce blocks.1"), ("backward", "blocks.0", "reduce blocks.0"),
        ("backward", "emb", "reduce emb"),
    ]  # fmt: skip
    waits = [names for names in found if len(names) == 3 and (*names, "sim::reduce_scatter[4]") not in found]
    assert ("backward", "blocks.0", "reduce blocks.1") in waits
    assert ("backward", "emb", "reduce blocks.0") in waits
    assert named(found, "forward", "all-gather") == {"emb", "norm", "blocks.0", "blocks.1", "head"}


@pytest.mark.parametrize("argv", [["--remat", "block"], ["--wrapper", "fsdp2"], ["--wrapper", "ddp"],
                                  ["--wrapper", "none"], ["--grad-accum", 2, "--batch", 1]], ids=str)  # fmt: skip
def test_other_eager_steps_are_named_too(traced, argv):
    assert_named(traced(*argv))


def test_only_profiled_steps_have_ranges_and_none_is_left(trains, tmp_path, monkeypatch):
    seen = []
    steps = []
    call = timing.Track.to
    monkeypatch.setattr(timing.Track, "to", lambda track, *args: (seen.append(len(steps)), call(track, *args))[1])
    plain = timing.StepTimer.step
    counted = lambda timer, excluded: (steps.append(excluded), plain(timer, excluded))[1]  # noqa: E731
    monkeypatch.setattr(timing.StepTimer, "step", counted)
    trains("--steps", 8)
    assert not seen
    steps.clear()
    trains("--steps", 8, "--profile", tmp_path / "traces")
    assert {*seen} == {4, 5, 6}
    assert steps == [True] * 6 + [False] * 2


def test_lines_of_generated_code_stand_in_ranges_of_their_buffers():
    import ast

    noted = {"buf0": ["blocks.0", ""], "buf1": ["", "all-gather blocks.1"], "buf3": ["blocks.1", ""]}
    code = """
buf0 = empty_strided_cpu((4,), (1,), torch.float32)
extern_kernels.mm(a, b, out=buf0)
with device:
    buf1 = torch.ops._c10d_functional.all_gather_into_tensor.default(buf0, 4, '0')
    assert_size_stride(buf1, (8,), (1,), 'torch.ops._c10d_functional.all_gather_into_tensor.default')
    torch.ops._c10d_functional.wait_tensor.default(buf1)
    cpp_fused_1(buf0, buf3)
    del buf0
return (buf3,)
"""
    lines = ast.unparse(ast.Module(timing._with_ranges(ast.parse(code).body, noted), [])).splitlines()
    assert [line.strip() for line in lines if "_track" in line] == [
        "_track.to(1, 'blocks.0')", "_track.to(2, 'all-gather blocks.1')", "_track.to(2, None)",
        "_track.to(2, 'wait for all-gather blocks.1')", "_track.to(2, None)", "_track.to(1, 'blocks.1')",
        "_track.to(1, None)"]  # fmt: skip
    assert [line for line in lines if "_track" not in line] == ast.unparse(ast.parse(code)).splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fwdbwd", "blocks"])
def test_a_compiled_step_names_phases_blocks_and_collectives(traced, mode):
    found = traced("--world", 4, "--compile", mode)
    counted = torch._dynamo.utils.counters
    graphs = 1 if mode == "fwdbwd" else 2  # one of all blocks, one of the loss: names cost no graph of their own
    assert not counted["graph_break"]
    assert counted["stats"]["unique_graphs"] == graphs
    assert_named(found, ("blocks.0", "blocks.1", "head"))  # the compiler has fused the embedding with what follows
    if mode == "blocks":
        assert {("forward", "blocks.0"), ("backward", "blocks.1")} <= {names[:2] for names in found}
        return
    for phase in ("forward", "backward"):
        gathered = named(found, phase, "all-gather")
        assert {"blocks.0", "blocks.1"} < gathered
        assert named(found, phase, "wait for all-gather") == gathered
        assert any(names[-2].startswith("all-gather blocks.1") and names[-1] == "sim::all_gather[4]"
                   for names in found if names[0] == phase and len(names) > 1)  # fmt: skip
    reduced = named(found, "backward", "reduce-scatter")
    assert {"blocks.0", "blocks.1"} < reduced
    assert named(found, "backward", "wait for reduce-scatter") == reduced
    # The code that runs elsewhere is what Inductor has generated.
    own = [type(m.runner).call.__code__ for m in PyCodeCache.modules if hasattr(m, "runner")]
    assert own
    assert not any("_track" in code.co_names for code in own)
