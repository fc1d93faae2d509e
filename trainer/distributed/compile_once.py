"""Ranks that would compile the same code compile it once: one does, the others wait and find it in the cache.

    with compile_once(device, group):      # on all ranks, around the first step; group: as of control_group()
        loss = step(tokens, targets)

The first rank of a kind (device, CPU instructions, process groups) compiles, forward and backward before either runs;
ranks that have its cache directory wait for it, and the first rank of each other directory is sent the artifacts.
A graph is shared only if nothing in it knows the rank, which AOTAutograd's key does not tell: see `described`. Every
other graph, uneven shards and other Inductor options than overlap.py's are compiled by each rank, as without this.

Meanwhile Python looks for garbage less often: it would walk, again and again, graphs that are all in use. Dynamo guards
what is shared, such as the parameters' mesh, in C++: it would write a Python function for it. On a CPU other time that
makes no code is saved, too: see `ready` and `kernels_later`.
"""

import functools
import gc
import os
import re
import secrets
import socket
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from contextvars import copy_context
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch._dynamo import config as dynamo
from torch._functorch import config as functorch
from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache, check_cacheable
from torch._inductor import compile_fx as inductor
from torch._inductor import config as inductor_config
from torch._inductor import cpu_vec_isa
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import CppPythonBindingsCodeCache
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch.compiler import config as cache_config
from torch.distributed.tensor import DTensor, Shard

from overlap import OFF
from trainer.distributed.control import Group

BEGIN_S = 120.0  # how long a rank waits for another to begin compiling: then it compiles
END_S = 1200.0  # and to end
POLL_S = 0.2
ALLOCATIONS = 50_000  # between collections of Python's garbage; its default is 700
# Sic; left alone where the next one is on, which torch 2.13 has.
PYTHON_GUARDS = "use_lamba_guard_for_object_aliasing"
# off: with it guards may be skipped, whether these is not known.
SKIPS_GUARDS = "use_recursive_dict_tags_for_guards"
PIECE = 4 << 20  # bytes; torch's store takes 8 MiB at once
OVERLAP = "post_grad_custom_post_pass"  # the option that overlap.py sets
_all_isas = cpu_vec_isa.valid_vec_isa_list.__wrapped__  # which would keep its first result
PLAIN = Tensor | int | float | torch.SymInt | torch.SymFloat | torch.SymBool | None  # not a mesh


def _of_rank(node: fx.Node, value: Any) -> bool:
    """Whether what this node does to DTensors may depend on the rank; to gather and to reduce-scatter does not."""
    if node.op == "placeholder":
        even = lambda i, p: type(p) is Shard and value.shape[p.dim] % value.device_mesh.size(i) == 0  # noqa: E731
        return not all(p.is_replicate() or even(i, p) for i, p in enumerate(value.placements))
    name = str(node.target)
    if name == "to_local":  # its backward would cut
        return value.requires_grad
    ours = (
        re.fullmatch(r"simple_fsdp\.gather_(unit_)?\d\S*", name)
        or name == "tag_activation_checkpoint"
    )
    return not (ours or node.target is torch.autograd.grad or "getitem" in name)


def described(gm: fx.GraphModule, options: dict | None) -> str | None:
    """What is compiled, as text; None if ranks may need different code for it, or torch would not cache it. Dynamo's
    graph holds the rank as a number where it computes with one; but a DTensor is cut up by code that is made later."""
    try:
        check_cacheable(gm)
    except BypassAOTAutogradCache:
        return None
    others = {name: value for name, value in (options or {}).items() if name != OVERLAP}
    if not others.items() <= OFF.items():  # torch's own buckets know the rank
        return None
    told = []
    for graph in (module.graph for module in gm.modules() if isinstance(module, fx.GraphModule)):
        for node in graph.nodes:
            value, *more = [n.meta.get("example_value") for n in (node, *node.all_input_nodes)]
            if node.op == "placeholder" and not isinstance(value, PLAIN):
                return None
            if (
                node.op != "output"
                and any(isinstance(v, DTensor) for v in (value, *more))
                and _of_rank(node, value)
            ):
                return None
            told.append(
                f"{node.format_node()} {value.shape, value.dtype}"
                if isinstance(value, Tensor)
                else ""
            )
    return "\n".join(told)


@functools.cache
def first_isa() -> list:
    """The CPU's instruction set that Inductor takes. It would try all, each by compiling and loading libraries."""
    for isa in cpu_vec_isa.supported_vec_isa_list:
        with patch.object(cpu_vec_isa, "supported_vec_isa_list", [isa]):
            if found := _all_isas():
                return found
    return []


@contextmanager
def ready(device: torch.device) -> Iterator[None]:
    """Inside it a thread finds the instruction set and compiles Inductor's C++ header while Inductor still traces. Not
    where a user names the set, which need not be the first."""
    if (
        device.type != "cpu"
        or os.environ.get("ATEN_CPU_CAPABILITY")
        or inductor_config.cpp.simdlen is not None
    ):
        yield
        return
    empty = (
        '#include <torch/csrc/inductor/cpp_prefix.h>\nextern "C" void kernel() {} // at::vec::\n'
    )
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(copy_context().run, first_isa)
        with patch.object(cpu_vec_isa, "valid_vec_isa_list", found.result):
            # All but the kernel, of which nothing is compiled.
            header = CppPythonBindingsCodeCache.load_pybinding_async
            pool.submit(copy_context().run, lambda: header([], empty, submit_fn=lambda work: None))
            yield


@contextmanager
def kernels_later(device: torch.device) -> Iterator[None]:
    """Inside it, where nothing that is compiled may run, Inductor does not wait for the C++ compiler but for its end:
    so backward is lowered while forward's kernels are compiled. Not for CUDA, whose kernels go into the cache."""
    waits, later = [], patch.object(AsyncCompile, "wait", lambda *call: waits.append(call))
    with later if device.type == "cpu" else nullcontext():
        yield
    for call in waits:
        AsyncCompile.wait(*call)


