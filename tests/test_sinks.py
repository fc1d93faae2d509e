"""trainer/logging.py: the files say what happened, whatever breaks, and nothing that breaks ends a run.

    pytest tests/test_sinks.py        # about 5 s, no network
"""

import errno
import fcntl
import io
import json
import math
import os
import re
import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from running import ROOT as REPO
from running import ran
from running import rows_of as rows

from trainer import logging as sinks
from trainer.logging import Sinks, append_jsonl, check_writable, final_lines
from trainer.trackers import TrackerOptions

STEP = {"loss": 3.21, "lr": 3e-4, "grad_norm": 1.25, "ms": 360.12, "tok_s": 91022.4}


def python(code, tmp_path, **env):
    """Run `code` in a process of its own whose home, and whatever W&B knows of the user, is empty."""
    env |= {"PYTHONPATH": str(REPO), "HOME": str(tmp_path), "PYTHONWARNINGS": "ignore"}
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("WANDB_")]:
            patch.delenv(name)
        done = ran(sys.executable, "-c", code, cwd=tmp_path, **env)
    assert done.code == 0, done.err
    return done


@pytest.fixture
def sinks_of(tmp_path):
    """sinks_of(total) -> Sinks of so many steps, with `log(k)`, which tells them of step k."""

    def make(total, results=tmp_path / "rows.jsonl", *argv, **how):
        run = Sinks(results, *argv, total_steps=total, **dict(stream=io.StringIO()) | how)
        run.log = lambda *steps, **more: [run.step({"step": k, **STEP, **more}) for k in steps]
        return run

    return make


def warnings_of(capsys):
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]


def test_lines_of_two_processes_never_mix(tmp_path):
    code = "import sys\nfrom trainer.logging import append_jsonl\nfor k in range(300):\n"
    code += " append_jsonl('rows.jsonl', {'who': sys.argv[1], 'k': k, 'long': sys.argv[1] * 5000})"
    env = {**os.environ, "PYTHONPATH": str(REPO)}
    both = [subprocess.Popen([sys.executable, "-c", code, who], cwd=tmp_path, env=env) for who in "ab"]
    assert [process.wait(60) for process in both] == [0, 0]
    read = rows(tmp_path / "rows.jsonl")
    assert len(read) == 600
    assert all(row["long"] == row["who"] * 5000 for row in read)
    assert [row["k"] for row in read if row["who"] == "a"] == list(range(300))


def test_a_loss_that_is_still_a_tensor_is_written_as_its_number(tmp_path):
    row = dict(half=torch.tensor(0.5), bad=torch.tensor(math.inf), count=np.int64(3))
    append_jsonl(tmp_path / "rows.jsonl", row | dict(none=torch.empty((), device="meta")))
    [row] = rows(tmp_path / "rows.jsonl")
    assert "meta" in row.pop("none")
    assert row == dict(half=0.5, bad="inf", count=3)


def test_a_row_stays_strict_json_and_tells_what_was_not_finite(tmp_path):
    path = tmp_path / "new" / "rows.jsonl"
    append_jsonl(path, {"loss": float("nan"), "norms": [float("inf"), -float("inf"), 1.5], "none": None, "on": True,
                        "path": Path("a"), 3: {"x": (1, 2)}}, fsync=True)  # fmt: skip
    assert rows(path) == [{"loss": "nan", "norms": ["inf", "-inf", 1.5], "none": None, "on": True, "path": "a",
                           "3": {"x": [1, 2]}}]  # fmt: skip


