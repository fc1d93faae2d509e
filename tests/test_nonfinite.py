"""A loss or gradient that is not finite: no rank updates anything, in every mode; the run stops or goes on as asked.

    pytest tests/test_nonfinite.py        # no GPU; about a minute on one core
"""

import itertools
import math
import re
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import ONE_GRAPH, spawn
from running import TINY, fails, on_gpu, resolved
from test_checkpoint import assert_bitwise, contents, steps_in

import main
from model import IGNORE
from trainer.data import Batches
from trainer.distributed.launch import connect
from trainer.fault_tolerance.nonfinite import SETTLED, WINDOW, FiniteCheck, NonFinite
from trainer.optimizer import AdamW, local
from trainer.parallelize import build
from trainer.step import CudaGraphStep, Step

pytestmark = pytest.mark.usefixtures("isolated")
NAN = math.nan
INF = math.inf

# ------------------------------------------------------------------------------------------------------------ the step

PLAIN = Step.micro_batch_loss


def poisoned(self, tokens, targets, share):  # compiled with the rest: `poison` is an input of the graph
    return PLAIN(self, tokens, targets, share) * self.poison[0] + self.poison[1]


@pytest.fixture
def poison(monkeypatch):
    """Every step's loss times poison[0], which also spoils gradients, plus poison[1], which does not."""
    monkeypatch.setattr(Step, "micro_batch_loss", poisoned)


def made(argv, world=1, device="cpu"):
    """A step of flags, what runs it, and its batches."""
    c = resolved([*TINY, "--device", device, *argv.split()], world, device)
    if not dist.is_initialized():
        connect(c, 0, 0, 1)
    step = build(c, torch.device(device), world, compiled_update=True if c.compile == "fwdbwd" else None)
    step.poison = torch.tensor([1.0, 0.0], device=device)
    run = CudaGraphStep(step) if c.cuda_graph else step
    rank = dist.get_rank()
    count = world * c.batch * c.grad_accum
    batches = Batches("random", global_batch=count, seqlen=c.seqlen, vocab=c.vocab, seed=0, rank=rank, world=world)
    return step, run, ([t.to(device) for t in batch] for batch in batches)


def tensors(step):
    shards = [local(p.detach()) for p in step.optimizer.params]
    return [*shards, *(t for *_, t in step.optimizer.moments()), step.optimizer.t]


def state(step):
    """Parameters, moments and step count, to the bit: -0.0 is not 0.0."""
    return [t.reshape(-1).view(torch.uint8).cpu().numpy().tobytes() for t in tensors(step)]


def plant_zeros(step):
    """Negative ones, as a bf16 checkpoint may have them."""
    first = [t for kind, _, t in step.optimizer.moments() if kind == "m"]
    for t in (*tensors(step)[: len(step.optimizer.params)], *first):
        t.reshape(-1)[0] = -0.0


def refused(argv, bad, world=1, on=0, device="cpu"):
    """Bad, good, bad, good: what each step told, whether it left all as it was, and whether all is in the end as after
    the good steps alone."""
    step, run, batches = made(argv, world, device)
    start = [t.clone() for t in tensors(step)]
    first = next(batches)
    second = next(batches)
    told = []
    same = []
    for poison, batch in (((bad, 0.0), second), ((1.0, 0.0), first), ((1.0, bad), second), ((1.0, 0.0), second)):
        plant_zeros(step)
        before = state(step)
        step.poison.copy_(torch.tensor(poison if dist.get_rank() == on else (1.0, 0.0)))
        loss = run(*batch)
        told.append((loss.item(), step.grad_norm.item(), step.skipped.item()))
        same.append(state(step) == before)
    after = state(step)
    for t, value in zip(tensors(step), start, strict=True):
        t.copy_(value)
    for batch in (first, second):
        plant_zeros(step)
        run(*batch)
    return told, same, after == state(step)


def assert_refused(result):
    told, same, as_without = result
    assert [bad for *_, bad in told] == [1, 0, 1, 0]
    assert [math.isfinite(loss) for loss, _, _ in told] == [False, True, False, True]
    assert [math.isfinite(norm) for _, norm, _ in told] == [False, True, True, True]
    assert same == [True, False, True, False], "what a refused step left is not what was there"
    assert as_without, "the steps after it are not those of a run without it"


