"""`./launch.sh test versions`, and what a torch that was never run is told.

    pytest tests/test_versions.py        # some seconds; installs nothing
"""


import torch
from running import ROOT, rows_of
from torch.torch_version import TorchVersion

from trainer.checks import TORCH


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
