"""How long steps take, the machine they ran on, and profiles of a few of them.

timer = StepTimer(device)
profile = Profile(directory, first=3, count=2, rank=rank, device=device)
profile.ranges = partial(named_ranges, step, units=True)       # of phases and units in the trace
for k in range(steps):
    with timer.step(excluded=k < warmup or profile.covers(k)), profile.step(k):
        train_step()
row = environment(device) | stats(timer.ms())
"""

import gzip
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
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

import simple_fsdp
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
        self.ranges: Callable[[], AbstractContextManager] = nullcontext  # around a profiled step

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
                self.ranges(),
            ):
                yield
            if k != self.steps[-1]:
                ending.pop_all()  # stay open for the next step

    def close(self) -> None:
        """Stop and write. The last covered step does it; call it where a run may end before that."""
        self._recording.close()

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


PHASES = dict(fwd="forward", bwd="backward", reduce="gradient reduction", step="optimizer")


class OpenRange:
    """At most one open range of a trace."""

    def __init__(self):
        self.name: str | None = None
        self._range: record_function | None = None

    def begin(self, name: str) -> None:
        """Ends the range that is open, if there is one, and begins another."""
        self.end()
        self.name = name
        self._range = record_function(name)
        self._range.__enter__()

    def end(self) -> None:
        if self._range is not None:
            self._range.__exit__(None, None, None)
        self.name = self._range = None


@contextmanager
def named_ranges(step, units: bool) -> Iterator[None]:
    """Inside it the phases of a step (trainer.step.Step) are ranges of a trace. units: so are the model's units, in
    forward and backward. Their hooks must not be there while a model is compiled: it would be compiled once more."""
    phase = OpenRange()
    backward = OpenRange()

    def begin_phase(name: str, grads: list) -> None:
        backward.end()
        phase.begin(PHASES[name])

    with step.watch_phases(begin_phase), ExitStack() as stack:
        stack.callback(phase.end)
        stack.callback(backward.end)
        for name in simple_fsdp.units_of(step.model) if units else ():
            _name_unit(name, step.model.get_submodule(name), backward, stack)
        yield


def _name_unit(name: str, unit: nn.Module, backward: OpenRange, stack: ExitStack) -> None:
    """Opens a range around the unit's forward, and around its backward from the gradient of its first output to that of
    its first input, until `stack` is closed. On CUDA both come on the thread of backward."""
    forward = []

    def begin(module: nn.Module, args: tuple) -> None:
        forward.append(record_function(name))
        forward[-1].__enter__()
        _on_gradient(args, lambda: backward.end() if backward.name == name else None)

    def end(module: nn.Module, args: tuple, output: Any) -> None:
        _on_gradient(output, lambda: backward.begin(name))
        forward.pop().__exit__(None, None, None)

    stack.callback(unit.register_forward_pre_hook(begin, prepend=True).remove)
    # Also where forward raises: a recomputation ends so once it has what backward needs.
    stack.callback(unit.register_forward_hook(end, always_call=True).remove)


def _on_gradient(values: Any, function: Callable[[], None]) -> None:
    """Calls `function` when backward has the gradient of the first of `values`."""
    first = values[0] if isinstance(values, tuple) and values else values
    if isinstance(first, torch.Tensor) and first.requires_grad and torch.is_grad_enabled():
        first.register_hook(lambda grad: function())
