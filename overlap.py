"""Collectives early: what to hand to torch.compile so that a model under simple_fsdp.py
overlaps. Copy it along.

    options = compile_options(model)
    step = torch.compile(forward_and_loss, fullgraph=True, options=options)

simple_fsdp.py puts one all-gather of each unit, a block of the model as a rule, into a
compiled graph, and one reduction. Left alone, Inductor waits for each at once. With
these options the next unit's all-gather starts as soon as this unit's has arrived, in
forward and backward, so that the weights of two units exist at most; a reduction is
waited for one unit later. Where memory is at its peak, up to two collectives of a graph
that are small beside it give way and overlap less.

The options also order the graph of a backward (not one graph of a whole step) so that
it needs less memory, on a single rank too; see part 2, "Memory". No matrix product is
computed twice. All ranks must run units in the same order; they may compile for batches
of different shapes, but not with an `ahead` below 1, which counts FLOPs. Needs Inductor
(torch 2.11 to 2.14).
"""

import hashlib
import math
import operator
import warnings
from collections import ChainMap
from pathlib import Path

import torch
import torch._inductor.config as inductor_config
from torch import fx, nn
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.fx_passes.control_dependencies import (
    control_deps,
    preserve_node_ordering,
)
from torch._inductor.pattern_matcher import stable_topological_sort
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.flop_counter import flop_registry

# All private names of torch that this file uses are imported above or read here, before
# compile_options(). Not documented: the keys "val", "recompute" and "ac_graph_id" of a
# node's meta, the names "tangents.." of a backward's inputs, and that nodes compare by
# their places in the graph. What simple_fsdp.py notes in the meta: "unit", the path of
# the unit or "", and "bucket", a path and the shape of each parameter.
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
CAST = torch.ops.prims.convert_element_type.default
PRODUCTS_OF_MATRICES = aten.mm.default, aten.addmm.default, aten.bmm.default
SUMS = aten.sum.dim_IntList, aten.sum.default
VIEWS = operator.getitem, aten.reshape.default, aten._unsafe_view.default
LAYOUT = {
    operator.getitem,
    aten.reshape.default,
    aten.clone.default,
    aten._to_copy.default,
    aten.cat.default,
    aten._unsafe_view.default,
    CAST,
}


def compile_options(
    model: nn.Module, whole_step: bool = False, ahead: float = 1.0
) -> dict:
    """Options for torch.compile of a wrapped model, a part of it, or a function around
    it. They overlap the collectives of data_parallel() with computation. Call it after
    data_parallel(), and add options of your own to the dict that it returns.

        loss = torch.compile(
            lambda x, y: F.cross_entropy(model(x), y),
            fullgraph=True,
            options=compile_options(model),
        )

    whole_step: the compiled function is a whole training step. It must return its loss
    first, and updates the parameters.

    ahead: how many units of computation a collective may overlap with. With 1 a gather
    starts when the one before has arrived, and a reduction is waited for when the next
    one starts. Between 0 and 1: less memory, for a faster network. 2, 3 ..: for slow
    networks; each holds the weights and gradients of one more unit.

    Raises ValueError if the model is not wrapped, for an `ahead` that is negative or
    above 1 but no whole number, and if post_grad_custom_post_pass or
    joint_custom_post_pass is already set in torch._inductor.config. Warns while
    compiling if a graph has no unit, or if other options move the collectives
    again."""
    _, options = overlap_pass_and_options(model, whole_step, ahead)
    return options


def overlap_pass_and_options(
    model: nn.Module, whole_step=False, ahead=1.0
) -> tuple["Overlap", dict]:
    """(the pass that moves the collectives, the dict of compile_options(), which holds
    it). For tests and tools that run the pass by itself. Arguments and errors: as
    there."""
    part = 0 <= ahead <= 1
    several = ahead > 1 and ahead % 1 == 0
    if not part and not several:
        raise ValueError(
            f"ahead={ahead}: must be between 0 and 1, or a whole number above 1"
        )
    is_wrapped = any(isinstance(p, DTensor) for p in model.parameters())
    if not is_wrapped:
        raise ValueError(
            "no parameter of the model is sharded: call data_parallel(model, mesh) "
            "before compile_options(model)"
        )
    classes = map(type, model.modules())
    has_units = any(getattr(cls, "_data_parallel_unit", False) for cls in classes)
    moves = Overlap(has_units, whole_step, ahead)
    inductor_options = dict(
        joint_custom_post_pass=RecomputeNorms(), post_grad_custom_post_pass=moves
    )
    for name in inductor_options:
        if getattr(inductor_config, name) is not None:
            raise ValueError(
                f"torch._inductor.config.{name} is set, and compile_options() would "
                "replace it: set it to None, or to a pass of yours that calls both"
            )
    # A buffer that Inductor keeps for later reuse is memory that nothing else can have
    # meanwhile. CUDA's allocator gives a freed one out again at no cost; malloc's price
    # for a small model is about 2 % of a step.
    inductor_options["allow_buffer_reuse"] = False
    return moves, inductor_options | DISABLED_INDUCTOR_PASSES