def test_a_line_that_was_left_unfinished_spoils_no_other(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"k": 1}\n{"k": 2, "lo')
    append_jsonl(path, {"k": 3})
    append_jsonl(path, {"k": 4})
    assert path.read_text() == '{"k": 1}\n{"k": 2, "lo\n{"k": 3}\n{"k": 4}\n'


def test_a_results_file_that_another_process_keeps_locked_is_written_to_after_one_warning(
    tmp_path, monkeypatch, capsys
):
    """A run waited for the lock until its watchdog ended it with 7, although it was done and saved."""
    monkeypatch.setattr(sinks, "LOCK_S", 0.3)
    monkeypatch.setattr(sinks, "KEPT_LOCKED", set())
    path = tmp_path / "0.jsonl"
    with open(path, "w") as kept:
        fcntl.flock(kept, fcntl.LOCK_EX)
        begin = time.monotonic()
        for _ in range(3):
            append_jsonl(path, dict(a=1))
        assert 0.3 < time.monotonic() - begin < 0.6, "waits once"
    assert path.read_text() == '{"a": 1}\n' * 3
    assert capsys.readouterr().err == f"warning: {path}: another process keeps it locked; it is written to\n"


@pytest.mark.parametrize("error", [errno.ENOLCK, errno.ESTALE, errno.EIO])
def test_a_file_system_that_fails_to_lock_gets_its_lines(error, tmp_path, monkeypatch):
    monkeypatch.setattr("fcntl.flock", mock.Mock(side_effect=OSError(error, os.strerror(error))))
    for _ in range(2):
        append_jsonl(tmp_path / "rows.jsonl", dict(a=1))
    assert (tmp_path / "rows.jsonl").read_text() == '{"a": 1}\n' * 2


def test_steps_and_row_go_to_files_that_name_each_other(tmp_path, sinks_of):
    run = sinks_of(2)
    run.log(1, 2, **{"norm/blocks.0.mlp": 0.5})
    run.row({"outcome": "ok", "loss": 3.21})
    run.close()
    (row,) = rows(tmp_path / "rows.jsonl")
    assert row == {"outcome": "ok", "loss": 3.21, "run": run.run}
    steps = rows(tmp_path / "rows.steps" / f"{row['run']}.jsonl")
    assert steps == [{"step": k, **STEP, "norm/blocks.0.mlp": 0.5} for k in (1, 2)]


def test_a_step_is_in_the_file_before_the_next_one_begins(sinks_of):
    run = sinks_of(2)
    run.log(1)
    assert len(rows(run.steps)) == 1  # no close, no flush: a kill loses nothing


def test_ranks_other_than_the_first_write_nothing(tmp_path, capsys, monkeypatch, sinks_of):
    monkeypatch.setitem(sys.modules, "wandb", None)
    run = sinks_of(1, tmp_path / "rows.jsonl", TrackerOptions(("wandb",)), rank=1)
    run.log(1)
    run.row({"outcome": "ok"})
    run.close()
    assert not list(tmp_path.iterdir()) and capsys.readouterr() == ("", "") and run.stream.getvalue() == ""


def test_without_results_only_the_terminal_is_written(tmp_path, monkeypatch, sinks_of):
    monkeypatch.chdir(tmp_path)
    run = sinks_of(1, None)
    run.log(1)
    run.row({"outcome": "ok"})
    run.close()
    assert not list(tmp_path.iterdir())
    assert "loss 3.2100" in run.stream.getvalue()


def test_first_last_and_every_nth_step_are_due_on_every_rank(sinks_of):
    for rank in (0, 1):
        run = sinks_of(25, None, rank=rank, every=10)
        assert [k for k in range(1, 26) if run.due(k)] == [1, 10, 20, 25]


def test_a_results_path_that_cannot_be_written_is_refused_by_flag_and_name(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "rows.jsonl", tmp_path):
        with pytest.raises(ValueError, match="^--results .*" + path.name):
            check_writable(path)
    with pytest.raises(ValueError, match="^--save "):
        check_writable(tmp_path, "--save")
    check_writable(tmp_path / "new" / "rows.jsonl")
    append_jsonl(tmp_path / "new" / "rows.jsonl", {"k": 1})
    check_writable(tmp_path / "new" / "rows.jsonl")
    assert rows(tmp_path / "new" / "rows.jsonl") == [{"k": 1}]  # the check changes nothing


def full_disk(monkeypatch, written=0):
    """Every os.write to a file fails (written = 0) or is cut off."""
    real = os.write

    def write(file, data):
        if written:
            return real(file, data[:written])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sinks.os, "write", write)


