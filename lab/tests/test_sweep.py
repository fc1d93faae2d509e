"""lab/sweeps/sweep.py: every setting leaves a row, whatever its end; a second call runs what has none."""

import json
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_sinks import logged, tables

from lab.sweeps import processes, sweep

ROOT = Path(__file__).resolve().parents[2]
SWEEP = [sys.executable, "-m", "lab.sweeps.sweep"]

# Stands in for main.py: --seed says how it ends; it counts its starts in `starts`.
PROGRAM = """
import json, os, signal, subprocess, sys, time
flags = dict(zip(sys.argv[1:], sys.argv[2:]))
how, rank = flags.get("--seed", "ok"), os.environ.get("RANK", "0")
def row(outcome, end="\\n"):
    with open(flags["--results"], "a") as file:
        file.write(json.dumps({"line": os.environ["SWEEP_LINE"], "outcome": outcome, "step_ms": 1234.5}) + end)
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
    from trainer.logging import Sinks
    from trainer.trackers import TrackerOptions
    options = TrackerOptions((flags["--tracker"],), flags["--wandb-mode"], flags["--tracker-group"])
    sinks = Sinks(flags["--results"], options, total_steps=1)
    sinks.step({"step": 1, "loss": 2.5})
    sinks.row({"line": os.environ["SWEEP_LINE"], "outcome": "ok", "loss": 2.5, "hf_token": "sesame"})
    sinks.close()
if how == "kill": print("before"); os.kill(os.getpid(), signal.SIGKILL)
if how == "torn": open(flags["--results"], "a").write('{"line": "'); os.kill(os.getpid(), signal.SIGKILL)
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
flags, setting = dict(zip(sys.argv[1:], sys.argv[2:])), os.environ["SWEEP_LINE"]
with open("starts", "a") as file: file.write(setting + "\\n")
if "--depth 4" in setting and not os.path.exists("pid"):
    with open("pid", "w") as file: file.write(str(os.getpid()))
    time.sleep(60)
if flags["--width"] == "96": sys.exit("error: --grouping 4: must divide the 6 heads (--width 96 / --head-dim 16)")
world = f"{flags['--world']}(sim {flags['--link']})" if "--world" in flags else int(os.environ.get("WORLD_SIZE", 1))
with open(flags["--results"], "a") as file:
    file.write(json.dumps({"line": setting, "world": world, "outcome": "ok", "step_ms": 1.5}) + "\\n")
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
    ours = {k: v for k, v in os.environ.items() if k not in ("NPROC", "SETTING_TIMEOUT") and not k.startswith("WANDB_")}
    return ours | {"PYTHONPATH": os.pathsep.join(map(str, (*folders, ROOT)))} | more


@pytest.fixture
def call(tmp_path):
    """call(lines, *options) -> (exit code, stdout and stderr, rows, how often each kind of setting was started)."""
    (tmp_path / "program.py").write_text(PROGRAM)

    def call(lines, *options, start=subprocess.run, **env):
        (tmp_path / "settings.txt").write_text("\n".join(lines))
        given = ["settings.txt", "--program", "program.py", "--results", "rows.jsonl", *options]
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


def test_every_end_of_a_setting_leaves_one_row(call):
    code, out, found, _ = call(seeds("ok", "oom", "badshape", "caught", "raise", "silent", "kill", "torn", "rowhang"),
                               "--timeout", "3")
    outcomes = {row["line"].split()[-1]: row["outcome"] for row in found}
    assert code == 1
    assert len(found) == 9
    assert outcomes == {
        "ok": "ok", "oom": "OOM bwd", "badshape": "badshape", "caught": "failed: ValueError: no",
        "raise": "failed: exit 1: ValueError: width 7", "silent": "failed: exit 0 without a row",
        "kill": "failed: exit -9 (SIGKILL): before", "torn": "failed: exit -9 (SIGKILL): no output", "rowhang": "ok",
    }
    assert "| 1 | --seed ok | ok | 1'234.5 |" in out
    assert "5 of 9 settings without a result" in out


def test_a_setting_over_its_time_is_ended_with_all_its_processes(call, tmp_path):
    code, _, [row], _ = call(seeds("hang"), "--timeout", "4")
    assert (code, row["outcome"]) == (1, "failed: timeout")
    if Path("/proc/self").exists():
        pids = (tmp_path / "pids").read_text().split()
        end = time.monotonic() + 10
        while any(map(alive, pids)) and time.monotonic() < end:  # a kill takes a moment where the cores are busy
            time.sleep(0.05)
        assert not [pid for pid in pids if alive(pid)]


def test_a_setting_cut_short_by_the_budget_is_not_counted(call):
    code, out, found, starts = call(seeds("ok", "hang", "oom"), "--budget", "1.5")
    assert (code, starts) == (1, {"ok": 1, "hang": 1})
    assert [row["outcome"] for row in found] == ["ok"]
    assert "cut short" in out and "2 of 3 settings" in out


def test_the_second_call_runs_what_is_missing_then_what_failed(call):
    call(seeds("ok", "raise", "oom"))
    code, out, found, starts = call(["--seed raise", "--seed=ok # the same setting", "--seed badshape", "--seed oom"])
    assert starts == {"ok": 1, "raise": 2, "oom": 1, "badshape": 1}
    assert [row["outcome"].split(":")[0] for row in found] == ["ok", "failed", "OOM bwd", "badshape", "failed"]
    assert "4 settings, 2 finished before" in out
    code, out, _, starts = call(seeds("ok", "oom"))
    assert (code, starts["ok"], starts["oom"]) == (0, 1, 1)


def test_rows_of_another_commit_or_device_are_no_results_of_this_one(call, tmp_path):
    call(seeds("ok", "oom", "badshape"))
    ok, oom, badshape = rows(tmp_path / "rows.jsonl")
    old = [ok | dict(commit="old"), oom | dict(device="NVIDIA H99"), badshape]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in old))
    code, out, _, starts = call(seeds("ok", "oom", "badshape"), "--any-commit")
    assert (code, starts) == (0, dict(ok=1, oom=2, badshape=1))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in old))
    code, out, _, starts = call(seeds("ok", "oom", "badshape"))
    assert (code, starts) == (0, dict(ok=2, oom=3, badshape=1))
    assert "3 settings, 1 finished before, 2 by another commit or device (--any-commit" in out
    simulated = [ok | dict(device="simulated sm_90"), oom | dict(device="no device, graphs"), badshape]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in simulated))
    code, out, _, starts = call(seeds("ok", "oom", "badshape"))  # no device is no other device
    assert (code, starts) == (0, dict(ok=2, oom=3, badshape=1)) and "without a result" not in out


def test_several_values_of_a_flag_are_a_grid_and_seeds_are_summed_up(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, "gpus", lambda: 0)
    (tmp_path / "settings.txt").write_text("--depth {2,4}")
    words = "--lr 1e-3 3e-3 --seed 0 1 2 --compile-options a=1 b=2".split()
    [settings] = sweep.studies(str(tmp_path / "settings.txt"), False, 1, words).values()
    assert len(settings) == 12 and settings[0] == "nproc=1 --compile-options a=1 b=2 --depth 2 --lr 1e-3 --seed 0"
    found = {setting: dict(outcome="ok", loss=float(i % 3)) for i, setting in enumerate(settings)}
    table = sweep.over_seeds(settings, found).splitlines()
    assert len(table) == 2 + 4 and table[2].endswith("| 3 | 1.0000 +- 1.0000 |")
    assert sweep.over_seeds(settings[::3], found) == ""


def test_without_an_axis_the_flags_alone_are_the_settings(tmp_path):
    words = "--lr 1e-3 3e-3 --seed 0 1 --nproc 1".split()
    done = subprocess.run([*SWEEP, *words, "--list"], cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert done.stdout.splitlines() == [f"nproc=1 --lr {lr} --seed {seed}" for lr in ("1e-3", "3e-3") for seed in "01"]


def test_the_example_of_the_docs_is_a_file_of_settings(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, "gpus", lambda: 0)
    text = (ROOT / "docs/commands.md").read_text()
    (tmp_path / "mine.txt").write_text(text.partition("```text\n")[2].partition("```")[0])
    assert sweep.read_settings(str(tmp_path / "mine.txt"), False, 2, []) == [
        "nproc=2 --depth 2 --lr 3e-3", "nproc=2 --depth 4 --lr 3e-3", "nproc=2 --block llama --depth 2 --lr 3e-3",
        "nproc=1 --depth 2 --lr 3e-3"]  # fmt: skip


def test_a_table_has_the_held_out_loss_and_why_a_shape_is_bad():
    settings = ["nproc=1 --width 96", "nproc=1 --width 128"]
    bad = sweep.failed_row(settings[0], "exit 2: error: --width 96: must be a multiple of --head-dim 64")
    text = sweep.table(settings, {settings[0]: bad, settings[1]: dict(outcome="ok", loss=2.0, eval_loss=2.25)})
    assert "badshape: --width 96: must be a multiple of --head-dim 64" in text and "| 2.0000 | 2.2500 |" in text


def test_the_loss_of_simulated_ranks_stands_in_no_table_of_a_sweep():
    settings = [f"nproc=1 --seed {seed}" for seed in (0, 1)]
    real = {setting: dict(outcome="ok", step_ms=3.0, loss=2.0, world=1) for setting in settings}
    played = {setting: row | dict(world="8(sim ndr-ib)") for setting, row in real.items()}
    for text in (sweep.table, sweep.over_seeds):
        assert "loss" in text(settings, real)
        assert "step ms" in text(settings, played) and "loss" not in text(settings, played)


def test_what_a_setting_printed_lies_in_one_folder_of_runs():
    for results in ("runs/sweep-a.jsonl", "sweep-a.jsonl"):
        assert str(sweep.place("nproc=1", sweep.Path(results)).parent) == "runs/sweep-a"


def wait_for(there, seconds=60):
    until = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < until, "it never happened"
        time.sleep(0.05)


def test_every_table_is_filled_once_whatever_kills_the_sweep(tmp_path):
    """`all --small`, kill -9 in the middle of a setting, the same call again, and once more."""
    (tmp_path / "torch" / "distributed").mkdir(parents=True)
    for name, text in (("__init__.py", ""), ("distributed/__init__.py", ""), ("distributed/run.py", TORCHRUN)):
        (tmp_path / "torch" / name).write_text(text)
    (tmp_path / "instant.py").write_text(INSTANT)
    command = [*SWEEP, "all", "--small", "--nproc", "2", "--program", "instant.py"]
    how = dict(cwd=tmp_path, env=environment(tmp_path), text=True)
    tables = sweep.studies("all", True, 2, [])
    settings = list(dict.fromkeys(setting for own in tables.values() for setting in own))
    pid = tmp_path / "pid"
    results = tmp_path / "runs" / "sweep-all-small.jsonl"

    killed = subprocess.Popen(command, stdout=subprocess.DEVNULL, **how)
    wait_for(lambda: pid.exists() and pid.read_text())
    killed.kill()
    killed.wait()
    before = [row["line"] for row in rows(results)]
    hung = next(setting for setting in settings if "--depth 4" in setting)
    assert 3 <= len(before) < len(settings) and hung not in before
    if Path("/proc/self").exists():  # the setting follows its sweep
        wait_for(lambda: not alive(pid.read_text()), 20)

    for finished in (len(before), len(settings)):
        done = subprocess.run(command, stdout=subprocess.PIPE, **how)
        assert (done.returncode, f"{len(settings)} settings, {finished} finished before" in done.stdout) == (0, True)
        assert sorted(row["line"] for row in rows(results)) == sorted(settings), "one row for each"
        starts = (tmp_path / "starts").read_text().splitlines()
        counts = {setting: starts.count(setting) for setting in starts}
        assert counts == {setting: 1 + (setting == hung) for setting in settings}
        shown = done.stdout.split("\n## ")[1:]
        assert [section.split()[0] for section in shown] == list(tables) and "not run" not in done.stdout
        for section, own in zip(shown, tables.values(), strict=True):
            assert section.count("\n| ") - 1 == len(own), section  # the head
    assert shown[list(tables).index("width")].count("| badshape: --grouping 4: ") == 1
    assert len(re.findall(r"^\| 8\(sim 4090-pcie\) \| [^|]*--min-shard-mib", done.stdout, re.M)) == 2
    assert re.search(r"^\| 8\(sim h100-nvlink\) \| [^|]*--wrapper ddp \| ok \| 1.5 \|$", done.stdout, re.M)


@pytest.mark.slow
def test_real_settings_end_as_ok_bad_shape_and_out_of_memory_and_are_not_tried_again(tmp_path):
    """Three settings of the width axis on one rank, with 0.7 GiB of address space beyond what torch and Triton take."""
    how = dict(cwd=tmp_path, env=environment(OMP_NUM_THREADS="1"), text=True, stdout=subprocess.PIPE)
    code = "import torch, torch.utils._triton as t; t.has_triton_package() and __import__('triton.compiler'); "
    code += "print(*[line.split()[1] for line in open('/proc/self/status') if line.startswith('VmPeak')])"
    if not Path("/proc/self/status").exists():
        pytest.skip("needs Linux")
    limit = int(subprocess.run([sys.executable, "-c", code], check=True, **how).stdout) * 1024 + 700 * 2**20
    lines = [line for line in sweep.read_settings("width", True, 1, []) if "--width 256 " not in line]
    (tmp_path / "settings").write_text("\n".join(lines))
    command = [*SWEEP, "settings", "--small", "--steps", "4", "--results", "rows.jsonl"]
    for finished in (0, 3):
        done = subprocess.run(command, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)), **how)
        assert done.returncode == 0 and f"3 settings, {finished} finished before" in done.stdout, done.stdout
        found = {sweep.parse(shlex.split(row["line"]))[1]["--width"][0]: row for row in rows(tmp_path / "rows.jsonl")}
        outcomes = {width: re.sub("OOM (init|fwd|bwd|step)$", "OOM", row["outcome"]) for width, row in found.items()}
        assert outcomes == {"96": "badshape", "128": "ok", "2048": "OOM"}, done.stdout
    assert len(rows(tmp_path / "rows.jsonl")) == 3
    assert found["128"]["step_ms"] > 0 and found["128"]["loss"] < 7 and found["2048"]["width"] == 2048


def test_a_rank_that_runs_out_of_memory_before_the_first_is_told(call):
    code, out, [row], _ = call(["nproc=2 --seed rank1"])
    assert (code, row["outcome"]) == (0, "OOM bwd"), out


@pytest.mark.parametrize("setting, before, outcome", [
    ("--seed starved", 7, "OOM ?"),
    ("nproc=2 --seed starved", 7, "OOM ?"),
    ("--seed starved", 8, "failed: exit -9 (SIGKILL): no output"),  # the kernel ended nobody meanwhile
    ("--seed starved --depth 1", 7, "failed: exit 1: error: no"),  # ended by itself
])
def test_a_kill_while_the_kernel_frees_memory_is_told_apart(tmp_path, monkeypatch, setting, before, outcome):
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "vmstat").write_text(f"pgfault 5\noom_kill {before}\n")
    monkeypatch.setattr(processes, "VMSTAT", tmp_path / "vmstat")
    monkeypatch.chdir(tmp_path)
    end = sweep.run(setting, ["program.py", "--results", "rows.jsonl"], 60, tmp_path / "log")
    assert sweep.failed_row(setting, end)["outcome"] == outcome
    assert sweep.unfinished([setting], {setting: sweep.failed_row(setting, end)}) == [setting] * (outcome != "OOM ?")


def test_the_kernel_that_does_not_count_kills_has_made_none(tmp_path, monkeypatch):
    for text in (None, "pgfault 5\n"):
        monkeypatch.setattr(processes, "VMSTAT", tmp_path / str(text))
        if text:
            processes.VMSTAT.write_text(text)
        assert processes.oom_kills() == 0


def test_wandb_holds_a_run_per_setting_and_a_table_of_all_in_one_group(call, tmp_path):
    pytest.importorskip("wandb")
    lines = ["--seed logged --depth 3", "nproc=1 --seed oom --depth 3", "--world 8 --seed ok --depth 3"]
    words = "--tracker wandb --wandb-mode offline --wandb-tags a b".split()
    code, out, found, _ = call(lines, *words, HOME=str(tmp_path), WANDB_SILENT="true")
    assert code == 0 and "warning" not in out and len(found) == 3, out
    runs = {run.job_type: (run, steps) for run, steps in logged(tmp_path / "wandb")}
    run, steps = runs["setting"]
    assert (run.display_name, run.run_group) == ("settings n=1 --seed logged", "sweep-settings")
    assert [*run.tags] == ["settings"]
    assert [step["loss"] for step in steps] == [2.5]
    table, _ = runs["table"]
    assert (table.display_name, table.run_group, [*table.tags]) == ("sweep-settings", "sweep-settings", ["a", "b"])
    ((name, data),) = tables(tmp_path / "wandb")
    outcome = data["columns"].index("outcome")
    assert (name, [line[outcome] for line in data["data"]]) == ("settings", ["ok", "OOM bwd", "ok"])
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
        done, out, *_ = call(lines, "--tracker", "wandb", "--wandb-mode", "online", "--tracker-group", "mine")
        assert done == code and out.count("warning: wandb: ") == 1 and "| 1 | --seed ok | ok |" in out, out
    assert wandb != FAKE_WANDB or (tmp_path / "named").read_text() == "mine online"
    assert "warning" not in call(lines)[1]


def test_sigterm_ends_the_setting_and_writes_no_row(call, tmp_path):
    sweeping = call(seeds("hang", "ok"), start=subprocess.Popen)
    wait_for(lambda: (tmp_path / "pids").exists() and (tmp_path / "pids").read_text())
    sweeping.send_signal(signal.SIGTERM)
    sweeping.communicate(timeout=30)
    assert (sweeping.returncode, rows(tmp_path / "rows.jsonl")) == (128 + signal.SIGTERM, [])
    if Path("/proc/self").exists():  # a killed process may take its time to go
        wait_for(lambda: not [pid for pid in (tmp_path / "pids").read_text().split() if alive(pid)])


def test_a_setting_of_one_rank_on_a_cpu_is_forked_where_torch_is_imported_already(tmp_path, monkeypatch):
    (tmp_path / "main.py").write_text(f"{PROGRAM}\nprint(*{{'torch'}} & {{*sys.modules}}, os.environ['SWEEP_FORKED'])")
    monkeypatch.setattr(sweep, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)

    def run(how, timeout=60):
        return sweep.run(f"nproc=1 --device cpu --seed {how}", [str(tmp_path / "main.py"), "--results", "rows.jsonl"],
                         timeout, tmp_path / f"{how}.log")  # fmt: skip

    assert (run("ok"), [row["outcome"] for row in rows(tmp_path / "rows.jsonl")]) == (None, ["ok"])
    assert (tmp_path / "ok.log").read_text() == "torch 1\n" and "SWEEP_FORKED" not in os.environ
    ends = {"raise": "exit 1: ValueError: width 7", "kill": "exit -9 (SIGKILL): before", "hang": "timeout",
            "badshape": "exit 1: error: --grouping 4: must divide the 6 heads"}  # fmt: skip
    assert {how: run(how, 60 if how != "hang" else 1) for how in ends} == ends
    assert run("ok") is None  # no end of a setting is one of the process it came from
    if Path("/proc/self").exists():
        wait_for(lambda: not [pid for pid in (tmp_path / "pids").read_text().split() if alive(pid)])


def test_several_processes_are_one_setting_under_torchrun(call):
    code, out, [row], starts = call(["nproc=2 --seed ok"])
    assert (code, row["outcome"], starts) == (0, "ok", {"ok": 2}), out


@pytest.fixture
def ends(tmp_path, monkeypatch, capsys):
    """ends(words) -> (exit code, stdout, stderr) of a sweep in this process, whose settings all fail at once."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep, "run", lambda *_, **__: "exit 1: no")
    monkeypatch.setattr(sweep, "main_setting", lambda _: {})
    monkeypatch.setattr(sweep, "commit", lambda: "c0")
    monkeypatch.setattr(sweep, "end_at_signals", lambda: None)
    monkeypatch.setattr(sweep, "gpus", lambda: 0)
    monkeypatch.setenv("SWEEP_GPUS", "0")  # --slurm sets it

    def ends(words):
        with pytest.raises(SystemExit) as stopped:
            monkeypatch.setattr(sys, "argv", ["sweep", *shlex.split(words)])
            sweep.main()
        return stopped.value.code, *capsys.readouterr()

    return ends


