"""The first part of simple_fsdp.py by itself: compiled code needs no more of the file.

    pytest tests/test_core_alone.py        # some seconds, one process
"""

import importlib.util
from pathlib import Path

import pytest
import torch
from models_for_wrapper import Blocks, Graphs, compiled, count, fake_ranks
from torch import nn

import simple_fsdp

fake = pytest.fixture(fake_ranks)
MARK = "part 2: eager mode"


@pytest.fixture
def core(tmp_path):
    """simple_fsdp.py up to the mark, as a module."""
    torch._dynamo.reset()
    file, (head, _) = tmp_path / "core_of_simple_fsdp.py", Path(simple_fsdp.__file__).read_text().split(MARK)
    file.write_text(head.rpartition("\n")[0])
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def trained(module, mesh):
    """(loss, gradients, gathers in forward and backward, reductions) of a compiled model that `module` has wrapped."""
    torch.manual_seed(0)
    model = module.data_parallel(Blocks(3), mesh)
    backend = Graphs()
    loss = compiled(model, backend)(torch.ones(2, 4, 8))
    loss.backward()
    forward = backend.forward[-1]
    backward = backend.backward[-1]
    counts = [count(graph, "all_gather_into_tensor") for graph in (forward, backward)]
    counts.append(count(backward, "reduce_scatter_tensor"))
    return loss.item(), [p.grad.to_local() for p in model.parameters()], counts


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "collectives"), [(1, [0, 0, 0]), (4, [3, 3, 3])])  # of each block one
def test_what_the_core_alone_compiles_is_what_the_whole_file_compiles(core, fake, ranks, collectives):
    loss, gradients, counts = trained(core, fake(ranks))
    again, others, _ = trained(simple_fsdp, fake(ranks))
    assert counts == collectives
    assert ranks > 1 or (loss == again and all(map(torch.equal, gradients, others)))  # a fake group leaves garbage


def test_eager_mode_is_not_in_the_core(core, fake):
    model = core.data_parallel(nn.Linear(2, 4), fake(2))
    with pytest.raises(RuntimeError, match="mixed torch.Tensor and DTensor"):  # it reads the shard
        model(torch.ones(1, 2))
    assert not hasattr(core, "unsharded")
    assert not hasattr(core, "DRAWS")
