"""Ranks compile equal graphs once; what may differ between them is compiled by each, and nobody waits for ever.

    pytest tests/test_compile_once.py -m "slow or not slow"        # no GPU; two gloo ranks, real code; three minutes
"""

import os
import tempfile
import time
import uuid
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import ONE_GRAPH, spawn
from running import rows_of, torchrun
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import cpu_vec_isa
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from overlap import compile_options
from simple_fsdp import data_parallel
from trainer.distributed import compile_once as module
from trainer.distributed.compile_once import compile_once

CPU = torch.device("cpu")
module_described = module.described
SHARES = pytest.mark.skipif(torch.__version__ < (2, 13), reason="ranks share compiled code since torch 2.13")


def fresh(own=""):
    """A tag that no compiled code has yet, the same on all ranks."""
    torch._dynamo.reset()
    counters.clear()
    word = [str(uuid.uuid4())]
    dist.broadcast_object_list(word)
    torch.compiler.config.cache_key_tag = word[0] + own


def cached():
    """(found in the cache, compiled) since `fresh`."""
    return counters["aot_autograd"]["autograd_cache_hit"], counters["aot_autograd"]["autograd_cache_miss"]


def layer(mesh, rows=8, **how):
    torch.manual_seed(0)
    return data_parallel(nn.Linear(4, rows, bias=False), mesh, **how)


def once(f, *args, group=None):
    with compile_once(CPU, group or dist.group.WORLD):
        return f(*args)


def step(mesh, rows=8, scale=1, batch=2, name="", options=compile_options, **how):
    """(caches, largest error of output and gradient, tag) of one step, compiled inside compile_once."""
    if not name:
        fresh()
    model = layer(mesh, rows, **how)
    x = torch.arange(4.0 * batch).view(batch, 4)
    y = once(torch.compile(lambda x: model(x) * scale, fullgraph=True, options=options(model)), x)
    tag = torch.compiler.config.cache_key_tag
    y.sum().backward()
    whole = model.weight.full_tensor().detach()
    grad = model.weight.grad.full_tensor()
    wrong = (y - x @ whole.T * scale).abs().max()
    scales = torch.tensor([float(x.sum(0).max() * scale)])
    dist.all_reduce(scales)
    wrong_grad = (grad.max() - scales.item() / dist.get_world_size()).abs()
    place = model.weight.grad.device_mesh.get_coordinate()
    return cached(), max(wrong.item(), wrong_grad.item()), tag, place


def one_compiles_the_other_finds_it(mesh):
    first = step(mesh)
    torch._dynamo.reset()
    counters.clear()
    return first, step(mesh, name="the same again")


def uneven_shards_are_compiled_by_each(mesh):
    return step(mesh, rows=5)


def a_rank_with_another_constant(mesh):
    return step(mesh, scale=1 + mesh.get_local_rank())


def a_rank_with_another_batch(mesh):
    return step(mesh, batch=2 + mesh.get_local_rank())


def a_rank_that_keeps_gathered_weights(mesh):
    return step(mesh, reshard_after_forward=mesh.get_local_rank() == 0)


def torch_s_own_buckets(mesh):
    return step(mesh, options=lambda model: dict(bucket_all_gathers_fx="all"))


def a_rank_without_caches(mesh):
    torch.compiler.config.force_disable_caches = mesh.get_local_rank() == 1
    try:
        return step(mesh)
    finally:
        torch.compiler.config.force_disable_caches = False


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def a_graph_that_torch_does_not_cache(mesh):
    fresh()
    x = torch.ones(3, requires_grad=True)
    told = []
    described = lambda *args: told.append(module_described(*args)) or told[-1]  # noqa: E731
    with mock.patch.object(module, "described", described):
        return once(torch.compile(lambda x: Doubled.apply(x) + 1), x).tolist(), told, counters["aot_autograd"]


def cut(mesh, known):
    fresh()
    whole = distribute_tensor(torch.arange(4.0), mesh, [Replicate()], src_data_rank=None)
    f = torch.compile(lambda d: d.redistribute(placements=[Shard(0)]).to_local() * 2, fullgraph=True)
    with mock.patch.object(module, "described", module.described if known else lambda gm, options: "same"):
        return once(f, whole).tolist(), cached()


def a_tensor_that_is_cut_at_the_rank_s_place(mesh):
    return cut(mesh, known=True), cut(mesh, known=False)


def more_graphs_on_one_rank(mesh):
    fresh()
    x = torch.ones(3)
    more = mesh.get_local_rank()
    with compile_once(CPU, dist.group.WORLD), mock.patch.object(module, "BEGIN_S", 1.0):
        values = [torch.compile(lambda x, i=i: x * (2 + i))(x).sum().item() for i in range(1 + more)]
        values.append(torch.compile(lambda x: x.sin().cos())(x * 0).sum().item())
    return values


class Fails(CustomGraphPass):
    def __call__(self, graph):
        if dist.get_rank() == 0:
            raise RuntimeError("no luck")

    def uuid(self):
        return "fails"