def test_a_loss_that_is_not_finite_is_counted_where_seeds_are_summed_up():
    settings = [f"nproc=1 --seed {seed}" for seed in range(3)]
    rows = {setting: {"loss": loss} for setting, loss in zip(settings, (1.0, "nan", 3.0), strict=True)}
    assert "| nan in 1 of 3 |" in sweep.over_seeds(settings, rows)


@pytest.mark.parametrize("words, said", [
    (f"--seed {' '.join(map(str, range(200)))} --lr {' '.join(map(str, range(200)))}", "more than 10'000 settings"),
    ("many", "many:2: more than 10'000 settings"),
    ("long", "long:10001: more than 10'000 settings"),
    ("bytes", "bytes:1: expected nproc=N (N >= 1) or a flag, got '\ufffd'"),
    ("--seed 0 --results odd", "odd, line 2: loss [1]: no run writes that"),
    ("--results ''", "--results .: Is a directory"),
    ("--results pipe", "--results pipe: is a pipe"),
    ("--results pipe --slurm", "pipe: is no file"),
    ("--program \\'", "--program ': No closing quotation"),
    ("--program ''", "--program: expected a file"),
    ("--timeout nan", "--timeout nan: must be a number of seconds"),
    ("--budget -1", "--budget -1: must be a number of seconds"),
    ("--tracker", "--tracker: needs a value"),
    ("--world 4 --link", "--link: needs a value"),
])
def test_what_no_sweep_can_do_is_one_line_and_exit_2(ends, tmp_path, words, said):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "odd").write_text('{"line": "a"}\n{"line": "a", "outcome": "ok", "loss": [1]}\n')
    (tmp_path / "many").write_text("--seed 1\n--seed " + "{1,2}" * 28)
    (tmp_path / "long").write_text("--seed 1\n" * 10**5)
    (tmp_path / "bytes").write_bytes(b"\xff --seed 1")
    code, _, err = ends(words)
    assert code == 2 and err.count("\n") == 1 and err.startswith(f"sweep: {said}"), err


