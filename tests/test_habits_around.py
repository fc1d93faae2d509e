"""What people bring from DDP, take away from a wrapped model or hold against it, on 2 gloo ranks: rows of
docs/tutorial.md around the training itself.

    pytest tests/test_habits_around.py       # some 20 seconds, no GPU
"""

import copy
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import spawn
from models_for_wrapper import fake_ranks, whole
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import distribute_tensor
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim.swa_utils import AveragedModel

from simple_fsdp import data_parallel, unsharded

fake = pytest.fixture(fake_ranks)
pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
WHOLE = StateDictOptions(full_state_dict=True)
MIXED = "got mixed torch.Tensor and DTensor"
DOCS = (Path(__file__).parent.parent / "docs" / "tutorial.md").read_text()


def mlp():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def furthest(sharded, plain):
    """The largest difference of parameters of the same order."""
    return max((whole(p) - q).abs().max().item() for p, q in zip(sharded, plain, strict=True))


# ---------------------------------------------------------------------------------- undoing what came before the wrap


def undo_parametrization(layer):
    parametrize.remove_parametrizations(layer, "weight")


class Twice(nn.Module):
    def forward(self, weight):
        return 2 * weight


PUT_ON = dict(
    weight_norm=(parametrizations.weight_norm, undo_parametrization),
    spectral_norm=(parametrizations.spectral_norm, undo_parametrization),
    orthogonal=(parametrizations.orthogonal, undo_parametrization),
    own=(lambda layer: parametrize.register_parametrization(layer, "weight", Twice()), undo_parametrization),
    pruned=(lambda layer: prune.l1_unstructured(layer, "weight", 0.5), lambda layer: prune.remove(layer, "weight")),
    old_weight_norm=(nn.utils.weight_norm, nn.utils.remove_weight_norm),
    old_spectral_norm=(nn.utils.spectral_norm, nn.utils.remove_spectral_norm),
)  # fmt: skip


def normed(put_on):
    model = mlp().eval()  # spectral norm changes nothing while it evaluates
    put_on(model[2])
    return model


def undone(mesh):
    """By what was put on: the refusals outside and inside of unsharded(), whether the output is as before, how far off
    the plain model is that has the whole tensors, and then that without what was put on."""
    x = torch.linspace(-1, 1, 12).view(2, 6)
    found = {}
    for name, (put_on, undo) in PUT_ON.items():
        model = data_parallel(normed(put_on), mesh)
        before = model(x).detach()
        refusals = []
        for within in (False, True):
            try:
                if within:
                    with unsharded():
                        undo(model[2])
                else:
                    undo(model[2])
            except RuntimeError as error:
                refusals.append(str(error))
        exported = normed(put_on)
        exported.load_state_dict(get_model_state_dict(model, options=WHOLE))
        far = [(exported(x) - before).abs().max().item()]
        undo(exported[2])
        far.append((exported(x) - before).abs().max().item())
        names = sorted(exported.state_dict()) == sorted(mlp().state_dict())
        found[name] = refusals, torch.equal(model(x), before), max(far), names
    return found


@pytest.mark.long
@pytest.mark.parametrize("name", PUT_ON)
def test_what_was_put_on_before_the_wrap_is_removed_from_a_plain_model(two, name):
    for refusals, same, far, names in (found[name] for found in two["undone"]):
        assert len(refusals) == 2
        assert all(text.startswith("data_parallel: parametrizations, pruning, weight norm") for text in refusals)
        assert all("get_model_state_dict with full_state_dict=True" in text for text in refusals)
        assert same and far < 1e-6 and names


def test_a_parametrized_model_compiles_to_one_graph_and_takes_another_parametrization_before_the_wrap(fake):
    plain = normed(PUT_ON["own"][0])
    parametrize.register_parametrization(plain[2], "weight", Twice())
    model = data_parallel(copy.deepcopy(plain), fake(1))
    x = torch.ones(2, 6)
    for run in (model, copy.deepcopy(model), torch.compile(model, backend="aot_eager", fullgraph=True)):
        assert torch.allclose(run(x), plain(x))


# ------------------------------------------------------------------------------------------------------ whole tensors


def broadcast(mesh):
    """Whether whole tensors reach the shards by broadcast_from_rank0: as they lie in memory, made contiguous, and as
    get_model_state_dict gives them of a model that lies so."""
    found = {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Conv2d(3, 4, 2, bias=False))
    model[1].to(memory_format=torch.channels_last)
    model[0].weight = nn.Parameter(torch.arange(24.0).view(4, 6).t())
    values = {name: t.detach().clone() for name, t in model.state_dict().items()}
    assert not any(t.is_contiguous() for t in values.values())
    data_parallel(model, mesh)
    gotten = get_model_state_dict(model, options=WHOLE)
    states = dict(as_it_lies=values, contiguous={k: t.contiguous() for k, t in values.items()}, gotten=gotten)
    for name, state in states.items():
        with torch.no_grad():
            [p.zero_() for p in model.parameters()]
        set_model_state_dict(model, dict(state) if dist.get_rank() == 0 else {}, options=options)
        found[name] = [torch.equal(whole(p), values[k]) for k, p in model.named_parameters()]
    found["lies"] = [t.is_contiguous() for t in gotten.values()]
    return found


