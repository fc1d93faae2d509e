"""Equal blocks compiled once, in one graph that still overlaps, for simple_fsdp.py: a result, no file to copy.

    step = torch.compile(forward_and_loss, fullgraph=True, options=regions.compile_options(model))

overlap.compile_options has Inductor lower, fuse and write code for every block of a deep model, though they are equal.
With these options the graph, once its collectives lie where they belong, is cut at them, and stretches that compute
the same (operations, shapes, strides, dtypes: compared, not assumed) become calls of one subgraph. The collectives,
their order and what is kept for backward stay: all that happens before is the same. What does not repeat stays as it
is. Before that, trace_once.py has equal blocks traced once; Dynamo still reads each. Needs torch 2.13.
"""

import operator
import warnings
from collections import Counter, defaultdict

import torch
from torch import Tensor, fx, nn
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import unset_fake_temporarily

from lab.regions.trace_once import (
    BODY,
    COLLECTIVES,
    STACKS,
    Pass,
    TraceOnce,
    bodies,
    is_fixed,
    is_pure,
    is_tensor,
    like,
    numbered,
    told,
    unit_of,
)
from overlap import GATHER, Overlap, passes

# All private names of torch that this file uses: the modules of what is imported above, torch._ops, torch._guards,
# OpOverload._schema and, of storages, _cdata. Not documented: FakeTensor.fake_mode, and the keys of a node's meta that
# are read and set below.
CALL = torch.ops.higher_order.invoke_subgraph
# The first: a view or a copy.
RESHAPE, VIEW = torch.ops.aten.reshape.default, torch.ops.aten.view.default
CAST = torch.ops.prims.convert_element_type.default
FEWEST = 2  # operations, views aside, that are worth a call


def compile_options(model: nn.Module, **how) -> dict:
    """Inductor options as of overlap.compile_options, which has the arguments, for code that equal blocks share. On a
    single rank too. With an older torch those of overlap.py alone, with a warning. ValueError as there.

    Warns, while compiling, of a graph whose blocks differ. The pass among the options tells in `found` what was shared:
    {name of a subgraph: calls of it}; None: nothing was compiled, the code came out of a cache."""
    moves, options = passes(model, **how)
    if torch.__version__ < (2, 13):
        why = f"regions: need torch 2.13, this is {torch.__version__}: each block is compiled, as without them"
        warnings.warn(why, stacklevel=2)
        return options
    return options | dict(pre_grad_custom_pass=TraceOnce(moves), post_grad_custom_pre_pass=Inline(moves),
                          post_grad_custom_post_pass=Regions(moves))  # fmt: skip


class Regions(Pass):
    """Overlap, then one subgraph for stretches of the graph that compute the same."""

    def __init__(self, moves: Overlap):
        super().__init__(moves)
        self.found = None

    def __call__(self, g: fx.Graph) -> None:
        g = getattr(g, "graph", g)
        with unset_fake_temporarily():
            self.moves(g)
        gathers = g.find_nodes(op="call_function", target=GATHER)
        cuts = set() if gathers else self.borders(g)
        move_early(stretches(g, cuts))
        widen_again(stretches(g, cuts))
        alike = defaultdict(list)
        for nodes in stretches(g, cuts):
            stretch = Stretch(trimmed(nodes))
            if stretch.key is not None and sum(not may_alias(n) for n in stretch.nodes) >= FEWEST:
                alike[stretch.key].append(stretch)
        new, self.found = {}, self.found or {}
        for equal in alike.values():
            if len(equal) > 1 and (subgraph := equal[0].subgraph(new)):
                name = f"region_{len(self.found)}"
                g.owning_module.register_module(name, subgraph)
                for stretch in equal:
                    stretch.replace(g, name, new)
                self.found[name] = len(equal)
        keep_inputs(g)
        g.lint()
        held = {block for block in map(unit_of, g.nodes) if block}
        if len(held) > 2 and not any(n.target is CALL for n in g.nodes) and not self.moves.warned:
            warnings.warn(f"regions: no two of {len(held)} blocks in a graph compute the same: each is compiled, as "
                          "without regions", stacklevel=2)  # fmt: skip

    def borders(self, g: fx.Graph) -> set[fx.Node]:
        """Without gathers to cut at: where another block begins."""
        found, block = set(), None
        for n in g.nodes:
            if n.op == "call_function" and (now := unit_of(n)) not in (None, block):
                found.add(n)
                block = now
        return found


def keep_inputs(g: fx.Graph) -> None:
    """Inductor lets backward write over what forward kept for it. In a subgraph it takes the numbers of the whole
    graph's inputs for those of its own, and so would write over others: no number is left that a subgraph has."""
    context = torch._guards.TracingContext.try_get()
    if context and context.fw_metadata and context.fw_metadata.bw_donated_idxs:
        most = max((len(n.args) - 2 for n in g.nodes if n.target is CALL), default=0)
        context.fw_metadata.bw_donated_idxs = [
            i for i in context.fw_metadata.bw_donated_idxs if i >= most
        ]


