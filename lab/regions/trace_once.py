"""Equal blocks traced once, for regions.py, which calls this.

The graph that Dynamo makes has all blocks one behind the other, gathers included. Of those that are equal one is
traced, differentiated and cut into forward and backward by AOTAutograd, alone; the whole graph holds two operations for
each, which become copies of that once it is cut up, too. From there on all is as if each block had been traced: the
same operations, collectives and modules' names, and the same kept for backward. Needs torch 2.13.
"""

import hashlib
import operator
import warnings
from collections import Counter, defaultdict, namedtuple
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor, fx
from torch._functorch.aot_autograd import aot_module_simplified
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import compile_fx
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from overlap import GATHER, REDUCE, SCATTER, WAIT, Overlap

# All private names of torch that this file uses: the modules of what is imported above, torch._ops, torch._guards,
# OpOverload._schema, DTensor._local_tensor, DTensor._spec, Tensor._version and, of storages, _cdata. Not documented:
# FakeTensor.fake_mode, and the keys of a node's meta that are read and set below.
# simple_fsdp.py's: _data_parallel_unit of a class.
aten = torch.ops.aten
# A key of what a node's meta says of an input: of one that stays where it is.
STATIC = "_dynamo_static_input_type"
COLLECTIVES = GATHER, SCATTER, REDUCE, WAIT
# Where a node's module is noted: in forward and in backward graphs.
STACKS = ("nn_module_stack", "fwd_nn_module_stack")
# Functions without a result, of which is known what they do.
KNOWN = torch._C._log_api_usage_once, operator.setitem
SHARED = "returns or keeps tensors that share memory"
# A copy of this file beside it registers an op of its own.
_LIBRARY = "simple_fsdp_" + __name__.replace(".", "_")

Halves = namedtuple("Halves", "forward backward outputs differentiable saved strides grads")
# graph and results of each; number of the block's results; which have a gradient; what is kept for backward, (whether
# it is an input, number of that or of forward's result); strides of backward's gradients; which inputs get one
# Nodes that are returned; {path of a module here: path in the copy}.
Body = namedtuple("Body", "graph results paths")
# By a hash of all that is in it, so that the compile caches know what an operation is.
bodies: dict[str, Body] = {}
# They stay until the process ends: nobody knows when a backward, which is compiled late, needs its own no more.


@torch.library.custom_op(f"{_LIBRARY}::body", mutates_args=())
def body(inputs: list[Tensor], name: str) -> list[Tensor]:
    """Stands for a graph, until regions.Inline puts it there."""
    raise RuntimeError(
        "trace_once: a block is missing in the graph: give torch.compile all of regions.compile_options"
    )


@body.register_fake
def _(inputs, name):
    values, mode = [n.meta["val"] for n in bodies[name].results], inputs[0].fake_mode
    with unset_fake_temporarily():
        return [like(t, mode, torch.UntypedStorage(0, device="meta")) for t in values]


def like(t: FakeTensor, mode: FakeTensorMode, memory: torch.UntypedStorage) -> FakeTensor:
    """A tensor as this one, in other memory: without a dispatch, which takes its time, and torch.empty_like does not
    keep all strides. Under no fake mode."""
    empty = torch.empty(0, dtype=t.dtype, device="meta")
    return FakeTensor(mode, empty.set_(memory, t.storage_offset(), t.shape, t.stride()), t.device)


BODY = getattr(torch.ops, _LIBRARY).body.default


class Pass(CustomGraphPass):
    """One that finds blocks as overlap.py does, and which the compile caches know by its source and that."""

    def __init__(self, moves: Overlap):
        self.moves = moves

    def uuid(self):
        files = Path(__file__).read_bytes(), Path(__file__).with_name("regions.py").read_bytes()
        return type(self).__name__, hashlib.sha256(b"".join(files)).hexdigest(), self.moves.uuid()


def unit_of(n: fx.Node) -> str:
    """Path in the graph of the unit that a node comes from, the innermost if there are several; "":
    none."""
    if "unit" in n.meta:
        return n.meta["unit"]
    stack = next((n.meta[key] for key in STACKS if n.meta.get(key)), {})
    stack = reversed(stack.values())
    return next((path for path, cls in stack if getattr(cls, "_data_parallel_unit", False)), "")


def is_pure(n: fx.Node) -> bool:
    """Whether a node may lie in a subgraph: no collective, nothing that writes, draws or holds graphs of its own."""
    if n.op != "call_function" or n.target in COLLECTIVES:
        return False
    if n.target is operator.getitem:
        return is_pure(n.args[0])
    if not isinstance(n.target, torch._ops.OpOverload) or n.target._schema.is_mutable:
        return False
    draws = (
        torch.Tag.nondeterministic_seeded in n.target.tags
        and "attention" not in n.target._schema.name
    )
    return not draws and "c10d" not in n.target.namespace


