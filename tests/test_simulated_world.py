"""A simulated world computes what one process does, as real ranks would, and takes the time that its link says."""

import ast
import copy
import re
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import spawn
from running import resolved
from test_equivalence import without_code
from torch import nn
from torch.utils import cpp_extension
from torch.utils._python_dispatch import TorchDispatchMode

import simple_fsdp
from simple_fsdp import data_parallel
from trainer.distributed import simulated_world as sim
from trainer.parallelize import build
from trainer.step import local

SMALL = "--depth 1 --width 64 --head-dim 16 --grouping 2 --vocab 256 --seqlen 16 --batch 2 --clip 0 --param-dtype fp32"
MODES = {"fully_shard": 8, "replicate": 1, "hybrid_shard --replicas 2": 4}  # shards of 8 ranks
CPU = torch.device("cpu")
EPS = 1e-4


@pytest.fixture(autouse=True)
def end():
    yield
    torch._dynamo.reset()
    sim.stop()


def start(world, rank=0):
    """Whose links take no time."""
    sim.start(world, sim.link("none"), rank=rank)


def configured(argv, world=1, device="cpu"):
    return resolved(f"--device {device} {SMALL} {argv}", world, device)


# ---------------------------------------------------------------- values


def test_every_collective_gives_what_equal_ranks_give():
    start(4, 2)
    own = torch.arange(3.0)
    whole = torch.arange(12.0)
    out = torch.empty(12)
    dist.all_gather_into_tensor(out, own)
    assert out.tolist() == [0, 1, 2] * 4
    parts = [torch.empty(3) for _ in range(4)]
    dist.all_gather(parts, own, async_op=True).wait()
    assert all(p.tolist() == [0, 1, 2] for p in parts)
    dist.gather(own, [p.zero_() for p in parts], dst=2)
    assert all(p.tolist() == [0, 1, 2] for p in parts)
    dist.gather(own, dst=0)  # to another rank
    for op, factor in ((dist.ReduceOp.SUM, 4), (dist.ReduceOp.AVG, 1), (dist.ReduceOp.MAX, 1)):
        shard = torch.empty(3)
        both = own.clone()
        dist.reduce_scatter_tensor(shard, whole, op=op)
        dist.all_reduce(both, op=op)
        assert shard.tolist() == [factor * v for v in (6, 7, 8)]
        assert both.tolist() == [factor * v for v in (0, 1, 2)]
    dist.reduce_scatter(shard, list(whole.split(3)), op=dist.ReduceOp.SUM)
    assert shard.tolist() == [24, 28, 32]
    dist.all_reduce(both := torch.full((2,), 3), op=dist.ReduceOp.PRODUCT)
    assert both.tolist() == [81, 81]
    dist.all_to_all_single(sent := torch.empty(5), torch.arange(8.0), [1, 0, 3, 1], [2, 2, 2, 2])
    assert sent.tolist() == [4, 4, 5, 4, 4]  # what this rank sends to itself, cut or repeated
    dist.all_to_all_single(out, torch.arange(12.0))
    assert out.tolist() == [6, 7, 8] * 4
    dist.broadcast(own, src=0)
    dist.barrier()
    names = [None] * 4
    dist.all_gather_object(names, {"rank": dist.get_rank()})
    assert names == [{"rank": 2}] * 4
    assert own.tolist() == [0, 1, 2]
    with dist._coalescing_manager(device=CPU, async_ops=True) as work:
        dist.all_gather_into_tensor(out.zero_(), own)
    work.wait()
    assert out.tolist() == [0, 1, 2] * 4


def test_what_it_cannot_know_is_refused():
    start(4, 1)
    refused = {
        "reduction by .*BXOR": lambda: dist.all_reduce(torch.ones(2, dtype=torch.int64), op=dist.ReduceOp.BXOR),
        "has no c10d::alltoall_": lambda: dist.all_to_all([*torch.ones(4, 1)], [*torch.ones(4, 1)]),
        "has no c10d::send": lambda: dist.send(torch.ones(4), 0),
        "src_data_rank=None": lambda: dist.scatter(torch.ones(1), src=0),
    }
    for told, call in refused.items():
        with pytest.raises(NotImplementedError, match=told):
            call()
    with pytest.raises(RuntimeError, match="process of its own"):
        start(8)


def test_afterwards_real_groups_work_again():
    start(4)
    dist.all_reduce(t := torch.ones(2))
    assert t.tolist() == [4, 4]
    sim.stop()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(t)
    assert t.tolist() == [4, 4]
    dist.destroy_process_group()


# ---------------------------------------------------------------- gradients


