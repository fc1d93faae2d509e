"""Blocks of models of any shape: what overlap.py takes for them, and what that makes of the collectives.

A fake process group of eight ranks. One capture of each model: its graphs as plain compilation leaves them, and copies
with one bucket per block and with one bucket for all. Nothing is generated.
"""

import copy
import warnings
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch._inductor.compile_fx as compile_fx
import torch._inductor.config as inductor_config
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import overlap
from overlap import blocks_of, compile_options, describe_blocks
from simple_fsdp import data_parallel
from trainer.profiling.collectives import collectives, gathered_alive, inductor_passes, tracing

D = 16  # width


@pytest.fixture(scope="module")
def mesh():
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    yield dist.init_device_mesh("cpu", (8,))
    torch._dynamo.reset()
    dist.destroy_process_group()


# ------------------------------------------------------------------------------------------------------- structures


class Block(nn.Module):
    def __init__(self, width=D, out=None, extra=False):
        super().__init__()
        self.up, self.down = nn.Linear(width, 24, bias=False), nn.Linear(24, out or width, bias=False)
        self.extra = nn.Linear(width, width, bias=False) if extra else None

    def forward(self, x):
        x = x if self.extra is None else x + self.extra(x)
        y = self.down(F.gelu(self.up(x)))
        return x + y if x.shape == y.shape else y


class Net(nn.Module):
    """Linear -> what a subclass does -> linear."""

    def __init__(self, **parts):
        super().__init__()
        self.emb = nn.Linear(8, D)
        for name, part in parts.items():
            setattr(self, name, part)
        self.head = nn.Linear(D, 8)

    def inner(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, x):
        return self.head(self.inner(self.emb(x)))


def net(inner=Net.inner, **parts):
    return type("Net", (Net,), dict(inner=inner))(**parts)


def blocks(n=3, **kwargs):
    return nn.ModuleList([Block(**kwargs) for _ in range(n)])


def stem():
    small = nn.Sequential(nn.Linear(D, D, bias=False), nn.GELU(), nn.Linear(D, D, bias=False))
    inner = lambda m, x: m.block3(m.block2(m.block1(m.stem(x))))  # noqa: E731
    return net(inner, stem=small, block1=Block(), block2=Block(), block3=Block())


def run(part, x):
    if isinstance(part, nn.ModuleList):
        for member in part:
            x = run(member, x)
        return x
    return part(x)


def lists_in_lists():
    stages = nn.ModuleList([nn.ModuleList([blocks(1), nn.Sequential(Block(), Block())]), blocks(1)])
    return net(lambda m, x: run(m.stages, x), stages=stages)


class CrossBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.cross, self.mlp = nn.Linear(D, D, bias=False), Block()

    def forward(self, x, y):
        return self.mlp(x + self.cross(y))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([CrossBlock() for _ in range(2)])

    def forward(self, x, y):
        for layer in self.layers:
            x = layer(x, y)
        return x


class Encoder(Net):
    """Its first layer has something extra, as T5's."""

    def __init__(self):
        super().__init__(layers=nn.ModuleList([Block(extra=True), *blocks(2)]))
        self.emb, self.head = nn.Identity(), nn.Identity()


def encoder_decoder():
    return net(lambda m, x: m.decoder(x, m.encoder(x)), encoder=Encoder(), decoder=Decoder())


def unet():
    def inner(m, x):
        a = m.down1(x)
        b = m.down2(a)
        return m.up1(torch.cat([m.up2(torch.cat([m.mid(b), b], -1)), a], -1))

    sizes = dict(down1=(D, 32), down2=(32, 64), mid=(64, 64), up2=(128, 32), up1=(64, D))
    return net(inner, **{name: Block(*size) for name, size in sizes.items()})


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn, self.router, self.experts = Block(), nn.Linear(D, 2, bias=False), blocks(2)

    def forward(self, x):
        x = self.attn(x)
        part = self.router(x).softmax(-1)
        return sum(part[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


def experts():
    return net(layers=nn.ModuleList([Experts(), Experts()]))


def in_order(*order):
    def inner(m, x):
        for i in order:
            x = m.layers[i](x)
        return x

    return net(inner, layers=blocks())


def shared():
    a, b = Block(), Block()
    return net(layers=nn.ModuleList([a, b, a, b]))


def parent_reads():
    def inner(m, x):
        for layer in m.layers:
            x = x + F.linear(F.gelu(F.linear(x, layer.up.weight)), layer.down.weight)
        return x

    return net(inner, layers=blocks())


class Outer(nn.Module):
    """A model in a model, as AutoModelForCausalLM is."""

    def __init__(self):
        super().__init__()
        self.model, self.layers = net(layers=blocks()), nn.Linear(8, 8)  # the latter is not to be taken for blocks

    def forward(self, x):
        return self.layers(self.model(x))


def broken(model):
    def function(x):
        x = model.inner(model.emb(x))
        torch._dynamo.graph_break()
        return model.head(x)

    return function


def other_root(model):
    def function(x, part=model.model):
        for layer in part.layers:
            x = layer(x)
        return x

    return lambda x: function(F.pad(x, (0, D - 8)))


# ----------------------------------------------------------------------------------------------------------- counts


class Fork(overlap.CustomGraphPass):
    """Leaves a graph as it is and keeps copies, each with another pass applied."""

    def __init__(self, **passes):
        self.passes, self.graphs = passes, {name: [] for name in ("plain", *passes)}

    def uuid(self):
        return None

    def __call__(self, g):
        for name, graphs in self.graphs.items():
            graphs.append(SimpleNamespace(graph=copy.deepcopy(g)))
            self.passes.get(name, lambda g: None)(graphs[-1].graph)


def compiled(function, x, fork):
    """Runs forward and backward of a function whose graphs go through Inductor's passes, graph breaks allowed."""

    def inner(gm, inputs, *, is_inference=False, **_):
        inductor_passes(gm, inputs, is_inference)

        def run(args):
            return gm(*args)

        run._boxed_call = True
        return run

    with tracing(), inductor_config.patch(post_grad_custom_post_pass=fork):
        torch.compile(function, backend=partial(compile_fx.compile_fx, inner_compile=inner))(x).square().mean().backward()


def counted(graphs):
    """Collectives, those exposed, bytes of gathers, most gathered bytes alive in one graph."""
    found = [c for gm in graphs for c in collectives(gm)]
    gathered = sum(c.full for c in found if c.kind == "all-gather")
    return SimpleNamespace(n=len(found), exposed=sum(c.gap == 0 for c in found), gathered=gathered,
                           alive=max(map(gathered_alive, graphs)))  # fmt: skip


def measured(model, mesh, part=lambda model: model):
    data_parallel(model, mesh)
    own, one = (compile_options(model, **how)["post_grad_custom_post_pass"] for how in ({}, dict(blocks=())))
    fork = Fork(own=own, one=one)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        compiled(part(model), torch.randn(2, 4, 8), fork)
    told = [str(w.message) for w in told if str(w.message).startswith("overlap:")]
    return SimpleNamespace(told=told, graphs=fork.graphs, **{name: counted(g) for name, g in fork.graphs.items()})
