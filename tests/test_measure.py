"""trainer/measuring/timing.py and memory.py: they report what happened, on a CPU for real, on CUDA from a stand-in.

    pytest tests/test_measure.py        # about 10 s, no GPU; with one the tests marked gpu run too
"""

import gzip
import json
import mmap
import re
import subprocess
import time
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from running import on_gpu

from trainer.measuring import memory, timing
from trainer.measuring.flops import utilisation
from trainer.measuring.memory import Stages, out_of_memory
from trainer.measuring.timing import Profile, StepTimer, stats
from trainer.step_costs import device_peak

needs_reset = pytest.mark.skipif("peak_rss_note" in memory.peak("cpu"), reason="no resettable high-water mark here")
MIB = 2**20


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA A100-SXM4-40GB", 312), ("NVIDIA A100-SXM4-80GB", 312), ("NVIDIA A100-PCIE-40GB", 312),
        ("NVIDIA A100 80GB PCIe", 312), ("A100-SXM4-40GB", 312),
        ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H200", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA H100 NVL", 835),
        ("NVIDIA GeForce RTX 4090", 165),
        *((name, None) for name in (
            "NVIDIA H20", "NVIDIA H800", "NVIDIA GH200 480GB", "NVIDIA GH200 120GB", "NVIDIA H200 NVL", "NVIDIA A10",
            "NVIDIA A10G", "NVIDIA A30", "NVIDIA A800-SXM4-80GB", "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
            "NVIDIA H100 80GB HBM3 MIG 3g.40gb", "NVIDIA GeForce RTX 4090 D", "NVIDIA GeForce RTX 4090 Laptop GPU",
            "NVIDIA RTX 4000 Ada Generation", "NVIDIA B200", "AMD Instinct MI300X", "CPU AMD EPYC, 2 threads", "")),
    ],
)  # fmt: skip
def test_a_peak_belongs_to_exactly_one_device_name(name, tflops):
    assert device_peak(name) == (tflops and tflops * 1e12)


def touched(mib):
    """Resident memory of its own: malloc may have as much at hand from the tests before."""
    block = mmap.mmap(-1, mib * MIB)
    for offset in range(0, len(block), mmap.PAGESIZE):
        block[offset] = 1
    return block


@needs_reset
def test_cpu_peak_rises_by_an_allocation_and_falls_back_after_a_reset():
    memory.reset_peak("cpu")
    before = memory.peak("cpu")["peak_rss_mib"]
    block = touched(200)
    assert memory.memory_now("cpu") >= before + 190
    del block
    held = memory.peak("cpu")["peak_rss_mib"]
    assert 190 <= held - before <= 230, (before, held)
    memory.reset_peak("cpu")
    after = memory.peak("cpu")["peak_rss_mib"]
    assert after <= held - 190, (held, after)


def test_a_peak_that_cannot_be_reset_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "CLEAR_REFS", tmp_path / "absent" / "clear_refs")
    memory.reset_peak("cpu")
    assert "since the process started" in memory.peak("cpu")["peak_rss_note"]


def test_without_proc_the_peak_is_that_of_getrusage(monkeypatch, tmp_path):
    linux = memory.peak("cpu")["peak_rss_mib"]
    monkeypatch.setattr(memory, "Path", lambda name: tmp_path / "absent")
    assert memory.memory_now("cpu") >= 0.9 * linux


@needs_reset
def test_stages_report_each_stage_with_its_own_peak():
    stages = Stages("cpu")
    touched(100)  # freed at once: in the peak of this stage, in no later one
    high = stages.add("model")
    low = stages.add("wrap")
    assert high - stages.rows[0][1] >= 90 and high - low >= 90, stages.rows
    assert [row[0] for row in stages.rows] == ["model", "wrap"]
    lines = stages.lines()
    assert "resident" in lines[0] and "MiB" in lines[0] and lines[1].startswith("model") and len(lines) == 3


def test_large_sizes_are_grouped_for_people():
    stages = Stages("cpu")
    stages.rows.append(("init", 14550.4, 20119.0))
    assert re.search(r"init +14'550 +20'119$", stages.lines()[1])