def may_alias(n: fx.Node) -> bool:
    """Whether a node's result may lie in the memory of its first argument."""
    if n.target is operator.getitem:
        return n.args[0].op == "call_function" and may_alias(n.args[0])
    returns = getattr(getattr(n.target, "_schema", None), "returns", ())
    return n.target is RESHAPE or any(r.alias_info for r in returns)


def stretches(g: fx.Graph, cuts: set[fx.Node]) -> list[list[fx.Node]]:
    """The pure nodes between two that are not; a node of `cuts` begins another stretch."""
    found = [[]]
    for n in g.nodes:
        if n in cuts:
            found.append([])
        if is_pure(n):
            found[-1].append(n)
        elif n.op not in ("placeholder", "get_attr"):
            found.append([])
    return [nodes for nodes in found if nodes]


def trimmed(nodes: list[fx.Node]) -> list[fx.Node]:
    """Without views that others alone read, of what they have anyway, such as the gradients of the block before: a
    subgraph would not return them, and blocks differ in them."""
    inside = set(nodes)
    for n in reversed(nodes):
        base = n
        while base in inside and may_alias(base):
            base = base.args[0]
        others_have_it = base not in inside or not inside >= base.users.keys()
        if base is not n and others_have_it and inside.isdisjoint(n.users):
            inside.remove(n)
    return [n for n in nodes if n in inside]


def move_early(found: list[list[fx.Node]]) -> None:
    """The partitioner puts at a forward's end what it computes for backward, such as a norm's factor of each block.
    What is made of one tensor alone, and takes no more memory than that, goes to where nothing else needs it."""
    place = {n: i for i, nodes in enumerate(found) for n in nodes}
    for n in list(place):
        pointwise = (
            isinstance(n.target, torch._ops.OpOverload) and torch.Tag.pointwise in n.target.tags
        )
        if pointwise and len(n.all_input_nodes) == 1 and (source := n.all_input_nodes[0]) in place:
            at, alone = (
                place[source],
                all(u is n or place.get(u) == place[source] for u in source.users),
            )
            if at < place[n] and alone and n.meta["val"].nbytes <= source.meta["val"].nbytes:
                found[at][-1].append(n)
                found[at].append(n)
                place[n] = at


def widen_again(found: list[list[fx.Node]]) -> None:
    """A tensor that one stretch casts to a wider dtype and others read: each casts it, the narrow one is kept between.
    Inductor does so by itself in a graph without calls."""
    place = {n: i for i, nodes in enumerate(found) for n in nodes}
    for n in place:
        if n.target is CAST and n.meta["val"].nbytes > n.args[0].meta["val"].nbytes:
            users = defaultdict(list)
            for user in n.users:
                users[place.get(user, place[n])].append(user)
            for where in users.keys() - {place[n]}:
                with n.graph.inserting_before(min(users[where])):
                    again = n.graph.node_copy(n)
                for user in users[where]:
                    user.replace_input_with(n, again)


class Stretch:
    """Neighbours of a graph. inputs: what they read of others; used: those that others read; outputs: what a subgraph
    returns for them, none of which shares memory with another or an input. key: equal for stretches that compute the
    same; None: not for a subgraph."""

    def __init__(self, nodes: list[fx.Node]):
        self.nodes, place = nodes, {n: i for i, n in enumerate(nodes)}
        self.inputs, lines = numbered(nodes, "val")
        self.used = [n for n in nodes if not place.keys() >= n.users.keys()]
        views = defaultdict(list)  # of memory that is made here: what is read of it
        for n in self.used:
            base = n
            while base in place and may_alias(base):
                base = base.args[0]
            if base in place:
                views[base].append(n)
        self.outputs = [
            seen[0] if len(seen) == 1 and is_whole(seen[0], base) else base
            for base, seen in views.items()
        ]
        values = [n.meta.get("val") for n in (*self.inputs, *self.outputs)]
        numbers = [place[n] for n in (*self.used, *self.outputs)]
        self.key = (
            (*lines, *map(told, values), *numbers)
            if is_fixed(values) and self.inputs and self.outputs
            else None
        )

    def subgraph(self, new: dict[fx.Node, fx.Node]) -> fx.GraphModule | None:
        """Made of these nodes; None if two of its results, or a result and an input, would share memory."""
        g, env = fx.Graph(), {}
        for m in self.inputs:
            env[new.get(m, m)] = env[m] = g.placeholder(f"input_{len(env)}")
            env[m].meta = {"val": m.meta["val"]}
        for n in self.nodes:
            args, kwargs = fx.map_arg((n.args, n.kwargs), env.__getitem__)
            env[n] = g.call_function(n.target, args, kwargs)
            env[n].meta = dict(n.meta)
        out = g.output(tuple(env[n] for n in self.outputs))
        # Their strides are kept.
        out.meta["user_visible_output_idxs"] = list(range(len(self.outputs)))
        out.meta["original_output_strides"] = [n.meta["val"].stride() for n in self.outputs]
        g.eliminate_dead_code()
        made = fx.GraphModule(nn.Module(), g)
        values = [m.meta["val"] for m in self.inputs]
        with values[0].fake_mode:
            given = [
                torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device)
                for v in values
            ]
            memory = Counter(t.untyped_storage()._cdata for t in (*given, *made(*given)))
        return made if max(memory.values()) == 1 else None

    def replace(self, g: fx.Graph, name: str, new: dict[fx.Node, fx.Node]) -> None:
        """Calls the subgraph instead. new: what took the place of nodes that are gone."""
        env, inside = {}, set(self.nodes)

        def again(n: fx.Node) -> fx.Node:  # a view of an input or of a result
            if n in inside and n not in env:
                args, kwargs = fx.map_arg((n.args, n.kwargs), again)
                env[n] = g.call_function(n.target, args, kwargs)
                env[n].meta = dict(n.meta)
            return env.get(n, n)

        with g.inserting_before(self.nodes[0]):
            result = g.call_function(
                CALL, (g.get_attr(name), name, *(new.get(m, m) for m in self.inputs))
            )
            result.meta["val"] = tuple(n.meta["val"] for n in self.outputs)
            for i, n in enumerate(self.outputs):
                env[n] = g.call_function(operator.getitem, (result, i))
                env[n].meta = dict(n.meta)
            new.update((n, again(n)) for n in self.used)
        for n in self.used:
            n.replace_all_uses_with(new[n], delete_user_cb=lambda user: user not in inside)
        for n in reversed(self.nodes):
            g.erase_node(n)


