"""How long steps take, the machine they ran on, and profiles of a few of them.

timer = StepTimer(device)
profile = Profile(directory, first=3, count=2, rank=rank, device=device)
profile.names = Names(step)            # of phases, blocks and collectives in the trace; before the first step
for k in range(steps):
    with timer.step(excluded=k < warmup or profile.covers(k)), profile.step(k):
        train_step()
row = environment(device) | stats(timer.ms())
"""

import ast
import functools
import gzip
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from types import CodeType, ModuleType

import torch
from torch import fx
from torch._inductor.codecache import PyCodeCache
from torch._inductor.graph import GraphLowering
from torch.profiler import ProfilerActivity, profile, record_function

import simple_fsdp
from overlap import GATHER, REDUCE, SCATTER
from trainer.measuring.memory import Device, dump_snapshot, is_cuda


def cpu_seconds() -> float:
    """Of this process and of children that have ended: with TORCHINDUCTOR_COMPILE_THREADS=1 also the C++ compiler,
    which else runs in workers that live on."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


class StepTimer:
    """Milliseconds per step, without what happens between steps (logging, saving). On CUDA two events on the current
    stream enclose a step, so that the host need not wait. A step that raises is not recorded."""

    def __init__(self, device: Device):
        self.cuda = is_cuda(device)
        self._done = []  # (ms, excluded)
        self._pending = deque()  # (start, end, excluded)

    @contextmanager
    def step(self, excluded: bool = False) -> Iterator[None]:
        """Times one step. excluded: it is a step of warm-up or profiled; `last` tells its time, `ms` leaves it out."""
        if self.cuda:
            start = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            start.record()
            yield
            end.record()
            self._pending.append((start, end, excluded))
        else:
            start = time.perf_counter()
            yield
            self._done.append((1e3 * (time.perf_counter() - start), excluded))

    def last(self) -> float | None:
        """ms of the newest step that the device has finished, without waiting for it; None before the first."""
        while self._pending and self._pending[0][1].query():  # query() does not wait
            start, end, excluded = self._pending.popleft()
            self._done.append((start.elapsed_time(end), excluded))
        return self._done[-1][0] if self._done else None

    def ms(self) -> list[float]:
        """ms of every step that was not excluded, in order. Waits for the device, so call it after the last step."""
        if self._pending:
            self._pending[-1][1].synchronize()
        self.last()
        return [ms for ms, excluded in self._done if not excluded]


def stats(ms: list[float], name: str = "step") -> dict[str, float | int | None]:
    """step_ms (median), step_ms_min, step_ms_max, None if there is no step, and n, their number; `name` for "step"."""
    reduce = {f"{name}_ms": statistics.median, f"{name}_ms_min": min, f"{name}_ms_max": max}
    return {key: round(f(ms), 3) if ms else None for key, f in reduce.items()} | {"n": len(ms)}


def _output(*command: str) -> str | None:
    """What a command prints; None if it is missing, fails or takes over 5 seconds."""
    # A git hook sets GIT_DIR to its own.
    env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    with suppress(OSError, subprocess.SubprocessError):
        return (
            subprocess.run(command, capture_output=True, check=True, timeout=5, env=env)
            .stdout.decode()
            .strip()
        )


def checkout(file: str | Path = __file__) -> dict[str, str | bool | None]:
    """commit: that of the checkout which tracks `file`, or "unknown"; dirty: whether files outside results/ differ."""
    git = ("git", "--no-optional-locks", "-C", str(Path(file).resolve().parent))
    sha = _output(*git, "rev-parse", "HEAD")
    if not sha or not _output(*git, "ls-files", "--", Path(file).name):
        return {"commit": "unknown", "dirty": None}
    # Where rows go.
    changed = _output(
        *git, "status", "--porcelain", "-uno", "--", ":(top)", ":(top,exclude)results"
    )
    return {"commit": sha, "dirty": None if changed is None else bool(changed)}


def code_digest() -> str:
    """A checksum of the program's files, which says, also without git, whether two ranks run the same code."""
    root = Path(__file__).parents[2]
    whole = 0
    for path in sorted([*root.glob("*.py"), *root.glob("trainer/**/*.py")]):
        whole = zlib.crc32(path.read_bytes(), whole)
    return f"{whole:08x}"


def clocks(device: Device) -> dict[str, float | None]:
    """The SM clock (call it right after work), its limit, the power limit in watts; None where nvidia-smi has none."""
    keys = {
        "clock_mhz": "clocks.sm",
        "clock_max_mhz": "clocks.max.sm",
        "power_limit_w": "power.limit",
    }
    query = [f"--query-gpu={','.join(keys.values())}", "--format=csv,noheader,nounits"]
    uuid = (
        getattr(torch.cuda.get_device_properties(device), "uuid", None) if is_cuda(device) else None
    )
    text = (uuid and _output("nvidia-smi", f"--id=GPU-{uuid}", *query) or "") + ",,"
    return {
        k: float(v) if re.fullmatch(r" *[\d.]+", v) else None
        for k, v in zip(keys, text.split(","), strict=False)
    }