SETTINGS = {
    "eager": "--compile none", "no clip": "--compile none --clip 0",
    "no wrapper": "--compile none --wrapper none --param-dtype fp32",
    "bf16 moments": "--compile none --adam-dtype bf16", "bf16": "--compile none --param-dtype bf16 --adam-dtype bf16",
    "fsdp2": "--compile none --wrapper fsdp2", "ddp": "--compile none --wrapper ddp",
    "accumulated": "--compile none --grad-accum 2",
    "accumulated last": "--compile none --grad-accum 2 --accum-sync last",
    "muon": "--compile none --optimizer muon", "bf16 muon": "--compile none --optimizer muon --adam-dtype bf16",
}  # fmt: skip
COMPILED = [
    "--compile blocks", "--compile fwdbwd --adam-dtype bf16", pytest.param("--compile step", marks=ONE_GRAPH),
    "--compile fwdbwd --grad-accum 2 --accum-sync last", "--compile fwdbwd --optimizer muon",
]  # fmt: skip


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_step_that_is_not_finite_changes_no_bit_and_the_next_trains_on(setting, poison):
    assert_refused(refused(SETTINGS[setting], INF if setting == "eager" else NAN))


@pytest.mark.long
@ONE_GRAPH
def test_so_does_a_step_of_one_graph_which_is_compiled_once(poison, monkeypatch):
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, options=None, **how: real(f, backend="aot_eager", **how))
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert_refused(refused("--compile step", NAN))


@pytest.mark.slow
@pytest.mark.parametrize("argv", COMPILED)
def test_so_does_every_compiled_step(argv, poison):
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert_refused(refused(argv, NAN))


@on_gpu
@pytest.mark.parametrize("argv", [*SETTINGS.values(), *COMPILED, "--compile fwdbwd --cuda-graph"])
def test_so_does_a_gpu(argv, poison):
    told, same, _ = refused(argv, NAN, device="cuda")  # its sums are not always in one order
    assert_refused((told, same, True))


@pytest.mark.parametrize(("loss", "norm", "limit", "bad"), [
    (1.0, 2.0, 0.0, 0), (NAN, 2.0, 0.0, 1), (1.0, NAN, 0.0, 1), (INF, 2.0, 0.0, 1), (1.0, INF, 0.0, 1),
    (-INF, INF, 0.0, 1), (1.0, 2.0, 2.0, 0), (1.0, 2.1, 2.0, 1), (1.0, NAN, 2.0, 1), (NAN, 1.0, 2.0, 1),
    (0.0, 0.0, 0.0, 1),
])  # fmt: skip
def test_loss_and_norm_decide_together_and_the_limit_of_the_norm_with_them(loss, norm, limit, bad):
    step = Step(torch.nn.Identity(), AdamW([torch.nn.Parameter(torch.ones(2))], 0.1), norm_limit=limit)
    told = step.skip_update(torch.tensor(loss), torch.tensor(norm))
    assert told.dtype == torch.float32
    assert told.item() == bad


def test_a_batch_without_labels_is_left_out_with_a_line_and_the_run_goes_on(poison, capsys):
    step, _, batches = made("--compile none")
    before = state(step)
    tokens, targets = next(batches)
    loss = step(tokens, torch.full_like(targets, IGNORE))
    assert (loss, step.grad_norm, step.skipped) == (0, 0, 1)
    assert state(step) == before
    check = checking("--nonfinite stop")
    check.put(4, step, loss)
    assert "step 4: gradient norm 0, as of a batch without labels, samples 0-7: update left" in capsys.readouterr().out
    assert check.skipped == 1
    assert check.in_a_row == 0


def test_the_decision_costs_no_collective(train):
    done = train("--world", 2, "--link", "none")
    assert done.row["collectives"]["all_reduce"]["n"] == 3  # labels, loss, norm
    gradients = done.row["collectives"]["reduce_scatter"]["n"]
    done = train("--world", 2, "--link", "none", "--mode", "replicate")
    assert done.row["collectives"]["all_reduce"]["n"] == gradients + 3


# ----------------------------------------------------------------------------------------------------------- two ranks

RANKS = [f"--compile none {argv}" for argv in (
    "--adam-dtype bf16", "--wrapper fsdp2", "--wrapper ddp", "--mode replicate --grad-accum 2 --accum-sync last",
    "--mode hybrid_shard --min-shard-mib 0.001", "--optimizer muon")]  # fmt: skip


def nan_on_rank_1(mesh):
    Step.micro_batch_loss = poisoned
    return {argv: refused(argv, NAN, world=2, on=1) for argv in RANKS}


APART = {"--clip 0.1": (0.5, 0.6), "--norm-limit 1": (0.9, 1.1), "": (1.0, NAN), "--clip 0": (NAN, 1.0)}


def norms_apart(mesh):
    """What replicas have after a step whose gradient norm each computed otherwise."""
    found = []
    for argv, norms in APART.items():
        step, _, batches = made(f"--compile none --mode replicate {argv}", 2)
        with mock.patch("trainer.step.global_norm", lambda *_, norms=norms: torch.tensor(norms[dist.get_rank()])):
            step(*next(batches))
        found.append((step.grad_norm.item(), step.skipped.item(), state(step)))
    return found