# ----------------------------------------------------------------------------------
# Part 1. Overlap: which collective starts when, and is waited for when
# ----------------------------------------------------------------------------------


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
        return source_hash(), self.has_units, self.whole_step, self.ahead

    def __call__(self, g: fx.Graph) -> None:
        g = getattr(g, "graph", g)
        starts = [n for n in g.nodes if is_ours(n)]
        if not starts:
            first = weight_gradients_first(g)
            keep_order(g, first, cast_weights_again(g), cast_gradients_last(g))
            return
        self.warn_of_options()
        self.warn_of_units(starts)
        for start in starts:
            # The compiler merges equal collectives, not the waits.
            first, *others = sorted(start.users)
            for wait in others:
                wait.replace_all_uses_with(first)
                g.erase_node(wait)
        weight_gradients = weight_gradients_first(g)
        backward = self.gather_again(g) if self.whole_step else None
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
        for _ in range(2):
            give_way_at_peak(g)
            stable_topological_sort(g)
        keep_order(g, weight_gradients, buckets_last(g))

    def warn_of_options(self) -> None:
        """If other options let Inductor move the collectives after this pass."""
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
        self, g: fx.Graph, gathers: list[fx.Node], insert_at: fx.Node | None
    ) -> None:
        """gathers: in the order of their uses. The first group starts at `insert_at`,
        group i when group i - groups_in_flight has arrived or, with an `ahead` below 1,
        that part of the FLOPs between there and its wait before the wait. The caller
        sorts what cuts up a gather right behind its wait."""
        arrived = []
        start = None
        for i, group in enumerate(groups(gathers)):
            use = first_use(group[0])
            if i >= self.groups_in_flight:
                insert_at = arrived[i - self.groups_in_flight].next
            elif i:
                insert_at = start.next
            if i and self.ahead < 1:
                insert_at = part_of(insert_at, use, 1 - self.ahead) or insert_at
            with g.inserting_before(insert_at):
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
    neighbours in no unit of which all but one are small, as a norm is beside the head:
    together at most a sixteenth of the largest."""
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
    """Moves `nodes`, in their order, right behind `at`."""
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
    """FLOPs of a matrix product, a convolution or attention, as torch counts them."""
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
    """The wait for a collective: the first node that reads it."""
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
    operation that restores the state of the random numbers, and what has to stay behind
    something else in a graph of its own."""
    if n.target is control_deps:
        _, graph, *args = n.args
        graph = getattr(n.graph.owning_module, graph.target).graph
        inputs = dict(zip(graph.find_nodes(op="placeholder"), args, strict=True))
        (inner,) = (m for m in graph.nodes if m.op == "call_function")
        return inner.target, fx.map_arg(inner.args, inputs.get)
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
    target, _ = called(n)
    return target in LAYOUT or getattr(target, "is_view", False) or is_cut(n)


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
    of_parameters = filter(is_ours, gathers)
    return [n for n in of_parameters if not any(m.target is WAIT for m in ancestors(n))]


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


# ----------------------------------------------------------------------------------
# Part 2. Memory
#
# Left alone, Inductor computes the gradient of a layer's input before that of its
# weight. Of an MLP, down(gelu(up(x))), three tensors of its hidden width are then
# alive:
#
#   gh = gy @ w        h, gelu(h), gh      gw = gy.T @ gelu(h)    h, gelu(h)
#   gw = gy.T @ gelu(h)                    gh = gy @ w            h, gh
#
# On the right the weight's gradient comes first. An order in the graph is not enough:
# Inductor's scheduler fuses what it can. preserve_node_ordering tells it what has to
# stay behind what.
# ----------------------------------------------------------------------------------


