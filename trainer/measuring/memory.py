"""How much memory a run uses, at its peak and by stages of start-up; whether an error says that it ran out.

    stages = Stages(device)
    stages.add("model")                 # ends a stage and returns MiB at its peak
    reset_peak(device); peak(device)    # {"peak_alloc_mib": .., "peak_reserved_mib": ..}; on a CPU {"peak_rss_mib": ..}

On CUDA this is what torch's allocator has handed out or reserved; on a CPU the resident memory of the whole process,
Python and libraries among it, which does not compare with CUDA's figures.
"""

import os
import pickle
import re
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from trainer.terminal.text import grouped

CLEAR_REFS = Path("/proc/self/clear_refs")  # Linux: writing 5 sets VmHWM back to VmRSS
Device = torch.device | str


def is_cuda(device: Device) -> bool:
    return torch.device(device).type == "cuda"


def _resident(field: str) -> float:
    """Resident MiB: VmRSS (now) or VmHWM (peak). Without /proc (macOS) both are the peak since the process started."""
    with suppress(OSError, IndexError):
        return round(
            int(Path("/proc/self/status").read_text().partition(f"\n{field}:")[2].split()[0])
            / 2**10,
            1,
        )
    return round(
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        / (2**20 if sys.platform == "darwin" else 2**10),
        1,
    )


def reset_peak(device: Device) -> None:
    """Lets `peak` count from here. It frees nothing: what CUDA's allocator has cached stays in the reserved peak."""
    if is_cuda(device):
        torch.cuda.init()
        torch.cuda.reset_peak_memory_stats(device)
    with suppress(OSError):  # where it cannot be reset, `peak` says so
        CLEAR_REFS.write_text("5")


def peak(device: Device) -> dict[str, float | str]:
    """MiB at the peak since `reset_peak`; `peak_rss_note` says where a CPU's counts from the start of the process."""
    if is_cuda(device):
        top = {
            "alloc": torch.cuda.max_memory_allocated(device),
            "reserved": torch.cuda.max_memory_reserved(device),
        }
        return {f"peak_{kind}_mib": round(size / 2**20, 1) for kind, size in top.items()}
    notes = ["since the process started: no reset here"] * (not os.access(CLEAR_REFS, os.W_OK))
    notes += ["without those imports of the sweep that this run did not use"] * (
        "SWEEP_FORKED" in os.environ
    )
    return {
        "peak_rss_mib": _resident("VmHWM"),
        **({"peak_rss_note": "; ".join(notes)} if notes else {}),
    }


def highest(a: dict, b: dict) -> dict[str, float | str]:
    """The higher of two results of `peak`; `a` may be empty."""
    return b | {key: max(value, b[key]) for key, value in a.items() if isinstance(value, float)}


def memory_now(device: Device) -> float:
    """MiB in use now: allocated on CUDA, resident on a CPU."""
    return (
        round(torch.cuda.memory_allocated(device) / 2**20, 1)
        if is_cuda(device)
        else _resident("VmRSS")
    )


class Stages:
    """Memory by stages of starting up; `rows` of (name, MiB at the end of the stage, MiB at its own peak)."""

    def __init__(self, device: Device):
        self.device = device
        self.rows = []
        reset_peak(device)

    def add(self, name: str) -> float:
        """Ends a stage, begins the next one, and returns the peak of the one that ended, in MiB."""
        self.rows.append((name, memory_now(self.device), next(iter(peak(self.device).values()))))
        reset_peak(self.device)
        return self.rows[-1][2]

    def lines(self) -> list[str]:
        head = f"{'after':<12}{'allocated' if is_cuda(self.device) else 'resident':>12}{'peak':>12}  MiB"
        return [
            head,
            *(f"{name:<12}{grouped(now):>12}{grouped(top):>12}" for name, now, top in self.rows),
        ]


def out_of_memory(error: BaseException) -> bool:
    """Whether an exception or its cause says that memory ran out: a device's or the host's, not a kernel's shared."""
    says = r"out of memory|(can't|cannot) allocate memory|DefaultCPUAllocator: not enough memory|_STATUS_ALLOC_FAILED"
    says += "|MemoryError: |std::bad_alloc"
    says_so = isinstance(error, (RuntimeError, OSError)) and re.search(
        says, str(error), re.IGNORECASE
    )
    known = isinstance(error, (torch.OutOfMemoryError, MemoryError))
    return (
        known or bool(says_so) or (error.__cause__ is not None and out_of_memory(error.__cause__))
    )


@contextmanager
def recorded(path: str) -> Iterator[list[str]]:
    """Writes what CUDA's allocator does inside to `path`, which pytorch.org/memory_viz draws. Yields a list, to which
    the path is added at the end, or a line that says why it was not written."""
    lines = []
    torch.cuda.memory._record_memory_history(max_entries=200_000, stacks="python")
    try:
        yield lines
        try:
            dump_snapshot(path)
            lines.append(path)
        except OSError as error:
            lines.append(f"no snapshot of memory: {error}")
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def dump_snapshot(path: str) -> None:
    """Writes what CUDA's allocator holds and did, for pytorch.org/memory_viz. Its paths do not name the user's home."""
    snapshot = torch.cuda.memory._snapshot()
    home = os.path.expanduser("~/")
    entries = [entry for trace in snapshot["device_traces"] for entry in trace]
    entries += [
        entry for segment in snapshot["segments"] for entry in (segment, *segment["blocks"])
    ]
    for frame in {
        id(frame): frame for entry in entries for frame in entry.get("frames", ())
    }.values():
        if frame["filename"].startswith(home):
            frame["filename"] = f"~/{frame['filename'].removeprefix(home)}"
    with open(path, "wb") as file:
        pickle.dump(snapshot, file)
