"""Other people's habits after data_parallel(): the rows of docs/tutorial.md, on 2 gloo ranks or a fake group."""

import contextlib
import copy
import gc
import inspect
import itertools
import pickle
import re
import tempfile
import types
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import spawn
from models_for_wrapper import Block, Blocks, Comms, fake_ranks, whole, with_one_thread
from running import module
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import simple_fsdp
from simple_fsdp import (
    MixedPrecisionPolicy,
    data_parallel,
    disable_data_parallel,
    units_of,
    unsharded,
)

one_thread = pytest.fixture(scope="module", autouse=True)(with_one_thread)
fake = pytest.fixture(fake_ranks)


def mlp():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


@pytest.fixture
def model(fake):
    """That, cut for 2 ranks."""
    return data_parallel(mlp(), fake(2))


def apart(sharded, plain, of=lambda p: p):
    """The largest difference of two models' parameters, or of what `of` makes of each."""
    pairs = zip(sharded.parameters(), plain.parameters(), strict=True)
    return max((whole(of(q)) - of(p)).abs().max().item() for q, p in pairs)


def run_of(model, compile, backend="aot_eager"):
    """What runs a model: itself, or code of one graph."""
    return torch.compile(model, backend=backend, fullgraph=True, disable=not compile)


def filled(fill, mesh):
    """What `fill(model)` makes of two equal models, one of them sharded: [(whole, plain) of each parameter]."""
    plain = mlp()
    sharded = data_parallel(mlp(), mesh)
    for model in (plain, sharded):
        torch.manual_seed(7)
        with contextlib.nullcontext() if fill in OF_MODULES else disable_data_parallel():
            fill(model)
    return [(whole(p), q.detach()) for p, q in zip(sharded.parameters(), plain.parameters(), strict=True)]


def init(module):
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        nn.init.zeros_(module.bias)


@torch.no_grad()
def noise(model):
    model[0].weight.add_(torch.randn_like(model[0].weight))


FILLS = dict(
    apply=lambda m: m.apply(init), clamp=lambda m: m[0].weight.data.clamp_(-0.1, 0.1),
    normal=lambda m: nn.init.normal_(m[2].weight), uniform=lambda m: nn.init.uniform_(m[2].weight),
    xavier=lambda m: nn.init.xavier_normal_(m[0].weight), kaiming=lambda m: nn.init.kaiming_uniform_(m[0].weight),
    reset=lambda m: m[0].reset_parameters(), noise=noise, bernoulli=lambda m: m[0].weight.data.bernoulli_(0.3),
    eye=lambda m: nn.init.eye_(m[2].weight),
    columns=lambda m: m[0].weight.data[:, 2:].normal_().mul_(3),
)  # fmt: skip
OF_MODULES = FILLS["apply"], FILLS["reset"]  # methods that draw as one process would by themselves


def initialised(mesh):
    """Which of FILLS give another value than one process: none, on any number of ranks."""
    return {name: all(torch.equal(a, b) for a, b in filled(fill, mesh)) for name, fill in FILLS.items()}


def lora(mesh):
    """LoRA put on a sharded model: refused until wrapped; then trains alike on all ranks and merges."""
    from peft import LoraConfig, get_peft_model

    model = data_parallel(mlp(), mesh)
    with unsharded():  # PEFT sizes adapters by the shard that it would see
        adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["0", "2"], lora_dropout=0.0))
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(dist.get_rank()))  # another on each rank
    try:
        adapted(x)
        return "not refused"
    except RuntimeError as e:
        refused = str(e)
    data_parallel(adapted, mesh, mode="replicate")
    optimizer = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], 0.5)
    before = [whole(p).clone() for p in adapted.parameters() if not p.requires_grad]
    for _ in range(3):
        adapted(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    trained = [p.to_local() for p in adapted.parameters() if p.requires_grad]
    assert all(p.abs().sum() > 0 for p in trained)
    each = [None, None]
    dist.all_gather_object(each, trained)
    same = all(torch.equal(a, b) for a, b in zip(*each, strict=True))
    frozen = [torch.equal(a, whole(p)) for a, p in zip(before, (p for p in adapted.parameters() if not p.requires_grad),
                                                       strict=True)]  # fmt: skip
    expected = adapted(x).detach()
    merged = adapted.merge_and_unload()
    return refused, same, all(frozen), torch.allclose(merged(x), expected, atol=1e-6)


def as_with_others(mesh):
    """Habits that FSDP2 and DDP bring: whole state dicts, gradients that add up, autocast, checkpoints, DDP on top."""
    plain = mlp()
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(dist.get_rank()))
    model = data_parallel(mlp(), mesh)
    found = {}
    full = StateDictOptions(full_state_dict=True)
    values = {name: torch.full_like(value, 0.25) for name, value in plain.state_dict().items()}
    with pytest.raises(RuntimeError, match="mixed torch.Tensor and DTensor"):
        model.load_state_dict(values)
    set_model_state_dict(model, dict(values), options=full)  # it puts shards into the dict
    state = get_model_state_dict(model, options=full)
    found["state"] = all(type(v) is torch.Tensor and torch.equal(v, values[k]) for k, v in state.items()) and len(state)

    def grads(*losses):
        for p in model.parameters():
            p.grad = None
        for loss in losses:
            loss().backward()
        return [whole(p.grad) for p in model.parameters()]

    once = grads(lambda: model(x).square().sum())
    adding = grads(*(lambda part=part: model(part).square().sum() for part in x.chunk(2)))
    again = grads(lambda: torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).square().sum())
    with torch.autocast("cpu", torch.bfloat16):
        cast = grads(lambda: model(x).float().square().sum())
    close = lambda a, b, tol: all(torch.allclose(u, v, rtol=tol) for u, v in zip(a, b, strict=True))  # noqa: E731
    found |= dict(adding=close(once, adding, 1e-5), again=close(once, again, 1e-6), cast=close(once, cast, 0.05))
    found["fp32"] = {g.dtype for g in cast} == {torch.float32}
    with pytest.raises((RuntimeError, NotImplementedError, ValueError)) as refused:
        nn.parallel.DistributedDataParallel(model)(x)
    words = "sharding strategy", "mixed torch.Tensor", "incompatible", "unevenly sharded"
    found["ddp"] = any(word in str(refused.value) for word in words) or str(refused.value)
    return found