@pytest.fixture(scope="module")
def on_two_ranks():
    return spawn(2, [nan_on_rank_1, norms_apart])


@pytest.mark.long
def test_replicas_decide_alike_whatever_norm_each_has_computed(on_two_ranks):
    one, other = on_two_ranks["norms_apart"]
    assert [(f"{norm:.1f}", bad) for norm, bad, _ in one] == [("0.6", 0), ("1.1", 1), ("nan", 1), ("nan", 1)]
    assert repr(one) == repr(other)


@pytest.mark.long
def test_what_one_rank_has_all_refuse(on_two_ranks):
    one, other = on_two_ranks["nan_on_rank_1"]
    assert repr([told for told, _, _ in one.values()]) == repr([told for told, _, _ in other.values()])
    for argv in RANKS:
        for rank in (one, other):
            assert_refused(rank[argv])


# ------------------------------------------------------------------------------------------------------------- the run


def planted(monkeypatch, steps, factor=NAN):
    """Multiplies the loss of these steps (from 1)."""
    took = main.Run.resume_into
    count = itertools.count(1)

    def plant(run, step):
        took(run, step)
        loss_fn = step.loss_fn
        step.loss_fn = lambda *batch: loss_fn(*batch) * (factor if next(count) in steps else 1.0)

    monkeypatch.setattr(main.Run, "resume_into", plant)


def test_stop_exits_5_naming_step_batch_and_fix_and_keeps_the_last_good_checkpoint(
    train, trains, tmp_path, monkeypatch
):
    saving = "--log-every", 1, "--save", tmp_path / "run", "--save-every", 1, "--keep", 9
    with monkeypatch.context() as patch:
        planted(patch, {4})
        done = train(*saving)
    assert done.row["outcome"].startswith("failed: ")
    assert done.row["skipped"] == 0
    assert done.row["loss"] == done.losses[-1] == "nan"
    assert len(done.steps) == 4
    assert fails(done, 5) == (
        "error: rank 0: failed: step 4: not finite (loss nan, gradient norm nan), samples 6-7: lower --lr 0.003, or "
        "leave such steps out with --nonfinite skip"
    )
    assert steps_in(tmp_path / "run") == [1, 2, 3]
    resumed = trains(*saving)
    assert resumed.row["resumed_after"] == 3 and resumed.steps[0]["step"] == 4
    assert resumed.steps[0]["loss"] < 6


def test_skip_leaves_the_update_out_says_so_counts_it_and_goes_on(train, tmp_path, monkeypatch):
    planted(monkeypatch, {3, 5})
    done = train("--log-every", 1, "--nonfinite", "skip", "--save", tmp_path, "--save-every", 1,
                 "--keep", 9)  # fmt: skip
    assert (done.code, done.err, done.row["skipped"], done.row["outcome"]) == (0, "", 2, "ok")
    told = [line for line in done.out.splitlines() if "left out" in line]
    for k, line in zip((3, 5), told, strict=False):
        assert line == (f"step {k}: not finite (loss nan, gradient norm nan), samples {2 * k - 2}-{2 * k - 1}: update "
                        "left out on all ranks (1 in a row)")  # fmt: skip
    assert len(told) == 3
    assert re.fullmatch(r"outcome  ok, loss \d\.\d{4}, 2 updates left out", told[2])
    assert [s["step"] for s in done.steps if s["loss"] == "nan"] == [3, 5]
    steps = {k: contents(tmp_path / f"step-{k:08d}") for k in (2, 3, 4)}
    assert_bitwise(steps[2], steps[3])
    assert steps[3]["t"] == 2
    assert steps[4]["t"] == 3


def test_more_than_three_in_a_row_exit_5(train, monkeypatch):
    planted(monkeypatch, {1, 3, 4, 5, 6})
    done = train("--nonfinite", "skip")
    assert done.row["skipped"] == 5
    assert done.out.count("left out on all ranks") == 4
    fails(done, 5, "step 6: not finite", "4 updates in a row left out",
          "more than the 3 of --nonfinite skip; lower --lr 0.003")


@pytest.mark.parametrize(("argv", "step"), [("", 2), ("--nonfinite skip", 5)])
def test_a_learning_rate_that_is_far_too_high_ends_the_run(argv, step, train):
    fails(train("--lr", "1e20", *argv.split()), 5, f"step {step}: not finite", "lower --lr 1e+20")


def test_only_rank_0_tells(train):
    done = train("--lr", "1e20", "--nonfinite", "skip", rank=1)
    assert (done.code, done.out, done.err, done.row) == (5, "", "", None)