class _Sharing:
    """Stands in for Inductor's compile_fx. device: of this rank. leader: the rank to wait for, None: this one compiles.
    fetch: the leader has another directory. send: another directory waits for what this rank compiles."""

    def __init__(
        self,
        device: torch.device,
        store: dist.Store,
        rank: int,
        leader: int | None,
        fetch: bool,
        send: bool,
    ):
        self.device = device
        self.store = store
        self.rank = rank
        self.leader = leader
        self.fetch = fetch
        self.send = send
        self.plain = inductor.compile_fx
        self.count = 0

    def compile_fx(self, gm: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        inductor.compile_fx = self.plain  # it calls itself
        try:
            text = described(gm, kwargs.get("config_patches"))
            with nullcontext() if text is None else self.turn(str(zlib.crc32(text.encode()))):
                return self.plain(gm, *args, **kwargs)
        finally:
            inductor.compile_fx = self.compile_fx

    @contextmanager
    def turn(self, digest: str) -> Iterator[None]:
        """Begins when it is this rank's turn to compile, or to find what the leader has compiled."""
        self.count = self.count + 1
        tag = cache_config.cache_key_tag
        cache_config.cache_key_tag = _without_rank(tag)
        try:
            with ready(self.device), kernels_later(self.device):
                with suppress(Exception):  # of the store: this rank must compile in any case
                    self.store.set(f"begin {self.rank} {self.count}", digest)
                    self.wait(digest)
                # It is in the key: on all ranks.
                with functorch.patch(force_non_lazy_backward_lowering=True):
                    yield
        finally:
            cache_config.cache_key_tag = tag
            with suppress(Exception):
                self.end()

    def wait(self, digest: str) -> None:
        """Returns when the leader has compiled this, compiles something else, or cannot be waited for any longer."""
        begin, end = (f"{what} {self.leader} {self.count}" for what in ("begin", "end"))
        begun = False
        until = time.monotonic() + BEGIN_S
        while self.leader is not None and not self.store.check([end]):
            if not begun and self.store.check([begin]):
                begun = True
                until = time.monotonic() + END_S
                if self.store.get(begin).decode() != digest:
                    return
            if time.monotonic() > until:
                self.leader = None  # nor for what it compiles later
            time.sleep(POLL_S)
        if self.leader is not None and self.fetch:
            pieces = range(int(self.store.get(end)))
            torch.compiler.load_cache_artifacts(
                b"".join(self.store.get(f"{self.count} {i}") for i in pieces)
            )

    def end(self) -> None:
        """Tells those who wait that this rank has compiled, with the artifacts for other directories."""
        data = (torch.compiler.save_cache_artifacts() or [b""])[0] if self.send else b""
        pieces = range(0, len(data), PIECE)
        for i, start in enumerate(pieces):
            self.store.set(f"{self.count} {i}", data[start : start + PIECE])
        self.store.set(f"end {self.rank} {self.count}", str(len(pieces)))


def _without_rank(tag: str) -> str:
    """simple_fsdp's tag as all ranks of its groups have it: backend:group:rank/size -> backend:group/size."""
    return re.sub(r"(:[^:\s]+):\d+(/\d+)(?!\S)", r"\1\2", tag)


@contextmanager
def compile_once(device: torch.device, group: Group) -> Iterator[None]:
    """Inside it equal graphs are compiled once. Collective, as it begins. device: of this rank; group: of all ranks
    (None: there is one). Nobody waits for ever: not for a rank that compiles other graphs, fails or has died."""
    before = gc.get_threshold()
    gc.set_threshold(before[0] and max(before[0], ALLOCATIONS), *before[1:])  # 0: it was off
    try:
        sooner = hasattr(dynamo, PYTHON_GUARDS) and not getattr(dynamo, SKIPS_GUARDS, True)
        with dynamo.patch({PYTHON_GUARDS: False} if sooner else {}), _shared(device, group):
            yield
    finally:
        gc.set_threshold(*before)


@contextmanager
def _shared(device: torch.device, group: Group) -> Iterator[None]:
    if group is None or group.size() == 1:
        with ready(device):
            yield
        return
    rank = dist.get_rank(group)
    everyone = [None] * dist.get_world_size(group)
    usable = functorch.enable_autograd_cache and inductor_config.fx_graph_cache
    usable = usable and not cache_config.force_disable_caches and not inductor_config.max_autotune
    usable = usable and torch.__version__ >= (2, 13)  # 2.11 caches no graph with a gather
    kind = (
        str(device),
        torch.backends.cpu.get_cpu_capability(),
        _without_rank(cache_config.cache_key_tag),
        usable,
    )
    own = kind, (socket.gethostname(), cache_dir()), secrets.token_hex(8)
    dist.all_gather_object(everyone, own, group=group)
    kinds = [each[0] for each in everyone]
    places = [each[:2] for each in everyone]
    # Of all, of those who share this directory.
    source = kinds.index(kind)
    first = places.index(own[:2])
    if not usable or kinds.count(kind) == 1:
        yield
        return
    store = dist.PrefixStore(
        f"compile once {everyone[0][2]} {source}", dist.distributed_c10d._get_default_store()
    )
    leader = None if rank == source else source if rank == first else first
    send = rank == source and any(
        k == kind and p != own[:2] for k, p in zip(kinds, places, strict=True)
    )
    sharing = _Sharing(device, store, rank, leader, leader == source != first, send)
    inductor.compile_fx = sharing.compile_fx
    try:
        yield
    finally:
        inductor.compile_fx = sharing.plain
