"""Few collectives, early: what to hand to torch.compile so that a model under simple_fsdp.py overlaps. Copy it along.

    from overlap import compile_options

    step = torch.compile(forward_and_loss, fullgraph=True, options=compile_options(model))

Left alone, Inductor runs one collective per parameter and waits for it at once. With these options: one all-gather and
one reduce-scatter (and one all-reduce of what is replicated) per block; the next block's all-gather starts as soon as
this block's has arrived, in forward and backward, so that the weights of two blocks exist at most; a reduction is
waited for one block later. Parameters of no block (embedding, head) join their neighbours up to `cap_mib`. Works in the
graphs of forward and of backward, and with `whole_step=True` in one graph of forward, loss, backward and optimizer,
where it also gathers again in backward.
Needs Inductor (torch 2.11 to 2.14); all private names of torch that it uses are imported or read in this file's head.
Where they are missing: size buckets by Inductor's own flags, said in one warning.
"""

import functools
import hashlib
import operator
import re
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import fx, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.flop_counter import flop_registry

try:
    from torch._inductor.custom_graph_pass import CustomGraphPass
    from torch._inductor.pattern_matcher import stable_topological_sort
except ImportError:  # another torch
    CustomGraphPass, stable_topological_sort = object, None

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
GATHER, SCATTER = c10d.all_gather_into_tensor.default, c10d.reduce_scatter_tensor.default
REDUCE, WAIT = c10d.all_reduce.default, c10d.wait_tensor.default
_LIBRARY = "simple_fsdp_" + __name__.replace(".", "_")  # a copy of this file beside it registers an op of its own