def penalised_and_averaged(mesh):
    """Three steps of a gradient penalty with a moving average of the weights, beside one process with all samples: the
    differences of the weights, of their averages and of what the averaged model says."""
    plain = mlp()
    model = data_parallel(mlp(), mesh)
    every = torch.randn(mesh.size(), 4, 6, generator=torch.Generator().manual_seed(0))
    averages = []
    for m, samples in ((plain, every.flatten(0, 1)), (model, every[dist.get_rank()])):
        optimizer = torch.optim.SGD(m.parameters(), 0.1)
        average = AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        for _ in range(3):
            x = samples.clone().requires_grad_()
            (slope,) = torch.autograd.grad(m(x).sum(), x, create_graph=True)
            (slope.norm(dim=1) - 1).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(m)
        averages.append(average)
    far = max(apart(model, plain), apart(averages[1].module, averages[0].module))
    said = [average(every[0]) for average in averages]
    moved = (plain[0].weight - mlp()[0].weight).abs().max().item()
    return far, (said[1] - said[0]).abs().max().item(), moved


def sharded_twice(mesh):
    """What an optimizer says that shares its parameters out among the ranks by collectives of its own."""
    model = data_parallel(mlp(), mesh)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)
    model(torch.ones(1, 6)).sum().backward()
    with pytest.raises((NotImplementedError, RuntimeError)) as refused:
        optimizer.step()
    return str(refused.value)


def optimizers():
    """By name: all of torch's, built for these parameters."""
    classes = {name: cls for name, cls in vars(torch.optim).items() if isinstance(cls, type)}
    matrices = dict(Muon=lambda params: torch.optim.Muon([p for p in params if p.ndim == 2], 0.1))
    made = {name: lambda params, cls=cls: cls(params, lr=0.1) for name, cls in classes.items()
            if issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer}  # fmt: skip
    return made | matrices


def trained_by_each(mesh):
    """By optimizer and mode: how far weights are from the plain model's after three steps; or the error."""
    found = {}
    for (name, make), mode in itertools.product(optimizers().items(), ("fully_shard", "replicate")):
        plain = mlp()
        sharded = data_parallel(mlp(), mesh, mode)
        try:
            for model in (plain, sharded):
                optimizer = make(model.parameters())
                x = torch.linspace(-1, 1, 24).view(4, 6)
                for _ in range(3):
                    optimizer.zero_grad()
                    (loss := model(x).square().mean()).backward()
                    optimizer.step(*([loss.detach] if name == "LBFGS" else []))
            found[name, mode] = apart(sharded, plain)
        except RuntimeError as error:
            found[name, mode] = str(error)
    return found


REPLACED = (
    "this parameter was replaced by its shard: build the optimizer after data_parallel(). "
    "If another module holds it, wrap that module, too; to only read it, use detach()"
)


def replaced():
    return pytest.raises(RuntimeError, match=re.escape(REPLACED))


def built_before(mesh):
    """What an optimizer says that was built before the wrap, eager and compiled; and how far one goes that was built
    before it, too, but was given the shards."""
    said = []
    for compile in (False, True):
        model = mlp()
        early = torch.optim.AdamW(model.parameters())
        data_parallel(model, mesh)
        loss = torch.compile(lambda x, model=model: model(x).sum(), backend="aot_eager", disable=not compile)
        loss(torch.ones(2, 6)).backward()
        for use in (early.step, early.zero_grad):
            with pytest.raises(RuntimeError) as error:
                use()
            said.append(str(error.value))
    early.param_groups[0]["params"] = [*model.parameters()]
    before = whole(model[0].weight).clone()
    early.step()
    return said, (whole(model[0].weight) - before).abs().max().item()


def scaled(mesh):
    """Scale and changed rows of three steps under a GradScaler; in the second the gradient of rank 1's shard is inf."""
    model = data_parallel(nn.Linear(4, 4, bias=False), mesh)
    found = []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for step in range(3):
        before = whole(model.weight).clone()
        loss = model(torch.ones(2, 4))
        loss = (loss * torch.tensor([1, 1, 1, float("inf") if step == 1 else 1])).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found.append((scaler.get_scale(), (whole(model.weight) != before).any(1).tolist()))
    return found


