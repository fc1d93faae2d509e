"""trainer/experiments/sweep.py: every cell leaves a row, whatever its end; a second call runs what has none."""

import csv
import functools
import json
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import fields, replace
from pathlib import Path

import pytest
from test_sinks import logged, tables

from trainer import config
from trainer.experiments import sweep

ROOT = Path(__file__).resolve().parents[1]
SWEEP = [sys.executable, "-m", "trainer.experiments.sweep"]

# Stands in for main.py: --seed says how it ends; it counts its starts in `starts`.
PROGRAM = """
import json, os, signal, subprocess, sys, time
flags = dict(zip(sys.argv[1:], sys.argv[2:]))
how, rank = flags.get("--seed", "ok"), os.environ.get("RANK", "0")
def row(outcome, end="\\n"):
    with open(flags["--results"], "a") as file:
        file.write(json.dumps({"cell": os.environ["SWEEP_CELL"], "outcome": outcome, "step_ms": 1234.5}) + end)
open("starts", "a").write(how + "\\n")
if how == "ok" and rank == "0": row("ok")
if how == "oom": row("OOM bwd"); sys.exit(6)
if how == "badshape": sys.exit("error: --grouping 4: must divide the 6 heads")
if how == "caught": row("failed: ValueError: no"); sys.exit(1)
if how == "raise": raise ValueError("width 7")
if how == "silent": sys.exit(0)
if how == "rank1":
    print(f"error: rank {rank}: OOM bwd: no room; lower --batch", flush=True)
    time.sleep(60) if rank == "0" else sys.exit(6)
if how == "starved":
    with open("vmstat", "w") as file: file.write("oom_kill 8\\n")
    os.kill(os.getpid(), signal.SIGKILL) if flags.get("--depth") != "1" else sys.exit("error: no")
if how == "logged":
    from trainer.experiments.logging import Sinks
    sinks = Sinks(flags["--results"], flags["--wandb"], flags["--group"], total_steps=1)
    sinks.step({"step": 1, "loss": 2.5})
    sinks.row({"cell": os.environ["SWEEP_CELL"], "outcome": "ok", "loss": 2.5, "hf_token": "sesame"})
    sinks.close()
if how == "kill": print("before"); os.kill(os.getpid(), signal.SIGKILL)
if how == "torn": open(flags["--results"], "a").write('{"cell": "'); os.kill(os.getpid(), signal.SIGKILL)
if how == "hang":
    signal.signal(signal.SIGTERM, lambda *_: os._exit(1))
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    open("pids", "w").write(f"{os.getpid()} {child.pid}")
    time.sleep(60)
if how == "rowhang": row("ok"); time.sleep(60)
"""