@pytest.mark.parametrize("lines, said", [
    (["--depth 8", "depth 4"], "settings.txt:2: expected nproc=N (N >= 1) or a flag, got 'depth'"),
    (["# none", "", "nproc=2 8"], "settings.txt:3: expected nproc=N (N >= 1) or a flag, got '8'"),
    (["nproc=0 --depth 8"], "settings.txt:1: expected nproc=N (N >= 1) or a flag, got 'nproc=0'"),
    (["--depth '8"], "settings.txt:1: No closing quotation"),
    (["--results x"], "settings.txt:1: --results cannot stand in a line of a sweep: give it on the command line"),
    (["# nothing"], "settings.txt: no settings found; expected lines of flags, such as --depth 2 --lr 3e-3"),
])
def test_a_bad_file_is_one_line_and_exit_2(call, lines, said):
    assert call(lines)[:2] == (2, f"sweep: {said}\n")


def test_the_words_of_a_setting_are_those_of_a_shell():
    odd = ["", "  a  b ", "a\\ b", "'a b' c", '"a b"c', "a#b", "a\tb\nc", "a\x0bb\x1cc", "a\u2003b", "k=[1] ~/{x}|y&z"]
    odd += [json.loads(line)["line"] or "" for line in (sweep.ROOT / "results/h100.jsonl").read_text().splitlines()]
    for setting in odd:
        assert sweep.words(setting) == shlex.split(setting), setting
    with pytest.raises(ValueError, match="No closing quotation"):
        sweep.words("a 'b")
