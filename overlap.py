"""Few collectives, early: what to hand to torch.compile so that a model under simple_fsdp.py overlaps. Copy it along.

    step = torch.compile(forward_and_loss, fullgraph=True, options=compile_options(model))

Left alone, Inductor runs one collective per parameter and waits for it at once. With these options: one all-gather and
one reduce-scatter (and one all-reduce of what is replicated) per block; the next block's all-gather starts as soon as
this block's has arrived, in forward and backward, so that the weights of two blocks exist at most; a reduction is
waited for one block later. Needs Inductor (torch 2.11 to 2.14).
"""

import hashlib
import inspect
import operator
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate, combinations, zip_longest
from pathlib import Path

import torch
import torch._inductor.config as inductor_config
from torch import fx, nn
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.pattern_matcher import stable_topological_sort
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.flop_counter import flop_registry

# All private names of torch that this file uses are imported above or read here, before blocks_of(). Torch documents
# neither FakeTensor.fake_mode nor the keys "val", "recompute" and STACKS of a node's meta, which are used below.
aten, c10d = torch.ops.aten, torch.ops._c10d_functional
GATHER, SCATTER = c10d.all_gather_into_tensor.default, c10d.reduce_scatter_tensor.default
REDUCE, WAIT = c10d.all_reduce.default, c10d.wait_tensor.default
STACKS = ("nn_module_stack", "fwd_nn_module_stack")  # where a node's module is noted: in forward and in backward graphs
NO_NAMES = "_modules", "_orig_mod"  # words of such a path that are in no module's name
GATHER_AGAIN = CheckpointPolicy.PREFER_RECOMPUTE, CheckpointPolicy.MUST_RECOMPUTE
# Inductor's own passes that reorder or merge collectives, after this file or before it, and the value that keeps each
# out: torch 2.14 turns on enable_simple_overlap, global settings of others may turn on the rest. Options are keyed by
# name, and torch.compile refuses one that it does not know.
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
_LIBRARY = "simple_fsdp_" + __name__.replace(".", "_")  # a copy of this file beside it registers an op of its own


