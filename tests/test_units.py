"""Units that data_parallel(units=..) names, reentrant checkpoints, compiled code that falls back to Python, dtypes.

    pytest tests/test_units.py       # seconds; fake process groups and two gloo ranks, no GPU
"""

import copy
import itertools
import warnings

import pytest
import torch
from harness import spawn
from models_for_wrapper import BF16, Comms, Graphs, count, fake_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

from simple_fsdp import data_parallel, describe, disable_data_parallel, units_of

fake = pytest.fixture(fake_ranks)
LAYERS = [f"body.layers.{i}" for i in range(3)]
GROUPED = [*LAYERS, ["body.norm", "head"]]


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


class Body(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.norm = nn.LayerNorm(8)
        self.reentrant = reentrant

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True) if self.reentrant else layer(x)
        return self.norm(x)


class Model(nn.Module):
    """The norm lies in another module than the head, as in models of Hugging Face."""

    def __init__(self, reentrant=False):
        super().__init__()
        self.embedding, self.body, self.head = nn.Linear(8, 8), Body(reentrant), nn.Linear(8, 5)

    def forward(self, x):
        return self.head(self.body(self.embedding(x))).square().mean()


def collectives(run):
    """(all-gathers, reduce-scatters) of the second call of `run`, which knows what the first one gathered."""
    run()
    with Comms() as comms:
        run()
    return comms.count("all_gather_into_tensor"), comms.count("reduce_scatter_tensor")


# ---------------------------------------------------------------------------------------------------------------- units


@pytest.mark.long
@pytest.mark.parametrize(("units", "eager", "compiled"), [
    (None, (11, 6), (6, 5, 6)),  # three layers, embedding, norm and head by themselves
    (GROUPED, (9, 5), (5, 4, 5)),
    (["body.layers.0", ""], (4, 2), (2, 2, 2)),  # all else with the model itself
    ([["body.layers.0", "body.layers.1"]], (11, 6), (6, 5, 6)),  # layer 2 is no unit: its two parts gather alone
    ([], (17, 9), (9, 8, 9)),
])  # fmt: skip
def test_what_is_listed_together_is_gathered_and_reduced_together(fake, units, eager, compiled):
    mesh = fake(2)
    model = data_parallel(Model(), mesh, units=units)
    x = torch.randn(2, 8)
    assert collectives(lambda: model(x).backward()) == eager
    torch._dynamo.reset()
    backend = Graphs()
    torch.compile(model, backend=backend, fullgraph=True)(x).backward()
    gathers = [count(graphs[-1], "all_gather_into_tensor") for graphs in (backend.forward, backend.backward)]
    assert (*gathers, count(backend.backward[-1], "reduce_scatter_tensor")) == compiled


def test_modules_do_as_well_as_names_and_describe_says_what_was_taken(fake):
    mesh = fake(2)
    model = Model()
    data_parallel(model, mesh, units=[model.body.layers[0], [model.body.norm, model.head]])
    assert units_of(model) == ["body.layers.0", "body.norm", "head"]
    assert {row.unit for row in describe(model)} == {"", "body.layers.0", "body.norm", "head"}
    model.adapter = nn.Linear(8, 8)
    data_parallel(model, mesh)  # a second call, for what was added: the units stay
    assert units_of(model) == ["body.layers.0", "body.norm", "head"]
    copied = copy.deepcopy(model)
    group = copied.head._data_parallel_group
    assert [each is mine for each, mine in zip(group, (copied.body.norm, copied.head), strict=True)] == [True, True]


@pytest.mark.parametrize(("units", "message"), [
    (["nope"], "units: 'nope' is not a module of the model: expected a module, or its name in named_modules()"),
    ("head", None),  # a name alone is a list of one
    ([3], "units: 3 is not a module of the model"),
    ([["head", ["body"]]], "units: .'body'. is not a module of the model"),
    ([nn.Linear(2, 2)], "units: Linear.* is not a module of the model"),
    (["head", ["body", "head"]], "units: head is listed twice: list it once"),
    (["body.layers.0.up", "act"], "units: act has no parameters: leave it out"),
])  # fmt: skip
def test_what_is_no_unit_is_refused_before_anything_is_changed(fake, units, message):
    model = Model()
    model.act = nn.ReLU()
    if message is None:
        assert units_of(data_parallel(model, fake(2), units=units)) == ["head"]
        return
    with pytest.raises(ValueError, match=f"^{message.replace('()', '..')}"):
        data_parallel(model, fake(2), units=units)
    assert type(model) is Model and type(model.head.weight) is nn.Parameter


