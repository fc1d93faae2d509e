"""lab/benchmarks/trl.py: a row of steps in turns, where both learn the same, and its table; without TRL one line.

    pytest lab/tests/test_trl.py        # some 25 s
"""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from lab.benchmarks import trl
from lab.report import published, tables

TURNS = "--pad pack fixed --compile none --steps 2 --batch 2 --only-turns --results"
needs_trl = pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is absent: pip install -e '.[trl]'")
CHANGED = """
import sys
from lab.benchmarks import trl
made = trl.trainer_of
def other(folder, lines, *args):
    for line in lines[1:]:
        line["messages"][-1]["content"] = "No."
    return made(folder, lines[::-1], *args)
trl.trainer_of = other
sys.exit(trl.main(sys.argv[1:]))
"""


def run(*words):
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, cwd=trl.first_step.ROOT,
                          env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))})  # fmt: skip


@needs_trl
@pytest.mark.long
def test_both_learn_the_same_in_turns_and_the_row_has_a_table(tmp_path):
    done = run("-m", "lab.benchmarks.trl", *TURNS.split(), str(tmp_path / "rows.jsonl"))
    assert done.returncode == 0, done.stderr[-2000:]
    packed, fixed = rows = published.read([tmp_path / "rows.jsonl"])
    for row in rows:
        assert row["first_loss"] == pytest.approx(row["first_loss_trl"], rel=1e-5) and row["n"] == 2
        assert row["ratio"] > 0 and row["ratio_cpu"] > 0 and row["trl"]
    assert fixed["loss_apart"] < 1e-5, "the updates differ"
    assert packed["tok_cpu_s"] > fixed["tok_cpu_s"], "rows that are packed hold more to learn"
    _, columns = tables.trl(rows)
    assert sorted(dict(columns)["--pad"]) == ["fixed", "pack"]


@needs_trl
@pytest.mark.long
def test_a_trainer_that_learns_something_else_is_not_measured(tmp_path):
    words = TURNS.replace("pack fixed", "fixed").split()
    done = run("-c", CHANGED, *words, str(tmp_path / "rows.jsonl"))
    assert done.returncode == 1, done.stderr[-2000:]
    assert "--pad fixed: the two have other tokens to learn" in done.stderr
    assert not (tmp_path / "rows.jsonl").read_text()


def test_without_trl_one_line_says_what_to_install(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="2"):
        trl.main(["--results", str(tmp_path / "rows.jsonl")])
    assert "trl is not installed; pip install -e '.[trl]'" in capsys.readouterr().err


def test_chats_are_of_one_or_two_answers_and_fit_a_row():
    made = trl.chats()
    assert len(made) == trl.CHATS == len({json.dumps(chat) for chat in made})
    sizes = [sum(len(turn["content"]) + len(turn["role"]) + 4 for turn in chat["messages"]) for chat in made]
    assert max(sizes) < trl.SEQLEN and {len(chat["messages"]) for chat in made} == {2, 4}