@torch.library.custom_op(f"{_LIBRARY}::cut", mutates_args=())
def cut(whole: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
    """[N, sum(sizes)] -> copies [N, size], all at once, so that the gathered bucket's memory is free again. As views,
    Inductor would copy each at its use, and hold the bucket until the last of them."""
    parts = [whole.new_empty(len(whole), size) for size in sizes]
    torch.split_with_sizes_copy(whole, sizes, 1, out=parts)
    return parts


@cut.register_fake
def _(whole, sizes):
    return [whole.new_empty(len(whole), size) for size in sizes]


CUT = getattr(torch.ops, _LIBRARY).cut.default
LAYOUT = {CUT, operator.getitem, aten.reshape.default, aten.clone.default, aten._to_copy.default, aten.cat.default,
          aten._unsafe_view.default, torch.ops.prims.convert_element_type.default}  # fmt: skip
AGAIN = CheckpointPolicy.PREFER_RECOMPUTE, CheckpointPolicy.MUST_RECOMPUTE
STACKS = ("nn_module_stack", "fwd_nn_module_stack")  # where a node's module is noted: forward and backward graphs


def blocks_of(model: nn.Module) -> list[str]:
    """Names of the repeated blocks of a model: the members, with parameters, of its outermost ModuleLists and
    Sequentials."""
    modules, blocks = dict(model.named_modules()), []
    for name, module in modules.items():
        inside = any(name.startswith(b + ".") for b in blocks)
        if isinstance(module, nn.ModuleList | nn.Sequential) and not inside:
            children = [f"{name}.{child}" if name else child for child, _ in module.named_children()]
            blocks += [c for c in children if next(modules[c].parameters(), None) is not None]
    return blocks


def compile_options(
    model: nn.Module, blocks: Sequence[str] | None = None, cap_mib: float = 128.0, whole_step: bool = False
) -> dict:
    """Inductor options for any torch.compile of `model`, wrapped, or of a function around it; none on a single rank,
    where Inductor's own order of a graph needs less memory.

    blocks: names of the modules that get a bucket each (default: the members of the outermost ModuleLists and
    Sequentials that hold parameters; none for a model without, such as a single block).
    cap_mib: most MiB, as gathered or reduced, of one bucket of parameters that lie in no block (a larger parameter is
    one of its own and takes small ones along).
    whole_step: what is compiled is a whole training step, which returns its loss first and updates the parameters.
    Raises ValueError if a name is no module of `model`; while compiling, if no collective lies in any block."""
    modules = dict(model.named_modules())
    blocks = blocks_of(model) if blocks is None else blocks
    if missing := [b for b in blocks if b not in modules]:
        raise ValueError(f"blocks: {', '.join(missing)}: no such module, there are {', '.join(list(modules)[1:])}")
    if not any(p.device_mesh.size() > 1 for p in model.parameters() if isinstance(p, DTensor)):
        return {}
    if stable_topological_sort is None:
        return _flags_only(cap_mib)
    return dict(post_grad_custom_post_pass=Overlap(tuple(blocks), cap_mib, whole_step), reorder_for_peak_memory=False)


def _cap(mib: float, bucket: int) -> float:
    return mib


def _flags_only(cap_mib: float) -> dict:
    """What comes nearest without a pass of our own: buckets by size, moved by Inductor's iterative passes."""
    warnings.warn(f"torch {torch.__version__}: no custom graph pass; collectives bucketed by size alone", stacklevel=3)
    moves = ["reorder_communication_preserving_peak_memory", "sink_waits_iterative"]
    flags = dict(reorder_for_compute_comm_overlap=True, reorder_for_compute_comm_overlap_passes=[*moves, moves[0]])
    for op in ("all_gather", "reduce_scatter", "all_reduce"):
        flags[f"bucket_{op}s_fx"] = "all"
        flags[f"bucket_{op}s_fx_bucket_size_determinator"] = functools.partial(_cap, cap_mib)  # pickles: cache keys
    return {name: value for name, value in flags.items() if name in torch._inductor.list_options()}


class Overlap(CustomGraphPass):
    """Buckets and moves the collectives of one post-grad graph."""

    def __init__(self, blocks: tuple[str, ...], cap_mib: float, whole_step: bool = False):
        self.blocks, self.cap, self.whole_step = blocks, cap_mib * 2**20, whole_step

    def uuid(self):  # what the compile caches know of this pass: its source and its settings
        return hashlib.sha256(Path(__file__).read_bytes()).hexdigest(), self.blocks, self.cap, self.whole_step

    def __call__(self, g: fx.Graph) -> None:
        g = getattr(g, "graph", g)
        if not any(n.target in (GATHER, SCATTER, REDUCE) for n in g.nodes):
            return  # such as the subgraphs of FlexAttention
        self.check(g)
        turn = None
        if self.whole_step:
            turn = self.gather_again(g)
            note_modules(g)
        place = {n: i for i, n in enumerate(g.nodes)}
        found = [n for n in g.find_nodes(op="call_function", target=GATHER) if sources(n) is not None]
        found.sort(key=lambda n: place[wait_of(n)])
        cut = len(found) if turn is None else sum(place[wait_of(n)] < place[turn] for n in found)
        self.gathers(g, found[:cut], next((n for n in g.nodes if n.op not in ("placeholder", "get_attr")), None))
        self.gathers(g, found[cut:], turn)
        self.reductions(g, SCATTER)
        stable_topological_sort(g)
        self.reductions(g, REDUCE)  # hybrid_shard: the shards that the reduce-scatters have made
        stable_topological_sort(g)
        g.eliminate_dead_code()
        g.lint()

    def block_of(self, node: fx.Node) -> str:
        path = "." + re.sub(r"[^\w]+", ".", module_of(node)) + "."
        return max((b for b in self.blocks if f".{b}." in path), key=len, default="")

    def gather_again(self, g: fx.Graph) -> fx.Node | None:
        """In a whole step: weights that backward needs are gathered again for it, but for those behind the last block,
        whose backward comes at once, and those that are to be kept. Returns the first product of backward."""
        forward, place = ancestors(g.output_node().args[0][0]), {n: i for i, n in enumerate(g.nodes)}
        waits, first = [], {}
        for start in g.find_nodes(op="call_function", target=GATHER):
            if (made := sources(start)) is None:
                continue
            inputs = frozenset(i for n in (start, *made) for i in n.all_input_nodes if i.op == "placeholder")
            key = inputs, start.meta["val"].dtype, *start.args[1:]
            if wait_of(start) in forward:
                first.setdefault(key, wait_of(start))
                waits.append(wait_of(start))
            elif key in first:  # an activation checkpoint gathers again what is kept, or what is decided on below
                replace([start], [first[key]])
        waits.sort(key=place.get)
        last = place[waits[-1]] if waits else 0
        turn = next((n for n in g.nodes if place[n] > last and n not in forward and is_product(n)), None)
        while waits and not self.block_of(waits[-1].args[0]):
            waits.pop()
        for wait in waits:
            if wait.meta.get("recompute") not in AGAIN:
                continue
            whole = [wait]  # and its views, casts and copies
            for n in whole:
                whole += [u for u in n.users if is_layout(u) and u not in whole and {*u.all_input_nodes} <= {*whole}]
            uses = [(u, n) for n in whole for u in n.users if u not in forward and u not in whole]
            copies = {}
            for user, n in sorted(uses, key=lambda use: place[use[0]]):
                with g.inserting_before(user):
                    user.replace_input_with(n, copied(g, n, copies))
        g.eliminate_dead_code()
        return turn

    def check(self, g: fx.Graph) -> None:
        found = [n for op in (GATHER, SCATTER) for n in g.find_nodes(op="call_function", target=op)]
        if found and self.blocks and not any(self.block_of(n) for n in found):
            seen = sorted({module_of(n) or "(no module)" for n in found})
            raise ValueError(f"blocks: no collective is in {', '.join(self.blocks)}; they are in {', '.join(seen)}")

    def buckets(self, starts: list[fx.Node]) -> list[list[fx.Node]]:
        """Collectives to merge: a block's, or neighbours of no block up to the cap; alike in type and group."""
        buckets, run, size, largest = {}, 0, 0, 0
        for n in starts:
            block, own = self.block_of(n), contents(n).meta["val"].nbytes
            size, largest = (0, 0) if block else (size + own, max(largest, own))
            if block:
                run += 1
            elif size > max(self.cap, largest) * 17 / 16:  # a norm rides along with a head that exceeds the cap
                run, size, largest = run + 1, own, own
            key = block or run, n.meta["val"].dtype, *map(str, n.args[1:])
            buckets.setdefault(key, []).append(n)
        return list(buckets.values())

    def gathers(self, g: fx.Graph, found: list[fx.Node], before: fx.Node | None) -> None:
        """found: all-gathers in the order of their waits; the first bucket starts at `before`."""
        place = {n: i for i, n in enumerate(g.nodes)}
        for bucket in self.buckets(found):
            first = min((wait_of(n) for n in bucket), key=place.get)
            with g.inserting_before(before):  # as soon as the previous bucket is cut up, and its memory free again
                copies = {}
                inputs = [copied(g, n.args[0], copies) for n in bucket]
                flat = call(g, aten.cat.default, [call(g, aten.reshape.default, x, [-1]) for x in inputs])
                start = call(g, GATHER, flat, *bucket[0].args[1:], like=bucket)
            with g.inserting_before(first):
                rows = call(g, aten.reshape.default, call(g, WAIT, start), [bucket[0].args[1], -1])
                parts = split(g, rows, inputs, CUT) if len(bucket) > 1 else [rows]
                outputs = [reshaped(g, part, n) for part, n in zip(parts, bucket, strict=True)]
            replace(bucket, outputs)
            before = outputs[-1].next

    def reductions(self, g: fx.Graph, op) -> None:
        """Reduce-scatters, or the all-reduces of gradients (averages of more than a scalar)."""
        found = [n for n in g.find_nodes(op="call_function", target=op) if n.args[1] == "avg" and n.meta["val"].ndim]
        place, last = {n: i for i, n in enumerate(g.nodes)}, None
        for bucket in sorted(self.buckets(found), key=lambda ns: max(place[n] for n in ns)):
            ranks = bucket[0].args[2] if op is SCATTER else 1
            with g.inserting_before(max(bucket, key=place.get).next):
                rows = [call(g, aten.reshape.default, n.args[0], [ranks, -1]) for n in bucket]
                flat = call(g, aten.reshape.default, call(g, aten.cat.default, rows, 1), [-1])
                start = call(g, op, flat, *bucket[0].args[1:], like=bucket)
                if last is not None:
                    start.append(last)  # the previous bucket is waited for here; what uses it is sorted behind
                last = call(g, WAIT, start)
                parts = split(g, last, bucket, aten.split_with_sizes.default, 0)
                outputs = [reshaped(g, part, n) for part, n in zip(parts, bucket, strict=True)]
            replace(bucket, outputs)


def module_of(node: fx.Node) -> str:
    """The innermost module that a node, or else what alone feeds it, comes from: L['self'].blocks.0.mlp.up"""
    stack = next((node.meta[key] for key in STACKS if node.meta.get(key)), None)
    if stack:
        return list(stack.values())[-1][0]
    return module_of(node.all_input_nodes[0]) if len(node.all_input_nodes) == 1 else ""


def note_modules(g: fx.Graph) -> None:
    """In a whole step no node of backward knows its module. A reduction gets that of the parameter which it ends in:
    from `copy_(parameter, new)` back through the optimizer, by index through lists, never through scalars."""
    for copy in g.find_nodes(op="call_function", target=aten.copy_.default):
        parameter, new = copy.args
        stack = next((u.meta[STACKS[0]] for u in parameter.users if u.meta.get(STACKS[0])), None)
        todo, seen = [(new, None)] if stack else [], set()
        while todo:
            n, index = todo.pop()
            value = n.meta.get("val")
            if (n, index) in seen or n.op == "placeholder" or isinstance(value, torch.Tensor) and value.ndim == 0:
                continue
            seen.add((n, index))
            if n.target is WAIT and n.args[0].target in (SCATTER, REDUCE):
                n.args[0].meta[STACKS[0]] = stack
                if n.args[0].target is REDUCE:  # hybrid_shard: of what was scattered before
                    todo.append((n.args[0].args[0], None))
            elif n.target is operator.getitem:
                todo.append(n.args)
            else:
                for a in n.args:  # of a list with an index only its own element, as in torch._foreach_*
                    several = isinstance(a, list | tuple)
                    picked = a if several and index is None else a[index : index + 1] if several else [a]
                    todo += [(m, None) for m in picked if isinstance(m, fx.Node)]


def ancestors(node: fx.Node) -> set[fx.Node]:
    seen, todo = set(), [node]
    while todo:
        n = todo.pop()
        if n not in seen:
            seen.add(n)
            todo += n.all_input_nodes
    return seen


def is_product(n: fx.Node) -> bool:
    """Matrix products and attention: what a collective can hide behind."""
    return getattr(n.target, "overloadpacket", n.target) in flop_registry


def is_layout(n: fx.Node) -> bool:
    """Views, copies and casts: their result holds what their inputs hold."""
    return n.target in LAYOUT or getattr(n.target, "is_view", False)


def wait_of(start: fx.Node) -> fx.Node:
    return next(iter(start.users))


def sources(start: fx.Node) -> list[fx.Node] | None:
    """What lies between the graph's inputs and a gather (casts, padding); None if that is more than a parameter's."""
    seen, todo = [], [start.args[0]]
    while todo:
        n = todo.pop()
        if n.op == "call_function" and n not in seen:
            if n.target is WAIT or len(seen) > 8:
                return None
            seen.append(n)
            todo += n.all_input_nodes
    return seen


def copied(g: fx.Graph, n: fx.Node, copies: dict) -> fx.Node:
    """`n` and what it is made from, again at the graph's insertion point."""
    if n.op == "call_function" and n not in copies:
        for source in n.all_input_nodes:
            copied(g, source, copies)
        args, kwargs = fx.map_arg((n.args, n.kwargs), lambda m: copies.get(m, m))
        copies[n] = g.call_function(n.target, args, kwargs)  # node_copy would take a name that AOT's remat gave twice
        copies[n].meta = dict(n.meta)
    return copies.get(n, n)


def call(g: fx.Graph, target, *args, like: Sequence[fx.Node] = ()) -> fx.Node:
    """A new node with its fake value; `like`: what it merges, noted with the modules that they come from."""
    node = g.call_function(target, args)
    values = fx.map_arg(args, lambda n: n.meta["val"])
    tensor = next(v for v in torch.utils._pytree.tree_leaves(values) if isinstance(v, torch.Tensor))
    with tensor.fake_mode:
        node.meta["val"] = target(*values)
    if like:
        node.meta |= {key: like[0].meta[key] for key in STACKS if key in like[0].meta}
        node.meta["bucket"] = [(module_of(n), tuple(contents(n).meta["val"].shape)) for n in like]
    return node


def contents(start: fx.Node) -> fx.Node:
    """The whole tensor of a collective: a reduction's is its input, a gather's what is waited for."""
    return wait_of(start) if start.target is GATHER else start.args[0]


def reshaped(g: fx.Graph, n: fx.Node, like: fx.Node) -> fx.Node:
    return call(g, aten.reshape.default, n, list(like.meta["val"].shape))


def split(g: fx.Graph, whole: fx.Node, like: list[fx.Node], op, *dim: int) -> list[fx.Node]:
    """`whole` cut by `op` into pieces of the numbers of elements of `like`."""
    parts = call(g, op, whole, [n.meta["val"].numel() for n in like], *dim)
    nodes = []
    for i, value in enumerate(parts.meta["val"]):
        nodes.append(g.call_function(operator.getitem, (parts, i)))
        nodes[-1].meta["val"] = value
    return nodes


def replace(starts: list[fx.Node], by: list[fx.Node]) -> None:
    """Each of `by` takes the place of what its collective was waited for; collectives and waits are erased."""
    for start, new in zip(starts, by, strict=True):
        wait = wait_of(start)
        wait.replace_all_uses_with(new)
        for node in (wait, start):
            node.graph.erase_node(node)
