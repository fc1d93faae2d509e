"""Studies of a training step on ranks: ways to average gradients, optimizer states that are sharded. Never a speed.

    pytest lab/tests/test_studies_steps.py        # one spawn of two gloo ranks, and simulated ones
"""

import copy
import functools
import gc
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import spawn
from running import rows_of

from lab.studies import ddp, zero1
from model import ModelConfig, Transformer
from trainer.collective_time import link
from trainer.distributed import simulated_world

DIMS = dict(block="llama", depth=1, width=16, head_dim=8, vocab=256, seqlen=8, batch=2)


def every_way(mesh) -> dict:
    """The gradients of the model of setting DIMS after one step of each way, and of one process with both batches."""
    found, (rank, n) = {}, (mesh.get_local_rank(), mesh.size())
    torch.manual_seed(5)
    tokens = torch.randint(0, 32, (n, 2, 9))
    ways = ("naive", 0, False), ("flat", None, False), ("overlap", 0, True), ("buckets", 4000, True)
    for way, cap, overlap in ways:
        model, unused = small_model()
        reducer = ddp.Reducer([*model.parameters(), unused], cap, overlap)
        for _ in range(2):  # a second step begins as the first did
            model.zero_grad()
            unused.grad = None
            model(tokens[rank, :, :-1], tokens[rank, :, 1:]).backward()
            reducer.finish()
        assert not unused.grad.any() and not reducer.works
        found[way] = [p.grad for p in model.parameters()]
        sizes = [sum(p.nbytes for p in bucket) for bucket in reducer.buckets]
        assert sorted(id(p) for b in reducer.buckets for p in b) == sorted(map(id, [*model.parameters(), unused]))
        assert way != "buckets" or (len(sizes) > 3 and all(s <= cap or len(b) == 1 for s, b in zip(
            sizes, reducer.buckets, strict=True)))  # fmt: skip
        reducer.on = False
        model.zero_grad()
        model(tokens[rank, :, :-1], tokens[rank, :, 1:]).backward()
        reducer.finish()
        assert not torch.equal(next(model.parameters()).grad, found[way][0])  # its own alone
        assert [size for size, _ in reducer.alone()] == sizes
    model, _ = small_model()
    (model(tokens.flatten(0, 1)[:, :-1], tokens.flatten(0, 1)[:, 1:]) / n).backward()
    right = [p.grad for p in model.parameters()]
    return {way: max(((a - b).norm() / b.norm()).item() for a, b in zip(grads, right, strict=True))
            for way, grads in found.items()}  # fmt: skip


def small_model():
    torch.manual_seed(0)
    model = Transformer(ModelConfig(depth=1, width=16, head_dim=8, grouping=1, vocab=256, block="llama"))
    model.init_weights()
    return model, torch.nn.Parameter(torch.ones(3))


@pytest.fixture(scope="module")
def two_ranks():
    return spawn(2, [every_way, sharded_optimizers, odd_parameters])


def test_every_way_to_average_gradients_gives_those_of_one_process(two_ranks):
    for found in two_ranks["every_way"]:
        assert all(error < 1e-5 for error in found.values()), found


@pytest.mark.parametrize("nbytes", [1e6, 3.3e8, 8e9])
@pytest.mark.parametrize("o, w", [(2e-5, 1e10), (5e-4, 1e8), (1e-2, 5e10)])
def test_the_best_bucket_is_the_least_of_the_same_model(nbytes, o, w):
    n, size = ddp.best(nbytes, o, w)
    assert n * size == pytest.approx(nbytes)
    least = min(range(1, 2000), key=lambda k: ddp.overhead(k, nbytes, o, w))
    assert least in (max(1, int(n)), int(n) + 1)
    assert ddp.overhead(n, nbytes, o, w) <= ddp.overhead(least, nbytes, o, w) * (1 + 1e-12)


@pytest.mark.parametrize("way, calls", [("naive", None), ("flat", 1), ("bucketed", 4), ("ddp", 1)])
def test_a_simulated_step_sends_every_gradient_once(isolated, way, calls):
    c = dict(kind="simulated", ranks=8, link="100:1", way=way, mb=0.01) | DIMS
    row = ddp.simulated(c, 1, torch.device("cpu"))
    params = [*small_model()[0].parameters()]
    nbytes = sum(p.nbytes for p in params)
    assert row["nbytes"] == nbytes and row["calls"] == (calls or len(params))
    assert row["communication_ms"] == pytest.approx(0.1 * row["calls"] + nbytes * 2 * 7 / 8 / 1e6, abs=2e-3)
    assert not dist.is_initialized()