def is_known(n: fx.Node) -> bool:
    """Whether it is known what a function without a result does."""
    return n.target in KNOWN or getattr(n.target, "namespace", None) == "simple_fsdp"


def is_fixed(values: Iterable) -> bool:
    """Whether all values are tensors of known sizes, none wrapped as torch.func does, none to be conjugated later."""
    return all(isinstance(v, FakeTensor) and all(type(i) is int for i in (*v.shape, *v.stride()))
               and not v.is_conj() and not v.is_neg() for v in values)  # fmt: skip


def told(value) -> tuple:
    """What must be the same of two values for one code to do for both."""
    if isinstance(value, Tensor):
        sizes = *value.shape, *value.stride(), value.storage_offset()
        known = sizes if all(type(i) is int for i in sizes) else repr(sizes)
        return known, value.ndim, value.dtype, value.device, value.is_conj(), value.is_neg()
    return (
        tuple(map(told, value)) if isinstance(value, list | tuple) else (type(value), repr(value))
    )


class _Name(str):
    """Stands for a node in an argument that is printed."""

    __repr__ = str.__str__


def numbered(nodes: list[fx.Node], key: str) -> tuple[list[fx.Node], list[tuple]]:
    """What nodes read of others; and what they compute, a line each, with numbers for names. key: of a node's value in
    its meta."""
    place, inputs, lines = {n: i for i, n in enumerate(nodes)}, {}, []
    for n in nodes:
        for m in n.all_input_nodes:
            if m not in place:
                inputs.setdefault(m, len(inputs))
        names = fx.map_arg(
            (n.args, n.kwargs), lambda m: _Name(f"%{place[m]}" if m in place else f"#{inputs[m]}")
        )
        what, inner = "" if n.op == "placeholder" else n.target, held(n)
        # Such as what a checkpoint runs again, with its policy.
        if isinstance(inner, fx.GraphModule):
            what = *numbered([*inner.graph.nodes], key)[1], repr(inner.meta)
        lines.append((n.op, what, repr(names), told(n.meta.get(key))))
    return list(inputs), lines


def held(n: fx.Node):
    """What the graph's module holds under a get_attr node's name, such as the graph that a checkpoint runs."""
    return operator.attrgetter(n.target)(n.graph.owning_module) if n.op == "get_attr" else None


def paths_of(nodes: Iterable[fx.Node]) -> list[list[str]]:
    """Of each node: those of the modules that it comes from, from the outermost inwards."""
    found = []
    for n in nodes:
        found.append([path for path, _ in n.meta.get(STACKS[0], {}).values()])
        if isinstance(inner := held(n), fx.GraphModule):
            found += paths_of(inner.graph.nodes)
    return found


def value_of(n: fx.Node):
    return n.meta.get("example_value")


def local(t):
    return getattr(t, "_local_tensor", t)


def memory(values: Iterable[Tensor]) -> set[int]:
    """Where tensors lie."""
    return {local(t).untyped_storage()._cdata for t in values}


def reads_shards(nodes: Iterable[fx.Node]) -> bool:
    """Whether nodes do anything with DTensors but gather them, after which nobody knows how a gradient is sharded."""
    for n in nodes:
        takes = any(isinstance(value_of(m), DTensor) for m in n.all_input_nodes)
        hands_on = isinstance(n.target, torch._ops.HigherOrderOperator) or n.op == "output"
        gathers = getattr(n.target, "namespace", None) == "simple_fsdp"
        makes = isinstance(value_of(n), DTensor) and n.op != "placeholder"
        deeper = isinstance(inner := held(n), fx.GraphModule) and reads_shards(inner.graph.nodes)
        if makes or deeper or (takes and not (hands_on or gathers)):
            return True
    return False


class _Traced(Exception):
    pass