def environment(device: Device) -> dict:
    """What a row of results says about code and machine."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    cpu = re.search(r"^model name\s*:\s*(.+)$|\Z", info, re.MULTILINE)[1] or os.uname().machine
    name = (
        torch.cuda.get_device_name(device)
        if is_cuda(device)
        else f"CPU {cpu}, {torch.get_num_threads()} threads"
    )
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime()),
        **checkout(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": sys.version.split()[0],
        "device": name,
        **clocks(device),
    }


def _write_trace(trace: profile, path: str) -> None:
    """The Chrome trace, gzipped, without the names of the host and of a temporary file, which may lie in a home."""
    with tempfile.TemporaryDirectory() as folder:
        whole = os.path.join(folder, "trace.json")
        trace.export_chrome_trace(whole)
        with open(whole, "rb") as lines, gzip.open(path, "wb") as out:
            out.writelines(
                re.sub(rb'"(host_name|traceName)": "[^"]*"', rb'"\1": ""', line) for line in lines
            )


class Profile:
    """`--profile DIR`: a close look at `count` steps from step `first` on; without a directory it does nothing. Writes
    rank<r>.trace.json.gz (perfetto.dev) and, on CUDA, rank<r>.memory.pickle (pytorch.org/memory_viz). `nsys profile
    --capture-range=cudaProfilerApi` records these steps alone. `paths` says what was written, `notes` what not."""

    def __init__(
        self, directory: str | Path | None, first: int, count: int, rank: int, device: Device
    ):
        self.stem = f"{directory}/rank{rank}"
        self.cuda = is_cuda(device)
        self._recording = ExitStack()
        self.steps = range(first, first + count if directory else first)
        self.nsys = self.cuda and "NSYS_PROFILING_SESSION_ID" in os.environ
        absent = (
            "trace: nsys holds CUPTI"
            if self.nsys
            else ""
            if self.cuda
            else "memory snapshot: it needs CUDA"
        )
        self.paths = []
        self.notes = [f"no {absent}"] if directory and absent else []
        self.names: Names | None = None

    def covers(self, k: int) -> bool:
        """Whether step k is profiled, and so must not enter any statistics."""
        return k in self.steps

    @contextmanager
    def step(self, k: int) -> Iterator[None]:
        """Enclose step k. A step that raises ends the profile and is in it: running out of memory leaves a snapshot."""
        if not self.covers(k):
            yield
            return
        if k == self.steps[0]:
            self._recording.enter_context(self._record())
        with ExitStack() as ending:
            ending.callback(self.close)
            with (
                torch.cuda.nvtx.range(f"step {k}") if self.cuda else nullcontext(),
                record_function(f"step {k}"),
            ):
                with self.names.shown() if self.names else nullcontext():
                    yield
            if k != self.steps[-1]:
                ending.pop_all()  # stay open for the next step

    def close(self) -> None:
        """Stop and write. The last covered step does it; call it where a run may end before that."""
        self._recording.close()
        if self.names:
            self.names.close()

    @contextmanager
    def _record(self) -> Iterator[None]:
        activities = (
            [ProfilerActivity.CPU, ProfilerActivity.CUDA] if self.cuda else [ProfilerActivity.CPU]
        )
        trace = None if self.nsys else profile(activities=activities)
        files = {}
        if self.cuda:
            torch.cuda.synchronize()
            torch.cuda.memory._record_memory_history(max_entries=200_000, stacks="python")
            torch.cuda.cudart().cudaProfilerStart()  # returns an error where nobody listens
        if trace is not None:
            trace.start()
        yield  # the steps run
        if self.cuda:
            torch.cuda.synchronize()  # the last kernels belong to the profile
            torch.cuda.cudart().cudaProfilerStop()
            files[f"{self.stem}.memory.pickle"] = dump_snapshot
        if trace is not None:
            trace.stop()
            files[f"{self.stem}.trace.json.gz"] = partial(_write_trace, trace)
        for path, write in files.items():
            try:
                os.makedirs(os.path.dirname(path), exist_ok=True)
                write(path)
                self.paths.append(path)
            except (OSError, RuntimeError) as error:  # a profile that cannot be written ends no run
                self.notes.append(f"could not write {path}: {error}")
        if self.cuda:
            torch.cuda.memory._record_memory_history(enabled=None)


GATHERS = GATHER, torch.ops._c10d_functional.all_gather_into_tensor_out.default
# The second: of Inductor's own buckets.
KINDS = dict.fromkeys(GATHERS, "all-gather") | {SCATTER: "reduce-scatter", REDUCE: "all-reduce"}
PHASES = dict(fwd="forward", bwd="backward", reduce="backward", step="optimizer")
# Of compiled code whose buffers are noted; what was compiled without has another cache key.
TAG = "named-in-traces"


class Track:
    """The ranges of a trace that are open: a phase, in it a block, in that a collective."""

    def __init__(self):
        self.open: list[tuple[int, str, record_function]] = []

    def to(self, level: int, name: str | None) -> str | None:
        """Ends the range of this level, if another is open, and begins `name`; returns the one before."""
        before = next((own for at, own, _ in self.open if at == level), None)
        if name is None or name != before or level == 2:
            while self.open and self.open[-1][0] >= level:
                self.open.pop()[2].__exit__(None, None, None)
            if name:
                self.open.append((level, name, record_function(name)))
                self.open[-1][2].__enter__()
        return before

    def collective(self, function: Callable, name: Callable[[tuple], str]) -> Callable:
        """`function`, a generator that stops while its collective runs, in a range called by its arguments each time
        that it goes on."""

        def named(*args):
            what = name(args)
            work = function(*args)
            del args  # gradients, which it frees before it ends
            while True:
                self.to(2, what)
                try:
                    next(work)
                except StopIteration as end:
                    return end.value
                finally:
                    self.to(2, None)
                yield

        return named


def words_of(path: str) -> tuple[str, ...]:
    """L['self']._modules['blocks'].0.mlp -> L, self, blocks, 0, mlp: Dynamo writes paths in several ways."""
    return tuple(
        word for word in re.split(r"\W+", path) if word and word not in ("_modules", "_orig_mod")
    )


def module_of(node: fx.Node) -> str:
    """The innermost module that a node of a compiled graph, or else what alone feeds it, comes
    from: L['self'].blocks.0.mlp.up"""
    for key in ("nn_module_stack", "fwd_nn_module_stack"):  # of forward, of backward
        if node.meta.get(key):
            return list(node.meta[key].values())[-1][0]
    return module_of(node.all_input_nodes[0]) if len(node.all_input_nodes) == 1 else ""


class Names:
    """Names for a trace of a step (trainer.step.Step): forward, backward, optimizer; the model's blocks, and what lies
    in none, by name; collectives with the blocks whose parameters they move. Only inside `shown` does anything differ
    from a run without: the generated code that runs there is the same with calls of `Track` between its lines.

    Which block a line belongs to is noted when the code is generated, in a file beside it. So build this before the
    first step, and `close` it."""

    def __init__(self, step):
        self.step = step
        self.track = Track()
        config = torch.compiler.config
        blocks = simple_fsdp.units_of(step.model)
        self.places = {}
        for name, _ in step.model.named_modules(remove_duplicate=False):
            inside = [block for block in blocks if f"{name}.".startswith(f"{block}.")]
            self.places[words_of(name)] = max(inside, key=len, default=name)
        self.parameters = {
            id(p): self.place(name.rpartition(".")[0]) for name, p in step.model.named_parameters()
        }
        self.shown_modules = {
            name: m
            for name, m in step.model.named_modules()
            if name in blocks
            or (not [*m.children()] and self.places[words_of(name)] == name and name)
        }
        self.plain = GraphLowering.compile_to_module
        config.cache_key_tag = f"{config.cache_key_tag} {TAG}".strip()
        noted = functools.partialmethod(Names.note, names=self)
        GraphLowering.compile_to_module = noted

    def close(self) -> None:
        """Generated code is noted no longer. A second call does nothing."""
        if self.plain:
            GraphLowering.compile_to_module = self.plain
            self.plain = None
            words = torch.compiler.config.cache_key_tag.split()
            torch.compiler.config.cache_key_tag = " ".join(word for word in words if word != TAG)

    def place(self, path: str) -> str:
        """The block, or the module in none, of a path in a graph or in the model; "" if it is not known."""
        words = words_of(path)
        return next(
            (self.places[words[i:]] for i in range(len(words)) if words[i:] in self.places), ""
        )

    @staticmethod
    def some(places: Iterable[str]) -> str:
        """blocks.0; or emb, norm and 2 more."""
        places = [*dict.fromkeys(filter(None, places))]
        more = f" and {len(places) - 2} more" * (len(places) > 3)
        return ", ".join(places[: 2 if more else 3]) + more

    def note(graph: GraphLowering, names: "Names"):
        """Takes the place of a method of GraphLowering: also writes {buffer: [place, collective or ""]}."""
        module = names.plain(graph)
        found = {}
        for buffer in [*graph.buffers, *graph.operations]:
            nodes = [*(getattr(buffer, "origins", None) or ())]
            start = next((n for n in nodes if n.target in KINDS), None)
            if start is not None:
                moved = [path for path, _ in start.meta.get("bucket", ())] or [module_of(start)]
                what = f"{KINDS[start.target]} {names.some(map(names.place, moved))}".strip()
                # An all-reduce is written in place.
                for each in (buffer, *(getattr(buffer, "inputs", None) or ())):
                    found.setdefault(each.get_name(), ["", what])
            elif place := next(filter(None, (names.place(module_of(n)) for n in nodes)), ""):
                found.setdefault(buffer.get_name(), [place, ""])
        with suppress(OSError):
            Path(f"{module.__file__}.names.json").write_text(json.dumps(found))
        return module

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Inside it a step has names in a trace."""
        track = self.track
        swapped = []
        moved = lambda params: self.some(self.parameters.get(id(p), "") for p in params)  # noqa: E731
        names = dict(
            _all_gather=lambda args: f"all-gather {moved(args[0])}",
            _reduce=lambda args: f"reduce {moved(args[2])}",
        )
        with self.step.watched(lambda phase, _: track.to(0, PHASES[phase])), ExitStack() as stack:
            stack.callback(track.to, 0, None)
            for name, says in names.items():
                plain = getattr(simple_fsdp, name)
                setattr(simple_fsdp, name, track.collective(plain, says))
                stack.callback(setattr, simple_fsdp, name, plain)
            # Where torch looks first, and no compiled code.
            for name, module in self.shown_modules.items():
                before = module._compiled_call_impl
                module._compiled_call_impl = self.named(name, before or module._call_impl)
                stack.callback(setattr, module, "_compiled_call_impl", before)
            for module in PyCodeCache.modules:
                if code := instrumented(module):
                    module._track = track
                    own = type(module.runner).call
                    swapped.append((own, own.__code__))
                    own.__code__ = code
            stack.callback(lambda: [setattr(own, "__code__", code) for own, code in swapped])
            yield

    def named(self, name: str, call: Callable) -> Callable:
        """A module's call in a range of its name, which its backward opens as well."""

        def named(*args, **kwargs):
            before = self.track.to(1, name)
            out = call(*args, **kwargs)
            self.track.to(1, before)
            first = out[0] if isinstance(out, tuple) else out
            if isinstance(first, torch.Tensor) and first.requires_grad and torch.is_grad_enabled():
                first.register_hook(lambda grad: self.track.to(1, name) and None)
            return out

        return named


