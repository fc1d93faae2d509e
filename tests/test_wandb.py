"""W&B as users expect it: a resumed run goes on in W&B, too, and settings/sweep.yaml is what W&B's own agent can run.

    pytest tests/test_wandb.py         # about 15 s, no network: W&B is a stand-in, but for its agent's own functions
"""

import io
import itertools
import sys

import pytest
from running import ROOT, rows_of
from saved import state_of
from test_sinks import STEP, FakeWandb, warnings_of

from trainer import config, step_costs
from trainer.logging import Sinks, log_tables

pytestmark = pytest.mark.usefixtures("isolated")


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
    return state_of(step).get("wandb")


@pytest.mark.long
def test_a_resumed_run_goes_on_in_the_same_run_of_wandb(train, trains, wandb, monkeypatch):
    monkeypatch.setattr(step_costs, "device_peak", lambda name: 1e9)
    saving = ["--save", "a", "--wandb", "online", "--log-every", 1]
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


def test_a_checkpoint_without_an_id_and_one_from_elsewhere_begin_a_run_in_wandb(trains, wandb):
    trains("--save", "a", "--steps", 2)
    assert told("a/step-00000002") is None
    online = ["--wandb", "online", "--steps"]
    trains("--save", "a", *online, 3)
    assert "id" not in wandb.named
    assert told("a/step-00000003") == "new"
    wandb.id = "newer"
    trains("--save", "b", "--resume", "a", *online, 4)
    assert "id" not in wandb.named
    assert told("b/step-00000004") == "newer"
    trains("--save", "b", "--resume", "a", *online, 5)
    assert wandb.named["id"] == "newer"


def test_wandb_that_fails_on_resume_costs_a_warning_and_the_id_is_kept(trains, wandb):
    trains("--save", "a", "--wandb", "online", "--steps", 2)
    wandb.breaks = "init"
    done = trains("--save", "a", "--wandb", "online", "--steps", 3)
    assert done.err.count("warning: wandb: ") == 1 and told("a/step-00000003") == "new"


def test_the_id_that_an_agent_gives_goes_before_that_of_the_checkpoint(trains, wandb):
    argv = "--save", "a", "--wandb", "online", "--steps"
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
    run = Sinks(tmp_path / "rows.jsonl", "online", total_steps=3, stream=io.StringIO())
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


@pytest.mark.parametrize("breaks", ["import", "init", "disabled", "Table", "log", "finish", None])
def test_wandb_tables_that_break_anywhere_warn_once(tmp_path, capsys, broken, breaks):
    fake = broken(breaks)
    tables = {"a": [{"k": 1}], "b": [{"k": 2}]}
    log_tables(tables, tmp_path / "rows.jsonl", "online", "group")
    assert len(warnings_of(capsys)) == (breaks is not None)
    if breaks in (None, "finish"):
        assert fake.logged == [(None, {"a": (["k"], [[1]])}), (None, {"b": (["k"], [[2]])})]


@pytest.mark.parametrize(("given", "told", "name"), [
    (None, "seqlen n=2", "seqlen n=2"), ("mine", "seqlen n=2", "mine"), (None, "", None), (None, "n" * 200, "n" * 128),
])
def test_a_run_without_a_name_is_called_what_the_sweep_calls_it(environ, wandb, given, told, name):
    environ(SWEEP_NAME=told)
    Sinks(None, "online", name=given, tags=["mine"], stream=io.StringIO()).close()
    assert wandb.named["name"] == name
    assert wandb.named["job_type"] == ("setting" if told else "train")
    assert wandb.named["tags"] == ["mine", *[told.partition(" n=")[0][:64]] * bool(told)]
