"""trainer/measuring/timeline.py: peaks of given events; what a step allocates, to the byte.

    pytest tests/test_timeline.py        # the last test of the step needs CUDA
"""

import math
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from running import on_gpu, resolved

from trainer import parallelize
from trainer.distributed import simulated_world
from trainer.distributed.launch import connect
from trainer.measuring.timeline import (
    DIP,
    GRADIENTS,
    LOGITS,
    MOMENTS,
    OTHER,
    PARAMETERS,
    PIECES,
    SAVED,
    WEIGHTS,
    WORKSPACE,
    Event,
    Sizes,
    Timeline,
    largest,
    lines,
    watch,
)
from trainer.parallelize import build, model_config

SMALL = "--depth 1 --width 64 --head-dim 16 --grouping 2 --vocab 512 --seqlen 32 --batch 6 --data random"
BT, V, D = 6 * 32, 512, 64  # V is not 4 D and BT none of both: sizes tell logits and weights apart
MIB = 2**20


pytestmark = [pytest.mark.long, pytest.mark.usefixtures("isolated")]


# ---------------------------------------------------------------------------------------------------- given events


def timeline(*story, base=None, sizes=Sizes(), marks=()):  # noqa: B008 (frozen)
    """story: (address, bytes) each, in order, one per ns from 0; a third and more are the event's other fields."""
    events = [Event(t, ptr, n, *more) for t, (ptr, n, *more) in enumerate(story)]
    return Timeline(events, list(marks), base or {}, sizes)


def test_three_peaks_highest_first_each_with_its_moment_and_pieces():
    t = timeline(
        (1, 50, "a"), (2, 20, "b"), (2, -20, "c"), (3, 30, "d"), (3, -30, "e"), (4, 60, "f"), (4, -60, "g"),
        (5, 10, "h"), (5, -10, "i"), (1, -50, "j"),
        base={PARAMETERS: 100, MOMENTS: 200},
        marks=[(0, "fwd"), (4, "bwd"), (7, "step")],
    )  # fmt: skip
    assert [(p.nbytes, p.moment) for p in t.peaks()] == [(410, "bwd, f"), (380, "fwd, d"), (370, "fwd, b")]
    fixed = dict.fromkeys(PIECES, 0) | {PARAMETERS: 100, MOMENTS: 200, SAVED: 50}
    assert [p.pieces for p in t.peaks()] == [fixed | {WORKSPACE: 60}, fixed | {SAVED: 80}, fixed | {WORKSPACE: 20}]
    assert all(sum(p.pieces.values()) == p.nbytes for p in t.peaks())
    assert [p.nbytes for p in t.peaks(most=9)] == [410, 380, 370, 360]


def test_a_wiggle_is_no_peak_of_its_own():
    fall = math.floor(DIP * 1000)
    for size, peaks in ((fall, 1), (fall + 1, 2)):
        t = timeline((1, 1000 - size), (2, size), (2, -size), (3, size), (3, -size), (1, size - 1000))
        assert len(t.peaks()) == peaks, size


def test_peaks_of_nothing():
    assert timeline().peaks() == []
    assert lines(timeline())[0].startswith("peaks of memory")


def test_frees_of_older_memory_lower_the_curve_and_are_told():
    t = timeline((1, 60 * MIB), (9, -40 * MIB), (2, 10 * MIB), (8, -1), base={OTHER: 100 * MIB})
    assert t.levels() == [160 * MIB, 120 * MIB, 130 * MIB, 130 * MIB - 1]
    assert [p.pieces[OTHER] for p in t.peaks()] == [100 * MIB, 60 * MIB]
    assert "2 blocks from before the step, 40.0 MiB, were freed in it" in lines(t)


def test_an_address_given_out_twice_was_freed_unseen():
    t = timeline((1, 60), (2, 5), (1, 30), (1, -30), (2, -5))
    assert t.levels() == [60, 65, 35, 5, 0]
    assert any(line.startswith("1 blocks were freed unseen") for line in lines(t))


