"""`./launch.sh test versions`, and what a torch that was never run is told.

    pytest tests/test_versions.py        # some seconds; installs nothing
"""

import sys
from pathlib import Path

import pytest
import torch
import versions
from running import ROOT, rows_of
from torch.torch_version import TorchVersion

from trainer.checks import TORCH

OUTCOMES = """
import pytest

def test_passes():
    pass

def test_fails():
    assert False

@pytest.mark.skip(reason="needs a moon")
def test_skips():
    pass

@pytest.mark.slow
def test_is_left_out():
    pass
"""


@pytest.fixture
def command(monkeypatch, tmp_path):
    """command(*argv) -> exit code of the command, in a repository of one part, whose tests have three outcomes."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_three.py").write_text(OUTCOMES)
    for name in ("constraints.txt", "pyproject.toml"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    monkeypatch.setattr(versions, "ROOT", tmp_path)
    monkeypatch.setattr(versions, "PARTS", {"one": "test_three"})
    about = dict(commit="a" * 40, dirty=False, torch="2.14.1", environment_gb=5.0)
    monkeypatch.setattr(versions, "environment", lambda python: dict(about))

    def call(*argv):
        words = ["versions.py", *argv, "--results", str(tmp_path / "rows.jsonl")]
        monkeypatch.setattr(sys, "argv", words)
        return versions.main()

    return call


@pytest.fixture
def installed(monkeypatch):
    """Each version is this one."""
    monkeypatch.setattr(versions, "interpreter", lambda version, pinned: Path(sys.executable))


def only_row(folder):
    (row,) = rows_of(folder / "rows.jsonl")
    return row


def test_outcomes_are_counted_named_and_given_a_reason(command, installed, tmp_path, capfd):
    assert command("2.14.1") == 1
    row = only_row(tmp_path)
    assert (row["passed"], row["failed"], row["skipped"]) == (1, 1, 1)
    assert row["failures"] == ["tests.test_three::test_fails"]
    assert row["reasons"] == {"needs a moon": 1}
    assert row["outcome"] == "failed: 1 tests"
    assert "tests.test_three::test_fails; needs a moon: 1" in capfd.readouterr().out.splitlines()[-1]


def test_a_part_that_is_out_of_time_has_failed(command, installed, tmp_path):
    assert command("2.14.1", "--limit", "0") == 1
    row = only_row(tmp_path)
    assert (row["passed"], row["failed"]) == (0, 1)
    assert row["failures"][0].endswith("one: crashed, or out of time")


def refuse(python, *words):
    raise versions.Unavailable("No matching distribution found for torch==9.9.9")


def test_a_version_that_cannot_be_installed_has_not_passed(command, monkeypatch, tmp_path, capfd):
    monkeypatch.setattr(versions, "pip", refuse)
    assert command("9.9.9") == 1
    row = only_row(tmp_path)
    assert row["outcome"] == "failed: not installed: No matching distribution found for torch==9.9.9"
    assert row["outcome"] in capfd.readouterr().out.splitlines()[-1]
    assert row["passed"] == 0
    assert not (tmp_path / ".venv-9.9.9").exists()


def test_an_environment_that_was_not_made_by_the_command_is_left_alone(command, tmp_path):
    (tmp_path / ".venv-9.9.9").mkdir()
    (tmp_path / ".venv-9.9.9/work.txt").write_text("mine")
    assert command("9.9.9") == 1
    assert only_row(tmp_path)["outcome"].endswith(".venv-9.9.9 was not made by this command: move it away")
    assert (tmp_path / ".venv-9.9.9/work.txt").read_text() == "mine"


def test_what_is_said_to_have_run_are_the_versions_whose_last_row_has_no_failure():
    last = {row["setting"]["version"]: row for row in rows_of(ROOT / "results/versions.jsonl")}
    passed = [name for name, row in last.items() if row["outcome"] == "ok" and not row["failed"] and not row["dirty"]]
    assert sorted(passed) == sorted(TORCH) == sorted(last)


def test_a_torch_that_was_never_run_is_told_in_one_line(monkeypatch, trains):
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.99.0+cu999"))
    done = trains("--steps", 1)
    (line,) = done.err.splitlines()
    assert line.startswith("warning: torch 2.99.0+cu999 was never run with this program")
    assert line.endswith("./launch.sh test versions 2.99.0 tests it")
