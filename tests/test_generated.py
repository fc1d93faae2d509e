"""The order of collectives and the bytes alive in generated code, on the installed torch: what every version must keep.

    pytest tests/test_generated.py                       # eight ranks that are not there; no GPU, no g++
    pytest tests/test_generated.py -m "slow or not slow"

FX graphs cannot tell: Inductor schedules again behind them. What is expected follows from the number of blocks.
"""

import functools
import re

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.distributed as dist
from generated import GATHERED, GRADIENTS, Kernel, observe, read, small
from harness import ONE_GRAPH
from running import module, needs_triton
from torch import nn
from torch.distributed import _functional_collectives as funcol
from torch.testing._internal.distributed.fake_pg import FakeStore

from overlap import DISABLED_INDUCTOR_PASSES, compile_options
from simple_fsdp import data_parallel

pytestmark = pytest.mark.long

DEPTH = 4
BUCKETS = DEPTH + 2  # embedding, a block each, norm and head, which start and are waited for together
NORM = 128  # elements of the last norm
COPIED = 4 * (torch.__version__ < (2, 13))  # bytes an element: older ones hold the head's fp32 gradient once more


@pytest.fixture(scope="module", autouse=True)
def group():
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    yield
    torch._dynamo.reset()
    dist.destroy_process_group()


@functools.cache
def found(compile, mode, ahead=1, reshard=True):
    """(what the code does, elements of a block, of a block's matrices, of the embedding)"""
    model, run = small(compile, mode, DEPTH, reshard=reshard, ahead=ahead)
    block = [*model.blocks[0].parameters()]
    matrices = sum(p.numel() for p in block if p.ndim == 2)
    return read(run, model), sum(p.numel() for p in block), matrices, model.emb.weight.numel()


def only(symbols, order):
    return "".join(c for c in order if c in symbols)


def ahead_by(ahead, start, n):
    """n collectives of which so many have started when one is waited for; gathers are waited for before the next one
    starts, reductions when the next one has started."""
    both = f"{start.lower()}{start}" if start == "G" else f"{start}{start.lower()}"
    return start * ahead + both * (n - ahead) + start.lower() * ahead if n else ""


def doubled(order, at):
    """With the norm beside the head: of each letter that with this number twice."""
    return "".join(2 * c if order[:i].count(c) == at else c for i, c in enumerate(order))


def slow(*case, marks=()):
    return pytest.param(*case, marks=[pytest.mark.slow, *marks])


CASES = [
    ("fwdbwd", "fully_shard", 1), slow("fwdbwd", "replicate", 1), slow("fwdbwd", "hybrid_shard", 1),
    slow("fwdbwd", "fully_shard", 2),
    pytest.param("step", "fully_shard", 1, marks=ONE_GRAPH), slow("fwdbwd", "hybrid_shard", 2),
    slow("step", "replicate", 1, marks=[ONE_GRAPH]),
    slow("step", "hybrid_shard", 1, marks=[ONE_GRAPH]),
]  # fmt: skip


@pytest.mark.parametrize(("compile", "mode", "ahead"), CASES)
def test_one_bucket_per_block_in_order_and_few_bytes_alive(compile, mode, ahead):
    code, block, matrices, embedding = found(compile, mode, ahead)
    reduction = "A" if mode == "replicate" else "R"
    gathers = 0 if mode == "replicate" else BUCKETS
    if compile == "step":  # norm and head are kept: their backward comes at once
        assert only("Gg", code.order[0]) == doubled(ahead_by(ahead, "G", gathers and gathers + DEPTH), DEPTH + 1), code
    else:
        again = max(gathers - 1, 0)  # the embedding is not needed
        # Backward needs the norm only after the last block's gather has started.
        backward = ahead_by(ahead, "G", again).replace("gG", "gGg", 1)
        expected = [doubled(ahead_by(ahead, "G", gathers), DEPTH + 1), backward and "G" + backward]
        assert [only("Gg", order) for order in code.order] == expected, code
    for symbol in "RA" if mode == "hybrid_shard" else reduction:  # there shards are reduced across replicas afterwards
        assert only(symbol + symbol.lower(), code.order[-1]) == doubled(ahead_by(ahead, symbol, BUCKETS), 0), code
        late = re.search(f"{symbol}m+{symbol.lower()}", only(f"{symbol}{symbol.lower()}m", code.order[-1]))
        assert not late, (late, code)  # it is waited for as soon as the next one has started
        exposed = 2 + ahead * (symbol == "A" and mode == "hybrid_shard")  # which waits for two in a row
        assert code.gaps(symbol).count(0) <= exposed, code
    if gathers:
        assert code.gaps("G").count(0) == 2, code  # the embedding and the first block
        weights = (ahead + 1) * 2 * block  # this block's, and the next one's, in bf16
        norm = 64 * (compile == "step")  # the last one is kept from forward until its backward
        assert weights <= code.alive(GATHERED) <= weights + 2 * (embedding + norm), code
    # Buckets in fp32: the one that is waited for later and the one that starts; and a block's products in bf16.
    gradients = (ahead + 1) * 4 * block + 2 * matrices + COPIED * embedding
    if mode == "fully_shard":
        assert code.alive(GRADIENTS) == gradients, code
    else:  # what is all-reduced is copied once more; with hybrid_shard shards are, a fourth of a bucket
        more = (ahead + 2) * block if mode == "hybrid_shard" else 4 * block
        # Two ahead, the norm's bucket in fp32 stays beside the blocks', and twice its shards, a fourth of that.
        norm = 6 * NORM * (mode == "hybrid_shard" and ahead > 1)
        assert code.alive(GRADIENTS) <= gradients + more + norm, code