def test_saved_is_what_is_alive_when_its_own_backward_begins():
    marks = [(0, "fwd"), (3, "bwd"), (5, "fwd"), (7, "bwd"), (9, "step")]
    story = (1, 8), (2, 8), (2, -8), (3, 8), (1, -8), (4, 8), (3, -8), (5, 8), (5, -8), (4, -8)
    t = timeline(*story, marks=marks)
    assert [b.piece for b in t.blocks] == [SAVED, WORKSPACE, WORKSPACE, SAVED, WORKSPACE]
    assert {b.piece for b in timeline((1, 8), (2, 8), (2, -8), (1, -8)).blocks} == {WORKSPACE}  # phases not known


def test_what_an_op_says_comes_before_lifetime_and_size():
    sizes = Sizes((8,), ("fp32",), vocab=4)
    marks = [(0, "fwd"), (9, "bwd")]
    reads = dict(
        none=(LOGITS, ()),
        right=(LOGITS, ("", "", (2, 4), "fp32")),
        other=(SAVED, ("", "", (8, 1), "fp32")),
        half=(SAVED, ("", "", (4, 4), "bf16")),
        weight=(WEIGHTS, ("", WEIGHTS)),
        norm=(LOGITS, ("", GRADIENTS)),
    )
    for name, (piece, said) in reads.items():
        t = timeline((1, 32), (1, 0, *said), *[(2, 1), (2, -1)] * 4, marks=marks, sizes=sizes)
        assert t.blocks[0].piece == piece, name
    for marks in ([], [(0, "fwd"), (0, "bwd")]):
        assert timeline((1, 32), (1, 0, "", WEIGHTS), (1, 0, "", GRADIENTS), marks=marks).blocks[0].piece == GRADIENTS
    assert timeline((1, 32, "", WEIGHTS), sizes=sizes).blocks[0].piece == WEIGHTS


