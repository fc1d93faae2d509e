"""Blocks of models of any shape: what overlap.py takes for them, and what that makes of the collectives.

A fake process group of eight ranks. One capture of each model: its graphs as plain compilation leaves them, and copies
whose collectives overlap.py has moved. Nothing is generated.
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
from harness import spawn
from torch import fx, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import overlap
from lab.profiling.collectives import collectives, gathered_alive, inductor_passes, tracing
from overlap import compile_options
from simple_fsdp import data_parallel, describe, units_of
from trainer.summary import units_in_words

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


class Wrapped(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net(x)


class Experts(nn.Module):
    def __init__(self, mlps=False):
        super().__init__()
        self.attn, self.router, self.experts = Block(), nn.Linear(D, 2, bias=False), blocks(2)
        if mlps:
            self.experts = nn.ModuleList(Wrapped(mlp()) for _ in range(2))

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


class Sum(nn.Module):
    """The gradients of its biases are equal: the compiler reduces one of them."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x):
        return self.a(x) + self.b(x)


def sums():
    return net(layers=nn.ModuleList([Sum(), Sum()]))


class Outer(nn.Module):
    """A model in a model, as a causal language model is."""

    def __init__(self):
        super().__init__()
        self.model, self.layers = net(layers=blocks()), nn.Linear(8, 8)  # a name that is inside as well

    def forward(self, x):
        return self.layers(self.model(x))


def twins():
    """Two towers whose frames look the same when each is called by itself."""
    model = nn.Module()
    model.left, model.right = net(layers=blocks(2)), net(layers=blocks(2))
    return model


def through_both(model):
    left, right = model.left, model.right
    return lambda x: right(left(x))


def broken(model):
    def function(x):
        x = model.inner(model.emb(x))
        torch._dynamo.graph_break()
        return model.head(x)

    return function


def under_another_name(model):
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
            graphs.append(fx.GraphModule(g.owning_module, copy.deepcopy(g)))
            self.passes.get(name, lambda g: None)(graphs[-1].graph)


def compiled(function, x, fork):
    """Runs forward and backward of a function whose graphs go through Inductor's passes, graph breaks allowed."""

    def inner(gm, inputs, *, is_inference=False, **_):
        inductor_passes(gm, inputs, is_inference)

        def run(args):
            return gm(*args)

        run._boxed_call = True
        return run

    with tracing(), inductor_config.patch(overlap.DISABLED_INDUCTOR_PASSES | dict(post_grad_custom_post_pass=fork)):
        y = torch.compile(function, backend=partial(compile_fx.compile_fx, inner_compile=inner))(x)
        y.square().mean().backward()


def counted(graphs):
    """Collectives, those exposed, bytes of gathers, most gathered bytes alive in one graph."""
    found = [c for gm in graphs for c in collectives(gm)]
    gathered = sum(c.full for c in found if c.kind == "all-gather")
    return SimpleNamespace(n=len(found), exposed=sum(c.gap == 0 for c in found), gathered=gathered,
                           alive=max(map(gathered_alive, graphs)))  # fmt: skip


def measured(model, mesh, part=lambda model: model):
    data_parallel(model, mesh)
    fork = Fork(own=compile_options(model)["post_grad_custom_post_pass"])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        compiled(part(model), torch.randn(2, 4, 8), fork)
    told = [str(w.message) for w in told if str(w.message).startswith("overlap:")]
    return SimpleNamespace(told=told, graphs=fork.graphs, **{name: counted(g) for name, g in fork.graphs.items()})


def whole(model):
    return model


