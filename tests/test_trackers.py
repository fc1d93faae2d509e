"""Trackers as users expect them: a resumed run continues in each, none ends a run, and settings/sweep.yaml is what
W&B's own agent can run.

    pytest tests/test_trackers.py      # about 30 s, no network: W&B is a stand-in, but for its agent's own functions;
                                       # TensorBoard and trackio are the real ones, where they are installed
"""

import errno
import io
import itertools
import json
import os
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from forked import Job
from running import ROOT, TINY, ran, read, rows_of
from saved import state_of
from test_sinks import STEP, FakeWandb, logged, warnings_of

from trainer import config, step_costs, trackers
from trainer.logging import Sinks, log_tables
from trainer.trackers import TrackerOptions

pytestmark = pytest.mark.usefixtures("isolated")
ONLINE = "--tracker", "wandb", "--wandb-mode", "online"


def online(**more):
    return TrackerOptions(("wandb",), "online", **more)


@pytest.fixture
def broken(monkeypatch):
    """broken(where): a W&B that breaks there, or nowhere."""

    def make(breaks):
        fake = FakeWandb(breaks)
        fake.disabled = breaks == "disabled"  # what a login that timed out leaves
        monkeypatch.setitem(sys.modules, "wandb", None if breaks == "import" else fake)
        return fake

    return make


@pytest.fixture
def wandb(broken):
    return broken(None)


def told(step):
    """The id in W&B that a saved step holds, or None."""
    return state_of(step)["trackers"].get("wandb")


@pytest.mark.long
def test_a_resumed_run_goes_on_in_the_same_run_of_wandb(train, trains, wandb, monkeypatch):
    monkeypatch.setattr(step_costs, "device_peak", lambda name: 1e9)
    saving = ["--save", "a", *ONLINE, "--log-every", 1]
    assert train(*saving, "--steps", 2).code == 0 and "id" not in wandb.named and told("a/step-00000002") == "new"
    assert wandb.axes["*"] == "step"
    assert wandb.axes["loss"] == wandb.axes["eval_loss"] == "tokens"
    step, history = wandb.logged[-1]
    assert step == history["step"] == 2 and history["tokens"] == 2 * 2 * 16 and history["mfu"] > 0
    assert history["peak_rss_mib"] > 0
    assert {"loss", "lr", "grad_norm", "ms", "tok_s"} <= history.keys()
    assert None not in history.values()

    trains("--save", "a", "--steps", 3)  # in between without W&B: the id is kept
    assert told("a/step-00000003") == "new"
    wandb.logged, wandb.starting_step = [], 6  # W&B has five steps: the run was killed after its last save
    again = trains(*saving, "--steps", 7)
    assert (wandb.named["id"], wandb.named["resume"]) == ("new", "allow")
    assert [step for step, _ in wandb.logged] == [6, 7]
    assert again.logged == [4, 5, 6, 7]
    assert told("a/step-00000007") == "new"


@pytest.mark.long
def test_a_checkpoint_without_an_id_and_one_from_elsewhere_begin_a_run_in_wandb(trains, wandb):
    trains("--save", "a", "--steps", 2)
    assert told("a/step-00000002") is None
    online = [*ONLINE, "--steps"]
    trains("--save", "a", *online, 3)
    assert "id" not in wandb.named
    assert told("a/step-00000003") == "new"
    wandb.id = "newer"
    trains("--save", "b", "--resume", "a", *online, 4)
    assert "id" not in wandb.named
    assert told("b/step-00000004") == "newer"
    trains("--save", "b", "--resume", "a", *online, 5)
    assert wandb.named["id"] == "newer"


@pytest.mark.long
def test_wandb_that_fails_on_resume_costs_a_warning_and_the_id_is_kept(trains, wandb):
    trains("--save", "a", *ONLINE, "--steps", 2)
    wandb.breaks = "init"
    done = trains("--save", "a", *ONLINE, "--steps", 3)
    assert done.err.count("warning: wandb: ") == 1 and told("a/step-00000003") == "new"


@pytest.mark.long
def test_the_id_that_an_agent_gives_goes_before_that_of_the_checkpoint(trains, wandb):
    argv = "--save", "a", *ONLINE, "--steps"
    trains(*argv, 2)
    trains(*argv, 3, WANDB_RUN_ID="agents")
    assert "id" not in wandb.named