def measured(mesh):
    """The norm of a gradient: of this rank's shard, and of all."""
    model = data_parallel(mlp(), mesh)
    model(torch.ones(1, 6)).square().sum().backward()
    grad = model[0].weight.grad
    shard = grad.to_local().norm().item(), grad.norm().item()
    return shard, whole(grad).norm().item(), grad.norm().full_tensor().item()


def raised(words):
    raise RuntimeError(words)


def normed(mesh):
    """The running mean of batch norm, before and after the recipe of the docs."""
    model = data_parallel(nn.BatchNorm1d(2), mesh)
    model(torch.full((3, 2), 1.0 + dist.get_rank()))
    before = model.running_mean.tolist()
    for b in model.buffers():
        dist.broadcast(b, 0)
    return before, model.running_mean.tolist()


def saved_by_one(mesh):
    """What becomes of files that torch.save() wrote of a state_dict: each rank's own, rank 0's alone, rank 0's of
    replicas, all as ({mode}, {file}): whether the values are those that were saved, or the words of the refusal."""
    found = {}
    where = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(where)
    replicas = dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    meshes = dict(hybrid_shard=replicas)
    for mode, mine in (("fully_shard", True), ("fully_shard", False), ("replicate", False), ("hybrid_shard", False)):
        model = nn.Sequential(data_parallel(mlp(), meshes.get(mode, mesh), mode=mode))  # inside of another
        path = f"{where[0]}/{mode}{mine * dist.get_rank()}"
        values = [whole(p).clone() for p in model.parameters()]
        if mine or dist.get_rank() == 0:
            torch.save(model.state_dict(), path)
        dist.barrier()
        with torch.no_grad():
            [p.zero_() for p in model.parameters()]
        for part, prefix in ((model, ""), (model[0], "0."), (model[0][0], "0.0.")):  # around it, the wrapped, a child
            state = {name[len(prefix) :]: t for name, t in torch.load(path).items() if name.startswith(prefix)}
            try:
                part.load_state_dict(state)
            except RuntimeError as e:
                found.setdefault((mode, mine), []).append(str(e))
        loaded = [whole(p) for p in model.parameters()]
        found.setdefault((mode, mine), all(map(torch.equal, loaded, values)))
    return found