class RecomputeNorms(CustomGraphPass):
    """Marks, in the graph of forward and backward, the outputs of norms that matrix
    products read: backward computes them again from the norm's input, which it needs
    anyway. That reads and writes one tensor of the norm's size. What a checkpoint has
    marked stays."""

    def uuid(self):
        """What the compile caches know of this pass: its source."""
        return source_hash()

    def __call__(self, g: fx.Graph) -> None:
        """g: the joint graph of forward and backward, whose meta it changes."""
        g = getattr(g, "graph", g)
        of_backward = descendants_of_tangents(g)
        if not of_backward:
            return
        products = [n for n in g.nodes if is_product(n) and n not in of_backward]
        # Backward begins with the last one, so it would gain nothing.
        for product in products[:-1]:
            if product.target not in PRODUCTS_OF_MATRICES:
                continue
            source = product.args[-2]
            while is_view(source) and source.target is not operator.getitem:
                source = source.args[0]
            narrows = nbytes_of(product) < nbytes_of(source)
            if not narrows and "recompute" not in source.meta and is_norm(source):
                source.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
                # That of the outermost region: torch keeps what a region with a larger
                # number reads.
                source.meta["ac_graph_id"] = 0


def source_hash() -> str:
    """SHA-256 of this file, in hexadecimal digits."""
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


def nbytes_of(n: fx.Node) -> int:
    """Bytes of a node's tensor; 0 where a size varies."""
    numel = numel_of(n)
    return numel * n.meta["val"].itemsize if numel else 0


def is_norm(n: fx.Node) -> bool:
    """Whether a tensor is computed, without a product, from another one and from a
    reduction of it, as a mean."""
    seen = set()
    todo = [n]
    while todo:
        n = todo.pop()
        # Of several results each is a node of its own.
        made_by = n.args[0] if n.target is operator.getitem else n
        if n in seen or n.op != "call_function" or is_product(made_by):
            continue
        seen.add(n)
        if (
            0
            < 8 * numel_of(n)
            <= max(map(numel_of, made_by.all_input_nodes), default=0)
        ):
            return True
        todo += n.all_input_nodes
    return False


def descendants_of_tangents(g: fx.Graph) -> set[fx.Node]:
    """Gradients: what depends on the gradients that a backward is given."""
    descendants = set()
    for n in g.nodes:
        is_tangent = n.op == "placeholder" and n.name.startswith("tangents")
        if is_tangent or not descendants.isdisjoint(n.all_input_nodes):
            descendants.add(n)
    return descendants


def source_of(n: fx.Node) -> fx.Node:
    """What a view, a cast or a copy is made of."""
    while is_layout(n) and len(n.all_input_nodes) == 1:
        (n,) = n.all_input_nodes
    return n