@pytest.mark.parametrize("written", [0, 5])
def test_a_full_disk_costs_one_warning_per_file_and_the_row_is_shown(sinks_of, capsys, monkeypatch, written):
    run = sinks_of(5)
    run.log(1)
    with monkeypatch.context() as patch:
        full_disk(patch, written)
        run.log(2, 3, 4)
    assert len(warnings_of(capsys)) == 1
    run.log(5)  # there is room again
    with monkeypatch.context() as patch:
        full_disk(patch)
        run.row({"outcome": "ok", "loss": float("nan")})
    run.close()
    warned = warnings_of(capsys)
    assert len(warned) == 2 and '{"outcome": "ok", "loss": "nan", "run": "' in warned[1], warned
    assert run.stream.getvalue().count("\n") == 5
    whole = [line for line in run.steps.read_text().splitlines() if line.endswith("}")]
    assert [json.loads(line)["step"] for line in whole] == [1, 5]


def test_a_folder_that_turns_into_a_file_in_mid_run_costs_one_warning(tmp_path, capsys, sinks_of):
    run = sinks_of(4)
    run.log(1)
    shutil.rmtree(run.steps.parent)
    run.steps.parent.write_text("in the way")
    run.log(2, 3, 4)
    run.row({"outcome": "ok"})
    assert len(warnings_of(capsys)) == 1
    assert len(rows(tmp_path / "rows.jsonl")) == 1


def test_a_folder_that_is_removed_in_mid_run_is_made_again(tmp_path, capsys, sinks_of):
    run = sinks_of(2, tmp_path / "deep" / "rows.jsonl")
    run.log(1)
    shutil.rmtree(tmp_path / "deep")
    run.log(2)
    assert [row["step"] for row in rows(run.steps)] == [2]
    assert not warnings_of(capsys)


def test_a_reader_that_leaves_the_pipe_does_not_end_the_run(capsys, sinks_of):
    reader, writer = os.pipe()
    with open(writer, "w") as stream:
        run = sinks_of(3, stream=stream)
        run.log(1)
        os.close(reader)
        run.log(2, 3)
        run.close()
        stream.flush()  # as Python does at exit: what was buffered must not fail again
    assert len(warnings_of(capsys)) == 1
    assert len(rows(run.steps)) == 3


def test_off_a_terminal_a_step_is_a_line(sinks_of):
    run = sinks_of(200, None)
    run.log(7)
    run.step({"step": 8, "ms": 1000.0, "tok_s": 1.0})
    run.step({"step": 9, "loss": 3.0, "first_step_s": 1234.56})
    run.step({"step": 200, "loss": float("nan"), "lr": 0.0, "ms": None})
    run.close()
    assert run.stream.getvalue().splitlines() == [
        "step   7/200  loss 3.2100  lr 0.0003  |g| 1.250  360.1 ms  91'022 tok/s  1 min left",
        "step   8/200  1'000.0 ms  1 tok/s  3 min left",
        "step   9/200  loss 3.0000  1'234.6 s with compilation",
        "step 200/200  loss nan  lr 0",
    ]


def test_neither_torch_nor_wandb_nor_rich_is_imported_unasked(tmp_path):
    code = "import sys\nfrom trainer.logging import Sinks\n"
    code += "s = Sinks('rows.jsonl', total_steps=1)\ns.step({'step': 1})\n"
    code += "s.close()\nprint({'torch', 'wandb', 'trackio', 'tensorboard', 'rich'} & set(sys.modules))"
    assert python(code, tmp_path).out.splitlines()[-1] == "set()"


def records(path):
    """Those of a W&B log: a header of 7 bytes, then records in blocks of 32 KiB, as LevelDB writes them."""
    from wandb.proto.wandb_internal_pb2 import Record

    data = path.read_bytes()
    at = 7
    part = b""
    while at + 7 <= len(data):
        if (left := 2**15 - at % 2**15) < 7:  # no header fits: the block ends in zeros
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        part = part + data[at + 7 : at + 7 + size]
        at = at + 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(part)
            part = b""


def logged(folder):
    """(run, its logged steps as dicts) of every offline W&B run in `folder`."""
    found = []
    for path in sorted(folder.glob("offline-run-*/*.wandb")):
        run = None
        steps = []
        for record in records(path):
            run = record.run if record.WhichOneof("record_type") == "run" else run
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                steps.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
        found.append((run, steps))
    return found


