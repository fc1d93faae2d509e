"""Models that were not made for this project train under simple_fsdp as in one process: eager, and compiled with the
options of overlap.py.

    pytest tests/test_other_models.py -s        # two gloo ranks; prints a table; most models are slow tests

Each of two ranks trains on its half of a batch, one process on the whole: the loss, every gradient and, after a step of
AdamW, every parameter. "compiled" runs the graphs after all of Inductor's passes, "inductor" the C++ that it makes of
them. Differences are relative to the norm of what is compared. timm's models are missing (see other_models.py).
"""

import os
import time
import traceback
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import spawn
from torch.distributed.tensor import distribute_tensor
from without_code import WithoutCode

from overlap import compile_options
from simple_fsdp import data_parallel

pytest.importorskip("transformers", reason="needs transformers: pip install -e '.[hf]'")
pytest.importorskip("diffusers", reason="needs diffusers: pip install -e '.[dev]'")
pytest.importorskip("peft", reason="needs peft: pip install -e '.[dev]'")

from other_models import MODELS, build

QUICK = ["Llama", "Qwen3-MoE", "T5", "ViT", "nn.MultiheadAttention", "nn.Conv2d, BatchNorm2d"]
REST = [name for name in MODELS if name not in QUICK]
GENERATED = ["Llama", "nn.Conv2d, BatchNorm2d"]
LR = 1e-2
TOLERANCE = 1e-4  # gradients that are zero but for rounding are compared with a thousandth of the norm of all of them


def slices(inputs, world):
    return [{k: t.chunk(world)[rank] for k, t in inputs.items()} for rank in range(world)]


def optimizer(model):
    """Its eps is large: a gradient that is zero but for rounding must not become a step of full length."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LR, eps=1e-2)


def reference(name, world):
    """In one process: loss, gradients, and parameters before and after a step, by name."""
    model, inputs = build(name)
    before = {k: p.detach().clone() for k, p in model.named_parameters()}
    batches = slices(inputs, world) if MODELS[name].per_slice else [inputs]
    loss = torch.stack([MODELS[name].loss(model, batch) for batch in batches]).mean()
    loss.backward()
    gradients = {k: p.grad for k, p in model.named_parameters()}
    optimizer(model).step()
    return loss.detach(), gradients, before, {k: p.detach() for k, p in model.named_parameters()}


def squared(ours, theirs):
    """The squared distance between this rank's shard and the same part of a whole tensor."""
    theirs = distribute_tensor(theirs, ours.device_mesh, ours.placements, src_data_rank=None)  # sends nothing
    return (ours.to_local() - theirs.to_local()).square().sum()


def differences(mesh, name, how, expected):
    """(largest relative difference in the loss, a gradient, a parameter), graph breaks"""
    loss_expected, gradients, before, after = expected
    model, inputs = build(name)
    data_parallel(model, mesh)
    assert list(before) == [k for k, _ in model.named_parameters()]
    loss_of = MODELS[name].loss
    if how != "eager":
        options = compile_options(model)
        backend = dict(backend=WithoutCode(options)) if how == "compiled" else dict(options=options)
        loss_of = torch.compile(loss_of, **backend)
    torch._dynamo.utils.counters.clear()
    loss = loss_of(model, slices(inputs, mesh.size())[mesh.get_rank()])
    loss.backward()
    dist.all_reduce(mean := loss.detach() / mesh.size())

    total = torch.stack([g.norm() for g in gradients.values() if g is not None]).norm()
    rows = []
    grads = {k: p.grad for k, p in model.named_parameters()}
    optimizer(model).step()
    for k, p in model.named_parameters():
        g = gradients[k]
        assert (g is None) == (grads[k] is None), f"{k}: {grads[k]} is the gradient, in one process {g}"
        moved = (after[k] - before[k]).norm().clamp(min=LR / 100 * before[k].numel() ** 0.5)
        gradient = torch.zeros(()) if g is None else squared(grads[k], g) / max(g.norm(), total / 1000) ** 2
        rows.append(torch.stack([gradient, squared(p.detach(), after[k]) / moved**2]))
    dist.all_reduce(rows := torch.stack(rows))
    worst = rows.amax(0).sqrt().tolist()
    breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
    return ((mean - loss_expected).abs() / loss_expected.abs()).item(), *worst, breaks


def compare(mesh, names, hows):
    """{model: (parameters, {how: differences, or what went wrong})}"""
    table = {}
    for name in names:
        expected, row = reference(name, mesh.size()), {}
        for how in hows:
            torch._dynamo.reset()
            start = time.perf_counter()
            try:
                row[how] = *differences(mesh, name, how, expected), time.perf_counter() - start
            except Exception:
                row[how] = traceback.format_exc()
        table[name] = sum(p.numel() for p in expected[2].values()), row
    return table


def quick(mesh):
    return compare(mesh, QUICK, ["eager", "compiled"])


def rest(mesh):
    return compare(mesh, REST, ["eager", "compiled"])


def generated(mesh):
    with torch._inductor.config.patch(fx_graph_cache=False), torch._functorch.config.patch(enable_autograd_cache=False):
        return compare(mesh, GENERATED, ["inductor"])


@pytest.fixture(scope="module")
def tables():
    """tables(check) -> what it gives on each rank. It runs, and prints its table, at the first call."""
    done = {}

    def results(check):
        if check not in done:
            with mock.patch.dict(os.environ, HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error"):
                done[check] = spawn(2, [check], timeout=900)
            for name, (parameters, row) in done[check][check.__name__][0].items():
                for how, got in row.items():
                    if isinstance(got, str):
                        words = "failed: " + got.splitlines()[-1]
                    else:
                        words = "loss {:.1e}  gradient {:.1e}  parameter {:.1e}  {} graph breaks  {:.1f} s".format(*got)
                    print(f"{name:<23} {parameters:>6}  {how:<8}  {words}")
        return done[check][check.__name__]

    return results


def check_row(tables, check, name, how):
    for rank, table in enumerate(tables(check)):
        got = table[name][1][how]
        assert not isinstance(got, str), f"{name}, {how}, rank {rank}:\n{got}"
        for what, difference in zip(("loss", "a gradient", "a parameter"), got, strict=False):
            assert difference <= TOLERANCE, f"{name}, {how}: {what} differs by {difference:.1e} of its norm"


@pytest.mark.parametrize("how", ["eager", "compiled"])
@pytest.mark.parametrize("name", QUICK)
def test_a_model_trains_as_in_one_process(tables, name, how):
    check_row(tables, quick, name, how)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["eager", "compiled"])
@pytest.mark.parametrize("name", REST)
def test_more_models_train_as_in_one_process(tables, name, how):
    check_row(tables, rest, name, how)


@pytest.mark.slow
@pytest.mark.parametrize("name", GENERATED)
def test_generated_code_trains_as_in_one_process(tables, name):
    check_row(tables, generated, name, "inductor")
