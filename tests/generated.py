"""What generated code does with collectives: their order among the products, and the bytes that they keep alive.

    python -m tests.generated --compile fwdbwd --mode fully_shard --depth 2 --ahead 1
    GgGgGmmgGmmgm | GgGmmgGRmmmmgmmRrmmRrRrr
    bytes alive at most: gathered 110080, gradients 248832, all 298096

    found = read(run, model)      # run(mark) compiles when it is first called; it calls mark() where a phase begins

G all-gather, R reduce-scatter, A all-reduce, in lower case where it is waited for, m a matrix product or attention, |
where backward begins; scalars are left out. The code is what Inductor writes after all of its passes. It runs without
its kernels: nothing is compiled by g++ or ptxas, and values mean nothing. Bytes are those of storages from birth to
death, on one of eight ranks of which the others are not there.
"""

import argparse
import ast
import re
import weakref
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest import mock

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor import async_compile
from torch._subclasses.fake_tensor import FakeTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import overlap
from simple_fsdp import MixedPrecisionPolicy, data_parallel

SYMBOLS = {"all_gather": "G", "reduce_scatter": "R", "all_reduce": "A"}
WAIT = torch.ops._c10d_functional.wait_tensor.default
SCALAR = 64  # bytes: a loss, a norm, a count of labels
GATHERED = "gathered"
GRADIENTS = "gradients"


@dataclass
class Content:
    """What a storage holds from one write to the next. end: None while it is alive."""

    nbytes: int
    begin: int
    end: int | None = None
    kind: str = ""
    was_read: bool = False


@dataclass(repr=False)
class Found:
    """order: a string per phase. contents: of every storage that the run made."""

    order: list[str] = field(default_factory=lambda: [""])
    contents: list[Content] = field(default_factory=list)

    def alive(self, kind: str = "") -> int:
        """The most bytes of a kind alive at once: GATHERED, what all-gathers made and copies of it; GRADIENTS, what
        reductions are given, until they are waited for, and products of a parameter's shape; "": of everything."""
        counted = [c for c in self.contents if kind in ("", c.kind)]
        changes = [(c.begin, c.nbytes) for c in counted] + [(c.end, -c.nbytes) for c in counted if c.end is not None]
        most = now = 0
        for _, nbytes in sorted(changes):  # what is freed at a time goes first
            now += nbytes
            most = max(most, now)
        return most

    def gaps(self, symbol: str) -> list[int]:
        """The products between the start and the wait of each collective, in the order of starts; 0: exposed."""
        text = "".join(self.order)
        starts, waits = ([i for i, c in enumerate(text) if c == s] for s in (symbol, symbol.lower()))
        return [text.count("m", start, wait) for start, wait in zip(starts, waits, strict=True)]

    def __repr__(self) -> str:
        sizes = [f"{kind} {self.alive(kind)}" for kind in (GATHERED, GRADIENTS)]
        return f"{' | '.join(self.order)}\nbytes alive at most: {', '.join(sizes)}, all {self.alive()}"


class Kernel:
    """A generated kernel, which does nothing. The names of its pointers tell what it reads and writes."""

    def __init__(self, source: str):
        signature = re.search(r"(?:void|def)\s+\w+\(([^)]*)\)", source)[1]
        self.pointers = re.findall(r"\b(in_ptr|in_out_ptr|out_ptr)\d+", signature)

    def __call__(self, *args) -> None:
        if Reader.running:
            pairs = [*zip(self.pointers, args, strict=False)]  # sizes follow the pointers
            reads = [t for name, t in pairs if name.startswith("in")]
            Reader.running.moved(reads, [t for name, t in pairs if name == "out_ptr"])