class Routed(nn.Module):
    """Each rank runs another expert, and takes the other's parameters times zero, as one does under DDP."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.experts = nn.ModuleList([nn.Linear(6, 6) for _ in range(2)])

    def forward(self, x, rank):
        used = self.experts[rank]
        other = self.experts[1 - rank]
        return used(self.norm(self.first(x))) + 0 * (other.weight.sum() + other.bias.sum())


class Routes(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Routed() for _ in range(3)])

    def forward(self, x, rank):
        for layer in self.layers:
            x = layer(x, rank)
        return x.square().sum()


def routed(mesh):
    """How far gradients are from those of one process, where ranks need other weights of a block in backward."""
    torch.manual_seed(1)
    plain = Routes()
    sharded = data_parallel(copy.deepcopy(plain), mesh)
    inputs = torch.randn(2, 4, 6)
    for rank, x in enumerate(inputs):
        (plain(x, rank) / 2).backward()
    sharded(inputs[dist.get_rank()], dist.get_rank()).backward()
    return apart(sharded, plain, lambda p: p.grad)


@pytest.fixture(scope="module")
def two():
    jobs = [initialised, lora, as_with_others, penalised_and_averaged, sharded_twice, scaled, measured, built_before]
    jobs += [trained_by_each, routed, saved_by_one, normed]
    return spawn(2, jobs, timeout=240)


@pytest.mark.long
def test_ranks_that_run_other_experts_and_the_rest_times_zero_have_the_gradients_of_one_process(two):
    assert max(two["routed"]) < 1e-5


@pytest.mark.long
def test_running_statistics_are_each_rank_s_own_until_they_are_broadcast(two):
    (first, same), (second, also) = two["normed"]
    assert first != second
    assert same == also == first


def test_zero_times_parameters_outside_of_the_forward_is_a_sum_of_shards(model):
    tokens = torch.zeros(4, dtype=torch.long)
    loss = F.cross_entropy(model(torch.randn(4, 6)), tokens) + 0 * sum(p.sum() for p in model[0].parameters())
    with pytest.raises(RuntimeError, match="got mixed torch.Tensor and DTensor"):
        loss.backward()


@pytest.mark.long
def test_a_shard_of_another_rank_is_not_loaded_as_this_rank_s_own(two):
    for rank, found in enumerate(two["saved_by_one"]):
        assert found["fully_shard", True] is found["replicate", False] is found["hybrid_shard", False] is True
        refusal = found["fully_shard", False]
        words = [f"{name} is the shard of another rank: torch.save()" for name in ("0.0.weight", "0.weight", "weight")]
        assert all(map(str.__contains__, refusal, words)) and len(refusal) == 3 if rank else refusal is False


@pytest.mark.long
def test_a_gradient_that_is_not_finite_on_one_rank_stops_the_step_of_all(two):
    assert two["scaled"] == [[(2.0, [True] * 4), (1.0, [False] * 4), (1.0, [True] * 4)]] * 2


@pytest.mark.long
def test_the_norm_of_a_gradient_is_this_rank_s_part_until_it_is_whole(two):
    for (local, item), *norms in two["measured"]:
        assert norms == [pytest.approx(norms[0])] * 2 and item == pytest.approx(local) and item < norms[0]


@pytest.mark.long
def test_an_optimizer_with_collectives_of_its_own_is_refused_by_torch(two):
    assert all("c10d.broadcast_" in said for said in two["sharded_twice"]), two["sharded_twice"]


@pytest.mark.long
def test_each_of_torch_s_optimizers_trains_as_on_one_process_or_ends_in_an_error_of_torch_s(two):
    """SparseAdam refuses gradients that are not sparse."""
    changed = "placement changes are not supported|does not have a sharding strategy"  # torch 2.13; 2.11's Rprop
    refused = dict(Adafactor=changed, Rprop=changed, LBFGS="flatten unevenly sharded")
    for found in two["trained_by_each"]:
        for mode in ("fully_shard", "replicate"):
            assert "does not support dense gradients" in found.pop(("SparseAdam", mode))
        for name, words in refused.items():
            assert re.search(words, found.pop((name, "fully_shard")))
        if torch.__version__.startswith("2.11"):  # which has no rule for what Rprop does, however it is sharded
            assert re.search(changed, found.pop(("Rprop", "replicate")))
        assert not {name for name, far in found.items() if isinstance(far, str) or far > 1e-5}
        assert found


@pytest.mark.long
def test_an_optimizer_that_was_built_before_the_wrap_is_refused_at_its_first_step(two):
    for said, moved in two["built_before"]:
        assert said == [REPLACED] * 4
        assert moved == pytest.approx(1e-3, rel=0.1)


@pytest.mark.parametrize("name", [*optimizers(), "foreach", "fused", "capturable"])
def test_every_optimizer_refuses_a_parameter_that_was_replaced(fake, name):
    make = optimizers().get(name) or (lambda params: torch.optim.AdamW(params, **{name: True}))
    model = mlp()
    optimizer = make(model.parameters())
    old = [*model.parameters()]
    data_parallel(model, fake(2))(torch.ones(2, 6)).sum().backward()
    step = (lambda: optimizer.step(lambda: torch.ones(()))) if name == "LBFGS" else optimizer.step
    uses = [step, optimizer.zero_grad, lambda: optimizer.zero_grad(set_to_none=False),
            lambda: setattr(old[0], "grad", None), lambda: nn.utils.clip_grad_norm_(old, 1.0)]  # fmt: skip
    for use in uses:
        with replaced():
            use()


def test_a_replaced_parameter_is_read_copied_saved_and_freed_as_before(fake):
    model = mlp()
    model[2].requires_grad_(False)
    average = copy.deepcopy(model)
    old = [*model.parameters()]
    values = [p.detach().clone() for p in old]
    data_parallel(model, fake(1))
    average(torch.ones(1, 6)).sum().backward()
    assert average[0].weight.grad is not None
    assert all(torch.equal(p, value) for p, value in zip(old, values, strict=True))
    assert old[2].grad is None and type(old[2]) is nn.Parameter  # frozen ones are nothing that an optimizer would train
    assert type(pickle.loads(pickle.dumps(old[0]))) is nn.Parameter
    assert torch.equal(copy.deepcopy(old[0]), values[0])
    data_parallel(nn.ParameterList([copy.deepcopy(old[0])]), fake(1))
    held = [weakref.ref(p) for p in old]
    del old
    gc.collect()
    assert [each() for each in held] == [None] * 4


@pytest.mark.parametrize("meta", [False, True])
def test_an_optimizer_of_tied_parameters_that_was_built_before_is_refused(fake, meta):
    """Also if one of two that are tied was wrapped: its other place is no longer the same parameter."""
    for both in (True, False):
        with torch.device("meta" if meta else "cpu"):
            model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8, bias=False))
        model[1].weight = model[0].weight
        early = torch.optim.SGD(model.parameters(), 0.1)
        data_parallel(model if both else model[0], fake(2))
        late = torch.optim.SGD(model.parameters(), 0.1)
        for optimizer in (early, late)[: 1 if both else 2]:
            with replaced():
                optimizer.step()


def test_a_call_of_torchtitans_file_is_the_same_here_or_refused(fake):
    names = [*inspect.signature(data_parallel).parameters]
    assert names[:4] == ["model", "device_mesh", "mode", "mp_policy"]
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    assert isinstance(data_parallel(mlp(), fake(2), "fully_shard", mp_policy=policy)[0].weight, DTensor)
    with pytest.raises(TypeError, match="ac_mode"):
        data_parallel(mlp(), fake(2), "fully_shard", ac_mode="none")


@pytest.mark.long
def test_gradients_of_gradients_and_moving_averages_are_those_of_one_process(two):
    for far, said, moved in two["penalised_and_averaged"]:
        assert far < 1e-5 and said < 1e-5 and moved > 0.01


@pytest.mark.long
def test_whole_state_dicts_accumulation_autocast_and_checkpoints_work_and_ddp_on_top_is_refused(two):
    for found in two["as_with_others"]:
        assert found == dict(state=4, adding=True, again=True, cast=True, fp32=True, ddp=True)


@pytest.mark.long
def test_initialisation_and_clamping_give_the_values_of_one_process(two, fake):
    for found in (*two["initialised"], initialised(fake(1))):
        assert found == dict.fromkeys(FILLS, True)


@pytest.mark.long
def test_late_adapters_are_refused_then_adopted_train_alike_and_merge(two):
    for refused, *held in two["lora"]:
        assert "lora_A" in refused and "mode='replicate'" in refused and held == [True, True, True]


def test_groups_freezing_and_gradients_by_attribute_are_those_of_the_parameter(model):
    assert [id(m.weight) for m in (model[0], model[2])] == [id(p) for n, p in model.named_parameters() if "weight" in n]
    model[0].weight.requires_grad_(False)
    model(torch.randn(2, 6)).sum().backward()
    assert model[0].weight.grad is None
    assert model[2].weight.grad is model.get_parameter("2.weight").grad is not None
    torch.optim.SGD([model[2].weight], 0.1).step()
    model[0].weight = model[0].weight  # the parameter itself may be put back


class Once(Block):
    """Uses a layer without training it."""

    def forward(self, x):
        self.up.requires_grad_(False)
        y = self.up(self.norm(x))
        self.up.requires_grad_(True)
        return x + self.down(F.gelu(y))


class Adversarial(nn.Module):
    """Its loss must not train the discriminator `d`, whose ends are gathered with those of the generator `g`."""

    def __init__(self):
        super().__init__()
        self.g = nn.Sequential(nn.Linear(8, 8), *Blocks().blocks)
        self.d = nn.Sequential(*Blocks().blocks, nn.Linear(8, 1))

    def forward(self, x):
        self.d.requires_grad_(False)
        loss = self.d(self.g(x)).mean()
        self.d.requires_grad_(True)
        return loss


class Late(nn.Module):
    """Frozen until its forward unfreezes it."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Once() for _ in range(3)])
        self.head = nn.Linear(8, 1).requires_grad_(False)

    def forward(self, x):
        self.head.requires_grad_(True)
        for block in self.blocks:
            x = block(x)
        return self.head(x).mean()


