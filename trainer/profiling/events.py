"""`--explain-memory`: runs one training step and collects what trainer/profiling/timeline.py explains.

    loss, timeline, notes = watch(config, step, tokens, targets)
    print(*lines(timeline, notes), sep="\\n")      # of trainer/profiling/timeline.py

torch.profiler reports every allocation and free with the ops around it, in compiled code as well, and on a CPU as on
CUDA. Ranges around forward, backward, update and (eager) modules say where in the step each is.
"""

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._profiler import _EventType, _TensorMetadata
from torch.profiler import ProfilerActivity, profile, record_function

from trainer.config import Config
from trainer.profiling.timeline import GRADIENTS, MOMENTS, OTHER, PARAMETERS, WEIGHTS, Event, Sizes, Timeline, mib
from trainer.step import OneGraph, Step, local

MARK, MODULE = "memory: ", "module: "
GRAPH, NODE = "## Call CompiledFxGraph", "autograd::engine::evaluate_function: "
AROUND = (MARK, MODULE, GRAPH, NODE, "TorchDynamo", "Torch-Compiled", "AOTDispatcher", "Pregraph", "CompiledFunction")
DTYPES = {torch.bfloat16: "bf16", torch.float32: "fp32"}
FACTOR = {"aten::mm": 1, "aten::addmm": 2, "aten::embedding": 0}  # the input that is a weight


def _where(names: list[str], following: str, module: str) -> str:
    """Where an event is, in words: the ranges around it, outermost first; the op that starts after it; its module."""
    node = next((n.removeprefix(NODE) for n in names if n.startswith(NODE)), "")
    own = [n for n in names if not n.startswith(AROUND) and n != node]
    function = next((n for n in own if "::" not in n), "")  # an autograd.Function of Python
    inside = node or function
    if any(n.startswith(GRAPH) for n in names):
        inside = "compiled backward" if node else "compiled code"
    op = next((n for n in own if "::" in n), f"before {following}" if following else "")
    place = f"{op} in {inside}" if op and inside else op or f"end of {inside or 'the step'}"
    return f"{place}, {module}" if module else place


def _label(e) -> str:
    """The name of an op; of a matrix product with its shapes, which in compiled code tell which product it is."""
    if e.name not in ("aten::mm", "aten::addmm"):
        return e.name
    shapes = [[*t.sizes] for t in e.typed[1].inputs if isinstance(t, _TensorMetadata) and len(t.sizes) > 1]
    return f"{e.name} " + " ".join(str(shape).replace(" ", "") for shape in shapes[:2])


def _moved(op: str) -> str:
    """The piece that a collective gathers or reduces; "" for other ops."""
    if not op.startswith(("_c10d_functional", "c10d::", "fsdp::")):
        return ""
    return WEIGHTS if re.search("all_?gather", op) else GRADIENTS if "reduce" in op else ""


def _reads(e, shapes: set[tuple[int, ...]]) -> Iterator[Event]:
    """What the inputs of an op tell of the blocks that they lie in. shapes: of the parameters, each sorted."""
    inputs, at = e.typed[1].inputs, FACTOR.get(e.name)
    for i, given in enumerate(inputs):
        for t in given if isinstance(given, list) else [given]:
            if isinstance(t, _TensorMetadata) and t.storage_data_ptr:
                weight = i == at and tuple(sorted(t.sizes)) in shapes and (not i or inputs[i - 1].strides[-1] == 1)
                piece = WEIGHTS if weight else _moved(e.name)
                yield Event(e.start_time_ns, t.storage_data_ptr, 0, "", piece, tuple(t.sizes), DTYPES.get(t.dtype, ""))


def read(roots: list, device: str, shapes: set[tuple[int, ...]]) -> tuple[list[Event], list[tuple[int, str]]]:
    """(events, marks) for a Timeline. roots: the profiler's trees; device: whose blocks count; shapes: as `_reads`."""
    events, marks, modules = [], [], {}  # modules: sequence number of an autograd node -> its module

    def walk(siblings: list, names: list[str], module: str) -> None:
        following, after = "", []
        for e in reversed(siblings):
            after.append(following)
            if e.tag == _EventType.TorchOp and not e.name.startswith(AROUND):
                following = _label(e)
        for e, following in zip(siblings, reversed(after), strict=True):
            if e.tag == _EventType.Allocation:
                a = e.typed[1]
                if a.device.type == device:
                    events.append(Event(e.start_time_ns, a.ptr, a.alloc_size, _where(names, following, module)))
            elif e.tag == _EventType.TorchOp:
                number, own = e.typed[1].sequence_number, module
                if e.name.startswith(MARK):
                    marks.append((e.start_time_ns, e.name.removeprefix(MARK)))
                if e.name.startswith(MODULE):
                    own = e.name.removeprefix(MODULE)
                elif e.name.startswith(NODE):
                    own = modules.get(number, module)
                elif module and not any(n.startswith(NODE) for n in names):
                    modules[number] = module
                events.extend(_reads(e, shapes))
                walk(e.children, [*names, _label(e)], own)

    walk(sorted(roots, key=lambda e: e.start_time_ns), [], "")
    return events, sorted(marks)


def _mark(name: str) -> None:
    with record_function(MARK + name):
        pass