# Stands in for main.py in the flow of whole axes, and TORCHRUN for torch.distributed.run, which takes seconds to start.
INSTANT = """
import json, os, signal, subprocess, sys, time
flags, cell = dict(zip(sys.argv[1:], sys.argv[2:])), os.environ["SWEEP_CELL"]
with open("starts", "a") as file: file.write(cell + "\\n")
if "--depth 4" in cell and not os.path.exists("pid"):
    with open("pid", "w") as file: file.write(str(os.getpid()))
    time.sleep(60)
if flags["--width"] == "96": sys.exit("error: --grouping 4: must divide the 6 heads (--width 96 / --head-dim 16)")
world = f"{flags['--world']}(sim {flags['--link']})" if "--world" in flags else int(os.environ.get("WORLD_SIZE", 1))
with open(flags["--results"], "a") as file:
    file.write(json.dumps({"cell": cell, "world": world, "outcome": "ok", "step_ms": 1.5}) + "\\n")
"""
TORCHRUN = """
import os, runpy, sys
os.environ["WORLD_SIZE"] = sys.argv[2].removeprefix("--nproc-per-node=")
assert sys.argv[1] == "--standalone"
sys.argv[:] = sys.argv[3:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def environment(*folders, **more):
    """That of a sweep in a process of its own: neither settings nor W&B keys of whoever runs the tests."""
    ours = {k: v for k, v in os.environ.items() if k not in ("NPROC", "CELL_TIMEOUT") and not k.startswith("WANDB_")}
    return ours | {"PYTHONPATH": os.pathsep.join(map(str, (*folders, ROOT)))} | more


@pytest.fixture
def call(tmp_path):
    """call(lines, *options) -> (exit code, stdout and stderr, rows, how often each kind of cell was started)."""
    (tmp_path / "program.py").write_text(PROGRAM)

    def call(lines, *options, start=subprocess.run, **env):
        (tmp_path / "cells.txt").write_text("\n".join(lines))
        given = ["cells.txt", "--program", "program.py", "--results", "rows.jsonl", *options]
        done = start([*SWEEP, *given], cwd=tmp_path, env=environment(tmp_path, **env),
                     stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if start is not subprocess.run:
            return done
        starts = (tmp_path / "starts").read_text().split() if (tmp_path / "starts").exists() else []
        return done.returncode, done.stdout, rows(tmp_path / "rows.jsonl"), {how: starts.count(how) for how in starts}

    return call


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []


def seeds(*hows):
    return [f"--seed {how}" for how in hows]


def alive(pid):
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_every_end_of_a_cell_leaves_one_row(call):
    code, out, found, _ = call(seeds("ok", "oom", "badshape", "caught", "raise", "silent", "kill", "torn", "rowhang"),
                               "--timeout", "3")
    outcomes = {row["cell"].split()[-1]: row["outcome"] for row in found}
    assert code == 1
    assert len(found) == 9
    assert outcomes == {
        "ok": "ok", "oom": "OOM bwd", "badshape": "badshape", "caught": "failed: ValueError: no",
        "raise": "failed: exit 1: ValueError: width 7", "silent": "failed: exit 0 without a row",
        "kill": "failed: exit -9 (SIGKILL): before", "torn": "failed: exit -9 (SIGKILL): no output", "rowhang": "ok",
    }
    assert "| 1 | --seed ok | ok | 1'234.5 |" in out
    assert "5 of 9 cells without a result" in out


def test_the_row_of_a_dead_cell_says_what_it_was(call):
    _, _, [row], _ = call(["nproc=1 --seed kill --depth 3 --loss chunked --no-reshard"])
    assert row["cell"] == "nproc=1 --depth 3 --loss chunked --no-reshard --seed kill"
    assert (row["depth"], row["loss_kind"], row["reshard"], row["world"]) == (3, "chunked", False, 1)
    assert {"date", "commit", "torch", "flags"} <= row.keys()


def test_the_row_of_a_dead_cell_holds_its_whole_setting(monkeypatch):
    """That of main.py, also where the shape is bad; what main.py does not accept is kept as it was given."""
    monkeypatch.setattr(sweep, "gpus", lambda: 0)
    flags = sweep.failed_row("nproc=1 --depth 3 --loss chunked --lr 1e-3 --no-reshard", "timeout")["flags"]
    assert flags == config.setting(resolved("nproc=1 --depth 3 --loss chunked --lr 1e-3 --no-reshard", "cpu")[0])
    row = sweep.failed_row("nproc=1 --width 96 --min-shard-mib 0.5", "exit 1: error: --grouping 4: must divide")
    assert (row["outcome"], row["min_shard_mib"]) == ("badshape", 0.5)
    assert (row["flags"]["width"], row["flags"]["vocab"]) == (96, 256)
    other = sweep.failed_row("nproc=1 --no-such-flag --depth 3", "timeout")
    assert other["flags"] | {"such_flag": False, "depth": 3} == other["flags"]
    assert (other["flags"]["seed"], other["depth"]) == (0, 3)
    assert sweep.failed_row("nproc=1 --depth 3", "timeout", {"depth": 3, "own": 1})["flags"] == {"depth": 3, "own": 1}


def test_a_cell_over_its_time_is_ended_with_all_its_processes(call, tmp_path):
    code, _, [row], _ = call(seeds("hang"), "--timeout", "1")
    assert (code, row["outcome"]) == (1, "failed: timeout")
    if Path("/proc/self").exists():
        pids, end = (tmp_path / "pids").read_text().split(), time.monotonic() + 10
        while any(map(alive, pids)) and time.monotonic() < end:  # a kill takes a moment where the cores are busy
            time.sleep(0.05)
        assert not [pid for pid in pids if alive(pid)]


def test_a_cell_cut_short_by_the_budget_is_not_counted(call):
    code, out, found, starts = call(seeds("ok", "hang", "oom"), "--budget", "1.5")
    assert (code, starts) == (1, {"ok": 1, "hang": 1})
    assert [row["outcome"] for row in found] == ["ok"]
    assert "cut short" in out and "2 of 3 cells" in out


def test_the_second_call_runs_what_is_missing_then_what_failed(call):
    call(seeds("ok", "raise", "oom"))
    code, out, found, starts = call(["--seed raise", "--seed=ok # the same cell", "--seed badshape", "--seed oom"])
    assert starts == {"ok": 1, "raise": 2, "oom": 1, "badshape": 1}
    assert [row["outcome"].split(":")[0] for row in found] == ["ok", "failed", "OOM bwd", "badshape", "failed"]
    assert "4 cells, 2 finished before" in out
    code, out, _, starts = call(seeds("ok", "oom"))
    assert (code, starts["ok"], starts["oom"]) == (0, 1, 1)


def wait_for(there, seconds=60):
    until = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < until, "it never happened"
        time.sleep(0.05)


def test_every_table_is_filled_once_whatever_kills_the_sweep(tmp_path):
    """`all --small`, kill -9 in the middle of a cell, the same call again, and once more."""
    (tmp_path / "torch" / "distributed").mkdir(parents=True)
    for name, text in (("__init__.py", ""), ("distributed/__init__.py", ""), ("distributed/run.py", TORCHRUN)):
        (tmp_path / "torch" / name).write_text(text)
    (tmp_path / "instant.py").write_text(INSTANT)
    command = [*SWEEP, "all", "--small", "--nproc", "2", "--program", "instant.py"]
    how = dict(cwd=tmp_path, env=environment(tmp_path), text=True)
    tables = sweep.studies("all", True, 2, [])
    cells = list(dict.fromkeys(cell for own in tables.values() for cell in own))
    pid, results = tmp_path / "pid", tmp_path / "results" / "sweep-all-small.jsonl"

    killed = subprocess.Popen(command, stdout=subprocess.DEVNULL, **how)
    wait_for(lambda: pid.exists() and pid.read_text())
    killed.kill()
    killed.wait()
    before = [row["cell"] for row in rows(results)]
    hung = next(cell for cell in cells if "--depth 4" in cell)
    assert 3 <= len(before) < len(cells) and hung not in before
    if Path("/proc/self").exists():  # the cell follows its sweep
        wait_for(lambda: not alive(pid.read_text()), 20)

    for finished in (len(before), len(cells)):
        done = subprocess.run(command, stdout=subprocess.PIPE, **how)
        assert (done.returncode, f"{len(cells)} cells, {finished} finished before" in done.stdout) == (0, True)
        assert sorted(row["cell"] for row in rows(results)) == sorted(cells), "one row for each"
        starts = (tmp_path / "starts").read_text().splitlines()
        assert {cell: starts.count(cell) for cell in starts} == {cell: 1 + (cell == hung) for cell in cells}
        shown = done.stdout.split("\n## ")[1:]
        assert [section.split()[0] for section in shown] == list(tables) and "not run" not in done.stdout
        for section, own in zip(shown, tables.values(), strict=True):
            assert section.count("\n| ") - 1 == len(own), section  # the head
    assert shown[list(tables).index("width")].count("| badshape |") == 1
    assert len(re.findall(r"^\| 8\(sim 4090-pcie\) \| [^|]*--min-shard-mib", done.stdout, re.M)) == 2
    assert re.search(r"^\| 8\(sim h100-nvlink\) \| [^|]*--wrapper ddp \| ok \| 1.5 \|$", done.stdout, re.M)


@pytest.mark.slow
def test_real_cells_end_as_ok_bad_shape_and_out_of_memory_and_are_not_tried_again(tmp_path):
    """Three cells of the width axis on one rank, with 0.7 GiB of address space beyond what torch and Triton take."""
    how = dict(cwd=tmp_path, env=environment(OMP_NUM_THREADS="1"), text=True, stdout=subprocess.PIPE)
    code = "import torch, torch.utils._triton as t; t.has_triton_package() and __import__('triton.compiler'); "
    code += "print(*[line.split()[1] for line in open('/proc/self/status') if line.startswith('VmPeak')])"
    if not Path("/proc/self/status").exists():
        pytest.skip("needs Linux")
    limit = int(subprocess.run([sys.executable, "-c", code], check=True, **how).stdout) * 1024 + 700 * 2**20
    lines = [line for line in sweep.read_cells("width", True, 1, []) if "--width 256 " not in line]
    (tmp_path / "cells").write_text("\n".join(lines))
    command = [*SWEEP, "cells", "--small", "--steps", "4", "--results", "rows.jsonl"]
    for finished in (0, 3):
        done = subprocess.run(command, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)), **how)
        assert done.returncode == 0 and f"3 cells, {finished} finished before" in done.stdout, done.stdout
        found = {sweep.parse(shlex.split(row["cell"]))[1]["--width"][0]: row for row in rows(tmp_path / "rows.jsonl")}
        outcomes = {width: re.sub("OOM (init|fwd|bwd|step)$", "OOM", row["outcome"]) for width, row in found.items()}
        assert outcomes == {"96": "badshape", "128": "ok", "2048": "OOM"}, done.stdout
    assert len(rows(tmp_path / "rows.jsonl")) == 3
    assert found["128"]["step_ms"] > 0 and found["128"]["loss"] < 7 and found["2048"]["width"] == 2048


def test_a_rank_that_runs_out_of_memory_before_the_first_is_told(call):
    code, out, [row], _ = call(["nproc=2 --seed rank1"])
    assert (code, row["outcome"]) == (0, "OOM bwd"), out


@pytest.mark.parametrize(("cell", "before", "outcome"), [
    ("--seed starved", 7, "OOM ?"),
    ("nproc=2 --seed starved", 7, "OOM ?"),
    ("--seed starved", 8, "failed: exit -9 (SIGKILL): no output"),  # the kernel ended nobody meanwhile
    ("--seed starved --depth 1", 7, "failed: exit 1: error: no"),  # ended by itself
])
def test_a_kill_while_the_kernel_frees_memory_is_told_apart(tmp_path, monkeypatch, cell, before, outcome):
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "vmstat").write_text(f"pgfault 5\noom_kill {before}\n")
    monkeypatch.setattr(sweep, "VMSTAT", tmp_path / "vmstat")
    monkeypatch.chdir(tmp_path)
    end = sweep.run(cell, ["program.py", "--results", "rows.jsonl"], 60, tmp_path / "log")
    assert sweep.failed_row(cell, end)["outcome"] == outcome
    assert sweep.unfinished([cell], {cell: sweep.failed_row(cell, end)}) == [cell] * (outcome != "OOM ?")


def test_the_kernel_that_does_not_count_kills_has_made_none(tmp_path, monkeypatch):
    for text in (None, "pgfault 5\n"):
        monkeypatch.setattr(sweep, "VMSTAT", tmp_path / str(text))
        if text:
            sweep.VMSTAT.write_text(text)
        assert sweep.oom_kills() == 0


def test_wandb_holds_a_run_per_cell_and_a_table_of_all_in_one_group(call, tmp_path):
    pytest.importorskip("wandb")
    lines = ["--seed logged --depth 3", "nproc=1 --seed oom --depth 3", "--world 8 --seed ok --depth 3"]
    code, out, found, _ = call(lines, "--wandb", "offline", "--tags", "a", "b", HOME=str(tmp_path), WANDB_SILENT="true")
    assert code == 0 and "warning" not in out and len(found) == 3, out
    runs = {run.job_type: (run, steps) for run, steps in logged(tmp_path / "wandb")}
    cell, steps = runs[""]
    assert (cell.display_name, cell.run_group) == ("cells n=1 --seed logged", "sweep-cells")
    assert [step["loss"] for step in steps] == [2.5]
    table, _ = runs["table"]
    assert (table.display_name, table.run_group, [*table.tags]) == ("sweep-cells", "sweep-cells", ["a", "b"])
    ((name, data),) = tables(tmp_path / "wandb")
    outcome = data["columns"].index("outcome")
    assert (name, [line[outcome] for line in data["data"]]) == ("cells", ["ok", "OOM bwd", "ok"])
    assert not [path for path in (tmp_path / "wandb").rglob("*") if path.is_file() and b"sesame" in path.read_bytes()]


FAKE_WANDB = """
class Settings:
    model_fields = ()
    def __init__(self, **given): pass
