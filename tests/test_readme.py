"""The README is true: its file list is the tree, its line counts are current, the budgets are kept."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROWS = re.findall(r"^\| `([\w./]+)` \| ([\d']+) \| (.+) \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
BUDGETS = {"simple_fsdp.py": 250, "main.py": 250, "launch.sh": 150}


def lines(path: str) -> int:
    return (ROOT / path).read_text().count("\n")


@pytest.mark.parametrize(("path", "count"), [row[:2] for row in ROWS])
def test_readme_line_counts_are_current(path, count):
    assert int(count.replace("'", "")) == lines(path)


def test_readme_lists_every_source_file_once():
    tracked = subprocess.check_output(["git", "-C", str(ROOT), "ls-files", "*.py", "*.sh"], text=True).split()
    sources = {path for path in tracked if not path.startswith("tests/") and lines(path)}
    assert sorted(row[0] for row in ROWS) == sorted(sources)


@pytest.mark.parametrize("path", BUDGETS)
def test_files_keep_their_budget(path):
    assert lines(path) <= BUDGETS[path]
