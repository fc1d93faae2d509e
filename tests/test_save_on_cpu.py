"""torch.autograd.graph.save_on_cpu moves what a checkpointed block keeps to the host, and no weight along with it.

    pytest tests/test_save_on_cpu.py      # no GPU; one spawn of two ranks
"""

from contextlib import nullcontext

import pytest
import torch
from harness import spawn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from simple_fsdp import data_parallel

pytestmark = pytest.mark.usefixtures("isolated")
ROWS, WIDTH, HIDDEN = 24, 16, 64
ACTIVATIONS = {(ROWS, WIDTH), (ROWS, HIDDEN)}


def noted(shapes):
    """save_on_cpu, noting the shape of whatever it moves."""
    theirs = save_on_cpu()

    def pack(t):
        shapes.append(tuple(t.shape))
        return theirs.pack_hook(t)

    return saved_tensors_hooks(pack, theirs.unpack_hook)


def gradients(mesh, around, checkpointed):
    """Gradients of two blocks, and the shapes that were moved; around: each "block", the whole "model" or nothing."""
    torch.manual_seed(0)
    blocks = [
        torch.nn.Sequential(torch.nn.Linear(WIDTH, HIDDEN), torch.nn.GELU(), torch.nn.Linear(HIDDEN, WIDTH))
        for _ in range(2)
    ]
    model = torch.nn.Sequential(*blocks)
    data_parallel(model, mesh)
    shapes = []
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    with noted(shapes) if around == "model" else nullcontext():
        for block in model:
            with noted(shapes) if around == "block" else nullcontext():
                x = checkpoint(block, x, use_reentrant=False) if checkpointed else block(x)
    x.square().mean().backward()
    return [p.grad.full_tensor().tolist() for p in model.parameters()], shapes


def every_way(mesh):
    ways = [(None, False), ("block", True), ("model", True), ("block", False)]
    return {way: gradients(mesh, *way) for way in ways}


@pytest.fixture(scope="module")
def two():
    return spawn(2, [every_way])["every_way"][0]


@pytest.mark.parametrize("around", ["block", "model"])
def test_beside_checkpoints_the_inputs_of_blocks_are_moved_and_no_weight(two, around):
    found, shapes = two[around, True]
    assert found == two[None, False][0]
    assert shapes == [(ROWS, WIDTH)] * 2


def test_without_checkpoints_whole_weights_are_moved_along(two):
    found, shapes = two["block", False]
    assert found == two[None, False][0]
    assert set(shapes) - ACTIVATIONS == {(WIDTH, HIDDEN), (HIDDEN, WIDTH)}