# ------------------------------------------------------------------------------------------------ reentrant checkpoints


def test_a_reentrant_checkpoint_with_a_head_behind_it_reduces_each_unit_once(fake):
    model = data_parallel(Model(reentrant=True), fake(2))
    x = torch.randn(2, 8, requires_grad=True)
    gathers, reductions = collectives(lambda: model(x).backward())
    assert reductions == 6  # three layers, embedding, norm, head
    assert gathers == 12  # each in forward and once more


def reentrant(mesh):
    """The largest difference of gradients of whole layers under reentrant checkpoints to those without any."""
    gradients = []
    for used in (False, True):
        torch.manual_seed(1)
        model = data_parallel(Model(used), mesh)
        x = torch.randn(2, 8, generator=torch.Generator().manual_seed(mesh.get_rank()))
        for _ in range(2):  # the second time units start ahead
            model.zero_grad()
            model(x).backward()
        gradients.append([p.grad.full_tensor() for p in model.parameters()])
    return max((a - b).abs().max().item() for a, b in zip(*gradients, strict=True))


@pytest.mark.long
def test_reentrant_checkpoints_give_the_gradients_of_none(two):
    assert max(two["reentrant"]) < 1e-7


# ------------------------------------------------------------------------------ compiled code that falls back to Python


def test_code_that_is_skipped_after_disable_data_parallel_gathers_as_before(fake):
    """Dynamo leaves a function without a graph to Python, and then looks at what that calls."""
    model = data_parallel(nn.Linear(8, 8), fake(2))
    doubled = torch.compile(lambda m: m.weight * 2, backend="eager")
    first = doubled(model)
    with disable_data_parallel():
        sharded = doubled(model)
    again = doubled(model)
    assert [type(each).__name__ for each in (first, sharded, again)] == ["Tensor", "DTensor", "Tensor"]
    assert first.shape == again.shape == (8, 8)


class Broken(nn.Module):
    """Graph breaks of a user's own before, between and behind what reads weights."""

    def __init__(self):
        super().__init__()
        self.layers, self.scale = nn.ModuleList(Layer() for _ in range(2)), nn.Parameter(torch.ones(8))

    def forward(self, x):
        torch._dynamo.graph_break()
        x = x * self.scale
        torch._dynamo.graph_break()
        for layer in self.layers:
            x = layer(x)
            torch._dynamo.graph_break()
        return (x * self.scale).square().mean()


def broken(mesh):
    """(largest difference of gradients to eager mode, gathers compiled, gathers eager) with graph breaks."""
    plain = Broken()
    x = torch.randn(2, 8)
    seen = []
    for compiled in (False, True):
        torch._dynamo.reset()
        model = data_parallel(copy.deepcopy(plain), mesh)
        call = torch.compile(model, backend="aot_eager") if compiled else model

        def run(call=call, model=model):
            model.zero_grad()
            call(x).backward()

        counts = collectives(run)
        seen.append(([p.grad.full_tensor() for p in model.parameters()], counts))
    (eager, eager_counts), (compiled, compiled_counts) = seen
    return max((a - b).abs().max().item() for a, b in zip(eager, compiled, strict=True)), compiled_counts, eager_counts


@pytest.fixture(scope="module")
def two():
    return spawn(2, [broken, answers, reentrant])


@pytest.mark.long
def test_graph_breaks_give_the_gradients_of_eager_mode_by_no_more_gathers(two):
    for difference, compiled, eager in two["broken"]:
        assert difference < 1e-6
        assert compiled[0] <= eager[0]


# ------------------------------------------------------------------------------------ the dtype that parameters() gives