def setup(settings): pass
def init(**given):
    open("named", "w").write(f"{given['group']} {given['mode']}")
    raise OSError("no server")
"""


@pytest.mark.parametrize("wandb", ["raise ImportError('none here')", FAKE_WANDB])
def test_wandb_that_fails_costs_the_sweep_a_line_and_nothing_else(call, tmp_path, wandb):
    (tmp_path / "wandb.py").write_text(wandb)
    for lines, code in ((seeds("ok", "oom"), 0), (seeds("ok", "caught"), 1)):
        done, out, *_ = call(lines, "--wandb", "online", "--group", "mine")
        assert done == code and out.count("warning: wandb: ") == 1 and "| 1 | --seed ok | ok |" in out, out
    assert wandb != FAKE_WANDB or (tmp_path / "named").read_text() == "mine online"
    assert "warning" not in call(lines, "--wandb", "off")[1]


def test_sigterm_ends_the_cell_and_writes_no_row(call, tmp_path):
    sweeping = call(seeds("hang", "ok"), start=subprocess.Popen)
    wait_for(lambda: (tmp_path / "pids").exists() and (tmp_path / "pids").read_text())
    sweeping.send_signal(signal.SIGTERM)
    sweeping.communicate(timeout=30)
    assert (sweeping.returncode, rows(tmp_path / "rows.jsonl")) == (128 + signal.SIGTERM, [])
    if Path("/proc/self").exists():  # a killed process may take its time to go
        wait_for(lambda: not [pid for pid in (tmp_path / "pids").read_text().split() if alive(pid)])


def test_several_processes_are_one_cell_under_torchrun(call):
    code, out, [row], starts = call(["nproc=2 --seed ok"])
    assert (code, row["outcome"], starts) == (0, "ok", {"ok": 2}), out


@pytest.mark.parametrize(("lines", "said"), [
    (["--depth 8", "depth 4"], "cells.txt:2: expected nproc=N (N >= 1) or a flag, got 'depth'"),
    (["# none", "", "nproc=2 8"], "cells.txt:3: expected nproc=N (N >= 1) or a flag, got '8'"),
    (["nproc=0 --depth 8"], "cells.txt:1: expected nproc=N (N >= 1) or a flag, got 'nproc=0'"),
    (["--depth '8"], "cells.txt:1: No closing quotation"),
    (["--results x"], "cells.txt:1: --results is one for the whole sweep: give it on the command line"),
    (["# nothing"], "cells.txt: no cell in it"),
])
def test_a_bad_file_is_one_line_and_exit_2(call, lines, said):
    assert call(lines)[:2] == (2, f"sweep: {said}\n")


GRID = """\
# {not,a,cell}
--depth {1,2} --width {64,128 --no-reshard}
[full] --lr 1 ranks=4
--seed {3}
[small] ranks=2

