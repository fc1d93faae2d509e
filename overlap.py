"""Few collectives, early: what to hand to torch.compile so that a model under simple_fsdp.py
overlaps. Copy it along.

    options = compile_options(model)
    step = torch.compile(forward_and_loss, fullgraph=True, options=options)

Left alone, Inductor waits for each collective at once. With these options a block has one
all-gather and one reduce-scatter (and one all-reduce of what is replicated); the next block's
all-gather starts as soon as this block's has arrived, in forward and backward, so that the weights
of two blocks exist at most; a reduction is waited for one block later. Needs Inductor (torch 2.11
to 2.14).
"""

import hashlib
import operator
import warnings
from collections.abc import Sequence
from itertools import accumulate, zip_longest
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
# compile_options(). Torch documents neither FakeTensor.fake_mode nor the keys "val", "recompute"
# and STACKS of a node's meta, which are used below. What simple_fsdp.py notes there: "unit" and
# "bucket".
aten, c10d = torch.ops.aten, torch.ops._c10d_functional
GATHER, SCATTER = c10d.all_gather_into_tensor.default, c10d.reduce_scatter_tensor.default
REDUCE, WAIT = c10d.all_reduce.default, c10d.wait_tensor.default
# Where a node's module is noted: in forward and in backward graphs.
STACKS = ("nn_module_stack", "fwd_nn_module_stack")
GATHER_AGAIN = CheckpointPolicy.PREFER_RECOMPUTE, CheckpointPolicy.MUST_RECOMPUTE
# Inductor's own passes that reorder or merge collectives, after this file or before it, and the
# value that keeps each out: torch 2.14 turns on enable_simple_overlap, global settings of others
# may turn on the rest. torch.compile refuses an option that it does not know.
OFF = {
    "reorder_for_peak_memory": False,
    "reorder_for_compute_comm_overlap": False,
    "aten_distributed_optimizations.enable_simple_overlap": False,
    "aten_distributed_optimizations.enable_overlap_scheduling": False,
    "bucket_all_gathers_fx": "none",
    "bucket_reduce_scatters_fx": "none",
    "bucket_all_reduces_fx": "none",
}
OFF = {name: value for name, value in OFF.items() if hasattr(inductor_config, name)}
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
    model: nn.Module,
    cap_mib: float = 128.0,
    whole_step: bool = False,
    ahead: float = 1.0,
    by_size: bool = False,
) -> dict:
    """Inductor options for any torch.compile of `model`, wrapped, of a part of it, or of a function
    around it; those of another wrapped model do as well. None on a single rank, where Inductor's
    own order of a graph needs less memory.

    cap_mib: most MiB of a bucket of parameters that lie in no block, such as embedding and head;
    one that is larger has a bucket of its own.
    whole_step: what is compiled is a whole training step, which returns its loss first and updates
    the parameters.
    ahead: the part of a block's FLOPs that a collective has to hide behind. With 1 a gather starts
    when the one before has arrived, and a reduction is waited for when the next one starts. Less
    takes less memory, and needs a faster network. 2, 3 ..: that many buckets (one per block, as a
    rule), for slow networks; each holds the weights and gradients of one more.
    by_size: what is compiled moves parameters by itself. Gathers and averages that are not
    simple_fsdp.py's go into buckets by size, too.
    Raises ValueError for a model that is not wrapped, or another `ahead`. Warns, while compiling,
    of a graph without any unit."""
    return passes(model, cap_mib, whole_step, ahead, by_size)[1]


def passes(
    model: nn.Module, cap_mib=128.0, whole_step=False, ahead=1.0, by_size=False
) -> tuple["Overlap", dict]:
    """What moves the collectives, and compile_options, of which it is a part on several ranks."""
    if not (0 <= ahead <= 1 or ahead % 1 == 0 < ahead):
        raise ValueError(f"ahead: {ahead}: must be between 0 and 1, or a whole number above 1")
    if not any(isinstance(p, DTensor) for p in model.parameters()):
        raise ValueError(
            "model: no parameter is sharded: call data_parallel() first, then compile_options()"
        )
    units = tuple(name for name, module in model.named_modules() if is_unit(type(module)))
    moves = Overlap(units, cap_mib, whole_step, ahead, by_size)
    if torch.distributed.get_world_size() == 1:
        return moves, {}
    if inductor_config.post_grad_custom_post_pass is not None:
        raise ValueError(
            "torch._inductor.config.post_grad_custom_post_pass is set, compile_options() would replace "
            "it: reset it, or call both passes from one of your own"
        )
    return moves, dict(post_grad_custom_post_pass=moves) | OFF