def _call(method: str, *args) -> ast.Expr:
    return ast.parse(f"_track.{method}({', '.join(map(repr, args))})").body[0]


@functools.cache
def instrumented(module: ModuleType) -> CodeType | None:
    """The code of a generated module's `call` with ranges between its lines; None where nothing is noted about it."""
    with suppress(OSError, ValueError, AttributeError, StopIteration):
        noted = json.loads(Path(f"{module.__file__}.names.json").read_text())
        tree = ast.parse(Path(module.__file__).read_text())
        runner = next(
            n
            for n in tree.body
            if isinstance(n, ast.ClassDef) and n.name == type(module.runner).__name__
        )
        call = next(n for n in runner.body if isinstance(n, ast.FunctionDef) and n.name == "call")
        call.body = _with_ranges(call.body, noted)
        todo = [compile(ast.fix_missing_locations(tree), module.__file__, "exec")]
        for code in todo:
            if code.co_name == "call" and code.co_varnames[:2] == ("self", "args"):
                return code
            todo += [each for each in code.co_consts if isinstance(each, CodeType)]
    return None


def _with_ranges(body: list[ast.stmt], noted: dict[str, list[str]]) -> list[ast.stmt]:
    made = []
    for line in body:
        if isinstance(line, ast.With):
            line.body = _with_ranges(line.body, noted)
        elif isinstance(line, ast.Return):
            made.append(_call("to", 1, None))
        elif isinstance(line, ast.Expr | ast.Assign):
            text = ast.unparse(line)
            found = [
                noted[n.id] for n in ast.walk(line) if isinstance(n, ast.Name) and n.id in noted
            ]
            moves = re.search(r"(^|= )torch\.ops\._c10d_functional\.", text)
            if moves and (what := next((what for _, what in found if what), "")):
                waits = "wait for " * (".wait_tensor" in text)
                made += [_call("to", 2, waits + what), line, _call("to", 2, None)]
                continue
            calls = isinstance(line.value, ast.Call) and not re.match(
                r"assert_|buf\w+ = (empty|reinterpret)", text
            )
            if calls and (places := [place for place, _ in found if place]):
                made.append(_call("to", 1, places[-1]))
        made.append(line)
    return made