class Reader(TorchDispatchMode):
    """Notes what happens inside it. shapes: of the parameters, each sorted."""

    running: "Reader | None" = None

    def __init__(self, shapes: set[tuple[int, ...]]):
        super().__init__()
        self.shapes = shapes
        self.found = Found()
        self.now = 0
        self.contents: dict[int, Content] = {}  # by storage; none of what was there before
        self.pending: dict[int, tuple[str, list[Tensor]]] = {}  # output of a collective -> its symbol, its inputs

    @classmethod
    def is_infra_mode(cls) -> bool:  # otherwise Dynamo runs everything eagerly below this mode
        return True

    def mark(self) -> None:
        """Another phase begins."""
        self.found.order.append("")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(t not in (FakeTensor, Tensor, nn.Parameter) for t in types):
            return NotImplemented  # a DTensor runs operations on its shards, which come here again
        kwargs = kwargs or {}
        if func is WAIT:
            self.waits(args[0])
            func(*args)  # otherwise torch warns, at the end, of collectives that nobody waited for
            return args[0]
        out = self.run(func, args, kwargs)
        given = of_all((args, kwargs))
        made = of_all(out)
        written = of_all(kwargs.get("out"))
        inputs = [t for t in given if not any(t is w for w in written)]
        for t in made:
            if memory(t) not in map(memory, given):
                weakref.finalize(t.untyped_storage(), self.ends, memory(t))
                self.begins(t)
        symbol = symbol_of(func, given + made)
        product = func.overloadpacket in overlap.FLOP_FORMULAS
        self.moved(inputs, written, [] if symbol or product else made)
        if product:
            self.found.order[-1] += "m"
            self.label([t for t in made if tuple(sorted(t.shape)) in self.shapes], GRADIENTS)
        if symbol:
            self.found.order[-1] += symbol
            self.label(*(made, GATHERED) if symbol == "G" else (inputs, GRADIENTS))
            self.pending |= {memory(t): (symbol, inputs) for t in made}
        return out

    def run(self, func, args: tuple, kwargs: dict):
        """Custom operations run their own Python: what they hold inside counts. There composite ones come whole."""
        own = torch._library.custom_ops.OPDEFS.get(func._schema.name)
        if own is not None:
            with self:
                return own._init_fn(*args, **kwargs)
        if func.namespace == "aten" and func.overloadpacket not in overlap.FLOP_FORMULAS:
            with self:
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        return func(*args, **kwargs)

    def begins(self, t: Tensor) -> None:
        """A storage has new content."""
        self.ends(memory(t))
        self.contents[memory(t)] = made = Content(t.untyped_storage().nbytes(), self.now)
        self.found.contents.append(made)

    def ends(self, storage: int) -> None:
        self.now += 1
        if storage in self.contents:
            self.contents.pop(storage).end = self.now

    def label(self, tensors: list[Tensor], kind: str) -> None:
        for t in tensors:
            if memory(t) in self.contents:
                self.contents[memory(t)].kind = kind

    def moved(self, inputs: list[Tensor], written: list[Tensor], made: list[Tensor] = ()) -> None:
        """Something reads `inputs`, writes into `written` and has made `made`. Of gathered weights alone it makes
        copies of them. What is written after it was read is a buffer that is used again."""
        self.now += 1
        read = [self.contents.get(memory(t)) for t in inputs]
        for t in written:
            content = self.contents.get(memory(t))
            if content and content.was_read and memory(t) not in map(memory, inputs):
                self.begins(t)
        for content in filter(None, read):
            content.was_read = True
        if read and all(content and content.kind == GATHERED for content in read):
            self.label([*written, *made], GATHERED)

    def waits(self, t: Tensor) -> None:
        symbol, inputs = self.pending.pop(memory(t), ("", []))
        self.found.order[-1] += symbol.lower()
        for given in inputs if symbol in ("R", "A") else ():
            if memory(given) in self.contents:  # what is still alive is no gradient any more
                self.begins(given)


def memory(t: Tensor) -> int:
    return t.untyped_storage()._cdata


def of_all(tree) -> list[Tensor]:
    return [t for t in tree_leaves(tree) if isinstance(t, Tensor)]


def symbol_of(func, tensors: list[Tensor]) -> str:
    """Of a collective, unless it moves a scalar."""
    if not func.namespace.startswith("_c10d_functional") or max(t.nbytes for t in tensors) <= SCALAR:
        return ""
    return next((symbol for name, symbol in SYMBOLS.items() if name in func._schema.name), "")