class Casting(nn.Module):
    """Casts its input to a dtype that it asks itself for, in one of the ways in which models do."""

    def __init__(self, way):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.ask = ASKS[way]

    @property
    def dtype(self):  # as Hugging Face and diffusers have it
        return next(p.dtype for p in self.parameters() if p.is_floating_point())

    def forward(self, x):
        return self.linear(x.to(self.ask(self)))


ASKS = dict(
    parameters=lambda m: next(m.parameters()).dtype, property=lambda m: m.dtype,
    named_parameters=lambda m: dict(m.named_parameters())["linear.weight"].dtype,
    state_dict=lambda m: m.state_dict()["linear.weight"].dtype,
    get_parameter=lambda m: m.get_parameter("linear.weight").dtype, attribute=lambda m: m.linear.weight.dtype,
)  # fmt: skip
RIGHT = "get_parameter", "attribute"
CURE = "x.to(self.proj.weight.dtype)"


def answers(mesh):
    """(way, compiled) -> the dtype of the output, or the error; where the cure stands: in its note, in a warning."""
    found = {}
    for way, compiled in itertools.product(ASKS, (False, True)):
        torch._dynamo.reset()
        model = data_parallel(Casting(way), mesh, mp_policy=BF16)
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                answer = str(run(torch.randn(2, 8)).dtype), []
            except RuntimeError as error:
                answer = str(error), [note for note in getattr(error, "__notes__", ()) if CURE in note]
        found[way, compiled] = *answer, [w for w in map(str, (w.message for w in warned)) if CURE in w]
    return found


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_dtype_that_a_running_model_asks_itself_for_is_right_or_an_error_with_the_cure(fake, two, ranks):
    for found in two["answers"] if ranks == 2 else [answers(fake(1))]:
        for (way, compiled), (answer, notes, warned) in found.items():
            if way in RIGHT:
                assert (answer, notes, warned) == ("torch.bfloat16", [], [])
            else:
                # Dynamo of torch 2.11 and 2.14 does not trace state_dict().
                untraced = compiled and way == "state_dict" and "setattr" in answer
                assert untraced or "must have the same dtype" in answer
                assert (len(notes), bool(warned)) == ((0, True) if compiled else (1, False)), (way, compiled)


@pytest.mark.parametrize("compile", [False, True])
def test_a_forward_that_averages_parameters_in_place_changes_the_parameters(fake, compile):
    """As MoCo's does, hence parameters() gives shards there, too; without a cast no word is said of it."""

    class Momentum(Layer):
        @torch.no_grad()
        def forward(self, x):
            for slow, fast in zip(self.up.parameters(), self.down.parameters(), strict=True):
                slow.mul_(0.5).add_(fast.mean(), alpha=0.5)
            return self.up(x)

    model = data_parallel(Momentum(), fake(2))
    before = model.up.weight._local_tensor.clone()
    torch.compile(model, backend="aot_eager", disable=not compile)(torch.randn(2, 8))
    assert not torch.equal(model.up.weight._local_tensor, before)
    assert model.get_parameter("up.weight") is model.up.weight is dict(model.named_parameters())["up.weight"]
    with pytest.raises(AttributeError):
        model.get_parameter("up.nothing")


CLASHES = dict(
    linear=lambda x, w: nn.functional.linear(x, w), bmm=lambda x, w: torch.bmm(x[None], w[None]),
    conv=lambda x, w: nn.functional.conv1d(x[None], w[..., None], w[0]),
    norm=lambda x, w: nn.functional.layer_norm(x, (8,), w[0], w[0]),
    attention=lambda x, w: nn.functional.scaled_dot_product_attention(x[None], w[None], w[None]),
)  # fmt: skip


@pytest.mark.parametrize("clash", CLASHES)
def test_each_of_torch_s_words_for_dtypes_that_clash_has_the_note(fake, clash):
    class Clash(nn.Linear):
        def forward(self, x):
            return CLASHES[clash](x, self.weight)

    with pytest.raises(RuntimeError) as error:
        data_parallel(Clash(8, 8), fake(2), mp_policy=BF16)(torch.randn(8, 8))
    assert [CURE in note for note in error.value.__notes__] == [True]
