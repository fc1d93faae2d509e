"""What --profile leaves can be read: a trace has the phases of a step as ranges, and in them, where the model is not
compiled, its units by name; unprofiled steps have none.

    pytest tests/test_trace.py                  # about 15 s; one process, ranks are simulated
    pytest tests/test_trace.py -m slow          # compiled by Inductor
"""

import gzip
import json
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from trainer.measuring import timing

pytestmark = pytest.mark.usefixtures("isolated")
PHASES = {"forward", "backward", "gradient reduction", "optimizer"}
BLOCKS = {"blocks.0", "blocks.1"}


def nested(path, number):
    """[(name of a range, .., name of the one inside)] of a step in a trace, in order; only ranges named by us."""
    events = json.loads(gzip.open(path).read())["traceEvents"]
    events = [e for e in events if e.get("ph") == "X" and e.get("cat") == "user_annotation"]
    assert {e["name"] for e in events if e["name"].startswith("step ")} == {"step 3", "step 4", "step 5"}
    (step,) = (e for e in events if e["name"] == f"step {number}")
    events = [e for e in events if e["name"] in PHASES | BLOCKS]
    events.sort(key=lambda e: (e["ts"], -e["dur"]))
    found = []
    open_ = []
    for e in events:
        if step["ts"] < e["ts"] < step["ts"] + step["dur"]:
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
        trace = tmp_path / "traces/rank0.trace.json.gz"
        assert str(trace) in done.out
        assert "memory snapshot: it needs CUDA" in done.out
        return nested(trace, 5)

    return run


STEP = [
    ("forward",), ("forward", "blocks.0"), ("forward", "blocks.1"),
    ("backward",), ("backward", "blocks.1"), ("backward", "blocks.0"), ("optimizer",),
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("argv", [["--world", 4], ["--remat", "block"], ["--wrapper", "fsdp2"], ["--wrapper", "ddp"],
                                  ["--wrapper", "none"]], ids=str)  # fmt: skip
def test_an_eager_step_has_phases_and_in_them_units(traced, argv):
    assert traced(*argv) == STEP


@pytest.mark.long
def test_micro_batches_are_ranges_one_after_the_other(traced):
    assert traced("--grad-accum", 2, "--batch", 1) == STEP[:-1] * 2 + STEP[-1:]


@pytest.mark.long
def test_what_is_left_to_the_end_of_the_step_is_a_phase(traced):
    found = traced("--world", 4, "--grad-accum", 2, "--batch", 1, "--accum-sync", "last")
    assert found == STEP[:-1] * 2 + [("gradient reduction",), ("optimizer",)]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.down(self.up(x).tanh())


def test_a_unit_that_is_computed_again_is_a_range_inside_its_backward(monkeypatch):
    """Checkpointed from outside, as transformers does it: the recomputation ends by an exception in the unit."""
    model = nn.ModuleDict(dict(blocks=nn.ModuleList([Block(), Block()])))
    step = SimpleNamespace(model=model, watch_phases=nullcontext)
    open_, found = [], []

    @contextmanager
    def recorded(name):
        open_.append(name)
        found.append(tuple(open_))
        yield
        assert open_.pop() == name

    monkeypatch.setattr(timing, "record_function", recorded)
    x = torch.ones(3, 4, requires_grad=True)
    with timing.named_ranges(step, units=True):
        for unit in step.model.blocks:
            x = checkpoint(unit, x, use_reentrant=False)
        x.sum().backward()
        one, two = "blocks.0", "blocks.1"
        assert found == [(one,), (two,), (two,), (two, two), (one,), (one, one)]
        assert not open_


@pytest.mark.long
def test_only_profiled_steps_have_ranges_and_none_is_left(trains, tmp_path, monkeypatch):
    seen = []
    steps = []
    models = []
    plain = timing.record_function
    monkeypatch.setattr(timing, "record_function", lambda name: (seen.append((len(steps), name)), plain(name))[1])
    units_of = timing.simple_fsdp.units_of
    monkeypatch.setattr(timing.simple_fsdp, "units_of", lambda model: (models.append(model), units_of(model))[1])
    step = timing.StepTimer.step
    counted = lambda timer, excluded: (steps.append(excluded), step(timer, excluded))[1]  # noqa: E731
    monkeypatch.setattr(timing.StepTimer, "step", counted)
    trains("--steps", 8)
    assert not seen
    steps.clear()
    trains("--steps", 8, "--profile", tmp_path / "traces")
    assert {number for number, _ in seen} == {4, 5, 6}
    assert {name for _, name in seen} >= {"forward", "backward", "optimizer", "blocks.0"}
    assert steps == [True] * 6 + [False] * 2
    assert models
    assert not any(m._forward_hooks or m._forward_pre_hooks for model in models for m in model.modules())


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fwdbwd", "blocks"])
def test_a_compiled_step_has_phases_and_is_not_compiled_again(traced, mode):
    found = traced("--world", 4, "--compile", mode)
    counted = torch._dynamo.utils.counters
    assert not counted["graph_break"]
    assert counted["stats"]["unique_graphs"] == (1 if mode == "fwdbwd" else 2)  # one of all blocks, one of the loss
    assert found == [("forward",), ("backward",), ("optimizer",)]
