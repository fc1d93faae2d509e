"""The simulated world on CUDA: `pytest -m gpu -s` prints a figure for each check. One process; skipped without CUDA."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from running import GPU
from test_simulated_world import SMALL, check_gradients
from torch.profiler import ProfilerActivity, profile

from trainer import config as flags
from trainer.distributed import simulated_world as sim
from trainer.distributed.launch import shutdown
from trainer.parallelize import build

ROOT = Path(__file__).parents[1]
pytestmark = GPU


@pytest.fixture(autouse=True)
def end():
    yield
    torch._dynamo.reset()
    sim.stop()


def ms(work, n=10):
    """Median ms of `work` on the device, after one warm-up; the device has other work until the CPU asked for it."""
    work()
    times = []
    for _ in range(n):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(20_000_000)  # cycles, some 10 ms
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[n // 2]


@pytest.mark.parametrize("us", [10, 100, 1000, 10_000])
def test_1_a_collective_takes_what_its_link_says(us):
    sim.start(8, sim.link(f"{us}:1000000"), "cuda")
    t = torch.randn(8, device="cuda")
    took = 1e3 * ms(lambda: dist.all_reduce(t, op=dist.ReduceOp.AVG))
    print(f"\nmodelled {us} us, took {took:.1f}")
    assert us <= took + 2 < us + 60


@pytest.mark.parametrize("groups", [1, 2])
def test_2_independent_products_hide_it(groups):
    sim.start(8, sim.link("3000:1000000"), "cuda")
    others = [dist.group.WORLD, dist.new_group(range(8))][:groups]
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    t = torch.randn(8, device="cuda")
    out = torch.empty_like(a)

    def compute():
        for _ in range(20):
            torch.mm(a, a, out=out)

    def communicate():
        return [dist.all_reduce(t, group=g, op=dist.ReduceOp.AVG, async_op=True) for g in others]

    def both():
        works = communicate()
        compute()
        [w.wait() for w in works]

    alone = ms(compute)
    link = ms(lambda: [w.wait() for w in communicate()])
    together = ms(both)
    print(f"\n{groups} groups: compute {alone:.2f} ms, link {link:.2f}, together {together:.2f}")
    assert together < 1.1 * max(alone, link) + 0.1


def test_3_waiting_costs_a_concurrent_product_nothing():
    sim.start(8, sim.link("20000:1000000"), "cuda")
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    t = torch.randn(8, device="cuda")
    out = torch.empty_like(a)
    alone = ms(lambda: torch.mm(a, a, out=out))
    work = dist.all_reduce(t, op=dist.ReduceOp.AVG, async_op=True)
    beside = ms(lambda: torch.mm(a, a, out=out), n=5)
    work.wait()
    print(f"\nproduct alone {alone:.3f} ms, beside {beside:.3f}: {beside / alone:.3f}")
    assert beside < 1.05 * alone


def test_4_the_copy_is_shorter_than_the_link():
    mib = 256
    own = torch.randn(mib * 2**15, device="cuda")
    out = torch.empty(8 * mib * 2**15, device="cuda")
    times = {}
    for name in ("none", "h100-nvlink"):
        sim.start(8, sim.link(name), "cuda")
        times[name] = ms(lambda: dist.all_gather_into_tensor(out, own))
        sim.stop()
    print(f"\n{8 * mib // 8} MiB: copy {times['none']:.3f} ms of {times['h100-nvlink']:.3f} modelled")
    assert times["none"] < times["h100-nvlink"]


def trained(argv, steps):
    """Allocated MiB after each step, and the step."""
    c = flags.resolve(flags.parse(f"{SMALL} {argv} --device cuda --param-dtype fp32".split()), "cuda", 8)
    step = build(c, torch.device("cuda"), 8)
    seen = []
    for _ in range(steps):
        tokens, targets = torch.randint(256, (2, 2, 16), device="cuda")
        step(tokens, targets)
        torch.cuda.synchronize()
        seen.append(torch.cuda.memory_allocated() / 2**20)
    return seen, step


def test_5_memory_does_not_grow():
    sim.start(8, sim.link("h100-nvlink"), "cuda")
    seen, _ = trained("--compile fwdbwd", 50)
    print(f"\nallocated after step 3: {seen[2]:.3f} MiB, after step 50: {seen[-1]:.3f}")
    assert seen[-1] <= seen[2]


@pytest.mark.parametrize("compile", ["none", "blocks", "fwdbwd"])
@pytest.mark.parametrize("mode", ["fully_shard", "replicate", "hybrid_shard --replicas 2"])
def test_6_gradients_are_those_of_one_process(mode, compile):
    check_gradients(mode, compile, limit=1e-4, device="cuda")


def test_7_a_captured_graph_takes_the_link_again():
    sim.start(8, sim.link("2000:1000000"), "cuda")
    t = torch.randn(8, device="cuda")

    def step():
        dist.all_reduce(t, op=dist.ReduceOp.AVG, async_op=True).wait()

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()
    took = ms(graph.replay)
    print(f"\nreplayed: {took:.3f} ms of 2 modelled")
    assert 1.99 <= took < 2.2


@pytest.mark.parametrize("wrapper", ["fsdp2", "ddp"])
def test_8_torchs_own_wrappers_run_and_overlap(wrapper):
    sim.start(8, sim.link("h100-nvlink"), "cuda")
    _, step = trained(f"--wrapper {wrapper} --compile none", 3)
    tokens, targets = torch.randint(256, (2, 2, 16), device="cuda")
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        step(tokens, targets)
        torch.cuda.synchronize()
    waits = [e for e in trace.events() if "wait_deadline" in e.name]
    print(f"\n{wrapper}: {len(waits)} collectives on the device, {sum(e.device_time for e in waits):.0f} us waiting")
    assert waits


def test_9_the_whole_command_runs(tmp_path):
    """Peak memory at N = 1, 2, 8 of ours and FSDP2, as rows; the CPU's tests of the simulated world on this torch."""
    for wrapper, compile in (("simple", "fwdbwd"), ("fsdp2", "blocks")):
        for n in (1, 2, 8):
            argv = [sys.executable, str(ROOT / "main.py"), "--world", str(n), "--steps", "8", "--depth", "2", "--width",
                    "1024", "--seqlen", "1024", "--wrapper", wrapper, "--compile", compile,
                    "--results", str(tmp_path / "rows.jsonl")]  # fmt: skip
            done = subprocess.run(argv, capture_output=True, text=True, timeout=300)
            assert done.returncode == 0, done.stderr
            print(f"\n{wrapper} N={n}: " + " | ".join(done.stdout.splitlines()[-4:-2]))
    shutdown()
