"""Collectives early: what to hand to torch.compile so that a model under simple_fsdp.py
overlaps. Copy it along.

    options = compile_options(model)
    step = torch.compile(forward_and_loss, fullgraph=True, options=options)

simple_fsdp.py puts one all-gather of each unit, a block of the model as a rule, into a
compiled graph, and one reduction. Left alone, Inductor waits for each at once. With
these options the next unit's all-gather starts as soon as this unit's has arrived, in
forward and backward, so that the weights of two units exist at most; a reduction is
waited for one unit later. Nothing but the order changes. Needs Inductor (torch 2.11 to
2.14).
"""

import hashlib
import operator
import warnings
from collections import ChainMap
from pathlib import Path

import torch
import torch._inductor.config as inductor_config
from torch import fx, nn
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.pattern_matcher import stable_topological_sort
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.flop_counter import flop_registry

# All private names of torch that this file uses are imported above or read here, before
# compile_options(). Not documented: the keys "val" and "recompute" of a node's meta.
# What simple_fsdp.py notes there: "unit", the path of the unit or "", and "bucket", a
# path and the shape of each parameter.
aten = torch.ops.aten
c10d = torch.ops._c10d_functional
GATHER = c10d.all_gather_into_tensor.default
SCATTER = c10d.reduce_scatter_tensor.default
REDUCE = c10d.all_reduce.default
WAIT = c10d.wait_tensor.default
GATHER_AGAIN = CheckpointPolicy.PREFER_RECOMPUTE, CheckpointPolicy.MUST_RECOMPUTE
# Inductor's own passes that reorder or merge collectives, after this file or before it,
# and the value that keeps each out: torch 2.14 turns on enable_simple_overlap, global
# settings of others may turn on the rest. torch.compile refuses an option that it does
# not know.
DISABLED_INDUCTOR_PASSES = {
    "reorder_for_peak_memory": False,
    "reorder_for_compute_comm_overlap": False,
    "aten_distributed_optimizations.enable_simple_overlap": False,
    "aten_distributed_optimizations.enable_overlap_scheduling": False,
    "bucket_all_gathers_fx": "none",
    "bucket_reduce_scatters_fx": "none",
    "bucket_all_reduces_fx": "none",
}
DISABLED_INDUCTOR_PASSES = {
    name: value
    for name, value in DISABLED_INDUCTOR_PASSES.items()
    if hasattr(inductor_config, name)
}
# torch's FLOP formulas, and those of attention on a CPU, which it lacks: they are those
# of flash attention.
FLOP_FORMULAS = ChainMap(
    flop_registry,
    {
        aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[
            aten._scaled_dot_product_flash_attention
        ],
        aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
            aten._scaled_dot_product_flash_attention_backward
        ],
    },
)
LAYOUT = {
    operator.getitem,
    aten.reshape.default,
    aten.clone.default,
    aten._to_copy.default,
    aten.cat.default,
    aten._unsafe_view.default,
    torch.ops.prims.convert_element_type.default,
}


def compile_options(
    model: nn.Module, whole_step: bool = False, ahead: float = 1.0
) -> dict:
    """Inductor options for any torch.compile of `model`, wrapped, of a part of it, or
    of a function around it; those of another wrapped model do as well. {} on a single
    rank, where Inductor's own order of a graph needs less memory.

    whole_step: what is compiled is a whole training step, which returns its loss first
    and updates the parameters.

    ahead: the part of a unit's FLOPs that a collective has to hide behind. With 1 a
    gather starts when the one before has arrived, and a reduction is waited for when
    the next one starts. Less takes less memory, and needs a faster network. 2, 3 ..:
    that many units, for slow networks; each holds the weights and gradients of one
    more.

    Raises ValueError for a model that is not wrapped, another `ahead`, or a
    post_grad_custom_post_pass that is set already. Warns, while compiling, of a graph
    without any unit, and of options that move the collectives again."""
    _, options = overlap_pass_and_options(model, whole_step, ahead)
    return options