@pytest.mark.slow
def test_less_ahead_holds_one_bucket_less():
    code, block, matrices, embedding = found("fwdbwd", "fully_shard", 0.3)
    assert code.alive(GRADIENTS) == 4 * block + 2 * matrices + COPIED * embedding, code
    assert [len(only("G", order)) for order in code.order] == [BUCKETS + 1, BUCKETS], code
    assert code.gaps("R").count(0) == code.gaps("G").count(0) == 2 and max(code.gaps("R")) < 4, code


@pytest.mark.slow
def test_without_reshard_backward_gathers_nothing_and_all_stays():
    code, block, _, _ = found("fwdbwd", "fully_shard", reshard=False)
    assert only("Gg", code.order[0]) == doubled(ahead_by(1, "G", BUCKETS), DEPTH + 1) and "G" not in code.order[1], code
    assert code.alive(GATHERED) > DEPTH * 2 * block, code


@pytest.mark.slow
def test_compiled_blocks_gather_one_unit_ahead_and_wait_for_reductions_one_unit_late():
    """Around their code: embedding, blocks, norm and head together. The last product is the head's."""
    code = found("blocks", "fully_shard")[0]
    assert code.order[0] == "GgG" + "gGmm" * (DEPTH - 1) + "gGGmmggm", code
    assert code.order[1] == "GgGGmmRgRgGmmmmrr" + "RgGmmmmr" * (DEPTH - 2) + "RgmmmmrRrRr", code