def sweep_yaml():
    pytest.importorskip("wandb")
    return pytest.importorskip("yaml").safe_load((ROOT / "settings/sweep.yaml").read_text())


def command(sweep, values):
    """What the agent would start for these values of the parameters: made by its own functions."""
    utils = pytest.importorskip("wandb.sdk.launch.sweeps.utils")
    made = utils.create_sweep_command_args(dict(args={name: dict(value=value) for name, value in values.items()}))
    made |= dict(env=["/usr/bin/env"], interpreter=[sys.executable], program=[sweep["program"]])
    words = [made.get(word[2:-1], [word]) if word.startswith("${") else [word] for word in sweep["command"]]
    return [*itertools.chain(*words)]


@pytest.mark.long
def test_every_value_of_the_sweep_is_a_flag_of_main():
    sweep = sweep_yaml()
    choices = {name: each.get("values") or [each["min"], each["max"]] for name, each in sweep["parameters"].items()}
    for i in range(max(map(len, choices.values()))):  # each value of each parameter once, not with each of the others
        values = {name: each[i % len(each)] for name, each in choices.items()}
        words = command(sweep, values)
        c = config.parse(words[words.index(sweep["program"]) + 1 :])
        assert {name: getattr(c, name) for name in choices} == values
    assert c.eval_every and sweep["metric"]["name"] == "eval_loss" and (ROOT / sweep["program"]).is_file()
    assert command(sweep, dict(remat_core=True, reshard=False))[-1] == "--remat_core"  # as its comment says


@pytest.mark.parametrize("breaks", ["import", "setup", "init", "disabled", "define_metric", "log", "summary", "finish",
                                    None])  # fmt: skip
def test_wandb_that_breaks_anywhere_warns_once_and_the_run_goes_on(tmp_path, capsys, broken, breaks):
    fake = broken(breaks)
    run = Sinks(tmp_path / "rows.jsonl", online(), total_steps=3, stream=io.StringIO())
    for k in (1, 2, 3):
        run.step({"step": k, **STEP})
    run.row({"outcome": "ok"})
    run.close()
    run.close()
    warned = warnings_of(capsys)
    assert len(warned) == (breaks is not None)
    assert all(line.startswith("warning: wandb: ") for line in warned)
    assert len(rows_of(run.steps)) == 3
    assert len(rows_of(tmp_path / "rows.jsonl")) == 1
    assert run.stream.getvalue().count("\n") == 3
    if breaks in (None, "summary", "finish"):
        assert fake.logged == [(k, {"step": k, **STEP}) for k in (1, 2, 3)]


@pytest.mark.parametrize("place", ["mine", "mine/deeper"])
def test_a_folder_of_wandb_without_the_right_to_write_costs_one_warning(place, tmp_path, capsys, wandb, monkeypatch):
    """W&B itself takes the system's folder of temporary files, which is emptied."""
    closed = tmp_path.resolve() / "mine"
    closed.mkdir()
    access, makedirs = os.access, os.makedirs

    def denied(path, *args, **kwargs):
        if closed in Path(path).resolve().parents:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        makedirs(path, *args, **kwargs)

    monkeypatch.setattr(os, "makedirs", denied)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).resolve() != closed and access(path, mode))
    monkeypatch.setenv("WANDB_DIR", str(tmp_path / place))
    run = Sinks(tmp_path / "rows.jsonl", online(), total_steps=1, stream=io.StringIO())
    run.step({"step": 1, **STEP})
    run.row({"outcome": "ok"})
    run.close()
    (warning,) = warnings_of(capsys)
    assert warning.startswith("warning: wandb: PermissionError: ") and warning.endswith("; the run goes on")
    assert place in warning
    assert not hasattr(wandb, "named")
    assert len(rows_of(run.steps)) == len(rows_of(tmp_path / "rows.jsonl")) == 1


@pytest.mark.parametrize("breaks", ["import", "init", "disabled", "Table", "log", "finish", None])
def test_wandb_tables_that_break_anywhere_warn_once(tmp_path, capsys, broken, breaks):
    fake = broken(breaks)
    tables = {"a": [{"k": 1}], "b": [{"k": 2}]}
    log_tables(tables, tmp_path / "rows.jsonl", online(group="group"))
    assert len(warnings_of(capsys)) == (breaks is not None)
    if breaks in (None, "finish"):
        assert fake.logged == [(None, {"a": (["k"], [[1]])}), (None, {"b": (["k"], [[2]])})]