def overlap_pass_and_options(
    model: nn.Module, whole_step=False, ahead=1.0
) -> tuple["Overlap", dict]:
    """What moves the collectives, and compile_options, of which it is a part on several
    ranks."""
    part = 0 <= ahead <= 1
    several = ahead > 1 and ahead % 1 == 0
    if not part and not several:
        raise ValueError(
            f"ahead: {ahead}: must be between 0 and 1, or a whole number above 1"
        )
    is_wrapped = any(isinstance(p, DTensor) for p in model.parameters())
    if not is_wrapped:
        raise ValueError(
            "model: no parameter is sharded: call data_parallel() first, then "
            "compile_options()"
        )
    classes = map(type, model.modules())
    has_units = any(getattr(cls, "_data_parallel_unit", False) for cls in classes)
    moves = Overlap(has_units, whole_step, ahead)
    if torch.distributed.get_world_size() == 1:
        return moves, {}
    others = inductor_config.post_grad_custom_post_pass
    if others is not None:
        raise ValueError(
            "torch._inductor.config.post_grad_custom_post_pass is set, "
            "compile_options() would replace it: reset it, or call both passes from "
            "one of your own"
        )
    return moves, dict(post_grad_custom_post_pass=moves) | DISABLED_INDUCTOR_PASSES


class Overlap(CustomGraphPass):
    """Moves the collectives of one post-grad graph. A collective is named by the node
    that starts it."""

    def __init__(self, has_units: bool, whole_step: bool, ahead: float):
        self.has_units = has_units
        self.whole_step = whole_step
        self.ahead = ahead
        # How many groups of collectives are under way beside the one that is computed
        # with.
        self.groups_in_flight = max(1, int(ahead))
        # One rank tells.
        self.warned = torch.distributed.get_rank() > 0

    def uuid(self):
        """What the compile caches know of this pass: its source and its settings."""
        text = Path(__file__).read_bytes()
        source = hashlib.sha256(text).hexdigest()
        return source, self.has_units, self.whole_step, self.ahead

    def __call__(self, g: fx.Graph) -> None:
        g = getattr(g, "graph", g)
        starts = [n for n in g.nodes if is_ours(n)]
        if not starts:
            return  # such as the subgraphs of FlexAttention
        self.warn_of_options()
        self.warn_of_units(starts)
        for start in starts:
            # The compiler merges equal collectives, not the waits.
            first, *others = sorted(start.users)
            for wait in others:
                wait.replace_all_uses_with(first)
                g.erase_node(wait)
        backward = self.gather_again(g) if self.whole_step else None
        # Nodes compare by their places.
        gathers = sorted(gathers_of_parameters(g), key=first_use)
        if backward is not None:
            in_backward = [n for n in gathers if wait_of(n) > backward]
            gathers = [n for n in gathers if n not in in_backward]
            self.start_early(g, in_backward, backward)
        inputs = ("placeholder", "get_attr")
        beginning = next(n for n in g.nodes if n.op not in inputs)
        self.start_early(g, gathers, beginning)
        # With hybrid_shard the all-reduces are of the shards that the reduce-scatters
        # have made.
        for op in (SCATTER, REDUCE):
            self.wait_late(g, op)
            stable_topological_sort(g)
        g.eliminate_dead_code()
        g.lint()

    def warn_of_options(self) -> None:
        undone = [
            name
            for name, value in DISABLED_INDUCTOR_PASSES.items()
            if getattr(inductor_config, name) != value
        ]
        if undone:
            warnings.warn(
                f"overlap: {', '.join(undone)}: set beside compile_options(), "
                "Inductor moves the collectives again. Leave it out of the options, "
                "or leave compile_options() out",
                stacklevel=2,
            )

    def warn_of_units(self, starts: list[fx.Node]) -> None:
        """Once, of a graph that gathers, but no unit although the model has some."""
        in_units = any(n.meta["unit"] for n in starts)
        if self.has_units and not in_units and not self.warned:
            self.warned = True
            paths = {
                path or "no module" for n in starts for path, _ in n.meta["bucket"]
            }
            some = ", ".join(sorted(paths)[:3])
            warnings.warn(
                f"overlap: a graph gathers nothing in a unit, only in {some}: each "
                "module by itself. For one gather per unit compile what calls units, "
                "without graph breaks",
                stacklevel=2,
            )

    def gather_again(self, g: fx.Graph) -> fx.Node | None:
        """In a whole step: gathers again for backward the weights that it needs. Not
        those behind the last unit, whose backward comes at once, and not those that are
        to be kept. Returns the first product of backward."""
        loss = g.output_node().args[0][0]
        forward = ancestors(loss)
        waits = []
        first = {}
        for start in gathers_of_parameters(g):
            wait = wait_of(start)
            shards = frozenset(n for n in ancestors(start) if n.op == "placeholder")
            dtype = start.meta["val"].dtype
            key = shards, dtype, *start.args[1:]
            if wait in forward:
                first.setdefault(key, wait)
                waits.append(wait)
            elif key in first:
                # An activation checkpoint gathers again what is kept, or what is
                # decided on below.
                wait.replace_all_uses_with(first[key])
                g.erase_node(wait)
                g.erase_node(start)
        after = max(waits, default=next(iter(g.nodes)))
        products = filter(is_product, g.nodes)
        later = (n for n in products if n > after and n not in forward)
        backward = next(later, None)
        for wait in waits:  # what a checkpoint cut up again is what was cut up before
            cuts = sorted(filter(is_cut, views_of(wait)))
            for cut in cuts[1:]:
                cut.replace_all_uses_with(cuts[0])
        waits.sort()
        while waits and not waits[-1].args[0].meta["unit"]:
            waits.pop()
        for wait in waits:
            gather_for_backward(g, wait, forward)
        g.eliminate_dead_code()
        return backward

    def start_early(
        self, g: fx.Graph, gathers: list[fx.Node], before: fx.Node | None
    ) -> None:
        """gathers: in the order of their uses. The first group starts at `before`,
        another when the one before it (or `ahead` before it) has arrived, or `ahead` of
        its wait. The caller sorts what cuts up a gather right behind its wait."""
        arrived = []
        start = None
        for i, group in enumerate(groups(gathers)):
            use = first_use(group[0])
            if i >= self.groups_in_flight:
                before = arrived[i - self.groups_in_flight].next
            elif i:
                before = start.next
            if i and self.ahead < 1:
                before = part_of(before, use, 1 - self.ahead) or before
            with g.inserting_before(before):
                # Copies: others may read what a gather is made of.
                starts = [copied(g, old, {}) for old in group]
            for old, start in zip(group, starts, strict=True):
                old.replace_all_uses_with(start)
                g.erase_node(old)
                first_use(start).prepend(wait_of(start))
            arrived.append(wait_of(starts[0]))

    def wait_late(self, g: fx.Graph, op) -> None:
        """Reduce-scatters, or all-reduces, of gradients. One starts when all of its
        gradients are there, and is waited for when the next group (or the one `ahead`
        of it) has started."""
        starts = [n for n in g.find_nodes(op="call_function", target=op) if is_ours(n)]
        late = []
        following = None
        for start in reversed(starts):
            at = behind_gather(start.next)
            # Reductions start in the order in which they are waited for.
            if following is None or at <= following:
                at.prepend(start)
            following = start
        for group in groups(starts):
            last = at = group[-1]
            if late and self.ahead < 1:
                at = part_of(late[-1][-1], last, self.ahead) or last
            # The caller sorts what uses them behind them.
            for waits in reversed(late[-self.groups_in_flight :]):
                put_behind(at, waits)
            waits = [wait_of(start) for start in group]
            put_behind(last, waits)
            late.append(waits)