@pytest.mark.parametrize("make", [Adversarial, Late])
def test_what_forward_freezes_or_unfreezes_is_seen_at_the_next_read(fake, make):
    plain = make()
    x = torch.randn(2, 4, 8)
    model = data_parallel(copy.deepcopy(plain), fake(1))
    for m in (plain, model):
        m(x).backward()
    assert_gradients(model, plain, rtol=0, atol=0)
    assert any(p.grad is None for p in plain.parameters())


def assert_gradients(model, plain, **limits):
    """The same of both, or none, of a model on one rank."""
    for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        assert p.grad is None or torch.allclose(q.grad.to_local(), p.grad, **limits), name


@pytest.mark.long
@pytest.mark.parametrize("compile", [False, True])
def test_a_forward_that_is_replaced_in_the_class_later_is_the_one_that_runs(fake, compile):
    """As libraries of faster kernels do, before or after the wrap; also of a class that was wrapped before."""
    cls = type("Layer", (nn.Linear,), dict(forward=lambda self, x: F.linear(x, self.weight, self.bias)))
    before = data_parallel(cls(3, 2), fake(2))
    after = cls(3, 2)
    cls.forward = lambda self, x: F.linear(x, self.weight) + 7
    data_parallel(after, fake(2))
    for model in (before, after):
        assert torch.equal(run_of(model, compile)(torch.zeros(1, 3)), torch.full((1, 2), 7.0))


class Ends(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, 3)
        self.head = nn.Linear(3, 2)
        self.shift = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.head(self.body(x + self.shift))


def with_method(model):
    model.forward = types.MethodType(lambda self, x: F.linear(self.body(x), self.head.weight) + self.shift[:2], model)


def with_function(model):
    before = model.forward
    model.forward = lambda x: before(x).float() * model.shift[:2]


AROUND = dict(
    method=with_method,
    function=with_function,
    hook=lambda model: model.register_forward_hook(lambda m, args, y: y + m.head.weight.sum()),
    pre_hook=lambda model: model.register_forward_pre_hook(lambda m, args: (args[0] + m.shift,)),
    spectral_norm=lambda model: nn.utils.spectral_norm(model.head),
)


