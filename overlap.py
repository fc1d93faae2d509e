"""Few collectives, early: what to hand to torch.compile so that a model under simple_fsdp.py overlaps. Copy it along.

    from overlap import compile_options

    step = torch.compile(forward_and_loss, fullgraph=True, options=compile_options(model))

Left alone, Inductor runs one collective per parameter and waits for it at once. With these options: one all-gather and
one reduce-scatter (and one all-reduce of what is replicated) per block; the next block's all-gather starts before this
block's is waited for, in forward and backward; a reduction is waited for one block later. Parameters of no block
(embedding, head) join their neighbours up to `cap_mib`. Works in the graphs of forward, backward, and both in one.
Needs Inductor (torch 2.11 to 2.14); all private names of torch that it uses are imported or read in this file's head.
"""

import hashlib
import operator
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import fx, nn
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.pattern_matcher import stable_topological_sort

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
GATHER, SCATTER = c10d.all_gather_into_tensor.default, c10d.reduce_scatter_tensor.default
REDUCE, WAIT = c10d.all_reduce.default, c10d.wait_tensor.default
STACKS = ("nn_module_stack", "fwd_nn_module_stack")  # where a node's module is noted: forward and backward graphs


def compile_options(model: nn.Module, blocks: Sequence[str] | None = None, cap_mib: float = 128.0) -> dict:
    """Inductor options for any torch.compile of `model` or of a function around it.

    blocks: names of the modules that get a bucket each (default: the members of the outermost ModuleLists and
    Sequentials that hold parameters; none for a model without, such as a single block: all its parameters make one).
    cap_mib: most MiB of one bucket of parameters that lie in no block.
    Raises ValueError if a name is no module of `model`; while compiling, if no collective lies in any block."""
    modules = dict(model.named_modules())
    if blocks is None:
        blocks = []
        for name, module in modules.items():
            inside = any(name.startswith(b + ".") for b in blocks)
            if isinstance(module, nn.ModuleList | nn.Sequential) and not inside:
                children = [f"{name}.{child}" if name else child for child, _ in module.named_children()]
                blocks += [c for c in children if next(modules[c].parameters(), None) is not None]
    if missing := [b for b in blocks if b not in modules]:
        raise ValueError(f"blocks: {', '.join(missing)}: no such module, there are {', '.join(list(modules)[1:])}")
    return dict(post_grad_custom_post_pass=Overlap(tuple(blocks), cap_mib), reorder_for_peak_memory=False)


