"""What the compiler makes of a model's collectives: any setting, any number of ranks, in one process, without GPUs.

    python -m lab.profiling.collectives --depth 8 --world 64 --device cuda     # this trainer: the flags of main.py
    python -m lab.profiling.collectives --model my_file:build --world 64 --mode replicate   # your own

MODULE:FUNCTION names a function of no arguments that returns (model, inputs): an unwrapped nn.Module and a tuple or
dict of its arguments. `--device cuda` takes the defaults of a GPU (no GPU is used). Nothing is computed and no code is
generated: the graphs are those that Inductor schedules, whose order "alive" and "between" mean; the generated code may
still fuse and move what is not a collective. Of a compiled block they run around its code: no order is shown.

For each graph: its collectives (kind, products between start and wait, MiB of the whole tensor, MiB that a rank of a
ring sends, what is in the bucket), those that are exposed (no product in between), the most gathered bytes alive at
once, and what forward keeps for backward by kind.
"""

import sys

from lab.profiling.command import parse_tool, tool
from simple_fsdp import units_of
from trainer import config as flags
from trainer.terminal.output import fail, put

if __name__ == "__main__":  # before torch is imported, as in main.py
    _parser = tool("lab.profiling.collectives", __doc__)
    _parser.add_argument(
        "--model", metavar="MODULE:FUNCTION", help="your model (default: the trainer's)"
    )
    OWN, CONFIG = parse_tool(_parser)

import os
import pkgutil
import re
import signal
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import NamedTuple
from unittest import mock

import torch
import torch._dynamo.config as dynamo_config
import torch._functorch.config as functorch_config
import torch._inductor.compile_fx as compile_fx
import torch._inductor.config as inductor_config
import torch.distributed as dist
from torch import fx, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import overlap
from overlap import GATHER, REDUCE, SCATTER, WAIT, is_layout, is_product, wait_of
from trainer.attention_kernel import DTYPES
from trainer.collective_time import sent_bytes
from trainer.parallelize import build, compile_options, make_mesh, reference_model, wrap
from trainer.step import LanguageModel, Step

# What runs once per micro-batch; block: and once per block.
MICRO_BATCH = ("loss", "model", "block")
MIB = 2**20
# The second: of Inductor's own buckets.
GATHERS = GATHER, torch.ops._c10d_functional.all_gather_into_tensor_out.default
KINDS = dict.fromkeys(GATHERS, "all-gather") | {SCATTER: "reduce-scatter", REDUCE: "all-reduce"}


class Found(Exception):
    """Ends a call once what it was made for is known: the graphs of a compiled function, the inputs of a block."""


def inductor_passes(gm: fx.GraphModule, inputs, is_inference: bool) -> None:
    """What Inductor does to a graph before it lowers it, in place, apart from making ops in-place: so it still runs."""
    compile_fx.view_to_reshape(gm)
    fake_mode = compile_fx.fake_tensor_prop(gm, inputs)
    reinplace = "torch._inductor.fx_passes.post_grad.reinplace_inplaceable_ops"
    with compile_fx.V.set_fake_mode(fake_mode), mock.patch(reinplace, lambda *_, **__: None):
        compile_fx._recursive_post_grad_passes(gm, is_inference=is_inference)