def groups(starts: list[fx.Node]) -> list[list[fx.Node]]:
    """Collectives that start together and are waited for together: those of a unit; and
    neighbours in no unit of which all but one are small, as a norm is beside the
    head."""
    result = []
    sizes = []
    before = None
    for start in starts:
        sizes.append(start.meta["val"].nbytes)
        unit = start.meta["unit"]
        one_is_large = sum(sizes) <= max(sizes) * 17 / 16
        if unit == before and (unit or one_is_large):
            result[-1].append(start)
        else:
            result.append([start])
            sizes = sizes[-1:]
        before = unit
    return result


def put_behind(at: fx.Node, nodes: list[fx.Node]) -> None:
    for n in reversed(nodes):
        at.append(n)


def behind_gather(first: fx.Node) -> fx.Node:
    """`first`, or what follows a gather before the next product: what is waited for
    first goes first over a link."""
    n = at = first
    while n.op != "output" and not is_product(n):
        if n.target is GATHER:
            at = n.next
        n = n.next
    return at


def part_of(first: fx.Node, last: fx.Node, part: float) -> fx.Node | None:
    """The product between two nodes of a graph with which this part of the FLOPs
    between them is reached."""
    products = []
    while first is not last:
        if is_product(first):
            products.append(first)
        first = first.next
    goal = part * sum(map(flops_of, products))
    done = 0
    for n in products:
        done += flops_of(n)
        if done >= goal:
            return n
    return None