UNDONE = [
    {"aten_distributed_optimizations.enable_simple_overlap": True}, {"bucket_all_gathers_fx": "all"},
    {"bucket_reduce_scatters_fx": "all"},
    {"reorder_for_compute_comm_overlap": True,
     "reorder_for_compute_comm_overlap_passes": ["reorder_compute_for_overlap", "sink_waits", "raise_comms"]},
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("options", UNDONE, ids=" ".join)
def test_what_is_switched_on_beside_our_options_is_seen_and_told(options):
    """Each undoes what our options do, which the reader sees, and a warning names it."""
    if not all(hasattr(inductor_config, name) for name in options):
        pytest.skip("this torch lacks it")
    model, run = small("fwdbwd", depth=DEPTH, options=options)
    with pytest.warns(UserWarning, match=f"overlap: {next(iter(options))}.*: set beside compile_options()"):
        code = read(run, model)
    usual = found("fwdbwd", "fully_shard")[0]
    assert code.order != usual.order, code
    assert max(code.alive(kind) - usual.alive(kind) for kind in (GATHERED, GRADIENTS)) > 0, code


TOLERATED = dict(reorder_for_locality_in_training=True, allow_buffer_reuse=False, inplace_buffers=False,
                 dedup_reduce_scatters=True, memory_planning=True, combo_kernels=True)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("settings", [
    dict(reorder_for_compute_comm_overlap=True, bucket_all_gathers_fx="all", reorder_for_peak_memory=True), TOLERATED,
], ids=["of collectives", "of memory"])  # fmt: skip
def test_global_settings_of_others_change_neither_order_nor_bytes(settings):
    with inductor_config.patch({name: on for name, on in settings.items() if hasattr(inductor_config, name)}):
        model, run = small("fwdbwd", depth=DEPTH)
        code = read(run, model)
    usual = found("fwdbwd", "fully_shard")[0]
    assert [only("GgRr", order) for order in code.order] == [only("GgRr", order) for order in usual.order], code
    for kind in (GATHERED, GRADIENTS):
        assert code.alive(kind) == usual.alive(kind), code


def test_a_version_is_given_only_the_options_that_it_has():
    torch.compile(lambda: None, options=dict(DISABLED_INDUCTOR_PASSES))  # raises for an unknown one
    simple = "aten_distributed_optimizations.enable_simple_overlap"
    assert (simple in DISABLED_INDUCTOR_PASSES) == (torch.__version__ >= (2, 14))
    assert DISABLED_INDUCTOR_PASSES["reorder_for_peak_memory"] is False


def test_another_pass_that_would_be_replaced_is_refused():
    model = data_parallel(nn.Sequential(nn.Linear(8, 8)), dist.init_device_mesh("cpu", (8,)))
    with inductor_config.patch(post_grad_custom_post_pass=lambda graph: None):
        with pytest.raises(ValueError, match="custom_post_pass is set, and compile_options.. would replace it"):
            compile_options(model)


# --------------------------------------------------------------------------------------------------- the reader itself


def test_the_reader_sees_what_lives_from_when_to_when():
    name = dist.group.WORLD.group_name
    x = torch.randn(16, 32)

    def run(mark):
        whole = funcol.wait_tensor(torch.ops._c10d_functional.all_gather_into_tensor(x, 8, name))  # [128, 32]
        parts = [t.clone() for t in whole.chunk(2)]  # copies of what was gathered
        y = parts[0] @ x.T  # [64, 16]
        del whole
        gradient = x.T @ x  # [32, 32], as large as the parameter
        mark()
        started = torch.ops._c10d_functional.reduce_scatter_tensor(gradient, "avg", 8, name)
        del gradient  # alive until it is waited for
        parts.clear()
        y @ y.T
        funcol.wait_tensor(started)

    code = observe(run, nn.Linear(32, 32))
    assert code.order == ["Ggmm", "Rmr"]
    assert code.gaps("G") == [0]
    assert code.gaps("R") == [1]
    assert code.alive(GATHERED) == 2 * 128 * 32 * 4  # the whole and its copies
    assert code.alive(GRADIENTS) == 32 * 32 * 4
    kept = [c for c in code.contents if c.kind == GRADIENTS]
    copies = [c for c in code.contents if c.kind == GATHERED]
    assert len(kept) == 1
    assert all(c.end < kept[0].end for c in copies)


@pytest.mark.parametrize(("source", "pointers"), [
    ('extern "C"  void  kernel(const float* in_ptr0,\n  at::BFloat16* out_ptr0,\n  const int64_t ks0)\n{', "in out"),
    ("def triton_poi_fused_0(in_out_ptr0, in_ptr0, out_ptr1, xnumel, XBLOCK : tl.constexpr):", "in_out in out"),
])  # fmt: skip
def test_a_kernel_s_pointers_tell_what_it_reads_and_writes(source, pointers):
    assert Kernel(source).pointers == [f"{name}_ptr" for name in pointers.split()]


# ------------------------------------------------------------------------------------------------- code for a GPU

ON_GPU = """
import sys
sys.path.insert(0, "tests")
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from generated import Kernel, observe
from trainer import config as flags
from lab.profiling import gpu_code

gpu_code.pretend("sm_90")
dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
line = "--depth 4 --width 128 --head-dim 32 --vocab 512 --seqlen 96 --batch 2 --remat both"
c = flags.resolve(flags.parse(line.split()), "cuda", 8)
gpu_code.Kernel.launched = lambda kernel, args: Kernel(kernel.source)(*args)
with gpu_code.simulated(c, 8, "sm_90") as (step, tokens, codes):
    def run(mark):
        with step.watch_phases(lambda phase, grads: mark()):
            step(tokens, tokens)
    found = observe(run, step.model)
block = [p for name, p in step.model.named_parameters() if name.startswith("blocks.0.")]
print(*found.order, sep="|")
print(found.alive("gathered"), found.alive("gradients"), sum(p.numel() for p in block),
      sum(p.numel() for p in block if p.ndim == 2))
"""


@pytest.mark.slow
@needs_triton
def test_code_for_a_gpu_has_the_same_order_and_bytes():
    done = module(ON_GPU)
    assert done.code == 0, done.err
    order, numbers = done.out.splitlines()[-2:]
    forward, backward = order.split("|")[1:3]
    gathered, gradients, block, matrices = map(int, numbers.split())
    assert only("Gg", forward) == doubled(ahead_by(1, "G", BUCKETS), DEPTH + 1), forward
    assert only("Gg", backward) == "G" + ahead_by(1, "G", BUCKETS - 1).replace("gG", "gGg", 1), backward
    assert only("Rr", backward) == doubled(ahead_by(1, "R", BUCKETS), 0), backward
    assert 4 * block <= gathered <= 4 * block + 2 * 512 * 128, numbers
    assert gradients <= 2 * 4 * block + 2 * matrices + 512, numbers
    assert re.search("m", forward)