class _Block(torch.autograd.Function):
    """A block as two operations, from the local shards of its parameters to plain tensors."""

    @staticmethod
    def forward(ctx, halves: Halves, names: tuple[str, str], *inputs: Tensor):
        given = [*map(local, inputs)]
        made = BODY(given, names[0])
        ctx.halves, ctx.name, ctx.like = halves, names[1], inputs
        ctx.save_for_backward(*((given if is_input else made)[i] for is_input, i in halves.saved))
        results = made[: halves.outputs]
        ctx.mark_non_differentiable(
            *(t for t, yes in zip(results, halves.differentiable, strict=True) if not yes)
        )
        return tuple(results)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        given = [t for t, yes in zip(grads, ctx.halves.differentiable, strict=True) if yes]
        given = [
            t if t.stride() == s else t.contiguous()
            for t, s in zip(given, ctx.halves.strides, strict=True)
        ]
        made = iter(BODY([*ctx.saved_tensors, *given], ctx.name))
        found = [next(made) if yes else None for yes in ctx.halves.grads]
        return None, None, *(DTensor(t, p._spec, requires_grad=False) if t is not None and isinstance(p, DTensor) else t
                             for t, p in zip(found, ctx.like, strict=True))  # fmt: skip


class Block:
    """Nodes of one block in Dynamo's graph. inputs: what they read of others; used: those that others read. key: equal
    for blocks that compute the same. why: what forbids that one is traced for all; empty: nothing."""

    def __init__(self, nodes: list[fx.Node], alive: set[fx.Node], in_mode: bool):
        inside = set(nodes)
        self.nodes, self.used = nodes, [n for n in nodes if not inside >= n.users.keys()]
        self.inputs, lines = numbered(nodes, "example_value")
        self.paths = paths_of(nodes)
        given, made = [*map(value_of, self.inputs)], [*map(value_of, self.used)]
        self.trains = [n in alive for n in self.used]
        inputs = [(told(v), getattr(v, "requires_grad", None), repr(getattr(v, "_spec", None)), told(local(v)))
                  for v in given]  # fmt: skip
        results = *(i for i, n in enumerate(nodes) if n in self.used), *self.trains
        tied = [
            isinstance(value_of(m), DTensor) and not inside >= m.users.keys() for m in self.inputs
        ]
        self.key = *lines, *inputs, *results, *map(len, self.paths), *tied, in_mode
        if in_mode:
            self.why = "runs in a mode, or sets one, such as autocast or no_grad"
        elif not given or not made or not is_fixed(map(local, [*given, *made])):
            self.why = "has inputs or results other than tensors of fixed sizes"
        elif reads_shards(nodes):
            self.why = "does more with sharded tensors than to gather them"
        elif any(tied):
            self.why = "shares parameters with other modules"
        elif not any(self.trains):
            self.why = "needs no gradient"
        elif len(memory(made)) < len(made) or memory(made) & memory(given):
            self.why = SHARED
        else:
            self.why = ""

    def halves(self) -> Halves | None:
        """Forward and backward, as AOTAutograd and Inductor would make them in the whole graph; None: see `why`."""
        g, env, found = fx.Graph(), {}, []
        for m in self.inputs:
            env[m] = g.placeholder(f"input_{len(env)}")
            env[m].meta = dict(m.meta)
        for n in self.nodes:
            env[n] = g.node_copy(n, env.__getitem__)
        g.output(tuple(env[n] if yes else g.call_method("detach", (env[n],))
                       for n, yes in zip(self.used, self.trains, strict=True)))  # fmt: skip
        values = [
            value_of(m).detach().requires_grad_(value_of(m).requires_grad) for m in self.inputs
        ]

        def partition(joint: fx.GraphModule, inputs, **how):
            graphs = compile_fx.partition_fn(
                joint, inputs, partitioner_fn_override=self.partition, **how
            )
            found.append(self.checked(*graphs, how["num_fwd_outputs"]))
            raise _Traced

        def compiled(*_):  # at once, without cutting up
            self.why = "needs no gradient"
            raise _Traced

        try:
            with torch._guards.tracing(torch._guards.TracingContext(local(values[0]).fake_mode)):
                gm = fx.GraphModule(self.nodes[0].graph.owning_module, g)
                aot_module_simplified(gm, values, fw_compiler=compiled, partition_fn=partition,
                                      decompositions=select_decomp_table())  # fmt: skip
        except _Traced:
            return found[0] if found else None
        except Exception as e:  # noqa: BLE001 (what is wrong with the model the whole graph says)
            self.why = f"cannot be traced alone ({type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''})"
            return None

    def partition(
        self, joint: fx.GraphModule, inputs, **how
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Inductor keeps of a sum and a product of one size the sum, if what it adds to was computed. In the whole
        graph that is so of a block's inputs; here an operation stands for it, and is taken out again."""
        flat, static = joint.graph.find_nodes(op="placeholder"), []
        first = next(n for n in joint.graph.nodes if n.op != "placeholder")
        # Behind them: gradients.
        for m, n in zip(self.inputs, filter(is_tensor, flat), strict=False):
            if m.op == "placeholder":  # parameters, which stay where they are
                static += [flat.index(n)] * (STATIC in (m.meta.get("tensor_dict") or ()))
                continue
            with joint.graph.inserting_before(first):
                made = joint.graph.call_function(aten.add.Tensor, (n, 0))
            made.meta = n.meta | dict(stands_for_input=True)
            n.replace_all_uses_with(made, delete_user_cb=lambda user, made=made: user is not made)
        how["static_lifetime_input_indices"] = static
        graphs = min_cut_rematerialization_partition(joint, inputs, compiler="inductor", **how)
        for n in [
            n
            for gm in graphs
            for n in gm.graph.find_nodes(op="call_function", target=aten.add.Tensor)
        ]:
            if n.meta.get("stands_for_input"):
                n.replace_all_uses_with(n.args[0])
                n.graph.erase_node(n)
        return graphs

    def checked(
        self, forward: fx.GraphModule, backward: fx.GraphModule, outputs: int
    ) -> Halves | None:
        """What AOTAutograd made, without the meshes of DTensors; None: `why` says what is not as it has to be."""
        given, results = ([*filter(is_tensor, nodes)] for nodes in (
            forward.graph.find_nodes(op="placeholder"), forward.graph.output_node().args[0]))  # fmt: skip
        grads = [
            grad for grad in backward.graph.output_node().args[0] if grad is None or is_tensor(grad)
        ]
        made = [n for n in dict.fromkeys(results) if n not in given]
        calls = [
            n
            for gm in (forward, backward)
            for n in gm.graph.nodes
            if n.op not in ("placeholder", "output")
        ]
        kept, taken = (
            results[outputs:],
            [*filter(is_tensor, backward.graph.find_nodes(op="placeholder"))],
        )
        lies = lambda nodes: memory(n.meta["val"] for n in nodes if is_tensor(n))  # noqa: E731
        known = all(is_pure(n) or n.target in COLLECTIVES for n in calls)
        if not known or any(n.target is aten.as_strided.default for n in calls):
            self.why = "draws random numbers, reads memory by strides, or holds graphs of its own"
        elif (outputs, len(given), len(grads), made[:outputs]) != (
                len(self.used), len(self.inputs), len(self.inputs), results[:outputs]):  # fmt: skip
            self.why = "changes what it is given"
        elif not is_fixed(v for n in calls for v in tree_leaves(n.meta["val"])):
            self.why = "has sizes that are not fixed"
        elif (len(lies(made[:outputs])) < outputs or lies(made[:outputs]) & lies(made[outputs:])
              or lies(made) & lies(given) or lies(grads) & lies(taken[: len(kept)])):  # fmt: skip
            # The whole graph would take each to lie for itself, and write over one that is read.
            self.why = SHARED
        if self.why:
            return None
        kept = [(n in given, (given if n in given else made).index(n)) for n in kept]
        return Halves((forward.graph, made), (backward.graph, [n for n in grads if n is not None]), outputs,
                      self.trains, kept,
                      [n.meta["val"].stride() for n in taken[len(kept) :]], [n is not None for n in grads])  # fmt: skip

    def replace(self, like: "Block", halves: Halves, new: dict[fx.Node, fx.Node]) -> None:
        """A call instead of its nodes, which are equal to those of `like`. new: what took the place of others'."""
        g, inside = self.nodes[0].graph, set(self.nodes)
        paths = {
            was: now
            for pair in zip(like.paths, self.paths, strict=True)
            for was, now in zip(*pair, strict=True)
        }
        names = tuple(kept(Body(*half, paths)) for half in (halves.forward, halves.backward))

        def block(*inputs: Tensor) -> tuple[Tensor, ...]:
            return _Block.apply(halves, names, *inputs)

        block.__name__ = f"block_{names[0]}"
        with g.inserting_after(self.nodes[-1]):
            result = g.call_function(block, tuple(new.get(m, m) for m in self.inputs))
        result.meta = self.nodes[0].meta | dict(example_value=tuple(map(value_of, self.used)))
        with g.inserting_after(result):
            for i, n in enumerate(self.used):
                new[n] = g.call_function(operator.getitem, (result, i))
                new[n].meta = dict(n.meta)
                n.replace_all_uses_with(new[n], delete_user_cb=lambda user: user not in inside)
        for n in reversed(self.nodes):
            g.erase_node(n)


def is_tensor(n: fx.Node) -> bool:
    return n is not None and isinstance(n.meta.get("val"), Tensor)


def kept(found: Body) -> str:
    """A name for it that tells all that is in it."""
    lines = [
        (str(n.target), repr((n.args, n.kwargs)), told(n.meta.get("val")))
        for n in found.graph.nodes
    ]
    name = hashlib.sha256(repr((lines, found.results, found.paths)).encode()).hexdigest()
    bodies[name] = found
    return name


class TraceOnce(Pass):
    """In Dynamo's graph: equal blocks become calls of what was traced of the first."""

    def __call__(self, g: fx.Graph) -> None:
        g = getattr(g, "graph", g)
        whole = "dynamo_compile_id" in g.owning_module.meta  # and not what a checkpoint runs again
        if not (
            whole and torch.is_grad_enabled() and inductor_config.custom_partitioner_fn is None
        ):
            return
        calls = [n for n in g.nodes if n.op not in ("placeholder", "output")]
        runs = [(name, list(run)) for name, run in groupby(calls, unit_of) if name]
        times = Counter(name for name, _ in runs)
        runs = [run for name, run in runs if times[name] == 1]
        outside, alive, alike, new = self.outside(runs), self.alive(g), defaultdict(list), {}
        in_mode, unknown = self.modes(calls)
        for run in runs:
            block = Block([n for n in run if n not in outside], alive, not in_mode.isdisjoint(run))
            alike[block.key].append(block)
        several = [equal for equal in alike.values() if len(equal) > 1]
        why = [
            f"runs in a graph that does more than to compute ({n})" for n in unknown[:1] if several
        ]
        # Both halves are made of the graph as it is.
        halves = [None if unknown or first.why else first.halves() for first, *_ in several]
        for equal, how in zip(several, halves, strict=True):
            why += [equal[0].why] * (how is None)
            for block in equal if how else ():
                block.replace(equal[0], how, new)
        if why and not self.moves.warned:
            warnings.warn(
                f"regions: equal blocks are traced one by one: each {why[0]}", stacklevel=2
            )

    def modes(self, calls: list[fx.Node]) -> tuple[set[fx.Node], list[fx.Node]]:
        """What runs in another mode than the graph begins in, or sets one; and what computes nothing, so that nobody
        knows what it sets or writes to, or takes gradients in the graph, which alive() does not see."""
        found, unknown, trains, casts = set(), [], True, []
        for n in (n for n in calls if n.op != "get_attr"):
            if n.target is torch._C._set_grad_enabled:
                trains = n.args[0]
            elif n.target is torch.amp.autocast_mode._enter_autocast:
                casts.append(n)
            elif n.target is torch.amp.autocast_mode._exit_autocast:
                casts = [begun for begun in casts if begun is not n.args[0]]
            elif n.target is torch.autograd.grad or (value_of(n) is None and not is_known(n)):
                unknown.append(n)
            elif trains and not casts:
                continue
            found.add(n)
        return found, unknown

    def outside(self, runs: list[list[fx.Node]]) -> set[fx.Node]:
        """Of blocks: what is computed only from what several of them read, or from nothing, such as a mask, if nobody
        writes to it. It is the same in each, and stays in the whole graph, where it is merged."""
        readers = Counter(
            m for run in runs for m in {m for n in run for m in n.all_input_nodes}.difference(run)
        )
        common = {m for m, count in readers.items() if count > 1 and is_constant(m)}
        found = set()
        for n in (n for run in runs for n in run if n.op != "get_attr" and is_constant(n)):
            if (common | found).issuperset(n.all_input_nodes):
                found.add(n)
        return found

    def alive(self, g: fx.Graph) -> set[fx.Node]:
        """What a gradient may reach from the results, which does not pass what is detached. Who reads memory that was
        written to need not name the node that wrote: all nodes of that memory are reached at once."""
        found, todo, same = set(), [*g.output_node().all_input_nodes], defaultdict(list)
        for n in g.nodes:
            for place in memory(
                v for v in tensors(n.args[0] if n.target is operator.setitem else n) if v._version
            ):
                same[place].append(n)
        while todo:
            n = todo.pop()
            silent = (
                isinstance(n.target, torch._ops.HigherOrderOperator) or n.target is operator.setitem
            )
            if n not in found and (
                silent or n.op == "get_attr" or any(v.requires_grad for v in tensors(n))
            ):
                found.add(n)
                todo += [
                    *n.all_input_nodes,
                    *(m for place in memory(tensors(n)) for m in same.get(place, ())),
                ]
        return found


def tensors(n: fx.Node) -> list[Tensor]:
    """Those that a node of Dynamo's graph gives."""
    return [v for v in tree_leaves(value_of(n)) if isinstance(local(v), FakeTensor)]


def is_constant(n: fx.Node) -> bool:
    """Whether a node's value is a plain tensor that was never written to."""
    return isinstance(value_of(n), FakeTensor) and not value_of(n)._version