def whole_of(shard, shards):
    """What `shards` coded shards are together, by this formula, not by a collective."""
    return torch.cat([shard * (1 + j / 16) for j in range(shards)])


def codes(ranks, like):
    return (1 + torch.arange(ranks, device=like.device, dtype=like.dtype) / 16).view(-1, 1)


@torch.no_grad()
def tile_(p, ranks, coded=False):
    """Overwrites a whole parameter by its first of `ranks` chunks, repeated (coded: times 1 + j/16 for rank j)."""
    chunks = p.view(ranks, -1)
    chunks.copy_(chunks[:1].clone() * (codes(ranks, p) if coded else 1.0))


def coded_gather(out, own, ranks, rank):
    """The shards of rank j are taken to be (1 + j/16) times a common one, instead of equal: a wrong order shows."""
    factors = codes(ranks, own) / codes(ranks, own)[rank] if out.is_floating_point() else 1
    out.view(ranks, -1).copy_(own.reshape(1, -1).expand(ranks, -1) * factors)


def check_gradients(mode, compile, steps=3, limit=0.0, device="cpu"):
    """Gradients, losses and updated parameters of rank 0 of 8 are those of one process whose parameters are equal
    chunks, made equal again after each step. The eps of AdamW is far above the rounding of a gradient: else an entry
    whose gradient is nearly 0 would move by any part of the learning rate."""
    with mock.patch.object(sim, "_gather", coded_gather):
        sim.start(8, sim.link("none"), device)
        c = configured(f"--mode {mode} --compile {compile}", 8, device)
        shards = MODES[mode]
        step = build(c, torch.device(device), 8)
        seen = []
        step.on_gradients = lambda params, grads: seen.append([g.clone() for g in grads])
        wholes = {n: whole_of(local(p.detach()), shards) for n, p in step.model.named_parameters()}
        step.optimizer.lr.fill_(1e-2)
        step.optimizer.eps = EPS
        draw = [torch.Generator().manual_seed(k) for k in range(steps)]
        batches = [torch.randint(256, (2, 2, 16), generator=g).to(device) for g in draw]
        losses = [step(*each).item() for each in batches]
        after = [local(p.detach()).clone() for p in step.optimizer.params]
        torch._dynamo.reset()
        sim.stop()

    one = build(configured("--wrapper none --compile none", device=device), torch.device(device), 1)
    one.on_gradients = lambda params, grads: expected.append([g.clone() for g in grads])
    one.model.load_state_dict(wholes)
    one.optimizer.lr.fill_(1e-2)
    one.optimizer.eps = EPS
    for k, (tokens, targets) in enumerate(batches):
        expected = []
        loss = one(tokens, targets).item()
        assert abs(loss - losses[k]) <= limit, f"step {k}: loss {losses[k]}, one process {loss}"
        for g, whole in zip(seen[k], expected[0], strict=True):
            torch.testing.assert_close(g, whole[: len(g)], rtol=0, atol=limit, msg=lambda m, k=k: f"step {k}: {m}")
        for p in one.optimizer.params:
            tile_(p.data, shards, coded=True)
    for p, whole in zip(after, one.optimizer.params, strict=True):
        limits = dict(rtol=0, atol=100 * limit)  # Adam enlarges it
        torch.testing.assert_close(p, whole[: len(p)].detach(), **limits)


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_gradients_at_world_8_are_those_of_one_process(mode):
    check_gradients(mode, "none")


# The compiled graphs of the two plain modes run on real ranks in test_equivalence.py and test_simple_fsdp_ranks.py.
@pytest.mark.long
@pytest.mark.parametrize("mode", [m if "hybrid" in m else pytest.param(m, marks=pytest.mark.slow) for m in MODES])
def test_compiled_gradients_at_world_8_are_those_of_one_process(mode, monkeypatch):
    monkeypatch.setattr(torch, "compile", without_code)  # the graphs after all of Inductor's passes
    check_gradients(mode, "fwdbwd", limit=5e-6)


@pytest.mark.slow
def test_gradients_of_generated_code_at_world_8_are_those_of_one_process():
    check_gradients("fully_shard", "blocks", limit=5e-6)