@pytest.mark.parametrize(("given", "told", "name"), [
    (None, "seqlen n=2", "seqlen n=2"), ("mine", "seqlen n=2", "mine"), (None, "", None), (None, "n" * 200, "n" * 128),
])
def test_a_run_without_a_name_is_called_what_the_sweep_calls_it(environ, wandb, given, told, name):
    environ(SWEEP_NAME=told)
    Sinks(None, online(name=given, tags=["mine"]), stream=io.StringIO()).close()
    assert wandb.named["name"] == name
    assert wandb.named["job_type"] == ("setting" if told else "train")
    assert wandb.named["tags"] == ["mine", *[told.partition(" n=")[0][:64]] * bool(told)]


class Odd:
    """A tracker that fails in one of its methods, or never returns from it."""

    id, place, first_step = "id", "nowhere", 0

    def __init__(self, fails: str, how: str):
        self.fails, self.how, self.taken = fails, how, []

    def act(self, method, *values):
        if method == self.fails and self.how == "hangs":
            threading.Event().wait(30)
        elif method == self.fails:
            raise SystemError(f"{method} is broken")
        self.taken.append((method, *values))
        return self

    def __call__(self, *_):
        return self.act("start")

    def log(self, step, values):
        self.act("log", step)

    def summarize(self, row):
        self.act("summarize")

    def finish(self):
        self.act("finish")


@pytest.mark.parametrize(("fails", "how"), [
    ("start", "raises"), ("log", "raises"), ("summarize", "raises"), ("finish", "raises"), ("start", "hangs"),
    ("log", "hangs"), ("summarize", "hangs"), ("finish", "hangs"), ("never", ""),
])  # fmt: skip
def test_a_tracker_that_fails_or_hangs_costs_one_warning_and_others_go_on(tmp_path, capsys, monkeypatch, fails, how):
    odd, sound = Odd(fails, how), Odd("never", "")
    monkeypatch.setattr(trackers, "KINDS", dict(trackio=odd, tensorboard=sound))
    for limit in ("START_S", "LOG_S", "FINISH_S"):
        monkeypatch.setattr(trackers, limit, 0.5)
    begin = time.monotonic()
    run = Sinks(tmp_path / "rows.jsonl", TrackerOptions(("trackio", "tensorboard", "trackio")), stream=io.StringIO())
    for k in (1, 2):
        run.step({"step": k, **STEP})
    run.row({"outcome": "ok"})
    run.close()
    assert time.monotonic() - begin < 5, "it was waited for"
    assert sound.taken == [("start",), ("log", 1), ("log", 2), ("summarize",), ("finish",)]
    warned = warnings_of(capsys)
    assert len(warned) == (fails != "never")
    assert all(line.startswith("warning: trackio: ") and line.endswith("; the run goes on") for line in warned), warned
    assert len(rows_of(run.steps)) == 2 and len(rows_of(tmp_path / "rows.jsonl")) == 1


def test_trackers_that_hang_at_the_end_are_waited_for_together(tmp_path, capsys, monkeypatch):
    """torchrun kills 30 s after a signal."""
    assert trackers.FINISH_S <= 10
    monkeypatch.setattr(trackers, "KINDS", {kind: Odd("finish", "hangs") for kind in trackers.KINDS})
    monkeypatch.setattr(trackers, "FINISH_S", 1)
    run = Sinks(tmp_path / "rows.jsonl", TrackerOptions(tuple(trackers.KINDS)), stream=io.StringIO())
    begin = time.monotonic()
    run.close()
    assert time.monotonic() - begin < 2
    assert len(warnings_of(capsys)) == 3


LEFT = """
import atexit, sys, time
from trainer import trackers
class Hangs:
    id, place, first_step = "id", "nowhere", 0
    def __init__(self, *_):
        atexit.register(print, "waited for")
    def finish(self):
        time.sleep(float(sys.argv[1]))
trackers.KINDS, trackers.FINISH_S = dict(wandb=Hangs), 0.5
running = trackers.Trackers(trackers.TrackerOptions(("wandb",)), {}, None, "a")
running.finish()
print("done", end="")
trackers.leave(7)
"""


