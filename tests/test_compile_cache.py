"""One cache directory, several settings and meshes: no compiled code is taken for another's. Fake group, real code."""

import uuid
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
import torch.distributed as dist
from harness import processes, start_server
from torch import nn
from torch._dynamo.utils import counters
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from overlap import compile_options
from simple_fsdp import data_parallel

pytestmark = pytest.mark.long


class Collectives(TorchDispatchMode):
    """(name, group) of every collective that runs."""

    def __init__(self):
        super().__init__()
        self.seen = []

    @classmethod
    def is_infra_mode(cls):  # or compiled code would not run inside it
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "_c10d_functional" and "wait" not in func.name():
            self.seen.append((func.name(), args[-1]))
        return func(*args, **(kwargs or {}))


def mesh_of_four(groups_before=0, rank=0):
    """2 x 2; the names of its groups count the groups made before."""
    dist.init_process_group("fake", rank=rank, world_size=4, store=FakeStore())
    for _ in range(groups_before):
        dist.new_group([0, 3])
    return dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))


def step(mesh, *, reshard=True, rows=8, options=compile_options):
    """(collectives of forward, of backward, came from the cache) of a step compiled in this process' cache."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    mode = "hybrid_shard" if mesh.ndim == 2 else "fully_shard"
    model = data_parallel(nn.Linear(8, rows, bias=False), mesh, mode, reshard_after_forward=reshard)
    x = torch.ones(2, 8, requires_grad=True)
    g = torch.ones(2, rows)
    f = torch.compile(lambda x: model(x), fullgraph=True, options=options(model))
    f(x).backward(g)
    with Collectives() as forward:
        y = f(x)
    with Collectives() as backward:
        y.backward(g)
    return forward.seen, backward.seen, bool(counters["aot_autograd"]["autograd_cache_hit"])


def nobody_elses():
    """What makes the entries of one test its own: a fresh cache directory would be without the compiler's headers."""
    return str(uuid.uuid4())


def test_reshard_toggled_on_a_warm_cache_changes_the_graph():
    before, torch.compiler.config.cache_key_tag = torch.compiler.config.cache_key_tag, nobody_elses()
    mesh = mesh_of_four()["y"]
    try:
        runs = [step(mesh, reshard=reshard) for reshard in (True, False, True, False)]
    finally:
        torch.compiler.config.cache_key_tag = before  # monkeypatch would hide the entry for good
        torch._dynamo.reset()
        dist.destroy_process_group()
    gathers = [sum("gather" in name for name, _ in backward) for _, backward, _ in runs]
    assert gathers == [1, 0, 1, 0]
    assert [hit for *_, hit in runs] == [False, False, True, True]


def of_one_dimension(tag, groups_before, rank):
    torch.compiler.config.cache_key_tag = tag
    mesh = mesh_of_four(groups_before, rank)["y"]
    return mesh.get_group().group_name, step(mesh, rows=5, options=lambda model: None)


def of_two_dimensions(tag, groups_before, rank):
    torch.compiler.config.cache_key_tag = tag
    mesh = mesh_of_four(groups_before, rank)
    return [group.group_name for group in mesh.get_all_groups()], step(mesh, rows=5)


def in_processes_of_their_own(check, *settings):
    tag = nobody_elses()
    runs = []
    start_server()
    for setting in settings:
        with ProcessPoolExecutor(1, mp_context=processes) as one:
            runs.append(one.submit(check, tag, *setting).result(timeout=200))
    return runs


def test_two_meshes_and_two_ranks_in_one_cache_directory_do_not_mix():
    """The same ranks under another group's name, as after any change to what a program sets up before its mesh; and
    another rank, whose shard has 2 rows instead of 3. AOTAutograd's key lacks both: without what data_parallel adds to
    it, the second run uses the first one's group and the third fails on the first one's shapes."""
    runs = in_processes_of_their_own(of_one_dimension, (0, 0), (2, 0), (0, 1), (0, 0))
    assert runs[0][0] == runs[2][0] == runs[3][0] != runs[1][0]
    for name, (forward, backward, _) in runs:
        assert {group for _, group in forward + backward} == {name}
    assert [hit for _, (*_, hit) in runs] == [False, False, False, True]


@pytest.mark.slow
def test_hybrid_shard_is_found_again_and_not_taken_for_that_of_other_groups():
    runs = in_processes_of_their_own(of_two_dimensions, (0, 0), (2, 0), (0, 0))
    assert runs[0][0] == runs[2][0] != runs[1][0]
    for (across, within), (forward, backward, _) in runs:
        seen = [(name.split("::")[1].rstrip("_"), group) for name, group in forward + backward]
        gather = ("all_gather_into_tensor", within)
        scatter = ("reduce_scatter_tensor", within)
        assert seen == [gather, gather, scatter, ("all_reduce", across)]
    assert [hit for _, (*_, hit) in runs] == [False, False, True]