@torch.library.custom_op(f"{_LIBRARY}::cut", mutates_args=())
def cut(whole: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
    """[N, sum(sizes)] -> copies [N, size], made all at once, so that the memory of the gathered bucket is free again.
    Of views, Inductor would copy each where it is used, and hold the bucket until the last of them."""
    parts = [whole.new_empty(len(whole), size) for size in sizes]
    torch.split_with_sizes_copy(whole, sizes, 1, out=parts)
    return parts


@cut.register_fake
def _(whole, sizes):
    return [whole.new_empty(len(whole), size) for size in sizes]


CUT = getattr(torch.ops, _LIBRARY).cut.default
LAYOUT = {CUT, operator.getitem, aten.reshape.default, aten.clone.default, aten._to_copy.default, aten.cat.default,
          aten._unsafe_view.default, torch.ops.prims.convert_element_type.default}  # fmt: skip


def blocks_of(model: nn.Module) -> list[str]:
    """Names of the repeated blocks of `model`, a shared one's first: the outermost modules, made of others, that are
    members of a ModuleList or Sequential (a list directly inside a list is part of it), attributes of a class that
    another one has too, or equal to some other module. Stages of different widths in a list, and towers of blocks such
    as encoder and decoder, are looked into instead. If there is no block: the members of lists that are one layer."""
    equal, blocks, layers = Counter(map(signature, filter(is_built, model.modules()))), [], []

    def walk(parent: nn.Module, name: str) -> None:
        found, alike = [*members(parent, name, is_list(parent))], defaultdict(list)
        for _, module, _ in found:
            alike[signature(module, False)].append(module)
        for path, module, listed in found:
            others, count = alike[signature(module, False)], equal[signature(module)]
            again = forward_of(module) is not nn.Module.forward and max(len(others), count) > 1
            if not is_built(module):
                layers.extend([path] * (listed and any(True for _ in module.parameters())))
            elif (listed and not are_stages(others)) or (not listed and again and not is_tower(module, count)):
                blocks.append(path)
            else:
                walk(module, path)

    walk(model, "")
    return blocks or layers


def forward_of(module: nn.Module):
    """What tells the class of a module, also when a wrapper has made another class of it."""
    return inspect.unwrap(type(module).forward)


def is_list(module: nn.Module) -> bool:
    """A ModuleList or Sequential, unless it has a forward of its own."""
    plain = forward_of(module) in (nn.Sequential.forward, nn.Module.forward)
    return plain and isinstance(module, nn.ModuleList | nn.Sequential)


def is_built(module: nn.Module) -> bool:
    """Whether a module is made of others that hold parameters."""
    return any(True for child in module.children() for _ in child.parameters())


def in_lists(module: nn.Module) -> list[nn.Module]:
    """The modules made of others in all lists that a module is or holds."""
    return [child for m in module.modules() if is_list(m) for child in m.children() if is_built(child)]


def members(parent: nn.Module, name: str, listed: bool) -> Iterator[tuple[str, nn.Module, bool]]:
    """(name, module, whether in a list) of children, and of members of lists instead (not of Sequentials of layers)."""
    for key, child in parent.named_children():
        path = f"{name}.{key}" if name else key
        if is_list(child) and (isinstance(child, nn.ModuleList) or in_lists(child)):
            yield from members(child, path, True)
        else:
            yield path, child, listed


def signature(module: nn.Module, exact: bool = True) -> tuple:
    """Class, parameters (names and shapes) and submodules; not exact: the class, and that of the members of a list."""
    own = [(name, p.shape) for name, p in module.named_parameters(recurse=False) if exact]
    inner = module.named_children() if exact or is_list(module) else ()
    return forward_of(module), *own, *((name, signature(child, exact)) for name, child in inner)


def are_stages(alike: list[nn.Module]) -> bool:
    """Whether several modules of one class all hold lists, and no two of them have the same width."""
    shapes = [{name: p.shape for name, p in module.named_parameters()} for module in alike]
    differ = (any(a[name] != b[name] for name in a.keys() & b) for a, b in combinations(shapes, 2))
    return len(alike) > 1 and all(map(in_lists, alike)) and all(differ)


def is_tower(module: nn.Module, count: int) -> bool:
    """Whether an attribute, of which `count` are equal, holds lists of blocks and not just one block's experts."""
    inner = in_lists(module)
    deep, beside = ([c for m in ms for c in m.children() if is_built(c) and not is_list(c)] for ms in (inner, [module]))
    return bool(inner) and bool(deep or count == 1 or (count == 2 and not beside))


def describe_blocks(model: nn.Module) -> str:
    """One line to print: what is taken for blocks, and how many parameters lie in none."""
    blocks, sizes = blocks_of(model), {name: p.numel() for name, p in model.named_parameters()}
    outside = [size for name, size in sizes.items() if not name.startswith(tuple(f"{block}." for block in blocks))]
    ends, elements = " to ".join(blocks[:1] + blocks[1:][-1:]), f"{sum(outside):,}".replace(",", "'")
    return f"blocks ({len(blocks)}): {ends}; in none: {len(outside)} of {len(sizes)} parameters, {elements} elements"


def compile_options(model: nn.Module, blocks: Sequence[str] | None = None, cap_mib: float = 128.0,
                    whole_step: bool = False, ahead: float = 1.0) -> dict:  # fmt: skip
    """Inductor options for any torch.compile of `model`, wrapped, of a part of it, or of a function around it. None on
    a single rank, where Inductor's own order of a graph needs less memory.

    blocks: names of the modules that get a bucket each (default: blocks_of(model)); (): whatever collectives there are,
    others' averages too, go into buckets by size. cap_mib: most MiB of a bucket of parameters that lie in no block,
    such as embedding and head; one that is larger has a bucket of its own.
    whole_step: what is compiled is a whole training step, which returns its loss first and updates the parameters.
    ahead: the part of a block's FLOPs that a collective has to hide behind. 1: a gather starts when the one before has
    arrived, a reduction is waited for when the next one starts. Less takes less memory, and needs a faster network. 2,
    3 ..: that many buckets (one per block, as a rule), for slow networks; each holds weights and gradients of one more.
    Raises ValueError if a name is no module of `model`, for another `ahead`, and for a model that is not wrapped yet.
    Warns, while compiling, of a graph without any block."""
    return passes(model, blocks, cap_mib, whole_step, ahead)[1]


def passes(model: nn.Module, blocks=None, cap_mib=128.0, whole_step=False, ahead=1.0) -> tuple["Overlap", dict]:
    """What moves the collectives, and compile_options, of which it is a part on several ranks."""
    modules = dict(model.named_modules())
    if missing := [name for name in blocks or () if name not in modules]:
        raise ValueError(f"blocks: {', '.join(missing)}: no such module, there are {', '.join(list(modules)[1:])}")
    if not (0 <= ahead <= 1 or ahead % 1 == 0 < ahead):
        raise ValueError(f"ahead: {ahead}: must be between 0 and 1, or a whole number above 1")
    by_size = blocks is not None and not blocks
    blocks = blocks_of(model) if blocks is None else blocks
    first, places = {module: name for name, module in modules.items()}, {}
    for name, module in model.named_modules(remove_duplicate=False):  # a shared module lies where its first name does
        around = [block for block in blocks if f"{first[module]}.".startswith(f"{block}.")]
        places[words_of(name)] = max(around, key=len, default="")
    moves = Overlap(tuple(blocks), places, cap_mib, whole_step, ahead, by_size)
    sharded = [p for p in model.parameters() if isinstance(p, DTensor)]
    if not sharded and any(True for _ in model.parameters()):
        raise ValueError("model: no parameter is sharded: call data_parallel() first, then compile_options()")
    if not any(p.device_mesh.size() > 1 for p in sharded):
        return moves, {}
    if inductor_config.post_grad_custom_post_pass is not None:
        raise ValueError("torch._inductor.config.post_grad_custom_post_pass is set, compile_options() would replace "
                         "it: reset it, or call both passes from one of your own")
    return moves, dict(post_grad_custom_post_pass=moves) | OFF


def words_of(path: str) -> tuple[str, ...]:
    """L['self']._modules['blocks'].0.mlp -> L, self, blocks, 0, mlp"""
    return tuple(word for word in re.split(r"\W+", path) if word and word not in NO_NAMES)


class Overlap(CustomGraphPass):
    """Buckets and moves the collectives of one post-grad graph. A collective is named by the node that starts it."""

    def __init__(self, blocks: tuple, places: dict, cap_mib: float, whole_step: bool, ahead: float, by_size: bool):
        self.blocks, self.cap, self.whole_step, self.ahead = blocks, cap_mib * 2**20, whole_step, ahead
        self.by_size = by_size
        self.early, self.places, self.block_at = max(1, int(ahead)), places, {}  # block by module, by path in a graph
        self.warned = torch.distributed.is_initialized() and torch.distributed.get_rank() > 0  # one rank tells

    def uuid(self):  # what the compile caches know of this pass: its source and its settings
        source = hashlib.sha256(Path(__file__).read_bytes() + repr(self.places).encode()).hexdigest()
        return source, self.blocks, self.cap, self.whole_step, self.ahead, self.by_size

    def __call__(self, g: fx.Graph) -> None:
        g = getattr(g, "graph", g)
        starts = [n for n in g.nodes if n.target in (GATHER, SCATTER, REDUCE)]
        if not starts:
            return  # such as the subgraphs of FlexAttention
        if undone := [name for name, value in OFF.items() if getattr(inductor_config, name) != value]:
            warnings.warn(f"overlap: {', '.join(undone)}: set beside compile_options(), Inductor moves the collectives "
                          "again. Leave it out of the options, or leave compile_options() out", stacklevel=2)
        for again in [n for start in starts for n in sorted(start.users)[1:] if n.target is WAIT]:
            again.replace_all_uses_with(wait_of(again.args[0]))  # the compiler merges equal collectives, not the waits
            g.erase_node(again)
        self.find_blocks(g, [n for n in starts if n.target is not REDUCE])
        backward = self.gather_again(g) if self.whole_step else None
        found = [n for n in g.find_nodes(op="call_function", target=GATHER) if self.takes(n) and sources(n) is not None]
        found.sort(key=wait_of)  # nodes compare by their places in the graph
        before_turn = [n for n in found if backward is None or wait_of(n) < backward]
        self.merge_gathers(g, before_turn, next((n for n in g.nodes if n.op not in ("placeholder", "get_attr")), None))
        self.merge_gathers(g, found[len(before_turn) :], backward)
        self.merge_reductions(g, SCATTER)
        stable_topological_sort(g)
        self.merge_reductions(g, REDUCE)  # with hybrid_shard, of the shards that the reduce-scatters have made
        stable_topological_sort(g)
        g.eliminate_dead_code()
        g.lint()

    def takes(self, start: fx.Node) -> bool:
        """Whether a collective is simple_fsdp.py's, which notes that. Where the caller wants no blocks: any gather, and
        any average of more than a scalar."""
        wanted = start.target is GATHER or (start.args[1] == "avg" and start.meta["val"].ndim > 0)
        return "simple_fsdp" in start.meta or (self.by_size and wanted)

    def find_blocks(self, g: fx.Graph, starts: list[fx.Node]) -> None:
        """Paths in a graph begin at a root of its own: the model or a part of it, under any name. The longest end of a
        path that some module's name ends with as well tells what that root is called in the model."""
        roots, split, votes = defaultdict(list), {}, defaultdict(Counter)
        for name in self.places:
            for i in range(len(name)):
                roots[name[i:]].append(name[:i])
        for path in {words_of(module_of(n)) for n in g.nodes if any(n.meta.get(key) for key in STACKS)}:
            i = next((i for i in range(len(path)) if path[i:] in roots), len(path))
            split[path] = path[:i], path[i:]
            votes[path[:i]].update(roots.get(path[i:], ()))
        self.block_at = {}
        for path, (start, end) in split.items():
            root = max(votes[start], key=lambda root: (votes[start][root], -len(root)), default=())
            if block := self.places.get(root + end):
                self.block_at[path] = block, *start  # two parts of a model may look the same
        if starts and self.blocks and not self.warned and not any(map(self.block_of, starts)):
            seen, self.warned = ", ".join(sorted({module_of(n) or "no module" for n in starts})[:3]), True
            warnings.warn(f"overlap: a graph gathers nothing in a block ({self.blocks[0]} ..), only in {seen}: buckets "
                          "by size. For one per block compile what calls them, without graph breaks", stacklevel=2)

    def block_of(self, node: fx.Node) -> tuple[str, ...] | None:
        """The block that a node comes from, the innermost if there are several."""
        return self.block_at.get(words_of(module_of(node)))

    def buckets(self, starts: list[fx.Node]) -> list[list[fx.Node]]:
        """Collectives to merge: those of a block, or neighbours of no block up to the cap; alike in dtype and group."""
        buckets, run, size, largest = {}, 0, 0, 0  # of neighbours of no block: number of the run, bytes, most bytes
        for start in (n for n in starts if all(type(size) is int for size in n.meta["val"].shape)):  # it may vary
            block, tensor = self.block_of(start), contents(start).meta["val"]
            size, largest = size + tensor.nbytes, max(largest, tensor.nbytes)
            if block:  # ends the run
                run, size, largest = run + 1, 0, 0
            elif size > max(self.cap, largest) * 17 / 16:  # a norm may join a head that exceeds the cap by itself
                run, size, largest = run + 1, tensor.nbytes, tensor.nbytes
            key = block or run, start.meta["val"].dtype, *map(str, start.args[1:])
            buckets.setdefault(key, []).append(start)
        return list(buckets.values())

    def gather_again(self, g: fx.Graph) -> fx.Node | None:
        """In a whole step: gathers again for backward the weights that it needs. Not those behind the last block, whose
        backward comes at once, and not those that are to be kept. Returns the first product of backward."""
        forward = ancestors(g.output_node().args[0][0])  # the loss and all that it is computed from
        waits, first = [], {}
        for start in g.find_nodes(op="call_function", target=GATHER):
            if (made_by := sources(start)) is None:
                continue
            inputs = frozenset(i for n in (start, *made_by) for i in n.all_input_nodes if i.op == "placeholder")
            key = inputs, start.meta["val"].dtype, *start.args[1:]
            if wait_of(start) in forward:
                first.setdefault(key, wait_of(start))
                waits.append(wait_of(start))
            elif key in first:  # an activation checkpoint gathers again what is kept, or what is decided on below
                replace([start], [first[key]])
        after = max(waits, default=next(iter(g.nodes)))
        backward = next((n for n in g.nodes if n > after and n not in forward and is_product(n)), None)
        waits.sort()
        while waits and not self.block_of(waits[-1].args[0]):
            waits.pop()
        for wait in waits:
            if wait.meta.get("recompute") in GATHER_AGAIN:
                gather_for_backward(g, wait, forward)
        g.eliminate_dead_code()
        note_modules(g)
        return backward

    def merge_gathers(self, g: fx.Graph, found: list[fx.Node], before: fx.Node | None) -> None:
        """found: in the order of their waits. The first bucket starts at `before`, another when the one before it (or
        `ahead` before it) is cut up, or `ahead` of its wait."""
        cut_up, start = [], None
        for i, bucket in enumerate(self.buckets(found)):
            first_wait = min(map(wait_of, bucket))
            if i:
                before = (cut_up[i - self.early] if i >= self.early else start).next
                before = self.ahead < 1 and part_of(before, first_wait, 1 - self.ahead) or before
            with g.inserting_before(before):
                copies = {}
                inputs = [copied(g, n.args[0], copies) for n in bucket]
                flat = call(g, aten.cat.default, [call(g, aten.reshape.default, x, [-1]) for x in inputs])
                start = call(g, GATHER, flat, *bucket[0].args[1:], like=bucket)
            with g.inserting_before(first_wait):
                rows = call(g, aten.reshape.default, call(g, WAIT, start), [bucket[0].args[1], -1])  # [N, sizes]
                results = split(g, rows, bucket)
            replace(bucket, results)
            cut_up.append(results[-1])

    def merge_reductions(self, g: fx.Graph, op) -> None:
        """Reduce-scatters, or all-reduces, of gradients. A bucket starts when all of its gradients are there, and is
        waited for when the next one (or the one `ahead` of it) has started."""
        found = [n for n in g.find_nodes(op="call_function", target=op) if self.takes(n)]
        waits, buckets = [], sorted(self.buckets(found), key=max)
        for bucket, following in zip_longest(buckets, buckets[1:]):
            ranks, after = bucket[0].args[2] if op is SCATTER else 1, max(bucket).next
            start_at = behind_gather(after)
            if following and max(following) < start_at:  # buckets start in the order in which they are waited for
                start_at = after
            with g.inserting_before(after):
                rows = [call(g, aten.reshape.default, n.args[0], [ranks, -1]) for n in bucket]  # each [N, shard]
                flat = call(g, aten.reshape.default, call(g, aten.cat.default, rows, 1), [-1])
            with g.inserting_before(start_at):
                start = call(g, op, flat, *bucket[0].args[1:], like=bucket)
                at = waits and self.ahead < 1 and part_of(waits[-1], start, self.ahead) or start
                for wait in reversed(waits[-self.early :]):  # the caller sorts what uses them behind them
                    at.append(wait)
                waits.append(call(g, WAIT, start))
                values = [n.meta["val"].contiguous() for n in bucket]
                ends = accumulate(v.numel() for v in values)  # of each in what they give together
                results = [call(g, aten.as_strided.default, waits[-1], [*v.shape], [*v.stride()], end - v.numel())
                           for v, end in zip(values, ends, strict=True)]  # fmt: skip
            replace(bucket, results)


def behind_gather(first: fx.Node) -> fx.Node:
    """`first`, or what follows a gather before the next product: what is waited for first goes first over a link."""
    n = at = first
    while n.op != "output" and not is_product(n):
        n = n.next
        at = n if n.prev.target is GATHER else at
    return at


def part_of(first: fx.Node, last: fx.Node, part: float) -> fx.Node | None:
    """The product between two nodes of a graph with which this part of the FLOPs between them is reached."""
    between = []
    while first is not last:
        if is_product(first):
            between.append((first, flops_of(first)))
        first = first.next
    done = [*accumulate(flops for _, flops in between)]
    return next((n for (n, _), flops in zip(between, done, strict=True) if flops >= part * done[-1]), None)


def flops_of(product: fx.Node) -> float:
    args, kwargs = fx.map_arg((product.args, product.kwargs), lambda n: n.meta.get("val"))  # none of a subgraph
    count = flop_registry[getattr(product.target, "overloadpacket", product.target)]
    try:
        return count(*args, **kwargs, out_val=product.meta["val"])
    except AssertionError:  # torch 2.11 counts attention only where k and v have as many heads as q
        heads, four = args[0].shape[1], [isinstance(t, torch.Tensor) and t.ndim == 4 for t in args]
        args = [t.repeat_interleave(heads // t.shape[1], 1) if yes else t for t, yes in zip(args, four, strict=True)]
        return count(*args, **kwargs, out_val=product.meta["val"])


def wait_of(start: fx.Node) -> fx.Node:
    return min(start.users)


def contents(start: fx.Node) -> fx.Node:
    """The whole tensor of a collective: a reduction's is its input, a gather's what is waited for."""
    return wait_of(start) if start.target is GATHER else start.args[0]


def is_product(n: fx.Node) -> bool:
    """Matrix products and attention: what a collective can hide behind."""
    return getattr(n.target, "overloadpacket", n.target) in flop_registry


def is_layout(n: fx.Node) -> bool:
    """Views, copies and casts: their result holds what their inputs hold."""
    return n.target in LAYOUT or getattr(n.target, "is_view", False)


def module_of(node: fx.Node) -> str:
    """The innermost module that a node, or else what alone feeds it, comes from: L['self'].blocks.0.mlp.up"""
    if stack := next((node.meta[key] for key in STACKS if node.meta.get(key)), None):
        return list(stack.values())[-1][0]
    return module_of(node.all_input_nodes[0]) if len(node.all_input_nodes) == 1 else ""


def note_modules(g: fx.Graph) -> None:
    """In a whole step no node of backward knows its module. A reduction gets that of the parameter it updates."""
    for copy in g.find_nodes(op="call_function", target=aten.copy_.default):
        parameter, new = copy.args
        if stack := next((user.meta[STACKS[0]] for user in parameter.users if user.meta.get(STACKS[0])), None):
            for start in reductions_behind(new):
                start.meta[STACKS[0]] = stack


def reductions_behind(new: fx.Node) -> list[fx.Node]:
    """The reductions from which the optimizer made a parameter's new value, not by way of scalars such as the norm."""
    found, seen, todo = [], set(), [(new, None)]  # a node, and which of its elements if it is a list
    while todo:
        node, index = todo.pop()
        value = node.meta.get("val")
        if (node, index) in seen or node.op == "placeholder" or (isinstance(value, torch.Tensor) and value.ndim == 0):
            continue
        seen.add((node, index))
        if node.target is WAIT and node.args[0].target in (SCATTER, REDUCE):
            found.append(node.args[0])
            if node.args[0].target is REDUCE:  # with hybrid_shard, of what was scattered before
                todo.append((node.args[0].args[0], None))
        elif node.target is operator.getitem:
            todo.append(node.args)
        else:
            for arg in node.args:
                several = isinstance(arg, list | tuple)
                if several and index is not None:
                    arg = arg[index : index + 1]
                todo += [(n, None) for n in (arg if several else [arg]) if isinstance(n, fx.Node)]
    return found


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
    """What lies between the graph's inputs and a gather (casts, padding); None if that is more than a parameter's."""
    found = [n for n in ancestors(start.args[0]) if n.op == "call_function"]
    return None if len(found) > 9 or any(n.target is WAIT for n in found) else found


def gather_for_backward(g: fx.Graph, wait: fx.Node, forward: set[fx.Node]) -> None:
    """What backward reads of a gathered weight becomes a copy of it, gather included, at the first such use."""
    whole = [wait]  # and its views, casts and copies; the list grows while it is walked
    for n in whole:
        whole += [u for u in n.users if is_layout(u) and u not in whole and {*u.all_input_nodes} <= {*whole}]
    uses = [(user, n) for n in whole for user in n.users if user not in forward and user not in whole]
    copies = {}
    for user, n in sorted(uses, key=lambda use: use[0]):
        with g.inserting_before(user):
            user.replace_input_with(n, copied(g, n, copies))


def copied(g: fx.Graph, n: fx.Node, copies: dict[fx.Node, fx.Node]) -> fx.Node:
    """`n` and what it is made from, again at the graph's insertion point; what `copies` has already is used again."""
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
    node.meta["val"] = target(*fx.map_arg(args, lambda n: n.meta["val"]))
    if like:
        node.meta |= {key: like[0].meta[key] for key in STACKS if key in like[0].meta}
        node.meta["bucket"] = [(module_of(n), tuple(contents(n).meta["val"].shape)) for n in like]
    return node


def split(g: fx.Graph, whole: fx.Node, starts: list[fx.Node]) -> list[fx.Node]:
    """What each of `starts` would have given, cut from the last dimension of what they give together, [N, sizes]."""
    parts = [whole]
    if len(starts) > 1:
        pieces = call(g, CUT, whole, [n.meta["val"].numel() // len(whole.meta["val"]) for n in starts])
        parts = [call(g, operator.getitem, pieces, i) for i in range(len(starts))]
    return [call(g, aten.reshape.default, part, [*n.meta["val"].shape]) for part, n in zip(parts, starts, strict=True)]


def replace(starts: list[fx.Node], by: list[fx.Node]) -> None:
    """Each of `by` takes the place of what its collective was waited for; collectives and waits are erased."""
    for start, new in zip(starts, by, strict=True):
        wait = wait_of(start)
        wait.replace_all_uses_with(new)
        for node in (wait, start):
            node.graph.erase_node(node)