@pytest.mark.parametrize(("seconds", "said"), [("60", "done"), ("0", "donewaited for\n")])
def test_a_process_whose_tracker_hangs_ends_with_its_code_and_without_what_that_does_at_exit(seconds, said):
    """W&B would wait again, for 13 s."""
    done = ran(sys.executable, "-c", LEFT, seconds, cwd=ROOT)
    assert (done.code, done.out) == (7, said)
    assert done.err.count("no answer for 0.5 s; the run goes on") == (seconds == "60")


@pytest.mark.long
@pytest.mark.parametrize("slow", ["init", "finish"])
def test_a_slow_trackio_swallows_no_line_of_the_run_but_its_own(trains, monkeypatch, slow):
    """What mutes trackio must not mute the main thread, which goes on without it."""
    release = threading.Event()

    def act(name):
        print("a line of trackio")
        if name == slow:
            release.wait(60)
            print("another line of trackio")

    def init(**_):
        act("init")
        return SimpleNamespace(config={}, log=lambda *_, **__: None, finish=lambda: act("finish"))

    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(init=init))
    monkeypatch.setattr(trackers, "START_S", 0.5)
    monkeypatch.setattr(trackers, "FINISH_S", 0.5)
    before = sys.stdout
    try:
        done = trains("--tracker", "trackio", "--log-every", 1)
    finally:
        release.set()
        for thread in threading.enumerate():
            if thread.name == "tracker":
                thread.join()
    assert sys.stdout is before
    assert "no answer for 0.5" in done.err  # seconds, by the clock: 0.51 on a busy machine
    heads = [line.split()[0] for line in done.out.splitlines() if line.strip()]
    assert {"attention:", "row", "outcome", "draw"} <= {*heads} and heads.count("step") >= 6, done.out
    assert "line of trackio" not in done.out


@pytest.mark.long
def test_a_slow_tracker_is_no_hang_of_a_run_that_is_done(tmp_path):
    """Rank 0 waits for its tracker and rank 1 for rank 0, both for longer than --timeout."""
    flags = [*TINY, "--tracker", "tensorboard", "--timeout", "2", "--results", tmp_path / "rows.jsonl"]
    job = Job(2, flags, tmp_path / "log", TRACKER_ENDS_IN="5")
    assert job.wait(60) == [0, 0], (tmp_path / "log").read_text()
    assert "no progress" not in (tmp_path / "log").read_text()


def test_wandb_that_the_environment_disables_is_off_without_a_word(tmp_path, capsys, environ, wandb):
    environ(WANDB_MODE="disabled")
    Sinks(tmp_path / "rows.jsonl", TrackerOptions(("wandb",)), stream=io.StringIO()).close()
    assert not warnings_of(capsys) and not hasattr(wandb, "named")
    Sinks(tmp_path / "rows.jsonl", online(), stream=io.StringIO()).close()
    assert not warnings_of(capsys) and wandb.named, "the flag goes before the environment"


def test_a_tracker_that_is_not_installed_says_how_to_install_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", None)
    Sinks(tmp_path / "rows.jsonl", TrackerOptions(("trackio",))).close()
    [line] = warnings_of(capsys)
    assert "pip install -e '.[trackio]'" in line