@pytest.mark.long
@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("around", AROUND)
def test_what_lies_around_the_forward_of_the_class_reads_whole_parameters(fake, around, compile):
    torch.manual_seed(1)
    plain, x = Ends().eval(), torch.randn(4, 3)  # spectral_norm changes nothing while it evaluates
    model = copy.deepcopy(plain)
    for m in (plain, model):
        torch.manual_seed(2)
        AROUND[around](m)
    data_parallel(model, fake(1))
    for m in (plain, run_of(model, compile)):
        m(x).square().sum().backward()
    assert_gradients(model, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("forward, note", [
    (lambda m, x: x + dict(m.named_parameters())["shift"], "read a parameter as an attribute of its module"),
    (lambda m, x: x + [*m.parameters()][0], "read a parameter as an attribute of its module"),
    (lambda m, x: torch.func.grad(lambda x: m.head(m.body(x)).sum())(x), "call them around the model"),
    (lambda m, x: raised("Connection closed by peer [127.0.0.1]:1"), "Every rank must call the model"),
], ids=["named_parameters", "parameters", "torch.func", "gloo"])  # fmt: skip
def test_an_error_of_torch_that_our_wrapper_leads_to_says_what_to_do(fake, forward, note):
    model = data_parallel(type("Model", (Ends,), dict(forward=forward))(), fake(2))
    with pytest.raises(RuntimeError) as error:
        model(torch.ones(2, 3))
    assert note in error.value.__notes__[0]
    assert len(error.value.__notes__) == 1


@pytest.mark.parametrize("compile", [False, True])
def test_get_parameter_while_the_model_runs_gives_what_the_attribute_is(fake, compile):
    model = data_parallel(type("Model", (Ends,), dict(forward=lambda m, x: x + m.get_parameter("shift")))(), fake(1))
    run_of(model, compile)(torch.ones(2, 3)).sum().backward()
    assert whole(model.shift.grad).tolist() == [2, 2, 2]


def test_late_adapters_on_the_mesh_of_hybrid_shard_are_replicated_over_all_of_it(fake):
    mesh = fake(4, replicas=2)
    model = data_parallel(nn.Sequential(nn.Linear(4, 4)), mesh, "hybrid_shard")
    model.append(nn.Linear(4, 2))
    data_parallel(model, mesh, "replicate")
    with Comms() as sent:
        model(torch.ones(1, 4)).sum().backward()
    reduced = [(n, ranks) for name, n, _, ranks in sent.log if name == "all_reduce"]
    assert sorted(reduced) == [(10, 2), (10, 2), (10, 2)]  # the adapter whole, over each dimension; half of the other
    assert {p.device_mesh for p in model.parameters()} == {mesh}
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def test_a_loss_that_holds_a_parameter_from_before_the_wrap_is_refused_in_backward(fake):
    model = mlp()
    other = nn.Linear(3, 5, bias=False)
    other.weight = model[0].weight  # [5, 6]: as the weight of a head that a loss of its own computes with
    data_parallel(model, fake(2))
    for _ in range(2):
        with replaced():
            F.linear(torch.ones(2, 6), other.weight).sum().backward()
    data_parallel(other, fake(2))  # unless it is wrapped, too: then it has the model's shard
    assert other.weight is model[0].weight
    assert other(torch.ones(2, 6)).sum().backward() is None
    assert other.weight.grad is not None


@pytest.mark.long
@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("placements", [[Shard(1)], [Partial()], [Shard(0), Replicate()], [Shard(0), Shard(0)]])
def test_a_parameter_that_is_cut_another_way_is_refused_and_not_read_as_rows(fake, placements, compile):
    replicas = len(placements)
    mesh = fake(4, replicas=2 if replicas == 2 else None)
    model = data_parallel(nn.Linear(8, 8), mesh, ["fully_shard", "hybrid_shard"][replicas - 1])
    other = DTensor.from_local(torch.ones(8, 8), mesh, placements, run_check=False)
    run = run_of(model, compile)
    refused = "cannot gather a parameter with placements"
    with pytest.raises(RuntimeError, match=refused):
        torch.func.functional_call(run, {"_orig_mod.weight" if compile else "weight": other}, torch.ones(1, 8))
    model.weight = nn.Parameter(other)
    with pytest.raises(RuntimeError, match=refused):
        run(torch.ones(1, 8))


@pytest.mark.parametrize("change", [
    lambda m: setattr(m[0], "weight", nn.Parameter(torch.ones(5, 6))),
    lambda m: m.load_state_dict(mlp().state_dict(), assign=True),
    lambda m: m.append(nn.Linear(3, 3)),
    lambda m: m[0].register_parameter("extra", nn.Parameter(torch.ones(1))),
    lambda m: nn.utils.parametrize.register_parametrization(m[0], "weight", nn.Identity()),
], ids=["assigned", "loaded", "module", "parameter", "parametrized"])  # fmt: skip
@pytest.mark.parametrize("compile", [False, True])
def test_a_parameter_that_would_train_unsharded_is_named(model, change, compile):
    change(model)
    with pytest.raises(Exception, match=r"(0|3)\.\S+ is not sharded: it came after data_parallel.*For a new mod"):
        run_of(model, compile, "eager")(torch.randn(2, 6))


def test_wrapping_again_takes_what_is_new_and_keeps_ties(fake):
    mesh = fake(2)
    model = nn.ModuleDict(dict(emb=nn.Embedding(8, 4), head=nn.Linear(4, 8, bias=False)))
    model["head"].weight = model["emb"].weight
    data_parallel(model["emb"], mesh)  # blocks first and the root last, as with fully_shard
    data_parallel(model, mesh)
    assert model["head"].weight is model["emb"].weight
    assert len(list(model.parameters())) == 1
    with pytest.raises(ValueError, match="wrapped already"):
        data_parallel(model, mesh)
    model["emb"].weight = nn.Parameter(torch.ones(8, 4))
    model["new"] = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"emb\.weight.*copy_.. it into the old parameter"):
        data_parallel(model, mesh)


def test_a_model_whose_parts_hold_every_parameter_is_wrapped_last(fake):
    mesh = fake(2)
    model = nn.Sequential(mlp(), mlp())
    for part in model:
        data_parallel(part, mesh)
    data_parallel(model, mesh)
    assert units_of(model) == ["0", "1"]
    assert isinstance(model[0][0].weight, DTensor)
    with pytest.raises(ValueError, match="wrapped already"):
        data_parallel(model, mesh)


