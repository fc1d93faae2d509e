"""How long steps take, the machine they ran on, and profiles of a few of them.

    timer = StepTimer(device)
    profile = Profile(directory, first=3, count=2, rank=rank, device=device)
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
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from trainer.profiling.memory import Device, dump_snapshot, is_cuda


def cpu_seconds() -> float:
    """Of this process and of children that have ended: with TORCHINDUCTOR_COMPILE_THREADS=1 also the C++ compiler,
    which else runs in workers that live on."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


class StepTimer:
    """Milliseconds per step, without what happens between steps (logging, saving). On CUDA two events on the current
    stream enclose a step, so that the host need not wait. A step that raises is not recorded."""

    def __init__(self, device: Device):
        self.cuda, self._done, self._pending = is_cuda(device), [], deque()  # (ms, excluded), (start, end, excluded)

    @contextmanager
    def step(self, excluded: bool = False) -> Iterator[None]:
        """Times one step. excluded: it is a step of warm-up or profiled; `last` tells its time, `ms` leaves it out."""
        if self.cuda:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
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
    env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}  # a git hook sets GIT_DIR to its own
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, check=True, timeout=5, env=env).stdout.decode().strip()


def checkout(file: str | Path = __file__) -> dict[str, str | bool | None]:
    """commit: that of the checkout which tracks `file`, or "unknown"; dirty: whether files outside results/ differ."""
    git = ("git", "--no-optional-locks", "-C", str(Path(file).resolve().parent))
    sha = _output(*git, "rev-parse", "HEAD")
    if not sha or not _output(*git, "ls-files", "--", Path(file).name):
        return {"commit": "unknown", "dirty": None}
    changed = _output(*git, "status", "--porcelain", "-uno", "--", ":(top)", ":(top,exclude)results")  # where rows go
    return {"commit": sha, "dirty": None if changed is None else bool(changed)}


def clocks(device: Device) -> dict[str, float | None]:
    """The SM clock (call it right after work), its limit, the power limit in watts; None where nvidia-smi has none."""
    keys = {"clock_mhz": "clocks.sm", "clock_max_mhz": "clocks.max.sm", "power_limit_w": "power.limit"}
    query = [f"--query-gpu={','.join(keys.values())}", "--format=csv,noheader,nounits"]
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None) if is_cuda(device) else None
    text = (uuid and _output("nvidia-smi", f"--id=GPU-{uuid}", *query) or "") + ",,"
    return {k: float(v) if re.fullmatch(r" *[\d.]+", v) else None for k, v in zip(keys, text.split(","), strict=False)}


def environment(device: Device) -> dict:
    """What a row of results says about code and machine."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    cpu = re.search(r"^model name\s*:\s*(.+)$|\Z", info, re.MULTILINE)[1] or os.uname().machine
    name = torch.cuda.get_device_name(device) if is_cuda(device) else f"CPU {cpu}, {torch.get_num_threads()} threads"
    return {"date": time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime()), **checkout(), "torch": torch.__version__,
            "cuda": torch.version.cuda, "python": sys.version.split()[0], "device": name, **clocks(device)}


def _write_trace(trace: profile, path: str) -> None:
    """The Chrome trace, gzipped, without the names of the host and of a temporary file, which may lie in a home."""
    with tempfile.TemporaryDirectory() as folder:
        whole = os.path.join(folder, "trace.json")
        trace.export_chrome_trace(whole)
        with open(whole, "rb") as lines, gzip.open(path, "wb") as out:
            out.writelines(re.sub(rb'"(host_name|traceName)": "[^"]*"', rb'"\1": ""', line) for line in lines)


class Profile:
    """`--profile DIR`: a close look at `count` steps from step `first` on; without a directory it does nothing. Writes
    rank<r>.trace.json.gz (perfetto.dev) and, on CUDA, rank<r>.memory.pickle (pytorch.org/memory_viz). `nsys profile
    --capture-range=cudaProfilerApi` records these steps alone. `paths` says what was written, `notes` what not."""

    def __init__(self, directory: str | Path | None, first: int, count: int, rank: int, device: Device):
        self.stem, self.cuda, self._recording = f"{directory}/rank{rank}", is_cuda(device), ExitStack()
        self.steps = range(first, first + count if directory else first)
        self.nsys = self.cuda and "NSYS_PROFILING_SESSION_ID" in os.environ
        absent = "trace: nsys holds CUPTI" if self.nsys else "" if self.cuda else "memory snapshot: it needs CUDA"
        self.paths, self.notes = [], [f"no {absent}"] if directory and absent else []

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
            with torch.cuda.nvtx.range(f"step {k}") if self.cuda else nullcontext(), record_function(f"step {k}"):
                yield
            if k != self.steps[-1]:
                ending.pop_all()  # stay open for the next step

    def close(self) -> None:
        """Stop and write. The last covered step does it; call it where a run may end before that."""
        self._recording.close()

    @contextmanager
    def _record(self) -> Iterator[None]:
        activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if self.cuda else [ProfilerActivity.CPU]
        trace, files = None if self.nsys else profile(activities=activities), {}
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
