"""Models that were not made for this project train under simple_fsdp as in one process: eager, and compiled with the
options of overlap.py.

    pytest tests/test_other_models.py -s        # two gloo ranks; prints a table; most models are slow tests
    COMPILE_ALL=1 pytest ...                    # compiles all models, not only half: ten minutes more

Each of two ranks trains on its half of a batch, one process on the whole: the loss, every gradient and, after a step of
AdamW, every parameter. "compiled" runs the graphs after all of Inductor's passes, "inductor" the C++ that it makes of
them. Differences are relative to the norm of what is compared. timm's models are missing (see other_models.py).
"""

import os
import time
import traceback
from importlib.util import find_spec
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import spawn
from torch.distributed.tensor import distribute_tensor
from without_code import WithoutCode

from overlap import compile_options
from simple_fsdp import data_parallel

# Not by importing them, which takes seconds, again on each rank.
if missing := [name for name in ("transformers", "diffusers", "peft") if find_spec(name) is None]:
    pytest.skip(f"needs {', '.join(missing)}: pip install -e '.[dev,hf]'", allow_module_level=True)

from other_models import MODELS, build

QUICK = ["Llama", "nn.Conv2d, BatchNorm2d"]  # T5 and ViT are quick in test_hugging_face_outputs.py
REST = [name for name in MODELS if name not in QUICK]
# Compiling one takes 2 to 20 s on two cores. These differ most: Mistral and Phi have the parts of Llama and GPT-NeoX,
# BERT, RoBERTa and DistilBERT those of DeBERTa. With COMPILE_ALL=1 all are compiled.
COMPILED = """
nn.MultiheadAttention; nn.Conv2d, BatchNorm2d; Llama, checkpointing; Llama, LoRA; Qwen3; Qwen3-MoE; GPT-NeoX; Bloom;
Mamba; DeBERTa; Wav2Vec2; ConvNeXt; DiT; nn.Transformer; nn.LSTM; CLIP; Whisper
"""
COMPILED = {*MODELS} if os.environ.get("COMPILE_ALL") else {*COMPILED.strip().replace("\n", " ").split("; ")}
CASES = [(name, how) for name in MODELS for how in ("eager", "compiled") if how == "eager" or name in COMPILED]
GENERATED = ["Llama", "nn.Conv2d, BatchNorm2d"]  # C++ made, compiled and run
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
        moved = (after[k] - before[k]).norm().clamp(min=LR / 10 * before[k].numel() ** 0.5)
        gradient = torch.zeros(()) if g is None else squared(grads[k], g) / max(g.norm(), total / 1000) ** 2
        rows.append(torch.stack([gradient, squared(p.detach(), after[k]) / moved**2]))
    dist.all_reduce(rows := torch.stack(rows))
    worst = rows.amax(0).sqrt().tolist()
    breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
    return ((mean - loss_expected).abs() / loss_expected.abs()).item(), *worst, breaks


def compare(mesh, names, hows):
    """{(model, how): (parameters, differences or what went wrong)}"""
    table = {}
    for name in names:
        expected = reference(name, mesh.size())
        for how in hows(name):
            torch._dynamo.reset()
            start = time.perf_counter()
            try:
                got = *differences(mesh, name, how, expected), time.perf_counter() - start
            except Exception:
                got = traceback.format_exc().rstrip()
            table[name, how] = sum(p.numel() for p in expected[2].values()), got
    return table


def quick(mesh):
    return compare(mesh, QUICK, lambda name: ["eager", "compiled"] if (name, "compiled") in CASES else ["eager"])


def rest(mesh):
    return compare(mesh, REST, lambda name: ["eager", "compiled"] if (name, "compiled") in CASES else ["eager"])


def generated(mesh):
    with torch._inductor.config.patch(fx_graph_cache=False), torch._functorch.config.patch(enable_autograd_cache=False):
        return compare(mesh, GENERATED, lambda name: ["inductor"])


def check_row(table, name, how):
    for rank, rows in enumerate(table):
        _, got = rows[name, how]
        assert not isinstance(got, str), f"{name}, {how}, rank {rank}:\n{got}"
        for what, difference in zip(("loss", "a gradient", "a parameter"), got, strict=False):
            assert difference <= TOLERANCE, f"{name}, {how}: {what} differs by {difference:.1e} of its norm"


def run(checks):
    """{check: its result on each rank}, and a table of them on the terminal. The ranks start once for all checks."""
    with mock.patch.dict(os.environ, HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error"):
        results = spawn(2, checks, timeout=3600 if os.environ.get("COMPILE_ALL") else 600)
    for check in checks:
        for (name, how), (parameters, got) in results[check.__name__][0].items():
            words = "loss {:.1e}  gradient {:.1e}  parameter {:.1e}  {} graph breaks  {:.1f} s"
            words = "failed: " + got.splitlines()[-1][:200] if isinstance(got, str) else words.format(*got)
            print(f"{name:<23} {parameters:>6}  {how:<8}  {words}")
    return results


@pytest.fixture(scope="module")
def few():
    return run([quick])


@pytest.fixture(scope="module")
def many():
    return run([rest, generated])


@pytest.mark.long
@pytest.mark.parametrize("name, how", [case for case in CASES if case[0] in QUICK])
def test_a_model_trains_as_in_one_process(few, name, how):
    check_row(few["quick"], name, how)


@pytest.mark.slow
@pytest.mark.parametrize("name, how", [case for case in CASES if case[0] in REST])
def test_more_models_train_as_in_one_process(many, name, how):
    check_row(many["rest"], name, how)


@pytest.mark.slow
@pytest.mark.parametrize("name", GENERATED)
def test_generated_code_trains_as_in_one_process(many, name):
    check_row(many["generated"], name, "inductor")
