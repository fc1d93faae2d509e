"""--optimizer adamw8bit: torchao's AdamW on shards trains as on one process, and any number of ranks resumes it.

    pytest tests/test_adamw8bit.py      # needs torchao; no GPU; one spawn of two ranks
"""

import os
from unittest import mock

import pytest
import torch
from harness import spawn
from saved import made, start_of, whole

from trainer.checkpoint import load as checkpoint
from trainer.checkpoint.save import Saver
from trainer.optimizer import AdamW8bit, local

pytest.importorskip("torchao")
pytestmark = pytest.mark.usefixtures("isolated")
# Rows of 256 elements and of 1024: 8 bits. UNEVEN's embedding has 129 and 128 of them.
WIDE = "--optimizer adamw8bit --width 256 --head-dim 32 --lr 0.01 --compile none --seed 1".split()
LAYOUTS = {
    "fully_shard": "", "hybrid_shard": "--mode hybrid_shard", "replicate": "--mode replicate",
    "fsdp2": "--wrapper fsdp2", "ddp": "--wrapper ddp", "async": "--save-async",
}  # fmt: skip


def folder_of(layout):
    return f"{os.environ['RUNS']}/{layout}"


def train_and_save(mesh):
    """{layout: (losses of three steps, the state after two, after three)}; the second step is saved."""
    found = {}
    for layout, argv in LAYOUTS.items():
        c, step, batches = made(2, "--batch", 2, *WIDE, *argv.split(), "--save", folder_of(layout), "--steps", 3)
        os.makedirs(c.save, exist_ok=True)
        losses = [step(*next(batches)).item() for _ in range(2)]
        with Saver(c, step, batches) as saver:
            saver.save(2)
        two = whole(step)
        losses.append(step(*next(batches)).item())
        found[layout] = losses, two, whole(step)
    return found


def resume(mesh):
    """{layout: (the state that was loaded, after one step more)}, each in new objects with other initial values."""
    found = {}
    for layout, argv in LAYOUTS.items():
        how = ["--batch", 2, *WIDE, *argv.replace("--save-async", "").split(), "--resume", folder_of(layout)]
        c, step, batches = made(2, *how, "--steps", 3, seed=5)
        checkpoint.load(start_of(c, step, batches), step)
        loaded = whole(step)
        for _ in range(2):
            next(batches)
        step(*next(batches))
        found[layout] = loaded, whole(step)
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    with mock.patch.dict(os.environ, RUNS=str(tmp_path_factory.mktemp("eight"))):
        yield spawn(2, [train_and_save, resume])


def test_two_ranks_resume_to_the_bit(runs):
    for rank in range(2):
        for layout, (_, two, three) in runs["train_and_save"][rank].items():
            loaded, after = runs["resume"][rank][layout]
            assert loaded == two, layout
            assert after == three, layout
            assert three != two


def test_moments_have_eight_bits_and_the_rest_has_fp32(runs):
    _, two, _ = runs["train_and_save"][0]["fully_shard"]
    assert two["m.emb.weight"][:2] == ("torch.uint8", torch.Size([257, 256]))
    assert two["v_scale.emb.weight"][:2] == ("torch.float32", torch.Size([257, 1]))
    assert two["m.norm.weight"][0] == "torch.float32" and "m_scale.norm.weight" not in two


def test_one_process_trains_alike_and_resumes_to_the_bit(runs, alone):
    c, step, batches = made(1, "--batch", 4, *WIDE)
    one = [step(*next(batches)).item() for _ in range(3)]
    c, step, batches = made(1, "--batch", 4, *WIDE[2:])
    adamw = [step(*next(batches)).item() for _ in range(3)]
    assert one != adamw and one == pytest.approx(adamw, abs=2e-3)
    for layout, (losses, two, _) in runs["train_and_save"][0].items():
        assert losses == pytest.approx(one, abs=2e-3), layout
        c, step, batches = made(1, "--batch", 4, *WIDE, "--resume", folder_of(layout), "--steps", 3, seed=5)
        checkpoint.load(start_of(c, step, batches), step)
        assert whole(step) == two, layout


def test_a_refused_step_changes_no_bit(alone):
    c, step, batches = made(1, "--batch", 4, *WIDE)
    step(*next(batches))
    before = whole(step)
    optimizer = step.optimizer
    grads = [torch.full_like(local(p.detach()), torch.nan) for p in optimizer.params]
    optimizer.step(grads, torch.ones(()))
    assert whole(step) == before
    optimizer.step([g.nan_to_num(1.0) for g in grads], torch.zeros(()))
    assert whole(step) != before


def test_a_rank_without_rows_and_rows_of_no_whole_block(alone):
    """By torch's rule the last of ranks may have no rows: of one matrix [16, 512] on 32 ranks."""
    odd = torch.nn.Parameter(torch.ones(32, 130))
    whole = torch.nn.Parameter(torch.ones(16, 512))
    optimizer = AdamW8bit([whole, odd], 0.1)
    assert [kind for kind, *_ in optimizer.moments()] == ["m", "m_scale", "v", "v_scale", "m", "v"]
    with mock.patch("trainer.optimizer.local", lambda p: p[:0] if p.shape == (16, 512) else p):
        optimizer = AdamW8bit([whole, odd], 0.1)
    kinds = [(kind, t.dtype, [*t.shape]) for kind, p, t in optimizer.moments() if p is whole]
    assert kinds[:2] == [("m", torch.uint8, [0, 512]), ("m_scale", torch.float32, [0, 2])]
    optimizer.step([torch.ones(0, 512), torch.ones(32, 130)], torch.zeros(()))
    assert (odd < 1).all() and (whole == 1).all()


def test_without_torchao_the_extra_is_named():
    with mock.patch.dict("sys.modules", {"torchao.optim": None}), pytest.raises(ValueError, match="'.\\[lowbit\\]'"):
        AdamW8bit([torch.nn.Parameter(torch.ones(2))], 0.1)