LAYERS = ["layers.0", "layers.1", "layers.2"]
INNER = ["model.layers.0", "model.layers.1", "model.layers.2"]
TWINS = ["left.layers.0", "left.layers.1", "right.layers.0", "right.layers.1"]
ENCODER = ["encoder.layers.0", "encoder.layers.1", "encoder.layers.2", "decoder.layers.0", "decoder.layers.1"]
# Per case: a model, what of it is compiled, its blocks, and of forward and backward together the collectives, those
# exposed, and most gathered bytes alive; last, what buckets of the members of lists made (collectives, exposed), where
# these were the right blocks. Exposed in each: the embedding's gather, one in backward, the last reduction.
CASES = dict(
    stem=(stem, whole, ["stem", "block1", "block2", "block3"], 17, 3, 6144, None),
    lists=(lists_in_lists, whole, ["stages.0.0.0", "stages.0.1.0", "stages.0.1.1", "stages.1.0"], 17, 3, 6144, None),
    encoder_decoder=(encoder_decoder, whole, ENCODER, 20, 3, 8192, (20, 3)),
    unet=(unet, whole, ["down1", "down2", "mid", "up2", "up1"], 20, 3, 30720, None),
    experts=(experts, whole, ["layers.0", "layers.1"], 11, 3, 19456, (11, 3)),
    skipped=(lambda: in_order(0, 2), whole, LAYERS, 11, 3, 6144, (11, 3)),
    twice=(lambda: in_order(0, 1, 0, 1, 2, 2), whole, LAYERS, 14, 3, 9216, (14, 3)),
    shared=(shared, whole, ["layers.0", "layers.1"], 11, 3, 9216, (11, 3)),
    equal_gradients=(sums, whole, ["layers.0", "layers.1"], 11, 3, 4352, None),
    inner=(Outer, lambda model: model.model, INNER, 14, 3, 6144, None),
    other_root=(Outer, under_another_name, INNER, 9, 2, 6144, None),
    twins=(twins, through_both, TWINS, 23, 3, 6144, None),
    # One reduction more than before is exposed: the gradient of the weight comes first in a graph of one product.
    graph_break=(lambda: net(layers=blocks()), broken, LAYERS, 14, 6, 6144, None),
    parent_reads=(parent_reads, whole, LAYERS, 23, 3, 3072, None),
)  # fmt: skip
SLOW = "twice unet twins equal_gradients lists skipped experts encoder_decoder shared inner other_root".split()
WARNED = dict(graph_break="L['model'].head", parent_reads="L['self'].emb")


@pytest.mark.long
@pytest.mark.parametrize("case", [pytest.param(c, marks=pytest.mark.slow) if c in SLOW else c for c in CASES])
def test_a_bucket_per_block_whatever_the_structure(mesh, case):
    make, part, names, n, exposed, alive, before = CASES[case]
    model = make()
    assert units_of(model) == names
    got = measured(model, mesh, part)
    assert units_of(model) == names, "wrapped"
    own, plain = got.own, got.plain
    assert (own.n, own.exposed, own.alive) == (n, exposed, alive)
    assert own.n <= plain.n and own.exposed < plain.exposed and own.gathered <= plain.gathered
    assert before is None or (own.n, own.exposed) <= before
    assert len(got.told) == (case in WARNED) and all(WARNED[case] in line for line in got.told)


@pytest.mark.long
def test_one_block_compiled_with_the_options_of_the_model_is_one_bucket(mesh):
    got = measured(encoder_decoder(), mesh, lambda m: lambda x: m.encoder.layers[1](F.pad(x, (0, D - 8))))
    assert (got.own.n, got.told) == (3, [])


def gradients_against_one_process(mesh):
    """On two ranks: per case, the largest error of a gradient, in units of its largest entry."""
    worst = {}
    for case in ("twice", "shared", "equal_gradients", "graph_break"):
        make, part = CASES[case][:2]
        torch.manual_seed(0)
        model, batch = make(), torch.randn(4, 4, 8, generator=torch.Generator().manual_seed(3))
        alone = copy.deepcopy(model)
        own = compile_options(data_parallel(model, mesh))["post_grad_custom_post_pass"]
        compiled(part(model), batch.chunk(2)[mesh.get_rank()], own)
        part(alone)(batch).square().mean().backward()
        pairs = [(p.grad.full_tensor(), q.grad) for p, q in zip(model.parameters(), alone.parameters(), strict=True)]
        worst[case] = max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)
    return worst


@pytest.mark.slow
def test_gradients_through_buckets_are_those_of_one_process():
    for worst in spawn(2, [gradients_against_one_process])["gradients_against_one_process"]:
        assert max(worst.values()) < 1e-5, worst


# --------------------------------------------------------------------------------- what is taken for blocks, uncompiled


class Own(nn.Sequential):
    """One block, although it is a Sequential: it does more than call its members."""

    def forward(self, x):
        return x + super().forward(x)


def attributes(**parts):
    model = nn.Module()
    for name, part in parts.items():
        setattr(model, name, part)
    return model


def layers_of(*members):
    return net(layers=nn.ModuleList(members))


def stage(width, n):
    return net(downsample=nn.Linear(width, width), layers=nn.ModuleList([Block(width) for _ in range(n)]))


def mlp():
    return nn.Sequential(nn.Linear(D, D), nn.ReLU(), nn.Linear(D, D))