class Overlap(CustomGraphPass):
    """Buckets and moves the collectives of one post-grad graph."""

    def __init__(self, blocks: tuple[str, ...], cap_mib: float):
        self.blocks, self.cap = blocks, cap_mib * 2**20

    def uuid(self):  # what the compile caches know of this pass: its source and its settings
        return hashlib.sha256(Path(__file__).read_bytes()).hexdigest(), self.blocks, self.cap

    def __call__(self, g: fx.Graph) -> None:
        g = getattr(g, "graph", g)
        self.check(g)
        self.gathers(g)
        self.reductions(g, SCATTER)
        stable_topological_sort(g)
        self.reductions(g, REDUCE)  # hybrid_shard: the shards that the reduce-scatters have made
        stable_topological_sort(g)
        g.eliminate_dead_code()
        g.lint()

    def block_of(self, node: fx.Node) -> str:
        path = "." + re.sub(r"[^\w]+", ".", module_of(node)) + "."
        return max((b for b in self.blocks if f".{b}." in path), key=len, default="")

    def check(self, g: fx.Graph) -> None:
        found = [n for op in (GATHER, SCATTER) for n in g.find_nodes(op="call_function", target=op)]
        if found and self.blocks and not any(self.block_of(n) for n in found):
            seen = sorted({module_of(n) or "(no module)" for n in found})
            raise ValueError(f"blocks: no collective is in {', '.join(self.blocks)}; they are in {', '.join(seen)}")

    def buckets(self, starts: list[fx.Node]) -> list[list[fx.Node]]:
        """Collectives to merge: a block's, or neighbours of no block up to the cap; alike in type and group."""
        buckets, run, size = {}, 0, 0
        for n in starts:
            block = self.block_of(n)
            size = 0 if block else size + n.meta["val"].nbytes
            if block or size > self.cap:
                run, size = run + 1, n.meta["val"].nbytes
            key = block or run, n.meta["val"].dtype, *map(str, n.args[1:])
            buckets.setdefault(key, []).append(n)
        return list(buckets.values())

    def gathers(self, g: fx.Graph) -> None:
        found = [n for n in g.find_nodes(op="call_function", target=GATHER) if sources(n) is not None]
        place = {n: i for i, n in enumerate(g.nodes)}
        found.sort(key=lambda n: place[wait_of(n)])
        before = next((n for n in g.nodes if n.op not in ("placeholder", "get_attr")), None)
        for bucket in self.buckets(found):
            first = min((wait_of(n) for n in bucket), key=place.get)
            with g.inserting_before(before):  # start before the previous bucket is waited for
                copies = {}
                inputs = [copied(g, n.args[0], copies) for n in bucket]
                flat = call(g, aten.cat.default, [call(g, aten.reshape.default, x, [-1]) for x in inputs])
                start = call(g, GATHER, flat, *bucket[0].args[1:], like=bucket[0])
            with g.inserting_before(first):
                before = call(g, WAIT, start)
                ranks = bucket[0].args[1]
                parts = split(g, call(g, aten.reshape.default, before, [ranks, -1]), inputs, 1)
                outputs = [reshaped(g, part, n) for part, n in zip(parts, bucket, strict=True)]
            replace(bucket, outputs)

    def reductions(self, g: fx.Graph, op) -> None:
        """Reduce-scatters, or the all-reduces of gradients (averages of more than a scalar)."""
        found = [n for n in g.find_nodes(op="call_function", target=op) if n.args[1] == "avg" and n.meta["val"].ndim]
        place, last = {n: i for i, n in enumerate(g.nodes)}, None
        for bucket in sorted(self.buckets(found), key=lambda ns: max(place[n] for n in ns)):
            ranks = bucket[0].args[2] if op is SCATTER else 1
            with g.inserting_before(max(bucket, key=place.get).next):
                rows = [call(g, aten.reshape.default, n.args[0], [ranks, -1]) for n in bucket]
                flat = call(g, aten.reshape.default, call(g, aten.cat.default, rows, 1), [-1])
                start = call(g, op, flat, *bucket[0].args[1:], like=bucket[0])
                if last is not None:
                    start.append(last)  # the previous bucket is waited for here; what uses it is sorted behind
                last = call(g, WAIT, start)
                parts = split(g, last, bucket, 0)
                outputs = [reshaped(g, part, n) for part, n in zip(parts, bucket, strict=True)]
            replace(bucket, outputs)


def module_of(node: fx.Node) -> str:
    """The innermost module that a node, or else what alone feeds it, comes from: L['self'].model.blocks.0.mlp.up"""
    stack = next((node.meta[key] for key in STACKS if node.meta.get(key)), None)
    if stack:
        return list(stack.values())[-1][0]
    return module_of(node.all_input_nodes[0]) if len(node.all_input_nodes) == 1 else ""


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
        copies[n] = g.node_copy(n, lambda m: copies.get(m, m))
    return copies.get(n, n)


def call(g: fx.Graph, target, *args, like: fx.Node | None = None) -> fx.Node:
    """A new node with its fake value; `like`: the node whose module it is noted under."""
    node = g.call_function(target, args)
    values = fx.map_arg(args, lambda n: n.meta["val"])
    tensor = next(v for v in torch.utils._pytree.tree_leaves(values) if isinstance(v, torch.Tensor))
    with tensor.fake_mode:
        node.meta["val"] = target(*values)
    if like is not None:
        node.meta |= {key: like.meta[key] for key in STACKS if key in like.meta}
    return node


def reshaped(g: fx.Graph, n: fx.Node, like: fx.Node) -> fx.Node:
    return call(g, aten.reshape.default, n, list(like.meta["val"].shape))


def split(g: fx.Graph, whole: fx.Node, like: list[fx.Node], dim: int) -> list[fx.Node]:
    """`whole` cut along `dim` into pieces of the numbers of elements of `like`."""
    sizes = [n.meta["val"].numel() for n in like]
    parts = call(g, aten.split_with_sizes.default, whole, sizes, dim)
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