def is_whole(view: fx.Node, base: fx.Node) -> bool:
    """Whether a view has all elements of what it is a view of, from the first on."""
    whole, of = view.meta["val"], base.meta["val"]
    return isinstance(of, Tensor) and whole.numel() == of.numel() and whole.storage_offset() == 0


def copying(were: list[torch.UntypedStorage], lie: list[torch.UntypedStorage]):
    """What makes fake values, of inputs that lie in `lie`, like those of inputs that lay in `were`: tensors and lists
    of them. What shared memory with an input or another value does so again. Under no fake mode."""
    memory = {was._cdata: now for was, now in zip(were, lie, strict=True)}

    def again(value):
        if not isinstance(value, Tensor):
            return type(value)(map(again, value)) if isinstance(value, list | tuple) else value
        was = value.untyped_storage()
        if was._cdata not in memory:
            memory[was._cdata] = torch.UntypedStorage(was.nbytes(), device="meta")
        return like(value, V.fake_mode, memory[was._cdata])

    return again


class Inline(Pass):
    """In a graph that is cut up: what each operation stands for takes its place, as of the module that it is of."""

    @unset_fake_temporarily()
    def __call__(self, g: fx.Graph) -> None:
        g, known = getattr(g, "graph", g), {}
        for call in g.find_nodes(op="call_function", target=BODY):
            found, given = bodies[call.args[1]], [n.meta["val"] for n in call.args[0]]
            lies = [t.untyped_storage() for t in given]
            # What a node computes has the same sizes in copies that are given the same, and lies where theirs does.
            values, were = known.setdefault(
                (found.graph, *map(told, given), *map(lies.index, lies)), ({}, lies)
            )
            again = copying(were, lies)
            env = dict(
                zip(
                    filter(is_tensor, found.graph.find_nodes(op="placeholder")),
                    call.args[0],
                    strict=True,
                )
            )

            with g.inserting_before(call):
                for n in (n for n in found.graph.nodes if n.op == "call_function"):
                    args, kwargs = fx.map_arg((n.args, n.kwargs), env.__getitem__)
                    env[n] = g.call_function(
                        RESHAPE if n.target is VIEW else n.target, args, kwargs
                    )
                    if n in values or n.target in COLLECTIVES:
                        value = again(values.get(n, n.meta["val"]))
                    else:
                        args, kwargs = fx.map_arg((args, kwargs), lambda m: m.meta["val"])
                        with V.fake_mode:
                            value = env[n].target(*args, **kwargs)
                    values.setdefault(n, value)
                    env[n].meta = n.meta | dict(val=value)
                    for key in [key for key in STACKS if n.meta.get(key)]:
                        env[n].meta[key] = {
                            k: (found.paths.get(at, at), c) for k, (at, c) in n.meta[key].items()
                        }
                    if "unit" in n.meta:
                        bucket = [
                            (found.paths.get(at, at), shape) for at, shape in n.meta["bucket"]
                        ]
                        env[n].meta |= dict(
                            unit=found.paths.get(n.meta["unit"], n.meta["unit"]), bucket=bucket
                        )
            for user in list(call.users):
                user.replace_all_uses_with(env[found.results[user.args[1]]])
                g.erase_node(user)
            g.erase_node(call)