@pytest.mark.parametrize("way", ["overlap", "bucketed"])
def test_a_setting_leaves_no_parameters_behind(isolated, way):
    def alive() -> int:
        gc.collect()
        return sum(isinstance(each, torch.nn.Parameter) for each in gc.get_objects())

    before = alive()
    ddp.simulated(dict(kind="simulated", ranks=8, link="100:1", way=way, mb=0.01) | DIMS, 1, torch.device("cpu"))
    assert alive() <= before  # of tests before this one something may end meanwhile


@pytest.mark.slow
def test_ddp_prints_the_best_bucket_of_a_link(call_study, tmp_path, monkeypatch):
    monkeypatch.setattr(ddp, "WAYS", ("flat", "bucketed"))
    monkeypatch.setattr(ddp, "SMALL", DIMS)
    words = ["--small", "--repeat", 1, "--buckets", 0.005, 0.01, "--results", tmp_path / "rows.jsonl"]
    done = call_study(ddp, *words)
    rows = rows_of(tmp_path / "rows.jsonl")
    assert done.code == 0 and [row["outcome"] for row in rows] == ["ok"] * 5, done.out
    size = ddp.best(rows[0]["nbytes"], *ddp.constants(rows[:3]))[1]
    assert f"| simulated, 8 | best by formula: {size / 1e6:.2g} MB |" in done.out
    assert ddp.constants(rows[:3]) == (5e-4, pytest.approx(0.2e9 / 1.75))
    assert rows[3]["points"] and "| real, 2 | flat |" in done.out


OPTIMIZERS = dict(AdamW=dict(lr=1e-2), SGD=dict(lr=1e-2, momentum=0.9), RMSprop=dict(lr=1e-3), Adagrad=dict(lr=0.1))


def sharded_optimizers(mesh) -> list[str]:
    """What differs between an optimizer with sharded states on two ranks and the whole one, to the bit."""
    wrong = []
    rank = mesh.get_local_rank()
    for name, options in OPTIMIZERS.items():
        (model, extra), (same, same_extra) = small_model(), small_model()
        kind = getattr(torch.optim, name)
        made = []
        sharded = functools.partial(zero1.ShardedOptimizer, kind=kind, bucket_mb=0.005)
        for m, e, build in ((model, extra, sharded), (same, same_extra, kind)):
            first, *others = m.parameters()
            made.append(build([dict(params=[*others, e]), dict(params=[first], lr=3e-3)], **options))
        schedules = [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) for optimizer in made]
        for step in range(5):
            torch.manual_seed(step)
            for p, q in zip([*model.parameters(), extra], [*same.parameters(), same_extra], strict=True):
                p.grad = torch.randn_like(p)
                q.grad = p.grad.clone()
            for optimizer, schedule in zip(made, schedules, strict=True):
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
        pairs = zip([*model.parameters(), extra], [*same.parameters(), same_extra], strict=True)
        wrong += [f"{name}: {i}" for i, (p, q) in enumerate(pairs) if not torch.equal(p, q)]
        own = made[0]
        wrong += [f"{name}: states of another's"] * any(own.owner[p] != rank for p in own.state)
        wrong += [f"{name}: loads {own.loads}"] * (max(own.loads) - min(own.loads) > max(p.nbytes for p in own.owner))
        buckets = [*own.buckets()]
        wrong += [f"{name}: not every one is sent once"] * (
            sorted(id(p) for _, b in buckets for p in b) != sorted(map(id, own.owner)) or len(buckets) < 4)
    return wrong