def tables(folder):
    """(name, {"columns": [...], "data": [[...], ...]}) of every table in the history of the runs in `folder`."""
    names = [(key[: -len("/path")], step[key]) for _, steps in logged(folder) for step in steps for key in step
             if key.endswith("/path")]  # fmt: skip
    return [(name, json.loads(next(folder.glob(f"*/files/{path}")).read_text())) for name, path in names]


OFFLINE = """
from trainer.logging import Sinks
from trainer.trackers import TrackerOptions
options = TrackerOptions(("wandb",), "offline", "group", "name", ["tag"], ids={"wandb": "abcd1234"})
run = Sinks("out/rows.jsonl", options, {"width": 64, "dtype": float, "hf_token": "sesame-1",
            "nested": {"api_key": "sesame-2", "tokens": 8}, "loss": "full"}, 0, 2, 1)
for k in (1, 2):
    run.step({"step": k, "tokens": 64 * k, "loss": float("nan"), "ms": None})
run.row({"outcome": "ok", "loss": float("inf"), "password": "sesame-3", "mfu": None, "width": 64, "loss_kind": "full",
         "flags": {"width": 64}, "step_ms": 5.0})
run.close()
"""


@pytest.mark.long
def test_wandb_offline_leaves_a_run_beside_the_rows_without_secrets(tmp_path):
    pytest.importorskip("wandb")
    # the flag overrides WANDB_MODE; a key in the environment is nobody's business
    done = python(OFFLINE, tmp_path, WANDB_MODE="online", WANDB_API_KEY="sesame-4" + "x" * 32, WANDB_SILENT="true")
    assert "warning: " not in done.err, done.err
    (folder,) = (tmp_path / "out" / "wandb").glob("offline-run-*")
    (log,) = folder.glob("*.wandb")
    assert b"width" in log.read_bytes()
    assert len(rows(tmp_path / "out" / "rows.jsonl")) == 1
    ((run, steps),) = logged(tmp_path / "out" / "wandb")
    assert (run.display_name, run.run_group, [*run.tags]) == ("name", "group", ["tag"])
    assert [(step["_step"], step["step"], step["tokens"]) for step in steps] == [(1, 1, 64), (2, 2, 128)]
    assert not any("ms" in step for step in steps)
    assert (run.run_id, run.resume, run.job_type) == ("abcd1234", True, "train")
    assert folder.name.endswith("-abcd1234")
    axes = {each.metric.name or each.metric.glob_name: each.metric.step_metric
            for each in records(log) if each.WhichOneof("record_type") == "metric"}  # fmt: skip
    assert axes == {"step": "", "tokens": "", "*": "step"} | dict.fromkeys(
        ("loss", "eval_loss", "eval_bpb", "eval_ppl"), "tokens")  # fmt: skip
    summary = {}
    for each in records(log):
        summary |= {item.key: json.loads(item.value_json) for item in each.summary.update if item.key}
    summary = {name: value for name, value in summary.items() if name[0] != "_" and name not in ("step", "tokens")}
    # Neither nulls nor the config again; "loss" is a figure here, and a setting there.
    name = rows(tmp_path / "out/rows.jsonl")[0]["run"]
    assert summary == {"outcome": "ok", "loss": "inf", "step_ms": 5.0, "run": name}
    for path in (path for path in tmp_path.rglob("*") if path.is_file()):
        assert b"sesame" not in path.read_bytes(), path
    for word in (sys.executable, str(REPO), f"{tmp_path}/out", os.uname().nodename):  # more in test_privacy.py
        assert not re.search(rb"(?<!\w)%b(?!\w)" % re.escape(word.encode()), log.read_bytes()), word
    assert "sesame" not in done.out + done.err


@pytest.mark.long
def test_wandb_online_without_a_login_or_a_server_is_a_warning(tmp_path):
    pytest.importorskip("wandb")
    code = OFFLINE.replace('"offline"', '"online"')
    done = python(code, tmp_path, WANDB_BASE_URL="http://127.0.0.1:9", WANDB_SILENT="true")
    warned = [line for line in done.err.splitlines() if line.startswith("warning: ")]
    assert len(warned) == 1 and warned[0].startswith("warning: wandb: "), done.err
    assert len(rows(tmp_path / "out" / "rows.jsonl")) == 1