@pytest.mark.parametrize("rank", [3, 5])
def test_another_rank_holds_its_own_rows(rank):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8))
    x = torch.randn(4, 16)
    for p in net.parameters():
        tile_(p.data, 8)
    one = copy.deepcopy(net)
    one(x).square().mean().backward()
    start(8, rank)
    for module in net.modules():  # distribute_tensor would have rank 0 scatter, which this rank cannot receive
        for name, p in list(module._parameters.items()):
            module._parameters[name] = nn.Parameter(p.detach().to("meta"))
    mesh = dist.init_device_mesh("cpu", (8,))
    data_parallel(net, mesh).to_empty(device="cpu")
    with torch.no_grad():
        for p, whole in zip(net.parameters(), one.parameters(), strict=True):
            local(p).copy_(whole.chunk(8)[rank])
    net(x).square().mean().backward()
    for p, whole in zip(net.parameters(), one.parameters(), strict=True):
        assert torch.equal(local(p.grad), whole.grad.chunk(8)[rank])


@torch.no_grad()
def layer(shard, rows, mesh, **how):
    """A sharded Linear(16, rows) of which this rank holds `shard`."""
    with torch.device("meta"):
        net = nn.Linear(16, rows, bias=False)
    data_parallel(net, mesh, **how).to_empty(device="cpu")
    local(net._parameters["weight"]).copy_(shard)
    return net


@pytest.mark.long
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize(("rank", "rows"), [(0, 2), (49, 2), (50, 0)])
def test_uneven_shards_of_many_ranks(rank, rows, backend, dtype):
    """100 rows over 96 ranks: 50 ranks have two, the rest none; above 64 ranks the wrapper pads them itself."""
    torch.manual_seed(0)
    first = torch.randn(2, 16)
    x = torch.randn(4, 16)
    whole = first.repeat(50, 1).requires_grad_()
    (x.to(dtype) @ whole.to(dtype).T).float().square().mean().backward()
    start(96, rank)
    policy = simple_fsdp.MixedPrecisionPolicy(dtype, torch.float32)
    net = layer(first[:rows], 100, dist.init_device_mesh("cpu", (96,)), mp_policy=policy)
    run = torch.compile(net, backend=backend, fullgraph=True) if backend else net
    run(x.to(dtype)).float().square().mean().backward()
    grad = net._parameters["weight"].grad
    assert grad.shape == (100, 16) and local(grad).shape == (rows, 16) and grad.dtype == torch.float32
    expected = whole.grad[2 * rank : 2 * rank + rows]  # a rank that holds nothing tiles nothing
    torch.testing.assert_close(local(grad), expected, rtol=0, atol=1e-7)


def test_1024_ranks_on_a_mesh_of_two_dimensions():
    torch.manual_seed(0)
    whole = torch.randn(1, 16).repeat(256, 1).requires_grad_()
    x = torch.randn(4, 16)
    (x @ whole.T).square().mean().backward()
    start(1024, 700)
    mesh = dist.init_device_mesh("cpu", (4, 256), mesh_dim_names=("replicate", "shard"))
    net = layer(whole[:1], 256, mesh, mode="hybrid_shard")
    net(x).square().mean().backward()
    torch.testing.assert_close(local(net._parameters["weight"].grad), whole.grad[:1], rtol=0, atol=1e-7)
    sizes = {(each.op, each.ranks) for each in sim.log()}
    assert sizes == {("all_gather", 256), ("reduce_scatter", 256), ("all_reduce", 4)}


# ---------------------------------------------------------------- beside real ranks