@contextmanager
def tracing() -> Iterator[None]:
    """Inside it torch.compile starts afresh, reads no cache, and lowers a backward along with its forward."""
    torch._dynamo.reset()
    with (
        functorch_config.patch(force_non_lazy_backward_lowering=True, enable_autograd_cache=False),
        inductor_config.patch(force_disable_caches=True),
        dynamo_config.patch(
            {k: True for k in ("trace_autograd_ops",) if hasattr(dynamo_config, k)}
        ),
        # FlexAttention on a CPU only refuses to train; its graph is the one that a GPU gets.
        mock.patch("torch.nn.attention.flex_attention._validate_device", lambda *_: None),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", "dynamo_pgo force disabled")  # as asked for above
        yield
    torch._dynamo.reset()


def capture(
    function: Callable, args: tuple, options: dict | None = None
) -> dict[str, fx.GraphModule]:
    """The graphs {"forward": .., "backward": ..} of `function` under torch.compile(options=options), after Inductor's
    post-grad passes; "forward" alone where nothing needs a gradient or `function` takes it itself. Runs nothing."""
    graphs = {}

    def inner(gm, inputs, *, is_backward=False, is_inference=False, **_):
        inductor_passes(gm, inputs, is_inference)
        graphs["backward" if is_backward else "forward"] = gm

        def run(args):
            raise Found

        run._boxed_call = True
        return run

    with tracing(), inductor_config.patch(options or {}), suppress(Found):
        torch.compile(
            function, fullgraph=True, backend=partial(compile_fx.compile_fx, inner_compile=inner)
        )(*args)
    return graphs


class Collective(NamedTuple):
    """One collective of a graph. Bytes: `full` of the whole tensor, `sent` by one rank (ring)."""

    kind: str
    gap: int  # products between its start and its wait; 0: exposed
    sent: int
    full: int
    ranks: int
    bucket: tuple[str, ...]  # what it carries: "module [shape]"
    start: int  # products of the graph before its start


def module_of(node: fx.Node) -> str:
    """The innermost module that a node of a compiled graph, or else what alone feeds it, comes
    from: L['self'].blocks.0.mlp.up"""
    for key in ("nn_module_stack", "fwd_nn_module_stack"):  # of forward, of backward
        if node.meta.get(key):
            return list(node.meta[key].values())[-1][0]
    return module_of(node.all_input_nodes[0]) if len(node.all_input_nodes) == 1 else ""


def collectives(gm: fx.GraphModule, modules: frozenset[str] = frozenset()) -> list[Collective]:
    """Those of a captured graph, in order of their starts. `modules`: names that stand for the compiler's paths."""
    nodes = list(gm.graph.nodes)
    calls = []
    place = {n: i for i, n in enumerate(nodes)}
    for n in nodes:
        if n.target in KINDS:
            kind = KINDS[n.target]
            value = n.meta["val"]
            ranks = dist.get_world_size(dist.distributed_c10d._resolve_process_group(n.args[-1]))
            full = (n.args[0].meta["val"] if n.target is SCATTER else value).nbytes
            sent = int(sent_bytes(kind.replace("-", "_"), full, ranks))
            gap = sum(map(is_product, nodes[place[n] : place[wait_of(n)]]))
            start = sum(map(is_product, nodes[: place[n]]))
            whole = n.args[0] if n.target is SCATTER else n
            sources = [(module_of(n), tuple(whole.meta["val"].shape))]
            bucket = tuple(
                f"{_named(path, modules)} {[*shape]}".strip()
                for path, shape in n.meta.get("bucket", sources)
            )
            calls.append(Collective(kind, gap, sent, full, ranks, bucket, start))
    return calls


def _named(path: str, modules: frozenset[str]) -> str:
    """L['self'].model._modules['blocks'].0.mlp -> the longest end of it that is a module's name."""
    words = [w for w in re.split(r"\W+", path) if w and w != "_modules"]
    ends = (".".join(words[i:]) for i in range(len(words)))
    return next((end for end in ends if end in modules), re.sub(r"^[LG]\['\w+'\]\.?", "", path))


def _storage(n: fx.Node) -> list[tuple[int, int]]:
    """(identity, bytes) of the memory of each tensor that a node makes."""
    n = n.args[0] if n.target is WAIT else n
    tensors = [
        t for t in torch.utils._pytree.tree_leaves(n.meta.get("val")) if isinstance(t, torch.Tensor)
    ]
    return [(t.untyped_storage()._cdata, t.untyped_storage().nbytes()) for t in tensors]


def gathered(gm: fx.GraphModule) -> set[fx.Node]:
    """The nodes that hold gathered parameters: from all-gathers through views, copies and casts."""
    held = set()
    for n in gm.graph.nodes:
        inputs = n.all_input_nodes
        if n.target in GATHERS or (
            inputs and all(i in held for i in inputs) and (n.target is WAIT or is_layout(n))
        ):
            held.add(n)
    return held


def gathered_alive(gm: fx.GraphModule) -> int:
    """Most bytes of gathered parameters (buckets and what is cut from them) alive at once, in the graph's order."""
    # life: storage -> numbers of the first and the last node that it is alive at, bytes.
    held = gathered(gm)
    life = {}
    for i, n in enumerate(gm.graph.nodes):
        for m in {n, *n.all_input_nodes} & held:
            for key, size in _storage(m):
                life[key] = life.get(key, (i,))[0], i, size
    alive = [
        sum(size for first, last, size in life.values() if first <= i <= last)
        for i, _, _ in life.values()
    ]
    return max(alive, default=0)


def saved(gm: fx.GraphModule) -> dict[str, int]:
    """Bytes that a forward graph keeps for backward, by kind; "inputs": what exists anyway (shards, tokens)."""
    held = gathered(gm)
    origin = {}
    for n in gm.graph.nodes:
        for key, size in _storage(n):
            origin.setdefault(key, (n, size))
    kinds = dict.fromkeys(("gathered", "products", "attention", "other", "inputs"), 0)
    output = gm.graph.output_node()
    returned = output.meta.get("user_visible_output_idxs", ())
    for key in {
        key
        for i, n in enumerate(output.args[0])
        if isinstance(n, fx.Node) and i not in returned
        for key, _ in _storage(n)
    }:
        n, size = origin[key]
        attention = "attention" in str(n.target)
        kind = (
            "inputs"
            if n.op == "placeholder"
            else "gathered"
            if n in held
            else "attention"
            if attention
            else None
        )
        kinds[kind or ("products" if is_product(n) else "other")] += size
    return kinds


Graphs = dict[str, dict[str, fx.GraphModule]]  # what is compiled -> "forward", "backward" -> graph


def block_inputs(
    model: LanguageModel, tokens: torch.Tensor, dtype: torch.dtype
) -> tuple[tuple, dict]:
    """(args, kwargs) that the first block of `model`, on the meta device, is called with for tokens [B, T]; activations
    as tensors of `dtype` on the CPU that want a gradient, of memory that nobody touches."""
    inputs = []

    def note(module, args, kwargs):
        inputs.append((args, kwargs))
        raise Found

    def real(value):
        if not (isinstance(value, torch.Tensor) and value.is_meta):
            return value
        if value.is_floating_point():
            return torch.empty(value.shape, dtype=dtype, requires_grad=True)
        return torch.zeros(value.shape, dtype=value.dtype)

    block = model.get_submodule(units_of(model)[0])
    with block.register_forward_pre_hook(note, with_kwargs=True), suppress(Found):
        model(tokens.to("meta"))
    return torch.utils._pytree.tree_map(real, inputs[0])


def of_step(
    step: Step, block: tuple[tuple, dict], tokens: torch.Tensor, dtype: torch.dtype
) -> Graphs:
    """The graphs of all that a step compiles. block: of `block_inputs`; tokens [B, T]; dtype: that is gathered."""
    arguments = dict(
        loss=(tokens, tokens, torch.tensor(1.0)),
        model=(tokens,),
        step=(tokens, tokens),
        gather=(),
        block=block[0],
    )
    if whole := step.unsharded_parameters:
        gradients = torch.float32 if step.grad_accum > 1 else dtype
        arguments["reduce"] = (
            [torch.empty(p.shape, dtype=gradients) for p in step.optimizer.params],
        )
        whole.gather_fn = lambda: [torch.empty(p.shape, dtype=dtype) for p in whole.shards]
    graphs = {}
    for name, (function, options) in step.compiled.items():
        micro_batch = name in MICRO_BATCH
        with (
            torch.set_grad_enabled(micro_batch or name == "step"),
            whole() if whole and micro_batch else nullcontext(),
        ):
            function = getattr(function, "forward", function)  # a block's call is compiled
            if name == "block":
                # Where its collectives stand in its own graph says nothing: there they are not moved.
                function = partial(function, **block[1])
                options = {}
            graphs[name] = capture(function, arguments[name], options)
    return graphs


def of_trainer(config: flags.Config, world: int) -> tuple[nn.Module, Graphs]:
    """The model of resolved flags and the graphs of its step."""
    device = torch.device("cpu")
    tokens = torch.zeros(config.batch, config.seqlen, dtype=torch.long)
    dtype = DTYPES[config.param_dtype]
    blank = reference_model(config, device)
    blank.prepare(config.seqlen, device)
    inputs = block_inputs(blank, tokens, dtype)
    # AdamW's moments: not computed with, so not touched.
    with mock.patch("torch.zeros_like", torch.empty_like):
        step = build(config, device, world, init=False)
    return step.model, of_step(step, inputs, tokens, dtype)


def own_model(
    target: str, config: flags.Config, world: int
) -> tuple[nn.Module, Callable, tuple, dict]:
    """(model, function, args, options) to compile of the model and inputs that MODULE:FUNCTION returns, wrapped as
    resolved flags say. Raises ValueError, one line, for a wrong name."""
    sys.path.insert(0, os.getcwd())
    try:
        model, inputs = pkgutil.resolve_name(target)()
        if not isinstance(model, nn.Module):
            raise TypeError(f"{type(model).__name__} is no nn.Module")
    except (ImportError, AttributeError, TypeError, ValueError) as e:
        raise ValueError(
            f"--model {target}: {e}; give MODULE:FUNCTION, a function that returns (model, inputs)"
        ) from e
    wrap(model, config, make_mesh(config, torch.device("cpu"), world))
    if any(t.is_meta for t in (*model.parameters(), *model.buffers())):
        model.to_empty(device="cpu")
    options = compile_options(config)
    options = (
        options
        if options.pop("plain", False)
        else overlap.compile_options(model, ahead=config.ahead) | options
    )
    inputs = (inputs,) if isinstance(inputs, torch.Tensor) else inputs
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
    return model, lambda *args: model(*args, **kwargs), args, options


def of_module(target: str, config: flags.Config, world: int) -> tuple[nn.Module, Graphs]:
    """The model that `own_model` returns, and its graphs."""
    model, *arguments = own_model(target, config, world)
    return model, {"model": capture(*arguments)}


def report(model: nn.Module, graphs: Graphs, micro_batches: int = 1) -> list[str]:
    """The lines to print; `micro_batches`: how often a step runs the graphs of loss, model and block."""
    modules = frozenset(n for n, _ in model.named_modules() if n)
    lines = []
    sent = 0
    total = Counter()
    for compiled, pair in graphs.items():
        times = micro_batches if compiled in MICRO_BATCH else 1
        for name, gm in pair.items():
            # Not the scalars of loss and norm.
            calls = [call for call in collectives(gm, modules) if call.full > 64]
            counts = Counter(call.kind for call in calls)
            exposed = Counter(call.kind for call in calls if not call.gap)
            # Of a block by itself they run around its code, and the next begins before the last ends.
            around = compiled == "block"
            words = [
                f"{n} {kind}{'s' * (n > 1)}" + ("" if around else f" ({exposed[kind]} exposed)")
                for kind, n in counts.items()
            ]
            products = sum(is_product(n) for n in gm.graph.nodes)
            name = f"{compiled}, {name}" if "backward" in pair else compiled
            lines += ["", f"{name}: {', '.join(words) or 'no collectives'}; {products} products"]
            if around and calls:
                lines.append(
                    "  around the compiled code, one block early or late, as in eager mode"
                )
            if calls:
                lines.append(f"  {'':<14} {'between':>7} {'MiB':>9} {'sent':>9}  bucket")
            for call in calls:
                first = call.bucket[0]
                last = call.bucket[-1]
                unit = first.partition(" [")[0]
                n = len(call.bucket)
                bucket = first if n == 1 else f"{first} .. {last} ({n})"
                if n > 1 and unit == last.partition(" [")[0]:
                    bucket = f"{unit} ({n} parameters)"
                lines.append(
                    f"  {call.kind:<14} {'-' if around else call.gap:>7} "
                    f"{call.full / MIB:>9.3f} {call.sent / MIB:>9.3f}  {bucket}"
                )
            if counts["all-gather"] and not around:
                all_of_it = sum(call.full for call in calls if call.kind == "all-gather")
                lines.append(
                    f"  gathered: {gathered_alive(gm) / MIB:.3f} MiB alive at most, of {all_of_it / MIB:.3f}"
                )
            if "backward" in pair and gm is pair["forward"]:
                saved_sizes = ", ".join(
                    f"{kind} {size / MIB:.3f}" for kind, size in saved(gm).items()
                )
                lines.append(f"  kept for backward, MiB: {saved_sizes}")
            sent += times * sum(call.sent for call in calls)
            total.update({kind: times * n for kind, n in counts.items()})
    summary = (
        ", ".join(f"{n} {kind}{'s' * (n > 1)}" for kind, n in total.items()) or "no collectives"
    )
    per = "per block" if "block" in graphs else "per step"
    return [*lines, "", f"{per} and rank: {summary}, {sent / MIB:.3f} MiB sent"]


def main(target: str | None, world: int, config: flags.Config) -> int:
    """Prints the report for the trainer's model, or for `target`; returns the exit code. Bad flags: SystemExit(2)."""
    device = (
        config.device if config.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    )
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    try:
        config = flags.resolve(config, device, world)
        if config.compile == "none" and target is None:
            raise ValueError("--compile none: there is no graph; use another mode")
        model, graphs = of_module(target, config, world) if target else of_trainer(config, world)
    except ValueError as e:
        fail(str(e), 0)
    about = (
        target
        or f"depth={config.depth} width={config.width} vocab={config.vocab} seqlen={config.seqlen} batch={config.batch}"
    )
    put(
        f"{about}, {world} ranks, {config.mode}, reshard={config.reshard}, compile={config.compile}, "
        f"remat={config.remat}, {config.param_dtype} gathered, {config.reduce_dtype} reduced, torch {torch.__version__}"
    )
    put("\n".join(report(model, graphs, config.grad_accum)))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # | head
    sys.exit(main(OWN.model, OWN.world, CONFIG))