class FakeWandb:
    """W&B that does what was asked of it until `breaks` is called."""

    def __init__(self, breaks):
        self.breaks, self.logged, self.axes, self.id, self.starting_step = breaks, [], {}, "new", 0
        known = {"init_timeout": 0, "console": ""}
        self.Settings = type("Settings", (), {"model_fields": known, "__init__": FakeWandb.settings})
        self.summary = SimpleNamespace(update=lambda row: self.do("summary"))
        self.disabled = False
        self.dir = "wandb/run/files"

    def settings(self, **given):
        assert given.keys() <= {"init_timeout", "console"}, given  # an older W&B refuses names that it does not know
        assert given.get("init_timeout", 20) <= 20

    def do(self, name):
        if name == self.breaks:
            raise RuntimeError(f"{name} is broken\nin two lines")

    def setup(self, settings):
        self.do("setup")

    def init(self, mode, **kwargs):
        assert mode == "online"
        self.do("init")
        self.named = kwargs
        return self

    def log(self, stats, step=None):
        self.do("log")
        self.logged.append((step, stats))

    def define_metric(self, name, step_metric):
        self.do("define_metric")
        self.axes[name] = step_metric

    def Table(self, columns, data, allow_mixed_types):
        assert allow_mixed_types
        self.do("Table")
        return columns, data

    def finish(self):
        self.do("finish")


def test_the_final_lines_group_numbers_and_own_up_to_what_is_unknown():
    row = {"outcome": "ok", "loss": 3.21, "tok_s": 728177.6, "tok_s_rank": 91022.2, "n": 20, "compile_s": 35.12,
           "peak_alloc_mib": 14550.2, "peak_reserved_mib": 15012.0, "first_step_peak_mib": 14600.0, "step_ms": 1119.04,
           "step_ms_min": 1118.0, "step_ms_max": 1123.5, "mfu": 50.03, "mfu_palm": 53.74, "hfu": None,
           "peak_flops": 989e12}  # fmt: skip
    assert final_lines(row) == [
        "outcome  ok, loss 3.2100",
        "memory   14'550 MiB allocated, 15'012 MiB reserved, 14'600 MiB in step 1",
        "step     1'119.0 ms median of 20 steps [1'118.0-1'123.5], compile 35.1 s",
        "speed    728'178 tok/s, 91'022 tok/s/rank",
        "MFU, %   50.0 causal, 53.7 PaLM, n/a HFU of 989 TFLOP/s",
    ]
    row = {"outcome": "OOM fwd", "peak_rss_mib": 421.6, "peak_rss_note": "since the start", "loss": "nan"}
    assert final_lines(row) == [
        "outcome  OOM fwd, loss nan",
        "memory   422 MiB resident, since the start",
        "step     n/a ms median of 0 steps [n/a-n/a]",
        "speed    n/a tok/s, n/a tok/s/rank",
        "MFU, %   n/a: no peak is known of this device",
    ]
    told = final_lines(row | {"device": "CPU A"})
    assert told == final_lines(row)[:-1], "a CPU has no line about what it lacks"
    assert final_lines(row | {"device": "GPU A"})[-1] == "MFU, %   n/a: no peak is known of GPU A"
    *_, why = final_lines({"outcome": "ok", "n": 0, "loss": 1.0}, warmup=3)
    assert why.startswith("step     n/a, as are speed and MFU: no step was timed; the first 3")
    assert "--steps" in why


def test_the_whole_setting_is_in_a_file_beside_the_steps(tmp_path):
    run = Sinks(tmp_path / "rows.jsonl")
    path = run.write_settings({"depth": 4, "lr": float("inf"), "api_key": "sesame"})
    assert path == run.steps.with_suffix(".settings.json")
    assert json.loads(path.read_text()) == {"depth": 4, "lr": "inf"}
    assert Sinks(None).write_settings({}) is None
    assert Sinks(tmp_path / "rows.jsonl", rank=1).write_settings({}) is None