def odd_parameters(mesh) -> list[str]:
    """Ties once; a rank that owns nothing; a closure; copies; loading."""
    p = torch.nn.Parameter(torch.arange(4.0))
    optimizer = zero1.ShardedOptimizer([p, p], torch.optim.SGD, lr=1.0)
    assert optimizer.loads == [16, 0] and (optimizer.local_optimizer is None) == (mesh.get_local_rank() == 1)

    def closure():
        loss = (p * torch.tensor([1.0, 2, 3, 4])).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 20 and p.tolist() == [-1.0, -1.0, -1.0, -1.0]
    mixed = [torch.nn.Parameter(torch.ones(5, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16, torch.float32)]
    other = zero1.ShardedOptimizer(mixed, torch.optim.SGD, lr=0.5)
    for each in mixed:
        each.grad = torch.ones_like(each)
    other.step()
    assert all(each.tolist() == [0.5] * 5 for each in mixed)
    return copies_alive(mesh) + loaded(mesh)


def copies_alive(mesh) -> list[str]:
    """Buckets that a step holds copies of at once: two, and one that a thread of gloo has just sent; of 16."""
    params = [torch.nn.Parameter(torch.ones(1000)) for _ in range(16)]
    cat = torch.cat
    alive = weakref.WeakSet()
    most = []
    optimizer = zero1.ShardedOptimizer(params, torch.optim.SGD, lr=1.0, bucket_mb=0.004)

    def counted(tensors):
        alive.add(made := cat(tensors))
        most.append(len(alive))
        return made

    with mock.patch("torch.cat", counted):
        optimizer.step()
    return [f"copies alive: {most}"] * (len(most) != 16 or max(most) > 4)


def loaded(mesh) -> list[str]:
    """What differs between an optimizer that went on and one that was loaded; states of the other rank are refused."""
    made = []
    for _ in range(2):
        params = [torch.nn.Parameter(torch.ones(4)) for _ in range(3)]
        made.append((params, zero1.ShardedOptimizer(params, torch.optim.AdamW, lr=1e-2)))
    (params, first), (others, second) = made
    for step in range(4):
        if step == 2:
            saved = copy.deepcopy(first.state_dict())
            second.load_state_dict(saved)
            with torch.no_grad():
                [q.copy_(p) for p, q in pairs(params, others)]
            second.param_groups[0]["lr"] = first.param_groups[0]["lr"] = 0.1
        torch.manual_seed(step)
        for p, q in pairs(params, others):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        first.step()
        second.step() if step >= 2 else None
    wrong = ["loaded states differ"] * any(not torch.equal(p, q) for p, q in pairs(params, others))
    own = [i for i, p in enumerate(others) if second.owner[p] == mesh.get_local_rank()]
    try:
        second.load_state_dict(saved | dict(state={(i + 1) % 3: saved["state"][i] for i in own}))
        return [*wrong, "states of another rank were loaded"]
    except ValueError:
        return wrong


def pairs(params, others):
    return zip(params, others, strict=True)


def test_two_ranks_with_sharded_states_update_as_one_to_the_bit(two_ranks):
    assert two_ranks["sharded_optimizers"] == [[], []] and two_ranks["odd_parameters"] == [[], []]


@pytest.mark.slow
def test_bytes_of_sharded_states_are_those_of_the_arithmetic(call_study, tmp_path, monkeypatch):
    monkeypatch.setattr(zero1, "SMALL", DIMS)
    done = call_study(zero1, "--small", "--repeat", 1, "--results", tmp_path / "rows.jsonl")
    rows = {row["setting"]["way"]: row for row in rows_of(tmp_path / "rows.jsonl")}
    assert done.code == 0 and {row["outcome"] for row in rows.values()} == {"ok"}, done.out
    params = [*small_model()[0].parameters()]
    P = sum(p.numel() for p in params)
    largest = max(p.nbytes for p in params)
    for way, row in rows.items():
        before = row["moments"]["before the update"]
        after = row["moments"]["after the update"]
        found = after["parameters"], before["gradients"], after["states"]
        for mine, formula in zip(found, zero1.arithmetic(way, P, 2), strict=True):
            assert 0 <= mine - formula <= (way == "sharded") * 2 * largest or way == "whole" and mine == formula
    S = 4 * P
    assert sum(rows["whole"]["sent"].values()) == pytest.approx(S)
    assert sum(rows["sharded"]["sent"].values()) == pytest.approx(1.5 * S)
    assert all(row["peak_rss_mib"] > 0 for row in rows.values())
    assert rows["fully_shard"]["sent"].keys() >= {"all_gather", "reduce_scatter"}
    assert "all_reduce" in rows["sharded"]["sent"] and "broadcast" in rows["sharded"]["sent"]


@pytest.mark.parametrize("way", zero1.WAYS)
def test_a_timed_step_notes_nothing_and_every_optimizer_is_fused(isolated, way):
    simulated_world.start(2, link("none"), torch.device("cpu"))
    try:
        with mock.patch.object(torch.optim, "AdamW", wraps=torch.optim.AdamW) as made:
            step, noted, moments = zero1.trainer(dict(kind="real", ranks=2, way=way) | DIMS, torch.device("cpu"))
            step()
            assert [*moments] == ["after init"] and all(call.kwargs["fused"] for call in made.call_args_list)
        noted()
    finally:
        simulated_world.stop()
    assert [*moments] == ["after init", "before the update", "after the update"]
    assert ("gradients" in moments["after the update"]) == (way != "fully_shard")
    row = dict(study="zero1", commit="a", torch="b", device="c", outcome="ok", step_ms=1.0, peak_rss_mib=9.0, sent={})
    lines = zero1.table([row | dict(moments=moments, setting=dict(ranks=2, way=way) | DIMS)])[1].splitlines()
    assert (lines[-1].split(" | ")[3].strip() == "") == (way == "fully_shard")