--clip {2,0}  # a comment
"""


def test_braces_and_sections_make_the_cells_of_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, "gpus", lambda: 1)
    (tmp_path / "cells").write_text(GRID)
    grid = [f"nproc=1 --depth {d} {w}" for d in (1, 2) for w in ("--width 64", "--no-reshard --width 128")]
    full = sweep.read_cells(str(tmp_path / "cells"), False, 1, [])
    assert full == [*grid, "nproc=1 --link h100-nvlink --lr 1 --seed 3 --world 4"]
    small = [sweep.parse(cell.split()) for cell in sweep.read_cells(str(tmp_path / "cells"), True, 1, [])]
    assert [n for n, _ in small] == [1, 1, 1, 1, 2, 2]
    assert [flags.get("--clip") for _, flags in small[4:]] == [("2",), ("0",)]


def test_the_small_cells_are_those_that_have_been_run():
    """A cell that were called otherwise would be run again."""
    rows = sweep.read_rows(ROOT / "results" / "sweep-all-small.jsonl")
    for axis, cells in sweep.studies("all", True, 2, []).items():
        assert axis == "attention" or sweep.unfinished(cells, rows) == [], axis  # of which some have not been run


def test_an_unknown_axis_lists_the_known(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["sweep", "colour"])
    with pytest.raises(SystemExit) as stopped:
        sweep.main()
    said = capsys.readouterr().err
    assert stopped.value.code == 2
    assert said.startswith("sweep: unknown axis 'colour': expected a file, all, or one of ") and said.count("\n") == 1
    assert all(axis in said for axis in ("all", *sweep.axes()))


@functools.cache
def parsed(*words):
    return config.parse(words)


def resolved(cell, device):
    """(what main.py would train, the ranks that it is started on); every flag goes through its parser, but once."""
    nproc, flags = sweep.parse(shlex.split(cell))
    groups = {name: getattr(parsed(), name) for name in ("training", "system", "output")}
    for flag, values in flags.items():
        name, given = flag[2:].removeprefix("no-").replace("-", "_"), parsed(flag, *values)
        group = next(group for group, value in groups.items() if name in {field.name for field in fields(value)})
        groups[group] = replace(groups[group], **{name: getattr(given, name)})
    return config.resolve(config.Config(**groups), device, nproc), nproc


@pytest.mark.parametrize("gpus", ["small", 1, 4, 8])
def test_main_accepts_every_cell_of_every_axis_but_the_bad_shapes_and_no_two_are_the_same(monkeypatch, gpus):
    small, refused, seen = gpus == "small", set(), {}
    monkeypatch.setattr(sweep, "gpus", lambda: 0 if small else gpus)
    everything = sweep.read_cells("all", small, 2, [])
    for axis in sweep.axes():
        cells = sweep.read_cells(axis, small, 2, [])
        assert len(cells) >= 3 and (axis.startswith("gpu-") or set(cells) <= set(everything)), axis
        for cell in cells:
            assert not small or "--device cpu" in cell and "flex" not in cell  # what a CPU cannot do is not asked of it
            try:
                config_, nproc = resolved(cell, "cpu" if small else "cuda")
                assert nproc <= (2 if axis in ("gpus", "wrappers") and small else max(2, gpus if not small else 2))
                if not axis.startswith("gpu-"):
                    assert seen.setdefault((config_.training, config_.system, nproc), cell) == cell
            except ValueError as error:
                assert str(error).startswith("--grouping 4: must divide the 6 heads")
                refused.add((axis, cell))
    assert {(axis, "--width 96 " in cell or "--width 768 " in cell) for axis, cell in refused} == {("width", True)}
    assert len(refused) == 1 and len(seen) == len(everything) - 1


def test_the_published_tables_are_covered(monkeypatch):
    def published(file, *columns):
        lines = csv.DictReader((ROOT / "reference" / file).read_text().splitlines())
        return {tuple(line[column] for column in columns) for line in lines}

    def ours(axis, *flags):
        found = [sweep.parse(shlex.split(cell)) for cell in sweep.read_cells(axis, False, 2, [])]
        return {tuple(own[flag][0] if flag != "n" else own.get("--world", [str(n)])[0] for flag in flags)
                for n, own in found}  # fmt: skip

    monkeypatch.setattr(sweep, "gpus", lambda: 1)
    for axis in ("seqlen", "depth", "width"):
        assert ours(axis, f"--{axis}") == published(f"{axis}.csv", axis)
    assert ours("gpus", "n", "--batch") == published("gpus.csv", "ranks", "batch")
    small = {"replicate": "1", "shard": "0"}
    assert ours("small-params", "--depth", "--seqlen", "--min-shard-mib", "n") == {
        (depth, seqlen, small[how], ranks)
        for ranks, depth, seqlen, how in published("small-params.csv", "ranks", "depth", "seqlen", "small")
    }
    assert ours("mfu", "n", "--attn", "--seqlen", "--depth", "--remat", "--grouping", "--mode") == {
        line for line in published("mfu.csv", "ranks", "attn", "seqlen", "depth", "remat", "grouping", "mode")
        if line[0] == "4"
    }  # fmt: skip
    assert published("variants.csv", "remat", "compile") < ours("variants", "--remat", "--compile")


@pytest.mark.parametrize(("listed", "visible", "gpus"), [
    ("GPU 0: A\nGPU 1: A\nGPU 2: A\n", None, 3), ("GPU 0: A\nGPU 1: A\nGPU 2: A\n", "0,2", 2),
    ("GPU 0: A\n", "", 0), ("No devices were found\n", "0", 0), (None, "0", 0),
])
def test_ranks_that_the_machine_lacks_are_simulated(tmp_path, monkeypatch, listed, visible, gpus):
    if listed is not None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n[ $1 = -L ] && printf '%s' '{listed}'\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    sweep.gpus.cache_clear()
    monkeypatch.setattr(sweep, "gpus", sweep.gpus.__wrapped__)
    assert sweep.gpus() == gpus
    cells = sweep.read_cells("gpus", False, 2, [])
    started = [(int(cell.split()[0][6:]), re.findall(r"--world (\d)", cell)) for cell in cells]
    real = max(1, gpus)
    assert started == [(n, []) if n <= real else (1, [str(n)]) for n in (1, 2, 3, 4, 6, 8, 1, 2, 4)]
    assert all("--link h100-nvlink" in cell for cell in cells if "--world" in cell)


def test_world_on_the_command_line_is_for_cells_that_name_no_ranks(tmp_path):
    file = tmp_path / "cells"
    file.write_text("--depth 1\nnproc=2 --depth 2\n--world 4 --depth 3\n")
    assert sweep.read_cells(str(file), False, 2, ["--world", "8", "--link", "none"]) == [
        "nproc=1 --depth 1 --link none --world 8", "nproc=2 --depth 2 --link none",
        "nproc=1 --depth 3 --link none --world 4",
    ]  # fmt: skip


def test_the_row_of_a_dead_simulation_says_that_it_was_one():
    assert sweep.failed_row("nproc=1 --link none --world 8", "timeout")["world"] == "8(sim none)"
    told = config.world_label(resolved("--world 8", "cpu")[0], 1)  # what main.py writes
    assert sweep.failed_row("nproc=1 --world 8", "timeout")["world"] == told


def test_flags_of_the_command_line_win_and_order_does_not_matter(tmp_path):
    file = tmp_path / "cells"
    file.write_text("--depth 2 --reshard --width=64 --o a=1 b=2\nnproc=2 --width 64 --o a=1 b=2 --depth 2\n")
    assert sweep.read_cells(str(file), False, 2, ["--depth", "4", "--no_reshard"]) == [
        "nproc=2 --depth 4 --no-reshard --o a=1 b=2 --width 64"
    ]