def test_the_largest_buffers_have_shape_if_an_op_shows_it_piece_and_the_ops_that_allocate_and_free_them():
    t = timeline(
        (1, 4 * MIB, "a"), (2, 8 * MIB, "b, blocks.0"), (3, 8 * MIB, "b, blocks.1"),
        (1, 0, "", "", (2, MIB // 2), "fp32"), (2, -8 * MIB, "c"), (3, -8 * MIB, "c"),
        marks=[(0, "fwd"), (4, "bwd")],
    )  # fmt: skip
    assert largest(t) == [
        (2, 8 * MIB, "saved for backward; fwd, b, blocks.* -> bwd, c"),
        (1, 4 * MIB, "[2,524288] fp32; saved for backward; fwd, a -> after the step"),
    ]


def test_sizes_are_exact_on_a_cpu_and_rounded_up_on_cuda():
    for rounded, fit in ((False, [0]), (True, [0, 511])):
        sizes = Sizes(rounded=rounded)
        assert [n for n in (-1, 0, 511, 512) if sizes.fit(400 + n, 100, "fp32")] == fit
    assert sizes.fit(5 * MIB, MIB, "fp32")
    assert not sizes.fit(5 * MIB + 512, MIB, "fp32")
    assert not sizes.fit(400, 100, "int64")


# ------------------------------------------------------------------------------------------------- the trainer's step


@contextmanager
def ready(extra="", steps=1, device="cpu"):
    """(config, step, batch) of the small model, after `steps` steps."""
    c = resolved(f"{SMALL} --device {device} {extra}", device=device)
    try:
        device = connect(c, 0, 0, 1)
        step = build(c, device, c.world or 1)
        batch = [torch.randint(0, c.vocab, (c.batch * c.grad_accum, c.seqlen), device=device) for _ in range(2)]
        for _ in range(steps):
            step(*batch)
        yield c, step, batch
    finally:
        simulated_world.stop()
        if dist.is_initialized():
            dist.destroy_process_group()


def watched(extra="", steps=1):
    with ready(extra, steps) as (c, step, batch):
        count = sum(p.numel() for p in step.model.parameters())
        return *watch(c, step, *batch), count


def at(t, phase, n=0):
    """Pieces at the last event before the n-th phase of a name begins."""
    starts = [i for i, (_, name) in zip(t.starts, t.marks, strict=True) if name == phase]
    return t.pieces(starts[n] - 1)


def per_block(remat):
    """What one block saves for backward, in units of [B, T, D] fp32."""
    saved = [at(watched(f"--compile none --depth {d} --remat {remat}")[1], "bwd")[SAVED] for d in (1, 3)]
    return (saved[1] - saved[0]) / 2 / (4 * BT * D)


def test_a_block_saves_what_its_remat_leaves():
    """None: the outputs of two norms (2 and 4 BT of statistics), q, k, v (2), attention (1 and BTH), the two sums (2),
    both sides of gelu (8). both: the input of each region (2), attention."""
    small = 4 / D, 1 / 16
    assert per_block("none") == 15 + sum(small)
    assert per_block("both") == 3 + small[1]


def test_an_eager_step_to_the_byte():
    loss, t, notes, count = watched("--compile none")
    logits = 4 * BT * V
    assert [name for _, name in t.marks] == ["fwd", "bwd", "step"]
    assert t.base[PARAMETERS] == 4 * count and t.base[MOMENTS] == 8 * count  # 12 bytes per parameter
    assert t.base[GRADIENTS] == 0
    assert t.unknown == []
    highest = t.peaks()[0]
    assert highest.pieces[LOGITS] == 3 * logits
    assert highest.moment.startswith("bwd, aten::_log_softmax_backward_data")
    assert at(t, "bwd")[LOGITS] == logits  # the log-probabilities
    update = at(t, "step")
    assert update[GRADIENTS] == 4 * count
    assert update[LOGITS] == update[WEIGHTS] == 0
    assert 0 < update[SAVED] <= 16, "the loss and the labels' share"
    left = t.levels()[-1] - sum(t.base.values())
    assert 0 < left <= 16, "the loss, the norm and whether it was bad outlive the step"
    wide = [b for b in t.blocks if b.nbytes == 4 * BT * 4 * D and b.piece == SAVED]
    assert [b.where for b in wide] == ["fwd, aten::linear", "fwd, aten::gelu"]
    assert all(b.freed.startswith("bwd, ") for b in wide)
    assert "CPU" in notes[0]
    assert loss.isfinite()


def test_gathered_weights_are_those_of_the_collectives():
    """Each parameter is gathered once in forward, in bf16: its shard is cast, the whole comes out. Those of the block,
    and the norm's two, are put together and cut afterwards; embedding and head come alone."""
    _, t, _, count = watched("--compile none --world 2 --link none --param-dtype bf16")
    fwd = [b for b in t.blocks if b.piece == WEIGHTS and b.born < t.starts[1]]
    together = count - 2 * V * 64
    assert sum(b.nbytes for b in fwd) == 2 * (count * (1 + 1 / 2) + together * (1 + 1 / 2))
    assert {2 * V * D, V * D} <= {b.nbytes for b in fwd}, "embedding and head, whole and this rank's shard, in bf16"
    assert at(t, "step")[GRADIENTS] == 4 * count / 2 + 4  # fp32 shards, and the loss, which is reduced
    assert at(t, "step")[WEIGHTS] == 0


def test_casts_on_one_rank_count_as_weights():
    _, t, _, count = watched("--compile none --param-dtype bf16")
    assert sum(b.nbytes for b in t.blocks if b.piece == WEIGHTS and b.born < t.starts[1]) == 2 * count


def test_activations_of_a_parameters_shape_are_no_weights():
    """B T = V: the head's input, [V, D], is the second factor of the product that makes the head's gradient."""
    _, t, _, _ = watched(f"--compile none --batch {V // 32}")
    assert any(b.shape == (V, D) for b in t.blocks)
    assert not any(b.piece == WEIGHTS for b in t.blocks)


def test_whole_gradients_of_the_last_reduction_are_gradients():
    _, t, _, count = watched("--compile none --world 2 --link none --grad-accum 2 --accum-sync last")
    assert [name for _, name in t.marks] == ["fwd", "bwd", "fwd", "bwd", "step"]
    assert at(t, "bwd", 1)[GRADIENTS] == 4 * count


def test_ddp_keeps_its_gradients_between_steps():
    _, t, _, count = watched("--compile none --wrapper ddp", steps=2)  # its second step makes the buckets anew
    assert t.base[GRADIENTS] == 4 * count
    assert t.base[PARAMETERS] + t.base[MOMENTS] == 12 * count


def test_a_watched_step_leaves_nothing_behind():
    with ready("--compile none") as (c, step, batch):
        before = dict(step.__dict__)
        watch(c, step, *batch)
        assert before.keys() == step.__dict__.keys()
        assert {k for k in before if step.__dict__[k] is not before[k]} <= {"grad_norm", "skipped", "phase"}
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in step.model.modules())


@pytest.mark.parametrize("depth", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_compiled_code_is_seen_and_not_compiled_again(monkeypatch, depth):
    """Depth 0, embedding and head alone, compiles in half the time."""
    monkeypatch.setattr(parallelize, "model_config", lambda *args: replace(model_config(*args), depth=depth))
    with ready("--compile fwdbwd --world 2 --link none --param-dtype bf16") as (c, step, batch):
        count = sum(p.numel() for p in step.model.parameters())
        with torch._dynamo.config.patch(error_on_recompile=True):
            _, t, _ = watch(c, step, *batch)
    assert [name for _, name in t.marks] == ["fwd", "bwd", "step"]
    assert at(t, "step")[GRADIENTS] == 4 * count / 2 + 4  # and the loss, which is reduced
    saved = at(t, "bwd")
    assert 15 * depth <= saved[SAVED] / (2 * BT * D) <= 15.2 * depth + 2.5
    assert saved[LOGITS] == 2 * BT * V
    assert sum(b.nbytes for b in t.blocks if b.piece == WEIGHTS) >= 2 * count
    assert t.levels()[-1] - sum(t.base.values()) <= 16


@on_gpu
@pytest.mark.parametrize("mode", ["none", "fwdbwd"])
def test_on_cuda_the_highest_peak_is_that_of_the_allocator(mode):
    with ready(f"--compile {mode} --param-dtype bf16 --batch 64", steps=2, device="cuda") as (c, step, batch):
        _, t, _ = watch(c, step, *batch)
        assert t.peaks()[0].nbytes == torch.cuda.max_memory_allocated()
    assert at(t, "bwd")[SAVED] > 15 * 2 * 64 * 32 * D
    assert at(t, "bwd")[LOGITS] > 0


# ------------------------------------------------------------------------------------------------------------ main.py


@pytest.mark.parametrize(("steps", "counted"), [(6, 2), (2, 0)])
def test_main_explains_one_step_that_no_statistic_covers(trains, steps, counted):
    done = trains(*SMALL.split(), "--steps", steps, "--explain-memory", "--batch", 64)
    assert done.row["n"] == counted and done.row["flags"]["explain_memory"] is True
    text = done.out.splitlines()
    start = next(i for i, line in enumerate(text) if line.startswith(f"peaks of memory in step {min(4, steps)}, MiB"))
    assert text[start + 1].split()[0] == "1."
    assert "bwd, aten::_log_softmax_backward_data" in text[start + 1]
    assert "        12.0  logits" in "\n".join(text[start : start + 8])  # 3 x [64, 32, 512] fp32
    assert sum(line.startswith(f"{n}. ") for n in (1, 2, 3) for line in text) == 3
    assert sum(" x " in line and " -> " in line for line in text) == 10
    assert "[2048,512] fp32; logits; fwd, aten::cross_entropy_loss" in done.out


def test_without_the_flag_nothing_is_watched(train):
    with mock.patch("trainer.measuring.timeline.watch", side_effect=AssertionError):
        done = train("--steps", 2)
    assert done.code == 0
    assert "peaks of memory" not in done.out
