"""trainer/sweep.py: every cell leaves a row, whatever its end; a second call runs only what has no result yet."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainer import sweep

ROOT = Path(__file__).resolve().parents[1]

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
if how == "kill": print("before"); os.kill(os.getpid(), signal.SIGKILL)
if how == "torn": open(flags["--results"], "a").write('{"cell": "'); os.kill(os.getpid(), signal.SIGKILL)
if how == "hang":
    signal.signal(signal.SIGTERM, lambda *_: os._exit(1))
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    open("pids", "w").write(f"{os.getpid()} {child.pid}")
    time.sleep(60)
if how == "rowhang": row("ok"); time.sleep(60)
"""


@pytest.fixture
def call(tmp_path):
    """call(lines, *options) -> (exit code, stdout and stderr, rows, how often each kind of cell was started)."""
    (tmp_path / "program.py").write_text(PROGRAM)

    def call(lines, *options, start=subprocess.run):
        (tmp_path / "cells.txt").write_text("\n".join(lines))
        given = ["cells.txt", "--program", "program.py", "--results", "rows.jsonl", *options]
        env = {k: v for k, v in os.environ.items() if k not in ("NPROC", "CELL_TIMEOUT")} | {"PYTHONPATH": str(ROOT)}
        done = start([sys.executable, "-m", "trainer.sweep", *given], cwd=tmp_path, env=env,
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


def test_a_cell_over_its_time_is_ended_with_all_its_processes(call, tmp_path):
    code, _, [row], _ = call(seeds("hang"), "--timeout", "1")
    assert (code, row["outcome"]) == (1, "failed: timeout")
    if Path("/proc/self").exists():
        assert not [pid for pid in (tmp_path / "pids").read_text().split() if alive(pid)]


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


def test_sigterm_ends_the_cell_and_writes_no_row(call, tmp_path):
    sweeping = call(seeds("hang", "ok"), start=subprocess.Popen)
    until = time.monotonic() + 10
    while not (tmp_path / "pids").exists() or not (tmp_path / "pids").read_text():
        assert time.monotonic() < until, "the cell did not start"
        time.sleep(0.05)
    sweeping.send_signal(signal.SIGTERM)
    sweeping.communicate(timeout=10)
    assert (sweeping.returncode, rows(tmp_path / "rows.jsonl")) == (128 + signal.SIGTERM, [])
    if Path("/proc/self").exists():
        assert not [pid for pid in (tmp_path / "pids").read_text().split() if alive(pid)]


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


def test_an_unknown_axis_lists_the_known(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["sweep", "colour"])
    with pytest.raises(SystemExit) as stopped:
        sweep.main()
    said = capsys.readouterr().err
    assert stopped.value.code == 2
    assert said.startswith("sweep: unknown axis 'colour': expected a file or one of ") and said.count("\n") == 1
    assert all(axis in said for axis in sweep.axes(small=False))


@pytest.mark.parametrize("small", [False, True])
def test_every_axis_has_cells(small):
    for axis in sweep.axes(small):
        cells = sweep.read_cells(axis, small, nproc=2, extra=["--steps", "3"])
        assert len(cells) >= 3, axis
        assert all(re.match(r"nproc=\d+ --", cell) and " --steps 3" in cell for cell in cells)
        if small:  # what a CPU cannot do is not asked of it
            assert all("--device cpu" in cell and "flex" not in cell for cell in cells)


def test_flags_of_the_command_line_win_and_order_does_not_matter(tmp_path):
    file = tmp_path / "cells"
    file.write_text("--depth 2 --reshard --width=64 --o a=1 b=2\nnproc=2 --width 64 --o a=1 b=2 --depth 2\n")
    assert sweep.read_cells(str(file), False, 2, ["--depth", "4", "--no_reshard"]) == [
        "nproc=2 --depth 4 --no-reshard --o a=1 b=2 --width 64"
    ]