def test_excluded_and_failing_steps_never_enter_the_statistics():
    timer = StepTimer("cpu")
    for k in range(6):
        with timer.step(excluded=k < 2 or k == 4):
            time.sleep(0.2 if k < 2 or k == 4 else 0.002)
    assert len(timer.ms()) == 3 and all(2 <= ms < 190 for ms in timer.ms()), timer.ms()
    with timer.step(excluded=True):
        time.sleep(0.05)
    assert timer.last() >= 50 and len(timer.ms()) == 3  # `last` is for the log and sees every step
    with pytest.raises(ZeroDivisionError), timer.step():
        raise ZeroDivisionError
    assert len(timer.ms()) == 3
    assert stats(timer.ms())["n"] == 3


def test_stats_are_median_minimum_maximum_and_count():
    assert stats([3.0, 1.0, 2.0, 10.0]) == {"step_ms": 2.5, "step_ms_min": 1.0, "step_ms_max": 10.0, "n": 4}
    assert stats([]) == {"step_ms": None, "step_ms_min": None, "step_ms_max": None, "n": 0}


class FakeDevice:
    """A stream that runs behind its host: `now` is the host's clock, an event is passed once `reached` is past it."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        self.reached = 0.0
        self.waits = 0
        device = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                self.at = device.now

            def query(self):
                return self.at <= device.reached

            def synchronize(self):
                device.waits += 1
                device.reached = max(device.reached, self.at)

            def elapsed_time(self, end):
                assert self.query() and end.query(), "read before the device had passed both events"
                return end.at - self.at

        monkeypatch.setattr(torch.cuda, "Event", Event)


def test_on_cuda_no_step_waits_and_time_between_steps_is_not_counted(monkeypatch):
    device = FakeDevice(monkeypatch)
    timer = StepTimer("cuda:0")
    for k in range(5):
        with timer.step(excluded=k == 0):
            device.now += 10 + k
        device.now += 1000  # saving a checkpoint
    device.reached = 2015  # the device has passed steps 0 and 1
    assert timer.last() == 11
    assert device.waits == 0
    assert timer.ms() == [11, 12, 13, 14]
    assert device.waits == 1
    assert timer.last() == 14


def test_mfu_is_that_of_the_reference_setting():
    def mfu(flops, seconds, peak):
        return utilisation({"causal": flops}, seconds, peak)["mfu"]

    assert mfu(178.12e12, 0.360, device_peak("NVIDIA H200")) == pytest.approx(50.0, abs=0.05)
    assert mfu(178.12e12, 0.300, 989e12) == pytest.approx(60.0, abs=0.05)
    assert mfu(178.12e12, 0.257, 989e12) == pytest.approx(70.0, abs=0.1)
    assert mfu(178.12e12, 1.119, 312e12) == pytest.approx(51.0, abs=0.1)


def test_what_is_unknown_has_no_utilisation():
    flops = {"causal": 178.12e12, "palm": 191.32e12, "hardware": None}
    assert utilisation(flops, 0.36, 989e12) == {"mfu": 50.03, "mfu_palm": 53.74, "hfu": None}
    for arguments in ((flops, 0.36, None), (flops, None, 989e12), ({}, 0.36, 989e12)):
        assert utilisation(*arguments) == {"mfu": None, "mfu_palm": None, "hfu": None}


def git(folder, *command):
    who = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false")
    done = subprocess.run(["git", "-C", folder, *who, *command], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def test_the_commit_is_that_of_the_checkout_which_tracks_the_file(tmp_path, monkeypatch):
    for name in [n for n in timing.os.environ if n.startswith("GIT_")]:
        monkeypatch.delenv(name)
    unknown = {"commit": "unknown", "dirty": None}
    (tmp_path / "trainer").mkdir()
    (tmp_path / "results").mkdir()
    code = tmp_path / "trainer" / "code.py"
    row = tmp_path / "results" / "rows.jsonl"
    code.write_text("1\n")
    row.write_text("{}\n")
    assert timing.checkout(code) == unknown  # no checkout
    git(tmp_path, "init", "-q")
    assert timing.checkout(code) == unknown  # no commit
    git(tmp_path, "add", "results")
    git(tmp_path, "commit", "-qm", "rows")
    assert timing.checkout(code) == unknown  # somebody else's checkout: it does not hold this file
    git(tmp_path, "add", "trainer")
    git(tmp_path, "commit", "-qm", "code")
    sha = git(tmp_path, "rev-parse", "HEAD")
    assert timing.checkout(code) == {"commit": sha, "dirty": False}
    row.write_text("{}\n{}\n")
    (tmp_path / "notes.txt").write_text("scratch")
    assert timing.checkout(code) == {"commit": sha, "dirty": False}  # rows and untracked files are no change of code
    code.write_text("2\n")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))  # as inside a git hook
    assert timing.checkout(code) == {"commit": sha, "dirty": True}


def test_the_environment_names_code_and_machine():
    row = timing.environment("cpu")
    assert re.fullmatch(r"[0-9a-f]{40}|unknown", row["commit"])
    assert row["dirty"] in (True, False, None)
    assert (row["commit"] == "unknown") == (row["dirty"] is None)
    assert datetime.fromisoformat(row["date"]).utcoffset().total_seconds() == 0
    assert len(row["date"]) == 25
    assert row["torch"] == torch.__version__ and row["device"].startswith("CPU ") and "thread" in row["device"]
    assert {"cuda", "python", "clock_mhz", "clock_max_mhz", "power_limit_w"} <= row.keys()
    json.dumps(row, allow_nan=False)


@pytest.mark.parametrize(
    ("told", "expected"),
    [("1755, 1980, 700.00", (1755, 1980, 700)), ("345, 1980, [N/A]", (345, 1980, None)), (None, (None,) * 3),
     ("No devices were found", (None,) * 3)],
)  # fmt: skip
def test_clocks_are_read_by_uuid_and_none_where_nobody_tells(monkeypatch, told, expected):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1234-ab"))
    commands = []
    monkeypatch.setattr(timing, "_output", lambda *command: commands.append(command) or told)
    expected = dict(zip(("clock_mhz", "clock_max_mhz", "power_limit_w"), expected, strict=True))
    assert timing.clocks("cuda:0") == expected
    assert "--id=GPU-1234-ab" in commands[0]


def test_a_command_that_is_missing_fails_or_hangs_tells_nothing(monkeypatch):
    assert timing._output("no-such-command-anywhere") is None
    assert timing._output("false") is None
    assert timing._output("echo", "1") == "1"
    hang = subprocess.TimeoutExpired("nvidia-smi", 5)
    monkeypatch.setattr(subprocess, "run", lambda *a, timeout, **k: (_ for _ in ()).throw(hang))
    assert timing._output("nvidia-smi") is None


def chained(error, cause):
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("Tried to allocate 2 GiB"), True),
        (MemoryError(), True),
        (OSError(12, "Cannot allocate memory"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate"), True),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."), True),
        (RuntimeError("InternalTorchDynamoError: MemoryError: std::bad_alloc"), True),  # as Dynamo passes it on
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (chained(RuntimeError("backend failed"), torch.OutOfMemoryError("x")), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (RuntimeError("out of resource: shared memory, Required: 131072"), False),
        (OSError(28, "No space left on device"), False),
        (ValueError("out of memory"), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_running_out_of_memory_is_recognised(error, expected):
    assert out_of_memory(error) is expected


def test_running_out_of_memory_on_this_machine_is_recognised():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50, dtype=torch.uint8)
    assert out_of_memory(caught.value)


def read_trace(path):
    with gzip.open(path, "rt") as file:
        return {event.get("name") for event in json.load(file)["traceEvents"]}


def run_steps(profile, timer, steps):
    for k in range(steps):
        with timer.step(excluded=profile.covers(k)), profile.step(k):
            torch.ones(8) @ torch.ones(8)


def test_without_a_folder_nothing_is_profiled(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    profile = Profile(None, 0, 3, 0, "cpu")
    timer = StepTimer("cpu")
    run_steps(profile, timer, 3)
    profile.close()
    assert len(timer.ms()) == 3 and profile.paths == profile.notes == [] and not list(tmp_path.iterdir())


def test_a_profile_that_is_cut_short_is_written_all_the_same(tmp_path):
    ends = Profile(tmp_path, 0, 5, 1, "cpu")
    run_steps(ends, StepTimer("cpu"), 2)  # the run is over before the profile
    ends.close()
    assert {"step 0", "step 1"} <= read_trace(tmp_path / "rank1.trace.json.gz")
    fails = Profile(tmp_path, 0, 5, 2, "cpu")
    with pytest.raises(MemoryError), fails.step(0):
        raise MemoryError
    assert "step 0" in read_trace(tmp_path / "rank2.trace.json.gz")
    assert fails.paths


def test_a_profile_that_cannot_be_written_ends_no_run(tmp_path):
    (tmp_path / "file").write_text("")
    profile = Profile(tmp_path / "file" / "folder", 1, 1, 0, "cpu")
    timer = StepTimer("cpu")
    run_steps(profile, timer, 3)
    assert len(timer.ms()) == 2 and not profile.paths and "could not write" in profile.notes[-1]


@pytest.mark.parametrize("nsys", [False, True])
def test_on_cuda_the_steps_are_ranges_inside_one_capture(monkeypatch, tmp_path, nsys):
    calls = []

    def note(name):
        return lambda *args, **kwargs: calls.append(name)

    @contextmanager
    def nvtx(name):
        calls.append(f"push {name}")
        yield
        calls.append(f"pop {name}")

    def export(path):
        calls.append("trace written")
        Path(path).write_text("{}")

    trace = SimpleNamespace(start=note("trace on"), stop=note("trace off"), export_chrome_trace=export)
    monkeypatch.setattr(timing, "profile", lambda activities: calls.append("trace made") or trace)
    monkeypatch.setattr(torch.cuda, "synchronize", note("wait"))
    monkeypatch.setattr(torch.cuda.nvtx, "range", nvtx)
    monkeypatch.setattr(timing, "dump_snapshot", note("snapshot"))
    history = {"all": "history on", None: "history off"}
    monkeypatch.setattr(
        torch.cuda.memory, "_record_memory_history", lambda enabled="all", **kw: calls.append(history[enabled])
    )
    cudart = SimpleNamespace(cudaProfilerStart=note("capture on"), cudaProfilerStop=note("capture off"))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "1") if nsys else monkeypatch.delenv(
        "NSYS_PROFILING_SESSION_ID", raising=False
    )
    profile = Profile(tmp_path, 1, 2, 3, "cuda:0")
    for k in range(4):
        with profile.step(k):
            calls.append(f"run {k}")
    traced = [] if nsys else ["trace"]
    ran = [each for k in (1, 2) for each in (f"push step {k}", f"run {k}", f"pop step {k}")]
    assert calls == (
        ["run 0", *[f"{t} made" for t in traced], "wait", "history on", "capture on", *[f"{t} on" for t in traced]]
        + [*ran, "wait", "capture off", *[f"{t} off" for t in traced], "snapshot", *[f"{t} written" for t in traced]]
        + ["history off", "run 3"]
    )
    names = ["memory.pickle", *(f"{t}.json.gz" for t in traced)]
    assert profile.paths == [f"{tmp_path}/rank3.{name}" for name in names]
    assert profile.notes == (["no trace: nsys holds CUPTI"] if nsys else [])


@on_gpu
def test_on_a_gpu_memory_time_and_profile_are_real(tmp_path):
    stages = Stages("cuda")
    timer = StepTimer("cuda")
    profile = Profile(tmp_path, 1, 1, 0, "cuda")
    block = torch.ones(64 * MIB // 4, device="cuda")
    assert stages.add("block") >= 64
    assert memory.memory_now("cuda") >= 64
    for k in range(4):
        with timer.step(excluded=profile.covers(k)), profile.step(k):
            torch.cuda._sleep(20_000_000)  # cycles: about 10 ms
            block.mul_(2)
    assert len(timer.ms()) == 3 and all(1 < ms < 1000 for ms in timer.ms()), timer.ms()
    top = memory.peak("cuda")
    assert top["peak_reserved_mib"] >= top["peak_alloc_mib"] >= 64
    written = sorted(path.name for path in tmp_path.iterdir())
    assert written == ["rank0.memory.pickle", "rank0.trace.json.gz"], profile.notes
    assert "step 1" in read_trace(tmp_path / "rank0.trace.json.gz")
    assert timing.environment("cuda")["device"] == torch.cuda.get_device_name()