@pytest.mark.long
def test_whole_tensors_are_made_contiguous_before_rank_0_broadcasts_them(two):
    for found in two["broadcast"]:
        assert found["contiguous"] == found["gotten"] == found["lies"] == [True, True]
        assert False in found["as_it_lies"]  # torch's: where it is mended, the row of the docs may go


def on_one_rank(mesh):
    """Output of the model, and of a plain one that rank 0 alone makes of the whole tensors."""
    model = data_parallel(mlp(), mesh)
    x = torch.ones(2, 6)
    expected = model(x).detach()
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options)  # on every rank: this gathers
    if dist.get_rank() > 0:
        return not state
    plain = mlp()
    with torch.no_grad():
        [p.zero_() for p in plain.parameters()]
    plain.load_state_dict(state)
    return torch.equal(plain(x), expected)


@pytest.mark.long
def test_one_rank_alone_computes_with_a_plain_model_of_the_whole_tensors(two):
    assert two["on_one_rank"] == [True, True]


# --------------------------------------------------------------------------------------------------- DDP's checkpoint


def trainer(model):
    """Optimizer with two groups, one of them with momenta of its own, and a scheduler."""
    named = [*model.named_parameters()]
    groups = [dict(params=[p for name, p in named if name.endswith(end)], weight_decay=decay)
              for end, decay in (("weight", 0.1), ("bias", 0.0))]  # fmt: skip
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def steps(model, optimizer, scheduler, numbers):
    for step in numbers:
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        model(x).square().mean().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def frozen():
    model = mlp()
    model[0].bias.requires_grad_(False)
    return model