def flops_of(product: fx.Node) -> float:
    """Of a matrix product, a convolution or attention, as torch counts them."""
    _, args = called(product)
    args, kwargs = fx.map_arg((args, product.kwargs), lambda n: n.meta.get("val"))
    count = FLOP_FORMULAS[operation(product)]
    value = product.meta["val"]
    try:
        return count(*args, **kwargs, out_val=value)
    except AssertionError:
        # torch 2.11 counts attention only where k and v have as many heads as q.
        heads = args[0].shape[1]
        args = [
            t.repeat_interleave(heads // t.shape[1], 1)
            if getattr(t, "ndim", 0) == 4
            else t
            for t in args
        ]
        return count(*args, **kwargs, out_val=value)


def is_ours(n: fx.Node) -> bool:
    """Whether simple_fsdp.py made a collective, which it notes; it says of which unit
    it is."""
    is_collective = n.target in (GATHER, SCATTER, REDUCE)
    return is_collective and "unit" in n.meta


def wait_of(start: fx.Node) -> fx.Node:
    return min(start.users)


def views_of(wait: fx.Node) -> list[fx.Node]:
    """What was waited for, and its views, casts, copies and parts."""
    whole = [wait]
    for n in whole:  # grows while it is walked
        for user in n.users:
            is_new = user not in whole and is_layout(user)
            inputs = set(user.all_input_nodes)
            if is_new and inputs.issubset(whole):
                whole.append(user)
    return whole


def first_use(start: fx.Node) -> fx.Node:
    """What first computes with what a gather gives. Inductor moves some waits there,
    and leaves others."""
    whole = views_of(wait_of(start))
    uses = (user for n in whole for user in n.users if user not in whole)
    return min(uses, default=whole[0])


def called(n: fx.Node) -> tuple:
    """(what a node calls, its arguments). Attention that is recomputed stands in an
    operation that restores the state of the random numbers."""
    for i, arg in enumerate(n.args[:2]):
        if hasattr(arg, "overloadpacket"):
            return arg, n.args[i + 1 :]
    return n.target, n.args


def operation(n: fx.Node):
    """What a node calls, whatever the overload."""
    target, _ = called(n)
    return getattr(target, "overloadpacket", target)


def is_product(n: fx.Node) -> bool:
    """Matrix products, attention, convolutions: what a collective can hide behind."""
    return operation(n) in FLOP_FORMULAS


def is_layout(n: fx.Node) -> bool:
    """Views, copies and casts: their result holds what their inputs hold."""
    is_view = getattr(n.target, "is_view", False)
    return n.target in LAYOUT or is_view or is_cut(n)


def is_cut(n: fx.Node) -> bool:
    """simple_fsdp.py's operation that cuts up gathered rows."""
    name = str(n.target)
    return name.startswith("simple_fsdp.cut")


def ancestors(node: fx.Node) -> set[fx.Node]:
    """A node and all that it is computed from."""
    seen = set()
    todo = [node]
    while todo:
        n = todo.pop()
        if n not in seen:
            seen.add(n)
            todo += n.all_input_nodes
    return seen


def gathers_of_parameters(g: fx.Graph) -> list[fx.Node]:
    """Those of simple_fsdp.py that wait for nothing else."""
    gathers = g.find_nodes(op="call_function", target=GATHER)
    ours = filter(is_ours, gathers)
    return [n for n in ours if not any(m.target is WAIT for m in ancestors(n))]


def gather_for_backward(g: fx.Graph, wait: fx.Node, forward: set[fx.Node]) -> None:
    """What backward reads of a gathered weight becomes a copy of it, gather included,
    at the first such use."""
    whole = views_of(wait)
    cuts = filter(is_cut, whole)
    marks = [n.meta.get("recompute") for n in (wait, *cuts)]
    if any(mark not in GATHER_AGAIN for mark in marks):
        return  # it is to be kept
    known = forward.union(whole)
    uses = [(user, n) for n in whole for user in n.users if user not in known]
    copies = {}
    for user, n in sorted(uses):
        with g.inserting_before(user):
            user.replace_input_with(n, copied(g, n, copies))


def copied(g: fx.Graph, n: fx.Node, copies: dict[fx.Node, fx.Node]) -> fx.Node:
    """`n` and what it is made from, again at the graph's insertion point; what `copies`
    has already is used again."""
    if n.op == "call_function" and n not in copies:
        for source in n.all_input_nodes:
            copied(g, source, copies)
        args, kwargs = fx.map_arg((n.args, n.kwargs), lambda m: copies.get(m, m))
        # node_copy would take a name that AOT's remat gave twice.
        copy = g.call_function(n.target, args, kwargs)
        copy.meta = dict(n.meta)
        copies[n] = copy
    return copies.get(n, n)