@pytest.mark.parametrize("what", [
    lambda m: nn.utils.weight_norm(m[0]), lambda m: nn.utils.prune.l1_unstructured(m[0], "weight", 0.5)],
    ids=["weight_norm", "prune"])  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_weights_that_are_computed_are_put_there_before_the_wrap(fake, what):
    import torch.nn.utils.prune  # noqa: F401

    x = torch.randn(2, 6)
    plain = mlp()
    what(plain)
    expected = plain(x).detach()
    early = data_parallel(plain, fake(1))
    assert torch.equal(early(x), expected)
    with pytest.raises((TypeError, RuntimeError), match="before wrapping|not sharded|placement|sharding strategy"):
        late = data_parallel(mlp(), fake(1))
        what(late)
        late(x)


def test_vmap_jvp_and_detect_anomaly_work(fake):
    plain = mlp()
    model = data_parallel(mlp(), fake(1))
    x = torch.randn(4, 6)
    for m in (plain, model):
        m.got = [torch.vmap(m)(x), *torch.func.jvp(m, (x,), (x,)), torch.func.jacrev(m)(x[0]),
                 torch.func.grad(lambda y, m=m: m(y).square().sum())(x)]  # fmt: skip
    assert all(torch.allclose(a, b) for a, b in zip(plain.got, model.got, strict=True))
    with torch.autograd.detect_anomaly(check_nan=True):
        model(x).sum().backward()
    with torch.autograd.detect_anomaly(check_nan=True), pytest.raises(RuntimeError, match="returned nan values"):
        (model(x) * float("nan")).sum().backward()


def test_unsharded_gathers_once_trains_and_refuses_changes_that_would_be_lost(fake):
    model = data_parallel(mlp(), fake(1))
    with unsharded():
        assert not isinstance(model[0].weight, DTensor)
        assert model[0].weight is model[0].weight
        penalty = sum(module.weight.square().sum() for module in model if isinstance(module, nn.Linear))
    penalty.backward()
    assert torch.allclose(whole(model[0].weight.grad), 2 * whole(model[0].weight))
    with pytest.raises(RuntimeError, match="weight of Linear was changed in place"), unsharded(), torch.no_grad():
        model[0].weight.zero_()
    with contextlib.suppress(ZeroDivisionError), unsharded():
        raise ZeroDivisionError
    assert isinstance(model[0].weight, DTensor)


@pytest.mark.parametrize("rows", [3, 4])
def test_a_forward_that_changes_a_weight_in_place_is_an_error(fake, rows):
    """Of rows that N does not divide, torch tells it first."""

    class Clamped(nn.Linear):
        def forward(self, x):
            with torch.no_grad():
                self.weight.clamp_(-1, 1)
            return super().forward(x)

    with pytest.raises(RuntimeError) as error:
        data_parallel(Clamped(6, rows), fake(2))(torch.randn(2, 6))
    told = "".join([str(error.value), *getattr(error.value, "__notes__", ())])
    assert "was changed in place while it was gathered" in told
    assert "change the parameter outside forward and unsharded()" in told


def test_a_step_inside_unsharded_is_seen_by_the_next_read(fake):
    """Of an optimizer that counts versions; torch's foreach and fused ones do not."""
    model = data_parallel(mlp(), fake(1), mp_policy=MixedPrecisionPolicy(torch.float64))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=False)
    with unsharded():
        before = model[0].weight.detach().clone()
        model[0].weight.sum().backward()
        optimizer.step()
        assert torch.allclose(model[0].weight, before - 0.1)
    with unsharded(), unsharded():
        assert not isinstance(model[0].weight, DTensor)
    assert isinstance(model[0].weight, DTensor)


def test_functional_call_with_shards_that_live_no_longer_has_gradients(fake):
    """One step of MAML: the updated parameters are temporary."""
    x = torch.randn(4, 6)
    grads = []
    for model in (mlp().double(), data_parallel(mlp(), fake(1), mp_policy=MixedPrecisionPolicy(torch.float64))):
        params = dict(model.named_parameters())
        inner = torch.autograd.grad(model(x.double()).square().sum(), [*params.values()], create_graph=True)
        updated = {name: p - 0.1 * g for (name, p), g in zip(params.items(), inner, strict=True)}
        torch.func.functional_call(model, updated, (x.double(),)).square().sum().backward()
        grads.append([whole(p.grad) if isinstance(p, DTensor) else p.grad for p in model.parameters()])
    assert all(torch.allclose(a.double(), b.double(), rtol=1e-4, atol=1e-5) for a, b in zip(*grads, strict=True))


def test_a_copy_is_checked_as_the_original_and_hooks_are_not_lost(model, fake):
    model = copy.deepcopy(model)
    model.append(nn.Linear(3, 3))
    with pytest.raises(RuntimeError, match="3.weight is not sharded"):
        model(torch.randn(2, 6))
    hooked = mlp()
    hooked[2].bias.register_hook(lambda g: g * 0)
    with pytest.raises(ValueError, match="2.bias: its hooks would be lost"):
        data_parallel(hooked, fake(2))