FOUND = dict(
    one_layer_of_experts=(lambda: layers_of(Experts()), ["layers.0"]),
    # Each rank runs experts of its own choice: they must not be units, also if their layers are a Sequential.
    experts_of_sequentials=(lambda: layers_of(Experts(mlps=True), Experts(mlps=True)), ["layers.0", "layers.1"]),
    dense_and_experts=(lambda: layers_of(Block(), Experts()), ["layers.0", "layers.1"]),
    experts_by_attribute=(lambda: attributes(a=Experts(), b=Experts(), c=Experts()), ["a", "b", "c"]),
    two_experts_by_attribute=(lambda: attributes(a=Experts(), b=Experts()), ["a", "b"]),
    equal_towers=(lambda: attributes(a=layers_of(Block()), b=layers_of(Block())), ["a.layers.0", "b.layers.0"]),
    deep_towers=(lambda: attributes(**{n: layers_of(Experts()) for n in "abc"}),
                 ["a.layers.0", "b.layers.0", "c.layers.0"]),
    stages=(lambda: layers_of(stage(8, 1), stage(16, 2)), ["layers.0", "layers.1"]),
    equal_stages=(lambda: layers_of(stage(8, 2), stage(8, 2)), ["layers.0", "layers.1"]),
    alike=(lambda: layers_of(Block(extra=True), Block()), ["layers.0", "layers.1"]),
    unlike=(lambda: layers_of(Block(), Sum(), nn.Linear(D, D)), ["layers.0", "layers.1"]),
    mlps=(lambda: layers_of(*[mlp() for _ in range(4)]), ["layers.0", "layers.1", "layers.2", "layers.3"]),
    halves=(lambda: layers_of(mlp(), mlp()), []),  # layers one behind the other are gathered one by one as well
    mlps_by_attribute=(lambda: attributes(a=mlp(), b=mlp(), c=mlp(), d=mlp(), e=nn.Linear(D, D)), [*"abcd"]),
    own_forward=(lambda: layers_of(Own(Sum(), Sum()), Own(Sum(), Sum())), ["layers.0", "layers.1"]),
    anywhere=(lambda: attributes(a=attributes(x=Sum()), b=attributes(y=Sum(), z=Block())), ["a", "b"]),
    containers=(lambda: attributes(a=nn.ModuleDict(dict(x=Sum())), b=nn.ModuleDict(dict(x=Sum()))), ["a.x", "b.x"]),
    layers=(lambda: attributes(a=nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]), b=Sum()), []),
    none=(lambda: attributes(a=Sum(), b=nn.Linear(D, D), c=nn.Linear(D, D)), []),
)  # fmt: skip


@pytest.mark.parametrize("case", [*FOUND, *SLOW])
def test_blocks_are_found_by_structure(mesh, case):
    make, names = FOUND[case] if case in FOUND else (CASES[case][0], CASES[case][2])
    model = make()
    assert units_of(model) == names
    assert units_of(data_parallel(model, mesh)) == names


def test_units_in_one_line():
    for model, said in ((stem(), "units (4): stem to block3; in none: 4 of 12 parameters, 280 elements"),
                        (nn.Linear(80, 50), "units (0): ; in none: 2 of 2 parameters, 4'050 elements")):  # fmt: skip
        assert units_in_words(describe(model), units_of(model)) == said


HUGGING_FACE = dict(
    Llama=(dict(num_hidden_layers=3, hidden_size=32, intermediate_size=48, vocab_size=64), 3, "layers.2"),
    T5=(dict(num_layers=2, d_model=32, d_kv=8, d_ff=32), 4, "decoder.block.1"),
    Swin=(dict(embed_dim=16, depths=[2, 2, 3, 2], num_heads=[1, 2, 4, 8]), 13, "encoder.layers.3.blocks.1"),
    Mixtral=(dict(num_hidden_layers=2, hidden_size=32, intermediate_size=32, vocab_size=64), 2, "layers.1"),
    Whisper=(dict(encoder_layers=2, decoder_layers=3, d_model=48), 5, "decoder.layers.2"),
    ResNet=({}, 17, "encoder.stages.3.layers.2"),
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", HUGGING_FACE)
def test_blocks_of_hugging_face_models(name):
    transformers = pytest.importorskip("transformers")
    sizes, n, last = HUGGING_FACE[name]
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(getattr(transformers, f"{name}Config")(**sizes))
    found = units_of(model)
    assert (len(found), found[-1]) == (n, last)
