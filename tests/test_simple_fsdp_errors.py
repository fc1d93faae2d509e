"""simple_fsdp.py where something goes wrong (errors, scopes, warnings); and the file itself: private names, imports
(also of the files that are copied along with it), length."""

import copy
import re
from pathlib import Path

import pytest
import torch
from models_for_wrapper import (
    BF16,
    Block,
    Blocks,
    batch,
    fake_ranks,
    meta_first,
    private_names,
    silence,
    with_one_thread,
)
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import simple_fsdp
from simple_fsdp import (
    MixedPrecisionPolicy,
    data_parallel,
    describe,
    disable_data_parallel,
    unsharded,
)

one_thread = pytest.fixture(scope="module", autouse=True)(with_one_thread)
fake = pytest.fixture(fake_ranks)

# -------------------------------------------------------------------------------------------------- errors and scopes


def assert_clean(model):
    """No scope is left open: outside of forward a parameter is itself; no hook is left."""
    assert model.weight is model._parameters["weight"]
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


CHANGES = dict(
    mul=lambda m: m[1]._parameters["weight"].mul_(2), local=lambda m: m[1]._parameters["weight"].to_local().mul_(2),
    load_state_dict=lambda m: m.load_state_dict(m.state_dict()),
    # DTensor's foreach and fused steps, alas, count no version
    optimizer=lambda m: torch.optim.SGD(m.parameters(), foreach=False, weight_decay=0.1).step(),
)  # fmt: skip


@pytest.mark.parametrize("how", CHANGES)
def test_a_parameter_that_changes_in_place_between_forward_and_backward_is_an_error(fake, how):
    # not on one rank without a cast: there the gathered weight is the parameter, whose changes DTensor does not count
    for world, policy in ((4, MixedPrecisionPolicy()), (4, BF16), (1, BF16)):
        model = data_parallel(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), fake(world), mp_policy=policy)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        loss = model(torch.randn(3, 8, dtype=policy.param_dtype)).sum()
        with torch.no_grad():
            CHANGES[how](model)
        with pytest.raises(RuntimeError, match="between its forward and its backward"):
            loss.backward()


class Edited(nn.Module):
    """Changes the result of an exp in place, which backward would need as it was."""

    def __init__(self):
        super().__init__()
        self.first, self.last, self.edits = nn.Linear(8, 8), nn.Linear(8, 8), True

    def forward(self, x):
        x = self.first(x).exp()
        y = x * 2
        if self.edits:
            x.add_(1)
        return self.last(y).sum()


@pytest.mark.parametrize("mode", ["replicate", "fully_shard"])
@pytest.mark.parametrize("world", [1, 4])
def test_an_activation_that_changes_in_place_before_its_backward_is_an_error_as_in_plain_torch(fake, world, mode):
    for model in (Edited(), data_parallel(Edited(), fake(world), mode=mode)):
        loss = model(torch.randn(3, 8))
        with pytest.raises(RuntimeError, match="in.?place"):
            loss.backward()
        model.edits = False
        model(torch.randn(3, 8)).backward()


def test_an_attribute_error_while_gathering_is_a_runtime_error_and_never_hands_out_the_shard(fake):
    model = data_parallel(nn.Linear(8, 8), fake(4))
    del model._gather_policy
    with unsharded(), pytest.raises(RuntimeError, match="weight.*Linear"):
        _ = model.weight
    with pytest.raises(RuntimeError, match="Linear"):
        model(torch.randn(3, 8))


def test_an_error_in_forward_leaves_no_scope_and_no_hook_behind(fake):
    model = data_parallel(nn.Sequential(nn.Linear(8, 8), Block(), nn.Linear(8, 8)), fake(4))
    for _ in range(2):
        with pytest.raises(RuntimeError):
            model(torch.randn(3, 7))
        model[2].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(torch.randn(3, 8))
        model[2]._forward_pre_hooks.clear()
        assert_clean(model[0])
    model(torch.randn(3, 8)).sum().backward()


def test_where_saved_tensor_hooks_are_forbidden_forward_leaves_no_scope_behind(fake):
    model = data_parallel(nn.Linear(8, 8), fake(4))
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        with pytest.raises(RuntimeError, match="not here"):
            model(torch.randn(3, 8))
    assert_clean(model)


def test_other_saved_tensor_hooks_stay_in_charge(fake):
    model, seen = data_parallel(Blocks(), fake(4)), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):
        model(*batch(3)).backward()
    assert len(seen) > 9 and all(p.grad is not None for p in model.parameters())


def test_a_weight_that_forward_reads_under_no_grad_first_gets_its_whole_gradient(fake):
    class Scaled(nn.Linear):
        def forward(self, x):
            with torch.no_grad():
                scale = self.weight.square().sum()
            return super().forward(x) / scale

    plain, x = Scaled(8, 4), torch.randn(3, 8)
    model = data_parallel(copy.deepcopy(plain), fake(1))
    for module in (plain, model):
        module(x).sum().backward()
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad.to_local())


def test_disable_data_parallel_is_reentrant_and_ends_with_an_error_too(fake):
    model = data_parallel(nn.Linear(8, 8), fake(4))
    with disable_data_parallel():
        assert isinstance(model.weight, DTensor) and model.weight is model._parameters["weight"]
        with disable_data_parallel():
            assert isinstance(model.weight, DTensor)
        assert isinstance(model.weight, DTensor)
        with pytest.raises(ZeroDivisionError), disable_data_parallel():
            raise ZeroDivisionError
        assert isinstance(model.weight, DTensor)
        repr(model)
        assert isinstance(model.weight, DTensor)
    with unsharded():
        assert not isinstance(model.weight, DTensor)
        with disable_data_parallel():
            assert isinstance(model.weight, DTensor)