class Recorder(TorchDispatchMode):
    """Every communicating operator that is called, with the shapes of its tensors."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional") and not re.search("wait|wrap", func.__name__):
            shapes = [tuple(t.shape) for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, torch.Tensor)]
            self.calls.append((func._schema.name, shapes))
        return func(*args, **(kwargs or {}))


def two_ranks(mesh=None):
    """{wrapper: (losses and norms of this rank's gradient, collectives)} of 3 eager steps of a world of 2 whose ranks
    hold equal data and, made equal again after each step, equal shards."""
    results = {}
    for wrapper in ("simple", "fsdp2"):
        step = build(configured(f"--wrapper {wrapper} --compile none --depth 2", 2), CPU, 2)
        shards = [local(p.detach()) for p in step.optimizer.params]
        values = []
        calls = []
        step.on_gradients = lambda _, grads, to=values: to.append(torch.stack(torch._foreach_norm(grads)).norm().item())
        for k in range(3):
            for shard in shards:
                dist.broadcast(shard, 0)
            tokens, targets = torch.randint(256, (2, 2, 16), generator=torch.Generator().manual_seed(k))
            with Recorder() as recorder:
                values.append(step(tokens, targets).item())
            calls += recorder.calls
        results[wrapper] = values, calls
    return results


@pytest.mark.long
def test_two_simulated_ranks_equal_two_real_ones_to_the_bit():
    real = spawn(2, [two_ranks])["two_ranks"]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    start(2)
    try:
        simulated = two_ranks()
    finally:
        torch.set_num_threads(threads)
    assert simulated["simple"][0] == simulated["fsdp2"][0]
    assert len(set(simulated["simple"][0])) == 6
    for wrapper, (values, calls) in simulated.items():
        assert values == real[0][wrapper][0], wrapper
        assert calls == real[0][wrapper][1] == real[1][wrapper][1] and len(calls) > 30, wrapper
    assert {"all_gather", "reduce_scatter", "all_reduce"} < {each.op for each in sim.log()}


# ---------------------------------------------------------------- time


def test_a_link_takes_latency_and_bytes_sent_over_bandwidth():
    h100 = sim.link("h100-nvlink")
    assert h100.seconds("all_gather", 370e9, 8) == pytest.approx(20e-6 + 7 / 8)
    assert h100.seconds("all_reduce", 370e9, 8) == pytest.approx(20e-6 + 14 / 8)
    assert sim.link("5:1").seconds("reduce_scatter", 1e9, 2) == pytest.approx(5e-6 + 0.5)
    assert sim.link("none").seconds("all_gather", 1e12, 8) == 0 == h100.seconds("all_gather", 1e12, 1)
    for text in ("nvlink", "5:0", "5", "-1:3", ""):
        with pytest.raises(ValueError, match=f"--link {text}: must be a100-nvlink, .*20:370"):
            sim.link(text)


def test_independent_work_hides_a_collective_and_dependent_work_does_not():
    """17 ms of link and 25 ms of computing. Best of 5, because other work on the machine only makes it longer."""
    sim.start(8, sim.link("1000:1"))
    out = torch.empty(8, 571_428)
    own = torch.ones(571_428)

    def measure(independent):
        start = time.perf_counter()
        work = dist.all_gather_into_tensor(out.view(-1), own, async_op=True)
        if not independent:
            work.wait()
        time.sleep(0.025)
        work.wait()
        return 1e3 * (time.perf_counter() - start)

    times = {how: min(measure(how) for _ in range(5)) for how in (True, False)}
    assert 25 <= times[True] < 40 and 42 <= times[False], times
    assert {round(1e3 * each.seconds) for each in sim.log()} == {17}
    assert out.eq(1).all()


def test_two_collectives_of_one_group_follow_each_other():
    sim.start(8, sim.link("100000:1"))  # 100 ms each: more than a busy machine takes to issue three
    start = time.perf_counter()
    works = [dist.all_reduce(torch.ones(1), async_op=True) for _ in range(3)]
    issued = time.perf_counter() - start
    (busy_until,) = sim._world.busy.values()
    assert 0.3 <= busy_until - start <= 0.3 + issued  # however late the link's thread wakes up
    [work.wait() for work in works]
    assert time.perf_counter() - start >= 0.3 > issued


# ---------------------------------------------------------------- the log


def test_the_log_tells_every_collective_and_its_modelled_time():
    sim.start(8, sim.link("20:370"))
    mesh = dist.init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
    sim.log().clear()
    dist.all_gather_into_tensor(torch.empty(1024, 256), torch.ones(256, 256), group=mesh.get_group("shard"))
    dist.all_reduce(torch.ones(256), group=mesh.get_group("replicate"), async_op=True).wait()
    gather, reduce = sim.log()
    seconds = 20e-6 + 3 / 4 * 2**20 / 370e9
    assert gather == ("all_gather", mesh.get_group("shard").group_name, 4, 2**20, False, pytest.approx(seconds))
    assert reduce[:5] == ("all_reduce", mesh.get_group("replicate").group_name, 2, 1024, True)
    assert reduce.seconds == pytest.approx(20e-6 + 1024 / 370e9)
    assert sim.summary(sim.log())["all_gather"] == dict(n=1, mib=1.0, ms=round(1e3 * seconds, 3))


def test_the_clock_of_a_gpu_needs_no_cuda_toolkit(monkeypatch):
    """Torch's compiler of kernels asks for the headers of one, which pip's packages are not."""
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", None)
    monkeypatch.setattr(torch.cuda, "_compile_kernel", lambda _, name: [*cpp_extension.include_paths("cuda"), name])
    assert sim._Clock().wait[-1] == "wait_deadline"
    assert cpp_extension.CUDA_HOME is None


def test_the_docstring_names_every_private_name_of_torch():
    nodes = [*ast.walk(ast.parse(Path(sim.__file__).read_text()))]
    names = {node.attr for node in nodes if isinstance(node, ast.Attribute) and re.match("_[^_]", node.attr)}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and "._" in node.module:
            names |= {alias.name for alias in node.names}
    assert len(names) > 8
    assert [name for name in names if name not in sim.__doc__] == []