def events(folder):
    """{tag: [(step, value)]} of a run in TensorBoard's files, as TensorBoard shows it, and its hyperparameters."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    read = EventAccumulator(str(folder))
    read.Reload()
    scalars = {tag: [(e.step, round(e.value, 4)) for e in read.Scalars(tag)] for tag in read.Tags()["scalars"]}
    content = read.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    return scalars, dict(HParamsPluginData.FromString(content).session_start_info.hparams)


def test_tensorboard_has_each_step_at_once_and_a_resumed_run_continues_in_its_folder(tmp_path):
    pytest.importorskip("tensorboard")
    options = TrackerOptions(("tensorboard",), group="mine", name="a/b")
    how = dict(config=dict(width=64, data="stdlib", tags=["a"], none=None), stream=io.StringIO())
    run = Sinks(tmp_path / "rows.jsonl", options, **how)
    for k in (1, 2, 3):
        run.step({"step": k, "loss": 4.0 - k, "lr": None, "note": "text"})
    folder = tmp_path / "tensorboard/mine/a-b" / run.run
    scalars, settings = events(folder)  # not closed: a kill loses nothing
    assert scalars == {"loss": [(1, 3.0), (2, 2.0), (3, 1.0)]}
    assert settings["width"].number_value == 64 and settings["data"].string_value == "stdlib"
    assert "none" not in settings
    assert os.uname().nodename not in str([*folder.iterdir()])
    assert run.trackers.ids == dict(tensorboard=f"mine/a-b/{run.run}")
    # Killed after step 3, saved after step 1.
    again = Sinks(tmp_path / "rows.jsonl", replace(options, ids=run.trackers.ids), **how)
    for k in (2, 3):
        again.step({"step": k, "loss": 0.5})
    again.row({"outcome": "ok", "step_ms": 5.0, "mfu": None})
    again.close()
    scalars, _ = events(folder)
    assert scalars == {"loss": [(1, 3.0), (2, 0.5), (3, 0.5)], "row/step_ms": [(0, 5.0)]}
    for odd in ("/etc", "../../a"):  # of a stranger's checkpoint
        Sinks(tmp_path / "rows.jsonl", replace(options, ids=dict(tensorboard=odd)), **how).close()
    assert {path.name for path in tmp_path.iterdir()} == {"rows.jsonl", "rows.steps", "tensorboard"}


TRACKIO = """
import io, json, sys
from trainer.logging import Sinks
from trainer.trackers import TrackerOptions
how = dict(config=dict(width=64), stream=io.StringIO())
run = Sinks("rows.jsonl", TrackerOptions(("trackio",), group="mine"), **how)
for k in (1, 2):
    run.step({"step": k, "loss": float("nan") if k == 1 else 2.5})
run.row({"outcome": "ok", "flags": {"width": 64}})
run.close()
again = Sinks("rows.jsonl", TrackerOptions(("trackio",), ids=run.trackers.ids), **how)
for k in (2, 3):
    again.step({"step": k, "loss": 1.5})
again.close()
from trackio.sqlite_storage import SQLiteStorage
logs = SQLiteStorage.get_logs("simple-fsdp-trainer", run.trackers.ids["trackio"])
print(json.dumps([[log["step"], log.get("loss"), log.get("row/outcome")] for log in logs]))
print(run.trackers.places)
"""


@pytest.mark.long
def test_trackio_has_each_step_and_a_resumed_run_continues_it(tmp_path):
    pytest.importorskip("trackio")
    env = dict(TRACKIO_DIR=str(tmp_path / "trackio"), HF_HUB_OFFLINE="1")
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = ran(sys.executable, "-c", TRACKIO, cwd=tmp_path, **env)
    assert done.code == 0 and "warning: " not in done.err, done.err
    logs, places = done.out.splitlines()  # nothing of trackio's own
    (first, second, row, third) = json.loads(logs)
    assert first[0] == 1 and second == [2, 2.5, None] and row[1:] == [None, "ok"] and third == [3, 1.5, None]
    assert places == "{'trackio': 'trackio show --project simple-fsdp-trainer'}"


@pytest.mark.long
def test_a_run_that_a_signal_or_its_watchdog_ends_has_all_rows_in_wandb(tmp_path):
    """Neither leaves W&B a moment at the end of the process, which loses what it has held back: 11 to 16 s of rows."""
    pytest.importorskip("wandb")
    offline = "--tracker", "wandb", "--wandb-mode", "offline", "--log-every", "1", "--timeout", "4"
    for kind, codes in (("term", [143]), ("hang", [7])):
        folder = tmp_path / kind
        folder.mkdir()
        flags = [*TINY, *offline, "--steps", 9, "--results", folder / "rows.jsonl"]
        job = Job(1, flags, folder / "log", cwd=folder, FAULT=f"0:5:data:{kind}", ANSWER_S="1", WANDB_SILENT="true")
        assert job.wait(60) == codes, (folder / "log").read_text()
        _, steps = read(folder / "rows.jsonl")
        ((_, history),) = logged(folder / "wandb")
        numbers = [step["step"] for step in steps]
        assert numbers == [1, 2, 3, 4, 5][: 5 - (kind == "hang")]
        assert [step["step"] for step in history] == numbers