@contextmanager
def generating():
    """Inside it torch.compile starts afresh and makes Kernels."""

    def empty(size, stride, dtype):  # torch's own allocates where no mode sees it
        return torch.empty_strided(size, stride, dtype=dtype)

    def kernel(self, argtypes, source):
        return Kernel(source)

    torch._dynamo.reset()
    with (
        mock.patch.object(torch._C._dynamo.guards, "_empty_strided_cpu", empty),
        mock.patch.multiple(async_compile.AsyncCompile, cpp_pybinding=kernel, wait=lambda *_: None),
        functorch_config.patch(enable_autograd_cache=False),
        inductor_config.patch(fx_graph_cache=False),
    ):
        yield
    torch._dynamo.reset()


def observe(run: Callable[[Callable[[], None]], None], model: nn.Module) -> Found:
    """What run(mark) does, of which everything is compiled."""
    Reader.running = reader = Reader({tuple(sorted(p.shape)) for p in model.parameters() if p.ndim > 1})
    try:
        with reader:
            run(reader.mark)
    finally:
        Reader.running = None
    return reader.found


def read(run: Callable[[Callable[[], None]], None], model: nn.Module) -> Found:
    """What the code does that run(mark) compiles when it is first called; then it is called a second time."""
    with generating():
        run(lambda: None)
        return observe(run, model)


# ------------------------------------------------------------------------------------------- a small model, and a step


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Embedding, blocks, norm, head; returns the loss of tokens [B, T]."""

    def __init__(self, depth: int, width: int = 64, vocab: int = 80):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, False)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.emb(tokens)  # [B, T, D]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), tokens.flatten())


def small(compile: str, mode: str = "fully_shard", depth: int = 6, options: dict | None = None, reshard: bool = True,
          world: int = 8, **how) -> tuple[nn.Module, Callable]:  # fmt: skip
    """(model, run) for read(), of a Net that is compiled as main.py's --compile says, "plain": without our options.
    options: of Inductor, on top of ours; how: of compile_options. Needs a process group of `world` fake ranks."""
    shape = (2, world // 2) if mode == "hybrid_shard" else (world,)
    mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    dtypes = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = data_parallel(Net(depth), mesh, mode, dtypes, reshard_after_forward=reshard)
    tokens = torch.zeros(2, 8, dtype=torch.long)
    params = [*model.parameters()]

    def own(part: nn.Module, **more) -> dict:
        if compile == "plain":
            return dict(options or {})
        return overlap.compile_options(part, **how, **more) | (options or {})

    def step(tokens: Tensor) -> Tensor:
        loss = model(tokens)
        gradients = torch.autograd.grad(loss, params)
        with torch.no_grad():
            for p, gradient in zip(params, gradients, strict=True):
                p.to_local().sub_(gradient.to_local())
        return loss.detach()

    if compile == "blocks":
        for block in model.blocks:
            block.compile(fullgraph=True, options=own(block))
        loss = model
    elif compile == "step":
        loss = torch.compile(step, fullgraph=True, options=own(model, whole_step=True))
    else:
        loss = torch.compile(lambda tokens: model(tokens), fullgraph=True, options=own(model))

    def run(mark: Callable[[], None]) -> None:
        if compile == "step":
            with torch._dynamo.config.patch(trace_autograd_ops=True):
                loss(tokens)
            return
        value = loss(tokens)
        mark()
        torch.autograd.grad(value, params)

    return model, run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", choices=("plain", "fwdbwd", "blocks", "step"), default="fwdbwd")
    parser.add_argument("--mode", choices=("fully_shard", "replicate", "hybrid_shard"), default="fully_shard")
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--ahead", type=float)
    parser.add_argument("--no-reshard", action="store_true")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="of Inductor, on top")
    flags = parser.parse_args()
    options = {name: ast.literal_eval(value) for name, _, value in (o.partition("=") for o in flags.option)}
    how = {} if flags.ahead is None else dict(ahead=flags.ahead)
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    model, run = small(flags.compile, flags.mode, flags.depth, options, not flags.no_reshard, **how)
    print(f"torch {torch.__version__}, {flags.compile}, {flags.mode}")
    print(read(run, model))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