def weight_gradients_first(g: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Puts the gradient of a weight before the product that goes on from the same
    gradient of an output to that of an input, in a backward graph, and sums, as a bias
    has, right behind the product that they are made from. Returns, as the other passes
    do, for a node those that have to run before it."""
    gradients = descendants_of_tangents(g)
    # What a product depends on, but by way of a reduction over the ranks.
    leads_on = set()
    for n in reversed(g.nodes):
        is_reduction = n.target in (SCATTER, REDUCE)
        if not is_reduction and any(is_product(m) or m in leads_on for m in n.users):
            leads_on.add(n)
    readers = {}
    of_parameters = []
    for n in g.nodes:
        if n not in gradients:
            continue
        if n not in leads_on and (is_product(n) or n.target in SUMS):
            of_parameters.append(n)
        elif is_product(n):
            for source in {source_of(m): None for m in n.all_input_nodes}:
                readers.setdefault(source, []).append(n)
    predecessors = {}
    others = set()
    for n in of_parameters:
        # One, or orders that contradict each other would be possible.
        sources = {source_of(m) for m in n.all_input_nodes} & gradients
        products = readers.get(*sources, ()) if len(sources) == 1 else ()
        for product in products:
            predecessors.setdefault(product, []).append(n)
        if not products:
            others.add(n)
    sort_behind(g, predecessors)
    for n in sorted(others):
        put_behind_products(n)
    # Each of the others runs before the next product that goes on.
    waiting = []
    for n in g.nodes:
        if n in others:
            waiting.append(n)
        elif waiting and n in gradients and n in leads_on and is_product(n):
            predecessors.setdefault(n, []).extend(waiting)
            waiting = []
    return predecessors


def put_behind_products(n: fx.Node) -> None:
    """Moves a node, and what stands between, right behind the last product that it is
    made from.

    product -> other product -> sum of product
    product -> sum of product -> other product"""
    between = set()
    last_product = None
    todo = [n]
    while todo:
        m = todo.pop()
        if m is not n and is_product(m):
            last_product = m if last_product is None else max(last_product, m)
        elif m not in between and m.op == "call_function":
            between.add(m)
            todo += m.all_input_nodes
    if last_product is not None:
        put_behind(last_product, sorted(m for m in between if m > last_product))


def sort_behind(g: fx.Graph, predecessors: dict[fx.Node, list[fx.Node]]) -> None:
    """Nodes stay in their order, but each comes behind its inputs and behind what
    `predecessors` names for it."""
    done = set()
    last = None
    for first in list(g.nodes):
        todo = [first]
        while todo:
            n = todo[-1]
            missing = [m for m in n.all_input_nodes if m not in done]
            missing += [m for m in predecessors.get(n, ()) if m not in done]
            if missing:
                todo += sorted(missing, reverse=True)
                continue
            todo.pop()
            if n not in done:
                done.add(n)
                if last is not None:
                    last.append(n)
                last = n


def buckets_last(g: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """A unit's bucket of gradients comes behind the last product that makes one.
    Inductor would allocate it with the first, since it writes each into its place; in
    the dtype of the reduction it is larger than what goes in."""
    predecessors = {}
    for start in filter(is_ours, g.nodes):
        bucket = source_of(start.args[0])
        if start.target is not GATHER and bucket.target is aten.cat.default:
            sources = map(source_of, bucket.all_input_nodes)
            predecessors[bucket] = sorted(filter(is_product, sources))[-1:]
    return predecessors


def cast_gradients_last(g: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """On a single rank, where nothing reduces them, gradients get the dtype of the
    parameters, which is larger, behind the last product of the graph."""
    products = [n for n in g.nodes if is_product(n)]
    predecessors = {}
    for n in g.output_node().all_input_nodes:
        while is_layout(n) and n.target is not CAST and len(n.all_input_nodes) == 1:
            (n,) = n.all_input_nodes
        if n.target is CAST and is_product(source_of(n)):
            if nbytes_of(n) > nbytes_of(source_of(n)):
                predecessors[n] = products[-1:]
                products[-1].append(n)
    stable_topological_sort(g)
    return predecessors


def cast_weights_again(g: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """On a single rank each product of a backward graph that reads a parameter in
    another dtype casts it for itself, so that the cast is not kept in between."""
    gradients = descendants_of_tangents(g)
    predecessors = {}
    for cast in g.find_nodes(op="call_function", target=CAST) if gradients else ():
        if cast.args[0].op != "placeholder":
            continue
        whole = views_of(cast)
        uses = {(user, n) for n in whole for user in n.users if user not in whole}
        readers = sorted(uses)
        for (before, _), (reader, n) in zip(readers, readers[1:], strict=False):
            if before is reader or not is_product(before):
                continue
            copies = {}
            with g.inserting_before(reader):
                reader.replace_input_with(n, copied(g, n, copies))
            predecessors[copies[cast]] = [before]
    return predecessors


def keep_order(g: fx.Graph, *predecessors: dict[fx.Node, list[fx.Node]]) -> None:
    """Has Inductor's scheduler keep this order. Each dictionary names, for a node,
    those that have to run before it."""
    alive = set(g.nodes)
    order = {}
    for n in g.nodes:
        before = [m for named in predecessors for m in named.get(n, ()) if m in alive]
        if before:
            order[n] = before
    preserve_node_ordering(g, order)
    g.lint()


def memory_of(g: fx.Graph) -> tuple[list[fx.Node], list[int], dict]:
    """The nodes of a graph, an estimate of the bytes alive at each, and the first and
    last place of each tensor. Counted are inputs, what products, collectives and sums
    make, and what they or several others read; whatever else is computed is taken for a
    part of the kernel that reads it. What is computed from a tensor of its size that
    nothing else reads takes its place. What a collective reads is alive until it is
    waited for."""
    nodes = list(g.nodes)
    place = {n: i for i, n in enumerate(nodes)}
    dtypes = {dtype_of(n) for n in nodes if is_product(n)}
    spans = {}
    reads = {}
    for n in nodes:
        sources = set().union(*(reads[m] for m in n.all_input_nodes))
        reads[n] = sources
        if takes_memory(n, dtypes):
            spans[n] = [place[n], place[n]]
            reads[n] = {n}
        if n in spans or n.op == "output" or n.target is WAIT:
            for source in sources:
                spans[source][1] = place[n]
        if n.target in (SCATTER, REDUCE, GATHER) and n.users:
            for source in sources:
                spans[source][1] = place[wait_of(n)]
    change = [0] * (len(nodes) + 1)
    for n, (first, last) in spans.items():
        size = sum(map(nbytes_of, n.users)) if is_cut(n) else nbytes_of(n)
        is_pointwise = not (is_product(n) or is_ours(n) or is_cut(n))
        dying = (m for m in reads_of(n, spans) if spans[m][1] == first)
        if is_pointwise and any(nbytes_of(m) == size for m in dying):
            first += 1
        change[first] += size
        change[max(first, last + 1)] -= size
    levels = []
    for difference in change[:-1]:
        levels.append(difference + (levels[-1] if levels else 0))
    return nodes, levels, spans


def takes_memory(n: fx.Node, dtypes: set) -> bool:
    """Whether a node is taken for a tensor in memory, see memory_of."""
    if n.op == "placeholder" or is_product(n) or is_ours(n) or is_cut(n):
        return True
    if n.op != "call_function" or is_view(n) or n.target is WAIT:
        return False
    if n.target is aten.cat.default:
        return True
    largest = max(map(numel_of, n.all_input_nodes), default=0)
    is_sum = 0 < 8 * numel_of(n) <= largest
    is_shared = len(n.users) > 1 and dtype_of(n) in dtypes
    return is_sum or is_shared or feeds_product(n)


def feeds_product(n: fx.Node) -> bool:
    """Or a collective, as it is or in another layout."""
    return any(
        is_product(m) or is_ours(m) or (is_view(m) and feeds_product(m))
        for m in n.users
    )


def reads_of(n: fx.Node, spans: dict) -> set[fx.Node]:
    """The tensors in memory that a node is computed from."""
    reads = set()
    todo = list(n.all_input_nodes)
    while todo:
        m = todo.pop()
        if m in spans:
            reads.add(m)
        else:
            todo += m.all_input_nodes
    return reads


def numel_of(n: fx.Node) -> int:
    """Elements of a node's tensor; 0 for another value, and where a size varies."""
    value = n.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return 0
    sizes = [size for size in value.shape if isinstance(size, int)]
    return math.prod(sizes) if len(sizes) == value.ndim else 0


def dtype_of(n: fx.Node) -> torch.dtype | None:
    """Of a node's tensor; None for another value."""
    value = n.meta.get("val")
    return value.dtype if isinstance(value, torch.Tensor) else None


def is_view(n: fx.Node) -> bool:
    """Whether a node's result has the memory of its input."""
    return getattr(n.target, "is_view", False) or n.target in VIEWS


def give_way_at_peak(g: fx.Graph) -> None:
    """The largest gather or reduce-scatter that is under way where memory is at its
    peak starts later, or is waited for earlier, until it adds nothing to the peak that
    would be there without it. No gather moves behind another start: a rank that
    compiles for other shapes has its peak elsewhere, and must start in the same order.
    A collective stays where it is if nothing would be left to hide it, or if it is more
    than a twelfth of the peak: with so few tokens for each weight, time is the
    collectives', and overlap matters more."""
    nodes, levels, spans = memory_of(g)
    place = {n: i for i, n in enumerate(nodes)}
    peak = levels.index(max(levels))
    under_way = []
    for start in filter(is_ours, nodes):
        held = {start}
        if start.target is not GATHER:
            held |= reads_of(start, spans)
        size = sum(map(nbytes_of, held))
        is_small = 0 < 12 * size <= levels[peak] and start.target is not REDUCE
        if is_small and place[start] < peak < place[wait_of(start)]:
            under_way.append((size, place[start], held))
    if not under_way:
        return
    size, first, held = max(under_way, key=lambda candidate: candidate[:2])
    start = nodes[first]
    last = place[wait_of(start)]
    without = list(levels)
    for n in held:
        begin, end = spans[n]
        for i in range(begin, max(end, last) + 1):
            without[i] -= nbytes_of(n)
    room = max(without) - size
    if start.target is GATHER:
        at = last
        while at > first + 1 and without[at - 1] <= room:
            at -= 1
        # Behind another start, ranks with other shapes would start in another order.
        passed = any(map(is_ours, nodes[first + 1 : at]))
        if not passed and at > peak and any(map(is_product, nodes[at:last])):
            for n in sorted(ancestors(start)):
                is_its_own = n is start or len(n.users) == 1
                if n.op == "call_function" and is_its_own:
                    nodes[at].prepend(n)
        return
    at = first
    while at < last - 1 and without[at + 1] <= room:
        at += 1
    if at < peak and any(map(is_product, nodes[first:at])):
        nodes[at].append(wait_of(start))