def test_a_norm_above_the_limit_is_refused_like_one_that_is_not_finite(train, trains, monkeypatch):
    planted(monkeypatch, {3}, 1000.0)
    stop = train("--nonfinite", "stop", "--norm-limit", "50")
    told = "step 3: gradient norm above --norm-limit 50.0 (loss 5"
    fails(stop, 5, told)
    planted(monkeypatch, {3}, 1000.0)
    skip = trains("--nonfinite", "skip", "--norm-limit", "50", "--log-every", 1)
    assert skip.row["skipped"] == 1 and skip.steps[2]["loss"] > 5000
    assert train("--nonfinite", "stop", "--norm-limit", "50").row["skipped"] == 0


@pytest.fixture
def late(monkeypatch):
    """Steps are read as on CUDA."""

    def watch(*args):
        made = FiniteCheck(*args)
        made.late = True
        return made

    event = SimpleNamespace(record=lambda: None, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr("trainer.run.FiniteCheck", watch)


@pytest.mark.long
@pytest.mark.parametrize("bad", [3, 6])
def test_read_late_a_bad_step_ends_the_run_before_the_end_of_the_next(bad, late, train, monkeypatch):
    planted(monkeypatch, {bad})
    fails(train("--log-every", 100), 5, f"step {bad}: not finite")
    assert train("--log-every", 100).row["outcome"] == "ok"


@pytest.mark.long
@pytest.mark.parametrize(("argv", "told"), [
    ("", ["12"]), ("--norm-spike 0", []), ("--norm-spike 1e4", []),
])  # fmt: skip
def test_a_spike_of_the_norm_is_told_and_trained_on(argv, told, trains, monkeypatch):
    planted(monkeypatch, {12}, 1000.0)
    done = trains("--steps", 14, *argv.split())
    assert done.row["skipped"] == 0
    lines = re.findall(r"^step (\d+): gradient norm \S+ is .* the mean of the last 11 steps \(\S+\), samples 22-23$",
                       done.out, re.MULTILINE)  # fmt: skip
    assert lines == told
    assert done.out.count("gradient norm") == len(told)


# ------------------------------------------------------------------------------------------------------------ the host


def numbers(norm=1.0, skipped=0.0, loss=2.0):
    return SimpleNamespace(grad_norm=torch.tensor(norm), skipped=torch.tensor(skipped)), torch.tensor(loss)


def checking(argv="", late=False):
    check = FiniteCheck(resolved(argv), SimpleNamespace(sample=8, global_batch=8, overfit=False))
    check.late = late
    return check


def test_on_cuda_a_step_is_read_once_the_next_is_launched_or_when_asked(monkeypatch):
    calls = []
    event = lambda: SimpleNamespace(record=lambda: calls.append("record"), synchronize=lambda: calls.append("wait"))  # noqa: E731
    monkeypatch.setattr(torch.cuda, "Event", event)
    check = checking(late=True)
    check.put(1, *numbers(loss=1.0))
    assert calls == ["record"]
    assert check.loss is None
    check.put(2, *numbers(loss=2.0))
    assert calls == ["record", "wait", "record"]
    assert check.loss == 1.0
    check.put(3, *numbers(loss=3.0), wait=True)
    check.flush()
    assert calls[3:] == ["wait", "record", "wait"]
    assert check.loss == 3.0
    check.put(4, *numbers(skipped=1.0, loss=NAN))
    with pytest.raises(NonFinite, match="step 4: not finite"):
        check.put(5, *numbers())


def test_a_spike_is_one_against_the_last_hundred_good_steps(capsys):
    check = checking("--nonfinite skip --norm-limit 500")
    for k in range(SETTLED - 1):
        check.put(k, *numbers(100.0 if k == 5 else 1.0))
    for k in range(WINDOW + 10):
        check.put(k, *numbers(1.0))
    check.put(1, *numbers(10.0))
    check.put(2, *numbers(1000.0, skipped=1.0))
    assert "gradient norm 10 is" not in (out := capsys.readouterr().out)
    assert "gradient norm 1000)" in out
    check.put(3, *numbers(12.0))  # the mean of 99 steps of 1 and one of 10 is 1.09
    assert capsys.readouterr().out == (
        "step 3: gradient norm 12 is 11 times the mean of the last 100 steps (1.09), samples 0-7\n"
    )


def test_the_batch_of_overfit_is_always_the_first():
    check = checking()
    check.batches = SimpleNamespace(sample=80, global_batch=8, overfit=True)
    with pytest.raises(NonFinite, match="samples 0-7:"):
        check.put(10, *numbers(skipped=1.0))


def test_what_fits_is_accepted():
    for argv in ("--nonfinite skip --norm-limit 2 --norm-spike 0", "--nonfinite stop --norm-limit 0 --norm-spike 3"):
        resolved(argv)