def is_unit(cls: type) -> bool:
    """Whether a class is that of a unit of simple_fsdp.py."""
    return getattr(cls, "_data_parallel_unit", False)


class Overlap(CustomGraphPass):
    """Moves the collectives of one post-grad graph. A collective is named by the node that starts
    it."""

    def __init__(
        self, units: tuple[str, ...], cap_mib: float, whole_step: bool, ahead: float, by_size: bool
    ):
        self.units = units
        self.cap = cap_mib * 2**20
        self.whole_step = whole_step
        self.ahead = ahead
        self.early = max(1, int(ahead))
        self.by_size = by_size
        # One rank tells.
        self.warned = torch.distributed.is_initialized() and torch.distributed.get_rank() > 0

    def uuid(self):
        """What the compile caches know of this pass: its source and its settings."""
        source = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
        return source, self.units, self.cap, self.whole_step, self.ahead, self.by_size

    def __call__(self, g: fx.Graph) -> None:
        g = getattr(g, "graph", g)
        starts = [n for n in g.nodes if is_ours(n) or (self.by_size and note_as_ours(n))]
        if not starts:
            return  # such as the subgraphs of FlexAttention
        if undone := [
            name for name, value in OFF.items() if getattr(inductor_config, name) != value
        ]:
            warnings.warn(
                f"overlap: {', '.join(undone)}: set beside compile_options(), Inductor moves the collectives "
                "again. Leave it out of the options, or leave compile_options() out",
                stacklevel=2,
            )
        for again in [n for start in starts for n in sorted(start.users)[1:] if n.target is WAIT]:
            # The compiler merges equal collectives, not the waits.
            again.replace_all_uses_with(wait_of(again.args[0]))
            g.erase_node(again)
        self.warn(starts)
        backward = self.gather_again(g) if self.whole_step else None
        found = [
            n for n in g.find_nodes(op="call_function", target=GATHER) if sources(n) is not None
        ]
        found.sort(key=first_use)  # nodes compare by their places in the graph
        before_turn = [n for n in found if backward is None or wait_of(n) < backward]
        self.merge_gathers(
            g,
            before_turn,
            next((n for n in g.nodes if n.op not in ("placeholder", "get_attr")), None),
        )
        self.merge_gathers(g, found[len(before_turn) :], backward)
        self.merge_reductions(g, SCATTER)
        stable_topological_sort(g)
        # With hybrid_shard, of the shards that the reduce-scatters have made.
        self.merge_reductions(g, REDUCE)
        stable_topological_sort(g)
        g.eliminate_dead_code()
        g.lint()

    def warn(self, starts: list[fx.Node]) -> None:
        if self.units and not self.warned and not any(map(unit_of, starts)):
            self.warned = True
            seen = ", ".join(sorted({module_of(n) or "no module" for n in starts})[:3])
            warnings.warn(
                f"overlap: a graph gathers nothing in a unit ({self.units[0]} ..), only in {seen}: buckets "
                "by size. For one per unit compile what calls them, without graph breaks",
                stacklevel=2,
            )

    def buckets(self, starts: list[fx.Node]) -> list[list[fx.Node]]:
        """Collectives to merge: those of a block, or neighbours of no block up to the cap; alike in
        dtype and group."""
        # A run is of neighbours that lie in no block: its number, bytes, most bytes.
        buckets, run, size, largest = {}, 0, 0, 0
        # It may vary.
        for start in (n for n in starts if all(type(size) is int for size in n.meta["val"].shape)):
            block, tensor = unit_of(start), contents(start).meta["val"]
            size, largest = size + tensor.nbytes, max(largest, tensor.nbytes)
            if block:  # ends the run
                run, size, largest = run + 1, 0, 0
            elif size > max(self.cap, largest) * 17 / 16:
                # A norm may join a head that exceeds the cap by itself.
                run, size, largest = run + 1, tensor.nbytes, tensor.nbytes
            key = block or run, start.meta["val"].dtype, *map(str, start.args[1:])
            buckets.setdefault(key, []).append(start)
        return list(buckets.values())

    def gather_again(self, g: fx.Graph) -> fx.Node | None:
        """In a whole step: gathers again for backward the weights that it needs. Not those behind
        the last block, whose backward comes at once, and not those that are to be kept. Returns the
        first product of backward."""
        forward = ancestors(g.output_node().args[0][0])  # the loss and all that it is computed from
        waits, first = [], {}
        for start in g.find_nodes(op="call_function", target=GATHER):
            if (made_by := sources(start)) is None:
                continue
            inputs = frozenset(
                i for n in (start, *made_by) for i in n.all_input_nodes if i.op == "placeholder"
            )
            key = inputs, start.meta["val"].dtype, *start.args[1:]
            if wait_of(start) in forward:
                first.setdefault(key, wait_of(start))
                waits.append(wait_of(start))
            elif key in first:
                # An activation checkpoint gathers again what is kept, or what is decided on below.
                replace([start], [first[key]])
        after = max(waits, default=next(iter(g.nodes)))
        backward = next(
            (n for n in g.nodes if n > after and n not in forward and is_product(n)), None
        )
        for wait in waits:  # what a checkpoint cut up again is what was cut up before
            cuts = sorted(filter(is_cut, layouts(wait)))
            for cut in cuts[1:]:
                cut.replace_all_uses_with(cuts[0])
        waits.sort()
        while waits and not unit_of(waits[-1].args[0]):
            waits.pop()
        for wait in waits:
            gather_for_backward(g, wait, forward)
        g.eliminate_dead_code()
        return backward

    def merge_gathers(self, g: fx.Graph, found: list[fx.Node], before: fx.Node | None) -> None:
        """found: in the order of their uses. The first bucket starts at `before`, another when the
        one before it (or `ahead` before it) is cut up, or `ahead` of its wait."""
        cut_up, start = [], None
        for i, bucket in enumerate(self.buckets(found)):
            first_wait = min(map(first_use, bucket))
            if i:
                before = (cut_up[i - self.early] if i >= self.early else start).next
                before = self.ahead < 1 and part_of(before, first_wait, 1 - self.ahead) or before
            with g.inserting_before(before):
                copies = {}
                inputs = [copied(g, n.args[0], copies) for n in bucket]
                rows = [call(g, aten.reshape.default, x, [-1]) for x in inputs]
                flat = inputs[0] if len(bucket) == 1 else call(g, aten.cat.default, rows)
                start = call(g, GATHER, flat, *bucket[0].args[1:], like=bucket)
            with g.inserting_before(first_wait):
                results = split(g, call(g, WAIT, start), bucket)
            replace(bucket, results)
            cut_up.append(cut_at_once(results[-1]))

    def merge_reductions(self, g: fx.Graph, op) -> None:
        """Reduce-scatters, or all-reduces, of gradients. A bucket starts when all of its gradients
        are there, and is waited for when the next one (or the one `ahead` of it) has started."""
        found = [n for n in g.find_nodes(op="call_function", target=op) if is_ours(n)]
        waits, buckets = [], sorted(self.buckets(found), key=max)
        for bucket, following in zip_longest(buckets, buckets[1:]):
            ranks, after = bucket[0].args[2] if op is SCATTER else 1, max(bucket).next
            start_at = behind_gather(after)
            # Buckets start in the order in which they are waited for.
            if following and max(following) < start_at:
                start_at = after
            with g.inserting_before(after):
                flat = (
                    bucket[0].args[0]
                    if len(bucket) == 1
                    else joined(g, [n.args[0] for n in bucket], ranks)
                )
            with g.inserting_before(start_at):
                start = call(g, op, flat, *bucket[0].args[1:], like=bucket)
                at = waits and self.ahead < 1 and part_of(waits[-1], start, self.ahead) or start
                # The caller sorts what uses them behind them.
                for wait in reversed(waits[-self.early :]):
                    at.append(wait)
                waits.append(call(g, WAIT, start))
                results = waits[-1:] if len(bucket) == 1 else taken_apart(g, waits[-1], bucket)
            replace(bucket, results)