def the_first_rank_fails(mesh):
    fresh()
    f = torch.compile(lambda x: x * 3, fullgraph=True, options=dict(post_grad_custom_post_pass=Fails()))
    try:
        return once(f, torch.ones(3)).tolist(), cached()
    except Exception as e:
        return str(e)


def two_directories(mesh):
    found = []
    with tempfile.TemporaryDirectory() as own, torch._inductor.config.patch(cpp_cache_precompile_headers=False):
        for again in (False, True):
            if mesh.get_local_rank() == 1:
                os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{own}/{again}"
            found.append(step(mesh, name="the same again" if again else ""))
            torch._dynamo.reset()
            counters.clear()
    os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)
    return found


def nothing_is_left(mesh):
    fresh()
    plain = torch._inductor.compile_fx.compile_fx
    f = torch.compile(lambda x: x + 1)
    once(f, torch.ones(3))
    left = torch._inductor.compile_fx.compile_fx is plain, torch._functorch.config.force_non_lazy_backward_lowering
    if mesh.get_local_rank() == 1:  # a recompile: the others have none, and are not asked
        f(torch.ones(3, dtype=torch.double))
    return left


APART = [a_rank_with_another_batch, a_rank_that_keeps_gathered_weights, torch_s_own_buckets]
CHECKS = [
    one_compiles_the_other_finds_it, uneven_shards_are_compiled_by_each, a_rank_with_another_constant,
    a_rank_without_caches,
    a_tensor_that_is_cut_at_the_rank_s_place, more_graphs_on_one_rank, the_first_rank_fails, nothing_is_left,
    a_graph_that_torch_does_not_cache,
]  # fmt: skip
FOUND = (1, 0)
COMPILED = (0, 1)


@pytest.fixture(scope="module")
def ranks():
    return spawn(2, CHECKS, timeout=200)


def right(steps):
    """What the caches say of each rank's step, whose values, tag and mesh of the gradient are its own."""
    for rank, (_, wrong, tag, place) in enumerate(steps):
        assert wrong == 0, (rank, wrong)
        assert f":{rank}/2 " in f"{tag} " and place == (rank,), (rank, tag, place)
    return [caches for caches, *_ in steps]


@SHARES
def test_one_rank_compiles_and_the_other_finds_it(ranks):
    first, again = zip(*ranks["one_compiles_the_other_finds_it"], strict=True)
    assert right(first) == [COMPILED, FOUND]
    assert right(again) == [FOUND, FOUND]


@pytest.mark.parametrize("check", [uneven_shards_are_compiled_by_each, a_rank_with_another_constant])
def test_what_differs_between_ranks_is_compiled_by_each(ranks, check):
    assert right(ranks[check.__name__]) == [COMPILED, COMPILED]


def test_a_rank_without_caches_compiles_on_its_own(ranks):
    assert right(ranks["a_rank_without_caches"]) == [COMPILED, (0, 0)]


@SHARES
def test_a_tensor_cut_at_the_rank_s_place_is_never_taken_from_another(ranks):
    """The key of torch's cache lacks the place: if every graph were shared, rank 1 would get rank 0's part. Should the
    last line fail, torch has mended that, and `described` need not look at DTensors."""
    (known, shared), (other_known, other_shared) = ranks["a_tensor_that_is_cut_at_the_rank_s_place"]
    assert (known, other_known) == (([0, 2], COMPILED), ([4, 6], COMPILED))
    assert (shared, other_shared) == (([0, 2], COMPILED), ([0, 2], FOUND))


@SHARES
def test_nobody_waits_for_what_torch_does_not_cache(ranks):
    for values, told, caches in ranks["a_graph_that_torch_does_not_cache"]:
        assert values == [3, 3, 3]
        assert told == [None]
        assert caches["autograd_cache_bypass"] == 1  # else this test tests nothing


def test_a_rank_that_compiles_more_does_not_wait_for_ever(ranks):
    assert ranks["more_graphs_on_one_rank"] == [[6, 3], [6, 9, 3]]


def test_if_the_first_rank_fails_its_error_stays_and_the_other_compiles(ranks):
    error, other = ranks["the_first_rank_fails"]
    assert "no luck" in error
    assert other == ([3, 3, 3], COMPILED)


def test_afterwards_all_is_as_before(ranks):
    assert ranks["nothing_is_left"] == [(True, False)] * 2


@pytest.mark.slow
def test_more_that_differs_is_compiled_by_each_and_another_directory_is_sent_the_artifacts():
    found = spawn(2, [*APART, two_directories])
    for check in APART:
        assert right(found[check.__name__]) == [COMPILED, COMPILED], check
    first, again = zip(*found["two_directories"], strict=True)
    assert right(first) == [COMPILED, FOUND]
    assert right(again) == [FOUND, FOUND]


class Broken:
    def check(self, keys):
        raise RuntimeError("Broken pipe")

    set = get = check