def ddp_goes_on(mesh):
    """What DDP's optimizer state says without the recipe; and, with it, how far parameters are from DDP's after three
    more steps, the step counts and the learning rate of both."""
    plain = nn.parallel.DistributedDataParallel(frozen())
    made = trainer(plain)
    steps(plain, *made, range(3))
    saved = dict(model=plain.state_dict(), optimizer=made[0].state_dict(), scheduler=made[1].state_dict())
    kept = copy.deepcopy(saved)
    steps(plain, *made, range(3, 6))

    said = []
    model = data_parallel(frozen(), mesh)
    optimizer, scheduler = trainer(model)
    optimizer.load_state_dict(copy.deepcopy(kept["optimizer"]))
    with pytest.raises(RuntimeError) as error:
        steps(model, optimizer, scheduler, [3])
    said.append(str(error.value))
    model = data_parallel(frozen(), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    names = sorted(dict(model.named_parameters()), key=lambda name: name.endswith("bias"))
    by_name = dict(
        state={names[i]: state for i, state in copy.deepcopy(kept["optimizer"]["state"]).items()},
        param_groups=[dict(group, params=names) for group in kept["optimizer"]["param_groups"][:1]],
    )
    with pytest.raises(KeyError) as error:
        set_optimizer_state_dict(model, optimizer, by_name, options=WHOLE)
    said.append(str(error.value))

    model = data_parallel(frozen(), mesh)
    optimizer, scheduler = trainer(model)
    made_of = dict(model=model, optimizer=optimizer, scheduler=scheduler, distribute_tensor=distribute_tensor)
    (recipe,) = re.findall(r"```python\n(saved = torch.load.*?)```", DOCS, re.DOTALL)
    recipe = recipe.replace('torch.load("ddp.pt", map_location="cpu")', "kept")
    assert "kept" in recipe and len(recipe.strip().splitlines()) <= 8
    exec(recipe, globals() | made_of | dict(kept=kept))
    steps(model, optimizer, scheduler, range(3, 6))
    counts = [{state["step"].item() for state in each.state.values()} for each in (optimizer, made[0])]
    rates = [[group["lr"] for group in each.param_groups] for each in (optimizer, made[0])]
    return said, furthest(model.parameters(), plain.module.parameters()), counts, rates


@pytest.mark.long
def test_a_checkpoint_of_ddp_goes_on_by_the_recipe_of_the_docs(two):
    for said, far, counts, rates in two["ddp_goes_on"]:
        assert "exp_avg of the optimizer is a whole tensor, as in a checkpoint of DDP" in said[0]
        assert "initial_lr" in said[1]
        assert far < 1e-6
        assert counts == [{6}, {6}]
        assert rates == [[0.0125, 0.0125]] * 2


# --------------------------------------------------------------------------------------------- averages, regularisers


def averaged_before(mesh):
    """What an average says that was made before the wrap; and how far it is from one process once it is wrapped."""
    models = []
    said = []
    for wrapped in (False, True):
        model = mlp()
        average = AveragedModel(model)
        if wrapped:
            data_parallel(model, mesh)
            with pytest.raises(RuntimeError) as error:
                average.update_parameters(model)
            said.append(str(error.value))
            data_parallel(average, mesh)
        for _ in range(3):
            with torch.no_grad():
                [p.add_(1) for p in model.parameters()]
            average.update_parameters(model)
        models.append(average)
    return said, furthest(models[1].parameters(), models[0].parameters())


@pytest.mark.long
def test_an_average_that_was_made_before_the_wrap_is_wrapped_too(two):
    for said, far in two["averaged_before"]:
        assert MIXED in said[0]
        assert far < 1e-6


PENALTIES = dict(mse_loss=F.mse_loss, huber_loss=F.huber_loss, smooth_l1_loss=F.smooth_l1_loss,
                 binary_cross_entropy=lambda p, q: F.binary_cross_entropy(p.sigmoid(), q.sigmoid()),
                 written_out=lambda p, q: (p - q).square().mean())  # fmt: skip


def penalised(mesh):
    """By penalty: the gradient over that of one process, of shards and inside unsharded()."""
    found = {}
    for name, penalty in PENALTIES.items():
        factors = []
        for within in (None, False, True):
            model, anchor = nn.Linear(4, 6), nn.Linear(4, 6)
            with torch.no_grad():
                model.weight.copy_(torch.linspace(-1, 1, 24).view(6, 4))
                anchor.weight.zero_()
            if within is not None:
                data_parallel(model, mesh)
                data_parallel(anchor, mesh)
            if within:
                with unsharded():
                    loss = penalty(model.weight, anchor.weight.detach())
            else:
                loss = penalty(model.weight, anchor.weight.detach())
            if within is False:
                loss = loss.full_tensor()
            loss.backward()
            factors.append(whole(model.weight.grad))
        found[name] = [(factor / factors[0]).mean().item() for factor in factors[1:]]
    return found


@pytest.mark.long
def test_a_penalty_between_shards_is_written_out_or_computed_inside_unsharded(two):
    """torch's losses of two DTensors give a gradient as many times too large as there are ranks."""
    for found in two["penalised"]:
        assert found.pop("written_out") == pytest.approx([1, 1])
        assert list(found.values()) == [pytest.approx([2, 1])] * len(found)


@pytest.fixture(scope="module")
def two():
    return spawn(2, [undone, broadcast, on_one_rank, ddp_goes_on, averaged_before, penalised])


@pytest.mark.parametrize("mode", ["fully_shard", "replicate"])
def test_moments_of_shards_numbers_and_other_people_s_optimizers_are_left_alone(fake, mode):
    """A scalar's own state has its shape, too: NAdam keeps numbers. Others may keep whole tensors."""
    model = nn.ParameterList([nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(4, 2))])
    data_parallel(model, fake(1), mode)

    class Own(torch.optim.SGD):
        pass

    for cls in (torch.optim.NAdam, torch.optim.AdamW, Own):
        optimizer = cls(model.parameters(), lr=0.1)
        for _ in range(2):
            for p in model.parameters():
                p.grad = p.detach().clone()
            optimizer.step()
            if cls is Own:
                optimizer.state[p]["average"] = torch.ones(4, 2)
    assert all(torch.isfinite(whole(p)).all() for p in model.parameters())


# ------------------------------------------------------------------------ code that the compiler is told to leave alone


class Disabled(nn.Module):
    def __init__(self, gathers):
        super().__init__()
        self.layer, self.gathers = nn.Linear(6, 6), gathers

    @torch.compiler.disable
    def product(self, x):
        if not self.gathers:
            return x @ self.layer.weight
        with unsharded():
            return x @ self.layer.weight

    def forward(self, x):
        return self.product(2 * x)


def test_a_method_that_is_not_compiled_reads_whole_weights_in_unsharded_alone(fake):
    mesh, x = fake(2), torch.ones(2, 6)
    run = torch.compile(data_parallel(Disabled(gathers=True), mesh), backend="aot_eager")
    assert run(x).shape == (2, 6)
    run(x).sum().backward()
    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match=MIXED):
        torch.compile(data_parallel(Disabled(gathers=False), mesh), backend="aot_eager")(x)
    assert "under `torch.compiler.disable` that compiled code calls" in DOCS