def cut_at_once(wait: fx.Node) -> fx.Node:
    """The last of the nodes that cut up what was gathered, which come to lie right behind the
    wait."""
    last = wait
    for view in [user for user in wait.users if any(is_cut(n) for n in user.users)]:
        for n in (view, *filter(is_cut, view.users)):
            for moved in (n, *(n.users if is_cut(n) else ())):
                last.append(moved)
                last = moved
    return last


def behind_gather(first: fx.Node) -> fx.Node:
    """`first`, or what follows a gather before the next product: what is waited for first goes
    first over a link."""
    n = at = first
    while n.op != "output" and not is_product(n):
        n = n.next
        at = n if n.prev.target is GATHER else at
    return at


def part_of(first: fx.Node, last: fx.Node, part: float) -> fx.Node | None:
    """The product between two nodes of a graph with which this part of the FLOPs between them is
    reached."""
    between = []
    while first is not last:
        if is_product(first):
            between.append((first, flops_of(first)))
        first = first.next
    done = [*accumulate(flops for _, flops in between)]
    return next(
        (n for (n, _), flops in zip(between, done, strict=True) if flops >= part * done[-1]), None
    )


def flops_of(product: fx.Node) -> float:
    args, kwargs = fx.map_arg((product.args, product.kwargs), lambda n: n.meta.get("val"))
    count = flop_registry[getattr(product.target, "overloadpacket", product.target)]
    try:
        return count(*args, **kwargs, out_val=product.meta["val"])
    except AssertionError:  # torch 2.11 counts attention only where k and v have as many heads as q
        heads, four = args[0].shape[1], [isinstance(t, torch.Tensor) and t.ndim == 4 for t in args]
        args = [
            t.repeat_interleave(heads // t.shape[1], 1) if yes else t
            for t, yes in zip(args, four, strict=True)
        ]
        return count(*args, **kwargs, out_val=product.meta["val"])


def is_ours(n: fx.Node) -> bool:
    """Whether simple_fsdp.py made a collective, which it notes; it says of which unit it is."""
    return n.target in (GATHER, SCATTER, REDUCE) and "unit" in n.meta


def note_as_ours(n: fx.Node) -> bool:
    """Notes another's gather, or average of more than a scalar, as simple_fsdp.py would."""
    if n.target is GATHER or (
        n.target in (SCATTER, REDUCE) and n.args[1] == "avg" and n.meta["val"].ndim
    ):
        n.meta |= dict(unit="", bucket=[(module_of(n), tuple(contents(n).meta["val"].shape))])
    return is_ours(n)


def unit_of(n: fx.Node) -> str:
    """Path in the graph of the unit that a node comes from, the innermost if there are several; "":
    none."""
    if "unit" in n.meta:
        return n.meta["unit"]
    stack = next((n.meta[key] for key in STACKS if n.meta.get(key)), {})
    return next((path for path, cls in reversed(stack.values()) if is_unit(cls)), "")


def wait_of(start: fx.Node) -> fx.Node:
    return min(start.users)


def layouts(wait: fx.Node) -> list[fx.Node]:
    """What was waited for, and its views, casts, copies and parts."""
    whole = [wait]
    for n in whole:  # grows while it is walked
        whole += [
            u
            for u in n.users
            if is_layout(u) and u not in whole and {*u.all_input_nodes} <= {*whole}
        ]
    return whole


def first_use(start: fx.Node) -> fx.Node:
    """What first computes with what a gather gives. Inductor moves some waits there, and leaves
    others."""
    whole = layouts(wait_of(start))
    return min((user for n in whole for user in n.users if user not in whole), default=whole[0])


def contents(start: fx.Node) -> fx.Node:
    """The whole tensor of a collective: a reduction's is its input, a gather's what is waited
    for."""
    return wait_of(start) if start.target is GATHER else start.args[0]


def is_product(n: fx.Node) -> bool:
    """Matrix products and attention: what a collective can hide behind."""
    return getattr(n.target, "overloadpacket", n.target) in flop_registry


def is_layout(n: fx.Node) -> bool:
    """Views, copies and casts: their result holds what their inputs hold."""
    return n.target in LAYOUT or getattr(n.target, "is_view", False) or is_cut(n)


def is_cut(n: fx.Node) -> bool:
    """simple_fsdp.py's operation that cuts up gathered rows."""
    return str(n.target).startswith("simple_fsdp.cut")


def module_of(node: fx.Node) -> str:
    """The innermost module that a node, or else what alone feeds it, comes from:
    L['self'].blocks.0.mlp.up"""
    if stack := next((node.meta[key] for key in STACKS if node.meta.get(key)), None):
        return list(stack.values())[-1][0]
    return module_of(node.all_input_nodes[0]) if len(node.all_input_nodes) == 1 else ""


def ancestors(node: fx.Node) -> set[fx.Node]:
    """A node and all that it is computed from."""
    seen, todo = set(), [node]
    while todo:
        n = todo.pop()
        if n not in seen:
            seen.add(n)
            todo += n.all_input_nodes
    return seen


def sources(start: fx.Node) -> list[fx.Node] | None:
    """What lies between the parameters and our gather of them; None of another's, or if it waits
    for something."""
    found = [n for n in ancestors(start.args[0]) if n.op == "call_function"]
    return None if not is_ours(start) or any(n.target is WAIT for n in found) else found


def gather_for_backward(g: fx.Graph, wait: fx.Node, forward: set[fx.Node]) -> None:
    """What backward reads of a gathered weight becomes a copy of it, gather included, at the first
    such use."""
    whole = layouts(wait)
    if any(n.meta.get("recompute") not in GATHER_AGAIN for n in (wait, *filter(is_cut, whole))):
        return  # it is to be kept
    uses = [
        (user, n) for n in whole for user in n.users if user not in forward and user not in whole
    ]
    copies = {}
    for user, n in sorted(uses, key=lambda use: use[0]):
        with g.inserting_before(user):
            user.replace_input_with(n, copied(g, n, copies))


def copied(g: fx.Graph, n: fx.Node, copies: dict[fx.Node, fx.Node]) -> fx.Node:
    """`n` and what it is made from, again at the graph's insertion point; what `copies` has already
    is used again."""
    if n.op == "call_function" and n not in copies:
        for source in n.all_input_nodes:
            copied(g, source, copies)
        args, kwargs = fx.map_arg((n.args, n.kwargs), lambda m: copies.get(m, m))
        # node_copy would take a name that AOT's remat gave twice.
        copies[n] = g.call_function(n.target, args, kwargs)
        copies[n].meta = dict(n.meta)
    return copies.get(n, n)


def call(g: fx.Graph, target, *args, like: Sequence[fx.Node] = ()) -> fx.Node:
    """A new node with its fake value; `like`: what it merges, noted with the modules that they come
    from."""
    node = g.call_function(target, args)
    node.meta["val"] = target(*fx.map_arg(args, lambda n: n.meta["val"]))
    if like:
        node.meta |= {key: like[0].meta[key] for key in STACKS if key in like[0].meta}
        node.meta |= dict(
            unit=like[0].meta["unit"], bucket=sum((n.meta["bucket"] for n in like), [])
        )
    return node


def joined(g: fx.Graph, grads: list[fx.Node], ranks: int) -> fx.Node:
    """Whole gradients side by side, each as [N, shard], in one dimension."""
    rows = [call(g, aten.reshape.default, grad, [ranks, -1]) for grad in grads]
    return call(g, aten.reshape.default, call(g, aten.cat.default, rows, 1), [-1])


def taken_apart(g: fx.Graph, whole: fx.Node, starts: list[fx.Node]) -> list[fx.Node]:
    """What each of `starts` would have given: views of what they give together."""
    values = [n.meta["val"].contiguous() for n in starts]
    ends = accumulate(v.numel() for v in values)
    return [
        call(g, aten.as_strided.default, whole, [*v.shape], [*v.stride()], end - v.numel())
        for v, end in zip(values, ends, strict=True)
    ]


def split(g: fx.Graph, whole: fx.Node, starts: list[fx.Node]) -> list[fx.Node]:
    """What each of `starts` would have given, cut from what they give together, [N, sizes]."""
    if len(starts) == 1:
        return [whole]
    rows = call(g, aten.reshape.default, whole, [starts[0].args[1], -1])
    sizes = [n.meta["val"].numel() // starts[0].args[1] for n in starts]
    pieces = call(g, torch.ops.simple_fsdp.cut_0.default, rows, sizes)
    parts = [call(g, operator.getitem, pieces, i) for i in range(len(starts))]
    return [
        call(g, aten.reshape.default, part, [*n.meta["val"].shape])
        for part, n in zip(parts, starts, strict=True)
    ]


def replace(starts: list[fx.Node], by: list[fx.Node]) -> None:
    """Each of `by` takes the place of what its collective was waited for; collectives and waits are
    erased."""
    for start, new in zip(starts, by, strict=True):
        wait = wait_of(start)
        wait.replace_all_uses_with(new)
        for node in (wait, start):
            node.graph.erase_node(node)
