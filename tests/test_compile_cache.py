"""One cache directory, several settings and meshes: no compiled code is taken for another's. Fake group, real code."""

import uuid
from concurrent.futures import ProcessPoolExecutor

import torch
import torch.distributed as dist
from harness import processes, start_server
from torch import nn
from torch._dynamo.utils import counters
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from overlap import compile_options
from simple_fsdp import data_parallel


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


def mesh_of_two(groups_before=0, rank=0):
    """One dimension of a 2 x 2 mesh; the name of its group counts the groups made before."""
    dist.init_process_group("fake", rank=rank, world_size=4, store=FakeStore())
    for _ in range(groups_before):
        dist.new_group([0, 3])
    return dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))["y"]


def step(mesh, *, reshard=True, rows=8, options=compile_options) -> tuple[list, list, bool]:
    """(collectives of forward, of backward, came from the cache) of a step compiled in this process' cache."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model = data_parallel(nn.Linear(8, rows, bias=False), mesh, reshard_after_forward=reshard)
    x, g = torch.ones(2, 8, requires_grad=True), torch.ones(2, rows)
    f = torch.compile(lambda x: model(x), fullgraph=True, options=options(model))
    f(x).backward(g)
    with Collectives() as forward:
        y = f(x)
    with Collectives() as backward:
        y.backward(g)
    return forward.seen, backward.seen, bool(counters["aot_autograd"]["autograd_cache_hit"])


def nobody_elses() -> str:
    """What makes the entries of one test its own: a fresh cache directory would be without the compiler's headers."""
    return str(uuid.uuid4())


def test_reshard_toggled_on_a_warm_cache_changes_the_graph():
    before, torch.compiler.config.cache_key_tag = torch.compiler.config.cache_key_tag, nobody_elses()
    mesh = mesh_of_two()
    try:
        runs = [step(mesh, reshard=reshard) for reshard in (True, False, True, False)]
    finally:
        torch.compiler.config.cache_key_tag = before  # monkeypatch would hide the entry for good
        torch._dynamo.reset()
        dist.destroy_process_group()
    gathers = [sum("gather" in name for name, _ in backward) for _, backward, _ in runs]
    assert gathers == [1, 0, 1, 0]
    assert [hit for *_, hit in runs] == [False, False, True, True]


def in_a_process_of_its_own(tag, groups_before, rank):
    torch.compiler.config.cache_key_tag = tag
    mesh = mesh_of_two(groups_before, rank)
    return mesh.get_group().group_name, step(mesh, rows=5, options=lambda model: None)


def test_two_meshes_and_two_ranks_in_one_cache_directory_do_not_mix():
    """The same ranks under another group's name, as after any change to what a program sets up before its mesh; and
    another rank, whose shard has 2 rows instead of 3. AOTAutograd's key lacks both: without what data_parallel adds to
    it, the second run uses the first one's group and the third fails on the first one's shapes."""
    runs, tag = [], nobody_elses()
    start_server()
    for groups_before, rank in ((0, 0), (2, 0), (0, 1), (0, 0)):
        with ProcessPoolExecutor(1, mp_context=processes) as one:
            run = one.submit(in_a_process_of_its_own, tag, groups_before, rank)
            runs.append(run.result(timeout=200))
    assert runs[0][0] == runs[2][0] == runs[3][0] != runs[1][0]
    for name, (forward, backward, _) in runs:
        assert {group for _, group in forward + backward} == {name}
    assert [hit for _, (*_, hit) in runs] == [False, False, False, True]