@contextmanager
def _observed(step: Step, modules: bool) -> Iterator[list[dict[int, int]]]:
    """Marks the phases of a step, and an eager one's modules. Yields the {address: bytes} of the gradients at each mark
    "gradients", as they come. From outside the model: compiled code has guards on what it reads of it."""
    seen, ranges = [], []

    def note(phase: str, grads: list[Tensor]) -> None:
        if phase != "reduce":  # which belongs to backward
            _mark(phase)
        if grads:
            _mark(GRADIENTS)
            storages = [g.untyped_storage() for g in grads]
            seen.append({s.data_ptr(): s.nbytes() for s in storages})

    def enter(name: str, *_) -> None:  # a forward hook gets the module and its inputs as well
        ranges.append(record_function(MODULE + name))
        ranges[-1].__enter__()

    with ExitStack() as stack:
        if not isinstance(step, OneGraph):
            _mark("fwd")
        step.watcher = note
        stack.callback(setattr, step, "watcher", None)
        for name, m in step.model.named_modules() if modules else ():
            stack.enter_context(m.register_forward_pre_hook(partial(enter, name or "the model")))
            leave = m.register_forward_hook(lambda *_: ranges.pop().__exit__(None, None, None), always_call=True)
            stack.enter_context(leave)
        yield seen


def sizes_of(c: Config, world: int) -> Sizes:
    """The names of tensors for resolved flags: logits, activations of a micro-batch, parameters and their shards on
    `world` ranks. B sequences, T tokens, D width, V vocabulary, C tokens of a chunk of the loss."""
    tokens, D, V, kv = c.batch * c.seqlen, c.width, c.vocab, c.width // c.grouping
    rows = {"[B,T,V]": tokens}
    if c.loss == "chunked":
        rows = {"[C,V]": min(c.chunk, tokens), "[last C,V]": tokens % c.chunk}
    elements = {name: n * V for name, n in rows.items() if n}
    elements |= {"[B,T,D]": tokens * D, f"[B,T,{c.grow}D]": tokens * c.grow * D}
    weights = {"[V,D]": V * D, "[D,D]": D * D, f"[{c.grow}D,D]": c.grow * D * D}
    if c.grouping > 1:
        elements[f"[B,T,D/{c.grouping}]"], weights[f"[D/{c.grouping},D]"] = tokens * kv, kv * D
    elements |= weights
    if world > 1:
        elements |= {f"{name}/{world}": -(-n // world) for name, n in weights.items()}
    dtypes = dict.fromkeys((c.param_dtype, "fp32"))
    return Sizes(tuple((name, n, d) for name, n in elements.items() for d in dtypes), V, rounded=c.device == "cuda")


def _before(step: Step, tokens: Tensor, targets: Tensor) -> tuple[dict[str, int], set[int]]:
    """({piece: bytes}, addresses) of what is alive before a step; of OTHER on a CPU only what is known to be there."""
    o, total, known = step.optimizer, Counter(), set()
    groups = {PARAMETERS: step.model.parameters(), MOMENTS: [*o.m, *o.v],
              OTHER: [*step.model.buffers(), o.t, o.lr, tokens, targets]}  # fmt: skip
    for piece, tensors in groups.items():
        for t in tensors:
            storage = local(t.detach()).untyped_storage()
            if storage.data_ptr() not in known:
                known.add(storage.data_ptr())
                total[piece] += storage.nbytes()
    if tokens.is_cuda:
        total[OTHER] = torch.cuda.memory_allocated(tokens.device) - total[PARAMETERS] - total[MOMENTS]
    return dict(total), known


def watch(c: Config, step: Step, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Timeline, list[str]]:
    """Runs step(tokens, targets), [B, T] each, under the profiler. Returns its loss, its Timeline, and notes on what
    the timeline does not know. c: the resolved flags that `step` was built of."""
    base, known = _before(step, tokens, targets)
    if tokens.is_cuda:
        torch.cuda.reset_peak_memory_stats(tokens.device)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=True) as profiler:
        with _observed(step, modules=c.compile == "none") as seen:
            loss = step(tokens, targets)
    shapes = {tuple(sorted(p.shape)) for p in step.model.parameters() if p.ndim == 2}
    events, marks = read(profiler.profiler.kineto_results.experimental_event_tree(), c.device, shapes)
    for time, grads in zip([time for time, name in marks if name == GRADIENTS], seen, strict=True):
        events += [Event(time, ptr, 0, piece=GRADIENTS) for ptr in grads]
    made = {e.ptr for e in events if e.nbytes > 0} | known
    kept = sum({ptr: n for grads in seen for ptr, n in grads.items() if ptr not in made}.values())
    base[GRADIENTS] = kept
    phases = [m for m in marks if m[1] != GRADIENTS]
    phases = [m for i, m in enumerate(phases) if not i or m[1] != phases[i - 1][1]]
    world = dist.get_world_size() if dist.is_initialized() else 1
    notes = ["a CPU's kernels allocate copies of their own (oneDNN packs operands): workspace, not so on CUDA",
             "a CPU's allocator does not report frees of what was there before the step",
             "the resident memory of this run holds the profiler's events as well"]  # fmt: skip
    if tokens.is_cuda:
        base[OTHER] -= kept
        notes = [f"torch.cuda.max_memory_allocated {mib(torch.cuda.max_memory_allocated(tokens.device))}"]
    if not phases:
        notes.append("one graph, no phases: what is saved for backward cannot be told from temporaries, nor gradients "
                     "that no collective reads; both are workspace")  # fmt: skip
    return loss, Timeline(events, phases, base, sizes_of(c, world)), notes
