"""What a run costs: memory, time, MFU, and the machine that it ran on. Prints nothing; writes nothing but profiles.

    stages, timer = Stages(device), StepTimer(device)
    profile = Profile(directory, first=3, count=2, rank=rank, device=device)
    for k in range(steps):
        with timer.step(excluded=k < warmup or profile.covers(k)), profile.step(k):
            train_step()
    row = environment(device) | stats(timer.ms()) | peak(device)

Units: MiB (2**20 bytes), ms, FLOP/s, MFU in percent. CPU memory is what is resident: not comparable with CUDA's.
"""

import os
import pickle
import re
import resource
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

# Dense bf16 FLOP/s by the whole device name: a MIG slice, an RTX 4090 D, an H200 NVL or a GH200 has another peak than
# the name that it contains. A device that is not listed has no MFU.
PEAKS = {
    r"A100-(SXM4|PCIE)-(40|80)GB|A100 80GB PCIe": 312e12,
    r"H100 80GB HBM3|H200": 989e12,  # both SXM
    r"H100 PCIe": 756e12, r"H100 NVL": 835e12,
    r"GeForce RTX 4090": 165e12,  # fp32 accumulate
}
CLEAR_REFS = Path("/proc/self/clear_refs")  # Linux: writing 5 sets VmHWM back to VmRSS
Device = torch.device | str


def device_peak(name: str) -> float | None:
    """Dense bf16 FLOP/s of a device named as `torch.cuda.get_device_name` names it; None where it is not known."""
    return next((flops for names, flops in PEAKS.items() if re.fullmatch(f"(NVIDIA )?({names})", name)), None)


def _is_cuda(device: Device) -> bool:
    return torch.device(device).type == "cuda"


def _resident(field: str) -> float:
    """MiB of VmRSS (now) or VmHWM (peak); without /proc (macOS) both are the peak since the process started."""
    with suppress(OSError, IndexError):
        return round(int(Path("/proc/self/status").read_text().partition(f"\n{field}:")[2].split()[0]) / 2**10, 1)
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10), 1)


def reset_peak(device: Device) -> None:
    """Let `peak` count from here. Frees nothing: what CUDA's allocator has cached stays in the reserved peak."""
    if _is_cuda(device):
        torch.cuda.init()
        torch.cuda.reset_peak_memory_stats(device)
    with suppress(OSError):  # `peak` says so
        CLEAR_REFS.write_text("5")


def peak(device: Device) -> dict[str, float | str]:
    """MiB at the peak since `reset_peak`: peak_alloc_mib and peak_reserved_mib on CUDA, peak_rss_mib on a CPU. A
    `peak_rss_note` says where the mark could not be reset and counts from the start of the process."""
    if _is_cuda(device):
        top = {"alloc": torch.cuda.max_memory_allocated(device), "reserved": torch.cuda.max_memory_reserved(device)}
        return {f"peak_{kind}_mib": round(size / 2**20, 1) for kind, size in top.items()}
    note = {} if os.access(CLEAR_REFS, os.W_OK) else {"peak_rss_note": "since the process started: no reset here"}
    return {"peak_rss_mib": _resident("VmHWM"), **note}


def memory_now(device: Device) -> float:
    """MiB in use now: allocated on CUDA, resident on a CPU."""
    return round(torch.cuda.memory_allocated(device) / 2**20, 1) if _is_cuda(device) else _resident("VmRSS")


class Stages:
    """Memory after each stage of starting up: `rows` of (name, MiB now, MiB at the stage's own peak)."""

    def __init__(self, device: Device):
        self.device, self.rows = device, []
        reset_peak(device)

    def add(self, name: str) -> float:
        """End a stage, return its peak in MiB (that of the first step is the row's `first_step_peak_mib`), reset."""
        self.rows.append((name, memory_now(self.device), next(iter(peak(self.device).values()))))
        reset_peak(self.device)
        return self.rows[-1][2]

    def lines(self) -> list[str]:
        head = f"{'after':<12}{'allocated' if _is_cuda(self.device) else 'resident':>12}{'peak':>12}  MiB"
        return [head, *(f"{name:<12}{now:>12,.0f}{top:>12,.0f}".replace(",", "'") for name, now, top in self.rows)]