@pytest.mark.parametrize("told", [{}, {"begin 0 1": "abc"}, {"begin 0 1": "other"}, {"end 0 1": "3"}, None])
def test_a_leader_that_is_late_busy_or_gone_costs_only_time(monkeypatch, told):
    monkeypatch.setattr(module, "BEGIN_S", 0.2)
    monkeypatch.setattr(module, "END_S", 0.2)
    store = Broken() if told is None else dist.HashStore()
    for key, value in (told or {}).items():
        store.set(key, value)
    if told == {"end 0 1": "3"}:  # artifacts that never came
        store.set_timeout(timedelta(seconds=0.2))
    sharing = module._Sharing(torch.device("cuda"), store, rank=1, leader=0, fetch=True, send=True)
    begun = time.monotonic()
    before = torch.compiler.config.cache_key_tag
    with sharing.turn("abc"):
        assert time.monotonic() - begun < 30
    assert torch.compiler.config.cache_key_tag == before
    assert told is None or store.check(["end 1 1"])


def test_the_instruction_set_is_the_one_that_torch_takes(monkeypatch):
    before = cpu_vec_isa.valid_vec_isa_list
    with module.ready(CPU):
        assert cpu_vec_isa.valid_vec_isa_list is not before
        found = cpu_vec_isa.pick_vec_isa()
    assert cpu_vec_isa.valid_vec_isa_list is before
    assert found is cpu_vec_isa.pick_vec_isa()
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    with module.ready(CPU):
        assert cpu_vec_isa.valid_vec_isa_list is before


@pytest.mark.parametrize(("device", "expected"), [("cpu", "body scope"), ("cuda", "scope body")])
def test_on_a_cpu_kernels_are_waited_for_at_the_end(monkeypatch, device, expected):
    told = []
    monkeypatch.setattr(AsyncCompile, "wait", lambda self, scope: told.append(scope))
    with module.kernels_later(torch.device(device)):
        AsyncCompile().wait("scope")
        told.append("body")
    assert told == expected.split()
    with pytest.raises(KeyError), module.kernels_later(CPU):
        AsyncCompile().wait("of a compilation that fails")
        raise KeyError
    assert len(told) == 2


def test_alone_nothing_is_replaced():
    plain = torch._inductor.compile_fx.compile_fx
    with compile_once(CPU, None):
        assert torch._inductor.compile_fx.compile_fx is plain


@pytest.mark.parametrize(("tag", "without"), [
    ("gloo:0:3/4", "gloo:0/4"), ("mine:1/2x a:1 nccl:mesh_1:10/16 gloo:5:0/2", "mine:1/2x a:1 nccl:mesh_1/16 gloo:5/2"),
])  # fmt: skip
def test_only_ranks_leave_the_tag(tag, without):
    assert module._without_rank(tag) == without


class Act(nn.Module):
    """Two layers that share an activation, which Dynamo guards."""

    def __init__(self):
        super().__init__()
        act = nn.LeakyReLU(0.1)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), act) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer[1](layer[0](x))
        return x


@pytest.mark.parametrize("skips", [False, True, None])
def test_what_was_shared_and_no_longer_is_compiles_anew(skips):
    """None: by the guards that this torch has unless told otherwise (PYTHON_GUARDS is off since 2.14)."""
    if not hasattr(module.dynamo, module.SKIPS_GUARDS):
        pytest.skip(f"this torch has no {module.SKIPS_GUARDS}")
    torch._dynamo.reset()
    model = Act()
    x = torch.randn(2, 4)
    compiled = torch.compile(model, backend="eager")
    written = []
    how = {} if skips is None else {module.SKIPS_GUARDS: skips, module.PYTHON_GUARDS: True}
    with module.dynamo.patch(how):
        with compile_once(CPU, None):
            written.append(getattr(module.dynamo, module.PYTHON_GUARDS))
            compiled(x)
        for _ in range(2):  # so that Dynamo learns what it may skip
            compiled(x)
        model.layers[1][1] = nn.LeakyReLU(0.9)
        assert torch.equal(compiled(x), model(x))
        assert skips is None or written == [skips] and getattr(module.dynamo, module.PYTHON_GUARDS)


RUN = "--depth 1 --width 32 --head-dim 16 --grouping 2 --seqlen 16 --steps 3 --batch 2 --compile".split()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fwdbwd", pytest.param("step", marks=ONE_GRAPH)])
def test_a_run_of_two_ranks_leaves_one_entry(tmp_path, monkeypatch, mode):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    done = torchrun(*RUN, mode, "--results", tmp_path / "rows.jsonl")
    assert done.code == 0, done.err
    assert rows_of(tmp_path / "rows.jsonl")[0]["outcome"] == "ok"
    assert len(os.listdir(tmp_path / "cache/aotautograd")) == 1


@pytest.mark.slow
def test_a_run_whose_first_rank_cannot_compile_ends_with_its_error(tmp_path, monkeypatch):
    code = 'import os\nif os.environ.get("RANK") == "0": os.environ["CXX"] = "none"'
    (tmp_path / "sitecustomize.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("TORCH_COMPILE_CACHE_KEY_TAG", str(uuid.uuid4()))
    done = torchrun(*RUN, "fwdbwd", "--results", tmp_path / "rows.jsonl")
    assert done.code == 1
    assert "error: rank 0: failed: InductorError: InvalidCxxCompiler" in done.err