def test_what_initialisation_would_lose_is_refused_by_apply_and_reset_parameters(fake):
    model = data_parallel(nn.Sequential(nn.Embedding(4, 3, padding_idx=0)), fake(2))
    for run in (model[0].reset_parameters, lambda: model.apply(lambda m: m is model or m.weight[0].zero_())):
        with pytest.raises(RuntimeError, match="fill the whole parameter in place"), torch.no_grad():
            run()


LOST = dict(
    index=lambda w: w.data.__setitem__(0, 1.0), row=lambda w: w.data[3].zero_(), rows=lambda w: w.data[1:3].mul_(2),
    dirac=lambda w: nn.init.dirac_(w.unsqueeze(-1)), noise=lambda w: w.data[0].normal_(),
    copy=lambda w: w.data[0].copy_(torch.zeros(3)), clamp=lambda w: w.data[1:, 0].clamp_(0, 1),
    bernoulli=lambda w: w.data.copy_(torch.bernoulli(w.data.abs())),
)  # fmt: skip


@pytest.mark.parametrize("write", LOST)
def test_a_write_that_would_not_reach_the_parameter_is_refused(fake, write):
    weight = data_parallel(nn.Linear(3, 4), fake(2)).weight
    refused = pytest.raises(RuntimeError, match="would change a copy, not the sharded tensor: fill the whole")
    with refused, disable_data_parallel():
        LOST[write](weight)
    before = weight._local_tensor.detach().clone()
    weight.data.add_(1)  # the refusal leaves nothing behind
    assert torch.equal(weight._local_tensor, before + 1)


def test_outside_of_disable_data_parallel_dtensors_act_as_torch_has_them(fake):
    """Nothing is patched: handlers of DTensor's operations are those from before, but for operations of our own."""
    model = data_parallel(nn.Linear(3, 4), fake(2))
    init = nn.init._no_grad_trunc_normal_
    handlers = set(simple_fsdp._handlers)
    with disable_data_parallel():
        assert torch._C._len_torch_dispatch_stack() == 1
        assert set(simple_fsdp._handlers) == handlers
        with pytest.raises(RuntimeError, match="would change a copy, not the sharded tensor"):
            model.weight.data[0].zero_()
        (model.weight * 1)[:2].relu_()  # not a parameter's
        with pytest.raises(NotImplementedError):  # torch's word
            model.weight.data.bernoulli_(model.weight.data)
    assert torch._C._len_torch_dispatch_stack() == 0
    assert nn.init._no_grad_trunc_normal_ is init
    model.weight.data[0].zero_()  # as with FSDP2


@pytest.mark.long
def test_the_file_adds_handlers_of_its_own_operations_and_of_one_of_torch():
    """In a process of its own: other tests load copies of the file, each of which adds its handlers, too."""
    code = """if True:
        from torch.distributed.tensor import DTensor
        handlers = DTensor._op_dispatcher._custom_op_handlers
        before = dict(handlers)
        import simple_fsdp
        assert all(handlers[op] is before[op] for op in before)
        print(*sorted(op.namespace for op in handlers.keys() - before.keys()))
        print(*(op for op in handlers.keys() - before.keys() if op.namespace == "aten"))"""
    assert module("\n" + code).out.split("\n")[:2] == ["aten simple_fsdp", "aten._is_any_true.default"]


def test_a_draw_has_the_order_in_memory_of_the_plain_parameter(fake):
    drawn = []
    for mesh in (None, fake(1)):
        model = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
        if mesh:
            data_parallel(model, mesh)
        torch.manual_seed(3)
        with disable_data_parallel():
            drawn.append(nn.init.normal_(model.weight).detach())
    assert torch.equal(drawn[0], whole(drawn[1]))


def test_names_of_classes_are_those_of_the_plain_model(model):
    plain = mlp()
    assert repr(plain) == repr(model) and str(type(model[0])) == str(nn.Linear) and type(model[0]) is not nn.Linear
    assert isinstance(model[0], nn.Linear)
    assert type(model[0]).__module__ == nn.Linear.__module__


def test_a_method_that_computes_with_a_weight_outside_of_forward_needs_unsharded(fake):
    """Methods that only call submodules work as they are; one that computes with a weight needs unsharded()."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(6, 6)

        def features(self, x):
            return self.a(x)

        def score(self, x):
            return x @ self.a.weight.T

        def forward(self, x):
            return self.score(self.features(x))

    model = data_parallel(Model(), fake(2))
    x = torch.randn(2, 6)
    assert model(x).shape == model.features(x).shape == (2, 6)
    with pytest.raises(RuntimeError, match="mixed torch.Tensor and DTensor"):
        model.score(x)
    with unsharded():
        assert model.score(x).shape == (2, 6)


def test_embeddings_are_resized_before_the_wrap(fake):
    transformers = pytest.importorskip("transformers")
    small = dict(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
                 num_key_value_heads=2)  # fmt: skip
    tokens = torch.arange(4)[None]
    early = transformers.LlamaForCausalLM(transformers.LlamaConfig(**small))
    early.resize_token_embeddings(40)
    assert data_parallel(early, fake(1))(tokens).logits.shape[-1] == 40
    late = data_parallel(transformers.LlamaForCausalLM(transformers.LlamaConfig(**small)), fake(2))
    with pytest.raises((RuntimeError, ValueError, TypeError), match="not sharded|DTensor|sharding strategy"):
        late.resize_token_embeddings(40)
        late(tokens)