class StepTimer:
    """Milliseconds per step. On CUDA two events on the current stream enclose it: the host need not wait, and what
    happens between steps (logging, saving) does not count. A step that raises is not recorded."""

    def __init__(self, device: Device):
        self.cuda, self._done, self._pending = _is_cuda(device), [], deque()  # (ms, excluded), (start, end, excluded)

    @contextmanager
    def step(self, excluded: bool = False) -> Iterator[None]:
        """Time one step. `excluded`: a warm-up or profiled step, which `last` sees and `ms` does not."""
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
        """ms of the newest step that the device has finished: the step just run, if its loss was read after it."""
        while self._pending and self._pending[0][1].query():  # a query does not wait
            start, end, excluded = self._pending.popleft()
            self._done.append((start.elapsed_time(end), excluded))
        return self._done[-1][0] if self._done else None

    def ms(self) -> list[float]:
        """ms of every step that counts, in order. Waits for the device: for after the last step."""
        if self._pending:
            self._pending[-1][1].synchronize()
        self.last()
        return [ms for ms, excluded in self._done if not excluded]


def stats(ms: list[float]) -> dict[str, float | int | None]:
    """Median, minimum and maximum (ms; None of no steps) and the number of steps."""
    reduce = {"step_ms": statistics.median, "step_ms_min": min, "step_ms_max": max}
    return {key: round(f(ms), 3) if ms else None for key, f in reduce.items()} | {"n": len(ms)}


def mfu(flops_per_step: float | None, seconds: float | None, peak: float | None) -> float | None:
    """Percent of `peak` (FLOP/s of one device) that `flops_per_step` (of one device) in `seconds` amount to."""
    return round(100 * flops_per_step / seconds / peak, 2) if flops_per_step and seconds and peak else None


def utilisation(flops: dict[str, float | None], seconds: float | None, peak: float | None) -> dict[str, float | None]:
    """`mfu` of the three conventions, None where unknown. `flops` of one step on one device: `causal` attention core,
    `palm` with the whole core (arXiv 2204.02311, appendix B), `hardware` with everything recomputed."""
    kinds = (("mfu", "causal"), ("mfu_palm", "palm"), ("hfu", "hardware"))
    return {key: mfu(flops.get(kind), seconds, peak) for key, kind in kinds}


def _output(*command: str) -> str | None:
    """What a command prints; None where it is missing, fails or takes over 5 seconds."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}  # git hooks set GIT_DIR for their children
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, check=True, timeout=5, env=env).stdout.decode().strip()


def checkout(file: str | Path = __file__) -> dict[str, str | bool | None]:
    """`commit`: sha of the checkout that tracks `file` or "unknown"; `dirty`: tracked files differ from it, or None."""
    git = ("git", "--no-optional-locks", "-C", str(Path(file).resolve().parent))
    sha = _output(*git, "rev-parse", "HEAD")
    if not sha or not _output(*git, "ls-files", "--", Path(file).name):
        return {"commit": "unknown", "dirty": None}
    changed = _output(*git, "status", "--porcelain", "-uno", "--", ":(top)", ":(top,exclude)results")  # not by rows
    return {"commit": sha, "dirty": None if changed is None else bool(changed)}


def clocks(device: Device) -> dict[str, float | None]:
    """SM clock now (telling right after work only) and at most, MHz, and power limit, W; None where nobody tells."""
    keys = {"clock_mhz": "clocks.sm", "clock_max_mhz": "clocks.max.sm", "power_limit_w": "power.limit"}
    query = [f"--query-gpu={','.join(keys.values())}", "--format=csv,noheader,nounits"]
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None) if _is_cuda(device) else None
    text = (uuid and _output("nvidia-smi", f"--id=GPU-{uuid}", *query) or "") + ",,"
    return {k: float(v) if re.fullmatch(r" *[\d.]+", v) else None for k, v in zip(keys, text.split(","), strict=False)}


def environment(device: Device | None = None) -> dict:
    """What a row says about code and machine. `device` None: the current CUDA device, or else the CPU."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    cpu = re.search(r"^model name\s*:\s*(.+)$|\Z", info, re.MULTILINE)[1] or os.uname().machine
    name = torch.cuda.get_device_name(device) if _is_cuda(device) else f"CPU {cpu}, {torch.get_num_threads()} threads"
    return {"date": time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime()), **checkout(), "torch": torch.__version__,
            "cuda": torch.version.cuda, "python": sys.version.split()[0], "device": name, **clocks(device)}