def test_shards_of_another_wrapper_are_initialised_where_nothing_was_wrapped_by_this_file(fake):
    shard = distribute_tensor(torch.zeros(8, 2), fake(4), [Shard(0)])
    torch.manual_seed(3)
    with disable_data_parallel():
        nn.init.normal_(shard)
    torch.manual_seed(3)
    assert torch.equal(shard.to_local(), torch.empty(8, 2).normal_()[:2])


def test_nothing_we_do_makes_torch_warn(fake):
    mesh = fake(4)
    with silence() as said:
        model = meta_first(mesh)
        model(*batch(3)).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        copy.deepcopy(model.parts["mlp"]).load_state_dict(model.parts["mlp"].state_dict())
        assert repr(model) and describe(model)
    assert not said


# ------------------------------------------------------------------------------------------------------ the file itself

SOURCE = Path(simple_fsdp.__file__).read_text()
# Every private name of torch that the file uses, and where it lives.
PRIVATE = {
    "torch._C": lambda: torch._C,
    "torch._C._autograd": lambda: torch._C._autograd,
    "_autograd._top_saved_tensors_default_hooks": lambda: torch._C._autograd._top_saved_tensors_default_hooks(True),
    "_C._current_graph_task_id": lambda: torch._C._current_graph_task_id() == -1,
    "_C._AutoDispatchBelowAutograd": lambda: torch._C._AutoDispatchBelowAutograd().__enter__,
    "_C._functorch": lambda: torch._C._functorch.peek_interpreter_stack(),
    "checkpoint._CachingTorchDispatchMode": lambda: torch.utils.checkpoint._CachingTorchDispatchMode,
    "checkpoint._CachedTorchDispatchMode": lambda: torch.utils.checkpoint._CachedTorchDispatchMode,
    "_python_dispatch._get_current_dispatch_mode": lambda: torch.utils._python_dispatch._get_current_dispatch_mode(),
    "_python_dispatch._pop_mode_temporarily": lambda: torch.utils._python_dispatch._pop_mode_temporarily,
    "torch._functorch": lambda: torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack,
    "torch._dynamo": lambda: torch._dynamo.eval_frame.skip_code,
    "_C._dynamo": lambda: torch._C._dynamo.eval_frame.get_eval_frame_callback(),
    "torch._sync": lambda: torch._sync,
    "torch._from_functional_tensor": lambda: torch._from_functional_tensor(torch._to_functional_tensor(torch.ones(1))),
    "DTensor._op_dispatcher": lambda: DTensor._op_dispatcher,
    "_op_dispatcher._custom_op_handlers": lambda: DTensor._op_dispatcher._custom_op_handlers.items(),
    "aten._is_any_true": lambda: torch.ops.aten._is_any_true.default,
    "torch.utils._python_dispatch": lambda: torch.utils._python_dispatch.TorchDispatchMode,
    "torch._subclasses": lambda: torch._subclasses.fake_tensor.is_fake(torch.empty(0)),
    "torch.ops._c10d_functional": lambda: torch.ops._c10d_functional.wait_tensor.default,
    "Module._parameters": lambda: nn.Linear(1, 1)._parameters["weight"],
    "Module._compiled_call_impl": lambda: nn.Linear(1, 1)._compiled_call_impl,
    "Module._forward_pre_hooks": lambda: nn.Linear(1, 1)._forward_pre_hooks.values(),
    "ProcessGroup._get_backend": lambda: torch.distributed.ProcessGroup._get_backend,
    "Options._threads": lambda: torch.distributed.ProcessGroupGloo._Options()._threads,
    "Tensor._base": lambda: torch.empty(0)._base,
    "Tensor._version": lambda: torch.empty(0)._version,
    "Tensor._backward_hooks": lambda: torch.empty(0)._backward_hooks,
    "Tensor._post_accumulate_grad_hooks": lambda: torch.empty(0)._post_accumulate_grad_hooks,
    "UntypedStorage._cdata": lambda: torch.empty(0).untyped_storage()._cdata,
    "OpOverload._schema": lambda: torch.ops.aten.normal_.default._schema.name,
    "DTensor._local_tensor": lambda: DTensor._local_tensor,
    "DTensor._spec": lambda: DTensor._spec,
    "nn.init._no_grad_trunc_normal_": lambda: nn.init._no_grad_trunc_normal_(torch.empty(3), 0.0, 1.0, -2.0, 2.0),
    "RNNBase._flat_weights": lambda: nn.LSTM(1, 1)._flat_weights[0],
    "RNNBase._flat_weights_names": lambda: nn.LSTM(1, 1)._flat_weights_names,
}  # fmt: skip
# What it hangs on a storage and on a module; a part of the names of operations such as rand_like.
OWN = {"_sharded", "_owners", "_gathered", "_gather_policy", "_data_parallel_root", "_data_parallel_role",
       "_data_parallel_unit", "_data_parallel_class", "_data_parallel_names", "_data_parallel_group",
       "_data_parallel_units_listed", "_is_tensor"}  # fmt: skip


@pytest.mark.parametrize("name", PRIVATE)
def test_the_private_names_of_torch_still_exist(name):
    PRIVATE[name]()


def test_the_list_of_private_names_is_complete_and_stands_at_the_head_of_the_file():
    private = {name.split(".")[-1] for name in PRIVATE}
    assert private_names(SOURCE) - OWN == private
    head = SOURCE[: SOURCE.index("MODES =")]
    assert [name for name in private if not re.search(rf"\b{name}\b", head)] == []