def out_of_memory(error: BaseException) -> bool:
    """Whether an exception, or one that it was raised from, says that memory ran out: torch's allocators, cuBLAS and
    cuDNN without room for a workspace, the operating system. Too little shared memory for a kernel is not that."""
    says = r"out of memory|(can't|cannot) allocate memory|DefaultCPUAllocator: not enough memory|_STATUS_ALLOC_FAILED"
    says += "|MemoryError: |std::bad_alloc"
    told = isinstance(error, (RuntimeError, OSError)) and re.search(says, str(error), re.IGNORECASE)
    known = isinstance(error, (torch.OutOfMemoryError, MemoryError))
    return known or bool(told) or (error.__cause__ is not None and out_of_memory(error.__cause__))


def dump_snapshot(path: str) -> None:
    """What CUDA's allocator holds and did, for pytorch.org/memory_viz; the files in its stacks are named from ~ on."""
    snapshot, home = torch.cuda.memory._snapshot(), os.path.expanduser("~/")
    entries = [entry for trace in snapshot["device_traces"] for entry in trace]
    entries += [entry for segment in snapshot["segments"] for entry in (segment, *segment["blocks"])]
    for frame in {id(frame): frame for entry in entries for frame in entry.get("frames", ())}.values():
        if frame["filename"].startswith(home):
            frame["filename"] = f"~/{frame['filename'].removeprefix(home)}"
    with open(path, "wb") as file:
        pickle.dump(snapshot, file)


class Profile:
    """`--profile DIR`: a close look at `count` steps from step `first` on; without a directory it does nothing. Writes
    rank<r>.trace.json.gz (perfetto.dev) and, on CUDA, rank<r>.memory.pickle (pytorch.org/memory_viz). There the steps
    are NVTX ranges between cudaProfilerStart and -Stop, so that `nsys profile --capture-range=cudaProfilerApi` records
    them alone; under nsys there is no trace: CUPTI serves only one. `paths` says what was written, `notes` what not."""

    def __init__(self, directory: str | Path | None, first: int, count: int, rank: int, device: Device):
        self.stem, self.cuda, self._session = f"{directory}/rank{rank}", _is_cuda(device), None
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
        if self._session is None:
            self._session = self._record()
            next(self._session)
        with ExitStack() as ending:
            ending.callback(self.close)
            with torch.cuda.nvtx.range(f"step {k}") if self.cuda else nullcontext(), record_function(f"step {k}"):
                yield
            if k != self.steps[-1]:
                ending.pop_all()  # stay open for the next step

    def close(self) -> None:
        """Stop and write. The last covered step does it; call it where a run may end before that."""
        session, self._session = self._session or iter(()), None
        next(session, None)

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
            files[f"{self.stem}.trace.json.gz"] = trace.export_chrome_trace
        for path, write in files.items():
            try:
                os.makedirs(os.path.dirname(path), exist_ok=True)
                write(path)
                self.paths.append(path)
            except (OSError, RuntimeError) as error:  # a profile that cannot be written ends no run
                self.notes.append(f"could not write {path}: {error}")
        if self.cuda:
            torch.cuda.memory._record_memory_history(enabled=None)
